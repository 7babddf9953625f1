/*
 * The boundary between Tegula's core and its backends.
 *
 * A backend is a shared object named libtegula_<id>.so that exports one symbol, tegula_backend_v1.
 *
 * Growth is appending: every struct that crosses by pointer starts with struct_size, set by whoever filled it in. Read a
 * field only if it ends within that size; where a comment says "Out: bytes filled", write no more than the caller's
 * size and then write what you filled. Array elements are `stride` bytes apart, which may be more than your sizeof.
 * Enumerations are integers: a value you do not know is UNSUPPORTED, never undefined.
 * What is borrowed for a call is read only during the call. Handles are freed by the side that made them.
 * Nothing unwinds (no C++ exception), aborts or exits across the boundary.
 * Backend and device functions are called from any thread at any time; a queue from one thread at a time.
 */


#ifndef TEGULA_BACKEND_H
#define TEGULA_BACKEND_H

/* Generated from the tables in abi/src by `cargo xtask codegen`; edit those instead. */

#include <stddef.h>
#include <stdint.h>

/* Put before the definition of the entry symbol when compiling with -fvisibility=hidden, as a plugin should. */
#define TEGULA_EXPORT __attribute__((visibility("default")))


// The revision of the tables in this crate. A plugin states the range it can serve; the core takes the
// greatest revision both know.
#define TEGULA_REVISION 3

// The oldest revision that this crate's reader still understands.
#define TEGULA_REVISION_MIN 1

// Revisions from here on only append. Until a table reaches it, v1 is a draft.
#define TEGULA_FROZEN_FROM 100

// `HeapInfo::pool` of the host's physical memory: every heap that is carved from it says so, so that it is counted once.
#define TEGULA_POOL_HOST 1

// `WeightLayout::layout` of GGUF's own rows: such weights are used where they lie, from a file mapping too.
#define TEGULA_LAYOUT_NATIVE 0

// `Value::dims`: tokens of the run.
#define TEGULA_DIM_N_TOKENS (-1)

// `Value::dims`: rows of the run whose results are wanted.
#define TEGULA_DIM_N_OUTPUTS (-2)

// `asked` is set.
#define TEGULA_ERROR_HAS_ASKED 1

// `limit` is set.
#define TEGULA_ERROR_HAS_LIMIT 2

// `free` is set.
#define TEGULA_ERROR_HAS_FREE 4

// `native_code` is set.
#define TEGULA_ERROR_HAS_NATIVE 8

// Host memory that the device reads by DMA, never paged.
#define TEGULA_BUFFER_TYPE_FLAG_PINNED 1

// buffer_import works for this type.
#define TEGULA_BUFFER_TYPE_FLAG_IMPORT 2

// The right side of matmul.
#define TEGULA_WEIGHT_USE_MATMUL 1

// The table of embed.
#define TEGULA_WEIGHT_USE_EMBED 2

// Norm weights, biases, rope factors, kernels of convolutions: read element by element.
#define TEGULA_WEIGHT_USE_VECTOR 4

// The stack of matmul_experts: a few experts' rows are read in each run.
#define TEGULA_WEIGHT_USE_EXPERTS 8

// What a fallible function returns. 0 is success; everything else is a failure, known or not.
enum TegulaStatus
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // Done.
    TEGULA_STATUS_OK = 0,
    // The caller broke the contract; a bug in the core.
    TEGULA_STATUS_INVALID_ARGUMENT = 1,
    // The backend cannot do this: an op, a type, an optional function.
    TEGULA_STATUS_UNSUPPORTED = 2,
    // More than `limit` in one piece: over `max_size`, or a scratch value larger than a chunk may be.
    TEGULA_STATUS_TOO_BIG = 3,
    // Within every stated limit, but the memory is not there.
    TEGULA_STATUS_OUT_OF_MEMORY = 4,
    // The device is gone; every handle of it is dead and may only be freed.
    TEGULA_STATUS_DEVICE_LOST = 5,
    // The driver failed; `native_code` says how.
    TEGULA_STATUS_DRIVER = 6,
    // The plugin panicked and was caught; its state may be inconsistent, so the core stops using the device.
    TEGULA_STATUS_PANIC = 7,
    // Host and plugin have no revision in common.
    TEGULA_STATUS_INCOMPATIBLE = 8,
    // The wait ended before the fence value was reached.
    TEGULA_STATUS_TIMEOUT = 9,
    // No such device, heap, buffer type or extension.
    TEGULA_STATUS_NOT_FOUND = 10,
    // The caller's array is too short; the needed length was written.
    TEGULA_STATUS_SHORT_BUFFER = 11,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum TegulaStatus TegulaStatus;
#else
typedef int32_t TegulaStatus;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Severity of a log record, as in the `log` crate.
enum TegulaLogLevel
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // Nothing is wanted.
    TEGULA_LOG_LEVEL_OFF = 0,
    // Something failed.
    TEGULA_LOG_LEVEL_ERROR = 1,
    // Something works other than asked, or slower.
    TEGULA_LOG_LEVEL_WARN = 2,
    // What a user may want to know once.
    TEGULA_LOG_LEVEL_INFO = 3,
    // What a developer wants to know.
    TEGULA_LOG_LEVEL_DEBUG = 4,
    // Everything.
    TEGULA_LOG_LEVEL_TRACE = 5,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum TegulaLogLevel TegulaLogLevel;
#else
typedef uint32_t TegulaLogLevel;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// What a device is.
enum TegulaDeviceKind
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // Not known.
    TEGULA_DEVICE_KIND_OTHER = 0,
    // The host's processor.
    TEGULA_DEVICE_KIND_CPU = 1,
    // A GPU that shares the host's memory.
    TEGULA_DEVICE_KIND_INTEGRATED = 2,
    // A GPU with memory of its own.
    TEGULA_DEVICE_KIND_DISCRETE = 3,
    // Another accelerator.
    TEGULA_DEVICE_KIND_ACCELERATOR = 4,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum TegulaDeviceKind TegulaDeviceKind;
#else
typedef uint32_t TegulaDeviceKind;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Where a heap lies.
enum TegulaHeapKind
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // Not known.
    TEGULA_HEAP_KIND_OTHER = 0,
    // The host's memory.
    TEGULA_HEAP_KIND_HOST = 1,
    // The device's own memory.
    TEGULA_HEAP_KIND_DEVICE_LOCAL = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum TegulaHeapKind TegulaHeapKind;
#else
typedef uint32_t TegulaHeapKind;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Declares an open enumeration: a transparent integer with named constants.
// How much a `Figure`'s value may be trusted. Zeroed memory says "unknown".
enum TegulaFigureState
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // Nobody could say; `value` means nothing.
    TEGULA_FIGURE_STATE_UNKNOWN = 0,
    // `value` holds.
    TEGULA_FIGURE_STATE_KNOWN = 1,
    // The question makes no sense here (free memory of a device without memory of its own).
    TEGULA_FIGURE_STATE_NOT_APPLICABLE = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum TegulaFigureState TegulaFigureState;
