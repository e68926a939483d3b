/* test_ptx.cc - each instruction of the interpreter against a plain function of one lane, or of plain matrices */

#include "../harness.h"
#include "opcodes.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <sys/wait.h>
#include <unistd.h>

using namespace ptx;

extern "C" {
void **__cudaRegisterFatBinary(void *of);
void __cudaRegisterFunction(void **in, const char *host, char *, const char *name, int, uint3 *, uint3 *, dim3 *,
                            dim3 *, int *);
}

namespace {

typedef uint64_t bits;
typedef std::function<bits(bits, bits, bits)> reference;

/* ---- numbers in and out of 64 bits ---- */

float f32(bits x) {
    const uint32_t low = (uint32_t)x;
    float y;
    memcpy(&y, &low, 4);
    return y;
}
double f64(bits x) {
    double y;
    memcpy(&y, &x, 8);
    return y;
}
bits of(float x) {
    uint32_t y;
    memcpy(&y, &x, 4);
    return y;
}
bits of(double x) {
    bits y;
    memcpy(&y, &x, 8);
    return y;
}
int32_t s32(bits x) { return (int32_t)(uint32_t)x; }
uint32_t u32(bits x) { return (uint32_t)x; }
int64_t s64(bits x) { return (int64_t)x; }

/* ---- a kernel of one warp ---- */

tensor_map boxes; /* of the other parameter, if it is one */

/* Runs the text of an entry's body; %rd0 is the address of `memory`. Byte n of the other parameter is 7 n + 3. */
void run_body(const std::string &body, std::vector<unsigned char> *memory, uint32_t threads = 32, uint32_t shared = 0,
              uint32_t blocks = 1) {
    static std::vector<std::unique_ptr<module>> modules;
    std::unique_ptr<module> m(new module);
    m->text =
        ".version 9.0\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 shared_memory[];\n"
        ".entry test(\n.param .u64 test_param_0,\n.param .align 64 .b8 test_param_1[128]\n)\n{\n"
        ".reg .pred %p<20>;\n.reg .b16 %rs<20>;\n.reg .b32 %r<99>;\n"
        ".reg .f32 %f<99>;\n.reg .b64 %rd<99>;\n.reg .f64 %fd<20>;\nld.param.u64 %rd0, [test_param_0];\n" +
        body + "\nret;\n}\n";
    const kernel *k = find_kernel(*m, "test");
    unsigned char *place = new_global((uint32_t)memory->size());
    const uint32_t grid[3] = {blocks, 1, 1}, size[3] = {threads, 1, 1};
    memcpy(place, memory->data(), memory->size());
    memcpy(k->parameters_at, &place, 8);
    for (uint32_t n = 0; n < 128; n++) k->parameters_at[k->parameters[1].offset + n] = (unsigned char)(7 * n + 3);
    if (boxes.magic) memcpy(k->parameters_at + k->parameters[1].offset, &boxes, sizeof boxes);
    run_grid(*k, grid, size, shared);
    memcpy(memory->data(), place, memory->size());
    modules.push_back(std::move(m));
}

/* ---- instructions of one lane ---- */

/* A type's letter: r and d: 32 and 64 bits, f and F: floats of these, s: 16 bits, p: a predicate. */
struct one {
    const char *text;  /* with D, A, B, C for the operands */
    const char *types; /* of D, A, B, C */
    reference wanted;
};

std::string register_of(char type, int number) {
    const char *name = type == 'r'   ? "%r"
                       : type == 'd' ? "%rd"
                       : type == 'f' ? "%f"
                       : type == 'F' ? "%fd"
                       : type == 's' ? "%rs"
                                     : "%p";
    return name + std::to_string(number);
}

std::string load_operand(char type, int number) {
    const std::string to = register_of(type, number), at = ", [%rd1+" + std::to_string(8 * (number - 9)) + "];\n";
    if (type == 'p') return "ld.global.u32 %r9" + at + "setp.ne.s32 " + to + ", %r9, 0;\n";
    return std::string(type == 's'   ? "ld.global.u16 "
                       : type == 'd' ? "ld.global.u64 "
                       : type == 'F' ? "ld.global.f64 "
                                     : "ld.global.u32 ") +
           to + at;
}

/* Numbers at the edges of each type, then random ones. */
bits pick(char type, harness_rng *rng) {
    static const uint32_t EDGES[] = {0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 255};
    static const float FLOATS[] = {0.0f,    -0.0f,     1.0f,     -1.5f,    3.25f,    1e30f,
                                   -1e-30f, 0x1p-140f, 65519.0f, 65520.0f, 0x1p-24f, 3e-8f};
    const bits random = (bits)harness_between(rng, 0, INT32_MAX) << 40 ^
                        (bits)harness_between(rng, 0, INT32_MAX) << 20 ^ (bits)harness_between(rng, 0, INT32_MAX);
    const int at = (int)harness_between(rng, 0, 99);
    if (type == 'p') return random & 1;
    if (type == 's') return (at < 10 ? EDGES[at] : random) & 0xFFFF;
    if (type == 'f') {
        if (at < 12) return of(FLOATS[at]);
        if (at == 12) return of(INFINITY);
        if (at == 13) return of(-INFINITY);
        if (at == 14) return of(NAN);
        return of((float)((double)s32(random) / 0x1p31 * std::ldexp(1.0, at % 20)));
    }
    if (type == 'F') return of((double)s64(random) / 0x1p40);
    if (at < 10) return type == 'd' && at > 6 ? (bits)(int64_t)(int32_t)EDGES[at] << (at * 3) : EDGES[at];
    if (at < 30) return random % 70;
    return type == 'd' ? random : random & ALL_LANES;
}

bool same(char type, bits got, bits wanted) {
    if (type == 'f' && std::isnan(f32(got)) && std::isnan(f32(wanted))) return true;
    if (type == 'F' && std::isnan(f64(got)) && std::isnan(f64(wanted))) return true;
    return got == wanted;
}

std::set<std::string> tried;

void note_tried(const std::string &name) { tried.insert(name); }

/* Each lane has operands of its own; lanes that the guard leaves out keep what was there. */
void check_one(const one &t) {
    const std::string types = t.types;
    harness_rng rng = {7};
    std::string text = t.text, body = "mov.u32 %r1, %tid.x;\nmul.wide.u32 %rd2, %r1, 40;\nadd.s64 %rd1, %rd0, %rd2;\n";
    note_tried(text.substr(0, text.find(' ')));
    for (size_t n = 0; n < types.size(); n++) {
        if (n > 0) body += load_operand(types[n], 9 + (int)n);
        for (size_t at; (at = text.find("ABCD"[n == 0 ? 3 : n - 1])) != std::string::npos;)
            text.replace(at, 1, register_of(types[n], 9 + (int)n));
    }
    const std::string d = register_of(types[0], 9);
    body += "ld.global.u32 %r2, [%rd1+32];\nsetp.ne.s32 %p1, %r2, 0;\n";
    body += types[0] == 'p' ? "setp.eq.s32 %p9, %r2, 77;\n" : load_operand(types[0], 9);
    body += "@%p1 " + text + ";\n";
    if (types[0] == 'p') body += "selp.u32 %r3, 1, 0, %p9;\nst.global.u32 [%rd1], %r3;";
    else
        body += std::string(types[0] == 'd'   ? "st.global.u64"
                            : types[0] == 'F' ? "st.global.f64"
                            : types[0] == 's' ? "st.global.u16"
                            : types[0] == 'f' ? "st.global.f32"
                                              : "st.global.u32") +
                " [%rd1], " + d + ";";
    for (int round = 0; round < 12; round++) {
        std::vector<unsigned char> memory(32 * 40);
        bits in[32][5];
        for (int l = 0; l < 32; l++) {
            in[l][0] = 0;
            for (size_t n = 1; n < 4; n++) in[l][n] = n < types.size() ? pick(types[n], &rng) : 0;
            in[l][4] = round == 0 || harness_between(&rng, 0, 3) > 0;
            memcpy(&memory[(size_t)l * 40], in[l], 40);
        }
        run_body(body, &memory);
        for (int l = 0; l < 32; l++) {
            bits got, wanted = in[l][4] ? t.wanted(in[l][1], in[l][2], in[l][3]) : 0;
            memcpy(&got, &memory[(size_t)l * 40], 8);
            if (types[0] == 'p') wanted = wanted != 0;
            if (!same(types[0], got, wanted)) {
                FAIL("%s: lane %d has 0x%llx, wanted 0x%llx, of 0x%llx, 0x%llx, 0x%llx", t.text, l,
                     (unsigned long long)got, (unsigned long long)wanted, (unsigned long long)in[l][1],
                     (unsigned long long)in[l][2], (unsigned long long)in[l][3]);
                return;
            }
        }
    }
    CHECK(true);
}

#define IS(text, types, expression)                       \
    {                                                     \
        text, types, [](bits a, bits b, bits c) -> bits { \
            (void)a, (void)b, (void)c;                    \
            return expression;                            \
        }                                                 \
    }

bits greater(bits a, bits b) {
    const float x = f32(a), y = f32(b);
    if (std::isnan(x)) return b;
    if (std::isnan(y)) return a;
    if (x == 0 && y == 0) return std::signbit(x) ? b : a;
    return x > y ? a : b;
}

/* Shifts of 64 bits, left (0) or right, by any number. */
bits wide_shift(bits x, bits by, int kind) {
    if (kind == 0) return by > 63 ? 0 : x << by;
    return by > 63 ? 0 : x >> by;
}

const one LANE_BY_LANE[] = {
    IS("add.s32 D, A, B", "rrr", u32(a + b)),
    IS("add.s64 D, A, B", "ddd", a + b),
    IS("add.u64 D, A, B", "ddd", a + b),
    IS("add.f32 D, A, B", "fff", of(f32(a) + f32(b))),
    IS("add.f64 D, A, B", "FFF", of(f64(a) + f64(b))),
    IS("sub.s32 D, A, B", "rrr", u32(a - b)),
    IS("sub.s64 D, A, B", "ddd", a - b),
    IS("sub.f32 D, A, B", "fff", of(f32(a) - f32(b))),
    IS("mul.f32 D, A, B", "fff", of(f32(a) * f32(b))),
    IS("mul.rn.f32 D, A, B", "fff", of(f32(a) * f32(b))),
    IS("add.rn.f32 D, A, B", "fff", of(f32(a) + f32(b))),
    IS("sub.rn.f32 D, A, B", "fff", of(f32(a) - f32(b))),
    IS("mul.f64 D, A, B", "FFF", of(f64(a) * f64(b))),
    IS("mul.lo.s32 D, A, B", "rrr", u32(a *b)),
    IS("mul.lo.s64 D, A, B", "ddd", a *b),
    IS("mul.hi.s32 D, A, B", "rrr", u32((bits)((int64_t)s32(a) * s32(b) >> 32))),
    IS("mul.wide.u16 D, A, B", "rss", a *b),
    IS("mul.wide.u32 D, A, B", "drr", a *b),
    IS("mul.wide.s32 D, A, B", "drr", (bits)((int64_t)s32(a) * s32(b))),
    IS("mad.lo.s32 D, A, B, C", "rrrr", u32(a *b + c)),
    IS("mad.wide.u32 D, A, B, C", "drrd", a *b + c),
    IS("fma.rn.f32 D, A, B, C", "ffff", of(std::fma(f32(a), f32(b), f32(c)))),
    IS("fma.rn.f64 D, A, B, C", "FFFF", of(std::fma(f64(a), f64(b), f64(c)))),
    IS("div.rn.f32 D, A, B", "fff", of(f32(a) / f32(b))),
    IS("div.u32 D, A, B", "rrr", b ? u32(a) / u32(b) : ALL_LANES),
    IS("div.s64 D, A, B", "ddd", b ? (bits)(s64(a) / s64(b)) : ~0ull),
    IS("div.u64 D, A, B", "ddd", b ? a / b : ~0ull),
    IS("rcp.rn.f32 D, A", "ff", of(1.0f / f32(a))),
    IS("sqrt.rn.f32 D, A", "ff", of(std::sqrt(f32(a)))),
    IS("sqrt.rn.f64 D, A", "FF", of(std::sqrt(f64(a)))),
    IS("neg.f32 D, A", "ff", of(-f32(a))),
    IS("neg.s32 D, A", "rr", u32(0 - a)),
    IS("neg.s64 D, A", "dd", 0 - a),
    IS("abs.f32 D, A", "ff", a & 0x7FFFFFFF),
    IS("copysign.f32 D, A, B", "fff", (a & 0x80000000) | (b & 0x7FFFFFFF)),
    IS("max.f32 D, A, B", "fff", greater(a, b)),
    IS("max.s32 D, A, B", "rrr", u32((bits)std::max(s32(a), s32(b)))),
    IS("max.s64 D, A, B", "ddd", (bits)std::max(s64(a), s64(b))),
    IS("min.s32 D, A, B", "rrr", u32((bits)std::min(s32(a), s32(b)))),
    IS("min.s64 D, A, B", "ddd", (bits)std::min(s64(a), s64(b))),
    IS("and.b16 D, A, B", "sss", a &b),
    IS("and.b32 D, A, B", "rrr", a &b),
    IS("and.b64 D, A, B", "ddd", a &b),
    IS("or.b32 D, A, B", "rrr", a | b),
    IS("or.b64 D, A, B", "ddd", a | b),
    IS("xor.b16 D, A, B", "sss", a ^ b),
    IS("xor.b32 D, A, B", "rrr", a ^ b),
    IS("xor.b64 D, A, B", "ddd", a ^ b),
    IS("not.b32 D, A", "rr", u32(~a)),
    IS("not.b64 D, A", "dd", ~a),
    IS("shl.b32 D, A, B", "rrr", b > 31 ? 0 : u32(a << b)),
    IS("shl.b64 D, A, B", "ddr", wide_shift(a, b, 0)),
    IS("shr.u16 D, A, B", "ssr", b > 15 ? 0 : a >> b),
    IS("shr.u32 D, A, B", "rrr", b > 31 ? 0 : u32(a) >> b),
    IS("shr.u64 D, A, B", "ddr", wide_shift(a, b, 1)),
    IS("shr.s32 D, A, B", "rrr", u32((bits)(s32(a) >> (b > 31 ? 31 : b)))),
    IS("shr.s64 D, A, B", "ddr", (bits)(s64(a) >> (b > 63 ? 63 : b))),
    IS("bfi.b32 D, A, B, 5, 11", "rrr", u32((b & ~0xFFE0ull) | (a << 5 & 0xFFE0))),
    IS("bfi.b64 D, A, B, 37, 20", "ddd", (b & ~(0xFFFFFull << 37)) | (a & 0xFFFFF) << 37),
    IS("and.pred D, A, B", "ppp", a &b),
    IS("or.pred D, A, B", "ppp", a | b),
    IS("xor.pred D, A, B", "ppp", a ^ b),
    IS("not.pred D, A", "pp", !a),
    IS("mov.pred D, A", "pp", a),
    IS("mov.u16 D, A", "ss", a),
    IS("mov.u32 D, A", "rr", a),
    IS("mov.b32 D, A", "rr", a),
    IS("mov.f32 D, A", "ff", a),
    IS("mov.u64 D, A", "dd", a),
    IS("mov.b64 D, A", "dd", a),
    IS("mov.f64 D, A", "FF", a),
    IS("cvta.to.global.u64 D, A", "dd", a),
    IS("cvta.param.u64 D, A", "dd", a),
    IS("selp.b32 D, A, B, C", "rrrp", c ? a : b),
    IS("selp.u32 D, A, B, C", "rrrp", c ? a : b),
    IS("selp.s32 D, A, B, C", "rrrp", c ? a : b),
    IS("selp.f32 D, A, B, C", "fffp", c ? a : b),
    IS("selp.b64 D, A, B, C", "dddp", c ? a : b),
    IS("cvt.s64.s32 D, A", "dr", (bits)(int64_t)s32(a)),
    IS("cvt.u64.u32 D, A", "dr", u32(a)),
    IS("cvt.u32.u64 D, A", "rd", u32(a)),
    IS("cvt.u16.u32 D, A", "sr", a & 0xFFFF),
    IS("cvt.rn.f32.s32 D, A", "fr", of((float)s32(a))),
    IS("cvt.rn.f32.u32 D, A", "fr", of((float)u32(a))),
    IS("cvt.rn.f32.s64 D, A", "fd", of((float)s64(a))),
    IS("cvt.rn.f32.u64 D, A", "fd", of((float)a)),
    IS("cvt.rn.f64.s64 D, A", "Fd", of((double)s64(a))),
    IS("cvt.rn.f32.f64 D, A", "fF", of((float)f64(a))),
    IS("cvt.f64.f32 D, A", "Ff", of((double)f32(a))),
    IS("cvt.rni.s32.f32 D, A", "rf",
       std::isnan(f32(a))  ? 0
       : f32(a) >= 0x1p31f ? 0x7FFFFFFF
       : f32(a) < -0x1p31f ? 0x80000000
                           : u32((bits)std::lrint((double)f32(a)))),
    IS("cvt.sat.f32.f32 D, A", "ff", f32(a) > 0 ? of(std::min(f32(a), 1.0f)) : 0),
    IS("setp.eq.b32 D, A, B", "prr", a == b),
    IS("setp.eq.b64 D, A, B", "pdd", a == b),
    IS("setp.eq.s16 D, A, B", "pss", a == b),
    IS("setp.eq.s32 D, A, B", "prr", a == b),
    IS("setp.eq.s64 D, A, B", "pdd", a == b),
    IS("setp.eq.f32 D, A, B", "pff", f32(a) == f32(b)),
    IS("setp.ne.b32 D, A, B", "prr", a != b),
    IS("setp.ne.s16 D, A, B", "pss", a != b),
    IS("setp.ne.s32 D, A, B", "prr", a != b),
    IS("setp.ne.s64 D, A, B", "pdd", a != b),
    IS("setp.neu.f32 D, A, B", "pff", f32(a) != f32(b)),
    IS("setp.lt.s32 D, A, B", "prr", s32(a) < s32(b)),
    IS("setp.lt.u32 D, A, B", "prr", u32(a) < u32(b)),
    IS("setp.lt.s64 D, A, B", "pdd", s64(a) < s64(b)),
    IS("setp.lt.u64 D, A, B", "pdd", a < b),
    IS("setp.lt.f32 D, A, B", "pff", f32(a) < f32(b)),
    IS("setp.ltu.f32 D, A, B", "pff", !(f32(a) >= f32(b))),
    IS("setp.le.s32 D, A, B", "prr", s32(a) <= s32(b)),
    IS("setp.le.s64 D, A, B", "pdd", s64(a) <= s64(b)),
    IS("setp.leu.f32 D, A, B", "pff", !(f32(a) > f32(b))),
    IS("setp.gt.s32 D, A, B", "prr", s32(a) > s32(b)),
    IS("setp.gt.u32 D, A, B", "prr", u32(a) > u32(b)),
    IS("setp.ge.s32 D, A, B", "prr", s32(a) >= s32(b)),
    IS("setp.ge.s64 D, A, B", "pdd", s64(a) >= s64(b)),
    IS("setp.ge.f32 D, A, B", "pff", f32(a) >= f32(b)),
    /* numbers in the text, which are as wide as the type */
    IS("mov.u16 D, -16384", "s", 0xC000),
    IS("mov.b32 D, {A, 1}", "rs", a | 0x10000),
    IS("mov.b32 D, {-16384, A}", "rs", a << 16 | 0xC000),
    IS("mul.wide.u16 D, A, -1", "rs", a * 0xFFFF),
    IS("shr.u16 D, -1, A", "sr", a > 15 ? 0 : 0xFFFF >> a),
    IS("and.b16 D, A, -256", "ss", a & 0xFF00),
    IS("xor.b16 D, A, -1", "ss", a ^ 0xFFFF),
    IS("setp.eq.s16 D, A, -1", "ps", a == 0xFFFF),
    IS("setp.ne.s16 D, A, -32768", "ps", a != 0x8000),
    IS("add.s32 D, A, -7", "rr", u32(a - 7)),
    IS("setp.lt.s32 D, A, -7", "pr", s32(a) < -7),
    IS("and.b64 D, A, -4294967296", "dd", a & 0xFFFFFFFF00000000),
    IS("setp.ge.s64 D, A, -1", "pd", s64(a) >= -1),
    IS("max.s64 D, A, -5", "dd", (bits)std::max(s64(a), (int64_t)-5)),
};

TEST(lane_by_lane) {
    for (const one &t : LANE_BY_LANE) check_one(t);
}

/* ---- approximations, and roundings that have no plain expression ---- */

/* The sum of a product, rounded down: by long doubles, which hold both exactly enough to tell on which side it is. */
bits fma_down(bits a, bits b, bits c) {
    const long double exact = (long double)f32(a) * f32(b) + (long double)f32(c);
    float down = (float)exact;
    if ((long double)down > exact) down = std::nextafter(down, -INFINITY);
    return of(down);
}

/* Runs d = f(a) or f(a, b, c) on 32 numbers. */
std::vector<bits> run_floats(const std::string &text, const char *types, const std::vector<std::vector<bits>> &in) {
    const size_t n_in = strlen(types) - 1;
    std::string body = "mov.u32 %r1, %tid.x;\nmul.wide.u32 %rd2, %r1, 40;\nadd.s64 %rd1, %rd0, %rd2;\n", line = text;
    note_tried(text.substr(0, text.find(' ')));
    for (size_t n = 0; n <= n_in; n++) {
        if (n > 0) body += load_operand(types[n], 9 + (int)n);
        for (size_t at; (at = line.find("ABCD"[n == 0 ? 3 : n - 1])) != std::string::npos;)
            line.replace(at, 1, register_of(types[n], 9 + (int)n));
    }
    const std::string to = register_of(types[0], 9);
    body += line + ";\n" + (types[0] == 's' ? "st.global.u16" : "st.global.u32") + " [%rd1], " + to + ";";
    std::vector<unsigned char> memory(32 * 40);
    for (size_t l = 0; l < 32; l++)
        for (size_t n = 0; n < n_in; n++) memcpy(&memory[l * 40 + 8 * (n + 1)], &in[n][l], 8);
    run_body(body, &memory);
    std::vector<bits> out(32);
    for (size_t l = 0; l < 32; l++) memcpy(&out[l], &memory[l * 40], 8);
    return out;
}

/* ex2.approx and rcp.approx: 2 and 1 units in 2^23 of the result, by the ISA; what is subnormal is 0. */
TEST(approximations) {
    harness_rng rng = {3};
    for (int round = 0; round < 60; round++) {
        std::vector<bits> x(32), by(32), more(32);
        for (size_t l = 0; l < 32; l++) {
            x[l] = round == 0 ? of((float)((int)l * 9 - 140))
                              : of((float)((harness_unit(&rng) - 0.5) * (round < 20 ? 2.0 : 260.0)));
            by[l] = of((float)(harness_unit(&rng) * 300.0)), more[l] = of(12582913.0f);
        }
        if (round == 1)
            x[0] = of(-INFINITY), x[1] = of(INFINITY), x[2] = of(NAN), x[3] = of(-0.0f), x[4] = of(0x1p-130f),
            x[5] = of(0x1p127f), x[6] = of(-0x1.8p126f);
        const std::vector<bits> power = run_floats("ex2.approx.ftz.f32 D, A", "ff", {x});
        const std::vector<bits> inverse = run_floats("rcp.approx.ftz.f32 D, A", "ff", {x});
        const std::vector<bits> down = run_floats("fma.rm.f32 D, A, B, C", "ffff", {x, by, more});
        for (size_t l = 0; l < 32; l++) {
            const double exact = std::exp2((double)f32(x[l])), got = f32(power[l]), other = f32(inverse[l]);
            if (std::isnan(f32(x[l]))) {
                CHECK(std::isnan(got) && std::isnan(other));
                continue;
            }
            const bool tiny = std::fabs(f32(x[l])) < 0x1p-126f;
            CHECK(exact > 0x1p128    ? std::isinf(got)
                  : exact < 0x1p-126 ? got == 0.0
                                     : std::fabs(got / exact - 1.0) <= 0x1p-22);
            CHECK(tiny                    ? std::isinf(other)
                  : std::fabs(f32(x[l])) > 0x1p126f ? other == 0.0 /* what is subnormal */
                                          : std::fabs(other * (double)f32(x[l]) - 1.0) <= 0x1p-23);
            if (std::isfinite(f32(x[l])) && !CHECK(same('f', down[l], fma_down(x[l], by[l], more[l])))) return;
        }
    }
}

/* Every 16-bit float, and for the way back all halves between two neighbours, and what lies beside them. */
TEST(short_floats) {
    for (const bool bf16 : {true, false}) {
        const std::string type = bf16 ? "bf16" : "f16";
        for (uint32_t first = 0; first < 65536; first += 32) {
            std::vector<bits> x(32), exact(32), middle(32), above(32);
            for (uint32_t l = 0; l < 32; l++) x[l] = first + l;
            const std::vector<bits> wide = run_floats("cvt.f32." + type + " D, A", "fs", {x});
            for (uint32_t l = 0; l < 32; l++) {
                const uint32_t h = first + l, e = h >> 10 & 31, m = h & 1023;
                double value = e == 31 ? (m ? NAN : INFINITY)
                               : e     ? std::ldexp(1024.0 + m, (int)e - 25)
                                       : std::ldexp((double)m, -24);
                if (h & 0x8000) value = -value;
                if (bf16) value = f32((bits)h << 16);
                exact[l] = bf16 ? (bits)h << 16 : of((float)value);
                if (!CHECK(same('f', wide[l], exact[l]))) return;
                const double next = bf16 ? (double)f32((bits)(h + 1) << 16)
                                    : e  ? value + std::copysign(std::ldexp(1.0, (int)e - 25), value)
                                         : value + std::copysign(0x1p-24, value);
                middle[l] = of((float)((value + next) / 2));
                above[l] = middle[l] + 1;
            }
            const std::vector<bits> back = run_floats("cvt.rn." + type + ".f32 D, A", "sf", {exact});
            const std::vector<bits> even = run_floats("cvt.rn." + type + ".f32 D, A", "sf", {middle});
            const std::vector<bits> up = run_floats("cvt.rn." + type + ".f32 D, A", "sf", {above});
            const std::vector<bits> both = run_floats("cvt.rn." + type + "x2.f32 D, A, B", "rff", {above, exact});
            for (uint32_t l = 0; l < 32; l++) {
                const uint32_t h = first + l, top = bf16 ? 0x7F80 : 0x7C00;
                if ((h & 0x7FFF) >= top) continue; /* infinities and NaN: all NaN are one */
                if (!CHECK_INT(back[l] & 0xFFFF, h) || !CHECK_INT(both[l] & 0xFFFF, h) ||
                    !CHECK_INT(both[l] >> 16 & 0xFFFF, (up[l] & 0xFFFF)))
                    return;
                if (!bf16 || (h & 0x7FFF) != top - 1) {
                    if (!CHECK_INT(even[l] & 0xFFFF, h + (h & 1)) || !CHECK_INT(up[l] & 0xFFFF, h + 1)) return;
                }
            }
        }
    }
}

/* ---- memory ---- */

const struct {
    const char *type;
    char letter;
    int bytes;
} TYPES[] = {{"u8", 's', 1},  {"u16", 's', 2}, {"u32", 'r', 4}, {"b32", 'r', 4},
             {"f32", 'f', 4}, {"u64", 'd', 8}, {"f64", 'F', 8}};

/* One register or a list of as many as the vector has, from that number on. */
std::string registers_of(char letter, int first, int vector) {
    std::string list;
    for (int v = 0; v < vector; v++) list += (v ? ", " : "") + register_of(letter, first + v);
    return vector > 1 ? "{" + list + "}" : list;
}

/* Bytes go from global to shared memory, to a thread's own and back, by each type and in vectors. */
TEST(loads_and_stores) {
    for (const auto &t : TYPES)
        for (int vector = 1; vector <= 4 && vector * t.bytes <= 16; vector *= 2) {
            const std::string many = vector == 2 ? ".v2" : vector == 4 ? ".v4" : "";
            std::string body =
                "mov.u32 %r1, %tid.x;\nmul.wide.u32 %rd2, %r1, 32;\nadd.s64 %rd1, %rd0, %rd2;\n"
                "shl.b32 %r2, %r1, 4;\n.local .align 16 .b8 own[32];\nmov.u64 %rd4, own;\n";
            int next = 40;
            for (const char *step : {"ld.global [%rd1]", "st.shared [%r2]", "ld.shared [%r2]", "st.local [%rd4+16]",
                                     "ld.local [%rd4+16]", "st [%rd1+16]", "ld [%rd1+16]", "st.global [%rd1+16]",
                                     "ld.global.nc [%rd1+16]", "st.global [%rd1+16]"}) {
                const std::string text = step, place = text.substr(text.find('['));
                const bool loads = text[0] == 'l';
                next -= loads ? 4 : 0;
                const std::string list = registers_of(t.letter, t.letter == 's' || t.letter == 'F' ? 0 : next, vector);
                const std::string name = text.substr(0, text.find(' ')) + many + "." + t.type;
                note_tried(name), note_tried(text.substr(0, 2) + " " + t.type);
                body += name + " " + (loads ? list + ", " + place : place + ", " + list) + ";\n";
            }
            std::vector<unsigned char> memory(32 * 32);
            for (size_t at = 0; at < memory.size(); at++)
                memory[at] = at % 32 < 16 ? (unsigned char)(at * 7 + at / 32) : 0;
            run_body(body, &memory, 32, 512);
            for (size_t lane = 0; lane < 32; lane++)
                for (size_t at = 0; at < 16; at++)
                    if (!CHECK_INT(memory[32 * lane + 16 + at],
                                   at < (size_t)(vector * t.bytes) ? memory[32 * lane + at] : 0))
                        return;
        }
}

/* Parts of a parameter, by each type and in vectors. */
TEST(parameters) {
    for (const auto &t : TYPES)
        for (int vector = 1; vector <= 4 && vector * t.bytes <= 16; vector *= 2) {
            const std::string many = vector == 2 ? ".v2." : vector == 4 ? ".v4." : ".";
            const std::string name = "ld.param" + many + t.type;
            const std::string list = registers_of(t.letter, 5, vector), store = "st.global" + name.substr(8);
            std::vector<unsigned char> memory(16);
            note_tried(name);
            run_body(name + " " + list + ", [test_param_1+16];\n" + store + " [%rd0], " + list + ";", &memory);
            for (int at = 0; at < 16; at++)
                CHECK_INT(memory[(size_t)at], at < vector * t.bytes ? (7 * (at + 16) + 3) % 256 : 0);
        }
}

/* 32 bits to and from registers of 64; parts of a parameter. */
TEST(narrow_accesses) {
    for (const char *name : {"ld s32", "ld wide s32", "ld wide u32", "st wide u32", "cvt.s64.s32 wide",
                             "ld.param.s32 wide", "ld.param.u32 wide", "ld.global.s32", "ld.global.s32 wide",
                             "ld.global.u32 wide", "st.global.u32 wide", "st.local.u32 wide"})
        note_tried(name);
    std::vector<unsigned char> memory(32 * 32);
    for (int lane = 0; lane < 32; lane++) {
        const int32_t x = lane * 77 - 1000;
        memcpy(&memory[(size_t)lane * 32], &x, 4);
    }
    run_body(
        "ld.param.v2.u32 {%r5, %r6}, [test_param_0];\nmov.b64 %rd5, {%r5, %r6};\n"
        ".local .align 8 .b8 own[8];\nmov.u64 %rd4, own;\n"
        "mov.u32 %r1, %tid.x;\nmul.wide.u32 %rd2, %r1, 32;\nadd.s64 %rd1, %rd5, %rd2;\n"
        "ld.global.s32 %rd6, [%rd1];\nst.global.u64 [%rd1+8], %rd6;\n"
        "ld.global.u32 %rd7, [%rd1];\nst.global.u64 [%rd1+16], %rd7;\n"
        "cvt.s64.s32 %rd9, %rd7;\nsetp.eq.s64 %p1, %rd9, %rd6;\n@%p1 st.global.u32 [%rd1+24], %rd7;\n"
        "ld.global.s32 %r6, [%rd1];\nst.local.u32 [%rd4+4], %rd7;\nld.local.u32 %r7, [%rd4+4];\n"
        "setp.eq.s32 %p1, %r6, %r7;\n@%p1 st.global.u32 [%rd1+28], %r7;\n"
        "ld.param.s32 %rd10, [test_param_1+20];\nld.param.u32 %rd11, [test_param_1+20];\n"
        "cvt.s64.s32 %rd12, %rd11;\nsetp.eq.s64 %p1, %rd10, %rd12;\n@!%p1 st.global.u32 [%rd1+28], %rd11;\n"
        "shr.s64 %rd13, %rd10, 32;\nsetp.eq.s64 %p1, %rd13, -1;\n@!%p1 st.global.u32 [%rd1+28], %rd11;\n"
        "shr.u64 %rd13, %rd11, 32;\nsetp.eq.s64 %p1, %rd13, 0;\n@!%p1 st.global.u32 [%rd1+28], %rd11;",
        &memory);
    for (int lane = 0; lane < 32; lane++) {
        const int32_t x = lane * 77 - 1000;
        int64_t wide[2];
        int32_t narrow[2];
        memcpy(wide, &memory[(size_t)lane * 32 + 8], 16);
        memcpy(narrow, &memory[(size_t)lane * 32 + 24], 8);
        CHECK_INT(wide[0], x);
        CHECK_INT(wide[1], (uint32_t)x);
        CHECK(narrow[0] == x && narrow[1] == x);
    }
}

/* One entry reads what another writes to a variable of the module; bytes that the text gives it are there. */
TEST(variables_of_a_module) {
    module m;
    const std::string head = "(\n.param .u64 p\n)\n{\n.reg .b32 %r<9>;\n.reg .b64 %rd<9>;\nmov.u64 %rd1, t;\n",
                      load = "ld.param.u64 %rd2, [p];\nld.global.u32 %r1, [%rd1];\nst.global.u32 [%rd2], %r1;\n";
    m.text = ".global .align 4 .b8 t[8] = {1, 2, 3, 255};\n.entry first" + head + load +
             "mov.u32 %r2, 77;\nst.global.u32 [%rd1], %r2;\nret;\n}\n.entry second" + head + load + "ret;\n}\n";
    uint32_t *place = (uint32_t *)new_global(4);
    const uint32_t one[3] = {1, 1, 1};
    for (const char *name : {"first", "second"}) {
        const kernel *k = find_kernel(m, name);
        memcpy(k->parameters_at, &place, 8);
        run_grid(*k, one, one, 0);
        CHECK_INT(*place, strcmp(name, "first") == 0 ? 0xFF030201 : 77);
    }
}

/* Every lane adds to one place: in the order of lanes, of which each gets what was there. */
TEST(atomics) {
    note_tried("atom.global.add.u32"), note_tried("atom.global.add.f32");
    std::vector<unsigned char> memory(16 + 32 * 8);
    run_body(
        "mov.u32 %r1, %tid.x;\nmul.wide.u32 %rd2, %r1, 8;\nadd.s64 %rd1, %rd0, %rd2;\ncvt.rn.f32.s32 %f1, %r1;\n"
        "atom.global.add.u32 %r2, [%rd0], %r1;\natom.global.add.f32 %f2, [%rd0+4], %f1;\n"
        "st.global.u32 [%rd1+16], %r2;\nst.global.f32 [%rd1+20], %f2;",
        &memory);
    for (size_t lane = 0; lane <= 32; lane++) {
        const size_t at = lane == 32 ? 0 : 16 + 8 * lane;
        uint32_t whole;
        float sum;
        memcpy(&whole, &memory[at], 4);
        memcpy(&sum, &memory[at + 4], 4);
        CHECK(whole == lane * (lane - 1) / 2 && sum == (float)whole);
    }
}

/* ---- lanes that part, and what they do together ---- */

/* Runs a body in which each lane writes four words at [%rd1]; %r1 is its number. */
std::vector<std::array<uint32_t, 4>> words_of_lanes(const std::string &body) {
    std::vector<std::array<uint32_t, 4>> words(32);
    std::vector<unsigned char> memory(sizeof words[0] * words.size());
    run_body("mov.u32 %r1, %tid.x;\nmul.wide.u32 %rd2, %r1, 16;\nadd.s64 %rd1, %rd0, %rd2;\n" + body, &memory);
    memcpy(words.data(), memory.data(), memory.size());
    return words;
}

/* Each lane runs a loop of its own length; odd ones return early; the rest meet, vote, and ask each other. */
TEST(lanes_part_and_meet) {
    for (const char *name :
         {"bra", "bra.uni", "ret", "bar.warp.sync", "vote.sync.ballot.b32", "shfl.sync.idx.b32", "shfl.sync.bfly.b32"})
        note_tried(name);
    const auto words = words_of_lanes(
        "mov.u32 %r2, 0;\nmov.u32 %r3, 0;\nbra.uni $test;\n$again:\nadd.s32 %r3, %r3, %r2;\nadd.s32 %r2, %r2, 1;\n$test:\n"
        "setp.le.s32 %p1, %r2, %r1;\n@%p1 bra $again;\nst.global.u32 [%rd1], %r3;\nand.b32 %r4, %r1, 1;\n"
        "setp.eq.s32 %p2, %r4, 0;\n@%p2 bra $even;\nret;\n$even:\nbar.warp.sync -1;\n"
        "setp.gt.s32 %p3, %r1, 9;\nvote.sync.ballot.b32 %r5, %p3, -1;\nst.global.u32 [%rd1+4], %r5;\n"
        "shfl.sync.idx.b32 %r6|%p4, %r3, 4, 31, -1;\nst.global.u32 [%rd1+8], %r6;\n"
        "shfl.sync.bfly.b32 %r7|%p5, %r3, 6, 31, -1;\nst.global.u32 [%rd1+12], %r7;");
    for (uint32_t lane = 0; lane < 32; lane++) {
        const auto &got = words[lane];
        const uint32_t other = lane ^ 6;
        CHECK_INT(got[0], lane * (lane + 1) / 2);
        CHECK_INT(got[1], lane % 2 ? 0 : 0x55555400u);
        CHECK_INT(got[2], lane % 2 ? 0 : 10);
        CHECK_INT(got[3], lane % 2 ? 0 : other * (other + 1) / 2);
    }
}

/* Segments of eight lanes, of which the first four answer (c = 0x1803): each lane asks another one. */
TEST(shuffles_in_segments) {
    const auto words = words_of_lanes(
        "mul.lo.s32 %r3, %r1, %r1;\nmad.lo.s32 %r4, %r1, 5, 3;\nshfl.sync.idx.b32 %r5|%p2, %r3, %r4, 0x1803, -1;\nselp.u32 %r6, 1, 0, %p2;\n"
        "st.global.v2.u32 [%rd1], {%r5, %r6};\nand.b32 %r4, %r4, 7;\n"
        "shfl.sync.bfly.b32 %r7|%p3, %r3, %r4, 0x1803, -1;\nselp.u32 %r8, 1, 0, %p3;\n"
        "st.global.v2.u32 [%rd1+8], {%r7, %r8};");
    for (uint32_t lane = 0; lane < 32; lane++) {
        const auto &got = words[lane];
        const uint32_t by = (5 * lane + 3) % 8, asked[2] = {lane / 8 * 8 + by, lane ^ by};
        for (int kind = 0; kind < 2; kind++) {
            const bool answers = asked[kind] % 8 < 4;
            const uint32_t from = answers ? asked[kind] : lane;
            CHECK_INT(got[2 * kind], from * from);
            CHECK_INT(got[2 * kind + 1], answers);
        }
    }
}

/* ---- modes: each by what it changes ---- */

/* a b + c, a b - c and c - a b for a b = 1 + 2^-11 + 2^-24, whose last bit only a fused sum keeps; a product that is
   used twice, and one that is rounded by name, are not fused. */
TEST(fused_products) {
    const float a = 1.0f + 0x1p-12f, sum = -1.0f, one = 1.0f, exact = 0x1p-11f + 0x1p-24f, rounded = 0x1p-11f;
    const settings before = options();
    for (const bool fuse : {false, true}) {
        std::vector<unsigned char> memory(32);
        float got[8];
        memcpy(&memory[0], &a, 4), memcpy(&memory[4], &sum, 4), memcpy(&memory[8], &one, 4);
        options().fuse = fuse;
        run_body(
            "ld.global.f32 %f1, [%rd0];\nld.global.f32 %f2, [%rd0+4];\nld.global.f32 %f3, [%rd0+8];\n"
            "mul.f32 %f4, %f1, %f1;\nadd.f32 %f5, %f4, %f2;\nst.global.f32 [%rd0], %f5;\n"
            "mul.f32 %f6, %f1, %f1;\nadd.f32 %f7, %f2, %f6;\nst.global.f32 [%rd0+4], %f7;\n"
            "mul.f32 %f8, %f1, %f1;\nsub.f32 %f9, %f8, %f3;\nst.global.f32 [%rd0+8], %f9;\n"
            "mul.f32 %f10, %f1, %f1;\nsub.f32 %f11, %f3, %f10;\nst.global.f32 [%rd0+12], %f11;\n"
            "mul.rn.f32 %f12, %f1, %f1;\nadd.f32 %f13, %f12, %f2;\nst.global.f32 [%rd0+16], %f13;\n"
            "mul.f32 %f14, %f1, %f1;\nadd.rn.f32 %f15, %f14, %f2;\nst.global.f32 [%rd0+20], %f15;\n"
            "mul.f32 %f16, %f1, %f1;\nadd.f32 %f17, %f16, %f2;\nadd.f32 %f18, %f16, %f2;\n"
            "st.global.v2.f32 [%rd0+24], {%f17, %f18};",
            &memory, 1);
        options() = before;
        memcpy(got, memory.data(), sizeof got);
        for (int n = 0; n < 8; n++) CHECK((n == 3 ? -got[n] : got[n]) == (fuse && n < 4 ? exact : rounded));
    }
}

/* The order in which eight warps, or two warps of two blocks, draw numbers. */
std::vector<uint32_t> draw(const std::string &body, const settings &as, uint32_t threads, uint32_t blocks = 1) {
    const settings before = options();
    std::vector<unsigned char> memory(4 + 16 * 4 + 128);
    std::vector<uint32_t> drawn(8);
    options() = as;
    run_body("mov.u32 %r1, %tid.x;\nmov.u32 %r2, %ctaid.x;\nmad.lo.s32 %r2, %r2, 2, 0;\nshr.u32 %r3, %r1, 5;\n"
             "and.b32 %r4, %r1, 31;\nsetp.eq.s32 %p1, %r4, 0;\n" + body,
             &memory, threads, 4096, blocks);
    options() = before;
    memcpy(drawn.data(), &memory[4], 32);
    return drawn;
}

TEST(orders_and_blocks) {
    const std::string by_warp = "mul.wide.u32 %rd2, %r3, 4;\nadd.s64 %rd1, %rd0, %rd2;\n",
                      number = "@%p1 atom.global.add.u32 %r5, [%rd0], 1;\n@%p1 st.global.u32 [%rd1+4], %r5;\n",
                      by_block = "mul.wide.u32 %rd2, %r2, 4;\nadd.s64 %rd1, %rd0, %rd2;\n";
    const std::vector<uint32_t> up = {0, 1, 2, 3, 4, 5, 6, 7}, down = {7, 6, 5, 4, 3, 2, 1, 0};
    settings as = options();
    as.order = 'f', as.blocks = 1, as.late = true, as.copies = 'o';
    CHECK(draw(by_warp + number, as, 256) == up);
    as.order = 'r';
    CHECK(draw(by_warp + number, as, 256) == down);
    as.order = 's';
    const std::vector<uint32_t> shuffled = draw(by_warp + number, as, 256);
    CHECK(shuffled != up && shuffled != down && std::set<uint32_t>(shuffled.begin(), shuffled.end()).size() == 8);
    as.order = 'f';
    const std::string two = by_block + number + "bar.sync 0;\nadd.s64 %rd1, %rd1, 4;\n" + number;
    CHECK(draw(two, as, 32, 4) == up); /* each block to its end */
    as.blocks = 2;
    const std::vector<uint32_t> in_turns = draw(two, as, 32, 4);
    CHECK_INT(in_turns[0], 0);
    CHECK(in_turns[2] < in_turns[1] && in_turns[6] < in_turns[5]);
}

/* Each of eight warps waits for a bulk copy of its own, and draws a number when it has landed. */
TEST(order_of_copies) {
    const std::string body =
        "mul.wide.u32 %rd2, %r3, 4;\nadd.s64 %rd1, %rd0, %rd2;\nshl.b32 %r6, %r3, 3;\nshl.b32 %r7, %r3, 4;\n"
        "add.s32 %r7, %r7, 1024;\n@%p1 mbarrier.init.shared::cta.b64 [%r6], 1;\n"
        "fence.mbarrier_init.release.cluster;\n@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6], 16;\n"
        "add.s64 %rd3, %rd0, 64;\n@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r7], [%rd3],"
        " 16, [%r6];\nbar.sync 0;\nmbarrier.try_wait.parity.shared::cta.b64 %p2, [%r6], 0;\n"
        "@%p1 atom.global.add.u32 %r5, [%rd0], 1;\n@%p1 st.global.u32 [%rd1+4], %r5;\n";
    const std::vector<uint32_t> up = {0, 1, 2, 3, 4, 5, 6, 7}, down = {7, 6, 5, 4, 3, 2, 1, 0};
    settings as = options();
    as.order = 'f', as.blocks = 1, as.late = true, as.copies = 'o';
    CHECK(draw(body, as, 256) == up);
    as.copies = 'n';
    CHECK(draw(body, as, 256) == down);
    as.copies = 'r';
    const std::vector<uint32_t> random = draw(body, as, 256);
    CHECK(random != up && random != down && std::set<uint32_t>(random.begin(), random.end()).size() == 8);
    as.copies = 'n', as.late = false;
    CHECK(draw(body, as, 256)[0] == 0);
}

TEST(halves_of_registers) {
    for (const char *name : {"mov.b32 {}", "mov.b32 = {}", "mov.b64 {}", "mov.b64 = {}"}) note_tried(name);
    std::vector<unsigned char> memory(32 * 16);
    for (size_t at = 0; at < memory.size(); at++) memory[at] = (unsigned char)(at * 11);
    const std::vector<unsigned char> before = memory;
    run_body(
        "mov.u32 %r1, %tid.x;\nmul.wide.u32 %rd2, %r1, 16;\nadd.s64 %rd1, %rd0, %rd2;\n"
        "ld.global.u64 %rd3, [%rd1];\nmov.b64 {%r2, %r3}, %rd3;\nmov.b64 %rd4, {%r3, %r2};\n"
        "st.global.u64 [%rd1], %rd4;\nld.global.u32 %r4, [%rd1+8];\nmov.b32 {%rs1, %rs2}, %r4;\n"
        "mov.b32 %r5, {%rs2, %rs1};\nst.global.u32 [%rd1+8], %r5;",
        &memory);
    for (size_t at = 0; at < memory.size(); at++) {
        const size_t in = at % 16, from = in < 8    ? at / 16 * 16 + (in + 4) % 8
                                          : in < 12 ? at / 16 * 16 + 8 + (in - 8 + 2) % 4
                                                    : at;
        CHECK_INT(memory[at], before[from]);
    }
}

/* ---- what ends the run ---- */

std::string all_said; /* by runs that ended so */

/* Returns whether this, in a process of its own, ends it with these words. */
bool ends(const std::function<void()> &run, const std::string &words, int wanted = STOPPED) {
    int ends[2], status = 0;
    char said[4000] = "";
    if (pipe(ends) != 0) return false;
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 2);
        run();
        _exit(0);
    }
    close(ends[1]);
    for (ssize_t n, at = 0; (n = read(ends[0], said + at, sizeof said - 1 - (size_t)at)) > 0;) at += n;
    close(ends[0]);
    waitpid(child, &status, 0);
    all_said += said;
    if (WIFEXITED(status) && WEXITSTATUS(status) == wanted && strstr(said, words.c_str())) return true;
    FAIL("status %d, not \"%s\" but: %s", status, words.c_str(), said);
    return false;
}

