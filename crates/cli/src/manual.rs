//! `pageferry completions` and `pageferry man`, from the same definitions as `--help`.

use crate::args::{Cli, CompletionArgs, ManArgs};
use crate::exit::{Exit, Failure};
use crate::output;
use clap::CommandFactory;

/// Prints a completion script.
pub(crate) fn completions(args: &CompletionArgs) {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "pageferry", &mut script);
    output::result(&String::from_utf8_lossy(&script));
}

/// Prints a manual page, or writes all of them.
///
/// # Errors
/// [`Exit::Usage`] for an unknown command, or a directory that cannot be written.
pub(crate) fn man(args: &ManArgs) -> Result<(), Failure> {
    if let Some(directory) = &args.all {
        return clap_mangen::generate_to(Cli::command(), directory).map_err(|why| {
            let directory = directory.display();
            Failure::new(
                Exit::Usage,
                format!("cannot write manual pages into {directory}: {why}"),
            )
        });
    }
    output::result(&page(&args.command)?);
    Ok(())
}

fn page(words: &[String]) -> Result<String, Failure> {
    let mut all = Cli::command();
    all.build();
    let mut command = &all;
    for word in words {
        command = command.find_subcommand(word).ok_or_else(|| {
            Failure::new(
                Exit::Usage,
                format!(
                    "no command '{}': `pageferry help` lists the commands",
                    words.join(" ")
                ),
            )
        })?;
    }
    let mut roff = Vec::new();
    clap_mangen::Man::new(command.clone())
        .render(&mut roff)
        .map_err(|why| Failure::os("cannot write a manual page", why))?;
    Ok(String::from_utf8_lossy(&roff).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Command;

    /// Calls `visit` with the words of every command that is not hidden.
    fn each(command: &Command, words: &[String], visit: &mut dyn FnMut(&[String], &Command)) {
        visit(words, command);
        for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
            let words: Vec<String> = words
                .iter()
                .cloned()
                .chain([sub.get_name().to_owned()])
                .collect();
            each(sub, &words, visit);
        }
    }

    #[test]
    fn every_command_has_a_page_with_its_flags() {
        let mut pages = 0;
        each(&Cli::command(), &[], &mut |words, command| {
            let page = page(words).unwrap_or_else(|why| panic!("{words:?}: {why}"));
            assert!(page.contains(".TH "), "{words:?}");
            for flag in command.get_arguments().filter(|flag| !flag.is_hide_set()) {
                if let Some(long) = flag.get_long() {
                    let shown = long.replace('-', "\\-");
                    assert!(page.contains(&shown), "--{long} of {words:?}:\n{page}");
                }
            }
            pages += 1;
        });
        assert!(pages >= 14, "{pages}");
        let failure = page(&["fly".to_owned()]).expect_err("no such command");
        assert_eq!(failure.exit, Exit::Usage);
    }

    #[test]
    fn the_set_has_a_page_of_every_command() {
        let scratch = pageferry_hostfs::Folder::within(&std::env::temp_dir()).expect("a directory");
        let all = |dir: &std::path::Path| {
            man(&ManArgs {
                command: Vec::new(),
                all: Some(dir.to_owned()),
            })
        };
        all(scratch.path()).expect("pages");
        each(
            &Cli::command(),
            &["pageferry".to_owned()],
            &mut |words, _| {
                let page = scratch.path().join(format!("{}.1", words.join("-")));
                assert!(page.is_file(), "{}", page.display());
            },
        );
        let failure = all(&scratch.path().join("nowhere")).expect_err("no directory");
        assert_eq!(failure.exit, Exit::Usage);
    }

    #[test]
    fn completions_offer_the_values_of_closed_lists() {
        use clap::ValueEnum;
        for shell in clap_complete::Shell::value_variants() {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "pageferry", &mut script);
            let script = String::from_utf8(script).expect("text");
            // Elvish and PowerShell complete no values of flags.
            let values = matches!(shell.to_string().as_str(), "bash" | "zsh" | "fish");
            for value in ["hugetlb-1g", "userfault", "after-passes", "kvm"] {
                assert!(!values || script.contains(value), "{shell}: {value}");
            }
        }
    }

    #[test]
    fn every_shell_completes_every_command() {
        use clap::ValueEnum;
        for shell in clap_complete::Shell::value_variants() {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "pageferry", &mut script);
            let script = String::from_utf8(script).expect("text");
            for command in Cli::command()
                .get_subcommands()
                .filter(|sub| !sub.is_hide_set())
            {
                assert!(
                    script.contains(command.get_name()),
                    "{shell}: {}",
                    command.get_name()
                );
            }
        }
    }
}
