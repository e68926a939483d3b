/* model.h - a decoder in the style of Qwen2.5, run chunk by chunk - MIT or public domain

   RMSNorm, rotary positions, grouped-query attention with biases on Q, K and V, SwiGLU, tied or untied embeddings; or
   other kinds of layers, see parts.h.

   The model is [embedding] + layers + [final norm + head + loss], and every call runs a part of it (a `stage`). The
   whole model is one stage. Of several, each passes stage_output to the next one's stage_input, and the gradient back.
   One forward or backward handles one chunk: its rows, the activations that the forward leaves for the backward and,
   for a chunk of a chain, the chain's state.

   Read in this order: parts.h, attention.h, this file; recurrent.h and feed_forward.h for the other kinds. */

#ifndef TRAIN_MODEL_H
#define TRAIN_MODEL_H

#include "attention.h"
#include "feed_forward.h"
#include "recurrent.h"

/* ================================================================================================================
   >>kinds
   ================================================================================================================ */

static inline const branch *mixer_of(const model_config *c, int64_t layer) {
    static const branch *const mixers[MIXER_COUNT] = {&full_branch,  &full_branch,  &full_branch, &latent_branch,
                                                      &delta_branch, &delta_branch, &delta_branch};
    return mixers[layer_kind_of(c, layer).mixer];
}

static inline const branch *feed_forward_of(const model_config *c, int64_t layer) {
    return layer_kind_of(c, layer).experts ? &expert_branch : &dense_branch;
}

/* ================================================================================================================
   >>layer    two branches: stream + mixer(norm(stream)), and then the same with the feed-forward part
   ================================================================================================================ */

enum { DROPOUT_EMBEDDING, DROPOUT_ATTENTION, DROPOUT_FFN, DROPOUT_SITES };

static inline dropout_mask dropout_of(const pass *p, const row_block *b, int64_t layer, int site) {
    dropout_mask mask = {p->config->dropout, 0, p->rows->sequence + b->first, p->rows->position + b->first};
    mask.seed = mix64_pair(p->seed, (uint64_t)(layer * DROPOUT_SITES + site));
    return mask;
}

/* Returns where layer `i` of the stage writes: the next layer's input, the stage's output, or the prediction
   module's. */
static inline real *layer_output(const pass *p, int64_t i) {
    int64_t n_layers = p->stage.end_layer - p->stage.first_layer;
    if (i == n_layers) return p->kept->mtp_output;
    return i + 1 < n_layers ? p->kept->layers[i + 1].input : p->kept->output;
}

static inline void before_mixer(const pass *p, int64_t i, const row_block *b) {
    const model_config *c = p->config;
    const layer_activations a = kept_rows(p, i, b->first);
    rmsnorm_forward(a.normed1, a.scale1, a.input, weights_of(p, i)->attention_norm, b->count, c->hidden,
                    c->norm_epsilon);
    mixer_of(c, p->stage.first_layer + i)->before(p, i, b);
}

/* Ends the mixer and begins the feed-forward part. */
static inline void between_branches(const pass *p, int64_t i, const row_block *b) {
    const model_config *c = p->config;
    const layer_activations a = kept_rows(p, i, b->first);
    const int64_t layer = p->stage.first_layer + i;
    const branch *mixer = mixer_of(c, layer), *ffn = feed_forward_of(c, layer);
    const dropout_mask mask = dropout_of(p, b, layer, DROPOUT_ATTENTION);
    mixer->after(p, i, b);
    add_with_dropout(a.middle, a.input, b->scratch.branch1, &mask, b->count, c->hidden);
    rmsnorm_forward(a.normed2, a.scale2, a.middle, weights_of(p, i)->ffn_norm, b->count, c->hidden, c->norm_epsilon);
    if (ffn->before) ffn->before(p, i, b);
}

static inline void after_feed_forward(const pass *p, int64_t i, const row_block *b) {
    const model_config *c = p->config;
    const layer_activations a = kept_rows(p, i, b->first);
    const int64_t layer = p->stage.first_layer + i;
    const dropout_mask mask = dropout_of(p, b, layer, DROPOUT_FFN);
    real *out = layer_output(p, i) + b->first * c->hidden;
    feed_forward_of(c, layer)->after(p, i, b);
    add_with_dropout(out, a.middle, b->scratch.branch2, &mask, b->count, c->hidden);
}

static inline void between_and_after(const pass *p, int64_t i, const row_block *b) {
    between_branches(p, i, b);
    after_feed_forward(p, i, b);
}

