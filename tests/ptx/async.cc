/* async.cc - cp.async, mbarriers, bulk copies and wgmma: what happens later, and the check that nobody is too early

   With PTX_LATE=1 a copy lands, or a product is computed, where a wait leaves no other choice, and a bulk copy where no
   warp of the block can go on without it; with 0 all of it happens at once. Shared memory that a copy is on its way to
   belongs to it, and so do the registers of a product that runs: who uses them ends the run. */

#include "opcodes.h"

#include <algorithm>

namespace ptx {

/* ---- clocks: which warp has seen what ----

   Agents are the block's warps, the products of each warp, and the copies for each mbarrier. A warp's row says up to
   which time of each agent it has seen what that one did. */

const int MOST_WARPS = 32, MOST_MBARRIERS = 64, N_AGENTS = 2 * MOST_WARPS + MOST_MBARRIERS;

struct granule_uses {
    int writer = -1;
    uint32_t written = 0;
    std::vector<std::pair<int, uint32_t>> reads;
};

struct race_clocks {
    std::vector<std::vector<uint32_t>> rows; /* by warp */
    std::vector<granule_uses> granules;
    uint32_t landed[MOST_MBARRIERS] = {};
};

static void join(std::vector<uint32_t> *to, const std::vector<uint32_t> &from) {
    to->resize(N_AGENTS);
    for (size_t i = 0; i < from.size(); i++) (*to)[i] = std::max((*to)[i], from[i]);
}

void give(warp &w, std::vector<uint32_t> *to) {
    if (!w.in->clocks) return;
    std::vector<uint32_t> &row = w.in->clocks->rows[(size_t)w.index];
    join(to, row);
    row[(size_t)w.index]++;
}

void take(warp &w, const std::vector<uint32_t> &from) {
    if (w.in->clocks) join(&w.in->clocks->rows[(size_t)w.index], from);
}

static std::string agent_name(int agent) {
    if (agent < MOST_WARPS) return "warp " + std::to_string(agent);
    if (agent < 2 * MOST_WARPS) return "a wgmma of warp " + std::to_string(agent - MOST_WARPS);
    return "a copy for mbarrier " + std::to_string(agent - 2 * MOST_WARPS);
}

/* Four bytes are used by an agent, as far as `w` has seen what others did. */
static void use_granule(warp &w, uint32_t at, int agent, uint32_t time, bool write) {
    race_clocks &c = *w.in->clocks;
    granule_uses &g = c.granules[at];
    const std::vector<uint32_t> &row = c.rows[(size_t)w.index];
    if (g.writer >= 0 && g.writer != w.index && g.written > row[(size_t)g.writer])
        stop(w, "race: shared address %u was written by %s, of which this has not heard", 4 * at,
             agent_name(g.writer).c_str());
    if (write) {
        for (const auto &read : g.reads)
            if (read.first != w.index && read.second > row[(size_t)read.first])
                stop(w, "race: shared address %u may still be read by %s", 4 * at, agent_name(read.first).c_str());
        g.reads.clear();
        g.writer = agent;
        g.written = time;
        return;
    }
    for (auto &read : g.reads)
        if (read.first == agent) {
            read.second = time;
            return;
        }
    g.reads.emplace_back(agent, time);
}

static void use_shared(warp &w, uint32_t address, uint32_t bytes, int agent, uint32_t time, bool write) {
    if (!w.in->clocks) return;
    for (uint32_t at = address / 4; at <= (address + bytes - 1) / 4; at++) use_granule(w, at, agent, time, write);
}

static uint32_t time_of(const warp &w) {
    return w.in->clocks ? w.in->clocks->rows[(size_t)w.index][(size_t)w.index] : 0;
}

void note_shared(warp &w, uint32_t lane, uint32_t address, uint32_t bytes, bool write) {
    block &b = *w.in;
    if (write && !b.write_time.empty())
        for (uint32_t at = address / 4; at <= (address + bytes - 1) / 4; at++) {
            b.write_time[at] = w.time;
            b.writer[at] = (uint16_t)(w.index * LANES + (int)lane);
        }
    use_shared(w, address, bytes, w.index, time_of(w), write);
}

void start_block(block &b) {
    const size_t n = b.shared.size() / 4 + 1;
    b.flags.clear();
    b.write_time.clear();
    b.mbarriers.clear();
    b.copies.clear();
    b.clocks.reset();
    if (b.of->has_async) b.flags.assign(n, 0);
    if (b.of->has_wgmma) {
        b.write_time.assign(n, 0);
        b.writer.assign(n, 0);
        b.proxy_fences.assign(b.warps.size() * LANES, 0);
        const int registers = std::min(255, 65536 / b.n_threads) / 8 * 8;
        for (warp &w : b.warps) w.registers = registers;
        b.register_pool = 0;
    }
    if (!options().race) return;
    b.clocks.reset(new race_clocks);
    b.clocks->rows.assign(b.warps.size(), std::vector<uint32_t>(N_AGENTS, 0));
    for (size_t w = 0; w < b.warps.size(); w++) b.clocks->rows[w][w] = 1;
    b.clocks->granules.resize(n);
}

void finish_warp(warp &w) {
    block &b = *w.in;
    if (!w.products.empty()) stop(w, "returns while its wgmma runs");
    for (const small_copy &copy : w.copies)
        for (uint32_t at = copy.to / 4; at < copy.to / 4 + 4; at++) b.flags[at] &= (unsigned char)~IN_FLIGHT;
    w.copies.clear();
    for (const warp &other : b.warps)
        if (other.live) return;
    if (!b.copies.empty()) stop(w, "the block ends while a bulk copy is on its way");
}

static std::string wait_of(const warp &w, int lane) {
    const bool waits = w.waiting >> lane & 1;
    const instruction &i = w.of->code[(size_t)w.at[lane] - (waits && w.kind == AT_BARRIER ? 1 : 0)];
    std::string what = "other lanes";
    if (waits && w.kind == AT_BARRIER) what = "barrier " + std::to_string(w.wait_address[0]);
    if (waits && w.kind == AT_REGISTERS) what = "registers";
    if (waits && w.kind == AT_MBARRIER)
        what = "parity " + std::to_string(w.wait_parity[lane]) + " of the mbarrier at " +
               std::to_string(w.wait_address[lane]);
    return "waits for " + what + " at line " + std::to_string(i.line) + " (" + i.name + ")";
}

std::string who_waits(const block &b) {
    std::string all;
    for (const warp &w : b.warps) {
        std::map<std::string, int> lanes;
        for (int l = 0; l < LANES; l++)
            if (w.live >> l & 1) lanes[wait_of(w, l)]++;
        for (const auto &one : lanes)
            all += "\n  warp " + std::to_string(w.index) + ": " + std::to_string(one.second) + " lanes: " + one.first;
    }
    return all;
}

static uint32_t number(warp &w, uint32_t place) { return at<uint32_t>(w, place)[__builtin_ctz(w.mask)]; }

static void mark(block &b, uint32_t address, uint32_t bytes, bool in_flight) {
    for (uint32_t at = address / 4; at < (address + bytes) / 4; at++) {
        if (in_flight) b.flags[at] |= IN_FLIGHT;
        else b.flags[at] &= (unsigned char)~IN_FLIGHT;
    }
}

/* ---- cp.async ---- */

static void land_small(warp &w, const small_copy &copy) {
    unsigned char *to = &w.in->shared[copy.to];
    mark(*w.in, copy.to, copy.bytes, false);
    memset(to, 0, copy.bytes);
    if (copy.wanted) memcpy(to, copy.from, copy.wanted);
    note_shared(w, copy.lane, copy.to, copy.bytes, true);
}

static void copy_async(warp &w, const instruction &i) {
    const uint32_t *to = at<uint32_t>(w, i.d), *size = at<uint32_t>(w, i.b), *wanted = at<uint32_t>(w, i.c);
    const uint64_t *from = at<uint64_t>(w, i.a);
    for (uint32_t l = 0; l < LANES; l++) {
        if (!(w.mask >> l & 1)) continue;
        if (to[l] % 16 || from[l] % 16)
            stop(w, "lane %u: a copy from 0x%llx to shared address %u", l, (unsigned long long)from[l], to[l]);
        if (size[l] != 16 || wanted[l] > 16) stop(w, "lane %u wants %u of %u bytes", l, wanted[l], size[l]);
        if (wanted[l]) check_device_memory(w, from[l], wanted[l], "a copy");
        shared_place(w, to[l], 16, "a copy");
        use_shared(w, to[l], 16, w.index, time_of(w), true);
        const small_copy copy = {l, w.copy_groups[l], to[l], 16, wanted[l], (const unsigned char *)from[l]};
        if (!options().late) land_small(w, copy);
        else {
            mark(*w.in, to[l], 16, true);
            w.copies.push_back(copy);
        }
    }
}

static void commit_copies(warp &w, const instruction &) {
    for (int l = 0; l < LANES; l++) w.copy_groups[l] += w.mask >> l & 1;
}

static void wait_copies(warp &w, const instruction &i) {
    const uint32_t left = number(w, i.d);
    size_t kept = 0;
    for (size_t n = 0; n < w.copies.size(); n++) {
        const small_copy copy = w.copies[n];
        if ((w.mask >> copy.lane & 1) && copy.group + left < w.copy_groups[copy.lane]) land_small(w, copy);
        else w.copies[kept++] = copy;
    }
    w.copies.resize(kept);
}

/* ---- mbarriers ---- */

static mbarrier &find_mbarrier(warp &w, uint32_t address) {
    for (mbarrier &b : w.in->mbarriers)
        if (b.address == address) {
            const race_clocks *c = w.in->clocks.get();
            if (c && b.maker != w.index && c->rows[(size_t)w.index][(size_t)b.maker] < b.made)
                stop(w, "race: the mbarrier at %u was made by warp %d, of which this has not heard", address, b.maker);
            return b;
        }
    stop(w, "no mbarrier is at shared address %u", address);
}

static void mbarrier_init(warp &w, const instruction &i) {
    for (int l = 0; l < LANES; l++) {
        if (!(w.mask >> l & 1)) continue;
        const uint32_t address = at<uint32_t>(w, i.d)[l] + (uint32_t)i.offset, n = at<uint32_t>(w, i.a)[l];
        if (address % 8 || n == 0 || n >= 1u << 20) stop(w, "an mbarrier of %u arrivals at %u", n, address);
        shared_place(w, address, 8, "an mbarrier");
        if (w.in->mbarriers.size() == (size_t)MOST_MBARRIERS) stop(w, "more than %d mbarriers", MOST_MBARRIERS);
        mbarrier b = {};
        b.address = address, b.expected = b.pending = n;
        b.maker = w.index, b.maker_lane = l, b.made = time_of(w);
        w.in->mbarriers.push_back(b);
        w.in->flags[address / 4] |= HOLDS_MBARRIER;
        w.in->flags[address / 4 + 1] |= HOLDS_MBARRIER;
    }
}

static void fence_mbarrier_init(warp &w, const instruction &) {
    for (mbarrier &b : w.in->mbarriers)
        if (b.maker == w.index && (w.mask >> b.maker_lane & 1)) b.fenced = true;
}

void wake_mbarrier(block &b, uint32_t address) {
    for (warp &w : b.warps)
        for (int l = 0; l < LANES; l++)
            if (w.kind == AT_MBARRIER && (w.waiting >> l & 1) && w.wait_address[l] == address) w.waiting &= ~(1u << l);
}

static void end_phase(block &b, mbarrier &m) {
    if (m.pending || m.bytes) return;
    m.pending = m.expected;
    m.phase++;
    m.complete = m.given;
    wake_mbarrier(b, m.address);
}

template <bool EXPECTS> static void mbarrier_arrive(warp &w, const instruction &i) {
    for (int l = 0; l < LANES; l++) {
        if (!(w.mask >> l & 1)) continue;
        mbarrier &m = find_mbarrier(w, at<uint32_t>(w, i.d)[l] + (uint32_t)i.offset);
        if (m.pending == 0) stop(w, "the mbarrier at %u has had all arrivals of its phase", m.address);
        if (EXPECTS) m.bytes += at<uint32_t>(w, i.a)[l];
        if (m.bytes >= 1 << 20) stop(w, "the mbarrier at %u expects %lld bytes", m.address, (long long)m.bytes);
        give(w, &m.given);
        m.pending--;
        end_phase(*w.in, m);
    }
    w.yields = true;
}

/* Lanes whose phase is not over wait here, so that a loop around this is no loop. */
static void mbarrier_try_wait(warp &w, const instruction &i) {
    uint32_t over = 0, *d = at<uint32_t>(w, i.d);
    for (int l = 0; l < LANES; l++) {
        if (!(w.mask >> l & 1)) continue;
        const uint32_t address = at<uint32_t>(w, i.a)[l] + (uint32_t)i.offset, parity = at<uint32_t>(w, i.b)[l];
        const mbarrier &m = find_mbarrier(w, address);
        if (parity > 1) stop(w, "parity %u", parity);
        w.wait_address[l] = address, w.wait_parity[l] = parity;
        if ((m.phase & 1) == parity) continue;
        over |= 1u << l;
        take(w, m.complete);
    }
    *d = (over & w.mask) | (*d & ~w.mask);
    if (over != w.mask) {
        const uint32_t early = w.mask & ~over;
        wait_here(w, early, AT_MBARRIER, false);
        leave_lanes(w, w.active & ~early, w.pc + 1);
    }
}

static void fence_proxy_async(warp &w, const instruction &) {
    for (int l = 0; l < LANES; l++)
        if (w.mask >> l & 1) w.in->proxy_fences[(size_t)(w.index * LANES + l)] = w.time;
}

/* Checks that no thread has written what the asynchronous proxy uses without a fence since. */
static void check_proxy(warp &w, uint32_t address, uint32_t bytes) {
    const block &b = *w.in;
    for (uint32_t at = address / 4; at < (address + bytes) / 4; at++)
        if (b.write_time[at] > b.proxy_fences[b.writer[at]])
            stop(w, "no fence.proxy.async since thread %d wrote to shared address %u", b.writer[at], 4 * at);
}

/* ---- bulk copies ---- */

static void land_bulk(block &b, const bulk_copy &copy) {
    mbarrier &m = b.mbarriers[(size_t)copy.barrier];
    const int agent = 2 * MOST_WARPS + copy.barrier;
    const uint32_t time = b.clocks ? ++b.clocks->landed[copy.barrier] : 0;
    for (const bulk_copy::piece &piece : copy.pieces) {
        mark(b, piece.to, 16, false);
        if (piece.from) memcpy(&b.shared[piece.to], piece.from, 16);
        else memset(&b.shared[piece.to], 0, 16);
        for (uint32_t at = piece.to / 4; at < piece.to / 4 + 4; at++) {
            b.write_time[at] = 0;
            if (b.clocks) b.clocks->granules[at].writer = agent, b.clocks->granules[at].written = time;
        }
    }
    if (b.clocks) {
        m.given.resize(N_AGENTS);
        m.given[(size_t)agent] = time;
    }
    m.bytes -= (int64_t)(16 * copy.pieces.size());
    end_phase(b, m);
}

bool land_a_copy(block &b) {
    if (b.copies.empty()) return false;
    size_t at = options().copies == 'n' ? b.copies.size() - 1 : 0;
    if (options().copies == 'r') at = random_number((uint32_t)b.copies.size());
    const bulk_copy copy = b.copies[at];
    b.copies.erase(b.copies.begin() + (std::ptrdiff_t)at);
    land_bulk(b, copy);
    return true;
}

static void start_bulk(warp &w, bulk_copy &copy, uint32_t barrier) {
    block &b = *w.in;
    const mbarrier &m = find_mbarrier(w, barrier);
    if (!m.fenced) stop(w, "no fence.mbarrier_init since the mbarrier at %u was made", barrier);
    copy.barrier = (int)(&m - b.mbarriers.data());
    for (const bulk_copy::piece &piece : copy.pieces) {
        shared_place(w, piece.to, 16, "a bulk copy");
        check_proxy(w, piece.to, 16);
        use_shared(w, piece.to, 16, 2 * MOST_WARPS + copy.barrier, 0, true);
        if (piece.from) check_device_memory(w, (uint64_t)piece.from, 16, "a bulk copy");
    }
    for (const bulk_copy::piece &piece : copy.pieces) mark(b, piece.to, 16, true);
    if (options().late) b.copies.push_back(copy);
    else land_bulk(b, copy);
}

static void copy_bulk(warp &w, const instruction &i) {
    for (int l = 0; l < LANES; l++) {
        if (!(w.mask >> l & 1)) continue;
        const uint32_t to = at<uint32_t>(w, i.d)[l], bytes = at<uint32_t>(w, i.b)[l];
        const uint64_t from = at<uint64_t>(w, i.a)[l];
        if (to % 16 || from % 16 || bytes % 16 || bytes == 0)
            stop(w, "a bulk copy of %u bytes from 0x%llx to shared address %u", bytes, (unsigned long long)from, to);
        bulk_copy copy;
        for (uint32_t n = 0; n < bytes; n += 16) copy.pieces.push_back({to + n, (const unsigned char *)from + n});
        start_bulk(w, copy, at<uint32_t>(w, i.c)[l]);
    }
}

/* Rows of 128 bytes whose chunks of 16 are permuted by the row's number. */
static uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

/* The box of a tensor map, whose inner side is one row of 128 bytes or of less without permuting. */
static void copy_tensor(warp &w, const instruction &i) {
    const uint32_t *o = places(w, i);
    for (int l = 0; l < LANES; l++) {
        if (!(w.mask >> l & 1)) continue;
        const tensor_map *map = (const tensor_map *)at<uint64_t>(w, o[1])[l];
        const uint32_t to = at<uint32_t>(w, o[0])[l];
        int64_t start[3];
        for (int axis = 0; axis < 3; axis++) start[axis] = (int32_t)at<uint32_t>(w, o[2 + axis])[l];
        if ((uint64_t)map % 64 ||
            (uint64_t)map - (uint64_t)w.of->parameters_at > w.of->parameter_bytes - sizeof(tensor_map))
            stop(w, "no tensor map among the parameters at 0x%llx", (unsigned long long)map);
        if (map->magic != TENSOR_MAP_MAGIC || map->rank != 3) stop(w, "no tensor map of three dimensions");
        const uint32_t row = map->box[0] * map->element, numbers = 16 / map->element;
        if (to % (map->swizzle ? 1024 : 128)) stop(w, "a box to shared address %u", to);
        bulk_copy copy;
        for (uint32_t z = 0; z < map->box[2]; z++)
            for (uint32_t y = 0; y < map->box[1]; y++)
                for (uint32_t x = 0; x < map->box[0]; x += numbers) {
                    const int64_t at[3] = {start[0] + x, start[1] + y, start[2] + z};
                    const uint32_t place = to + (z * map->box[1] + y) * row + x * map->element;
                    bool inside = true;
                    for (int axis = 0; axis < 3; axis++)
                        inside = inside && at[axis] >= 0 && at[axis] < (int64_t)map->size[axis];
                    if (inside && at[0] + numbers > (int64_t)map->size[0]) stop(w, "a row's end amid 16 bytes");
                    copy.pieces.push_back({map->swizzle ? swizzled(place) : place,
                                           inside ? map->data + at[0] * map->element + at[1] * (int64_t)map->stride[0] +
                                                        at[2] * (int64_t)map->stride[1]
                                                  : nullptr});
                }
        start_bulk(w, copy, at<uint32_t>(w, o[5])[l]);
    }
}

/* ---- wgmma ---- */

/* Registers: who uses those of a product that runs, and which were written since the last wgmma.fence. */
void check_registers(warp &w, const instruction &i) {
    w.time++;
    const uint32_t *o = places(w, i);
    const uint32_t first = i.bytes_of_wgmma ? i.vector / 2 : 0; /* a product may follow another one on its sums */
    if (!w.products.empty())
        for (uint32_t n = first; n < i.n; n++)
            if (!(o[n] & IS_CONSTANT) && w.busy[o[n] / 64]) stop(w, "operand %u belongs to a wgmma that runs", n);
    for (uint32_t n = 0; n < i.outputs; n++) w.written[o[n] / 64] = w.time;
}

struct matrix {
    uint32_t start, next, eight;
    bool transposed;
};

static matrix read_descriptor(warp &w, uint64_t x, bool transposed) {
    const matrix m = {(uint32_t)(x & 0x3FFF) << 4, (uint32_t)(x >> 16 & 0x3FFF) << 4, (uint32_t)(x >> 32 & 0x3FFF) << 4,
                      transposed};
    if (x >> 62 != 1) stop(w, "a descriptor's swizzle %d", (int)(x >> 62));
    if (x & 0x3FFFC000C000C000u) stop(w, "a descriptor's unused bits: 0x%llx", (unsigned long long)x);
    if (m.start >> 7 & 7) stop(w, "a matrix starts at %u, amid a pattern of 1024 bytes", m.start);
    return m;
}

/* Returns the place of eight numbers of a matrix: of row mn from column k on, or, transposed, of rows mn .. at column
   k. */
static uint32_t chunk_at(const matrix &m, uint32_t mn, uint32_t k) {
    const uint32_t place = m.transposed ? m.start + mn / 64 * m.next + k / 8 * m.eight + k % 8 * 128 + mn % 64 * 2
                                        : m.start + mn / 8 * m.eight + mn % 8 * 128 + k * 2;
    return swizzled(place);
}

/* Calls f(mn, k, address) for each chunk of rows mn .. mn + n of 16 columns. */
template <typename F> static void each_chunk(const matrix &m, uint32_t first, uint32_t n, F f) {
    if (m.transposed)
        for (uint32_t k = 0; k < 16; k++)
            for (uint32_t mn = first; mn < first + n; mn += 8) f(mn, k, chunk_at(m, mn, k));
    else
        for (uint32_t mn = first; mn < first + n; mn++)
            for (uint32_t k = 0; k < 16; k += 8) f(mn, k, chunk_at(m, mn, k));
}

static void check_matrix(warp &w, const matrix &m, uint32_t first, uint32_t n) {
    const int agent = MOST_WARPS + w.index;
    each_chunk(m, first, n, [&](uint32_t, uint32_t, uint32_t address) {
        shared_place(w, address, 16, "a wgmma");
        check_proxy(w, address, 16);
        use_shared(w, address, 16, agent, w.product_groups + 1, false);
    });
}

/* to[k][mn - first] */
template <int N> static void load_matrix(warp &w, const matrix &m, uint32_t first, bool bf16, float (*to)[N]) {
    each_chunk(m, first, N, [&](uint32_t mn, uint32_t k, uint32_t address) {
        uint16_t x[8];
        memcpy(x, shared_place(w, address, 16, "a wgmma"), 16);
        for (uint32_t e = 0; e < 8; e++) {
            const float number = bf16 ? float_of_bf16(x[e]) : float_of_f16(x[e]);
            if (m.transposed) to[k][mn - first + e] = number;
            else to[k + e][mn - first] = number;
        }
    });
}

struct product_operands {
    bool registers, bf16, a_transposed, b_transposed;
    const uint32_t *c, *a, *rest; /* places; rest: b, add, the scales, and what is transposed */
};

static product_operands operands_of(const warp &w, const instruction &i) {
    product_operands p = {};
    const uint32_t *o = places(w, i), sums = i.vector / 2u;
    p.registers = i.n == sums + 9;
    p.bf16 = i.bytes_of_wgmma == 1;
    p.c = o, p.a = o + sums, p.rest = p.a + (p.registers ? 4 : 1);
    return p;
}

template <int N> static void multiply(warp &w, const pending_wgmma &product) {
    const instruction &i = *product.i;
    product_operands p = operands_of(w, i);
    const uint32_t *turned = p.rest + 4;
    alignas(64) float a[16][16], b[16][N], sum[16][N];
    const uint32_t first_row = (uint32_t)w.index % 4 * 16;
    if (p.registers)
        for (int r = 0; r < 4; r++)
            for (int l = 0; l < LANES; l++) {
                const uint32_t x = at<uint32_t>(w, p.a[r])[l];
                for (int half = 0; half < 2; half++) {
                    const uint32_t bits = x >> 16 * half & 0xFFFF;
                    a[l % 4 * 2 + half + r / 2 * 8][l / 4 + r % 2 * 8] =
                        p.bf16 ? float_of_bf16(bits) : float_of_f16(bits);
                }
            }
    else load_matrix<16>(w, read_descriptor(w, product.a, *at<uint32_t>(w, turned[0])), first_row, p.bf16, a);
    load_matrix<N>(w, read_descriptor(w, product.b, *at<uint32_t>(w, turned[p.registers ? 0 : 1])), 0, p.bf16, b);
    for (int j = 0; j < N / 2; j++)
        for (int l = 0; l < LANES; l++)
            sum[l / 4 + j / 2 % 2 * 8][j / 4 * 8 + l % 4 * 2 + j % 2] = product.add ? at<float>(w, p.c[j])[l] : 0.0f;
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++)
            for (int column = 0; column < N; column++) sum[row][column] += a[k][row] * b[k][column];
    for (int j = 0; j < N / 2; j++)
        for (int l = 0; l < LANES; l++)
            at<float>(w, p.c[j])[l] = sum[l / 4 + j / 2 % 2 * 8][j / 4 * 8 + l % 4 * 2 + j % 2];
}

