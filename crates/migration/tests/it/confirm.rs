//! Pre-copy without a dirty log: pages that have not changed are confirmed after the switch-over,
//! and the guest never sees a page of before it.

use crate::alone::{LeakCheck, runs_in_child};
use crate::failures_destination::{Case, PROTOCOL, attempt, discards, recovers, told};
use crate::recovery::{Ends, Stage, moved, source_config, wait_for_handover};
use crate::scripted::source::{ScriptedSource, Template};
use crate::scripted::{LONG, assert_loss, limits};
use crate::support::{
    LIMIT, WorkloadVm, address_of, kvm_deliveries, kvm_offers, kvm_usable, listen, migrate_running,
    move_vm, receive_on,
};
use pageferry_addr::RamPage;
use pageferry_machine::{
    Backing, BlackoutCost, Delivery, Engine, GuestRam, Machine, MachineError, MachineKind,
};
use pageferry_migration::wire::{
    ErrorCode, ErrorMessage, Frame, FrameType, PAGE_BYTES, RunKind, RunList, urgent_reply_confirmed,
};
use pageferry_migration::{
    Change, DestinationConfig, RunningVm, Settings, SourceConfig, SourceReport, Switch, Tracking,
};
use pageferry_testkit::shaper::{Plan, Which};
use pageferry_testkit::wait_until;
use pageferry_userfault::PageBitmap;
use std::sync::Arc;
use std::time::Duration;

const MIB: u64 = 1 << 20;

fn by_hash(switch: Switch) -> SourceConfig {
    SourceConfig {
        settings: switch.into(),
        tracking: Tracking::Hash,
        ..SourceConfig::default()
    }
}

fn written(engine: Engine, bytes: u64) -> WorkloadVm {
    let vm = WorkloadVm::booted(engine, 1, bytes);
    vm.wait_progress(vm.workload.memory_map().share_pages());
    vm
}

/// Moves a VM whose guest writes all the time. Returns the source's report.
fn moves_whole(vm: WorkloadVm, config: &SourceConfig, to: DestinationConfig) -> SourceReport {
    let moved = move_vm(vm, config, to);
    let (sent, received) = (moved.sent.unwrap(), moved.received.unwrap());
    let share = moved.destination.workload.memory_map().share_pages();
    moved.destination.wait_progress(share);
    moved.destination.assert_verifies();
    assert_eq!(sent.pages.confirmed, received.pages.confirmed);
    assert_eq!(sent.bytes_saved, sent.pages.confirmed * PAGE_BYTES as u64);
    eprintln!(
        "{} of {} pages confirmed, {} sent again, passes {:?}",
        sent.pages.confirmed, sent.missing_at_start, sent.pages_resent, sent.passes
    );
    sent
}

#[test]
fn a_guest_that_writes_all_the_time_moves_without_a_log() {
    for (channels, switch) in [
        (1, Switch::AfterPasses(1)),
        (2, Switch::AfterPasses(3)),
        (2, Switch::Auto),
    ] {
        let config = SourceConfig {
            bulk_channels: channels,
            urgent_channels: channels,
            ..by_hash(switch)
        };
        let vm = written(Engine::Soft, 8 * MIB);
        let pages = vm.ram().pages();
        let sent = moves_whole(vm, &config, DestinationConfig::default());
        assert_eq!(sent.missing_at_start, pages, "{switch}");
        assert_eq!(sent.passes[0].left, pages, "nobody knows which are dirty");
    }
}

/// A guest that stands still: the second pass sends nothing, and all its data is confirmed.
#[test]
fn a_guest_that_writes_nothing_is_confirmed_whole() {
    let vm = written(Engine::Soft, 8 * MIB);
    vm.threads.pause(LIMIT).unwrap();
    let moved = move_vm(
        vm,
        &by_hash(Switch::AfterPasses(2)),
        DestinationConfig::default(),
    );
    let (sent, received) = (moved.sent.unwrap(), moved.received.unwrap());
    let passes: Vec<_> = sent.passes.iter().map(|pass| pass.pages).collect();
    // More passes follow while the destination allocates. They find nothing either.
    assert_eq!(passes[..2], [sent.missing_at_start, 0]);
    assert!(passes[2..].iter().all(|pages| *pages == 0), "{passes:?}");
    assert_eq!(sent.pages_resent, 0);
    assert_eq!(sent.pages.confirmed, sent.pages.precopy);
    assert_eq!(received.pages.background, 0);
    assert!(sent.pages.confirmed > 1000, "{:?}", sent.pages);
    moved.destination.assert_verifies();
}

