/* cuda.cc - the CUDA runtime's functions, as far as this project calls them

   All of a device's work is done when it is asked for, in that order, so that streams and events are names only. Memory
   of a device is the host's, found by address; a device may not use another one's unless peer access is enabled. What
   this does not know, the program does not link with. */

#include "opcodes.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <unistd.h>

namespace ptx {

/* ---- settings ---- */

static int number_of(const char *name, int otherwise, std::initializer_list<int> known = {}) {
    const char *value = getenv(name);
    if (!value || !*value) return otherwise;
    char *rest = nullptr;
    const long number = strtol(value, &rest, 10);
    if (*rest || number < 0 || number > 1 << 20 ||
        (known.size() && std::find(known.begin(), known.end(), number) == known.end()))
        stop("%s is \"%s\"", name, value);
    return (int)number;
}

static char letter_of(const char *name, std::initializer_list<const char *> words, size_t letter) {
    const char *value = getenv(name);
    if (!value || !*value) return (*words.begin())[letter];
    for (const char *word : words)
        if (strcmp(word, value) == 0) return word[letter];
    stop("%s is \"%s\"", name, value);
}

settings read_settings() {
    settings s = {};
    s.arch = number_of("PTX_ARCH", 80, {80, 86, 90});
    s.late = number_of("PTX_LATE", 1, {0, 1}) != 0;
    s.copies = letter_of("PTX_COPIES", {"oldest", "newest", "random"}, 0);
    s.order = letter_of("PTX_ORDER", {"forward", "reverse", "shuffled"}, 0);
    s.blocks = std::max(1, number_of("PTX_BLOCKS", 1));
    s.fuse = number_of("PTX_FUSE", 0, {0, 1}) != 0;
    s.race = number_of("PTX_RACE", 0, {0, 1}) != 0;
    s.devices = number_of("PTX_DEVICES", 1);
    s.peers = number_of("PTX_PEERS", 1, {0, 1}) != 0;
    s.ran = getenv("PTX_RAN") ? getenv("PTX_RAN") : "";
    return s;
}

settings &options() {
    static settings s = read_settings();
    return s;
}

uint32_t random_number(uint32_t below) {
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33) % below;
}

