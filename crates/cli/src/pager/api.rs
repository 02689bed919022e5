//! The requests of the pager's API, without their transport.
//!
//! **Guarantee.** `docs/pager-api.json` describes every request and answer, which a test checks. A
//! request that is refused changes nothing, and its answer has one sentence.

use super::text;
use pageferry_pager::{Background, EndError, Name, Pager, Restore, RestoreError};
use serde::Deserialize;
use serde_json::{Value, json};
use std::time::Duration;

/// The longest body of a request.
pub(crate) const MAX_BODY_BYTES: usize = 64 << 10;

/// The longest wait for an event.
const WAIT: Duration = Duration::from_secs(10);

/// An answer: a code of HTTP, and a body.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) code: u16,
    pub(crate) body: Body,
}

/// The body of an answer.
#[derive(Debug)]
pub(crate) enum Body {
    Empty,
    Json(Value),
    /// Metrics in Prometheus's text format.
    Metrics(String),
    /// JSON objects, one a line.
    Lines(String),
    /// A page.
    Html(String),
}

impl Answer {
    fn json(code: u16, value: Value) -> Self {
        Self {
            code,
            body: Body::Json(value),
        }
    }

    /// A refusal with its reason.
    pub(crate) fn refusal(code: u16, why: impl std::fmt::Display) -> Self {
        Self::json(code, json!({ "error": why.to_string() }))
    }
}

/// A change of a restore.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Change {
    background: Background,
}

/// Carries out a request. `target` is its path and query.
pub(crate) fn handle(pager: &Pager, method: &str, target: &str, body: &[u8]) -> Answer {
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let restore = path.strip_prefix("/restores/");
    match (method, path, restore) {
        ("GET", "/restores", _) => match serde_json::to_value(pager.list()) {
            Ok(list) => Answer::json(200, list),
            Err(why) => Answer::refusal(500, why),
        },
        ("GET", "/metrics", _) => Answer {
            code: 200,
            body: Body::Metrics(text::metrics(&pager.list())),
        },
        ("GET", "/events", _) => events(pager, query),
        (_, "/restores" | "/metrics" | "/events", _) => {
            Answer::refusal(405, "only GET is served here")
        }
        (_, _, Some(rest)) if rest.ends_with("/report") => {
            match rest.trim_end_matches("/report").parse::<Name>() {
                Ok(_) if method != "GET" => Answer::refusal(405, "only GET is served here"),
                Ok(name) => report(pager, &name),
                Err(why) => Answer::refusal(400, why),
            }
        }
        (_, _, Some(name)) => match name.parse::<Name>() {
            Ok(name) => named(pager, method, &name, query, body),
            Err(why) => Answer::refusal(400, why),
        },
        _ => Answer::refusal(
            404,
            "there is nothing at this path: expected /restores, /restores/NAME, \
             /restores/NAME/report, /events or /metrics",
        ),
    }
}

/// The events behind a number, as soon as there is one.
fn events(pager: &Pager, query: &str) -> Answer {
    let (after, wait) = match query {
        "" => (Ok(0), Duration::ZERO),
        query => (
            query.strip_prefix("after=").unwrap_or_default().parse(),
            WAIT,
        ),
    };
    let Ok(after) = after else {
        return Answer::refusal(400, "the query: expected after=NUMBER");
    };
    let lines = pager.events_after(after, wait).into_iter().map(|event| {
        let line = serde_json::to_string(&event)?;
        Ok::<_, serde_json::Error>(line + "\n")
    });
    match lines.collect::<Result<String, _>>() {
        Ok(lines) => Answer {
            code: 200,
            body: Body::Lines(lines),
        },
        Err(why) => Answer::refusal(500, why),
    }
}

fn report(pager: &Pager, name: &Name) -> Answer {
    let Some(status) = pager.status(name) else {
        return Answer::refusal(404, EndError::Absent(name.clone()));
    };
    match super::report::page(&status) {
        Ok(page) => Answer {
            code: 200,
            body: Body::Html(page),
        },
        Err(why) => Answer::refusal(500, why),
    }
}

