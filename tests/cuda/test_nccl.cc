/* Tests the emulation of NCCL: real processes, queued transfers, deadlocks that are detected, and peers that die. */

#include "../harness.h"

#include <cuda_runtime.h>
#include <nccl.h>

#include <dirent.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

/* ---- one process for each rank ---- */

struct rank_context {
    int rank, n;
    ncclUniqueId id;
    ncclComm_t comm;
    cudaStream_t stream;
    double *buffer; /* 8 numbers on the device: 10 x rank + i */
};

static int wrong; /* in this process */

#define EXPECT(condition)                                                                         \
    do {                                                                                          \
        if (!(condition)) {                                                                       \
            fprintf(stderr, "rank %d, %s:%d: %s (%s)\n", c->rank, __FILE__, __LINE__, #condition, \
                    cuda_emu_first_fault());                                                      \
            wrong++;                                                                              \
        }                                                                                         \
    } while (0)

#define OK(call) EXPECT((call) == cudaSuccess)
#define NCCL_OK(call) EXPECT((call) == ncclSuccess)

typedef void rank_body(rank_context *c);

static const int N = 8;

static void set_kernel(double *to, double first) { to[threadIdx.x] = first + (double)threadIdx.x; }
static void scale_kernel(double *to, double by) { to[threadIdx.x] *= by; }

template <typename... P, typename... A>
static cudaError_t launch(cudaStream_t stream, void (*kernel)(P...), const A &...arguments) {
    cudaLaunchConfig_t config;
    config.blockDim = dim3((unsigned)N);
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

static void join(rank_context *c) {
    alarm(300);
    cuda_emu_defaults();
    cuda_emu_reset();
    cuda_emu_set_timeout(100.0);
    NCCL_OK(ncclCommInitRank(&c->comm, c->n, c->id, c->rank));
    OK(cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking));
    OK(cudaMalloc(&c->buffer, N * 8));
    OK(launch(c->stream, set_kernel, c->buffer, 10.0 * c->rank));
}

/* Also checks that nothing is left and no fault was counted. */
static void leave(rank_context *c) {
    NCCL_OK(ncclCommDestroy(c->comm));
    OK(cudaFree(c->buffer));
    OK(cudaStreamDestroy(c->stream));
    const cuda_emu_live live = cuda_emu_live_objects();
    EXPECT(live.communicators == 0 && live.allocations == 0 && live.pinned == 0 && live.streams == 0);
    EXPECT(cuda_emu_pending() == 0);
    EXPECT(cuda_emu_faults() == 0);
}

static std::vector<double> download(rank_context *c, const double *from) {
    std::vector<double> to((size_t)N);
    OK(cudaMemcpy(to.data(), from, N * 8, cudaMemcpyDeviceToHost));
    return to;
}

/* Runs n processes, before any of them makes a CUDA call. Returns whether all succeed. */
static bool run_ranks(int n, const char *mode, rank_body *body) {
    rank_context context = {};
    std::vector<pid_t> children;
    bool ok = ncclGetUniqueId(&context.id) == ncclSuccess;
    fflush(nullptr);
    for (int rank = 0; rank < n; rank++) {
        const pid_t child = fork();
        if (child == 0) {
            setenv("CUDA_EMU_NCCL", mode, 1);
            context.rank = rank;
            context.n = n;
            body(&context);
            _exit(wrong > 0);
        }
        if (child > 0) children.push_back(child);
    }
    ok = ok && children.size() == (size_t)n;
    for (const pid_t child : children) {
        int status = -1;
        ok = waitpid(child, &status, 0) == child && status == 0 && ok;
    }
    return ok;
}

static const char *const modes[] = {"rendezvous", "buffered"};

/* ---- what it computes ---- */

