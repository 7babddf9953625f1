/*
 * A worked backend in C, from the header alone: one device of host memory that runs ADD, MUL and SCALE over f32.
 *
 *     cc -std=c11 -shared -fPIC -fvisibility=hidden -I abi/include tests/abi/c_backend/c_backend.c -o libtegula_cexample.so
 *
 * What it cannot do it says: program_supports answers 0, program_compile UNSUPPORTED. Copy it, change the memory to your
 * device's, then add ops. Work is done inside the call that submits it, so a fence is reached when it is returned.
 */
#include "tegula_backend.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define STR(text) { (const uint8_t *)(text), sizeof(text) - 1 }
/* An array's elements are `stride` bytes apart, which may be more than this header knows of them. */
#define AT(slice, type, i) ((const type *)(const void *)((const char *)(slice).ptr + (size_t)(i) * (slice).stride))
#define MAX_VALUES 256

struct TegulaBackendHandle { const TegulaHost *host; };
struct TegulaDeviceHandle { const TegulaHost *host; };
struct TegulaBufferHandle { uint8_t *bytes; uint64_t size; };
struct TegulaQueueHandle { uint64_t fence; };

/* One op of a compiled program. */
typedef struct { TegulaOpCode code; uint32_t a, b, out; float factor; } Step;
/* A value's place: an input, an output, both through `slot`, or a piece of scratch. */
typedef enum { PLACE_NONE, PLACE_INPUT, PLACE_OUTPUT, PLACE_SCRATCH } Place;
struct TegulaExecutableHandle {
    size_t n_values, n_steps, n_outputs;
    /* The value of each output; one value may be several outputs. */
    uint32_t outputs[MAX_VALUES];
    Place place[MAX_VALUES];
    size_t slot[MAX_VALUES];
    int64_t rows[MAX_VALUES], width[MAX_VALUES];
    Step *steps;
};

static const TegulaHost *the_host;

/* Fills the caller's record as far as there is one, and returns the status for `return fail(...)`. */
static TegulaStatus fail(TegulaErrorRecord *err, TegulaStatus status, const char *message) {
    if (err != NULL && err->struct_size >= sizeof *err) {
        size_t len = strlen(message);
        err->status = status;
        err->has = 0;
        if (err->message == NULL) len = 0;
        if (len > err->message_cap) len = err->message_cap;
        if (len > 0) memcpy(err->message, message, len);
        err->message_len = len;
    }
    return status;
}

static TegulaStatus fail_sized(TegulaErrorRecord *err, TegulaStatus status, const char *message, uint64_t asked, uint64_t limit) {
    fail(err, status, message);
    if (err != NULL && err->struct_size >= sizeof *err) {
        err->has = TEGULA_ERROR_HAS_ASKED | TEGULA_ERROR_HAS_LIMIT;
        err->asked = asked;
        err->limit = limit;
    }
    return status;
}

/* Copies an answer into the caller's struct, no further than it reaches. */
static TegulaStatus answer(void *out, const void *value, size_t size, TegulaErrorRecord *err) {
    size_t room;
    if (out == NULL) return fail(err, TEGULA_STATUS_INVALID_ARGUMENT, "no struct to fill");
    memcpy(&room, out, sizeof room);
    if (room < size) size = room;
    if (size < sizeof size) return fail(err, TEGULA_STATUS_INVALID_ARGUMENT, "a struct without its size");
    memcpy(out, value, size);
    memcpy(out, &size, sizeof size);
    return TEGULA_STATUS_OK;
}

static TegulaFigure known(uint64_t value, TegulaFigureSource source) {
    TegulaFigure figure = { value, TEGULA_FIGURE_STATE_KNOWN, source };
    return figure;
}

/* ---- the backend and its list of devices ---- */

static TegulaStatus backend_open(TegulaBackendHandle **out, TegulaErrorRecord *err) {
    *out = calloc(1, sizeof **out);
    if (*out == NULL) return fail(err, TEGULA_STATUS_OUT_OF_MEMORY, "no memory for the backend");
    (*out)->host = the_host;
    if (the_host->struct_size >= offsetof(TegulaHost, log) + sizeof the_host->log && the_host->log != NULL) {
        TegulaStr target = STR("c"), message = STR("opened");
        the_host->log(the_host->ctx, TEGULA_LOG_LEVEL_DEBUG, target, message);
    }
    return TEGULA_STATUS_OK;
}