fn named(pager: &Pager, method: &str, name: &Name, query: &str, body: &[u8]) -> Answer {
    let absent = || Answer::refusal(404, EndError::Absent(name.clone()));
    let status = |code| match pager.status(name).map(serde_json::to_value) {
        Some(Ok(status)) => Answer::json(code, status),
        Some(Err(why)) => Answer::refusal(500, why),
        None => absent(),
    };
    if !query.is_empty() && method != "DELETE" {
        return Answer::refusal(400, "this request has no query");
    }
    let no_body = |why| Answer::refusal(400, format_args!("the body: {why}"));
    match method {
        "GET" => status(200),
        "PUT" => match serde_json::from_slice::<Restore>(body).map(|it| pager.restore(name, it)) {
            Ok(Ok(())) => status(201),
            Ok(Err(why)) => Answer::refusal(refused(&why), why),
            Err(why) => no_body(why),
        },
        "PATCH" => match serde_json::from_slice::<Change>(body)
            .map(|it| pager.set_background(name, it.background))
        {
            Ok(Ok(())) => status(200),
            Ok(Err(why)) => not_ended(why),
            Err(why) => no_body(why),
        },
        "DELETE" => {
            let kill = match query {
                "" | "kill=false" => false,
                "kill=true" => true,
                _ => return Answer::refusal(400, "the query: expected kill=true or kill=false"),
            };
            match pager.end(name, kill) {
                Ok(()) => Answer {
                    code: 204,
                    body: Body::Empty,
                },
                Err(why) => not_ended(why),
            }
        }
        _ => Answer::refusal(405, "only GET, PUT, PATCH and DELETE are served here"),
    }
}

/// The refusal of an end or a change.
fn not_ended(why: EndError) -> Answer {
    let code = match why {
        EndError::Absent(_) => 404,
        EndError::Needed { .. } | EndError::Failed(_) => 409,
        _ => 500,
    };
    Answer::refusal(code, why)
}