static void compute(warp &w, const pending_wgmma &product) {
    if (product.i->vector == 64) multiply<64>(w, product);
    else multiply<128>(w, product);
}

static void wgmma(warp &w, const instruction &i) {
    const product_operands p = operands_of(w, i);
    const uint32_t sums = i.vector / 2u, *turned = p.rest + 4;
    if (w.in->warps.size() < (size_t)(w.index / 4 * 4 + 4)) stop(w, "no warpgroup");
    for (uint32_t n = 0; n < sums + (p.registers ? 4 : 0); n++)
        if (w.written[p.c[n] / 64] > w.fenced) stop(w, "no wgmma.fence since operand %u was written", n);
    if (*at<uint32_t>(w, p.rest[2]) != 1 || *at<uint32_t>(w, p.rest[3]) != 1) stop(w, "a scale other than 1");
    pending_wgmma product = {
        &i, 0, *at<uint64_t>(w, p.rest[0]), (*at<uint32_t>(w, p.rest[1]) & 1) != 0, w.product_groups, !options().late};
    const uint32_t all = *at<uint32_t>(w, p.rest[1]);
    if (all != 0 && all != ALL_LANES) stop(w, "lanes differ in whether they add");
    for (int l = 1; l < LANES; l++)
        if (at<uint64_t>(w, p.rest[0])[l] != product.b ||
            (!p.registers && at<uint64_t>(w, p.a[0])[l] != *at<uint64_t>(w, p.a[0])))
            stop(w, "lanes differ in their descriptors");
    if (!p.registers) {
        product.a = *at<uint64_t>(w, p.a[0]);
        check_matrix(w, read_descriptor(w, product.a, *at<uint32_t>(w, turned[0])), (uint32_t)w.index % 4 * 16, 16);
    }
    check_matrix(w, read_descriptor(w, product.b, *at<uint32_t>(w, turned[p.registers ? 0 : 1])), 0, i.vector);
    for (uint32_t n = 0; n < sums + (p.registers ? 4 : 0); n++) w.busy[p.c[n] / 64] = 1;
    if (product.done) compute(w, product);
    w.products.push_back(product);
}

