/* pipeline.h - one stage of a pipeline: its passes, for any kind of transport - MIT or public domain

   A stage has one part of the model, or several (virtual stages; the schedule gives their placement), and runs a
   lowered schedule. Its steps (cf_steps_make) number the buffers and say which ones to use:

       slot             activations that a forward keeps for its backward; in use until B, or until W
       outputs          attention's outputs of a forward that keeps nothing else, until the end of its replay, which
                        then does not attend; only if that is asked for
       state            K, V, dK and dV of a chain's tokens, in all layers of one part
       input, output    boundary tensors, (rows, hidden): residual stream on its way up, its gradient on its way down.
                        A receive fills the one that a pass will read, a send takes the one that a pass has made. Where
                        a V turns, the part behind reads what the part before it has made, on the same stage. With
                        local replay the stage's input stays in its buffer from F to R; with a stream it goes to host
                        memory, and comes back through one of two slots while the R before it runs

   The program walks the steps and supplies sends and receives. Between the first step and the last, it allocates
   boundaries if none is free, and buffers that vary in size or are in host memory; nothing else. */

#ifndef TRAIN_PIPELINE_H
#define TRAIN_PIPELINE_H

#include "chunked.h"

/* A device buffer for a stage input that returns from host memory. */
typedef struct input_slot {
    real *rows;
    int64_t owner; /* index in the list of kept inputs; -1: free */
    int64_t event; /* of its copy */
} input_slot;

#define INPUT_SLOTS 2 /* one in use, one being loaded */

typedef struct stage_runner {
    const model_config *config;
    const cf_plan *plan;
    const cf_schedule *schedule; /* lowered */
    const cf_steps *steps;       /* of this stage */
    const batch *batch;
    const weights *weights;
    weights *gradient;
    uint64_t seed;               /* of dropout */
    int64_t stage;               /* this one */
    memory_meter meter;

    activations *slots;          /* (n_slots) */
    activations *outputs;        /* (n_outputs) attention's outputs of dropped chunks; in host memory with a stream */
    activations passing;         /* for forwards that keep nothing: one layer deep */
    chain_state *states;         /* (n_states) empty while the slot is free */
    real **boundaries;           /* (n_boundaries) NULL if the slot is free, or its tensor in host memory */
    real **spare;                /* (n_spare) unused buffers for boundaries */
    int64_t n_spare;
    state_stream stream;         /* of states; without a ring they are on the device, and so are kept inputs */
    int64_t stream_bytes;
    real **kept_inputs;          /* (n_virtual x chunks) in host memory; NULL: none */
    input_slot input_slots[INPUT_SLOTS];
    copy_engine inputs_in, inputs_out;
    int64_t n_slots, n_states, n_boundaries;
    int64_t n_outputs;           /* 0: not requested, or nothing is dropped */
    int64_t boundary_count;      /* numbers in a boundary */
    workspace scratch;
    chunk_feed feed;
    routing routing;
    cp_group group;              /* add_up and context are the caller's, if the plan has cp groups */

    int64_t live_slots;          /* activation slots in use now */
    int64_t live_outputs, peak_outputs; /* outputs slots in use, now and at most */
    double loss;                 /* of the head's stage, plus the balance loss of each stage with experts */
} stage_runner;

/* Returns the part of the model of a virtual stage. */
static inline stage part_of(const model_config *config, const cf_schedule *schedule, int64_t virtual_stage) {
    return stage_of(config, virtual_stage, schedule->shape.n_stages * schedule->shape.n_virtual);
}

/* Returns the part of a stage in one row of virtual stages. */
static inline stage part_at(const model_config *config, const cf_schedule *schedule, int64_t row, int64_t stage_index) {
    return part_of(config, schedule, cf_placement_at(schedule->shape.placement, schedule->shape.n_stages, row, stage_index));
}

