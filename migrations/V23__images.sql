-- Files of images in prompts. A tenant stores each file once; runs refer to it.
create table images (
    -- The tenant; empty without API keys, as in the conditions of scopes.
    owner      text not null,
    sha256     bytea not null check (length(sha256) = 32),
    media_type text not null,
    data       bytea not null,
    primary key (owner, sha256)
);

-- Image files are compressed already.
alter table images alter column data set storage external;

create table run_images (
    run_id uuid not null,
    owner  text not null,
    sha256 bytea not null,
    primary key (run_id, sha256)
);

create index run_images_image on run_images (owner, sha256);

-- Removes the images of the runs from `first_run` to `last_run`, and the files to which no other run refers. The files are
-- locked first: a run that begins to refer to one of them waits, or is seen by the second statement.
create function remove_images(first_run uuid, last_run uuid) returns void language plpgsql as $$
begin
    perform 1 from images i
        where exists (
            select 1 from run_images r
            where r.run_id between first_run and last_run and r.owner = i.owner and r.sha256 = i.sha256)
        order by i.owner collate "C", i.sha256 for update;
    with removed as (
        delete from run_images where run_id between first_run and last_run returning owner, sha256
    )
    delete from images i using (select distinct owner, sha256 from removed) d
    where i.owner = d.owner and i.sha256 = d.sha256 and not exists (
        select 1 from run_images r
        where r.owner = i.owner and r.sha256 = i.sha256 and not r.run_id between first_run and last_run);
end
$$;
