/* attention.h - the branches with attention: full, window, chunked, and latent - MIT or public domain

   All of them hand on rows: K and V of every token of a chain, of which a pass reads those that its queries see. A
   latent layer keeps one row instead of all heads' K and V: its latent and one rotated key. From these a head has

       k = [latent W_key, rotated]    v = latent W_value

   which are not computed for the prefix. W_key is applied to the query and W_value to the result, which gives the same
   product from the chunk's own rows alone. Attention then has one key head, whose V is its K. A latent's gradients as a
   key and as a value go to the same place. */

#ifndef TRAIN_ATTENTION_H
#define TRAIN_ATTENTION_H

#include "parts.h"

/* ================================================================================================================
   >>keys    what a pass attends to: blocks of the prefix, and its own
   ================================================================================================================ */

/* Splits the rows of a slice into tiles. */
static inline int64_t put_tiles(attention_tile *tiles, int64_t n, int32_t slice, int64_t length) {
    for (int64_t first = 0; first < length; first += LANES) {
        tiles[n].slice = slice;
        tiles[n].first = first;
        n++;
    }
    return n;
}

/* Describes the attention of layer `i` of the stage. */
static inline attention_problem attention_of(const pass *p, int64_t i) {
    const chunk_rows *r = p->rows;
    const model_config *c = p->config;
    const layer_kind kind = layer_kind_of(c, p->stage.first_layer + i);
    const int latent = kind.mixer == MIXER_LATENT;
    attention_problem problem = {0};
    problem.heads = c->heads;
    problem.kv_heads = latent ? 1 : c->kv_heads;
    problem.head_dim = latent ? latent_of(c) + rope_of(c) : head_dim_of(c);
    problem.scale = latent ? 1 / sqrt((double)head_dim_of(c)) : 0;
    problem.window = window_of(c, p->stage.first_layer + i);
    problem.sinks = weights_of(p, i)->sinks;
    problem.cu_seqlens_q = r->cu_seqlens_q;
    problem.cu_seqlens_k = r->cu_seqlens_k;
    problem.position = p->n_places > 0 ? r->position : NULL;
    problem.tiles = p->scratch->tiles;
    for (int32_t s = 0; s < r->n_seqs; s++) {
        int64_t length = r->cu_seqlens_q[s + 1] - r->cu_seqlens_q[s];
        problem.n_tiles = put_tiles(p->scratch->tiles, problem.n_tiles, s, length);
    }
    problem.q = p->kept->layers[i].q;
    return problem;
}

/* The chunk's own keys. */
static inline key_block own_keys(const pass *p, int64_t i) {
    const layer_activations *a = &p->kept->layers[i];
    const row_scratch *s = &p->scratch->rows;
    int latent = layer_kind_of(p->config, p->stage.first_layer + i).mixer == MIXER_LATENT;
    key_block own = {a->k, latent ? a->k : a->v, s->dk, latent ? s->dk : s->dv, 0, p->rows->rows, 1, NULL, 0};
    return own;
}

/* Returns `count` rows that layer `i` keeps in a chain's state, from its row `row` on, on the device or in host memory.
   The first of them is key `first` of the sequence. */
static inline key_block state_keys(const chain_state *state, int64_t i, int64_t width, int64_t row, int64_t first,
                                   int64_t count) {
    key_block none = {NULL, NULL, NULL, NULL, 0, 0, 0, NULL, 0};
    if (!state) return none;
    const layer_state *at = &state->layers[i];
    int64_t offset = row * width;
    key_block keys = {at->k + offset, at->v + offset, at->dk + offset, at->dv + offset, first, count, 0, NULL, 0};
    return keys;
}

/* Returns the earlier rows of the chain that the pass sees. They are contiguous: if the pass sees more than the end of
   the previous chunk, that chunk is kept whole. */
static inline key_block prefix_keys(const pass *p, int64_t i, int64_t window, int64_t width) {
    int64_t first = first_key_of(window, p->rows->prefix), count = p->rows->prefix - first;
    return state_keys(p->state, i, width, kept_before(p->state, window, p->rows->index) - count, first, count);
}

/* Returns K and V of all rows of a cp group up to the end of the round, by their place in the sequence. Each rank fills
   in those of its own chunks, and the sum over ranks has all. Room for their gradients follows. */
