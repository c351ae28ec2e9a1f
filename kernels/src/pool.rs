//! A few named threads that run one job at a time, each its own fixed part of it: who does what depends on the number of
//! threads and on nothing else. And slices that are handed out to them in parts.

use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};

/// The largest pool.
pub const MAX_THREADS: usize = 1024;

/// Turns of a busy wait, some microseconds: longer than the parts of a region differ.
const SPINS: usize = 250;
/// Turns of a wait that lets others run, so that threads which share a core hand it over, before a worker goes to sleep:
/// together longer than the gaps between the regions of a forward pass.
const YIELDS: usize = 100;

/// A job as the threads see it: called with the thread's number.
type Job = dyn Fn(usize) + Sync;

/// `num_threads` threads, the caller being number 0.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    /// Counts the jobs; a worker starts when it changes.
    epoch: AtomicUsize,
    /// Workers that have not finished the current job.
    running: AtomicUsize,
    quit: AtomicBool,
    job: Mutex<Option<JobPtr>>,
    /// Per worker: it sleeps, or is about to.
    asleep: Vec<AtomicBool>,
    panic: Mutex<Option<Box<dyn std::any::Any + Send>>>,
}

#[derive(Clone, Copy, Debug)]
struct JobPtr(*const Job);

// SAFETY: the pointer is to a `Sync` job that `Pool::run` keeps alive until every worker has finished with it.
unsafe impl Send for JobPtr {}

impl Pool {
    /// Starts `num_threads - 1` threads called `NAME-1`, `NAME-2`, ...
    ///
    /// # Panics
    /// When `num_threads` is 0 or above [`MAX_THREADS`], or the system gives no thread.
    pub fn new(num_threads: usize, name: &str) -> Self {
        assert!((1..=MAX_THREADS).contains(&num_threads), "{num_threads} threads; expected 1 to {MAX_THREADS}");
        let shared = Arc::new(Shared {
            epoch: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            quit: AtomicBool::new(false),
            job: Mutex::new(None),
            asleep: (1..num_threads).map(|_| AtomicBool::new(false)).collect(),
            panic: Mutex::new(None),
        });
        let workers = (1..num_threads).map(|t| {
            let shared = shared.clone();
            let thread = std::thread::Builder::new().name(format!("{name}-{t}"));
            thread.spawn(move || shared.work(t)).expect("a thread can start")
        });
        Self { workers: workers.collect(), shared }
    }

    /// How many threads there are.
    pub fn num_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// [`Pool::run`] for a job that is cut into `num_items`: of one item the caller does all, and nobody is woken.
    ///
    /// # Panics
    /// As [`Pool::run`].
    pub fn run_items(&mut self, num_items: usize, job: &(dyn Fn(usize) + Sync)) {
        if num_items <= 1 { job(0) } else { self.run(job) }
    }

