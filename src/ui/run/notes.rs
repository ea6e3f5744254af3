//! Notes on a run, formatted for pages.

use crate::events::Scope;
use crate::server::App;
use crate::store::{Note, RunSummary};
use crate::ui::shell::TimeView;

/// The fields of one note for the templates.
pub(super) struct NoteView {
    pub(super) text: String,
    /// Index in the answer of the token that the note is about, from 0.
    pub(super) position: Option<u32>,
    pub(super) user: String,
    pub(super) updated: TimeView,
}

/// Returns the notes of a run; empty if the database fails, because the page is useful without them.
pub(super) async fn list(app: &App, scope: &Scope, run: &RunSummary) -> Vec<NoteView> {
    let Ok(store) = app.store() else { return Vec::new() };
    let notes = store.notes(scope, run.run_id).await.ok().flatten().unwrap_or_default();
    notes.into_iter().map(NoteView::from).collect()
}

impl From<Note> for NoteView {
    fn from(note: Note) -> Self {
        Self {
            text: note.text,
            position: note.position,
            user: note.user_label.unwrap_or_default(),
            updated: note.updated_at.into(),
        }
    }
}
