/* Tests replays that take attention's outputs from their forwards against replays that attend: all numbers have the
   same bits. The model is attention alone. Q of a layer is the previous layer's output, K and V come from a table, and
   a layer passes the gradient of its Q to the layer below. Everything else is copies, so no other kernels are needed.
   Cases that count calls, plan failures or use other orders need the emulation; the others also run on a device. */

#include "device.h"

#include "../harness.h"

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

namespace {

const int64_t HEADS = 2, KV_HEADS = 1, LAYERS = 3; /* layers of a stage */

/* ---- a batch, and how its chunks are laid out and run ---- */

struct setting {
    const char *name = "";
    std::vector<int64_t> lengths = {40, 9, 23};
    std::vector<cf_shared_prefix> shared;
    int64_t chunk_size = 16, k = 1, n_stages = 2;
    cf_dtype dtype = CF_DTYPE_FP32;
    cf_attention_path path = CF_ATTENTION_UNFUSED;
    int64_t head_size = 8, window = 0, block_rows = 0;
    double softcap = 0.0;
    bool by_head = false; /* the rows of each head of out are contiguous */
    bool sinks = false;
};

struct batch {
    cf_plan *plan = nullptr;
    cf_schedule *schedule = nullptr;
    std::vector<int64_t> first_row; /* of each chunk, and the end of the last one */

    ~batch() {
        cf_schedule_free(schedule);
        cf_plan_free(plan);
    }
    bool make(const setting &x) {
        cf_pack_desc pack = {};
        cf_schedule_desc order = {};
        cf_error error = {};
        pack.chunk_size = x.chunk_size;
        pack.shared_prefixes = x.shared.empty() ? nullptr : x.shared.data();
        pack.min_shared_prefix = x.shared.empty() ? 0 : 8;
        order.shape.n_stages = x.n_stages;
        order.shape.k = x.k;
        if (!call_ok(cf_pack(x.lengths.data(), (int64_t)x.lengths.size(), &pack, &plan, &error), error)) return false;
        if (!call_ok(cf_schedule_make(plan, &order, &schedule, &error), error)) return false;
        first_row.assign(1, 0);
        for (int64_t i = 0; i < plan->n_chunks; i++) first_row.push_back(first_row.back() + plan->chunks[i].rows);
        return true;
    }
};

/* ---- the model ---- */

struct model {
    const setting &x;
    const batch &b;
    int outputs;
    cf_executor *executor = nullptr;
    cublasHandle_t cublas = nullptr;
    char *table = nullptr, *results = nullptr; /* on the device */
    float *sinks = nullptr;                    /* (2, HEADS) and their gradients */
    int64_t n_replays = 0, calls_of_replays = 0;

    /* what tests change */
    const cf_attention_backend *backend = nullptr;
    int64_t fail_at = -1, n_passes = 0;
    int wrong = 0; /* 1: R finds a number of out off by one unit in 2^20; 2: a number of lse */

    model(const setting &x_, const batch &b_, int outputs_) : x(x_), b(b_), outputs(outputs_) {}
    model(const model &) = delete;
    model &operator=(const model &) = delete;
    ~model() {
        cf_executor_free(executor);
        cudaFree(table);
        cudaFree(results);
        cudaFree(sinks);
        if (cublas) cublasDestroy(cublas);
    }

    int64_t number() const { return x.dtype == CF_DTYPE_FP32 ? 4 : 2; }
    int64_t row() const { return HEADS * x.head_size * number(); }
    int64_t packed() const { return row() + 2 * KV_HEADS * x.head_size * number(); } /* bytes of a row of q, k and v */
    int64_t kept_of_row() const { return packed() + row() + HEADS * 4; } /* bytes, in a layer */
    int64_t n_rows() const { return b.first_row.back(); }

