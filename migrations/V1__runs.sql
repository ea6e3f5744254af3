-- Runs and everything that happened in them.
--
-- run_id is a UUIDv7 made when a run begins. request_id is the client's text; run_keys alone holds the promise that it
-- is unique, so that every other table can be partitioned by time and distributed by run_id.
--
-- Children are keyed by natural numbers counted within their run. Links between them are checked before anything is
-- written and are not foreign keys: those would cost four fifths of the write rate and keep partitions from being
-- dropped. `damaged_links` below finds what should not exist.

create table run_keys (
    request_id  text primary key,
    run_id      uuid not null unique,
    -- SHA-256 of an ingested document in canonical form: the same document posted twice is one run
    fingerprint bytea
);

create table runs (
    run_id            uuid primary key,
    request_id        text not null,
    created_at        timestamptz not null,
    completed_at      timestamptz,
    status            text not null,
    finish_reason     text,
    message           text,
    surface           text not null,
    model             text,
    user_label        text,
    mods              text[] not null,
    max_tokens        integer,
    temperature       double precision,
    seed              bigint,
    mod_text          text,
    prompt_preview    text not null,
    output_preview    text not null,
    prompt_tokens     integer not null,
    completion_tokens integer not null,
    cached_tokens     integer not null,
    events            integer not null,
    backtracked       integer not null,
    forced            integer not null,
    actions           integer not null,
    errors            integer not null,
    -- the first errors as text, for the run list's filter
    error_text        text not null,
    first_token_us    bigint,
    prompt_us         bigint,
    generation_us     bigint,
    has_attention     boolean not null,
    -- at most 96 bytes: −ln p × 32 of the most surprising token of each group
    surprise_strip    bytea not null,
    -- the Thunder that generates it; holds an advisory lock as long as it lives
    server_id         uuid,
    version           integer not null default 1,
    -- words of prompt and answer, in no particular language
    search            tsvector not null
) with (fillfactor = 70); -- a running run's counters are updated four times a second: room to do it in place

create index runs_search on runs using gin (search);
create index runs_running on runs (run_id) where status = 'running';

create table events (
    run_id            uuid not null,
    sequence_order    integer not null,
    event_type        text not null,
    step              integer not null,
    created_at        timestamptz,
    prompt_length     integer,
    tokens_so_far_len integer,
    max_steps         integer,
    input_text        text,
    sampled_token     integer,
    token_text        text,
    added_tokens      integer[],
    added_token_count integer,
    forced            boolean,
    -- measured by the engine; of several added tokens these are the first one's numbers
    position          integer,
    elapsed_us        bigint,
    logprob           real,
    rank              integer,
    entropy           real,
    -- all that our engine measured, alternatives included, in the coding of store::measured; null for foreign events
    measured          bytea,
    -- json and not jsonb, here and below: these documents are kept as they were given, and jsonb loses the order of
    -- keys, repeated keys, and how numbers are written. Queries still reach inside: details ->> 'name'.
    -- For an event of our own engine: what is rare, the prompt and the stop string.
    details           json,
    top_tokens        json,
    primary key (run_id, sequence_order)
) partition by range (run_id);

create table mod_calls (
    run_id               uuid not null,
    call_index           integer not null,
    event_sequence_order integer not null,
    mod_name             text not null,
    event_type           text not null,
    step                 integer not null,
    created_at           timestamptz,
    execution_time_ms    double precision,
    exception_occurred   boolean not null,
    exception_message    text,
    exception_traceback  text,
    primary key (run_id, call_index)
) partition by range (run_id);

create table mod_logs (
    run_id            uuid not null,
    log_index         integer not null,
    mod_call_sequence integer not null,
    mod_name          text not null,
    log_message       text not null,
    log_level         text not null,
    created_at        timestamptz,
    primary key (run_id, log_index)
) partition by range (run_id);

