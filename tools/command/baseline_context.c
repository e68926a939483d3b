/* baseline_context.c - the baseline with context parallelism: sequences stay whole, and GPUs share each of them.

   A group of cp GPUs has the rows of every micro-batch in 2 cp pieces. Each GPU takes one piece from the front and one
   from the back (zigzag), so rows and attention pairs are even. Attention's inputs from other GPUs cross the group's
   link: K and V in forward; K, V and their gradients in backward, all in two bytes.

       all-gather   all of it before attention, exposed
       ring         piece by piece beside attention, exposed as far as attention of cp - 1 of cp steps is shorter; each
                    step is three more kernels (attention, and the two that merge what it found)

   The method that costs the sample's micro-batches less is taken. Layers with a window need only the rows before each
   piece; layers with chunked attention need none. Recurrent layers scan their states as chunks of a cp group do
   (cf_cost_estimate; MaxText, pull request 4968), which takes equally long here. Latent attention sends K and V of each
   head, as TransformerEngine does. Experts are on one GPU, on as many GPUs of a node as possible, or on as many of all.

   Each sequence is padded to a multiple of 2 cp x tp rows, as such trainers do for zigzag and sequence parallelism
   (verl, preprocess_packed_seqs). The last wave of attention's blocks is half empty, as for a chunk. A pass's exposed
   seconds are charged by its rows, so their sum is right, but a single pass's may be off.

   ZeRO divides over all cp x data GPUs, as Megatron-LM's distributed optimizer and FSDP do. Its level is searched even
   if chunks have no data-parallel ranks to divide over. Two assumptions favour the baseline: kernels are as fast as
   without context parallelism, and each has the rows of the longest micro-batch. */

#include "baseline.h"
#include "modelling.h"

#include <stdlib.h>
#include <string.h>

enum { SAMPLE = 4096, MOST_TIMED = 16384 }; /* MOST_TIMED: sequences on which each method is timed */

/* Costs, bytes and times of micro-batches on the stages of one GPU. */
typedef struct context_costs {
    cf_stage_cost *stages;
    cf_stage_bytes *bytes;
    cf_timing timing;
    double step;
    int64_t host; /* bytes in host memory of the fullest GPU, with as many micro-batches alive as there are stages */
    int ring;
} context_costs;

/* One method of context parallelism, and its result. */
typedef struct context_way {
    int64_t tp, cp, pp, dp, ep, zero;
    int packed;
    cf_recompute recompute;
    int64_t layers;  /* that recompute */
    int offload;     /* parts in host memory (cf_memory_desc.offload) */
    double seconds;  /* seconds of the timed batches; 0: it does not fit */
    int64_t needs;   /* bytes */
} context_way;

typedef struct context_search {
    const int64_t *lengths;
    int64_t n;
    const cf_tune_desc *desc;
    int64_t limit, chunk_size, n_batches;
    cf_plan *samples[2]; /* micro-batches of up to SAMPLE sequences: [0] one per sequence, [1] packed */
    baseline_tuned *out; /* of the fastest method so far, which is `best` */
    context_way best;
    double work;         /* without `out`: expected work of the methods */
} context_search;

/* ----------------------------------------------------------------------------------------------------------------
   Costs and bytes
   ---------------------------------------------------------------------------------------------------------------- */

static void scale(cf_pass_cost *cost, double by) {
    cost->per_token *= by;
    cost->per_pair *= by;
}

/* Returns the seconds per row for which a pass waits for transfers. link: seconds of transfers per row. They run during
   attention, which takes `attention` seconds per pair. */
static double exposed(const cf_plan *sample, double link, double attention) {
    double waits = 0, rows = 0;
    int64_t i;

    for (i = 0; i < sample->n_chunks; i++) {
        double of_rows = link * (double)sample->chunks[i].tokens;
        double of_pairs = attention * (double)sample->chunks[i].pairs;
        if (of_rows > of_pairs) waits += of_rows - of_pairs;
        rows += (double)sample->chunks[i].tokens;
    }
    return rows > 0 ? waits / rows : 0;
}

/* Exchanges with other GPUs that the layers of a stage need. */
typedef struct context_needs {
    double layers;           /* layers that need K and V of all rows */
    double row;              /* bytes of their K and V per row */
    int64_t widest;          /* maximum bytes per row of one layer */
    double messages, pieces; /* other layers: number of transfers, and their bytes, for any number of rows */
    double heads;            /* heads of attention to all rows, on a GPU; 0: none */
    double checkpoints;      /* bytes per row of the inputs of all layers */
} context_needs;

