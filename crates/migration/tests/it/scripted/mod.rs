//! Scripted peers, and the checks after every failure: one clear sentence, an early end, and no
//! thread, socket or other descriptor left.

pub(crate) mod destination;
pub(crate) mod source;

use pageferry_migration::address::Address;
use pageferry_migration::channel::{ChannelError, Connection, Listener, Wait};
use pageferry_migration::wire::{
    Frame, FrameHeader, FrameType, HEADER_BYTES, RunList, SetupProgress, Side,
};
use pageferry_migration::{MigrationError, SourceFailure, SourceVm};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

/// The frame of a destination that has nothing to allocate.
pub(crate) const READY: Frame = Frame::SetupProgress(SetupProgress {
    pages: 0,
    ready: true,
});

/// The longest wait of a scripted peer. Only stuck code under test exceeds it.
pub(crate) const PATIENCE: Duration = pageferry_testkit::LIMIT;
/// The limit under test for failures that are timeouts. On a busy host too, a scripted peer must
/// reach its silence well within it.
pub(crate) const SHORT: Duration = Duration::from_secs(1);
/// The limit under test for failures with another cause. It is so long that no busy host reaches
/// it.
pub(crate) const LONG: Duration = Duration::from_secs(40);
/// The longest time from the cause of a failure to the caller's answer. It is below [`LONG`], so a
/// wait for the wrong limit fails the test.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// The limit for a case that ends in an error of this [`kind`].
pub(crate) fn limit_for(kind: &str) -> Duration {
    if kind == "Timeout" { SHORT } else { LONG }
}

/// Waits until `over` is set.
pub(crate) fn wait_until_over(over: &AtomicBool) {
    let until = Instant::now() + PATIENCE;
    while !over.load(Ordering::Acquire) {
        assert!(Instant::now() < until, "the script has not ended");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs a test alone in the process, and checks that it leaves no thread and no descriptor. The
/// test creates it first, so that it is dropped last.
pub(crate) struct LeakCheck {
    _exclusive: RwLockWriteGuard<'static, ()>,
    descriptors: usize,
}

/// A test that counts the descriptors and threads of the process holds this for writing. Other
/// tests with threads hold it for reading.
static EXCLUSIVE: RwLock<()> = RwLock::new(());

/// Lets a test run in parallel with others, except with one that needs the process alone.
pub(crate) fn in_parallel() -> RwLockReadGuard<'static, ()> {
    EXCLUSIVE.read().unwrap_or_else(PoisonError::into_inner)
}

impl LeakCheck {
    pub(crate) fn start() -> Self {
        let alone = EXCLUSIVE.write().unwrap_or_else(PoisonError::into_inner);
        Self {
            _exclusive: alone,
            descriptors: descriptors().len(),
        }
    }
}

impl Drop for LeakCheck {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let until = Instant::now() + SOON;
        loop {
            let (threads, open) = (our_threads(), descriptors());
            // There may be fewer: another test may have probed KVM when this one began.
            if threads.is_empty() && open.len() <= self.descriptors {
                return;
            }
            assert!(
                Instant::now() < until,
                "left behind: threads {threads:?}; {} descriptors were open, now {open:?}",
                self.descriptors
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Returns the names of this process's vCPU and migration threads.
fn our_threads() -> Vec<String> {
    std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .map(|name| name.trim_end().to_owned())
        .filter(|name| name.starts_with("vcpu") || name.starts_with("pf-"))
        .collect()
}

/// Returns the targets of this process's open descriptors, without the one that lists them.
fn descriptors() -> Vec<String> {
    std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok())
        .map(|target| target.display().to_string())
        .filter(|target| !(target.starts_with("/proc/") && target.ends_with("/fd")))
        .collect()
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
    assert!(
        began.elapsed() < SOON,
        "{name}: message {:?}",
        began.elapsed()
    );
    result
}

/// The kind of address that a test listens on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Via {
    Tcp,
    Unix,
}

pub(crate) fn listen(via: Via) -> Listener {
    let address = match via {
        Via::Tcp => Address::Tcp {
            host: "127.0.0.1".into(),
            port: 0,
        },
        Via::Unix => {
            static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("pageferry-fail-{}-{number}.sock", std::process::id());
            Address::unix(&std::env::temp_dir().join(name)).unwrap()
        }
    };
    Listener::bind(&address).unwrap()
}

pub(crate) fn within_limit(what: &'static str) -> Wait<'static> {
    Wait::block(what).within(PATIENCE)
}

/// A message that a scripted peer receives.
#[derive(Debug)]
pub(crate) enum Message {
    Frame(Frame),
    /// The runs of a Pages frame. The bytes were verified and dropped.
    Pages(RunList),
}

/// Receives one frame that `from` sent.
pub(crate) fn take(
    stream: &Connection,
    from: Side,
    memory_pages: u64,
) -> Result<Message, ChannelError> {
    let mut head = [0; HEADER_BYTES];
    stream.read_exact(&mut head, &within_limit("frame"))?;
    let header = FrameHeader::decode(&head, from)?;
    let mut payload = vec![0; header.payload_len as usize];
    stream.read_exact(&mut payload, &within_limit("payload").mid_message())?;
    if header.frame_type != FrameType::Pages {
        return Ok(Message::Frame(Frame::decode(
            &header,
            &payload,
            memory_pages,
        )?));
    }
    let (descriptors, data) = payload.split_at(RunList::descriptors_len(&header)?);
    let list = RunList::decode(&header, descriptors, memory_pages)?;
    let mut hasher = header.hasher();
    hasher.update(descriptors);
    hasher.update(data);
    hasher.verify()?;
    Ok(Message::Pages(list))
}

pub(crate) fn encoded(frame: &Frame) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes).unwrap();
    bytes
}

/// Reads until the other side closes. Returns the last message if it was not a Pages frame.
pub(crate) fn last_frame(stream: &Connection, from: Side, memory_pages: u64) -> Option<Frame> {
    let mut last = None;
    while let Ok(message) = take(stream, from, memory_pages) {
        last = match message {
            Message::Frame(frame) => Some(frame),
            Message::Pages(_) => None,
        };
    }
    last
}

/// Returns the name of an error's variant, for tables of expectations.
pub(crate) fn kind(error: &MigrationError) -> &'static str {
    match error {
        MigrationError::Channel(_) => "Channel",
        MigrationError::LinkLost(_) => "LinkLost",
        MigrationError::Wire(_) => "Wire",
        MigrationError::Peer(_) => "Peer",
        MigrationError::Refused(_) => "Refused",
        MigrationError::PeerGaveUp { .. } => "PeerGaveUp",
        MigrationError::Mismatch(_) => "Mismatch",
        MigrationError::Machine(_) => "Machine",
        MigrationError::Cancelled => "Cancelled",
        MigrationError::PeerCancelled => "PeerCancelled",
        MigrationError::Timeout(_) => "Timeout",
        MigrationError::Os { .. } => "Os",
        MigrationError::Internal(_) => "Internal",
        _ => "another",
    }
}
