/* state_stream.h - states in host memory, streamed past the device layer by layer - MIT or public domain

   A pass reads the prefix's K and V (in a backward also their gradients) of one layer at a time, so the whole state can
   be in host memory. The device needs only the block of rows in use and the one being loaded: a ring of a fixed number
   of bytes, however long the sequence is. For each layer of a pass:

       stream_begin      issues the loads of the prefix's first blocks
       stream_next       waits for the next block and gives it to attention
       stream_release    sends the block's gradients out, then loads the next one in its place
       stream_end        waits until everything that was sent has arrived

   stream_send and stream_fetch move the chunk's own rows; without a stream (NULL) they just copy. On a GPU two copy
   engines make the copies while passes run. Here nothing is concurrent, so a copy is made at the last moment that the
   waits allow, and its target holds NaN from its issue until then. A missing wait, or a slot that is filled while in
   use, then shows in the loss or in the gradients. */

#ifndef TRAIN_STATE_STREAM_H
#define TRAIN_STATE_STREAM_H

#include "kernels.h"

/* ================================================================================================================
   >>copies
   ================================================================================================================ */

typedef struct copy {
    real *to;
    const real *from;
    int64_t count;
} copy;

#define MOST_COPIES 16 /* issued but not yet made; beyond this number the oldest copy is made */

/* Makes copies in the order of their issue. An event is a number of copies. */
typedef struct copy_engine {
    copy queue[MOST_COPIES]; /* copy n is at n % MOST_COPIES */
    int64_t n_issued, n_made;
    int64_t bytes;           /* of all copies so far */
} copy_engine;

static inline void spoil(real *x, int64_t count) { memset(x, 0xFF, (size_t)count * sizeof(real)); } /* NaN */

static inline void copy_wait(copy_engine *e, int64_t event) {
    for (; e->n_made < event; e->n_made++) {
        const copy *c = &e->queue[e->n_made % MOST_COPIES];
        memcpy(c->to, c->from, (size_t)c->count * sizeof(real));
    }
}

/* Issues a copy. Returns the event to wait for. */
static inline int64_t copy_issue(copy_engine *e, real *to, const real *from, int64_t count) {
    copy c = {to, from, count};
    copy_wait(e, e->n_issued - MOST_COPIES + 1);
    spoil(to, count);
    e->queue[e->n_issued++ % MOST_COPIES] = c;
    e->bytes += count * (int64_t)sizeof(real);
    return e->n_issued;
}

/* ================================================================================================================
   >>stream
   ================================================================================================================ */

#define STREAM_SLOTS 2 /* blocks of the ring: one in use, one being loaded */

typedef struct state_stream {
    real *ring;                  /* for each slot K, V, dK and dV of block_rows rows */
    int64_t width, block_rows;   /* numbers of a row of K in the current layer; rows of a block */
    int64_t bytes;               /* of the ring */
    copy_engine in, out;
    int64_t loaded[STREAM_SLOTS], stored[STREAM_SLOTS]; /* events of the slots */
    key_block prefix;            /* the rows to walk through, in host memory, without those that a window hides */
    int64_t first;               /* its next row */
    int gradients;               /* 1: dK and dV are loaded and sent out as well */
} state_stream;

/* Returns the rows of a block in a ring of `bytes`: a multiple of KEY_BLOCK, so that streaming changes no bit. 0: too
   few bytes. */
static inline int64_t stream_block_rows(int64_t width, int64_t bytes) {
    return bytes / (STREAM_SLOTS * 4 * width * (int64_t)sizeof(real)) / KEY_BLOCK * KEY_BLOCK;
}

static inline int64_t stream_ring_bytes(int64_t width, int64_t block_rows) {
    return STREAM_SLOTS * 4 * width * block_rows * (int64_t)sizeof(real);
}

/* Makes a ring of at most `bytes`, for rows of K of at most `width` numbers. */
static inline state_stream stream_new(int64_t width, int64_t bytes, memory_meter *meter) {
    state_stream s;
    memset(&s, 0, sizeof s);
    s.width = width;
    s.block_rows = stream_block_rows(width, bytes);
    if (s.block_rows == 0) fail(EXIT_BAD_INPUT, "a ring of %lld bytes has no room for two blocks", (long long)bytes);
    s.bytes = stream_ring_bytes(width, s.block_rows);
    s.ring = TAKE(real, s.bytes / (int64_t)sizeof(real));
    spoil(s.ring, s.bytes / (int64_t)sizeof(real));
    memory_count(meter, MEMORY_STATE, s.bytes);
    return s;
}