static inline key_block group_keys(const pass *p, int64_t i, int64_t width) {
    cp_group *g = p->group;
    const layer_state *state = &p->state->layers[i];
    const cf_slice *last = slice_of_part(g, p->rows->index, g->size - 1);
    const int is_shared = state->v == state->k;
    const int64_t end = last->begin + last->length, count = end * width * (is_shared ? 1 : 2);
    real *k = exchange_room(g, 2 * count), *v = is_shared ? k : k + end * width, *dk = k + count;
    key_block all = {k, v, dk, is_shared ? dk : dk + end * width, 0, end, 0, NULL, 0};
    for (int64_t round = 0; round <= p->rows->index; round++) {
        const cf_slice *s = slice_of_part(g, round, g->part);
        const int64_t from = p->state->begin[round] * width, to = s->begin * width;
        copy_rows(k + to, state->k + from, s->length, width);
        if (!is_shared) copy_rows(v + to, state->v + from, s->length, width);
    }
    g->add_up(g->context, CP_ROWS, g->size, k, count);
    return all;
}

/* Backward: sends the gradients of other ranks' rows to them, and adds those received for rows of this rank: to the
   state for earlier chunks, to `own` for this one. */
static inline void return_gradients(const pass *p, int64_t i, const key_block *all, const key_block *own,
                                    int64_t width) {
    cp_group *g = p->group;
    const layer_state *state = &p->state->layers[i];
    const int is_shared = state->v == state->k;
    g->add_up(g->context, CP_ROW_GRADIENTS, g->size, all->dk, all->count * width * (is_shared ? 1 : 2));
    for (int64_t round = 0; round <= p->rows->index; round++) {
        const cf_slice *s = slice_of_part(g, round, g->part);
        const int is_own = round == p->rows->index;
        const int64_t to = p->state->begin[round] * width, from = s->begin * width;
        real *dk = is_own ? own->dk : state->dk + to, *dv = is_own ? own->dv : state->dv + to;
        for (int64_t j = 0; j < s->length * width; j++) dk[j] += all->dk[from + j];
        for (int64_t j = 0; j < s->length * width && !is_shared; j++) dv[j] += all->dv[from + j];
    }
}

/* Returns the keys of one place above a chunk in a tree: a state, or the chunk's own rows. */
static inline key_block keys_of_place(const pass *p, int64_t i, int64_t width, const key_place *place) {
    const int64_t count = place->level.cu_seqlens_k[place->level.n_seqs];
    key_block keys = own_keys(p, i);
    if (place->state) keys = state_keys(place->state, i, width, place->row, place->first, count);
    keys.level = &place->level;
    return keys;
}

/* Returns the chunk's own rows that the state keeps for later chunks: its last ones. */
static inline key_block kept_keys(const pass *p, int64_t i, int64_t window, int64_t width) {
    int64_t end = p->rows->prefix + p->rows->state_tokens, count = rows_kept(p->state, window, p->rows->prefix, end);
    return state_keys(p->state, i, width, kept_before(p->state, window, p->rows->index), end - count, count);
}

/* Returns the same rows where they are computed. */
static inline key_block own_kept_keys(const pass *p, const key_block *own, const key_block *kept, int64_t width) {
    int64_t offset = (p->rows->state_tokens - kept->count) * width;
    key_block keys = *own;
    keys.k += offset, keys.v += offset, keys.dk += offset, keys.dv += offset;
    keys.count = kept->count;
    return keys;
}

/* Counts the tiles of rows that see a block. */
static inline int64_t tiles_that_see(const attention_problem *problem, const key_block *keys) {
    attention_slice slice = attention_slice_of(problem, 0);
    int64_t rows = min_of(slice.n_rows, end_of_sight(problem->window, keys->first + keys->count - 1) - slice.lead);
    return keys->own || keys->level ? problem->n_tiles : (rows + LANES - 1) / LANES;
}

static inline void forward_over_keys(const attention_problem *problem, const key_block *keys,
                                     const attention_results *results) {
    int64_t n = tiles_that_see(problem, keys) * problem->heads;
    PARALLEL_FOR
    for (int64_t t = 0; t < n; t++) {
        attention_forward_tile(problem, keys, results, problem->tiles[t / problem->heads], t % problem->heads);
    }
}

