//! The protocol of a control socket.
//!
//! A request is `{"command":"status"}`, with further fields for some commands. An answer is any
//! number of `{"event":{..}}` lines, then one `{"result":{..}}` or
//! `{"error":{"kind":"..","message":".."}}`. `kind` is the name of an exit code.

use super::change::ChangeOptions;
use super::options::MigrateOptions;
use crate::exit::{Exit, Failure};
use pageferry_migration::Phase;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A client's request. Those without fields are empty structs: of a unit, serde ignores the keys
/// that it does not know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum Request {
    /// Return the VM's state.
    Status {},
    /// Stop the VM's vCPUs.
    Pause {},
    /// Resume the VM's vCPUs.
    Resume {},
    /// Check every page while the VM is paused.
    Verify {},
    /// Migrate the VM.
    Migrate {
        /// The destination: an address as on the command line.
        to: String,
        /// Passes over memory while the guest runs, unless the options give the end of pre-copy.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        precopy_passes: Option<u32>,
        /// Everything else, with defaults.
        #[serde(default, skip_serializing_if = "is_default")]
        options: Box<MigrateOptions>,
    },
    /// Check the way to a destination, and move nothing.
    Check {
        /// The destination: an address as on the command line.
        to: String,
        /// As for a migration. Only those about connections matter.
        #[serde(default, skip_serializing_if = "is_default")]
        options: Box<MigrateOptions>,
    },
    /// Change the settings of the current migration.
    Set(ChangeOptions),
    /// Cancel the current migration. The fields choose those of a tunnel.
    Cancel {
        /// Only those of this route.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        route: Option<String>,
        /// Only the one with this id.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        session: Option<String>,
        /// Also where the VM may run at the destination, and would run here too.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        force: bool,
    },
    /// Give a migration that is handed over another way. One of the two.
    Recover {
        /// At the source: an address to reach the destination by.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        to: Option<String>,
        /// At the destination: an address to listen on too.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        listen: Option<String>,
    },
    /// End a migration whose other side is gone.
    Abandon {
        /// At the source: run the VM here.
        #[serde(default)]
        resume_here: bool,
    },
    /// Attach to the guest's console. After the result the connection carries bytes.
    Console {},
    /// Return the report of the migration that brought the VM here.
    Report {},
    /// End the VM.
    Quit {},
}

impl Request {
    /// Cancels the current migration, without a choice.
    pub(crate) const fn cancel() -> Self {
        Self::Cancel {
            route: None,
            session: None,
            force: false,
        }
    }
}

fn is_default(options: &MigrateOptions) -> bool {
    *options == MigrateOptions::default()
}

/// An event before the result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Event {
    /// A phase of the migration began.
    Phase(PhaseName),
    /// The current phase has come this far.
    Progress {
        /// Pages done.
        done: u64,
        /// The total number of pages.
        total: u64,
    },
    /// The destination has allocated memory for this many pages.
    Allocated {
        /// Pages done.
        done: u64,
        /// The total number of pages.
        total: u64,
    },
    /// Something happened to the session.
    Session(SessionEvent),
    /// A line for the user.
    Note(String),
}

/// An event of a migration's connections.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum SessionEvent {
    /// The session has come this far.
    Stage(String),
    /// The connections of a generation were lost.
    Lost {
        /// The generation.
        generation: u32,
        /// The reason.
        why: Option<String>,
    },
    /// The connections of a new generation are open.
    Reconnected {
        /// The generation.
        generation: u32,
        /// The address of the peer.
        peer: Option<String>,
    },
    /// The rates of the session, once a second.
    Rates {
        /// Bytes of the pages that are left.
        bytes_left: u64,
        /// Bytes of pages sent.
        page_bytes: u64,
        /// Bytes of pages sent a second.
        page_rate: u64,
        /// Bytes of pages dirtied a second in pre-copy.
        dirty_rate: Option<u64>,
        /// The time until no page is left, in milliseconds.
        time_left_ms: Option<u64>,
    },
    /// A pre-copy pass has ended.
    PassEnded {
        /// The number of passes that have ended.
        passes: u32,
        /// Bytes of the pages that are left.
        bytes_left: u64,
        /// Bytes of pages dirtied a second.
        dirty_rate: Option<u64>,
        /// Bytes of pages that the link carried a second.
        link_rate: Option<u64>,
        /// The time until no page is left, in milliseconds.
        time_left_ms: Option<u64>,
        /// The expected blackout, in microseconds.
        blackout_forecast_us: Option<u64>,
    },
}