/* The same of an entry's body; the check of races is on. */
bool stops(const std::string &body, const std::string &words, uint32_t threads = 32, int wanted = STOPPED) {
    return ends(
        [&] {
            std::vector<unsigned char> memory(252);
            options().race = true;
            run_body(body, &memory, threads, 32768);
        },
        words, wanted);
}

const std::string LANE = "mov.u32 %r1, %tid.x;\nmov.u32 %r2, 0;\nsetp.eq.s32 %p1, %r1, 0;\n";

TEST(texts_that_end_the_run) {
    static const char *const ENDS[][2] = {
        {"frobnicate.f32 %f1, %f2;", "unknown instruction frobnicate.f32"},
        {"add.s32 %r1, %rd1, 1;", "operand 1 of add.s32 is of another width"},
        {"mov.b64 %rd1, 0f00000000;", "\"0f00000000\" is of another width"},
        {"mov.f32 %f1, 0f0000000;", "\"0f0000000\" is of another width"},
        {"mov.u32 %r1 %r2;", "no ';' before: %r2;"},
        {"mul.f32 %f1, %f2, 0.01;", "\"0.01\" is no number"},
        {"mul.f32 %f1, %f2, -%f3;", "\"-%f3\" is no number"},
        {"mov.f32 %f1, 0f0000000g;", "\"0x0000000g\" is no number"},
        {".const .b32 x;", "a variable in .const"},
        {"add.s32 %r1, , %r2;", "no operand"},
        {"mov.u32 %r1, %q1;", "nothing is called \"%q1\""},
        {"ld.shared.u32 %r1, [8000];", "nothing is called \"8000\""},
        {"bra $nowhere;", "no label $nowhere"},
        {"\t.shared .align 4 .b8 own[16];\nmov.u32 %r1, shared_memory;", "static and dynamic shared memory in one"},
        {"cp.async.cg.shared.global [%r1+16], [%rd0], 16, 16;", "an offset in cp.async.cg"},
        {"cp.async.cg.shared.global [%r1], [%rd0+16], 16, 16;", "an offset in cp.async.cg"},
        {"cp.async.cg.shared.global [%r1], [%rd0], 16;", "cp.async.cg.shared.global of 3 operands"},
        {"shfl.sync.idx.b32 %r6, %r3, 4, 31, -1;", "shfl.sync.idx.b32 of 5 operands"},
        {"ld.global.u64 %r1, [%rd0];", "\"%r1\" of ld.global.u64 is of another width"},
        {"st.global.u64 [%rd0], %r2;", "\"%r2\" of st.global.u64 is of another width"},
        {"ld.global.v2.u32 {%rd1, %r2}, [%rd0];", "\"%r2\" of ld.global.v2.u32 is of another width"},
        {"ld.global.v4.u32 {%r1, %r2}, [%rd0];", "ld.global.v4.u32 of 2 registers"},
        {"ld.global.u32 %r1, [%rd0+4294967296];", "the offset 4294967296"},
        {"ld.global.u32 %r1, [%rd0+-2147483649];", "the offset -2147483649"},
        {".global .u32 t[2] = {258, 3};", "values of a variable of .u32"},
        {".global .b8 t[2] = {1, 2, 3};", "more values than 2 bytes"},
        {".global .b8 t[2] = {1, 258};", "258 is no byte"},
        {"mbarrier.arrive.shared::cta.b64 _, [%r1], 2;", "mbarrier.arrive.shared::cta.b64 of 2 operands"},
        {"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd0+16], 16, [%r2];",
         "an offset in cp.async.bulk"},
    };
    for (const auto &one : ENDS) CHECK(stops(one[0], one[1], 32, NOT_READ));
    CHECK(ends(
        [] {
            module m;
            m.text = ".entry e(\n.reg .b32 x\n)\n{\nret;\n}\n";
            find_kernel(m, "e");
        },
        "no .param", NOT_READ));
}

