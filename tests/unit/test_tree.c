/* Tests >>tree and what depends on it: shares, plans, metadata, schedules and runs of sequences that begin alike.
   Judged by tokens: every sequence has tokens of its own, equal to another's only as far as the two share. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/json.h"
#include "../reference/oracle.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST = 16, LONGEST = 80, MOST_CHUNKS = 512, MOST_V = 12 };

typedef struct forest {
    int64_t n, lengths[MOST];
    cf_shared_prefix shares[MOST];
    int32_t tokens[MOST][LONGEST];
    unsigned char ignored[MOST][LONGEST];
    double weights[MOST];
    cf_pack_desc desc;
} forest;

/* ---- forests ---- */

static int64_t below(harness_rng *random, int64_t n) { return harness_between(random, 0, n - 1); }

/* Makes sequences that share with an earlier one, or with a later one if the order is reversed. One in apart + 1 of up
   to six begins a tree. */
static forest make_forest_of(harness_rng *random, int64_t apart, int64_t longest) {
    forest f;
    int64_t i, j, turned = below(random, 2);
    memset(&f, 0, sizeof f);
    f.n = 1 + below(random, MOST);
    for (j = 0; j < f.n; j++) {
        int64_t most, with = j > 0 ? below(random, j) : 0, other = turned ? f.n - 1 - with : with;
        i = turned ? f.n - 1 - j : j;
        f.lengths[i] = below(random, longest + 1);
        most = f.lengths[i] < f.lengths[other] ? f.lengths[i] : f.lengths[other];
        f.shares[i].with = other;
        if (j > 0 && below(random, 6) > apart) f.shares[i].tokens = below(random, most + 1);
        for (most = 0; most < f.lengths[i]; most++) {
            int shared = most < f.shares[i].tokens;
            f.tokens[i][most] = shared ? f.tokens[other][most] : (int32_t)(i * LONGEST + most);
            f.ignored[i][most] = below(random, 4) == 0;
        }
        f.weights[i] = (double)harness_between(random, -2, 9);
    }
    f.desc.align = (int64_t)1 << below(random, 3);
    f.desc.chunk_size = f.desc.align * (1 + below(random, 24));
    f.desc.min_shared_prefix = 1 + below(random, 6);
    f.desc.split = (cf_split_method)below(random, CF_SPLIT_COUNT);
    f.desc.max_slices = below(random, 4) == 0 ? 1 + below(random, 4) : 0;
    f.desc.no_tails = below(random, 6) == 0;
    f.desc.n_ranks = below(random, 4) == 0 ? 1 + below(random, 4) : 1;
    return f;
}

static forest make_forest(harness_rng *random) { return make_forest_of(random, 0, LONGEST); }

/* Makes small trees, next to each other in one or two chunks. */
static forest make_grove(harness_rng *random) {
    forest f = make_forest_of(random, 2, 20);
    f.desc.chunk_size = f.desc.align * (12 + below(random, 60));
    f.desc.min_shared_prefix = 1;
    f.desc.max_slices = 0;
    return f;
}

static cf_plan *pack(forest *f) {
    cf_plan *plan = NULL;
    cf_error error = {0};
    f->desc.shared_prefixes = f->shares;
    if (cf_pack(f->lengths, f->n, &f->desc, &plan, &error) != CF_OK) FAIL("cf_pack: %s", error.text);
    else if (cf_plan_validate(plan, f->lengths, f->n, NULL, &error) != CF_OK) FAIL("cf_plan_validate: %s", error.text);
    return plan;
}

/* ---- the plan, expanded: which sequences run through a row ---- */

static int runs_through(const cf_plan *plan, int64_t slice, int64_t sequence) {
    int64_t i, first = plan->slices[slice].first, n = plan->slices[slice].n;
    if (!plan->order) return n == 1 && first == sequence && plan->slices[slice].sequence == sequence;
    for (i = first; i < first + n; i++)
        if (plan->order[i] == sequence) return 1;
    return 0;
}

/* Each token of each sequence is on exactly one row, which has this token. Every row belongs to a sequence. */
static void check_cover(const forest *f, const cf_plan *plan) {
    static int seen[MOST][LONGEST];
    int64_t s, i, p, rows = 0, n_hybrid = 0;
    cf_plan_stats stats;
    memset(seen, 0, sizeof seen);
    for (i = 0; i < plan->n_chunks; i++) { /* of a chain, followed by whole sequences */
        const cf_chunk *c = &plan->chunks[i];
        int whole = 0;
        for (s = c->first_slice + 1; s < c->first_slice + c->n_slices; s++) whole |= plan->slices[s].begin == 0;
        n_hybrid += c->chain >= 0 && whole;
    }
    for (s = 0; s < plan->n_slices; s++) {
        const cf_slice *slice = &plan->slices[s];
        rows += slice->length;
        CHECK(runs_through(plan, s, slice->sequence));
        for (i = 0; i < f->n; i++) {
            if (!runs_through(plan, s, i)) continue;
            for (p = slice->begin; p < slice->begin + slice->length; p++) {
                seen[i][p]++;
                if (f->tokens[i][p] != f->tokens[slice->sequence][p]) FAIL("a row has two tokens");
            }
        }
    }
    for (i = 0; i < f->n; i++)
        for (p = 0; p < f->lengths[i]; p++)
            if (seen[i][p] != 1) FAIL("token %d of sequence %d is on %d rows", (int)p, (int)i, seen[i][p]);
    cf_plan_measure(plan, NULL, &stats);
    CHECK_INT(stats.rows, rows);
    CHECK_INT(stats.n_hybrid, n_hybrid);
    CHECK(plan->n_chunks - plan->n_idle >= plan->lower_bound);
}

/* Returns the chain that this chain continues; -1: none. */
static int64_t above(const cf_plan *plan, int64_t chain) {
    int64_t up = plan->chunks[plan->chains[chain].first_chunk].up;
    return up >= 0 ? plan->chunks[up].chain : -1;
}

/* Checks the order of a chain's children: the one with the longest path comes last, so that no other waits for it. */
static void check_siblings(const cf_plan *plan) {
    int64_t id, up;
    for (id = 0; id < plan->n_chunks; id++)
        if ((up = plan->chunks[id].up) >= 0)
            CHECK(plan->chunks[id].below <= plan->chunks[plan->chunks[up].down].below);
}

/* ---- metadata ---- */

/* Returns the slice that has a row of a path, among this chain and those above it. */
static int64_t path_slice(const cf_plan *plan, int64_t chain, int64_t row) {
    const cf_chain *g = &plan->chains[chain];
    int64_t c, i;
    for (c = g->first_chunk; c < g->first_chunk + g->n_chunks; c++) {
        int64_t left = plan->chunks[c].state;
        for (i = plan->chunks[c].first_slice; left > 0; left -= plan->slices[i++].length)
            if (row >= plan->slices[i].begin && row < plan->slices[i].begin + plan->slices[i].length) return i;
    }
    return -1;
}

/* Notes the position of a key that a query sees. Returns whether the query's sequences run through the key. */
static int see(const cf_plan *plan, int64_t slice, int64_t position, int64_t query, unsigned char *seen) {
    int64_t i;
    if (slice < 0 || seen[position]++) return 0;
    for (i = 0; i < plan->n_sequences; i++)
        if (runs_through(plan, query, i) && !runs_through(plan, slice, i)) return 0;
    return 1;
}

static int64_t slice_of_row(const cf_plan *plan, const cf_chunk *c, int64_t row) {
    int64_t i;
    for (i = c->first_slice; i < c->first_slice + c->n_slices; i++)
        if (row >= plan->slices[i].offset && row < plan->slices[i].offset + plan->slices[i].length) return i;
    return -1;
}

/* Adds one key, counted from the start of the prefix, to what the query sees. */
static int see_key(const cf_plan *plan, const cf_chunk *c, int64_t key, int64_t query, unsigned char *seen) {
    int64_t slice, chain = c->chain;
    if (key >= c->prefix) {
        slice = slice_of_row(plan, c, key - c->prefix);
        return slice >= 0 && see(plan, slice, plan->slices[slice].begin + key - c->prefix - plan->slices[slice].offset,
                                 query, seen);
    }
    for (; plan->order && chain >= 0; chain = above(plan, chain))
        if (plan->chunks[plan->chains[chain].first_chunk].prefix <= key) break;
    if (chain >= 0 && plan->order && plan->chains[chain].tokens == 0) chain = above(plan, chain);
    return see(plan, plan->order ? path_slice(plan, chain, key) : c->first_slice, key, query, seen);
}

/* Checks the lengths of an attention call: none is empty, together they have all rows, and the maxima are right.
   Returns the number of keys. */
static int64_t check_lengths(const int32_t *cu_q, const int32_t *cu_k, int64_t n, int64_t rows, int64_t most_q,
                             int64_t most_k) {
    int64_t i, q = 0, k = 0;
    CHECK(cu_q[0] == 0 && cu_k[0] == 0 && cu_q[n] == rows);
    for (i = 0; i < n; i++) {
        int64_t queries = cu_q[i + 1] - cu_q[i], keys = cu_k[i + 1] - cu_k[i];
        CHECK(queries >= 0 && keys >= 0 && queries + keys > 0);
        if (queries > q) q = queries;
        if (keys > k) k = keys;
    }
    CHECK(q == most_q && k == most_k);
    return cu_k[n];
}

/* Every row sees the tokens of its sequences up to itself, each once, and nothing else: by the calls and by the key
   ends. */
static void check_mask(const cf_plan *plan, const cf_chunk *c, const cf_metadata *m) {
    int64_t row, i, k, level;
    if (m->n_calls == 0 && c->prefix > 0 && plan->order)  /* the rows of other chains are stored elsewhere */
        CHECK_INT(above(plan, c->chain), -1);
    for (level = 0; level < m->n_calls; level++) {
        const cf_attention_call *l = &m->calls[level];
        int64_t keys = check_lengths(l->cu_seqlens_q, l->cu_seqlens_k, l->n_seqs, m->rows, l->max_seqlen_q,
                                     l->max_seqlen_k);
        CHECK(l->n_seqs > 0 && l->first >= 0);
        CHECK(l->chain < 0 ? l->first == 0 && keys <= m->rows : l->first + keys <= plan->chains[l->chain].tokens);
    }
    check_lengths(m->cu_seqlens_q, m->cu_seqlens_k, m->n_seqs, m->rows, m->max_seqlen_q, m->max_seqlen_k);
    CHECK(m->rows == c->rows && m->tokens == c->tokens && m->prefix == c->prefix && m->pairs == c->pairs);
    for (row = 0; row < m->rows; row++) {
        unsigned char seen[LONGEST + 1] = {0}, ends[LONGEST + 1] = {0};
        int64_t query = slice_of_row(plan, c, row), position, n = 0, n_ends = 0;
        int fine = 1;
        CHECK_INT(m->sequence_ids[row], query < 0 ? -1 : plan->slices[query].sequence);
        if (query < 0) CHECK(m->position_ids[row] == 0 && m->target_positions[row] == -1);
        if (query < 0) continue;
        position = plan->slices[query].begin + row - plan->slices[query].offset;
        CHECK_INT(m->position_ids[row], position);
        for (i = 0; i < m->n_seqs; i++) {
            int64_t q0 = m->cu_seqlens_q[i], q1 = m->cu_seqlens_q[i + 1];
            int64_t k0 = m->cu_seqlens_k[i], k1 = m->cu_seqlens_k[i + 1];
            if (row < q0 || row >= q1) continue;
            for (k = k0; k < k1 - (q1 - 1 - row); k++, n++) /* causal, bottom-right */
                fine &= see_key(plan, c, m->n_calls > 0 ? c->prefix + k : k, query, seen);
        }
        for (level = 0; level < m->n_calls; level++) {
            const cf_attention_call *l = &m->calls[level];
            int64_t base = c->prefix;
            if (l->chain >= 0) base = plan->chunks[plan->chains[l->chain].first_chunk].prefix + l->first;
            for (i = 0; i < l->n_seqs; i++)
                if (row >= l->cu_seqlens_q[i] && row < l->cu_seqlens_q[i + 1])
                    for (k = l->cu_seqlens_k[i]; k < l->cu_seqlens_k[i + 1]; k++, n++)
                        fine &= see_key(plan, c, base + k, query, seen);
        }
        for (k = 0; k < c->prefix + m->rows; k++)
            if (row >= k - c->prefix && row < m->key_ends[k] && ++n_ends) fine &= see_key(plan, c, k, query, ends);
        if (!fine || n != position + 1 || n_ends != position + 1 || memcmp(seen, ends, sizeof seen))
            FAIL("row %d of chunk %d sees %d and %d keys at position %d", (int)row, (int)m->chunk, (int)n, (int)n_ends,
                 (int)position);
    }
}

