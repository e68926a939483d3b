/* parts.h - the parts of a decoder: kinds of layers, parameters, activations, state - MIT or public domain

   A layer is two branches, each added to the residual stream: one that mixes tokens (attention of some kind, or a
   recurrence), and a feed-forward one (dense, or experts). A `branch` record has the weights, sizes and functions of a
   kind of branch. attention.h, recurrent.h and feed_forward.h have a record for each kind, and model.h goes through the
   layers independently of their kinds.

   Data structures:
       chunk_rows     what is computed: tokens, targets, positions, cu_seqlens
       activations    what a forward keeps for its backward; grows with the rows of one chunk, never with the prefix.
                      A dropped chunk may keep attention's outputs, so that its replay need not attend
       chain_state    what the chunks of one long sequence hand on, in every layer: rows of its tokens (K, V or latents,
                      and their gradients; with a window only each chunk's last), or a snapshot at each border between
                      chunks and one gradient that is carried backwards. It lies on the device, or in host memory and is
                      streamed past the device (state_stream.h)
       routing        which experts each row has chosen, and how often each was chosen in each sequence
       workspace      scratch of one pass, worth nothing afterwards
   */

#ifndef TRAIN_PARTS_H
#define TRAIN_PARTS_H

#include "../chunkflow.h"
#include "state_stream.h"

/* ================================================================================================================
   >>config
   ================================================================================================================ */

typedef enum mixer_kind {
    MIXER_FULL,    /* attention to all rows before */
    MIXER_WINDOW,  /* to the last `window` rows */
    MIXER_CHUNKED, /* to the rows of its own block of `window` rows (Llama 4) */
    MIXER_LATENT,  /* to all rows, keeping only a latent vector and a rotated key of each (DeepSeek's MLA) */
    MIXER_DELTA,   /* gated delta rule after a short convolution (Qwen3-Next) */
    MIXER_KDA,     /* the same with a decay for each channel of a key (Kimi Linear) */
    MIXER_MAMBA,   /* Mamba-2's recurrence, in the same block */
    MIXER_COUNT
} mixer_kind;

typedef struct layer_kind {
    mixer_kind mixer;
    int sinks;   /* 1: each head's softmax has one more, learnt term (gpt-oss) */
    int gate;    /* 1: attention's result is multiplied by a sigmoid of the input (Qwen3-Next) */
    int experts; /* 1: top-k experts instead of a dense feed-forward part */
} layer_kind;

#define MAX_PATTERN 16
#define MAX_EXPERTS 64
#define MAX_ACTIVE 8

/* Settings that differ between layers, or that only some layers need. All zero: equal layers with full attention, or
   with the window. */
typedef struct layer_kinds {
    int64_t n_pattern;
    layer_kind pattern[MAX_PATTERN]; /* layer i has the kind pattern[i % n_pattern] */
    int64_t experts, active;         /* number of experts, and how many each row uses */
    double balance;                  /* weight of the sequence-wise balance loss (DeepSeek-V3, eq. 17) */
    unsigned balance_over;           /* 0 or 1: over one sequence; balance_faults says why nothing else is possible */
    double capacity;                 /* 0: no token is dropped; see model_config_fault */
    double mtp;                      /* weight of the loss of the token after the next; 0: no prediction module */
} layer_kinds;

typedef struct model_config {
    int64_t vocabulary, layers, hidden, heads, kv_heads, ffn;
    int untied;       /* 1: the head has its own weight; 0: it shares the embedding's */
    double dropout;   /* rate, for the embedding and both branches of a layer */
    double rope_theta, norm_epsilon;
    int64_t window;   /* keys that a query sees, its own included, in layers with a window; 0: all up to its own */
    layer_kinds kinds;
} model_config;

static inline int64_t head_dim_of(const model_config *c) { return c->hidden / c->heads; }
static inline int64_t kv_width_of(const model_config *c) { return c->kv_heads * head_dim_of(c); }

/* Latent attention keeps `latent_of` numbers of a row, and a key of `rope_of` numbers, which is rotated. */
static inline int64_t latent_of(const model_config *c) { return (c->hidden + 1) / 2; }
static inline int64_t rope_of(const model_config *c) { return head_dim_of(c) / 4 * 2; }

/* Returns the width of one expert: those that a row uses are together as wide as the dense part. */
static inline int64_t expert_ffn_of(const model_config *c) { return max_of(1, c->ffn / max_of(1, c->kinds.active)); }

/* Returns the kind of a layer. The prediction module is the layer after the last one, and has the last one's kind. */
static inline layer_kind layer_kind_of(const model_config *c, int64_t layer) {
    layer_kind same = {c->window > 0 ? MIXER_WINDOW : MIXER_FULL, 0, 0, 0};
    return c->kinds.n_pattern > 0 ? c->kinds.pattern[min_of(layer, c->layers - 1) % c->kinds.n_pattern] : same;
}

/* Returns the window of a layer's attention, in attention_problem's form. */
static inline int64_t window_of(const model_config *c, int64_t layer) {
    const mixer_kind mixer = layer_kind_of(c, layer).mixer;
    return mixer == MIXER_WINDOW ? c->window : mixer == MIXER_CHUNKED ? -c->window : 0;
}

/* Returns the number of layers, including the prediction module's. */
static inline int64_t all_layers(const model_config *c) { return c->layers + (c->kinds.mtp > 0); }

/* Returns the index of a word of `length` characters in a list, or `n` if it is not there. */
static inline int word_in(const char *const *list, int n, const char *word, size_t length) {
    int i = 0;
    while (i < n && (strlen(list[i]) != length || strncmp(list[i], word, length) != 0)) i++;
    return i;
}

/* Parses "full,window+sinks,latent+experts": a kind for each layer, repeated from the start if there are more layers.
   "experts" alone is full+experts. Returns NULL, or the fault. */
