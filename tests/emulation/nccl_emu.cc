/* nccl_emu.cc - transfers between processes over Unix sockets; see nccl.h. Sections: >>messages >>communicators
   >>transfers >>reductions >>groups >>calls. */

#include "nccl.h"
#include "cuda_emu_private.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <deque>

/* ================================================================================================================
   >>messages
   ================================================================================================================ */

enum message_kind : uint32_t {
    HELLO,  /* the first one: bytes is the sender's rank, extra the number of ranks */
    WANTED, /* a receive has begun */
    DATA,   /* of a send */
    PART,   /* of a reduction: to rank 0 ... */
    RESULT  /* ... and back */
};

struct message_header {
    message_kind kind;
    uint32_t extra; /* what kind of reduction */
    uint64_t bytes; /* that follow */
    double start;   /* virtual time from which the sender can do it */
};

struct message {
    message_header header;
    std::vector<char> bytes;
};

/* The connection with one other rank. */
struct peer {
    int socket = -1;
    bool gone = false, met = false; /* met: a transfer with it has begun */
    std::vector<char> out, in; /* bytes that wait to be sent; an unfinished message */
    std::deque<message> wanted, data, part, result;
};

/* ================================================================================================================
   >>communicators
   ================================================================================================================ */

struct ncclComm {
    int n_ranks = 0, rank = 0, device = 0;
    bool buffered = false, aborted = false, blocking = true;
    int looks = 0; /* into the state of a call in progress, until it is over */
    ncclResult_t error = ncclSuccess; /* asynchronous */
    std::vector<peer> peers;          /* of the own rank too, for what it sends to itself */
    cuda_emu_operation_ref last;      /* the operation that the next one follows */
};

typedef std::shared_ptr<ncclComm> comm_ref;
static std::vector<comm_ref> &comms = *new std::vector<comm_ref>(); /* alive */

static void sort_in(peer *p, message &&m) {
    switch (m.header.kind) {
        case WANTED: p->wanted.push_back(std::move(m)); break;
        case DATA: p->data.push_back(std::move(m)); break;
        case PART: p->part.push_back(std::move(m)); break;
        case RESULT: p->result.push_back(std::move(m)); break;
        case HELLO: break;
    }
}

static void close_peer(peer *p) {
    if (p->socket >= 0) close(p->socket);
    p->socket = -1;
    p->gone = true;
    p->out.clear();
}

