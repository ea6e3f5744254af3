//! The dashboard on a server without database and model, for tests.

use crate::config::Config;
use crate::config::flags::{DataFlags, EngineFlags, ServerFlags};
use crate::events::system;
use crate::mods::ModRegistry;
use crate::server::App;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use bytes::Bytes;
use clap::Parser;
use std::sync::Arc;
use tower::ServiceExt;

#[derive(Parser)]
struct TestArgs {
    #[command(flatten)]
    engine: EngineFlags,
    #[command(flatten)]
    data: DataFlags,
    #[command(flatten)]
    server: ServerFlags,
}

/// Returns the state of a starting server: no database and no model.
pub(super) fn app() -> App {
    let args = TestArgs::parse_from(["thunder", "--data-dir", "/tmp/thunder-ui-checks"]);
    let config = Config::new(args.engine, args.data, &args.server).unwrap();
    App::new(Arc::new(config), Arc::new(ModRegistry::with_builtin()), system::now)
}

/// Returns the dashboard's status code for a path.
pub(super) async fn status(path: &str) -> StatusCode {
    let request = Request::get(path).header("host", "localhost").body(Body::empty()).unwrap();
    super::router(Bytes::new()).merge(crate::ui::assets()).with_state(app()).oneshot(request).await.unwrap().status()
}
