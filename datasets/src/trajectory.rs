//! Every trajectory of a step as one Parquet file, for people, for plots and for later tools.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::builder::{
    ArrayBuilder, Float32Builder, Float64Builder, LargeBinaryBuilder, ListBuilder, MapBuilder, MapFieldNames,
    PrimitiveBuilder, StringBuilder, UInt32Builder, UInt64Builder,
};
use arrow_array::cast::AsArray;
use arrow_array::types::{ArrowPrimitiveType, Float32Type, Float64Type, UInt32Type, UInt64Type};
use arrow_array::{Array, ArrayRef, PrimitiveArray, RecordBatch, StringArray};
use arrow_schema::{ArrowError, DataType, Field, FieldRef, Schema, SchemaRef};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::basic::Compression;
use parquet::errors::ParquetError;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::schema::types::ColumnPath;

use crate::guard::catch_panic;
use crate::{FinishReason, Group, Rollout, RoutingChoices, Verdict};

/// What the trainer knows of a rollout, beside what the rollout says of itself.
#[derive(Clone, Debug, PartialEq)]
pub struct TrajectoryExtra {
    /// The rollout's advantage.
    pub advantage: f32,
    /// The trainer's log-probability of each response token before the step; empty if it did not compute them.
    pub trainer_logprobs: Vec<f32>,
}

/// One row of a trajectory file. The fields are the columns that [`write_trajectories`] describes.
#[derive(Clone, Debug, PartialEq)]
pub struct TrajectoryRow {
    /// The training step.
    pub step: u64,
    /// The group.
    pub group_id: u64,
    /// The rollout.
    pub rollout_id: u64,
    /// [`crate::Prompt::row`].
    pub prompt_row: u64,
    /// The question.
    pub prompt: String,
    /// The model's response.
    pub response: String,
    /// The reference answer.
    pub answer: String,
    /// The prompt as the model read it.
    pub prompt_tokens: Vec<u32>,
    /// The sampled tokens.
    pub response_tokens: Vec<u32>,
    /// The engine's log-probabilities of the response tokens.
    pub rollout_logprobs: Vec<f32>,
    /// The trainer's log-probabilities of the same.
    pub trainer_logprobs: Option<Vec<f32>>,
    /// The version of the weights that made each response token.
    pub weight_versions: Vec<u64>,
    /// The rollout's advantage.
    pub advantage: Option<f32>,
    /// The score, none where there is no verdict or it is [`Verdict::Unscorable`].
    pub reward: Option<f64>,
    /// What the reward concluded.
    pub verdict: Option<Verdict>,
    /// The named parts of the reward; empty without one.
    pub reward_parts: BTreeMap<String, f64>,
    /// Why the rollout ended.
    pub finish_reason: FinishReason,
    /// The experts of each token.
    pub routing: RoutingChoices,
}

/// Why trajectories were not written or read.
#[derive(Debug, thiserror::Error)]
pub enum TrajectoryError {
    /// The disk, or the user's share of it, is full.
    #[error("{}: no room left on the disk for the trajectories of step {step}, and nothing half-written was kept; free some space", path.display())]
    DiskFull {
        /// The file that was to be.
        path: PathBuf,
        /// The step.
        step: u64,
    },
    /// The file could not be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The Parquet writer refused the data.
    #[error("cannot encode {} as Parquet", path.display())]
    Encode {
        /// The file.
        path: PathBuf,
        /// What it said.
        #[source]
        source: ParquetError,
    },
    /// The file could not be opened.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The file is not Parquet, or is damaged.
    #[error("cannot read {} as Parquet", path.display())]
    Decode {
        /// The file.
        path: PathBuf,
        /// What the Parquet reader said.
        #[source]
        source: ParquetError,
    },
    /// The file is Parquet, but not a trajectory file.
    #[error("{}: column `{column}` {found}, expected {expected}; trajectory files are those under a run's `rollouts/`", path.display())]
    Column {
        /// The file.
        path: PathBuf,
        /// The column.
        column: &'static str,
        /// Its type or value, or that it is missing.
        found: String,
        /// What trajectory files hold there.
        expected: String,
    },
}