static void wgmma_fence(warp &w, const instruction &) { w.fenced = w.time; }
static void wgmma_commit(warp &w, const instruction &) { w.product_groups++; }

static void wgmma_wait(warp &w, const instruction &i) {
    const uint32_t left = number(w, i.d);
    size_t n = 0;
    for (; n < w.products.size() && w.products[n].group + left < w.product_groups; n++) {
        if (!w.products[n].done) compute(w, w.products[n]);
    }
    w.products.erase(w.products.begin(), w.products.begin() + (std::ptrdiff_t)n);
    std::fill(w.busy.begin(), w.busy.end(), 0);
    for (const pending_wgmma &product : w.products) {
        const product_operands p = operands_of(w, *product.i);
        for (uint32_t k = 0; k < product.i->vector / 2u + (p.registers ? 4 : 0); k++) w.busy[p.c[k] / 64] = 1;
    }
    if (w.in->clocks && w.product_groups >= left)
        w.in->clocks->rows[(size_t)w.index][(size_t)(MOST_WARPS + w.index)] = w.product_groups - left;
}

/* ---- registers of warps ---- */

template <bool INCREASE> static void setmaxnreg(warp &w, const instruction &i) {
    const int wanted = (int)number(w, i.d), change = (wanted - w.registers) * LANES;
    if (wanted % 8 || wanted < 24 || wanted > 256 || (INCREASE ? change < 0 : change > 0))
        stop(w, "from %d to %d registers", w.registers, wanted);
    if (change > w.in->register_pool) {
        wait_here(w, w.live, AT_REGISTERS, false);
        return;
    }
    w.in->register_pool -= change;
    w.registers = wanted;
    if (change < 0)
        for (warp &other : w.in->warps)
            if (other.kind == AT_REGISTERS) other.waiting = 0, other.kind = NOT_WAITING;
}

