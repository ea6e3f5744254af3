-- The runs of an hour that the stored counts of statistics contain, so that each run is counted once, also if others are
-- deleted. Kept for the days that are counted again.
create table counted_runs (
    hour    timestamptz primary key,
    run_ids uuid[] not null
);
