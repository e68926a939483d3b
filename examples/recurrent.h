/* recurrent.h - the branches with a recurrent state: gated delta rule, KDA, Mamba-2 - MIT or public domain

   Q, K and V pass a short causal convolution and, in a delta rule, are normalised to unit vectors. Each head has a
   matrix S that each row updates and reads:

       S'[i][j] = decay[i] S[i][j]            decay: one number a head, or, in KDA, one for each channel of a key
       u[j]     = beta (v[j] - k S'[.][j])    in Mamba-2 without the product: v[j] alone is written
       S[i][j]  = S'[i][j] + k[i] u[j]
       out[j]   = q S[.][j]

   So a chunk hands on a snapshot: S of all heads, and the tail, the last CONV - 1 rows of the convolution's input.
   There is one for each border between chunks, because replays and backwards return to them; backward carries one
   gradient of a snapshot from chunk to chunk. A sequence that begins in a chunk begins with zeros, whatever precedes it
   in the chunk.

   If sequences share rows, a snapshot is taken where they diverge. Each branch begins from it, and its gradient is the
   sum of theirs. Within a chunk a branch takes S from the scratch, and the tail from the rows that it continues.

   This is the plain recurrence, one row at a time; blocked kernels compute the same. The published layers also have
   fewer key heads than value heads, low-rank projections of decays and gates, and B and C shared by heads, which are
   left out here. */

#ifndef TRAIN_RECURRENT_H
#define TRAIN_RECURRENT_H

#include "parts.h"

#define CONV 4 /* rows that the convolution sees, including its own */

static inline real softplus(real x) { return x > 30 ? x : (real)log1p(exp((double)x)); }

/* The shape and the arrays of one layer's recurrence. */
typedef struct recurrence {
    int64_t heads, dim, decays; /* of a head: channels, and decays (1 or dim) */
    int is_delta;
    const real *q, *k, *v;      /* (rows, 3, heads, dim): three parts of one array. v NULL: zeros */
    const real *beta, *decay;   /* (rows, heads), (rows, heads, decays) */
} recurrence;

/* Returns the index of a head's numbers of q, k or v in row `row`, and of out. */
static inline int64_t qkv_at(const recurrence *r, int64_t row, int64_t head) {
    return (3 * row * r->heads + head) * r->dim;
}

static inline int64_t out_at(const recurrence *r, int64_t row, int64_t head) {
    return (row * r->heads + head) * r->dim;
}

static inline real decay_of(const recurrence *r, int64_t row, int64_t head, int64_t i) {
    return r->decay[(row * r->heads + head) * r->decays + i % r->decays];
}

/* ================================================================================================================
   >>recurrence    one head, rows first .. end - 1 of one sequence
   ================================================================================================================ */

/* Updates S (dim, dim). Unless NULL, `before` gets S before each row, and `out` the results. */
static inline void recurrence_forward(const recurrence *r, int64_t head, int64_t first, int64_t end, real *S, real *out,
                                      real *before) {
    int64_t n = r->dim;
    for (int64_t row = first; row < end; row++) {
        const int64_t at = qkv_at(r, row, head);
        const real *q = r->q + at, *k = r->k + at, *v = r->v ? r->v + at : NULL;
        real beta = r->beta[row * r->heads + head];
        if (before) memcpy(before + (row * r->heads + head) * n * n, S, (size_t)(n * n) * sizeof *S);
        for (int64_t i = 0; i < n * n; i++) S[i] *= decay_of(r, row, head, i / n);
        for (int64_t j = 0; j < n; j++) {
            real u = v ? v[j] : 0, sum = 0;
            for (int64_t i = 0; i < n && r->is_delta; i++) u -= k[i] * S[i * n + j];
            for (int64_t i = 0; i < n; i++) S[i * n + j] += k[i] * beta * u;
            for (int64_t i = 0; i < n; i++) sum += q[i] * S[i * n + j];
            if (out) out[out_at(r, row, head) + j] = sum;
        }
    }
}

typedef struct recurrence_gradients {
    const real *before, *dout;
    real *dq, *dk, *dv;       /* as q, k and v */
    real *dbeta, *ddecay;
} recurrence_gradients;