/// The Arrow schema of a trajectory file, as [`write_trajectories`] describes it.
pub fn trajectory_schema() -> SchemaRef {
    let list = |item: DataType| DataType::List(list_item(item));
    let parts = DataType::Struct(vec![map_key(), map_value()].into());
    let parts = DataType::Map(Arc::new(Field::new("key_value", parts, false)), false);
    Arc::new(Schema::new(vec![
        Field::new("step", DataType::UInt64, false),
        Field::new("group_id", DataType::UInt64, false),
        Field::new("rollout_id", DataType::UInt64, false),
        Field::new("prompt_row", DataType::UInt64, false),
        Field::new("prompt", DataType::Utf8, false),
        Field::new("response", DataType::Utf8, false),
        Field::new("answer", DataType::Utf8, false),
        Field::new("prompt_tokens", list(DataType::UInt32), false),
        Field::new("response_tokens", list(DataType::UInt32), false),
        Field::new("rollout_logprobs", list(DataType::Float32), false),
        Field::new("trainer_logprobs", list(DataType::Float32), true),
        Field::new("weight_versions", list(DataType::UInt64), false),
        Field::new("advantage", DataType::Float32, true),
        Field::new("reward", DataType::Float64, true),
        Field::new("verdict", DataType::Utf8, true),
        Field::new("reward_parts", parts, true),
        Field::new("finish_reason", DataType::Utf8, false),
        Field::new("num_layers", DataType::UInt32, false),
        Field::new("num_experts_per_token", DataType::UInt32, false),
        Field::new("expert_idx", DataType::LargeBinary, false),
    ]))
}

/// Parquet's own names for the insides of lists and maps; Arrow's would make other readers complain.
fn list_item(item: DataType) -> FieldRef {
    Arc::new(Field::new("element", item, false))
}

fn map_key() -> FieldRef {
    Arc::new(Field::new("key", DataType::Utf8, false))
}

fn map_value() -> FieldRef {
    Arc::new(Field::new("value", DataType::Float64, false))
}

/// Writes every rollout of a step, one row each, in the order of `groups`.
///
/// `extra`, if given, has one entry per rollout in the same order.
///
/// | column                  | type                 | holds                                                          |
/// |-------------------------|----------------------|----------------------------------------------------------------|
/// | `step`                  | uint64               | the training step                                              |
/// | `group_id`              | uint64               | the group, unique within a run                                 |
/// | `rollout_id`            | uint64               | the rollout, unique within a run                               |
/// | `prompt_row`            | uint64               | [`crate::Prompt::row`]: the row of the data set                |
/// | `prompt`                | string               | the question, before any template                              |
/// | `response`              | string               | the response, without the end-of-sequence token                |
/// | `answer`                | string               | the reference answer                                           |
/// | `prompt_tokens`         | list\<uint32\>       | the prompt as the model read it                                |
/// | `response_tokens`       | list\<uint32\>       | the sampled tokens, the end-of-sequence token included         |
/// | `rollout_logprobs`      | list\<float32\>      | the engine's, one per response token                           |
/// | `trainer_logprobs`      | list\<float32\>?     | the trainer's, one per response token; null if not computed    |
/// | `weight_versions`       | list\<uint64\>       | the version of the weights that made each response token       |
/// | `advantage`             | float32?             | the rollout's advantage; null without `extra`                  |
/// | `reward`                | float64?             | the score; null if not scored or `unscorable`, so that no mean counts it as 0 |
/// | `verdict`               | string?              | `right`, `wrong` or `unscorable`; null if not scored           |
/// | `reward_parts`          | map\<string, float64\>? | the named parts of the reward; null if not scored           |
/// | `finish_reason`         | string               | `stop` or `length`                                             |
/// | `num_layers`            | uint32               | layers in `expert_idx`; 0 if no experts were recorded          |
/// | `num_experts_per_token` | uint32               | experts per token and layer, `K`                               |
/// | `expert_idx`            | binary               | `[T, num_layers, K]` as little-endian uint16, row-major        |
///
/// A `?` marks a column that may be null. In numpy the experts are `np.frombuffer(expert_idx, "<u2").reshape(-1,
/// num_layers, num_experts_per_token)`. Indexer selections are not written: they are hundreds of numbers per token and
/// layer. The file is compressed with Zstandard, and rows are cut into row groups of about 32 MiB.
///
/// The file appears whole or not at all: it is written as `.<name>.partial` beside its place, synced to the disk, then
/// renamed. The folder is made if it does not exist; an existing file of that name is replaced.
///
/// # Errors
/// [`TrajectoryError::DiskFull`] if there is no room, [`TrajectoryError::Write`] for anything else that the system
/// refuses. The temporary file is removed and an existing file stays as it was.
///
/// # Panics
/// If a rollout's logprobs or weight versions are not one per response token, or `extra` not one per rollout.
pub fn write_trajectories(
    path: &Path,
    step: u64,
    groups: &[Group],
    extra: Option<&[TrajectoryExtra]>,
) -> Result<(), TrajectoryError> {
    let num_rollouts: usize = groups.iter().map(|group| group.rollouts.len()).sum();
    if let Some(extra) = extra {
        assert_eq!(extra.len(), num_rollouts, "step {step}: extra values for rollouts");
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".{name}.partial"));

    let written = write_beside(path, &temporary, step, groups, extra);
    written.map_err(|source| {
        // Best effort: the folder itself may be what is broken, and the first error is the one to tell.
        let _ = fs::remove_file(&temporary);
        let path = path.to_owned();
        match into_io_error(source) {
            Ok(source) if matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => {
                TrajectoryError::DiskFull { path, step }
            }
            Ok(source) => TrajectoryError::Write { path, source },
            Err(source) => TrajectoryError::Encode { path, source },
        }
    })
}

