/* world.h - a small model, a batch, and the model once more from its definition, for tests of the CPU trainer
   - MIT or public domain

   A test includes examples/chunked.h, as it wants it, and examples/check.h before this, and then the harness. */

#ifndef TESTS_TRAINER_WORLD_H
#define TESTS_TRAINER_WORLD_H

/* ================================================================================================================
   >>fixtures
   ================================================================================================================ */

static model_config tiny_model(void) {
    model_config c = {VOCABULARY, 2, 20, 2, 1, 34, 0, 0, 1e4, 1e-6, 0, {0}}; /* matrices of more than one GRADIENT_BLOCK */
    return c;
}

typedef struct world {
    model_config config;
    documents documents;
    batch batch;
    weights weights, gradient;
    memory_meter meter;
    chunk_runner runner;
    uint64_t seed;
} world;

static void world_begin(world *x, const model_config *c, const int64_t *lengths, int64_t n, int64_t chunk_size,
                        int64_t k, int64_t prompt) {
    memset(x, 0, sizeof *x);
    x->config = *c;
    x->seed = 77;
    x->batch = batch_new(n);
    for (int64_t i = 0; i < n; i++) add_synthetic(&x->documents, lengths[i], 5);
    for (int64_t i = 0; i < n; i++) batch_put(&x->batch, i, &x->documents, i, prompt, 0);
    x->weights = weights_new(c);
    x->gradient = weights_new(c);
    weights_init(&x->weights, c, 11, 0.1);
    x->runner.config = &x->config;
    x->runner.stage = stage_of(c, 0, 1);
    x->runner.packing.chunk_size = chunk_size;
    x->runner.order.shape.k = k;
    x->runner.meter = &x->meter;
}

static void world_end(world *x) {
    chunk_runner_free(&x->runner);
    for (int kind = 0; kind < MEMORY_KINDS; kind++) CHECK_INT(x->meter.held[kind], 0);
    weights_free(&x->gradient);
    weights_free(&x->weights);
    batch_free(&x->batch);
    documents_free(&x->documents);
}

static double chunked_loss(world *x, chunked_result *result) {
    cf_error error = {0};
    memset(result, 0xFF, sizeof *result);
    cf_result code =
        chunked_gradients(&x->runner, &x->weights, &x->gradient, &x->batch, x->seed, result, &error);
    if (code != CF_OK) FAIL("chunked_gradients: %s", error.text);
    return result->loss;
}

static double plain_loss(world *x, weights *gradient) {
    memory_meter meter = {{0}, {0}};
    return unchunked_gradients(&x->config, &x->weights, gradient, &x->batch, x->seed, &meter);
}

/* The largest relative difference of two gradients' tensors. */
static double worst_difference(const weights *a, const weights *b) {
    double worst = 0;
    for (int64_t i = 0; i < b->n_tensors; i++) {
        const tensor *t = &b->tensors[i];
        const double d = relative_difference(a->flat + t->offset, b->flat + t->offset, t->count);
        if (!is_rounding(d)) harness_note("%s differs by %g", t->name, d);
        worst = fmax(worst, d);
    }
    return worst;
}

/* Gradients of both ways agree, tensor by tensor. Returns by how much they differ. */
static double check_same_gradients(world *x) {
    chunked_result result;
    weights plain = weights_new(&x->config);
    const double loss = chunked_loss(x, &result), wanted = plain_loss(x, &plain);
    const double worst = fmax(worst_difference(&x->gradient, &plain), relative_difference_of_losses(loss, wanted));
    CHECK(is_rounding(worst));
    weights_free(&plain);
    return worst;
}

/* ================================================================================================================
   >>reference    the model once more, from the definitions: whole sequences, plain loops, the full matrix of scores
   ================================================================================================================ */

static void reference_linear(double *out, const double *x, const real *w, const real *bias, int64_t inputs,
                             int64_t outputs) {
    for (int64_t o = 0; o < outputs; o++) {
        out[o] = bias ? bias[o] : 0;
        for (int64_t i = 0; i < inputs; i++) out[o] += x[i] * w[i * outputs + o];
    }
}

static void reference_norm(double *out, const double *x, const real *gain, int64_t n, double epsilon) {
    double squares = 0;
    for (int64_t i = 0; i < n; i++) squares += x[i] * x[i];
    for (int64_t i = 0; i < n; i++) out[i] = x[i] / sqrt(squares / (double)n + epsilon) * gain[i];
}