    /// Runs `job(t)` on every thread t, and returns when all of them have.
    ///
    /// # Panics
    /// When the job does, on any thread.
    pub fn run(&mut self, job: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() {
            return job(0);
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime is forgotten; below, `run` leaves only after every worker has finished the job.
        let job_ptr = unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const Job>(job) };
        *lock(&shared.job) = Some(JobPtr(job_ptr));
        shared.running.store(self.workers.len(), Ordering::Relaxed);
        // SeqCst, as in `work`: either a worker sees the new epoch, or this thread sees that it sleeps.
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        for (asleep, worker) in shared.asleep.iter().zip(&self.workers) {
            if asleep.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        let own = catch_unwind(AssertUnwindSafe(|| job(0)));
        let mut turns = 0;
        while shared.running.load(Ordering::Acquire) != 0 {
            wait(&mut turns);
        }
        *lock(&shared.job) = None;
        let theirs = lock(&shared.panic).take();
        if let Err(panic) = own {
            resume_unwind(panic);
        }
        if let Some(panic) = theirs {
            resume_unwind(panic);
        }
    }
}

/// Waits for a turn, the longer it takes the more politely.
fn wait(turns: &mut usize) {
    *turns += 1;
    if *turns < SPINS {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn work(&self, t: usize) {
        let mut seen = 0;
        loop {
            let mut turns = 0;
            while self.epoch.load(Ordering::Acquire) == seen {
                if turns < SPINS + YIELDS {
                    wait(&mut turns);
                    continue;
                }
                let asleep = &self.asleep[t - 1];
                asleep.store(true, Ordering::SeqCst);
                while self.epoch.load(Ordering::SeqCst) == seen {
                    std::thread::park();
                }
                asleep.store(false, Ordering::Relaxed);
            }
            seen = seen.wrapping_add(1);
            if self.quit.load(Ordering::Acquire) {
                return;
            }
            let job = *lock(&self.job);
            let Some(JobPtr(job)) = job else { unreachable!("a new epoch brings a job") };
            // SAFETY: `Pool::run` keeps the job alive until `running` is 0, and this worker has not counted down yet.
            let done = catch_unwind(AssertUnwindSafe(|| unsafe { (*job)(t) }));
            if let Err(panic) = done {
                lock(&self.panic).get_or_insert(panic);
            }
            self.running.fetch_sub(1, Ordering::Release);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.quit.store(true, Ordering::Release);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        self.workers.iter().map(JoinHandle::thread).for_each(Thread::unpark);
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its jobs.
            let _ = worker.join();
        }
    }
}

/// The items of `0..n` that are thread `t`'s of `num_threads`: contiguous, as even as can be; a single one is thread 0's.
pub fn share(n: usize, t: usize, num_threads: usize) -> Range<usize> {
    (n * t).div_ceil(num_threads)..(n * (t + 1)).div_ceil(num_threads)
}

/// One flag per thread: it has taken its part.
#[derive(Debug, Default)]
struct Taken([std::sync::atomic::AtomicU64; MAX_THREADS / 64]);

impl Taken {
    /// # Panics
    /// When `t` has been here before.
    fn take(&self, t: usize) {
        let bit = 1u64 << (t % 64);
        let before = self.0[t / 64].fetch_or(bit, Ordering::Relaxed);
        assert!(before & bit == 0, "thread {t} takes its part twice");
    }
}

/// Which items each thread takes.
#[derive(Clone, Copy, Debug)]
enum Cut<'a> {
    Even(usize),
    At(&'a [usize]),
}

impl Cut<'_> {
    fn num_threads(self) -> usize {
        match self {
            Self::Even(num_threads) => num_threads,
            Self::At(bounds) => bounds.len() - 1,
        }
    }

    fn share(self, num_items: usize, t: usize) -> Range<usize> {
        match self {
            Self::Even(num_threads) => share(num_items, t, num_threads),
            Self::At(bounds) => bounds[t]..bounds[t + 1],
        }
    }
}

/// A slice of items, `width` values each, of which every thread may take its part once.
#[derive(Debug)]
pub struct Parts<'a, T> {
    data: *mut T,
    num_items: usize,
    width: usize,
    cut: Cut<'a>,
    taken: Taken,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: threads share it only to take parts, which do not overlap, as `&mut [T]`, which `T: Send` allows.
unsafe impl<T: Send> Sync for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    /// `data` as items of `width` values, cut evenly (see [`share`]).
    ///
    /// # Panics
    /// When the items are not whole.
    pub fn new(data: &'a mut [T], width: usize, num_threads: usize) -> Self {
        assert!(num_threads <= MAX_THREADS, "{num_threads} threads; at most {MAX_THREADS}");
        Self::cut(data, width, Cut::Even(num_threads))
    }

    /// `data` as items of `width` values: thread t takes items `bounds[t]..bounds[t + 1]`.
    ///
    /// # Panics
    /// When the items are not whole, or the bounds do not ascend from 0 to their number.
    pub fn at(data: &'a mut [T], width: usize, bounds: &'a [usize]) -> Self {
        let parts = Self::cut(data, width, Cut::At(bounds));
        let ends = (bounds.first(), bounds.last());
        assert_eq!(ends, (Some(&0), Some(&parts.num_items)), "bounds of {} items", parts.num_items);
        assert!(bounds.is_sorted() && bounds.len() <= MAX_THREADS + 1, "bounds {bounds:?}");
        parts
    }

    fn cut(data: &'a mut [T], width: usize, cut: Cut<'a>) -> Self {
        assert!(data.len().is_multiple_of(width.max(1)), "{} values are not items of {width}", data.len());
        let num_items = data.len() / width.max(1);
        Self { data: data.as_mut_ptr(), num_items, width, cut, taken: Taken::default(), borrow: PhantomData }
    }

    /// The items that thread `t` takes.
    pub fn share(&self, t: usize) -> Range<usize> {
        self.cut.share(self.num_items, t)
    }

