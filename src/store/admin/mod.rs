//! The commands `thunder db`: status of the database, and its distribution over the nodes of Citus.

mod advice;
mod distribution;
mod plan;
mod status;
mod tables;

pub use distribution::{DistributionPlan, StepResult};
pub use plan::{DistributionOptions, DistributionStep, PartitionUnit, Partitioning};
pub use status::{DatabaseStatus, DatabaseVersion, NodeStatus, PartitionStatus, TableStatus};
pub use tables::TablePlacement;

use super::address::Addresses;
use super::connect::check_version;
use super::embedded::{self, Embedded};
use super::pool::PgConnection;
use super::{Database, EmbeddedError, Error, citus};
use std::path::PathBuf;

/// A connection for administration, without a recorder.
pub struct Admin {
    addresses: Addresses,
    connection: PgConnection,
    embedded: Option<Embedded>,
    data_dir: PathBuf,
}

impl Admin {
    /// Connects to the database. An embedded server is started unless another process runs it already.
    ///
    /// # Errors
    /// There is no server, it is too old, or it is a worker node of Citus; see [`Error`].
    pub async fn open(database: Database, progress: impl Fn(&str)) -> Result<Self, Error> {
        let (embedded, addresses, data_dir) = match database {
            Database::Url { url, direct_url, data_dir } => {
                (None, Addresses::connect(&url, direct_url.as_deref()).await?, data_dir)
            }
            Database::Embedded { data_dir } => match Embedded::start(&data_dir, &progress).await {
                Ok(embedded) => {
                    let addresses = Addresses::embedded(embedded.options());
                    (Some(embedded), addresses, data_dir)
                }
                Err(in_use @ EmbeddedError::InUse { .. }) => {
                    let running = embedded::running_server_options(&data_dir).ok_or(in_use)?;
                    (None, Addresses::embedded(running), data_dir)
                }
                Err(error) => return Err(error.into()),
            },
        };
        let mut connection = addresses.direct().await?;
        // Citus logs a warning for each step from a local to a distributed schema.
        sqlx::raw_sql("set client_min_messages = 'error'").execute(connection.raw()).await?;
        check_version(&mut connection).await?;
        citus::check_coordinator(&mut connection).await?;
        Ok(Self { addresses, connection, embedded, data_dir })
    }

    /// Closes the connection, and stops the embedded server if `open` started it.
    pub async fn close(self) {
        let _ = self.connection.close().await;
        if let Some(embedded) = self.embedded {
            embedded.stop().await;
        }
    }
}
