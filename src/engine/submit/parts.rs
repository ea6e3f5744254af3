//! Parts of a new run that take time: constraint, mods and sampler.

use crate::engine::Engine;
use crate::engine::error::SubmitError;
use crate::engine::fork::ForkPoint;
use crate::engine::request::Request;
use crate::engine::run::dispatch::ActiveMod;
use crate::engine::run::mod_health::ModHealth;
use crate::engine::run::replay::replay_mods;
use crate::engine::status::EngineStatus;
use crate::model::grammar::GrammarMatcher;
use crate::model::llama::{Sampler, SamplingParams};
use crate::model::{Model, Vocabulary};
use crate::mods::{ReplayLimits, RunView, SelectedMod};
use std::sync::Arc;

/// Prepared parts of a new run.
pub struct PreparedParts {
    pub constraint: Option<GrammarMatcher>,
    pub mods: Vec<ActiveMod>,
    pub sampler: Sampler,
}

impl Engine {
    /// Prepares the parts of a run, each on a blocking thread if that takes long. Mods start after the constraint was
    /// compiled, so that a request with an invalid constraint has no effect.
    pub(super) async fn prepare_parts(
        &self,
        request: &Request,
        view: &Arc<RunView>,
        fork: Option<&ForkPoint>,
    ) -> Result<PreparedParts, SubmitError> {
        let (model, status) = (&self.inner.model, &self.inner.status);
        let constraint = compile_constraint(request, model).await?;
        let mods = start_mods(request, view, fork, status, self.replay_limits()).await?;
        let sampler = create_sampler(&request.sampling, model.vocabulary()).await?;
        Ok(PreparedParts { constraint, mods, sampler })
    }
}

/// Compiles the request's constraint on a blocking thread.
async fn compile_constraint(request: &Request, model: &Arc<Model>) -> Result<Option<GrammarMatcher>, SubmitError> {
    let Some(constraint) = request.constraint.clone() else { return Ok(None) };
    let grammars = Arc::clone(model.grammars());
    let compile = move || {
        let matcher = grammars.start_matcher(&constraint);
        matcher.map_err(|error| {
            let (field, error) = constraint.locate_error(error);
            SubmitError::Constraint { field: field.to_owned(), error }
        })
    };
    tokio::task::spawn_blocking(compile).await.map_err(|_| SubmitError::Stopped)?.map(Some)
}

/// Starts the run's mods on a blocking thread, since a mod may have to start a process. The mods of a fork receive the
/// recorded events.
async fn start_mods(
    request: &Request,
    view: &Arc<RunView>,
    fork: Option<&ForkPoint>,
    status: &Arc<EngineStatus>,
    limits: ReplayLimits,
) -> Result<Vec<ActiveMod>, SubmitError> {
    if request.mods.is_empty() {
        return Ok(Vec::new());
    }
    let (selected, view, fork) = (request.mods.clone(), Arc::clone(view), fork.cloned());
    let status = Arc::clone(status);
    let start = move || {
        let start_one = |selected: SelectedMod| start_mod(selected, &view, &status);
        let mut mods = selected.into_iter().map(start_one).collect::<Result<Vec<_>, _>>()?;
        if let Some(fork) = fork
            && let Err(error) = replay_mods(&fork, &mut mods, &view, limits)
        {
            mods.iter_mut().for_each(|active| active.instance.finished());
            return Err(error);
        }
        Ok(mods)
    };
    tokio::task::spawn_blocking(start).await.map_err(|_| SubmitError::Stopped)?
}

fn start_mod(selected: SelectedMod, view: &Arc<RunView>, status: &EngineStatus) -> Result<ActiveMod, SubmitError> {
    let name = selected.mod_ref.name;
    let described = selected.factory.describe();
    match selected.factory.start(&selected.mod_ref.config, view) {
        Ok(instance) => Ok(ActiveMod {
            calls: status.latencies().calls_of(&name),
            name,
            version: described.version,
            records_noop: described.language != "rust",
            instance,
            health: ModHealth::default(),
        }),
        Err(message) => Err(SubmitError::ModConfig { name, message }),
    }
}

/// Creates the sampler. A sampler with DRY is created on a blocking thread, since it searches the whole vocabulary for
/// its sequence breakers.
async fn create_sampler(sampling: &SamplingParams, vocabulary: &Arc<Vocabulary>) -> Result<Sampler, SubmitError> {
    if sampling.dry_multiplier == 0.0 {
        return Ok(Sampler::new(sampling, vocabulary));
    }
    let (sampling, vocabulary) = (sampling.clone(), Arc::clone(vocabulary));
    let create = move || Sampler::new(&sampling, &vocabulary);
    tokio::task::spawn_blocking(create).await.map_err(|_| SubmitError::Stopped)
}