static void ring(rank_context *c) {
    const int next = (c->rank + 1) % c->n, previous = (c->rank + c->n - 1) % c->n;
    join(c);
    cuda_emu_each_policy(5, [&] {
        double *received;
        cudaStream_t other;
        cudaEvent_t event;
        int count = 0, rank = -1;
        NCCL_OK(ncclCommCount(c->comm, &count));
        NCCL_OK(ncclCommUserRank(c->comm, &rank));
        EXPECT(count == c->n && rank == c->rank);
        OK(cudaMalloc(&received, N * 8));
        OK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
        OK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
        OK(launch(c->stream, set_kernel, c->buffer, 100.0 * c->rank));
        NCCL_OK(ncclGroupStart());
        NCCL_OK(ncclSend(c->buffer, N, ncclDouble, next, c->comm, c->stream));
        NCCL_OK(ncclRecv(received, N, ncclDouble, previous, c->comm, c->stream));
        NCCL_OK(ncclGroupEnd());
        OK(launch(c->stream, set_kernel, c->buffer, -1.0)); /* after the send */
        OK(cudaEventRecord(event, c->stream));
        OK(cudaStreamWaitEvent(other, event));
        OK(launch(other, scale_kernel, received, 2.0)); /* after the receive */
        OK(cudaStreamSynchronize(other));
        const std::vector<double> got = download(c, received);
        for (int i = 0; i < N; i++) EXPECT(got[(size_t)i] == 2.0 * (100.0 * previous + i));
        OK(cudaFree(received));
        OK(cudaEventDestroy(event));
        OK(cudaStreamDestroy(other));
    });
    leave(c);
}

TEST(rings) {
    for (const char *mode : modes) {
        CHECK(run_ranks(1, mode, ring)); /* with itself */
        CHECK(run_ranks(2, mode, ring));
        CHECK(run_ranks(5, mode, ring));
    }
}

/* Passes data down the line in several messages of different sizes, larger than a socket's buffer; the last rank
   checks. */
static void line(rank_context *c) {
    static const size_t sizes[] = {0, 1, 1000, 300000, 7};
    char *bytes;
    std::vector<char> got(300000);
    join(c);
    OK(cudaMalloc(&bytes, 300000));
    for (const size_t n : sizes) {
        if (c->rank == 0) OK(cudaMemsetAsync(bytes, (int)(n % 251), 300000, c->stream));
        if (c->rank > 0) NCCL_OK(ncclRecv(bytes, n, ncclInt8, c->rank - 1, c->comm, c->stream));
        if (c->rank < c->n - 1) NCCL_OK(ncclSend(bytes, n, ncclInt8, c->rank + 1, c->comm, c->stream));
        OK(cudaMemcpyAsync(got.data(), bytes, 300000, cudaMemcpyDeviceToHost, c->stream));
        if (c->rank == 0) continue;
        for (size_t i = 0; i < n; i++) EXPECT(got[i] == (char)(n % 251));
    }
    OK(cudaFree(bytes));
    leave(c);
}

TEST(messages_in_order) {
    for (const char *mode : modes) CHECK(run_ranks(3, mode, line));
}

template <typename T>
static void check_reduction(rank_context *c, ncclDataType_t type, ncclRedOp_t op, T (*value)(int rank, int i)) {
    std::vector<T> mine(N), got(N);
    T *data;
    for (int i = 0; i < N; i++) mine[(size_t)i] = value(c->rank, i);
    OK(cudaMalloc(&data, N * sizeof(T)));
    OK(cudaMemcpyAsync(data, mine.data(), N * sizeof(T), cudaMemcpyHostToDevice, c->stream));
    NCCL_OK(ncclAllReduce(data, data, N, type, op, c->comm, c->stream)); /* in place */
    OK(cudaMemcpyAsync(got.data(), data, N * sizeof(T), cudaMemcpyDeviceToHost, c->stream));
    for (int i = 0; i < N; i++) {
        T wanted = value(0, i);
        for (int rank = 1; rank < c->n; rank++) {
            const T one = value(rank, i);
            wanted = op == ncclSum ? wanted + one : one > wanted ? one : wanted;
        }
        EXPECT(got[(size_t)i] == wanted);
    }
    OK(cudaFree(data));
}

