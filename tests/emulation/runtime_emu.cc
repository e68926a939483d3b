/* runtime_emu.cc - the CUDA runtime without a device; see cuda_emu.h. Sections: >>calls >>memory >>queues >>policies
   >>devices >>allocation >>copies >>streams >>events >>launch >>control. */

#include "cuda_emu_private.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <set>

typedef cuda_emu_operation_ref operation_ref;

#if EMU_ASAN
/* Programs under the emulation allocate so often that noting the callers takes a quarter of what some tests take, and
   freed memory that stays out of use is memory that the kernel must provide. The environment prevails. */
extern "C" const char *__asan_default_options();
extern "C" const char *__asan_default_options() { return "malloc_context_size=2:quarantine_size_mb=16"; }
#endif

/* ================================================================================================================
   >>calls    what every call does first and last
   ================================================================================================================ */

static const int MOST_DEVICES = 16;
static const size_t DEFAULT_MEMORY = (size_t)80 << 30;
static const size_t GREATEST_PITCH = INT32_MAX;

struct CUstream_st {
    int device = 0, priority = 0;
    bool blocking = true; /* takes part in the order of the legacy stream */
    bool legacy = false, destroyed = false;
    std::deque<operation_ref> queue;
    operation_ref last; /* the last one issued, done or not */
    double clock = 0.0; /* virtual end of the last one that ran */
};

struct device_state {
    cudaError_t sticky = cudaSuccess;
    CUstream_st legacy;
    size_t used = 0;
    int64_t launches = 0;    /* issued, and not run */
    double room_since = 0.0; /* virtual end of the launch that ran last */
    double latency = 0.0;    /* from an issue to the earliest start */
    unsigned peers = 0;      /* whose memory it has access to */
};

static device_state devices[MOST_DEVICES];
static int n_devices = 1, current_device;
static bool peer_access_possible = true;
static size_t memory_limit = DEFAULT_MEMORY;
static cudaError_t last_error;
static bool in_host_function;

void (*cuda_emu_progress)();

static int64_t n_calls, calls_to_failure, kernels_to_failure;
static std::map<std::string, int64_t> calls_by_name;
static std::map<const void *, int64_t> launches;
static cudaError_t call_failure, kernel_failure;
static bool failed_as_planned;

cudaError_t cuda_emu_begin_call(const char *name, int device) {
    n_calls++;
    calls_by_name[name]++;
    if (cuda_emu_progress) cuda_emu_progress();
    if (in_host_function) {
        cuda_emu_add_fault(CUDA_EMU_HOST_FUNCTION, "%s is called by a host function", name);
        return cudaErrorNotPermitted;
    }
    if (calls_to_failure > 0 && --calls_to_failure == 0) {
        failed_as_planned = true;
        return call_failure;
    }
    return device >= 0 ? devices[device].sticky : cudaSuccess;
}

cudaError_t cuda_emu_finish_call(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

/* The first is for calls that do nothing when they fail, the second for those that wait, free or destroy: they go on
   and return `begun` in the end. */
#define BEGIN_CALL(device)                                                 \
    do {                                                                   \
        const cudaError_t begun = cuda_emu_begin_call(__func__, (device)); \
        if (begun != cudaSuccess) return cuda_emu_finish_call(begun);      \
    } while (0)

#define BEGIN_FINAL_CALL(device)                                       \
    const cudaError_t begun = cuda_emu_begin_call(__func__, (device)); \
    if (in_host_function) return cuda_emu_finish_call(begun)

#define finish_call cuda_emu_finish_call

int cuda_emu_current_device() { return current_device; }

const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
#define CUDA_EMU_ERROR(name, number) \
    case name: return #name;
        CUDA_EMU_ERRORS(CUDA_EMU_ERROR)
#undef CUDA_EMU_ERROR
    }
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

cudaError_t cudaPeekAtLastError() {
    return devices[current_device].sticky != cudaSuccess ? devices[current_device].sticky : last_error;
}

cudaError_t cudaGetLastError() {
    const cudaError_t error = cudaPeekAtLastError();
    last_error = cudaSuccess;
    return error;
}

/* ================================================================================================================
   >>memory    what lies where
   ================================================================================================================ */

/* The place of memory: the number of a device, or one of these. */
enum {
    PAGEABLE = -1, /* of the host, unknown to CUDA */
    PINNED = -2,
    OUTSIDE = -3 /* begins in a block and leaves it */
};

struct memory_block {
    size_t bytes;
    int place; /* a device or PINNED */
    bool sparse;
};

/* By first byte. Never freed: other objects may outlive it. */
typedef std::map<uintptr_t, memory_block> block_map;
static block_map &blocks = *new block_map();
static const block_map::value_type *recent_block; /* the last one found: kernels come back to it */
static int running_device;                        /* whose operation runs */

#define GUARD (EMU_ASAN ? 0u : 256u) /* AddressSanitizer has bands of its own */
#define GUARD_BYTE 0xA5

static const block_map::value_type *find_block(uintptr_t at) {
    if (recent_block && at - recent_block->first < recent_block->second.bytes) return recent_block;
    auto next = blocks.upper_bound(at);
    if (next == blocks.begin()) return nullptr;
    --next;
    if (at - next->first >= next->second.bytes) return nullptr;
    return recent_block = &*next;
}

static int place_of(const void *memory, size_t bytes) {
    const block_map::value_type *block = find_block((uintptr_t)memory);
    if (!block) return PAGEABLE;
    return bytes <= block->second.bytes - ((uintptr_t)memory - block->first) ? block->second.place : OUTSIDE;
}

static bool has_access(int device, int place) {
    return place == PINNED || place == device || (place >= 0 && (devices[device].peers >> place & 1u));
}

bool cuda_emu_check_range(const void *first, size_t bytes, int device, const char *what) {
    const int place = place_of(first, bytes);
    if (bytes == 0 || has_access(device, place)) return true;
    if (place >= 0)
        cuda_emu_add_fault(CUDA_EMU_PEER, "%s on device %d uses memory of device %d without peer access", what, device,
                           place);
    else
        cuda_emu_add_fault(CUDA_EMU_OUT_OF_BOUNDS, "%s uses %llu bytes of global memory outside every allocation", what,
                           (unsigned long long)bytes);
    return false;
}

bool cuda_emu_check_global(const void *address, int bytes) {
    const uintptr_t at = (uintptr_t)address;
    if (at % (unsigned)bytes != 0) {
        cuda_emu_add_fault(CUDA_EMU_MISALIGNED, "access of %d bytes to global memory at an address that ends in %x",
                           bytes, (unsigned)(at % 256));
        return false;
    }
    return cuda_emu_check_range(address, (size_t)bytes, running_device, "an access");
}