    /* A layer's arrays: q, k and v in packed rows, out, and lse. */
    struct arrays {
        char *qkv, *out, *lse;
    };
    static char *aligned(char *at, int64_t bytes) { return at + (bytes + 255) / 256 * 256; }
    arrays arrays_at(const cf_cuda_step *step, int64_t layer) const {
        const int64_t rows = step->chunk->rows;
        char *at = static_cast<char *>(step->activations != nullptr ? step->activations : step->workspace);
        arrays a = {};
        for (int64_t i = 0; i <= (step->activations != nullptr ? layer : 0); i++) {
            a.qkv = at;
            a.out = aligned(a.qkv, rows * packed());
            a.lse = aligned(a.out, rows * row());
            at = aligned(a.lse, rows * HEADS * 4);
        }
        return a;
    }

    cf_cuda_stage needs() const {
        cf_cuda_stage s = {};
        s.n_layers = LAYERS;
        s.activation_bytes = LAYERS * 3 * 256;
        s.activation_bytes_per_token = LAYERS * kept_of_row();
        s.forward_bytes = 3 * 256;
        s.forward_bytes_per_token = kept_of_row();
        s.backward_bytes_per_token = row();
        return s;
    }

    cf_tensor columns(char *rows, int64_t first, int64_t heads) const {
        (void)heads;
        return {rows + first, packed() / number(), 0};
    }
    cf_tensor out_of(char *rows, int64_t n) const {
        if (!x.by_head) return {rows, 0, 0};
        return {rows, x.head_size, n * x.head_size};
    }
    cf_layer_attention layer_of(const cf_cuda_step *step, int64_t layer) const {
        const arrays a = arrays_at(step, layer);
        const int64_t n = step->chunk->rows, kv = KV_HEADS * x.head_size * number();
        cf_layer_attention l = {};
        l.layer = layer;
        l.q = l.dq = columns(a.qkv, 0, HEADS);
        l.k = l.dk = columns(a.qkv, row(), KV_HEADS);
        l.v = l.dv = columns(a.qkv, row() + kv, KV_HEADS);
        l.out = out_of(a.out, n);
        l.lse = reinterpret_cast<float *>(a.lse);
        l.dout = {step->workspace, 0, 0};
        l.cublas = cublas;
        l.backend = backend;
        l.sinks = x.sinks ? sinks : nullptr;
        l.dsinks = x.sinks ? sinks + HEADS : nullptr;
        return l;
    }

    /* Copies n rows of `width` bytes, `to_stride` and `from_stride` apart. */
    static bool copy(const cf_cuda_step *step, void *to, int64_t to_stride, const void *from, int64_t from_stride,
                     int64_t width, int64_t n) {
        return cudaMemcpy2DAsync(to, (size_t)to_stride, from, (size_t)from_stride, (size_t)width, (size_t)n,
                                 cudaMemcpyDeviceToDevice, step->stream) == cudaSuccess;
    }
    static bool fill(const cf_cuda_step *step, void *to, int64_t bytes) {
        return cudaMemsetAsync(to, 0xFF, (size_t)bytes, step->stream) == cudaSuccess;
    }

    /* Copies a layer's output into contiguous rows. */
    bool take_out(const cf_cuda_step *step, char *to, int64_t to_stride, const char *out) const {
        const int64_t n = step->chunk->rows, head = x.head_size * number();
        if (!x.by_head) return copy(step, to, to_stride, out, row(), row(), n);
        for (int64_t h = 0; h < HEADS; h++)
            if (!copy(step, to + h * head, to_stride, out + h * n * head, head, head, n)) return false;
        return true;
    }

    const char *table_at(const cf_cuda_step *step, int64_t layer) const {
        const int64_t plane = step->step->action.stage * LAYERS + layer;
        return table + (plane * n_rows() + b.first_row[(size_t)step->step->action.chunk]) * packed();
    }

    char *result_at(const cf_cuda_step *step, int64_t layer) const {
        const int64_t plane = step->step->action.stage * LAYERS + layer;
        return results + (plane * n_rows() + b.first_row[(size_t)step->step->action.chunk]) * kept_of_row();
    }