/* Turns dS from the gradient of the state after the last row into that of the state before the first. */
static inline void recurrence_backward(const recurrence *r, const recurrence_gradients *g, int64_t head, int64_t first,
                                       int64_t end, real *dS) {
    int64_t n = r->dim;
    real u[MAX_HEAD_DIM], rest[MAX_HEAD_DIM], drest[MAX_HEAD_DIM];
    for (int64_t row = end - 1; row >= first; row--) {
        const int64_t at = qkv_at(r, row, head), scalar = row * r->heads + head;
        const real *q = r->q + at, *k = r->k + at, *v = r->v + at, *dout = g->dout + out_at(r, row, head);
        const real *before = g->before + scalar * n * n;
        real *dq = g->dq + at, *dk = g->dk + at, beta = r->beta[scalar], *ddecay = g->ddecay + scalar * r->decays;
        memset(ddecay, 0, (size_t)r->decays * sizeof *ddecay);
        g->dbeta[scalar] = 0;
        for (int64_t j = 0; j < n; j++) {
            real du = 0;
            rest[j] = v[j];
            for (int64_t i = 0; i < n && r->is_delta; i++) {
                rest[j] -= k[i] * decay_of(r, row, head, i) * before[i * n + j];
            }
            u[j] = beta * rest[j];
            for (int64_t i = 0; i < n; i++) dS[i * n + j] += q[i] * dout[j];
            for (int64_t i = 0; i < n; i++) du += k[i] * dS[i * n + j];
            g->dbeta[scalar] += du * rest[j];
            drest[j] = beta * du;
            g->dv[at + j] = drest[j];
        }
        for (int64_t i = 0; i < n; i++) {
            real decay = decay_of(r, row, head, i);
            dq[i] = dk[i] = 0;
            for (int64_t j = 0; j < n; j++) {
                real kept = decay * before[i * n + j], *d = &dS[i * n + j];
                dq[i] += (kept + k[i] * u[j]) * dout[j];
                dk[i] += *d * u[j];
                if (r->is_delta) dk[i] -= kept * drest[j];
                if (r->is_delta) *d -= k[i] * drest[j];
                ddecay[i % r->decays] += *d * before[i * n + j];
                *d *= decay;
            }
        }
    }
}

/* ================================================================================================================
   >>convolution    causal, a filter for each channel, over the rows of one slice and the tail before it
   ================================================================================================================ */

/* Returns row `row` of a span: its own or, before it, of the spans that it continues in the chunk, and before those of
   the tail. */
static inline real *tail_or_row(real *x, real *tail, const row_span *spans, const row_span *s, int64_t row,
                                int64_t width) {
    int64_t before = s->first - row;
    for (; before > 0 && s->up >= 0; before -= s->end - s->first) {
        s = &spans[s->up];
        if (before <= s->end - s->first) return x + (s->end - before) * width;
    }
    return before <= 0 ? x + row * width : tail + (CONV - 1 - before) * width;
}

static inline void conv_forward(real *out, real *x, real *tail, const real *filter, const row_span *spans,
                                const row_span *s, int64_t width) {
    for (int64_t row = s->first; row < s->end; row++) {
        clear_rows(out + row * width, 1, width);
        for (int64_t j = 0; j < CONV; j++) {
            const real *from = tail_or_row(x, tail, spans, s, row - CONV + 1 + j, width);
            for (int64_t c = 0; c < width; c++) out[row * width + c] += filter[j * width + c] * from[c];
        }
    }
}

/* Adds to dx and dtail. */
static inline void conv_backward(real *dx, real *dtail, const real *dout, const real *filter, const row_span *spans,
                                 const row_span *s, int64_t width) {
    for (int64_t row = s->first; row < s->end; row++) {
        for (int64_t j = 0; j < CONV; j++) {
            real *to = tail_or_row(dx, dtail, spans, s, row - CONV + 1 + j, width);
            for (int64_t c = 0; c < width; c++) to[c] += filter[j * width + c] * dout[row * width + c];
        }
    }
}

static inline void conv_gradient(real *dfilter, real *x, real *tail, const real *dout, const row_span *spans,
                                 const row_span *s, int64_t width) {
    for (int64_t row = s->first; row < s->end; row++) {
        for (int64_t j = 0; j < CONV; j++) {
            const real *from = tail_or_row(x, tail, spans, s, row - CONV + 1 + j, width);
            for (int64_t c = 0; c < width; c++) dfilter[j * width + c] += dout[row * width + c] * from[c];
        }
    }
}

/* ================================================================================================================
   >>borders    a snapshot is S of all heads, and then the tail
   ================================================================================================================ */

static inline int64_t heads_numbers(const model_config *c) { return c->hidden * head_dim_of(c); }
static inline int64_t border_numbers(const model_config *c) { return heads_numbers(c) + (CONV - 1) * 3 * c->hidden; }

/* Copies between the state, on the device or the host, and the scratch. Only one outgoing copy is in transit at a
   time. */
static inline void border_fetch(const pass *p, real *to, const real *from) {
    stream_end(state_stream_of(p));
    stream_fetch(state_stream_of(p), to, from, border_numbers(p->config));
}

/* Sends a border from the scratch, which may be changed at once. */
static inline void border_send(const pass *p, real *to, const real *from) {
    stream_end(state_stream_of(p));
    copy_rows(p->scratch->scanned, from, 1, border_numbers(p->config));
    stream_send(state_stream_of(p), to, p->scratch->scanned, border_numbers(p->config));
}

static inline real *snapshot_at(const pass *p, const chain_state *state, int64_t i, int64_t which) {
    return state->layers[i].snapshots + which * border_numbers(p->config);
}

static inline real *carry_at(const pass *p, const chain_state *state, int64_t i, int64_t which) {
    return state->layers[i].carry + (state->carry_of ? state->carry_of[which] : 0) * border_numbers(p->config);
}

/* Returns whether a span is a part of a cp group's round. */
static inline int is_part(const pass *p, const row_span *s) { return p->group && s == p->rows->spans; }

/* Returns the state that a span reads: for its S or, if few rows of the chunk precede it, for its tail. NULL: none.
   enters: the snapshot there. */
static inline const chain_state *state_before(const pass *p, const row_span *s, int64_t *enters) {
    int64_t rows = 0;
    for (; s->up >= 0; rows += s->end - s->first) s = &p->rows->spans[s->up];
    *enters = s->enters;
    return rows < CONV - 1 ? s->above : NULL;
}

