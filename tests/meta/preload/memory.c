/* memory.c - lets a program run out of memory, for tests/command/files_check.sh, which preloads it.

   Of the allocations since the start, the one with the number $SHIM_FROM fails and all up to $SHIM_TO do. $SHIM_COUNT
   names a file that gets how many there were.

   With $SHIM_EACH, a folder, the program itself never fails; at every $SHIM_STEPth allocation it forks, and the child goes
   on without that one, and then another child without any from there on: much faster than to start anew for each. What a
   child says goes to "said" in that folder, its complaints to "err". One that ends with 1 must complain of memory. Of all
   others the command $SHIM_JUDGE is asked, with the status in $SHIM_STATUS; where that fails, or a child hangs for a
   minute, "why" gets the number of the allocation, and no more children are made. For programs of one thread that write
   no files: a child would take them away from its parent. */

#define _GNU_SOURCE /* RTLD_NEXT */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static long count, from, to, step;
static const char *each; /* NULL: nothing of that kind, any more */
static char early[4096]; /* for dlsym itself */
static size_t n_early;

static void __attribute__((constructor)) start(void) {
    const char *first = getenv("SHIM_FROM"), *last = getenv("SHIM_TO");
    const char *stride = getenv("SHIM_STEP");
    from = first ? atol(first) : 0;
    to = last ? atol(last) : 0;
    step = stride ? atol(stride) : 1;
    each = getenv("SHIM_EACH");
    if (each) unsetenv("LD_PRELOAD"); /* the judge has memory */
    count = 0;
}

/* ---- a child at each allocation ---- */

static const char *path_of(const char *name) {
    static char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", each, name);
    return path;
}

static void redirect(int to_what, const char *name) {
    int file = open(path_of(name), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    dup2(file, to_what);
    close(file);
}

static int complains_of_memory(void) {
    char text[4096];
    FILE *file = fopen(path_of("err"), "r");
    size_t n = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file) fclose(file);
    text[n] = 0;
    return strstr(text, "out of memory") || strstr(text, "gave no memory") || strstr(text, "Cannot allocate memory");
}

static int is_sound(int status) {
    char number[16];
    if (WIFEXITED(status) && WEXITSTATUS(status) == 1) return complains_of_memory();
    snprintf(number, sizeof number, "%d", WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
    setenv("SHIM_STATUS", number, 1);
    return system(getenv("SHIM_JUDGE")) == 0;
}

/* Returns whether this is a child in which the allocation fails. */
static int is_child(void) {
    const char *folder = each;
    int on;
    for (on = 0; on < 2 && folder != NULL; on++) {
        int status = 0;
        pid_t child;
        each = folder;
        child = fork();
        if (child == 0) {
            redirect(1, "said");
            redirect(2, "err");
            alarm(600);
            from = count;
            to = on ? LONG_MAX : count;
            each = NULL;
            return 1;
        }
        waitpid(child, &status, 0);
        if (!is_sound(status)) {
            FILE *why = fopen(path_of("why"), "w");
            if (why) fprintf(why, "allocation %ld%s: status %d\n", count, on ? " and all after it" : "", status);
            if (why) fclose(why);
            folder = NULL;
        }
    }
    each = folder;
    return 0;
}

static void __attribute__((destructor)) finish(void) {
    const char *path = getenv("SHIM_COUNT");
    long counted = count;
    each = NULL;
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file) return;
    fprintf(file, "%ld\n", counted);
    fclose(file);
}

static int fails(void) {
    static int busy; /* with what a child does, and what this takes itself */
    int here = 0;
    if (busy) return 0;
    count++;
    if (each && count % step == 0) {
        busy = 1;
        here = is_child();
        busy = 0;
    }
    if (here) errno = ENOMEM;
    if (here) return 1;
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