static inline const char *parse_pattern(layer_kinds *kinds, const char *text) {
    static const char *const mixers[] = {"full", "window", "chunked", "latent", "delta", "kda", "mamba"};
    static const char *const extras[] = {"sinks", "gate", "experts"};
    kinds->n_pattern = 0;
    for (int is_extra = 0;; is_extra = *text++ == '+') {
        const size_t length = strcspn(text, ",+");
        const int mixer = word_in(mixers, MIXER_COUNT, text, length), extra = word_in(extras, 3, text, length);
        const layer_kind begun = {mixer < MIXER_COUNT ? (mixer_kind)mixer : MIXER_FULL, 0, 0, 0};
        if (is_extra ? extra == 3 : mixer == MIXER_COUNT && extra != 2) {
            return "kinds: wanted full, window, chunked, latent, delta, kda or mamba for each layer, and after it "
                   "+sinks, +gate or +experts";
        }
        if (!is_extra && kinds->n_pattern == MAX_PATTERN) return "kinds: at most 16, from which it begins again";
        if (!is_extra) kinds->pattern[kinds->n_pattern++] = begun;
        layer_kind *kind = &kinds->pattern[kinds->n_pattern - 1];
        if (extra == 0) kind->sinks = 1;
        if (extra == 1) kind->gate = 1;
        if (extra == 2) kind->experts = 1;
        text += length;
        if (!*text) return NULL;
    }
}

#define KINDS_HELP "KIND,...: of each layer: full window chunked latent delta kda mamba, +sinks +gate +experts"

/* Returns the fault of one kind, or NULL. */
static inline const char *layer_kind_fault(const model_config *c, const layer_kind *kind) {
    if ((kind->mixer == MIXER_WINDOW || kind->mixer == MIXER_CHUNKED) && c->window == 0) {
        return "window must be more than 0 where layers are windowed or chunked";
    }
    if ((kind->sinks || kind->gate) && kind->mixer >= MIXER_LATENT) {
        return "kinds: sinks and gate are for full, window and chunked";
    }
    if (kind->mixer == MIXER_LATENT && latent_of(c) + rope_of(c) > MAX_HEAD_DIM) {
        return "hidden / 2 + the rotated part of a head must be at most 256 where layers are latent";
    }
    if (!kind->experts) return NULL;
    if (c->kinds.experts < 1 || c->kinds.experts > MAX_EXPERTS) return "experts must be 1 .. 64";
    if (c->kinds.active < 1 || c->kinds.active > min_of(MAX_ACTIVE, c->kinds.experts)) {
        return "active must be 1 .. 8, and at most experts";
    }
    return NULL;
}

/* Returns NULL, or the fault of a model. The bounds keep all sizes far from overflow. */
static inline const char *model_config_fault(const model_config *c) {
    /* A balance loss over more than one sequence is a product of sums over rows that a pipeline never has at one
       time. */
    static const char *const balance_faults[] = {
        NULL, NULL,
        "balance-over batch: the loss multiplies counts by probabilities over the whole batch, and the first backward "
        "runs before the last forward, so counts are not complete; use sequence, or counts of the step before",
        "balance-over call: what a call sees depends on how sequences are cut and packed, so chunks would change the "
        "loss; use sequence"};
    if (c->layers < 1 || c->layers > 4096) return "layers must be 1 .. 4096";
    if (c->hidden < 1 || c->hidden > 65536) return "hidden must be 1 .. 65536";
    if (c->ffn < 1 || c->ffn > 1048576) return "ffn must be 1 .. 1048576";
    if (c->heads < 1 || c->hidden % c->heads != 0) return "heads must divide hidden";
    if (head_dim_of(c) % 2 != 0) return "hidden / heads must be even, for the rotary positions";
    if (head_dim_of(c) > MAX_HEAD_DIM) return "hidden / heads must be at most 256";
    if (c->kv_heads < 1 || c->heads % c->kv_heads != 0) return "kv-heads must divide heads";
    if (!(c->dropout >= 0 && c->dropout < 1)) return "dropout must be at least 0 and less than 1";
    if (c->window < 0 || c->window > INT32_MAX) return "window must be 0 .. 2147483647";
    if (!(c->kinds.mtp >= 0) || !(c->kinds.balance >= 0)) return "mtp and balance must be at least 0";
    if (c->kinds.capacity > 0) {
        return "capacity: which tokens an expert drops depends on what else is in the chunk, so chunks would change "
               "the result; experts here drop nothing";
    }
    if (c->kinds.balance_over > 1) return balance_faults[min_of(c->kinds.balance_over, 3)];
    for (int64_t i = 0; i < c->kinds.n_pattern; i++) {
        const char *fault = layer_kind_fault(c, &c->kinds.pattern[i]);
        if (fault) return fault;
    }
    return NULL;
}

/* Returns the fault of a model whose sequences share rows: a setting that makes a row differ between them. */
static inline const char *model_sharing_fault(const model_config *c) {
    if (c->dropout > 0) return "share: dropout is drawn anew for each sequence, so their common rows are not the same";
    if (c->kinds.mtp > 0) return "share: mtp reads the next token, and the last common row has several";
    for (int64_t i = 0; i < c->layers; i++) {
        if (layer_kind_of(c, i).experts && c->kinds.balance > 0) {
            return "share: the balance loss counts every row for one sequence";
        }
    }
    return NULL;
}

/* ================================================================================================================
   >>parameters    one flat array, seen as named tensors; gradients and optimizer moments have the same layout
   ================================================================================================================ */

/* A layer has the tensors of its kinds; the others are NULL. */
typedef struct layer_weights {
    real *attention_norm;         /* (hidden) */
    real *wq, *bq;                /* (hidden, hidden), (hidden) */
    real *wk, *bk, *wv, *bv;      /* (hidden, kv width), (kv width) */
    real *wo;                     /* (hidden, hidden) */
    real *wg;                     /* (hidden, hidden): gate of the mixed rows */
    real *sinks;                  /* (heads) */
    real *w_latent, *latent_norm; /* (hidden, latent + rope), (latent) */
    real *w_key, *w_value;        /* (heads, head_dim - rope, latent), (heads, latent, head_dim) */
    real *wqkv, *conv;            /* (hidden, 3 hidden), (CONV, 3 hidden) */
    real *w_beta, *w_decay;       /* (hidden, heads), (hidden, decays) */
    real *a_log, *dt_bias;        /* (heads), (decays) */
    real *out_norm, *skip;        /* (head_dim), (heads) */
    real *ffn_norm;               /* (hidden) */
    real *w_gate, *w_up, *w_down; /* (hidden, ffn) twice, (ffn, hidden); for experts, of each expert */
    real *router;                 /* (hidden, experts) */
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
    real *head;       /* (vocabulary, hidden); the embedding if tied */
    real *mtp_norm;   /* (2, hidden): of the stream, and of the next token's embedding */
    real *mtp_project, *mtp_final_norm; /* (2 hidden, hidden), (hidden) */
    tensor *tensors;
    int64_t n_tensors;
} weights;

