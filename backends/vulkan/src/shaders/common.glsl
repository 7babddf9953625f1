// What every kernel shares: 64-bit addresses, and loads and stores through them.
//
// There are no descriptors. A storage buffer that is bound whole has a range limit of its own (128 MiB and up), and some drivers
// read zeros beyond 2 GiB of it; an address has neither fault. Offsets are added in 64 bits before the access, never as an index.

#extension GL_EXT_buffer_reference : require
#extension GL_EXT_buffer_reference2 : require
#extension GL_EXT_shader_explicit_arithmetic_types_int64 : require
#extension GL_EXT_shader_explicit_arithmetic_types_int16 : require
#extension GL_EXT_shader_16bit_storage : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_KHR_shader_subgroup_shuffle : require

layout(buffer_reference, std430, buffer_reference_align = 4) buffer RefF { float v; };
layout(buffer_reference, std430, buffer_reference_align = 16) buffer RefF4 { vec4 v; };
layout(buffer_reference, std430, buffer_reference_align = 4) buffer RefI { int v; };
layout(buffer_reference, std430, buffer_reference_align = 4) buffer RefU { uint v; };
layout(buffer_reference, std430, buffer_reference_align = 8) buffer RefU2 { uvec2 v; };
layout(buffer_reference, std430, buffer_reference_align = 16) buffer RefU4 { uvec4 v; };
layout(buffer_reference, std430, buffer_reference_align = 8) buffer RefL { uint64_t v; };
layout(buffer_reference, std430, buffer_reference_align = 2) buffer RefH { uint16_t v; };

#define LDF(a) (RefF(a).v)
#define LDF4(a) (RefF4(a).v)
#define LDI(a) (RefI(a).v)
#define LDU(a) (RefU(a).v)
#define LDU2(a) (RefU2(a).v)
#define LDU4(a) (RefU4(a).v)
#define LDL(a) (RefL(a).v)
#define LDH(a) (uint(RefH(a).v))

float half_at(uint64_t a) { return unpackHalf2x16(LDH(a)).x; }

// Functions whose built-in forms are only good to a few digits on some drivers.
float tanh_exact(float x) {
    float a = abs(x);
    float s = x * x;
    float small = x * (1.0 + s * (-0.33333333 + s * (0.13333334 + s * (-0.053968254 + s * (0.021869489
        + s * (-0.0088632355 + s * 0.0035921280))))));
    float big = 1.0 - 2.0 / (exp(2.0 * min(a, 20.0)) + 1.0);
    return a < 0.45 ? small : (x < 0.0 ? -big : big);
}

float erf_exact(float x) {
    // Abramowitz and Stegun 7.1.26, |error| < 1.5e-7.
    float a = abs(x);
    float t = 1.0 / (1.0 + 0.3275911 * a);
    float p = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
    float y = 1.0 - p * exp(-a * a);
    return x < 0.0 ? -y : y;
}

const uint ACT_SILU = 0;
const uint ACT_GELU_TANH = 1;
const uint ACT_GELU_ERF = 2;
const uint ACT_RELU = 3;
const uint ACT_SIGMOID = 4;
const uint ACT_SOFTPLUS = 6;

float sigmoid(float x) { return 1.0 / (1.0 + exp(-max(x, -88.0))); }

float activate(float x, uint act) {
    if (act == ACT_SILU) {
        // Below -88 the exponential overflows where the quotient is a tiny number that counts for nothing.
        return x < -88.0 ? x * exp(x) : x * sigmoid(x);
    }
    if (act == ACT_GELU_TANH) {
        // 1 + tanh(u) cancels for negative u; 2 sigmoid(2u) is the same and does not.
        float u = 0.7978845608 * (x + 0.044715 * x * x * x);
        return x * sigmoid(2.0 * u);
    }
    if (act == ACT_GELU_ERF) return 0.5 * x * (1.0 + erf_exact(x * 0.70710678118));
    if (act == ACT_RELU) return max(x, 0.0);
    if (act == ACT_SIGMOID) return sigmoid(x);
    if (act == ACT_SOFTPLUS) {
        // The logarithm of 1 + e loses e's digits where e is small; its series does not.
        float e = exp(-abs(x));
        return max(x, 0.0) + (e < 1e-3 ? e * (1.0 - e * (0.5 - e / 3.0)) : log(1.0 + e));
    }
    return tanh_exact(x);
}
