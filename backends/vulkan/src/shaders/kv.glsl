// The run's record: what changes from run to run, so that recorded commands need not. Offsets are in words. `params.rs` writes it.
//
//   groups   of KV group g, at 4 g: block_len, offset of the sequences' tables, offset of the tiles' addresses, number of layers
//   kinds    12 words each: workgroups of attention (3), offset of its tiles, workgroups of the combination (3), splits, keys a split
//   tokens   for each row: sequence, position
//   tables   for each sequence: offset of its KvBlocks, position of the first; a KvBlock is (segment, index in it)

struct Place { uint64_t k; uint64_t v; };

uint word(uint64_t params, uint i) { return LDU(params + 4 * uint64_t(i)); }
uvec2 words2(uint64_t params, uint i) { return uvec2(word(params, i), word(params, i + 1)); }

// Where the block that holds position `pos` of a sequence has its keys and values, and the place of `pos` in it.
uint kv_block(uint64_t params, uint group, uint layer, uint seq, uint pos, uint k_bytes, uint v_bytes, out Place place) {
    uint block_len = word(params, 4 * group);
    uint tables = word(params, 4 * group + 1);
    uint bases = word(params, 4 * group + 2);
    uint n_layers = word(params, 4 * group + 3);
    uvec2 table = words2(params, tables + 2 * seq);
    uint at = pos - table.y;
    uvec2 block = words2(params, table.x + 2 * (at / block_len));
    uint64_t base = params + 4 * uint64_t(bases) + 16 * uint64_t(block.x * n_layers + layer);
    place.k = LDL(base) + uint64_t(block.y) * k_bytes * block_len;
    place.v = LDL(base + 8) + uint64_t(block.y) * v_bytes * block_len;
    return at % block_len;
}
