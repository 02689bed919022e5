//! HTTP over the API socket: the server of `pager serve`, and the client of the other commands.
//!
//! **Guarantee.** A client costs at most [`MAX_HEAD_BYTES`], [`api::MAX_BODY_BYTES`] and [`LIMIT`],
//! and at most [`CLIENTS`] are served at once. None of them delays a fault: the server has threads
//! of its own.
//!
//! **Mechanism.** hyper, on one thread of tokio. Requests are carried out on its blocking threads.

use super::api::{self, Answer, Body};
use crate::exit::{Exit, Failure};
use crate::output;
use crate::signals::Interrupts;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::CONTENT_TYPE;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use pageferry_pager::Pager;
use serde_json::Value;
use std::convert::Infallible;
use std::io::ErrorKind;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// The time for the head of a request, and for its body.
const LIMIT: Duration = Duration::from_secs(5);
/// The time for a whole connection: killing a VM may take a while.
const CONNECTION_LIMIT: Duration = Duration::from_secs(120);
/// The longest head of a request.
const MAX_HEAD_BYTES: usize = 16 << 10;
/// The clients served at once.
const CLIENTS: usize = 32;

/// Serves the API until the process ends.
///
/// # Errors
/// When the host has no room for the threads.
pub(crate) fn serve(listener: UnixListener, pager: Arc<Pager>) -> Result<(), Failure> {
    let cannot = |why| Failure::os("cannot serve the API", why);
    listener.set_nonblocking(true).map_err(cannot)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(CLIENTS)
        .build()
        .map_err(cannot)?;
    std::thread::Builder::new()
        .name("api".into())
        .spawn(move || {
            runtime.block_on(async move {
                match tokio::net::UnixListener::from_std(listener) {
                    Ok(listener) => accept(listener, pager).await,
                    Err(why) => output::note(&format!("cannot serve the API: {why}")),
                }
            });
        })
        .map_err(cannot)?;
    Ok(())
}