/// The system's error inside a Parquet error, if that is what it is.
fn into_io_error(error: ParquetError) -> Result<io::Error, ParquetError> {
    let is_io = |error: &(dyn Error + Send + Sync + 'static)| error.is::<io::Error>();
    match error {
        ParquetError::External(inner) if is_io(inner.as_ref()) => {
            inner.downcast().map(|inner| *inner).map_err(ParquetError::External)
        }
        other => Err(other),
    }
}

fn write_beside(
    path: &Path,
    temporary: &Path,
    step: u64,
    groups: &[Group],
    extra: Option<&[TrajectoryExtra]>,
) -> Result<(), ParquetError> {
    /// A batch may not grow with the length of the responses: a step of long ones is gigabytes of `expert_idx`.
    const BATCH_BYTES: usize = 1 << 20;
    const ROW_GROUP_BYTES: usize = 32 << 20;

    // The folder of a bare file name is the empty path.
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;

    let experts = ColumnPath::from("expert_idx");
    let properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(Default::default()))
        // No two rollouts choose alike, and the least and greatest bytes say nothing.
        .set_column_dictionary_enabled(experts.clone(), false)
        .set_column_statistics_enabled(experts, EnabledStatistics::None)
        .build();
    let file = File::create(temporary)?;
    let mut writer = ArrowWriter::try_new(file, trajectory_schema(), Some(properties))?;
    let mut columns = Columns::new();
    let mut rollout_idx = 0;
    for group in groups {
        for rollout in &group.rollouts {
            columns.append(step, group, rollout, extra.map(|extra| &extra[rollout_idx]))?;
            rollout_idx += 1;
            if columns.num_bytes >= BATCH_BYTES {
                writer.write(&columns.finish()?)?;
            }
            if writer.in_progress_size() >= ROW_GROUP_BYTES {
                writer.flush()?;
            }
        }
    }
    writer.write(&columns.finish()?)?;
    // `finish` flushes; `into_inner` would too, but makes text of the system's error.
    writer.finish()?;
    writer.inner().sync_all()?;
    fs::rename(temporary, path)?;
    // The rename itself is on the disk only once the folder is.
    #[cfg(unix)]
    File::open(folder)?.sync_all()?;
    Ok(())
}

/// The columns of a batch while it grows, in the order of the schema.
struct Columns {
    /// About how large the batch is.
    num_bytes: usize,
    step: UInt64Builder,
    group_id: UInt64Builder,
    rollout_id: UInt64Builder,
    prompt_row: UInt64Builder,
    prompt: StringBuilder,
    response: StringBuilder,
    answer: StringBuilder,
    prompt_tokens: ListBuilder<UInt32Builder>,
    response_tokens: ListBuilder<UInt32Builder>,
    rollout_logprobs: ListBuilder<Float32Builder>,
    trainer_logprobs: ListBuilder<Float32Builder>,
    weight_versions: ListBuilder<UInt64Builder>,
    advantage: Float32Builder,
    reward: Float64Builder,
    verdict: StringBuilder,
    reward_parts: MapBuilder<StringBuilder, Float64Builder>,
    finish_reason: StringBuilder,
    num_layers: UInt32Builder,
    num_experts_per_token: UInt32Builder,
    expert_idx: LargeBinaryBuilder,
}

