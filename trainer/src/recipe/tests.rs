//! What a person reads when a recipe is wrong, and the recipe that comes of layers.

use std::path::Path;

use insta::assert_snapshot;

use super::*;

/// A recipe with nothing wrong, to which each test adds a line.
const WHOLE: &str = "model.path = \"base\"\nprompts.path = \"train.jsonl\"\n";

fn load(layers: &[&str], sets: &[&str]) -> Result<Recipe, RecipeError> {
    let names = ["a.toml", "b.toml", "c.toml"];
    let files = names.iter().zip(layers).map(|(name, text)| {
        let path = Path::new(*name);
        layers::from_text(path, text).map(|layer| (path, layer))
    });
    let sets: Vec<String> = sets.iter().map(|&set| set.to_owned()).collect();
    Recipe::from_layers(files.collect::<Result<_, _>>()?, &sets, Task::Train)
}

#[track_caller]
fn whole(layers: &[&str], sets: &[&str]) -> Recipe {
    let mut all = vec![WHOLE];
    all.extend(layers);
    load(&all, sets).unwrap_or_else(|error| panic!("{error}"))
}

/// The sentence for a recipe that adds `text` to a whole one, in lines 3 and on.
#[track_caller]
fn error(text: &str) -> String {
    load(&[&format!("{WHOLE}{text}")], &[]).expect_err("the recipe is wrong").to_string()
}

#[track_caller]
fn set_error(set: &str) -> String {
    load(&[WHOLE], &[set]).expect_err("the argument is wrong").to_string()
}

#[test]
fn an_unknown_key_names_the_nearest_and_its_line() {
    assert_snapshot!(error("num_step = 3"), @"a.toml:3: unknown key `num_step`; did you mean `num_steps`?");
    assert_snapshot!(
        error("[optimizer]\nlearning_rat = 3e-4"),
        @"a.toml:4: unknown key `optimizer.learning_rat`; did you mean `optimizer.learning_rate`?"
    );
    assert_snapshot!(
        error("[optimiser]\nlearning_rate = 3e-4"),
        @"a.toml:3: unknown key `optimiser`; did you mean `optimizer`?"
    );
    assert_snapshot!(
        error("[loss]\nclip_eps_hi = 0.3"),
        @"a.toml:4: unknown key `loss.clip_eps_hi`; did you mean `loss.clip_eps_high`?"
    );
}

#[test]
fn a_key_in_the_wrong_table_names_the_right_one() {
    assert_snapshot!(
        error("[train]\nlearning_rate = 3e-4"),
        @"a.toml:4: unknown key `train.learning_rate`; did you mean `optimizer.learning_rate`?"
    );
    assert_snapshot!(
        error("eval_path = \"x\""),
        @"a.toml:3: unknown key `eval_path`; did you mean `prompts.eval_path`?"
    );
}

#[test]
fn a_key_like_nothing_lists_what_there_is() {
    assert_snapshot!(
        error("[advantage]\nzebra = 1"),
        @"a.toml:4: unknown key `advantage.zebra`; [advantage] takes normalize_std, eps"
    );
    assert_snapshot!(
        error("[reward]\nzebra = 1"),
        @"a.toml:4: unknown key `reward.zebra`; [reward] takes answer_text"
    );
}

#[test]
fn an_unknown_variant_lists_the_variants() {
    assert_snapshot!(
        error("[loss]\ntype = \"ppo_klip\""),
        @r#"a.toml:4: `loss.type` is "ppo_klip", expected "ppo_clip""#
    );
    assert_snapshot!(
        error("[loss]\naggregation = \"mean\""),
        @r#"a.toml:4: `loss.aggregation` is "mean", expected "token_mean" or "sequence_mean""#
    );
    assert_snapshot!(
        error("[loss]\naggregation = \"tokenmean\""),
        @r#"a.toml:4: `loss.aggregation` is "tokenmean", expected "token_mean" or "sequence_mean"; did you mean "token_mean"?"#
    );
    assert_snapshot!(error("[advantage]\ntype = 3"), @"a.toml:4: `advantage.type` is 3, expected a string in quotes");
    assert_snapshot!(
        error("[loss]\naggregation = 3"),
        @"a.toml:4: `loss.aggregation` is 3, expected a string in quotes"
    );
}

