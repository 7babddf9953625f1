// Floats as numbers that sort alike: the greatest first, of equals the first. Zeros of both signs are equal, NaNs are least.
uint order(float x) {
    if (isnan(x)) return 0;
    uint u = floatBitsToUint(x == 0 ? 0.0 : x);
    return (u & 0x80000000u) != 0 ? ~u : u | 0x80000000u;
}
