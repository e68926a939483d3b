#include "forest.h"
#include "../harness.h"

#include <stdlib.h>
#include <string.h>

#define RULE(condition)                      \
    do {                                     \
        if (!(condition)) return #condition; \
    } while (0)

/* ---- from a plan ---- */

static void *room(int64_t n, size_t size) {
    void *memory = calloc((size_t)n + 1, size);
    if (memory == NULL) abort();
    return memory;
}

int64_t forest_before(const forest_plan *f, int64_t chunk) {
    const forest_chunk *c = &f->chunks[chunk];
    if (c->cp > 0 && c->rank % c->cp > 0) return chunk - f->chunks_per_rank;
    if (c->up < 0 || c->cp == 0) return c->up;
    return c->up + (c->cp - 1) * f->chunks_per_rank;
}

forest_plan *forest_of(const cf_plan *plan) {
    forest_plan *f = (forest_plan *)room(1, sizeof *f);
    int64_t i;
    f->chunk_size = plan->chunk_size, f->align = plan->align, f->max_slices = plan->max_slices;
    f->n_sequences = plan->n_sequences, f->n_ranks = plan->n_ranks, f->chunks_per_rank = plan->chunks_per_rank;
    f->n_chunks = plan->n_chunks, f->n_slices = plan->n_slices;
    f->order = (int64_t *)room(f->n_sequences, sizeof *f->order);
    f->common = (int64_t *)room(f->n_sequences, sizeof *f->common);
    f->chunks = (forest_chunk *)room(f->n_chunks, sizeof *f->chunks);
    f->slices = (forest_slice *)room(f->n_slices, sizeof *f->slices);
    for (i = 0; i < f->n_sequences; i++) {
        f->order[i] = plan->order != NULL ? plan->order[i] : i;
        f->common[i] = plan->order != NULL ? plan->common[i] : 0;
    }
    for (i = 0; i < f->n_slices; i++) {
        const cf_slice *s = &plan->slices[i];
        const forest_slice made = {s->sequence, s->begin, s->length, s->offset, s->up, s->first, s->n};
        f->slices[i] = made;
    }
    for (i = 0; i < f->n_chunks; i++) {
        const cf_chunk *c = &plan->chunks[i];
        const forest_chunk made = {c->first_slice, c->n_slices, c->tokens, c->rows, c->pairs,
                                   c->up,          c->prefix,   c->state,  c->rank,   c->cp};
        f->chunks[i] = made;
    }
    return f;
}

void forest_free(forest_plan *f) {
    if (f == NULL) return;
    free(f->order);
    free(f->common);
    free(f->chunks);
    free(f->slices);
    free(f);
}

/* ---- the judge ---- */

static int64_t pairs_of(int64_t prefix, int64_t length) { return length * prefix + length * (length + 1) / 2; }

typedef struct judge {
    const forest_plan *f;
    const int64_t *lengths;
    int64_t *ends;   /* (n_chunks) chunks c + 1 .. ends[c] - 1 are below chunk c */
    int64_t *chunk;  /* (n_slices) of each */
    int64_t *tokens, *pairs, *shared; /* (n_sequences + 1) in the order, stored as differences */
} judge;

/* Judges the chunk of a cp group's share against the one on the previous rank, whose sequence and place must match. */
static const char *cp_rule(const forest_plan *f, int64_t id) {
    const forest_chunk *c = &f->chunks[id], *next, *up = c->up >= 0 ? &f->chunks[c->up] : NULL;
    RULE(c->cp == 0 || (c->cp >= 2 && c->cp <= f->n_ranks && f->n_ranks % c->cp == 0));
    RULE(up == NULL || up->cp == c->cp);
    if (c->cp == 0) return NULL;
    next = c + ((c->rank + 1) % c->cp > 0 ? 1 : 1 - c->cp) * f->chunks_per_rank;
    RULE(next->cp == c->cp && c->state > 0);
    RULE(up == NULL ? next->up < 0 : next - c == next->up - c->up);
    return NULL;
}

/* Judges a chunk and the chunk that it continues. Chunks of a tree are in preorder, so `up` is the previous chunk or
   one above that. */