#else
typedef uint32_t TegulaFigureState;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Where a `Figure` comes from.
enum TegulaFigureSource
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // Not stated.
    TEGULA_FIGURE_SOURCE_NONE = 0,
    // The driver or the operating system was asked, and this is its answer.
    TEGULA_FIGURE_SOURCE_DRIVER = 1,
    // Tried or timed on this machine.
    TEGULA_FIGURE_SOURCE_MEASURED = 2,
    // An operator's cap (`TEGULA_MAX_BUFFER`, `TEGULA_MEMORY_LIMIT`).
    TEGULA_FIGURE_SOURCE_OVERRIDE = 3,
    // Computed from other figures, or a documented floor where the driver cannot be asked.
    TEGULA_FIGURE_SOURCE_DERIVED = 4,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum TegulaFigureSource TegulaFigureSource;
#else
typedef uint32_t TegulaFigureSource;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// How the host reaches a buffer's memory.
enum TegulaHostAccess
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // Only through queue_write and queue_read.
    TEGULA_HOST_ACCESS_NONE = 0,
    // buffer_map gives a pointer for the buffer's life.
    TEGULA_HOST_ACCESS_MAPPED = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum TegulaHostAccess TegulaHostAccess;
#else
typedef uint32_t TegulaHostAccess;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// What a buffer will hold; a hint for placement and for the driver's usage bits.
enum TegulaBufferUsage
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // Not stated.
    TEGULA_BUFFER_USAGE_ANY = 0,
    // Weights: written once, read by every run.
    TEGULA_BUFFER_USAGE_WEIGHTS = 1,
    // Keys and values.
    TEGULA_BUFFER_USAGE_KV = 2,
    // Scratch of executables.
    TEGULA_BUFFER_USAGE_SCRATCH = 3,
    // Transfers between host and device.
    TEGULA_BUFFER_USAGE_STAGING = 4,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum TegulaBufferUsage TegulaBufferUsage;
#else
typedef uint32_t TegulaBufferUsage;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Element and block types. Numbers and layouts are GGUF's (`F32` 0, `F16` 1, `Q4_0` 2, ...).
enum TegulaDType
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // 32-bit float.
    TEGULA_DTYPE_F32 = 0,
    // 16-bit float.
    TEGULA_DTYPE_F16 = 1,
    // 32-bit signed integer: token ids, positions, row numbers.
    TEGULA_DTYPE_I32 = 26,
    // bfloat16.
    TEGULA_DTYPE_BF16 = 30,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum TegulaDType TegulaDType;
#else
typedef uint32_t TegulaDType;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Where a value comes from.
enum TegulaValueKind
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // Given at every run.
    TEGULA_VALUE_KIND_INPUT = 1,
    // Bound at compile; tiled along its rows.
    TEGULA_VALUE_KIND_WEIGHT = 2,
    // Made by an op.
    TEGULA_VALUE_KIND_RESULT = 3,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum TegulaValueKind TegulaValueKind;
#else
typedef uint32_t TegulaValueKind;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// What an op does. Inputs and outputs are listed in order; `?` marks inputs that may be absent at the end of the list.
enum TegulaOpCode
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // `(ids i32[n], W) -> f32[n, n_in]`: row `ids[i]` of W. No parameters.
    TEGULA_OP_CODE_EMBED = 1,
    // `(x, weight?) -> y`: `NormParams`.
    TEGULA_OP_CODE_RMS_NORM = 2,
    // `(x, weight, bias?) -> y`: `NormParams`.
    TEGULA_OP_CODE_LAYER_NORM = 3,
    // `(x f32[n, n_in], W, bias? f32[n_rows]) -> f32[n, n_rows]`: `x W^T + bias`. No parameters.
    TEGULA_OP_CODE_MATMUL = 4,
    // `(x, positions i32[n], factors? f32[n_rot / 2]) -> y`: `RopeParams`.
    TEGULA_OP_CODE_ROPE = 5,
    // `(k, v) -> ()`: stores the run's keys and values at their positions. `KvStoreParams`.
    TEGULA_OP_CODE_KV_STORE = 6,
    // `(q, sinks? f32[n_head]) -> f32[n, n_head * head_dim_v]`: `AttentionParams`.
    TEGULA_OP_CODE_ATTENTION = 7,
    // `(gate, up) -> act(gate) * up`: `ActivationParams`.
    TEGULA_OP_CODE_GLU = 8,
    // `(x) -> act(x)`: `ActivationParams`.
    TEGULA_OP_CODE_UNARY = 9,
    // `(a, b) -> a + b`; b may be one row, used for every row of a. No parameters.
    TEGULA_OP_CODE_ADD = 10,
    // `(a, b) -> a * b`; b may be one row, or a weight of one number. No parameters.
    TEGULA_OP_CODE_MUL = 11,
    // `(x) -> x * factor`: `ScaleParams`.
    TEGULA_OP_CODE_SCALE = 12,
    // `(x) -> cap * tanh(x / cap)`: `ScaleParams`, `factor` is the cap.
    TEGULA_OP_CODE_SOFTCAP = 13,
    // `(x f32[n, m]) -> f32[n, len]`: columns `begin .. begin + len`. `SliceParams`.
    TEGULA_OP_CODE_SLICE = 14,
    // `(a f32[n, p], b f32[n, q]) -> f32[n, p + q]`. No parameters.
    TEGULA_OP_CODE_CONCAT = 15,
    // `(x f32[n, m], rows i32[k]) -> f32[k, m]`. No parameters.
    TEGULA_OP_CODE_GATHER_ROWS = 16,
    // `(x f32[n, m]) -> i32[n]`: index of the greatest element, the first of equals. No parameters.
    TEGULA_OP_CODE_ARGMAX = 17,
    // `(x f32[n, m]) -> (i32[n, k], f32[n, k])`: the k greatest, in falling order, the first of equals before. `TopKParams`.
    TEGULA_OP_CODE_TOP_K = 18,
    // `(x f32[n, n_in] or f32[n, k * n_in], W, ids i32[n, k], bias? f32[n_expert, n_rows]) -> f32[n, k * n_rows]`, where W is
    // `[n_expert * n_rows, n_in]`, expert after expert: columns `j * n_rows ..` of row i are `x W_e^T + bias_e` with `e = ids[i, j]`.
    // All k products of a row read the same x, or, where x is k times as wide, columns `j * n_in ..` of it. `ExpertsParams`.
    TEGULA_OP_CODE_MATMUL_EXPERTS = 19,
    // `(logits f32[n, n_expert], selection_bias? f32[n_expert]) -> (ids i32[n, k], weights f32[n, k])`: `RouterParams`.
    TEGULA_OP_CODE_ROUTER_TOPK = 20,
    // `(x f32[n, k * m], weights f32[n, k]) -> f32[n, m]`: the sum over j of `weights[i, j]` times columns `j * m ..`. No parameters.
    TEGULA_OP_CODE_COMBINE_EXPERTS = 21,
    // `(x) -> x / sqrt(sum(x^2) + eps)` over groups of n elements: `NormParams`.
    TEGULA_OP_CODE_L2_NORM = 22,
    // `(x f32[n, m], W f32[m, kernel], bias? f32[m]) -> f32[n, m]`: causal convolution over time, each column by itself. `ConvStateParams`.
    TEGULA_OP_CODE_CONV_STATE = 23,
    // `(q f32[n, n_head_k * head_dim_k], k likewise, v f32[n, n_head_v * head_dim_v], g f32[n, n_head_v], beta f32[n, n_head_v])
    // -> f32[n, n_head_v * head_dim_v]`: the gated delta rule. `GatedDeltaParams`.
    TEGULA_OP_CODE_GATED_DELTA = 24,
    // `(x f32[n, c * group]) -> f32[n, c * len]`: columns `begin .. begin + len` of every group of `group` columns. `SliceGroupsParams`.
    TEGULA_OP_CODE_SLICE_GROUPS = 25,
    // `(gate, up) -> a / (1 + exp(-alpha a)) * (b + 1)` with `a = min(gate, limit)`, `b = clamp(up, -limit, limit)`. `GluClampedParams`.
    TEGULA_OP_CODE_GLU_CLAMPED = 26,
    // `(a f32[n, c * p] or f32[n, p], b f32[n, c * q]) -> f32[n, c * (p + q)]`: for every group, its columns of a and then its columns of b. Where a
    // has one group alone, all groups get it. `ConcatGroupsParams`.
    TEGULA_OP_CODE_CONCAT_GROUPS = 27,
    // `(logits f32[n, n_expert], selection_bias? f32[n_expert]) -> (ids i32[n, k], weights f32[n, k])`: as ROUTER_TOPK, from the experts of the best
    // groups. `GroupedRouterParams`.
    TEGULA_OP_CODE_ROUTER_TOPK_GROUPED = 28,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum TegulaOpCode TegulaOpCode;
