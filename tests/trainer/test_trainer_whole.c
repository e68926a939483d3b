/* test_trainer_whole.c - compares the CPU trainer as a whole with a second one written here - MIT or public domain

       cc -std=c99 -O2 tests/trainer/test_trainer_whole.c tests/implementation.c -lm

   Nothing of examples/ is used. BUILD/train_cpu_f64 trains with some options. Here the same options are read
   independently, files become documents, weights are drawn, and whole sequences go through the model one number at a
   time. Gradients come from a tape of those numbers, and the optimizer updates the weights. Then the printed lines,
   every loss, and every number of the checkpoint must be equal. */

#define _XOPEN_SOURCE 700

#include "../../chunkflow.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define HARNESS_IMPLEMENTATION
#include "../harness.h"

/* ================================================================================================================
   >>random    splitmix64, and the numbers drawn from it
   ================================================================================================================ */

static uint64_t mix(uint64_t x) {
    uint64_t z = x + 0x9E3779B97F4A7C15u;
    z ^= z >> 30;
    z *= 0xBF58476D1CE4E5B9u;
    z ^= z >> 27;
    z *= 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static uint64_t pair(uint64_t a, uint64_t b) { return mix(mix(a) ^ b); }

static double uniform(uint64_t bits) { return ldexp((double)(bits / 2048), -53); }

static double normal(uint64_t key, int64_t i) {
    const double u = uniform(pair(key, 2 * (uint64_t)i)), v = uniform(pair(key, 2 * (uint64_t)i + 1));
    return sqrt(-2 * log(1 - u)) * cos(2 * acos(-1.0) * v);
}

/* Hashes whole words, then the remaining bytes with their number in the last byte. */
static uint64_t hash(uint64_t h, const void *bytes, size_t n) {
    const char *at = (const char *)bytes;
    for (;; at += 8, n -= 8) {
        uint64_t word = n < 8 ? (uint64_t)n << 56 : 0;
        memcpy(&word, at, n < 8 ? n : 8);
        h = pair(h, word);
        if (n < 8) return h;
    }
}

/* ================================================================================================================
   >>setup    the options
   ================================================================================================================ */

typedef struct setup {
    const char *words; /* of the command line */
    int64_t layers, hidden, heads, kv_heads, ffn, window, experts, active;
    int untied, shared_mean, advantages;
    double dropout, balance, mtp;
    char kinds[16][40];
    int n_kinds;
    int64_t batch, steps, warmup, seed, longest, prompt;
    double rate, decay, clip, prompt_fraction;
} setup;

/* Returns the word after the last occurrence of an option's name; NULL if there is none. */
static const char *word_of(const char *words, const char *name) {
    static char word[400];
    const size_t n = strlen(name);
    const char *last = NULL;
    for (const char *at = strstr(words, name); at; at = strstr(at + 1, name))
        if (at[n] == ' ' || at[n] == 0) last = at + n;
    word[0] = 0;
    if (last) sscanf(last, " %399s", word);
    return last ? word : NULL;
}

static double number_of(const char *words, const char *name, double otherwise) {
    const char *word = word_of(words, name);
    return word ? atof(word) : otherwise;
}

static int64_t whole_of(const char *words, const char *name, int64_t otherwise) {
    return (int64_t)number_of(words, name, (double)otherwise);
}

/* Reads numbers separated by commas; returns how many. */
static int64_t numbers_of(const char *words, const char *name, int64_t *list) {
    const char *word = word_of(words, name);
    int64_t n = 0;
    for (; word && *word; word += strspn(word, ",")) {
        list[n++] = atoll(word);
        word += strcspn(word, ",");
    }
    return n;
}

static setup setup_of(const char *words) {
    setup s = {0};
    s.words = words;
    s.layers = whole_of(words, "--layers", 2);
    s.hidden = whole_of(words, "--hidden", 64);
    s.heads = whole_of(words, "--heads", 4);
    s.kv_heads = whole_of(words, "--kv-heads", 2);
    s.ffn = whole_of(words, "--ffn", 176);
    s.window = whole_of(words, "--window", 0);
    s.experts = whole_of(words, "--experts", 4);
    s.active = whole_of(words, "--active", 2);
    s.untied = word_of(words, "--untied") != NULL;
    s.shared_mean = word_of(words, "--shared-mean") != NULL;
    s.advantages = word_of(words, "--advantages") != NULL;
    s.dropout = number_of(words, "--dropout", 0);
    s.balance = number_of(words, "--balance", 0);
    s.mtp = number_of(words, "--mtp", 0);
    s.batch = whole_of(words, "--batch", 8);
    s.steps = whole_of(words, "--steps", 100);
    s.warmup = whole_of(words, "--warmup", 10);
    s.seed = whole_of(words, "--seed", 1);
    s.longest = whole_of(words, "--max-length", 4096);
    s.prompt = whole_of(words, "--prompt", 0);
    s.prompt_fraction = number_of(words, "--prompt-fraction", 0);
    s.rate = number_of(words, "--lr", 3e-3);
    s.decay = number_of(words, "--weight-decay", 0.1);
    s.clip = number_of(words, "--clip", 1);
    const char *kinds = word_of(words, "--kinds");
    for (; kinds && *kinds; kinds += strspn(kinds, ",")) {
        snprintf(s.kinds[s.n_kinds++], sizeof s.kinds[0], "%.*s", (int)strcspn(kinds, ","), kinds);
        kinds += strcspn(kinds, ",");
    }
    if (s.n_kinds == 0) snprintf(s.kinds[s.n_kinds++], sizeof s.kinds[0], "%s", s.window > 0 ? "window" : "full");
    return s;
}

/* Returns the words for a layer; the prediction module has the last layer's. */
static const char *kind_of(const setup *s, int64_t layer) {
    return s->kinds[(layer < s->layers ? layer : s->layers - 1) % s->n_kinds];
}

static int is_kind(const setup *s, int64_t layer, const char *word) { return strstr(kind_of(s, layer), word) != NULL; }

static int is_recurrent(const setup *s, int64_t layer) {
    return is_kind(s, layer, "delta") || is_kind(s, layer, "kda") || is_kind(s, layer, "mamba");
}

/* ================================================================================================================
   >>weights    one after another, in the checkpoint's order
   ================================================================================================================ */

typedef struct part {
    char name[40];
    int64_t first, count, inputs; /* inputs 0: no matrix */
} part;

typedef struct weight_list {
    part parts[200];
    int64_t n, count;
} weight_list;

static void name_part(char whole[40], int64_t layer, const char *name) {
    if (layer < 0) snprintf(whole, 40, "%s", name);
    else snprintf(whole, 40, "layer%d.%s", (int)layer, name);
}

static void add_part(weight_list *w, int64_t layer, const char *name, int64_t count, int64_t inputs) {
    part *p = &w->parts[w->n++];
    name_part(p->name, layer, name);
    p->first = w->count;
    p->count = count;
    p->inputs = inputs;
    w->count += count;
}

static int64_t place_of(const weight_list *w, int64_t layer, const char *name) {
    char whole[40];
    name_part(whole, layer, name);
    for (int64_t i = 0; i < w->n; i++)
        if (strcmp(w->parts[i].name, whole) == 0) return w->parts[i].first;
    FAIL("there is no %s", whole);
    return 0;
}

static void add_mixer(weight_list *w, const setup *s, int64_t i) {
    const int64_t h = s->hidden, hd = h / s->heads, kv = s->kv_heads * hd, latent = (h + 1) / 2, rope = hd / 4 * 2;
    const int64_t decays = is_kind(s, i, "kda") ? h : s->heads;
    if (is_kind(s, i, "latent")) {
        add_part(w, i, "wq", h * h, h);
        add_part(w, i, "w_latent", h * (latent + rope), h);
        add_part(w, i, "latent_norm", latent, 0);
        add_part(w, i, "w_key", s->heads * (hd - rope) * latent, latent);
        add_part(w, i, "w_value", s->heads * latent * hd, latent);
        add_part(w, i, "wo", h * h, h);
    } else if (is_recurrent(s, i)) {
        add_part(w, i, "wqkv", h * 3 * h, h);
        add_part(w, i, "conv", 4 * 3 * h, 4);
        if (!is_kind(s, i, "mamba")) add_part(w, i, "w_beta", h * s->heads, h);
        add_part(w, i, "w_decay", h * decays, h);
        add_part(w, i, "a_log", s->heads, 0);
        add_part(w, i, "dt_bias", decays, 0);
        if (is_kind(s, i, "mamba")) add_part(w, i, "skip", s->heads, 0);
        add_part(w, i, "wg", h * h, h);
        add_part(w, i, "out_norm", hd, 0);
        add_part(w, i, "wo", h * h, h);
    } else {
        add_part(w, i, "wq", h * h, h);
        add_part(w, i, "bq", h, 0);
        add_part(w, i, "wk", h * kv, h);
        add_part(w, i, "bk", kv, 0);
        add_part(w, i, "wv", h * kv, h);
        add_part(w, i, "bv", kv, 0);
        add_part(w, i, "wo", h * h, h);
        if (is_kind(s, i, "gate")) add_part(w, i, "wg", h * h, h);
        if (is_kind(s, i, "sinks")) add_part(w, i, "sinks", s->heads, 0);
    }
}

static int64_t expert_width(const setup *s) { return s->ffn / s->active > 1 ? s->ffn / s->active : 1; }

static weight_list weights_of(const setup *s) {
    weight_list w = {{{{0}, 0, 0, 0}}, 0, 0};
    const int64_t h = s->hidden;
    add_part(&w, -1, "embedding", 258 * h, h);
    for (int64_t i = 0; i < s->layers + (s->mtp > 0); i++) {
        const int experts = is_kind(s, i, "experts");
        const int64_t n = experts ? s->experts : 1, f = experts ? expert_width(s) : s->ffn;
        add_part(&w, i, "attention_norm", h, 0);
        add_mixer(&w, s, i);
        add_part(&w, i, "ffn_norm", h, 0);
        if (experts) add_part(&w, i, "router", h * n, h);
        add_part(&w, i, "w_gate", n * h * f, h);
        add_part(&w, i, "w_up", n * h * f, h);
        add_part(&w, i, "w_down", n * f * h, f);
    }
    add_part(&w, -1, "final_norm", h, 0);
    if (s->untied) add_part(&w, -1, "head", 258 * h, h);
    if (s->mtp > 0) {
        add_part(&w, -1, "mtp_norm", 2 * h, 0);
        add_part(&w, -1, "mtp_project", 2 * h * h, 2 * h);
        add_part(&w, -1, "mtp_final_norm", h, 0);
    }
    return w;
}

/* Draws weights. Matrices are small, and those at the end of a branch are divided further, by the number of branches.
   Gains are 1, biases of a decay -3, and all else 0. For a check all of them are spread. */
static void draw_weights(double *to, const weight_list *w, const setup *s) {
    const int spread = word_of(s->words, "--check") != NULL;
    for (int64_t i = 0; i < w->n; i++) {
        const part *p = &w->parts[i];
        const char *dot = strchr(p->name, '.'), *name = dot ? dot + 1 : p->name;
        const uint64_t key = pair(pair((uint64_t)s->seed, 1), (uint64_t)i);
        const double centre = strstr(name, "norm") ? 1 : strstr(name, "dt_bias") ? -3 : 0;
        double deviation = p->inputs > 0 ? 1 / sqrt((double)p->inputs) : spread ? 0.1 : 0;
        if (!strcmp(name, "wo") || !strcmp(name, "w_down")) deviation /= sqrt(2 * (double)s->layers);
        if (!strcmp(name, "embedding") || !strcmp(name, "head")) deviation = spread ? 0.2 : 0.02;
        for (int64_t j = 0; j < p->count; j++) {
            to[p->first + j] = centre + deviation * normal(key, j);
        }
    }
}

/* ================================================================================================================
   >>tape    numbers that record how they were computed
   ================================================================================================================ */

typedef int32_t num;

typedef struct edge {
    num from;
    double slope;
} edge;

static struct {
    double *value, *slope;
    int64_t *edges; /* index of each number's first edge; its edges end where the next number's begin */
    edge *all;
    int64_t n, n_edges, room, room_edges;
} tape;

static num put(double value) {
    if (tape.n + 1 >= tape.room) {
        tape.room = 2 * tape.room + 4096;
        tape.value = (double *)realloc(tape.value, (size_t)tape.room * sizeof *tape.value);
        tape.slope = (double *)realloc(tape.slope, (size_t)tape.room * sizeof *tape.slope);
        tape.edges = (int64_t *)realloc(tape.edges, (size_t)tape.room * sizeof *tape.edges);
    }
    tape.value[tape.n] = value;
    tape.edges[tape.n] = tape.n_edges;
    return (num)tape.n++;
}

/* Records that the latest number depends on `a`. */
static void from(num a, double slope) {
    if (tape.n_edges == tape.room_edges) {
        tape.room_edges = 2 * tape.room_edges + 4096;
        tape.all = (edge *)realloc(tape.all, (size_t)tape.room_edges * sizeof *tape.all);
    }
    tape.all[tape.n_edges].from = a;
    tape.all[tape.n_edges++].slope = slope;
}

static double value_of(num a) { return tape.value[a]; }

static num of_one(double value, num a, double slope) {
    const num n = put(value);
    from(a, slope);
    return n;
}

static num plus(num a, num b) {
    const num n = put(value_of(a) + value_of(b));
    from(a, 1);
    from(b, 1);
    return n;
}

static num times(num a, num b) {
    const num n = put(value_of(a) * value_of(b));
    from(a, value_of(b));
    from(b, value_of(a));
    return n;
}

static num scaled(num a, double by) { return of_one(value_of(a) * by, a, by); }

/* Returns a sum of products, with every `step`th of the second numbers. */
static num dot(const num *a, const num *b, int64_t step, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += value_of(a[i]) * value_of(b[i * step]);
    const num result = put(sum);
    for (int64_t i = 0; i < n; i++) {
        from(a[i], value_of(b[i * step]));
        from(b[i * step], value_of(a[i]));
    }
    return result;
}

static num exp_of(num a) { return of_one(exp(value_of(a)), a, exp(value_of(a))); }
static num inverse(num a) { return of_one(1 / value_of(a), a, -1 / (value_of(a) * value_of(a))); }

static num power_of(num a, double exponent) {
    return of_one(pow(value_of(a), exponent), a, exponent * pow(value_of(a), exponent - 1));
}

static num sigmoid(num a) {
    const double y = 1 / (1 + exp(-value_of(a)));
    return of_one(y, a, y * (1 - y));
}

static num silu(num a) { return times(a, sigmoid(a)); }

static num softplus(num a) {
    const double x = value_of(a);
    return of_one(fmax(x, 0) + log(1 + exp(-fabs(x))), a, 1 / (1 + exp(-x)));
}

/* Computes the derivatives of the last number by all others. */
static void run_back(void) {
    memset(tape.slope, 0, (size_t)tape.n * sizeof *tape.slope);
    tape.slope[tape.n - 1] = 1;
    tape.edges[tape.n] = tape.n_edges;
    for (int64_t i = tape.n - 1; i >= 0; i--) {
        for (int64_t e = tape.edges[i]; e < tape.edges[i + 1] && tape.slope[i] != 0; e++) {
            tape.slope[tape.all[e].from] += tape.slope[i] * tape.all[e].slope;
        }
    }
}

/* Lists of numbers, all released together. */
static num *lists[100000];
static int64_t n_lists;

static num *list_of(int64_t n) { return lists[n_lists++] = (num *)calloc((size_t)n + 1, sizeof(num)); }

static void forget(void) {
    while (n_lists > 0) free(lists[--n_lists]);
    tape.n = tape.n_edges = 0;
}

/* ================================================================================================================
   >>model    one sequence, row by row
   ================================================================================================================ */

typedef struct model {
    const setup *s;
    weight_list w;
    num *weight; /* the first numbers of the tape: 0, 1, ... */
    uint64_t dropout_seed;
    num balance; /* sum over sequences and layers; -1: none yet */
} model;

static const num *weight_at(const model *m, int64_t layer, const char *name) {
    return m->weight + place_of(&m->w, layer, name);
}

/* Multiplies a row by a matrix (inputs, outputs). */
static void multiply(num *out, const num *x, const num *matrix, int64_t inputs, int64_t outputs) {
    for (int64_t o = 0; o < outputs; o++) out[o] = dot(x, matrix + o, outputs, inputs);
}

static void add_bias(num *x, const num *bias, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] = plus(x[i], bias[i]);
}

