/* The executor under a model made of hashes: every pass mixes its input, its group's state, its activations and what it
   adds to gradients into numbers that any wrong order, overlap, stale or missing byte changes, and leaves poison behind
   wherever its memory goes out of use. The same passes run one after the other on the host, each thing in an array of
   its own; the numbers must agree. Under the emulation this is done for every order of streams that it knows. Runs as
   it is on a device, but for what needs planned failures, other orders or virtual time. */

#include "../harness.h"

#include "../../chunkflow.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ctime>
#include <functional>
#include <map>
#include <string>
#include <vector>

/* ---- the model ---- */

typedef uint32_t word;

const word POISON = 0xDEADBEEFu;
const int WIDTH = 8; /* words in a row of K or V: one head of 8 fp32 numbers, used as bits */
const int RESULTS = 4;

__host__ __device__ static inline word mix(word h, word x) {
    h = (h ^ x) * 0x9E3779B1u;
    return h ^ h >> 15;
}

/* One pass, with pointers either to the device or to the host. */
struct pass_data {
    int pass, padded, prefix, n_layers, boundary_words;
    int first, last, keep_input, overwrite, one_layer;
    int64_t state_rows, gradient_rows, n_activations, n_work;
    word seed;
    const int32_t *positions;
    word *state, *gradient, *activations, *work, *input, *output, *result;
};

__host__ __device__ static inline word fold(const word *data, int64_t n, word h) {
    for (int64_t i = 0; i < n; i++) h = mix(h, data[i]);
    return h;
}

__host__ __device__ static inline void poison(word *data, int64_t n) {
    for (int64_t i = 0; i < n; i++) data[i] = POISON;
}

__host__ __device__ static inline word *row_of(word *data, int64_t rows, int plane, int64_t row) {
    return data + (plane * rows + row) * WIDTH;
}

/* The rows that a pass sees: the prefix, and the chunk's own without padding. */
__host__ __device__ static inline bool visible(const pass_data &p, int64_t row) {
    return row < p.prefix || p.positions[row - p.prefix] >= 0;
}

__host__ __device__ static inline word fold_state(const pass_data &p, word h) {
    for (int plane = 0; plane < 2 * p.n_layers; plane++)
        for (int64_t row = 0; row < p.prefix + p.padded; row++)
            if (visible(p, row)) h = fold(row_of(p.state, p.state_rows, plane, row), WIDTH, h);
    return h;
}

/* What comes in: from the stage before (F, R) or behind (B, I), or the data itself. */
__host__ __device__ static inline word input_word(const pass_data &p, int row, int i) {
    const int missing = p.pass == CF_F || p.pass == CF_R ? p.first : p.last;
    if (!missing) return p.input[row * p.boundary_words + i];
    return mix(mix(p.seed, (word)p.positions[row]), (word)i);
}

__host__ __device__ static inline word fold_input(const pass_data &p, word h) {
    for (int row = 0; row < p.padded; row++)
        for (int i = 0; i < p.boundary_words; i++) h = mix(h, input_word(p, row, i));
    return h;
}

/* F and R, first half: K and V of the chunk's rows, and a workspace. */
__host__ __device__ static inline void forward_first(const pass_data &p) {
    const word h = fold_input(p, p.seed);
    for (int plane = 0; plane < 2 * p.n_layers; plane++)
        for (int row = 0; row < p.padded; row++)
            for (int i = 0; i < WIDTH && p.positions[row] >= 0; i++)
                row_of(p.state, p.state_rows, plane, p.prefix + row)[i] =
                    mix(mix(h, (word)(plane * WIDTH + i)), (word)row);
    for (int64_t i = 0; i < p.n_work; i++) p.work[i] = mix(h, (word)i);
}

/* Second half: everything that was written, into the output and the activations. */
__host__ __device__ static inline void forward_second(const pass_data &p) {
    word h = fold_state(p, fold(p.work, p.n_work, p.seed));
    h = fold_input(p, h);
    for (int64_t i = 0; p.activations && i < p.n_activations; i++) p.activations[i] = mix(h, (word)i);
    for (int64_t i = 0; p.output && i < (int64_t)p.padded * p.boundary_words; i++)
        p.output[i] = mix(h, input_word(p, (int)(i / p.boundary_words), (int)(i % p.boundary_words)) ^ (word)i);
    p.result[p.pass == CF_F ? 0 : 1] = h;
    if (!p.first && !p.keep_input) poison(p.input, (int64_t)p.padded * p.boundary_words);
    poison(p.work, p.n_work);
}

__host__ __device__ static inline void backward_first(const pass_data &p) {
    const word h = fold_input(p, fold(p.activations, p.n_activations, fold_state(p, p.seed)));
    for (int64_t i = 0; i < p.n_work; i++) p.work[i] = mix(h, (word)i);
}

