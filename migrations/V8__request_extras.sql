-- What the request of an ingested document says beyond the columns: prompts, final text and statistics of other engines, and
-- how many characters were replaced. Null for runs of our own.
alter table runs add column request_extras json;
