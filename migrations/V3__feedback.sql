-- What people and programs thought of a run. It goes with its run, however that goes.
create table feedback (
    run_id      uuid not null references runs on delete cascade,
    feedback_id uuid not null,
    created_at  timestamptz not null,
    -- -1 bad … 1 good
    rating      real not null check (rating between -1 and 1),
    comment     text,
    -- the token of the answer that it is about, counted from 0
    position    integer check (position >= 0),
    user_label  text,
    primary key (run_id, feedback_id)
);
