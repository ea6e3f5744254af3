-- Attention rows of single heads, which a request selects: see src/trace/attention/heads.rs. Empty without a selection.
alter table attention add column head_rows bytea not null default '';

-- Halves of floats do not compress, and one value is read with substring().
alter table attention alter column head_rows set storage external;