/* Returns the part on this stage whose activations need most; all parts use its buffers in turn. */
static inline stage largest_part(const model_config *config, const cf_schedule *schedule, int64_t stage_index,
                                 int keep) {
    stage largest = part_at(config, schedule, 0, stage_index);
    for (int64_t row = 1; row < schedule->shape.n_virtual; row++) {
        stage part = part_at(config, schedule, row, stage_index);
        if (activations_bytes(config, &part, 1, keep) > activations_bytes(config, &largest, 1, keep)) largest = part;
    }
    return largest;
}

/* Refuses options that ranks of a cp group do not support. */
static inline cf_result check_groups(const cf_plan *plan, const model_config *config, int64_t stream_bytes,
                                     cf_error *error) {
    const char *fault = model_group_fault(config);
    if (stream_bytes > 0) fault = "cp groups: their states are on the device, so nothing streams";
    for (int64_t i = 0; fault && i < plan->n_chains; i++) {
        if (plan->chains[i].cp > 0) return cf_refuse(error, CF_ERROR_ARGUMENT, "max_cp", i, fault);
    }
    return CF_OK;
}

/* Allocates all the memory of a run. */
static inline cf_result stage_runner_begin(stage_runner *r, const model_config *config, const cf_plan *plan,
                                           const cf_schedule *schedule, const cf_steps *steps, const batch *b,
                                           int64_t stream_bytes, int keep_outputs, cf_error *error) {
    const int64_t stage_index = steps->stage;
    cf_capacity need = {0};
    memset(r, 0, sizeof *r);
    cf_result result = check_groups(plan, config, stream_bytes, error);
    if (result == CF_OK) result = cf_steps_capacity(plan, steps, &need, error);
    if (result == CF_OK) result = chunk_feed_begin(&r->feed, plan, b, config->kinds.mtp, &r->meter, error);
    if (result != CF_OK) return result;
    r->config = config;
    r->plan = plan;
    r->schedule = schedule;
    r->steps = steps;
    r->stage = stage_index;
    r->batch = b;
    r->n_states = need.states;
    r->n_boundaries = need.boundaries;
    r->boundary_count = plan->chunk_size * config->hidden;
    const stage kept = largest_part(config, schedule, stage_index, 1);
    const stage passing = largest_part(config, schedule, stage_index, 0);
    const stage outputs = largest_part(config, schedule, stage_index, KEEP_OUTPUTS);
    r->routing = routing_new(config, plan->n_chunks, plan->chunk_size, b->length, b->count);
    r->states = TAKE(chain_state, r->n_states);
    r->boundaries = TAKE(real *, r->n_boundaries);
    r->spare = TAKE(real *, r->n_boundaries);
    r->stream_bytes = stream_bytes;
    r->kept_inputs = TAKE(real *, schedule->shape.n_virtual * plan->n_chunks);
    for (int i = 0; i < INPUT_SLOTS; i++) r->input_slots[i].owner = -1;
    if (stream_bytes > 0 && r->n_states > 0) r->stream = stream_new(stream_width_of(config), stream_bytes, &r->meter);
    grow_slots(&r->slots, &r->n_slots, need.activations, config, &kept, plan->chunk_size, 1, MEMORY_ACTIVATIONS,
               &r->meter);
    grow_slots(&r->outputs, &r->n_outputs, keep_outputs ? need.outputs : 0, config, &outputs, plan->chunk_size,
               KEEP_OUTPUTS, stream_bytes > 0 ? MEMORY_HOST : MEMORY_ACTIVATIONS, &r->meter);
    r->passing = activations_new(config, &passing, plan->chunk_size, 0, MEMORY_WORKSPACE, &r->meter);
    r->scratch = workspace_new(config, plan->chunk_size, &r->meter);
    return CF_OK;
}

