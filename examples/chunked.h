/* chunked.h - loss and gradients of a batch, chunk by chunk: the trainer's use of chunkflow - MIT or public domain

       cf_pack            lengths of the batch    ->  plan: which tokens go into which chunk
       cf_schedule_make   plan, K                 ->  schedule: the order of forwards, replays and backwards
       cf_steps_make      schedule                ->  steps: the same with the activation slot and the chain state that
                                                      each of them uses; run_steps below walks them

   Every pass gets its chunk's rows from the plan (chunk_feed_load), which is all that the model needs. Without a chain,
   a chunk is an ordinary packed micro-batch. With one, the forward also appends its K and V, or its layers' other
   state, to the chain's state. The backward takes the gradients that later chunks have added to its K and V there, and
   adds those for earlier chunks. */

#ifndef TRAIN_CHUNKED_H
#define TRAIN_CHUNKED_H

#include "../chunkflow.h"
#include "model.h"
#include "text.h"

#include <signal.h>

/* ================================================================================================================
   >>feed    the rows of a chunk, from the plan and the batch
   ================================================================================================================ */

typedef struct chunk_feed {
    chunk_rows rows;
    int32_t *token, *target, *next, *target2; /* (capacity) */
    double *weight2;
    int64_t capacity;        /* rows */
    void *metadata;          /* memory of cf_metadata_fill */
    size_t metadata_bytes;
    cf_metadata described;   /* its description of the chunk */
    int32_t *extra_target;   /* (described.n_extra) */
    key_place *places;       /* (described.n_calls) */
    row_span *spans;             /* (capacity) */
    int64_t bytes;           /* of all these: the data of one chunk at a time that a device gets besides the weights */
    double *weights;         /* (sequences of the batch) from cf_loss_weights */
    double mtp_weight;       /* weight of the loss of the token after the next */
} chunk_feed;

static inline void chunk_feed_free(chunk_feed *f, memory_meter *meter) {
    memory_count(meter, MEMORY_WORKSPACE, -f->bytes);
    free(f->token);
    free(f->target);
    free(f->next);
    free(f->target2);
    free(f->weight2);
    free(f->metadata);
    free(f->extra_target);
    free(f->places);
    free(f->spans);
    free(f->weights);
    memset(f, 0, sizeof *f);
}

/* Prepares for a batch: room for any chunk of the plan, and the weights of the mean over all target tokens, or the
   batch's own. mtp: weight of the loss of the token after the next. */
static inline cf_result chunk_feed_begin(chunk_feed *f, const cf_plan *plan, const batch *b, double mtp,
                                         memory_meter *meter, cf_error *error) {
    cf_loss_weights_desc mean = {0};
    cf_metadata_desc desc = {0};
    size_t bytes = 0;
    mean.ignored = b->ignored;
    free(f->weights);
    desc.weights = f->weights = TAKE(double, b->count);
    f->mtp_weight = batch_loss_weight2(b, mtp);
    cf_result result = cf_loss_weights(b->length, b->count, &mean, f->weights, error);
    if (b->weight) memcpy(f->weights, b->weight, (size_t)b->count * sizeof *f->weights);
    if (result == CF_OK) result = cf_metadata_size(plan, -1, &desc, &bytes, error);
    if (result != CF_OK || (bytes <= f->metadata_bytes && plan->chunk_size <= f->capacity)) return result;
    free(f->token);
    free(f->target);
    free(f->next);
    free(f->target2);
    free(f->weight2);
    free(f->metadata);
    free(f->spans);
    f->capacity = plan->chunk_size;
    f->token = TAKE(int32_t, f->capacity);
    f->target = TAKE(int32_t, f->capacity);
    f->next = TAKE(int32_t, f->capacity);
    f->target2 = TAKE(int32_t, f->capacity);
    f->weight2 = TAKE(double, f->capacity);
    f->spans = TAKE(row_span, f->capacity);
    f->metadata = take_memory((int64_t)bytes, 1);
    f->metadata_bytes = bytes;
    memory_count(meter, MEMORY_WORKSPACE, -f->bytes);
    f->bytes = (int64_t)bytes + f->capacity * (int64_t)(4 * sizeof(int32_t) + sizeof(double));
    memory_count(meter, MEMORY_WORKSPACE, f->bytes);
    return CF_OK;
}

