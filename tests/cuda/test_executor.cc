/* Tests the executor with a model made of hashes. Every pass mixes its input, its chain's state, its activations and
   its additions to gradients into numbers. A wrong order, an overlap, or a stale or missing byte changes them. A pass
   leaves poison wherever memory goes out of use.

   The same passes run one after another on the host, with a separate array for each tensor, and the numbers must agree.
   The emulation repeats this for every order of streams that it knows. On a device everything runs except tests that
   need planned failures, other orders or virtual time. */

#include "../harness.h"

#define CHUNKFLOW_CUDA_HEADER_ONLY
#define CHUNKFLOW_CUDA_INTERNAL
#include "../../chunkflow_cuda.cu"

#include <cuda_runtime.h>
#ifdef CHUNKFLOW_CUDA_EMULATION
#include <nccl.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace { /* other tests have batches of their own */

/* ---- the model ---- */

typedef uint32_t word;

const word POISON = 0xDEADBEEFu;
const int ROW = 64;  /* words in a row of K or V: a head of 64 fp32 numbers, so that a chain may start anywhere; or
                        WIDTH, with which only every eighth row is at a multiple of 256 bytes */
const int WIDTH = 8; /* words in use, as bits */
const int RESULTS = 4;

__host__ __device__ static inline word mix(word h, word x) {
    h = (h ^ x) * 0x9E3779B1u;
    return h ^ h >> 15;
}

/* One pass, with pointers to either the device or the host. */
struct pass_data {
    int pass, rows, prefix, n_layers, boundary_words, row_words;
    int first, last, keep_input, overwrite, one_layer;
    int64_t first_seen; /* row of the chain: a window hides earlier rows */
    int64_t state_rows, gradient_rows, n_activations, n_work;
    word seed;
    const int32_t *positions;
    word *state, *gradient, *activations, *work, *input, *output, *result;
    word *own;      /* with streamed state: K and V of the chunk's rows, or in a backward ... */
    float *own_gradient; /* ... their gradients of one layer */
    word *carry;    /* ... a hash, and the sum over rows */
};

/* Rows first .. first + n - 1 of a chain in the planes of one layer, K and V. */
struct layer_rows {
    word *data;
    int64_t rows; /* from K to V */
    int64_t first, n;
};

__host__ __device__ static inline word fold(const word *data, int64_t n, word h) {
    for (int64_t i = 0; i < n; i++) h = mix(h, data[i]);
    return h;
}

__host__ __device__ static inline void poison(word *data, int64_t n) {
    for (int64_t i = 0; i < n; i++) data[i] = POISON;
}

__host__ __device__ static inline word *row_of(const pass_data &p, const layer_rows &x, int plane, int64_t row) {
    return x.data + (plane * x.rows + row - x.first) * p.row_words;
}

/* Returns all rows of a layer; with streamed state, the chunk's own. */
__host__ __device__ static inline layer_rows state_rows(const pass_data &p, int layer) {
    if (p.own) return {p.own + 2 * layer * p.rows * p.row_words, p.rows, p.prefix, p.rows};
    return {p.state + 2 * layer * p.state_rows * p.row_words, p.state_rows, 0, p.prefix + p.rows};
}

__host__ __device__ static inline layer_rows gradient_rows(const pass_data &p, int layer) {
    const int at = p.one_layer ? 0 : layer;
    if (p.own_gradient) return {(word *)p.own_gradient, p.rows, p.prefix, p.rows};
    return {p.gradient + 2 * at * p.gradient_rows * p.row_words, p.gradient_rows, 0, p.prefix + p.rows};
}

/* Returns whether a row exists: the prefix, and the chunk's own rows without padding. */
__host__ __device__ static inline bool exists(const pass_data &p, int64_t row) {
    return row < p.prefix || p.positions[row - p.prefix] >= 0;
}

__host__ __device__ static inline word fold_row(const pass_data &p, const layer_rows &x, int layer, int plane,
                                                int64_t row) {
    return fold(row_of(p, x, plane, row), WIDTH, mix(mix(p.seed, (word)(2 * layer + plane)), (word)row));
}

/* A sum, because blocks may come in any order. */
__host__ __device__ static inline word sum_rows(const pass_data &p, const layer_rows &x, int layer) {
    word sum = 0;
    for (int plane = 0; plane < 2; plane++)
        for (int64_t row = x.first; row < x.first + x.n; row++)
            if (exists(p, row) && row >= p.first_seen) sum += fold_row(p, x, layer, plane, row);
    return sum;
}

/* Returns a word of a pass's input: from the previous stage (F, R), the next one (B, I), or the data itself. */
__host__ __device__ static inline word input_word(const pass_data &p, int row, int i) {
    const int missing = p.pass == CF_F || p.pass == CF_R ? p.first : p.last;
    if (!missing) return p.input[row * p.boundary_words + i];
    return mix(mix(p.seed, (word)p.positions[row]), (word)i);
}

__host__ __device__ static inline word fold_input(const pass_data &p, word h) {
    for (int row = 0; row < p.rows; row++)
        for (int i = 0; i < p.boundary_words; i++) h = mix(h, input_word(p, row, i));
    return h;
}

/* F and R, first half: makes K and V of the chunk's rows, and fills a workspace. */
__host__ __device__ static inline void forward_first(const pass_data &p) {
    const word h = fold_input(p, p.seed);
    for (int plane = 0; plane < 2 * p.n_layers; plane++)
        for (int row = 0; row < p.rows; row++)
            for (int i = 0; i < WIDTH && p.positions[row] >= 0; i++)
                row_of(p, state_rows(p, plane / 2), plane % 2, p.prefix + row)[i] =
                    mix(mix(h, (word)(plane * WIDTH + i)), (word)row);
    for (int64_t i = 0; i < p.n_work; i++) p.work[i] = mix(h, (word)i);
    if (p.carry) p.carry[1] = 0;
}

/* Second half: mixes everything that was written into the output and the activations. */
__host__ __device__ static inline void forward_second(const pass_data &p) {
    word sum = p.carry ? p.carry[1] : 0;
    for (int layer = 0; layer < p.n_layers; layer++) sum += sum_rows(p, state_rows(p, layer), layer);
    const word h = fold_input(p, mix(fold(p.work, p.n_work, p.seed), sum));
    for (int64_t i = 0; p.activations && i < p.n_activations; i++) p.activations[i] = mix(h, (word)i);
    for (int64_t i = 0; p.output && i < (int64_t)p.rows * p.boundary_words; i++)
        p.output[i] = mix(h, input_word(p, (int)(i / p.boundary_words), (int)(i % p.boundary_words)) ^ (word)i);
    p.result[p.pass == CF_F ? 0 : 1] = h;
    if (!p.first && !p.keep_input) poison(p.input, (int64_t)p.rows * p.boundary_words);
    poison(p.work, p.n_work);
}

__host__ __device__ static inline void backward_first(const pass_data &p) {
    const word h = fold_input(p, fold(p.activations, p.n_activations, p.seed));
    for (int64_t i = 0; i < p.n_work; i++) p.work[i] = mix(h, (word)i);
    if (p.carry) p.carry[0] = fold(p.work, p.n_work, p.seed);
}

/* Adds to the gradients of rows, by their contents. The numbers are integers, so sums are exact in any order. */
__host__ __device__ static inline void add_gradients(const pass_data &p, const layer_rows &x, const layer_rows &to,
                                                     int layer, bool overwrite, word h) {
    for (int plane = 0; plane < 2; plane++)
        for (int64_t row = x.first; row < x.first + x.n; row++) {
            if (!exists(p, row)) continue;
            const word of_row = row >= p.first_seen ? mix(h, fold_row(p, x, layer, plane, row)) : 0;
            float *g = (float *)(void *)row_of(p, to, plane, row);
            for (int i = 0; i < WIDTH; i++)
                g[i] = (overwrite ? 0 : g[i]) + (float)(row >= p.first_seen ? mix(of_row, (word)i) & 0xFFFF : 0);
        }
}

/* Takes the gradients of the chunk's own rows, which are complete. */
__host__ __device__ static inline word take_gradients(const pass_data &p, int layer, word h) {
    for (int plane = 0; plane < 2; plane++)
        for (int64_t row = p.prefix; row < p.prefix + p.rows; row++) {
            if (!exists(p, row)) continue;
            word *g = row_of(p, gradient_rows(p, layer), plane, row);
            h = fold(g, WIDTH, h);
            poison(g, WIDTH);
            poison(row_of(p, state_rows(p, layer), plane, row), WIDTH);
        }
    return h;
}

__host__ __device__ static inline void weights(const pass_data &p) {
    p.result[3] = fold(p.activations, p.n_activations, p.seed);
    poison(p.activations, p.n_activations);
}

__host__ __device__ static inline void backward_second(const pass_data &p) {
    word h = p.carry ? p.carry[0] : fold(p.work, p.n_work, p.seed);
    for (int layer = p.n_layers - 1; layer >= 0 && !p.carry; layer--) {
        add_gradients(p, state_rows(p, layer), gradient_rows(p, layer), layer, p.overwrite, h);
        h = take_gradients(p, layer, h);
    }
    p.result[2] = h;
    for (int64_t i = 0; p.output && i < (int64_t)p.rows * p.boundary_words; i++)
        p.output[i] = mix(h, input_word(p, (int)(i / p.boundary_words), (int)(i % p.boundary_words)) ^ (word)i);
    for (int64_t i = 0; i < p.n_activations; i++) p.activations[i] = mix(p.activations[i], h);
    if (!p.last) poison(p.input, (int64_t)p.rows * p.boundary_words);
    poison(p.work, p.n_work);
    if (p.pass == CF_B) weights(p);
}

__host__ __device__ static inline void do_half(const pass_data &p, int half) {
    if (p.pass == CF_F || p.pass == CF_R) half == 0 ? forward_first(p) : forward_second(p);
    else if (p.pass == CF_W) half == 0 ? (void)0 : weights(p);
    else half == 0 ? backward_first(p) : backward_second(p);
}

/* The steps of a layer with streamed state: it begins with the chunk's own rows, continues with each block, and
   ends. */
enum { LAYER_BEGINS, LAYER_BLOCK, LAYER_ENDS };

__host__ __device__ static inline void do_layer(const pass_data &p, int what, int layer, const layer_rows &x,
                                                const layer_rows &g) {
    const bool forward = p.pass == CF_F || p.pass == CF_R;
    if (forward) {
        if (what == LAYER_BLOCK) p.carry[1] += sum_rows(p, x, layer);
    } else if (what == LAYER_ENDS) {
        p.carry[0] = take_gradients(p, layer, p.carry[0]);
    } else {
        add_gradients(p, x, g, layer, what == LAYER_BEGINS, p.carry[0]);
    }
}

__global__ static void layer_kernel(pass_data p, int what, int layer, layer_rows x, layer_rows g) {
    if (threadIdx.x == 0) do_layer(p, what, layer, x, g);
}

__global__ static void half_kernel(pass_data p, int half) {
    if (threadIdx.x == 0) do_half(p, half);
}

/* ---- a batch and how it is cut ---- */

struct setting {
    std::vector<int64_t> lengths;
    cf_pack_desc pack = {};
    cf_schedule_desc order = {};
    std::vector<cf_cuda_stage> stages;
    std::vector<int> devices;
    int64_t boundary_words = 2;
    int row_words = ROW;
    int is_lowered = 0, timeline = 0, blocking = 0; /* is_lowered: before loading */
    int64_t block_rows = 0, slots = 0, window = 0; /* the state streams */
    uint64_t seed = 0;
    std::string name;
};

/* Returns the first row that a chunk sees. */
static int64_t first_seen(const setting &x, int64_t prefix) {
    return x.window > 0 ? std::max<int64_t>(0, prefix - x.window + 1) : 0;
}

struct batch {
    cf_plan *plan = nullptr;
    cf_schedule *made = nullptr, *lowered = nullptr;

    const cf_schedule *schedule() const { return lowered ? lowered : made; }
    ~batch() {
        cf_schedule_free(lowered);
        cf_schedule_free(made);
        cf_plan_free(plan);
    }
};

static bool make_batch(const setting &x, batch *b) {
    cf_error error = {};
    if (cf_pack(x.lengths.data(), (int64_t)x.lengths.size(), &x.pack, &b->plan, &error) != CF_OK ||
        cf_schedule_make(b->plan, &x.order, &b->made, &error) != CF_OK ||
        (x.is_lowered && cf_schedule_lower(b->plan, b->made, nullptr, &b->lowered, &error) != CF_OK)) {
        FAIL("%s: %s", x.name.c_str(), error.text);
        return false;
    }
    return true;
}

/* ---- the same on the host, one pass after the other ---- */

/* Returns the stage of a virtual stage: a V turns after every row of virtual stages. */
static int64_t workspace_of(const cf_cuda_stage &d, int pass, int64_t rows) {
    if (pass == CF_F || pass == CF_R) return d.forward_bytes + d.forward_bytes_per_token * rows;
    return d.backward_bytes + d.backward_bytes_per_token * rows;
}

static int64_t stage_of(const cf_schedule *s, int64_t v) {
    const int64_t at = v % s->shape.n_stages;
    const bool back = s->shape.placement == CF_PLACEMENT_V && v / s->shape.n_stages % 2 == 1;
    return back ? s->shape.n_stages - 1 - at : at;
}

struct host_model {
    const setting &x;
    const cf_plan *plan;
    const cf_schedule *made;
    uint64_t seed;
    int64_t first, n, n_virtual_stages;
    std::vector<word> results; /* (virtual stages x chunks x RESULTS) */
    std::vector<std::vector<word>> tensors, activations;
    std::vector<std::vector<int32_t>> positions;
    std::vector<word> work;

    host_model(const setting &x_, const batch &b, uint64_t seed_)
        : x(x_), plan(b.plan), made(b.made), seed(seed_), first(b.made->shape.rank * plan->chunks_per_rank),
            n(plan->chunks_per_rank),
          n_virtual_stages(b.made->shape.n_stages * b.made->shape.n_virtual) {
        results.assign((size_t)(n_virtual_stages * n * RESULTS), 0);
        for (int64_t i = first; i < first + n; i++) {
            const cf_chunk &c = plan->chunks[i];
            std::vector<int32_t> ids((size_t)c.rows, -1);
            for (int64_t s = c.first_slice; s < c.first_slice + c.n_slices; s++)
                for (int64_t t = 0; t < plan->slices[s].length; t++)
                    ids[(size_t)(plan->slices[s].offset + t)] = (int32_t)(plan->slices[s].begin + t);
            positions.push_back(ids);
        }
        run();
    }

    pass_data pass_of(int pass, int64_t v, int64_t chunk) {
        const cf_chunk &c = plan->chunks[chunk];
        const cf_cuda_stage &d = x.stages[(size_t)v];
        pass_data p = {};
        p.pass = pass;
        p.rows = (int)c.rows;
        p.prefix = (int)c.prefix;
        p.n_layers = (int)d.n_layers;
        p.boundary_words = (int)x.boundary_words;
        p.row_words = x.row_words;
        p.first = v == 0;
        p.last = v == n_virtual_stages - 1;
        p.keep_input = 1;
        p.first_seen = first_seen(x, c.prefix);
        p.n_activations = (d.activation_bytes + d.activation_bytes_per_token * c.rows) / 4;
        p.n_work = workspace_of(d, pass, c.rows) / 4;
        p.seed = (word)cf_chunk_seed(seed, chunk, v);
        p.positions = positions[(size_t)(chunk - first)].data();
        p.result = &results[(size_t)((v * n + chunk - first) * RESULTS)];
        work.assign((size_t)p.n_work + 1, POISON);
        p.work = work.data();
        return p;
    }

    void run_chain(int64_t v, int64_t begin, int64_t count, bool backward, std::vector<word> *state,
                   std::vector<word> *gradient) {
        int64_t rows = 0;
        for (int64_t i = begin; i < begin + count; i++)
            rows = std::max(rows, plan->chunks[i].prefix + plan->chunks[i].rows);
        if (!backward) state->assign((size_t)(rows * 2 * x.stages[(size_t)v].n_layers * x.row_words) + 1, POISON);
        if (backward) gradient->assign(state->size(), POISON);
        for (int64_t k = 0; k < count; k++) {
            const int64_t chunk = backward ? begin + count - 1 - k : begin + k, i = chunk - first;
            pass_data p = pass_of(backward ? CF_B : CF_F, v, chunk);
            std::vector<word> out((size_t)(plan->chunks[chunk].rows * x.boundary_words) + 1, POISON);
            p.state_rows = p.gradient_rows = rows;
            p.state = state->data();
            p.gradient = gradient->data();
            p.overwrite = k == 0;
            if (!backward) activations[(size_t)i].assign((size_t)p.n_activations + 1, POISON);
            p.activations = activations[(size_t)i].data();
            p.input = tensors[(size_t)i].data();
            p.output = out.data();
            do_half(p, 0);
            do_half(p, 1);
            tensors[(size_t)i] = out;
        }
    }

    void run() {
        std::vector<std::vector<std::vector<word>>> kept((size_t)n_virtual_stages), states((size_t)n_virtual_stages);
        std::vector<word> gradient;
        tensors.assign((size_t)n, std::vector<word>());
        for (int64_t k = 0; k < 2 * n_virtual_stages; k++) {
            const bool backward = k >= n_virtual_stages;
            const int64_t v = backward ? 2 * n_virtual_stages - 1 - k : k;
            if (!backward) activations.assign((size_t)n, std::vector<word>());
            else activations = kept[(size_t)v];
            if (!backward) states[(size_t)v].resize((size_t)n);
            for (int64_t i = 0, count; i < n; i += count) {
                const int64_t chain = plan->chunks[first + i].chain;
                count = chain >= 0 ? plan->chains[chain].n_chunks : 1;
                run_chain(v, first + i, count, backward, &states[(size_t)v][(size_t)i], &gradient);
            }
            if (!backward) kept[(size_t)v] = activations;
        }
    }
};

/* ---- the same through the executor ---- */

/* A pass as the callback received it. */
struct seen_pass {
    int64_t stage, position;
    cf_action action;
    cf_cuda_step step;
};

struct device_model {
    const setting &x;
    const batch &b;
    uint64_t seed;
    cf_executor *executor = nullptr;
    std::vector<word *> results; /* by stage, on that stage's device */
    std::vector<seen_pass> seen;
    bool note = false;
    std::vector<int64_t> replayed; /* by virtual stage x chunk: 1 if it has an R */

    /* what tests change */
    int64_t fail_at = -1, n_passes = 0; /* this pass reports number 5 */
    bool raises = false;                /* and raises an error with this item */
    int64_t raised_item = 7;
    int64_t fail_at_block = -1, n_blocks = 0; /* reports error 5 after this block of any pass */
    int64_t cancel_at = -1, n_progress = 0;
    std::function<void(const cf_cuda_step *)> before;
    std::function<void(const cf_step *)> in_progress;
    mutable std::vector<cf_cuda_stage> own_stages; /* what a descriptor points to */
    bool may_fail = false; /* CUDA calls of a pass may fail in this test; it then reports error 6 */

    device_model(const setting &x_, const batch &b_, uint64_t seed_) : x(x_), b(b_), seed(seed_) {}
    ~device_model() {
        cf_executor_free(executor);
        for (word *r : results)
            if (r) cudaFree(r);
    }

    int64_t n_stages() const { return b.made->shape.n_stages; }
    int64_t n_virtual_stages() const { return b.made->shape.n_stages * b.made->shape.n_virtual; }
    size_t result_words() const { return (size_t)(n_virtual_stages() * b.plan->chunks_per_rank * RESULTS); }
    int device(int64_t stage) const { return x.devices.empty() ? 0 : x.devices[(size_t)stage]; }

    static int pass(void *user, const cf_cuda_step *step) { return static_cast<device_model *>(user)->run_pass(step); }
    static int progress(void *user, int64_t, const cf_step *p) {
        device_model *m = static_cast<device_model *>(user);
        if (m->in_progress) m->in_progress(p);
        return m->n_progress++ == m->cancel_at ? 9 : 0;
    }

