//! The page of one mod: its versions, its source in an editor, and the results of changes.
//!
//! The editor saves with the same request as any client, and the form calls the same function, so that validation and
//! rights are implemented once.

mod templates;
mod upload;
mod versions;
mod view;

use super::error::{self, sentence};
use super::shell::{Shell, render};
use crate::events::system;
use crate::mods::{ModOrigin, ModSource};
use crate::server::mods::{find_mod, register_upload, require_upload_rights, source_of, versions_of};
use crate::server::{ApiError, App, Caller, ErrorKind};
use askama::Template;
use axum::extract::rejection::FormRejection;
use axum::extract::{Form, Path, Query, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Redirect, Response};
use serde::Deserialize;
use serde_json::Value;
use templates::{ModTemplate, TEMPLATES};
use upload::{EditorForm, stored_fields, upload_of};
use view::{SourceForm, StoredMod, mod_href};

#[derive(Template)]
#[template(path = "editor.html")]
struct EditorPage {
    shell: Shell,
    /// Nonce for style elements created by the editor.
    nonce: String,
    /// `None` for a new mod.
    stored: Option<StoredMod>,
    /// `None` for a mod without source.
    editor: Option<SourceForm>,
    templates: Vec<TemplateView>,
    /// Reason why the mod cannot be saved, with the remedy; empty if it can.
    read_only_reason: String,
    /// Error of the last save, and Python's traceback.
    problem: String,
    traceback: String,
}

struct TemplateView {
    description: &'static str,
    href: String,
    chosen: bool,
}

/// Query parameters of the pages.
#[derive(Debug, Default, Deserialize)]
pub(super) struct EditorParams {
    version: Option<String>,
    template: Option<String>,
}

/// `GET /mods/{name}`: renders the current or another version of a mod.
pub(super) async fn page(
    State(app): State<App>,
    caller: Caller,
    Path(name): Path<String>,
    Query(params): Query<EditorParams>,
    headers: HeaderMap,
) -> Response {
    match EditorPage::load(&app, &caller, &name, params.version, &headers).await {
        Ok(page) => page.respond(StatusCode::OK),
        Err(error) => error::render(&headers, &error),
    }
}

/// `GET /mods/-new`: renders a new mod from a template. Mod names cannot start with `-`.
pub(super) async fn new_page(
    State(app): State<App>,
    caller: Caller,
    Query(params): Query<EditorParams>,
    headers: HeaderMap,
) -> Response {
    EditorPage::for_new_mod(&app, &caller, params.template.as_deref(), &headers).respond(StatusCode::OK)
}

/// `POST /mods/{name}`: saves the form as a new version.
pub(super) async fn save(
    State(app): State<App>,
    caller: Caller,
    Path(name): Path<String>,
    headers: HeaderMap,
    submitted: Result<Form<EditorForm>, FormRejection>,
) -> Response {
    save_as(&app, &caller, Some(&name), &headers, submitted).await
}

/// `POST /mods/-new`: saves the form as a new mod.
pub(super) async fn save_new(
    State(app): State<App>,
    caller: Caller,
    headers: HeaderMap,
    submitted: Result<Form<EditorForm>, FormRejection>,
) -> Response {
    save_as(&app, &caller, None, &headers, submitted).await
}

async fn save_as(
    app: &App,
    caller: &Caller,
    name: Option<&str>,
    headers: &HeaderMap,
    submitted: Result<Form<EditorForm>, FormRejection>,
) -> Response {
    let submitted = match submitted {
        Ok(Form(submitted)) => submitted,
        Err(rejection) => {
            let too_large = rejection.status() == StatusCode::PAYLOAD_TOO_LARGE;
            let kind = if too_large { ErrorKind::TooLarge } else { ErrorKind::BadRequest };
            return error::render(headers, &ApiError::new(kind, rejection.body_text()));
        }
    };
    // Lines of a form end in CRLF.
    let source = submitted.source.replace("\r\n", "\n");
    let saved = match require_upload_rights(app, caller) {
        Ok(by) => match upload_of(app, name, &submitted, source.clone()).await {
            Ok(upload) => register_upload(app, by, upload).await,
            Err(error) => Err(error),
        },
        Err(error) => Err(error),
    };
    let error = match saved {
        Ok(saved) => return Redirect::to(&mod_href(&saved.name)).into_response(),
        Err(error) => error,
    };
    // The submitted text is kept in the editor.
    let page = match name {
        Some(name) => {
            let displayed = Some(submitted.version).filter(|hash| !hash.is_empty());
            EditorPage::load(app, caller, name, displayed, headers).await
        }
        None => Ok(EditorPage::for_new_mod(app, caller, None, headers)),
    };
    match page {
        Ok(mut page) => {
            if let Some(editor) = &mut page.editor {
                editor.source = source;
                if !editor.new_name.is_empty() {
                    editor.new_name = submitted.name;
                }
            }
            let detail = error.problem().detail;
            let (problem, traceback) = detail.split_once('\n').unwrap_or((&detail, ""));
            page.problem = format!("Not saved: {problem}");
            traceback.clone_into(&mut page.traceback);
            page.respond(error.kind().status())
        }
        Err(_) => error::render(headers, &error),
    }
}

