-- Attention rows of single heads, which a request selects: see src/trace/attention/heads.rs. Empty without a selection.
alter table attention add column head_rows bytea not null default '';

-- Halves of floats do not compress, and one value is read with substring(). Citus does not support the statement for a
-- distributed table, where PostgreSQL tries to compress the values first.
do $$
begin
    if not is_distributed('attention') then
        alter table attention alter column head_rows set storage external;
    end if;
end
$$;
