//! `--backing`: bad input gets one sentence and its exit code, and a demo runs on each kind that
//! this host has.

use crate::support::{Dir, pageferry};
use pageferry_testkit::{AdvisedHugePages, HugePages};
use std::sync::{Mutex, PoisonError};

/// Tests that read or change the host's policy take turns.
static POLICY: Mutex<()> = Mutex::new(());

/// The exit code of a host that lacks a backing.
const LACKS: i32 = 4;

#[test]
fn an_unknown_backing_is_a_wrong_flag() {
    let ended = pageferry(&["demo", "--backing", "hugetlb"]);
    ended.assert_failed(
        2,
        "unknown backing 'hugetlb': expected shmem, shmem-thp, hugetlb-2m, hugetlb-1g or anonymous",
    );
}

#[test]
fn memory_that_is_no_multiple_of_the_backings_page_is_refused() {
    let words = "demo --engine soft --backing hugetlb-2m --memory 33M";
    let ended = pageferry(&words.split(' ').collect::<Vec<_>>());
    ended.assert_failed(
        2,
        "memory backed by hugetlb-2m must be a multiple of 2097152 bytes, not 34603008 bytes",
    );
}

#[test]
fn a_pool_that_is_too_small_is_named_with_the_file_to_set() {
    // Both sides of a demo need it: 2 TiB are more than any pool here has.
    let words = "demo --engine soft --vcpus 1 --backing hugetlb-2m --memory 1T";
    let ended = pageferry(&words.split(' ').collect::<Vec<_>>());
    ended.assert_failed(LACKS, "hugepages-2048kB");
    let dir = Dir::new();
    let control = dir.path("control");
    let ended = pageferry(&[
        "run",
        "--control",
        control.to_str().expect("UTF-8"),
        "--engine",
        "soft",
        "--backing",
        "hugetlb-1g",
        "--memory",
        "1T",
    ]);
    ended.assert_failed(LACKS, "hugepages-1048576kB");
    assert!(!control.exists());
}

#[test]
fn a_policy_without_huge_pages_of_shared_memory_is_named() {
    let _turn = POLICY.lock().unwrap_or_else(PoisonError::into_inner);
    let policy = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    if !policy.is_ok_and(|policy| policy.contains("[never]") || policy.contains("[deny]")) {
        pageferry_testkit::skip("thp-never", "this host has huge pages of shared memory");
        return;
    }
    let words = "receive --listen 127.0.0.1:0 --backing shmem-thp";
    let ended = pageferry(&words.split(' ').collect::<Vec<_>>());
    ended.assert_failed(LACKS, "write advise to");
}

#[test]
fn a_delivery_that_huge_pages_cannot_have_is_refused() {
    if let Err(why) = pageferry_machine::kvm::probe_vm() {
        pageferry_testkit::skip("kvm", why);
        return;
    }
    let Some(_pool) = HugePages::at_least(32) else {
        return;
    };
    for delivery in ["poison", "missing"] {
        let ended = pageferry(&[
            "demo",
            "--engine",
            "kvm",
            "--vcpus",
            "1",
            "--memory",
            "32M",
            "--backing",
            "hugetlb-2m",
            "--delivery",
            delivery,
        ]);
        ended.assert_failed(LACKS, "with backing hugetlb-2m here: use minor");
    }
}

#[test]
fn a_delivery_that_private_memory_cannot_have_is_refused() {
    if let Err(why) = pageferry_machine::kvm::probe_vm() {
        pageferry_testkit::skip("kvm", why);
        return;
    }
    let demo = "demo --engine kvm --vcpus 1 --memory 32M --backing anonymous --delivery";
    for delivery in ["minor", "poison", "userfault"] {
        let words: Vec<_> = demo.split(' ').chain([delivery]).collect();
        let ended = pageferry(&words);
        ended.assert_failed(LACKS, "with backing anonymous here: use missing");
    }
}

#[test]
fn a_demo_on_each_backing_says_so() {
    let _turn = POLICY.lock().unwrap_or_else(PoisonError::into_inner);
    let _host = (HugePages::at_least(32), AdvisedHugePages::new());
    for backing in ["shmem-thp", "hugetlb-2m", "anonymous"] {
        let kind: pageferry_machine::Backing = backing.parse().expect("a backing");
        if let Err(why) = kind.check(64 << 20) {
            pageferry_testkit::skip(backing, why);
            continue;
        }
        let ended = pageferry(&[
            "demo",
            "--engine",
            "soft",
            "--vcpus",
            "1",
            "--memory",
            "32M",
            "--backing",
            backing,
            "--json",
        ]);
        ended.assert_ok();
        let json = ended.json();
        for side in ["source", "destination"] {
            assert_eq!(json["backing"][side], backing);
            assert_eq!(
                json["overhead_bytes"][side].is_null(),
                backing == "anonymous"
            );
        }
        assert_eq!(json["verified"]["host"], true);
    }
}
