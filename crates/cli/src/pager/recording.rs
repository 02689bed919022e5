//! `pageferry pager recording`: recordings of working sets as files.

use super::args::{RecordingArgs, RecordingCommand};
use crate::exit::{Exit, Failure};
use crate::output;
use pageferry_harness::size::human;
use pageferry_pager::{Recording, RecordingError};
use serde_json::json;
use std::path::Path;

/// The bytes of a page of a recording.
const PAGE: u64 = 4096;

/// Runs a command on recordings.
///
/// # Errors
/// [`Exit::Usage`] if a file cannot be read or written, [`Exit::Protocol`] if it is no recording.
pub(super) fn recording(args: &RecordingArgs) -> Result<(), Failure> {
    match &args.command {
        RecordingCommand::Info { file, json } => info(file, *json),
        RecordingCommand::Merge { output, files } => {
            let mut merged = Recording::default();
            for file in files {
                merged = merged.merged(&load(file)?).ok_or_else(|| {
                    let file = file.display();
                    let why = format!("{file} is of another snapshot: merge recordings of one");
                    Failure::new(Exit::Usage, why)
                })?;
            }
            merged.save(output).map_err(|why| of(&why))?;
            output::result(&format!(
                "{} pages, {}\n",
                merged.len(),
                human(merged.len() as u64 * PAGE)
            ));
            Ok(())
        }
    }
}

fn info(file: &Path, json: bool) -> Result<(), Failure> {
    let recording = load(file)?;
    let pages = recording.len() as u64;
    let end = recording.offsets().max().map_or(0, |last| last + PAGE);
    // Pages that lie together need one read.
    let mut places: Vec<u64> = recording.offsets().collect();
    places.sort_unstable();
    let runs = places.chunk_by(|a, b| a + PAGE == *b).count();
    let snapshot = recording.snapshot();
    if json {
        output::json(&json!({
            "pages": pages, "bytes": pages * PAGE, "runs": runs, "end": end, "snapshot": snapshot,
        }));
        return Ok(());
    }
    let snapshot = snapshot.map_or_else(
        || "not known: record it again".to_owned(),
        |of| format!("{}, sum {:016x}", human(of.bytes), of.sum),
    );
    output::result(&format!(
        "  pages       {pages}, {}\n  runs        {runs}\n  ends at     {}\n  snapshot    \
         {snapshot}\n",
        human(pages * PAGE),
        human(end)
    ));
    Ok(())
}

fn load(file: &Path) -> Result<Recording, Failure> {
    Recording::load(file).map_err(|why| of(&why))
}

fn of(why: &RecordingError) -> Failure {
    let exit = match why {
        RecordingError::Invalid { .. } => Exit::Protocol,
        _ => Exit::Usage,
    };
    Failure::new(exit, why.to_string())
}