static void say(const char *format, va_list arguments) {
    fflush(stdout);
    fprintf(stderr, "ptx: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
}

void stop(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say(format, arguments);
    va_end(arguments);
    _exit(STOPPED);
}

void refuse_text(const std::string &entry, int line, const std::string &what) {
    fflush(stdout);
    fprintf(stderr, "ptx: %s, line %d: %s\n", entry.c_str(), line, what.c_str());
    _exit(NOT_READ);
}

void stop(const warp &w, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say(format, arguments);
    va_end(arguments);
    const instruction &i = w.of->code[std::min((size_t)w.pc, w.of->code.size() - 1)];
    fprintf(stderr, "ptx: in %s, block %u, %u, %u, warp %d, line %d: %s\n", w.of->name.c_str(), w.in->id[0],
            w.in->id[1], w.in->id[2], w.index, i.line, i.name);
    _exit(STOPPED);
}

/* ---- memory ---- */

struct allocation {
    uint64_t end;
    int device; /* -1: the host's, pinned */
    void *start;
};
static std::map<uint64_t, allocation> &allocations = *new std::map<uint64_t, allocation>();
static int current_device, running_device;
static std::set<std::pair<int, int>> &peers = *new std::set<std::pair<int, int>>();
static uint64_t last_begin = 1, last_end, bytes_used;
static const uint64_t ALL_BYTES = (uint64_t)80 << 30;

bool find_allocation(uint64_t address, uint64_t *begin, uint64_t *end) {
    if (address < last_begin || address >= last_end) {
        auto found = allocations.upper_bound(address);
        if (found == allocations.begin() || address >= (--found)->second.end) return false;
        const int device = found->second.device;
        if (device >= 0 && device != running_device && !peers.count({running_device, device})) return false;
        last_begin = found->first, last_end = found->second.end;
    }
    *begin = last_begin, *end = last_end;
    return true;
}

static void forget_last() { last_begin = 1, last_end = 0; }

/* Neighbours of 256 bytes and more belong to nobody. What is new is not zero, unless it is much. */
static void *allocate(size_t bytes, int device) {
    void *start = malloc(bytes + 1024);
    if (!start) return nullptr;
    const uint64_t begin = ((uint64_t)start + 511) / 256 * 256;
    if (bytes < (size_t)64 << 20) memset((void *)begin, 0xFF, bytes);
    allocations[begin] = {begin + bytes, device, start};
    if (device >= 0) bytes_used += bytes;
    forget_last();
    return (void *)begin;
}

static cudaError_t release(void *place, bool pinned) {
    if (!place) return cudaSuccess;
    const auto found = allocations.find((uint64_t)place);
    if (found == allocations.end() || (found->second.device < 0) != pinned)
        stop("a free of %p, which is no allocation", place);
    if (!pinned) bytes_used -= found->second.end - found->first;
    free(found->second.start);
    allocations.erase(found);
    forget_last();
    return cudaSuccess;
}

unsigned char *new_global(uint32_t bytes) {
    unsigned char *place = (unsigned char *)allocate(bytes, -1);
    memset(place, 0, bytes);
    return place;
}

/* A range that a copy uses lies in one allocation, or, where a copy may use it, is the host's. */
static void check_range(const void *place, size_t bytes, const char *what, bool of_device) {
    const uint64_t address = (uint64_t)place;
    const auto next = allocations.upper_bound(address);
    const bool is_host = next == allocations.begin() || address >= std::prev(next)->second.end + 512;
    if (bytes > 0 && is_host && of_device) stop("no device has the memory of %s at %p", what, place);
    if (bytes == 0 || is_host) return;
    const auto found = std::prev(next);
    if (address < found->second.end && found->second.end - address < bytes)
        stop("%s of %zu bytes at %p, %llu before its allocation's end", what, bytes, place,
             (unsigned long long)(found->second.end - address));
    if (address >= found->second.end && address < found->second.end + 512)
        stop("%s at %p, past an allocation", what, place);
}

void check_product_range(const void *place, size_t bytes) {
    uint64_t begin, end;
    running_device = current_device;
    forget_last();
    if (bytes > 0 && (!find_allocation((uint64_t)place, &begin, &end) || end - (uint64_t)place < bytes))
        stop("a product's %zu bytes at %p are not the device's", bytes, place);
}

/* ---- programs ---- */

struct program {
    std::vector<std::pair<std::string, module>> images; /* by target: "sm_80" */
};
struct host_function {
    program *in;
    std::string name;
    const kernel *decoded;
};
/* Programs register what they hold before this file's own variables are made. */
static std::map<const void *, host_function> &functions() {
    static auto &all = *new std::map<const void *, host_function>();
    return all;
}

struct fat_header {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes;
};
struct fat_entry {
    uint16_t kind, unknown;
    uint32_t header_bytes;
    uint64_t bytes;
    uint32_t compressed, more;
};

/* Images are numbered as they are met. With PTX_TEXT the file of that number and target is read instead, if there is
   one; with PTX_DUMP it is written. */
static std::string image_file(const char *folder, int number, const std::string &target) {
    return std::string(folder) + "/" + std::to_string(number) + "." + target + ".ptx";
}

static void exchange_text(const std::string &target, std::string *text) {
    static int number;
    const char *from = getenv("PTX_TEXT"), *to = getenv("PTX_DUMP");
    FILE *file = from ? fopen(image_file(from, number, target).c_str(), "r") : nullptr;
    if (file) {
        text->clear();
        for (int c; (c = fgetc(file)) != EOF;) *text += (char)c;
        fclose(file);
    }
    if (to) {
        file = fopen(image_file(to, number, target).c_str(), "w");
        if (!file || fwrite(text->data(), 1, text->size(), file) != text->size() || fclose(file) != 0)
            stop("cannot write to %s", to);
    }
    number++;
}

static program *read_program(const unsigned char *data) {
    fat_header header;
    memcpy(&header, data, sizeof header);
    if (header.magic != 0xBA55ED50u) stop("no fat binary");
    program *p = new program;
    for (uint64_t at = header.header_bytes; at < header.header_bytes + header.bytes;) {
        fat_entry entry;
        memcpy(&entry, data + at, sizeof entry);
        if (entry.kind == 1) {
            if (entry.compressed) stop("the PTX is compressed: compile with --no-compress");
            const std::string text((const char *)data + at + entry.header_bytes, (size_t)entry.bytes);
            const size_t target = text.find(".target ");
            if (target == std::string::npos) stop("an image is no PTX");
            const std::string name = text.substr(target + 8, text.find_first_of(",\n \r", target + 8) - target - 8);
            p->images.emplace_back(name, module());
            p->images.back().second.text = text.c_str(); /* without what fills it up */
            exchange_text(name, &p->images.back().second.text);
        }
        at += entry.header_bytes + entry.bytes;
    }
    return p;
}

/* The image that a driver would take: of the same architecture where its name ends in "a", else of the highest that is
   not above. */
static module *image_for(program *p, int arch) {
    module *best = nullptr;
    int best_arch = 0;
    for (auto &one : p->images) {
        const int of = atoi(one.first.c_str() + 3);
        if (one.first.back() == 'a' ? of != arch : of > arch) continue;
        if (of > best_arch) best = &one.second, best_arch = of;
    }
    return best;
}

static const kernel *kernel_of(const void *function) {
    const auto found = functions().find(function);
    if (found == functions().end()) return nullptr;
    host_function &f = found->second;
    module *image = image_for(f.in, options().arch);
    if (!f.decoded && image) f.decoded = find_kernel(*image, f.name);
    return f.decoded;
}

static std::set<std::string> &ran = *new std::set<std::string>();

static void note_ran(const std::string &name) {
    if (options().ran.empty() || !ran.insert(name).second) return;
    FILE *file = fopen(options().ran.c_str(), "a");
    if (!file) stop("cannot write %s", options().ran.c_str());
    fprintf(file, "%s\n", name.c_str());
    fclose(file);
}

/* ---- errors ---- */

static cudaError_t last_error = cudaSuccess;
static cudaError_t result(cudaError_t status) {
    if (status != cudaSuccess) last_error = status;
    return status;
}

/* ---- streams and events ---- */

} /* namespace ptx */

