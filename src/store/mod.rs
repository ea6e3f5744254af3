//! The only SQL: connection, embedded server, migrations, writer, ingest, runs, attention.
