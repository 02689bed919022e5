//! Scripted peers, and the checks after every failure: one clear sentence and an early end.

pub(crate) mod destination;
pub(crate) mod source;

use pageferry_migration::wire::{
    ChannelId, Frame, FrameHeader, FrameType, HEADER_BYTES, Role, RunList, SetupProgress, Side,
    URGENT_BYTES, UrgentMessage,
};
use pageferry_migration::{Limits, MigrationError, SourceFailure, SourceVm};
use pageferry_transport::channel::{ChannelError, Connection, Wait};
use std::time::{Duration, Instant};

/// The frame of a destination that has nothing to allocate.
pub(crate) const ALLOCATED: Frame = Frame::SetupProgress(SetupProgress {
    pages: 0,
    ready: true,
});

/// The longest wait of a scripted peer. Only stuck code under test exceeds it.
pub(crate) const PATIENCE: Duration = pageferry_testkit::LIMIT;
/// The limit under test for failures that are timeouts. On a busy host too, a scripted peer must
/// reach its silence well within it.
pub(crate) const SHORT: Duration = Duration::from_secs(2);
/// The limit under test for failures with another cause. It is so long that no busy host reaches
/// it.
pub(crate) const LONG: Duration = Duration::from_secs(40);
/// The longest time from the cause of a failure to the caller's answer. It is below [`LONG`], so a
/// wait for the wrong limit fails the test.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// The first channel of a role, opened for so many times.
pub(crate) const fn first_channel(role: Role, incarnation: u32) -> ChannelId {
    ChannelId {
        role,
        index: 0,
        incarnation,
    }
}

/// The limits for a case that ends in an error of this [`kind`].
pub(crate) fn limits_for(kind: &str) -> Limits {
    limits(if kind == "Timeout" { SHORT } else { LONG })
}

/// The same limit everywhere.
pub(crate) fn limits(limit: Duration) -> Limits {
    Limits {
        silence: limit,
        dead_after: limit,
        give_up_after: None,
        connect: limit,
        retry: Duration::ZERO,
        ..Limits::default()
    }
}

/// Checks that an error is one short sentence for people, without line breaks and debug output.
pub(crate) fn assert_sentence(error: &dyn std::fmt::Display) {
    let text = error.to_string();
    assert!(
        !text.is_empty() && text.len() < 300,
        "{} bytes: {text:.400}",
        text.len()
    );
    assert!(!text.chars().any(char::is_control), "{text:?}");
    assert!(
        !text.contains(['{', '}', '[', ']']),
        "has debug output: {text}"
    );
    assert!(
        !text.ends_with('.'),
        "must not end with a full stop: {text}"
    );
}

/// Checks that the reason for a loss is one sentence that has `says`.
#[track_caller]
pub(crate) fn assert_loss(name: &str, last_loss: Option<&str>, says: &str) {
    let loss = last_loss.unwrap_or_else(|| panic!("{name}: no channel was lost"));
    eprintln!("{name}: {loss}");
    assert_sentence(&loss);
    assert!(loss.contains(says), "{name}: {loss}");
}

/// Checks the state of the source's VM, the kind of the error, and that its sentence has `says`.
#[track_caller]
pub(crate) fn assert_failure(
    name: &str,
    failure: &SourceFailure,
    vm: SourceVm,
    error: &str,
    says: &str,
) {
    eprintln!("{name}: {failure}");
    assert_eq!(
        (failure.vm, kind(&failure.error)),
        (vm, error),
        "{name}: {failure}"
    );
    assert_sentence(failure);
    assert!(failure.to_string().contains(says), "{name}: {failure}");
}

/// Calls `f` and checks that it returns soon.
pub(crate) fn ends_soon<T>(name: &str, f: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let result = f();
    assert!(began.elapsed() < SOON, "{name} took {:?}", began.elapsed());
    result
}

