//! A server of objects that fails on request. A tool for tests only: it knows HEAD, and GET with a
//! range. In front of another server it is a proxy that fails.

use http_body_util::BodyExt;
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::header::{
    CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderMap, HeaderValue, IF_MATCH, LAST_MODIFIED, RANGE,
};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

/// What happens to an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// 503.
    Busy,
    /// The connection ends without an answer.
    Drop,
    /// The connection ends within the body.
    Truncate,
    /// The body has fewer bytes than the range in its head, and a length that fits.
    Short,
    /// The body has a byte more than the range in its head.
    Long,
    /// The answer comes after the client's patience.
    Late,
    /// A byte is another one.
    Corrupt,
}

/// How a server behaves. It may change meanwhile.
#[derive(Clone, Debug, Default)]
pub(crate) struct Behaviour {
    /// The time before each answer.
    pub(crate) delay: Duration,
    /// Every n-th GET meets the next of the faults; 0 for none.
    pub(crate) every: usize,
    pub(crate) faults: Vec<Fault>,
    /// Whether `If-Match` is passed over.
    pub(crate) ignores_conditions: bool,
    /// HEAD is answered with this.
    pub(crate) head: Option<StatusCode>,
    /// All is answered with this status, and GET with this body too.
    pub(crate) refusal: Option<(u16, &'static str)>,
    /// A part of an object is answered with the whole.
    pub(crate) has_no_parts: bool,
    /// Each answer names another version.
    pub(crate) changes: bool,
    /// Where the requests go, instead of the objects here.
    pub(crate) upstream: Option<u16>,
}

#[derive(Default)]
struct State {
    objects: HashMap<String, (Bytes, u64)>,
    behaviour: Behaviour,
    gets: Vec<Range<u64>>,
    /// The requests before their answers, now and at most.
    waiting: (usize, usize),
    versions: u64,
}

/// A server on a port of this host.
pub(crate) struct Server {
    pub(crate) port: u16,
    state: Arc<Mutex<State>>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub(crate) fn start(behaviour: Behaviour) -> Self {
        let state = Arc::new(Mutex::new(State {
            behaviour,
            ..State::default()
        }));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let listener = runtime
            .block_on(TcpListener::bind("127.0.0.1:0"))
            .expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let (stop, stopped) = oneshot::channel();
        let own = state.clone();
        let thread = std::thread::spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    () = accept(listener, own) => {}
                    _ = stopped => {}
                }
            });
        });
        Self {
            port,
            state,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    /// Stores an object, or another one in its place.
    pub(crate) fn put(&self, path: &str, bytes: impl Into<Bytes>) {
        let mut state = self.state.lock().expect("no panic");
        state.versions += 1;
        let version = state.versions;
        state
            .objects
            .insert(format!("/{path}"), (bytes.into(), version));
    }

    pub(crate) fn behave(&self, change: impl FnOnce(&mut Behaviour)) {
        change(&mut self.state.lock().expect("no panic").behaviour);
    }

    /// The ranges of the GETs so far.
    pub(crate) fn gets(&self) -> Vec<Range<u64>> {
        self.state.lock().expect("no panic").gets.clone()
    }

    /// The most requests at once since the last call.
    pub(crate) fn most_at_once(&self) -> usize {
        std::mem::take(&mut self.state.lock().expect("no panic").waiting.1)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn accept(listener: TcpListener, state: Arc<Mutex<State>>) {
    while let Ok((stream, _)) = listener.accept().await {
        let state = state.clone();
        tokio::spawn(async move {
            let service = service_fn(|request| answer(state.clone(), request));
            let http = hyper::server::conn::http1::Builder::new();
            // A connection that is cut is what the tests want.
            let _ = http.serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

/// A body whose length is what the head says, right or wrong.
#[derive(Default)]
struct Part(Option<Bytes>);

impl Body for Part {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Poll::Ready(self.0.take().map(|bytes| Ok(Frame::data(bytes))))
    }
}

type Answer = Response<Part>;

async fn answer(
    state: Arc<Mutex<State>>,
    request: Request<Incoming>,
) -> Result<Answer, Box<dyn std::error::Error + Send + Sync>> {
    let behaviour = state.lock().expect("no panic").behaviour.clone();
    let is_get = request.method() == Method::GET;
    let mut fault = None;
    if is_get {
        let mut state = state.lock().expect("no panic");
        let number = state.gets.len() + 1;
        state
            .gets
            .push(range(request.headers()).unwrap_or(0..u64::MAX));
        if behaviour.every > 0 && number.is_multiple_of(behaviour.every) {
            let faults = &behaviour.faults;
            fault = Some(faults[number / behaviour.every % faults.len()]);
        }
    }
    wait(&state, behaviour.delay).await;
    let whole = match behaviour.upstream {
        Some(port) => forward(port, request).await?,
        None => local(&state, &behaviour, &request),
    };
    match fault {
        Some(fault) if whole.status().is_success() => spoil(whole, fault).await,
        _ => Ok(whole),
    }
}

/// Waits before an answer, and counts the requests that do.
async fn wait(state: &Mutex<State>, delay: Duration) {
    {
        let waiting = &mut state.lock().expect("no panic").waiting;
        waiting.0 += 1;
        waiting.1 = waiting.1.max(waiting.0);
    }
    tokio::time::sleep(delay).await;
    state.lock().expect("no panic").waiting.0 -= 1;
}

fn range(headers: &HeaderMap) -> Option<Range<u64>> {
    let range = headers.get(RANGE)?.to_str().ok()?;
    let (from, to) = range.strip_prefix("bytes=")?.split_once('-')?;
    Some(from.parse().ok()?..to.parse::<u64>().ok()? + 1)
}

fn status(code: StatusCode) -> Answer {
    let mut answer = Response::new(Part::default());
    *answer.status_mut() = code;
    answer
}

fn local(state: &Mutex<State>, behaviour: &Behaviour, request: &Request<Incoming>) -> Answer {
    if let (Some(code), &Method::HEAD) = (behaviour.head, request.method()) {
        return status(code);
    }
    if let Some((code, body)) = behaviour.refusal {
        let mut answer = status(StatusCode::from_u16(code).expect("a status"));
        if request.method() == Method::GET {
            *answer.body_mut() = Part(Some(Bytes::from_static(body.as_bytes())));
        }
        return answer;
    }
    let mut state = state.lock().expect("no panic");
    if behaviour.changes {
        state.versions += 1;
        let version = state.versions;
        for object in state.objects.values_mut() {
            object.1 = version;
        }
    }
    let Some((bytes, version)) = state.objects.get(request.uri().path()) else {
        return status(StatusCode::NOT_FOUND);
    };
    let tag = format!("\"version-{version}\"");
    let wanted = request.headers().get(IF_MATCH);
    if wanted.is_some_and(|wanted| wanted != tag.as_str()) && !behaviour.ignores_conditions {
        return status(StatusCode::PRECONDITION_FAILED);
    }
    let all = bytes.len() as u64;
    let range = range(request.headers()).filter(|_| !behaviour.has_no_parts);
    let part = range.clone().unwrap_or(0..all);
    let body = bytes.slice(part.start as usize..part.end.min(all) as usize);
    let answer = Response::builder()
        .header(ETAG, tag)
        .header(LAST_MODIFIED, "Thu, 01 Jan 2026 00:00:00 GMT")
        .header(CONTENT_LENGTH, body.len());
    let answer = match range {
        Some(range) => answer.status(StatusCode::PARTIAL_CONTENT).header(
            CONTENT_RANGE,
            format!("bytes {}-{}/{all}", range.start, range.end - 1),
        ),
        None => answer,
    };
    let body = match *request.method() {
        Method::HEAD => Bytes::new(),
        _ => body,
    };
    answer.body(Part(Some(body))).expect("an answer")
}

async fn spoil(
    answer: Answer,
    fault: Fault,
) -> Result<Answer, Box<dyn std::error::Error + Send + Sync>> {
    let (mut head, body) = answer.into_parts();
    let mut body = body.collect().await?.to_bytes().to_vec();
    match fault {
        Fault::Busy => return Ok(status(StatusCode::SERVICE_UNAVAILABLE)),
        Fault::Drop => return Err(io::Error::other("dropped").into()),
        Fault::Late => tokio::time::sleep(pageferry_testkit::LIMIT).await,
        // The length in the head stays, so hyper cuts the connection.
        Fault::Truncate => body.truncate(body.len() / 2),
        Fault::Short => {
            body.truncate(body.len() / 2);
            let len = HeaderValue::from(body.len());
            head.headers.insert(CONTENT_LENGTH, len);
        }
        Fault::Long => {
            body.push(1);
            let len = HeaderValue::from(body.len());
            head.headers.insert(CONTENT_LENGTH, len);
        }
        Fault::Corrupt => {
            let middle = body.len() / 2;
            body[middle] ^= 1;
        }
    }
    Ok(Response::from_parts(head, Part(Some(body.into()))))
}

async fn forward(
    port: u16,
    request: Request<Incoming>,
) -> Result<Answer, Box<dyn std::error::Error + Send + Sync>> {
    let stream = TcpStream::connect(("127.0.0.1", port)).await?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(async move {
        // Its end is seen by the sender.
        let _ = connection.await;
    });
    let (head, body) = sender.send_request(request).await?.into_parts();
    let body = body.collect().await?.to_bytes();
    Ok(Response::from_parts(head, Part(Some(body))))
}