/* Loads data that only trees need: further targets of rows where sequences diverge, and room for the places of keys. */
static inline void chunk_feed_load_more(chunk_feed *f, const batch *b) {
    const cf_metadata *m = &f->described;
    free(f->extra_target);
    free(f->places);
    f->extra_target = TAKE(int32_t, m->n_extra);
    f->places = TAKE(key_place, m->n_calls);
    for (int64_t i = 0; i < m->n_extra; i++) f->extra_target[i] = b->tokens[m->extra_sequences[i]][m->extra_targets[i]];
    f->rows.n_extra = m->n_extra;
    f->rows.extra_row = m->extra_rows;
    f->rows.extra_target = f->extra_target;
    f->rows.extra_weight = m->extra_weights;
}

/* up: the slice of this chunk that it continues; -1: none */
static inline void chunk_feed_add_span(chunk_feed *f, int64_t first, int64_t end, int64_t slice, int64_t up) {
    const row_span added = {(int32_t)first, (int32_t)end, -1, -1, -1, slice, NULL, 0, -1};
    row_span *at = &f->spans[f->rows.n_spans++];
    *at = added;
    if (up < 0) return;
    at->up = (int32_t)(at - f->spans) - 1;
    while (f->spans[at->up].slice != up) at->up--;
    at->sibling = f->spans[at->up].child;
    f->spans[at->up].child = (int32_t)(at - f->spans);
}

/* Lists the chunk's slices, and the padding between and after them. */
static inline void chunk_feed_list_spans(chunk_feed *f, const cf_plan *plan, const cf_chunk *c) {
    int64_t end = 0;
    f->rows.spans = f->spans;
    f->rows.n_spans = 0;
    for (int64_t i = c->first_slice; i < c->first_slice + c->n_slices; i++) {
        const cf_slice *s = &plan->slices[i];
        if (end < s->offset) chunk_feed_add_span(f, end, s->offset, -1, -1);
        end = s->offset + s->length;
        chunk_feed_add_span(f, s->offset, end, i, s->up >= c->first_slice && s->up < i ? s->up : -1);
    }
    if (end < f->rows.rows) chunk_feed_add_span(f, end, f->rows.rows, -1, -1);
}

/* Fills in the rows of one chunk. */
static inline cf_result chunk_feed_load(chunk_feed *f, const cf_plan *plan, int64_t chunk, const batch *b,
                                        cf_error *error) {
    cf_metadata_desc desc = {0};
    chunk_rows *r = &f->rows;
    cf_metadata m;
    desc.ignored = b->ignored;
    desc.weights = f->weights;
    desc.shared_mean = b->shared_mean;
    cf_result result = cf_metadata_fill(plan, chunk, &desc, f->metadata, f->metadata_bytes, &m, error);
    if (result != CF_OK) return result;
    f->described = m;
    chunk_feed_load_more(f, b);
    r->rows = m.rows;
    r->n_seqs = m.n_seqs;
    r->prefix = m.prefix;
    r->state_tokens = plan->chunks[chunk].state;
    r->cu_seqlens_q = m.cu_seqlens_q;
    r->cu_seqlens_k = m.cu_seqlens_k;
    r->position = m.position_ids;
    r->sequence = m.sequence_ids;
    r->weight = m.loss_weights;
    r->token = f->token;
    r->target = f->target;
    r->next = f->next;
    r->target2 = f->target2;
    r->weight2 = f->weight2;
    r->index = plan->chunks[chunk].index;
    r->chunk = chunk;
    for (int64_t row = 0; row < r->rows; row++) {
        const int64_t sequence = m.sequence_ids[row], position = m.position_ids[row];
        const uint16_t *tokens = sequence < 0 ? NULL : b->tokens[sequence];
        f->token[row] = tokens ? tokens[position] : -1;
        f->target[row] = m.target_positions[row] < 0 ? -1 : tokens[m.target_positions[row]];
        f->next[row] = tokens ? batch_next(b, sequence, position) : -1;
        f->target2[row] = tokens ? batch_target2(b, sequence, position) : -1;
        f->weight2[row] = f->mtp_weight;
    }
    chunk_feed_list_spans(f, plan, &plan->chunks[chunk]);
    return CF_OK;
}

