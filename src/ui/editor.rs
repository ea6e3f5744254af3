//! The page of one mod: its versions, its source in an editor, and the results of changes.
//!
//! The editor saves with the same request as any client, and the form calls the same function, so that validation and
//! rights are implemented once.

mod templates;
mod upload;
mod versions;

use super::error::{self, sentence, show};
use super::mods::{Field, fields};
use super::shell::{Shell, encoded, runs_href};
use crate::events::system;
use crate::mods::{ModInfo, ModOrigin, ModSource};
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
use versions::{VersionView, short_hash};

#[derive(Template)]
#[template(path = "editor.html")]
struct EditorPage {
    shell: Shell,
    /// Nonce for style elements created by the editor.
    nonce: String,
    /// Empty for a new mod.
    name: String,
    /// Default of the name field, if the mod can be saved under another name.
    new_name: String,
    description: String,
    /// `built in`, `a file`, `uploaded`, `removed`.
    origin: &'static str,
    enabled: bool,
    versions: Vec<VersionView>,
    templates: Vec<TemplateView>,
    /// The source, if it is a single text.
    source: String,
    has_source: bool,
    /// The displayed version; empty for a new mod.
    hash: String,
    /// The version that runs use; empty for a new and for a deleted mod.
    current: String,
    /// First digits of the version.
    short: String,
    /// Path of the mod's page.
    href: String,
    is_current: bool,
    files: Vec<FileView>,
    may_save: bool,
    /// True if the caller may disable and enable the mod.
    may_switch: bool,
    /// Other fields of the displayed version, as JSON.
    previous: String,
    /// Reason why the stored mod is not loaded.
    load_problem: String,
    /// Documentation of a built-in mod.
    documentation: String,
    fields: Vec<Field>,
    /// Reason why the mod cannot be saved, with the remedy.
    read_only_reason: String,
    /// Error of the last save, and Python's traceback.
    problem: String,
    traceback: String,
    try_href: String,
    runs_href: String,
}

struct TemplateView {
    description: &'static str,
    href: String,
    chosen: bool,
}

/// A file of a package.
struct FileView {
    path: String,
    text: String,
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
        Ok(saved) => return Redirect::to(&format!("/mods/{}", encoded(&saved.name))).into_response(),
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
            page.source = source;
            let detail = error.problem().detail;
            let (problem, traceback) = detail.split_once('\n').unwrap_or((&detail, ""));
            page.problem = format!("Not saved: {problem}");
            traceback.clone_into(&mut page.traceback);
            if !page.new_name.is_empty() {
                page.new_name = submitted.name;
            }
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
        let is_registered = app.registry().get(name).is_some();
        let info = find_mod(app, name, &caller.scope).await?;
        let current = list.current;
        let stored = current.as_ref().unwrap_or(&list.versions[0].hash);
        let hash = version.clone().or_else(|| (!is_registered).then(|| stored.clone()));
        let source = match source_of(app, name, hash).await {
            Ok(source) => Some(source),
            // Built-in mods have no source.
            Err(error) if version.is_none() && error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let hash = source.as_ref().map(ModSource::hash).unwrap_or_default();
        let origin = info.as_ref().map(|info| info.current.origin);
        let mut page = Self::empty(app, caller, headers);
        page.is_current = current.as_ref() == Some(&hash);
        page.versions =
            list.versions.into_iter().map(|one| VersionView::new(one, name, &hash, current.as_deref())).collect();
        page.current = current.unwrap_or_default();
        page.has_source = source.is_some();
        match source {
            Some(ModSource::Text(text)) => page.source = text,
            Some(ModSource::Files(files)) => {
                page.files = files.into_iter().map(|(path, text)| FileView { path, text }).collect();
            }
            None => page.forbid("Built-in mods are part of Thunder and cannot be changed."),
        }
        page.origin = match origin {
            Some(ModOrigin::Builtin) => "built in",
            Some(ModOrigin::File) => "a file",
            Some(ModOrigin::Uploaded) => "uploaded",
            None => "removed",
        };
        if origin == Some(ModOrigin::File) {
            page.new_name = format!("{name}-2");
        }
        page.enabled = info.as_ref().is_none_or(|info| info.enabled);
        page.may_switch = info.is_some() && caller.rights.mods;
        if let Some(ModInfo { description: known, problem, .. }) = info {
            page.fields = fields(&known.schema);
            (page.description, page.documentation) = (known.description, known.documentation);
            if !is_registered {
                let reason = problem.map(|problem| problem.message);
                page.load_problem = reason
                    .unwrap_or_else(|| "uploads of mods are disabled, or its import has not ended yet".to_owned());
            }
        }
        if let Some(previous) = stored_fields(app, name, &hash).await? {
            page.previous = Value::Object(previous).to_string();
        }
        if is_registered {
            page.try_href = format!("/playground?mod={}", encoded(name));
        }
        page.runs_href = runs_href(&format!("mod:{name}"));
        page.href = format!("/mods/{}", encoded(name));
        name.clone_into(&mut page.name);
        page.short = short_hash(&hash);
        page.hash = hash;
        Ok(page)
    }