static cf_result find_needs(const cf_model *model, const cf_parallel *parallel, int64_t stage,
                            context_needs *out, cf_error *error) {
    int64_t k;
    cf_shard s;
    cf_result result = cf_stage_shard(model, parallel, stage, -1, &s, error);

    memset(out, 0, sizeof *out);
    if (result == CF_OK) out->checkpoints = 2 * (double)(s.layers * s.hidden) / (double)s.sequence;
    for (k = 0; cf_stage_shard(model, parallel, stage, k, &s, NULL) == CF_OK; k++) {
        int64_t row = 2 * (s.kv + s.value);
        if (s.layers == 0) continue;
        if (s.state_row > 0) {
            out->layers += (double)s.layers;
            out->heads = (double)s.heads;
            out->row += (double)(s.layers * row);
            if (row > out->widest) out->widest = row;
        } else if (s.mixer == CF_MIXER_WINDOW) {
            out->messages += (double)s.layers;
            out->pieces += 2 * (double)(s.window - 1) * (double)(s.layers * row);
        }
    }
    return result;
}

/* Finds a pass's seconds for scans of recurrent layers: the constant part, and that for each row of a GPU. stages: room
   for one per stage. */
static cf_result find_scans(const cf_cost_desc *whole, const context_way *way, cf_stage_cost *stages, cf_pass_cost *out,
                            cf_error *error) {
    cf_cost_desc desc = *whole;
    cf_timing once, rows;
    cf_result result;

    desc.max_cp = way->cp;
    memset(out, 0, sizeof *out);
    result = cf_cost_estimate(&desc, stages, way->pp, &once, NULL, error);
    if (result != CF_OK || !(once.scan_forward > 0)) return result;
    desc.chunk_size = 4096;
    result = cf_cost_estimate(&desc, stages, way->pp, &rows, NULL, error);
    if (result != CF_OK) return result;
    out->constant = once.scan_forward;
    out->per_token = (rows.scan_forward - once.scan_forward) / (double)desc.chunk_size;
    return CF_OK;
}

/* Adds the transfers of a forward to a pass (backward: twice the bytes), per row, and those of pieces. */
static void add_transfers(const context_way *way, const cf_plan *sample, const cf_gpu *gpu, double link, double pieces,
                          const context_needs *needs, int ring, cf_pass_cost *cost) {
    double steps = (double)(way->cp - 1), part = steps / (double)way->cp, layers = needs->layers;

    cost->constant += pieces + needs->messages * gpu->latency;
    if (ring) {
        cost->per_token += exposed(sample, link, part * cost->per_pair);
        cost->constant += 3 * steps * layers * gpu->launch;
    } else {
        cost->per_token += link;
        cost->constant += layers * gpu->latency;
    }
}

/* Returns the seconds per row for which a pass waits for checkpoints, which cross the link to host memory while it
   runs. link: seconds of this transfer per row. */
static double host_waits(const cf_plan *sample, double link, const cf_pass_cost *cost) {
    double waits = 0, rows = 0;
    int64_t i;

    for (i = 0; i < sample->n_chunks; i++) {
        double own = link * (double)sample->chunks[i].tokens;
        double beside = cf_cost_seconds(cost, sample->chunks[i].tokens, sample->chunks[i].pairs);
        if (own > beside) waits += own - beside;
        rows += (double)sample->chunks[i].tokens;
    }
    return rows > 0 ? waits / rows : 0;
}

