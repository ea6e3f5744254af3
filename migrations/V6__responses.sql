-- Responses that a later one can go on from.
create table responses (
    response_id text primary key,
    -- its day decides how long the response is kept; the run itself may not be recorded
    run_id      uuid not null,
    created_at  timestamptz not null,
    -- the label of the key that asked; null without keys
    owner       text,
    -- as it was sent
    response    json not null,
    -- the whole conversation: what it went on from, its input, its output
    items       json not null
);

create index responses_run on responses (run_id);

-- Removes the runs of a day and everything of them; returns how many, or null, and removes nothing, while one of them
-- is running. One day a transaction: each partition costs a lock.
create or replace function drop_day(day date) returns bigint language plpgsql as $$
declare
    first_id uuid := first_run_id(day);
    next_id uuid := first_run_id(day + 1);
    parent text;
    partition text;
    removed bigint;
begin
    -- the lock of make_partitions
    perform pg_advisory_xact_lock(7237120550101);
    if exists (select from runs where run_id >= first_id and run_id < next_id and status = 'running') then
        return null;
    end if;
    delete from responses where run_id >= first_id and run_id < next_id;
    delete from run_keys where run_id >= first_id and run_id < next_id;
    delete from runs where run_id >= first_id and run_id < next_id;
    get diagnostics removed = row_count;
    foreach parent in array array['events', 'mod_calls', 'mod_logs', 'actions', 'attention', 'run_columns'] loop
        partition := parent || '_' || to_char(day, 'YYYYMMDD');
        if to_regclass(partition) is not null then
            execute format('drop table %I', partition);
        else
            execute format('delete from %I where run_id >= $1 and run_id < $2', parent || '_default')
                using first_id, next_id;
        end if;
    end loop;
    return removed;
end
$$;
