/* hopper_emu.h - part of cuda_emu.cc: the instructions of hopper.h - MIT or public domain. Sections: >>events
   >>mbarriers >>copies >>registers >>wgmma >>blocks. */

/* ================================================================================================================
   >>events    what threads wait for besides one another
   ================================================================================================================ */

/* The running thread waits until somebody wakes it. What for, it says in its own memory: the stack of a thread that is
   given up is never unwound. */
static void wait_for_event(cuda_emu_fault kind, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void wait_for_event(cuda_emu_fault kind, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(now->event, sizeof now->event, format, arguments);
    va_end(arguments);
    now->event_kind = kind;
    wait_as(WAITS_FOR_EVENT);
}

static bool report_event() {
    for (int i = 0; i < n_threads; i++) {
        const fiber *f = fibers[(size_t)i];
        if (f->state != WAITS_FOR_EVENT) continue;
        cuda_emu_add_fault((cuda_emu_fault)f->event_kind, "thread %d waits for ever: %s", i, f->event);
        return true;
    }
    return false;
}

static void wake(std::vector<int> *threads) {
    for (int thread : *threads) set_ready(fibers[(size_t)thread]);
    threads->clear();
}

struct named_barrier {
    int wanted = 0, arrived = 0;
    std::vector<moment> given;
    std::vector<int> waiting;
    std::vector<bool> here; /* by thread, since the barrier was complete last */
};
static named_barrier named_barriers[16];

/* Checks who arrives, and that somebody waits: a device counts a warp that arrives twice as two, and lets a barrier be
   complete for nobody. */
static void check_arrival(named_barrier *b, int id, bool wait) {
    if (b->arrived == 0) b->here.assign((size_t)n_threads, false);
    if (b->here[(size_t)now->id])
        cuda_emu_add_fault(CUDA_EMU_BARRIER, "thread %d arrives twice at named barrier %d", now->id, id);
    b->here[(size_t)now->id] = true;
    if (b->arrived + 1 >= b->wanted && !wait && b->waiting.empty())
        cuda_emu_add_fault(CUDA_EMU_BARRIER, "nobody waits at named barrier %d of %d threads", id, b->wanted);
}

void cuda_emu_named_barrier(int id, int threads, bool wait) {
    turn_clocks_on();
    if (id < 1 || id > 15 || threads < 32 || threads % 32 != 0 || threads > n_threads) {
        cuda_emu_add_fault(CUDA_EMU_BARRIER, "named barrier %d of %d threads", id, threads);
        return;
    }
    named_barrier *b = &named_barriers[id];
    if (b->arrived == 0) b->wanted = threads;
    if (b->wanted != threads)
        cuda_emu_add_fault(CUDA_EMU_BARRIER, "named barrier %d is of %d threads for some, of %d for others", id,
                           b->wanted, threads);
    check_arrival(b, id, wait);
    if (b->given.empty()) b->given.assign(clock_row, 0);
    give_row(b->given.data());
    if (++b->arrived >= b->wanted) {
        for (int thread : b->waiting) take_row(thread, b->given.data());
        if (wait) take_row(now->id, b->given.data());
        b->arrived = 0;
        wake(&b->waiting);
        counts->barriers++;
        return;
    }
    if (!wait) return;
    b->waiting.push_back(now->id);
    wait_for_event(CUDA_EMU_BARRIER, "named barrier %d of %d threads", id, threads);
}

void cuda_emu_fence_proxy_async() {
    turn_clocks_on();
    moment *row = row_of(now->id);
    row[now->id] = moment_now;
    fences_of(row)[now->id] = moment_now++;
}

/* ================================================================================================================
   >>mbarriers
   ================================================================================================================ */

struct mbarrier {
    uint32_t address;
    int index, expected, pending, maker;
    int64_t bytes, phase; /* bytes: expected and not here; phase: how many are complete */
    moment made;
    std::vector<moment> given, complete; /* complete: when the last phase was */
    std::vector<int64_t> seen;           /* by thread: the last phase that it saw complete; -2: none */
    std::vector<int> waiting[2];         /* for the end of an even, or odd, phase */
    std::vector<uint32_t> guarded;       /* where bulk copies went that were started after a wait for it, ... */
    int64_t guarded_after;               /* ... which saw this phase */
};
static std::vector<mbarrier> mbarriers;
static std::vector<int> awaited; /* by thread, the mbarrier that it waited for last; -1: none */

void cuda_emu_mbarrier_init(uint32_t address, int arrivals) {
    turn_clocks_on();
    if (!in_bounds(address, 8, "mbarrier.init")) return;
    for (const mbarrier &b : mbarriers)
        if (b.address == address) {
            cuda_emu_add_fault(CUDA_EMU_PHASE, "the mbarrier at %u is initialised twice", address);
            return;
        }
    if (arrivals < 1 || (int)mbarriers.size() == MOST_MBARRIERS) {
        cuda_emu_add_fault(CUDA_EMU_PHASE, "mbarrier number %d, of %d arrivals", (int)mbarriers.size(), arrivals);
        return;
    }
    mbarrier b = {};
    b.address = address;
    b.index = (int)mbarriers.size();
    b.expected = b.pending = arrivals;
    b.maker = now->id;
    b.made = moment_now;
    b.given.assign(clock_row, 0);
    b.complete = b.given;
    b.seen.assign((size_t)n_threads, -2);
    mbarriers.push_back(b);
    chunks[address / 16].holds_mbarrier = true;
}

/* Orders it before the asynchronous proxy's use, as fence.proxy.async would. */
void cuda_emu_fence_mbarrier_init() { cuda_emu_fence_proxy_async(); }

static mbarrier *find_mbarrier(uint32_t address, const char *what) {
    for (mbarrier &b : mbarriers) {
        if (b.address != address) continue;
        if (b.maker != now->id && !has_seen(now->id, b.maker, b.made))
            cuda_emu_add_fault(CUDA_EMU_PHASE, "%s on the mbarrier at %u, with no barrier since it was initialised",
                               what, address);
        return &b;
    }
    cuda_emu_add_fault(CUDA_EMU_PHASE, "%s on shared address %u, where no mbarrier is", what, address);
    return nullptr;
}

static void end_phase(mbarrier *b) {
    if (b->pending > 0 || b->bytes != 0) return;
    const int parity = (int)(b->phase & 1);
    b->phase++;
    b->pending = b->expected;
    b->complete = b->given;
    wake(&b->waiting[parity]);
}

/* Notes warps that release bytes too early. A thread that waits for a barrier before it copies somewhere is told by
   those who arrive there that they are done with these bytes. A warp whose wgmma still reads them is not: the next copy
   to them that waits for this barrier is a fault, even where something else makes that copy late enough. */
static void note_early_release(const mbarrier &b) {
    const int w = now->id / 32;
    for (uint32_t address : b.guarded) {
        chunk *c = &chunks[address / 16];
        if (c->read[w] == 0 || has_seen(now->id, agent_of_warp(w), c->read[w])) continue;
        c->released_by = (short)w;
        c->released_at = (short)b.index;
    }
}

static void arrive_at(uint32_t address, int bytes, const char *what) {
    mbarrier *b = find_mbarrier(address, what);
    if (!b) return;
    note_early_release(*b);
    if (bytes < 0 || bytes >= 1 << 20)
        cuda_emu_add_fault(CUDA_EMU_PHASE, "%s: the mbarrier at %u cannot expect %d bytes", what, address, bytes);
    b->bytes += bytes;
    give_row(b->given.data());
    b->pending--;
    end_phase(b);
}

void cuda_emu_mbarrier_arrive(uint32_t address) { arrive_at(address, 0, "arrive"); }

void cuda_emu_mbarrier_arrive_expect(uint32_t address, int bytes) { arrive_at(address, bytes, "arrive.expect_tx"); }

void cuda_emu_mbarrier_wait(uint32_t address, int parity) {
    mbarrier *b = find_mbarrier(address, "try_wait");
    if (!b) return;
    while ((b->phase & 1) == parity) {
        b->waiting[parity].push_back(now->id);
        wait_for_event(CUDA_EMU_PHASE, "parity %d of the mbarrier at %u, whose phase is %lld", parity, address,
                       (long long)b->phase);
        b = find_mbarrier(address, "try_wait");
    }
    int64_t *seen = &b->seen[(size_t)now->id];
    if (*seen == b->phase - 1)
        cuda_emu_add_fault(CUDA_EMU_PHASE, "try_wait of parity %d passes the mbarrier at %u for phase %lld again",
                           parity, address, (long long)*seen);
    else if (b->phase - 1 > (*seen < -1 ? 0 : *seen + 1))
        cuda_emu_add_fault(CUDA_EMU_PHASE, "try_wait of parity %d passes the mbarrier at %u for phase %lld, after %lld",
                           parity, address, (long long)(b->phase - 1), (long long)*seen);
    *seen = b->phase - 1;
    awaited[(size_t)now->id] = b->index;
    take_row(now->id, b->complete.data());
}

/* ================================================================================================================
   >>copies    bulk copies and tensor maps
   ================================================================================================================ */

static const uint32_t MAP_MAGIC = 0x70A55EED;

struct bulk_piece { /* sixteen bytes of shared memory */
    uint32_t to;
    const unsigned char *from; /* NULL: zeros */
};
struct bulk_run { /* bytes of memory to be looked up at once */
    const unsigned char *from;
    size_t bytes;
};
struct bulk_in_flight {
    std::vector<bulk_piece> pieces;
    std::vector<bulk_run> runs;
    int mbarrier;
    unsigned char swizzle;
};
static std::vector<bulk_in_flight> bulk_copies;
static cuda_emu_arrivals arrivals;
static uint64_t arrival_state;

void cuda_emu_set_arrivals(cuda_emu_arrivals how, uint64_t seed) {
    arrivals = how;
    arrival_state = seed;
}

static void land(size_t at) {
    const bulk_in_flight copy = bulk_copies[at];
    bulk_copies.erase(bulk_copies.begin() + (std::ptrdiff_t)at);
    mbarrier *b = &mbarriers[(size_t)copy.mbarrier];
    bool ok = true;
    for (const bulk_run &run : copy.runs)
        ok = cuda_emu_check_range(run.from, run.bytes, cuda_emu_current_device(), "bulk copy") && ok;
    const moment when = moment_now++;
    for (const bulk_piece &piece : copy.pieces) {
        if (piece.from && ok) memcpy(&shared_bytes[piece.to], piece.from, 16);
        else memset(&shared_bytes[piece.to], 0, 16);
        memset(&shared_written[piece.to], 1, 16);
        chunks[piece.to / 16].copy_in_flight = false;
        chunks[piece.to / 16].swizzle = copy.swizzle;
        for (uint32_t i = 0; i < 4; i++) {
            granule *g = &granules[piece.to / 4 + i];
            g->write_epoch = epoch;
            g->writer = (int16_t)agent_of_mbarrier(copy.mbarrier);
            g->write_time = when;
        }
    }
    b->given[(size_t)agent_of_mbarrier(copy.mbarrier)] = when;
    b->bytes -= (int64_t)(16 * copy.pieces.size());
    counts->bulk_bytes += (int64_t)(16 * copy.pieces.size());
    end_phase(b);
}

static bool land_a_copy() {
    if (bulk_copies.empty()) return false;
    size_t at = arrivals == CUDA_EMU_ARRIVE_LATE_NEWEST ? bulk_copies.size() - 1 : 0;
    if (arrivals == CUDA_EMU_ARRIVE_AT_RANDOM) {
        arrival_state = arrival_state * 6364136223846793005u + 1442695040888963407u;
        at = (size_t)(arrival_state >> 33) % bulk_copies.size();
    }
    land(at);
    return true;
}

/* Returns whether the writer of these bytes, if a thread, fenced them for the asynchronous proxy as far as `thread`
   knows. */
static bool is_fenced(const granule *g, int thread) {
    if (g->write_epoch < first_epoch || g->writer >= n_threads) return true;
    return fences_of(row_of(thread))[g->writer] >= g->write_time;
}

static void check_bulk_write(uint32_t address) {
    chunk *c = &chunks[address / 16];
    check_asynchronous_users(address, 16, "bulk copy");
    if (c->released_at >= 0 && c->released_at == awaited[(size_t)now->id])
        cuda_emu_add_fault(CUDA_EMU_IN_FLIGHT, "shared address %u was released while a wgmma of warp %d read it",
                           address, c->released_by);
    c->released_at = -1;
    for (uint32_t at = address; at < address + 16; at += 4) {
        const granule *g = &granules[at / 4];
        if (write_races(g))
            cuda_emu_add_fault(CUDA_EMU_RACE, "bulk copy to shared address %u, which thread %d used, with no barrier",
                               at, g->writer);
        else if (!is_fenced(g, now->id))
            cuda_emu_add_fault(CUDA_EMU_PROXY, "bulk copy to shared address %u, no proxy fence since thread %d wrote",
                               at, g->writer);
    }
    c->copy_in_flight = true;
    memset(&shared_written[address], 0, 16);
}

/* The bytes of a copy belong to the barrier that the running thread waited for last. */
static void guard(const bulk_in_flight &copy) {
    const int at = awaited[(size_t)now->id];
    if (at < 0) return;
    mbarrier *b = &mbarriers[(size_t)at];
    if (b->guarded_after != b->seen[(size_t)now->id]) b->guarded.clear();
    b->guarded_after = b->seen[(size_t)now->id];
    for (const bulk_piece &piece : copy.pieces) b->guarded.push_back(piece.to);
}

static void start_bulk_copy(bulk_in_flight &copy, uint32_t barrier) {
    const mbarrier *b = find_mbarrier(barrier, "bulk copy");
    if (!b) return;
    if (fences_of(row_of(now->id))[b->maker] < b->made)
        cuda_emu_add_fault(CUDA_EMU_PROXY, "bulk copy for the mbarrier at %u, with no fence since it was initialised",
                           barrier);
    copy.mbarrier = b->index;
    for (const bulk_piece &piece : copy.pieces) check_bulk_write(piece.to);
    guard(copy);
    bulk_copies.push_back(copy);
    if (arrivals == CUDA_EMU_ARRIVE_AT_ONCE) land(bulk_copies.size() - 1);
}

void cuda_emu_bulk_copy(uint32_t to, const void *from, int bytes, uint32_t barrier) {
    bulk_in_flight copy = {};
    if (bytes < 16 || bytes % 16 != 0 || to % 16 != 0 || (uintptr_t)from % 16 != 0) {
        cuda_emu_add_fault(CUDA_EMU_MISALIGNED, "bulk copy of %d bytes to shared address %u", bytes, to);
        return;
    }
    if ((uint64_t)to + (uint64_t)bytes > shared_bytes.size()) {
        cuda_emu_add_fault(CUDA_EMU_OUT_OF_BOUNDS, "bulk copy of %d bytes to shared address %u", bytes, to);
        return;
    }
    for (int i = 0; i < bytes; i += 16)
        copy.pieces.push_back({to + (uint32_t)i, (const unsigned char *)from + i});
    copy.runs.push_back({(const unsigned char *)from, (size_t)bytes});
    copy.swizzle = ANY_SWIZZLE;
    start_bulk_copy(copy, barrier);
}

/* Returns the place of a chunk of sixteen bytes, in rows of 128 bytes whose chunks are permuted by address. */
static uint32_t swizzled(uint32_t address, uint32_t mode) {
    const uint32_t bits = mode == CU_TENSOR_MAP_SWIZZLE_128B ? 7 : mode == CU_TENSOR_MAP_SWIZZLE_64B ? 3
                        : mode == CU_TENSOR_MAP_SWIZZLE_32B ? 1 : 0;
    return address ^ ((address >> 7 & bits) << 4);
}

void cuda_emu_bulk_tensor(uint32_t to, const CUtensorMap *map, int rank, const int *at, uint32_t barrier) {
    bulk_in_flight copy = {};
    if (map->magic != MAP_MAGIC || (int)map->rank != rank) {
        cuda_emu_add_fault(CUDA_EMU_DESCRIPTOR, "bulk copy of rank %d with a tensor map of rank %d", rank,
                           map->magic == MAP_MAGIC ? (int)map->rank : -1);
        return;
    }
    if (to % (map->swizzle ? 1024u : 128u) != 0) {
        cuda_emu_add_fault(CUDA_EMU_MISALIGNED, "bulk copy to shared address %u", to);
        return;
    }
    uint32_t n = 2;
    for (int i = 0; i < rank; i++) n *= map->box[i];
    if ((uint64_t)to + n > shared_bytes.size()) {
        cuda_emu_add_fault(CUDA_EMU_OUT_OF_BOUNDS, "bulk copy of %u bytes to shared address %u", n, to);
        return;
    }
    uint32_t address = to;
    for (uint32_t row = 0; row < n / 2 / map->box[0]; row++) {
        const unsigned char *from = map->data + 2 * (int64_t)at[0];
        bool inside = true;
        for (uint32_t i = 1, rest = row; i < map->rank; i++) {
            const int64_t place = (int64_t)at[i] + rest % map->box[i];
            rest /= map->box[i];
            inside = inside && place >= 0 && (uint64_t)place < map->size[i];
            from += place * (int64_t)map->stride[i - 1];
        }
        size_t valid = 0;
        for (uint32_t column = 0; column < map->box[0]; column += 8, address += 16) {
            const int64_t first = (int64_t)at[0] + column;
            const bool here = inside && first >= 0 && (uint64_t)first + 8 <= map->size[0];
            if (here) valid += 16;
            copy.pieces.push_back({swizzled(address, map->swizzle), here ? from + 2 * column : nullptr});
        }
        if (valid > 0) copy.runs.push_back({from, valid});
    }
    copy.swizzle = (unsigned char)map->swizzle;
    start_bulk_copy(copy, barrier);
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *data,
                                const cuuint64_t *size, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
    const uint32_t inner[] = {256 * 2, 32, 64, 128};
    bool ok = map && (uintptr_t)map % 16 == 0 && rank >= 1 && rank <= 5 && data && (uintptr_t)data % 16 == 0 &&
              (type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16) &&
              interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE &&
              swizzle >= CU_TENSOR_MAP_SWIZZLE_NONE && swizzle <= CU_TENSOR_MAP_SWIZZLE_128B;
    for (cuuint32_t i = 0; ok && i < rank; i++)
        ok = size[i] >= 1 && size[i] <= (cuuint64_t)1 << 32 && box[i] >= 1 && box[i] <= 256 && steps[i] == 1;
    for (cuuint32_t i = 0; ok && i + 1 < rank; i++) ok = strides[i] % 16 == 0 && strides[i] < (cuuint64_t)1 << 40;
    if (!ok || box[0] * 2 % 16 != 0 || box[0] * 2 > inner[swizzle]) return CUDA_ERROR_INVALID_VALUE;
    memset((void *)map, 0, sizeof *map);
    map->magic = MAP_MAGIC;
    map->rank = rank;
    map->swizzle = (uint32_t)swizzle;
    map->data = (unsigned char *)data;
    for (cuuint32_t i = 0; i < rank; i++) {
        map->size[i] = size[i];
        map->box[i] = (uint16_t)box[i];
        if (i + 1 < rank) map->stride[i] = strides[i];
    }
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long,
                                    cudaDriverEntryPointQueryResult *result) {
    const cudaError_t error = cuda_emu_begin_call("cudaGetDriverEntryPoint", cuda_emu_current_device());
    const bool known = strcmp(name, "cuTensorMapEncodeTiled") == 0;
    if (error != cudaSuccess) return cuda_emu_finish_call(error);
    *function = known ? (void *)cuTensorMapEncodeTiled : nullptr;
    if (result) *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cuda_emu_finish_call(cudaSuccess);
}

/* ================================================================================================================
   >>registers    setmaxnreg
   ================================================================================================================ */

static int free_registers;
static std::vector<int> registers_of, waiting_for_registers;

/* As a kernel has them whose launch bounds are its block and one block a processor. */
static int registers_at_launch() {
    const int n = 65536 / n_threads / 8 * 8;
    return n < 248 ? n : 248;
}

void cuda_emu_setmaxnreg(int n, bool increase) {
    turn_clocks_on();
    if (registers_of.empty()) {
        registers_of.assign((size_t)n_threads, registers_at_launch());
        free_registers = 0; /* what the block did not get is not for it */
    }
    int *mine = &registers_of[(size_t)now->id];
    if (n < 24 || n > 256 || n % 8 != 0 || (increase ? n < *mine : n > *mine))
        cuda_emu_add_fault(CUDA_EMU_REGISTERS, "setmaxnreg from %d to %d", *mine, n);
    while (n - *mine > free_registers) {
        waiting_for_registers.push_back(now->id);
        wait_for_event(CUDA_EMU_REGISTERS, "%d registers instead of %d", n, *mine);
    }
    free_registers -= n - *mine;
    *mine = n;
    wake(&waiting_for_registers);
}

/* ================================================================================================================
   >>wgmma
   ================================================================================================================ */

/* The bits that registers hold of sums in flight: a signalling NaN. Arithmetic makes it a quiet one, so that even sums
   that are only scaled where they lie are seen to have changed. */
static const uint32_t IN_FLIGHT_BITS = 0x7F80DEAD, QUIET_BIT = 0x00400000;

static bool was_in_flight(uint32_t bits) { return (bits & 0x7FFFFFFFu & ~QUIET_BIT) == IN_FLIGHT_BITS; }

void cuda_emu_note_nan(uint32_t bits) {
    if (running && was_in_flight(bits))
        cuda_emu_add_fault(CUDA_EMU_IN_FLIGHT, "sums of a wgmma are used before the wait for them");
}

void cuda_emu_check_words(const void *words, int bytes) {
    uint32_t word;
    for (int i = 0; i + 4 <= bytes; i += 4) {
        memcpy(&word, (const unsigned char *)words + i, 4);
        if (was_in_flight(word)) cuda_emu_note_nan(word);
    }
}

/* Registers of a warp that its wgmmas use: sums or an A operand, `words` of each lane. */
struct warp_registers {
    uint32_t *lane[32];
    int words;
    std::vector<uint32_t> values; /* by lane. Sums in flight: what they will be */
    bool sums, in_flight;
    int64_t group; /* the last that uses them */
    bool fenced;   /* they were as they are at the last fence */
    std::vector<uint32_t> at_fence;
};

struct warp_products {
    bool fenced;                       /* since the last wait */
    int64_t n_groups, n_done, n_issued, n_waited; /* groups closed and waited for; instructions */
    std::vector<moment> last_of_group; /* the moment of the last instruction of each group */
    moment last;
    std::vector<warp_registers> registers;
};
static std::vector<warp_products> products;

/* The product that the first warp of each warpgroup issued, for the other three to agree with. */
struct issued_product {
    uint64_t a, b;
    int n, flags;
};
static std::vector<std::vector<issued_product>> issued;

static warp_products *products_of(int w) {
    if (products.empty()) {
        products.resize(warps.size());
        issued.resize((warps.size() + 3) / 4);
    }
    return &products[(size_t)w];
}

static bool holds(const warp_registers &r, const std::vector<uint32_t> &values) {
    for (int lane = 0; lane < 32; lane++)
        if (memcmp(r.lane[lane], &values[(size_t)(lane * r.words)], (size_t)r.words * 4) != 0) return false;
    return true;
}

/* Word by word, as AddressSanitizer watches memcpy: at a fence, an array of an earlier product may be out of scope. */
static void read_registers(const warp_registers &r, std::vector<uint32_t> *values) {
    values->resize((size_t)(32 * r.words));
    for (int lane = 0; lane < 32; lane++) {
        const volatile uint32_t *from = r.lane[lane];
        for (int i = 0; i < r.words; i++) (*values)[(size_t)(lane * r.words + i)] = from[i];
    }
}

static void write_registers(const warp_registers &r, const std::vector<uint32_t> &values) {
    for (int lane = 0; lane < 32; lane++)
        memcpy(r.lane[lane], &values[(size_t)(lane * r.words)], (size_t)r.words * 4);
}

static void hide_registers(const warp_registers &r) {
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < r.words; i++) r.lane[lane][i] = IN_FLIGHT_BITS;
}