static void send_bytes(peer *p) {
    while (p->socket >= 0 && !p->out.empty()) {
        const ssize_t n = send(p->socket, p->out.data(), p->out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (n < 0) {
            p->out.clear(); /* what the peer has sent may still be read */
            p->gone = true;
            return;
        }
        p->out.erase(p->out.begin(), p->out.begin() + n);
    }
}

static void take_messages(peer *p) {
    size_t at = 0;
    message m;
    while (p->in.size() - at >= sizeof m.header) {
        memcpy(&m.header, &p->in[at], sizeof m.header);
        if (p->in.size() - at - sizeof m.header < m.header.bytes) break;
        const auto first = p->in.begin() + (std::ptrdiff_t)(at + sizeof m.header);
        m.bytes.assign(first, first + (std::ptrdiff_t)m.header.bytes);
        at += sizeof m.header + m.header.bytes;
        sort_in(p, std::move(m));
    }
    p->in.erase(p->in.begin(), p->in.begin() + (std::ptrdiff_t)at);
}

static void receive_bytes(peer *p) {
    static char block[65536];
    while (p->socket >= 0) {
        const ssize_t n = recv(p->socket, block, sizeof block, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) break;
        if (n <= 0) close_peer(p);
        else p->in.insert(p->in.end(), block, block + n);
    }
    take_messages(p);
}

static void move_bytes(ncclComm *comm) {
    for (peer &one : comm->peers) {
        send_bytes(&one);
        receive_bytes(&one);
    }
}

static void move_all_bytes() {
    for (const comm_ref &one : comms) move_bytes(one.get());
}

static void post(ncclComm *comm, int to, message_kind kind, uint32_t extra, double start, const void *bytes, size_t n) {
    peer *p = &comm->peers[(size_t)to];
    const message_header header = {kind, extra, n, start};
    const char *payload = (const char *)bytes;
    if (to == comm->rank) {
        sort_in(p, {header, n > 0 ? std::vector<char>(payload, payload + n) : std::vector<char>()});
        return;
    }
    if (p->gone) return; /* what is said to it does not matter any more */
    p->out.insert(p->out.end(), (const char *)&header, (const char *)&header + sizeof header);
    if (n > 0) p->out.insert(p->out.end(), payload, payload + n);
    send_bytes(p);
}

/* ================================================================================================================
   >>transfers    one send or receive, as far as it has come
   ================================================================================================================ */

enum transfer_kind {
    SEND,
    RECEIVE,
    REDUCE
};

struct transfer {
    transfer_kind kind;
    const void *from;
    void *to;
    size_t count, bytes;
    ncclDataType_t type;
    ncclRedOp_t op;
    int peer;
    bool done;
};

/* The calls that are issued at once on one communicator. */
struct bundle {
    comm_ref comm;
    std::vector<transfer> transfers;
    std::weak_ptr<cuda_emu_operation> operation;
};

/* An operation needs a peer that is gone: it stands still from now on. */
static void set_error(bundle *b, ncclResult_t error) {
    const cuda_emu_operation_ref operation = b->operation.lock();
    if (b->comm->error == ncclSuccess) b->comm->error = error;
    if (operation) operation->external = false;
}

/* The first message of the queue, if there is one; an error if there never will be. */
static bool has_message(bundle *b, int from, const std::deque<message> &queue) {
    if (!queue.empty()) return true;
    if (b->comm->peers[(size_t)from].gone) set_error(b, ncclRemoteError);
    return false;
}

static void start_together(bundle *b, double other) {
    const cuda_emu_operation_ref operation = b->operation.lock();
    if (operation) operation->not_before = std::max(operation->not_before, other);
}

static double start_of(const bundle *b) {
    const cuda_emu_operation_ref operation = b->operation.lock();
    return operation ? std::max(operation->start, operation->not_before) : 0.0;
}

static void advance_send(bundle *b, transfer *t) {
    peer *p = &b->comm->peers[(size_t)t->peer];
    if (!b->comm->buffered) {
        if (!has_message(b, t->peer, p->wanted)) return;
        start_together(b, p->wanted.front().header.start);
        p->wanted.pop_front();
    } else {
        if (p->gone) set_error(b, ncclRemoteError);
        if (p->gone) return;
        if (!p->wanted.empty()) p->wanted.pop_front();
    }
    post(b->comm.get(), t->peer, DATA, 0, start_of(b), t->from, t->bytes);
    t->done = true;
}

/* The bytes stay in the queue until the operation runs. `before`: messages that earlier receives will take. */
static void advance_receive(bundle *b, transfer *t, size_t before) {
    const peer *p = &b->comm->peers[(size_t)t->peer];
    if (p->data.size() <= before) {
        if (p->gone) set_error(b, ncclRemoteError);
        return;
    }
    start_together(b, p->data[before].header.start);
    t->done = true;
}

static void end_receive(bundle *b, const transfer &t) {
    std::deque<message> *queue = &b->comm->peers[(size_t)t.peer].data;
    const message m = std::move(queue->front());
    queue->pop_front();
    if (m.bytes.size() != t.bytes)
        cuda_emu_add_fault(CUDA_EMU_TRANSFER, "rank %d sends %llu bytes, rank %d receives %llu", t.peer,
                           (unsigned long long)m.bytes.size(), b->comm->rank, (unsigned long long)t.bytes);
    if (cuda_emu_check_range(t.to, t.bytes, b->comm->device, "ncclRecv") && !m.bytes.empty())
        memcpy(t.to, m.bytes.data(), std::min(t.bytes, m.bytes.size()));
}

/* ================================================================================================================
   >>reductions    rank 0 takes the parts and sends the result
   ================================================================================================================ */

template <typename T> static void reduce(char *sum, const char *part, size_t count, ncclRedOp_t op) {
    for (size_t i = 0; i < count; i++) {
        T a, b;
        memcpy(&a, sum + i * sizeof(T), sizeof(T));
        memcpy(&b, part + i * sizeof(T), sizeof(T));
        a = op == ncclMax ? (b > a ? b : a) : (T)(a + b);
        memcpy(sum + i * sizeof(T), &a, sizeof(T));
    }
}

static uint32_t tag_of(const transfer &t) { return (uint32_t)t.type * 16u + (uint32_t)t.op; }

static bool same_reduction(const transfer &t, const message &m) {
    if (m.header.extra == tag_of(t) && m.bytes.size() == t.bytes) return true;
    cuda_emu_add_fault(CUDA_EMU_TRANSFER, "ranks reduce different things");
    return false;
}

/* In the order of ranks, so that every run and every rank gets the same bits. The own part lies with the others. */
static std::vector<char> reduce_parts(bundle *b, const transfer &t) {
    std::vector<char> sum;
    for (peer &one : b->comm->peers) {
        const message m = std::move(one.part.front());
        one.part.pop_front();
        start_together(b, m.header.start);
        if (!same_reduction(t, m)) continue;
        if (sum.empty()) sum = m.bytes;
        else if (t.type == ncclFloat32) reduce<float>(sum.data(), m.bytes.data(), t.count, t.op);
        else if (t.type == ncclFloat64) reduce<double>(sum.data(), m.bytes.data(), t.count, t.op);
        else reduce<int64_t>(sum.data(), m.bytes.data(), t.count, t.op);
    }
    sum.resize(t.bytes);
    return sum;
}

/* `before`: results that earlier reductions of the bundle will take. Rank 0 takes its own as the others do. */
static void advance_reduction(bundle *b, transfer *t, size_t before) {
    ncclComm *comm = b->comm.get();
    const std::deque<message> &results = comm->peers[0].result;
    if (comm->rank == 0) {
        for (int i = 0; i < comm->n_ranks; i++)
            if (!has_message(b, i, comm->peers[(size_t)i].part)) return;
        const std::vector<char> sum = reduce_parts(b, *t);
        for (int i = 0; i < comm->n_ranks; i++) post(comm, i, RESULT, tag_of(*t), start_of(b), sum.data(), sum.size());
    }
    if (results.size() <= before) {
        if (comm->peers[0].gone) set_error(b, ncclRemoteError);
        return;
    }
    start_together(b, results[before].header.start);
    t->done = true;
}

static void end_reduction(bundle *b, const transfer &t) {
    std::deque<message> *queue = &b->comm->peers[0].result;
    const message m = std::move(queue->front());
    queue->pop_front();
    if (same_reduction(t, m) && t.bytes > 0) memcpy(t.to, m.bytes.data(), t.bytes);
}

/* ================================================================================================================
   >>groups    transfers that go together are one operation
   ================================================================================================================ */

static void begin_bundle(bundle *b) {
    if (b->comm->aborted) return;
    for (const transfer &t : b->transfers) {
        if (t.kind == RECEIVE) post(b->comm.get(), t.peer, WANTED, 0, start_of(b), nullptr, 0);
        if (t.kind == REDUCE) post(b->comm.get(), 0, PART, tag_of(t), start_of(b), t.from, t.bytes);
    }
}

/* Sends to one peer go in their order, as do receives and reductions; everything else is independent. */
static bool advance_bundle(bundle *b) {
    bool all = true, reduction_waits = false;
    size_t reductions = 0;
    std::vector<size_t> receives((size_t)b->comm->n_ranks, 0);
    std::vector<bool> send_waits((size_t)b->comm->n_ranks, false);
    if (b->comm->aborted) return true;
    move_bytes(b->comm.get());
    for (transfer &t : b->transfers) {
        const size_t other = (size_t)t.peer;
        if (!t.done && t.kind == SEND && !send_waits[other]) advance_send(b, &t);
        if (!t.done && t.kind == RECEIVE) advance_receive(b, &t, receives[other]);
        if (!t.done && t.kind == REDUCE && !reduction_waits) advance_reduction(b, &t, reductions);
        if (t.kind == REDUCE) reductions++;
        if (t.kind == REDUCE && !t.done) reduction_waits = true;
        if (t.kind == RECEIVE) receives[other]++;
        if (t.kind == SEND && !t.done) send_waits[other] = true;
        all = all && t.done;
    }
    return all && b->comm->error == ncclSuccess;
}

static void end_bundle(bundle *b) {
    if (b->comm->aborted) return;
    for (const transfer &t : b->transfers) {
        if (t.kind == RECEIVE) end_receive(b, t);
        if (t.kind == REDUCE) end_reduction(b, t);
    }
}

static cuda_emu_operation_ref make_operation(const std::shared_ptr<bundle> &b) {
    const auto operation = std::make_shared<cuda_emu_operation>();
    const transfer &first = b->transfers[0];
    const int other = first.kind == REDUCE ? -1 : first.peer;
    operation->work.kind = CUDA_EMU_WORK_TRANSFER;
    operation->work.name = first.kind == SEND ? "ncclSend" : first.kind == RECEIVE ? "ncclRecv" : "ncclAllReduce";
    operation->work.from = first.kind == RECEIVE ? other : b->comm->rank;
    operation->work.to = first.kind == SEND ? other : first.kind == RECEIVE ? b->comm->rank : -1;
    operation->external = true;
    for (const transfer &t : b->transfers) {
        operation->work.bytes += (int64_t)t.bytes;
        if (t.from) operation->uses.push_back({t.from, t.bytes});
        if (t.to) operation->uses.push_back({t.to, t.bytes});
    }
    b->operation = operation;
    operation->begin = [b] { begin_bundle(b.get()); };
    operation->ready = [b] { return advance_bundle(b.get()); };
    operation->run = [b] { end_bundle(b.get()); };
    if (b->comm->last && !b->comm->last->done) operation->after.push_back(b->comm->last);
    b->comm->last = operation;
    return operation;
}

/* On the first stream; the others wait for it, and it for them. */
static void issue_bundle(const std::shared_ptr<bundle> &b, const std::vector<CUstream_st *> &streams) {
    const cuda_emu_operation_ref operation = make_operation(b);
    const auto add = [&](CUstream_st *stream, const cuda_emu_operation_ref &after) {
        const auto order = std::make_shared<cuda_emu_operation>();
        order->work.name = "ncclGroupEnd";
        if (after) order->after.push_back(after);
        cuda_emu_issue(stream, order);
        return order;
    };
    for (size_t i = 1; i < streams.size(); i++) operation->after.push_back(add(streams[i], nullptr));
    cuda_emu_issue(streams[0], operation);
    for (size_t i = 1; i < streams.size(); i++) (void)add(streams[i], operation);
}

struct pending_transfer {
    comm_ref comm;
    CUstream_st *stream;
    transfer what;
};

static std::vector<pending_transfer> &group = *new std::vector<pending_transfer>();
static int group_depth;
static ncclResult_t group_error;

/* One bundle for each communicator, in the order of their first transfers. */
static void issue_group() {
    while (!group.empty()) {
        const auto b = std::make_shared<bundle>();
        std::vector<CUstream_st *> streams;
        std::vector<pending_transfer> others;
        b->comm = group[0].comm;
        for (const pending_transfer &one : group) {
            if (one.comm != b->comm) {
                others.push_back(one);
                continue;
            }
            b->transfers.push_back(one.what);
            if (std::find(streams.begin(), streams.end(), one.stream) == streams.end()) streams.push_back(one.stream);
        }
        group = others;
        issue_bundle(b, streams);
    }
}

/* ================================================================================================================
   >>calls
   ================================================================================================================ */

static std::string &last_error_text = *new std::string();

static ncclResult_t fail(ncclResult_t result, const char *text) {
    last_error_text = text;
    if (group_depth > 0 && group_error == ncclSuccess) group_error = result;
    return result;
}

static comm_ref find_comm(const ncclComm *handle) {
    for (const comm_ref &one : comms)
        if (one.get() == handle) return one;
    cuda_emu_add_fault(CUDA_EMU_HANDLE, "a communicator that does not exist");
    return nullptr;
}

static bool may_begin(const char *name, int device) { return cuda_emu_begin_call(name, device) == cudaSuccess; }

const char *ncclGetErrorString(ncclResult_t result) {
    switch (result) {
        case ncclSuccess: return "no error";
        case ncclUnhandledCudaError: return "unhandled cuda error";
        case ncclSystemError: return "unhandled system error";
        case ncclInternalError: return "internal error";
        case ncclInvalidArgument: return "invalid argument";
        case ncclInvalidUsage: return "invalid usage";
        case ncclRemoteError: return "remote process exited or there was a network error";
        case ncclInProgress: return "NCCL operation in progress";
        case ncclNumResults: break;
    }
    return "unknown result code";
}

const char *ncclGetLastError(ncclComm_t) { return last_error_text.c_str(); }
ncclResult_t ncclGetVersion(int *version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }

/* The name of a directory; the ranks make it. */
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    const char *base = getenv("TMPDIR");
    uint64_t random = 0;
    if (!may_begin(__func__, -1)) return fail(ncclUnhandledCudaError, "a call failed");
    FILE *source = fopen("/dev/urandom", "rb");
    const bool ok = source && fread(&random, sizeof random, 1, source) == 1;
    if (source) fclose(source);
    memset(id->internal, 0, sizeof id->internal);
    if (!base || strlen(base) > 60) base = "/tmp";
    snprintf(id->internal, sizeof id->internal, "%s/nccl_emu_%016llx", base, (unsigned long long)random);
    return ok ? ncclSuccess : fail(ncclSystemError, "no random numbers");
}