#else
typedef uint32_t TegulaOpCode;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Which two elements of a head rope turns together.
enum TegulaRopeStyle
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // `x[2i]` and `x[2i + 1]`.
    TEGULA_ROPE_STYLE_ADJACENT = 0,
    // `x[i]` and `x[i + n_rot / 2]`.
    TEGULA_ROPE_STYLE_NEOX = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum TegulaRopeStyle TegulaRopeStyle;
#else
typedef uint32_t TegulaRopeStyle;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Functions of one number.
enum TegulaActivation
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // `x / (1 + exp(-x))`.
    TEGULA_ACTIVATION_SILU = 0,
    // `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
    TEGULA_ACTIVATION_GELU_TANH = 1,
    // `0.5 x (1 + erf(x / sqrt(2)))`.
    TEGULA_ACTIVATION_GELU_ERF = 2,
    // `max(x, 0)`.
    TEGULA_ACTIVATION_RELU = 3,
    // `1 / (1 + exp(-x))`.
    TEGULA_ACTIVATION_SIGMOID = 4,
    // `tanh(x)`.
    TEGULA_ACTIVATION_TANH = 5,
    // `ln(1 + exp(x))`.
    TEGULA_ACTIVATION_SOFTPLUS = 6,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum TegulaActivation TegulaActivation;
#else
typedef uint32_t TegulaActivation;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// From a router's logits to the weights of experts.
enum TegulaRouterGating
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // Softmax over all experts.
    TEGULA_ROUTER_GATING_SOFTMAX = 0,
    // Sigmoid of each.
    TEGULA_ROUTER_GATING_SIGMOID = 1,
    // Softmax over the selected experts alone.
    TEGULA_ROUTER_GATING_SOFTMAX_SELECTED = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum TegulaRouterGating TegulaRouterGating;
#else
typedef uint32_t TegulaRouterGating;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Which head of queries and keys a head of values goes with, of `n_head_k` and `n_head_v`.
enum TegulaHeadOrder
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // Head h with `h / (n_head_v / n_head_k)`: neighbours share.
    TEGULA_HEAD_ORDER_GROUPED = 0,
    // Head h with `h % n_head_k`.
    TEGULA_HEAD_ORDER_TILED = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum TegulaHeadOrder TegulaHeadOrder;
#else
typedef uint32_t TegulaHeadOrder;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// The plugin's own backend object behind a pointer.
typedef struct TegulaBackendHandle TegulaBackendHandle;

// One allocation of a device. Any thread.
typedef struct TegulaBufferHandle TegulaBufferHandle;

// The plugin's open device behind a pointer. Any thread.
typedef struct TegulaDeviceHandle TegulaDeviceHandle;

// A compiled program. Any thread, but one run at a time.
typedef struct TegulaExecutableHandle TegulaExecutableHandle;

// An order of work on a device. One thread at a time.
typedef struct TegulaQueueHandle TegulaQueueHandle;

// A borrowed piece of UTF-8, not terminated. Lives for the call unless the field says otherwise. Frozen.
typedef struct {
    // First byte; may be null when `len` is 0.
    const uint8_t *ptr;
    // Length in bytes.
    size_t len;
} TegulaStr;

// What the host speaks and offers. Lives as long as the plugin is loaded.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // Oldest revision that the host can drive.
    uint32_t revision_min;
    // Newest revision that the host can drive.
    uint32_t revision_max;
    // Passed back to every host function.
    void *ctx;
    // Takes one log record. Callable from any thread until the plugin's last handle is closed. Default: records are dropped.
    void (*log)(void *ctx, TegulaLogLevel level, TegulaStr target, TegulaStr message);
    // Records above this level need not be sent.
    TegulaLogLevel log_level_max;
    // The host's version, for the plugin's log.
    TegulaStr version;
    // Host services by name; null for unknown names. Default: none.
    const void *(*extension)(void *ctx, TegulaStr name);
} TegulaHost;

// The caller's record of a failure. The caller sets `struct_size`, `message` and `message_cap`, the callee the rest.
typedef struct {
    // Set by the caller.
    size_t struct_size;
    // The same status as returned.
    TegulaStatus status;
    // Bits of `error_has`.
    uint32_t has;
    // The driver's own code (`VkResult`, `cl_int`, `errno`).
    int64_t native_code;
    // Bytes asked for.
    uint64_t asked;
    // Bytes that would have been allowed.
    uint64_t limit;
    // Bytes free when it failed.
    uint64_t free;
    // The caller's memory for the text (UTF-8, cut at a character); may be null.
    uint8_t *message;
    // Capacity of `message` in bytes.
    size_t message_cap;
    // Bytes of text written.
    size_t message_len;
} TegulaErrorRecord;

// Text of fixed capacity inside a struct: UTF-8, ended by the first NUL or by the capacity. Frozen.
typedef struct {
    // The bytes; unused ones are zero.
    uint8_t bytes[16];
} TegulaText_16;

// Text of fixed capacity inside a struct: UTF-8, ended by the first NUL or by the capacity. Frozen.
typedef struct {
    // The bytes; unused ones are zero.
    uint8_t bytes[128];
} TegulaText_128;

// Text of fixed capacity inside a struct: UTF-8, ended by the first NUL or by the capacity. Frozen.
typedef struct {
    // The bytes; unused ones are zero.
    uint8_t bytes[64];
} TegulaText_64;

