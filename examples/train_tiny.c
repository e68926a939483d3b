/* train_tiny.c - a small model trained by chunks, in one file - MIT or public domain
   cc -O2 examples/train_tiny.c -o train_tiny -lm && ./train_tiny

   hello.c shows the calls. Here they drive a model: one decoder block with its forward and backward, in plain loops.
   Read it downwards:

       1. the model     one slice of a sequence forwards and backwards
       2. the chunks    what a trainer does for each batch, and in each step
       3. the proof     the same batch unchunked, and finite differences of its loss
       4. main          trains, then exits with 1 if chunking changed the loss or the gradients

   The next step is train_cpu.c: deeper models, threads, data-parallel ranks, checkpoints. */

#define CHUNKFLOW_IMPLEMENTATION
#include "../chunkflow.h"
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __FAST_MATH__
#error "build without -ffast-math or -Ofast: the checks below would no longer see a NaN"
#endif

typedef double real; /* float trains as well; in double, rounding is far below anything that chunking could break */

/* ================================================================================================================
   1. The model: embedding, RMSNorm, causal attention with RoPE, RMSNorm, MLP, head, cross-entropy
   ================================================================================================================ */

enum { VOCAB = 32, D = 16, FFN = 32 }; /* D: the hidden size */

/* A matrix has one row for each of its outputs. Gradients have the same shape. All members are reals, so the whole can
   also be read as one array of N_WEIGHTS numbers. */
typedef struct weights {
    real embedding[VOCAB * D];
    real query[D * D], key[D * D], value[D * D], output[D * D];
    real up[FFN * D], down[D * FFN];
    real head[VOCAB * D];
} weights;

enum { N_WEIGHTS = sizeof(weights) / sizeof(real) };

/* K (after RoPE) and V of one token, or their gradients. Tokens of a sequence affect each other only through these, so
   this is what its chunks hand on. */
typedef struct key_value {
    real k[D], v[D];
} key_value;

/* The activations of one token that forward keeps for backward, apart from its K and V. */
typedef struct activation {
    real scale1, n1[D], q[D], log_sum, attended[D];
    real scale2, n2[D], hidden[FFN], x[D], p[VOCAB]; /* p: how likely each token is to come next */
} activation;

/* The gradients of one token while backward runs. */
typedef struct row_gradient {
    real x[D], q[D], attended[D];
} row_gradient;

/* Texts of small letters and blanks: the low five bits of a character are its token. */
typedef struct batch {
    const char *const *text;
    const int64_t *length;
    int64_t count, n_targets;
} batch;

/* The token at a position of a sequence, -1 past its end. The target of a token is the next one of its sequence, not of
   its chunk: for a chunk's last token that is the first token of the next chunk. */
static int token_at(const batch *b, int64_t sequence, int64_t position) {
    return position < b->length[sequence] ? b->text[sequence][position] & 31 : -1;
}