/* ---- joining ---- */

static sockaddr_un address_of(const char *directory, int rank) {
    sockaddr_un address;
    memset(&address, 0, sizeof address);
    address.sun_family = AF_UNIX;
    snprintf(address.sun_path, sizeof address.sun_path, "%.90s/%d", directory, rank);
    return address;
}

static double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

static int connect_to(const char *directory, int rank, std::chrono::steady_clock::time_point start) {
    const sockaddr_un address = address_of(directory, rank);
    const int handle = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    while (handle >= 0 && connect(handle, (const sockaddr *)&address, sizeof address) != 0) {
        if (seconds_since(start) > cuda_emu_timeout()) {
            close(handle);
            return -1;
        }
        usleep(1000);
    }
    return handle;
}

/* The next rank that joins says its number first. */
static bool accept_one(ncclComm *comm, int listener, std::chrono::steady_clock::time_point start) {
    pollfd wanted = {listener, POLLIN, 0};
    message_header hello;
    const double left = cuda_emu_timeout() - seconds_since(start);
    if (left <= 0.0 || poll(&wanted, 1, (int)(1000.0 * left) + 1) != 1) return false;
    const int handle = accept(listener, nullptr, nullptr);
    if (handle < 0) return false;
    if (recv(handle, &hello, sizeof hello, MSG_WAITALL) != (ssize_t)sizeof hello || hello.kind != HELLO ||
        hello.extra != (uint32_t)comm->n_ranks || hello.bytes >= (uint64_t)comm->n_ranks ||
        comm->peers[hello.bytes].socket >= 0) {
        close(handle);
        return false;
    }
    comm->peers[hello.bytes].socket = handle;
    return true;
}

