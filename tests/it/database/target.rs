//! A server on the database under test.

use crate::harness::{Server, with_fields};
use reqwest::Method;
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection};
use thunder::events::RunId;
use thunder::store::{Database, Store};

/// A server and its database.
pub struct Target {
    pub server: Server,
    url: String,
    /// Part of every name, so that the database may contain earlier data.
    pub nonce: String,
}

impl Target {
    pub fn new(server: Server, url: &str) -> Self {
        let nonce = RunId::now().0.simple().to_string()[4..20].to_owned();
        Self { server, url: url.to_owned(), nonce }
    }

    /// Returns a name that only this target has.
    pub fn name(&self, name: &str) -> String {
        format!("{name}-{}", self.nonce)
    }

    /// Returns a connection for the statements of the checks.
    pub async fn connect(&self) -> PgConnection {
        PgConnection::connect(&self.url).await.unwrap()
    }

    /// Opens the database as a second program.
    pub async fn store(&self, name: &str) -> Store {
        let database =
            Database::Url { url: self.url.clone(), direct_url: None, data_dir: self.server.data_dir.join(name) };
        Store::open(database, |_| {}).await.unwrap()
    }

    /// Ingests the example of the specification under this name; returns the status.
    pub async fn ingest(&self, name: &str) -> u16 {
        const SAMPLE: &str = include_str!("../../../fixtures/sample_payload.json");
        let body = SAMPLE.replace("req_abc123", &self.name(name));
        self.server.request(Method::POST, "/ingest").body(body).send().await.unwrap().status().as_u16()
    }

    /// Generates a run; returns its summary and events when it is stored.
    pub async fn generate(&self, fields: Value) -> Value {
        let body = json!({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8, "seed": 3, "ignore_eos": true});
        let answer = self.server.answer("/v1/chat/completions", &with_fields(body, &fields)).await;
        self.server.finished(answer["thunder"]["run_id"].as_str().unwrap()).await
    }

    /// Returns the request ids of this target's runs that match a filter.
    pub async fn runs_matching(&self, filter: &str) -> Vec<String> {
        let query = format!("q={}&limit=500", urlencode(filter));
        let (status, page) = self.server.get(&format!("/api/v1/runs?{query}")).await;
        assert_eq!(status, 200, "{filter}: {page}");
        let ids = page["runs"].as_array().unwrap().iter().map(|run| run["request_id"].as_str().unwrap().to_owned());
        ids.filter(|id| id.ends_with(&self.nonce)).collect()
    }
}

pub fn urlencode(text: &str) -> String {
    text.bytes()
        .map(|byte| if byte.is_ascii_alphanumeric() { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

/// The mods of the server: name and source.
pub const MODS: [(&str, &str); 2] = [
    (
        "breaks",
        "from thunder_mods import Prefilled, mod\n\n\n@mod(events=[Prefilled])\ndef breaks(event, actions, tokenizer):\n    \
         \"\"\"Raises.\"\"\"\n    raise ValueError('a broken mod')\n",
    ),
    (
        "greets",
        "from thunder_mods import Prefilled, mod\n\n\n@mod(events=[Prefilled])\ndef greets(event, actions, tokenizer):\n    \
         \"\"\"Says hello.\"\"\"\n    return actions.force_output(tokenizer.encode('hello'))\n",
    ),
];