/* Compares the weights of a row's targets, by token: those of the metadata with those of its sequences. */
static void check_targets(const forest *f, const cf_plan *plan, const cf_chunk *c, const cf_metadata *m,
                          int shared_mean) {
    int64_t row, i, at = 0, losses = 0;
    for (row = 0; row < m->rows; row++) {
        double wanted[MOST * LONGEST] = {0}, got[MOST * LONGEST] = {0};
        int count[MOST * LONGEST] = {0}, any = 0; /* any: one of its losses has a weight */
        int64_t slice = slice_of_row(plan, c, row), position;
        if (slice < 0) continue;
        position = plan->slices[slice].begin + row - plan->slices[slice].offset;
        for (i = 0; i < f->n; i++) {
            if (!runs_through(plan, slice, i) || position + 1 >= f->lengths[i] || f->ignored[i][position + 1]) continue;
            wanted[f->tokens[i][position + 1]] += f->weights[i];
            count[f->tokens[i][position + 1]]++;
        }
        if (m->target_positions[row] >= 0) {
            got[f->tokens[m->sequence_ids[row]][m->target_positions[row]]] += m->loss_weights[row];
            CHECK_INT(m->target_positions[row], position + 1);
            CHECK(count[f->tokens[m->sequence_ids[row]][position + 1]] > 0);
            any = fabs(m->loss_weights[row]) > 0;
        }
        for (; at < m->n_extra && m->extra_rows[at] == row; at++) {
            got[f->tokens[m->extra_sequences[at]][m->extra_targets[at]]] += m->extra_weights[at];
            any |= fabs(m->extra_weights[at]) > 0;
        }
        for (i = 0; i < MOST * LONGEST && !shared_mean; i++)
            if (got[i] < wanted[i] || got[i] > wanted[i]) FAIL("token %d has another weight", (int)i);
        for (i = 0; i < MOST * LONGEST && shared_mean; i++)
            if (count[i] > 0 && f->desc.min_shared_prefix == 1 && f->desc.align == 1 &&
                (got[i] * count[i] < wanted[i] - 1e-9 || got[i] * count[i] > wanted[i] + 1e-9))
                FAIL("token %d has another mean weight", (int)i);
        if (any) CHECK_INT(losses < m->n_loss_rows ? m->loss_rows[losses] : -1, row);
        losses += any;
    }
    CHECK_INT(at, m->n_extra);
    CHECK_INT(losses, m->n_loss_rows);
}

static void check_metadata(const forest *f, const cf_plan *plan, int shared_mean) {
    const unsigned char *ignored[MOST];
    cf_metadata_desc desc = {0};
    int64_t i;
    for (i = 0; i < f->n; i++) ignored[i] = f->ignored[i];
    desc.ignored = ignored;
    desc.weights = f->weights;
    desc.shared_mean = shared_mean;
    desc.wants_loss_rows = desc.wants_key_ends = 1;
    for (i = 0; i < plan->n_chunks; i++) {
        cf_metadata m;
        cf_error error = {0};
        size_t bytes = 0;
        void *memory;
        if (cf_metadata_size(plan, i, &desc, &bytes, &error) != CF_OK) FAIL("cf_metadata_size: %s", error.text);
        memory = malloc(bytes > 0 ? bytes : 1);
        if (cf_metadata_fill(plan, i, &desc, memory, bytes, &m, &error) != CF_OK) {
            FAIL("cf_metadata_fill: %s", error.text);
        } else {
            check_mask(plan, &plan->chunks[i], &m);
            check_targets(f, plan, &plan->chunks[i], &m, shared_mean);
        }
        free(memory);
    }
}

TEST(random_forests_are_what_their_tokens_say) {
    harness_rng random = {20261124};
    int64_t round, n = harness_rounds(1200, 120);
    for (round = 0; round < n; round++) {
        forest f = round % 4 == 3 ? make_grove(&random) : make_forest(&random);
        cf_plan *plan = pack(&f);
        if (plan == NULL) return;
        check_cover(&f, plan);
        check_siblings(plan);
        check_metadata(&f, plan, (int)(round % 2));
        cf_plan_free(plan);
    }
}

/* ---- schedules and runs ---- */

/* ---- gradients: a small model in float64, with shared rows and without ---- */

enum { WIDTH = 3, LAYERS = 2, WORDS = 7, MATRICES = 4, ROWS = 200, SLOTS = 64 };

typedef struct parameters {
    double embedding[WORDS][WIDTH], head[WORDS][WIDTH], layer[LAYERS][MATRICES][WIDTH][WIDTH]; /* Q, K, V, out */
} parameters;

typedef double matrix[ROWS][WIDTH];

/* K, V and their gradients of some rows, in every layer. */
typedef struct rows_state {
    matrix k[LAYERS], v[LAYERS], dk[LAYERS], dv[LAYERS];
} rows_state;

typedef struct trainer {
    unsigned char memory[1 << 16]; /* first, and so aligned */
    const forest *f;
    const cf_plan *plan;
    const cf_steps *steps;
    const cf_chunk *chunk; /* at hand */
    parameters w, gradient;
    rows_state states[SLOTS], own; /* own: that of the current chunk */
    matrix x[LAYERS + 1];
    double loss;
    int forgets_targets, forgets_to_clear, sees_siblings; /* deliberate mistakes, which the test must detect */
    cf_metadata m;
} trainer;

static int word_of(const trainer *t, int64_t row) {
    return t->f->tokens[t->m.sequence_ids[row]][t->m.position_ids[row]] % WORDS;
}

/* Finds one key of a row, counted from the start of the prefix: in the states on the path, or in the chunk. */
static rows_state *find_key(trainer *t, const cf_step *step, int64_t key, int64_t *row) {
    int32_t i = step->path;
    *row = key - t->chunk->prefix;
    if (*row >= 0) return &t->own;
    while (t->steps->paths[i].begin > key) i = t->steps->paths[i].up;
    *row = key - t->steps->paths[i].begin;
    return &t->states[t->steps->paths[i].state];
}

/* Lists all keys of a row, from the attention calls. */
static int64_t keys_of(const trainer *t, int64_t row, int64_t *keys) {
    const cf_metadata *m = &t->m;
    int64_t n = 0, i, k, level;
    for (i = 0; m->cu_seqlens_q[i + 1] <= row; i++) continue;
    k = t->sees_siblings && m->n_calls > 0 ? 0 : m->cu_seqlens_k[i];
    for (; k < m->cu_seqlens_k[i + 1] - (m->cu_seqlens_q[i + 1] - 1 - row); k++)
        keys[n++] = m->n_calls > 0 ? t->chunk->prefix + k : k;
    for (level = 0; level < m->n_calls; level++) {
        const cf_attention_call *l = &m->calls[level];
        int64_t base = t->chunk->prefix;
        if (l->chain >= 0) base = t->plan->chunks[t->plan->chains[l->chain].first_chunk].prefix + l->first;
        for (i = 0; l->cu_seqlens_q[i + 1] <= row; i++) continue;
        for (k = l->cu_seqlens_k[i]; k < l->cu_seqlens_k[i + 1]; k++) keys[n++] = base + k;
    }
    return n;
}

/* y += M x, or with its transpose. */
static void multiply(double m[WIDTH][WIDTH], const double *x, double *y, int transposed) {
    int i, j;
    for (i = 0; i < WIDTH; i++)
        for (j = 0; j < WIDTH; j++) y[i] += (transposed ? m[j][i] : m[i][j]) * x[j];
}

static void outer(double m[WIDTH][WIDTH], const double *y, const double *x) {
    int i, j;
    for (i = 0; i < WIDTH; i++)
        for (j = 0; j < WIDTH; j++) m[i][j] += y[i] * x[j];
}

static double dot(const double *a, const double *b) {
    double sum = 0;
    int i;
    for (i = 0; i < WIDTH; i++) sum += a[i] * b[i];
    return sum;
}

/* Computes the weights of a row's keys. */
static void attend(trainer *t, const cf_step *step, int layer, int64_t row, int64_t n, const int64_t *keys,
                   double *p) {
    double q[WIDTH] = {0}, sum = 0;
    int64_t i, at;
    multiply(t->w.layer[layer][0], t->x[layer][row], q, 0);
    for (i = 0; i < n; i++) {
        rows_state *s = find_key(t, step, keys[i], &at);
        sum += p[i] = exp(dot(q, s->k[layer][at]));
    }
    for (i = 0; i < n; i++) p[i] /= sum;
}

/* Runs all layers. K and V of rows that are added to the chain go into its state. */
static void run_layers(trainer *t, const cf_step *step, int appends) {
    int64_t row, i, at, n, keys[ROWS], added = t->plan->chunks[step->action.chunk].state, begin = 0;
    double p[ROWS], out[WIDTH];
    int layer, j;
    if (t->chunk->chain >= 0)
        begin = t->chunk->prefix - t->plan->chunks[t->plan->chains[t->chunk->chain].first_chunk].prefix;
    memset(&t->own, 0, sizeof t->own);
    memset(t->x, 0, sizeof t->x);
    for (row = 0; row < t->m.rows; row++)
        for (j = 0; j < WIDTH && t->m.sequence_ids[row] >= 0; j++)
            t->x[0][row][j] = t->w.embedding[word_of(t, row)][j] + 0.1 * sin(t->m.position_ids[row] + j);
    for (layer = 0; layer < LAYERS; layer++) {
        for (row = 0; row < t->m.rows; row++) {
            multiply(t->w.layer[layer][1], t->x[layer][row], t->own.k[layer][row], 0);
            multiply(t->w.layer[layer][2], t->x[layer][row], t->own.v[layer][row], 0);
            if (!appends || row >= added) continue;
            memcpy(t->states[step->state].k[layer][begin + row], t->own.k[layer][row], sizeof out);
            memcpy(t->states[step->state].v[layer][begin + row], t->own.v[layer][row], sizeof out);
        }
        for (row = 0; row < t->m.rows; row++) {
            n = keys_of(t, row, keys);
            attend(t, step, layer, row, n, keys, p);
            memset(out, 0, sizeof out);
            for (i = 0; i < n; i++) {
                rows_state *s = find_key(t, step, keys[i], &at);
                for (j = 0; j < WIDTH; j++) out[j] += p[i] * s->v[layer][at][j];
            }
            memcpy(t->x[layer + 1][row], t->x[layer][row], sizeof out);
            multiply(t->w.layer[layer][3], out, t->x[layer + 1][row], 0);
        }
    }
}

/* One target of a row. */
static void add_loss(trainer *t, int64_t row, int64_t sequence, int64_t position, double weight, double *dx) {
    const double *x = t->x[LAYERS][row];
    double p[WORDS], sum = 0;
    int word, j, target = t->f->tokens[sequence][position] % WORDS;
    for (word = 0; word < WORDS; word++) sum += p[word] = exp(dot(t->w.head[word], x));
    t->loss -= weight * log(p[target] / sum);
    for (word = 0; word < WORDS; word++) {
        double d = weight * (p[word] / sum - (word == target));
        for (j = 0; j < WIDTH; j++) {
            t->gradient.head[word][j] += d * x[j];
            dx[j] += d * t->w.head[word][j];
        }
    }
}

static void back_attention(trainer *t, const cf_step *step, int layer, matrix dx, matrix dq) {
    int64_t row, i, at, n, keys[ROWS];
    int j;
    for (row = 0; row < t->m.rows; row++) {
        double p[ROWS], q[WIDTH] = {0}, out[WIDTH] = {0}, dout[WIDTH] = {0};
        n = keys_of(t, row, keys);
        attend(t, step, layer, row, n, keys, p);
        multiply(t->w.layer[layer][0], t->x[layer][row], q, 0);
        multiply(t->w.layer[layer][3], dx[row], dout, 1);
        for (i = 0; i < n; i++) {
            rows_state *s = find_key(t, step, keys[i], &at);
            for (j = 0; j < WIDTH; j++) out[j] += p[i] * s->v[layer][at][j];
        }
        outer(t->gradient.layer[layer][3], dx[row], out);
        for (i = 0; i < n; i++) {
            rows_state *s = find_key(t, step, keys[i], &at);
            double d = p[i] * (dot(dout, s->v[layer][at]) - dot(dout, out));
            for (j = 0; j < WIDTH; j++) {
                s->dv[layer][at][j] += p[i] * dout[j];
                s->dk[layer][at][j] += d * q[j];
                dq[row][j] += d * s->k[layer][at][j];
            }
        }
    }
}

static void back_layers(trainer *t, const cf_step *step) {
    static matrix dx, dq;
    int64_t row, i, added = t->plan->chunks[step->action.chunk].state, begin = 0;
    int layer, j;
    if (t->chunk->chain >= 0)
        begin = t->chunk->prefix - t->plan->chunks[t->plan->chains[t->chunk->chain].first_chunk].prefix;
    memset(dx, 0, sizeof dx);
    for (row = 0; row < t->m.rows; row++)
        if (t->m.target_positions[row] >= 0)
            add_loss(t, row, t->m.sequence_ids[row], t->m.target_positions[row], t->m.loss_weights[row], dx[row]);
    for (i = 0; i < t->m.n_extra && !t->forgets_targets; i++)
        add_loss(t, t->m.extra_rows[i], t->m.extra_sequences[i], t->m.extra_targets[i], t->m.extra_weights[i],
                 dx[t->m.extra_rows[i]]);
    for (layer = LAYERS - 1; layer >= 0; layer--) {
        memset(dq, 0, sizeof dq);
        back_attention(t, step, layer, dx, dq);
        for (row = 0; row < t->m.rows; row++) {
            double *dk = t->own.dk[layer][row], *dv = t->own.dv[layer][row];
            for (j = 0; j < WIDTH && row < added; j++) {
                dk[j] += t->states[step->state].dk[layer][begin + row][j];
                dv[j] += t->states[step->state].dv[layer][begin + row][j];
            }
            outer(t->gradient.layer[layer][0], dq[row], t->x[layer][row]);
            outer(t->gradient.layer[layer][1], dk, t->x[layer][row]);
            outer(t->gradient.layer[layer][2], dv, t->x[layer][row]);
            multiply(t->w.layer[layer][0], dq[row], dx[row], 1);
            multiply(t->w.layer[layer][1], dk, dx[row], 1);
            multiply(t->w.layer[layer][2], dv, dx[row], 1);
        }
    }
    for (row = 0; row < t->m.rows; row++)
        for (j = 0; j < WIDTH && t->m.sequence_ids[row] >= 0; j++)
            t->gradient.embedding[word_of(t, row)][j] += dx[row][j];
}

