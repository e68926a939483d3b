/* model.h - a decoder in the style of Qwen2.5, run chunk by chunk - MIT or public domain

   RMSNorm, rotary positions, grouped-query attention with biases on Q, K and V, SwiGLU, tied or untied embeddings.

   The model is [embedding] + layers + [final norm + head + loss], and every call takes the part of it (a `stage`) to
   work on. The whole model is one stage; cut into several, each hands stage_output to the next one's stage_input, and
   the gradient back. One forward or backward handles one chunk: its rows, the activations that the forward leaves for
   the backward, and, for a chunk of a group, the group's state.

   Who holds what:
       chunk_rows     what is computed: tokens, targets, positions, cu_seqlens
       activations    what a forward keeps for its backward; grows with the rows of one chunk, never with the prefix
       group_state    K, V and their gradients for all tokens of one long sequence, on the device, or in host memory
                      and streamed past the device (state_stream.h)
       workspace      scratch of one pass, worth nothing afterwards */

#ifndef TRAIN_MODEL_H
#define TRAIN_MODEL_H

#include "state_stream.h"

/* ================================================================================================================
   >>config
   ================================================================================================================ */

typedef struct model_config {
    int64_t vocabulary, layers, hidden, heads, kv_heads, ffn;
    int untied;       /* 1: the head has a weight of its own; 0: it is the embedding */
    double dropout;   /* rate, on the embedding and on both branches of a layer */
    double rope_theta, norm_epsilon;
    int64_t window;   /* keys that a query sees, its own included; 0: all up to its own */
} model_config;

static inline int64_t head_dim_of(const model_config *c) { return c->hidden / c->heads; }
static inline int64_t kv_width_of(const model_config *c) { return c->kv_heads * head_dim_of(c); }

/* NULL, or what is wrong. The bounds keep all sizes far from overflow. */
static inline const char *model_config_fault(const model_config *c) {
    if (c->layers < 1 || c->layers > 4096) return "layers must be 1 .. 4096";
    if (c->hidden < 1 || c->hidden > 65536) return "hidden must be 1 .. 65536";
    if (c->ffn < 1 || c->ffn > 1048576) return "ffn must be 1 .. 1048576";
    if (c->heads < 1 || c->hidden % c->heads != 0) return "heads must divide hidden";
    if (head_dim_of(c) % 2 != 0) return "hidden / heads must be even, for the rotary positions";
    if (head_dim_of(c) > MAX_HEAD_DIM) return "hidden / heads must be at most 256";
    if (c->kv_heads < 1 || c->heads % c->kv_heads != 0) return "kv-heads must divide heads";
    if (!(c->dropout >= 0 && c->dropout < 1)) return "dropout must be at least 0 and less than 1";
    if (c->window < 0 || c->window > INT32_MAX) return "window must be 0 .. 2147483647";
    return NULL;
}

/* What --stream wants at least. */
static inline void check_stream_bytes(int64_t bytes, const model_config *c) {
    int64_t ring = stream_ring_bytes(kv_width_of(c), KEY_BLOCK);
    if (bytes > 0 && bytes < ring) {
        fail(EXIT_BAD_INPUT, "--stream must be 0 or at least %lld: two blocks of %d rows of one layer", (long long)ring,
             KEY_BLOCK);
    }
}

/* ================================================================================================================
   >>parameters    one flat array, seen as named tensors; gradients and optimizer moments have the same layout
   ================================================================================================================ */

typedef struct layer_weights {
    real *attention_norm;         /* (hidden) */
    real *wq, *bq;                /* (hidden, hidden), (hidden) */
    real *wk, *bk, *wv, *bv;      /* (hidden, kv width), (kv width) */
    real *wo;                     /* (hidden, hidden) */
    real *ffn_norm;               /* (hidden) */
    real *w_gate, *w_up, *w_down; /* (hidden, ffn) twice, (ffn, hidden) */
} layer_weights;

typedef struct tensor {
    char name[32];
    int64_t offset, count; /* in the flat array */
    int64_t fan_in;        /* inputs of a matrix; 0: a bias or a gain */
} tensor;

typedef struct weights {
    real *flat;
    int64_t count;
    real *embedding; /* (vocabulary, hidden) */
    layer_weights *layers;
    real *final_norm; /* (hidden) */
    real *head;       /* (vocabulary, hidden); the embedding where tied */
    tensor *tensors;
    int64_t n_tensors;
} weights;

#define TENSORS_PER_LAYER 12

/* The next tensor of the layout: names it, if there is a list, and gives its place, if there is a flat array. */
static inline real *weights_next(weights *w, int64_t layer, const char *name, int64_t count, int64_t fan_in) {
    if (w->tensors) {
        tensor *t = &w->tensors[w->n_tensors];
        if (layer < 0) snprintf(t->name, sizeof t->name, "%s", name);
        else snprintf(t->name, sizeof t->name, "layer%d.%s", (int)layer, name);
        t->offset = w->count;
        t->count = count;
        t->fan_in = fan_in;
    }
    real *at = w->flat ? w->flat + w->count : NULL;
    w->n_tensors++;
    w->count += count;
    return at;
}

/* The only place that knows the layout. Without a flat array it just counts. */
static inline void weights_layout(weights *w, const model_config *c) {
    int64_t h = c->hidden, kv = kv_width_of(c), f = c->ffn;
    w->count = w->n_tensors = 0;
    w->embedding = weights_next(w, -1, "embedding", c->vocabulary * h, h);
    for (int64_t i = 0; i < c->layers; i++) {
        layer_weights l;
        l.attention_norm = weights_next(w, i, "attention_norm", h, 0);
        l.wq = weights_next(w, i, "wq", h * h, h);
        l.bq = weights_next(w, i, "bq", h, 0);
        l.wk = weights_next(w, i, "wk", h * kv, h);
        l.bk = weights_next(w, i, "bk", kv, 0);
        l.wv = weights_next(w, i, "wv", h * kv, h);
        l.bv = weights_next(w, i, "bv", kv, 0);
        l.wo = weights_next(w, i, "wo", h * h, h);
        l.ffn_norm = weights_next(w, i, "ffn_norm", h, 0);
        l.w_gate = weights_next(w, i, "w_gate", h * f, h);
        l.w_up = weights_next(w, i, "w_up", h * f, h);
        l.w_down = weights_next(w, i, "w_down", f * h, f);
        if (w->layers) w->layers[i] = l;
    }
    w->final_norm = weights_next(w, -1, "final_norm", h, 0);
    w->head = c->untied ? weights_next(w, -1, "head", c->vocabulary * h, h) : w->embedding;
}