static cf_stage_cost share_stage(const context_search *s, const context_way *way, const context_needs *needs,
                                 const cf_pass_cost *scans, const cf_stage_cost *whole, int ring) {
    const cf_gpu *gpu = s->desc->gpu;
    int64_t per_node = s->desc->gpus_per_node > 0 ? s->desc->gpus_per_node : 8;
    double rate = gpu->link * (way->tp * way->cp > per_node ? gpu->network : gpu->nvlink);
    double link = needs->row * (double)(way->cp - 1) / (double)way->cp / rate, pieces = needs->pieces / rate;
    const cf_plan *sample = s->samples[way->packed];
    cf_stage_cost cost = *whole;

    if (needs->heads > 0)
        cost.forward.per_pair *= 1 + 64 * (double)(gpu->processors * way->cp) / (needs->heads * (double)s->chunk_size);
    cost.forward.per_token += scans->per_token;
    cost.backward.per_token += scans->per_token;
    scale(&cost.forward, 1 / (double)way->cp);
    scale(&cost.backward, 1 / (double)way->cp);
    cost.forward.constant += scans->constant;
    cost.backward.constant += scans->constant;
    add_transfers(way, sample, gpu, link, pieces, needs, ring, &cost.forward);
    add_transfers(way, sample, gpu, 2 * link, 2 * pieces, needs, ring, &cost.backward);
    if (way->offload & CF_OFFLOAD_CHECKPOINTS) {
        double host = needs->checkpoints / (double)way->cp / (gpu->pcie * gpu->link);
        cost.forward.per_token += host_waits(sample, host, &cost.forward);
        cost.backward.per_token += host_waits(sample, host, &cost.backward);
    }
    cost.replay = cost.forward;
    memset(&cost.input, 0, sizeof cost.input);
    memset(&cost.weight, 0, sizeof cost.weight);
    return cost;
}

/* Returns the seconds that the sample takes on a stage. */
static double sample_seconds(const cf_plan *sample, const cf_stage_cost *cost) {
    double seconds = 0;
    int64_t i;

    for (i = 0; i < sample->n_chunks; i++)
        seconds += cf_cost_seconds(&cost->forward, sample->chunks[i].tokens, sample->chunks[i].pairs) +
                   cf_cost_seconds(&cost->backward, sample->chunks[i].tokens, sample->chunks[i].pairs);
    return seconds;
}

static int64_t part_of(int64_t bytes, int64_t loose, int64_t cp) {
    int64_t most = bytes * (100 + loose);
    return most / (100 * cp) + (most % (100 * cp) != 0);
}

/* Counts the bytes of a stage: rows are divided over the group, parameters are not; a layer's K and V of all rows come
   on top. */
static cf_result count_bytes(const cf_memory_desc *memory, const context_way *way, int64_t rows, cf_stage_bytes *out,
                             int64_t *host, cf_error *error) {
    cf_memory_load *none = (cf_memory_load *)calloc((size_t)way->pp, sizeof *none);
    cf_memory_report *fixed = (cf_memory_report *)calloc((size_t)way->pp, sizeof *fixed);
    int64_t loose = cf_memory_defaults(memory).fragmentation, s, away;
    cf_result result = CF_OK;

    if (!none || !fixed) result = cf_refuse(error, CF_ERROR_MEMORY, "memory", -1, "out of memory");
    if (result == CF_OK) result = cf_memory_estimate(memory, none, way->pp, fixed, way->pp, error);
    for (s = 0; s < way->pp && result == CF_OK; s++) {
        cf_token_bytes bytes;
        context_needs needs;
        result = cf_memory_token_bytes(memory, s, &bytes, error);
        if (result == CF_OK) result = find_needs(memory->model, &memory->parallel, s, &needs, error);
        if (result != CF_OK) break;
        memset(&out[s], 0, sizeof out[s]);
        out[s].held.activations = part_of(bytes.activations, loose, way->cp);
        out[s].held.boundary = part_of(bytes.boundary, loose, way->cp);
        out[s].per_token_pass = part_of(bytes.logits > bytes.working ? bytes.logits : bytes.working, loose, way->cp) +
                                part_of(bytes.buffers, 0, way->cp) + needs.widest;
        out[s].fixed = fixed[s].total;
        away = fixed[s].host + part_of(bytes.checkpoints, 0, way->cp) * rows * way->pp;
        if (away > *host) *host = away;
    }
    free(fixed);
    free(none);
    return result;
}

