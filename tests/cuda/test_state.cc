/* Tests the rows of K and V between projections and state, against float64: rotary positions, padding, planes. Then it
   tests the whole: a sequence that goes chunk by chunk through append, attention, its backward and back to the
   projections gives the same as in one piece. Runs under the emulation and on a device. */

#include "../harness.h"
#include "device.h"
#include "tools/chunkflow_tune.h"

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>

static void start_clean() {
#ifdef CHUNKFLOW_CUDA_EMULATION
    cuda_emu_reset();
#endif
}

/* Bytes from pageable memory may arrive after cudaMemcpy has returned, and non-blocking streams do not wait for
   them. */
static void copy_in(void *to, const void *from, size_t bytes) {
    CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice) == cudaSuccess);
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
}

static void check_faults() {
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(cudaGetLastError() == cudaSuccess);
#ifdef CHUNKFLOW_CUDA_EMULATION
    if (cuda_emu_faults() > 0) FAIL("%lld faults; the first: %s", (long long)cuda_emu_faults(), cuda_emu_first_fault());
#endif
}

/* ---- arrays: a host copy and a device copy, NaN where nothing was written, guard bands on either side ---- */

static const size_t BAND = 256;

struct array {
    cf_dtype dtype = CF_DTYPE_BF16;
    int rows = 0, heads = 0, size = 0;
    int64_t row = 0, head = 0; /* strides, in elements */
    std::vector<unsigned char> host, before;
    unsigned char *device = nullptr;

    array(cf_dtype dtype_, int rows_, int heads_, int size_, int row_gap = 0, int head_gap = 0)
        : dtype(dtype_), rows(rows_), heads(heads_), size(size_), head(size_ + head_gap) {
        row = head * heads + row_gap;
        host.assign(2 * BAND + (size_t)(row * rows) * number(), 0xFF);
        CHECK(cudaMalloc((void **)&device, host.size()) == cudaSuccess);
        upload();
    }
    array(const array &) = delete;
    array &operator=(const array &) = delete;
    ~array() { cudaFree(device); }

    size_t number() const { return dtype == CF_DTYPE_FP32 ? 4 : 2; }
    size_t at(int r, int h, int c) const { return BAND + (size_t)(r * row + h * head + c) * number(); }

    void put(int r, int h, int c, float x) {
        const uint16_t bits = dtype == CF_DTYPE_FP32 ? (uint16_t)0 : to_bits(dtype, x);
        if (dtype == CF_DTYPE_FP32)
            memcpy(&host[at(r, h, c)], &x, 4);
        else
            memcpy(&host[at(r, h, c)], &bits, 2);
    }

    double get(int r, int h, int c) const {
        float x;
        uint16_t bits;
        memcpy(&bits, &host[at(r, h, c)], 2);
        if (dtype != CF_DTYPE_FP32) return from_bits(dtype, bits);
        memcpy(&x, &host[at(r, h, c)], 4);
        return x;
    }

    void upload() {
        before = host;
        copy_in(device, host.data(), host.size());
    }
    void download() {
        CHECK(cudaDeviceSynchronize() == cudaSuccess);
        CHECK(cudaMemcpy(host.data(), device, host.size(), cudaMemcpyDeviceToHost) == cudaSuccess);
    }

    /* Call after a download: these numbers were checked and may differ from the upload. */
    void forget(int r, int h) { memcpy(&host[at(r, h, 0)], &before[at(r, h, 0)], (size_t)size * number()); }
    bool unchanged() const { return host == before; }

    cf_tensor tensor(int first_row = 0, int first_head = 0) const {
        const cf_tensor t = {device + at(first_row, first_head, 0), row, head};
        return t;
    }
    cf_tensor dense() const {
        const cf_tensor t = {device + BAND, 0, 0};
        return t;
    }
};

struct int_array {
    std::vector<int32_t> host;
    int32_t *device = nullptr;

    explicit int_array(const std::vector<int32_t> &from) : host(from) {
        CHECK(cudaMalloc((void **)&device, from.size() * 4 + 4) == cudaSuccess);
        copy_in(device, from.data(), from.size() * 4);
    }
    int_array(const int_array &) = delete;
    int_array &operator=(const int_array &) = delete;
    ~int_array() { cudaFree(device); }
};

static float normal(harness_rng *rng, cf_dtype dtype) {
    double sum = 0.0;
    for (int j = 0; j < 4; j++) sum += harness_unit(rng) - 0.5;
    return round_to(dtype, (float)(1.73 * sum));
}

static void fill_normal(array *a, harness_rng *rng) {
    for (int r = 0; r < a->rows; r++)
        for (int h = 0; h < a->heads; h++)
            for (int c = 0; c < a->size; c++) a->put(r, h, c, normal(rng, a->dtype));
    a->upload();
}

/* ---- rotary reference ---- */

struct rotary {
    int rotated = 0; /* 0: all */
    bool interleaved = false;
    double base = 10000.0;
    std::vector<double> frequencies; /* empty: from base */

    int pairs(int size) const { return (rotated ? rotated : size) / 2; }

    long double angle(int size, int pair, int64_t position) const {
        const long double frequency = frequencies.empty() ? powl((long double)base, -(long double)pair / pairs(size))
                                                          : (long double)frequencies[(size_t)pair];
        return frequency * (long double)position;
    }

    /* Rotates one head, forwards or back (way = -1). */
    std::vector<double> turn(const std::vector<double> &x, int64_t position, int way) const {
        const int size = (int)x.size(), n = pairs(size);
        std::vector<double> y = x;
        for (int i = 0; i < n; i++) {
            const size_t a = (size_t)(interleaved ? 2 * i : i), b = (size_t)(interleaved ? 2 * i + 1 : i + n);
            const long double t = way * angle(size, i, position);
            y[a] = (double)(x[a] * cosl(t) - x[b] * sinl(t));
            y[b] = (double)(x[b] * cosl(t) + x[a] * sinl(t));
        }
        return y;
    }
};

/* The library's record, with its table on the device. */
struct rotary_table {
    cf_rope rope;
    void *device = nullptr;

    rotary_table(const rotary &r, int size, int64_t n_positions) {
        cf_error error;
        size_t bytes = 0;
        memset(&rope, 0, sizeof rope);
        memset(&error, 0, sizeof error);
        rope.n_positions = n_positions;
        rope.rotated = r.rotated;
        rope.base = r.base == 10000.0 ? 0.0 : r.base;
        rope.frequencies = r.frequencies.empty() ? nullptr : r.frequencies.data();
        rope.interleaved = r.interleaved;
        if (!call_ok(cf_rope_size(&rope, size, &bytes, &error), error)) return;
        float *host = (float *)harness_guard_new(bytes);
        call_ok(cf_rope_fill(&rope, size, host, bytes, &error), error);
        CHECK(harness_guard_ok(host));
        CHECK(cudaMalloc(&device, bytes) == cudaSuccess);
        copy_in(device, host, bytes);
        harness_guard_free(host);
        rope.table = (const float *)device;
        rope.frequencies = nullptr; /* no longer read */
    }
    rotary_table(const rotary_table &) = delete;
    rotary_table &operator=(const rotary_table &) = delete;
    ~rotary_table() { cudaFree(device); }
};

/* Half a unit of the type, plus the error of fp32 cosines. Each cosine is off by at most 2.5 x 2^-24, as is shown
   below, and each product and sum by half a unit more. */
static double tolerance(cf_dtype dtype, double wanted, double greatest) {
    const double half_unit = dtype == CF_DTYPE_FP32 ? 0x1p-24 : dtype == CF_DTYPE_FP16 ? 0x1p-11 : 0x1p-8;
    return half_unit * std::fabs(wanted) + (dtype == CF_DTYPE_FP16 ? 0x1p-25 : 0.0) + 8.0 * 0x1p-24 * greatest;
}

/* Compares one head of an output with its input rotated by the reference. Returns whether they agree. */
static bool check_head(const char *what, const array &out, int row, int head, const std::vector<double> &x,
                       const rotary *r, int64_t position, int way) {
    const std::vector<double> wanted = r ? r->turn(x, position, way) : x;
    double greatest = 0.0;
    for (double one : x) greatest = std::fabs(one) > greatest ? std::fabs(one) : greatest;
    for (int c = 0; c < out.size; c++) {
        const double got = out.get(row, head, c), gap = std::fabs(got - wanted[(size_t)c]);
        const bool same = r == nullptr && out.dtype != CF_DTYPE_FP32
                              ? gap <= tolerance(out.dtype, wanted[(size_t)c], 0)
                              : gap <= tolerance(out.dtype, wanted[(size_t)c], greatest);
        if (same) continue;
        FAIL("%s: row %d, head %d, number %d at position %lld is %.9g, wanted %.9g", what, row, head, c,
             (long long)position, got, wanted[(size_t)c]);
        return false;
    }
    return true;
}

static std::vector<double> head_of(const array &a, int row, int head) {
    std::vector<double> x((size_t)a.size);
    for (int c = 0; c < a.size; c++) x[(size_t)c] = a.get(row, head, c);
    return x;
}

/* ---- append ---- */

struct append_case {
    cf_dtype dtype = CF_DTYPE_BF16;
    int n_heads = 2, n_kv_heads = 1, size = 64;
    rotary rope;
    bool no_table = false, packed = true, in_place = true;
    std::vector<int32_t> positions;
};

static const int STATE_ROW = 2; /* where the chunk starts in these tests' state */

static cf_append describe(const append_case &c, const rotary_table &table, const int_array &positions) {
    cf_append a;
    memset(&a, 0, sizeof a);
    a.rows = (int64_t)c.positions.size();
    a.n_heads = c.n_heads;
    a.n_kv_heads = c.n_kv_heads;
    a.head_size = c.size;
    a.dtype = c.dtype;
    a.positions = positions.device;
    a.rope = table.rope;
    if (c.no_table) a.rope.table = nullptr;
    return a;
}

static void note_case(const append_case &c) {
    harness_note("dtype %d, heads %d/%d of %d, rotated %d%s%s%s%s, %d rows", (int)c.dtype, c.n_heads, c.n_kv_heads,
                 c.size, c.rope.rotated, c.rope.interleaved ? ", interleaved" : "", c.no_table ? ", no table" : "",
                 c.packed ? ", packed" : "", c.in_place ? ", in place" : "", (int)c.positions.size());
}

