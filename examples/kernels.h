/* kernels.h - the arithmetic of a decoder on the CPU, forward and backward - MIT or public domain

   Matrices are row-major: rows are tokens of a chunk, columns are features. Every forward overwrites its output; every
   backward overwrites gradients of activations (unless it says "adds") and adds to gradients of parameters.

   Determinism: the functions here know nothing of threads. Each output is one sum that always runs in the same order,
   however the caller shares out rows or tiles, so results are the same bits for any number of threads, and a second
   forward repeats the first.

   Sections: >>matmul >>norm >>rope >>attention >>feed-forward >>dropout >>embedding >>loss. */

#ifndef TRAIN_KERNELS_H
#define TRAIN_KERNELS_H

#include "base.h"

/* ================================================================================================================
   >>matmul
   ================================================================================================================ */

/* How matmul reads its left matrix: item (i, j) is data[i * row + j * column]. */
typedef struct matrix_view {
    const real *data;
    int64_t row, column;
} matrix_view;

static inline matrix_view matrix_of(const real *data, int64_t n_columns) {
    matrix_view view = {data, n_columns, 1};
    return view;
}

static inline matrix_view transposed_of(const real *data, int64_t n_columns) {
    matrix_view view = {data, 1, n_columns};
    return view;
}

/* out[n] += sum over k of x[k * step] * y[k][n]. Four rows of y at a time, so that out is loaded and stored a quarter
   as often; compilers turn the loop into vector code as it stands. Here is where the time of training goes. */
static inline void matmul_row(real *restrict out, const real *x, int64_t step, const real *restrict y, int64_t columns,
                              int64_t depth) {
    int64_t k = 0;
    for (; k + 4 <= depth; k += 4) {
        real x0 = x[k * step], x1 = x[(k + 1) * step], x2 = x[(k + 2) * step], x3 = x[(k + 3) * step];
        const real *restrict y0 = y + k * columns;
        const real *restrict y1 = y0 + columns, *restrict y2 = y1 + columns, *restrict y3 = y2 + columns;
        for (int64_t n = 0; n < columns; n++) out[n] += x0 * y0[n] + x1 * y1[n] + x2 * y2[n] + x3 * y3[n];
    }
    for (; k < depth; k++) {
        real x0 = x[k * step];
        for (int64_t n = 0; n < columns; n++) out[n] += x0 * y[k * columns + n];
    }
}

typedef enum matmul_mode { MATMUL_SET, MATMUL_ADD } matmul_mode;

#define DEPTH_BLOCK 32 /* rows of b that stay in the cache while all rows of a pass over them; a multiple of 4 */

/* out[m][n] = or += sum over k of a(m, k) * b[k][n], plus bias[n] unless that is NULL. */
static inline void matmul(real *out, matmul_mode mode, matrix_view a, const real *b, const real *bias, int64_t rows,
                          int64_t columns, int64_t depth) {
    for (int64_t m = 0; m < rows && mode == MATMUL_SET; m++) {
        for (int64_t n = 0; n < columns; n++) out[m * columns + n] = bias ? bias[n] : 0;
    }
    for (int64_t k = 0; k < depth; k += DEPTH_BLOCK) {
        for (int64_t m = 0; m < rows; m++) {
            matmul_row(out + m * columns, a.data + m * a.row + k * a.column, a.column, b + k * columns, columns,
                       min_of(DEPTH_BLOCK, depth - k));
        }
    }
}

/* to[column][row] = from[row][column] */
static inline void transpose(real *to, const real *from, int64_t rows, int64_t columns) {
    for (int64_t c = 0; c < columns; c++) {
        for (int64_t r = 0; r < rows; r++) to[c * rows + r] = from[r * columns + c];
    }
}

/* total[column] += sum over rows of x[row][column] */
static inline void add_column_sums(real *total, const real *x, int64_t rows, int64_t columns) {
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t c = 0; c < columns; c++) total[c] += x[row * columns + c];
    }
}

/* out = x weight + bias; weight is (inputs, outputs). */
static inline void linear_forward(real *out, const real *x, const real *weight, const real *bias, int64_t rows,
                                  int64_t inputs, int64_t outputs) {
    matmul(out, MATMUL_SET, matrix_of(x, inputs), weight, bias, rows, outputs, inputs);
}

