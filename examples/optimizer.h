/* optimizer.h - AdamW with warm-up, cosine decay and gradient clipping - MIT or public domain */

#ifndef TRAIN_OPTIMIZER_H
#define TRAIN_OPTIMIZER_H

#include "model.h"

typedef struct optimizer_config {
    double learning_rate; /* at the end of the warm-up */
    double floor;         /* at the end of the decay, as a fraction of learning_rate */
    int64_t warmup, steps;
    double beta1, beta2, epsilon, weight_decay;
    double clip; /* longest gradient, as one vector; 0: no limit */
} optimizer_config;

typedef struct optimizer {
    real *first, *second; /* moments, in the layout of the weights */
} optimizer;

static inline optimizer optimizer_new(int64_t count) {
    optimizer o = {TAKE(real, count), TAKE(real, count)};
    return o;
}

static inline void optimizer_free(optimizer *o) {
    free(o->first);
    free(o->second);
    memset(o, 0, sizeof *o);
}

/* Returns the learning rate of step 0, 1, ...: it rises linearly, then falls along half a cosine. */
static inline double learning_rate_at(const optimizer_config *c, int64_t step) {
    if (step < c->warmup) return c->learning_rate * (double)(step + 1) / (double)c->warmup;
    if (step >= c->steps) return c->learning_rate * c->floor;
    double done = (double)(step - c->warmup) / (double)(c->steps - c->warmup);
    return c->learning_rate * (c->floor + (1 - c->floor) * 0.5 * (1 + cos(3.141592653589793 * done)));
}

/* Returns the length of the whole gradient, summed in double in one order, so that it does not depend on the number of
   threads. */
static inline double gradient_length(const weights *gradient) {
    double squares = 0;
    for (int64_t i = 0; i < gradient->count; i++) squares += (double)gradient->flat[i] * (double)gradient->flat[i];
    return sqrt(squares);
}

/* Makes one update; `length` is gradient_length's. Weights of matrices decay, biases and gains do not. */
static inline void optimizer_step(optimizer *o, const optimizer_config *c, weights *w, const weights *gradient,
                                  double length, int64_t step) {
    double rate = learning_rate_at(c, step), t = (double)(step + 1);
    double shrink = c->clip > 0 && length > c->clip ? c->clip / length : 1;
    double correct1 = 1 / (1 - pow(c->beta1, t)), correct2 = 1 / (1 - pow(c->beta2, t));
    for (int64_t i = 0; i < w->n_tensors; i++) {
        const tensor *own = &w->tensors[i];
        double decay = own->fan_in > 0 ? c->weight_decay : 0;
        PARALLEL_FOR
        for (int64_t j = own->offset; j < own->offset + own->count; j++) {
            double g = (double)gradient->flat[j] * shrink;
            double m = c->beta1 * (double)o->first[j] + (1 - c->beta1) * g;
            double v = c->beta2 * (double)o->second[j] + (1 - c->beta2) * g * g;
            double update = m * correct1 / (sqrt(v * correct2) + c->epsilon) + decay * (double)w->flat[j];
            o->first[j] = (real)m;
            o->second[j] = (real)v;
            w->flat[j] = (real)((double)w->flat[j] - rate * update);
        }
    }
}

#endif /* TRAIN_OPTIMIZER_H */
