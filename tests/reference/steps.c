#include "steps.h"

#include "naive.h"

#include <stdlib.h>
#include <string.h>

#define MOST_SLOTS 512
#define MOST_STAGES 8

#define RULE(condition, text)          \
    do {                               \
        if (!(condition)) return text; \
    } while (0)

enum { ACTIVATIONS, STATES, BOUNDARIES, OUTPUTS, POOLS };

/* ---- slots ---- */

typedef struct slots {
    int64_t owner[POOLS][MOST_SLOTS]; /* for each slot in use its owner; -1 if it is free */
    int64_t freed[POOLS][MOST_SLOTS]; /* the step that released it, from 1; 0: it is in use, or was never used */
    int64_t now, live[POOLS], peak[POOLS], n_paths;
} slots;

static int is_back(const cf_action *a) { return a->pass == CF_B || a->pass == CF_I; }

/* A slot is reused before a new one is made, and the one that has been free longest comes first. If one step released
   several, any of them. */
static int is_next(const slots *all, int what, int64_t slot) {
    int64_t i, first = 0;
    for (i = 0; i < MOST_SLOTS && (all->owner[what][i] >= 0 || all->freed[what][i] > 0); i++)
        if (all->freed[what][i] > 0 && (first == 0 || all->freed[what][i] < first)) first = all->freed[what][i];
    return first > 0 ? all->freed[what][slot] == first : slot == i;
}

static const char *take(slots *all, int what, int64_t slot, int64_t owner) {
    RULE(slot >= 0 && slot < MOST_SLOTS && all->owner[what][slot] < 0, "a slot is taken that is in use");
    RULE(is_next(all, what, slot), "a slot is taken out of turn");
    all->freed[what][slot] = 0;
    all->owner[what][slot] = owner;
    if (++all->live[what] > all->peak[what]) all->peak[what] = all->live[what];
    return NULL;
}

static const char *give(slots *all, int what, int64_t slot, int64_t owner) {
    RULE(slot >= 0 && slot < MOST_SLOTS && all->owner[what][slot] == owner,
         "a slot is given back that is another one's");
    all->owner[what][slot] = -1;
    all->freed[what][slot] = all->now;
    all->live[what]--;
    return NULL;
}

static int has(const slots *all, int what, int64_t slot, int64_t owner) {
    return slot < 0 || (slot < MOST_SLOTS && all->owner[what][slot] == owner);
}

/* Returns the virtual stage that fills the input of a pass: its own, by a receive, or, where a V turns, the one that
   makes the tensor. */
static int64_t filler_of(const cf_schedule *s, const cf_step *step) {
    int64_t v = step->action.stage, from = is_back(&step->action) ? v + 1 : v - 1;
    return step->action.pass > CF_W || naive_stage(s, from) != naive_stage(s, v) ? v : from;
}

static int64_t tensor_of(const cf_schedule *s, const cf_action *a, int64_t v) {
    return a->chunk * s->shape.n_stages * s->shape.n_virtual + v;
}

/* Returns whether a pass leaves outputs, or its input, for a replay on the same stage. */
static int is_dropped(const cf_schedule *s, const cf_action *a) {
    return a->pass == CF_F && !a->keep && s->shape.replay == CF_REPLAY_LOCAL && !s->shape.forward_only;
}

/* Takes the slots that come into use before a step. Each new path takes the next number. */
static const char *take_all(slots *all, const cf_schedule *s, const cf_steps *steps, const cf_step *step) {
    const int64_t own = tensor_of(s, &step->action, step->action.stage);
    const char *fault = NULL;
    for (; all->n_paths < steps->n_paths && steps->paths[all->n_paths].first == step->position; all->n_paths++)
        if ((fault = take(all, STATES, steps->paths[all->n_paths].state, all->n_paths)) != NULL) return fault;
    if (step->action.keep) fault = take(all, ACTIVATIONS, step->slot, own);
    if (fault == NULL && is_dropped(s, &step->action)) fault = take(all, OUTPUTS, step->outputs, own);
    if (fault == NULL && step->action.pass <= CF_W && step->output >= 0)
        fault = take(all, BOUNDARIES, step->output, own);
    if (fault == NULL && step->action.pass > CF_W && step->input >= 0) fault = take(all, BOUNDARIES, step->input, own);
    return fault;
}

