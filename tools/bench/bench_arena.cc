/* bench_arena.cc - device memory that the executor lays out for a batch, beside the most that is in use at once - MIT
   or public domain

       bench_arena BATCH FILE ...      FILE: lengths, one a line; BATCH of them are one batch

   Needs no device, only a chunkflow_cuda.cu that answers cf_executor_memory_of: `make build/cuda/bench_arena` links the
   emulated one. Sizes are those of a 7B model in 16 bits that keeps all activations, with state on the device. Prints a
   line for each batch and setting, and a summary. */

#define CHUNKFLOW_IMPLEMENTATION
#include "../../chunkflow.h"
#define CHUNKFLOW_CUDA_HEADER_ONLY
#include "../../chunkflow_cuda.cu"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

static const int64_t HIDDEN = 3584, LAYERS = 28, KV_HEADS = 4, HEAD_SIZE = 128, ACTIVATIONS_PER_LAYER = 34;

static void need(cf_result code, const cf_error &error) {
    if (code == CF_OK) return;
    fprintf(stderr, "bench_arena: %s\n", error.text);
    exit(1);
}

struct sums {
    double log_ratio = 0.0, worst = 0.0, laid_out = 0.0;
    int n = 0;
};

/* Bytes of arena, state and gradient: as laid out, and the most in use at once, over all stages. */
struct parts {
    double laid_out[3] = {0.0, 0.0, 0.0}, live[3] = {0.0, 0.0, 0.0};
};

static parts ask(const cf_plan *plan, const cf_schedule_desc &order) {
    const int64_t n = order.shape.n_stages;
    std::vector<cf_cuda_stage> stages((size_t)n);
    std::vector<cf_executor_memory> memory((size_t)n);
    cf_schedule *made = nullptr;
    cf_executor *executor = nullptr;
    cf_executor_desc d = {};
    cf_error error = {};
    parts all;
    for (cf_cuda_stage &one : stages) {
        one = cf_cuda_stage();
        one.n_layers = LAYERS / n;
        one.activation_bytes_per_token = one.n_layers * ACTIVATIONS_PER_LAYER * HIDDEN;
    }
    d.n_stages = n, d.stages = stages.data(), d.boundary_bytes_per_token = HIDDEN * 2;
    d.attention.n_kv_heads = KV_HEADS, d.attention.head_size = HEAD_SIZE;
    need(cf_executor_create(&d, &executor, &error), error);
    need(cf_schedule_make(plan, &order, &made, &error), error);
    need(cf_executor_memory_of(executor, plan, made, memory.data(), &error), error);
    for (const cf_executor_memory &m : memory) {
        const int64_t laid_out[] = {m.arena, m.state, m.gradient};
        const int64_t live[] = {m.arena_live, m.state_live, m.gradient_live};
        for (int i = 0; i < 3; i++) all.laid_out[i] += (double)laid_out[i], all.live[i] += (double)live[i];
    }
    cf_schedule_free(made);
    cf_executor_free(executor);
    return all;
}

static void report(const std::string &name, const parts &p, sums *to) {
    const double laid_out = p.laid_out[0] + p.laid_out[1] + p.laid_out[2], live = p.live[0] + p.live[1] + p.live[2];
    printf("%-44s %7.2f GB for %7.2f live: arena %.2f for %.2f, state %.2f for %.2f, gradient %.2f for %.2f\n",
           name.c_str(), 1e-9 * laid_out, 1e-9 * live, 1e-9 * p.laid_out[0], 1e-9 * p.live[0], 1e-9 * p.laid_out[1],
           1e-9 * p.live[1], 1e-9 * p.laid_out[2], 1e-9 * p.live[2]);
    fflush(stdout);
    to->log_ratio += std::log(laid_out / live);
    to->worst = std::max(to->worst, laid_out / live);
    to->laid_out += laid_out;
    to->n++;
}

static std::vector<int64_t> read_lengths(const char *path) {
    std::vector<int64_t> lengths;
    FILE *file = fopen(path, "r");
    char line[200];
    long long length;
    if (!file) {
        fprintf(stderr, "bench_arena: cannot open %s\n", path);
        exit(1);
    }
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "%lld", &length) == 1) lengths.push_back(length);
    fclose(file);
    return lengths;
}

static void try_settings(const std::string &name, const int64_t *lengths, size_t n, std::map<std::string, sums> *all) {
    for (int64_t chunk_size : {4096, 8192, 32768})
        for (int64_t n_stages : {1, 4})
            for (int64_t k : {1, 4}) {
                cf_pack_desc pack = {};
                cf_schedule_desc order = {};
                cf_plan *plan = nullptr;
                cf_error error = {};
                pack.chunk_size = chunk_size;
                order.shape.n_stages = n_stages, order.shape.k = k;
                need(cf_pack(lengths, (int64_t)n, &pack, &plan, &error), error);
                char setting[80];
                (void)snprintf(setting, sizeof setting, "%2dK, %d stages, K %d", (int)(chunk_size / 1024),
                               (int)n_stages, (int)k);
                report(name + ", " + setting, ask(plan, order), &(*all)[setting]);
                cf_plan_free(plan);
            }
}

int main(int argc, char **argv) {
    std::map<std::string, sums> all;
    const size_t size = argc > 2 ? (size_t)atoll(argv[1]) : 0;
    const size_t most_batches = 3;
    if (size == 0) {
        fprintf(stderr, "usage: bench_arena BATCH FILE ...\n");
        return 2;
    }
    for (int f = 2; f < argc; f++) {
        const std::vector<int64_t> lengths = read_lengths(argv[f]);
        const std::string path = argv[f], file = path.substr(path.rfind('/') + 1);
        for (size_t batch = 0; batch < most_batches && (batch + 1) * size <= lengths.size(); batch++)
            try_settings(file.substr(0, 8) + " " + std::to_string(batch), &lengths[batch * size], size, &all);
    }
    printf("\n%-34s laid out / live: geometric mean, worst; GB laid out, mean\n", "");
    for (const auto &one : all)
        printf("%-34s %.3f %.3f %8.2f\n", one.first.c_str(), std::exp(one.second.log_ratio / one.second.n),
               one.second.worst, 1e-9 * one.second.laid_out / one.second.n);
    return 0;
}
