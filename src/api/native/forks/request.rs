//! The body of a request that forks a run.

use crate::api::shared::body::{ControlVectorBody, ModSelection};
use crate::events::TokenId;
use crate::server::ApiError;
use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// Maximum runs that one request starts.
const MAX_FORKS: u32 = 64;

/// The step of a fork and the changes from there on. Without changes, a single new run repeats the recorded run.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ForkRequest {
    /// The first step that the new runs generate again.
    pub(super) at: ForkAt,
    /// Token to append at this step instead of sampling one.
    #[schema(value_type = Option<i32>)]
    pub(super) token: Option<TokenId>,
    /// Text to append at this step instead of sampling a token.
    pub(super) text: Option<String>,
    /// Mods from this step on; default are those of the recorded run. All of them receive the kept events. A mod of the
    /// recorded run must repeat its recorded actions.
    #[schema(value_type = Option<Vec<ModSelection>>)]
    pub(super) mods: Option<Vec<Value>>,
    /// Sampling parameters that change at this step.
    #[schema(value_type = Option<Object>)]
    pub(super) sampling: Option<Map<String, Value>>,
    /// Control vectors from this step on, in place of those of the recorded run. The kept tokens are decoded again with
    /// them.
    #[schema(value_type = Option<Vec<ControlVectorBody>>)]
    pub(super) steering: Option<Value>,
    /// Number of runs, 1 to 64; default 1.
    pub(super) n: Option<u32>,
    /// `"continue"` continues the recorded run's random generator; a number is a new seed, which is incremented for each
    /// additional run. Default is `"continue"` for one run and random seeds for several.
    pub(super) seed: Option<ForkSeed>,
}

/// A step, given by its number or by one of its events.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ForkAt {
    /// Number of the step, from 1.
    pub(super) step: Option<i32>,
    /// `sequence_order` of an event of the step.
    pub(super) event: Option<i32>,
}

/// The random generator of a fork.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(untagged, expecting = "`seed` must be \"continue\" or an integer between 0 and 4294967295")]
pub(super) enum ForkSeed {
    /// Continues the recorded run's generator.
    Continue(ContinueSeed),
    /// Starts with a new seed.
    New(u32),
}

/// The value `continue`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum ContinueSeed {
    Continue,
}

impl ForkRequest {
    /// Returns the number of runs.
    pub(super) fn count(&self) -> u32 {
        self.n.unwrap_or(1)
    }

    /// Checks the fields that do not depend on the recorded run. Returns the number of runs.
    ///
    /// # Errors
    /// A field is invalid.
    pub(super) fn check(&self) -> Result<u32, ApiError> {
        let count = self.count();
        if !(1..=MAX_FORKS).contains(&count) {
            let detail = format!("`n` must be an integer between 1 and {MAX_FORKS}, got {count}");
            return Err(ApiError::invalid("n", detail));
        }
        if count > 1 && matches!(self.seed, Some(ForkSeed::Continue(_))) {
            let detail = "`seed` must not be \"continue\" for several runs, because they would be identical; omit it \
                         or send a number";
            return Err(ApiError::invalid("seed", detail));
        }
        match (self.token, self.text.as_deref()) {
            (Some(_), Some(_)) => {
                Err(ApiError::invalid("text", "`token` and `text` must not both be present; omit one of them"))
            }
            (None, Some("")) => {
                Err(ApiError::invalid("text", "`text` must not be empty; omit it to let the model continue"))
            }
            _ => Ok(count),
        }
    }

    /// Returns the changes, as recorded with the new run. `text` is the appended text.
    pub(super) fn change(&self, text: &str) -> Value {
        let mut change = Map::new();
        if let Some(token) = self.token {
            change.insert("token".into(), token.into());
        }
        if self.token.is_some() || self.text.is_some() {
            change.insert("text".into(), text.into());
        }
        if let Some(mods) = &self.mods {
            change.insert("mods".into(), mods.clone().into());
        }
        if let Some(steering) = &self.steering {
            change.insert("steering".into(), steering.clone());
        }
        if let Some(sampling) = &self.sampling {
            change.insert("sampling".into(), sampling.clone().into());
        }
        if matches!(self.seed, Some(ForkSeed::New(_))) || self.seed.is_none() && self.count() > 1 {
            change.insert("seed".into(), "new".into());
        }
        change.into()
    }
}
