//! `/api/v1/runs/{id}/forks`: starts runs that continue a recorded run from one of its steps.

mod request;

use super::recorded_request::{self, recorded_model, recorded_sampling};
use crate::api::shared::fields::Fields;
use crate::api::shared::generation::RunClient;
use crate::api::shared::images::restore_images;
use crate::api::shared::parameters;
use crate::engine::{ForkPoint, Generation, Request, SamplingParams};
use crate::events::{EndCause, EventType, PromptRecord, RunId, RunParent, Surface, TraceItem, system};
use crate::mods::SelectedMod;
use crate::server::extract::{Json, Path};
use crate::server::{ApiError, App, EventPermits, LoadedModel, Problem, note_started_run};
use crate::store::RunSummary;
use axum::http::StatusCode;
use request::{ForkAt, ForkRequest, ForkSeed};
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

/// The runs that were started.
#[derive(Debug, Serialize, ToSchema)]
pub struct ForkResponse {
    /// The recorded run.
    #[schema(value_type = String)]
    parent: RunId,
    /// The first step that the new runs generate again.
    step: i32,
    /// `sequence_order` of its first event.
    event: i32,
    /// The new runs.
    runs: Vec<ForkedRun>,
}

/// A run that was started.
#[derive(Debug, Serialize, ToSchema)]
pub struct ForkedRun {
    /// Id of the run.
    #[schema(value_type = String)]
    run_id: RunId,
    /// Random seed from the step on.
    seed: u32,
}

/// Starts runs that continue a recorded run from one step. They keep its tokens before the step, the position of its
/// random generator, its remaining token budget and the states of its mods. Responds when the runs have started; they
/// are recorded as usual, with `parent`.
#[utoipa::path(post, path = "/api/v1/runs/{id}/forks", tag = "runs",
    params(("id" = String, Path, description = "`run_id` or `request_id`")), request_body = ForkRequest, responses(
    (status = 201, body = ForkResponse),
    (status = 400, body = Problem, description = "The run has no such step, or a field is invalid"),
    (status = 404, body = Problem, description = "Unknown run or model"),
    (status = 409, body = Problem, description = "The recording is incomplete, the model differs from the recorded one, or a \
        mod does not repeat its recorded actions"),
    (status = 429, body = Problem, description = "Other long runs are being read")))]
pub async fn fork(
    client: RunClient,
    Path(id): Path<String>,
    Json(body): Json<Value>,
) -> Result<(StatusCode, axum::Json<ForkResponse>), ApiError> {
    let (app, scope) = (&client.app, &client.caller.scope);
    let parent = app.find_run(scope, &id).await?;
    let fork: ForkRequest =
        serde_path_to_error::deserialize(&body).map_err(|error| ApiError::from_deserialization(&error))?;
    let count = fork.check()?;
    // Released when the new runs have started and the items are no longer needed.
    let _permits = EventPermits::acquire(parent.events).await?;
    let items = app.store()?.items(scope, parent.run_id, 0..i32::MAX).await?;
    let mut source = ForkSource::find(&parent, items, &fork.at)?;
    let loaded = recorded_model(app, &source.recorded).await?;
    let mut request = source.request(app, &loaded, &fork).await?;
    restore_images(app, scope, &loaded, &source.prompt.images, &mut request).await?;
    client.set_client(&mut request);
    let mut started: Vec<Generation> = Vec::new();
    let mut runs = Vec::new();
    for index in 0..count {
        let mut request = request.clone();
        if index > 0 {
            request.sampling.seed = match fork.seed {
                Some(ForkSeed::New(first)) => first.wrapping_add(index),
                _ => system::random(),
            };
        }
        let seed = request.sampling.seed;
        match loaded.engine().submit(request).await {
            Ok(generation) => {
                note_started_run(generation.run_id);
                runs.push(ForkedRun { run_id: generation.run_id, seed });
                started.push(generation);
            }
            Err(error) => {
                for other in started {
                    // Stopping fails only if the run has ended.
                    let _ = other.control.stop(EndCause::Cancel, "another fork of the same request was rejected").await;
                }
                return Err(error.into());
            }
        }
    }
    for generation in started {
        tokio::spawn(read_to_end(generation));
    }
    let (step, event) = (source.step, source.event);
    Ok((StatusCode::CREATED, axum::Json(ForkResponse { parent: parent.run_id, step, event, runs })))
}

