//! A double of Firecracker: what its process does with guest memory in a restore. A tool of ours
//! for tests only, written from facts about Firecracker and with nothing of its code.
//!
//! **Guarantee.** A page server cannot tell a [`Double`] from Firecracker by its handshake, its
//! faults or its removals. The double knows what each page must contain, and reports every page
//! that it finds wrong.
//!
//! **Mechanism.** [`Double::start`] runs the test binary once more, which becomes the double in a
//! test that calls [`entry`]. So the double is a process of its own: it can be killed, and other
//! processes can take its descriptors. Threads stand for vCPUs. They read and write pages by a
//! seed, also through the kernel. A balloon removes pages meanwhile. The memory file's contents
//! follow from a seed ([`page_contents`], [`write_memory_file`]).
//!
//! The double does as Firecracker does:
//!
//! 1. It maps its regions: private and anonymous, at addresses that are multiples of 2 MiB.
//! 2. It opens a non-blocking userfaultfd with `EVENT_REMOVE` alone, and registers every region for
//!    missing faults.
//! 3. [`Double::connect`] sends one message over a Unix stream socket: JSON and the userfaultfd. No
//!    answer is awaited, and the socket stays open as long as the process lives.
//! 4. It keeps its own copy of the userfaultfd.
//!
//! The `File` backend maps the memory file privately. Its balloon maps anonymous memory instead.
//!
//! ```no_run
//! use pageferry_testkit::firecracker::{Backend, Config, Double, Fields, Task};
//!
//! let config = Config {
//!     seed: 1,
//!     regions: vec![8 << 20, 4 << 20],
//!     backend: Backend::Uffd,
//!     vcpus: 4,
//!     balloon_us: Some(200),
//!     ..Config::default()
//! };
//! let Some(mut double) = Double::start(&config) else {
//!     return; // userfaultfd is not usable here
//! };
//! double.connect("/tmp/the-page-server".as_ref(), Fields::Both).unwrap();
//! double.run();
//! // Here a test does something to the page server.
//! double.pause();
//! double.perform(Task::VerifyAll);
//! let status = double.status();
//! assert_eq!(status.wrong, 0, "{:?}", status.first_wrong);
//! assert!(double.quit().success());
//! ```
//!
//! With [`Config::api`] the process has Firecracker's API: it pauses its VM, saves it to a full
//! snapshot, and loads one.
//!
//! **Neighbours.** It uses `userfault` to open and register. Page servers in tests serve it.

mod config;
mod handshake;
mod vmm;

pub use crate::double::contents::{Contents, PAGE_BYTES, page_contents, write_memory_file};
pub use crate::double::guest::Wrong;
pub use crate::double::memory::Region;
pub use crate::double::{Double, Status, Task};
pub use config::{Backend, Config, Quirk};
pub use handshake::{Fields, handshake_text, send_handshake};
pub use vmm::entry;
