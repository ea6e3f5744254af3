-- Thunder servers that run on this database.
create table servers (
    server_id  uuid primary key,
    -- address at which the other servers reach it; null if it announces none
    url        text,
    -- names of the models that are loaded or can be loaded on demand
    models     text[] not null,
    started_at timestamptz not null default clock_timestamp(),
    -- incremented with every heartbeat; servers compare counts, not the clocks of different machines
    heartbeat  bigint not null default 0,
    -- time of the last heartbeat by the database's clock, for display
    seen_at    timestamptz not null default clock_timestamp()
);

-- Secrets shared by all servers on the database, e.g. the key that signs login cookies.
create table shared_secrets (
    name   text primary key,
    secret bytea not null
);