TEST(accesses_that_end_the_run) {
    static const struct {
        const char *body, *words;
        uint32_t threads;
    } ENDS[] = {
        {"ld.global.u32 %r3, [%rd0+256];", "no allocation of the device holds", 32},
        {"ld.global.u64 %rd1, [%rd0+248];", "4 bytes before its allocation's end", 32},
        {"ld.global.u64 %rd1, [%rd0+4];", "is no multiple of 8", 32},
        {"ld.global.v2.f32 {%f1, %f2}, [%rd0+4];", "is no multiple of 8", 32},
        {"ld.global.v4.u32 {%r3, %r4, %r5, %r6}, [%rd0+8];", "is no multiple of 16", 32},
        {"mov.u32 %r3, 2;\nld.shared.u32 %r4, [%r3];", "address 0x2 is no multiple of 4", 32},
        {"mov.u32 %r3, 8;\nst.shared.v4.u32 [%r3], {%r1, %r1, %r1, %r1};", "address 0x8 is no multiple of 16", 32},
        {"ld.param.u32 %r3, [test_param_1+128];", "a parameter at byte 192 of 192", 32},
        {"mov.u32 %r3, 32768;\nld.shared.u32 %r3, [%r3];", "at shared address 32768 of 32768", 32},
        {".local .align 4 .b8 own[8];\nmov.u64 %rd4, own;\nld.local.u32 %r3, [%rd4+8];", "a thread's byte 8 of 8", 32},
        {"@%p1 bar.sync 0;", "some lanes only", 32},
        {"bar.sync 16;", "there is no barrier 16", 32},
        {"bar.sync 1, 33;", "barrier 1 of 33 threads, of 32", 32},
        {"and.b32 %r3, %r1, 32;\nadd.s32 %r3, %r3, 64;\nbar.sync 1, %r3;", "of 64 threads for some, of 96", 96},
        {"setp.gt.s32 %p2, %r1, 31;\n@%p2 ret;\nbar.arrive 1, 64;\nbar.arrive 1, 64;", "arrives twice at barrier 1",
         64},
        {"bar.arrive 1, 64;", "nobody waits at barrier 1", 64},
        {"bar.sync 1, 64;", "hangs:", 64 + 32},
        {"@%p1 bra $on;\nbar.warp.sync -1;\n$on:\nbar.warp.sync -1;", "hangs:", 32},
        {"$again:\nbra $again;", "hangs: this warp loops without end", 32},
        {"setp.gt.s32 %p2, %r1, 15;\n@%p2 bra $out;\nshfl.sync.idx.b32 %r3|%p3, %r1, 20, 31, 65535;\n$out:",
         "lane 0 asks lane 20", 32},
        {"st.shared.u32 [%r2], %r1;", "race: shared address 0 was written by warp 0", 64},
        {"setp.gt.s32 %p2, %r1, 31;\nld.shared.u32 %r3, [%r2];\n@%p2 st.shared.u32 [%r2], %r1;",
         "race: shared address 0 may still be read by warp 0", 64},
        {"setp.gt.s32 %p2, %r1, 63;\n@%p2 bra $on;\n@%p1 st.shared.u32 [%r2], %r1;\nbar.sync 1, 64;\n$on:\n"
         "@%p2 ld.shared.u32 %r4, [%r2];",
         "race: shared address 0 was written by warp 0", 96},
    };
    for (const auto &one : ENDS) CHECK(stops(LANE + one.body, one.words, one.threads));
}

