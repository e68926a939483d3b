/* draw.h - random sequence lengths, the same on every platform: integer arithmetic only, no libm. */

#ifndef CHUNKFLOW_DRAW_H
#define CHUNKFLOW_DRAW_H

#include <stdint.h>

/* A splitmix64 generator: its state starts as the seed. */
typedef struct draw_source {
    uint64_t state;
} draw_source;

uint64_t draw_bits(draw_source *source);

/* Returns 0 .. n - 1, all equally likely; n > 0. */
uint64_t draw_below(draw_source *source, uint64_t n);

/* Returns low .. high - 1, uniform in the logarithm; 1 <= low < high <= 2^48. */
int64_t draw_log_uniform(draw_source *source, int64_t low, int64_t high);

/* Returns a length like those of LMSys-Chat-1M: a bucket by its share, then log-uniform within it, from 16 tokens on.
   The ChunkFlow paper gives the shares: 90.499 % below 1K tokens, 99.539 % below 4K, 99.908 % below 8K, 99.987 % below
   32K, 99.996 % below 128K; the longest has 303K. */
int64_t draw_lmsys(draw_source *source);

/* Returns median x exp(sigma x z), rounded, with z standard normal; sigma in millionths, up to 10 (10^7). Values above
   2^62 become 2^62. */
int64_t draw_lognormal(draw_source *source, int64_t median, int64_t sigma_millionths);

#endif /* CHUNKFLOW_DRAW_H */
