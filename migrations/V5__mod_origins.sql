-- Versions of mods that are the server's own files are kept as well, once a run has used them.

alter table mod_versions
    -- whose code it is: uploaded by a client, or a file of a server's own
    add column origin text not null default 'uploaded',
    -- the last day, in UTC, on which a run began with it; null for one that was uploaded
    add column used_on date;

-- Removes the versions of files that no run has used since the oldest that is kept; returns how many.
create function drop_unused_mod_versions() returns bigint language sql as $$
    with removed as (
        delete from mod_versions
        where origin = 'file' and used_on < (
            -- a run's id begins with the time of its start
            select (to_timestamp(('x' || left(replace(run_id::text, '-', ''), 12))::bit(48)::bigint / 1000)
                at time zone 'utc')::date
            from runs order by run_id limit 1)
        returning 1
    )
    select count(*) from removed
$$;
