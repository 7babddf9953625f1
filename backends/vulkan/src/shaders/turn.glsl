// Angles of rope. A frequency is a fraction of a turn in 64 bits; times a position, what overflows is whole turns. So the angle is exact
// at any position, where a product of floats would be off by 4e-3 radians at 100,000.

// Cosine and sine of `turns / 2^64` turns.
vec2 cos_sin(uint64_t turns) {
    // The nearest quarter turn, and what is left in -1/8 .. 1/8.
    uint high = uint(turns >> 32);
    uint quarter = (high + 0x20000000u) >> 30;
    int rest = int(high - (quarter << 30));
    float a = float(rest) * (6.283185307179586 / 4294967296.0);
    float s = a * a;
    float sine = a * (1.0 + s * (-0.16666667 + s * (8.3333333e-3 + s * (-1.9841270e-4 + s * 2.7557319e-6))));
    float cosine = 1.0 + s * (-0.5 + s * (4.1666667e-2 + s * (-1.3888889e-3 + s * (2.4801587e-5 - s * 2.7557319e-7))));
    quarter &= 3;
    vec2 v = (quarter & 1) == 1 ? vec2(-sine, cosine) : vec2(cosine, sine);
    return (quarter & 2) == 2 ? -v : v;
}
