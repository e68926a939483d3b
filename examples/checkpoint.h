/* checkpoint.h - saves a training run and continues it - MIT or public domain

   A checkpoint holds the run's settings, its progress, and its arrays (parameters and both moments). It is written to
   PATH.chunkflow-tmp0, synced to disk and renamed, so that PATH is always either the whole old checkpoint or the whole
   new one. Loading reads all of it and checks it (kind, size, checksum, settings) before changing anything. A
   checkpoint that does not match is refused, and its file is unchanged.

   Only one trainer uses a checkpoint at a time. It holds a lock on PATH.chunkflow-lock from start to end, and a second
   trainer ends at its start. The operating system releases the lock with the process, however that ends. The empty file
   is removed at a normal end; one that a killed trainer left locks nothing.

   Layout: magic, byte order, four counts; settings (name, value); progress; arrays; checksum of all that. Numbers are
   in the byte order of the machine, which must be the reader's. Needs POSIX with realpath, and flock: define
   _XOPEN_SOURCE 700 before the first #include of the program. */

#ifndef TRAIN_CHECKPOINT_H
#define TRAIN_CHECKPOINT_H

#include "base.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define CHECKPOINT_MAGIC "cftrain1"
#define CHECKPOINT_BYTE_ORDER 0x0102030405060708
#define CHECKPOINT_MAX_COUNT ((int64_t)1 << 40)

/* A setting that must be equal for a run to continue: an integer, or the bits of a double. */
typedef struct checkpoint_setting {
    char name[24];
    int64_t value;
    int64_t is_double;
} checkpoint_setting;

static inline checkpoint_setting setting_int(const char *name, int64_t value) {
    checkpoint_setting s = {{0}, value, 0};
    snprintf(s.name, sizeof s.name, "%s", name);
    return s;
}

static inline checkpoint_setting setting_double(const char *name, double value) {
    checkpoint_setting s = {{0}, 0, 1};
    snprintf(s.name, sizeof s.name, "%s", name);
    memcpy(&s.value, &value, sizeof value);
    return s;
}

#define CHECKPOINT_ARRAYS 3

/* Moves numbers first .. first + count of an array to or from `numbers`. */
typedef void (*checkpoint_move_fn)(void *user, int array, int64_t first, int64_t count, real *numbers);

/* The contents of a checkpoint, and their destinations when one is read. Arrays are NULL if they are not in host
   memory, or too large to be there twice. `fetch` then supplies their numbers piece by piece for writing, and `store`
   takes them on reading. */
typedef struct checkpoint {
    const checkpoint_setting *settings;
    int64_t n_settings;
    int64_t *progress;
    int64_t n_progress;
    real *arrays[CHECKPOINT_ARRAYS];
    int64_t count; /* of each array */
    checkpoint_move_fn fetch, store;
    void *user;    /* of both */
} checkpoint;

#ifndef CHECKPOINT_PIECE
#define CHECKPOINT_PIECE ((int64_t)1 << 20) /* numbers moved at a time */
#endif

typedef struct checkpoint_head {
    char magic[8];
    int64_t byte_order, n_settings, n_progress, count, real_bytes;
} checkpoint_head;

/* Returns the bytes of a whole checkpoint with this head; -1 if the head claims impossible numbers. */
static inline int64_t checkpoint_bytes(const checkpoint_head *h) {
    if (h->n_settings < 0 || h->n_settings > 1024 || h->n_progress < 0 || h->n_progress > 1024) return -1;
    if (h->count < 0 || h->count > CHECKPOINT_MAX_COUNT || (h->real_bytes != 4 && h->real_bytes != 8)) return -1;
    return (int64_t)sizeof *h + h->n_settings * (int64_t)sizeof(checkpoint_setting) + h->n_progress * 8 +
           CHECKPOINT_ARRAYS * h->count * h->real_bytes + 8;
}

static inline checkpoint_head checkpoint_head_of(const checkpoint *c) {
    checkpoint_head h = {{0}, CHECKPOINT_BYTE_ORDER, c->n_settings, c->n_progress, c->count, (int64_t)sizeof(real)};
    memcpy(h.magic, CHECKPOINT_MAGIC, sizeof h.magic);
    return h;
}

