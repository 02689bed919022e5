//! The end of pre-copy, and the limits of rates: a guest and a link whose rates the test sets.

use crate::support::{LIMIT, WorkloadVm, address_of, listen, receive_on};
use pageferry_machine::{Backing, Engine};
use pageferry_migration::{
    Change, DestinationConfig, Observer, PassFigures, Phase, Route, Settings, SettingsError,
    SourceConfig, SourceFailure, SourceReport, SourceSession, Switch, migrate,
};
use pageferry_testkit::shaper::{Plan, Shaper};
use pageferry_testkit::wait_for;
use pageferry_transport::address::Address;
use std::sync::Mutex;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// Keeps the notes, and the time of each phase.
#[derive(Debug, Default)]
struct Seen {
    notes: Mutex<Vec<String>>,
    phases: Mutex<Vec<(Phase, Instant)>>,
}

impl Observer for Seen {
    fn phase(&self, phase: Phase) {
        self.phases.lock().unwrap().push((phase, Instant::now()));
    }

    fn progress(&self, _: Phase, _: u64, _: u64) {}

    fn note(&self, text: &str) {
        self.notes.lock().unwrap().push(text.into());
    }
}

impl Seen {
    /// The time from the first of these phases to the first of those.
    fn between(&self, from: impl Fn(Phase) -> bool, to: impl Fn(Phase) -> bool) -> Duration {
        let phases = self.phases.lock().unwrap();
        let at = |wanted: &dyn Fn(Phase) -> bool| {
            phases.iter().find(|(phase, _)| wanted(*phase)).unwrap().1
        };
        at(&to) - at(&from)
    }
}

/// Moves `vm` over a link of `rate` bytes a second, or the loopback interface. `operate` runs
/// meanwhile.
fn moved(
    vm: &WorkloadVm,
    rate: Option<u64>,
    settings: Settings,
    operate: impl FnOnce(&SourceSession) + Send,
) -> (Result<SourceReport, SourceFailure>, Seen) {
    let destination = listen(DestinationConfig::default());
    let Address::Tcp { port, .. } = address_of(&destination) else {
        unreachable!("it listens on TCP")
    };
    let plan = Plan {
        rate,
        ..Plan::default()
    };
    let shaper = Shaper::start(([127, 0, 0, 1], port).into(), plan).unwrap();
    let route = Route::To(shaper.addr().to_string().parse().unwrap());
    let config = SourceConfig {
        settings,
        ..SourceConfig::default()
    };
    let session = SourceSession::new().unwrap();
    session.prepare(settings);
    let seen = Seen::default();
    let sent = std::thread::scope(|scope| {
        let received = scope.spawn(|| receive_on(Backing::Shmem, &destination));
        scope.spawn(|| operate(&session));
        let sent = migrate(&vm.running(), &route, b"test", &config, &session, &seen);
        drop(shaper);
        let (there, received) = received.join().unwrap();
        if sent.is_ok() {
            received.unwrap();
            there.assert_verifies();
        }
        sent
    });
    (sent, seen)
}

/// Whether the guest dirtied most pages in each pass, and the link never became slower. A busy host
/// keeps guests and links from it.
fn in_vain(passes: &[PassFigures]) -> bool {
    let rate = |pass: &PassFigures| pass.pages as f64 / pass.took.as_secs_f64();
    let slower = |two: &[PassFigures]| rate(&two[1]) < 0.8 * rate(&two[0]);
    passes.iter().all(|pass| pass.left * 5 > pass.pages * 4) && !passes.windows(2).any(slower)
}

/// A VM with a guest that has written all of its 8 MiB.
fn written() -> WorkloadVm {
    let vm = WorkloadVm::booted(Engine::Soft, 1, 8 * MIB);
    vm.wait_progress(vm.workload.memory_map().share_pages());
    vm
}

#[test]
fn a_guest_faster_than_the_link_is_told_within_three_passes() {
    // A slower link gives a guest that hardly ran more time.
    let mut rates = [16 * MIB, 4 * MIB, MIB].into_iter();
    let (sent, seen) = loop {
        let rate = rates.next().expect("a guest that runs");
        let (sent, seen) = moved(&written(), Some(rate), Switch::Auto.into(), |_| {});
        let sent = sent.unwrap();
        if in_vain(&sent.passes) {
            break (sent, seen);
        }
        eprintln!("a busy host: {:?}", sent.passes);
    };
    assert!((2..=3).contains(&sent.passes.len()), "{:?}", sent.passes);
    // The next pass sends what one left, and what the guest dirtied between them.
    for two in sent.passes.windows(2) {
        assert!((1..=two[1].pages).contains(&two[0].left), "{two:?}");
    }
    let notes = seen.notes.into_inner().unwrap();
    assert_eq!(notes, sent.notes);
    assert_eq!(notes.len(), 1, "{notes:?}");
    for part in [
        "does not converge",
        "the guest dirties ",
        "the link carries ",
        "pages are left",
    ] {
        assert!(notes[0].contains(part), "{notes:?}");
    }
    assert!(sent.missing_at_start > 500, "{}", sent.missing_at_start);
    assert!(sent.blackout_forecast.is_some());
}

#[test]
fn a_guest_that_dirties_nothing_converges_without_a_word() {
    let vm = written();
    vm.threads.pause(LIMIT).unwrap();
    let (sent, seen) = moved(&vm, Some(64 * MIB), Switch::Auto.into(), |_| {});
    let sent = sent.unwrap();
    // The second follows only if the destination needed long for its memory.
    assert!(sent.passes.len() <= 2, "{:?}", sent.passes);
    assert!(
        sent.passes.iter().all(|pass| pass.left == 0),
        "{:?}",
        sent.passes
    );
    assert_eq!(sent.missing_at_start, 0);
    assert_eq!(sent.notes, seen.notes.into_inner().unwrap());
    assert!(sent.notes.is_empty(), "{:?}", sent.notes);
}