/* Runs the forward into a state, twice: right numbers, the same bits again, and no other byte changed. */
static void check_forward(const append_case &c, uint64_t seed) {
    harness_rng rng = {seed};
    const int rows = (int)c.positions.size(), kv = c.n_kv_heads;
    const rotary_table table(c.rope, c.size, 1000);
    const int_array positions(c.positions);
    array qkv(c.dtype, rows, c.n_heads + 2 * kv, c.size, 8, c.packed ? 0 : 8),
        q_out(c.dtype, rows, c.n_heads, c.size, 16);
    array k_state(c.dtype, rows + 5, kv, c.size), v_state(c.dtype, rows + 5, kv, c.size);
    array out(c.dtype, rows, c.n_heads, c.size, 16);
    note_case(c);
    fill_normal(&qkv, &rng);
    fill_normal(&out, &rng);
    cf_append a = describe(c, table, positions);
    if (seed % 4 != 0) a.out = out.tensor();
    cf_error error;
    memset(&error, 0, sizeof error);
    a.q = qkv.tensor();
    a.k = qkv.tensor(0, c.n_heads);
    a.v = qkv.tensor(0, c.n_heads + kv);
    a.q_out = c.in_place ? a.q : q_out.tensor();
    a.k_out = k_state.tensor(STATE_ROW);
    a.v_out = v_state.tensor(STATE_ROW);
    start_clean();
    call_ok(cf_append_forward(&a, nullptr, &error), error);
    check_faults();
#ifdef CHUNKFLOW_CUDA_EMULATION
    CHECK_INT(cuda_emu_total().launches, rows > 0);
    CHECK_INT(cuda_emu_kernel("append_forward").launches, rows > 0);
#endif
    array &q_done = c.in_place ? qkv : q_out;
    array inputs(c.dtype, rows, c.n_heads + 2 * kv, c.size, 8, c.packed ? 0 : 8);
    inputs.host = qkv.before;
    for (array *one : {&qkv, &q_out, &k_state, &v_state, &out}) one->download();
    const std::vector<unsigned char> first_q = q_done.host, first_k = k_state.host, first_v = v_state.host;
    for (int r = 0; r < rows; r++) {
        const int64_t position = c.positions[(size_t)r];
        const rotary *turned = c.no_table ? nullptr : &c.rope;
        bool ok = true;
        for (int h = 0; h < c.n_heads && ok; h++) {
            if (position < 0 && a.out.data) {
                for (double one : head_of(out, r, h)) ok = CHECK(one == 0.0) && ok;
                out.forget(r, h);
            }
            if (position < 0)
                for (double one : head_of(q_done, r, h)) ok = CHECK(one == 0.0) && ok;
            else
                ok = check_head("q_out", q_done, r, h, head_of(inputs, r, h), turned, position, 1);
            q_done.forget(r, h);
        }
        for (int h = 0; h < kv && position >= 0 && ok; h++) {
            ok = check_head("k_out", k_state, r + STATE_ROW, h, head_of(inputs, r, c.n_heads + h), turned, position, 1);
            ok = ok &&
                 check_head("v_out", v_state, r + STATE_ROW, h, head_of(inputs, r, c.n_heads + kv + h), nullptr, 0, 1);
            k_state.forget(r + STATE_ROW, h);
            v_state.forget(r + STATE_ROW, h);
        }
        if (!ok) return;
    }
    for (array *one : {&qkv, &q_out, &k_state, &v_state, &out}) CHECK(one->unchanged());

    qkv.host = inputs.host; /* as a replay's projections recompute them */
    qkv.upload();
    call_ok(cf_append_forward(&a, nullptr, &error), error);
    for (array *one : {&qkv, &q_out, &k_state, &v_state}) one->download();
    CHECK(q_done.host == first_q && k_state.host == first_k && v_state.host == first_v);
    check_faults();
}

/* Runs the backward from fp32 gradients of the state. */
static void check_backward(const append_case &c, uint64_t seed) {
    harness_rng rng = {seed};
    const int rows = (int)c.positions.size(), kv = c.n_kv_heads;
    const rotary_table table(c.rope, c.size, 1000);
    const int_array positions(c.positions);
    array dq(c.dtype, rows, c.n_heads, c.size, 8), k_gradient(CF_DTYPE_FP32, rows + 5, kv, c.size);
    array v_gradient(CF_DTYPE_FP32, rows + 5, kv, c.size);
    array out(c.dtype, rows, c.n_heads + 2 * kv, c.size, 8, c.packed ? 0 : 8);
    note_case(c);
    for (array *one : {&dq, &k_gradient, &v_gradient}) fill_normal(one, &rng);
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < c.n_heads && c.positions[(size_t)r] < 0; h++)
            for (int i = 0; i < c.size; i++) { /* attention may leave anything in padding */
                dq.put(r, h, i, INFINITY);
                if (h < kv) k_gradient.put(r + STATE_ROW, h, i, NAN), v_gradient.put(r + STATE_ROW, h, i, NAN);
            }
    for (array *one : {&dq, &k_gradient, &v_gradient}) one->upload();
    cf_append a = describe(c, table, positions);
    cf_error error;
    memset(&error, 0, sizeof error);
    a.q = dq.tensor();
    a.k = k_gradient.tensor(STATE_ROW);
    a.v = v_gradient.tensor(STATE_ROW);
    a.q_out = c.in_place ? a.q : out.tensor();
    a.k_out = out.tensor(0, c.n_heads);
    a.v_out = out.tensor(0, c.n_heads + kv);
    start_clean();
    call_ok(cf_append_backward(&a, nullptr, &error), error);
    check_faults();
#ifdef CHUNKFLOW_CUDA_EMULATION
    CHECK_INT(cuda_emu_total().launches, rows > 0);
    CHECK_INT(cuda_emu_kernel("append_backward").launches, rows > 0);
#endif
    array q_in(c.dtype, rows, c.n_heads, c.size, 8);
    q_in.host = dq.before;
    array &q_done = c.in_place ? dq : out;
    for (array *one : {&dq, &k_gradient, &v_gradient, &out}) one->download();
    for (int r = 0; r < rows; r++) {
        const int64_t position = c.positions[(size_t)r];
        const rotary *turned = c.no_table ? nullptr : &c.rope;
        bool ok = true;
        for (int h = 0; h < c.n_heads + 2 * kv && ok; h++) {
            array &to = h < c.n_heads ? q_done : out;
            const int gradient_row = r + STATE_ROW;
            if (position < 0)
                for (double one : head_of(to, r, h)) ok = CHECK(one == 0.0) && ok;
            else if (h < c.n_heads)
                ok = check_head("dq", to, r, h, head_of(q_in, r, h), turned, position, -1);
            else if (h < c.n_heads + kv)
                ok = check_head("dk", to, r, h, head_of(k_gradient, gradient_row, h - c.n_heads), turned, position, -1);
            else
                ok = check_head("dv", to, r, h, head_of(v_gradient, gradient_row, h - c.n_heads - kv), nullptr, 0, -1);
            to.forget(r, h);
        }
        if (!ok) return;
    }
    for (array *one : {&dq, &k_gradient, &v_gradient, &out}) CHECK(one->unchanged());
}

static std::vector<int32_t> some_positions(int rows, uint64_t seed) {
    harness_rng rng = {seed};
    std::vector<int32_t> positions;
    for (int i = 0; i < rows; i++)
        positions.push_back(harness_chance(&rng, 0.15) ? -1 - (int32_t)(i % 3) * 1000
                                                       : (int32_t)harness_between(&rng, 0, 999));
    return positions;
}

TEST(appends) {
    const int sizes[] = {8, 24, 64, 80, 128, 256}, heads[][2] = {{1, 1}, {4, 2}, {7, 1}, {3, 3}, {16, 2}};
    const int rows[] = {1, 7, 13, 37};
    const cf_dtype types[] = {CF_DTYPE_BF16, CF_DTYPE_FP16, CF_DTYPE_FP32};
    int n = 0;
    for (int size : sizes)
        for (cf_dtype dtype : types)
            for (int part = 0; part < 4; part++, n++) {
                append_case c;
                if (harness_rounds(0, (n + n / 4) % 2)) continue;
                c.dtype = dtype;
                c.size = size;
                c.rope.rotated = part == 0   ? 0
                                 : part == 1 ? std::min(size, (size / 32 + 1) * 16)
                                 : part == 2 ? size / 2 + 2
                                             : 2;
                c.rope.interleaved = n % 2 != 0;
                if (n % 5 == 0) c.rope.base = 500000.0;
                c.n_heads = heads[n % 5][0];
                c.n_kv_heads = heads[n % 5][1];
                c.packed = n % 3 != 0;
                c.in_place = n % 4 < 2;
                c.positions = some_positions(rows[n % 4], (uint64_t)n);
                check_forward(c, (uint64_t)(100 + n));
                check_backward(c, (uint64_t)(200 + n));
            }
}

/* Numbers of pairs with every remainder of an access: 16-byte accesses are used only if the number divides evenly. */
TEST(appends_any_number_of_pairs) {
    for (int pairs = 1; pairs <= 12; pairs++)
        for (int i = 0; i < 6; i++) {
            append_case c;
            c.dtype = (cf_dtype)(CF_DTYPE_BF16 + i % 3);
            c.size = 24;
            c.rope.rotated = 2 * pairs;
            c.rope.interleaved = i / 3 != 0;
            c.n_heads = 2;
            c.packed = (pairs + i) % 2 == 0;
            c.in_place = i < 2;
            c.positions = some_positions(5, (uint64_t)(pairs + i));
            check_forward(c, (uint64_t)(300 + pairs));
            check_backward(c, (uint64_t)(400 + pairs));
        }
}

TEST(appends_without_a_table) {
    const int sizes[] = {8, 24, 64};
    for (int i = 0; i < 9; i++) {
        append_case c;
        c.dtype = (cf_dtype)(CF_DTYPE_BF16 + i % 3);
        c.size = sizes[i / 3];
        c.no_table = true;
        c.packed = i % 2 == 0;
        c.n_heads = 3;
        c.positions = some_positions(19, (uint64_t)i);
        check_forward(c, (uint64_t)i);
        check_backward(c, (uint64_t)i);
    }
}