/* Returns where a span's S, or its gradient, is stored in the scratch for spans that continue it. */
static inline real *begin_of_span(const pass *p, const row_span *s) {
    return p->scratch->rows.states + s->first * heads_numbers(p->config);
}

/* Sets scratch->border to the state from which a span begins. Its tail is the one before the chunk's rows. */
static inline void border_begin(const pass *p, int64_t i, const row_span *s) {
    int64_t enters;
    const chain_state *above = state_before(p, s, &enters);
    real *border = p->scratch->border;
    if (is_part(p, s)) border_fetch(p, border, snapshot_at(p, p->state, i, p->rows->index));
    else if (above) border_fetch(p, border, snapshot_at(p, above, i, enters));
    else clear_rows(border, 1, border_numbers(p->config));
    if (s->up >= 0) copy_rows(border, begin_of_span(p, s), 1, heads_numbers(p->config));
}

/* Passes the state in scratch->border to the spans that continue this one in the chunk. */
static inline void hand_on(const pass *p, const row_span *s) {
    for (int32_t at = s->child; at >= 0; at = p->rows->spans[at].sibling) {
        copy_rows(begin_of_span(p, &p->rows->spans[at]), p->scratch->border, 1, heads_numbers(p->config));
    }
}

/* ================================================================================================================
   >>branch
   ================================================================================================================ */

static inline int64_t decays_of(const model_config *c, int64_t layer) {
    return layer_kind_of(c, layer).mixer == MIXER_KDA ? c->hidden : c->heads;
}

static inline void recurrent_weights(weights *w, int64_t layer, const model_config *c, layer_weights *l) {
    int is_mamba = layer_kind_of(c, layer).mixer == MIXER_MAMBA;
    int64_t h = c->hidden, decays = decays_of(c, layer);
    l->wqkv = weights_next(w, layer, "wqkv", h * 3 * h, h);
    l->conv = weights_next(w, layer, "conv", CONV * 3 * h, CONV);
    if (!is_mamba) l->w_beta = weights_next(w, layer, "w_beta", h * c->heads, h);
    l->w_decay = weights_next(w, layer, "w_decay", h * decays, h);
    l->a_log = weights_next(w, layer, "a_log", c->heads, 0);
    l->dt_bias = weights_next(w, layer, "dt_bias", decays, 0);
    if (is_mamba) l->skip = weights_next(w, layer, "skip", c->heads, 0);
    l->wg = weights_next(w, layer, "wg", h * h, h);
    l->out_norm = weights_next(w, layer, "out_norm", head_dim_of(c), 0);
    l->wo = weights_next(w, layer, "wo", h * h, h);
}

static inline void recurrent_sizes(layer_sizes *n, const model_config *c, int64_t layer) {
    n->q = 3 * c->hidden; /* q, k and v side by side */
    n->conv = 3 * c->hidden;
    n->heads = c->heads;
    n->decays = decays_of(c, layer);
    n->mixed = n->out_gate = c->hidden;
    n->states = heads_numbers(c);
    n->border = border_numbers(c);
}

static inline void recurrent_before(const pass *p, int64_t i, const row_block *b) {
    const model_config *c = p->config;
    const layer_weights *w = weights_of(p, i);
    const layer_activations a = kept_rows(p, i, b->first);
    int64_t n = b->count, h = c->hidden, decays = decays_of(c, p->stage.first_layer + i), each = decays / c->heads;
    linear_forward(a.conv_in, a.normed1, w->wqkv, NULL, n, h, 3 * h);
    linear_forward(a.step, a.normed1, w->w_decay, NULL, n, h, decays);
    linear_forward(a.out_gate, a.normed1, w->wg, NULL, n, h, h);
    if (w->w_beta) linear_forward(a.beta, a.normed1, w->w_beta, NULL, n, h, c->heads);
    for (int64_t at = 0; at < n * decays; at++) {
        int64_t d = at % decays;
        a.step[at] = softplus(a.step[at] + w->dt_bias[d]);
        a.decay[at] = real_exp(-real_exp(w->a_log[d / each]) * a.step[at]);
    }
    for (int64_t at = 0; at < n * c->heads; at++) a.beta[at] = w->w_beta ? sigmoid(a.beta[at]) : a.step[at];
}

static inline recurrence recurrence_of(const pass *p, int64_t i) {
    const model_config *c = p->config;
    const layer_activations *a = &p->kept->layers[i];
    recurrence r = {c->heads, head_dim_of(c), decays_of(c, p->stage.first_layer + i) / c->heads, 0,
                    a->q, a->q + c->hidden, a->q + 2 * c->hidden, a->beta, a->decay};
    r.is_delta = layer_kind_of(c, p->stage.first_layer + i).mixer != MIXER_MAMBA;
    return r;
}

/* Computes q, k and v of a slice from the convolution's output: silu; with a delta rule, q and k of each head also
   become unit vectors, and q is divided by sqrt(dim). */