#[test]
fn an_operator_chooses_the_switch_over_and_idle_passes_are_rare() {
    let vm = written();
    vm.threads.pause(LIMIT).unwrap();
    let (sent, seen) = moved(&vm, None, Switch::Manual.into(), |session| {
        wait_for("a pass", || (session.status().passes >= 1).then_some(()));
        std::thread::sleep(Duration::from_millis(700));
        let status = session.status();
        assert_eq!(status.stage, "pre-copy");
        // The guest dirties nothing: there is nothing to send again.
        assert_eq!(status.passes, 1);
        assert!(status.blackout_forecast.is_some() && status.link_rate.is_some());
        let now = Change {
            switch: Some(Switch::NOW),
            ..Change::default()
        };
        session.set(&now).unwrap();
    });
    sent.unwrap();
    let held = seen.between(
        |phase| matches!(phase, Phase::Precopy { .. }),
        |phase| phase == Phase::SwitchOver,
    );
    assert!(held > Duration::from_millis(700), "{held:?}");
}

#[test]
fn a_pass_ends_in_the_middle_when_the_operator_says_now() {
    let vm = written();
    // A guest that runs would fetch its pages, and the move would end by itself.
    vm.threads.pause(LIMIT).unwrap();
    // The pass would take two minutes.
    let settings = Settings {
        max_bandwidth: Some(Settings::MIN_RATE),
        ..Switch::Manual.into()
    };
    let (sent, _) = moved(&vm, None, settings, |session| {
        wait_for("pages", || (session.status().page_bytes > 0).then_some(()));
        let now = Change {
            switch: Some(Switch::NOW),
            max_postcopy_bandwidth: Some(Some(Settings::MIN_RATE)),
            ..Change::default()
        };
        session.set(&now).unwrap();
        let stage = || session.status().stage;
        wait_for("the hand-over", || (stage() == "handed-over").then_some(()));
        assert_eq!(session.set(&now), Err(SettingsError::TooLate));
        let faster = Change {
            max_bandwidth: Some(None),
            max_postcopy_bandwidth: Some(None),
            ..Change::default()
        };
        session.set(&faster).unwrap();
    });
    let sent = sent.unwrap();
    assert_eq!(sent.passes, [], "none has ended");
    assert!(sent.missing_at_start > 1000, "{}", sent.missing_at_start);
}

#[test]
fn a_blackout_above_its_limit_holds_the_switch_over_back() {
    let vm = written();
    vm.threads.pause(LIMIT).unwrap();
    let settings = Settings {
        max_blackout: Some(Duration::from_nanos(1)),
        ..Switch::Auto.into()
    };
    let (sent, _) = moved(&vm, None, settings, |session| {
        let note = wait_for("the note", || session.status().note);
        assert!(note.contains("is above the limit"), "{note}");
        std::thread::sleep(Duration::from_millis(600));
        assert_eq!(session.status().stage, "pre-copy");
        let more = Change {
            max_blackout: Some(Some(Duration::from_secs(60))),
            ..Change::default()
        };
        session.set(&more).unwrap();
    });
    let sent = sent.unwrap();
    assert_eq!(sent.notes.len(), 1, "{:?}", sent.notes);
}

#[test]
fn limits_hold_and_change_meanwhile() {
    let vm = written();
    vm.threads.pause(LIMIT).unwrap();
    let settings = Settings {
        max_bandwidth: Some(MIB / 4),
        ..Switch::AfterPasses(1).into()
    };
    let (sent, _) = moved(&vm, None, settings, |session| {
        let sent = || session.status().page_bytes;
        wait_for("some pages", || (sent() >= MIB / 2).then_some(()));
        let faster = Change {
            max_bandwidth: Some(None),
            ..Change::default()
        };
        session.set(&faster).unwrap();
    });
    let took = sent.unwrap().passes[0].took;
    // The second frame of 256 KiB is sent after 1 s. All pages would take 32 s.
    assert!(took > Duration::from_millis(800), "{took:?}");
    assert!(took < Duration::from_secs(24), "{took:?}");
}

#[test]
fn a_limit_of_the_push_leaves_urgent_pages_alone() {
    let vm = written();
    let settings = Settings {
        max_postcopy_bandwidth: Some(MIB),
        ..Switch::NOW.into()
    };
    let (sent, _) = moved(&vm, None, settings, |_| {});
    let sent = sent.unwrap();
    let allowed = MIB as f64 * sent.background_took.as_secs_f64() + (MIB / 2) as f64;
    let pushed = sent.background_bytes;
    assert!(
        (pushed as f64) < allowed,
        "{pushed} bytes, {allowed} allowed"
    );
    // The guest touches all of its memory, so it does not wait for the push.
    assert!(sent.pages.urgent > 500, "{:?}", sent.pages);
}

#[test]
fn settings_need_a_migration_and_make_sense() {
    let session = SourceSession::new().unwrap();
    let limit = Change {
        max_bandwidth: Some(Some(MIB)),
        ..Change::default()
    };
    assert_eq!(session.set(&limit), Err(SettingsError::NoMigration));
    session.prepare(Switch::Auto.into());
    assert_eq!(session.set(&limit).unwrap().max_bandwidth, Some(MIB));
    let above = Change {
        max_postcopy_bandwidth: Some(Some(2 * MIB)),
        ..Change::default()
    };
    let error = session.set(&above).unwrap_err();
    assert!(error.to_string().contains("is above"), "{error}");
    assert_eq!(session.settings().unwrap().max_postcopy_bandwidth, None);
}
