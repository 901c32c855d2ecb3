//! Tables of pages, a page in as many of them as share it (SPEC 11.1).

use std::collections::BTreeMap;

use crate::error::{ensure, Outcome};

/// Positions by a sequence at most: as many as SPEC 7.3 can tell apart.
const LONGEST: usize = 1 << 24;

/// The pages of one sequence, in order.
#[derive(Clone, Default)]
pub struct Table {
    pages: Vec<usize>,
    length: usize,
}

/// How many tables hold each page, which are free, and how many were copied so far.
pub struct Pool {
    page_size: usize,
    holders: Vec<usize>,
    free: Vec<usize>,
    copied: usize,
}

impl Pool {
    pub fn new(page_size: usize) -> Outcome<Pool> {
        ensure(page_size > 0, "page_size must be above 0")?;
        Ok(Pool { page_size, holders: vec![], free: vec![], copied: 0 })
    }

    pub fn used(&self) -> usize {
        self.holders.iter().filter(|holders| **holders > 0).count()
    }

    pub fn shared(&self) -> usize {
        self.holders.iter().filter(|holders| **holders > 1).count()
    }

    fn take(&mut self) -> usize {
        let page = self.free.pop().unwrap_or(self.holders.len());
        if page == self.holders.len() {
            self.holders.push(0);
        }
        self.holders[page] = 1;
        page
    }

    /// The last page of a table, where it is partly filled and in another table too.
    fn shared_tail(&self, table: &Table) -> Option<usize> {
        let last = *table.pages.last()?;
        (!table.length.is_multiple_of(self.page_size) && self.holders[last] > 1).then_some(last)
    }

    /// The free pages that appending takes.
    pub fn needed(&self, table: &Table, positions: usize) -> usize {
        if positions == 0 {
            return 0;
        }
        let pages = (table.length + positions).div_ceil(self.page_size);
        pages - table.pages.len() + usize::from(self.shared_tail(table).is_some())
    }

    pub fn append(&mut self, table: &mut Table, positions: usize) -> Outcome<()> {
        if positions == 0 {
            return Ok(());
        }
        ensure(positions <= LONGEST - table.length, "a sequence is longer than 2^24")?;
        if let Some(last) = self.shared_tail(table) {
            self.holders[last] -= 1;
            table.pages.pop();
            table.pages.push(self.take());
            self.copied += 1;
        }
        table.length += positions;
        while table.pages.len() * self.page_size < table.length {
            table.pages.push(self.take());
        }
        Ok(())
    }

    pub fn fork(&mut self, table: &Table) -> Table {
        table.pages.iter().for_each(|page| self.holders[*page] += 1);
        table.clone()
    }

    /// Keeps the first positions, of which the table has as many; 0 frees it.
    pub fn truncate(&mut self, table: &mut Table, length: usize) {
        let kept = length.div_ceil(self.page_size).min(table.pages.len());
        for page in table.pages.drain(kept..) {
            self.holders[page] -= 1;
            if self.holders[page] == 0 {
                self.free.push(page);
            }
        }
        table.length = length.min(table.length);
    }
}

/// The operation `paging` (SPEC 17): script (n, 3), result (n, 3).
pub fn paging(script: &[i64], page_size: usize) -> Outcome<Vec<i64>> {
    let mut pool = Pool::new(page_size)?;
    let mut tables: BTreeMap<i64, Table> = BTreeMap::new();
    let mut told = vec![];
    for line in script.chunks_exact(3) {
        let (step, sequence) = (line[0], line[1]);
        let count = usize::try_from(line[2]).map_err(|_| "a script has a negative count")?;
        ensure(step != 1 || sequence != line[2], "a script forks a sequence onto itself")?;
        let known = tables.remove(&sequence);
        ensure(step == 0 || known.is_some(), "a script names a sequence that is not there")?;
        let mut table = known.unwrap_or_default();
        match step {
            0 => pool.append(&mut table, count)?,
            1 => {
                let fork = pool.fork(&table);
                if let Some(mut replaced) = tables.insert(line[2], fork) {
                    pool.truncate(&mut replaced, 0);
                }
            }
            2 => pool.truncate(&mut table, count),
            3 => pool.truncate(&mut table, 0),
            _ => return Err("a script has an unknown step".into()),
        }
        if step != 3 {
            tables.insert(sequence, table);
        }
        told.extend([pool.used(), pool.shared(), pool.copied].map(|count| count as i64));
    }
    Ok(told)
}
