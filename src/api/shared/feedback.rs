//! Parses and stores feedback on a run.

use super::Fields;
use super::fields::invalid_value;
use crate::server::{ApiError, App, Caller};
use crate::store::{Feedback, NewFeedback};

/// Maximum length of the text in characters.
const MAX_TEXT_CHARS: usize = 10_000;

/// Parses feedback. Without a `rating` it is a note, which requires a `text`.
///
/// # Errors
/// A field is missing or invalid; the error names it.
pub(crate) fn parse(fields: Fields<'_>) -> Result<NewFeedback, ApiError> {
    let rating = fields.number("rating", -1.0..=1.0)?;
    let text = fields.text("text")?.map(str::to_owned);
    if let Some(text) = text.as_ref().filter(|text| text.chars().count() > MAX_TEXT_CHARS) {
        let expected = format!("a string of at most {MAX_TEXT_CHARS} characters");
        return Err(invalid_value("text", &expected, &text.chars().take(40).collect::<String>().into()));
    }
    if rating.is_none() && text.as_ref().is_none_or(|text| text.trim().is_empty()) {
        let message = "`rating` is missing; send a number between -1 and 1, or a `text` for a note without a rating";
        return Err(ApiError::invalid("rating", message));
    }
    let position = fields.integer("position", 0..=i64::from(i32::MAX))?.map(|position| position as u32);
    Ok(NewFeedback { rating, text, position, user_label: None })
}

/// Stores feedback on a run, which may have just started.
///
/// # Errors
/// The run is unknown, or the database is unavailable.
pub(crate) async fn store(
    app: &App,
    id: &str,
    mut feedback: NewFeedback,
    caller: &Caller,
) -> Result<Feedback, ApiError> {
    feedback.user_label.clone_from(&caller.label);
    let run = app.find_run(&caller.scope, id).await?;
    let stored = app.store()?.add_feedback(&caller.scope, run.run_id, &feedback, app.now()).await?;
    stored.ok_or_else(|| ApiError::not_found("run", id))
}
