//! Responses of OpenAI's API that later ones go on from. They go with the day of their run, or with the run.

use super::rows::clean;
use super::{Error, Store};
use crate::events::RunId;
use chrono::{DateTime, Utc};
use serde_json::Value;
use sqlx::types::Json;

/// A response that is to be kept.
#[derive(Debug, Clone, PartialEq)]
pub struct NewResponse {
    /// As the response itself has it.
    pub id: String,
    /// The run that answered.
    pub run_id: RunId,
    /// The label of the key that asked; `None` without keys.
    pub owner: Option<String>,
    /// As it was sent.
    pub response: Value,
    /// The whole conversation: what it went on from, its input, its output.
    pub items: Vec<Value>,
}

impl Store {
    /// Keeps a response.
    ///
    /// # Errors
    /// The database failed, or has a response with that id.
    pub async fn save_response(&self, response: &NewResponse, now: DateTime<Utc>) -> Result<(), Error> {
        sqlx::query(
            "insert into responses (response_id, run_id, created_at, owner, response, items)
            values ($1, $2, $3, $4, $5::json, $6::json)",
        )
        .bind(clean(&response.id))
        .bind(response.run_id.0)
        .bind(now)
        .bind(response.owner.as_deref().map(clean))
        // As text: sqlx would make it jsonb, which forgets the order of fields and takes no NUL.
        .bind(response.response.to_string())
        .bind(Value::from(response.items.clone()).to_string())
        .execute(&self.inner.pool)
        .await?;
        Ok(())
    }

    /// A response that is this owner's.
    ///
    /// # Errors
    /// The database failed.
    pub async fn response(&self, id: &str, owner: Option<&str>) -> Result<Option<Value>, Error> {
        let found: Option<Json<Value>> = sqlx::query_scalar(
            "select response from responses where response_id = $1 and owner is not distinct from $2",
        )
        .bind(clean(id))
        .bind(owner.map(clean))
        .fetch_optional(&self.inner.pool)
        .await?;
        Ok(found.map(|Json(response)| response))
    }

    /// The conversation that a response of this owner's ended.
    ///
    /// # Errors
    /// The database failed.
    pub async fn response_items(&self, id: &str, owner: Option<&str>) -> Result<Option<Vec<Value>>, Error> {
        let found: Option<Json<Vec<Value>>> =
            sqlx::query_scalar("select items from responses where response_id = $1 and owner is not distinct from $2")
                .bind(clean(id))
                .bind(owner.map(clean))
                .fetch_optional(&self.inner.pool)
                .await?;
        Ok(found.map(|Json(items)| items))
    }

    /// Forgets a response of this owner's; false when there is none. Those that go on from it have its items.
    ///
    /// # Errors
    /// The database failed.
    pub async fn delete_response(&self, id: &str, owner: Option<&str>) -> Result<bool, Error> {
        let done = sqlx::query("delete from responses where response_id = $1 and owner is not distinct from $2")
            .bind(clean(id))
            .bind(owner.map(clean))
            .execute(&self.inner.pool)
            .await?;
        Ok(done.rows_affected() > 0)
    }
}
