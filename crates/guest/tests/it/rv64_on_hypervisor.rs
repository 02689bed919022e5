//! The RV64 code on Pageferry's own hypervisor: it computes the same as the model, and reports
//! errors.

use crate::soft::Vm;

#[test]
fn some_passes_of_two_vcpus_equal_the_model_byte_for_byte() {
    crate::suite::some_passes_of_two_vcpus_equal_the_model_byte_for_byte::<Vm>();
}

#[test]
fn the_guest_reports_every_kind_of_bad_page_and_goes_on() {
    crate::suite::the_guest_reports_every_kind_of_bad_page_and_goes_on::<Vm>();
}

#[test]
fn the_guest_reports_a_lost_and_a_stale_control_page() {
    crate::suite::the_guest_reports_a_lost_and_a_stale_control_page::<Vm>();
}

#[test]
fn a_workload_asks_for_a_rest_after_each_page_and_goes_on() {
    crate::suite::a_workload_asks_for_a_rest_after_each_page_and_goes_on::<Vm>();
}

#[test]
fn the_toucher_touches_every_page_on_both_sides_of_the_hole() {
    crate::suite::the_toucher_touches_every_page_on_both_sides_of_the_hole::<Vm>();
}

#[test]
fn the_spinner_counts_between_kicks() {
    crate::suite::the_spinner_counts_between_kicks::<Vm>();
}

#[test]
#[ignore = "measures: run with --release and --nocapture"]
fn speed() {
    crate::suite::speed::<Vm>();
}