static inline void unit_vectors_forward(const pass *p, int64_t i, int64_t first, int64_t end) {
    const recurrence r = recurrence_of(p, i);
    const layer_activations *a = &p->kept->layers[i];
    const int64_t width = 3 * p->config->hidden;
    for (int64_t at = first * width; at < end * width; at++) a->q[at] = a->conv_out[at] * sigmoid(a->conv_out[at]);
    for (int64_t at = first * r.heads; at < end * r.heads && r.is_delta; at++) {
        for (int part = 0; part < 2; part++) {
            real *x = a->q + part * p->config->hidden + qkv_at(&r, at / r.heads, at % r.heads), squares = 0;
            real *scale = (part == 0 ? a->q_scale : a->k_scale) + at;
            for (int64_t d = 0; d < r.dim; d++) squares += x[d] * x[d];
            *scale = 1 / real_sqrt(squares + (real)1e-6);
            for (int64_t d = 0; d < r.dim; d++) x[d] *= part == 0 ? *scale / real_sqrt((real)r.dim) : *scale;
        }
    }
}

/* Turns scratch->dconv_out from the gradients of q, k and v into those of the convolution's output. */
static inline void unit_vectors_backward(const pass *p, int64_t i, int64_t first, int64_t end) {
    const recurrence r = recurrence_of(p, i);
    const layer_activations *a = &p->kept->layers[i];
    const int64_t width = 3 * p->config->hidden;
    real *dx = p->scratch->rows.dconv_out;
    for (int64_t at = first * r.heads; at < end * r.heads && r.is_delta; at++) {
        for (int part = 0; part < 2; part++) {
            int64_t place = part * p->config->hidden + qkv_at(&r, at / r.heads, at % r.heads);
            const real *unit = a->q + place, size = part == 0 ? 1 / real_sqrt((real)r.dim) : 1; /* of the vector */
            real *d = dx + place, scale = (part == 0 ? a->q_scale : a->k_scale)[at], along = 0;
            for (int64_t j = 0; j < r.dim; j++) along += d[j] * unit[j];
            for (int64_t j = 0; j < r.dim; j++) d[j] = scale * (size * d[j] - unit[j] * along / size);
        }
    }
    for (int64_t at = first * width; at < end * width; at++) {
        real x = a->conv_out[at], open = sigmoid(x);
        dx[at] *= open * (1 + x * (1 - open));
    }
}

/* Runs the heads over a slice from the state in scratch->border, which then holds the state after it. */
static inline void run_heads(const pass *p, int64_t i, int64_t first, int64_t end, real *out, real *before) {
    const recurrence r = recurrence_of(p, i);
    PARALLEL_FOR
    for (int64_t head = 0; head < r.heads; head++) {
        recurrence_forward(&r, head, first, end, p->scratch->border + head * r.dim * r.dim, out, before);
    }
}

/* ================================================================================================================
   >>parts    slice 0 of a chunk of a cp group: one part of a round

   The state after a part is linear in the state before it:

       after = effect before + written       outputs += reads before

   written: the state after the part if it begins from zero. effect (dim x dim a head) and reads (dim a row and head):
   state and outputs of the same recurrence with nothing to write, from before = 1. In Mamba-2 effect stays diagonal, so
   only its diagonal is kept. All ranks run their parts at the same time, exchange effect and written, and go through
   the parts in order: up to their own for the state from which they begin, then on to the last for the state from which
   the next round begins. This is the simplest way. With fewer bytes, each rank would go through all parts for only its
   share of the heads, as tools/python does and `tune` counts.

   Backward goes from the last part to the first: d before = effect^T d after + reads^T d outputs. Tails go through the
   parts in the same way. With parts of 5, 1 and 7 rows, the last three rows before the third part are 3 and 4 of the
   first and 0 of the second. A replay begins from the state that its F found, and exchanges nothing.
   ================================================================================================================
   */

/* Appends the last rows of a part of n rows to the tail before it. rows: (CONV - 1, width), aligned as in a tail. */
static inline void tail_forward(real *tail, const real *rows, int64_t n, int64_t width) {
    const int64_t left = max_of(0, CONV - 1 - n);
    memmove(tail, tail + (CONV - 1 - left) * width, (size_t)(left * width) * sizeof *tail);
    copy_rows(tail + left * width, rows + left * width, CONV - 1 - left, width);
}

/* Turns the gradient of the tail after a part of n rows into that of the tail before it. rows: (CONV - 1, width)
   receives the gradient of the part's own rows. */
static inline void tail_backward(real *dtail, real *rows, int64_t n, int64_t width) {
    const int64_t left = max_of(0, CONV - 1 - n);
    clear_rows(rows, left, width);
    copy_rows(rows + left * width, dtail + left * width, CONV - 1 - left, width);
    memmove(dtail + (CONV - 1 - left) * width, dtail, (size_t)(left * width) * sizeof *dtail);
    clear_rows(dtail, CONV - 1 - left, width);
}

/* Returns the numbers of an effect: a matrix a head, or its diagonal. */
static inline int64_t effect_numbers(const recurrence *r) { return r->heads * r->dim * (r->is_delta ? r->dim : 1); }