static inline void stage_runner_end(stage_runner *r) {
    for (int64_t i = 0; i < r->n_slots; i++) activations_free(&r->slots[i], &r->meter);
    for (int64_t i = 0; i < r->n_outputs; i++) activations_free(&r->outputs[i], &r->meter);
    for (int64_t i = 0; i < r->n_spare; i++) free(r->spare[i]);
    for (int i = 0; i < INPUT_SLOTS; i++) free(r->input_slots[i].rows);
    if (r->stream.ring) stream_free(&r->stream, &r->meter);
    if (r->passing.flat) activations_free(&r->passing, &r->meter);
    if (r->scratch.flat) workspace_free(&r->scratch, &r->meter);
    free(r->slots);
    free(r->outputs);
    free(r->states);
    free(r->boundaries);
    free(r->spare);
    free(r->kept_inputs);
    routing_free(&r->routing);
    chunk_feed_free(&r->feed, &r->meter);
    free(r->group.room);
    memset(r, 0, sizeof *r);
}

static inline int64_t boundary_numbers(const stage_runner *r, const cf_step *step) {
    return r->plan->chunks[step->action.chunk].rows * r->config->hidden;
}

static inline int uses_outputs(const stage_runner *r, const cf_step *step) {
    return step->outputs >= 0 && r->n_outputs > 0;
}

/* Returns the cp group of a chunk; NULL: none. */
static inline cp_group *group_of(stage_runner *r, int64_t chunk) {
    r->group.plan = r->plan;
    r->group.chunk = chunk;
    r->group.size = r->plan->chunks[chunk].cp;
    if (r->group.size == 0) return NULL;
    r->group.part = r->plan->chunks[chunk].rank % r->group.size;
    return &r->group;
}

/* Loads the rows of the step's chunk and lays out its buffers for the step's part of the model. */
static inline cf_result prepare_pass(stage_runner *r, const cf_step *step, pass *p, cf_error *error) {
    cf_result result = chunk_feed_load(&r->feed, r->plan, step->action.chunk, r->batch, error);
    if (result != CF_OK) return result;
    activations *kept = step->slot >= 0 ? &r->slots[step->slot] : &r->passing;
    memset(p, 0, sizeof *p);
    p->config = r->config;
    p->weights = r->weights;
    p->rows = &r->feed.rows;
    p->kept = kept;
    p->scratch = &r->scratch;
    p->stage = part_of(r->config, r->schedule, step->action.stage);
    p->seed = r->seed;
    p->is_replay = step->action.pass == CF_R;
    p->routing = &r->routing;
    p->group = group_of(r, step->action.chunk);
    activations_reshape(kept, r->config, &p->stage, r->plan->chunk_size, step->slot >= 0);
    if (uses_outputs(r, step)) {
        activations *outputs = &r->outputs[step->outputs];
        activations_reshape(outputs, r->config, &p->stage, r->plan->chunk_size, KEEP_OUTPUTS);
        p->outputs = outputs;
        p->outputs_stream = r->stream_bytes > 0 ? &r->stream : NULL;
    }
    if (step->state >= 0) p->state = &r->states[step->state];
    if (step->clear_state_gradient) chain_state_clear_gradient(p->state, r->config, &p->stage);
    if (step->action.pass != CF_W) chunk_feed_find_places(&r->feed, r->plan, r->steps, step, r->states, p);
    return CF_OK;
}

/* ---- kept stage inputs, with a stream ---- */

/* Returns the index of a chunk on a virtual stage in lists of all of them. */
static inline int64_t cell_of(const stage_runner *r, const cf_action *a) {
    return a->stage / r->schedule->shape.n_stages * r->plan->n_chunks + a->chunk;
}

/* Begins to send an F's input, which its R will read again, to host memory. */
static inline void input_leaves(stage_runner *r, const cf_step *step) {
    real **host = &r->kept_inputs[cell_of(r, &step->action)];
    int64_t count = boundary_numbers(r, step);
    *host = TAKE(real, count);
    memory_count(&r->meter, MEMORY_HOST, count * (int64_t)sizeof(real));
    copy_issue(&r->inputs_out, *host, r->boundaries[step->input], count);
}

