use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

use arrow_array::{ArrayRef, Int64Array, RecordBatch};
use datasets::{
    FinishReason, Group, IndexerChoices, Prompt, PromptColumns, Reward, Rollout, RoutingChoices, TrajectoryError,
    TrajectoryExtra, TrajectoryRow, Verdict, read_prompts, read_trajectories, trajectory_schema, write_trajectories,
};
use parquet::arrow::ArrowWriter;
use proptest::prelude::*;
use serde_json::json;

use crate::sentence;

/// Two prompts with rollouts of every kind: right, wrong, unscorable, not scored, empty.
fn sample_groups() -> Vec<Group> {
    let verdicts = [Some(Verdict::Right), Some(Verdict::Wrong), Some(Verdict::Unscorable), None, Some(Verdict::Right)];
    let rollout = |id: u64| {
        let num_tokens = [3, 1, 2, 0, 2][id as usize];
        let tokens = 0..num_tokens;
        let num_experts = (num_tokens as usize + 2) * 2 * 3;
        let parts = BTreeMap::from([("format".to_owned(), 0.25), ("answer".to_owned(), id as f64)]);
        Rollout {
            rollout_id: 10 + id,
            response_tokens: tokens.clone().map(|t| 100 * id as u32 + t).collect(),
            response_text: format!("response {id}: \"ä\"\n"),
            rollout_logprobs: tokens.clone().map(|t| -0.1 - t as f32).collect(),
            weight_versions: tokens.map(|t| 4 + u64::from(t) / 2).collect(),
            finish_reason: if id == 1 { FinishReason::Length } else { FinishReason::Stop },
            routing: Arc::new(match id {
                3 => RoutingChoices::default(),
                _ => RoutingChoices {
                    num_layers: 2,
                    num_experts_per_token: 3,
                    expert_idx: (0..num_experts).map(|i| (i * 37 % 384) as u16).collect(),
                },
            }),
            indexer: Arc::new(IndexerChoices::default()),
            reward: verdicts[id as usize].map(|verdict| Reward {
                verdict,
                score: if verdict == Verdict::Right { 1.0 } else { 0.0 },
                parts: if id == 4 { BTreeMap::new() } else { parts.clone() },
            }),
        }
    };
    let group = |group_id: u64, row: usize, ids: std::ops::Range<u64>| Group {
        group_id,
        prompt: Arc::new(Prompt { row, text: format!("{row}+1?"), answer: (row + 1).to_string(), metadata: json!({}) }),
        prompt_tokens: [1, row as u32].into(),
        rollouts: ids.map(rollout).collect(),
    };
    vec![group(5, 8, 0..3), group(6, 3, 3..5)]
}

fn sample_extra() -> Vec<TrajectoryExtra> {
    let tokens = [3, 1, 2, 0, 0];
    let logprobs = |n: i32| (0..n).map(|t| -0.125 - t as f32).collect();
    let extra = |(i, &n): (usize, &i32)| TrajectoryExtra { advantage: i as f32 - 1.5, trainer_logprobs: logprobs(n) };
    tokens.iter().enumerate().map(extra).collect()
}

/// What a file should give back for what was put in.
fn want_rows(step: u64, groups: &[Group], extra: Option<&[TrajectoryExtra]>) -> Vec<TrajectoryRow> {
    let pairs = groups.iter().flat_map(|group| group.rollouts.iter().map(move |rollout| (group, rollout)));
    let row = |(i, (group, rollout)): (usize, (&Group, &Rollout))| {
        let reward = rollout.reward.clone();
        TrajectoryRow {
            step,
            group_id: group.group_id,
            rollout_id: rollout.rollout_id,
            prompt_row: group.prompt.row as u64,
            prompt: group.prompt.text.clone(),
            response: rollout.response_text.clone(),
            answer: group.prompt.answer.clone(),
            prompt_tokens: group.prompt_tokens.to_vec(),
            response_tokens: rollout.response_tokens.clone(),
            rollout_logprobs: rollout.rollout_logprobs.clone(),
            trainer_logprobs: extra.map(|e| e[i].trainer_logprobs.clone()).filter(|l| !l.is_empty()),
            weight_versions: rollout.weight_versions.clone(),
            advantage: extra.map(|e| e[i].advantage),
            reward: reward.as_ref().filter(|r| r.verdict != Verdict::Unscorable).map(|r| r.score),
            verdict: reward.as_ref().map(|r| r.verdict),
            reward_parts: reward.map(|r| r.parts).unwrap_or_default(),
            finish_reason: rollout.finish_reason,
            routing: (*rollout.routing).clone(),
        }
    };
    pairs.enumerate().map(row).collect()
}

#[track_caller]
fn check_round_trip(groups: &[Group], extra: Option<&[TrajectoryExtra]>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("step-000012.parquet");
    write_trajectories(&path, 12, groups, extra).unwrap();
    assert_eq!(read_trajectories(&path).unwrap(), want_rows(12, groups, extra));
    assert_eq!(names_in(dir.path()), ["step-000012.parquet"]);
}