fn list_builder<T: ArrowPrimitiveType>() -> ListBuilder<PrimitiveBuilder<T>> {
    ListBuilder::new(PrimitiveBuilder::new()).with_field(list_item(T::DATA_TYPE))
}

fn append_list<T: ArrowPrimitiveType>(builder: &mut ListBuilder<PrimitiveBuilder<T>>, values: &[T::Native]) {
    builder.values().append_slice(values);
    builder.append(true);
}

impl Columns {
    fn new() -> Self {
        let names = MapFieldNames { entry: "key_value".into(), key: "key".into(), value: "value".into() };
        let reward_parts = MapBuilder::new(Some(names), StringBuilder::new(), Float64Builder::new())
            .with_keys_field(map_key())
            .with_values_field(map_value());
        Self {
            num_bytes: 0,
            step: UInt64Builder::new(),
            group_id: UInt64Builder::new(),
            rollout_id: UInt64Builder::new(),
            prompt_row: UInt64Builder::new(),
            prompt: StringBuilder::new(),
            response: StringBuilder::new(),
            answer: StringBuilder::new(),
            prompt_tokens: list_builder(),
            response_tokens: list_builder(),
            rollout_logprobs: list_builder(),
            trainer_logprobs: list_builder(),
            weight_versions: list_builder(),
            advantage: Float32Builder::new(),
            reward: Float64Builder::new(),
            verdict: StringBuilder::new(),
            reward_parts,
            finish_reason: StringBuilder::new(),
            num_layers: UInt32Builder::new(),
            num_experts_per_token: UInt32Builder::new(),
            expert_idx: LargeBinaryBuilder::new(),
        }
    }

    fn append(
        &mut self,
        step: u64,
        group: &Group,
        rollout: &Rollout,
        extra: Option<&TrajectoryExtra>,
    ) -> Result<(), ArrowError> {
        let (id, num_tokens) = (rollout.rollout_id, rollout.response_tokens.len());
        assert_eq!(rollout.rollout_logprobs.len(), num_tokens, "rollout {id}: logprobs for response tokens");
        assert_eq!(rollout.weight_versions.len(), num_tokens, "rollout {id}: weight versions for response tokens");
        let trainer_logprobs = extra.map(|extra| extra.trainer_logprobs.as_slice()).filter(|l| !l.is_empty());
        if let Some(trainer_logprobs) = trainer_logprobs {
            assert_eq!(trainer_logprobs.len(), num_tokens, "rollout {id}: trainer logprobs for response tokens");
        }

        let prompt = &group.prompt;
        self.step.append_value(step);
        self.group_id.append_value(group.group_id);
        self.rollout_id.append_value(id);
        self.prompt_row.append_value(prompt.row as u64);
        self.prompt.append_value(&prompt.text);
        self.response.append_value(&rollout.response_text);
        self.answer.append_value(&prompt.answer);
        append_list(&mut self.prompt_tokens, &group.prompt_tokens);
        append_list(&mut self.response_tokens, &rollout.response_tokens);
        append_list(&mut self.rollout_logprobs, &rollout.rollout_logprobs);
        match trainer_logprobs {
            Some(trainer_logprobs) => append_list(&mut self.trainer_logprobs, trainer_logprobs),
            None => self.trainer_logprobs.append(false),
        }
        append_list(&mut self.weight_versions, &rollout.weight_versions);
        self.advantage.append_option(extra.map(|extra| extra.advantage));

        let reward = rollout.reward.as_ref();
        let scored = reward.filter(|reward| reward.verdict != Verdict::Unscorable);
        self.reward.append_option(scored.map(|reward| reward.score));
        self.verdict.append_option(reward.map(|reward| verdict_name(reward.verdict)));
        for (name, value) in reward.iter().flat_map(|reward| &reward.parts) {
            self.reward_parts.keys().append_value(name);
            self.reward_parts.values().append_value(*value);
        }
        self.reward_parts.append(reward.is_some())?;
        self.finish_reason.append_value(finish_reason_name(rollout.finish_reason));

        let routing = &rollout.routing;
        let expert_bytes: Vec<u8> = routing.expert_idx.iter().flat_map(|idx| idx.to_le_bytes()).collect();
        self.num_layers.append_value(routing.num_layers as u32);
        self.num_experts_per_token.append_value(routing.num_experts_per_token as u32);
        self.expert_idx.append_value(&expert_bytes);

        let num_text = prompt.text.len() + prompt.answer.len() + rollout.response_text.len();
        // A response token has an id, two logprobs and a version.
        self.num_bytes += num_text + 4 * group.prompt_tokens.len() + 20 * num_tokens + expert_bytes.len();
        Ok(())
    }

