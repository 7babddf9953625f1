//! The recurrent state: for each sequence one record of fixed size in each layer that keeps any.
//!
//! It does not grow with the context. A slot is the records of one sequence; the plan counts as many slots as sequences are asked for, and a slot is
//! allocated when it is first needed. A record lies in one chunk; records of a slot share chunks up to the limit.

use crate::Error;
use crate::memory::tiling::{ChunkLimits, Item, Packing, pack};
use tegula_program::StateLayer;

/// How the state of one program is cut up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateShape {
    /// Layers, in program order.
    pub layers: Vec<StateLayer>,
    /// Sequences that have state at a time.
    pub n_slots: u32,
    limits: ChunkLimits,
    alignment: u64,
}

impl StateShape {
    /// Room for `n_slots` sequences, in chunks under `limits`.
    pub fn new(layers: &[StateLayer], n_slots: u32, limits: ChunkLimits, alignment: u64) -> Self {
        let n_slots = if layers.is_empty() { 0 } else { n_slots };
        Self { layers: layers.to_vec(), n_slots, limits, alignment }
    }

    /// Bytes of one sequence's records, without padding between them.
    pub fn sequence_bytes(&self) -> u64 {
        self.layers.iter().map(StateLayer::bytes).fold(0, u64::saturating_add)
    }

    /// The chunks of one slot, with a tile for each layer.
    pub fn pack_slot(&self) -> Result<Packing, Error> {
        let item = |(i, layer): (usize, &StateLayer)| Item {
            name: format!("the recurrent state {i} of a sequence"),
            n_rows: 1,
            rows_per_group: 1,
            group_bytes: layer.bytes(),
            alignment: self.alignment,
            rows_per_expert: 0,
        };
        let items: Vec<Item> = self.layers.iter().enumerate().map(item).collect();
        pack(&items, ChunkLimits { preferred: self.limits.max_size, ..self.limits })
    }

    /// Bytes of all chunks of all slots.
    pub fn planned_bytes(&self) -> Result<u64, Error> {
        let slot = self.pack_slot()?.chunks.iter().copied().fold(0, u64::saturating_add);
        slot.checked_mul(self.n_slots.into())
            .ok_or_else(|| Error::Overflow { what: "the bytes of the recurrent state".into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device with small buffers must be able to hold the state of a large model, or say which record is too large for it.
    #[test]
    fn records_are_packed_whole_under_any_cap() {
        let layers: Vec<_> =
            (0..6).map(|i| StateLayer { n_elements: if i % 2 == 0 { 24 } else { 512 } }).collect();
        for max_size in [2048, 2100, 4096, 1 << 20] {
            let limits = ChunkLimits { max_size, preferred: max_size };
            let shape = StateShape::new(&layers, 3, limits, 64);
            let packing = shape.pack_slot().unwrap();
            assert!(packing.chunks.iter().all(|size| *size <= max_size));
            assert_eq!(
                packing.tiles.iter().map(|tile| tile.item).collect::<Vec<_>>(),
                [0, 1, 2, 3, 4, 5]
            );
            for (tile, layer) in packing.tiles.iter().zip(&layers) {
                assert_eq!(tile.size, layer.bytes());
                assert!(tile.offset.is_multiple_of(64));
            }
            let slot: u64 = packing.chunks.iter().sum();
            assert_eq!(shape.planned_bytes().unwrap(), slot * 3);
            assert!(slot >= shape.sequence_bytes());
        }
        let limits = ChunkLimits { max_size: 2047, preferred: 2047 };
        let error = StateShape::new(&layers, 3, limits, 64).pack_slot().unwrap_err();
        assert!(matches!(error, Error::RowTooBig { asked: 2048, limit: 2047, .. }), "{error}");
        assert_eq!(StateShape::new(&[], 9, limits, 64).planned_bytes().unwrap(), 0);
    }
}