    /* Changes a number that an R reads. */
    bool spoil(const cf_cuda_step *step, const arrays &a) const {
        char *const at = wrong == 1 ? a.out : a.lse;
        float number_found = 0;
        if (cudaStreamSynchronize(step->stream) != cudaSuccess) return false;
        if (cudaMemcpy(&number_found, at, sizeof number_found, cudaMemcpyDeviceToHost) != cudaSuccess) return false;
        number_found *= 1 + 0x1p-20f;
        return cudaMemcpy(at, &number_found, sizeof number_found, cudaMemcpyHostToDevice) == cudaSuccess;
    }

    static int64_t calls_so_far() {
#ifdef CHUNKFLOW_CUDA_EMULATION
        return cuda_emu_calls("cudaLaunchKernelEx") + cuda_emu_calls("cublasGemmStridedBatchedEx");
#else
        return 0;
#endif
    }

    /* Runs one layer: copies its rows in and attends. Arrays that a replay does not use are NaN before and after. */
    bool forward_layer(const cf_cuda_step *step, int64_t layer, const char *before) {
        const arrays a = arrays_at(step, layer);
        const int64_t n = step->chunk->rows, kv = packed() - row();
        const char *from = table_at(step, layer);
        const bool replay = step->step->action.pass == CF_R;
        bool ok = copy(step, a.qkv + row(), packed(), from + row(), packed(), kv, n);
        if (layer > 0) ok = ok && take_out(step, a.qkv, packed(), before);
        else if (step->input != nullptr) ok = ok && copy(step, a.qkv, packed(), step->input, row(), row(), n);
        else ok = ok && copy(step, a.qkv, packed(), from, packed(), row(), n);
        ok = ok && fill(step, a.out, n * row()) && fill(step, a.lse, n * HEADS * 4);
        if (!ok) return false;
        const cf_layer_attention l = layer_of(step, layer);
        const int64_t calls = calls_so_far();
        if (cf_layer_attention_forward(step, &l, step->error) != CF_OK) return false;
        n_replays += replay;
        calls_of_replays += replay ? calls_so_far() - calls : 0;
        return !replay || wrong == 0 || layer != 1 || spoil(step, a);
    }

    bool forward(const cf_cuda_step *step) {
        const char *before = nullptr;
        for (int64_t layer = 0; layer < LAYERS; layer++) {
            if (!forward_layer(step, layer, before)) return false;
            before = arrays_at(step, layer).out;
        }
        return step->output == nullptr || take_out(step, static_cast<char *>(step->output), row(), before);
    }

    bool backward(const cf_cuda_step *step) {
        const int64_t n = step->chunk->rows;
        char *const dout = static_cast<char *>(step->workspace);
        bool ok = step->input != nullptr ? copy(step, dout, row(), step->input, row(), row(), n)
                                         : copy(step, dout, row(), table_at(step, 0), packed(), row(), n);
        for (int64_t layer = LAYERS - 1; layer >= 0 && ok; layer--) {
            const arrays a = arrays_at(step, layer);
            const cf_layer_attention l = layer_of(step, layer);
            char *const to = result_at(step, layer);
            if (cf_layer_attention_backward(step, &l, step->error) != CF_OK) return false;
            ok = copy(step, to, kept_of_row(), a.qkv, packed(), packed(), n) &&
                 take_out(step, to + packed(), kept_of_row(), a.out) &&
                 copy(step, to + packed() + row(), kept_of_row(), a.lse, HEADS * 4, HEADS * 4, n) &&
                 copy(step, dout, row(), a.qkv, packed(), row(), n);
        }
        if (ok && step->output != nullptr) ok = copy(step, step->output, row(), dout, row(), row(), n);
        return ok;
    }

    static int pass(void *user, const cf_cuda_step *step) {
        model *m = static_cast<model *>(user);
        const int pass = step->step->action.pass;
        if (m->n_passes++ == m->fail_at) return 5;
        if (step->chunk->rows == 0) return 0;
        return (pass == CF_F || pass == CF_R ? m->forward(step) : m->backward(step)) ? 0 : 6;
    }

