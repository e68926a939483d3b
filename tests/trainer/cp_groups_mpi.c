/* cp_groups_mpi.c - data-parallel ranks that share long sequences: keys and values of mates, gradients back - MIT or
   public domain

       mpirun -n RANKS cp_groups_mpi [ring | selfish | stages]

   Two layers of attention with one head in float64, o = P V with P = softmax(Q K^T) row by row, each on top of the last
   one's output, and a loss of every row against a target. A rank computes the rows of its own slices. In each layer of
   each pass the ranks of a round exchange K and V: those of the rows before, wherever they lie, come by one gather of
   all, or with `ring` from neighbour to neighbour; in a backward dK and dV of rows of others go back to their owners.
   Gradients and loss are those of one process on whole sequences, for K = 1 and 2, with lists of columns by `paper` and
   by `best`. All ranks meet in every pass, which must be of one kind, or they abort (exit code 3). With `selfish`
   gradients are not sent back: they must not agree (exit code 1).
   With `stages` every two processes are a pipeline of a layer each, and half as many the ranks. */

#include "ranks_mpi.h"

enum { D = 4, LAYERS = 2, N = 9, CHUNK = 8, PARAMETERS = LAYERS * 3 * D * D, LONGEST = 200, GATHERED = 4096 };

static const int64_t lists[N] = {151, 5, 19, 3, 8, 8, 70, 2, 6};

/* A row of K and V, or of their gradients. */
typedef struct row {
    double k[D], v[D];
} row;

/* One layer of a sequence, by position: what a pass needs of it. */
typedef struct layer {
    row rows[LONGEST], gradients[LONGEST];
} layer;

typedef struct trainer {
    int rank, n_ranks, ring, selfish;
    int stage, n_stages; /* of a stage's processes those of all ranks stand behind each other */
    const cf_plan *plan;
    double parameters[PARAMETERS], gradients[PARAMETERS], loss;
    MPI_Comm comms[16]; /* of blocks of 2^i ranks */
    MPI_Comm all;       /* all ranks of this stage */
    layer *states;      /* (n_chunks x LAYERS) rows of each chunk, and gradients that others have added */
    unsigned char *kept; /* (n_chunks) */
    double (*between)[2][CHUNK][D]; /* (n_chunks) activations between the stages, and their gradients */
    int64_t n_exchanged;
} trainer;

static const double *matrix(const double *p, int l, int which) { return p + (l * 3 + which) * D * D; }

static void times(const double *m, const double x[D], double y[D]) {
    int i, j;
    for (i = 0; i < D; i++)
        for (y[i] = 0, j = 0; j < D; j++) y[i] += m[i * D + j] * x[j];
}

/* dx += m^T dy, dm += dy x^T. */
static void times_back(const double *m, const double x[D], const double dy[D], double dx[D], double *dm) {
    int i, j;
    for (i = 0; i < D; i++)
        for (j = 0; j < D; j++) {
            dx[j] += m[i * D + j] * dy[i];
            dm[i * D + j] += dy[i] * x[j];
        }
}

/* ---- the exchange ---- */

/* Ranks of a chunk's cp group; 0: it is in none. */
static int64_t cp_of(const trainer *t, int64_t chunk) {
    int64_t chain = t->plan->chunks[chunk].chain;
    return chain >= 0 ? t->plan->chains[chain].cp : 0;
}

static MPI_Comm block_of(const trainer *t, int64_t cp) {
    int i = 0;
    while (((int64_t)1 << i) < cp) i++;
    return t->comms[i];
}

static layer *state_of(const trainer *t, int64_t chunk, int l) { return &t->states[chunk * LAYERS + l]; }

/* The pieces before a chunk, in rows of their chunks: of its own chain, where no cp group shares it. */
static int64_t kv_sources_of(const trainer *t, int64_t chunk, cf_kv_source *pieces) {
    const cf_chunk *c = &t->plan->chunks[chunk];
    int64_t n = cf_kv_sources(t->plan, chunk, pieces), i;
    for (i = 0; i < n; i++) pieces[i].row -= t->plan->chunks[pieces[i].chunk].prefix;
    for (i = chunk - c->index; c->chain >= 0 && cp_of(t, chunk) == 0 && i < chunk; i++) {
        const cf_kv_source own = {c->rank, i, 0, t->plan->chunks[i].prefix, t->plan->chunks[i].state};
        pieces[n++] = own;
    }
    return n;
}

