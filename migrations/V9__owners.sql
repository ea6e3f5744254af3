-- The tenant that a run belongs to; null for runs recorded without API keys and before this version.
alter table runs add column owner text;

-- The run list of one tenant, newest first.
create index runs_owner on runs (owner, run_id);

-- Responses of keys without a name had a short label as owner, which names no tenant.
update responses set owner = null where owner ~ '^key-[0-9a-f]{6}$';
