#include "device.h"

#include "../harness.h"

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdlib>
#include <cstring>

/* ---- the host's view of 16-bit numbers, rounded as in the reference ---- */

uint16_t to_bits(cf_dtype dtype, float x) {
    uint32_t wide;
    if (dtype == CF_DTYPE_BF16) {
        memcpy(&wide, &x, 4);
        return (uint16_t)(wide >> 16);
    }
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const float size = std::fabs(x);
    int exponent;
    if (!std::isfinite(x)) return (uint16_t)(sign | (std::isnan(x) ? 0x7E00 : 0x7C00));
    if (size < 0x1p-14f) return (uint16_t)(sign | (uint16_t)(size * 0x1p24f));
    const float fraction = std::frexp(size, &exponent); /* 0.5 .. 1 */
    return (uint16_t)(sign | (uint16_t)((exponent + 14) << 10) | (uint16_t)((fraction * 2.0f - 1.0f) * 1024.0f));
}

float from_bits(cf_dtype dtype, uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float x;
    if (dtype == CF_DTYPE_BF16) {
        memcpy(&x, &wide, 4);
        return x;
    }
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    x = exponent == 31
            ? (fraction ? NAN : INFINITY)
            : (exponent ? std::ldexp((float)(1024 + fraction), exponent - 25) : std::ldexp((float)fraction, -24));
    return bits & 0x8000 ? -x : x;
}

/* ---- one array on the device ---- */

struct device_array {
    unsigned char *data = nullptr;
    size_t bytes = 0;
    int heads = 0, head_size = 0, rows = 0;
    cf_dtype dtype = CF_DTYPE_BF16;
    int64_t row = 0, head = 0;
    bool default_strides = false;

    size_t number() const { return dtype == CF_DTYPE_FP32 ? 4 : 2; }
    size_t offset(int r, int h, int c) const { return ((size_t)(r * row + h * head) + (size_t)c) * number(); }

    bool make(int rows_, int heads_, int head_size_, cf_dtype dtype_, bool strided) {
        rows = rows_, heads = heads_, head_size = head_size_, dtype = dtype_;
        default_strides = !strided;
        head = strided ? head_size + 8 : head_size;
        row = strided ? (head * heads + 24) : head * heads;
        bytes = (size_t)(row * rows) * number();
        if (!CHECK(cudaMalloc((void **)&data, bytes) == cudaSuccess)) return false;
        return CHECK(cudaMemset(data, 0xFF, bytes) == cudaSuccess); /* NaN everywhere */
    }

    cf_tensor tensor() const {
        cf_tensor t = {data, default_strides ? 0 : row, default_strides ? 0 : head};
        return t;
    }
};

/* Visits every row of every slice on one side of the problem. */
template <typename F> static void each_row(const host_problem &p, bool key_side, F visit) {
    for (int s = 0; s < p.n_slices(); s++) {
        const int n = key_side ? p.keys(s) : p.queries(s), start = key_side ? p.start_k(s) : p.start_q(s);
        for (int i = 0; i < n; i++) visit(start + i);
    }
}

static void upload(const host_problem &p, const device_array &to, const std::vector<float> &from, bool key_side) {
    std::vector<unsigned char> bytes(to.bytes, 0xFF);
    each_row(p, key_side, [&](int row) {
        for (int h = 0; h < to.heads; h++)
            for (int c = 0; c < to.head_size; c++) {
                const float x = from[((size_t)row * (size_t)to.heads + (size_t)h) * (size_t)to.head_size + (size_t)c];
                const uint16_t bits = to.dtype == CF_DTYPE_FP32 ? (uint16_t)0 : to_bits(to.dtype, x);
                if (to.dtype == CF_DTYPE_FP32) memcpy(&bytes[to.offset(row, h, c)], &x, 4);
                else memcpy(&bytes[to.offset(row, h, c)], &bits, 2);
            }
    });
    CHECK(cudaMemcpy(to.data, bytes.data(), to.bytes, cudaMemcpyHostToDevice) == cudaSuccess);
}

