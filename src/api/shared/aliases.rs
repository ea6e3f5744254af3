//! Names of parameters in the attention API and in `KoboldCPP`'s. Each accepts the names of both, because clients of
//! `KoboldCPP`'s routes may send `input_ids`.

use super::{ClientNames, Fields};
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

/// Returns the parameters that the body contains under an alias, by Thunder's name, and the names of these.
pub(crate) fn aliased_fields(fields: Fields<'_>) -> (Map<String, Value>, ClientNames) {
    let mut names = ClientNames::default();
    let mut aliased = Map::new();
    for (client_name, name) in ALIASES {
        if let Some(value) = fields.get(client_name) {
            aliased.insert(name.into(), value.clone());
            if fields.get(name).is_none() {
                names.add(name, client_name);
            }
        }
    }
    (aliased, names)
}
