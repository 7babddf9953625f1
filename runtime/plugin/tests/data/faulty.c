/* The worked example with one fault, given as -DFAULT=... : a statement at the end of the negotiation, after copies of the tables were made. */
#define tegula_backend_v1 sound_entry
#include "c_backend.c"
#undef tegula_backend_v1

static TegulaBackendTable backend;
static TegulaDeviceTable device;
static TegulaHeapInfo heap;
static TegulaBufferTypeInfo type;
static TegulaDeviceInfo info;

static TegulaStatus open_nothing(TegulaBackendHandle **out, TegulaErrorRecord *err) { (void)out, (void)err; return TEGULA_STATUS_OK; }
static TegulaStatus open_no_driver(TegulaBackendHandle **out, TegulaErrorRecord *err) {
    (void)out;
    fail(err, TEGULA_STATUS_DRIVER, "no\tdriver\nhere");
    err->has = TEGULA_ERROR_HAS_NATIVE;
    err->native_code = -9;
    return TEGULA_STATUS_DRIVER;
}
static TegulaStatus many_devices(const TegulaBackendHandle *b, uint32_t *out, TegulaErrorRecord *err) { (void)b, (void)err; *out = 4000000000u; return TEGULA_STATUS_OK; }
static TegulaStatus other_heap(const TegulaBackendHandle *b, uint32_t i, uint32_t h, TegulaHeapInfo *out, TegulaErrorRecord *err) { (void)b, (void)i, (void)h; return answer(out, &heap, sizeof heap, err); }
static TegulaStatus other_type(const TegulaBackendHandle *b, uint32_t i, uint32_t t, TegulaBufferTypeInfo *out, TegulaErrorRecord *err) {
    TegulaStatus status = buffer_type_info(b, i, t, out, err);
    if (type.alignment) out->alignment = type.alignment;
    if (type.heap) out->heap = type.heap;
    if (type.max_size.state) out->max_size = type.max_size;
    if (type.flags) out->flags = type.flags;
    return status;
}
static TegulaStatus other_info(const TegulaBackendHandle *b, uint32_t i, TegulaDeviceInfo *out, TegulaErrorRecord *err) {
    TegulaStatus status = device_info(b, i, out, err);
    if (info.struct_size) out->struct_size = info.struct_size;
    if (info.n_heaps) out->n_heaps = info.n_heaps;
    if (info.type_for_kv) out->type_for_kv = info.type_for_kv;
    memset(out->name.bytes, 'n', sizeof out->name.bytes); /* no NUL */
    return status;
}
static TegulaStatus alloc_nothing(const TegulaDeviceHandle *d, const TegulaBufferDesc *desc, TegulaBufferHandle **out, TegulaErrorRecord *err) { (void)d, (void)desc, (void)out, (void)err; return TEGULA_STATUS_OK; }
static TegulaStatus alloc_mystery(const TegulaDeviceHandle *d, const TegulaBufferDesc *desc, TegulaBufferHandle **out, TegulaErrorRecord *err) {
    (void)d, (void)desc, (void)out;
    err->message_len = (size_t)-1; /* a lie about how much was written */
    return (TegulaStatus)99;
}
static TegulaStatus map_nothing(const TegulaDeviceHandle *d, const TegulaBufferHandle *b, uint8_t **out, TegulaErrorRecord *err) { (void)d, (void)b, (void)err; *out = NULL; return TEGULA_STATUS_OK; }
static TegulaStatus write_lost(TegulaQueueHandle *q, TegulaBufferRange r, const uint8_t *s, uint64_t *f, TegulaErrorRecord *err) { (void)q, (void)r, (void)s, (void)f; return fail(err, TEGULA_STATUS_DEVICE_LOST, "gone"); }
static TegulaStatus write_back(TegulaQueueHandle *q, TegulaBufferRange r, const uint8_t *s, uint64_t *f, TegulaErrorRecord *err) {
    TegulaStatus status = queue_write(q, r, s, f, err);
    *f = 10 - *f;
    return status;
}
static TegulaStatus wait_never(TegulaQueueHandle *q, uint64_t f, uint64_t t, TegulaErrorRecord *err) { (void)q, (void)f, (void)t; return t == 0 || f > 0 ? fail(err, TEGULA_STATUS_TIMEOUT, "later") : TEGULA_STATUS_OK; }

/* Host memory as it is; the buffer does not own it. */
static TegulaStatus import_host(const TegulaDeviceHandle *d, const TegulaBufferDesc *desc, const uint8_t *ptr, TegulaBufferHandle **out, TegulaErrorRecord *err) {
    (void)d, (void)err;
    *out = calloc(1, sizeof **out);
    (*out)->bytes = (uint8_t *)(uintptr_t)ptr;
    (*out)->size = desc->size;
    return TEGULA_STATUS_OK;
}
static void free_imported(const TegulaDeviceHandle *d, TegulaBufferHandle *buffer) { (void)d; free(buffer); }

/* A program of any ops, which only looks at its arguments: writes the sum of its block ids and the last KV tile's offset. */
static TegulaStatus compile_any(const TegulaDeviceHandle *d, const TegulaProgram *p, const TegulaCompileOptions *o, const TegulaSlice_WeightBinding *w, TegulaExecutableHandle **out, TegulaErrorRecord *err) {
    (void)d, (void)p, (void)o, (void)w, (void)err;
    *out = calloc(1, sizeof **out);
    (*out)->steps = NULL;
    return TEGULA_STATUS_OK;
}
static TegulaStatus run_any(TegulaQueueHandle *q, TegulaExecutableHandle *e, const TegulaRunArgs *args, uint64_t *fence, TegulaErrorRecord *err) {
    const TegulaKvGroup *group = AT(args->kv, TegulaKvGroup, 0);
    float *out = (float *)(void *)AT(args->outputs, TegulaBinding, 0)->host;
    size_t s, b;
    (void)e;
    if (group->tiles.len != group->segments.len * group->n_layers * 2) return fail(err, TEGULA_STATUS_INVALID_ARGUMENT, "tiles");
    out[0] = 0;
    for (s = 0; s < args->seqs.len; s++) {
        const TegulaSeqSpan *seq = AT(args->seqs, TegulaSeqSpan, s);
        for (b = 0; b < seq->tables[0].n_blocks; b++) out[0] += (float)seq->tables[0].blocks[b];
    }
    out[1] = (float)AT(group->tiles, TegulaBufferRange, group->tiles.len - 1)->offset;
    *fence = ++q->fence;
    return TEGULA_STATUS_OK;
}

TEGULA_EXPORT TegulaStatus tegula_backend_v1(const TegulaHost *host, TegulaPlugin *out) {
    TegulaStatus status = sound_entry(host, out);
    (void)open_nothing, (void)open_no_driver, (void)many_devices, (void)other_heap, (void)other_type, (void)other_info;
    (void)alloc_nothing, (void)alloc_mystery, (void)map_nothing, (void)write_lost, (void)write_back, (void)wait_never;
    (void)import_host, (void)free_imported, (void)compile_any, (void)run_any;
    backend = backend_table;
    device = device_table;
    backend.device = &device;
    out->backend = &backend;
    FAULT;
    return status;
}

#ifdef LAYOUT
/* What plugins in Rust export as well. */
typedef struct { size_t struct_size; uint32_t revision; TegulaStr format; const void *layout; } Record;
TEGULA_EXPORT const Record *tegula_layout_v1(void);
TEGULA_EXPORT const Record *tegula_layout_v1(void) {
    static Record record = { sizeof record, TEGULA_REVISION, STR("abi_stable-0.11"), NULL };
    LAYOUT;
    return &record;
}
#endif