static inline weights weights_new(const model_config *c) {
    weights w = {0};
    weights_layout(&w, c); /* counts */
    w.flat = TAKE(real, w.count);
    w.layers = TAKE(layer_weights, c->layers);
    w.tensors = TAKE(tensor, w.n_tensors);
    weights_layout(&w, c);
    return w;
}

static inline void weights_free(weights *w) {
    free(w->flat);
    free(w->layers);
    free(w->tensors);
    memset(w, 0, sizeof *w);
}

static inline void weights_clear(weights *w) { memset(w->flat, 0, (size_t)w->count * sizeof(real)); }

static inline int tensor_ends_with(const tensor *t, const char *suffix) {
    size_t n = strlen(t->name), m = strlen(suffix);
    return n >= m && strcmp(t->name + n - m, suffix) == 0;
}

/* Normal numbers, scaled so that each layer starts out near the identity. Gains start at 1 and biases at 0; `spread`
   moves them away from there too, so that a check of gradients meets no special value. */
static inline void weights_init(weights *w, const model_config *c, uint64_t seed, double spread) {
    for (int64_t i = 0; i < w->n_tensors; i++) {
        const tensor *t = &w->tensors[i];
        double centre = tensor_ends_with(t, "norm") ? 1 : 0, deviation = spread;
        if (t->fan_in > 0) deviation = 1 / sqrt((double)t->fan_in);
        if (tensor_ends_with(t, "wo") || tensor_ends_with(t, "w_down")) deviation /= sqrt(2.0 * (double)c->layers);
        if (tensor_ends_with(t, "embedding") || tensor_ends_with(t, "head")) deviation = spread > 0 ? 0.2 : 0.02;
        uint64_t key = mix64_pair(seed, (uint64_t)i);
        for (int64_t j = 0; j < t->count; j++) w->flat[t->offset + j] = (real)(centre + deviation * normal_of(key, j));
    }
}

/* ================================================================================================================
   >>stage    a part of the model
   ================================================================================================================ */

typedef struct stage {
    int64_t first_layer, end_layer; /* layers first_layer .. end_layer - 1 */
    int has_embedding, has_head;
} stage;

/* Part `index` of `count`: layers shared out as evenly as can be. */
static inline stage stage_of(const model_config *c, int64_t index, int64_t count) {
    stage s;
    s.first_layer = c->layers * index / count;
    s.end_layer = c->layers * (index + 1) / count;
    s.has_embedding = index == 0;
    s.has_head = index == count - 1;
    return s;
}

/* ================================================================================================================
   >>rows    what one pass computes
   ================================================================================================================ */

/* The rows of one chunk: what chunkflow's cf_metadata_fill writes, and the tokens themselves. */
typedef struct chunk_rows {
    int64_t rows;             /* padding included */
    int64_t n_seqs;           /* slices, and runs of padding rows */
    int64_t prefix;           /* tokens of the group before this chunk */
    int64_t state_tokens;     /* rows, from row 0 on, that join the group's state; 0 without a group */
    const int32_t *cu_seqlens_q, *cu_seqlens_k; /* (n_seqs + 1) */
    const int32_t *position;  /* (rows) in its sequence */
    const int32_t *sequence;  /* (rows) -1: padding */
    const double *weight;     /* (rows) of its loss; all of the batch add up to the mean that is wanted */
    int32_t *token;           /* (rows) -1: padding */
    int32_t *target;          /* (rows) the next token of the sequence; -1: none, or ignored */
} chunk_rows;

/* ================================================================================================================
   >>activations    what a forward keeps for its backward
   ================================================================================================================ */

/* What each row of a layer keeps: X(name, numbers). */
#define LAYER_ACTIVATIONS(X)                                              \
    X(input, c->hidden)     /* the residual stream as it enters */       \
    X(scale1, 1)            /* 1 / rms of it */                          \
    X(normed1, c->hidden)                                                \
    X(q, c->hidden)         /* (heads, head_dim), rotated */             \
    X(k, kv_width_of(c))    /* (kv_heads, head_dim), rotated */          \
    X(v, kv_width_of(c))                                                 \
    X(attended, c->hidden)  /* (heads, head_dim) */                      \
    X(lse, c->heads)        /* log of the sum of exponentiated scores */ \
    X(middle, c->hidden)    /* the residual stream after attention */    \
    X(scale2, 1)                                                         \
    X(normed2, c->hidden)                                                \
    X(gate, c->ffn)                                                      \
    X(up, c->ffn)                                                        \
    X(gated, c->ffn)        /* silu(gate) * up */

typedef struct layer_activations {
#define MEMBER(name, width) real *name;
    LAYER_ACTIVATIONS(MEMBER)
#undef MEMBER
} layer_activations;

typedef struct activations {
    layer_activations *layers; /* those of the stage, from its first on */
    real *output;              /* (rows, hidden) the residual stream as it leaves */
    real *scale, *normed;      /* (rows), (rows, hidden): final norm */
    real *probability;         /* (rows, vocabulary): softmax of the logits */
    real *flat;
    int64_t bytes;
    memory_kind kind;
} activations;

/* Hands out consecutive pieces of an array, or only counts where there is none. */
typedef struct carver {
    real *flat;
    int64_t used;
} carver;

static inline real *carve(carver *from, int64_t count) {
    real *at = from->flat ? from->flat + from->used : NULL;
    if (count > INT64_MAX / 16 - from->used) fail(EXIT_BAD_INPUT, "the model and its chunks fit no memory");
    from->used += count;
    return at;
}

/* The only place that knows the layout. keep 0: all layers share the buffers of one, which is all that a forward needs
   whose activations are dropped. */
