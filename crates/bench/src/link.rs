//! `bench link`: the stall of an urgent page next to the costs of its parts, and the background
//! push next to the bare link.

use crate::exits::{exit_and_resume, gaps_us};
use crate::peer::{
    BULK_BYTES, Guest, Peer, REPLY_BYTES, REQUEST_BYTES, Role, SourceFigures, SourceVm, listen,
};
use crate::vm::{Faults, LIMIT, Vm, create};
use crate::{BenchError, Bound, Conditions, Row, Samples, Setting};
use pageferry_machine::{Delivery, Engine};
use pageferry_migration::channel::{Spinner, Wait};
use pageferry_migration::{
    Destination, DestinationConfig, DestinationReport, Resolver, Unobserved, monotonic_ns,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

const PINGS: usize = 4000;
/// The number of requests before the first one that counts.
const WARM_UP: usize = 200;
const BULK_TOTAL: usize = 1 << 30;
/// Memory of the VM whose pages are requested one by one, in bytes.
const STALL_MEMORY: u64 = 32 << 20;
/// Memory of the VM whose pages are pushed, in bytes.
const PUSH_MEMORY: u64 = 512 << 20;

/// Runs `bench link` and returns its rows.
///
/// # Errors
/// [`BenchError`].
pub fn link(setting: &Setting, progress: &mut dyn FnMut(&str)) -> Result<Vec<Row>, BenchError> {
    let mut rows = Vec::new();
    let mut pings = Samples::default();
    let mut bulks = Samples::default();
    for round in 1..=setting.repeat {
        progress(&format!("bare link, round {round} of {}", setting.repeat));
        pings.push(ping_pong(setting)?.median());
        bulks.push(bulk_rate(setting)?);
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
        on_link("256 KiB writes from one buffer, 256 KiB reads into one buffer"),
    ));
    for &engine in &setting.engines {
        for delivery in deliveries(engine)? {
            stall_rows(setting, engine, delivery, ping, &mut rows, progress)?;
        }
        let mut rates = Samples::default();
        for round in 1..=setting.repeat {
            progress(&format!(
                "background push on {engine}, round {round} of {}",
                setting.repeat
            ));
            let (_, sent) = fetch(setting, engine, None, PUSH_MEMORY, Guest::Quiet)?;
            rates.push(sent.background_bytes as f64 / (sent.background_ns as f64 / 1e9));
        }
        rows.push(
            rates
                .row(
                    "push.rate",
                    format!("background push, {engine}"),
                    "B/s",
                    Conditions::here(1, PUSH_MEMORY, "no zero pages; each is pushed once from cold memory, checksummed, verified and installed; the guest is quiet"),
                )
                .against("link.bulk_rate", bulk)
                .aiming_at("ratio >= 0.6", Bound::RatioAtLeast(0.6)),
        );
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
    rows: &mut Vec<Row>,
    progress: &mut dyn FnMut(&str),
) -> Result<(), BenchError> {
    let (mut exits, mut stalls) = (Samples::default(), Samples::default());
    let (mut p99, mut worst) = (Samples::default(), Samples::default());
    for round in 1..=setting.repeat {
        progress(&format!(
            "faults on {engine} by {delivery}, round {round} of {}",
            setting.repeat
        ));
        if delivery != Delivery::Missing {
            exits.push(exit_and_resume(engine, delivery, STALL_MEMORY)?.median());
        }
        let (report, _) = fetch(
            setting,
            engine,
            Some(delivery),
            STALL_MEMORY,
            Guest::Toucher,
        )?;
        let arrivals: Vec<u64> = report.faults.iter().map(|fault| fault.at_ns).collect();
        let gaps = gaps_us(&arrivals);
        if gaps.len() < 1000 {
            return Err(BenchError::Busy(format!(
                "only {} faults on {engine} by {delivery}",
                gaps.len()
            )));
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
            .aiming_at("ratio <= 1.6", Bound::RatioAtMost(1.6));
    }
    rows.push(stall);
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

/// Moves a VM here, and runs its guest to the end. The source pushes the pages of a quiet guest. It
/// sends the pages of a toucher on request only.
fn fetch(
    setting: &Setting,
    engine: Engine,
    delivery: Option<Delivery>,
    memory_bytes: u64,
    guest: Guest,
) -> Result<(DestinationReport, SourceFigures), BenchError> {
    let role = Role::Source(SourceVm {
        engine,
        vcpus: 1,
        memory_bytes,
        used_bytes: memory_bytes,
        passes: 0,
        push: guest == Guest::Quiet,
        guest,
    });
    let mut peer = Peer::start(setting, &role)?;
    let config = DestinationConfig {
        delivery,
        ..DestinationConfig::default()
    };
    let (report, vm) = receive(&mut peer, config)?;
    vm.wait_finished(LIMIT)?;
    Ok((report, peer.read_figures()?))
}

/// Receives a VM from a peer in the role `Source`.
pub(crate) fn receive(
    peer: &mut Peer,
    config: DestinationConfig,
) -> Result<(DestinationReport, Vm), BenchError> {
    let listener = listen()?;
    let address = listener.local_addr().to_string();
    match peer.next_line()?.as_str() {
        "ready" => peer.send_line(&address)?,
        other => return Err(BenchError::Peer(format!("unexpected line '{other}'"))),
    }
    let deadline = Instant::now() + LIMIT;
    let late = || Instant::now() > deadline;
    let failed = |e: &dyn std::fmt::Display| BenchError::Migration(e.to_string());
    let destination = Destination::listen(listener, config, |_| {}).map_err(|e| failed(&e))?;
    let incoming = Arc::new(destination)
        .accept(&late)
        .map_err(|e| failed(&e))?;
    let offer = incoming.offer().clone();
    let resolver = Resolver::new();
    let vm = create(
        offer.engine,
        offer.vcpus,
        offer.memory_bytes,
        Arc::clone(&resolver) as Arc<dyn Faults>,
    )?;
    let report = incoming
        .receive(&vm.running(), &resolver, &late, &Unobserved)
        .map_err(|e| failed(&e))?;
    Ok((report, vm))
}

/// Microseconds of each exchange on a bare connection. It waits the way a vCPU waits for its page.
fn ping_pong(setting: &Setting) -> Result<Samples, BenchError> {
    let mut peer = Peer::start(setting, &Role::Pong)?;
    let connection = peer.connect()?;
    let request = [1; REQUEST_BYTES];
    let mut reply = vec![0; 8 * REPLY_BYTES];
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut samples = Samples::default();
    for ping in 0..PINGS + WARM_UP {
        let began = monotonic_ns();
        connection.write_all(&request, &Wait::block("request"))?;
        let mut got = 0;
        let spinner = Spinner::new(pageferry_migration::FAULT_SPIN);
        while got < REPLY_BYTES {
            match connection.recv_pending(&mut reply[got..], "reply")? {
                Some(bytes) => got += bytes,
                None if spinner.spin() => {}
                None if Instant::now() > deadline => {
                    return Err(BenchError::Busy("no reply in time".into()));
                }
                None => connection
                    .wait_readable(&Wait::block("reply").within(Duration::from_secs(5)))?,
            }
        }
        if ping >= WARM_UP {
            samples.push((monotonic_ns() - began) as f64 / 1000.0);
        }
    }
    Ok(samples)
}

/// Bytes per second over a bare connection.
fn bulk_rate(setting: &Setting) -> Result<f64, BenchError> {
    let mut peer = Peer::start(setting, &Role::Bulk)?;
    let connection = peer.connect()?;
    let mut buffer = vec![0; BULK_BYTES];
    let wait = Wait::block("bulk").within(Duration::from_secs(30));
    for _ in 0..64 {
        connection.read_exact(&mut buffer, &wait)?;
    }
    let began = Instant::now();
    for _ in 0..BULK_TOTAL / BULK_BYTES {
        connection.read_exact(&mut buffer, &wait)?;
    }
    Ok(BULK_TOTAL as f64 / began.elapsed().as_secs_f64())
}
