/* Tests attention, forward and backward, against float64: every path, mask, type and kind of head, with ragged, empty
   and carried slices. Outputs and workspace are full of NaN at first. Runs under the emulation and on a device. */

#include "../harness.h"
#include "device.h"

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>

static host_problem problem_of(int n_heads, int n_kv_heads, int head_size) {
    host_problem p;
    p.n_heads = n_heads;
    p.n_kv_heads = n_kv_heads;
    p.head_size = head_size;
    return p;
}

static run_options on(cf_attention_path path) {
    run_options o;
    o.path = path;
    o.arch = path == CF_ATTENTION_WGMMA ? 90 : 80;
    return o;
}

static const run_options mma = on(CF_ATTENTION_MMA), unfused = on(CF_ATTENTION_UNFUSED);

/* On the host alone. */
struct prepared_problem {
    std::vector<uint64_t> memory;
    const cf_attention *a = nullptr;
    cf_attention_desc d;

    bool make(const host_problem &p, const run_options &o) {
        size_t bytes = 0;
        memset(&d, 0, sizeof d);
        d.n_heads = p.n_heads, d.n_kv_heads = p.n_kv_heads, d.head_size = p.head_size, d.dtype = p.dtype;
        d.n_slices = p.n_slices(), d.cu_seqlens_q = p.cu_q.data(), d.cu_seqlens_k = p.cu_k.data();
        d.full = p.full, d.window = p.window, d.deterministic = o.deterministic, d.path = o.path;
        d.arch = o.arch, d.n_processors = o.processors, d.cache_bytes = o.cache;
        if (!CHECK(cf_attention_size(&d, &bytes, NULL) == CF_OK)) return false;
        memory.resize(bytes / 8 + 2);
        return CHECK(cf_attention_prepare(&d, memory.data(), bytes, &a, NULL) == CF_OK) != 0;
    }
};

/* ---- shapes ---- */

static const int shapes[][2] = {{1, 1},     {1, 3},     {2, 1},     {511, 1},   {3, 513},   {64, 128},  {113, 203},
                                {128, 217}, {113, 211}, {108, 256}, {256, 512}, {307, 256}, {640, 128}, {512, 256}};
static const int n_shapes = (int)(sizeof shapes / sizeof shapes[0]);

/* Options and types change from shape to shape, so that all pairs of them occur. */
TEST(shapes_causal) {
    for (int i = harness_rounds(0, 1); i < n_shapes; i += harness_rounds(1, 5)) {
        host_problem p = problem_of(1, 1, 64);
        run_options o = mma;
        p.dtype = i % 3 == 2 ? CF_DTYPE_FP16 : CF_DTYPE_BF16;
        p.add_slice(shapes[i][0], shapes[i][1]);
        o.deterministic = i % 2 != 0;
        o.overwrite = i % 4 >= 2;
        o.strided = i % 5 == 1;
        check_problem(p, o, (uint64_t)i);
    }
}

TEST(shapes_full) {
    for (int i = harness_rounds(0, 1); i < n_shapes; i += harness_rounds(1, 5)) {
        host_problem p = problem_of(1, 1, 64);
        run_options o = mma;
        p.full = true;
        p.dtype = i % 3 == 1 ? CF_DTYPE_FP16 : CF_DTYPE_BF16;
        p.add_slice(shapes[i][0], shapes[i][1]);
        o.deterministic = i % 2 == 0;
        o.overwrite = i % 3 == 0;
        check_problem(p, o, (uint64_t)(100 + i));
    }
}

/* Long enough for many tiles, and one row off a multiple of each tile. */
TEST(shapes_long) {
    const int lengths[][2] = {{511, 512}, {512, 511}};
    for (int i = 0; i < 2; i++) {
        host_problem p = problem_of(1, 1, 64);
        run_options o = mma;
        p.add_slice(lengths[i][0], lengths[i][1]);
        o.deterministic = i == 1;
        check_problem(p, o, (uint64_t)(7 + i));
    }
}

/* ---- heads ---- */

TEST(groups_of_heads) {
    const int heads[][2] = {{6, 6}, {6, 2}, {6, 1}, {7, 1}, {16, 2}, {16, 1}};
    for (int i = 0; i < 6; i++)
        for (int size = harness_rounds(64, 64 << i / 2 % 2); size <= 128; size += harness_rounds(64, 128)) {
            host_problem p = problem_of(heads[i][0], heads[i][1], size);
            run_options o = mma;
            p.add_slice(37, 37);
            p.add_slice(21, 90);
            o.deterministic = (i + size / 64) % 2 != 0;
            o.strided = i % 2 != 0;
            o.arch = i % 3 ? 90 : 80; /* where the sums of dq have another layout */
            check_problem(p, o, (uint64_t)(20 + i));
        }
}

TEST(head_sizes) {
    for (int size = 8; size <= 256; size += harness_rounds(8, 24)) {
        host_problem p = problem_of(2, 1, size);
        p.dtype = size % 16 != 0 ? CF_DTYPE_FP16 : CF_DTYPE_BF16;
        p.add_slice(33, 57);
        check_problem(p, unfused, (uint64_t)size);
        run_options o = mma;
        o.deterministic = size % 24 == 0;
        o.strided = size % 40 == 0;
        o.by_name = size > 128; /* which wgmma has not */
        if (size > largest_mma_head()) o.path = CF_ATTENTION_AUTO;
        check_problem(p, o, (uint64_t)size);
    }
}

/* Larger heads have their own tiles: lengths around them, a window and a softcap, split tiles in both directions, NaNs
   in the next document, both ways to dQ. */
TEST(head_256) {
    if (largest_mma_head() < 256) SKIP("the path with mma ends at 128 here");
    for (int i = 0; i < harness_rounds(4, 1); i++) {
        const bool parts = i % 2 == 0;
        host_problem p = problem_of(parts ? 8 : 6, parts ? 1 : 2, i == 1 ? 200 : 256);
        run_options o = mma;
        device_results got;
        o.by_name = true;
        p.dtype = i % 2 ? CF_DTYPE_FP16 : CF_DTYPE_BF16;
        p.window = i == 1 ? 75 : 0;
        p.softcap = i == 2 ? 3.0 : 0.0;
        o.arch = i == 3 ? 90 : 80;
        o.deterministic = i >= 2;
        o.strided = i == 1;
        o.processors = parts ? 100 : 1;
        p.add_slice(parts ? 4 : 65, parts ? 1100 : 129);
        p.add_slice(1, 64);
        p.add_slice(0, 30);
        p.add_slice(parts ? 140 : 70, parts ? 140 : 70);
        if (!check_problem(p, o, (uint64_t)(700 + i), &got)) return;
        CHECK_INT(got.attention.path, CF_ATTENTION_MMA);
        CHECK_INT(got.attention.n_split_forward_tiles > 0, parts);
        CHECK_INT(got.attention.n_split_key_tiles > 0, parts);
#ifdef CHUNKFLOW_CUDA_EMULATION
        CHECK_INT(cuda_emu_total().conflicts, 0);
#endif
    }
}

TEST(head_128) {
    const int lengths[][2] = {{129, 129}, {64, 257}, {200, 130}, {1, 128}};
    for (int i = 0; i < 4; i++)
        for (int deterministic = harness_rounds(0, i / 2); deterministic < 2; deterministic += harness_rounds(1, 2)) {
            host_problem p = problem_of(2, 2, 128);
            run_options o = mma;
            p.dtype = i == 2 ? CF_DTYPE_FP16 : CF_DTYPE_BF16;
            p.add_slice(lengths[i][0], lengths[i][1]);
            o.deterministic = deterministic != 0;
            check_problem(p, o, (uint64_t)(50 + i));
        }
}

/* Row tiles hold whole tokens: up to one token a tile, some of the 64 or 128 rows stay empty. Groups with more heads
   than rows use the other path. */
TEST(groups_that_do_not_fill_tiles) {
    const int heads[][3] = {{7, 1, 128}, {10, 2, 64}, {28, 1, 128}, {43, 1, 64}, {64, 1, 128}, {48, 1, 40}};
    for (int i = 0; i < 6; i += harness_rounds(1, 3)) {
        host_problem p = problem_of(heads[i][0], heads[i][1], heads[i][2]);
        run_options o = mma;
        o.deterministic = i % 2 != 0;
        o.arch = i == 3 ? 86 : i % 3 ? 90 : 80;
        p.window = i == 4 ? 5 : 0;
        p.add_slice(11, 19);
        p.add_slice(9, 4); /* queries that see nothing */
        p.add_slice(6, 6);
        check_problem(p, o, (uint64_t)(700 + i));
    }
    host_problem p = problem_of(71, 1, 64);
    run_options o;
    prepared_problem got;
    p.add_slice(6, 6);
    if (got.make(p, o)) CHECK_INT(got.a->path, CF_ATTENTION_UNFUSED);
}

/* Key heads in sections, the last one smaller: each head's tiles run once, in the forward and in the backward. With
   spare memory behind arrays that are ordered by head, a head too many shows as changed values. */
TEST(sections_of_heads) {
    for (int i = harness_rounds(0, 1); i < harness_rounds(4, 3); i++) {
        host_problem p = problem_of(i % 2 ? 10 : 5, 5, i / 2 ? 128 : 64);
        run_options o = mma;
        prepared_problem made;
        p.add_slice(70, 150);
        p.add_slice(33, 33);
        o.deterministic = i == 1;
        o.room = true;
        o.processors = i == 3 ? 132 : 1;
        o.cache = (int64_t)450 * p.head_size * 4; /* two heads of 183 keys; four or two heads of 103 or 206 rows */
        if (!made.make(p, o)) return;
        CHECK(made.a->forward_section > 1 && made.a->forward_section < 5);
        CHECK(made.a->backward_section > 1 && made.a->backward_section < 5);
        CHECK(5 % made.a->forward_section != 0 && 5 % made.a->backward_section != 0);
        check_problem(p, o, (uint64_t)(720 + i));
    }
}

/* Split tiles on a device with 99 KB of shared memory a block, which takes smaller key tiles. */
TEST(little_shared_memory) {
    for (int size = 64; size <= 128; size += 64) {
        host_problem p = problem_of(4, 2, size);
        run_options o = mma;
        o.arch = 86;
        p.add_slice(70, 140);
        p.add_slice(0, 65);
        p.add_slice(64, 64);
        check_problem(p, o, 3);
        o.deterministic = true;
        o.overwrite = true;
        check_problem(p, o, 4);
    }
}

/* ---- tiles in parts ---- */

/* Returns the greatest gap, relative to the greatest number. */
static double greatest_gap(const std::vector<double> &x, const std::vector<double> &y) {
    double gap = x.size() == y.size() ? 0.0 : 1.0, size = 0.0;
    for (size_t i = 0; i < x.size() && i < y.size(); i++) {
        if (!(std::fabs(x[i] - y[i]) <= gap)) gap = std::fabs(x[i] - y[i]);
        size = std::fmax(size, std::fabs(y[i]));
    }
    return gap / size;
}

/* Few key tiles with many rows, on devices of different sizes. The forward is the same; the gradients are the same
   except for the order of fp32 sums, and all are right. */