/// Returns the reason why a run cannot be forked, if its recording lacks data that a fork needs.
pub(super) fn missing_for_fork(prompt: Option<&PromptRecord>) -> Option<&'static str> {
    let Some(prompt) = prompt.filter(|prompt| !prompt.tokens.is_empty()) else {
        return Some("the token ids of its prompt are not recorded, because it comes from another engine");
    };
    let has = |name: &str| prompt.parameters.as_ref().is_some_and(|parameters| parameters[name].is_object());
    let is_complete = has("sampling") && has("limits");
    (!is_complete)
        .then_some("its sampling parameters and limits are not recorded, because it comes from another engine")
}

/// Discards the outputs of a run, which would otherwise wait for a client. Clients read the recording instead.
async fn read_to_end(mut generation: Generation) {
    while generation.output.recv().await.is_some() {}
}

/// A recorded run before one of its steps.
struct ForkSource {
    run_id: RunId,
    surface: Surface,
    prompt_preview: String,
    prompt: PromptRecord,
    /// Parameters of the recorded run.
    recorded: Value,
    /// Items before the step; the request takes them.
    items: Vec<TraceItem>,
    step: i32,
    /// Number of the step's first event.
    event: i32,
}

/// A part of a recorded run with its parameters. Every part after the first starts at a step at which the run was
/// forked.
struct Phase<'a> {
    from: i32,
    parameters: &'a Value,
}

impl ForkSource {
    /// Finds the step and drops the items from there on.
    fn find(run: &RunSummary, mut items: Vec<TraceItem>, at: &ForkAt) -> Result<Self, ApiError> {
        let not_forkable = |reason: &str| ApiError::conflict(format!("the run cannot be forked: {reason}"));
        let events = || {
            items.iter().filter_map(|item| match item {
                TraceItem::Event(event) => Some(event),
                _ => None,
            })
        };
        let prompt = events().next().and_then(|first| first.measured.as_ref()?.prompt.as_deref().cloned());
        if let Some(reason) = missing_for_fork(prompt.as_ref()) {
            return Err(not_forkable(reason));
        }
        let prompt = prompt.unwrap_or_default();
        let recorded = prompt.parameters.clone().unwrap_or_default();
        if events().zip(0..).any(|(event, number)| event.sequence_order != number) {
            return Err(not_forkable("events are missing from its recording"));
        }
        let step = match (at.step, at.event) {
            (Some(step), None) => step,
            (None, Some(number)) => {
                let event = events().find(|event| event.sequence_order == number).ok_or_else(|| {
                    let last = events().next_back().map_or(0, |last| last.sequence_order);
                    ApiError::invalid(
                        "at.event",
                        format!("`at.event` must be an event of the run, 0 to {last}, got {number}"),
                    )
                })?;
                event.step.max(1)
            }
            _ => return Err(ApiError::invalid("at", "`at` must have either `step` or `event`")),
        };
        let is_pass = |event: &&crate::events::Event| event.event_type == EventType::ForwardPass;
        let event = events().filter(is_pass).find(|event| event.step == step).ok_or_else(|| {
            let passes = events().filter(is_pass).map(|event| event.step);
            let (first, last) = (passes.clone().min().unwrap_or(0), passes.max().unwrap_or(0));
            let reason =
                if events().any(|event| event.step == step) { "has no forward pass" } else { "is not recorded" };
            ApiError::invalid(
                "at.step",
                format!("step {step} {reason}; the run can be forked at steps {first} to {last}"),
            )
        })?;
        let event = event.sequence_order;
        let fork_step = recorded["fork"]["step"].as_i64().unwrap_or(0);
        if i64::from(step) < fork_step {
            let detail = format!(
                "step {step} belongs to the run that this one was forked from at step {fork_step}; fork that run instead"
            );
            return Err(ApiError::conflict(detail).at("at"));
        }
        let end =
            items.iter().position(|item| matches!(item, TraceItem::Event(other) if other.sequence_order == event));
        items.truncate(end.unwrap_or_default());
        let surface = if run.surface == Surface::Ingest { Surface::Openai } else { run.surface };
        let prompt_preview = run.prompt_preview.clone();
        Ok(Self { run_id: run.run_id, surface, prompt_preview, prompt, recorded, items, step, event })
    }