static void backend_close(TegulaBackendHandle *backend) { free(backend); }

static TegulaStatus device_count(const TegulaBackendHandle *backend, uint32_t *out, TegulaErrorRecord *err) {
    (void)backend, (void)err;
    *out = 1;
    return TEGULA_STATUS_OK;
}

static TegulaStatus device_info(const TegulaBackendHandle *backend, uint32_t index, TegulaDeviceInfo *out, TegulaErrorRecord *err) {
    TegulaDeviceInfo info = {0};
    (void)backend;
    if (index != 0) return fail(err, TEGULA_STATUS_NOT_FOUND, "there is one device");
    info.struct_size = sizeof info;
    info.kind = TEGULA_DEVICE_KIND_CPU;
    info.n_heaps = 1;
    info.n_buffer_types = 1;
    info.rank = 0; /* an example: used only when named */
    strcpy((char *)info.name.bytes, "C example");
    strcpy((char *)info.driver.bytes, "malloc");
    return answer(out, &info, sizeof info, err);
}

static uint64_t pages(int name) {
    long n = sysconf(name), size = sysconf(_SC_PAGESIZE);
    return n > 0 && size > 0 ? (uint64_t)n * (uint64_t)size : 0;
}

static TegulaStatus heap_info(const TegulaBackendHandle *backend, uint32_t index, uint32_t heap, TegulaHeapInfo *out, TegulaErrorRecord *err) {
    TegulaHeapInfo info = {0};
    uint64_t total = pages(_SC_PHYS_PAGES);
    (void)backend;
    if (index != 0 || heap != 0) return fail(err, TEGULA_STATUS_NOT_FOUND, "there is one heap");
    info.struct_size = sizeof info;
    info.kind = TEGULA_HEAP_KIND_HOST;
    info.pool = TEGULA_POOL_HOST;
    /*
     * Zeroed figures say "unknown", which is what to say where the system does not answer. What is free stays so:
     * _SC_AVPHYS_PAGES leaves out what the system would give up for us, and may not move when we take and give.
     */
    if (total > 0) info.total = known(total, TEGULA_FIGURE_SOURCE_DRIVER);
    return answer(out, &info, sizeof info, err);
}

/* calloc may promise more, but no more than this is there. */
static uint64_t max_size(void) { return pages(_SC_PHYS_PAGES); }

static TegulaStatus buffer_type_info(const TegulaBackendHandle *backend, uint32_t index, uint32_t type, TegulaBufferTypeInfo *out, TegulaErrorRecord *err) {
    TegulaBufferTypeInfo info = {0};
    (void)backend;
    if (index != 0 || type != 0) return fail(err, TEGULA_STATUS_NOT_FOUND, "there is one buffer type");
    info.struct_size = sizeof info;
    info.host_access = TEGULA_HOST_ACCESS_MAPPED;
    if (max_size() > 0) info.max_size = known(max_size(), TEGULA_FIGURE_SOURCE_DRIVER);
    info.alignment = sizeof(float);
    info.granularity = 1;
    info.import_alignment = 1;
    strcpy((char *)info.name.bytes, "host");
    return answer(out, &info, sizeof info, err);
}

static TegulaStatus device_open(const TegulaBackendHandle *backend, uint32_t index, const TegulaDeviceOptions *options, TegulaDeviceHandle **out, TegulaErrorRecord *err) {
    (void)options;
    if (index != 0) return fail(err, TEGULA_STATUS_NOT_FOUND, "there is one device");
    *out = calloc(1, sizeof **out);
    if (*out == NULL) return fail(err, TEGULA_STATUS_OUT_OF_MEMORY, "no memory for the device");
    (*out)->host = backend->host;
    return TEGULA_STATUS_OK;
}

static void device_close(TegulaDeviceHandle *device) { free(device); }

/* ---- buffers ---- */