#define TENSORS_PER_LAYER 12 /* of a layer with full attention and a dense feed-forward part */

/* Returns the place of the layout's next tensor if there is a flat array, and names it if there is a list. */
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

/* Widths, in numbers a row, of arrays that only some kinds of layers have. */
typedef struct layer_sizes {
    int64_t q, k, v, lse, mixed; /* mixed 0: attention's result goes directly into wo */
    int64_t out_gate;
    int64_t query, down;         /* latent: queries before rotation, and latents before their norm */
    int64_t conv, heads, decays, states;
    int64_t ffn, experts, active;
    int64_t rows_k, rows_v;      /* of the state, in numbers a token; rows_v 0: V is K */
    int64_t border;              /* of the state, in numbers a snapshot */
} layer_sizes;

struct pass;
struct row_block;
struct matrix_job;

typedef void rows_function(const struct pass *p, int64_t i, const struct row_block *b);

/* A kind of branch. Forward: `before` maps normed rows to the mixer's inputs, `mix` does everything that reads other
   rows, and `after` computes what is added to the residual stream. Backward runs in the reverse order. NULL: nothing to
   do. */
typedef struct branch {
    void (*lay_out)(weights *w, int64_t layer, const model_config *c, layer_weights *l); /* its weights */
    void (*sizes)(layer_sizes *n, const model_config *c, int64_t layer);
    rows_function *before, *after, *after_backward, *before_backward;
    void (*mix)(const struct pass *p, int64_t i, int backward);
    /* Lists the matrices, for their transposes and gradients. */
    int64_t (*jobs)(struct matrix_job *jobs, const struct pass *p, int64_t i, const weights *gradient);
    /* computes the gradients of everything else, last */
    void (*gradients)(const struct pass *p, int64_t i, const weights *gradient);
} branch;

/* In model.h. */
static inline const branch *mixer_of(const model_config *c, int64_t layer);
static inline const branch *feed_forward_of(const model_config *c, int64_t layer);

static inline layer_sizes layer_sizes_of(const model_config *c, int64_t layer) {
    layer_sizes n;
    memset(&n, 0, sizeof n);
    mixer_of(c, layer)->sizes(&n, c, layer);
    feed_forward_of(c, layer)->sizes(&n, c, layer);
    return n;
}

/* The largest of each. */
static inline layer_sizes widest_sizes(const model_config *c) {
    layer_sizes widest = layer_sizes_of(c, 0);
    for (int64_t i = 1; i < min_of(all_layers(c), MAX_PATTERN); i++) {
        layer_sizes n = layer_sizes_of(c, i);
        int64_t *to = &widest.q, *from = &n.q;
        for (size_t j = 0; j < sizeof n / sizeof *to; j++) to[j] = max_of(to[j], from[j]);
    }
    return widest;
}

/* Returns the numbers of a state row in the widest layer, which sets a ring's size; not 0 even if layers keep no
   rows. */
static inline int64_t stream_width_of(const model_config *c) {
    const layer_sizes n = widest_sizes(c);
    return max_of(1, max_of(n.rows_k, n.rows_v));
}

/* Checks that --stream is at least the smallest ring. */
static inline void check_stream_bytes(int64_t bytes, const model_config *c) {
    int64_t ring = stream_ring_bytes(stream_width_of(c), KEY_BLOCK);
    if (bytes > 0 && bytes < ring) {
        fail(EXIT_BAD_INPUT, "--stream must be 0 or at least %lld: two blocks of %d rows of one layer", (long long)ring,
             KEY_BLOCK);
    }
}

/* Lays out the weights; no other function knows the layout. Without a flat array it only counts. */
static inline void weights_layout(weights *w, const model_config *c) {
    int64_t h = c->hidden;
    w->count = w->n_tensors = 0;
    w->embedding = weights_next(w, -1, "embedding", c->vocabulary * h, h);
    for (int64_t i = 0; i < all_layers(c); i++) {
        layer_weights l;
        memset(&l, 0, sizeof l);
        l.attention_norm = weights_next(w, i, "attention_norm", h, 0);
        mixer_of(c, i)->lay_out(w, i, c, &l);
        l.ffn_norm = weights_next(w, i, "ffn_norm", h, 0);
        feed_forward_of(c, i)->lay_out(w, i, c, &l);
        if (w->layers) w->layers[i] = l;
    }
    w->final_norm = weights_next(w, -1, "final_norm", h, 0);
    w->head = c->untied ? weights_next(w, -1, "head", c->vocabulary * h, h) : w->embedding;
    if (c->kinds.mtp == 0) return;
    w->mtp_norm = weights_next(w, -1, "mtp_norm", 2 * h, 0);
    w->mtp_project = weights_next(w, -1, "mtp_project", 2 * h * h, 2 * h);
    w->mtp_final_norm = weights_next(w, -1, "mtp_final_norm", h, 0);
}