/// The code of a refused restore.
fn refused(why: &RestoreError) -> u16 {
    match why {
        RestoreError::Exists(_) => 409,
        RestoreError::Full => 503,
        RestoreError::Relative(_) => 400,
        RestoreError::Source(_)
        | RestoreError::Empty(_)
        | RestoreError::Listen(_)
        | RestoreError::Recording(_) => 422,
        _ => 500,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pageferry_pager::Settings;
    use std::collections::BTreeSet;
    use std::path::PathBuf;

    struct Served {
        scratch: PathBuf,
        pager: Option<Pager>,
    }

    impl Served {
        fn start(name: &str) -> Self {
            let scratch =
                std::env::temp_dir().join(format!("pageferry-api-{name}-{}", std::process::id()));
            std::fs::create_dir(&scratch).unwrap();
            std::fs::write(scratch.join("memory"), vec![7; 1 << 20]).unwrap();
            let settings = Settings {
                directory: scratch.join("state"),
                ..Settings::default()
            };
            let pager = Some(Pager::start(settings).unwrap());
            Self { scratch, pager }
        }

        fn ask(&self, method: &str, target: &str, body: &str) -> (u16, Value) {
            let pager = self.pager.as_ref().unwrap();
            let answer = handle(pager, method, target, body.as_bytes());
            let value = match answer.body {
                Body::Empty => Value::Null,
                Body::Json(value) => value,
                Body::Metrics(text) | Body::Lines(text) | Body::Html(text) => text.into(),
            };
            (answer.code, value)
        }

        fn body(&self, socket: &str) -> String {
            let memory = self.scratch.join("memory");
            json!({"memory": memory, "socket": self.scratch.join(socket)}).to_string()
        }
    }

    impl Drop for Served {
        fn drop(&mut self) {
            drop(self.pager.take());
            let _ = std::fs::remove_dir_all(&self.scratch);
        }
    }

    /// The document.
    fn document() -> Value {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/pager-api.json");
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    fn keys(value: &Value) -> BTreeSet<String> {
        value.as_object().unwrap().keys().cloned().collect()
    }

    #[test]
    fn a_restore_is_made_shown_and_ended() {
        let served = Served::start("life");
        let (code, status) = served.ask("PUT", "/restores/web", &served.body("a"));
        assert_eq!(
            (code, &status["phase"]),
            (201, &json!("waiting")),
            "{status}"
        );
        let (code, again) = served.ask("PUT", "/restores/web", &served.body("b"));
        assert_eq!(code, 409, "{again}");
        assert_eq!(served.ask("GET", "/restores/web", "").0, 200);
        let rate = json!({"background": {"rate": 7}});
        let (code, status) = served.ask("PATCH", "/restores/web", &rate.to_string());
        assert_eq!(
            (code, &status["restore"]["background"]),
            (200, &rate["background"])
        );
        let (code, list) = served.ask("GET", "/restores", "");
        assert_eq!((code, list.as_array().unwrap().len()), (200, 1));
        let metrics = served.ask("GET", "/metrics", "").1;
        assert!(
            metrics
                .as_str()
                .unwrap()
                .contains("pageferry_restore_phase{id=\"web\",phase=\"waiting\"} 1")
        );
        assert_eq!(served.ask("DELETE", "/restores/web", "").0, 204);
        assert_eq!(served.ask("DELETE", "/restores/web", "").0, 404);
        assert!(!served.scratch.join("a").exists());
    }

    #[test]
    fn refused_requests_leave_nothing_and_say_why() {
        let served = Served::start("refusals");
        let good = served.body("a");
        let with = |field: &str, value: Value| {
            let mut body: Value = serde_json::from_str(&good).unwrap();
            body[field] = value;
            body.to_string()
        };
        for (method, target, body, code, part) in [
            ("PUT", "/restores/web", "", 400, "the body"),
            ("PUT", "/restores/web", "{}", 400, "missing field `memory`"),
            ("PUT", "/restores/web", "[1", 400, "the body"),
            (
                "PUT",
                "/restores/web",
                &with("extra", json!(1)),
                400,
                "unknown field `extra`",
            ),
            (
                "PUT",
                "/restores/web",
                &with("background", json!("on")),
                400,
                "the body",
            ),
            (
                "PUT",
                "/restores/web",
                &with("background", json!({"rate": 0})),
                400,
                "the body",
            ),
            (
                "PUT",
                "/restores/web",
                &with("memory", json!("/absent")),
                422,
                "/absent",
            ),
            (
                "PUT",
                "/restores/web",
                &with("format", json!("packed")),
                422,
                "memory",
            ),
            (
                "PUT",
                "/restores/web",
                &with("memory", json!("/dev/null")),
                422,
                "no file",
            ),
            (
                "PUT",
                "/restores/web",
                &with("socket", json!("/absent/s")),
                422,
                "/absent/s",
            ),
            (
                "PUT",
                "/restores/web",
                &with("replay", json!("/absent")),
                422,
                "/absent",
            ),
            (
                "PUT",
                "/restores/web",
                &with("socket", json!("s")),
                400,
                "no absolute path",
            ),
            (
                "PUT",
                "/restores/web",
                &with("owner", json!({"mode": 660})),
                422,
                "mode 1224",
            ),
            (
                "PUT",
                "/restores/web",
                &with("owner", json!({"mode": "0o660"})),
                400,
                "octal text",
            ),
            (
                "PATCH",
                "/restores/web",
                r#"{"background": "idle"}"#,
                404,
                "no restore web",
            ),
            ("PATCH", "/restores/web", "{}", 400, "missing field"),
            ("PUT", "/restores/..", &good, 400, "no name"),
            ("PUT", "/restores/a%2fb", &good, 400, "no name"),
            ("PUT", "/restores/web?x=1", &good, 400, "no query"),
            ("POST", "/restores/web", &good, 405, "only GET, PUT"),
            ("POST", "/restores", &good, 405, "only GET"),
            ("DELETE", "/restores/web?kill=1", "", 400, "kill=true"),
            ("GET", "/restores/web", "", 404, "no restore web"),
            ("GET", "/", "", 404, "expected /restores"),
        ] {
            let (found, answer) = served.ask(method, target, body);
            let why = answer["error"].as_str().unwrap_or_default();
            assert!(
                found == code && why.contains(part),
                "{method} {target} {body}: {found} {answer}"
            );
        }
        assert_eq!(served.ask("GET", "/restores", "").1, json!([]));
        let left: Vec<_> = std::fs::read_dir(served.scratch.join("state"))
            .unwrap()
            .collect();
        assert_eq!(left.len(), 1, "only the lock is there");
        assert!(!served.scratch.join("a").exists());
    }

    #[test]
    fn the_document_has_the_paths_and_methods_that_are_served() {
        let served = Served::start("paths");
        let document = document();
        let documented = keys(&document["paths"]);
        let expected = [
            "/events",
            "/metrics",
            "/restores",
            "/restores/{id}",
            "/restores/{id}/report",
        ]
        .map(str::to_owned);
        assert_eq!(documented, BTreeSet::from(expected));
        for (path, methods) in document["paths"].as_object().unwrap() {
            let target = path.replace("{id}", "absent");
            for method in ["get", "put", "post", "patch", "delete"] {
                let (code, answer) = served.ask(&method.to_uppercase(), &target, "");
                assert_eq!(
                    methods.get(method).is_some(),
                    code != 405,
                    "{method} {path}: {code} {answer}"
                );
                if let Some(described) = methods.get(method) {
                    let codes = keys(&described["responses"]);
                    assert!(codes.contains(&code.to_string()), "{method} {path}: {code}");
                }
            }
        }
    }

    #[test]
    fn events_have_the_keys_of_the_document() {
        let served = Served::start("events");
        assert_eq!(served.ask("GET", "/events", ""), (200, json!("")));
        served.ask("PUT", "/restores/web", &served.body("a"));
        served.ask("DELETE", "/restores/web", "");
        let (code, lines) = served.ask("GET", "/events?after=0", "");
        assert_eq!(code, 200);
        let lines: Vec<Value> = lines
            .as_str()
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let events: Vec<_> = lines.iter().map(|line| line["event"].as_str()).collect();
        assert_eq!(events, [Some("waiting"), Some("ended")]);
        let described = keys(&document()["components"]["schemas"]["Event"]["properties"]);
        for line in &lines {
            assert!(keys(line).is_subset(&described), "{line}");
        }
        for bad in ["after", "after=", "after=-1", "x=1"] {
            assert_eq!(
                served.ask("GET", &format!("/events?{bad}"), "").0,
                400,
                "{bad}"
            );
        }
    }

    #[test]
    fn the_document_has_the_keys_of_requests_and_answers() {
        let served = Served::start("keys");
        let schemas = &document()["components"]["schemas"];
        let properties = |name: &str| keys(&schemas[name]["properties"]);
        let memory = served.scratch.join("memory");
        let recording = served.scratch.join("recording");
        pageferry_pager::Recording::default()
            .save(&recording)
            .unwrap();
        // Every key of a request, so that the answer repeats all of them.
        let full = json!({
            "memory": memory, "format": "raw", "socket": served.scratch.join("s"),
            "owner": {"user": rustix::process::geteuid().as_raw(),
                      "group": rustix::process::getegid().as_raw(), "mode": "600"},
            "background": {"rate": 1000}, "on_loss": "pause",
            "record": served.scratch.join("r"), "replay": recording,
        });
        assert_eq!(properties("Restore"), keys(&full));
        assert_eq!(properties("Owner"), keys(&full["owner"]));
        let (code, status) = served.ask("PUT", "/restores/a", &full.to_string());
        assert_eq!((code, &status["restore"]), (201, &full), "{status}");
        let mut without = properties("Status");
        assert!(without.remove("fault") && without.remove("vm"));
        assert_eq!(without, keys(&status));
        let required = schemas["Restore"]["required"].clone();
        assert_eq!(required, json!(["memory", "socket"]));
        let of_vm = serde_json::to_value(pageferry_pager::VmStatus::default()).unwrap();
        assert_eq!(properties("Vm"), keys(&of_vm));
        assert_eq!(properties("Latency"), keys(&of_vm["read_faults"]));
    }
}
