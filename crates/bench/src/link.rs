//! `bench link`: the stall of an urgent page next to the costs of its parts, and the background
//! push next to the bare link.

use crate::args::EngineFlags;
use crate::demand_paging::exit_and_resume;
use crate::mover::{Guest, SourceFigures, SourceVm, receive};
use crate::peer::{LOOPBACK, Part, Peer, accept_one};
use crate::vm::LIMIT;
use crate::{BenchError, Bound, Conditions, Row, Samples, rounds};
use pageferry_addr::PAGE_SIZE;
use pageferry_harness::deliveries_of;
use pageferry_machine::{Backing, Delivery, Engine};
use pageferry_migration::{DestinationConfig, DestinationReport};
use pageferry_transport::channel::{Connection, Spinner, Wait};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// The size of a request on the urgent connection, in bytes.
const REQUEST_BYTES: usize = 16;
/// The size of a reply's header, in bytes. The page follows.
const HEADER_BYTES: usize = 16;
/// The size of a write to the bulk connection, in bytes.
const BULK_BYTES: usize = 256 << 10;
/// The limit for each [`BULK_BYTES`].
const BULK_LIMIT: Duration = Duration::from_secs(30);
const PINGS: usize = 4000;
/// The number of requests before the first one that counts.
const WARM_UP: usize = 200;
/// The bytes that are read before those that count.
const BULK_WARM_UP: usize = 16 << 20;
const BULK_TOTAL: usize = 1 << 30;
/// Memory of the VM whose pages are requested one by one, in bytes.
const STALL_MEMORY: u64 = 32 << 20;
/// Memory of the VM whose pages are pushed, in bytes.
const PUSH_MEMORY: u64 = 512 << 20;

/// Runs `bench link` and returns its rows.
///
/// # Errors
/// [`BenchError`].
pub(crate) fn link(flags: &EngineFlags) -> Result<Vec<Row>, BenchError> {
    let repeat = flags.common.rounds(5, 1);
    let (mut pings, mut bulks) = (Samples::default(), Samples::default());
    for _ in rounds(repeat, "bare link") {
        pings.push(ping_pong()?.median());
        bulks.push(bulk_rate()?);
    }
    let on_link = |note: &str| Conditions::here(0, 0, note);
    let mut rows = vec![
        pings.row(
            "link.ping_pong_p50",
            "TCP loopback, two processes, spinning",
            "us",
            on_link("16 B request, 4112 B reply; both readers spin like those of the urgent connection, then sleep"),
        ),
        bulks.row(
            "link.bulk_rate",
            "TCP loopback, two processes",
            "B/s",
            on_link("256 KiB writes from one buffer, 256 KiB reads into one buffer"),
        ),
    ];
    for engine in flags.engines()? {
        for delivery in deliveries_of(engine, Backing::Shmem) {
            rows.extend(stall_rows(repeat, engine, delivery, pings.median())?);
        }
        let mut rates = Samples::default();
        for _ in rounds(repeat, format!("background push on {engine}")) {
            let sent = fetch(engine, None, PUSH_MEMORY, Guest::Quiet)?.1;
            rates.push(sent.background_bytes as f64 / sent.background_took.as_secs_f64());
        }
        let how = "no zero pages; each is pushed once from cold memory, checksummed, verified and installed; the guest is quiet";
        let how = Conditions::here(1, PUSH_MEMORY, how);
        rows.push(
            rates
                .row(
                    "push.rate",
                    format!("background push, {engine}"),
                    "B/s",
                    how,
                )
                .against("link.bulk_rate", bulks.median())
                .aiming_at(Bound::RatioAtLeast(0.6)),
        );
    }
    Ok(rows)
}