/// The form of a [`Phase`] on the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PhaseName {
    #[serde(rename = "phase")]
    name: Name,
    /// The pass of a pre-copy phase, from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pass: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Name {
    Setup,
    #[serde(rename = "pre-copy")]
    Precopy,
    SwitchOver,
    #[serde(rename = "post-copy")]
    Postcopy,
    Completion,
    Completed,
    Failed,
}

impl From<Phase> for PhaseName {
    fn from(phase: Phase) -> Self {
        let (name, pass) = match phase {
            Phase::Setup => (Name::Setup, None),
            Phase::Precopy { pass } => (Name::Precopy, Some(pass)),
            Phase::SwitchOver => (Name::SwitchOver, None),
            Phase::Postcopy => (Name::Postcopy, None),
            Phase::Completion => (Name::Completion, None),
            Phase::Completed => (Name::Completed, None),
            Phase::Failed => (Name::Failed, None),
        };
        Self { name, pass }
    }
}

impl From<PhaseName> for Phase {
    fn from(wire: PhaseName) -> Self {
        match wire.name {
            Name::Setup => Self::Setup,
            Name::Precopy => Self::Precopy {
                pass: wire.pass.unwrap_or(1),
            },
            Name::SwitchOver => Self::SwitchOver,
            Name::Postcopy => Self::Postcopy,
            Name::Completion => Self::Completion,
            Name::Completed => Self::Completed,
            Name::Failed => Self::Failed,
        }
    }
}

/// One line of an answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Line {
    /// More will follow.
    Event(Event),
    /// The end: success.
    Result(Value),
    /// The end: failure.
    Error(ErrorLine),
}

/// The form of a failure on the socket.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ErrorLine {
    /// The name of an [`Exit`].
    pub(crate) kind: String,
    /// One sentence.
    pub(crate) message: String,
}

impl From<&Failure> for ErrorLine {
    fn from(failure: &Failure) -> Self {
        Self {
            kind: failure.exit.name().into(),
            message: failure.message.clone(),
        }
    }
}

impl From<ErrorLine> for Failure {
    fn from(line: ErrorLine) -> Self {
        Self::new(
            Exit::from_name(&line.kind).unwrap_or(Exit::Declined),
            line.message,
        )
    }
}

impl Line {
    /// Encodes the line with its newline.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(self).expect("these types always serialize");
        bytes.push(b'\n');
        bytes
    }
}

