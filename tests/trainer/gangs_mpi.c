/* gangs_mpi.c - data-parallel ranks that share long sequences: keys and values of mates, gradients back - MIT or public
   domain

       mpirun -n RANKS gangs_mpi [ring | selfish | stages]

   Two layers of attention with one head in float64, o = P V with P = softmax(Q K^T) row by row, each on top of the last
   one's output, and a loss of every row against a target. A rank computes the rows of its own slices. In each layer of
   each pass the ranks of a round exchange K and V: those of the rows before, wherever they lie, come by one gather of
   all, or with `ring` from neighbour to neighbour; in a backward dK and dV of rows of others go back to their owners.
   Gradients and loss are those of one process on whole sequences, for K = 1 and 2, with schedules that each rank makes
   by itself, with those of columns, and where the plan is made for ranks in step: with columns all ranks also meet in
   every pass, which must be of one kind, or they abort (exit code 3). With `selfish` gradients are not sent back: they
   must not agree (exit code 1). With `stages` every two processes are a pipeline of a layer each, and half as many the
   ranks. */

#include "ranks_mpi.h"

enum { D = 4, LAYERS = 2, N = 9, CHUNK = 8, PARAMETERS = LAYERS * 3 * D * D, LONGEST = 200 };

static const int64_t lengths[N] = {151, 5, 19, 3, 8, 8, 70, 2, 6};

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
    MPI_Comm all;       /* all ranks of this stage; MPI_COMM_NULL: they do not meet */
    layer *states;      /* (n_groups x LAYERS) own rows of each group, and gradients that mates have sent */
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

/* Weights of keys 0 .. at for a query. */
static void weigh(const row *keys, int64_t at, const double q[D], double *p) {
    double sum = 0;
    int64_t j;
    int i;
    for (j = 0; j <= at; j++) {
        double s = 0;
        for (i = 0; i < D; i++) s += q[i] * keys[j].k[i];
        sum += p[j] = exp(s);
    }
    for (j = 0; j <= at; j++) p[j] /= sum;
}

/* ---- the exchange ---- */

/* Ranks of a chunk's gang; 0: it is in none. */
static int64_t gang_of(const trainer *t, int64_t chunk) {
    int64_t group = t->plan->chunks[chunk].group;
    return group >= 0 ? t->plan->groups[group].gang : 0;
}

static MPI_Comm block_of(const trainer *t, int64_t gang) {
    int i = 0;
    while (((int64_t)1 << i) < gang) i++;
    return t->comms[i];
}

/* The chunk of the same round that a part of the gang has. */
static int64_t mate(const trainer *t, int64_t chunk, int64_t part) {
    return chunk + (part - t->rank % gang_of(t, chunk)) * t->plan->n_steps;
}

/* All rows that the gang has up to this round: the pieces of the last rank's chunk, and what that adds. */
static int64_t pieces_of(const trainer *t, int64_t chunk, cf_piece *pieces) {
    int64_t last = mate(t, chunk, gang_of(t, chunk) - 1), n = cf_gang_pieces(t->plan, last, pieces);
    const cf_slice *s = &t->plan->slices[t->plan->chunks[last].first_slice];
    cf_piece own = {t->plan->chunks[last].rank, last, t->plan->chunks[last].prefix, s->begin, s->length};
    pieces[n] = own;
    return n + 1;
}

static void add_rows(row *to, const row *from, int64_t n) {
    int64_t i;
    int d;
    for (i = 0; i < n; i++)
        for (d = 0; d < D; d++) to[i].k[d] += from[i].k[d], to[i].v[d] += from[i].v[d];
}

/* Adds up rows over the ranks of the gang. Of K and V each rank has its pieces, and zeros elsewhere, so the sum is a
   gather; of gradients each has a part of all. With `ring`, what a rank has goes round from neighbour to neighbour. */
static void exchange(trainer *t, int64_t chunk, row *rows, int64_t n) {
    int gang = (int)gang_of(t, chunk), me = t->rank % gang, step;
    MPI_Comm comm = block_of(t, gang);
    row passing[LONGEST];
    t->n_exchanged++;
    if (!t->ring) {
        MPI_Allreduce(MPI_IN_PLACE, rows, (int)n * 2 * D, MPI_DOUBLE, MPI_SUM, comm);
        return;
    }
    memcpy(passing, rows, (size_t)n * sizeof *rows);
    for (step = 1; step < gang; step++) {
        MPI_Sendrecv_replace(passing, (int)n * 2 * D, MPI_DOUBLE, (me + 1) % gang, 0, (me + gang - 1) % gang, 0, comm,
                             MPI_STATUS_IGNORE);
        add_rows(rows, passing, n);
    }
}