// Identity of a device. Identities are facts of the silicon: the same card under two backends gives the same UUID or PCI address.
typedef struct {
    // In: the caller's size. Out: bytes filled.
    size_t struct_size;
    // What it is.
    TegulaDeviceKind kind;
    // 1 if `uuid` is set.
    uint32_t has_uuid;
    // The driver's device UUID.
    uint8_t uuid[16];
    // PCI address `dddd:bb:dd.f`; empty if unknown.
    TegulaText_16 pci;
    // PCI vendor id; 0 if unknown.
    uint32_t vendor_id;
    // Number of heaps.
    uint32_t n_heaps;
    // Number of buffer types.
    uint32_t n_buffer_types;
    // Buffer type that the backend advises for weights.
    uint32_t type_for_weights;
    // Buffer type that the backend advises for the KV cache.
    uint32_t type_for_kv;
    // Buffer type that the backend advises for scratch.
    uint32_t type_for_scratch;
    // Buffer type that the backend advises for staging: memory the host can map.
    uint32_t type_for_staging;
    // How willingly `auto` takes it: among devices of one kind the greatest rank wins, and a device of rank 0 is used only
    // when named (an oracle, a debugging layer).
    uint32_t rank;
    // The device's name.
    TegulaText_128 name;
    // The vendor's name.
    TegulaText_64 vendor;
    // Driver name and version.
    TegulaText_128 driver;
} TegulaDeviceInfo;

// A number with its state and source. Frozen: passed and embedded by value.
typedef struct {
    // The number, in the unit that the field names; meaningless unless `state` is KNOWN.
    uint64_t value;
    // Whether `value` holds.
    TegulaFigureState state;
    // Who says so.
    TegulaFigureSource source;
} TegulaFigure;

// Physical memory that a device can use.
typedef struct {
    // In: the caller's size. Out: bytes filled.
    size_t struct_size;
    // Where it lies.
    TegulaHeapKind kind;
    // Unused; keeps `pool` aligned.
    uint32_t reserved;
    // Heaps of one device with the same pool share the same bytes; `POOL_HOST` is shared between devices and backends too.
    uint64_t pool;
    // Bytes in all.
    TegulaFigure total;
    // Bytes that this process could still take now; at most `total`.
    TegulaFigure free;
} TegulaHeapInfo;

// Text of fixed capacity inside a struct: UTF-8, ended by the first NUL or by the capacity. Frozen.
typedef struct {
    // The bytes; unused ones are zero.
    uint8_t bytes[32];
} TegulaText_32;

// A kind of memory that buffers can be made of.
typedef struct {
    // In: the caller's size. Out: bytes filled.
    size_t struct_size;
    // The heap it is taken from.
    uint32_t heap;
    // How the host reaches it.
    TegulaHostAccess host_access;
    // Bits of `buffer_type_flag`.
    uint32_t flags;
    // Unused; keeps `max_size` aligned.
    uint32_t reserved;
    // The greatest size for which buffer_alloc succeeds on an idle device *and* every byte of which every op of this backend
    // can address: the minimum of everything that binds. Never a guess at infinity.
    TegulaFigure max_size;
    // Alignment of a buffer's first byte, and of tiles inside it unless a `WeightLayout` asks for more. Tiles in imported memory lie where
    // the file has them: there only the layout's alignment holds.
    uint64_t alignment;
    // Sizes are rounded up to a multiple of this.
    uint64_t granularity;
    // The chunk size that works best; advice, at most `max_size`.
    TegulaFigure preferred_chunk;
    // Bytes per second at which the device reads it.
    TegulaFigure read_bandwidth;
    // Alignment that buffer_import asks of pointer and size.
    uint64_t import_alignment;
    // Short name for tables, such as `device_local`.
    TegulaText_32 name;
} TegulaBufferTypeInfo;

// Wishes for device_open.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // Host threads the device may keep busy; 0 leaves it to the backend.
    uint32_t n_threads;
} TegulaDeviceOptions;

// An allocation wish.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // Bytes; more than 0.
    uint64_t size;
    // Index of the buffer type. Memory of exactly this type is returned, or an error.
    uint32_t buffer_type;
    // What it will hold.
    TegulaBufferUsage usage;
} TegulaBufferDesc;

// A weight matrix as the core holds it: `n_rows` rows of `n_in` elements in GGUF's row layout.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // Element or block type.
    TegulaDType dtype;
    // Bits of `weight_use`.
    uint32_t uses;
    // Elements of a row (input features).
    uint64_t n_in;
    // Rows (output features, vocabulary; experts times rows for expert stacks).
    uint64_t n_rows;
    // Rows of one expert, for expert stacks: a layout's groups of rows do not cross from one expert to the next, so `rows_per_group`
    // divides it. Default: 0, which is no stack.
    uint64_t rows_per_expert;
} TegulaWeightDesc;

// How a device wants a weight laid out; stated before anything is allocated, so that the plan is true.
typedef struct {
    // In: the caller's size. Out: bytes filled.
    size_t struct_size;
    // `LAYOUT_NATIVE`, or a number of the backend's own.
    uint32_t layout;
    // Rows are split between tiles only at multiples of this. Expert stacks are split between experts
    // where an expert fits a chunk, which is quick; a backend computes rightly for any split.
    uint32_t rows_per_group;
    // Bytes that a group of rows takes; the last group may be short of rows, not of bytes.
    uint64_t group_bytes;
    // Alignment of a tile's first byte.
    uint64_t alignment;
} TegulaWeightLayout;

// A typed, shaped value. Its index in `Program::values` is its id.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // Where it comes from.
    TegulaValueKind kind;
    // Element type; only weights have block types.
    TegulaDType dtype;
    // 1 or 2.
    uint32_t n_dims;
    // Unused; keeps `dims` aligned.
    uint32_t reserved;
    // Outermost first; negative ones are symbolic (`DIM_*`).
    int64_t dims[4];
    // The tensor's name for weights, a hint for people otherwise.
    TegulaStr name;
} TegulaValue;

// A borrowed array whose elements may be of a newer, longer type than the reader's. Frozen.
//
// Element `i` starts `i * stride` bytes after `ptr`; `stride` is the writer's size of `T`. A reader refuses a
// stride below the first revision's size of `T` and takes defaults for fields beyond it.
typedef struct {
    // First element; may be null when `len` is 0.
    const TegulaValue *ptr;
    // Number of elements.
    size_t len;
    // Distance between elements in bytes.
    size_t stride;
} TegulaSlice_Value;

// A borrowed array whose elements may be of a newer, longer type than the reader's. Frozen.
//
// Element `i` starts `i * stride` bytes after `ptr`; `stride` is the writer's size of `T`. A reader refuses a
// stride below the first revision's size of `T` and takes defaults for fields beyond it.
typedef struct {
    // First element; may be null when `len` is 0.
    const uint32_t *ptr;
    // Number of elements.
    size_t len;
    // Distance between elements in bytes.
    size_t stride;
} TegulaSlice_u32;

// One op.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // What it does.
    TegulaOpCode code;
    // The transformer layer it belongs to, -1 for none; for logs and placement.
    int32_t layer;
    // Ids of what it reads.
    TegulaSlice_u32 inputs;
    // Ids of what it makes.
    TegulaSlice_u32 outputs;
    // The parameter struct of its code, starting with its `struct_size`; null if the code has none.
    const void *params;
} TegulaOp;

