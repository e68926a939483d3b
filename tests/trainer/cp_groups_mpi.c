/* cp_groups_mpi.c - data-parallel ranks that share long sequences, with layers of every kind - MIT or public domain

       mpirun -n RANKS cp_groups_mpi [ring | faults]

   The model of examples/ in float64, run by the passes of a stage (pipeline.h). The ranks of a cp group add up what
   their layers exchange, by one sum over all or, with `ring`, from neighbour to neighbour: rows of attention and their
   gradients; for recurrences, the effects of shares on states, tails of convolutions, and gradients of both.

   Gradients and loss must equal those of whole sequences in one process, for K = 1 and 2, with lists of columns by
   `paper` and by `best`. All ranks meet in every pass, which must be of one kind, or they abort (exit code 3).

   With `faults` one rank does not receive one kind of message, and the test must notice each. Groups of pipelines are
   those of pipeline_mpi. */

#define TRAIN_FLOAT64
#include "ranks_mpi.h"

#include "../../examples/check.h"
#include "../../examples/pipeline.h"

enum { N = 9, FAULTS = CP_TAIL_GRADIENTS + 1 };

typedef struct problem {
    const char *kinds;
    int64_t lengths[N], chunk_size, align, k;
    cf_schedule_kind kind;
    int outputs;
} problem;

#define SHORT_ONES 5, 19, 3, 8, 8
static const problem turns[] = {
    {"full,delta", {151, SHORT_ONES, 70, 2, 6}, 8, 1, 1, CF_SCHEDULE_PAPER, 0},
    {"kda,window+sinks", {151, SHORT_ONES, 70, 2, 6}, 8, 4, 2, CF_SCHEDULE_PAPER, 0},
    {"mamba,latent", {41, SHORT_ONES, 9, 2, 6}, 4, 1, 1, CF_SCHEDULE_BEST, 1},
    {"chunked+gate,delta+experts", {151, SHORT_ONES, 70, 2, 6}, 8, 1, 2, CF_SCHEDULE_BEST, 0},
    {"delta", {11, SHORT_ONES, 10, 2, 9}, 4, 1, 2, CF_SCHEDULE_PAPER, 0},
    {"mamba,kda,delta", {151, SHORT_ONES, 70, 2, 6}, 8, 4, 1, CF_SCHEDULE_BEST, 0},
};
enum { TURNS = sizeof turns / sizeof turns[0] };

typedef struct trainer {
    int rank, n_ranks;
    int ring, fault;                    /* fault: the message that rank 1 does not get; -1: none */
    MPI_Comm comms[16];                 /* of blocks of 2^i ranks */
    const problem *turn;
    model_config config;
    documents documents;
    batch batch;
    cf_plan *plan;
    int64_t n_sums;
} trainer;

/* Counts of the exchanges in each direction. */
static struct {
    int64_t widest, rounds, of_one, short_ones, unequal, followed, padded, replays;
} seen;

/* ---- the exchange ---- */

static void add_round_the_ring(MPI_Comm comm, real *numbers, int64_t count) {
    real *passing = TAKE(real, count);
    int size, me, step;
    MPI_Comm_size(comm, &size);
    MPI_Comm_rank(comm, &me);
    memcpy(passing, numbers, (size_t)count * sizeof(real));
    for (step = 1; step < size; step++) {
        MPI_Sendrecv_replace(passing, (int)count, MPI_DOUBLE, (me + 1) % size, 0, (me + size - 1) % size, 0, comm,
                             MPI_STATUS_IGNORE);
        for (int64_t i = 0; i < count; i++) numbers[i] += passing[i];
    }
    free(passing);
}

static void add_up(void *context, cp_message message, int64_t size, real *numbers, int64_t count) {
    trainer *t = (trainer *)context;
    const int misses = (int)message == t->fault && t->rank == 1;
    real *own = TAKE(real, count);
    int i = 0;
    while (((int64_t)1 << i) < size) i++;
    memcpy(own, numbers, (size_t)count * sizeof(real));
    if (t->ring) add_round_the_ring(t->comms[i], numbers, count);
    else MPI_Allreduce(MPI_IN_PLACE, numbers, (int)count, MPI_DOUBLE, MPI_SUM, t->comms[i]);
    if (misses) memcpy(numbers, own, (size_t)count * sizeof(real));
    free(own);
    t->n_sums++;
}

