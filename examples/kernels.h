/* kernels.h - the arithmetic of a decoder on the CPU, forward and backward - MIT or public domain

   Matrices are row-major: rows are tokens of a chunk, columns are features. Every forward overwrites its output; every
   backward overwrites gradients of activations (unless it says "adds") and adds to gradients of parameters.

   Determinism: these functions do not depend on threads. Each output is one sum that always runs in the same order,
   however the caller divides rows or tiles. So results have the same bits for any number of threads, and a second
   forward repeats the first.

   Sections: >>matmul >>norm >>rope >>attention >>feed-forward >>dropout >>embedding >>loss. */

#ifndef TRAIN_KERNELS_H
#define TRAIN_KERNELS_H

#include "base.h"

/* ================================================================================================================
   >>matmul
   ================================================================================================================ */

/* The left matrix of matmul: item (i, j) is data[i * row + j * column]. */
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

/* out[n] += sum over k of x[k * step] * y[k][n]. It takes four rows of y at a time, so that out is loaded and stored a
   quarter as often; compilers vectorise the loop as it is. Most of the training time is spent here. */
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

#define DEPTH_BLOCK 32 /* rows of b that stay in the cache while all rows of a use them; a multiple of 4 */

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

/* Has a matrix for each head: out[head][o] = sum over i of x[head][i] * weight[head][i][o]. Strides of rows of x and
   out may be larger than the heads' own parts. */
static inline void heads_forward(real *out, int64_t out_stride, const real *x, int64_t x_stride, const real *weight,
                                 int64_t rows, int64_t heads, int64_t inputs, int64_t outputs) {
    for (int64_t at = 0; at < rows * heads; at++) {
        matmul(out + at * out_stride, MATMUL_SET, matrix_of(x + at * x_stride, inputs),
               weight + at % heads * inputs * outputs, NULL, 1, outputs, inputs);
    }
}

static inline void heads_backward(real *dx, int64_t x_stride, const real *dout, int64_t out_stride, const real *weight,
                                  int64_t rows, int64_t heads, int64_t inputs, int64_t outputs) {
    for (int64_t at = 0; at < rows * heads; at++) {
        const real *w = weight + at % heads * inputs * outputs, *d = dout + at * out_stride;
        for (int64_t i = 0; i < inputs; i++) {
            real sum = 0;
            for (int64_t o = 0; o < outputs; o++) sum += w[i * outputs + o] * d[o];
            dx[at * x_stride + i] = sum;
        }
    }
}