#[test]
fn a_wrong_type_says_what_was_found_and_expected() {
    assert_snapshot!(
        error("group_size = \"eight\""),
        @r#"a.toml:3: `group_size` is the string "eight", expected a whole number, 0 or more"#
    );
    assert_snapshot!(error("group_size = -8"), @"a.toml:3: `group_size` is -8, expected a whole number, 0 or more");
    assert_snapshot!(error("group_size = 8.0"), @"a.toml:3: `group_size` is 8.0, expected a whole number, 0 or more");
    assert_snapshot!(
        error("seed = 99999999999999999999"),
        @"a.toml:3: `seed` is 99999999999999999999, which does not fit 64 bits, expected a whole number, 0 or more"
    );
    assert_snapshot!(error("name = 3"), @"a.toml:3: `name` is 3, expected a string in quotes");
    assert_snapshot!(
        error("[optimizer]\nlearning_rate = \"fast\""),
        @r#"a.toml:4: `optimizer.learning_rate` is the string "fast", expected a number"#
    );
    assert_snapshot!(error("prompts.shuffle = 1"), @"a.toml:3: `prompts.shuffle` is 1, expected true or false");
    assert_snapshot!(error("sft = 3"), @"a.toml:3: `sft` is 3, expected a table");
    assert_snapshot!(error("loss = \"ppo_clip\""), @r#"a.toml:3: `loss` is the string "ppo_clip", expected a table"#);
    assert_snapshot!(error("seed = [1]"), @"a.toml:3: `seed` is an array, expected a whole number, 0 or more");
    assert_snapshot!(error("seed.x = 1"), @"a.toml:3: `seed` is a table, expected a whole number, 0 or more");
    assert_snapshot!(error("name = 2026-01-01"), @"a.toml:3: `name` is 2026-01-01, expected a string in quotes");
    assert_snapshot!(
        error("[sft]\nstop_at_reward = true"),
        @"a.toml:4: `sft.stop_at_reward` is true, expected a number"
    );
}

#[test]
fn a_syntax_error_shows_the_line() {
    assert_snapshot!(
        error("  name = fast"),
        @"a.toml:3:10: not TOML: expected true, false or a string in quotes; the line reads `name = fast`"
    );
    assert_snapshot!(error("[loss"), @"a.toml:3:6: not TOML: unclosed table, expected `]`; the line reads `[loss`");
    assert_snapshot!(error("seed = 1\nseed = 2"), @"a.toml:4:1: not TOML: duplicate key; the line reads `seed = 2`");
    assert_snapshot!(
        error("name = \"é\", seed = 1"),
        @r#"a.toml:3:11: not TOML: unexpected key or value, expected newline, `#`; the line reads `name = "é", seed = 1`"#
    );
}

#[test]
fn an_error_names_the_layer_that_wrote_it() {
    let wrong = |layers: &[&str], sets: &[&str]| load(layers, sets).expect_err("wrong").to_string();
    assert_snapshot!(
        wrong(&[WHOLE, "\n[loss]\nclip = 1"], &[]),
        @"b.toml:3: unknown key `loss.clip`; [loss] takes clip_eps_low, clip_eps_high, aggregation"
    );
    assert_snapshot!(
        wrong(&["seed = \"x\"", WHOLE], &[]),
        @r#"a.toml:1: `seed` is the string "x", expected a whole number, 0 or more"#
    );
    // `group_size` of the first file rules out what the second one asks.
    assert_snapshot!(
        wrong(&[&format!("{WHOLE}prompts_per_step = 3\ngroup_size = 5"), "[train]\nupdates_per_step = 4"], &[]),
        @"b.toml:2: `train.updates_per_step` is 4, expected a divisor of prompts_per_step * group_size (3 * 5 = 15), for every update trains on as many rollouts; the nearest are 3 and 5"
    );
}

#[test]
fn a_wrong_set_says_which() {
    assert_snapshot!(set_error("num_steps"), @"--set num_steps: there is no `=`; write it as `--set table.key=value`");
    assert_snapshot!(set_error("=3"), @"--set =3: `` is not a dotted key; write it as `--set table.key=value`");
    assert_snapshot!(
        set_error("loss..eps=3"),
        @"--set loss..eps=3: `loss..eps` is not a dotted key; write it as `--set table.key=value`"
    );
    assert_snapshot!(
        set_error("lr=3"),
        @"--set lr=3: unknown key `lr`; the top of a recipe takes name, seed, num_steps, threads, output_dir, prompts_per_step, group_size, model, prompts, rollout, reward, advantage, loss, pack, train, optimizer, eval, checkpoint, sft"
    );
    assert_snapshot!(
        set_error("num_steps=many"),
        @r#"--set num_steps=many: `num_steps` is the string "many", expected a whole number, 0 or more"#
    );
    assert_snapshot!(set_error("num_steps=0"), @"--set num_steps=0: `num_steps` is 0, expected at least 1; raise it");
    assert_snapshot!(
        set_error("loss=ppo_clip"),
        @r#"--set loss=ppo_clip: `loss` is the string "ppo_clip", expected a table"#
    );
}

#[test]
fn checks_between_fields() {
    assert_snapshot!(
        error("name = \"a/b\""),
        @r#"a.toml:3: `name` is "a/b", expected letters, digits, `.`, `_` and `-`, starting with a letter or digit; it becomes the name of the run's folder"#
    );
    assert_snapshot!(error("num_steps = 0"), @"a.toml:3: `num_steps` is 0, expected at least 1; raise it");
    assert_snapshot!(
        error("group_size = 1"),
        @"a.toml:3: `group_size` is 1, expected at least 2; a rollout's advantage is its reward against the rest of its group"
    );
    assert_snapshot!(
        error("[train]\nupdates_per_step = 3"),
        @"a.toml:4: `train.updates_per_step` is 3, expected a divisor of prompts_per_step * group_size (32 * 8 = 256), for every update trains on as many rollouts; the nearest are 2 and 4"
    );
    assert_snapshot!(
        error("[pack]\nrow_tokens = 9000"),
        @"a.toml:4: `pack.row_tokens` is 9000, expected at most pack.microbatch_tokens (4096); a microbatch holds at least one row"
    );
    assert_snapshot!(
        error("[pack]\nrow_tokens = 64"),
        @"a.toml:4: `pack.row_tokens` is 64, expected more than rollout.max_response_tokens (64); a row holds a prompt and its response; raise it or shorten the responses"
    );
    assert_snapshot!(
        error("[rollout]\ntemperature = 0.0"),
        @"a.toml:4: `rollout.temperature` is 0, expected a number from 0.001 to 1000; 1 samples from the model as it is"
    );
    assert_snapshot!(
        error("[rollout]\ntemperature = nan"),
        @"a.toml:4: `rollout.temperature` is NaN, expected a number from 0.001 to 1000; 1 samples from the model as it is"
    );
    assert_snapshot!(
        error("[optimizer]\nlearning_rate = 0"),
        @"a.toml:4: `optimizer.learning_rate` is 0, expected a number above 0 (1e-37 to 1e38); with 0 nothing is learned"
    );
    assert_snapshot!(
        error("[optimizer]\nbeta2 = 1"),
        @"a.toml:4: `optimizer.beta2` is 1, expected at least 0 and below 1; it is the share of the old mean that an update keeps"
    );
    assert_snapshot!(
        error("[optimizer]\nmax_grad_norm = 0"),
        @"a.toml:4: `optimizer.max_grad_norm` is 0, expected a number above 0; `inf` leaves gradients as they are"
    );
    assert_snapshot!(
        error("[optimizer]\nweight_decay = -0.1"),
        @"a.toml:4: `optimizer.weight_decay` is -0.1, expected 0 or a number above; 0 leaves it out"
    );
    assert_snapshot!(
        error("[advantage]\neps = -1"),
        @"a.toml:4: `advantage.eps` is -1, expected 0 or a number above; 1e-6 is usual"
    );
    assert_snapshot!(
        error("[loss]\nclip_eps_low = 1.5"),
        @"a.toml:4: `loss.clip_eps_low` is 1.5, expected above 0 and at most 1; a ratio of probabilities is never below 0; 0.2 is usual"
    );
    assert_snapshot!(
        error("[loss]\nclip_eps_high = inf"),
        @"a.toml:4: `loss.clip_eps_high` is inf, expected a number above 0 (1e-37 to 1e38); 0.2 is usual"
    );
    assert_snapshot!(
        error("[eval]\ntemperature = -1"),
        @"a.toml:4: `eval.temperature` is -1, expected 0 or a number from 0.001 to 1000; 0 takes the likeliest token"
    );
    assert_snapshot!(
        error("[sft]\nstop_at_reward = 0.3"),
        @r#"a.toml: `prompts.eval_path` is not set, expected a file, since sft.stop_at_reward watches the held-out reward; add `eval_path = "..."` under [prompts] or remove `stop_at_reward`"#
    );
}

#[test]
fn an_array_is_no_table() {
    assert_snapshot!(error("[[eval]]\nevery_steps = 1"), @"a.toml:3: `eval` is an array, expected a table");
    assert_snapshot!(set_error("model=[\"base\"]"), @r#"--set model=["base"]: `model` is an array, expected a table"#);
}

#[test]
fn long_and_unprintable_text_is_shown_in_part() {
    let long = "7".repeat(100_000);
    for said in [
        error(&format!("seed = {long}")),
        error(&format!("seed = \"{long}\"")),
        error(&format!("seed = [{long}")),
        set_error(&format!("seed={long}")),
        set_error(&format!("{long}=1")),
    ] {
        assert!(said.len() < 1000, "{} bytes", said.len());
    }
    assert_snapshot!(
        error("seed = 1\rname = \"x\""),
        @"a.toml:3:10: not TOML: carriage return must be followed by newline, expected newline; the line reads `seed = 1�name = \"x\"`"
    );
}

#[test]
fn numbers_that_no_machine_can_use() {
    assert_snapshot!(error("threads = 1000000"), @"a.toml:3: `threads` is 1000000, expected at most 1024; lower it");
    assert_snapshot!(
        error("prompts_per_step = 1000000000000000"),
        @"a.toml:3: `prompts_per_step` is 1000000000000000, expected at most 1048576; lower it"
    );
    assert_snapshot!(
        error("prompts_per_step = 1000000\ngroup_size = 100"),
        @"a.toml:3: `prompts_per_step` is 1000000, expected at most 10485 with a group_size of 100; lower one of the two"
    );
    // The nearest divisor of a huge number is found at once.
    assert_snapshot!(
        error("[train]\nupdates_per_step = 9223372036854775807"),
        @"a.toml:4: `train.updates_per_step` is 9223372036854775807, expected a divisor of prompts_per_step * group_size (32 * 8 = 256), for every update trains on as many rollouts; the nearest is 256"
    );
    assert_snapshot!(
        error("[eval]\nsamples_per_prompt = 20000000"),
        @"a.toml:4: `eval.samples_per_prompt` is 20000000, expected at most 1048576; lower it"
    );
    assert_snapshot!(
        error("[loss]\nclip_eps_high = 1e300"),
        @"a.toml:4: `loss.clip_eps_high` is 1e300, expected a number above 0 (1e-37 to 1e38); 0.2 is usual"
    );
    assert_snapshot!(
        error("[optimizer]\nlearning_rate = 1e-300"),
        @"a.toml:4: `optimizer.learning_rate` is 1e-300, expected a number above 0 (1e-37 to 1e38); with 0 nothing is learned"
    );
    assert_snapshot!(
        error("[optimizer]\nlearning_rate = 0.01\nweight_decay = 100"),
        @"a.toml:5: `optimizer.weight_decay` is 100, expected less than 1 / optimizer.learning_rate (100); a step takes off that share of a weight; 0.1 is usual"
    );
}

#[test]
fn a_template_without_a_place_for_the_prompt() {
    assert_snapshot!(
        error("prompts.template = \"<user>{promt}\""),
        @r#"a.toml:3: `prompts.template` is "<user>{promt}", expected a text with `{prompt}` in it; it stands for the prompt's text; without it every prompt would read the same"#
    );
}

#[test]
fn what_a_task_needs_must_be_there() {
    let missing = |text, task| {
        let path = Path::new("a.toml");
        let layer = layers::from_text(path, text).expect("is TOML");
        Recipe::from_layers(vec![(path, layer)], &[], task).expect_err("something is missing").to_string()
    };
    assert_snapshot!(
        missing("", Task::Train),
        @r#"a.toml: `model.path` is not set, expected a checkpoint folder; add `path = "..."` under [model]"#
    );
    assert_snapshot!(
        missing("model.path = \"base\"", Task::Train),
        @r#"a.toml: `prompts.path` is not set, expected a JSONL or Parquet file; add `path = "..."` under [prompts]"#
    );
    assert_snapshot!(
        missing("", Task::Sft),
        @r#"a.toml: `model.path` is not set, expected a checkpoint folder; add `path = "..."` under [model], or `model = "..."` under [sft] to start afresh"#
    );
    assert_snapshot!(
        missing("sft.model = \"shape\"", Task::Train),
        @r#"a.toml: `model.path` is not set, expected a checkpoint folder; add `path = "..."` under [model]"#
    );
    assert_snapshot!(
        missing("sft.model = \"shape\"", Task::Sft),
        @r#"a.toml: `prompts.path` is not set, expected a JSONL or Parquet file; add `path = "..."` under [prompts]"#
    );
    assert_snapshot!(
        missing("model.path = \"base\"", Task::Eval),
        @r#"a.toml: `prompts.eval_path` is not set, expected a JSONL or Parquet file of held-out prompts; add `eval_path = "..."` under [prompts]"#
    );
}

#[test]
fn files_that_are_not_there() {
    let folder = tempfile::tempdir().expect("a folder");
    let missing = |name: &str| {
        let error = Recipe::load(&[folder.path().join(name)], &[], Task::Train).expect_err("no such file");
        error.to_string().replace(&*folder.path().to_string_lossy(), "recipes")
    };
    assert_snapshot!(
        missing("quick.toml"),
        @"recipes/quick.toml: no such recipe; there are no recipes in recipes; check the path"
    );
    assert_snapshot!(
        missing("sub/quick.toml"),
        @"recipes/sub/quick.toml: no such recipe; there is no folder recipes/sub either; check the path and where you started"
    );
    std::fs::write(folder.path().join("quickstart.toml"), "").expect("written");
    std::fs::write(folder.path().join("large.toml"), "").expect("written");
    assert_snapshot!(
        missing("quickstrat.toml"),
        @"recipes/quickstrat.toml: no such recipe; did you mean recipes/quickstart.toml?"
    );
    assert_snapshot!(
        missing("zebra.toml"),
        @"recipes/zebra.toml: no such recipe; recipes has large.toml, quickstart.toml"
    );
    assert_snapshot!(missing("."), @"cannot read recipes/.");
    std::fs::write(folder.path().join("latin1.toml"), b"name = \"\xe9\"").expect("written");
    assert_snapshot!(missing("latin1.toml"), @"cannot read recipes/latin1.toml");
    assert_snapshot!(
        Recipe::load(&[], &[], Task::Train).expect_err("nothing named"),
        @"no recipe was named; name at least one file, as in `trainer recipes/quickstart.toml`"
    );
}

#[test]
fn layers_merge_deeply_and_later_ones_win() {
    let recipe = whole(
        &["seed = 2\n[loss]\nclip_eps_low = 0.1\nclip_eps_high = 0.4", "seed = 3\nloss.clip_eps_high = 0.5"],
        &["loss.aggregation=sequence_mean", "seed=4", "seed=5"],
    );
    assert_eq!(recipe.seed, 5);
    assert_eq!(recipe.model.path, Path::new("base"));
    let LossConfig::PpoClip(loss) = recipe.loss;
    let want =
        PpoClipConfig { clip_eps_low: 0.1, clip_eps_high: 0.5, aggregation: crate::loss::Aggregation::SequenceMean };
    assert_eq!(loss, want);
}

#[test]
fn set_takes_toml_or_else_a_string() {
    let sets = [
        "prompts.path=data/x.jsonl",
        "name=2026",
        "prompts.answer_column = \"the answer\"",
        "model={path='y'}",
        "optimizer.learning_rate=1",
        "output_dir=a=b",
        "prompts.shuffle=false",
    ];
    let recipe = whole(&[], &sets);
    assert_eq!(recipe.prompts.path, Path::new("data/x.jsonl"));
    assert_eq!(recipe.name, "2026");
    assert_eq!(recipe.prompts.answer_column, "the answer");
    assert_eq!(recipe.model.path, Path::new("y"));
    assert_eq!(recipe.output_dir, Path::new("a=b"));
    assert!(!recipe.prompts.shuffle);
    let OptimizerConfig::AdamW(optimizer) = recipe.optimizer else { panic!("adamw is the default") };
    assert_eq!(optimizer.learning_rate, 1.0);
}

/// Two variants whose keys clash, as two algorithms' may.
#[test]
fn a_layer_that_changes_type_drops_the_other_variants_keys() {
    #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields, default)]
    struct Left {
        size: usize,
    }
    #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields, default)]
    struct Right {
        size: String,
    }
    tagged_enum! {
        enum Side {
            "left" => Left(Left),
            "right" => Right(Right),
        }
    }
    #[derive(Debug, Deserialize, Serialize, PartialEq)]
    #[serde(deny_unknown_fields)]
    struct Doc {
        side: Side,
    }
    let read = |layers: &[&str], sets: &[&str]| {
        let mut root = layers::from_default(&Doc { side: Side::Left(Left { size: 1 }) });
        for text in layers {
            layers::merge(&mut root, layers::from_text(Path::new("a.toml"), text).expect("is TOML"));
        }
        let sets: Vec<String> = sets.iter().map(|&set| set.to_owned()).collect();
        layers::merge(&mut root, layers::from_sets(&sets).expect("are sets"));
        layers::read::<Doc>(&root, &[]).map(|doc| doc.side).map_err(|error| error.to_string())
    };
    let right = |size: &str| Ok(Side::Right(Right { size: size.into() }));
    assert_eq!(read(&["side.type = \"right\""], &[]), right(""));
    assert_eq!(read(&["side.size = 2", "side.type = \"right\""], &[]), right(""));
    assert_eq!(read(&["side.type = \"right\"", "side.size = \"x\""], &[]), right("x"));
    assert_eq!(read(&["side.type = \"right\"\nside.size = \"x\"", "side.type = \"right\""], &[]), right("x"));
    assert_eq!(read(&[], &["side.size=x", "side.type=right"]), right("x"));
    assert_eq!(read(&["side.size = 2", "side.type = \"left\""], &[]), Ok(Side::Left(Left { size: 2 })));
    // What print-config writes is read by plain serde too.
    let doc = Doc { side: Side::Right(Right { size: "x".into() }) };
    assert_eq!(serde_json::from_str::<Doc>(&serde_json::to_string(&doc).expect("JSON")).expect("read back"), doc);
}

#[test]
fn print_config_spells_everything_out() {
    assert_snapshot!(whole(&["name = \"small\"\nsft.stop_at_reward = 0.3\nprompts.eval_path = \"held.jsonl\""], &[]).to_toml(), @r#"
    name = "small"
    seed = 1
    num_steps = 100
    threads = 0
    output_dir = "runs"
    prompts_per_step = 32
    group_size = 8

    [model]
    path = "base"

    [prompts]
    path = "train.jsonl"
    eval_path = "held.jsonl"
    prompt_column = "prompt"
    answer_column = "answer"
    template = "{prompt}"
    skip_bad_rows = false
    shuffle = true

    [rollout]
    max_response_tokens = 64
    temperature = 1.0
    max_batch_rollouts = 256
    kv_cache_mib = 0
    speculative = false

    [reward]
    type = "reasoning_gym"
    answer_text = "response"

    [advantage]
    type = "grpo"
    normalize_std = true
    eps = 0.000001

    [loss]
    type = "ppo_clip"
    clip_eps_low = 0.2
    clip_eps_high = 0.2
    aggregation = "token_mean"

    [pack]
    microbatch_tokens = 4096
    row_tokens = 4096

    [train]
    updates_per_step = 1
    replay_experts = true
    replay_indexer = true
    frozen = []
    mtp_loss_weight = 0.0
    router_bias_update_speed = 0.0

    [optimizer]
    type = "adamw"
    learning_rate = 0.00001
    beta1 = 0.9
    beta2 = 0.95
    eps = 0.00000001
    weight_decay = 0.0
    max_grad_norm = 1.0
    warmup_steps = 0

    [eval]
    every_steps = 10
    num_prompts = 0
    samples_per_prompt = 1
    temperature = 0.0

    [checkpoint]
    every_steps = 50
    keep_last = 2

    [sft]
    batch_size = 32
    num_steps = 1000
    eval_every_steps = 100
    stop_at_reward = 0.3
    "#);
}

#[test]
fn print_config_loads_back_to_the_same_value() {
    let recipes = [
        whole(&[], &[]),
        whole(
            &["name = \"x\"\nseed = 9223372036854775807\n[sft]\nmodel = \"shape\"\n"],
            &["optimizer.learning_rate=3.3e-7", "optimizer.max_grad_norm=inf", "loss.aggregation=sequence_mean"],
        ),
        whole(&["[optimizer]\ntype = \"muon\"\nadamw_eps = 1e-20\nmomentum = 0"], &["optimizer.weight_decay=0.1"]),
    ];
    for recipe in recipes {
        assert_eq!(load(&[&recipe.to_toml()], &[]).expect("loads"), recipe);
    }
}

#[test]
fn muon_brings_its_own_keys() {
    let toml = whole(&["optimizer.type = \"muon\""], &[]).to_toml();
    let table = toml.split("[optimizer]").nth(1).and_then(|rest| rest.split("\n\n").next()).expect("a table");
    assert_snapshot!(table.trim(), @r#"
    type = "muon"
    learning_rate = 0.00001
    momentum = 0.95
    update_rms = 0.18
    weight_decay = 0.0
    adamw_learning_rate = 0.00001
    adamw_beta1 = 0.9
    adamw_beta2 = 0.95
    adamw_eps = 0.00000001
    adamw_weight_decay = 0.0
    max_grad_norm = 1.0
    warmup_steps = 0
    "#);
    let muon = |text: &str| error(&format!("[optimizer]\ntype = \"muon\"\n{text}"));
    assert_snapshot!(muon("beta1 = 0.9"), @"a.toml:5: unknown key `optimizer.beta1`; [optimizer] takes learning_rate, momentum, update_rms, weight_decay, adamw_learning_rate, adamw_beta1, adamw_beta2, adamw_eps, adamw_weight_decay, max_grad_norm, warmup_steps");
    assert_snapshot!(muon("momentum = 1"), @"a.toml:5: `optimizer.momentum` is 1, expected at least 0 and below 1; it is the share of the old momentum that an update keeps");
    assert_snapshot!(muon("update_rms = 0"), @"a.toml:5: `optimizer.update_rms` is 0, expected a number above 0 (1e-37 to 1e38); 0.18 is V4's");
    assert_snapshot!(muon("adamw_eps = 0"), @"a.toml:5: `optimizer.adamw_eps` is 0, expected a number above 0 (1e-37 to 1e38); 1e-8 is usual");
    assert_snapshot!(muon("adamw_learning_rate = 0.01\nadamw_weight_decay = 100"), @"a.toml:6: `optimizer.adamw_weight_decay` is 100, expected less than 1 / optimizer.adamw_learning_rate (100); a step takes off that share of a weight; 0.1 is usual");
    assert_snapshot!(error("[optimizer]\ntype = \"moun\""), @r#"a.toml:4: `optimizer.type` is "moun", expected "adamw" or "muon"; did you mean "muon"?"#);
}

#[test]
fn every_key_of_a_recipe_is_known() {
    let keys = known_keys();
    for key in ["prompts.eval_path", "sft.stop_at_reward", "loss.type", "loss.clip_eps_low", "model"] {
        assert!(keys.iter().any(|known| known == key), "{key}");
    }
}