TEST(split_key_tiles) {
    const int processors[] = {132, 7, 40}, sizes[] = {64, 128, 40, 128};
    for (int i = harness_rounds(0, 1); i < harness_rounds(4, 2); i++) {
        host_problem p = problem_of(i % 3 == 2 ? 18 : 9, i % 3 == 2 ? 2 : 1, sizes[i]);
        run_options o = mma, whole = mma;
        device_results one, other;
        p.dtype = i % 2 ? CF_DTYPE_FP16 : CF_DTYPE_BF16;
        o.processors = processors[i % 3];
        o.deterministic = i % 2 != 0;
        o.overwrite = o.strided = i >= 2;
        o.arch = i == 3 ? 86 : i == 2 ? 90 : 80;
        if (i == 1) p.window = 90;
        if (i == 2) p.softcap = 3.0;
        p.add_slice(37, 37);
        p.add_slice(0, 20); /* keys that no query sees */
        p.add_slice(131, 131 + 40 * i);
        whole = o;
        whole.processors = 1;
        const host_inputs in = random_inputs(p, (uint64_t)(300 + i));
        if (i % 2 == 0 ? !check_problem(p, o, (uint64_t)(300 + i), &one) : !run_on_device(p, in, o, &one)) return;
        if (!run_on_device(p, in, whole, &other)) return;
        CHECK(one.attention.n_split_key_tiles > 0);
        CHECK_INT(other.attention.n_split_key_tiles, 0);
        CHECK(one.attention.backward_bytes - other.attention.backward_bytes <= /* at most 8 splits for each processor */
              (size_t)(8 * o.processors * 2 * 128 * 128 * 4));
        CHECK(one.values.out == other.values.out);
        CHECK(one.values.lse == other.values.lse);
        if (o.deterministic) CHECK(one.values.dq == other.values.dq);
        CHECK(greatest_gap(one.values.dk, other.values.dk) <= 0x1p-18);
        CHECK(greatest_gap(one.values.dv, other.values.dv) <= 0x1p-18);
        CHECK(greatest_gap(one.values.dq, other.values.dq) <= 0x1p-8); /* fp32 sums in another order, then rounded */
    }
}

/* Few queries with many keys: the softmaxes of the splits are combined, whatever the mask hides of them. */
TEST(split_forward_tiles) {
    const int sizes[] = {64, 128, 40, 128};
    for (int i = 0; i < harness_rounds(4, 1); i++) {
        const int kv = i < 2 ? 2 : 1;
        host_problem p = problem_of(2 * kv, kv, sizes[i]);
        run_options o = mma, whole;
        device_results one, other;
        p.dtype = i % 2 ? CF_DTYPE_FP16 : CF_DTYPE_BF16;
        p.full = i == 3;
        p.window = i == 1 ? 1150 : 0;
        p.softcap = i == 2 ? 3.0 : 0.0;
        p.scale = i == 0 ? 1.0 : 0.0; /* greatest scores far apart */
        o.processors = 100 - 30 * i;
        o.arch = i == 2 ? 86 : 80;
        o.strided = i == 1;
        o.backward = i == 0;
        p.add_slice(9, 30);
        p.add_slice(i == 0 ? harness_rounds(70, 33) : 70, 1250 + 63 * i); /* 20 and more blocks of keys */
        p.add_slice(20, 7);
        if (!check_problem(p, o, (uint64_t)(400 + i), &one)) return;
        whole = o;
        whole.processors = 1;
        whole.arch = 86; /* one or two blocks of keys a split: splitting gains nothing */
        whole.backward = o.backward = false;
        const host_inputs in = random_inputs(p, (uint64_t)(400 + i));
        if (i == 0 && !run_on_device(p, in, o, &one)) return;
        if (!run_on_device(p, in, whole, &other)) return;
        CHECK(one.attention.n_split_forward_tiles > 0);
        CHECK_INT(other.attention.n_split_forward_tiles, 0);
        CHECK_INT(other.attention.forward_bytes, other.attention.path == CF_ATTENTION_WGMMA ? 256 : 0); /* a counter */
        CHECK(one.attention.forward_bytes > 0);
        CHECK(one.attention.forward_bytes <= (size_t)(4 * 3 * o.processors * (128 * 128 + 1024) * 4));
        CHECK(greatest_gap(one.values.out, other.values.out) <= 0x1p-8); /* rounded after fp32 sums in another order */
        for (size_t j = 0; j < one.values.lse.size(); j++) {
            const double a = one.values.lse[j], b = other.values.lse[j];
            if (!CHECK(a == b || std::fabs(a - b) <= 0x1p-20 * std::fabs(b))) break;
        }
#ifdef CHUNKFLOW_CUDA_EMULATION
        CHECK_INT(cuda_emu_kernel("attention_combine").blocks, 0); /* of the whole run */
        cuda_emu_set_order(1);
        const bool ok = run_on_device(p, in, o, &other);
        cuda_emu_set_order(0);
        if (!ok) return;
        CHECK(one.bits == other.bits);
        CHECK_INT(cuda_emu_kernel("attention_combine").blocks, kv * one.attention.n_split_forward_tiles);
        CHECK_INT(cuda_emu_kernel("attention_forward").blocks, kv * one.attention.n_forward_tiles);
        CHECK_INT(cuda_emu_total().conflicts, 0);
#endif
    }
}

/* Tiles split more than twice. */
TEST(many_parts) {
    for (int i = 0; i < harness_rounds(4, 1); i++) {
        const bool forward = i < 2;
        host_problem p = problem_of(forward ? 2 : 16, 1, i % 2 ? 128 : 64);
        run_options o = mma;
        prepared_problem made;
        o.processors = 132;
        o.backward = !forward;
        o.deterministic = i == 3;
        o.arch = i == 2 ? 86 : 80;
        p.dtype = i == 1 ? CF_DTYPE_FP16 : CF_DTYPE_BF16;
        p.scale = forward ? 0.7 : 0.0; /* greatest scores far apart */
        if (forward)
            p.add_slice(20, 6300);
        else
            p.add_slice(i == 3 ? 190 : 290, i == 3 ? 200 : 300);
        if (!made.make(p, o)) return;
        if (forward) {
            CHECK_INT(made.a->n_split_forward_tiles, 1);
            CHECK(made.a->n_forward_tiles >= 6);
        } else {
            CHECK_INT(made.a->n_split_key_tiles, 2); /* split in 2, or in 3 of which the last has few rows */
            CHECK(made.a->n_all_key_tiles >= (i == 3 ? 3 + 2 : 4 + 2 + 1));
        }
        check_problem(p, o, (uint64_t)(600 + i));
    }
}

/* ---- the members of a prepared problem; on the host alone ---- */

/* Ragged slices of every kind: documents, prefixes, blind queries, keys without queries. */
static host_problem mixed_problem(int n_heads, int n_kv_heads, int head_size) {
    host_problem p = problem_of(n_heads, n_kv_heads, head_size);
    const int slices[][2] = {{70, 70}, {0, 150}, {300, 611}, {1, 1}, {150, 40}, {20, 0}, {5, 700}, {257, 257}};
    for (const auto &one : slices) p.add_slice(one[0], one[1]);
    return p;
}

TEST(pairs_are_counted) {
    for (int i = 0; i < 10; i++) {
        const int windows[] = {0, 1, 17, 300, 1000};
        host_problem p = mixed_problem(2, 1, 64);
        prepared_problem got;
        int64_t pairs = 0;
        p.full = i >= 5;
        p.window = windows[i % 5];
        if (!got.make(p, mma)) return;
        for (int s = 0; s < p.n_slices(); s++)
            for (int row = 0; row < p.queries(s); row++)
                for (int key = 0; key < p.keys(s); key++) {
                    const int own = row + p.keys(s) - p.queries(s);
                    pairs += (p.full || key <= own) && (p.window == 0 || key > own - p.window);
                }
        CHECK_INT(got.a->pairs, pairs);
    }
}

/* A tile in the list, as in chunkflow_cuda.cu. */
struct listed_tile {
    int32_t q_start, q_length, k_start, k_length, block, begin, end, place, part, unused[3];
};

static std::vector<listed_tile> listed_tiles(const cf_attention *a) {
    std::vector<listed_tile> tiles(a->tiles_bytes / sizeof(listed_tile));
    memcpy(tiles.data(), a->tiles, a->tiles_bytes);
    return tiles;
}

TEST(longest_tiles_first) {
    for (int i = 0; i < 8; i++) {
        host_problem p = mixed_problem(12, 2, i % 2 ? 64 : 128);
        run_options o = mma;
        prepared_problem got;
        p.window = i & 2 ? 100 : 0;
        o.processors = i & 4 ? 132 : 1;
        if (!got.make(p, o)) return;
        const cf_attention *a = got.a;
        const int64_t counts[] = {a->n_forward_tiles, a->n_row_tiles, a->n_all_key_tiles};
        CHECK_INT(a->tiles_bytes, (size_t)(counts[0] + counts[1] + counts[2] + a->n_split_forward_tiles +
                                           a->n_split_key_tiles) *
                                      sizeof(listed_tile));
        if (p.window == 0) CHECK_INT(a->n_split_key_tiles > 0, o.processors > 1);
        const std::vector<listed_tile> tiles = listed_tiles(a);
        size_t at = 0;
        for (int kind = 0; kind < 3; kind++) {
            int64_t with_work = 0;
            CHECK(counts[kind] > 1 && tiles[at].end - tiles[at].begin > 1);
            for (size_t j = 0; j < (size_t)counts[kind]; j++, at++) {
                const int32_t steps = tiles[at].end - tiles[at].begin;
                with_work += steps > 0;
                CHECK(steps >= 0);
                if (j > 0) CHECK(steps <= tiles[at - 1].end - tiles[at - 1].begin);
            }
            if (kind == 2) CHECK_INT(with_work, a->n_key_tiles);
        }
    }
}

/* Returns the share of time in which blocks are busy. Each tile takes its steps plus `cost`. Blocks take tiles in the
   kernels' order (by section of heads, longest first in each), and each of n_slots takes the next tile when it is
   free. */
static double busy_share(const listed_tile *tiles, int64_t n_tiles, int64_t n_heads, int64_t section, int64_t cost,
                         int n_slots) {
    std::vector<int64_t> end((size_t)n_slots, 0);
    int64_t work = 0;
    for (int64_t first = 0; first < n_heads; first += section)
        for (int64_t i = 0; i < n_tiles; i++)
            for (int64_t head = first; head < first + section && head < n_heads; head++) {
                const int64_t steps = tiles[i].end - tiles[i].begin + cost;
                *std::min_element(end.begin(), end.end()) += steps;
                work += steps;
            }
    return (double)work / (double)(*std::max_element(end.begin(), end.end()) * n_slots);
}

/* The backward on an H200: 132 multiprocessors with one block each, where a tile takes 128 rows' time besides its row
   tiles. Everything depends on the order of issue: with sections of heads for 32 MB of cache, the same lists leave up
   to a third of the device idle. Both paths are tested; their key tiles are the same. */