/* ================================================================================================================
   >>queues    what is issued, and how it runs
   ================================================================================================================ */

/* Every stream that lives or still has work; those that are gone, so that their addresses do not come again. */
static std::vector<CUstream_st *> &streams = *new std::vector<CUstream_st *>();
static std::vector<CUstream_st *> &gone_streams = *new std::vector<CUstream_st *>();
static size_t most_streams; /* alive at once, for cuda_emu_each_policy */
static uint64_t n_issued;
static int64_t queue_limit; /* launches of a device, 0: none */
static double host_time, timeout = 60.0;
static std::function<double(const cuda_emu_work &)> &rule = *new std::function<double(const cuda_emu_work &)>();

static CUstream_st *legacy_of(int device) {
    CUstream_st *stream = &devices[device].legacy;
    if (!stream->legacy) {
        stream->legacy = true;
        stream->device = device;
        streams.push_back(stream);
    }
    return stream;
}

CUstream_st *cuda_emu_find_stream(cudaStream_t handle) {
    if (!handle || handle == cudaStreamLegacy) return legacy_of(current_device);
    if (std::find(streams.begin(), streams.end(), handle) != streams.end() && !handle->destroyed) return handle;
    cuda_emu_add_fault(CUDA_EMU_HANDLE, "a stream that does not exist");
    return nullptr;
}

int cuda_emu_device_of(const CUstream_st *stream) { return stream->device; }

/* The device whose errors a call on the stream returns. */
static int device_of(cudaStream_t handle) {
    return std::find(streams.begin(), streams.end(), handle) != streams.end() ? handle->device : current_device;
}

static double default_seconds(const cuda_emu_work &work) {
    const bool host = work.from < 0 || work.to < 0;
    switch (work.kind) {
        case CUDA_EMU_WORK_KERNEL: return 2e-6 + 1e-12 * (double)work.blocks * (double)work.threads;
        case CUDA_EMU_WORK_PRODUCT: return 2e-6 + work.flops / 1e14;
        case CUDA_EMU_WORK_COPY: return 5e-6 + (double)work.bytes / (host ? 25e9 : work.from != work.to ? 100e9 : 1e12);
        case CUDA_EMU_WORK_SET: return 2e-6 + (double)work.bytes / 1e12;
        case CUDA_EMU_WORK_TRANSFER: return 5e-6 + (double)work.bytes / 100e9;
        case CUDA_EMU_WORK_HOST: return 5e-6;
        case CUDA_EMU_WORK_DELAY:
        case CUDA_EMU_WORK_ORDER: break;
    }
    return 0.0;
}

static double seconds_of(const cuda_emu_work &work) {
    if (work.kind == CUDA_EMU_WORK_ORDER || work.kind == CUDA_EMU_WORK_DELAY) return 0.0;
    return rule ? rule(work) : default_seconds(work);
}

/* Work in the legacy stream waits for all blocking streams of its device, and theirs for it. */
static void add_legacy_order(const CUstream_st *stream, cuda_emu_operation *operation) {
    if (!stream->blocking) return;
    for (const CUstream_st *other : streams)
        if (other != stream && other->device == stream->device && other->blocking &&
            (stream->legacy || other->legacy) && other->last && !other->last->done)
            operation->after.push_back(other->last);
}

static bool is_launch(const cuda_emu_operation &operation) {
    return operation.work.kind == CUDA_EMU_WORK_KERNEL || operation.work.kind == CUDA_EMU_WORK_PRODUCT;
}

static void run_while_host_goes_on();

void cuda_emu_issue(CUstream_st *stream, const operation_ref &operation) {
    operation->stream = stream;
    operation->number = ++n_issued;
    operation->host_time = host_time + devices[stream->device].latency;
    operation->work.device = stream->device;
    operation->seconds += seconds_of(operation->work);
    add_legacy_order(stream, operation.get());
    if (is_launch(*operation)) devices[stream->device].launches++;
    stream->queue.push_back(operation);
    stream->last = operation;
    run_while_host_goes_on();
}

static bool can_run(const cuda_emu_operation &operation) {
    for (const operation_ref &one : operation.after)
        if (!one->done) return false;
    return operation.begin || !operation.ready || devices[operation.stream->device].sticky != cudaSuccess ||
           operation.ready();
}

static void end_operation(cuda_emu_operation *operation) {
    if (is_launch(*operation)) devices[operation->stream->device].launches--;
    operation->done = true;
    operation->after.clear(); /* chains of records must not keep one another alive */
    operation->begin = nullptr;
    operation->run = nullptr;
    operation->ready = nullptr;
    operation->uses.clear();
}

static void find_start(const CUstream_st *stream, cuda_emu_operation *operation) {
    operation->start = std::max({stream->clock, operation->host_time, operation->not_before});
    for (const operation_ref &one : operation->after) operation->start = std::max(operation->start, one->end);
}

static void run_first_of(CUstream_st *stream) {
    const operation_ref operation = stream->queue.front();
    device_state *device = &devices[stream->device];
    find_start(stream, operation.get());
    if (operation->begin && device->sticky == cudaSuccess) {
        operation->begin();
        operation->begin = nullptr;
        return;
    }
    stream->queue.pop_front();
    stream->clock = operation->end = operation->start + operation->seconds;
    if (is_launch(*operation)) device->room_since = operation->end;
    running_device = stream->device;
    if (device->sticky == cudaSuccess && operation->fails != cudaSuccess) device->sticky = operation->fails;
    if (device->sticky == cudaSuccess && operation->run) operation->run();
    end_operation(operation.get());
}

/* ================================================================================================================
   >>policies    which of the possible orders
   ================================================================================================================ */

static cuda_emu_policy policy = CUDA_EMU_IN_ORDER;
static uint64_t policy_choice, random_state;
static uint64_t eagerness; /* of a random device: how likely it does something before the host goes on, of 8 */
static std::string &policy_text = *new std::string();

