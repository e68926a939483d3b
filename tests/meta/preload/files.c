/* files.c - watches how a program writes its files, for tests/command/files_check.sh, which preloads it.

   $SHIM_LOG gets a line for each call that matters: "file synced", "directory synced", "renamed synced NAME", or
   "renamed unsynced NAME" where the file was written to after it was last forced to the disk, or never was.
   SHIM_SIGNAL=n raises that signal when a file is to be forced to the disk, with SHIM_THREAD=1 in another thread, which
   blocks none; SHIM_FAIL=1 lets that fail. SHIM_NO_MEMORY=1 leaves no memory for opening a file that is to be read.
   SHIM_STOP=1 stops the program before a file gets its name for the first time, after the line "stopped".
   SHIM_LOCALE=1 puts the program into the locale of its environment before it starts. */

#define _GNU_SOURCE /* RTLD_NEXT */
#include <dlfcn.h>
#include <errno.h>
#include <locale.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static struct stat synced[16]; /* the last ones */
static int n_synced, stopped;

static void note(const char *what, const char *name) {
    const char *path = getenv("SHIM_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (!file) return;
    fprintf(file, "%s%s%s\n", what, *name ? " " : "", name);
    fclose(file);
}

/* The program that started this one may have it ignore signals. */
static void __attribute__((constructor)) start(void) {
    const char *number = getenv("SHIM_SIGNAL");
    if (number) signal(atoi(number), SIG_DFL);
    if (getenv("SHIM_LOCALE")) setlocale(LC_ALL, "");
}

static FILE *open_next(const char *name, const char *path, const char *mode) {
    FILE *(*next)(const char *, const char *);
    *(void **)&next = dlsym(RTLD_NEXT, name);
    if (!getenv("SHIM_NO_MEMORY") || *mode != 'r') return next(path, mode);
    errno = ENOMEM;
    return NULL;
}

FILE *fopen(const char *path, const char *mode) { return open_next("fopen", path, mode); }

FILE *fopen64(const char *path, const char *mode) { return open_next("fopen64", path, mode); }

static void *raise_unblocked(void *number) {
    sigset_t none;
    sigemptyset(&none);
    pthread_sigmask(SIG_SETMASK, &none, NULL);
    raise(*(int *)number);
    return NULL;
}

static void send(int number) {
    pthread_t thread;
    if (!getenv("SHIM_THREAD")) raise(number);
    else if (pthread_create(&thread, NULL, raise_unblocked, &number) == 0) pthread_join(thread, NULL);
}

int fsync(int file) {
    int (*next)(int);
    const char *number = getenv("SHIM_SIGNAL");
    struct stat status;
    int result;
    *(void **)&next = dlsym(RTLD_NEXT, "fsync");
    if (fstat(file, &status) != 0 || S_ISDIR(status.st_mode)) {
        note("directory synced", "");
        return next(file);
    }
    if (number) send(atoi(number));
    if (getenv("SHIM_FAIL")) {
        errno = EIO;
        return -1;
    }
    result = next(file);
    note("file synced", "");
    if (fstat(file, &synced[n_synced % 16]) == 0) n_synced++;
    return result;
}

static int is_synced(const struct stat *status) {
    int i;
    for (i = 0; i < 16 && i < n_synced; i++)
        if (synced[i].st_ino == status->st_ino && synced[i].st_dev == status->st_dev &&
            synced[i].st_size == status->st_size &&
            memcmp(&synced[i].st_mtim, &status->st_mtim, sizeof status->st_mtim) == 0)
            return 1;
    return 0;
}

int rename(const char *from, const char *to) {
    int (*next)(const char *, const char *);
    const char *name = strrchr(to, '/');
    struct stat status;
    int sound = stat(from, &status) == 0 && is_synced(&status);
    *(void **)&next = dlsym(RTLD_NEXT, "rename");
    if (getenv("SHIM_STOP") && !stopped++) {
        note("stopped", "");
        raise(SIGSTOP);
    }
    note(sound ? "renamed synced" : "renamed unsynced", name ? name + 1 : to);
    return next(from, to);
}
