//! `/props`: server properties that clients query before their first request.

mod capabilities;
mod response;
mod routes;

pub(super) use response::describe;
pub(super) use routes::router;
