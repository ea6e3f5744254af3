-- Notes of users on a run and on tokens of its answer, a JSON array. `runs.labels` has `note=run` and `note=token` for them.
alter table runs add column user_notes json;
