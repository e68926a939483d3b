/* tokens.h - documents as token ids of any vocabulary: from a flat file, or random - MIT or public domain

   A trainer reads a token file for days, so it needs no parsing:
       "cftoken1", then in 64-bit numbers: byte order mark, vocabulary, documents n, tokens t, 1 if there are masks
       first     (n + 1) 64-bit: document i is tokens first[i] .. first[i + 1]
       tokens    (t) 32-bit ids
       ignored   (t) bytes, with masks: 1 where a token is not to be predicted, as in a prompt
   in the machine's byte order. make_tokens.c writes it from text, or from ids that any tokenizer has printed. */

#ifndef TRAIN_TOKENS_H
#define TRAIN_TOKENS_H

#include "text.h"

#define TOKENS_MAGIC "cftoken1"
#define TOKENS_BYTE_ORDER 0x0102030405060708

typedef struct tokens_head {
    char magic[8];
    int64_t byte_order, vocabulary, n_documents, n_tokens, has_masks;
} tokens_head;

typedef struct token_set {
    int64_t count;          /* documents */
    int64_t vocabulary;
    int64_t *first;         /* (count + 1) */
    int32_t *tokens;
    unsigned char *ignored; /* as many; NULL: every token is predicted */
} token_set;

static inline int64_t token_set_length(const token_set *s, int64_t i) { return s->first[i + 1] - s->first[i]; }

static inline void token_set_free(token_set *s) {
    free(s->first);
    free(s->tokens);
    free(s->ignored);
    memset(s, 0, sizeof *s);
}

static inline int64_t longest_document(const token_set *s) {
    int64_t longest = 0;
    for (int64_t i = 0; i < s->count; i++) longest = max_of(longest, token_set_length(s, i));
    return longest;
}

/* Makes documents of these lengths with pseudo-random tokens. */
static inline token_set random_tokens(const int64_t *lengths, int64_t count, int64_t vocabulary, uint64_t seed) {
    token_set s = {count, vocabulary, TAKE(int64_t, count + 1), NULL, NULL};
    for (int64_t i = 0; i < count; i++) s.first[i + 1] = s.first[i] + lengths[i];
    s.tokens = TAKE(int32_t, s.first[count]);
    for (int64_t i = 0; i < s.first[count]; i++)
        s.tokens[i] = (int32_t)(mix64_pair(seed, (uint64_t)i) % (uint64_t)vocabulary);
    return s;
}

/* Returns the reason why a file of this size cannot have this head, or NULL. */
static inline const char *tokens_head_fault(const tokens_head *h, int64_t bytes) {
    const int64_t rest = bytes - (int64_t)sizeof *h;
    if (memcmp(h->magic, TOKENS_MAGIC, 8) != 0) return "it is no token file";
    if (h->byte_order != TOKENS_BYTE_ORDER) return "it was written on a machine with another byte order";
    if (h->vocabulary < 1 || h->vocabulary > INT32_MAX) return "its vocabulary makes no sense";
    if (h->n_documents < 1 || h->n_documents > rest / 8 - 1) return "its number of documents does not fit its size";
    if (h->has_masks != 0 && h->has_masks != 1) return "its head is damaged";
    const int64_t left = rest - 8 * (h->n_documents + 1), each = h->has_masks ? 5 : 4;
    if (h->n_tokens < 0 || left % each != 0 || left / each != h->n_tokens) return "its size does not fit its head";
    return NULL;
}

/* Returns the fault of the contents, or NULL. */
static inline const char *token_set_fault(const token_set *s, int64_t n_tokens) {
    if (s->first[0] != 0 || s->first[s->count] != n_tokens) return "its documents do not begin and end with its tokens";
    for (int64_t i = 0; i < s->count; i++)
        if (s->first[i + 1] < s->first[i]) return "its documents are out of order";
    for (int64_t i = 0; i < n_tokens; i++)
        if (s->tokens[i] < 0 || s->tokens[i] >= s->vocabulary) return "a token is not in its vocabulary";
    for (int64_t i = 0; i < n_tokens && s->ignored; i++)
        if (s->ignored[i] > 1) return "a mask is neither 0 nor 1";
    return NULL;
}

