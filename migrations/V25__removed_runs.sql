-- Runs that were removed. A server may still have records of them, in a batch or in its spool file, and must not store these
-- again. Entries are kept for 30 days.
create table removed_runs (
    run_id     uuid primary key,
    removed_at timestamptz not null default now()
);

-- Days whose runs the retention removed because of their age, from `first_day` to the day before `next_day`.
create table removed_days (
    first_day  date not null,
    next_day   date not null,
    removed_at timestamptz not null default now(),
    primary key (first_day, next_day)
);

-- Keeps runs from being removed until the transaction ends. Returns those that do not exist, and whether they were removed.
-- Locks one run after the other, because Citus locks rows of one shard per statement. Give the ids in ascending order. The
-- connections of Thunder plan each statement again, which would take most of the time here.
create function lock_runs(run_ids uuid[]) returns table (missing_run uuid, is_removed boolean)
language plpgsql set plan_cache_mode = 'auto' as $$
begin
    foreach missing_run in array run_ids loop
        perform 1 from runs r where r.run_id = missing_run for key share;
        if not found then
            -- A new statement sees the entry of the transaction that the lock has waited for.
            is_removed := exists (select 1 from removed_runs r where r.run_id = missing_run)
                or exists (
                    select 1 from removed_days d
                    where run_day(missing_run) >= d.first_day and run_day(missing_run) < d.next_day);
            return next;
        end if;
    end loop;
end
$$;

-- Locks the runs of some days in the order of `lock_runs`, before they are removed. Citus cannot lock rows of several shards with
-- one statement; there, the removal may end with a deadlock error, and is repeated later.
create function lock_days(from_day date, until date) returns void language plpgsql as $$
begin
    if not is_distributed('runs') then
        perform 1 from runs where run_id >= first_run_id(from_day) and run_id < first_run_id(until) order by run_id for update;
    end if;
end
$$;
