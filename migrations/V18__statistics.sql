-- Hourly counts of ended runs, for statistics. Each row counts the runs of an owner and a model in one hour: all of them
-- (mod ''), or those with a mod. The hour is that in which the server created the run's id. Runs without an owner or a model
-- have ''.
create table run_stats (
    hour              timestamptz not null,
    owner             text not null,
    model             text not null,
    mod               text not null,
    runs              bigint not null,
    failed            bigint not null,
    cancelled         bigint not null,
    interrupted       bigint not null,
    finish_stop       bigint not null,
    finish_length     bigint not null,
    finish_tool_calls bigint not null,
    prompt_tokens     bigint not null,
    completion_tokens bigint not null,
    cached_tokens     bigint not null,
    -- tokens of runs with a measured duration, and the sum of these durations
    timed_tokens      bigint not null,
    generation_us     bigint not null,
    backtracked       bigint not null,
    forced            bigint not null,
    actions           bigint not null,
    errors            bigint not null,
    primary key (hour, owner, model, mod)
);

-- Histogram of the times from a request to its first token. A bucket is floor(4 * log2(microseconds)).
create table first_token_stats (
    hour   timestamptz not null,
    owner  text not null,
    model  text not null,
    mod    text not null,
    bucket smallint not null,
    runs   bigint not null,
    primary key (hour, owner, model, mod, bucket)
);

-- Days in UTC whose runs are counted in the tables above, with the number of these runs.
create table run_stats_days (
    day  date primary key,
    runs bigint not null
);