    cf_executor_desc desc(const cf_cuda_stage *stages) {
        cf_executor_desc d = {};
        d.user = this;
        d.forward = d.backward = pass;
        d.n_stages = x.n_stages;
        d.stages = stages;
        d.attention.n_heads = HEADS;
        d.attention.n_kv_heads = KV_HEADS;
        d.attention.head_size = x.head_size;
        d.attention.dtype = x.dtype;
        d.attention.path = x.path;
        d.attention.window = x.window;
        d.attention.softcap = x.softcap;
        d.attention.deterministic = 1;
        d.boundary_bytes_per_token = row();
        d.state_block_rows = x.block_rows;
        d.outputs = outputs;
        return d;
    }

    bool create() {
        const std::vector<cf_cuda_stage> stages((size_t)x.n_stages, needs());
        const cf_executor_desc d = desc(stages.data());
        cf_error error = {};
        return call_ok(cf_executor_create(&d, &executor, &error), error);
    }

    /* Makes the tables, and an executor with the batch. */
    bool prepare() {
        const size_t planes = (size_t)(x.n_stages * LAYERS), bytes = planes * (size_t)(n_rows() * packed());
        std::vector<unsigned char> values(bytes);
        harness_rng rng = {1};
        cf_error error = {};
        for (size_t at = 0; at < bytes; at += (size_t)number()) {
            const float value = (float)harness_between(&rng, -12, 12) / 8;
            const uint16_t bits = x.dtype == CF_DTYPE_FP32 ? (uint16_t)0 : to_bits(x.dtype, value);
            if (x.dtype == CF_DTYPE_FP32) memcpy(&values[at], &value, 4);
            else memcpy(&values[at], &bits, 2);
        }
        if (!CHECK(cudaMalloc((void **)&table, bytes) == cudaSuccess) ||
            !CHECK(cudaMalloc((void **)&results, result_bytes()) == cudaSuccess) ||
            !CHECK(cudaMemcpy(table, values.data(), bytes, cudaMemcpyHostToDevice) == cudaSuccess) ||
            !CHECK(cudaMalloc((void **)&sinks, 2 * HEADS * 4) == cudaSuccess) ||
            !CHECK(cublasCreate(&cublas) == CUBLAS_STATUS_SUCCESS))
            return false;
        return create() && call_ok(cf_executor_load(executor, b.plan, b.schedule, &error), error);
    }

    size_t result_bytes() const { return (size_t)(x.n_stages * LAYERS * n_rows() * kept_of_row()); }

    bool clear() {
        n_passes = n_replays = calls_of_replays = 0;
        const float first[2 * HEADS] = {0.5f, 2.0f};
        return CHECK(cudaMemset(results, 0xFF, result_bytes()) == cudaSuccess) &&
               CHECK(cudaMemcpy(sinks, first, sizeof first, cudaMemcpyHostToDevice) == cudaSuccess) &&
               CHECK(cudaDeviceSynchronize() == cudaSuccess);
    }