static TegulaStatus buffer_alloc(const TegulaDeviceHandle *device, const TegulaBufferDesc *desc, TegulaBufferHandle **out, TegulaErrorRecord *err) {
    TegulaBufferHandle *buffer;
    uint64_t limit = max_size();
    (void)device;
    if (desc->buffer_type != 0) return fail(err, TEGULA_STATUS_NOT_FOUND, "there is one buffer type");
    if (limit > 0 && desc->size > limit) return fail_sized(err, TEGULA_STATUS_TOO_BIG, "more than the machine's memory", desc->size, limit);
    buffer = calloc(1, sizeof *buffer);
    if (buffer != NULL) buffer->bytes = malloc(desc->size);
    if (buffer == NULL || buffer->bytes == NULL) {
        free(buffer);
        return fail_sized(err, TEGULA_STATUS_OUT_OF_MEMORY, "malloc gave nothing", desc->size, limit);
    }
    buffer->size = desc->size;
    *out = buffer;
    return TEGULA_STATUS_OK;
}

static void buffer_free(const TegulaDeviceHandle *device, TegulaBufferHandle *buffer) {
    (void)device;
    free(buffer->bytes);
    free(buffer);
}

static TegulaStatus buffer_map(const TegulaDeviceHandle *device, const TegulaBufferHandle *buffer, uint8_t **out, TegulaErrorRecord *err) {
    (void)device, (void)err;
    *out = buffer->bytes;
    return TEGULA_STATUS_OK;
}

/* The address of a range, or null if it is not inside its buffer. */
static uint8_t *range_bytes(TegulaBufferRange range) {
    if (range.buffer == NULL || range.offset > range.buffer->size || range.size > range.buffer->size - range.offset) return NULL;
    return range.buffer->bytes + range.offset;
}

/* ---- programs ---- */

/* This device reads f32 weights where they lie; ops with weights are not among those it runs. */
static TegulaStatus weight_layout(const TegulaDeviceHandle *device, const TegulaWeightDesc *desc, TegulaWeightLayout *out, TegulaErrorRecord *err) {
    TegulaWeightLayout layout = {0};
    (void)device;
    if (desc->dtype != TEGULA_DTYPE_F32) return fail(err, TEGULA_STATUS_UNSUPPORTED, "weights of f32 only");
    layout.struct_size = sizeof layout;
    layout.layout = TEGULA_LAYOUT_NATIVE;
    layout.rows_per_group = 1;
    layout.group_bytes = desc->n_in * sizeof(float);
    layout.alignment = sizeof(float);
    return answer(out, &layout, sizeof layout, err);
}

static int is_f32(const TegulaProgram *program, uint32_t id) {
    const TegulaValue *value;
    if (id >= program->values.len || id >= MAX_VALUES) return 0;
    value = AT(program->values, TegulaValue, id);
    return value->dtype == TEGULA_DTYPE_F32 && value->kind != TEGULA_VALUE_KIND_WEIGHT && value->n_dims == 2;
}

/* Whether this device runs the op: what it does not know is never guessed. */
static int runs(const TegulaProgram *program, const TegulaOp *op) {
    size_t i, n_inputs = op->code == TEGULA_OP_CODE_SCALE ? 1 : 2;
    if (op->code != TEGULA_OP_CODE_ADD && op->code != TEGULA_OP_CODE_MUL && op->code != TEGULA_OP_CODE_SCALE) return 0;
    if (op->inputs.len != n_inputs || op->outputs.len != 1 || !is_f32(program, op->outputs.ptr[0])) return 0;
    if (op->code == TEGULA_OP_CODE_SCALE && op->params == NULL) return 0;
    for (i = 0; i < n_inputs; i++)
        if (!is_f32(program, op->inputs.ptr[i])) return 0;
    return 1;
}

static TegulaStatus program_supports(const TegulaDeviceHandle *device, const TegulaProgram *program, uint8_t *out, size_t out_len, TegulaErrorRecord *err) {
    size_t i;
    (void)device;
    if (out_len != program->ops.len) return fail(err, TEGULA_STATUS_INVALID_ARGUMENT, "one flag for each op");
    for (i = 0; i < out_len; i++) out[i] = (uint8_t)runs(program, AT(program->ops, TegulaOp, i));
    return TEGULA_STATUS_OK;
}