/* Makes the costs of a method. Free their stages and bytes in any case. */
static cf_result make_costs(const context_search *s, const context_way *way, context_costs *out, cf_error *error) {
    cf_memory_desc memory = s->desc->memory;
    cf_stage_cost *stages = (cf_stage_cost *)malloc((size_t)way->pp * sizeof *stages);
    cf_cost_desc desc;
    double seconds[2] = {0, 0};
    cf_pass_cost scans;
    int64_t v;
    cf_result result;
    int ring;

    memset(out, 0, sizeof *out);
    memset(&desc, 0, sizeof desc);
    out->stages = stages;
    out->bytes = (cf_stage_bytes *)malloc((size_t)way->pp * sizeof *out->bytes);
    if (!stages || !out->bytes) return cf_refuse(error, CF_ERROR_MEMORY, "memory", -1, "out of memory");
    desc.model = memory.model = s->desc->model;
    desc.gpu = s->desc->gpu;
    desc.gpus_per_node = s->desc->gpus_per_node;
    desc.unfused = memory.unfused;
    desc.parallel = s->desc->parallel;
    desc.parallel.tp = way->tp;
    desc.parallel.pp = way->pp;
    desc.parallel.dp = way->dp * way->cp;
    desc.parallel.ep = way->ep;
    desc.parallel.zero = way->zero;
    desc.parallel.n_virtual = 1;
    desc.parallel.placement = CF_PLACEMENT_DEFAULT;
    desc.parallel.layers = NULL;
    desc.parallel.recompute = way->recompute;
    desc.parallel.recompute_layers = way->layers;
    memory.parallel = desc.parallel;
    memory.state_window = 0;
    memory.outputs = 0;
    memory.offload = desc.offload = memory.offload | way->offload;
    result = find_scans(&desc, way, stages, &scans, error);
    if (result == CF_OK) result = cf_cost_estimate(&desc, stages, way->pp, &out->timing, &out->step, error);
    if (result == CF_OK) result = count_bytes(&memory, way, s->chunk_size, out->bytes, &out->host, error);
    for (v = 0; v < way->pp && result == CF_OK; v++) {
        cf_stage_cost ways[2];
        context_needs needs;
        result = find_needs(desc.model, &desc.parallel, v, &needs, error);
        if (result != CF_OK) break;
        for (ring = 0; ring < 2; ring++) {
            ways[ring] = share_stage(s, way, &needs, &scans, &stages[v], ring);
            if (v == 0) seconds[ring] = sample_seconds(s->samples[way->packed], &ways[ring]);
        }
        out->ring = seconds[1] < seconds[0];
        stages[v] = ways[out->ring];
    }
    out->timing.stages = stages;
    out->timing.seconds_per_token /= (double)way->cp;
    return result;
}

/* ----------------------------------------------------------------------------------------------------------------
   The search
   ---------------------------------------------------------------------------------------------------------------- */

/* Finds the padding for a method, and a micro-batch no smaller than the longest padded sequence. */
static void pad(const context_way *way, int64_t *align, int64_t *chunk_size) {
    int64_t least = *align > 0 ? *align : 1, all = least;

    while (all % (2 * way->cp * way->tp) != 0) all += least;
    *align = all;
    *chunk_size += (all - *chunk_size % all) % all;
}

/* Times a method on s->n_batches batches. Free *out with cf_tuning_free; it is NULL if the method is impossible. */
static cf_result time_way(const context_search *s, context_way *way, cf_tuning **out, int *ring, cf_error *error) {
    cf_tune_desc desc = *s->desc;
    context_costs costs;
    int64_t chunk_size = s->chunk_size;
    cf_result result = make_costs(s, way, &costs, error);

    *out = NULL;
    *ring = costs.ring;
    desc.model = NULL;
    desc.gpu = NULL;
    memset(&desc.memory, 0, sizeof desc.memory);
    memset(&desc.parallel, 0, sizeof desc.parallel);
    desc.parallel.pp = way->pp;
    desc.parallel.dp = way->dp;
    desc.n_gpus = 0;
    desc.timing = &costs.timing;
    desc.step_seconds = costs.step;
    desc.bytes = costs.bytes;
    desc.limit_bytes = s->limit;
    desc.n_batches = s->n_batches;
    desc.pack.lockstep = way->zero > 2 || way->ep > 1; /* every pass has collectives */
    pad(way, &desc.pack.align, &chunk_size);
    baseline_take_form(&desc, way->packed, &chunk_size);
    if (result == CF_OK) result = cf_tune(s->lengths, s->n, &desc, out, error);
    free(costs.stages);
    free(costs.bytes);
    way->needs = 0;
    way->seconds = 0;
    if (result != CF_OK) return result == CF_ERROR_MEMORY ? result : CF_OK;
    way->needs = (*out)->smallest_limit;
    if ((*out)->winner < 0) return CF_OK;
    way->seconds = (*out)->candidates[(*out)->winner].seconds;
    way->needs = (*out)->candidates[(*out)->winner].bytes;
    (*out)->candidates[(*out)->winner].memory.host = costs.host;
    return CF_OK;
}