/* Finds the snapshots from which slices begin, in the states above the chunk, and those that they leave for later
   chunks, in the chunk's own state. */
static inline void chunk_feed_find_borders(chunk_feed *f, const cf_plan *plan, const cf_steps *steps,
                                           const cf_step *step, const chain_state *states, const pass *p) {
    for (row_span *s = f->spans; s < f->spans + f->rows.n_spans; s++) {
        const int64_t up = s->slice < 0 ? -1 : plan->slices[s->slice].up;
        if (p->state && s->slice >= 0) s->leaves = snapshot_of(p->state, s->slice);
        for (int32_t n = step->path; n >= 0 && up >= 0 && s->up < 0 && !s->above; n = steps->paths[n].up) {
            const chain_state *state = &states[steps->paths[n].state];
            s->enters = snapshot_of(state, up);
            if (s->enters >= 0) s->above = state;
        }
    }
}

/* Finds the states that the pass reads in a tree. Before the first use of one in a backward, clears its gradients. The
   metadata says, level by level, which rows see which of their rows. */
static inline void chunk_feed_find_places(chunk_feed *f, const cf_plan *plan, const cf_steps *steps,
                                          const cf_step *step, const chain_state *states, pass *p) {
    const cf_metadata *m = &f->described;
    chunk_feed_find_borders(f, plan, steps, step, states, p);
    for (int32_t n = step->path; n >= 0; n = steps->paths[n].up) {
        const cf_path *path = &steps->paths[n];
        const chain_state *state = &states[path->state];
        if (path->clear == step->position && state != p->state) {
            chain_state_clear_gradient(state, p->config, &p->stage);
        }
        for (int64_t i = 0; i < m->n_calls; i++) {
            if (m->calls[i].chain != path->chain) continue;
            f->places[i].state = state;
            f->places[i].row = m->calls[i].first;
            f->places[i].first = path->begin + m->calls[i].first;
        }
    }
    for (int64_t i = 0; i < m->n_calls; i++) {
        const key_level level = {m->calls[i].n_seqs, m->calls[i].cu_seqlens_q, m->calls[i].cu_seqlens_k};
        f->places[i].level = level;
    }
    p->places = f->places;
    p->n_places = m->n_calls;
}

/* ================================================================================================================
   >>runner    buffers that live as long as the training, and the passes that use them
   ================================================================================================================ */

typedef struct chunk_runner {
    const model_config *config;
    stage stage;              /* the part of the model that this runner has */
    cf_pack_desc packing;
    int64_t share;            /* see pack_batch */
    cf_schedule_desc order;
    int64_t stream_bytes;     /* bytes of the ring that streams states from host memory; 0: states are on the device */
    /* 1: dropped chunks keep attention's outputs, stored where states are, and R does not attend */
    int keep_outputs;
    memory_meter *meter;
    const volatile sig_atomic_t *stop; /* set by a signal to end a run early; NULL is allowed */

    activations *slots;       /* (n_slots) for forwards that keep their activations */
    int64_t n_slots, slot_rows;
    activations *outputs;     /* (n_outputs) */
    int64_t n_outputs;
    activations passing;      /* for forwards that keep nothing: one layer deep */
    chain_state *states;      /* (n_states) */
    int64_t n_states;
    state_stream stream;      /* its ring is allocated for the first batch with a chain */
    workspace scratch;
    cf_capacity most;         /* needs of all batches so far */
    chunk_feed feed;
    routing routing;          /* of the current batch */

    const cf_plan *plan;      /* of the current run, like everything below */
    const cf_steps *steps;
    const batch *batch;
    const weights *weights;
    weights *gradient;
    uint64_t seed;
    /* (chunks of the plan) added up at the end, so that the schedule does not change the sum */
    double *losses;
    int64_t live_bytes, peak_live_bytes; /* of slots in use on the device: activations and outputs */
    int64_t n_replays;
} chunk_runner;

