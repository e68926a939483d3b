/* feed_forward.h - the feed-forward branches: dense, and experts of which each row uses some - MIT or public domain

   Neither reads other rows. Chunks share only how often each expert was chosen in the rest of a sequence, for the
   balance loss: see routing in parts.h. */

#ifndef TRAIN_FEED_FORWARD_H
#define TRAIN_FEED_FORWARD_H

#include "parts.h"

/* ================================================================================================================
   >>dense    SwiGLU
   ================================================================================================================ */

static inline void dense_weights(weights *w, int64_t layer, const model_config *c, layer_weights *l) {
    int64_t h = c->hidden, f = c->ffn;
    l->w_gate = weights_next(w, layer, "w_gate", h * f, h);
    l->w_up = weights_next(w, layer, "w_up", h * f, h);
    l->w_down = weights_next(w, layer, "w_down", f * h, f);
}

static inline void dense_sizes(layer_sizes *n, const model_config *c, int64_t layer) {
    (void)layer;
    n->ffn = c->ffn;
}

static inline void dense_after(const pass *p, int64_t i, const row_block *b) {
    const layer_weights *w = weights_of(p, i);
    const layer_activations a = kept_rows(p, i, b->first);
    int64_t n = b->count, h = p->config->hidden, f = p->config->ffn;
    linear_forward(a.gate, a.normed2, w->w_gate, NULL, n, h, f);
    linear_forward(a.up, a.normed2, w->w_up, NULL, n, h, f);
    swiglu_forward(a.gated, a.gate, a.up, n * f);
    linear_forward(b->scratch.branch2, a.gated, w->w_down, NULL, n, f, h);
}

static inline void dense_after_backward(const pass *p, int64_t i, const row_block *b) {
    const layer_weights *transposed = &p->scratch->transposed;
    const layer_activations a = kept_rows(p, i, b->first);
    const row_scratch *s = &b->scratch;
    int64_t n = b->count, h = p->config->hidden, f = p->config->ffn;
    linear_backward(s->dgated, MATMUL_SET, s->branch2, transposed->w_down, n, f, h);
    swiglu_backward(s->dgate, s->dup, s->dgated, a.gate, a.up, n * f);
    linear_backward(s->dnormed2, MATMUL_SET, s->dgate, transposed->w_gate, n, h, f);
    linear_backward(s->dnormed2, MATMUL_ADD, s->dup, transposed->w_up, n, h, f);
}

static inline int64_t dense_jobs(matrix_job *jobs, const pass *p, int64_t i, const weights *gradient) {
    const layer_weights *w = weights_of(p, i), *g = &gradient->layers[p->stage.first_layer + i];
    const layer_weights *t = &p->scratch->transposed;
    const layer_activations *a = &p->kept->layers[i];
    const row_scratch *s = &p->scratch->rows;
    int64_t h = p->config->hidden, f = p->config->ffn;
    const matrix_job all[] = {
        {w->w_gate, t->w_gate, g->w_gate, NULL, a->normed2, s->dgate, a->gate, h, f},
        {w->w_up, t->w_up, g->w_up, NULL, a->normed2, s->dup, a->up, h, f},
        {w->w_down, t->w_down, g->w_down, NULL, a->gated, s->branch2, a->middle, f, h},
    };
    memcpy(jobs, all, sizeof all);
    return sizeof all / sizeof all[0];
}

static const branch dense_branch = {dense_weights, dense_sizes, NULL,       dense_after, dense_after_backward,
                                    NULL,          NULL,        dense_jobs, NULL};

/* ================================================================================================================
   >>experts    scores are sigmoids, a row takes the `active` highest, and their shares are scores over their sum
                (DeepSeek-V3); no row is ever dropped
   ================================================================================================================ */

static inline void expert_weights(weights *w, int64_t layer, const model_config *c, layer_weights *l) {
    int64_t h = c->hidden, f = expert_ffn_of(c), n = c->kinds.experts;
    l->router = weights_next(w, layer, "router", h * n, h);
    l->w_gate = weights_next(w, layer, "w_gate", n * h * f, h);
    l->w_up = weights_next(w, layer, "w_up", n * h * f, h);
    l->w_down = weights_next(w, layer, "w_down", n * f * h, f);
}

static inline void expert_sizes(layer_sizes *n, const model_config *c, int64_t layer) {
    (void)layer;
    n->experts = c->kinds.experts;
    n->active = c->kinds.active;
    n->ffn = n->active * expert_ffn_of(c);
}

static inline int16_t *routes_of(const pass *p, int64_t i, int64_t row) {
    return routes_at(p->routing, p->rows->chunk, p->stage.first_layer + i, row);
}

