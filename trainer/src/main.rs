//! `trainer RECIPE.toml`: one recipe, one run.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use trainer::cli::{Cli, Command, Failure, OrBadInput, RecipeArgs, exit, say};
use trainer::recipe::{Recipe, Task};
use trainer::setup::{Inputs, Run};
use trainer::{evaluate, parity, report, run, setup, sft};

fn main() -> ExitCode {
    exit(match Cli::parse().into_command() {
        Command::Train(args) => with_recipe(&args, Task::Train, run::train),
        Command::Sft(args) => with_recipe(&args, Task::Sft, sft::sft),
        Command::Eval(args) => with_recipe(&args, Task::Eval, |recipe, files, inputs| {
            let mut run = Run::start(recipe, files, inputs, 0)?;
            evaluate::evaluate(&mut run, 0)?;
            run.finish(0)
        }),
        Command::Parity(args) => with_recipe(&args, Task::Train, |recipe, _, inputs| parity::parity(recipe, inputs)),
        Command::Report(args) => report::write_report(&args.runs, &args.out).or_bad_input(),
    })
}

fn with_recipe(
    args: &RecipeArgs,
    task: Task,
    start: impl FnOnce(&Recipe, &str, Inputs) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let recipe = args.load(task)?;
    if args.print_config {
        return say(&recipe.to_toml());
    }
    if let (true, Some(preset)) = (args.dry_run, recipe.model.preset()) {
        return say(&format!("{}\n{}", recipe.to_toml(), setup::preset_plan(&preset, &recipe.optimizer)));
    }
    let inputs = Inputs::load(&recipe, task)?;
    if args.dry_run {
        return say(&format!("{}\n{}\n", recipe.to_toml(), inputs.plan(&recipe, task)));
    }
    let files: Vec<String> = args.recipes.iter().map(|path| path.display().to_string()).collect();
    start(&recipe, &files.join(" "), inputs)
}
