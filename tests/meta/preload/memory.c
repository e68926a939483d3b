/* memory.c - lets a program run out of memory, for tests/command/files_check.sh, which preloads it.

   Of the allocations since the start, the one with the number $SHIM_FROM fails and all up to $SHIM_TO do. $SHIM_COUNT
   names a file that gets how many there were. */

#define _GNU_SOURCE /* RTLD_NEXT */
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

static long count, from, to;
static char early[4096]; /* for dlsym itself */
static size_t n_early;

static void __attribute__((constructor)) start(void) {
    const char *first = getenv("SHIM_FROM"), *last = getenv("SHIM_TO");
    from = first ? atol(first) : 0;
    to = last ? atol(last) : 0;
    count = 0;
}

static void __attribute__((destructor)) finish(void) {
    const char *path = getenv("SHIM_COUNT");
    long counted = count;
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file) return;
    fprintf(file, "%ld\n", counted);
    fclose(file);
}

static int fails(void) {
    count++;
    if (count < from || count > to) return 0;
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t bytes) {
    static void *(*next)(size_t);
    if (!next) *(void **)&next = dlsym(RTLD_NEXT, "malloc");
    return fails() ? NULL : next(bytes);
}

void *realloc(void *memory, size_t bytes) {
    static void *(*next)(void *, size_t);
    if (!next) *(void **)&next = dlsym(RTLD_NEXT, "realloc");
    return fails() ? NULL : next(memory, bytes);
}

void *calloc(size_t n, size_t bytes) {
    static void *(*next)(size_t, size_t);
    static int looking;
    if (!next && !looking) {
        looking = 1;
        *(void **)&next = dlsym(RTLD_NEXT, "calloc");
        looking = 0;
    }
    if (!next) { /* some dlsym takes memory itself, and never gives it back */
        size_t at = n_early;
        if (bytes > 0 && n > (sizeof early - at) / bytes) return NULL;
        n_early += (n * bytes + 15) / 16 * 16;
        return early + at;
    }
    return fails() ? NULL : next(n, bytes);
}