/* S = effect S + more for each head; with `back` the effect is transposed. */
static inline void state_through_part(const recurrence *r, real *S, const real *effect, const real *more, int back) {
    const int64_t n = r->dim, down = back ? 1 : n, across = back ? n : 1;
    real column[MAX_HEAD_DIM];
    for (int64_t at = 0; at < r->heads * n; at++) { /* column at % n of a head */
        const int64_t head = at / n * n * n;
        for (int64_t j = 0; j < n; j++) column[j] = S[head + j * n + at % n];
        for (int64_t i = 0; i < n; i++) {
            real sum = more[head + i * n + at % n];
            if (!r->is_delta) sum += effect[at / n * n + i] * column[i];
            for (int64_t j = 0; j < n && r->is_delta; j++) sum += effect[head + i * down + j * across] * column[j];
            S[head + i * n + at % n] = sum;
        }
    }
}

/* Computes a part's effect, and its reads, which go into dnormed1, unused at this time. */
static inline void find_effect(const pass *p, int64_t i, int64_t first, int64_t end, real *effect) {
    recurrence r = recurrence_of(p, i);
    real *all = p->scratch->scanned;
    const int64_t step = r.is_delta ? 1 : r.dim + 1; /* all numbers, or the diagonal */
    r.v = NULL;
    clear_rows(all, 1, heads_numbers(p->config));
    PARALLEL_FOR
    for (int64_t head = 0; head < r.heads; head++) {
        real *S = all + head * r.dim * r.dim;
        for (int64_t j = 0; j < r.dim; j++) S[j * r.dim + j] = 1;
        recurrence_forward(&r, head, first, end, S, p->scratch->rows.dnormed1, NULL);
    }
    for (int64_t j = 0, n = effect_numbers(&r) / r.heads; j < effect_numbers(&r); j++) {
        effect[j] = all[j / n * r.dim * r.dim + j % n * step];
    }
}

/* Forward: outputs += reads S. Backward: dS += reads^T doutputs. */
static inline void apply_reads(const pass *p, int64_t i, int64_t first, int64_t end, real *S, real *out, int back) {
    const recurrence r = recurrence_of(p, i);
    for (int64_t at = first * r.heads * r.dim; at < end * r.heads * r.dim; at++) {
        const real read = p->scratch->rows.dnormed1[at];
        real *row = out + at / r.dim * r.dim, *with = S + (at / r.dim % r.heads * r.dim + at % r.dim) * r.dim;
        for (int64_t j = 0; j < r.dim; j++) {
            if (back) with[j] += read * row[j];
            else row[j] += read * with[j];
        }
    }
}

static inline int64_t rows_of_part(const pass *p, int64_t part) {
    return slice_of_part(p->group, p->rows->index, part)->length;
}

/* Fetches the border from which the round began: zeros, or the last round's end. */
static inline void round_begin(const pass *p, int64_t i, real *border) {
    if (p->rows->index == 0) clear_rows(border, 1, border_numbers(p->config));
    else copy_rows(border, snapshot_at(p, p->state, i, p->state->chunks), 1, border_numbers(p->config));
}

/* Computes the tail before the part in scratch->border, and that after the round in scratch->dborder. */
static inline void exchange_tails(const pass *p, int64_t i, int64_t first, int64_t end) {
    cp_group *g = p->group;
    const int64_t width = 3 * p->config->hidden, numbers = (CONV - 1) * width, n = min_of(end - first, CONV - 1);
    real *all = exchange_room(g, g->size * numbers), *own = all + g->part * numbers;
    real *tail = p->scratch->dborder + heads_numbers(p->config);
    copy_rows(own + (CONV - 1 - n) * width, p->kept->layers[i].conv_in + (end - n) * width, n, width);
    g->add_up(g->context, CP_TAILS, g->size, all, g->size * numbers);
    round_begin(p, i, p->scratch->dborder);
    for (int64_t part = 0; part < g->size; part++) {
        if (part == g->part) copy_rows(p->scratch->border + heads_numbers(p->config), tail, CONV - 1, width);
        tail_forward(tail, all + part * numbers, rows_of_part(p, part), width);
    }
}

/* Runs the heads over the part. Leaves in the state the borders from which the part and the next round begin. */
static inline void part_forward(const pass *p, int64_t i, int64_t first, int64_t end) {
    cp_group *g = p->group;
    const recurrence r = recurrence_of(p, i);
    const int64_t numbers = heads_numbers(p->config), border = border_numbers(p->config);
    const int64_t effect = effect_numbers(&r), each = effect + numbers;
    real *all = exchange_room(g, g->size * each), *own = all + g->part * each;
    real *S = p->scratch->dborder, *before = p->scratch->border, *out = p->kept->layers[i].mixed;
    find_effect(p, i, first, end, own);
    clear_rows(before, 1, numbers);
    run_heads(p, i, first, end, out, NULL);
    copy_rows(own + effect, before, 1, numbers);
    g->add_up(g->context, CP_STATES, g->size, all, g->size * each);
    for (int64_t part = 0; part < g->size; part++) {
        if (part == g->part) copy_rows(before, S, 1, numbers);
        state_through_part(&r, S, all + part * each, all + part * each + effect, 0);
    }
    apply_reads(p, i, first, end, before, out, 0);
    copy_rows(snapshot_at(p, p->state, i, p->rows->index), before, 1, border);
    copy_rows(snapshot_at(p, p->state, i, p->state->chunks), S, 1, border);
}

/* Turns scratch->dborder from the gradient of the state after the round into that of the state after the part, and
   carry into that of the state before the round. */