/* Copies an array back, and checks that only the rows of slices were written. */
static std::vector<double> download(const host_problem &p, const device_array &from, bool key_side, const char *what,
                                    std::vector<unsigned char> *all_bits) {
    std::vector<unsigned char> bytes(from.bytes);
    std::vector<double> to((size_t)from.rows * (size_t)from.heads * (size_t)from.head_size, 0.0);
    CHECK(cudaMemcpy(bytes.data(), from.data, from.bytes, cudaMemcpyDeviceToHost) == cudaSuccess);
    all_bits->insert(all_bits->end(), bytes.begin(), bytes.end());
    each_row(p, key_side, [&](int row) {
        for (int h = 0; h < from.heads; h++)
            for (int c = 0; c < from.head_size; c++) {
                float x;
                uint16_t bits;
                unsigned char *at = &bytes[from.offset(row, h, c)];
                memcpy(&x, at, from.number());
                memcpy(&bits, at, 2);
                if (from.dtype != CF_DTYPE_FP32) x = from_bits(from.dtype, bits);
                to[((size_t)row * (size_t)from.heads + (size_t)h) * (size_t)from.head_size + (size_t)c] = x;
                memset(at, 0xFF, from.number());
            }
    });
    if (!harness_is_poison(bytes.data(), bytes.size())) FAIL("%s was written outside the rows of its slices", what);
    return to;
}

/* Memory on the device, freed with its owner. */
struct device_memory {
    std::vector<void *> blocks;
    ~device_memory() {
        for (void *block : blocks) cudaFree(block);
    }
};

void note_problem(const host_problem &p, const run_options &o) {
    char text[300];
    int n = snprintf(text, sizeof text,
                     "%s dtype %d, heads %d/%d of %d, %s, window %d, softcap %g%s%s%s, arch %d x %d, slices",
                     cf_attention_path_name(o.path), (int)p.dtype, p.n_heads, p.n_kv_heads, p.head_size,
                     p.full ? "full" : "causal", p.window, p.softcap, o.deterministic ? ", deterministic" : "",
                     o.overwrite ? ", overwrite" : "", o.strided ? ", strided" : "", o.arch, o.processors);
    for (int s = 0; s < p.n_slices() && n < 270; s++)
        n += snprintf(text + n, sizeof text - (size_t)n, " %dx%d", p.queries(s), p.keys(s));
    harness_note("%s", text);
}

cf_attention_path last_path() {
#ifdef CHUNKFLOW_CUDA_EMULATION
    return CF_ATTENTION_WGMMA;
#else
    int device = 0, major = 0, minor = 0;
    CHECK(cudaGetDevice(&device) == cudaSuccess);
    CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess);
    CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess);
    return major == 9 && minor == 0 ? CF_ATTENTION_WGMMA : CF_ATTENTION_MMA;
#endif
}

int largest_mma_head() {
#ifdef CHUNKFLOW_CUDA_EMULATION
    return 256;
#else
    int device = 0, bytes = 0;
    CHECK(cudaGetDevice(&device) == cudaSuccess);
    CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess);
    return bytes >= 160 << 10 ? 256 : 128;
#endif
}

/* CHUNKFLOW_TEST_WGMMA in the environment replaces one fused path by the other. Tests that count a path's tiles and
   instructions, or compare its bits, name their path and are not affected. */
static bool asks_for_wgmma(const run_options &o) {
    return o.path == CF_ATTENTION_MMA && !o.by_name && getenv("CHUNKFLOW_TEST_WGMMA") != NULL;
}

static cf_attention_desc describe(const host_problem &p, const run_options &o) {
    cf_attention_desc d;
    memset(&d, 0, sizeof d);
    d.n_heads = p.n_heads;
    d.n_kv_heads = p.n_kv_heads;
    d.head_size = p.head_size;
    d.n_slices = p.n_slices();
    d.cu_seqlens_q = p.cu_q.data();
    d.cu_seqlens_k = p.cu_k.data();
    d.starts_q = p.starts_q.empty() ? nullptr : p.starts_q.data();
    d.starts_k = p.starts_k.empty() ? nullptr : p.starts_k.data();
    d.dtype = p.dtype;
    d.full = p.full;
    d.window = p.window;
    d.scale = p.scale;
    d.softcap = p.softcap;
    d.deterministic = o.deterministic;
    d.path = asks_for_wgmma(o) ? CF_ATTENTION_WGMMA : o.path;
    d.n_processors = o.processors;
    d.cache_bytes = o.cache;
#ifdef CHUNKFLOW_CUDA_EMULATION
    d.arch = d.path == CF_ATTENTION_WGMMA ? 90 : o.arch;
#else
    d.arch = o.arch == 86 && d.path == CF_ATTENTION_MMA ? 86 : 0; /* a device can run tiles laid out for one with less
                                                                     memory */
#endif
    return d;
}

bool call_ok(cf_result code, const cf_error &error) {
    if (code == CF_OK) return true;
    FAIL("%s: %s", cf_result_name(code), error.text);
    return false;
}

