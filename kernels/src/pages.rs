//! Memory that sequences grow in: pages of one size, from a pool of bounded size, counted by reference, so that
//! sequences that began alike share them. What is written is always a page that nobody else has.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A source of pages. Cloning gives another handle to the same one.
#[derive(Clone, Debug)]
pub struct PagePool(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    page_len: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    capacity: usize,
    free: Vec<Arc<[f32]>>,
    in_use: usize,
}

/// No page is left in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfPages;

/// A page; cloning shares it, and the last one to drop it gives it back.
#[derive(Debug)]
pub struct Page {
    /// Always there, but while the page is dropped.
    data: Option<Arc<[f32]>>,
    pool: PagePool,
}

impl PagePool {
    /// Up to `capacity` pages of `page_len` values; their memory is taken when they are first used.
    pub fn new(page_len: usize, capacity: usize) -> Self {
        Self(Arc::new(Shared { page_len, state: Mutex::new(State { capacity, free: Vec::new(), in_use: 0 }) }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Values of a page.
    pub fn page_len(&self) -> usize {
        self.0.page_len
    }

    /// Pages that may be in use at a time.
    pub fn capacity(&self) -> usize {
        self.state().capacity
    }

    /// Pages that somebody holds.
    pub fn num_in_use(&self) -> usize {
        self.state().in_use
    }

    /// A page with arbitrary values.
    ///
    /// # Errors
    /// When all are in use.
    pub fn take(&self) -> Result<Page, OutOfPages> {
        let mut state = self.state();
        if state.in_use >= state.capacity {
            return Err(OutOfPages);
        }
        state.in_use += 1;
        let data = state.free.pop().unwrap_or_else(|| std::iter::repeat_n(0.0, self.0.page_len).collect());
        Ok(Page { data: Some(data), pool: self.clone() })
    }

    /// Takes memory for up to `num_pages` pages more than are in use, as far as the capacity goes.
    pub fn reserve(&self, num_pages: usize) {
        let mut state = self.state();
        let room = num_pages.min(state.capacity - state.in_use);
        while state.free.len() < room {
            let page = std::iter::repeat_n(0.0, self.0.page_len).collect();
            state.free.push(page);
        }
        // What comes back finds room in the list.
        let in_use = state.in_use;
        state.free.reserve(in_use + room);
    }

    /// Gives the memory of free pages back to the system.
    pub fn shrink(&self) {
        self.state().free = Vec::new();
    }
}

impl Page {
    /// Its values.
    #[inline]
    pub fn as_slice(&self) -> &[f32] {
        match &self.data {
            Some(data) => data,
            None => &[],
        }
    }

    /// Its values, to be written: `None` where somebody else shares the page.
    pub fn get_mut(&mut self) -> Option<&mut [f32]> {
        self.data.as_mut().and_then(Arc::get_mut)
    }

    /// Makes sure that nobody shares the page, by going over to a copy where one does.
    ///
    /// # Errors
    /// When there is no page for the copy.
    pub fn make_unique(&mut self) -> Result<(), OutOfPages> {
        if self.get_mut().is_none() {
            let mut copy = self.pool.take()?;
            copy.get_mut().expect("a new page is nobody else's").copy_from_slice(self.as_slice());
            *self = copy;
        }
        Ok(())
    }
}

impl Clone for Page {
    fn clone(&self) -> Self {
        Self { data: self.data.clone(), pool: self.pool.clone() }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        let Some(mut data) = self.data.take() else { return };
        // References are given up under the lock, so that of several at once exactly one is the last.
        let mut state = self.pool.state();
        if Arc::get_mut(&mut data).is_some() {
            state.in_use -= 1;
            state.free.push(data);
        }
    }
}

/// Rows in pages: row i is row `i % N` of page `i / N`, N being a power of two.
#[derive(Clone, Copy, Debug)]
pub struct PagedRows<'a> {
    pages: &'a [Page],
    width: usize,
    shift: u32,
}

/// How many rows of `width` values a page of `page_len` holds, as a power of two: its exponent.
///
/// # Panics
/// When a page holds none.
pub fn rows_per_page_log2(page_len: usize, width: usize) -> u32 {
    assert!((1..=page_len).contains(&width), "rows of {width} values in pages of {page_len}");
    (page_len / width).ilog2()
}

impl<'a> PagedRows<'a> {
    /// Rows of `width` values in `pages`, `2^shift` in each.
    ///
    /// # Panics
    /// When they do not fit.
    pub fn new(pages: &'a [Page], width: usize, shift: u32) -> Self {
        assert!(pages.first().is_none_or(|page| width << shift <= page.as_slice().len()), "rows of {width} in a page");
        Self { pages, width, shift }
    }

    /// No rows.
    pub fn none(width: usize) -> Self {
        Self { pages: &[], width, shift: 0 }
    }

    /// Values of a row.
    #[inline(always)]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Row `i`.
    ///
    /// # Panics
    /// When there is no such row.
    #[inline(always)]
    pub fn row(&self, i: usize) -> &'a [f32] {
        &self.pages[i >> self.shift].as_slice()[(i & ((1 << self.shift) - 1)) * self.width..][..self.width]
    }
}

/// Rows that own their pages: a copy of given ones, as tests and benches need it.
#[derive(Debug)]
pub struct OwnedRows {
    pages: Vec<Page>,
    width: usize,
    shift: u32,
}

impl OwnedRows {
    /// The rows of `width` values of `values`, in pages of `page_len`.
    ///
    /// # Panics
    /// When a page holds no row.
    pub fn new(values: &[f32], width: usize, page_len: usize) -> Self {
        let (pool, shift) = (PagePool::new(page_len, usize::MAX), rows_per_page_log2(page_len, width));
        let pages = values.chunks(width << shift).map(|rows| {
            let mut page = pool.take().expect("there is no end of pages");
            page.get_mut().expect("a new page is nobody else's")[..rows.len()].copy_from_slice(rows);
            page
        });
        Self { pages: pages.collect(), width, shift }
    }