/* dx = or += dout weight^T; `transposed` is the weight as (outputs, inputs). The weight's own gradient is x^T dout. */
static inline void linear_backward(real *dx, matmul_mode mode, const real *dout, const real *transposed, int64_t rows,
                                   int64_t inputs, int64_t outputs) {
    matmul(dx, mode, matrix_of(dout, outputs), transposed, NULL, rows, inputs, outputs);
}

/* ================================================================================================================
   >>norm    RMSNorm: out = x / rms(x) * gain
   ================================================================================================================ */

/* scale[row] keeps 1 / rms for the backward. */
static inline void rmsnorm_forward(real *out, real *scale, const real *x, const real *gain, int64_t rows, int64_t width,
                                   double epsilon) {
    for (int64_t row = 0; row < rows; row++) {
        const real *from = x + row * width;
        real *to = out + row * width;
        real squares = 0;
        for (int64_t c = 0; c < width; c++) squares += from[c] * from[c];
        scale[row] = 1 / real_sqrt(squares / (real)width + (real)epsilon);
        for (int64_t c = 0; c < width; c++) to[c] = from[c] * scale[row] * gain[c];
    }
}

/* Adds to dx. */
static inline void rmsnorm_backward(real *dx, const real *dout, const real *x, const real *scale, const real *gain,
                                    int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; row++) {
        const real *from = x + row * width, *d = dout + row * width;
        real *to = dx + row * width;
        real along = 0; /* mean of dout * gain * x / rms: the part of the gradient that the division by rms takes out */
        for (int64_t c = 0; c < width; c++) along += d[c] * gain[c] * from[c];
        along *= scale[row] / (real)width;
        for (int64_t c = 0; c < width; c++) to[c] += scale[row] * (d[c] * gain[c] - from[c] * scale[row] * along);
    }
}

static inline void rmsnorm_backward_gain(real *dgain, const real *dout, const real *x, const real *scale, int64_t rows,
                                         int64_t width) {
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t c = 0; c < width; c++) dgain[c] += dout[row * width + c] * x[row * width + c] * scale[row];
    }
}

/* ================================================================================================================
   >>rope    rotary position embedding, the form that pairs feature i with feature i + head_dim / 2
   ================================================================================================================ */

/* The angles of each row: cosine and sine are (rows, head_dim / 2). They depend on the token's position in its own
   sequence, so a token gets the same ones in whatever chunk it lies. */
static inline void rope_angles(real *cosine, real *sine, const int32_t *position, int64_t rows, int64_t head_dim,
                               double theta) {
    int64_t half = head_dim / 2;
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t i = 0; i < half; i++) {
            double angle = position[row] * pow(theta, -(double)i / (double)half);
            cosine[row * half + i] = (real)cos(angle);
            sine[row * half + i] = (real)sin(angle);
        }
    }
}

/* Rotates x (rows, heads, head_dim) in place: direction 1 forward, -1 backward, for the inverse of a rotation is its
   transpose. */
static inline void rope_rotate(real *x, const real *cosine, const real *sine, int64_t rows, int64_t heads,
                               int64_t head_dim, int direction) {
    int64_t half = head_dim / 2;
    for (int64_t row = 0; row < rows; row++) {
        const real *co = cosine + row * half, *si = sine + row * half;
        for (int64_t head = 0; head < heads; head++) {
            real *low = x + (row * heads + head) * head_dim, *high = low + half;
            for (int64_t i = 0; i < half; i++) {
                real a = low[i], b = high[i], s = (real)direction * si[i];
                low[i] = a * co[i] - b * s;
                high[i] = b * co[i] + a * s;
            }
        }
    }
}

/* ================================================================================================================
   >>attention    grouped-query, causal, variable-length, with carried state

   One chunk's queries are `rows` rows; its keys are those of the prefix (in the group's state) followed by its own
   rows. They are described as flash_attn_varlen_func wants them: sequence s has the queries cu_seqlens_q[s] ..
   cu_seqlens_q[s + 1] and likewise keys; the mask is causal and aligned bottom-right: with more keys than queries, the
   last query sees all keys.

   No matrix of scores is ever stored: LANES queries (or keys) are handled side by side, the softmax runs along with the
   sum (as in flash attention), and the backward computes the probabilities anew from the stored log-sum-exp.
   ================================================================================================================ */

#define LANES 32     /* queries, or keys, of a tile */
#define KEY_BLOCK 32 /* keys between two corrections of the running softmax */
#define MAX_HEAD_DIM 256

/* LANES queries or keys of one slice. */
typedef struct attention_tile {
    int32_t slice;
    int64_t first; /* counted in the slice */
} attention_tile;