/* 1 / sqrt(a + 1e-6) */
static num inverse_root(num a) { return power_of(of_one(value_of(a) + 1e-6, a, 1), -0.5); }

static void norm(num *out, const num *x, const num *gain, int64_t n) {
    const num scale = inverse_root(scaled(dot(x, x, 1, n), 1 / (double)n));
    for (int64_t i = 0; i < n; i++) out[i] = times(times(x[i], scale), gain[i]);
}

/* Rotates pairs i and i + n / 2 by position / theta ^ (2 i / n). */
static void turn(num *x, int64_t n, int64_t position) {
    for (int64_t i = 0; i < n / 2; i++) {
        const double angle = (double)position * pow(1e6, -2.0 * (double)i / (double)n);
        const num a = x[i], b = x[i + n / 2];
        x[i] = plus(scaled(a, cos(angle)), scaled(b, -sin(angle)));
        x[i + n / 2] = plus(scaled(b, cos(angle)), scaled(a, sin(angle)));
    }
}

/* Attends for one query and one head; K and V are rows `stride` apart. `sink`: a term without a value, -1 for none. */
static void attend(num *out, const num *q, const num *k, const num *v, int64_t stride, int64_t query, int64_t first,
                   int64_t hd, double scale, num sink) {
    num *share = list_of(query + 2);
    double highest = sink >= 0 ? value_of(sink) : -INFINITY;
    for (int64_t j = first; j <= query; j++) {
        share[j] = scaled(dot(q, k + j * stride, 1, hd), scale);
        highest = fmax(highest, value_of(share[j]));
    }
    num total = put(0);
    for (int64_t j = first; j <= query; j++) {
        share[j] = exp_of(of_one(value_of(share[j]) - highest, share[j], 1));
        total = plus(total, share[j]);
    }
    if (sink >= 0) total = plus(total, exp_of(of_one(value_of(sink) - highest, sink, 1)));
    for (int64_t d = 0; d < hd; d++) {
        out[d] = times(dot(share + first, v + first * stride + d, stride, query + 1 - first), inverse(total));
    }
}