static const char *give_all(slots *all, const cf_schedule *s, const cf_steps *steps, const cf_step *step) {
    const cf_action *a = &step->action;
    const int64_t own = tensor_of(s, a, a->stage);
    const char *fault = NULL;
    int64_t i;
    if (a->pass == CF_B || a->pass == CF_W) fault = give(all, ACTIVATIONS, step->slot, own);
    for (i = 0; i < all->n_paths && fault == NULL; i++)
        if (steps->paths[i].last == step->position) fault = give(all, STATES, steps->paths[i].state, i);
    if (fault == NULL && a->pass == CF_R && s->shape.replay == CF_REPLAY_LOCAL)
        fault = give(all, OUTPUTS, step->outputs, own);
    if (fault == NULL && a->pass > CF_W && step->output >= 0) fault = give(all, BOUNDARIES, step->output, own);
    if (fault == NULL && a->pass <= CF_W && step->input >= 0 && !is_dropped(s, a))
        fault = give(all, BOUNDARIES, step->input, tensor_of(s, a, filler_of(s, step)));
    return fault;
}

static const char *walk(slots *all, const cf_schedule *s, const cf_steps *steps) {
    const char *fault = NULL;
    int64_t i, j;
    memset(all, 0, sizeof *all);
    for (i = 0; i < POOLS; i++)
        for (j = 0; j < MOST_SLOTS; j++) all->owner[i][j] = -1;
    for (i = 0; i < steps->n && fault == NULL; i++) {
        const cf_step *step = &steps->steps[i];
        const int64_t own = tensor_of(s, &step->action, step->action.stage);
        all->now = i + 1;
        if ((fault = take_all(all, s, steps, step)) != NULL) return fault;
        RULE(step->action.pass <= CF_W || (step->slot == -1 && step->state == -1 && step->path == -1),
             "a transfer with a slot");
        RULE(has(all, ACTIVATIONS, step->slot, own), "activations of another chunk");
        RULE(has(all, OUTPUTS, step->outputs, own), "outputs of another chunk");
        RULE((step->outputs >= 0) == (is_dropped(s, &step->action) ||
                                      (step->action.pass == CF_R && s->shape.replay == CF_REPLAY_LOCAL)),
             "outputs where none are kept or taken");
        RULE(has(all, BOUNDARIES, step->input, tensor_of(s, &step->action, filler_of(s, step))), "an input of another");
        RULE(has(all, BOUNDARIES, step->output, own), "an output of another");
        fault = give_all(all, s, steps, step);
    }
    if (fault != NULL) return fault;
    RULE(all->live[0] + all->live[1] + all->live[2] + all->live[3] == 0, "a slot is in use at the end");
    RULE(all->n_paths == steps->n_paths, "a path never comes into use");
    return NULL;
}

const char *steps_slots_fault(const cf_schedule *schedule, const cf_steps *steps) {
    static slots all;
    return walk(&all, schedule, steps);
}

/* ---- paths ---- */

/* The passes that have run on a stage, by virtual stage and chunk, and the chains that have added to their gradient. */
typedef struct done {
    const cf_plan *plan;
    const cf_steps *steps;
    unsigned char *forward, *back, *added; /* (virtual stages x chunks) */
} done;

static int64_t chain_above(const cf_plan *plan, int64_t chain) {
    int64_t up = plan->chunks[plan->chains[chain].first_chunk].up;
    return up >= 0 ? plan->chunks[up].chain : -1;
}