static bool are_hidden(const warp_registers &r) {
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < r.words; i++)
            if (r.lane[lane][i] != IN_FLIGHT_BITS) return false;
    return true;
}

static bool overlap(const warp_registers &x, const uint32_t *y, int words) {
    return y < x.lane[0] + x.words && x.lane[0] < y + words;
}

static void check_in_flight(const warp_registers &r) {
    if (r.sums ? !are_hidden(r) : !holds(r, r.values))
        cuda_emu_add_fault(CUDA_EMU_IN_FLIGHT, "%s of a wgmma in flight are changed", r.sums ? "sums" : "registers");
}

/* The registers of an operand, as known from earlier instructions, or anew. */
static warp_registers *find_registers(warp_products *p, uint32_t *const *lanes, int words, bool sums) {
    for (size_t i = 0; i < p->registers.size();) {
        warp_registers *r = &p->registers[i];
        if (r->lane[0] == lanes[0] && r->words == words && r->sums == sums) return r;
        if (!overlap(*r, lanes[0], words)) {
            i++;
            continue;
        }
        if (r->in_flight) cuda_emu_add_fault(CUDA_EMU_IN_FLIGHT, "a wgmma takes part of another one's registers");
        p->registers.erase(p->registers.begin() + (std::ptrdiff_t)i);
    }
    warp_registers fresh = {};
    memcpy(fresh.lane, lanes, sizeof fresh.lane);
    fresh.words = words;
    fresh.sums = sums;
    p->registers.push_back(fresh);
    return &p->registers.back();
}