static inline weights weights_new(const model_config *c) {
    weights w = {0};
    weights_layout(&w, c); /* counts */
    w.flat = TAKE(real, w.count);
    w.layers = TAKE(layer_weights, all_layers(c));
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

/* Draws normal numbers, scaled so that each layer starts near the identity. Gains start at 1 and biases at 0; `spread`
   moves them away as well, so that a check of gradients meets no special value. */
static inline void weights_init(weights *w, const model_config *c, uint64_t seed, double spread) {
    for (int64_t i = 0; i < w->n_tensors; i++) {
        const tensor *t = &w->tensors[i];
        double centre = tensor_ends_with(t, "norm") ? 1 : 0, deviation = spread;
        if (tensor_ends_with(t, "dt_bias")) centre = -3; /* so that a recurrence remembers more than a few rows */
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
    int has_mtp;                    /* 1: the prediction module comes after the last layer */
} stage;

/* Returns part `index` of `count`, with layers divided as evenly as possible. */
static inline stage stage_of(const model_config *c, int64_t index, int64_t count) {
    stage s;
    s.first_layer = c->layers * index / count;
    s.end_layer = c->layers * (index + 1) / count;
    s.has_embedding = index == 0;
    s.has_head = index == count - 1;
    s.has_mtp = s.has_head && c->kinds.mtp > 0;
    return s;
}

/* Returns the number of a stage's layers, including the prediction module's, which is the last one. */
static inline int64_t stage_layers(const stage *s) { return s->end_layer - s->first_layer + s->has_mtp; }

/* ================================================================================================================
   >>rows    what one pass computes
   ================================================================================================================ */

struct chain_state;

/* The rows of one slice, or of padding, for layers that carry a state from row to row. */
typedef struct row_span {
    int32_t first, end;       /* rows first .. end - 1 */
    int32_t up;               /* the span of this chunk that it continues; -1: none */
    /* the first span that continues it, and the next one that continues the same span; -1: none */
    int32_t child, sibling;
    int64_t slice;            /* of the plan; -1: padding */
    const struct chain_state *above; /* the state with the snapshot from which it begins; NULL: none */
    int64_t enters;           /* that snapshot */
    int64_t leaves;           /* its end's snapshot in the chunk's own state; -1: no other chunk continues it */
} row_span;

/* The rows of one chunk: the output of chunkflow's cf_metadata_fill, and the tokens themselves. */
typedef struct chunk_rows {
    int64_t rows;             /* padding included */
    int64_t n_seqs;           /* slices, and runs of padding rows */
    int64_t prefix;           /* tokens of the chain before this chunk */
    int64_t state_tokens;     /* rows, from row 0 on, that join the chain's state; 0 without a chain */
    const int32_t *cu_seqlens_q, *cu_seqlens_k; /* (n_seqs + 1) */
    const int32_t *position;  /* (rows) in its sequence */
    const int32_t *sequence;  /* (rows) -1: padding */
    const double *weight;     /* (rows) of each row's loss; over the batch the weighted losses add up to the mean */
    int32_t *token;           /* (rows) -1: padding */
    int32_t *target;          /* (rows) the next token of the sequence; -1: none, or ignored */
    int32_t *next, *target2;  /* (rows) for the prediction module: the next token, ignored or not, and the one after it
                                 as a target. It needs nothing else from beyond the chunk's end */
    const double *weight2;    /* (rows) of its loss */
    int64_t index;            /* of the chunk in its chain, from 0 */
    int64_t chunk;            /* of the batch: index of its routes */
    int64_t n_extra;          /* a row where sequences diverge has a target for each branch: those besides the first */
    const int32_t *extra_row; /* (n_extra) rising */
    const int32_t *extra_target; /* (n_extra) tokens */
    const double *extra_weight;  /* (n_extra) */
    row_span *spans;              /* (n_spans) by rising row; a span comes after the one that it continues */
    int64_t n_spans;
} chunk_rows;

/* ================================================================================================================
   >>activations    what a forward keeps for its backward
   ================================================================================================================ */

/* The numbers that each row of a layer keeps: X(name, numbers). Those of all kinds come first, so that they are at the
   same place in all layers that share buffers. */
#define LAYER_ACTIVATIONS(X)                                              \
    X(input, c->hidden)     /* the residual stream at the layer's input */ \
    X(scale1, 1)            /* 1 / rms of it */                          \
    X(normed1, c->hidden)                                                \
    X(attended, c->hidden)  /* what goes into wo */                      \
    X(middle, c->hidden)    /* the residual stream between the branches */ \
    X(scale2, 1)                                                         \
    X(normed2, c->hidden)                                                \
    X(q, n.q)               /* attention: (heads, head_dim), rotated */  \
    X(k, n.k)               /* (kv_heads, head_dim), rotated */          \
    X(v, n.v)                                                            \
    X(lse, n.lse)           /* log of the sum of exponentiated scores */ \
    X(mixed, n.mixed)       /* result of attention or recurrence, if it does not go directly into wo */   \
    X(out_gate, n.out_gate)                                              \
    X(query, n.query)       /* latent: (heads, head_dim) */              \
    X(down, n.down)         /* latents and rotated key, before norm and rotation */ \
    X(down_scale, n.down > 0)                                            \
    X(conv_in, n.conv)      /* recurrent: Q, K and V side by side */     \
    X(conv_out, n.conv)                                                  \
    X(q_scale, n.heads)                                                  \
    X(k_scale, n.heads)                                                  \
    X(beta, n.heads)        /* how strongly a row is written */          \
    X(step, n.decays)                                                    \
    X(decay, n.decays)      /* the factor by which the state decays, 0 to 1 */ \
    X(mixed_scale, n.heads)                                              \
    X(gate, n.ffn)          /* of all experts that the row uses */       \
    X(up, n.ffn)                                                         \
    X(gated, n.ffn)         /* silu(gate) * up */                        \
    X(score, n.experts)                                                  \
    X(share, n.active)      /* of each chosen expert; they add up to 1 */

typedef struct layer_activations {
#define MEMBER(name, width) real *name;
    LAYER_ACTIVATIONS(MEMBER)
#undef MEMBER
} layer_activations;

typedef struct activations {
    layer_activations *layers; /* those of the stage, from its first on */
    real *output;              /* (rows, hidden) the residual stream after the last layer */
    real *scale, *normed;      /* (rows), (rows, hidden): final norm */
    real *probability;         /* (rows, vocabulary): softmax of the logits */
    real *mtp_embedded, *mtp_scale, *mtp_normed; /* (rows, hidden), (2, rows), (rows, 2 hidden) */
    real *mtp_output;          /* as output; the head's results follow: */
    real *mtp_final_scale, *mtp_final_normed, *mtp_probability;
    real *flat;
    int64_t bytes;
    memory_kind kind;
} activations;

/* Hands out consecutive pieces of an array, or only counts if there is none. */
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

#define KEEP_OUTPUTS 2

#ifndef LEAST_OUTPUT_WINDOW
#define LEAST_OUTPUT_WINDOW CF_MIN_OUTPUT_WINDOW /* tests choose less */
#endif

/* Returns 0 for a recurrence, which does not attend, and for a short window, whose attention costs too little. */
static inline int layer_keeps_outputs(const model_config *c, int64_t layer) {
    const int64_t window = window_of(c, layer);
    const int is_short = window != 0 && max_of(window, -window) < LEAST_OUTPUT_WINDOW;
    return layer_kind_of(c, layer).mixer <= MIXER_LATENT && !is_short;
}

/* Lays out attention's results, before a gate or the matrix out of latent space, and its log-sums, layer by layer. */
static inline void outputs_layout(activations *a, carver *from, const model_config *c, const stage *s, int64_t rows) {
    for (int64_t i = 0; i < stage_layers(s); i++) {
        const layer_sizes n = layer_sizes_of(c, s->first_layer + i);
        const int64_t kept = layer_keeps_outputs(c, s->first_layer + i) ? rows : 0;
        a->layers[i].mixed = carve(from, kept * (n.mixed > 0 ? n.mixed : c->hidden));
        a->layers[i].lse = carve(from, kept * n.lse);
    }
}

/* Lays out activations; no other function knows the layout. keep 1: everything. KEEP_OUTPUTS: only attention's outputs.
   0: all layers share the buffers of the widest one, which is enough for a forward whose activations are dropped. */
static inline void activations_layout(activations *a, carver *from, const model_config *c, const stage *s, int64_t rows,
                                      int keep) {
    if (keep == KEEP_OUTPUTS) {
        outputs_layout(a, from, c, s, rows);
        return;
    }
    int64_t begin = from->used, most = begin, head = s->has_head ? rows : 0, mtp = s->has_mtp ? rows : 0;
    for (int64_t i = 0; i < stage_layers(s); i++) {
        const layer_sizes n = layer_sizes_of(c, s->first_layer + i);
        layer_activations *l = &a->layers[i];
        if (!keep) from->used = begin;
#define MEMBER(name, width) l->name = carve(from, rows * (width));
        LAYER_ACTIVATIONS(MEMBER)
#undef MEMBER
        if (n.mixed == 0) l->mixed = l->attended;
        most = max_of(most, from->used);
    }
    from->used = most;
    a->output = carve(from, rows * c->hidden);
    a->scale = carve(from, head);
    a->normed = carve(from, head * c->hidden);
    a->probability = carve(from, head * c->vocabulary);
    a->mtp_embedded = carve(from, mtp * c->hidden);
    a->mtp_scale = carve(from, 2 * mtp);
    a->mtp_normed = carve(from, 2 * mtp * c->hidden);
    a->mtp_output = carve(from, mtp * c->hidden);
    a->mtp_final_scale = carve(from, s->has_head ? mtp : 0);
    a->mtp_final_normed = carve(from, s->has_head ? mtp * c->hidden : 0);
    a->mtp_probability = carve(from, s->has_head ? mtp * c->vocabulary : 0);
}

/* Returns the activations of a layer, from row `row` on. */
static inline layer_activations layer_activations_at(const layer_activations *all, const model_config *c, int64_t layer,
                                                     int64_t row) {
    const layer_sizes n = layer_sizes_of(c, layer);
    layer_activations a;
#define MEMBER(name, width) a.name = all->name + row * (width);
    LAYER_ACTIVATIONS(MEMBER)
#undef MEMBER
    if (n.mixed == 0) a.mixed = a.attended;
    return a;
}

/* Bytes of such activations. */
static inline int64_t activations_bytes(const model_config *c, const stage *s, int64_t rows, int keep) {
    activations a = {0};
    carver from = {0};
    a.layers = TAKE(layer_activations, all_layers(c));
    activations_layout(&a, &from, c, s, rows, keep);
    free(a.layers);
    return from.used * (int64_t)sizeof(real);
}

/* Allocates activations of at most `rows` rows. kind: the memory_kind that counts the bytes. */
static inline activations activations_new(const model_config *c, const stage *s, int64_t rows, int keep,
                                          memory_kind kind, memory_meter *meter) {
    activations a = {0};
    a.bytes = activations_bytes(c, s, rows, keep);
    a.layers = TAKE(layer_activations, all_layers(c)); /* enough for any stage */
    a.kind = kind;
    a.flat = TAKE(real, a.bytes / (int64_t)sizeof(real));
    carver from = {a.flat, 0};
    activations_layout(&a, &from, c, s, rows, keep);
    memory_count(meter, kind, a.bytes);
    return a;
}

/* Lays the same memory out again for another stage that needs no more of it: a process with several parts of the model
   uses it for each of them. */
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

/* Allocates more slots until there are `wanted`. */
static inline void grow_slots(activations **slots, int64_t *n_slots, int64_t wanted, const model_config *c,
                              const stage *s, int64_t rows, int keep, memory_kind kind, memory_meter *meter) {
    if (wanted <= *n_slots) return;
    activations *more = TAKE(activations, wanted);
    if (*n_slots > 0) memcpy(more, *slots, (size_t)*n_slots * sizeof *more);
    free(*slots);
    *slots = more;
    while (*n_slots < wanted) more[(*n_slots)++] = activations_new(c, s, rows, keep, kind, meter);
}

/* Return a stage's input and its output: (rows, hidden). */
static inline real *stage_input(const activations *a) { return a->layers[0].input; }
static inline const real *stage_output(const activations *a) { return a->output; }

/* ================================================================================================================
   >>state    what the chunks of a chain hand on, in every layer of the stage
   ================================================================================================================ */

typedef struct layer_state {
    real *k, *v, *dk, *dv;  /* (kept rows, kv_heads, head_dim); latent: v is k, and dv is dk */
    real *snapshots;        /* (n_snapshots, numbers of a snapshot): state at the end of each slice of `left`; in a cp
                               group at the beginning of each chunk, and last at that of the next round */
    real *carry;            /* (n_carries, the same) gradients of snapshots. The first passes from the chunk that last ran
                               backward to the one before it; in a tree it begins as that of a snapshot in the last
                               chunk. The others, in a tree, are of snapshots with other branches, summed over them */
} layer_state;

typedef struct chain_state {
    layer_state *layers;
    real *flat;
    int64_t *begin;       /* (chunks + 1) the first token of each chunk, and the end of the last one */
    int64_t chunks;
    int64_t *left;        /* (n_snapshots) rising: slices of the plan that slices of later chunks continue. NULL in a cp
                             group */
    int64_t n_snapshots;
    int64_t *carry_of;    /* (n_snapshots) which carry is the gradient of each; NULL: all the first */
    int64_t n_carries;
    int in_tree;          /* 1: other chains also continue its rows */
    int64_t bytes;
    memory_kind kind;
    state_stream *stream; /* the stream to a state in host memory; NULL: the state is on the device */
} chain_state;

/* Returns the number of a chunk's rows that the state keeps: those that the next chunk sees, with a window the last
   ones. A row that the next chunk does not see, no later chunk sees. In a tree others may continue from any row, and in
   a cp group other ranks see every row, so all are kept. */
static inline int64_t rows_kept(const chain_state *g, int64_t window, int64_t begin, int64_t end) {
    return g && (g->in_tree || !g->left) ? end - begin : min_of(end - begin, end - first_key_of(window, end));
}

/* Returns the rows that a layer keeps of the chunks before chunk `chunk`; 0 without a chain. */
static inline int64_t kept_before(const chain_state *g, int64_t window, int64_t chunk) {
    int64_t rows = 0;
    for (int64_t i = 0; g && i < chunk; i++) rows += rows_kept(g, window, g->begin[i], g->begin[i + 1]);
    return rows;
}

/* Returns the snapshot of a slice's end; -1: no other chunk continues it. */
static inline int64_t snapshot_of(const chain_state *g, int64_t slice) {
    int64_t i = 0;
    while (g->left && i < g->n_snapshots && g->left[i] < slice) i++;
    return g->left && i < g->n_snapshots && g->left[i] == slice ? i : -1;
}

static inline void chain_state_layout(chain_state *g, carver *from, const model_config *c, const stage *s) {
    for (int64_t i = 0; i < stage_layers(s); i++) {
        const layer_sizes n = layer_sizes_of(c, s->first_layer + i);
        const int64_t rows = kept_before(g, window_of(c, s->first_layer + i), g->chunks);
        layer_state *l = &g->layers[i];
        l->k = carve(from, rows * n.rows_k);
        l->v = n.rows_v > 0 ? carve(from, rows * n.rows_v) : l->k;
        l->dk = carve(from, rows * n.rows_k);
        l->dv = n.rows_v > 0 ? carve(from, rows * n.rows_v) : l->dk;
        l->snapshots = carve(from, g->n_snapshots * n.border);
        l->carry = carve(from, g->n_carries * n.border);
    }
}

/* Allocates a chain's state, filled with NaN to expose reads of unwritten numbers. shape: the members of a state
   without its arrays, which the result will own. With a stream, the state is in host memory. */
static inline chain_state chain_state_new(const model_config *c, const stage *s, const chain_state *shape,
                                          state_stream *stream, memory_meter *meter) {
    chain_state g = *shape;
    carver from = {0};
    g.layers = TAKE(layer_state, stage_layers(s));
    chain_state_layout(&g, &from, c, s);
    g.bytes = from.used * (int64_t)sizeof(real);
    g.stream = stream;
    g.kind = stream ? MEMORY_HOST : MEMORY_STATE;
    g.flat = from.flat = TAKE(real, from.used);
    spoil(g.flat, from.used);
    from.used = 0;
    chain_state_layout(&g, &from, c, s);
    memory_count(meter, g.kind, g.bytes);
    return g;
}

/* Clears gradients before a chain's first backward, which adds to them. */
static inline void chain_state_clear_gradient(const chain_state *g, const model_config *c, const stage *s) {
    for (int64_t i = 0; i < stage_layers(s); i++) {
        const layer_sizes n = layer_sizes_of(c, s->first_layer + i);
        const int64_t rows = kept_before(g, window_of(c, s->first_layer + i), g->chunks);
        memset(g->layers[i].dk, 0, (size_t)(rows * n.rows_k) * sizeof(real));
        memset(g->layers[i].dv, 0, (size_t)(rows * n.rows_v) * sizeof(real));
        memset(g->layers[i].carry, 0, (size_t)(g->n_carries * n.border) * sizeof(real));
    }
}

static inline void chain_state_free(chain_state *g, memory_meter *meter) {
    if (g->stream && stream_is_busy(g->stream)) fail(EXIT_CHECK_FAILED, "a state is freed while copies are under way");
    memory_count(meter, g->kind, -g->bytes);
    free(g->layers);
    free(g->begin);
    free(g->left);
    free(g->carry_of);
    free(g->flat);
    memset(g, 0, sizeof *g);
}

/* ================================================================================================================
   >>routing    which experts the rows of a batch go to

   A replay must route as the forward did, so F's choices are kept until B. The balance loss of a sequence,

       balance x sum over experts e of f[e] P[e],   f[e] = experts / (active x T) x rows that have chosen e,
                                                    P[e] = mean over its T rows of score[e] / sum of scores,

   is a product of sums over all its rows. The counts have no gradient. So a row's backward only needs the counts of its
   whole sequence from other chunks: a state of the kind "sum". It is complete when the last F of the chain has run,
   which is before the chain's first B. Replays do not count.
   ================================================================================================================
   */

typedef struct routing {
    int64_t chunks, layers, rows, sequences, active, experts; /* rows: most of a chunk */
    int16_t *routes;      /* (chunks, layers, rows, active) */
    double *count, *sum;  /* (layers, sequences, experts) of rows that chose it, and of score / sum of scores */
    const int64_t *length; /* (sequences) */
    int64_t n_sequences;  /* sequences with tokens: the loss is their mean */
} routing;

static inline routing routing_new(const model_config *c, int64_t chunks, int64_t rows, const int64_t *length,
                                  int64_t sequences) {
    routing r;
    memset(&r, 0, sizeof r);
    r.chunks = chunks;
    r.layers = all_layers(c);
    r.rows = rows;
    r.sequences = sequences;
    r.length = length;
    for (int64_t i = 0; i < sequences; i++) r.n_sequences += length[i] > 0;
    const layer_sizes n = widest_sizes(c);
    r.experts = n.experts;
    r.active = n.active;
    r.routes = TAKE(int16_t, chunks * r.layers * rows * r.active);
    r.count = TAKE(double, r.layers * sequences * r.experts);
    r.sum = TAKE(double, r.layers * sequences * r.experts);
    return r;
}

/* Clears the counts before a batch runs again. */
static inline void routing_clear(routing *r) {
    memset(r->count, 0, (size_t)(r->layers * r->sequences * r->experts) * sizeof *r->count);
    memset(r->sum, 0, (size_t)(r->layers * r->sequences * r->experts) * sizeof *r->sum);
}

static inline void routing_free(routing *r) {
    free(r->routes);
    free(r->count);
    free(r->sum);
    memset(r, 0, sizeof *r);
}

static inline int16_t *routes_at(const routing *r, int64_t chunk, int64_t layer, int64_t row) {
    return r->routes + ((chunk * r->layers + layer) * r->rows + row) * r->active;
}

static inline int64_t experts_at(const routing *r, int64_t layer, int64_t sequence) {
    return (layer * r->sequences + sequence) * r->experts;
}

/* Returns d loss / d (score / sum of scores) of expert `e`, for each row of a sequence. The loss is that times their
   sum. */
static inline double balance_slope(const routing *r, const model_config *c, int64_t layer, int64_t sequence,
                                   int64_t e) {
    double length = (double)r->length[sequence];
    return c->kinds.balance / (double)r->n_sequences * (double)r->experts / ((double)r->active * length * length) *
           r->count[experts_at(r, layer, sequence) + e];
}

/* Returns the balance loss of the layers that have run here, once all forwards have. */
static inline double balance_loss(const routing *r, const model_config *c) {
    double loss = 0;
    for (int64_t layer = 0; layer < r->layers; layer++) {
        for (int64_t s = 0; s < r->sequences; s++) {
            for (int64_t e = 0; e < r->experts && r->length[s] > 0; e++) {
                loss += balance_slope(r, c, layer, s, e) * r->sum[experts_at(r, layer, s) + e];
            }
        }
    }
    return loss;
}

/* ================================================================================================================
   >>workspace    scratch of one pass
   ================================================================================================================ */

/* Arrays of a row: X(name, numbers). A name with d is the gradient of the named thing. */
#define ROW_SCRATCH(X)                                                      \
    X(stream, c->hidden)    /* gradient of the residual stream, on its way down */ \
    X(branch1, c->hidden)   /* the first branch's or the embedding's addition to the stream, or its gradient */ \
    X(branch2, c->hidden)   /* the feed-forward part's addition, or its gradient */ \
    X(dnormed1, c->hidden)                                                  \
    X(dnormed2, c->hidden)  /* also that of the final norm */               \
    X(dattended, c->hidden)                                                 \
    X(dmixed, n.mixed)                                                      \
    X(total, n.lse)         /* sum of attention's weights, from block to block */           \
    X(slope, n.lse)         /* sum over a head of dmixed * mixed */         \
    X(dq, n.q)                                                              \
    X(dk, n.k)                                                              \
    X(dv, n.v)                                                              \
    X(dout_gate, n.out_gate)                                                \
    X(dquery, n.query)                                                      \
    X(ddown, n.down)                                                        \
    X(dconv_out, n.conv)                                                    \
    X(dconv_in, n.conv)                                                     \
    X(dbeta, n.heads)                                                       \
    X(ddecay, n.decays)                                                     \
    X(dstep, n.decays)                                                      \
    X(states, n.states)     /* before each row */                           \
    X(dgate, n.ffn)                                                         \
    X(dup, n.ffn)                                                           \
    X(dgated, n.ffn)                                                        \
    X(dscore, n.experts)                                                    \
    X(dmtp, mtp)            /* gradient of mtp_project's input */           \
    X(cosine, head_dim_of(c) / 2)                                           \
    X(sine, head_dim_of(c) / 2)                                             \
    X(cosine2, n.down > 0 ? rope_of(c) / 2 : 0) /* of the part of a key that is rotated separately */ \
    X(sine2, n.down > 0 ? rope_of(c) / 2 : 0)

typedef struct row_scratch {
#define MEMBER(name, width) real *name;
    ROW_SCRATCH(MEMBER)
#undef MEMBER
} row_scratch;

typedef struct workspace {
    layer_sizes sizes;        /* the largest of all layers */
    row_scratch rows;
    layer_weights transposed; /* the matrices of one layer, transposed, in its weights' layout, from wide on */
    real *wide;
    real *head_transposed;    /* (hidden, vocabulary) */
    real *border, *dborder, *scanned; /* a snapshot, its gradient, and one in transit to the next chunk */
    real *carried;            /* the gradient that later chunks have left in the first carry of a tree's chain */
    int adds_to_carry;        /* 1: this chunk has overwritten that carry since */
    double *row_loss;         /* (rows); in a backward the weights of the row's further losses */
    attention_tile *tiles;
    real *flat;
    int64_t bytes;
} workspace;

/* Lays out a layer's transposed matrices. Returns the numbers that they take. */
static inline int64_t transposed_layout(workspace *w, const model_config *c, int64_t layer) {
    weights all;
    memset(&all, 0, sizeof all);
    all.flat = w->wide;
    memset(&w->transposed, 0, sizeof w->transposed);
    mixer_of(c, layer)->lay_out(&all, layer, c, &w->transposed);
    feed_forward_of(c, layer)->lay_out(&all, layer, c, &w->transposed);
    return all.count;
}

static inline void workspace_layout(workspace *w, carver *from, const model_config *c, int64_t rows) {
    const layer_sizes n = w->sizes = widest_sizes(c);
    const int64_t mtp = c->kinds.mtp > 0 ? 2 * c->hidden : 0;
    int64_t widest = 0;
    for (int64_t i = 0; i < min_of(c->layers, MAX_PATTERN); i++) widest = max_of(widest, transposed_layout(w, c, i));
#define MEMBER(name, width) w->rows.name = carve(from, rows * (width));
    ROW_SCRATCH(MEMBER)
#undef MEMBER
    w->wide = carve(from, max_of(widest, mtp * c->hidden));
    transposed_layout(w, c, 0);
    w->head_transposed = carve(from, c->hidden * c->vocabulary);
    w->border = carve(from, n.border);
    w->dborder = carve(from, n.border);
    w->scanned = carve(from, n.border);
    w->carried = carve(from, n.border);
}

/* Returns the scratch of a layer, whose rows have its own widths. */
static inline row_scratch row_scratch_at(const workspace *w, const model_config *c, int64_t layer, int64_t row) {
    const layer_sizes n = layer_sizes_of(c, layer);
    const int64_t mtp = c->kinds.mtp > 0 ? 2 * c->hidden : 0;
    row_scratch s;
#define MEMBER(name, width) s.name = w->rows.name + row * (width);
    ROW_SCRATCH(MEMBER)
#undef MEMBER
    return s;
}

/* Allocates scratch for chunks of at most `rows` rows. */
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
   >>cp groups    ranks that share a long sequence, each in a process of its own

   The i-th chunks of all ranks of a group form a round: their slices, here called parts, are adjacent in the sequence.
   In each layer the ranks exchange what their parts need of each other, by sums over all ranks: each rank puts its own
   numbers in place, between zeros.
   ================================================================================================================
   */

typedef enum cp_message { /* what the numbers are */
    CP_ROWS, CP_ROW_GRADIENTS,                       /* of the rows that attention passes on */
    CP_TAILS, CP_STATES,                             /* of a recurrence: see recurrent.h */
    CP_STATE_GRADIENTS, CP_TAIL_GRADIENTS
} cp_message;

/* The cp group of a pass's chunk. */
typedef struct cp_group {
    void (*add_up)(void *context, cp_message message, int64_t size, real *numbers, int64_t count);
    void *context;
    const cf_plan *plan;
    int64_t chunk;
    int64_t size, part; /* ranks, and this rank's place among them */
    real *room;         /* (room_count) */
    int64_t room_count;
} cp_group;

/* Returns the slice of a part of a round. */
static inline const cf_slice *slice_of_part(const cp_group *g, int64_t round, int64_t part) {
    const cf_plan *plan = g->plan;
    const int64_t own = g->chunk + round - plan->chunks[g->chunk].index;
    return &plan->slices[plan->chunks[own + (part - g->part) * plan->chunks_per_rank].first_slice];
}

/* Returns `count` zeros, to be filled in partly. */
static inline real *exchange_room(cp_group *g, int64_t count) {
    if (count > g->room_count) {
        free(g->room);
        g->room = TAKE(real, count);
        g->room_count = count;
    }
    memset(g->room, 0, (size_t)count * sizeof(real));
    return g->room;
}

/* Returns the setting that a cp group cannot train, or NULL. */
static inline const char *model_group_fault(const model_config *c) {
    for (int64_t i = 0; i < c->layers; i++) {
        if (layer_kind_of(c, i).experts && c->kinds.balance > 0) {
            return "cp groups: the balance loss counts the rows of a sequence, and each rank has only its own";
        }
    }
    return NULL;
}

/* ================================================================================================================
   >>pass    one forward or backward of one chunk through one stage

   Where rows are independent, a thread takes a block of rows through as many operations as possible. Only operations
   that read other rows, and the weights' gradients, which need all rows, are divided in other ways.
   ================================================================================================================
   */

#define ROW_BLOCK 32

/* Keys that slices of a chunk continue, if sequences share rows. */
typedef struct key_place {
    const chain_state *state; /* NULL: they are rows of the chunk itself, from row 0 on */
    int64_t row, first;       /* else the first of them in that state, and its place in the sequence */
    key_level level;          /* the rows that see each of them */
} key_place;

typedef struct pass {
    const model_config *config;
    const struct weights *weights;
    const chunk_rows *rows;
    const activations *kept;
    const chain_state *state; /* NULL without a chain */
    workspace *scratch;
    struct stage stage;
    uint64_t seed;            /* of dropout; equal in all passes of a training step */
    /* 1: the chunk's first forward has already filled the state's rows and chosen the routes */
    int is_replay;
    struct routing *routing;
    const key_place *places;  /* (n_places) the places of keys above the chunk's slices in a tree, from the root down */
    int64_t n_places;         /* 0: slice 0 sees the prefix in `state`, and every other slice only itself */
    const activations *outputs; /* F of a dropped chunk stores attention's outputs there; R takes them and does not
                                   attend. NULL: R attends */
    state_stream *outputs_stream; /* the stream to outputs in host memory; NULL: they are on the device */
    cp_group *group;          /* the ranks that share the sequence of slice 0; NULL: it is on one */
} pass;

/* Rows `first` to first + count - 1, with their arrays. */
typedef struct row_block {
    int64_t first, count;
    row_scratch scratch;
} row_block;

static inline int64_t row_blocks(const pass *p) { return (p->rows->rows + ROW_BLOCK - 1) / ROW_BLOCK; }

/* Returns block number `block` of the rows in layer `i` of the stage. */
static inline row_block row_block_of(const pass *p, int64_t i, int64_t block) {
    row_block b;
    b.first = block * ROW_BLOCK;
    b.count = min_of(ROW_BLOCK, p->rows->rows - b.first);
    b.scratch = row_scratch_at(p->scratch, p->config, p->stage.first_layer + i, b.first);
    return b;
}

static inline layer_activations kept_rows(const pass *p, int64_t i, int64_t row) {
    return layer_activations_at(&p->kept->layers[i], p->config, p->stage.first_layer + i, row);
}

static inline const layer_weights *weights_of(const pass *p, int64_t i) {
    return &p->weights->layers[p->stage.first_layer + i];
}

/* Runs `work` for layer `i` on all rows. */
static inline void for_row_blocks(const pass *p, int64_t i, rows_function *work) {
    int64_t n_blocks = row_blocks(p);
    PARALLEL_FOR
    for (int64_t block = 0; block < n_blocks; block++) {
        row_block b = row_block_of(p, i, block);
        work(p, i, &b);
    }
}

/* Returns the states' stream. All states are in one kind of memory, on the device or the host. */
static inline state_stream *state_stream_of(const pass *p) {
    const chain_state *state = p->state ? p->state : p->n_places > 0 ? p->places[0].state : NULL;
    return state ? state->stream : NULL;
}

static inline void clear_rows(real *x, int64_t rows, int64_t width) {
    memset(x, 0, (size_t)(rows * width) * sizeof(real));
}

static inline void copy_rows(real *to, const real *from, int64_t rows, int64_t width) {
    memcpy(to, from, (size_t)(rows * width) * sizeof(real));
}

/* One matrix of the model in a backward: out = x weight + bias. */
typedef struct matrix_job {
    const real *weight;  /* (inputs, outputs) */
    real *transposed;    /* (outputs, inputs), made before dx = dout weight^T */
    real *dweight;       /* += x^T dout, over all rows of the chunk; NULL: computed elsewhere */
    real *dbias;         /* += sum of the rows of dout; NULL: there is no bias */
    const real *x;
    const real *dout;
    real *kept;          /* where dout is stored for a later W, in a slot that nothing else will read */
    int64_t inputs, outputs;
} matrix_job;

#define MAX_JOBS (16 + 3 * MAX_EXPERTS)

static inline void run_transposes(const matrix_job *jobs, int64_t n_jobs) {
    PARALLEL_FOR
    for (int64_t i = 0; i < n_jobs; i++) transpose(jobs[i].transposed, jobs[i].weight, jobs[i].inputs, jobs[i].outputs);
}

#define GRADIENT_BLOCK 16 /* rows of a weight's gradient that a thread computes at a time */

static inline int64_t gradient_blocks(const matrix_job *job) {
    return job->dweight ? (job->inputs + GRADIENT_BLOCK - 1) / GRADIENT_BLOCK : 0;
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

#endif /* TRAIN_PARTS_H */