    int run_pass(const cf_cuda_step *step) {
        const cf_action a = step->step->action;
        const cf_chunk &c = *step->chunk;
        const cf_cuda_stage &d = x.stages[(size_t)a.stage];
        const int64_t first = b.made->shape.rank * b.plan->chunks_per_rank, last = n_virtual_stages() - 1;
        const int64_t stage = stage_of(b.made, a.stage);
        int current = -1;
        if (note) seen.push_back({stage, step->step->position, a, *step});
        if (before) before(step);
        if (n_passes++ == fail_at && raises)
            (void)cf_fail(step->error, CF_ERROR_SPACE, "registers", raised_item, 8, 9, "spilled");
        if (n_passes - 1 == fail_at) return 5;
        if (!may_fail) CHECK(cudaGetDevice(&current) == cudaSuccess && current == device(stage));
        CHECK_INT(step->device, device(stage));
        CHECK(step->stream == cf_executor_stream(executor, stage));
        CHECK_INT(step->metadata->chunk, a.chunk);
        pass_data p = {};
        p.pass = a.pass;
        p.rows = (int)c.rows;
        p.prefix = (int)c.prefix;
        p.n_layers = (int)d.n_layers;
        p.boundary_words = (int)x.boundary_words;
        p.row_words = x.row_words;
        p.first = a.stage == 0;
        p.last = a.stage == last;
        p.first_seen = first_seen(x, c.prefix);
        p.keep_input = a.pass == CF_F && !a.keep && b.made->shape.replay == CF_REPLAY_LOCAL;
        p.overwrite = step->overwrite;
        p.one_layer = step->gradient.one_layer;
        p.state_rows = step->state.rows;
        p.gradient_rows = step->gradient.rows;
        p.n_activations = (d.activation_bytes + d.activation_bytes_per_token * c.rows) / 4;
        p.n_work = workspace_of(d, a.pass, c.rows) / 4;
        const cf_cuda_stage needs = stages()[(size_t)a.stage];
        CHECK_INT(step->workspace_bytes, workspace_of(needs, a.pass, c.rows));
        CHECK_INT(step->activation_bytes,
                  step->activations ? needs.activation_bytes + needs.activation_bytes_per_token * c.rows : 0);
        CHECK_INT(step->boundary_bytes, 4 * x.boundary_words * c.rows);
        p.seed = (word)step->step->seed;
        p.positions = step->positions;
        p.state = (word *)step->state.data;
        p.gradient = (word *)step->gradient.data;
        p.activations = (word *)step->activations;
        p.work = (word *)step->workspace;
        p.input = (word *)const_cast<void *>(step->input);
        p.output = (word *)step->output;
        p.result = results[(size_t)stage] + (a.stage * b.plan->chunks_per_rank + a.chunk - first) * RESULTS;
        const bool forward = a.pass == CF_F || a.pass == CF_R;
        const bool reads = a.pass == CF_W ? false : forward ? !p.first : !p.last;
        if (!CHECK(!reads == !p.input) || !CHECK(p.activations || (a.pass == CF_F && !a.keep))) return 6;
        if (!CHECK((a.pass == CF_W || x.block_rows) == !p.state)) return 6;
        if (!CHECK(((a.pass == CF_B || a.pass == CF_I) && !x.block_rows) == !!p.gradient)) return 6;
        if (!CHECK(a.pass != CF_F || !!p.output == !p.last)) return 6;
        if (x.block_rows) return run_streamed(step, p);
        cudaLaunchConfig_t config = {};
        config.gridDim = config.blockDim = dim3(1);
        config.stream = step->stream;
        for (int half = 0; half < 2; half++)
            if (cudaLaunchKernelEx(&config, half_kernel, p, half) != cudaSuccess && CHECK(may_fail)) return 6;
        return 0;
    }

    /* Describes the stages, with room for the chunk's own rows if the state streams. */
    std::vector<cf_cuda_stage> stages() const {
        std::vector<cf_cuda_stage> all = x.stages;
        for (cf_cuda_stage &d : all) {
            if (!x.block_rows) break;
            const int64_t rows = 8 * d.n_layers * x.row_words;
            d.activation_bytes += 16;
            d.activation_bytes_per_token += rows;
            d.forward_bytes += 32;
            d.forward_bytes_per_token += rows;
            d.backward_bytes += 32;
            d.backward_bytes_per_token += 8 * x.row_words;
        }
        return all;
    }

    template <typename... P, typename... A>
    bool put(const cf_cuda_step *step, void (*kernel)(P...), const A &...arguments) {
        cudaLaunchConfig_t config = {};
        config.gridDim = config.blockDim = dim3(1);
        config.stream = step->stream;
        return cudaLaunchKernelEx(&config, kernel, arguments...) == cudaSuccess;
    }

    /* Runs one layer with the blocks of its prefix. A result other than 0 is the callback's error. */
    int run_layer(const cf_cuda_step *step, const pass_data &p, int layer) {
        const bool forward = p.pass == CF_F || p.pass == CF_R;
        const layer_rows none = {}, own = state_rows(p, layer), g = forward ? none : gradient_rows(p, layer);
        const cf_tensor k = {own.data, 0, 0}, v = {own.data + p.rows * p.row_words, 0, 0};
        const cf_tensor dk = {g.data, 0, 0}, dv = {forward ? nullptr : g.data + p.rows * p.row_words, 0, 0};
        cf_error why = {};
        cf_state_block block = {};
        if (!put(step, layer_kernel, p, (int)LAYER_BEGINS, layer, own, g)) return 6;
        for (block.n_rows = step->walk->stream != nullptr; block.n_rows > 0;) {
            if (cf_state_stream_next(step->walk->stream, step->stream, &block, &why) != CF_OK) return 6;
            CHECK_INT(block.layer, layer);
            if (block.n_rows == 0) break;
            if (n_blocks++ == fail_at_block) return 5;
            if (block.own) {
                if (cf_state_stream_add(step->walk->stream, &block, &dk, &dv, step->stream, &why) != CF_OK) return 6;
                continue;
            }
            const layer_rows to = {(word *)block.gradient.data, block.gradient.rows, block.first_row, block.n_rows};
            const layer_rows from = {(word *)block.state.data, block.state.rows, block.first_row, block.n_rows};
            if (!put(step, layer_kernel, p, (int)LAYER_BLOCK, layer, from, to)) return 6;
        }
        if (!put(step, layer_kernel, p, (int)LAYER_ENDS, layer, own, g)) return 6;
        if (!step->walk->append) return 0;
        return cf_state_stream_append(step->walk->stream, step->stream, layer, &k, &v, &why) != CF_OK ? 6 : 0;
    }

    /* Runs the same pass with streamed state. The chunk's own rows are behind its activations or, if nothing is kept,
       in the workspace. */
    int run_streamed(const cf_cuda_step *step, pass_data p) {
        const auto behind = [](word *array, int64_t n) { return array + (n + 3) / 4 * 4; };
        const bool forward = p.pass == CF_F || p.pass == CF_R, backward = p.pass == CF_B || p.pass == CF_I;
        const cf_chunk &c = *step->chunk;
        word *room = behind(p.work, p.n_work);
        const int64_t n = 2 * p.rows * p.row_words;
        p.own = p.activations ? behind(p.activations, p.n_activations) : room;
        if (backward) p.own_gradient = (float *)(void *)room;
        if (p.pass != CF_W) p.carry = room + (forward ? n * p.n_layers : n);
        const bool last = c.chain >= 0 && c.index + 1 == b.plan->chains[c.chain].n_chunks;
        const bool reads = c.prefix > 0 || backward;
        CHECK_INT(step->walk->stream != nullptr,
                  c.chain >= 0 && p.n_layers > 0 && p.pass != CF_W && (reads || p.pass == CF_F));
        CHECK_INT(step->walk->append, step->walk->stream && p.pass == CF_F && !last);
        CHECK_INT(step->overwrite, backward);
        int number = put(step, half_kernel, p, 0) ? 0 : 6;
        for (int i = 0; i < p.n_layers && number == 0 && p.pass != CF_W; i++)
            number = run_layer(step, p, forward ? i : p.n_layers - 1 - i);
        if (number == 0 && !put(step, half_kernel, p, 1)) number = 6;
        if (number == 6) CHECK(may_fail);
        return number;
    }

    cf_executor_desc desc() const {
        own_stages = stages();
        cf_executor_desc d = {};
        d.user = const_cast<device_model *>(this);
        d.forward = d.backward = pass;
        d.progress = progress;
        d.n_stages = n_stages();
        d.n_virtual = b.made->shape.n_virtual;
        d.stages = own_stages.data();
        d.devices = x.devices.empty() ? nullptr : x.devices.data();
        d.state_block_rows = x.block_rows;
        d.state_slots = x.slots;
        d.attention.window = x.window;
        d.attention.n_kv_heads = 1;
        d.attention.head_size = x.row_words;
        d.attention.dtype = CF_DTYPE_FP32;
        d.boundary_bytes_per_token = 4 * x.boundary_words;
        d.timeline = x.timeline;
        d.blocking = x.blocking;
        d.seed = seed;
        return d;
    }

    bool take_results() {
        bool ok = true;
        for (int64_t i = (int64_t)results.size(); i < n_stages() && ok; i++) {
            word *r = nullptr;
            ok = CHECK(cudaSetDevice(device(i)) == cudaSuccess) &&
                 CHECK(cudaMalloc((void **)&r, result_words() * 4 + 4) == cudaSuccess);
            results.push_back(r);
        }
        cudaSetDevice(0);
        return ok;
    }

    bool start(cf_error *error) {
        const cf_executor_desc d = desc();
        return take_results() && CHECK_INT(cf_executor_create(&d, &executor, error), CF_OK) &&
               CHECK_INT(cf_executor_load(executor, b.plan, b.schedule(), error), CF_OK);
    }

    /* Poisons the results, so that those of an earlier run are not mistaken for new ones. */
    void clear_results() {
        n_passes = n_progress = n_blocks = 0;
        seen.clear();
        for (int64_t i = 0; i < n_stages(); i++) {
            cudaSetDevice(device(i));
            cudaMemset(results[(size_t)i], 0xFF, result_words() * 4);
            cudaDeviceSynchronize();
        }
        cudaSetDevice(0);
    }

    std::vector<word> fetch() {
        std::vector<word> all(result_words(), 0), one(result_words(), 0);
        const int64_t n = b.plan->chunks_per_rank * RESULTS;
        for (int64_t i = 0; i < n_stages(); i++) {
            cudaSetDevice(device(i));
            CHECK(cudaMemcpy(one.data(), results[(size_t)i], result_words() * 4, cudaMemcpyDeviceToHost) ==
                  cudaSuccess);
            for (int64_t v = 0; v < n_virtual_stages(); v++)
                if (stage_of(b.made, v) == i)
                    std::copy(one.begin() + v * n, one.begin() + (v + 1) * n, all.begin() + v * n);
        }
        cudaSetDevice(0);
        return all;
    }
};

/* Compares with the host, number by number; of one stage only if one is given. An R must give the same result as its F.
   Without an R its result is unchanged. */
static bool same_results(const std::vector<word> &got, const host_model &host, int64_t stage = -1) {
    const int64_t n = host.n * RESULTS;
    for (size_t i = 0; i < got.size(); i++) {
        const bool replay = i % RESULTS == 1;
        const word wanted = host.results[replay ? i - 1 : i];
        if (got[i] == wanted || (replay && got[i] == 0xFFFFFFFFu)) continue;
        if (stage >= 0 && stage_of(host.made, (int64_t)i / n) != stage) continue;
        FAIL("virtual stage %d, chunk %d: result %d differs", (int)((int64_t)i / n),
             (int)((int64_t)i % n / RESULTS + host.first), (int)(i % RESULTS));
        return false;
    }
    return true;
}

/* ---- settings ---- */

static const char *describe(setting *x) {
    char text[400];
    (void)snprintf(text, sizeof text,
                   "seed %llu: %s, %s, %d x %d stages (%s), k %d, align %d, ranks %d, lowered %d, "
                   "blocks %d x %d, window %d, devices %d, n %d",
                   (unsigned long long)x->seed, cf_schedule_kind_name(x->order.kind),
                   cf_replay_name(x->order.shape.replay),
                   (int)x->order.shape.n_stages, (int)x->order.shape.n_virtual,
                   cf_placement_name(x->order.shape.placement), (int)x->order.shape.k, (int)x->pack.align,
                   (int)x->pack.n_ranks, x->is_lowered, (int)x->slots, (int)x->block_rows,
                   (int)x->window,
                   x->devices.empty() ? 1 : 1 + *std::max_element(x->devices.begin(), x->devices.end()),
                   (int)x->lengths.size());
    x->name = text;
    return x->name.c_str();
}

static void set_stages(setting *x, harness_rng *rng) {
    x->stages.clear();
    for (int64_t i = 0; i < x->order.shape.n_stages * x->order.shape.n_virtual; i++) {
        cf_cuda_stage d = {};
        d.n_layers = harness_between(rng, 1, 2);
        d.activation_bytes = 4 * harness_between(rng, 0, 3);
        d.activation_bytes_per_token = 4 * harness_between(rng, 1, 9);
        d.forward_bytes = 4 * harness_between(rng, 0, 5);
        d.forward_bytes_per_token = 4 * harness_between(rng, 0, 2);
        d.backward_bytes = 4 * harness_between(rng, 0, 5);
        d.backward_bytes_per_token = 4 * harness_between(rng, 0, 2);
        x->stages.push_back(d);
    }
}

static setting random_setting(uint64_t seed, int n_devices) {
    static const cf_schedule_kind kinds[] = {CF_SCHEDULE_PAPER,       CF_SCHEDULE_GPIPE,       CF_SCHEDULE_1F1B,
                                             CF_SCHEDULE_INTERLEAVED, CF_SCHEDULE_ZERO_BUBBLE, CF_SCHEDULE_BEST};
    setting x;
    harness_rng rng = {seed * 977 + 13};
    x.seed = seed;
    x.pack.align = harness_chance(&rng, 0.3) ? 2 : 1;
    x.pack.chunk_size = 2 * harness_between(&rng, 2, 5);
    x.pack.split = (cf_split_method)harness_between(&rng, 0, 3);
    x.pack.method = (cf_pack_method)harness_between(&rng, 0, CF_PACK_COUNT - 1);
    x.pack.no_tails = harness_chance(&rng, 0.3);
    x.pack.n_ranks = harness_chance(&rng, 0.2) ? 2 : 1;
    for (int64_t i = harness_between(&rng, 1, 8); i > 0; i--)
        x.lengths.push_back(harness_chance(&rng, 0.3) ? harness_between(&rng, 10, 40) : harness_between(&rng, 0, 9));
    x.order.shape.n_stages = harness_between(&rng, 1, 4);
    x.order.kind = kinds[harness_between(&rng, 0, 5)];
    if (harness_chance(&rng, 0.5) && x.order.kind == CF_SCHEDULE_PAPER) x.order.shape.replay = CF_REPLAY_PIPELINE;
    x.order.shape.n_virtual = x.order.kind == CF_SCHEDULE_INTERLEAVED ? 2 : 1;
    if (x.order.kind == CF_SCHEDULE_INTERLEAVED && harness_chance(&rng, 0.2)) x.order.shape.n_virtual = 3;
    if (x.order.kind > CF_SCHEDULE_INTERLEAVED && harness_chance(&rng, 0.5)) {
        x.order.shape.n_virtual = harness_between(&rng, 2, 3);
        x.order.shape.placement = CF_PLACEMENT_V;
    }
    x.order.shape.k = harness_between(&rng, 1, 3);
    x.order.shape.rank = x.pack.n_ranks - 1;
    x.order.split_backward = harness_chance(&rng, 0.5) && x.order.kind >= CF_SCHEDULE_ZERO_BUBBLE;
    x.order.max_tries = 2;
    x.is_lowered = harness_chance(&rng, 0.4);
    x.boundary_words = harness_between(&rng, 1, 3);
    x.row_words = harness_chance(&rng, 0.4) ? WIDTH : ROW;
    if (n_devices > 1 && harness_chance(&rng, 0.7))
        for (int64_t i = 0; i < x.order.shape.n_stages; i++)
            x.devices.push_back((int)harness_between(&rng, 0, n_devices - 1));
    set_stages(&x, &rng);
    (void)describe(&x);
    return x;
}

/* Returns the same setting with streamed state. */
static setting streamed(setting x) {
    harness_rng rng = {x.seed * 31 + 7};
    x.block_rows = harness_between(&rng, 1, 12);
    x.slots = harness_between(&rng, 1, 4);
    if (x.slots == 1) x.slots = 0;
    if (harness_chance(&rng, 0.4)) x.window = harness_between(&rng, 1, 30);
    (void)describe(&x);
    return x;
}

static int devices_at_hand() {
    int n = 1;
#ifdef CHUNKFLOW_CUDA_EMULATION
    cuda_emu_set_devices(3);
#endif
    return cudaGetDeviceCount(&n) == cudaSuccess ? std::min(n, 3) : 1;
}

/* ---- tests ---- */

/* Loads and runs a setting twice, with different seeds. */
static bool check_setting(const setting &x) {
    batch b;
    cf_error error = {};
    harness_note("%s", x.name.c_str());
    if (!make_batch(x, &b)) return false;
    host_model host(x, b, 77 + x.seed);
    device_model device(x, b, 77 + x.seed);
    if (!device.start(&error)) {
        FAIL("%s", error.text);
        return false;
    }
    for (int i = 0; i < 2; i++) {
        device.clear_results();
        if (!CHECK_INT(cf_executor_run(device.executor, &error), CF_OK)) {
            FAIL("%s", error.text);
            return false;
        }
        if (!same_results(device.fetch(), host)) return false;
    }
    return true;
}

TEST(one_chunk) {
    setting x = random_setting(1, 1);
    x.lengths = {3};
    x.order = cf_schedule_desc();
    x.order.shape.n_stages = x.order.shape.n_virtual = 1;
    x.pack = cf_pack_desc();
    x.pack.chunk_size = 4;
    harness_rng rng = {1};
    set_stages(&x, &rng);
    (void)describe(&x);
    check_setting(x);
}

TEST(random_batches) {
    const int n_devices = devices_at_hand();
    for (uint64_t seed = 0; seed < (uint64_t)harness_rounds(100, 10); seed++)
        if (!check_setting(random_setting(seed, n_devices))) break;
}

TEST(random_batches_streamed) {
    const int n_devices = devices_at_hand();
    for (uint64_t seed = 3000; seed < 3000 + (uint64_t)harness_rounds(150, 10); seed++)
        if (!check_setting(streamed(random_setting(seed, n_devices)))) break;
}

/* ---- trees ---- */

/* A model of owners. Each row of K and V records its chunk and row. Every pass checks all rows on its path, and a
   backward adds its own number to all of them. So by then its own rows must have the sum of the numbers of all chunks
   below it. Paths are computed here from the plan alone. */
struct tree_work {
    word *k;
    float *g;             /* NULL: a forward */
    int64_t k_rows, g_rows; /* from K to V */
    int64_t first, n;     /* of the owners */
    int layer, row_words, writes, overwrite, takes;
    float number;         /* to be added */
    const word *owners;   /* owners of the path's rows, then of its own */
    const float *sums;    /* in the same order: sums that others add to its own rows */
    int *faults;
};

__global__ static void tree_kernel(tree_work w) {
    for (int64_t i = threadIdx.x == 0 ? 0 : w.n; i < w.n; i++)
        for (int plane = 0; plane < 2; plane++) {
            const word owner = mix(w.owners[w.first + i], (word)(2 * w.layer + plane));
            word *k = w.k + (plane * w.k_rows + i) * w.row_words;
            for (int at = 0; at < w.row_words; at += w.row_words - 1) {
                if (w.writes) k[at] = owner;
                else if (k[at] != owner) atomicAdd(w.faults, 1);
                if (w.g == nullptr) continue;
                float *g = w.g + (plane * w.g_rows + i) * w.row_words;
                g[at] = (w.overwrite ? 0 : g[at]) + w.number;
                if (w.takes && g[at] != w.sums[w.first + i]) atomicAdd(w.faults, 1);
                if (w.takes) g[at] = NAN, k[at] = POISON;
            }
        }
}

struct tree_model {
    const setting &x;
    const batch &b;
    std::vector<std::vector<word>> path; /* for each chunk: owners of its path's rows and of its own */
    std::vector<std::vector<float>> sums;
    std::vector<int64_t> hidden; /* for each chunk: rows of its path that a window hides completely */
    std::vector<word *> owners; /* on the device */
    std::vector<float *> expected;
    int *faults = nullptr;
    cf_executor *executor = nullptr;
    std::vector<cf_cuda_stage> stages;
    cf_error error = {};

    static int pass(void *user, const cf_cuda_step *step) { return static_cast<tree_model *>(user)->run(step); }
    static float number_of(int64_t chunk) { return (float)(1 + chunk * 37 % 101); }
    int64_t n_own(int64_t chunk) const {
        const cf_chunk &c = b.plan->chunks[chunk];
        const bool goes_on = c.chain >= 0 && c.index + 1 < b.plan->chains[c.chain].n_chunks;
        return goes_on || x.block_rows ? b.plan->chunks[chunk].state : c.rows;
    }

    tree_model(const setting &x_, const batch &b_) : x(x_), b(b_) {
        const cf_plan *p = b.plan;
        for (int64_t i = 0; i < p->n_chunks; i++) {
            const cf_chunk &c = p->chunks[i];
            std::vector<word> all;
            std::vector<int64_t> whose; /* chunk and row of each row of the path */
            int64_t first = 0, up = i;
            for (int64_t end = c.prefix; up >= 0 && c.chain >= 0 && end > 0; up = p->chunks[first].up) {
                const int64_t g = p->chunks[up].chain;
                std::vector<word> of;
                std::vector<int64_t> chunks;
                first = p->chains[g].first_chunk;
                const int64_t begin = p->chunks[first].prefix;
                for (int64_t j = first; j < first + p->chains[g].n_chunks && p->chunks[j].prefix < end; j++)
                    for (int64_t row = 0; row < p->chunks[j].state && p->chunks[j].prefix + row < end; row++)
                        of.push_back(mix((word)j, (word)row)), chunks.push_back(j), chunks.push_back(row);
                all.insert(all.begin(), of.begin(), of.end());
                whose.insert(whose.begin(), chunks.begin(), chunks.end());
                end = std::min(end, begin);
            }
            CHECK_INT((int64_t)all.size(), c.prefix);
            int64_t unseen = first_seen(x, c.prefix);
            for (int64_t j = c.first_slice; j < c.first_slice + c.n_slices; j++)
                if (p->slices[j].up < c.first_slice && p->slices[j].begin > 0)
                    unseen = std::min(unseen, first_seen(x, p->slices[j].begin));
            hidden.push_back(unseen);
            for (int64_t row = 0; row < c.rows; row++) all.push_back(mix((word)i, (word)row));
            path.push_back(all);
            sums.emplace_back(all.size(), number_of(i));
            /* chunks on the path run earlier, so their rows exist */
            for (size_t j = 2 * (size_t)unseen; j < whose.size(); j += 2) {
                const size_t owner = (size_t)whose[j];
                sums[owner][(size_t)(p->chunks[owner].prefix + whose[j + 1])] += number_of(i);
            }
        }
        for (const cf_cuda_stage &s : x.stages) {
            stages.push_back(s);
            stages.back().activation_bytes_per_token += 8 * s.n_layers * x.row_words;
            stages.back().forward_bytes_per_token += 8 * s.n_layers * x.row_words;
            stages.back().backward_bytes_per_token += 8 * x.row_words;
        }
    }
    ~tree_model() {
        cf_executor_free(executor);
        for (word *p : owners) cudaFree(p);
        for (float *p : expected) cudaFree(p);
        cudaFree(faults);
    }

