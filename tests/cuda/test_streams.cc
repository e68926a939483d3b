/* Tests the emulation of streams, memory and failures. Required order is kept, and work ordered only by chance is
   detected. */

#include "../harness.h"

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <cstring>
#include <set>
#include <string>
#include <vector>

/* Every test starts with a machine as at the start of the program, and leaves nothing behind. */
struct fresh_machine {
    fresh_machine() {
        cuda_emu_defaults();
        cuda_emu_reset();
    }
    ~fresh_machine() {
        const cuda_emu_live live = cuda_emu_live_objects();
        CHECK_INT(live.allocations + live.pinned + live.streams + live.events + live.handles, 0);
        CHECK_INT(cuda_emu_pending(), 0);
        CHECK_STR(cuda_emu_first_fault(), "");
        cuda_emu_defaults();
        cuda_emu_reset();
    }
};

static void expect_fault(cuda_emu_fault kind) {
    CHECK_INT(cuda_emu_faults(kind), 1);
    CHECK_INT(cuda_emu_faults(), 1);
    CHECK(strlen(cuda_emu_first_fault()) > 0);
    cuda_emu_reset();
}

#define OK(call) CHECK((call) == cudaSuccess)

static cudaStream_t new_stream(unsigned flags = cudaStreamNonBlocking) {
    cudaStream_t stream = nullptr;
    OK(cudaStreamCreateWithFlags(&stream, flags));
    return stream;
}

static cudaEvent_t new_event(unsigned flags = cudaEventDisableTiming) {
    cudaEvent_t event = nullptr;
    OK(cudaEventCreateWithFlags(&event, flags));
    return event;
}