/// Parses a request.
///
/// # Errors
/// One sentence with the parser's complaint.
pub(crate) fn parse_request(line: &[u8]) -> Result<Request, Failure> {
    serde_json::from_slice(line).map_err(|e| {
        let message =
            format!("invalid request: {e}; expected one line like {{\"command\":\"status\"}}");
        Failure::new(Exit::Usage, message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every request, with no more than it needs.
    const ALL: [&[u8]; 13] = [
        br#"{"command":"status"}"#,
        br#"{"command":"pause"}"#,
        br#"{"command":"resume"}"#,
        br#"{"command":"verify"}"#,
        br#"{"command":"migrate","to":"h:1"}"#,
        br#"{"command":"check","to":"h:1"}"#,
        br#"{"command":"set"}"#,
        br#"{"command":"cancel"}"#,
        br#"{"command":"recover"}"#,
        br#"{"command":"abandon"}"#,
        br#"{"command":"console"}"#,
        br#"{"command":"report"}"#,
        br#"{"command":"quit"}"#,
    ];

    #[test]
    fn requests_are_what_the_documentation_says() {
        assert_eq!(
            parse_request(br#"{"command":"status"}"#).unwrap(),
            Request::Status {}
        );
        let migrate = br#"{"command":"migrate","to":"h:1","precopy_passes":2}"#;
        let wanted = Request::Migrate {
            to: "h:1".into(),
            precopy_passes: Some(2),
            options: Box::default(),
        };
        assert_eq!(parse_request(migrate).unwrap(), wanted);
        let json = serde_json::to_vec(&wanted).unwrap();
        assert_eq!(json, migrate, "defaults are left out");
        let options = br#"{"command":"migrate","to":"h:1","precopy_passes":2,"options":{"channels":4,"dead_after_ms":500,"insecure":true}}"#;
        let Request::Migrate { options, .. } = parse_request(options).unwrap() else {
            panic!("migrate is not migrate");
        };
        assert_eq!(
            (options.channels, options.dead_after_ms),
            (Some(4), Some(500))
        );
        let set = br#"{"command":"set","switch":"after-passes 3","max_bandwidth":1048576,"max_postcopy_bandwidth":null}"#;
        let wanted = Request::Set(ChangeOptions {
            switch: Some("after-passes 3".into()),
            max_bandwidth: Some(Some(1 << 20)),
            max_postcopy_bandwidth: Some(None),
            ..ChangeOptions::default()
        });
        assert_eq!(parse_request(set).unwrap(), wanted);
        assert_eq!(serde_json::to_vec(&wanted).unwrap(), set);
        for bad in [
            &b""[..],
            br#"{"command":"set","switch":3}"#,
            br#"{"command":"set","max_bandwith":3}"#,
            br#"{"command":"set","max_bandwidth":-3}"#,
            b"{",
            b"status",
            b"{}",
            b"[]",
            b"\xff\xfe",
            br#"{"command":"explode"}"#,
            br#"{"command":"migrate","to":"h:1","precopy_passes":2,"options":{"chanels":4}}"#,
        ] {
            let failure = parse_request(bad).expect_err("nonsense");
            assert!(failure.message.contains("invalid request"), "{failure}");
        }
        for wanted in ALL {
            let with = |more: &str| {
                let line = String::from_utf8(wanted.to_vec()).unwrap();
                format!("{}{more}}}", line.trim_end_matches('}')).into_bytes()
            };
            parse_request(&with("")).unwrap_or_else(|failure| panic!("{failure}"));
            let command = r#","command":"quit""#;
            for more in [
                r#","x":1"#,
                r#","":null"#,
                r#","Command":"status""#,
                command,
            ] {
                let line = with(more);
                let text = String::from_utf8_lossy(&line).into_owned();
                let failure = parse_request(&line).expect_err(&text);
                assert!(
                    failure.message.contains("invalid request"),
                    "{text}: {failure}"
                );
            }
        }
        let deep = vec![b'['; 60_000];
        parse_request(&deep).expect_err("nested nonsense does not overflow the stack");
    }

    #[test]
    fn phases_survive_the_socket() {
        for phase in [
            Phase::Setup,
            Phase::Precopy { pass: 3 },
            Phase::SwitchOver,
            Phase::Failed,
        ] {
            let line = Line::Event(Event::Phase(phase.into())).to_bytes();
            match serde_json::from_slice(&line).unwrap() {
                Line::Event(Event::Phase(name)) => assert_eq!(Phase::from(name), phase),
                other => panic!("{other:?}"),
            }
        }
        let text = String::from_utf8(Line::Event(Event::Phase(Phase::Postcopy.into())).to_bytes())
            .unwrap();
        assert_eq!(text, "{\"event\":{\"phase\":{\"phase\":\"post-copy\"}}}\n");
    }

    #[test]
    fn failures_keep_their_class() {
        let failure = Failure::new(Exit::LinkLost, "gone");
        let back: Failure = ErrorLine::from(&failure).into();
        assert_eq!((back.exit, back.message.as_str()), (Exit::LinkLost, "gone"));
    }
}