static inline void activations_layout(activations *a, carver *from, const model_config *c, const stage *s, int64_t rows,
                                      int keep) {
    for (int64_t i = 0; i < s->end_layer - s->first_layer; i++) {
        if (i > 0 && !keep) {
            a->layers[i] = a->layers[0];
            continue;
        }
#define MEMBER(name, width) a->layers[i].name = carve(from, rows * (width));
        LAYER_ACTIVATIONS(MEMBER)
#undef MEMBER
    }
    a->output = carve(from, rows * c->hidden);
    a->scale = carve(from, s->has_head ? rows : 0);
    a->normed = carve(from, s->has_head ? rows * c->hidden : 0);
    a->probability = carve(from, s->has_head ? rows * c->vocabulary : 0);
}

/* The same activations, seen from row `row` on. */
static inline layer_activations layer_activations_at(const layer_activations *all, const model_config *c, int64_t row) {
    layer_activations a;
#define MEMBER(name, width) a.name = all->name + row * (width);
    LAYER_ACTIVATIONS(MEMBER)
#undef MEMBER
    return a;
}

/* Activations of at most `rows` rows. kind: what the bytes count as. */
static inline activations activations_new(const model_config *c, const stage *s, int64_t rows, int keep,
                                          memory_kind kind, memory_meter *meter) {
    activations a = {0};
    carver from = {0};
    a.layers = TAKE(layer_activations, s->end_layer - s->first_layer);
    activations_layout(&a, &from, c, s, rows, keep);
    a.bytes = from.used * (int64_t)sizeof(real);
    a.kind = kind;
    a.flat = from.flat = TAKE(real, from.used);
    from.used = 0;
    activations_layout(&a, &from, c, s, rows, keep);
    memory_count(meter, kind, a.bytes);
    return a;
}

/* Lays the same memory out anew, for a stage that needs no more of it than the one that it was taken for: a process
   with several parts of the model can use it for any of them. */
static inline void activations_reshape(activations *a, const model_config *c, const stage *s, int64_t rows, int keep) {
    carver from = {a->flat, 0};
    activations_layout(a, &from, c, s, rows, keep);
}

static inline void activations_free(activations *a, memory_meter *meter) {
    memory_count(meter, a->kind, -a->bytes);
    free(a->flat);
    free(a->layers);
    memset(a, 0, sizeof *a);
}

/* Where a stage's input goes and its output comes from: (rows, hidden). */
static inline real *stage_input(const activations *a) { return a->layers[0].input; }
static inline const real *stage_output(const activations *a) { return a->output; }

/* ================================================================================================================
   >>state    K, V, dK and dV of one group's tokens, in every layer of the stage
   ================================================================================================================ */

typedef struct layer_state {
    real *k, *v, *dk, *dv; /* (tokens, kv_heads, head_dim) */
} layer_state;

typedef struct group_state {
    layer_state *layers;
    real *flat;
    int64_t tokens; /* room */
    int64_t bytes;
    memory_kind kind;
    state_stream *stream; /* through which passes reach a state in host memory; NULL: it is on the device */
} group_state;

static inline void group_state_layout(group_state *g, carver *from, const model_config *c, const stage *s,
                                      int64_t tokens) {
    for (int64_t i = 0; i < s->end_layer - s->first_layer; i++) {
        g->layers[i].k = carve(from, tokens * kv_width_of(c));
        g->layers[i].v = carve(from, tokens * kv_width_of(c));
        g->layers[i].dk = carve(from, tokens * kv_width_of(c));
        g->layers[i].dv = carve(from, tokens * kv_width_of(c));
    }
}

/* Not a number anywhere, as if another group had left something there: what is read must have been written. With a
   stream, the state lies in host memory. */
static inline group_state group_state_new(const model_config *c, const stage *s, int64_t tokens, state_stream *stream,
                                          memory_meter *meter) {
    group_state g = {0};
    carver from = {0};
    g.layers = TAKE(layer_state, s->end_layer - s->first_layer);
    group_state_layout(&g, &from, c, s, tokens);
    g.tokens = tokens;
    g.bytes = from.used * (int64_t)sizeof(real);
    g.stream = stream;
    g.kind = stream ? MEMORY_HOST : MEMORY_STATE;
    g.flat = from.flat = TAKE(real, from.used);
    spoil(g.flat, from.used);
    from.used = 0;
    group_state_layout(&g, &from, c, s, tokens);
    memory_count(meter, g.kind, g.bytes);
    return g;
}

/* Before a group's first backward, which adds to them. */
static inline void group_state_clear_gradient(const group_state *g, const model_config *c, const stage *s) {
    for (int64_t i = 0; i < s->end_layer - s->first_layer; i++) {
        memset(g->layers[i].dk, 0, (size_t)(g->tokens * kv_width_of(c)) * sizeof(real));
        memset(g->layers[i].dv, 0, (size_t)(g->tokens * kv_width_of(c)) * sizeof(real));
    }
}

static inline void group_state_free(group_state *g, memory_meter *meter) {
    if (g->stream && stream_is_busy(g->stream)) fail(EXIT_CHECK_FAILED, "a state is freed while copies are under way");
    memory_count(meter, g->kind, -g->bytes);
    free(g->layers);
    free(g->flat);
    memset(g, 0, sizeof *g);
}

/* ================================================================================================================
   >>workspace    scratch of one pass
   ================================================================================================================ */

/* Per row: X(name, numbers). A name with d is the gradient of the thing. */
#define ROW_SCRATCH(X)                                                      \
    X(stream, c->hidden)    /* d of the residual stream, on its way down */ \
    X(branch1, c->hidden)   /* what attention, or the embedding, adds to the stream, or d of that */ \
    X(branch2, c->hidden)   /* what the feed-forward part adds, or d of that */ \
    X(dnormed1, c->hidden)                                                  \
    X(dnormed2, c->hidden)  /* also that of the final norm */               \
    X(dattended, c->hidden)                                                 \
    X(total, c->heads)      /* of attention's weights, while it goes from block to block */ \
    X(slope, c->heads)      /* sum over a head of dattended * attended */   \
    X(dq, c->hidden)                                                        \
    X(dk, kv_width_of(c))                                                   \
    X(dv, kv_width_of(c))                                                   \
    X(dgate, c->ffn)                                                        \
    X(dup, c->ffn)                                                          \
    X(dgated, c->ffn)                                                       \
    X(cosine, head_dim_of(c) / 2)                                           \
    X(sine, head_dim_of(c) / 2)

