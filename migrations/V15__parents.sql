-- The run that a run was forked from, the first event that the fork did not keep, its step, and what changed there. Null for a
-- run that is no fork. `runs.labels` has `parent=ID`, for the index.
alter table runs
    add column parent_run    uuid,
    add column parent_event  integer,
    add column parent_step   integer,
    add column parent_change json;