/* Every rank listens, joins those before it and is joined by those after it. */
static bool join_all(ncclComm *comm, const char *directory, int listener) {
    const auto start = std::chrono::steady_clock::now();
    const message_header hello = {HELLO, (uint32_t)comm->n_ranks, (uint64_t)comm->rank, 0.0};
    for (int i = 0; i < comm->rank; i++) {
        const int handle = connect_to(directory, i, start);
        if (handle < 0) return false;
        comm->peers[(size_t)i].socket = handle;
        if (send(handle, &hello, sizeof hello, MSG_NOSIGNAL) != (ssize_t)sizeof hello) return false;
    }
    for (int i = comm->rank + 1; i < comm->n_ranks; i++)
        if (!accept_one(comm, listener, start)) return false;
    return true;
}

/* All sockets exist before the first one is removed, so that the last to go can remove the directory. */
static bool join(ncclComm *comm, const char *directory) {
    const sockaddr_un address = address_of(directory, comm->rank);
    if (comm->n_ranks == 1) return true;
    if (mkdir(directory, 0700) != 0 && errno != EEXIST) return false;
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool listens = listener >= 0 && bind(listener, (const sockaddr *)&address, sizeof address) == 0;
    const bool joined = listens && listen(listener, comm->n_ranks) == 0 && join_all(comm, directory, listener);
    if (listener >= 0) close(listener);
    if (listens) (void)unlink(address.sun_path);
    (void)rmdir(directory);
    return joined;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *handle, int n_ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
    if (config == nullptr || config->maxCTAs < 1 || config->maxCTAs > 32)
        return fail(ncclInvalidArgument, "ncclCommInitRankConfig");
    const ncclResult_t result = ncclCommInitRank(handle, n_ranks, id, rank);
    if (result != ncclSuccess || config->blocking) return result;
    (*handle)->blocking = false;
    (*handle)->looks = 2;
    return ncclInProgress;
}