typedef struct row_scratch {
#define MEMBER(name, width) real *name;
    ROW_SCRATCH(MEMBER)
#undef MEMBER
} row_scratch;

typedef struct workspace {
    row_scratch rows;
    layer_weights transposed; /* the matrices of one layer, transposed */
    real *head_transposed;    /* (hidden, vocabulary) */
    double *row_loss;         /* (rows) */
    attention_tile *tiles;
    real *flat;
    int64_t bytes;
} workspace;

static inline void workspace_layout(workspace *w, carver *from, const model_config *c, int64_t rows) {
    int64_t h = c->hidden, kv = kv_width_of(c);
#define MEMBER(name, width) w->rows.name = carve(from, rows * (width));
    ROW_SCRATCH(MEMBER)
#undef MEMBER
    w->transposed.wq = carve(from, h * h);
    w->transposed.wk = carve(from, h * kv);
    w->transposed.wv = carve(from, h * kv);
    w->transposed.wo = carve(from, h * h);
    w->transposed.w_gate = carve(from, h * c->ffn);
    w->transposed.w_up = carve(from, h * c->ffn);
    w->transposed.w_down = carve(from, c->ffn * h);
    w->head_transposed = carve(from, h * c->vocabulary);
}

static inline row_scratch row_scratch_at(const row_scratch *all, const model_config *c, int64_t row) {
    row_scratch s;
#define MEMBER(name, width) s.name = all->name + row * (width);
    ROW_SCRATCH(MEMBER)
#undef MEMBER
    return s;
}

/* For chunks of at most `rows` rows. */
static inline workspace workspace_new(const model_config *c, int64_t rows, memory_meter *meter) {
    workspace w = {0};
    carver from = {0};
    workspace_layout(&w, &from, c, rows);
    w.flat = from.flat = TAKE(real, from.used);
    w.bytes = from.used * (int64_t)sizeof(real);
    from.used = 0;
    workspace_layout(&w, &from, c, rows);
    w.row_loss = TAKE(double, rows);
    w.tiles = TAKE(attention_tile, rows); /* every tile has a row */
    w.bytes += rows * (int64_t)(sizeof(double) + sizeof(attention_tile));
    memory_count(meter, MEMORY_WORKSPACE, w.bytes);
    return w;
}

static inline void workspace_free(workspace *w, memory_meter *meter) {
    memory_count(meter, MEMORY_WORKSPACE, -w->bytes);
    free(w->flat);
    free(w->row_loss);
    free(w->tiles);
    memset(w, 0, sizeof *w);
}

/* ================================================================================================================
   >>pass    one forward or backward of one chunk through one stage

   Between two attentions every row goes its own way. So a thread takes a block of rows through all of that at once, and
   only attention and the gradients of the weights, which look at all rows, are shared out in other ways.
   ================================================================================================================ */

#define ROW_BLOCK 32

typedef struct pass {
    const model_config *config;
    const struct weights *weights;
    const chunk_rows *rows;
    const activations *kept;
    const group_state *state; /* NULL without a group */
    workspace *scratch;
    struct stage stage;
    uint64_t seed;            /* of dropout; the same in all passes of a training step */
    int is_replay;            /* 1: the state has the chunk's K and V, from its first forward */
} pass;

/* Rows `first` to first + count - 1, and what they need. */
typedef struct row_block {
    int64_t first, count;
    row_scratch scratch;
} row_block;

static inline int64_t row_blocks(const pass *p) { return (p->rows->rows + ROW_BLOCK - 1) / ROW_BLOCK; }

static inline row_block row_block_of(const pass *p, int64_t block) {
    row_block b;
    b.first = block * ROW_BLOCK;
    b.count = min_of(ROW_BLOCK, p->rows->rows - b.first);
    b.scratch = row_scratch_at(&p->scratch->rows, p->config, b.first);
    return b;
}

/* Runs `work` for layer `i` on all rows. */
static inline void for_row_blocks(const pass *p, int64_t i,
                                  void (*work)(const pass *p, int64_t i, const row_block *b)) {
    int64_t n_blocks = row_blocks(p);
    PARALLEL_FOR
    for (int64_t block = 0; block < n_blocks; block++) {
        row_block b = row_block_of(p, block);
        work(p, i, &b);
    }
}

enum { DROPOUT_EMBEDDING, DROPOUT_ATTENTION, DROPOUT_FFN, DROPOUT_SITES };

static inline dropout_mask dropout_of(const pass *p, const row_block *b, int64_t layer, int site) {
    dropout_mask mask = {p->config->dropout, 0, p->rows->sequence + b->first, p->rows->position + b->first};
    mask.seed = mix64_pair(p->seed, (uint64_t)(layer * DROPOUT_SITES + site));
    return mask;
}

/* ---- attention ---- */

/* Cuts the rows of a slice into tiles. */
static inline int64_t put_tiles(attention_tile *tiles, int64_t n, int32_t slice, int64_t length) {
    for (int64_t first = 0; first < length; first += LANES) {
        tiles[n].slice = slice;
        tiles[n].first = first;
        n++;
    }
    return n;
}

/* The attention of layer `i` of the stage. */
static inline attention_problem attention_of(const pass *p, int64_t i) {
    const chunk_rows *r = p->rows;
    attention_problem problem = {0};
    problem.heads = p->config->heads;
    problem.kv_heads = p->config->kv_heads;
    problem.head_dim = head_dim_of(p->config);
    problem.window = p->config->window;
    problem.cu_seqlens_q = r->cu_seqlens_q;
    problem.cu_seqlens_k = r->cu_seqlens_k;
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
    key_block own = {a->k, a->v, p->scratch->rows.dk, p->scratch->rows.dv, 0, p->rows->rows, 1};
    return own;
}