static void mix_full(const model *m, int64_t layer, num *out, const num *x, int64_t n) {
    const setup *s = m->s;
    const int64_t h = s->hidden, hd = h / s->heads, kv = s->kv_heads * hd;
    num *q = list_of(n * h), *k = list_of(n * kv), *v = list_of(n * kv), *gate = list_of(h);
    for (int64_t t = 0; t < n; t++) {
        multiply(q + t * h, x + t * h, weight_at(m, layer, "wq"), h, h);
        multiply(k + t * kv, x + t * h, weight_at(m, layer, "wk"), h, kv);
        multiply(v + t * kv, x + t * h, weight_at(m, layer, "wv"), h, kv);
        add_bias(q + t * h, weight_at(m, layer, "bq"), h);
        add_bias(k + t * kv, weight_at(m, layer, "bk"), kv);
        add_bias(v + t * kv, weight_at(m, layer, "bv"), kv);
        for (int64_t i = 0; i < s->heads; i++) turn(q + t * h + i * hd, hd, t);
        for (int64_t i = 0; i < s->kv_heads; i++) turn(k + t * kv + i * hd, hd, t);
    }
    for (int64_t t = 0; t < n; t++) {
        int64_t first = 0;
        if (is_kind(s, layer, "window") && t >= s->window) first = t - s->window + 1;
        if (is_kind(s, layer, "chunked")) first = t - t % s->window;
        for (int64_t i = 0; i < s->heads; i++) {
            const int64_t own = i * s->kv_heads / s->heads * hd;
            attend(out + t * h + i * hd, q + t * h + i * hd, k + own, v + own, kv, t, first, hd, 1 / sqrt((double)hd),
                   is_kind(s, layer, "sinks") ? weight_at(m, layer, "sinks")[i] : -1);
        }
        if (!is_kind(s, layer, "gate")) continue;
        multiply(gate, x + t * h, weight_at(m, layer, "wg"), h, h);
        for (int64_t i = 0; i < h; i++) out[t * h + i] = times(out[t * h + i], sigmoid(gate[i]));
    }
}

/* Computes keys and values of all heads from each row's latent vector and its one rotated key. */
static void mix_latent(const model *m, int64_t layer, num *out, const num *x, int64_t n) {
    const setup *s = m->s;
    const int64_t h = s->hidden, hd = h / s->heads, latent = (h + 1) / 2, rope = hd / 4 * 2, plain = hd - rope;
    num *q = list_of(n * h), *k = list_of(n * h), *v = list_of(n * h), *low = list_of(latent + rope);
    num *normed = list_of(latent);
    for (int64_t t = 0; t < n; t++) {
        multiply(q + t * h, x + t * h, weight_at(m, layer, "wq"), h, h);
        multiply(low, x + t * h, weight_at(m, layer, "w_latent"), h, latent + rope);
        norm(normed, low, weight_at(m, layer, "latent_norm"), latent);
        turn(low + latent, rope, t);
        for (int64_t i = 0; i < s->heads; i++) {
            const num *key = weight_at(m, layer, "w_key") + i * plain * latent;
            num *to = k + t * h + i * hd;
            for (int64_t d = 0; d < plain; d++) to[d] = dot(normed, key + d * latent, 1, latent);
            for (int64_t d = 0; d < rope; d++) to[plain + d] = low[latent + d];
            multiply(v + t * h + i * hd, normed, weight_at(m, layer, "w_value") + i * latent * hd, latent, hd);
            turn(q + t * h + i * hd + plain, rope, t);
        }
    }
    for (int64_t t = 0; t < n; t++)
        for (int64_t i = 0; i < s->heads; i++) {
            attend(out + t * h + i * hd, q + t * h + i * hd, k + i * hd, v + i * hd, h, t, 0, hd, 1 / sqrt((double)hd),
                   -1);
        }
}

/* Computes Q, K and V of a row: filtered over the last four rows, then silu. For a delta rule they have length 1, and Q
   is divided by sqrt(hd). */
static void filter_row(const model *m, int64_t layer, num *qkv, const num *in, int64_t t) {
    const int64_t h = m->s->hidden, hd = h / m->s->heads, width = 3 * h;
    const num *filter = weight_at(m, layer, "conv");
    for (int64_t c = 0; c < width; c++) {
        num sum = put(0);
        for (int64_t back = 0; back < 4 && back <= t; back++) {
            sum = plus(sum, times(filter[(3 - back) * width + c], in[(t - back) * width + c]));
        }
        qkv[c] = silu(sum);
    }
    for (int64_t c = 0; c < 2 * h && !is_kind(m->s, layer, "mamba"); c += hd) {
        const num length = inverse_root(dot(qkv + c, qkv + c, 1, hd));
        for (int64_t d = c; d < c + hd; d++) qkv[d] = scaled(times(qkv[d], length), c < h ? 1 / sqrt((double)hd) : 1);
    }
}

/* Updates S = decay S, then S += beta k (v - S'k)', in Mamba-2 S += step k v'; out = S'q. */
static void mix_recurrent(const model *m, int64_t layer, num *out, const num *x, int64_t n) {
    const setup *s = m->s;
    const int is_mamba = is_kind(s, layer, "mamba");
    const int64_t h = s->hidden, hd = h / s->heads, decays = is_kind(s, layer, "kda") ? h : s->heads;
    num *in = list_of(n * 3 * h), *qkv = list_of(3 * h), *step = list_of(decays), *beta = list_of(s->heads);
    num *S = list_of(h * hd), *gate = list_of(h), *write = list_of(hd);
    for (int64_t i = 0; i < h * hd; i++) S[i] = put(0);
    for (int64_t t = 0; t < n; t++) {
        const num *row = x + t * h;
        multiply(in + t * 3 * h, row, weight_at(m, layer, "wqkv"), h, 3 * h);
        multiply(step, row, weight_at(m, layer, "w_decay"), h, decays);
        add_bias(step, weight_at(m, layer, "dt_bias"), decays);
        multiply(gate, row, weight_at(m, layer, "wg"), h, h);
        if (!is_mamba) multiply(beta, row, weight_at(m, layer, "w_beta"), h, s->heads);
        filter_row(m, layer, qkv, in, t);
        for (int64_t i = 0; i < decays; i++) step[i] = softplus(step[i]);
        for (int64_t i = 0; i < s->heads; i++) {
            const num *q = qkv + i * hd, *k = q + h, *v = k + h, rate = exp_of(weight_at(m, layer, "a_log")[i]);
            num *state = S + i * hd * hd, much = is_mamba ? step[i] : sigmoid(beta[i]);
            for (int64_t a = 0; a < hd * hd; a++) {
                const num by = times(rate, step[decays == h ? i * hd + a / hd : i]);
                state[a] = times(state[a], exp_of(scaled(by, -1)));
            }
            for (int64_t b = 0; b < hd; b++) {
                write[b] = is_mamba ? v[b] : plus(v[b], scaled(dot(k, state + b, hd, hd), -1));
                write[b] = times(much, write[b]);
            }
            for (int64_t a = 0; a < hd * hd; a++) state[a] = plus(state[a], times(k[a / hd], write[a % hd]));
            num *to = out + t * h + i * hd;
            for (int64_t b = 0; b < hd; b++) {
                to[b] = dot(q, state + b, hd, hd);
                if (is_mamba) to[b] = plus(to[b], times(weight_at(m, layer, "skip")[i], v[b]));
            }
            norm(to, to, weight_at(m, layer, "out_norm"), hd);
            for (int64_t b = 0; b < hd; b++) to[b] = times(to[b], silu(gate[i * hd + b]));
        }
    }
}

static void feed(num *out, const num *x, int64_t h, int64_t f, const num *gate, const num *up, const num *down) {
    num *a = list_of(f), *b = list_of(f);
    multiply(a, x, gate, h, f);
    multiply(b, x, up, h, f);
    for (int64_t i = 0; i < f; i++) a[i] = times(silu(a[i]), b[i]);
    multiply(out, a, down, f, h);
}

/* Computes the weights of the highest scores. `chosen` counts rows for each expert, `means` sums score / sum of
   scores. */