/* More rows than a block, more than a wave of the heads' slots, and none. */
TEST(appends_many_rows) {
    append_case c;
    c.n_heads = 5;
    c.positions = some_positions(1031, 5);
    check_forward(c, 1);
    check_backward(c, 2);
    c.positions.clear();
    check_forward(c, 3);
    check_backward(c, 4);
    c.positions.assign(9, -1); /* nothing but padding */
    check_forward(c, 5);
    check_backward(c, 6);
}

/* <R q, g> = <q, R^T g>, and R^T R q = q: the backward is the forward's transpose and its inverse. The sums agree
   within fp32 rounding. */
TEST(backward_is_the_transpose) {
    for (int interleaved = 0; interleaved < 2; interleaved++) {
        const int rows = 23, heads = 3, size = 32;
        harness_rng rng = {77};
        rotary r;
        r.interleaved = interleaved != 0;
        r.rotated = 24;
        append_case c;
        c.dtype = CF_DTYPE_FP32;
        c.n_heads = c.n_kv_heads = heads;
        c.size = size;
        for (int i = 0; i < rows; i++) c.positions.push_back(i * 41);
        const rotary_table table(r, size, 1000);
        const int_array positions(c.positions);
        array q(CF_DTYPE_FP32, rows, heads, size), g(CF_DTYPE_FP32, rows, heads, size),
            other(CF_DTYPE_FP32, rows, heads, size);
        array rq(CF_DTYPE_FP32, rows, heads, size), rg(CF_DTYPE_FP32, rows, heads, size),
            back(CF_DTYPE_FP32, rows, heads, size);
        fill_normal(&q, &rng);
        fill_normal(&g, &rng);
        fill_normal(&other, &rng);
        cf_append a = describe(c, table, positions);
        cf_error error;
        memset(&error, 0, sizeof error);
        start_clean();
        a.q = a.k = a.v = q.dense(); /* read only, so that one array may be all three */
        a.q_out = rq.dense(), a.k_out = back.dense(), a.v_out = rg.dense();
        call_ok(cf_append_forward(&a, nullptr, &error), error);
        a.q = g.dense(), a.k = rq.dense(), a.v = other.dense();
        a.q_out = rg.dense(), a.k_out = back.dense(), a.v_out = other.dense();
        call_ok(cf_append_backward(&a, nullptr, &error), error);
        check_faults();
        for (array *one : {&q, &g, &rq, &rg, &back}) one->download();
        double forward = 0.0, backward = 0.0, size_of_terms = 0.0;
        for (int row = 0; row < rows; row++)
            for (int h = 0; h < heads; h++)
                for (int i = 0; i < size; i++) {
                    forward += rq.get(row, h, i) * g.get(row, h, i);
                    backward += q.get(row, h, i) * rg.get(row, h, i);
                    size_of_terms += std::fabs(rq.get(row, h, i) * g.get(row, h, i));
                    if (!CHECK(std::fabs(back.get(row, h, i) - q.get(row, h, i)) <= 16 * 0x1p-24)) return;
                }
        CHECK(std::fabs(forward - backward) <= 0x1p-22 * size_of_terms);
        CHECK(std::fabs(forward) > 0.1);
    }
}

/* Checks the cosines and sines that the kernel sees, up to millions of positions: a head of (1, 0) pairs shows them.
   Both tables are rounded to fp32, which is off by at most 2^-25 each. The errors of the four products then add up to
   at most 2 sqrt(2) 2^-25, and two fp32 roundings add 2^-25 each: 2.42 x 2^-24 in all. */
TEST(rope_accuracy) {
    const int64_t n_positions[] = {1, 2, 1000, (int64_t)1 << 18, 8000000};
    const int size = 64;
    for (int i = 0; i < 5; i++)
        for (int scaled = 0; scaled < 2; scaled++) {
            rotary r;
            r.base = scaled ? 500000.0 : 10000.0;
            if (scaled) { /* Llama 3's: long wavelengths are 8 times as long, those between are blended */
                for (int pair = 0; pair < size / 2; pair++) {
                    const double f = std::pow(r.base, -2.0 * pair / size), wave = 6.283185307179586 / f;
                    const double blend = (8192.0 / wave - 1.0) / 3.0;
                    r.frequencies.push_back(wave < 2048.0   ? f
                                            : wave > 8192.0 ? f / 8.0
                                                            : f * ((1.0 - blend) / 8.0 + blend));
                }
            }
            const int64_t n = n_positions[i];
            int64_t fine = 1;
            while (fine * fine < n) fine *= 2;
            append_case c;
            c.dtype = CF_DTYPE_FP32;
            c.n_heads = c.n_kv_heads = 1;
            c.size = size;
            harness_rng rng = {3};
            for (int64_t p : {(int64_t)0, (int64_t)1, fine - 1, fine, fine + 1, 2 * fine - 1, 2 * fine, n - 2, n - 1})
                if (p >= 0 && p < n) c.positions.push_back((int32_t)p);
            for (int j = 0; j < 300; j++) c.positions.push_back((int32_t)harness_between(&rng, 0, n - 1));
            const int rows = (int)c.positions.size();
            const rotary_table table(r, size, n);
            const int_array positions(c.positions);
            array q(CF_DTYPE_FP32, rows, 1, size), k(CF_DTYPE_FP32, rows, 1, size), v(CF_DTYPE_FP32, rows, 1, size);
            array q_out(CF_DTYPE_FP32, rows, 1, size);
            for (int row = 0; row < rows; row++)
                for (int j = 0; j < size; j++) q.put(row, 0, j, j < size / 2 ? 1.0f : 0.0f);
            q.upload();
            cf_append a = describe(c, table, positions);
            cf_error error;
            memset(&error, 0, sizeof error);
            size_t bytes = 0;
            CHECK_INT(cf_rope_size(&a.rope, size, &bytes, nullptr), CF_OK);
            CHECK_INT(bytes, (fine + (n + fine - 1) / fine) * size * 4); /* about 2 sqrt(n) rows */
            start_clean();
            a.q = a.k = a.v = q.dense();
            a.q_out = q_out.dense(), a.k_out = k.dense(), a.v_out = v.dense();
            call_ok(cf_append_forward(&a, nullptr, &error), error);
            check_faults();
            k.download();
            double most = 0.0;
            for (int row = 0; row < rows; row++)
                for (int j = 0; j < size / 2; j++) {
                    const long double t = r.angle(size, j, c.positions[(size_t)row]);
                    const double off_cosine = std::fabs(k.get(row, 0, j) - (double)cosl(t));
                    const double off_sine = std::fabs(k.get(row, 0, j + size / 2) - (double)sinl(t));
                    most = std::fmax(most, std::fmax(off_cosine, off_sine));
                }
            if (most > 2.43 * 0x1p-24) FAIL("positions below %lld: off by %.3g ulp", (long long)n, most * 0x1p24);
            CHECK(k.get(0, 0, 0) == 1.0 && k.get(0, 0, size / 2) == 0.0); /* position 0 turns nothing */
        }
}

/* A position past the table counts as the last one: nothing outside the table is read. */
TEST(positions_past_the_table) {
    append_case c;
    c.dtype = CF_DTYPE_FP32;
    c.positions = {69, 70, 71, 5000, INT32_MAX, 69};
    const rotary_table table(c.rope, c.size, 70);
    const int_array positions(c.positions);
    array q(c.dtype, 6, 4, c.size), k(c.dtype, 6, 1, c.size), v(c.dtype, 6, 1, c.size);
    for (int r = 0; r < 6; r++)
        for (int h = 0; h < 4; h++)
            for (int i = 0; i < c.size; i++) q.put(r, h, i, (float)(i + h));
    q.upload();
    cf_append a = describe(c, table, positions);
    a.q = q.tensor(), a.k = q.tensor(0, 2), a.v = q.tensor(0, 3);
    a.q_out = a.q, a.k_out = k.dense(), a.v_out = v.dense();
    start_clean();
    CHECK_INT(cf_append_forward(&a, nullptr, nullptr), CF_OK);
    check_faults();
    k.download();
    for (int r = 1; r < 6; r++) CHECK(head_of(k, r, 0) == head_of(k, 0, 0));
}

/* ---- planes ---- */

static cf_state state_of(void *data, int layers, int heads, int size, cf_dtype dtype, int64_t rows) {
    cf_state s;
    memset(&s, 0, sizeof s);
    s.data = data;
    s.n_layers = layers;
    s.n_kv_heads = heads;
    s.head_size = size;
    s.dtype = dtype;
    s.rows = rows;
    return s;
}

/* Counts the bytes of all planes, from the address of the last row of the last one. */
static int64_t bytes_of_planes(cf_state s, int64_t rows) {
    s.data = (void *)(uintptr_t)4096, s.rows = rows;
    const cf_tensor last = cf_state_v(&s, s.n_layers - 1, rows - 1);
    const int64_t number = s.dtype == CF_DTYPE_FP32 ? 4 : 2;
    return (char *)last.data - (char *)s.data + last.row_stride * number;
}

/* The planes take what the memory model counts, for real models, divided into stages and over GPUs. */
TEST(bytes_are_the_models) {
    const char *names[] = {"qwen2.5-7b", "qwen3-32b", "llama-3-8b"};
    int found = 0;
    for (const char *name : names)
        for (int64_t tp = 1; tp <= 4; tp *= 2) {
            cf_memory_desc d;
            cf_token_bytes tokens;
            memset(&d, 0, sizeof d);
            d.model = cf_model_find(name);
            if (!d.model) continue;
            found++;
            d.parallel.tp = tp;
            d.parallel.pp = 4;
            for (int64_t stage = 0; stage < 4; stage++) {
                const int64_t n_rows = 12345,
                              head = d.model->head_dim ? d.model->head_dim : d.model->hidden / d.model->heads;
                REQUIRE(cf_memory_token_bytes(&d, stage, &tokens, nullptr) == CF_OK);
                REQUIRE(d.model->layers % 4 == 0);
                cf_state s = state_of(nullptr, (int)(d.model->layers / 4), (int)(d.model->kv_heads / tp), (int)head,
                                      CF_DTYPE_DEFAULT, 1 << 20);
                CHECK_INT(bytes_of_planes(s, n_rows), n_rows * tokens.state);
                s.dtype = CF_DTYPE_FP32;
                CHECK_INT(bytes_of_planes(s, n_rows), n_rows * tokens.state_gradient);
                s.one_layer = 1;
                CHECK_INT(bytes_of_planes(s, n_rows) * (d.model->layers / 4), n_rows * tokens.state_gradient);
                /* A row of the hidden size passes between stages, divided by sequence parallelism. */
                CHECK_INT(tokens.boundary, 2 * d.model->hidden / tp);
            }
        }
    CHECK_INT(found, 9);
}