static void take_way(context_search *s, const context_way *way, const cf_tuning *tuning, int ring) {
    baseline_tuned *out = s->out;

    s->best = *way;
    baseline_take_times(out, tuning);
    out->split = s->desc->parallel;
    out->split.tp = way->tp;
    out->split.pp = way->pp;
    out->split.dp = way->dp;
    out->split.ep = way->ep;
    out->split.zero = way->zero;
    out->split.n_virtual = 1;
    out->best.recompute = out->split.recompute = way->recompute;
    out->best.recompute_layers = out->split.recompute_layers = way->layers;
    out->best.offload = s->desc->memory.offload | way->offload;
    out->packed = way->packed;
    out->context = way->cp > 1 ? way->cp : 0;
    out->ring = ring;
}

/* Times a method. s->out changes if it is faster. */
static cf_result try_way(context_search *s, context_way *way, cf_recompute recompute, int64_t layers, cf_error *error) {
    cf_tuning *tuning;
    baseline_tuned *out = s->out;
    cf_result result;
    int ring;

    way->recompute = recompute;
    way->layers = layers;
    result = time_way(s, way, &tuning, &ring, error);
    if (way->seconds > 0 && (out->best.status != CF_TUNE_OK || way->seconds < out->best.seconds))
        take_way(s, way, tuning, ring);
    if (!(way->seconds > 0) && way->needs > 0 && (out->least == 0 || way->needs < out->least)) out->least = way->needs;
    cf_tuning_free(tuning);
    return result;
}

/* Finds the fewest recomputing layers with which a split fits, between `few`, with which it does not, and all, with
   which it does. Memory is almost linear between them. */
static cf_result try_some(context_search *s, const context_way *few, const context_way *all, int64_t layers,
                          cf_error *error) {
    context_way low = *few, high = *all;
    cf_result result = CF_OK;

    low.layers = 0;
    high.layers = layers;
    while (high.layers - low.layers > 1 && low.needs > high.needs && result == CF_OK) {
        double part = (double)(low.needs - s->limit) / (double)(low.needs - high.needs);
        int64_t some = low.layers + 1 + (int64_t)(part * (double)(high.layers - low.layers));
        context_way way = *all;
        if (some >= high.layers) some = high.layers - 1;
        result = try_way(s, &way, all->recompute, some, error);
        if (way.seconds > 0) high = way;
        else low = way;
        if (way.seconds > 0 && (double)way.needs > 0.97 * (double)s->limit) break;
    }
    return result;
}

/* Tries a split with as few recomputing layers as fit. */
static cf_result try_split(context_search *s, const context_way *split, cf_error *error) {
    static const cf_recompute levels[] = {CF_RECOMPUTE_ACT, CF_RECOMPUTE_MLP, CF_RECOMPUTE_FULL};
    int64_t layers = s->desc->model->layers / split->pp + (s->desc->model->layers % split->pp != 0), i;
    context_way none = *split, way;
    cf_result result = try_way(s, &none, CF_RECOMPUTE_NONE, 0, error);

    way = none;
    for (i = 0; i < 3 && !(none.seconds > 0) && result == CF_OK; i++) {
        way = *split;
        result = try_way(s, &way, levels[i], 0, error);
        if (result == CF_OK && way.seconds > 0) result = try_some(s, &none, &way, layers, error);
    }
    if (way.seconds > 0 || result != CF_OK) return result;
    way = *split; /* fewer recomputing layers, with checkpoints on the device, would need more than the last try */
    way.offload = CF_OFFLOAD_CHECKPOINTS;
    return try_way(s, &way, CF_RECOMPUTE_FULL, 0, error);
}

/* Adds the work of a method as cf_tune_progress counts it: its batches are packed twice and scheduled once, as it is
   and then with the recomputation with which it fits. */
static void count_way(context_search *s, const context_way *way) {
    double batch = (double)cf_tune_defaults(s->desc).batch;
    double chunks = batch * (double)s->samples[way->packed]->n_chunks / (double)(s->samples[0]->n_chunks + 1);

    s->work += 2 * (double)(s->n_batches + 1) * (4 * (batch + chunks) + 4 * (double)way->pp * chunks);
}