create table actions (
    run_id                uuid not null,
    action_index          integer not null,
    mod_call_sequence     integer not null,
    action_type           text not null,
    action_order          integer not null,
    created_at            timestamptz,
    details               json,
    new_prompt            text,
    new_length            integer,
    adjusted_max_steps    integer,
    token_count           integer,
    tokens_preview        text,
    backtrack_steps       integer,
    backtrack_token_count integer,
    logits_shape          text,
    temperature           double precision,
    has_tool_calls        boolean,
    tool_calls            json,
    error_message         text,
    primary key (run_id, action_index)
) partition by range (run_id);

-- One row per captured step, in the coding of trace::attention.
create table attention (
    run_id         uuid not null,
    sequence_order integer not null,
    row_len        integer not null,
    heads          integer not null,
    layer_ids      integer[] not null,
    t0             bytea not null,
    t1             bytea not null,
    primary key (run_id, sequence_order)
) partition by range (run_id);

-- Compressed already: PostgreSQL shall not try again.
alter table attention alter column t0 set storage external;
alter table attention alter column t1 set storage external;

-- The replay's first paint (trace::columns, zstd), stored once when a run ends.
create table run_columns (
    run_id  uuid not null,
    columns bytea not null,
    primary key (run_id)
) partition by range (run_id);

alter table run_columns alter column columns set storage external;

-- Catch ids that are not of our time: clocks that are wrong, days nobody made a partition for.
create table events_default partition of events default;
create table mod_calls_default partition of mod_calls default;
create table mod_logs_default partition of mod_logs default;
create table actions_default partition of actions default;
create table attention_default partition of attention default;
create table run_columns_default partition of run_columns default;

-- The smallest UUIDv7 of a day.
create function first_run_id(day date) returns uuid language sql immutable as $$
    select (lpad(to_hex((extract(epoch from day) * 1000)::bigint), 12, '0') || '00000000000000000000')::uuid
$$;

-- Makes the partitions of `days` days beginning with `first_day`, where they are missing; returns how many it made.
-- A day whose rows lie in the default partition already is left there. Several servers may call it at once.
create function make_partitions(first_day date, days integer) returns integer language plpgsql as $$
declare
    parent text;
    partition text;
    made integer := 0;
begin
    perform pg_advisory_xact_lock(7237120550101);
    for day in 0 .. days - 1 loop
        foreach parent in array array['events', 'mod_calls', 'mod_logs', 'actions', 'attention', 'run_columns'] loop
            partition := parent || '_' || to_char(first_day + day, 'YYYYMMDD');
            continue when to_regclass(partition) is not null;
            begin
                execute format('create table %I partition of %I for values from (%L) to (%L)', partition, parent,
                    first_run_id(first_day + day), first_run_id(first_day + day + 1));
                made := made + 1;
            exception when check_violation then
                raise notice 'rows of % stay in the default partition of %', first_day + day, parent;
            end;
        end loop;
    end loop;
    return made;
end
$$;

-- Rows that belong to nothing, by table; empty in a sound database. Reads everything: for tests and for doubt.
create view damaged_links as
select 'events' as child, e.run_id, count(*) as rows
    from events e where not exists (select from runs r where r.run_id = e.run_id) group by e.run_id
union all
select 'mod_calls', c.run_id, count(*) from mod_calls c
    where not exists (select from events e where e.run_id = c.run_id and e.sequence_order = c.event_sequence_order)
    group by c.run_id
union all
select 'mod_logs', l.run_id, count(*) from mod_logs l
    where not exists (select from mod_calls c where c.run_id = l.run_id and c.call_index = l.mod_call_sequence)
    group by l.run_id
union all
select 'actions', a.run_id, count(*) from actions a
    where not exists (select from mod_calls c where c.run_id = a.run_id and c.call_index = a.mod_call_sequence)
    group by a.run_id
union all
select 'attention', t.run_id, count(*) from attention t
    where not exists (select from events e where e.run_id = t.run_id and e.sequence_order = t.sequence_order)
    group by t.run_id
union all
select 'run_columns', k.run_id, count(*) from run_columns k
    where not exists (select from runs r where r.run_id = k.run_id) group by k.run_id
union all
select 'runs', r.run_id, 1 from runs r where not exists (select from run_keys k where k.run_id = r.run_id);
