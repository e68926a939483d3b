/* draw.c - random sequence lengths by fixed-point arithmetic. "Qn" is an integer that represents itself / 2^n. */

#include "draw.h"

#include <stddef.h>

/* ----------------------------------------------------------------------------------------------------------------
   Fixed-point logarithm, power and root
   ---------------------------------------------------------------------------------------------------------------- */

static int floor_log2(uint64_t x) {
    int log = 0;
    while (x >>= 1) log++;
    return log;
}

/* Returns log2(x) as Q32, for x >= 1. The whole part is the position of the top bit; each squaring of the rest yields
   one more bit. */
static int64_t log2_q32(uint64_t x) {
    int top = floor_log2(x), i;
    uint64_t rest = top <= 31 ? x << (31 - top) : x >> (top - 31); /* Q31, 1 <= rest < 2 */
    int64_t log = top;

    for (i = 0; i < 32; i++) {
        rest = rest * rest >> 31;
        log *= 2;
        if (rest >> 32) {
            rest >>= 1;
            log++;
        }
    }
    return log;
}

/* 2^(2^-1), 2^(2^-2), ... as Q31. */
static const uint32_t root_of_two[32] = {
    0xb504f334, 0x9837f052, 0x8b95c1e4, 0x85aac368, 0x82cd8699, 0x8164d1f4, 0x80b1ed50, 0x8058d7d3,
    0x802c6437, 0x8016302f, 0x800b179d, 0x80058baf, 0x8002c5d0, 0x800162e6, 0x8000b173, 0x800058b9,
    0x80002c5d, 0x8000162e, 0x80000b17, 0x8000058c, 0x800002c6, 0x80000163, 0x800000b1, 0x80000059,
    0x8000002c, 0x80000016, 0x8000000b, 0x80000006, 0x80000003, 0x80000001, 0x80000001, 0x80000000};

/* Returns 2^x rounded down, for x as Q32; 0 for x < 0, 2^63 - 1 for x >= 63. Accurate to about 26 bits. */
static int64_t exp2_q32(int64_t x) {
    uint64_t mantissa = (uint64_t)1 << 31; /* Q31, 1 <= mantissa < 2 */
    uint64_t fraction;
    int64_t whole;
    int i;

    if (x < 0) return 0;
    whole = x >> 32;
    if (whole >= 63) return INT64_MAX;
    fraction = (uint64_t)x & 0xffffffffu;
    for (i = 0; i < 32; i++)
        if (fraction >> (31 - i) & 1) mantissa = mantissa * root_of_two[i] >> 31;
    return (int64_t)(whole <= 31 ? mantissa >> (31 - whole) : mantissa << (whole - 31));
}

/* Returns the square root of x, rounded down. Each step finds one bit of the result, from the top. */
static uint64_t root_floor(uint64_t x) {
    uint64_t root = 0;
    uint64_t bit = (uint64_t)1 << 62;

    for (; bit; bit >>= 2) {
        uint64_t trial = root + bit;
        root >>= 1;
        if (x >= trial) {
            x -= trial;
            root += bit;
        }
    }
    return root;
}

/* ----------------------------------------------------------------------------------------------------------------
   Draws
   ---------------------------------------------------------------------------------------------------------------- */

uint64_t draw_bits(draw_source *source) {
    uint64_t z = source->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

uint64_t draw_below(draw_source *source, uint64_t n) {
    uint64_t last = UINT64_MAX - UINT64_MAX % n; /* below the largest multiple of n, all remainders are equally
                                                    likely */
    uint64_t bits;

    do bits = draw_bits(source);
    while (bits >= last);
    return bits % n;
}

int64_t draw_log_uniform(draw_source *source, int64_t low, int64_t high) {
    int64_t from = log2_q32((uint64_t)low);
    uint64_t range = (uint64_t)(log2_q32((uint64_t)high) - from); /* Q32 */
    uint64_t u = draw_bits(source) >> 32;                         /* Q32, below 1 */
    uint64_t step = (range >> 32) * u + ((range & 0xffffffffu) * u >> 32);
    int64_t x = exp2_q32(from + (int64_t)step);

    if (x < low) return low;
    return x < high ? x : high - 1;
}

int64_t draw_lmsys(draw_source *source) {
    /* below: cumulative share in 1 / 100,000; the bucket ends before `high` tokens */
    static const struct {
        uint64_t below;
        int64_t high;
    } buckets[] = {{90499, 1 << 10}, {99539, 4 << 10}, {99908, 8 << 10}, {99987, 32 << 10}, {99996, 128 << 10},
                   {100000, 303 << 10}};
    uint64_t share = draw_below(source, 100000);
    int64_t low = 16;
    size_t i = 0;

    while (share >= buckets[i].below) low = buckets[i++].high;
    return draw_log_uniform(source, low, buckets[i].high);
}

/* Returns a standard normal number as Q24, by Marsaglia's polar method: (u, v) uniform in the unit disc, s = u^2 + v^2,
   then (u / sqrt(s)) x sqrt(-2 ln s). */
static int64_t draw_normal_q24(draw_source *source) {
    const uint64_t two_ln2_q30 = 1488522236;
    int64_t u, v, direction;
    uint64_t s, minus_log, radius;

    do {
        uint64_t bits = draw_bits(source);
        u = (int64_t)(bits >> 32) - ((int64_t)1 << 31); /* Q31 */
        v = (int64_t)(bits & 0xffffffffu) - ((int64_t)1 << 31);
        s = (uint64_t)(u * u) + (uint64_t)(v * v);      /* Q62 */
    } while (s == 0 || s >= (uint64_t)1 << 62);

    minus_log = (uint64_t)(((int64_t)62 << 32) - log2_q32(s));   /* -log2(s), Q32 */
    radius = root_floor((minus_log >> 8) * two_ln2_q30);         /* root of Q54: Q27 */
    direction = u * ((int64_t)1 << 31) / (int64_t)root_floor(s); /* Q31 */
    return direction * (int64_t)radius / ((int64_t)1 << 34);     /* Q58 to Q24 */
}

int64_t draw_lognormal(draw_source *source, int64_t median, int64_t sigma_millionths) {
    const int64_t log2_e_q30 = 1549082005;
    int64_t exponent = sigma_millionths * draw_normal_q24(source) / 1000000; /* Q24 */
    int64_t log = log2_q32((uint64_t)median) + exponent * log2_e_q30 / ((int64_t)1 << 22); /* Q54 to Q32 */

    /* twice the value, so that rounding is possible */
    return (int64_t)(((uint64_t)exp2_q32(log + ((int64_t)1 << 32)) + 1) / 2);
}