/* Adds to the gradient of all rows that it saw, and takes the chunk's own, layer after layer. */
__host__ __device__ static inline word add_gradients(const pass_data &p, word h) {
    for (int plane = 2 * p.n_layers - 1; plane >= 0; plane--) {
        const int at = p.one_layer ? plane % 2 : plane;
        for (int64_t row = 0; row < p.prefix + p.padded; row++)
            for (int i = 0; i < WIDTH && visible(p, row); i++) {
                word *g = row_of(p.gradient, p.gradient_rows, at, row) + i;
                *g = (p.overwrite ? 0 : *g) + mix(mix(h, (word)row), (word)(plane * WIDTH + i));
            }
        for (int row = 0; row < p.padded; row++) {
            if (p.positions[row] < 0) continue;
            word *g = row_of(p.gradient, p.gradient_rows, at, p.prefix + row);
            h = fold(g, WIDTH, h);
            poison(g, WIDTH);
            poison(row_of(p.state, p.state_rows, plane, p.prefix + row), WIDTH);
        }
    }
    return h;
}

__host__ __device__ static inline void weights(const pass_data &p) {
    p.result[3] = fold(p.activations, p.n_activations, p.seed);
    poison(p.activations, p.n_activations);
}

__host__ __device__ static inline void backward_second(const pass_data &p) {
    const word h = add_gradients(p, fold(p.work, p.n_work, p.seed));
    p.result[2] = h;
    for (int64_t i = 0; p.output && i < (int64_t)p.padded * p.boundary_words; i++)
        p.output[i] = mix(h, input_word(p, (int)(i / p.boundary_words), (int)(i % p.boundary_words)) ^ (word)i);
    for (int64_t i = 0; i < p.n_activations; i++) p.activations[i] = mix(p.activations[i], h);
    if (!p.last) poison(p.input, (int64_t)p.padded * p.boundary_words);
    poison(p.work, p.n_work);
    if (p.pass == CF_B) weights(p);
}

__host__ __device__ static inline void do_half(const pass_data &p, int half) {
    if (p.pass == CF_F || p.pass == CF_R) half == 0 ? forward_first(p) : forward_second(p);
    else if (p.pass == CF_W) half == 0 ? (void)0 : weights(p);
    else half == 0 ? backward_first(p) : backward_second(p);
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
    int offload = 0; /* random moves */
    int offload_gradients = 0, timeline = 0, blocking = 0;
    uint64_t seed = 0;
    std::string name;
};

struct batch {
    cf_plan *plan = nullptr;
    cf_schedule *made = nullptr, *lowered = nullptr;
    cf_schedule moved = {}; /* with moves added; its arrays are below */
    std::vector<int64_t> first;
    std::vector<cf_action> actions;
    int64_t n_moves = 0;

    const cf_schedule *schedule() const { return moved.actions ? &moved : lowered ? lowered : made; }
    ~batch() {
        cf_schedule_free(lowered);
        cf_schedule_free(made);
        cf_plan_free(plan);
    }
};

/* Puts moves of random chunks of a group into each gap between two of its passes. */
static void add_moves(batch *b, harness_rng *rng) {
    const cf_schedule *s = b->lowered ? b->lowered : b->made;
    b->moved = *s;
    b->moved.lowered = 1;
    memset(&b->moved.allocator, 0, sizeof b->moved.allocator);
    b->first.assign(1, 0);
    for (int64_t stage = 0; stage < s->n_stages; stage++) {
        const cf_action *list = s->actions + s->first[stage];
        const int64_t n = s->first[stage + 1] - s->first[stage];
        std::vector<std::vector<cf_action>> before((size_t)n + 1); /* moves to be put before each action */
        std::map<std::pair<int32_t, int64_t>, int64_t> last;       /* latest pass of a group on a virtual stage */
        std::map<std::pair<int32_t, int64_t>, int64_t> held;       /* chunks of it that have rows */
        for (int64_t i = 0; i < n; i++) {
            const cf_chunk *c = &b->plan->chunks[list[i].chunk];
            const auto key = std::make_pair(list[i].stage, c->group);
            if (c->group < 0 || list[i].pass > CF_I) continue;
            const int64_t left = last.count(key) ? last[key] : -1;
            for (int64_t j = 0; left >= 0 && j < held[key]; j++) {
                if (!harness_chance(rng, 0.3)) continue;
                cf_action a = {};
                a.stage = list[i].stage;
                a.chunk = (int32_t)(b->plan->groups[c->group].first_chunk + j);
                const int64_t out = harness_between(rng, left + 1, i), in = harness_between(rng, out, i);
                a.pass = CF_OFFLOAD;
                before[(size_t)out].push_back(a);
                a.pass = CF_PREFETCH;
                before[(size_t)in].push_back(a);
                b->n_moves++;
            }
            last[key] = i;
            if (list[i].pass == CF_F) held[key] = c->index + 1;
            if (list[i].pass == CF_B || list[i].pass == CF_I) held[key] = c->index;
        }
        for (int64_t i = 0; i <= n; i++) {
            b->actions.insert(b->actions.end(), before[(size_t)i].begin(), before[(size_t)i].end());
            if (i < n) b->actions.push_back(list[i]);
        }
        b->first.push_back((int64_t)b->actions.size());
    }
    b->moved.n_actions = (int64_t)b->actions.size();
    b->moved.first = b->first.data();
    b->moved.actions = b->actions.data();
}

