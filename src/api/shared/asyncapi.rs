//! `AsyncAPI` descriptions of WebSockets. The schema of a message is derived from its type.

use serde::Serialize;
use std::collections::BTreeMap;
use utoipa::ToSchema;
use utoipa::openapi::schema::{ObjectBuilder, Schema};
use utoipa::openapi::{KnownFormat, RefOr, SchemaFormat, Type};

/// A WebSocket with its messages.
pub(crate) struct SocketDescription {
    /// Name of the channel and prefix of its messages' names.
    pub(crate) name: &'static str,
    pub(crate) address: &'static str,
    pub(crate) title: &'static str,
    pub(crate) description: &'static str,
    /// Messages from clients.
    pub(crate) client: Vec<MessageDescription>,
    /// Messages from the server.
    pub(crate) server: Vec<MessageDescription>,
}

/// A message of a WebSocket.
pub(crate) struct MessageDescription {
    name: &'static str,
    message: MessageObject,
    schemas: Vec<(String, RefOr<Schema>)>,
}

/// A message in the document.
#[derive(Serialize)]
struct MessageObject {
    name: &'static str,
    summary: &'static str,
    #[serde(rename = "contentType", skip_serializing_if = "Option::is_none")]
    content_type: Option<&'static str>,
    payload: RefOr<Schema>,
}

impl MessageDescription {
    /// Describes a message with the field `type`, which is its name.
    pub(crate) fn typed<T: ToSchema>(name: &'static str, summary: &'static str) -> Self {
        let mut description = Self::untyped::<T>(name, summary);
        if let RefOr::T(schema) = &mut description.message.payload {
            set_type(schema, name);
        }
        description
    }

    /// Describes a message without the field `type`.
    pub(crate) fn untyped<T: ToSchema>(name: &'static str, summary: &'static str) -> Self {
        let mut schemas = Vec::new();
        T::schemas(&mut schemas);
        Self { name, message: MessageObject { name, summary, content_type: None, payload: T::schema() }, schemas }
    }

    /// Describes a message of bytes.
    pub(crate) fn binary(name: &'static str, summary: &'static str) -> Self {
        let payload = ObjectBuilder::new()
            .schema_type(Type::String)
            .format(Some(SchemaFormat::KnownFormat(KnownFormat::Binary)))
            .build();
        let payload = RefOr::T(Schema::Object(payload));
        let message = MessageObject { name, summary, content_type: Some("application/octet-stream"), payload };
        Self { name, message, schemas: Vec::new() }
    }
}

/// Adds the required property `type` with one possible value.
fn set_type(schema: &mut Schema, name: &str) {
    match schema {
        Schema::Object(object) => {
            let value = ObjectBuilder::new().schema_type(Type::String).enum_values(Some([name])).build();
            object.properties.insert("type".to_owned(), RefOr::T(Schema::Object(value)));
            if !object.required.iter().any(|field| field == "type") {
                object.required.insert(0, "type".to_owned());
            }
        }
        // The last part has the fields that are not flattened.
        Schema::AllOf(parts) => {
            if let Some(RefOr::T(part)) = parts.items.last_mut() {
                set_type(part, name);
            }
        }
        _ => {}
    }
}

/// An `AsyncAPI` document.
#[derive(Serialize)]
pub(crate) struct AsyncApiDocument {
    asyncapi: &'static str,
    info: AsyncApiInfo,
    #[serde(rename = "defaultContentType")]
    default_content_type: &'static str,
    servers: BTreeMap<&'static str, ServerObject>,
    channels: BTreeMap<&'static str, ChannelObject>,
    operations: BTreeMap<String, OperationObject>,
    components: ComponentsObject,
}

/// Title and description of the document.
#[derive(Debug, Serialize)]
pub(crate) struct AsyncApiInfo {
    pub(crate) title: &'static str,
    pub(crate) version: &'static str,
    pub(crate) description: &'static str,
}

#[derive(Debug, Serialize)]
struct ServerObject {
    host: &'static str,
    protocol: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pathname: Option<String>,
}

#[derive(Debug, Serialize)]
struct ChannelObject {
    address: &'static str,
    title: &'static str,
    description: &'static str,
    messages: BTreeMap<&'static str, Reference>,
}

#[derive(Debug, Serialize)]
struct OperationObject {
    action: &'static str,
    channel: Reference,
    messages: Vec<Reference>,
    summary: &'static str,
}

#[derive(Default, Serialize)]
struct ComponentsObject {
    messages: BTreeMap<String, MessageObject>,
    schemas: BTreeMap<String, RefOr<Schema>>,
}

#[derive(Debug, Serialize)]
struct Reference {
    #[serde(rename = "$ref")]
    target: String,
}

impl AsyncApiDocument {
    /// Returns the document of these WebSockets, on a server whose paths start with `prefix`.
    pub(crate) fn new(info: AsyncApiInfo, prefix: &str, sockets: impl IntoIterator<Item = SocketDescription>) -> Self {
        let pathname = (!prefix.is_empty()).then(|| prefix.to_owned());
        let mut document = Self {
            asyncapi: "3.0.0",
            info,
            default_content_type: "application/json",
            servers: BTreeMap::from([("local", ServerObject { host: "127.0.0.1:6767", protocol: "ws", pathname })]),
            channels: BTreeMap::new(),
            operations: BTreeMap::new(),
            components: ComponentsObject::default(),
        };
        for socket in sockets {
            document.add(socket);
        }
        document
    }

    fn add(&mut self, socket: SocketDescription) {
        let SocketDescription { name, address, title, description, client, server } = socket;
        let mut messages = BTreeMap::new();
        // `action` is from the server's view, the operation's name from the client's.
        for (action, prefix, summary, described) in [
            ("receive", "send", "Messages from clients.", client),
            ("send", "receive", "Messages from the server.", server),
        ] {
            let channel = Reference::new(&format!("channels/{name}"));
            let references =
                described.iter().map(|message| Reference::new(&format!("channels/{name}/messages/{}", message.name)));
            let operation = OperationObject { action, channel, messages: references.collect(), summary };
            self.operations.insert(format!("{prefix}{}{}", &name[..1].to_uppercase(), &name[1..]), operation);
            for MessageDescription { name: message, message: object, schemas } in described {
                let key = format!("{name}_{message}");
                messages.insert(message, Reference::new(&format!("components/messages/{key}")));
                self.components.messages.insert(key, object);
                self.components.schemas.extend(schemas);
            }
        }
        self.channels.insert(name, ChannelObject { address, title, description, messages });
    }
}

impl Reference {
    fn new(path: &str) -> Self {
        Self { target: format!("#/{path}") }
    }
}