typedef struct chunked_result {
    double loss;                       /* mean over the batch's target tokens */
    int64_t n_chunks, n_replays;
    int64_t n_rows;                    /* computed rows: tokens less shared ones */
    int64_t longest_chain;             /* in chunks; for a tree, its longest path */
    int64_t n_hybrid;
    int64_t peak_slots;
    int64_t peak_activation_bytes;     /* peak of slots in use on the device, outputs included */
} chunked_result;

static inline void chunk_runner_free(chunk_runner *r) {
    for (int64_t i = 0; i < r->n_slots; i++) activations_free(&r->slots[i], r->meter);
    for (int64_t i = 0; i < r->n_outputs; i++) activations_free(&r->outputs[i], r->meter);
    if (r->passing.flat) activations_free(&r->passing, r->meter);
    if (r->scratch.flat) workspace_free(&r->scratch, r->meter);
    if (r->stream.ring) stream_free(&r->stream, r->meter);
    free(r->slots);
    free(r->outputs);
    free(r->states);
    free(r->losses);
    routing_free(&r->routing);
    chunk_feed_free(&r->feed, r->meter);
    memset(r, 0, sizeof *r);
}

/* Makes ready for a batch. */
static inline cf_result chunk_runner_begin(chunk_runner *r, const cf_plan *plan, const batch *b, const weights *w,
                                           weights *gradient, cf_error *error) {
    r->plan = plan;
    r->batch = b;
    r->weights = w;
    r->gradient = gradient;
    r->live_bytes = r->peak_live_bytes = r->n_replays = 0;
    for (int64_t i = 0; i < plan->n_chains; i++) {
        if (plan->chains[i].cp == 0) continue;
        return cf_refuse(error, CF_ERROR_ARGUMENT, "max_cp", i, "ranks of a cp group run at once, each in a process");
    }
    free(r->losses);
    r->losses = TAKE(double, plan->n_chunks);
    routing_free(&r->routing);
    r->routing = routing_new(r->config, plan->n_chunks, plan->chunk_size, b->length, b->count);
    return chunk_feed_begin(&r->feed, plan, b, r->config->kinds.mtp, r->meter, error);
}

/* Makes room for a plan and its steps. The need is known before the first forward. All slots have ChunkSize rows, so
   memory is allocated only if no earlier batch needed as much. */
static inline cf_result chunk_runner_reserve(chunk_runner *r, const cf_plan *plan, const cf_steps *steps,
                                             cf_error *error) {
    cf_result result = cf_steps_capacity(plan, steps, &r->most, error);
    if (result != CF_OK) return result;
    r->steps = steps;
    if (!r->scratch.flat) {
        r->scratch = workspace_new(r->config, plan->chunk_size, r->meter);
        r->passing = activations_new(r->config, &r->stage, plan->chunk_size, 0, MEMORY_WORKSPACE, r->meter);
    }
    grow_slots(&r->slots, &r->n_slots, r->most.activations, r->config, &r->stage, plan->chunk_size, 1,
               MEMORY_ACTIVATIONS, r->meter);
    grow_slots(&r->outputs, &r->n_outputs, r->keep_outputs ? r->most.outputs : 0, r->config, &r->stage,
               plan->chunk_size, KEEP_OUTPUTS, r->stream_bytes > 0 ? MEMORY_HOST : MEMORY_ACTIVATIONS, r->meter);
    if (r->most.states > r->n_states) {
        free(r->states);
        r->states = TAKE(chain_state, r->most.states);
        r->n_states = r->most.states;
    }
    if (r->stream_bytes > 0 && r->most.states > 0 && !r->stream.ring) {
        r->stream = stream_new(stream_width_of(r->config), r->stream_bytes, r->meter);
    }
    return CF_OK;
}

