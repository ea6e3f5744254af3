//! The playground: a form for the public API next to the replay of the started run.

use super::assets;
use super::run::Pane;
use super::shell::{Shell, curl_chat, key_variable, render};
use super::steering::control_vectors;
use crate::events::Scope;
use crate::mods::ModDescription;
use crate::server::{App, LoadedModel, ModelEntry};
use askama::Template;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use std::sync::LazyLock;

static MODULES: LazyLock<Vec<String>> = LazyLock::new(|| assets::modules("playground.js"));

#[derive(Template)]
#[template(path = "playground.html")]
struct PlaygroundPage {
    shell: Shell,
    /// Reason why nothing can be generated; empty if generation is possible.
    not_ready: String,
    /// The models that generate text, and those that are not loaded; the default model first.
    models: Vec<ModelView>,
    /// True if a loaded model can capture attention.
    attention: bool,
    /// Reason why no loaded model can record the logit lens; empty if one can.
    lens_problem: String,
    mods: Vec<ModView>,
    /// Variable of the environment with the API key that curl commands send; empty if the server has no keys.
    key_variable: &'static str,
    curl_chat: String,
    pane: Pane,
    /// True if there are no runs to look at.
    is_empty: bool,
}

struct ModelView {
    name: String,
    /// All its names as a JSON array.
    names: String,
    /// Its control vectors as JSON; empty if it has none.
    vectors: String,
}

impl ModelView {
    fn new(app: &App, entry: &ModelEntry) -> Self {
        let names: Vec<&str> = entry.names().collect();
        Self {
            name: entry.name.clone(),
            names: serde_json::json!(names).to_string(),
            vectors: control_vectors(app, Some(&entry.name)),
        }
    }
}

struct ModView {
    name: String,
    description: String,
    /// Example configuration as JSON; `null` if the mod has none.
    config: String,
    /// JSON schema of the configuration; `null` without a schema.
    schema: String,
}

impl From<ModDescription> for ModView {
    fn from(known: ModDescription) -> Self {
        Self {
            name: known.name,
            description: known.description,
            config: known.config.to_string(),
            schema: known.schema.to_string(),
        }
    }
}

/// `GET /playground`: renders the playground.
pub(super) async fn page(State(app): State<App>, scope: Scope, headers: HeaderMap) -> Response {
    let is_empty = super::runs::is_empty(&app, &scope).await;
    let mut models = app.models().list();
    models.retain(|entry| entry.ready().is_none_or(|loaded| loaded.model().generates()));
    let engines: Vec<_> = models.iter().filter_map(ModelEntry::ready).map(LoadedModel::engine).collect();
    let not_ready = match app.default_model() {
        Ok(loaded) if models.is_empty() => encoder_sentence(loaded.name()),
        Err(error) if engines.is_empty() => super::error::sentence(&error.problem().detail),
        _ => String::new(),
    };
    let lens_problem = match engines.iter().find(|engine| engine.check_lens().is_ok()).or(engines.first()) {
        Some(engine) => engine.check_lens().err().map(|error| error.to_string()).unwrap_or_default(),
        None => not_ready.clone(),
    };
    let credentials = app.credentials();
    let page = PlaygroundPage {
        shell: Shell::new(&headers, "playground"),
        not_ready,
        models: models.iter().map(|entry| ModelView::new(&app, entry)).collect(),
        lens_problem,
        attention: engines.iter().any(|engine| engine.attention().is_ok()),
        mods: app.registry().list().into_iter().map(ModView::from).collect(),
        key_variable: key_variable(&credentials.security),
        curl_chat: curl_chat(&headers, &credentials.security, models.first().map(|entry| entry.name.as_str())),
        pane: Pane { modules: MODULES.clone(), ..Pane::default() },
        is_empty,
    };
    render(StatusCode::OK, &page)
}

fn encoder_sentence(model: &str) -> String {
    format!("The model {model} is an encoder and cannot generate text; use /v1/embeddings, /v1/rerank or /v1/classify.")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn form_lists_models_and_mods_of_server() {
        let known = ModDescription {
            name: "ban".into(),
            description: "Removes \"it\".".into(),
            language: "rust".into(),
            version: "1".into(),
            config: json!({"phrase": "<x>"}),
            origin: crate::mods::ModOrigin::Builtin,
            schema: json!({"properties": {"phrase": {"type": "string", "description": "<x>"}}}),
            ..ModDescription::default()
        };
        let page = PlaygroundPage {
            shell: Shell::new(&HeaderMap::new(), "playground"),
            not_ready: String::new(),
            models: [("demo", r#"{"names":["calm"]}"#), ("<b>", "")]
                .map(|(name, vectors)| ModelView {
                    name: name.into(),
                    names: json!([name]).to_string(),
                    vectors: vectors.into(),
                })
                .into(),
            attention: false,
            lens_problem: "the model has <no> head".into(),
            mods: vec![known.into()],
            key_variable: "THUNDER_API_KEY",
            curl_chat: String::new(),
            pane: Pane { modules: MODULES.clone(), ..Pane::default() },
            is_empty: true,
        };
        let html = page.render().unwrap();
        crate::ui::checks::page(&html);
        assert!(html.contains("<option value=\"demo\"") && !html.contains("<b>\""), "{html}");
        assert!(
            html.contains("data-vectors=\"{&#34;names&#34;:[&#34;calm&#34;]}\"") && html.contains("data-vectors=\"\"")
        );
        assert!(html.contains("data-key-variable=\"THUNDER_API_KEY\""), "{html}");
        assert!(html.contains("--attention off") && html.contains("(the model has &#60;no&#62; head)"));
        assert!(html.contains("Open a sample run"));
        assert!(!html.contains("<x>"));
    }
}