/* Computes dK and dV of a place, slice by slice, because several slices may see the same rows. */
static inline void backward_over_level(const attention_problem *problem, const key_block *keys,
                                       const attention_gradients *g) {
    for (int64_t first = 0; first < problem->n_tiles; first++) {
        if (problem->tiles[first].first > 0) continue;
        attention_slice slice = attention_slice_of(problem, problem->tiles[first].slice);
        key_range range = key_range_of(problem, keys, &slice);
        int64_t n = (range.end - range.first + LANES - 1) / LANES * problem->kv_heads;
        PARALLEL_FOR
        for (int64_t t = 0; t < n; t++) {
            attention_tile at = {problem->tiles[first].slice, t / problem->kv_heads * LANES};
            attention_backward_keys(problem, keys, g, at, t % problem->kv_heads);
        }
    }
}

/* Runs two sweeps, each over its own outputs: first the queries' gradients, then the keys'. One sweep would compute the
   scores only once. But threads would then have to add to the same dK and dV, in an order that varies. */
static inline void backward_over_keys(const attention_problem *problem, const key_block *keys,
                                      const attention_gradients *g) {
    int64_t n = tiles_that_see(problem, keys) * problem->heads;
    PARALLEL_FOR
    for (int64_t t = 0; t < n; t++) {
        attention_backward_queries(problem, keys, g, problem->tiles[t / problem->heads], t % problem->heads);
    }
    if (keys->level) {
        backward_over_level(problem, keys, g);
        return;
    }
    n = (keys->own ? problem->n_tiles : (keys->count + LANES - 1) / LANES) * problem->kv_heads;
    PARALLEL_FOR
    for (int64_t t = 0; t < n; t++) {
        attention_tile prefix = {0, t / problem->kv_heads * LANES};
        attention_tile at = keys->own ? problem->tiles[t / problem->kv_heads] : prefix;
        attention_backward_keys(problem, keys, g, at, t % problem->kv_heads);
    }
}

/* Gives the next block of a place after `keys`, which has been used; returns 0 after the last. Blocks come from a
   stream, or a place on the device is one block. Begins with keys->k NULL. */
static inline int next_keys(state_stream *stream, const key_block *place, key_block *keys) {
    int64_t next = keys->k ? keys->first + keys->count : place->first;
    if (stream && keys->k) stream_release(stream);
    if (next >= place->first + place->count) return 0;
    *keys = stream ? stream_next(stream) : *place;
    return 1;
}

/* Appends K and V to the chain's state for its later chunks. */
static inline void append_to_state(const pass *p, const key_block *own, const key_block *to, int64_t width) {
    const int64_t count = to->count * width;
    state_stream *stream = state_stream_of(p);
    if (p->is_replay || count == 0) return;
    stream_send(stream, to->k, own->k, count);
    if (own->v != own->k) stream_send(stream, to->v, own->v, count);
}

/* Fetches the gradients that the chain's later chunks, all done by now, have found for this chunk's K and V. */
static inline void fetch_own_gradients(const pass *p, const key_block *own, const key_block *from, int64_t width) {
    const int64_t count = from->count * width;
    state_stream *stream = state_stream_of(p);
    if (count == 0) return;
    stream_fetch(stream, own->dk, from->dk, count);
    if (own->v != own->k) stream_fetch(stream, own->dv, from->dv, count);
}

/* Copies attention's results to the outputs that a dropped chunk keeps or, in its replay, back from there. */
static inline void move_outputs(const pass *p, int64_t i, const attention_problem *problem) {
    const layer_activations *a = &p->kept->layers[i], *outputs = &p->outputs->layers[i];
    const int64_t lse = p->rows->rows * problem->heads, mixed = lse * problem->head_dim;
    if (p->is_replay) {
        stream_fetch(p->outputs_stream, a->mixed, outputs->mixed, mixed);
        stream_fetch(p->outputs_stream, a->lse, outputs->lse, lse);
    } else {
        stream_send(p->outputs_stream, outputs->mixed, a->mixed, mixed);
        stream_send(p->outputs_stream, outputs->lse, a->lse, lse);
        stream_end(p->outputs_stream);
    }
}