/* Runs layer `i` of the stage, from its input to the next one's. */
static inline void layer_forward(const pass *p, int64_t i) {
    const int64_t layer = p->stage.first_layer + i;
    const branch *mixer = mixer_of(p->config, layer), *ffn = feed_forward_of(p->config, layer);
    for_row_blocks(p, i, before_mixer);
    mixer->mix(p, i, 0);
    if (!ffn->mix) {
        for_row_blocks(p, i, between_and_after);
        return;
    }
    for_row_blocks(p, i, between_branches);
    ffn->mix(p, i, 0);
    for_row_blocks(p, i, after_feed_forward);
}

/* ---- backward: scratch->rows.stream goes from the gradient of the layer's output to that of its input ---- */

static inline void backward_feed_forward(const pass *p, int64_t i, const row_block *b) {
    const model_config *c = p->config;
    const layer_activations a = kept_rows(p, i, b->first);
    const row_scratch *s = &b->scratch;
    const int64_t layer = p->stage.first_layer + i;
    const branch *ffn = feed_forward_of(c, layer);
    const dropout_mask mask1 = dropout_of(p, b, layer, DROPOUT_ATTENTION), mask2 = dropout_of(p, b, layer, DROPOUT_FFN);
    add_with_dropout(s->branch2, NULL, s->stream, &mask2, b->count, c->hidden);
    ffn->after_backward(p, i, b);
    if (ffn->before_backward) ffn->before_backward(p, i, b);
    rmsnorm_backward(s->stream, s->dnormed2, a.middle, a.scale2, weights_of(p, i)->ffn_norm, b->count, c->hidden);
    add_with_dropout(s->branch1, NULL, s->stream, &mask1, b->count, c->hidden);
    mixer_of(c, layer)->after_backward(p, i, b);
}

static inline void backward_before_mixer(const pass *p, int64_t i, const row_block *b) {
    const layer_activations a = kept_rows(p, i, b->first);
    const row_scratch *s = &b->scratch;
    mixer_of(p->config, p->stage.first_layer + i)->before_backward(p, i, b);
    rmsnorm_backward(s->stream, s->dnormed1, a.input, a.scale1, weights_of(p, i)->attention_norm, b->count,
                     p->config->hidden);
}

static inline int64_t layer_jobs(matrix_job jobs[MAX_JOBS], const pass *p, int64_t i, const weights *gradient) {
    const int64_t layer = p->stage.first_layer + i, n = mixer_of(p->config, layer)->jobs(jobs, p, i, gradient);
    return n + feed_forward_of(p->config, layer)->jobs(jobs + n, p, i, gradient);
}

/* Runs backward down to the layer's input. Parameters that are not matrices cost almost nothing and get their gradients
   here. So do the experts' matrices, which have no list of rows. */
static inline void layer_backward_input(const pass *p, int64_t i, const weights *gradient) {
    const int64_t layer = p->stage.first_layer + i, rows = p->rows->rows, h = p->config->hidden;
    const branch *mixer = mixer_of(p->config, layer), *ffn = feed_forward_of(p->config, layer);
    const layer_weights *g = &gradient->layers[layer];
    const layer_activations *a = &p->kept->layers[i];
    const row_scratch *s = &p->scratch->rows;
    matrix_job jobs[MAX_JOBS];
    transposed_layout(p->scratch, p->config, layer);
    run_transposes(jobs, layer_jobs(jobs, p, i, gradient));
    for_row_blocks(p, i, backward_feed_forward);
    mixer->mix(p, i, 1);
    for_row_blocks(p, i, backward_before_mixer);
    rmsnorm_backward_gain(g->attention_norm, s->dnormed1, a->input, a->scale1, rows, h);
    rmsnorm_backward_gain(g->ffn_norm, s->dnormed2, a->middle, a->scale2, rows, h);
    if (mixer->gradients) mixer->gradients(p, i, gradient);
    if (ffn->gradients) ffn->gradients(p, i, gradient);
}

/* Saves gradients for a split backward. A whole backward has the gradients of the matrices' outputs in its scratch. A
   split one, I and W, moves them into activations that nothing else will read. The chunk's slot, which is in use until
   W, so holds them without growing. */
static inline void move_gradients_to_slot(const pass *p, int64_t i, const weights *gradient) {
    matrix_job jobs[MAX_JOBS];
    const int64_t n_jobs = layer_jobs(jobs, p, i, gradient);
    for (int64_t j = 0; j < n_jobs; j++) {
        if (jobs[j].dweight) copy_rows(jobs[j].kept, jobs[j].dout, p->rows->rows, jobs[j].outputs);
    }
}