TEST(planes_of_layers) {
    char *base = (char *)(uintptr_t)4096;
    cf_state s = state_of(base, 3, 2, 24, CF_DTYPE_BF16, 100);
    for (int layer = 0; layer < 3; layer++) {
        const cf_tensor k = cf_state_k(&s, layer, 7), v = cf_state_v(&s, layer, 7);
        CHECK_INT((char *)k.data - base, ((2 * layer) * 100 + 7) * 96);
        CHECK_INT((char *)v.data - base, ((2 * layer + 1) * 100 + 7) * 96);
        CHECK_INT(k.row_stride, 48);
        CHECK_INT(v.head_stride, 24);
    }
    CHECK(cf_state_k(&s, 3, 0).data == nullptr);
    CHECK(cf_state_k(&s, -1, 0).data == nullptr);
    CHECK(cf_state_v(&s, 0, 100).data == nullptr);
    CHECK(cf_state_v(&s, 0, -1).data == nullptr);
    CHECK(cf_state_k(nullptr, 0, 0).data == nullptr);
    s.one_layer = 1;
    CHECK_INT((char *)cf_state_v(&s, 2, 7).data - base, (100 + 7) * 96);
    s.dtype = CF_DTYPE_FP32;
    s.rows = (int64_t)1 << 40; /* addresses past 2^32 */
    s.one_layer = 0;
    CHECK_INT((char *)cf_state_v(&s, 2, 5).data - base, (5 * s.rows + 5) * 192);
    s.head_size = 20; /* 40 numbers a row: still a multiple of 16 bytes */
    CHECK(cf_state_k(&s, 1, 1).data != nullptr);
    s.head_size = 21;
    CHECK(cf_state_k(&s, 1, 1).data == nullptr);
    s.data = nullptr;
    CHECK(cf_state_k(&s, 1, 1).data == nullptr);
}

/* Rows of all planes, as bytes. */
struct plane_memory {
    cf_state state;
    size_t row_bytes, n_planes;
    std::vector<unsigned char> host;
    unsigned char *device = nullptr;

    plane_memory(int layers, int heads, int size, cf_dtype dtype, int rows, bool one_layer, uint64_t seed) {
        harness_rng rng = {seed};
        row_bytes = (size_t)(heads * size) * (dtype == CF_DTYPE_FP32 ? 4 : 2);
        n_planes = one_layer ? 2 : 2 * (size_t)layers;
        host.resize(2 * BAND + n_planes * (size_t)rows * row_bytes);
        for (unsigned char &one : host) one = (unsigned char)harness_random(&rng);
        CHECK(cudaMalloc((void **)&device, host.size()) == cudaSuccess);
        copy_in(device, host.data(), host.size());
        state = state_of(device + BAND, layers, heads, size, dtype, rows);
        state.one_layer = one_layer;
    }
    plane_memory(const plane_memory &) = delete;
    plane_memory &operator=(const plane_memory &) = delete;
    ~plane_memory() { cudaFree(device); }

    unsigned char *row(std::vector<unsigned char> *from, size_t plane, size_t r) const {
        return from->data() + BAND + (plane * (size_t)state.rows + r) * row_bytes;
    }
    std::vector<unsigned char> now() const {
        std::vector<unsigned char> bytes(host.size());
        CHECK(cudaDeviceSynchronize() == cudaSuccess);
        CHECK(cudaMemcpy(bytes.data(), device, bytes.size(), cudaMemcpyDeviceToHost) == cudaSuccess);
        return bytes;
    }
};

/* ---- chunk by chunk ---- */

/* One batch. Sequence 0 is split into chunks; the others are whole and follow its last slice. Arrays are by token, one
   sequence after another. */
struct batch {
    cf_dtype dtype = CF_DTYPE_BF16;
    cf_attention_path path = CF_ATTENTION_MMA;
    int n_heads = 2, n_kv_heads = 1, size = 64;
    rotary rope;
    int align = 1;       /* slices start at multiples of this; rows between are padding */
    bool replay = false; /* one chunk's activations at a time: its forward runs again just before each backward */
    bool add = false;    /* gradients are added to existing numbers; otherwise the first backward overwrites */
    bool deterministic = false;
    std::vector<int> lengths;
    std::vector<float> q, k, v, dout;

    int tokens() const {
        int sum = 0;
        for (int length : lengths) sum += length;
        return sum;
    }
    int first_token(int sequence) const {
        int sum = 0;
        for (int s = 0; s < sequence; s++) sum += lengths[(size_t)s];
        return sum;
    }
    void make(uint64_t seed) {
        harness_rng rng = {seed};
        for (std::vector<float> *one : {&q, &k, &v, &dout}) {
            const int heads = one == &q || one == &dout ? n_heads : n_kv_heads;
            for (int i = 0; i < tokens() * heads * size; i++) one->push_back(normal(&rng, dtype));
        }
    }
    float initial(int row, int head, int c, bool of_v) const {
        return 0.25f * (float)((row * 5 + head * 3 + c + of_v) % 7) - 0.75f;
    }
};

/* By token: q and k as attention received them, dk and dv as they reach the projections, `sums` as stored in the
   state. */
struct batch_results {
    std::vector<double> q, k, out, lse, dq, dk, dv, dk_sums, dv_sums;
};

struct slice {
    int sequence, begin, length, row;
};

/* One chunk's tensors on the device. */
struct chunk_memory {
    std::vector<slice> slices;
    int rows = 0, prefix = 0;
    array *qkv = nullptr, *out = nullptr, *dout = nullptr, *gradient = nullptr; /* gradient: packed as qkv */
    float *lse = nullptr;
    int_array *positions = nullptr;
    std::vector<uint64_t> memory;
    const cf_attention *attention = nullptr;
    void *tiles = nullptr;

    ~chunk_memory() {
        delete qkv;
        delete out;
        delete dout;
        delete gradient;
        delete positions;
        cudaFree(lse);
        cudaFree(tiles);
    }

    size_t token(const batch &b, const slice &s, int i) const {
        return (size_t)(b.first_token(s.sequence) + s.begin + i);
    }

    void make(const batch &b) {
        cf_attention_desc d;
        std::vector<int32_t> cu_q = {0}, cu_k = {0}, starts_q, starts_k, places((size_t)rows, -1);
        cf_error error;
        size_t bytes = 0;
        memset(&d, 0, sizeof d);
        memset(&error, 0, sizeof error);
        for (size_t i = 0; i < slices.size(); i++) {
            const slice &s = slices[i];
            const bool carried = i == 0 && s.sequence == 0; /* only this slice sees the prefix */
            cu_q.push_back(cu_q.back() + s.length);
            cu_k.push_back(cu_k.back() + s.length + (carried ? prefix : 0));
            starts_q.push_back(s.row);
            starts_k.push_back(carried ? 0 : prefix + s.row);
            for (int j = 0; j < s.length; j++) places[(size_t)(s.row + j)] = s.begin + j;
        }
        d.n_heads = b.n_heads, d.n_kv_heads = b.n_kv_heads, d.head_size = b.size;
        d.n_slices = (int64_t)slices.size();
        d.cu_seqlens_q = cu_q.data(), d.cu_seqlens_k = cu_k.data();
        d.starts_q = starts_q.data(), d.starts_k = starts_k.data();
        d.dtype = b.dtype, d.path = b.path, d.deterministic = b.deterministic;
#ifdef CHUNKFLOW_CUDA_EMULATION
        d.arch = 80;
#endif
        if (!call_ok(cf_attention_size(&d, &bytes, &error), error)) return;
        memory.resize(bytes / 8 + 3);
        void *place = (void *)(((uintptr_t)memory.data() + 15) / 16 * 16);
        if (!call_ok(cf_attention_prepare(&d, place, bytes, &attention, &error), error)) return;
        CHECK(cudaMalloc(&tiles, attention->tiles_bytes + 16) == cudaSuccess);
        copy_in(tiles, attention->tiles, attention->tiles_bytes);
        positions = new int_array(places);
        qkv = new array(b.dtype, rows, b.n_heads + 2 * b.n_kv_heads, b.size);
        gradient = new array(b.dtype, rows, b.n_heads + 2 * b.n_kv_heads, b.size);
        out = new array(b.dtype, rows, b.n_heads, b.size);
        dout = new array(b.dtype, rows, b.n_heads, b.size);
        for (const slice &s : slices)
            for (int i = 0; i < s.length; i++)
                for (int h = 0; h < b.n_heads; h++)
                    for (int c = 0; c < b.size; c++)
                        dout->put(
                            s.row + i, h, c,
                            b.dout[(token(b, s, i) * (size_t)b.n_heads + (size_t)h) * (size_t)b.size + (size_t)c]);
        dout->upload();
        CHECK(cudaMalloc((void **)&lse, (size_t)(rows * b.n_heads + 1) * 4) == cudaSuccess);
    }

    /* Makes the projections, equal for a forward and its replay. Padding rows are NaN. */
    void project(const batch &b) {
        const int kv = b.n_kv_heads;
        std::fill(qkv->host.begin(), qkv->host.end(), (unsigned char)0xFF);
        for (const slice &s : slices)
            for (int i = 0; i < s.length; i++)
                for (int h = 0; h < b.n_heads + 2 * kv; h++) {
                    const size_t t = token(b, s, i), size = (size_t)b.size;
                    const float *from = h < b.n_heads ? &b.q[(t * (size_t)b.n_heads + (size_t)h) * size]
                                        : h < b.n_heads + kv
                                            ? &b.k[(t * (size_t)kv + (size_t)(h - b.n_heads)) * size]
                                            : &b.v[(t * (size_t)kv + (size_t)(h - b.n_heads - kv)) * size];
                    for (int c = 0; c < b.size; c++) qkv->put(s.row + i, h, c, from[c]);
                }
        qkv->upload();
    }
    void drop() { /* activations */
        CHECK(cudaDeviceSynchronize() == cudaSuccess);
        CHECK(cudaMemset(qkv->device, 0xFF, qkv->host.size()) == cudaSuccess);
        CHECK(cudaMemset(out->device, 0xFF, out->host.size()) == cudaSuccess);
        CHECK(cudaMemset(lse, 0xFF, (size_t)(rows * attention->desc.n_heads) * 4) == cudaSuccess);
        CHECK(cudaDeviceSynchronize() == cudaSuccess);
    }
};