static inline void heads_gradient(real *dweight, const real *x, int64_t x_stride, const real *dout, int64_t out_stride,
                                  int64_t rows, int64_t heads, int64_t inputs, int64_t outputs) {
    PARALLEL_FOR
    for (int64_t head = 0; head < heads; head++) {
        for (int64_t row = 0; row < rows; row++) {
            const real *from = x + (row * heads + head) * x_stride, *d = dout + (row * heads + head) * out_stride;
            for (int64_t i = 0; i < inputs; i++) {
                for (int64_t o = 0; o < outputs; o++) dweight[(head * inputs + i) * outputs + o] += from[i] * d[o];
            }
        }
    }
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
        real along = 0; /* mean of dout * gain * x / rms: the part of the gradient that dividing by rms removes */
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

/* Computes the angles of each row: cosine and sine are (rows, head_dim / 2). They depend on the token's position in its
   own sequence, so a token has the same angles in any chunk. */
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

/* Rotates the first `head_dim` numbers of each head of x (rows, heads, stride) in place. direction: 1 forward, -1
   backward, because the inverse of a rotation is its transpose. */
static inline void rope_rotate_part(real *x, int64_t stride, const real *cosine, const real *sine, int64_t rows,
                                    int64_t heads, int64_t head_dim, int direction) {
    int64_t half = head_dim / 2;
    for (int64_t row = 0; row < rows; row++) {
        const real *co = cosine + row * half, *si = sine + row * half;
        for (int64_t head = 0; head < heads; head++) {
            real *low = x + (row * heads + head) * stride, *high = low + half;
            for (int64_t i = 0; i < half; i++) {
                real a = low[i], b = high[i], s = (real)direction * si[i];
                low[i] = a * co[i] - b * s;
                high[i] = b * co[i] + a * s;
            }
        }
    }
}

static inline void rope_rotate(real *x, const real *cosine, const real *sine, int64_t rows, int64_t heads,
                               int64_t head_dim, int direction) {
    rope_rotate_part(x, head_dim, cosine, sine, rows, heads, head_dim, direction);
}

/* ================================================================================================================
   >>attention    grouped-query, causal, variable-length, block after block of keys

   One chunk's queries are `rows` rows; its keys are those of the prefix (in the chain's state) followed by its own
   rows. They are described as for flash_attn_varlen_func: sequence s has the queries cu_seqlens_q[s] .. cu_seqlens_q[s
   + 1], and keys in the same way. The mask is causal and aligned bottom-right: with more keys than queries, the last
   query sees all keys, or with a window the last `window` of them, or those of its own block. Only slice 0 has a
   prefix. With sinks each softmax has one more term, whose value is 0.

   Keys come in blocks: any number of blocks of the prefix, in order, and then the chunk's own rows.

       forward     attention_forward_begin,  attention_forward_tile of each block,  attention_forward_end
       backward    attention_backward_begin,  attention_backward_queries and attention_backward_keys of each block

   Between two blocks the forward leaves three unscaled results of each query in the place of its outputs: the highest
   score, the sum of weights, and the weighted sum of V. The backward adds to dQ; dK and dV of a block of the prefix are
   final after it. If each block of the prefix except the last has a multiple of KEY_BLOCK keys, the choice of blocks
   changes no bit. The first block begins where the first query's window does; earlier keys are never read.

   If sequences share rows, keys are in several places, and each slice sees its own part of each place, which a
   key_level describes. The forward's results also carry over from place to place. (Kernels that finish with each call
   merge their results by log-sum-exp.)

   No matrix of scores is stored. LANES queries (or keys) are handled side by side, the softmax is updated along with
   the sum (as in flash attention), and the backward recomputes the probabilities from the stored log-sum-exp.
   ================================================================================================================
   */

#define LANES 32     /* queries, or keys, of a tile */
#define KEY_BLOCK 32 /* keys between two corrections of the running softmax; a multiple of LANES */
#define MAX_HEAD_DIM 256

/* LANES queries of one slice, or LANES of its keys in one block. */
typedef struct attention_tile {
    int32_t slice;
    int64_t first; /* counted within the slice, or within its part of the block */
} attention_tile;

typedef struct attention_problem {
    int64_t heads, kv_heads, head_dim;
    int64_t window;              /* keys that a query sees, its own included; 0: all up to its own; below 0: those of
                                    its block of -window keys, counted from the start of the sequence */
    double scale;                /* of scores; 0 means 1 / sqrt(head_dim) */
    const real *sinks;           /* (heads) a score without a value; NULL: none */
    const int32_t *cu_seqlens_q, *cu_seqlens_k;
    const int32_t *position;     /* (rows) with key_levels, which replace cu_seqlens_k; else NULL */
    const attention_tile *tiles; /* all rows, as queries or as own keys; those of slice 0 come first */
    int64_t n_tiles;
    const real *q;               /* (rows, heads, head_dim) */
} attention_problem;

/* The rows of a place of keys that rows of the chunk see: rows cu_seqlens_q[t] .. cu_seqlens_q[t + 1] - 1 see all of
   the rows cu_seqlens_k[t] .. cu_seqlens_k[t + 1] - 1 there, except those that a window hides. */
typedef struct key_level {
    int64_t n_seqs;
    const int32_t *cu_seqlens_q, *cu_seqlens_k;
} key_level;

/* Keys that are taken at a time: rows of the prefix or of another place, or all of the chunk's own. */
typedef struct key_block {
    real *k, *v;            /* (count, kv_heads, head_dim) */
    real *dk, *dv;          /* the same; a backward adds to them */
    int64_t first, count;   /* the first row is key `first` of the sequences that see it; not used with `own` */
    int own;
    const key_level *level; /* NULL: slice 0 sees all of a prefix, and every slice sees its own rows of the chunk */
    int64_t at;             /* with a level: the first row's index in the place */
} key_block;

/* The slice of a tile. */
typedef struct attention_slice {
    int64_t first_row, n_rows; /* of the chunk */
    int64_t lead;              /* the last key that query i sees is key lead + i of the slice */
} attention_slice;

static inline attention_slice attention_slice_of(const attention_problem *p, int32_t s) {
    attention_slice slice;
    slice.first_row = p->cu_seqlens_q[s];
    slice.n_rows = p->cu_seqlens_q[s + 1] - slice.first_row;
    slice.lead = p->cu_seqlens_k[s + 1] - p->cu_seqlens_k[s] - slice.n_rows;
    if (p->position) slice.lead = p->position[slice.first_row];
    return slice;
}

/* A slice's keys in a block: first .. end - 1; the first is in row `row` of the block. */
typedef struct key_range {
    int64_t first, end, row;
} key_range;

static inline key_range range_of_level(const attention_problem *p, const key_block *keys,
                                       const attention_slice *slice) {
    const key_level *level = keys->level;
    key_range range = {0, 0, 0};
    int64_t t = 0;
    while (level->cu_seqlens_q[t + 1] <= slice->first_row) t++;
    int64_t row = max_of(level->cu_seqlens_k[t], keys->at);
    int64_t count = min_of(level->cu_seqlens_k[t + 1], keys->at + keys->count) - row;
    if (count <= 0) return range;
    range.row = row - keys->at;
    range.first = keys->own ? p->position[row] : keys->first + range.row;
    range.end = range.first + count;
    return range;
}

static inline key_range key_range_of(const attention_problem *p, const key_block *keys, const attention_slice *slice) {
    key_range own = {slice->lead, slice->lead + slice->n_rows, slice->first_row};
    key_range prefix = {keys->first, keys->first + keys->count, 0};
    if (keys->level) return range_of_level(p, keys, slice);
    return keys->own ? own : prefix;
}

/* Returns the place of a head's first feature in a row of a block's K, V, dK or dV. */
static inline int64_t key_at(const attention_problem *p, int64_t row, int64_t kv_head) {
    return (row * p->kv_heads + kv_head) * p->head_dim;
}

/* tile[d][lane] = row[d] * scale. A tile stores its rows as columns, so that all loops run over lanes. */
static inline void tile_put(real tile[][LANES], int lane, const real *row, int64_t head_dim, real scale) {
    for (int64_t d = 0; d < head_dim; d++) tile[d][lane] = row[d] * scale;
}

/* row[d] = tile[d][lane] */
static inline void tile_get(real *row, real tile[][LANES], int lane, int64_t head_dim) {
    for (int64_t d = 0; d < head_dim; d++) row[d] = tile[d][lane];
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

/* Returns the first key seen by a query whose last one is `last`. */
static inline int64_t first_key_of(int64_t window, int64_t last) {
    if (window < 0) return last / -window * -window;
    return window > 0 ? max_of(0, last - window + 1) : 0;
}

/* Returns the end of the queries that see key `key`: those whose last key comes before it. */
static inline int64_t end_of_sight(int64_t window, int64_t key) {
    if (window < 0) return (key / -window + 1) * -window;
    return window > 0 ? key + window : INT64_MAX;
}

static inline real softmax_scale(const attention_problem *p) {
    return p->scale > 0 ? (real)p->scale : 1 / real_sqrt((real)p->head_dim);
}

/* Computes scores of a tile of queries with one key; -infinity if the mask hides the key. */
static inline void query_scores(real score[LANES], real query[][LANES], const real *key, const attention_problem *p,
                                int64_t key_index, int64_t last_key_of_first_lane) {
    int64_t n_above = min_of(LANES, key_index - last_key_of_first_lane);
    int64_t first_past = end_of_sight(p->window, key_index) - last_key_of_first_lane;
    tile_dot(score, query, key, p->head_dim);
    for (int64_t lane = 0; lane < n_above; lane++) score[lane] = -INFINITY;
    for (int64_t lane = first_past; lane < LANES; lane++) score[lane] = -INFINITY;
}

/* Partial results: (rows, heads, head_dim) and (rows, heads) twice. Between blocks they are the sum of V, weighted by
   exponentials of scores less the highest; that highest score; and the sum of the weights. */
typedef struct attention_results {
    real *out, *lse, *total;
} attention_results;

static inline void attention_forward_begin(const attention_problem *p, const attention_results *r, int64_t rows) {
    memset(r->out, 0, (size_t)(rows * p->heads * p->head_dim) * sizeof(real));
    for (int64_t i = 0; i < rows * p->heads; i++) {
        r->lse[i] = p->sinks ? p->sinks[i % p->heads] : -INFINITY;
        r->total[i] = p->sinks ? 1 : 0;
    }
}

static inline void attention_forward_end(const attention_problem *p, const attention_results *r, int64_t rows) {
    for (int64_t i = 0; i < rows * p->heads; i++) {
        for (int64_t d = 0; d < p->head_dim; d++) r->out[i * p->head_dim + d] /= r->total[i];
        r->lse[i] += (real)log((double)r->total[i]);
    }
}

/* A tile of queries on its way through the keys of a block. */
typedef struct query_tile {
    real query[MAX_HEAD_DIM][LANES], sum_v[MAX_HEAD_DIM][LANES], score[KEY_BLOCK][LANES];
    real highest[LANES], total[LANES];
    real base[LANES]; /* the highest score; 0 for a query that has seen no key yet, which a window can cause */
} query_tile;

/* Rescales the sums so far to the new highest score. */
static inline void query_tile_rescale(query_tile *t, const real before[LANES], int64_t head_dim) {
    real shrink[LANES];
    for (int lane = 0; lane < LANES; lane++) t->base[lane] = t->highest[lane] > -INFINITY ? t->highest[lane] : 0;
    for (int lane = 0; lane < LANES; lane++) shrink[lane] = real_exp(before[lane] - t->base[lane]);
    for (int lane = 0; lane < LANES; lane++) t->total[lane] *= shrink[lane];
    for (int64_t d = 0; d < head_dim; d++) {
        for (int lane = 0; lane < LANES; lane++) t->sum_v[d][lane] *= shrink[lane];
    }
}

/* Adds at most KEY_BLOCK keys, from row `row` of the block on; the first is key `first` of the slice. */
static inline void query_tile_add(query_tile *t, const attention_problem *p, const key_block *keys, int64_t row,
                                  int64_t kv_head, int64_t first, int64_t count, int64_t sees) {
    real before[LANES];
    memcpy(before, t->highest, sizeof before);
    for (int64_t j = 0; j < count; j++) {
        query_scores(t->score[j], t->query, keys->k + key_at(p, row + j, kv_head), p, first + j, sees);
        for (int lane = 0; lane < LANES; lane++) {
            t->highest[lane] = t->score[j][lane] > t->highest[lane] ? t->score[j][lane] : t->highest[lane];
        }
    }
    query_tile_rescale(t, before, p->head_dim);
    for (int64_t j = 0; j < count; j++) {
        for (int lane = 0; lane < LANES; lane++) {
            t->score[j][lane] = real_exp(t->score[j][lane] - t->base[lane]);
            t->total[lane] += t->score[j][lane];
        }
        tile_add(t->sum_v, t->score[j], keys->v + key_at(p, row + j, kv_head), p->head_dim);
    }
}

static inline void attention_forward_tile(const attention_problem *p, const key_block *keys, const attention_results *r,
                                          attention_tile at, int64_t head) {
    query_tile t;
    attention_slice slice = attention_slice_of(p, at.slice);
    key_range range = key_range_of(p, keys, &slice);
    int64_t hd = p->head_dim, kv_head = head / (p->heads / p->kv_heads);
    int64_t n_lanes = min_of(LANES, slice.n_rows - at.first);
    int64_t sees = slice.lead + at.first; /* last key of lane 0 */
    int64_t end = min_of(range.end, sees + n_lanes), first = (slice.first_row + at.first) * p->heads + head;
    tile_clear(t.query, hd);
    tile_clear(t.sum_v, hd);
    for (int lane = 0; lane < LANES; lane++) {
        int64_t row = first + lane * p->heads;
        t.highest[lane] = lane < n_lanes ? r->lse[row] : -INFINITY;
        t.total[lane] = lane < n_lanes ? r->total[row] : 0;
        if (lane < n_lanes) tile_put(t.query, lane, p->q + row * hd, hd, softmax_scale(p));
        if (lane < n_lanes) tile_put(t.sum_v, lane, r->out + row * hd, hd, 1);
    }
    int64_t count, key = max_of(range.first, first_key_of(p->window, sees));
    for (; key < end; key += count) { /* up to the next multiple of KEY_BLOCK */
        count = min_of(KEY_BLOCK - (key - range.first) % KEY_BLOCK, end - key);
        query_tile_add(&t, p, keys, range.row + key - range.first, kv_head, key, count, sees);
    }
    for (int lane = 0; lane < n_lanes; lane++) {
        int64_t row = first + lane * p->heads;
        tile_get(r->out + row * hd, t.sum_v, lane, hd);
        r->lse[row] = t.highest[lane];
        r->total[row] = t.total[lane];
    }
}

/* The arrays that backward reads and writes in addition to the problem and its keys. */
typedef struct attention_gradients {
    const real *out, *dout, *lse;
    real *slope; /* (rows, heads), scratch: sum over d of dout * out */
    real *dq;    /* (rows, heads, head_dim) */
} attention_gradients;

static inline void attention_backward_begin(const attention_problem *p, const attention_gradients *g, int64_t rows) {
    memset(g->dq, 0, (size_t)(rows * p->heads * p->head_dim) * sizeof(real));
    for (int64_t i = 0; i < rows * p->heads; i++) {
        g->slope[i] = 0;
        for (int64_t at = i * p->head_dim; at < (i + 1) * p->head_dim; at++) g->slope[i] += g->dout[at] * g->out[at];
    }
}

/* Adds the sinks' gradients, once slope is known: their probability times 0 - slope. */
static inline void attention_backward_sinks(const attention_problem *p, const attention_gradients *g, real *dsinks,
                                            int64_t rows) {
    for (int64_t i = 0; i < rows * p->heads; i++) {
        dsinks[i % p->heads] -= real_exp(p->sinks[i % p->heads] - g->lse[i]) * g->slope[i];
    }
}

/* Adds to dq. */
static inline void attention_backward_queries(const attention_problem *p, const key_block *keys,
                                              const attention_gradients *g, attention_tile at, int64_t head) {
    real query[MAX_HEAD_DIM][LANES], dout[MAX_HEAD_DIM][LANES], dquery[MAX_HEAD_DIM][LANES];
    real lse[LANES] = {0}, slope[LANES] = {0}, scale = softmax_scale(p);
    attention_slice slice = attention_slice_of(p, at.slice);
    key_range range = key_range_of(p, keys, &slice);
    int64_t hd = p->head_dim, kv_head = head / (p->heads / p->kv_heads);
    int64_t n_lanes = min_of(LANES, slice.n_rows - at.first), sees = slice.lead + at.first;
    int64_t end = min_of(range.end, sees + n_lanes), first = (slice.first_row + at.first) * p->heads + head;
    tile_clear(query, hd);
    tile_clear(dout, hd);
    tile_clear(dquery, hd);
    for (int lane = 0; lane < n_lanes; lane++) {
        int64_t row = first + lane * p->heads;
        tile_put(query, lane, p->q + row * hd, hd, scale);
        tile_put(dout, lane, g->dout + row * hd, hd, 1);
        tile_put(dquery, lane, g->dq + row * hd, hd, 1);
        lse[lane] = g->lse[row];
        slope[lane] = g->slope[row];
    }
    for (int64_t key = max_of(range.first, first_key_of(p->window, sees)); key < end; key++) {
        int64_t from = key_at(p, range.row + key - range.first, kv_head);
        real score[LANES], dscore[LANES];
        query_scores(score, query, keys->k + from, p, key, sees);
        tile_dot(dscore, dout, keys->v + from, hd);
        for (int lane = 0; lane < LANES; lane++) {
            dscore[lane] = real_exp(score[lane] - lse[lane]) * (dscore[lane] - slope[lane]) * scale;
        }
        tile_add(dquery, dscore, keys->k + from, hd);
    }
    for (int lane = 0; lane < n_lanes; lane++) tile_get(g->dq + (first + lane * p->heads) * hd, dquery, lane, hd);
}

/* Adds to dk and dv for one tile of the block. */
static inline void attention_backward_keys(const attention_problem *p, const key_block *keys,
                                           const attention_gradients *g, attention_tile at, int64_t kv_head) {
    real key[MAX_HEAD_DIM][LANES], value[MAX_HEAD_DIM][LANES], dkey[MAX_HEAD_DIM][LANES], dvalue[MAX_HEAD_DIM][LANES];
    attention_slice slice = attention_slice_of(p, at.slice);
    key_range range = key_range_of(p, keys, &slice);
    int64_t hd = p->head_dim, share = p->heads / p->kv_heads, first = range.first + at.first;
    int64_t n_lanes = min_of(LANES, range.end - first), row_of_lane_0 = range.row + at.first;
    int64_t end = min_of(slice.n_rows, end_of_sight(p->window, first + n_lanes - 1) - slice.lead);
    real scale = softmax_scale(p);
    tile_clear(key, hd);
    tile_clear(value, hd);
    tile_clear(dkey, hd);
    tile_clear(dvalue, hd);
    for (int lane = 0; lane < n_lanes; lane++) {
        tile_put(key, lane, keys->k + key_at(p, row_of_lane_0 + lane, kv_head), hd, scale);
        tile_put(value, lane, keys->v + key_at(p, row_of_lane_0 + lane, kv_head), hd, 1);
    }
    for (int64_t head = kv_head * share; head < (kv_head + 1) * share; head++) {
        for (int64_t i = max_of(0, first - slice.lead); i < end; i++) {
            int64_t row = (slice.first_row + i) * p->heads + head;
            real weight[LANES], dscore[LANES];
            tile_dot(weight, key, p->q + row * hd, hd);
            tile_dot(dscore, value, g->dout + row * hd, hd);
            int64_t first_hidden = max_of(0, slice.lead + i + 1 - first);
            int64_t n_past = min_of(LANES, first_key_of(p->window, slice.lead + i) - first);
            for (int64_t lane = first_hidden; lane < LANES; lane++) weight[lane] = -INFINITY;
            for (int64_t lane = 0; lane < n_past; lane++) weight[lane] = -INFINITY;
            for (int lane = 0; lane < LANES; lane++) {
                weight[lane] = real_exp(weight[lane] - g->lse[row]);
                dscore[lane] = weight[lane] * (dscore[lane] - g->slope[row]) * scale;
            }
            tile_add(dvalue, weight, g->dout + row * hd, hd);
            tile_add(dkey, dscore, p->q + row * hd, hd);
        }
    }
    for (int lane = 0; lane < n_lanes; lane++) {
        int64_t to = key_at(p, row_of_lane_0 + lane, kv_head);
        for (int64_t d = 0; d < hd; d++) keys->dk[to + d] += dkey[d][lane];
        for (int64_t d = 0; d < hd; d++) keys->dv[to + d] += dvalue[d][lane];
    }
}

/* ================================================================================================================
   >>feed-forward    SwiGLU: out = silu(gate) * up
   ================================================================================================================ */

static inline real sigmoid(real x) { return 1 / (1 + real_exp(-x)); }

static inline void swiglu_forward(real *out, const real *gate, const real *up, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] = gate[i] * sigmoid(gate[i]) * up[i];
}

/* dgate and dup may not alias dout. */
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

   The mask is not stored. A pure function of (seed, layer, site, sequence, position, feature) decides whether an
   element is dropped. So a replay repeats the first forward, a backward finds the same mask, and a token is treated the
   same in any chunk, order or rank: chunked training equals unchunked training with dropout as well. (If only replays
   must repeat, cf_step.seed is enough: it is the same in every pass of a chunk.)
   ================================================================================================================
   */

typedef struct dropout_mask {
    double rate;             /* probability of dropping; 0: no dropout */
    uint64_t seed;           /* for this step of this run, this layer and this site */
    const int32_t *sequence; /* (rows), -1 in padding */
    const int32_t *position; /* (rows) */
} dropout_mask;

/* Returns 0, or 1 / (1 - rate), for a feature of the row whose random stream is `key`. */
static inline real dropout_factor(const dropout_mask *mask, uint64_t key, int64_t feature) {
    return uniform_of(mix64(key + (uint64_t)feature)) < mask->rate ? 0 : (real)(1 / (1 - mask->rate));
}

static inline uint64_t dropout_key(const dropout_mask *mask, int64_t row) {
    uint64_t token = (uint64_t)(uint32_t)mask->sequence[row] << 32 | (uint32_t)mask->position[row];
    return mix64_pair(mask->seed, token);
}

/* out = base + branch * mask; out may alias base, and base NULL counts as 0. */
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

/* Looks up rows of the table; a token of -1 (padding) gives zeros. */
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

/* Turns logits (rows, vocabulary) into probabilities in place. row_loss: -log(probability of the target); 0 for rows
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

/* Turns the probabilities into gradients of the logits in place. weight: of each row's loss. more: sum of the weights
   of the row's further losses, whose own targets are subtracted later. */
static inline void cross_entropy_backward(real *probability, const int32_t *target, const double *weight,
                                          const double *more, int64_t rows, int64_t vocabulary) {
    for (int64_t row = 0; row < rows; row++) {
        real *x = probability + row * vocabulary;
        double first = target[row] >= 0 ? weight[row] : 0;
        real factor = (real)(first + more[row]);
        for (int64_t c = 0; c < vocabulary; c++) x[c] *= factor;
        if (target[row] >= 0) x[target[row]] -= (real)first;
    }
}

#endif /* TRAIN_KERNELS_H */