static int64_t extent(int64_t dim, uint32_t n_tokens, uint32_t n_outputs) {
    return dim == TEGULA_DIM_N_TOKENS ? n_tokens : dim == TEGULA_DIM_N_OUTPUTS ? n_outputs : dim;
}

/* Whether a value's index is in a list of ids; `at` gets its place in the list. */
static int find(TegulaSlice_u32 ids, uint32_t id, size_t *at) {
    for (*at = 0; *at < ids.len; ++*at)
        if (ids.ptr[*at] == id) return 1;
    return 0;
}

/* Every result that is no output has a piece of scratch of its own: simple, and far from the least possible. */
static TegulaStatus program_memory(const TegulaDeviceHandle *device, const TegulaProgram *program, const TegulaCompileOptions *options, TegulaExecutableMemory *out, TegulaErrorRecord *err) {
    size_t i, at, n = 0;
    (void)device;
    for (i = 0; i < program->values.len; i++) {
        const TegulaValue *value = AT(program->values, TegulaValue, i);
        uint64_t rows, width;
        if (value->kind != TEGULA_VALUE_KIND_RESULT || find(program->outputs, (uint32_t)i, &at)) continue;
        rows = (uint64_t)extent(value->dims[0], options->n_tokens_max, options->n_outputs_max);
        width = (uint64_t)(value->n_dims > 1 ? extent(value->dims[1], options->n_tokens_max, options->n_outputs_max) : 1);
        if (width > 0 && rows > options->scratch_chunk_max / sizeof(float) / width)
            return fail_sized(err, TEGULA_STATUS_TOO_BIG, "a value is larger than a scratch chunk", rows * width * sizeof(float), options->scratch_chunk_max);
        if (n < out->scratch_cap) {
            out->scratch[n].size = rows * width * sizeof(float);
            out->scratch[n].alignment = sizeof(float);
        }
        n++;
    }
    out->scratch_len = n;
    out->device_bytes = 0;
    out->host_bytes = sizeof(TegulaExecutableHandle) + program->ops.len * sizeof(Step);
    if (n > out->scratch_cap) return fail(err, TEGULA_STATUS_SHORT_BUFFER, "more pieces of scratch than fit");
    return TEGULA_STATUS_OK;
}

static TegulaStatus program_compile(const TegulaDeviceHandle *device, const TegulaProgram *program, const TegulaCompileOptions *options, const TegulaSlice_WeightBinding *weights, TegulaExecutableHandle **out, TegulaErrorRecord *err) {
    TegulaExecutableHandle *executable;
    size_t i, n_scratch = 0;
    (void)device, (void)options, (void)weights;
    if (program->values.len > MAX_VALUES || program->outputs.len > MAX_VALUES) return fail(err, TEGULA_STATUS_UNSUPPORTED, "too many values");
    for (i = 0; i < program->ops.len; i++)
        if (!runs(program, AT(program->ops, TegulaOp, i))) return fail(err, TEGULA_STATUS_UNSUPPORTED, "runs add, mul and scale over f32 only");
    executable = calloc(1, sizeof *executable);
    if (executable != NULL) executable->steps = calloc(program->ops.len + 1, sizeof *executable->steps);
    if (executable == NULL || executable->steps == NULL) {
        free(executable);
        return fail(err, TEGULA_STATUS_OUT_OF_MEMORY, "no memory for the executable");
    }
    executable->n_values = program->values.len;
    executable->n_steps = program->ops.len;
    executable->n_outputs = program->outputs.len;
    memcpy(executable->outputs, program->outputs.ptr, program->outputs.len * sizeof *executable->outputs);
    for (i = 0; i < program->values.len; i++) {
        const TegulaValue *value = AT(program->values, TegulaValue, i);
        executable->rows[i] = value->dims[0];
        executable->width[i] = value->n_dims > 1 ? value->dims[1] : 1;
        if (find(program->outputs, (uint32_t)i, &executable->slot[i])) executable->place[i] = PLACE_OUTPUT;
        else if (find(program->inputs, (uint32_t)i, &executable->slot[i])) executable->place[i] = PLACE_INPUT;
        else if (value->kind == TEGULA_VALUE_KIND_RESULT) executable->place[i] = PLACE_SCRATCH, executable->slot[i] = n_scratch++;
    }
    for (i = 0; i < program->ops.len; i++) {
        const TegulaOp *op = AT(program->ops, TegulaOp, i);
        Step *step = &executable->steps[i];
        step->code = op->code;
        step->a = op->inputs.ptr[0];
        step->b = op->inputs.ptr[op->inputs.len - 1];
        step->out = op->outputs.ptr[0];
        if (op->code == TEGULA_OP_CODE_SCALE) step->factor = ((const TegulaScaleParams *)op->params)->factor;
    }
    *out = executable;
    return TEGULA_STATUS_OK;
}