template <typename... P, typename... A>
static cudaError_t launch(cudaStream_t stream, void (*kernel)(P...), int threads, const A &...arguments) {
    cudaLaunchConfig_t config;
    config.blockDim = dim3((unsigned)threads);
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

/* The kernels that have run, in order. */
static std::string trace;
static void note_kernel(char what) { trace += what; }
static void note(cudaStream_t stream, char what) { OK(launch(stream, note_kernel, 1, what)); }

static void set_kernel(int *to, int value) { to[threadIdx.x] = value + (int)threadIdx.x; }
static void add_kernel(int *to, const int *from) { to[threadIdx.x] += from[threadIdx.x]; }

/* ---- order ---- */

TEST(nothing_runs_until_the_host_waits) {
    fresh_machine machine;
    int values[4] = {-1, -1, -1, -1}, argument = 10;
    cudaStream_t stream = new_stream();
    OK(launch(stream, set_kernel, 4, &values[0], argument));
    argument = 99; /* too late to matter */
    CHECK_INT(values[0], -1);
    CHECK_INT(cuda_emu_pending(), 1);
    CHECK_INT(cuda_emu_total().launches, 0);
    OK(cudaStreamSynchronize(stream));
    for (int i = 0; i < 4; i++) CHECK_INT(values[i], 10 + i);
    CHECK_INT(cuda_emu_total().launches, 1);
    OK(cudaStreamDestroy(stream));
}

/* Issues two kernels on each of two unordered streams, waits for the first stream, then for both. */
static std::string run_unordered(cuda_emu_policy policy, uint64_t choice, std::string *after_first) {
    cudaStream_t a = new_stream(), b = new_stream();
    cuda_emu_set_policy(policy, choice);
    trace.clear();
    note(a, 'a');
    note(b, 'x');
    note(a, 'b');
    note(b, 'y');
    OK(cudaStreamSynchronize(a));
    if (after_first) *after_first = trace;
    OK(cudaDeviceSynchronize());
    OK(cudaStreamDestroy(a));
    OK(cudaStreamDestroy(b));
    cuda_emu_set_policy(CUDA_EMU_IN_ORDER);
    return trace;
}

TEST(policies) {
    fresh_machine machine;
    std::string first;
    std::set<std::string> seen;
    CHECK_STR(run_unordered(CUDA_EMU_IN_ORDER, 0, &first).c_str(), "axby");
    CHECK_STR(first.c_str(), "axb");
    CHECK_STR(run_unordered(CUDA_EMU_IMMEDIATE, 0, &first).c_str(), "axby");
    CHECK_STR(first.c_str(), "axby");
    CHECK_STR(run_unordered(CUDA_EMU_LAZY, 0, &first).c_str(), "abxy");
    CHECK_STR(first.c_str(), "ab");
    CHECK_STR(run_unordered(CUDA_EMU_NEWEST_FIRST, 0, &first).c_str(), "xyab");
    CHECK_STR(run_unordered(CUDA_EMU_STREAM_LATE, 1, &first).c_str(), "xyab");
    CHECK_STR(run_unordered(CUDA_EMU_STREAM_LATE, 2, &first).c_str(), "abxy");
    CHECK_STR(first.c_str(), "ab");
    for (uint64_t seed = 0; seed < 100; seed++) {
        const std::string order = run_unordered(CUDA_EMU_RANDOM, seed, nullptr);
        CHECK_STR(run_unordered(CUDA_EMU_RANDOM, seed, nullptr).c_str(), order.c_str());
        CHECK(order.find('a') < order.find('b') && order.find('x') < order.find('y'));
        seen.insert(order);
    }
    CHECK_INT(seen.size(), 6); /* every order that two streams allow */
}

TEST(random_devices_work_while_the_host_goes_on) {
    fresh_machine machine;
    bool seen[5] = {false};
    for (uint64_t seed = 0; seed < 100; seed++) {
        cudaStream_t stream = new_stream();
        cuda_emu_set_policy(CUDA_EMU_RANDOM, seed);
        for (int i = 0; i < 4; i++) note(stream, 'a');
        seen[cuda_emu_pending()] = true;
        OK(cudaStreamSynchronize(stream));
        OK(cudaStreamDestroy(stream));
    }
    for (const bool one : seen) CHECK(one);
}

TEST(events_order_streams) {
    fresh_machine machine;
    cuda_emu_each_policy(20, [] {
        cudaStream_t a = new_stream(), b = new_stream();
        cudaEvent_t event = new_event();
        trace.clear();
        note(a, 'a');
        OK(cudaEventRecord(event, a));
        note(a, 'b');
        OK(cudaStreamWaitEvent(b, event));
        OK(cudaEventRecord(event, a)); /* the wait is for the earlier record */
        note(b, 'x');
        OK(cudaEventDestroy(event)); /* and no longer needs the event */
        OK(cudaStreamSynchronize(b));
        CHECK(trace.find('a') < trace.find('x') && trace.find('x') != std::string::npos);
        OK(cudaDeviceSynchronize());
        CHECK_INT(trace.size(), 3);
        OK(cudaStreamDestroy(a));
        OK(cudaStreamDestroy(b));
    });
    /* The record that was issued after the wait does not delay b. */
    cudaStream_t a = new_stream(), b = new_stream();
    cudaEvent_t event = new_event();
    cuda_emu_set_policy(CUDA_EMU_LAZY);
    trace.clear();
    OK(cudaStreamWaitEvent(b, event)); /* never recorded: nothing to wait for */
    OK(cudaEventRecord(event, a));
    OK(cudaStreamWaitEvent(b, event));
    note(a, 'a');
    OK(cudaEventRecord(event, a));
    note(b, 'x');
    OK(cudaStreamSynchronize(b));
    CHECK_STR(trace.c_str(), "x");
    OK(cudaEventSynchronize(event));
    CHECK_STR(trace.c_str(), "xa");
    OK(cudaEventDestroy(event));
    OK(cudaStreamDestroy(a));
    OK(cudaStreamDestroy(b));
}

TEST(legacy_stream) {
    fresh_machine machine;
    cudaStream_t blocking = new_stream(cudaStreamDefault), other = new_stream();
    cuda_emu_set_policy(CUDA_EMU_LAZY);
    trace.clear();
    note(other, 'o');
    note(blocking, 'a');
    note(nullptr, 'l');
    note(blocking, 'b');
    OK(cudaStreamSynchronize(blocking));
    CHECK_STR(trace.c_str(), "alb");
    note(blocking, 'c');
    OK(cudaStreamSynchronize(cudaStreamLegacy)); /* waits for blocking streams as well */
    CHECK_STR(trace.c_str(), "albc");
    OK(cudaStreamSynchronize(other));
    CHECK_STR(trace.c_str(), "albco");
    OK(cudaStreamDestroy(blocking));
    OK(cudaStreamDestroy(other));
}

TEST(queries_advance_the_device) {
    fresh_machine machine;
    cuda_emu_each_policy(10, [] {
        cudaStream_t a = new_stream(), b = new_stream();
        cudaEvent_t event = new_event();
        CHECK(cudaEventQuery(event) == cudaSuccess); /* never recorded */
        trace.clear();
        note(a, 'a');
        note(b, 'x');
        OK(cudaEventRecord(event, b));
        int looks = 0;
        while (cudaEventQuery(event) == cudaErrorNotReady && looks < 100) looks++;
        CHECK(looks <= 3 && trace.find('x') != std::string::npos);
        CHECK(looks > 0 || strncmp(cuda_emu_policy_name(), "im", 2) == 0 ||
              strncmp(cuda_emu_policy_name(), "ra", 2) == 0);
        CHECK(cudaGetLastError() == (looks > 0 ? cudaErrorNotReady : cudaSuccess));
        for (looks = 0; cudaStreamQuery(a) == cudaErrorNotReady && looks < 100;) looks++;
        CHECK(looks <= 1 && trace.size() == 2);
        (void)cudaGetLastError();
        OK(cudaEventDestroy(event));
        OK(cudaStreamDestroy(a));
        OK(cudaStreamDestroy(b));
    });
}

TEST(destroyed_streams_finish_their_work) {
    fresh_machine machine;
    cudaStream_t stream = new_stream();
    trace.clear();
    note(stream, 'a');
    OK(cudaStreamDestroy(stream));
    CHECK_STR(trace.c_str(), "");
    OK(cudaDeviceSynchronize());
    CHECK_STR(trace.c_str(), "a");
    CHECK(cudaStreamSynchronize(stream) == cudaErrorInvalidResourceHandle);
    expect_fault(CUDA_EMU_HANDLE);
    cudaEvent_t event = new_event();
    OK(cudaEventDestroy(event));
    CHECK(cudaEventDestroy(event) == cudaErrorInvalidResourceHandle);
    expect_fault(CUDA_EMU_HANDLE);
}

/* ---- missing waits ---- */

static const int N = 16;

enum mistake {
    NO_MISTAKE,
    NO_WAIT_FOR_THE_UPLOAD,
    NO_WAIT_BEFORE_REUSE,
    READS_BEFORE_THE_END,
    WRITES_THE_SOURCE_TOO_EARLY,
    WAIT_BEFORE_THE_RECORD,
    MEMSET_ON_THE_LEGACY_STREAM,
    N_MISTAKES
};

/* Three rounds: pinned memory goes to the device on one stream, a kernel runs on another, and the result comes back on
   a third. */
static std::vector<unsigned char> pipeline(mistake m) {
    int *host, *in, *sum, *result;
    cudaStream_t up = new_stream(), compute = new_stream(), down = new_stream();
    cudaEvent_t uploaded = new_event(), used = new_event(), done = new_event();
    OK(cudaMallocHost(&host, N * 4));
    OK(cudaMallocHost(&result, N * 4));
    OK(cudaMalloc(&in, N * 4));
    OK(cudaMalloc(&sum, N * 4));
    if (m == MEMSET_ON_THE_LEGACY_STREAM) OK(cudaMemset(sum, 0, N * 4));
    else OK(cudaMemsetAsync(sum, 0, N * 4, compute));
    for (int round = 0; round < 3; round++) {
        if (round > 0 && m != WRITES_THE_SOURCE_TOO_EARLY) OK(cudaEventSynchronize(uploaded));
        for (int i = 0; i < N; i++) host[i] = 100 * round + i;
        if (round > 0 && m != NO_WAIT_BEFORE_REUSE) OK(cudaStreamWaitEvent(up, used));
        if (m == WAIT_BEFORE_THE_RECORD) OK(cudaStreamWaitEvent(compute, uploaded));
        OK(cudaMemcpyAsync(in, host, N * 4, cudaMemcpyHostToDevice, up));
        OK(cudaEventRecord(uploaded, up));
        if (m != NO_WAIT_FOR_THE_UPLOAD && m != WAIT_BEFORE_THE_RECORD) OK(cudaStreamWaitEvent(compute, uploaded));
        OK(launch(compute, add_kernel, N, sum, (const int *)in));
        OK(cudaEventRecord(used, compute));
    }
    OK(cudaStreamWaitEvent(down, used));
    OK(cudaMemcpyAsync(result, sum, N * 4, cudaMemcpyDeviceToHost, down));
    OK(cudaEventRecord(done, down));
    if (m != READS_BEFORE_THE_END) OK(cudaEventSynchronize(done));
    std::vector<unsigned char> bits((unsigned char *)result, (unsigned char *)(result + N));
    OK(cudaDeviceSynchronize());
    for (cudaEvent_t event : {uploaded, used, done}) OK(cudaEventDestroy(event));
    for (cudaStream_t stream : {up, compute, down}) OK(cudaStreamDestroy(stream));
    for (void *memory : {(void *)in, (void *)sum}) OK(cudaFree(memory));
    for (void *memory : {(void *)host, (void *)result}) OK(cudaFreeHost(memory));
    return bits;
}

TEST(missing_waits_show) {
    fresh_machine machine;
    for (int m = 0; m < N_MISTAKES; m++) {
        harness_note("mistake %d", m);
        const std::string found = cuda_emu_find_race(10, [m] { return pipeline((mistake)m); });
        CHECK(found.empty() == (m == NO_MISTAKE));
    }
    CHECK_STR(cuda_emu_find_race(200, [] { return pipeline(NO_MISTAKE); }).c_str(), "");
    const std::vector<unsigned char> bits = pipeline(NO_MISTAKE);
    for (int i = 0, value; i < N; i++) {
        memcpy(&value, &bits[(size_t)i * 4], 4);
        CHECK_INT(value, 300 + 3 * i);
    }
}

/* ---- memory ---- */

TEST(copies_and_the_host) {
    fresh_machine machine;
    cudaStream_t stream = new_stream();
    int pageable[2] = {1, 2}, *pinned, *device, *second;
    OK(cudaMallocHost(&pinned, 8));
    OK(cudaMalloc(&device, 8));
    OK(cudaMalloc(&second, 8));
    OK(cudaMemcpyAsync(device, pageable, 8, cudaMemcpyHostToDevice, stream)); /* takes the bytes now */
    pageable[0] = 7;
    OK(cudaMemcpyAsync(pageable, device, 8, cudaMemcpyDeviceToHost, stream)); /* returns after it has run */
    CHECK_INT(pageable[0], 1);
    pinned[0] = 3, pinned[1] = 4;
    OK(cudaMemcpyAsync(device, pinned, 8, cudaMemcpyHostToDevice, stream)); /* reads when it runs */
    pinned[0] = 5;
    OK(cudaMemcpyAsync(pinned, device, 8, cudaMemcpyDefault, stream)); /* pinned: later */
    pinned[1] = 6;
    CHECK_INT(cuda_emu_pending(), 2);
    OK(cudaStreamSynchronize(stream));
    CHECK(pinned[0] == 5 && pinned[1] == 6);
    OK(cudaMemset(second, 0, 8)); /* does not wait; a copy within the device does not either */
    OK(cudaMemcpy(second, device, 8, cudaMemcpyDeviceToDevice));
    CHECK_INT(cuda_emu_pending(), 2);
    OK(cudaMemcpy(pageable, second, 8, cudaMemcpyDeviceToHost)); /* does */
    CHECK(pageable[0] == 5 && pageable[1] == 6 && cuda_emu_pending() == 0);
    OK(cudaMemcpy(device, pageable, 8, cudaMemcpyHostToDevice)); /* the bytes are read, but may not have arrived */
    CHECK_INT(cuda_emu_pending(), 1);
    pinned[0] = -1;
    OK(cudaMemcpy(pinned, device, 8, cudaMemcpyDeviceToHost));
    CHECK(pinned[0] == 5);
    OK(cudaMemcpy(device, pinned, 8, cudaMemcpyHostToDevice));
    CHECK_INT(cuda_emu_pending(), 0);
    OK(cudaFree(device));
    OK(cudaFree(second));
    OK(cudaFreeHost(pinned));
    OK(cudaStreamDestroy(stream));
}

TEST(copies_in_two_dimensions) {
    fresh_machine machine;
    cudaStream_t stream = new_stream();
    unsigned char from[5 * 7], to[5 * 9], *device;
    for (int i = 0; i < 35; i++) from[i] = (unsigned char)i;
    memset(to, 0xEE, sizeof to);
    OK(cudaMalloc(&device, 11 * 5));
    OK(cudaMemset2DAsync(device, 11, 1, 11, 5, stream));
    OK(cudaMemset2DAsync(device + 1, 11, 2, 3, 5, stream));
    OK(cudaMemcpy2DAsync(device, 11, from, 7, 3, 4, cudaMemcpyHostToDevice, stream));
    OK(cudaMemcpy2DAsync(to, 9, device, 11, 6, 4, cudaMemcpyDeviceToHost, stream));
    for (int row = 0; row < 4; row++)
        for (int c = 0; c < 9; c++) CHECK_INT(to[9 * row + c], c < 3 ? 7 * row + c : c < 4 ? 2 : c < 6 ? 1 : 0xEE);
    CHECK(cudaMemcpy2DAsync(to, 2, device, 11, 6, 4, cudaMemcpyDeviceToHost, stream) == cudaErrorInvalidPitchValue);
    CHECK(cudaMemcpy2DAsync(to, 9, device, 12, 6, 5, cudaMemcpyDeviceToHost, stream) == cudaSuccess); /* ends in it */
    CHECK(cudaMemcpy2DAsync(to, 9, device, 13, 6, 5, cudaMemcpyDeviceToHost, stream) == cudaErrorInvalidValue);
    expect_fault(CUDA_EMU_OUT_OF_BOUNDS);
    OK(cudaFree(device));
    OK(cudaStreamDestroy(stream));
}

/* Copies two rows at the largest allowed pitch, and one byte further. */
TEST(pitches_have_a_limit) {
    fresh_machine machine;
    int most = 0;
    OK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxPitch, 0));
    CHECK_INT(most, INT32_MAX);
    const size_t pitch = (size_t)most, past = pitch + 1;
    char *far = (char *)cuda_emu_sparse_malloc(past + 8), host[8] = {0};
    if (!far) SKIP("no address space for sparse arrays");
    cudaStream_t stream = new_stream();
    OK(cudaMemset2D(far, pitch, 1, 4, 2));
    OK(cudaMemset2DAsync(far, pitch, 2, 3, 2, stream));
    OK(cudaMemcpy2D(host, 4, far, pitch, 4, 2, cudaMemcpyDeviceToHost));
    OK(cudaMemcpy2DAsync(host, 4, far, pitch, 4, 2, cudaMemcpyDeviceToHost, stream));
    CHECK(memcmp(host, "\2\2\2\1\2\2\2\1", 8) == 0);
    CHECK(cudaMemset2D(far, past, 3, 4, 2) == cudaErrorInvalidPitchValue);
    CHECK(cudaMemset2DAsync(far, past, 3, 4, 2, stream) == cudaErrorInvalidPitchValue);
    const cudaMemcpyKind in = cudaMemcpyHostToDevice, out = cudaMemcpyDeviceToHost;
    CHECK(cudaMemcpy2D(host, 4, far, past, 4, 2, out) == cudaErrorInvalidPitchValue);
    CHECK(cudaMemcpy2D(far, past, host, 4, 4, 2, in) == cudaErrorInvalidPitchValue);
    CHECK(cudaMemcpy2DAsync(host, 4, far, past, 4, 2, out, stream) == cudaErrorInvalidPitchValue);
    CHECK(cudaMemcpy2DAsync(far, past, host, 4, 4, 2, in, stream) == cudaErrorInvalidPitchValue);
    CHECK(cudaGetLastError() == cudaErrorInvalidPitchValue);
    CHECK_INT(cuda_emu_pending(), 0);
    CHECK(far[0] == 2 && far[3] == 1 && far[past] == 2 && far[past + 3] == 0);
    OK(cudaFree(far));
    OK(cudaStreamDestroy(stream));
}

