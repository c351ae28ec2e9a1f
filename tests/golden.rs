//! Golden cases found by folder: what every test of the model's numbers reads.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use rollout::model::checkpoint::load_weights;
use rollout::model::{CSA_RATIO, Difference, Extent, ModelConfig, Trace, Values, Weights, compare, first_beyond};
use safetensors::{Dtype, SafeTensors};

/// One folder with `config.json`, `model.safetensors` and recorded results.
pub struct Case {
    pub name: String,
    pub dir: PathBuf,
    pub config: ModelConfig,
    pub weights: Weights,
}

/// The folder that holds the cases: `FURLONG_GOLDEN_V4`, or `tests/golden/v4`.
fn root() -> PathBuf {
    std::env::var_os("FURLONG_GOLDEN_V4")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/v4"), PathBuf::from)
}

/// Every case under [`root`]; the copies here where a folder of one's own has none.
pub fn cases() -> Vec<Case> {
    let cases = cases_in(&root());
    if cases.is_empty() { copies() } else { cases }
}

/// The cases that lie beside the tests, whatever `FURLONG_GOLDEN_V4` says.
pub fn copies() -> Vec<Case> {
    let cases = cases_in(&Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/v4"));
    assert!(!cases.is_empty(), "no case with config.json beside the tests");
    cases
}

fn cases_in(root: &Path) -> Vec<Case> {
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(root)
        .unwrap_or_else(|e| panic!("cannot list {}: {e}", root.display()))
        .map(|entry| entry.expect("a folder can be listed").path())
        .filter(|dir| dir.join("config.json").is_file())
        .collect();
    dirs.sort();
    dirs.iter().map(|dir| case(dir)).collect()
}

fn case(dir: &Path) -> Case {
    let config = ModelConfig::load(&dir.join("config.json")).unwrap_or_else(|e| panic!("{e}"));
    let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let weights = load_weights(dir, &config).unwrap_or_else(|e| panic!("{e}"));
    Case { name, dir: dir.to_owned(), config, weights }
}

impl Case {
    /// What the script that made the case says of it.
    pub fn meta(&self) -> serde_json::Value {
        let path = self.dir.join("meta.json");
        let text = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        serde_json::from_slice(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    }

    /// The recorded files whose name starts with `prefix`.
    pub fn files(&self, prefix: &str) -> Vec<Recorded> {
        let mut paths: Vec<PathBuf> = std::fs::read_dir(&self.dir)
            .expect("a case's folder can be listed")
            .map(|entry| entry.expect("a folder can be listed").path())
            .filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
            .filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(prefix)))
            .collect();
        paths.sort();
        paths.iter().map(|path| Recorded::read(path)).collect()
    }
}

/// A file of recorded tensors.
pub struct Recorded {
    pub path: PathBuf,
    bytes: Vec<u8>,
}

impl Recorded {
    /// The file at `path`.
    pub fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Self { bytes, path: path.to_owned() }
    }

    /// The names of its tensors, in order.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.tensors().names().into_iter().map(str::to_owned).collect();
        names.sort();
        names
    }

    /// The bytes of a tensor of bytes.
    pub fn bytes(&self, name: &str) -> Vec<u8> {
        let file = self.tensors();
        let view = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(matches!(view.dtype(), Dtype::U8 | Dtype::I8), "{name}");
        view.data().to_vec()
    }

    fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).unwrap_or_else(|e| panic!("{}: {e}", self.path.display()))
    }

    /// A tensor of floats with its shape, if it was recorded and is one.
    pub fn f32(&self, name: &str) -> Option<(Vec<usize>, Vec<f32>)> {
        let file = self.tensors();
        let view = file.tensor(name).ok().filter(|view| view.dtype() == Dtype::F32)?;
        Some((view.shape().to_vec(), view.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()))
    }

    /// A tensor of integers with its shape, if it was recorded.
    pub fn i32(&self, name: &str) -> Option<(Vec<usize>, Vec<i32>)> {
        let file = self.tensors();
        let view = file.tensor(name).ok()?;
        assert_eq!(view.dtype(), Dtype::I32, "{name}");
        Some((view.shape().to_vec(), view.data().as_chunks().0.iter().map(|b| i32::from_le_bytes(*b)).collect()))
    }

    /// The token ids of the run, one row per sequence.
    pub fn input_ids(&self) -> Vec<Vec<u32>> {
        let (shape, ids) = self.i32("input_ids").expect("every run records input_ids");
        ids.chunks_exact(shape[1]).map(|row| row.iter().map(|&id| id as u32).collect()).collect()
    }
}