/* Tries a split with each ZeRO level that a search of chunks tries, with micro-batches of one sequence and packed
   ones. */
static cf_result try_zeros(context_search *s, context_way *way, cf_error *error) {
    int64_t asked = s->desc->parallel.zero, last;
    int searched = asked == 0, away = s->desc->memory.offload & CF_OFFLOAD_PARAMETERS;
    cf_result result = CF_OK;

    way->zero = searched ? (away ? 3 : 1) : asked > 0 ? asked : 0;
    last = searched && way->pp == 1 ? 3 : way->zero;
    for (; way->zero <= last; way->zero++)
        for (way->packed = 0; way->packed < 2 && result == CF_OK; way->packed++)
            if (s->out) result = try_split(s, way, error);
            else count_way(s, way);
    return result;
}

static int is_asked(int64_t asked, int64_t value) { return asked == 0 || asked == value; }

/* Returns the number of GPUs for a layer's experts if it is not given: as many as possible, up to `most`. */
static int64_t most_experts(const context_search *s, const cf_parallel *split, int64_t most) {
    cf_parallel parallel = *split;
    cf_parameters counted;

    if (s->desc->parallel.ep > 0) return s->desc->parallel.ep;
    if (cf_model_parameters(s->desc->model, &counted, NULL) != CF_OK || counted.experts == 0) return 1;
    for (parallel.ep = most; parallel.ep > 1; parallel.ep--)
        if (cf_parallel_validate(s->desc->model, &parallel, NULL) == CF_OK) break;
    return parallel.ep;
}

/* Tries every way to divide `gpus` GPUs with at least `cp` in a group; tensor parallelism is as given, or stays within
   a node. */
static cf_result try_splits(context_search *s, int64_t gpus, int64_t cp, cf_error *error) {
    int64_t per_node = s->desc->gpus_per_node > 0 ? s->desc->gpus_per_node : 8;
    const int64_t reach[] = {1, per_node, gpus}; /* limits on the GPUs for a layer's experts */
    cf_parallel parallel = s->desc->parallel;
    context_way way;
    cf_result result = CF_OK;
    int i;

    if (parallel.zero < 0) parallel.zero = 0;
    memset(&way, 0, sizeof way);
    for (way.tp = 1; way.tp <= gpus && way.tp <= per_node; way.tp++)
        for (way.cp = cp; way.cp <= gpus / way.tp; way.cp++)
            for (way.pp = 1; way.pp <= gpus / way.tp / way.cp; way.pp++) {
                way.dp = gpus / way.tp / way.cp / way.pp;
                if (way.tp * way.cp * way.pp * way.dp != gpus || !is_asked(s->desc->parallel.tp, way.tp)) continue;
                parallel.tp = way.tp;
                parallel.pp = way.pp;
                parallel.dp = way.dp * way.cp;
                parallel.n_virtual = 1;
                parallel.layers = NULL;
                if (way.dp > (s->desc->batch > 0 ? s->desc->batch : 256)) continue;
                for (i = 0; i < 3; i++) {
                    parallel.ep = most_experts(s, &parallel, reach[i]);
                    if (i > 0 && parallel.ep == way.ep) continue;
                    way.ep = parallel.ep;
                    if (cf_parallel_validate(s->desc->model, &parallel, NULL) != CF_OK) continue;
                    result = try_zeros(s, &way, error);
                    if (result != CF_OK) return result;
                }
            }
    return CF_OK;
}