impl EditorPage {
    /// Returns the page of an existing or deleted mod.
    async fn load(
        app: &App,
        caller: &Caller,
        name: &str,
        version: Option<String>,
        headers: &HeaderMap,
    ) -> Result<Self, ApiError> {
        let list = versions_of(app, name.to_owned(), &caller.scope).await?;
        let is_loaded = app.registry().get(name).is_some();
        let info = find_mod(app, name, &caller.scope).await?;
        let newest = || list.current.as_ref().unwrap_or(&list.versions[0].hash).clone();
        let displayed = version.clone().or_else(|| (!is_loaded).then(newest));
        let (hash, source) = match source_of(app, name, displayed).await {
            Ok((hash, source)) => (hash, Some(source)),
            // Built-in mods have no source.
            Err(error) if version.is_none() && error.kind() == ErrorKind::NotFound => (String::new(), None),
            Err(error) => return Err(error),
        };
        let read_only_reason = match source {
            Some(_) => refusal(app, caller),
            None => "Built-in mods are part of Thunder and cannot be changed.".to_owned(),
        };
        let editor = match source {
            Some(source) => {
                let previous = stored_fields(app, name, &hash).await?.unwrap_or_default();
                let is_file = info.as_ref().is_some_and(|info| info.current.origin == ModOrigin::File);
                Some(SourceForm {
                    new_name: if is_file { format!("{name}-2") } else { String::new() },
                    hash: hash.clone(),
                    current: list.current.clone().unwrap_or_default(),
                    previous: Value::Object(previous).to_string(),
                    ..SourceForm::new(mod_href(name), name, source)
                })
            }
            None => None,
        };
        let stored = StoredMod::new(list, hash, info, is_loaded, caller);
        Ok(Self::new(headers, Some(stored), editor, read_only_reason))
    }

    /// Returns the page of a new mod.
    fn for_new_mod(app: &App, caller: &Caller, template: Option<&str>, headers: &HeaderMap) -> Self {
        let chosen = ModTemplate::find(template);
        let new_name = format!("my-{}", chosen.name);
        let source = ModSource::Text(chosen.source_of(&new_name));
        let editor = SourceForm { new_name, ..SourceForm::new("/mods/-new".to_owned(), "", source) };
        let templates = TEMPLATES.iter().map(|template| TemplateView {
            description: template.description,
            href: format!("/mods/-new?template={}", template.name),
            chosen: template.name == chosen.name,
        });
        Self { templates: templates.collect(), ..Self::new(headers, None, Some(editor), refusal(app, caller)) }
    }

    fn new(
        headers: &HeaderMap,
        stored: Option<StoredMod>,
        editor: Option<SourceForm>,
        read_only_reason: String,
    ) -> Self {
        Self {
            shell: Shell::new(headers, "mods"),
            nonce: format!("{:032x}", system::random::<u128>()),
            stored,
            editor,
            templates: Vec::new(),
            read_only_reason,
            problem: String::new(),
            traceback: String::new(),
        }
    }

    const fn may_save(&self) -> bool {
        self.read_only_reason.is_empty()
    }

    /// Renders the page; the editor's style elements need the nonce.
    fn respond(&self, status: StatusCode) -> Response {
        let mut response = render(status, self);
        let policy = format!("{}; style-src 'self' 'nonce-{}'", super::CONTENT_SECURITY_POLICY, self.nonce);
        if let Ok(policy) = HeaderValue::from_str(&policy) {
            response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, policy);
        }
        response
    }
}

/// Returns the reason why the caller may not save mods; empty if it may.
fn refusal(app: &App, caller: &Caller) -> String {
    require_upload_rights(app, caller).err().map(|error| sentence(&error.problem().detail)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::view::FileView;
    use super::*;
    use crate::config::SecurityConfig;
    use crate::ui::{checks, testing};

    #[test]
    fn new_mod_template_has_its_name() {
        let app = testing::app();
        for ModTemplate { name, .. } in &TEMPLATES {
            let page = EditorPage::for_new_mod(
                &app,
                &Caller::new(&SecurityConfig::default(), None),
                Some(name),
                &HeaderMap::new(),
            );
            let html = page.render().unwrap();
            let editor = page.editor.unwrap();
            let function = editor.new_name.replace('-', "_");
            assert!(editor.source.contains(&format!("def {function}(")), "{name}: {}", editor.source);
            checks::page(&html);
            assert!(html.contains("--allow-mod-upload"), "the remedy: {html}");
        }
    }

    #[test]
    fn source_is_text_and_never_markup() {
        let mut page = EditorPage::for_new_mod(
            &testing::app(),
            &Caller::new(&SecurityConfig::default(), None),
            None,
            &HeaderMap::new(),
        );
        page.problem = "<b>SyntaxError".into();
        let files = vec![FileView { path: "<i>.py".into(), text: "<u>".into() }];
        for files in [Vec::new(), files] {
            let source = "</textarea><script>alert(1)</script>".into();
            page.editor = page.editor.map(|editor| SourceForm { source, files, ..editor });
            let html = page.render().unwrap();
            checks::page(&html);
            assert!(!["<script>", "<b>Syn", "<i>", "<u>"].iter().any(|markup| html.contains(markup)), "{html}");
        }
    }

    #[test]
    fn page_allows_only_styles_with_nonce() {
        let page = EditorPage::for_new_mod(
            &testing::app(),
            &Caller::new(&SecurityConfig::default(), None),
            None,
            &HeaderMap::new(),
        );
        let response = page.respond(StatusCode::OK);
        let policy = response.headers()[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
        assert!(policy.contains(&page.nonce) && !policy.contains("unsafe"), "{policy}");
    }
}