static inline token_set tokens_read(const char *path) {
    unsigned char *image;
    tokens_head head;
    const int64_t bytes = read_file(path, &image);
    if (bytes < (int64_t)sizeof head) fail(EXIT_BAD_INPUT, "%s: it is no token file", path);
    memcpy(&head, image, sizeof head);
    const char *fault = tokens_head_fault(&head, bytes);
    if (fault) fail(EXIT_BAD_INPUT, "%s: %s", path, fault);
    const int64_t n = head.n_documents, t = head.n_tokens;
    const unsigned char *at = image + sizeof head;
    token_set s = {n, head.vocabulary, TAKE(int64_t, n + 1), TAKE(int32_t, t), NULL};
    memcpy(s.first, at, (size_t)(n + 1) * 8);
    memcpy(s.tokens, at + (n + 1) * 8, (size_t)t * 4);
    if (head.has_masks) {
        s.ignored = TAKE(unsigned char, t);
        memcpy(s.ignored, at + (n + 1) * 8 + t * 4, (size_t)t);
    }
    free(image);
    fault = token_set_fault(&s, t);
    if (fault) fail(EXIT_BAD_INPUT, "%s: %s", path, fault);
    return s;
}

static inline void tokens_write(const char *path, const token_set *s) {
    const int64_t t = s->first[s->count];
    const size_t n = (size_t)s->count + 1, n_tokens = (size_t)t;
    tokens_head head = {{0}, TOKENS_BYTE_ORDER, s->vocabulary, s->count, t, s->ignored != NULL};
    memcpy(head.magic, TOKENS_MAGIC, sizeof head.magic);
    FILE *file = fopen(path, "wb");
    if (!file) fail(EXIT_CHECK_FAILED, "%s: %s", path, strerror(errno));
    int ok = fwrite(&head, sizeof head, 1, file) == 1 && fwrite(s->first, 8, n, file) == n;
    ok = ok && fwrite(s->tokens, 4, n_tokens, file) == n_tokens;
    ok = ok && (!s->ignored || fwrite(s->ignored, 1, n_tokens, file) == n_tokens);
    if (fclose(file) == 0 && ok) return;
    struct stat about;
    /* an incomplete file might be taken for a whole one */
    if (lstat(path, &about) == 0 && S_ISREG(about.st_mode)) remove(path);
    fail(EXIT_CHECK_FAILED, "%s: it cannot be written", path);
}

/* ---- a batch: documents of one training step ---- */

typedef struct token_batch {
    int64_t count, n_tokens, n_targets;
    int64_t *length;               /* (count) for cf_pack */
    const int32_t **tokens;        /* (count) */
    const unsigned char **ignored; /* (count) NULL for a sequence without a mask */
} token_batch;

static inline token_batch token_batch_new(int64_t count) {
    token_batch b = {count, 0, 0, TAKE(int64_t, count), TAKE(const int32_t *, count),
                     TAKE(const unsigned char *, count)};
    return b;
}

static inline void token_batch_free(token_batch *b) {
    free(b->length);
    free(b->tokens);
    free(b->ignored);
    memset(b, 0, sizeof *b);
}

static inline void token_batch_put(token_batch *b, int64_t i, const token_set *s, int64_t document) {
    const int64_t length = token_set_length(s, document);
    b->length[i] = length;
    b->tokens[i] = s->tokens + s->first[document];
    b->ignored[i] = s->ignored ? s->ignored + s->first[document] : NULL;
    b->n_tokens += length;
    for (int64_t t = 1; t < length; t++) b->n_targets += !b->ignored[i] || !b->ignored[i][t];
}

#endif /* TRAIN_TOKENS_H */