/* All rows of K and V that the gang has up to this round, of which `own` has this rank's. */
static void gather_rows(trainer *t, int64_t chunk, const layer *own, row *all) {
    static cf_piece pieces[LONGEST];
    int64_t n = pieces_of(t, chunk, pieces), end = pieces[n - 1].begin + pieces[n - 1].tokens, i;
    memset(all, 0, (size_t)end * sizeof *all);
    for (i = 0; i < n; i++)
        if (pieces[i].rank == t->rank)
            memcpy(&all[pieces[i].begin], &own->rows[pieces[i].row], (size_t)pieces[i].tokens * sizeof *all);
    exchange(t, chunk, all, end);
}

/* Gradients of all rows go to those who have them. */
static void return_gradients(trainer *t, int64_t chunk, row *all, layer *own) {
    static cf_piece pieces[LONGEST];
    int64_t n = pieces_of(t, chunk, pieces), end = pieces[n - 1].begin + pieces[n - 1].tokens, i;
    if (!t->selfish) exchange(t, chunk, all, end);
    for (i = 0; i < n; i++)
        if (pieces[i].rank == t->rank)
            add_rows(&own->gradients[pieces[i].row], &all[pieces[i].begin], pieces[i].tokens);
}

/* ---- a slice ---- */

/* Rows of a slice while a pass runs: what each layer takes, and all keys that its rows see. */
typedef struct work {
    const cf_slice *s;
    int first, end;       /* layers of the stage */
    int64_t chunk;        /* of a gang; -1: its states have all rows before it */
    layer *states;        /* (LAYERS) */
    int64_t row0;         /* where its own rows begin in these */
    double x[LAYERS + 1][LONGEST][D];
    row keys[LAYERS][LONGEST];
    double dx[LONGEST][D]; /* gradient of x[l + 1] while layer l runs backward */
} work;

static void forward_layer(trainer *t, work *w, int l) {
    int64_t n = w->s->length, i, j;
    double q[D], p[LONGEST];
    int d;
    for (i = 0; i < n; i++) {
        times(matrix(t->parameters, l, 1), w->x[l][i], w->states[l].rows[w->row0 + i].k);
        times(matrix(t->parameters, l, 2), w->x[l][i], w->states[l].rows[w->row0 + i].v);
    }
    if (w->chunk >= 0) gather_rows(t, w->chunk, &w->states[l], w->keys[l]);
    else memcpy(w->keys[l], w->states[l].rows, (size_t)(w->s->begin + n) * sizeof(row));
    for (i = 0; i < n; i++) {
        times(matrix(t->parameters, l, 0), w->x[l][i], q);
        weigh(w->keys[l], w->s->begin + i, q, p);
        for (d = 0; d < D; d++)
            for (w->x[l + 1][i][d] = w->x[l][i][d], j = 0; j <= w->s->begin + i; j++)
                w->x[l + 1][i][d] += p[j] * w->keys[l][j].v[d];
    }
}

/* Attention of row i backward: adds to the gradients of all keys that it sees, and of its query. */
static void backward_row(const trainer *t, const work *w, int l, int64_t i, row *dkeys, double dq[D]) {
    const row *keys = w->keys[l];
    int64_t at = w->s->begin + i, j;
    double q[D], p[LONGEST], dp[LONGEST], mean = 0;
    int d;
    times(matrix(t->parameters, l, 0), w->x[l][i], q);
    weigh(keys, at, q, p);
    for (j = 0; j <= at; j++) {
        for (dp[j] = 0, d = 0; d < D; d++) {
            dp[j] += w->dx[i][d] * keys[j].v[d];
            dkeys[j].v[d] += p[j] * w->dx[i][d];
        }
        mean += p[j] * dp[j];
    }
    for (j = 0; j <= at; j++)
        for (d = 0; d < D; d++) {
            dq[d] += p[j] * (dp[j] - mean) * keys[j].k[d];
            dkeys[j].k[d] += p[j] * (dp[j] - mean) * q[d];
        }
}