async fn accept(listener: tokio::net::UnixListener, pager: Arc<Pager>) {
    let clients = Arc::new(Semaphore::new(CLIENTS));
    loop {
        // One more client waits in the backlog.
        let Ok(permit) = clients.clone().acquire_owned().await else {
            return;
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(why) => {
                tracing::warn!("cannot accept a client of the API: {why}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let pager = pager.clone();
        tokio::spawn(async move {
            let service = service_fn(|request| answer(pager.clone(), request));
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(LIMIT)
                .max_buf_size(MAX_HEAD_BYTES)
                .serve_connection(TokioIo::new(stream), service);
            if let Ok(Err(why)) = tokio::time::timeout(CONNECTION_LIMIT, connection).await {
                tracing::info!("a client of the API: {why}");
            }
            drop(permit);
        });
    }
}

async fn answer(
    pager: Arc<Pager>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (head, body) = request.into_parts();
    let body = Limited::new(body, api::MAX_BODY_BYTES).collect();
    // A head that came in one piece may be longer than hyper's buffer.
    let fields = head
        .headers
        .iter()
        .map(|(name, value)| name.as_str().len() + value.len() + 4);
    let head_bytes =
        head.uri.path_and_query().map_or(0, |it| it.as_str().len()) + fields.sum::<usize>();
    let answer = match tokio::time::timeout(LIMIT, body).await {
        _ if head_bytes > MAX_HEAD_BYTES => {
            let why = format!("the head has {head_bytes} bytes: expected at most {MAX_HEAD_BYTES}");
            Answer::refusal(431, why)
        }
        Err(_) => Answer::refusal(408, format_args!("the body was not whole after {LIMIT:?}")),
        Ok(Err(why)) => Answer::refusal(413, format_args!("the body: {why}")),
        Ok(Ok(body)) => {
            let work = move || {
                let target = head
                    .uri
                    .path_and_query()
                    .map_or("/", |target| target.as_str());
                api::handle(&pager, head.method.as_str(), target, &body.to_bytes())
            };
            let handled = tokio::task::spawn_blocking(work).await;
            handled.unwrap_or_else(|_| Answer::refusal(500, "a defect of Pageferry: see its log"))
        }
    };
    let (kind, bytes) = match answer.body {
        Body::Empty => ("application/json", Bytes::new()),
        Body::Json(value) => ("application/json", format!("{value}\n").into()),
        Body::Metrics(text) => ("text/plain; version=0.0.4", text.into()),
        Body::Lines(text) => ("application/x-ndjson", text.into()),
        Body::Html(text) => ("text/html; charset=utf-8", text.into()),
    };
    let mut response = Response::new(Full::new(bytes));
    *response.status_mut() =
        StatusCode::from_u16(answer.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let kind = hyper::header::HeaderValue::from_static(kind);
    response.headers_mut().insert(CONTENT_TYPE, kind);
    Ok(response)
}

/// Sends a request to the pager at `socket`. Returns the JSON of its answer, null if it is empty.
///
/// # Errors
/// [`Exit::NoVm`] when no pager listens, [`Exit::Declined`] with its sentence when it refuses.
pub(crate) fn ask(
    socket: &Path,
    method: &str,
    target: &str,
    body: String,
    interrupts: &Interrupts,
) -> Result<Value, Failure> {
    match request(socket, method, target, body, interrupts)? {
        Got::Json(value) => Ok(value),
        Got::Text(_) => Err(Failure::new(
            Exit::Protocol,
            "the pager's answer is no JSON",
        )),
    }
}

/// Gets what may be no JSON.
///
/// # Errors
/// As [`ask`].
pub(crate) fn get(socket: &Path, target: &str, interrupts: &Interrupts) -> Result<Got, Failure> {
    request(socket, "GET", target, String::new(), interrupts)
}

/// The answer of a pager.
pub(crate) enum Got {
    Json(Value),
    /// Events or a page.
    Text(String),
}

fn request(
    socket: &Path,
    method: &str,
    target: &str,
    body: String,
    interrupts: &Interrupts,
) -> Result<Got, Failure> {
    let cannot = |why| Failure::os("cannot ask the pager", why);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
        .map_err(cannot)?;
    runtime.block_on(async {
        let interrupted = async {
            while !interrupts.any() {
                tokio::time::sleep(Interrupts::POLL).await;
            }
        };
        tokio::select! {
            answer = exchange(socket, method, target, body) => answer,
            () = interrupted => Err(Failure::new(Exit::Cancelled, "cancelled")),
            () = tokio::time::sleep(CONNECTION_LIMIT) => {
                Err(Failure::new(Exit::NoVm, "the pager does not answer"))
            }
        }
    })
}

async fn exchange(socket: &Path, method: &str, target: &str, body: String) -> Result<Got, Failure> {
    let broken = |why: hyper::Error| Failure::new(Exit::NoVm, format!("the pager's answer: {why}"));
    let stream = tokio::net::UnixStream::connect(socket)
        .await
        .map_err(|why| {
            let path = socket.display();
            match why.kind() {
                ErrorKind::NotFound | ErrorKind::ConnectionRefused => Failure::new(
                    Exit::NoVm,
                    format!("no pager listens at {path}: start one by `pageferry pager serve`"),
                ),
                _ => Failure::os(format_args!("cannot connect to the pager at {path}"), why),
            }
        })?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(broken)?;
    tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(target)
        .header(hyper::header::HOST, "pager")
        .body(Full::new(Bytes::from(body)))
        .map_err(|why| Failure::os("the request", why))?;
    let response = sender.send_request(request).await.map_err(broken)?;
    let code = response.status();
    let kind = response.headers().get(CONTENT_TYPE);
    let is_json = kind.is_some_and(|kind| kind.as_bytes() == b"application/json");
    // 4096 restores of a few KiB each.
    let body = Limited::new(response.into_body(), 64 << 20).collect().await;
    let body = body
        .map_err(|why| Failure::new(Exit::NoVm, format!("the pager's answer: {why}")))?
        .to_bytes();
    if !is_json && code.is_success() {
        let text = String::from_utf8(body.to_vec());
        let text = text.map_err(|_| Failure::new(Exit::Protocol, "the pager's answer is no text"));
        return text.map(Got::Text);
    }
    let value: Value = if body.is_empty() {
        Value::Null
    } else {
        serde_json::from_slice(&body).map_err(|why| {
            Failure::new(
                Exit::Protocol,
                format!("the pager's answer is not readable: {why}"),
            )
        })?
    };
    if code.is_success() {
        return Ok(Got::Json(value));
    }
    let why = value["error"]
        .as_str()
        .unwrap_or("it gave no reason")
        .to_owned();
    let exit = if code == StatusCode::INTERNAL_SERVER_ERROR {
        Exit::Internal
    } else if code == StatusCode::UNPROCESSABLE_ENTITY || code == StatusCode::BAD_REQUEST {
        Exit::Usage
    } else {
        Exit::Declined
    };
    Err(Failure::new(exit, why))
}
