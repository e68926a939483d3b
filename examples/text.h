/* text.h - documents as byte tokens, and their order in training - MIT or public domain

   A file becomes one document: BEGIN, its bytes, END. A directory means all regular files below it, in the order of
   their names, except entries whose name begins with a dot, directories called "build", and symbolic links. So the same
   tree gives the same documents on every machine. Documents longer than a limit are split into several, without losing
   a byte, and the number of split files is reported.

   Needs POSIX (opendir, lstat): define _POSIX_C_SOURCE 200809L before the first #include of the program. */

#ifndef TRAIN_TEXT_H
#define TRAIN_TEXT_H

#include "base.h"

#include <dirent.h>
#include <errno.h>
#include <sys/stat.h>

enum { TOKEN_BEGIN = 256, TOKEN_END, VOCABULARY };

typedef struct documents {
    int64_t count;
    int64_t *first;   /* (count + 1): document i is tokens[first[i] .. first[i + 1]) */
    uint16_t *tokens;
    int64_t n_files;
    int64_t n_cut;    /* files that became several documents */
    int64_t capacity, token_capacity;
} documents;

static inline int64_t document_length(const documents *d, int64_t i) { return d->first[i + 1] - d->first[i]; }

/* Makes room for `needed` items in an array that doubles. */
static inline void *grow(void *array, int64_t *capacity, int64_t needed, size_t bytes) {
    if (needed <= *capacity) return array;
    int64_t wanted = max_of(max_of(needed, 1024), *capacity * 2);
    void *larger = (uint64_t)wanted > SIZE_MAX / bytes ? NULL : realloc(array, (size_t)wanted * bytes);
    if (!larger) fail(EXIT_CHECK_FAILED, "out of memory for the documents");
    *capacity = wanted;
    return larger;
}

static inline void documents_free(documents *d) {
    free(d->first);
    free(d->tokens);
    memset(d, 0, sizeof *d);
}

/* The open document is tokens[first[count] .. first[count + 1]). */
static inline void open_document(documents *d) {
    d->first = (int64_t *)grow(d->first, &d->capacity, d->count + 2, sizeof *d->first);
    if (d->count == 0) d->first[0] = 0;
    d->first[d->count + 1] = d->first[d->count];
}

static inline void add_token(documents *d, int token) {
    int64_t n = d->first[d->count + 1]++;
    d->tokens = (uint16_t *)grow(d->tokens, &d->token_capacity, n + 1, sizeof *d->tokens);
    d->tokens[n] = (uint16_t)token;
}

static inline void close_document(documents *d) { d->count++; }

/* Reads a whole file. The caller frees what *bytes points to. */
static inline int64_t read_file(const char *path, unsigned char **bytes) {
    FILE *file = fopen(path, "rb");
    int64_t length = 0, capacity = 0;
    if (!file) fail_to_read(path);
    *bytes = NULL;
    for (;;) {
        if (length == capacity) {
            unsigned char *larger = TAKE(unsigned char, capacity = max_of(4096, 2 * capacity));
            if (length > 0) memcpy(larger, *bytes, (size_t)length);
            free(*bytes);
            *bytes = larger;
        }
        size_t n = fread(*bytes + length, 1, (size_t)(capacity - length), file);
        length += (int64_t)n;
        if (n == 0) break;
    }
    if (ferror(file)) fail_to_read(path);
    fclose(file);
    return length;
}

/* Returns the length of the block that starts at `begin`: up to and including the next blank lines, but at most
   `most`. */
static inline int64_t block_length(const unsigned char *bytes, int64_t begin, int64_t end, int64_t most) {
    int64_t i = begin + 1, limit = min_of(end, begin + most);
    while (i < limit && !(bytes[i - 1] == '\n' && bytes[i] == '\n')) i++;
    while (i < limit && bytes[i] == '\n') i++;
    return i - begin;
}

static inline void add_document(documents *d, const unsigned char *bytes, int64_t length) {
    open_document(d);
    add_token(d, TOKEN_BEGIN);
    for (int64_t i = 0; i < length; i++) add_token(d, bytes[i]);
    add_token(d, TOKEN_END);
    close_document(d);
}

/* longest: tokens of the longest document; 0: no limit. A longer file is split at its blank lines, into paragraphs or
   functions, and a block that is still too long is split at the limit. So lengths stay naturally long-tailed, and
   attention, whose work grows with the square, stays affordable. */
static inline void add_file(documents *d, const char *path, int64_t longest) {
    unsigned char *bytes;
    int64_t length = read_file(path, &bytes);
    if (longest == 0 || length + 2 <= longest) {
        add_document(d, bytes, length);
    } else {
        for (int64_t i = 0, n; i < length; i += n) {
            n = block_length(bytes, i, length, longest - 2);
            add_document(d, bytes + i, n);
        }
        d->n_cut++;
    }
    free(bytes);
    d->n_files++;
}