static void clear(rows_state *state) {
    memset(state->dk, 0, sizeof state->dk);
    memset(state->dv, 0, sizeof state->dv);
}

static void model_step(trainer *t, const cf_step *step) {
    const unsigned char *ignored[MOST];
    cf_metadata_desc desc = {0};
    cf_path *paths = t->steps->paths;
    int64_t i;
    int32_t at;
    for (i = 0; i < t->f->n; i++) ignored[i] = t->f->ignored[i];
    desc.ignored = ignored;
    desc.weights = t->f->weights;
    t->chunk = &t->plan->chunks[step->action.chunk];
    CHECK_INT(cf_metadata_fill(t->plan, step->action.chunk, &desc, t->memory, sizeof t->memory, &t->m, NULL), CF_OK);
    if (step->action.pass == CF_F) run_layers(t, step, 1);
    if (step->action.pass != CF_B) return;
    for (at = step->path; at >= 0 && paths[at].clear == step->position; at = paths[at].up)
        if (t->plan->order == NULL || !t->forgets_to_clear) clear(&t->states[paths[at].state]);
    run_layers(t, step, 0); /* recomputes what was kept */
    back_layers(t, step);
}

/* Runs all ranks one after another. Returns whether all succeeded. */
static int train(trainer *t, const forest *f, const cf_plan *plan, cf_schedule_desc desc, int fault) {
    harness_rng random = {3};
    double *w = (double *)&t->w;
    size_t i;
    memset(t, 0, sizeof *t);
    memset(t->states, 0xff, sizeof t->states); /* NaN */
    for (i = 0; i < sizeof t->w / sizeof *w; i++) w[i] = harness_unit(&random) - 0.5;
    t->f = f;
    t->plan = plan;
    t->forgets_targets = fault == 1;
    t->forgets_to_clear = fault == 2;
    t->sees_siblings = fault == 3;
    for (desc.shape.rank = 0; desc.shape.rank < plan->n_ranks; desc.shape.rank++) {
        cf_schedule *schedule = NULL;
        cf_steps *steps = NULL;
        cf_result result = cf_schedule_make(plan, &desc, &schedule, NULL);
        int64_t step;
        if (result == CF_OK) result = cf_steps_make(plan, schedule, 0, 0, NULL, &steps, NULL);
        t->steps = steps;
        for (step = 0; result == CF_OK && step < steps->n; step++) model_step(t, &steps->steps[step]);
        cf_steps_free(steps);
        cf_schedule_free(schedule);
        if (result != CF_OK) return 0;
    }
    return 1;
}

/* Returns the largest difference of any gradient, relative to the largest gradient; NaN if any is. */
static double difference(const trainer *a, const trainer *b) {
    const double *x = (const double *)&a->gradient, *y = (const double *)&b->gradient;
    double most = 0, scale = 1e-300;
    size_t i;
    for (i = 0; i < sizeof a->gradient / sizeof *x; i++) {
        if (!(fabs(x[i] - y[i]) <= DBL_MAX)) return NAN;
        if (fabs(x[i] - y[i]) > most) most = fabs(x[i] - y[i]);
        if (fabs(y[i]) > scale) scale = fabs(y[i]);
    }
    return most / scale;
}

/* Trains a batch without shares, each sequence whole in its own chunk. */
static int train_unshared(trainer *t, const forest *f) {
    cf_pack_desc desc = {0};
    cf_schedule_desc order = {0};
    cf_plan *plan = NULL;
    int fine;
    desc.chunk_size = ROWS;
    desc.max_slices = 1;
    fine = cf_pack(f->lengths, f->n, &desc, &plan, NULL) == CF_OK && train(t, f, plan, order, 0);
    cf_plan_free(plan);
    return fine;
}

TEST(gradients_of_trees_are_those_of_their_sequences) {
    trainer *shared = (trainer *)malloc(sizeof *shared), *unshared = (trainer *)malloc(sizeof *unshared);
    harness_rng random = {11};
    int64_t round, n = harness_rounds(600, 40);
    double most = 0;
    for (round = 0; round < n && shared && unshared; round++) {
        forest f = make_forest(&random);
        cf_plan *plan = pack(&f);
        cf_schedule_desc desc = {0};
        double off;
        desc.kind = round % 3 == 0 ? CF_SCHEDULE_GPIPE : CF_SCHEDULE_PAPER;
        desc.shape.k = round % 4 == 3 ? 100 : 1 + round % 4;
        if (round % 2 && desc.kind == CF_SCHEDULE_PAPER) desc.shape.replay = CF_REPLAY_PIPELINE;
        if (!CHECK(train(shared, &f, plan, desc, 0)) || !CHECK(train_unshared(unshared, &f))) break;
        off = difference(shared, unshared);
        if (!CHECK(off <= 1e-10)) break;
        if (off > most) most = off;
        CHECK(fabs(shared->loss - unshared->loss) <= 1e-12 * fabs(unshared->loss));
        cf_plan_free(plan);
    }
    printf("(off by %.1e) ", most);
    free(shared);
    free(unshared);
}

/* Two trees use one state slot, one after the other. Their prompts end with a chunk, where the answers begin. */
TEST(what_makes_gradients_wrong_is_seen) {
    trainer *shared = (trainer *)malloc(sizeof *shared), *unshared = (trainer *)malloc(sizeof *unshared);
    forest f;
    cf_plan *plan;
    cf_schedule_desc desc = {0};
    int64_t i, p;
    int turn;
    memset(&f, 0, sizeof f);
    f.n = 8;
    f.desc.chunk_size = 8;
    f.desc.min_shared_prefix = 1;
    for (i = 0; i < f.n; i++) {
        f.lengths[i] = 15;
        f.weights[i] = 1;
        f.shares[i].with = i / 4 * 4;
        f.shares[i].tokens = i % 4 ? 12 : 0;
        for (p = 0; p < 15; p++) f.tokens[i][p] = (int32_t)(i % 4 && p < 12 ? f.tokens[i / 4 * 4][p] : i * 5 + p * 3);
    }
    plan = pack(&f);
    desc.kind = CF_SCHEDULE_PAPER;
    for (turn = 0; turn < 4 && shared && unshared && plan; turn++) {
        REQUIRE(train_unshared(unshared, &f));
        REQUIRE(train(shared, &f, plan, desc, turn));
        if (turn == 0) CHECK(difference(shared, unshared) <= 1e-12);
        else CHECK(!(difference(shared, unshared) <= 1e-3));
    }
    cf_plan_free(plan);
    free(shared);
    free(unshared);
}

/* ---- cases that are known ---- */

/* Packs `times` prompts, each with `n` answers of `answer` tokens. */
static cf_plan *pack_prompts(int64_t times, int64_t prompt, int64_t n, int64_t answer, int64_t chunk_size) {
    static int64_t lengths[512];
    static cf_shared_prefix shares[512];
    cf_pack_desc desc = {0};
    cf_plan *plan = NULL;
    cf_error error = {0};
    int64_t i;
    for (i = 0; i < times * n; i++) {
        lengths[i] = prompt + answer;
        shares[i].with = i / n * n;
        shares[i].tokens = i % n > 0 ? prompt : 0;
    }
    desc.chunk_size = chunk_size;
    desc.shared_prefixes = shares;
    desc.min_shared_prefix = 1;
    if (cf_pack(lengths, times * n, &desc, &plan, &error) != CF_OK) FAIL("cf_pack: %s", error.text);
    if (cf_plan_validate(plan, lengths, times * n, NULL, &error) != CF_OK) FAIL("cf_plan_validate: %s", error.text);
    return plan;
}

static int64_t count_replays(const cf_plan *plan, int64_t n_stages, int64_t k) {
    cf_schedule_desc desc = {0};
    cf_schedule *schedule = NULL;
    int64_t n = 0, i;
    desc.kind = CF_SCHEDULE_PAPER;
    desc.shape.n_stages = n_stages;
    desc.shape.k = k;
    if (cf_schedule_make(plan, &desc, &schedule, NULL) != CF_OK) return -1;
    for (i = 0; i < schedule->n_actions; i++) n += schedule->actions[i].pass == CF_R;
    cf_schedule_free(schedule);
    return n;
}

TEST(shared_prompts_are_computed_once) {
    cf_plan_stats stats;
    cf_plan *plan = pack_prompts(1, 32768, 16, 2048, 8192);
    CHECK_INT(plan->n_chunks, 8);
    CHECK_INT(count_replays(plan, 1, 1), 4);
    CHECK_INT(count_replays(plan, 1, 2), 3);
    cf_plan_free(plan);
    plan = pack_prompts(30, 5000, 16, 100, 8192);
    cf_plan_measure(plan, NULL, &stats);
    CHECK_INT(stats.rows, 198000);
    CHECK_INT(plan->n_tokens, 2448000);
    CHECK_INT(plan->n_chains, 0); /* each fits into one chunk */
    cf_plan_free(plan);
}

/* Returns the fewest bytes to which one stage can be limited. */
static int64_t least_bytes(const cf_plan *plan) {
    cf_schedule_desc desc = {.kind = CF_SCHEDULE_PAPER, .limits = {.per_token = {3, 2, 1, 1}}};
    cf_schedule *schedule = NULL;
    for (desc.limits.bytes = 1; desc.limits.bytes < 5000; desc.limits.bytes++)
        if (cf_schedule_make(plan, &desc, &schedule, NULL) == CF_OK) break;
    cf_schedule_free(schedule);
    return desc.limits.bytes;
}

/* A branch gives back its room when it ends. So another branch needs nothing more, and neither does another tree. */
TEST(siblings_take_turns_in_the_same_room) {
    cf_plan *two = pack_prompts(1, 32, 2, 64, 16), *many = pack_prompts(1, 32, 9, 64, 16);
    cf_plan *trees = pack_prompts(3, 32, 4, 64, 16);
    REQUIRE(two->order != NULL && many->order != NULL && trees->order != NULL);
    CHECK(least_bytes(two) < 5000);
    CHECK_INT(least_bytes(many), least_bytes(two));
    CHECK_INT(least_bytes(trees), least_bytes(two));
    cf_plan_free(two);
    cf_plan_free(many);
    cf_plan_free(trees);
}

/* A prompt of 4K, four branches of 8K, and below each six of 4K. */
static cf_plan *pack_two_levels(void) {
    int64_t lengths[24], i;
    cf_shared_prefix shares[24];
    cf_pack_desc desc = {0};
    cf_plan *plan = NULL;
    for (i = 0; i < 24; i++) {
        lengths[i] = 16384;
        shares[i].with = i % 6 > 0 ? i / 6 * 6 : 0;
        shares[i].tokens = i == 0 ? 0 : i % 6 > 0 ? 12288 : 4096;
    }
    desc.chunk_size = 8192;
    desc.shared_prefixes = shares;
    if (cf_pack(lengths, 24, &desc, &plan, NULL) != CF_OK) FAIL("cf_pack");
    return plan;
}

TEST(trees_of_two_levels_are_computed_once) {
    cf_plan *plan = pack_two_levels();
    cf_plan_stats stats;
    cf_plan_measure(plan, NULL, &stats);
    CHECK_INT(plan->n_chunks, 17);
    CHECK_INT(stats.rows, 132 * 1024);
    CHECK_INT(stats.longest_chain, 3);
    CHECK_INT(count_replays(plan, 1, 1), 5);
    cf_plan_free(plan);
}

/* ---- bad shares ---- */