/* Chooses the experts with the highest scores; of equal ones the lower number. */
static inline void choose_experts(int16_t *route, const real *score, int64_t experts, int64_t active) {
    for (int64_t j = 0; j < active; j++) {
        int best = -1;
        for (int e = 0; e < (int)experts; e++) {
            int taken = 0;
            for (int64_t k = 0; k < j; k++) taken |= route[k] == e;
            if (!taken && (best < 0 || score[e] > score[best])) best = e;
        }
        route[j] = (int16_t)best;
    }
}

static inline void expert_before(const pass *p, int64_t i, const row_block *b) {
    const model_config *c = p->config;
    const layer_activations a = kept_rows(p, i, b->first);
    int64_t n = b->count, experts = c->kinds.experts, active = c->kinds.active;
    linear_forward(a.score, a.normed2, weights_of(p, i)->router, NULL, n, c->hidden, experts);
    for (int64_t row = 0; row < n; row++) {
        real *score = a.score + row * experts, *share = a.share + row * active, sum = 0;
        int16_t *route = routes_of(p, i, b->first + row);
        for (int64_t e = 0; e < experts; e++) score[e] = sigmoid(score[e]);
        if (!p->is_replay) choose_experts(route, score, experts, active);
        for (int64_t j = 0; j < active; j++) sum += score[route[j]];
        for (int64_t j = 0; j < active; j++) share[j] = score[route[j]] / sum;
    }
}

/* Counts routes only in a chunk's first forward, not in a replay. */
static inline void expert_mix(const pass *p, int64_t i, int backward) {
    const layer_activations *a = &p->kept->layers[i];
    const routing *r = p->routing;
    int64_t experts = r->experts, layer = p->stage.first_layer + i;
    for (int64_t row = 0; row < p->rows->rows && !backward && !p->is_replay; row++) {
        const int16_t *route = routes_of(p, i, row);
        const real *score = a->score + row * experts;
        double sum = 0;
        if (p->rows->sequence[row] < 0) continue;
        int64_t at = experts_at(r, layer, p->rows->sequence[row]);
        for (int64_t j = 0; j < p->config->kinds.active; j++) r->count[at + route[j]]++;
        for (int64_t e = 0; e < experts; e++) sum += (double)score[e];
        for (int64_t e = 0; e < experts; e++) r->sum[at + e] += (double)score[e] / sum;
    }
}

static inline void expert_after(const pass *p, int64_t i, const row_block *b) {
    const model_config *c = p->config;
    const layer_weights *w = weights_of(p, i);
    const layer_activations a = kept_rows(p, i, b->first);
    int64_t h = c->hidden, f = expert_ffn_of(c), active = c->kinds.active;
    clear_rows(b->scratch.branch2, b->count, h);
    for (int64_t at = 0; at < b->count * active; at++) {
        int64_t row = at / active, e = routes_of(p, i, b->first + row)[at % active];
        real *gate = a.gate + at * f, *up = a.up + at * f, *gated = a.gated + at * f;
        real *out = b->scratch.branch2 + row * h;
        linear_forward(gate, a.normed2 + row * h, w->w_gate + e * h * f, NULL, 1, h, f);
        linear_forward(up, a.normed2 + row * h, w->w_up + e * h * f, NULL, 1, h, f);
        swiglu_forward(gated, gate, up, f);
        for (int64_t j = 0; j < f; j++) {
            const real *down = w->w_down + (e * f + j) * h;
            for (int64_t k = 0; k < h; k++) out[k] += a.share[at] * gated[j] * down[k];
        }
    }
}

/* Sets dgated to share * (W_down dout) for each chosen expert, and dscore from the shares' gradients. */
static inline void expert_after_backward(const pass *p, int64_t i, const row_block *b) {
    const model_config *c = p->config;
    const layer_weights *transposed = &p->scratch->transposed;
    const layer_activations a = kept_rows(p, i, b->first);
    const row_scratch *s = &b->scratch;
    int64_t h = c->hidden, f = expert_ffn_of(c), active = c->kinds.active, experts = c->kinds.experts;
    clear_rows(s->dnormed2, b->count, h);
    clear_rows(s->dscore, b->count, experts);
    for (int64_t row = 0; row < b->count; row++) {
        const int16_t *route = routes_of(p, i, b->first + row);
        const real *score = a.score + row * experts;
        real dshare[MAX_ACTIVE], mean = 0, sum = 0, *dnormed = s->dnormed2 + row * h;
        for (int64_t j = 0; j < active; j++) {
            int64_t at = row * active + j, e = route[j];
            real *dgated = s->dgated + at * f;
            linear_backward(dgated, MATMUL_SET, s->branch2 + row * h, transposed->w_down + e * f * h, 1, f, h);
            dshare[j] = 0;
            for (int64_t k = 0; k < f; k++) dshare[j] += a.gated[at * f + k] * dgated[k];
            for (int64_t k = 0; k < f; k++) dgated[k] *= a.share[at];
            swiglu_backward(s->dgate + at * f, s->dup + at * f, dgated, a.gate + at * f, a.up + at * f, f);
            linear_backward(dnormed, MATMUL_ADD, s->dgate + at * f, transposed->w_gate + e * h * f, 1, h, f);
            linear_backward(dnormed, MATMUL_ADD, s->dup + at * f, transposed->w_up + e * h * f, 1, h, f);
            mean += a.share[at] * dshare[j];
            sum += score[e];
        }
        for (int64_t j = 0; j < active; j++) s->dscore[row * experts + route[j]] = (dshare[j] - mean) / sum;
    }
}

