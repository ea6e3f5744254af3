-- Citus: replaces statements that Citus rejects by equivalent ones, and allows partitions that span a month.
--
-- Everything here can be executed twice: an earlier release may have been started on the schema in between.

-- The time span of new partitions. On Citus every partition of the six tables consists of one table per shard.
create table if not exists partitioning (
    only_row boolean primary key default true check (only_row),
    unit     text not null check (unit in ('day', 'month'))
);

insert into partitioning (unit) values ('day') on conflict do nothing;

-- Returns true for a table whose rows are in shards of Citus.
create or replace function is_distributed(relation regclass) returns boolean language plpgsql stable as $$
declare
    found boolean;
begin
    if to_regclass('pg_catalog.pg_dist_partition') is null then
        return false;
    end if;
    execute 'select exists (select 1 from pg_dist_partition where logicalrelid = $1)' into found using relation;
    return found;
end
$$;

-- Returns the disk space of tables with their indexes and, on Citus, of all their shards.
create or replace function table_sizes(relations regclass[]) returns table (relation regclass, bytes bigint)
language plpgsql as $$
begin
    if to_regclass('pg_catalog.pg_dist_shard') is null then
        return query select r, pg_total_relation_size(r) from unnest(relations) r;
    else
        return query execute '
            select r, (pg_total_relation_size(r) + coalesce(shards.bytes, 0))::bigint
            from unnest($1) r
            left join (
                select s.logicalrelid, sum(z.size) as bytes
                from citus_shard_sizes() z join pg_dist_shard s on s.shardid = z.shard_id group by 1
            ) shards on shards.logicalrelid = r' using relations;
    end if;
end
$$;

-- Returns the day on which a UUIDv7 was created.
create or replace function run_day(run_id uuid) returns date language sql immutable as $$
    select (to_timestamp(('x' || left(replace(run_id::text, '-', ''), 12))::bit(48)::bigint / 1000)
        at time zone 'utc')::date
$$;

-- The partitions with a time span: first day, and the day after the last one.
create or replace view run_partitions as
select i.inhparent::regclass as parent, c.oid::regclass as partition,
    run_day(substring(pg_get_expr(c.relpartbound, c.oid) from 'FROM \(''([0-9a-f-]{36})''\)')::uuid) as first_day,
    run_day(substring(pg_get_expr(c.relpartbound, c.oid) from 'TO \(''([0-9a-f-]{36})''\)')::uuid) as next_day
from pg_inherits i
join pg_class c on c.oid = i.inhrelid
where i.inhparent = any (array['events', 'mod_calls', 'mod_logs', 'actions', 'attention', 'run_columns']::regclass[])
    and pg_get_expr(c.relpartbound, c.oid) <> 'DEFAULT';

-- The distinct time spans with the size of their partitions in bytes. `day` is the first day.
create or replace view partition_days as
select p.first_day as day, sum(s.bytes)::bigint as bytes, p.next_day
from run_partitions p
join table_sizes(array(select partition from run_partitions)) s on s.relation = p.partition
group by p.first_day, p.next_day;

-- Creates the missing partitions of `days` days from `first_day` on; returns their number. A partition whose rows are
-- already in the default partition is not created. Several servers may call it at the same time.
create or replace function make_partitions(first_day date, days integer) returns integer language plpgsql as $$
declare
    parent_name text;
    partition text;
    day date;
    until date;
    made integer := 0;
begin
    perform pg_advisory_xact_lock(7237120550101);
    for day in select first_day + number from generate_series(0, days - 1) number loop
        foreach parent_name in array array['events', 'mod_calls', 'mod_logs', 'actions', 'attention', 'run_columns'] loop
            partition := parent_name || '_' || to_char(day, 'YYYYMMDD');
            continue when to_regclass(partition) is not null or exists (
                select 1 from run_partitions p
                where p.parent = parent_name::regclass and p.first_day <= day and day < p.next_day);
            until := day + 1;
            if (select unit from partitioning) = 'month' then
                select least(date_trunc('month', day) + interval '1 month', min(p.first_day))::date into until
                from run_partitions p where p.parent = parent_name::regclass and p.first_day > day;
            end if;
            begin
                execute format('create table %I partition of %I for values from (%L) to (%L)', partition, parent_name,
                    first_run_id(day), first_run_id(until));
                made := made + 1;
            exception when check_violation then
                raise notice 'rows of % stay in the default partition of %', day, parent_name;
            end;
        end loop;
    end loop;
    return made;