static bool make_batch(const setting &x, batch *b) {
    cf_error error = {};
    harness_rng rng = {x.seed + 1};
    if (cf_pack(x.lengths.data(), (int64_t)x.lengths.size(), &x.pack, &b->plan, &error) != CF_OK ||
        cf_schedule_make(b->plan, &x.order, &b->made, &error) != CF_OK) {
        FAIL("%s: %s", x.name.c_str(), error.text);
        return false;
    }
    if (!x.offload) return true;
    if (b->made->n_stages > 1 && cf_schedule_lower(b->plan, b->made, nullptr, &b->lowered, &error) != CF_OK) {
        FAIL("%s: %s", x.name.c_str(), error.text);
        return false;
    }
    add_moves(b, &rng);
    if (cf_schedule_validate(b->plan, &b->moved, nullptr, nullptr, &error) == CF_OK) return true;
    FAIL("%s: moves: %s", x.name.c_str(), error.text);
    return false;
}

/* ---- the same on the host, one pass after the other ---- */

struct host_model {
    const setting &x;
    const cf_plan *plan;
    uint64_t seed;
    int64_t first, n, n_virtual_stages;
    std::vector<word> results; /* (virtual stages x chunks x RESULTS) */
    std::vector<std::vector<word>> tensors, activations;
    std::vector<std::vector<int32_t>> positions;
    std::vector<word> work;

    host_model(const setting &x_, const batch &b, uint64_t seed_)
        : x(x_), plan(b.plan), seed(seed_), first(b.made->rank * plan->n_steps), n(plan->n_steps),
          n_virtual_stages(b.made->n_stages * b.made->n_virtual) {
        results.assign((size_t)(n_virtual_stages * n * RESULTS), 0);
        for (int64_t i = first; i < first + n; i++) {
            const cf_chunk &c = plan->chunks[i];
            std::vector<int32_t> ids((size_t)c.padded, -1);
            for (int64_t s = c.first_slice; s < c.first_slice + c.n_slices; s++)
                for (int64_t t = 0; t < plan->slices[s].length; t++)
                    ids[(size_t)(plan->slices[s].offset + t)] = (int32_t)(plan->slices[s].begin + t);
            positions.push_back(ids);
        }
    }

    pass_data pass_of(int pass, int64_t v, int64_t chunk) {
        const cf_chunk &c = plan->chunks[chunk];
        const cf_cuda_stage &d = x.stages[(size_t)v];
        pass_data p = {};
        p.pass = pass;
        p.padded = (int)c.padded;
        p.prefix = (int)c.prefix;
        p.n_layers = (int)d.n_layers;
        p.boundary_words = (int)x.boundary_words;
        p.first = v == 0;
        p.last = v == n_virtual_stages - 1;
        p.keep_input = 1;
        p.n_activations = (d.activation_bytes + d.activation_bytes_per_token * c.padded) / 4;
        p.n_work = (d.workspace_bytes + d.workspace_bytes_per_token * c.padded) / 4;
        p.seed = (word)cf_chunk_seed(seed, chunk, v);
        p.positions = positions[(size_t)(chunk - first)].data();
        p.result = &results[(size_t)((v * n + chunk - first) * RESULTS)];
        work.assign((size_t)p.n_work + 1, POISON);
        p.work = work.data();
        return p;
    }

    void run_group(int64_t v, int64_t begin, int64_t count, bool backward, std::vector<word> *state,
                   std::vector<word> *gradient) {
        int64_t rows = 0;
        for (int64_t i = begin; i < begin + count; i++)
            rows = std::max(rows, plan->chunks[i].prefix + plan->chunks[i].padded);
        if (!backward) state->assign((size_t)(rows * 2 * x.stages[(size_t)v].n_layers * WIDTH) + 1, POISON);
        if (backward) gradient->assign(state->size(), POISON);
        for (int64_t k = 0; k < count; k++) {
            const int64_t chunk = backward ? begin + count - 1 - k : begin + k, i = chunk - first;
            pass_data p = pass_of(backward ? CF_B : CF_F, v, chunk);
            std::vector<word> out((size_t)(plan->chunks[chunk].padded * x.boundary_words) + 1, POISON);
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
                const int64_t group = plan->chunks[first + i].group;
                count = group >= 0 ? plan->groups[group].n_chunks : 1;
                run_group(v, first + i, count, backward, &states[(size_t)v][(size_t)i], &gradient);
            }
            if (!backward) kept[(size_t)v] = activations;
        }
    }
};