TEST(copies_that_end_the_run) {
    const std::string make = "@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;\n",
                      fence = make + "fence.mbarrier_init.release.cluster;\n",
                      bulk = "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd0], ",
                      box = "mov.u64 %rd1, test_param_1;\n@%p1 cp.async.bulk.tensor.3d.shared::cluster.global.tile."
                            "mbarrier::complete_tx::bytes [%r3], [%rd1, {%r2, %r2, %r2}], [%r2];",
                      far = "mov.u32 %r3, 1024;\n",
                      expect = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], ",
                      wait = "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], ",
                      nowhere = "mov.u64 %rd0, 4096;\n",
                      second_warp = "setp.eq.s32 %p1, %r1, 32;\nsetp.lt.s32 %p3, %r1, 32;\n",
                      small = "@%p1 cp.async.cg.shared.global [%r2], [%rd0], 16, 16;\n";
    const struct {
        std::string body;
        const char *words;
        uint32_t threads;
    } ENDS[] = {
        {"cp.async.cg.shared.global [%r2], [%rd0], 16, 16;\nld.shared.u32 %r4, [%r2];", "a copy is in flight", 32},
        {"cp.async.cg.shared.global [%r1], [%rd0], 16, 16;", "lane 1: a copy from", 32},
        {"cp.async.cg.shared.global [%r2], [%rd0], 16, 17;", "lane 0 wants 17 of 16 bytes", 32},
        {"cp.async.cg.shared.global [%r2], [%rd0], 8, 8;", "lane 0 wants 8 of 8 bytes", 32},
        {nowhere + small, "a copy at address 0x1000, which no allocation", 32},
        {small + small, "a copy at shared address 0, where a copy is in flight", 32},
        {second_warp + "@%p3 ld.shared.u32 %r4, [%r2];\n" + small,
         "race: shared address 0 may still be read by warp 0", 64},
        {nowhere + fence + far + bulk + "16, [%r2];", "a bulk copy at address 0x1000, which no allocation", 32},
        {second_warp + far + "@%p3 ld.shared.u32 %r4, [%r3];\n" + fence + bulk + "16, [%r2];",
         "race: shared address 1024 may still be read by warp 0", 64},
        {fence + far + "setp.eq.s32 %p2, %r1, 1;\n@%p2 st.shared.u32 [%r3], %r1;\n" +
             "@%p1 fence.proxy.async.shared::cta;\n" + bulk + "16, [%r2];",
         "no fence.proxy.async since thread 1 wrote to shared address 1024", 32},
        {"mbarrier.arrive.shared::cta.b64 _, [%r2];", "no mbarrier is at", 32},
        {make + expect + "16;\n@%p1 mbarrier.arrive.shared::cta.b64 _, [%r2];",
         "the mbarrier at 0 has had all arrivals of its phase", 32},
        {"mbarrier.init.shared::cta.b64 [%r2], 0;", "an mbarrier of 0 arrivals at 0", 32},
        {"mad.lo.s32 %r4, %r1, 8, 0;\nmbarrier.init.shared::cta.b64 [%r4], 1;\n"
         "mbarrier.init.shared::cta.b64 [%r4+256], 1;\nmbarrier.init.shared::cta.b64 [%r4+512], 1;",
         "more than 64 mbarriers", 32},
        {make + "ld.shared.u32 %r4, [%r2];", "an mbarrier is", 32},
        {make + "setp.eq.s32 %p2, %r1, 32;\n@%p2 mbarrier.arrive.shared::cta.b64 _, [%r2];",
         "race: the mbarrier at 0 was made by warp 0", 64},
        {make + expect + "1048576;", "the mbarrier at 0 expects 1048576 bytes", 32},
        {make + wait + "2;", "parity 2", 32},
        {make + wait + "0;", "waits for parity 0 of the mbarrier at 0", 32},
        {make + far + bulk + "16, [%r2];", "no fence.mbarrier_init since the mbarrier at 0", 32},
        {fence + far + bulk + "8, [%r2];", "a bulk copy of 8 bytes", 32},
        {fence + far + bulk + "16, [%r2];", "the block ends while a bulk copy is on its way", 32},
        {fence + far + "@%p1 st.shared.u32 [%r3], %r1;\n" + bulk + "16, [%r2];",
         "no fence.proxy.async since thread 0 wrote to shared address 1024", 32},
        {fence + far + "mov.u64 %rd1, %rd0;\n" + box.substr(box.find('\n') + 1), "no tensor map among the parameters",
         32},
        {fence + far + box, "no tensor map of three dimensions", 32},
    };
    for (const auto &one : ENDS) CHECK(stops(LANE + one.body, one.words, one.threads));
    boxes = {TENSOR_MAP_MAGIC, nullptr, {4, 8, 8}, {16, 128}, {8, 8, 1}, 3, 2, 0};
    CHECK(stops(LANE + fence + far + box, "a row's end amid 16 bytes"));
    CHECK(stops(LANE + fence + "mov.u32 %r3, 64;\n" + box, "a box to shared address 64"));
    boxes = {};
}