typedef struct attention_problem {
    int64_t heads, kv_heads, head_dim;
    int64_t prefix; /* keys in the state */
    const int32_t *cu_seqlens_q, *cu_seqlens_k;
    const attention_tile *query_tiles, *key_tiles;
    int64_t n_query_tiles, n_key_tiles;
    const real *q;                  /* (rows, heads, head_dim) */
    const real *k, *v;              /* (rows, kv_heads, head_dim): the chunk's own */
    const real *state_k, *state_v;  /* (prefix, kv_heads, head_dim); NULL where prefix is 0 */
} attention_problem;

/* What a tile needs to know about its slice. */
typedef struct attention_slice {
    int64_t first_query, n_queries; /* rows of the chunk */
    int64_t first_key, n_keys;      /* in [prefix | chunk] */
    int64_t lead;                   /* query i sees the keys 0 .. lead + i of the slice */
} attention_slice;

static inline attention_slice attention_slice_of(const attention_problem *p, int32_t s) {
    attention_slice slice;
    slice.first_query = p->cu_seqlens_q[s];
    slice.n_queries = p->cu_seqlens_q[s + 1] - slice.first_query;
    slice.first_key = p->cu_seqlens_k[s];
    slice.n_keys = p->cu_seqlens_k[s + 1] - slice.first_key;
    slice.lead = slice.n_keys - slice.n_queries;
    return slice;
}

/* Row `key` of [prefix | chunk], at the head's first feature. */
static inline const real *key_row(const attention_problem *p, const real *state, const real *own, int64_t key,
                                  int64_t kv_head) {
    int64_t feature = kv_head * p->head_dim, width = p->kv_heads * p->head_dim;
    return key < p->prefix ? state + key * width + feature : own + (key - p->prefix) * width + feature;
}

/* Adds lane `lane` of a tile to the same row of the gradients. */
static inline void key_row_add(const attention_problem *p, real *state, real *own, int64_t key, int64_t kv_head,
                               real tile[][LANES], int lane) {
    int64_t feature = kv_head * p->head_dim, width = p->kv_heads * p->head_dim;
    real *row = key < p->prefix ? state + key * width + feature : own + (key - p->prefix) * width + feature;
    for (int64_t d = 0; d < p->head_dim; d++) row[d] += tile[d][lane];
}

/* tile[d][lane] = row[d] * scale. A tile holds its rows as columns, so that all its loops run over lanes. */
static inline void tile_put(real tile[][LANES], int lane, const real *row, int64_t head_dim, real scale) {
    for (int64_t d = 0; d < head_dim; d++) tile[d][lane] = row[d] * scale;
}

static inline void tile_clear(real tile[][LANES], int64_t head_dim) {
    memset(tile, 0, (size_t)head_dim * LANES * sizeof(real));
}

/* out[lane] = sum over d of tile[d][lane] * vector[d] */
static inline void tile_dot(real *restrict out, real tile[restrict][LANES], const real *restrict vector,
                            int64_t head_dim) {
    int64_t d = 0;
    for (int lane = 0; lane < LANES; lane++) out[lane] = 0;
    for (; d + 4 <= head_dim; d += 4) { /* four at a time, as in matmul_row */
        real v0 = vector[d], v1 = vector[d + 1], v2 = vector[d + 2], v3 = vector[d + 3];
        for (int lane = 0; lane < LANES; lane++) {
            out[lane] += tile[d][lane] * v0 + tile[d + 1][lane] * v1 + tile[d + 2][lane] * v2 + tile[d + 3][lane] * v3;
        }
    }
    for (; d < head_dim; d++) {
        for (int lane = 0; lane < LANES; lane++) out[lane] += tile[d][lane] * vector[d];
    }
}

/* tile[d][lane] += weight[lane] * vector[d] */
static inline void tile_add(real tile[restrict][LANES], const real *restrict weight, const real *restrict vector,
                            int64_t head_dim) {
    for (int64_t d = 0; d < head_dim; d++) {
        real v = vector[d];
        for (int lane = 0; lane < LANES; lane++) tile[d][lane] += weight[lane] * v;
    }
}

static inline real softmax_scale(const attention_problem *p) { return 1 / real_sqrt((real)p->head_dim); }