static void add_rows(row *to, const row *from, int64_t n) {
    int64_t i;
    int d;
    for (i = 0; i < n; i++)
        for (d = 0; d < D; d++) to[i].k[d] += from[i].k[d], to[i].v[d] += from[i].v[d];
}

/* Adds up rows over the ranks of the cp group. Of K and V each rank has its own, and zeros elsewhere, so the sum is a
   gather; of gradients each has a part of all. With `ring`, what a rank has goes round from neighbour to neighbour. */
static void exchange(trainer *t, int64_t chunk, row *rows, int64_t n) {
    int cp = (int)cp_of(t, chunk), me = t->rank % cp, step;
    MPI_Comm comm = block_of(t, cp);
    static row passing[GATHERED];
    t->n_exchanged++;
    if (!t->ring) {
        MPI_Allreduce(MPI_IN_PLACE, rows, (int)n * 2 * D, MPI_DOUBLE, MPI_SUM, comm);
        return;
    }
    memcpy(passing, rows, (size_t)n * sizeof *rows);
    for (step = 1; step < cp; step++) {
        MPI_Sendrecv_replace(passing, (int)n * 2 * D, MPI_DOUBLE, (me + 1) % cp, 0, (me + cp - 1) % cp, 0, comm,
                             MPI_STATUS_IGNORE);
        add_rows(rows, passing, n);
    }
}

/* The first chunk of a sequence on the rank of a chunk. */
static int64_t root_of(const trainer *t, int64_t chunk) { return chunk - t->plan->chunks[chunk].index; }

/* Returns the place of a chunk's rows among those that a cp group exchanges: all of its chunks so far, round by
   round. */
static int64_t place(const trainer *t, int64_t chunk) {
    int64_t step = (chunk - root_of(t, chunk)) % t->plan->chunks_per_rank, cp = cp_of(t, chunk);
    return (step * cp + t->plan->chunks[chunk].rank % cp) * CHUNK;
}

/* The rows of a chunk's path; or, back, their gradients on the way to those who have them. */
static void gather(trainer *t, int64_t chunk, int l, row *path, int back) {
    static cf_kv_source pieces[LONGEST];
    static row all[GATHERED];
    int64_t cp = cp_of(t, chunk), n = kv_sources_of(t, chunk, pieces), end, i, first;
    end = cp > 0 ? place(t, chunk) / (cp * CHUNK) * cp * CHUNK + cp * CHUNK : 0;
    if (end > GATHERED || n > LONGEST) MPI_Abort(MPI_COMM_WORLD, 5);
    memset(all, 0, sizeof all);
    first = cp > 0 ? root_of(t, chunk) : chunk + 1;
    for (i = first; i <= chunk && !back; i++) memcpy(&all[place(t, i)], state_of(t, i, l)->rows, CHUNK * sizeof *all);
    for (i = 0; i < n && back; i++) {
        row *to = cp > 0 ? &all[place(t, pieces[i].chunk)] : state_of(t, pieces[i].chunk, l)->gradients;
        if (t->selfish && pieces[i].rank != t->rank) continue;
        add_rows(to + pieces[i].row, path + pieces[i].begin, pieces[i].tokens);
    }
    if (cp > 0 && !(back && t->selfish)) exchange(t, chunk, all, end);
    for (i = 0; i < n && !back; i++) {
        const row *from = cp > 0 ? &all[place(t, pieces[i].chunk)] : state_of(t, pieces[i].chunk, l)->rows;
        memcpy(path + pieces[i].begin, from + pieces[i].row, (size_t)pieces[i].tokens * sizeof *path);
    }
    for (i = first; i <= chunk && back; i++) add_rows(state_of(t, i, l)->gradients, &all[place(t, i)], CHUNK);
}

/* ---- the rows of a chunk ---- */