struct CUstream_st {
    int device;
};
struct CUevent_st {
    double when;
    bool recorded;
};

namespace ptx {

static std::map<const void *, size_t> &limits = *new std::map<const void *, size_t>(); /* dynamic shared memory */

static size_t most_shared() { return options().arch == 90 ? 227 << 10 : options().arch == 80 ? 163 << 10 : 99 << 10; }

static cudaError_t launch(const void *function, dim3 grid, dim3 size, void **arguments, size_t shared,
                          cudaStream_t stream) {
    const kernel *k = kernel_of(function);
    if (!k)
        return result(functions().count(function) ? cudaErrorNoKernelImageForDevice : cudaErrorInvalidDeviceFunction);
    const uint64_t threads = (uint64_t)size.x * size.y * size.z;
    const auto limit = limits.find(function);
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535 || threads == 0 || threads > 1024)
        return result(cudaErrorInvalidConfiguration);
    if ((int64_t)threads > k->max_threads) return result(cudaErrorInvalidValue);
    if (shared + k->static_shared > (limit == limits.end() ? 48 << 10 : limit->second))
        return result(cudaErrorInvalidValue);
    for (size_t i = 0; i < k->parameters.size(); i++)
        memcpy(k->parameters_at + k->parameters[i].offset, arguments[i], k->parameters[i].bytes);
    running_device = stream ? stream->device : current_device;
    if (running_device != current_device) return result(cudaErrorInvalidResourceHandle);
    forget_last();
    note_ran(k->name);
    const uint32_t grid_of[3] = {grid.x, grid.y, grid.z}, size_of[3] = {size.x, size.y, size.z};
    run_grid(*k, grid_of, size_of, (uint32_t)shared);
    return cudaSuccess;
}

struct call_configuration {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
};
static std::vector<call_configuration> &calls = *new std::vector<call_configuration>();