/* Adds the balance loss's gradient, and runs backward through the router. */
static inline void expert_before_backward(const pass *p, int64_t i, const row_block *b) {
    const model_config *c = p->config;
    const layer_activations a = kept_rows(p, i, b->first);
    const row_scratch *s = &b->scratch;
    int64_t experts = c->kinds.experts, layer = p->stage.first_layer + i;
    for (int64_t row = 0; row < b->count; row++) {
        const real *score = a.score + row * experts;
        real *dscore = s->dscore + row * experts, slope[MAX_EXPERTS], mean = 0, sum = 0;
        int64_t sequence = p->rows->sequence[b->first + row];
        for (int64_t e = 0; e < experts; e++) {
            slope[e] = sequence < 0 ? 0 : (real)balance_slope(p->routing, c, layer, sequence, e);
            sum += score[e];
            mean += slope[e] * score[e];
        }
        for (int64_t e = 0; e < experts; e++) {
            dscore[e] = (dscore[e] + (slope[e] - mean / sum) / sum) * score[e] * (1 - score[e]);
        }
    }
    linear_backward(s->dnormed2, MATMUL_ADD, s->dscore, p->scratch->transposed.router, b->count, c->hidden, experts);
}

/* Leaves out the experts' own gradients, because each expert has only its rows: see expert_gradients. */
static inline int64_t expert_jobs(matrix_job *jobs, const pass *p, int64_t i, const weights *gradient) {
    const model_config *c = p->config;
    const layer_weights *w = weights_of(p, i), *g = &gradient->layers[p->stage.first_layer + i];
    const layer_weights *t = &p->scratch->transposed;
    const layer_activations *a = &p->kept->layers[i];
    int64_t h = c->hidden, f = expert_ffn_of(c), n = 0;
    matrix_job router = {w->router, t->router, g->router, NULL, a->normed2, p->scratch->rows.dscore, a->score,
                         h, c->kinds.experts};
    jobs[n++] = router;
    for (int64_t at = 0; at < c->kinds.experts * h * f; at += h * f) {
        const matrix_job all[] = {{w->w_gate + at, t->w_gate + at, NULL, NULL, NULL, NULL, NULL, h, f},
                                  {w->w_up + at, t->w_up + at, NULL, NULL, NULL, NULL, NULL, h, f},
                                  {w->w_down + at, t->w_down + at, NULL, NULL, NULL, NULL, NULL, f, h}};
        memcpy(jobs + n, all, sizeof all);
        n += 3;
    }
    return n;
}

static inline void add_outer_product(real *to, real scale, const real *x, int64_t n_x, const real *y, int64_t n_y) {
    for (int64_t i = 0; i < n_x; i++) {
        for (int64_t j = 0; j < n_y; j++) to[i * n_y + j] += scale * x[i] * y[j];
    }
}

static inline void expert_gradients(const pass *p, int64_t i, const weights *gradient) {
    const model_config *c = p->config;
    const layer_weights *g = &gradient->layers[p->stage.first_layer + i];
    const layer_activations *a = &p->kept->layers[i];
    const row_scratch *s = &p->scratch->rows;
    int64_t h = c->hidden, f = expert_ffn_of(c), active = c->kinds.active;
    PARALLEL_FOR
    for (int64_t e = 0; e < c->kinds.experts; e++) {
        for (int64_t at = 0; at < p->rows->rows * active; at++) {
            int64_t row = at / active;
            if (routes_of(p, i, row)[at % active] != e) continue;
            add_outer_product(g->w_gate + e * h * f, 1, a->normed2 + row * h, h, s->dgate + at * f, f);
            add_outer_product(g->w_up + e * h * f, 1, a->normed2 + row * h, h, s->dup + at * f, f);
            add_outer_product(g->w_down + e * f * h, a->share[at], a->gated + at * f, f, s->branch2 + row * h, h);
        }
    }
}

static const branch expert_branch = {expert_weights,         expert_sizes, expert_before, expert_after,
                                     expert_after_backward,  expert_before_backward,
                                     expert_mix,             expert_jobs,  expert_gradients};

#endif /* TRAIN_FEED_FORWARD_H */