static const int LAYER = 1, N_LAYERS = 2, FIRST_ROW = 3; /* of the chain, in a state that it shares */

struct chunked_batch {
    const batch &b;
    std::vector<chunk_memory> chunks;
    cf_state state, gradient;
    unsigned char *state_memory = nullptr, *gradient_memory = nullptr;
    size_t state_bytes = 0, gradient_bytes = 0;
    rotary_table table;
    void *workspace = nullptr;
    size_t workspace_bytes = 0;
    cublasHandle_t cublas = nullptr;
    cudaStream_t stream = nullptr;

    chunked_batch(const batch &b_, const std::vector<int> &sizes)
        : b(b_), chunks(sizes.size()), table(b_.rope, b_.size, 2048) {
        int prefix = 0, rows = 0;
        for (size_t i = 0; i < sizes.size(); i++) {
            chunk_memory &c = chunks[i];
            int row = 0;
            c.prefix = prefix;
            if (sizes[i] > 0) c.slices.push_back({0, prefix, sizes[i], 0});
            row = (sizes[i] + b.align - 1) / b.align * b.align;
            for (int s = 1; s < (int)b.lengths.size() && i + 1 == sizes.size(); s++) {
                c.slices.push_back({s, 0, b.lengths[(size_t)s], row});
                row += (b.lengths[(size_t)s] + b.align - 1) / b.align * b.align;
            }
            c.rows = row;
            c.make(b);
            prefix += sizes[i];
            rows = c.prefix + row > rows ? c.prefix + row : rows;
            if (c.attention->forward_bytes > workspace_bytes) workspace_bytes = c.attention->forward_bytes;
            if (c.attention->backward_bytes > workspace_bytes) workspace_bytes = c.attention->backward_bytes;
        }
        rows += FIRST_ROW + 2;
        state = make_state(b.dtype, rows, &state_memory, &state_bytes);
        gradient = make_state(CF_DTYPE_FP32, rows, &gradient_memory, &gradient_bytes);
        CHECK(cudaMalloc(&workspace, workspace_bytes + 16) == cudaSuccess);
        CHECK(cublasCreate(&cublas) == CUBLAS_STATUS_SUCCESS);
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    }
    ~chunked_batch() {
        cudaFree(state_memory);
        cudaFree(gradient_memory);
        cudaFree(workspace);
        cublasDestroy(cublas);
        cudaStreamDestroy(stream);
    }

    cf_state make_state(cf_dtype dtype, int rows, unsigned char **memory, size_t *bytes) {
        cf_state s = state_of(nullptr, N_LAYERS, b.n_kv_heads, b.size, dtype, rows);
        *bytes = (size_t)bytes_of_planes(s, rows);
        CHECK(cudaMalloc((void **)memory, *bytes) == cudaSuccess);
        CHECK(cudaMemset(*memory, 0xFF, *bytes) == cudaSuccess);
        CHECK(cudaDeviceSynchronize() == cudaSuccess);
        s.data = *memory;
        return s;
    }

    std::vector<unsigned char> copy_of(const unsigned char *device, size_t bytes) {
        std::vector<unsigned char> host(bytes);
        CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
        CHECK(cudaMemcpy(host.data(), device, bytes, cudaMemcpyDeviceToHost) == cudaSuccess);
        return host;
    }

    cf_append rows_of(const chunk_memory &c) {
        cf_append a;
        memset(&a, 0, sizeof a);
        a.rows = c.rows;
        a.n_heads = b.n_heads, a.n_kv_heads = b.n_kv_heads, a.head_size = b.size, a.dtype = b.dtype;
        a.positions = c.positions->device;
        a.rope = table.rope;
        return a;
    }

    cf_attention_tensors tensors_of(const chunk_memory &c) {
        cf_attention_tensors x;
        memset(&x, 0, sizeof x);
        x.q = c.qkv->tensor();
        x.k = cf_state_k(&state, LAYER, FIRST_ROW);
        x.v = cf_state_v(&state, LAYER, FIRST_ROW);
        x.out = c.out->tensor();
        x.lse = c.lse, x.lse_stride = c.rows;
        x.tiles = c.tiles, x.workspace = workspace, x.workspace_bytes = workspace_bytes, x.cublas = cublas;
        return x;
    }

    bool forward(chunk_memory *c) {
        cf_error error;
        memset(&error, 0, sizeof error);
        c->project(b);
        cf_append a = rows_of(*c);
        a.q = a.q_out = c->qkv->tensor();
        a.k = c->qkv->tensor(0, b.n_heads);
        a.v = c->qkv->tensor(0, b.n_heads + b.n_kv_heads);
        a.k_out = cf_state_k(&state, LAYER, FIRST_ROW + c->prefix);
        a.v_out = cf_state_v(&state, LAYER, FIRST_ROW + c->prefix);
        if (!call_ok(cf_append_forward(&a, stream, &error), error)) return false;
        const cf_attention_tensors x = tensors_of(*c);
        CHECK(cudaMemsetAsync(workspace, 0xFF, workspace_bytes, stream) == cudaSuccess);
        return call_ok(cf_attention_forward(c->attention, &x, stream, &error), error);
    }

    bool backward(chunk_memory *c, bool overwrite) {
        cf_error error;
        memset(&error, 0, sizeof error);
        cf_attention_tensors x = tensors_of(*c);
        x.dout = c->dout->tensor();
        x.dq = c->gradient->tensor();
        x.dk = cf_state_k(&gradient, LAYER, FIRST_ROW);
        x.dv = cf_state_v(&gradient, LAYER, FIRST_ROW);
        x.overwrite = overwrite;
        CHECK(cudaMemsetAsync(workspace, 0xFF, workspace_bytes, stream) == cudaSuccess);
        if (!call_ok(cf_attention_backward(c->attention, &x, stream, &error), error)) return false;
        cf_append a = rows_of(*c);
        a.q = a.q_out = x.dq;
        a.k = cf_state_k(&gradient, LAYER, FIRST_ROW + c->prefix);
        a.v = cf_state_v(&gradient, LAYER, FIRST_ROW + c->prefix);
        a.k_out = c->gradient->tensor(0, b.n_heads);
        a.v_out = c->gradient->tensor(0, b.n_heads + b.n_kv_heads);
        return call_ok(cf_append_backward(&a, stream, &error), error);
    }

    /* Fills in the numbers to which gradients are added, in the rows of all sequences. */
    void fill_gradients() {
        std::vector<float> host(gradient_bytes / 4, NAN);
        for (const chunk_memory &c : chunks)
            for (const slice &s : c.slices)
                for (int i = 0; i < s.length; i++)
                    for (int h = 0; h < b.n_kv_heads; h++)
                        for (int n = 0; n < b.size; n++)
                            for (int of_v = 0; of_v < 2; of_v++)
                                host[sum_index(c, s, i, h, n, of_v != 0)] =
                                    b.initial((int)c.token(b, s, i), h, n, of_v != 0);
        copy_in(gradient_memory, host.data(), gradient_bytes);
    }

    size_t sum_index(const chunk_memory &c, const slice &s, int i, int h, int n, bool of_v) const {
        const size_t row = (size_t)(FIRST_ROW + c.prefix + s.row + i), plane = 2 * LAYER + (of_v ? 1 : 0);
        return ((plane * (size_t)gradient.rows + row) * (size_t)b.n_kv_heads + (size_t)h) * (size_t)b.size + (size_t)n;
    }

    /* Collects the results by token. Checks that padding is 0 and that rows of no sequence are unchanged. */
    void collect(batch_results *to, const std::vector<unsigned char> &state_now) {
        const int kv = b.n_kv_heads, tokens = b.tokens();
        const size_t size = (size_t)b.size;
        std::vector<unsigned char> bytes = copy_of(gradient_memory, gradient_bytes);
        std::vector<float> sums(gradient_bytes / 4);
        memcpy(sums.data(), bytes.data(), gradient_bytes);
        array rows(b.dtype, (int)state.rows, kv, b.size); /* K, as stored in the state */
        memcpy(&rows.host[BAND], &state_now[2 * LAYER * (state_now.size() / (2 * N_LAYERS))],
               state_now.size() / (2 * N_LAYERS));
        for (std::vector<double> *one : {&to->q, &to->out, &to->dq})
            one->assign((size_t)(tokens * b.n_heads) * size, NAN);
        for (std::vector<double> *one : {&to->k, &to->dk, &to->dv, &to->dk_sums, &to->dv_sums})
            one->assign((size_t)(tokens * kv) * size, NAN);
        to->lse.assign((size_t)(tokens * b.n_heads), NAN);
        for (chunk_memory &c : chunks) {
            std::vector<float> lse((size_t)(c.rows * b.n_heads));
            for (array *one : {c.qkv, c.out, c.gradient}) one->download();
            CHECK(cudaMemcpy(lse.data(), c.lse, lse.size() * 4, cudaMemcpyDeviceToHost) == cudaSuccess);
            std::vector<bool> real((size_t)c.rows, false);
            for (const slice &s : c.slices)
                for (int i = 0; i < s.length; i++) {
                    const size_t t = c.token(b, s, i);
                    const int row = s.row + i;
                    real[(size_t)row] = true;
                    for (int h = 0; h < b.n_heads; h++) {
                        to->lse[(size_t)(h * tokens) + t] = lse[(size_t)(h * c.rows + row)];
                        for (size_t n = 0; n < size; n++) {
                            const size_t at = (t * (size_t)b.n_heads + (size_t)h) * size + n;
                            to->q[at] = c.qkv->get(row, h, (int)n);
                            to->out[at] = c.out->get(row, h, (int)n);
                            to->dq[at] = c.gradient->get(row, h, (int)n);
                        }
                    }
                    for (int h = 0; h < kv; h++)
                        for (size_t n = 0; n < size; n++) {
                            const size_t at = (t * (size_t)kv + (size_t)h) * size + n;
                            float *dk = &sums[sum_index(c, s, i, h, (int)n, false)],
                                  *dv = &sums[sum_index(c, s, i, h, (int)n, true)];
                            to->k[at] = rows.get(FIRST_ROW + c.prefix + row, h, (int)n);
                            to->dk[at] = c.gradient->get(row, b.n_heads + h, (int)n);
                            to->dv[at] = c.gradient->get(row, b.n_heads + kv + h, (int)n);
                            to->dk_sums[at] = *dk;
                            to->dv_sums[at] = *dv;
                            memset(dk, 0xFF, 4);
                            memset(dv, 0xFF, 4);
                        }
                }
            for (int row = 0; row < c.rows; row++)
                for (int h = 0; h < b.n_heads + 2 * kv && !real[(size_t)row]; h++)
                    for (double one : head_of(*c.gradient, row, h))
                        if (!CHECK(one == 0.0)) return;
        }
        if (!b.add)
            CHECK(harness_is_poison(sums.data(), gradient_bytes)); /* with `add`, another NaN */
        else
            for (float one : sums)
                if (!CHECK(std::isnan(one))) return;
    }