static const char *chunk_rule(judge *j, int64_t id, int64_t *first) {
    const forest_plan *f = j->f;
    const forest_chunk *c = &f->chunks[id], *up = c->up >= 0 ? &f->chunks[c->up] : NULL;
    int64_t end = 0, at;
    RULE(c->first_slice == *first && c->n_slices >= 0 && c->n_slices <= f->n_slices - *first);
    RULE(f->max_slices == 0 || c->n_slices <= f->max_slices);
    RULE(c->rank == id / f->chunks_per_rank);
    RULE(c->state >= 0 && c->state <= f->chunk_size);
    RULE(c->up == -1 || (c->up >= id / f->chunks_per_rank * f->chunks_per_rank && c->up < id));
    for (at = id - 1; at >= 0 && at != c->up; at = f->chunks[at].up) j->ends[at] = id; /* they have been left */
    RULE(c->up < 0 || at == c->up);
    RULE(c->n_slices > 0 || (c->up < 0 && c->state == 0));
    if (up != NULL) {
        RULE(up->state > 0);
        end = up->prefix + up->state;
    }
    RULE(c->prefix <= end && c->prefix >= (up != NULL && c->state == 0 ? 1 : end));
    *first += c->n_slices;
    return NULL;
}

/* Judges a slice and the slice that it continues: one of its own chunk, in which slices are also in preorder, or rows
   that a chunk above holds for others. *sees: rows of the path that the previous slice sees. */
static const char *up_rule(const judge *j, int64_t chunk, int64_t id, int64_t *sees) {
    const forest_plan *f = j->f;
    const forest_slice *s = &f->slices[id], *up = s->up >= 0 ? &f->slices[s->up] : NULL;
    const forest_chunk *c = &f->chunks[chunk], *above;
    int64_t before = id - 1;
    RULE(s->up >= -1 && s->up < f->n_slices);
    RULE(s->begin == (up != NULL ? up->begin + up->length : 0));
    if (s->up >= 0 && j->chunk[s->up] == chunk) {
        RULE(s->up < id);
        while (before > s->up) before = f->slices[before].up;
        RULE(before == s->up); /* it has not been left yet */
        return NULL;
    }
    RULE(s->begin <= *sees);
    *sees = s->begin;
    if (up == NULL) return NULL;
    above = &f->chunks[j->chunk[s->up]];
    RULE(up->offset < above->state);
    if (c->cp == 0) {
        RULE(above < c && j->ends[above - f->chunks] > chunk);
    } else {
        RULE(forest_before(f, chunk) == above - f->chunks);
    }
    return NULL;
}

/* Judges the sequences that run through a slice: a subset of those through the slice that it continues. */
static const char *through_rule(judge *j, int64_t id) {
    const forest_plan *f = j->f;
    const forest_slice *s = &f->slices[id];
    int64_t first = s->up >= 0 ? f->slices[s->up].first : 0;
    int64_t end = s->up >= 0 ? first + f->slices[s->up].n : f->n_sequences;
    RULE(s->first >= first && s->first < end && s->n >= 1 && s->n <= end - s->first);
    RULE(s->sequence == f->order[s->first] && s->length <= j->lengths[s->sequence] - s->begin);
    j->tokens[s->first] += s->length;
    j->tokens[s->first + s->n] -= s->length;
    j->pairs[s->first] += pairs_of(s->begin, s->length);
    j->pairs[s->first + s->n] -= pairs_of(s->begin, s->length);
    j->shared[s->first + 1] += s->length;
    if (s->n > 1) j->shared[s->first + s->n] -= s->length;
    else j->shared[s->first + 1] -= s->length;
    return NULL;
}