/* Copies `bytes` from a place in the file's image to memory, and moves on. */
static inline void image_read(const unsigned char **at, void *to, int64_t bytes) {
    memcpy(to, *at, (size_t)bytes);
    *at += bytes;
}

/* ================================================================================================================
   >>lock
   ================================================================================================================ */

/* Joins the two texts and a number into a name; a negative number is left out. The caller frees it. */
static inline char *joined_name(const char *path, const char *suffix, int number) {
    const size_t bytes = strlen(path) + strlen(suffix) + 12;
    char *name = TAKE(char, (int64_t)bytes);
    if (number < 0) snprintf(name, bytes, "%s%s", path, suffix);
    else snprintf(name, bytes, "%s%s%d", path, suffix, number);
    return name;
}

/* Returns the mode of a new file. */
static inline int new_file_mode(void) {
    const mode_t mask = umask(0);
    umask(mask);
    return (int)(0666 & ~mask);
}

/* Returns the file behind a checkpoint's path, following a symbolic link. *mode: its permissions, or those that a new
   file will have. NULL with errno for a dangling link. The caller frees the result. */
static inline char *file_behind(const char *path, int *mode) {
    struct stat status;
    *mode = new_file_mode();
    if (stat(path, &status) == 0) {
        *mode = (int)(status.st_mode & 0777);
        return realpath(path, NULL);
    }
    if (lstat(path, &status) != 0) return joined_name(path, "", -1);
    errno = ENOENT;
    return NULL;
}

/* Returns whether a name refers to the open regular file. Between opening and locking, another file may have taken the
   name. */
static inline int leads_to(const char *name, int file) {
    struct stat named, opened;
    return lstat(name, &named) == 0 && fstat(file, &opened) == 0 && S_ISREG(opened.st_mode) &&
           named.st_ino == opened.st_ino && named.st_dev == opened.st_dev;
}

static char *checkpoint_lock_name; /* this program's lock; it has one checkpoint */
static int checkpoint_lock_file;

static inline void checkpoint_unlock(void) {
    if (leads_to(checkpoint_lock_name, checkpoint_lock_file)) unlink(checkpoint_lock_name);
    close(checkpoint_lock_file);
    free(checkpoint_lock_name);
}

/* Returns whether an open file can be a trainer's lock: an empty file with no other link. Anything else belongs to a
   user, and is not removed. */
static inline int can_be_lock(int file) {
    struct stat status;
    return fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_size == 0 && status.st_nlink <= 1;
}

/* Opens the lock's file and takes the lock. Returns -1 with errno: EWOULDBLOCK if another process has it, EEXIST if the
   file is not a lock. On a file system without locks it returns the file without locking it. */