bool run_on_device(const host_problem &p, const host_inputs &in, const run_options &o, device_results *to) {
    const int rows_q = p.rows_q() + o.spare_rows, rows_k = p.rows_k() + o.spare_rows;
    cf_attention_desc desc = describe(p, o);
    cf_error error;
    size_t bytes = 0;
    const cf_attention *a = nullptr;
    note_problem(p, o);
#ifdef CHUNKFLOW_CUDA_EMULATION
    cuda_emu_reset();
    cuda_emu_set_arch((int)desc.arch);
#endif
    memset(&error, 0, sizeof error);
    if (!call_ok(cf_attention_size(&desc, &bytes, &error), error)) return false;
    std::vector<uint64_t> memory(bytes / 8 + 3);
    void *place = (void *)(((uintptr_t)memory.data() + 15) / 16 * 16);
    if (!call_ok(cf_attention_prepare(&desc, place, bytes, &a, &error), error)) return false;
    to->attention = *a;

    device_memory owner;
    device_array q, k, v, out, dout, dq, dk, dv;
    if (!q.make(rows_q, p.n_heads, p.head_size, p.dtype, o.strided) ||
        !k.make(rows_k, p.n_kv_heads, p.head_size, p.dtype, o.strided) ||
        !v.make(rows_k, p.n_kv_heads, p.head_size, p.dtype, o.strided) ||
        !out.make(rows_q, p.n_heads, p.head_size, p.dtype, o.strided) ||
        !dout.make(rows_q, p.n_heads, p.head_size, p.dtype, o.strided) ||
        !dq.make(rows_q, p.n_heads, p.head_size, p.dtype, o.strided) ||
        !dk.make(rows_k, p.n_kv_heads, p.head_size, CF_DTYPE_FP32, o.strided) ||
        !dv.make(rows_k, p.n_kv_heads, p.head_size, CF_DTYPE_FP32, o.strided))
        return false;
    for (device_array *one : {&q, &k, &v, &out, &dout, &dq, &dk, &dv}) owner.blocks.push_back(one->data);
    upload(p, q, in.q, false);
    upload(p, k, in.k, true);
    upload(p, v, in.v, true);
    upload(p, dout, in.dout, false);
    if (!o.overwrite) {
        to->initial_dk.assign(in.k.size(), 0.0f);
        to->initial_dv.assign(in.k.size(), 0.0f);
        each_row(p, true, [&](int row) {
            const size_t per_row = (size_t)(p.n_kv_heads * p.head_size);
            for (size_t i = (size_t)row * per_row; i < ((size_t)row + 1) * per_row; i++) {
                to->initial_dk[i] = o.initial_dk ? o.initial_dk[i] : 0.25f * (float)(i % 7) - 0.5f;
                to->initial_dv[i] = o.initial_dv ? o.initial_dv[i] : 0.5f - 0.125f * (float)(i % 5);
            }
        });
        upload(p, dk, to->initial_dk, true);
        upload(p, dv, to->initial_dv, true);
    }

    cf_attention_tensors x;
    cudaStream_t stream = nullptr;
    cublasHandle_t cublas = nullptr;
    const size_t room = o.room ? 2 : 1, lse_stride = (size_t)rows_q + 2;
    const size_t lse_bytes = room * lse_stride * (size_t)p.n_heads * 4;
    void *tiles = nullptr, *workspace = nullptr, *lse = nullptr, *sinks = nullptr, *dsinks = nullptr;
    const size_t sinks_bytes = in.sinks.size() * sizeof(float);
    std::vector<float> initial_dsinks(in.sinks.size(), 0.5f);
    const size_t workspace_bytes = a->forward_bytes > a->backward_bytes ? a->forward_bytes : a->backward_bytes;
    memset(&x, 0, sizeof x);
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    CHECK(cudaMalloc(&tiles, a->tiles_bytes + 1) == cudaSuccess);
    CHECK(cudaMalloc(&workspace, room * workspace_bytes + 1) == cudaSuccess);
    CHECK(cudaMalloc(&lse, lse_bytes) == cudaSuccess);
    CHECK(cudaMalloc(&sinks, sinks_bytes + 4) == cudaSuccess);
    CHECK(cudaMalloc(&dsinks, sinks_bytes + 4) == cudaSuccess);
    for (void *block : {tiles, workspace, lse, sinks, dsinks}) owner.blocks.push_back(block);
    CHECK(cudaMemcpy(sinks, in.sinks.data(), sinks_bytes, cudaMemcpyHostToDevice) == cudaSuccess);
    CHECK(cudaMemcpy(dsinks, initial_dsinks.data(), sinks_bytes, cudaMemcpyHostToDevice) == cudaSuccess);
    CHECK(cudaMemset(workspace, 0xFF, room * workspace_bytes + 1) == cudaSuccess);
    CHECK(cudaMemset(lse, 0xFF, lse_bytes) == cudaSuccess);
    CHECK(cudaMemcpy(tiles, a->tiles, a->tiles_bytes, cudaMemcpyHostToDevice) == cudaSuccess);
    if (a->path == CF_ATTENTION_UNFUSED) CHECK(cublasCreate(&cublas) == CUBLAS_STATUS_SUCCESS);
    x.q = q.tensor(), x.k = k.tensor(), x.v = v.tensor(), x.out = out.tensor();
    x.dout = dout.tensor(), x.dq = dq.tensor(), x.dk = dk.tensor(), x.dv = dv.tensor();
    x.lse = (float *)lse;
    x.lse_stride = (int64_t)lse_stride;
    x.overwrite = o.overwrite;
    x.tiles = tiles;
    x.workspace = workspace;
    x.workspace_bytes = workspace_bytes;
    x.cublas = cublas;
    x.sinks = in.sinks.empty() ? nullptr : (const float *)sinks;
    x.dsinks = in.sinks.empty() ? nullptr : (float *)dsinks;
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    bool ok = call_ok(cf_attention_forward(a, &x, stream, &error), error);
    /* The backward must not depend on what the forward left in the workspace. */
    if (ok && o.backward) {
        CHECK(cudaMemsetAsync(workspace, 0xFF, workspace_bytes + 1, stream) == cudaSuccess);
        ok = call_ok(cf_attention_backward(a, &x, stream, &error), error);
    }
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(cudaGetLastError() == cudaSuccess);
    if (cublas) cublasDestroy(cublas);
    cudaStreamDestroy(stream);
    if (!ok) return false;

    to->bits.clear();
    to->values.out = download(p, out, false, "out", &to->bits);
    if (o.backward) {
        to->values.dq = download(p, dq, false, "dq", &to->bits);
        to->values.dk = download(p, dk, true, "dk", &to->bits);
        to->values.dv = download(p, dv, true, "dv", &to->bits);
    }
    std::vector<float> of_sinks(in.sinks.size());
    CHECK(cudaMemcpy(of_sinks.data(), dsinks, sinks_bytes, cudaMemcpyDeviceToHost) == cudaSuccess);
    to->values.dsinks.clear();
    for (const float sum : of_sinks) to->values.dsinks.push_back((double)sum - 0.5);
    to->bits.insert(to->bits.end(), (unsigned char *)of_sinks.data(), (unsigned char *)of_sinks.data() + sinks_bytes);
    std::vector<float> sums(lse_bytes / 4);
    CHECK(cudaMemcpy(sums.data(), lse, lse_bytes, cudaMemcpyDeviceToHost) == cudaSuccess);
    to->values.lse.assign((size_t)p.n_heads * (size_t)p.rows_q(), 0.0);
    each_row(p, false, [&](int row) {
        for (int h = 0; h < p.n_heads; h++) {
            float *from = &sums[(size_t)h * lse_stride + (size_t)row];
            to->values.lse[(size_t)h * (size_t)p.rows_q() + (size_t)row] = *from;
            memset(from, 0xFF, 4);
        }
    });
    if (!harness_is_poison(sums.data(), lse_bytes)) FAIL("lse was written outside the rows of the slices");
    std::vector<unsigned char> past((room - 1) * workspace_bytes + 1);
    CHECK(cudaMemcpy(past.data(), (unsigned char *)workspace + workspace_bytes, past.size(), cudaMemcpyDeviceToHost) ==
          cudaSuccess);
    if (!harness_is_poison(past.data(), past.size())) FAIL("memory past the workspace was written");
#ifdef CHUNKFLOW_CUDA_EMULATION
    if (cuda_emu_faults() > 0) FAIL("%lld faults; the first: %s", (long long)cuda_emu_faults(), cuda_emu_first_fault());
    return cuda_emu_faults() == 0;
#else
    return true;
#endif
}

