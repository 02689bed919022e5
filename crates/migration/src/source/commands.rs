//! An operator's hold on a migration at its source.

use super::config::Route;
use super::shared::Letter;
use crate::error::MigrationError;
use crate::session::source::Event;
use crate::settings::{Change, Settings, SettingsError};
use crate::status::{Board, SessionStatus};
use pageferry_transport::Mailbox;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A command of an operator to a migration.
#[derive(Debug)]
pub(super) enum Command {
    /// End it, if the VM has not been handed over.
    Cancel,
    /// Reach the destination by this way from now on.
    Recover(Route),
    /// Stop trying to reach the destination.
    GiveUp,
    /// The destination is gone: run the VM here.
    ResumeHere,
    /// Look at the settings again.
    Settings,
}

/// A migration at its source, as other threads see it: its status, and the commands of an operator.
/// The VM's host process owns it. It serves one migration at a time, and its last status stays.
/// A command that comes before a migration counts for it: so a cancel may be early. One that comes
/// too late for a migration has no effect on the next.
///
/// ```
/// use pageferry_migration::SourceSession;
/// let session = SourceSession::new()?;
/// // Another thread runs `migrate(.., &session, ..)` meanwhile.
/// session.cancel();
/// assert_eq!(session.status().stage, "none");
/// # Ok::<(), pageferry_migration::MigrationError>(())
/// ```
pub struct SourceSession {
    pub(super) letters: Mailbox<Letter>,
    pub(super) board: Board,
    /// `None` without a migration.
    settings: Mutex<Option<Settings>>,
    /// Whether the owner may pause and resume the VM. It is held while the owner does. So the
    /// switch-over waits for an owner who has begun, and no owner begins behind it.
    open_to_owner: Mutex<bool>,
}

impl SourceSession {
    /// Returns a session before its migration.
    ///
    /// # Errors
    /// When no descriptors are left.
    pub fn new() -> Result<Self, MigrationError> {
        Ok(Self {
            letters: Mailbox::new().map_err(MigrationError::eventfd)?,
            board: Board::default(),
            settings: Mutex::default(),
            open_to_owner: Mutex::new(true),
        })
    }

    /// Drops what came too late for a migration that has ended.
    pub(super) fn forget(&self) {
        *self.lock() = None;
        while self.letters.take().is_some() {}
    }

    fn lock(&self) -> MutexGuard<'_, Option<Settings>> {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins with these settings, unless there are some. [`migrate`](crate::migrate) does so with
    /// those of its configuration. A caller that does it earlier can use [`Self::set`] earlier.
    pub fn prepare(&self, settings: Settings) {
        self.lock().get_or_insert(settings);
    }

    /// Changes the settings of the migration. Returns the new ones.
    ///
    /// # Errors
    /// [`SettingsError`], if there is no migration, it is too late, or the settings cannot be.
    /// Nothing has changed then.
    pub fn set(&self, change: &Change) -> Result<Settings, SettingsError> {
        let mut kept = self.lock();
        let settings = kept.as_mut().ok_or(SettingsError::NoMigration)?;
        let early = matches!(self.status().stage, "none" | "setup" | "pre-copy");
        if !early && (change.switch.is_some() || change.max_blackout.is_some()) {
            return Err(SettingsError::TooLate);
        }
        *settings = settings.with(change)?;
        self.command(Command::Settings);
        Ok(*settings)
    }

    /// The settings of the migration. `None` without one.
    #[must_use]
    pub fn settings(&self) -> Option<Settings> {
        *self.lock()
    }

    /// Calls `act`, which pauses or resumes the VM, unless the switch-over has begun. The VM
    /// arrives as `act` leaves it. Returns `None`, and calls nothing, from the switch-over on: the
    /// VM may run at the destination then, and must not run here. If the source takes the VM back,
    /// this works again. `act` should be short: the switch-over waits for it.
    pub fn before_switch_over<T>(&self, act: impl FnOnce() -> T) -> Option<T> {
        let open = self.owner();
        open.then(act)
    }

    fn owner(&self) -> MutexGuard<'_, bool> {
        self.open_to_owner
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn close_to_owner(&self) {
        *self.owner() = false;
    }

    pub(super) fn open_to_owner(&self) {
        *self.owner() = true;
    }

    fn command(&self, command: Command) {
        // A later one of the same kind says all that an earlier one does.
        let kind = std::mem::discriminant(&command);
        let same = |letter: &Letter| matches!(letter, Letter::Command(other) if std::mem::discriminant(other) == kind);
        self.letters.post_instead_of(Letter::Command(command), same);
    }

    /// Cancels the migration: the VM runs on at the source. Has no effect once the VM is handed
    /// over.
    pub fn cancel(&self) {
        self.command(Command::Cancel);
    }

    /// Reaches the destination by `route` from now on. A session that is handed over and has a
    /// working connection leaves it for the new way. Has no effect before.
    pub fn recover(&self, route: Route) {
        self.command(Command::Recover(route));
    }

    /// Ends a migration that is handed over. The VM stays paused at the source. If the destination
    /// runs it and pages are missing there, that copy cannot go on.
    pub fn give_up(&self) {
        self.command(Command::GiveUp);
    }

    /// Ends a migration that is handed over, and resumes the VM at the source, unless it was paused
    /// at the switch-over: then it stays paused, and its owner may resume it. Only an operator who
    /// knows that the destination never runs again may do so: else the VM runs twice. The VM's work
    /// at the destination is lost.
    pub fn resume_here(&self) {
        self.command(Command::ResumeHere);
    }

    /// The status of the migration, or of the last one.
    #[must_use]
    pub fn status(&self) -> SessionStatus {
        self.board.read()
    }
}

impl std::fmt::Debug for SourceSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SourceSession")
            .field("status", &self.status())
            .finish_non_exhaustive()
    }
}

impl Command {
    /// Returns the session's event of this command, if it is one.
    pub(super) fn event(&self) -> Option<Event> {
        match self {
            Self::Cancel => Some(Event::Cancel),
            Self::Recover(_) | Self::Settings => None,
            Self::GiveUp => Some(Event::GiveUp),
            Self::ResumeHere => Some(Event::ResumeHere),
        }
    }
}
