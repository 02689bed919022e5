//! `bench link`: the stall of an urgent page next to the costs of its parts, and the background
//! push next to the bare link.

use crate::channels::Channels;
use crate::exits::{exit_and_resume, gaps_us};
use crate::mover::{Guest, SourceFigures, SourceVm, receive};
use crate::peer::{LOOPBACK, Part, Peer, accept_one};
use crate::vm::{Faults, LIMIT, create};
use crate::{BenchError, Bound, Conditions, Row, Samples, Setting, note};
use pageferry_addr::PAGE_SIZE;
use pageferry_machine::{Backing, Delivery, Engine};
use pageferry_migration::channel::{Connection, Spinner, Wait};
use pageferry_migration::{DestinationConfig, DestinationReport, Resolver};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

/// The size of a request on the urgent connection, in bytes.
const REQUEST_BYTES: usize = 16;
/// The size of a reply's header, in bytes. The page follows.
const HEADER_BYTES: usize = 16;
/// The size of a write to the bulk connection, in bytes.
const BULK_BYTES: usize = 256 << 10;
const PINGS: usize = 4000;
/// The number of requests before the first one that counts.
const WARM_UP: usize = 200;
const BULK_TOTAL: usize = 1 << 30;
/// Memory of the VM whose pages are requested one by one, in bytes.
const STALL_MEMORY: u64 = 32 << 20;
/// Memory of the VM whose pages are pushed, in bytes.
const PUSH_MEMORY: u64 = 512 << 20;

/// Runs `bench link` and returns its rows. With files for TLS, the urgent pages and the push are
/// measured with TLS too, in turn with the others. Both ends use the same files.
///
/// # Errors
/// [`BenchError`].
pub(crate) fn link(setting: &Setting, channels: &Channels) -> Result<Vec<Row>, BenchError> {
    let plain = Channels {
        tls: None,
        ..channels.clone()
    };
    let mut rows = Vec::new();
    let mut pings = Samples::default();
    let mut bulks = Samples::default();
    for round in 1..=setting.repeat {
        note(&format!("bare link, round {round} of {}", setting.repeat));
        pings.push(ping_pong()?.median());
        bulks.push(bulk_rate(channels.bulk)?);
    }
    let ping = pings.median();
    let bulk = bulks.median();
    let on_link = |note: &str| Conditions::here(0, 0, note);
    rows.push(pings.row(
        "link.ping_pong_p50",
        "TCP loopback, two processes, spinning",
        "us",
        on_link("16 B request, 4112 B reply; both readers spin like those of the urgent connection, then sleep"),
    ));
    rows.push(bulks.row(
        "link.bulk_rate",
        "TCP loopback, two processes",
        "B/s",
        on_link(&format!(
            "{} connections; on each 256 KiB writes from one buffer, 256 KiB reads into one buffer",
            channels.bulk
        )),
    ));
    for &engine in &setting.engines {
        for delivery in deliveries(engine)? {
            stall_rows(setting, engine, delivery, ping, channels, &mut rows)?;
        }
        let (mut rates, mut tls_rates) = (Samples::default(), Samples::default());
        for round in 1..=setting.repeat {
            note(&format!(
                "background push on {engine}, round {round} of {}",
                setting.repeat
            ));
            let rate = |channels: &Channels| {
                let sent = fetch(engine, None, PUSH_MEMORY, Guest::Quiet, channels)?.1;
                let seconds = sent.background_took.as_secs_f64();
                Ok::<_, BenchError>(sent.background_bytes as f64 / seconds)
            };
            rates.push(rate(&plain)?);
            if channels.tls.is_some() {
                tls_rates.push(rate(channels)?);
            }
        }
        let plain_rate = rates.median();
        let conditions = |note: &str| {
            let note = format!("{note}; {} bulk channels", channels.bulk);
            Conditions::here(1, PUSH_MEMORY, note)
        };
        rows.push(
            rates
                .row(
                    "push.rate",
                    format!("background push, {engine}"),
                    "B/s",
                    conditions("no zero pages; each is pushed once from cold memory, checksummed, verified and installed; the guest is quiet"),
                )
                .against("link.bulk_rate", bulk)
                .aiming_at(Bound::RatioAtLeast(0.6)),
        );
        if !tls_rates.is_empty() {
            rows.push(
                tls_rates
                    .row(
                        "push.rate_tls",
                        format!("background push, {engine}"),
                        "B/s",
                        conditions("as push.rate, with TLS"),
                    )
                    .against("push.rate", plain_rate),
            );
        }
    }
    Ok(rows)
}

/// The deliveries that the engine has on this host.
fn deliveries(engine: Engine) -> Result<Vec<Delivery>, BenchError> {
    let vm = create(engine, 1, 16 << 20, Resolver::new() as Arc<dyn Faults>)?;
    Ok(vm.machine.deliveries())
}