/* Judges the slices of a chunk, and its sums. Its first slices are its state, and continue each other. */
static const char *slices_rule(judge *j, int64_t id) {
    const forest_plan *f = j->f;
    const forest_chunk *c = &f->chunks[id];
    int64_t i, tokens = 0, padded = 0, pairs = 0, before = forest_before(f, id), left = c->state;
    int64_t sees = c->prefix;
    const char *fault = NULL;
    if (c->cp > 0 && before >= 0) {
        const forest_slice *last = &f->slices[f->chunks[before].first_slice];
        sees = last->begin + last->length;
    }
    RULE(c->n_slices == 0 || f->slices[c->first_slice].begin == (c->cp > 0 && before < 0 ? 0 : sees));
    for (i = c->first_slice; i < c->first_slice + c->n_slices && fault == NULL; i++) {
        const forest_slice *s = &f->slices[i];
        RULE(s->begin >= 0 && s->length >= 1 && s->length <= f->chunk_size && s->begin % f->align == 0);
        RULE(s->offset == padded);
        if (left > 0) {
            RULE(s->length <= left && (i == c->first_slice || s->up == i - 1));
            left -= s->length;
        }
        tokens += s->length;
        padded += (s->length + f->align - 1) / f->align * f->align;
        RULE(padded <= f->chunk_size);
        fault = up_rule(j, id, i, &sees);
        if (fault == NULL) fault = through_rule(j, i);
        if (fault == NULL) pairs += pairs_of(s->begin, s->length);
    }
    if (fault != NULL) return fault;
    RULE(left == 0 && tokens == c->tokens && padded == c->rows && pairs == c->pairs);
    return NULL;
}

/* Checks that each sequence has its tokens once. Slices that continue each other leave no gap, so only one row of
   slices can have both the right number of tokens and of pairs. Neighbours share exactly the slices that both run
   through. */
static const char *sums_rule(judge *j) {
    int64_t i, tokens = 0, pairs = 0, shared = 0, length;
    for (i = 0; i < j->f->n_sequences; i++) {
        tokens += j->tokens[i];
        pairs += j->pairs[i];
        shared += j->shared[i];
        RULE(j->f->order[i] >= 0 && j->f->order[i] < j->f->n_sequences);
        length = j->lengths[j->f->order[i]];
        RULE(tokens == length && pairs == pairs_of(0, length) && shared == j->f->common[i]);
    }
    return NULL;
}

static const char *order_rule(const forest_plan *f, unsigned char *seen) {
    int64_t i;
    for (i = 0; i < f->n_sequences; i++) {
        RULE(f->order[i] >= 0 && f->order[i] < f->n_sequences && !seen[f->order[i]]);
        seen[f->order[i]] = 1;
    }
    return NULL;
}

static const char *judge_all(judge *j, unsigned char *seen) {
    const forest_plan *f = j->f;
    const char *fault = order_rule(f, seen);
    int64_t i, first = 0;
    for (i = 0; i < f->n_chunks; i++) j->ends[i] = f->n_chunks;
    for (i = 0; i < f->n_chunks && fault == NULL; i++) {
        int64_t slice = first;
        fault = chunk_rule(j, i, &first);
        for (; fault == NULL && slice < first; slice++) j->chunk[slice] = i;
    }
    if (fault != NULL) return fault;
    RULE(first == f->n_slices);
    for (i = 0; i < f->n_chunks && fault == NULL; i++) fault = cp_rule(f, i);
    for (i = 0; i < f->n_chunks && fault == NULL; i++) fault = slices_rule(j, i);
    return fault != NULL ? fault : sums_rule(j);
}

const char *forest_fault(const forest_plan *f, const int64_t *lengths) {
    judge j = {f, lengths, NULL, NULL, NULL, NULL, NULL};
    unsigned char *seen = (unsigned char *)room(f->n_sequences, 1);
    const char *fault;
    j.ends = (int64_t *)room(f->n_chunks, sizeof(int64_t));
    j.chunk = (int64_t *)room(f->n_slices, sizeof(int64_t));
    j.tokens = (int64_t *)room(f->n_sequences + 1, sizeof(int64_t));
    j.pairs = (int64_t *)room(f->n_sequences + 1, sizeof(int64_t));
    j.shared = (int64_t *)room(f->n_sequences + 1, sizeof(int64_t));
    fault = judge_all(&j, seen);
    free(seen);
    free(j.ends);
    free(j.chunk);
    free(j.tokens);
    free(j.pairs);
    free(j.shared);
    return fault;
}