static inline int open_lock(const char *name) {
    for (;;) {
        const int file = open(name, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
        if (file < 0) return -1;
        const int busy = flock(file, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
        if (busy || !can_be_lock(file)) {
            close(file);
            errno = busy ? EWOULDBLOCK : EEXIST;
            return -1;
        }
        if (leads_to(name, file)) return file;
        close(file); /* the previous holder removed the file at its end: open the new one */
    }
}

/* Takes the lock of the file that a checkpoint's path refers to now. Releases the previous lock if the path referred to
   another file then. Returns 0, or errno. */
static inline int lock_target(const char *target) {
    char *name = joined_name(target, ".chunkflow-lock", -1);
    if (checkpoint_lock_name && leads_to(name, checkpoint_lock_file)) {
        free(name);
        return 0;
    }
    const int file = open_lock(name), code = errno;
    if (file < 0) {
        free(name);
        return code;
    }
    if (checkpoint_lock_name) checkpoint_unlock();
    checkpoint_lock_name = name;
    checkpoint_lock_file = file;
    return 0;
}

/* Makes this program the only user of the checkpoint until it ends. If another program uses it, or no file can be
   there, it ends this one with a message. Call it once, before reading the checkpoint. */
static inline void checkpoint_lock(const char *path) {
    int mode;
    char *target = file_behind(path, &mode);
    if (!target) fail(EXIT_CHECK_FAILED, "%s: the checkpoint cannot be written: %s", path, strerror(errno));
    const int code = lock_target(target);
    if (code == EWOULDBLOCK) fail(EXIT_BAD_INPUT, "%s: another trainer is running with this checkpoint", path);
    if (code != 0)
        fail(EXIT_CHECK_FAILED, "%s: the checkpoint cannot be written: %s.chunkflow-lock: %s", path, target,
             strerror(code));
    atexit(checkpoint_unlock);
    free(target);
}

/* ================================================================================================================
   >>write
   ================================================================================================================ */

/* Syncs the directory of `path` to disk, so that a rename in it lasts. Some file systems cannot; that is ignored. */
static inline void sync_directory_of(const char *path) {
    const char *slash = strrchr(path, '/');
    int64_t length = slash ? max_of(1, slash - path) : 1;
    char *directory = TAKE(char, length + 1);
    memcpy(directory, slash ? path : ".", (size_t)length);
    int file = open(directory, O_RDONLY);
    if (file >= 0) {
        (void)fsync(file);
        close(file);
    }
    free(directory);
}

/* A file that is written piece by piece, with hash_bytes of everything written. */
typedef struct hashed_file {
    FILE *file;
    uint64_t hash;
    unsigned char rest[8]; /* bytes of an incomplete word */
    size_t n_rest;
    int ok;
} hashed_file;

static inline void write_hashed(hashed_file *f, const void *bytes, int64_t count) {
    const unsigned char *at = (const unsigned char *)bytes, *end = at + count;
    f->ok = f->ok && fwrite(bytes, 1, (size_t)count, f->file) == (size_t)count;
    for (; at < end; at++) {
        uint64_t word;
        f->rest[f->n_rest++] = *at;
        if (f->n_rest < 8) continue;
        memcpy(&word, f->rest, 8);
        f->hash = mix64_pair(f->hash, word);
        f->n_rest = 0;
    }
}

static inline void write_array(hashed_file *f, const checkpoint *c, int array) {
    real *held = c->arrays[array] ? NULL : TAKE(real, min_of(c->count, CHECKPOINT_PIECE));
    for (int64_t first = 0; first < c->count; first += CHECKPOINT_PIECE) {
        const int64_t count = min_of(CHECKPOINT_PIECE, c->count - first);
        if (held) c->fetch(c->user, array, first, count, held);
        write_hashed(f, held ? held : c->arrays[array] + first, count * (int64_t)sizeof(real));
    }
    free(held);
}

static inline void write_parts(hashed_file *f, const checkpoint *c) {
    const checkpoint_head head = checkpoint_head_of(c);
    write_hashed(f, &head, (int64_t)sizeof head);
    write_hashed(f, c->settings, c->n_settings * (int64_t)sizeof *c->settings);
    write_hashed(f, c->progress, c->n_progress * (int64_t)sizeof *c->progress);
    for (int i = 0; i < CHECKPOINT_ARRAYS; i++) write_array(f, c, i);
    const uint64_t checksum = hash_bytes(f->hash, f->rest, f->n_rest);
    f->ok = f->ok && fwrite(&checksum, sizeof checksum, 1, f->file) == 1;
}

/* The signals that would end the program. While a file is written they are recorded, not blocked: blocking works for
   one thread, and any other thread would still end the program. */
static const int ending_signals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGXCPU};
#define N_ENDING_SIGNALS (sizeof ending_signals / sizeof ending_signals[0])
static volatile sig_atomic_t ending_signal_came[N_ENDING_SIGNALS];

typedef struct held_signals {
    struct sigaction ending[N_ENDING_SIGNALS], file_size; /* as they were before */
} held_signals;

static inline void note_signal(int number) {
    for (size_t i = 0; i < N_ENDING_SIGNALS; i++)
        if (ending_signals[i] == number) ending_signal_came[i] = 1;
}

static inline void hold_signals(held_signals *held) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_flags = SA_RESTART;
    action.sa_handler = note_signal;
    for (size_t i = 0; i < N_ENDING_SIGNALS; i++) {
        ending_signal_came[i] = 0;
        sigaction(ending_signals[i], &action, &held->ending[i]);
    }
    action.sa_handler = SIG_IGN; /* a write beyond the file size limit then returns an error */
    sigaction(SIGXFSZ, &action, &held->file_size);
}

