//! Machine surfaces, one folder a contract; the only place besides `ui` that names axum.
