//! The statements that insert rows with `unnest`: columns as arrays, one round trip per table.

/// Expands to a statement for new rows, and one that skips existing rows and takes twice the time.
macro_rules! insert_statements {
    ($insert:literal) => {
        [$insert, concat!($insert, " on conflict do nothing")]
    };
}

/// Statements that insert events.
pub const INSERT_EVENTS: [&str; 2] = insert_statements!(
    "
    insert into events (run_id, sequence_order, event_type, step, created_at, prompt_length, tokens_so_far_len, max_steps,
        input_text, sampled_token, token_text, added_tokens, added_token_count, forced, position, elapsed_us, logprob,
        rank, entropy, measured, details, top_tokens)
    select r.run_id, r.sequence_order, r.event_type, r.step, r.created_at, r.prompt_length, r.tokens_so_far_len,
        r.max_steps, r.input_text, r.sampled_token, r.token_text, r.added_tokens::integer[], r.added_token_count,
        r.forced, r.position, r.elapsed_us, r.logprob, r.rank, r.entropy, r.measured, r.details::json, r.top_tokens::json
    from unnest($1::uuid[], $2::integer[], $3::text[], $4::integer[], $5::timestamptz[], $6::integer[], $7::integer[],
        $8::integer[], $9::text[], $10::integer[], $11::text[], $12::text[], $13::integer[], $14::boolean[],
        $15::integer[], $16::bigint[], $17::real[], $18::integer[], $19::real[], $20::bytea[], $21::text[], $22::text[])
        as r (run_id, sequence_order, event_type, step, created_at, prompt_length, tokens_so_far_len, max_steps,
            input_text, sampled_token, token_text, added_tokens, added_token_count, forced, position, elapsed_us,
            logprob, rank, entropy, measured, details, top_tokens)"
);

/// Statements that insert mod calls.
pub const INSERT_CALLS: [&str; 2] = insert_statements!(
    "
    insert into mod_calls (run_id, call_index, event_sequence_order, mod_name, event_type, step, created_at,
        execution_time_ms, exception_occurred, exception_message, exception_traceback)
    select * from unnest($1::uuid[], $2::integer[], $3::integer[], $4::text[], $5::text[], $6::integer[],
        $7::timestamptz[], $8::double precision[], $9::boolean[], $10::text[], $11::text[])"
);

/// Statements that insert log lines.
pub const INSERT_LOGS: [&str; 2] = insert_statements!(
    "
    insert into mod_logs (run_id, log_index, mod_call_sequence, mod_name, log_message, log_level, created_at)
    select * from unnest($1::uuid[], $2::integer[], $3::integer[], $4::text[], $5::text[], $6::text[], $7::timestamptz[])"
);

/// Statements that insert actions.
pub const INSERT_ACTIONS: [&str; 2] = insert_statements!(
    "
    insert into actions (run_id, action_index, mod_call_sequence, action_type, action_order, created_at, details,
        new_prompt, new_length, adjusted_max_steps, token_count, tokens_preview, backtrack_steps, backtrack_token_count,
        logits_shape, temperature, has_tool_calls, tool_calls, error_message)
    select r.run_id, r.action_index, r.mod_call_sequence, r.action_type, r.action_order, r.created_at, r.details::json,
        r.new_prompt, r.new_length, r.adjusted_max_steps, r.token_count, r.tokens_preview, r.backtrack_steps,
        r.backtrack_token_count, r.logits_shape, r.temperature, r.has_tool_calls, r.tool_calls::json, r.error_message
    from unnest($1::uuid[], $2::integer[], $3::integer[], $4::text[], $5::integer[], $6::timestamptz[], $7::text[],
        $8::text[], $9::integer[], $10::integer[], $11::integer[], $12::text[], $13::integer[], $14::integer[],
        $15::text[], $16::double precision[], $17::boolean[], $18::text[], $19::text[])
        as r (run_id, action_index, mod_call_sequence, action_type, action_order, created_at, details, new_prompt,
            new_length, adjusted_max_steps, token_count, tokens_preview, backtrack_steps, backtrack_token_count,
            logits_shape, temperature, has_tool_calls, tool_calls, error_message)"
);

/// Statements that insert attention.
pub const INSERT_ATTENTION: [&str; 2] = insert_statements!(
    "
    insert into attention (run_id, sequence_order, row_len, heads, layer_ids, t0, t1, head_rows)
    select r.run_id, r.sequence_order, r.row_len, r.heads, r.layer_ids::integer[], r.t0, r.t1, r.head_rows
    from unnest($1::uuid[], $2::integer[], $3::integer[], $4::integer[], $5::text[], $6::bytea[], $7::bytea[],
        $8::bytea[]) as r (run_id, sequence_order, row_len, heads, layer_ids, t0, t1, head_rows)"
);
