/* base.h - the basis of the trainer's other headers: the number type, memory, threads, hashing - MIT or public domain

   The headers of this folder hold their code as `static inline` functions, so that a trainer is one compiler command:

       cc -std=c99 -O3 -fopenmp examples/train_cpu.c -lm -o train_cpu

   -DTRAIN_FLOAT64 computes in double, for checks: gradients then agree to about 1e-13. */

#ifndef TRAIN_BASE_H
#define TRAIN_BASE_H

#ifdef __FAST_MATH__
#error "build the trainer without -ffast-math or -Ofast: replays would no longer repeat the first forward bit by bit"
#endif

/* These headers are C99, and a C++ compiler accepts them as well. C++ has no restrict, and warns about = {0} for a
   struct. */
#ifdef __cplusplus
#define restrict
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#pragma GCC diagnostic ignored "-Wmissing-braces"
#endif

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef TRAIN_FLOAT64
typedef double real;
#define REAL_NAME "float64"
#define real_exp exp
#define real_sqrt sqrt
#else
typedef float real;
#define REAL_NAME "float32"
#define real_exp expf
#define real_sqrt sqrtf
#endif

/* Put this before a for loop whose iterations are independent and write separate outputs. The number of threads then
   never changes a result. */
#ifdef _OPENMP
#include <omp.h>
#define PARALLEL_FOR _Pragma("omp parallel for schedule(dynamic)")
#else
#define PARALLEL_FOR
#endif

#if defined(__GNUC__) || defined(__clang__)
#define PRINTF_LIKE(format_at, arguments_at) __attribute__((format(printf, format_at, arguments_at)))
#define NEVER_RETURNS __attribute__((noreturn))
#else
#define PRINTF_LIKE(format_at, arguments_at)
#define NEVER_RETURNS
#endif

#define EXIT_CHECK_FAILED 1 /* results failed a check, or the machine failed (memory, disk) */
#define EXIT_BAD_INPUT 2    /* an option, a file or a checkpoint is not acceptable */

/* Ends the program with fail()'s message. A program of several processes defines OWN_END_PROGRAM and its own function
   of this name and type, because it must notify and end the other processes. */
NEVER_RETURNS static void end_program(int exit_code, const char *why);

#ifndef OWN_END_PROGRAM
NEVER_RETURNS static inline void end_program(int exit_code, const char *why) {
    fflush(stdout);
    fprintf(stderr, "train_cpu: %s\n", why);
    exit(exit_code);
}
#endif

/* Prints the reason on standard error and ends the program. */
NEVER_RETURNS PRINTF_LIKE(2, 3) static inline void fail(int exit_code, const char *format, ...) {
    char why[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(why, sizeof why, format, arguments);
    va_end(arguments);
    end_program(exit_code, why);
}

/* A file cannot be opened or read; errno has the reason. Running out of memory is not counted as bad input. */
NEVER_RETURNS static inline void fail_to_read(const char *path) {
    fail(errno == ENOMEM ? EXIT_CHECK_FAILED : EXIT_BAD_INPUT, "%s: %s", path, strerror(errno));
}

/* Call at the end of a program: fails if its output could not be written. */
static inline void must_be_printed(void) {
    if (fflush(stdout) != 0 || ferror(stdout)) fail(EXIT_CHECK_FAILED, "standard output cannot be written");
}

static inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

/* Bytes held now and at most, by purpose: on the device, which here is only a name, or in host memory. Every large
   buffer of the trainer goes through a meter, so the reported numbers are of memory really held. */
typedef enum memory_kind {
    MEMORY_ACTIVATIONS, /* kept from a forward for its backward, or for its replay */
    MEMORY_STATE,       /* K, V, dK and dV of a chain's tokens; with a stream, the ring that they pass through */
    MEMORY_WORKSPACE,   /* scratch of one pass */
    MEMORY_INPUTS,      /* with a stream: slots to which kept stage inputs return (local replay) */
    MEMORY_HOST,        /* states, stage inputs and outputs in host memory; all other kinds are on the device */
    MEMORY_KINDS
} memory_kind;

typedef struct memory_meter {
    int64_t held[MEMORY_KINDS];
    int64_t peak[MEMORY_KINDS];
} memory_meter;

static inline void memory_count(memory_meter *meter, memory_kind kind, int64_t bytes) {
    meter->held[kind] += bytes;
    meter->peak[kind] = max_of(meter->peak[kind], meter->held[kind]);
}

/* Allocates `count` items of `bytes` each, all zero. Never NULL. */
static inline void *take_memory(int64_t count, size_t bytes) {
    if (count < 0 || (uint64_t)count > SIZE_MAX / bytes) {
        fail(EXIT_CHECK_FAILED, "a buffer of %lld items of %lld bytes is not possible", (long long)count,
             (long long)bytes);
    }
    void *memory = calloc(count > 0 ? (size_t)count : 1, bytes);
    if (!memory) {
        fail(EXIT_CHECK_FAILED, "out of memory: %lld items of %lld bytes", (long long)count, (long long)bytes);
    }
    return memory;
}

#define TAKE(type, count) ((type *)take_memory((count), sizeof(type)))

/* splitmix64's finaliser: all bits of the result depend on all bits of x. */
static inline uint64_t mix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static inline uint64_t mix64_pair(uint64_t a, uint64_t b) { return mix64(mix64(a) ^ b); }

/* Hashes bytes, eight at a time. */
static inline uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t count) {
    const unsigned char *at = (const unsigned char *)bytes;
    for (; count >= 8; count -= 8, at += 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        hash = mix64_pair(hash, word);
    }
    uint64_t last = (uint64_t)count << 56;
    memcpy(&last, at, count);
    return mix64_pair(hash, last);
}

/* In [0, 1). */
static inline double uniform_of(uint64_t random_bits) { return (double)(random_bits >> 11) / 9007199254740992.0; } /* 2^53 */

/* Standard normal number `index` of the stream `key` (Box-Muller). */
static inline double normal_of(uint64_t key, int64_t index) {
    double radius = 1.0 - uniform_of(mix64_pair(key, 2 * (uint64_t)index)); /* in (0, 1] */
    double angle = 6.283185307179586 * uniform_of(mix64_pair(key, 2 * (uint64_t)index + 1));
    return sqrt(-2.0 * log(radius)) * cos(angle);
}

#endif /* TRAIN_BASE_H */