    template <typename N> static N *on_device(const std::vector<N> &from) {
        N *to = nullptr;
        CHECK(cudaMalloc((void **)&to, from.size() * sizeof(N) + 4) == cudaSuccess);
        CHECK(cudaMemcpy(to, from.data(), from.size() * sizeof(N), cudaMemcpyHostToDevice) == cudaSuccess);
        return to;
    }

    bool put(const cf_cuda_step *step, const tree_work &w) {
        cudaLaunchConfig_t config = {};
        config.gridDim = config.blockDim = dim3(1);
        config.stream = step->stream;
        return cudaLaunchKernelEx(&config, tree_kernel, w) == cudaSuccess;
    }

    bool layer(const cf_cuda_step *step, int64_t at) {
        const cf_action &a = step->step->action;
        const cf_chunk &c = *step->chunk;
        const bool backward = a.pass == CF_B || a.pass == CF_I;
        tree_work w = {};
        w.layer = (int)at, w.row_words = x.row_words, w.number = number_of(a.chunk), w.faults = faults;
        w.owners = owners[(size_t)a.chunk], w.sums = expected[(size_t)a.chunk];
        tree_work own = w;
        own.first = c.prefix, own.n = n_own(a.chunk);
        own.writes = !backward;
        own.k_rows = own.g_rows = c.rows;
        own.k = (word *)(step->activations ? step->activations : step->workspace) + 2 * at * c.rows * x.row_words;
        if (backward) own.g = (float *)step->workspace;
        if (!x.block_rows) {
            own.k = (word *)cf_state_k(&step->state, at, step->state_prefix).data, own.k_rows = step->state.rows;
            own.g = (float *)cf_state_k(&step->gradient, at, step->state_prefix).data;
            own.g_rows = step->gradient.rows;
        }
        own.overwrite = step->overwrite;
        bool ok = put(step, own);
        if (!x.block_rows && step->state_prefix > 0 && ok) { /* a chain: in place */
            w.k = (word *)cf_state_k(&step->state, at, 0).data, w.k_rows = step->state.rows;
            w.g = (float *)cf_state_k(&step->gradient, at, 0).data, w.g_rows = step->gradient.rows;
            w.overwrite = step->overwrite;
            const int64_t unseen = hidden[(size_t)a.chunk];
            tree_work nothing = w; /* also to be overwritten */
            nothing.n = w.overwrite ? unseen : 0, nothing.number = 0;
            w.k += unseen * x.row_words, w.first = unseen, w.n = step->state_prefix - unseen;
            if (w.g) w.g += unseen * x.row_words;
            ok = put(step, nothing) && put(step, w);
        }
        for (int64_t i = 0; i < step->walk->n_blocks && !x.block_rows && ok; i++) {
            const cf_cuda_block &block = step->walk->blocks[i];
            w.k = (word *)cf_state_k(&block.state, at, 0).data, w.k_rows = block.state.rows;
            w.g = (float *)cf_state_k(&block.gradient, at, 0).data, w.g_rows = block.gradient.rows;
            w.first = block.first, w.n = block.n, w.overwrite = 0;
            ok = put(step, w);
        }
        const cf_tensor k = {own.k, 0, 0}, v = {own.k + own.k_rows * x.row_words, 0, 0};
        const cf_tensor dk = {own.g, 0, 0}, dv = {own.g ? own.g + own.g_rows * x.row_words : nullptr, 0, 0};
        cf_state_block block = {};
        int64_t row = hidden[(size_t)a.chunk]; /* of the path */
        for (block.n_rows = step->walk->stream != nullptr; block.n_rows > 0 && ok;) {
            ok = cf_state_stream_next(step->walk->stream, step->stream, &block, &error) == CF_OK;
            if (!ok || block.n_rows == 0) break;
            if (block.own) {
                ok = cf_state_stream_add(step->walk->stream, &block, &dk, &dv, step->stream, &error) == CF_OK;
                continue;
            }
            w.k = (word *)block.state.data, w.k_rows = block.state.rows;
            w.g = (float *)block.gradient.data, w.g_rows = block.gradient.rows;
            w.first = row, w.n = block.n_rows;
            CHECK_INT(cf_cuda_walk_block(step->walk, block.index)->attention->rows_k, block.n_rows);
            row += block.n_rows;
            ok = put(step, w);
        }
        if (x.block_rows && step->walk->stream) CHECK_INT(row, std::max(row, c.prefix));
        if (ok && step->walk->append)
            ok = cf_state_stream_append(step->walk->stream, step->stream, at, &k, &v, &error) == CF_OK;
        own.writes = own.overwrite = 0, own.takes = 1, own.number = 0;
        return ok && (!backward || put(step, own));
    }

    int run(const cf_cuda_step *step) {
        const cf_action &a = step->step->action;
        const int64_t n = stages[(size_t)a.stage].n_layers;
        const bool backward = a.pass == CF_B || a.pass == CF_I;
        CHECK_INT(step->walk->n_levels, step->attention->n_levels);
        for (int64_t i = 0; i < n && a.pass != CF_W; i++)
            if (!layer(step, backward ? n - 1 - i : i)) return 6;
        return 0;
    }

    /* Runs twice: the second run starts with the memory that the first left. */
    bool check() {
        cf_executor_desc d = {};
        d.user = this, d.forward = d.backward = pass;
        d.n_stages = b.made->shape.n_stages, d.stages = stages.data();
        d.attention.n_heads = d.attention.n_kv_heads = 1, d.attention.head_size = x.row_words;
        d.attention.dtype = CF_DTYPE_FP32, d.attention.window = x.window;
        d.state_block_rows = x.block_rows, d.state_slots = x.slots;
        d.boundary_bytes_per_token = 4;
        faults = on_device(std::vector<int>{0});
        for (size_t i = 0; i < path.size(); i++)
            owners.push_back(on_device(path[i])), expected.push_back(on_device(sums[i]));
        CHECK(cudaDeviceSynchronize() == cudaSuccess); /* a copy may return before it has finished */
        cf_result code = cf_executor_create(&d, &executor, &error);
        if (code == CF_OK) code = cf_executor_load(executor, b.plan, b.schedule(), &error);
        for (int i = 0; i < 2 && code == CF_OK; i++) code = cf_executor_run(executor, &error);
        int n_faults = 0;
        CHECK(cudaMemcpy(&n_faults, faults, sizeof n_faults, cudaMemcpyDeviceToHost) == cudaSuccess);
        if (code != CF_OK) FAIL("%s: %s", x.name.c_str(), error.text);
        return code == CF_OK && CHECK_INT(n_faults, 0);
    }
};

/* Draws a forest: most sequences begin as an earlier one does. */
static setting random_forest(uint64_t seed, std::vector<cf_shared_prefix> *shares) {
    static const cf_schedule_kind kinds[] = {CF_SCHEDULE_PAPER, CF_SCHEDULE_GPIPE, CF_SCHEDULE_1F1B, CF_SCHEDULE_BEST};
    setting x;
    harness_rng rng = {seed * 577 + 5};
    x.seed = seed;
    x.pack.align = harness_chance(&rng, 0.3) ? 2 : 1;
    x.pack.chunk_size = 2 * harness_between(&rng, 2, 6);
    x.pack.min_shared_prefix = 1;
    shares->clear();
    for (int64_t i = 0, n = harness_between(&rng, 2, 9); i < n; i++) {
        x.lengths.push_back(harness_between(&rng, 1, 40));
        cf_shared_prefix share = {i > 0 ? harness_between(&rng, 0, i - 1) : 0, 0};
        if (i > 0 && harness_chance(&rng, 0.8))
            share.tokens = harness_between(&rng, 0, std::min(x.lengths.back(), x.lengths[(size_t)share.with]));
        shares->push_back(share);
    }
    x.pack.shared_prefixes = shares->data();
    x.order.kind = kinds[harness_between(&rng, 0, 3)];
    x.order.shape.n_stages = harness_between(&rng, 1, 3);
    x.order.shape.n_virtual = 1;
    if (harness_chance(&rng, 0.5) && x.order.kind == CF_SCHEDULE_PAPER) x.order.shape.replay = CF_REPLAY_PIPELINE;
    x.order.shape.k = harness_between(&rng, 1, 3);
    x.row_words = harness_chance(&rng, 0.4) ? WIDTH : ROW;
    x.block_rows = harness_chance(&rng, 0.5) ? harness_between(&rng, 1, 12) : 0;
    x.slots = harness_between(&rng, 2, 4);
    x.window = harness_chance(&rng, 0.4) ? harness_between(&rng, 2, 20) : 0;
    set_stages(&x, &rng);
    (void)describe(&x);
    return x;
}

TEST(trees) {
    int n_trees = 0;
    for (uint64_t seed = 0; seed < (uint64_t)harness_rounds(150, 10); seed++) {
        std::vector<cf_shared_prefix> shares;
        const setting x = random_forest(seed, &shares);
        batch b;
        harness_note("%s", x.name.c_str());
        if (!make_batch(x, &b)) return;
        if (b.plan->order == nullptr) continue;
        for (int64_t i = 0; i < b.plan->n_chains; i++) n_trees += b.plan->chunks[b.plan->chains[i].first_chunk].up >= 0;
        tree_model m(x, b);
        if (!m.check()) return;
    }
    CHECK(n_trees > 20);
}

#ifdef CHUNKFLOW_CUDA_EMULATION
/* Whatever the device runs first. */
TEST(trees_in_every_order) {
    for (uint64_t seed = 500; seed < 500 + (uint64_t)harness_rounds(16, 3); seed++) {
        std::vector<cf_shared_prefix> shares;
        setting x = random_forest(seed, &shares);
        if (x.block_rows == 0 && seed % 3 != 0) x.block_rows = 1 + (int64_t)seed % 7;
        batch b;
        harness_note("%s", x.name.c_str());
        if (!make_batch(x, &b)) return;
        if (b.plan->order == nullptr) continue;
        cuda_emu_each_policy(harness_rounds(6, 1), [&] {
            tree_model m(x, b);
            if (!m.check()) harness_note("%s, %s", x.name.c_str(), cuda_emu_policy_name());
        });
    }
    cuda_emu_defaults();
}
#endif

/* ---- memory layout, against an independent walk ---- */

/* A range of addresses that is in use during the actions begin .. end - 1 of a stage. */
struct claim {
    uintptr_t low, high;
    int64_t begin, end;
    const char *what;
    int64_t chunk;
};

struct claims {
    std::vector<claim> all;
    void add(const void *at, int64_t bytes, int64_t begin, int64_t end, const char *what, int64_t chunk) {
        const uintptr_t low = (uintptr_t)at;
        if (bytes > 0) all.push_back({low, low + (uintptr_t)bytes, begin, end, what, chunk});
    }
    int64_t peak(const char *what, int64_t n, int64_t unit) const {
        std::vector<int64_t> live((size_t)n + 1, 0);
        for (const claim &c : all)
            for (int64_t i = c.begin; i < c.end && strncmp(c.what, what, strlen(what)) == 0; i++)
                live[(size_t)i] += ((int64_t)(c.high - c.low) + unit - 1) / unit * unit;
        return *std::max_element(live.begin(), live.end());
    }
};

static bool check_disjoint(const claims &c) {
    for (size_t i = 0; i < c.all.size(); i++)
        for (size_t j = 0; j < i; j++) {
            const claim &a = c.all[i], &b = c.all[j];
            if (a.low >= b.high || b.low >= a.high || a.begin >= b.end || b.begin >= a.end) continue;
            FAIL("%s of chunk %d and %s of chunk %d share memory between actions %d and %d", a.what, (int)a.chunk,
                 b.what, (int)b.chunk, (int)std::max(a.begin, b.begin), (int)std::min(a.end, b.end));
            return false;
        }
    return true;
}

/* Positions of one stage's list by pass, virtual stage and chunk. */
typedef std::map<std::vector<int64_t>, int64_t> positions;

static int64_t at(const positions &p, int64_t pass, int64_t v, int64_t chunk) {
    const auto found = p.find({pass, v, chunk});
    return found == p.end() ? -1 : found->second;
}

static int64_t first_of(int64_t a, int64_t b) { return a >= 0 ? a : b; }

/* Claims the rows of every plane that belong to a chunk from action `begin` on. */
static void claim_rows(claims *to, const cf_state &s, int64_t first, int64_t n, int64_t begin, int64_t end,
                       const char *what, int64_t chunk) {
    const int64_t row = 4 * s.head_size;
    for (int64_t plane = 0; plane < (s.one_layer ? 2 : 2 * s.n_layers); plane++)
        to->add((const char *)s.data + (plane * s.rows + first) * row, n * row, begin, end, what, chunk);
}

/* Claims a chunk's rows: from its F, or for gradients from its chain's first backward, to its own backward. The rows of
   a chunk without a chain are claimed from the pass that keeps its activations. */
static void claim_chunk_rows(claims *to, const device_model &m, const positions &p, const seen_pass &s) {
    const cf_chunk &c = m.b.plan->chunks[s.action.chunk];
    const int64_t v = s.action.stage, chunk = s.action.chunk;
    const int64_t rows = c.chain < 0 || c.n_slices > 1 ? c.rows : m.b.plan->chunks[chunk].state;
    const int64_t own = first_of(at(p, CF_B, v, chunk), at(p, CF_I, v, chunk));
    int64_t begin = first_of(at(p, CF_R, v, chunk), at(p, CF_F, v, chunk)), held_gradient = own;
    if (c.chain >= 0) {
        begin = at(p, CF_F, v, chunk);
        const cf_chain &g = m.b.plan->chains[c.chain];
        const int64_t last = g.first_chunk + g.n_chunks - 1;
        held_gradient = first_of(at(p, CF_B, v, last), at(p, CF_I, v, last));
    }
    claim_rows(to, s.step.state, c.prefix, rows, begin, own + 1, "state", chunk);
    claim_rows(to, s.step.gradient, c.prefix, rows, held_gradient, own + 1, c.chain < 0 ? "shared" : "gradient", chunk);
}

/* Returns whether two virtual stages are on one stage, so that no transfer is needed. */
static bool on_one_stage(const device_model &m, int64_t v, int64_t other) {
    return stage_of(m.b.made, v) == stage_of(m.b.made, other);
}

/* Claims the time in which this stage needs a tensor that a pass reads. */
static void claim_input(claims *to, const device_model &m, const positions &p, const seen_pass &s,
                        const std::map<const void *, int64_t> &made) {
    const cf_action &a = s.action;
    const bool local = m.b.made->shape.replay == CF_REPLAY_LOCAL;
    const int receive = a.pass == CF_B || a.pass == CF_I ? CF_RECV_B : a.pass == CF_R && !local ? CF_RECV_R : CF_RECV_F;
    int64_t begin = at(p, receive, a.stage, a.chunk), end = s.position + 1;
    if (!s.step.input) return;
    if (a.pass == CF_F && !a.keep && local) end = at(p, CF_R, a.stage, a.chunk) + 1;
    if (a.pass == CF_R && local) return; /* its F has claimed it */
    if (on_one_stage(m, a.stage, a.stage + (receive == CF_RECV_B ? 1 : -1)))
        begin = made.count(s.step.input) ? made.at(s.step.input) + 1 : -1;
    if (!CHECK(begin >= 0)) return;
    to->add(s.step.input, s.step.boundary_bytes, begin, end, "arena: input", a.chunk);
}

static void claim_output(claims *to, const device_model &m, const positions &p, const seen_pass &s) {
    const cf_action &a = s.action;
    const int send = a.pass == CF_F ? CF_SEND_F : a.pass == CF_R ? CF_SEND_R : CF_SEND_B;
    int64_t end = at(p, send, a.stage, a.chunk) + 1;
    if (!s.step.output) return;
    if (on_one_stage(m, a.stage, a.stage + (send == CF_SEND_B ? -1 : 1)))
        end = s.position + 1; /* then it is the reader's input */
    if (!CHECK(end > s.position)) return;
    to->add(s.step.output, s.step.boundary_bytes, s.position, end, "arena: output", a.chunk);
}

static void claim_pass(claims *to, const device_model &m, const positions &p, const seen_pass &s) {
    const cf_action &a = s.action;
    if (s.step.activations && (a.pass == CF_F || a.pass == CF_R)) {
        const int64_t end = first_of(at(p, CF_B, a.stage, a.chunk), at(p, CF_W, a.stage, a.chunk));
        to->add(s.step.activations, s.step.activation_bytes, s.position, end + 1, "arena: activations", a.chunk);
    }
    claim_output(to, m, p, s);
    to->add(s.step.workspace, s.step.workspace_bytes, s.position, s.position + 1, "workspace", a.chunk);
    to->add(s.step.attention_workspace, (int64_t)s.step.attention_workspace_bytes, s.position, s.position + 1,
            "attention workspace", a.chunk);
}

/* Returns the memory of one stage for the loaded batch. */
static cf_result loaded_memory(const cf_executor *e, int64_t stage, cf_executor_memory *out, cf_error *error) {
    cf_executor_memory all[64];
    const cf_result code = cf_executor_memory_of(e, nullptr, nullptr, all, error);
    if (code == CF_OK) *out = all[stage];
    return code;
}

/* The worst ratios so far of memory laid out to memory in use. */
struct losses {
    double arena = 1.0, state = 1.0, gradient = 1.0, all = 1.0;

    void add(const cf_executor_memory &m) {
        arena = std::max(arena, (double)m.arena / (double)std::max<int64_t>(m.arena_live, 1));
        state = std::max(state, (double)m.state / (double)std::max<int64_t>(m.state_live, 1));
        gradient = std::max(gradient, (double)m.gradient / (double)std::max<int64_t>(m.gradient_live, 1));
        all = std::max(all, (double)(m.arena + m.state + m.gradient) /
                                (double)std::max<int64_t>(m.arena_live + m.state_live + m.gradient_live, 1));
    }
    void report() const {
        harness_report("laid out / live at most: %.3f; arena %.3f, state %.3f, gradient %.3f", all, arena, state,
                       gradient);
    }
};

static bool check_stage_places(const device_model &m, int64_t stage, losses *worst) {
    const cf_schedule *s = cf_executor_schedule(m.executor);
    const int64_t n = s->first[stage + 1] - s->first[stage];
    std::map<const void *, int64_t> made; /* the action that made the tensor now at each address */
    positions p;
    claims all;
    for (int64_t i = 0; i < n; i++) {
        const cf_action &a = s->actions[s->first[stage] + i];
        p[{a.pass, a.stage, a.chunk}] = i;
    }
    for (const seen_pass &x : m.seen) {
        if (x.stage != stage) continue;
        claim_pass(&all, m, p, x);
        claim_input(&all, m, p, x, made);
        if (x.step.output) made[x.step.output] = x.position;
        if (x.action.pass == CF_B || x.action.pass == CF_I) claim_chunk_rows(&all, m, p, x);
        const cf_chunk &c = m.b.plan->chunks[x.action.chunk];
        if (x.action.pass == CF_F && !x.action.keep && c.chain < 0)
            claim_rows(&all, x.step.state, 0, c.rows, x.position, x.position + 1, "state", x.action.chunk);
        if (x.action.pass == CF_F && x.action.stage == stage) /* its other virtual stages use the same workspace */
            all.add(x.step.positions, 4 * x.step.metadata->rows, 0, n, "positions", x.action.chunk);
    }
    cf_executor_memory memory = {};
    cf_error error = {};
    bool ok = check_disjoint(all) && CHECK_INT(loaded_memory(m.executor, stage, &memory, &error), CF_OK);
    worst->add(memory);
    uintptr_t low = UINTPTR_MAX, high = 0;
    for (const claim &c : all.all) {
        low = std::min(low, c.low);
        high = std::max(high, c.high);
    }
    ok = ok && (all.all.empty() || CHECK((int64_t)(high - low) <= memory.total));
    if (m.n_stages() > 1) ok = ok && CHECK_INT(memory.arena_live, all.peak("arena", n, 256));
    ok = ok && CHECK_INT(memory.state_live, all.peak("state", n, 1));
    ok = ok && CHECK_INT(memory.gradient_live, all.peak("gradient", n, 1));
    int64_t workspace[2] = {0, 0}; /* of forwards and of backwards; without attention, if all passes run */
    for (const seen_pass &x : m.seen) {
        const bool backward = x.action.pass != CF_F && x.action.pass != CF_R;
        if (x.stage == stage) workspace[backward] = std::max(workspace[backward], x.step.workspace_bytes);
    }
    ok = ok && CHECK_INT(memory.forward_workspace, (workspace[0] + 255) / 256 * 256);
    ok = ok && CHECK(memory.backward_workspace >= workspace[1]);
    ok = ok && CHECK_INT(memory.workspace, std::max(memory.forward_workspace, memory.backward_workspace));
    ok = ok && CHECK(memory.arena >= memory.arena_live && memory.state >= memory.state_live &&
                     memory.gradient >= memory.gradient_live && memory.allocated >= memory.total);
    return ok && CHECK_INT(memory.total, memory.arena + memory.state + memory.gradient + memory.workspace +
                                             memory.metadata);
}

/* Checks that the executor's counts are those of the steps. */
static bool check_books(const device_model &m, int64_t stage) {
    cf_steps *steps = nullptr;
    cf_executor_memory memory = {};
    cf_error error = {};
    const cf_schedule *s = cf_executor_schedule(m.executor);
    const bool ok = CHECK_INT(cf_steps_make(m.b.plan, s, stage, 0, nullptr, &steps, &error), CF_OK) &&
                    CHECK_INT(loaded_memory(m.executor, stage, &memory, &error), CF_OK) &&
                    CHECK_INT(memory.n_slots, steps->n_slots) && CHECK_INT(memory.n_states, steps->n_states) &&
                    CHECK_INT(memory.peak_tokens, steps->peak_tokens) &&
                    CHECK_INT(memory.peak_state_tokens, steps->peak_state_tokens) &&
                    CHECK_INT(memory.n_boundaries, steps->n_boundaries);
    cf_steps_free(steps);
    return ok;
}

