-- The tenant that owns a run; null for runs recorded without API keys or before this version.
alter table runs add column owner text;

-- The run list of one tenant, newest first.
create index runs_owner on runs (owner, run_id);

-- Responses of keys without a name had a short label as their owner, which is not a tenant.
update responses set owner = null where owner ~ '^key-[0-9a-f]{6}$';
