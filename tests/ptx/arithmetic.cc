/* arithmetic.cc - what one lane computes, by opcode and type; and the table of all opcodes */

#include "ptx.h"
#include "opcodes.h"

#include <cfenv>
#include <cmath>

namespace ptx {

/* Signed numbers are added and multiplied as unsigned ones: PTX wraps. */
struct plus {
    template <int N, typename V> static V of(V a, V b) { return a + b; }
};
struct minus {
    template <int N, typename V> static V of(V a, V b) { return a - b; }
};
struct times {
    template <int N, typename V> static V of(V a, V b) { return a * b; }
};
struct over {
    template <int N, typename V> static V of(V a, V b) { return a / b; }
};
struct both {
    template <int N, typename V> static V of(V a, V b) { return a & b; }
};
struct either {
    template <int N, typename V> static V of(V a, V b) { return a | b; }
};
struct unequal {
    template <int N, typename V> static V of(V a, V b) { return a ^ b; }
};
struct same {
    template <int N, typename V> static V of(V a) { return a; }
};
struct invert {
    template <int N, typename V> static V of(V a) { return ~a; }
};
struct negate {
    template <int N, typename V> static V of(V a) { return -a; }
};
struct one_over {
    template <int N, typename V> static V of(V a) { return 1 / a; }
};
struct lesser_of {
    template <int N, typename V> static V of(V a, V b) { return a < b ? a : b; }
};
struct greater_of {
    template <int N, typename V> static V of(V a, V b) { return a > b ? a : b; }
};
struct times_plus {
    template <int N, typename V> static V of(V a, V b, V c) { return a * b + c; }
};
struct without_sign {
    template <int N, typename V> static V of(V a) { return a & 0x7FFFFFFF; }
};
struct with_sign_of {
    template <int N, typename V> static V of(V a, V b) { return (a & 0x80000000u) | (b & 0x7FFFFFFFu); }
};

/* The greater number, where NaN is none, and +0 is greater than -0. */
struct greatest {
    template <int N, typename V> static V of(V a, V b) {
        const vec<int32_t, N> x = (vec<int32_t, N>)a, y = (vec<int32_t, N>)b;
        return a == b ? (V)(x & y) : (a > b) | (b != b) ? a : b;
    }
};

/* 16 x 16 and 32 x 32 bits, all of the product. */
template <typename WIDE> struct times_wide {
    template <int N, typename V> static vec<WIDE, N> of(V a, V b) {
        return __builtin_convertvector(a, vec<WIDE, N>) * __builtin_convertvector(b, vec<WIDE, N>);
    }
};
template <typename WIDE> struct times_wide_plus {
    template <int N, typename V> static vec<WIDE, N> of(V a, V b, vec<WIDE, N> c) {
        return times_wide<WIDE>::template of<N>(a, b) + c;
    }
};
struct high_half {
    template <int N, typename V> static V of(V a, V b) {
        return __builtin_convertvector(times_wide<int64_t>::of<N>(a, b) >> 32, V);
    }
};

/* Shifts by all bits or more leave nothing, or the sign. */
template <int BITS> struct left_by {
    template <int N, typename V> static V of(V a, vec<uint32_t, N> by) {
        const auto x = __builtin_convertvector(by, V);
        return x < BITS ? a << (x & (BITS - 1)) : V{};
    }
};
template <int BITS> struct right_by {
    template <int N, typename V> static V of(V a, vec<uint32_t, N> by) {
        const auto x = __builtin_convertvector(by, V);
        return x < BITS ? a >> (x & (BITS - 1)) : V{};
    }
};
template <int BITS> struct right_signed_by {
    template <int N, typename V> static V of(V a, vec<uint32_t, N> by) {
        return a >> __builtin_convertvector(by < BITS - 1 ? by : by * 0u + (BITS - 1), V);
    }
};

template <typename D> struct to {
    template <int N, typename V> static vec<D, N> of(V a) { return __builtin_convertvector(a, vec<D, N>); }
};
/* Reads the low half of a register. */
template <typename HALF, typename D> struct low_to {
    template <int N, typename V> static vec<D, N> of(V a) {
        return __builtin_convertvector(__builtin_convertvector(a, vec<HALF, N>), vec<D, N>);
    }
};
struct low_16 {
    template <int N, typename V> static V of(V a) { return a & 0xFFFF; }
};
struct saturate {
    template <int N, typename V> static V of(V a) { return a > 0 ? (a < 1 ? a : V{} + 1) : V{}; }
};

/* ---- comparisons; with NaN only those of names with u hold ---- */

struct is_eq {
    template <int N, typename V> static auto of(V a, V b) { return a == b; }
};
struct is_ne {
    template <int N, typename V> static auto of(V a, V b) { return a != b; }
};
struct is_ne_ordered {
    template <int N, typename V> static auto of(V a, V b) { return (a < b) | (a > b); }
};
struct is_lt {
    template <int N, typename V> static auto of(V a, V b) { return a < b; }
};
struct is_le {
    template <int N, typename V> static auto of(V a, V b) { return a <= b; }
};
struct is_gt {
    template <int N, typename V> static auto of(V a, V b) { return a > b; }
};
struct is_ge {
    template <int N, typename V> static auto of(V a, V b) { return a >= b; }
};
struct is_ltu {
    template <int N, typename V> static auto of(V a, V b) { return ~(a >= b); }
};
struct is_leu {
    template <int N, typename V> static auto of(V a, V b) { return ~(a > b); }
};

struct p_and {
    static uint32_t of(uint32_t a, uint32_t b) { return a & b; }
};
struct p_or {
    static uint32_t of(uint32_t a, uint32_t b) { return a | b; }
};
struct p_xor {
    static uint32_t of(uint32_t a, uint32_t b) { return a ^ b; }
};

static void not_pred(warp &w, const instruction &i) {
    uint32_t *d = at<uint32_t>(w, i.d);
    *d = (~*at<uint32_t>(w, i.a) & w.mask) | (*d & ~w.mask);
}

static void mov_pred(warp &w, const instruction &i) {
    uint32_t *d = at<uint32_t>(w, i.d);
    *d = (*at<uint32_t>(w, i.a) & w.mask) | (*d & ~w.mask);
}

template <typename T> void select(warp &w, const instruction &i) {
    constexpr int N = lanes_of<T>();
    const uint32_t bits = *at<uint32_t>(w, i.c);
    for (int k = 0; k < LANES / N; k++)
        put<T, N>(w, i.d, k, spread<T, N>(bits, k) ? piece<T, N>(w, i.a, k) : piece<T, N>(w, i.b, k));
}

/* ---- numbers with a point ---- */

template <typename T> void fma(warp &w, const instruction &i) {
    const T *a = at<T>(w, i.a), *b = at<T>(w, i.b), *c = at<T>(w, i.c);
    constexpr int N = lanes_of<T>();
    alignas(64) T sum[LANES];
    for (int l = 0; l < LANES; l++)
        sum[l] = sizeof(T) == 4 ? (T)__builtin_fmaf((float)a[l], (float)b[l], (float)c[l])
                                : (T)__builtin_fma((double)a[l], (double)b[l], (double)c[l]);
    for (int k = 0; k < LANES / N; k++) put<T, N>(w, i.d, k, ((const vec<T, N> *)sum)[k]);
}

/* Runs a product that PTX_FUSE took into a sum: d = a b + c, a b - c or c - a b. */
void fused(warp &w, const instruction &i) { fma<float>(w, i); }
void fused_minus(warp &w, const instruction &i) {
    const float *a = at<float>(w, i.a), *b = at<float>(w, i.b), *c = at<float>(w, i.c);
    float *d = at<float>(w, i.d);
    for (int l = 0; l < LANES; l++)
        if (w.mask >> l & 1) d[l] = __builtin_fmaf(a[l], b[l], -c[l]);
}
void fused_from(warp &w, const instruction &i) {
    const float *a = at<float>(w, i.a), *b = at<float>(w, i.b), *c = at<float>(w, i.c);
    float *d = at<float>(w, i.d);
    for (int l = 0; l < LANES; l++)
        if (w.mask >> l & 1) d[l] = __builtin_fmaf(-a[l], b[l], c[l]);
}

static void fma_down(warp &w, const instruction &i) {
    const float *a = at<float>(w, i.a), *b = at<float>(w, i.b), *c = at<float>(w, i.c);
    float *d = at<float>(w, i.d);
    const int before = std::fegetround();
    std::fesetround(FE_DOWNWARD);
    for (int l = 0; l < LANES; l++) {
        volatile float x = a[l], y = b[l], z = c[l], sum = __builtin_fmaf(x, y, z);
        if (w.mask >> l & 1) d[l] = sum;
    }
    std::fesetround(before);
}

static float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
static float rcp_approx(float x) { return flush(1.0f / flush(x)); }
static float root(float x) { return std::sqrt(x); }
static double root_wide(double x) { return std::sqrt(x); }

/* 2^x by a series for the fraction, in double; to about a half unit. */
static void ex2(warp &w, const instruction &i) {
    static const double LN2 = 0.693147180559945309417;
    const float *a = at<float>(w, i.a);
    constexpr int N = lanes_of<float>();
    alignas(64) float result[LANES];
    for (int l = 0; l < LANES; l++) {
        const float x = a[l] < -127.0f ? -127.0f : a[l] > 128.0f ? 128.0f : a[l];
        const int whole = (int)(x + (x < 0.0f ? -0.5f : 0.5f));
        const double y = ((double)x - whole) * LN2;
        const double sum =
            1.0 +
            y * (1.0 +
                 y * (1.0 / 2 +
                      y * (1.0 / 6 +
                           y * (1.0 / 24 + y * (1.0 / 120 + y * (1.0 / 720 + y * (1.0 / 5040 + y * (1.0 / 40320))))))));
        const int64_t power = (int64_t)(whole + 1023) << 52;
        double scale;
        memcpy(&scale, &power, 8);
        const float z = (float)(sum * scale);
        result[l] = a[l] != a[l] ? a[l] : z < 0x1p-126f ? 0.0f : z;
    }
    for (int k = 0; k < LANES / N; k++) put<float, N>(w, i.d, k, ((const vec<float, N> *)result)[k]);
}

/* ---- 16-bit floats ---- */

uint32_t bf16_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7FFF;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

uint32_t f16_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
    if (size > 0x7F800000) return 0x7FFF;
    if (size >= 0x477FF000) return sign | 0x7C00; /* 65520 and more */
    if (size < 0x38800000) { /* below 2^-14: a multiple of 2^-24, rounded to even by the addition */
        float y = std::fabs(x) + 0.5f;
        memcpy(&bits, &y, 4);
        return sign | (bits - 0x3F000000);
    }
    return sign | ((size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13);
}

static uint32_t bf16_pair(float high, float low) { return bf16_of(high) << 16 | bf16_of(low); }
static uint32_t f16_pair(float high, float low) { return f16_of(high) << 16 | f16_of(low); }

static int32_t nearest_whole(float x) {
    if (x != x) return 0;
    return x >= 0x1p31f ? INT32_MAX : x <= -0x1p31f ? INT32_MIN : (int32_t)std::nearbyint(x);
}

/* A zero divisor gives all bits, as on a device. */
template <typename T> static T divide(T a, T b) { return b == 0 ? (T)-1 : (T)(a / b); }

/* ---- bits ---- */

static void bit_field_insert_32(warp &w, const instruction &i) {
    const uint32_t *o = places(w, i), *from = at<uint32_t>(w, o[1]), *into = at<uint32_t>(w, o[2]);
    const uint32_t *start = at<uint32_t>(w, o[3]), *length = at<uint32_t>(w, o[4]);
    uint32_t *d = at<uint32_t>(w, o[0]);
    for (int l = 0; l < LANES; l++) {
        const uint32_t s = start[l] & 255, n = length[l] & 255;
        const uint64_t field = s < 32 ? ((n < 32 ? 1ull << n : 1ull << 32) - 1) << s & ALL_LANES : 0;
        if (w.mask >> l & 1) d[l] = (uint32_t)((into[l] & ~field) | ((uint64_t)from[l] << (s & 31) & field));
    }
}

static void bit_field_insert_64(warp &w, const instruction &i) {
    const uint32_t *o = places(w, i), *start = at<uint32_t>(w, o[3]), *length = at<uint32_t>(w, o[4]);
    const uint64_t *from = at<uint64_t>(w, o[1]), *into = at<uint64_t>(w, o[2]);
    uint64_t *d = at<uint64_t>(w, o[0]);
    for (int l = 0; l < LANES; l++) {
        const uint32_t s = start[l] & 255, n = length[l] & 255;
        const uint64_t field = s < 64 ? (n < 64 ? (1ull << n) - 1 : ~0ull) << s : 0;
        if (w.mask >> l & 1) d[l] = (into[l] & ~field) | (from[l] << (s & 63) & field);
    }
}

/* mov between {16, 16} or {32, 32} and a register of both. */
static void unpack(warp &w, const instruction &i) {
    const uint32_t *o = places(w, i);
    for (int l = 0; l < LANES; l++) {
        if (!(w.mask >> l & 1)) continue;
        const uint32_t x = at<uint32_t>(w, o[2])[l];
        at<uint32_t>(w, o[0])[l] = x & 0xFFFF;
        at<uint32_t>(w, o[1])[l] = x >> 16;
    }
}
static void pack(warp &w, const instruction &i) {
    for (int l = 0; l < LANES; l++)
        if (w.mask >> l & 1) at<uint32_t>(w, i.d)[l] = at<uint32_t>(w, i.a)[l] | at<uint32_t>(w, i.b)[l] << 16;
}
static void unpack_wide(warp &w, const instruction &i) {
    const uint32_t *o = places(w, i);
    for (int l = 0; l < LANES; l++) {
        if (!(w.mask >> l & 1)) continue;
        const uint64_t x = at<uint64_t>(w, o[2])[l];
        at<uint32_t>(w, o[0])[l] = (uint32_t)x;
        at<uint32_t>(w, o[1])[l] = (uint32_t)(x >> 32);
    }
}
static void pack_wide(warp &w, const instruction &i) {
    for (int l = 0; l < LANES; l++)
        if (w.mask >> l & 1)
            at<uint64_t>(w, i.d)[l] = at<uint32_t>(w, i.a)[l] | (uint64_t)at<uint32_t>(w, i.b)[l] << 32;
}

/* ---- the table ---- */

typedef float f32;
typedef double f64;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int32_t s32;
typedef int64_t s64;

const opcode ARITHMETIC[] = {
    {"add.s32", map2<u32, u32, u32, plus>, 1},
    {"add.s64", map2<u64, u64, u64, plus>, 1},
    {"add.u64", map2<u64, u64, u64, plus>, 1},
    {"add.f32", map2<f32, f32, f32, plus>, 1},
    {"add.f64", map2<f64, f64, f64, plus>, 1},
    {"sub.s32", map2<u32, u32, u32, minus>, 1},
    {"sub.s64", map2<u64, u64, u64, minus>, 1},
    {"sub.f32", map2<f32, f32, f32, minus>, 1},
    {"mul.f32", map2<f32, f32, f32, times>, 1},
    {"mul.rn.f32", map2<f32, f32, f32, times>, 1},
    {"add.rn.f32", map2<f32, f32, f32, plus>, 1},
    {"sub.rn.f32", map2<f32, f32, f32, minus>, 1},
    {"mul.f64", map2<f64, f64, f64, times>, 1},
    {"mul.lo.s32", map2<u32, u32, u32, times>, 1},
    {"mul.lo.s64", map2<u64, u64, u64, times>, 1},
    {"mul.hi.s32", map2<s32, s32, s32, high_half>, 1},
    {"mul.wide.u16", map2<u32, u32, u32, times>, 1},
    {"mul.wide.u32", map2<u64, u32, u32, times_wide<u64>>, 1},
    {"mul.wide.s32", map2<s64, s32, s32, times_wide<s64>>, 1},
    {"mad.lo.s32", map3<u32, u32, u32, times_plus>, 1},
    {"mad.wide.u32", map3<u64, u32, u64, times_wide_plus<u64>>, 1},
    {"fma.rn.f32", fma<f32>, 1},
    {"fma.rn.f64", fma<f64>, 1},
    {"fma.rm.f32", fma_down, 1},
    {"div.rn.f32", map2<f32, f32, f32, over>, 1},
    {"div.u32", each2<u32, u32, divide<u32>>, 1},
    {"div.s64", each2<s64, s64, divide<s64>>, 1},
    {"div.u64", each2<u64, u64, divide<u64>>, 1},
    {"rcp.rn.f32", map1<f32, f32, one_over>, 1},
    {"rcp.approx.ftz.f32", each1<f32, f32, rcp_approx>, 1},
    {"sqrt.rn.f32", each1<f32, f32, root>, 1},
    {"sqrt.rn.f64", each1<f64, f64, root_wide>, 1},
    {"ex2.approx.ftz.f32", ex2, 1},
    {"neg.f32", map1<f32, f32, negate>, 1},
    {"neg.s32", map1<u32, u32, negate>, 1},
    {"neg.s64", map1<u64, u64, negate>, 1},
    {"abs.f32", map1<u32, u32, without_sign>, 1},
    {"copysign.f32", map2<u32, u32, u32, with_sign_of>, 1},
    {"max.f32", map2<f32, f32, f32, greatest>, 1},
    {"max.s32", map2<s32, s32, s32, greater_of>, 1},
    {"max.s64", map2<s64, s64, s64, greater_of>, 1},
    {"min.s32", map2<s32, s32, s32, lesser_of>, 1},
    {"min.s64", map2<s64, s64, s64, lesser_of>, 1},
    {"and.b16", map2<u32, u32, u32, both>, 1},
    {"and.b32", map2<u32, u32, u32, both>, 1},
    {"and.b64", map2<u64, u64, u64, both>, 1},
    {"or.b32", map2<u32, u32, u32, either>, 1},
    {"or.b64", map2<u64, u64, u64, either>, 1},
    {"xor.b16", map2<u32, u32, u32, unequal>, 1},
    {"xor.b32", map2<u32, u32, u32, unequal>, 1},
    {"xor.b64", map2<u64, u64, u64, unequal>, 1},
    {"not.b32", map1<u32, u32, invert>, 1},
    {"not.b64", map1<u64, u64, invert>, 1},
    {"shl.b32", map2<u32, u32, u32, left_by<32>>, 1},
    {"shl.b64", map2<u64, u64, u32, left_by<64>>, 1},
    {"shr.u16", map2<u32, u32, u32, right_by<16>>, 1},
    {"shr.u32", map2<u32, u32, u32, right_by<32>>, 1},
    {"shr.u64", map2<u64, u64, u32, right_by<64>>, 1},
    {"shr.s32", map2<s32, s32, u32, right_signed_by<32>>, 1},
    {"shr.s64", map2<s64, s64, u32, right_signed_by<64>>, 1},
    {"bfi.b32", bit_field_insert_32, 1},
    {"bfi.b64", bit_field_insert_64, 1},
    {"and.pred", predicates<p_and>, 1},
    {"or.pred", predicates<p_or>, 1},
    {"xor.pred", predicates<p_xor>, 1},
    {"not.pred", not_pred, 1},
    {"mov.pred", mov_pred, 1},
    {"mov.u16", map1<u32, u32, same>, 1},
    {"mov.u32", map1<u32, u32, same>, 1},
    {"mov.b32", map1<u32, u32, same>, 1},
    {"mov.f32", map1<u32, u32, same>, 1},
    {"mov.u64", map1<u64, u64, same>, 1},
    {"mov.b64", map1<u64, u64, same>, 1},
    {"mov.f64", map1<u64, u64, same>, 1},
    {"mov.b32 {}", unpack, 2},
    {"mov.b32 = {}", pack, 1},
    {"mov.b64 {}", unpack_wide, 2},
    {"mov.b64 = {}", pack_wide, 1},
    {"cvta.to.global.u64", map1<u64, u64, same>, 1},
    {"cvta.param.u64", map1<u64, u64, same>, 1},
    {"selp.b32", select<u32>, 1},
    {"selp.u32", select<u32>, 1},
    {"selp.s32", select<u32>, 1},
    {"selp.f32", select<u32>, 1},
    {"selp.b64", select<u64>, 1},
    {"cvt.s64.s32", map1<s64, s32, to<s64>>, 1},
    {"cvt.s64.s32 wide", map1<s64, u64, low_to<s32, s64>>, 1}, /* from a register of 64 bits */
    {"cvt.u64.u32", map1<u64, u32, to<u64>>, 1},
    {"cvt.u32.u64", map1<u32, u64, to<u32>>, 1},
    {"cvt.u16.u32", map1<u32, u32, low_16>, 1},
    {"cvt.rn.f32.s32", map1<f32, s32, to<f32>>, 1},
    {"cvt.rn.f32.u32", map1<f32, u32, to<f32>>, 1},
    {"cvt.rn.f32.s64", map1<f32, s64, to<f32>>, 1},
    {"cvt.rn.f32.u64", map1<f32, u64, to<f32>>, 1},
    {"cvt.rn.f64.s64", map1<f64, s64, to<f64>>, 1},
    {"cvt.rn.f32.f64", map1<f32, f64, to<f32>>, 1},
    {"cvt.f64.f32", map1<f64, f32, to<f64>>, 1},
    {"cvt.rni.s32.f32", each1<s32, f32, nearest_whole>, 1},
    {"cvt.sat.f32.f32", map1<f32, f32, saturate>, 1},
    {"cvt.rn.bf16.f32", each1<u32, f32, bf16_of>, 1},
    {"cvt.rn.f16.f32", each1<u32, f32, f16_of>, 1},
    {"cvt.f32.bf16", each1<f32, u32, float_of_bf16>, 1},
    {"cvt.f32.f16", each1<f32, u32, float_of_f16>, 1},
    {"cvt.rn.bf16x2.f32", each2<u32, f32, bf16_pair>, 1},
    {"cvt.rn.f16x2.f32", each2<u32, f32, f16_pair>, 1},
    {"setp.eq.b32", compare<u32, is_eq>, 1},
    {"setp.eq.b64", compare<u64, is_eq>, 1},
    {"setp.eq.s16", compare<u32, is_eq>, 1},
    {"setp.eq.s32", compare<s32, is_eq>, 1},
    {"setp.eq.s64", compare<s64, is_eq>, 1},
    {"setp.eq.f32", compare<f32, is_eq>, 1},
    {"setp.ne.b32", compare<u32, is_ne>, 1},
    {"setp.ne.s16", compare<u32, is_ne>, 1},
    {"setp.ne.s32", compare<s32, is_ne>, 1},
    {"setp.ne.s64", compare<s64, is_ne>, 1},
    {"setp.neu.f32", compare<f32, is_ne>, 1},
    {"setp.lt.s32", compare<s32, is_lt>, 1},
    {"setp.lt.u32", compare<u32, is_lt>, 1},
    {"setp.lt.s64", compare<s64, is_lt>, 1},
    {"setp.lt.u64", compare<u64, is_lt>, 1},
    {"setp.lt.f32", compare<f32, is_lt>, 1},
    {"setp.ltu.f32", compare<f32, is_ltu>, 1},
    {"setp.le.s32", compare<s32, is_le>, 1},
    {"setp.le.s64", compare<s64, is_le>, 1},
    {"setp.leu.f32", compare<f32, is_leu>, 1},
    {"setp.gt.s32", compare<s32, is_gt>, 1},
    {"setp.gt.u32", compare<u32, is_gt>, 1},
    {"setp.ge.s32", compare<s32, is_ge>, 1},
    {"setp.ge.s64", compare<s64, is_ge>, 1},
    {"setp.ge.f32", compare<f32, is_ge>, 1},
    {nullptr, nullptr, 0},
};

} /* namespace ptx */