static void reference_rope(double *x, int64_t n_heads, int64_t head_dim, int64_t position, double theta) {
    for (int64_t head = 0; head < n_heads; head++) {
        for (int64_t i = 0; i < head_dim / 2; i++) {
            double angle = (double)position / pow(theta, 2.0 * (double)i / (double)head_dim);
            double *a = &x[head * head_dim + i], *b = &x[head * head_dim + i + head_dim / 2], a0 = *a, b0 = *b;
            *a = a0 * cos(angle) - b0 * sin(angle);
            *b = a0 * sin(angle) + b0 * cos(angle);
        }
    }
}

/* Whether a query of a sequence sees a key of it. window 0: there is none; less: in blocks of -window. */
static int is_seen(int64_t key, int64_t query, int64_t window) {
    if (window < 0) return key <= query && key / -window == query / -window;
    return key <= query && (window == 0 || query - key < window);
}

/* softmax(q k / sqrt(head_dim)) v for query n - 1; with sinks, whose value is 0, as one score more. */
static void reference_attention(double *out, const double *q, const double *k, const double *v, int64_t n,
                                int64_t window, const real *sinks, int64_t heads, int64_t kv_heads, int64_t hd) {
    double *p = TAKE(double, n);
    for (int64_t head = 0; head < heads; head++) {
        int64_t kv = head * kv_heads / heads;
        double highest = sinks ? sinks[head] : -INFINITY, total = 0;
        for (int64_t j = 0; j < n; j++) {
            p[j] = 0;
            if (!is_seen(j, n - 1, window)) continue;
            const double *key = k + (j * kv_heads + kv) * hd;
            for (int64_t d = 0; d < hd; d++) p[j] += q[head * hd + d] * key[d] / sqrt((double)hd);
            highest = fmax(highest, p[j]);
        }
        if (sinks) total = exp(sinks[head] - highest);
        for (int64_t j = 0; j < n; j++) total += p[j] = is_seen(j, n - 1, window) ? exp(p[j] - highest) : 0;
        for (int64_t d = 0; d < hd; d++) {
            out[head * hd + d] = 0;
            for (int64_t j = 0; j < n; j++) {
                if (p[j] > 0) out[head * hd + d] += p[j] / total * v[(j * kv_heads + kv) * hd + d];
            }
        }
    }
    free(p);
}

/* What a layer's attention gives for all rows. */
static void reference_full(double *mixed, const double *x, int64_t n, const model_config *c, layer_kind kind,
                           const layer_weights *w) {
    int64_t h = c->hidden, hd = h / c->heads, kv = c->kv_heads * hd;
    int64_t window = kind.mixer == MIXER_WINDOW ? c->window : kind.mixer == MIXER_CHUNKED ? -c->window : 0;
    double *q = TAKE(double, n * h), *k = TAKE(double, n * kv), *v = TAKE(double, n * kv), *gate = TAKE(double, h);
    for (int64_t t = 0; t < n; t++) {
        reference_linear(q + t * h, x + t * h, w->wq, w->bq, h, h);
        reference_linear(k + t * kv, x + t * h, w->wk, w->bk, h, kv);
        reference_linear(v + t * kv, x + t * h, w->wv, w->bv, h, kv);
        reference_rope(q + t * h, c->heads, hd, t, c->rope_theta);
        reference_rope(k + t * kv, c->kv_heads, hd, t, c->rope_theta);
    }
    for (int64_t t = 0; t < n; t++) {
        reference_attention(mixed + t * h, q + t * h, k, v, t + 1, window, w->sinks, c->heads, c->kv_heads, hd);
        if (kind.gate) reference_linear(gate, x + t * h, w->wg, NULL, h, h);
        for (int64_t i = 0; i < h && kind.gate; i++) mixed[t * h + i] /= 1 + exp(-gate[i]);
    }
    free(q); free(k); free(v); free(gate);
}