/* ---- the slow judge ---- */

/* Returns whether the rows of slice `up` exist for those of slice `s`, of chunk c: earlier in the chunk, or among the
   rows that a chunk on its path holds for others. */
static int is_there(const forest_plan *f, int64_t c, int64_t s, int64_t up) {
    const forest_slice *above = &f->slices[up];
    int64_t at, steps = 0;
    if (up >= f->chunks[c].first_slice && up < s) return 1;
    for (at = c; (at = forest_before(f, at)) >= 0 && at < f->n_chunks && steps <= f->n_chunks; steps++) {
        const forest_chunk *b = &f->chunks[at];
        if (up >= b->first_slice && up < b->first_slice + b->n_slices)
            return above->offset + above->length <= b->state;
    }
    return 0;
}

/* Returns whether the sequence at position `at` of the order runs through a slice. */
static int runs_through(const forest_plan *f, int64_t slice, int64_t at) {
    return at >= f->slices[slice].first && at < f->slices[slice].first + f->slices[slice].n;
}

/* Returns whether everything below each of n things, by their ups, follows directly after it. */
static int in_preorder(const int64_t *up, int64_t n) {
    int64_t i, j, at;
    for (i = 0; i < n; i++) {
        int gap = 0;
        for (j = i + 1; j < n; j++) {
            for (at = j; at > i; at = up[at]) continue;
            if (at == i && gap) return 0;
            gap |= at != i;
        }
    }
    return 1;
}

static const char *slow_chunk(const forest_plan *f, int64_t id, int64_t *up) {
    const forest_chunk *c = &f->chunks[id], *above = c->up >= 0 ? &f->chunks[c->up] : NULL;
    int64_t i, tokens = 0, pairs = 0, row = 0, sees = INT64_MAX, own = 0, at;
    RULE(f->max_slices == 0 || c->n_slices <= f->max_slices);
    for (i = 0; i < c->n_slices; i++) {
        const forest_slice *s = &f->slices[c->first_slice + i];
        int64_t t;
        int roots = s->up < c->first_slice || s->up >= c->first_slice + c->n_slices;
        RULE(s->length >= 1 && s->length <= f->chunk_size && s->begin % f->align == 0);
        while (row % f->align != 0) row++;
        RULE(s->offset == row);
        for (t = 0; t < s->length; t++) pairs += s->begin + t + 1;
        tokens += s->length, row += s->length;
        up[i] = roots ? -1 : s->up - c->first_slice;
        RULE(up[i] < i);
        RULE(!roots || s->begin <= sees);
        if (roots) sees = s->begin;
        if (row <= c->state) RULE(i == 0 || up[i] == i - 1);
        if (row == c->state) own = 1;
    }
    while (row % f->align != 0) row++;
    RULE(tokens == c->tokens && pairs == c->pairs && row == c->rows && row <= f->chunk_size);
    RULE(in_preorder(up, c->n_slices));
    RULE(c->state == 0 || own);
    RULE(above == NULL || (c->n_slices > 0 && above->state > 0 && above->rank == c->rank && above->cp == c->cp));
    for (row = 0, at = c->up; at >= 0; at = f->chunks[at].up) row += f->chunks[at].state;
    RULE(c->up >= 0 && c->state == 0 && c->cp == 0 ? c->prefix >= 1 && c->prefix <= row : c->prefix == row);
    if (c->n_slices > 0 && c->cp == 0) RULE(f->slices[c->first_slice].begin == c->prefix);
    if (c->n_slices > 0 && c->cp > 0 && (at = forest_before(f, id)) >= 0 && at < f->n_chunks)
        RULE(f->slices[c->first_slice].up == f->chunks[at].first_slice);
    return NULL;
}

/* Checks that all ranks of a cp group do the same: equally many chunks in the same columns, which continue each other
   in the same way. */
