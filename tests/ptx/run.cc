/* run.cc - warps, blocks and grids; and what the lanes of a warp do together */

#include "opcodes.h"

#include <algorithm>

namespace ptx {

/* ---- which lanes run ----

   All lanes of a warp run together until a branch parts them. From then on each has its own place, and those at the
   lowest run first, until they come to where others are. An instruction that needs more lanes than are here parks
   those that are, until the others come. */

void set_mask(warp &w, uint32_t mask) {
    w.mask = mask;
    for (int l = 0; l < LANES; l++) w.lanes[l] = -(int32_t)(mask >> l & 1);
}

void leave_lanes(warp &w, uint32_t lanes, int pc) {
    for (int l = 0; l < LANES; l++)
        if (lanes >> l & 1) w.at[l] = pc;
}

void wait_here(warp &w, uint32_t lanes, wait_kind kind, bool done) {
    leave_lanes(w, w.active & ~lanes, w.pc);
    leave_lanes(w, lanes, w.pc + (done ? 1 : 0));
    w.waiting |= lanes;
    w.kind = kind;
    w.split = true;
}

/* Takes the lanes at the lowest place among those that can run. Returns where the next ones are, or -1 if none can. */
static int take_lanes(warp &w) {
    const uint32_t ready = w.live & ~w.waiting, free = ready & ~w.parked;
    int first = INT32_MAX, second = INT32_MAX;
    for (int l = 0; l < LANES; l++)
        if (free >> l & 1) first = std::min(first, w.at[l]);
    if (first == INT32_MAX) return -1;
    w.active = 0;
    for (int l = 0; l < LANES; l++)
        if (ready >> l & 1) {
            if (w.at[l] == first) w.active |= 1u << l;
            else if (w.at[l] > first) second = std::min(second, w.at[l]);
        }
    w.parked &= ~w.active;
    w.apart = w.active != ready;
    w.pc = first;
    return second;
}

static uint32_t lanes_wanted(warp &w, const instruction &i) {
    if (i.needs == ANY) return 0;
    if (i.needs == ALL) return w.live;
    const uint32_t mask = at<uint32_t>(w, places(w, i)[i.n - 1])[__builtin_ctz(w.active)];
    return mask & w.live;
}

/* Returns whether the lanes that this needs are here. If not, those that are wait for them. */
static bool are_together(warp &w, const instruction &i) {
    const uint32_t wanted = lanes_wanted(w, i);
    if ((wanted & ~w.active) == 0) return true;
    leave_lanes(w, w.active, w.pc);
    w.parked |= w.active;
    w.split = true;
    return false;
}

/* A thousand times as many as any warp of the tests takes. */
const uint32_t MOST_JUMPS_BACK = 1u << 20;

/* Runs the lanes that are taken until they part, wait, return, or come to where others are; after a jump back others
   may be the first. */
template <bool CHECKED> static void run_lanes(warp &w, int others) {
    const instruction *code = w.of->code.data();
    set_mask(w, w.active);
    w.split = w.yields = false;
    for (;;) {
        const instruction &i = code[w.pc];
        uint32_t mask = w.active;
        if (i.guard != NO_PLACE) mask &= *at<uint32_t>(w, i.guard) ^ (i.guard_negated ? ALL_LANES : 0);
        w.next = w.pc + 1;
        if (mask != 0) {
            if (i.needs != ANY && !are_together(w, i)) return;
            if (i.needs == ALL && mask != w.active) stop(w, "some lanes only");
            if (mask != w.mask) set_mask(w, mask);
            if (CHECKED) check_registers(w, i);
            i.run(w, i);
            if (w.split) return;
        }
        const bool back = w.next <= w.pc;
        if (back && ++w.jumps_back > MOST_JUMPS_BACK)
            stop(w, "hangs: this warp loops without end%s", who_waits(*w.in).c_str());
        w.pc = w.next;
        if (w.pc >= others || w.yields || (back && w.apart)) {
            leave_lanes(w, w.active, w.pc);
            return;
        }
    }
}

/* Runs a warp as far as it can. Returns whether it did anything. */
static bool run_warp(warp &w) {
    bool any = false;
    for (;;) {
        const int others = take_lanes(w);
        if (others < 0) return any;
        any = true;
        if (w.of->has_wgmma) run_lanes<true>(w, others);
        else run_lanes<false>(w, others);
        if (w.yields) return true;
    }
}

/* ---- branches ---- */

static void branch(warp &w, const instruction &i) {
    if (w.mask == w.active) w.next = i.target;
    else if (w.mask != 0) {
        leave_lanes(w, w.mask, i.target);
        leave_lanes(w, w.active & ~w.mask, w.pc + 1);
        w.split = true;
    }
}

static void ret(warp &w, const instruction &) {
    if (w.mask != w.active) leave_lanes(w, w.active & ~w.mask, w.pc + 1);
    w.live &= ~w.mask;
    w.parked = 0; /* fewer lanes are waited for now */
    w.split = true;
    if (w.live == 0) finish_warp(w);
}

static void nothing(warp &, const instruction &) {}

/* ---- barriers ---- */

static uint32_t number(warp &w, uint32_t place) { return *at<uint32_t>(w, place); }

static void arrive_at_barrier(warp &w, uint32_t id, uint32_t threads, bool waits) {
    if (id > 15) stop(w, "there is no barrier %u", id);
    named_barrier &b = w.in->barriers[id];
    const uint32_t n_threads = (uint32_t)(w.in->n_threads + LANES - 1) / LANES * LANES;
    if (threads == 0) threads = n_threads;
    if (threads % LANES != 0 || threads > n_threads)
        stop(w, "barrier %u of %u threads, of %d in the block", id, threads, w.in->n_threads);
    if (b.arrived > 0 && b.wanted != threads)
        stop(w, "barrier %u is of %u threads for some, of %u for others", id, b.wanted, threads);
    if (b.here >> w.index & 1) stop(w, "the warp arrives twice at barrier %u", id);
    b.wanted = threads;
    b.arrived += LANES;
    b.here |= 1ull << w.index;
    give(w, &b.given);
    if (b.arrived < threads) {
        if (waits) {
            b.waiting |= 1ull << w.index;
            w.wait_address[0] = id;
            wait_here(w, w.live, AT_BARRIER, true);
        } else w.yields = true;
        return;
    }
    if (!waits && b.waiting == 0) stop(w, "nobody waits at barrier %u of %u threads", id, threads);
    if (waits) take(w, b.given);
    for (warp &other : w.in->warps)
        if (b.waiting >> other.index & 1) {
            other.waiting = 0;
            take(other, b.given);
        }
    b = named_barrier();
    w.yields = true;
}

static void bar_sync(warp &w, const instruction &i) {
    arrive_at_barrier(w, number(w, i.d), i.n > 1 ? number(w, i.a) : 0, true);
}
static void bar_arrive(warp &w, const instruction &i) { arrive_at_barrier(w, number(w, i.d), number(w, i.a), false); }

/* ---- shuffles and votes ---- */

/* d|p = what the lane a has that b says. c: a clamp in the low bits, the mask of a segment from bit 8 on. */
template <bool BUTTERFLY> static void shuffle(warp &w, const instruction &i) {
    const uint32_t *o = places(w, i);
    const uint32_t *x = at<uint32_t>(w, o[2]), *by = at<uint32_t>(w, o[3]), *c = at<uint32_t>(w, o[4]);
    uint32_t *d = at<uint32_t>(w, o[0]), *p = at<uint32_t>(w, o[1]), from[LANES], inside = 0;
    for (int l = 0; l < LANES; l++) {
        const uint32_t segment = c[l] >> 8 & 31, last = ((uint32_t)l & segment) | (c[l] & 31 & ~segment);
        uint32_t lane = BUTTERFLY ? (uint32_t)l ^ (by[l] & 31) : ((uint32_t)l & segment) | (by[l] & 31 & ~segment);
        if (lane <= last) inside |= 1u << l;
        else lane = (uint32_t)l;
        if ((w.mask >> l & 1) && !(w.mask >> lane & 1)) stop(w, "lane %d asks lane %u, which is not here", l, lane);
        from[l] = x[lane];
    }
    for (int l = 0; l < LANES; l++)
        if (w.mask >> l & 1) d[l] = from[l];
    *p = (inside & w.mask) | (*p & ~w.mask);
}

static void ballot(warp &w, const instruction &i) {
    const uint32_t bits = *at<uint32_t>(w, i.a) & w.mask;
    for (int l = 0; l < LANES; l++)
        if (w.mask >> l & 1) at<uint32_t>(w, i.d)[l] = bits;
}

/* ---- mma ---- */

/* The pairs in a fragment's registers as floats. */
template <bool BF16> static void widen(const uint32_t *x, float *low, float *high) {
    for (int l = 0; l < LANES; l++) {
        low[l] = BF16 ? float_of_bf16(x[l] & 0xFFFF) : float_of_f16(x[l] & 0xFFFF);
        high[l] = BF16 ? float_of_bf16(x[l] >> 16) : float_of_f16(x[l] >> 16);
    }
}

/* sum += one column of a times one row of b, whose even and odd columns are four numbers each. Of each four lanes the
   one at K has the column's number. */
template <int K> static void add_outer(vec<float, 16> (*sum)[2], float (*a)[2][LANES], int half, float (*b)[4]) {
    vec<float, 16> row[2];
    for (int odd = 0; odd < 2; odd++)
        for (int l = 0; l < 16; l++) row[odd][l] = b[odd][l % 4];
    for (int r = 0; r < 4; r++)
        for (int part = 0; part < 2; part++) {
            const vec<float, 16> x = ((const vec<float, 16> *)a[r / 2][half])[part];
            sum[r][part] += __builtin_shufflevector(x, x, K, K, K, K, K + 4, K + 4, K + 4, K + 4, K + 8, K + 8, K + 8,
                                                    K + 8, K + 12, K + 12, K + 12, K + 12) *
                            row[r % 2];
        }
}

/* c (16 x 8) += a (16 x 16) b (16 x 8). Lane 4 g + t has of a the rows g, g + 8 (registers 0, 1, and 2, 3 with columns
   from 8 on) and the columns 2 t, 2 t + 1; of b the rows 2 t, 2 t + 1 (and from 8 on) and column g; of c as of a. The
   inner dimension is summed in the order of registers. */
template <bool BF16> static void mma(warp &w, const instruction &i) {
    const uint32_t *o = places(w, i);
    alignas(64) float a[4][2][LANES], b[2][LANES], rows[4][2][2][4];
    vec<float, 16> sum[4][2];
    for (int r = 0; r < 4; r++) widen<BF16>(at<uint32_t>(w, o[4 + r]), a[r][0], a[r][1]);
    for (int r = 0; r < 4; r++) memcpy(sum[r], at<float>(w, o[10 + r]), sizeof sum[r]);
    for (int k = 0; k < 2; k++) {
        widen<BF16>(at<uint32_t>(w, o[8 + k]), b[0], b[1]);
        for (int half = 0; half < 2; half++)
            for (int l = 0; l < LANES; l++) rows[l % 4][half][l / 4 % 2][l / 8] = b[half][l];
        for (int half = 0; half < 2; half++) {
            add_outer<0>(sum, a + 2 * k, half, rows[0][half]);
            add_outer<1>(sum, a + 2 * k, half, rows[1][half]);
            add_outer<2>(sum, a + 2 * k, half, rows[2][half]);
            add_outer<3>(sum, a + 2 * k, half, rows[3][half]);
        }
    }
    for (int r = 0; r < 4; r++) memcpy(at<float>(w, o[r]), sum[r], sizeof sum[r]);
}

/* ---- the table ---- */

const opcode CONTROL[] = {
    {"bra", branch, 0},
    {"bra.uni", branch, 0},
    {"ret", ret, 0},
    {"bar.sync", bar_sync, 0, ALL},
    {"bar.arrive", bar_arrive, 0, ALL},
    {"bar.warp.sync", nothing, 0, OF_MASK},
    {"griddepcontrol.launch_dependents", nothing, 0},
    {"shfl.sync.bfly.b32", shuffle<true>, 2, OF_MASK},
    {"shfl.sync.idx.b32", shuffle<false>, 2, OF_MASK},
    {"vote.sync.ballot.b32", ballot, 1, OF_MASK},
    {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", mma<true>, 4, ALL},
    {"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", mma<false>, 4, ALL},
    {nullptr, nullptr, 0},
};

/* ---- blocks and grids ---- */

static void start_warp(block &b, int index) {
    warp &w = b.warps[(size_t)index];
    const int n = std::min(LANES, b.n_threads - index * LANES);
    w.base[0] = &b.registers[(size_t)index * b.of->register_bytes];
    w.base[1] = b.of->constants_at;
    w.in = &b;
    w.of = b.of;
    w.index = index;
    w.live = n == LANES ? ALL_LANES : (1u << n) - 1;
    w.waiting = w.parked = 0;
    w.kind = NOT_WAITING;
    memset(w.at, 0, sizeof w.at);
    memset(w.copy_groups, 0, sizeof w.copy_groups);
    w.copies.clear();
    w.products.clear();
    w.product_groups = w.fenced = 0;
    w.time = 1;
    w.jumps_back = 0;
    if (b.of->has_wgmma) {
        w.written.assign(b.of->register_bytes / 64, 0);
        w.busy.assign(b.of->register_bytes / 64, 0);
    }
    uint32_t *special = at<uint32_t>(w, 0); /* see SPECIAL in read.cc */
    for (int l = 0; l < LANES; l++) {
        const uint32_t t = (uint32_t)(index * LANES + l);
        special[l] = t % b.size[0];
        special[LANES + l] = t / b.size[0] % b.size[1];
        special[2 * LANES + l] = t / b.size[0] / b.size[1];
        for (int axis = 0; axis < 3; axis++) {
            special[(3 + axis) * LANES + l] = b.size[axis];
            special[(6 + axis) * LANES + l] = b.id[axis];
            special[(9 + axis) * LANES + l] = b.grid[axis];
        }
        special[12 * LANES + l] = (uint32_t)l;
    }
}

/* Every warp of a block has its turn, in the order that was asked for. Returns whether one of them did anything. */
static bool run_block(block &b) {
    std::vector<int> order(b.warps.size());
    bool any = false;
    for (size_t i = 0; i < order.size(); i++) order[i] = (int)i;
    if (options().order == 'r') std::reverse(order.begin(), order.end());
    if (options().order == 's')
        for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[random_number((uint32_t)i)]);
    for (int at : order) any = run_warp(b.warps[(size_t)at]) || any;
    return any;
}

static bool is_over(const block &b) {
    for (const warp &w : b.warps)
        if (w.live) return false;
    return true;
}

static void begin_block(block &b, const kernel &k, uint64_t number, const uint32_t grid[3], const uint32_t size[3],
                        uint32_t shared_bytes) {
    b.of = &k;
    b.id[0] = (uint32_t)(number % grid[0]);
    b.id[1] = (uint32_t)(number / grid[0] % grid[1]);
    b.id[2] = (uint32_t)(number / grid[0] / grid[1]);
    for (int axis = 0; axis < 3; axis++) b.size[axis] = size[axis], b.grid[axis] = grid[axis];
    b.n_threads = (int)(size[0] * size[1] * size[2]);
    const size_t n_warps = (size_t)(b.n_threads + LANES - 1) / LANES;
    b.shared.assign(shared_bytes, 0xFF); /* NaN */
    b.local.assign((size_t)n_warps * LANES * k.local_bytes, 0xFF);
    b.warps.resize(n_warps);
    b.register_store.assign(n_warps * k.register_bytes + 64, (char)0xFF);
    b.registers = (char *)(((uintptr_t)b.register_store.data() + 63) / 64 * 64);
    for (named_barrier &one : b.barriers) one = named_barrier();
    for (size_t i = 0; i < n_warps; i++) start_warp(b, (int)i);
    start_block(b);
}

/* Runs each block as far as it can; where nothing goes on, a copy lands, and where there is none, the run hangs. */
static void run_blocks(std::vector<block *> &now) {
    bool any = false;
    for (block *b : now) any = run_block(*b) || any;
    if (any) return;
    for (block *b : now) any = land_a_copy(*b) || any;
    if (!any) stop(now[0]->warps[0], "hangs: %s", who_waits(*now[0]).c_str());
}

void run_grid(const kernel &k, const uint32_t grid[3], const uint32_t size[3], uint32_t dynamic_shared) {
    static std::vector<std::unique_ptr<block>> blocks;
    const uint64_t n = (uint64_t)grid[0] * grid[1] * grid[2];
    const size_t at_once = (size_t)options().blocks;
    uint64_t next = 0;
    while (blocks.size() < at_once) blocks.emplace_back(new block);
    std::vector<block *> now, free;
    for (size_t i = 0; i < at_once; i++) free.push_back(blocks[i].get());
    while (next < n || !now.empty()) {
        while (next < n && !free.empty()) {
            begin_block(*free.back(), k, next++, grid, size, k.dynamic_shared_at + dynamic_shared);
            now.push_back(free.back());
            free.pop_back();
        }
        run_blocks(now);
        for (size_t i = now.size(); i-- > 0;)
            if (is_over(*now[i])) {
                free.push_back(now[i]);
                now.erase(now.begin() + (std::ptrdiff_t)i);
            }
    }
}

} /* namespace ptx */