TEST(backward_keeps_the_device_busy) {
    const struct {
        int n_heads, n_kv_heads, length, head_size;
        cf_attention_path path;
    } cases[] = {{64, 8, 4096, 128, CF_ATTENTION_MMA},    {28, 4, 8192, 128, CF_ATTENTION_MMA},
                 {64, 8, 8192, 128, CF_ATTENTION_MMA},    {64, 8, 16384, 128, CF_ATTENTION_MMA},
                 {64, 8, 4096, 128, CF_ATTENTION_WGMMA},  {28, 4, 8192, 128, CF_ATTENTION_WGMMA},
                 {64, 8, 8192, 64, CF_ATTENTION_WGMMA},   {64, 8, 16384, 64, CF_ATTENTION_WGMMA}};
    for (const auto &one : cases) {
        double shares[2];
        for (int sections = 0; sections < 2; sections++) {
            host_problem p = problem_of(one.n_heads, one.n_kv_heads, one.head_size);
            run_options o = on(one.path);
            prepared_problem made;
            p.add_slice(one.length, one.length);
            o.arch = 90, o.processors = 132, o.cache = sections ? 32 << 20 : 0;
            if (!made.make(p, o)) return;
            const cf_attention *a = made.a;
            CHECK_INT(a->backward_section < one.n_kv_heads, sections);
            shares[sections] = busy_share(listed_tiles(a).data() + a->n_forward_tiles + a->n_row_tiles, a->n_key_tiles,
                                          one.n_kv_heads, a->backward_section, one.head_size / 64, 132);
        }
        harness_note("%s, %d/%d heads of %d, %d tokens: busy %.1f %%, %.1f %% in sections of 32 MB",
                     cf_attention_path_name(one.path), one.n_heads, one.n_kv_heads, one.head_size, one.length,
                     100.0 * shares[0], 100.0 * shares[1]);
        CHECK(shares[0] >= 0.97);
        CHECK(shares[0] >= shares[1]);
    }
}

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* Checks the workspace's size to the byte, from its contents as the header lists them. */
TEST(workspace_is_what_it_holds) {
    for (int i = 0; i < 16; i++) {
        const bool deterministic = (i & 1) != 0, little = (i & 2) != 0, split = (i & 4) != 0;
        const int head = i & 8 ? 128 : 64, key_tile = little && head == 128 ? 64 : 128, group = 4, kv = 3;
        const int row_tile = little || head == 128 ? 64 : 128;
        host_problem p = mixed_problem(group * kv, kv, i == 9 ? 96 : i == 0 ? 40 : head);
        run_options o = mma;
        prepared_problem got;
        o.deterministic = deterministic;
        o.arch = little ? 86 : 80;
        o.processors = split ? 132 : 1;
        if (i % 3 == 0) p.add_slice(9, 3000);
        if (!got.make(p, o)) return;
        int64_t forward = 0, rows = 0, keys = 0;
        for (int s = 0; s < p.n_slices(); s++) {
            forward += (p.queries(s) * group + 127) / 128;
            rows += (p.queries(s) * group + row_tile - 1) / row_tile;
            keys += (p.keys(s) + key_tile - 1) / key_tile;
        }
        const cf_attention *a = got.a;
        const int64_t forward_parts = a->n_forward_tiles - forward + a->n_split_forward_tiles;
        const int64_t key_parts = a->n_all_key_tiles - keys + a->n_split_key_tiles;
        const size_t row_bytes = (size_t)(kv * rows * row_tile) * 4;
        CHECK_INT(a->n_row_tiles, rows);
        CHECK_INT(key_parts > 0, split);
        CHECK(split || forward_parts == 0);
        CHECK(!split || i % 3 != 0 || forward_parts > 0);
        /* 16 / least of choose_parts for each slot of the device, over all heads */
        CHECK(key_parts <= 8 * o.processors);
        CHECK_INT(a->forward_bytes, (size_t)(kv * forward_parts * (128 * head + 1024)) * 4);
        CHECK_INT(a->backward_bytes, round_up(2 * row_bytes, 256) + (deterministic ? 0 : row_bytes * (size_t)head) +
                                         (size_t)(kv * key_parts) * 2 * (size_t)(key_tile * head) * 4);
    }
    /* Unfused: scores of some rows of a group, in fp32 and in the problem's type; the backward takes twice that. */
    for (int fp32 = 0; fp32 < 2; fp32++) {
        host_problem p = problem_of(6, 2, 72);
        prepared_problem got;
        p.dtype = fp32 ? CF_DTYPE_FP32 : CF_DTYPE_BF16;
        p.add_slice(30, 999);
        p.add_slice(400, 401);
        if (!got.make(p, unfused)) return;
        const size_t numbers = 3 * 256 * 1000;
        const size_t bytes = round_up(numbers * 4, 256) + round_up(numbers * (fp32 ? 4 : 2), 256);
        CHECK_INT(got.a->forward_bytes, bytes);
        CHECK_INT(got.a->backward_bytes, 2 * bytes);
    }
}

/* Tiles are split only if the device would otherwise idle. */
TEST(when_tiles_are_split) {
    const struct {
        int n_heads, n_kv_heads, queries, keys, documents, processors;
        bool forward, backward;
    } cases[] = {
        {8, 1, 8192, 8192, 1, 132, false, true},           /* 64 key tiles, the first with 1024 row tiles */
        {8, 1, 1024, 1024, 8, 132, false, true},           /* packed: 64 key tiles */
        {16, 2, 8192, 8192, 1, 132, false, true},          /* 128 key tiles */
        {64, 8, 8192, 8192, 1, 132, false, false},         /* 512 key tiles: the device is full */
        {8, 1, 8192, 8192 + 262144, 1, 132, false, false}, /* a long prefix has enough key tiles */
        {7, 1, 2048, 2048 + 131072, 1, 132, true, false},  /* 112 forward tiles for 264 blocks */
        {8, 1, 100, 262144, 1, 132, true, false},          /* the last tokens of a long sequence */
        {8, 8, 64, 64, 1, 132, false, false},              /* too little work to split */
        {8, 1, 8192, 8192, 1, 1, false, false},
    };
    for (const auto &one : cases) {
        std::vector<int32_t> cu_q = {0}, cu_k = {0};
        cf_attention_desc d;
        const cf_attention *a = nullptr;
        size_t bytes = 0;
        memset(&d, 0, sizeof d);
        for (int i = 0; i < one.documents; i++) {
            cu_q.push_back(cu_q.back() + one.queries);
            cu_k.push_back(cu_k.back() + one.keys);
        }
        d.n_heads = one.n_heads, d.n_kv_heads = one.n_kv_heads, d.head_size = 128;
        d.n_slices = one.documents, d.cu_seqlens_q = cu_q.data(), d.cu_seqlens_k = cu_k.data();
        d.arch = 90, d.path = CF_ATTENTION_MMA, d.n_processors = one.processors;
        REQUIRE(cf_attention_size(&d, &bytes, NULL) == CF_OK);
        std::vector<uint64_t> memory(bytes / 8 + 2);
        REQUIRE(cf_attention_prepare(&d, memory.data(), bytes, &a, NULL) == CF_OK);
        harness_note("%d/%d heads, %d x %d by %d: %d forward, %d key tiles; split %d, %d", one.n_heads, one.n_kv_heads,
                     one.documents, one.queries, one.keys, (int)a->n_forward_tiles, (int)a->n_all_key_tiles,
                     (int)a->n_split_forward_tiles, (int)a->n_split_key_tiles);
        CHECK_INT(a->n_split_forward_tiles > 0, one.forward);
        CHECK_INT(a->n_split_key_tiles > 0, one.backward);
        CHECK(!one.forward || a->n_forward_tiles * one.n_kv_heads >= one.processors);
        CHECK(!one.backward || a->n_key_tiles * one.n_kv_heads >= one.processors);
        CHECK(a->n_key_tiles <= a->n_all_key_tiles);
        CHECK_INT(a->desc.n_processors, one.processors);
    }
}

/* ---- documents and prefixes ---- */

TEST(prefixes) {
    const int prefixes[] = {0, 1, 63, 64, 65, 127, 128, 129};
    for (int i = 0; i < 8; i += harness_rounds(1, 3)) {
        host_problem p = problem_of(2, 1, i % 2 ? 128 : 64);
        run_options o = mma;
        p.add_slice(70, prefixes[i] + 70);
        p.add_slice(9, 9); /* a whole short document in the chunk's free space */
        o.deterministic = i / 3 % 2 == 0;
        o.arch = i & 2 ? 90 : 80;
        check_problem(p, o, (uint64_t)(60 + i));
    }
}

TEST(documents_of_1_to_130_tokens) {
    host_problem p = problem_of(1, 1, 64);
    for (int i = 1; i <= 130; i += harness_rounds(1, 3)) p.add_slice(i * 37 % 131, i * 37 % 131);
    check_problem(p, mma, 1);
}

TEST(documents_packed_heads) {
    host_problem p = problem_of(8, 1, 64);
    for (int length = 1; length <= 40; length += 3) p.add_slice(length, length);
    run_options o = mma;
    o.deterministic = true;
    check_problem(p, o, 2);
}

/* Slices that start at multiples of 16, as in a chunk with aligned slices; the rows between are NaN. */
TEST(padded_slices) {
    for (int path = CF_ATTENTION_UNFUSED; path <= last_path(); path++) {
        host_problem p = problem_of(2, 1, 64);
        p.add_slice(13, 45);
        p.add_slice(0, 0);
        p.add_slice(31, 31);
        p.add_slice(5, 5);
        p.starts_q = {0, 16, 16, 48};
        p.starts_k = {0, 48, 48, 80};
        run_options o = on((cf_attention_path)path);
        check_problem(p, o, 8);
        o.deterministic = o.overwrite = true;
        check_problem(p, o, 9);
    }
}

/* ---- sinks ---- */

/* Slices with rows between them, in more runs than one launch takes. The last sink has no effect. */
static host_problem sinks_problem(cf_dtype dtype, int head_size) {
    host_problem p = problem_of(4, 2, head_size);
    p.dtype = dtype;
    for (int i = 0; i < 26; i++) {
        p.add_slice(i % 4, i == 1 ? 70 : i % 4);
        p.starts_q.push_back(i * 4);
        p.starts_k.push_back(i < 2 ? i : 75 + i * 4);
    }
    p.add_slice(21, 21);
    p.starts_q.push_back(110);
    p.starts_k.push_back(190);
    return p;
}

static void check_sinks(const host_problem &p, const run_options &o) {
    const float all[4] = {0.0f, 40.0f, 1.5f, -INFINITY};
    host_inputs in = random_inputs(p, 3), none = in;
    device_results with, without;
    in.sinks.assign(all, all + 4);
    run_options forward = o;
    forward.backward = false;
    if (!check_inputs(p, in, o, &with) || !run_on_device(p, none, forward, &without)) return;
    CHECK_INT((int64_t)with.values.dsinks.size(), 4);
    CHECK(with.values.dsinks[3] == 0.0);
    for (size_t row = 0; row < (size_t)p.rows_q(); row++) {
        const size_t lse = 3 * (size_t)p.rows_q() + row, out = (row * 4 + 3) * (size_t)p.head_size;
        CHECK(with.values.lse[lse] == without.values.lse[lse]);
        CHECK(memcmp(&with.values.out[out], &without.values.out[out], (size_t)p.head_size * sizeof(double)) == 0);
    }
    in.sinks.assign(4, INFINITY); /* the sink takes all the weight, the keys none */
    if (!run_on_device(p, in, o, &with)) return;
    for (const double x : with.values.out) CHECK(x == 0.0);
    for (const double x : with.values.dsinks) CHECK(x == 0.0);
}

TEST(sinks) {
    host_problem p = sinks_problem(CF_DTYPE_FP32, 16);
    check_sinks(p, on(CF_ATTENTION_UNFUSED));
    p.window = 9;
    p.softcap = 2.5;
    p.dtype = CF_DTYPE_BF16;
    check_sinks(p, on(CF_ATTENTION_UNFUSED));
    run_options o = mma;
    o.strided = o.deterministic = o.overwrite = true;
    check_sinks(sinks_problem(CF_DTYPE_FP16, 72), o);
    if (last_path() == CF_ATTENTION_WGMMA) check_sinks(sinks_problem(CF_DTYPE_BF16, 64), on(CF_ATTENTION_WGMMA));
}

