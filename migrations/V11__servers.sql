-- Thunder servers that run on this database.
create table servers (
    server_id  uuid primary key,
    -- address at which the other servers reach it; null when it announces none
    url        text,
    -- names of the models that it has loaded or loads on demand
    models     text[] not null,
    started_at timestamptz not null default clock_timestamp(),
    -- grows with every heartbeat; each server watches the counts of the others, so that no two clocks are compared
    heartbeat  bigint not null default 0,
    -- time of the last heartbeat by the database's clock, for people
    seen_at    timestamptz not null default clock_timestamp()
);

-- Secrets that all servers on the database share, such as the one behind the cookies of logged-in browsers.
create table shared_secrets (
    name   text primary key,
    secret bytea not null
);