static uint64_t random_number() {
    uint64_t z = random_state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Number 0: the legacy streams. From 1 on: the others, as they were created. */
static bool is_late(const CUstream_st *stream) {
    uint64_t number = 0;
    if (stream->legacy) return policy_choice == 0;
    for (const CUstream_st *one : streams) {
        if (!one->legacy && !one->destroyed) number++;
        if (one == stream) return number == policy_choice;
    }
    return false;
}

/* Whether a should rather run than b. */
static bool comes_before(const CUstream_st *a, const CUstream_st *b) {
    if (policy == CUDA_EMU_NEWEST_FIRST) return a->last->number > b->last->number;
    if (policy == CUDA_EMU_STREAM_LATE && is_late(a) != is_late(b)) return is_late(b);
    return a->queue.front()->number < b->queue.front()->number;
}

/* The stream that the operation waits for first, if that can go on. */
static CUstream_st *choose_needed(const cuda_emu_operation *target) {
    for (;;) {
        const cuda_emu_operation *first = target->stream->queue.front().get(), *missing = nullptr;
        for (const operation_ref &one : first->after)
            if (!one->done) missing = one.get();
        if (!missing) return can_run(*first) ? target->stream : nullptr;
        target = missing;
    }
}

/* The stream whose first operation runs next, NULL if none can. target: what the host waits for, or NULL. */
static CUstream_st *choose(const cuda_emu_operation *target) {
    std::vector<CUstream_st *> able;
    CUstream_st *best = policy == CUDA_EMU_LAZY && target ? choose_needed(target) : nullptr;
    if (best) return best;
    for (CUstream_st *one : streams)
        if (!one->queue.empty() && can_run(*one->queue.front())) able.push_back(one);
    if (able.empty()) return nullptr;
    if (policy == CUDA_EMU_RANDOM) return able[random_number() % able.size()];
    for (CUstream_st *one : able)
        if (!best || comes_before(one, best)) best = one;
    return best;
}

static void run_while_host_goes_on() {
    CUstream_st *next;
    if (policy != CUDA_EMU_IMMEDIATE && policy != CUDA_EMU_RANDOM) return;
    while ((policy == CUDA_EMU_IMMEDIATE || random_number() % 8 < eagerness) && (next = choose(nullptr)) != nullptr)
        run_first_of(next);
}

static bool waits_for_others() {
    for (const CUstream_st *one : streams)
        if (!one->queue.empty() && one->queue.front()->external) return true;
    return false;
}

/* Nothing moves any more. */
static void drop_all() {
    for (CUstream_st *one : streams) {
        if (!one->queue.empty()) devices[one->device].sticky = cudaErrorLaunchTimeout;
        for (const operation_ref &dropped : one->queue) end_operation(dropped.get());
        one->queue.clear();
    }
}

typedef std::chrono::steady_clock::time_point moment;

/* While the host waits: runs an operation, or lets other processes move. False: what it waits for cannot come. */
static bool go_on(const cuda_emu_operation *target, moment *since) {
    CUstream_st *next = choose(target);
    if (next) {
        run_first_of(next);
        *since = std::chrono::steady_clock::now();
        return true;
    }
    const std::chrono::duration<double> idle = std::chrono::steady_clock::now() - *since;
    if (cuda_emu_progress) cuda_emu_progress();
    if (!waits_for_others() || idle.count() > timeout) return false;
    usleep(100);
    return true;
}

void cuda_emu_wait_for(const operation_ref &target) {
    moment since = std::chrono::steady_clock::now();
    if (in_host_function) return;
    while (target && !target->done) {
        if (go_on(target.get(), &since)) continue;
        cuda_emu_add_fault(CUDA_EMU_DEADLOCK, "the host waits for %s on device %d, whose stream stands still at %s",
                           target->work.name.c_str(), target->work.device,
                           target->stream->queue.front()->work.name.c_str());
        drop_all();
    }
    if (target) host_time = std::max(host_time, target->end);
}

/* The host's time then is at least that at which the launch that made room had run. */
cudaError_t cuda_emu_wait_for_room(int device, const char *name) {
    moment since = std::chrono::steady_clock::now();
    while (queue_limit > 0 && devices[device].launches >= queue_limit) {
        if (go_on(nullptr, &since)) {
            if (devices[device].launches < queue_limit) host_time = std::max(host_time, devices[device].room_since);
            continue;
        }
        cuda_emu_add_fault(CUDA_EMU_DEADLOCK, "a launch waits for ever: %s, for room on device %d, which holds %lld",
                           name, device, (long long)devices[device].launches);
        drop_all();
    }
    return devices[device].sticky;
}

/* In the order of creation, so that a stream which a policy wants late is not waited for first of all. */
void cuda_emu_wait_for_device(int device) {
    std::vector<operation_ref> targets;
    for (const CUstream_st *one : streams)
        if (one->device == device && one->last) targets.push_back(one->last);
    for (const operation_ref &one : targets) cuda_emu_wait_for(one);
}

/* Answers a query. If there is work left, one piece of it runs after the look. */
static cudaError_t query(const operation_ref &target) {
    if (!target) return cudaSuccess;
    if (target->done) {
        host_time = std::max(host_time, target->end); /* what the host has seen end is past */
        return cudaSuccess;
    }
    CUstream_st *next = choose(target.get());
    if (next) run_first_of(next);
    else if (waits_for_others()) usleep(20);
    return cudaErrorNotReady;
}

/* ================================================================================================================
   >>devices
   ================================================================================================================ */

static bool is_device(int device) { return device >= 0 && device < n_devices; }

cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }

cudaError_t cudaGetDeviceCount(int *count) {
    BEGIN_CALL(-1);
    *count = n_devices;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    BEGIN_CALL(-1);
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    BEGIN_CALL(-1);
    if (!is_device(device)) return finish_call(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}

static int n_processors = 4;
static int other_arch[MOST_DEVICES];

static int arch_of(int device) { return other_arch[device] != 0 ? other_arch[device] : cuda_emu_arch(); }

void cuda_emu_set_processors(int n) { n_processors = n; }

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    BEGIN_CALL(-1);
    if (!is_device(device)) return finish_call(cudaErrorInvalidDevice);
    switch (attribute) {
        case cudaDevAttrMaxPitch: *value = (int)GREATEST_PITCH; return cudaSuccess;
        case cudaDevAttrMultiProcessorCount: *value = n_processors; return cudaSuccess;
        case cudaDevAttrConcurrentKernels:
        case cudaDevAttrUnifiedAddressing: *value = 1; return cudaSuccess;
        case cudaDevAttrAsyncEngineCount: *value = 2; return cudaSuccess;
        case cudaDevAttrComputeCapabilityMajor: *value = arch_of(device) / 10; return cudaSuccess;
        case cudaDevAttrComputeCapabilityMinor: *value = arch_of(device) % 10; return cudaSuccess;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = cuda_emu_most_shared_memory(); return cudaSuccess;
    }
    return finish_call(cudaErrorInvalidValue);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    BEGIN_CALL(current_device);
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    BEGIN_CALL(-1);
    if (!is_device(device) || !is_device(peer)) return finish_call(cudaErrorInvalidDevice);
    *can = device != peer && peer_access_possible;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    BEGIN_CALL(current_device);
    if (flags != 0) return finish_call(cudaErrorInvalidValue);
    if (!is_device(peer) || peer == current_device) return finish_call(cudaErrorInvalidDevice);
    if (!peer_access_possible) return finish_call(cudaErrorPeerAccessUnsupported);
    if (devices[current_device].peers >> peer & 1u) return finish_call(cudaErrorPeerAccessAlreadyEnabled);
    devices[current_device].peers |= 1u << peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceDisablePeerAccess(int peer) {
    BEGIN_CALL(current_device);
    if (!is_device(peer)) return finish_call(cudaErrorInvalidDevice);
    if (!(devices[current_device].peers >> peer & 1u)) return finish_call(cudaErrorPeerAccessNotEnabled);
    devices[current_device].peers &= ~(1u << peer);
    return cudaSuccess;
}

/* The error that a waiting call returns: the one it began with, or what the work that it waited for has done. */
static cudaError_t after_wait(cudaError_t begun, int device) {
    return finish_call(begun != cudaSuccess ? begun : devices[device].sticky);
}

cudaError_t cudaDeviceSynchronize() {
    BEGIN_FINAL_CALL(current_device);
    cuda_emu_wait_for_device(current_device);
    return after_wait(begun, current_device);
}

/* ================================================================================================================
   >>allocation
   ================================================================================================================ */

static void add_block(void *memory, size_t bytes, int place, bool is_sparse) {
    blocks[(uintptr_t)memory] = {bytes, place, is_sparse};
    recent_block = nullptr;
}

static cudaError_t allocate(void **memory, size_t bytes, int place) {
    void *block = nullptr;
    *memory = nullptr;
    if (bytes == 0) return cudaSuccess;
    if (place >= 0 && (bytes > memory_limit || devices[place].used > memory_limit - bytes))
        return finish_call(cudaErrorMemoryAllocation);
    if (bytes > SIZE_MAX / 2 || posix_memalign(&block, 256, bytes + 2 * GUARD) != 0)
        return finish_call(cudaErrorMemoryAllocation);
    memset(block, GUARD_BYTE, bytes + 2 * GUARD);
    *memory = (char *)block + GUARD;
    memset(*memory, 0xFF, bytes);
    add_block(*memory, bytes, place, false);
    if (place >= 0) devices[place].used += bytes;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **memory, size_t bytes) {
    BEGIN_CALL(current_device);
    if (!memory) return finish_call(cudaErrorInvalidValue);
    return allocate(memory, bytes, current_device);
}

cudaError_t cudaMallocHost(void **memory, size_t bytes) {
    BEGIN_CALL(current_device);
    if (!memory) return finish_call(cudaErrorInvalidValue);
    return allocate(memory, bytes, PINNED);
}

cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned flags) {
    BEGIN_CALL(current_device);
    if (!memory || flags > 7) return finish_call(cudaErrorInvalidValue);
    return allocate(memory, bytes, PINNED);
}

void *cuda_emu_sparse_malloc(size_t bytes, bool pinned) {
    void *block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (block == MAP_FAILED) return nullptr;
    add_block(block, bytes, pinned ? (int)PINNED : current_device, true);
    return block;
}

/* Queued work that uses the block, or none. */
static operation_ref find_user(const void *memory, size_t bytes) {
    const uintptr_t first = (uintptr_t)memory;
    for (const CUstream_st *stream : streams)
        for (const operation_ref &operation : stream->queue)
            for (const cuda_emu_range &range : operation->uses)
                if ((uintptr_t)range.first < first + bytes && (uintptr_t)range.first + range.bytes > first)
                    return operation;
    return nullptr;
}

/* A fault for every piece of work that still uses the block; then it runs, so that it finds its memory. */
static void expect_unused(const void *memory, size_t bytes, const char *what) {
    for (operation_ref user; (user = find_user(memory, bytes)) != nullptr; cuda_emu_wait_for(user))
        cuda_emu_add_fault(CUDA_EMU_IN_USE, "%s of memory that %s, queued on device %d, uses", what,
                           user->work.name.c_str(), user->work.device);
}

static void check_guards(const void *memory, size_t bytes) {
    const unsigned char *block = (const unsigned char *)memory - GUARD;
    for (size_t i = 0; i < GUARD; i++) {
        if (block[i] == GUARD_BYTE && block[GUARD + bytes + i] == GUARD_BYTE) continue;
        cuda_emu_add_fault(CUDA_EMU_OUT_OF_BOUNDS, "a block of %llu bytes was written to outside its bounds",
                           (unsigned long long)bytes);
        return;
    }
}

static void release(void *memory) {
    const memory_block block = blocks[(uintptr_t)memory];
    blocks.erase((uintptr_t)memory);
    recent_block = nullptr;
    if (block.sparse) {
        munmap(memory, block.bytes);
        return;
    }
    if (block.place >= 0) devices[block.place].used -= block.bytes;
    check_guards(memory, block.bytes);
    free((unsigned char *)memory - GUARD);
}

cudaError_t cudaFree(void *memory) {
    BEGIN_FINAL_CALL(current_device);
    if (!memory) return finish_call(begun);
    const auto found = blocks.find((uintptr_t)memory);
    if (found == blocks.end() || found->second.place == PINNED) return finish_call(cudaErrorInvalidValue);
    const int device = found->second.place;
    cuda_emu_wait_for_device(device);
    expect_unused(memory, found->second.bytes, "cudaFree");
    release(memory);
    return after_wait(begun, device);
}

cudaError_t cudaFreeHost(void *memory) {
    BEGIN_FINAL_CALL(current_device);
    if (!memory) return finish_call(begun);
    const auto found = blocks.find((uintptr_t)memory);
    if (found == blocks.end() || found->second.place != PINNED) return finish_call(cudaErrorInvalidValue);
    expect_unused(memory, found->second.bytes, "cudaFreeHost");
    release(memory);
    return finish_call(begun);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    BEGIN_CALL(current_device);
    *total_bytes = memory_limit;
    *free_bytes = memory_limit > devices[current_device].used ? memory_limit - devices[current_device].used : 0;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *memory) {
    BEGIN_CALL(current_device);
    const int place = place_of(memory, 1);
    void *address = const_cast<void *>(memory);
    if (place == PAGEABLE) *attributes = {cudaMemoryTypeUnregistered, -2, nullptr, address};
    else if (place == PINNED) *attributes = {cudaMemoryTypeHost, current_device, address, address};
    else *attributes = {cudaMemoryTypeDevice, place, address, nullptr};
    return cudaSuccess;
}

