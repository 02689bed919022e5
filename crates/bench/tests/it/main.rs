//! `pageferry-bench`, used by programs and by people.

mod demand_paging;
mod dirty_log;
#[path = "../../../cli/tests/it/json_document.rs"]
mod json_document;
mod json_output;
mod linux;
mod postcopy_latency;
mod results;
mod schemes;
mod support;
mod tunnel;