static void feed_experts(const model *m, int64_t layer, num *out, const num *x, double *chosen, num *means) {
    const setup *s = m->s;
    const int64_t h = s->hidden, f = expert_width(s);
    num *score = list_of(s->experts), *one = list_of(h), all = put(0), taken = put(0);
    multiply(score, x, weight_at(m, layer, "router"), h, s->experts);
    for (int64_t i = 0; i < h; i++) out[i] = put(0);
    for (int64_t e = 0; e < s->experts; e++) all = plus(all, score[e] = sigmoid(score[e]));
    for (int round = 0; round < 2; round++) {
        for (int64_t e = 0; e < s->experts; e++) {
            int64_t before = 0;
            for (int64_t o = 0; o < s->experts; o++) before += value_of(score[o]) > value_of(score[e]);
            if (round == 0) means[e] = plus(means[e], times(score[e], inverse(all)));
            if (before >= s->active) continue;
            if (round == 0) taken = plus(taken, score[e]);
            if (round == 0) continue;
            chosen[e]++;
            feed(one, x, h, f, weight_at(m, layer, "w_gate") + e * h * f, weight_at(m, layer, "w_up") + e * h * f,
                 weight_at(m, layer, "w_down") + e * f * h);
            for (int64_t i = 0; i < h; i++) out[i] = plus(out[i], times(one[i], times(score[e], inverse(taken))));
        }
    }
}

/* Drops a number depending on its place, or scales it up. */
static num dropped(const model *m, num a, int64_t layer, int site, int64_t sequence, int64_t position,
                   int64_t feature) {
    const uint64_t seed = pair(m->dropout_seed, (uint64_t)(3 * layer + site));
    const uint64_t row = pair(seed, ((uint64_t)sequence << 32) + (uint64_t)position);
    if (!(m->s->dropout > 0)) return a;
    return scaled(a, uniform(mix(row + (uint64_t)feature)) < m->s->dropout ? 0 : 1 / (1 - m->s->dropout));
}

static void run_layer(model *m, int64_t layer, num *stream, int64_t n, int64_t sequence, double n_sequences) {
    const setup *s = m->s;
    const int64_t h = s->hidden;
    num *x = list_of(n * h), *mixed = list_of(n * h), *out = list_of(h), *means = list_of(s->experts);
    double chosen[64] = {0};
    for (int64_t e = 0; e < s->experts; e++) means[e] = put(0);
    for (int64_t t = 0; t < n; t++) norm(x + t * h, stream + t * h, weight_at(m, layer, "attention_norm"), h);
    if (is_recurrent(s, layer)) mix_recurrent(m, layer, mixed, x, n);
    else if (is_kind(s, layer, "latent")) mix_latent(m, layer, mixed, x, n);
    else mix_full(m, layer, mixed, x, n);
    for (int64_t t = 0; t < n; t++) {
        num *to = stream + t * h;
        multiply(out, mixed + t * h, weight_at(m, layer, "wo"), h, h);
        for (int64_t i = 0; i < h; i++) to[i] = plus(to[i], dropped(m, out[i], layer, 1, sequence, t, i));
        norm(x + t * h, to, weight_at(m, layer, "ffn_norm"), h);
        if (is_kind(s, layer, "experts")) feed_experts(m, layer, out, x + t * h, chosen, means);
        else
            feed(out, x + t * h, h, s->ffn, weight_at(m, layer, "w_gate"), weight_at(m, layer, "w_up"),
                 weight_at(m, layer, "w_down"));
        for (int64_t i = 0; i < h; i++) to[i] = plus(to[i], dropped(m, out[i], layer, 2, sequence, t, i));
    }
    for (int64_t e = 0; e < s->experts && is_kind(s, layer, "experts"); e++) {
        const double often = (double)s->experts * chosen[e] / ((double)s->active * (double)n);
        m->balance = plus(m->balance, scaled(means[e], s->balance * often / (double)n / n_sequences));
    }
}

/* ================================================================================================================
   >>documents
   ================================================================================================================ */

typedef struct text {
    int64_t count, n_files, n_cut;
    int64_t first[300];
    uint16_t tokens[20000];
} text;

static void add_text(text *d, const char *bytes, int64_t n) {
    int64_t at = d->first[d->count];
    d->tokens[at++] = 256;
    for (int64_t i = 0; i < n; i++) d->tokens[at++] = (unsigned char)bytes[i];
    d->tokens[at++] = 257;
    d->first[++d->count] = at;
}

/* A block ends at two or more line ends, or when it reaches the longest length. */
static void add_bytes(text *d, const char *bytes, int64_t n, int64_t longest) {
    const int64_t most = longest == 0 || n + 2 <= longest ? n : longest - 2;
    int64_t begin = 0;
    d->n_files++;
    d->n_cut += most < n;
    for (int64_t i = 1; i <= n && most < n; i++) {
        const int blank = i - begin >= 2 && bytes[i - 1] == '\n' && bytes[i - 2] == '\n';
        if (i < n && i - begin < most && !(blank && bytes[i] != '\n')) continue;
        add_text(d, bytes + begin, i - begin);
        begin = i;
    }
    if (most == n) add_text(d, bytes, n);
}

static void add_made_up(text *d, int64_t n, const setup *s) {
    const uint64_t key = pair(pair((uint64_t)s->seed, 4), (uint64_t)d->count);
    const int64_t at = d->first[d->count];
    for (int64_t i = 0; i < n; i++) d->tokens[at + i] = (uint16_t)(pair(key, (uint64_t)i) % 258);
    d->first[++d->count] = at + n;
}

/* The files below a folder that count, in reading order, and other files there. */
static const struct {
    const char *name, *bytes;
} files[] = {{"A", "\n\nHow it begins\n\n\n\nand\n goes on,\nline by line.\n\nx"},
             {"b", "one more text, without blank lines and longer"},
             {"builder", "short\n\n"},
             {"c/1", ""},
             {"c/2", "\xE2\x82\xAC and \xFF"},
             {"d", "\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n"},
             {"e", "ab\n\ncd\n\n\nefgh\n\nijklmnopqrstuvw\n\nxyz"},
             {NULL, NULL},
             {"build/x", "not this"},
             {".hidden", "nor this"},
             {"c/.h", "nor this"},
             {"c/build/x", "nor this"}};
enum { FILES = sizeof files / sizeof files[0] };

static char folder[200];

static const char *in_folder(const char *name) {
    static char paths[4][300];
    static int at;
    at = (at + 1) % 4;
    snprintf(paths[at], sizeof paths[at], "%s/%s", folder, name);
    return paths[at];
}

static void put_file(const char *path, const void *bytes, size_t n) {
    FILE *file = fopen(path, "wb");
    REQUIRE(file != NULL);
    CHECK(fwrite(bytes, 1, n, file) == n);
    CHECK(fclose(file) == 0);
}

static void make_files(void) {
    const char *const made[] = {"texts", "texts/c", "texts/build", "texts/c/build"};
    for (int i = 0; i < 4; i++) mkdir(in_folder(made[i]), 0700);
    for (int i = 0; i < FILES; i++) {
        char name[40];
        snprintf(name, sizeof name, "texts/%s", files[i].name ? files[i].name : "");
        if (files[i].name) put_file(in_folder(name), files[i].bytes, strlen(files[i].bytes));
    }
    CHECK(symlink("A", in_folder("texts/link")) == 0 || access(in_folder("texts/link"), F_OK) == 0);
}

static void read_documents(text *d, const setup *s) {
    int64_t lengths[40], with[40], shared[40];
    const int64_t n = numbers_of(s->words, "--synthetic", lengths), alike = numbers_of(s->words, "--with", with);
    memset(d, 0, sizeof *d);
    numbers_of(s->words, "--shared", shared);
    for (int64_t i = 0; i < n; i++) {
        add_made_up(d, lengths[i], s);
        for (int64_t t = 0; t < shared[i] && i < alike; t++)
            d->tokens[d->first[i] + t] = d->tokens[d->first[with[i]] + t];
    }
    for (int i = 0; files[i].name && n == 0; i++)
        add_bytes(d, files[i].bytes, (int64_t)strlen(files[i].bytes), s->longest);
}

/* Returns the document at position `which` of the whole training: each epoch has each document once, in an order of its
   own. */
static int64_t drawn_document(const setup *s, int64_t count, int64_t which) {
    const uint64_t key = pair(pair((uint64_t)s->seed, 2), (uint64_t)(which / count));
    int64_t order[300];
    for (int64_t i = 0; i < count; i++) order[i] = i;
    for (int64_t i = count - 1; i > 0; i--) {
        const int64_t j = (int64_t)(pair(key, (uint64_t)i) % (uint64_t)(i + 1)), kept = order[i];
        order[i] = order[j];
        order[j] = kept;
    }
    return order[which % count];
}

/* ================================================================================================================
   >>steps
   ================================================================================================================ */

typedef struct sequences {
    int64_t count, length[40], ignored[40];
    const uint16_t *tokens[40];
} sequences;