void cuda_emu_wgmma_fence() {
    meet(WGMMA_FENCE, 0xFFFFFFFFu, nullptr, [](warp *, int first) {
        warp_products *p = products_of(first / 32);
        p->fenced = true;
        for (warp_registers &r : p->registers) {
            if (r.in_flight) continue;
            read_registers(r, &r.at_fence);
            r.fenced = true;
        }
    });
}

void cuda_emu_wgmma_commit() {
    meet(WGMMA_COMMIT, 0xFFFFFFFFu, nullptr, [](warp *, int first) {
        warp_products *p = products_of(first / 32);
        p->last_of_group.push_back(p->last);
        p->n_groups++;
        p->n_waited = p->n_issued;
    });
}

void cuda_emu_wgmma_wait(int groups_left) {
    meet(WGMMA_WAIT, 0xFFFFFFFFu, &groups_left, [](warp *w, int first) {
        warp_products *p = products_of(first / 32);
        const int64_t done = p->n_groups - *(int *)w->arguments[0];
        if (done <= p->n_done) return;
        p->n_done = done;
        p->fenced = false;
        for (warp_registers &r : p->registers) {
            if (!r.in_flight || r.group >= done) continue;
            check_in_flight(r);
            if (r.sums) write_registers(r, r.values);
            r.in_flight = r.fenced = false;
        }
        for (int i = 0; clocks_on && i < 32; i++)
            row_of(first + i)[agent_of_warp(first / 32)] = p->last_of_group[(size_t)(done - 1)];
    });
}

