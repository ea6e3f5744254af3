//! The form that starts an experiment.

use super::shell::{Shell, curl_post, key_variable, render};
use crate::config::SecurityConfig;
use crate::mods::ModDescription;
use crate::server::mods::require_upload_rights;
use crate::server::{App, Caller, encode_component};
use askama::Template;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;

#[derive(Template)]
#[template(path = "experiment_form.html")]
struct FormPage {
    shell: Shell,
    mods: Vec<ModView>,
    /// Names of the models; the first one is the default.
    models: Vec<String>,
    curl: String,
    /// Reason why the caller may not use Python scorers; empty if it may.
    python_refusal: String,
}

struct ModView {
    name: String,
    description: String,
    href: String,
    /// Example configuration as JSON; empty if the mod has none.
    config: String,
}

impl From<ModDescription> for ModView {
    fn from(known: ModDescription) -> Self {
        Self {
            href: format!("/mods/{}", encode_component(&known.name)),
            name: known.name,
            description: known.description,
            config: if known.config.is_null() { String::new() } else { known.config.to_string() },
        }
    }
}

/// `GET /experiments/-new`: renders the form. Its script fills it from the experiment of the query parameter `from`.
pub(super) async fn page(State(app): State<App>, caller: Caller, headers: HeaderMap) -> Response {
    let mut entries = app.models().list();
    entries.sort_by_key(|entry| !entry.default);
    let models = entries.into_iter().map(|entry| entry.name).collect();
    let refused = require_upload_rights(&app, &caller).err().map(|error| error.problem().detail);
    let (credentials, mods) = (app.credentials(), app.registry().list());
    render(StatusCode::OK, &FormPage::new(&headers, &credentials.security, mods, models, refused.unwrap_or_default()))
}

impl FormPage {
    fn new(
        headers: &HeaderMap,
        security: &SecurityConfig,
        mods: Vec<ModDescription>,
        models: Vec<String>,
        python_refusal: String,
    ) -> Self {
        let body = r#"{"name": "greetings", "prompts": ["Hello", "The sky"], "seeds": [1, 2], "parameters": [{"max_tokens": 20}]}"#;
        let key = key_variable(security);
        let curl = curl_post(headers, "/api/v1/experiments", key, &format!("'{body}'"));
        Self {
            shell: Shell::new(headers, "experiments"),
            mods: mods.into_iter().map(ModView::from).collect(),
            models,
            curl,
            python_refusal,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn form_lists_mods_of_server() {
        let known = ModDescription {
            name: "ban-phrases".into(),
            description: "Removes \"it\".".into(),
            config: json!({"phrase": "<x>"}),
            ..ModDescription::default()
        };
        let (headers, security) = (HeaderMap::new(), SecurityConfig::default());
        let page = FormPage::new(&headers, &security, vec![known], vec!["demo".into()], "not <allowed>".into());
        let html = page.render().unwrap();
        crate::ui::checks::page(&html);
        assert!(
            !html.contains("<x>")
                && !html.contains("<allowed>")
                && html.contains("disabled")
                && html.contains("ban-phrases")
        );
    }
}