/* Starts a search. Free its samples with end_search in any case. */
static cf_result begin_search(context_search *s, const int64_t *lengths, int64_t n, const cf_tune_desc *desc,
                              baseline_tuned *out, cf_error *error) {
    int64_t reserve = cf_tune_defaults(desc).reserve;
    int64_t *sample, count = n < SAMPLE ? n : SAMPLE, i;
    cf_pack_desc pack;
    cf_result result = CF_OK;
    int packed;

    memset(s, 0, sizeof *s);
    memset(&pack, 0, sizeof pack);
    s->lengths = lengths;
    s->n = n;
    s->desc = desc;
    s->out = out;
    s->n_batches = cf_tune_defaults(desc).n_batches;
    s->limit = desc->limit_bytes;
    if (s->limit == 0) s->limit = desc->gpu->memory - desc->gpu->memory / 100 * (reserve > 0 ? reserve : 0);
    s->chunk_size = baseline_chunk_size(lengths, n, desc);
    pack.chunk_size = s->chunk_size;
    pack.align = desc->pack.align;
    sample = (int64_t *)malloc((size_t)count * sizeof *sample);
    if (!sample) return cf_refuse(error, CF_ERROR_MEMORY, "memory", -1, "out of memory");
    for (i = 0; i < count; i++) sample[i] = lengths[n / count * i + n % count * i / count]; /* of the whole list */
    for (packed = 0; packed < 2 && result == CF_OK; packed++) {
        pack.max_slices = packed ? desc->pack.max_slices : 1;
        result = cf_pack(sample, count, &pack, &s->samples[packed], error);
    }
    free(sample);
    return result;
}

static cf_result end_search(context_search *s, cf_result result) {
    int packed;

    for (packed = 0; packed < 2; packed++) cf_plan_free(s->samples[packed]);
    return result == CF_ERROR_MEMORY ? result : CF_OK;
}

static int64_t gpus_of(const cf_tune_desc *desc) {
    cf_parallel parallel = cf_parallel_defaults(&desc->parallel);

    return desc->n_gpus > 0 ? desc->n_gpus : parallel.tp * parallel.pp * parallel.dp;
}

/* Returns the number of batches on which each method is timed. */
static int64_t few_batches(const cf_tune_desc *desc) {
    int64_t all = cf_tune_defaults(desc).n_batches, most = MOST_TIMED / cf_tune_defaults(desc).batch;

    return most >= all ? all : most > 0 ? most : 1;
}

cf_result baseline_tune_context(const int64_t *lengths, int64_t n, const cf_tune_desc *desc, baseline_tuned *out,
                                cf_error *error) {
    int64_t all = cf_tune_defaults(desc).n_batches;
    baseline_tuned found;
    context_search s;
    cf_result result = begin_search(&s, lengths, n, desc, &found, error);

    memset(&found, 0, sizeof found);
    s.n_batches = few_batches(desc);
    if (result == CF_OK) result = try_splits(&s, gpus_of(desc), 2, error);
    if (result == CF_OK && found.best.status == CF_TUNE_OK && s.n_batches < all) {
        s.n_batches = all;
        found.best.status = CF_TUNE_UNTRIED;
        result = try_way(&s, &s.best, s.best.recompute, s.best.layers, error);
    }
    if (out->least > 0 && (found.least == 0 || out->least < found.least)) found.least = out->least;
    out->least = found.least;
    if (found.best.status == CF_TUNE_OK && (out->best.status != CF_TUNE_OK || found.best.seconds < out->best.seconds))
        *out = found;
    return end_search(&s, result);
}

double baseline_work(const int64_t *lengths, int64_t n, const cf_tune_desc *desc) {
    context_search s;
    cf_result result = begin_search(&s, lengths, n, desc, NULL, NULL);

    s.n_batches = few_batches(desc);
    if (result == CF_OK) result = try_splits(&s, gpus_of(desc), 1, NULL);
    (void)end_search(&s, result);
    return s.work;
}

cf_result baseline_tune_recipe(const int64_t *lengths, int64_t n, const cf_tune_desc *desc, baseline_tuned *out,
                               cf_error *error) {
    int64_t gpus = gpus_of(desc), per_node = desc->gpus_per_node > 0 ? desc->gpus_per_node : 8;
    cf_tune_desc recipe = *desc;
    context_search s;
    context_way way;
    cf_result result = begin_search(&s, lengths, n, &recipe, out, error);

    memset(out, 0, sizeof *out);
    memset(&way, 0, sizeof way);
    recipe.parallel.zero = 3;
    recipe.parallel.layers = NULL;
    way.tp = way.pp = 1;
    way.zero = 3;
    way.offload = CF_OFFLOAD_CHECKPOINTS;
    for (way.cp = 1; way.cp <= gpus && out->best.status != CF_TUNE_OK && result == CF_OK; way.cp++) {
        cf_parallel parallel = cf_parallel_defaults(&recipe.parallel);
        way.dp = gpus / way.cp;
        if (way.dp * way.cp != gpus || way.dp > cf_tune_defaults(desc).batch) continue;
        parallel.tp = parallel.pp = parallel.n_virtual = 1;
        parallel.dp = gpus;
        parallel.ep = way.ep = most_experts(&s, &parallel, per_node);
        if (cf_parallel_validate(desc->model, &parallel, NULL) != CF_OK) continue;
        for (way.packed = 0; way.packed < 2 && result == CF_OK; way.packed++)
            result = try_way(&s, &way, CF_RECOMPUTE_FULL, 0, error);
    }
    return end_search(&s, result);
}

