//! The control vectors that a page's forms offer.

use crate::model::llama::ControlVectorList;
use crate::server::App;
use serde::Serialize;

/// The control vectors of a model, for `steering.js`.
#[derive(Serialize)]
struct VectorsView<'a> {
    names: Vec<&'a str>,
    /// Number of layers of the model.
    layers: u32,
    default_layers: [u32; 2],
}

impl<'a> VectorsView<'a> {
    fn new(known: &'a ControlVectorList) -> Self {
        let names = known.as_slice().iter().map(|vector| &*vector.name).collect();
        Self { names, layers: known.layers(), default_layers: known.default_layers() }
    }
}

/// Returns the control vectors of the default model as JSON. The result is empty if it has none, and for other models,
/// which never have any.
pub(super) fn control_vectors(app: &App, model: Option<&str>) -> String {
    let Ok(loaded) = app.default_model() else { return String::new() };
    let known = loaded.model().adapters().control_vectors();
    if known.as_slice().is_empty() || model.is_some_and(|model| model != loaded.name()) {
        return String::new();
    }
    serde_json::to_string(&VectorsView::new(known)).expect("the view has string keys")
}