/* Products of 64 x 64 numbers, of a matrix at 0 and one at 8192. */
TEST(products_that_end_the_run) {
    const auto product = [](const char *rest, const char *a = "%rd2", int first = 1) {
        return "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " + registers_of('f', first, 32) + ", " + a +
               ", %rd3, %p2, " + rest + ";\n";
    };
    const std::string start = LANE + "setp.eq.s32 %p2, %r2, 0;\nmov.u64 %rd2, 0x4000004000010000;\n"
                                     "mov.u64 %rd3, 0x4000004000010200;\n",
                      fence = "wgmma.fence.sync.aligned;\n", good = product("1, 1, 0, 0"),
                      commit = "wgmma.commit_group.sync.aligned;\n", wait = "wgmma.wait_group.sync.aligned ",
                      from_registers = product("1, 1, 0", "{%r10, %r11, %r12, %r13}"), write = "mov.u32 %r10, 0;\n";
    const struct {
        std::string body;
        const char *words;
        uint32_t threads;
    } ENDS[] = {
        {good + "ret;", "returns while its wgmma runs", 128},
        {good + "add.f32 %f1, %f1, %f1;", "operand 0 belongs to a wgmma that runs", 128},
        {"mov.f32 %f1, 0f00000000;\n" + good, "no wgmma.fence since operand 0 was written", 128},
        {from_registers + write, "operand 0 belongs to a wgmma that runs", 128},
        {good + product("1, 1, 0", "{%f1, %f2, %f3, %f4}", 33), "operand 32 belongs to a wgmma that runs", 128},
        {write + from_registers, "no wgmma.fence since operand 32 was written", 128},
        {good + commit + product("1, 1, 0, 0", "%rd2", 33) + commit + wait + "1;\nadd.f32 %f33, %f33, %f33;",
         "operand 0 belongs to a wgmma that runs", 128},
        {"setp.gt.s32 %p3, %r1, 127;\n@%p3 bra $write;\n" + good + commit + wait +
             "0;\nret;\n$write:\nst.shared.u32 [%r2], %r1;",
         "race: shared address 0 may still be read by a wgmma of warp 0", 160},
        {product("1, 2, 0, 0"), "a scale other than 1", 128},
        {"setp.eq.s32 %p2, %r1, 0;\n" + good, "lanes differ in whether they add", 128},
        {"cvt.u64.u32 %rd4, %r1;\nadd.s64 %rd3, %rd3, %rd4;\n" + good, "lanes differ in their descriptors", 128},
        {"mov.u64 %rd2, 0x0000004000010000;\n" + good, "a descriptor's swizzle 0", 128},
        {"mov.u64 %rd2, 0x4000004000014000;\n" + good, "a descriptor's unused bits: 0x4000004000014000", 128},
        {"mov.u64 %rd2, 0x4000004000010008;\n" + good, "a matrix starts at 128", 128},
        {good, "no warpgroup", 32},
        {"st.shared.u32 [%r2], %r1;\n" + good, "no fence.proxy.async since thread", 128},
    };
    for (const auto &one : ENDS) CHECK(stops(start + fence + one.body, one.words, one.threads));
}

