-- Runs of a busy server, numbers `first_run` to `last_run` of `runs_to_make`, a second apart. Words follow Zipf's law.
insert into runs (run_id, request_id, created_at, completed_at, status, finish_reason, message, surface, model, user_label,
    mods, max_tokens, temperature, seed, prompt_preview, output_preview, prompt_tokens, completion_tokens, cached_tokens,
    events, backtracked, forced, actions, errors, error_text, first_token_us, prompt_us, generation_us, has_attention,
    surprise_strip, labels, search)
select
    (lpad(to_hex(1767225600000 + n * 1000), 12, '0') || '7000' || '8000' || lpad(to_hex(n), 12, '0'))::uuid,
    'req-' || md5(n::text), created, created + interval '2 seconds', status,
    case status when 'done' then 'stop' when 'failed' then 'error' when 'cancelled' then 'cancelled' end,
    case when status = 'failed' then (array['the prompt does not fit the context window', 'the mod story raised',
        'out of memory'])[1 + n % 3] end,
    (array['openai', 'openai', 'openai', 'llama_server', 'attention', 'websocket', 'ingest'])[1 + (draws[1] * 7)::int % 7],
    case when draws[2] < 0.9 then (array['qwen3-8b', 'qwen3-4b', 'llama-3.1-8b', 'gemma-3-4b', 'mistral-7b'])[1 + (draws[2] * draws[2] * 5)::int % 5]
        when draws[2] < 0.9999 then 'fine-tune-' || (draws[2] * 1000000)::int % 60 end,
    'user-' || floor(power(2000, draws[3])),
    case when draws[4] < 0.6 then '{}' when draws[4] < 0.8 then array['no-refusal'] when draws[4] < 0.9 then array['json-guard', 'no-refusal']
        when draws[4] < 0.95 then array['story'] when draws[4] < 0.9501 then array['rare-mod'] when n < runs_to_make / 10 then array['old-mod']
        else array['think-budget'] end,
    1024, 0.7, n, left(text, 300), right(text, 300), (40 + 2000 * draws[5])::int, (5 * power(400, draws[6]))::int, 0, 300,
    case when draws[7] < 0.03 then 4 else 0 end, case when draws[7] > 0.98 then 7 else 0 end, case when draws[4] < 0.6 then 0 else 12 end,
    case when draws[8] < 0.02 then 1 else 0 end,
    case when draws[8] < 0.02 then (array['KeyError: ''token''', 'ValueError: negative', 'TimeoutError'])[1 + n % 3] else '' end,
    20000, 15000, 1900000, draws[9] < 0.05, decode(repeat('10', 96), 'hex'),
    case when n % 3 = 0 then array['session=s-' || n % 5000, 'metadata.env=' || case when n % 7 = 0 then 'test' else 'prod' end] else '{}' end,
    to_tsvector('simple', text)
from (
    -- some runs were created long before their ids
    select n, case when n % 1000 = 5 then timestamptz '2024-05-05' else '2026-01-01' end + n * interval '1 second' as created,
        array(select random() from generate_series(1, 9 + n * 0)) as draws,
        case when random() < 0.96 then 'done' when random() < 0.5 then 'failed' when random() < 0.8 then 'cancelled' else 'interrupted' end as status,
        (select string_agg(case when w = 30 and n % 20 = 0 then 'tell me a story' when w = 31 and n % 100000 = 7 then 'needle in a haystack'
            else 'w' || floor(power(30000, random())) end, ' ')
            from generate_series(1, 60 + n * 0) w) as text
    from generate_series(first_run, last_run) n
) generated;
