//! `rollout convert` and the readers: every format and naming, codes carried, bad input, a kill.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use insta::assert_snapshot;
use rollout::convert::{Formats, Summary, Target, convert};
use rollout::model::checkpoint::{Checkpoint, Format, Layout, Naming, load_weights};
use rollout::model::{HostTensor, Model, ModelConfig, TensorData, Weights, to_engine_format};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::golden::{Case, cases, copies};

const RELEASE: Naming = Naming::Release;
const HUGGING_FACE: Naming = Naming::HuggingFace;

fn target(layout: Layout, naming: Naming) -> Target {
    Target { formats: Formats { layout, others: None }, naming, shard_bytes: 1 << 30 }
}

fn read(dir: &Path) -> Weights {
    let config = ModelConfig::load(&dir.join("config.json")).unwrap_or_else(|e| panic!("{e}"));
    load_weights(dir, &config).unwrap_or_else(|e| panic!("{e}"))
}

fn holds_codes(case: &Case) -> bool {
    case.config.other.contains_key("quantization_config")
}

/// A case that holds codes.
fn quantised() -> Case {
    copies().into_iter().find(holds_codes).expect("a case with codes")
}

#[test]
fn golden_v4_every_format_and_naming_holds_the_same_model() {
    for case in cases() {
        let home = tempfile::tempdir().expect("a folder");
        let to = |name: &str| home.path().join(name);
        // In f32, under either name, in one file or many: the same values.
        let f32 = convert(&case.dir, &to("f32"), target(Layout::F32, RELEASE)).expect("converts");
        assert_eq!(f32.rounded, 0, "{}", case.name);
        convert(&to("f32"), &to("stacked"), target(Layout::F32, HUGGING_FACE)).expect("converts");
        let shards = Target { shard_bytes: f32.num_bytes / 3, ..target(Layout::F32, RELEASE) };
        convert(&to("stacked"), &to("shards"), shards).expect("converts");
        assert!(to("shards").join("model.safetensors.index.json").is_file());
        for name in ["f32", "stacked", "shards"] {
            assert!(read(&to(name)) == case.weights, "{}: {name}", case.name);
        }
        // In 16 bits and 8, read back: what those bits can hold, and again the same codes when carried.
        for layout in [Layout::Bf16, Layout::Fp8] {
            let name = layout.to_string();
            convert(&case.dir, &to(&name), target(layout, RELEASE)).expect("converts");
            let again =
                convert(&to(&name), &to(&format!("{name}-again")), target(layout, HUGGING_FACE)).expect("converts");
            assert_eq!((again.exact, again.rounded), (0, 0), "{} {name}", case.name);
            assert!(read(&to(&name)) == read(&to(&format!("{name}-again"))), "{} {name}", case.name);
            for (parameter, tensor) in read(&to(&name)) {
                let HostTensor { data: TensorData::F32(values), .. } = &tensor else { continue };
                let want = case.weights[&parameter].clone().into_format(layout.format(&parameter)).into_f32();
                assert!(values == want.as_f32(), "{} {name} {parameter}", case.name);
            }
        }
    }
}

#[test]
fn golden_v4_codes_go_through_every_format_unharmed() {
    // Of a folder of one's own, and always of the copy here.
    cases().into_iter().filter(holds_codes).chain([quantised()]).for_each(check_codes);
}

fn check_codes(case: Case) {
    let home = tempfile::tempdir().expect("a folder");
    let to = |name: &str| home.path().join(name);
    let carried = convert(&case.dir, &to("mxfp4"), target(Layout::Mxfp4, RELEASE)).expect("converts");
    assert_eq!((carried.exact, carried.rounded), (0, 0));
    let tensors = |dir: &Path| std::fs::read(dir.join("model.safetensors")).expect("reads");
    // Every tensor of the source, byte for byte.
    let (before, after) = (tensors(&case.dir), tensors(&to("mxfp4")));
    let (before, after) = (SafeTensors::deserialize(&before).unwrap(), SafeTensors::deserialize(&after).unwrap());
    assert_eq!(before.len(), after.len());
    for (name, view) in before.iter() {
        let copy = after.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!((view.dtype(), view.shape(), view.data()), (copy.dtype(), copy.shape(), copy.data()), "{name}");
    }
    // FP4 is held by FP8, by bf16 and by f32 exactly, and comes back.
    for layout in [Layout::Fp8, Layout::Bf16, Layout::F32] {
        let name = layout.to_string();
        let there = convert(&case.dir, &to(&name), target(layout, RELEASE)).expect("converts");
        assert_eq!(there.rounded, 0, "{name}");
        let back = convert(&to(&name), &to(&format!("{name}-back")), target(Layout::Mxfp4, RELEASE)).expect("converts");
        assert_eq!(back.rounded, 0, "{name}");
        assert!(read(&to(&format!("{name}-back"))) == case.weights, "{name}");
    }
}

