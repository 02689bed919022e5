//! Peers played by hand, and what must hold after every failure: one clear sentence, an early end,
//! and no thread, socket or other descriptor left.

pub(crate) mod destination;
pub(crate) mod source;

use pageferry_migration::MigrationError;
use pageferry_migration::address::Address;
use pageferry_migration::channel::{ChannelError, Connection, Listener, Wait};
use pageferry_migration::wire::{
    Frame, FrameHeader, FrameType, HEADER_BYTES, RunList, SetupProgress, Side,
};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

/// A destination that has nothing to allocate.
pub(crate) const READY: Frame = Frame::SetupProgress(SetupProgress {
    pages: 0,
    ready: true,
});

/// No wait of a played peer takes longer, unless the code under test is stuck.
pub(crate) const PATIENCE: Duration = pageferry_testkit::LIMIT;
/// The limit under test where a failure is a limit that passes. Played peers must do what comes
/// before the silence well within it, on a host that does much else.
pub(crate) const SHORT: Duration = Duration::from_secs(1);
/// The limit under test where a failure has another cause: far away, so that no busy host reaches
/// it.
pub(crate) const LONG: Duration = Duration::from_secs(40);
/// How long any failure may take from its cause to the caller's answer: less than waiting for a
/// limit that is not its cause.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// The limit for a case that ends in an error of this [`kind`].
pub(crate) fn limit_for(kind: &str) -> Duration {
    if kind == "Timeout" { SHORT } else { LONG }
}

/// Waits until `over`, with patience.
pub(crate) fn wait_until_over(over: &AtomicBool) {
    let until = Instant::now() + PATIENCE;
    while !over.load(Ordering::Acquire) {
        assert!(Instant::now() < until, "it is not over");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// This test runs alone in the process, and leaves nothing behind. To be made first, so that it is
/// dropped last.
pub(crate) struct Clean {
    _alone: RwLockWriteGuard<'static, ()>,
    descriptors: usize,
}

/// Held for writing by a test that counts the descriptors and threads of the process, and for
/// reading by tests that have some of their own.
static ALONE: RwLock<()> = RwLock::new(());

/// This test runs beside others, but not beside one that needs the process for itself.
pub(crate) fn beside_others() -> RwLockReadGuard<'static, ()> {
    ALONE.read().unwrap_or_else(PoisonError::into_inner)
}

impl Clean {
    pub(crate) fn slate() -> Self {
        let alone = ALONE.write().unwrap_or_else(PoisonError::into_inner);
        Self {
            _alone: alone,
            descriptors: descriptors().len(),
        }
    }
}

impl Drop for Clean {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let until = Instant::now() + SOON;
        loop {
            let (threads, open) = (our_threads(), descriptors());
            // Fewer, where another test was asking for KVM when this one began.
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

/// The names of this process's threads that Pageferry started: vCPUs and those of a migration.
fn our_threads() -> Vec<String> {
    std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .map(|name| name.trim_end().to_owned())
        .filter(|name| name.starts_with("vcpu") || name.starts_with("pf-"))
        .collect()
}

/// What every open descriptor of this process is (the one that lists them is not among them).
fn descriptors() -> Vec<String> {
    std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok())
        .map(|target| target.display().to_string())
        .filter(|target| !(target.starts_with("/proc/") && target.ends_with("/fd")))
        .collect()
}

/// Checks that an error is one sentence for people: no line break, no dump of a value, of a length
/// that is read.
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
        "shows a value as the debugger would: {text}"
    );
    assert!(!text.ends_with('.'), "its callers end the sentence: {text}");
}

/// Calls `f` and checks that it ends soon.
pub(crate) fn soon<T>(name: &str, f: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let result = f();
    assert!(began.elapsed() < SOON, "{name}: took {:?}", began.elapsed());
    result
}

/// An address of this test's own.
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

pub(crate) fn patient(what: &'static str) -> Wait<'static> {
    Wait::block(what).within(PATIENCE)
}

/// A frame as a played peer takes it.
#[derive(Debug)]
pub(crate) enum Took {
    Frame(Frame),
    /// Its runs; the bytes were verified and dropped.
    Pages(RunList),
}

/// Takes one frame that `from` sent.
pub(crate) fn take(
    stream: &Connection,
    from: Side,
    memory_pages: u64,
) -> Result<Took, ChannelError> {
    let mut head = [0; HEADER_BYTES];
    stream.read_exact(&mut head, &patient("frame"))?;
    let header = FrameHeader::decode(&head, from)?;
    let mut payload = vec![0; header.payload_len as usize];
    stream.read_exact(&mut payload, &patient("payload").mid_message())?;
    if header.frame_type != FrameType::Pages {
        return Ok(Took::Frame(Frame::decode(&header, &payload, memory_pages)?));
    }
    let (descriptors, data) = payload.split_at(RunList::descriptors_len(&header)?);
    let list = RunList::decode(&header, descriptors, memory_pages)?;
    let mut hasher = header.hasher();
    hasher.update(descriptors);
    hasher.update(data);
    hasher.verify()?;
    Ok(Took::Pages(list))
}

pub(crate) fn encoded(frame: &Frame) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes).unwrap();
    bytes
}

/// Reads until the other side ends; the last frame that came, if it was one.
pub(crate) fn last_word(stream: &Connection, from: Side, memory_pages: u64) -> Option<Frame> {
    let mut last = None;
    while let Ok(took) = take(stream, from, memory_pages) {
        last = match took {
            Took::Frame(frame) => Some(frame),
            Took::Pages(_) => None,
        };
    }
    last
}

/// What an error is, by its variant, for tables of expectations.
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