static inline attention_gradients attention_gradients_of(const pass *p, int64_t i) {
    const layer_activations *a = &p->kept->layers[i];
    const row_scratch *s = &p->scratch->rows;
    attention_gradients g = {a->mixed, a->mixed == a->attended ? s->dattended : s->dmixed, a->lse, s->slope, s->dq};
    return g;
}

/* Returns the number of places with keys that a pass sees, counted from the root; the chunk's own are the last. Without
   shared rows there is one before it: the prefix. */
static inline int64_t n_places_of(const pass *p) { return 1 + (p->n_places > 0 ? p->n_places : 1); }

static inline key_block place_of(const pass *p, int64_t i, int64_t window, int64_t width, int64_t n) {
    if (n + 1 == n_places_of(p)) return own_keys(p, i);
    return p->n_places > 0 ? keys_of_place(p, i, width, &p->places[n]) : prefix_keys(p, i, window, width);
}

/* Goes over all keys that the pass sees, block by block: forward or, with `backward`, for their gradients. A replay
   that takes outputs reads no keys. */
static inline void attention_mix(const pass *p, int64_t i, int backward) {
    const layer_activations *a = &p->kept->layers[i];
    const chunk_rows *r = p->rows;
    const attention_problem problem = attention_of(p, i);
    const attention_results results = {a->mixed, a->lse, p->scratch->rows.total};
    const attention_gradients g = attention_gradients_of(p, i);
    const int64_t width = problem.kv_heads * problem.head_dim;
    const int moves = p->outputs && layer_keeps_outputs(p->config, p->stage.first_layer + i);
    const key_block own = own_keys(p, i), kept = kept_keys(p, i, problem.window, width);
    const key_block own_kept = own_kept_keys(p, &own, &kept, width);
    key_block all = own; /* of the cp group */
    state_stream *stream = state_stream_of(p);
    if (moves && p->is_replay) {
        move_outputs(p, i, &problem);
        return;
    }
    if (backward) clear_rows(own.dk, own.count, width), clear_rows(own.dv, own.count, width);
    if (backward) fetch_own_gradients(p, &own_kept, &kept, width);
    else append_to_state(p, &own_kept, &kept, width);
    if (p->group) all = group_keys(p, i, width);
    if (backward) attention_backward_begin(&problem, &g, r->rows);
    else attention_forward_begin(&problem, &results, r->rows);
    for (int64_t n = 0; n < n_places_of(p); n++) {
        const int is_shared = p->group && n == 0; /* rows of the cp group before this chunk */
        key_block place = is_shared ? all : place_of(p, i, problem.window, width, n);
        if (is_shared) place.count = r->prefix;
        key_block keys = {NULL, NULL, NULL, NULL, 0, 0, 0, NULL, 0};
        state_stream *blocks = place.own ? NULL : stream;
        if (blocks) stream_begin(blocks, &place, width, backward);
        while (next_keys(blocks, &place, &keys)) {
            if (backward) backward_over_keys(&problem, &keys, &g);
            else forward_over_keys(&problem, &keys, &results);
        }
    }
    if (!backward) attention_forward_end(&problem, &results, r->rows);
    if (p->group && backward) return_gradients(p, i, &all, &own, width);
    if (moves) move_outputs(p, i, &problem);
    stream_end(stream);
}

/* ================================================================================================================
   >>full    grouped heads; with a window, in blocks of one, with sinks, with a gate on the result
   ================================================================================================================ */

static inline void full_weights(weights *w, int64_t layer, const model_config *c, layer_weights *l) {
    const layer_kind kind = layer_kind_of(c, layer);
    int64_t h = c->hidden, kv = kv_width_of(c);
    l->wq = weights_next(w, layer, "wq", h * h, h);
    l->bq = weights_next(w, layer, "bq", h, 0);
    l->wk = weights_next(w, layer, "wk", h * kv, h);
    l->bk = weights_next(w, layer, "bk", kv, 0);
    l->wv = weights_next(w, layer, "wv", h * kv, h);
    l->bv = weights_next(w, layer, "bv", kv, 0);
    l->wo = weights_next(w, layer, "wo", h * h, h);
    if (kind.gate) l->wg = weights_next(w, layer, "wg", h * h, h);
    if (kind.sinks) l->sinks = weights_next(w, layer, "sinks", c->heads, 0);
}

