//! The pages of one run: its replay, its text, and redirects to its neighbors in the list.

mod feedback;
mod neighbors;
mod notes;
mod page;
mod reported;
mod text;
mod view;

pub(super) use neighbors::{newer, older};
pub(super) use page::{Pane, page};
#[cfg(test)]
pub(super) use view::sample;
pub(super) use view::{Banner, RunSummaryView, banners, one_line};
