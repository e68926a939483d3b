/* lockstep_mpi.c - data-parallel ranks whose every pass calls collectives, as under FSDP - MIT or public domain

       mpirun -n RANKS lockstep_mpi [plain]

   A layer of linear attention, y(t) = V (sum of tanh(W x) over all positions up to t), in float64. Each rank has a
   share of W and V. Every pass gathers them by an all-reduce that also compares the kind of pass, and only the last
   backward reduces gradients. Ranks in lockstep train, with the gradients of one process on whole sequences. With
   `plain`, each rank's schedule is made alone: ranks find that they are out of step (exit code 3), or hang until the
   alarm (4). */

#include "ranks_mpi.h"

enum { D = 4, N = 9, CHUNK = 8, PARAMETERS = 2 * D * D };

static const int64_t lengths[N] = {70, 5, 19, 3, 8, 8, 33, 2, 6};

/* Returns the larger of two relative errors: of gradients, against the largest wanted one, and of the loss. Infinite if
   anything is not finite. */
static double far_off(const double *got, const double *wanted, int n, double loss, double wanted_loss) {
    double worst = 0, most = 0, off = fabs(loss / wanted_loss - 1);
    int i;
    for (i = 0; i < n; i++) {
        if (!isfinite(got[i]) || !isfinite(wanted[i])) return HUGE_VAL;
        worst = fmax(worst, fabs(got[i] - wanted[i]));
        most = fmax(most, fabs(wanted[i]));
    }
    return isfinite(off) && most > 0 ? fmax(worst / most, off) : HUGE_VAL;
}

/* Returns a number without a generator, the same on every rank. */
static double number(int64_t a, int64_t b, int64_t c) {
    return sin(1.0 + 0.37 * (double)a + 1.3 * (double)b + 7.1 * (double)c);
}
static double input(int64_t sequence, int64_t at, int i) { return number(sequence, at, i); }
static double target(int64_t sequence, int64_t at, int i) { return number(at, sequence, i + 50); }

typedef struct trainer {
    int rank, n_ranks;
    const cf_plan *plan;
    double own[PARAMETERS];     /* 0 except for this rank's share */
    double whole[PARAMETERS];   /* while a pass runs */
    double gradients[PARAMETERS];
    double loss;
    double (*sums)[D];          /* (n_chunks) state: the sum of tanh(W x) over the chain, at the end of each chunk */
    double dsums[D];            /* state gradient of the chain whose backwards are running */
    unsigned char *kept;        /* (n_chunks) has activations */
    int64_t n_passes, n_reduced;
} trainer;

static const double *w_of(const double *p) { return p; }
static const double *v_of(const double *p) { return p + D * D; }

static void hidden(const double *p, int64_t sequence, int64_t at, double h[D]) {
    int i, j;
    for (i = 0; i < D; i++) {
        for (h[i] = 0, j = 0; j < D; j++) h[i] += w_of(p)[i * D + j] * input(sequence, at, j);
        h[i] = tanh(h[i]);
    }
}

/* Runs rows [begin, begin + length) of a sequence. sum: the sum of h before them, updated to include them. With
   gradients it also runs backwards; dsum: the gradient from the rows behind, updated for the rows before. */
static double run_slice(const double *p, int64_t sequence, int64_t begin, int64_t length, double sum[D],
                        double *gradients, double dsum[D]) {
    double loss = 0, before[D], h[D], dy[D];
    int64_t t;
    int i, j;
    memcpy(before, sum, sizeof before);
    for (t = 0; t < length; t++) {
        hidden(p, sequence, begin + t, h);
        for (i = 0; i < D; i++) sum[i] += h[i];
    }
    if (gradients == NULL) return 0;
    for (t = length - 1; t >= 0; t--) {
        double now[D];
        memcpy(now, before, sizeof now);
        for (j = 0; j <= t; j++) {
            hidden(p, sequence, begin + j, h);
            for (i = 0; i < D; i++) now[i] += h[i];
        }
        for (i = 0; i < D; i++) {
            for (dy[i] = -target(sequence, begin + t, i), j = 0; j < D; j++) dy[i] += v_of(p)[i * D + j] * now[j];
            loss += dy[i] * dy[i] / 2;
            for (j = 0; j < D; j++) gradients[D * D + i * D + j] += dy[i] * now[j];
            for (j = 0; j < D; j++) dsum[j] += v_of(p)[i * D + j] * dy[i];
        }
        for (i = 0; i < D; i++) /* h is row t's, with which the inner loop ended */
            for (j = 0; j < D; j++)
                gradients[i * D + j] += dsum[i] * (1 - h[i] * h[i]) * input(sequence, begin + t, j);
    }
    return loss;
}