static inline void full_sizes(layer_sizes *n, const model_config *c, int64_t layer) {
    const layer_kind kind = layer_kind_of(c, layer);
    n->q = c->hidden;
    n->k = n->v = n->rows_k = n->rows_v = kv_width_of(c);
    n->lse = c->heads;
    n->mixed = n->out_gate = kind.gate ? c->hidden : 0;
}

static inline void full_before(const pass *p, int64_t i, const row_block *b) {
    const model_config *c = p->config;
    const layer_weights *w = weights_of(p, i);
    const layer_activations a = kept_rows(p, i, b->first);
    const row_scratch *s = &b->scratch;
    int64_t n = b->count, h = c->hidden, hd = head_dim_of(c), kv = kv_width_of(c);
    linear_forward(a.q, a.normed1, w->wq, w->bq, n, h, h);
    linear_forward(a.k, a.normed1, w->wk, w->bk, n, h, kv);
    linear_forward(a.v, a.normed1, w->wv, w->bv, n, h, kv);
    rope_rotate(a.q, s->cosine, s->sine, n, c->heads, hd, 1);
    rope_rotate(a.k, s->cosine, s->sine, n, c->kv_heads, hd, 1);
    if (w->wg) linear_forward(a.out_gate, a.normed1, w->wg, NULL, n, h, h);
}

static inline void full_after(const pass *p, int64_t i, const row_block *b) {
    const layer_weights *w = weights_of(p, i);
    const layer_activations a = kept_rows(p, i, b->first);
    int64_t h = p->config->hidden, count = b->count * h;
    for (int64_t j = 0; w->wg && j < count; j++) a.attended[j] = a.mixed[j] * sigmoid(a.out_gate[j]);
    linear_forward(b->scratch.branch1, a.attended, w->wo, NULL, b->count, h, h);
}

static inline void full_after_backward(const pass *p, int64_t i, const row_block *b) {
    const layer_activations a = kept_rows(p, i, b->first);
    const row_scratch *s = &b->scratch;
    int64_t h = p->config->hidden, count = b->count * h;
    linear_backward(s->dattended, MATMUL_SET, s->branch1, p->scratch->transposed.wo, b->count, h, h);
    for (int64_t j = 0; weights_of(p, i)->wg && j < count; j++) {
        real open = sigmoid(a.out_gate[j]);
        s->dmixed[j] = s->dattended[j] * open;
        s->dout_gate[j] = s->dattended[j] * a.mixed[j] * open * (1 - open);
    }
}

static inline void full_before_backward(const pass *p, int64_t i, const row_block *b) {
    const model_config *c = p->config;
    const layer_weights *transposed = &p->scratch->transposed;
    const row_scratch *s = &b->scratch;
    int64_t n = b->count, h = c->hidden, hd = head_dim_of(c), kv = kv_width_of(c);
    rope_rotate(s->dq, s->cosine, s->sine, n, c->heads, hd, -1);
    rope_rotate(s->dk, s->cosine, s->sine, n, c->kv_heads, hd, -1);
    linear_backward(s->dnormed1, MATMUL_SET, s->dq, transposed->wq, n, h, h);
    linear_backward(s->dnormed1, MATMUL_ADD, s->dk, transposed->wk, n, h, kv);
    linear_backward(s->dnormed1, MATMUL_ADD, s->dv, transposed->wv, n, h, kv);
    if (weights_of(p, i)->wg) linear_backward(s->dnormed1, MATMUL_ADD, s->dout_gate, transposed->wg, n, h, h);
}

static inline int64_t full_jobs(matrix_job *jobs, const pass *p, int64_t i, const weights *gradient) {
    const model_config *c = p->config;
    const layer_weights *w = weights_of(p, i), *g = &gradient->layers[p->stage.first_layer + i];
    const layer_weights *t = &p->scratch->transposed;
    const layer_activations *a = &p->kept->layers[i];
    const row_scratch *s = &p->scratch->rows;
    int64_t h = c->hidden, kv = kv_width_of(c);
    const matrix_job all[] = {
        {w->wq, t->wq, g->wq, g->bq, a->normed1, s->dq, a->q, h, h},
        {w->wk, t->wk, g->wk, g->bk, a->normed1, s->dk, a->k, h, kv},
        {w->wv, t->wv, g->wv, g->bv, a->normed1, s->dv, a->v, h, kv},
        {w->wo, t->wo, g->wo, NULL, a->attended, s->branch1, a->input, h, h},
        {w->wg, t->wg, g->wg, NULL, a->normed1, s->dout_gate, a->out_gate, h, h},
    };
    memcpy(jobs, all, sizeof all);
    return w->wg ? 5 : 4;
}

