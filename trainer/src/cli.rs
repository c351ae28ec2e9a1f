//! The command line, and what its failures look like.

use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::recipe::{Recipe, RecipeError, Task, nearest};

/// Trains DeepSeek-V4 models: a recipe in, a run folder with checkpoints and metrics out.
///
/// `trainer RECIPE.toml` is short for `trainer train RECIPE.toml`.
#[derive(Debug, PartialEq, Parser)]
#[command(name = "trainer", version, arg_required_else_help = true)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
#[command(after_help = "Exit status: 0 done, 1 the run failed, 2 bad input, 130 stopped by Ctrl-C.")]
pub struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    train: RecipeArgs,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Subcommand)]
pub enum Command {
    /// Reinforcement learning: sample, score, update, repeat (the default)
    Train(RecipeArgs),
    /// Supervised fine-tuning on the reference answers
    Sft(RecipeArgs),
    /// Measure the model on the held-out prompts
    Eval(RecipeArgs),
    /// Compare the engine's forward pass with the trainer's on the recipe's model, op by op
    Parity(RecipeArgs),
    /// Draw the reward curves of one or several runs as an SVG
    Report(ReportArgs),
}

/// A recipe and what to do with it.
#[derive(Clone, Debug, PartialEq, Args)]
pub struct RecipeArgs {
    /// Recipe files; later ones are laid over earlier ones
    #[arg(value_name = "RECIPE.toml", required = true)]
    pub recipes: Vec<PathBuf>,
    /// Set one key over the recipes, as in `--set optimizer.learning_rate=1e-4`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// Check everything that the run needs and say how large it is, without starting it
    #[arg(long)]
    pub dry_run: bool,
    /// Print the resolved recipe as TOML and stop
    #[arg(long)]
    pub print_config: bool,
}

impl RecipeArgs {
    /// The resolved recipe.
    ///
    /// # Errors
    /// What is wrong with it, in one sentence.
    pub fn load(&self, task: Task) -> Result<Recipe, RecipeError> {
        Recipe::load(&self.recipes, &self.sets, task).map_err(|error| match error {
            // `trainer evla x.toml`: the first word is no recipe but a slip of a subcommand.
            RecipeError::Missing { path, .. } if path.extension().is_none() && path == self.recipes[0] => {
                let cli = Cli::command();
                let names = cli.get_subcommands().map(clap::Command::get_name);
                let advice = match nearest(&path.to_string_lossy(), names) {
                    Some(name) => format!("did you mean `trainer {name}`?"),
                    None => "a recipe's name ends in .toml".into(),
                };
                RecipeError::Missing { path, advice }
            }
            error => error,
        })
    }
}

/// Runs to draw.
#[derive(Clone, Debug, PartialEq, Args)]
pub struct ReportArgs {
    /// Run folders
    #[arg(value_name = "RUN", required = true)]
    pub runs: Vec<PathBuf>,
    /// Where to write the drawing
    #[arg(long, value_name = "FILE.svg")]
    pub out: PathBuf,
}

impl Cli {
    /// What to do, `train` if nothing else was said.
    pub fn into_command(self) -> Command {
        self.command.unwrap_or(Command::Train(self.train))
    }
}

/// Why the program ends without having done what was asked.
#[derive(Debug)]
pub enum Failure {
    /// What was asked cannot be done: a recipe, a path, a data set. Exit status 2.
    BadInput(anyhow::Error),
    /// It could be done, but something broke. Exit status 1.
    Run(anyhow::Error),
    /// Ctrl-C. The run's folder is whole; nothing more needs saying. Exit status 130.
    Interrupted,
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    /// A recipe's error is bad input; anything else is the run's, unless [`OrBadInput`] says so.
    fn from(error: E) -> Self {
        let error = error.into();
        if error.is::<RecipeError>() { Self::BadInput(error) } else { Self::Run(error) }
    }
}