TEST(places) {
    const int n_devices = devices_at_hand();
    losses worst;
    for (uint64_t seed = 1000; seed < (uint64_t)harness_rounds(1150, 1020); seed++) {
        const setting x = random_setting(seed, n_devices);
        batch b;
        cf_error error = {};
        harness_note("%s", x.name.c_str());
        REQUIRE(make_batch(x, &b));
        device_model m(x, b, seed);
        m.note = true;
        REQUIRE(m.start(&error));
        m.clear_results();
        REQUIRE(CHECK_INT(cf_executor_run(m.executor, &error), CF_OK));
        for (int64_t stage = 0; stage < m.n_stages(); stage++)
            REQUIRE(check_stage_places(m, stage, &worst) && check_books(m, stage));
    }
    worst.report();
}

/* If every chunk is in a chain and none is hybrid, the live state equals the steps' count. */
TEST(state_is_what_the_books_say) {
    setting x = random_setting(7, 1);
    x.pack = cf_pack_desc();
    x.pack.chunk_size = 8;
    x.lengths = {40, 25, 32, 17};
    x.pack.no_tails = 1;
    x.order = cf_schedule_desc();
    x.order.shape.n_stages = 3;
    x.order.shape.n_virtual = 1;
    x.devices.clear();
    harness_rng rng = {5};
    set_stages(&x, &rng);
    (void)describe(&x);
    batch b;
    cf_error error = {};
    REQUIRE(make_batch(x, &b));
    device_model m(x, b, 1);
    REQUIRE(m.start(&error));
    for (int64_t stage = 0; stage < 3; stage++) {
        cf_executor_memory memory = {};
        REQUIRE(loaded_memory(m.executor, stage, &memory, &error) == CF_OK);
        CHECK_INT(memory.state_live, memory.peak_state_tokens * x.stages[(size_t)stage].n_layers * 2 * x.row_words * 4);
    }
}

/* Checks that streamed state takes the bytes of the memory model exactly, given the largest of each count that a
   virtual stage has at any moment. Only the first stage's input is excluded: it is tokens, which the application
   holds. */
static bool check_window(const setting &x, const batch &b, const cf_model &model, cf_executor *e, int64_t *inputs) {
    const int64_t n = b.made->shape.n_stages * b.made->shape.n_virtual;
    cf_memory_desc d = {};
    cf_error error = {};
    std::vector<cf_memory_load> most((size_t)n);
    std::vector<cf_memory_report> reports((size_t)b.made->shape.n_stages);
    std::vector<int64_t> layers;
    for (const cf_cuda_stage &stage : x.stages) layers.push_back(stage.n_layers);
    const cf_schedule *s = cf_executor_schedule(e);
    for (int64_t stage = 0; stage < s->shape.n_stages; stage++) {
        const int64_t count = s->first[stage + 1] - s->first[stage];
        std::vector<cf_memory_load> loads((size_t)(count * s->shape.n_virtual));
        if (!CHECK_INT(cf_schedule_loads(b.plan, s, stage, loads.data(), count * s->shape.n_virtual, &error), CF_OK))
            return false;
        for (size_t i = 0; i < loads.size(); i++) {
            const int64_t row = (int64_t)i % s->shape.n_virtual;
            cf_memory_load *to = &most[(size_t)cf_placement_at(s->shape.placement, s->shape.n_stages, row, stage)];
            to->state_tokens = std::max(to->state_tokens, loads[i].state_tokens);
            to->state_gradient_tokens = std::max(to->state_gradient_tokens, loads[i].state_gradient_tokens);
            if (to > most.data()) to->input_tokens = std::max(to->input_tokens, loads[i].input_tokens);
            to->chunk_tokens = std::max(to->chunk_tokens, loads[i].chunk_tokens);
        }
    }
    d.model = &model;
    d.parallel.pp = s->shape.n_stages, d.parallel.n_virtual = s->shape.n_virtual;
    d.parallel.placement = s->shape.placement;
    d.parallel.layers = layers.data();
    d.state_window = (x.slots ? x.slots : 3) * x.block_rows;
    const cf_result code = cf_memory_estimate(&d, most.data(), n, reports.data(), s->shape.n_stages, &error);
    if (!CHECK_INT(code, CF_OK)) return false;
    for (int64_t stage = 0; stage < s->shape.n_stages; stage++) {
        const cf_memory_report &r = reports[(size_t)stage];
        cf_executor_memory m = {};
        if (!CHECK_INT(loaded_memory(e, stage, &m, &error), CF_OK) || !CHECK_INT(m.state, r.state) ||
            !CHECK_INT(m.gradient, r.state_gradient) || !CHECK_INT(m.inputs, r.inputs) || !CHECK_INT(m.host, r.host) ||
            !CHECK_INT(m.state_live + m.gradient_live, m.state + m.gradient) ||
            !CHECK_INT(m.total, m.arena + m.state + m.gradient + m.workspace + m.metadata))
            return false;
        *inputs += m.inputs;
    }
    return true;
}

/* Chunks of 16 rows of 64 bytes leave no gap to a multiple of 256, and one chain leaves none in host memory. */
TEST(windows_are_the_models) {
    const cf_model model = {"tiny", 12, 32, 4, 2, 8, 48, 64, 0, 0, 0, 0, 0, 0, nullptr, 0, nullptr, 0, 0, 0};
    int64_t inputs = 0;
    for (int round = 0; round < 12; round++) {
        setting x;
        cf_error error = {};
        x.lengths = {16 * (4 + round % 3), 16};
        x.pack.chunk_size = 16, x.pack.no_tails = 1;
        x.order.shape.n_stages = 1 + round % 3, x.order.shape.n_virtual = round % 4 == 3 ? 2 : 1;
        x.order.kind = x.order.shape.n_virtual == 2 ? CF_SCHEDULE_INTERLEAVED : CF_SCHEDULE_PAPER;
        x.order.shape.k = 1 + round % 2, x.order.shape.replay = CF_REPLAY_LOCAL;
        if (round % 5 == 4 && x.order.kind == CF_SCHEDULE_PAPER) x.order.shape.replay = CF_REPLAY_PIPELINE;
        x.block_rows = 5 + 3 * round, x.slots = round % 4 == 0 ? 0 : 2 + round % 3;
        x.stages.resize((size_t)(x.order.shape.n_stages * x.order.shape.n_virtual));
        for (cf_cuda_stage &d : x.stages) d.n_layers = 12 / (int64_t)x.stages.size();
        (void)describe(&x);
        harness_note("%s", x.name.c_str());
        batch b;
        REQUIRE(make_batch(x, &b));
        cf_executor_desc d = {};
        d.n_stages = x.order.shape.n_stages, d.n_virtual = x.order.shape.n_virtual, d.stages = x.stages.data();
        d.attention.n_kv_heads = 2, d.attention.head_size = 8, d.boundary_bytes_per_token = 64;
        d.state_block_rows = x.block_rows, d.state_slots = x.slots;
        cf_executor *e = nullptr;
        REQUIRE(CHECK_INT(cf_executor_create(&d, &e, &error), CF_OK));
        const bool ok = CHECK_INT(cf_executor_load(e, b.plan, b.schedule(), &error), CF_OK) &&
                        check_window(x, b, model, e, &inputs);
        cf_executor_free(e);
        REQUIRE(ok);
    }
    CHECK(inputs > 0);
}

static std::vector<int64_t> long_tailed(int64_t n, int64_t longest, harness_rng *rng) {
    std::vector<int64_t> lengths;
    for (int64_t i = 0; i < n; i++) {
        const double u = harness_unit(rng) + 1e-9, v = harness_unit(rng);
        const double normal = std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586 * v);
        lengths.push_back(std::min(longest, (int64_t)std::exp(6.5 + 1.8 * normal) + 1));
    }
    return lengths;
}

/* Sets `most` to the largest bytes of K and V, and of gradients, on a stage at one moment. As in a slot, a chain has all
   of its rows from the first pass that needs any of them to the last. Computed from plan and schedule alone; a row has
   8 fp32 numbers. */
static void live_in_whole_chains(const device_model &m, int64_t stage, int64_t most[2]) {
    const cf_schedule *s = cf_executor_schedule(m.executor);
    const cf_plan *plan = m.b.plan;
    int64_t now[2] = {0, 0};
    most[0] = most[1] = 0;
    for (int64_t i = s->first[stage]; i < s->first[stage + 1]; i++) {
        const cf_action &a = s->actions[i];
        const cf_chunk &c = plan->chunks[a.chunk];
        const cf_chain *g = c.chain >= 0 ? &plan->chains[c.chain] : nullptr;
        const cf_chunk &last = g ? plan->chunks[g->first_chunk + g->n_chunks - 1] : c;
        const bool whole = g && last.n_slices == 1, forward = a.pass == CF_F || a.pass == CF_R;
        const int64_t rows = last.prefix + (whole ? plan->slices[last.first_slice].length : last.rows);
        const int64_t bytes = (rows + 15) / 16 * 16 * m.x.stages[(size_t)a.stage].n_layers * 2 * 4 * 8;
        const bool ends = (a.pass == CF_B || a.pass == CF_I) && c.index == 0;
        if (g ? a.pass == CF_F && c.index == 0 : forward && (a.keep || a.pass == CF_F)) now[0] += bytes;
        if (g && (a.pass == CF_B || a.pass == CF_I) && c.index + 1 == g->n_chunks) now[1] += bytes;
        for (int j = 0; j < 2; j++) most[j] = std::max(most[j], now[j]);
        if (ends || (!g && a.pass == CF_F && !a.keep)) now[0] -= bytes;
        if (ends && g) now[1] -= bytes;
    }
}

/* Memory gaps on realistic batches: a long tail, four stages, activations with a 7B model's share of all. A slot is as
   large as its largest tensor, and holds a chain as a whole, though its rows come into use chunk by chunk. So rows take
   up to three times the bytes in use if few chains are long. Activations and tensors, which are most bytes, lose
   little. The bounds are on all bytes against all in use, and on each tensor against the best that slots allow. */
TEST(gaps_are_small) {
    static const cf_schedule_kind kinds[] = {CF_SCHEDULE_PAPER, CF_SCHEDULE_1F1B, CF_SCHEDULE_INTERLEAVED,
                                             CF_SCHEDULE_ZERO_BUBBLE};
    losses worst;
    devices_at_hand();
    for (int i = 0; i < harness_rounds(8, 1); i++) {
        harness_rng rng = {(uint64_t)i};
        setting x;
        x.lengths = long_tailed(harness_rounds(400, 100), 65536, &rng);
        x.pack.chunk_size = 8192;
        x.order.shape.n_stages = 4;
        x.order.kind = kinds[i % 4];
        x.order.shape.k = 4;
        x.order.shape.n_virtual = x.order.kind == CF_SCHEDULE_INTERLEAVED ? 2 : 1;
        if (i % 2 == 0 && x.order.kind == CF_SCHEDULE_PAPER) x.order.shape.replay = CF_REPLAY_PIPELINE;
        x.boundary_words = 1;
        set_stages(&x, &rng);
        for (cf_cuda_stage &d : x.stages) d.activation_bytes_per_token = d.n_layers * 60 * (2 * 8 * 4);
        (void)describe(&x);
        harness_note("%s", x.name.c_str());
        batch b;
        cf_error error = {};
        REQUIRE(make_batch(x, &b));
        device_model m(x, b, 1);
        cf_executor_desc d = m.desc();
        d.forward = d.backward = nullptr;
        d.attention.head_size = 8;
        REQUIRE(cf_executor_create(&d, &m.executor, &error) == CF_OK);
        REQUIRE(CHECK_INT(cf_executor_load(m.executor, b.plan, b.schedule(), &error), CF_OK));
        for (int64_t stage = 0; stage < 4; stage++) {
            cf_executor_memory memory = {};
            REQUIRE(loaded_memory(m.executor, stage, &memory, &error) == CF_OK);
            worst.add(memory);
            int64_t most[2];
            live_in_whole_chains(m, stage, most);
            CHECK(memory.state >= most[0] && (double)memory.state < 1.8 * (double)most[0]);
            CHECK(memory.gradient >= most[1] && (double)memory.gradient < 1.5 * (double)most[1]);
        }
    }
    CHECK(worst.arena < 1.5);
    CHECK(worst.all < 1.5);
    worst.report();
}

/* ---- a batch for all following tests ---- */

/* Two chains, one of them with a hybrid chunk, and standalone chunks; two stages. */
static setting small_setting() {
    setting x;
    harness_rng rng = {3};
    x.seed = 3;
    x.lengths = {18, 3, 2, 11, 6};
    x.pack.chunk_size = 8;
    x.order.shape.n_stages = 2;
    x.order.shape.n_virtual = 1;
    x.order.shape.k = 1;
    set_stages(&x, &rng);
    (void)describe(&x);
    return x;
}

static setting small_streamed_setting() {
    setting x = small_setting();
    x.block_rows = 3;
    x.slots = 2;
    x.order.shape.replay = CF_REPLAY_LOCAL;
    (void)describe(&x);
    return x;
}

static bool run_and_compare(device_model *m, const host_model &host) {
    cf_error error = {};
    m->clear_results();
    if (!CHECK_INT(cf_executor_run(m->executor, &error), CF_OK)) {
        FAIL("%s", error.text);
        return false;
    }
    return same_results(m->fetch(), host);
}

static bool same_memory(const cf_executor_memory &a, const cf_executor_memory &b) {
    return CHECK_INT(a.arena, b.arena) && CHECK_INT(a.arena_live, b.arena_live) && CHECK_INT(a.state, b.state) &&
           CHECK_INT(a.state_live, b.state_live) && CHECK_INT(a.gradient, b.gradient) &&
           CHECK_INT(a.gradient_live, b.gradient_live) && CHECK_INT(a.forward_workspace, b.forward_workspace) &&
           CHECK_INT(a.backward_workspace, b.backward_workspace) && CHECK_INT(a.workspace, b.workspace) &&
           CHECK_INT(a.metadata, b.metadata) && CHECK_INT(a.total, b.total) && CHECK_INT(a.host, b.host) &&
           CHECK_INT(a.n_slots, b.n_slots) && CHECK_INT(a.n_states, b.n_states) &&
           CHECK_INT(a.n_boundaries, b.n_boundaries) && CHECK_INT(a.peak_tokens, b.peak_tokens) &&
           CHECK_INT(a.peak_state_tokens, b.peak_state_tokens);
}

/* A batch takes the memory that was announced before loading. Asking changes nothing and allocates nothing on the
   device. */
TEST(memory_before_loading) {
    const int n_devices = devices_at_hand();
    for (uint64_t seed = 1300; seed < (uint64_t)harness_rounds(1330, 1310); seed++) {
        const setting x = random_setting(seed, n_devices);
        setting other = x;
        batch b, more;
        cf_error error = {};
        other.lengths.push_back(27);
        harness_note("%s", x.name.c_str());
        REQUIRE(make_batch(x, &b) && make_batch(other, &more));
        device_model m(x, b, seed);
        host_model host(x, b, seed);
        cf_executor_desc d = m.desc();
        d.memory_limit = 1 << 30;
        std::vector<cf_executor_memory> asked((size_t)m.n_stages()), then((size_t)m.n_stages());
        REQUIRE(cf_executor_create(&d, &m.executor, &error) == CF_OK && m.take_results());
        REQUIRE(CHECK_INT(cf_executor_memory_of(m.executor, b.plan, b.schedule(), asked.data(), &error), CF_OK));
        CHECK(cf_executor_schedule(m.executor) == nullptr);
        CHECK_INT(asked[0].allocated, 0);
        REQUIRE(CHECK_INT(cf_executor_load(m.executor, b.plan, b.schedule(), &error), CF_OK));
        const cf_schedule *loaded = cf_executor_schedule(m.executor);
        REQUIRE(CHECK_INT(cf_executor_memory_of(m.executor, more.plan, more.schedule(), then.data(), &error), CF_OK));
        CHECK(cf_executor_schedule(m.executor) == loaded);
        for (int64_t stage = 0; stage < m.n_stages(); stage++) {
            cf_executor_memory memory = {};
            REQUIRE(loaded_memory(m.executor, stage, &memory, &error) == CF_OK);
            REQUIRE(same_memory(asked[(size_t)stage], memory));
            CHECK_INT(then[(size_t)stage].allocated, memory.allocated);
        }
        CHECK(run_and_compare(&m, host)); /* the loaded batch still works */
        REQUIRE(CHECK_INT(cf_executor_load(m.executor, more.plan, more.schedule(), &error), CF_OK));
        for (int64_t stage = 0; stage < m.n_stages(); stage++) {
            cf_executor_memory memory = {};
            REQUIRE(loaded_memory(m.executor, stage, &memory, &error) == CF_OK);
            REQUIRE(same_memory(then[(size_t)stage], memory));
        }
    }
}