#[test]
fn golden_v4_the_engine_loads_tensor_by_tensor_what_it_loads_whole() {
    for case in cases() {
        let streamed = Model::load(&case.dir, &case.config).unwrap_or_else(|e| panic!("{e}")).export();
        let whole = to_engine_format(&case.config, case.weights.clone());
        assert_eq!(streamed.len(), whole.len());
        for (name, tensor) in streamed {
            let want = &whole[&name];
            // What the files hold in bf16 or FP8 stays so; the case's own weights are plain values.
            let codes = |tensor: &HostTensor| tensor.data.format() == Format::Mxfp4;
            assert_eq!(codes(&tensor), codes(want), "{name}");
            // Codes may spell one value in two ways.
            assert!(tensor.into_f32() == want.clone().into_f32(), "{}: {name}", case.name);
        }
    }
}

#[test]
fn experts_alone_in_four_bits_leave_the_rest_exact() {
    let source = crate::program::root().join("recipes/quickstart_base");
    let home = tempfile::tempdir().expect("a folder");
    let to = home.path().join("fp4");
    let experts_only = Target {
        formats: Formats { layout: Layout::Mxfp4, others: Some(Format::F32) },
        ..target(Layout::Mxfp4, RELEASE)
    };
    let Summary { rounded, .. } = convert(&source, &to, experts_only).expect("converts");
    let config = ModelConfig::load(&to.join("config.json")).expect("a configuration");
    assert!(config.experts_are_fp4());
    assert_eq!(rounded, config.num_hidden_layers * config.n_routed_experts * 3);
    assert!(to.join("tokenizer.json").is_file());
    // What the engine made of the masters at load, the file now holds.
    let masters = Model::load(&source, &config).expect("loads").export();
    assert!(Model::load(&to, &config).expect("loads").export() == masters);
}

/// Writes `tensors` in place of a copied checkpoint's.
fn rewrite(
    case: &Case,
    change: impl Fn(&str, TensorView<'_>) -> Option<(String, Dtype, Vec<usize>, Vec<u8>)>,
) -> tempfile::TempDir {
    let home = tempfile::tempdir().expect("a folder");
    std::fs::copy(case.dir.join("config.json"), home.path().join("config.json")).expect("copies");
    let bytes = std::fs::read(case.dir.join("model.safetensors")).expect("reads");
    let source = SafeTensors::deserialize(&bytes).expect("a file");
    let tensors: Vec<_> = source.iter().filter_map(|(name, view)| change(name, view)).collect();
    let views =
        tensors.iter().map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    std::fs::write(home.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap())
        .expect("writes");
    home
}

fn same(name: &str, view: TensorView<'_>) -> Option<(String, Dtype, Vec<usize>, Vec<u8>)> {
    Some((name.to_owned(), view.dtype(), view.shape().to_vec(), view.data().to_vec()))
}

#[test]
fn scales_that_other_writers_left_in_f32_are_read() {
    let case = quantised();
    let as_f32 = |name: &str, view: TensorView<'_>| match view.dtype() {
        Dtype::F8_E8M0 => {
            let data = view.data().iter().flat_map(|&byte| kernels::quant::e8m0_value(byte).to_le_bytes()).collect();
            Some((name.to_owned(), Dtype::F32, view.shape().to_vec(), data))
        }
        _ => same(name, view),
    };
    let home = rewrite(&case, as_f32);
    assert!(read(home.path()) == case.weights);
    let checkpoint = Checkpoint::open(home.path()).expect("opens");
    assert_eq!(checkpoint.format("layers.0.attn.wkv.weight"), Some(Format::Fp8));
    assert_eq!(checkpoint.format("layers.0.ffn.experts.0.w1.weight"), Some(Format::Mxfp4));
}

/// The error of reading `dir` as the configuration of `case` says.
fn refusal(case: &Case, dir: &Path) -> String {
    let error = load_weights(dir, &case.config).expect_err("is refused");
    error.to_string().replace(&*dir.to_string_lossy(), "model")
}