/* Registers a program with one image, as the code that nvcc adds does, and launches its entry. */
cudaError_t launch_image(uint32_t magic, uint32_t compressed, const std::string &text, unsigned threads = 1,
                         size_t shared = 0) {
    struct {
        uint32_t magic;
        uint16_t version, header_bytes;
        uint64_t bytes;
        uint16_t kind, unknown;
        uint32_t entry_header_bytes;
        uint64_t entry_bytes;
        uint32_t compressed, more;
        char text[200];
    } image = {magic, 1, 16, 224, 1, 0, 24, 200, compressed, 0, ""};
    const struct {
        int magic, version;
        const void *data;
    } wrapper = {0, 1, &image};
    strncpy(image.text, text.c_str(), sizeof image.text - 1);
    void **program = __cudaRegisterFatBinary((void *)&wrapper);
    __cudaRegisterFunction(program, "here", nullptr, "e", 0, nullptr, nullptr, nullptr, nullptr, nullptr);
    return cudaLaunchKernel("here", dim3(1), dim3(threads), nullptr, shared, nullptr);
}

/* A device refuses without ending the program: more threads or shared memory than an entry may have. */
TEST(launches_that_are_refused) {
    const std::string text = ".target sm_80\n.entry e()\n.maxntid 64\n{\nret;\n}\n";
    const auto launch = [&](unsigned threads, size_t shared) {
        return launch_image(0xBA55ED50u, 0, text, threads, shared);
    };
    CHECK_INT(launch(64, 48 << 10), cudaSuccess);
    CHECK_INT(launch(65, 0), cudaErrorInvalidValue);
    CHECK_INT(launch(64, (48 << 10) + 1), cudaErrorInvalidValue);
    CHECK_INT(cudaFuncSetAttribute("here", cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10), cudaSuccess);
    CHECK_INT(launch(64, 64 << 10), cudaSuccess);
    CHECK_INT(launch(64, (64 << 10) + 1), cudaErrorInvalidValue);
    CHECK_INT(cudaFuncSetAttribute("here", cudaFuncAttributeMaxDynamicSharedMemorySize, 228 << 10),
              cudaErrorInvalidValue);
}

