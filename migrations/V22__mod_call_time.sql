-- Durations of a run's mod calls by mod, as parallel arrays: name of the mod, number of calls with a measured duration, and
-- the sum and the maximum of these durations in microseconds. Null for runs of earlier versions that are not measured yet.
alter table runs
    add column mod_call_names  text[],
    add column mod_call_counts bigint[],
    add column mod_call_us     bigint[],
    add column mod_call_max_us bigint[];

-- Maintenance measures these runs from their calls. The index is empty afterwards.
create index runs_unmeasured_calls on runs (run_id) where mod_call_names is null;

-- Hourly sums of these durations, for statistics. Keys as in run_stats, without the mod '' of all runs.
create table mod_call_stats (
    hour     timestamptz not null,
    owner    text not null,
    model    text not null,
    mod      text not null,
    calls    bigint not null,
    total_us bigint not null,
    max_us   bigint not null,
    primary key (hour, owner, model, mod)
);

-- True if the calls of a day's runs are counted in mod_call_stats.
alter table run_stats_days add column has_mod_calls boolean not null default false;