/* Rows `first` to first + count - 1 of layer `i` in the group's state, wherever that lies. */
static inline key_block state_keys(const pass *p, int64_t i, int64_t first, int64_t count) {
    key_block none = {NULL, NULL, NULL, NULL, 0, 0, 0};
    if (!p->state) return none;
    const layer_state *at = &p->state->layers[i];
    int64_t offset = first * kv_width_of(p->config);
    key_block keys = {at->k + offset, at->v + offset, at->dk + offset, at->dv + offset, first, count, 0};
    return keys;
}

/* The rows of the prefix that any query of the pass sees: what its first query sees. */
static inline key_block prefix_keys(const pass *p, int64_t i) {
    int64_t first = first_key_of(p->config->window, p->rows->prefix);
    return state_keys(p, i, first, p->rows->prefix - first);
}

static inline state_stream *state_stream_of(const pass *p) { return p->state ? p->state->stream : NULL; }

/* How many tiles of rows see a block. */
static inline int64_t tiles_that_see(const attention_problem *problem, const key_block *keys) {
    attention_slice slice = attention_slice_of(problem, 0);
    int64_t rows = min_of(slice.n_rows, end_of_sight(problem->window, keys->first + keys->count - 1) - slice.lead);
    return keys->own ? problem->n_tiles : (rows + LANES - 1) / LANES;
}

static inline void forward_over_keys(const attention_problem *problem, const key_block *keys,
                                     const attention_results *results) {
    int64_t n = tiles_that_see(problem, keys) * problem->heads;
    PARALLEL_FOR
    for (int64_t t = 0; t < n; t++) {
        attention_forward_tile(problem, keys, results, problem->tiles[t / problem->heads], t % problem->heads);
    }
}

/* Two sweeps, each over its own outputs: first the queries' gradients, then the keys'. One sweep would save computing
   the scores twice, but then threads would have to add to the same dK and dV, in an order that would not repeat. */
static inline void backward_over_keys(const attention_problem *problem, const key_block *keys,
                                      const attention_gradients *g) {
    int64_t n = tiles_that_see(problem, keys) * problem->heads;
    PARALLEL_FOR
    for (int64_t t = 0; t < n; t++) {
        attention_backward_queries(problem, keys, g, problem->tiles[t / problem->heads], t % problem->heads);
    }
    n = (keys->own ? problem->n_tiles : (keys->count + LANES - 1) / LANES) * problem->kv_heads;
    PARALLEL_FOR
    for (int64_t t = 0; t < n; t++) {
        attention_tile prefix = {0, t / problem->kv_heads * LANES};
        attention_tile at = keys->own ? problem->tiles[t / problem->kv_heads] : prefix;
        attention_backward_keys(problem, keys, g, at, t % problem->kv_heads);
    }
}

static inline void clear_rows(real *x, int64_t rows, int64_t width) {
    memset(x, 0, (size_t)(rows * width) * sizeof(real));
}

static inline void copy_rows(real *to, const real *from, int64_t rows, int64_t width) {
    memcpy(to, from, (size_t)(rows * width) * sizeof(real));
}

/* The blocks of the prefix, from a stream or, where the state is on the device, all of it as one: gives the next one
   after `keys`, which has been used, and returns 0 after the last. Begins with keys->k NULL. */
static inline int next_keys(state_stream *stream, const key_block *prefix, key_block *keys) {
    int64_t next = keys->k ? keys->first + keys->count : prefix->first;
    if (stream && keys->k) stream_release(stream);
    if (next >= prefix->first + prefix->count) return 0;
    *keys = stream ? stream_next(stream) : *prefix;
    return 1;
}

/* Hands K and V on to the later chunks of the group. */
static inline void append_to_state(const pass *p, int64_t i) {
    const key_block own = own_keys(p, i), to = state_keys(p, i, p->rows->prefix, p->rows->state_tokens);
    state_stream *stream = state_stream_of(p);
    if (p->is_replay || to.count == 0) return;
    if (stream) {
        stream_send(stream, to.k, own.k, to.count);
        stream_send(stream, to.v, own.v, to.count);
    } else {
        copy_rows(to.k, own.k, to.count, kv_width_of(p->config));
        copy_rows(to.v, own.v, to.count, kv_width_of(p->config));
    }
}

/* What the later chunks of the group, all done by now, have found for this chunk's K and V. */
static inline void begin_own_gradients(const pass *p, int64_t i) {
    const key_block own = own_keys(p, i), from = state_keys(p, i, p->rows->prefix, p->rows->state_tokens);
    int64_t kv = kv_width_of(p->config);
    state_stream *stream = state_stream_of(p);
    clear_rows(own.dk, own.count, kv);
    clear_rows(own.dv, own.count, kv);
    if (stream) {
        stream_fetch(stream, own.dk, from.dk, from.count);
        stream_fetch(stream, own.dv, from.dv, from.count);
    } else if (from.count > 0) {
        copy_rows(own.dk, from.dk, from.count, kv);
        copy_rows(own.dv, from.dv, from.count, kv);
    }
}

/* Goes over all keys that the pass sees, block by block: forward or, with `backward`, for their gradients. */
static inline void attention_pass(const pass *p, int64_t i, int backward) {
    const layer_activations *a = &p->kept->layers[i];
    const row_scratch *s = &p->scratch->rows;
    const attention_problem problem = attention_of(p, i);
    const attention_results results = {a->attended, a->lse, s->total};
    const attention_gradients g = {a->attended, s->dattended, a->lse, s->slope, s->dq};
    const key_block own = own_keys(p, i), prefix = prefix_keys(p, i);
    key_block keys = {NULL, NULL, NULL, NULL, 0, 0, 0};
    state_stream *stream = state_stream_of(p);
    if (stream) stream_begin(stream, &prefix, backward);
    if (backward) begin_own_gradients(p, i);
    else append_to_state(p, i);
    if (backward) attention_backward_begin(&problem, &g, p->rows->rows);
    else attention_forward_begin(&problem, &results, p->rows->rows);
    do {
        if (!next_keys(stream, &prefix, &keys)) keys = own;
        if (backward) backward_over_keys(&problem, &keys, &g);
        else forward_over_keys(&problem, &keys, &results);
    } while (!keys.own);
    if (!backward) attention_forward_end(&problem, &results, p->rows->rows);
    if (stream) stream_end(stream);
}

/* ---- one layer forward ---- */