fn stall_rows(
    repeat: u32,
    engine: Engine,
    delivery: Delivery,
    ping: f64,
) -> Result<Vec<Row>, BenchError> {
    let [mut exits, mut stalls, mut p99, mut worst] = [(); 4].map(|()| Samples::default());
    for _ in rounds(repeat, format!("faults on {engine} by {delivery}")) {
        if delivery != Delivery::Missing {
            exits.push(exit_and_resume(engine, delivery, STALL_MEMORY)?.median());
        }
        let gaps = stalls_us(engine, delivery)?;
        stalls.push(gaps.median());
        p99.push(gaps.quantile(0.99));
        worst.push(gaps.quantile(1.0));
    }
    let row = |case: &'static str, samples: &Samples, note: &str| {
        let how = Conditions::here(1, STALL_MEMORY, note).with_delivery(delivery);
        samples.row(case, format!("{engine} by {delivery}"), "us", how)
    };
    let mut rows = Vec::new();
    let mut stall = row(
        "stall.urgent_p50",
        &stalls,
        "fault to next fault of a vCPU that only touches missing pages in random order; background idle; source and destination are two processes",
    );
    if !exits.is_empty() {
        rows.push(row(
            "engine.exit_resume_p50",
            &exits,
            "fault to next fault in ascending order; each page is copied and installed at once",
        ));
        let floor = ping + exits.median();
        stall = stall
            .against("link.ping_pong_p50 + engine.exit_resume_p50", floor)
            .aiming_at(Bound::RatioAtMost(1.6));
    }
    rows.push(stall);
    rows.push(row("stall.urgent_p99", &p99, "as stall.urgent_p50"));
    rows.push(row("stall.urgent_max", &worst, "as stall.urgent_p50"));
    Ok(rows)
}

/// The times from fault to fault of a vCPU that touches missing pages, in microseconds.
fn stalls_us(engine: Engine, delivery: Delivery) -> Result<Samples, BenchError> {
    let (report, _) = fetch(engine, Some(delivery), STALL_MEMORY, Guest::Toucher)?;
    let arrivals: Vec<Duration> = report.faults.iter().map(|fault| fault.at).collect();
    let gaps = arrivals
        .windows(2)
        .map(|pair| pair[1].saturating_sub(pair[0]));
    let gaps: Samples = gaps.map(|gap| gap.as_secs_f64() * 1e6).collect();
    if gaps.len() < 1000 {
        return Err(BenchError::Busy(format!(
            "only {} faults on {engine} by {delivery}",
            gaps.len()
        )));
    }
    Ok(gaps)
}

/// Moves a VM here, and runs its guest to the end. The source pushes the pages of a quiet guest. It
/// sends the pages of a toucher on request only.
fn fetch(
    engine: Engine,
    delivery: Option<Delivery>,
    memory_bytes: u64,
    guest: Guest,
) -> Result<(DestinationReport, SourceFigures), BenchError> {
    let mut peer = Peer::start(&SourceVm {
        push: guest == Guest::Quiet,
        ..SourceVm::new(engine, 1, memory_bytes, guest)
    })?;
    let config = DestinationConfig {
        delivery,
        ..DestinationConfig::default()
    };
    let (report, vm) = receive(&mut peer, config)?;
    vm.wait_finished(LIMIT)?;
    Ok((report, peer.figures::<SourceFigures>()?))
}

/// Answers each 16 bytes with 16 bytes and a page, as a source's urgent thread does, without
/// decoding them.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Pong {
    /// The address to listen on.
    pub(crate) host: IpAddr,
    /// The size of the page, in bytes.
    pub(crate) page_bytes: usize,
}

impl Part for Pong {
    const NAME: &'static str = "pong";

    fn play(&self) -> Result<(), BenchError> {
        let connection = accept_one(self.host)?;
        let mut request = [0; REQUEST_BYTES];
        let reply = vec![0x5a; HEADER_BYTES + self.page_bytes];
        let spin = pageferry_migration::URGENT_SPIN.as_micros() as u32;
        let wait = Wait::block("request").spinning(spin);
        while connection.read_exact(&mut request, &wait).is_ok() {
            connection.write_all(&reply, &Wait::block("reply"))?;
        }
        Ok(())
    }
}

/// Sends bytes as fast as the benchmark reads them.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Bulk {
    /// The address to listen on.
    pub(crate) host: IpAddr,
}