/* Checks one of the states that a pass reads: its rows up to `end` of the path were computed. */
static const char *path_fault(done *d, const cf_step *step, int32_t at, int64_t end) {
    const cf_plan *plan = d->plan;
    const cf_path *path = &d->steps->paths[at];
    int64_t prefix = plan->chunks[step->action.chunk].prefix;
    const cf_chain *chain = &plan->chains[path->chain];
    int64_t base = step->action.stage * plan->n_chunks, i;
    int clears = path->clear == step->position, back = is_back(&step->action);
    RULE(path->first <= step->position && step->position <= path->last, "a path that is not in use");
    RULE(path->stage == step->action.stage, "a path on another virtual stage");
    RULE(path->rows == chain->tokens, "a path with other rows than its chain");
    RULE((prefix < path->begin + path->rows ? prefix : path->begin + path->rows) == end, "a path has a gap");
    RULE(chain_above(plan, path->chain) == (path->up >= 0 ? d->steps->paths[path->up].chain : -1),
         "a path leaves the tree");
    RULE(clears == (back && !d->added[base + path->chain]), "a gradient is cleared at the wrong time");
    if (back) d->added[base + path->chain] = 1;
    for (i = chain->first_chunk; i < chain->first_chunk + chain->n_chunks; i++)
        RULE(i == step->action.chunk || plan->chunks[i].prefix >= end || d->forward[base + i],
             "a row of the path was not computed");
    return NULL;
}

static const char *paths_fault(done *d, const cf_step *step) {
    const cf_chunk *chunk = &d->plan->chunks[step->action.chunk];
    const cf_action *a = &step->action;
    int64_t end = chunk->prefix, base = a->stage * d->plan->n_chunks, i;
    int clears = 0, own = 0;
    int32_t at;
    RULE(a->pass != CF_W || step->path < 0, "a W with a path");
    for (at = step->path; at >= 0; at = d->steps->paths[at].up) {
        const cf_path *path = &d->steps->paths[at];
        const char *fault = path_fault(d, step, at, end);
        if (fault != NULL) return fault;
        if (path->chain == chunk->chain) clears = path->clear == step->position, own = 1;
        RULE(step->state == (own ? d->steps->paths[step->path].state : -1), "the state slot of another chain");
        end = path->begin;
    }
    if (step->path < 0) RULE(step->state == -1, "a state slot without a path");
    RULE(step->clear_state_gradient == clears, "a chain's own gradient is another one's");
    RULE(a->pass == CF_W || chunk->chain < 0 || end == 0, "a path is too short");
    if (a->pass == CF_F) d->forward[base + a->chunk] = 1;
    if (!is_back(a)) return NULL;
    d->back[base + a->chunk] = 1;
    for (i = a->chunk + 1; i < d->plan->n_chunks; i++)
        RULE(d->plan->chunks[i].up != a->chunk || d->back[base + i], "a backward comes before one below it");
    return NULL;
}

static const char *all_paths_fault(const cf_plan *plan, const cf_schedule *s, const cf_steps *steps) {
    size_t cells = (size_t)(s->shape.n_stages * s->shape.n_virtual * plan->n_chunks) + 1;
    unsigned char *room = (unsigned char *)calloc(3, cells);
    done d = {plan, steps, room, room + cells, room + 2 * cells};
    const char *fault = NULL;
    int64_t i;
    if (room == NULL) abort();
    for (i = 0; i < steps->n && fault == NULL; i++)
        if (steps->steps[i].action.pass <= CF_W) fault = paths_fault(&d, &steps->steps[i]);
    free(room);
    return fault;
}

/* ---- members ---- */

/* Checks the counts that each step leaves: the next step's load, less what that step takes. */
static const char *left_fault(const cf_plan *plan, const cf_schedule *s, const cf_steps *steps,
                              const cf_memory_load *loads) {
    int64_t rows = s->shape.n_virtual, live = 0, i, j;
    for (i = 0; i < steps->n; i++) {
        const cf_step *step = &steps->steps[i], *next = step + 1;
        int64_t state = 0;
        live += step->action.keep;
        live -= step->action.pass == CF_B || step->action.pass == CF_W;
        RULE(step->live == live, "another count of chunks is left");
        for (j = 0; j < rows && i + 1 < steps->n; j++) state += loads[(i + 1) * rows + j].state_tokens;
        if (i + 1 < steps->n && next->action.pass == CF_F) state -= naive_state(plan, next->action.chunk);
        RULE(step->state_tokens == state, "another count of state is left");
    }
    return NULL;
}