pub(crate) fn within_limit(what: &'static str) -> Wait<'static> {
    Wait::block(what).within(PATIENCE)
}

pub(crate) fn say(connection: &Connection, bytes: &[u8]) {
    let said = connection.write_all(bytes, &within_limit("what is said"));
    said.unwrap();
}

/// A message that a scripted peer receives.
#[derive(Debug)]
pub(crate) enum Message {
    Frame(Frame),
    /// The runs of a Pages frame. The bytes were verified and dropped.
    Pages(RunList),
}

/// Receives one frame that `from` sent on a channel of `role`, except Alive.
pub(crate) fn take(
    connection: &Connection,
    from: Side,
    role: Role,
    memory_pages: u64,
) -> Result<Message, ChannelError> {
    loop {
        let mut head = [0; HEADER_BYTES];
        connection.read_exact(&mut head, &within_limit("frame"))?;
        let header = FrameHeader::decode(&head, from, role)?;
        let mut payload = vec![0; header.payload_len as usize];
        connection.read_exact(&mut payload, &within_limit("payload").mid_message())?;
        if header.frame_type == FrameType::Pages {
            let (descriptors, data) = payload.split_at(RunList::descriptors_len(&header)?);
            let list = RunList::decode(&header, descriptors, memory_pages)?;
            let mut hasher = header.hasher();
            hasher.update(descriptors);
            hasher.update(data);
            // A scripted side has no bytes of confirmed pages.
            if list.confirmed_pages() == 0 {
                hasher.verify()?;
            }
            return Ok(Message::Pages(list));
        }
        match Frame::decode(&header, &payload, memory_pages)? {
            Frame::Alive => {}
            frame => return Ok(Message::Frame(frame)),
        }
    }
}

/// Receives the head of one message that `from` sent on an urgent channel.
pub(crate) fn take_urgent(connection: &Connection, from: Side, memory_pages: u64) -> UrgentMessage {
    let mut bytes = [0; URGENT_BYTES];
    let wait = within_limit("urgent message");
    connection.read_exact(&mut bytes, &wait).unwrap();
    UrgentMessage::decode(&bytes, from, memory_pages).unwrap()
}

/// Says `Alive` on every channel, as a side does while it works. The other side may have left.
pub(crate) fn say_alive(control: &Connection, bulk: &Connection, urgent: &Connection) {
    let wait = within_limit("Alive");
    for channel in [control, bulk] {
        let _ = channel.write_all(&encoded(&Frame::Alive), &wait);
    }
    let _ = urgent.write_all(&UrgentMessage::alive(), &wait);
}

pub(crate) fn encoded(frame: &Frame) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes).unwrap();
    bytes
}

/// Reads a control channel until the other side closes it. Returns the last frame.
pub(crate) fn last_frame(control: &Connection, from: Side, memory_pages: u64) -> Option<Frame> {
    let mut last = None;
    while let Ok(Message::Frame(frame)) = take(control, from, Role::Control, memory_pages) {
        last = Some(frame);
    }
    last
}

/// Returns the name of an error's variant, for tables of expectations.
pub(crate) fn kind(error: &MigrationError) -> &'static str {
    match error {
        MigrationError::Channel(_) => "Channel",
        MigrationError::LinkLost(_) => "LinkLost",
        MigrationError::GaveUp { .. } => "GaveUp",
        MigrationError::Wire(_) => "Wire",
        MigrationError::Protocol(_) => "Protocol",
        MigrationError::Refused(_) => "Refused",
        MigrationError::PeerGaveUp { .. } => "PeerGaveUp",
        MigrationError::Discarded(_) => "Discarded",
        MigrationError::Handshake(_) => "Handshake",
        MigrationError::Mismatch(_) => "Mismatch",
        MigrationError::Machine(_) => "Machine",
        MigrationError::Device { .. } => "Device",
        MigrationError::Cancelled => "Cancelled",
        MigrationError::PeerCancelled => "PeerCancelled",
        MigrationError::Timeout(_) => "Timeout",
        MigrationError::Os { .. } => "Os",
        MigrationError::Internal(_) => "Internal",
        _ => "another",
    }
}