/* Scores of a tile of queries with one key; -infinity where the mask hides the key. */
static inline void query_scores(real score[LANES], real query[][LANES], const real *key, int64_t head_dim,
                                int64_t key_index, int64_t last_key_of_first_lane) {
    tile_dot(score, query, key, head_dim);
    for (int64_t lane = 0; lane < key_index - last_key_of_first_lane && lane < LANES; lane++) score[lane] = -INFINITY;
}

static inline void attention_forward_tile(const attention_problem *p, real *out, real *lse, attention_tile at,
                                          int64_t head) {
    real query[MAX_HEAD_DIM][LANES], sum_v[MAX_HEAD_DIM][LANES], score[KEY_BLOCK][LANES];
    real highest[LANES], total[LANES] = {0};
    attention_slice slice = attention_slice_of(p, at.slice);
    int64_t hd = p->head_dim, kv_head = head / (p->heads / p->kv_heads);
    int64_t first_row = slice.first_query + at.first, n_lanes = min_of(LANES, slice.n_queries - at.first);
    int64_t sees = slice.lead + at.first; /* last key of lane 0 */
    int64_t n_keys = sees + n_lanes;
    tile_clear(query, hd);
    tile_clear(sum_v, hd);
    for (int lane = 0; lane < LANES; lane++) highest[lane] = -INFINITY;
    for (int lane = 0; lane < n_lanes; lane++) {
        tile_put(query, lane, p->q + ((first_row + lane) * p->heads + head) * hd, hd, softmax_scale(p));
    }
    for (int64_t block = 0; block < n_keys; block += KEY_BLOCK) {
        int64_t n_block = min_of(KEY_BLOCK, n_keys - block);
        real before[LANES];
        memcpy(before, highest, sizeof before);
        for (int64_t j = 0; j < n_block; j++) {
            const real *k = key_row(p, p->state_k, p->k, slice.first_key + block + j, kv_head);
            query_scores(score[j], query, k, hd, block + j, sees);
            for (int lane = 0; lane < LANES; lane++) {
                highest[lane] = score[j][lane] > highest[lane] ? score[j][lane] : highest[lane];
            }
        }
        real shrink[LANES]; /* puts what was summed so far in terms of the new highest score */
        for (int lane = 0; lane < LANES; lane++) shrink[lane] = real_exp(before[lane] - highest[lane]);
        for (int lane = 0; lane < LANES; lane++) total[lane] *= shrink[lane];
        for (int64_t d = 0; d < hd; d++) {
            for (int lane = 0; lane < LANES; lane++) sum_v[d][lane] *= shrink[lane];
        }
        for (int64_t j = 0; j < n_block; j++) {
            const real *v = key_row(p, p->state_v, p->v, slice.first_key + block + j, kv_head);
            for (int lane = 0; lane < LANES; lane++) {
                score[j][lane] = real_exp(score[j][lane] - highest[lane]);
                total[lane] += score[j][lane];
            }
            tile_add(sum_v, score[j], v, hd);
        }
    }
    for (int lane = 0; lane < n_lanes; lane++) {
        int64_t row = (first_row + lane) * p->heads + head;
        for (int64_t d = 0; d < hd; d++) out[row * hd + d] = sum_v[d][lane] / total[lane];
        lse[row] = highest[lane] + (real)log((double)total[lane]);
    }
}

/* What the backward reads and writes beyond the problem. */
typedef struct attention_gradients {
    const real *out, *dout, *lse;
    real *slope;               /* (rows, heads), scratch: sum over d of dout * out */
    real *dq;                  /* (rows, heads, head_dim), overwritten where there is a query */
    real *dk, *dv;             /* (rows, kv_heads, head_dim): added to */
    real *state_dk, *state_dv; /* (prefix, kv_heads, head_dim): added to */
} attention_gradients;

