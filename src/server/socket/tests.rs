use super::*;
use crate::config::flags::{DataFlags, EngineFlags, ServerFlags, default_flags};
use crate::config::{Config, LimitFlags, Size};
use crate::mods::ModRegistry;
use crate::server::auth::{self, Guard};
use crate::server::{Access, ApiError, ErrorFormat};
use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::routing::get;
use futures::{SinkExt, StreamExt};
use std::sync::Arc;
use yawc::{Frame, HttpRequest, OpCode, Options, TcpWebSocket, WebSocket};

const PATH: &str = "/generate";

/// Starts a server with one WebSocket that echoes messages; "bye" closes it, "flood" sends without end.
async fn echo(change: impl FnOnce(&mut ServerFlags)) -> (App, SocketAddr) {
    let limits = LimitFlags { max_message: Size(1 << 20), socket_ping: 20, ..default_flags() };
    let mut flags = ServerFlags { limits, ..default_flags() };
    change(&mut flags);
    let data = DataFlags { data_dir: Some(std::env::temp_dir()), ..default_flags() };
    let engine = EngineFlags { parallel: Some(1), batch_size: 1, ubatch_size: 1, ..default_flags() };
    let config = Config::new(engine, data, &flags).unwrap();
    let app = App::new(Arc::new(config), Arc::new(ModRegistry::default()), chrono::DateTime::default);
    let handler = |upgrade: Upgrade| async move {
        upgrade.serve(|error| serde_json::to_string(&error.openai()).unwrap(), answer)
    };
    let error_format: ErrorFormat = <ApiError as axum::response::IntoResponse>::into_response;
    let routes = Router::new()
        .route(PATH, get(handler))
        .layer(from_fn_with_state(Guard::new(&app, Access::Socket, error_format), auth::guard))
        .with_state(app.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let routes = routes.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, routes).await });
    (app, address)
}

async fn answer(mut socket: Socket) -> Close {
    loop {
        let message = socket.incoming.next().await;
        match &message {
            Message::Text(text) if text == "bye" => return Close::normal(),
            Message::Text(text) if text == "flood" => while socket.outgoing.send("x".repeat(100_000)).await.is_ok() {},
            _ => {}
        }
        if socket.outgoing.send(message).await.is_err() {
            return Close::normal();
        }
    }
}

async fn connect(address: SocketAddr, options: Options, headers: &[(&str, &str)]) -> yawc::Result<TcpWebSocket> {
    let mut request = HttpRequest::builder();
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let url = format!("ws://{address}{PATH}").parse().unwrap();
    WebSocket::connect(url).with_options(options).with_request(request).await
}

/// Returns all frames up to the end, without pings.
async fn rest(socket: &mut TcpWebSocket) -> Vec<Frame> {
    let frames = socket.filter(|frame| std::future::ready(frame.opcode() != OpCode::Ping));
    frames.collect().await
}

fn first_text(frames: &[Frame]) -> &str {
    frames.first().filter(|frame| frame.opcode() == OpCode::Text).map_or("", Frame::as_str)
}

fn close_code(frames: &[Frame]) -> Option<u16> {
    frames.last().filter(|frame| frame.opcode() == OpCode::Close)?.close_code().map(u16::from)
}

#[tokio::test]
async fn messages_go_both_ways_compressed_and_in_pieces() {
    let (app, address) = echo(|_| ()).await;
    for options in [Options::default(), Options::default().with_balanced_compression()] {
        let mut socket = connect(address, options, &[]).await.unwrap();
        let long = "a text that compresses well, ".repeat(1000);
        socket.send(Frame::text(long.clone())).await.unwrap();
        assert_eq!(socket.next().await.unwrap().as_str(), long);
        socket.send(Frame::text("a").with_fin(false)).await.unwrap();
        socket.send(Frame::continuation("b")).await.unwrap();
        assert_eq!(socket.next().await.unwrap().as_str(), "ab");
        socket.send(Frame::binary(&b"\x00\xff"[..])).await.unwrap();
        assert_eq!(socket.next().await.unwrap().into_payload(), &b"\x00\xff"[..]);
        socket.send(Frame::text("bye")).await.unwrap();
        assert_eq!(close_code(&rest(&mut socket).await), Some(1000));
    }
    app.sockets().all_closed().await;
}

