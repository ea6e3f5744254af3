-- Experiments: grids of runs. Without API keys, an experiment has no owner.
create table experiments (
    experiment_id uuid primary key,
    created_at    timestamptz not null,
    owner         text,
    name          text not null,
    definition    json not null,
    cells         integer not null,
    -- The server that runs or ran it.
    server_id     uuid not null,
    state         text not null check (state in ('running', 'done', 'cancelled'))
);

create index experiments_owner on experiments (owner, experiment_id);

-- The cells that have been started. `run_id` is null for a cell whose run could not be started, which `error` explains.
create table experiment_cells (
    experiment_id uuid not null references experiments on delete cascade,
    cell          integer not null,
    run_id        uuid,
    score         real,
    ended         boolean not null,
    error         text,
    primary key (experiment_id, cell)
);
