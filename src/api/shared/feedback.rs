//! Parses and stores feedback on a run.

use super::Fields;
use super::fields::invalid_value;
use crate::server::{ApiError, App, Caller};
use crate::store::{Feedback, NewFeedback};

/// Maximum length of the text in characters.
const LONGEST: usize = 10_000;

/// Parses feedback; `rating` is required.
///
/// # Errors
/// A field is missing or invalid; the error names it.
pub(crate) fn read(fields: Fields<'_>) -> Result<NewFeedback, ApiError> {
    let rating = fields.number("rating", -1.0..=1.0)?;
    let rating =
        rating.ok_or_else(|| ApiError::invalid("rating", "`rating` is missing; send a number between -1 and 1"))?;
    let text = fields.text("text")?.map(str::to_owned);
    if let Some(text) = text.as_ref().filter(|text| text.chars().count() > LONGEST) {
        let expected = format!("a string of at most {LONGEST} characters");
        return Err(invalid_value("text", &expected, &text.chars().take(40).collect::<String>().into()));
    }
    let position = fields.integer("position", 0..=i64::from(i32::MAX))?.map(|position| position as u32);
    Ok(NewFeedback { rating, text, position, user_label: None })
}

/// Stores feedback on a run, which may have just started.
///
/// # Errors
/// Unknown run, or the database is unavailable.
pub(crate) async fn keep(app: &App, id: &str, mut given: NewFeedback, caller: &Caller) -> Result<Feedback, ApiError> {
    given.user_label.clone_from(&caller.label);
    let run = app.find_run(&caller.scope, id).await?;
    let kept = app.store()?.add_feedback(&caller.scope, run.run_id, &given, app.now()).await?;
    kept.ok_or_else(|| ApiError::not_found("run", id))
}
