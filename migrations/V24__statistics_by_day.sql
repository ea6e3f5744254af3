-- Sums of run_stats, first_token_stats and mod_call_stats by day in UTC, for statistics with a time step of a day. The hour is
-- the first one of the day.
create table run_stats_by_day (like run_stats including all);
create table first_token_stats_by_day (like first_token_stats including all);
create table mod_call_stats_by_day (like mod_call_stats including all);

-- Hours with many runs that are counted in these tables before their day is. Removed when the day is counted.
create table run_stats_hours (
    hour timestamptz primary key,
    runs bigint not null
);

-- Sums the hours of a day, in place of earlier sums.
create function sum_statistics(day date) returns void language plpgsql as $$
declare
    begins timestamptz := day::timestamp at time zone 'utc';
    ends timestamptz := (day + 1)::timestamp at time zone 'utc';
begin
    delete from run_stats_by_day where hour >= begins and hour < ends;
    insert into run_stats_by_day (hour, owner, model, mod, runs, failed, cancelled, interrupted, finish_stop, finish_length,
            finish_tool_calls, prompt_tokens, completion_tokens, cached_tokens, timed_tokens, generation_us, backtracked,
            forced, actions, errors)
        select begins, owner, model, mod, sum(runs), sum(failed), sum(cancelled), sum(interrupted), sum(finish_stop),
            sum(finish_length), sum(finish_tool_calls), sum(prompt_tokens), sum(completion_tokens), sum(cached_tokens),
            sum(timed_tokens), sum(generation_us), sum(backtracked), sum(forced), sum(actions), sum(errors)
        from run_stats where hour >= begins and hour < ends group by owner, model, mod;
    delete from first_token_stats_by_day where hour >= begins and hour < ends;
    insert into first_token_stats_by_day (hour, owner, model, mod, bucket, runs)
        select begins, owner, model, mod, bucket, sum(runs)
        from first_token_stats where hour >= begins and hour < ends group by owner, model, mod, bucket;
    delete from mod_call_stats_by_day where hour >= begins and hour < ends;
    insert into mod_call_stats_by_day (hour, owner, model, mod, calls, total_us, max_us)
        select begins, owner, model, mod, sum(calls), sum(total_us), max(max_us)
        from mod_call_stats where hour >= begins and hour < ends group by owner, model, mod;
end
$$;

do $$
declare
    counted date;
begin
    for counted in select day from run_stats_days loop
        perform sum_statistics(counted);
    end loop;
end
$$;