static void backward_layer(trainer *t, work *w, int l) {
    row dkeys[LONGEST];
    double down[LONGEST][D];
    int64_t n = w->s->length, i;
    double *dm = t->gradients + l * 3 * D * D;
    memset(dkeys, 0, sizeof dkeys);
    memcpy(down, w->dx, sizeof down);
    for (i = 0; i < n; i++) {
        double dq[D] = {0};
        backward_row(t, w, l, i, dkeys, dq);
        times_back(matrix(t->parameters, l, 0), w->x[l][i], dq, down[i], dm);
    }
    if (w->chunk >= 0) return_gradients(t, w->chunk, dkeys, &w->states[l]);
    else add_rows(w->states[l].gradients, dkeys, w->s->begin + n);
    for (i = 0; i < n; i++) {
        const row *g = &w->states[l].gradients[w->row0 + i];
        times_back(matrix(t->parameters, l, 1), w->x[l][i], g->k, down[i], dm + D * D);
        times_back(matrix(t->parameters, l, 2), w->x[l][i], g->v, down[i], dm + 2 * D * D);
    }
    memcpy(w->dx, down, sizeof down);
}

/* A slice forward, and with `back` also backward, with the gradients that its rows have in the states by then. at: its
   rows between the stages, and their gradients. */
static void run_slice(trainer *t, int64_t chunk, const cf_slice *s, layer *states, int64_t row0, int back,
                      double (*const at[2])[D]) {
    static work w;
    int64_t i;
    int l, d;
    w.first = t->stage * LAYERS / t->n_stages;
    w.end = (t->stage + 1) * LAYERS / t->n_stages;
    w.s = s;
    w.chunk = chunk;
    w.states = states;
    w.row0 = row0;
    for (i = 0; i < s->length; i++)
        for (d = 0; d < D; d++) w.x[0][i][d] = input(s->sequence, s->begin + i, d);
    if (t->stage > 0) memcpy(w.x[w.first], at[0], (size_t)s->length * sizeof *at[0]);
    for (l = w.first; l < w.end; l++) forward_layer(t, &w, l);
    if (w.end < LAYERS) memcpy(at[0], w.x[w.end], (size_t)s->length * sizeof *at[0]);
    if (!back) return;
    for (i = 0; i < s->length && w.end == LAYERS; i++)
        for (d = 0; d < D; d++) {
            w.dx[i][d] = w.x[LAYERS][i][d] - target(s->sequence, s->begin + i, d);
            t->loss += w.dx[i][d] * w.dx[i][d] / 2;
        }
    if (w.end < LAYERS) memcpy(w.dx, at[1], (size_t)s->length * sizeof *at[1]);
    for (l = w.end - 1; l >= w.first; l--) backward_layer(t, &w, l);
    if (t->stage > 0) memcpy(at[1], w.dx, (size_t)s->length * sizeof *at[1]);
}

/* ---- passes ---- */

/* All ranks run a pass of this kind. */
static void meet(const trainer *t, int kind) {
    int kinds[2] = {kind, -kind};
    if (t->all == MPI_COMM_NULL) return;
    MPI_Allreduce(MPI_IN_PLACE, kinds, 2, MPI_INT, MPI_MAX, t->all);
    if (kinds[0] != -kinds[1]) MPI_Abort(MPI_COMM_WORLD, 3);
}

static void run_chunk(trainer *t, const cf_step *step, int back) {
    static layer alone[LAYERS];
    int64_t id = step->action.chunk, i;
    for (i = 0; i < step->chunk->n_slices; i++) {
        int grouped = step->chunk->group >= 0 && i == 0;
        const cf_slice *s = &t->plan->slices[step->chunk->first_slice + i];
        double (*const at[2])[D] = {&t->between[id][0][s->offset], &t->between[id][1][s->offset]};
        if (!grouped) memset(alone, 0, sizeof alone);
        run_slice(t, grouped && gang_of(t, id) > 0 ? id : -1, s,
                  grouped ? &t->states[step->chunk->group * LAYERS] : alone, grouped ? step->chunk->prefix : 0, back,
                  at);
    }
}

static int forward(void *user, const cf_step *step) {
    trainer *t = (trainer *)user;
    meet(t, 0);
    run_chunk(t, step, 0);
    t->kept[step->action.chunk] = step->action.keep;
    return 0;
}

static int backward(void *user, const cf_step *step) {
    trainer *t = (trainer *)user;
    if (!t->kept[step->action.chunk]) return 1;
    meet(t, 1);
    run_chunk(t, step, 1);
    return 0;
}