    /// Those items.
    ///
    /// # Panics
    /// When thread `t` took them already, or there is no such thread.
    #[allow(clippy::mut_from_ref, reason = "each part is given out once: `taken` sees to it")]
    pub fn take(&self, t: usize) -> &'a mut [T] {
        assert!(t < self.cut.num_threads(), "thread {t} of {}", self.cut.num_threads());
        self.taken.take(t);
        let items = self.share(t);
        // SAFETY: the shares of different threads are disjoint (bounds ascend) and lie in the slice that was borrowed for
        // 'a; this one is given out for the first and only time.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(items.start * self.width), items.len() * self.width) }
    }
}

/// A matrix `[R, stride]` whose columns threads write in parts: each takes the columns of its [`share`] of units of
/// `unit` columns once.
#[derive(Debug)]
pub struct Columns<'a, T = f32> {
    data: *mut T,
    num_rows: usize,
    stride: usize,
    unit: usize,
    num_threads: usize,
    taken: Taken,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: threads share it only to take parts, whose columns do not overlap, as `&mut [T]`, which `T: Send` allows.
unsafe impl<T: Send> Sync for Columns<'_, T> {}

impl<'a, T> Columns<'a, T> {
    /// The rows of `stride` columns in `data`, cut at multiples of `unit`; the last unit may be narrower.
    ///
    /// # Panics
    /// When the rows are not whole.
    pub fn new(data: &'a mut [T], stride: usize, unit: usize, num_threads: usize) -> Self {
        assert!(data.len().is_multiple_of(stride.max(1)), "{} values are not rows of {stride}", data.len());
        assert!(unit > 0 && num_threads <= MAX_THREADS, "units of {unit} for {num_threads} threads");
        let num_rows = data.len() / stride.max(1);
        let taken = Taken::default();
        Self { num_rows, data: data.as_mut_ptr(), stride, unit, num_threads, taken, borrow: PhantomData }
    }

    /// Thread `t`'s columns.
    ///
    /// # Panics
    /// When it took them already, or there is no such thread.
    pub fn take(&self, t: usize) -> ColumnPart<'a, T> {
        assert!(t < self.num_threads, "thread {t} of {}", self.num_threads);
        self.taken.take(t);
        let units = share(self.stride.div_ceil(self.unit), t, self.num_threads);
        let columns = (units.start * self.unit).min(self.stride)..(units.end * self.unit).min(self.stride);
        // SAFETY: the first column lies within the first row or at its end; without rows the pointer is not used.
        let data = unsafe { self.data.add(if self.num_rows == 0 { 0 } else { columns.start }) };
        ColumnPart { data, num_rows: self.num_rows, stride: self.stride, columns, borrow: PhantomData }
    }
}

/// Some columns of a matrix, to be written by one thread.
#[derive(Debug)]
pub struct ColumnPart<'a, T = f32> {
    /// The first row's first column of the part.
    data: *mut T,
    num_rows: usize,
    stride: usize,
    columns: Range<usize>,
    borrow: PhantomData<&'a mut [T]>,
}

impl<'a, T> ColumnPart<'a, T> {
    /// `data` as rows of just the columns named.
    ///
    /// # Panics
    /// When the rows are not whole.
    pub fn new(data: &'a mut [T], columns: Range<usize>) -> Self {
        let stride = columns.len();
        assert!(data.len().is_multiple_of(stride.max(1)), "{} values are not rows of {stride}", data.len());
        let num_rows = data.len() / stride.max(1);
        Self { data: data.as_mut_ptr(), num_rows, stride, columns, borrow: PhantomData }
    }

    /// Which columns.
    pub fn columns(&self) -> Range<usize> {
        self.columns.clone()
    }

