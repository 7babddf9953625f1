// The sum over a team of 32 work-items; all of them get it.

inline float team_sum(float value, __local float* shared) {
    const uint lid = get_local_id(0), lane = lid % 32;
#if defined(SUBGROUPS) && defined(__opencl_c_subgroups)
    // Where sub-groups divide teams, the same in every sub-group of the work-group: WG is a multiple of 32.
    const uint size = get_max_sub_group_size();
    if (size <= 32 && 32 % size == 0) {
        value = sub_group_reduce_add(value);
        if (size == 32) return value;
        shared[lid] = value;
        barrier(CLK_LOCAL_MEM_FENCE);
        float sum = 0.0f;
        for (uint i = 0; i < 32; i += size) sum += shared[lid - lane + i];
        barrier(CLK_LOCAL_MEM_FENCE);
        return sum;
    }
#endif
    shared[lid] = value;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint n = 16; n > 0; n /= 2) {
        if (lane < n) shared[lid] += shared[lid + n];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    const float sum = shared[lid - lane];
    barrier(CLK_LOCAL_MEM_FENCE);
    return sum;
}