/* Frees the buffer once the input has arrived in host memory. */
static inline void input_has_left(stage_runner *r, const cf_step *step) {
    copy_wait(&r->inputs_out, r->inputs_out.n_issued);
    r->spare[r->n_spare++] = r->boundaries[step->input];
    r->boundaries[step->input] = NULL;
}

/* Begins to load a kept input, unless that has begun, and returns its slot; NULL if none is free. */
static inline input_slot *input_load(stage_runner *r, const cf_action *a) {
    int64_t cell = cell_of(r, a), count = r->plan->chunks[a->chunk].rows * r->config->hidden;
    input_slot *slot = NULL;
    for (int i = INPUT_SLOTS - 1; i >= 0; i--) {
        if (r->input_slots[i].owner == cell) return &r->input_slots[i];
        if (r->input_slots[i].owner < 0) slot = &r->input_slots[i];
    }
    if (!slot) return NULL;
    if (!slot->rows) {
        slot->rows = TAKE(real, r->boundary_count);
        memory_count(&r->meter, MEMORY_INPUTS, r->boundary_count * (int64_t)sizeof(real));
    }
    slot->owner = cell;
    slot->event = copy_issue(&r->inputs_in, slot->rows, r->kept_inputs[cell], count);
    return slot;
}

/* Begins to load the input of the list's next R, if it is already kept. */
static inline void input_look_ahead(stage_runner *r, const cf_step *step) {
    int64_t i = step->position + 1;
    const cf_step *steps = r->steps->steps;
    while (i < r->steps->n && (steps[i].action.pass != CF_R || !r->kept_inputs[cell_of(r, &steps[i].action)])) i++;
    if (i < r->steps->n) input_load(r, &steps[i].action);
}

/* Frees the slot after the R has read it. */
static inline void input_is_done(stage_runner *r, const cf_step *step, input_slot *slot) {
    int64_t count = boundary_numbers(r, step);
    spoil(slot->rows, count);
    slot->owner = -1;
    free(r->kept_inputs[cell_of(r, &step->action)]);
    r->kept_inputs[cell_of(r, &step->action)] = NULL;
    memory_count(&r->meter, MEMORY_HOST, -count * (int64_t)sizeof(real));
}

/* F and R. */
static inline void stage_forward(stage_runner *r, const cf_step *step, pass *prepared) {
    pass p = *prepared;
    int streams = step->input >= 0 && r->stream_bytes > 0 && r->schedule->shape.replay == CF_REPLAY_LOCAL;
    int leaves = streams && step->action.pass == CF_F && !step->action.keep;
    input_slot *slot = streams && step->action.pass == CF_R ? input_load(r, &step->action) : NULL;
    const real *input = slot ? slot->rows : step->input >= 0 ? r->boundaries[step->input] : NULL;
    if (slot) copy_wait(&r->inputs_in, slot->event);
    if (slot) input_look_ahead(r, step);
    if (leaves) input_leaves(r, step);
    if (input) copy_rows(stage_input(p.kept), input, p.rows->rows, r->config->hidden);
    p.stage.has_head = step->wants_loss; /* of a chunk's forwards only one runs the head */
    r->loss += model_forward(&p);
    if (leaves) input_has_left(r, step);
    if (slot) input_is_done(r, step, slot);
    if (step->output < 0) return;
    copy_rows(r->boundaries[step->output], stage_output(p.kept), p.rows->rows, r->config->hidden);
}

/* B, or I and W. */
static inline void stage_backward(stage_runner *r, const cf_step *step, pass *p) {
    real *stream = r->scratch.rows.stream;
    if (step->input >= 0) copy_rows(stream, r->boundaries[step->input], p->rows->rows, r->config->hidden);
    if (step->action.pass == CF_B) model_backward(p, r->gradient);
    else if (step->action.pass == CF_I) model_backward_input(p, r->gradient);
    else model_backward_weights(p, r->gradient);
    if (step->output >= 0) copy_rows(r->boundaries[step->output], stream, p->rows->rows, r->config->hidden);
}