/* ================================================================================================================
   >>copies    and fills
   ================================================================================================================ */

static operation_ref make_operation(cuda_emu_work_kind kind, const char *name) {
    operation_ref operation = std::make_shared<cuda_emu_operation>();
    operation->work.kind = kind;
    operation->work.name = name;
    return operation;
}

/* `height` rows of `width` bytes. */
struct rows {
    char *first;
    size_t pitch, width, height;

    size_t span() const { return (height - 1) * pitch + width; }
};

static rows rows_at(const void *first, size_t pitch, size_t width, size_t height) {
    return {static_cast<char *>(const_cast<void *>(first)), pitch, width, height};
}

static void copy_rows(const rows &to, const rows &from) {
    for (size_t i = 0; i < to.height; i++) memmove(to.first + i * to.pitch, from.first + i * from.pitch, to.width);
}

static bool has_kind(int place, bool on_device) {
    return on_device ? place >= 0 : place == PAGEABLE || place == PINNED;
}

/* Returns whether the places of the two ends are what the kind says; else it is a fault. */
static bool check_kind(const char *name, cudaMemcpyKind kind, int to, int from) {
    if (to == OUTSIDE || from == OUTSIDE) {
        cuda_emu_add_fault(CUDA_EMU_OUT_OF_BOUNDS, "%s leaves the block of its %s", name,
                           to == OUTSIDE ? "destination" : "source");
        return false;
    }
    if (kind == cudaMemcpyDefault) return true;
    if (has_kind(to, kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) &&
        has_kind(from, kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice))
        return true;
    cuda_emu_add_fault(CUDA_EMU_COPY, "%s of kind %d to %s from %s memory", name, (int)kind,
                       to >= 0 ? "device" : "host", from >= 0 ? "device" : "host");
    return false;
}

/* Memory that was freed after the issue is gone. Of pageable memory nothing is known. */
static bool still_there(const rows &r, int place, const char *name) {
    if (place == PAGEABLE || place_of(r.first, r.span()) == place) return true;
    cuda_emu_add_fault(CUDA_EMU_OUT_OF_BOUNDS, "%s runs when its memory is freed", name);
    return false;
}

/* waits: as cudaMemcpy does, and not as cudaMemcpyAsync. */
static cudaError_t copy(const char *name, const rows &to, const rows &from, cudaMemcpyKind kind, cudaStream_t handle,
                        bool waits) {
    CUstream_st *stream = cuda_emu_find_stream(handle);
    if (!stream) return finish_call(cudaErrorInvalidResourceHandle);
    if (to.width == 0 || to.height == 0) return cudaSuccess;
    if (to.width > to.pitch || to.width > from.pitch) return finish_call(cudaErrorInvalidPitchValue);
    const int to_place = place_of(to.first, to.span()), from_place = place_of(from.first, from.span());
    if (!check_kind(name, kind, to_place, from_place)) return finish_call(cudaErrorInvalidValue);
    const operation_ref operation = make_operation(CUDA_EMU_WORK_COPY, name);
    operation->work.bytes = (int64_t)(to.width * to.height);
    operation->work.to = to_place >= 0 ? to_place : -1;
    operation->work.from = from_place >= 0 ? from_place : -1;
    operation->uses.push_back({to.first, to.span()});
    if (from_place == PAGEABLE && to_place != PAGEABLE) {
        if (waits) cuda_emu_wait_for(stream->last);
        const auto bytes = std::make_shared<std::vector<char>>(to.width * to.height);
        const rows staged = rows_at(bytes->data(), to.width, to.width, to.height);
        copy_rows(staged, from);
        operation->run = [name, to, to_place, staged, bytes] {
            if (still_there(to, to_place, name)) copy_rows(to, staged);
        };
    } else {
        operation->uses.push_back({from.first, from.span()});
        operation->run = [name, to, to_place, from, from_place] {
            if (still_there(to, to_place, name) && still_there(from, from_place, name)) copy_rows(to, from);
        };
    }
    cuda_emu_issue(stream, operation);
    const bool pinned = to_place == PINNED || from_place == PINNED;
    if (to_place != PAGEABLE && !(waits && pinned)) return cudaSuccess;
    cuda_emu_wait_for(operation);
    return after_wait(cudaSuccess, stream->device);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    BEGIN_CALL(current_device);
    return copy("cudaMemcpy", rows_at(to, bytes, bytes, 1), rows_at(from, bytes, bytes, 1), kind, nullptr, true);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    BEGIN_CALL(device_of(stream));
    return copy("cudaMemcpyAsync", rows_at(to, bytes, bytes, 1), rows_at(from, bytes, bytes, 1), kind, stream, false);
}

static bool are_pitches(size_t to_pitch, size_t from_pitch) {
    return to_pitch <= GREATEST_PITCH && from_pitch <= GREATEST_PITCH;
}

cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                         cudaMemcpyKind kind) {
    BEGIN_CALL(current_device);
    if (!are_pitches(to_pitch, from_pitch)) return finish_call(cudaErrorInvalidPitchValue);
    return copy("cudaMemcpy2D", rows_at(to, to_pitch, width, height), rows_at(from, from_pitch, width, height), kind,
                nullptr, true);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
    BEGIN_CALL(device_of(stream));
    if (!are_pitches(to_pitch, from_pitch)) return finish_call(cudaErrorInvalidPitchValue);
    return copy("cudaMemcpy2DAsync", rows_at(to, to_pitch, width, height), rows_at(from, from_pitch, width, height),
                kind, stream, false);
}

/* Also whether each end is on the device that is said. */
static cudaError_t copy_peer(const char *name, void *to, int to_device, const void *from, int from_device, size_t bytes,
                             cudaStream_t stream) {
    if (!is_device(to_device) || !is_device(from_device)) return finish_call(cudaErrorInvalidDevice);
    if (bytes > 0 && (place_of(to, 1) != to_device || place_of(from, 1) != from_device)) {
        cuda_emu_add_fault(CUDA_EMU_COPY, "%s from device %d to %d, with memory elsewhere", name, from_device,
                           to_device);
        return finish_call(cudaErrorInvalidValue);
    }
    return copy(name, rows_at(to, bytes, bytes, 1), rows_at(from, bytes, bytes, 1), cudaMemcpyDeviceToDevice, stream,
                false);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                cudaStream_t stream) {
    BEGIN_CALL(device_of(stream));
    return copy_peer("cudaMemcpyPeerAsync", to, to_device, from, from_device, bytes, stream);
}

