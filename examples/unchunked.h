/* unchunked.h - loss and gradients of a batch the plain way: what chunked.h is checked against - MIT or public domain

   Every sequence goes through the model whole, alone and in order: one forward, one backward. No plan, no schedule, no
   packing, no state. Its activations grow with the longest sequence. */

#ifndef TRAIN_UNCHUNKED_H
#define TRAIN_UNCHUNKED_H

#include "model.h"
#include "text.h"

/* Adds the batch's gradients to `gradient`, unless that is NULL, and returns the loss: the mean over its target tokens.
 */
static inline double unchunked_gradients(const model_config *config, const weights *w, weights *gradient,
                                         const batch *b, uint64_t seed, memory_meter *meter) {
    double loss_sum = 0;
    stage whole = stage_of(config, 0, 1);
    for (int64_t i = 0; i < b->count; i++) {
        int64_t n = b->length[i];
        if (n == 0) continue;
        if (n > INT32_MAX) fail(EXIT_BAD_INPUT, "sequence %lld is too long to be run whole", (long long)i);
        int32_t cu_seqlens[2] = {0, (int32_t)n};
        chunk_rows rows = {n, 1, 0, 0, cu_seqlens, cu_seqlens, cu_seqlens, cu_seqlens, NULL, NULL, NULL, NULL};
        rows.position = TAKE(int32_t, n);
        rows.sequence = TAKE(int32_t, n);
        rows.token = TAKE(int32_t, n);
        rows.target = TAKE(int32_t, n);
        for (int64_t t = 0; t < n; t++) {
            rows.position[t] = (int32_t)t;
            rows.sequence[t] = (int32_t)i;
            rows.token[t] = b->tokens[i][t];
            rows.target[t] = t + 1 < n && t + 1 >= b->prompt[i] ? b->tokens[i][t + 1] : -1;
        }
        activations kept = activations_new(config, &whole, n, 1, MEMORY_ACTIVATIONS, meter);
        workspace scratch = workspace_new(config, n, 0, meter);
        pass p = {config, w, &rows, &kept, NULL, &scratch, whole, seed};
        loss_sum += model_forward(&p);
        if (gradient) model_backward(&p, gradient, batch_loss_weight(b));
        workspace_free(&scratch, meter);
        activations_free(&kept, meter);
        free(rows.position);
        free(rows.sequence);
        free(rows.token);
        free(rows.target);
    }
    return loss_sum * batch_loss_weight(b);
}

#endif /* TRAIN_UNCHUNKED_H */