/* Checks the reference's gradients of sinks against finite differences. */
TEST(sinks_of_the_reference) {
    const host_problem p = sinks_problem(CF_DTYPE_FP32, 8);
    host_inputs in = random_inputs(p, 4);
    in.sinks.assign(4, 0.25f);
    const host_results at = reference_exact(p, in);
    for (size_t head = 0; head < 4; head++) {
        double ends[2] = {0.0, 0.0};
        for (int up = 0; up < 2; up++) {
            in.sinks[head] = up ? 0.2578125f : 0.2421875f;
            const host_results moved = reference_exact(p, in);
            for (size_t i = 0; i < moved.out.size(); i++) ends[up] += moved.out[i] * (double)in.dout[i];
        }
        in.sinks[head] = 0.25f;
        CHECK(std::fabs((ends[1] - ends[0]) / 0.015625 - at.dsinks[head]) < 1e-4);
    }
}

/* ---- masks ---- */

TEST(masks) {
    const int windows[] = {0, 1, 17, 64, 150};
    for (int i = 0; i < 20; i += harness_rounds(1, 7)) {
        host_problem p = problem_of(2, 1, 64);
        run_options o = mma;
        p.window = windows[i % 5];
        p.full = i % 2 != 0;
        p.softcap = i / 10 ? 0.0 : 2.5;
        p.scale = i % 3 == 0 ? 0.3 : 0.0;
        p.add_slice(75, 200);
        p.add_slice(80, 80);
        o.deterministic = i % 4 == 0;
        o.overwrite = i % 3 == 0;
        check_problem(p, o, (uint64_t)i);
        if (i < 10) check_problem(p, on(CF_ATTENTION_UNFUSED), (uint64_t)i);
    }
}

/* The first row of a row tile sees all keys of a key tile except the last; with the window, the last row sees all
   except the first. So one key decides whether a tile needs its mask. */
TEST(backward_mask_edges) {
    for (int i = 0; i < 6; i++) {
        host_problem p = problem_of(1, 1, i % 2 ? 128 : 64);
        run_options o = mma;
        p.window = i >= 2 && i < 4 ? 145 : 0;
        o.arch = i >= 4 ? 86 : 80;
        p.add_slice(20, i == 5 ? 82 : 146); /* its key tiles are half as long */
        check_problem(p, o, (uint64_t)(90 + i));
    }
}

/* A window's last row of a key tile, or first key of a row tile, may be alone in a tile. */
TEST(window_edges) {
    const int windows[] = {2, 65, 66, 67, 130};
    for (int i = 0; i < 5; i += harness_rounds(1, 3)) {
        host_problem p = problem_of(1, 1, 64);
        run_options o = mma;
        p.window = windows[i];
        p.add_slice(260, 260);
        p.add_slice(65, 193);
        check_problem(p, o, (uint64_t)(70 + i));
        o.deterministic = true;
        if (i % 2) check_problem(p, o, (uint64_t)(80 + i));
    }
}

/* ---- nothing to see ---- */

TEST(empty_slices) {
    for (int path = CF_ATTENTION_UNFUSED; path <= last_path(); path++)
        for (int overwrite = 0; overwrite < 2; overwrite++) {
            host_problem p = problem_of(4, 2, 64);
            run_options o = on((cf_attention_path)path);
            o.overwrite = overwrite != 0;
            p.add_slice(0, 0);
            p.add_slice(0, 70); /* unseen keys: gradients 0, or unchanged if added to */
            p.add_slice(20, 0); /* queries that see nothing */
            p.add_slice(30, 30);
            p.add_slice(0, 0);
            p.add_slice(150, 20); /* causal: the first 130 rows see nothing */
            if (o.overwrite || harness_rounds(1, 0)) check_problem(p, o, 5);
            p.full = true;
            if (!o.overwrite || harness_rounds(1, 0)) check_problem(p, o, 6);
        }
}

TEST(no_slices) {
    host_problem p = problem_of(2, 2, 64), queries_only = p;
    check_problem(p, mma, 1);
    check_problem(p, unfused, 1);
    queries_only.add_slice(5, 0);
    check_problem(queries_only, mma, 1);
    check_problem(queries_only, unfused, 1);
}

/* A row that sees nothing has gradient 0, whatever its incoming gradient is: 0 x NaN must not reach dk and dv. */
TEST(nan_in_blind_rows) {
    for (int path = CF_ATTENTION_UNFUSED; path <= last_path(); path++)
        for (int deterministic = 0; deterministic < 2; deterministic++) {
            host_problem p = problem_of(2, 1, 64);
            run_options o = on((cf_attention_path)path);
            device_results got;
            o.deterministic = deterministic != 0;
            p.add_slice(150, 40);
            host_inputs in = random_inputs(p, 4), clean = in;
            for (size_t i = 0; i < (size_t)(110 * 2 * 64); i++) in.q[i] = in.dout[i] = NAN;
            if (!run_on_device(p, in, o, &got)) continue;
            for (size_t i = 0; i < (size_t)(110 * 2 * 64); i++) clean.q[i] = clean.dout[i] = 0.0f;
            host_results exact = reference_exact(p, clean), rounded = reference_rounded(p, clean);
            for (size_t i = 0; i < got.initial_dk.size(); i++) {
                exact.dk[i] += got.initial_dk[i], rounded.dk[i] += got.initial_dk[i];
                exact.dv[i] += got.initial_dv[i], rounded.dv[i] += got.initial_dv[i];
            }
            check_accuracy("out", p.dtype, got.values.out, exact.out, rounded.out, 2.0);
            check_accuracy("dq", p.dtype, got.values.dq, exact.dq, rounded.dq, 3.0);
            check_accuracy("dk", p.dtype, got.values.dk, exact.dk, rounded.dk, 3.0);
            check_accuracy("dv", p.dtype, got.values.dv, exact.dv, rounded.dv, 3.0);
        }
}

/* Sets rows first .. end - 1 of K and V to x. */
static void fill_keys(const host_problem &p, host_inputs *in, int first, int end, float x) {
    const size_t per_row = (size_t)(p.n_kv_heads * p.head_size);
    for (size_t i = (size_t)first * per_row; i < (size_t)end * per_row; i++) in->k[i] = in->v[i] = x;
}

/* Keys before all windows: whatever they contain reaches no output, and their gradients are 0, or unchanged. */
TEST(nan_in_unseen_keys) {
    const int sizes[][2] = {{20, 100}, {200, 300}};
    for (int i = 0; i < 16; i += harness_rounds(1, 3)) {
        host_problem p = problem_of(2, 1, i & 1 ? 128 : 64);
        run_options o = i < 14 ? mma : unfused;
        device_results got;
        p.dtype = i & 2 ? CF_DTYPE_FP16 : CF_DTYPE_BF16;
        p.window = 10;
        p.full = i % 3 == 2;
        o.deterministic = (i & 4) != 0;
        o.overwrite = i % 5 < 2;
        o.arch = i == 9 ? 86 : 80;
        p.add_slice(3, 3);
        p.add_slice(sizes[i >> 3][0], sizes[i >> 3][1]);
        const int first = 3, end = 3 + p.keys(1) - p.queries(1) + 1 - p.window;
        host_inputs in = random_inputs(p, (uint64_t)i), clean = in;
        fill_keys(p, &in, first, end, i % 2 ? NAN : INFINITY);
        fill_keys(p, &clean, first, end, 0.0f);
        if (!run_on_device(p, in, o, &got)) continue;
        host_results exact = reference_exact(p, clean), rounded = reference_rounded(p, clean);
        for (size_t j = 0; j < got.initial_dk.size(); j++) {
            exact.dk[j] += got.initial_dk[j], rounded.dk[j] += got.initial_dk[j];
            exact.dv[j] += got.initial_dv[j], rounded.dv[j] += got.initial_dv[j];
        }
        check_accuracy("out", p.dtype, got.values.out, exact.out, rounded.out, 2.0);
        check_accuracy("lse", CF_DTYPE_FP32, got.values.lse, exact.lse, rounded.lse, 2.0);
        check_accuracy("dq", p.dtype, got.values.dq, exact.dq, rounded.dq, 3.0);
        check_accuracy("dk", p.dtype, got.values.dk, exact.dk, rounded.dk, 3.0);
        check_accuracy("dv", p.dtype, got.values.dv, exact.dv, rounded.dv, 3.0);
        for (size_t j = (size_t)first * (size_t)p.head_size; j < (size_t)end * (size_t)p.head_size; j++)
            if (!CHECK(got.values.dk[j] == exact.dk[j] && got.values.dv[j] == exact.dv[j])) break;
    }
}

/* A key that no row of a tile sees, though rows of another tile do. Tokens 0 - 127 are two forward tiles and four of
   the kernel for dq, and see keys up to 227. Keys from 228 on, and 0 - 90, are NaN. */
TEST(nan_in_keys_of_other_tiles) {
    for (int deterministic = 0; deterministic < 2; deterministic++) {
        host_problem p = problem_of(2, 1, 64);
        run_options o = mma;
        device_results got, wanted;
        o.deterministic = deterministic != 0;
        o.processors = 1;
        p.add_slice(200, 300);
        p.window = 10;
        host_inputs in = random_inputs(p, 6);
        if (!run_on_device(p, in, o, &wanted)) return;
        fill_keys(p, &in, 0, 91, NAN);
        fill_keys(p, &in, 228, 300, NAN);
        if (!run_on_device(p, in, o, &got)) return;
        for (size_t i = 0; i < (size_t)(128 * 2 * 64); i++) {
            if (!CHECK(got.values.out[i] == wanted.values.out[i])) return;
            if (deterministic && !CHECK(got.values.dq[i] == wanted.values.dq[i])) return;
        }
        CHECK(std::isnan(got.values.out[128 * 2 * 64]));
    }
}

/* Scores far from 0: exponentials must not overflow, in full and in partly filled tiles. If all scores are far below 0,
   so are the log-sums. A row that does not exist would then have infinite exponentials with the next row's log-sum. */
TEST(large_scores) {
    for (int path = CF_ATTENTION_UNFUSED; path <= last_path(); path++) {
        host_problem p = problem_of(1, 1, 64);
        p.scale = 6.0;
        p.add_slice(70, 100);
        p.add_slice(3, 3);
        check_problem(p, on((cf_attention_path)path), 12);
        host_problem below = problem_of(7, 1, 64);
        below.scale = 6.0;
        below.add_slice(40, 200);
        host_inputs in = random_inputs(below, 13);
        for (float &x : in.q) x = std::fabs(x);
        for (float &x : in.k) x = -std::fabs(x);
        check_inputs(below, in, on((cf_attention_path)path));
    }
}

/* ---- the unfused path ---- */

TEST(unfused_types_and_blocks) {
    const cf_dtype types[] = {CF_DTYPE_BF16, CF_DTYPE_FP16, CF_DTYPE_FP32};
    for (int i = 0; i < 3; i++) {
        host_problem p = problem_of(4, 2, 24);
        run_options o = unfused;
        p.dtype = types[i];
        p.add_slice(300, 330); /* more rows than one block of scores */
        p.add_slice(17, 17);
        o.overwrite = i == 1;
        o.strided = i == 2;
        if (i == 0 || harness_rounds(1, 0)) check_problem(p, o, (uint64_t)(30 + i));
        p.window = 40;
        p.softcap = 5.0;
        check_problem(p, o, (uint64_t)(40 + i));
        p = problem_of(2, 1, 136 + 40 * i); /* larger than the fused path supports */
        p.dtype = types[i];
        p.softcap = 1.0;
        p.add_slice(40, 70);
        check_problem(p, o, (uint64_t)(50 + i));
    }
}

/* ---- chunks ---- */

/* Runs a batch chunk by chunk, in a plan's order: all forwards, then backwards in reverse, with state and its gradient
   carried from call to call. The result is compared with every sequence in one piece. */
struct chunked_run {
    const cf_plan *plan;
    host_problem whole; /* one slice per sequence */
    host_inputs in;
    run_options options;
    host_results got;
    std::vector<float> dk, dv; /* accumulators of the whole batch */
};