/* A 64-bit descriptor; only the 128-byte swizzle. */
struct matrix {
    uint32_t start, leading, stride;
    bool transposed;
};

static bool decode(uint64_t bits, bool transposed, const char *what, matrix *m) {
    m->start = (uint32_t)(bits & 0x3FFF) << 4;
    m->leading = (uint32_t)(bits >> 16 & 0x3FFF) << 4;
    m->stride = (uint32_t)(bits >> 32 & 0x3FFF) << 4;
    m->transposed = transposed;
    if (bits >> 62 == 1 && (bits >> 46 & 0xFFFF) == 0 && (bits >> 30 & 3) == 0 && (bits >> 14 & 3) == 0 &&
        (m->start & 0x380) == 0 && m->stride % 1024 == 0 && m->leading % 1024 == 0)
        return true;
    cuda_emu_add_fault(CUDA_EMU_DESCRIPTOR, "descriptor %016llx of %s", (unsigned long long)bits, what);
    return false;
}

/* Returns the place of eight elements: of row r (of M or N) from k on; transposed: of rows r .. r + 7 at k. */
static uint32_t chunk_of(const matrix &m, int r, int k) {
    const uint32_t row = (uint32_t)r, step = (uint32_t)k;
    if (m.transposed)
        return swizzled(m.start + row / 64 * m.leading + step / 8 * m.stride + step % 8 * 128 + row % 64 * 2,
                        CU_TENSOR_MAP_SWIZZLE_128B);
    return swizzled(m.start + row / 8 * m.stride + row % 8 * 128 + step * 2, CU_TENSOR_MAP_SWIZZLE_128B);
}