static inline void attention_backward_queries(const attention_problem *p, const attention_gradients *g,
                                              attention_tile at, int64_t head) {
    real query[MAX_HEAD_DIM][LANES], dout[MAX_HEAD_DIM][LANES], dquery[MAX_HEAD_DIM][LANES];
    real lse[LANES] = {0}, slope[LANES] = {0};
    attention_slice slice = attention_slice_of(p, at.slice);
    int64_t hd = p->head_dim, kv_head = head / (p->heads / p->kv_heads);
    int64_t first_row = slice.first_query + at.first, n_lanes = min_of(LANES, slice.n_queries - at.first);
    int64_t sees = slice.lead + at.first, n_keys = sees + n_lanes;
    tile_clear(query, hd);
    tile_clear(dout, hd);
    tile_clear(dquery, hd);
    for (int lane = 0; lane < n_lanes; lane++) {
        int64_t row = (first_row + lane) * p->heads + head;
        tile_put(query, lane, p->q + row * hd, hd, softmax_scale(p));
        tile_put(dout, lane, g->dout + row * hd, hd, 1);
        lse[lane] = g->lse[row];
        for (int64_t d = 0; d < hd; d++) slope[lane] += g->dout[row * hd + d] * g->out[row * hd + d];
        g->slope[row] = slope[lane];
    }
    for (int64_t j = 0; j < n_keys; j++) {
        const real *k = key_row(p, p->state_k, p->k, slice.first_key + j, kv_head);
        const real *v = key_row(p, p->state_v, p->v, slice.first_key + j, kv_head);
        real score[LANES], dscore[LANES];
        query_scores(score, query, k, hd, j, sees);
        tile_dot(dscore, dout, v, hd);
        for (int lane = 0; lane < LANES; lane++) {
            dscore[lane] = real_exp(score[lane] - lse[lane]) * (dscore[lane] - slope[lane]);
        }
        tile_add(dquery, dscore, k, hd);
    }
    for (int lane = 0; lane < n_lanes; lane++) {
        real *dq = g->dq + ((first_row + lane) * p->heads + head) * hd;
        for (int64_t d = 0; d < hd; d++) dq[d] = dquery[d][lane] * softmax_scale(p);
    }
}

static inline void attention_backward_keys(const attention_problem *p, const attention_gradients *g, attention_tile at,
                                           int64_t kv_head) {
    real key[MAX_HEAD_DIM][LANES], value[MAX_HEAD_DIM][LANES], dkey[MAX_HEAD_DIM][LANES], dvalue[MAX_HEAD_DIM][LANES];
    attention_slice slice = attention_slice_of(p, at.slice);
    int64_t hd = p->head_dim, share = p->heads / p->kv_heads, n_lanes = min_of(LANES, slice.n_keys - at.first);
    real scale = softmax_scale(p);
    tile_clear(key, hd);
    tile_clear(value, hd);
    tile_clear(dkey, hd);
    tile_clear(dvalue, hd);
    for (int lane = 0; lane < n_lanes; lane++) {
        tile_put(key, lane, key_row(p, p->state_k, p->k, slice.first_key + at.first + lane, kv_head), hd, scale);
        tile_put(value, lane, key_row(p, p->state_v, p->v, slice.first_key + at.first + lane, kv_head), hd, 1);
    }
    for (int64_t head = kv_head * share; head < (kv_head + 1) * share; head++) {
        for (int64_t i = max_of(0, at.first - slice.lead); i < slice.n_queries; i++) {
            int64_t row = (slice.first_query + i) * p->heads + head;
            real weight[LANES], dscore[LANES];
            tile_dot(weight, key, p->q + row * hd, hd);
            tile_dot(dscore, value, g->dout + row * hd, hd);
            int64_t first_hidden = max_of(0, slice.lead + i + 1 - at.first);
            for (int64_t lane = first_hidden; lane < LANES; lane++) weight[lane] = -INFINITY;
            for (int lane = 0; lane < LANES; lane++) {
                weight[lane] = real_exp(weight[lane] - g->lse[row]);
                dscore[lane] = weight[lane] * (dscore[lane] - g->slope[row]) * scale;
            }
            tile_add(dvalue, weight, g->dout + row * hd, hd);
            tile_add(dkey, dscore, p->q + row * hd, hd);
        }
    }
    for (int lane = 0; lane < n_lanes; lane++) {
        key_row_add(p, g->state_dk, g->dk, slice.first_key + at.first + lane, kv_head, dkey, lane);
        key_row_add(p, g->state_dv, g->dv, slice.first_key + at.first + lane, kv_head, dvalue, lane);
    }
}

/* ================================================================================================================
   >>feed-forward    SwiGLU: out = silu(gate) * up
   ================================================================================================================ */

static inline real sigmoid(real x) { return 1 / (1 + real_exp(-x)); }

static inline void swiglu_forward(real *out, const real *gate, const real *up, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] = gate[i] * sigmoid(gate[i]) * up[i];
}

/* dgate and dup may not be dout. */
static inline void swiglu_backward(real *dgate, real *dup, const real *dout, const real *gate, const real *up,
                                   int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        real s = sigmoid(gate[i]);
        dgate[i] = dout[i] * up[i] * s * (1 + gate[i] * (1 - s));
        dup[i] = dout[i] * gate[i] * s;
    }
}