/* A chunk, or a sequence that is computed alone, while a pass runs: what each layer takes, and the path. */
typedef struct work {
    int64_t chunk;        /* -1: a sequence */
    const cf_slice *slices;
    int64_t n;            /* slices */
    layer *own;           /* (LAYERS) */
    double x[LAYERS + 1][LONGEST][D];
    row path[LAYERS][LONGEST], dpath[LONGEST];
    double dx[LONGEST][D]; /* gradient of x[l + 1] while layer l runs backward */
} work;

/* Lists what a row of a slice sees: what lies before the slice, and its own rows up to this one. */
static int64_t see(work *w, int l, int64_t slice, int64_t end, const row **keys, row **dkeys) {
    const cf_slice *s = &w->slices[slice];
    int64_t n = s->begin, i;
    for (i = 0; i < n; i++) keys[i] = &w->path[l][i], dkeys[i] = &w->dpath[i];
    for (i = s->offset; i < s->offset + end; i++) keys[n] = &w->own[l].rows[i], dkeys[n++] = &w->own[l].gradients[i];
    return n;
}

/* Weights of n keys for a query. */
static void weigh(const row *const *keys, int64_t n, const double q[D], double *p) {
    double sum = 0;
    int64_t j;
    int i;
    for (j = 0; j < n; j++) {
        double s = 0;
        for (i = 0; i < D; i++) s += q[i] * keys[j]->k[i];
        sum += p[j] = exp(s);
    }
    for (j = 0; j < n; j++) p[j] /= sum;
}

static int64_t rows_of(const work *w) { return w->slices[w->n - 1].offset + w->slices[w->n - 1].length; }

static void forward_layer(trainer *t, work *w, int l) {
    const row *keys[LONGEST];
    row *dkeys[LONGEST];
    int64_t i, j, slice, n;
    double q[D], p[LONGEST];
    int d;
    for (i = 0; i < rows_of(w); i++) {
        times(matrix(t->parameters, l, 1), w->x[l][i], w->own[l].rows[i].k);
        times(matrix(t->parameters, l, 2), w->x[l][i], w->own[l].rows[i].v);
    }
    if (w->chunk >= 0) gather(t, w->chunk, l, w->path[l], 0);
    for (slice = 0; slice < w->n; slice++)
        for (i = w->slices[slice].offset; i < w->slices[slice].offset + w->slices[slice].length; i++) {
            n = see(w, l, slice, i + 1 - w->slices[slice].offset, keys, dkeys);
            times(matrix(t->parameters, l, 0), w->x[l][i], q);
            weigh(keys, n, q, p);
            for (d = 0; d < D; d++)
                for (w->x[l + 1][i][d] = w->x[l][i][d], j = 0; j < n; j++) w->x[l + 1][i][d] += p[j] * keys[j]->v[d];
        }
}

/* Attention of row i backward: adds to the gradients of all keys that it sees, and of its query. */
static void backward_row(const trainer *t, work *w, int l, int64_t slice, int64_t i, double dq[D]) {
    const row *keys[LONGEST];
    row *dkeys[LONGEST];
    int64_t n = see(w, l, slice, i + 1 - w->slices[slice].offset, keys, dkeys), j;
    double q[D], p[LONGEST], dp[LONGEST], mean = 0;
    int d;
    times(matrix(t->parameters, l, 0), w->x[l][i], q);
    weigh(keys, n, q, p);
    for (j = 0; j < n; j++) {
        for (dp[j] = 0, d = 0; d < D; d++) {
            dp[j] += w->dx[i][d] * keys[j]->v[d];
            dkeys[j]->v[d] += p[j] * w->dx[i][d];
        }
        mean += p[j] * dp[j];
    }
    for (j = 0; j < n; j++)
        for (d = 0; d < D; d++) {
            dq[d] += p[j] * (dp[j] - mean) * keys[j]->k[d];
            dkeys[j]->k[d] += p[j] * (dp[j] - mean) * q[d];
        }
}