    /* Everything that a run leaves. */
    bool run(std::vector<unsigned char> *to) {
        cf_error error = {};
        float of_sinks[2 * HEADS];
        to->assign(result_bytes() + sizeof of_sinks, 0);
        const bool ok = clear() && call_ok(cf_executor_run(executor, &error), error) &&
                        CHECK(cudaMemcpy(to->data(), results, result_bytes(), cudaMemcpyDeviceToHost) == cudaSuccess) &&
                        CHECK(cudaMemcpy(of_sinks, sinks, sizeof of_sinks, cudaMemcpyDeviceToHost) == cudaSuccess);
        memcpy(to->data() + result_bytes(), of_sinks, sizeof of_sinks);
        CHECK((of_sinks[HEADS] != 0.0f) == x.sinks);
        return ok;
    }
};

static bool results_of(const setting &x, const batch &b, int outputs, std::vector<unsigned char> *to) {
    model m(x, b, outputs);
    return m.prepare() && m.run(to);
}

/* ---- the same bits ---- */

static bool is_sane(const setting &x, const std::vector<unsigned char> &results) {
    return CHECK(results.size() > 1000) && CHECK(!harness_is_poison(results.data(), results.size() / 2)) &&
           CHECK(x.lengths.size() > 0);
}

/* Tests outputs on the device and in host memory. Replays launch only what appends their rows. */
static void check_setting(const setting &x) {
    batch b;
    std::vector<unsigned char> plain, got;
    harness_note("%s", x.name);
    if (!b.make(x) || !results_of(x, b, 0, &plain) || !is_sane(x, plain)) return;
    for (int outputs = 1; outputs <= 2; outputs++) {
        model m(x, b, outputs);
        if (!m.prepare()) return;
        if (!m.run(&got)) return;
        if (got != plain) FAIL("outputs %d: other numbers than with replays that attend", outputs);
        CHECK(m.n_replays > 0);
#ifdef CHUNKFLOW_CUDA_EMULATION
        CHECK_INT(m.calls_of_replays, m.n_replays);
#endif
    }
#ifdef CHUNKFLOW_CUDA_EMULATION
    CHECK_INT(cuda_emu_faults(), 0);
#endif
}

TEST(chains) {
    setting x;
    x.name = "fp32";
    check_setting(x);
    x.name = "K 2, soft cap, heads apart";
    x.k = 2;
    x.softcap = 3.0;
    x.by_head = true;
    check_setting(x);
}

TEST(streams) {
    setting x;
    x.name = "streams";
    x.block_rows = 12;
    check_setting(x);
    x.name = "streams, heads apart, three stages, sinks";
    x.by_head = x.sinks = true;
    x.n_stages = 3;
    check_setting(x);
}

TEST(trees) {
    setting x;
    x.name = "tree";
    x.lengths = {52, 55, 60, 50, 20};
    x.shared = {{0, 0}, {0, 48}, {0, 48}, {1, 49}, {0, 0}};
    x.chunk_size = 24;
    check_setting(x);
    x.name = "tree that streams, sinks";
    x.sinks = true;
    x.block_rows = 10;
    check_setting(x);
}

/* Sinks count once, even if keys come in blocks. */
TEST(sinks_in_blocks) {
    setting x;
    batch b;
    std::vector<unsigned char> whole, blocks;
    x.sinks = true;
    REQUIRE(b.make(x) && results_of(x, b, 0, &whole));
    x.block_rows = 12;
    REQUIRE(results_of(x, b, 0, &blocks) && whole.size() == blocks.size());
    for (size_t at = 0; at < whole.size(); at += 4) {
        float a = 0, c = 0;
        memcpy(&a, &whole[at], 4);
        memcpy(&c, &blocks[at], 4);
        if (memcmp(&whole[at], &blocks[at], 4) != 0 && !CHECK(std::fabs(a - c) < 1e-5f * (1 + std::fabs(a)))) return;
    }
}

/* ---- attention by another library ---- */

/* A substitute for another library: it takes some chunks, and calls this library's functions. */
struct other_library : cf_attention_backend {
    int64_t n_forwards = 0, n_backwards = 0, n_asked = 0;
    int64_t fail_at = -1;

    other_library() : cf_attention_backend{this, is_taken, run} {}