ncclResult_t ncclCommInitRank(ncclComm_t *handle, int n_ranks, ncclUniqueId id, int rank) {
    const int device = cuda_emu_current_device();
    const char *mode = getenv("CUDA_EMU_NCCL");
    if (!may_begin(__func__, device)) return fail(ncclUnhandledCudaError, "a call failed");
    if (!handle || n_ranks < 1 || rank < 0 || rank >= n_ranks || memchr(id.internal, 0, sizeof id.internal) == nullptr)
        return fail(ncclInvalidArgument, "ncclCommInitRank");
    const comm_ref comm = std::make_shared<ncclComm>();
    comm->n_ranks = n_ranks;
    comm->rank = rank;
    comm->device = device;
    comm->buffered = mode && strcmp(mode, "buffered") == 0;
    comm->peers.resize((size_t)n_ranks);
    if (!join(comm.get(), id.internal)) {
        for (peer &one : comm->peers) close_peer(&one);
        cuda_emu_add_fault(CUDA_EMU_DEADLOCK, "rank %d waits for %d ranks that do not all come", rank, n_ranks);
        return fail(ncclSystemError, "not all ranks have joined");
    }
    comms.push_back(comm);
    cuda_emu_live_communicators++;
    cuda_emu_progress = move_all_bytes;
    *handle = comm.get();
    return ncclSuccess;
}

