//! Fields reported by the engine of an ingested run, formatted for pages.

use crate::events::Scope;
use crate::server::App;
use crate::store::{Reported, RunSummary};

/// Maximum characters of a text on a page; the export contains all.
const MAX_CHARS: usize = 20_000;

/// Reported fields as texts for the templates.
#[derive(Default)]
pub(super) struct ReportedView {
    /// Names and values of the fields present.
    pub(super) fields: Vec<(&'static str, String)>,
    /// The reported answer and the replayed one, if they differ.
    pub(super) texts: Option<(String, String)>,
    /// Notices at the top of the page.
    pub(super) notes: Vec<String>,
}

/// Loads the fields that the run's engine reported; empty while the database is unavailable.
pub(super) async fn find(app: &App, scope: &Scope, run: &RunSummary) -> ReportedView {
    let Ok(store) = app.store() else { return ReportedView::default() };
    let reported = store.reported(scope, run.run_id).await;
    reported
        .inspect_err(|error| tracing::warn!(%error, "cannot read the reported fields of a run"))
        .map_or_else(|_| ReportedView::default(), |reported| ReportedView::new(&reported))
}

impl ReportedView {
    fn new(reported: &Reported) -> Self {
        let request = &reported.request;
        let tokens = |tokens: &Option<Vec<i32>>| tokens.as_ref().map(|tokens| format!("{} tokens", tokens.len()));
        let text = |text: &Option<String>| text.as_deref().map(shorten);
        let fields = [
            ("System prompt", text(&request.system_prompt)),
            ("System prompt, length", tokens(&request.system_prompt_token_ids)),
            ("User prompt", text(&request.user_prompt)),
            ("User prompt, length", tokens(&request.user_prompt_token_ids)),
            ("Selected mod", text(&request.active_mod_name)),
            ("Final text", text(&request.final_text)),
            ("Final text, length", tokens(&request.final_token_ids)),
            ("Statistics", request.inference_stats.as_ref().map(|stats| shorten(stats.get()))),
        ];
        let replayed = reported.replayed_text.as_deref();
        Self {
            fields: fields.into_iter().filter_map(|(name, value)| Some((name, value?))).collect(),
            texts: request.final_text.as_deref().zip(replayed).map(|(theirs, ours)| (shorten(theirs), shorten(ours))),
            notes: reported.remarks(),
        }
    }
}

fn shorten(text: &str) -> String {
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}… ({} more characters)", &text[..end], text[end..].chars().count()),
        None => text.to_owned(),
    }
}