static inline void before_attention(const pass *p, int64_t i, const row_block *b) {
    const model_config *c = p->config;
    const layer_weights *w = &p->weights->layers[p->stage.first_layer + i];
    const layer_activations a = layer_activations_at(&p->kept->layers[i], c, b->first);
    const row_scratch *s = &b->scratch;
    int64_t n = b->count, h = c->hidden, hd = head_dim_of(c), kv = kv_width_of(c);
    rmsnorm_forward(a.normed1, a.scale1, a.input, w->attention_norm, n, h, c->norm_epsilon);
    linear_forward(a.q, a.normed1, w->wq, w->bq, n, h, h);
    linear_forward(a.k, a.normed1, w->wk, w->bk, n, h, kv);
    linear_forward(a.v, a.normed1, w->wv, w->bv, n, h, kv);
    rope_rotate(a.q, s->cosine, s->sine, n, c->heads, hd, 1);
    rope_rotate(a.k, s->cosine, s->sine, n, c->kv_heads, hd, 1);
}

/* Where layer `i` of the stage writes: the next one's input, or the stage's output. */
static inline real *layer_output(const pass *p, int64_t i) {
    int64_t n_layers = p->stage.end_layer - p->stage.first_layer;
    return i + 1 < n_layers ? p->kept->layers[i + 1].input : p->kept->output;
}

static inline void after_attention(const pass *p, int64_t i, const row_block *b) {
    const model_config *c = p->config;
    const int64_t layer = p->stage.first_layer + i;
    const layer_weights *w = &p->weights->layers[layer];
    const layer_activations a = layer_activations_at(&p->kept->layers[i], c, b->first);
    const row_scratch *s = &b->scratch;
    const dropout_mask mask1 = dropout_of(p, b, layer, DROPOUT_ATTENTION), mask2 = dropout_of(p, b, layer, DROPOUT_FFN);
    int64_t n = b->count, h = c->hidden;
    linear_forward(s->branch1, a.attended, w->wo, NULL, n, h, h);
    add_with_dropout(a.middle, a.input, s->branch1, &mask1, n, h);
    rmsnorm_forward(a.normed2, a.scale2, a.middle, w->ffn_norm, n, h, c->norm_epsilon);
    linear_forward(a.gate, a.normed2, w->w_gate, NULL, n, h, c->ffn);
    linear_forward(a.up, a.normed2, w->w_up, NULL, n, h, c->ffn);
    swiglu_forward(a.gated, a.gate, a.up, n * c->ffn);
    linear_forward(s->branch2, a.gated, w->w_down, NULL, n, c->ffn, h);
    add_with_dropout(layer_output(p, i) + b->first * h, a.middle, s->branch2, &mask2, n, h);
}

/* Layer `i` of the stage, from its input to the next one's. */
static inline void layer_forward(const pass *p, int64_t i) {
    for_row_blocks(p, i, before_attention);
    attention_pass(p, i, 0);
    for_row_blocks(p, i, after_attention);
}

/* ---- one layer backward: scratch->rows.stream goes from the gradient of its output to that of its input ---- */

/* One matrix of the model in a backward: out = x weight + bias. */
typedef struct matrix_job {
    const real *weight;  /* (inputs, outputs) */
    real *transposed;    /* (outputs, inputs), made before dx = dout weight^T */
    real *dweight;       /* += x^T dout, over all rows of the chunk */
    real *dbias;         /* += sum of the rows of dout; NULL: there is no bias */
    const real *x, *dout;
    int64_t inputs, outputs;
} matrix_job;

static inline void run_transposes(const matrix_job *jobs, int64_t n_jobs) {
    PARALLEL_FOR
    for (int64_t i = 0; i < n_jobs; i++) transpose(jobs[i].transposed, jobs[i].weight, jobs[i].inputs, jobs[i].outputs);
}

#define GRADIENT_BLOCK 16 /* rows of a weight's gradient that a thread takes at a time */

static inline int64_t gradient_blocks(const matrix_job *job) {
    return (job->inputs + GRADIENT_BLOCK - 1) / GRADIENT_BLOCK;
}

static inline void run_gradients(const matrix_job *jobs, int64_t n_jobs, int64_t rows) {
    int64_t n_blocks = 0;
    for (int64_t i = 0; i < n_jobs; i++) n_blocks += gradient_blocks(&jobs[i]);
    PARALLEL_FOR
    for (int64_t block = 0; block < n_blocks; block++) {
        const matrix_job *job = jobs;
        int64_t first = block;
        for (; first >= gradient_blocks(job); job++) first -= gradient_blocks(job);
        first *= GRADIENT_BLOCK;
        matmul(job->dweight + first * job->outputs, MATMUL_ADD, transposed_of(job->x + first, job->inputs), job->dout,
               NULL, min_of(GRADIENT_BLOCK, job->inputs - first), job->outputs, rows);
        if (first == 0 && job->dbias) add_column_sums(job->dbias, job->dout, rows, job->outputs);
    }
}

static inline void backward_after_attention(const pass *p, int64_t i, const row_block *b) {
    const model_config *c = p->config;
    const int64_t layer = p->stage.first_layer + i;
    const layer_weights *w = &p->weights->layers[layer], *transposed = &p->scratch->transposed;
    const layer_activations a = layer_activations_at(&p->kept->layers[i], c, b->first);
    const row_scratch *s = &b->scratch;
    const dropout_mask mask1 = dropout_of(p, b, layer, DROPOUT_ATTENTION), mask2 = dropout_of(p, b, layer, DROPOUT_FFN);
    int64_t n = b->count, h = c->hidden;
    add_with_dropout(s->branch2, NULL, s->stream, &mask2, n, h);
    linear_backward(s->dgated, MATMUL_SET, s->branch2, transposed->w_down, n, c->ffn, h);
    swiglu_backward(s->dgate, s->dup, s->dgated, a.gate, a.up, n * c->ffn);
    linear_backward(s->dnormed2, MATMUL_SET, s->dgate, transposed->w_gate, n, h, c->ffn);
    linear_backward(s->dnormed2, MATMUL_ADD, s->dup, transposed->w_up, n, h, c->ffn);
    rmsnorm_backward(s->stream, s->dnormed2, a.middle, a.scale2, w->ffn_norm, n, h);
    add_with_dropout(s->branch1, NULL, s->stream, &mask1, n, h);
    linear_backward(s->dattended, MATMUL_SET, s->branch1, transposed->wo, n, h, h);
}

