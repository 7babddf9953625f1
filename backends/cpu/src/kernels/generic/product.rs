//! A product as its tasks see it: a range of rows of W ([`Product`]), some rows of X and Y ([`Tokens`]). In a plain product these rows
//! follow each other; in one with experts they are those that chose the expert, wherever they stand, and W is the expert's part.

use std::ops::Range;

use tegula_quant::DType;

use super::activations::GROUP;
use super::matmul::RowTile;
use super::shared::SharedMut;

/// Rows of W, and where what they make goes.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    pub(crate) dtype: DType,
    /// All of W.
    pub(crate) tiles: &'a [RowTile],
    pub(crate) row_bytes: usize,
    pub(crate) n_in: usize,
    /// The row of W that makes column 0 of Y.
    pub(crate) first_row: usize,
    /// Columns of Y.
    pub(crate) n_out: usize,
    /// One for each column.
    pub(crate) bias: Option<&'a [f32]>,
    /// Tasks own disjoint columns, or rows.
    pub(crate) y: SharedMut<'a, f32>,
}

impl Product<'_> {
    /// The rows of W that make some columns of Y.
    #[inline(always)]
    pub(crate) fn rows_of_w(&self, columns: &Range<usize>) -> Range<usize> {
        self.first_row + columns.start..self.first_row + columns.end
    }
}

/// Activations that tasks read.
#[derive(Clone, Copy)]
pub(crate) struct Input<'a> {
    /// `[rows][n_in]`.
    pub(crate) x: &'a [f32],
    /// Elements of a row.
    pub(crate) n_in: usize,
}

impl Input<'_> {
    /// Groups of a quantised row.
    pub(crate) fn groups(&self) -> usize {
        self.n_in.div_ceil(GROUP)
    }

    /// Elements of a group, the last being shorter.
    pub(crate) fn group_len(&self, group: usize) -> usize {
        GROUP.min(self.n_in - group * GROUP)
    }
}

/// Some rows of X with the rows of Y that they make.
#[derive(Clone, Copy)]
pub(crate) struct Tokens<'a> {
    first: usize,
    n: usize,
    /// Rows of Y, of which `sharing` read one row of X; `None` for the same rows of both, from `first` on.
    places: Option<&'a [u32]>,
    sharing: usize,
}

impl<'a> Tokens<'a> {
    /// The same rows of X and Y.
    pub(crate) fn run(rows: Range<usize>) -> Self {
        Self { first: rows.start, n: rows.len(), places: None, sharing: 1 }
    }

    /// Rows of Y in any order; `sharing` of them that follow each other read one row of X.
    pub(crate) fn listed(places: &'a [u32], sharing: usize) -> Self {
        Self { first: 0, n: places.len(), places: Some(places), sharing: sharing.max(1) }
    }

    pub(crate) fn len(&self) -> usize {
        self.n
    }

    /// The first row of Y, where all follow each other.
    pub(crate) fn first_of_run(&self) -> Option<usize> {
        self.places.is_none().then_some(self.first)
    }

    /// Those from the `first`th on, at most `len`.
    pub(crate) fn part(&self, first: usize, len: usize) -> Self {
        let first = first.min(self.n);
        let n = len.min(self.n - first);
        match self.places {
            Some(places) => Self::listed(&places[first..first + n], self.sharing),
            None => Self::run(self.first + first..self.first + first + n),
        }
    }

    /// The row of X of the `i`th.
    #[inline(always)]
    pub(crate) fn x(&self, i: usize) -> usize {
        match self.places {
            Some(places) => places[i] as usize / self.sharing,
            None => self.first + i,
        }
    }

    /// The row of Y of the `i`th.
    #[inline(always)]
    pub(crate) fn y(&self, i: usize) -> usize {
        match self.places {
            Some(places) => places[i] as usize,
            None => self.first + i,
        }
    }
}
