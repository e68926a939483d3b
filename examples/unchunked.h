/* unchunked.h - loss and gradients of a batch without chunks, the reference for chunked.h - MIT or public domain

   Every sequence goes through the model whole, alone and in order: one forward, one backward, without plan, schedule,
   packing or state. Activations grow with the longest sequence. */

#ifndef TRAIN_UNCHUNKED_H
#define TRAIN_UNCHUNKED_H

#include "model.h"
#include "text.h"

/* Adds the batch's gradients to `gradient`, unless that is NULL, and returns the loss. */
static inline double unchunked_gradients(const model_config *config, const weights *w, weights *gradient,
                                         const batch *b, uint64_t seed, memory_meter *meter) {
    double loss = 0, mtp_weight = batch_loss_weight2(b, config->kinds.mtp);
    stage whole = stage_of(config, 0, 1);
    for (int64_t i = 0; i < b->count; i++) {
        int64_t n = b->length[i];
        if (n == 0) continue;
        if (n > INT32_MAX) fail(EXIT_BAD_INPUT, "sequence %lld is too long to be run whole", (long long)i);
        int32_t cu_seqlens[2] = {0, (int32_t)n};
        int32_t *position = TAKE(int32_t, n), *sequence = TAKE(int32_t, n);
        int32_t *token = TAKE(int32_t, n), *target = TAKE(int32_t, n);
        int32_t *next = TAKE(int32_t, n), *target2 = TAKE(int32_t, n);
        double *weight = TAKE(double, n), *weight2 = TAKE(double, n);
        row_span whole_span = {0, (int32_t)n, -1, -1, -1, 0, NULL, 0, -1};
        chunk_rows rows = {n,      1,     0,      0,    cu_seqlens, cu_seqlens, position, sequence,
                           weight, token, target, next, target2,    weight2,    0,        0,
                           0,      NULL,  NULL,   NULL, &whole_span, 1};
        for (int64_t t = 0; t < n; t++) {
            position[t] = (int32_t)t;
            sequence[t] = (int32_t)i;
            weight[t] = t + 1 < n ? batch_weight(b, i, t + 1) : 0;
            token[t] = b->tokens[i][t];
            target[t] = batch_target(b, i, t);
            next[t] = batch_next(b, i, t);
            target2[t] = batch_target2(b, i, t);
            weight2[t] = mtp_weight;
        }
        activations kept = activations_new(config, &whole, n, 1, MEMORY_ACTIVATIONS, meter);
        workspace scratch = workspace_new(config, n, meter);
        routing routes = routing_new(config, 1, n, b->length, b->count);
        pass p = {config, w, &rows, &kept, NULL, &scratch, whole, seed, 0, &routes, NULL, 0, NULL, NULL, NULL};
        loss += model_forward(&p) + balance_loss(&routes, config);
        if (gradient) model_backward(&p, gradient);
        workspace_free(&scratch, meter);
        activations_free(&kept, meter);
        free(position);
        free(sequence);
        free(token);
        free(target);
        free(next);
        free(target2);
        free(weight);
        free(weight2);
        routing_free(&routes);
    }
    return loss;
}

#endif /* TRAIN_UNCHUNKED_H */