static real dot(const real *a, const real *b, int n) {
    real sum = 0;
    for (int i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static void add(real *to, real scale, const real *x, int n) {
    for (int i = 0; i < n; i++) to[i] += scale * x[i];
}

/* y already holds zeros or the residual. In the same way, all backwards add: dw has a share of every token of every
   chunk. */
static void linear(real *y, const real *w, const real *x, int n_out, int n_in) {
    for (int o = 0; o < n_out; o++) y[o] += dot(w + o * n_in, x, n_in);
}

static void linear_backward(real *dx, real *dw, const real *dy, const real *w, const real *x, int n_out, int n_in) {
    for (int o = 0; o < n_out; o++) {
        add(dx, dy[o], w + o * n_in, n_in);
        add(dw + o * n_in, dy[o], x, n_in);
    }
}

/* RMSNorm without weights. Returns the scale, which backward needs. */
static real normalize(real *y, const real *x) {
    real scale = (real)(1 / sqrt(dot(x, x, D) / D + 1e-6));
    for (int i = 0; i < D; i++) y[i] = x[i] * scale;
    return scale;
}

static void normalize_backward(real *dx, const real *dy, const real *y, real scale) {
    real mean = dot(dy, y, D) / D;
    for (int i = 0; i < D; i++) dx[i] += scale * (dy[i] - y[i] * mean);
}

/* Rotates each pair of numbers by an angle that grows with the position; direction -1 rotates a gradient back. */
static void rope(real *x, int64_t position, int direction) {
    for (int i = 0; i < D; i += 2) {
        double angle = direction * (double)position * pow(10000, -(double)i / D);
        real c = (real)cos(angle), s = (real)sin(angle), a = x[i], b = x[i + 1];
        x[i] = a * c - b * s;
        x[i + 1] = a * s + b * c;
    }
}

static real score(const real *q, const real *k) { return dot(q, k, D) / (real)sqrt(D); }

/* Row i of a slice is token s->begin + i of its sequence and sees the keys of all tokens up to itself. key[] begins
   with the sequence, not with the slice: key[0 .. begin) is what earlier chunks handed on. Other sequences of the chunk
   are out of sight because they have a key[] of their own. */
static void attention(const cf_slice *s, activation *row, const key_value *key) {
    for (int64_t i = 0; i < s->length; i++) {
        activation *a = &row[i];
        int64_t visible = s->begin + i + 1;
        real most = -INFINITY, sum = 0;
        for (int64_t j = 0; j < visible; j++) most = (real)fmax(most, score(a->q, key[j].k));
        for (int64_t j = 0; j < visible; j++) sum += (real)exp(score(a->q, key[j].k) - most);
        a->log_sum = most + (real)log(sum);
        for (int64_t j = 0; j < visible; j++) {
            add(a->attended, (real)exp(score(a->q, key[j].k) - a->log_sum), key[j].v, D);
        }
    }
}

/* Adds to dK and dV of every key that the slice saw, those of earlier chunks included. */
static void attention_backward(const cf_slice *s, const activation *row, row_gradient *d, const key_value *key,
                               key_value *d_key) {
    for (int64_t i = 0; i < s->length; i++) {
        real mean = dot(d[i].attended, row[i].attended, D);
        for (int64_t j = 0; j < s->begin + i + 1; j++) {
            real p = (real)exp(score(row[i].q, key[j].k) - row[i].log_sum);
            real d_score = p * (dot(d[i].attended, key[j].v, D) - mean) / (real)sqrt(D);
            add(d_key[j].v, p, d[i].attended, D);
            add(d_key[j].k, d_score, row[i].q, D);
            add(d[i].q, d_score, key[j].k, D);
        }
    }
}

/* Turns logits into probabilities and returns the loss, 0 if there is no target. */
static double cross_entropy(real *p, int target) {
    real most = -INFINITY, sum = 0;
    for (int i = 0; i < VOCAB; i++) most = (real)fmax(most, p[i]);
    for (int i = 0; i < VOCAB; i++) sum += p[i] = (real)exp(p[i] - most);
    for (int i = 0; i < VOCAB; i++) p[i] /= sum;
    return target < 0 ? 0 : -log(p[target]);
}

/* Runs one slice and returns the sum of its losses. Its K and V go into key[], after those of the earlier tokens of its
   sequence. without_loss: that is all that is wanted. (With more layers it would be K and V of the last one.) */
static double slice_forward(const weights *w, const batch *b, const cf_slice *s, activation *row, key_value *key,
                            int without_loss) {
    double loss = 0;
    memset(row, 0, (size_t)s->length * sizeof *row);
    memset(key + s->begin, 0, (size_t)s->length * sizeof *key);
    for (int64_t i = 0; i < s->length; i++) {
        activation *a = &row[i];
        int64_t position = s->begin + i; /* counted in the sequence, whatever the chunk and the pass */
        memcpy(a->x, w->embedding + token_at(b, s->sequence, position) * D, sizeof a->x);
        a->scale1 = normalize(a->n1, a->x);
        linear(a->q, w->query, a->n1, D, D);
        linear(key[position].k, w->key, a->n1, D, D);
        linear(key[position].v, w->value, a->n1, D, D);
        rope(a->q, position, 1);
        rope(key[position].k, position, 1);
    }
    if (without_loss) return 0;
    attention(s, row, key);
    for (int64_t i = 0; i < s->length; i++) {
        activation *a = &row[i];
        linear(a->x, w->output, a->attended, D, D);
        a->scale2 = normalize(a->n2, a->x);
        linear(a->hidden, w->up, a->n2, FFN, D);
        for (int j = 0; j < FFN; j++) a->hidden[j] = (real)tanh(a->hidden[j]);
        linear(a->x, w->down, a->hidden, D, FFN);
        linear(a->p, w->head, a->x, VOCAB, D);
        loss += cross_entropy(a->p, token_at(b, s->sequence, s->begin + i + 1));
    }
    return loss;
}

/* Adds the gradient of `weight` times that sum to g. d_key[] already holds what later chunks of the sequence added. */
static void slice_backward(const weights *w, weights *g, const batch *b, const cf_slice *s, const activation *row,
                           row_gradient *d, const key_value *key, key_value *d_key, double weight) {
    memset(d, 0, (size_t)s->length * sizeof *d);
    for (int64_t i = 0; i < s->length; i++) {
        const activation *a = &row[i];
        int target = token_at(b, s->sequence, s->begin + i + 1);
        real d_logits[VOCAB], d_hidden[FFN] = {0}, d_n2[D] = {0};
        for (int j = 0; j < VOCAB; j++) d_logits[j] = target < 0 ? 0 : (real)weight * (a->p[j] - (j == target));
        linear_backward(d[i].x, g->head, d_logits, w->head, a->x, VOCAB, D);
        linear_backward(d_hidden, g->down, d[i].x, w->down, a->hidden, D, FFN);
        for (int j = 0; j < FFN; j++) d_hidden[j] *= 1 - a->hidden[j] * a->hidden[j];
        linear_backward(d_n2, g->up, d_hidden, w->up, a->n2, FFN, D);
        normalize_backward(d[i].x, d_n2, a->n2, a->scale2);
        linear_backward(d[i].attended, g->output, d[i].x, w->output, a->attended, D, D);
    }
    attention_backward(s, row, d, key, d_key);
    /* Only now are dK and dV of these rows complete: later chunks added their share in their own backwards, and the
       slice itself did on the line above. */
    for (int64_t i = 0; i < s->length; i++) {
        int64_t position = s->begin + i;
        real d_n1[D] = {0};
        rope(d[i].q, position, -1);
        rope(d_key[position].k, position, -1);
        linear_backward(d_n1, g->query, d[i].q, w->query, row[i].n1, D, D);
        linear_backward(d_n1, g->key, d_key[position].k, w->key, row[i].n1, D, D);
        linear_backward(d_n1, g->value, d_key[position].v, w->value, row[i].n1, D, D);
        normalize_backward(d[i].x, d_n1, row[i].n1, row[i].scale1);
        add(g->embedding + token_at(b, s->sequence, position) * D, 1, d[i].x, D);
    }
}

/* ================================================================================================================
   2. The chunks
   ================================================================================================================ */

enum { CHUNK_SIZE = 64, K = 2, MAX_LENGTH = 512 }; /* K: chunks of one sequence that keep activations at once */

/* The activations of one chunk. K limits how many chunks of a split sequence have them at the same time. */
typedef struct chunk_slot {
    activation row[CHUNK_SIZE];
    key_value own[CHUNK_SIZE]; /* K and V of whole sequences: nobody needs them after the chunk's backward */
} chunk_slot;

/* K, V, dK and dV of a split sequence: what its chunks hand on. A real trainer has these for every layer, and takes no
   more rows than cf_steps_capacity says. */
typedef struct chain_state {
    key_value key[MAX_LENGTH], d_key[MAX_LENGTH];
} chain_state;

/* The data of the passes. */
typedef struct trainer {
    const cf_plan *plan;
    const weights *w;
    weights *gradient;
    const batch *batch;
    double *loss_weight;         /* of a target of each sequence */
    double loss;
    chunk_slot *slots;           /* of activations, and one more for forwards that keep nothing */
    int64_t n_slots;
    chain_state *states;
    key_value d_own[CHUNK_SIZE]; /* of the current backward, like d */
    row_gradient d[CHUNK_SIZE];
} trainer;

/* Returns whether slice i of a chunk belongs to a split sequence. Such a slice comes first; others are whole
   sequences. */
static int is_split(const cf_step *step, int64_t i) { return i == 0 && step->state >= 0; }

/* F and R. A chunk that is replayed has two forwards: its F keeps nothing and is there for the K and V that later chunks
   need; its R computes the same once more and keeps it. Only the forward that wants the loss runs the head, so that
   nothing is counted twice.

   For clarity the slices run one by one. A real trainer has one matrix product for all rows of the chunk and one
   variable-length attention: cf_metadata_fill describes the chunk as these want it, each row's target included. */
static void forward(trainer *t, const cf_step *step) {
    const cf_chunk *chunk = &t->plan->chunks[step->action.chunk];
    chunk_slot *slot = &t->slots[step->slot >= 0 ? step->slot : t->n_slots];
    for (int64_t i = 0; i < chunk->n_slices; i++) {
        const cf_slice *s = &t->plan->slices[chunk->first_slice + i];
        key_value *key = is_split(step, i) ? t->states[step->state].key : slot->own + s->offset;
        double loss = slice_forward(t->w, t->batch, s, slot->row + s->offset, key, !step->wants_loss);
        t->loss += t->loss_weight[s->sequence] * loss;
    }
}

/* B. The gradients of all chunks add up to that of the batch because each target weighs 1 / (targets of the batch).
   With 1 / (targets of the chunk) it would be that of another loss: chunks have different numbers of targets.

   Slots are reused, and backwards add to dK and dV, so these have to start from zero: clear_state_gradient says when.
   All else is written before it is read. */
static void backward(trainer *t, const cf_step *step) {
    const cf_chunk *chunk = &t->plan->chunks[step->action.chunk];
    const chunk_slot *slot = &t->slots[step->slot];
    memset(t->d_own, 0, sizeof t->d_own);
    if (step->clear_state_gradient) memset(t->states[step->state].d_key, 0, sizeof t->states[step->state].d_key);
    for (int64_t i = 0; i < chunk->n_slices; i++) {
        const cf_slice *s = &t->plan->slices[chunk->first_slice + i];
        const key_value *key = is_split(step, i) ? t->states[step->state].key : slot->own + s->offset;
        key_value *d_key = is_split(step, i) ? t->states[step->state].d_key : t->d_own + s->offset;
        slice_backward(t->w, t->gradient, t->batch, s, slot->row + s->offset, t->d, key, d_key,
                       t->loss_weight[s->sequence]);
    }
}

/* Slots that go out of use with a step. A trainer that allocates memory for each chain frees it here. This one sets
   every bit, which makes every number a NaN: if a later pass read one, the loss or the gradients would show it. */
static void forget(trainer *t, const cf_steps *steps, const cf_step *step) {
    if (step->action.pass == CF_B) memset(&t->slots[step->slot], 0xFF, sizeof *t->slots);
    if (step->path >= 0 && steps->paths[step->path].last == step->position)
        memset(&t->states[step->state], 0xFF, sizeof *t->states);
}

static cf_result out_of_memory(cf_error *error) {
    memset(error, 0, sizeof *error);
    error->code = CF_ERROR_MEMORY;
    snprintf(error->text, sizeof error->text, "out of memory");
    return CF_ERROR_MEMORY;
}

static void describe(const cf_plan *plan, const cf_steps *steps) {
    cf_plan_stats batch_stats;
    int replays = 0;
    cf_plan_measure(plan, NULL, &batch_stats);
    for (int64_t i = 0; i < steps->n; i++) replays += steps->steps[i].action.pass == CF_R;
    printf("%d sequences in %d chunks, %d of them hybrid, and %d replays\n", (int)plan->n_sequences,
           (int)plan->n_chunks, (int)batch_stats.n_hybrid, replays);
    printf("longest sequence %d tokens, never more than %d tokens of activations\n", (int)batch_stats.longest_sequence,
           (int)steps->peak_tokens);
}

/* Allocates the slots and runs the passes. How many there will be is known before, so that no pass has to wait for
   memory or fail for want of it. A real trainer keeps its slots from batch to batch and only adds to them:
   cf_steps_capacity adds up what the batches so far have needed. */
static cf_result run_passes(trainer *t, const cf_steps *steps, cf_error *error) {
    t->n_slots = steps->n_slots;
    t->slots = malloc(((size_t)steps->n_slots + 1) * sizeof *t->slots);
    t->states = malloc(((size_t)steps->n_states + 1) * sizeof *t->states); /* + 1: malloc may answer 0 with NULL */
    cf_result result = t->slots && t->states ? CF_OK : out_of_memory(error);
    for (int64_t i = 0; result == CF_OK && i < steps->n; i++) {
        const cf_step *step = &steps->steps[i];
        if (step->action.pass == CF_B) backward(t, step);
        else forward(t, step);
        forget(t, steps, step);
    }
    free(t->slots);
    free(t->states);
    return result;
}

/* Gradient and loss of a batch, by chunks. */
static cf_result chunked(const weights *w, weights *gradient, const batch *b, int verbose, double *loss,
                         cf_error *error) {
    cf_pack_desc packing = {.chunk_size = CHUNK_SIZE};
    cf_schedule_desc order = {.shape = {.k = K}};
    cf_plan *plan = NULL;
    cf_schedule *schedule = NULL;
    cf_steps *steps = NULL;
    trainer t = {.w = w, .gradient = gradient, .batch = b};
    memset(gradient, 0, sizeof *gradient);
    t.loss_weight = malloc(((size_t)b->count + 1) * sizeof *t.loss_weight);
    if (!t.loss_weight) return out_of_memory(error);
    cf_result result = cf_loss_weights(b->length, b->count, NULL, t.loss_weight, error);
    if (result == CF_OK) result = cf_pack(b->length, b->count, &packing, &plan, error);
    if (result == CF_OK) result = cf_schedule_make(plan, &order, &schedule, error);
    if (result == CF_OK) result = cf_steps_make(plan, schedule, 0, 0, NULL, &steps, error);
    t.plan = plan;
    if (result == CF_OK) result = run_passes(&t, steps, error);
    if (result == CF_OK) *loss = t.loss;
    if (result == CF_OK && verbose) describe(plan, steps);
    cf_steps_free(steps);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
    free(t.loss_weight);
    return result;
}

/* ================================================================================================================
   3. The proof
   ================================================================================================================ */

typedef struct whole_sequence {
    activation row[MAX_LENGTH];
    row_gradient d[MAX_LENGTH];
    key_value key[MAX_LENGTH], d_key[MAX_LENGTH];
} whole_sequence;

/* The same without chunkflow: every sequence whole, one after the other. gradient NULL: only the loss. */
static cf_result unchunked(const weights *w, weights *gradient, const batch *b, double *loss, cf_error *error) {
    whole_sequence *m = malloc(sizeof *m);
    if (!m) return out_of_memory(error);
    *loss = 0;
    if (gradient) memset(gradient, 0, sizeof *gradient);
    for (int64_t i = 0; i < b->count; i++) {
        cf_slice s = {.sequence = (int32_t)i, .length = (int32_t)b->length[i]};
        *loss += slice_forward(w, b, &s, m->row, m->key, 0) / (double)b->n_targets;
        memset(m->d_key, 0, sizeof m->d_key);
        if (gradient) slice_backward(w, gradient, b, &s, m->row, m->d, m->key, m->d_key, 1 / (double)b->n_targets);
    }
    free(m);
    return CF_OK;
}

/* Random numbers in [-1, 1): xorshift64* */
static real uniform(uint64_t *random) {
    *random ^= *random >> 12;
    *random ^= *random << 25;
    *random ^= *random >> 27;
    return (real)((double)(*random * 2685821657736338717u >> 11) * 0x1p-52 - 1);
}

/* The largest difference of two gradients, relative to the largest number of the second. */
static double difference_of(const weights *a, const weights *b) {
    const real *x = (const real *)a, *y = (const real *)b;
    double scale = 0, difference = 0;
    for (int i = 0; i < N_WEIGHTS; i++) {
        if (!isfinite(x[i]) || !isfinite(y[i])) return INFINITY; /* no comparison with a NaN is ever true */
        scale = fmax(scale, fabs(y[i]));
        difference = fmax(difference, fabs(x[i] - y[i]));
    }
    return difference / scale;
}

/* Compares the gradient with the slope of the loss in a random direction, which is found from two losses, without any
   backward. All weights change at once, so an error in any part of the gradient shows. */
static cf_result slope_difference(const weights *w, const weights *gradient, const batch *b, real step,
                                  double *difference, cf_error *error) {
    weights ahead = *w, behind = *w;
    double loss_ahead, loss_behind, slope = 0, squares = 0;
    uint64_t random = 2;
    for (int i = 0; i < N_WEIGHTS; i++) {
        real direction = uniform(&random), g = ((const real *)gradient)[i];
        ((real *)&ahead)[i] += step * direction;
        ((real *)&behind)[i] -= step * direction;
        slope += direction * g;
        squares += g * g;
    }
    cf_result result = unchunked(&ahead, NULL, b, &loss_ahead, error);
    if (result == CF_OK) result = unchunked(&behind, NULL, b, &loss_behind, error);
    if (result == CF_OK) *difference = fabs((loss_ahead - loss_behind) / (2 * step) - slope) / sqrt(squares);
    return result;
}

/* Prints what was found and returns whether it is within the limit. A NaN is not. */
static int within(const char *what, double found, double limit) {
    int ok = found <= limit;
    printf("%-48s %8.1e, limit %.0e: %s\n", what, found, limit, ok ? "ok" : "NOT OK");
    return ok;
}

/* *ok: whether the chunked run agrees with the unchunked one, and the unchunked gradient with the slope of the loss. */
static cf_result prove(const weights *w, const batch *b, int *ok, cf_error *error) {
    const double epsilon = sizeof(real) == sizeof(double) ? DBL_EPSILON : FLT_EPSILON;
    weights gradient, expected;
    double loss, expected_loss, slope;
    cf_result result = chunked(w, &gradient, b, 0, &loss, error);
    if (result == CF_OK) result = unchunked(w, &expected, b, &expected_loss, error);
    if (result == CF_OK) result = slope_difference(w, &expected, b, (real)cbrt(epsilon), &slope, error);
    if (result != CF_OK) return result;
    *ok = within("loss, chunked against unchunked", fabs(loss - expected_loss) / expected_loss, 4096 * epsilon);
    *ok &= within("gradient, chunked against unchunked", difference_of(&gradient, &expected), 4096 * epsilon);
    *ok &= within("gradient, unchunked against finite differences", slope, 1024 * pow(epsilon, 2.0 / 3));
    return CF_OK;
}

/* ================================================================================================================
   4. main
   ================================================================================================================ */

/* Long-tailed, as fine-tuning data is: most sequences are short, and two are longer than a chunk. */
static const char *const texts[] = {
    "a short one", "most of them are like this", "",
    ("the long sequence does not fit into a chunk so it is cut into slices and each slice goes into a chunk of its own "
     "the chunks run one after the other and every one of them leaves its keys and values for those that come later "
     "on the way back the later chunks run first and leave the gradients of these keys and values for the earlier ones "
     "so nothing is lost and nothing is counted twice and the last chunk has room for a few short sequences"),
    "a chunk holds many of them", "x", "one more", "the loss is the mean over all tokens of the batch",
    ("another sequence is too long for one chunk or two and uses the slot of the state that the first one has left so "
     "whatever it finds there has to be cleared first"),
    "and this is the last"};

enum { N_TEXTS = sizeof texts / sizeof *texts, N_STEPS = 10 };

int main(void) {
    int64_t length[N_TEXTS];
    batch b = {texts, length, N_TEXTS, 0};
    weights w, gradient;
    cf_error error;
    cf_result result = CF_OK;
    double loss = 0, first_loss = 0;
    uint64_t random = 1;
    int ok = 0;

    for (int i = 0; i < N_TEXTS; i++) {
        length[i] = (int64_t)strlen(texts[i]);
        if (length[i] > MAX_LENGTH) {
            fprintf(stderr, "train_tiny: text %d is longer than MAX_LENGTH\n", i);
            return 1;
        }
        if (length[i] > 0) b.n_targets += length[i] - 1;
    }
    for (int i = 0; i < N_WEIGHTS; i++) ((real *)&w)[i] = uniform(&random) / 4;

    for (int step = 1; step <= N_STEPS; step++) {
        result = chunked(&w, &gradient, &b, step == 1, &loss, &error);
        if (result != CF_OK) break; /* the gradient is incomplete */
        printf("step %2d  loss %.6f\n", step, loss);
        if (step == 1) first_loss = loss;
        add((real *)&w, (real)-0.4, (const real *)&gradient, N_WEIGHTS);
    }
    if (result == CF_OK) result = prove(&w, &b, &ok, &error);
    if (result == CF_OK) ok &= within("loss, last step against first", loss / first_loss, 0.9);
    if (result != CF_OK) fprintf(stderr, "train_tiny: %s\n", error.text);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "train_tiny: standard output cannot be written\n");
        ok = 0;
    }
    return result == CF_OK && ok ? 0 : 1;
}
