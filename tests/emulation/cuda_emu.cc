/* cuda_emu.cc - kernels on the host; see cuda_emu.h. Sections: >>faults >>fibers >>schedule >>collectives >>shared
   >>copies >>launch >>numbers >>mma, and those of hopper_clocks.h and hopper_emu.h. Streams and memory are in
   runtime_emu.cc. */

#include "cuda_emu_private.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <vector>

#if EMU_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

/* Other processors, or -DCUDA_EMU_UCONTEXT: the C library switches stacks, at the price of a system call each time. */
#if defined(__x86_64__) && !defined(CUDA_EMU_UCONTEXT)
#define EMU_X86 1
#else
#define EMU_X86 0
#include <ucontext.h>
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

/* ================================================================================================================
   >>faults
   ================================================================================================================ */

static int64_t fault_counts[CUDA_EMU_FAULTS];
static std::string first_fault;
static std::map<std::string, cuda_emu_counts> counts_by_kernel;
static cuda_emu_counts *counts; /* of the running kernel */
static std::string kernel_name;
static bool running; /* inside a kernel */

void cuda_emu_add_fault(cuda_emu_fault kind, const char *format, ...) {
    fault_counts[kind]++;
    if (!first_fault.empty()) return;
    char text[300], place[200] = "";
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (running)
        snprintf(place, sizeof place, "%.80s, block (%u, %u, %u), thread %u: ", kernel_name.c_str(), blockIdx.x,
                 blockIdx.y, blockIdx.z, threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
    first_fault = std::string(place) + text;
}

void cuda_emu_reset_kernels() {
    memset(fault_counts, 0, sizeof fault_counts);
    first_fault.clear();
    counts_by_kernel.clear();
}

int64_t cuda_emu_faults(cuda_emu_fault kind) { return fault_counts[kind]; }

int64_t cuda_emu_faults() {
    int64_t sum = 0;
    for (int64_t n : fault_counts) sum += n;
    return sum;
}

const char *cuda_emu_first_fault() { return first_fault.c_str(); }

cuda_emu_counts cuda_emu_kernel(const char *name) {
    auto found = counts_by_kernel.find(name);
    return found == counts_by_kernel.end() ? cuda_emu_counts() : found->second;
}

cuda_emu_counts cuda_emu_total() {
    cuda_emu_counts sum = {};
    for (auto &one : counts_by_kernel) {
        sum.launches += one.second.launches;
        sum.carved += one.second.carved;
        sum.blocks += one.second.blocks;
        sum.barriers += one.second.barriers;
        sum.mma += one.second.mma;
        sum.wgmma += one.second.wgmma;
        sum.bulk_bytes += one.second.bulk_bytes;
        sum.wavefronts += one.second.wavefronts;
        sum.conflicts += one.second.conflicts;
    }
    return sum;
}

/* ================================================================================================================
   >>fibers    stacks and the switch between them
   ================================================================================================================ */

enum state_of_fiber {
    READY,
    WAITS_FOR_WARP,
    WAITS_FOR_BLOCK,
    WAITS_FOR_EVENT, /* see hopper_emu.h */
    DONE
};

struct pending_copy {
    uint32_t address;
    const void *from;
    int bytes, valid;
    int64_t group;
};

struct fiber {
    void *sp = nullptr;
#if !EMU_X86
    ucontext_t context;
#endif
    void *fake = nullptr; /* AddressSanitizer's */
    state_of_fiber state = DONE;
    int id = 0;
    uint3 thread = {0, 0, 0};
    std::vector<pending_copy> copies;
    int64_t open_group = 0; /* the group that the next commit closes */
    int accesses = 0;       /* shared accesses since the warp last met */
    int event_kind = 0;     /* of the fault if what it waits for never comes ... */
    char event[120];        /* ... and what that is */
};

/* All stacks lie in one block, each above a page that catches what overflows it. */
static const size_t STACK_BYTES = 320 * 1024, MOST_FIBERS = 1024;
static char *stacks;
static fiber outside; /* the caller of the launch */
static fiber *now = &outside;
static std::vector<fiber *> &fibers =
    *new std::vector<fiber *>(); /* never freed: a fiber lives as long as the program */
static const std::function<void()> *thread_body;

#if EMU_X86
extern "C" void cuda_emu_switch(void **save, void *load);
__asm__(".text\n"
        ".globl cuda_emu_switch\n"
        ".type cuda_emu_switch,@function\n"
        "cuda_emu_switch:\n"
        "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n    pushq %r13\n    pushq %r14\n    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n    popq %r14\n    popq %r13\n    popq %r12\n    popq %rbx\n    popq %rbp\n"
        "    ret\n"
        ".size cuda_emu_switch,.-cuda_emu_switch\n");
#endif

#if EMU_ASAN
static const void *outside_stack;
static size_t outside_bytes;
static bool told; /* AddressSanitizer of the switch that is under way */
extern "C" int __asan_option_detect_stack_use_after_return; /* its own */

/* It is told when the block of stacks is entered and left, since a call for every switch takes longer than the switch.
   Where it keeps a second stack for each fiber it has to know of all of them. */
static void tell_of_switch(fiber *from, const fiber *to) {
    told = from == &outside || to == &outside || __asan_option_detect_stack_use_after_return;
    if (!told) return;
    const bool leaves = to == &outside;
    __sanitizer_start_switch_fiber(&from->fake, leaves ? outside_stack : stacks,
                                   leaves ? outside_bytes : MOST_FIBERS * STACK_BYTES);
}
#endif

static void switch_to(fiber *to) {
    fiber *from = now;
    now = to;
    threadIdx = to->thread;
#if EMU_ASAN
    tell_of_switch(from, to);
#endif
#if EMU_X86
    cuda_emu_switch(&from->sp, to->sp);
#else
    swapcontext(&from->context, &to->context);
#endif
#if EMU_ASAN
    if (told) __sanitizer_finish_switch_fiber(from->fake, nullptr, nullptr);
#endif
}

static void thread_ends();

/* A fiber outlives its block: it runs one thread after the other. */
static void fiber_main() {
#if EMU_ASAN
    const void *bottom;
    size_t bytes;
    if (told) __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
    if (!outside_stack) { /* the first fiber of all is entered from there */
        outside_stack = bottom;
        outside_bytes = bytes;
    }
#endif
    for (;;) {
        (*thread_body)();
        thread_ends();
    }
}

static void make_stacks() {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    stacks = (char *)mmap(nullptr, MOST_FIBERS * STACK_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (stacks == MAP_FAILED) abort();
    for (size_t i = 0; i < MOST_FIBERS; i++) mprotect(stacks + i * STACK_BYTES, 4096, PROT_NONE);
}

/* The lanes of a warp are at the same depth of their stacks most of the time. If these began at the same place of a
   page, all that they use would share a few sets of the processor's caches, so each begins 17 cache lines below the
   last. */
static size_t usable_stack(const fiber *f) { return STACK_BYTES - (size_t)(f->id % 64) * 17 * 64; }

static void start_fiber(fiber *f) {
    if (!stacks) make_stacks();
    char *stack = stacks + (size_t)f->id * STACK_BYTES;
#if EMU_ASAN
    __asan_unpoison_memory_region(stack, STACK_BYTES);
#endif
#if EMU_X86
    void **top = (void **)(stack + usable_stack(f)) - 1; /* after `ret`, the stack is as after a call */
    top[0] = nullptr;
    *--top = (void *)fiber_main;
    top -= 6;
    memset(top, 0, 6 * sizeof *top);
    f->sp = top;
#else
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = stack;
    f->context.uc_stack.ss_size = usable_stack(f);
    f->context.uc_link = nullptr;
    makecontext(&f->context, fiber_main, 0);
#endif
}

/* ================================================================================================================
   >>schedule    the threads of one block
   ================================================================================================================ */

enum collective_kind {
    NONE,
    SYNCWARP,
    SHUFFLE_XOR,
    SHUFFLE,
    BALLOT,
    REDUCE_MAX,
    REDUCE_ADD,
    LDMATRIX,
    MMA,
    STMATRIX,
    WGMMA,
    WGMMA_FENCE,
    WGMMA_COMMIT,
    WGMMA_WAIT
};
static const char *const collective_names[] = {"none",
                                               "__syncwarp",
                                               "__shfl_xor_sync",
                                               "__shfl_sync",
                                               "__ballot_sync",
                                               "__reduce_max_sync",
                                               "__reduce_add_sync",
                                               "ldmatrix",
                                               "mma",
                                               "stmatrix",
                                               "wgmma",
                                               "wgmma.fence",
                                               "wgmma.commit_group",
                                               "wgmma.wait_group"};

/* One shared access of the lanes of a warp: those that are the same number of accesses past their last meeting. */
struct shared_access {
    int bytes;
    unsigned lanes;
    uint32_t address[32];
};

struct warp {
    int n_lanes = 0;
    unsigned ready = 0; /* a bit for each lane */
    collective_kind kind = NONE;
    unsigned wanted = 0, arrived = 0;
    void *arguments[32];
    uint32_t meetings = 0; /* how many __syncwarp it has passed */
    std::vector<shared_access> accesses;
    int n_accesses = 0;
};

static std::vector<warp> warps;
static int n_threads, n_done, n_at_barrier;
static bool abandoned;
static uint32_t epoch; /* grows at every barrier and every block, over all launches */
static int order_backwards;

void cuda_emu_set_order(int backwards) { order_backwards = backwards; }

/* Returns whether no two of these lanes want different words of one bank, which is what kernels aim at. */
static bool conflict_free(const shared_access *access, int first, int lanes) {
    uint32_t words[32];
    unsigned used = 0;
    for (int lane = first; lane < first + lanes; lane++) {
        if (!(access->lanes >> lane & 1)) continue;
        for (int byte = 0; byte < access->bytes; byte += 4) {
            const uint32_t word = (access->address[lane] + (uint32_t)byte) / 4, bank = word % 32;
            if (used >> bank & 1 && words[bank] != word) return false;
            used |= 1u << bank;
            words[bank] = word;
        }
    }
    counts->wavefronts += used != 0;
    return true;
}

static void count_wavefronts(const shared_access *access) {
    int lanes = 128 / access->bytes > 32 ? 32 : 128 / access->bytes;
    for (int first = 0; first < 32; first += lanes) {
        if (conflict_free(access, first, lanes)) continue;
        uint32_t words[32][32];
        int n_words[32] = {0}, most = 0;
        for (int lane = first; lane < first + lanes; lane++) {
            if (!(access->lanes >> lane & 1)) continue;
            for (int byte = 0; byte < access->bytes; byte += 4) {
                uint32_t word = (access->address[lane] + (uint32_t)byte) / 4, bank = word % 32;
                int i = 0;
                while (i < n_words[bank] && words[bank][i] != word) i++;
                if (i == n_words[bank] && i < 32) words[bank][n_words[bank]++] = word;
                if (n_words[bank] > most) most = n_words[bank];
            }
        }
        counts->wavefronts += most;
        if (most > 1) counts->conflicts += most - 1;
    }
}

static void warp_meets(warp *w) {
    if (w->n_accesses == 0) return;
    for (int i = 0; i < w->n_accesses; i++) count_wavefronts(&w->accesses[(size_t)i]);
    w->n_accesses = 0;
    int first = (int)(w - warps.data()) * 32;
    for (int lane = 0; lane < w->n_lanes; lane++) fibers[(size_t)(first + lane)]->accesses = 0;
}

static void note_access(uint32_t address, int bytes) {
    warp *w = &warps[(size_t)now->id / 32];
    int at = now->accesses++;
    if (at >= w->n_accesses) {
        if ((size_t)at >= w->accesses.size()) w->accesses.resize((size_t)at + 64);
        w->accesses[(size_t)at].bytes = bytes;
        w->accesses[(size_t)at].lanes = 0;
        w->n_accesses = at + 1;
    }
    shared_access *access = &w->accesses[(size_t)at];
    if (access->bytes != bytes) return; /* the lanes have diverged: count the majority's only */
    access->lanes |= 1u << (now->id % 32);
    access->address[now->id % 32] = address;
}

static int first_lane(unsigned lanes) { return __builtin_ctz(lanes); }

/* The next lane of this warp, or the first one of the next warp that can go on. */
static fiber *find_ready() {
    const int here = now->id / 32, n = (int)warps.size();
    const unsigned own = warps[(size_t)here].ready, later = own & ~((2u << now->id % 32) - 1);
    if (own) return fibers[(size_t)(here * 32 + first_lane(later ? later : own))];
    for (int i = 1; i < n; i++) {
        const int at = order_backwards ? (here - i + n) % n : (here + i) % n;
        const unsigned ready = warps[(size_t)at].ready;
        if (ready) return fibers[(size_t)(at * 32 + first_lane(ready))];
    }
    return nullptr;
}

static bool land_a_copy();
static void join_block();
static void join_lanes(int first, unsigned lanes);
static bool report_event();

/* The next one to run; where all wait, bulk copies land until one can go on. */
static fiber *find_next() {
    fiber *next = find_ready();
    while (!next && land_a_copy()) next = find_ready();
    return next;
}

static void report_deadlock() {
    for (size_t i = 0; i < warps.size(); i++) {
        if (warps[i].kind == NONE) continue;
        cuda_emu_add_fault(CUDA_EMU_DIVERGED, "%s waits for lanes %08x of warp %d, only %08x came",
                           collective_names[warps[i].kind], warps[i].wanted, (int)i, warps[i].arrived);
        return;
    }
    if (report_event()) return;
    cuda_emu_add_fault(CUDA_EMU_BARRIER, "__syncthreads reached by %d of %d threads; %d have ended", n_at_barrier,
                       n_threads, n_done);
}

static void abandon_block() {
    abandoned = true;
    switch_to(&outside);
}

/* Gives way until this thread is ready again. */
static void wait_as(state_of_fiber state) {
    now->state = state;
    warps[(size_t)now->id / 32].ready &= ~(1u << now->id % 32);
    fiber *next = find_next();
    if (!next) {
        report_deadlock();
        abandon_block();
    }
    if (next != now) switch_to(next);
}

static void set_ready(fiber *f) {
    f->state = READY;
    warps[(size_t)f->id / 32].ready |= 1u << f->id % 32;
}

static void land_copies(int64_t before_group);

static void thread_ends() {
    land_copies(INT64_MAX);
    now->state = DONE;
    n_done++;
    warps[(size_t)now->id / 32].ready &= ~(1u << now->id % 32);
    fiber *next = n_done < n_threads ? find_next() : nullptr;
    if (!next && n_done < n_threads) {
        report_deadlock();
        abandoned = true;
    }
    switch_to(next ? next : &outside);
}

/* ================================================================================================================
   >>collectives
   ================================================================================================================ */

void __syncthreads() {
    if (++n_at_barrier < n_threads) {
        wait_as(WAITS_FOR_BLOCK);
        return;
    }
    n_at_barrier = 0;
    epoch++;
    join_block();
    counts->barriers++;
    for (int i = 0; i < n_threads; i++)
        if (fibers[(size_t)i]->state == WAITS_FOR_BLOCK) set_ready(fibers[(size_t)i]);
    for (warp &w : warps) warp_meets(&w);
}

typedef void collective_fn(warp *w, int first_thread);

/* Every lane of `mask` arrives with its argument; the last one does the work for all. */
static void meet(collective_kind kind, unsigned mask, void *argument, collective_fn *work) {
    warp *w = &warps[(size_t)now->id / 32];
    unsigned lane = (unsigned)now->id % 32;
    if (w->n_lanes < 32) mask &= (1u << w->n_lanes) - 1;
    if (!(mask >> lane & 1) || (w->kind != NONE && (w->kind != kind || w->wanted != mask))) {
        cuda_emu_add_fault(CUDA_EMU_DIVERGED,
                           "lane %u comes to %s with mask %08x while its warp is at %s with mask %08x", lane,
                           collective_names[kind], mask, collective_names[w->kind], w->wanted);
        abandon_block();
    }
    w->kind = kind;
    w->wanted = mask;
    w->arrived |= 1u << lane;
    w->arguments[lane] = argument;
    if (w->arrived != mask) {
        wait_as(WAITS_FOR_WARP);
        return;
    }
    int first = now->id / 32 * 32;
    warp_meets(w);
    if (work) work(w, first);
    w->kind = NONE;
    w->wanted = w->arrived = 0;
    for (int i = 0; i < w->n_lanes; i++)
        if ((mask >> i & 1) && fibers[(size_t)(first + i)]->state == WAITS_FOR_WARP)
            set_ready(fibers[(size_t)(first + i)]);
}

void __syncwarp(unsigned mask) {
    meet(SYNCWARP, mask, nullptr, [](warp *w, int first) {
        w->meetings++;
        join_lanes(first, w->arrived);
    });
}

struct shuffle {
    uint32_t in, out;
    int lane, width;
};

static void shuffle_work(warp *w, bool exclusive) {
    for (int lane = 0; lane < 32; lane++) {
        if (!(w->arrived >> lane & 1)) continue;
        shuffle *s = (shuffle *)w->arguments[lane];
        int base = lane & ~(s->width - 1);
        int from = exclusive ? lane ^ s->lane : base + (s->lane & (s->width - 1));
        if (exclusive && (from & ~(s->width - 1)) != base) from = lane;
        if (from < 0 || from > 31 || !(w->arrived >> from & 1)) {
            cuda_emu_add_fault(CUDA_EMU_DIVERGED, "lane %d shuffles from lane %d, which takes no part", lane, from);
            from = lane;
        }
        s->out = ((shuffle *)w->arguments[from])->in;
    }
}

float __shfl_xor_sync(unsigned mask, float value, int lanes, int width) {
    shuffle s = {0, 0, lanes, width};
    cuda_emu_check_words(&value, 4);
    memcpy(&s.in, &value, 4);
    meet(SHUFFLE_XOR, mask, &s, [](warp *w, int) { shuffle_work(w, true); });
    memcpy(&value, &s.out, 4);
    return value;
}

int __shfl_sync(unsigned mask, int value, int lane, int width) {
    shuffle s = {(uint32_t)value, 0, lane, width};
    meet(SHUFFLE, mask, &s, [](warp *w, int) { shuffle_work(w, false); });
    return (int)s.out;
}

float __shfl_sync(unsigned mask, float value, int lane, int width) {
    int bits;
    memcpy(&bits, &value, 4);
    bits = __shfl_sync(mask, bits, lane, width);
    memcpy(&value, &bits, 4);
    return value;
}

template <typename F> static void reduce_lanes(warp *w, int start, F combine) {
    int all = start;
    for (int lane = 0; lane < 32; lane++)
        if (w->arrived >> lane & 1) all = combine(all, *(int *)w->arguments[lane], lane);
    for (int lane = 0; lane < 32; lane++)
        if (w->arrived >> lane & 1) *(int *)w->arguments[lane] = all;
}

unsigned __ballot_sync(unsigned mask, int predicate) {
    meet(BALLOT, mask, &predicate, [](warp *w, int) {
        reduce_lanes(w, 0, [](int all, int one, int lane) { return (int)((unsigned)all | (one ? 1u << lane : 0u)); });
    });
    return (unsigned)predicate;
}

int __reduce_max_sync(unsigned mask, int value) {
    meet(REDUCE_MAX, mask, &value,
         [](warp *w, int) { reduce_lanes(w, INT32_MIN, [](int all, int one, int) { return one > all ? one : all; }); });
    return value;
}

int __reduce_add_sync(unsigned mask, int value) {
    meet(REDUCE_ADD, mask, &value, [](warp *w, int) {
        reduce_lanes(w, 0, [](int all, int one, int) { return (int)((unsigned)all + (unsigned)one); });
    });
    return value;
}

/* ================================================================================================================
   >>shared    dynamic shared memory with its books
   ================================================================================================================ */

/* Who touched four bytes last. */
struct granule {
    uint32_t write_epoch, read_epoch;
    uint32_t write_meetings, read_meetings;
    int16_t writer, reader;
    bool many_lanes, many_warps; /* readers in read_epoch */
    uint32_t write_time;         /* a moment of hopper_clocks.h, where a writer may also be no thread */
};

static std::vector<unsigned char> shared_bytes, shared_written;
static std::vector<granule> granules;

#include "hopper_clocks.h"

static void join_block() {
    if (clocks_on) join_threads(0, n_threads, 0xFFFFFFFFu);
}

static void join_lanes(int first, unsigned lanes) {
    if (clocks_on) join_threads(first, n_threads - first < 32 ? n_threads - first : 32, lanes);
}

static bool in_bounds(uint32_t address, int bytes, const char *what) {
    if (address % (unsigned)bytes != 0) {
        cuda_emu_add_fault(CUDA_EMU_MISALIGNED, "%s of %d bytes at shared address %u", what, bytes, address);
        return false;
    }
    if ((uint64_t)address + (uint64_t)bytes > shared_bytes.size()) {
        cuda_emu_add_fault(CUDA_EMU_OUT_OF_BOUNDS, "%s of %d bytes at shared address %u of %llu", what, bytes, address,
                           (unsigned long long)shared_bytes.size());
        return false;
    }
    return true;
}

/* exact: the accessing lane is known; otherwise (ldmatrix) any lane of its warp may be meant. */
static bool read_races(const granule *g, bool exact) {
    if (written_by_copy(g)) return !saw_write(g);
    if (g->write_epoch != epoch) return false;
    if (exact && g->writer == now->id) return false;
    if (g->writer / 32 == now->id / 32) return g->write_meetings >= warps[(size_t)now->id / 32].meetings;
    return !saw_write(g);
}

static bool write_races(const granule *g) {
    const uint32_t meetings = warps[(size_t)now->id / 32].meetings;
    if (read_races(g, true)) return true;
    if (g->read_epoch != epoch || (g->reader == now->id && !g->many_lanes)) return false;
    if (!g->many_warps && g->reader / 32 == now->id / 32 && g->read_meetings < meetings) return false;
    return !saw_reads(g);
}

static void note_read(granule *g, bool exact) {
    if (g->read_epoch != epoch) {
        g->read_epoch = epoch;
        g->reader = (int16_t)now->id;
        g->many_lanes = !exact;
        g->many_warps = false;
    } else {
        if (g->reader != now->id || !exact) g->many_lanes = true;
        if (g->reader / 32 != now->id / 32) g->many_warps = true;
    }
    g->read_meetings = warps[(size_t)now->id / 32].meetings;
    note_reader(g);
}

static void note_write(granule *g) {
    g->write_epoch = epoch;
    g->writer = (int16_t)now->id;
    g->write_meetings = warps[(size_t)now->id / 32].meetings;
    g->write_time = moment_now;
}

/* Returns where the bytes are, or NULL after a fault that leaves nothing to read. */
static const unsigned char *read_shared(uint32_t address, int bytes, bool exact, const char *what) {
    if (!in_bounds(address, bytes, what)) return nullptr;
    uint32_t written;
    for (uint32_t at = address; at < address + (uint32_t)bytes; at += 4) {
        granule *g = &granules[at / 4];
        memcpy(&written, &shared_written[at], 4);
        if (written != 0x01010101u)
            cuda_emu_add_fault(CUDA_EMU_UNINITIALISED, "%s of shared address %u, which was not written", what, at);
        else if (read_races(g, exact))
            cuda_emu_add_fault(CUDA_EMU_RACE, "%s of shared address %u, written by thread %d with no barrier between",
                               what, at, g->writer);
        note_read(g, exact);
    }
    return &shared_bytes[address];
}

static void check_write(uint32_t address, int bytes, const char *what) {
    check_asynchronous_users(address, bytes, what);
    for (uint32_t at = address; at < address + (uint32_t)bytes; at += 4) {
        granule *g = &granules[at / 4];
        if (write_races(g))
            cuda_emu_add_fault(CUDA_EMU_RACE, "%s to shared address %u, used by thread %d with no barrier between",
                               what, at, g->write_epoch == epoch && g->writer != now->id ? g->writer : g->reader);
        note_write(g);
    }
}

static bool access_bytes_ok(int bytes, const char *what) {
    if (bytes == 4 || bytes == 8 || bytes == 16) return true;
    cuda_emu_add_fault(CUDA_EMU_MISALIGNED, "%s of %d bytes", what, bytes);
    return false;
}

void cuda_emu_shared_load(void *to, uint32_t address, int bytes) {
    memset(to, 0, (size_t)bytes);
    if (!access_bytes_ok(bytes, "load")) return;
    const unsigned char *from = read_shared(address, bytes, true, "load");
    if (!from) return;
    note_access(address, bytes);
    memcpy(to, from, (size_t)bytes);
}

void cuda_emu_shared_store(uint32_t address, const void *from, int bytes) {
    if (!access_bytes_ok(bytes, "store") || !in_bounds(address, bytes, "store")) return;
    cuda_emu_check_words(from, bytes);
    check_write(address, bytes, "store");
    note_access(address, bytes);
    memcpy(&shared_bytes[address], from, (size_t)bytes);
    memset(&shared_written[address], 1, (size_t)bytes);
}

struct ldmatrix_call {
    uint32_t address;
    uint32_t *to;
    const unsigned char *row;
    bool transposed;
};

static void ldmatrix_work(warp *w, int) {
    shared_access access = {16, 0xFFFFFFFFu, {0}};
    const unsigned char *rows[32];
    for (int lane = 0; lane < 32; lane++) {
        ldmatrix_call *call = (ldmatrix_call *)w->arguments[lane];
        access.address[lane] = call->address;
        rows[lane] = call->row;
    }
    count_wavefronts(&access);
    for (int lane = 0; lane < 32; lane++) {
        ldmatrix_call *call = (ldmatrix_call *)w->arguments[lane];
        for (int i = 0; i < 4; i++) {
            uint16_t pair[2];
            if (call->transposed) {
                memcpy(&pair[0], rows[8 * i + 2 * (lane % 4)] + 2 * (lane / 4), 2);
                memcpy(&pair[1], rows[8 * i + 2 * (lane % 4) + 1] + 2 * (lane / 4), 2);
            } else {
                memcpy(pair, rows[8 * i + lane / 4] + 4 * (lane % 4), 4);
            }
            memcpy(&call->to[i], pair, 4);
        }
    }
}

void cuda_emu_ldmatrix_x4(uint32_t (&to)[4], uint32_t address, bool transposed) {
    static const unsigned char zeros[16] = {0};
    const unsigned char *row = read_shared(address, 16, false, "ldmatrix");
    ldmatrix_call call = {address, to, row ? row : zeros, transposed};
    meet(LDMATRIX, 0xFFFFFFFFu, &call, ldmatrix_work);
}

/* ================================================================================================================
   >>copies    cp.async: the bytes land when their thread waits for them
   ================================================================================================================ */

void cuda_emu_cp_async(uint32_t address, const void *from, int bytes, int valid) {
    if (!access_bytes_ok(bytes, "cp.async") || !in_bounds(address, bytes, "cp.async")) return;
    if (valid > 0 && !cuda_emu_check_global(from, bytes)) return;
    check_write(address, bytes, "cp.async");
    note_access(address, bytes);
    memset(&shared_written[address], 0, (size_t)bytes);
    now->copies.push_back({address, from, bytes, valid, now->open_group});
}

void cuda_emu_cp_async_commit() { now->open_group++; }

static void land_copies(int64_t before_group) {
    size_t kept = 0;
    for (pending_copy &copy : now->copies) {
        if (copy.group >= before_group) {
            now->copies[kept++] = copy;
            continue;
        }
        unsigned char *to = &shared_bytes[copy.address];
        memset(to, 0, (size_t)copy.bytes);
        if (copy.valid > 0) memcpy(to, copy.from, (size_t)copy.valid);
        memset(&shared_written[copy.address], 1, (size_t)copy.bytes);
        for (int i = 0; i < copy.bytes; i += 4) note_write(&granules[(copy.address + (uint32_t)i) / 4]);
    }
    now->copies.resize(kept);
}

void cuda_emu_cp_async_wait(int groups_left) { land_copies(now->open_group - groups_left); }

/* ================================================================================================================
   >>launch
   ================================================================================================================ */

static void start_hopper_block();
static void end_hopper_block();

static int arch = 80;
static std::map<const void *, int> dynamic_limits, carveouts;
static std::set<const void *> loaded; /* by cudaFuncGetAttributes */
static std::map<const void *, std::string> launched;
extern "C" __attribute__((weak)) char __start_cuda_emu_shared[], __stop_cuda_emu_shared[];

void cuda_emu_set_arch(int new_arch) { arch = new_arch; }

int cuda_emu_arch() { return arch; }

int cuda_emu_most_shared_memory() {
    if (arch == 80) return 166912;
    return arch >= 90 && arch < 120 ? 232448 : 101376;
}

void cuda_emu_set_dynamic_limit(const void *kernel, int bytes) { dynamic_limits[kernel] = bytes; }

void cuda_emu_set_carveout(const void *kernel, int percent) { carveouts[kernel] = percent; }

void cuda_emu_note_loaded(const void *kernel) { loaded.insert(kernel); }

std::string cuda_emu_unloaded(const char *prefix) {
    for (const auto &one : launched)
        if (!loaded.count(one.first) && one.second.rfind(prefix, 0) == 0) return one.second;
    return "";
}

bool cuda_emu_launch_ok(const cuda_emu_kernel_call &call) {
    const dim3 &g = call.grid, &b = call.block;
    const char *name = call.name.c_str();
    int64_t threads = (int64_t)b.x * b.y * b.z;
    int limit = dynamic_limits.count(call.kernel) ? dynamic_limits[call.kernel] : 49152;
    if (g.x == 0 || g.y == 0 || g.z == 0 || g.x > INT32_MAX || g.y > 65535 || g.z > 65535) {
        cuda_emu_add_fault(CUDA_EMU_LAUNCH, "%s: grid of %u x %u x %u blocks", name, g.x, g.y, g.z);
        return false;
    }
    if (threads < 1 || threads > 1024) {
        cuda_emu_add_fault(CUDA_EMU_LAUNCH, "%s: block of %lld threads", name, (long long)threads);
        return false;
    }
    if (call.shared_bytes > (size_t)(limit > 49152 ? limit : 49152)) {
        cuda_emu_add_fault(CUDA_EMU_LAUNCH, "%s: %llu bytes of dynamic shared memory, %d are allowed", name,
                           (unsigned long long)call.shared_bytes, limit);
        return false;
    }
    return true;
}

static void prepare_block(const dim3 &b) {
    int i = 0;
    warps.resize((size_t)(n_threads + 31) / 32);
    for (warp &w : warps) {
        w.n_lanes = n_threads - 32 * i < 32 ? n_threads - 32 * i : 32;
        w.ready = 0xFFFFFFFFu >> (32 - w.n_lanes);
        w.kind = NONE;
        w.wanted = w.arrived = 0;
        w.meetings = 0;
        w.n_accesses = 0;
        i++;
    }
    while (fibers.size() < (size_t)n_threads) {
        fibers.push_back(new fiber());
        fibers.back()->id = (int)fibers.size() - 1;
        start_fiber(fibers.back());
    }
    for (i = 0; i < n_threads; i++) {
        fiber *f = fibers[(size_t)i];
        f->state = READY;
        f->thread = {(unsigned)i % b.x, (unsigned)i / b.x % b.y, (unsigned)i / b.x / b.y};
        f->copies.clear();
        f->open_group = 0;
        f->accesses = 0;
    }
}

static void run_block(const dim3 &b) {
    n_threads = (int)(b.x * b.y * b.z);
    n_done = n_at_barrier = 0;
    abandoned = false;
    epoch++;
    start_hopper_block();
    std::fill(shared_written.begin(), shared_written.end(), (unsigned char)0);
    std::fill(shared_bytes.begin(), shared_bytes.end(), (unsigned char)0xFF);
    if (__start_cuda_emu_shared)
        memset(__start_cuda_emu_shared, 0xFF, (size_t)(__stop_cuda_emu_shared - __start_cuda_emu_shared));
    prepare_block(b);
    counts->blocks++;
    switch_to(fibers[order_backwards ? (size_t)((n_threads - 1) / 32 * 32) : 0]);
    for (warp &w : warps) warp_meets(&w);
    end_hopper_block();
    if (!abandoned) return;
    for (int i = 0; i < n_threads; i++)
        if (fibers[(size_t)i]->state != DONE) start_fiber(fibers[(size_t)i]);
}

void cuda_emu_run_kernel(const cuda_emu_kernel_call &call) {
    const dim3 &g = call.grid;
    kernel_name = call.name;
    counts = &counts_by_kernel[kernel_name];
    counts->launches++;
    launched[call.kernel] = call.name;
    counts->carved += carveouts.count(call.kernel) && carveouts[call.kernel] == cudaSharedmemCarveoutMaxShared;
    running = true;
    thread_body = &call.thread;
    blockDim = call.block;
    gridDim = call.grid;
    shared_bytes.resize(call.shared_bytes);
    shared_written.resize(call.shared_bytes);
    granules.resize(call.shared_bytes / 4 + 1);
    for (uint64_t i = 0, n = (uint64_t)g.x * g.y * g.z; i < n; i++) {
        uint64_t at = order_backwards ? n - 1 - i : i;
        blockIdx = {(unsigned)(at % g.x), (unsigned)(at / g.x % g.y), (unsigned)(at / g.x / g.y)};
        run_block(call.block);
    }
    running = false;
}

/* ================================================================================================================
   >>numbers
   ================================================================================================================ */

/* A float's exponent says 112 more than that of a half with the same bits; multiplying by 2^112 is right for those
   below 2^-14 too. */
static inline float widen_half(uint16_t bits) {
    uint32_t wide = (bits & 0x7FFFu) << 13;
    float value;
    memcpy(&value, &wide, 4);
    value *= 0x1p112f;
    memcpy(&wide, &value, 4);
    wide |= (bits & 0x7C00u) == 0x7C00u ? 0x7F800000u : 0u; /* infinity, or no number */
    wide |= (uint32_t)(bits & 0x8000u) << 16;
    memcpy(&value, &wide, 4);
    return value;
}

float cuda_emu_half_to_float(uint16_t bits) { return widen_half(bits); }

uint16_t cuda_emu_float_to_half(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    uint16_t sign = (uint16_t)(wide >> 16 & 0x8000u);
    wide &= 0x7FFFFFFFu;
    if (wide > 0x7F800000u) return 0x7FFF;
    if (wide >= 0x477FF000u) return (uint16_t)(sign | 0x7C00); /* 65520 and more */
    if (wide < 0x38800000u) {                                  /* below 2^-14: steps of 2^-24 */
        float magnitude;
        memcpy(&magnitude, &wide, 4);
        return (uint16_t)(sign | (uint16_t)std::nearbyint(magnitude * 0x1p24f));
    }
    wide += 0xFFFu + (wide >> 13 & 1u);
    return (uint16_t)(sign | (uint16_t)((wide - 0x38000000u) >> 13));
}

/* ================================================================================================================
   >>mma
   ================================================================================================================ */

struct mma_call {
    float *c;
    const uint32_t *a, *b;
    bool bf16;
};

template <float (*widen)(uint16_t)> static void gather(const warp *w, float (&a)[16][16], float (&b)[16][8]) {
    for (int lane = 0; lane < 32; lane++) {
        const mma_call *call = (const mma_call *)w->arguments[lane];
        const int row = lane / 4, at = 2 * (lane % 4);
        for (int i = 0; i < 4; i++) {
            a[row + 8 * (i % 2)][at + 8 * (i / 2)] = widen((uint16_t)call->a[i]);
            a[row + 8 * (i % 2)][at + 8 * (i / 2) + 1] = widen((uint16_t)(call->a[i] >> 16));
        }
        for (int i = 0; i < 2; i++) {
            b[at + 8 * i][row] = widen((uint16_t)call->b[i]);
            b[at + 8 * i + 1][row] = widen((uint16_t)(call->b[i] >> 16));
        }
    }
}

/* A vector of the compiler's own, since gcc, left alone, makes vectors along k and takes twice as long. */
typedef float row_of_8 __attribute__((vector_size(32)));

static void mma_work(warp *w, int) {
    float a[16][16], b[16][8], c[16][8];
    if (((const mma_call *)w->arguments[0])->bf16) gather<cuda_emu_bf16_to_float>(w, a, b);
    else gather<widen_half>(w, a, b);
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++)
            c[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2] = ((const mma_call *)w->arguments[lane])->c[i];
    for (int i = 0; i < 16; i++) {
        row_of_8 sum, row;
        memcpy(&sum, c[i], sizeof sum);
        for (int k = 0; k < 16; k++) {
            memcpy(&row, b[k], sizeof row);
            sum += a[i][k] * row;
        }
        memcpy(c[i], &sum, sizeof sum);
    }
    for (int lane = 0; lane < 32; lane++) {
        const mma_call *call = (const mma_call *)w->arguments[lane];
        for (int i = 0; i < 4; i++) call->c[i] = c[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
    }
    counts->mma++;
}

void cuda_emu_mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool bf16) {
    mma_call call = {c, a, b, bf16};
    meet(MMA, 0xFFFFFFFFu, &call, mma_work);
}

#include "hopper_emu.h"