    /// Returns the parameters of the run's parts in order. A run that is itself a fork has several parts.
    fn phases(&self) -> Vec<Phase<'_>> {
        let mut phases = Vec::new();
        let mut parameters = &self.recorded;
        loop {
            let earlier = &parameters["fork"]["earlier"];
            let from = parameters["fork"]["step"].as_i64().unwrap_or(0) as i32;
            phases.push(Phase { from, parameters });
            if !earlier.is_object() {
                break;
            }
            parameters = earlier;
        }
        phases.reverse();
        phases
    }

    /// Builds the request of the first run.
    async fn request(&mut self, app: &App, loaded: &LoadedModel, fork: &ForkRequest) -> Result<Request, ApiError> {
        let vocabulary = loaded.vocabulary();
        let tokens = match (fork.token, &fork.text) {
            (Some(token), _) if !vocabulary.contains(token) => {
                let detail = format!("`token` must be a token id between 0 and {}, got {token}", vocabulary.len() - 1);
                return Err(ApiError::invalid("token", detail));
            }
            (Some(token), _) => vec![token],
            (None, Some(text)) => parameters::run_in_place(text.len(), || vocabulary.encode_plain_continuation(text)),
            (None, None) => Vec::new(),
        };
        let mut request = recorded_request::request(self.prompt.clone(), &self.recorded, loaded)?;
        request.mods = match &fork.mods {
            None => recorded_request::mods(app, &self.recorded["mods"], false).await?,
            Some(mods) => parameters::requested_mods(Fields::new(&json!({ "mods": mods }))?, loaded, app.registry())?,
        };
        if let Some(steering) = &fork.steering {
            let steering = parameters::parse_steering(steering, loaded.model().adapters().control_vectors())?;
            request.adapters = Some(request.adapters.unwrap_or_default().with_steering(steering));
        }
        let phases = self.phases();
        let sampling = phases
            .iter()
            .map(|phase| {
                let sampling = recorded_sampling(&phase.parameters["sampling"], &request.limits, vocabulary)?;
                Ok((phase.from.max(0) as u32, sampling))
            })
            .collect::<Result<Vec<_>, ApiError>>()?;
        request.sampling = self.sampling(&request, loaded, fork)?;
        match fork.seed {
            Some(ForkSeed::New(seed)) => request.sampling.seed = seed,
            None if fork.count() > 1 => request.sampling.seed = system::random(),
            Some(ForkSeed::Continue(_)) | None => {}
        }
        request.attention = self.recorded["attention"] == true && loaded.engine().attention().is_ok();
        if request.attention {
            request.stored_heads =
                parameters::stored_heads(&self.recorded["attention_heads"], "prompt.parameters.attention_heads")?;
        }
        request.lens = self.recorded["lens"] == true && loaded.engine().check_lens().is_ok();
        // The forks of one step share its KV state.
        request.cache_prompt = true;
        request.surface = self.surface;
        request.prompt_preview.clone_from(&self.prompt_preview);
        let mods_repeat_from = request.mods.iter().map(|selected| repeats_from(selected, &phases)).collect();
        let items = std::mem::take(&mut self.items).into();
        request.fork = Some(Box::new(ForkPoint {
            mods_repeat_from,
            items,
            step: self.step as u32,
            sampling,
            earlier_parameters: json!({ "step": self.step, "earlier": {
                "sampling": self.recorded["sampling"], "mods": self.recorded["mods"], "fork": self.recorded["fork"],
            } }),
            parent: RunParent {
                run_id: self.run_id,
                sequence_order: self.event,
                step: self.step,
                change: fork.change(&vocabulary.decode(&tokens)),
            },
            tokens,
        }));
        Ok(request)
    }

    /// Returns the recorded sampling parameters with the changed ones.
    fn sampling(
        &self,
        request: &Request,
        loaded: &LoadedModel,
        fork: &ForkRequest,
    ) -> Result<SamplingParams, ApiError> {
        let Some(changed) = &fork.sampling else { return Ok(request.sampling.clone()) };
        let mut sampling = self.recorded["sampling"].clone();
        for (name, value) in changed {
            if name == "seed" {
                return Err(ApiError::invalid(
                    "sampling.seed",
                    "`sampling.seed` must be absent; send the seed as `seed`",
                ));
            }
            if sampling.get(name).is_none() {
                let known: Vec<&str> =
                    sampling.as_object().into_iter().flat_map(Map::keys).map(String::as_str).collect();
                let detail = format!("`sampling`: unknown field '{name}'; known fields: {}", known.join(", "));
                return Err(ApiError::invalid(format!("sampling.{name}"), detail));
            }
            sampling[name] = value.clone();
        }
        recorded_sampling(&sampling, &request.limits, loaded.vocabulary())
    }
}

/// Returns the first of the last steps of the recorded run that all have this mod in the same version and with the same
/// configuration; `None` if its last step does not have it.
fn repeats_from(selected: &SelectedMod, phases: &[Phase<'_>]) -> Option<u32> {
    let own = selected.to_record();
    let has = |phase: &&Phase<'_>| {
        let mods = phase.parameters["mods"].as_array();
        mods.into_iter().flatten().any(|entry| ["name", "config", "version"].iter().all(|key| entry[*key] == own[*key]))
    };
    phases.iter().rev().take_while(has).last().map(|phase| phase.from.max(0) as u32)
}