#[test]
fn a_pass_that_the_operator_ends_in_its_middle_leaves_the_rest_unconfirmed() {
    let vm = written(Engine::Soft, 8 * MIB);
    // The pass would take longer than any operator.
    let config = SourceConfig {
        settings: Settings {
            max_bandwidth: Some(MIB / 8),
            ..Switch::Manual.into()
        },
        ..by_hash(Switch::Manual)
    };
    let ends = moved(&vm, &config, Plan::default(), |stage| {
        wait_until("pages", || stage.session.status().page_bytes > 0);
        let now = Change {
            switch: Some(Switch::NOW),
            ..Change::default()
        };
        stage.session.set(&now).unwrap();
        // Without the limit, the pass could end before the switch-over.
        wait_for_handover(stage);
        let fast = Change {
            max_bandwidth: Some(None),
            ..Change::default()
        };
        stage.session.set(&fast).unwrap();
    });
    assert_all_present(&vm, &ends);
    let sent = ends.sent.unwrap();
    assert_eq!(sent.passes, [], "none has ended");
    assert!(sent.pages.background > 500, "{:?}", sent.pages);
}

#[test]
fn kvm_confirms_by_each_delivery_that_keeps_the_bytes() {
    const NAME: &str = "kvm_confirms_by_each_delivery_that_keeps_the_bytes";
    if !kvm_usable(NAME) {
        return;
    }
    for delivery in kvm_deliveries(NAME) {
        let to = DestinationConfig {
            delivery: Some(delivery),
            ..DestinationConfig::default()
        };
        let vm = written(Engine::Kvm, 16 * MIB);
        let sent = moves_whole(vm, &by_hash(Switch::AfterPasses(2)), to);
        if delivery == Delivery::Missing {
            assert_eq!(sent.pages.confirmed, 0);
            assert!(
                sent.notes[0].contains("the dirty log is used"),
                "{:?}",
                sent.notes
            );
        } else {
            assert_eq!(sent.missing_at_start, 16 * MIB / PAGE_BYTES as u64);
            assert_eq!(sent.notes, [] as [String; 0], "{delivery}");
        }
    }
}

/// A machine without a dirty log, at the source.
struct NoLog(Arc<dyn Machine>);

impl Machine for NoLog {
    fn kind(&self) -> MachineKind<'_> {
        self.0.kind()
    }

    fn ram(&self) -> &Arc<GuestRam> {
        self.0.ram()
    }

    fn blackout_cost(&self) -> BlackoutCost {
        self.0.blackout_cost()
    }

    fn has_dirty_log(&self) -> bool {
        false
    }

    fn set_dirty_log(&self, _: bool) -> Result<(), MachineError> {
        panic!("it has no dirty log")
    }

    fn harvest_dirty(&self, _: &PageBitmap, _: bool) -> Result<usize, MachineError> {
        panic!("it has no dirty log")
    }
}

/// Moves a VM without a log by the default configuration, with this delivery at the destination.
fn without_log(vm: &WorkloadVm, delivery: Option<Delivery>) -> SourceReport {
    let machine: Arc<dyn Machine> = Arc::new(NoLog(Arc::clone(&vm.machine)));
    let running = RunningVm {
        machine: &machine,
        ..vm.running()
    };
    let destination = listen(DestinationConfig {
        delivery,
        ..DestinationConfig::default()
    });
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| receive_on(Backing::Shmem, &destination));
        let config = SourceConfig::default();
        let sent = migrate_running(&running, &address_of(&destination), &config).unwrap();
        let (vm, received) = receiver.join().unwrap();
        received.unwrap();
        vm.wait_progress(vm.workload.memory_map().share_pages());
        vm.assert_verifies();
        sent
    })
}

#[test]
fn a_machine_without_a_log_is_never_asked_for_it() {
    let vm = written(Engine::Soft, 8 * MIB);
    let sent = without_log(&vm, None);
    assert!(!sent.passes.is_empty());
    assert_eq!(sent.missing_at_start, vm.ram().pages());
}

#[test]
fn a_machine_without_a_log_has_no_precopy_where_no_bytes_are_kept() {
    const NAME: &str = "a_machine_without_a_log_has_no_precopy_where_no_bytes_are_kept";
    if !kvm_usable(NAME) || !kvm_offers(NAME, Delivery::Missing) {
        return;
    }
    let vm = written(Engine::Kvm, 16 * MIB);
    let sent = without_log(&vm, Some(Delivery::Missing));
    assert_eq!((sent.passes.len(), sent.pages.precopy), (0, 0));
    assert_eq!(sent.pages.confirmed, 0);
    assert!(
        sent.notes[0].contains("all pages follow"),
        "{:?}",
        sent.notes
    );
}