static void executable_free(const TegulaDeviceHandle *device, TegulaExecutableHandle *executable) {
    (void)device;
    free(executable->steps);
    free(executable);
}

/* ---- the queue ---- */

static TegulaStatus queue_create(const TegulaDeviceHandle *device, TegulaQueueHandle **out, TegulaErrorRecord *err) {
    (void)device;
    *out = calloc(1, sizeof **out);
    return *out != NULL ? TEGULA_STATUS_OK : fail(err, TEGULA_STATUS_OUT_OF_MEMORY, "no memory for the queue");
}

static void queue_free(TegulaQueueHandle *queue) { free(queue); }

static TegulaStatus queue_write(TegulaQueueHandle *queue, TegulaBufferRange dst, const uint8_t *src, uint64_t *fence, TegulaErrorRecord *err) {
    uint8_t *to = range_bytes(dst);
    if (to == NULL) return fail(err, TEGULA_STATUS_INVALID_ARGUMENT, "a range outside its buffer");
    memcpy(to, src, dst.size);
    *fence = ++queue->fence;
    return TEGULA_STATUS_OK;
}

static TegulaStatus queue_read(TegulaQueueHandle *queue, TegulaBufferRange src, uint8_t *dst, uint64_t *fence, TegulaErrorRecord *err) {
    const uint8_t *from = range_bytes(src);
    if (from == NULL) return fail(err, TEGULA_STATUS_INVALID_ARGUMENT, "a range outside its buffer");
    memcpy(dst, from, src.size);
    *fence = ++queue->fence;
    return TEGULA_STATUS_OK;
}

static TegulaStatus queue_copy(TegulaQueueHandle *queue, TegulaBufferRange src, TegulaBufferRange dst, uint64_t *fence, TegulaErrorRecord *err) {
    const uint8_t *from = range_bytes(src);
    if (from == NULL || src.size > dst.size) return fail(err, TEGULA_STATUS_INVALID_ARGUMENT, "a range outside its buffer");
    return queue_write(queue, dst, from, fence, err);
}

static TegulaStatus queue_upload(TegulaQueueHandle *queue, const TegulaWeightUpload *upload, uint64_t *fence, TegulaErrorRecord *err) {
    if (upload->tile->layout != TEGULA_LAYOUT_NATIVE || upload->src_size != upload->tile->range.size) return fail(err, TEGULA_STATUS_INVALID_ARGUMENT, "not the layout that weight_layout gave");
    return queue_write(queue, upload->tile->range, upload->src, fence, err);
}

/* The elements of a value in this run. */
static float *elements(const TegulaExecutableHandle *executable, const TegulaRunArgs *args, uint32_t id) {
    size_t slot = executable->slot[id];
    const TegulaBinding *binding;
    if (executable->place[id] == PLACE_SCRATCH) return (float *)(void *)range_bytes(*AT(args->scratch, TegulaBufferRange, slot));
    binding = executable->place[id] == PLACE_INPUT ? AT(args->inputs, TegulaBinding, slot) : AT(args->outputs, TegulaBinding, slot);
    return (float *)(void *)(binding->host != NULL ? binding->host : range_bytes(binding->range));
}