// A borrowed array whose elements may be of a newer, longer type than the reader's. Frozen.
//
// Element `i` starts `i * stride` bytes after `ptr`; `stride` is the writer's size of `T`. A reader refuses a
// stride below the first revision's size of `T` and takes defaults for fields beyond it.
typedef struct {
    // First element; may be null when `len` is 0.
    const TegulaOp *ptr;
    // Number of elements.
    size_t len;
    // Distance between elements in bytes.
    size_t stride;
} TegulaSlice_Op;

// Keys and values of one layer.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // Its group: layers of a group share block tables.
    uint32_t group;
    // Its index among the layers of the group.
    uint32_t index;
    // Heads of keys and values.
    uint32_t n_head_kv;
    // Elements of a key.
    uint32_t head_dim_k;
    // Elements of a value.
    uint32_t head_dim_v;
    // Type of stored keys: F32, F16, BF16, Q8_0 or Q4_0.
    TegulaDType dtype_k;
    // Type of stored values.
    TegulaDType dtype_v;
} TegulaKvLayer;

// A borrowed array whose elements may be of a newer, longer type than the reader's. Frozen.
//
// Element `i` starts `i * stride` bytes after `ptr`; `stride` is the writer's size of `T`. A reader refuses a
// stride below the first revision's size of `T` and takes defaults for fields beyond it.
typedef struct {
    // First element; may be null when `len` is 0.
    const TegulaKvLayer *ptr;
    // Number of elements.
    size_t len;
    // Distance between elements in bytes.
    size_t stride;
} TegulaSlice_KvLayer;

// State that an op keeps for each sequence between runs: `n_elements` f32, contiguous, in an order that the op says.
// Exactly one op names it.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // Elements of one sequence's record.
    uint64_t n_elements;
} TegulaStateLayer;

// A borrowed array whose elements may be of a newer, longer type than the reader's. Frozen.
//
// Element `i` starts `i * stride` bytes after `ptr`; `stride` is the writer's size of `T`. A reader refuses a
// stride below the first revision's size of `T` and takes defaults for fields beyond it.
typedef struct {
    // First element; may be null when `len` is 0.
    const TegulaStateLayer *ptr;
    // Number of elements.
    size_t len;
    // Distance between elements in bytes.
    size_t stride;
} TegulaSlice_StateLayer;

// A program. Borrowed for the call it is passed to.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // For logs.
    TegulaStr name;
    // All values.
    TegulaSlice_Value values;
    // All ops, in an order that can be run.
    TegulaSlice_Op ops;
    // Ids of the inputs, in the order of `RunArgs::inputs`.
    TegulaSlice_u32 inputs;
    // Ids of the outputs, in the order of `RunArgs::outputs`.
    TegulaSlice_u32 outputs;
    // The layers of the KV cache that KV_STORE and ATTENTION name.
    TegulaSlice_KvLayer kv_layers;
    // The recurrent state that CONV_STATE and GATED_DELTA name. Default: none.
    TegulaSlice_StateLayer state_layers;
} TegulaProgram;

// Bounds an executable is made for, and what it may use.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // Greatest n_tokens of a run (the ubatch).
    uint32_t n_tokens_max;
    // Greatest n_outputs of a run.
    uint32_t n_outputs_max;
    // Greatest number of sequences of a run.
    uint32_t n_seqs_max;
    // Greatest position + 1 of a run.
    uint32_t n_ctx_max;
    // Buffer type that scratch comes from.
    uint32_t scratch_type;
    // Unused; keeps `scratch_chunk_max` aligned.
    uint32_t reserved;
    // Greatest scratch chunk: the buffer type's `max_size`, or an operator's cap below it.
    uint64_t scratch_chunk_max;
} TegulaCompileOptions;

// A piece of scratch that every run must be given.
typedef struct {
    // Bytes.
    uint64_t size;
    // Alignment of its first byte.
    uint64_t alignment;
} TegulaScratchDesc;

// What an executable would take, stated before it is made.
typedef struct {
    // In: the caller's size. Out: bytes filled.
    size_t struct_size;
    // The caller's array for the scratch pieces; may be null to ask for the number.
    TegulaScratchDesc *scratch;
    // Elements that `scratch` can take.
    size_t scratch_cap;
    // Out: pieces needed. SHORT_BUFFER is returned when there are more than `scratch_cap`.
    size_t scratch_len;
    // Out: bytes of the device's memory that compiling takes outside all buffers (packed weights, pipelines).
    uint64_t device_bytes;
    // Out: the same of the host's memory.
    uint64_t host_bytes;
} TegulaExecutableMemory;

// Bytes inside a buffer. Frozen.
typedef struct {
    // The buffer; null where a field allows "none".
    TegulaBufferHandle *buffer;
    // First byte.
    uint64_t offset;
    // Bytes.
    uint64_t size;
} TegulaBufferRange;

// One tile of a weight: rows `first_row .. first_row + n_rows` at `range`. A weight of one dimension counts as a matrix
// of one row, here, in `WeightDesc` and in `WeightLayout`: its only tile has `first_row` 0 and `n_rows` 1.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // First row of the tensor in this tile.
    uint64_t first_row;
    // Rows in this tile.
    uint64_t n_rows;
    // Where they lie.
    TegulaBufferRange range;
    // The layout they have, as weight_layout gave it.
    uint32_t layout;
} TegulaWeightTile;

// A borrowed array whose elements may be of a newer, longer type than the reader's. Frozen.
//
// Element `i` starts `i * stride` bytes after `ptr`; `stride` is the writer's size of `T`. A reader refuses a
// stride below the first revision's size of `T` and takes defaults for fields beyond it.
typedef struct {
    // First element; may be null when `len` is 0.
    const TegulaWeightTile *ptr;
    // Number of elements.
    size_t len;
    // Distance between elements in bytes.
    size_t stride;
} TegulaSlice_WeightTile;

// The tiling of one weight value of a program. The tiles cover its rows in order, without gap or overlap.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // The value's index in the program.
    uint32_t value;
    // Its tiles; live as long as the executable.
    TegulaSlice_WeightTile tiles;
} TegulaWeightBinding;

// A borrowed array whose elements may be of a newer, longer type than the reader's. Frozen.
//
// Element `i` starts `i * stride` bytes after `ptr`; `stride` is the writer's size of `T`. A reader refuses a
// stride below the first revision's size of `T` and takes defaults for fields beyond it.
typedef struct {
    // First element; may be null when `len` is 0.
    const TegulaWeightBinding *ptr;
    // Number of elements.
    size_t len;
    // Distance between elements in bytes.
    size_t stride;
} TegulaSlice_WeightBinding;

// Rows to be written into a tile, repacked as the layout asks.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // The whole tensor.
    const TegulaWeightDesc *desc;
    // Which rows, and where to.
    const TegulaWeightTile *tile;
    // The rows in GGUF layout; lives until the fence is reached.
    const uint8_t *src;
    // Bytes of `src`.
    uint64_t src_size;
} TegulaWeightUpload;

// A value's bytes for one run: exactly one of `range.buffer` and `host` is set.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // The value's index in the program.
    uint32_t value;
    // Where it lies on the device, or `BufferRange::NONE`.
    TegulaBufferRange range;
    // Where it lies on the host, or null. Inputs are only read.
    uint8_t *host;
    // Bytes at `host`.
    uint64_t host_size;
} TegulaBinding;