static void reductions(rank_context *c) {
    join(c);
    for (const ncclRedOp_t op : {ncclSum, ncclMax}) {
        check_reduction<float>(c, ncclFloat, op, [](int rank, int i) { return 0.1f * (float)((rank + i) % 3) - 1.0f; });
        check_reduction<double>(c, ncclDouble, op, [](int rank, int i) { return 0.1 * (double)((rank + i) % 3); });
        check_reduction<int64_t>(c, ncclInt64, op, [](int rank, int i) { return ((int64_t)rank << 40) - i; });
    }
    EXPECT(ncclAllReduce(c->buffer, c->buffer, N, ncclHalf, ncclSum, c->comm, c->stream) == ncclInvalidArgument);
    NCCL_OK(ncclGroupStart()); /* two at once */
    NCCL_OK(ncclAllReduce(c->buffer, c->buffer, 1, ncclDouble, ncclSum, c->comm, c->stream));
    NCCL_OK(ncclAllReduce(c->buffer + 1, c->buffer + 1, 1, ncclDouble, ncclMax, c->comm, c->stream));
    NCCL_OK(ncclGroupEnd());
    const double n = c->n;
    OK(cudaStreamSynchronize(c->stream));
    const std::vector<double> got = download(c, c->buffer);
    EXPECT(got[0] == 5.0 * n * (n - 1.0) && got[1] == 10.0 * (n - 1.0) + 1.0 && got[2] == 10.0 * c->rank + 2.0);
    leave(c);
}

TEST(all_reduce) {
    for (const char *mode : modes) {
        CHECK(run_ranks(1, mode, reductions));
        CHECK(run_ranks(4, mode, reductions));
    }
}

/* ---- deadlocks ---- */

/* Both ranks send before they receive, on one stream or on two. */
static void exchange(rank_context *c, bool two_streams, bool grouped) {
    double *received;
    cudaStream_t other;
    const char *mode = getenv("CUDA_EMU_NCCL");
    const bool works = grouped || strcmp(mode, "buffered") == 0;
    join(c);
    if (!works) cuda_emu_set_timeout(0.3);
    OK(cudaMalloc(&received, N * 8));
    OK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    OK(cudaDeviceSynchronize());
    if (grouped) NCCL_OK(ncclGroupStart());
    NCCL_OK(ncclSend(c->buffer, N, ncclDouble, 1 - c->rank, c->comm, c->stream));
    NCCL_OK(ncclRecv(received, N, ncclDouble, 1 - c->rank, c->comm, two_streams ? other : c->stream));
    if (grouped) NCCL_OK(ncclGroupEnd());
    const cudaError_t error = cudaDeviceSynchronize();
    EXPECT(error == (works ? cudaSuccess : cudaErrorLaunchTimeout));
    EXPECT(cuda_emu_faults(CUDA_EMU_DEADLOCK) == !works && cuda_emu_faults() == !works);
    cuda_emu_reset();
    if (works) EXPECT(download(c, received)[3] == 10.0 * (1 - c->rank) + 3.0);
    OK(cudaFree(received));
    OK(cudaStreamDestroy(other));
    leave(c);
}

TEST(sends_that_wait_for_each_other) {
    for (const char *mode : modes) {
        CHECK(run_ranks(2, mode, [](rank_context *c) { exchange(c, false, false); }));
        CHECK(run_ranks(2, mode, [](rank_context *c) { exchange(c, true, false); })); /* one communicator, one order */
        CHECK(run_ranks(2, mode, [](rank_context *c) { exchange(c, false, true); }));
        CHECK(run_ranks(2, mode, [](rank_context *c) { exchange(c, true, true); }));
    }
}

static void other_sizes(rank_context *c) {
    join(c);
    if (c->rank == 0) NCCL_OK(ncclSend(c->buffer, N - 1, ncclDouble, 1, c->comm, c->stream));
    else NCCL_OK(ncclRecv(c->buffer, N, ncclDouble, 0, c->comm, c->stream));
    OK(cudaStreamSynchronize(c->stream));
    EXPECT(cuda_emu_faults(CUDA_EMU_TRANSFER) == c->rank && cuda_emu_faults() == c->rank);
    cuda_emu_reset();
    leave(c);
}

