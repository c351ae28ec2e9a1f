//! How much memory this machine, or the container that we run in, has left.

use std::path::Path;

/// Bytes that can still be used; `None` where the system does not say.
pub fn free_memory() -> Option<usize> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let free: usize = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    let cgroup = |name: &str| -> Option<usize> {
        std::fs::read_to_string(Path::new("/sys/fs/cgroup").join(name)).ok()?.trim().parse().ok()
    };
    // `memory.max` is a number only where there is a limit.
    let left = cgroup("memory.max").zip(cgroup("memory.current")).map(|(max, now)| max.saturating_sub(now));
    Some((free * 1024).min(left.unwrap_or(usize::MAX)))
}

#[cfg(test)]
mod tests {
    #[cfg(target_os = "linux")]
    #[test]
    fn this_machine_has_some_memory_left() {
        let free = super::free_memory().expect("Linux says");
        assert!(free > 1 << 20, "{free} bytes");
    }
}