// A borrowed array whose elements may be of a newer, longer type than the reader's. Frozen.
//
// Element `i` starts `i * stride` bytes after `ptr`; `stride` is the writer's size of `T`. A reader refuses a
// stride below the first revision's size of `T` and takes defaults for fields beyond it.
typedef struct {
    // First element; may be null when `len` is 0.
    const TegulaBinding *ptr;
    // Number of elements.
    size_t len;
    // Distance between elements in bytes.
    size_t stride;
} TegulaSlice_Binding;

// A borrowed array whose elements may be of a newer, longer type than the reader's. Frozen.
//
// Element `i` starts `i * stride` bytes after `ptr`; `stride` is the writer's size of `T`. A reader refuses a
// stride below the first revision's size of `T` and takes defaults for fields beyond it.
typedef struct {
    // First element; may be null when `len` is 0.
    const TegulaBufferRange *ptr;
    // Number of elements.
    size_t len;
    // Distance between elements in bytes.
    size_t stride;
} TegulaSlice_BufferRange;

// The KvBlocks of one sequence in one group, in order of position. Frozen.
typedef struct {
    // Ids of the blocks.
    const uint32_t *blocks;
    // Number of blocks.
    uint32_t n_blocks;
    // Position held by the first place of the first block; a multiple of the block length. Above 0 once a window has moved on.
    uint32_t first_pos;
} TegulaBlockTable;

// The tokens of one sequence in this run: rows `first_token ..` of the ubatch, at consecutive positions from `first_pos`.
// Its block tables cover every position up to the last one of this run.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // Row of its first token in the ubatch.
    uint32_t first_token;
    // Number of its tokens.
    uint32_t n_tokens;
    // Position of its first token.
    uint32_t first_pos;
    // Unused; keeps `tables` aligned.
    uint32_t reserved;
    // One block table for each KV group of the program.
    const TegulaBlockTable *tables;
    // Its place in `StatePool`; no two sequences of a run have the same. Default: 0, which is right for a program without state.
    uint32_t state_slot;
    // Unused; keeps the size even.
    uint32_t reserved_end;
} TegulaSeqSpan;

// A borrowed array whose elements may be of a newer, longer type than the reader's. Frozen.
//
// Element `i` starts `i * stride` bytes after `ptr`; `stride` is the writer's size of `T`. A reader refuses a
// stride below the first revision's size of `T` and takes defaults for fields beyond it.
typedef struct {
    // First element; may be null when `len` is 0.
    const TegulaSeqSpan *ptr;
    // Number of elements.
    size_t len;
    // Distance between elements in bytes.
    size_t stride;
} TegulaSlice_SeqSpan;

// A run of blocks whose bytes were allocated together: blocks `first_block .. first_block + n_blocks`. Frozen.
typedef struct {
    // Id of its first block.
    uint32_t first_block;
    // Number of its blocks.
    uint32_t n_blocks;
} TegulaKvSegment;

// A borrowed array whose elements may be of a newer, longer type than the reader's. Frozen.
//
// Element `i` starts `i * stride` bytes after `ptr`; `stride` is the writer's size of `T`. A reader refuses a
// stride below the first revision's size of `T` and takes defaults for fields beyond it.
typedef struct {
    // First element; may be null when `len` is 0.
    const TegulaKvSegment *ptr;
    // Number of elements.
    size_t len;
    // Distance between elements in bytes.
    size_t stride;
} TegulaSlice_KvSegment;

// The KV cache of one group of layers that share block tables.
//
// One block of one layer's keys is `[n_head_kv][block_len][head_dim_k]` elements of the layer's `dtype_k`, contiguous; of its values
// likewise with `head_dim_v`. Blocks of a segment follow each other without gap, so block `b` of layer `i` has its keys at
// `tiles[(s * n_layers + i) * 2].offset + (b - segments[s].first_block) * bytes of one block`, its values in the tile after that.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // Changes whenever segments or tiles change; equal values mean equal tables, so that translated tables can be kept.
    uint64_t generation;
    // Tokens of a block.
    uint32_t block_len;
    // Layers of the group.
    uint32_t n_layers;
    // Its segments, in order of block id, without gap.
    TegulaSlice_KvSegment segments;
    // `segments.len * n_layers * 2` tiles: for each segment, for each layer, keys then values.
    TegulaSlice_BufferRange tiles;
} TegulaKvGroup;

// A borrowed array whose elements may be of a newer, longer type than the reader's. Frozen.
//
// Element `i` starts `i * stride` bytes after `ptr`; `stride` is the writer's size of `T`. A reader refuses a
// stride below the first revision's size of `T` and takes defaults for fields beyond it.
typedef struct {
    // First element; may be null when `len` is 0.
    const TegulaKvGroup *ptr;
    // Number of elements.
    size_t len;
    // Distance between elements in bytes.
    size_t stride;
} TegulaSlice_KvGroup;

// The recurrent state of all sequences: one record for each state layer in each slot, `n_elements` f32 as the layer's op says.
//
// A sequence whose `first_pos` is 0 begins with zeros whatever its records hold; one whose `first_pos` is more continues from what the run that ended
// at that position left. Runs that name a slot change its records; a run that fails leaves them undefined.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // Changes whenever tiles change; equal values mean equal tiles, so that translated tables can be kept.
    uint64_t generation;
    // Slots that exist: ids `0 .. n_slots`.
    uint32_t n_slots;
    // State layers of the program.
    uint32_t n_layers;
    // `n_slots * n_layers` tiles, each a whole record: for each slot, for each layer.
    TegulaSlice_BufferRange tiles;
} TegulaStatePool;

// One run.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // The program's symbolic dimension n_tokens.
    uint32_t n_tokens;
    // The program's symbolic dimension n_outputs.
    uint32_t n_outputs;
    // A binding for every input of the program, in the order of its inputs.
    TegulaSlice_Binding inputs;
    // A binding for every output of the program, in the order of its outputs.
    TegulaSlice_Binding outputs;
    // The pieces that program_memory asked for, in its order.
    TegulaSlice_BufferRange scratch;
    // The sequences; their rows cover the ubatch in order.
    TegulaSlice_SeqSpan seqs;
    // The KV groups of the program.
    TegulaSlice_KvGroup kv;
    // The recurrent state; null where the program has none. Default: null.
    const TegulaStatePool *state;
} TegulaRunArgs;

