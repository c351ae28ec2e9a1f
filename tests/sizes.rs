//! What is said about a model without its weights, and of one model in two forward passes.

use std::process::Command;

use insta::assert_snapshot;

use crate::program::{args, home, trainer};

fn info(model: &str) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_rollout-under-test")).args(["info", model]).output().expect("runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("text");
    // The layers, one a line, say nothing new.
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with("layer ")).collect();
    lines.join("\n")
}

#[test]
fn the_published_models_are_counted_without_their_checkpoints() {
    assert_snapshot!(info("v4-flash"), @"
    parameters                            in all     used by a token
      embedding                      529,530,880         529,530,880
      hyper-connections               33,884,439          33,884,439
      norms                              422,400             422,400
      attention                    4,599,057,088       4,599,057,088
      compressors                    261,464,576         261,464,576
      indexers                       225,730,176         225,730,176
      routers                         45,099,008          45,099,008
      routed experts             277,025,390,592       6,492,782,592
      shared experts               1,082,130,432       1,082,130,432
      output head                    529,530,880         529,530,880
      multi-token prediction       6,610,048,891                   0
      sum                        290,942,289,362      13,799,632,471
      without multi-token prediction 284.33e9; a token looks one row up in the embedding and multiplies by 13.27e9
    checkpoint
      mxfp4                             159.6 GB
      fp8                               292.5 GB
      bf16                              582.0 GB
      f32                              1163.8 GB
    cache of a sequence               this engine, f32            FP8, index FP8            FP8, index FP4
      4096 tokens              82.6 MB (20160 B/token)    19.0 MB (4635 B/token)    17.6 MB (4299 B/token)
      131072 tokens          1829.8 MB (13960 B/token)   507.9 MB (3875 B/token)   463.8 MB (3539 B/token)
      1048576 tokens           14.5 GB (13785 B/token)  4040.5 MB (3854 B/token)  3688.2 MB (3518 B/token)
    experts                 256 a layer, 6 used by a token, on MXFP4
    ");
    assert_snapshot!(info("v4-pro"), @"
    parameters                            in all     used by a token
      embedding                      926,679,040         926,679,040
      hyper-connections               84,069,603          84,069,603
      norms                            1,006,592           1,006,592
      attention                   18,293,464,704      18,293,464,704
      compressors                    670,128,640         670,128,640
      indexers                       501,384,960         501,384,960
      routers                        167,925,504         167,925,504
      routed experts           1,547,396,186,112      24,178,065,408
      shared experts               4,029,677,568       4,029,677,568
      output head                    926,679,040         926,679,040
      multi-token prediction      25,840,145,979                   0
      sum                      1,598,837,347,742      49,779,081,059
      without multi-token prediction 1573.00e9; a token looks one row up in the embedding and multiplies by 48.85e9
    checkpoint
      mxfp4                             864.7 GB
      fp8                              1602.0 GB
      bf16                             3197.9 GB
      f32                              6395.4 GB
    cache of a sequence               this engine, f32            FP8, index FP8            FP8, index FP4
      4096 tokens             119.1 MB (29088 B/token)    27.1 MB (6625 B/token)    25.2 MB (6145 B/token)
      131072 tokens          2620.1 MB (19990 B/token)   727.0 MB (5547 B/token)   664.0 MB (5067 B/token)
      1048576 tokens           20.7 GB (19733 B/token)  5783.7 MB (5516 B/token)  5280.4 MB (5036 B/token)
    experts                 384 a layer, 6 used by a token, on MXFP4
    ");
}

#[test]
fn a_dry_run_of_a_published_model_needs_nothing_but_its_name() {
    let home = home();
    let plan = |set: &str| {
        let mut args = args("train", "recipes/quickstart.toml", home.path(), set);
        args.push("--dry-run".into());
        args
    };
    let said = trainer(plan("model.path=v4-pro")).done().stdout;
    assert!(said.contains("routed experts") && said.contains("of moments (AdamW)"), "{said}");
    // Muon keeps one tensor of most parameters, AdamW two.
    let moments = |set: &str| -> f64 {
        let said = trainer(plan(set)).done().stdout;
        let gb = said.split(" GB of moments").next().and_then(|before| before.split_whitespace().last());
        gb.and_then(|gb| gb.parse().ok()).unwrap_or_else(|| panic!("{said}"))
    };
    let ratio = moments("model.path=v4-pro optimizer.type=muon") / moments("model.path=v4-pro");
    assert!((0.5..0.51).contains(&ratio), "{ratio}");
    let run = args("train", "recipes/quickstart.toml", home.path(), "model.path=v4-pro");
    assert_snapshot!(trainer(run).ending(home.path()), @"
    error: `model.path`: v4-pro is built in for --dry-run alone; set it to a checkpoint folder
    exit status 2
    ");
}

#[test]
fn the_engine_and_the_trainer_agree_op_by_op() {
    let outcome = trainer(["parity", "recipes/quickstart.toml"]).done();
    let said = &outcome.stdout;
    assert!(said.contains("engine and trainer agree: every choice is the same"), "{said}");
    let layers = said.lines().filter(|line| line.split_whitespace().next().is_some_and(|w| w.parse::<usize>().is_ok()));
    assert_eq!(layers.count(), 4, "{said}");
}
