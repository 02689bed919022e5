//! The x86-64 code on `/dev/kvm`: it computes the same as the model, and reports errors.

use crate::kvm::{Vm, usable};

#[test]
fn some_passes_of_two_vcpus_equal_the_model_byte_for_byte() {
    if usable() {
        crate::suite::some_passes_of_two_vcpus_equal_the_model_byte_for_byte::<Vm>();
    }
}

#[test]
fn the_guest_reports_every_kind_of_bad_page_and_goes_on() {
    if usable() {
        crate::suite::the_guest_reports_every_kind_of_bad_page_and_goes_on::<Vm>();
    }
}

#[test]
fn the_guest_reports_a_lost_and_a_stale_control_page() {
    if usable() {
        crate::suite::the_guest_reports_a_lost_and_a_stale_control_page::<Vm>();
    }
}

#[test]
fn a_workload_asks_for_a_rest_after_each_page_and_goes_on() {
    if usable() {
        crate::suite::a_workload_asks_for_a_rest_after_each_page_and_goes_on::<Vm>();
    }
}

#[test]
fn the_toucher_touches_every_page_on_both_sides_of_the_hole() {
    if usable() {
        crate::suite::the_toucher_touches_every_page_on_both_sides_of_the_hole::<Vm>();
    }
}

#[test]
fn the_spinner_counts_between_kicks() {
    if usable() {
        crate::suite::the_spinner_counts_between_kicks::<Vm>();
    }
}

#[test]
#[ignore = "measures: run with --release and --nocapture"]
fn speed() {
    if usable() {
        crate::suite::speed::<Vm>();
    }
}
