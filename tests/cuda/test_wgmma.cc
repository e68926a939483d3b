/* Tests attention on the wgmma path where it differs from the other fused path: larger steps, whole-token tiles, bulk
   copies. test_attention.cc tests more of what they share, and all of it with CHUNKFLOW_TEST_WGMMA in the environment.
   Runs under the emulation and on a device of compute capability 9.0. */

#include "../harness.h"
#include "device.h"

#include <cuda_runtime.h>

#include <cmath>
#include <cstring>

static run_options wgmma_options() {
    run_options o;
    o.path = CF_ATTENTION_WGMMA;
    o.arch = 90;
    return o;
}

static const run_options wgmma = wgmma_options();

#define NEEDS_WGMMA() \
    if (last_path() != CF_ATTENTION_WGMMA) SKIP("not of compute capability 9.0")

static host_problem problem_of(int n_heads, int n_kv_heads, int head_size) {
    host_problem p;
    p.n_heads = n_heads;
    p.n_kv_heads = n_kv_heads;
    p.head_size = head_size;
    return p;
}

/* Shapes around the edges of tiles of 128 rows and steps of 128 keys. Types, masks and options change from shape to
   shape. */
TEST(shapes) {
    const int shapes[][2] = {{1, 1},     {1, 257},   {2, 1},     {127, 127}, {128, 128}, {129, 129}, {64, 128},
                             {113, 203}, {128, 385}, {130, 512}, {307, 256}, {257, 513}, {5, 640},   {200, 201}};
    NEEDS_WGMMA();
    for (int i = harness_rounds(0, 1); i < 14; i += harness_rounds(1, 3)) {
        host_problem p = problem_of(1, 1, 128);
        run_options o = wgmma;
        p.dtype = i % 3 == 2 ? CF_DTYPE_FP16 : CF_DTYPE_BF16;
        p.full = i % 4 == 1;
        p.window = i % 5 == 3 ? 70 : 0;
        p.softcap = i % 6 == 4 ? 2.5 : 0.0;
        p.add_slice(shapes[i][0], shapes[i][1]);
        o.deterministic = i % 2 != 0;
        o.overwrite = i % 4 >= 2;
        o.strided = i % 5 == 1;
        check_problem(p, o, (uint64_t)i);
    }
}

/* Groups that fill tiles and groups that do not, up to one token to 64 rows; smaller heads, whose remaining columns are
   past the end of the tensor. */
TEST(groups) {
    const int heads[][3] = {{3, 1, 128}, {7, 1, 128}, {10, 2, 96}, {16, 2, 72}, {28, 1, 120}, {64, 1, 128}, {6, 3, 64}};
    NEEDS_WGMMA();
    for (int i = harness_rounds(0, 1); i < 7; i += harness_rounds(1, 5)) {
        host_problem p = problem_of(heads[i][0], heads[i][1], heads[i][2]);
        run_options o = wgmma;
        p.dtype = i % 2 ? CF_DTYPE_FP16 : CF_DTYPE_BF16;
        o.deterministic = i % 2 != 0;
        o.strided = i % 3 == 1;
        p.add_slice(21, 90);
        p.add_slice(9, 4); /* queries that see nothing */
        p.add_slice(6, 6);
        p.add_slice(19, 150);
        check_problem(p, o, (uint64_t)(40 + i));
    }
}

/* One key at either end decides three things: whether a block of keys, or a warpgroup's keys, need their mask, and
   whether a row tile sees any of a warpgroup's keys. The last tile of the second slice sees one key, the first or last
   of 64. */
TEST(mask_edges) {
    NEEDS_WGMMA();
    for (int i = 0; i < 4; i++) {
        host_problem p = problem_of(1, 1, 128);
        run_options o = wgmma;
        p.window = i % 2 ? 145 : 0;
        o.deterministic = i >= 2;
        p.add_slice(20, 146);
        if (i % 2) p.add_slice(84, 84 + 145 - 2);
        else p.add_slice(65, 65);
        check_problem(p, o, (uint64_t)(90 + i));
    }
}