#[test]
fn codes_that_stand_for_no_number_are_refused() {
    let case = quantised();
    let spoil = |tensor: &'static str, value: u8| {
        let home = rewrite(&case, |name, view| {
            let (name, dtype, shape, mut data) = same(name, view)?;
            if name == tensor {
                data[1] = value;
            }
            Some((name, dtype, shape, data))
        });
        refusal(&case, home.path())
    };
    assert_snapshot!(spoil("layers.0.attn.wkv.weight", 0x7f), @"model/model.safetensors: tensor `layers.0.attn.wkv.weight` holds 127 at element 1; expected an e4m3 code of a number; take an earlier checkpoint");
    assert_snapshot!(spoil("layers.0.attn.wkv.scale", 255), @"model/model.safetensors: tensor `layers.0.attn.wkv.scale` holds 255 at element 1; expected an e8m0 scale of at most 2^119; take an earlier checkpoint");
    assert_snapshot!(spoil("layers.1.ffn.experts.0.w1.scale", 253), @"model/model.safetensors: tensor `layers.1.ffn.experts.0.w1.scale` holds 253 at element 1; expected an e8m0 scale of at most 2^125; take an earlier checkpoint");
    let without = |tensor: &'static str| {
        let home = rewrite(&case, |name, view| if name == tensor { None } else { same(name, view) });
        refusal(&case, home.path())
    };
    assert_snapshot!(without("layers.0.attn.wkv.scale"), @"model/model.safetensors: tensor `layers.0.attn.wkv.scale` is missing; its weight's codes ask for it with shape [1, 2]; copy the file again or correct config.json");
}

#[test]
fn experts_are_not_cut_out_of_a_stack_of_another_shape() {
    let case = cases().into_iter().next().expect("a case");
    let home = tempfile::tempdir().expect("a folder");
    let stacked = home.path().join("stacked");
    convert(&case.dir, &stacked, target(Layout::F32, HUGGING_FACE)).expect("converts");
    let case = Case { dir: stacked, ..case };
    let with = |change: &dyn Fn(&mut Vec<usize>)| {
        let home = rewrite(&case, |name, view| {
            let (name, dtype, mut shape, mut data) = same(name, view)?;
            if name == "model.layers.0.mlp.experts.gate_up_proj" {
                change(&mut shape);
                data.resize(shape.iter().product::<usize>() * 4, 0);
            }
            Some((name, dtype, shape, data))
        });
        refusal(&case, home.path())
    };
    let config = &case.config;
    let expected = [config.n_routed_experts, 2 * config.moe_intermediate_size, config.hidden_size];
    for change in [|s: &mut Vec<usize>| s[0] += 1, |s: &mut Vec<usize>| s[0] -= 1, |s: &mut Vec<usize>| s[1] += 1] {
        let said = with(&change);
        assert!(said.contains("gate_up_proj` has shape [") && said.contains(&format!("says {expected:?}")), "{said}");
    }
}

#[test]
fn one_parameter_under_two_names_is_refused() {
    let case = cases().into_iter().next().expect("a case");
    let home = tempfile::tempdir().expect("a folder");
    std::fs::copy(case.dir.join("config.json"), home.path().join("config.json")).expect("copies");
    let mut weights = case.weights.clone();
    weights.insert("model.norm.weight".into(), weights["norm.weight"].clone());
    rollout::model::checkpoint::save_weights(&home.path().join("model.safetensors"), &weights).expect("writes");
    let said = refusal(&case, home.path());
    assert!(said.contains("are the same parameter in two namings; remove one"), "{said}");
    assert!(said.contains("`model.norm.weight`") && said.contains("`norm.weight`"), "{said}");
}

#[test]
fn values_beyond_a_format_are_refused_before_anything_is_there() {
    let source = crate::program::root().join("recipes/quickstart_base");
    let config = ModelConfig::load(&source.join("config.json")).expect("a configuration");
    let home = tempfile::tempdir().expect("a folder");
    let from = home.path().join("from");
    std::fs::create_dir(&from).expect("makes");
    std::fs::copy(source.join("config.json"), from.join("config.json")).expect("copies");
    let mut weights = load_weights(&source, &config).expect("weights");
    let tensor = weights.get_mut("layers.0.attn.wq_a.weight").expect("a matrix");
    let TensorData::F32(values) = &mut tensor.data else { panic!("plain values") };
    values[5] = 3.4e38;
    rollout::model::checkpoint::save_weights(&from.join("model.safetensors"), &weights).expect("writes");
    for layout in [Layout::Bf16, Layout::Fp8] {
        let to = home.path().join("to");
        let error = convert(&from, &to, target(layout, RELEASE)).expect_err("is refused").to_string();
        assert_eq!(
            error,
            format!(
                "tensor `layers.0.attn.wq_a.weight` holds values near the end of f32's range, for which {layout} has no \
                 room; convert to f32"
            )
        );
        assert_eq!(crate::program::names_in(home.path()).into_iter().collect::<Vec<_>>(), ["from"]);
    }
}