static void check_refused(cf_shared_prefix a, cf_shared_prefix b, const char *field, int64_t item) {
    int64_t lengths[] = {100, 80};
    cf_shared_prefix shares[2];
    cf_pack_desc desc = {0};
    cf_plan *plan = NULL;
    cf_error error = {0};
    shares[0] = a;
    shares[1] = b;
    desc.chunk_size = 64;
    desc.shared_prefixes = shares;
    desc.min_shared_prefix = 1;
    CHECK_INT(cf_pack(lengths, 2, &desc, &plan, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, field);
    CHECK_INT(error.item, item);
    CHECK(plan == NULL);
}

TEST(bad_shares_are_refused_by_name) {
    const cf_shared_prefix none = {0, 0}, circle = {1, 50}, self = {0, 10}, nobody = {2, 1}, negative = {0, -1}, back =
        {0, 50};
    const cf_shared_prefix longer = {0, 81};
    check_refused(circle, back, "shared_prefixes", 0); /* {1, 50}, {0, 50}: each claims to begin like the other, so
                                                          neither comes first */
    check_refused(self, none, "shared_prefixes", 0);
    check_refused(none, nobody, "shared_prefixes.with", 1);
    check_refused(none, negative, "shared_prefixes.tokens", 1);
    check_refused(none, longer, "shared_prefixes.tokens", 1);
}

static cf_result try_pack(const int64_t *lengths, int64_t n, const cf_pack_desc *desc, cf_error *error) {
    cf_plan *plan = NULL;
    cf_result result = cf_pack(lengths, n, desc, &plan, error);
    CHECK((plan != NULL) == (result == CF_OK));
    cf_plan_free(plan);
    return result;
}

TEST(trees_are_packed_by_best_fit) {
    const int64_t lengths[] = {100, 100};
    const cf_shared_prefix shares[] = {{0, 0}, {0, 90}};
    cf_pack_desc desc = {0};
    cf_error error = {0};
    desc.chunk_size = 64;
    desc.shared_prefixes = shares;
    desc.min_shared_prefix = 1;
    for (desc.method = CF_PACK_BEST_FIT; desc.method < CF_PACK_COUNT; desc.method = (cf_pack_method)(desc.method + 1)) {
        int fits = desc.method == CF_PACK_BEST_FIT;
        CHECK_INT(try_pack(lengths, 2, &desc, &error), fits ? CF_OK : CF_ERROR_ARGUMENT);
        if (!fits) CHECK_STR(error.field, "method");
        if (!fits) CHECK_INT(error.got, (int)desc.method);
    }
}

TEST(trees_too_large_for_a_plan_are_refused) {
    const int64_t lengths[] = {(int64_t)1 << 31, (int64_t)1 << 31}, n = 32768;
    const cf_shared_prefix shares[] = {{0, 0}, {0, (int64_t)1 << 30}}, parted[] = {{0, 0}, {0, 500}, {0, 505}};
    const int64_t parting[] = {((int64_t)CF_MAX_CHUNKS - 6) * 1000, 510, 520};
    int64_t *long_ones = (int64_t *)malloc((size_t)n * sizeof *long_ones), i;
    cf_shared_prefix *none = (cf_shared_prefix *)calloc((size_t)n, sizeof *none);
    cf_pack_desc desc = {0};
    cf_error error = {0};
    REQUIRE(long_ones && none);
    desc.chunk_size = 1;
    desc.shared_prefixes = shares;
    CHECK_INT(try_pack(lengths, 2, &desc, &error), CF_ERROR_LIMIT);
    CHECK_STR(error.field, "n_chunks");
    desc.chunk_size = 1000; /* six chunks fewer than allowed, and two places where sequences diverge */
    desc.shared_prefixes = parted;
    CHECK_INT(try_pack(parting, 3, &desc, &error), CF_ERROR_LIMIT);
    CHECK_STR(error.field, "n_slices");
    CHECK_INT(error.got, (int64_t)CF_MAX_SLICES + 2);
    for (i = 0; i < n; i++) long_ones[i] = CF_MAX_LENGTH - (i == 0); /* together 2^63 - 1 */
    desc.chunk_size = desc.align = 64;
    desc.shared_prefixes = none;
    CHECK_INT(try_pack(long_ones, n, &desc, &error), CF_ERROR_OVERFLOW);
    CHECK_STR(error.field, "lengths");
    desc.chunk_size = desc.align = 1;
    none[1].tokens = 128;
    CHECK_INT(try_pack(long_ones, n - 2000, &desc, &error), CF_ERROR_LIMIT);
    CHECK_STR(error.field, "n_chunks");
    free(long_ones);
    free(none);
}

/* Empty or too short shares give the same plan as no shares. */
TEST(without_shares_plans_are_as_ever) {
    int64_t lengths[] = {300, 90, 90, 700}, i;
    cf_shared_prefix shares[] = {{3, 0}, {0, 60}, {1, 127}, {0, 0}};
    cf_pack_desc desc = {0};
    cf_plan *with = NULL, *without = NULL;
    shares[2].tokens = 90;
    desc.chunk_size = 128;
    REQUIRE(cf_pack(lengths, 4, &desc, &without, NULL) == CF_OK);
    desc.shared_prefixes = shares;
    REQUIRE(cf_pack(lengths, 4, &desc, &with, NULL) == CF_OK);
    CHECK(with->order == NULL && with->order == NULL);
    CHECK_INT(with->n_chunks, without->n_chunks);
    CHECK(memcmp(with->chunks, without->chunks, (size_t)with->n_chunks * sizeof(cf_chunk)) == 0);
    CHECK(memcmp(with->slices, without->slices, (size_t)with->n_slices * sizeof(cf_slice)) == 0);
    for (i = 0; i < with->n_chains; i++)
        CHECK(memcmp(&with->chains[i], &without->chains[i], sizeof(cf_chain)) == 0);
    cf_plan_free(with);
    cf_plan_free(without);
}

/* ---- metadata without weights, without anything ignored ---- */

static void *fill_metadata(const cf_plan *plan, int64_t chunk, const cf_metadata_desc *desc, cf_metadata *m) {
    size_t bytes = 0;
    void *memory;
    CHECK_INT(cf_metadata_size(plan, chunk, desc, &bytes, NULL), CF_OK);
    memory = malloc(bytes > 0 ? bytes : 1);
    CHECK_INT(cf_metadata_fill(plan, chunk, desc, memory, bytes, m, NULL), CF_OK);
    return memory;
}

/* Weights of 1 and empty masks give the same metadata as none. */
TEST(metadata_of_trees_without_weights_is_that_with_even_ones) {
    static const unsigned char nothing[LONGEST];
    const unsigned char *masks[MOST];
    double ones[MOST];
    harness_rng random = {7};
    int64_t round, i, j;
    for (i = 0; i < MOST; i++) masks[i] = i % 2 > 0 ? nothing : NULL;
    for (i = 0; i < MOST; i++) ones[i] = 1;
    for (round = 0; round < 60; round++) {
        forest f = make_forest(&random);
        cf_plan *plan = pack(&f);
        for (i = 0; i < plan->n_chunks; i++) {
            cf_metadata_desc plain = {NULL, NULL, NULL, 0, 0, 1, 0}, even = {NULL, masks, ones, 0, 1, 1, 1};
            cf_metadata a, b;
            void *of_a, *of_b;
            plain.shifted = even.shifted = (int)(round % 2);
            of_a = fill_metadata(plan, i, &plain, &a);
            of_b = fill_metadata(plan, i, &even, &b);
            CHECK(a.loss_weights == NULL && a.extra_weights == NULL && a.key_ends == NULL);
            CHECK(memcmp(a.target_positions, b.target_positions, (size_t)a.rows * sizeof(int32_t)) == 0);
            CHECK_INT(a.n_extra, b.n_extra);
            CHECK_INT(a.n_loss_rows, b.n_loss_rows);
            CHECK_INT(a.n_calls, b.n_calls);
            for (j = 0; j < a.n_extra; j++) CHECK_INT(a.extra_targets[j], b.extra_targets[j]);
            for (j = 0; j < a.n_loss_rows; j++) CHECK_INT(a.loss_rows[j], b.loss_rows[j]);
            for (j = 0; j < a.rows; j++) CHECK((a.target_positions[j] >= 0) == (b.loss_weights[j] > 0));
            free(of_a);
            free(of_b);
        }
        cf_plan_free(plan);
    }
}

/* ---- plans from elsewhere ---- */

/* Returns whether an error names what a number contradicts: chains, sequences and slices above, which have no order;
   alignment; or two numbers together. */
static int tells_otherwise(const cf_plan *plan, const cf_error *error) {
    return strcmp(error->field, "chunks.chain") == 0 || strcmp(error->field, "slices.sequence") == 0 ||
           strcmp(error->field, "chains.cp") == 0 || strcmp(error->field, "slices.up") == 0 ||
           strcmp(error->field, "chunks.up") == 0 || strcmp(error->field, "chunks.down") == 0 ||
           error->wanted == plan->align ||
           strstr(error->text, "does not agree") || strstr(error->text, "there twice") ||
           strstr(error->text, "does not rise") || strstr(error->text, "another chunk");
}

/* A plan with one changed number is refused, or still has every token of every sequence in its place. Links between
   chunks are stored twice, so any change to them is refused. */
static int damage_number(const forest *f, cf_plan *plan, oracle_number number, int64_t value, const char *field,
                         int64_t item, int is_link) {
    const int64_t was = oracle_read(number);
    cf_schedule_desc desc = {0};
    cf_schedule *schedule = NULL;
    cf_error error = {0};
    cf_result result;
    oracle_write(number, value);
    value = oracle_read(number);
    if (value == was) return 0;
    result = cf_plan_validate(plan, f->lengths, f->n, NULL, &error);
    if (result == CF_OK) check_cover(f, plan);
    else CHECK_INT(result, CF_ERROR_PLAN);
    if (result != CF_OK && !tells_otherwise(plan, &error))
        CHECK_STR(oracle_change_fault(&error, field, item, was, value), NULL);
    desc.kind = CF_SCHEDULE_PAPER;
    desc.shape.n_stages = 2;
    if (is_link) {
        cf_result made = cf_schedule_make(plan, &desc, &schedule, &error);
        CHECK_INT(result, CF_ERROR_PLAN);
        CHECK(made == CF_OK || made == CF_ERROR_PLAN);
    }
    oracle_write(number, was);
    cf_schedule_free(schedule);
    return result != CF_OK;
}

static int damage(const forest *f, cf_plan *plan, int64_t *number, int64_t value, const char *field, int64_t item,
                  int is_link) {
    const oracle_number place = {number, sizeof *number};
    return damage_number(f, plan, place, value, field, item, is_link);
}

/* Tries many values of one number. */
static int64_t damage_much(const forest *f, cf_plan *plan, oracle_number number, const char *field, int64_t item) {
    const int64_t values[] = {-2, -1, 0, 1, 3, plan->n_chunks, plan->n_chains, plan->n_slices, CF_MAX_LENGTH,
                              INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN};
    int64_t was = oracle_read(number), v, refused = 0;
    for (v = -2; v <= 2; v++) refused += damage_number(f, plan, number, was + v, field, item, 0);
    for (v = 0; v < COUNT(values); v++) refused += damage_number(f, plan, number, values[v], field, item, 0);
    return refused;
}

static int64_t damage_all(const forest *f, cf_plan *plan, void *array, int64_t n, const char *const *fields,
                          int64_t n_fields) {
    int64_t i, refused = 0;
    for (i = 0; i < n * n_fields; i++) {
        const oracle_number number = {(int64_t *)array + i, sizeof(int64_t)};
        refused += damage_much(f, plan, number, fields[i % n_fields], i / n_fields);
    }
    return refused;
}

static int64_t damage_slices(const forest *f, cf_plan *plan, const char *const *fields) {
    int64_t i, j, refused = 0;
    for (i = 0; i < plan->n_slices; i++)
        for (j = 0; j < ORACLE_SLICE_NUMBERS; j++)
            refused += damage_much(f, plan, oracle_slice_number(&plan->slices[i], j), fields[j], i);
    return refused;
}

/* Draws forests whose plans have chains with parents. */
static cf_plan *pack_small_tree(harness_rng *random, forest *f) {
    for (;;) {
        cf_plan *plan;
        *f = make_forest(random);
        if (f->n > 6) continue;
        plan = pack(f);
        if (plan->order != NULL && plan->n_slices < 40) return plan;
        cf_plan_free(plan);
    }
}

#define DAMAGE(array, n) damage_all(&f, plan, plan->array, n, array, COUNT(array))

TEST(damaged_plans_of_trees_are_refused) {
    static const char *const links[] = {"chunks.up", "chunks.down", "chunks.below"};
    static const char *const slices[] = {"slices.begin", "slices.sequence", "slices.length", "slices.offset",
                                         "slices.up",    "slices.first",    "slices.n"};
    static const char *const chunks[] = {"chunks.first_slice", "chunks.n_slices", "chunks.tokens",
                                         "chunks.rows",      "chunks.pairs",    "chunks.chain",
                                         "chunks.index",       "chunks.prefix",   "chunks.rank",
                                         "chunks.up",          "chunks.down",     "chunks.below",
                                         "chunks.state",       "chunks.cp"};
    static const char *const chains[] = {"chains.sequence", "chains.first_chunk", "chains.n_chunks", "chains.tokens",
                                         "chains.cp"};
    static const char *const order[] = {"order"}, *const lengths[] = {"lengths"}, *const common[] = {"common"};
    harness_rng random = {20261125};
    int64_t round, n = harness_rounds(40, 8), i, j;
    for (round = 0; round < n; round++) {
        forest f;
        cf_plan *plan = pack_small_tree(&random, &f);
        CHECK(damage_slices(&f, plan, slices) > 0);
        for (i = 0; i < plan->n_chunks; i++) { /* a chunk belongs to the chain that holds it */
            int64_t *chain = &plan->chunks[i].chain;
            CHECK(damage(&f, plan, chain, -1, chunks[5], i, 0) || *chain < 0);
            for (j = 0; j < plan->n_chains; j++) CHECK(damage(&f, plan, chain, j, chunks[5], i, 0) || *chain == j);
        }
        for (i = 0; i < 3 * plan->n_chunks; i++) {
            cf_chunk *c = &plan->chunks[i / 3];
            int64_t *const of[] = {&c->up, &c->down, &c->below};
            for (j = -2; j <= plan->n_chunks; j++) (void)damage(&f, plan, of[i % 3], j, links[i % 3], i / 3, 1);
        }
        CHECK(DAMAGE(chunks, plan->n_chunks) > 0);
        CHECK(DAMAGE(chains, plan->n_chains) > 0 || plan->n_chains == 0);
        CHECK(DAMAGE(order, plan->n_sequences) > 0);
        CHECK(DAMAGE(lengths, plan->n_sequences) > 0);
        (void)DAMAGE(common, plan->n_sequences);
        cf_plan_free(plan);
    }
}

/* Gives a plan that may be damaged, with a schedule of the original, to every function. Each must succeed or refuse. */
static void walk(const cf_plan *plan, const cf_schedule *schedule) {
    cf_error error = {0};
    cf_timeline *timeline = NULL;
    cf_schedule *lowered = NULL;
    cf_graph *graph = NULL;
    int stage;
    CHECK((cf_simulate(plan, schedule, NULL, &timeline, &error) == CF_OK) == (timeline != NULL));
    CHECK((cf_schedule_lower(plan, schedule, NULL, &lowered, &error) == CF_OK) == (lowered != NULL));
    CHECK((cf_graph_make(plan, schedule, NULL, NULL, &graph, &error) == CF_OK) == (graph != NULL));
    for (stage = 0; stage < schedule->shape.n_stages; stage++) {
        cf_steps *steps = NULL;
        cf_result result = cf_steps_make(plan, schedule, stage, 0, NULL, &steps, &error);
        CHECK(result == CF_OK || error.code == result);
        CHECK((steps != NULL) == (result == CF_OK));
        cf_steps_free(steps);
    }
    (void)cf_schedule_validate(plan, schedule, NULL, NULL, NULL);
    cf_graph_free(graph);
    cf_schedule_free(lowered);
    cf_timeline_free(timeline);
}

static void walk_damaged(cf_plan *plan, const cf_schedule *schedule, void *array, int64_t n, size_t size) {
    const int64_t values[] = {-1, 0, 1, plan->n_chunks, CF_MAX_LENGTH, INT64_MAX, INT64_MIN};
    int64_t *numbers = (int64_t *)array, i, v;
    for (i = 0; i < n * (int64_t)(size / sizeof(int64_t)); i++) {
        const int64_t was = numbers[i];
        for (v = 0; v < COUNT(values); v++) {
            numbers[i] = values[v];
            walk(plan, schedule);
        }
        for (v = -1; v <= 1; v += 2) {
            numbers[i] = was + v;
            walk(plan, schedule);
        }
        numbers[i] = was;
    }
}

/* The sanitizers check that nothing outside the arrays is read. */
TEST(plans_of_trees_that_nobody_has_validated_are_walked_safely) {
    harness_rng random = {20261126};
    int64_t round, n = harness_rounds(40, 6);
    for (round = 0; round < n; round++) {
        forest f;
        cf_plan *plan = pack_small_tree(&random, &f);
        cf_schedule_desc desc = {0};
        cf_schedule *schedule = NULL;
        desc.kind = CF_SCHEDULE_PAPER;
        desc.shape.n_stages = 1 + round % 2;
        REQUIRE(cf_schedule_make(plan, &desc, &schedule, NULL) == CF_OK);
        walk_damaged(plan, schedule, plan->chains, plan->n_chains, sizeof(cf_chain));
        walk_damaged(plan, schedule, plan->chunks, plan->n_chunks, sizeof(cf_chunk));
        cf_schedule_free(schedule);
        cf_plan_free(plan);
    }
}

static void check_damaged(const forest *f, const cf_plan *plan, const char *field, int64_t item) {
    cf_error error = {0};
    CHECK_INT(cf_plan_validate(plan, f->lengths, f->n, NULL, &error), CF_ERROR_PLAN);
    CHECK_STR(error.field, field);
    CHECK_INT(error.item, item);
}

/* Packs sequences of f.lengths; those with a share of some tokens share them with sequence 0. */
static cf_plan *pack_star(forest *f, int64_t n, const int64_t *lengths, const int64_t *tokens, int64_t chunk_size) {
    int64_t i;
    memset(f, 0, sizeof *f);
    f->n = n;
    f->desc.chunk_size = chunk_size;
    f->desc.min_shared_prefix = 1;
    for (i = 0; i < n; i++) {
        f->lengths[i] = lengths[i];
        f->shares[i].tokens = tokens[i];
    }
    return pack(f);
}

/* A chain of the first rank that would extend into the second rank. */
TEST(chains_of_trees_stay_on_their_rank) {
    const int64_t lengths[] = {32, 16, 4};
    forest f;
    cf_plan *plan;
    memset(&f, 0, sizeof f);
    f.n = 3;
    memcpy(f.lengths, lengths, sizeof lengths);
    f.shares[2].with = 1;
    f.shares[2].tokens = 2;
    f.desc.chunk_size = 8;
    f.desc.min_shared_prefix = 1;
    f.desc.n_ranks = 2;
    plan = pack(&f);
    REQUIRE(plan->chunks_per_rank == 4 && plan->chains[0].n_chunks == 4 && plan->chains[1].first_chunk == 4);
    plan->chains[0].n_chunks = 5;
    check_damaged(&f, plan, "chains.n_chunks", 0);
    cf_plan_free(plan);
}

/* cf_pack_size has enough room for the chunks of ranks with less work, and for trees in which every node is a chunk. */
TEST(trees_fit_into_what_is_asked_for) {
    static const int64_t cases[][6] = {{4000, 4000, 3000, 16, 8, 0}, {42, 35, 28, 61, 1, 1}};
    static int64_t memory[1 << 17];
    size_t bytes = 0, i;
    for (i = 0; i < COUNT(cases); i++) {
        const cf_shared_prefix shares[] = {{0, 0}, {0, cases[i][2]}};
        cf_pack_desc desc = {0};
        cf_plan *plan = NULL;
        desc.chunk_size = cases[i][3];
        desc.shared_prefixes = shares;
        desc.min_shared_prefix = desc.no_copies = 1;
        desc.n_ranks = cases[i][4];
        desc.max_slices = cases[i][5];
        REQUIRE(cf_pack_size(cases[i], 2, &desc, &bytes, NULL) == CF_OK && bytes <= sizeof memory);
        REQUIRE(cf_pack_into(cases[i], 2, &desc, memory, bytes, &plan, NULL) == CF_OK);
        CHECK(plan->n_chunks > (i == 0 ? 8 * 5000 / 16 : 2));
    }
}

/* Adds up the bytes requested from an allocator. */
static void *add_up(size_t bytes, void *sum) {
    *(size_t *)sum += bytes;
    return malloc(bytes);
}

static void give_back(void *memory, void *sum) {
    (void)sum;
    free(memory);
}

/* cf_pack_size returns at most four times the bytes that cf_pack takes for plan and working space. With cp groups, and
   if a tree is split over several ranks, it packs to find the size, which is then exact. */
static void check_asked(const char *name, const int64_t *lengths, int64_t n, cf_pack_desc desc) {
    const cf_allocator failing = {.alloc = harness_alloc, .release = harness_release,
                                  .user = &(harness_heap){.fail_at = 1}};
    size_t used = 0, asked = 0, less;
    const cf_allocator adding = {add_up, give_back, &used};
    cf_plan *plan = NULL, *same = NULL;
    cf_error error;
    void *memory;
    harness_note("%s of %d on %d ranks, max_cp %d", name, (int)n, (int)desc.n_ranks, (int)desc.max_cp);
    desc.allocator = &adding;
    REQUIRE(cf_pack(lengths, n, &desc, &plan, NULL) == CF_OK);
    desc.allocator = NULL;
    REQUIRE(cf_pack_size(lengths, n, &desc, &asked, NULL) == CF_OK);
    CHECK(asked >= used && asked <= 4 * used);
    REQUIRE((memory = malloc(asked)) != NULL);
    REQUIRE(cf_pack_into(lengths, n, &desc, memory, asked, &same, NULL) == CF_OK);
    CHECK(same->n_chunks == plan->n_chunks && same->n_slices == plan->n_slices && same->n_chains == plan->n_chains);
    CHECK(memcmp(same->chunks, plan->chunks, (size_t)plan->n_chunks * sizeof *plan->chunks) == 0);
    same = NULL;
    CHECK_INT(cf_pack_into(lengths, n, &desc, memory, asked - 1, &same, &error), CF_ERROR_SPACE);
    CHECK_STR(error.field, "bytes");
    CHECK_INT(error.wanted, asked);
    CHECK_INT(error.got, asked - 1);
    CHECK(same == NULL);
    if (desc.max_cp > 1 || (desc.shared_prefixes != NULL && desc.n_ranks > 1)) {
        CHECK_INT(asked, used);
        desc.allocator = &failing;
        less = 7;
        CHECK_INT(cf_pack_size(lengths, n, &desc, &less, NULL), CF_ERROR_MEMORY);
        CHECK_INT(less, 7);
    }
    free(memory);
    cf_plan_free(plan);
    harness_note("%s", "");
}

/* Combs, in which each sequence diverges from the one before; stars; chains, in which each extends the whole one
   before; pairs; long and short lists. No batch takes more than a few hundred megabytes. */
TEST(what_is_asked_for_is_near_what_is_used) {
    static const int64_t ranks[] = {1, 64, 65536};
    static const char *const names[] = {"comb", "star", "chain", "pairs", "long list", "short list"};
    enum { N = 20000 };
    static int64_t lengths[N];
    static cf_shared_prefix shares[N];
    const int64_t many = harness_rounds(N, 2000);
    int shape;
    size_t r;
    for (shape = 0; shape < COUNT(names); shape++) {
        int64_t i, n = shape == 2 ? 1000 : shape == 5 ? 100 : many;
        for (i = 0; i < n; i++) {
            cf_shared_prefix *share = &shares[i];
            const int64_t own[] = {200 + i, 1000 + i * 37 % 900, 200 + 100 * i, 2048, 100 + i * 7919 % 20000, 100};
            lengths[i] = own[shape];
            memset(share, 0, sizeof *share);
            if (i == 0 || (shape == 3 && i % 2 == 0)) continue;
            share->with = shape == 1 ? 0 : i - 1;
            share->tokens = shape == 1 ? 900 : shape == 3 ? 1024 : lengths[i - 1] - (shape == 0 ? 50 : 0);
        }
        for (r = 0; r < COUNT(ranks); r++) {
            cf_pack_desc desc = {.chunk_size = 8192, .n_ranks = ranks[r], .shared_prefixes = shape < 4 ? shares : NULL};
            check_asked(names[shape], lengths, n, desc);
        }
    }
}

/* The same for one long sequence among short ones in lockstep, with and without cp groups of up to 64 ranks. */
TEST(what_cp_groups_ask_for_is_near_what_they_use) {
    static const struct {
        int64_t longest, ranks, max_cp;
    } cases[] = {{131072, 8, 8},  {2000000, 8, 8},     {131072, 64, 64},    {2000000, 64, 64}, {300, 64, 64},
                 {2000000, 64, 0}, {131072, 4096, 64}, {2000000, 4096, 64}, {300, 4096, 64},   {131072, 4096, 0}};
    int64_t lengths[256], i;
    size_t c;
    for (c = 0; c < COUNT(cases); c++) {
        cf_pack_desc desc = {.chunk_size = 8192, .n_ranks = cases[c].ranks, .max_cp = cases[c].max_cp, .lockstep = 1};
        for (i = 0; i < COUNT(lengths); i++) lengths[i] = i > 0 ? 200 + i * 7919 % 2000 : cases[c].longest;
        check_asked("one long among 255", lengths, COUNT(lengths), desc);
    }
}

/* Splits of expensive trees; a row costs 1 and a pair nothing.

   - A tree of 32 rows and 16 answers of 2 on four ranks: the mean is 16, the tree costs 64, and four splits with 4
     answers each cost 40.
   - Four such trees: each rank has one, and no copy pays.
   - A tree of two levels (4 rows, four times 8, and six times 4 below each of these) on eight ranks: eight splits of
     24.
   - A tree with almost everything at its end (3 rows, from each of which one sequence diverges, then eight times 10) on
     two ranks: 43 for four of those and the 3 rows; and 3, with 1 and 2 rows, for the early ones.
   - One row with 20 answers of one, which fill less than a chunk, on two ranks: 11 for ten of them and the row. */
TEST(dear_trees_are_parted_over_ranks) {
    static const struct {
        int n_trees, no_copies, n_ranks;
        int64_t rows, dearest;
    } cases[] = {{1, 0, 4, 4 * 32 + 32, 40}, {1, 1, 4, 64, 64}, {4, 0, 4, 4 * 64, 64}, {0, 0, 8, 8 * 24, 24},
                 {-1, 0, 2, 2 * 43 + 6, 46}, {-2, 0, 2, 2 * 11, 11}};
    static int64_t lengths[64];
    static cf_shared_prefix shares[64];
    size_t i;
    for (i = 0; i < COUNT(cases); i++) {
        cf_pack_desc desc = {.chunk_size = 8, .cost.per_token = 1, .min_shared_prefix = 1, .shared_prefixes = shares};
        int64_t j, rank, dearest = 0, n = cases[i].n_trees > 0 ? 16 * cases[i].n_trees : 24;
        cf_plan *plan = NULL;
        cf_plan_stats stats;
        if (cases[i].n_trees < 0) n = cases[i].n_trees == -1 ? 11 : 20;
        if (cases[i].n_trees == -2) desc.chunk_size = 64;
        for (j = 0; j < n; j++) {
            lengths[j] = 34;
            shares[j].with = j / 16 * 16;
            shares[j].tokens = j % 16 > 0 ? 32 : 0;
            if (cases[i].n_trees > 0) continue;
            lengths[j] = 16;
            shares[j].with = j % 6 > 0 ? j - 1 : 0;
            shares[j].tokens = j % 6 > 0 ? 12 : j > 0 ? 4 : 0;
            if (cases[i].n_trees == 0) continue;
            lengths[j] = j < 3 ? j + 2 : 13;
            shares[j].with = j > 3 ? 3 : j > 0 ? j - 1 : 0;
            shares[j].tokens = j < 3 ? j : 3;
            if (cases[i].n_trees == -1) continue;
            lengths[j] = 2;
            shares[j].with = 0;
            shares[j].tokens = j > 0;
        }
        desc.n_ranks = cases[i].n_ranks;
        desc.no_copies = cases[i].no_copies;
        REQUIRE(cf_pack(lengths, n, &desc, &plan, NULL) == CF_OK);
        CHECK_INT(cf_plan_validate(plan, lengths, n, NULL, NULL), CF_OK);
        cf_plan_measure(plan, &desc.cost, &stats);
        CHECK_INT(stats.rows, cases[i].rows);
        for (rank = 0; rank < cases[i].n_ranks; rank++) {
            int64_t rows = 0;
            for (j = 0; j < plan->chunks_per_rank; j++) rows += plan->chunks[rank * plan->chunks_per_rank + j].tokens;
            if (rows > dearest) dearest = rows;
        }
        CHECK_INT(dearest, cases[i].dearest);
        cf_plan_free(plan);
    }
}

/* Balancing the ranks moves everything out of a chunk, which is then removed. */
TEST(ranks_of_trees_have_no_chunks_without_anything) {
    const int64_t lengths[] = {2, 13, 13, 9};
    forest f;
    cf_plan *plan;
    int64_t i;
    memset(&f, 0, sizeof f);
    f.n = 4;
    memcpy(f.lengths, lengths, sizeof lengths);
    f.shares[1].tokens = 2;
    f.desc.chunk_size = 26;
    f.desc.min_shared_prefix = 1;
    f.desc.n_ranks = 4;
    plan = pack(&f);
    CHECK_INT(plan->n_chunks, 4);
    CHECK_INT(plan->n_idle, 1);
    for (i = 0; i < 4; i++) CHECK(plan->chunks[i].tokens <= 13);
    cf_plan_free(plan);
}

/* Damage that is not drawn at random: slices of one or two trees change places. */
TEST(damaged_slices_of_trees_are_refused_by_name) {
    const int64_t small[] = {20, 20, 20, 7, 7}, in_small[] = {0, 10, 10, 0, 0};
    const int64_t two[] = {16, 4}, in_two[] = {0, 2}, odd[] = {14, 10}, in_odd[] = {0, 7};
    const int64_t twice[] = {10, 10}, in_twice[] = {0, 5};
    const int64_t deep[] = {32, 16, 13, 11}, in_deep[] = {0, 14, 11, 9};
    forest f;
    cf_plan *plan = pack_star(&f, 5, small, in_small, 64);
    REQUIRE(plan->n_chunks == 1 && plan->n_slices == 6 && plan->slices[2].up == 0 && plan->slices[3].up == 0);
    plan->slices[3].up = 1; /* where it begins after another slice */
    check_damaged(&f, plan, "slices.up", 3);
    plan->slices[3].up = 0;
    plan->slices[5].first = plan->slices[4].first;
    plan->slices[5].n = plan->slices[4].n;
    plan->slices[5].sequence = plan->slices[4].sequence;
    check_damaged(&f, plan, "slices.sequence", 5);
    cf_plan_free(plan);

    plan = pack_star(&f, 4, deep, in_deep, 8); /* the three short ones are leaves in one chunk, with two tokens each */
    REQUIRE(plan->n_chains == 2 && plan->n_slices == 10 && plan->slices[8].begin == 11 && plan->slices[9].begin == 9);
    {
        const cf_slice slice = plan->slices[8];
        plan->slices[8] = plan->slices[9];
        plan->slices[9] = slice;
        plan->slices[8].offset = 2;
        plan->slices[9].offset = 4;
    }
    check_damaged(&f, plan, "slices.begin", 9);
    cf_plan_free(plan);

    plan = pack_star(&f, 4, deep, in_deep, 8);
    REQUIRE(plan->chains[0].n_chunks > 2);
    plan->chunks[2].prefix = plan->chunks[1].prefix; /* so that chunk 1 adds nothing to the prefix */
    check_damaged(&f, plan, "chunks.prefix", 2);
    cf_plan_free(plan);

    plan = pack_star(&f, 4, deep, in_deep, 8);
    plan->chains[0].tokens = CF_MAX_LENGTH + 1;
    check_damaged(&f, plan, "chains.tokens", 0);
    cf_plan_free(plan);

    plan = pack_star(&f, 5, small, in_small, 64);
    plan->slices[5].length = 0;
    check_damaged(&f, plan, "slices.length", 5);
    cf_plan_free(plan);

    plan = pack_star(&f, 2, odd, in_odd, 7);
    REQUIRE(plan->n_chunks == 3 && plan->slices[1].begin == 7);
    plan->chunk_size = 8; /* so that nothing may begin at 7 */
    plan->align = 2;
    plan->chunks[0].rows = plan->chunks[1].rows = 8;
    plan->chunks[2].rows = 4;
    check_damaged(&f, plan, "slices.begin", 1);
    cf_plan_free(plan);

    plan = pack_star(&f, 2, two, in_two, 8); /* of two slices in the first chunk, one is not in the chain */
    REQUIRE(plan->chunks[0].n_slices == 2 && plan->chains[0].n_chunks == 2);
    plan->chunks[1].prefix = plan->chunks[0].state = plan->slices[1].begin;
    plan->chains[0].tokens = plan->slices[1].begin + 8;
    check_damaged(&f, plan, "chunks.n_slices", 0);
    cf_plan_free(plan);

    /* a sequence has its first five tokens twice, so that the count agrees */
    plan = pack_star(&f, 2, twice, in_twice, 64);
    REQUIRE(plan->n_slices == 3 && plan->slices[2].up == 0 && plan->slices[2].begin == 5);
    plan->slices[2].up = -1;
    plan->slices[2].begin = 0;
    plan->chunks[0].pairs -= 5 * 5;
    check_damaged(&f, plan, "slices.sequence", 2);
    cf_plan_free(plan);
}

static void refused(const cf_plan *plan, const int64_t *lengths, const char *field, int64_t item) {
    cf_error error = {0};
    CHECK_INT(cf_plan_validate(plan, lengths, plan->n_sequences, NULL, &error), CF_ERROR_PLAN);
    CHECK_STR(error.field, field);
    CHECK_INT(error.item, item);
}

/* Sequence 1 diverges from sequence 0 after two tokens. Its last three are a leaf, which sees the chain of sequence 0.
   At the end of the test, the first of these three is moved behind the chain in chunk 0. All numbers then agree, but
   the leaf cannot see this row, because it is not in the state. */
TEST(a_tree_made_by_hand_is_accepted_undamaged) {
    const int64_t lengths[] = {6, 5, 4};
    int64_t order[] = {0, 1, 2}, common[] = {0, 2, 0}, copies[] = {6, 5, 4};
    cf_slice slices[] = {/* begin, sequence, length, offset, up, first, n */
                         {0, 0, 2, 0, -1, 0, 2}, {2, 0, 4, 2, 0, 0, 1}, {2, 1, 3, 0, 0, 1, 1}, {3, 1, 2, 0, 2, 1, 1}};
    cf_chunk chunks[] = {
        /* first_slice, n_slices, tokens, rows, pairs, chain, index, prefix, rank, up, down, below, state, cp */
        {0, 2, 6, 6, 3 + 18, 0, 0, 0, 0, -1, 1, 1, 6, 0}, {2, 1, 3, 3, 12, 1, 0, 2, 0, 0, -1, 0, 0, 0}};
    cf_chain chains[] = {{0, 0, 1, 6, 0}, {1, 1, 1, 0, 0}}, turned[] = {{1, 1, 1, 0, 0}, {0, 0, 1, 6, 0}};
    cf_plan plan = {.chunk_size = 8, .align = 1, .method = CF_PACK_BEST_FIT, .split = CF_SPLIT_FULL, .n_sequences = 2,
                    .n_tokens = 11, .n_ranks = 1, .chunks_per_rank = 2, .n_chunks = 2, .n_chains = 2, .n_slices = 3,
                    .lower_bound = 2, .chunks = chunks, .slices = slices, .chains = chains, .order = order,
                    .common = common, .lengths = copies};
    cf_error error;
    CHECK_INT(cf_plan_validate(&plan, lengths, 2, NULL, NULL), CF_OK);
    chunks[0].chain = 1; /* chains may come in any order */
    chunks[1].chain = 0;
    plan.chains = turned;
    CHECK_INT(cf_plan_validate(&plan, lengths, 2, NULL, NULL), CF_OK);
    chunks[0].chain = 0;
    chunks[1].chain = 1;
    plan.chains = chains;
    order[1] = 0;
    refused(&plan, lengths, "order", 1);
    order[1] = 2;
    refused(&plan, lengths, "order", 1);
    order[1] = 1;
    copies[1]++;
    refused(&plan, lengths, "lengths", 1);
    copies[1]--;
    common[1] = 6;
    refused(&plan, lengths, "common", 1);
    common[1] = 2;
    plan.n_sequences = 3; /* a third sequence is in no slice */
    plan.n_tokens += lengths[2];
    refused(&plan, lengths, "slices.sequence", -1);
    CHECK_INT(cf_plan_validate(&plan, lengths, 3, NULL, &error), CF_ERROR_PLAN);
    CHECK_INT(error.wanted, 2);
    plan.n_sequences = 2;
    plan.n_tokens -= lengths[2];
    plan.n_slices = 4;
    slices[2].length = 1;
    slices[2].offset = 6;
    chunks[0].n_slices = 3;
    chunks[0].tokens = chunks[0].rows = 7;
    chunks[0].pairs += 3;
    chunks[1].first_slice = chunks[1].prefix = 3;
    chunks[1].tokens = chunks[1].rows = 2;
    chunks[1].pairs = 9;
    refused(&plan, lengths, "slices.up", 3);
}

/* Rows of sequence 0 and rows of sequence 1 are in the chain of chunk 0. The leaf of sequence 1 sees four rows of that
   chain, which by their numbers would be sequence 0's. */
TEST(a_chain_that_forks_is_refused) {
    const int64_t lengths[] = {4, 6};
    int64_t order[] = {0, 1}, common[] = {0, 2}, copies[] = {4, 6};
    cf_slice slices[] = {/* begin, sequence, length, offset, up, first, n */
                         {0, 0, 2, 0, -1, 0, 2}, {2, 0, 2, 2, 0, 0, 1}, {2, 1, 2, 4, 0, 1, 1}, {4, 1, 2, 0, 2, 1, 1}};
    cf_chunk chunks[] = {
        /* first_slice, n_slices, tokens, rows, pairs, chain, index, prefix, rank, up, down, below, state, cp */
        {0, 3, 6, 6, 3 + 7 + 7, 0, 0, 0, 0, -1, 1, 1, 6, 0}, {3, 1, 2, 2, 11, 1, 0, 4, 0, 0, -1, 0, 0, 0}};
    cf_chain chains[] = {{0, 0, 1, 6, 0}, {1, 1, 1, 0, 0}};
    const cf_plan plan = {.chunk_size = 8, .align = 1, .method = CF_PACK_BEST_FIT, .split = CF_SPLIT_FULL,
                          .n_sequences = 2, .n_tokens = 10, .n_ranks = 1, .chunks_per_rank = 2, .n_chunks = 2,
                          .n_chains = 2, .n_slices = 4, .lower_bound = 1, .chunks = chunks, .slices = slices,
                          .chains = chains, .order = order, .common = common, .lengths = copies};
    refused(&plan, lengths, "slices.up", 2);
}

/* The first token of three, six times, has as many pairs as the three tokens. */
TEST(tokens_of_as_many_pairs_are_refused) {
    const int64_t lengths[] = {3};
    int64_t order[] = {0}, common[] = {0}, copies[] = {3};
    cf_slice slices[6];
    cf_chunk chunk = {0, 6, 6, 6, 6, -1, 0, 0, 0, -1, -1, 0, 0, 0};
    const cf_plan plan = {.chunk_size = 8, .align = 1, .method = CF_PACK_BEST_FIT, .split = CF_SPLIT_FULL,
                          .n_sequences = 1, .n_tokens = 3, .n_ranks = 1, .chunks_per_rank = 1, .n_chunks = 1,
                          .n_slices = 6, .chunks = &chunk, .slices = slices, .order = order, .common = common,
                          .lengths = copies};
    int32_t i;
    for (i = 0; i < 6; i++) {
        const cf_slice slice = {0, 0, 1, i, -1, 0, 1};
        slices[i] = slice;
    }
    refused(&plan, lengths, "slices.sequence", 5);
}

/* The pairs of 2^35 tokens exceed 64 bits, and so do products of their halves. */
TEST(trees_of_very_long_sequences_are_accepted) {
    const int64_t lengths[] = {(int64_t)1 << 35, ((int64_t)1 << 35) + 3};
    const cf_shared_prefix shares[] = {{0, 0}, {0, (int64_t)1 << 34}};
    cf_pack_desc desc = {.chunk_size = (int64_t)1 << 26, .shared_prefixes = shares};
    cf_plan *plan = NULL;
    REQUIRE(cf_pack(lengths, 2, &desc, &plan, NULL) == CF_OK && plan->order != NULL);
    CHECK_INT(cf_plan_validate(plan, lengths, 2, NULL, NULL), CF_OK);
    cf_plan_free(plan);
}

#define CHECK_MISSING(array)                                                                                         \
    do {                                                                                                             \
        cf_plan without = *plan;                                                                                     \
        cf_error error = {0};                                                                                        \
        without.array = NULL;                                                                                        \
        CHECK_INT(cf_plan_validate(&without, f.lengths, f.n, NULL, &error), CF_ERROR_PLAN);                          \
        CHECK_STR(error.field, #array);                                                                              \
        CHECK_INT(error.item, -1);                                                                                   \
    } while (0)

TEST(plans_of_trees_have_all_arrays) {
    harness_rng random = {3};
    forest f;
    cf_plan *plan = pack_small_tree(&random, &f);
    CHECK_MISSING(common);
    CHECK_MISSING(lengths);
    cf_plan_free(plan);
}

/* ---- a second validator: in trees, F of ancestors, and B of descendants and earlier siblings, come first ---- */

enum { JUDGED_CHUNKS = 40, JUDGED_STAGES = 6 };

typedef struct judge {
    const cf_plan *plan;
    const cf_schedule *schedule;
    int done[CF_PASS_COUNT][JUDGED_STAGES][JUDGED_CHUNKS], kept[JUDGED_STAGES][JUDGED_CHUNKS];
} judge;

/* Returns whether the state that chunk b continues contains rows of chunk a. */
static int is_above(const cf_plan *plan, int64_t a, int64_t b) {
    int64_t chain = plan->chunks[b].chain;
    if (a == b || plan->chunks[a].chain < 0) return 0;
    if (plan->chunks[a].chain == chain) return a < b;
    for (; chain >= 0; chain = above(plan, chain))
        if (chain == plan->chunks[a].chain) return 1;
    return 0;
}

/* Returns whether chunk a begins the sibling just before the one that chunk b begins. */
static int is_before(const cf_plan *plan, int64_t a, int64_t b) {
    int64_t up = plan->chunks[b].up, i;
    if (up < 0 || a >= b || plan->chunks[a].up != up) return 0;
    for (i = a + 1; i < b; i++)
        if (plan->chunks[i].up == up) return 0;
    return 1;
}

static int may_run(const judge *j, const cf_action *a) {
    int s = a->stage, c = a->chunk, first = s == 0, kept = a->keep, other;
    int last = s + 1 == j->schedule->shape.n_stages * j->schedule->shape.n_virtual;
    int back = a->pass == CF_B || a->pass == CF_I;
    if (j->done[back ? CF_B : a->pass][s][c]) return 0;
    if (a->pass == CF_W) return j->done[CF_I][s][c];
    if (a->pass == CF_R && (!j->done[CF_F][s][c] || j->kept[s][c])) return 0;
    if (a->pass == CF_R && j->schedule->shape.replay == CF_REPLAY_PIPELINE && !first && !j->done[CF_R][s - 1][c])
        return 0;
    if (a->pass == CF_F && !first && !j->done[CF_F][s - 1][c]) return 0;
    if (back && (!j->kept[s][c] || (!last && !j->done[CF_B][s + 1][c]))) return 0;
    for (other = 0; other < j->plan->n_chunks; other++) {
        int before = is_before(j->plan, other, c);
        if (a->pass == CF_F && (before || is_above(j->plan, other, c)) && !j->done[CF_F][s][other]) return 0;
        if (back && (before || is_above(j->plan, c, other)) && !j->done[CF_B][s][other]) return 0;
        if (a->keep && other != c && j->plan->chunks[c].chain >= 0 &&
            j->plan->chunks[other].chain == j->plan->chunks[c].chain)
            kept += j->kept[s][other];
    }
    return kept <= j->schedule->shape.k;
}

/* Runs every pass that is ready, until none is. */
static int judge_accepts(const cf_plan *plan, const cf_schedule *schedule) {
    static judge j;
    int64_t at[JUDGED_STAGES] = {0}, left = schedule->n_actions, stage;
    int moves = 1;
    memset(&j, 0, sizeof j);
    j.plan = plan;
    j.schedule = schedule;
    while (moves) {
        for (moves = 0, stage = 0; stage < schedule->shape.n_stages; stage++) {
            const cf_action *a = &schedule->actions[schedule->first[stage] + at[stage]];
            if (schedule->first[stage] + at[stage] == schedule->first[stage + 1] || !may_run(&j, a)) continue;
            j.done[a->pass][a->stage][a->chunk] = 1;
            if (a->keep) j.kept[a->stage][a->chunk] = 1;
            if (a->pass == CF_I) j.done[CF_B][a->stage][a->chunk] = 1;
            if (a->pass == CF_B || a->pass == CF_W) j.kept[a->stage][a->chunk] = 0;
            at[stage]++;
            left--;
            moves = 1;
        }
    }
    return left == 0;
}

static void swap_actions(cf_action *two) {
    const cf_action was = two[0];
    two[0] = two[1];
    two[1] = was;
}

/* Valid schedules of random forests, in which neighbours change places. */
TEST(two_validators_agree_on_trees) {
    harness_rng random = {32};
    cf_validate_desc any = {0};
    int64_t round, n = harness_rounds(10000, 1500), accepted = 0, refused = 0, swaps, i;
    any.limits.chunks = any.limits.state = CF_NO_LIMIT;
    for (round = 0; round < n;) {
        forest f = make_forest(&random);
        cf_plan *plan;
        cf_schedule_desc desc = {0};
        cf_schedule *schedule = NULL;
        f.desc.n_ranks = 1;
        plan = pack(&f);
        desc.kind = (cf_schedule_kind)(1 + below(&random, CF_SCHEDULE_BEST));
        desc.shape.n_stages = 1 + below(&random, 3);
        if (desc.kind >= CF_SCHEDULE_INTERLEAVED) desc.shape.n_virtual = 1 + below(&random, 2);
        desc.split_backward = (int)below(&random, 2) && desc.kind >= CF_SCHEDULE_ZERO_BUBBLE;
        desc.max_tries = 20;
        desc.shape.k = 1 + below(&random, 3);
        if (below(&random, 2) && desc.kind == CF_SCHEDULE_PAPER) desc.shape.replay = CF_REPLAY_PIPELINE;
        if (plan->order && plan->n_chains > 1 && plan->n_chunks <= JUDGED_CHUNKS &&
            cf_schedule_make(plan, &desc, &schedule, NULL) == CF_OK) {
            CHECK(judge_accepts(plan, schedule));
            for (swaps = 0; swaps < 8; swaps++, round++) {
                int ours, theirs;
                do i = below(&random, schedule->n_actions - 1);
                while (schedule->actions[i].stage != schedule->actions[i + 1].stage);
                swap_actions(&schedule->actions[i]);
                ours = cf_schedule_validate(plan, schedule, &any, NULL, NULL) == CF_OK;
                theirs = judge_accepts(plan, schedule);
                CHECK_INT(ours, theirs);
                accepted += ours;
                refused += !theirs;
                if (!theirs) swap_actions(&schedule->actions[i]); /* and continue from a valid one */
            }
        }
        cf_schedule_free(schedule);
        cf_plan_free(plan);
    }
    CHECK(accepted > n / 20 && refused > n / 20);
    printf("(%d sound, %d not) ", (int)accepted, (int)refused);
}

/* ---- a tree compared with its rows laid out as one chain ---- */

static double best_makespan(const cf_plan *plan, int64_t n_stages, int64_t n_virtual, int64_t k) {
    cf_schedule_desc desc = {0};
    cf_schedule *schedule = NULL;
    cf_timing timing = {0};
    cf_search_report report = {0};
    cf_error error = {0};
    timing.all.forward.per_token = 1.0 / (double)(n_stages * n_virtual);
    timing.all.forward.per_pair = 2.84e-5 / (double)(n_stages * n_virtual);
    timing.all.backward.per_token = 2.0 / (double)(n_stages * n_virtual);
    timing.all.backward.per_pair = 2 * 2.84e-5 / (double)(n_stages * n_virtual);
    timing.all.replay = timing.all.forward;
    desc.timing = &timing;
    desc.shape.n_stages = n_stages;
    desc.shape.n_virtual = n_virtual;
    desc.shape.k = k;
    desc.max_tries = 20;
    desc.report = &report;
    if (cf_schedule_make(plan, &desc, &schedule, &error) != CF_OK) FAIL("cf_schedule_make: %s", error.text);
    cf_schedule_free(schedule);
    return report.makespan;
}

/* Chains of answers to prompts of several chunks, as in reinforcement learning. The alternative lays out all rows of a
   tree as one chain. In the first few lists the tree is slower unless its prompt's last chunk is filled first. */
TEST(trees_are_no_slower_than_their_rows_as_chains) {
    harness_rng random = {521};
    int64_t round, n = harness_rounds(400, 8), i, j;
    double sum = 0, worst = 0, count = 0, above = 0;
    for (round = 0; round < n; round++) {
        int64_t lengths[MOST * 4], chains[4], trees = 1 + below(&random, 4), all = 0, at;
        cf_shared_prefix shares[MOST * 4];
        cf_pack_desc desc = {0};
        cf_plan *tree = NULL, *chain = NULL;
        for (i = 0; i < trees; i++) {
            int64_t prompt = 512 * (1 + below(&random, 40)), answers = 2 + below(&random, MOST - 1);
            chains[i] = prompt;
            for (at = all, j = 0; j < answers; j++, all++) {
                int64_t own = 64 * (1 + below(&random, 96));
                lengths[all] = prompt + own;
                shares[all].with = at;
                shares[all].tokens = j > 0 ? prompt : 0;
                chains[i] += own;
            }
        }
        desc.chunk_size = 8192;
        REQUIRE(cf_pack(chains, trees, &desc, &chain, NULL) == CF_OK);
        desc.shared_prefixes = shares;
        REQUIRE(cf_pack(lengths, all, &desc, &tree, NULL) == CF_OK);
        for (i = 0; i < 9; i++) {
            const int64_t stages[] = {1, 4, 8}, ks[] = {1, 2, 4};
            double ratio = best_makespan(tree, stages[i / 3], 1, ks[i % 3]);
            ratio /= best_makespan(chain, stages[i / 3], 1, ks[i % 3]);
            sum += ratio;
            count += 1;
            if (ratio > worst) worst = ratio;
            above += ratio > 1.01;
        }
        cf_plan_free(tree);
        cf_plan_free(chain);
    }
    printf("(mean %.4f, worst %.4f, %.1f %% above 1.01) ", sum / count, worst, 100 * above / count);
    CHECK(above <= 0.002 * count && worst < 1.05);
    CHECK(sum <= 0.95 * count);
}

/* Two chunks of a prompt and one of answers run like three chunks of one sequence: once the answers' backwards are
   done, the prompt may keep two. */
TEST(a_prompt_keeps_more_once_its_answers_are_done) {
    const int64_t lengths[] = {18176, 17984}, tokens[] = {0, 16384}, chain[] = {19776}, none[] = {0};
    forest f;
    cf_plan *plans[] = {pack_star(&f, 2, lengths, tokens, 8192), pack_star(&f, 1, chain, none, 8192)};
    CHECK_INT(plans[0]->n_chunks, 3);
    CHECK(best_makespan(plans[0], 4, 1, 2) <= best_makespan(plans[1], 4, 1, 2));
    cf_plan_free(plans[0]);
    cf_plan_free(plans[1]);
}

/* Replays of a prompt that ran before its answers needed no more places, but held those forever. Dispatching never
   finished, and the fixed order took 1.77 times as long as without virtual stages. */
TEST(virtual_stages_do_not_wait_for_places_of_prompts) {
    cf_plan *plan = pack_two_levels();
    double one = best_makespan(plan, 4, 1, 1), two = best_makespan(plan, 4, 2, 1);
    CHECK(one <= 1.12 * 157e3); /* the load of a stage */
    CHECK(two <= 1.1 * one);
    cf_plan_free(plan);
}

/* ---- shares of tokens, and of nodes ---- */

/* Returns the rows of a plan with these shares, none of which is too short. */
static int64_t rows_with(const int64_t *lengths, int64_t n, const cf_shared_prefix *shares) {
    cf_pack_desc desc = {0};
    cf_plan *plan = NULL;
    cf_plan_stats stats = {0};
    cf_error error = {0};
    desc.chunk_size = 16;
    desc.shared_prefixes = shares;
    desc.min_shared_prefix = 1;
    if (cf_pack(lengths, n, &desc, &plan, &error) != CF_OK) FAIL("cf_pack: %s", error.text);
    else cf_plan_measure(plan, NULL, &stats);
    cf_plan_free(plan);
    return stats.rows;
}

/* Everything that any two sequences have in common is found. So many tokens of each sequence are new, compared with all
   earlier ones. */
TEST(shares_are_found_in_tokens) {
    harness_rng random = {9};
    int64_t round, n = harness_rounds(2000, 300);
    for (round = 0; round < n; round++) {
        forest f = make_forest(&random);
        const void *tokens[MOST];
        const int64_t words = 1 + below(&random, 3);
        cf_shared_prefix shares[MOST];
        int64_t i, j, p, fresh = 0;
        for (i = 0; i < f.n; i++) {
            int64_t most = 0;
            for (p = 0; p < f.lengths[i]; p++) f.tokens[i][p] %= 1 + (int32_t)words * (LONGEST - 1);
            for (j = 0; j < i; j++) {
                for (p = 0; p < f.lengths[i] && p < f.lengths[j] && f.tokens[i][p] == f.tokens[j][p]; p++) continue;
                if (p > most) most = p;
            }
            tokens[i] = f.tokens[i];
            fresh += f.lengths[i] - most;
        }
        CHECK_INT(cf_shared_prefixes_find(tokens, sizeof(int32_t), f.lengths, f.n, shares, NULL, NULL), CF_OK);
        for (i = 0; i < f.n; i++)
            for (p = 0; p < shares[i].tokens; p++) CHECK_INT(f.tokens[i][p], f.tokens[shares[i].with][p]);
        for (i = 0; i < f.n; i++) /* equal sequences keep their order */
            CHECK(shares[i].tokens < f.lengths[i] || f.lengths[i] == 0 || shares[i].with < i);
        CHECK_INT(rows_with(f.lengths, f.n, shares), fresh);
    }
}

TEST(tokens_that_are_none_are_refused) {
    const int32_t word = 1;
    const void *tokens[] = {&word, NULL};
    int64_t lengths[] = {1, 1};
    cf_shared_prefix shares[2];
    cf_error error = {0};
#define REFUSES(call, what, at)               \
    CHECK_INT(call, CF_ERROR_ARGUMENT);       \
    CHECK_STR(error.field, what);             \
    CHECK_INT(error.item, at)
    REFUSES(cf_shared_prefixes_find(tokens, 4, lengths, 2, shares, NULL, &error), "tokens", 1);
    tokens[1] = &word;
    lengths[1] = -1;
    REFUSES(cf_shared_prefixes_find(tokens, 4, lengths, 2, shares, NULL, &error), "lengths", 1);
    REFUSES(cf_shared_prefixes_find(NULL, 4, lengths, 2, shares, NULL, &error), "tokens", -1);
    REFUSES(cf_shared_prefixes_find(tokens, 4, NULL, 2, shares, NULL, &error), "lengths", -1);
    REFUSES(cf_shared_prefixes_find(tokens, 4, lengths, 2, NULL, NULL, &error), "prefixes", -1);
    CHECK_INT(cf_shared_prefixes_find(NULL, 4, NULL, 0, NULL, NULL, &error), CF_OK);
#undef REFUSES
}

/* ---- large trees ---- */

/* Each sequence shares with the one before: a long chain of shares, and of chains, which nothing follows
   recursively. */
TEST(long_chains_of_shares_need_no_stack) {
    const int64_t n = 100000;
    int64_t *lengths = (int64_t *)malloc((size_t)n * sizeof *lengths), i;
    cf_shared_prefix *shares = (cf_shared_prefix *)malloc((size_t)n * sizeof *shares);
    cf_pack_desc desc = {0};
    cf_plan *plan = NULL;
    cf_plan_stats stats;
    int turned;
    REQUIRE(lengths && shares);
    for (turned = 0; turned < 2; turned++) {
        for (i = 0; i < n; i++) {
            int64_t at = turned ? n - 1 - i : i;
            lengths[at] = i + 2;
            shares[at].with = i == 0 ? at : turned ? at + 1 : at - 1;
            shares[at].tokens = i;
        }
        desc.chunk_size = 4096;
        desc.shared_prefixes = shares;
        desc.min_shared_prefix = 1;
        CHECK_INT(cf_pack(lengths, n, &desc, &plan, NULL), CF_OK);
        cf_plan_measure(plan, NULL, &stats);
        CHECK_INT(stats.rows, 2 * n);
        if (turned) CHECK_INT(cf_plan_validate(plan, lengths, n, NULL, NULL), CF_OK);
        cf_plan_free(plan);
    }
    free(lengths);
    free(shares);
}

/* Returns the CPU time of describing all chunks of a comb, the least of five runs. In a comb each sequence diverges
   from the one before and adds one token. */
static double comb_seconds(int64_t n, int64_t chunk_size) {
    int64_t *lengths = (int64_t *)malloc((size_t)n * sizeof *lengths), i, run;
    cf_shared_prefix *shares = (cf_shared_prefix *)malloc((size_t)n * sizeof *shares);
    const cf_metadata_desc wants = {.wants_loss_rows = 1, .wants_key_ends = 1};
    cf_pack_desc desc = {0};
    cf_plan *plan = NULL;
    size_t bytes = 0;
    void *memory = NULL;
    double best = 1e9;
    if (lengths == NULL || shares == NULL) exit(1);
    for (i = 0; i < n; i++) {
        lengths[i] = i + 2;
        shares[i].with = i == 0 ? 0 : i - 1;
        shares[i].tokens = i;
    }
    desc.chunk_size = chunk_size;
    desc.shared_prefixes = shares;
    desc.min_shared_prefix = 1;
    CHECK_INT(cf_pack(lengths, n, &desc, &plan, NULL), CF_OK);
    CHECK_INT(plan->n_slices, 2 * n - 1);
    for (run = 0; run < 5; run++) {
        clock_t start = clock();
        int64_t levels = 0;
        CHECK_INT(cf_metadata_size(plan, -1, &wants, &bytes, NULL), CF_OK);
        if (memory == NULL) memory = malloc(bytes);
        for (i = 0; i < plan->n_chunks; i++) {
            cf_metadata m;
            CHECK_INT(cf_metadata_fill(plan, i, &wants, memory, bytes, &m, NULL), CF_OK);
            levels += m.n_calls;
        }
        CHECK(levels >= n - 1); /* one for each place where sequences diverge */
        best = fmin(best, (double)(clock() - start) / CLOCKS_PER_SEC);
    }
    free(memory);
    cf_plan_free(plan);
    free(lengths);
    free(shares);
    return best;
}

/* 16 times as many slices take 16 times as long; a step for each pair of slices would take 256 times as long. */
TEST(metadata_of_many_slices_takes_near_linear_time) {
    CHECK(comb_seconds(48000, 96000) < 80 * (comb_seconds(3000, 6000) + 1e-5)); /* one chunk */
    CHECK(comb_seconds(48000, 32000) < 80 * (comb_seconds(3000, 2000) + 1e-5)); /* several, which see a path */
}

/* ---- as JSON ---- */

typedef struct json_text {
    char text[1 << 17];
    size_t bytes;
} json_text;

static int write_text(const char *text, size_t bytes, void *user) {
    json_text *out = (json_text *)user;
    if (bytes > sizeof out->text - out->bytes) return 1;
    memcpy(out->text + out->bytes, text, bytes);
    out->bytes += bytes;
    return 0;
}

static int has(const json_document *d, int64_t node, const char *key, int64_t value) {
    return json_is_int(d, json_get(d, node, key), value);
}

static int has_list(const json_document *d, int64_t node, const char *key, const int64_t *values, int64_t n) {
    int64_t list = json_get(d, node, key), i;
    int fine = json_size(d, list) == n;
    for (i = 0; i < n && fine; i++) fine = json_is_int(d, json_at(d, list, i), values[i]);
    return fine;
}

static void check_json(const cf_plan *plan, const json_document *d) {
    int64_t i, j, k, chunks = json_get(d, 0, "chunks");
    CHECK(has(d, 0, "version", CF_JSON_VERSION));
    CHECK(has_list(d, 0, "order", plan->order, plan->n_sequences));
    CHECK(has_list(d, 0, "common", plan->common, plan->n_sequences));
    CHECK(has_list(d, 0, "lengths", plan->lengths, plan->n_sequences));
    for (i = 0; i < plan->n_chunks; i++) {
        const cf_chunk *c = &plan->chunks[i];
        int64_t slices = json_get(d, json_at(d, chunks, i), "slices");
        int64_t told = json_get(d, json_at(d, chunks, i), "metadata");
        cf_metadata m;
        cf_metadata_desc desc = {0};
        void *memory = fill_metadata(plan, i, &desc, &m);
        CHECK(has(d, json_at(d, chunks, i), "up", c->up) && has(d, json_at(d, chunks, i), "down", c->down));
        CHECK(has(d, json_at(d, chunks, i), "below", c->below) && has(d, json_at(d, chunks, i), "state", c->state));
        for (j = 0; j < c->n_slices; j++) {
            const cf_slice *t = &plan->slices[c->first_slice + j];
            CHECK(has(d, json_at(d, slices, j), "up", t->up));
            CHECK(has(d, json_at(d, slices, j), "first", t->first));
            CHECK(has(d, json_at(d, slices, j), "n", t->n));
        }
        CHECK_INT(json_size(d, json_get(d, told, "extra_rows")), m.n_extra);
        for (j = 0; j < m.n_extra; j++) {
            CHECK(json_is_int(d, json_at(d, json_get(d, told, "extra_rows"), j), m.extra_rows[j]));
            CHECK(json_is_int(d, json_at(d, json_get(d, told, "extra_sequences"), j), m.extra_sequences[j]));
            CHECK(json_is_int(d, json_at(d, json_get(d, told, "extra_targets"), j), m.extra_targets[j]));
        }
        CHECK_INT(json_size(d, json_get(d, told, "calls")), m.n_calls);
        for (j = 0; j < m.n_calls; j++) {
            int64_t level = json_at(d, json_get(d, told, "calls"), j);
            CHECK(has(d, level, "chain", m.calls[j].chain) && has(d, level, "first", m.calls[j].first));
            CHECK(has(d, level, "max_seqlen_q", m.calls[j].max_seqlen_q));
            CHECK(has(d, level, "max_seqlen_k", m.calls[j].max_seqlen_k));
            CHECK_INT(json_size(d, json_get(d, level, "cu_seqlens_k")), m.calls[j].n_seqs + 1);
            for (k = 0; k <= m.calls[j].n_seqs; k++) {
                CHECK(json_is_int(d, json_at(d, json_get(d, level, "cu_seqlens_q"), k), m.calls[j].cu_seqlens_q[k]));
                CHECK(json_is_int(d, json_at(d, json_get(d, level, "cu_seqlens_k"), k), m.calls[j].cu_seqlens_k[k]));
            }
        }
        free(memory);
    }
}

TEST(plans_of_trees_are_written) {
    static json_text out;
    harness_rng random = {5};
    int64_t round;
    for (round = 0; round < 10; round++) {
        forest f;
        cf_plan *plan = pack_small_tree(&random, &f);
        const cf_write_desc desc = {1, NULL};
        json_document d;
        out.bytes = 0;
        CHECK_INT(cf_write_plan_json(plan, &desc, write_text, &out, NULL), CF_OK);
        d = json_parse(out.text, out.bytes);
        if (d.fault != NULL) FAIL("%s", d.fault);
        else check_json(plan, &d);
        json_free(&d);
        cf_plan_free(plan);
    }
}

/* ---- functions that do not support trees ---- */

TEST(an_edge_between_siblings_has_a_name) {
    CHECK_STR(cf_edge_name(CF_EDGE_ORDER), "order");
}

/* ---- the validator, on all orders of one small tree ---- */

/* A prompt with two answers, each one chunk: forwards 0 to 2, backwards 3 to 5. Chunk 0 is the prompt. */
static int is_sound(const int64_t place[6]) {
    int64_t i;
    for (i = 0; i < 3; i++)
        if (place[i] > place[3 + i]) return 0;
    return place[0] < place[1] && place[1] < place[2] && place[4] < place[5] && place[5] < place[3];
}

TEST(the_validator_takes_the_sound_orders_of_a_tree_and_no_others) {
    cf_plan *plan = pack_prompts(1, 256, 2, 200, 256);
    cf_schedule_desc desc = {0};
    cf_schedule *schedule = NULL;
    int64_t place[6], code, i, j, sound = 0;
    REQUIRE(plan->n_chunks == 3);
    desc.kind = CF_SCHEDULE_GPIPE;
    desc.shape.n_stages = 1;
    desc.shape.k = 3;
    REQUIRE(cf_schedule_make(plan, &desc, &schedule, NULL) == CF_OK);
    REQUIRE(schedule->n_actions == 6);
    for (code = 0; code < 720; code++) {
        int64_t order[6] = {0, 1, 2, 3, 4, 5}, left = code;
        for (i = 0; i < 6; left /= 6 - i, i++) {
            int64_t other = i + left % (6 - i), was = order[i];
            order[i] = order[other];
            order[other] = was;
        }
        for (i = 0; i < 6; i++) {
            place[order[i]] = i;
            schedule->actions[i].chunk = (int32_t)(order[i] % 3);
            schedule->actions[i].pass = order[i] < 3 ? CF_F : CF_B;
            schedule->actions[i].keep = order[i] < 3;
        }
        j = cf_schedule_validate(plan, schedule, NULL, NULL, NULL) == CF_OK;
        CHECK_INT(j, is_sound(place));
        sound += j;
    }
    CHECK_INT(sound, 2); /* F0 F1, then F2 and B1 in either order, then B2 B0 */
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

SUITE(tree, CASE(random_forests_are_what_their_tokens_say), CASE(shared_prompts_are_computed_once),
      CASE(trees_of_two_levels_are_computed_once), CASE(bad_shares_are_refused_by_name),
      CASE(trees_are_packed_by_best_fit), CASE(trees_too_large_for_a_plan_are_refused),
      CASE(without_shares_plans_are_as_ever), CASE(metadata_of_trees_without_weights_is_that_with_even_ones),
      CASE(damaged_plans_of_trees_are_refused), CASE(plans_of_trees_that_nobody_has_validated_are_walked_safely),
      CASE(damaged_slices_of_trees_are_refused_by_name), CASE(a_tree_made_by_hand_is_accepted_undamaged),
      CASE(a_chain_that_forks_is_refused), CASE(tokens_of_as_many_pairs_are_refused),
      CASE(trees_of_very_long_sequences_are_accepted),
      CASE(chains_of_trees_stay_on_their_rank),
      CASE(trees_fit_into_what_is_asked_for), CASE(what_is_asked_for_is_near_what_is_used),
      CASE(what_cp_groups_ask_for_is_near_what_they_use),
      CASE(ranks_of_trees_have_no_chunks_without_anything), CASE(dear_trees_are_parted_over_ranks),
      CASE(plans_of_trees_have_all_arrays), CASE(plans_of_trees_are_written),
      CASE(two_validators_agree_on_trees), CASE(trees_are_no_slower_than_their_rows_as_chains),
      CASE(a_prompt_keeps_more_once_its_answers_are_done), CASE(virtual_stages_do_not_wait_for_places_of_prompts),
      CASE(shares_are_found_in_tokens), CASE(siblings_take_turns_in_the_same_room),
      CASE(tokens_that_are_none_are_refused), CASE(long_chains_of_shares_need_no_stack),
      CASE(metadata_of_many_slices_takes_near_linear_time), CASE(an_edge_between_siblings_has_a_name),
      CASE(the_validator_takes_the_sound_orders_of_a_tree_and_no_others),
      CASE(gradients_of_trees_are_those_of_their_sequences), CASE(what_makes_gradients_wrong_is_seen));