/* Another document's keys follow a document's own in memory. Infinities or NaNs in them reach no row of this one. */
TEST(nan_in_the_next_document) {
    NEEDS_WGMMA();
    for (int i = 0; i < 4; i++) {
        host_problem p = problem_of(2, 1, 128);
        device_results got, wanted;
        run_options o = wgmma;
        o.deterministic = i >= 2;
        o.overwrite = true;
        p.add_slice(i % 2 ? 30 : 150, 150);
        p.add_slice(40, 40);
        host_inputs clean = random_inputs(p, 4), in = clean;
        const size_t q_row = 2 * 128, k_row = 128, first_q = (size_t)(i % 2 ? 30 : 150) * q_row, first_k = 150 * k_row;
        for (size_t j = first_k; j < first_k + 40 * k_row; j++) in.k[j] = in.v[j] = j % 2 ? NAN : INFINITY;
        for (size_t j = first_q; j < first_q + 40 * q_row; j++) in.q[j] = in.dout[j] = NAN;
        if (!run_on_device(p, in, o, &got) || !run_on_device(p, clean, o, &wanted)) return;
        for (size_t j = 0; j < first_q; j++)
            if (!CHECK(got.values.out[j] == wanted.values.out[j]) || !CHECK(std::isfinite(got.values.dq[j])) ||
                !CHECK(!o.deterministic || got.values.dq[j] == wanted.values.dq[j]))
                return;
        for (size_t j = 0; j < first_k; j++)
            if (!CHECK(got.values.dk[j] == wanted.values.dk[j] && got.values.dv[j] == wanted.values.dv[j])) return;
        CHECK(std::isnan(got.values.out[first_q]));
    }
}

/* Split tiles give the results of whole ones, except for the order of sums, and always the same bits. */
TEST(parts) {
    NEEDS_WGMMA();
    for (int i = 0; i < harness_rounds(2, 1); i++) {
        host_problem p = problem_of(2, 1, 128);
        run_options o = wgmma, whole;
        device_results one, other;
        p.softcap = i ? 3.0 : 0.0;
        p.scale = i ? 0.0 : 0.5; /* greatest scores far apart */
        o.processors = 100;
        o.deterministic = true;
        p.add_slice(9, 30);
        p.add_slice(20, 1400 + 63 * i);
        if (i == 0) check_problem(p, o, (uint64_t)(400 + i));
        whole = o;
        whole.processors = 1;
        const host_inputs in = random_inputs(p, (uint64_t)(400 + i));
        if (!run_on_device(p, in, o, &one) || !run_on_device(p, in, whole, &other)) return;
        CHECK(one.attention.n_split_forward_tiles > 0);
        CHECK_INT(other.attention.n_split_forward_tiles, 0);
        for (size_t j = 0; j < one.values.lse.size(); j++) {
            const double a = one.values.lse[j], b = other.values.lse[j];
            if (!CHECK(a == b || std::fabs(a - b) <= 0x1p-20 * std::fabs(b))) break;
        }
        if (!run_on_device(p, in, o, &other)) return;
        CHECK(one.bits == other.bits);
    }
}

/* Splits of a forward in fp16, and of keys of small heads. */
TEST(parts_of_other_shapes) {
    NEEDS_WGMMA();
    for (const bool of_keys : {false, true}) {
        host_problem p = of_keys ? problem_of(9, 1, 64) : problem_of(2, 1, 128);
        run_options o = wgmma;
        device_results got;
        p.dtype = CF_DTYPE_FP16;
        o.processors = of_keys ? 132 : 100;
        o.backward = of_keys;
        p.add_slice(of_keys ? 37 : 9, of_keys ? 37 : 30);
        p.add_slice(of_keys ? 131 : 20, of_keys ? 131 : 1400);
        if (!check_problem(p, o, 410 + of_keys, &got)) return;
        CHECK((of_keys ? got.attention.n_split_key_tiles : got.attention.n_split_forward_tiles) > 0);
    }
}

/* Late in the loop one row of a warp meets a greater score than before. On either fused path its results so far are
   scaled down, and no other row's are. */
TEST(one_row_is_scaled_down) {
    for (int i = 0; i < 8; i++) {
        const int row = 5 + 8 * (i / 2), head_size = i % 2 ? 64 : 128;
        host_problem p = problem_of(1, 1, head_size);
        run_options o = wgmma;
        p.add_slice(40, 300);
        o.backward = false;
        host_inputs in = random_inputs(p, (uint64_t)(700 + i));
        in.q.assign(in.q.size(), 0.0f);
        in.k.assign(in.k.size(), 0.0f);
        for (int j = 0; j < 40; j++) in.q[(size_t)(j * head_size)] = j == row ? 1.0f : -1.0f;
        in.k[(size_t)(7 * head_size)] = 40.0f; /* keys are processed from last to first */
        const host_results exact = reference_exact(p, in), rounded = reference_rounded(p, in);
        for (cf_attention_path path : {CF_ATTENTION_MMA, CF_ATTENTION_WGMMA}) {
            device_results got;
            o.path = path;
            if (path > last_path()) continue;
            if (!run_on_device(p, in, o, &got)) return;
            check_accuracy("out", p.dtype, got.values.out, exact.out, rounded.out, 2.0);
        }
    }
}

