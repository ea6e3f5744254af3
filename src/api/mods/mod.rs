//! `/v1/mods`: the mods that runs can name. Anybody may look; changing them needs a key with that right, where keys are set,
//! and uploading needs one in any case and `--allow-mod-upload`.

mod change;
mod check;
mod follow;
mod keep;
mod show;
mod upload;

pub use follow::Followed;
pub(in crate::api) use keep::keep_handed;
pub use keep::{keep_used, used_files};
pub(in crate::api) use keep::{stored, used};
pub use show::{source_of, versions_of};
use upload::import;
pub use upload::take;

use super::{ApiError, App, Caller, Kind};
use axum::Extension;
use axum::extract::DefaultBodyLimit;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Most bytes of a request: a source of the longest kind, with every character escaped.
pub const MOST_BYTES: usize = 8 << 20;

/// The routes.
pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(show::list, upload::register))
        .routes(routes!(show::list_native))
        .routes(routes!(check::check))
        .routes(routes!(show::show, change::remove))
        .routes(routes!(show::versions))
        .routes(routes!(show::source))
        .routes(routes!(change::enable))
        .routes(routes!(change::disable))
        .layer(DefaultBodyLimit::max(MOST_BYTES))
}

/// The label of whoever may change mods.
fn changer(app: &App, caller: Option<Extension<Caller>>) -> Result<Option<String>, ApiError> {
    match caller {
        Some(Extension(caller)) if caller.may_change_mods => Ok(Some(caller.label)),
        None if app.config().server.security.keys.is_empty() => Ok(None),
        _ => Err(ApiError::new(
            Kind::Forbidden,
            "this key may not change mods; one that may is given with --mod-key, or marked mods in the key file",
        )),
    }
}

/// The label of whoever may upload mods.
///
/// # Errors
/// Nobody may, or not with this key; both say how somebody could.
pub fn uploader(app: &App, caller: Option<Extension<Caller>>) -> Result<Option<String>, ApiError> {
    if !app.config().server.allow_mod_upload {
        let detail = "this server takes no mods from clients; it does when it is started with --allow-mod-upload and a --mod-key";
        return Err(ApiError::new(Kind::Forbidden, detail));
    }
    changer(app, caller)
}

/// There is no such mod.
fn unknown(app: &App, name: &str) -> ApiError {
    let known: Vec<String> = app.registry().list_info().into_iter().map(|shown| shown.description.name).collect();
    let name: String = name.chars().take(100).collect();
    ApiError::new(Kind::NotFound, format!("unknown mod '{name}'; known mods: {}", known.join(", ")))
}