/* Sixteen bytes for the wgmma of warp w; NULL after a fault that leaves nothing to read. */
static const uint16_t *read_chunk(uint32_t address, int w, moment when) {
    if (!in_bounds(address, 16, "wgmma")) return nullptr;
    chunk *c = &chunks[address / 16];
    for (uint32_t at = address; at < address + 16; at += 4) {
        const granule *g = &granules[at / 4];
        if (!shared_written[at])
            cuda_emu_add_fault(CUDA_EMU_UNINITIALISED, "wgmma of shared address %u, which was not written", at);
        else if (!is_fenced(g, now->id))
            cuda_emu_add_fault(CUDA_EMU_PROXY, "wgmma of shared address %u, no proxy fence since thread %d wrote", at,
                               g->writer);
        else if (g->writer >= n_threads && !saw_write(g))
            cuda_emu_add_fault(CUDA_EMU_RACE, "wgmma of shared address %u, with no wait for its bulk copy", at);
    }
    if (c->swizzle != ANY_SWIZZLE && c->swizzle != CU_TENSOR_MAP_SWIZZLE_128B)
        cuda_emu_add_fault(CUDA_EMU_DESCRIPTOR, "wgmma of shared address %u, copied with swizzle %d, not %d", address,
                           c->swizzle, (int)CU_TENSOR_MAP_SWIZZLE_128B);
    c->read[w] = when;
    return (const uint16_t *)(const void *)&shared_bytes[address];
}