#[test]
fn a_source_is_never_taken_for_a_leftover() {
    let home = tempfile::tempdir().expect("a folder");
    // Named as what a killed conversion to `to` leaves; no process has this number.
    let from = home.path().join(".to.partial-4194304");
    std::fs::create_dir(&from).expect("makes");
    let base = crate::program::root().join("recipes/quickstart_base");
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(base.join(name), from.join(name)).expect("copies");
    }
    let other = home.path().join(".to.partial-4194303");
    std::fs::create_dir(&other).expect("makes");
    let kept = home.path().join(".to.partial");
    std::fs::create_dir(&kept).expect("makes");
    convert(&from, &home.path().join("to"), target(Layout::F32, RELEASE)).expect("converts");
    assert!(from.join("model.safetensors").is_file() && home.path().join("to/tokenizer.json").is_file());
    assert!(kept.is_dir() && !other.exists());
}

#[test]
fn shards_that_do_not_belong_together_are_refused() {
    let case = quantised();
    let home = tempfile::tempdir().expect("a folder");
    let dir = home.path().join("model");
    let shards = Target { shard_bytes: 1_000_000, ..target(Layout::Mxfp4, RELEASE) };
    convert(&case.dir, &dir, shards).expect("converts");
    let index = dir.join("model.safetensors.index.json");
    let text = std::fs::read_to_string(&index).expect("reads");
    let mut shards: Vec<PathBuf> = std::fs::read_dir(&dir)
        .expect("lists")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    shards.sort();
    assert!(shards.len() > 3, "{shards:?}");
    // An index that names a file outside, or a tensor where it is not.
    std::fs::write(&index, text.replacen("model-00001", "../model-00001", 1)).expect("writes");
    assert!(refusal(&case, &dir).contains("which is no file of this folder; copy the folder again"));
    let swapped = text.replacen("\"embed.weight\": \"model-00001", "\"embed.weight\": \"model-00002", 1);
    std::fs::write(&index, swapped).expect("writes");
    assert!(refusal(&case, &dir).contains("`embed.weight` is said to lie in model-00002"), "{}", refusal(&case, &dir));
    std::fs::write(&index, &text[..text.len() / 2]).expect("writes");
    assert!(refusal(&case, &dir).starts_with("model/model.safetensors.index.json: "));
    // A shard cut short, then gone.
    std::fs::write(&index, &text).expect("writes");
    let bytes = std::fs::read(&shards[1]).expect("reads");
    std::fs::write(&shards[1], &bytes[..bytes.len() - 1]).expect("writes");
    assert!(refusal(&case, &dir).contains("damaged or not a safetensors file"));
    std::fs::remove_file(&shards[1]).expect("removes");
    assert!(refusal(&case, &dir).contains("cannot read model/model-00002"));
}

/// The `rollout` program that this build made.
fn rollout() -> Command {
    Command::new(env!("CARGO_BIN_EXE_rollout-under-test"))
}

#[test]
fn a_conversion_is_there_whole_or_not_at_all() {
    let source = crate::program::root().join("recipes/quickstart_base");
    let home = tempfile::tempdir().expect("a folder");
    let to = home.path().join("to");
    let command = || {
        let mut command = rollout();
        command.arg("convert").arg(&source).arg(&to).args(["--to", "fp8", "--shard-mb", "1"]);
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        command
    };
    // Killed at whatever moment: the destination is not there, and the next attempt is not hindered.
    for wait_ms in [1, 5, 10, 20, 40] {
        let mut child = command().spawn().expect("starts");
        std::thread::sleep(std::time::Duration::from_millis(wait_ms));
        child.kill().expect("kills");
        child.wait().expect("ends");
        if to.exists() {
            read(&to);
            std::fs::remove_dir_all(&to).expect("removes");
        }
    }
    assert!(command().status().expect("runs").success());
    read(&to);
    let again = command().output().expect("runs");
    assert_eq!(again.status.code(), Some(2));
    let said = String::from_utf8_lossy(&again.stderr).replace(&*home.path().to_string_lossy(), "home");
    assert_snapshot!(said, @"error: home/to: already there; name a folder that is not, or remove this one");
}