static inline void stream_free(state_stream *s, memory_meter *meter) {
    memory_count(meter, MEMORY_STATE, -s->bytes);
    free(s->ring);
    memset(s, 0, sizeof *s);
}

static inline int64_t stream_slot(const state_stream *s, int64_t first) { return first / s->block_rows % STREAM_SLOTS; }

/* Returns whether V is K, and dV is dK, as for latents. */
static inline int stream_is_shared(const state_stream *s) { return s->prefix.v == s->prefix.k; }

/* Returns the block from row `first` of the walk on, in the ring. */
static inline key_block stream_block(const state_stream *s, int64_t first) {
    int64_t size = s->block_rows * s->width;
    real *at = s->ring + stream_slot(s, first) * 4 * size;
    key_block block = s->prefix;
    block.k = at, block.v = at + size, block.dk = at + 2 * size, block.dv = at + 3 * size;
    block.first += first, block.at += first;
    block.count = min_of(s->block_rows, s->prefix.count - first);
    if (stream_is_shared(s)) block.v = block.k, block.dv = block.dk;
    return block;
}

/* Issues the copies of the block from row `first` on, after its slot's gradients are out. */
static inline void stream_load(state_stream *s, int64_t first) {
    key_block block = stream_block(s, first);
    int64_t slot = stream_slot(s, first), from = first * s->width, count = block.count * s->width;
    if (first >= s->prefix.count) return;
    copy_wait(&s->out, s->stored[slot]);
    s->loaded[slot] = copy_issue(&s->in, block.k, s->prefix.k + from, count);
    if (!stream_is_shared(s)) s->loaded[slot] = copy_issue(&s->in, block.v, s->prefix.v + from, count);
    if (s->gradients) s->loaded[slot] = copy_issue(&s->in, block.dk, s->prefix.dk + from, count);
    if (s->gradients && !stream_is_shared(s)) {
        s->loaded[slot] = copy_issue(&s->in, block.dv, s->prefix.dv + from, count);
    }
}

/* Begins a walk through a layer's rows of a prefix, of `width` numbers each: at most the width for which the ring was
   made. */
static inline void stream_begin(state_stream *s, const key_block *prefix, int64_t width, int gradients) {
    s->prefix = *prefix;
    s->width = width;
    s->gradients = gradients;
    s->first = 0;
    for (int64_t slot = 0; slot < STREAM_SLOTS; slot++) stream_load(s, slot * s->block_rows);
}

static inline key_block stream_next(state_stream *s) {
    copy_wait(&s->in, s->loaded[stream_slot(s, s->first)]);
    return stream_block(s, s->first);
}

/* Releases the block that stream_next gave last. */
static inline void stream_release(state_stream *s) {
    key_block block = stream_block(s, s->first);
    int64_t to = s->first * s->width, count = block.count * s->width;
    spoil(block.k, count);
    spoil(block.v, count);
    if (s->gradients) {
        int64_t *stored = &s->stored[stream_slot(s, s->first)];
        *stored = copy_issue(&s->out, s->prefix.dk + to, block.dk, count);
        if (!stream_is_shared(s)) *stored = copy_issue(&s->out, s->prefix.dv + to, block.dv, count);
    }
    stream_load(s, s->first + STREAM_SLOTS * s->block_rows);
    s->first += block.count;
}

/* Sends numbers of the chunk's own to host memory. They may not change until stream_end. */
static inline void stream_send(state_stream *s, real *host, const real *device, int64_t count) {
    if (s) copy_issue(&s->out, host, device, count);
    else memcpy(host, device, (size_t)count * sizeof *host);
}

/* Fetches numbers of the chunk's own from host memory at once. */
static inline void stream_fetch(state_stream *s, real *device, const real *host, int64_t count) {
    if (s) copy_wait(&s->in, copy_issue(&s->in, device, host, count));
    else memcpy(device, host, (size_t)count * sizeof *device);
}

static inline void stream_end(state_stream *s) {
    if (s) copy_wait(&s->out, s->out.n_issued);
}

/* Returns whether some issued copies have not been made yet. */
static inline int stream_is_busy(const state_stream *s) {
    return s->in.n_made < s->in.n_issued || s->out.n_made < s->out.n_issued;
}

#endif /* TRAIN_STATE_STREAM_H */