/* Everything on both devices comes before it, and it before everything that follows. */
cudaError_t cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t bytes) {
    BEGIN_CALL(current_device);
    if (is_device(to_device)) cuda_emu_wait_for_device(to_device);
    if (is_device(from_device)) cuda_emu_wait_for_device(from_device);
    const cudaError_t error = copy_peer("cudaMemcpyPeer", to, to_device, from, from_device, bytes, nullptr);
    cuda_emu_wait_for_device(current_device);
    return error;
}

static cudaError_t fill(const char *name, const rows &to, int value, cudaStream_t handle) {
    CUstream_st *stream = cuda_emu_find_stream(handle);
    if (!stream) return finish_call(cudaErrorInvalidResourceHandle);
    if (to.width == 0 || to.height == 0) return cudaSuccess;
    if (to.width > to.pitch) return finish_call(cudaErrorInvalidValue);
    const int place = place_of(to.first, to.span());
    if (place == PAGEABLE) {
        cuda_emu_add_fault(CUDA_EMU_COPY, "%s of host memory", name);
        return finish_call(cudaErrorInvalidValue);
    }
    if (!cuda_emu_check_range(to.first, to.span(), stream->device, name)) return finish_call(cudaErrorInvalidValue);
    const operation_ref operation = make_operation(CUDA_EMU_WORK_SET, name);
    operation->work.bytes = (int64_t)(to.width * to.height);
    operation->uses.push_back({to.first, to.span()});
    operation->run = [name, to, place, value] {
        if (!still_there(to, place, name)) return;
        for (size_t i = 0; i < to.height; i++) memset(to.first + i * to.pitch, value, to.width);
    };
    cuda_emu_issue(stream, operation);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    BEGIN_CALL(current_device);
    return fill("cudaMemset", rows_at(to, bytes, bytes, 1), value, nullptr);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    BEGIN_CALL(device_of(stream));
    return fill("cudaMemsetAsync", rows_at(to, bytes, bytes, 1), value, stream);
}

cudaError_t cudaMemset2D(void *to, size_t pitch, int value, size_t width, size_t height) {
    BEGIN_CALL(current_device);
    if (!are_pitches(pitch, pitch)) return finish_call(cudaErrorInvalidPitchValue);
    return fill("cudaMemset2D", rows_at(to, pitch, width, height), value, nullptr);
}

cudaError_t cudaMemset2DAsync(void *to, size_t pitch, int value, size_t width, size_t height, cudaStream_t stream) {
    BEGIN_CALL(device_of(stream));
    if (!are_pitches(pitch, pitch)) return finish_call(cudaErrorInvalidPitchValue);
    return fill("cudaMemset2DAsync", rows_at(to, pitch, width, height), value, stream);
}

/* ================================================================================================================
   >>streams
   ================================================================================================================ */

static size_t live_streams() {
    size_t n = 0;
    for (const CUstream_st *one : streams) n += !one->legacy && !one->destroyed;
    return n;
}

static cudaError_t create_stream(cudaStream_t *stream, unsigned flags, int priority) {
    if (!stream || flags > cudaStreamNonBlocking) return finish_call(cudaErrorInvalidValue);
    CUstream_st *one = new CUstream_st();
    one->device = current_device;
    one->blocking = flags == cudaStreamDefault;
    one->priority = priority;
    (void)legacy_of(current_device);
    streams.push_back(one);
    most_streams = std::max(most_streams, live_streams());
    *stream = one;
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    BEGIN_CALL(current_device);
    return create_stream(stream, cudaStreamDefault, 0);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    BEGIN_CALL(current_device);
    return create_stream(stream, flags, 0);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    BEGIN_CALL(current_device);
    return create_stream(stream, flags, priority);
}

/* Forgets streams that are destroyed and have finished their work. */
static void bury_streams() {
    for (size_t i = streams.size(); i-- > 0;) {
        if (!streams[i]->destroyed || !streams[i]->queue.empty()) continue;
        gone_streams.push_back(streams[i]);
        streams.erase(streams.begin() + (std::ptrdiff_t)i);
    }
}

/* What was queued still runs. */
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    BEGIN_FINAL_CALL(device_of(handle));
    CUstream_st *stream = cuda_emu_find_stream(handle);
    if (!stream || stream->legacy) return finish_call(cudaErrorInvalidResourceHandle);
    stream->destroyed = true;
    bury_streams();
    return finish_call(begun);
}

/* Returns what a wait for the stream waits for: for the legacy stream also all that it would wait for. */
static operation_ref end_of(CUstream_st *stream) {
    if (stream->legacy) cuda_emu_issue(stream, make_operation(CUDA_EMU_WORK_ORDER, "cudaStreamSynchronize"));
    return stream->last;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    BEGIN_FINAL_CALL(device_of(handle));
    CUstream_st *stream = cuda_emu_find_stream(handle);
    if (!stream) return finish_call(cudaErrorInvalidResourceHandle);
    cuda_emu_wait_for(end_of(stream));
    return after_wait(begun, stream->device);
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
    BEGIN_CALL(device_of(handle));
    CUstream_st *stream = cuda_emu_find_stream(handle);
    if (!stream) return finish_call(cudaErrorInvalidResourceHandle);
    return finish_call(query(stream->last));
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void *user) {
    BEGIN_CALL(device_of(handle));
    CUstream_st *stream = cuda_emu_find_stream(handle);
    if (!stream) return finish_call(cudaErrorInvalidResourceHandle);
    if (!function) return finish_call(cudaErrorInvalidValue);
    const operation_ref operation = make_operation(CUDA_EMU_WORK_HOST, "cudaLaunchHostFunc");
    operation->run = [function, user] {
        in_host_function = true;
        function(user);
        in_host_function = false;
    };
    cuda_emu_issue(stream, operation);
    return cudaSuccess;
}

/* ================================================================================================================
   >>events
   ================================================================================================================ */

struct CUevent_st {
    int device;
    bool timing;
    operation_ref record; /* the most recent one */
};

static std::set<CUevent_st *> &events = *new std::set<CUevent_st *>();
static std::vector<CUevent_st *> &gone_events = *new std::vector<CUevent_st *>();