/* Latent attention as its paper has it: K and V of every head are made of the latents of all rows. */
static void reference_latent(double *mixed, const double *x, int64_t n, const model_config *c, const layer_weights *w) {
    int64_t h = c->hidden, heads = c->heads, hd = h / heads, latent = latent_of(c), rope = rope_of(c);
    int64_t plain = hd - rope;
    double *q = TAKE(double, n * h), *k = TAKE(double, n * h), *v = TAKE(double, n * h);
    double *down = TAKE(double, latent + rope), *normed = TAKE(double, latent);
    for (int64_t t = 0; t < n; t++) {
        reference_linear(q + t * h, x + t * h, w->wq, NULL, h, h);
        reference_linear(down, x + t * h, w->w_latent, NULL, h, latent + rope);
        reference_norm(normed, down, w->latent_norm, latent, c->norm_epsilon);
        reference_rope(down + latent, 1, rope, t, c->rope_theta);
        for (int64_t head = 0; head < heads; head++) {
            double *key = k + t * h + head * hd, *value = v + t * h + head * hd;
            reference_rope(q + t * h + head * hd + plain, 1, rope, t, c->rope_theta);
            for (int64_t i = 0; i < hd; i++) key[i] = i < plain ? 0 : down[latent + i - plain];
            for (int64_t i = 0; i < hd; i++) value[i] = 0;
            for (int64_t l = 0; l < latent; l++) {
                for (int64_t i = 0; i < plain; i++) key[i] += normed[l] * w->w_key[(head * plain + i) * latent + l];
                for (int64_t i = 0; i < hd; i++) value[i] += normed[l] * w->w_value[(head * latent + l) * hd + i];
            }
        }
    }
    for (int64_t t = 0; t < n; t++) {
        reference_attention(mixed + t * h, q + t * h, k, v, t + 1, 0, NULL, heads, heads, hd);
    }
    free(q); free(k); free(v); free(down); free(normed);
}

/* The recurrences as their papers have them, S = (I - beta k k') diag(decay) S + beta k v', as products of matrices. */
static void reference_recurrent(double *mixed, const double *x, int64_t n, const model_config *c, layer_kind kind,
                                const layer_weights *w) {
    int64_t h = c->hidden, hd = h / c->heads, decays = kind.mixer == MIXER_KDA ? h : c->heads;
    double *in = TAKE(double, n * 3 * h), *qkv = TAKE(double, 3 * h), *step = TAKE(double, decays);
    double *z = TAKE(double, h);
    double *S = TAKE(double, h * hd), *M = TAKE(double, hd * hd), *next = TAKE(double, hd * hd);
    double *beta = TAKE(double, c->heads);
    for (int64_t t = 0; t < n; t++) {
        reference_linear(in + t * 3 * h, x + t * h, w->wqkv, NULL, h, 3 * h);
        reference_linear(step, x + t * h, w->w_decay, w->dt_bias, h, decays);
        reference_linear(z, x + t * h, w->wg, NULL, h, h);
        for (int64_t i = 0; i < decays; i++) step[i] = log(1 + exp(step[i]));
        if (w->w_beta) reference_linear(beta, x + t * h, w->w_beta, NULL, h, c->heads);
        for (int64_t i = 0; i < c->heads; i++) beta[i] = w->w_beta ? 1 / (1 + exp(-beta[i])) : step[i];
        for (int64_t i = 0; i < 3 * h; i++) {
            qkv[i] = 0;
            for (int64_t j = 0; j < 4 && j <= t; j++) qkv[i] += w->conv[(3 - j) * 3 * h + i] * in[(t - j) * 3 * h + i];
            qkv[i] /= 1 + exp(-qkv[i]);
        }
        for (int64_t head = 0; head < c->heads; head++) {
            double *q = qkv + head * hd, *k = q + h, *v = k + h, *s = S + head * hd * hd;
            double *out = mixed + t * h + head * hd, qq = 1e-6, kk = 1e-6, mean = 0;
            for (int64_t i = 0; i < hd; i++) qq += q[i] * q[i], kk += k[i] * k[i];
            for (int64_t i = 0; i < hd && w->w_beta; i++) q[i] /= sqrt(qq * (double)hd), k[i] /= sqrt(kk);
            for (int64_t i = 0; i < hd * hd; i++) {
                int64_t d = decays == h ? head * hd + i % hd : head;
                M[i] = ((i / hd == i % hd) - (w->w_beta ? beta[head] * k[i / hd] * k[i % hd] : 0)) *
                       exp(-exp(w->a_log[head]) * step[d]);
            }
            for (int64_t i = 0; i < hd * hd; i++) {
                next[i] = beta[head] * k[i / hd] * v[i % hd];
                for (int64_t j = 0; j < hd; j++) next[i] += M[i / hd * hd + j] * s[j * hd + i % hd];
            }
            memcpy(s, next, (size_t)(hd * hd) * sizeof *s);
            for (int64_t j = 0; j < hd; j++) {
                out[j] = w->skip ? w->skip[head] * v[j] : 0;
                for (int64_t i = 0; i < hd; i++) out[j] += q[i] * s[i * hd + j];
                mean += out[j] * out[j] / (double)hd;
            }
            for (int64_t j = 0; j < hd; j++) {
                double gate = z[head * hd + j];
                out[j] *= w->out_norm[j] / sqrt(mean + c->norm_epsilon) * gate / (1 + exp(-gate));
            }
        }
    }
    free(in); free(qkv); free(step); free(z); free(S); free(M); free(next); free(beta);
}