static size_t row_of(const chunked_run &r, int64_t sequence, int64_t token) {
    return (size_t)(r.whole.cu_q[(size_t)sequence] + token);
}

/* Returns the rows of the batch that are the keys, or the queries, of a chunk. */
static std::vector<size_t> rows_of_chunk(const chunked_run &r, int64_t chunk, bool key_side) {
    const cf_chunk *c = &r.plan->chunks[chunk];
    std::vector<size_t> rows;
    if (key_side)
        for (int64_t t = 0; t < c->prefix; t++) rows.push_back(row_of(r, r.plan->slices[c->first_slice].sequence, t));
    for (int64_t s = c->first_slice; s < c->first_slice + c->n_slices; s++)
        for (int64_t t = 0; t < r.plan->slices[s].length; t++)
            rows.push_back(row_of(r, r.plan->slices[s].sequence, r.plan->slices[s].begin + t));
    return rows;
}

template <typename From>
static std::vector<float> pick_rows(const From &from, const std::vector<size_t> &rows, size_t per_row) {
    std::vector<float> to((rows.size() + 16) * per_row, 0.0f);
    for (size_t i = 0; i < rows.size(); i++)
        for (size_t c = 0; c < per_row; c++) to[i * per_row + c] = (float)from[rows[i] * per_row + c];
    return to;
}

template <typename From, typename To>
static void put_rows(const From &from, const std::vector<size_t> &rows, size_t per_row, To *to) {
    typedef typename To::value_type number;
    for (size_t i = 0; i < rows.size(); i++)
        for (size_t c = 0; c < per_row; c++) (*to)[rows[i] * per_row + c] = (number)from[i * per_row + c];
}

static bool run_chunk(chunked_run *r, int64_t chunk, bool backward) {
    std::vector<unsigned char> memory;
    cf_metadata m;
    size_t bytes = 0;
    if (!CHECK(cf_metadata_size(r->plan, chunk, NULL, &bytes, NULL) == CF_OK)) return false;
    memory.resize(bytes);
    if (!CHECK(cf_metadata_fill(r->plan, chunk, NULL, memory.data(), bytes, &m, NULL) == CF_OK)) return false;
    host_problem p = r->whole;
    p.cu_q.assign(m.cu_seqlens_q, m.cu_seqlens_q + m.n_seqs + 1);
    p.cu_k.assign(m.cu_seqlens_k, m.cu_seqlens_k + m.n_seqs + 1);
    const std::vector<size_t> rows_q = rows_of_chunk(*r, chunk, false), rows_k = rows_of_chunk(*r, chunk, true);
    const size_t per_q = (size_t)(p.n_heads * p.head_size), per_k = (size_t)(p.n_kv_heads * p.head_size);
    host_inputs in;
    in.q = pick_rows(r->in.q, rows_q, per_q);
    in.dout = pick_rows(r->in.dout, rows_q, per_q);
    in.k = pick_rows(r->in.k, rows_k, per_k);
    in.v = pick_rows(r->in.v, rows_k, per_k);
    const std::vector<float> dk = pick_rows(r->dk, rows_k, per_k), dv = pick_rows(r->dv, rows_k, per_k);
    run_options o = r->options;
    device_results got;
    o.backward = backward;
    o.initial_dk = dk.data();
    o.initial_dv = dv.data();
    if (!run_on_device(p, in, o, &got)) return false;
    put_rows(got.values.out, rows_q, per_q, &r->got.out);
    for (int h = 0; h < p.n_heads; h++)
        for (size_t i = 0; i < rows_q.size(); i++)
            r->got.lse[(size_t)(h * r->whole.rows_q()) + rows_q[i]] = got.values.lse[(size_t)h * rows_q.size() + i];
    if (!backward) return true;
    put_rows(got.values.dq, rows_q, per_q, &r->got.dq);
    put_rows(got.values.dk, rows_k, per_k, &r->dk);
    put_rows(got.values.dv, rows_k, per_k, &r->dv);
    return true;
}

static void check_chunked(cf_attention_path path, int head_size, int64_t chunk_size, bool deterministic) {
    const int64_t lengths[] = {harness_rounds(331, 300), 20, 45, 7, harness_rounds(150, 60), 1};
    const size_t n = sizeof lengths / sizeof lengths[0];
    cf_pack_desc desc;
    cf_plan *plan = NULL;
    chunked_run r;
    memset(&desc, 0, sizeof desc);
    desc.chunk_size = chunk_size;
    REQUIRE(cf_pack(lengths, (int64_t)n, &desc, &plan, NULL) == CF_OK);
    CHECK(plan->n_chunks >= 5);
    r.plan = plan;
    r.whole = problem_of(2, 1, head_size);
    for (size_t s = 0; s < n; s++) r.whole.add_slice((int)lengths[s], (int)lengths[s]);
    r.in = random_inputs(r.whole, 77);
    r.options = on(path);
    r.options.deterministic = deterministic;
    host_results exact = reference_exact(r.whole, r.in), rounded = reference_rounded(r.whole, r.in);
    r.got = exact;
    for (std::vector<double> *one : {&r.got.out, &r.got.dq, &r.got.lse}) one->assign(one->size(), NAN);
    r.dk.resize(exact.dk.size());
    r.dv.resize(exact.dv.size());
    for (size_t i = 0; i < r.dk.size(); i++) {
        r.dk[i] = 0.5f - (float)(i % 3);
        r.dv[i] = 0.25f * (float)(i % 4);
        exact.dk[i] += r.dk[i], rounded.dk[i] += r.dk[i];
        exact.dv[i] += r.dv[i], rounded.dv[i] += r.dv[i];
    }
    bool ok = true;
    for (int64_t chunk = 0; chunk < plan->n_chunks && ok; chunk++) ok = run_chunk(&r, chunk, false);
    for (int64_t chunk = plan->n_chunks - 1; chunk >= 0 && ok; chunk--) ok = run_chunk(&r, chunk, true);
    cf_plan_free(plan);
    if (!ok) return;
    const size_t rows = (size_t)r.whole.rows_q(); /* the arrays have spare rows at the end */
    for (std::vector<double> *one : {&r.got.out, &r.got.dq}) one->resize(rows * (size_t)(2 * head_size));
    const std::vector<double> dk(r.dk.begin(), r.dk.end()), dv(r.dv.begin(), r.dv.end());
    check_accuracy("out", r.whole.dtype, r.got.out, exact.out, rounded.out, 2.0);
    check_accuracy("lse", CF_DTYPE_FP32, r.got.lse, exact.lse, rounded.lse, 2.0);
    check_accuracy("dq", r.whole.dtype, r.got.dq, exact.dq, rounded.dq, 3.0);
    check_accuracy("dk", r.whole.dtype, dk, exact.dk, rounded.dk, 3.0);
    check_accuracy("dv", r.whole.dtype, dv, exact.dv, rounded.dv, 3.0);
}

TEST(chunks_equal_one_piece) {
    check_chunked(CF_ATTENTION_MMA, 64, 61, false); /* not a multiple of any tile */
    if (!harness_rounds(1, 0)) return;              /* state.chunks_head_128 and chunks_unfused test these two cases */
    check_chunked(CF_ATTENTION_MMA, 128, 64, true);
    check_chunked(CF_ATTENTION_UNFUSED, 64, 100, false);
}

/* ---- the same bits ---- */

static bool same_part(const std::vector<double> &a, const std::vector<double> &b) {
    return a.size() == b.size() && (a.empty() || memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0);
}

/* Blocks run in another order. The forward, dk and dv never change; dq does not change in deterministic mode. */
TEST(determinism) {
    for (int deterministic = 0; deterministic < 2; deterministic++) {
        host_problem p = problem_of(2, 1, 64);
        run_options o = mma;
        device_results first, second;
        o.deterministic = deterministic != 0;
        o.processors = 132;
        p = problem_of(12, 1, 64); /* enough rows to split key tiles */
        p.add_slice(100, harness_rounds(400, 140));
        const host_inputs in = random_inputs(p, 9);
        if (!run_on_device(p, in, o, &first)) return;
#ifdef CHUNKFLOW_CUDA_EMULATION
        cuda_emu_set_order(1);
#endif
        const bool ok = run_on_device(p, in, o, &second);
#ifdef CHUNKFLOW_CUDA_EMULATION
        cuda_emu_set_order(0);
#endif
        if (!ok) return;
        CHECK(first.attention.n_split_key_tiles > 0);
        CHECK(same_part(first.values.out, second.values.out));
        CHECK(same_part(first.values.lse, second.values.lse));
        CHECK(same_part(first.values.dk, second.values.dk));
        CHECK(same_part(first.values.dv, second.values.dv));
        if (deterministic) CHECK(first.bits == second.bits);
    }
}

/* ---- work ---- */

#ifdef CHUNKFLOW_CUDA_EMULATION
/* The launched blocks are exactly the tiles with work, and shared memory accesses have no bank conflicts. */
TEST(no_empty_blocks_no_conflicts) {
    for (int size = 64; size <= 128; size += 64) {
        host_problem p = problem_of(4, 2, size);
        device_results got;
        p.add_slice(150, 150);
        for (int i = 0; i < 20; i += harness_rounds(1, 6)) p.add_slice(i, i);
        p.add_slice(0, 1000);
        run_options o = mma;
        o.by_name = true;
        o.processors = 1; /* splitting key tiles gains nothing */
        if (!run_on_device(p, random_inputs(p, 1), o, &got)) return;
        int64_t forward = 0, rows = 0, keys = 0;
        const int row_tile = size == 64 ? 128 : 64;
        for (int s = 0; s < p.n_slices(); s++) {
            forward += (p.queries(s) * 2 + 127) / 128;
            rows += (p.queries(s) * 2 + row_tile - 1) / row_tile;
            keys += p.queries(s) > 0 ? (p.keys(s) + 127) / 128 : 0;
        }
        CHECK_INT(cuda_emu_kernel("attention_forward").blocks, 2 * forward);
        CHECK_INT(cuda_emu_kernel("attention_stats").blocks, 2 * rows);
        CHECK_INT(cuda_emu_kernel("attention_backward").blocks, 2 * keys);
        CHECK_INT(cuda_emu_kernel("attention_round_dq").blocks, 2 * rows);
        CHECK_INT(got.attention.n_key_tiles, keys);
        CHECK_INT(got.attention.n_all_key_tiles, keys + 8);
        CHECK_INT(cuda_emu_total().conflicts, 0);
        CHECK(cuda_emu_total().wavefronts > 0);
        for (const char *name : {"attention_forward", "attention_backward", "attention_round_dq"})
            CHECK(cuda_emu_kernel(name).launches > 0 && cuda_emu_kernel(name).carved == cuda_emu_kernel(name).launches);
        o.deterministic = true;
        if (!run_on_device(p, random_inputs(p, 1), o, &got)) return;
        CHECK_INT(cuda_emu_kernel("attention_dq").blocks, 2 * rows);
        CHECK_INT(cuda_emu_kernel("attention_round_dq").blocks, 0);
        CHECK_INT(cuda_emu_total().conflicts, 0);
    }
}

/* The blocks of a split problem: splits, and one more for each split key tile; again without bank conflicts. */
TEST(split_blocks) {
    for (int arch = harness_rounds(80, 86); arch <= 86; arch += 6) {
        host_problem p = problem_of(16, 2, arch == 86 ? 128 : 64);
        run_options o = mma;
        device_results got;
        o.arch = arch;
        o.processors = 16;
        p.add_slice(140, 200);
        p.add_slice(5, 5);
        if (!run_on_device(p, random_inputs(p, 1), o, &got)) return;
        const cf_attention *a = &got.attention;
        CHECK(a->n_split_key_tiles > 0);
        CHECK_INT(cuda_emu_kernel("attention_backward").blocks, 2 * a->n_key_tiles);
        CHECK_INT(cuda_emu_kernel("attention_join").blocks, 2 * a->n_split_key_tiles);
        CHECK_INT(cuda_emu_total().conflicts, 0);
    }
}