TEST(calls_that_end_the_run) {
    const uint32_t magic = 0xBA55ED50u;
    const std::string text = ".version 9.0\n.target sm_80\n.entry e()\n{\nret;\n}\n";
    const auto with = [](const char *name, const char *value) { setenv(name, value, 1), read_settings(); };
    const auto driver = [](const char *name) {
        void *function = nullptr;
        cudaDriverEntryPointQueryResult found;
        cudaGetDriverEntryPointByVersion(name, &function, 12000, 0, &found);
        return function;
    };
    const auto memory = [] {
        void *place = nullptr;
        cudaMalloc(&place, 64);
        return (char *)place;
    };
    const auto freed = [&] {
        char *place = memory();
        cudaFree(place);
        return place;
    };
    char host[16] = "";
    CHECK(ends([&] { with("PTX_ARCH", "75"); }, "PTX_ARCH is \"75\""));
    CHECK(ends([&] { with("PTX_BLOCKS", "8x"); }, "PTX_BLOCKS is \"8x\""));
    CHECK(ends([&] { with("PTX_ORDER", "up"); }, "PTX_ORDER is \"up\""));
    CHECK(ends([&] { cudaFree(memory() + 1); }, "which is no allocation"));
    CHECK(ends([&] { cudaMemset(memory() + 1, 0, 64); }, "a fill of 64 bytes"));
    CHECK(ends([&] { cudaMemset(memory() + 64, 0, 1); }, "past an allocation"));
    CHECK(ends([&] { check_product_range(&magic, 4); }, "are not the device's"));
    CHECK(ends([&] { cudaMemset(freed(), 0, 4); }, "no device has the memory of a fill"));
    CHECK(ends([&] { cudaMemcpy(host, host + 8, 8, cudaMemcpyHostToDevice); }, "has the memory of a copy to"));
    CHECK(ends([&] { cudaMemcpy(host, freed(), 8, cudaMemcpyDeviceToHost); }, "has the memory of a copy from"));
    CHECK(ends(
        [&] {
            options().devices = 2;
            cudaSetDevice(1);
            const char *other = memory();
            cudaSetDevice(0);
            check_product_range(other, 4);
        },
        "are not the device's"));
    CHECK(ends([&] { launch_image(1, 0, text); }, "no fat binary"));
    CHECK(ends([&] { launch_image(magic, 1, text); }, "the PTX is compressed: compile with --no-compress"));
    CHECK(ends([&] { launch_image(magic, 0, "ELF"); }, "an image is no PTX"));
    CHECK(ends([&] { setenv("PTX_DUMP", "/nowhere", 1), launch_image(magic, 0, text); }, "cannot write to /nowhere"));
    CHECK(ends([&] { options().arch = 80, options().ran = "/nowhere/x", launch_image(magic, 0, text); },
               "cannot write /nowhere/x"));
    CHECK(ends(
        [&] {
            ((CUresult(*)(void *, int, unsigned, ...))driver("cuTensorMapEncodeTiled"))(
                nullptr, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, nullptr, nullptr, nullptr, nullptr, nullptr, 0, 0, 0, 0);
        },
        "a tensor map of another kind"));
    CHECK(ends([&] { driver("cuInit"); }, "the driver's function cuInit"));
    CHECK(ends(
        [] {
            cudaLaunchConfig_t of = {};
            of.numAttrs = 1;
            cudaLaunchKernelExC(&of, nullptr, nullptr);
        },
        "a launch with attributes"));
    CHECK(ends(
        [] {
            int value;
            cudaDeviceGetAttribute(&value, cudaDevAttrWarpSize, 0);
        },
        "device attribute 10"));
}