// The functions of an open device. Static in the plugin. Required unless marked `(optional)`.
typedef struct {
    // Set by the plugin.
    size_t struct_size;
    // Frees the device; all its buffers, executables and queues are freed before.
    void (*close)(TegulaDeviceHandle *device);
    // Allocates; contents are undefined. TOO_BIG over `max_size`, OUT_OF_MEMORY below it; null is never returned with OK.
    TegulaStatus (*buffer_alloc)(const TegulaDeviceHandle *device, const TegulaBufferDesc *desc, TegulaBufferHandle **out, TegulaErrorRecord *err);
    // (optional) Makes a read-only buffer of host memory that outlives it, without a copy. Default: not offered.
    TegulaStatus (*buffer_import)(const TegulaDeviceHandle *device, const TegulaBufferDesc *desc, const uint8_t *ptr, TegulaBufferHandle **out, TegulaErrorRecord *err);
    // Frees a buffer.
    void (*buffer_free)(const TegulaDeviceHandle *device, TegulaBufferHandle *buffer);
    // (optional) The host's address of a MAPPED buffer, valid until it is freed. Default: nothing is mapped.
    TegulaStatus (*buffer_map)(const TegulaDeviceHandle *device, const TegulaBufferHandle *buffer, uint8_t **out, TegulaErrorRecord *err);
    // The layout the device wants a weight in. UNSUPPORTED for a type it cannot read.
    TegulaStatus (*weight_layout)(const TegulaDeviceHandle *device, const TegulaWeightDesc *desc, TegulaWeightLayout *out, TegulaErrorRecord *err);
    // Writes 1 for every op of the program that the device can run and 0 for the rest; `out_len` is the number of ops.
    TegulaStatus (*program_supports)(const TegulaDeviceHandle *device, const TegulaProgram *program, uint8_t *out, size_t out_len, TegulaErrorRecord *err);
    // What compiling the program would take. TOO_BIG, with the limit, when one value would exceed a scratch chunk: the core then
    // asks again with fewer tokens.
    TegulaStatus (*program_memory)(const TegulaDeviceHandle *device, const TegulaProgram *program, const TegulaCompileOptions *options, TegulaExecutableMemory *out, TegulaErrorRecord *err);
    // Compiles. `weights` has one binding for each weight value; buffers and tiles outlive the executable. The program is borrowed.
    TegulaStatus (*program_compile)(const TegulaDeviceHandle *device, const TegulaProgram *program, const TegulaCompileOptions *options, const TegulaSlice_WeightBinding *weights, TegulaExecutableHandle **out, TegulaErrorRecord *err);
    // Frees an executable with no run in flight.
    void (*executable_free)(const TegulaDeviceHandle *device, TegulaExecutableHandle *executable);
    // Makes a queue. Its fence starts at 0.
    TegulaStatus (*queue_create)(const TegulaDeviceHandle *device, TegulaQueueHandle **out, TegulaErrorRecord *err);
    // Waits for all work of the queue and frees it.
    void (*queue_free)(TegulaQueueHandle *queue);
    // Copies host memory to a buffer. `src` lives until `fence` is reached. Work of a queue runs in order.
    TegulaStatus (*queue_write)(TegulaQueueHandle *queue, TegulaBufferRange dst, const uint8_t *src, uint64_t *fence, TegulaErrorRecord *err);
    // Copies a buffer to host memory, which holds it once `fence` is reached.
    TegulaStatus (*queue_read)(TegulaQueueHandle *queue, TegulaBufferRange src, uint8_t *dst, uint64_t *fence, TegulaErrorRecord *err);
    // Copies `src.size` bytes between two buffers of the device that do not overlap.
    TegulaStatus (*queue_copy)(TegulaQueueHandle *queue, TegulaBufferRange src, TegulaBufferRange dst, uint64_t *fence, TegulaErrorRecord *err);
    // Writes rows of a weight into a tile in the device's layout.
    TegulaStatus (*queue_upload)(TegulaQueueHandle *queue, const TegulaWeightUpload *upload, uint64_t *fence, TegulaErrorRecord *err);
    // Runs an executable once. `args` and its arrays are borrowed for the call; host memory named in bindings lives until `fence` is reached.
    TegulaStatus (*queue_run)(TegulaQueueHandle *queue, TegulaExecutableHandle *executable, const TegulaRunArgs *args, uint64_t *fence, TegulaErrorRecord *err);
    // Waits until the queue's fence is at least `fence`; an error of the work up to there is returned here, once. `timeout_ns` `u64::MAX` is for ever.
    TegulaStatus (*queue_wait)(TegulaQueueHandle *queue, uint64_t fence, uint64_t timeout_ns, TegulaErrorRecord *err);
} TegulaDeviceTable;

// The functions of a backend. Static in the plugin. Functions are required unless marked `(optional)`.
typedef struct {
    // Set by the plugin.
    size_t struct_size;
    // Loads drivers and lists devices. May be slow, may fail. One handle per runtime; several may live at once.
    TegulaStatus (*open)(TegulaBackendHandle **out, TegulaErrorRecord *err);
    // Frees the handle; all its devices are closed before.
    void (*close)(TegulaBackendHandle *backend);
    // Number of devices; fixed for the life of the handle. 0 is no error.
    TegulaStatus (*device_count)(const TegulaBackendHandle *backend, uint32_t *out, TegulaErrorRecord *err);
    // Identity of device `index` in `0..count`.
    TegulaStatus (*device_info)(const TegulaBackendHandle *backend, uint32_t index, TegulaDeviceInfo *out, TegulaErrorRecord *err);
    // A heap of the device, with the memory free at this moment. Never cached over devices.
    TegulaStatus (*heap_info)(const TegulaBackendHandle *backend, uint32_t index, uint32_t heap, TegulaHeapInfo *out, TegulaErrorRecord *err);
    // A buffer type of the device.
    TegulaStatus (*buffer_type_info)(const TegulaBackendHandle *backend, uint32_t index, uint32_t buffer_type, TegulaBufferTypeInfo *out, TegulaErrorRecord *err);
    // Makes device `index` usable (context, logical device, threads).
    TegulaStatus (*device_open)(const TegulaBackendHandle *backend, uint32_t index, const TegulaDeviceOptions *options, TegulaDeviceHandle **out, TegulaErrorRecord *err);
    // The functions of its devices. Static.
    const TegulaDeviceTable *device;
    // (optional) An extension table by name (`tegula.peer_copy.v1`), static in the plugin; null if unknown. Default: none.
    const void *(*extension)(TegulaStr name);
} TegulaBackendTable;

// What the plugin answers. Everything it points to is static in the plugin.
typedef struct {
    // In: the host's size of this struct. Out: the bytes that the plugin filled.
    size_t struct_size;
    // Oldest revision that the plugin can serve.
    uint32_t revision_min;
    // Newest revision that the plugin can serve.
    uint32_t revision_max;
    // The backend's id: lower case, `[a-z0-9_]+`, such as `vulkan`.
    TegulaStr id;
    // The plugin's own version.
    TegulaStr version;
    // One line for people.
    TegulaStr description;
    // The backend's functions.
    const TegulaBackendTable *backend;
} TegulaPlugin;

// Parameters of RMS_NORM, LAYER_NORM and L2_NORM.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // Added to the mean square (variance, sum of squares) before the root.
    float eps;
    // Elements normalised together; divides the last dimension. Per-head norms have the head's size here. Weight and bias have this length.
    uint32_t n;
} TegulaNormParams;