static const char *slow_cp_group(const forest_plan *f, int64_t id) {
    const forest_chunk *c = &f->chunks[id];
    int64_t part;
    if (c->cp == 0) return NULL;
    RULE(c->cp >= 2 && c->cp <= f->n_ranks && f->n_ranks % c->cp == 0 && c->state > 0);
    for (part = 0; part < c->cp; part++) {
        const forest_chunk *other = c + (part - c->rank % c->cp) * f->chunks_per_rank;
        RULE(other->cp == c->cp);
        RULE(c->up < 0 ? other->up < 0 : other->up - c->up == other - c);
    }
    return NULL;
}

static const char *slow_slice(const forest_plan *f, int64_t c, int64_t id, const int64_t *lengths,
                              unsigned char **seen) {
    const forest_slice *s = &f->slices[id];
    int64_t at, q, p;
    RULE(s->n >= 1 && s->first >= 0 && s->first < f->n_sequences && s->n <= f->n_sequences - s->first);
    RULE(s->up >= -1 && s->up < f->n_slices && s->sequence == f->order[s->first]);
    RULE(s->up < 0 ? s->begin == 0 : is_there(f, c, id, s->up));
    for (at = s->first; at < s->first + s->n; at++) {
        q = f->order[at];
        RULE(s->up < 0 || (f->slices[s->up].begin + f->slices[s->up].length == s->begin && runs_through(f, s->up, at)));
        RULE(s->begin >= 0 && s->length <= lengths[q] - s->begin);
        for (p = s->begin; p < s->begin + s->length; p++) {
            RULE(!seen[q][p]);
            seen[q][p] = 1;
        }
    }
    return NULL;
}

static const char *slow_all(const forest_plan *f, const int64_t *lengths, unsigned char **seen, int64_t *up) {
    const char *fault = NULL;
    int64_t i, j, next = 0;
    for (i = 0; i < f->n_chunks; i++) {
        RULE(f->chunks[i].first_slice == next && f->chunks[i].n_slices >= 0);
        RULE(f->chunks[i].n_slices <= f->n_slices - next);
        RULE(f->chunks[i].up >= -1 && f->chunks[i].up < i);
        RULE(f->chunks[i].state >= 0 && f->chunks[i].prefix >= 0);
        RULE(f->chunks[i].rank == i / f->chunks_per_rank);
        next += f->chunks[i].n_slices;
    }
    RULE(next == f->n_slices);
    for (i = 0; i < f->n_chunks; i++) up[i] = f->chunks[i].up;
    RULE(in_preorder(up, f->n_chunks));
    for (i = 0; i < f->n_chunks && fault == NULL; i++) fault = slow_cp_group(f, i);
    for (i = 0; i < f->n_chunks && fault == NULL; i++) fault = slow_chunk(f, i, up);
    for (i = 0; i < f->n_chunks && fault == NULL; i++)
        for (j = 0; j < f->chunks[i].n_slices && fault == NULL; j++)
            fault = slow_slice(f, i, f->chunks[i].first_slice + j, lengths, seen);
    for (i = 0; i < f->n_sequences && fault == NULL; i++)
        for (j = 0; j < lengths[i]; j++) RULE(seen[i][j]);
    for (i = 0; i < f->n_sequences && fault == NULL; i++) { /* rows through which both neighbours run */
        int64_t both = 0;
        for (j = 0; j < f->n_slices && i > 0; j++)
            if (runs_through(f, j, i) && runs_through(f, j, i - 1)) both += f->slices[j].length;
        RULE(both == f->common[i]);
    }
    return fault;
}

const char *forest_slow_fault(const forest_plan *f, const int64_t *lengths) {
    unsigned char **seen = (unsigned char **)room(f->n_sequences, sizeof *seen);
    unsigned char *once = (unsigned char *)room(f->n_sequences, 1);
    int64_t *up = (int64_t *)room(f->n_chunks + f->n_slices, sizeof *up), i;
    const char *fault = order_rule(f, once);
    for (i = 0; i < f->n_sequences; i++) seen[i] = (unsigned char *)room(lengths[i], 1);
    if (fault == NULL) fault = slow_all(f, lengths, seen, up);
    for (i = 0; i < f->n_sequences; i++) free(seen[i]);
    free(seen);
    free(once);
    free(up);
    return fault;
}
