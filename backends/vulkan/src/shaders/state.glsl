// What a run says of the sequences that carry state: `params.rs` writes it. Offsets are in words of the run's record.
//
//   layers   of state layer i, at `states + 4 i`: workgroups (3), offset of the spans
//   spans    of each sequence that has tokens, 4 words: first row, rows, position of the first row, number of sequences
//   records  after all spans, of each sequence, of each layer: address of its record

struct Span {
    uint first;
    uint n;
    // Zeros stand for the record of a sequence that begins.
    bool begins;
    uint64_t record;
};

Span span_of(uint64_t params, uint states, uint layer, uint n_layers, uint seq) {
    uint spans = LDU(params + 4 * uint64_t(states + 4 * layer + 3));
    uint64_t at = params + 4 * uint64_t(spans + 4 * seq);
    Span s;
    s.first = LDU(at);
    s.n = LDU(at + 4);
    s.begins = LDU(at + 8) == 0;
    uint n_seqs = LDU(at + 12);
    s.record = LDL(params + 4 * uint64_t(spans + 4 * n_seqs) + 8 * uint64_t(seq * n_layers + layer));
    return s;
}