static void backward_layer(trainer *t, work *w, int l) {
    double down[LONGEST][D];
    int64_t i, slice;
    double *dm = t->gradients + l * 3 * D * D;
    memset(w->dpath, 0, sizeof w->dpath);
    memcpy(down, w->dx, sizeof down);
    for (slice = 0; slice < w->n; slice++)
        for (i = w->slices[slice].offset; i < w->slices[slice].offset + w->slices[slice].length; i++) {
            double dq[D] = {0};
            backward_row(t, w, l, slice, i, dq);
            times_back(matrix(t->parameters, l, 0), w->x[l][i], dq, down[i], dm);
        }
    if (w->chunk >= 0) gather(t, w->chunk, l, w->dpath, 1);
    for (i = 0; i < rows_of(w); i++) {
        const row *g = &w->own[l].gradients[i];
        times_back(matrix(t->parameters, l, 1), w->x[l][i], g->k, down[i], dm + D * D);
        times_back(matrix(t->parameters, l, 2), w->x[l][i], g->v, down[i], dm + 2 * D * D);
    }
    memcpy(w->dx, down, sizeof down);
}

/* Computes losses: a row should become its target. */
static void losses(trainer *t, work *w, int back) {
    int64_t i, slice;
    int d;
    for (slice = 0; slice < w->n; slice++)
        for (i = 0; i < w->slices[slice].length; i++) {
            const int64_t at = w->slices[slice].begin + i, from = w->slices[slice].sequence;
            const int64_t to = w->slices[slice].offset + i;
            double off;
            for (d = 0; d < D && !back; d++) w->x[0][to][d] = input(from, at, d);
            for (d = 0; d < D && back; d++) {
                off = w->x[LAYERS][to][d] - target(from, at, d);
                w->dx[to][d] = off;
                t->loss += off * off / 2;
            }
        }
}

/* Forward, and with `back` also backward, with the gradients that its rows have in the states by then. at: its rows
   between the stages, and their gradients. */
static void run_rows(trainer *t, work *w, int back, double (*const at)[CHUNK][D]) {
    int first = t->stage * LAYERS / t->n_stages, end = (t->stage + 1) * LAYERS / t->n_stages, l;
    losses(t, w, 0);
    if (t->stage > 0) memcpy(w->x[first], at[0], sizeof at[0]);
    for (l = first; l < end; l++) forward_layer(t, w, l);
    if (end < LAYERS) memcpy(at[0], w->x[end], sizeof at[0]);
    if (!back) return;
    if (end == LAYERS) losses(t, w, 1);
    else memcpy(w->dx, at[1], sizeof at[1]);
    for (l = end - 1; l >= first; l--) backward_layer(t, w, l);
    if (t->stage > 0) memcpy(at[1], w->dx, sizeof at[1]);
}

/* ---- passes ---- */

/* All ranks run a pass of this kind. */
static void meet(const trainer *t, int kind) {
    int kinds[2] = {kind, -kind};
    MPI_Allreduce(MPI_IN_PLACE, kinds, 2, MPI_INT, MPI_MAX, t->all);
    if (kinds[0] != -kinds[1]) MPI_Abort(MPI_COMM_WORLD, 3);
}

static void run_chunk(trainer *t, const cf_step *step, int back) {
    const cf_chunk *chunk = &t->plan->chunks[step->action.chunk];
    static work w;
    w.chunk = step->action.chunk;
    w.n = chunk->n_slices;
    w.slices = &t->plan->slices[chunk->first_slice];
    w.own = state_of(t, w.chunk, 0);
    if (w.n > 0) run_rows(t, &w, back, t->between[w.chunk]);
}