/* Checks that the most tokens of dropped chunks waiting for a replay are those that byte limits count. */
static const char *dropped_fault(const cf_schedule *s, const cf_steps *steps, const cf_memory_load *loads) {
    int64_t rows = s->shape.n_virtual, most = 0, i, j;
    for (i = 0; i < steps->n; i++) {
        int64_t dropped = 0;
        for (j = 0; j < rows; j++) dropped += loads[i * rows + j].input_tokens;
        if (dropped > most) most = dropped;
    }
    RULE(steps->peak_dropped_tokens == most, "another peak of dropped chunks");
    return NULL;
}

/* Checks flags. Each chunk with tokens has one forward that computes the loss: on the last virtual stage, the one that
   keeps, or its only one. The last backward of each virtual stage is marked. */
static const char *flags_fault(const cf_plan *plan, const cf_schedule *s, const cf_steps *steps, uint64_t seed) {
    int64_t last = s->shape.n_stages * s->shape.n_virtual - 1, i, j;
    for (i = 0; i < steps->n; i++) {
        const cf_step *step = &steps->steps[i];
        const cf_action *a = &step->action;
        int ends = a->pass == CF_B || a->pass == CF_W, is_last = ends;
        int loss = a->stage == last && plan->chunks[a->chunk].tokens > 0 &&
                   (s->shape.forward_only ? a->pass == CF_F : a->keep);
        RULE(step->position == i && memcmp(a, &s->actions[s->first[steps->stage] + i], sizeof *a) == 0,
             "a step of another action");
        RULE(step->seed == cf_chunk_seed(seed, a->chunk, a->stage), "another seed");
        RULE(step->wants_loss == loss, "a loss that is taken twice or nowhere");
        for (j = i + 1; j < steps->n && is_last; j++)
            is_last &= steps->steps[j].action.stage != a->stage ||
                       (steps->steps[j].action.pass != CF_B && steps->steps[j].action.pass != CF_W);
        RULE(step->last_backward == is_last, "the last backward is another one");
        RULE(steps->transfers || (step->input == -1 && step->output == -1 && step->peer == -1),
             "a boundary although nothing crosses");
    }
    return NULL;
}

static const char *stage_fault(const cf_plan *plan, const cf_schedule *s, const cf_steps *steps, uint64_t seed) {
    static slots all;
    const cf_held_bytes none = {0, 0, 0, 0};
    naive_peaks peaks = naive_peaks_of(plan, s, steps->stage, &none);
    cf_memory_load *loads;
    const char *fault;
    RULE(steps->n == s->first[steps->stage + 1] - s->first[steps->stage], "another count of steps");
    RULE(steps->transfers == (s->lowered && s->shape.n_stages > 1), "tensors cross, and it says that they do not");
    if ((fault = flags_fault(plan, s, steps, seed)) != NULL) return fault;
    if ((fault = walk(&all, s, steps)) != NULL) return fault;
    RULE(steps->n_slots == all.peak[ACTIVATIONS] && steps->n_slots == peaks.chunks, "another count of slots");
    RULE(steps->n_states == all.peak[STATES], "another count of states");
    RULE(steps->n_boundaries == all.peak[BOUNDARIES], "another count of boundaries");
    RULE(steps->n_outputs == all.peak[OUTPUTS], "another count of outputs");
    RULE(steps->peak_tokens == peaks.tokens && steps->peak_state_tokens == peaks.state, "another peak");
    if ((fault = all_paths_fault(plan, s, steps)) != NULL) return fault;
    loads = (cf_memory_load *)calloc((size_t)(steps->n * s->shape.n_virtual) + 1, sizeof *loads);
    if (loads == NULL) abort();
    naive_loads(plan, s, steps->stage, loads);
    fault = left_fault(plan, s, steps, loads);
    if (fault == NULL) fault = dropped_fault(s, steps, loads);
    free(loads);
    return fault;
}