static inline void exchange_state_gradients(const pass *p, int64_t i, int64_t first, int64_t end, real *carry) {
    cp_group *g = p->group;
    const recurrence r = recurrence_of(p, i);
    const int64_t numbers = heads_numbers(p->config), effect = effect_numbers(&r), each = effect + numbers;
    real *all = exchange_room(g, g->size * each), *own = all + g->part * each;
    find_effect(p, i, first, end, own);
    apply_reads(p, i, first, end, own + effect, p->scratch->rows.dmixed, 1);
    g->add_up(g->context, CP_STATE_GRADIENTS, g->size, all, g->size * each);
    for (int64_t part = g->size - 1; part >= 0; part--) {
        if (part == g->part) copy_rows(p->scratch->dborder, carry, 1, numbers);
        state_through_part(&r, carry, all + part * each, all + part * each + effect, 1);
    }
}

/* Adds the gradient of the part's own rows, as tails of later parts, to scratch->dconv_in. carry: turned from the
   gradient of the tail after the round into that of the tail before it. dtail: the part's own contribution to the tail
   before it. */
static inline void exchange_tail_gradients(const pass *p, int64_t first, int64_t end, const real *dtail, real *carry) {
    cp_group *g = p->group;
    const int64_t width = 3 * p->config->hidden, numbers = (CONV - 1) * width, n = min_of(end - first, CONV - 1);
    real *all = exchange_room(g, (g->size + 1) * numbers), *rows = all + g->size * numbers;
    real *to = p->scratch->rows.dconv_in + (end - n) * width;
    copy_rows(all + g->part * numbers, dtail, CONV - 1, width);
    g->add_up(g->context, CP_TAIL_GRADIENTS, g->size, all, g->size * numbers);
    for (int64_t part = g->size - 1; part >= 0; part--) {
        tail_backward(carry, rows, rows_of_part(p, part), width);
        for (int64_t j = 0; j < numbers; j++) carry[j] += all[part * numbers + j];
        for (int64_t j = 0; j < n * width && part == g->part; j++) to[j] += rows[(CONV - 1 - n) * width + j];
    }
}

/* ================================================================================================================
   >>spans    the slices of a chunk, each of which may be continued by others
   ================================================================================================================ */

/* Runs one span forward and passes its end to those that continue it. */
static inline void span_forward(const pass *p, int64_t i, const row_span *s) {
    const layer_activations *a = &p->kept->layers[i];
    const int64_t width = 3 * p->config->hidden;
    const int exchanges = is_part(p, s) && !p->is_replay;
    const int64_t heads = heads_numbers(p->config);
    real *border = p->scratch->border, *tail = border + heads, *next = p->scratch->dborder;
    if (exchanges) exchange_tails(p, i, s->first, s->end);
    else border_begin(p, i, s);
    conv_forward(a->conv_out, a->conv_in, tail, weights_of(p, i)->conv, p->rows->spans, s, width);
    unit_vectors_forward(p, i, s->first, s->end);
    if (exchanges) part_forward(p, i, s->first, s->end);
    else run_heads(p, i, s->first, s->end, a->mixed, NULL);
    hand_on(p, s);
    if (s->leaves < 0 || p->is_replay) return;
    copy_rows(next, border, 1, heads);
    for (int64_t j = 0; j < CONV - 1; j++) {
        const real *row = tail_or_row(a->conv_in, tail, p->rows->spans, s, s->end - CONV + 1 + j, width);
        copy_rows(next + heads + j * width, row, 1, width);
    }
    border_send(p, snapshot_at(p, p->state, i, s->leaves), next);
}

/* Runs a span's heads again for the states before each row, which a backward needs. */
static inline void span_states(const pass *p, int64_t i, const row_span *s) {
    border_begin(p, i, s);
    run_heads(p, i, s->first, s->end, NULL, p->scratch->rows.states);
    hand_on(p, s);
}

/* Sets scratch->carried to the first carry of a tree's chain. The first span of this chunk that returns a gradient there
   overwrites the carry, and others add to it. */
static inline void take_carry(const pass *p, int64_t i) {
    border_fetch(p, p->scratch->carried, p->state->layers[i].carry);
    p->scratch->adds_to_carry = 0;
}

/* Sets scratch->dborder to the gradient of the state at a span's end, summed over everything that continues it. */
static inline void collect_gradients(const pass *p, int64_t i, const row_span *s) {
    real *dborder = p->scratch->dborder;
    if (s->leaves >= 0 && p->state->carry_of && p->state->carry_of[s->leaves] == 0)
        copy_rows(dborder, p->scratch->carried, 1, border_numbers(p->config));
    else if (s->leaves >= 0) border_fetch(p, dborder, carry_at(p, p->state, i, s->leaves));
    else clear_rows(dborder, 1, border_numbers(p->config));
    for (int32_t at = s->child; at >= 0; at = p->rows->spans[at].sibling) {
        const real *from = begin_of_span(p, &p->rows->spans[at]);
        for (int64_t j = 0; j < heads_numbers(p->config); j++) dborder[j] += from[j];
    }
}

/* Passes the gradient in scratch->dborder to the span or snapshot from which this one begins. A chain's carry may be
   overwritten by this chunk; in a tree the snapshot has other branches, so it adds. */
