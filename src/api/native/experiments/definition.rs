//! The definition of an experiment, and the request of each of its cells.

use crate::api::shared::body::ModSelection;
use crate::api::shared::fields::Fields;
use crate::api::shared::{engine_request, parameters};
use crate::engine::Request;
use crate::events::{RunMetadata, Surface, TokenId};
use crate::model::TokenizeOptions;
use crate::mods::python::{LoadError, PythonMods, PythonScorer, ScoredCell};
use crate::mods::{ModOrigin, SelectedMod};
use crate::server::experiments::{CellPosition, Grid};
use crate::server::mods::require_upload_rights;
use crate::server::{ApiError, App, Caller, ErrorCode, LoadedModel};
use regex::{Regex, RegexBuilder};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use utoipa::ToSchema;
use uuid::Uuid;

/// Maximum cells of an experiment.
const MAX_CELLS: usize = 10_000;

/// Maximum length of a name in characters.
const MAX_NAME_CHARS: usize = 64;

/// Maximum compiled size of a regular expression in bytes.
const MAX_REGEX_BYTES: usize = 1 << 20;

/// Parameters that the grid itself sets, or that do not belong to one run.
const RESERVED: [&str; 9] = ["prompt", "seed", "mods", "model", "request_id", "stream", "n", "record", "id_slot"];

/// A grid of runs: each prompt with each list of mods, each set of parameters and each seed. The seeds vary fastest, the
/// prompts slowest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExperimentDefinition {
    /// A name of 1 to 64 characters.
    #[schema(min_length = 1, max_length = 64)]
    pub(super) name: String,
    /// Name of the model, optionally with mods for all cells (`model/mod`); default is the server's default model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) model: Option<String>,
    /// The prompts, as text.
    #[schema(min_items = 1)]
    prompts: Vec<String>,
    /// The seeds, each once.
    #[schema(min_items = 1)]
    seeds: Vec<u32>,
    /// Lists of mods; default is one empty list.
    #[serde(default = "one_empty_list")]
    #[schema(value_type = Vec<Vec<ModSelection>>)]
    mods: Vec<Vec<Value>>,
    /// Sets of generation parameters, named as in `/v1/completions`; default is one empty set.
    #[serde(default = "one_empty_set")]
    #[schema(value_type = Vec<Object>)]
    parameters: Vec<Map<String, Value>>,
    /// The scorer of the answers.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "scorer_definition")]
    score: Option<ScorerDefinition>,
}

/// The scorer of the answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum ScorerDefinition {
    /// 1 if the regular expression matches a part of the answer, else 0.
    Regex(String),
    /// `true`: 1 if the answer is JSON, else 0.
    Json(bool),
    /// Source of a Python function `score(text)` or `score(text, cell)` that returns a number from 0 to 1, or `None`
    /// for no score. It runs in a worker with the limits of an uploaded mod, and requires the right to upload mods.
    Python(String),
}

fn scorer_definition<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<ScorerDefinition>, D::Error> {
    let Some(value) = Option::<Value>::deserialize(deserializer)? else { return Ok(None) };
    ScorerDefinition::deserialize(&value).map(Some).map_err(|_| {
        let expected = r#"{"regex": "PATTERN"}, {"json": true} or {"python": "def score(text): …"}"#;
        D::Error::custom(format!("`score` must be {expected}, got {value}"))
    })
}

fn one_empty_list() -> Vec<Vec<Value>> {
    vec![Vec::new()]
}

fn one_empty_set() -> Vec<Map<String, Value>> {
    vec![Map::new()]
}

/// A scorer of answers, ready to use.
#[derive(Debug)]
pub(super) enum Scorer {
    Regex(Regex),
    Json,
    Python(Box<PythonScorer>),
}

impl Scorer {
    /// Returns the score of an answer; `None` if a Python function returns none. A Python function blocks the thread.
    ///
    /// # Errors
    /// The message of Python's exception.
    pub(super) fn score(&self, answer: &str, cell: &ScoredCell) -> Result<Option<f32>, String> {
        let is_good = match self {
            Self::Regex(regex) => regex.is_match(answer),
            Self::Json => serde_json::from_str::<serde::de::IgnoredAny>(answer).is_ok(),
            Self::Python(scorer) => return scorer.score(answer, cell),
        };
        Ok(Some(f32::from(u8::from(is_good))))
    }
}

impl ExperimentDefinition {
    /// Returns the number of cells.
    pub(super) fn cells(&self) -> usize {
        let lengths = [self.prompts.len(), self.mods.len(), self.parameters.len(), self.seeds.len()];
        lengths.into_iter().fold(1, usize::saturating_mul)
    }

