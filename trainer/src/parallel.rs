//! Work on several threads whose results are taken in one fixed order.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;

/// Does `work(worker, i)` for i in `0..num_items`, an item at a time per worker, and hands the results to `take` in the
/// order of i on the calling thread, so that what is folded does not depend on timing or on the number of workers.
///
/// False when `stop` was set meanwhile: not all items were done.
///
/// # Panics
/// When `work` does.
pub fn in_order<W: Send, T: Send>(
    workers: &mut [W],
    num_items: usize,
    stop: &AtomicBool,
    work: impl Fn(&mut W, usize) -> T + Sync,
    mut take: impl FnMut(usize, T),
) -> bool {
    let next = AtomicUsize::new(0);
    let (done, results) = mpsc::channel();
    std::thread::scope(|scope| {
        for (i, worker) in workers.iter_mut().enumerate() {
            let (next, done, work) = (&next, done.clone(), &work);
            let run = move || {
                while !stop.load(Ordering::Relaxed) {
                    let item = next.fetch_add(1, Ordering::Relaxed);
                    if item >= num_items || done.send((item, work(worker, item))).is_err() {
                        break;
                    }
                }
            };
            std::thread::Builder::new()
                .name(format!("train-{i}"))
                .spawn_scoped(scope, run)
                .expect("a thread can start");
        }
        drop(done);
        // What arrives early waits; there are never more than the workers can be ahead.
        let mut early = BTreeMap::new();
        let mut taken = 0;
        for (item, result) in results {
            early.insert(item, result);
            while let Some(result) = early.remove(&taken) {
                take(taken, result);
                taken += 1;
            }
        }
        taken == num_items
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_order_from_any_number_of_workers() {
        for num_workers in 1..5 {
            let mut seen = Vec::new();
            let mut workers = vec![(); num_workers];
            let all = in_order(&mut workers, 50, &AtomicBool::new(false), |(), i| i * i, |i, r| seen.push((i, r)));
            assert!(all);
            assert_eq!(seen, (0..50).map(|i| (i, i * i)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_stop_ends_it_early() {
        let stop = AtomicBool::new(false);
        let all = in_order(&mut [()], 50, &stop, |(), i| stop.store(i == 3, Ordering::Relaxed), |_, ()| {});
        assert!(!all);
    }
}