static inline void return_gradient(const pass *p, int64_t i, const row_span *s) {
    int64_t enters;
    const chain_state *above = state_before(p, s, &enters);
    real *dborder = p->scratch->dborder, *sum = p->scratch->border;
    const int64_t heads = heads_numbers(p->config);
    if (s->up >= 0) {
        copy_rows(begin_of_span(p, s), dborder, 1, heads);
        clear_rows(dborder, 1, heads);
    }
    if (!above) return;
    real *carry = carry_at(p, above, i, enters);
    const int is_first = above == p->state && carry == above->layers[i].carry;
    if (above->in_tree && !(is_first && !p->scratch->adds_to_carry)) {
        border_fetch(p, sum, carry);
        for (int64_t j = 0; j < border_numbers(p->config); j++) dborder[j] += sum[j];
    }
    if (is_first) p->scratch->adds_to_carry = 1;
    border_send(p, carry, dborder);
}

/* Runs one span backward, after all that continue it. */
static inline void span_backward(const pass *p, int64_t i, const row_span *s) {
    const model_config *c = p->config;
    const row_scratch *d = &p->scratch->rows;
    const recurrence r = recurrence_of(p, i);
    const real *skip = weights_of(p, i)->skip;
    const int64_t h = c->hidden, width = 3 * h, first = s->first, end = s->end;
    real *dborder = p->scratch->dborder, *dtail = dborder + heads_numbers(c);
    real *found = p->scratch->border; /* which is no longer needed */
    recurrence_gradients g = {d->states, d->dmixed, d->dconv_out, d->dconv_out + h, d->dconv_out + 2 * h, d->dbeta,
                              d->ddecay};
    collect_gradients(p, i, s);
    if (is_part(p, s)) exchange_state_gradients(p, i, first, end, p->state->layers[i].carry);
    PARALLEL_FOR
    for (int64_t head = 0; head < r.heads; head++) {
        recurrence_backward(&r, &g, head, first, end, dborder + head * r.dim * r.dim);
    }
    for (int64_t at = first * h; skip && at < end * h; at++) {
        g.dv[at / h * width + at % h] += skip[at % h / r.dim] * d->dmixed[at];
    }
    unit_vectors_backward(p, i, first, end);
    /* The tail at the end is the last rows of this span or, if that is too short, of those before it. */
    copy_rows(found, dtail, CONV - 1, width);
    clear_rows(dtail, CONV - 1, width);
    for (int64_t j = 0; j < CONV - 1; j++) {
        real *to = tail_or_row(d->dconv_in, dtail, p->rows->spans, s, end - CONV + 1 + j, width);
        for (int64_t x = 0; x < width; x++) to[x] += found[j * width + x];
    }
    conv_backward(d->dconv_in, dtail, d->dconv_out, weights_of(p, i)->conv, p->rows->spans, s, width);
    if (is_part(p, s)) exchange_tail_gradients(p, first, end, dtail, p->state->layers[i].carry + heads_numbers(c));
    else return_gradient(p, i, s);
}

static inline void recurrent_mix(const pass *p, int64_t i, int backward) {
    const layer_activations *a = &p->kept->layers[i];
    const real *skip = weights_of(p, i)->skip;
    const int64_t h = p->config->hidden, hd = head_dim_of(p->config), rows = p->rows->rows, n = p->rows->n_spans;
    if (backward) clear_rows(p->scratch->rows.dconv_in, rows, 3 * h);
    if (backward && p->state && p->state->carry_of) take_carry(p, i);
    for (int64_t s = 0; s < n; s++) {
        if (backward) span_states(p, i, &p->rows->spans[s]);
        else span_forward(p, i, &p->rows->spans[s]);
    }
    for (int64_t s = n - 1; s >= 0 && backward; s--) span_backward(p, i, &p->rows->spans[s]);
    for (int64_t at = 0; skip && !backward && at < rows * h; at++) {
        a->mixed[at] += skip[at % h / hd] * a->q[at / h * 3 * h + 2 * h + at % h];
    }
    stream_end(state_stream_of(p));
}

static inline void recurrent_after(const pass *p, int64_t i, const row_block *b) {
    const model_config *c = p->config;
    const layer_weights *w = weights_of(p, i);
    const layer_activations a = kept_rows(p, i, b->first);
    int64_t n = b->count, h = c->hidden;
    rmsnorm_forward(a.attended, a.mixed_scale, a.mixed, w->out_norm, n * c->heads, head_dim_of(c), c->norm_epsilon);
    for (int64_t at = 0; at < n * h; at++) a.attended[at] *= a.out_gate[at] * sigmoid(a.out_gate[at]);
    linear_forward(b->scratch.branch1, a.attended, w->wo, NULL, n, h, h);
}

