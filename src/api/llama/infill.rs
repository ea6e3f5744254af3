//! `/infill`: the text between two texts, for editors. Needs a model that was trained for it.

use super::completion;
use crate::api::shared::fields::{Fields, invalid_value};
use crate::api::shared::parameters;
use crate::api::{ApiError, App, Caller, LlamaError, Loaded};
use crate::events::TokenId;
use crate::model::{InfillTokens, Vocabulary};
use axum::Extension;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use axum::response::Response;
use serde_json::Value;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(infill))
}

/// Fills in between `input_prefix` with `prompt` behind it, and `input_suffix`. `input_extra` is a list of `{filename, text}` for
/// context. Everything else is as at `/completion`.
#[utoipa::path(post, path = "/infill", tag = "llama-server",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, description = "The answer, or server-sent events of its pieces"),
              (status = 400, description = "A field is wrong; the message names it"),
              (status = 501, description = "The model was not trained to fill in")))]
async fn infill(
    State(app): State<App>,
    caller: Option<Extension<Caller>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, LlamaError> {
    let suffix_first = app.config().server.request_defaults.get("spm_infill") == Some(&Value::Bool(true));
    let prompts = |fields: Fields<'_>, loaded: &Loaded| Ok(vec![prompt(fields, loaded, suffix_first)?]);
    completion::answer(app, caller, &headers, body, prompts).await
}

fn prompt(fields: Fields<'_>, loaded: &Loaded, suffix_first: bool) -> Result<Vec<TokenId>, ApiError> {
    let vocabulary = loaded.vocabulary();
    let tokens = tokens_of(vocabulary)?;
    let needed = |name: &str| {
        fields.text(name)?.ok_or_else(|| ApiError::invalid(name, format!("{name} is missing; it takes a text")))
    };
    let start = match fields.get("prompt") {
        Some(prompt) => parameters::encode_prompt(prompt, "prompt", vocabulary, false, true)?,
        None => Vec::new(),
    };
    let gap = Gap {
        prefix: vocabulary.encode(needed("input_prefix")?, false, false),
        suffix: vocabulary.encode(needed("input_suffix")?, false, false),
        start,
        extra: extra(fields, vocabulary, tokens)?,
        suffix_first,
    };
    let n_predict =
        fields.integer("n_predict", -1..=i64::from(i32::MAX))?.and_then(|count| usize::try_from(count).ok());
    Ok(gap.prompt(vocabulary, tokens, loaded.engine().context_per_slot() as usize, n_predict))
}

/// The model's tokens for filling in.
///
/// # Errors
/// 501 when it has none.
pub(in crate::api) fn tokens_of(vocabulary: &Vocabulary) -> Result<InfillTokens, ApiError> {
    vocabulary.special().fill_in.ok_or_else(|| {
        ApiError::not_supported(
            "this model was not trained to fill in between two texts: its vocabulary has no tokens for prefix, suffix \
             and middle",
        )
    })
}

/// The prompt that asks for what stands between two texts.
pub(in crate::api) fn between(
    vocabulary: &Vocabulary,
    tokens: InfillTokens,
    prefix: &str,
    suffix: &str,
) -> Vec<TokenId> {
    let gap = Gap {
        prefix: vocabulary.encode(prefix, false, false),
        suffix: vocabulary.encode(suffix, false, false),
        ..Gap::default()
    };
    gap.prompt(vocabulary, tokens, usize::MAX, None)
}

#[derive(Default)]
struct Gap {
    prefix: Vec<TokenId>,
    suffix: Vec<TokenId>,
    /// What stands between the prefix and the gap.
    start: Vec<TokenId>,
    /// Other texts, with what stands around them.
    extra: Vec<TokenId>,
    /// Whether the suffix stands before the prefix, as some models were trained.
    suffix_first: bool,
}

impl Gap {
    /// As llama-server has it: other files, prefix, suffix, middle, the beginning of the line behind the prefix. Of a prefix and a suffix that do not fit, what is nearest
    /// to the gap stays, three quarters of a batch for the prefix; of other files, what stands last.
    fn prompt(
        mut self,
        vocabulary: &Vocabulary,
        tokens: InfillTokens,
        context: usize,
        n_predict: Option<usize>,
    ) -> Vec<TokenId> {
        let room = context.saturating_sub(n_predict.unwrap_or(128).min(context / 2) + self.start.len() + 4);
        let for_suffix = self.suffix.len().min((room / 4).max(room.saturating_sub(self.prefix.len())));
        let for_prefix = self.prefix.len().min(room - for_suffix.min(room));
        self.suffix.truncate(for_suffix);
        self.prefix.drain(..self.prefix.len() - for_prefix);
        let for_extra = self.extra.len().min(room.saturating_sub(for_prefix + for_suffix));
        self.extra.drain(..self.extra.len() - for_extra);
        let special = vocabulary.special();
        let mut prompt: Vec<TokenId> = special.bos.filter(|_| special.add_bos).into_iter().collect();
        prompt.append(&mut self.extra);
        let prefix = [vec![tokens.prefix], self.prefix, self.start].concat();
        let suffix = [vec![tokens.suffix], self.suffix].concat();
        let parts = if self.suffix_first { [suffix, prefix] } else { [prefix, suffix] };
        prompt.extend(parts.concat());
        prompt.push(tokens.middle);
        prompt
    }
}

/// The other texts, each behind its name where the model has tokens for that.
fn extra(fields: Fields<'_>, vocabulary: &Vocabulary, tokens: InfillTokens) -> Result<Vec<TokenId>, ApiError> {
    const EXPECTED: &str = "a list of {\"filename\": …, \"text\": …}";
    let mut all = Vec::new();
    let plain = |text: &str| vocabulary.encode(text, false, false);
    if let Some(repository) = tokens.repository {
        all.push(repository);
        all.extend(plain("myproject\n"));
    }
    for file in fields.list("input_extra")?.into_iter().flatten() {
        let text = file["text"].as_str().ok_or_else(|| invalid_value("input_extra", EXPECTED, file))?;
        let name = match &file["filename"] {
            Value::Null => "tmp",
            Value::String(name) => name,
            _ => return Err(invalid_value("input_extra", EXPECTED, file)),
        };
        match tokens.file {
            Some(separator) => {
                all.push(separator);
                all.extend(plain(&format!("{name}\n")));
            }
            None => all.extend(plain("\n\n--- snippet ---\n\n")),
        }
        all.extend(plain(text));
    }
    if let Some(separator) = tokens.file {
        all.push(separator);
        all.extend(plain("filename\n"));
    }
    Ok(all)
}