static float number_of(uint16_t bits, bool bf16) {
    return bf16 ? cuda_emu_bf16_to_float(bits) : cuda_emu_half_to_float(bits);
}

/* `rows` rows of 16 numbers each, from row `first` of the matrix on. */
static void read_matrix(const matrix &m, int first, int rows, bool bf16, int w, moment when, float (*to)[16]) {
    for (int r = 0; r < rows; r += m.transposed ? 8 : 1)
        for (int k = 0; k < 16; k += m.transposed ? 1 : 8) {
            const uint16_t *from = read_chunk(chunk_of(m, first + r, k), w, when);
            for (int i = 0; i < 8; i++) {
                float *one = m.transposed ? &to[r + i][k] : &to[r][k + i];
                *one = from ? number_of(from[i], bf16) : 0.0f;
            }
        }
}

/* Register i of a lane's sums, in the 16 rows of its warp. */
static int sum_row(int lane, int i) { return lane / 4 + i / 2 % 2 * 8; }
static int sum_column(int lane, int i) { return i / 4 * 8 + lane % 4 * 2 + i % 2; }

static void multiply_warp(std::vector<uint32_t> *sums, int n, const float (*a)[16], const float (*b)[16]) {
    static float c[16][256], turned[16][256];
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < n / 2; i++)
            memcpy(&c[sum_row(lane, i)][sum_column(lane, i)], &(*sums)[(size_t)(lane * n / 2 + i)], 4);
    for (int j = 0; j < n; j++)
        for (int k = 0; k < 16; k++) turned[k][j] = b[j][k];
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < n; j++) c[i][j] += a[i][k] * turned[k][j];
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < n / 2; i++)
            memcpy(&(*sums)[(size_t)(lane * n / 2 + i)], &c[sum_row(lane, i)][sum_column(lane, i)], 4);
}