    bool run(batch_results *to) {
        start_clean();
        if (b.add) fill_gradients();
        for (chunk_memory &c : chunks) {
            if (!forward(&c)) return false;
            if (b.replay) c.drop();
        }
        const std::vector<unsigned char> after_forward = copy_of(state_memory, state_bytes);
        for (size_t i = chunks.size(); i-- > 0;) {
            if (b.replay && !forward(&chunks[i])) return false;
            if (!backward(&chunks[i], !b.add && i + 1 == chunks.size())) return false;
        }
        /* The replays wrote the same bits, and nothing else wrote to the state. */
        CHECK(copy_of(state_memory, state_bytes) == after_forward);
        collect(to, after_forward);
        check_state_rows(after_forward);
        check_faults();
        return true;
    }

    /* Checks that rows of the state outside the sequences, and the other layer, are unchanged. */
    void check_state_rows(std::vector<unsigned char> bytes) {
        const size_t row_bytes = (size_t)(b.n_kv_heads * b.size) * (b.dtype == CF_DTYPE_FP32 ? 4 : 2);
        for (const chunk_memory &c : chunks)
            for (const slice &s : c.slices)
                for (size_t of_v = 0; of_v < 2; of_v++)
                    memset(&bytes[((2 * LAYER + of_v) * (size_t)state.rows + (size_t)(FIRST_ROW + c.prefix + s.row)) *
                                  row_bytes],
                           0xFF, (size_t)s.length * row_bytes);
        CHECK(harness_is_poison(bytes.data(), bytes.size()));
    }
};

/* Rotates every head of a (tokens, heads, size) array, each token by its place in its sequence. Stored as `dtype`. */
template <typename From>
static std::vector<double> turn_all(const batch &b, const std::vector<From> &x, int heads, int way, cf_dtype dtype,
                                    bool store) {
    std::vector<double> to(x.size());
    const size_t size = (size_t)b.size;
    for (int s = 0, t = 0; s < (int)b.lengths.size(); s++)
        for (int i = 0; i < b.lengths[(size_t)s]; i++, t++)
            for (int h = 0; h < heads; h++) {
                const size_t at = ((size_t)t * (size_t)heads + (size_t)h) * size;
                const std::vector<double> y =
                    b.rope.turn(std::vector<double>(x.begin() + (long)at, x.begin() + (long)(at + size)), i, way);
                for (size_t c = 0; c < size; c++) to[at + c] = store ? (double)round_to(dtype, (float)y[c]) : y[c];
            }
    return to;
}

static std::vector<float> as_floats(const std::vector<double> &x) { return std::vector<float>(x.begin(), x.end()); }

/* Compares q and k with the expected values, except for the rounding to the type, where fp32 may round a half
   differently. */
static void check_turned(const char *what, const batch &b, const std::vector<float> &x, const std::vector<double> &got,
                         int heads) {
    const std::vector<double> wanted = turn_all(b, x, heads, 1, b.dtype, false);
    REQUIRE(got.size() == wanted.size());
    for (size_t i = 0; i < got.size(); i++)
        if (!(std::fabs(got[i] - wanted[i]) <= tolerance(b.dtype, wanted[i], 4.0))) {
            FAIL("%s: number %d is %.9g, wanted %.9g", what, (int)i, got[i], wanted[i]);
            return;
        }
}

/* Computes the batch in double from attention's q and k, and again as an unfused implementation in its type would. */
static void reference_results(const batch &b, const batch_results &stored, batch_results *exact,
                              batch_results *rounded) {
    host_problem p;
    host_inputs in;
    p.dtype = b.dtype;
    p.n_heads = b.n_heads, p.n_kv_heads = b.n_kv_heads, p.head_size = b.size;
    for (int length : b.lengths) p.add_slice(length, length);
    in.q = as_floats(stored.q);
    in.k = as_floats(stored.k);
    in.v = b.v;
    in.dout = b.dout;
    for (batch_results *to : {exact, rounded}) {
        const bool store = to == rounded;
        host_results r = store ? reference_rounded(p, in) : reference_exact(p, in);
        for (int t = 0; t < b.tokens() && b.add; t++)
            for (int h = 0; h < b.n_kv_heads; h++)
                for (int c = 0; c < b.size; c++) {
                    const size_t at = (size_t)((t * b.n_kv_heads + h) * b.size + c);
                    r.dk[at] += b.initial(t, h, c, false);
                    r.dv[at] += b.initial(t, h, c, true);
                }
        to->out = r.out;
        to->lse = r.lse;
        to->dk_sums = r.dk;
        to->dv_sums = r.dv;
        to->dq = turn_all(b, r.dq, b.n_heads, -1, b.dtype, store);
        to->dk = turn_all(b, r.dk, b.n_kv_heads, -1, b.dtype, store);
        to->dv = r.dv;
        if (store)
            for (double &one : to->dv) one = round_to(b.dtype, (float)one);
    }
}

static void check_results(const batch &b, const batch_results &got, const batch_results &exact,
                          const batch_results &rounded) {
    check_accuracy("out", b.dtype, got.out, exact.out, rounded.out, 2.0);
    check_accuracy("lse", CF_DTYPE_FP32, got.lse, exact.lse, rounded.lse, 2.0);
    check_accuracy("dq", b.dtype, got.dq, exact.dq, rounded.dq, 3.0);
    check_accuracy("dk", b.dtype, got.dk, exact.dk, rounded.dk, 3.0);
    check_accuracy("dv", b.dtype, got.dv, exact.dv, rounded.dv, 3.0);
    check_accuracy("sums of dk", b.dtype, got.dk_sums, exact.dk_sums, rounded.dk_sums, 3.0);
    check_accuracy("sums of dv", b.dtype, got.dv_sums, exact.dv_sums, rounded.dv_sums, 3.0);
}

/* Returns the greatest gap between two results, relative to the greatest number. */
static double gap_of(const std::vector<double> &x, const std::vector<double> &y) {
    double gap = x.size() == y.size() ? 0.0 : 1.0, size = 0.0;
    for (size_t i = 0; i < x.size() && i < y.size(); i++) {
        if (!(std::fabs(x[i] - y[i]) <= gap)) gap = std::fabs(x[i] - y[i]);
        size = std::fmax(size, std::fabs(y[i]));
    }
    return size > 0.0 ? gap / size : gap;
}

static void check_chunks(batch b, const std::vector<int> &sizes, const std::vector<int> &others, uint64_t seed) {
    int length = 0;
    for (int size : sizes) length += size;
    b.lengths = {length};
    b.lengths.insert(b.lengths.end(), others.begin(), others.end());
    b.make(seed);
    harness_note("%s, dtype %d, heads %d/%d of %d, align %d%s%s%s, %d chunks", cf_attention_path_name(b.path),
                 (int)b.dtype, b.n_heads, b.n_kv_heads, b.size, b.align, b.replay ? ", replay" : "",
                 b.add ? ", add" : "", b.deterministic ? ", deterministic" : "", (int)sizes.size());
    batch_results exact, rounded, chunked, whole;
    {
        chunked_batch run(b, sizes);
        if (!run.run(&chunked)) return;
    }
    {
        chunked_batch run(b, {length});
        if (!run.run(&whole)) return;
    }
    check_turned("q", b, b.q, whole.q, b.n_heads);
    check_turned("k", b, b.k, whole.k, b.n_kv_heads);
    CHECK(chunked.q == whole.q);
    CHECK(chunked.k == whole.k);
    reference_results(b, whole, &exact, &rounded);
    check_results(b, chunked, exact, rounded);
    check_results(b, whole, exact, rounded);
    if (b.path != CF_ATTENTION_MMA) return;
    /* A row meets its keys in the same tiles and order, however the sequence is split, so the forward's bits are the
       same. The gradients' sums have the same hundreds of terms in another order, which changes only fp32 rounding. */
    CHECK(chunked.out == whole.out);
    CHECK(chunked.lse == whole.lse);
    CHECK(gap_of(chunked.dk_sums, whole.dk_sums) <= 0x1p-18);
    CHECK(gap_of(chunked.dv_sums, whole.dv_sums) <= 0x1p-18);
}

/* Chunk sizes around tiles (64 and 128 rows), primes, and one token. */
TEST(chunks_bf16) {
    batch b;
    check_chunks(b, {61, 63, 1, 64, 65, 37}, {}, 1);
    b.replay = true;
    b.add = true;
    b.deterministic = true;
    check_chunks(b, {37, 64, 1, 127, 31}, {}, 2);
}

TEST(chunks_fp16) {
    batch b;
    b.dtype = CF_DTYPE_FP16;
    b.n_heads = 4;
    b.n_kv_heads = 2;
    b.rope.interleaved = true;
    b.rope.rotated = 32;
    b.replay = true;
    check_chunks(b, {1, 63, 33, 65, 2}, {}, 3);
}

/* The last chunk has whole sequences as well, and every slice starts at a multiple of 16. All rows between that may
   contain anything are NaN. */
TEST(chunks_hybrid_padded) {
    for (int add = harness_rounds(0, 1); add < 2; add++) {
        batch b;
        b.n_heads = 3;
        b.align = 16;
        b.add = add != 0;
        b.replay = add == 0;
        check_chunks(b, {64, 32, 16, 48, 29}, {7, 1, 33, 16}, 4);
    }
}