static sequences take_batch(const setup *s, const text *d, int64_t step) {
    const int made_up = word_of(s->words, "--synthetic") != NULL;
    sequences b = {0};
    b.count = made_up ? d->count : s->batch;
    for (int64_t i = 0; i < b.count; i++) {
        const int64_t which = made_up ? i : drawn_document(s, d->count, step * s->batch + i);
        b.tokens[i] = d->tokens + d->first[which];
        b.length[i] = d->first[which + 1] - d->first[which];
        b.ignored[i] = (int64_t)floor(s->prompt_fraction * (double)b.length[i]);
        if (s->prompt > b.ignored[i]) b.ignored[i] = s->prompt;
    }
    return b;
}

/* Returns whether a token is predicted: a token precedes it, and it is not part of a prompt. */
static int is_target(const sequences *b, int64_t i, int64_t t) {
    return t >= 1 && t < b->length[i] && t >= b->ignored[i];
}

static int64_t count_targets(const sequences *b, int64_t from_token) {
    int64_t n = 0;
    for (int64_t i = 0; i < b->count; i++)
        for (int64_t t = from_token; t < b->length[i]; t++) n += is_target(b, i, t);
    return n;
}

/* Returns the weight of token t of sequence i in the loss. With --shared-mean, all sequences that have it as a target,
   after the same tokens, share its mean equally. */
static double weight_of(const setup *s, const sequences *b, int64_t i, int64_t t) {
    const double mean = 1 / (double)count_targets(b, 1);
    double sum = 0, n = 0;
    for (int64_t j = 0; j < b->count; j++) {
        int same = s->shared_mean ? is_target(b, j, t) : i == j;
        for (int64_t a = 0; a <= t && same; a++) same = b->tokens[i][a] == b->tokens[j][a];
        if (!same) continue;
        sum += s->advantages ? mean * normal(pair((uint64_t)s->seed, 1), j) : mean;
        n++;
    }
    return sum / n / n;
}

/* Returns -log of a token's probability. */
static num surprise(const model *m, const num *row, const num *gain, int token) {
    const int64_t h = m->s->hidden;
    const num *head = weight_at(m, -1, m->s->untied ? "head" : "embedding");
    num *x = list_of(h), *logit = list_of(258);
    double highest = -INFINITY, total = 0;
    norm(x, row, gain, h);
    for (int i = 0; i < 258; i++) logit[i] = dot(x, head + i * h, 1, h);
    for (int i = 0; i < 258; i++) highest = fmax(highest, value_of(logit[i]));
    for (int i = 0; i < 258; i++) total += exp(value_of(logit[i]) - highest);
    const num result = put(log(total) + highest - value_of(logit[token]));
    for (int i = 0; i < 258; i++) from(logit[i], exp(value_of(logit[i]) - highest) / total - (i == token));
    return result;
}

/* Computes the residual stream of the module that predicts one token further. */
static void look_further(const model *m, num *stream, const uint16_t *tokens, int64_t n) {
    const int64_t h = m->s->hidden;
    const num *gain = weight_at(m, -1, "mtp_norm"), *table = weight_at(m, -1, "embedding");
    num *both = list_of(2 * h), *next = list_of(h);
    for (int64_t t = 0; t < n; t++) {
        for (int64_t i = 0; i < h; i++) next[i] = t + 1 < n ? table[tokens[t + 1] * h + i] : put(0);
        norm(both, stream + t * h, gain, h);
        norm(both + h, next, gain + h, h);
        multiply(stream + t * h, both, weight_at(m, -1, "mtp_project"), 2 * h, h);
    }
}

/* Returns the loss of a batch, whose computation is then on the tape. */
static num loss_of(model *m, const sequences *b) {
    const setup *s = m->s;
    const int64_t h = s->hidden, further = count_targets(b, 2);
    num loss = put(0);
    double n_sequences = 0;
    for (int64_t i = 0; i < b->count; i++) n_sequences += b->length[i] > 0;
    m->balance = put(0);
    for (int64_t i = 0; i < b->count; i++) {
        const int64_t n = b->length[i];
        num *stream = list_of(n * h);
        for (int64_t t = 0; t < n; t++)
            for (int64_t x = 0; x < h; x++) {
                stream[t * h + x] = dropped(m, m->weight[b->tokens[i][t] * h + x], -1, 0, i, t, x);
            }
        for (int64_t layer = 0; layer < s->layers && n > 0; layer++) run_layer(m, layer, stream, n, i, n_sequences);
        for (int64_t t = 1; t < n; t++) {
            if (!is_target(b, i, t)) continue;
            const num one = surprise(m, stream + (t - 1) * h, weight_at(m, -1, "final_norm"), b->tokens[i][t]);
            loss = plus(loss, scaled(one, weight_of(s, b, i, t)));
        }
        if (!(s->mtp > 0) || n == 0) continue;
        look_further(m, stream, b->tokens[i], n);
        run_layer(m, s->layers, stream, n, i, n_sequences);
        for (int64_t t = 2; t < n; t++) {
            if (!is_target(b, i, t)) continue;
            const num one = surprise(m, stream + (t - 2) * h, weight_at(m, -1, "mtp_final_norm"), b->tokens[i][t]);
            loss = plus(loss, scaled(one, s->mtp / (double)further));
        }
    }
    return plus(loss, m->balance);
}

static double rate_at(const setup *s, int64_t step) {
    if (step < s->warmup) return s->rate * (double)(step + 1) / (double)s->warmup;
    const double done = (double)(step - s->warmup) / (double)(s->steps - s->warmup);
    return s->rate * (0.1 + 0.9 * (1 + cos(acos(-1.0) * done)) / 2);
}

typedef struct run {
    weight_list list;
    double *weights, *first, *second, *gradient; /* in the checkpoint's order; the last step's gradient */
    double loss[20], length[20];                 /* of each step */
} run;

/* Updates the weights by Adam, with decoupled decay of matrices and clipped gradients. */
static void move_weights(run *r, const setup *s, int64_t step) {
    const weight_list *w = &r->list;
    double squares = 0;
    memcpy(r->gradient, tape.slope, (size_t)w->count * sizeof *r->gradient);
    for (int64_t i = 0; i < w->count; i++) squares += tape.slope[i] * tape.slope[i];
    r->length[step] = sqrt(squares);
    const double by = s->clip > 0 && sqrt(squares) > s->clip ? s->clip / sqrt(squares) : 1, rate = rate_at(s, step);
    for (int64_t i = 0; i < w->n; i++) {
        for (int64_t j = w->parts[i].first; j < w->parts[i].first + w->parts[i].count; j++) {
            const double g = by * tape.slope[j];
            r->first[j] = 0.9 * r->first[j] + 0.1 * g;
            r->second[j] = 0.95 * r->second[j] + 0.05 * g * g;
            const double m = r->first[j] / (1 - pow(0.9, (double)(step + 1)));
            const double v = r->second[j] / (1 - pow(0.95, (double)(step + 1)));
            if (w->parts[i].inputs > 0) r->weights[j] *= 1 - rate * s->decay;
            r->weights[j] -= rate * m / (sqrt(v) + 1e-8);
        }
    }
}

static run run_of(const setup *s, const text *d, int64_t steps) {
    run r = {weights_of(s), NULL, NULL, NULL, NULL, {0}, {0}};
    model m = {s, r.list, NULL, 0, -1};
    const size_t n = (size_t)r.list.count;
    double **const arrays[] = {&r.weights, &r.first, &r.second, &r.gradient};
    for (int i = 0; i < 4; i++) *arrays[i] = (double *)calloc(n, sizeof(double));
    draw_weights(r.weights, &r.list, s);
    m.weight = (num *)calloc(n, sizeof(num));
    for (size_t i = 0; i < n; i++) m.weight[i] = (num)i;
    for (int64_t step = 0; step < steps; step++) {
        const sequences b = take_batch(s, d, step);
        for (size_t i = 0; i < n; i++) put(r.weights[i]);
        m.dropout_seed = word_of(s->words, "--check") ? pair((uint64_t)s->seed, 3)
                                                      : pair(pair((uint64_t)s->seed, 3), (uint64_t)step);
        r.loss[step] = value_of(loss_of(&m, &b));
        run_back();
        move_weights(&r, s, step);
        forget();
    }
    free(m.weight);
    return r;
}

static void run_free(run *r) {
    free(r->weights);
    free(r->first);
    free(r->second);
    free(r->gradient);
}

/* ================================================================================================================
   >>trainer    the program, and its output
   ================================================================================================================ */

static char said[16384], complained[2000];

static void read_text(const char *name, char *to, size_t most) {
    FILE *file = fopen(in_folder(name), "rb");
    to[0] = 0;
    REQUIRE(file != NULL);
    to[fread(to, 1, most - 1, file)] = 0;
    fclose(file);
}

