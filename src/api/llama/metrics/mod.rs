//! `GET /metrics` for Prometheus: llama-server's names, and Thunder's own with the prefix `thunder_`. A scrape never
//! delays the engine.

mod exposition;

use super::request::ModelParams;
use crate::api::shared::error::LlamaError;
use crate::engine::{EngineCounts, EngineStatus, Latencies};
use crate::server::extract::Query;
use crate::server::models::ModelView;
use crate::server::{ApiError, App};
use crate::store::{ErrorCounts, RecorderMetrics};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use exposition::Exposition;
use std::sync::Arc;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(metrics))
}

/// Returns counters and histograms for Prometheus: those of the model, if it is loaded or sleeping, and those of the whole
/// server. The two rates cover the last minute, independent of the scrape interval.
#[utoipa::path(get, path = "/metrics", tag = "llama-server",
    responses((status = 200, description = "Prometheus' text format", content_type = "text/plain"),
              (status = 501, description = "The server was started with --metrics=off, or listens on an address that \
                                            is not a loopback address and was started without --metrics")))]
async fn metrics(State(app): State<App>, params: Result<Query<ModelParams>, ApiError>) -> Result<Response, LlamaError> {
    let Query(params) = params?;
    if !app.config().server.routes.metrics {
        return Err(ApiError::not_supported("GET /metrics is disabled; start the server with --metrics").into());
    }
    app.check_ready()?;
    let mut exposition = Exposition::default();
    match app.models().view(params.model.as_deref()) {
        Ok(ModelView::Loaded(loaded)) => {
            add_model(&mut exposition, [loaded.engine().status(), loaded.encoder().status()]);
        }
        Ok(ModelView::Sleeping(sleeping)) => add_model(&mut exposition, [&sleeping.statuses[0], &sleeping.statuses[1]]),
        // A server without models, or whose default model is not loaded, still has the other metrics.
        Err(_) if params.model.is_none() => {}
        Err(error) => return Err(error.into()),
    }
    add_requests(&mut exposition, &app);
    add_recorder(&mut exposition, app.store()?.recorder_metrics());
    let headers = [
        (header::CONTENT_TYPE, "text/plain; version=0.0.4".to_owned()),
        (header::HeaderName::from_static("process-start-time-unix"), app.started_at().timestamp().to_string()),
    ];
    Ok((headers, exposition.into_text()).into_response())
}

/// Adds the metrics of a model's engine and encoder.
fn add_model(exposition: &mut Exposition, [engine, encoder]: [&Arc<EngineStatus>; 2]) {
    add_counts(exposition, engine.counts().plus(encoder.counts()));
    add_latencies(exposition, engine.latencies());
}

/// Adds llama-server's metrics.
fn add_counts(exposition: &mut Exposition, counts: EngineCounts) {
    let (total, recent) = (counts.total, counts.recent);
    let seconds = |us: u64| us as f64 / 1e6;
    let rate = |tokens: u64, us: u64| if us > 0 { tokens as f64 / seconds(us) } else { 0.0 };
    let busy = if counts.decodes > 0 { counts.busy_slots as f64 / counts.decodes as f64 } else { 0.0 };
    let counters: [(&str, &str, f64); 10] = [
        ("prompt_tokens_total", "Number of prompt tokens processed.", total.prompt_tokens as f64),
        ("prompt_tokens_cached_total", "Number of prompt tokens taken from the cache.", total.cached_tokens as f64),
        ("prompt_seconds_total", "Prompt process time", seconds(total.prompt_us)),
        ("tokens_predicted_total", "Number of generation tokens processed.", total.generated_tokens as f64),
        ("tokens_predicted_seconds_total", "Predict process time", seconds(total.generation_us)),
        ("n_decode_total", "Total number of llama_decode() calls", counts.decodes as f64),
        ("n_tokens_max", "Largest observed n_tokens.", counts.longest as f64),
        ("spec_decode_num_draft_tokens_total", "Drafted tokens.", total.drafted_tokens as f64),
        ("spec_decode_num_accepted_tokens_total", "Accepted draft tokens.", total.accepted_tokens as f64),
        ("spec_decode_num_drafts_total", "Drafts.", total.drafts as f64),
    ];
    let gauges: [(&str, &str, f64); 5] = [
        (
            "prompt_tokens_seconds",
            "Average prompt throughput in tokens/s over the last minute.",
            rate(recent.prompt_tokens, recent.prompt_us),
        ),
        (
            "predicted_tokens_seconds",
            "Average generation throughput in tokens/s over the last minute.",
            rate(recent.generated_tokens, recent.generation_us),
        ),
        ("requests_processing", "Number of requests processing.", f64::from(counts.running)),
        ("requests_deferred", "Number of requests deferred.", f64::from(counts.queued)),
        ("n_busy_slots_per_decode", "Average number of busy slots per llama_decode() call", busy),
    ];
    for (kind, metrics) in [("counter", &counters[..]), ("gauge", &gauges[..])] {
        for (name, help, value) in metrics {
            exposition.single(kind, &format!("llamacpp:{name}"), help, *value);
        }
    }
}

