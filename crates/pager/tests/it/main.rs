//! The pager, tested from outside.

mod model;