/* Sends the signals that arrived meanwhile. */
static inline void release_signals(const held_signals *held) {
    sigaction(SIGXFSZ, &held->file_size, NULL);
    for (size_t i = 0; i < N_ENDING_SIGNALS; i++) sigaction(ending_signals[i], &held->ending[i], NULL);
    for (size_t i = 0; i < N_ENDING_SIGNALS; i++)
        if (ending_signal_came[i]) raise(ending_signals[i]);
}

/* Opens a temporary file that no other trainer writes to: a new one, or one that a killed trainer left. A writer holds
   the file's lock until it has its final name. An existing file is taken over only if it is certainly a trainer's: this
   user's, with no other link. Returns -1 with errno, EEXIST if it is not. */
static inline int open_temporary(const char *name) {
    struct stat status;
    int file = open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    const int fresh = file >= 0;
    if (!fresh && errno != EEXIST) return -1;
    if (!fresh) file = open(name, O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    /* Without locks in the file system, only a new file is certainly free. */
    if (file >= 0 && (flock(file, LOCK_EX | LOCK_NB) == 0 || (fresh && errno != EWOULDBLOCK)) &&
        leads_to(name, file) && fstat(file, &status) == 0 &&
        (fresh || (status.st_nlink == 1 && status.st_uid == geteuid())) && ftruncate(file, 0) == 0)
        return file;
    if (file >= 0) close(file);
    errno = EEXIST;
    return -1;
}

/* Writes the checkpoint to an open file, syncs it to disk and renames it. Returns 0, or errno. */
static inline int write_and_rename(FILE *file, const char *temporary, const char *target, const checkpoint *c,
                                   int mode) {
    hashed_file f = {file, 0, {0}, 0, 1};
    errno = 0;
    f.ok = fchmod(fileno(file), (mode_t)mode) == 0;
    if (f.ok) write_parts(&f, c);
    f.ok = f.ok && fflush(file) == 0 && fsync(fileno(file)) == 0 && rename(temporary, target) == 0;
    return f.ok ? 0 : (errno ? errno : EIO);
}

/* Writes the checkpoint next to the file that it replaces, under a name that no other trainer uses, and renames it.
   Returns 0, or errno. */
static inline int write_in_place_of(const char *target, const checkpoint *c, int mode) {
    char *temporary = NULL;
    int descriptor = -1;
    for (int i = 0; i < 100 && descriptor < 0; i++) {
        free(temporary);
        temporary = joined_name(target, ".chunkflow-tmp", i);
        descriptor = open_temporary(temporary);
        if (descriptor < 0 && errno != EEXIST) break;
    }
    FILE *file = descriptor >= 0 ? fdopen(descriptor, "wb") : NULL;
    int code = file ? write_and_rename(file, temporary, target, c, mode) : errno;
    if (code != 0 && descriptor >= 0) unlink(temporary);
    if (file) fclose(file); /* this also releases the lock, after the rename */
    else if (descriptor >= 0) close(descriptor);
    free(temporary);
    return code;
}

/* Replaces the file at `path`, keeping its permissions. If it is a symbolic link, replaces the file that it refers to
   now, whose lock this program must get; a dangling link is refused. Signals wait until it is done, so no temporary
   file is left. Returns 0, or errno. */
static inline int replace_file(const char *path, const checkpoint *c) {
    held_signals held;
    int mode;
    char *target = file_behind(path, &mode);
    if (!target) return errno;
    hold_signals(&held);
    int code = checkpoint_lock_name ? lock_target(target) : 0;
    if (code == 0) code = write_in_place_of(target, c, mode);
    if (code == 0) sync_directory_of(target);
    release_signals(&held);
    free(target);
    return code;
}

/* Saves a checkpoint, or ends the program with a message; the old checkpoint then remains. */
static inline void checkpoint_save(const char *path, const checkpoint *c) {
    int code = replace_file(path, c);
    if (code != 0) fail(EXIT_CHECK_FAILED, "%s: the checkpoint cannot be written: %s", path, strerror(code));
}

/* ================================================================================================================
   >>read
   ================================================================================================================ */

/* Opens a file for reading all of it; returns NULL if there is none. Ends the program if it exists and cannot be read.
   Does not wait for a pipe without a writer. */
static inline FILE *open_whole_file(const char *path, int64_t *bytes) {
    struct stat status;
    const int descriptor = open(path, O_RDONLY | O_NONBLOCK);
    if (descriptor < 0 && errno == ENOENT) return NULL;
    FILE *file = descriptor >= 0 ? fdopen(descriptor, "rb") : NULL;
    if (!file || fstat(descriptor, &status) != 0) fail_to_read(path);
    if (!S_ISREG(status.st_mode)) fail(EXIT_BAD_INPUT, "%s: not a regular file", path);
    *bytes = (int64_t)status.st_size;
    return file;
}

#define CHECKPOINT_WHY 240

/* Returns whether a file of this size that begins with `head` can be a whole checkpoint; else `why` has the reason. */
static inline int checkpoint_head_fits(const checkpoint_head *head, int64_t bytes, char why[CHECKPOINT_WHY]) {
    if (bytes < (int64_t)sizeof *head || memcmp(head->magic, CHECKPOINT_MAGIC, sizeof head->magic) != 0) {
        snprintf(why, CHECKPOINT_WHY, "it is not a checkpoint of this trainer");
        return 0;
    }
    if (head->byte_order != CHECKPOINT_BYTE_ORDER) {
        snprintf(why, CHECKPOINT_WHY, "it was written on a machine with another byte order");
        return 0;
    }
    int64_t wanted = checkpoint_bytes(head);
    if (wanted < 0) {
        snprintf(why, CHECKPOINT_WHY, "it is damaged: its head makes no sense");
        return 0;
    }
    if (bytes != wanted) {
        snprintf(why, CHECKPOINT_WHY, "it is %s: %lld bytes, %lld wanted", bytes < wanted ? "truncated" : "damaged",
                 (long long)bytes, (long long)wanted);
        return 0;
    }
    return 1;
}

/* The same for the image of the whole file. */
static inline int checkpoint_is_whole(const unsigned char *image, int64_t bytes, checkpoint_head *head,
                                      char why[CHECKPOINT_WHY]) {
    uint64_t checksum;
    memset(head, 0, sizeof *head);
    memcpy(head, image, (size_t)min_of(bytes, (int64_t)sizeof *head));
    if (!checkpoint_head_fits(head, bytes, why)) return 0;
    memcpy(&checksum, image + bytes - 8, 8);
    if (hash_bytes(0, image, (size_t)bytes - 8) != checksum) {
        snprintf(why, CHECKPOINT_WHY, "it is damaged: its checksum does not fit its contents");
        return 0;
    }
    return 1;
}

static inline void setting_text(char *text, size_t bytes, const checkpoint_setting *s) {
    double value;
    memcpy(&value, &s->value, sizeof value);
    if (s->is_double) snprintf(text, bytes, "%.17g", value);
    else snprintf(text, bytes, "%lld", (long long)s->value);
}

/* Returns whether the whole checkpoint belongs to a run like `c`. */
static inline int checkpoint_fits(const unsigned char *image, const checkpoint_head *head, const checkpoint *c,
                                  char why[CHECKPOINT_WHY]) {
    if (head->real_bytes != (int64_t)sizeof(real)) {
        snprintf(why, CHECKPOINT_WHY, "its numbers have %lld bytes, those of this program %lld",
                 (long long)head->real_bytes, (long long)sizeof(real));
        return 0;
    }
    if (head->n_settings != c->n_settings || head->n_progress != c->n_progress) {
        snprintf(why, CHECKPOINT_WHY, "it was written by another version of this trainer");
        return 0;
    }
    const unsigned char *at = image + sizeof *head;
    for (int64_t i = 0; i < c->n_settings; i++) {
        checkpoint_setting theirs;
        char there[40], here[40];
        image_read(&at, &theirs, (int64_t)sizeof theirs);
        if (memcmp(&theirs, &c->settings[i], sizeof theirs) == 0) continue;
        theirs.name[sizeof theirs.name - 1] = 0;
        setting_text(there, sizeof there, &theirs);
        setting_text(here, sizeof here, &c->settings[i]);
        if (strcmp(theirs.name, c->settings[i].name) != 0) {
            snprintf(why, CHECKPOINT_WHY, "it was written by another version of this trainer");
        } else {
            snprintf(why, CHECKPOINT_WHY, "its %s is %s, that of this run is %s", theirs.name, there, here);
        }
        return 0;
    }
    if (head->count != c->count) {
        snprintf(why, CHECKPOINT_WHY, "it has %lld parameters, this run %lld", (long long)head->count,
                 (long long)c->count);
        return 0;
    }
    return 1;
}

static inline void take_array_of(const unsigned char **at, checkpoint *c, int array) {
    real *held = c->arrays[array] ? NULL : TAKE(real, min_of(c->count, CHECKPOINT_PIECE));
    for (int64_t first = 0; first < c->count; first += CHECKPOINT_PIECE) {
        const int64_t count = min_of(CHECKPOINT_PIECE, c->count - first);
        image_read(at, held ? held : c->arrays[array] + first, count * (int64_t)sizeof(real));
        if (held) c->store(c->user, array, first, count, held);
    }
    free(held);
}

/* Loads a checkpoint from the image of its file. Returns whether it did; if not, `why` has the reason, and nothing was
   changed. */
static inline int checkpoint_take(const unsigned char *image, int64_t bytes, checkpoint *c, char why[CHECKPOINT_WHY]) {
    checkpoint_head head;
    if (!checkpoint_is_whole(image, bytes, &head, why) || !checkpoint_fits(image, &head, c, why)) return 0;
    const unsigned char *at = image + sizeof head + (size_t)c->n_settings * sizeof *c->settings;
    image_read(&at, c->progress, c->n_progress * (int64_t)sizeof *c->progress);
    for (int i = 0; i < CHECKPOINT_ARRAYS; i++) take_array_of(&at, c, i);
    return 1;
}

/* Returns the file's bytes, or NULL if its head shows that it is not a whole checkpoint: a sparse file may be larger
   than all memory. Closes the file. */
static inline unsigned char *read_whole_file(FILE *file, const char *path, int64_t bytes, char why[CHECKPOINT_WHY]) {
    checkpoint_head head;
    memset(&head, 0, sizeof head);
    int ok = bytes < (int64_t)sizeof head || fread(&head, sizeof head, 1, file) == 1;
    unsigned char *image = ok && checkpoint_head_fits(&head, bytes, why) ? TAKE(unsigned char, bytes) : NULL;
    rewind(file);
    ok = ok && (!image || fread(image, 1, (size_t)bytes, file) == (size_t)bytes);
    fclose(file);
    if (!ok) fail(EXIT_BAD_INPUT, "%s: cannot be read", path);
    return image;
}

/* Loads a checkpoint from its file. 1: done. 0: there is no such file. -1: refused. */
static inline int checkpoint_load(const char *path, checkpoint *c, char why[CHECKPOINT_WHY]) {
    int64_t bytes = 0;
    FILE *file = open_whole_file(path, &bytes);
    if (!file) return 0;
    unsigned char *image = read_whole_file(file, path, bytes, why);
    int ok = image && checkpoint_take(image, bytes, c, why);
    free(image);
    return ok ? 1 : -1;
}

#endif /* TRAIN_CHECKPOINT_H */