/* Bad arguments, a schedule for other stages, a limit that does not bind, and refused memory. */
TEST(asking_for_memory_fails) {
    const setting x = small_setting();
    batch b;
    cf_error error = {};
    cf_executor_memory out[2], untouched[2];
    REQUIRE(make_batch(x, &b));
    device_model m(x, b, 1);
    cf_executor_desc d = m.desc();
    harness_heap heap = {};
    const cf_allocator from = {harness_alloc, harness_release, &heap};
    d.memory_limit = 1;
    d.allocator = &from;
    REQUIRE(cf_executor_create(&d, &m.executor, &error) == CF_OK);
    memset(out, 0x5A, sizeof out);
    memcpy(untouched, out, sizeof out);
    CHECK_INT(cf_executor_memory_of(nullptr, b.plan, b.schedule(), out, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "executor");
    CHECK_INT(cf_executor_memory_of(m.executor, nullptr, b.schedule(), out, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "plan");
    CHECK_INT(cf_executor_memory_of(m.executor, b.plan, nullptr, out, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "schedule");
    CHECK_INT(cf_executor_memory_of(m.executor, b.plan, b.schedule(), nullptr, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "out");
    CHECK(memcmp(out, untouched, sizeof out) == 0);
    CHECK_INT(cf_executor_memory_of(m.executor, b.plan, b.schedule(), out, &error), CF_OK);
    CHECK(out[0].total > 1 && out[1].total > 1);
    memcpy(out, untouched, sizeof out);
    const int64_t live = (int64_t)heap.live;
    int64_t n_refused = 0;
    for (heap.fail_at = 1;; heap.fail_at++) {
        heap.calls = 0;
        const cf_result code = cf_executor_memory_of(m.executor, b.plan, b.schedule(), out, &error);
        CHECK_INT(heap.live, live);
        if (code == CF_OK) break;
        REQUIRE(CHECK_INT(code, CF_ERROR_MEMORY) && CHECK(memcmp(out, untouched, sizeof out) == 0));
        n_refused++;
    }
    CHECK(n_refused > 20);
    heap.fail_at = 0;
    cf_executor_free(m.executor);
    m.executor = nullptr;
    CHECK_INT(heap.live, 0);
    CHECK_INT(heap.faults, 0);
}

/* ---- failures caused by an application ---- */

static std::string action_text(const cf_schedule *s, int64_t stage, int64_t position) {
    const cf_action &a = s->actions[s->first[stage] + position];
    char text[100];
    (void)snprintf(text, sizeof text, "%s of chunk %d on stage %d:", cf_pass_name((cf_pass)a.pass), (int)a.chunk,
                   (int)stage);
    return text;
}

TEST(a_failing_callback) {
    const setting x = small_setting();
    batch b;
    cf_error error = {};
    REQUIRE(make_batch(x, &b));
    host_model host(x, b, 5);
    device_model m(x, b, 5);
    m.note = true;
    REQUIRE(m.start(&error));
    REQUIRE(run_and_compare(&m, host));
    const int64_t n = m.n_passes;
    CHECK(n > 20);
    for (int64_t i = 0; i < n; i++) {
        m.clear_results();
        m.fail_at = i;
        REQUIRE(CHECK_INT(cf_executor_run(m.executor, &error), CF_ERROR_CALLBACK));
        const seen_pass &last = m.seen.back();
        CHECK_INT((int64_t)m.seen.size(), i + 1); /* nothing was issued after the failure */
#ifdef CHUNKFLOW_CUDA_EMULATION
        CHECK_INT(cuda_emu_pending(), 0); /* and everything issued has ended */
#endif
        CHECK_INT(error.code, CF_ERROR_CALLBACK);
        CHECK_INT(error.got, 5);
        CHECK_INT(error.item, last.position);
        CHECK_STR(error.field, last.action.pass == CF_F || last.action.pass == CF_R ? "forward" : "backward");
        const std::string wanted = action_text(cf_executor_schedule(m.executor), last.stage, last.position);
        CHECK(strncmp(error.text, wanted.c_str(), wanted.size()) == 0);
        m.fail_at = -1;
        if (i % 7 == 0) REQUIRE(run_and_compare(&m, host));
    }
    m.clear_results();
    m.fail_at = n / 2;
    m.raises = true;
    REQUIRE(CHECK_INT(cf_executor_run(m.executor, &error), CF_ERROR_SPACE));
    CHECK(error.code == CF_ERROR_SPACE && error.item == 7 && error.wanted == 8 && error.got == 9);
    CHECK_STR(error.field, "registers");
    CHECK(strstr(error.text, ": registers[7]: spilled") != nullptr && strstr(error.text, " of chunk ") != nullptr);
    m.fail_at = -1;
    REQUIRE(run_and_compare(&m, host));
}

/* A callback fails in the middle of a layer, with blocks in transit. The next run starts its passes all the same. */
TEST(a_callback_fails_between_blocks) {
    const setting x = small_streamed_setting();
    batch b;
    cf_error error = {};
    REQUIRE(make_batch(x, &b));
    host_model host(x, b, 5);
    device_model m(x, b, 5);
    REQUIRE(m.start(&error));
    REQUIRE(run_and_compare(&m, host));
    const int64_t n = m.n_blocks;
    CHECK(n > 50);
    for (int64_t i = 0; i < n; i += harness_rounds(1, 7)) {
        m.clear_results();
        m.fail_at_block = i;
        REQUIRE(CHECK_INT(cf_executor_run(m.executor, &error), CF_ERROR_CALLBACK) && CHECK_INT(error.got, 5));
        m.fail_at_block = -1;
        REQUIRE(run_and_compare(&m, host));
    }
}

TEST(cancelled) {
    const setting x = small_setting();
    batch b;
    cf_error error = {};
    REQUIRE(make_batch(x, &b));
    host_model host(x, b, 5);
    device_model m(x, b, 5);
    REQUIRE(m.start(&error));
    REQUIRE(run_and_compare(&m, host));
    const int64_t n = m.n_progress;
    CHECK_INT(n, cf_executor_schedule(m.executor)->n_actions); /* every action of every stage is reported */
    for (int64_t i = 0; i < n; i += 3) {
        m.clear_results();
        m.cancel_at = i;
        REQUIRE(CHECK_INT(cf_executor_run(m.executor, &error), CF_ERROR_CANCELLED));
        CHECK_INT(m.n_progress, i + 1);
        CHECK_INT(error.got, 9);
        CHECK_STR(error.field, "progress");
    }
    m.cancel_at = -1;
    REQUIRE(run_and_compare(&m, host));
}

/* A callback may ask whether its stream is idle; "not ready" then stays in CUDA's last error. A failed launch that the
   callback does not check is found. */
TEST(errors_that_callbacks_leave) {
    const setting x = small_setting();
    batch b;
    cf_error error = {};
    int64_t n_busy = 0;
    REQUIRE(make_batch(x, &b));
    host_model host(x, b, 5);
    device_model m(x, b, 5);
    REQUIRE(m.start(&error));
    m.before = [&](const cf_cuda_step *step) { n_busy += cudaStreamQuery(step->stream) == cudaErrorNotReady; };
    REQUIRE(run_and_compare(&m, host));
    m.before = nullptr;
    m.in_progress = [&](const cf_step *) {
        n_busy += cudaStreamQuery(cf_executor_stream(m.executor, 0)) == cudaErrorNotReady;
    };
    REQUIRE(run_and_compare(&m, host));

    /* Drivers report it under different names. */
    cudaError_t left = cudaSuccess;
    const auto launch_badly = [&](cudaStream_t stream) {
        cudaLaunchConfig_t config = {};
        config.gridDim = dim3(1);
        config.blockDim = dim3(4096); /* more than a block can have */
        config.stream = stream;
        left = cudaLaunchKernelEx(&config, half_kernel, pass_data(), 0);
    };
    const auto says = [&](const char *where) {
        const std::string wanted = std::string(where) + " left " + cudaGetErrorName(left);
        CHECK(left != cudaSuccess);
        CHECK_INT(error.got, left);
        CHECK(strstr(error.text, wanted.c_str()) != nullptr);
    };
    m.clear_results();
    m.in_progress = nullptr;
    m.before = [&](const cf_cuda_step *step) {
        if (m.n_passes == 4) launch_badly(step->stream);
    };
    CHECK_INT(cf_executor_run(m.executor, &error), CF_ERROR_DEVICE);
    says("ward");
    CHECK_INT(m.n_passes, 5);
    CHECK_INT(cudaPeekAtLastError(), cudaSuccess);
    m.before = nullptr;
    REQUIRE(run_and_compare(&m, host));

    /* Cancels after each action in turn, from its progress callback. */
    for (int64_t at = 0; at < 12; at++) {
        int64_t position = -1;
        m.clear_results();
        m.in_progress = [&](const cf_step *p) {
            if (m.n_progress != at) return;
            position = p->position;
            launch_badly(cf_executor_stream(m.executor, 0));
        };
        CHECK_INT(cf_executor_run(m.executor, &error), CF_ERROR_DEVICE);
        says("progress");
        CHECK_INT(error.item, position);
        CHECK_INT(m.n_progress, at + 1);
    }
    m.in_progress = nullptr;
    REQUIRE(run_and_compare(&m, host));
#ifdef CHUNKFLOW_CUDA_EMULATION
    CHECK(n_busy > 0);
    CHECK_INT(cuda_emu_faults(CUDA_EMU_LAUNCH), 13);
    cuda_emu_reset();
#endif
}

/* An error that the application left earlier is neither cleared nor attributed to a pass. */
TEST(errors_from_before) {
    const setting x = small_setting();
    batch b;
    cf_error error = {};
    REQUIRE(make_batch(x, &b));
    host_model host(x, b, 5);
    device_model m(x, b, 5);
    REQUIRE(m.start(&error));
    m.clear_results();
    CHECK_INT(cudaSetDevice(12345), cudaErrorInvalidDevice);
    CHECK_INT(cf_executor_load(m.executor, b.plan, b.schedule(), &error), CF_OK);
    CHECK_INT(cudaPeekAtLastError(), cudaErrorInvalidDevice);
    CHECK_INT(cf_executor_run(m.executor, &error), CF_ERROR_DEVICE);
    CHECK_STR(error.field, "device");
    CHECK_INT(error.item, -1);
    CHECK_INT(error.got, cudaErrorInvalidDevice);
    CHECK_INT(m.n_passes, 0);
    cf_executor *other = nullptr;
    const cf_executor_desc d = m.desc();
    CHECK_INT(cf_executor_create(&d, &other, &error), CF_OK);
    cf_executor_free(other);
    CHECK_INT(cudaGetLastError(), cudaErrorInvalidDevice);
    REQUIRE(run_and_compare(&m, host));
}

/* A load or run inside a callback is refused and does no harm. */
TEST(calls_from_callbacks) {
    const setting x = small_setting();
    batch b;
    cf_error error = {};
    int64_t n_refused = 0;
    REQUIRE(make_batch(x, &b));
    host_model host(x, b, 5);
    device_model m(x, b, 5);
    REQUIRE(m.start(&error));
    m.before = [&](const cf_cuda_step *) {
        n_refused += cf_executor_load(m.executor, b.plan, b.schedule(), &error) == CF_ERROR_ARGUMENT;
        n_refused += cf_executor_run(m.executor, &error) == CF_ERROR_ARGUMENT;
    };
    m.in_progress = [&](const cf_step *) {
        n_refused += cf_executor_run(m.executor, nullptr) == CF_ERROR_ARGUMENT;
    };
    REQUIRE(run_and_compare(&m, host));
    CHECK_INT(n_refused, 2 * m.n_passes + m.n_progress);
}

/* Errors name the virtual stage and the stage that runs it. */
TEST(names_of_virtual_stages) {
    setting x = small_setting();
    harness_rng rng = {8};
    x.order.kind = CF_SCHEDULE_INTERLEAVED;
    x.order.shape.n_virtual = 2;
    set_stages(&x, &rng);
    batch b;
    cf_error error = {};
    REQUIRE(make_batch(x, &b));
    device_model m(x, b, 5);
    m.note = true;
    REQUIRE(m.start(&error));
    for (m.fail_at = 0; m.fail_at < 12; m.fail_at++) {
        char wanted[80];
        m.clear_results();
        REQUIRE(CHECK_INT(cf_executor_run(m.executor, &error), CF_ERROR_CALLBACK));
        const int v = (int)m.seen.back().action.stage;
        (void)snprintf(wanted, sizeof wanted, "on virtual stage %d (stage %d):", v, v % 2);
        CHECK(strstr(error.text, wanted) != nullptr);
    }
}

TEST(blocking_changes_nothing) {
    setting x = small_setting();
    x.blocking = 1;
    check_setting(x);
}

/* ---- descriptors, plans and schedules that do not fit ---- */

static void refuse(const cf_executor_desc &d, cf_result code, const char *field) {
    cf_executor *e = (cf_executor *)0x1;
    cf_error error = {};
    CHECK_INT(cf_executor_create(&d, &e, &error), code);
    CHECK_STR(error.field, field);
    CHECK(e == (cf_executor *)0x1);
    CHECK_INT(cf_executor_create(&d, &e, nullptr), code);
}

TEST(bad_descriptors) {
    const setting x = small_setting();
    batch b;
    REQUIRE(make_batch(x, &b));
    device_model m(x, b, 1);
    const cf_executor_desc good = m.desc();
    cf_executor *e = nullptr;
    cf_error error = {};
    const int devices[2] = {0, 99};
    cf_cuda_stage stages[2] = {x.stages[0], x.stages[1]};
    CHECK_INT(cf_executor_create(nullptr, &e, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_executor_create(&good, nullptr, &error), CF_ERROR_ARGUMENT);
#define REFUSE(change, code, field) \
    do {                            \
        cf_executor_desc d = good;  \
        change;                     \
        refuse(d, code, field);     \
    } while (0)
    REFUSE(d.n_stages = -1, CF_ERROR_ARGUMENT, "n_stages");
    REFUSE(d.n_stages = CF_MAX_STAGES + 1, CF_ERROR_ARGUMENT, "n_stages");
    REFUSE(d.n_stages = 1000, CF_ERROR_LIMIT, "n_stages");
    REFUSE(d.n_virtual = -1, CF_ERROR_ARGUMENT, "n_virtual");
    REFUSE(d.n_virtual = CF_MAX_STAGES, CF_ERROR_ARGUMENT, "n_virtual");
    REFUSE(d.stages = nullptr, CF_ERROR_ARGUMENT, "stages");
    REFUSE(d.timeout = -1.0, CF_ERROR_ARGUMENT, "timeout");
    REFUSE(d.timeout = NAN, CF_ERROR_ARGUMENT, "timeout");
    REFUSE(d.memory_limit = -1, CF_ERROR_ARGUMENT, "memory_limit");
    REFUSE(d.boundary_bytes_per_token = 0, CF_ERROR_ARGUMENT, "boundary_bytes_per_token");
    REFUSE(d.boundary_bytes_per_token = -4, CF_ERROR_ARGUMENT, "boundary_bytes_per_token");
    REFUSE(d.devices = devices, CF_ERROR_ARGUMENT, "devices");
    REFUSE(d.attention.head_size = 7, CF_ERROR_ARGUMENT, "head_size");
    REFUSE((d.attention.n_heads = 3, d.attention.n_kv_heads = 2), CF_ERROR_ARGUMENT, "n_kv_heads");
    REFUSE((d.stages = stages, stages[1].n_layers = -1), CF_ERROR_ARGUMENT, "stages.n_layers");
    REFUSE((d.stages = stages, stages[1].n_layers = 65000, d.attention.n_kv_heads = 60000), CF_ERROR_LIMIT,
           "stages.n_layers");
    stages[1] = x.stages[1];
    REFUSE((d.stages = stages, stages[0].activation_bytes = -1), CF_ERROR_ARGUMENT, "stages.activation_bytes");
    stages[0] = x.stages[0];
    REFUSE((d.stages = stages, stages[0].forward_bytes_per_token = INT64_MAX), CF_ERROR_ARGUMENT,
           "stages.forward_bytes_per_token");
    stages[0] = x.stages[0];
    REFUSE((d.stages = stages, stages[0].backward_bytes = -1), CF_ERROR_ARGUMENT, "stages.backward_bytes");
    stages[0] = x.stages[0];
    REFUSE((d.attention.n_heads = 1, d.attention.path = CF_ATTENTION_MMA), CF_ERROR_ARGUMENT, "path"); /* of fp32 */
    REFUSE((d.attention.n_heads = 1, d.attention.arch = 75, d.attention.dtype = CF_DTYPE_BF16,
            d.attention.path = CF_ATTENTION_MMA),
           CF_ERROR_ARGUMENT, "path");
    REFUSE(d.state_block_rows = -1, CF_ERROR_ARGUMENT, "state_block_rows");
    REFUSE(d.state_block_rows = ((int64_t)1 << 30) + 1, CF_ERROR_ARGUMENT, "state_block_rows");
    REFUSE((d.state_block_rows = (int64_t)1 << 30, d.attention.n_kv_heads = 1000), CF_ERROR_LIMIT, "state_block_rows");
    REFUSE((d.state_block_rows = 8, d.attention = cf_attention_desc()), CF_ERROR_ARGUMENT, "state_block_rows");
    for (int64_t slots : {(int64_t)-1, (int64_t)1, (int64_t)65, INT64_MAX})
        REFUSE((d.state_block_rows = 8, d.state_slots = slots), CF_ERROR_ARGUMENT, "state_slots");
    const cf_allocator half = {harness_alloc, nullptr, nullptr};
    REFUSE(d.allocator = &half, CF_ERROR_ARGUMENT, "allocator.release");
#ifndef CHUNKFLOW_NCCL
    REFUSE(d.nccl = (struct ncclComm *)&half, CF_ERROR_ARGUMENT, "nccl");
#endif
    /* Zero is default. */
    cf_executor_desc plain = {};
    plain.stages = x.stages.data();
    CHECK_INT(cf_executor_create(&plain, &e, &error), CF_OK);
    CHECK(cf_executor_stream(e, 0) != nullptr);
    CHECK(cf_executor_stream(e, 1) == nullptr && cf_executor_stream(e, -1) == nullptr);
    cf_executor_free(e);
}

static void refuse_load(const batch &b, const cf_executor_desc &d, cf_result code, const char *field, int64_t item) {
    cf_executor *e = nullptr;
    cf_error error = {};
    CHECK_INT(cf_executor_create(&d, &e, &error), CF_OK);
    CHECK_INT(cf_executor_load(e, b.plan, b.schedule(), &error), code);
    CHECK_STR(error.field, field);
    CHECK_INT(error.item, item);
    CHECK(cf_executor_schedule(e) == nullptr);
    cf_executor_free(e);
}

/* Sizes within their ranges whose product with a chunk, or with all chunks, is too large. */
TEST(items_that_are_too_large) {
    const setting x = small_setting();
    const int64_t most = (int64_t)1 << 46;
    batch b;
    REQUIRE(make_batch(x, &b));
    device_model m(x, b, 1);
    const cf_executor_desc good = m.desc();
    cf_cuda_stage stages[2] = {x.stages[0], x.stages[1]};
#define REFUSE_LOAD(change, field, item)                    \
    do {                                                    \
        cf_executor_desc d = good;                          \
        d.stages = stages;                                  \
        change;                                             \
        refuse_load(b, d, CF_ERROR_LIMIT, field, item);     \
        stages[0] = x.stages[0], stages[1] = x.stages[1];   \
    } while (0)
    REFUSE_LOAD(stages[1].activation_bytes_per_token = most, "stages.activation_bytes_per_token", 1);
    REFUSE_LOAD((stages[0].activation_bytes = most, stages[0].activation_bytes_per_token = 4),
                "stages.activation_bytes", 0);
    REFUSE_LOAD(stages[1].forward_bytes_per_token = most / 2, "stages.forward_bytes_per_token", 1);
    REFUSE_LOAD(stages[1].backward_bytes_per_token = most / 2, "stages.backward_bytes_per_token", 1);
    REFUSE_LOAD((stages[0].backward_bytes = most, stages[0].backward_bytes_per_token = 4),
                "stages.backward_bytes", 0);
    REFUSE_LOAD(d.boundary_bytes_per_token = most, "boundary_bytes_per_token", -1);
    setting y = x;
    y.order.shape.n_stages = 1;
    y.pack.chunk_size = 1;
    y.lengths.assign(16400, 1);
    y.order.kind = CF_SCHEDULE_GPIPE; /* keeps all chunks at once */
    y.stages.resize(1);
    y.stages[0].activation_bytes = most - 1024;
    batch many;
    REQUIRE(make_batch(y, &many));
    device_model of_many(y, many, 1);
    refuse_load(many, of_many.desc(), CF_ERROR_OVERFLOW, "stages", 0);
}

/* Plans with impossible rows or positions. */
TEST(damaged_plans) {
    const setting x = small_setting();
    batch b;
    REQUIRE(make_batch(x, &b));
    device_model m(x, b, 1);
    const cf_executor_desc d = m.desc();
    const cf_chain *chain = nullptr;
    for (int64_t i = 0; i < b.plan->n_chains; i++)
        if (b.plan->chains[i].n_chunks > 1) chain = &b.plan->chains[i];
    REQUIRE(chain != nullptr);
    const int64_t first = chain->first_chunk;
    cf_chunk *chunk = &b.plan->chunks[first];
    cf_slice *slice = &b.plan->slices[chunk->first_slice];
    const cf_slice was = *slice;
    slice->begin = INT32_MAX;
    refuse_load(b, d, CF_ERROR_LIMIT, "slices", chunk->first_slice);
    *slice = was;
    chunk[1].prefix -= 1;
    refuse_load(b, d, CF_ERROR_PLAN, "prefix", first + 1);
    chunk[1].prefix += 1;
    chunk->n_slices = 2;
    refuse_load(b, d, CF_ERROR_PLAN, "n_slices", first);
    chunk->n_slices = 1;
}

TEST(bad_loads) {
    const setting x = small_setting();
    batch b;
    cf_error error = {};
    cf_executor_memory memory = {};
    cf_timeline *timeline = nullptr;
    REQUIRE(make_batch(x, &b));
    device_model m(x, b, 1);
    cf_executor_desc d = m.desc();
    REQUIRE(m.take_results() && cf_executor_create(&d, &m.executor, &error) == CF_OK);
    cf_executor *e = m.executor;
    CHECK_INT(cf_executor_run(e, &error), CF_ERROR_ARGUMENT); /* before a load */
    CHECK(cf_executor_schedule(e) == nullptr);
    CHECK_INT(loaded_memory(e, 0, &memory, &error), CF_OK);
    CHECK_INT(memory.total + memory.allocated, 0);
    CHECK_INT(cf_executor_load(nullptr, b.plan, b.schedule(), &error), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_executor_load(e, nullptr, b.schedule(), &error), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_executor_load(e, b.plan, nullptr, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_executor_run(nullptr, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_executor_memory_of(nullptr, nullptr, nullptr, &memory, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_executor_memory_of(e, nullptr, nullptr, nullptr, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_executor_timeline(e, nullptr, &timeline, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_executor_timeline(nullptr, nullptr, &timeline, &error), CF_ERROR_ARGUMENT);
    CHECK(timeline == nullptr);
    CHECK(cf_executor_stream(nullptr, 0) == nullptr && cf_executor_schedule(nullptr) == nullptr);
    cf_executor_free(nullptr);

    /* Schedules for other numbers of stages, of another plan, and one whose lists are out of order. */
    setting y = x;
    y.order.shape.n_stages = 3;
    y.stages.push_back(y.stages[0]);
    batch other;
    REQUIRE(make_batch(y, &other));
    CHECK_INT(cf_executor_load(e, other.plan, other.schedule(), &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "n_stages");
    y = x;
    y.lengths = {5, 6, 7};
    batch short_one;
    REQUIRE(make_batch(y, &short_one));
    CHECK(cf_executor_load(e, short_one.plan, b.schedule(), &error) != CF_OK);
    batch broken;
    REQUIRE(make_batch(x, &broken));
    std::swap(broken.made->actions[0], broken.made->actions[1]);
    std::swap(broken.made->actions[2], broken.made->actions[3]);
    CHECK_INT(cf_executor_load(e, broken.plan, broken.schedule(), &error), CF_ERROR_SCHEDULE);
    CHECK_INT(cf_executor_run(e, &error), CF_ERROR_ARGUMENT);
    CHECK(cf_executor_schedule(e) == nullptr);

    /* Slices outside their chunk. */
    batch damaged;
    REQUIRE(make_batch(x, &damaged));
    cf_slice *slice = &damaged.plan->slices[damaged.plan->chunks[0].first_slice];
    slice->offset = 1000;
    CHECK_INT(cf_executor_load(e, damaged.plan, damaged.schedule(), &error), CF_ERROR_PLAN);
    slice->offset = 0;
    damaged.plan->chunks[0].rows = INT64_MAX;
    CHECK(cf_executor_load(e, damaged.plan, damaged.schedule(), &error) != CF_OK);

    /* And then a good one. */
    host_model host(x, b, 1);
    CHECK_INT(cf_executor_load(e, b.plan, b.schedule(), &error), CF_OK);
    REQUIRE(run_and_compare(&m, host));

    /* Whatever a load returns, the previous batch is gone: its plan may be freed. */
    CHECK_INT(cf_executor_load(e, nullptr, b.schedule(), &error), CF_ERROR_ARGUMENT);
    CHECK(cf_executor_schedule(e) == nullptr);
    CHECK_INT(cf_executor_run(e, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_executor_load(e, b.plan, b.schedule(), &error), CF_OK);
    CHECK_INT(cf_executor_load(e, b.plan, nullptr, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_executor_run(e, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_executor_load(e, b.plan, b.made, &error), CF_OK); /* lowers the schedule, and keeps the result */
    CHECK_INT(cf_executor_load(e, b.plan, cf_executor_schedule(e), &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "schedule");
    CHECK_INT(cf_executor_load(e, b.plan, b.schedule(), &error), CF_OK);
    REQUIRE(run_and_compare(&m, host));
    CHECK_INT(cf_executor_timeline(e, nullptr, &timeline, &error), CF_ERROR_ARGUMENT); /* without desc.timeline */
}

static int count_pass(void *user, const cf_cuda_step *step) {
    CHECK(step->state.data == nullptr && step->gradient.data == nullptr);
    ++*static_cast<int64_t *>(user);
    return 0;
}

/* A model that keeps its own state. */
TEST(no_state) {
    setting x = small_setting();
    x.timeline = 1;
    batch b;
    cf_error error = {};
    cf_timeline *measured = nullptr;
    int64_t n_passes = 0;
    REQUIRE(make_batch(x, &b));
    device_model m(x, b, 1);
    cf_executor_desc d = m.desc();
    d.attention = cf_attention_desc();
    d.user = &n_passes;
    d.forward = d.backward = count_pass;
    d.progress = nullptr;
    REQUIRE(CHECK_INT(cf_executor_create(&d, &m.executor, &error), CF_OK));
    REQUIRE(CHECK_INT(cf_executor_load(m.executor, b.plan, b.schedule(), &error), CF_OK));
    REQUIRE(CHECK_INT(cf_executor_run(m.executor, &error), CF_OK));
    CHECK_INT(n_passes, b.made->n_actions);
    for (int64_t stage = 0; stage < m.n_stages(); stage++) {
        cf_executor_memory memory = {};
        REQUIRE(loaded_memory(m.executor, stage, &memory, &error) == CF_OK);
        CHECK(memory.arena > 0);
        CHECK_INT(memory.state + memory.state_live + memory.gradient + memory.gradient_live + memory.host, 0);
    }
    CHECK_INT(cf_executor_timeline(m.executor, nullptr, &measured, &error), CF_OK);
    cf_timeline_free(measured);
}

/* ---- memory across loads ---- */

TEST(loads_reuse_memory) {
    setting x = small_setting();
    setting y = x;
    y.lengths = {30, 3, 2, 29, 6, 7, 8, 1};
    batch small, large;
    cf_error error = {};
    REQUIRE(make_batch(x, &small) && make_batch(y, &large));
    host_model small_host(x, small, 4), large_host(y, large, 4);
    int64_t most = 0;
    device_model *models[2] = {new device_model(x, small, 4), new device_model(y, large, 4)};
    cf_executor_desc d = models[0]->desc();
    static device_model *now; /* the callbacks' model changes with the batch */
    d.forward = d.backward = [](void *, const cf_cuda_step *step) { return now->run_pass(step); };
    d.progress = nullptr;
    cf_executor *e = nullptr;
    REQUIRE(cf_executor_create(&d, &e, &error) == CF_OK && models[0]->take_results() && models[1]->take_results());
    for (int i = 0; i < 6; i++) {
        const bool is_large = i % 3 == 1;
        now = models[is_large];
        now->executor = e;
        CHECK_INT(cf_executor_load(e, now->b.plan, now->b.schedule(), &error), CF_OK);
        CHECK(run_and_compare(now, is_large ? large_host : small_host));
        cf_executor_memory memory = {};
        CHECK(loaded_memory(e, 0, &memory, &error) == CF_OK);
        most = std::max(most, memory.total);
        CHECK_INT(memory.allocated, most); /* never shrinks, never grows past the largest */
        now->executor = nullptr;
    }
    /* A limit between the two needs admits only the small batch, and the error gives the large one's need. */
    cf_executor_memory memory = {};
    now = models[0];
    CHECK(cf_executor_load(e, small.plan, small.schedule(), &error) == CF_OK);
    int64_t limit = 0;
    for (int64_t stage = 0; stage < 2; stage++) {
        CHECK(loaded_memory(e, stage, &memory, &error) == CF_OK);
        limit = std::max(limit, memory.total);
    }
    cf_executor_free(e);
    d.memory_limit = limit;
    REQUIRE(cf_executor_create(&d, &e, &error) == CF_OK);
    CHECK_INT(cf_executor_load(e, large.plan, large.schedule(), &error), CF_ERROR_LIMIT);
    CHECK_STR(error.field, "memory_limit");
    CHECK(error.item >= 0 && error.item < 2 && error.wanted > limit);
    CHECK_INT(cf_executor_run(e, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_executor_load(e, small.plan, small.schedule(), &error), CF_OK);
    now->executor = e;
    CHECK(run_and_compare(now, small_host));
    delete models[0]; /* frees the executor */
    delete models[1];
}

/* Batches of different lengths, one without a chain, one after another: each gets its own ring. */
TEST(loads_stream_anew) {
    std::vector<setting> settings(3, small_streamed_setting());
    settings[1].lengths = {40, 3, 2, 29, 6};
    settings[2].lengths = {5, 6, 7};
    batch batches[3];
    std::vector<std::unique_ptr<host_model>> hosts;
    std::vector<std::unique_ptr<device_model>> models;
    static device_model *now;
    cf_error error = {};
    for (size_t i = 0; i < 3; i++) {
        REQUIRE(make_batch(settings[i], &batches[i]));
        hosts.emplace_back(new host_model(settings[i], batches[i], 4));
        hosts[i]->run();
        models.emplace_back(new device_model(settings[i], batches[i], 4));
        REQUIRE(models[i]->take_results());
    }
    cf_executor_desc d = models[0]->desc();
    d.forward = d.backward = [](void *, const cf_cuda_step *step) { return now->run_pass(step); };
    d.progress = nullptr;
    cf_executor *e = nullptr;
    REQUIRE(cf_executor_create(&d, &e, &error) == CF_OK);
    for (int i = 0; i < 8; i++) {
        const size_t which = (size_t)(i * 5 % 3);
        cf_executor_memory memory = {};
        now = models[which].get();
        now->executor = e;
        CHECK_INT(cf_executor_load(e, now->b.plan, now->b.schedule(), &error), CF_OK);
        CHECK(loaded_memory(e, 1, &memory, &error) == CF_OK);
        CHECK_INT(memory.state, which == 2 ? 0 : 2 * 3 * 2 * 4 * ROW); /* equal for all lengths */
        CHECK((memory.host > 0) == (which != 2));
        CHECK(run_and_compare(now, *hosts[which]));
        now->executor = nullptr;
    }
    cf_executor_free(e);
}

/* ---- attention objects ---- */

TEST(attention_of_each_chunk) {
    setting x = small_setting();
    x.pack.align = 2;
    batch b;
    cf_error error = {};
    REQUIRE(make_batch(x, &b));
    device_model m(x, b, 1);
    cf_executor_desc d = m.desc();
    static int64_t n_seen;
    n_seen = 0;
    d.attention.n_heads = 2;
    d.attention.n_kv_heads = 1;
    d.attention.head_size = 64;
    d.attention.dtype = CF_DTYPE_BF16;
    d.forward = d.backward = [](void *, const cf_cuda_step *step) {
        const cf_attention *a = step->attention;
        const cf_chunk *c = step->chunk;
        int n_processors = 0;
        if (!CHECK(a != nullptr) || !CHECK_INT(a->desc.n_slices, c->n_slices)) return 1;
        CHECK(cudaDeviceGetAttribute(&n_processors, cudaDevAttrMultiProcessorCount, step->device) == cudaSuccess);
        CHECK_INT(a->desc.n_processors, n_processors);
        const cf_slice *last = step->plan->slices + c->first_slice + c->n_slices - 1;
        CHECK_INT(a->rows_q, c->n_slices ? last->offset + last->length : 0);
        CHECK_INT(step->metadata->cu_seqlens_q[step->metadata->n_seqs], c->rows);
        const bool forward = step->step->action.pass == CF_F || step->step->action.pass == CF_R;
        CHECK(step->attention_workspace_bytes >= (forward ? a->forward_bytes : a->backward_bytes));
        std::vector<unsigned char> tiles(a->tiles_bytes + 1);
        std::vector<int32_t> ids((size_t)c->rows + 1);
        CHECK(cudaMemcpy(tiles.data(), step->tiles, a->tiles_bytes, cudaMemcpyDeviceToHost) == cudaSuccess);
        CHECK(memcmp(tiles.data(), a->tiles, a->tiles_bytes) == 0);
        CHECK(cudaMemcpy(ids.data(), step->positions, (size_t)c->rows * 4, cudaMemcpyDeviceToHost) == cudaSuccess);
        int64_t n = 0;
        for (int64_t s = c->first_slice; s < c->first_slice + c->n_slices; s++)
            for (int64_t t = 0; t < step->plan->slices[s].length; t++, n++)
                CHECK_INT(ids[(size_t)(step->plan->slices[s].offset + t)], step->plan->slices[s].begin + t);
        CHECK_INT(std::count(ids.begin(), ids.begin() + c->rows, -1), c->rows - n);
        CHECK((uintptr_t)step->tiles % 256 == 0 && (uintptr_t)step->positions % 256 == 0);
        CHECK(step->step->action.pass == CF_W || (uintptr_t)step->state.data % 256 == 0);
        n_seen++;
        return 0;
    };
    REQUIRE(cf_executor_create(&d, &m.executor, &error) == CF_OK);
    CHECK_INT(cf_executor_load(m.executor, b.plan, b.schedule(), &error), CF_OK);
    CHECK_INT(cf_executor_run(m.executor, &error), CF_OK);
    CHECK(n_seen > 20);
}

#ifdef CHUNKFLOW_CUDA_EMULATION
/* All stages use one attention path. Devices that cannot start what the least capable one can are refused when the
   executor is made, not at the first launch. */
TEST(devices_that_differ) {
    static const struct {
        int arch[2];
        cf_dtype dtype;
        cf_attention_path asked, wanted;
        int64_t item; /* the refused device; -1: none */
    } cases[] = {{{90, 90}, CF_DTYPE_BF16, CF_ATTENTION_AUTO, CF_ATTENTION_WGMMA, -1},
                 {{90, 100}, CF_DTYPE_BF16, CF_ATTENTION_AUTO, CF_ATTENTION_MMA, -1},
                 {{100, 90}, CF_DTYPE_FP16, CF_ATTENTION_AUTO, CF_ATTENTION_MMA, -1},
                 {{90, 100}, CF_DTYPE_FP32, CF_ATTENTION_AUTO, CF_ATTENTION_UNFUSED, -1},
                 {{80, 90}, CF_DTYPE_BF16, CF_ATTENTION_AUTO, CF_ATTENTION_MMA, -1},
                 {{90, 100}, CF_DTYPE_BF16, CF_ATTENTION_WGMMA, CF_ATTENTION_WGMMA, 1},
                 {{80, 90}, CF_DTYPE_BF16, CF_ATTENTION_WGMMA, CF_ATTENTION_WGMMA, -2},
                 {{90, 120}, CF_DTYPE_BF16, CF_ATTENTION_AUTO, CF_ATTENTION_MMA, 1},
                 {{86, 80}, CF_DTYPE_BF16, CF_ATTENTION_MMA, CF_ATTENTION_MMA, 0},
                 {{86, 120}, CF_DTYPE_BF16, CF_ATTENTION_MMA, CF_ATTENTION_MMA, -1},
                 {{90, 120}, CF_DTYPE_BF16, CF_ATTENTION_UNFUSED, CF_ATTENTION_UNFUSED, -1}};
    const int devices[2] = {0, 1};
    const setting x = small_setting();
    batch b;
    REQUIRE(make_batch(x, &b));
    cuda_emu_set_devices(2);
    for (const auto &one : cases) {
        device_model m(x, b, 1);
        cf_executor_desc d = m.desc();
        cf_error error = {};
        static cf_attention_path path;
        for (int i = 0; i < 2; i++) cuda_emu_set_arch_of(i, one.arch[i]);
        d.devices = devices;
        d.attention.n_heads = 2, d.attention.n_kv_heads = 1, d.attention.head_size = 64;
        d.attention.dtype = one.dtype, d.attention.path = one.asked;
        d.forward = d.backward = [](void *, const cf_cuda_step *step) { return path = step->attention->path, 0; };
        const cf_result code = cf_executor_create(&d, &m.executor, &error);
        harness_note("%d and %d: %s", one.arch[0], one.arch[1], error.text);
        CHECK_INT(code, one.item == -1 ? CF_OK : CF_ERROR_ARGUMENT);
        if (code != CF_OK) {
            CHECK_STR(error.field, one.item == -2 ? "path" : "devices");
            CHECK_INT(error.item, one.item == -2 ? -1 : one.item);
            continue;
        }
        CHECK_INT(cf_executor_load(m.executor, b.plan, b.schedule(), &error), CF_OK);
        CHECK_INT(cf_executor_run(m.executor, &error), CF_OK);
        CHECK_INT(path, one.wanted);
    }
    cuda_emu_reset();
}
#endif

/* Counts the pairs under a window of the chunk's tokens with its own keys, then with all keys. */
static int64_t count_pairs(const cf_plan *plan, const cf_chunk &c, int64_t window, bool with_prefix) {
    int64_t n = 0;
    for (int64_t i = 0; i < c.n_slices; i++)
        for (int64_t query = 0; query < plan->slices[c.first_slice + i].length; query++)
            for (int64_t key = i == 0 && with_prefix ? -c.prefix : 0; key <= query; key++)
                n += window == 0 || key > query - window;
    return n;
}

static int64_t window_of_blocks, blocks_seen;

static void check_tiles(const cf_attention *a, const void *tiles) {
    std::vector<unsigned char> there(a->tiles_bytes + 1);
    CHECK((uintptr_t)tiles % 256 == 0);
    CHECK(cudaMemcpy(there.data(), tiles, a->tiles_bytes, cudaMemcpyDeviceToHost) == cudaSuccess);
    CHECK(memcmp(there.data(), a->tiles, a->tiles_bytes) == 0);
}

/* The attention objects of a chunk and of its prefix's blocks together hide and show the same keys as one object with
   all keys. */
static int check_blocks(void *, const cf_cuda_step *step) {
    const cf_chunk &c = *step->chunk;
    const bool forward = step->step->action.pass == CF_F || step->step->action.pass == CF_R;
    int64_t pairs = step->attention->pairs, row = 0, next = 0, n_objects = 0;
    const cf_attention *before = nullptr;
    if (step->step->action.pass == CF_W || !step->walk->stream) return 0;
    CHECK_INT(step->attention->desc.prefix, c.prefix);
    CHECK_INT(pairs, count_pairs(step->plan, c, window_of_blocks, false));
    for (int64_t i = 0, n; (n = cf_state_stream_block(5, c.prefix, window_of_blocks, i, &row)) > 0; i++) {
        const cf_cuda_block *block = cf_cuda_walk_block(step->walk, i);
        if (!CHECK(block != nullptr)) return 1;
        CHECK(i == 0 || row == next);
        next = row + n;
        CHECK_INT(block->attention->rows_k, n);
        CHECK(step->attention_workspace_bytes >=
              (forward ? block->attention->forward_bytes : block->attention->backward_bytes));
        check_tiles(block->attention, block->tiles);
        pairs += block->attention->pairs;
        n_objects += block->attention != before;
        before = block->attention;
        blocks_seen++;
    }
    CHECK_INT(next, blocks_seen > 0 && step->walk->n_blocks > 0 ? c.prefix : 0);
    CHECK_INT(pairs, count_pairs(step->plan, c, window_of_blocks, true));
    CHECK_INT(n_objects, step->walk->n_blocks);
    if (window_of_blocks == 0) CHECK(step->walk->n_blocks <= 2);
    CHECK(cf_cuda_walk_block(step->walk, -1) == nullptr);
    return 0;
}

TEST(attention_of_each_block) {
    for (const int64_t window : {0, 1, 7, 23, 1000}) {
        setting x = small_setting();
        x.lengths = {61, 30, 5, 3};
        x.pack.align = 2;
        batch b;
        cf_error error = {};
        REQUIRE(make_batch(x, &b));
        device_model m(x, b, 1);
        cf_executor_desc d = m.desc();
        d.attention.n_heads = 2, d.attention.n_kv_heads = 1, d.attention.head_size = 64;
        d.attention.dtype = CF_DTYPE_BF16;
        d.attention.window = window_of_blocks = window;
        d.state_block_rows = 5;
        d.forward = d.backward = check_blocks;
        blocks_seen = 0;
        REQUIRE(cf_executor_create(&d, &m.executor, &error) == CF_OK);
        CHECK_INT(cf_executor_load(m.executor, b.plan, b.schedule(), &error), CF_OK);
        CHECK_INT(cf_executor_run(m.executor, &error), CF_OK);
        CHECK((blocks_seen > 50) == (window != 1));
    }
    CHECK(cf_cuda_walk_block(nullptr, 0) == nullptr);
}

/* Attention gets a layer and its arrays: bad arguments are refused before anything is put on the stream. The examples
   check its results against unchunked training. */
static int one_layer(void *layer, const cf_cuda_step *step) {
    const int64_t bytes = step->chunk->rows * 256; /* two heads of 64 numbers */
    cf_layer_attention x = {};
    char *at = (char *)step->workspace;
    for (cf_tensor *one : {&x.q, &x.k, &x.v, &x.out, &x.dout, &x.dq, &x.dk, &x.dv}) one->data = at, at += bytes;
    x.lse = (float *)(void *)at;
    x.layer = *(const int64_t *)layer;
    if (step->step->action.pass == CF_W) return 0;
    const bool forward = step->step->action.pass == CF_F || step->step->action.pass == CF_R;
    return (forward ? cf_layer_attention_forward : cf_layer_attention_backward)(step, &x, step->error) != CF_OK;
}

TEST(layers_that_are_refused) {
    cf_error error = {};
    cf_layer_attention x = {};
    cf_attention_desc d = {};
    cf_cuda_step step = {};
    const cf_attention *a = nullptr;
    const int32_t cu[2] = {0, 10};
    cf_chunk chunk = {};
    std::vector<uint64_t> memory(4096);
    d.n_heads = 2, d.head_size = 64, d.n_slices = 1, d.cu_seqlens_q = d.cu_seqlens_k = cu, d.arch = 80;
    REQUIRE(cf_attention_prepare(&d, memory.data(), memory.size() * 8, &a, &error) == CF_OK);
    chunk.rows = 10;
    step.chunk = &chunk;
    for (auto *run : {cf_layer_attention_forward, cf_layer_attention_backward}) {
        step.attention = nullptr, x.layer = 0;
        CHECK_INT(run(nullptr, &x, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, "step");
        CHECK_INT(run(&step, nullptr, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, "layer");
        CHECK_INT(run(&step, &x, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, "attention");
        step.attention = a, x.layer = -1;
        CHECK_INT(run(&step, &x, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, "layer");
        x.layer = 0, step.attention_workspace_bytes = 256;
        CHECK_INT(run(&step, &x, &error), CF_ERROR_SPACE);
        CHECK_STR(error.field, "attention_workspace_bytes");
        step.attention_workspace_bytes = 0;
    }
    CHECK(cf_layer_attention_bytes(a, 10) >= a->backward_bytes + 10 * 2 * 64 * 2);
    CHECK_INT(cf_layer_attention_bytes(a, 10) % 256, 0);

    setting s = small_setting();
    batch b;
    s.block_rows = 8;
    for (cf_cuda_stage &one : s.stages) one.n_layers = 2;
    REQUIRE(make_batch(s, &b));
    for (const int64_t layer : {1, 2}) {
        device_model m(s, b, 1);
        cf_executor_desc e = m.desc();
        std::vector<cf_cuda_stage> stages = s.stages;
        for (cf_cuda_stage &one : stages) one.forward_bytes_per_token = one.backward_bytes_per_token = 4096;
        e.stages = stages.data(), e.user = const_cast<int64_t *>(&layer), e.progress = nullptr;
        e.forward = e.backward = one_layer;
        e.attention = cf_attention_desc();
        e.attention.n_heads = 2, e.attention.n_kv_heads = 2, e.attention.head_size = 64;
        REQUIRE(cf_executor_create(&e, &m.executor, &error) == CF_OK);
        REQUIRE(cf_executor_load(m.executor, b.plan, b.schedule(), &error) == CF_OK);
        CHECK_INT(cf_executor_run(m.executor, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, "layer");
        CHECK_INT(error.got, layer);
    }
}

/* Lays out one sequence of a 7B shape on four stages, divided by TP 4: 28 layers, 7 query heads and a key head of 128,
   hidden 3584. Replay is local. The state and its gradient are in rings of three blocks, or on the device. */
static bool lay_out_sequence(int64_t tokens, int64_t chunk_size, int64_t block_rows, cf_executor_memory *stages) {
    setting x;
    batch b;
    cf_error error = {};
    cf_executor_desc d = {};
    cf_executor *e = nullptr;
    x.lengths = {tokens};
    x.pack.chunk_size = chunk_size;
    x.order.shape.n_stages = 4, x.order.shape.n_virtual = 1, x.order.shape.k = 1;
    x.order.shape.replay = CF_REPLAY_LOCAL;
    x.order.kind = CF_SCHEDULE_1F1B;
    x.stages.resize(4);
    for (cf_cuda_stage &s : x.stages)
        s.n_layers = 7, s.activation_bytes_per_token = 7 * 60000, s.backward_bytes_per_token = 60000;
    (void)describe(&x);
    if (!make_batch(x, &b)) return false;
    d.n_stages = 4, d.stages = x.stages.data(), d.boundary_bytes_per_token = 2 * 3584;
    d.attention.n_heads = 7, d.attention.n_kv_heads = 1, d.attention.head_size = 128, d.attention.arch = 80;
    d.state_block_rows = block_rows;
    const bool ok = CHECK_INT(cf_executor_create(&d, &e, &error), CF_OK) &&
                    CHECK_INT(cf_executor_memory_of(e, b.plan, b.schedule(), stages, &error), CF_OK);
    cf_executor_free(e);
    return ok;
}

TEST(device_bytes_of_any_length) {
    const int64_t chunk_size = harness_rounds(8192, 512), least = 4 * chunk_size;
    cf_executor_memory first[4], now[4], resident[4];
    std::string said;
    for (const int64_t tokens : {least, 8 * least, 32 * least}) {
        REQUIRE(lay_out_sequence(tokens, chunk_size, chunk_size, now));
        REQUIRE(lay_out_sequence(tokens, chunk_size, 0, resident));
        for (int stage = 0; stage < 4; stage++) {
            const cf_executor_memory &m = now[stage];
            if (tokens == least) first[stage] = m;
            CHECK_INT(m.total - m.metadata, first[stage].total - first[stage].metadata);
            CHECK_INT(m.inputs, stage > 0 ? 2 * chunk_size * 2 * 3584 : 0);
            CHECK_INT(m.host, tokens * 7 * 2 * 128 * (2 + 4) + (stage > 0 ? (tokens - chunk_size) * 2 * 3584 : 0));
            CHECK_INT(m.metadata - first[stage].metadata, 4 * (tokens - least)); /* positions */
            CHECK(m.metadata < 64 * least + 4 * tokens); /* and tiles, which full chunks share */
            CHECK(tokens < 32 * least || resident[stage].total > 2 * m.total);
        }
        char text[80];
        (void)snprintf(text, sizeof text, " %lld/%lld/%lld", (long long)now[3].metadata, (long long)now[3].host,
                       (long long)resident[3].total);
        said += text;
    }
    harness_report("stage 3: %lld bytes and metadata/host/resident of%s", (long long)(now[3].total - now[3].metadata),
                   said.c_str());
}

#ifdef CHUNKFLOW_CUDA_EMULATION

/* ---- every order of streams ---- */

TEST(every_order_streamed) {
    const int n_devices = devices_at_hand();
    for (uint64_t seed = 3500; seed < (uint64_t)harness_rounds(3530, 3501); seed++) {
        setting x = streamed(random_setting(seed, n_devices));
        if (seed % 2 == 0) x.order.shape.replay = CF_REPLAY_LOCAL, (void)describe(&x);
        bool ok = true;
        cuda_emu_each_policy(harness_rounds(3, 1), [&] {
            if (ok) ok = check_setting(x) && CHECK_INT(cuda_emu_faults(), 0);
        });
        if (ok) continue;
        FAIL("%s: %s", cuda_emu_policy_name(), cuda_emu_first_fault());
        break;
    }
    cuda_emu_defaults();
}

TEST(every_order) {
    const int n_devices = devices_at_hand();
    for (uint64_t seed = 2008; seed < (uint64_t)harness_rounds(2024, 2009); seed++) {
        const setting x = random_setting(seed, n_devices);
        bool ok = true;
        cuda_emu_each_policy(harness_rounds(3, 1), [&] {
            if (ok) ok = check_setting(x) && CHECK_INT(cuda_emu_faults(), 0);
        });
        if (ok) continue;
        FAIL("%s: %s", cuda_emu_policy_name(), cuda_emu_first_fault());
        break;
    }
    cuda_emu_defaults();
}

/* Inputs of chunks of very different sizes are kept at the same time, and return one soon after another through the
   same two slots. Stages without layers have no state, so no other wait hides a missing one. */
TEST(inputs_come_back) {
    setting x = small_streamed_setting();
    x.lengths = {36, 7, 30, 5, 3, 27};
    x.order.shape.n_stages = 3;
    x.boundary_words = 64;
    x.order.shape.k = 1;
    harness_rng rng = {9};
    set_stages(&x, &rng);
    x.stages[1].n_layers = x.stages[2].n_layers = 0;
    (void)describe(&x);
    bool ok = true;
    cuda_emu_each_policy(harness_rounds(10, 1), [&] {
        if (ok) ok = check_setting(x) && CHECK_INT(cuda_emu_faults(), 0);
    });
    CHECK(ok);
    cuda_emu_defaults();
}

/* Devices that cannot access each other's memory: copies between them are staged. */
TEST(without_peer_access) {
    devices_at_hand();
    cuda_emu_set_peer_access(false);
    for (uint64_t seed = 2500; seed < 2520; seed++) {
        setting x = random_setting(seed, 1);
        for (int64_t i = 0; i < x.order.shape.n_stages; i++) x.devices.push_back((int)(i % 3));
        (void)describe(&x);
        if (!check_setting(x)) break;
    }
    CHECK_INT(cuda_emu_faults(), 0);
    cuda_emu_defaults();
}

/* ---- calls that the loop may not make ---- */

static int64_t costly_calls() {
    static const char *const names[] = {"cudaMalloc", "cudaFree", "cudaMallocHost", "cudaFreeHost", "cudaHostAlloc",
                                        "cudaEventCreate", "cudaEventCreateWithFlags", "cudaStreamCreate",
                                        "cudaStreamCreateWithFlags", "cudaMemcpy", "cudaMemset",
                                        "cudaDeviceSynchronize", "cudaStreamSynchronize"};
    int64_t n = 0;
    for (const char *name : names) n += cuda_emu_calls(name);
    return n;
}

static void check_a_run_allocates_nothing(setting x) {
    x.timeline = 1;
    batch b;
    cf_error error = {};
    REQUIRE(make_batch(x, &b));
    device_model m(x, b, 1);
    harness_heap heap = {};
    const cf_allocator counting = {harness_alloc, harness_release, &heap};
    cf_executor_desc d = m.desc();
    d.allocator = &counting;
    REQUIRE(m.take_results() && cf_executor_create(&d, &m.executor, &error) == CF_OK);
    REQUIRE(cf_executor_load(m.executor, b.plan, b.schedule(), &error) == CF_OK);
    const int64_t calls = heap.calls;
    m.clear_results();
    const int64_t costly = costly_calls();
    CHECK_INT(cf_executor_run(m.executor, &error), CF_OK);
    CHECK_INT(heap.calls, calls);
    CHECK_INT(costly_calls(), costly);
    CHECK(calls > 10);
    cf_executor_free(m.executor);
    m.executor = nullptr;
    CHECK_INT(heap.live, 0);
    CHECK_INT(heap.faults, 0);
}

TEST(a_run_allocates_nothing) {
    check_a_run_allocates_nothing(small_setting());
    check_a_run_allocates_nothing(small_streamed_setting());
}

/* ---- failures of everything else ---- */

static bool nothing_left(const cuda_emu_live &before) {
    const cuda_emu_live now = cuda_emu_live_objects();
    return CHECK_INT(now.allocations, before.allocations) && CHECK_INT(now.pinned, before.pinned) &&
           CHECK_INT(now.streams, before.streams) && CHECK_INT(now.events, before.events) &&
           CHECK_INT(cuda_emu_pending(), 0);
}

/* Creates, loads, runs, and reads the timeline. After any failure, a second try on the same executor must succeed. */
static bool survive(const setting &x, const batch &b, const host_model &host, device_model *m,
                    const cf_allocator *allocator, const std::function<void()> &arm,
                    const std::function<bool()> &disarm, cf_result other) {
    cf_executor_desc d = m->desc();
    cf_error error = {};
    cf_timeline *timeline = nullptr;
    d.allocator = allocator;
    m->clear_results();
    arm();
    cf_result code = cf_executor_create(&d, &m->executor, &error);
    if (code == CF_OK) code = cf_executor_load(m->executor, b.plan, b.schedule(), &error);
    if (code == CF_OK) code = cf_executor_run(m->executor, &error);
    if (code == CF_OK) code = cf_executor_timeline(m->executor, allocator, &timeline, &error);
    const bool failed = disarm();
    cf_timeline_free(timeline);
    const bool own = code == CF_ERROR_CALLBACK && error.got == 6; /* the failed call belonged to a pass */
    bool ok = CHECK(code == CF_OK || failed) &&
              CHECK(code == CF_OK || code == CF_ERROR_MEMORY || code == other || own) &&
              CHECK(code == CF_OK || error.code == code);
    if (ok && code == CF_OK) ok = same_results(m->fetch(), host);
    if (ok && m->executor) {
        cf_error again = {};
        ok = CHECK_INT(cf_executor_load(m->executor, b.plan, b.schedule(), &again), CF_OK) && run_and_compare(m, host);
    }
    cf_executor_free(m->executor);
    m->executor = nullptr;
    (void)x;
    return ok;
}

static void check_every_cuda_call_fails_once(setting x) {
    x.timeline = 1;
    devices_at_hand();
    x.devices = {0, 1};
    batch b;
    int64_t n = 0;
    REQUIRE(make_batch(x, &b));
    host_model host(x, b, 5);
    device_model m(x, b, 5);
    m.may_fail = true;
    REQUIRE(m.take_results());
    const cuda_emu_live before = cuda_emu_live_objects();
    for (bool more = true; more; n += harness_rounds(1, 41)) {
        harness_note("call %d fails", (int)n + 1);
        const bool ok = survive(
            x, b, host, &m, nullptr, [&] { cuda_emu_fail_call(n + 1, cudaErrorUnknown); },
            [&] {
                more = cuda_emu_failed();
                cuda_emu_fail_call(0, cudaSuccess);
                return more;
            },
            CF_ERROR_DEVICE);
        if (!ok || !nothing_left(before)) break;
    }
    CHECK(n > 300);
    CHECK_INT(cuda_emu_faults(), 0);
    harness_report("about %d calls", (int)n);
    cuda_emu_defaults();
    cuda_emu_reset();
}

TEST(every_cuda_call_fails_once) {
    check_every_cuda_call_fails_once(small_setting());
    check_every_cuda_call_fails_once(small_streamed_setting());
}

static void check_every_allocation_fails(setting x) {
    x.timeline = 1;
    batch b;
    int64_t n = 0;
    REQUIRE(make_batch(x, &b));
    host_model host(x, b, 5);
    device_model m(x, b, 5);
    REQUIRE(m.take_results());
    const cuda_emu_live before = cuda_emu_live_objects();
    for (bool more = true; more; n += harness_rounds(1, 3)) { /* odd, because of `only_once` */
        harness_heap heap = {};
        const cf_allocator failing = {harness_alloc, harness_release, &heap};
        harness_note("allocation %d fails", (int)n / 2 + 1);
        const bool ok = survive(
            x, b, host, &m, &failing,
            [&] {
                heap.fail_at = n / 2 + 1;
                heap.only_once = (int)(n % 2);
            },
            [&] {
                more = heap.failed > 0;
                heap.fail_at = 0;
                return more;
            },
            CF_ERROR_MEMORY);
        if (!ok || !nothing_left(before) || !CHECK_INT(heap.live, 0) || !CHECK_INT(heap.faults, 0)) break;
    }
    CHECK(n > 60);
    harness_report("%d allocations", (int)n / 2);
}

TEST(every_allocation_fails) {
    check_every_allocation_fails(small_setting());
    check_every_allocation_fails(small_streamed_setting());
}

/* A kernel that fails while it runs takes down its device. The error names the first action that is not known to have
   ended; with `blocking` that is the failed one. */
TEST(a_kernel_fails) {
    for (int blocking = 0; blocking < 2; blocking++) {
        setting x = small_setting();
        x.blocking = blocking;
        batch b;
        cf_error error = {};
        REQUIRE(make_batch(x, &b));
        for (int64_t i = 0; i < 40; i += 5) {
            const cuda_emu_live before = cuda_emu_live_objects();
            device_model m(x, b, 5);
            m.note = m.may_fail = true;
            REQUIRE(m.start(&error));
            m.clear_results();
            cuda_emu_fail_kernel(i + 1, cudaErrorIllegalAddress);
            CHECK_INT(cf_executor_run(m.executor, &error), CF_ERROR_DEVICE);
            CHECK_INT(error.got, cudaErrorIllegalAddress);
            CHECK(strstr(error.text, "cudaErrorIllegalAddress") != nullptr);
            CHECK(strstr(error.text, " of chunk ") != nullptr);
            if (blocking) { /* two kernels a pass */
                CHECK_INT((int64_t)m.seen.size(), i / 2 + 1);
                CHECK_INT(error.item, m.seen.back().position);
                const std::string wanted =
                    action_text(cf_executor_schedule(m.executor), m.seen.back().stage, m.seen.back().position);
                CHECK(strncmp(error.text, wanted.c_str(), wanted.size()) == 0);
            } else { /* a later action cannot have ended, but cannot be the first either */
                const char *stage = strstr(error.text, "on stage ");
                REQUIRE(CHECK(stage != nullptr));
                for (size_t k = (size_t)i / 2 + 1; k < m.seen.size(); k++)
                    CHECK(m.seen[k].stage != stage[9] - '0' || error.item < m.seen[k].position);
            }
            CHECK_INT(cf_executor_run(m.executor, &error), CF_ERROR_DEVICE); /* and stays so */
            CHECK_INT(cf_executor_load(m.executor, b.plan, b.schedule(), &error), CF_ERROR_DEVICE);
            cf_executor_free(m.executor);
            m.executor = nullptr;
            for (word *&r : m.results) cudaFree(r), r = nullptr;
            CHECK(nothing_left(before));
            cuda_emu_reset();
        }
    }
}

/* Puts an operation that never ends in front of pass number `at` of a run. */
static void check_a_device_that_hangs(const setting &x, int64_t at) {
    batch b;
    cf_error error = {};
    REQUIRE(make_batch(x, &b));
    host_model host(x, b, 5);
    device_model m(x, b, 5);
    cf_executor_desc d = m.desc();
    d.timeout = 0.05;
    REQUIRE(m.take_results() && cf_executor_create(&d, &m.executor, &error) == CF_OK);
    REQUIRE(cf_executor_load(m.executor, b.plan, b.schedule(), &error) == CF_OK);
    m.clear_results();
    m.before = [&](const cf_cuda_step *step) {
        if (m.n_passes == at) cuda_emu_hang(step->stream);
    };
    CHECK_INT(cf_executor_run(m.executor, &error), CF_ERROR_DEVICE);
    CHECK_STR(error.field, "timeout");
    CHECK(strstr(error.text, "no progress") != nullptr);
    CHECK(m.n_passes <= at + 1 + 4 * 2); /* so many passes may be issued ahead */
    m.before = nullptr;
    CHECK_INT(cf_executor_run(m.executor, &error), CF_ERROR_DEVICE); /* still hanging */
    CHECK_STR(error.field, "timeout");
    CHECK_INT(cf_executor_load(m.executor, b.plan, b.schedule(), &error), CF_ERROR_DEVICE);
    CHECK_STR(error.field, "timeout");
    CHECK(cf_executor_schedule(m.executor) == nullptr);
    cuda_emu_unhang();
    CHECK_INT(cf_executor_run(m.executor, &error), CF_ERROR_ARGUMENT); /* the failed load left no batch */
    CHECK_INT(cf_executor_load(m.executor, b.plan, b.schedule(), &error), CF_OK);
    REQUIRE(run_and_compare(&m, host));

    /* The application has blocked a stream before a load. */
    cuda_emu_hang(cf_executor_stream(m.executor, 1));
    CHECK_INT(cf_executor_load(m.executor, b.plan, b.schedule(), &error), CF_ERROR_DEVICE);
    CHECK_STR(error.field, "timeout");
    CHECK(strstr(error.text, "did not end in time") != nullptr);
    CHECK_INT(cf_executor_run(m.executor, &error), CF_ERROR_DEVICE);
    cuda_emu_unhang();
    CHECK_INT(cf_executor_load(m.executor, b.plan, b.schedule(), &error), CF_OK);
    REQUIRE(run_and_compare(&m, host));
}

TEST(a_device_that_hangs) { check_a_device_that_hangs(small_setting(), 9); }

/* Transfers of the state's rows between host and device follow the pass that hangs, whichever pass that is. */
TEST(a_device_that_hangs_while_a_state_streams) {
    for (int64_t at = 0; at < 20; at += harness_rounds(3, 9)) check_a_device_that_hangs(small_streamed_setting(), at);
}

/* A load lets the application's own work finish first. Both functions restore the current device. */
TEST(what_a_call_leaves) {
    setting x = small_setting();
    batch b;
    cf_error error = {};
    int device = -1;
    REQUIRE(make_batch(x, &b));
    devices_at_hand();
    x.devices = {2, 0};
    device_model m(x, b, 5);
    cuda_emu_set_policy(CUDA_EMU_LAZY);
    cudaSetDevice(1);
    const cf_executor_desc d = m.desc();
    REQUIRE(CHECK_INT(cf_executor_create(&d, &m.executor, &error), CF_OK));
    CHECK(cudaGetDevice(&device) == cudaSuccess && device == 1);
    for (int64_t stage = 0; stage < 2; stage++) cuda_emu_delay(cf_executor_stream(m.executor, stage), 1.0);
    CHECK_INT(cuda_emu_pending(), 2);
    CHECK_INT(cf_executor_load(m.executor, b.plan, b.schedule(), &error), CF_OK);
    CHECK_INT(cuda_emu_pending(), 0);
    CHECK(cudaGetDevice(&device) == cudaSuccess && device == 1);
    REQUIRE(m.take_results());
    m.clear_results();
    cudaSetDevice(1);
    CHECK_INT(cf_executor_run(m.executor, &error), CF_OK);
    CHECK(cudaGetDevice(&device) == cudaSuccess && device == 1);
    m.fail_at = m.n_passes / 2;
    m.n_passes = 0;
    CHECK_INT(cf_executor_run(m.executor, &error), CF_ERROR_CALLBACK);
    CHECK_INT(cuda_emu_pending(), 0);
    CHECK(cudaGetDevice(&device) == cudaSuccess && device == 1);
    cf_executor_free(m.executor);
    m.executor = nullptr;
    CHECK(cudaGetDevice(&device) == cudaSuccess && device == 1);
    cudaSetDevice(0);
    cuda_emu_defaults();
}

TEST(too_little_device_memory) {
    setting x = small_setting();
    setting y = x;
    y.lengths = {300, 3, 2, 290, 6, 7, 8, 1};
    batch small, large;
    cf_error error = {};
    REQUIRE(make_batch(x, &small) && make_batch(y, &large));
    host_model host(x, small, 4);
    device_model m(x, small, 4);
    REQUIRE(m.start(&error));
    cuda_emu_set_memory((size_t)cuda_emu_memory_used(0) + 8192);
    CHECK_INT(cf_executor_load(m.executor, large.plan, large.schedule(), &error), CF_ERROR_MEMORY);
    CHECK_STR(error.field, "memory");
    CHECK(error.item >= 0 && error.item < 2 && error.got >= 8192 && error.wanted > error.got);
    CHECK_INT(cudaPeekAtLastError(), cudaSuccess);
    CHECK_INT(cf_executor_run(m.executor, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_executor_load(m.executor, small.plan, small.schedule(), &error), CF_OK);
    REQUIRE(run_and_compare(&m, host));
    cuda_emu_defaults();
}

/* ---- measured times ---- */

/* If passes and transfers take the times given to the simulator, the measured timeline equals the simulated one. All
   times are multiples of 1/64 s, so that nothing is rounded. */
static void check_timeline(cf_schedule_kind kind, cf_replay replay, int64_t n_stages, int64_t n_virtual,
                           cf_placement placement, double seconds_per_token) {
    setting x;
    harness_rng rng = {17};
    cf_timing timing = {};
    cf_lower_desc lower = {};
    cf_simulate_desc simulate = {};
    batch b;
    cf_error error = {};
    cf_timeline *measured = nullptr, *simulated = nullptr;
    timing.seconds_per_token = seconds_per_token;
    x.lengths = {24, 8, 8, 16, 8, 32, 8, 8};
    x.pack.chunk_size = 8;
    x.order.kind = kind;
    x.order.shape.replay = replay;
    x.order.shape.n_stages = n_stages;
    x.order.shape.n_virtual = n_virtual;
    x.order.shape.placement = placement;
    x.order.timing = lower.timing = simulate.timing = &timing;
    x.order.max_tries = 2;
    x.order.split_backward = kind >= CF_SCHEDULE_ZERO_BUBBLE;
    x.timeline = 1;
    set_stages(&x, &rng);
    harness_note("%s, %s", describe(&x), seconds_per_token > 0 ? "transfers cost" : "transfers are free");
    REQUIRE(make_batch(x, &b));
    if (n_stages > 1) REQUIRE(cf_schedule_lower(b.plan, b.made, &lower, &b.lowered, &error) == CF_OK);
    device_model m(x, b, 1);
    const int64_t row_bytes = 4 * x.boundary_words;
    cuda_emu_set_host_time(0.0);
    cuda_emu_set_rule([&](const cuda_emu_work &w) {
        return w.kind == CUDA_EMU_WORK_COPY && w.from >= 0 && w.to >= 0
                   ? seconds_per_token * (double)w.bytes / (double)row_bytes
                   : 0.0;
    });
    m.before = [&](const cf_cuda_step *step) {
        const double tokens = (double)step->chunk->rows;
        cuda_emu_delay(step->stream, step->step->action.pass == CF_B ? 2.0 * tokens : tokens);
    };
    REQUIRE(m.start(&error));
    m.clear_results();
    REQUIRE(CHECK_INT(cf_executor_run(m.executor, &error), CF_OK));
    REQUIRE(CHECK_INT(cf_executor_timeline(m.executor, nullptr, &measured, &error), CF_OK));
    REQUIRE(CHECK_INT(cf_simulate(b.plan, b.made, &simulate, &simulated, &error), CF_OK));
    /* Both rows of a V send in both directions. Here each row has its own streams, where the simulation has one queue
       for each direction. A tensor may also have to wait for a place that is still being copied. So if transfers take
       time, a pass may start a transfer earlier or later. */
    const bool may_differ = placement == CF_PLACEMENT_V && seconds_per_token > 0;
    CHECK(std::fabs(measured->makespan - simulated->makespan) <= (may_differ ? 0.01 * simulated->makespan : 0.0));
    CHECK(measured->busy == simulated->busy && measured->replayed == simulated->replayed);
    const cf_schedule *s = cf_executor_schedule(m.executor);
    int64_t next = 0, n_wrong = 0;
    for (int64_t i = 0; i < s->n_actions; i++) {
        if (s->actions[i].pass >= CF_COMPUTE_PASS_COUNT) continue;
        n_wrong += simulated->start[next] != measured->start[i] || simulated->end[next] != measured->end[i];
        next++;
    }
    CHECK_INT(next, b.made->n_actions);
    if (!may_differ) CHECK_INT(n_wrong, 0);
    cf_timeline_free(measured);
    cf_timeline_free(simulated);
    cuda_emu_defaults();
}

TEST(timelines_are_the_simulated_ones) {
    static const cf_schedule_kind kinds[] = {CF_SCHEDULE_PAPER, CF_SCHEDULE_GPIPE, CF_SCHEDULE_1F1B,
                                             CF_SCHEDULE_INTERLEAVED, CF_SCHEDULE_ZERO_BUBBLE};
    for (int i = 0; i < 5; i++)
        for (int64_t n_stages = 1; n_stages <= 4; n_stages += harness_rounds(1, 3))
            for (int costly = 0; costly < 2; costly++) {
                const int local = n_stages % 2 || kinds[i] != CF_SCHEDULE_PAPER;
                const cf_replay replay = local ? CF_REPLAY_LOCAL : CF_REPLAY_PIPELINE;
                const int64_t n_virtual = kinds[i] == CF_SCHEDULE_INTERLEAVED ? 2 : 1;
                check_timeline(kinds[i], replay, n_stages, n_virtual, CF_PLACEMENT_LOOP, costly * 0.25);
                if (kinds[i] == CF_SCHEDULE_ZERO_BUBBLE)
                    check_timeline(kinds[i], replay, n_stages, 2, CF_PLACEMENT_V, costly * 0.25);
            }
}

/* CUDA loads a kernel at its first launch, and may wait for the device then. A new executor has loaded every kernel
   that the tests before this one launched. */
TEST(kernels_are_loaded) {
    setting x = small_setting();
    batch b;
    cf_error error = {};
    REQUIRE(make_batch(x, &b));
    device_model m(x, b, 4);
    REQUIRE(m.start(&error));
    for (const char *prefix : {"attention_", "append_", "softmax", "clear", "padding"})
        CHECK_STR(cuda_emu_unloaded(prefix).c_str(), "");
}

/* ---- one process a stage ---- */

struct rank_context {
    int rank, n;
    ncclComm_t comm;
};

typedef std::function<bool(const rank_context &)> rank_body;

#define RANK_CHECK(condition) \
    ((condition) ? true : (fprintf(stderr, "rank %d, line %d: %s\n", c.rank, __LINE__, #condition), false))

/* Forks a process for each rank. Returns whether all succeed. In the mode "buffered" the communicator blocks. */
static bool run_ranks(int n, const char *mode, const rank_body &body) {
    ncclUniqueId id;
    std::vector<pid_t> children;
    bool ok = ncclGetUniqueId(&id) == ncclSuccess;
    fflush(nullptr);
    for (int rank = 0; rank < n; rank++) {
        const pid_t child = fork();
        if (child == 0) {
            rank_context c = {rank, n, nullptr};
            alarm(600);
            setenv("CUDA_EMU_NCCL", mode, 1);
            cuda_emu_defaults();
            cuda_emu_reset();
            cuda_emu_set_timeout(60.0);
            ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
            config.blocking = strcmp(mode, "buffered") == 0;
            const ncclResult_t made = ncclCommInitRankConfig(&c.comm, n, id, rank, &config);
            const bool good = RANK_CHECK(made == (config.blocking ? ncclSuccess : ncclInProgress)) && body(c);
            _exit(!(good && RANK_CHECK(cuda_emu_faults() == 0)));
        }
        if (child > 0) children.push_back(child);
    }
    ok = ok && children.size() == (size_t)n;
    for (const pid_t child : children) {
        int status = -1;
        ok = waitpid(child, &status, 0) == child && status == 0 && ok;
    }
    return ok;
}

static bool start_rank(const rank_context &c, device_model *m, double timeout = 60.0) {
    cf_executor_desc d = m->desc();
    cf_error error = {};
    d.nccl = c.comm;
    d.timeout = timeout;
    d.devices = nullptr;
    if (m->take_results() && cf_executor_create(&d, &m->executor, &error) == CF_OK &&
        cf_executor_load(m->executor, m->b.plan, m->b.schedule(), &error) == CF_OK)
        return true;
    fprintf(stderr, "rank %d: %s\n", c.rank, error.text);
    return false;
}

static bool run_rank(const rank_context &c, device_model *m, const host_model &host) {
    cf_error error = {};
    m->clear_results();
    if (cf_executor_run(m->executor, &error) != CF_OK) {
        fprintf(stderr, "rank %d: %s: %s\n", c.rank, m->x.name.c_str(), error.text);
        return false;
    }
    return RANK_CHECK(same_results(m->fetch(), host, c.rank));
}

static setting rank_setting(uint64_t seed, int n) {
    setting x = random_setting(seed, 1);
    harness_rng rng = {seed};
    x.order.shape.n_stages = n;
    set_stages(&x, &rng);
    (void)describe(&x);
    return x;
}

static bool random_batches_of_rank(const rank_context &c) {
    bool ok = true;
    for (uint64_t seed = 3000; ok && seed < (uint64_t)harness_rounds(3006, 3002); seed++) {
        const setting x = seed % 2 ? streamed(rank_setting(seed, c.n)) : rank_setting(seed, c.n);
        batch b;
        if (!make_batch(x, &b)) return false;
        host_model host(x, b, seed);
        cuda_emu_each_policy(1, [&] {
            device_model m(x, b, seed);
            ok = ok && start_rank(c, &m) && run_rank(c, &m, host) && run_rank(c, &m, host);
        });
    }
    return ok && RANK_CHECK(ncclCommDestroy(c.comm) == ncclSuccess);
}

TEST(processes) {
    const int most = harness_rounds(4, 3);
    for (int n = 1; n <= most; n += harness_rounds(1, 2))
        CHECK(run_ranks(n, "rendezvous", random_batches_of_rank));
    CHECK(run_ranks(2, "buffered", random_batches_of_rank));
}

/* If stages are processes, receives occupy a few multiprocessors. Attention's blocks are divided among the others,
   unless the caller has set their number. */
static bool processors_of_rank(const rank_context &c) {
    batch b;
    const setting x = rank_setting(3000, c.n);
    cf_error error = {};
    std::vector<int64_t> seen;
    if (!make_batch(x, &b)) return false;
    device_model m(x, b, 1);
    cuda_emu_set_processors(20);
    for (int64_t given : {0, 20}) {
        cf_executor_desc d = m.desc();
        cf_executor *executor = nullptr;
        d.user = &seen;
        d.nccl = c.comm, d.devices = nullptr, d.progress = nullptr;
        d.attention.n_heads = 1, d.attention.n_processors = given;
        d.forward = d.backward = [](void *user, const cf_cuda_step *step) {
            static_cast<std::vector<int64_t> *>(user)->push_back(step->attention->desc.n_processors);
            return 0;
        };
        if (!RANK_CHECK(cf_executor_create(&d, &executor, &error) == CF_OK) ||
            !RANK_CHECK(cf_executor_load(executor, b.plan, b.schedule(), &error) == CF_OK) ||
            !RANK_CHECK(cf_executor_run(executor, &error) == CF_OK))
            return false;
        cf_executor_free(executor);
        for (int64_t n : seen)
            if (!RANK_CHECK(n == (given ? given : 20 - CF_NCCL_CHANNELS))) return false;
        if (!RANK_CHECK(!seen.empty())) return false;
        seen.clear();
    }
    return RANK_CHECK(ncclCommDestroy(c.comm) == ncclSuccess);
}

TEST(processes_leave_a_margin) { CHECK(run_ranks(2, "rendezvous", processors_of_rank)); }

/* The small batch with a stage for each rank, and its expected results; without m if it cannot be made. */
struct small_run {
    setting x = small_setting();
    batch b;
    std::unique_ptr<host_model> host;
    std::unique_ptr<device_model> m;

    explicit small_run(const rank_context &c) {
        harness_rng rng = {4};
        x.order.shape.n_stages = c.n;
        set_stages(&x, &rng);
        if (!make_batch(x, &b)) return;
        host.reset(new host_model(x, b, 6));
        host->run();
        m.reset(new device_model(x, b, 6));
    }
};

/* A callback fails, or a run is cancelled, on one of three stages: all report it, and the next run succeeds. */
static bool failing_rank(const rank_context &c) {
    small_run r(c);
    if (!r.m) return false;
    device_model &m = *r.m;
    const host_model &host = *r.host;
    bool ok = start_rank(c, &m) && run_rank(c, &m, host);
    const int64_t n = m.n_passes;
    for (int64_t i = 0; ok && i < 12; i++) {
        const bool own = i % c.n == c.rank, cancels = i % 2 == 1;
        cf_error error = {};
        m.clear_results();
        if (own) (cancels ? m.cancel_at : m.fail_at) = i * n / 12;
        const cf_result wanted = cancels ? CF_ERROR_CANCELLED : CF_ERROR_CALLBACK;
        const cf_result code = cf_executor_run(m.executor, &error);
        ok = RANK_CHECK(code == wanted) && RANK_CHECK(error.got == (own ? (cancels ? 9 : 5) : i % c.n));
        ok = ok && (own || RANK_CHECK(strcmp(error.field, "nccl") == 0));
        char stage[40];
        (void)snprintf(stage, sizeof stage, "on stage %d", (int)(i % c.n));
        ok = ok && RANK_CHECK(strstr(error.text, stage) != nullptr);
        m.cancel_at = m.fail_at = -1;
        ok = ok && run_rank(c, &m, host);
    }
    cf_executor_free(m.executor);
    m.executor = nullptr;
    return ok && RANK_CHECK(ncclCommDestroy(c.comm) == ncclSuccess);
}

/* The last pass fails, in a list so long that positions need more than 8 bits. */
static bool failing_late(const rank_context &c) {
    setting x = small_setting();
    batch b;
    harness_rng rng = {4};
    x.lengths.assign(90, 8);
    x.order.shape.n_stages = c.n;
    set_stages(&x, &rng);
    if (!make_batch(x, &b)) return false;
    device_model m(x, b, 6);
    cf_error error = {};
    m.note = true;
    if (!start_rank(c, &m)) return false;
    const cf_schedule *s = cf_executor_schedule(m.executor);
    int64_t last = s->first[1] - s->first[0] - 1;
    while (s->actions[last].pass >= CF_COMPUTE_PASS_COUNT) last--;
    m.clear_results();
    if (c.rank == 0) m.fail_at = 2 * 90 - 1; /* F and B of each chunk */
    bool ok = RANK_CHECK(cf_executor_run(m.executor, &error) == CF_ERROR_CALLBACK);
    ok = ok && RANK_CHECK(last > 256) && RANK_CHECK(error.item == last);
    return ok && (c.rank == 0 || (RANK_CHECK(error.got == 0) && RANK_CHECK(strcmp(error.field, "nccl") == 0)));
}

/* Raises an error in a callback. Only its own process has the error's text; the others report the action. */
static bool raising_rank(const rank_context &c) {
    small_run r(c);
    if (!r.m) return false;
    device_model &m = *r.m;
    if (!start_rank(c, &m)) return false;
    const cf_schedule *s = cf_executor_schedule(m.executor);
    int64_t position = -1; /* of the fourth pass of stage 1 */
    for (int64_t n = 0; n < 4; n += s->actions[s->first[1] + position].pass < CF_COMPUTE_PASS_COUNT) position++;
    for (const int64_t item : {(int64_t)-1, (int64_t)7, INT64_MAX, INT64_MIN}) {
        const bool own = c.rank == 1;
        cf_error error = {};
        m.clear_results();
        if (own) m.fail_at = 3;
        m.raises = true;
        m.raised_item = item;
        if (!RANK_CHECK(cf_executor_run(m.executor, &error) == CF_ERROR_SPACE)) return false;
        if (!RANK_CHECK(error.item == (own ? item : position))) return false;
        if (!RANK_CHECK(error.got == (own ? 9 : 1))) return false;
        if (!RANK_CHECK(strcmp(error.field, own ? "registers" : "nccl") == 0)) return false;
        if (!RANK_CHECK(strstr(error.text, action_text(s, 1, position).c_str()) == error.text)) return false;
        m.fail_at = -1;
        if (!run_rank(c, &m, *r.host)) return false;
    }
    return true;
}

/* Callbacks that only query do no harm with NCCL either. An error that one leaves, or that was there before, stops the
   run of all ranks, but not the communicator: the next run succeeds. */
static bool stained_rank(const rank_context &c) {
    small_run r(c);
    if (!r.m) return false;
    device_model &m = *r.m;
    const host_model &host = *r.host;
    cf_error error = {};
    if (!start_rank(c, &m)) return false;
    m.before = [](const cf_cuda_step *step) { (void)cudaStreamQuery(step->stream); };
    m.in_progress = [&](const cf_step *) { (void)cudaStreamQuery(cf_executor_stream(m.executor, c.rank)); };
    if (!run_rank(c, &m, host)) return false;
    for (int64_t at = 0; at < 12; at++) {
        int64_t position = -1;
        m.clear_results();
        m.in_progress = [&](const cf_step *p) {
            if (c.rank != 1 || m.n_progress != at) return;
            position = p->position;
            (void)cudaSetDevice(12345);
        };
        if (!RANK_CHECK(cf_executor_run(m.executor, &error) == CF_ERROR_DEVICE)) return false;
        if (!RANK_CHECK(error.got == (c.rank == 1 ? (int64_t)cudaErrorInvalidDevice : 1))) return false;
        if (c.rank == 1 && !RANK_CHECK(error.item == position)) return false;
    }
    m.in_progress = nullptr;
    if (!run_rank(c, &m, host)) return false;
    m.clear_results();
    if (c.rank == 1) (void)cudaSetDevice(12345);
    if (!RANK_CHECK(cf_executor_run(m.executor, &error) == CF_ERROR_DEVICE)) return false;
    if (c.rank == 1 && !RANK_CHECK(error.item == -1 && error.got == cudaErrorInvalidDevice)) return false;
    (void)cudaGetLastError();
    return run_rank(c, &m, host);
}

TEST(a_process_fails) {
    REQUIRE(run_ranks(3, "rendezvous", stained_rank)); /* since all of them hang, waiting for one is enough */
    REQUIRE(run_ranks(2, "rendezvous", failing_late));
    REQUIRE(run_ranks(3, "rendezvous", raising_rank));
    REQUIRE(run_ranks(3, "rendezvous", failing_rank));
    CHECK(run_ranks(2, "buffered", failing_rank));
}

/* A device fails and ends its process; the others notice and give up as well. */
static bool dying_rank(const rank_context &c) {
    small_run r(c);
    if (!r.m) return false;
    device_model &m = *r.m;
    const host_model &host = *r.host;
    m.may_fail = true;
    bool ok = start_rank(c, &m, 20.0) && run_rank(c, &m, host);
    cf_error error = {};
    m.clear_results();
    if (c.rank == 1) cuda_emu_fail_kernel(15, cudaErrorIllegalAddress);
    ok = ok && RANK_CHECK(cf_executor_run(m.executor, &error) == CF_ERROR_DEVICE);
    if (c.rank == 1) ok = ok && RANK_CHECK(error.got == cudaErrorIllegalAddress);
    ok = ok && RANK_CHECK(cf_executor_run(m.executor, &error) == CF_ERROR_DEVICE);
    ok = ok && RANK_CHECK(cf_executor_load(m.executor, r.b.plan, r.b.schedule(), &error) == CF_ERROR_DEVICE);
    return ok;
}

/* One process ends before its first transfer. Nobody notices, and the run ends after `timeout`. */
static bool dead_rank(const rank_context &c) {
    small_run r(c);
    cf_error error = {};
    if (!r.m || !start_rank(c, r.m.get(), 1.0)) return false;
    r.m->may_fail = true;
    if (c.rank == 1) _exit(0);
    usleep(200000);
    return RANK_CHECK(cf_executor_run(r.m->executor, &error) == CF_ERROR_DEVICE) &&
           RANK_CHECK(error.field != nullptr && strcmp(error.field, "nccl") == 0);
}

TEST(a_process_dies) {
    CHECK(run_ranks(3, "rendezvous", dying_rank));
    CHECK(run_ranks(2, "rendezvous", dead_rank));
}

/* A CUDA or NCCL call fails in one process: nobody hangs or crashes. If nothing depends on the call, the run
   succeeds. */
static int64_t failing_call;

static bool stumbling_rank(const rank_context &c) {
    small_run r(c);
    if (!r.m) return false;
    device_model &m = *r.m;
    const host_model &host = *r.host;
    cf_error error = {};
    m.may_fail = true;
    if (!start_rank(c, &m, 20.0) || !run_rank(c, &m, host)) return false;
    m.clear_results();
    if (c.rank == 1) cuda_emu_fail_call(failing_call, cudaErrorUnknown);
    const cf_result code = cf_executor_run(m.executor, &error);
    const bool failed = c.rank == 1 && cuda_emu_failed();
    cuda_emu_fail_call(0, cudaSuccess);
    if (c.rank == 1 && code != CF_OK && !RANK_CHECK(failed)) return false;
    if (code == CF_OK) return RANK_CHECK(same_results(m.fetch(), host, c.rank));
    return RANK_CHECK(code == CF_ERROR_DEVICE || (code == CF_ERROR_CALLBACK && (error.got == 6 || c.rank != 1)));
}

TEST(a_process_stumbles) {
    for (failing_call = 1; failing_call < 400; failing_call += harness_rounds(23, 92))
        if (!CHECK(run_ranks(3, "rendezvous", stumbling_rank))) harness_note("call %d", (int)failing_call);
}

/* Every process gets the times of all, which equal the simulated ones: with free transfers, one stream for them delays
   nothing. */
static bool timed_rank(const rank_context &c) {
    setting x;
    harness_rng rng = {17};
    x.lengths = {24, 8, 8, 16, 8, 32, 8, 8};
    x.pack.chunk_size = 8;
    x.order.shape.n_stages = c.n;
    x.order.shape.n_virtual = c.n > 2 ? 2 : 1;
    x.order.kind = c.n > 2 ? CF_SCHEDULE_ZERO_BUBBLE : CF_SCHEDULE_PAPER;
    x.order.shape.placement = c.n > 2 ? CF_PLACEMENT_V : CF_PLACEMENT_LOOP;
    x.timeline = 1;
    set_stages(&x, &rng);
    (void)describe(&x);
    batch b;
    cf_error error = {};
    cf_timeline *measured = nullptr, *simulated = nullptr;
    if (!make_batch(x, &b)) return false;
    device_model m(x, b, 1);
    cuda_emu_set_host_time(0.0);
    cuda_emu_set_rule([](const cuda_emu_work &) { return 0.0; });
    m.before = [&](const cf_cuda_step *step) {
        const double tokens = (double)step->chunk->rows;
        cuda_emu_delay(step->stream, step->step->action.pass == CF_B ? 2.0 * tokens : tokens);
    };
    if (!start_rank(c, &m)) return false;
    m.clear_results();
    if (!RANK_CHECK(cf_executor_run(m.executor, &error) == CF_OK) ||
        !RANK_CHECK(cf_executor_timeline(m.executor, nullptr, &measured, &error) == CF_OK) ||
        !RANK_CHECK(cf_simulate(b.plan, b.made, nullptr, &simulated, &error) == CF_OK))
        return false;
    const cf_schedule *s = cf_executor_schedule(m.executor);
    int64_t next = 0, n_wrong = 0;
    for (int64_t i = 0; i < s->n_actions; i++) {
        if (s->actions[i].pass >= CF_COMPUTE_PASS_COUNT) continue;
        n_wrong += simulated->start[next] != measured->start[i] || simulated->end[next] != measured->end[i];
        next++;
    }
    const bool ok = RANK_CHECK(n_wrong == 0) && RANK_CHECK(measured->makespan == simulated->makespan);
    cf_timeline_free(measured);
    cf_timeline_free(simulated);
    return ok;
}

TEST(timelines_of_processes) {
    CHECK(run_ranks(2, "rendezvous", timed_rank));
    CHECK(run_ranks(4, "rendezvous", timed_rank));
}

#endif

} /* namespace */

#ifdef CHUNKFLOW_CUDA_EMULATION
#define EMULATED_CASES                                                                                                 \
    , CASE(trees_in_every_order), CASE(every_order), CASE(every_order_streamed), CASE(inputs_come_back), \
        CASE(without_peer_access), \
        CASE(a_run_allocates_nothing), CASE(every_cuda_call_fails_once), CASE(every_allocation_fails),                 \
        CASE(a_kernel_fails), CASE(a_device_that_hangs), CASE(a_device_that_hangs_while_a_state_streams),             \
        CASE(what_a_call_leaves), CASE(too_little_device_memory),                                                      \
        CASE(timelines_are_the_simulated_ones), CASE(processes), CASE(processes_leave_a_margin), \
        CASE(a_process_fails), CASE(a_process_dies), CASE(a_process_stumbles), CASE(timelines_of_processes), \
        CASE(kernels_are_loaded), CASE(devices_that_differ)
#else
#define EMULATED_CASES
#endif

SUITE(executor, CASE(one_chunk), CASE(random_batches), CASE(random_batches_streamed), CASE(trees),
      CASE(windows_are_the_models),
      CASE(places), CASE(a_callback_fails_between_blocks),
      CASE(loads_stream_anew), CASE(attention_of_each_block), CASE(device_bytes_of_any_length),
      CASE(memory_before_loading),
      CASE(asking_for_memory_fails), CASE(state_is_what_the_books_say), CASE(gaps_are_small), CASE(a_failing_callback),
      CASE(cancelled), CASE(errors_that_callbacks_leave), CASE(errors_from_before), CASE(calls_from_callbacks),
      CASE(names_of_virtual_stages),
      CASE(blocking_changes_nothing), CASE(bad_descriptors), CASE(items_that_are_too_large), CASE(damaged_plans),
      CASE(bad_loads), CASE(no_state), CASE(loads_reuse_memory),
      CASE(attention_of_each_chunk), CASE(layers_that_are_refused) EMULATED_CASES);
