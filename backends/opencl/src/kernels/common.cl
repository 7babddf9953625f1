// What every program shares. A memory operand is two arguments: a buffer and the byte of it at which the operand begins, in 64 bits.

#define AT(T, name) ((__global T*)(name##_buf + name##_off))
#define IN(name) __global const uchar* restrict name##_buf, ulong name##_off
#define CAT(T, name) ((__global const T*)(name##_buf + name##_off))
#define OUT(name) __global uchar* name##_buf, ulong name##_off

// The halves of KV rows and scales: devices with cl_khr_fp16 load and widen vectors, the others go through vload_half, which all have.
#ifdef FP16
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define HALF1(p, i) ((float)(((__global const half*)(p))[i]))
#define HALF4(p) convert_float4(*(__global const half4*)(p))
#else
#define HALF1(p, i) vload_half(i, (__global const half*)(p))
#define HALF4(p) vloada_half4(0, (__global const half*)(p))
#endif

// Sums `value` over the work-group; `shared` holds one float for each work-item. All work-items get the sum.
inline float group_sum(float value, __local float* shared) {
    const uint i = get_local_id(0), n = get_local_size(0);
    shared[i] = value;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint half_n = n / 2; half_n > 0; half_n /= 2) {
        if (i < half_n) shared[i] += shared[i + half_n];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    const float sum = shared[0];
    barrier(CLK_LOCAL_MEM_FENCE);
    return sum;
}

inline float activate(const uint which, const float x) {
    switch (which) {
    case 0: return x / (1.0f + exp(-x));
    case 1: {
        const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
        // (1 + tanh(u)) / 2, without the difference that leaves few digits of small results.
        return x / (1.0f + exp(-2.0f * inner));
    }
    case 2: return 0.5f * x * erfc(-x * 0.70710678118654752f);
    case 3: return fmax(x, 0.0f);
    case 4: return 1.0f / (1.0f + exp(-x));
    case 6: return fmax(x, 0.0f) + log1p(exp(-fabs(x)));
    default: return tanh(x);
    }
}