static inline void backward_before_attention(const pass *p, int64_t i, const row_block *b) {
    const model_config *c = p->config;
    const layer_weights *w = &p->weights->layers[p->stage.first_layer + i], *transposed = &p->scratch->transposed;
    const layer_activations a = layer_activations_at(&p->kept->layers[i], c, b->first);
    const row_scratch *s = &b->scratch;
    int64_t n = b->count, h = c->hidden, hd = head_dim_of(c), kv = kv_width_of(c);
    rope_rotate(s->dq, s->cosine, s->sine, n, c->heads, hd, -1);
    rope_rotate(s->dk, s->cosine, s->sine, n, c->kv_heads, hd, -1);
    linear_backward(s->dnormed1, MATMUL_SET, s->dq, transposed->wq, n, h, h);
    linear_backward(s->dnormed1, MATMUL_ADD, s->dk, transposed->wk, n, h, kv);
    linear_backward(s->dnormed1, MATMUL_ADD, s->dv, transposed->wv, n, h, kv);
    rmsnorm_backward(s->stream, s->dnormed1, a.input, a.scale1, w->attention_norm, n, h);
}

/* Where the gradients of what a layer's matrices put out lie, until those of the weights are made of them. A backward
   in one piece has them in its scratch. A backward in two, I and W, leaves them in activations that nothing else will
   read: the slot of the chunk, which stays in use until W, holds them without growing. */
typedef struct output_gradients {
    real *q, *k, *v, *branch1, *gate, *up, *branch2;
} output_gradients;

static inline output_gradients gradients_in_scratch(const pass *p) {
    const row_scratch *s = &p->scratch->rows;
    output_gradients g = {s->dq, s->dk, s->dv, s->branch1, s->dgate, s->dup, s->branch2};
    return g;
}

static inline output_gradients gradients_in_slot(const pass *p, int64_t i) {
    const layer_activations *a = &p->kept->layers[i];
    output_gradients g = {a->q, a->k, a->v, a->input, a->gate, a->up, a->middle};
    return g;
}

static inline void move_gradients_to_slot(const pass *p, int64_t i) {
    const model_config *c = p->config;
    const output_gradients from = gradients_in_scratch(p), to = gradients_in_slot(p, i);
    int64_t rows = p->rows->rows;
    copy_rows(to.q, from.q, rows, c->hidden);
    copy_rows(to.k, from.k, rows, kv_width_of(c));
    copy_rows(to.v, from.v, rows, kv_width_of(c));
    copy_rows(to.branch1, from.branch1, rows, c->hidden);
    copy_rows(to.gate, from.gate, rows, c->ffn);
    copy_rows(to.up, from.up, rows, c->ffn);
    copy_rows(to.branch2, from.branch2, rows, c->hidden);
}

#define LAYER_MATRICES 7

static inline void layer_jobs(matrix_job jobs[LAYER_MATRICES], const pass *p, int64_t i, const weights *gradient,
                              output_gradients d) {
    const model_config *c = p->config;
    const layer_weights *w = &p->weights->layers[p->stage.first_layer + i];
    const layer_weights *g = &gradient->layers[p->stage.first_layer + i], *t = &p->scratch->transposed;
    const layer_activations *a = &p->kept->layers[i];
    int64_t h = c->hidden, kv = kv_width_of(c), f = c->ffn;
    const matrix_job all[LAYER_MATRICES] = {
        {w->wq, t->wq, g->wq, g->bq, a->normed1, d.q, h, h},
        {w->wk, t->wk, g->wk, g->bk, a->normed1, d.k, h, kv},
        {w->wv, t->wv, g->wv, g->bv, a->normed1, d.v, h, kv},
        {w->wo, t->wo, g->wo, NULL, a->attended, d.branch1, h, h},
        {w->w_gate, t->w_gate, g->w_gate, NULL, a->normed2, d.gate, h, f},
        {w->w_up, t->w_up, g->w_up, NULL, a->normed2, d.up, h, f},
        {w->w_down, t->w_down, g->w_down, NULL, a->gated, d.branch2, f, h},
    };
    memcpy(jobs, all, sizeof all);
}

/* Down to the layer's input. The gains of the norms, which cost next to nothing, get their gradients on the way. */
static inline void layer_backward_input(const pass *p, int64_t i, const weights *gradient) {
    const layer_weights *g = &gradient->layers[p->stage.first_layer + i];
    const layer_activations *a = &p->kept->layers[i];
    const row_scratch *s = &p->scratch->rows;
    int64_t rows = p->rows->rows, h = p->config->hidden;
    matrix_job jobs[LAYER_MATRICES];
    layer_jobs(jobs, p, i, gradient, gradients_in_scratch(p));
    run_transposes(jobs, LAYER_MATRICES);
    for_row_blocks(p, i, backward_after_attention);
    attention_pass(p, i, 1);
    for_row_blocks(p, i, backward_before_attention);
    rmsnorm_backward_gain(g->attention_norm, s->dnormed1, a->input, a->scale1, rows, h);
    rmsnorm_backward_gain(g->ffn_norm, s->dnormed2, a->middle, a->scale2, rows, h);
}

static inline void layer_backward_weights(const pass *p, int64_t i, const weights *gradient, output_gradients d) {
    matrix_job jobs[LAYER_MATRICES];
    layer_jobs(jobs, p, i, gradient, d);
    run_gradients(jobs, LAYER_MATRICES, p->rows->rows);
}

/* ---- the ends of the model ---- */

static inline void embed(const pass *p) {
    int64_t h = p->config->hidden, n_blocks = row_blocks(p);
    PARALLEL_FOR
    for (int64_t block = 0; block < n_blocks; block++) {
        row_block b = row_block_of(p, block);
        dropout_mask mask = dropout_of(p, &b, -1, DROPOUT_EMBEDDING);
        embedding_forward(b.scratch.branch1, p->rows->token + b.first, p->weights->embedding, b.count, h);
        add_with_dropout(stage_input(p->kept) + b.first * h, NULL, b.scratch.branch1, &mask, b.count, h);
    }
}