/* Returns the outputs slot of a step. NULL: it has none, or outputs are not kept. */
static inline const activations *outputs_of(const chunk_runner *r, const cf_step *step) {
    return r->keep_outputs && step->outputs >= 0 ? &r->outputs[step->outputs] : NULL;
}

static inline pass pass_of(chunk_runner *r, const cf_step *step) {
    pass p = {r->config, r->weights, &r->feed.rows, &r->passing, NULL, &r->scratch, r->stage, r->seed,
              step->action.pass == CF_R, &r->routing, NULL, 0, outputs_of(r, step),
              r->stream_bytes > 0 ? &r->stream : NULL, NULL};
    if (step->slot >= 0) p.kept = &r->slots[step->slot];
    if (step->state >= 0) p.state = &r->states[step->state];
    if (step->clear_state_gradient) chain_state_clear_gradient(p.state, r->config, &r->stage);
    chunk_feed_find_places(&r->feed, r->plan, r->steps, step, r->states, &p);
    return p;
}

/* Runs F, R or B. Of a chunk's forwards only one runs the head. */
static inline cf_result run_pass(chunk_runner *r, const cf_step *step, cf_error *error) {
    const int64_t chunk = step->action.chunk;
    cf_result result = chunk_feed_load(&r->feed, r->plan, chunk, r->batch, error);
    if (result != CF_OK) return result;
    r->n_replays += step->action.pass == CF_R;
    if (r->plan->chunks[chunk].n_slices == 0) return CF_OK; /* an idle chunk: it only keeps the ranks in lockstep */
    pass p = pass_of(r, step);
    if (step->action.pass == CF_B) {
        model_backward(&p, r->gradient);
        return CF_OK;
    }
    p.stage.has_head = step->wants_loss;
    double loss = model_forward(&p);
    if (step->wants_loss) r->losses[chunk] = loss;
    return CF_OK;
}

/* Lists the slices of a chain that slices of later chunks continue: the state keeps a snapshot at the end of each. Its
   gradient is in the first carry if only the chain itself continues, and so is that of one slice of the last chunk,
   whose backward comes first. All others have a carry each. */
static inline void list_left_slices(chain_state *g, const cf_plan *plan, const cf_chain *chain) {
    const cf_chunk *last = &plan->chunks[chain->first_chunk + chain->n_chunks - 1];
    const int64_t first = plan->chunks[chain->first_chunk].first_slice, end = last->first_slice + last->n_slices;
    const int64_t most = plan->order ? (last->rank + 1) * plan->chunks_per_rank : chain->first_chunk + chain->n_chunks;
    unsigned char *is_left = TAKE(unsigned char, end - first); /* 1: by the next chunk's first slice; 2: by others */
    int is_taken = 0; /* 1: a slice of the last chunk has the first carry */
    g->left = TAKE(int64_t, end - first);
    for (int64_t chunk = chain->first_chunk + 1; chunk < most; chunk++) {
        const cf_chunk *c = &plan->chunks[chunk];
        for (int64_t i = c->first_slice; i < c->first_slice + c->n_slices; i++) {
            const int64_t up = plan->slices[i].up;
            if (up < first || up >= end || up >= c->first_slice) continue;
            is_left[up - first] |= i == c->first_slice && c->chain == plan->chunks[chain->first_chunk].chain ? 1 : 2;
        }
    }
    if (g->in_tree) g->carry_of = TAKE(int64_t, end - first);
    for (int64_t i = first; i < end; i++) {
        if (!is_left[i - first]) continue;
        g->left[g->n_snapshots++] = i;
        if (!g->in_tree) continue;
        const int shares = is_left[i - first] == 1 || (i >= last->first_slice && !is_taken);
        is_taken |= i >= last->first_slice;
        g->carry_of[g->n_snapshots - 1] = shares ? 0 : g->n_carries++;
    }
    free(is_left);
}