/// Marks an error as the input's fault.
pub trait OrBadInput<T> {
    /// The same result, with exit status 2.
    ///
    /// # Errors
    /// The error that came in.
    fn or_bad_input(self) -> Result<T, Failure>;
}

impl<T, E: Into<anyhow::Error>> OrBadInput<T> for Result<T, E> {
    fn or_bad_input(self) -> Result<T, Failure> {
        self.map_err(|error| Failure::BadInput(error.into()))
    }
}

impl Failure {
    /// The chain as one sentence, and the exit status.
    fn tell(&self) -> (Option<String>, u8) {
        let (error, status) = match self {
            Self::BadInput(error) => (error, 2),
            Self::Run(error) => (error, 1),
            Self::Interrupted => return (None, 130),
        };
        let is_full = |error: &std::io::Error| {
            use std::io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
            matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
        };
        let advice = match error.chain().filter_map(|e| e.downcast_ref()).any(is_full) {
            true => "; free some space or set `output_dir` to another disk",
            false => "",
        };
        (Some(format!("{error:#}{advice}")), status)
    }
}

/// Ends `main`: prints what went wrong as `error: a: b: c` and gives the exit status.
pub fn exit(result: Result<(), Failure>) -> ExitCode {
    let Err(failure) = result else { return ExitCode::SUCCESS };
    let (sentence, status) = failure.tell();
    if let Some(sentence) = sentence {
        // Not `eprintln!`, which panics when stderr cannot be written to: the status still says what happened.
        let _ = writeln!(std::io::stderr(), "{} {sentence}", console::style("error:").red().bold().for_stderr());
    }
    status.into()
}