    /// The batch; the columns are empty afterwards.
    fn finish(&mut self) -> Result<RecordBatch, ArrowError> {
        self.num_bytes = 0;
        let columns: [&mut dyn ArrayBuilder; 20] = [
            &mut self.step,
            &mut self.group_id,
            &mut self.rollout_id,
            &mut self.prompt_row,
            &mut self.prompt,
            &mut self.response,
            &mut self.answer,
            &mut self.prompt_tokens,
            &mut self.response_tokens,
            &mut self.rollout_logprobs,
            &mut self.trainer_logprobs,
            &mut self.weight_versions,
            &mut self.advantage,
            &mut self.reward,
            &mut self.verdict,
            &mut self.reward_parts,
            &mut self.finish_reason,
            &mut self.num_layers,
            &mut self.num_experts_per_token,
            &mut self.expert_idx,
        ];
        RecordBatch::try_new(trajectory_schema(), columns.into_iter().map(|column| column.finish()).collect())
    }
}

fn verdict_name(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Right => "right",
        Verdict::Wrong => "wrong",
        Verdict::Unscorable => "unscorable",
    }
}

fn finish_reason_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}

/// Reads a file that [`write_trajectories`] wrote, its rows in the order of writing. Columns beyond the schema are passed
/// over, so that later versions may add some.
///
/// # Errors
/// A sentence if the file cannot be read, is not Parquet, or its columns are not those of a trajectory file.
pub fn read_trajectories(path: &Path) -> Result<Vec<TrajectoryRow>, TrajectoryError> {
    let decode = |source| TrajectoryError::Decode { path: path.to_owned(), source };
    catch_panic(|| read_file(path), decode)
}

fn read_file(path: &Path) -> Result<Vec<TrajectoryRow>, TrajectoryError> {
    let decode = |source: ParquetError| match into_io_error(source) {
        Ok(source) => TrajectoryError::Read { path: path.to_owned(), source },
        Err(source) => TrajectoryError::Decode { path: path.to_owned(), source },
    };
    let file = File::open(path).map_err(|source| TrajectoryError::Read { path: path.to_owned(), source })?;
    let reader = ParquetRecordBatchReaderBuilder::try_new(file).map_err(decode)?;
    // A row can be megabytes: the default of 1024 of them is too much at once.
    let reader = reader.with_batch_size(64).build().map_err(decode)?;
    let mut rows = Vec::new();
    for batch in reader {
        let batch = batch.map_err(|error| decode(error.into()))?;
        let batch = BatchReader { path, schema: trajectory_schema(), batch };
        for row in 0..batch.batch.num_rows() {
            rows.push(batch.row(row)?);
        }
    }
    Ok(rows)
}

struct BatchReader<'a> {
    path: &'a Path,
    schema: SchemaRef,
    batch: RecordBatch,
}