/* ---- the same through the executor ---- */

/* A pass as the callback saw it. */
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
    std::vector<word *> results; /* by stage, on its device */
    std::vector<seen_pass> seen;
    bool note = false;
    std::vector<int64_t> replayed; /* by virtual stage x chunk: has an R */

    /* what tests change */
    int64_t fail_at = -1, n_passes = 0; /* this pass reports number 5 */
    int64_t cancel_at = -1, n_progress = 0;
    std::function<void(const cf_cuda_step *)> before;

    device_model(const setting &x_, const batch &b_, uint64_t seed_) : x(x_), b(b_), seed(seed_) {}
    ~device_model() {
        cf_executor_free(executor);
        for (word *r : results)
            if (r) cudaFree(r);
    }

    int64_t n_stages() const { return b.made->n_stages; }
    int64_t n_virtual_stages() const { return b.made->n_stages * b.made->n_virtual; }
    size_t result_words() const { return (size_t)(n_virtual_stages() * b.plan->n_steps * RESULTS); }
    int device(int64_t stage) const { return x.devices.empty() ? 0 : x.devices[(size_t)stage]; }

    static int pass(void *user, const cf_cuda_step *step) { return static_cast<device_model *>(user)->run_pass(step); }
    static int progress(void *user, int64_t, const cf_progress *) {
        device_model *m = static_cast<device_model *>(user);
        return m->n_progress++ == m->cancel_at ? 9 : 0;
    }

    int run_pass(const cf_cuda_step *step) {
        const cf_action a = step->step->action;
        const cf_chunk &c = *step->step->chunk;
        const cf_cuda_stage &d = x.stages[(size_t)a.stage];
        const int64_t first = b.made->rank * b.plan->n_steps, last = n_virtual_stages() - 1;
        const int64_t stage = a.stage % n_stages();
        int current = -1;
        if (note) seen.push_back({stage, step->step->position, a, *step});
        if (before) before(step);
        if (n_passes++ == fail_at) return 5;
        CHECK(cudaGetDevice(&current) == cudaSuccess);
        CHECK_INT(current, device(stage));
        CHECK_INT(step->device, device(stage));
        CHECK(step->stream == cf_executor_stream(executor, stage));
        CHECK_INT(step->metadata->chunk, a.chunk);
        pass_data p = {};
        p.pass = a.pass;
        p.padded = (int)c.padded;
        p.prefix = (int)c.prefix;
        p.n_layers = (int)d.n_layers;
        p.boundary_words = (int)x.boundary_words;
        p.first = a.stage == 0;
        p.last = a.stage == last;
        p.keep_input = a.pass == CF_F && !a.keep && b.made->replay == CF_REPLAY_LOCAL;
        p.overwrite = step->overwrite;
        p.one_layer = step->gradient.one_layer;
        p.state_rows = step->state.rows;
        p.gradient_rows = step->gradient.rows;
        p.n_activations = (d.activation_bytes + d.activation_bytes_per_token * c.padded) / 4;
        p.n_work = (d.workspace_bytes + d.workspace_bytes_per_token * c.padded) / 4;
        CHECK_INT(step->workspace_bytes, 4 * p.n_work);
        CHECK_INT(step->activation_bytes, step->activations ? 4 * p.n_activations : 0);
        CHECK_INT(step->boundary_bytes, 4 * x.boundary_words * c.padded);
        p.seed = (word)step->step->seed;
        p.positions = step->positions;
        p.state = (word *)step->state.data;
        p.gradient = (word *)step->gradient.data;
        p.activations = (word *)step->activations;
        p.work = (word *)step->workspace;
        p.input = (word *)const_cast<void *>(step->input);
        p.output = (word *)step->output;
        p.result = results[(size_t)stage] + (a.stage * b.plan->n_steps + a.chunk - first) * RESULTS;
        const bool forward = a.pass == CF_F || a.pass == CF_R;
        const bool reads = a.pass == CF_W ? false : forward ? !p.first : !p.last;
        if (!CHECK(!reads == !p.input) || !CHECK(p.activations || (a.pass == CF_F && !a.keep))) return 6;
        if (!CHECK(a.pass == CF_W || p.state) || !CHECK((a.pass == CF_B || a.pass == CF_I) == !!p.gradient)) return 6;
        if (!CHECK(a.pass != CF_F || !!p.output == !p.last)) return 6;
        cudaLaunchConfig_t config = {};
        config.gridDim = config.blockDim = dim3(1);
        config.stream = step->stream;
        for (int half = 0; half < 2; half++)
            if (!CHECK(cudaLaunchKernelEx(&config, half_kernel, p, half) == cudaSuccess)) return 6;
        return 0;
    }

    cf_executor_desc desc() const {
        cf_executor_desc d = {};
        d.user = const_cast<device_model *>(this);
        d.forward = d.backward = pass;
        d.progress = progress;
        d.n_stages = n_stages();
        d.n_virtual = b.made->n_virtual;
        d.stages = x.stages.data();
        d.devices = x.devices.empty() ? nullptr : x.devices.data();
        d.attention.n_kv_heads = 1;
        d.attention.head_size = WIDTH;
        d.attention.dtype = CF_DTYPE_FP32;
        d.boundary_bytes_per_token = 4 * x.boundary_words;
        d.offload_gradients = x.offload_gradients;
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

    /* Poisons the results, so that those of an earlier run do not count. */
    void clear_results() {
        n_passes = n_progress = 0;
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
        const int64_t n = b.plan->n_steps * RESULTS;
        for (int64_t i = 0; i < n_stages(); i++) {
            cudaSetDevice(device(i));
            CHECK(cudaMemcpy(one.data(), results[(size_t)i], result_words() * 4, cudaMemcpyDeviceToHost) ==
                  cudaSuccess);
            for (int64_t v = i; v < n_virtual_stages(); v += n_stages())
                std::copy(one.begin() + v * n, one.begin() + (v + 1) * n, all.begin() + v * n);
        }
        cudaSetDevice(0);
        return all;
    }
};

