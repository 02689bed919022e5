//! `pageferry snapshot pack` and `diff`.

use super::args::{DiffArgs, HowArgs, PackArgs};
use super::failure::of_pack;
use super::{open, show};
use crate::exit::{Exit, Failure};
use crate::output;
use crate::progress::with_progress;
use crate::signals::Interrupts;
use pageferry_snapshot::{Input, Labels, Options, Snapshot, StateFile, open_input};
use serde_json::json;
use std::fs::File;
use std::path::Path;

/// Packs a memory file.
///
/// # Errors
/// Its failure. Then there is no output.
pub(super) fn pack(args: &PackArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let directories = args.how.bases.paths();
    let base = args.base.as_ref().map(|base| open(base, &directories));
    let base = base.transpose()?;
    let file = input(&args.memory)?;
    let options = Options {
        holes_as_base: true,
        zeros_are_data: args.zeros_are_data,
        ..options(&args.how, base.as_ref())?
    };
    write(
        Input::File(&file),
        &args.output,
        options,
        &args.how,
        interrupts,
    )
}

/// Packs a diff of whole memories.
///
/// # Errors
/// Its failure. Then there is no output.
pub(super) fn diff(args: &DiffArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let directories = args.how.bases.paths();
    let base = open(&args.base, &directories)?;
    let options = options(&args.how, Some(&base))?;
    let output = &args.output;
    if args.packed {
        let memory = open(&args.memory, &directories)?;
        return write(
            Input::Packed(&memory),
            output,
            options,
            &args.how,
            interrupts,
        );
    }
    let file = input(&args.memory)?;
    write(Input::File(&file), output, options, &args.how, interrupts)
}

fn input(path: &Path) -> Result<File, Failure> {
    open_input(path).map_err(|why| {
        let path = path.display();
        Failure::new(Exit::Usage, format!("cannot read {path}: {why}"))
    })
}

fn options<'a>(args: &HowArgs, base: Option<&'a Snapshot>) -> Result<Options<'a>, Failure> {
    let states = args.states.iter().map(|(name, file)| {
        Ok(StateFile {
            name: name.clone(),
            file: input(file)?,
        })
    });
    let label = |label: &Option<String>| label.clone().unwrap_or_default();
    Ok(Options {
        chunk_bytes: args.chunk,
        compression: args.compression,
        base,
        holes_as_base: false,
        zeros_are_data: false,
        labels: Labels {
            vmm: label(&args.vmm),
            version: label(&args.vmm_version),
            cpu: label(&args.cpu),
        },
        states: states.collect::<Result<_, Failure>>()?,
    })
}

fn write(
    input: Input<'_>,
    output: &Path,
    options: Options<'_>,
    args: &HowArgs,
    interrupts: &Interrupts,
) -> Result<(), Failure> {
    let is_diff = options.base.is_some();
    let base = options.base.and_then(|base| base.path().parent());
    let base = base.map(Path::to_owned);
    let (packed, took) = with_progress("pack", &|| interrupts.any(), |progress| {
        pageferry_snapshot::pack(input, output, options, progress)
    });
    let figures = packed.map_err(|error| of_pack(&error))?;
    let mut directories = args.bases.paths();
    directories.extend(base.as_deref());
    // This also shows that it can be opened.
    let snapshot = open(output, &directories)?;
    if args.json {
        let mut result = show::contents_json(&snapshot, &figures);
        result["zeroed_pages"] = json!(figures.zeroed_pages);
        result["ms"] = json!(show::ms(took));
        output::json(&result);
    } else {
        let mut table = show::contents(&snapshot, &figures);
        if is_diff {
            let zeroed = format!("{} pages of zeros replace others", figures.zeroed_pages);
            table.row("zeroed", zeroed);
        }
        table.row("took", show::took(took, snapshot.len()));
        output::result(table.text());
    }
    Ok(())
}