/* ================================================================================================================
   >>dropout    on the branches that are added to the residual stream

   The mask is not stored. Whether an element is dropped is a pure function of (seed, layer, site, sequence, position,
   feature). A replay therefore repeats the first forward, a backward finds the same mask, and a token is treated alike
   in whatever chunk, order or rank it is computed: chunked training equals unchunked training with dropout as well. (If
   only replays must repeat, cf_step.seed is enough: it is the same in every pass of a chunk.)
   ================================================================================================================ */

typedef struct dropout_mask {
    double rate;             /* probability of dropping; 0: no dropout */
    uint64_t seed;           /* of this step of this run, this layer and this site */
    const int32_t *sequence; /* (rows), -1 in padding */
    const int32_t *position; /* (rows) */
} dropout_mask;

/* 0, or 1 / (1 - rate), for a feature of the row whose random stream is `key`. */
static inline real dropout_factor(const dropout_mask *mask, uint64_t key, int64_t feature) {
    return uniform_of(mix64(key + (uint64_t)feature)) < mask->rate ? 0 : (real)(1 / (1 - mask->rate));
}

static inline uint64_t dropout_key(const dropout_mask *mask, int64_t row) {
    uint64_t token = (uint64_t)(uint32_t)mask->sequence[row] << 32 | (uint32_t)mask->position[row];
    return mix64_pair(mask->seed, token);
}

/* out = base + branch * mask; out may be base, and base NULL counts as 0. */
static inline void add_with_dropout(real *out, const real *base, const real *branch, const dropout_mask *mask,
                                    int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; row++) {
        uint64_t key = mask->rate > 0 ? dropout_key(mask, row) : 0;
        for (int64_t c = 0; c < width; c++) {
            int64_t i = row * width + c;
            real factor = mask->rate > 0 ? dropout_factor(mask, key, c) : 1;
            out[i] = (base ? base[i] : 0) + branch[i] * factor;
        }
    }
}

/* ================================================================================================================
   >>embedding
   ================================================================================================================ */

/* A token of -1 (padding) gives a row of zeros. */
static inline void embedding_forward(real *out, const int32_t *token, const real *table, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; row++) {
        if (token[row] < 0) {
            memset(out + row * width, 0, (size_t)width * sizeof(real));
        } else {
            memcpy(out + row * width, table + token[row] * width, (size_t)width * sizeof(real));
        }
    }
}

static inline void embedding_backward(real *dtable, const int32_t *token, const real *dout, int64_t rows,
                                      int64_t width) {
    for (int64_t row = 0; row < rows; row++) {
        if (token[row] < 0) continue;
        for (int64_t c = 0; c < width; c++) dtable[token[row] * width + c] += dout[row * width + c];
    }
}

/* ================================================================================================================
   >>loss    cross-entropy
   ================================================================================================================ */

/* Turns logits (rows, vocabulary) into probabilities in place. row_loss: -log(probability of the target), 0 in rows
   whose target is -1. */
static inline void cross_entropy_forward(real *logits, double *row_loss, const int32_t *target, int64_t rows,
                                         int64_t vocabulary) {
    for (int64_t row = 0; row < rows; row++) {
        real *x = logits + row * vocabulary;
        real highest = x[0], total = 0, wanted = target[row] >= 0 ? x[target[row]] : 0;
        for (int64_t c = 1; c < vocabulary; c++) highest = x[c] > highest ? x[c] : highest;
        for (int64_t c = 0; c < vocabulary; c++) {
            x[c] = real_exp(x[c] - highest);
            total += x[c];
        }
        for (int64_t c = 0; c < vocabulary; c++) x[c] /= total;
        row_loss[row] = target[row] >= 0 ? log((double)total) - (double)(wanted - highest) : 0;
    }
}

/* Turns the probabilities into gradients of the logits in place. weight: of each row's loss. */
static inline void cross_entropy_backward(real *probability, const int32_t *target, const double *weight, int64_t rows,
                                          int64_t vocabulary) {
    for (int64_t row = 0; row < rows; row++) {
        real *x = probability + row * vocabulary;
        real factor = target[row] >= 0 ? (real)weight[row] : 0;
        for (int64_t c = 0; c < vocabulary; c++) x[c] *= factor;
        if (target[row] >= 0) x[target[row]] -= factor;
    }
}

#endif /* TRAIN_KERNELS_H */