/// Checks that the whole VM arrived, each page in one way.
fn assert_all_present(source: &WorkloadVm, ends: &Ends) {
    let sent = ends.sent.as_ref().unwrap();
    let (vm, received) = ends.received.as_ref().expect("a VM");
    let received = received.as_ref().unwrap();
    assert!(source.threads.is_paused(), "the source never resumes it");
    vm.wait_progress(vm.workload.memory_map().share_pages());
    vm.assert_verifies();
    eprintln!(
        "confirmed {} here and {} there, {} sent again, {} reconnects",
        sent.pages.confirmed, received.pages.confirmed, sent.pages_resent, sent.reconnects
    );
    // A confirmation that got lost counts at the source, and is made again.
    assert!(received.pages.confirmed <= sent.pages.confirmed);
}

/// Moves a VM that stood still in its first pass and writes from then on, so that there is
/// something to confirm and something to send. `act` runs behind the hand-over. Confirmations are
/// under way for as long as the link takes.
fn cut(engine: Engine, bytes: u64, act: impl FnOnce(&Stage)) -> SourceReport {
    let vm = written(engine, bytes);
    vm.threads.pause(LIMIT).unwrap();
    let config = SourceConfig {
        settings: Switch::Manual.into(),
        tracking: Tracking::Hash,
        ..source_config()
    };
    let plan = Plan {
        delay: Duration::from_millis(3),
        ..Plan::default()
    };
    let ends = moved(&vm, &config, plan, |stage| {
        wait_until("a pass", || stage.session.status().passes > 0);
        vm.threads.resume();
        let now = Change {
            switch: Some(Switch::NOW),
            ..Change::default()
        };
        stage.session.set(&now).unwrap();
        wait_for_handover(stage);
        act(stage);
    });
    assert_all_present(&vm, &ends);
    ends.sent.unwrap()
}

#[test]
fn confirmations_survive_the_loss_of_all_channels_at_any_moment() {
    for moment in [0, 1, 2, 4, 7, 11] {
        let sent = cut(Engine::Soft, 8 * MIB, |stage| {
            std::thread::sleep(Duration::from_millis(moment));
            stage.shaper.reset(Which::All);
        });
        assert!(sent.pages.confirmed > 500, "{:?}", sent.pages);
    }
}

#[test]
fn confirmations_survive_the_loss_of_single_channels() {
    let sent = cut(Engine::Soft, 32 * MIB, |stage| {
        // Connection 0 is the control channel.
        for number in 1..=4 {
            stage.shaper.reset(Which::Number(number));
            std::thread::sleep(Duration::from_millis(4));
        }
    });
    assert!(sent.pages.confirmed > 500, "{:?}", sent.pages);
}

#[test]
fn confirmations_of_a_kvm_vm_survive_cuts() {
    if !kvm_usable("confirmations_of_a_kvm_vm_survive_cuts") {
        return;
    }
    let sent = cut(Engine::Kvm, 64 * MIB, |stage| {
        for _ in 0..4 {
            stage.shaper.reset(Which::All);
            std::thread::sleep(Duration::from_millis(15));
        }
    });
    assert!(sent.pages.confirmed > 100, "{:?}", sent.pages);
}

/// A frame that confirms a page with these bytes.
fn confirmation(source: &ScriptedSource<'_>, page: u64, bytes: &[u8; PAGE_BYTES]) -> Vec<u8> {
    let mut list = RunList::new(source.template.pages());
    list.push(RamPage(page), RunKind::Confirmed).unwrap();
    let mut frame = Vec::new();
    let mut hasher = list.encode_head(&mut frame);
    hasher.update_unsent(bytes);
    hasher.seal(&mut frame);
    frame
}

/// The pass has sent other bytes of the missing pages than they have.
const WRONG_CONFIRMATIONS: &[Case] = &[
    Case {
        name: "a confirmation of other bytes",
        script: |p| {
            let page = p.request();
            p.send_bulk(&confirmation(p, page, &p.template.page(page)));
        },
        kind: "",
        says: "Pages: checksum",
        told: PROTOCOL,
    },
    Case {
        name: "a confirmation of other bytes in an answer",
        script: |p| {
            let page = p.request();
            let bytes = p.template.page(page);
            p.send_urgent(&urgent_reply_confirmed(RamPage(page), &bytes, None));
        },
        kind: "",
        says: "urgent page: checksum",
        told: PROTOCOL,
    },
    Case {
        name: "a confirmation of a page that is here",
        script: |p| {
            let page = p.another(p.request());
            p.push(page);
            p.expect_receipts();
            p.send_bulk(&confirmation(p, page, &p.template.page(page)));
        },
        kind: "",
        says: "not missing, or sent it twice",
        told: PROTOCOL,
    },
    Case {
        name: "a confirmation of a page that is here, in an answer",
        script: |p| {
            let page = p.request();
            let bytes = p.template.page(page);
            p.answer(page);
            p.send_urgent(&urgent_reply_confirmed(RamPage(page), &bytes, None));
        },
        kind: "",
        says: "not missing, or sent it twice",
        told: PROTOCOL,
    },
    Case {
        name: "a confirmation of a page that was never missing",
        script: |p| {
            let page = p.template.vm.workload.memory_map().code_page();
            p.send_bulk(&confirmation(p, page.0, &p.template.page(page.0)));
        },
        kind: "",
        says: "not missing",
        told: PROTOCOL,
    },
];