/* Runs the trainer. Returns its exit status. Without --synthetic it reads the folder's documents. */
static int call_trainer(const char *words) {
    char command[3000];
    const char *own = getenv("TRAIN_CPU_F64"), *build = getenv("BUILD");
    const char *place = own ? own : build ? build : "build";
    snprintf(command, sizeof command, "OMP_NUM_THREADS=1 '%s%s' %s %s >'%s' 2>'%s'",
             place, own ? "" : "/train_cpu_f64", words, word_of(words, "--synthetic") ? "" : in_folder("texts"),
             in_folder("out"), in_folder("err"));
    const int status = system(command);
    read_text("out", said, sizeof said);
    read_text("err", complained, sizeof complained);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* Packs a batch, by the library. */
static cf_plan *plan_of(const setup *s, const sequences *b) {
    static const char *const methods[] = {"best", "next"}, *const splits[] = {"full", "even", "cost"};
    const void *tokens[40];
    cf_shared_prefix shares[40];
    cf_pack_desc desc = {0};
    cf_plan *plan = NULL;
    const char *word = word_of(s->words, "--method");
    for (int i = 0; i < 2 && word; i++)
        desc.method = strcmp(word, methods[i]) == 0 ? (cf_pack_method)(i + 1) : desc.method;
    word = word_of(s->words, "--split");
    for (int i = 0; i < 3 && word; i++)
        desc.split = strcmp(word, splits[i]) == 0 ? (cf_split_method)(i + 1) : desc.split;
    desc.chunk_size = whole_of(s->words, "--chunk-size", 256);
    desc.no_tails = word_of(s->words, "--no-tails") != NULL;
    desc.align = whole_of(s->words, "--align", 1);
    desc.max_slices = whole_of(s->words, "--max-slices", 0);
    desc.n_ranks = whole_of(s->words, "--ranks", 1);
    desc.min_shared_prefix = whole_of(s->words, "--share", 0);
    for (int64_t i = 0; i < b->count; i++) tokens[i] = b->tokens[i];
    if (desc.min_shared_prefix > 0) {
        CHECK_INT(cf_shared_prefixes_find(tokens, sizeof(uint16_t), b->length, b->count, shares, NULL, NULL), CF_OK);
        desc.shared_prefixes = shares;
    }
    CHECK_INT(cf_pack(b->length, b->count, &desc, &plan, NULL), CF_OK);
    return plan;
}

/* Returns the line that begins with these words; "" if there is none. */
static const char *line_of(const char *begin) {
    static char line[400];
    const char *at = strncmp(said, begin, strlen(begin)) == 0 ? said : strstr(said, begin);
    while (at && at > said && at[-1] != '\n') at = strstr(at + 1, begin);
    snprintf(line, sizeof line, "%.*s", at ? (int)strcspn(at, "\n") : 0, at ? at : "");
    return line;
}

static void check_data_line(const setup *s, const text *d) {
    char wanted[200];
    int64_t longest = 0;
    for (int64_t i = 0; i < d->count; i++)
        longest = d->first[i + 1] - d->first[i] > longest ? d->first[i + 1] - d->first[i] : longest;
    int n = snprintf(wanted, sizeof wanted, "data: %d documents, %d tokens, longest %d", (int)d->count,
                     (int)d->first[d->count], (int)longest);
    if (d->n_cut > 0)
        snprintf(wanted + n, sizeof wanted - (size_t)n,
                 " (%d of %d files, longer than --max-length, were cut at blank lines)",
                 (int)d->n_cut, (int)d->n_files);
    CHECK_STR(line_of("data: "), wanted);
    snprintf(wanted, sizeof wanted, "model: %d parameters (float64), %d layers, hidden %d; chunk size %d, K %d",
             (int)weights_of(s).count, (int)s->layers, (int)s->hidden, (int)whole_of(s->words, "--chunk-size", 256),
             (int)whole_of(s->words, "--k", 1));
    CHECK_STR(line_of("model: "), wanted);
}

/* Checks that there is a line for each step that is to be printed, and no other. */
static void check_steps(const setup *s, const text *d, const run *r, int64_t steps) {
    const int64_t every = whole_of(s->words, "--print-every", 1);
    int lines = 0;
    for (const char *at = strstr(said, "\nstep "); at; at = strstr(at + 1, "\nstep ")) lines++;
    for (int64_t step = 0; step < steps; step++) {
        char begin[40], rate[20], wanted[20];
        double loss = NAN, length = NAN, activations = 0, state = -1;
        int chunks = 0;
        if ((step + 1) % every != 0 && step + 1 != s->steps) continue;
        const sequences b = take_batch(s, d, step);
        cf_plan *plan = plan_of(s, &b);
        snprintf(begin, sizeof begin, "step %4d/%d  loss ", (int)step + 1, (int)s->steps);
        snprintf(wanted, sizeof wanted, "%.2e", rate_at(s, step));
        const int n = sscanf(line_of(begin) + strlen(begin) * (line_of(begin)[0] != 0),
                             "%la lr %19s |gradient| %lf %d chunks %*f tokens/s activations %lf MiB state %lf MiB",
                             &loss, rate, &length, &chunks, &activations, &state);
        if (!CHECK_INT(n, 6)) FAIL("%s", line_of(begin));
        if (!CHECK(fabs(loss - r->loss[step]) <= 1e-11 * fabs(r->loss[step])))
            FAIL("loss %.17g, wanted %.17g", loss, r->loss[step]);
        CHECK_STR(rate, wanted);
        CHECK(fabs(length - r->length[step]) < 0.0006);
        CHECK_INT(chunks, plan ? plan->n_chunks : -1);
        CHECK(activations > 0 && state >= 0);
        cf_plan_free(plan);
        lines--;
    }
    CHECK_INT(lines, 0);
}

/* ---- the checkpoint: magic, byte order, four counts; settings of 40 bytes; progress; three arrays; a hash ---- */

enum { HEAD = 48, SETTINGS = 24, SETTING = 40, PROGRESS = 4 };
enum { ARRAYS_AT = HEAD + SETTINGS * SETTING + PROGRESS * 8 };

static char *read_image(const char *name, int64_t *bytes) {
    FILE *file = fopen(in_folder(name), "rb");
    char *image = (char *)calloc(1 << 22, 1);
    *bytes = file ? (int64_t)fread(image, 1, 1 << 22, file) : 0;
    if (file) fclose(file);
    return image;
}

static int64_t word_at(const char *image, int64_t at) {
    int64_t word;
    memcpy(&word, image + at, 8);
    return word;
}

static void check_setting(const char *image, int number, const char *name, double value, int is_double) {
    const char *at = image + HEAD + number * SETTING;
    double real;
    memcpy(&real, at + 24, 8);
    harness_note("setting %d", number);
    CHECK_STR(at, name);
    CHECK_INT(word_at(at, 32), is_double);
    if (is_double) CHECK(real == value);
    else CHECK(value == -1 || word_at(at, 24) == (int64_t)value);
    harness_note("%s", "");
}

static void check_settings(const char *image, const setup *s, const text *d) {
    const struct {
        const char *name;
        double value;
        int is_double;
    } all[SETTINGS] = {{"vocabulary", 258, 0},
                       {"layers", (double)s->layers, 0},
                       {"hidden", (double)s->hidden, 0},
                       {"heads", (double)s->heads, 0},
                       {"kv-heads", (double)s->kv_heads, 0},
                       {"ffn", (double)s->ffn, 0},
                       {"untied", s->untied, 0},
                       {"dropout", s->dropout, 1},
                       {"rope theta", 1e6, 1},
                       {"norm epsilon", 1e-6, 1},
                       {"window", (double)s->window, 0},
                       {"kinds of layers", -1, 0},
                       {"batch", (double)s->batch, 0},
                       {"steps", (double)s->steps, 0},
                       {"lr", s->rate, 1},
                       {"warmup", (double)s->warmup, 0},
                       {"weight-decay", s->decay, 1},
                       {"clip", s->clip, 1},
                       {"seed", (double)s->seed, 0},
                       {"prompt", (double)s->prompt, 0},
                       {"prompt-fraction", s->prompt_fraction, 1},
                       {"shared-mean", s->shared_mean, 0},
                       {"advantages", s->advantages, 0},
                       {"hash of the documents", -1, 0}};
    for (int i = 0; i < SETTINGS; i++) check_setting(image, i, all[i].name, all[i].value, all[i].is_double);
    const uint64_t lengths = hash((uint64_t)d->count, d->first, (size_t)(d->count + 1) * 8);
    CHECK_INT(word_at(image, HEAD + 23 * SETTING + 24),
              (int64_t)hash(lengths, d->tokens, (size_t)d->first[d->count] * 2));
}

/* Returns the largest difference of any tensor, relative to its largest number. */
static double check_numbers(const char *what, const char *image, const double *wanted, const weight_list *w) {
    double worst = 0;
    for (int64_t i = 0; i < w->n; i++) {
        double largest = 0, difference = 0;
        for (int64_t j = w->parts[i].first; j < w->parts[i].first + w->parts[i].count; j++) {
            double got, off;
            memcpy(&got, image + j * 8, 8);
            off = fabs(got - wanted[j]);
            difference = isfinite(off) ? fmax(difference, off) : HUGE_VAL; /* a NaN or infinity decides the result */
            largest = fmax(largest, fabs(wanted[j]));
        }
        /* for tensors that are 0 apart from rounding */
        if (!CHECK(isfinite(difference) && difference <= 1e-8 * largest + 1e-19))
            FAIL("%s of %s: %g off, largest %g", what, w->parts[i].name, difference, largest);
        worst = fmax(worst, largest > 0 ? difference / largest : 0);
    }
    return worst;
}

static double check_image(const char *name, const setup *s, const text *d, const run *r, int64_t steps) {
    int64_t bytes = 0;
    char *image = read_image(name, &bytes), line[80];
    const int64_t n = r->list.count, taken = steps * s->batch;
    const int made_up = word_of(s->words, "--synthetic") != NULL;
    double worst = -1;
    const int64_t head[] = {0x0102030405060708, SETTINGS, PROGRESS, n, 8};
    if (CHECK_INT(bytes, ARRAYS_AT + 3 * n * 8 + 8)) {
        CHECK(memcmp(image, "cftrain1", 8) == 0 && memcmp(image + 8, head, sizeof head) == 0);
        CHECK_INT(word_at(image, bytes - 8), (int64_t)hash(0, image, (size_t)bytes - 8));
        check_settings(image, s, d);
        const char *at = image + HEAD + SETTINGS * SETTING;
        CHECK_INT(word_at(at, 0), steps);
        CHECK_INT(word_at(at, 8) * d->count + word_at(at, 16),
                  made_up ? 0 : taken); /* epochs, and documents of the current one */
        CHECK(word_at(at, 16) <= d->count);
        at = image + ARRAYS_AT;
        worst = check_numbers("weights", at, r->weights, &r->list);
        worst = fmax(worst, check_numbers("first moments", at + n * 8, r->first, &r->list));
        worst = fmax(worst, check_numbers("second moments", at + 2 * n * 8, r->second, &r->list));
        snprintf(line, sizeof line, "weights after step %d: %016llx", (int)steps,
                 (unsigned long long)hash(0, at, (size_t)n * 8));
        CHECK_STR(line_of("weights after"), line);
    }
    free(image);
    return worst;
}

#define BASE "--exact --layers 2 --hidden 8 --heads 2 --kv-heads 1 --ffn 6 --batch 3 --steps 3 --warmup 2 " \
             "--lr 0.01 --max-length 20 --chunk-size 16 --k 2 "

/* Trains with both and compares everything. Returns the largest difference. */
static double compare(const char *options) {
    static text d;
    char words[1500], more[1800];
    snprintf(words, sizeof words, BASE "%s", options);
    snprintf(more, sizeof more, "%s --checkpoint '%s'", words, in_folder("point"));
    const setup s = setup_of(words);
    const int64_t stop = whole_of(words, "--stop-after", 0), steps = stop > 0 && stop < s.steps ? stop : s.steps;
    harness_note("%s", options);
    remove(in_folder("point"));
    read_documents(&d, &s);
    run r = run_of(&s, &d, steps);
    if (!CHECK_INT(call_trainer(more), 0)) FAIL("%s", complained);
    harness_note("%s", options);
    check_data_line(&s, &d);
    check_steps(&s, &d, &r, steps);
    const double worst = check_image("point", &s, &d, &r, steps);
    run_free(&r);
    harness_note("%s", "");
    return worst;
}

static void compare_all(const char *const *options, int n) {
    double worst = 0;
    for (int i = 0; i < n; i++) worst = fmax(worst, compare(options[i]));
    harness_report("at most %.1e off", worst);
}
#define COMPARE_ALL(list) compare_all(list, (int)(sizeof list / sizeof list[0]))

/* ================================================================================================================
   >>tests
   ================================================================================================================ */

#define MADE_UP "--synthetic 37,9,1,0,14,5 "
#define ALIKE "--synthetic 30,28,34,21,30 --with 0,0,0,2,0 --shared 0,20,20,12,30 "

TEST(kinds_of_layers_train_as_defined) {
    static const char *const all[] = {
        MADE_UP,
        MADE_UP "--window 7 --kv-heads 2",
        MADE_UP "--kinds full+sinks+gate,window+gate --window 5 --untied",
        MADE_UP "--kinds chunked,full --window 6 --mtp 0.3",
        MADE_UP "--kinds latent --hidden 16 --mtp 0.4",
        MADE_UP "--kinds delta,kda --dropout 0.2",
        MADE_UP "--lr 0.001 --kinds mamba,experts --balance 0.3 --experts 5 --active 3 --ffn 9",
        MADE_UP
        "--kinds latent+experts,window+sinks,delta+experts --hidden 16 --layers 3 --window 4 --balance 1 --mtp 0.5 "
                "--untied",
        MADE_UP "--dropout 0.3 --layers 1 --heads 4 --kv-heads 2 --hidden 16",
        "--synthetic 2,1,2,0 --mtp 0.4 --balance 1 --kinds experts",
        "--synthetic 9,3 --kinds full,experts --experts 1 --active 1 --steps 1"};
    COMPARE_ALL(all);
}

TEST(options_do_what_they_say) {
    static const char *const all[] = {"",
                                      "--seed 7 --batch 5",
                                      "--max-length 3 --batch 9",
                                      "--max-length 0 --batch 4",
                                      "--max-length 17",
                                      "--steps 6 --warmup 0 --layers 1",
                                      "--steps 5 --warmup 9 --lr 0.1 --layers 1",
                                      "--steps 4 --clip 0 --weight-decay 0.7",
                                      "--clip 0.05",
                                      "--prompt 5",
                                      "--prompt-fraction 0.4",
                                      "--prompt 7 --prompt-fraction 0.3",
                                      MADE_UP "--advantages",
                                      ALIKE,
                                      ALIKE "--shared-mean --share 1",
                                      ALIKE "--share 1 --advantages --kinds delta,full",
                                      ALIKE "--shared-mean --share 1 --advantages --prompt 10",
                                      ALIKE "--share 15 --kinds kda,mamba",
                                      "--steps 7 --stop-after 3 --print-every 2",
                                      "--steps 5 --print-every 3 --layers 1",
                                      "--batch 40 --steps 2"};
    COMPARE_ALL(all);
}

/* Chunks do not change the numbers; their count shows that there are some. */
TEST(chunks_change_nothing) {
#define RICH MADE_UP "--kinds window+sinks,delta --window 9 --mtp 0.2 --dropout 0.1 "
    static const char *const all[] = {
        RICH "--chunk-size 5 --k 1",
        RICH "--chunk-size 5 --k 1 --outputs",
        RICH "--chunk-size 6 --k 9 --split even",
        RICH "--chunk-size 8 --split cost --method best",
        RICH "--chunk-size 8 --align 4 --method next",
        RICH "--max-slices 1",
        RICH "--ranks 3 --no-tails",
        RICH "--chunk-size 8 --stream 32768 --threads 2",
        "--synthetic 96,40,32 --kinds full,window --window 20 --chunk-size 32 --steps 1", /* whole tiles */
        "--synthetic 90,88,9,90 --with 0,0,0,1 --shared 0,40,0,45 --share 1 --chunk-size 100 --steps 2",
        "--synthetic 75,34,64 --kinds full+gate,latent --hidden 16 --chunk-size 20 --k 1 --outputs --stream 32768",
        "--synthetic 75,34,64 --kinds window+sinks,latent,chunked --window 33 --hidden 16 --layers 3 --chunk-size 36"};
    COMPARE_ALL(all);
}

/* Logits of several thousand, for which a direct exponential would overflow. */
TEST(large_numbers_are_no_trouble) {
    static const char *const all[] = {"--lr 40 --warmup 0 --clip 0 --steps 2",
                                      "--lr 300 --warmup 0 --steps 2 --untied --layers 1",
                                      "--lr 5 --warmup 0 --steps 3 --kinds full+sinks+gate",
                                      "--lr 60 --warmup 0 --steps 2 --kinds delta,mamba"};
    COMPARE_ALL(all);
}

/* ---- the check of gradients: its verdict on each tensor ---- */

static double largest_in(const double *x, const part *p) {
    double largest = 0;
    for (int64_t i = p->first; i < p->first + p->count; i++) largest = fmax(largest, fabs(x[i]));
    return largest;
}

static void check_first_line(const setup *s, const sequences *b, const cf_plan *plan) {
    char wanted[300];
    cf_plan_stats stats;
    cf_schedule *schedule = NULL;
    cf_schedule_desc desc = {0};
    int64_t replays = 0, tokens = 0;
    desc.shape.k = whole_of(s->words, "--k", 1);
    cf_plan_measure(plan, NULL, &stats);
    CHECK_INT(cf_schedule_make(plan, &desc, &schedule, NULL), CF_OK);
    for (int64_t i = 0; schedule && i < schedule->n_actions; i++) replays += schedule->actions[i].pass == CF_R;
    for (int64_t i = 0; i < b->count; i++) tokens += b->length[i];
    snprintf(
        wanted, sizeof wanted,
        "check float64: %d sequences, %d tokens in %d rows, %d targets in %d chunks of %d, K %d: longest chain %d, "
        "%d hybrid, %d replays",
        (int)b->count, (int)tokens, (int)stats.rows, (int)count_targets(b, 1), (int)plan->n_chunks,
        (int)plan->chunk_size, (int)desc.shape.k, (int)stats.longest_chain, (int)stats.n_hybrid, (int)replays);
    CHECK_STR(line_of("check float64"), wanted);
    cf_schedule_free(schedule);
}

TEST(a_check_says_what_the_gradients_are) {
    static const char *const all[] = {
        MADE_UP, MADE_UP "--kinds kda+experts,latent --hidden 16 --untied --mtp 0.2 --dropout 0.1 --balance 0.2",
        ALIKE "--share 1 --advantages --kinds full+sinks+gate --no-tails --prompt 3", MADE_UP "--split even --align 4"};
    for (int i = 0; i < 4; i++) {
        static text d;
        char words[1000];
        double chunked = 0, whole = 0;
        snprintf(words, sizeof words, BASE "%s --check", all[i]);
        const setup s = setup_of(words);
        read_documents(&d, &s);
        run r = run_of(&s, &d, 1);
        const sequences b = take_batch(&s, &d, 0);
        cf_plan *plan = plan_of(&s, &b);
        harness_note("%s", all[i]);
        CHECK_INT(call_trainer(words), 0);
        if (plan) check_first_line(&s, &b, plan);
        CHECK_INT(sscanf(line_of("  loss "), " loss %lf %lf", &chunked, &whole), 2);
        CHECK(fabs(chunked - r.loss[0]) < 1e-9 && fabs(whole - r.loss[0]) < 1e-9);
        for (int64_t t = 0; t < r.list.n; t++) {
            char begin[50], numbers[50];
            double difference = NAN;
            const double largest = largest_in(r.gradient, &r.list.parts[t]);
            snprintf(begin, sizeof begin, "  %-22s ", r.list.parts[t].name);
            snprintf(numbers, sizeof numbers, "%14.6e %14.6e", largest, largest);
            CHECK(largest > 0);
            CHECK_INT(sscanf(line_of(begin) + 25, "%lf %lf %lf", &chunked, &whole, &difference), 3);
            if (!CHECK(fabs(chunked - largest) < 1e-6 * largest && fabs(whole - largest) < 1e-6 * largest)) {
                FAIL("wanted %s%s", begin, numbers);
            }
            CHECK(difference < 1e-10);
        }
        CHECK(strstr(line_of("largest relative difference"), "limit 1e-10: ok, it is rounding"));
        cf_plan_free(plan);
        run_free(&r);
    }
    harness_note("%s", "");
}

/* ---- a checkpoint with one changed number, whose hash is made to match again ---- */

static void put_image(char *image, int64_t bytes) {
    const uint64_t h = hash(0, image, (size_t)bytes - 8);
    memcpy(image + bytes - 8, &h, 8);
    put_file(in_folder("bad"), image, (size_t)bytes);
}

/* Checks that the trainer refuses the image with these words and leaves the file unchanged; NULL: it continues. */
static void check_taken(const char *options, const char *image, int64_t bytes, const char *why) {
    char words[1500];
    int64_t after = 0;
    snprintf(words, sizeof words, "%s --checkpoint '%s'", options, in_folder("bad"));
    const int status = call_trainer(words);
    char *now = read_image("bad", &after);
    CHECK_INT(status, why ? 2 : 0);
    if (!CHECK(!why || strstr(complained, why))) FAIL("%s; wanted %s", complained, why);
    if (why) CHECK(after == bytes && memcmp(now, image, (size_t)bytes) == 0);
    if (!why) CHECK(strncmp(line_of("going on from"), "going on from", 13) == 0);
    free(now);
}

TEST(a_checkpoint_is_refused_for_each_number_of_its_head) {
    static const struct {
        int64_t at, value;
        const char *why;
    } cases[] = {{0, 1, "not a checkpoint"},
                 {8, 0x0807060504030201, "another byte order"},
                 {16, -1, "makes no sense"},
                 {16, 1025, "makes no sense"},
                 {16, 1024, "truncated"},
                 {16, 23, "damaged: "},
                 {16, 0, "damaged: "},
                 {24, -1, "makes no sense"},
                 {24, 1025, "makes no sense"},
                 {24, 1024, "truncated"},
                 {24, 3, "damaged: "},
                 {32, -1, "makes no sense"},
                 {32, ((int64_t)1 << 40) + 1, "makes no sense"},
                 {32, (int64_t)1 << 40, "truncated"},
                 {32, 0, "damaged: "},
                 {40, 4, "damaged: "},
                 {40, 16, "makes no sense"},
                 {40, 0, "makes no sense"}};
    const char *const words = BASE MADE_UP "--stop-after 1 --layers 1";
    compare(MADE_UP "--stop-after 1 --layers 1");
    int64_t bytes = 0;
    char *image = read_image("point", &bytes);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const int64_t before = word_at(image, cases[i].at);
        memcpy(image + cases[i].at, &cases[i].value, 8);
        put_image(image, bytes);
        harness_note("head, byte %d is %lld", (int)cases[i].at, (long long)cases[i].value);
        check_taken(words, image, bytes, cases[i].why);
        memcpy(image + cases[i].at, &before, 8);
    }
    image[ARRAYS_AT + 3] ^= 1;
    put_file(in_folder("bad"), image, (size_t)bytes);
    check_taken(words, image, bytes, "its checksum does not fit its contents");
    put_image(image, bytes);
    check_taken(words, image, bytes, NULL);
    harness_note("%s", "");
    free(image);
}

