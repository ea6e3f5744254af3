-- The deletion that a run belongs to, a UUIDv7 with its time; null for other runs. Readers ignore runs with a deletion, and
-- maintenance removes them when the deletion can no longer be undone.
alter table runs add column deletion uuid;

create index runs_deletion on runs (deletion) where deletion is not null;

-- Without statistics, the planner would expect that few runs have no deletion.
analyze runs;

-- Filters of the run list that a tenant has named. Without API keys, the owner is the empty text, which is no tenant.
create table saved_filters (
    owner      text not null,
    name       text not null,
    q          text not null,
    created_at timestamptz not null,
    primary key (owner, name)
);
