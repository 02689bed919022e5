//! `pageferry set`: changes the settings of a migration that is under way.

use crate::args::{ChangeArgs, SetArgs, switch};
use crate::control::change::ChangeOptions;
use crate::control::client::ask;
use crate::control::protocol::Request;
use crate::exit::Failure;
use crate::output;
use crate::signals::Interrupts;
use crate::status::settings;
use std::time::Duration;

/// The longest wait for an answer.
const LIMIT: Duration = Duration::from_secs(15);

/// Changes the settings, and says what counts now.
///
/// # Errors
/// When there is no migration, it is too late, or the settings cannot be.
pub(crate) fn set(args: &SetArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let request = Request::Set(change(&args.change));
    let answer = ask(&args.vm.path()?, &request, LIMIT, interrupts)?;
    output::result(&format!("{}\n", settings(&answer)));
    Ok(())
}

/// The change that the flags ask for.
pub(crate) fn change(args: &ChangeArgs) -> ChangeOptions {
    let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    ChangeOptions {
        switch: switch(&args.switch),
        max_blackout_ms: args.max_blackout.map(|limit| limit.0.map(ms)),
        max_bandwidth: args.max_bandwidth.map(|limit| limit.0),
        max_postcopy_bandwidth: args.max_postcopy_bandwidth.map(|limit| limit.0),
    }
}