/* ----------------------------------------------------------------------------------------------------------------
   One batch
   ---------------------------------------------------------------------------------------------------------------- */

enum { MOST_SEQUENCES = 20000 }; /* most sequences of a batch that is timed dozens more times */

void baseline_context_words(const baseline_tuned *base, char *text, size_t size) {
    size_t n;

    baseline_words(base, text, size);
    n = strlen(text);
    snprintf(text + n, size - n, ", tensor %lld, pipeline %lld, data %lld, ", (long long)base->split.tp,
             (long long)base->split.pp, (long long)base->split.dp);
    n = strlen(text);
    if (base->split.ep > 1) snprintf(text + n, size - n, "experts %lld, ", (long long)base->split.ep);
    n = strlen(text);
    snprintf(text + n, size - n, "ZeRO %lld, recompute %s%s", (long long)base->split.zero,
             modelling_recompute_words(base->split.recompute, base->split.recompute_layers),
             modelling_offload_words(base->best.offload));
    n = strlen(text);
    if (base->ranks > 1) snprintf(text + n, size - n, "; on the GPUs of all %lld ranks", (long long)base->ranks);
}

/* Finds the seconds of an iteration besides its passes, in the requested split. */
static cf_result find_step(const pipeline *p, double *step, cf_error *error) {
    int64_t n = p->n_stages * p->model.parallel.n_virtual;
    cf_stage_cost *stages = (cf_stage_cost *)malloc((size_t)n * sizeof *stages);
    cf_cost_desc cost = modelling_costs(&p->model, &p->gpu, &p->asked->gpu, 0);
    cf_timing timing;
    cf_result result;

    if (!stages) return cf_refuse(error, CF_ERROR_MEMORY, "memory", -1, "out of memory");
    result = cf_cost_estimate(&cost, stages, n, &timing, step, error);
    free(stages);
    return result;
}

cf_result baseline_find_context(const pipeline *p, const packing *list, const packing_options *asked, double than,
                                baseline_tuned *out, baseline_tuned *recipe, cf_error *error) {
    baseline_tuned found;
    cf_tune_desc desc;
    double step = 0;
    cf_result result;

    memset(out, 0, sizeof *out);
    memset(recipe, 0, sizeof *recipe);
    memset(&found, 0, sizeof found);
    memset(&desc, 0, sizeof desc);
    if (!p->estimates || list->list.n_sequences < 1 || list->list.n_sequences > MOST_SEQUENCES)
        return CF_OK;
    desc.model = &p->model.model;
    desc.gpu = &p->gpu;
    desc.parallel = cf_parallel_defaults(&p->model.parallel);
    desc.parallel.zero = modelling_asked_zero(&p->asked->model);
    desc.parallel.ep = p->asked->model.ep;
    desc.gpus_per_node = p->asked->gpu.per_node;
    desc.memory = p->memory;
    desc.limit_bytes = p->gpu_bytes;
    desc.batch = list->list.n_sequences;
    desc.n_batches = 1;
    desc.pack.align = asked->align;
    desc.pack.max_slices = asked->max_slices;
    result = baseline_tune_context(list->lengths, desc.batch, &desc, &found, error);
    if (result == CF_OK) result = baseline_tune_recipe(list->lengths, desc.batch, &desc, recipe, error);
    if (result == CF_OK) result = find_step(p, &step, error);
    if (result != CF_OK) return result == CF_ERROR_MEMORY ? result : CF_OK;
    found.best.seconds -= step;
    recipe->best.seconds -= step;
    if (desc.parallel.dp > 1) found.ranks = recipe->ranks = desc.parallel.dp;
    if (found.best.status == CF_TUNE_OK && (!(than > 0) || found.best.seconds < than)) *out = found;
    else if (!(than > 0) && recipe->best.status == CF_TUNE_OK) *out = *recipe;
    return CF_OK;
}