/* Between the stages: activations, or their gradients. */
static int send(void *user, const cf_step *step) {
    trainer *t = (trainer *)user;
    int way = step->action.pass == CF_SEND_B, peer = (int)step->peer * t->n_ranks + t->rank;
    MPI_Send(t->between[step->action.chunk][way], CHUNK * D, MPI_DOUBLE, peer, way, MPI_COMM_WORLD);
    return 0;
}

static int receive(void *user, const cf_step *step) {
    trainer *t = (trainer *)user;
    int way = step->action.pass == CF_RECV_B, peer = (int)step->peer * t->n_ranks + t->rank;
    MPI_Recv(t->between[step->action.chunk][way], CHUNK * D, MPI_DOUBLE, peer, way, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    return 0;
}

/* Returns the largest difference from one process on whole sequences, against the largest gradient. */
static double train(trainer *t, int64_t k, int lockstep, int64_t *widest) {
    static trainer alone;
    static layer states[LAYERS];
    cf_pack_desc pack = {0};
    cf_run_desc run = {0};
    cf_plan *plan = NULL;
    cf_schedule *schedule;
    cf_error error;
    int64_t i;
    memset(&alone, 0, sizeof alone);
    alone.n_stages = 1;
    for (i = 0; i < PARAMETERS; i++) t->parameters[i] = alone.parameters[i] = number(i, 3, 99) / 3;
    for (i = 0; i < N; i++) {
        const cf_slice whole = {i, 0, lengths[i], 0};
        memset(states, 0, sizeof states);
        run_slice(&alone, -1, &whole, states, 0, 1, NULL);
    }
    pack.chunk_size = CHUNK;
    pack.n_ranks = pack.gang = t->n_ranks;
    pack.lockstep = lockstep;
    need(cf_pack(lengths, N, &pack, &plan, &error), &error);
    schedule = schedule_of(plan, t->rank, t->n_stages, k, t->all == MPI_COMM_NULL, CF_SCHEDULE_BEST);
    for (*widest = i = 0; i < plan->n_groups; i++)
        if (plan->groups[i].gang > *widest) *widest = plan->groups[i].gang;
    t->plan = plan;
    t->states = (layer *)calloc((size_t)(plan->n_groups * LAYERS) + 1, sizeof *t->states);
    t->kept = (unsigned char *)calloc((size_t)plan->n_chunks + 1, 1);
    t->between = (double (*)[2][CHUNK][D])calloc((size_t)plan->n_chunks + 1, sizeof *t->between);
    run.user = t;
    run.send = send;
    run.receive = receive;
    run.forward = forward;
    run.backward = backward;
    need(cf_run(plan, schedule, t->stage, &run, NULL, &error), &error);
    MPI_Allreduce(MPI_IN_PLACE, t->gradients, PARAMETERS, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    MPI_Allreduce(MPI_IN_PLACE, &t->loss, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
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
    static const char *const how[] = {"free", "in step as it is", "packed in step"};
    MPI_Comm comms[16], stage;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &n_ranks);
    n_stages = argc > 1 && strcmp(argv[1], "stages") == 0 ? 2 : 1;
    n_ranks /= n_stages;
    signal(SIGALRM, give_up);
    alarm(60);
    for (i = 0; i < 16 && 1 << i <= n_ranks; i++) MPI_Comm_split(MPI_COMM_WORLD, rank >> i, rank, &comms[i]);
    MPI_Comm_split(MPI_COMM_WORLD, rank / n_ranks, rank, &stage);
    for (turn = n_stages > 1 ? 2 : 0; turn < 6; turn++) { /* schedules that ranks make by themselves have one stage */
        int64_t widest;
        double worst;
        memset(&t, 0, sizeof t);
        t.rank = rank % n_ranks;
        t.stage = rank / n_ranks;
        t.n_stages = n_stages;
        t.n_ranks = n_ranks;
        t.ring = argc > 1 && strcmp(argv[1], "ring") == 0;
        t.selfish = argc > 1 && strcmp(argv[1], "selfish") == 0;
        t.all = turn < 2 ? MPI_COMM_NULL : stage;
        memcpy(t.comms, comms, sizeof comms);
        worst = train(&t, 1 + turn % 2, turn >= 4, &widest);
        failed |= !(worst <= 1e-10) || widest != (n_ranks > 1 ? n_ranks : 0);
        if (rank == 0)
            printf("%d ranks of %d stages, gangs of up to %d, K %d, %s: gradients off by %.1e, %d exchanges\n", n_ranks,
                   n_stages, (int)widest, 1 + turn % 2, how[turn / 2], worst, (int)t.n_exchanged);
    }
    MPI_Finalize();
    return failed;
}