static inline void full_gradients(const pass *p, int64_t i, const weights *gradient) {
    const attention_problem problem = attention_of(p, i);
    const attention_gradients g = attention_gradients_of(p, i);
    real *dsinks = gradient->layers[p->stage.first_layer + i].sinks;
    if (dsinks) attention_backward_sinks(&problem, &g, dsinks, p->rows->rows);
}

static const branch full_branch = {full_weights,        full_sizes,           full_before, full_after,
                                   full_after_backward, full_before_backward, attention_mix, full_jobs, full_gradients};

/* ================================================================================================================
   >>latent    DeepSeek's multi-head latent attention, absorbed
   ================================================================================================================ */

static inline void latent_weights(weights *w, int64_t layer, const model_config *c, layer_weights *l) {
    int64_t h = c->hidden, hd = head_dim_of(c), latent = latent_of(c), rope = rope_of(c);
    l->wq = weights_next(w, layer, "wq", h * h, h);
    l->w_latent = weights_next(w, layer, "w_latent", h * (latent + rope), h);
    l->latent_norm = weights_next(w, layer, "latent_norm", latent, 0);
    l->w_key = weights_next(w, layer, "w_key", c->heads * (hd - rope) * latent, latent);
    l->w_value = weights_next(w, layer, "w_value", c->heads * latent * hd, latent);
    l->wo = weights_next(w, layer, "wo", h * h, h);
}

static inline void latent_sizes(layer_sizes *n, const model_config *c, int64_t layer) {
    (void)layer;
    n->k = n->down = n->rows_k = latent_of(c) + rope_of(c);
    n->q = n->mixed = c->heads * n->k;
    n->query = c->hidden;
    n->lse = c->heads;
}

static inline void latent_before(const pass *p, int64_t i, const row_block *b) {
    const model_config *c = p->config;
    const layer_weights *w = weights_of(p, i);
    const layer_activations a = kept_rows(p, i, b->first);
    const row_scratch *s = &b->scratch;
    int64_t n = b->count, h = c->hidden, hd = head_dim_of(c), rope = rope_of(c), latent = latent_of(c);
    int64_t row = latent + rope, plain = hd - rope;
    linear_forward(a.query, a.normed1, w->wq, NULL, n, h, h);
    linear_forward(a.down, a.normed1, w->w_latent, NULL, n, h, row);
    for (int64_t t = 0; t < n; t++) {
        real *k = a.k + t * row, *down = a.down + t * row;
        rmsnorm_forward(k, a.down_scale + t, down, w->latent_norm, 1, latent, c->norm_epsilon);
        copy_rows(k + latent, down + latent, 1, rope);
    }
    heads_forward(a.q, row, a.query, hd, w->w_key, n, c->heads, plain, latent);
    for (int64_t t = 0; t < n * c->heads; t++) copy_rows(a.q + t * row + latent, a.query + t * hd + plain, 1, rope);
    rope_rotate_part(a.q + latent, row, s->cosine2, s->sine2, n, c->heads, rope, 1);
    rope_rotate_part(a.k + latent, row, s->cosine2, s->sine2, n, 1, rope, 1);
}

static inline void latent_after(const pass *p, int64_t i, const row_block *b) {
    const model_config *c = p->config;
    const layer_weights *w = weights_of(p, i);
    const layer_activations a = kept_rows(p, i, b->first);
    int64_t n = b->count, h = c->hidden, hd = head_dim_of(c), latent = latent_of(c);
    heads_forward(a.attended, hd, a.mixed, latent + rope_of(c), w->w_value, n, c->heads, latent, hd);
    linear_forward(b->scratch.branch1, a.attended, w->wo, NULL, n, h, h);
}