/* SwiGLU of one row: out += share * result. */
static void reference_swiglu(double *out, const double *x, double share, int64_t h, int64_t f, const real *gate_weight,
                             const real *up_weight, const real *down_weight) {
    double *gate = TAKE(double, f), *up = TAKE(double, f), *result = TAKE(double, h);
    reference_linear(gate, x, gate_weight, NULL, h, f);
    reference_linear(up, x, up_weight, NULL, h, f);
    for (int64_t i = 0; i < f; i++) gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
    reference_linear(result, gate, down_weight, NULL, f, h);
    for (int64_t i = 0; i < h; i++) out[i] += share * result[i];
    free(gate); free(up); free(result);
}

/* An expert is chosen if fewer than `active` have a higher score. Returns the balance loss of the sequence. */
static double reference_experts(double *stream, const double *x, int64_t n, const model_config *c,
                                const layer_weights *w) {
    int64_t h = c->hidden, f = expert_ffn_of(c), experts = c->kinds.experts, active = c->kinds.active;
    double *score = TAKE(double, experts), *chosen = TAKE(double, experts), *mean = TAKE(double, experts), loss = 0;
    for (int64_t t = 0; t < n; t++) {
        double sum = 0, all = 0;
        reference_linear(score, x + t * h, w->router, NULL, h, experts);
        for (int64_t e = 0; e < experts; e++) score[e] = 1 / (1 + exp(-score[e]));
        for (int pass_over = 0; pass_over < 2; pass_over++) {
            for (int64_t e = 0; e < experts; e++) {
                int64_t higher = 0;
                for (int64_t other = 0; other < experts; other++) higher += score[other] > score[e];
                if (pass_over == 0) all += score[e];
                if (pass_over == 0 && higher < active) sum += score[e];
                if (pass_over == 1) mean[e] += score[e] / all / (double)n;
                if (pass_over == 0 || higher >= active) continue;
                chosen[e] += (double)experts / (double)(active * n);
                reference_swiglu(stream + t * h, x + t * h, score[e] / sum, h, f, w->w_gate + e * h * f,
                                 w->w_up + e * h * f, w->w_down + e * f * h);
            }
        }
    }
    for (int64_t e = 0; e < experts; e++) loss += chosen[e] * mean[e];
    free(score); free(chosen); free(mean);
    return loss;
}

/* Returns the sequence's balance loss, 0 without experts. */
static double reference_layer(double *stream, int64_t n, const model_config *c, int64_t layer, const layer_weights *w) {
    int64_t h = c->hidden;
    const layer_kind kind = layer_kind_of(c, layer);
    double *x = TAKE(double, n * h), *mixed = TAKE(double, n * h), *out = TAKE(double, h), balance = 0;
    for (int64_t t = 0; t < n; t++) reference_norm(x + t * h, stream + t * h, w->attention_norm, h, c->norm_epsilon);
    if (kind.mixer >= MIXER_DELTA) reference_recurrent(mixed, x, n, c, kind, w);
    else if (kind.mixer == MIXER_LATENT) reference_latent(mixed, x, n, c, w);
    else reference_full(mixed, x, n, c, kind, w);
    for (int64_t t = 0; t < n; t++) {
        reference_linear(out, mixed + t * h, w->wo, NULL, h, h);
        for (int64_t i = 0; i < h; i++) stream[t * h + i] += out[i];
        reference_norm(x + t * h, stream + t * h, w->ffn_norm, h, c->norm_epsilon);
        if (!kind.experts) reference_swiglu(stream + t * h, x + t * h, 1, h, c->ffn, w->w_gate, w->w_up, w->w_down);
    }
    if (kind.experts) balance = reference_experts(stream, x, n, c, w);
    free(x); free(mixed); free(out);
    return balance;
}

/* -log(probability) of token `ahead` + t, summed over the rows for which it is a target; counts those. */
static double reference_targets(const world *x, int64_t s, const double *stream, const real *gain, int64_t ahead,
                                int64_t *n_targets) {
    const model_config *c = &x->config;
    double *logits = TAKE(double, c->vocabulary), *last = TAKE(double, c->hidden), sum = 0;
    for (int64_t t = 0; t + ahead < x->batch.length[s]; t++) {
        if (x->batch.ignored[s][t + ahead]) continue;
        double total = 0;
        reference_norm(last, stream + t * c->hidden, gain, c->hidden, c->norm_epsilon);
        for (int64_t v = 0; v < c->vocabulary; v++) {
            logits[v] = 0;
            for (int64_t i = 0; i < c->hidden; i++) logits[v] += last[i] * x->weights.head[v * c->hidden + i];
            total += exp(logits[v]);
        }
        sum += log(total) - logits[x->batch.tokens[s][t + ahead]];
        ++*n_targets;
    }
    free(logits); free(last);
    return sum;
}

