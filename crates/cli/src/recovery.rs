//! `pageferry recover`, `abandon`, `cancel`: an operator's commands to a migration.

use crate::args::{AbandonArgs, CancelArgs, RecoverArgs};
use crate::control::client::ask;
use crate::control::protocol::Request;
use crate::exit::Failure;
use crate::output;
use crate::signals::Interrupts;
use std::time::Duration;

/// The longest wait for an answer.
const LIMIT: Duration = Duration::from_secs(15);

/// Gives a migration another way to the other side.
///
/// # Errors
/// When there is no migration that could use it.
pub(crate) fn recover(args: &RecoverArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let request = Request::Recover {
        to: args.to.as_ref().map(ToString::to_string),
        listen: args.listen.as_ref().map(ToString::to_string),
    };
    let answer = ask(&args.vm.path()?, &request, LIMIT, interrupts)?;
    output::result(&match answer["listening"].as_str() {
        Some(address) => format!("listening on {address} too\n"),
        None => "going on by the new way\n".to_owned(),
    });
    Ok(())
}

/// Ends a migration whose other side is gone.
///
/// # Errors
/// When there is no such migration.
pub(crate) fn abandon(args: &AbandonArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let request = Request::Abandon {
        resume_here: args.resume_here,
    };
    let answer = ask(&args.vm.path()?, &request, LIMIT, interrupts)?;
    let lost = answer["lost"].as_str().unwrap_or("nothing is known of it");
    output::result(&format!("abandoned: {lost}\n"));
    Ok(())
}

/// Cancels a migration before its switch-over.
///
/// # Errors
/// When there is none, or it is too late.
pub(crate) fn cancel(args: &CancelArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let request = Request::Cancel {
        route: args.route.clone(),
        session: args.session.clone(),
        force: args.force,
    };
    ask(&args.vm.path()?, &request, LIMIT, interrupts)?;
    output::result("cancelling\n");
    Ok(())
}