static inline chain_state state_of_chain(const model_config *config, const stage *part, const cf_plan *plan,
                                         int64_t number, state_stream *stream, memory_meter *meter) {
    const cf_chain *chain = &plan->chains[number];
    chain_state shape = {0};
    shape.chunks = chain->n_chunks;
    shape.in_tree = plan->order != NULL;
    shape.n_carries = 1;
    shape.begin = TAKE(int64_t, chain->n_chunks + 1);
    for (int64_t i = 0; i < chain->n_chunks; i++) shape.begin[i] = plan->chunks[chain->first_chunk + i].prefix;
    shape.begin[chain->n_chunks] = shape.begin[0] + chain->tokens;
    if (chain->cp > 0) shape.n_snapshots = chain->n_chunks + 1;
    else list_left_slices(&shape, plan, chain);
    return chain_state_new(config, part, &shape, stream, meter);
}

/* Returns the bytes of a step's outputs slot on the device. */
static inline int64_t outputs_bytes(const chunk_runner *r, const cf_step *step) {
    const activations *outputs = outputs_of(r, step);
    return outputs && outputs->kind == MEMORY_ACTIVATIONS ? outputs->bytes : 0;
}

/* Prepares what a step uses. Activation slots exist already; a chain's state is allocated in the chain's size. */
static inline void begin_step(chunk_runner *r, const cf_step *step) {
    const cf_path *path = step->path >= 0 ? &r->steps->paths[step->path] : NULL;
    if (step->action.keep) r->live_bytes += r->slots[step->slot].bytes;
    if (step->action.pass == CF_F) r->live_bytes += outputs_bytes(r, step);
    r->peak_live_bytes = max_of(r->peak_live_bytes, r->live_bytes);
    if (!path || path->first != step->position) return;
    state_stream *stream = r->stream_bytes > 0 ? &r->stream : NULL;
    r->states[path->state] = state_of_chain(r->config, &r->stage, r->plan, path->chain, stream, r->meter);
}

/* Frees what is unused after a step. */
static inline void end_step(chunk_runner *r, const cf_step *step) {
    if (step->action.pass == CF_B) r->live_bytes -= r->slots[step->slot].bytes;
    if (step->action.pass == CF_R) r->live_bytes -= outputs_bytes(r, step);
    for (int32_t i = step->path; i >= 0; i = r->steps->paths[i].up) {
        const cf_path *path = &r->steps->paths[i];
        if (path->last == step->position) chain_state_free(&r->states[path->state], r->meter);
    }
}

/* Frees the states in use if a run ends early, at this step. */
static inline void drop_states(chunk_runner *r, const cf_step *step) {
    for (int64_t i = 0; i < r->steps->n_paths; i++) {
        const cf_path *path = &r->steps->paths[i];
        if (path->first <= step->position && step->position < path->last)
            chain_state_free(&r->states[path->state], r->meter);
    }
}

/* Runs the reserved steps: this loop is all that executes a schedule. */
static inline cf_result run_steps(chunk_runner *r, cf_error *error) {
    cf_result result = CF_OK;
    for (int64_t i = 0; i < r->steps->n && result == CF_OK; i++) {
        const cf_step *step = &r->steps->steps[i];
        begin_step(r, step);
        result = run_pass(r, step, error);
        end_step(r, step);
        if (result == CF_OK && r->stop && *r->stop)
            result = cf_refuse(error, CF_ERROR_CANCELLED, "stop", i, "the run was asked to stop");
        if (result != CF_OK) drop_states(r, step);
    }
    return result;
}

