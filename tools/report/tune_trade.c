/* tune_trade.c - time against memory: the candidates that none beats in both, and searches in the gaps between them. */

#include "tune.h"

#include <math.h>

/* Returns the time of a candidate if its memory is known, that of the longest sequence included; else 0. A second batch
   is tried only after the batch for memory. */
static double timed_seconds(const cf_tuning *tuning, const cf_tune_candidate *c) {
    const double *seconds = &tuning->seconds[(c - tuning->candidates) * tuning->n_batches];
    int64_t i, tried = 0;

    if (c->status == CF_TUNE_OK) return c->seconds;
    if (c->status != CF_TUNE_DOMINATED || c->same_as >= 0) return 0;
    for (i = 0; i < tuning->n_batches; i++) tried += seconds[i] >= 0;
    return tried > 1 ? c->estimate : 0;
}

tune_trade tune_fastest_below(const tune_outcome *o, int64_t bytes) {
    tune_trade best = {NULL, NULL, 0, 0, 0};
    int64_t i;
    int fill;

    for (fill = -1; fill < o->n_fills; fill++) {
        const cf_tuning *tuning = fill < 0 ? o->tuning : o->fills[fill];
        for (i = 0; i < tuning->n_candidates; i++) {
            const cf_tune_candidate *c = &tuning->candidates[i];
            double seconds = timed_seconds(tuning, c);
            if (!(seconds > 0) || c->bytes >= bytes || (best.tuning && seconds > best.seconds)) continue;
            if (best.tuning && !(seconds < best.seconds) && c->bytes >= best.bytes) continue;
            best.tuning = tuning;
            best.c = c;
            best.seconds = seconds;
            best.bytes = c->bytes;
            best.about = c->status != CF_TUNE_OK;
        }
    }
    return best;
}

/* Returns how many searches so far had a limit within 2 % of this one. */
static int64_t fills_with_limit(const tune_outcome *o, double limit) {
    int64_t i, n = 0;

    for (i = 0; i < o->n_fills; i++) {
        double other = (double)o->fills[i]->limit_bytes / limit;
        n += other > 0.98 && other < 1.02;
    }
    return n;
}

/* Finds the widest gap of more than 1.3 x in memory that may still be filled. Returns the end to search from next: the
   upper one under the gap's middle, then the lower one, and last the upper one just below itself. *limit: bytes. */
static tune_trade find_gap(const tune_outcome *o, int64_t *limit) {
    tune_trade found = {NULL, NULL, 0, 0, 0}, above = {NULL, NULL, 0, INT64_MAX, 0}, below;
    double widest = 1.3;

    for (; (below = tune_fastest_below(o, above.bytes)).tuning; above = below) {
        double ratio = (double)above.bytes / (double)below.bytes, middle = (double)below.bytes * sqrt(ratio);
        int64_t tried = fills_with_limit(o, middle);
        if (tried > 1) middle = (double)above.bytes / 1.15;
        if (!above.tuning || ratio < widest || (tried > 1 && fills_with_limit(o, middle) > 0)) continue;
        widest = ratio;
        *limit = (int64_t)middle >> 20 << 20;
        found = tried == 1 ? below : above;
    }
    return found;
}

/* Describes a search near a candidate: its split, its K and the next larger one, its ChunkSize and the next smaller
   ones. sizes: room for them. */
static cf_tune_desc describe_fill(const tune_job *job, const tune_trade *from, int64_t *sizes) {
    cf_tune_desc desc = job->desc;
    const cf_tune_desc full = cf_tune_defaults(&desc);
    const cf_parallel *split = &from->tuning->splits[from->c->split];
    int64_t i, unit = desc.pack.align > 1 ? desc.pack.align : 1, size = from->c->chunk_size;

    if (desc.n_gpus > 0) {
        desc.parallel.tp = split->tp;
        desc.parallel.pp = split->pp;
        desc.parallel.dp = split->dp;
        desc.parallel.ep = split->ep;
        desc.parallel.zero = split->zero > 0 ? split->zero : -1;
    }
    desc.pack.max_cp = from->c->max_cp;
    for (i = 0; i < full.n_ks - 1 && full.ks[i] < from->c->k; i++) continue;
    desc.ks = &full.ks[i];
    desc.n_ks = full.n_ks - i < 2 ? 1 : 2;
    if (desc.chunk_sizes) {
        for (i = 0; i < desc.n_chunk_sizes - 1 && desc.chunk_sizes[i] < size; i++) continue;
        desc.n_chunk_sizes = i < 2 ? i + 1 : 3;
        desc.chunk_sizes += i + 1 - desc.n_chunk_sizes;
        return desc;
    }
    while (unit < 128) unit *= 2;
    desc.chunk_sizes = sizes;
    for (i = 2; i <= 4; i++) {
        int64_t part = i < 4 ? size / 4 * i / unit * unit : size;
        if (part > 0 && (desc.n_chunk_sizes == 0 || part > sizes[desc.n_chunk_sizes - 1]))
            sizes[desc.n_chunk_sizes++] = part;
    }
    return desc;
}

/* Searches on one batch, and then on all batches with the ChunkSize, K and schedule that won there. */
static cf_result search_fill(const tune_job *job, cf_tune_desc *desc, cf_tuning **out, cf_error *error) {
    cf_tuning *rough;
    int64_t n_batches = desc->n_batches;
    cf_result result;

    desc->n_batches = 1;
    result = cf_tune(job->lengths, job->n, desc, &rough, error);
    if (result != CF_OK) return result;
    if (rough->winner < 0) {
        *out = rough;
        return CF_OK;
    }
    desc->n_batches = n_batches;
    desc->chunk_sizes = &rough->candidates[rough->winner].chunk_size;
    desc->ks = &rough->candidates[rough->winner].k;
    desc->kinds = &rough->candidates[rough->winner].kind;
    desc->n_chunk_sizes = desc->n_ks = desc->n_kinds = 1;
    result = cf_tune(job->lengths, job->n, desc, out, error);
    cf_tuning_free(rough);
    return result;
}

cf_result tune_fill_gaps(const tune_job *job, tune_outcome *o, const volatile sig_atomic_t *stop, cf_error *error) {
    while (o->tuning->winner >= 0 && o->n_fills < TUNE_MOST_FILLS && !*stop) {
        int64_t limit = 0, sizes[3];
        const tune_trade from = find_gap(o, &limit);
        cf_tune_desc desc;
        cf_result result;
        if (!from.tuning || limit == 0) break;
        desc = describe_fill(job, &from, sizes);
        desc.limit_bytes = limit;
        result = search_fill(job, &desc, &o->fills[o->n_fills], error);
        if (result != CF_OK) return result;
        o->n_fills++;
    }
    return CF_OK;
}
