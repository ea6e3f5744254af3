//! Names of parameters in the attention API and in `KoboldCPP`'s. Each accepts the names of both, because clients of
//! `KoboldCPP`'s routes may send `input_ids`.

use super::{ClientNames, Fields};
use crate::server::App;
use serde_json::{Map, Value};

/// Names in the attention API and in `KoboldCPP`'s, each with Thunder's name of the parameter.
const ALIASES: [(&str, &str); 9] = [
    ("max_new_tokens", "max_tokens"),
    ("max_length", "max_tokens"),
    ("repetition_penalty", "repeat_penalty"),
    ("rep_pen", "repeat_penalty"),
    ("rep_pen_range", "repeat_last_n"),
    ("sampler_seed", "seed"),
    ("stop_sequence", "stop"),
    ("typical", "typical_p"),
    ("nsigma", "top_n_sigma"),
];

/// Returns the server's defaults, overridden by the parameters that the body contains under an alias, and the names of
/// these.
pub(crate) fn defaults_with_aliases(app: &App, fields: Fields<'_>) -> (Map<String, Value>, ClientNames) {
    let mut names = ClientNames::default();
    let mut defaults = app.config().server.request_defaults.clone();
    for (client_name, name) in ALIASES {
        if let Some(value) = fields.get(client_name) {
            defaults.insert(name.into(), value.clone());
            if fields.get(name).is_none() {
                names.add(name, client_name);
            }
        }
    }
    // The client's maximum length overrides the server's, which is stored as `n_predict`.
    if defaults.contains_key("max_tokens") {
        defaults.remove("n_predict");
    }
    (defaults, names)
}