/* The four warps of a warpgroup issue the same instructions. */
static void check_agreement(int w, const cuda_emu_wgmma_operands &o, int64_t number) {
    std::vector<issued_product> &all = issued[(size_t)w / 4];
    const issued_product one = {o.a_registers ? 0 : o.a, o.b, o.n,
                                o.add + 2 * o.a_transposed + 4 * o.b_transposed + 8 * (o.a_registers != nullptr)};
    if (number == (int64_t)all.size()) {
        all.push_back(one);
        counts->wgmma++;
        return;
    }
    const issued_product &first = all[(size_t)number];
    if (first.a != one.a || first.b != one.b || first.n != one.n || first.flags != one.flags)
        cuda_emu_add_fault(CUDA_EMU_DIVERGED, "the warps of a warpgroup issue different wgmmas");
}

static void wgmma_work(warp *w, int first) {
    const cuda_emu_wgmma_operands &o = *(const cuda_emu_wgmma_operands *)w->arguments[0];
    const int here = first / 32;
    warp_products *p = products_of(here);
    uint32_t *sums[32], *registers[32];
    for (int lane = 0; lane < 32; lane++) {
        const cuda_emu_wgmma_operands *call = (const cuda_emu_wgmma_operands *)w->arguments[lane];
        sums[lane] = (uint32_t *)(void *)call->c;
        registers[lane] = const_cast<uint32_t *>(call->a_registers);
        if (call->a != o.a || call->b != o.b || call->n != o.n || call->add != o.add)
            cuda_emu_add_fault(CUDA_EMU_DIVERGED, "the lanes of a warp issue different wgmmas");
    }
    turn_clocks_on();
    if (o.n < 8 || o.n > 256 || o.n % 8 != 0) {
        cuda_emu_add_fault(CUDA_EMU_DESCRIPTOR, "wgmma with n = %d", o.n);
        return;
    }
    check_agreement(here, o, p->n_issued++);
    const moment when = p->last = moment_now++;
    warp_registers *c = find_registers(p, sums, o.n / 2, true);
    if (!c->in_flight) {
        if (!p->fenced || (o.add && c->fenced && !holds(*c, c->at_fence)))
            cuda_emu_add_fault(CUDA_EMU_IN_FLIGHT, "a wgmma takes sums with no wgmma.fence since they were changed");
        read_registers(*c, &c->values);
        cuda_emu_check_words(c->values.data(), o.add ? 32 * c->words * 4 : 0);
    } else {
        check_in_flight(*c);
    }
    if (!o.add) std::fill(c->values.begin(), c->values.end(), 0u);
    c->in_flight = true;
    c->group = p->n_groups;

    static float a[16][16], b[256][16];
    matrix m;
    memset(a, 0, sizeof a);
    memset(b, 0, sizeof b);
    if (o.a_registers) {
        warp_registers *from = find_registers(p, registers, 4, false);
        std::vector<uint32_t> values;
        read_registers(*from, &values);
        if (!p->fenced || (!from->in_flight && from->fenced && !holds(*from, from->at_fence)))
            cuda_emu_add_fault(CUDA_EMU_IN_FLIGHT, "a wgmma takes registers, changed with no wgmma.fence since");
        if (from->in_flight) check_in_flight(*from);
        from->values = values;
        from->in_flight = true;
        from->group = p->n_groups;
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                const uint32_t pair = values[(size_t)(lane * 4 + i)];
                float *to = &a[lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8];
                to[0] = number_of((uint16_t)pair, o.bf16);
                to[1] = number_of((uint16_t)(pair >> 16), o.bf16);
            }
    } else if (decode(o.a, o.a_transposed, "A", &m)) {
        read_matrix(m, here % 4 * 16, 16, o.bf16, here, when, a);
    }
    if (decode(o.b, o.b_transposed, "B", &m)) read_matrix(m, 0, o.n, o.bf16, here, when, b);
    for (warp_registers &r : p->registers) /* find_registers may have moved them */
        if (r.lane[0] == sums[0] && r.sums) {
            multiply_warp(&r.values, o.n, a, b);
            hide_registers(r);
        }
}