static CUevent_st *find_event(cudaEvent_t handle) {
    if (events.count(handle) > 0) return handle;
    cuda_emu_add_fault(CUDA_EMU_HANDLE, "an event that does not exist");
    return nullptr;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    BEGIN_CALL(current_device);
    if (!event || flags > 3) return finish_call(cudaErrorInvalidValue);
    *event = new CUevent_st{current_device, !(flags & cudaEventDisableTiming), nullptr};
    events.insert(*event);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    BEGIN_FINAL_CALL(current_device);
    CUevent_st *event = find_event(handle);
    if (!event) return finish_call(cudaErrorInvalidResourceHandle);
    events.erase(event);
    event->record = nullptr;
    gone_events.push_back(event);
    return finish_call(begun);
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
    BEGIN_CALL(device_of(stream_handle));
    CUevent_st *event = find_event(handle);
    CUstream_st *stream = cuda_emu_find_stream(stream_handle);
    if (!event || !stream || event->device != stream->device) return finish_call(cudaErrorInvalidResourceHandle);
    const operation_ref operation = make_operation(CUDA_EMU_WORK_ORDER, "cudaEventRecord");
    event->record = operation;
    cuda_emu_issue(stream, operation);
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned flags) {
    BEGIN_CALL(device_of(stream_handle));
    const CUevent_st *event = find_event(handle);
    CUstream_st *stream = cuda_emu_find_stream(stream_handle);
    if (!event || !stream) return finish_call(cudaErrorInvalidResourceHandle);
    if (flags != 0) return finish_call(cudaErrorInvalidValue);
    if (!event->record) return cudaSuccess;
    const operation_ref operation = make_operation(CUDA_EMU_WORK_ORDER, "cudaStreamWaitEvent");
    operation->after.push_back(event->record);
    cuda_emu_issue(stream, operation);
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    const CUevent_st *event = find_event(handle);
    BEGIN_FINAL_CALL(event ? event->device : current_device);
    if (!event) return finish_call(cudaErrorInvalidResourceHandle);
    cuda_emu_wait_for(event->record);
    return after_wait(begun, event->device);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
    const CUevent_st *event = find_event(handle);
    BEGIN_CALL(event ? event->device : current_device);
    if (!event) return finish_call(cudaErrorInvalidResourceHandle);
    return finish_call(query(event->record));
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start_handle, cudaEvent_t end_handle) {
    const CUevent_st *start = find_event(start_handle), *end = find_event(end_handle);
    BEGIN_CALL(start ? start->device : current_device);
    if (!start || !end || !start->timing || !end->timing || start->device != end->device || !start->record ||
        !end->record)
        return finish_call(cudaErrorInvalidResourceHandle);
    if (!milliseconds) return finish_call(cudaErrorInvalidValue);
    if (!start->record->done || !end->record->done) return finish_call(cudaErrorNotReady);
    *milliseconds = (float)(1e3 * (end->record->end - start->record->end));
    return cudaSuccess;
}

/* ================================================================================================================
   >>launch
   ================================================================================================================ */

static std::string &next_name = *new std::string();
static int kernel_threads = 1024;

void cuda_emu_name_next_launch(const char *name) { next_name = name; }

cudaError_t cuda_emu_func_get_attributes(cudaFuncAttributes *to, const void *kernel) {
    const cudaError_t begun = cuda_emu_begin_call("cudaFuncGetAttributes", current_device);
    if (begun != cudaSuccess) return finish_call(begun);
    to->maxThreadsPerBlock = kernel_threads;
    cuda_emu_note_loaded(kernel);
    return cudaSuccess;
}

cudaError_t cuda_emu_func_set_attribute(const void *kernel, cudaFuncAttribute attribute, int value) {
    const cudaError_t begun = cuda_emu_begin_call("cudaFuncSetAttribute", current_device);
    if (begun != cudaSuccess) return finish_call(begun);
    if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) {
        if (value < -1 || value > 100) return finish_call(cudaErrorInvalidValue);
        cuda_emu_set_carveout(kernel, value);
        return cudaSuccess;
    }
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || value > cuda_emu_most_shared_memory())
        return finish_call(cudaErrorInvalidValue);
    cuda_emu_set_dynamic_limit(kernel, value);
    return cudaSuccess;
}

/* Addresses of allocations among the arguments; a fault for one that the device cannot use. */
static void find_uses(const char *name, int device, const void *values, size_t bytes,
                      std::vector<cuda_emu_range> *uses) {
    for (size_t at = 0; at + sizeof(void *) <= bytes; at += sizeof(void *)) {
        const void *address;
        memcpy(&address, (const char *)values + at, sizeof address);
        if (!find_block((uintptr_t)address)) continue;
        uses->push_back({address, 1});
        (void)cuda_emu_check_range(address, 1, device, name);
    }
}

cudaError_t cuda_emu_launch(const cudaLaunchConfig_t *config, const void *kernel, const void *values, size_t bytes,
                            const std::function<void()> &thread) {
    const std::string name = next_name.empty() ? "kernel" : next_name;
    const dim3 &grid = config->gridDim, &block = config->blockDim;
    next_name.clear();
    const cudaError_t begun = cuda_emu_begin_call("cudaLaunchKernelEx", current_device);
    if (begun != cudaSuccess) return finish_call(begun);
    CUstream_st *stream = cuda_emu_find_stream(config->stream);
    if (!stream || stream->device != current_device) return finish_call(cudaErrorInvalidResourceHandle);
    const cuda_emu_kernel_call call = {name, kernel, grid, block, config->dynamicSmemBytes, thread};
    if (!cuda_emu_launch_ok(call)) return finish_call(cudaErrorInvalidConfiguration);
    const cudaError_t state = cuda_emu_wait_for_room(stream->device, name.c_str());
    if (state != cudaSuccess) return finish_call(state);
    const operation_ref operation = make_operation(CUDA_EMU_WORK_KERNEL, name.c_str());
    operation->work.blocks = (int64_t)grid.x * grid.y * grid.z;
    operation->work.threads = (int64_t)block.x * block.y * block.z;
    operation->run = [call] { cuda_emu_run_kernel(call); };
    launches[kernel]++;
    if (kernels_to_failure > 0 && --kernels_to_failure == 0) operation->fails = kernel_failure;
    find_uses(name.c_str(), stream->device, values, bytes, &operation->uses);
    cuda_emu_issue(stream, operation);
    return cudaSuccess;
}

/* ================================================================================================================
   >>control
   ================================================================================================================ */

int64_t cuda_emu_live_handles, cuda_emu_live_communicators;