static CUresult encode_tiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *data,
                             const cuuint64_t *size, const cuuint64_t *strides, const cuuint32_t *box,
                             const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
    const bool is_16 = type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    const bool permuted = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
    if (!is_16 || rank != 3 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
        stop("a tensor map of another kind than three dimensions of 16-bit floats");
    if ((uint64_t)map % 64 || (uint64_t)data % 16 || (!permuted && swizzle != CU_TENSOR_MAP_SWIZZLE_NONE))
        return CUDA_ERROR_INVALID_VALUE;
    tensor_map m = {};
    m.magic = TENSOR_MAP_MAGIC;
    m.data = (unsigned char *)data;
    m.rank = rank, m.element = 2, m.swizzle = permuted;
    for (int axis = 0; axis < 3; axis++) {
        if (size[axis] == 0 || size[axis] > (uint64_t)1 << 32 || box[axis] == 0 || box[axis] > 256 || steps[axis] != 1)
            return CUDA_ERROR_INVALID_VALUE;
        m.size[axis] = size[axis];
        m.box[axis] = box[axis];
    }
    for (int axis = 0; axis < 2; axis++) {
        if (strides[axis] % 16 || strides[axis] >= (uint64_t)1 << 40) return CUDA_ERROR_INVALID_VALUE;
        m.stride[axis] = strides[axis];
    }
    if (box[0] * 2 % 16 || (permuted && box[0] * 2 > 128)) return CUDA_ERROR_INVALID_VALUE;
    static_assert(sizeof m <= sizeof *map, "a tensor map has 128 bytes");
    memset((void *)map, 0, sizeof *map);
    memcpy((void *)map, &m, sizeof m);
    return CUDA_SUCCESS;
}

static double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

} /* namespace ptx */

/* ================================================================================================================
   what the program links with
   ================================================================================================================ */

using namespace ptx;

extern "C" {

void **__cudaRegisterFatBinary(void *of) {
    const unsigned char *data;
    memcpy(&data, (const char *)of + 8, sizeof data);
    return (void **)read_program(data);
}
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
void __cudaRegisterFunction(void **in, const char *host, char *, const char *name, int, uint3 *, uint3 *, dim3 *,
                            dim3 *, int *) {
    functions()[host] = {(program *)in, name, nullptr};
}

void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {} /* the host sets none */

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st *stream) {
    calls.push_back({grid, block, shared, stream});
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    const call_configuration c = calls.back();
    calls.pop_back();
    *grid = c.grid, *block = c.block, *shared = c.shared;
    memcpy(stream, &c.stream, sizeof c.stream);
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
    return launch((const void *)kernel, grid, block, arguments, shared, stream);
}
cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
    return launch(function, grid, block, arguments, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *function, void **arguments) {
    if (c->numAttrs > 0) stop("a launch with attributes");
    return launch(function, c->gridDim, c->blockDim, arguments, c->dynamicSmemBytes, c->stream);
}

