//! The exit codes of failures.

use crate::exit::{Exit, Failure};
use pageferry_snapshot::{ChunkError, OpenError, PackError, StateError, UnpackError};
use std::io::{Error, ErrorKind};

/// Damage breaks the format. Any other file that does not serve is one that the user named.
pub(crate) fn of_open(error: &OpenError) -> Failure {
    let exit = match error.is_damage() {
        true => Exit::Protocol,
        false => Exit::Usage,
    };
    Failure::new(exit, error.to_string())
}

pub(super) fn of_chunk(error: &ChunkError) -> Failure {
    let exit = match error.fault.is_damage() {
        true => Exit::Protocol,
        false => Exit::Internal,
    };
    Failure::new(exit, error.to_string())
}

pub(crate) fn of_pack(error: &PackError) -> Failure {
    let exit = match error {
        PackError::Chunk(error) => return of_chunk(error),
        PackError::Write { why, .. } => of_write(why),
        PackError::Read(_) | PackError::Thread(_) | PackError::Compress(_) => Exit::Internal,
        PackError::Cancelled => Exit::Cancelled,
        _ => Exit::Usage,
    };
    Failure::new(exit, error.to_string())
}

pub(super) fn of_unpack(error: &UnpackError) -> Failure {
    let exit = match error {
        UnpackError::Chunk(error) => return of_chunk(error),
        UnpackError::Write { why, .. } => of_write(why),
        UnpackError::State(StateError::Damaged { .. }) => Exit::Protocol,
        UnpackError::Cancelled => Exit::Cancelled,
        _ => Exit::Internal,
    };
    Failure::new(exit, error.to_string())
}

/// A path that cannot be written is the user's. A full disk is the host's.
fn of_write(why: &Error) -> Exit {
    match why.kind() {
        ErrorKind::AlreadyExists
        | ErrorKind::InvalidInput
        | ErrorKind::IsADirectory
        | ErrorKind::NotADirectory
        | ErrorKind::NotFound
        | ErrorKind::PermissionDenied
        | ErrorKind::ReadOnlyFilesystem => Exit::Usage,
        _ => Exit::Internal,
    }
}
