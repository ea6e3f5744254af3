//! The checks: features that clients and the dashboard need from a database, in the order in which they run.

mod changes;
mod database;
mod filters;
mod ingest;
mod reading;
mod recording;

use super::target::Target;
use futures::FutureExt;
use std::panic::AssertUnwindSafe;

macro_rules! checks {
    ($($group:ident::$name:ident,)*) => {
        /// Runs the checks of all groups but the skipped ones, and returns the failed checks with their reasons.
        pub async fn run(target: &Target, skipped_groups: &[&str]) -> Vec<String> {
            let mut failed = Vec::new();
            $(
                if !skipped_groups.contains(&stringify!($group))
                    && let Err(panic) = AssertUnwindSafe($group::$name(target)).catch_unwind().await
                {
                    let reason = panic.downcast_ref::<String>().cloned();
                    let reason = reason.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()));
                    failed.push(format!("{}: {}", stringify!($name), reason.unwrap_or_default()));
                }
            )*
            failed
        }
    };
}

checks! {
    database::all_migrations_are_applied,
    database::partition_of_today_exists,
    database::second_program_opens_the_database,
    database::server_is_healthy,
    ingest::ingest_stores_document,
    ingest::ingest_accepts_document_twice,
    ingest::ingest_rejects_other_content,
    ingest::ingest_accepts_many_at_once,
    ingest::one_of_two_racing_documents_wins,
    recording::chat_is_recorded,
    recording::chat_stream_is_recorded,
    recording::completion_is_recorded,
    recording::many_runs_at_once_are_recorded,
    recording::repeated_request_id_is_a_conflict,
    recording::mod_is_recorded,
    recording::mod_error_is_recorded,
    recording::backtrack_is_recorded,
    recording::mod_of_a_file_is_recorded,
    changes::mod_is_disabled_and_enabled,
    recording::attention_is_stored,
    reading::replay_columns_are_stored,
    reading::replay_page_is_shown,
    reading::events_are_listed,
    reading::alternatives_are_listed,
    recording::active_run_is_readable,
    recording::abandoned_run_is_cancelled,
    reading::list_changes_are_sent,
    reading::list_is_paged,
    filters::filter_by_request,
    filters::filter_by_model,
    filters::filter_by_mod,
    filters::filter_by_status,
    filters::filter_by_surface,
    filters::filter_by_error,
    filters::filter_by_counts,
    filters::filter_by_time,
    filters::filter_by_user,
    filters::filter_by_session_and_metadata,
    filters::filter_by_words,
    filters::filter_by_phrase,
    filters::filters_combine_and_negate,
    changes::feedback_is_kept,
    changes::response_is_continued,
    changes::response_is_deleted,
    changes::run_is_deleted,
    changes::rerun_equals_its_run,
    reading::comparison_page_is_shown,
    ingest::document_with_nul_is_stored,
    database::run_of_dead_program_is_interrupted,
    database::old_day_is_dropped,
    recording::recorder_survives_terminated_connections,
    database::links_between_tables_are_valid,
    database::server_log_has_no_database_error,
}
