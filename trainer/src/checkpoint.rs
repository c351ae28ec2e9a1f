//! Checkpoints in the Hugging Face layout, with the optimizer's state beside: whole or not there at all.

use std::path::{Path, PathBuf};

use rollout::model::checkpoint::{CheckpointError, WEIGHTS_FILE, save_weights, write_atomically};
use rollout::tokenizer::Tokenizer;

use crate::optimizer::Optimizer;
use crate::policy::Policy;

/// Writes the checkpoint `path` (`.../step-000010`): a folder beside it is filled, synced and renamed.
///
/// It holds `config.json`, `tokenizer.json` (as it was read), `model.safetensors` (f32 masters), `optimizer.safetensors`
/// (moments) and `state.json` (steps taken).
///
/// # Errors
/// When the disk refuses; what was written is removed, and `path` is not there.
pub fn save(
    path: &Path,
    tokenizer: &Tokenizer,
    policy: &Policy,
    optimizer: &Optimizer,
    step: usize,
) -> Result<(), CheckpointError> {
    let partial = hidden(path, "partial");
    let refuse = |path: PathBuf| move |source| CheckpointError::Write { path, source };
    let written = (|| {
        remove(&partial).map_err(refuse(partial.clone()))?;
        std::fs::create_dir_all(&partial).map_err(refuse(partial.clone()))?;
        let config = serde_json::to_string_pretty(policy.config()).expect("a configuration is JSON");
        let state = serde_json::json!({ "step": step, "optimizer_steps": optimizer.num_steps() }).to_string();
        let files = [
            ("config.json", config.as_bytes()),
            ("state.json", state.as_bytes()),
            ("tokenizer.json", tokenizer.json()),
        ];
        for (name, bytes) in files {
            let file = partial.join(name);
            write_atomically(&file, bytes).map_err(refuse(file))?;
        }
        save_weights(&partial.join(WEIGHTS_FILE), &policy.to_weights())?;
        save_weights(&partial.join("optimizer.safetensors"), &optimizer.state())?;
        discard(path)
            .and_then(|()| std::fs::rename(&partial, path))
            .and_then(|()| std::fs::File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all())
            .map_err(refuse(path.to_owned()))
    })();
    written.map_err(|error| {
        // The first error is the one to report; what cannot be removed either is left.
        let _ = remove(&partial);
        match error {
            // Where it was to be: the partial folder means nothing to a person.
            CheckpointError::Write { path: file, source } => {
                let name = file.strip_prefix(&partial).unwrap_or(Path::new(""));
                CheckpointError::Write { path: path.components().chain(name.components()).collect(), source }
            }
            error => error,
        }
    })
}

/// Removes the checkpoints beside `newest`, the oldest first, until `keep_last` are left, `newest` among them.
///
/// # Errors
/// When the folder cannot be read or a checkpoint cannot be removed.
pub fn prune(newest: &Path, keep_last: usize) -> std::io::Result<()> {
    let Some(folder) = newest.parent() else { return Ok(()) };
    let entries = std::fs::read_dir(folder)?.map(|entry| entry.map(|e| e.path()));
    let entries: Vec<PathBuf> = entries.collect::<Result<_, _>>()?;
    let starts_with = |path: &Path, start| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(start));
    // What a kill has left.
    entries.iter().filter(|p| starts_with(p, ".step-")).try_for_each(|p| remove(p))?;
    let mut steps: Vec<PathBuf> = entries.into_iter().filter(|p| starts_with(p, "step-")).collect();
    steps.sort();
    let surplus = steps.len().saturating_sub(keep_last.max(1));
    steps.into_iter().take(surplus).filter(|p| p != newest).try_for_each(|p| discard(&p))
}

/// Removes a checkpoint so that a kill at any instant leaves all of it or nothing of its name.
fn discard(path: &Path) -> std::io::Result<()> {
    let hidden = hidden(path, "discarded");
    match std::fs::rename(path, &hidden) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(()) => remove(&hidden),
    }
}

fn hidden(path: &Path, what: &str) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{what}"))
}

fn remove(path: &Path) -> std::io::Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_are_kept_and_what_a_kill_left_is_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let names = ["step-000001", "step-000002", "step-000003", ".step-000004.partial", "notes"];
        for name in names {
            std::fs::create_dir(folder.path().join(name)).expect("a folder");
            std::fs::write(folder.path().join(name).join("config.json"), "{}").expect("writes");
        }
        // A kill has left one that was half removed.
        std::fs::create_dir(folder.path().join(".step-000001.discarded")).expect("a folder");
        prune(&folder.path().join("step-000003"), 1).expect("prunes");
        let entries = std::fs::read_dir(folder.path()).expect("reads").flatten();
        let mut left: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        left.sort();
        assert_eq!(left, ["notes", "step-000003"]);
    }
}
