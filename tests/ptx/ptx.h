/* ptx.h - an interpreter of the PTX that nvcc makes of this project's CUDA code - MIT or public domain

   A program of tests or an example is compiled by nvcc with PTX instead of machine code and linked with this instead of
   the CUDA runtime. A launch takes the PTX out of the program's own fat binary and interprets it:

       read.cc   parses an entry and decodes it once to a compact form
       run.cc    warps and arithmetic; a register of a warp is a vector of 32 lanes
       memory.cc loads, stores and their checks
       async.cc  cp.async, mbarriers, bulk copies, wgmma, and the check of races in shared memory
       cuda.cc   the runtime's functions;   blas.cc   those of cuBLAS and cuBLASLt

   Environment: PTX_ARCH    80 (default), 86 or 90: the device's compute capability, and so which PTX runs
                PTX_LATE    1 (default): copies and wgmma happen as late as waits allow; 0: when they are issued
                PTX_COPIES  oldest (default), newest or random: the order in which bulk copies that are late land
                PTX_ORDER   forward (default), reverse or shuffled: the order of a block's warps
                PTX_BLOCKS  how many blocks run at once (1)
                PTX_FUSE    1: a product and the sum that it is for become one fma, as ptxas may do
                PTX_RACE    1: shared memory is checked for races between warps, copies and wgmma
                PTX_DEVICES, PTX_PEERS   how many devices (1), and whether they see each other (1)
                PTX_DUMP, PTX_TEXT   folders: the text of the program's images is written, or read instead of them
                PTX_PLANTED    the value of the variable ptx_planted
                PTX_RAN     a file to which the names of entries that ran are added
                PTX_PROGRAMS   for tests/ptx/test_ptx.cc: a folder of texts that PTX_DUMP wrote, a program each */