/* dstream: gradient of the stream as it enters the first layer. */
static inline void embed_backward(const pass *p, const weights *gradient, const real *dstream) {
    row_block all = {0, p->rows->rows, p->scratch->rows};
    dropout_mask mask = dropout_of(p, &all, -1, DROPOUT_EMBEDDING);
    add_with_dropout(all.scratch.branch1, NULL, dstream, &mask, all.count, p->config->hidden);
    embedding_backward(gradient->embedding, p->rows->token, all.scratch.branch1, all.count, p->config->hidden);
}

/* Final norm, logits, loss. */
static inline double head_forward(const pass *p) {
    const model_config *c = p->config;
    const activations *a = p->kept;
    int64_t h = c->hidden, v = c->vocabulary, n_blocks = row_blocks(p);
    transpose(p->scratch->head_transposed, p->weights->head, v, h);
    PARALLEL_FOR
    for (int64_t block = 0; block < n_blocks; block++) {
        row_block b = row_block_of(p, block);
        real *normed = a->normed + b.first * h, *probability = a->probability + b.first * v;
        rmsnorm_forward(normed, a->scale + b.first, a->output + b.first * h, p->weights->final_norm, b.count, h,
                        c->norm_epsilon);
        linear_forward(probability, normed, p->scratch->head_transposed, NULL, b.count, h, v);
        cross_entropy_forward(probability, p->scratch->row_loss + b.first, p->rows->target + b.first, b.count, v);
    }
    double sum = 0;
    for (int64_t row = 0; row < p->rows->rows; row++) sum += p->rows->weight[row] * p->scratch->row_loss[row];
    return sum;
}

/* The probabilities become gradients of the logits, which is where head_backward_weights looks for them;
   scratch->rows.stream becomes that of the residual stream. */
static inline void head_backward_input(const pass *p, const weights *gradient) {
    const model_config *c = p->config;
    const activations *a = p->kept;
    int64_t rows = p->rows->rows, h = c->hidden, v = c->vocabulary, n_blocks = row_blocks(p);
    PARALLEL_FOR
    for (int64_t block = 0; block < n_blocks; block++) {
        row_block b = row_block_of(p, block);
        real *dlogits = a->probability + b.first * v;
        cross_entropy_backward(dlogits, p->rows->target + b.first, p->rows->weight + b.first, b.count, v);
        linear_backward(b.scratch.dnormed2, MATMUL_SET, dlogits, p->weights->head, b.count, h, v);
        clear_rows(b.scratch.stream, b.count, h);
        rmsnorm_backward(b.scratch.stream, b.scratch.dnormed2, a->output + b.first * h, a->scale + b.first,
                         p->weights->final_norm, b.count, h);
    }
    rmsnorm_backward_gain(gradient->final_norm, p->scratch->rows.dnormed2, a->output, a->scale, rows, h);
}

static inline void head_backward_weights(const pass *p, const weights *gradient) {
    const model_config *c = p->config;
    const activations *a = p->kept;
    const matrix_job job = {p->weights->head, NULL, gradient->head, NULL, a->probability, a->normed, c->vocabulary,
                            c->hidden};
    run_gradients(&job, 1, p->rows->rows);
}

/* ---- the whole stage ---- */

static inline void prepare_rows(const pass *p) {
    const row_scratch *s = &p->scratch->rows;
    rope_angles(s->cosine, s->sine, p->rows->position, p->rows->rows, head_dim_of(p->config), p->config->rope_theta);
}

/* A chunk forward through a stage. Without an embedding, stage_input(kept) must have been filled in. With a head it
   returns the weighted sum of the losses of the chunk's rows, otherwise 0 and the result is in stage_output(kept). */
static inline double model_forward(const pass *p) {
    int64_t n_layers = p->stage.end_layer - p->stage.first_layer;
    prepare_rows(p);
    if (p->stage.has_embedding) embed(p);
    for (int64_t i = 0; i < n_layers; i++) layer_forward(p, i);
    return p->stage.has_head ? head_forward(p) : 0;
}

/* The same backward, after which `kept` is used up. Without a head, scratch->rows.stream must hold the gradient of the
   stage's output. Afterwards it holds that of the stage's input. Adds to `gradient`. */
static inline void model_backward(const pass *p, const weights *gradient) {
    prepare_rows(p);
    if (p->stage.has_head) {
        head_backward_input(p, gradient);
        head_backward_weights(p, gradient);
    }
    for (int64_t i = p->stage.end_layer - p->stage.first_layer - 1; i >= 0; i--) {
        layer_backward_input(p, i, gradient);
        layer_backward_weights(p, i, gradient, gradients_in_scratch(p));
    }
    if (p->stage.has_embedding) embed_backward(p, gradient, p->scratch->rows.stream);
}

/* The same in two passes. The first is all that the stage before waits for, and the group's earlier chunks: it leaves
   the gradient of the stage's input in scratch->rows.stream. The second makes the gradients of the weights, at any
   later time, from what the first has left in `kept`. (Those of the norms' gains come with the first.) Whichever way a
   backward is done, it adds the same numbers. */
static inline void model_backward_input(const pass *p, const weights *gradient) {
    prepare_rows(p);
    if (p->stage.has_head) head_backward_input(p, gradient);
    for (int64_t i = p->stage.end_layer - p->stage.first_layer - 1; i >= 0; i--) {
        layer_backward_input(p, i, gradient);
        move_gradients_to_slot(p, i);
    }
    if (p->stage.has_embedding) copy_rows(p->kept->output, p->scratch->rows.stream, p->rows->rows, p->config->hidden);
}

static inline void model_backward_weights(const pass *p, const weights *gradient) {
    if (p->stage.has_head) head_backward_weights(p, gradient);
    for (int64_t i = p->stage.end_layer - p->stage.first_layer - 1; i >= 0; i--) {
        layer_backward_weights(p, i, gradient, gradients_in_slot(p, i));
    }
    if (p->stage.has_embedding) embed_backward(p, gradient, p->kept->output);
}

#endif /* TRAIN_MODEL_H */