TEST(chunks_head_128) {
    batch b;
    b.size = 128;
    b.rope.base = 1000000.0;
    check_chunks(b, {64, 1, 63, 65, 19}, {13}, 5);
}

TEST(chunks_unfused) {
    batch b;
    b.path = CF_ATTENTION_UNFUSED;
    b.n_heads = 4;
    b.n_kv_heads = 2;
    for (int i = 0; i < 3; i += harness_rounds(1, 2)) {
        b.dtype = (cf_dtype)(CF_DTYPE_BF16 + i);
        b.size = i == 1 ? 40 : 64;
        b.replay = i != 1;
        b.add = i == 0;
        b.align = i == 2 ? 8 : 1;
        if (i == 2)
            check_chunks(b, {40, 16, 8, 56, 21}, {11, 9}, 6);
        else
            check_chunks(b, {41, 17, 1, 64, 23}, {}, 7);
    }
}

/* ---- far addresses ---- */

#ifdef CHUNKFLOW_CUDA_EMULATION
/* Rows 2^30 elements apart, and planes so far apart that CUDA refuses to copy them in one call. */
TEST(rows_past_32_bits) {
    const int64_t far_row = (int64_t)1 << 30;
    const int rows = 5, size = 64;
    append_case c;
    rotary r;
    for (int i = 0; i < rows; i++) c.positions.push_back(i == 1 ? -1 : i * 7);
    const rotary_table table(r, size, 1000);
    const int_array positions(c.positions);
    harness_rng rng = {1};
    array qkv(CF_DTYPE_BF16, rows, 4, size), near_k(CF_DTYPE_BF16, rows, 1, size), near_v(CF_DTYPE_BF16, rows, 1, size);
    fill_normal(&qkv, &rng);
    array q_out(CF_DTYPE_BF16, rows, 2, size);
    cf_append a = describe(c, table, positions);
    a.q = qkv.tensor(), a.k = qkv.tensor(0, 2), a.v = qkv.tensor(0, 3);
    a.q_out = q_out.dense(), a.k_out = near_k.dense(), a.v_out = near_v.dense();
    CHECK_INT(cf_append_forward(&a, nullptr, nullptr), CF_OK);
    unsigned char *far = (unsigned char *)cuda_emu_sparse_malloc((size_t)(rows * far_row * 2));
    if (!far) SKIP("no address space for sparse arrays");
    a.k_out = {far, far_row, 0};
    start_clean();
    CHECK_INT(cf_append_forward(&a, nullptr, nullptr), CF_OK);
    CHECK_STR(cuda_emu_first_fault(), "");
    near_k.download();
    for (int i = 0; i < rows; i++)
        if (i != 1)
            CHECK(memcmp(far + (size_t)(i * far_row) * 2, &near_k.host[near_k.at(i, 0, 0)], (size_t)size * 2) == 0);
    cudaFree(far);
}

/* Planes of host memory so far apart that CUDA refuses to copy them in one call. A block of the prefix is loaded, and
   the chunk's own rows are sent out. */
TEST(planes_past_the_pitch) {
    const int64_t rows = (int64_t)1 << 26, own = 4, prefix = rows - own; /* planes of 8 GiB */
    cf_state s = state_of(nullptr, 2, 1, 64, CF_DTYPE_BF16, rows);
    cf_state_stream_desc d = {};
    cf_state_stream *stream = nullptr;
    cf_state_pass pass = {};
    cf_error error = {};
    unsigned char *memory = (unsigned char *)cuda_emu_sparse_malloc((size_t)4 << 33, true);
    if (!memory) SKIP("no address space for sparse arrays");
    s.data = memory;
    for (int64_t plane = 0; plane < 4; plane++)
        for (int64_t i = 0; i < own * 128; i++)
            memory[(plane * rows + prefix - own) * 128 + i] = (unsigned char)(plane * 50 + i % 47 + 1);
    array kv(CF_DTYPE_BF16, (int)own, 2, 64);
    harness_rng rng = {1};
    fill_normal(&kv, &rng);
    d.state = s;
    d.block_rows = own, d.n_slots = CF_STATE_SLOTS;
    CHECK(cudaMalloc(&d.ring, CF_STATE_SLOTS * 2 * (size_t)own * 128) == cudaSuccess);
    CHECK(cudaStreamCreate(&d.in) == cudaSuccess && cudaStreamCreate(&d.out) == cudaSuccess);
    CHECK_INT(cf_state_stream_create(&d, &stream, &error), CF_OK);
    pass.state = s, pass.prefix = prefix, pass.own = own, pass.window = own + 1;
    start_clean();
    CHECK_INT(cf_state_stream_begin(stream, &pass, &error), CF_OK);
    for (int64_t layer = 0; layer < 2; layer++) {
        cf_state_block block = {};
        const cf_tensor k = kv.tensor(0, 0), v = kv.tensor(0, 1);
        CHECK_INT(cf_state_stream_next(stream, nullptr, &block, &error), CF_OK);
        CHECK(block.first_row == prefix - own && block.n_rows == own);
        CHECK(cudaDeviceSynchronize() == cudaSuccess);
        const void *got[] = {cf_state_k(&block.state, 0, 0).data, cf_state_v(&block.state, 0, 0).data};
        for (int64_t i = 0; i < 2; i++)
            CHECK(memcmp(got[i], memory + ((2 * layer + i) * rows + prefix - own) * 128, (size_t)own * 128) == 0);
        CHECK_INT(cf_state_stream_next(stream, nullptr, &block, &error), CF_OK);
        CHECK_INT(block.n_rows, 0);
        CHECK_INT(cf_state_stream_append(stream, nullptr, layer, &k, &v, &error), CF_OK);
    }
    CHECK_INT(cf_state_stream_end(stream, nullptr, &error), CF_OK);
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    CHECK_STR(cuda_emu_first_fault(), "");
    for (int64_t plane = 0; plane < 4; plane++)
        for (int64_t row = 0; row < own; row++)
            CHECK(memcmp(memory + (plane * rows + prefix + row) * 128, &kv.host[kv.at((int)row, (int)(plane % 2), 0)],
                         128) == 0);
    cf_state_stream_free(stream);
    cudaStreamDestroy(d.in);
    cudaStreamDestroy(d.out);
    cudaFree(d.ring);
    cudaFreeHost(memory);
}
#endif

/* ---- gradients of another library ---- */

/* Checks slices without rows, slices with rows between them in more runs than one launch takes, and adjacent slices. */
static void check_added(cf_dtype dtype, int heads, int size, int overwrite) {
    std::vector<int32_t> lengths, starts, ends = {0};
    int32_t rows = 0;
    for (int i = 0; i < 50; i++) {
        lengths.push_back(i % 7 * (i % 3));
        starts.push_back(rows += i % 2);
        ends.push_back(ends.back() + lengths.back());
        rows += lengths.back();
    }
    cf_attention_desc d;
    cf_error error;
    memset(&d, 0, sizeof d);
    memset(&error, 0, sizeof error);
    d.n_heads = d.n_kv_heads = heads, d.head_size = size, d.dtype = dtype, d.arch = 80;
    d.n_slices = 50, d.cu_seqlens_q = d.cu_seqlens_k = ends.data(), d.starts_k = starts.data();
    d.path = CF_ATTENTION_UNFUSED;
    size_t bytes = 0;
    if (!call_ok(cf_attention_size(&d, &bytes, &error), error)) return;
    std::vector<uint64_t> memory(bytes / 8 + 2);
    const cf_attention *attention = nullptr;
    if (!call_ok(cf_attention_prepare(&d, memory.data(), bytes, &attention, &error), error)) return;

    harness_rng rng = {(uint64_t)size};
    array from[2] = {{dtype, rows, heads, size, 8, 16}, {dtype, rows, heads, size}};
    array sums[2] = {{CF_DTYPE_FP32, rows, heads, size, 4, 12}, {CF_DTYPE_FP32, rows, heads, size, 8}};
    std::vector<double> wanted[2];
    for (int which = 0; which < 2; which++) {
        for (int s = 0; s < 50; s++)
            for (int i = 0; i < lengths[(size_t)s] * heads * size; i++) {
                const int row = starts[(size_t)s] + i / size / heads, head = i / size % heads;
                const float x = normal(&rng, dtype), sum = normal(&rng, CF_DTYPE_FP32);
                from[which].put(row, head, i % size, x);
                if (!overwrite) sums[which].put(row, head, i % size, sum);
                wanted[which].push_back((float)((overwrite ? 0.0 : (double)sum) + x));
            }
        from[which].upload();
        sums[which].upload();
    }
    cf_attention_tensors tensors;
    memset(&tensors, 0, sizeof tensors);
    const cf_tensor dk = from[0].tensor(), dv = from[1].tensor();
    tensors.dk = sums[0].tensor(), tensors.dv = sums[1].tensor();
    tensors.overwrite = overwrite;
    call_ok(cf_attention_add(attention, &dk, &dv, &tensors, nullptr, &error), error);
    for (int which = 0; which < 2; which++) {
        size_t n = 0;
        from[which].download();
        sums[which].download();
        for (int s = 0; s < 50; s++)
            for (int r = 0; r < lengths[(size_t)s]; r++)
                for (int h = 0; h < heads; h++) {
                    const int row = starts[(size_t)s] + r;
                    for (int c = 0; c < size; c++) CHECK(sums[which].get(row, h, c) == wanted[which][n++]);
                    sums[which].forget(row, h);
                }
        CHECK(from[which].unchanged());
        CHECK(sums[which].unchanged());
    }
    check_faults();
}

TEST(adds_gradients) {
    for (int overwrite = 0; overwrite < 2; overwrite++) {
        check_added(CF_DTYPE_BF16, 3, 72, overwrite);
        check_added(CF_DTYPE_FP16, 1, 8, overwrite);
        check_added(CF_DTYPE_FP32, 2, 256, overwrite);
    }
}

/* ---- what is refused ---- */

#define REFUSED(change, call, result, name)                                                                            \
    do {                                                                                                               \
        x = good;                                                                                                      \
        memset(&error, 0, sizeof error);                                                                               \
        change;                                                                                                        \
        CHECK_INT(call, result);                                                                                       \
        CHECK_INT(error.code, result);                                                                                 \
        CHECK_STR(error.field, name);                                                                                  \
    } while (0)

