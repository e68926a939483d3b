/* memory.cc - loads and stores, with a check of each access; and matrices between shared memory and registers */

#include "opcodes.h"

namespace ptx {

/* ---- checks ---- */

void check_device_memory(const warp &w, uint64_t address, uint64_t bytes, const char *what) {
    uint64_t begin, end;
    if (!find_allocation(address, &begin, &end))
        stop(w, "%s at address 0x%llx, which no allocation of the device holds", what, (unsigned long long)address);
    if (end - address < bytes)
        stop(w, "%s of %llu bytes at address 0x%llx, %llu bytes before its allocation's end", what,
             (unsigned long long)bytes, (unsigned long long)address, (unsigned long long)(end - address));
}

static void check_parameters(const warp &w, uint64_t address, uint64_t bytes) {
    const uint64_t at = address - (uint64_t)w.of->parameters_at;
    if (at > w.of->parameter_bytes || w.of->parameter_bytes - at < bytes)
        stop(w, "a parameter at byte %lld of %u", (long long)at, w.of->parameter_bytes);
}

static bool is_parameter(const warp &w, uint64_t address) {
    return address - (uint64_t)w.of->parameters_at < w.of->parameter_bytes;
}

unsigned char *shared_place(warp &w, uint32_t address, uint32_t bytes, const char *what) {
    std::vector<unsigned char> &shared = w.in->shared;
    if (address > shared.size() || shared.size() - address < bytes)
        stop(w, "%s of %u bytes at shared address %u of %zu", what, bytes, address, shared.size());
    if (!w.in->flags.empty())
        for (uint32_t at = address / 4, last = (address + bytes - 1) / 4; at <= last; at++)
            if (w.in->flags[at])
                stop(w, "%s at shared address %u, where %s", what, 4 * at,
                     w.in->flags[at] & HOLDS_MBARRIER ? "an mbarrier is" : "a copy is in flight");
    return &shared[address];
}

/* Where a lane's access goes. */
static unsigned char *lane_place(warp &w, const instruction &i, int lane, uint64_t address, bool write) {
    const uint32_t bytes = (uint32_t)i.bytes * i.vector;
    if ((address & (bytes - 1)) != 0)
        stop(w, "lane %d: address 0x%llx is no multiple of %u", lane, (unsigned long long)address, bytes);
    if (i.space == SHARED) {
        unsigned char *place = shared_place(w, (uint32_t)address, bytes, write ? "a store" : "a load");
        note_shared(w, (uint32_t)lane, (uint32_t)address, bytes, write);
        return place;
    }
    if (i.space == LOCAL) {
        if (address > w.of->local_bytes || w.of->local_bytes - address < bytes)
            stop(w, "a thread's byte %llu of %u", (unsigned long long)address, w.of->local_bytes);
        return &w.in->local[(size_t)(w.index * LANES + lane) * w.of->local_bytes + address];
    }
    if (i.space == PARAM || is_parameter(w, address)) check_parameters(w, address, bytes);
    else check_device_memory(w, address, bytes, write ? "a store" : "a load");
    return (unsigned char *)address;
}

/* The addresses of all lanes. */
static void find_addresses(warp &w, const instruction &i, uint32_t base, uint64_t *address) {
    const uint64_t *wide = base == NO_PLACE ? nullptr : at<uint64_t>(w, base);
    const uint32_t *narrow = base == NO_PLACE ? nullptr : at<uint32_t>(w, base);
    const uint64_t offset = (uint64_t)(int64_t)i.offset;
    if (!wide)
        for (int l = 0; l < LANES; l++) address[l] = offset + (i.space == PARAM ? (uint64_t)w.of->parameters_at : 0);
    else if (i.wide_address)
        for (int l = 0; l < LANES; l++) address[l] = offset + wide[l];
    else
        for (int l = 0; l < LANES; l++) address[l] = offset + narrow[l];
}

/* Returns whether global addresses of the mask's lanes are aligned and within one allocation, so that no lane has to be
   looked at by itself. */
static bool are_fine(const warp &w, const instruction &i, const uint64_t *address) {
    if (i.space != GLOBAL || w.mask == 0) return false;
    const uint32_t bytes = (uint32_t)i.bytes * i.vector;
    uint64_t least = ~0ull, most = 0, all = 0, begin, end;
    for (int l = 0; l < LANES; l++) {
        const uint64_t here = w.lanes[l] ? address[l] : address[__builtin_ctz(w.mask)];
        least = here < least ? here : least;
        most = here > most ? here : most;
        all |= here;
    }
    return (all & (bytes - 1)) == 0 && find_allocation(least, &begin, &end) && most < end && end - most >= bytes;
}

/* ---- loads and stores ---- */

template <typename REGISTER, typename NUMBER>
static void load_lane(warp &w, const uint32_t *to, int n, int lane, const unsigned char *from) {
    for (int v = 0; v < n; v++) {
        NUMBER x;
        memcpy(&x, from + (size_t)v * sizeof x, sizeof x);
        at<REGISTER>(w, to[v])[lane] = (REGISTER)x;
    }
}

template <typename REGISTER, typename NUMBER> static void load(warp &w, const instruction &i) {
    const uint32_t *to = places(w, i), base = to[i.vector];
    alignas(64) uint64_t address[LANES];
    find_addresses(w, i, base, address);
    const bool fine = are_fine(w, i, address);
    for (int l = 0; l < LANES; l++)
        if (w.mask >> l & 1)
            load_lane<REGISTER, NUMBER>(
                w, to, i.vector, l, fine ? (const unsigned char *)address[l] : lane_place(w, i, l, address[l], false));
}

template <typename REGISTER, typename NUMBER> static void store(warp &w, const instruction &i) {
    const uint32_t *from = places(w, i) + 1, base = from[-1];
    alignas(64) uint64_t address[LANES];
    find_addresses(w, i, base, address);
    const bool fine = are_fine(w, i, address);
    for (int l = 0; l < LANES; l++) {
        if (!(w.mask >> l & 1)) continue;
        unsigned char *to = fine ? (unsigned char *)address[l] : lane_place(w, i, l, address[l], true);
        for (int v = 0; v < i.vector; v++) {
            const NUMBER x = (NUMBER)at<REGISTER>(w, from[v])[l];
            memcpy(to + (size_t)v * sizeof x, &x, sizeof x);
        }
    }
}

/* A sum in memory; what was there before comes back where there is an output. */
template <typename T> static void add_to_memory(warp &w, const instruction &i) {
    const uint32_t *o = places(w, i), base = o[i.outputs], *from = o + i.outputs + 1;
    alignas(64) uint64_t address[LANES];
    find_addresses(w, i, base, address);
    for (int l = 0; l < LANES; l++) {
        if (!(w.mask >> l & 1)) continue;
        unsigned char *to = lane_place(w, i, l, address[l], true);
        for (int v = 0; v < i.vector; v++) {
            T x;
            memcpy(&x, to + (size_t)v * sizeof x, sizeof x);
            if (i.outputs) at<T>(w, o[0])[l] = x;
            x += at<T>(w, from[v])[l];
            memcpy(to + (size_t)v * sizeof x, &x, sizeof x);
        }
    }
}

/* ---- ldmatrix and stmatrix: lane 8 m + r has the address of row r of matrix m ---- */

static void matrix_rows(warp &w, const instruction &i, uint32_t base, bool write, unsigned char **rows) {
    const uint32_t *address = at<uint32_t>(w, base);
    for (int l = 0; l < LANES; l++) rows[l] = lane_place(w, i, l, address[l] + (uint32_t)i.offset, write);
}

template <bool TRANSPOSED> static void ldmatrix(warp &w, const instruction &i) {
    const uint32_t *to = places(w, i);
    unsigned char *rows[LANES];
    matrix_rows(w, i, to[4], false, rows);
    for (int m = 0; m < 4; m++) {
        uint32_t *d = at<uint32_t>(w, to[m]);
        for (int l = 0; l < LANES; l++) {
            uint16_t low, high;
            memcpy(&low, TRANSPOSED ? rows[8 * m + l % 4 * 2] + l / 4 * 2 : rows[8 * m + l / 4] + l % 4 * 4, 2);
            memcpy(&high, TRANSPOSED ? rows[8 * m + l % 4 * 2 + 1] + l / 4 * 2 : rows[8 * m + l / 4] + l % 4 * 4 + 2,
                   2);
            d[l] = low | (uint32_t)high << 16;
        }
    }
}

static void stmatrix(warp &w, const instruction &i) {
    const uint32_t *from = places(w, i) + 1;
    unsigned char *rows[LANES];
    matrix_rows(w, i, from[-1], true, rows);
    for (int m = 0; m < 4; m++)
        for (int l = 0; l < LANES; l++) memcpy(rows[8 * m + l / 4] + l % 4 * 4, &at<uint32_t>(w, from[m])[l], 4);
}

/* ---- the table; "ld." and "st." with a space, .v2 or .v4, and a type are made of these ---- */

typedef uint32_t u32;
typedef uint64_t u64;

const opcode MEMORY[] = {
    {"ld u8", load<u32, uint8_t>, 0, ANY, 0, 1},
    {"ld u16", load<u32, uint16_t>, 0, ANY, 0, 2},
    {"ld u32", load<u32, u32>, 0, ANY, 0, 4},
    {"ld s32", load<u32, u32>, 0, ANY, 0, 4},
    {"ld f32", load<u32, u32>, 0, ANY, 0, 4},
    {"ld b32", load<u32, u32>, 0, ANY, 0, 4},
    {"ld u64", load<u64, u64>, 0, ANY, 0, 8},
    {"ld f64", load<u64, u64>, 0, ANY, 0, 8},
    {"ld wide s32", load<u64, int32_t>, 0, ANY, 0, 4}, /* a register of 64 bits */
    {"ld wide u32", load<u64, u32>, 0, ANY, 0, 4},
    {"st u8", store<u32, uint8_t>, 0, ANY, 0, 1},
    {"st u16", store<u32, uint16_t>, 0, ANY, 0, 2},
    {"st u32", store<u32, u32>, 0, ANY, 0, 4},
    {"st f32", store<u32, u32>, 0, ANY, 0, 4},
    {"st b32", store<u32, u32>, 0, ANY, 0, 4},
    {"st wide u32", store<u64, u32>, 0, ANY, 0, 4},
    {"st u64", store<u64, u64>, 0, ANY, 0, 8},
    {"st f64", store<u64, u64>, 0, ANY, 0, 8},
    {"atom.global.add.f32", add_to_memory<float>, 1, ANY, GLOBAL, 4},
    {"atom.global.add.u32", add_to_memory<u32>, 1, ANY, GLOBAL, 4},
    {"red.global.add.v4.f32", add_to_memory<float>, 0, ANY, GLOBAL, 4, 4},
    {"ldmatrix.sync.aligned.m8n8.x4.shared.b16", ldmatrix<false>, 4, ALL, SHARED, 16},
    {"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", ldmatrix<true>, 4, ALL, SHARED, 16},
    {"stmatrix.sync.aligned.m8n8.x4.shared.b16", stmatrix, 0, ALL, SHARED, 16},
    {nullptr, nullptr, 0},
};

} /* namespace ptx */
