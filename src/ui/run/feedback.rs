//! Feedback on a run, formatted for pages.

use crate::events::Scope;
use crate::server::App;
use crate::store::{Feedback, RunSummary};
use crate::ui::shell::TimeView;

/// The fields of one feedback entry for the templates.
pub(super) struct FeedbackView {
    /// `good`, `bad` or `neutral`.
    pub(super) tone: &'static str,
    /// e.g. `+1`, `−0.5`.
    pub(super) rating: String,
    pub(super) text: String,
    /// Index of the token in the answer that it refers to, from 0.
    pub(super) position: Option<i64>,
    pub(super) user: String,
    pub(super) created: TimeView,
}

/// Returns the feedback on a run, oldest first; empty if the database fails, because the page is useful without it.
pub(super) async fn list(app: &App, scope: &Scope, run: &RunSummary) -> Vec<FeedbackView> {
    let Ok(store) = app.store() else { return Vec::new() };
    let entries = store.feedback(scope, run.run_id).await.unwrap_or_default();
    entries.iter().map(FeedbackView::new).collect()
}

impl FeedbackView {
    pub(super) fn new(feedback: &Feedback) -> Self {
        let rating = feedback.rating;
        let (tone, sign) = match rating {
            r if r > 0.0 => ("good", "+"),
            r if r < 0.0 => ("bad", "\u{2212}"),
            _ => ("neutral", ""),
        };
        Self {
            tone,
            rating: format!("{sign}{}", rating.abs()),
            text: feedback.text.clone().unwrap_or_default(),
            position: feedback.position.map(i64::from),
            user: feedback.user_label.clone().unwrap_or_default(),
            created: feedback.created_at.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rating_shows_sign() {
        let view = |rating| {
            let created_at = chrono::DateTime::default();
            let (feedback_id, text, user_label) = (uuid::Uuid::nil(), None, None);
            FeedbackView::new(&Feedback { feedback_id, created_at, rating, text, position: None, user_label })
        };
        assert_eq!((view(1.0).rating.as_str(), view(1.0).tone), ("+1", "good"));
        assert_eq!((view(-0.5).rating.as_str(), view(-0.5).tone), ("\u{2212}0.5", "bad"));
        assert_eq!((view(0.0).rating.as_str(), view(0.0).position), ("0", None));
    }
}
