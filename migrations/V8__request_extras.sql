-- Fields of an ingested request beyond the columns: prompts, final text and statistics of other engines, and the number of
-- replaced characters. Null for runs of this program.
alter table runs add column request_extras json;