static inline void latent_after_backward(const pass *p, int64_t i, const row_block *b) {
    const model_config *c = p->config;
    const row_scratch *s = &b->scratch;
    int64_t n = b->count, h = c->hidden, hd = head_dim_of(c), latent = latent_of(c), row = latent + rope_of(c);
    linear_backward(s->dattended, MATMUL_SET, s->branch1, p->scratch->transposed.wo, n, h, h);
    clear_rows(s->dmixed, n, c->heads * row);
    heads_backward(s->dmixed, row, s->dattended, hd, weights_of(p, i)->w_value, n, c->heads, latent, hd);
}

static inline void latent_before_backward(const pass *p, int64_t i, const row_block *b) {
    const model_config *c = p->config;
    const layer_weights *w = weights_of(p, i), *transposed = &p->scratch->transposed;
    const layer_activations a = kept_rows(p, i, b->first);
    const row_scratch *s = &b->scratch;
    int64_t n = b->count, h = c->hidden, hd = head_dim_of(c), rope = rope_of(c), latent = latent_of(c);
    int64_t row = latent + rope, plain = hd - rope;
    rope_rotate_part(s->dq + latent, row, s->cosine2, s->sine2, n, c->heads, rope, -1);
    rope_rotate_part(s->dk + latent, row, s->cosine2, s->sine2, n, 1, rope, -1);
    heads_backward(s->dquery, hd, s->dq, row, w->w_key, n, c->heads, plain, latent);
    for (int64_t t = 0; t < n * c->heads; t++) copy_rows(s->dquery + t * hd + plain, s->dq + t * row + latent, 1, rope);
    clear_rows(s->ddown, n, row);
    for (int64_t t = 0; t < n; t++) {
        real *ddown = s->ddown + t * row;
        rmsnorm_backward(ddown, s->dk + t * row, a.down + t * row, a.down_scale + t, w->latent_norm, 1, latent);
        copy_rows(ddown + latent, s->dk + t * row + latent, 1, rope);
    }
    linear_backward(s->dnormed1, MATMUL_SET, s->dquery, transposed->wq, n, h, h);
    linear_backward(s->dnormed1, MATMUL_ADD, s->ddown, transposed->w_latent, n, h, row);
}

static inline int64_t latent_jobs(matrix_job *jobs, const pass *p, int64_t i, const weights *gradient) {
    const model_config *c = p->config;
    const layer_weights *w = weights_of(p, i), *g = &gradient->layers[p->stage.first_layer + i];
    const layer_weights *t = &p->scratch->transposed;
    const layer_activations *a = &p->kept->layers[i];
    const row_scratch *s = &p->scratch->rows;
    int64_t h = c->hidden;
    const matrix_job all[] = {
        {w->wq, t->wq, g->wq, NULL, a->normed1, s->dquery, a->query, h, h},
        {w->w_latent, t->w_latent, g->w_latent, NULL, a->normed1, s->ddown, a->down, h, latent_of(c) + rope_of(c)},
        {w->wo, t->wo, g->wo, NULL, a->attended, s->branch1, a->input, h, h},
    };
    memcpy(jobs, all, sizeof all);
    return sizeof all / sizeof all[0];
}

static inline void latent_gradients(const pass *p, int64_t i, const weights *gradient) {
    const model_config *c = p->config;
    const layer_weights *g = &gradient->layers[p->stage.first_layer + i];
    const layer_activations *a = &p->kept->layers[i];
    const row_scratch *s = &p->scratch->rows;
    int64_t n = p->rows->rows, hd = head_dim_of(c), rope = rope_of(c), latent = latent_of(c), row = latent + rope;
    for (int64_t t = 0; t < n; t++) {
        rmsnorm_backward_gain(g->latent_norm, s->dk + t * row, a->down + t * row, a->down_scale + t, 1, latent);
    }
    heads_gradient(g->w_key, a->query, hd, s->dq, row, n, c->heads, hd - rope, latent);
    heads_gradient(g->w_value, a->mixed, row, s->dattended, hd, n, c->heads, latent, hd);
}

static const branch latent_branch = {latent_weights,        latent_sizes,           latent_before, latent_after,
                                     latent_after_backward, latent_before_backward, attention_mix, latent_jobs,
                                     latent_gradients};

#endif /* TRAIN_ATTENTION_H */