end
$$;

-- Merges the partitions of a month, and the rows of that month in the default partition, into one partition; returns the
-- number of replaced partitions. It rewrites the rows, and only works on tables that are not distributed yet.
create or replace function merge_partitions(month date) returns integer language plpgsql as $$
declare
    from_day date := date_trunc('month', month);
    until date := date_trunc('month', month) + interval '1 month';
    parent_name text;
    merged text;
    old text;
    replaced integer := 0;
begin
    perform pg_advisory_xact_lock(7237120550101);
    foreach parent_name in array array['events', 'mod_calls', 'mod_logs', 'actions', 'attention', 'run_columns'] loop
        continue when exists (
            select 1 from run_partitions p
            where p.parent = parent_name::regclass and p.first_day = from_day and p.next_day = until);
        merged := parent_name || '_merged';
        execute format('create table %I (like %I including all)', merged, parent_name);
        for old in
            select p.partition from run_partitions p
            where p.parent = parent_name::regclass and p.first_day >= from_day and p.next_day <= until
        loop
            execute format('alter table %I detach partition %s', parent_name, old);
            execute format('insert into %I select * from %s', merged, old);
            execute format('drop table %s', old);
            replaced := replaced + 1;
        end loop;
        execute format('insert into %I select * from %I where run_id >= $1 and run_id < $2', merged,
            parent_name || '_default') using first_run_id(from_day), first_run_id(until);
        execute format('delete from %I where run_id >= $1 and run_id < $2', parent_name || '_default')
            using first_run_id(from_day), first_run_id(until);
        execute format('alter table %I rename to %I', merged, parent_name || '_' || to_char(from_day, 'YYYYMMDD'));
        execute format('alter table %I attach partition %I for values from (%L) to (%L)', parent_name,
            parent_name || '_' || to_char(from_day, 'YYYYMMDD'), first_run_id(from_day), first_run_id(until));
    end loop;
    return replaced;
end
$$;

-- Removes the runs of the days from `from_day` to the day before `until` with all their data; returns their number. If one
-- of them is running, it removes nothing and returns null. Partitions within these days are dropped. Remove one span per
-- transaction, because each partition costs a lock.
create or replace function drop_days(from_day date, until date) returns bigint language plpgsql as $$
declare
    first_id uuid := first_run_id(from_day);
    next_id uuid := first_run_id(until);
    parent_name text;
    old record;
    removed bigint;
begin
    -- the lock of make_partitions
    perform pg_advisory_xact_lock(7237120550101);
    if exists (select 1 from runs where run_id >= first_id and run_id < next_id and status = 'running') then
        return null;
    end if;
    delete from responses where run_id >= first_id and run_id < next_id;
    delete from run_keys where run_id >= first_id and run_id < next_id;
    delete from runs where run_id >= first_id and run_id < next_id;
    get diagnostics removed = row_count;
    foreach parent_name in array array['events', 'mod_calls', 'mod_logs', 'actions', 'attention', 'run_columns'] loop
        for old in
            select p.partition::text as name, p.first_day >= from_day and p.next_day <= until as whole
            from run_partitions p
            where p.parent = parent_name::regclass and p.first_day < until and p.next_day > from_day
            union all
            select parent_name || '_default', false
        loop
            if old.whole then
                execute format('drop table %s', old.name);
            else
                execute format('delete from %s where run_id >= $1 and run_id < $2', old.name) using first_id, next_id;
            end if;
        end loop;
    end loop;
    return removed;
end
$$;

create or replace function drop_day(day date) returns bigint language sql as $$ select drop_days(day, day + 1) $$;

-- Returns the first 100 characters of the model names of all runs, up to `max_names` names. Citus rejects a recursive query
-- without a run_id; in other databases the recursive query reads the index from name to name instead of all runs.
create or replace function model_names(max_names integer) returns setof text language plpgsql as $$
begin
    if is_distributed('runs') then
        return query select distinct left(model, 100) from runs where model is not null limit max_names;
    else
        return query with recursive names (model, number) as (
            (select left(r.model, 100), 1 from runs r where left(r.model, 100) is not null
                order by left(r.model, 100) limit 1)
            union all
            select (select left(r.model, 100) from runs r where left(r.model, 100) > names.model
                order by left(r.model, 100) limit 1), names.number + 1
            from names where names.model is not null and names.number < max_names
        ) select names.model from names where names.model is not null;
    end if;
end
$$;