/* A causal problem does about half the products of a full one. A window does a share that does not grow with the
   keys. */
TEST(masked_tiles_are_skipped) {
    host_problem p = problem_of(1, 1, 64);
    device_results got;
    int64_t work[3];
    run_options o = mma;
    o.by_name = true;
    p.add_slice(512, 512);
    const host_inputs in = random_inputs(p, 1);
    for (int i = 0; i < 3; i++) {
        p.full = i == 0;
        p.window = i == 2 ? 100 : 0;
        if (!run_on_device(p, in, o, &got)) return;
        work[i] = cuda_emu_kernel("attention_forward").mma;
        CHECK_INT(got.attention.pairs, i == 0 ? 512 * 512 : i == 1 ? 512 * 513 / 2 : 100 * 101 / 2 + 412 * 100);
    }
    CHECK_INT(work[0], 4 * 8 * 512);           /* 4 row tiles x 8 key blocks x instructions for each pair */
    CHECK_INT(work[1], (2 + 8) * 4 / 2 * 512); /* 2, 4, 6 and 8 key blocks */
    CHECK(work[2] <= (2 + 4 + 4 + 4) * 512);
}
#endif

/* ---- the backward with wgmma ---- */

#define NEEDS_WGMMA() \
    if (last_path() != CF_ATTENTION_WGMMA) SKIP("not of compute capability 9.0")

/* Heads up to 64 have tiles of 128 rows by 128 keys. Groups that fill them and groups that do not, with all kinds of
   masks, around the edges of both. */
TEST(wgmma_small_heads) {
    const struct {
        int n_heads, n_kv_heads, head_size, queries, keys, window;
        double softcap;
    } cases[] = {{1, 1, 64, 129, 129, 0, 0.0}, {7, 1, 64, 37, 90, 0, 0.0},  {1, 1, 64, 128, 385, 70, 0.0},
                 {4, 2, 40, 64, 65, 0, 2.5},   {28, 1, 64, 9, 140, 0, 0.0}, {1, 1, 64, 260, 260, 130, 2.5},
                 {64, 1, 64, 5, 7, 0, 0.0},    {2, 1, 8, 150, 40, 0, 0.0}};
    NEEDS_WGMMA();
    for (int i = 0; i < 16; i += harness_rounds(1, 3)) {
        const auto &one = cases[i % 8];
        host_problem p = problem_of(one.n_heads, one.n_kv_heads, one.head_size);
        run_options o = on(CF_ATTENTION_WGMMA);
        p.dtype = i % 3 == 2 ? CF_DTYPE_FP16 : CF_DTYPE_BF16;
        p.full = i % 5 == 4;
        p.window = one.window;
        p.softcap = one.softcap;
        p.add_slice(one.queries, one.keys);
        p.add_slice(5, 5);
        o.deterministic = i % 2 != i / 8;
        o.overwrite = i % 4 >= 2;
        o.strided = i % 5 == 1;
        check_problem(p, o, (uint64_t)(800 + i));
    }
}

/* One key at either end decides whether a warp's rows need their mask in the kernel for dq, or a warpgroup's keys in
   the other kernel. */
TEST(wgmma_mask_edges) {
    NEEDS_WGMMA();
    for (int i = 0; i < 8; i++) {
        host_problem p = problem_of(1, 1, i & 1 ? 128 : 64);
        run_options o = on(CF_ATTENTION_WGMMA);
        o.deterministic = (i & 2) != 0;
        p.window = i & 4 ? 145 : 0;
        p.add_slice(20, 146);
        check_problem(p, o, (uint64_t)(820 + i));
    }
}

/* dq in its own kernel after dk and dv by wgmma. A block for each row tile adds in one order, whatever runs first. The
   workspace has no room for dq's sums, only for each row's two numbers and the splits of key tiles. */
TEST(wgmma_dq_by_itself) {
    const int heads[][3] = {{1, 1, 128}, {10, 2, 64}, {3, 1, 128}, {2, 1, 40}};
    NEEDS_WGMMA();
    for (int i = 0; i < harness_rounds(4, 1); i++) {
        const int kv = heads[i][1], group = heads[i][0] / kv, large = heads[i][2] > 64, row_tile = large ? 64 : 128;
        host_problem p = problem_of(heads[i][0], kv, heads[i][2]);
        run_options o = on(CF_ATTENTION_WGMMA);
        device_results one, other;
        int64_t row_tiles = 0, key_tiles = 0;
        p.window = i == 1 ? 1300 : 0;
        p.softcap = i == 2 ? 3.0 : 0.0;
        p.add_slice(70, 1400 + 63 * i); /* in three row tiles of 64 rows, or two with a short one */
        p.add_slice(9, 30);
        o.deterministic = true;
        o.processors = 100;
        for (int s = 0; s < p.n_slices(); s++) {
            const int unseen = p.window > 0 ? std::max(0, (int)(p.keys(s) - p.queries(s)) + 1 - (int)p.window) : 0;
            row_tiles += (p.queries(s) + row_tile / group - 1) / (row_tile / group);
            key_tiles += (unseen + 127) / 128 + (p.keys(s) - unseen + 127) / 128;
        }
        const host_inputs in = random_inputs(p, (uint64_t)(840 + i));
        if (!check_problem(p, o, (uint64_t)(840 + i), &one)) return;
#ifdef CHUNKFLOW_CUDA_EMULATION
        CHECK_INT(cuda_emu_kernel("attention_dq").blocks, kv * row_tiles);
        CHECK_INT(cuda_emu_total().conflicts, 0);
        cuda_emu_set_order(1);
        cuda_emu_set_arrivals(CUDA_EMU_ARRIVE_AT_RANDOM, (uint64_t)i);
#endif
        const bool ok = run_on_device(p, in, o, &other);
#ifdef CHUNKFLOW_CUDA_EMULATION
        cuda_emu_set_order(0);
        cuda_emu_set_arrivals(CUDA_EMU_ARRIVE_LATE);
#endif
        if (!ok) return;
        CHECK(one.bits == other.bits);
        const cf_attention *a = &one.attention;
        const int64_t parts = a->n_all_key_tiles - key_tiles + a->n_split_key_tiles;
        CHECK_INT(a->n_row_tiles, row_tiles);
        CHECK_INT(a->backward_bytes, round_up((size_t)(kv * row_tiles * row_tile * 2) * 4, 256) +
                                         (size_t)(kv * 2 * parts * 128 * (large ? 128 : 64)) * 4);
    }
}

#ifdef CHUNKFLOW_CUDA_EMULATION
/* Counts the products and loads of the backward with wgmma, to the instruction and the byte, for head sizes 64 and 128.
   The dq kernel takes three products by mma.sync, of 64 keys at a time, and no bulk copy. */
TEST(wgmma_work_of_the_backward) {
    const int tiles = harness_rounds(4, 3);
    for (int size = 64; size <= 128; size += 64) {
        const int64_t steps = size / 16, tile_bytes = 128 * size * 2; /* tiles of 128 keys or of 128 rows */
        const int64_t rows = size == 64 ? 128 : 64;
        host_problem p = problem_of(1, 1, size);
        run_options o = on(CF_ATTENTION_WGMMA);
        device_results got;
        p.add_slice(128 * tiles, 128 * tiles);
        const host_inputs in = random_inputs(p, 1);
        for (int i = 0; i < 4; i++) {
            const int64_t blocks = i / 2 ? tiles * tiles : tiles * (tiles + 1) / 2; /* of 128 rows and 128 keys */
            const int64_t turns = blocks * (128 / rows);
            /* Products of a warpgroup, each with 64 keys. For a tile of 64 rows on the diagonal, one warpgroup sees no
               keys. */
            const int64_t halves = 2 * turns - (i / 2 == 0 && rows == 64 ? tiles : 0);
            p.full = i / 2;
            o.deterministic = i % 2 != 0;
            if (!run_on_device(p, in, o, &got)) return;
            const cuda_emu_counts keys = cuda_emu_kernel("attention_backward");
            int64_t by_mma = 0;
            for (int64_t first = 0; o.deterministic && first < 128 * tiles; first += rows)
                by_mma += (i / 2 ? 2 * tiles : (first + rows) / 64) * (rows / 16) * (size + size / 2);
            /* Scores and dP; dV and dK; dQ of 128 keys by two warpgroups. */
            CHECK_INT(keys.wgmma, halves * (2 * steps + 2 * rows / 16) + (o.deterministic ? 0 : turns * 2 * 8));
            CHECK_INT(keys.bulk_bytes, tiles * 2 * tile_bytes + blocks * 2 * tile_bytes + turns * rows * 8);
            CHECK_INT(cuda_emu_kernel("attention_dq").bulk_bytes, 0);
            CHECK_INT(cuda_emu_kernel("attention_round_dq").launches, !o.deterministic);
            CHECK_INT(cuda_emu_total().mma, by_mma);
            CHECK_INT(cuda_emu_total().conflicts, 0);
        }
    }
}

/* Rows 2^29 elements apart, so that the fifth is past 2^31: no offset on the way may be computed in 32 bits. */
static const int64_t FAR = (int64_t)1 << 29;

struct far_arrays {
    std::vector<void *> blocks;
    cf_attention_tensors x;
    int64_t step = FAR; /* from row to row */

    ~far_arrays() {
        for (void *block : blocks) cudaFree(block);
    }

    bool make(cf_tensor *t, int64_t rows, size_t number, const uint16_t *from, int64_t per_row) {
        t->data = cuda_emu_sparse_malloc((size_t)rows * (size_t)step * number);
        t->row_stride = step;
        if (!t->data) return false;
        blocks.push_back(t->data);
        for (int64_t i = 0; i < rows && from; i++)
            memcpy((char *)t->data + (size_t)(i * step) * number, from + i * per_row, (size_t)per_row * 2);
        return true;
    }

    void *take(size_t bytes) {
        void *block = nullptr;
        CHECK(cudaMalloc(&block, bytes + 1) == cudaSuccess);
        blocks.push_back(block);
        return block;
    }
};

static std::vector<uint16_t> bits_of(const std::vector<float> &array) {
    std::vector<uint16_t> bits;
    for (float x : array) bits.push_back(cuda_emu_float_to_bf16(x));
    return bits;
}

/* Compares the outputs of a run with distant rows and an ordinary run, row by row. */
static void check_far(const cf_tensor &t, cf_dtype dtype, int64_t n_rows, int64_t row_size,
                      const std::vector<double> &wanted) {
    const size_t rows = (size_t)n_rows, per_row = (size_t)row_size;
    for (size_t i = 0; i < rows; i++)
        for (size_t c = 0; c < per_row; c++) {
            const size_t at = i * (size_t)t.row_stride + c;
            const float got =
                dtype == CF_DTYPE_FP32 ? ((float *)t.data)[at] : cuda_emu_bf16_to_float(((uint16_t *)t.data)[at]);
            if ((double)got == wanted[i * per_row + c]) continue;
            FAIL("row %d, number %d: %g, wanted %g", (int)i, (int)c, (double)got, wanted[i * per_row + c]);
            return;
        }
}

