//! Stored responses of OpenAI's Responses API, which later requests can continue. They are removed with their run, or by
//! the retention.

use super::scope::{owned, owners};
use super::text::clean;
use super::{Error, Store};
use crate::events::{RunId, Scope, Tenant};
use chrono::{DateTime, Utc};
use serde_json::Value;
use sqlx::types::Json;

/// A response to store.
#[derive(Debug, Clone, PartialEq)]
pub struct NewResponse {
    /// Id of the response.
    pub id: String,
    /// Run that generated it.
    pub run_id: RunId,
    /// Tenant that owns it; `None` without API keys.
    pub owner: Option<Tenant>,
    /// The response body.
    pub response: Value,
    /// The whole conversation: items of the previous response, input, output.
    pub items: Vec<Value>,
}

impl Store {
    /// Stores a response.
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
        .bind(response.owner.as_ref().map(|owner| clean(owner.as_str())))
        // Sent as text, because sqlx would send jsonb, which loses the order of fields and rejects NUL.
        .bind(response.response.to_string())
        .bind(Value::from(response.items.clone()).to_string())
        .execute(&self.inner.pool)
        .await?;
        Ok(())
    }

    /// Returns a response that the scope covers.
    ///
    /// # Errors
    /// The database failed.
    pub async fn response(&self, scope: &Scope, id: &str) -> Result<Option<Value>, Error> {
        let find = concat!("select response from responses where response_id = $1 and ", owned!(2));
        let found: Option<Json<Value>> =
            sqlx::query_scalar(find).bind(clean(id)).bind(owners(scope)).fetch_optional(&self.inner.pool).await?;
        Ok(found.map(|Json(response)| response))
    }

    /// Returns the conversation that ended with a response, if the scope covers the response.
    ///
    /// # Errors
    /// The database failed.
    pub async fn response_items(&self, scope: &Scope, id: &str) -> Result<Option<Vec<Value>>, Error> {
        let found: Option<Json<Vec<Value>>> =
            sqlx::query_scalar(concat!("select items from responses where response_id = $1 and ", owned!(2)))
                .bind(clean(id))
                .bind(owners(scope))
                .fetch_optional(&self.inner.pool)
                .await?;
        Ok(found.map(|Json(items)| items))
    }

    /// Removes a response. Returns false if the scope has no such response. Later responses of the conversation keep
    /// its items.
    ///
    /// # Errors
    /// The database failed.
    pub async fn delete_response(&self, scope: &Scope, id: &str) -> Result<bool, Error> {
        let done = sqlx::query(concat!("delete from responses where response_id = $1 and ", owned!(2)))
            .bind(clean(id))
            .bind(owners(scope))
            .execute(&self.inner.pool)
            .await?;
        Ok(done.rows_affected() > 0)
    }
}