cudaError_t cudaFuncSetAttribute(const void *function, cudaFuncAttribute attribute, int value) {
    const kernel *k = kernel_of(function);
    if (!k) return result(cudaErrorInvalidDeviceFunction);
    if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
        (size_t)value + k->static_shared > most_shared())
        return result(cudaErrorInvalidValue);
    limits[function] = std::max((size_t)value, (size_t)48 << 10);
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *to, const void *function) {
    const kernel *k = kernel_of(function);
    if (!k) return result(cudaErrorInvalidDeviceFunction);
    memset(to, 0, sizeof *to);
    to->maxThreadsPerBlock = k->max_threads;
    to->sharedSizeBytes = k->static_shared;
    to->ptxVersion = to->binaryVersion = options().arch;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *n) { return *n = options().devices, cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = current_device, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= options().devices) return result(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr what, int device) {
    if (device < 0 || device >= options().devices) return result(cudaErrorInvalidDevice);
    if (what == cudaDevAttrComputeCapabilityMajor) *value = options().arch / 10;
    else if (what == cudaDevAttrComputeCapabilityMinor) *value = options().arch % 10;
    else if (what == cudaDevAttrMultiProcessorCount)
        *value = options().arch == 90 ? 132 : options().arch == 80 ? 108 : 84;
    else if (what == cudaDevAttrMaxSharedMemoryPerBlockOptin) *value = (int)most_shared();
    else if (what == cudaDevAttrL2CacheSize)
        *value = options().arch == 90 ? 50 << 20 : options().arch == 80 ? 40 << 20 : 6 << 20;
    else stop("device attribute %d", (int)what);
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = options().peers && device != peer;
    return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
    if (!options().peers) return result(cudaErrorPeerAccessUnsupported);
    return peers.insert({current_device, peer}).second ? cudaSuccess : result(cudaErrorPeerAccessAlreadyEnabled);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    return *least = 0, *greatest = -5, cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *to, int) {
    memset(to, 0, sizeof *to);
    snprintf(to->name, sizeof to->name, "PTX on a CPU, as sm_%d", options().arch);
    to->major = options().arch / 10, to->minor = options().arch % 10;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **to, size_t bytes) {
    if (bytes > ALL_BYTES - bytes_used) return result(cudaErrorMemoryAllocation);
    void *place = bytes == 0 ? nullptr : allocate(bytes, current_device);
    if (bytes > 0 && !place) return result(cudaErrorMemoryAllocation);
    *to = place;
    return cudaSuccess;
}
cudaError_t cudaFree(void *place) { return release(place, false); }
cudaError_t cudaMallocHost(void **to, size_t bytes) {
    void *place = allocate(bytes + !bytes, -1);
    if (!place) return result(cudaErrorMemoryAllocation);
    *to = place;
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void *place) { return release(place, true); }
cudaError_t cudaMemGetInfo(size_t *room, size_t *all) {
    return *room = ALL_BYTES - bytes_used, *all = ALL_BYTES, cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *to, const void *place) {
    memset(to, 0, sizeof *to);
    auto found = allocations.upper_bound((uint64_t)place);
    if (found == allocations.begin() || (uint64_t)place >= (--found)->second.end) {
        to->type = cudaMemoryTypeUnregistered;
        return cudaSuccess;
    }
    to->device = std::max(0, found->second.device);
    to->type = found->second.device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    to->devicePointer = (void *)place;
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    check_range(to, bytes, "a copy to", kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice);
    check_range(from, bytes, "a copy from", kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice);
    if (bytes) memmove(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes, cudaStream_t) {
    return cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t) {
    for (size_t row = 0; row < height; row++)
        cudaMemcpy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, kind);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    check_range(to, bytes, "a fill", true);
    if (bytes) memset(to, value, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t) { return cudaMemset(to, value, bytes); }

cudaError_t cudaStreamCreate(cudaStream_t *to) { return *to = new CUstream_st{current_device}, cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *to, unsigned) { return cudaStreamCreate(to); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *to, unsigned, int) { return cudaStreamCreate(to); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete stream, cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

cudaError_t cudaEventCreate(cudaEvent_t *to) { return *to = new CUevent_st{0.0, false}, cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *to, unsigned) { return cudaEventCreate(to); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
    event->when = seconds();
    event->recorded = true;
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    if (!from->recorded || !to->recorded) return result(cudaErrorInvalidResourceHandle);
    *milliseconds = (float)(1e3 * (to->when - from->when));
    return cudaSuccess;
}

cudaError_t cudaGetLastError() {
    const cudaError_t status = last_error;
    last_error = cudaSuccess;
    return status;
}
cudaError_t cudaPeekAtLastError() { return last_error; }

/* The names that messages are looked for by. */
const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess:
            return "cudaSuccess";
        case cudaErrorInvalidValue:
            return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation:
            return "cudaErrorMemoryAllocation";
        case cudaErrorInvalidConfiguration:
            return "cudaErrorInvalidConfiguration";
        case cudaErrorInvalidDevice:
            return "cudaErrorInvalidDevice";
        case cudaErrorInvalidDeviceFunction:
            return "cudaErrorInvalidDeviceFunction";
        case cudaErrorInvalidResourceHandle:
            return "cudaErrorInvalidResourceHandle";
        case cudaErrorNotReady:
            return "cudaErrorNotReady";
        case cudaErrorNoKernelImageForDevice:
            return "cudaErrorNoKernelImageForDevice";
        default:
            return "another CUDA error";
    }
}
const char *cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *found) {
    if (strcmp(name, "cuTensorMapEncodeTiled") != 0) stop("the driver's function %s", name);
    *function = (void *)encode_tiled;
    *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

} /* extern "C" */