static void wrong_calls(rank_context *c) {
    double host[N] = {0};
    int device = -1;
    join(c);
    NCCL_OK(ncclCommCuDevice(c->comm, &device));
    EXPECT(device == 0);
    EXPECT(ncclSend(c->buffer, N, ncclDouble, 2, c->comm, c->stream) == ncclInvalidArgument);
    EXPECT(ncclSend(c->buffer, N, ncclDouble, -1, c->comm, c->stream) == ncclInvalidArgument);
    EXPECT(ncclSend(c->buffer, N, (ncclDataType_t)10, 1, c->comm, c->stream) == ncclInvalidArgument);
    EXPECT(ncclGroupEnd() == ncclInvalidUsage);
    NCCL_OK(ncclGroupStart()); /* one bad call: nothing is sent */
    NCCL_OK(ncclSend(c->buffer, N, ncclDouble, 1 - c->rank, c->comm, c->stream));
    EXPECT(ncclRecv(c->buffer, N, ncclDouble, 7, c->comm, c->stream) == ncclInvalidArgument);
    EXPECT(ncclGroupEnd() == ncclInvalidArgument);
    EXPECT(cuda_emu_faults() == 0);
    OK(cudaStreamSynchronize(c->stream));
    EXPECT(cuda_emu_pending() == 0);
    EXPECT(ncclSend(host, N, ncclDouble, 1 - c->rank, c->comm, c->stream) == ncclInvalidArgument);
    EXPECT(cuda_emu_faults(CUDA_EMU_OUT_OF_BOUNDS) == 1);
    EXPECT(ncclSend(c->buffer, N, ncclDouble, c->rank, c->comm, c->stream) == ncclInvalidUsage);
    EXPECT(cuda_emu_faults(CUDA_EMU_TRANSFER) == 1);
    cuda_emu_reset();
    cuda_emu_fail_call(1, cudaErrorUnknown);
    EXPECT(ncclSend(c->buffer, N, ncclDouble, 1 - c->rank, c->comm, c->stream) == ncclUnhandledCudaError);
    EXPECT(cuda_emu_failed() && cuda_emu_pending() == 0);
    leave(c);
    EXPECT(ncclCommDestroy(c->comm) == ncclInvalidArgument);
    EXPECT(cuda_emu_faults(CUDA_EMU_HANDLE) == 1);
}

TEST(wrong_transfers) {
    for (const char *mode : modes) CHECK(run_ranks(2, mode, other_sizes));
    CHECK(run_ranks(2, "rendezvous", wrong_calls));
}

/* ---- processes that end ---- */

static void lose_a_peer(rank_context *c) {
    cudaEvent_t event;
    ncclResult_t error = ncclSuccess;
    int looks = 0;
    join(c);
    OK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    if (c->rank == 1) { /* sends one message and dies */
        NCCL_OK(ncclSend(c->buffer, N, ncclDouble, 0, c->comm, c->stream));
        OK(cudaStreamSynchronize(c->stream));
        return;
    }
    NCCL_OK(ncclRecv(c->buffer, N, ncclDouble, 1, c->comm, c->stream)); /* that one still arrives */
    OK(cudaStreamSynchronize(c->stream));
    EXPECT(download(c, c->buffer)[2] == 12.0);
    NCCL_OK(ncclCommGetAsyncError(c->comm, &error));
    EXPECT(error == ncclSuccess);
    NCCL_OK(ncclRecv(c->buffer, N, ncclDouble, 1, c->comm, c->stream));
    OK(cudaEventRecord(event, c->stream));
    for (; cudaEventQuery(event) == cudaErrorNotReady && error == ncclSuccess && looks < 1000000; looks++)
        NCCL_OK(ncclCommGetAsyncError(c->comm, &error));
    EXPECT(error == ncclRemoteError);
    EXPECT(cudaEventQuery(event) == cudaErrorNotReady); /* stands still */
    EXPECT(ncclSend(c->buffer, N, ncclDouble, 1, c->comm, c->stream) == ncclRemoteError);
    NCCL_OK(ncclCommAbort(c->comm));
    OK(cudaStreamSynchronize(c->stream));
    OK(cudaEventQuery(event));
    OK(cudaEventDestroy(event));
    OK(cudaFree(c->buffer));
    OK(cudaStreamDestroy(c->stream));
    EXPECT(cuda_emu_live_objects().communicators == 0);
    EXPECT(cuda_emu_faults() == 0);
}