static void emulate_order(int how) {
#ifdef CHUNKFLOW_CUDA_EMULATION
    cuda_emu_set_order(how % 2);
    cuda_emu_set_arrivals((cuda_emu_arrivals)(how % 4), (uint64_t)how);
#else
    (void)how;
#endif
}

/* Checks that the forward gives the same bits for any number of blocks that share the tiles, whenever copies land and
   in any order of warps. Each `how` is another order. */
static bool check_turns(const host_problem &p, run_options o, const host_inputs &in, int how,
                        std::initializer_list<int> processors, device_results *first) {
    device_results other;
    bool ok = run_on_device(p, in, o, first);
    for (const int n : processors) {
        emulate_order(how++);
        o.processors = n;
        ok = ok && run_on_device(p, in, o, &other) && CHECK(first->bits == other.bits) &&
             CHECK(memcmp(first->values.lse.data(), other.values.lse.data(), other.values.lse.size() * 8) == 0);
#ifdef CHUNKFLOW_CUDA_EMULATION
        CHECK_INT(cuda_emu_total().conflicts, 0);
#endif
    }
    emulate_order(0);
    return ok;
}

/* Documents of one block of keys and of several, tails, prefixes, groups, masks, and NaNs that no row may see. First
   each tile has its own block; then few blocks share the tiles, and the last ones are short. */
TEST(many_tiles) {
    const int heads[][3] = {{2, 1, 128}, {7, 1, 64}, {3, 3, 128}, {10, 2, 96}, {6, 2, 128}, {5, 1, 64}};
    NEEDS_WGMMA();
    for (int i = harness_rounds(0, 1); i < 6; i += harness_rounds(1, 5)) {
        host_problem p = problem_of(heads[i][0], heads[i][1], heads[i][2]);
        run_options o = wgmma;
        device_results alone;
        p.dtype = i % 2 ? CF_DTYPE_FP16 : CF_DTYPE_BF16;
        p.full = i == 3;
        p.window = i == 1 || i % 3 == 2 ? 170 : 0;
        p.softcap = i == 1 ? 2.5 : 0.0;
        o.backward = false;
        o.strided = i % 2 != 0;
        o.processors = 1000;
        p.add_slice(21, 90);
        p.add_slice(70, 400 + 37 * i);
        p.add_slice(9, 4);
        p.add_slice(130, 270);
        p.add_slice(30, 30);
        host_inputs in = random_inputs(p, (uint64_t)(500 + i));
        const size_t k_row = (size_t)(heads[i][1] * heads[i][2]), first = (size_t)p.cu_k[4] * k_row;
        for (size_t j = first; j < first + 30 * k_row; j++) in.k[j] = in.v[j] = NAN;
        if (!check_turns(p, o, in, i, {1, 2 + i}, &alone)) return;
        CHECK_INT(alone.attention.n_split_forward_tiles, 0);
    }
}

TEST(many_parts) {
    NEEDS_WGMMA();
    for (int i = 0; i < 2; i++) {
        host_problem p = problem_of(2, 1, i ? 64 : 128);
        run_options o = wgmma;
        device_results got;
        o.processors = i ? 40 : 100;
        o.backward = false;
        p.add_slice(9, 30);
        p.add_slice(20, 1400 + 63 * i);
        const host_inputs in = random_inputs(p, (uint64_t)(600 + i));
        if (!check_turns(p, o, in, 3 + i, {o.processors, o.processors}, &got)) return;
        CHECK(got.attention.n_split_forward_tiles > 0);
    }
}

#ifdef CHUNKFLOW_CUDA_EMULATION
/* The same bits and no fault whenever copies land and in any order of warps. The exception is dQ by atomic additions,
   whose order is that of the blocks. */
TEST(arrivals) {
    for (int deterministic = 0; deterministic < 2; deterministic++) {
        host_problem p = problem_of(harness_rounds(6, 3), harness_rounds(2, 1), 128);
        run_options o = wgmma;
        device_results first, other;
        o.deterministic = deterministic != 0;
        p.add_slice(45, 300);
        p.add_slice(70, 70);
        const host_inputs in = random_inputs(p, 9);
        if (!run_on_device(p, in, o, &first)) return;
        for (int how = harness_rounds(1, 1 + deterministic); how < 5; how += harness_rounds(1, 2)) {
            cuda_emu_set_order(how % 2);
            cuda_emu_set_arrivals(how > 2 ? CUDA_EMU_ARRIVE_AT_RANDOM : (cuda_emu_arrivals)how, (uint64_t)how);
            const bool ok = run_on_device(p, in, o, &other);
            cuda_emu_set_order(0);
            cuda_emu_set_arrivals(CUDA_EMU_ARRIVE_LATE);
            if (!ok) return;
            CHECK(first.values.out == other.values.out && first.values.lse == other.values.lse);
            CHECK(first.values.dk == other.values.dk && first.values.dv == other.values.dv);
            if (deterministic) CHECK(first.bits == other.bits);
        }
    }
}