/* 16 warps have 128 registers a thread. */
TEST(registers_change_hands) {
    std::vector<unsigned char> memory(8);
    note_tried("setmaxnreg.dec.sync.aligned.u32"), note_tried("setmaxnreg.inc.sync.aligned.u32");
    const std::string given = "setmaxnreg.dec.sync.aligned.u32 24;\n";
    run_body(given + "setmaxnreg.inc.sync.aligned.u32 128;", &memory, 512);
    CHECK(stops(given + "setmaxnreg.inc.sync.aligned.u32 136;", "hangs:", 512));
    CHECK(stops("setmaxnreg.inc.sync.aligned.u32 256;", "waits for registers", 512));
    CHECK(stops("setmaxnreg.inc.sync.aligned.u32 120;", "from 128 to 120 registers", 512));
    CHECK(stops("setmaxnreg.dec.sync.aligned.u32 136;", "from 128 to 136 registers", 512));
}

/* ---- nothing is untried ---- */

/* The suite primitives (tests/cuda/test_primitives.cc) compares these with plain matrices and bytes. */
const char *const IN_PRIMITIVES[] = {
    "red.global.add.v4.f32", "ldmatrix.sync.aligned.m8n8.x4.shared.b16",
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "stmatrix.sync.aligned.m8n8.x4.shared.b16", "bar.sync",
    "bar.arrive", "cp.async.cg.shared.global", "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "cp.async.commit_group", "cp.async.wait_group",
    "mbarrier.init.shared::cta.b64", "fence.mbarrier_init.release.cluster", "mbarrier.arrive.shared::cta.b64",
    "mbarrier.arrive.expect_tx.shared::cta.b64", "mbarrier.try_wait.parity.shared::cta.b64",
    "fence.proxy.async.shared::cta", "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
    "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes",
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16",
    "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16",
    "wgmma.fence.sync.aligned", "wgmma.commit_group.sync.aligned", "wgmma.wait_group.sync.aligned"};

/* Adds the names of all instructions of a file's entries. An unknown one ends the run by its name. */
void add_instructions(const std::filesystem::path &file, std::map<std::string, std::string> *names) {
    std::ifstream in(file);
    module m;
    m.text.assign(std::istreambuf_iterator<char>(in), {});
    for (const auto &entry : entries_of(m))
        for (const instruction &i : find_kernel(m, entry.first)->code) (*names)[i.name] = file;
}

/* Each instruction of the interpreter, and of the programs' texts if there are any, with space, vector and type. */
TEST(every_instruction_is_tried) {
    const char *folder = getenv("PTX_PROGRAMS");
    std::map<std::string, std::string> in_programs, in_primitives;
    note_tried("griddepcontrol.launch_dependents"); /* does nothing, here as on a device */
    for (const char *name : IN_PRIMITIVES) note_tried(name);
    for (const opcode *one : all_opcodes())
        if (!tried.count(one->name)) FAIL("nothing tries %s", one->name);
    CHECK(tried.size() > 150);
    if (!folder) return;
    for (const auto &file : std::filesystem::recursive_directory_iterator(folder)) {
        const bool ours = file.path().parent_path().filename() == "primitives";
        if (file.path().extension() == ".ptx") add_instructions(file, ours ? &in_primitives : &in_programs);
    }
    for (const char *name : IN_PRIMITIVES)
        if (!in_primitives.count(name)) FAIL("the suite primitives has no %s", name);
    in_programs.insert(in_primitives.begin(), in_primitives.end());
    CHECK(in_programs.size() > 100);
    for (const auto &one : in_programs)
        if (!tried.count(one.first)) FAIL("nothing tries %s of %s", one.first.c_str(), one.second.c_str());
}

/* In the programs' text of the library, PTX_FUSE=1 has nothing to do: each product that a sum follows is fused, or kept
   apart, by name. */
TEST(fusible_products) {
    const char *folder = getenv("PTX_PROGRAMS");
    const settings before = options();
    int n = 0;
    if (!folder) SKIP("PTX_PROGRAMS names no texts");
    options().fuse = true;
    for (const auto &file : std::filesystem::directory_iterator(std::string(folder) + "/cuda_tests")) {
        std::map<std::string, std::string> names;
        add_instructions(file.path(), &names);
        n += names.count("fma.rn.f32") > 0;
        if (names.count("fma of a product and a sum")) FAIL("%s leaves a product to be fused", file.path().c_str());
    }
    options() = before;
    CHECK(n >= 2);
}

/* The fixed parts of the message that a call of stop() or fail() makes: of stop its format alone, of fail all texts. */
std::vector<std::string> parts_of(const std::string &call, bool all) {
    std::vector<std::string> parts(1);
    bool inside = false;
    for (size_t at = 0; at < call.size() && (all || inside || parts.size() == 1); at++) {
        const char c = call[at];
        if (c == '"') inside = !inside;
        if (c == '"' || (inside && c == '%')) {
            if (c == '%')
                while (!isalpha((unsigned char)call[at + 1]) || strchr("lz", call[at + 1])) at++;
            if (c == '%') at++;
            if (!parts.back().empty() || c == '"') parts.emplace_back();
        } else if (inside) parts.back() += c == '\\' ? call[++at] : c;
    }
    return parts;
}

bool was_said(const std::vector<std::string> &parts) {
    for (size_t line = 0, end; line < all_said.size(); line = end + 1) {
        end = std::min(all_said.find('\n', line), all_said.size());
        size_t at = line;
        for (const std::string &part : parts) at = at == std::string::npos ? at : all_said.find(part, at);
        if (at < end) return true;
    }
    return false;
}

/* Each message of the sources' stop() and fail() was said by a run that ended with it. */
TEST(every_end_is_tried) {
    int n = 0;
    for (const char *name : {"arithmetic", "async", "blas", "cuda", "memory", "read", "run"}) {
        std::ifstream in(std::string("tests/ptx/") + name + ".cc");
        const std::string source{std::istreambuf_iterator<char>(in), {}};
        for (const char *function : {"stop(", "fail("})
            for (size_t at = 0; (at = source.find(function, at)) != std::string::npos; at += 5) {
                const std::string call = source.substr(at + 5, source.find(";\n", at) - at - 5);
                if (call.find('{') < call.find('"') || call.find('"') == std::string::npos) continue; /* a definition */
                n++;
                if (!was_said(parts_of(call, function[0] == 'f')))
                    FAIL("%s.cc: nothing ends with: %s", name, call.c_str());
            }
    }
    CHECK(n >= 75);
}

} /* namespace */

SUITE(ptx, CASE(lane_by_lane), CASE(approximations), CASE(short_floats), CASE(loads_and_stores), CASE(parameters),
      CASE(narrow_accesses), CASE(atomics), CASE(variables_of_a_module), CASE(lanes_part_and_meet),
      CASE(shuffles_in_segments), CASE(fused_products), CASE(orders_and_blocks), CASE(order_of_copies),
      CASE(launches_that_are_refused), CASE(fusible_products), CASE(halves_of_registers),
      CASE(texts_that_end_the_run), CASE(accesses_that_end_the_run),
      CASE(copies_that_end_the_run), CASE(products_that_end_the_run), CASE(calls_that_end_the_run),
      CASE(registers_change_hands), CASE(every_instruction_is_tried),
      CASE(every_end_is_tried)); /* the last two count what those before them did */