/// Adds the latencies of runs and mod calls.
fn add_latencies(exposition: &mut Exposition, latencies: &Latencies) {
    for (name, help, histogram) in [
        ("thunder_queue_time_seconds", "Time from the request to the assignment of a slot.", &latencies.queue),
        ("thunder_time_to_first_token_seconds", "Time from the request to the first token.", &latencies.first_token),
        (
            "thunder_time_per_output_token_seconds",
            "Generation time of a run divided by its tokens.",
            &latencies.output_token,
        ),
    ] {
        exposition.family("histogram", name, help);
        exposition.histogram(name, &[], &histogram.counts());
    }
    let mods = latencies.mods();
    let name = "thunder_mod_call_duration_seconds";
    exposition.family("histogram", name, "Time from the call of a mod to its reply.");
    for (label, calls) in &mods {
        exposition.histogram(name, &[("mod", label)], &calls.duration.counts());
    }
    let name = "thunder_mod_call_failures_total";
    exposition.family("counter", name, "Failed calls of a mod.");
    for (label, calls) in &mods {
        exposition.sample(name, &[("mod", label)], calls.failed() as f64);
    }
}

/// Adds the durations and statuses of HTTP requests.
fn add_requests(exposition: &mut Exposition, app: &App) {
    let requests = app.requests().counts();
    let name = "thunder_http_request_duration_seconds";
    exposition.family("histogram", name, "Time from the request to the last byte of the response.");
    for route in &requests {
        exposition.histogram(name, &[("route", &route.route), ("method", route.method)], &route.duration);
    }
    let name = "thunder_http_requests_total";
    exposition.family("counter", name, "Requests by HTTP status.");
    for route in &requests {
        for (status, count) in &route.statuses {
            let labels = [("route", route.route.as_str()), ("method", route.method), ("status", &status.to_string())];
            exposition.sample(name, &labels, *count as f64);
        }
    }
}

/// Adds the metrics of recording and database.
fn add_recorder(exposition: &mut Exposition, recorder: &RecorderMetrics) {
    let name = "thunder_recorder_lag_seconds";
    exposition.family("histogram", name, "Time from the first record of a batch to its commit.");
    exposition.histogram(name, &[], &recorder.lag().counts());
    for (kind, name, help, value) in [
        ("gauge", "thunder_recorder_pending_items", "Items that wait for the next batch.", recorder.pending_items()),
        ("gauge", "thunder_spool_bytes", "Spooled records that are not in the database.", recorder.spool_bytes()),
        (
            "counter",
            "thunder_recorded_attention_bytes_total",
            "Recorded attention, encoded.",
            recorder.attention_bytes(),
        ),
    ] {
        exposition.single(kind, name, help, value as f64);
    }
    let name = "thunder_database_errors_total";
    exposition.family("counter", name, "Failed database operations.");
    let errors = ErrorCounts::now();
    for (kind, count) in [("unavailable", errors.unavailable), ("refused", errors.refused)] {
        exposition.sample(name, &[("kind", kind)], count as f64);
    }
}