impl Part for Bulk {
    const NAME: &'static str = "bulk";

    fn play(&self) -> Result<(), BenchError> {
        let connection = accept_one(self.host)?;
        let bytes = vec![0x5a; BULK_BYTES];
        while connection.write_all(&bytes, &Wait::block("bulk")).is_ok() {}
        Ok(())
    }
}

/// Microseconds of each exchange on a bare connection.
fn ping_pong() -> Result<Samples, BenchError> {
    let (host, page_bytes) = (LOOPBACK, PAGE_SIZE as usize);
    let mut peer = Peer::start(&Pong { host, page_bytes })?;
    let connection = peer.connect()?;
    let times = exchanges(&connection, page_bytes, 1, &mut |done| {
        done < PINGS + WARM_UP
    })?;
    let counted = times.into_iter().skip(WARM_UP);
    Ok(counted.map(|ns| ns as f64 / 1000.0).collect())
}

/// Exchanges requests for replies with a page on a bare connection, while `more` of their number
/// so far returns true. At any time `in_flight` requests are unanswered. Returns the nanoseconds of
/// each exchange. The reader waits the way a vCPU waits for its page.
pub(crate) fn exchanges(
    connection: &Connection,
    page_bytes: usize,
    in_flight: usize,
    more: &mut dyn FnMut(usize) -> bool,
) -> Result<Vec<u64>, BenchError> {
    let reply_bytes = HEADER_BYTES + page_bytes;
    let mut buffer = vec![0; reply_bytes.min(BULK_BYTES)];
    let ask = || -> Result<Instant, BenchError> {
        let began = Instant::now();
        connection.write_all(&[1; REQUEST_BYTES], &Wait::block("request"))?;
        Ok(began)
    };
    let mut asked = (0..in_flight)
        .map(|_| ask())
        .collect::<Result<VecDeque<_>, _>>()?;
    let mut times = Vec::new();
    while more(times.len()) {
        read_reply(connection, reply_bytes, &mut buffer)?;
        let began = asked.pop_front().expect("a request is unanswered");
        times.push(began.elapsed().as_nanos() as u64);
        asked.push_back(ask()?);
    }
    Ok(times)
}

/// Reads one reply, and forgets its bytes.
fn read_reply(
    connection: &Connection,
    reply_bytes: usize,
    buffer: &mut [u8],
) -> Result<(), BenchError> {
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut left = reply_bytes;
    let mut spinner = Spinner::new(pageferry_migration::FAULT_SPIN);
    while left > 0 {
        let most = left.min(buffer.len());
        match connection.recv_pending(&mut buffer[..most], "reply")? {
            Some(bytes) => {
                left -= bytes;
                spinner = Spinner::new(pageferry_migration::FAULT_SPIN);
            }
            None if spinner.spin() => {}
            None if Instant::now() > deadline => {
                return Err(BenchError::Busy("no reply in time".into()));
            }
            None => {
                connection.wait_readable(&Wait::block("reply").within(Duration::from_secs(5)))?;
            }
        }
    }
    Ok(())
}

/// Bytes per second over a bare connection.
fn bulk_rate() -> Result<f64, BenchError> {
    let mut peer = Peer::start(&Bulk { host: LOOPBACK })?;
    let connection = peer.connect()?;
    take_bulk(&connection, BULK_WARM_UP)?;
    let took = take_bulk(&connection, BULK_TOTAL)?;
    Ok(BULK_TOTAL as f64 / took.as_secs_f64())
}

/// Reads bytes of a [`Bulk`]. Returns the time that it took.
pub(crate) fn take_bulk(connection: &Connection, bytes: usize) -> Result<Duration, BenchError> {
    let began = Instant::now();
    let mut buffer = vec![0; BULK_BYTES];
    let wait = Wait::block("bulk").within(BULK_LIMIT);
    for _ in 0..bytes / BULK_BYTES {
        connection.read_exact(&mut buffer, &wait)?;
    }
    Ok(began.elapsed())
}