/* Compares with the host, number by number. An R must give what F gave; where there was none its result is untouched. */
static bool same_results(const std::vector<word> &got, const host_model &host) {
    for (size_t i = 0; i < got.size(); i++) {
        const bool replay = i % RESULTS == 1;
        const word wanted = host.results[replay ? i - 1 : i];
        if (got[i] == wanted || (replay && got[i] == 0xFFFFFFFFu)) continue;
        const int64_t n = host.n * RESULTS;
        FAIL("virtual stage %d, chunk %d: result %d differs", (int)((int64_t)i / n),
             (int)((int64_t)i % n / RESULTS + host.first), (int)(i % RESULTS));
        return false;
    }
    return true;
}

/* ---- settings ---- */

static const char *describe(setting *x) {
    char text[300];
    (void)snprintf(text, sizeof text,
                   "seed %llu: %s, %s, %d x %d stages, k %d, align %d, ranks %d, offload %d/%d, devices %d, n %d",
                   (unsigned long long)x->seed, cf_schedule_kind_name(x->order.kind), cf_replay_name(x->order.replay),
                   (int)x->order.n_stages, (int)x->order.n_virtual, (int)x->order.k, (int)x->pack.align,
                   (int)x->pack.n_ranks, x->offload, x->offload_gradients,
                   x->devices.empty() ? 1 : 1 + *std::max_element(x->devices.begin(), x->devices.end()),
                   (int)x->lengths.size());
    x->name = text;
    return x->name.c_str();
}