static void set_bytes(void *member, int value) { memcpy(member, &value, sizeof value); } /* any value, as from C */

/* A state that is not sound has no rows. */
TEST(bad_states) {
    const cf_state good = state_of((void *)(uintptr_t)4096, 2, 2, 64, CF_DTYPE_BF16, 100);
    cf_state x = good;
#define NO_ROWS(change)                                     \
    do {                                                    \
        x = good;                                           \
        change;                                             \
        CHECK(cf_state_k(&x, 0, 0).data == nullptr);        \
    } while (0)
    CHECK(cf_state_k(nullptr, 0, 0).data == nullptr);
    CHECK(cf_state_k(&good, 0, 0).data == good.data);
    NO_ROWS(x.n_layers = -1);
    NO_ROWS(x.n_layers = INT64_MAX);
    NO_ROWS(x.n_layers = INT64_MAX / 2);
    NO_ROWS(x.n_kv_heads = 0);
    NO_ROWS(x.n_kv_heads = INT64_MAX);
    NO_ROWS(x.head_size = 0);
    NO_ROWS((x.head_size = 7, x.n_kv_heads = 1));
    NO_ROWS(set_bytes(&x.dtype, 4));
    NO_ROWS(set_bytes(&x.dtype, -1));
    NO_ROWS(x.rows = -1);
    NO_ROWS(x.rows = INT64_MAX / 4);
    NO_ROWS(x.n_layers = 0); /* a stage of embeddings alone */
#undef NO_ROWS
}

TEST(bad_ropes) {
    cf_rope good, x;
    cf_error error;
    size_t bytes = 777;
    double frequencies[32] = {0};
    memset(&good, 0, sizeof good);
    good.n_positions = 1000;
    std::vector<float> memory(32 * 2 * 64 * 2, 5.0f);
#define SIZE cf_rope_size(&x, 64, &bytes, &error)
#define FILL cf_rope_fill(&x, 64, memory.data(), memory.size() * 4, &error)
    REFUSED((void)0, cf_rope_size(nullptr, 64, &bytes, &error), CF_ERROR_ARGUMENT, "rope");
    REFUSED((void)0, cf_rope_size(&x, 64, nullptr, &error), CF_ERROR_ARGUMENT, "bytes");
    REFUSED((void)0, cf_rope_size(&x, 20, &bytes, &error), CF_ERROR_ARGUMENT, "head_size");
    REFUSED((void)0, cf_rope_size(&x, 264, &bytes, &error), CF_ERROR_ARGUMENT, "head_size");
    REFUSED(x.rotated = 31, SIZE, CF_ERROR_ARGUMENT, "rotated");
    REFUSED(x.rotated = 66, SIZE, CF_ERROR_ARGUMENT, "rotated");
    REFUSED(x.rotated = -2, SIZE, CF_ERROR_ARGUMENT, "rotated");
    REFUSED(x.n_positions = 0, SIZE, CF_ERROR_ARGUMENT, "n_positions");
    REFUSED(x.n_positions = ((int64_t)1 << 31) + 1, SIZE, CF_ERROR_ARGUMENT, "n_positions");
    REFUSED(x.table = (const float *)(uintptr_t)4100, SIZE, CF_ERROR_ARGUMENT, "table");
    REFUSED(x.base = -1.0, FILL, CF_ERROR_ARGUMENT, "base");
    REFUSED(x.base = NAN, FILL, CF_ERROR_ARGUMENT, "base");
    REFUSED(x.base = INFINITY, FILL, CF_ERROR_ARGUMENT, "base");
    REFUSED((frequencies[31] = NAN, x.frequencies = frequencies), FILL, CF_ERROR_ARGUMENT, "frequencies");
    CHECK_INT(error.item, 31);
    REFUSED((void)0, cf_rope_fill(&x, 64, nullptr, 100000, &error), CF_ERROR_ARGUMENT, "memory");
    REFUSED((void)0, cf_rope_fill(&x, 64, (char *)memory.data() + 2, 100000, &error), CF_ERROR_ARGUMENT, "memory");
    REFUSED((void)0, cf_rope_fill(&x, 64, memory.data(), 64 * 64 * 4 - 1, &error), CF_ERROR_SPACE, "bytes");
    CHECK_INT(error.wanted, 64 * 64 * 4);
#undef SIZE
#undef FILL
    CHECK_INT(bytes, 777);
    for (float one : memory) CHECK(one == 5.0f);
    x = good;
    x.n_positions = (int64_t)1 << 31; /* every value of an int32_t */
    CHECK_INT(cf_rope_size(&x, 64, &bytes, nullptr), CF_OK);
    CHECK_INT(bytes, ((1 << 16) + (1 << 15)) * 64 * 4);
}

TEST(bad_appends) {
    cf_append good, x;
    cf_error error;
    void *somewhere = (void *)(uintptr_t)4096, *odd = (void *)(uintptr_t)4104;
    memset(&good, 0, sizeof good);
    good.rows = 10;
    good.n_heads = 4;
    good.n_kv_heads = 2;
    good.head_size = 64;
    good.positions = (const int32_t *)somewhere;
    good.rope.n_positions = 100;
    good.rope.table = (const float *)somewhere;
    for (cf_tensor *one : {&good.q, &good.k, &good.v, &good.q_out, &good.k_out, &good.v_out}) one->data = somewhere;
    REFUSED((void)0, cf_append_forward(nullptr, nullptr, &error), CF_ERROR_ARGUMENT, "append");
#define BOTH(change, result, name)                                                                                     \
    do {                                                                                                               \
        REFUSED(change, cf_append_forward(&x, nullptr, &error), result, name);                                         \
        REFUSED(change, cf_append_backward(&x, nullptr, &error), result, name);                                        \
    } while (0)
    BOTH(x.rows = -1, CF_ERROR_ARGUMENT, "rows");
    BOTH(x.rows = ((int64_t)1 << 30) + 1, CF_ERROR_LIMIT, "rows");
    BOTH(x.n_heads = 0, CF_ERROR_ARGUMENT, "n_heads");
    BOTH(x.n_heads = INT64_MAX, CF_ERROR_ARGUMENT, "n_heads");
    BOTH(x.n_kv_heads = 3, CF_ERROR_ARGUMENT, "n_kv_heads");
    BOTH(x.head_size = 60, CF_ERROR_ARGUMENT, "head_size");
    BOTH(x.head_size = 264, CF_ERROR_ARGUMENT, "head_size");
    BOTH(set_bytes(&x.dtype, 9), CF_ERROR_ARGUMENT, "dtype");
    BOTH(x.positions = nullptr, CF_ERROR_ARGUMENT, "positions");
    BOTH(x.positions = (const int32_t *)(uintptr_t)4097, CF_ERROR_ARGUMENT, "positions");
    BOTH(x.rope.rotated = 3, CF_ERROR_ARGUMENT, "rotated");
    BOTH(x.rope.rotated = 65, CF_ERROR_ARGUMENT, "rotated");
    BOTH(x.rope.rotated = 128, CF_ERROR_ARGUMENT, "rotated");
    BOTH(x.rope.n_positions = -5, CF_ERROR_ARGUMENT, "n_positions");
    BOTH(x.rope.table = (const float *)odd, CF_ERROR_ARGUMENT, "table");
    BOTH(x.q.data = nullptr, CF_ERROR_ARGUMENT, "q");
    BOTH(x.k.data = odd, CF_ERROR_ARGUMENT, "k");
    BOTH(x.v.row_stride = -64, CF_ERROR_ARGUMENT, "v");
    BOTH(x.q_out.head_stride = 68, CF_ERROR_ARGUMENT, "q_out");
    BOTH(x.k_out.row_stride = INT64_MAX / 8 * 8, CF_ERROR_ARGUMENT, "k_out");
    BOTH((x.rows = (int64_t)1 << 30, x.v_out.row_stride = (int64_t)1 << 40), CF_ERROR_OVERFLOW, "v_out");
    /* Addresses and strides that no 16-byte access could use, one at a time, in every array. */
    cf_tensor cf_append::*const members[] = {&cf_append::q,     &cf_append::k,     &cf_append::v,
                                             &cf_append::q_out, &cf_append::k_out, &cf_append::v_out};
    const char *const names[] = {"q", "k", "v", "q_out", "k_out", "v_out"};
    for (int i = 0; i < 6; i++) {
        BOTH((x.*members[i]).data = odd, CF_ERROR_ARGUMENT, names[i]);
        BOTH((x.*members[i]).row_stride = 1026, CF_ERROR_ARGUMENT, names[i]);
        BOTH((x.*members[i]).head_stride = 66, CF_ERROR_ARGUMENT, names[i]);
    }
    REFUSED(x.out.data = odd, cf_append_forward(&x, nullptr, &error), CF_ERROR_ARGUMENT, "out");
    /* Gradients are fp32, so a stride of 4 numbers is enough for them, but not for 16-bit rows. */
    REFUSED(x.k.row_stride = 132, cf_append_forward(&x, nullptr, &error), CF_ERROR_ARGUMENT, "k");
#undef BOTH
    x = good;
    x.rows = 0;
    x.positions = nullptr;
    for (cf_tensor *one : {&x.q, &x.k, &x.v, &x.q_out, &x.k_out, &x.v_out}) one->data = nullptr;
    CHECK_INT(cf_append_forward(&x, nullptr, nullptr), CF_OK);
    CHECK_INT(cf_append_backward(&x, nullptr, nullptr), CF_OK);
}

#ifdef CHUNKFLOW_CUDA_EMULATION
#define EMULATED_CASES CASE(rows_past_32_bits), CASE(planes_past_the_pitch),
#else
#define EMULATED_CASES
#endif

SUITE(state, EMULATED_CASES CASE(bad_states), CASE(bad_ropes), CASE(bad_appends),
      CASE(bytes_are_the_models), CASE(planes_of_layers),
      CASE(appends), CASE(appends_any_number_of_pairs),
      CASE(appends_without_a_table), CASE(appends_many_rows), CASE(adds_gradients),
      CASE(backward_is_the_transpose), CASE(rope_accuracy),
      CASE(positions_past_the_table), CASE(chunks_bf16), CASE(chunks_fp16), CASE(chunks_hybrid_padded),
      CASE(chunks_head_128), CASE(chunks_unfused));
