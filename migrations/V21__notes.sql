-- Feedback without a rating is a note. Runs with a note have the label `feedback=note`.
alter table feedback alter column rating drop not null;