    /// Returns the lists of the definition.
    pub(super) fn grid(&self) -> Grid<'_> {
        Grid { mods: self.mods.len(), parameters: self.parameters.len(), seeds: &self.seeds }
    }

    /// Returns the position of a cell.
    pub(super) fn position(&self, cell: usize) -> CellPosition {
        self.grid().position(cell)
    }

    /// Returns prompt, mods and parameters of a position.
    pub(super) fn values(&self, at: CellPosition) -> (&str, &[Value], &Map<String, Value>) {
        (&self.prompts[at.prompt], &self.mods[at.mods], &self.parameters[at.parameters])
    }

    /// Checks that a caller may use the scorer. Python code needs the right to upload mods.
    ///
    /// # Errors
    /// Uploads are disabled, or the key lacks the right.
    pub(super) fn check_rights(&self, app: &App, caller: &Caller) -> Result<(), ApiError> {
        if !matches!(self.score, Some(ScorerDefinition::Python(_))) {
            return Ok(());
        }
        let refused = |error: ApiError| error.prefixed("a Python scorer needs the right to upload mods: ");
        require_upload_rights(app, caller).map(drop).map_err(refused)
    }

    /// Creates the scorer. One in Python has a worker from now on, so add the experiment to the active ones first.
    ///
    /// # Errors
    /// The regular expression is invalid, or the Python code cannot be imported.
    pub(super) fn scorer(&self, app: &App) -> Result<Option<Scorer>, ApiError> {
        Ok(match &self.score {
            None => None,
            Some(ScorerDefinition::Json(true)) => Some(Scorer::Json),
            Some(ScorerDefinition::Json(false)) => {
                let detail = "`score.json` must be true, got false; omit `score` for no scores";
                return Err(ApiError::invalid("score.json", detail));
            }
            Some(ScorerDefinition::Regex(pattern)) => {
                let built = RegexBuilder::new(pattern).size_limit(MAX_REGEX_BYTES).build();
                let regex = built.map_err(|error| {
                    ApiError::invalid("score.regex", format!("`score.regex` must be a regular expression: {error}"))
                })?;
                Some(Scorer::Regex(regex))
            }
            Some(ScorerDefinition::Python(source)) => {
                let python = PythonMods { origin: ModOrigin::Uploaded, ..app.registry().python() };
                Some(Scorer::Python(Box::new(python.load_scorer(source).map_err(|error| not_imported(&error))?)))
            }
        })
    }

    /// Checks that each seed occurs once. Runs with equal seeds are equal, so they would count as more evidence than they are.
    ///
    /// # Errors
    /// A seed occurs twice.
    pub(super) fn check_seeds(&self) -> Result<(), ApiError> {
        let mut seeds = HashSet::new();
        let Some((index, seed)) = self.seeds.iter().enumerate().find(|(_, seed)| !seeds.insert(**seed)) else {
            return Ok(());
        };
        let detail = format!("`seeds` must not contain a seed twice, got {seed} twice; its runs would be equal");
        Err(ApiError::invalid(format!("seeds[{index}]"), detail))
    }

    /// Checks the definition, except the scorer and the seeds, and the request of every cell. Returns the mods of each list in their
    /// current versions.
    ///
    /// # Errors
    /// A field or a cell is invalid.
    pub(super) fn check(&self, app: &App, loaded: &LoadedModel) -> Result<Vec<Vec<SelectedMod>>, ApiError> {
        let chars = self.name.chars().count();
        if !(1..=MAX_NAME_CHARS).contains(&chars) || self.name.contains(char::is_control) {
            let detail = format!(
                "`name` must have 1 to {MAX_NAME_CHARS} characters without control characters, got {chars} characters"
            );
            return Err(ApiError::invalid("name", detail));
        }
        for (field, length) in [
            ("prompts", self.prompts.len()),
            ("seeds", self.seeds.len()),
            ("mods", self.mods.len()),
            ("parameters", self.parameters.len()),
        ] {
            if length == 0 {
                return Err(ApiError::invalid(field, format!("`{field}` must not be empty")));
            }
        }
        let cells = self.cells();
        if cells > MAX_CELLS {
            let detail = format!(
                "an experiment may have at most {MAX_CELLS} cells, got {cells}: {} prompts x {} lists of mods x {} sets of parameters x {} seeds",
                self.prompts.len(),
                self.mods.len(),
                self.parameters.len(),
                self.seeds.len()
            );
            return Err(ApiError::invalid("seeds", detail));
        }
        for (index, parameters) in self.parameters.iter().enumerate() {
            if let Some(name) = RESERVED.iter().find(|name| parameters.contains_key(**name)) {
                let field = format!("parameters[{index}].{name}");
                let detail = format!("`{field}` is not allowed; the experiment sets `{name}` itself");
                return Err(ApiError::invalid(field, detail));
            }
        }
        let mods = self.select_mods(app, loaded)?;
        // Seeds are valid by their type. The prompts vary slowest, so each is tokenized once.
        let mut prompt = (usize::MAX, Vec::new());
        for cell in (0..cells).step_by(self.seeds.len()) {
            let at = self.position(cell);
            if at.prompt != prompt.0 {
                prompt = (at.prompt, self.tokens(loaded, at.prompt));
            }
            let request = self.request_of(app, loaded, &mods[at.mods], at, prompt.1.clone());
            let mut request = request.map_err(|error| self.in_cell(error, cell))?;
            loaded.engine().validate(&mut request).map_err(|error| self.in_cell(error.into(), cell))?;
        }
        Ok(mods)
    }

    /// Selects the mods of each list. Those in the model's name come first.
    fn select_mods(&self, app: &App, loaded: &LoadedModel) -> Result<Vec<Vec<SelectedMod>>, ApiError> {
        let select = |(index, list): (usize, &Vec<Value>)| {
            let body = json!({ "model": self.model, "mods": list });
            let first_cell = index * self.parameters.len() * self.seeds.len();
            let selected = parameters::requested_mods(Fields::new(&body)?, loaded, app.registry());
            selected.map_err(|error| self.in_cell(error, first_cell))
        };
        self.mods.iter().enumerate().map(select).collect()
    }

    /// Names the cell in an error, and points to the field of the definition.
    fn in_cell(&self, error: ApiError, cell: usize) -> ApiError {
        let CellPosition { prompt, mods, parameters, .. } = self.position(cell);
        let field = error.pointer().map(str::to_owned);
        let error = match field {
            _ if error.exceeded().is_some() => error.at(format!("prompts[{prompt}]")),
            Some(name) if name == "model" => error,
            Some(name) if name.starts_with("mods") => error.at(format!("mods[{mods}]{}", &name["mods".len()..])),
            Some(name) if name.starts_with("prompt") => error.at(format!("prompts[{prompt}]")),
            Some(name) => error.at(format!("parameters[{parameters}].{name}")),
            None => error,
        };
        error.prefixed(&format!("prompts[{prompt}], mods[{mods}], parameters[{parameters}]: "))
    }

    /// Returns the request of a cell of the experiment `id`, with the mods that [`Self::check`] returned.
    ///
    /// # Errors
    /// A parameter is no longer valid, or a mod was disabled or removed.
    pub(super) fn request(
        &self,
        app: &App,
        loaded: &LoadedModel,
        mods: &[Vec<SelectedMod>],
        id: Uuid,
        cell: usize,
    ) -> Result<Request, ApiError> {
        let at = self.position(cell);
        let mods = &mods[at.mods];
        if let Some(disabled) = mods.iter().find(|selected| !selected.factory.is_enabled()) {
            let detail = format!("the mod '{}' was disabled or removed", disabled.mod_ref.name);
            return Err(ApiError::conflict(detail));
        }
        let mut request = self.request_of(app, loaded, mods, at, self.tokens(loaded, at.prompt))?;
        request.metadata.set(RunMetadata::EXPERIMENT, id.to_string());
        request.metadata.set(RunMetadata::CELL, cell.to_string());
        Ok(request)
    }

    /// Returns the tokens of a prompt.
    fn tokens(&self, loaded: &LoadedModel, prompt: usize) -> Vec<TokenId> {
        let vocabulary = loaded.vocabulary();
        parameters::or_start_token(
            parameters::encode(vocabulary, &self.prompts[prompt], TokenizeOptions::PROMPT),
            vocabulary,
        )
    }

    fn request_of(
        &self,
        app: &App,
        loaded: &LoadedModel,
        mods: &[SelectedMod],
        at: CellPosition,
        tokens: Vec<TokenId>,
    ) -> Result<Request, ApiError> {
        let mut body = self.parameters[at.parameters].clone();
        body.insert("seed".into(), at.seed.into());
        let body = Value::Object(body);
        let fields = Fields::new(&body)?.with_server_defaults(app);
        let mut request = engine_request(app, loaded, fields, tokens, Surface::Openai)?;
        // llama-server's values for a random seed are ordinary seeds here.
        request.sampling.seed = at.seed;
        request.mods = mods.to_vec();
        request.prompt_preview = parameters::preview(&self.prompts[at.prompt]);
        Ok(request)
    }
}

/// Returns the error of a Python scorer that cannot be imported.
fn not_imported(error: &LoadError) -> ApiError {
    match error {
        LoadError::Failed { message, .. } => {
            // The message of a syntax error has the line.
            let line = error.line().map(|line| format!("line {line}")).filter(|line| !message.contains(line));
            let line = line.map(|line| format!(" ({line})")).unwrap_or_default();
            ApiError::invalid("score.python", format!("`score.python`: {message}{line}")).code(ErrorCode::ModFailed)
        }
        // The server lacks a requirement of Python mods.
        _ => ApiError::unavailable(error.to_string()),
    }
}