void cuda_emu_reset() {
    cuda_emu_reset_kernels();
    for (device_state &one : devices) one.sticky = cudaSuccess;
    last_error = cudaSuccess;
    n_calls = calls_to_failure = kernels_to_failure = 0;
    failed_as_planned = false;
    calls_by_name.clear();
    launches.clear();
    next_name.clear();
    bury_streams();
    for (CUstream_st *one : gone_streams) delete one;
    for (CUevent_st *one : gone_events) delete one;
    gone_streams.clear();
    gone_events.clear();
}

void cuda_emu_defaults() {
    cuda_emu_unhang();
    cuda_emu_set_arch(80);
    n_processors = 4;
    cuda_emu_set_order(0);
    cuda_emu_set_devices(1);
    cuda_emu_set_peer_access(true);
    cuda_emu_set_memory(DEFAULT_MEMORY);
    cuda_emu_set_policy(CUDA_EMU_IN_ORDER);
    cuda_emu_set_queue(0);
    cuda_emu_set_rule(nullptr);
    cuda_emu_set_host_time(0.0);
    for (int i = 0; i < MOST_DEVICES; i++) {
        cuda_emu_set_latency(i, 0.0);
        cuda_emu_set_arch_of(i, 0);
    }
    cuda_emu_set_timeout(60.0);
}

int64_t cuda_emu_calls() { return n_calls; }

int64_t cuda_emu_calls(const char *name) {
    const auto found = calls_by_name.find(name);
    return found == calls_by_name.end() ? 0 : found->second;
}

int64_t cuda_emu_launches(const void *kernel) {
    const auto found = launches.find(kernel);
    return found == launches.end() ? 0 : found->second;
}

int64_t cuda_emu_pending() {
    size_t n = 0;
    for (const CUstream_st *one : streams) n += one->queue.size();
    return (int64_t)n;
}

cuda_emu_live cuda_emu_live_objects() {
    cuda_emu_live live = {};
    for (const auto &one : blocks) (one.second.place == PINNED ? live.pinned : live.allocations)++;
    live.streams = (int64_t)live_streams();
    live.events = (int64_t)events.size();
    live.handles = cuda_emu_live_handles;
    live.communicators = cuda_emu_live_communicators;
    return live;
}

int64_t cuda_emu_memory_used(int device) { return (int64_t)devices[device].used; }

void cuda_emu_set_devices(int n) {
    n_devices = n < 1 ? 1 : n > MOST_DEVICES ? MOST_DEVICES : n;
    current_device = 0;
    for (device_state &one : devices) one.peers = 0;
}

void cuda_emu_set_arch_of(int device, int arch) { other_arch[device] = arch; }
void cuda_emu_set_peer_access(bool possible) { peer_access_possible = possible; }
void cuda_emu_set_memory(size_t bytes) { memory_limit = bytes; }
void cuda_emu_set_queue(int64_t n) { queue_limit = n; }

void cuda_emu_set_policy(cuda_emu_policy new_policy, uint64_t choice) {
    static const char *const names[] = {"in order", "immediate", "lazy", "newest first", "stream late", "random"};
    policy = new_policy;
    policy_choice = random_state = choice;
    eagerness = random_number() % 8;
    policy_text = names[policy];
    if (policy == CUDA_EMU_STREAM_LATE || policy == CUDA_EMU_RANDOM) policy_text += " " + std::to_string(choice);
}

const char *cuda_emu_policy_name() { return policy_text.empty() ? "in order" : policy_text.c_str(); }

void cuda_emu_each_policy(int seeds, const std::function<void()> &workload) {
    const cuda_emu_policy old_policy = policy;
    const uint64_t old_choice = policy_choice;
    most_streams = live_streams();
    for (int i = CUDA_EMU_IN_ORDER; i <= CUDA_EMU_NEWEST_FIRST; i++) {
        cuda_emu_set_policy((cuda_emu_policy)i);
        workload();
    }
    for (uint64_t i = 0; i <= most_streams; i++) {
        cuda_emu_set_policy(CUDA_EMU_STREAM_LATE, i);
        workload();
    }
    for (int i = 0; i < seeds; i++) {
        cuda_emu_set_policy(CUDA_EMU_RANDOM, (uint64_t)i);
        workload();
    }
    cuda_emu_set_policy(old_policy, old_choice);
}

std::string cuda_emu_find_race(int seeds, const std::function<std::vector<unsigned char>()> &workload) {
    std::vector<unsigned char> first;
    std::string found;
    bool is_first = true;
    cuda_emu_each_policy(seeds, [&] {
        const int64_t faults = cuda_emu_faults();
        const std::vector<unsigned char> bits = workload();
        if (is_first) first = bits;
        is_first = false;
        if (bits == first && (cuda_emu_faults() == faults || cuda_emu_faults() == 0)) return;
        found += (found.empty() ? "" : ", ") + policy_text;
    });
    return found;
}

void cuda_emu_fail_call(int64_t n, cudaError_t error) {
    calls_to_failure = n;
    call_failure = error;
    failed_as_planned = false;
}

bool cuda_emu_failed() { return failed_as_planned; }

void cuda_emu_set_kernel_threads(int n) { kernel_threads = n; }

void cuda_emu_fail_kernel(int64_t n, cudaError_t error) {
    kernels_to_failure = n;
    kernel_failure = error;
}

void cuda_emu_set_rule(const std::function<double(const cuda_emu_work &)> &new_rule) { rule = new_rule; }
double cuda_emu_host_time() { return host_time; }
void cuda_emu_set_latency(int device, double seconds) { devices[device].latency = seconds; }
void cuda_emu_set_timeout(double seconds) { timeout = seconds; }
double cuda_emu_timeout() { return timeout; }

void cuda_emu_set_host_time(double seconds) {
    host_time = seconds;
    if (seconds > 0.0) return;
    for (CUstream_st *one : streams)
        if (one->queue.empty()) one->clock = 0.0;
}

void cuda_emu_delay(cudaStream_t handle, double seconds) {
    CUstream_st *stream = cuda_emu_find_stream(handle);
    if (!stream) return;
    const operation_ref operation = make_operation(CUDA_EMU_WORK_DELAY, "cuda_emu_delay");
    operation->seconds = seconds;
    cuda_emu_issue(stream, operation);
}

static int64_t n_unhangs;

void cuda_emu_hang(cudaStream_t handle) {
    CUstream_st *stream = cuda_emu_find_stream(handle);
    const int64_t before = n_unhangs;
    if (!stream) return;
    const operation_ref operation = make_operation(CUDA_EMU_WORK_DELAY, "cuda_emu_hang");
    operation->ready = [before] { return n_unhangs > before; };
    cuda_emu_issue(stream, operation);
}

void cuda_emu_unhang() { n_unhangs++; }