/* Gathers the parameters of all ranks, for a pass of this kind. */
static void gather(trainer *t, int kind) {
    double mine[PARAMETERS + 2], sum[PARAMETERS + 2];
    memcpy(mine, t->own, sizeof t->own);
    mine[PARAMETERS] = kind;
    mine[PARAMETERS + 1] = kind * kind;
    MPI_Allreduce(mine, sum, PARAMETERS + 2, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    memcpy(t->whole, sum, sizeof t->whole);
    t->n_passes++;
    if (fabs(sum[PARAMETERS + 1] - kind * kind * t->n_ranks) + fabs(sum[PARAMETERS] - kind * t->n_ranks) < 0.5) return;
    fprintf(stderr, "rank %d: out of step at pass %d\n", t->rank, (int)t->n_passes);
    MPI_Abort(MPI_COMM_WORLD, 3);
}

/* Runs all slices of a chunk: first its chain's, which continues the state, then whole sequences. */
static void run_chunk(trainer *t, const cf_step *step, double *gradients) {
    const cf_chunk *chunk = &t->plan->chunks[step->action.chunk];
    int64_t id = step->action.chunk, i;
    double zero[D] = {0}, dzero[D] = {0};
    for (i = 0; i < chunk->n_slices; i++) {
        const cf_slice *s = &t->plan->slices[chunk->first_slice + i];
        int grouped = chunk->chain >= 0 && i == 0;
        double sum[D] = {0};
        if (grouped && chunk->index > 0) memcpy(sum, t->sums[id - 1], sizeof sum);
        memset(dzero, 0, sizeof dzero);
        memset(zero, 0, sizeof zero);
        t->loss += run_slice(t->whole, s->sequence, s->begin, s->length, grouped ? sum : zero, gradients,
                             grouped ? t->dsums : dzero);
        if (grouped) memcpy(t->sums[id], sum, sizeof sum);
    }
}

static void forward(trainer *t, const cf_step *step) {
    gather(t, 1);
    run_chunk(t, step, NULL);
    t->kept[step->action.chunk] = step->action.keep;
}

static void backward(trainer *t, const cf_step *step) {
    gather(t, 2);
    if (!t->kept[step->action.chunk]) MPI_Abort(MPI_COMM_WORLD, 3);
    if (step->clear_state_gradient) memset(t->dsums, 0, sizeof t->dsums);
    run_chunk(t, step, t->gradients);
    if (!step->last_backward) return;
    t->n_reduced++;
    MPI_Allreduce(MPI_IN_PLACE, t->gradients, PARAMETERS, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    MPI_Allreduce(MPI_IN_PLACE, &t->loss, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
}

/* Returns the largest difference from one process on whole sequences, relative to the largest gradient. */
static double train(trainer *t, int plain, int64_t k) {
    double parameters[PARAMETERS], wanted[PARAMETERS] = {0}, loss = 0, worst;
    cf_pack_desc pack = {0};
    cf_steps *steps = NULL;
    cf_plan *plan;
    cf_schedule *schedule;
    cf_error error;
    int64_t i;
    for (i = 0; i < PARAMETERS; i++) {
        parameters[i] = number(i, 3, 99) / 3;
        t->own[i] = i % t->n_ranks == t->rank ? parameters[i] : 0;
    }
    for (i = 0; i < N; i++) {
        double sum[D] = {0}, dsum[D] = {0};
        loss += run_slice(parameters, i, 0, lengths[i], sum, wanted, dsum);
    }
    pack.chunk_size = CHUNK;
    pack.n_ranks = t->n_ranks;
    pack.lockstep = !plain;
    need(cf_pack(lengths, N, &pack, &plan, &error), &error);
    schedule = schedule_of(plan, t->rank, k, plain, CF_SCHEDULE_PAPER);
    t->plan = plan;
    t->sums = calloc((size_t)plan->n_chunks + 1, sizeof *t->sums);
    t->kept = calloc((size_t)plan->n_chunks + 1, 1);
    need(cf_steps_make(plan, schedule, 0, 0, NULL, &steps, &error), &error);
    for (i = 0; i < steps->n; i++) {
        if (steps->steps[i].action.pass == CF_B) backward(t, &steps->steps[i]);
        else forward(t, &steps->steps[i]);
    }
    worst = t->n_reduced == 1 ? far_off(t->gradients, wanted, PARAMETERS, t->loss, loss) : HUGE_VAL;
    cf_steps_free(steps);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
    free(t->sums);
    free(t->kept);
    return worst;
}

int main(int argc, char **argv) {
    int plain = argc > 1 && strcmp(argv[1], "plain") == 0, rank, n_ranks, failed = 0;
    const double one = 1, none = (double)NAN;
    int64_t k;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &n_ranks);
    signal(SIGALRM, give_up);
    alarm(plain ? 30 : 600);
    failed |= !(far_off(&none, &one, 1, 1, 1) > 1 && far_off(&one, &one, 1, none, 1) > 1);
    for (k = 1; k <= 2; k++) {
        trainer t = {0};
        double worst;
        t.rank = rank;
        t.n_ranks = n_ranks;
        worst = train(&t, plain, k);
        failed |= !(worst <= 1e-10);
        if (rank == 0)
            printf("%d ranks, K %d: gradients off by %.1e, %d passes\n", n_ranks, (int)k, worst, (int)t.n_passes);
    }
    MPI_Finalize();
    return failed;
}
