//! Tables into which batches of rows are inserted.

use sqlx::postgres::{PgArguments, Postgres};
use sqlx::query::Query;

/// Columns of equal length, one value per row. `table!` implements it.
pub trait Table {
    /// The statement `copy table (columns) from stdin (format binary)`.
    const COPY: &'static str;

    /// Returns the statements that insert all rows.
    fn insert_statements() -> &'static InsertStatements;

    /// Binds the columns to the parameters of an insert statement.
    fn bind<'q>(&self, query: Query<'q, Postgres, PgArguments>) -> Query<'q, Postgres, PgArguments>;

    /// Returns the number of rows.
    fn len(&self) -> usize;

    /// Appends a row, encoded for COPY.
    fn put(&self, row: usize, out: &mut Vec<u8>);
}

/// Statements that insert rows with `unnest`: columns as arrays, one round trip per table.
pub struct InsertStatements {
    /// For rows that do not exist.
    pub new: String,
    /// Skips existing rows, and takes twice the time.
    pub skip_existing: String,
}

impl InsertStatements {
    /// Creates the statements of a table. `values` are the SQL expressions of its columns.
    pub fn new(table: &str, columns: &[&str], values: &[&str]) -> Self {
        let parameters: Vec<String> = (1..=columns.len()).map(|number| format!("${number}")).collect();
        let (columns, values, parameters) = (columns.join(", "), values.join(", "), parameters.join(", "));
        let new = format!("insert into {table} ({columns}) select {values} from unnest({parameters}) as r ({columns})");
        Self { skip_existing: format!("{new} on conflict do nothing"), new }
    }
}

/// Defines a table with the column `run_id` and the given ones. `=> "type"` names the SQL type of a column whose values are
/// sent as text.
macro_rules! table {
    ($name:ident<$life:lifetime> in $table:literal { $($column:ident: $kind:ty $(=> $sql_type:literal)?,)* }) => {
        #[derive(Default)]
        struct $name<$life> {
            run_id: Vec<Uuid>,
            $($column: Vec<$kind>,)*
        }

        impl Table for $name<'_> {
            const COPY: &'static str = concat!(
                "copy ", $table, " (run_id", $(", ", stringify!($column),)* ") from stdin (format binary)"
            );

            fn insert_statements() -> &'static InsertStatements {
                static STATEMENTS: LazyLock<InsertStatements> = LazyLock::new(|| {
                    InsertStatements::new(
                        $table,
                        &["run_id", $(stringify!($column),)*],
                        &["run_id", $(concat!(stringify!($column), $("::", $sql_type)?),)*],
                    )
                });
                &STATEMENTS
            }

            fn bind<'q>(&self, query: Query<'q, Postgres, PgArguments>) -> Query<'q, Postgres, PgArguments> {
                query.bind(&self.run_id)$(.bind(&self.$column))*
            }

            fn len(&self) -> usize {
                self.run_id.len()
            }

            fn put(&self, row: usize, out: &mut Vec<u8>) {
                const FIELDS: i16 = 1 $(+ { let _ = stringify!($column); 1 })*;
                out.extend_from_slice(&FIELDS.to_be_bytes());
                self.run_id[row].put(out);
                $(self.$column[row].put(out);)*
            }
        }
    };
}

pub(super) use table;