/* A causal problem does about half the products of a full one. A window does a share that does not grow with the keys.
   Nothing is loaded that is not used. */
TEST(masked_blocks_are_skipped) {
    host_problem p = problem_of(1, 1, 128);
    run_options o = wgmma;
    device_results got;
    const int64_t tile_bytes = 128 * 256; /* of keys, or of two row tiles */
    p.add_slice(512, 512);
    const host_inputs in = random_inputs(p, 1);
    const int64_t blocks[3] = {4 * 4, 1 + 2 + 3 + 4, 1 + 2 + 2 + 2}; /* blocks of keys for each tile of 128 rows */
    const int64_t row_tiles[3] = {4 * 8, 8 + 6 + 4 + 2, 4 + 4 + 4 + 2}; /* by key tile */
    const int64_t halves[3] = {2 * 4 * 8, 8 + 7 + 6 + 5 + 4 + 3 + 2 + 1, 6 * 3 + 2 + 1}; /* by 64 keys: row tiles */
    for (int i = 0; i < 3; i++) {
        p.full = i == 0;
        p.window = i == 2 ? 100 : 0;
        if (!run_on_device(p, in, o, &got)) return;
        const cuda_emu_counts forward = cuda_emu_kernel("attention_forward");
        const cuda_emu_counts backward = cuda_emu_kernel("attention_backward");
        CHECK_INT(forward.wgmma, blocks[i] * 2 * (8 + 8)); /* two warpgroups: scores, values */
        CHECK_INT(forward.bulk_bytes, (2 * blocks[i] + 4) * tile_bytes);
        CHECK_INT(backward.wgmma, halves[i] * (8 + 8 + 4 + 4) + row_tiles[i] * 2 * 8); /* scores, dP, dV, dK; dQ */
        CHECK_INT(backward.bulk_bytes, 4 * 2 * tile_bytes + row_tiles[i] * (tile_bytes + 512));
        CHECK_INT(cuda_emu_total().mma, 0);
        CHECK_INT(cuda_emu_total().conflicts, 0);
    }
}

/* Blocks that share tiles do the same work as blocks with one tile each. In each step of a tile except the first, both
   warpgroups wait for their turn. */
TEST(turns) {
    host_problem p = problem_of(1, 1, 128);
    run_options o = wgmma;
    device_results got;
    cuda_emu_counts counts[2];
    p.add_slice(512, 512);
    o.backward = false;
    const host_inputs in = random_inputs(p, 1);
    for (int i = 0; i < 2; i++) {
        o.processors = i ? 4 : 3;
        if (!run_on_device(p, in, o, &got)) return;
        counts[i] = cuda_emu_kernel("attention_forward");
        CHECK_INT(counts[i].blocks, o.processors);
        /* A barrier for each block; for each tile of 128 rows one, and those of its turns. */
        CHECK_INT(counts[i].barriers, o.processors + 4 + 2 * (0 + 1 + 2 + 3));
    }
    CHECK_INT(counts[0].wgmma, counts[1].wgmma);
    CHECK_INT(counts[0].bulk_bytes, counts[1].bulk_bytes);
}