static void wait_for_a_dead_peer(rank_context *c) {
    join(c);
    if (c->rank == 1) return;
    NCCL_OK(ncclRecv(c->buffer, N, ncclDouble, 1, c->comm, c->stream));
    const auto start = std::chrono::steady_clock::now();
    EXPECT(cudaStreamSynchronize(c->stream) == cudaErrorLaunchTimeout); /* at once, not after 100 s */
    EXPECT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < 80.0);
    EXPECT(cuda_emu_faults(CUDA_EMU_DEADLOCK) == 1);
    cuda_emu_reset();
    NCCL_OK(ncclCommAbort(c->comm));
}

static void rank_that_never_comes(rank_context *c) {
    alarm(300);
    if (c->rank == 1) return;
    cuda_emu_set_timeout(0.3);
    EXPECT(ncclCommInitRank(&c->comm, c->n, c->id, c->rank) == ncclSystemError);
    EXPECT(cuda_emu_faults(CUDA_EMU_DEADLOCK) == 1 && cuda_emu_live_objects().communicators == 0);
}

TEST(peers_that_are_gone) {
    for (const char *mode : modes) {
        CHECK(run_ranks(2, mode, lose_a_peer));
        CHECK(run_ranks(2, mode, wait_for_a_dead_peer));
        CHECK(run_ranks(3, mode, rank_that_never_comes));
    }
}

/* The tests above leave no directory. */
TEST(nothing_is_left_behind) {
    const char *base = getenv("TMPDIR");
    ncclUniqueId id;
    CHECK(ncclGetUniqueId(&id) == ncclSuccess);
    const char *name = strrchr(id.internal, '/');
    REQUIRE(name != nullptr && strncmp(name, "/nccl_emu_", 10) == 0);
    std::string prefix(id.internal, (size_t)(name - id.internal));
    if (base && strlen(base) <= 60) CHECK_STR(prefix.c_str(), base);
    CHECK(run_ranks(2, "rendezvous", [](rank_context *c) {
        join(c);
        NCCL_OK(ncclAllReduce(c->buffer, c->buffer, 1, ncclDouble, ncclSum, c->comm, c->stream)); /* all have joined */
        OK(cudaStreamSynchronize(c->stream));
        leave(c);
        EXPECT(access(c->id.internal, F_OK) != 0);
    }));
}

/* ---- time ---- */

/* Rank 0 sends after 2 s, rank 1 receives after 5 s, both for 1 s; then the reverse. */
static void in_step(rank_context *c) {
    cudaEvent_t start, end;
    float ms = -1.0f;
    join(c);
    OK(cudaStreamSynchronize(c->stream));
    OK(cudaEventCreate(&start));
    OK(cudaEventCreate(&end));
    cuda_emu_set_rule([](const cuda_emu_work &) { return 1.0; });
    for (int round = 0; round < 2; round++) {
        cuda_emu_set_host_time(0.0);
        OK(cudaEventRecord(start, c->stream));
        cuda_emu_delay(c->stream, c->rank == round ? 2.0 : 5.0);
        if (c->rank == 0) NCCL_OK(ncclSend(c->buffer, N, ncclDouble, 1, c->comm, c->stream));
        else NCCL_OK(ncclRecv(c->buffer, N, ncclDouble, 0, c->comm, c->stream));
        OK(cudaEventRecord(end, c->stream));
        OK(cudaStreamSynchronize(c->stream));
        OK(cudaEventElapsedTime(&ms, start, end));
        const bool buffered = strcmp(getenv("CUDA_EMU_NCCL"), "buffered") == 0;
        EXPECT(ms == (buffered && c->rank == 0 && round == 0 ? 3000.0f : 6000.0f));
    }
    OK(cudaEventDestroy(start));
    OK(cudaEventDestroy(end));
    leave(c);
}

TEST(transfers_start_together) {
    for (const char *mode : modes) CHECK(run_ranks(2, mode, in_step));
}

SUITE(nccl, CASE(rings), CASE(messages_in_order), CASE(all_reduce), CASE(sends_that_wait_for_each_other),
      CASE(wrong_transfers), CASE(peers_that_are_gone), CASE(nothing_is_left_behind), CASE(transfers_start_together));