// Parameters of ROPE. Pair i of a head at position p turns by `p * f`, where with `full = base^(-2i / n_rot) / factors[i]`:
//
// * `f = full * freq_scale` when `ext_factor` is 0, else as YaRN mixes them:
//   `f = full * freq_scale * (1 - mix) + full * mix`, `mix = ext_factor * (1 - clamp((i - low) / max(high - low, 0.001), 0, 1))`,
//   `low = max(floor(pair(beta_fast)), 0)`, `high = min(ceil(pair(beta_slow)), n_rot - 1)`,
//   `pair(b) = n_rot * ln(n_ctx_orig / (2 pi b)) / (2 ln(base))`.
// * Cosine and sine are multiplied by exactly `attn_factor`. YaRN's `0.1 ln(s) + 1` is part of that number where a model
//   wants it; the op adds no term of its own.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // Which elements pair up.
    TegulaRopeStyle style;
    // Elements of a head; divides the last dimension.
    uint32_t head_dim;
    // Elements of a head that turn, from its start; even, at most `head_dim`.
    uint32_t n_rot;
    // Context the model was trained on before scaling; used when `ext_factor` is not 0.
    uint32_t n_ctx_orig;
    // Frequency base.
    float base;
    // Position scale (1 / scaling factor).
    float freq_scale;
    // YaRN's extrapolation mix; 0 for none.
    float ext_factor;
    // Magnitude of cosine and sine.
    float attn_factor;
    // YaRN's fast boundary, in rotations.
    float beta_fast;
    // YaRN's slow boundary, in rotations.
    float beta_slow;
} TegulaRopeParams;

// Parameters of KV_STORE.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // Index into `Program::kv_layers`.
    uint32_t kv_layer;
} TegulaKvStoreParams;

// Parameters of ATTENTION: causal softmax attention over the sequence's stored keys and values, this run's included.
// Query head h reads key head `h / (n_head / n_head_kv)`. A head's sink takes part in its softmax as one more score, neither
// scaled nor capped, whose value is zero.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // Index into `Program::kv_layers`.
    uint32_t kv_layer;
    // Query heads; a multiple of the layer's n_head_kv.
    uint32_t n_head;
    // Multiplies every score.
    float scale;
    // Scores become `softcap * tanh(score / softcap)`; 0 for none.
    float softcap;
    // A query at p sees positions above `p - window`; 0 for all up to p.
    uint32_t window;
} TegulaAttentionParams;

// Parameters of GLU and UNARY.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // The function.
    TegulaActivation activation;
} TegulaActivationParams;

// Parameters of SCALE and SOFTCAP.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // The factor, or the cap.
    float factor;
} TegulaScaleParams;

// Parameters of SLICE.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // First column.
    uint32_t begin;
    // Number of columns.
    uint32_t len;
} TegulaSliceParams;

// Parameters of TOP_K.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // How many; at most the last dimension.
    uint32_t k;
} TegulaTopKParams;

// Parameters of MATMUL_EXPERTS.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // Experts; divides the rows of W.
    uint32_t n_expert;
} TegulaExpertsParams;

// Parameters of ROUTER_TOPK.
//
// With `p = softmax(logits)`, `sigmoid(logits)` or, for SOFTMAX_SELECTED, `logits`, the selected experts are the k greatest of `p + selection_bias`, in
// falling order, the first of equals before; a NaN is less than everything. Their weights are their `p`, without the bias, for SOFTMAX_SELECTED the
// softmax over the k; with `normalise` they are then divided by their sum, which counts as at least 1e-20; last they are multiplied by `scale`.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // Experts of a token; at most n_expert.
    uint32_t k;
    // How logits become weights.
    TegulaRouterGating gating;
    // 1 to divide the weights by their sum, 0 not to.
    uint32_t normalise;
    // Multiplies the weights.
    float scale;
} TegulaRouterParams;

// Parameters of CONV_STATE. With `x[s]` the row of the sequence's position s, zero before position 0:
// `y[t] = bias + sum over j in 0 .. kernel of W[:, j] * x[t - (kernel - 1) + j]`.
//
// The record is `[kernel - 1][m]`: the sequence's last `kernel - 1` rows of x, the oldest first. It is read for rows before this run,
// and written with what the next run needs.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // Index into `Program::state_layers`.
    uint32_t state_layer;
} TegulaConvStateParams;

// Parameters of GATED_DELTA (Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", equation 10).
//
// Each head of values has a state S of `[head_dim_v][head_dim_k]`, all zero before position 0. For each token in order, with the head's
// q, k, v, g, beta (k is normalised by whoever makes it; g is the logarithm of the decay, at most 0; beta is between 0 and 1):
//
// ```text
// S = exp(g) S
// d = beta (v - S k)
// S = S + d k^T
// y = scale S q
// ```
//
// The record is `[n_head_v][head_dim_v][head_dim_k]`: S after the sequence's last token. Rows of S do not touch each other. Backends may compute several tokens
// at once by an equal form.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // Index into `Program::state_layers`.
    uint32_t state_layer;
    // Heads of queries and keys.
    uint32_t n_head_k;
    // Heads of values; a multiple of n_head_k.
    uint32_t n_head_v;
    // Elements of a query and of a key.
    uint32_t head_dim_k;
    // Elements of a value.
    uint32_t head_dim_v;
    // Which heads go together.
    TegulaHeadOrder order;
    // Multiplies the result.
    float scale;
} TegulaGatedDeltaParams;

// Parameters of SLICE_GROUPS.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // Columns of a group; divides the last dimension.
    uint32_t group;
    // First column in each group.
    uint32_t begin;
    // Number of columns of each group.
    uint32_t len;
} TegulaSliceGroupsParams;

// Parameters of GLU_CLAMPED.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // Steepness of the sigmoid.
    float alpha;
    // Bound of both sides; more than 0.
    float limit;
} TegulaGluClampedParams;

// Parameters of CONCAT_GROUPS.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // Columns of a group of the first input; divides its last dimension.
    uint32_t group_a;
    // Columns of a group of the second input; divides its last dimension, and the quotient is the number of groups.
    uint32_t group_b;
} TegulaConcatGroupsParams;

// Parameters of ROUTER_TOPK_GROUPED.
//
// Experts stand in `n_group` groups of neighbours. With `s = p + selection_bias`, p as for ROUTER_TOPK, a group's score is the sum of its `n_score` greatest s.
// The `n_group_used` groups of the greatest scores, the first of equals before, are searched: the selected experts are the k greatest s of
// their experts, in falling order, the first of equals before. The rest is as for ROUTER_TOPK; a NaN is less than everything, in sums too, where it counts as
// negative infinity.
typedef struct {
    // Set by the host.
    size_t struct_size;
    // Experts of a token; at most those of `n_group_used` groups.
    uint32_t k;
    // How logits become weights.
    TegulaRouterGating gating;
    // 1 to divide the weights by their sum, 0 not to.
    uint32_t normalise;
    // Multiplies the weights.
    float scale;
    // Groups; divides n_expert.
    uint32_t n_group;
    // Groups that are searched; at most `n_group`.
    uint32_t n_group_used;
    // Scores of a group that count; at most a group's experts.
    uint32_t n_score;
} TegulaGroupedRouterParams;

// The type of `ENTRY_SYMBOL`: negotiates and returns at once; no driver call, no thread, no allocation kept.
// Gives INCOMPATIBLE, with `revision_min` and `revision_max` filled, when no revision is common.
typedef TegulaStatus (*TegulaBackendEntry)(const TegulaHost *host, TegulaPlugin *out);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The one symbol of a plugin: negotiates and returns at once. See `TegulaBackendEntry`.
extern TegulaStatus tegula_backend_v1(const TegulaHost *host, TegulaPlugin *out);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* TEGULA_BACKEND_H */