static inline int compare_names(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Lists the names in a directory that count, sorted. */
static inline char **list_directory(const char *path, int64_t *count) {
    DIR *directory = opendir(path);
    if (!directory) fail_to_read(path);
    char **names = NULL;
    int64_t capacity = 0;
    *count = 0;
    for (struct dirent *entry = readdir(directory); entry; entry = readdir(directory)) {
        if (entry->d_name[0] == '.') continue;
        names = (char **)grow(names, &capacity, *count + 1, sizeof *names);
        size_t bytes = strlen(entry->d_name) + 1;
        names[*count] = TAKE(char, (int64_t)bytes);
        memcpy(names[*count], entry->d_name, bytes);
        ++*count;
    }
    closedir(directory);
    if (*count > 0) qsort(names, (size_t)*count, sizeof *names, compare_names);
    return names;
}

#define MAX_DIRECTORY_DEPTH 64

static inline void add_directory(documents *d, const char *path, int64_t longest, int depth) {
    if (depth > MAX_DIRECTORY_DEPTH) {
        fail(EXIT_BAD_INPUT, "%s: more than %d directories deep", path, MAX_DIRECTORY_DEPTH);
    }
    int64_t count;
    char **names = list_directory(path, &count);
    for (int64_t i = 0; i < count; i++) {
        size_t bytes = strlen(path) + strlen(names[i]) + 2;
        char *inner = TAKE(char, (int64_t)bytes);
        struct stat status;
        snprintf(inner, bytes, "%s/%s", path, names[i]);
        if (lstat(inner, &status) != 0) fail_to_read(inner);
        if (S_ISREG(status.st_mode)) add_file(d, inner, longest);
        else if (S_ISDIR(status.st_mode) && strcmp(names[i], "build") != 0) add_directory(d, inner, longest, depth + 1);
        free(inner);
        free(names[i]);
    }
    free(names);
}

/* Adds a file, or all files below a directory. */
static inline void add_path(documents *d, const char *path, int64_t longest) {
    struct stat status;
    if (stat(path, &status) != 0) fail_to_read(path);
    if (S_ISDIR(status.st_mode)) add_directory(d, path, longest, 0);
    else add_file(d, path, longest);
}

/* Adds a document of exactly `length` pseudo-random tokens, special ones included; 0 is allowed. */
static inline void add_synthetic(documents *d, int64_t length, uint64_t seed) {
    open_document(d);
    uint64_t key = mix64_pair(seed, (uint64_t)d->count);
    for (int64_t i = 0; i < length; i++) add_token(d, (int)(mix64_pair(key, (uint64_t)i) % VOCABULARY));
    close_document(d);
}

/* Gives document i the first `tokens` tokens of document `with`; 0: it stays as it is. */
static inline void make_alike(documents *d, int64_t i, int64_t with, int64_t tokens) {
    if (tokens > 0) memcpy(d->tokens + d->first[i], d->tokens + d->first[with], (size_t)tokens * sizeof *d->tokens);
}

/* Returns a hash of the documents: a run may continue only with the same ones. */
static inline uint64_t documents_hash(const documents *d) {
    uint64_t hash = hash_bytes((uint64_t)d->count, d->first, (size_t)(d->count + 1) * sizeof *d->first);
    return hash_bytes(hash, d->tokens, (size_t)d->first[d->count] * sizeof *d->tokens);
}

/* ================================================================================================================
   The order of documents: in each epoch all of them once, shuffled. It depends only on the seed and the epoch, so two
   numbers are enough to go on from any place.
   ================================================================================================================ */

typedef struct data_order {
    uint64_t seed;
    int64_t epoch, cursor; /* the next document is shuffled[cursor] */
    int64_t count;
    int64_t *shuffled;     /* (count), of this epoch */
} data_order;

static inline void data_order_shuffle(data_order *o) {
    uint64_t key = mix64_pair(o->seed, (uint64_t)o->epoch);
    for (int64_t i = 0; i < o->count; i++) o->shuffled[i] = i;
    for (int64_t i = o->count - 1; i > 0; i--) {
        int64_t j = (int64_t)(mix64_pair(key, (uint64_t)i) % ((uint64_t)i + 1)), kept = o->shuffled[i];
        o->shuffled[i] = o->shuffled[j];
        o->shuffled[j] = kept;
    }
}

static inline data_order data_order_new(int64_t count, uint64_t seed, int64_t epoch, int64_t cursor) {
    data_order o = {seed, epoch, cursor, count, TAKE(int64_t, count)};
    data_order_shuffle(&o);
    return o;
}

static inline void data_order_free(data_order *o) {
    free(o->shuffled);
    memset(o, 0, sizeof *o);
}

static inline int64_t data_order_next(data_order *o) {
    if (o->cursor == o->count) {
        o->epoch++;
        o->cursor = 0;
        data_order_shuffle(o);
    }
    return o->shuffled[o->cursor++];
}

/* ================================================================================================================
   A batch: documents of one training step
   ================================================================================================================ */

typedef struct batch {
    int64_t count;
    int64_t *length;         /* (count) tokens, for cf_pack */
    const uint16_t **tokens; /* (count) */
    const unsigned char **ignored; /* (count) a byte for each token: 1 if it is not a target, as in a prompt */
    int64_t n_tokens, n_targets;
    double *weight;          /* (count) of each target of a sequence; NULL: the loss is the mean over all targets */
    int shared_mean;         /* 1: a token that sequences share counts once, with the mean of their weights */
} batch;

static inline batch batch_new(int64_t count) {
    batch b = {count, TAKE(int64_t, count), TAKE(const uint16_t *, count),
               TAKE(const unsigned char *, count), 0, 0, NULL, 0};
    return b;
}

static inline void batch_free(batch *b) {
    free(b->length);
    free(b->tokens);
    free(b->weight);
    for (int64_t i = 0; i < b->count; i++) free((void *)b->ignored[i]);
    free(b->ignored);
    memset(b, 0, sizeof *b);
}

/* Makes sequence i of the batch a document; its first `prompt` tokens, and `fraction` of all, are prompt. */
static inline void batch_put(batch *b, int64_t i, const documents *d, int64_t document, int64_t prompt,
                             double fraction) {
    int64_t length = document_length(d, document);
    b->length[i] = length;
    b->tokens[i] = d->tokens + d->first[document];
    int64_t n_ignored = min_of(length, max_of(prompt, (int64_t)(fraction * (double)length)));
    unsigned char *ignored = TAKE(unsigned char, length);
    memset(ignored, 1, (size_t)n_ignored);
    b->ignored[i] = ignored;
    b->n_tokens += length;
    b->n_targets += max_of(0, length - max_of(1, n_ignored)); /* the first token is never a target */
}

/* Returns the target of token `position` of sequence i: the next token of the sequence, in whichever chunk. -1: none,
   at the end of the sequence and if the next token belongs to the prompt. */
static inline int32_t batch_target(const batch *b, int64_t i, int64_t position) {
    int64_t next = position + 1;
    return next < b->length[i] && !b->ignored[i][next] ? b->tokens[i][next] : -1;
}

/* The same for the token after the next one. */
static inline int32_t batch_target2(const batch *b, int64_t i, int64_t position) {
    return batch_target(b, i, position + 1);
}

/* The next token, ignored or not; -1: none. */
static inline int32_t batch_next(const batch *b, int64_t i, int64_t position) {
    return position + 1 < b->length[i] ? b->tokens[i][position + 1] : -1;
}

/* Returns `total` / tokens that have such a target: the weight of each of their losses. */
static inline double batch_loss_weight2(const batch *b, double total) {
    int64_t n = 0;
    for (int64_t i = 0; i < b->count && total > 0; i++) {
        for (int64_t t = 0; t + 2 < b->length[i]; t++) n += batch_target2(b, i, t) >= 0;
    }
    return n > 0 ? total / (double)n : 0;
}

/* Returns 1 / target tokens, which turns a sum of losses into their mean over the batch; 0 for a batch without
   targets. */
static inline double batch_loss_weight(const batch *b) { return b->n_targets > 0 ? 1 / (double)b->n_targets : 0; }

/* Draws a weight for each sequence, of both signs, like advantages of answers. */
static inline void batch_draw_weights(batch *b, uint64_t seed) {
    b->weight = TAKE(double, b->count);
    for (int64_t i = 0; i < b->count; i++) b->weight[i] = normal_of(seed, i) * batch_loss_weight(b);
}

/* Returns whether token `position` of sequence j is a target and, with everything before it, equals sequence i's. */
static inline int batch_is_shared(const batch *b, int64_t i, int64_t j, int64_t position) {
    return position < b->length[j] && !b->ignored[j][position] &&
           memcmp(b->tokens[i], b->tokens[j], (size_t)(position + 1) * sizeof **b->tokens) == 0;
}

/* Returns the weight of this target's loss in unshared training, including the weights of tokens that count once. */
static inline double batch_weight(const batch *b, int64_t i, int64_t position) {
    double sum = 0, n = 0;
    for (int64_t j = 0; j < b->count; j++) {
        if (b->shared_mean ? !batch_is_shared(b, i, j, position) : j != i) continue;
        sum += b->weight ? b->weight[j] : batch_loss_weight(b);
        n++;
    }
    return n > 0 ? sum / (n * n) : 0; /* the mean, in n parts */
}

#endif /* TRAIN_TEXT_H */