/* ---- passes ---- */

/* Checks that all ranks run a pass of this kind. */
static void meet(int kind) {
    int kinds[2] = {kind, -kind};
    MPI_Allreduce(MPI_IN_PLACE, kinds, 2, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    if (kinds[0] != -kinds[1]) MPI_Abort(MPI_COMM_WORLD, 3);
}

/* Returns 1 unless everything that groups do not support is refused by name. */
static int accepts_too_much(const trainer *t) {
    model_config config = t->config;
    cf_error error;
    int failed = check_groups(t->plan, &config, 1, &error) != CF_ERROR_ARGUMENT || !strstr(error.text, "max_cp[0]");
    failed |= check_groups(t->plan, &config, 0, &error) != CF_OK;
    config.kinds.balance = 0.1;
    if (parse_pattern(&config.kinds, "delta+experts") != NULL) MPI_Abort(MPI_COMM_WORLD, 5);
    failed |= check_groups(t->plan, &config, 0, &error) != CF_ERROR_ARGUMENT || !strstr(error.text, "balance");
    if (failed) fprintf(stderr, "cp groups: accepted, or refused without a name\n");
    return failed;
}

/* Runs this rank's share of the batch. */
static double run_stage(trainer *t, const weights *w, weights *gradient) {
    cf_schedule *schedule = schedule_of(t->plan, t->rank, t->turn->k, 0, t->turn->kind);
    cf_steps *steps = NULL;
    stage_runner r;
    cf_error error;
    need(cf_steps_make(t->plan, schedule, 0, 0, NULL, &steps, &error), &error);
    need(stage_runner_begin(&r, &t->config, t->plan, schedule, steps, &t->batch, 0, t->turn->outputs, &error), &error);
    r.weights = w;
    r.gradient = gradient;
    r.group.add_up = add_up;
    r.group.context = t;
    for (int64_t i = 0; i < steps->n; i++) {
        const cf_step *step = &steps->steps[i];
        meet(step->action.pass == CF_B);
        seen.replays += step->action.pass == CF_R;
        stage_begin_step(&r, step);
        need(stage_pass(&r, step, &error), &error);
        stage_end_step(&r, step);
    }
    const double loss = r.loss;
    stage_runner_end(&r);
    cf_steps_free(steps);
    cf_schedule_free(schedule);
    return loss;
}

/* ---- turns ---- */

static void look_at_parts(const cf_plan *plan) {
    for (int64_t i = 0; i < plan->n_chunks; i++) {
        const cf_chunk *c = &plan->chunks[i];
        if (c->cp == 0) continue;
        const int32_t rows = plan->slices[c->first_slice].length;
        seen.widest = max_of(seen.widest, c->cp);
        seen.rounds = max_of(seen.rounds, c->index + 1);
        seen.of_one += rows == 1;
        seen.short_ones += rows < CONV - 1;
        if (c->rank % c->cp > 0) {
            const int64_t neighbour = plan->chunks[i - plan->chunks_per_rank].first_slice;
            seen.unequal += plan->slices[neighbour].length != rows;
        }
        seen.followed += c->n_slices > 1;
        seen.padded += c->rows > c->tokens;
    }
}

static model_config config_of(const char *kinds) {
    model_config c = {VOCABULARY, 4, 8, 2, 1, 10, 0, 0, 1e4, 1e-6, 11, {0}};
    c.kinds.experts = 3;
    c.kinds.active = 2;
    c.kinds.mtp = 0.3;
    if (parse_pattern(&c.kinds, kinds) || model_config_fault(&c)) MPI_Abort(MPI_COMM_WORLD, 5);
    return c;
}

/* Returns the largest difference from whole sequences in one process. */
static double train(trainer *t) {
    cf_pack_desc pack = {0};
    cf_error error;
    memory_meter meter = {{0}, {0}};
    t->config = config_of(t->turn->kinds);
    t->batch = batch_new(N);
    for (int64_t i = 0; i < N; i++) add_synthetic(&t->documents, t->turn->lengths[i], 5);
    for (int64_t i = 0; i < N; i++) batch_put(&t->batch, i, &t->documents, i, 0, 0);
    pack.chunk_size = t->turn->chunk_size;
    pack.align = t->turn->align;
    pack.n_ranks = pack.max_cp = t->n_ranks;
    need(cf_pack(t->batch.length, N, &pack, &t->plan, &error), &error);
    look_at_parts(t->plan);
    if (t->plan->n_chains > 0 && t->plan->chains[0].cp > 0 && accepts_too_much(t)) MPI_Abort(MPI_COMM_WORLD, 5);
    weights w = weights_new(&t->config), got = weights_new(&t->config), wanted = weights_new(&t->config);
    weights_init(&w, &t->config, 11, 0.1);
    double loss = run_stage(t, &w, &got);
    MPI_Allreduce(MPI_IN_PLACE, got.flat, (int)got.count, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    MPI_Allreduce(MPI_IN_PLACE, &loss, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    const double wanted_loss = unchunked_gradients(&t->config, &w, &wanted, &t->batch, 0, &meter);
    double worst = relative_difference_of_losses(loss, wanted_loss);
    for (int64_t i = 0; i < w.n_tensors; i++) {
        const tensor *of = &w.tensors[i];
        worst = fmax(worst, relative_difference(got.flat + of->offset, wanted.flat + of->offset, of->count));
    }
    weights_free(&w);
    weights_free(&got);
    weights_free(&wanted);
    batch_free(&t->batch);
    documents_free(&t->documents);
    cf_plan_free(t->plan);
    return worst;
}

/* Loses one message, so that gradients are far off. Returns whether that was missed. */
static int misses_fault(trainer *t, int fault) {
    static const char *const names[FAULTS] = {"rows", "row gradients", "tails", "states", "state gradients",
                                              "tail gradients"};
    t->fault = fault;
    const double worst = train(t);
    if (t->rank == 0) printf("rank 1 misses %s: gradients off by %.1e\n", names[fault], worst);
    return !(worst > 1e-6);
}

static int fails_turn(trainer *t) {
    const double worst = train(t);
    if (t->rank == 0) {
        printf("%d ranks, %s, chunks of %d, K %d, %s: gradients off by %.1e, %d sums\n", t->n_ranks,
               t->turn->kinds, (int)t->turn->chunk_size, (int)t->turn->k, cf_schedule_kind_name(t->turn->kind), worst,
               (int)t->n_sums);
    }
    return !is_rounding(worst);
}

int main(int argc, char **argv) {
    static trainer t;
    const char *how = argc > 1 ? argv[1] : "";
    const int faults = strcmp(how, "faults") == 0;
    int failed = 0;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &t.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &t.n_ranks);
    t.ring = strcmp(how, "ring") == 0;
    signal(SIGALRM, give_up);
    alarm(600);
    for (int i = 0; i < 16 && 1 << i <= t.n_ranks; i++)
        MPI_Comm_split(MPI_COMM_WORLD, t.rank >> i, t.rank, &t.comms[i]);
    for (int turn = 0; turn < (faults ? FAULTS : TURNS); turn++) {
        t.turn = &turns[faults ? 0 : turn];
        t.fault = -1;
        t.n_sums = 0;
        failed |= faults ? misses_fault(&t, turn) : fails_turn(&t);
    }
    if (t.rank == 0)
        printf("cp groups of up to %d, %d rounds; parts: %d of one row, %d of fewer than the convolution's tail, %d of "
               "another length than the one before, %d with others behind, %d padded; %d replays\n",
               (int)seen.widest, (int)seen.rounds, (int)seen.of_one, (int)seen.short_ones, (int)seen.unequal,
               (int)seen.followed, (int)seen.padded, (int)seen.replays);
    failed |= seen.widest != (t.n_ranks > 1 ? t.n_ranks : 0);
    failed |= t.n_ranks > 1 && !faults && !(seen.rounds > 1 && seen.of_one && seen.short_ones && seen.unequal &&
                                             seen.followed && seen.padded && seen.replays);
    MPI_Finalize();
    return failed;
}