static inline void layer_backward_weights(const pass *p, int64_t i, const weights *gradient, int from_slot) {
    matrix_job jobs[MAX_JOBS];
    const int64_t n_jobs = layer_jobs(jobs, p, i, gradient);
    for (int64_t j = 0; j < n_jobs && from_slot; j++) jobs[j].dout = jobs[j].kept;
    run_gradients(jobs, n_jobs, p->rows->rows);
}

/* ================================================================================================================
   >>ends    of the model
   ================================================================================================================ */

static inline void embed(const pass *p) {
    int64_t h = p->config->hidden, n_blocks = row_blocks(p);
    PARALLEL_FOR
    for (int64_t block = 0; block < n_blocks; block++) {
        row_block b = row_block_of(p, 0, block);
        dropout_mask mask = dropout_of(p, &b, -1, DROPOUT_EMBEDDING);
        embedding_forward(b.scratch.branch1, p->rows->token + b.first, p->weights->embedding, b.count, h);
        add_with_dropout(stage_input(p->kept) + b.first * h, NULL, b.scratch.branch1, &mask, b.count, h);
    }
}

/* dstream: gradient of the stream at the first layer's input. */
static inline void embed_backward(const pass *p, const weights *gradient, const real *dstream) {
    row_block all = {0, p->rows->rows, p->scratch->rows};
    dropout_mask mask = dropout_of(p, &all, -1, DROPOUT_EMBEDDING);
    add_with_dropout(all.scratch.branch1, NULL, dstream, &mask, all.count, p->config->hidden);
    embedding_backward(gradient->embedding, p->rows->token, all.scratch.branch1, all.count, p->config->hidden);
}

/* A final norm, logits and a loss: the model's, or those of the module that predicts the token after the next. */
typedef struct head_part {
    const real *input, *gain;
    real *dgain;              /* NULL in a forward */
    real *scale, *normed, *probability;
    const int32_t *target;
    const double *weight;
    int64_t n_extra;          /* targets besides the first: see chunk_rows */
} head_part;

static inline head_part main_head(const pass *p, const weights *gradient) {
    const activations *a = p->kept;
    head_part head = {a->output, p->weights->final_norm, gradient ? gradient->final_norm : NULL, a->scale, a->normed,
                      a->probability, p->rows->target, p->rows->weight, p->rows->n_extra};
    return head;
}

static inline head_part mtp_head(const pass *p, const weights *gradient) {
    const activations *a = p->kept;
    head_part head = {a->mtp_output, p->weights->mtp_final_norm, gradient ? gradient->mtp_final_norm : NULL,
                      a->mtp_final_scale, a->mtp_final_normed, a->mtp_probability, p->rows->target2, p->rows->weight2,
                      0};
    return head;
}

static inline double head_forward(const pass *p, const head_part *head) {
    const model_config *c = p->config;
    int64_t h = c->hidden, v = c->vocabulary, n_blocks = row_blocks(p);
    transpose(p->scratch->head_transposed, p->weights->head, v, h);
    PARALLEL_FOR
    for (int64_t block = 0; block < n_blocks; block++) {
        row_block b = row_block_of(p, 0, block);
        real *normed = head->normed + b.first * h, *probability = head->probability + b.first * v;
        rmsnorm_forward(normed, head->scale + b.first, head->input + b.first * h, head->gain, b.count, h,
                        c->norm_epsilon);
        linear_forward(probability, normed, p->scratch->head_transposed, NULL, b.count, h, v);
        cross_entropy_forward(probability, p->scratch->row_loss + b.first, head->target + b.first, b.count, v);
    }
    double sum = 0;
    for (int64_t row = 0; row < p->rows->rows; row++) sum += head->weight[row] * p->scratch->row_loss[row];
    for (int64_t i = 0; i < head->n_extra; i++) {
        const real *probability = head->probability + p->rows->extra_row[i] * v;
        sum -= p->rows->extra_weight[i] * log((double)probability[p->rows->extra_target[i]]);
    }
    return sum;
}

/* Adds up the weights of each row's losses besides the first. */
static inline void sum_more_weights(const pass *p, const head_part *head, double *sum) {
    memset(sum, 0, (size_t)p->rows->rows * sizeof *sum);
    for (int64_t i = 0; i < head->n_extra; i++) sum[p->rows->extra_row[i]] += p->rows->extra_weight[i];
}