/* Between the stages go activations, or their gradients. */
static void transfer(trainer *t, const cf_step *step) {
    int pass = step->action.pass, way = pass == CF_SEND_B || pass == CF_RECV_B;
    int peer = step->peer * t->n_ranks + t->rank;
    double(*rows)[D] = t->between[step->action.chunk][way];
    if (pass == CF_SEND_F || pass == CF_SEND_B) MPI_Send(rows, CHUNK * D, MPI_DOUBLE, peer, way, MPI_COMM_WORLD);
    else MPI_Recv(rows, CHUNK * D, MPI_DOUBLE, peer, way, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

static void run_step(trainer *t, const cf_step *step) {
    int back = step->action.pass == CF_B;
    if (step->action.pass > CF_W) {
        transfer(t, step);
        return;
    }
    if (back && !t->kept[step->action.chunk]) MPI_Abort(MPI_COMM_WORLD, 3);
    meet(t, back);
    run_chunk(t, step, back);
    if (!back) t->kept[step->action.chunk] = step->action.keep;
}

/* Returns the largest difference from one process on whole sequences, against the largest gradient. */
static double train(trainer *t, int64_t k, cf_schedule_kind kind, int64_t *widest) {
    static trainer alone;
    static layer states[LAYERS];
    static work w;
    cf_pack_desc pack = {0};
    cf_steps *steps = NULL;
    cf_plan *plan = NULL;
    cf_schedule *schedule;
    cf_error error;
    int64_t i;
    memset(&alone, 0, sizeof alone);
    alone.n_stages = 1;
    for (i = 0; i < PARAMETERS; i++) t->parameters[i] = alone.parameters[i] = number(i, 3, 99) / 3;
    for (i = 0; i < N; i++) {
        const cf_slice whole = {.sequence = (int32_t)i, .length = (int32_t)lists[i]};
        memset(states, 0, sizeof states);
        memset(&w, 0, sizeof w);
        w.chunk = -1;
        w.slices = &whole;
        w.n = 1;
        w.own = states;
        run_rows(&alone, &w, 1, NULL);
    }
    pack.chunk_size = CHUNK;
    pack.n_ranks = pack.max_cp = t->n_ranks;
    need(cf_pack(lists, N, &pack, &plan, &error), &error);
    schedule = schedule_of(plan, t->rank, t->n_stages, k, 0, kind);
    for (*widest = i = 0; i < plan->n_chains; i++)
        if (plan->chains[i].cp > *widest) *widest = plan->chains[i].cp;
    t->plan = plan;
    t->states = (layer *)calloc((size_t)(plan->n_chunks * LAYERS) + 1, sizeof *t->states);
    t->kept = (unsigned char *)calloc((size_t)plan->n_chunks + 1, 1);
    t->between = (double (*)[2][CHUNK][D])calloc((size_t)plan->n_chunks + 1, sizeof *t->between);
    need(cf_steps_make(plan, schedule, t->stage, 0, NULL, &steps, &error), &error);
    for (i = 0; i < steps->n; i++) run_step(t, &steps->steps[i]);
    MPI_Allreduce(MPI_IN_PLACE, t->gradients, PARAMETERS, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    MPI_Allreduce(MPI_IN_PLACE, &t->loss, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    cf_steps_free(steps);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
    free(t->states);
    free(t->kept);
    free(t->between);
    return far_off(t->gradients, alone.gradients, PARAMETERS, t->loss, alone.loss);
}

int main(int argc, char **argv) {
    static trainer t;
    int rank, n_ranks, n_stages, failed = 0, turn, i;
    MPI_Comm comms[16], stage;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &n_ranks);
    n_stages = argc > 1 && strcmp(argv[1], "stages") == 0 ? 2 : 1;
    n_ranks /= n_stages;
    signal(SIGALRM, give_up);
    alarm(600);
    for (i = 0; i < 16 && 1 << i <= n_ranks; i++) MPI_Comm_split(MPI_COMM_WORLD, rank >> i, rank, &comms[i]);
    MPI_Comm_split(MPI_COMM_WORLD, rank / n_ranks, rank, &stage);
    for (turn = 0; turn < 4; turn++) {
        const cf_schedule_kind kind = turn < 2 ? CF_SCHEDULE_PAPER : CF_SCHEDULE_BEST;
        int64_t widest;
        double worst;
        memset(&t, 0, sizeof t);
        t.rank = rank % n_ranks;
        t.stage = rank / n_ranks;
        t.n_stages = n_stages;
        t.n_ranks = n_ranks;
        t.ring = argc > 1 && strcmp(argv[1], "ring") == 0;
        t.selfish = argc > 1 && strcmp(argv[1], "selfish") == 0;
        t.all = stage;
        memcpy(t.comms, comms, sizeof comms);
        worst = train(&t, 1 + turn % 2, kind, &widest);
        failed |= !(worst <= 1e-10) || widest != (n_ranks > 1 ? n_ranks : 0);
        if (rank == 0)
            printf("%d ranks of %d stages, cp groups of up to %d, K %d, %s: gradients off by %.1e, %d exchanges\n",
                   n_ranks,
                   n_stages, (int)widest, 1 + turn % 2, cf_schedule_kind_name(kind), worst, (int)t.n_exchanged);
    }
    MPI_Finalize();
    return failed;
}
