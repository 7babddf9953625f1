//! [`NameIndex`]: lookup by name over a list kept in file order.
//!
//! A sorted list of positions costs 4 bytes per name, borrows the names where they are, finds duplicates while it is
//! built, and has no bad case that a chosen set of names could trigger.

/// Positions of a list's items, sorted by name.
#[derive(Clone, Debug, Default)]
pub(crate) struct NameIndex {
    order: Vec<u32>,
}

/// Positions of two items that have one name, in list order.
pub(crate) struct Duplicate {
    pub(crate) first: usize,
    pub(crate) second: usize,
}

impl NameIndex {
    /// Sorts the positions of `items`, which hold fewer than 2^32 by the limits on counts.
    pub(crate) fn build<T>(items: &[T], name: impl Fn(&T) -> &str) -> Result<Self, Duplicate> {
        let name_at = |position: u32| items.get(position as usize).map(&name);
        let mut order: Vec<u32> = (0u32..).take(items.len()).collect();
        // A stable sort, so that `first` comes before `second` in the file.
        order.sort_by(|&a, &b| name_at(a).cmp(&name_at(b)));
        for (&first, &second) in order.iter().zip(order.iter().skip(1)) {
            if name_at(first) == name_at(second) {
                return Err(Duplicate { first: first as usize, second: second as usize });
            }
        }
        Ok(NameIndex { order })
    }

    /// The item called `wanted`; `items` and `name` are those the index was built from.
    pub(crate) fn find<'a, T>(
        &self,
        items: &'a [T],
        wanted: &str,
        name: impl Fn(&T) -> &str,
    ) -> Option<&'a T> {
        let place = self.order.binary_search_by(|&position| {
            items.get(position as usize).map_or("", &name).cmp(wanted)
        });
        let position = self.order.get(place.ok()?)?;
        items.get(*position as usize)
    }
}