/* Runs a problem with its rows `step` elements apart, and compares with the bits of an ordinary run. */
static void check_far_run(const host_problem &p, const run_options &o, int64_t step, uint64_t seed) {
    const host_inputs in = random_inputs(p, seed);
    const int64_t q_row = p.n_heads * p.head_size, k_row = p.n_kv_heads * p.head_size;
    device_results near;
    prepared_problem made;
    far_arrays far;
    cublasHandle_t cublas;
    if (!run_on_device(p, in, o, &near) || !made.make(p, o)) return;
    const cf_attention *a = made.a;
    cf_attention_tensors *x = &far.x;
    far.step = step;
    memset(x, 0, sizeof *x);
    if (!far.make(&x->q, a->rows_q, 2, bits_of(in.q).data(), q_row) ||
        !far.make(&x->k, a->rows_k, 2, bits_of(in.k).data(), k_row) ||
        !far.make(&x->v, a->rows_k, 2, bits_of(in.v).data(), k_row) ||
        !far.make(&x->dout, a->rows_q, 2, bits_of(in.dout).data(), q_row) ||
        !far.make(&x->out, a->rows_q, 2, NULL, q_row) || !far.make(&x->dq, a->rows_q, 2, NULL, q_row) ||
        !far.make(&x->dk, a->rows_k, 4, NULL, k_row) || !far.make(&x->dv, a->rows_k, 4, NULL, k_row))
        SKIP("no address space for sparse arrays");
    x->lse = (float *)far.take((size_t)(p.n_heads * a->rows_q) * 4);
    x->workspace_bytes = a->backward_bytes > a->forward_bytes ? a->backward_bytes : a->forward_bytes;
    x->workspace = far.take(x->workspace_bytes);
    void *tiles = far.take(a->tiles_bytes);
    cudaMemcpy(tiles, a->tiles, a->tiles_bytes, cudaMemcpyHostToDevice);
    x->tiles = tiles;
    x->overwrite = 1;
    CHECK(cublasCreate(&cublas) == CUBLAS_STATUS_SUCCESS);
    x->cublas = cublas;
    cuda_emu_reset();
    CHECK_INT(cf_attention_forward(a, x, NULL, NULL), CF_OK);
    CHECK_INT(cf_attention_backward(a, x, NULL, NULL), CF_OK);
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    cublasDestroy(cublas);
    CHECK_STR(cuda_emu_first_fault(), "");
    check_far(x->out, CF_DTYPE_BF16, a->rows_q, q_row, near.values.out);
    check_far(x->dq, CF_DTYPE_BF16, a->rows_q, q_row, near.values.dq);
    check_far(x->dk, CF_DTYPE_FP32, a->rows_k, k_row, near.values.dk);
    check_far(x->dv, CF_DTYPE_FP32, a->rows_k, k_row, near.values.dv);
}

TEST(rows_past_32_bits) {
    host_problem p = problem_of(2, 1, 64);
    p.add_slice(5, 5);
    p.add_slice(3, 9);
    for (int path = CF_ATTENTION_UNFUSED; path <= last_path(); path++)
        for (int deterministic = 0; deterministic < 2; deterministic++) {
            run_options o = on((cf_attention_path)path);
            o.deterministic = deterministic != 0;
            o.overwrite = true;
            check_far_run(p, o, FAR, 21);
        }
}

/* The same with split tiles: more rows with fewer elements between them, still past 2^31 where the splits are
   combined. */
TEST(parts_past_32_bits) {
    host_problem p = problem_of(4, 1, 64);
    run_options o = mma;
    prepared_problem made;
    o.by_name = true;
    p.add_slice(560, 570); /* keys from 256 on are another key tile, and past 2^31 */
    p.add_slice(9, 1300);
    o.processors = 132;
    o.overwrite = o.deterministic = true;
    if (!made.make(p, o)) return;
    CHECK_INT(made.a->n_split_forward_tiles, 1);
    CHECK(made.a->n_split_key_tiles >= 3);
    check_far_run(p, o, (int64_t)1 << 23, 22);
}
#endif

/* ---- what is refused ---- */

struct refusal {
    cf_attention_desc desc;
    std::vector<uint64_t> memory;
    cf_error error;
    int32_t cu[3];

    /* any value, as a C caller could pass */
    void set(void *member, int value) { memcpy(member, &value, sizeof value); }

    refusal() : memory(4096) {
        memset(&desc, 0, sizeof desc);
        cu[0] = 0, cu[1] = 10, cu[2] = 30;
        desc.n_heads = 4;
        desc.n_kv_heads = 2;
        desc.head_size = 64;
        desc.n_slices = 2;
        desc.cu_seqlens_q = desc.cu_seqlens_k = cu;
        desc.arch = 80;
        clear();
    }
    void clear() { memset(&error, 0, sizeof error); }

    void expect(cf_result code, const char *field) {
        size_t bytes = 12345;
        clear();
        CHECK_INT(cf_attention_size(&desc, &bytes, &error), code);
        CHECK_INT(error.code, code);
        CHECK_STR(error.field, field);
        CHECK_INT(bytes, 12345);
    }
};

static void refused(void (*damage)(refusal &), cf_result code, const char *field) {
    refusal x;
    damage(x);
    x.expect(code, field);
}

TEST(bad_descriptors) {
    refusal r;
    size_t bytes = 0;
    CHECK_INT(cf_attention_size(&r.desc, &bytes, &r.error), CF_OK);
    CHECK(bytes > 0);
    CHECK_INT(cf_attention_size(NULL, &bytes, NULL), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_attention_size(&r.desc, NULL, NULL), CF_ERROR_ARGUMENT);
    refused([](refusal &x) { x.desc.n_heads = 0; }, CF_ERROR_ARGUMENT, "n_heads");
    refused([](refusal &x) { x.desc.n_kv_heads = 3; }, CF_ERROR_ARGUMENT, "n_kv_heads");
    refused([](refusal &x) { x.desc.n_kv_heads = -1; }, CF_ERROR_ARGUMENT, "n_kv_heads");
    refused([](refusal &x) { x.desc.head_size = 20; }, CF_ERROR_ARGUMENT, "head_size");
    refused([](refusal &x) { x.desc.head_size = 264; }, CF_ERROR_ARGUMENT, "head_size");
    refused([](refusal &x) { x.set(&x.desc.dtype, 9); }, CF_ERROR_ARGUMENT, "dtype");
    refused([](refusal &x) { x.desc.window = -1; }, CF_ERROR_ARGUMENT, "window");
    {
        refusal x;
        x.desc.scale = -1.0;
        x.expect(CF_ERROR_ARGUMENT, "scale");
        CHECK_INT(x.error.got, 0); /* 0 for any number that is not an integer: the text has the number */
        CHECK(strstr(x.error.text, "(got -1)") != NULL);
    }
    {
        refusal x;
        x.desc.scale = NAN;
        x.expect(CF_ERROR_ARGUMENT, "scale");
        CHECK(strstr(x.error.text, "(got NaN)") != NULL);
    }
    {
        refusal x;
        x.desc.softcap = INFINITY;
        x.expect(CF_ERROR_ARGUMENT, "softcap");
        CHECK(strstr(x.error.text, "(got infinity)") != NULL);
        x.desc.softcap = -0.5;
        x.expect(CF_ERROR_ARGUMENT, "softcap");
        CHECK(strstr(x.error.text, "(got -0.5)") != NULL);
    }
    for (int64_t arch : {8, -5, 49, 1000, 1000000}) {
        refusal x;
        x.desc.arch = arch;
        x.expect(CF_ERROR_ARGUMENT, "arch");
        CHECK_INT(x.error.got, arch);
    }
    refused([](refusal &x) { x.desc.n_processors = -1; }, CF_ERROR_ARGUMENT, "n_processors");
    refused([](refusal &x) { x.desc.cache_bytes = -1; }, CF_ERROR_ARGUMENT, "cache_bytes");
    refused([](refusal &x) { x.desc.n_processors = 1025; }, CF_ERROR_ARGUMENT, "n_processors");
    refused([](refusal &x) { x.desc.n_slices = -1; }, CF_ERROR_ARGUMENT, "n_slices");
    refused([](refusal &x) { x.desc.cu_seqlens_k = NULL; }, CF_ERROR_ARGUMENT, "cu_seqlens_k");
    refused([](refusal &x) { x.cu[0] = 1; }, CF_ERROR_ARGUMENT, "cu_seqlens_q");
    {
        refusal x;
        x.cu[2] = 5;
        x.expect(CF_ERROR_ARGUMENT, "cu_seqlens_q");
        CHECK_INT(x.error.item, 2);
    }
    {
        refusal x;
        int32_t starts[2] = {0, 9};
        x.desc.starts_q = starts;
        x.expect(CF_ERROR_ARGUMENT, "starts_q");
        starts[0] = 40; /* disjoint, but in another order */
        x.expect(CF_ERROR_ARGUMENT, "starts_q");
        CHECK_INT(x.error.item, 1);
        CHECK(strstr(x.error.text, "ascending") != NULL);
    }
    {
        refusal x;
        int32_t starts[2] = {-1, 12};
        x.desc.starts_k = starts;
        x.expect(CF_ERROR_ARGUMENT, "starts_k");
    }
    refused([](refusal &x) { x.cu[2] = INT32_MAX; }, CF_ERROR_LIMIT, "cu_seqlens_q");
    refused([](refusal &x) { x.set(&x.desc.path, 77); }, CF_ERROR_ARGUMENT, "path");
    {
        refusal x;
        x.desc.path = CF_ATTENTION_MMA;
        x.desc.dtype = CF_DTYPE_FP32;
        x.expect(CF_ERROR_ARGUMENT, "path");
    }
    /* 99 KB of shared memory */
    refused([](refusal &x) { x.desc.path = CF_ATTENTION_MMA; x.desc.head_size = 136; x.desc.arch = 89; },
            CF_ERROR_ARGUMENT, "path");
    refused([](refusal &x) { x.desc.path = CF_ATTENTION_MMA; x.desc.arch = 75; }, CF_ERROR_ARGUMENT, "path");
}

TEST(sizes_are_exact) {
    refusal r;
    const cf_attention *a = NULL;
    size_t bytes = 0;
    REQUIRE(cf_attention_size(&r.desc, &bytes, NULL) == CF_OK);
    unsigned char *memory = (unsigned char *)harness_guard_new(bytes);
    CHECK_INT(cf_attention_prepare(&r.desc, memory, bytes - 1, &a, &r.error), CF_ERROR_SPACE);
    CHECK_STR(r.error.field, "bytes");
    CHECK_INT(r.error.wanted, bytes);
    CHECK(a == NULL);
    CHECK_POISON(memory, bytes);
    CHECK_INT(cf_attention_prepare(&r.desc, memory + 8, bytes, &a, NULL), CF_ERROR_SPACE);
    CHECK_INT(cf_attention_prepare(&r.desc, NULL, bytes, &a, NULL), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_attention_prepare(&r.desc, memory, bytes, NULL, NULL), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_attention_prepare(&r.desc, memory, bytes, &a, NULL), CF_OK);
    CHECK(a->desc.cu_seqlens_q != r.desc.cu_seqlens_q && a->desc.cu_seqlens_q[2] == 30);
    CHECK_INT(a->path, CF_ATTENTION_MMA);
    CHECK_INT(a->rows_q, 30);
    CHECK_INT(a->pairs, 10 * 11 / 2 + 20 * 21 / 2);
    CHECK((const unsigned char *)a->tiles + a->tiles_bytes <= memory + bytes);
    harness_guard_free(memory);
}