TEST(a_checkpoint_is_refused_for_each_setting) {
    static text d;
    const char *const words = BASE "--stop-after 1 --layers 1";
    const setup s = setup_of(words);
    read_documents(&d, &s);
    compare("--stop-after 1 --layers 1");
    int64_t bytes = 0;
    char *image = read_image("point", &bytes), why[100];
    for (int number = 0; number < SETTINGS; number++) {
        for (int64_t part_of = 0; part_of < SETTING;
             part_of += 8) { /* name, name, name, value, and whether it is a double */
            const int64_t at = HEAD + number * SETTING + part_of, before = word_at(image, at), other = before ^ 1;
            if (part_of > 0 && part_of < 24 && number % 6 != 0) continue;
            memcpy(image + at, &other, 8);
            put_image(image, bytes);
            snprintf(why, sizeof why, "its %s is ", image + HEAD + number * SETTING);
            harness_note("setting %d, byte %d", number, (int)part_of);
            check_taken(words, image, bytes,
                        part_of == 24  ? why
                        : part_of == 0 ? "another version"
                                       : "refused, and left as it is");
            memcpy(image + at, &before, 8);
        }
    }
    /* Steps, epochs, documents of this epoch, the way chunks are split. */
    const int64_t goods[] = {0, 1, d.count, 3}, bads[][2] = {{-1, INT64_MIN}, {-1, INT64_MIN}, {-1, d.count + 1}};
    for (int i = 0; i < 4; i++) {
        const int64_t at = HEAD + SETTINGS * SETTING + i * 8, before = word_at(image, at), good = goods[i];
        for (int bad = 0; bad < 2 && i < 3; bad++) {
            memcpy(image + at, &bads[i][bad], 8);
            put_image(image, bytes);
            harness_note("progress %d is %lld", i, (long long)bads[i][bad]);
            check_taken(words, image, bytes, "its step or its place in the data makes no sense");
        }
        memcpy(image + at, &good, 8);
        put_image(image, bytes);
        harness_note("progress %d is %lld", i, (long long)good);
        check_taken(words, image, bytes, NULL);
        CHECK_INT(strncmp(line_of("note: the chunks"), "note", 4) == 0, i == 3);
        memcpy(image + at, &before, 8);
    }
    harness_note("%s", "");
    free(image);
}

SUITE(trainer_whole, CASE(kinds_of_layers_train_as_defined), CASE(options_do_what_they_say),
      CASE(chunks_change_nothing), CASE(large_numbers_are_no_trouble), CASE(a_check_says_what_the_gradients_are),
      CASE(a_checkpoint_is_refused_for_each_number_of_its_head), CASE(a_checkpoint_is_refused_for_each_setting));

int main(int argc, char **argv) {
    static const harness_suite *const suites[] = {&suite_trainer_whole};
    const char *build = getenv("BUILD");
    snprintf(folder, sizeof folder, "%s/test_trainer_whole.XXXXXX", build && *build ? build : "build");
    if (!mkdtemp(folder)) {
        perror(folder);
        return 1;
    }
    make_files();
    const int code = harness_main(argc, argv, suites, 1);
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    if (system(command) != 0) perror(folder);
    return code;
}