/* Turns dattended into the gradient of the normed result, before its gate. */
static inline void recurrent_after_backward(const pass *p, int64_t i, const row_block *b) {
    const model_config *c = p->config;
    const layer_weights *w = weights_of(p, i);
    const layer_activations a = kept_rows(p, i, b->first);
    const row_scratch *s = &b->scratch;
    int64_t n = b->count, h = c->hidden, hd = head_dim_of(c);
    linear_backward(s->dattended, MATMUL_SET, s->branch1, p->scratch->transposed.wo, n, h, h);
    for (int64_t at = 0; at < n * h; at++) {
        real x = a.out_gate[at], open = sigmoid(x);
        real normed = a.mixed[at] * a.mixed_scale[at / hd] * w->out_norm[at % hd];
        s->dout_gate[at] = s->dattended[at] * normed * open * (1 + x * (1 - open));
        s->dattended[at] *= x * open;
    }
    clear_rows(s->dmixed, n, h);
    rmsnorm_backward(s->dmixed, s->dattended, a.mixed, a.mixed_scale, w->out_norm, n * c->heads, hd);
}

/* Turns dbeta into the gradient of its matrix's output, and dstep into that of the decays'. */
static inline void recurrent_before_backward(const pass *p, int64_t i, const row_block *b) {
    const model_config *c = p->config;
    const layer_weights *w = weights_of(p, i), *transposed = &p->scratch->transposed;
    const layer_activations a = kept_rows(p, i, b->first);
    const row_scratch *s = &b->scratch;
    int64_t n = b->count, h = c->hidden, decays = decays_of(c, p->stage.first_layer + i), each = decays / c->heads;
    for (int64_t at = 0; at < n * decays; at++) {
        real dstep = -s->ddecay[at] * a.decay[at] * real_exp(w->a_log[at % decays / each]);
        if (!w->w_beta) dstep += s->dbeta[at];
        s->dstep[at] = dstep * (1 - real_exp(-a.step[at])); /* softplus' = sigmoid */
    }
    for (int64_t at = 0; at < n * c->heads && w->w_beta; at++) s->dbeta[at] *= a.beta[at] * (1 - a.beta[at]);
    linear_backward(s->dnormed1, MATMUL_SET, s->dconv_in, transposed->wqkv, n, h, 3 * h);
    linear_backward(s->dnormed1, MATMUL_ADD, s->dstep, transposed->w_decay, n, h, decays);
    linear_backward(s->dnormed1, MATMUL_ADD, s->dout_gate, transposed->wg, n, h, h);
    if (w->w_beta) linear_backward(s->dnormed1, MATMUL_ADD, s->dbeta, transposed->w_beta, n, h, c->heads);
}

static inline int64_t recurrent_jobs(matrix_job *jobs, const pass *p, int64_t i, const weights *gradient) {
    const model_config *c = p->config;
    const layer_weights *w = weights_of(p, i), *g = &gradient->layers[p->stage.first_layer + i];
    const layer_weights *t = &p->scratch->transposed;
    const layer_activations *a = &p->kept->layers[i];
    const row_scratch *s = &p->scratch->rows;
    int64_t h = c->hidden, decays = decays_of(c, p->stage.first_layer + i);
    const matrix_job all[] = {
        {w->wqkv, t->wqkv, g->wqkv, NULL, a->normed1, s->dconv_in, a->conv_in, h, 3 * h},
        {w->w_decay, t->w_decay, g->w_decay, g->dt_bias, a->normed1, s->dstep, a->decay, h, decays},
        {w->wg, t->wg, g->wg, NULL, a->normed1, s->dout_gate, a->out_gate, h, h},
        {w->wo, t->wo, g->wo, NULL, a->attended, s->branch1, a->input, h, h},
        {w->w_beta, t->w_beta, g->w_beta, NULL, a->normed1, s->dbeta, a->beta, h, c->heads},
    };
    memcpy(jobs, all, sizeof all);
    return w->w_beta ? 5 : 4;
}

static inline void recurrent_gradients(const pass *p, int64_t i, const weights *gradient) {
    const model_config *c = p->config;
    const layer_weights *w = weights_of(p, i), *g = &gradient->layers[p->stage.first_layer + i];
    const layer_activations *a = &p->kept->layers[i];
    const row_scratch *s = &p->scratch->rows;
    int64_t rows = p->rows->rows, h = c->hidden, hd = head_dim_of(c), width = 3 * h;
    int64_t decays = decays_of(c, p->stage.first_layer + i), each = decays / c->heads;
    rmsnorm_backward_gain(g->out_norm, s->dattended, a->mixed, a->mixed_scale, rows * c->heads, hd);
    for (int64_t at = 0; at < rows * decays; at++) { /* decay = exp(-exp(a_log) step) */
        int64_t head = at % decays / each;
        g->a_log[head] -= s->ddecay[at] * a->decay[at] * real_exp(w->a_log[head]) * a->step[at];
    }
    for (int64_t at = 0; g->skip && at < rows * h; at++) {
        g->skip[at % h / hd] += s->dmixed[at] * a->q[at / h * width + 2 * h + at % h];
    }
    for (int64_t n = 0; n < p->rows->n_spans; n++) {
        border_begin(p, i, &p->rows->spans[n]);
        conv_gradient(g->conv, a->conv_in, p->scratch->border + heads_numbers(c), s->dconv_out, p->rows->spans,
                      &p->rows->spans[n], width);
    }
}

static const branch delta_branch = {recurrent_weights, recurrent_sizes,          recurrent_before,
                                    recurrent_after,   recurrent_after_backward, recurrent_before_backward,
                                    recurrent_mix,     recurrent_jobs,           recurrent_gradients};

#endif /* TRAIN_RECURRENT_H */