void cuda_emu_wgmma(const cuda_emu_wgmma_operands &operands) {
    cuda_emu_wgmma_operands mine = operands;
    meet(WGMMA, 0xFFFFFFFFu, &mine, wgmma_work);
}

struct stmatrix_call {
    uint32_t address;
    const uint32_t *from;
    bool transposed;
};

static void stmatrix_work(warp *w, int) {
    shared_access access = {16, 0xFFFFFFFFu, {0}};
    for (int lane = 0; lane < 32; lane++) access.address[lane] = ((stmatrix_call *)w->arguments[lane])->address;
    count_wavefronts(&access);
    for (int lane = 0; lane < 32; lane++) {
        const stmatrix_call *call = (const stmatrix_call *)w->arguments[lane];
        for (int i = 0; i < 4; i++) {
            uint16_t pair[2];
            memcpy(pair, &call->from[i], 4);
            for (int j = 0; j < 2; j++) {
                const int row = call->transposed ? 2 * (lane % 4) + j : lane / 4;
                const int column = call->transposed ? lane / 4 : 2 * (lane % 4) + j;
                const uint32_t to = access.address[8 * i + row];
                if ((uint64_t)to + 16 <= shared_bytes.size())
                    memcpy(&shared_bytes[to + 2 * (uint32_t)column], &pair[j], 2);
            }
        }
    }
}

void cuda_emu_stmatrix_x4(uint32_t address, const uint32_t (&from)[4], bool transposed) {
    stmatrix_call call = {address, from, transposed};
    if (in_bounds(address, 16, "stmatrix")) {
        check_write(address, 16, "stmatrix");
        memset(&shared_written[address], 1, 16);
    }
    meet(STMATRIX, 0xFFFFFFFFu, &call, stmatrix_work);
}

/* ================================================================================================================
   >>blocks    how a block starts and ends
   ================================================================================================================ */

static void start_hopper_block() {
    clocks_on = false;
    moment_now = 1;
    first_epoch = epoch;
    mbarriers.clear();
    awaited.assign((size_t)n_threads, -1);
    bulk_copies.clear();
    products.clear();
    issued.clear();
    registers_of.clear();
    waiting_for_registers.clear();
    for (named_barrier &b : named_barriers) b = named_barrier();
}

static void end_hopper_block() {
    if (abandoned) return;
    if (!bulk_copies.empty())
        cuda_emu_add_fault(CUDA_EMU_IN_FLIGHT, "%d bulk copies are in flight at the end of the block",
                           (int)bulk_copies.size());
    for (size_t w = 0; w < products.size(); w++) {
        const warp_products &p = products[w];
        if (p.n_done < p.n_groups || p.n_waited < p.n_issued)
            cuda_emu_add_fault(CUDA_EMU_IN_FLIGHT, "warp %d ends with a wgmma that it did not wait for", (int)w);
        if (p.n_issued != (int64_t)issued[w / 4].size())
            cuda_emu_add_fault(CUDA_EMU_DIVERGED, "warp %d issued fewer wgmmas than others of its warpgroup", (int)w);
    }
    for (const named_barrier &b : named_barriers)
        if (b.arrived > 0)
            cuda_emu_add_fault(CUDA_EMU_BARRIER, "a named barrier is left with %d of %d threads", b.arrived, b.wanted);
    for (size_t i = 0; i < registers_of.size(); i++)
        if (registers_of[i] != registers_of[i / 128 * 128])
            cuda_emu_add_fault(CUDA_EMU_REGISTERS, "threads of one warpgroup set different numbers of registers");
}