#[test]
fn a_wrong_confirmation_costs_a_generation_and_makes_no_page_present() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    recovers(&template, None, WRONG_CONFIRMATIONS);
}

#[test]
fn a_wrong_confirmation_costs_a_kvm_vm_a_generation_by_every_delivery() {
    if runs_in_child() {
        return;
    }
    const NAME: &str = "a_wrong_confirmation_costs_a_kvm_vm_a_generation_by_every_delivery";
    if !kvm_usable(NAME) {
        return;
    }
    let deliveries = kvm_deliveries(NAME);
    let _leaks = LeakCheck::start();
    let template = Template::new(Engine::Kvm, 1, 8 * MIB);
    for delivery in deliveries {
        let cases: Vec<Case> = WRONG_CONFIRMATIONS[..2]
            .iter()
            .map(|case| Case {
                says: match delivery {
                    Delivery::Missing => "a machine that keeps no bytes",
                    _ => case.says,
                },
                ..*case
            })
            .collect();
        recovers(&template, Some(delivery), &cases);
    }
}

#[test]
fn a_confirmation_before_its_time_discards_the_vm() {
    if runs_in_child() {
        return;
    }
    discards(&[Case {
        name: "a confirmation in pre-copy",
        script: |p| {
            p.set_up();
            p.send_pass();
            p.send_bulk(&confirmation(p, 9, &p.template.page(9)));
        },
        kind: "Protocol",
        says: "confirmed a page before the switch-over",
        told: PROTOCOL,
    }]);
}

/// A destination that refuses a confirmation gets no more of them, and all bytes.
#[test]
fn a_source_whose_confirmation_is_refused_sends_the_bytes() {
    let vm = written(Engine::Soft, 8 * MIB);
    vm.threads.pause(LIMIT).unwrap();
    let config = SourceConfig {
        limits: limits(LONG),
        ..by_hash(Switch::AfterPasses(1))
    };
    let tried = crate::failures_source::attempt(&vm, &config, |peer, _| {
        peer.start();
        assert_eq!(peer.missing_at_start, peer.memory_pages);
        let all = peer.missing.clone();
        while peer.confirmed == 0 {
            peer.take_frame();
        }
        let why = "the bytes of a page are others";
        peer.send(&Frame::Error(ErrorMessage::new(ErrorCode::Protocol, why)));
        (peer.missing, peer.confirmed) = (all, 0);
        peer.recover();
        peer.complete();
        assert_eq!(peer.confirmed, 0);
    });
    let sent = tried.outcome.unwrap();
    assert!(sent.pages.background > 1000, "{:?}", sent.pages);
    assert_eq!(sent.reconnects, 1);
}

/// The bytes of the missing pages were never sent: those of the destination are zero.
#[test]
fn a_confirmation_of_a_page_that_never_came_makes_no_page_present() {
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    let received = attempt(&template, None, limits(LONG), |p, _, destination| {
        p.set_up();
        let came: Vec<u64> = (0..template.pages())
            .filter(|page| !template.missing.contains(page))
            .collect();
        for pages in came.chunks(64) {
            for page in pages {
                p.send_frame(&p.frame_of(*page));
            }
            p.expect_receipts();
        }
        p.send_states();
        p.send(&template.switch_over());
        p.expect(FrameType::Ready);
        p.go();
        let page = p.request();
        p.send_bulk(&confirmation(p, page, &[7; PAGE_BYTES]));
        assert_eq!(told(p), PROTOCOL);
        wait_until("the loss", || destination.status().last_loss.is_some());
        p.recover();
        p.complete();
    });
    received.outcome.unwrap();
    assert_loss(
        "never came",
        received.status.last_loss.as_deref(),
        "Pages: checksum",
    );
    received.vm.assert_verifies();
}
