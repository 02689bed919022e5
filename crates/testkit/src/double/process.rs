//! The double's own process: its API, and the orders of its test.
//!
//! **Guarantee.** The threads that answer the API and the test touch no guest memory, unless a call
//! of the API has to. So they answer while other threads sleep on missing pages.

use super::guest::Guest;
use super::{CONFIG, Config, Done, Order, Status};
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::exit;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What differs between VMMs.
pub(crate) trait Vmm: Send + Sync + 'static {
    /// The state without a VM.
    const NO_VM: &'static str;
    /// The status of a call that is refused.
    const REFUSED: &'static str;
    /// The call that ends the process if it is refused.
    const VITAL: &'static str;

    fn guest(&self) -> Option<Arc<Guest>>;

    /// Adds what only this VMM has.
    fn tell(&self, status: &mut Status);

    /// Carries out an order that not all VMMs know.
    fn obey(&self, order: Order) -> Done;

    /// Carries out a call of the API.
    fn call(self: &Arc<Self>, method: &str, path: &str, body: &Value) -> Done<Value>;

    /// The body of a refusal.
    fn refusal(why: String) -> String;

    fn state(&self) -> &'static str {
        match self.guest() {
            None => Self::NO_VM,
            Some(guest) if guest.is_running() => "Running",
            Some(_) => "Paused",
        }
    }
}

/// Becomes the double that `new` makes, in a process that [`Double::start`](super::Double::start)
/// has started. Returns at once in any other process.
pub(crate) fn entry<C: Config, V: Vmm>(new: impl FnOnce(C) -> V) {
    let Some(text) = std::env::var_os(CONFIG) else {
        return;
    };
    let stdin = std::io::stdin().as_fd().try_clone_to_owned();
    let control = UnixStream::from(stdin.expect("a descriptor"));
    // A thread that panics would let the test wait for what never comes.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        exit(2);
    }));
    let config: C = serde_json::from_slice(text.as_encoded_bytes()).expect("a configuration");
    let api = config
        .api()
        .map(|path| UnixListener::bind(path).expect("an API socket"));
    let vmm = Arc::new(new(config));
    if let Some(api) = api {
        let served = Arc::clone(&vmm);
        std::thread::spawn(move || {
            for call in api.incoming().flatten() {
                let vmm = Arc::clone(&served);
                std::thread::spawn(move || answer(&vmm, &call));
            }
        });
    }
    let say = |answer: Done<Value>| {
        let answer = answer.map_err(|why| why.to_string());
        let line = serde_json::to_string(&answer).expect("JSON");
        writeln!(&control, "{line}").expect("the test listens");
    };
    let regions = vmm.guest().map(|guest| guest.memory.regions().to_vec());
    say(Ok(json!(regions.unwrap_or_default())));
    for line in BufReader::new(&control).lines().map_while(Result::ok) {
        say(obey(&*vmm, serde_json::from_str(&line).expect("an order")));
    }
    exit(2);
}

fn obey(vmm: &impl Vmm, order: Order) -> Done<Value> {
    let guest = vmm.guest();
    if let Order::Status = order {
        let mut status = guest.map_or_else(Status::default, |guest| guest.status());
        status.state = vmm.state().into();
        vmm.tell(&mut status);
        return Ok(json!(status));
    }
    let guest = guest.ok_or("there is no VM");
    match order {
        Order::Run => guest?.run(),
        Order::Pause => guest?.stop(),
        Order::Begin(task) => guest?.begin(task)?,
        Order::Quit => exit(i32::from(guest?.wrong.load(Ordering::SeqCst) > 0)),
        other => vmm.obey(other)?,
    }
    Ok(Value::Null)
}

/// Answers one call of the API.
fn answer<V: Vmm>(vmm: &Arc<V>, mut call: &UnixStream) {
    let Some((method, path, body)) = read_call(call) else {
        return;
    };
    let done = vmm.call(&method, &path, &body);
    let dies = done.is_err() && path == V::VITAL;
    let (status, body) = match done {
        Ok(Value::Null) => ("204 No Content", None),
        Ok(body) => ("200 OK", Some(body.to_string())),
        Err(why) => (V::REFUSED, Some(V::refusal(why.to_string()))),
    };
    let body = body.map_or("\r\n".into(), |body| {
        let length = body.len();
        format!("Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}")
    });
    let _ = write!(
        call,
        "HTTP/1.1 {status}\r\nServer: double\r\nConnection: keep-alive\r\n{body}"
    );
    if dies {
        exit(1);
    }
}

/// Reads a call: its method, its path and its body.
fn read_call(call: &UnixStream) -> Option<(String, String, Value)> {
    let mut reader = BufReader::new(call);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut length = 0;
    loop {
        line.clear();
        reader.read_line(&mut line).ok()?;
        if line.trim().is_empty() {
            break;
        }
        let (name, value) = line.split_once(':')?;
        if name.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse().ok()?;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let body = serde_json::from_slice(&body).unwrap_or_default();
    Some((method, path, body))
}