#[tokio::test]
async fn too_large_message_is_rejected_with_reason() {
    let (_, address) = echo(|flags| flags.limits.max_message = Size(1000)).await;
    let reason = "a message may have at most 1000 bytes; see --max-message";
    for options in [Options::default(), Options::default().with_balanced_compression()] {
        for bytes in [1001, 2000, 100_000] {
            let mut socket = connect(address, options.clone(), &[]).await.unwrap();
            socket.send(Frame::text("x".repeat(bytes))).await.unwrap();
            let frames = rest(&mut socket).await;
            let text = first_text(&frames);
            assert!(text.contains(reason), "{bytes}: {text}");
            assert_eq!((frames.len(), close_code(&frames)), (2, Some(1009)), "{bytes}");
            assert_eq!(frames[1].close_reason().unwrap(), Some(reason), "{bytes}");
        }
    }
}

#[tokio::test]
async fn client_that_stops_reading_blocks_the_sender() {
    let (app, address) = echo(|_| ()).await;
    let mut socket = connect(address, Options::default(), &[]).await.unwrap();
    socket.send(Frame::text("flood")).await.unwrap();
    assert!(socket.next().await.is_some());
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    // Control frames still pass while messages wait.
    assert_eq!(*app.sockets().open.borrow(), 1);
    drop(socket);
    app.sockets().all_closed().await;
}

#[tokio::test]
async fn ping_flood_of_client_that_does_not_read_is_slowed_down() {
    const MAX_PINGS: usize = 1_000_000;
    let (app, address) = echo(|_| ()).await;
    let mut socket = connect(address, Options::default(), &[]).await.unwrap();
    let mut sent = 0;
    // Ends when the buffers of the system are full in both directions; without a limit, the server accepts all pings.
    while sent < MAX_PINGS {
        let ping = socket.feed(Frame::ping(vec![0; 125]));
        match tokio::time::timeout(std::time::Duration::from_secs(5), ping).await {
            Ok(fed) => fed.unwrap(),
            Err(_) => break,
        }
        sent += 1;
    }
    assert!(sent < MAX_PINGS, "the server stores the answers to {sent} pings");
    drop(socket);
    app.sockets().all_closed().await;
}