    /// The rows.
    pub fn view(&self) -> PagedRows<'_> {
        PagedRows::new(&self.pages, self.width, self.shift)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever is taken, shared, written and dropped: no page is lost, none is seen to change by another holder.
        #[test]
        fn pages_are_counted_and_written_alone(steps in prop::collection::vec((0u8..4, 0usize..8, -9.0f32..9.0), 0..200)) {
            let pool = PagePool::new(3, 5);
            let mut held: Vec<(Page, f32)> = Vec::new();
            for (what, at, value) in steps {
                match what {
                    0 => match pool.take() {
                        Ok(mut page) => {
                            page.get_mut().expect("new").fill(value);
                            held.push((page, value));
                        }
                        Err(OutOfPages) => prop_assert_eq!(pool.num_in_use(), 5),
                    },
                    1 if !held.is_empty() => {
                        let (page, value) = &held[at % held.len()];
                        held.push((page.clone(), *value));
                    }
                    2 if !held.is_empty() => drop(held.swap_remove(at % held.len())),
                    3 if !held.is_empty() => {
                        let at = at % held.len();
                        if held[at].0.make_unique().is_ok() {
                            held[at].0.get_mut().expect("unique").fill(value);
                            held[at].1 = value;
                        }
                    }
                    _ => {}
                }
                for (page, value) in &held {
                    prop_assert_eq!(page.as_slice(), &[*value; 3]);
                }
                let mut different: Vec<*const f32> = held.iter().map(|(page, _)| page.as_slice().as_ptr()).collect();
                different.sort_unstable();
                different.dedup();
                prop_assert_eq!(pool.num_in_use(), different.len());
            }
            drop(held);
            prop_assert_eq!(pool.num_in_use(), 0);
        }
    }

    #[test]
    fn threads_that_drop_one_page_together_give_it_back_once() {
        let pool = PagePool::new(1, 1);
        for _ in 0..500 {
            let page = pool.take().expect("the page came back");
            std::thread::scope(|scope| {
                for page in [page.clone(), page.clone(), page] {
                    scope.spawn(move || drop(page));
                }
            });
            assert_eq!(pool.num_in_use(), 0);
        }
    }
}
