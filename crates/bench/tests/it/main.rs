//! `pageferry-bench`, used by programs and by people.

mod demand_paging;
mod dirty_log;
#[expect(dead_code, reason = "the tests of `pageferry` use all of it")]
#[path = "../../../cli/tests/it/json_document.rs"]
mod json_document;
mod json_output;
mod linux;
mod postcopy_latency;
mod results;
mod schemes;
mod support;
mod tunnel;
