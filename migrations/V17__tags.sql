-- `runs.labels` also has `tag=TAG` for each tag of a run, and `feedback=good`, `bad` or `neutral` for feedback with such a
-- rating. Runs with earlier feedback get these labels here.
update runs set labels = labels || array['feedback=good']
where exists (select 1 from feedback where feedback.run_id = runs.run_id and feedback.rating > 0);

update runs set labels = labels || array['feedback=bad']
where exists (select 1 from feedback where feedback.run_id = runs.run_id and feedback.rating < 0);

update runs set labels = labels || array['feedback=neutral']
where exists (select 1 from feedback where feedback.run_id = runs.run_id and feedback.rating = 0);