static inline cf_result stage_pass(stage_runner *r, const cf_step *step, cf_error *error) {
    pass p;
    if (r->plan->chunks[step->action.chunk].n_slices == 0) return CF_OK; /* idle, to keep ranks in lockstep */
    cf_result result = prepare_pass(r, step, &p, error);
    if (result != CF_OK) return result;
    if (step->action.pass <= CF_R) stage_forward(r, step, &p);
    else stage_backward(r, step, &p);
    return CF_OK;
}

/* ---- buffers that come into use with a step, and those that are then free ---- */

static inline void stage_begin_step(stage_runner *r, const cf_step *step) {
    const cf_path *path = step->path >= 0 ? &r->steps->paths[step->path] : NULL;
    const int32_t filled = step->action.pass <= CF_W ? step->output : step->input; /* by a pass, or a receive */
    r->live_slots += step->action.keep;
    r->live_outputs += step->action.pass == CF_F && uses_outputs(r, step);
    r->peak_outputs = max_of(r->peak_outputs, r->live_outputs);
    if (filled >= 0 && !r->boundaries[filled])
        r->boundaries[filled] = r->n_spare > 0 ? r->spare[--r->n_spare] : TAKE(real, r->boundary_count);
    if (!path || path->first != step->position) return;
    stage part = part_of(r->config, r->schedule, path->stage);
    state_stream *stream = r->stream.ring ? &r->stream : NULL;
    r->states[path->state] = state_of_chain(r->config, &part, r->plan, path->chain, stream, &r->meter);
}

/* Frees the tensor that a pass has read or sent. Only local replay reads the input of an F that kept nothing again. */
static inline void stage_end_step(stage_runner *r, const cf_step *step) {
    const int32_t emptied = step->action.pass <= CF_W ? step->input : step->output;
    int again = step->action.pass == CF_F && !step->action.keep && r->schedule->shape.replay == CF_REPLAY_LOCAL;
    r->live_slots -= step->action.pass == CF_B || step->action.pass == CF_W;
    r->live_outputs -= step->action.pass == CF_R && uses_outputs(r, step);
    if (emptied >= 0 && !again && r->boundaries[emptied]) {
        r->spare[r->n_spare++] = r->boundaries[emptied];
        r->boundaries[emptied] = NULL;
    }
    for (int32_t i = step->path; i >= 0; i = r->steps->paths[i].up) {
        const cf_path *path = &r->steps->paths[i];
        if (path->last == step->position) chain_state_free(&r->states[path->state], &r->meter);
    }
}

/* ================================================================================================================
   >>parameters    whose they are
   ================================================================================================================ */

/* Returns whether the last virtual stage also reads the embedding: as its head, or for the prediction module. */
static inline int reads_embedding_twice(const model_config *c) { return !c->untied || c->kinds.mtp > 0; }

/* Returns whether a virtual stage has this tensor. The embedding is on the first stage and, if the last one reads it,
   there as well: its gradient is then the sum of both. */
static inline int part_has_tensor(const model_config *c, const stage *part, const weights *w, const tensor *t) {
    const real *at = w->flat + t->offset;
    if (at == w->embedding) return part->has_embedding || (part->has_head && reads_embedding_twice(c));
    if (at >= w->final_norm) return part->has_head;
    int64_t layer = 0;
    while (layer + 1 < all_layers(c) && w->layers[layer + 1].attention_norm <= at) layer++;
    return layer >= part->first_layer && layer < part->end_layer + part->has_mtp;
}

static inline int stage_has_tensor(const model_config *c, const cf_schedule *schedule, int64_t stage_index,
                                   const weights *w, const tensor *t) {
    for (int64_t row = 0; row < schedule->shape.n_virtual; row++) {
        stage part = part_at(c, schedule, row, stage_index);
        if (part_has_tensor(c, &part, w, t)) return 1;
    }
    return 0;
}

#endif /* TRAIN_PIPELINE_H */
