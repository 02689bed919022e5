//! `pageferry snapshot unpack`, `verify` and `info`.

use super::args::{ReadArgs, UnpackArgs};
use super::failure::{of_chunk, of_unpack};
use super::{cancelled, open, show};
use crate::exit::{Exit, Failure};
use crate::output;
use crate::progress::with_progress;
use crate::signals::Interrupts;
use pageferry_harness::size::human;
use pageferry_snapshot::{Snapshot, What, write_state};
use serde_json::json;

/// Writes the files that were packed.
///
/// # Errors
/// Its failure: [`Exit::Refused`] for a snapshot that is not what was expected.
pub(super) fn unpack(args: &UnpackArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let snapshot = open(&args.snapshot, &args.bases.paths())?;
    check_expected(args, &snapshot)?;
    let mut states = Vec::new();
    if let Some(directory) = &args.states {
        for (index, state) in snapshot.states().iter().enumerate() {
            interrupts.check()?;
            let path = directory.join(&state.name);
            write_state(&snapshot, index, &path).map_err(|error| of_unpack(&error))?;
            states.push(&*state.name);
        }
    }
    let written = args.memory.as_ref().map(|memory| {
        let what = match args.diff {
            true => What::Diff,
            false => What::Whole,
        };
        let (written, took) = with_progress("unpack", &|| interrupts.any(), |progress| {
            pageferry_snapshot::unpack(&snapshot, memory, what, progress)
        });
        written
            .map(|bytes| (bytes, took))
            .map_err(|error| of_unpack(&error))
    });
    let written = written.transpose()?;
    if args.json {
        output::json(&json!({
            "id": snapshot.id().to_string(),
            "memory_bytes": snapshot.len(),
            "written_bytes": written.map(|(bytes, _)| bytes),
            "ms": written.map(|(_, took)| show::ms(took)),
            "states": states,
        }));
        return Ok(());
    }
    let mut table = show::Table::default();
    if let Some((bytes, took)) = written {
        let (bytes, all) = (human(bytes), human(snapshot.len()));
        table.row(
            "memory",
            format!("{all}, {bytes} of them written, others are holes"),
        );
        table.row("took", show::took(took, snapshot.len()));
    }
    if args.states.is_some() {
        table.row("states", list(&states));
    }
    output::result(table.text());
    Ok(())
}

fn check_expected(args: &UnpackArgs, snapshot: &Snapshot) -> Result<(), Failure> {
    let labels = snapshot.labels();
    for (what, expected, found) in [
        ("VMM", &args.expect_vmm, &labels.vmm),
        ("version of the VMM", &args.expect_version, &labels.version),
        ("CPU", &args.expect_cpu, &labels.cpu),
    ] {
        if let Some(expected) = expected
            && expected != found
        {
            let path = snapshot.path().display();
            let message = format!("the {what} of {path} is '{found}': expected '{expected}'");
            return Err(Failure::new(Exit::Refused, message));
        }
    }
    Ok(())
}

fn list(names: &[&str]) -> String {
    match names {
        [] => "none".into(),
        names => names.join(", "),
    }
}

/// Reads and checks everything.
///
/// # Errors
/// [`Exit::Protocol`] if something is damaged.
pub(super) fn verify(args: &ReadArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let snapshot = open(&args.snapshot, &args.bases.paths())?;
    let (verified, took) = with_progress("verify", &|| interrupts.any(), |progress| {
        pageferry_snapshot::verify(&snapshot, progress)
    });
    let verified = verified.ok_or_else(cancelled)?;
    if args.json {
        output::json(&json!({
            "id": snapshot.id().to_string(),
            "chunks": verified.chunks,
            "damaged": verified.damaged,
            "damages": verified.named,
            "ms": show::ms(took),
        }));
    }
    if let Some(first) = verified.named.first() {
        for other in &verified.named[1..] {
            output::note(other);
        }
        let (path, count) = (args.snapshot.display(), verified.damaged);
        let message = format!("{path} is damaged in {count} places, the first: {first}");
        return Err(Failure::new(Exit::Protocol, message));
    }
    if !args.json {
        let mut table = show::Table::default();
        table.row("id", snapshot.id());
        table.row("verified", format!("{} chunks: no damage", verified.chunks));
        table.row("took", show::took(took, snapshot.len()));
        output::result(table.text());
    }
    Ok(())
}

/// Shows what a snapshot is.
///
/// # Errors
/// When it cannot be opened, or its index is damaged.
pub(super) fn info(args: &ReadArgs) -> Result<(), Failure> {
    let snapshot = open(&args.snapshot, &args.bases.paths())?;
    let figures = snapshot.figures().map_err(|error| of_chunk(&error))?;
    let labels = snapshot.labels();
    let bases = snapshot.bases().iter().zip(1_u16..).map(|(base, index)| {
        let path = snapshot.file(index).map(|path| path.display().to_string());
        (base.id, path.unwrap_or_default())
    });
    if args.json {
        let text = |label: &str| (!label.is_empty()).then(|| label.to_owned());
        let mut result = show::contents_json(&snapshot, &figures);
        let bases = bases.map(|(id, file)| json!({"id": id.to_string(), "file": file}));
        result["bases"] = bases.collect();
        let states = snapshot.states().iter();
        let states = states.map(|state| json!({"name": state.name, "bytes": state.bytes}));
        result["states"] = states.collect();
        result["vmm"] = json!(text(&labels.vmm));
        result["vmm_version"] = json!(text(&labels.version));
        result["cpu"] = json!(text(&labels.cpu));
        output::json(&result);
        return Ok(());
    }
    let mut table = show::contents(&snapshot, &figures);
    for (id, file) in bases {
        table.row("base", format!("{id} {file}"));
    }
    for state in snapshot.states() {
        table.row("state", format!("{}, {}", state.name, human(state.bytes)));
    }
    for (name, label) in [
        ("vmm", &labels.vmm),
        ("vmm version", &labels.version),
        ("cpu", &labels.cpu),
    ] {
        if !label.is_empty() {
            table.row(name, label);
        }
    }
    output::result(table.text());
    Ok(())
}