    /// How many rows.
    pub fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// Some of the rows.
    ///
    /// # Panics
    /// When there are no such rows.
    pub fn rows(&mut self, rows: Range<usize>) -> ColumnPart<'_, T> {
        assert!(rows.start <= rows.end && rows.end <= self.num_rows, "rows {rows:?} of {}", self.num_rows);
        // SAFETY: the first of these rows is one of the matrix; of none, the pointer is not used.
        let data = if rows.is_empty() { self.data } else { unsafe { self.data.add(rows.start * self.stride) } };
        ColumnPart { data, num_rows: rows.len(), columns: self.columns.clone(), ..*self }
    }

    /// Those of the columns that lie within `columns`, counted from its start.
    pub fn within(&mut self, columns: Range<usize>) -> ColumnPart<'_, T> {
        let start = self.columns.start.max(columns.start).min(self.columns.end);
        let end = self.columns.end.min(columns.end).max(start);
        let from_here = start.saturating_sub(columns.start);
        // SAFETY: `start` lies within this part's columns or at their end; without rows the pointer is not used.
        let data = if self.num_rows == 0 { self.data } else { unsafe { self.data.add(start - self.columns.start) } };
        ColumnPart { data, columns: from_here..from_here + (end - start), ..*self }
    }

    /// Row `r` of `columns`, which lie within this part's.
    ///
    /// # Panics
    /// When they do not.
    #[inline]
    pub fn row(&mut self, r: usize, columns: Range<usize>) -> &mut [T] {
        let Range { start, end } = columns;
        assert!(
            r < self.num_rows && self.columns.start <= start && start <= end && end <= self.columns.end,
            "row {r} of {}, columns {start}..{end} of {:?}",
            self.num_rows,
            self.columns
        );
        // SAFETY: by the check the columns are this part's, which no other part has, and the row is one of the matrix,
        // which is borrowed for 'a; `&mut self` keeps the part from giving two slices at a time.
        unsafe {
            std::slice::from_raw_parts_mut(self.data.add(r * self.stride + start - self.columns.start), end - start)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::atomic::AtomicU64;

    proptest! {
        #[test]
        fn shares_cover_everything_once(n in 0usize..300, num_threads in 1usize..20) {
            let mut next = 0;
            for t in 0..num_threads {
                let range = share(n, t, num_threads);
                prop_assert_eq!(range.start, next);
                prop_assert!(range.len() <= n.div_ceil(num_threads));
                next = range.end;
            }
            prop_assert_eq!(next, n);
        }

        #[test]
        fn parts_and_columns_are_written_once_each(
            rows in 0usize..9, width in 1usize..40, unit in 1usize..20, num_threads in 1usize..5,
        ) {
            let mut pool = Pool::new(num_threads, "test");
            let mut data = vec![0.0f32; rows * width];
            let parts = Parts::new(&mut data, width, num_threads);
            pool.run(&|t| parts.take(t).iter_mut().for_each(|x| *x += 1.0));
            let columns = Columns::new(&mut data, width, unit, num_threads);
            pool.run(&|t| {
                let mut part = columns.take(t);
                for r in 0..part.num_rows() {
                    // In two steps, the second from a third of the row on.
                    for within in [0..width / 3, width / 3..width] {
                        let mut part = part.rows(r..r + 1);
                        let mut part = part.within(within);
                        let all = part.columns();
                        part.row(0, all).iter_mut().for_each(|x| *x += 1.0);
                    }
                }
            });
            prop_assert!(data.iter().all(|&x| x == 2.0), "{data:?}");
            let mut bounds: Vec<usize> = (0..=num_threads).map(|t| if t == num_threads { rows } else { t * t % (rows + 1) }).collect();
            bounds.sort_unstable();
            let parts = Parts::at(&mut data, width, &bounds);
            pool.run(&|t| parts.take(t).iter_mut().for_each(|x| *x += 1.0));
            prop_assert!(data.iter().all(|&x| x == 3.0), "{data:?}");
        }
    }

    #[test]
    fn every_thread_runs_every_job_also_after_a_sleep() {
        let mut pool = Pool::new(4, "test");
        let counts: [AtomicU64; 4] = Default::default();
        for i in 0..2_000 {
            pool.run(&|t| {
                counts[t].fetch_add(1, Ordering::Relaxed);
            });
            if i % 500 == 0 {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
        }
        assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 2_000), "{counts:?}");
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let mut pool = Pool::new(3, "test");
        for broken in 0..3 {
            let result = catch_unwind(AssertUnwindSafe(|| pool.run(&|t| assert!(t != broken, "thread {t} fails"))));
            let panic = result.expect_err("the job panics");
            let text = panic.downcast_ref::<String>().expect("a message");
            assert_eq!(text, &format!("thread {broken} fails"));
        }
        pool.run(&|_| ());
    }

    #[test]
    #[should_panic(expected = "thread 1 takes its part twice")]
    fn a_part_is_given_out_once() {
        let mut data = [0.0; 4];
        let parts = Parts::new(&mut data, 1, 2);
        let _first = parts.take(1);
        let _second = parts.take(1);
    }
}