/* ---- leaving ---- */

static bool has_unsent(const ncclComm *comm) {
    for (const peer &one : comm->peers)
        if (!one.out.empty()) return true;
    return false;
}

static void flush(ncclComm *comm) {
    const auto start = std::chrono::steady_clock::now();
    for (move_bytes(comm); has_unsent(comm) && seconds_since(start) < cuda_emu_timeout(); move_bytes(comm)) usleep(100);
}

static void forget(const comm_ref &comm) {
    for (peer &one : comm->peers) close_peer(&one);
    comms.erase(std::find(comms.begin(), comms.end(), comm));
    cuda_emu_live_communicators--;
    if (comms.empty()) cuda_emu_progress = nullptr;
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
    const comm_ref comm = find_comm(handle);
    const bool begun = may_begin(__func__, comm ? comm->device : cuda_emu_current_device());
    if (!comm) return fail(ncclInvalidArgument, "no such communicator");
    cuda_emu_wait_for(comm->last);
    flush(comm.get());
    return begun ? comm->error : fail(ncclUnhandledCudaError, "a call failed");
}

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
    const comm_ref comm = find_comm(handle);
    const bool begun = may_begin(__func__, comm ? comm->device : cuda_emu_current_device());
    if (!comm) return fail(ncclInvalidArgument, "no such communicator");
    cuda_emu_wait_for(comm->last);
    flush(comm.get());
    forget(comm);
    return begun ? ncclSuccess : fail(ncclUnhandledCudaError, "a call failed");
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
    const comm_ref comm = find_comm(handle);
    const bool begun = may_begin(__func__, -1);
    if (!comm) return fail(ncclInvalidArgument, "no such communicator");
    comm->aborted = true;
    move_bytes(comm.get());
    forget(comm);
    return begun ? ncclSuccess : fail(ncclUnhandledCudaError, "a call failed");
}

