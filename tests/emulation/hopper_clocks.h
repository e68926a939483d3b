/* hopper_clocks.h - part of cuda_emu.cc: which thread has seen what, where barriers are many - MIT or public domain

   The moment of a block grows with whatever gives something to other threads. Every thread has a row of moments: up to
   which of them it has seen what each thread did, each warp's wgmma read, each mbarrier's bulk copies wrote; and up to
   which of them it knows each thread to have fenced its writes for the asynchronous proxy. A barrier collects the rows
   of those who arrive and gives them to those who leave. */

typedef uint32_t moment;

static const int MOST_WARPS = 16, MOST_MBARRIERS = 32;
static const unsigned char ANY_SWIZZLE = 255;

static bool clocks_on; /* in this block: since its first mbarrier or named barrier */
static moment moment_now;
static uint32_t first_epoch; /* of this block */
static size_t clock_row;
static std::vector<moment> clocks; /* n_threads rows */

/* Sixteen bytes. */
struct chunk {
    moment read[MOST_WARPS]; /* when each warp's wgmma read it last; 0: never */
    unsigned char swizzle;   /* of the bulk copy that wrote it */
    bool copy_in_flight, holds_mbarrier;
    short released_at, released_by; /* an mbarrier at which a warp arrived whose wgmma read it still, or -1; the warp */
};
static std::vector<chunk> chunks;

/* Threads that read four bytes, by warp. */
struct granule_readers {
    uint32_t epoch;
    uint32_t lanes[MOST_WARPS];
    moment last[MOST_WARPS];
};
static std::vector<granule_readers> readers;

static int agent_of_warp(int w) { return n_threads + w; }
static int agent_of_mbarrier(int i) { return n_threads + MOST_WARPS + i; }
static moment *row_of(int thread) { return &clocks[(size_t)thread * clock_row]; }
static moment *fences_of(moment *row) { return row + n_threads + MOST_WARPS + MOST_MBARRIERS; }

static bool has_seen(int thread, int agent, moment when) { return row_of(thread)[agent] >= when; }

static void join_rows(moment *to, const moment *from) {
    for (size_t i = 0; i < clock_row; i++) to[i] = from[i] > to[i] ? from[i] : to[i];
}

/* The running thread gives what it has done and seen to whoever takes the row. */
static void give_row(moment *to) {
    moment *row = row_of(now->id);
    row[now->id] = moment_now++;
    join_rows(to, row);
}

static void take_row(int thread, const moment *from) { join_rows(row_of(thread), from); }

/* All lanes of a mask, or threads of a range, know what any of them knows. */
static void join_threads(int first, int n, unsigned mask) {
    std::vector<moment> all(clock_row, 0);
    for (int i = 0; i < n; i++)
        if (mask >> (i % 32) & 1) {
            row_of(first + i)[first + i] = moment_now;
            join_rows(all.data(), row_of(first + i));
        }
    moment_now++;
    for (int i = 0; i < n; i++)
        if (mask >> (i % 32) & 1) take_row(first + i, all.data());
}

static void turn_clocks_on() {
    if (clocks_on) return;
    if (n_threads > 32 * MOST_WARPS) {
        cuda_emu_add_fault(CUDA_EMU_LAUNCH, "a block of %d threads uses mbarriers: the emulation has room for %d",
                           n_threads, 32 * MOST_WARPS);
        return;
    }
    clocks_on = true;
    clock_row = (size_t)(2 * n_threads + MOST_WARPS + MOST_MBARRIERS);
    clocks.assign((size_t)n_threads * clock_row, 0);
    chunk none;
    memset(&none, 0, sizeof none);
    none.swizzle = ANY_SWIZZLE;
    none.released_at = -1;
    chunks.assign(shared_bytes.size() / 16 + 1, none);
    readers.assign(granules.size(), granule_readers());
}

/* Returns whether the running thread has seen the last write of these bytes, by another warp's thread or a bulk
   copy. */
static bool saw_write(const granule *g) { return clocks_on && has_seen(now->id, g->writer, g->write_time); }

static bool written_by_copy(const granule *g) {
    return clocks_on && g->write_epoch >= first_epoch && g->writer >= n_threads;
}

/* Returns whether the running thread knows that all threads which read these bytes since the last __syncthreads are
   done. */
static bool saw_reads(const granule *g) {
    if (!clocks_on) return false;
    const granule_readers &r = readers[(size_t)(g - granules.data())];
    if (r.epoch != epoch) return false;
    for (int w = 0; w < (n_threads + 31) / 32; w++)
        for (unsigned lanes = r.lanes[w]; lanes != 0; lanes &= lanes - 1) {
            const int thread = 32 * w + __builtin_ctz(lanes);
            if (thread != now->id && !has_seen(now->id, thread, r.last[w])) return false;
        }
    return true;
}

static void note_reader(const granule *g) {
    if (!clocks_on) return;
    granule_readers &r = readers[(size_t)(g - granules.data())];
    if (r.epoch != epoch) memset(&r, 0, sizeof r);
    r.epoch = epoch;
    r.lanes[now->id / 32] |= 1u << (now->id % 32);
    r.last[now->id / 32] = moment_now;
}

/* Before the running thread, or a bulk copy that it starts, writes: nothing asynchronous may still use the bytes. */
static void check_asynchronous_users(uint32_t address, int bytes, const char *what) {
    if (!clocks_on) return;
    for (uint32_t at = address / 16; at <= (address + (uint32_t)bytes - 1) / 16; at++) {
        chunk *c = &chunks[at];
        for (int w = 0; w < (n_threads + 31) / 32; w++)
            if (c->read[w] != 0 && !has_seen(now->id, agent_of_warp(w), c->read[w])) {
                cuda_emu_add_fault(CUDA_EMU_IN_FLIGHT, "%s to shared address %u, which a wgmma of warp %d reads", what,
                                   at * 16, w);
                c->read[w] = 0;
            }
        if (c->copy_in_flight)
            cuda_emu_add_fault(CUDA_EMU_RACE, "%s to shared address %u, where a bulk copy is in flight", what, at * 16);
        if (c->holds_mbarrier)
            cuda_emu_add_fault(CUDA_EMU_PHASE, "%s to shared address %u, where an mbarrier is", what, at * 16);
        c->swizzle = ANY_SWIZZLE;
    }
}