impl BatchReader<'_> {
    fn error(&self, column: &'static str, found: String, expected: String) -> TrajectoryError {
        TrajectoryError::Column { path: self.path.to_owned(), column, found, expected }
    }

    /// A column, once it has the type that the schema says and nulls only where it may.
    fn column(&self, name: &'static str) -> Result<&ArrayRef, TrajectoryError> {
        let wanted =
            self.schema.field_with_name(name).unwrap_or_else(|error| panic!("the schema has no {name}: {error}"));
        let expected = || wanted.data_type().to_string();
        let Some(column) = self.batch.column_by_name(name) else {
            return Err(self.error(name, "is missing".to_owned(), expected()));
        };
        if column.data_type() != wanted.data_type() {
            return Err(self.error(name, format!("is of type {}", column.data_type()), expected()));
        }
        if !wanted.is_nullable() && column.null_count() > 0 {
            return Err(self.error(name, "holds null".to_owned(), expected()));
        }
        Ok(column)
    }

    fn number<T: ArrowPrimitiveType>(
        &self,
        name: &'static str,
        row: usize,
    ) -> Result<Option<T::Native>, TrajectoryError> {
        let column: &PrimitiveArray<T> = self.column(name)?.as_primitive();
        Ok(column.is_valid(row).then(|| column.value(row)))
    }

    fn text(&self, name: &'static str, row: usize) -> Result<Option<String>, TrajectoryError> {
        let column: &StringArray = self.column(name)?.as_string();
        Ok(column.is_valid(row).then(|| column.value(row).to_owned()))
    }

    fn list<T: ArrowPrimitiveType>(
        &self,
        name: &'static str,
        row: usize,
    ) -> Result<Option<Vec<T::Native>>, TrajectoryError> {
        let column = self.column(name)?.as_list::<i32>();
        Ok(column.is_valid(row).then(|| column.value(row).as_primitive::<T>().values().to_vec()))
    }

    fn row(&self, row: usize) -> Result<TrajectoryRow, TrajectoryError> {
        // `column` has refused nulls where the default would stand for one.
        let id = |name| Ok(self.number::<UInt64Type>(name, row)?.unwrap_or_default());
        let text = |name| Ok(self.text(name, row)?.unwrap_or_default());
        let count = |name| Ok(self.number::<UInt32Type>(name, row)?.unwrap_or_default() as usize);
        let verdict = match self.text("verdict", row)?.as_deref() {
            None => None,
            Some("right") => Some(Verdict::Right),
            Some("wrong") => Some(Verdict::Wrong),
            Some("unscorable") => Some(Verdict::Unscorable),
            Some(other) => {
                let expected = "`right`, `wrong` or `unscorable`".to_owned();
                return Err(self.error("verdict", format!("holds `{other}`"), expected));
            }
        };
        let finish_reason = match text("finish_reason")?.as_str() {
            "stop" => FinishReason::Stop,
            "length" => FinishReason::Length,
            other => {
                let expected = "`stop` or `length`".to_owned();
                return Err(self.error("finish_reason", format!("holds `{other}`"), expected));
            }
        };
        let parts = self.column("reward_parts")?.as_map();
        let reward_parts = if parts.is_valid(row) {
            let entries = parts.value(row);
            let names = entries.column(0).as_string::<i32>();
            let values = entries.column(1).as_primitive::<Float64Type>();
            (0..names.len()).map(|i| (names.value(i).to_owned(), values.value(i))).collect()
        } else {
            BTreeMap::new()
        };
        let (expert_bytes, odd) = self.column("expert_idx")?.as_binary::<i64>().value(row).as_chunks::<2>();
        if !odd.is_empty() {
            let expected = "two bytes an expert".to_owned();
            return Err(self.error("expert_idx", format!("holds {} bytes", 2 * expert_bytes.len() + 1), expected));
        }
        Ok(TrajectoryRow {
            step: id("step")?,
            group_id: id("group_id")?,
            rollout_id: id("rollout_id")?,
            prompt_row: id("prompt_row")?,
            prompt: text("prompt")?,
            response: text("response")?,
            answer: text("answer")?,
            prompt_tokens: self.list::<UInt32Type>("prompt_tokens", row)?.unwrap_or_default(),
            response_tokens: self.list::<UInt32Type>("response_tokens", row)?.unwrap_or_default(),
            rollout_logprobs: self.list::<Float32Type>("rollout_logprobs", row)?.unwrap_or_default(),
            trainer_logprobs: self.list::<Float32Type>("trainer_logprobs", row)?,
            weight_versions: self.list::<UInt64Type>("weight_versions", row)?.unwrap_or_default(),
            advantage: self.number::<Float32Type>("advantage", row)?,
            reward: self.number::<Float64Type>("reward", row)?,
            verdict,
            reward_parts,
            finish_reason,
            routing: RoutingChoices {
                num_layers: count("num_layers")?,
                num_experts_per_token: count("num_experts_per_token")?,
                expert_idx: expert_bytes.iter().map(|&idx| u16::from_le_bytes(idx)).collect(),
            },
        })
    }
}