/* ---- the table ---- */

#define PRODUCT(n, type, bf16) \
    { "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type, wgmma, 0, ALL, SHARED, bf16, n }

const opcode ASYNC[] = {
    {"cp.async.cg.shared.global", copy_async, 0},
    {"cp.async.commit_group", commit_copies, 0},
    {"cp.async.wait_group", wait_copies, 0},
    {"mbarrier.init.shared::cta.b64", mbarrier_init, 0},
    {"fence.mbarrier_init.release.cluster", fence_mbarrier_init, 0},
    {"mbarrier.arrive.shared::cta.b64", mbarrier_arrive<false>, 0},
    {"mbarrier.arrive.expect_tx.shared::cta.b64", mbarrier_arrive<true>, 0},
    {"mbarrier.try_wait.parity.shared::cta.b64", mbarrier_try_wait, 1},
    {"fence.proxy.async.shared::cta", fence_proxy_async, 0},
    {"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes", copy_bulk, 0},
    {"cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes", copy_tensor, 0},
    PRODUCT(64, "bf16", 1),
    PRODUCT(64, "f16", 2),
    PRODUCT(128, "bf16", 1),
    PRODUCT(128, "f16", 2),
    {"wgmma.fence.sync.aligned", wgmma_fence, 0, ALL},
    {"wgmma.commit_group.sync.aligned", wgmma_commit, 0, ALL},
    {"wgmma.wait_group.sync.aligned", wgmma_wait, 0, ALL},
    {"setmaxnreg.dec.sync.aligned.u32", setmaxnreg<false>, 0, ALL},
    {"setmaxnreg.inc.sync.aligned.u32", setmaxnreg<true>, 0, ALL},
    {nullptr, nullptr, 0},
};

} /* namespace ptx */