    static int is_taken(void *user, const cf_attention *a) {
        static_cast<other_library *>(user)->n_asked++;
        CHECK(a->n_levels == 0 && a->desc.prefix == 0);
        return a->desc.n_slices == 1;
    }
    static cf_result run(void *user, int backward, const cf_attention *a, const cf_attention_tensors *x,
                         cf_cuda_stream stream, cf_error *error) {
        other_library *own = static_cast<other_library *>(user);
        if (own->n_forwards + own->n_backwards == own->fail_at)
            return cf_refuse(error, CF_ERROR_DEVICE, "other", -1, "has no plan for this");
        (backward ? own->n_backwards : own->n_forwards)++;
        CHECK(x->sinks == nullptr && x->finish == 0);
        return (backward ? cf_attention_backward : cf_attention_forward)(a, x, stream, error);
    }
};

/* Passes of both libraries together give the results of one; a replay takes the other library's outputs. */
static void check_other(const setting &x, int outputs, bool is_asked, int64_t *n_left) {
    batch b;
    std::vector<unsigned char> plain, got;
    other_library other;
    if (!b.make(x) || !results_of(x, b, outputs, &plain)) return;
    model m(x, b, outputs);
    m.backend = &other;
    if (!m.prepare() || !m.run(&got)) return;
    CHECK(got == plain);
    CHECK((other.n_forwards > 0 && other.n_backwards > 0) == is_asked);
    CHECK(other.n_asked >= other.n_forwards + other.n_backwards);
    *n_left += other.n_asked - other.n_forwards - other.n_backwards;
}

TEST(another_library) {
    setting x;
    int64_t n_left = 0;
    check_other(x, 0, true, &n_left);
    CHECK(n_left > 0);
    check_other(x, 1, true, &n_left);
    x.block_rows = 12;
    check_other(x, 2, true, &n_left); /* the first chunk of a chain, which has no prefix */
    x.sinks = true;
    check_other(x, 0, false, &n_left);
    x = setting();
    x.lengths = {52, 55, 60, 50, 20};
    x.shared = {{0, 0}, {0, 48}, {0, 48}, {1, 49}, {0, 0}};
    x.chunk_size = 24;
    check_other(x, 0, true, &n_left); /* only the root's chunks and the chunks outside trees */
}

TEST(another_library_that_fails) {
    const setting x;
    batch b;
    cf_error error = {};
    REQUIRE(b.make(x));
    for (const int64_t fail_at : {0, 9}) {
        other_library other;
        model m(x, b, 0);
        other.fail_at = fail_at;
        m.backend = &other;
        REQUIRE(m.prepare() && m.clear());
        CHECK_INT(cf_executor_run(m.executor, &error), CF_ERROR_DEVICE);
        CHECK(strstr(error.text, "has no plan for this") != nullptr);
        other.takes = nullptr;
        CHECK_INT(cf_executor_run(m.executor, &error), CF_ERROR_ARGUMENT);
        CHECK(strstr(error.text, "backend") != nullptr);
    }
}

/* The fused paths, for 16-bit numbers. */
TEST(fused) {
    setting x;
    x.lengths = {40};
    x.name = "fp16 by mma, streams";
    x.dtype = CF_DTYPE_FP16;
    x.path = CF_ATTENTION_MMA;
    x.n_stages = 1;
    x.block_rows = 24;
    check_setting(x);
    if (last_path() != CF_ATTENTION_WGMMA) return;
#ifdef CHUNKFLOW_CUDA_EMULATION
    cuda_emu_set_arch(90);
#endif
    x.name = "bf16 by wgmma";
    x.dtype = CF_DTYPE_BF16;
    x.path = CF_ATTENTION_WGMMA;
    x.block_rows = 0;
    check_setting(x);
#ifdef CHUNKFLOW_CUDA_EMULATION
    cuda_emu_defaults();
#endif
}

/* Below CF_MIN_OUTPUT_WINDOW nothing is kept, and replays attend. */
TEST(windows) {
    setting x;
    batch b;
    std::vector<unsigned char> plain, got;
    cf_executor_memory none = {}, small = {}, large = {};
    cf_error error = {};
    x.n_stages = 1;
    x.window = 20;
    REQUIRE(b.make(x) && results_of(x, b, 0, &plain));
    model m(x, b, 1), off(x, b, 0);
    REQUIRE(m.prepare() && m.run(&got) && off.prepare());
    CHECK(got == plain);
#ifdef CHUNKFLOW_CUDA_EMULATION
    CHECK(m.calls_of_replays > m.n_replays);
#endif
    setting wide = x;
    wide.window = CF_MIN_OUTPUT_WINDOW;
    model kept(wide, b, 1);
    REQUIRE(kept.prepare());
    REQUIRE(cf_executor_memory_of(off.executor, nullptr, nullptr, &none, &error) == CF_OK);
    REQUIRE(cf_executor_memory_of(m.executor, nullptr, nullptr, &small, &error) == CF_OK);
    REQUIRE(cf_executor_memory_of(kept.executor, nullptr, nullptr, &large, &error) == CF_OK);
    CHECK_INT(small.total, none.total);
    CHECK_INT(small.host, none.host);
    CHECK(large.arena > none.arena);
}

/* ---- what goes wrong ---- */

TEST(wrong_outputs_are_found) {
    const setting x;
    batch b;
    std::vector<unsigned char> plain, got;
    REQUIRE(b.make(x) && results_of(x, b, 1, &plain));
    for (int wrong = 1; wrong <= 2; wrong++) {
        model m(x, b, 1);
        m.wrong = wrong;
        REQUIRE(m.prepare() && m.run(&got));
        int64_t n = 0; /* gradients that differ; the changed number itself is at most a fourth byte */
        for (size_t i = 0; i < got.size(); i++) n += got[i] != plain[i];
        CHECK(n > 100);
    }
}

TEST(a_run_that_stops) {
    for (const int64_t block_rows : {0, 12})
        for (int outputs = 1; outputs <= 2; outputs++) {
            setting x;
            batch b;
            std::vector<unsigned char> plain, got;
            x.block_rows = block_rows;
            REQUIRE(b.make(x) && results_of(x, b, 0, &plain));
            model m(x, b, outputs);
            REQUIRE(m.prepare());
            REQUIRE(m.run(&got));
            const int64_t n = m.n_passes;
            for (int64_t at = 1; at < n; at += harness_rounds(1, 17)) {
                cf_error error = {};
                m.fail_at = at;
                REQUIRE(m.clear());
                CHECK_INT(cf_executor_run(m.executor, &error), CF_ERROR_CALLBACK);
                m.fail_at = -1;
                REQUIRE(m.run(&got));
                CHECK(got == plain);
            }
        }
}

/* Counts the bytes of a batch's outputs by another walk through the steps. */
TEST(bytes) {
    setting x;
    batch b;
    cf_error error = {};
    REQUIRE(b.make(x));
    cf_executor_memory m[3][2] = {};
    for (int outputs = 0; outputs < 3; outputs++) {
        model one(x, b, outputs);
        REQUIRE(one.prepare() && cf_executor_memory_of(one.executor, nullptr, nullptr, m[outputs], &error) == CF_OK);
    }
    const int64_t row = HEADS * x.head_size * 4;
    for (int64_t stage = 0; stage < x.n_stages; stage++) {
        cf_steps *steps = nullptr;
        int64_t now = 0, most = 0, largest = 0;
        REQUIRE(cf_steps_make(b.plan, b.schedule, stage, 0, nullptr, &steps, &error) == CF_OK);
        for (int64_t i = 0; i < steps->n; i++) {
            const cf_step &step = steps->steps[i];
            const int64_t rows = b.plan->chunks[step.action.chunk].rows;
            const int64_t layer = (rows * row + 255) / 256 * 256 + (rows * HEADS * 4 + 255) / 256 * 256;
            if (step.outputs < 0) continue;
            now += (step.action.pass == CF_F ? 1 : -1) * layer * LAYERS;
            most = now > most ? now : most;
            largest = layer > largest ? layer : largest;
        }
        CHECK_INT(now, 0);
        CHECK(most > 0);
        CHECK_INT(m[1][stage].n_outputs, steps->n_outputs);
        CHECK(m[1][stage].arena - m[0][stage].arena >= most);
        CHECK(m[1][stage].arena - m[0][stage].arena <= steps->n_outputs * largest * LAYERS);
        CHECK(m[1][stage].arena_live - m[0][stage].arena_live <= most);
        CHECK(m[1][stage].arena_live > m[0][stage].arena_live);
        CHECK_INT(m[1][stage].host, 0);
        CHECK(m[2][stage].host >= most);
        CHECK(m[2][stage].inputs >= 2 * largest);
        CHECK(m[2][stage].inputs <= 2 * largest + 2 * x.chunk_size * row);
        CHECK(m[2][stage].total < m[1][stage].total);
        cf_steps_free(steps);
    }
}

TEST(refusals) {
    setting x;
    batch b;
    cf_error error = {};
    cf_executor *made = nullptr;
    REQUIRE(b.make(x));
    model m(x, b, 3);
    const std::vector<cf_cuda_stage> stages((size_t)x.n_stages, m.needs());
    cf_executor_desc d = m.desc(stages.data());
    CHECK_INT(cf_executor_create(&d, &made, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "outputs");
    d.outputs = 1;
    d.attention = {};
    CHECK_INT(cf_executor_create(&d, &made, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "outputs");
    CHECK(made == nullptr);

    cf_schedule_desc order = {};
    cf_schedule *through = nullptr;
    order.kind = CF_SCHEDULE_PAPER;
    order.shape.n_stages = x.n_stages;
    order.shape.k = 1;
    order.shape.replay = CF_REPLAY_PIPELINE;
    REQUIRE(cf_schedule_make(b.plan, &order, &through, &error) == CF_OK);
    model kept(x, b, 1);
    REQUIRE(kept.prepare());
    CHECK_INT(cf_executor_load(kept.executor, b.plan, through, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "outputs");
    cf_schedule_free(through);
}

#ifdef CHUNKFLOW_CUDA_EMULATION

/* Whatever the device runs first. */
TEST(every_order) {
    setting x;
    x.lengths = {40, 9};
    for (const int64_t block_rows : {0, 12}) {
        batch b;
        std::vector<unsigned char> plain, got;
        x.block_rows = block_rows;
        REQUIRE(b.make(x) && results_of(x, b, 0, &plain));
        cuda_emu_each_policy(harness_rounds(10, 1), [&] {
            for (int outputs = 1; outputs <= 2; outputs++)
                if (results_of(x, b, outputs, &got) && got != plain)
                    FAIL("outputs %d, %s", outputs, cuda_emu_policy_name());
        });
        CHECK_INT(cuda_emu_faults(), 0);
    }
    cuda_emu_defaults();
}

/* After a failed call the next run is right, and nothing remains when the executor is freed. */
TEST(every_call_of_a_run_fails_once) {
    const cuda_emu_live before = cuda_emu_live_objects();
    for (int outputs = 1; outputs <= 2; outputs++) {
        setting x;
        batch b;
        std::vector<unsigned char> plain, got;
        int64_t n = 1;
        x.lengths = {40, 9};
        x.n_stages = 1;
        x.block_rows = outputs == 1 ? 12 : 0;
        REQUIRE(b.make(x) && results_of(x, b, 0, &plain));
        model m(x, b, outputs);
        REQUIRE(m.prepare());
        for (bool failed = true; failed; n += harness_rounds(1, 97)) {
            cf_error error = {};
            REQUIRE(m.clear());
            harness_note("call %d fails", (int)n);
            cuda_emu_fail_call(n, cudaErrorUnknown);
            const cf_result code = cf_executor_run(m.executor, &error);
            failed = cuda_emu_failed();
            cuda_emu_fail_call(0, cudaSuccess);
            CHECK(code == CF_OK || failed);
            if (!m.run(&got) || !CHECK(got == plain)) return;
        }
        CHECK(n > 100);
    }
    CHECK_INT(cuda_emu_live_objects().allocations, before.allocations);
    CHECK_INT(cuda_emu_live_objects().pinned, before.pinned);
    CHECK_INT(cuda_emu_live_objects().events, before.events);
    CHECK_INT(cuda_emu_faults(), 0);
    cuda_emu_reset();
}

#endif

} /* namespace */

#ifdef CHUNKFLOW_CUDA_EMULATION
#define EMULATED_CASES , CASE(every_order), CASE(every_call_of_a_run_fails_once)
#else
#define EMULATED_CASES
#endif

SUITE(outputs, CASE(chains), CASE(streams), CASE(trees), CASE(sinks_in_blocks), CASE(another_library),
      CASE(another_library_that_fails), CASE(fused), CASE(windows),
      CASE(wrong_outputs_are_found), CASE(a_run_that_stops), CASE(bytes), CASE(refusals) EMULATED_CASES);