TEST(copies_that_contradict_themselves) {
    fresh_machine machine;
    char host[8] = {0}, *device, *pinned;
    OK(cudaMalloc(&device, 8));
    OK(cudaMallocHost(&pinned, 8));
    const struct {
        char *to;
        const char *from;
        cudaMemcpyKind kind;
    } wrong[] = {{device, host, cudaMemcpyDeviceToHost},   {host, device, cudaMemcpyHostToDevice},
                 {device, device, cudaMemcpyHostToDevice}, {pinned, device, cudaMemcpyDeviceToDevice},
                 {host, pinned, cudaMemcpyDeviceToHost},   {device, device, cudaMemcpyHostToHost}};
    for (const auto &one : wrong) {
        CHECK(cudaMemcpy(one.to, one.from, 4, one.kind) == cudaErrorInvalidValue);
        expect_fault(CUDA_EMU_COPY);
        OK(cudaMemcpy(one.to, one.from, 0, one.kind));
        if (one.to != one.from) OK(cudaMemcpy(one.to, one.from, 4, cudaMemcpyDefault));
    }
    CHECK(cudaMemsetAsync(host, 0, 4) == cudaErrorInvalidValue);
    expect_fault(CUDA_EMU_COPY);
    CHECK(cudaMemcpy(device + 4, host, 5, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
    expect_fault(CUDA_EMU_OUT_OF_BOUNDS);
    CHECK(cudaMemset(device + 1, 0, 8) == cudaErrorInvalidValue);
    expect_fault(CUDA_EMU_OUT_OF_BOUNDS);
    OK(cudaFree(device));
    OK(cudaFreeHost(pinned));
}

TEST(freed_while_in_use) {
    fresh_machine machine;
    int *pinned, *device;
    cudaStream_t stream = new_stream();
    OK(cudaMallocHost(&pinned, 4));
    OK(cudaMalloc(&device, 4));
    *pinned = 9;
    OK(cudaMemcpyAsync(device, pinned, 4, cudaMemcpyHostToDevice, stream));
    OK(cudaFreeHost(pinned)); /* waits for nothing */
    expect_fault(CUDA_EMU_IN_USE);
    OK(cudaMallocHost(&pinned, 4));
    OK(launch(stream, set_kernel, 1, pinned, 3)); /* seen in the arguments */
    OK(cudaFreeHost(pinned));
    expect_fault(CUDA_EMU_IN_USE);
    OK(launch(stream, set_kernel, 1, device, 3));
    CHECK_INT(cuda_emu_pending(), 1);
    OK(cudaFree(device)); /* waits for its device */
    CHECK_INT(cuda_emu_pending(), 0);
    CHECK_INT(cuda_emu_faults(), 0);
    OK(cudaStreamDestroy(stream));

    cuda_emu_set_devices(2); /* ... but not for the other one */
    OK(cudaMalloc(&device, 4));
    OK(cudaSetDevice(1));
    OK(cudaDeviceEnablePeerAccess(0, 0));
    stream = new_stream();
    OK(cudaMemsetAsync(device, 0, 4, stream));
    OK(cudaFree(device));
    expect_fault(CUDA_EMU_IN_USE);
    OK(cudaStreamDestroy(stream));
}

TEST(memory_is_limited) {
    fresh_machine machine;
    char *a, *b;
    size_t left, all;
    cuda_emu_set_memory(1000);
    OK(cudaMalloc(&a, 600));
    OK(cudaMemGetInfo(&left, &all));
    CHECK(left == 400 && all == 1000);
    CHECK(cudaMalloc(&b, 401) == cudaErrorMemoryAllocation);
    CHECK(b == nullptr && cudaGetLastError() == cudaErrorMemoryAllocation && cudaGetLastError() == cudaSuccess);
    OK(cudaMalloc(&b, 400));
    CHECK_INT(cuda_emu_memory_used(0), 1000);
    OK(cudaFree(a));
    OK(cudaFree(b));
    OK(cudaMallocHost(&a, 2000)); /* of the host */
    OK(cudaFreeHost(a));
    CHECK_INT(cuda_emu_memory_used(0), 0);
}

TEST(where_pointers_point) {
    fresh_machine machine;
    cudaPointerAttributes at;
    char *device, *pinned, host = 0;
    cuda_emu_set_devices(2);
    OK(cudaSetDevice(1));
    OK(cudaMalloc(&device, 8));
    OK(cudaHostAlloc(&pinned, 8, cudaHostAllocPortable));
    OK(cudaSetDevice(0));
    OK(cudaPointerGetAttributes(&at, device + 7));
    CHECK(at.type == cudaMemoryTypeDevice && at.device == 1 && at.devicePointer == device + 7);
    OK(cudaPointerGetAttributes(&at, pinned));
    CHECK(at.type == cudaMemoryTypeHost && at.hostPointer == pinned);
    OK(cudaPointerGetAttributes(&at, &host));
    CHECK(at.type == cudaMemoryTypeUnregistered);
    CHECK(cudaFree(pinned) == cudaErrorInvalidValue);
    CHECK(cudaFreeHost(device) == cudaErrorInvalidValue);
    OK(cudaFree(device));
    OK(cudaFreeHost(pinned));
}

/* ---- several devices ---- */

static void check_kernel(const char *address) { (void)cuda_emu_check_global(address, 16); }
static void check_listed_kernel(const std::vector<const char *> *list) { check_kernel((*list)[0]); }

TEST(contexts) {
    fresh_machine machine;
    cuda_emu_set_devices(2);
    int count = 0, device = -1;
    OK(cudaGetDeviceCount(&count));
    CHECK_INT(count, 2);
    CHECK(cudaSetDevice(2) == cudaErrorInvalidDevice);
    cudaStream_t s0 = new_stream();
    cudaEvent_t e0 = new_event();
    OK(cudaSetDevice(1));
    OK(cudaGetDevice(&device));
    CHECK_INT(device, 1);
    cudaStream_t s1 = new_stream();
    trace.clear();
    note(s1, 'b');
    CHECK(launch(s0, note_kernel, 1, 'x') == cudaErrorInvalidResourceHandle); /* of another device */
    CHECK(cudaEventRecord(e0, s1) == cudaErrorInvalidResourceHandle);
    OK(cudaEventRecord(e0, s0)); /* both on device 0: the current device does not matter */
    OK(cudaStreamWaitEvent(s1, e0));
    OK(cudaDeviceSynchronize());
    CHECK_STR(trace.c_str(), "b");
    (void)cudaGetLastError();
    OK(cudaEventDestroy(e0));
    OK(cudaStreamDestroy(s0));
    OK(cudaStreamDestroy(s1));
}

TEST(peers) {
    fresh_machine machine;
    cuda_emu_set_devices(2);
    int can = -1, host[4] = {1, 2, 3, 4};
    char *on_0, *on_1;
    OK(cudaMalloc(&on_0, 16));
    OK(cudaMemcpy(on_0, host, 16, cudaMemcpyHostToDevice));
    OK(cudaSetDevice(1));
    OK(cudaMalloc(&on_1, 16));
    cudaStream_t stream = new_stream();
    OK(cudaMemcpyPeer(on_1, 1, on_0, 0, 16));
    memset(host, 0, 16);
    OK(cudaMemcpy(host, on_1, 16, cudaMemcpyDeviceToHost));
    CHECK(host[0] == 1 && host[3] == 4);
    OK(cudaMemcpyPeerAsync(on_1, 1, on_0, 0, 16, stream)); /* copies need no access */
    OK(cudaMemcpyAsync(on_1, on_0, 16, cudaMemcpyDefault, stream));
    CHECK(cudaMemcpyPeerAsync(on_1, 0, on_0, 1, 16, stream) == cudaErrorInvalidValue);
    expect_fault(CUDA_EMU_COPY);
    OK(launch(stream, check_kernel, 1, (const char *)on_0)); /* detected in the arguments, and at its use */
    OK(cudaStreamSynchronize(stream));
    CHECK_INT(cuda_emu_faults(), 2);
    CHECK_INT(cuda_emu_faults(CUDA_EMU_PEER), 2);
    cuda_emu_reset();
    const std::vector<const char *> table = {on_0}; /* in no argument */
    OK(launch(stream, check_listed_kernel, 1, &table));
    OK(cudaStreamSynchronize(stream));
    expect_fault(CUDA_EMU_PEER);
    CHECK(cudaMemsetAsync(on_0, 0, 16, stream) == cudaErrorInvalidValue);
    expect_fault(CUDA_EMU_PEER);
    OK(cudaDeviceCanAccessPeer(&can, 1, 0));
    CHECK_INT(can, 1);
    OK(cudaDeviceEnablePeerAccess(0, 0));
    CHECK(cudaDeviceEnablePeerAccess(0, 0) == cudaErrorPeerAccessAlreadyEnabled);
    CHECK(cudaDeviceEnablePeerAccess(1, 0) == cudaErrorInvalidDevice);
    OK(launch(stream, check_kernel, 1, (const char *)on_0));
    OK(cudaStreamSynchronize(stream));
    CHECK_INT(cuda_emu_faults(), 0);
    OK(cudaSetDevice(0)); /* not in the other direction */
    OK(launch(nullptr, set_kernel, 1, (int *)(void *)on_1, 3));
    OK(cudaDeviceSynchronize());
    expect_fault(CUDA_EMU_PEER);
    cuda_emu_set_peer_access(false);
    OK(cudaDeviceCanAccessPeer(&can, 0, 1));
    CHECK_INT(can, 0);
    CHECK(cudaDeviceEnablePeerAccess(1, 0) == cudaErrorPeerAccessUnsupported);
    OK(cudaFree(on_0));
    OK(cudaFree(on_1));
    OK(cudaStreamDestroy(stream));
}

/* ---- failures ---- */

/* A program that releases everything, whatever fails. Returns whether it reached its end. */
static bool careful_program() {
    cudaStream_t stream = nullptr;
    cudaEvent_t event = nullptr;
    cublasHandle_t handle = nullptr;
    int *device = nullptr, *pinned = nullptr;
    const bool ok = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess &&
                    cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess &&
                    cublasCreate(&handle) == CUBLAS_STATUS_SUCCESS && cudaMalloc(&device, 16) == cudaSuccess &&
                    cudaMallocHost(&pinned, 16) == cudaSuccess &&
                    launch(stream, set_kernel, 4, device, 5) == cudaSuccess &&
                    cudaEventRecord(event, stream) == cudaSuccess &&
                    cudaMemcpyAsync(pinned, device, 16, cudaMemcpyDeviceToHost, stream) == cudaSuccess &&
                    cudaStreamSynchronize(stream) == cudaSuccess && pinned[3] == 8;
    bool freed = cudaFree(device) == cudaSuccess;
    freed = cudaFreeHost(pinned) == cudaSuccess && freed;
    if (event) freed = cudaEventDestroy(event) == cudaSuccess && freed;
    if (handle) freed = cublasDestroy(handle) == CUBLAS_STATUS_SUCCESS && freed;
    if (stream) freed = cudaStreamDestroy(stream) == cudaSuccess && freed;
    return ok && freed;
}

static int64_t count_live() {
    const cuda_emu_live live = cuda_emu_live_objects();
    return live.allocations + live.pinned + live.streams + live.events + live.handles;
}

TEST(every_call_can_fail) {
    fresh_machine machine;
    int64_t n = 1;
    CHECK(careful_program());
    for (;; n++) {
        cuda_emu_reset();
        cuda_emu_fail_call(n, cudaErrorUnknown);
        const bool ok = careful_program();
        CHECK_INT(count_live(), 0);
        CHECK_INT(cuda_emu_faults(), 0);
        CHECK(ok != cuda_emu_failed());
        if (!cuda_emu_failed() || n > 100) break;
    }
    CHECK_INT(n, 15);
    CHECK_INT(cuda_emu_calls(), 14);
    CHECK_INT(cuda_emu_calls("cudaMalloc"), 1);
    cudaEvent_t event = nullptr;
    cuda_emu_fail_call(2, cudaErrorMemoryAllocation);
    OK(cudaEventCreate(&event));
    CHECK(cudaEventRecord(event) == cudaErrorMemoryAllocation);
    CHECK(cudaPeekAtLastError() == cudaErrorMemoryAllocation && cudaGetLastError() == cudaErrorMemoryAllocation);
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK_INT(cuda_emu_pending(), 0); /* the record was not issued */
    OK(cudaEventDestroy(event));
}

TEST(kernels_fail_later) {
    fresh_machine machine;
    cuda_emu_set_devices(2);
    cudaStream_t stream = new_stream();
    char *device, *more;
    OK(cudaMalloc(&device, 16));
    cuda_emu_fail_kernel(2, cudaErrorIllegalAddress);
    trace.clear();
    note(stream, 'a');
    note(stream, 'b'); /* fails, but not yet */
    note(stream, 'c');
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK(cudaStreamSynchronize(stream) == cudaErrorIllegalAddress);
    CHECK_STR(trace.c_str(), "a");
    CHECK_INT(cuda_emu_pending(), 0);
    CHECK(cudaGetLastError() == cudaErrorIllegalAddress && cudaGetLastError() == cudaErrorIllegalAddress);
    CHECK(cudaMalloc(&more, 16) == cudaErrorIllegalAddress);
    CHECK(launch(stream, note_kernel, 1, 'd') == cudaErrorIllegalAddress);
    CHECK(cudaMemsetAsync(device, 0, 16, stream) == cudaErrorIllegalAddress);
    OK(cudaSetDevice(1)); /* the other device continues */
    note(nullptr, 'z');
    OK(cudaDeviceSynchronize());
    CHECK_STR(trace.c_str(), "az");
    CHECK(cudaStreamSynchronize(stream) == cudaErrorIllegalAddress); /* a stream of device 0 */
    OK(cudaSetDevice(0));
    CHECK(cudaFree(device) == cudaErrorIllegalAddress); /* freed all the same */
    CHECK(cudaStreamDestroy(stream) == cudaErrorIllegalAddress);
    CHECK_INT(count_live(), 0);
    cuda_emu_reset();
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
}

TEST(waits_that_cannot_end) {
    fresh_machine machine;
    cudaStream_t a = new_stream(), b = new_stream();
    cudaEvent_t event = new_event();
    trace.clear();
    cuda_emu_hang(a);
    note(a, 'a');
    OK(cudaEventRecord(event, a));
    OK(cudaStreamWaitEvent(b, event));
    note(b, 'b');
    for (int i = 0; i < 10; i++) CHECK(cudaEventQuery(event) == cudaErrorNotReady); /* for ever */
    cuda_emu_unhang();
    OK(cudaStreamSynchronize(b));
    CHECK_STR(trace.c_str(), "ab");
    (void)cudaGetLastError();
    cuda_emu_hang(a);
    OK(cudaEventRecord(event, a));
    OK(cudaStreamWaitEvent(b, event));
    note(b, 'c');
    CHECK(cudaStreamSynchronize(b) == cudaErrorLaunchTimeout);
    CHECK_STR(trace.c_str(), "ab");
    expect_fault(CUDA_EMU_DEADLOCK);
    OK(cudaEventDestroy(event));
    OK(cudaStreamDestroy(a));
    OK(cudaStreamDestroy(b));
}

/* The third launch waits until the first has run, only on its own device. */
TEST(launches_wait_for_room) {
    fresh_machine machine;
    cuda_emu_set_devices(2);
    cudaStream_t a = new_stream(), b = new_stream();
    cudaEvent_t event = new_event();
    cublasHandle_t handle;
    float *square, one = 1.0f;
    CHECK(cublasCreate(&handle) == CUBLAS_STATUS_SUCCESS);
    OK(cudaMalloc(&square, 4));
    cuda_emu_set_queue(2);
    trace.clear();
    cuda_emu_set_host_time(0.0);
    cuda_emu_delay(a, 5.0);
    note(a, 'a');
    OK(cudaEventRecord(event, a)); /* not a launch */
    OK(cudaStreamWaitEvent(b, event));
    note(b, 'b');
    CHECK_STR(trace.c_str(), "");
    CHECK(cuda_emu_host_time() == 0.0);
    note(a, 'c');
    CHECK_STR(trace.c_str(), "a");
    CHECK(cuda_emu_host_time() > 5.0 && cuda_emu_host_time() < 5.1);
    CHECK(cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, 1, 1, 1, &one, square, CUDA_R_32F, 1, square, CUDA_R_32F, 1,
                       &one, square, CUDA_R_32F, 1, CUBLAS_COMPUTE_32F,
                       CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS);
    CHECK_STR(trace.c_str(), "ab");
    note(a, 'd');
    CHECK_STR(trace.c_str(), "abc");
    OK(cudaSetDevice(1));
    for (char letter : {'x', 'y'}) note(nullptr, letter);
    CHECK_STR(trace.c_str(), "abc");
    OK(cudaDeviceSynchronize());
    OK(cudaSetDevice(0));
    OK(cudaDeviceSynchronize());
    CHECK_INT(trace.size(), 6);

    trace.clear();
    cuda_emu_set_policy(CUDA_EMU_STREAM_LATE, 1);
    for (int i = 0; i < 2; i++) note(a, 'a');
    note(b, 'b'); /* one of a's kernels runs, as nothing else can */
    note(b, 'b'); /* now b's does */
    CHECK_STR(trace.c_str(), "ab");
    OK(cudaDeviceSynchronize());
    CHECK_STR(trace.c_str(), "abba");
    cuda_emu_set_policy(CUDA_EMU_IN_ORDER);

    trace.clear();
    cuda_emu_defaults(); /* no limit */
    for (int i = 0; i < 3000; i++) note(a, 'a');
    CHECK_STR(trace.c_str(), "");
    OK(cudaDeviceSynchronize());
    CHECK_INT(trace.size(), 3000);
    CHECK(cublasDestroy(handle) == CUBLAS_STATUS_SUCCESS);
    OK(cudaFree(square));
    OK(cudaEventDestroy(event));
    OK(cudaStreamDestroy(a));
    OK(cudaStreamDestroy(b));
}

TEST(launches_that_wait_for_ever) {
    fresh_machine machine;
    cudaStream_t a = new_stream(), b = new_stream();
    cublasHandle_t handle;
    float *square, one = 1.0f;
    CHECK(cublasCreate(&handle) == CUBLAS_STATUS_SUCCESS);
    OK(cudaMalloc(&square, 4));
    for (int product = 0; product < 2; product++) {
        cuda_emu_set_queue(2);
        trace.clear();
        cuda_emu_hang(a);
        note(a, 'a');
        note(a, 'b');
        CHECK_INT(cuda_emu_faults(), 0);
        if (product)
            CHECK(cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, 1, 1, 1, &one, square, CUDA_R_32F, 1, square,
                               CUDA_R_32F, 1, &one, square, CUDA_R_32F, 1, CUBLAS_COMPUTE_32F,
                               CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_EXECUTION_FAILED);
        else
            CHECK(launch(b, note_kernel, 1, 'c') == cudaErrorLaunchTimeout);
        CHECK_STR(trace.c_str(), "");
        CHECK_INT(cuda_emu_pending(), 0);
        CHECK(strstr(cuda_emu_first_fault(), "a launch waits for ever") != nullptr);
        expect_fault(CUDA_EMU_DEADLOCK);
        note(b, 'd'); /* dropped work takes no room */
        note(b, 'e');
        CHECK_STR(trace.c_str(), "");
        OK(cudaDeviceSynchronize());
        CHECK_STR(trace.c_str(), "de");
    }
    /* A launch that waits for room finds that earlier work has failed. */
    cuda_emu_fail_kernel(1, cudaErrorIllegalAddress);
    note(a, 'f');
    note(a, 'g');
    CHECK(launch(b, note_kernel, 1, 'h') == cudaErrorIllegalAddress);
    CHECK(cudaDeviceSynchronize() == cudaErrorIllegalAddress);
    CHECK_STR(trace.c_str(), "de");
    cuda_emu_reset();
    CHECK(cublasDestroy(handle) == CUBLAS_STATUS_SUCCESS);
    OK(cudaFree(square));
    OK(cudaStreamDestroy(a));
    OK(cudaStreamDestroy(b));
}

static int64_t host_calls;
static void host_function(void *user) {
    trace += *(char *)user;
    host_calls++;
}
static void calling_host_function(void *) { CHECK(cudaDeviceSynchronize() == cudaErrorNotPermitted); }

TEST(host_functions) {
    fresh_machine machine;
    cudaStream_t stream = new_stream();
    char letter = 'h';
    trace.clear();
    host_calls = 0;
    note(stream, 'a');
    OK(cudaLaunchHostFunc(stream, host_function, &letter));
    note(stream, 'b');
    CHECK_INT(host_calls, 0);
    letter = 'H';
    OK(cudaStreamSynchronize(stream));
    CHECK_STR(trace.c_str(), "aHb");
    OK(cudaLaunchHostFunc(stream, calling_host_function, nullptr));
    OK(cudaStreamSynchronize(stream));
    expect_fault(CUDA_EMU_HOST_FUNCTION);
    OK(cudaStreamDestroy(stream));
}

/* ---- time ---- */

static float milliseconds(cudaEvent_t from, cudaEvent_t to) {
    float ms = -1.0f;
    OK(cudaEventElapsedTime(&ms, from, to));
    return ms;
}

/* a: 2 s, then 3 s. b: 1 s, then it waits for the first of a, then 4 s. */
TEST(streams_run_side_by_side) {
    fresh_machine machine;
    cuda_emu_each_policy(10, [] {
        cudaStream_t a = new_stream(), b = new_stream();
        cudaEvent_t start = new_event(0), a1 = new_event(0), a2 = new_event(0), b1 = new_event(0), b2 = new_event(0);
        float ms;
        cuda_emu_set_host_time(0.0);
        OK(cudaEventRecord(start, a));
        cuda_emu_delay(a, 2.0);
        OK(cudaEventRecord(a1, a));
        cuda_emu_delay(a, 3.0);
        OK(cudaEventRecord(a2, a));
        cuda_emu_delay(b, 1.0);
        OK(cudaEventRecord(b1, b));
        OK(cudaStreamWaitEvent(b, a1));
        cuda_emu_delay(b, 4.0);
        OK(cudaEventRecord(b2, b));
        if (strcmp(cuda_emu_policy_name(), "in order") == 0)
            CHECK(cudaEventElapsedTime(&ms, start, b2) == cudaErrorNotReady && cudaGetLastError() == cudaErrorNotReady);
        OK(cudaDeviceSynchronize());
        CHECK(milliseconds(start, a1) == 2000.0f && milliseconds(start, a2) == 5000.0f);
        CHECK(milliseconds(start, b1) == 1000.0f && milliseconds(start, b2) == 6000.0f);
        CHECK(milliseconds(a2, b1) == -4000.0f);
        CHECK(cuda_emu_host_time() == 6.0);
        cuda_emu_delay(a, 1.0); /* was issued at 6 s */
        OK(cudaEventRecord(a1, a));
        OK(cudaStreamSynchronize(a));
        CHECK(milliseconds(start, a1) == 7000.0f);
        for (cudaEvent_t event : {start, a1, a2, b1, b2}) OK(cudaEventDestroy(event));
        OK(cudaStreamDestroy(a));
        OK(cudaStreamDestroy(b));
    });
}

/* Device 0 works 5 s, then device 1 works 2 s and another 1 s. Each has a first event that the host records at 0. */
TEST(clocks_that_start_apart) {
    fresh_machine machine;
    for (double latency : {0.0, 3.0, 6.0}) {
        cuda_emu_defaults();
        cuda_emu_set_devices(2);
        cuda_emu_set_latency(1, latency);
        cuda_emu_each_policy(3, [latency] {
            cudaStream_t stream[2];
            cudaEvent_t first[2], done[2], again = nullptr;
            cuda_emu_set_host_time(0.0);
            for (int i = 0; i < 2; i++) {
                OK(cudaSetDevice(i));
                stream[i] = new_stream();
                first[i] = new_event(0);
                done[i] = new_event(0);
                OK(cudaEventRecord(first[i], stream[i]));
            }
            again = new_event(0);
            cuda_emu_delay(stream[0], 5.0);
            OK(cudaEventRecord(done[0], stream[0]));
            OK(cudaStreamWaitEvent(stream[1], done[0]));
            cuda_emu_delay(stream[1], 2.0);
            OK(cudaEventRecord(done[1], stream[1]));
            cuda_emu_delay(stream[1], 1.0);
            OK(cudaEventRecord(again, stream[1]));
            for (int i = 0; i < 2; i++) OK(cudaStreamSynchronize(stream[i]));
            CHECK(milliseconds(first[0], done[0]) == 5000.0f);
            CHECK(milliseconds(first[1], done[1]) == (latency > 5.0 ? 2000.0f : 7000.0f - 1000.0f * (float)latency));
            CHECK(milliseconds(done[1], again) == 1000.0f);
            OK(cudaEventDestroy(again));
            for (int i = 0; i < 2; i++) {
                OK(cudaEventDestroy(first[i]));
                OK(cudaEventDestroy(done[i]));
                OK(cudaStreamDestroy(stream[i]));
            }
            OK(cudaSetDevice(0));
        });
    }
}

TEST(durations_by_rule) {
    fresh_machine machine;
    cudaStream_t stream = new_stream();
    cudaEvent_t from = new_event(0), to = new_event(0);
    char *device, *pinned;
    OK(cudaMalloc(&device, 1000));
    OK(cudaMallocHost(&pinned, 1000));
    cuda_emu_set_host_time(0.0);
    cuda_emu_set_rule([](const cuda_emu_work &work) {
        if (work.kind == CUDA_EMU_WORK_KERNEL && work.name == "special") return 0.5 * (double)work.threads;
        if (work.kind == CUDA_EMU_WORK_COPY && work.from == 0 && work.to == -1) return 1e-3 * (double)work.bytes;
        return 1000.0;
    });
    OK(cudaEventRecord(from, stream));
    cuda_emu_name_next_launch("special");
    OK(launch(stream, note_kernel, 6, 'a'));
    OK(cudaMemcpyAsync(pinned, device, 250, cudaMemcpyDeviceToHost, stream));
    OK(cudaEventRecord(to, stream));
    OK(cudaStreamSynchronize(stream));
    CHECK(milliseconds(from, to) == 3250.0f);
    cuda_emu_set_rule(nullptr); /* the default: everything takes some time, large copies longer */
    OK(cudaEventRecord(from, stream));
    OK(cudaMemcpyAsync(pinned, device, 1000, cudaMemcpyDeviceToHost, stream));
    OK(cudaEventRecord(to, stream));
    OK(cudaStreamSynchronize(stream));
    CHECK_NEAR(([&] {
        const double got = milliseconds(from, to), wanted = 1e3 * (5e-6 + 1000 / 25e9);
        return harness_compare(&got, 1, &wanted, 1, 1e-5, 0.0);
    })());
    OK(cudaEventDestroy(from));
    OK(cudaEventDestroy(to));
    OK(cudaFree(device));
    OK(cudaFreeHost(pinned));
    OK(cudaStreamDestroy(stream));
}

TEST(elapsed_time_refuses) {
    fresh_machine machine;
    cuda_emu_set_devices(2);
    float ms = -7.0f;
    cudaEvent_t timed = new_event(0), untimed = new_event(), unrecorded = new_event(0);
    OK(cudaSetDevice(1));
    cudaEvent_t other = new_event(0);
    OK(cudaEventRecord(other));
    OK(cudaSetDevice(0));
    OK(cudaEventRecord(timed));
    OK(cudaEventRecord(untimed));
    OK(cudaEventSynchronize(untimed));
    OK(cudaEventSynchronize(other));
    for (cudaEvent_t wrong : {untimed, unrecorded, other}) {
        CHECK(cudaEventElapsedTime(&ms, timed, wrong) == cudaErrorInvalidResourceHandle);
        CHECK(cudaEventElapsedTime(&ms, wrong, timed) == cudaErrorInvalidResourceHandle);
    }
    CHECK(ms == -7.0f);
    OK(cudaEventElapsedTime(&ms, timed, timed));
    CHECK(ms == 0.0f);
    for (cudaEvent_t event : {timed, untimed, unrecorded, other}) OK(cudaEventDestroy(event));
}

/* ---- cuBLAS ---- */

TEST(products_are_queued) {
    fresh_machine machine;
    cuda_emu_set_devices(2);
    cublasHandle_t handle;
    cudaStream_t stream = new_stream();
    float *a, *b, *c, alpha = 2.0f, beta = 0.0f;
    const float host[4] = {1, 2, 3, 4};
    OK(cudaMalloc(&a, 16));
    OK(cudaMalloc(&b, 16));
    OK(cudaMallocHost(&c, 16)); /* devices reach pinned memory */
    OK(cudaMemcpyAsync(a, host, 16, cudaMemcpyHostToDevice, stream));
    OK(cudaMemcpyAsync(b, host, 16, cudaMemcpyHostToDevice, stream));
    CHECK(cublasCreate(&handle) == CUBLAS_STATUS_SUCCESS);
    CHECK(cublasSetStream(handle, stream) == CUBLAS_STATUS_SUCCESS);
    const auto multiply = [&](const float *left) {
        return cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 2, &alpha, left, CUDA_R_32F, 2, b, CUDA_R_32F, 2,
                            &beta, c, CUDA_R_32F, 2, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    };
    CHECK(multiply(a) == CUBLAS_STATUS_SUCCESS);
    alpha = 100.0f; /* was read when issued */
    CHECK(c[0] != c[0]);
    OK(cudaStreamSynchronize(stream));
    CHECK(c[0] == 14.0f && c[1] == 20.0f && c[2] == 30.0f && c[3] == 44.0f);
    CHECK(multiply(a + 1) == CUBLAS_STATUS_SUCCESS);
    OK(cudaStreamSynchronize(stream));
    expect_fault(CUDA_EMU_OUT_OF_BOUNDS);
    OK(cudaSetDevice(1));
    CHECK(multiply(a) == CUBLAS_STATUS_EXECUTION_FAILED); /* the handle belongs to the other device */
    OK(cudaSetDevice(0));
    CHECK(multiply(a) == CUBLAS_STATUS_SUCCESS);
    CHECK(cublasDestroy(handle) == CUBLAS_STATUS_SUCCESS); /* waits */
    CHECK_INT(cuda_emu_pending(), 0);
    CHECK(cublasDestroy(handle) == CUBLAS_STATUS_NOT_INITIALIZED);
    CHECK(cuda_emu_faults(CUDA_EMU_HANDLE) > 0);
    cuda_emu_reset();
    OK(cudaFree(a));
    OK(cudaFree(b));
    OK(cudaFreeHost(c));
    OK(cudaStreamDestroy(stream));
}

SUITE(streams, CASE(nothing_runs_until_the_host_waits), CASE(policies),
      CASE(random_devices_work_while_the_host_goes_on), CASE(events_order_streams), CASE(legacy_stream),
      CASE(queries_advance_the_device), CASE(destroyed_streams_finish_their_work), CASE(missing_waits_show),
      CASE(copies_and_the_host), CASE(copies_in_two_dimensions), CASE(pitches_have_a_limit),
      CASE(copies_that_contradict_themselves), CASE(freed_while_in_use), CASE(memory_is_limited),
      CASE(where_pointers_point), CASE(contexts), CASE(peers), CASE(every_call_can_fail), CASE(kernels_fail_later),
      CASE(waits_that_cannot_end), CASE(launches_wait_for_room), CASE(launches_that_wait_for_ever),
      CASE(host_functions), CASE(streams_run_side_by_side), CASE(clocks_that_start_apart), CASE(durations_by_rule),
      CASE(elapsed_time_refuses), CASE(products_are_queued));
