//! Two hosts for a test: those of [`pageferry_hosts`], or a skip.

pub use pageferry_hosts::{Error, Host, Link, Queue, Rate, TwoHosts};

/// As [`TwoHosts::start`]. Returns `None` if this machine cannot, after it has reported the test as
/// skipped.
///
/// # Panics
/// If `PAGEFERRY_REQUIRE` names `netns` and this machine cannot. If a call fails that should not.
#[must_use]
#[track_caller]
pub fn or_skip(link: &Link) -> Option<TwoHosts> {
    match TwoHosts::start(link) {
        Ok(hosts) => Some(hosts),
        Err(Error::Unusable(why)) => {
            crate::skip("netns", why);
            None
        }
        Err(Error::Failed(why)) => panic!("{why}"),
    }
}