TEST(automatic_choice) {
    const struct {
        cf_dtype dtype;
        int64_t head_size, arch;
        cf_attention_path path;
    } cases[] = {{CF_DTYPE_DEFAULT, 64, 80, CF_ATTENTION_MMA},   {CF_DTYPE_FP16, 128, 90, CF_ATTENTION_WGMMA},
                 {CF_DTYPE_BF16, 40, 86, CF_ATTENTION_MMA},      {CF_DTYPE_FP32, 64, 90, CF_ATTENTION_UNFUSED},
                 {CF_DTYPE_BF16, 136, 90, CF_ATTENTION_MMA},     {CF_DTYPE_BF16, 136, 86, CF_ATTENTION_UNFUSED},
                 {CF_DTYPE_BF16, 64, 75, CF_ATTENTION_UNFUSED}};
    for (const auto &one : cases) {
        refusal r;
        const cf_attention *a = NULL;
        r.desc.dtype = one.dtype;
        r.desc.head_size = one.head_size;
        r.desc.arch = one.arch;
        REQUIRE(cf_attention_prepare(&r.desc, r.memory.data(), r.memory.size() * 8, &a, NULL) == CF_OK);
        CHECK_INT(a->path, one.path == CF_ATTENTION_WGMMA ? last_path() : one.path);
#ifdef CHUNKFLOW_CUDA_EMULATION
        for (int fails = 0; fails < 2 && one.path == CF_ATTENTION_WGMMA; fails++) { /* a program without its code */
            if (fails) cuda_emu_fail_call(1, cudaErrorNoDevice);
            else cuda_emu_set_kernel_threads(32);
            CHECK_INT(cf_attention_prepare(&r.desc, r.memory.data(), r.memory.size() * 8, &a, NULL), CF_OK);
            CHECK_INT(a->path, CF_ATTENTION_MMA);
            CHECK_INT(cudaGetLastError(), cudaSuccess);
            cuda_emu_set_kernel_threads(1024);
            cuda_emu_reset();
        }
#endif
    }
    CHECK_STR(cf_attention_path_name(CF_ATTENTION_AUTO), "auto");
    CHECK_STR(cf_attention_path_name(CF_ATTENTION_UNFUSED), "unfused");
    CHECK_STR(cf_attention_path_name(CF_ATTENTION_MMA), "mma");
    CHECK_STR(cf_attention_path_name(CF_ATTENTION_WGMMA), "wgmma");
}

/* Calls that are refused before a launch; the addresses are never used. */
TEST(bad_calls) {
    refusal r;
    const cf_attention *a = NULL;
    cf_attention_tensors good, x;
    void *somewhere = (void *)(uintptr_t)4096;
    memset(&good, 0, sizeof good);
    REQUIRE(cf_attention_prepare(&r.desc, r.memory.data(), r.memory.size() * 8, &a, NULL) == CF_OK);
    for (cf_tensor *one : {&good.q, &good.k, &good.v, &good.out, &good.dout, &good.dq, &good.dk, &good.dv})
        one->data = somewhere;
    good.lse = (float *)somewhere;
    good.tiles = good.workspace = somewhere;
    good.workspace_bytes = a->backward_bytes;
    CHECK_INT(cf_attention_forward(NULL, &good, NULL, NULL), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_attention_forward(a, NULL, NULL, NULL), CF_ERROR_ARGUMENT);
#define REFUSED(change, code, name)                                                                                    \
    do {                                                                                                               \
        x = good;                                                                                                      \
        change;                                                                                                        \
        r.clear();                                                                                                     \
        CHECK_INT(cf_attention_backward(a, &x, NULL, &r.error), code);                                                 \
        CHECK_STR(r.error.field, name);                                                                                \
    } while (0)
    REFUSED(x.q.data = NULL, CF_ERROR_ARGUMENT, "q");
    REFUSED(x.k.data = (void *)(uintptr_t)4104, CF_ERROR_ARGUMENT, "k");
    REFUSED(x.v.row_stride = 130, CF_ERROR_ARGUMENT, "v");
    REFUSED(x.out.head_stride = -8, CF_ERROR_ARGUMENT, "out");
    REFUSED(x.dout.data = NULL, CF_ERROR_ARGUMENT, "dout");
    REFUSED(x.dq.row_stride = INT64_MAX / 8 * 8, CF_ERROR_ARGUMENT, "dq");
    REFUSED(x.dk.row_stride = 130, CF_ERROR_ARGUMENT, "dk");
    REFUSED(x.dv.data = NULL, CF_ERROR_ARGUMENT, "dv");
    REFUSED(x.lse = NULL, CF_ERROR_ARGUMENT, "lse");
    REFUSED(x.lse = (float *)(uintptr_t)4098, CF_ERROR_ARGUMENT, "lse");
    REFUSED(x.lse_stride = 29, CF_ERROR_ARGUMENT, "lse_stride");
    REFUSED(x.sinks = (const float *)(uintptr_t)4098, CF_ERROR_ARGUMENT, "sinks");
    REFUSED(x.dsinks = (float *)somewhere, CF_ERROR_ARGUMENT, "sinks");
    REFUSED(x.tiles = NULL, CF_ERROR_ARGUMENT, "tiles");
    REFUSED(x.workspace = (void *)(uintptr_t)4112, CF_ERROR_ARGUMENT, "workspace");
    REFUSED(x.workspace_bytes--, CF_ERROR_SPACE, "workspace_bytes");
#undef REFUSED
    r.desc.path = CF_ATTENTION_UNFUSED;
    REQUIRE(cf_attention_prepare(&r.desc, r.memory.data(), r.memory.size() * 8, &a, NULL) == CF_OK);
    x = good;
    x.workspace_bytes = a->backward_bytes;
    r.clear();
    CHECK_INT(cf_attention_forward(a, &x, NULL, &r.error), CF_ERROR_ARGUMENT);
    CHECK_STR(r.error.field, "cublas");
    r.cu[2] = 1 << 21; /* its last row would be 2^61 numbers away */
    REQUIRE(cf_attention_prepare(&r.desc, r.memory.data(), r.memory.size() * 8, &a, NULL) == CF_OK);
    x.workspace_bytes = a->forward_bytes;
    x.v.row_stride = (int64_t)1 << 40;
    CHECK_INT(cf_attention_forward(a, &x, NULL, &r.error), CF_ERROR_OVERFLOW);
    CHECK_STR(r.error.field, "v");
}

#ifdef CHUNKFLOW_CUDA_EMULATION
/* A program compiled without the tiles for devices with less shared memory says so, and launches nothing. */
TEST(tiles_without_code) {
    for (int i = 0; i < 8; i++) {
        refusal r;
        const bool little = (i & 1) != 0;
        const cf_attention *a = NULL;
        cf_attention_tensors x;
        r.desc.arch = little ? 86 : 90;
        r.desc.path = CF_ATTENTION_MMA;
        r.desc.head_size = i & 2 ? 128 : 64;
        r.desc.deterministic = (i & 4) != 0;
        REQUIRE(cf_attention_prepare(&r.desc, r.memory.data(), r.memory.size() * 8, &a, NULL) == CF_OK);
        void *data = NULL, *tiles = NULL, *workspace = NULL;
        REQUIRE(cudaMalloc(&data, 30 * 4 * 128 * 4) == cudaSuccess);
        REQUIRE(cudaMalloc(&workspace, a->backward_bytes) == cudaSuccess);
        REQUIRE(cudaMalloc(&tiles, a->tiles_bytes) == cudaSuccess);
        CHECK(cudaMemset(data, 0, 30 * 4 * 128 * 4) == cudaSuccess);
        CHECK(cudaMemcpy(tiles, a->tiles, a->tiles_bytes, cudaMemcpyHostToDevice) == cudaSuccess);
        memset(&x, 0, sizeof x);
        for (cf_tensor *one : {&x.q, &x.k, &x.v, &x.out, &x.dout, &x.dq, &x.dk, &x.dv}) one->data = data;
        x.lse = (float *)data;
        x.tiles = tiles;
        x.workspace = workspace;
        x.workspace_bytes = a->backward_bytes;
        x.overwrite = 1;
        cuda_emu_reset();
        cuda_emu_set_kernel_threads(32);
        const cf_result code = cf_attention_backward(a, &x, NULL, &r.error);
        cuda_emu_set_kernel_threads(1024);
        CHECK(cudaDeviceSynchronize() == cudaSuccess);
        CHECK_INT(code, little ? CF_ERROR_DEVICE : CF_OK);
        if (little) {
            CHECK_STR(r.error.field, "arch");
            CHECK_INT(r.error.wanted, 256);
            CHECK_INT(r.error.got, 32);
        }
        CHECK_INT(cuda_emu_total().launches > 0, !little);
        for (void *block : {data, tiles, workspace}) cudaFree(block);
    }
    cuda_emu_reset();
}
#endif

/* Tests the comparison itself, which must reject bad results. */
TEST(accuracy_rule_rejects) {
    const std::vector<double> exact = {1.0, -2.0, 3.0}, rounded = {1.001, -2.0, 3.0};
    harness_counts counts;
    static std::vector<double> wrong;
    static const harness_case inner[] = {{"inner", [] {
                                              const std::vector<double> e = {1.0, -2.0, 3.0}, r = {1.001, -2.0, 3.0};
                                              check_accuracy("x", CF_DTYPE_BF16, wrong, e, r, 2.0);
                                          }}};
    static const harness_suite suite = {"inner", inner, 1};
    static const harness_suite *const suites[] = {&suite};
    FILE *out = tmpfile();
    REQUIRE(out != NULL);
    const std::vector<double> bad[] = {
        {1.0, NAN, 3.0}, {1.0, -2.0, 3.1}, {INFINITY, -2.0, 3.0}, {0.0, 0.0, 0.0}, {-2.0, 3.0, 1.0}};
    for (const auto &one : bad) {
        wrong = one;
        counts = harness_run(suites, 1, NULL, 0, out);
        CHECK_INT(counts.failed, 1);
    }
    wrong = rounded;
    counts = harness_run(suites, 1, NULL, 0, out);
    CHECK_INT(counts.passed, 1);
    fclose(out);
}

#ifdef CHUNKFLOW_CUDA_EMULATION
#define EMULATED_CASES                                                                                                 \
    CASE(no_empty_blocks_no_conflicts), CASE(split_blocks), CASE(masked_tiles_are_skipped), CASE(rows_past_32_bits),  \
        CASE(wgmma_work_of_the_backward), CASE(parts_past_32_bits), CASE(tiles_without_code),
#else
#define EMULATED_CASES
#endif

SUITE(attention, EMULATED_CASES CASE(accuracy_rule_rejects), CASE(bad_descriptors), CASE(sizes_are_exact),
      CASE(automatic_choice), CASE(bad_calls), CASE(shapes_causal), CASE(shapes_full), CASE(shapes_long),
      CASE(groups_of_heads), CASE(groups_that_do_not_fill_tiles), CASE(sections_of_heads),
      CASE(backward_keeps_the_device_busy),
      CASE(head_sizes), CASE(head_256), CASE(head_128), CASE(little_shared_memory), CASE(split_key_tiles),
      CASE(split_forward_tiles), CASE(many_parts), CASE(pairs_are_counted), CASE(longest_tiles_first),
      CASE(workspace_is_what_it_holds), CASE(when_tiles_are_split), CASE(prefixes), CASE(documents_of_1_to_130_tokens),
      CASE(documents_packed_heads), CASE(padded_slices), CASE(sinks), CASE(sinks_of_the_reference), CASE(masks),
      CASE(window_edges),
      CASE(backward_mask_edges), CASE(empty_slices),
      CASE(no_slices), CASE(nan_in_blind_rows), CASE(nan_in_unseen_keys),
      CASE(nan_in_keys_of_other_tiles), CASE(large_scores), CASE(unfused_types_and_blocks),
      CASE(chunks_equal_one_piece), CASE(determinism), CASE(wgmma_small_heads), CASE(wgmma_mask_edges),
      CASE(wgmma_dq_by_itself));