#[tokio::test]
async fn key_is_accepted_as_header_or_in_first_message() {
    let (_, address) = echo(|flags| flags.api_keys = vec!["right".parse().unwrap()]).await;
    let mut socket = connect(address, Options::default(), &[("authorization", "Bearer right")]).await.unwrap();
    socket.send(Frame::text("hello")).await.unwrap();
    assert_eq!(socket.next().await.unwrap().as_str(), "hello");
    assert!(connect(address, Options::default(), &[("authorization", "Bearer wrong")]).await.is_err());

    let mut socket = connect(address, Options::default(), &[]).await.unwrap();
    socket.send(Frame::text(r#"{"type":"auth","api_key":"right"}"#)).await.unwrap();
    socket.send(Frame::text("hello")).await.unwrap();
    assert_eq!(socket.next().await.unwrap().as_str(), "hello");

    let mut socket = connect(address, Options::default(), &[]).await.unwrap();
    socket.send(Frame::text(r#"{"api_key":"right","type":"config","n":1}"#)).await.unwrap();
    assert_eq!(socket.next().await.unwrap().as_str(), r#"{"type":"config","n":1}"#);

    for first in [r#"{"type":"auth","api_key":"wrong"}"#, r#"{"type":"config"}"#, "[]", "no JSON"] {
        let mut socket = connect(address, Options::default(), &[]).await.unwrap();
        socket.send(Frame::text(first)).await.unwrap();
        let frames = rest(&mut socket).await;
        let text = first_text(&frames);
        assert!(text.contains("API key"), "{first}: {text}");
        assert_eq!(close_code(&frames), Some(1008), "{first}");
    }
}

#[tokio::test]
async fn connection_without_key_may_send_16_kib() {
    let (app, address) = echo(|flags| flags.api_keys = vec!["right".parse().unwrap()]).await;
    // With the key the normal message limit applies, also to a message that follows immediately.
    let mut socket = connect(address, Options::default(), &[]).await.unwrap();
    socket.send(Frame::text(r#"{"type":"auth","api_key":"right"}"#)).await.unwrap();
    let long = "x".repeat(500_000);
    socket.send(Frame::text(long.clone())).await.unwrap();
    assert_eq!(socket.next().await.unwrap().as_str(), long);

    // A message that is too long, also if compression makes it small.
    for options in [Options::default(), Options::default().with_balanced_compression()] {
        let mut socket = connect(address, options, &[]).await.unwrap();
        socket.send(Frame::text(format!(r#"{{"api_key":"right","x":"{}"}}"#, "x".repeat(20_000)))).await.unwrap();
        assert_eq!(close_code(&rest(&mut socket).await), Some(1009));
    }
    // The start of a message that never ends.
    let mut sockets = Vec::new();
    for _ in 0..3 {
        let mut socket = connect(address, Options::default(), &[]).await.unwrap();
        for piece in 0..4 {
            let frame = if piece == 0 { Frame::text("x".repeat(9000)) } else { Frame::continuation("x".repeat(9000)) };
            // The server may have closed the connection already.
            let _ = socket.send(frame.with_fin(false)).await;
        }
        sockets.push(socket);
    }
    for mut socket in sockets {
        let frames = tokio::time::timeout(std::time::Duration::from_mins(1), rest(&mut socket)).await.unwrap();
        assert!(matches!(close_code(&frames), Some(1008 | 1009) | None));
    }
    let kept = app.sockets().unauthenticated.available_permits();
    assert_eq!(kept, unauthenticated::MAX_CONNECTIONS, "all permits are released");
}

#[tokio::test]
async fn connections_waiting_for_a_key_are_limited() {
    let (app, address) = echo(|flags| flags.api_keys = vec!["right".parse().unwrap()]).await;
    let all = app.sockets().unauthenticated.clone();
    let taken = all.acquire_many(unauthenticated::MAX_CONNECTIONS as u32 - 1).await.unwrap();
    let waiting = connect(address, Options::default(), &[]).await.unwrap();
    assert!(connect(address, Options::default(), &[]).await.is_err(), "one more than the limit");
    // A key in the header needs no permit.
    assert!(connect(address, Options::default(), &[("authorization", "Bearer right")]).await.is_ok());
    let mut waiting = waiting;
    waiting.send(Frame::text(r#"{"type":"auth","api_key":"right"}"#)).await.unwrap();
    waiting.send(Frame::text("hello")).await.unwrap();
    assert_eq!(waiting.next().await.unwrap().as_str(), "hello");
    assert!(connect(address, Options::default(), &[]).await.is_ok());
    drop(taken);
}

#[tokio::test]
async fn foreign_origin_cannot_connect() {
    let (_, address) = echo(|_| ()).await;
    assert!(connect(address, Options::default(), &[("origin", "https://evil.example")]).await.is_err());
    let own = format!("http://{address}");
    assert!(connect(address, Options::default(), &[("origin", &own)]).await.is_ok());
}

#[tokio::test]
async fn plain_request_gets_websocket_hint() {
    let (_, address) = echo(|_| ()).await;
    // An error means that another test installed the provider first.
    let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    let answer = reqwest::get(format!("http://{address}{PATH}")).await.unwrap();
    assert_eq!(answer.status(), 400);
    assert!(answer.text().await.unwrap().contains("is a WebSocket"));
}

#[tokio::test]
async fn stopping_server_sends_close_frame() {
    let (app, address) = echo(|_| ()).await;
    let mut socket = connect(address, Options::default(), &[]).await.unwrap();
    socket.send(Frame::text("hello")).await.unwrap();
    assert!(socket.next().await.is_some());
    app.set_state(crate::server::ServerState::Stopping);
    assert_eq!(close_code(&rest(&mut socket).await), Some(1001));
    app.sockets().all_closed().await;
}
