-- Days can be dropped.

-- The days whose rows lie in partitions of their own, with all their bytes.
create view partition_days as
select to_date(right(c.relname, 8), 'YYYYMMDD') as day, sum(pg_total_relation_size(c.oid))::bigint as bytes
from pg_inherits i
join pg_class c on c.oid = i.inhrelid
where i.inhparent = any (array['events', 'mod_calls', 'mod_logs', 'actions', 'attention', 'run_columns']::regclass[])
    and c.relname ~ '_[0-9]{8}$'
group by 1;

-- Removes the runs of a day and everything of them; returns how many, or null, and removes nothing, while one of them
-- is running. One day a transaction: each partition costs a lock.
create function drop_day(day date) returns bigint language plpgsql as $$
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