/// Absolute, in f32: logits and every op before them (v4/SPEC section 15).
pub const TOLERANCE: f32 = 2e-4;

/// Keys that are no op: inputs, and the run whose activations are rounded as in deployment, which neither forward does.
fn is_op(name: &str) -> bool {
    !["input_ids", "kept_positions"].contains(&name) && !name.starts_with("deploy.")
}

/// The parts of a case that no test compares, each with the reason.
const NOT_COMPARED: [(&str, &str); 7] = [
    ("case", "the folder's name"),
    ("params", "what the script was given; config.json says the same"),
    ("torch", "a version"),
    ("transformers", "a version"),
    ("margins", "how far the reference's choices are from falling otherwise; the choices are compared"),
    ("checks", "how far the reference is from itself"),
    ("files", "empty"),
];

/// Folders beside the cases, which have tests of their own.
const NO_CASES: [&str; 2] = ["formats", "text"];

#[test]
fn golden_v4_no_part_of_a_case_goes_unseen() {
    for dir in std::fs::read_dir(root()).expect("lists").map(|entry| entry.expect("lists").path()) {
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_known = NO_CASES.contains(&name.as_str()) || dir.join("config.json").is_file();
        assert!(is_known || !dir.is_dir(), "{}: neither a case, which has a config.json, nor known", dir.display());
    }
    for case in cases() {
        let meta = case.meta();
        for key in meta.as_object().expect("meta.json is an object").keys() {
            let is_read = ["grad_at", "no_gradient", "loss", "loss_mtp"].contains(&key.as_str());
            let is_listed = NOT_COMPARED.iter().any(|(name, _)| name == key);
            assert!(is_read || is_listed, "{}: no test looks at `{key}` of meta.json", case.name);
        }
        let names = crate::program::names_in(&case.dir);
        for name in &names {
            // Every key of these is compared, or the test that reads them fails.
            let is_read = match name.strip_suffix(".safetensors") {
                Some("model" | "grads") => true,
                Some("grads_with_mtp") => case.config.has_mtp(),
                Some(file) => {
                    let prefill = file.strip_prefix("cache_after_prefill_");
                    let decode = |len: &str| names.iter().any(|n| n.ends_with(&format!("_from_{len}.safetensors")));
                    file.starts_with("run_") || file.starts_with("decode_") || prefill.is_some_and(decode)
                }
                None => ["config.json", "meta.json"].contains(&name.as_str()),
            };
            assert!(is_read, "{}: no test looks at {name}", case.name);
        }
        let known: HashSet<String> = case.weights.keys().cloned().collect();
        for name in Recorded::read(&case.dir.join("model.safetensors")).names() {
            let weight = name.replace(".scale", ".weight");
            assert!(known.contains(&name) || known.contains(&weight), "{}: `{name}` is not loaded", case.name);
        }
    }
}

impl Recorded {
    /// Its name, for messages.
    pub fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Every op that was recorded, as a trace holds it.
    pub fn trace(&self) -> Trace {
        let mut trace = Trace::default();
        let len = self.input_ids()[0].len();
        for name in self.names().into_iter().filter(|name| is_op(name)) {
            if name.ends_with(".router.experts") || name.ends_with(".indexer.topk") {
                let (shape, slots) = self.i32(&name).expect("choices are integers");
                let width = shape[shape.len() - 1].max(1);
                trace.choices(name, slots.chunks_exact(width).map(chosen));
                continue;
            }
            let (shape, values) = self.f32(&name).unwrap_or_else(|| panic!("{name} holds no numbers"));
            let width = shape[shape.len() - 1];
            // Routers are recorded by row, `[B * L, ..]`, all else by sequence and position.
            let row = &shape[if name.contains(".router.") { 1 } else { 2 }..];
            let (row, values) = if let Some(layer) = name.strip_suffix(".router.weights") {
                // Recorded in the order in which the experts were chosen; told in that of the experts.
                let (_, experts) = self.i32(&format!("{layer}.router.experts")).expect("weights come with experts");
                let rows = values.chunks_exact(width).zip(experts.chunks_exact(width));
                let ordered = rows.flat_map(|(weights, experts)| {
                    let mut pairs: Vec<(i32, f32)> = experts.iter().copied().zip(weights.iter().copied()).collect();
                    pairs.sort_by_key(|(expert, _)| *expert);
                    pairs.into_iter().map(|(_, weight)| weight)
                });
                (row, ordered.collect())
            } else if name.ends_with(".indexer.scores") {
                // Of all blocks; a row may see those that are complete by its token.
                let rows = values.chunks_exact(width).enumerate();
                let seen = rows.flat_map(|(row, scores)| scores[..(row % len + 1) / CSA_RATIO].to_vec());
                (&[][..], seen.collect())
            } else {
                (row, values)
            };
            trace.numbers(name, row, values);
        }
        trace
    }