fn stall_rows(
    setting: &Setting,
    engine: Engine,
    delivery: Delivery,
    ping: f64,
    channels: &Channels,
    rows: &mut Vec<Row>,
) -> Result<(), BenchError> {
    let (mut exits, mut stalls) = (Samples::default(), Samples::default());
    let (mut p99, mut worst) = (Samples::default(), Samples::default());
    let mut tls = Samples::default();
    let plain = Channels {
        tls: None,
        ..channels.clone()
    };
    for round in 1..=setting.repeat {
        note(&format!(
            "faults on {engine} by {delivery}, round {round} of {}",
            setting.repeat
        ));
        if delivery != Delivery::Missing {
            exits.push(exit_and_resume(engine, delivery, STALL_MEMORY)?.median());
        }
        let gaps = stalls_us(engine, delivery, &plain)?;
        if channels.tls.is_some() {
            tls.push(stalls_us(engine, delivery, channels)?.median());
        }
        stalls.push(gaps.median());
        p99.push(gaps.quantile(0.99));
        worst.push(gaps.quantile(1.0));
    }
    let subject = format!("{engine} by {delivery}");
    let conditions = |note: &str| Conditions::here(1, STALL_MEMORY, note).with_delivery(delivery);
    let floor = ping + exits.median();
    let mut stall = stalls.row(
        "stall.urgent_p50",
        subject.as_str(),
        "us",
        conditions("fault to next fault of a vCPU that only touches missing pages in random order; background idle; source and destination are two processes"),
    );
    if !exits.is_empty() {
        rows.push(exits.row(
            "engine.exit_resume_p50",
            subject.as_str(),
            "us",
            conditions("fault to next fault; the bytes are already in place, and each fault is resolved at once"),
        ));
        stall = stall
            .against("link.ping_pong_p50 + engine.exit_resume_p50", floor)
            .aiming_at(Bound::RatioAtMost(1.6));
    }
    let plain_stall = stall.value;
    rows.push(stall);
    if !tls.is_empty() {
        rows.push(
            tls.row(
                "stall.urgent_p50_tls",
                subject.as_str(),
                "us",
                conditions("as stall.urgent_p50, with TLS"),
            )
            .against("stall.urgent_p50", plain_stall)
            .aiming_at(Bound::RatioAtMost(1.5)),
        );
    }
    rows.push(p99.row(
        "stall.urgent_p99",
        subject.as_str(),
        "us",
        conditions("as stall.urgent_p50"),
    ));
    rows.push(worst.row(
        "stall.urgent_max",
        subject.as_str(),
        "us",
        conditions("as stall.urgent_p50"),
    ));
    Ok(())
}

/// The times from fault to fault of a vCPU that touches missing pages, in microseconds.
fn stalls_us(
    engine: Engine,
    delivery: Delivery,
    channels: &Channels,
) -> Result<Samples, BenchError> {
    let guest = Guest::Toucher;
    let delivery_here = Some(delivery);
    let (report, _) = fetch(engine, delivery_here, STALL_MEMORY, guest, channels)?;
    let arrivals: Vec<Duration> = report.faults.iter().map(|fault| fault.at).collect();
    let gaps = gaps_us(&arrivals);
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
    channels: &Channels,
) -> Result<(DestinationReport, SourceFigures), BenchError> {
    let source = SourceVm {
        engine,
        vcpus: 1,
        memory_bytes,
        backing: Backing::Shmem,
        used_bytes: memory_bytes,
        passes: 0,
        push: guest == Guest::Quiet,
        preempt: true,
        prefetch: true,
        guest,
        channels: channels.clone(),
    };
    let mut peer = Peer::start(&source)?;
    let config = DestinationConfig {
        delivery,
        tls: channels.tls.clone().map(Into::into),
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
pub(crate) struct Bulk;

impl Part for Bulk {
    const NAME: &'static str = "bulk";

    fn play(&self) -> Result<(), BenchError> {
        let connection = accept_one(LOOPBACK)?;
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

/// Bytes per second over bare connections, which are read at the same time.
fn bulk_rate(connections: u16) -> Result<f64, BenchError> {
    let per_connection = BULK_TOTAL / BULK_BYTES / usize::from(connections);
    let mut peers = Vec::new();
    for _ in 0..connections {
        let mut peer = Peer::start(&Bulk)?;
        let connection = peer.connect()?;
        peers.push((peer, connection));
    }
    let ready = Barrier::new(usize::from(connections) + 1);
    let read = |connection: &Connection| -> Result<(), BenchError> {
        let mut buffer = vec![0; BULK_BYTES];
        let wait = Wait::block("bulk").within(Duration::from_secs(30));
        let warm = (0..64).try_for_each(|_| connection.read_exact(&mut buffer, &wait));
        // Every thread has to come, or the others would wait for ever.
        ready.wait();
        warm?;
        for _ in 0..per_connection {
            connection.read_exact(&mut buffer, &wait)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = peers
            .iter()
            .map(|(_, connection)| scope.spawn(|| read(connection)))
            .collect();
        ready.wait();
        let began = Instant::now();
        for thread in threads {
            thread.join().expect("a reader panicked")?;
        }
        let bytes = per_connection * BULK_BYTES * usize::from(connections);
        Ok(bytes as f64 / began.elapsed().as_secs_f64())
    })
}