host_inputs random_inputs(const host_problem &p, uint64_t seed) {
    harness_rng rng = {seed};
    host_inputs in;
    auto fill = [&](std::vector<float> &array, bool key_side, int heads) {
        const int rows = key_side ? p.rows_k() : p.rows_q();
        array.assign((size_t)(rows + 16) * (size_t)heads * (size_t)p.head_size, 0.0f);
        each_row(p, key_side, [&](int row) {
            for (int i = 0; i < heads * p.head_size; i++) {
                double sum = 0.0; /* nearly normal */
                for (int j = 0; j < 4; j++) sum += harness_unit(&rng) - 0.5;
                array[(size_t)row * (size_t)(heads * p.head_size) + (size_t)i] = round_to(p.dtype, (float)(1.73 * sum));
            }
        });
    };
    fill(in.q, false, p.n_heads);
    fill(in.k, true, p.n_kv_heads);
    fill(in.v, true, p.n_kv_heads);
    fill(in.dout, false, p.n_heads);
    return in;
}

bool check_accuracy(const char *what, cf_dtype dtype, const std::vector<double> &got, const std::vector<double> &exact,
                    const std::vector<double> &rounded, double factor) {
    double most = 0.0, most_rounded = 0.0, squares = 0.0, squares_rounded = 0.0, size = 0.0, size_squares = 0.0;
    const double half_unit = dtype == CF_DTYPE_FP32 ? 0x1p-22 : dtype == CF_DTYPE_FP16 ? 0x1p-12 : 0x1p-9;
    const size_t n = exact.size() < got.size() ? exact.size() : got.size();
    for (size_t i = 0; i < n; i++) {
        if (std::isinf(exact[i]) && got[i] == exact[i]) continue;
        if (!std::isfinite(got[i]) || !std::isfinite(exact[i])) {
            FAIL("%s: item %d is %g, wanted %g", what, (int)i, got[i], exact[i]);
            return false;
        }
        const double gap = std::fabs(got[i] - exact[i]), gap_rounded = std::fabs(rounded[i] - exact[i]);
        most = gap > most ? gap : most;
        most_rounded = gap_rounded > most_rounded ? gap_rounded : most_rounded;
        size = std::fabs(exact[i]) > size ? std::fabs(exact[i]) : size;
        squares += gap * gap;
        squares_rounded += gap_rounded * gap_rounded;
        size_squares += exact[i] * exact[i];
    }
    const double limit = factor * most_rounded + half_unit * size;
    const double rms = std::sqrt(squares / (double)(n + !n));
    const double rms_limit = factor * std::sqrt(squares_rounded / (double)(n + !n)) +
                             0.5 * half_unit * std::sqrt(size_squares / (double)(n + !n));
    /* If the exact answer is 0 (the slope of a row with one key), sums in fp32 of numbers near 1 leave rounding
       noise. */
    const double noise = dtype == CF_DTYPE_FP32 ? 1e-6 : 1e-5;
    if (most <= limit + noise && rms <= rms_limit + 0.1 * noise)
        return CHECK(n == got.size() || n == exact.size()) != 0;
    FAIL("%s: greatest error %.3g (limit %.3g), root mean square %.3g (limit %.3g)", what, most, limit, rms, rms_limit);
    return false;
}

