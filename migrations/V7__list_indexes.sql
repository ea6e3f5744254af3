-- Filters of the run list that few runs match. Each index has its runs in the order of the list, newest first; what changes
-- while a run goes on is in none of them, but for errors, backtracks and forced tokens, which are rare.

set local maintenance_work_mem = '256MB';

create index runs_status on runs (status, run_id);
-- the one before finds running runs, too
drop index runs_running;

-- not the whole name: an entry has its limit, and a foreign run may name its model at any length
create index runs_model on runs (left(model, 100), run_id);

create index runs_errors on runs (run_id) where errors > 0 or error_text <> '' or message is not null;

create index runs_changed on runs (run_id) where backtracked > 0 or forced > 0;

create index runs_mods on runs (run_id) where mods <> '{}';

-- a run's id is of the time when it came here, which for a foreign run may be long after it was made
create index runs_created on runs using brin (created_at) with (autosummarize = on);

-- What request ids contain, where the database has pg_trgm and lets us use it: without it all ids are looked through.
do $$
begin
    create extension if not exists pg_trgm;
    create index run_keys_contain on run_keys using gin (request_id gin_trgm_ops);
exception when others then
    raise notice 'request ids have no index of what they contain: %', sqlerrm;
end
$$;

analyze runs;
analyze run_keys;