/* ---- all stages together ---- */

typedef struct tensor {
    int64_t chunk, stage; /* the virtual stage that made it */
    int kind;             /* by F 0, R 1, backward 2; -1: nothing */
} tensor;

static int kind_of(int pass) {
    if (pass == CF_F || pass == CF_SEND_F || pass == CF_RECV_F) return 0;
    return pass == CF_R || pass == CF_SEND_R || pass == CF_RECV_R ? 1 : 2;
}

static int is_tensor(const tensor *t, int64_t chunk, int64_t stage, int kind) {
    return t->chunk == chunk && t->stage == stage && t->kind == kind;
}

/* Runs a pass: its input slot must have the right tensor, or be -1 if it reads none. */
static const char *play_pass(const cf_schedule *s, const cf_step *step, tensor *buffers) {
    const cf_action *a = &step->action;
    int64_t last = s->shape.n_stages * s->shape.n_virtual - 1;
    int forward = a->pass == CF_F || a->pass == CF_R, kind = kind_of(a->pass);
    int reads = s->shape.n_stages > 1 && ((forward && a->stage > 0) || (is_back(a) && a->stage < last));
    const tensor made = {a->chunk, a->stage, kind};
    if (a->pass == CF_R && s->shape.replay == CF_REPLAY_LOCAL) kind = 0; /* it reads the input of F again */
    RULE(reads == (step->input >= 0), "an input slot where there is none, or none where there is one");
    RULE(!reads || is_tensor(&buffers[step->input], a->chunk, forward ? a->stage - 1 : a->stage + 1, kind),
         "a wrong input");
    if (step->output >= 0) buffers[step->output] = made;
    RULE(step->peer == -1, "a pass with a peer");
    return NULL;
}

static const char *play(const cf_schedule *s, cf_steps *const *all) {
    static tensor buffers[MOST_STAGES][MOST_SLOTS];
    int64_t at[MOST_STAGES] = {0}, stage;
    int moved = 1;
    memset(buffers, 0xff, sizeof buffers);
    while (moved) {
        for (stage = 0, moved = 0; stage < s->shape.n_stages; stage++) {
            const cf_step *a, *b;
            const char *fault;
            if (at[stage] == all[stage]->n) continue;
            a = &all[stage]->steps[at[stage]];
            if (a->action.pass <= CF_W) {
                if ((fault = play_pass(s, a, buffers[stage])) != NULL) return fault;
                at[stage]++;
                moved = 1;
                continue;
            }
            if (a->action.pass == CF_RECV_F || a->action.pass == CF_RECV_R || a->action.pass == CF_RECV_B) continue;
            RULE(a->peer >= 0 && a->peer < s->shape.n_stages && a->peer != stage, "a send to no other stage");
            if (at[a->peer] == all[a->peer]->n) continue;
            b = &all[a->peer]->steps[at[a->peer]];
            if (b->action.pass != a->action.pass + 1 || b->action.chunk != a->action.chunk || b->peer != stage)
                continue;
            RULE(is_tensor(&buffers[stage][a->output], a->action.chunk, a->action.stage, kind_of(a->action.pass)),
                 "a send of another tensor");
            buffers[a->peer][b->input] = buffers[stage][a->output];
            buffers[stage][a->output].kind = -1;
            at[stage]++;
            at[a->peer]++;
            moved = 1;
        }
    }
    for (stage = 0; stage < s->shape.n_stages; stage++)
        RULE(at[stage] == all[stage]->n, "the stages wait for each other");
    return NULL;
}

const char *steps_fault(const cf_plan *plan, const cf_schedule *s, cf_steps *const *steps, uint64_t seed) {
    int64_t stage;
    for (stage = 0; stage < s->shape.n_stages; stage++) {
        const char *fault = stage_fault(plan, s, steps[stage], seed);
        if (fault != NULL) return fault;
    }
    return s->lowered ? play(s, steps) : NULL;
}