bool check_inputs(const host_problem &p, const host_inputs &in, const run_options &o, device_results *to) {
    device_results own, &got = to ? *to : own;
    if (!run_on_device(p, in, o, &got)) return false;
    host_results exact = reference_exact(p, in), rounded = reference_rounded(p, in);
    for (host_results *one : {&exact, &rounded})
        for (size_t i = 0; i < got.initial_dk.size(); i++) {
            one->dk[i] += got.initial_dk[i];
            one->dv[i] += got.initial_dv[i];
        }
    bool ok = check_accuracy("out", p.dtype, got.values.out, exact.out, rounded.out, 2.0);
    ok = check_accuracy("lse", CF_DTYPE_FP32, got.values.lse, exact.lse, rounded.lse, 2.0) && ok;
    if (o.backward) {
        ok = check_accuracy("dq", p.dtype, got.values.dq, exact.dq, rounded.dq, 3.0) && ok;
        ok = check_accuracy("dk", p.dtype, got.values.dk, exact.dk, rounded.dk, 3.0) && ok;
        ok = check_accuracy("dv", p.dtype, got.values.dv, exact.dv, rounded.dv, 3.0) && ok;
        ok = check_accuracy("dsinks", p.dtype, got.values.dsinks, exact.dsinks, rounded.dsinks, 3.0) && ok;
    }
    return ok;
}

bool check_problem(const host_problem &p, const run_options &o, uint64_t seed, device_results *to) {
    return check_inputs(p, random_inputs(p, seed), o, to);
}