static TegulaStatus queue_run(TegulaQueueHandle *queue, TegulaExecutableHandle *executable, const TegulaRunArgs *args, uint64_t *fence, TegulaErrorRecord *err) {
    size_t s, i;
    for (s = 0; s < executable->n_steps; s++) {
        const Step *step = &executable->steps[s];
        const float *a = elements(executable, args, step->a), *b = elements(executable, args, step->b);
        float *out = elements(executable, args, step->out);
        size_t width = (size_t)extent(executable->width[step->out], args->n_tokens, args->n_outputs);
        size_t n = (size_t)extent(executable->rows[step->out], args->n_tokens, args->n_outputs) * width;
        /* b may be one row, used for every row of a. */
        size_t n_b = (size_t)extent(executable->rows[step->b], args->n_tokens, args->n_outputs) * width;
        if (a == NULL || b == NULL || out == NULL || n_b == 0) return fail(err, TEGULA_STATUS_INVALID_ARGUMENT, "a binding without memory");
        for (i = 0; i < n; i++) {
            if (step->code == TEGULA_OP_CODE_ADD) out[i] = a[i] + b[i % n_b];
            else if (step->code == TEGULA_OP_CODE_MUL) out[i] = a[i] * b[i % n_b];
            else out[i] = a[i] * step->factor;
        }
    }
    /* Steps write a value to the first output that it is; the others get a copy. */
    for (i = 0; i < executable->n_outputs; i++) {
        uint32_t id = executable->outputs[i];
        const TegulaBinding *binding = AT(args->outputs, TegulaBinding, i);
        uint8_t *to = binding->host != NULL ? binding->host : range_bytes(binding->range);
        const float *from = elements(executable, args, id);
        size_t n = (size_t)extent(executable->rows[id], args->n_tokens, args->n_outputs) * (size_t)extent(executable->width[id], args->n_tokens, args->n_outputs);
        if (from == NULL || to == NULL) return fail(err, TEGULA_STATUS_INVALID_ARGUMENT, "a binding without memory");
        if (to != (const uint8_t *)(const void *)from) memcpy(to, from, n * sizeof(float));
    }
    *fence = ++queue->fence;
    return TEGULA_STATUS_OK;
}

static TegulaStatus queue_wait(TegulaQueueHandle *queue, uint64_t fence, uint64_t timeout_ns, TegulaErrorRecord *err) {
    (void)timeout_ns;
    return fence <= queue->fence ? TEGULA_STATUS_OK : fail(err, TEGULA_STATUS_INVALID_ARGUMENT, "a fence that was never given");
}

/* ---- the tables ---- */

static const TegulaDeviceTable device_table = {
    .struct_size = sizeof(TegulaDeviceTable),
    .close = device_close,
    .buffer_alloc = buffer_alloc,
    .buffer_free = buffer_free,
    .buffer_map = buffer_map,
    .weight_layout = weight_layout,
    .program_supports = program_supports,
    .program_memory = program_memory,
    .program_compile = program_compile,
    .executable_free = executable_free,
    .queue_create = queue_create,
    .queue_free = queue_free,
    .queue_write = queue_write,
    .queue_read = queue_read,
    .queue_copy = queue_copy,
    .queue_upload = queue_upload,
    .queue_run = queue_run,
    .queue_wait = queue_wait,
};

static const TegulaBackendTable backend_table = {
    .struct_size = sizeof(TegulaBackendTable),
    .open = backend_open,
    .close = backend_close,
    .device_count = device_count,
    .device_info = device_info,
    .heap_info = heap_info,
    .buffer_type_info = buffer_type_info,
    .device_open = device_open,
    .device = &device_table,
};

TEGULA_EXPORT TegulaStatus tegula_backend_v1(const TegulaHost *host, TegulaPlugin *out) {
    TegulaPlugin plugin = {
        .struct_size = sizeof plugin,
        .revision_min = TEGULA_REVISION,
        .revision_max = TEGULA_REVISION,
        .id = STR("cexample"),
        .version = STR("1.0.0"),
        .description = STR("the worked example in C"),
        .backend = &backend_table,
    };
    TegulaStatus status = answer(out, &plugin, sizeof plugin, NULL);
    if (status != TEGULA_STATUS_OK) return status;
    if (host->revision_max < TEGULA_REVISION || host->revision_min > TEGULA_REVISION) return TEGULA_STATUS_INCOMPATIBLE;
    the_host = host;
    return TEGULA_STATUS_OK;
}
