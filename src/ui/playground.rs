//! The playground: a form for the public API next to the replay of the started run.

use super::assets;
use super::error::show;
use super::replay::Pane;
use super::shell::{Shell, curl_chat};
use super::steering::control_vectors;
use crate::events::Scope;
use crate::mods::ModDescription;
use crate::server::App;
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
    model: String,
    /// True if the server can capture attention.
    attention: bool,
    /// Reason why the server cannot record the logit lens; empty if it can.
    lens_problem: String,
    mods: Vec<ModView>,
    curl_chat: String,
    pane: Pane,
    /// True if there are no runs to look at.
    is_empty: bool,
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
    let (model, not_ready) = match app.engine() {
        Ok(engine) if engine.model().generates() => (engine.model().name().to_owned(), String::new()),
        Ok(engine) => (engine.model().name().to_owned(), encoder_sentence(engine.model().name())),
        Err(error) => (String::new(), super::error::sentence(&error.problem().detail)),
    };
    let lens_problem = match app.engine() {
        Ok(engine) => engine.lens().err().map(|error| error.to_string()).unwrap_or_default(),
        Err(_) => not_ready.clone(),
    };
    let page = PlaygroundPage {
        shell: Shell::new(&headers, "playground"),
        not_ready,
        model,
        lens_problem,
        attention: app.engine().is_ok_and(|engine| engine.attention().is_ok()),
        mods: app.registry().list().into_iter().map(ModView::from).collect(),
        curl_chat: curl_chat(&headers),
        pane: Pane { modules: MODULES.clone(), vectors: control_vectors(&app, None), ..Pane::idle() },
        is_empty: super::runs::is_empty(&app, &scope).await,
    };
    show(StatusCode::OK, &page)
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
            model: "demo".into(),
            attention: false,
            lens_problem: "the model has <no> head".into(),
            mods: vec![known.into()],
            curl_chat: String::new(),
            pane: Pane { modules: MODULES.clone(), ..Pane::idle() },
            is_empty: true,
        };
        let html = page.render().unwrap();
        crate::ui::checks::page(&html);
        assert!(html.contains("--attention off") && html.contains("(the model has &#60;no&#62; head)"));
        assert!(html.contains("Open a sample run"));
        assert!(!html.contains("<x>"));
    }
}