    /// What a `decode_*` file recorded: logits of the prefill's last token, of every step and of every chunk's last
    /// token, and the choices of every step.
    pub fn decode_trace(&self) -> Trace {
        let mut trace = Trace::default();
        for name in self.names() {
            if let Some((shape, values)) = self.f32(&name).filter(|_| name.ends_with("_logits")) {
                trace.numbers(name, &shape[2..], values);
            } else if name.contains(".router.") || name.contains(".indexer.") {
                let (shape, slots) = self.i32(&name).expect("choices are integers");
                trace.choices(name, slots.chunks_exact(shape[shape.len() - 1]).map(chosen));
            } else {
                assert!(["input_ids", "chunk_sizes"].contains(&name.as_str()), "{}: what is {name}?", self.name());
            }
        }
        trace
    }

    /// Of a trace of this run, what was recorded of it: long runs keep the streams of some positions only.
    fn kept(&self, got: Trace) -> Trace {
        let Some((_, kept)) = self.i32("kept_positions") else { return got };
        let sequences = self.input_ids();
        let (len, num_rows) = (sequences[0].len(), sequences.len() * sequences[0].len());
        let mut trace = Trace::default();
        for (name, values) in got.ops() {
            match values {
                Values::Numbers { shape, values } if name.starts_with("layers.") && name.ends_with(".streams_out") => {
                    let width = values.len() / num_rows;
                    let rows = (0..sequences.len()).flat_map(|b| kept.iter().map(move |&p| b * len + p as usize));
                    let kept = rows.flat_map(|row| &values[row * width..][..width]).copied().collect();
                    trace.numbers(name, &shape[1..], kept);
                }
                _ => trace.push(name, values.clone()),
            }
        }
        trace
    }

    /// Holds a forward pass over this run's sequences against what was recorded; the largest difference, in a line.
    ///
    /// # Panics
    /// With the first op that differs, in the order of computation.
    #[track_caller]
    pub fn check(&self, at: &str, got: Trace) -> String {
        let (got, want) = (self.kept(got), self.trace());
        check_traces(&format!("{at} {}", self.name()), &got, &want)
    }
}

/// Fails with the first op of `want` that `got` has otherwise; else the largest difference, in a line.
#[track_caller]
pub fn check_traces(at: &str, got: &Trace, want: &Trace) -> String {
    let differences = compare(got, want);
    assert!(!differences.is_empty(), "{at}: nothing was recorded");
    if let Some(first) = first_beyond(&differences, TOLERANCE) {
        let rest = differences.iter().filter(|d| !d.extent.is_within(TOLERANCE)).count() - 1;
        panic!("{at}: {first}; {rest} more ops of {} differ after it", differences.len());
    }
    let size = |d: &&Difference| match d.extent {
        Extent::Numbers { max_abs, .. } => max_abs,
        _ => 0.0,
    };
    let logits = differences.iter().filter(|d| d.name.ends_with("logits") && !d.name.contains("router"));
    let logits = logits.map(|d| size(&d)).fold(0.0, f32::max);
    let largest = differences.iter().max_by(|a, b| size(a).total_cmp(&size(b))).expect("there is one");
    format!(
        "{at:<44} {:>3} ops, logits {logits:.1e}, largest {:.1e} ({})",
        differences.len(),
        size(&largest),
        largest.name
    )
}

/// Prints a test's lines at once, so that those of another do not come between them.
pub fn print_table(lines: &[String]) {
    // The copies record everything; a folder of one's own may hold cases that do not.
    let is_own = std::env::var_os("FURLONG_GOLDEN_V4").is_some();
    assert!(is_own || !lines.is_empty(), "no case records any of this");
    println!("\n{}", if lines.is_empty() { "no case here records any of this".into() } else { lines.join("\n") });
}

/// The largest absolute difference.
pub fn max_abs_diff(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).fold(0.0, |m, (a, b)| m.max((a - b).abs()))
}

/// Slots of chosen indices as a set: order is not part of the choice, and negative or maximal slots are unused.
pub fn chosen<T: Copy + TryInto<u32>>(slots: &[T]) -> Vec<u32> {
    let mut set: Vec<u32> = slots.iter().filter_map(|&x| x.try_into().ok()).filter(|&x| x != u32::MAX).collect();
    set.sort_unstable();
    set
}