/* Subtracts further targets from a block's gradients of logits. */
static inline void subtract_more_targets(const pass *p, const head_part *head, const row_block *b, real *dlogits) {
    for (int64_t i = 0; i < head->n_extra; i++) {
        const int64_t row = p->rows->extra_row[i] - b->first;
        if (row < 0 || row >= b->count) continue;
        dlogits[row * p->config->vocabulary + p->rows->extra_target[i]] -= (real)p->rows->extra_weight[i];
    }
}

/* Turns the probabilities into gradients of the logits, where head_backward_weights expects them. Adds the gradient of
   the head's input to scratch->rows.stream. */
static inline void head_backward_input(const pass *p, const head_part *head) {
    const model_config *c = p->config;
    int64_t rows = p->rows->rows, h = c->hidden, v = c->vocabulary, n_blocks = row_blocks(p);
    double *more = p->scratch->row_loss;
    sum_more_weights(p, head, more);
    PARALLEL_FOR
    for (int64_t block = 0; block < n_blocks; block++) {
        row_block b = row_block_of(p, 0, block);
        real *dlogits = head->probability + b.first * v;
        cross_entropy_backward(dlogits, head->target + b.first, head->weight + b.first, more + b.first, b.count, v);
        subtract_more_targets(p, head, &b, dlogits);
        linear_backward(b.scratch.dnormed2, MATMUL_SET, dlogits, p->weights->head, b.count, h, v);
        rmsnorm_backward(b.scratch.stream, b.scratch.dnormed2, head->input + b.first * h, head->scale + b.first,
                         head->gain, b.count, h);
    }
    rmsnorm_backward_gain(head->dgain, p->scratch->rows.dnormed2, head->input, head->scale, rows, h);
}

static inline void head_backward_weights(const pass *p, const head_part *head, const weights *gradient) {
    const matrix_job job = {p->weights->head, NULL, gradient->head, NULL, head->probability, head->normed, NULL,
                            p->config->vocabulary, p->config->hidden};
    run_gradients(&job, 1, p->rows->rows);
}

/* ---- the module that predicts the token after the next (DeepSeek-V3): norms of the stream and of the next token's
   embedding, side by side, through a matrix into a layer of its own, whose state is passed on like any layer's ---- */

static inline int64_t mtp_layer(const pass *p) { return stage_layers(&p->stage) - 1; }

static inline void mtp_forward(const pass *p) {
    const model_config *c = p->config;
    const weights *w = p->weights;
    const activations *a = p->kept;
    int64_t rows = p->rows->rows, h = c->hidden;
    embedding_forward(a->mtp_embedded, p->rows->next, w->embedding, rows, h);
    for (int64_t row = 0; row < rows; row++) {
        real *to = a->mtp_normed + row * 2 * h;
        rmsnorm_forward(to, a->mtp_scale + row, a->output + row * h, w->mtp_norm, 1, h, c->norm_epsilon);
        rmsnorm_forward(to + h, a->mtp_scale + rows + row, a->mtp_embedded + row * h, w->mtp_norm + h, 1, h,
                        c->norm_epsilon);
    }
    linear_forward(a->layers[mtp_layer(p)].input, a->mtp_normed, w->mtp_project, NULL, rows, 2 * h, h);
    layer_forward(p, mtp_layer(p));
}

/* Turns scratch->rows.stream from the gradient of the module's output into that of the stage's output. */
static inline void mtp_backward(const pass *p, const weights *gradient) {
    const model_config *c = p->config;
    const activations *a = p->kept;
    const row_scratch *s = &p->scratch->rows;
    const real *gain = p->weights->mtp_norm;
    int64_t rows = p->rows->rows, h = c->hidden, n = mtp_layer(p);
    layer_backward_input(p, n, gradient);
    const matrix_job job = {p->weights->mtp_project, p->scratch->wide, gradient->mtp_project, NULL, a->mtp_normed,
                            s->stream, NULL, 2 * h, h};
    layer_backward_weights(p, n, gradient, 0);
    run_transposes(&job, 1);
    run_gradients(&job, 1, rows);
    linear_backward(s->dmtp, MATMUL_SET, s->stream, p->scratch->wide, rows, 2 * h, h);
    clear_rows(s->stream, rows, h);
    clear_rows(s->branch1, rows, h);
    for (int64_t row = 0; row < rows; row++) {
        const real *d = s->dmtp + row * 2 * h, *scale = a->mtp_scale + row;
        rmsnorm_backward(s->stream + row * h, d, a->output + row * h, scale, gain, 1, h);
        rmsnorm_backward(s->branch1 + row * h, d + h, a->mtp_embedded + row * h, scale + rows, gain + h, 1, h);
        rmsnorm_backward_gain(gradient->mtp_norm, d, a->output + row * h, scale, 1, h);
        rmsnorm_backward_gain(gradient->mtp_norm + h, d + h, a->mtp_embedded + row * h, scale + rows, 1, h);
    }
    embedding_backward(gradient->embedding, p->rows->next, s->branch1, rows, h);
}