/// Prints to stdout. A reader that has gone away (`| head`) is no error; a full disk is.
///
/// # Errors
/// When it cannot be written.
pub fn say(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error).context("cannot write to stdout")?,
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    fn parse(line: &str) -> Result<Command, clap::Error> {
        Cli::try_parse_from(line.split(' ')).map(Cli::into_command)
    }

    #[track_caller]
    fn ok(line: &str) -> Command {
        parse(line).unwrap_or_else(|error| panic!("{error}"))
    }

    fn args(recipes: &[&str], sets: &[&str]) -> RecipeArgs {
        RecipeArgs {
            recipes: recipes.iter().map(PathBuf::from).collect(),
            sets: sets.iter().map(|&set| set.to_owned()).collect(),
            dry_run: false,
            print_config: false,
        }
    }

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn train_is_the_default() {
        assert_eq!(ok("trainer a.toml"), Command::Train(args(&["a.toml"], &[])));
        assert_eq!(ok("trainer train a.toml"), ok("trainer a.toml"));
        assert_eq!(
            ok("trainer a.toml b.toml --set x=1 --set y.z=2"),
            Command::Train(args(&["a.toml", "b.toml"], &["x=1", "y.z=2"]))
        );
        assert_eq!(ok("trainer --set x=1 a.toml"), Command::Train(args(&["a.toml"], &["x=1"])));
        assert_eq!(
            ok("trainer a.toml --dry-run"),
            Command::Train(RecipeArgs { dry_run: true, ..args(&["a.toml"], &[]) })
        );
    }

    #[test]
    fn subcommands() {
        assert_eq!(ok("trainer sft a.toml --set x=-1"), Command::Sft(args(&["a.toml"], &["x=-1"])));
        assert_eq!(
            ok("trainer eval a.toml --print-config"),
            Command::Eval(RecipeArgs { print_config: true, ..args(&["a.toml"], &[]) })
        );
        let report = ReportArgs { runs: vec!["r1".into(), "r2".into()], out: "c.svg".into() };
        assert_eq!(ok("trainer report r1 r2 --out c.svg"), Command::Report(report));
    }

    #[test]
    fn what_does_not_parse() {
        let error = |line| parse(line).expect_err("does not parse").to_string();
        assert_snapshot!(error("trainer a.toml --sett x=1"), @r#"
    error: unexpected argument '--sett' found

      tip: a similar argument exists: '--set'

    Usage: trainer --set <KEY=VALUE> <RECIPE.toml>...

    For more information, try '--help'.
    "#);
        assert_snapshot!(error("trainer sft"), @r#"
    error: the following required arguments were not provided:
      <RECIPE.toml>...

    Usage: trainer sft <RECIPE.toml>...

    For more information, try '--help'.
    "#);
        assert_snapshot!(error("trainer report r1"), @r#"
    error: the following required arguments were not provided:
      --out <FILE.svg>

    Usage: trainer report --out <FILE.svg> <RUN>...

    For more information, try '--help'.
    "#);
        assert_snapshot!(error("trainer a.toml --set"), @r#"
    error: a value is required for '--set <KEY=VALUE>' but none was supplied

    For more information, try '--help'.
    "#);
        assert_eq!(parse("trainer sft").expect_err("does not parse").exit_code(), 2);
    }

    #[test]
    fn a_slip_of_a_subcommand() {
        let error = |name: &str| args(&[name, "a.toml"], &[]).load(Task::Train).expect_err("fails").to_string();
        assert_snapshot!(error("evla"), @"evla: no such recipe; did you mean `trainer eval`?");
        assert_snapshot!(error("zebra"), @"zebra: no such recipe; a recipe's name ends in .toml");
    }

    #[test]
    fn help() {
        assert_snapshot!(Cli::command().render_long_help(), @r#"
    Trains DeepSeek-V4 models: a recipe in, a run folder with checkpoints and metrics out.

    `trainer RECIPE.toml` is short for `trainer train RECIPE.toml`.

    Usage: trainer [OPTIONS] <RECIPE.toml>...
           trainer <COMMAND>

    Commands:
      train   Reinforcement learning: sample, score, update, repeat (the default)
      sft     Supervised fine-tuning on the reference answers
      eval    Measure the model on the held-out prompts
      parity  Compare the engine's forward pass with the trainer's on the recipe's model, op by op
      report  Draw the reward curves of one or several runs as an SVG
      help    Print this message or the help of the given subcommand(s)

    Arguments:
      <RECIPE.toml>...
              Recipe files; later ones are laid over earlier ones

    Options:
          --set <KEY=VALUE>
              Set one key over the recipes, as in `--set optimizer.learning_rate=1e-4`; may be repeated

          --dry-run
              Check everything that the run needs and say how large it is, without starting it

          --print-config
              Print the resolved recipe as TOML and stop

      -h, --help
              Print help (see a summary with '-h')

      -V, --version
              Print version

    Exit status: 0 done, 1 the run failed, 2 bad input, 130 stopped by Ctrl-C.
    "#);
        let mut cli = Cli::command();
        cli.build();
        assert_snapshot!(cli.find_subcommand_mut("report").expect("there").render_long_help(), @r#"
    Draw the reward curves of one or several runs as an SVG

    Usage: trainer report --out <FILE.svg> <RUN>...

    Arguments:
      <RUN>...
              Run folders

    Options:
          --out <FILE.svg>
              Where to write the drawing

      -h, --help
              Print help
    "#);
    }

    #[test]
    fn failures_are_one_sentence() {
        let full = || std::io::Error::from(ErrorKind::StorageFull);
        let run: Failure = Err::<(), _>(full()).context("cannot write metrics").context("step 3").unwrap_err().into();
        const FREE: &str = "free some space or set `output_dir` to another disk";
        assert_eq!(run.tell(), (Some(format!("step 3: cannot write metrics: no storage space; {FREE}")), 1));
        let input = Err::<(), _>(full()).or_bad_input().expect_err("bad input");
        assert_eq!(input.tell().1, 2);
        let recipe: Failure = RecipeError::NoFile.into();
        assert_eq!(recipe.tell().1, 2);
        let recipe: Failure = anyhow::Error::new(RecipeError::NoFile).context("resuming").into();
        assert_eq!(recipe.tell().1, 2);
        assert_eq!(Failure::Interrupted.tell(), (None, 130));
    }
}