fn names_in(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_is_written_is_read() {
    check_round_trip(&sample_groups(), Some(&sample_extra()));
    check_round_trip(&sample_groups(), None);
    check_round_trip(&[], None);
}

#[test]
fn an_unscorable_reward_never_poses_as_zero() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.parquet");
    write_trajectories(&path, 0, &sample_groups(), None).unwrap();
    let rows = read_trajectories(&path).unwrap();
    assert_eq!((rows[1].reward, rows[1].verdict), (Some(0.0), Some(Verdict::Wrong)));
    assert_eq!((rows[2].reward, rows[2].verdict), (None, Some(Verdict::Unscorable)));
    assert_eq!((rows[3].reward, rows[3].verdict), (None, None));
}

/// Enough bytes for several batches and a second row group.
fn large_groups() -> Vec<Group> {
    let mut groups = sample_groups();
    let mut state = 1u64;
    for rollout in groups.iter_mut().flat_map(|group| &mut group.rollouts) {
        let mut noise = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 48) as u16
        };
        let expert_idx = (0..4 << 20).map(|_| noise()).collect();
        rollout.routing = Arc::new(RoutingChoices { num_layers: 4, num_experts_per_token: 8, expert_idx });
    }
    groups
}

#[test]
fn a_large_step_is_cut_into_row_groups() {
    check_round_trip(&large_groups(), Some(&sample_extra()));
}

#[test]
fn the_folder_is_made_and_an_old_file_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("runs/a/rollouts/step-000001.parquet");
    write_trajectories(&path, 1, &sample_groups(), None).unwrap();
    // What a killed run leaves behind.
    fs::write(path.with_file_name(".step-000001.parquet.partial"), "half").unwrap();
    write_trajectories(&path, 1, &sample_groups()[..1], None).unwrap();
    assert_eq!(read_trajectories(&path).unwrap().len(), 3);
    assert_eq!(names_in(path.parent().unwrap()), ["step-000001.parquet"]);
}

/// `/dev/full` fails every write as a full disk does; a link puts it in the place of the temporary file.
#[cfg(target_os = "linux")]
#[track_caller]
fn check_full_disk(groups: &[Group]) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.parquet");
    fs::write(&path, "old").unwrap();
    std::os::unix::fs::symlink("/dev/full", dir.path().join(".t.parquet.partial")).unwrap();
    let error = write_trajectories(&path, 12, groups, None).unwrap_err();
    assert!(matches!(error, TrajectoryError::DiskFull { .. }), "{error:?}");
    let want = "DIR/t.parquet: no room left on the disk for the trajectories of step 12, \
                and nothing half-written was kept; free some space";
    assert_eq!(sentence(&error, dir.path()), want);
    assert_eq!(names_in(dir.path()), ["t.parquet"]);
    assert_eq!(fs::read(&path).unwrap(), b"old");
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_one_sentence_and_leaves_nothing() {
    // Noticed by the last flush, and by a write in the middle.
    check_full_disk(&sample_groups());
    check_full_disk(&large_groups());
}

#[test]
fn a_place_that_cannot_be_written() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    let error = write_trajectories(&dir.path().join("file/t.parquet"), 0, &[], None).unwrap_err();
    let want = if cfg!(target_os = "linux") { "File exists (os error 17)" } else { "" };
    assert!(sentence(&error, dir.path()).starts_with("cannot write DIR/file/t.parquet: "));
    assert!(sentence(&error, dir.path()).ends_with(want), "{error:?}");

    fs::create_dir(dir.path().join("t.parquet")).unwrap();
    let error = write_trajectories(&dir.path().join("t.parquet"), 0, &[], None).unwrap_err();
    assert!(sentence(&error, dir.path()).starts_with("cannot write DIR/t.parquet: "));
    assert_eq!(names_in(dir.path()), ["file", "t.parquet"]);
}

#[test]
fn files_that_are_no_trajectories() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.parquet");
    let read = || sentence(&read_trajectories(&path).unwrap_err(), dir.path());
    assert_eq!(read(), "cannot read DIR/t.parquet: No such file or directory (os error 2)");

    fs::write(&path, "not parquet").unwrap();
    let want = "cannot read DIR/t.parquet as Parquet: Parquet error: Invalid Parquet file. Corrupt footer";
    assert_eq!(read(), want);

    let write = |columns: Vec<(&str, ArrayRef)>| {
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        let mut writer = ArrowWriter::try_new(File::create(&path).unwrap(), batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
    };
    write(vec![("step", Arc::new(Int64Array::from(vec![1])))]);
    let want = "DIR/t.parquet: column `verdict` is missing, expected Utf8; \
                trajectory files are those under a run's `rollouts/`";
    assert_eq!(read(), want);
    write(vec![("verdict", Arc::new(Int64Array::from(vec![1])))]);
    let want = "DIR/t.parquet: column `verdict` is of type Int64, expected Utf8; \
                trajectory files are those under a run's `rollouts/`";
    assert_eq!(read(), want);
    write(vec![("verdict", Arc::new(arrow_array::StringArray::from(vec!["good"])))]);
    let want = "DIR/t.parquet: column `verdict` holds `good`, expected `right`, `wrong` or `unscorable`; \
                trajectory files are those under a run's `rollouts/`";
    assert_eq!(read(), want);
}