/* ---- questions ---- */

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t *error) {
    const comm_ref comm = find_comm(handle);
    if (!may_begin(__func__, -1)) return fail(ncclUnhandledCudaError, "a call failed");
    if (!comm || !error) return fail(ncclInvalidArgument, "ncclCommGetAsyncError");
    *error = comm->error == ncclSuccess && comm->looks > 0 ? ncclInProgress : comm->error;
    if (comm->looks > 0 && comm->looks < INT_MAX) comm->looks--;
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t handle, int *count) {
    const comm_ref comm = find_comm(handle);
    if (!comm || !count || comm->looks > 0) return fail(ncclInvalidArgument, "ncclCommCount");
    *count = comm->n_ranks;
    return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t handle, int *device) {
    const comm_ref comm = find_comm(handle);
    if (!comm || !device) return fail(ncclInvalidArgument, "ncclCommCuDevice");
    *device = comm->device;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t handle, int *rank) {
    const comm_ref comm = find_comm(handle);
    if (!comm || !rank) return fail(ncclInvalidArgument, "ncclCommUserRank");
    *rank = comm->rank;
    return ncclSuccess;
}

/* ---- transfers ---- */

ncclResult_t ncclGroupStart() {
    if (!may_begin(__func__, -1)) return fail(ncclUnhandledCudaError, "a call failed");
    if (group_depth++ == 0) group_error = ncclSuccess;
    return ncclSuccess;
}

/* A group with a wrong call in it does nothing. */
ncclResult_t ncclGroupEnd() {
    const bool begun = may_begin(__func__, -1);
    if (group_depth == 0) return fail(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (!begun) (void)fail(ncclUnhandledCudaError, "a call failed");
    if (--group_depth > 0) return group_error;
    if (group_error == ncclSuccess) issue_group();
    group.clear();
    return group_error;
}

static size_t bytes_of(ncclDataType_t type) {
    static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return type >= 0 && type < ncclNumTypes ? bytes[type] : 0;
}

/* Begins to look for a peer, unless the call waits until it is found. Returns false where there is none any more. */
static bool meet(ncclComm *comm, int rank) {
    peer *other = &comm->peers[(size_t)rank];
    if (comm->blocking || other->met || rank == comm->rank) return true;
    move_bytes(comm);
    other->met = true;
    comm->looks = other->gone ? INT_MAX : 2;
    return !other->gone;
}

static ncclResult_t add(const char *name, transfer t, ncclComm_t handle, cudaStream_t stream_handle) {
    const comm_ref comm = find_comm(handle);
    if (!may_begin(name, comm ? comm->device : cuda_emu_current_device()))
        return fail(ncclUnhandledCudaError, "a call failed");
    CUstream_st *stream = cuda_emu_find_stream(stream_handle);
    if (!comm || !stream) return fail(ncclInvalidArgument, "no such communicator or stream");
    if (comm->error != ncclSuccess) return fail(comm->error, "the communicator has failed");
    if (comm->looks > 0) return fail(ncclInvalidArgument, "the call before is in progress");
    t.bytes = t.count * bytes_of(t.type);
    if (bytes_of(t.type) == 0 || t.peer < 0 || t.peer >= comm->n_ranks) return fail(ncclInvalidArgument, name);
    if (cuda_emu_device_of(stream) != comm->device) return fail(ncclInvalidUsage, "a stream of another device");
    if ((t.kind != RECEIVE && !cuda_emu_check_range(t.from, t.bytes, comm->device, name)) ||
        (t.kind != SEND && !cuda_emu_check_range(t.to, t.bytes, comm->device, name)))
        return fail(ncclInvalidArgument, name);
    if (group_depth == 0 && t.kind != REDUCE && t.peer == comm->rank) {
        cuda_emu_add_fault(CUDA_EMU_TRANSFER, "%s with itself, outside a group", name);
        return fail(ncclInvalidUsage, name);
    }
    if (t.kind != REDUCE && !meet(comm.get(), t.peer)) return ncclInProgress;
    group.push_back({comm, stream, t});
    if (group_depth == 0) issue_group();
    return comm->looks > 0 ? ncclInProgress : ncclSuccess;
}

ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return add(__func__, {SEND, from, nullptr, count, 0, type, ncclSum, peer, false}, comm, stream);
}

ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return add(__func__, {RECEIVE, nullptr, to, count, 0, type, ncclSum, peer, false}, comm, stream);
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    if ((type != ncclFloat32 && type != ncclFloat64 && type != ncclInt64) || (op != ncclSum && op != ncclMax))
        return fail(ncclInvalidArgument, "a reduction that is not emulated");
    return add(__func__, {REDUCE, from, to, count, 0, type, op, 0, false}, comm, stream);
}