/* The stream that goes into the layer of the module for the next token but one. */
static void reference_mtp(double *stream, const world *x, int64_t s) {
    const model_config *c = &x->config;
    int64_t h = c->hidden;
    double *both = TAKE(double, 2 * h), *next = TAKE(double, h);
    for (int64_t t = 0; t < x->batch.length[s]; t++) {
        for (int64_t i = 0; i < h; i++) {
            int64_t beyond = t + 1 >= x->batch.length[s];
            next[i] = beyond ? 0 : x->weights.embedding[x->batch.tokens[s][t + 1] * h + i];
        }
        reference_norm(both, stream + t * h, x->weights.mtp_norm, h, c->norm_epsilon);
        reference_norm(both + h, next, x->weights.mtp_norm + h, h, c->norm_epsilon);
        reference_linear(stream + t * h, both, x->weights.mtp_project, NULL, 2 * h, h);
    }
    free(both); free(next);
}

static inline double reference_loss(const world *x) {
    const model_config *c = &x->config;
    int64_t h = c->hidden, n_targets = 0, n_further = 0, n_sequences = 0;
    double sum = 0, further = 0, balance = 0;
    for (int64_t s = 0; s < x->batch.count; s++) {
        int64_t n = x->batch.length[s];
        double *stream = TAKE(double, n * h);
        for (int64_t t = 0; t < n; t++) {
            for (int64_t i = 0; i < h; i++) stream[t * h + i] = x->weights.embedding[x->batch.tokens[s][t] * h + i];
        }
        n_sequences += n > 0;
        for (int64_t i = 0; i < c->layers && n > 0; i++) {
            balance += reference_layer(stream, n, c, i, &x->weights.layers[i]);
        }
        sum += reference_targets(x, s, stream, x->weights.final_norm, 1, &n_targets);
        if (c->kinds.mtp > 0 && n > 0) {
            reference_mtp(stream, x, s);
            balance += reference_layer(stream, n, c, c->layers, &x->weights.layers[c->layers]);
            further += reference_targets(x, s, stream, x->weights.mtp_final_norm, 2, &n_further);
        }
        free(stream);
    }
    return sum / (double)n_targets + c->kinds.balance * balance / (double)n_sequences +
           (n_further > 0 ? c->kinds.mtp * further / (double)n_further : 0);
}

/* ================================================================================================================
   >>slopes    finite differences
   ================================================================================================================ */

/* Loss along a line: weights of one tensor moved by `step` times a fixed direction. */
static double loss_along(world *x, const tensor *t, uint64_t direction, double step) {
    real *at = x->weights.flat + t->offset, *before = TAKE(real, t->count);
    memcpy(before, at, (size_t)t->count * sizeof *at);
    for (int64_t i = 0; i < t->count; i++) at[i] += step * normal_of(direction, i);
    double loss = plain_loss(x, NULL);
    memcpy(at, before, (size_t)t->count * sizeof *at);
    free(before);
    return loss;
}

/* The gradient of each tensor, which chunks have made, along random directions: the loss of whole sequences must change
   as it says, over a step that is so small that the curve is smooth: no row of it may choose another expert. */
static inline void check_slopes(world *x, int directions, double step) {
    const double rounding = 1e-15 / step; /* of the difference of two losses */
    for (int64_t i = 0; i < x->weights.n_tensors; i++) {
        const tensor *t = &x->weights.tensors[i];
        for (uint64_t direction = 100; direction < 100 + (uint64_t)directions; direction++) {
            double slope = 0, length = 0;
            for (int64_t j = 0; j < t->count; j++) {
                slope += x->gradient.flat[t->offset + j] * normal_of(direction, j);
                length += x->gradient.flat[t->offset + j] * x->gradient.flat[t->offset + j];
            }
            /* Two central differences, put together so that the error is of the fourth order in the step. */
            double near = (loss_along(x, t, direction, step) - loss_along(x, t, direction, -step)) / (2 * step);
            double far = loss_along(x, t, direction, 2 * step) - loss_along(x, t, direction, -2 * step);
            double measured = (4 * near - far / (4 * step)) / 3;
            harness_note("%s: gradient gives %.12g, finite difference %.12g", t->name, slope, measured);
            CHECK(length > 0);
            CHECK(fabs(slope - measured) <= 1e-7 * sqrt(length) + rounding);
        }
    }
    harness_note("%s", "");
}

#endif /* TESTS_TRAINER_WORLD_H */