#[test]
fn a_damaged_file_gives_rows_or_a_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.parquet");
    write_trajectories(&path, 12, &sample_groups()[1..], None).unwrap();
    let whole = fs::read(&path).unwrap();
    // Every 17th byte: with parquet 60, three of these flips make its reader panic, and the test stays short.
    for idx in (0..whole.len()).step_by(17) {
        let mut damaged = whole.clone();
        damaged[idx] ^= 0x80;
        fs::write(&path, damaged).unwrap();
        // Neither may panic; a flipped digit of a logprob goes unnoticed.
        let _ = read_trajectories(&path);
        let _ = read_prompts(&path, &PromptColumns::default(), true);
    }
}

#[test]
#[should_panic(expected = "rollout 10: logprobs for response tokens")]
fn logprobs_are_one_per_response_token() {
    let mut groups = sample_groups();
    groups[0].rollouts[0].rollout_logprobs.pop();
    let _ = write_trajectories(&tempfile::tempdir().unwrap().path().join("t.parquet"), 0, &groups, None);
}

#[test]
#[should_panic(expected = "step 7: extra values for rollouts")]
fn extra_is_one_per_rollout() {
    let extra = &sample_extra()[1..];
    let _ =
        write_trajectories(&tempfile::tempdir().unwrap().path().join("t.parquet"), 7, &sample_groups(), Some(extra));
}

#[test]
fn the_schema_is_the_documented_one() {
    let schema = trajectory_schema();
    let columns: Vec<String> = schema
        .fields()
        .iter()
        .map(|f| format!("{} {}{}", f.name(), f.data_type(), if f.is_nullable() { "?" } else { "" }))
        .collect();
    let want = [
        "step UInt64",
        "group_id UInt64",
        "rollout_id UInt64",
        "prompt_row UInt64",
        "prompt Utf8",
        "response Utf8",
        "answer Utf8",
        "prompt_tokens List(non-null UInt32, field: 'element')",
        "response_tokens List(non-null UInt32, field: 'element')",
        "rollout_logprobs List(non-null Float32, field: 'element')",
        "trainer_logprobs List(non-null Float32, field: 'element')?",
        "weight_versions List(non-null UInt64, field: 'element')",
        "advantage Float32?",
        "reward Float64?",
        "verdict Utf8?",
        "reward_parts Map(\"key_value\": non-null Struct(\"key\": non-null Utf8, \"value\": non-null Float64), unsorted)?",
        "finish_reason Utf8",
        "num_layers UInt32",
        "num_experts_per_token UInt32",
        "expert_idx LargeBinary",
    ];
    assert_eq!(columns, want);
}

fn any_rollout() -> impl Strategy<Value = Rollout> {
    let token = (any::<u32>(), -1e6f32..0.0, any::<u64>());
    let reward =
        prop_oneof![Just(Verdict::Right), Just(Verdict::Wrong), Just(Verdict::Unscorable)].prop_flat_map(|v| {
            let parts = proptest::collection::btree_map(
                ".{0,8}",
                proptest::num::f64::ANY.prop_filter("NaN", |x| !x.is_nan()),
                0..4,
            );
            (Just(v), -1e9f64..1e9, parts).prop_map(|(verdict, score, parts)| Reward { verdict, score, parts })
        });
    let tokens = proptest::collection::vec(token, 0..20);
    let experts = proptest::collection::vec(any::<u16>(), 0..40);
    (any::<u64>(), tokens, ".*", any::<bool>(), experts, proptest::option::of(reward)).prop_map(
        |(rollout_id, tokens, response_text, stop, expert_idx, reward)| Rollout {
            rollout_id,
            response_tokens: tokens.iter().map(|t| t.0).collect(),
            response_text,
            rollout_logprobs: tokens.iter().map(|t| t.1).collect(),
            weight_versions: tokens.iter().map(|t| t.2).collect(),
            finish_reason: if stop { FinishReason::Stop } else { FinishReason::Length },
            routing: Arc::new(RoutingChoices { num_layers: 1, num_experts_per_token: 1, expert_idx }),
            indexer: Arc::new(IndexerChoices::default()),
            reward,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_trajectory_survives(
        rollouts in proptest::collection::vec(proptest::collection::vec(any_rollout(), 0..5), 0..4), text in ".*",
    ) {
        let group = |(i, rollouts): (usize, Vec<Rollout>)| Group {
            group_id: i as u64,
            prompt: Arc::new(Prompt { row: i, text: text.clone(), answer: text.clone(), metadata: json!({}) }),
            prompt_tokens: vec![7; i].into(),
            rollouts,
        };
        let groups: Vec<Group> = rollouts.into_iter().enumerate().map(group).collect();
        check_round_trip(&groups, None);
    }
}
