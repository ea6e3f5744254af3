-- Users, sessions and metadata of runs, and the indexes with which every filter of the run list is quick among a million runs.
--
-- No index has a column that changes all the time while a run is running: those updates stay in place.

set local maintenance_work_mem = '256MB';

drop index if exists runs_mods;

alter table runs
    -- as the client sent it
    add column metadata      json,
    -- `session=…` and `metadata.KEY=…`, for the index
    add column labels        text[] not null default '{}',
    -- counts of finished runs, for the indexes
    add column final_tokens  integer generated always as (case when status <> 'running' then completion_tokens end) stored,
    add column final_actions integer generated always as (case when status <> 'running' then actions end) stored;

create index runs_labels on runs using gin (labels) where labels <> '{}';
create index runs_user on runs (left(user_label, 100), run_id) where user_label is not null;
create index runs_surface on runs (surface, run_id);
create index runs_tokens on runs (final_tokens, run_id);
create index runs_actions on runs (final_actions, run_id);
create index runs_error_count on runs (errors, run_id) where errors > 0;
create index runs_backtracked on runs (backtracked, run_id) where backtracked > 0;
create index runs_forced on runs (forced, run_id) where forced > 0;

-- The mods of a run as one text, as far as the index of runs by their mods has it.
create function mod_set(mods text[]) returns text language sql immutable parallel safe as $$
    select left(array_to_string(mods, E'\x01'), 200)
$$;

create index runs_mod_sets on runs (mod_set(mods), run_id) where mods <> '{}';

-- Returns up to `max_sets` sets of mods that runs have. Without Citus the index is read from one set to the next.
create function mod_sets(max_sets integer) returns setof text language plpgsql stable as $$
declare
    next text := '';
    found integer := 0;
begin
    if is_distributed('runs') then
        return query select distinct mod_set(mods) from runs where mods <> '{}' limit max_sets;
        return;
    end if;
    loop
        select mod_set(mods) into next from runs where mods <> '{}' and mod_set(mods) > next order by mod_set(mods) limit 1;
        exit when next is null;
        return next next;
        found := found + 1;
        exit when found >= max_sets;
    end loop;
end
$$;

-- True for a run recorded more than an hour away from its start: the time in its id does not tell when it started.
create function is_displaced(run_id uuid, created_at timestamptz) returns boolean language sql immutable parallel safe as $$
    select abs(('x' || left(replace(run_id::text, '-', ''), 12))::bit(48)::bigint - extract(epoch from created_at) * 1000)
        > 3600000
$$;

create index runs_displaced on runs (run_id) where is_displaced(run_id, created_at);
-- run ids find the others
drop index if exists runs_created;

-- Parts of error messages, where the database has pg_trgm and lets us use it.
do $$
begin
    create extension if not exists pg_trgm;
    create index runs_error_text on runs using gin ((error_text || ' ' || coalesce(message, '')) gin_trgm_ops)
        where errors > 0 or error_text <> '' or message is not null;
exception when others then
    raise notice 'error messages have no index of what they contain: %', sqlerrm;
end
$$;

analyze runs;