static void set_stages(setting *x, harness_rng *rng) {
    x->stages.clear();
    for (int64_t i = 0; i < x->order.n_stages * x->order.n_virtual; i++) {
        cf_cuda_stage d = {};
        d.n_layers = harness_between(rng, 1, 2);
        d.activation_bytes = 4 * harness_between(rng, 0, 3);
        d.activation_bytes_per_token = 4 * harness_between(rng, 1, 9);
        d.workspace_bytes = 4 * harness_between(rng, 0, 5);
        d.workspace_bytes_per_token = 4 * harness_between(rng, 0, 2);
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
    x.pack.method = (cf_pack_method)harness_between(&rng, 0, 3);
    x.pack.no_tails = harness_chance(&rng, 0.3);
    x.pack.n_ranks = harness_chance(&rng, 0.2) ? 2 : 1;
    for (int64_t i = harness_between(&rng, 1, 8); i > 0; i--)
        x.lengths.push_back(harness_chance(&rng, 0.3) ? harness_between(&rng, 10, 40) : harness_between(&rng, 0, 9));
    x.order.n_stages = harness_between(&rng, 1, 4);
    x.order.kind = kinds[harness_between(&rng, 0, 5)];
    x.order.replay = harness_chance(&rng, 0.5) ? CF_REPLAY_LOCAL : CF_REPLAY_PIPELINE;
    x.order.n_virtual = x.order.kind == CF_SCHEDULE_INTERLEAVED ? 2 : 1;
    if (x.order.kind == CF_SCHEDULE_INTERLEAVED && harness_chance(&rng, 0.2)) x.order.n_virtual = 3;
    x.order.k = harness_between(&rng, 1, 3);
    x.order.rank = x.pack.n_ranks - 1;
    x.order.split_backward = harness_chance(&rng, 0.5);
    x.order.budget = 2;
    x.offload = harness_chance(&rng, 0.5);
    x.offload_gradients = x.offload && harness_chance(&rng, 0.6);
    x.boundary_words = harness_between(&rng, 1, 3);
    if (n_devices > 1 && harness_chance(&rng, 0.7))
        for (int64_t i = 0; i < x.order.n_stages; i++) x.devices.push_back((int)harness_between(&rng, 0, n_devices - 1));
    set_stages(&x, &rng);
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

/* Loads and runs a setting twice, with other seeds. */
static bool check_setting(const setting &x) {
    batch b;
    cf_error error = {};
    harness_note("%s", x.name.c_str());
    if (!make_batch(x, &b)) return false;
    host_model host(x, b, 77 + x.seed);
    host.run();
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
    x.order.n_stages = x.order.n_virtual = 1;
    x.pack = cf_pack_desc();
    x.pack.chunk_size = 4;
    x.offload = 0;
    harness_rng rng = {1};
    set_stages(&x, &rng);
    (void)describe(&x);
    check_setting(x);
}

TEST(random_batches) {
    const int n_devices = devices_at_hand();
    for (uint64_t seed = 0; seed < 200; seed++)
        if (!check_setting(random_setting(seed, n_devices))) break;
}


/* ---- places, against a walk of its own ---- */

/* A range of addresses that something uses in the actions begin .. end - 1 of a stage. */
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

/* The rows of every plane that belong to a chunk from action `begin` on. */
static void claim_rows(claims *to, const cf_state &s, int64_t first, int64_t n, int64_t begin, int64_t end,
                       const char *what, int64_t chunk) {
    for (int64_t plane = 0; plane < (s.one_layer ? 2 : 2 * s.n_layers); plane++)
        to->add((const char *)s.data + (plane * s.rows + first) * WIDTH * 4, n * WIDTH * 4, begin, end, what, chunk);
}

/* A chunk's rows from its F, or of its gradient from its group's first backward, to its own; less the moves. */
static void claim_chunk_rows(claims *to, const device_model &m, const positions &p, const std::vector<int64_t> &moves,
                             const seen_pass &s) {
    const cf_chunk &c = m.b.plan->chunks[s.action.chunk];
    const int64_t v = s.action.stage, chunk = s.action.chunk;
    const int64_t rows = c.group < 0 || c.n_slices > 1 ? c.padded : cf_chunk_state_tokens(m.b.plan, chunk);
    const int64_t own = first_of(at(p, CF_B, v, chunk), at(p, CF_I, v, chunk));
    int64_t held = at(p, CF_F, v, chunk), held_gradient = own;
    if (c.group >= 0) {
        const cf_group &g = m.b.plan->groups[c.group];
        const int64_t last = g.first_chunk + g.n_chunks - 1;
        held_gradient = first_of(at(p, CF_B, v, last), at(p, CF_I, v, last));
    }
    const int64_t first_backward = held_gradient;
    for (size_t i = 0; i + 1 < moves.size(); i += 2) {
        claim_rows(to, s.step.state, c.prefix, rows, held, moves[i] + 1, "state", chunk);
        held = moves[i + 1];
        if (!m.x.offload_gradients || moves[i] < first_backward) continue;
        claim_rows(to, s.step.gradient, c.prefix, rows, held_gradient, moves[i] + 1, "gradient", chunk);
        held_gradient = moves[i + 1];
    }
    claim_rows(to, s.step.state, c.prefix, rows, held, own + 1, "state", chunk);
    claim_rows(to, s.step.gradient, c.prefix, rows, held_gradient, own + 1, c.group < 0 ? "shared" : "gradient", chunk);
}

/* Where a tensor that a pass reads begins and ends to be needed on this stage. */
static void claim_input(claims *to, const device_model &m, const positions &p, const seen_pass &s,
                        const std::map<const void *, int64_t> &made) {
    const cf_action &a = s.action;
    const bool local = m.b.made->replay == CF_REPLAY_LOCAL;
    const int receive = a.pass == CF_B || a.pass == CF_I ? CF_RECV_B : a.pass == CF_R && !local ? CF_RECV_R : CF_RECV_F;
    int64_t begin = at(p, receive, a.stage, a.chunk), end = s.position + 1;
    if (!s.step.input) return;
    if (a.pass == CF_F && !a.keep && local) end = at(p, CF_R, a.stage, a.chunk) + 1;
    if (a.pass == CF_R && local) return; /* its F has claimed it */
    if (m.n_stages() == 1) begin = made.count(s.step.input) ? made.at(s.step.input) + 1 : -1;
    if (!CHECK(begin >= 0)) return;
    to->add(s.step.input, s.step.boundary_bytes, begin, end, "arena: input", a.chunk);
}

static void claim_output(claims *to, const device_model &m, const positions &p, const seen_pass &s) {
    const cf_action &a = s.action;
    const int send = a.pass == CF_F ? CF_SEND_F : a.pass == CF_R ? CF_SEND_R : CF_SEND_B;
    int64_t end = at(p, send, a.stage, a.chunk) + 1;
    if (!s.step.output) return;
    if (m.n_stages() == 1) end = s.position + 1; /* then it is the reader's input */
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

static bool check_stage_places(const device_model &m, int64_t stage) {
    const cf_schedule *s = cf_executor_schedule(m.executor);
    const int64_t n = s->first[stage + 1] - s->first[stage];
    std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>> moves;
    std::map<const void *, int64_t> made; /* one stage: which action made what lies there now */
    positions p;
    claims all;
    for (int64_t i = 0; i < n; i++) {
        const cf_action &a = s->actions[s->first[stage] + i];
        p[{a.pass, a.stage, a.chunk}] = i;
        if (a.pass == CF_OFFLOAD || a.pass == CF_PREFETCH) moves[{a.stage, a.chunk}].push_back(i);
    }
    for (const seen_pass &x : m.seen) {
        if (x.stage != stage) continue;
        claim_pass(&all, m, p, x);
        claim_input(&all, m, p, x, made);
        if (x.step.output) made[x.step.output] = x.position;
        if (x.action.pass == CF_B || x.action.pass == CF_I)
            claim_chunk_rows(&all, m, p, moves[{x.action.stage, x.action.chunk}], x);
        if (x.action.pass == CF_F && x.action.stage == stage) /* its other virtual stages use the same */
            all.add(x.step.positions, 4 * x.step.metadata->padded, 0, n, "positions", x.action.chunk);
    }
    cf_executor_memory memory = {};
    cf_error error = {};
    bool ok = check_disjoint(all) && CHECK_INT(cf_executor_memory_of(m.executor, stage, &memory, &error), CF_OK);
    uintptr_t low = UINTPTR_MAX, high = 0;
    for (const claim &c : all.all) {
        low = std::min(low, c.low);
        high = std::max(high, c.high);
    }
    ok = ok && (all.all.empty() || CHECK((int64_t)(high - low) <= memory.total));
    if (m.n_stages() > 1) ok = ok && CHECK_INT(memory.arena_live, all.peak("arena", n, 256));
    ok = ok && CHECK_INT(memory.state_live, all.peak("state", n, 1));
    ok = ok && CHECK_INT(memory.gradient_live, all.peak("gradient", n, 1));
    ok = ok && CHECK(memory.arena >= memory.arena_live && memory.state >= memory.state_live &&
                     memory.gradient >= memory.gradient_live && memory.allocated >= memory.total);
    return ok && CHECK_INT(memory.total, memory.arena + memory.state + memory.gradient + memory.workspace +
                                             memory.metadata);
}

/* The interpreter's books, by a dry run of another's. */
static bool check_books(const device_model &m, int64_t stage) {
    cf_run_desc dry = {};
    cf_run_stats stats = {};
    cf_executor_memory memory = {};
    cf_error error = {};
    return CHECK_INT(cf_run(m.b.plan, cf_executor_schedule(m.executor), stage, &dry, &stats, &error), CF_OK) &&
           CHECK_INT(cf_executor_memory_of(m.executor, stage, &memory, &error), CF_OK) &&
           CHECK_INT(memory.stats.done, stats.done) && CHECK_INT(memory.stats.peak_slots, stats.peak_slots) &&
           CHECK_INT(memory.stats.peak_tokens, stats.peak_tokens) &&
           CHECK_INT(memory.stats.peak_states, stats.peak_states) &&
           CHECK_INT(memory.stats.peak_state_tokens, stats.peak_state_tokens) &&
           CHECK_INT(memory.stats.peak_boundaries, stats.peak_boundaries);
}

TEST(places) {
    const int n_devices = devices_at_hand();
    int64_t n_moves = 0;
    for (uint64_t seed = 1000; seed < 1150; seed++) {
        const setting x = random_setting(seed, n_devices);
        batch b;
        cf_error error = {};
        harness_note("%s", x.name.c_str());
        REQUIRE(make_batch(x, &b));
        n_moves += b.n_moves;
        device_model m(x, b, seed);
        m.note = true;
        REQUIRE(m.start(&error));
        m.clear_results();
        REQUIRE(CHECK_INT(cf_executor_run(m.executor, &error), CF_OK));
        for (int64_t stage = 0; stage < m.n_stages(); stage++)
            REQUIRE(check_stage_places(m, stage) && check_books(m, stage));
    }
    CHECK(n_moves > 300); /* the settings are not trivial */
}

/* State live is what the interpreter counts where every chunk is in a group and none is hybrid. */
TEST(state_is_what_the_books_say) {
    setting x = random_setting(7, 1);
    x.pack = cf_pack_desc();
    x.pack.chunk_size = 8;
    x.lengths = {40, 25, 32, 17};
    x.pack.no_tails = 1;
    x.order = cf_schedule_desc();
    x.order.n_stages = 3;
    x.order.n_virtual = 1;
    x.offload = 1;
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
        cf_state state = {nullptr, x.stages[(size_t)stage].n_layers, 1, WIDTH, CF_DTYPE_FP32, 0, 0};
        int64_t bytes = 0;
        REQUIRE(cf_executor_memory_of(m.executor, stage, &memory, &error) == CF_OK);
        state.rows = memory.stats.peak_state_tokens;
        CHECK_INT(cf_state_bytes(&state, memory.stats.peak_state_tokens, &bytes, &error), CF_OK);
        CHECK_INT(memory.state_live, bytes);
    }
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

/* What gaps between items cost on batches as they come: a long tail, four stages. */
TEST(gaps_are_small) {
    static const cf_schedule_kind kinds[] = {CF_SCHEDULE_PAPER, CF_SCHEDULE_1F1B, CF_SCHEDULE_INTERLEAVED,
                                             CF_SCHEDULE_ZERO_BUBBLE};
    double worst_arena = 0.0, worst_state = 0.0, worst_gradient = 0.0;
    devices_at_hand();
    for (int i = 0; i < 8; i++) {
        harness_rng rng = {(uint64_t)i};
        setting x;
        x.lengths = long_tailed(400, 65536, &rng);
        x.pack.chunk_size = 2048;
        x.order.n_stages = 4;
        x.order.kind = kinds[i % 4];
        x.order.k = 1 + i % 3;
        x.order.n_virtual = x.order.kind == CF_SCHEDULE_INTERLEAVED ? 2 : 1;
        x.order.replay = i % 2 ? CF_REPLAY_LOCAL : CF_REPLAY_PIPELINE;
        x.boundary_words = 1;
        set_stages(&x, &rng);
        (void)describe(&x);
        harness_note("%s", x.name.c_str());
        batch b;
        cf_error error = {};
        REQUIRE(make_batch(x, &b));
        device_model m(x, b, 1);
        cf_executor_desc d = m.desc();
        d.forward = d.backward = nullptr;
        REQUIRE(cf_executor_create(&d, &m.executor, &error) == CF_OK);
        const clock_t started = clock();
        REQUIRE(CHECK_INT(cf_executor_load(m.executor, b.plan, b.schedule(), &error), CF_OK));
        if (getenv("V")) printf("\nload %.0f ms, %d chunks, %d actions", 1e3 * (double)(clock() - started) / CLOCKS_PER_SEC, (int)b.plan->n_chunks, (int)cf_executor_schedule(m.executor)->n_actions);
        for (int64_t stage = 0; stage < 4; stage++) {
            cf_executor_memory memory = {};
            REQUIRE(cf_executor_memory_of(m.executor, stage, &memory, &error) == CF_OK);
            if (getenv("V")) printf("\n%d %s stage %d: arena %.3f (%lld) state %.3f (%lld) gradient %.3f", i, x.name.c_str(), (int)stage, (double)memory.arena / (double)memory.arena_live, (long long)memory.arena_live, (double)memory.state / (double)memory.state_live,(long long)memory.state_live, (double)memory.gradient / (double)memory.gradient_live);
            worst_arena = std::max(worst_arena, (double)memory.arena / (double)memory.arena_live);
            worst_state = std::max(worst_state, (double)memory.state / (double)memory.state_live);
            worst_gradient = std::max(worst_gradient, (double)memory.gradient / (double)memory.gradient_live);
        }
    }
    CHECK(worst_arena < 1.5);
    CHECK(worst_state < 1.8); /* of two long groups one grows while the other shrinks, and both grow upwards */
    CHECK(worst_gradient < 1.5);
    harness_report("laid out / live at most: arena %.3f, state %.3f, gradient %.3f", worst_arena, worst_state,
                   worst_gradient);
}

#ifdef CHUNKFLOW_CUDA_EMULATION
/* ---- every order of streams ---- */

TEST(every_order) {
    const int n_devices = devices_at_hand();
    for (uint64_t seed = 2000; seed < 2040; seed++) {
        const setting x = random_setting(seed, n_devices);
        bool ok = true;
        cuda_emu_each_policy(3, [&] {
            if (ok) ok = check_setting(x) && CHECK_INT(cuda_emu_faults(), 0);
        });
        if (ok) continue;
        FAIL("%s: %s", cuda_emu_policy_name(), cuda_emu_first_fault());
        break;
    }
    cuda_emu_defaults();
}
#endif

#ifdef CHUNKFLOW_CUDA_EMULATION
#define EMULATED_CASES , CASE(every_order)
#else
#define EMULATED_CASES
#endif

SUITE(executor, CASE(one_chunk), CASE(random_batches), CASE(places),
      CASE(state_is_what_the_books_say), CASE(gaps_are_small) EMULATED_CASES);