#ifndef PTX_H
#define PTX_H

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace ptx {

const int LANES = 32;
const uint32_t ALL_LANES = 0xFFFFFFFFu;

/* ---- what is decoded ---- */

struct warp;
struct instruction;
typedef void (*handler)(warp &, const instruction &);

/* Addresses of shared memory and of a thread's own are offsets; all others are the host's. */
enum space { GENERIC, GLOBAL, SHARED, LOCAL, PARAM };

/* The lanes that must be here for an instruction: any, all that have not returned, or those of its last operand. */
enum lanes_needed { ANY, ALL, OF_MASK };

/* The place of an operand: bytes from the start of the warp's registers, or, with this bit, of the kernel's constants.
   Registers of 16 and 32 bits have 32 x 4 bytes, of 64 bits 32 x 8; a predicate is 32 bits, one for each lane. */
const uint32_t IS_CONSTANT = 0x80000000u, NO_PLACE = 0x7FFFFFFFu;

struct opcode {
    const char *name;
    handler run;
    int outputs; /* operands that are written, which come first */
    lanes_needed needs = ANY;
    uint8_t space = GLOBAL, bytes = 0, vector = 1; /* of what reads or writes memory */
};

struct instruction {
    handler run;
    uint32_t d, a, b, c; /* the first operands */
    uint32_t more, n;    /* all of them: kernel.places[more .. more + n) */
    uint32_t guard;      /* the predicate's place, or NO_PLACE */
    bool guard_negated, wide_address;
    uint8_t needs, outputs, space, bytes, vector, bytes_of_wgmma; /* as opcode */
    int32_t offset;                                               /* of an address */
    int target;                                                   /* of a branch */
    int line;                                                     /* of the text */
    const char *name;                                             /* of its opcode; a load or store: its own */
};

struct parameter {
    uint32_t offset, bytes;
};

struct kernel {
    std::string name;
    std::vector<instruction> code;
    std::vector<uint32_t> places;
    std::vector<unsigned char> constants;
    char *constants_at = nullptr;
    std::vector<parameter> parameters;
    std::vector<unsigned char> parameter_values;
    unsigned char *parameters_at = nullptr; /* stays where it is: addresses of parameters are constants */
    uint32_t parameter_bytes = 0, register_bytes = 0, static_shared = 0, dynamic_shared_at = 0, local_bytes = 0;
    int max_threads = 1024;
    bool has_async = false, has_wgmma = false;
};

struct text_place {
    size_t at;
    int line;
};

/* One image of a fat binary. Entries are decoded when they are launched first. */
struct module {
    std::string text;
    std::map<std::string, std::unique_ptr<kernel>> kernels;
    std::map<std::string, uint64_t> globals;    /* where its variables lie */
    std::map<std::string, text_place> entries;  /* where the parameters begin; filled by entries_of */
    std::vector<text_place> variables;          /* lines that may declare one */
};
const kernel *find_kernel(module &m, const std::string &name); /* NULL: there is none */
const std::map<std::string, text_place> &entries_of(module &m);

/* ---- what runs ---- */

struct block;
struct race_clocks;

/* A copy of cp.async that was issued and has not landed. */
struct small_copy {
    uint32_t lane, group, to, bytes, wanted;
    const unsigned char *from;
};

struct pending_wgmma {
    const instruction *i;
    uint64_t a, b;
    bool add;
    uint32_t group;
    bool done;
};

enum wait_kind { NOT_WAITING, AT_BARRIER, AT_MBARRIER, AT_REGISTERS };

struct warp {
    char *base[2];                          /* registers, constants */
    uint32_t mask;                          /* lanes that run this instruction */
    uint32_t active, live, parked, waiting; /* lanes at pc; not returned; that wait for others of the warp, for more */
    int pc, next;
    bool split, yields, apart; /* lanes went apart, each with its pc; others have their turn; not all are at pc */
    alignas(64) int32_t lanes[LANES]; /* the mask, 0 or -1 for each lane */
    int at[LANES];
    wait_kind kind;
    uint32_t wait_address[LANES], wait_parity[LANES];
    block *in;
    const kernel *of;
    int index;
    std::vector<small_copy> copies;
    uint32_t copy_groups[LANES]; /* committed */
    std::vector<pending_wgmma> products;
    uint32_t product_groups;
    std::vector<uint32_t> written;   /* by register: when an instruction wrote it; only where there is wgmma */
    std::vector<unsigned char> busy; /* by register: a wgmma in flight uses it */
    uint32_t time, fenced;
    int registers; /* of each thread: setmaxnreg */
    uint32_t jumps_back;
};

struct mbarrier {
    uint32_t address, expected, pending;
    int64_t bytes;
    uint64_t phase;
    int maker, maker_lane;
    uint32_t made; /* the maker's time */
    bool fenced;
    std::vector<uint32_t> given, complete; /* clocks */
};

struct bulk_copy {
    struct piece {
        uint32_t to;
        const unsigned char *from;
    }; /* 16 bytes; NULL: zeros */
    std::vector<piece> pieces;
    int barrier;
};

struct named_barrier {
    uint32_t wanted = 0, arrived = 0;
    uint64_t here = 0, waiting = 0; /* warps */
    std::vector<uint32_t> given;
};

/* Four bytes of shared memory. */
enum granule_flag { IN_FLIGHT = 1, HOLDS_MBARRIER = 2 };

struct block {
    const kernel *of = nullptr;
    uint32_t id[3], size[3], grid[3];
    int n_threads = 0;
    std::vector<unsigned char> shared, local;
    std::vector<warp> warps;
    std::vector<char> register_store;
    char *registers = nullptr;
    std::vector<unsigned char> flags; /* by granule */
    std::vector<uint32_t> write_time; /* by granule: the thread's time when it wrote, for the asynchronous proxy */
    std::vector<uint16_t> writer;
    std::vector<uint32_t> proxy_fences; /* by thread: its warp's time */
    named_barrier barriers[16];
    std::vector<mbarrier> mbarriers;
    std::vector<bulk_copy> copies;
    std::shared_ptr<race_clocks> clocks;
    int register_pool = 0;
};

struct settings {
    int arch, blocks, devices;
    bool late, fuse, race, peers;
    char copies, order; /* the word's first letter */
    std::string ran;
};
settings read_settings(); /* of the environment */
settings &options();
uint32_t random_number(uint32_t below);

/* Ends the run. The one with a warp says where: entry, block, warp, line, instruction. A text that is not understood
   has a status of its own: nothing was learnt about what it would do. */
const int STOPPED = 70, NOT_READ = 71;
[[noreturn]] void stop(const char *format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void refuse_text(const std::string &entry, int line, const std::string &what);
[[noreturn]] void stop(const warp &w, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- read.cc ---- */

const int SPECIAL_REGISTERS = 13; /* %tid, %ntid, %ctaid, %nctaid and %laneid lie first */
std::vector<const opcode *> all_opcodes();
unsigned char *new_global(uint32_t bytes);

/* ---- run.cc ---- */

void set_mask(warp &w, uint32_t mask);
void leave_lanes(warp &w, uint32_t lanes, int pc);
void run_grid(const kernel &k, const uint32_t grid[3], const uint32_t size[3], uint32_t dynamic_shared);

template <typename T> inline T *at(warp &w, uint32_t place) {
    return (T *)(w.base[place >> 31] + (place & ~IS_CONSTANT));
}
inline const uint32_t *places(const warp &w, const instruction &i) { return &w.of->places[i.more]; }

/* The warp's lanes wait until they are woken; the instruction runs anew then, or, if `done`, the next one. */
void wait_here(warp &w, uint32_t lanes, wait_kind kind, bool done);

/* ---- memory.cc ---- */

unsigned char *shared_place(warp &w, uint32_t address, uint32_t bytes, const char *what);
void check_device_memory(const warp &w, uint64_t address, uint64_t bytes, const char *what);
/* cuda.cc: the allocation that holds an address, for the device that runs. */
bool find_allocation(uint64_t address, uint64_t *begin, uint64_t *end);

/* ---- async.cc ---- */

bool land_a_copy(block &b);
void wake_mbarrier(block &b, uint32_t address);
void note_shared(warp &w, uint32_t lane, uint32_t address, uint32_t bytes, bool write);
void check_registers(warp &w, const instruction &i);
void finish_warp(warp &w);
void start_block(block &b);
std::string who_waits(const block &b);

struct tensor_map { /* what stands in a CUtensorMap of 128 bytes */
    uint64_t magic;
    unsigned char *data;
    uint64_t size[3], stride[2];
    uint32_t box[3], rank, element, swizzle;
};
const uint64_t TENSOR_MAP_MAGIC = 0x70747874656E736Fu;

/* race clocks: a warp gives what it did and saw, and takes what others gave */
void give(warp &w, std::vector<uint32_t> *to);
void take(warp &w, const std::vector<uint32_t> &from);

#include "vectors.h"

} /* namespace ptx */

#endif /* PTX_H */