    /// Returns the page of a new mod.
    fn for_new_mod(app: &App, caller: &Caller, template: Option<&str>, headers: &HeaderMap) -> Self {
        let chosen = ModTemplate::find(template);
        let mut page = Self::empty(app, caller, headers);
        page.new_name = format!("my-{}", chosen.name);
        page.source = chosen.source_of(&page.new_name);
        page.has_source = true;
        page.templates = TEMPLATES
            .iter()
            .map(|template| TemplateView {
                description: template.description,
                href: format!("/mods/-new?template={}", template.name),
                chosen: template.name == chosen.name,
            })
            .collect();
        page
    }

    fn empty(app: &App, caller: &Caller, headers: &HeaderMap) -> Self {
        let refused = require_upload_rights(app, caller).err();
        Self {
            shell: Shell::new(headers, "mods"),
            nonce: format!("{:032x}", system::random::<u128>()),
            name: String::new(),
            new_name: String::new(),
            description: String::new(),
            origin: "",
            enabled: true,
            versions: Vec::new(),
            templates: Vec::new(),
            source: String::new(),
            has_source: false,
            hash: String::new(),
            current: String::new(),
            short: String::new(),
            href: "/mods/-new".to_owned(),
            is_current: true,
            files: Vec::new(),
            may_save: refused.is_none(),
            may_switch: false,
            previous: "{}".to_owned(),
            load_problem: String::new(),
            documentation: String::new(),
            fields: Vec::new(),
            read_only_reason: refused.map(|error| sentence(&error.problem().detail)).unwrap_or_default(),
            problem: String::new(),
            traceback: String::new(),
            try_href: String::new(),
            runs_href: String::new(),
        }
    }

    /// Prevents saving for every caller, for this reason.
    fn forbid(&mut self, reason: &str) {
        self.may_save = false;
        reason.clone_into(&mut self.read_only_reason);
    }

    /// Renders the page; the editor's style elements need the nonce.
    fn respond(&self, status: StatusCode) -> Response {
        let mut response = show(status, self);
        let policy = format!("{}; style-src 'self' 'nonce-{}'", super::CONTENT_SECURITY_POLICY, self.nonce);
        if let Ok(policy) = HeaderValue::from_str(&policy) {
            response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, policy);
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::SecurityConfig;
    use crate::ui::checks;

    #[test]
    fn new_mod_template_has_its_name() {
        let app = checks::app();
        for ModTemplate { name, .. } in &TEMPLATES {
            let page = EditorPage::for_new_mod(
                &app,
                &Caller::new(&SecurityConfig::default(), None),
                Some(name),
                &HeaderMap::new(),
            );
            let function = page.new_name.replace('-', "_");
            assert!(page.source.contains(&format!("def {function}(")), "{name}: {}", page.source);
            let html = page.render().unwrap();
            checks::page(&html);
            assert!(html.contains("--allow-mod-upload"), "the remedy: {html}");
        }
    }

    #[test]
    fn source_is_text_and_never_markup() {
        let mut page = EditorPage::for_new_mod(
            &checks::app(),
            &Caller::new(&SecurityConfig::default(), None),
            None,
            &HeaderMap::new(),
        );
        page.source = "</textarea><script>alert(1)</script>".into();
        page.problem = "<b>SyntaxError".into();
        page.files = vec![FileView { path: "<i>.py".into(), text: "<u>".into() }];
        let html = page.render().unwrap();
        checks::page(&html);
        assert!(
            !html.contains("<script>") && !html.contains("<b>Syn") && !html.contains("<i>") && !html.contains("<u>")
        );
    }

    #[test]
    fn page_allows_only_styles_with_nonce() {
        let page = EditorPage::for_new_mod(
            &checks::app(),
            &Caller::new(&SecurityConfig::default(), None),
            None,
            &HeaderMap::new(),
        );
        let response = page.respond(StatusCode::OK);
        let policy = response.headers()[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
        assert!(policy.contains(&page.nonce) && !policy.contains("unsafe"), "{policy}");
    }
}