/* ================================================================================================================
   >>gradients
   ================================================================================================================ */

/* Runs the chunks of one data-parallel rank. */
static inline cf_result run_rank(chunk_runner *r, const cf_plan *plan, int64_t rank, chunked_result *sum,
                                 cf_error *error) {
    cf_schedule *schedule = NULL;
    cf_schedule_desc order = r->order;
    cf_steps *steps = NULL;
    order.shape.rank = rank;
    cf_result result = cf_schedule_make(plan, &order, &schedule, error);
    if (result == CF_OK) result = cf_steps_make(plan, schedule, 0, r->seed, NULL, &steps, error);
    if (result == CF_OK) result = chunk_runner_reserve(r, plan, steps, error);
    if (result == CF_OK) result = run_steps(r, error);
    if (result == CF_OK) sum->peak_slots = max_of(sum->peak_slots, steps->n_slots);
    cf_steps_free(steps);
    cf_schedule_free(schedule);
    return result;
}

/* Packs a batch. Prefixes that sequences have in common, of `share` tokens or more, are found first and then computed
   once; with 0 nothing is shared. (Share only what is equal in everything that a model sees. Equal tokens after
   different images are not, nor are tokens that a trainer with recorded routes must send to other experts.) */
static inline cf_result pack_batch(const cf_pack_desc *packing, int64_t share, const batch *b, cf_plan **plan,
                                   cf_error *error) {
    cf_pack_desc desc = *packing;
    desc.min_shared_prefix = share;
    desc.no_copies = b->shared_mean; /* a row in two splits would count twice */
    if (share == 0) return cf_pack(b->length, b->count, &desc, plan, error);
    cf_shared_prefix *shares = TAKE(cf_shared_prefix, b->count);
    const void **tokens = TAKE(const void *, b->count);
    for (int64_t i = 0; i < b->count; i++) tokens[i] = b->tokens[i];
    cf_result result = cf_shared_prefixes_find(tokens, sizeof **b->tokens, b->length, b->count, shares, NULL, error);
    desc.shared_prefixes = shares;
    if (result == CF_OK) result = cf_pack(b->length, b->count, &desc, plan, error);
    free(shares);
    free((void *)tokens);
    return result;
}

/* Adds the batch's gradients to `gradient` and gives its loss. Data-parallel ranks, which would be other machines, run
   here one after another; adding up their gradients replaces the all-reduce. `result` is filled in only on CF_OK.
   CF_ERROR_CANCELLED: *r->stop was set, and the gradients are incomplete. */
static inline cf_result chunked_gradients(chunk_runner *r, const weights *w, weights *gradient, const batch *b,
                                          uint64_t seed, chunked_result *result, cf_error *error) {
    cf_plan *plan = NULL;
    cf_plan_stats stats;
    chunked_result sum = {0};
    cf_result code = pack_batch(&r->packing, r->share, b, &plan, error);
    if (code != CF_OK) return code;
    r->seed = seed;
    code = chunk_runner_begin(r, plan, b, w, gradient, error);
    for (int64_t rank = 0; rank < plan->n_ranks && code == CF_OK; rank++) code = run_rank(r, plan, rank, &sum, error);
    if (code == CF_OK) {
        cf_plan_measure(plan, NULL, &stats);
        for (int64_t i = 0; i < plan->n_chunks; i++) sum.loss += r->losses[i];
        sum.loss += balance_loss(&r->routing, r->config);
        sum.n_chunks = plan->n_chunks;
        sum.n_replays = r->n_replays;
        sum.n_hybrid = stats.n_hybrid;
        sum.n_rows = stats.rows;
        sum.longest_chain = stats.longest_chain;
        sum.peak_activation_bytes = r->peak_live_bytes;
        *result = sum;
    }
    cf_plan_free(plan);
    r->plan = NULL;
    r->steps = NULL;
    return code;
}

#endif /* TRAIN_CHUNKED_H */