/* A driver without the function that makes tensor maps, and arrays that tensor maps cannot describe. */
TEST(refused_calls) {
    const int32_t cu[2] = {0, 10};
    cf_attention_desc d;
    cf_attention_tensors x;
    cf_error error;
    const cf_attention *a = nullptr;
    std::vector<uint64_t> memory(4096);
    void *data = nullptr, *tiles = nullptr, *workspace = nullptr;
    memset(&d, 0, sizeof d);
    memset(&x, 0, sizeof x);
    d.n_heads = 2, d.head_size = 128, d.n_slices = 1, d.cu_seqlens_q = d.cu_seqlens_k = cu, d.arch = 90;
    d.path = CF_ATTENTION_WGMMA;
    REQUIRE(cf_attention_prepare(&d, memory.data(), memory.size() * 8, &a, &error) == CF_OK);
    CHECK_INT(a->path, CF_ATTENTION_WGMMA);
    CHECK(cudaMalloc(&data, 10 * 256 * 2) == cudaSuccess && cudaMalloc(&tiles, a->tiles_bytes) == cudaSuccess);
    CHECK(cudaMalloc(&workspace, a->forward_bytes) == cudaSuccess);
    CHECK(cudaMemcpy(tiles, a->tiles, a->tiles_bytes, cudaMemcpyHostToDevice) == cudaSuccess);
    x.q.data = x.k.data = x.v.data = x.out.data = data;
    x.tiles = tiles, x.workspace = workspace;
    CHECK_INT(cf_attention_forward(a, &x, nullptr, &error), CF_ERROR_SPACE);
    CHECK_STR(error.field, "workspace_bytes");
    x.workspace_bytes = a->forward_bytes;
    for (int how = 0; how < 3; how++) {
        cuda_emu_reset();
        memset(&error, 0, sizeof error);
        x.k.row_stride = how == 0 ? (int64_t)1 << 39 : 0;
        if (how > 0) cuda_emu_fail_call(how, cudaErrorNotSupported); /* the kernel's attributes; the entry point */
        CHECK_INT(cf_attention_forward(a, &x, nullptr, &error), how == 0 ? CF_ERROR_LIMIT : CF_ERROR_DEVICE);
        CHECK_STR(error.field, how == 0 ? "k" : how == 1 ? "path" : "cuTensorMapEncodeTiled");
        CHECK_INT(cuda_emu_total().launches, 0);
    }
    cuda_emu_reset();
    for (void *block : {data, tiles, workspace}) cudaFree(block);
}
#endif

/* The path is chosen if it supports the problem, and refuses by name what it does not support. */
TEST(choice) {
    const struct {
        cf_dtype dtype;
        int n_heads, head_size, arch;
        const char *refusal; /* NULL: none */
    } cases[] = {{CF_DTYPE_BF16, 4, 128, 90, nullptr},
                 {CF_DTYPE_FP16, 64, 72, 90, nullptr},
                 {CF_DTYPE_FP32, 4, 128, 90, "16-bit types"},
                 {CF_DTYPE_BF16, 4, 136, 90, "head size on this architecture (wanted 128, got 136)"},
                 {CF_DTYPE_BF16, 65, 128, 90, "heads for each key head (wanted 64, got 65)"},
                 {CF_DTYPE_BF16, 4, 128, 80, "architecture (wanted 90, got 80)"},
                 {CF_DTYPE_BF16, 4, 128, 100, "architecture (wanted 90, got 100)"}};
    const int32_t cu[2] = {0, 10};
    for (const auto &one : cases) {
        cf_attention_desc d;
        cf_error error;
        const cf_attention *a = nullptr;
        std::vector<uint64_t> memory(4096);
        memset(&d, 0, sizeof d);
        memset(&error, 0, sizeof error);
        d.dtype = one.dtype, d.n_heads = one.n_heads, d.n_kv_heads = 1, d.head_size = one.head_size, d.arch = one.arch;
        d.n_slices = 1, d.cu_seqlens_q = d.cu_seqlens_k = cu;
        REQUIRE(cf_attention_prepare(&d, memory.data(), memory.size() * 8, &a, &error) == CF_OK);
        CHECK_INT(a->path == CF_ATTENTION_WGMMA, !one.refusal && last_path() == CF_ATTENTION_WGMMA);
        d.path = CF_ATTENTION_WGMMA;
        const cf_result code = cf_attention_prepare(&d, memory.data(), memory.size() * 8, &a, &error);
        CHECK_INT(code, one.refusal ? CF_ERROR_ARGUMENT : CF_OK);
        if (!one.refusal) {
            CHECK_INT(a->path, CF_ATTENTION_WGMMA);
            continue;
        }
        CHECK_STR(error.field, "path");
        if (!CHECK(strstr(error.text, one.refusal) != nullptr)) printf("    %s\n", error.text);
    }
}

#ifdef CHUNKFLOW_CUDA_EMULATION
#define EMULATED CASE(arrivals), CASE(masked_blocks_are_skipped), CASE(turns), CASE(refused_calls),
#else
#define EMULATED
#endif

SUITE(wgmma, CASE(shapes), CASE(groups), CASE(mask_edges), CASE(nan_in_the_next_document), CASE(parts),
      CASE(parts_of_other_shapes), CASE(one_row_is_scaled_down), CASE(many_tiles), CASE(many_parts),
      EMULATED CASE(choice));