/* ================================================================================================================
   >>model    the whole stage
   ================================================================================================================ */

static inline void prepare_rows(const pass *p) {
    const row_scratch *s = &p->scratch->rows;
    const double theta = p->config->rope_theta;
    rope_angles(s->cosine, s->sine, p->rows->position, p->rows->rows, head_dim_of(p->config), theta);
    if (p->scratch->sizes.down == 0) return;
    rope_angles(s->cosine2, s->sine2, p->rows->position, p->rows->rows, rope_of(p->config), theta);
}

/* Runs a chunk forward through a stage. Without an embedding, stage_input(kept) must have been filled in. With a head
   it returns the weighted sum of the losses of the chunk's rows; otherwise it returns 0 and the result is in
   stage_output(kept). The prediction module always runs, because later chunks need the state of its layer. */
static inline double model_forward(const pass *p) {
    int64_t n_layers = p->stage.end_layer - p->stage.first_layer;
    const head_part head = main_head(p, NULL), further = mtp_head(p, NULL);
    prepare_rows(p);
    if (p->stage.has_embedding) embed(p);
    for (int64_t i = 0; i < n_layers; i++) layer_forward(p, i);
    if (p->stage.has_mtp) mtp_forward(p);
    if (!p->stage.has_head) return 0;
    double loss = head_forward(p, &head);
    return p->stage.has_mtp ? loss + head_forward(p, &further) : loss;
}

/* Runs the heads and the prediction module backward, including the module's weights: scratch->rows.stream becomes the
   gradient of the residual stream. */
static inline void ends_backward(const pass *p, const weights *gradient) {
    const head_part head = main_head(p, gradient), further = mtp_head(p, gradient);
    clear_rows(p->scratch->rows.stream, p->rows->rows, p->config->hidden);
    if (p->stage.has_mtp) {
        head_backward_input(p, &further);
        head_backward_weights(p, &further, gradient);
        mtp_backward(p, gradient);
    }
    head_backward_input(p, &head);
}

/* Runs the chunk backward, after which `kept` is used up. Without a head, scratch->rows.stream must hold the gradient
   of the stage's output. Afterwards it holds that of the stage's input. Adds to `gradient`. */
static inline void model_backward(const pass *p, const weights *gradient) {
    const head_part head = main_head(p, gradient);
    prepare_rows(p);
    if (p->stage.has_head) {
        ends_backward(p, gradient);
        head_backward_weights(p, &head, gradient);
    }
    for (int64_t i = p->stage.end_layer - p->stage.first_layer - 1; i >= 0; i--) {
        layer_backward_input(p, i, gradient);
        layer_backward_weights(p, i, gradient, 0);
    }
    if (p->stage.has_embedding) embed_backward(p, gradient, p->scratch->rows.stream);
}

/* Runs the same backward in two passes. The first is all that the previous stage and the chain's earlier chunks wait
   for: it leaves the gradient of the stage's input in scratch->rows.stream. The second computes the gradients of the
   weights at any later time, from what the first has left in `kept`. (Parameters that are not matrices get theirs in
   the first.) A whole and a split backward add the same numbers. */
static inline void model_backward_input(const pass *p, const weights *gradient) {
    prepare_rows(p);
    if (p->stage.has_head) ends_backward(p, gradient);
    for (int64_t i = p->stage.end_layer - p->stage.first_layer - 1; i >= 0; i--) {
        layer_backward_input(p, i, gradient);
        move_gradients_to_slot(p, i, gradient);
    }
    if (p->stage.has_embedding) copy_rows(p->kept->output, p->scratch->rows.stream, p->rows->rows, p->config->hidden);
}

static inline void model_backward_weights(const pass *p, const weights *gradient) {
    const head_part head = main_head(p, gradient);
    if (p->stage.has_head) head_backward_weights(p, &head, gradient);
    for (int64_t i = p->stage.end_layer - p->stage.first_layer - 1; i >= 0; i--) {
        layer_backward_weights(p, i, gradient, 1);
    }
    if (p->stage.has_embedding) embed_backward(p, gradient, p->kept->output);
}

#endif /* TRAIN_MODEL_H */
