/* pipeline_mpi.c - a model divided into stages, one process each, driven by any schedule over MPI - MIT or public
   domain

       mpicc -std=c99 -O3 examples/pipeline_mpi.c -lm -o pipeline_mpi
       mpirun -n 4 ./pipeline_mpi --layers 4 --schedule 1f1b --k 2 --synthetic 900,40,300,17
       mpirun -n 4 ./pipeline_mpi --layers 8 --sweep --k 2      every schedule, both replays, K 1 and 2
       mpirun -n 4 ./pipeline_mpi --ranks 2 --max-cp 2 --synthetic 900,40,300,17    two pipelines share long sequences

   Every process makes the same plan and schedule from the same options, lowers the schedule, and walks the steps of its
   own stage. No other coordination is needed: cf_schedule_lower has ordered sends and receives so that they cannot
   deadlock. A process does one step after another and never reads another's list.

   Then the program compares the gradients with those of the whole model on whole sequences, and the peaks counted by
   the steps with those of cf_simulate. It prints the measured timeline next to the simulated one.

   Read in this order: pipeline.h (a stage's passes), >>transport, >>run, >>verdict; the rest is options and reports. */

#define _POSIX_C_SOURCE 200809L
#define OWN_END_PROGRAM

#define CHUNKFLOW_IMPLEMENTATION
#define CHUNKFLOW_STATIC
#include "../chunkflow.h"

#define CHUNKFLOW_TUNE_STATIC
#include "../tools/chunkflow_tune.h" /* only for cf_cost_fit: costs from measured passes */

#include "arguments.h"
#include "check.h"
#include "pipeline.h"

#include <limits.h>
#include <mpi.h>
#include <signal.h>
#include <time.h>

#ifdef TRAIN_FLOAT64
#define MPI_REAL_NUMBER MPI_DOUBLE
#else
#define MPI_REAL_NUMBER MPI_FLOAT
#endif

/* ================================================================================================================
   >>processes
   ================================================================================================================ */

static int process, n_processes; /* this process, and their number; process s is stage s */
static int rank, n_ranks = 1;    /* this pipeline, and their number: each is a data-parallel rank */

enum { MAX_BLOCKS = 16 };
static MPI_Comm pipeline;           /* the processes of this rank */
static MPI_Comm replicas;           /* this stage's processes of all ranks */
static MPI_Comm blocks[MAX_BLOCKS]; /* those of aligned blocks of 2^i ranks, which may be a cp group */

/* 1 while all processes do the same with the same numbers, so that a wrong option is wrong for all. */
static int in_step = 1;

/* Ends all processes, with one message. After a bad option each of them ends normally. Any other failure happens to one
   process while others may wait for it, so it aborts them. */
static void end_program(int exit_code, const char *why) {
    int together = in_step && exit_code == EXIT_BAD_INPUT;
    fflush(stdout);
    if (process + rank == 0 || !together) fprintf(stderr, "pipeline_mpi: %s\n", why);
    fflush(stderr);
    if (together) MPI_Finalize();
    else MPI_Abort(MPI_COMM_WORLD, exit_code);
    exit(exit_code);
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Returns the difference to add to this process's clock to get that of process 0. It asks process 0 for the time
   repeatedly and uses the quickest answer, which is wrong by at most half of its round trip; `error` is that bound. */
static double clock_offset(double *error) {
    enum { ROUNDS = 16 };
    double offset = 0, quickest = INFINITY, time = 0;
    for (int other = 1; other < n_processes; other++) {
        for (int round = 0; round < ROUNDS && process == 0; round++) {
            MPI_Recv(&time, 1, MPI_DOUBLE, other, 0, pipeline, MPI_STATUS_IGNORE);
            time = seconds_now();
            MPI_Send(&time, 1, MPI_DOUBLE, other, 0, pipeline);
        }
        for (int round = 0; round < ROUNDS && process == other; round++) {
            double asked = seconds_now();
            MPI_Send(&asked, 1, MPI_DOUBLE, 0, 0, pipeline);
            MPI_Recv(&time, 1, MPI_DOUBLE, 0, 0, pipeline, MPI_STATUS_IGNORE);
            double answered = seconds_now();
            if (answered - asked < quickest) {
                quickest = answered - asked;
                offset = time - (asked + answered) / 2;
            }
        }
    }
    *error = quickest / 2;
    return offset;
}

static int same_machine_as_process_0(void) {
    MPI_Comm machine;
    int lowest = process;
    MPI_Comm_split_type(pipeline, MPI_COMM_TYPE_SHARED, process, MPI_INFO_NULL, &machine);
    MPI_Allreduce(MPI_IN_PLACE, &lowest, 1, MPI_INT, MPI_MIN, machine);
    MPI_Comm_free(&machine);
    return lowest == 0;
}

/* Uses the common clock if all processes are on one machine: it is exact, and shows whether the measured offset was
   right. */
static double agreed_clock_offset(void) {
    double error, offset = clock_offset(&error);
    if (!same_machine_as_process_0()) return offset;
    if (fabs(offset) > error + 1e-6) {
        in_step = 0;
        fail(EXIT_CHECK_FAILED, "process %d has the clock of process 0, yet measures %g s between", process, offset);
    }
    return 0;
}

/* ================================================================================================================
   >>options
   ================================================================================================================ */

typedef enum fault_kind { FAULT_NONE, FAULT_ERROR, FAULT_KILL, FAULT_NAN, FAULT_SKIP } fault_kind;

/* A deliberate failure, to test its effect. */
typedef struct fault {
    fault_kind kind;
    int64_t stage, action; /* a negative action counts from the end */
} fault;

typedef struct settings {
    model_config model;
    cf_pack_desc packing;
    cf_schedule_desc order;
    length_list lengths, with, shared;
    int64_t stages;            /* required number of processes; 0: any */
    int64_t prompt, seed, repeat;
    int64_t share;             /* see pack_batch */
    int64_t stream;            /* bytes of the ring for states in host memory; 0: they are on the device */
    int rendezvous, outputs, sweep, shared_mean, help;
    const char *plan, *timeline, *simulated, *fail, *kinds;
    fault fault;
} settings;

static int64_t list_settings(settings *s, option list[MAX_OPTIONS]) {
    const option all[] = {
        {"layers", INTEGER, &s->model.layers, 1, MANY, NULL, "layers, at least one for each (virtual) stage"},
        {"hidden", INTEGER, &s->model.hidden, 1, MANY, NULL, "width of the residual stream"},
        {"heads", INTEGER, &s->model.heads, 1, MANY, NULL, "query heads"},
        {"kv-heads", INTEGER, &s->model.kv_heads, 1, MANY, NULL, "key and value heads"},
        {"ffn", INTEGER, &s->model.ffn, 1, MANY, NULL, "width of the feed-forward part"},
        {"untied", FLAG, &s->model.untied, 0, 0, NULL, "give the head a weight of its own"},
        {"dropout", NUMBER, &s->model.dropout, 0, 1, NULL, "rate of dropout, less than 1"},
        {"synthetic", LENGTHS, &s->lengths, 0, 0, NULL, "LEN,LEN,...: tokens of each sequence of the batch"},
        {"with", LENGTHS, &s->with, 0, 0, NULL, WITH_HELP},
        {"shared", LENGTHS, &s->shared, 0, 0, NULL, SHARED_HELP},
        {"prompt", INTEGER, &s->prompt, 0, MANY, NULL, "first tokens of each sequence that are no targets"},
        {"window", INTEGER, &s->model.window, 0, INT32_MAX, NULL, "keys that a query sees, its own included, 0: all"},
        {"kinds", WORDS, &s->kinds, 0, 0, NULL, KINDS_HELP},
        {"experts", INTEGER, &s->model.kinds.experts, 1, MAX_EXPERTS, NULL, "experts of a layer that has some"},
        {"active", INTEGER, &s->model.kinds.active, 1, MAX_ACTIVE, NULL, "of which a row chooses so many"},
        {"balance", NUMBER, &s->model.kinds.balance, 0, MANY, NULL, "weight of the experts' balance loss"},
        {"mtp", NUMBER, &s->model.kinds.mtp, 0, MANY, NULL, "weight of a loss of the next token but one, 0: none"},
        {"chunk-size", INTEGER, &s->packing.chunk_size, 1, CF_MAX_CHUNK_SIZE, NULL, "most tokens of a chunk"},
        {"method", CHOICE, &s->packing.method, 0, 0, "best next", "how to fit sequences into chunks"},
        {"split", CHOICE, &s->packing.split, 0, 0, "full even cost", "how to cut long sequences"},
        {"no-tails", FLAG, &s->packing.no_tails, 0, 0, NULL, "no hybrid chunks: a chain's last chunk stays alone"},
        {"align", INTEGER, &s->packing.align, 1, CF_MAX_CHUNK_SIZE, NULL, "slices start at multiples of this"},
        {"share", INTEGER, &s->share, 0, MANY, NULL, SHARE_HELP},
        {"shared-mean", FLAG, &s->shared_mean, 0, 0, NULL, ONCE_HELP},
        {"k", INTEGER, &s->order.shape.k, 1, MANY, NULL, "chunks of a chain that keep their activations at once"},
        {"schedule", CHOICE, &s->order.kind, 0, 0, "paper gpipe 1f1b interleaved zero-bubble best", "which schedule"},
        {"replay", CHOICE, &s->order.shape.replay, 0, 0, "pipeline local", "how dropped activations come back"},
        {"virtual", INTEGER, &s->order.shape.n_virtual, 0, MANY, NULL, "parts of the model on each stage, 0: as is usual"},
        {"placement", CHOICE, &s->order.shape.placement, 0, 0, "loop v", "in which order those parts lie on the stages"},
        {"limit", INTEGER, &s->order.limits.chunks, 0, MANY, NULL, "most chunks that a stage keeps at once, 0: the default"},
        {"split-backward", FLAG, &s->order.split_backward, 0, 0, NULL, "best may cut backward into I and W"},
        {"stream", INTEGER, &s->stream, 0, MANY, NULL,
         "keep states and kept stage inputs in host memory, and stream states through a ring of these bytes, 0: no"},
        {"outputs", FLAG, &s->outputs, 0, 0, NULL, OUTPUTS_HELP},
        {"stages", INTEGER, &s->stages, 0, MANY, NULL, "processes of each rank that there must be, 0: any number"},
        {"ranks", INTEGER, &s->packing.n_ranks, 1, CF_MAX_RANKS, NULL, "data-parallel ranks in step, each a pipeline"},
        {"max-cp", INTEGER, &s->packing.max_cp, 0, CF_MAX_RANKS, NULL, "most ranks that share a sequence, 0: none do"},
        {"rendezvous", FLAG, &s->rendezvous, 0, 0, NULL, "sends that block until they are received, with no buffer"},
        {"sweep", FLAG, &s->sweep, 0, 0, NULL, "every schedule, both replays, K from 1 to --k; one line for each"},
        {"repeat", INTEGER, &s->repeat, 1, 1e6, NULL, "times to run; the last one is checked and measured"},
        {"plan", TEXT, &s->plan, 0, 0, NULL, "write its plan (JSON), which `chunkflow check` wants"},
        {"timeline", TEXT, &s->timeline, 0, 0, NULL, "write the measured schedule (JSON)"},
        {"simulated", TEXT, &s->simulated, 0, 0, NULL, "write the schedule simulated with this run's costs (JSON)"},
        {"seed", INTEGER, &s->seed, 0, MANY, NULL, "of weights, tokens and dropout"},
        {"fail", TEXT, &s->fail, 0, 0, NULL, "STAGE:ACTION[:error|kill|nan|skip], see below"},
        {"help", FLAG, &s->help, 0, 0, NULL, "this"},
    };
    memcpy(list, all, sizeof all);
    return (int64_t)(sizeof all / sizeof all[0]);
}

static settings settings_default(void) {
    settings s;
    memset(&s, 0, sizeof s);
    s.model.vocabulary = VOCABULARY;
    s.model.layers = 8;
    s.model.hidden = 64;
    s.model.heads = 4;
    s.model.kv_heads = 2;
    s.model.ffn = 176;
    s.model.rope_theta = 1e6;
    s.model.norm_epsilon = 1e-6;
    s.model.kinds.experts = 4;
    s.model.kinds.active = 2;
    s.packing.chunk_size = 128;
    s.packing = cf_pack_defaults(&s.packing);
    s.order.shape.k = 1;
    s.seed = 1;
    s.repeat = 1;
    return s;
}

static void print_help(settings *s) {
    option list[MAX_OPTIONS];
    int64_t n = list_settings(s, list);
    printf("usage: mpirun -n STAGES pipeline_mpi [options]\n"
           "Loss and gradients of one batch (" REAL_NAME ") by a pipeline of processes, one for each stage of the\n"
           "model, compared with those of the whole model on whole sequences.\n\n");
    print_options(list, n);
    printf("\n--fail makes one action of one stage go wrong (counted from 0, or back from -1, with transfers): error\n"
           "reports it, kill ends the process by a signal, nan puts a NaN into a gradient, skip leaves a pass out.\n"
           "Exit status: 0 done, 1 a check or a process failed, 2 an option was not usable.\n");
}

static fault parse_fault(const char *text) {
    static const char *const kinds[] = {"", "error", "kill", "nan", "skip"};
    fault f = {FAULT_ERROR, 0, 0};
    long long stage_number = -1, action = -1;
    int used = 0;
    if (sscanf(text, "%lld:%lld%n", &stage_number, &action, &used) == 2 && stage_number >= 0) {
        f.stage = stage_number;
        f.action = action;
        if (!text[used]) return f;
        for (int kind = FAULT_ERROR; kind <= FAULT_SKIP && text[used] == ':'; kind++) {
            f.kind = (fault_kind)kind;
            if (strcmp(text + used + 1, kinds[kind]) == 0) return f;
        }
    }
    fail(EXIT_BAD_INPUT, "--fail: wanted STAGE:ACTION[:HOW], HOW one of \"error kill nan skip\", got \"%s\"", text);
}

/* Returns the number of virtual stages for a kind of schedule. */
static int64_t virtual_stages(const settings *s, cf_schedule_kind kind) {
    cf_schedule_desc order = s->order;
    order.kind = kind;
    return cf_schedule_defaults(&order).shape.n_virtual;
}

/* Divides the processes into pipelines. Only the first one prints. */
static void divide_processes(int64_t ranks) {
    if (n_processes % ranks != 0) {
        fail(EXIT_BAD_INPUT, "--ranks %lld wants as many pipelines of one size, but there are %d processes",
             (long long)ranks, n_processes);
    }
    n_ranks = (int)ranks;
    n_processes /= n_ranks;
    rank = process / n_processes;
    process %= n_processes;
    MPI_Comm_split(MPI_COMM_WORLD, rank, process, &pipeline);
    MPI_Comm_split(MPI_COMM_WORLD, process, rank, &replicas);
    for (int i = 0; i < MAX_BLOCKS && 1 << i <= n_ranks; i++) MPI_Comm_split(replicas, rank >> i, rank, &blocks[i]);
    if (rank > 0 && !freopen("/dev/null", "w", stdout)) fail(EXIT_CHECK_FAILED, "/dev/null cannot be written");
}

static void check_processes(const settings *s) {
    int64_t n_virtual = s->sweep ? 1 : virtual_stages(s, s->order.kind);
    if (s->stages > 0 && s->stages != n_processes) {
        fail(EXIT_BAD_INPUT, "--stages %lld wants as many processes, but there %s %d: start it with mpirun -n %lld",
             (long long)s->stages, n_processes == 1 ? "is" : "are", n_processes, (long long)s->stages);
    }
    if (n_virtual > 1 && n_processes == 1) {
        fail(EXIT_BAD_INPUT, "%lld virtual stages on each stage want at least 2 processes: start it with mpirun -n 2",
             (long long)n_virtual);
    }
    if (n_virtual > s->model.layers / n_processes) {
        fail(EXIT_BAD_INPUT, "%d processes x %lld virtual stages want at least %lld layers, the model has %lld",
             n_processes, (long long)n_virtual, (long long)n_virtual * n_processes, (long long)s->model.layers);
    }
}

static settings parse_settings(int argc, char **argv) {
    settings s = settings_default();
    option list[MAX_OPTIONS];
    parse_arguments(argc, argv, list, list_settings(&s, list), NULL);
    const char *problem = s.kinds ? parse_pattern(&s.model.kinds, s.kinds) : NULL;
    if (!problem) problem = model_config_fault(&s.model);
    if (!problem && s.share > 0) problem = model_sharing_fault(&s.model);
    if (problem) fail(EXIT_BAD_INPUT, "%s", problem);
    if (s.help) return s;
    divide_processes(s.packing.n_ranks);
    s.packing.lockstep = n_ranks > 1;
    if (s.lengths.count == 0) parse_lengths("synthetic", &s.lengths, "500,20,90,33,128,64,7,300,45,11");
    check_alike(&s.lengths, &s.with, &s.shared);
    check_shared_mean(s.shared_mean, s.share, s.packing.align);
    if (s.fail) s.fault = parse_fault(s.fail);
    if (s.fail && s.fault.stage >= n_processes) {
        fail(EXIT_BAD_INPUT, "--fail: there is no stage %lld", (long long)s.fault.stage);
    }
    if (s.sweep && (s.plan || s.timeline || s.simulated || s.fail)) {
        fail(EXIT_BAD_INPUT, "--plan, --timeline, --simulated and --fail are for one schedule, not for --sweep");
    }
    if (s.packing.chunk_size > INT_MAX / s.model.hidden) {
        fail(EXIT_BAD_INPUT, "chunk-size x hidden is more than one message can hold");
    }
    check_stream_bytes(s.stream, &s.model);
    if (s.outputs && s.order.shape.replay == CF_REPLAY_PIPELINE)
        fail(EXIT_BAD_INPUT, "--outputs is for --replay local: a replay through the pipeline attends again");
    s.order.shape.outputs = s.outputs;
    check_processes(&s);
    return s;
}

/* ================================================================================================================
   >>transport    tensors between stages

   A lowered schedule is easy to transport: both ends of a link name its tensors in the same order, and no send relies
   on being buffered. So messages are received in the order of arrival, and a tag only checks that each is the right
   one.

   Sends do not wait: the tensor's buffer is swapped for a free one and sent from where it is. Only with N_SENDS in
   transit does a send wait for one of them to end, which will happen, because the schedule allows every send to wait.
   ================================================================================================================
   */

#define N_SENDS 4

typedef struct transport {
    MPI_Comm comm;
    int rendezvous;
    int64_t n_virtual_stages;
    MPI_Request requests[N_SENDS];
    real *buffers[N_SENDS]; /* in transit, or free if the request is MPI_REQUEST_NULL */
    int64_t n_sent;
} transport;

static void transport_begin(transport *t, const cf_schedule *schedule, int64_t boundary_count, int rendezvous) {
    memset(t, 0, sizeof *t);
    MPI_Comm_dup(pipeline, &t->comm);
    t->rendezvous = rendezvous;
    t->n_virtual_stages = schedule->shape.n_stages * schedule->shape.n_virtual;
    for (int i = 0; i < N_SENDS; i++) {
        t->requests[i] = MPI_REQUEST_NULL;
        t->buffers[i] = TAKE(real, boundary_count);
    }
}

/* Waits until all sends have left their buffers. */
static void transport_finish(transport *t) { MPI_Waitall(N_SENDS, t->requests, MPI_STATUSES_IGNORE); }

static void transport_end(transport *t) {
    for (int i = 0; i < N_SENDS; i++) free(t->buffers[i]);
    MPI_Comm_free(&t->comm);
}

/* Returns a tensor's tag, from chunk, lower virtual stage of the two, and kind, as far as the 32768 tags of every MPI
   allow. */
static int tensor_tag(const transport *t, const cf_step *step) {
    static const int kinds[] = {0, 0, 1, 1, 2, 2}; /* SEND_F, RECV_F, SEND_R, RECV_R, SEND_B, RECV_B */
    int pass_number = step->action.pass - CF_SEND_F;
    int from_below = step->action.pass == CF_RECV_F || step->action.pass == CF_RECV_R || step->action.pass == CF_SEND_B;
    int64_t link = step->action.stage - from_below;
    return (int)(((step->action.chunk * t->n_virtual_stages + link) * 3 + kinds[pass_number]) % 32768);
}

static int free_request(transport *t) {
    int i = 0, n_ended = 0, ended[N_SENDS];
    MPI_Testsome(N_SENDS, t->requests, &n_ended, ended, MPI_STATUSES_IGNORE);
    while (i < N_SENDS && t->requests[i] != MPI_REQUEST_NULL) i++;
    if (i == N_SENDS) MPI_Waitany(N_SENDS, t->requests, &i, MPI_STATUS_IGNORE);
    return i;
}

static void send_tensor(transport *t, const cf_step *step, real **boundary, int64_t count) {
    int tag = tensor_tag(t, step), peer = (int)step->peer;
    t->n_sent++;
    if (t->rendezvous) {
        MPI_Ssend(*boundary, (int)count, MPI_REAL_NUMBER, peer, tag, t->comm);
        return;
    }
    int i = free_request(t);
    real *full = *boundary;
    *boundary = t->buffers[i];
    t->buffers[i] = full;
    MPI_Isend(full, (int)count, MPI_REAL_NUMBER, peer, tag, t->comm, &t->requests[i]);
}

/* Returns NULL, or the fault of the message. */
static const char *receive_tensor(transport *t, const cf_step *step, real *boundary, int64_t count,
                                  int64_t room) {
    MPI_Status status;
    int got = 0;
    MPI_Recv(boundary, (int)room, MPI_REAL_NUMBER, (int)step->peer, MPI_ANY_TAG, t->comm, &status);
    MPI_Get_count(&status, MPI_REAL_NUMBER, &got);
    if (status.MPI_TAG != tensor_tag(t, step)) return "another tensor came than the one that was due";
    if (got != count) return "a tensor came that has another size";
    return NULL;
}

/* Adds up the numbers that a cp group's layers exchange. Its processes of a stage meet here, for they run in
   lockstep. */
static void add_up(void *context, cp_message message, int64_t size, real *numbers, int64_t count) {
    int i = 0;
    (void)context;
    (void)message;
    while ((int64_t)1 << i < size) i++;
    MPI_Allreduce(MPI_IN_PLACE, numbers, (int)count, MPI_REAL_NUMBER, MPI_SUM, blocks[i]);
}

/* ================================================================================================================
   >>run    one stage's list, with a clock
   ================================================================================================================ */

/* The data of a stage's run. */
typedef struct stage_process {
    stage_runner runner;
    transport transport;
    fault fault;
    const cf_schedule *schedule; /* before lowering: its passes are timed */
    int64_t n_timed;             /* passes done, in the order of that schedule's list */
    double *start, *end;         /* (actions of the stage) by process 0's clock */
    int *live;                   /* (actions of the stage) chunks kept during each */
    double waited;               /* seconds spent in receives and sends */
    double clock_offset;
} stage_process;

/* Counts passes and transfers of a stage in a lowered schedule. */
static int64_t n_actions_of(const cf_schedule *schedule, int64_t stage_index) {
    return schedule->first[stage_index + 1] - schedule->first[stage_index];
}

static int is_faulty(const stage_process *p, const cf_step *step) {
    return p->fault.kind != FAULT_NONE && p->fault.stage == process && p->fault.action == step->position;
}

/* Returns the fault with its action counted from 0. Refuses one that would never happen, because it would test
   nothing. */
static fault find_fault(fault f, const cf_schedule *lowered) {
    if (f.kind == FAULT_NONE) return f;
    int64_t n_actions = n_actions_of(lowered, f.stage), wanted = f.action;
    if (f.action < 0) f.action += n_actions;
    if (f.action < 0 || f.action >= n_actions) {
        fail(EXIT_BAD_INPUT, "--fail: stage %lld has %lld actions, there is no action %lld", (long long)f.stage,
             (long long)n_actions, (long long)wanted);
    }
    int kind = lowered->actions[lowered->first[f.stage] + f.action].pass;
    if (kind >= CF_COMPUTE_PASS_COUNT && f.kind != FAULT_ERROR && f.kind != FAULT_KILL) {
        fail(EXIT_BAD_INPUT, "--fail: action %lld of stage %lld is %s; nan and skip are for passes",
             (long long)f.action, (long long)f.stage, cf_pass_name((cf_pass)kind));
    }
    return f;
}

static cf_result step_fails(const cf_step *step, const char *why, cf_error *error) {
    return cf_refuse(error, CF_ERROR_CALLBACK, "action", step->position, why);
}

/* Fails where --fail requests it. */
static cf_result meet_fault(stage_process *p, const cf_step *step, cf_error *error) {
    if (!is_faulty(p, step)) return CF_OK;
    if (p->fault.kind == FAULT_KILL) raise(SIGKILL);
    return p->fault.kind == FAULT_ERROR ? step_fails(step, "injected by --fail", error) : CF_OK;
}

/* Runs and times one pass. The schedule before lowering has the same passes in the same order. */
static cf_result timed_pass(stage_process *p, const cf_step *step, cf_error *error) {
    const cf_action *planned = &p->schedule->actions[p->schedule->first[process] + p->n_timed];
    if (p->n_timed >= n_actions_of(p->schedule, process) || memcmp(planned, &step->action, sizeof *planned) != 0) {
        return step_fails(step, "the lowered list has another pass here than the schedule", error);
    }
    cf_result result = CF_OK;
    p->start[p->n_timed] = seconds_now() + p->clock_offset;
    if (!is_faulty(p, step) || p->fault.kind != FAULT_SKIP) result = stage_pass(&p->runner, step, error);
    if (is_faulty(p, step) && p->fault.kind == FAULT_NAN) {
        stage part = part_of(p->runner.config, p->schedule, step->action.stage);
        p->runner.gradient->layers[part.first_layer].ffn_norm[0] = (real)NAN;
    }
    p->end[p->n_timed] = seconds_now() + p->clock_offset;
    p->live[p->n_timed] = (int)p->runner.live_slots;
    p->n_timed++;
    return result;
}

/* A send or receive. */
static cf_result timed_transfer(stage_process *p, const cf_step *step, cf_error *error) {
    const double begin = seconds_now();
    const int64_t count = boundary_numbers(&p->runner, step);
    const char *wrong = NULL;
    if (step->output >= 0) {
        send_tensor(&p->transport, step, &p->runner.boundaries[step->output], count);
    } else {
        wrong = receive_tensor(&p->transport, step, p->runner.boundaries[step->input], count,
                               p->runner.boundary_count);
    }
    p->waited += seconds_now() - begin;
    return wrong ? step_fails(step, wrong, error) : CF_OK;
}

/* Walks the steps of this stage. A stage that fails aborts all others, which may be waiting for it. */
static void run_stage(stage_process *p) {
    const cf_steps *steps = p->runner.steps;
    cf_error error;
    memset(&error, 0, sizeof error);
    p->n_timed = 0;
    p->waited = 0;
    p->runner.loss = 0;
    routing_clear(&p->runner.routing);
    p->transport.n_sent = 0;
    MPI_Barrier(pipeline);
    in_step = 0;
    for (int64_t i = 0; i < steps->n; i++) {
        const cf_step *step = &steps->steps[i];
        cf_result result = meet_fault(p, step, &error);
        stage_begin_step(&p->runner, step);
        if (result == CF_OK && step->action.pass < CF_COMPUTE_PASS_COUNT) result = timed_pass(p, step, &error);
        else if (result == CF_OK) result = timed_transfer(p, step, &error);
        if (result != CF_OK) {
            fail(EXIT_CHECK_FAILED, "stage %d failed: %s of chunk %d on virtual stage %d: %s; all stages are stopped",
                 process, cf_pass_name((cf_pass)step->action.pass), step->action.chunk, step->action.stage, error.text);
        }
        stage_end_step(&p->runner, step);
    }
    transport_finish(&p->transport);
    MPI_Barrier(pipeline);
    in_step = 1;
}

/* Returns the process with the head. In a V it has the embedding as well. */
static int head_process(const cf_schedule *schedule) {
    int64_t last = schedule->shape.n_stages * schedule->shape.n_virtual - 1;
    return (int)cf_placement_stage(schedule->shape.placement, schedule->shape.n_stages, last);
}

/* Adds up the embedding's gradients of both processes, if the last stage also reads the embedding. */
static void sum_tied_embedding(const model_config *config, const cf_schedule *schedule, weights *gradient) {
    int head = head_process(schedule);
    if (!reads_embedding_twice(config) || head == 0 || (process > 0 && process != head)) return;
    int64_t count = config->vocabulary * config->hidden;
    int peer = process == 0 ? head : 0;
    real *other = TAKE(real, count);
    MPI_Sendrecv(gradient->embedding, (int)count, MPI_REAL_NUMBER, peer, 0, other, (int)count, MPI_REAL_NUMBER, peer, 0,
                 pipeline, MPI_STATUS_IGNORE);
    for (int64_t i = 0; i < count; i++) gradient->embedding[i] += other[i];
    free(other);
}

/* ================================================================================================================
   >>timelines    simulated and measured, in one form
   ================================================================================================================ */

typedef struct timelines {
    cf_timeline *unit;     /* simulated with unit costs, with which the schedule was made */
    cf_timeline *fitted;   /* simulated with the costs measured in this run */
    cf_timeline *measured; /* on process 0; NULL on all others */
} timelines;

static cf_timeline *simulate(const cf_plan *plan, const cf_schedule *schedule, const cf_timing *timing) {
    cf_simulate_desc desc = {0};
    cf_timeline *timeline = NULL;
    cf_error error;
    memset(&error, 0, sizeof error);
    desc.timing = timing;
    if (cf_simulate(plan, schedule, &desc, &timeline, &error) != CF_OK) fail(EXIT_BAD_INPUT, "%s", error.text);
    return timeline;
}

/* Gathers all stages' parts of an array on process 0, ordered as in the schedule. */
static void gather_actions(const cf_schedule *schedule, const void *own, void *all, MPI_Datatype type) {
    int *counts = TAKE(int, n_processes), *firsts = TAKE(int, n_processes);
    for (int s = 0; s < n_processes; s++) {
        counts[s] = (int)n_actions_of(schedule, s);
        firsts[s] = (int)schedule->first[s];
    }
    MPI_Gatherv(own, counts[process], type, all, counts, firsts, type, 0, pipeline);
    free(counts);
    free(firsts);
}

/* Returns the measured timeline on process 0, with the peaks that each stage has counted. */
static cf_timeline *measured_timeline(const stage_process *p) {
    const cf_steps *steps = p->runner.steps;
    const cf_schedule *schedule = p->schedule;
    cf_timeline *timeline = NULL;
    cf_error error;
    double *start = TAKE(double, schedule->n_actions), *end = TAKE(double, schedule->n_actions);
    int64_t peaks[] = {steps->n_slots, steps->peak_tokens, steps->peak_state_tokens,
                       p->runner.meter.peak[MEMORY_ACTIVATIONS] + p->runner.meter.peak[MEMORY_STATE]};
    int64_t *all = TAKE(int64_t, 4 * n_processes);
    cf_simulate_desc times = {0};
    memset(&error, 0, sizeof error);
    gather_actions(schedule, p->start, start, MPI_DOUBLE);
    gather_actions(schedule, p->end, end, MPI_DOUBLE);
    MPI_Gather(peaks, 4, MPI_INT64_T, all, 4, MPI_INT64_T, 0, pipeline);
    times.start = start;
    times.end = end;
    if (process == 0 && cf_simulate(p->runner.plan, schedule, &times, &timeline, &error) != CF_OK)
        fail(EXIT_CHECK_FAILED, "%s", error.text);
    gather_actions(schedule, p->live, timeline ? timeline->live : NULL, MPI_INT32_T);
    for (int64_t s = 0; s < n_processes && timeline; s++) {
        timeline->peak_live[s] = all[4 * s];
        timeline->peak_tokens[s] = all[4 * s + 1];
        timeline->peak_state_tokens[s] = all[4 * s + 2];
        timeline->peak_bytes[s] = all[4 * s + 3];
    }
    free(all);
    free(start);
    free(end);
    return timeline;
}

static cf_pass_cost *stage_cost_member(cf_stage_cost *cost, int pass_kind) {
    cf_pass_cost *members[CF_COMPUTE_PASS_COUNT] = {&cost->forward, &cost->replay, &cost->backward, &cost->input,
                                                    &cost->weight};
    return members[pass_kind];
}

/* Returns the cost of one kind of pass: fitted or, with too few samples, proportional to rows. */
static cf_pass_cost pass_cost_of(const cf_sample *samples, int64_t n) {
    cf_stage_cost fitted;
    cf_pass_cost cost = {0, 0, 0};
    double rows = 0, seconds = 0;
    memset(&fitted, 0, sizeof fitted);
    if (n == 0) return cost;
    if (cf_cost_fit(samples, n, &fitted, NULL, NULL) == CF_OK) return *stage_cost_member(&fitted, samples[0].pass);
    for (int64_t i = 0; i < n; i++) {
        rows += (double)samples[i].rows;
        seconds += samples[i].seconds;
    }
    cost.per_token = seconds / rows;
    return cost;
}

/* Returns the measured cost of passes on one of this process's virtual stages. */
static cf_stage_cost measured_cost(const stage_process *p, int64_t virtual_stage) {
    const cf_plan *plan = p->runner.plan;
    const cf_action *actions = p->schedule->actions + p->schedule->first[process];
    cf_sample *samples = TAKE(cf_sample, p->n_timed);
    cf_stage_cost cost;
    memset(&cost, 0, sizeof cost);
    for (int kind = 0; kind < CF_COMPUTE_PASS_COUNT; kind++) {
        int64_t n = 0;
        for (int64_t i = 0; i < p->n_timed; i++) {
            if (actions[i].stage != virtual_stage || actions[i].pass != kind) continue;
            const cf_chunk *chunk = &plan->chunks[actions[i].chunk];
            cf_sample sample = {kind, chunk->rows, chunk->pairs, fmax(p->end[i] - p->start[i], 1e-9)};
            samples[n++] = sample;
        }
        *stage_cost_member(&cost, kind) = pass_cost_of(samples, n);
    }
    free(samples);
    return cost;
}

/* Simulates the schedule with the costs measured in this run, stage by stage, and transfers that take no time. */
static cf_timeline *simulate_as_measured(const stage_process *p) {
    const cf_schedule *schedule = p->schedule;
    int64_t n_virtual = schedule->shape.n_virtual;
    cf_stage_cost *own = TAKE(cf_stage_cost, n_virtual), *all = TAKE(cf_stage_cost, n_virtual * n_processes);
    cf_stage_cost *ordered = TAKE(cf_stage_cost, n_virtual * n_processes);
    cf_timing timing = {0};
    for (int64_t row = 0; row < n_virtual; row++) {
        own[row] = measured_cost(p, cf_placement_at(schedule->shape.placement, n_processes, row, process));
    }
    int bytes = (int)((size_t)n_virtual * sizeof *own);
    MPI_Allgather(own, bytes, MPI_BYTE, all, bytes, MPI_BYTE, pipeline);
    for (int64_t s = 0; s < n_processes; s++) {
        for (int64_t row = 0; row < n_virtual; row++) {
            ordered[cf_placement_at(schedule->shape.placement, n_processes, row, s)] = all[s * n_virtual + row];
        }
    }
    timing.stages = ordered;
    cf_timeline *timeline = simulate(p->runner.plan, schedule, &timing);
    free(own);
    free(all);
    free(ordered);
    return timeline;
}

static int write_piece(const char *text, size_t bytes, void *user) {
    return fwrite(text, 1, bytes, (FILE *)user) != bytes;
}

/* Writes the plan, or a schedule with its times, on process 0 only. Returns whether it was written, or there was
   nothing to write. It does not call fail(): all other processes may be in MPI_Finalize by now, and an Open MPI that is
   told to abort then sometimes crashes or hangs. */
static int write_json(const char *path, const cf_plan *plan, const cf_schedule *schedule, const cf_timeline *timeline) {
    if (!path || rank > 0) return 1;
    FILE *file = fopen(path, "wb");
    int ok = file && (plan ? cf_write_plan_json(plan, NULL, write_piece, file, NULL)
                           : cf_write_schedule_json(schedule, timeline, write_piece, file, NULL)) == CF_OK;
    if (file && fclose(file) != 0) ok = 0;
    if (!ok) fprintf(stderr, "pipeline_mpi: %s cannot be written\n", path);
    return ok;
}

/* ================================================================================================================
   >>verdict    gradients and peaks
   ================================================================================================================ */

static int64_t count_actions(const cf_schedule *schedule, cf_pass kind) {
    int64_t n = 0;
    for (int64_t i = 0; i < schedule->n_actions; i++) n += schedule->actions[i].pass == kind;
    return n;
}

/* Loss and gradients of the whole model on whole sequences. */
typedef struct reference {
    weights gradient;
    double loss;
} reference;

static reference reference_new(const settings *s, const weights *w, const batch *b, uint64_t seed) {
    reference r;
    memory_meter meter;
    memset(&meter, 0, sizeof meter);
    r.gradient = weights_new(&s->model);
    r.loss = 0;
    if (process == 0) r.loss = unchunked_gradients(&s->model, w, &r.gradient, b, seed, &meter);
    MPI_Bcast(&r.loss, 1, MPI_DOUBLE, 0, pipeline);
    MPI_Bcast(r.gradient.flat, (int)r.gradient.count, MPI_REAL_NUMBER, 0, pipeline);
    return r;
}

typedef struct verdict {
    double loss;       /* of the pipeline: the head's, plus each stage's balance loss */
    double difference; /* the largest relative difference, over all tensors of all stages, and the losses */
    int64_t tensor;    /* where; -1: the loss */
    int64_t n_compared;
    int peaks_agree;   /* the steps' counts equal the simulation's on every stage */
    int bytes_agree;   /* the device bytes for streams equal the memory model's */
    int ok;
} verdict;

/* Returns the most chunks of this stage whose inputs are kept at one time. The first virtual stage's inputs are token
   ids, which stay with the batch. */
static int64_t most_kept_inputs(const stage_process *p) {
    int64_t kept = 0, most = 0;
    for (int64_t i = p->schedule->first[process]; i < p->schedule->first[process + 1]; i++) {
        const cf_action *a = &p->schedule->actions[i];
        if (a->stage == 0 || p->schedule->shape.replay != CF_REPLAY_LOCAL) continue;
        kept += (a->pass == CF_F && !a->keep) - (a->pass == CF_R);
        most = max_of(most, kept);
    }
    return most;
}

/* Returns whether the ring and the slots of kept inputs have the bytes of the memory model for a stage with a
   state_window. Slots have room for any chunk, so each kept input counts ChunkSize tokens. */
static int streamed_bytes_agree(const stage_process *p) {
    const stage_runner *r = &p->runner;
    const model_config *c = r->config;
    cf_model model = {0};
    cf_memory_desc sizing = {0};
    cf_memory_load load = {0};
    cf_memory_report report;
    if (r->stream_bytes == 0) return 1;
    model.layers = c->layers;
    model.hidden = c->hidden;
    model.heads = c->heads;
    model.kv_heads = c->kv_heads;
    model.ffn = c->ffn;
    model.vocab = c->vocabulary;
    sizing.model = &model;
    sizing.activation_bytes = sizing.state_bytes = sizing.state_gradient_bytes = (int64_t)sizeof(real);
    sizing.state_window = STREAM_SLOTS * stream_block_rows(stream_width_of(c), r->stream_bytes);
    load.chunk_tokens = r->plan->chunk_size;
    /* any positive number: only the ring's existence matters */
    load.state_tokens = load.state_gradient_tokens = r->n_states;
    load.input_tokens = most_kept_inputs(p) * r->plan->chunk_size;
    if (cf_memory_estimate(&sizing, &load, 1, &report, 1, NULL) != CF_OK) return 0;
    int64_t ring = c->kinds.n_pattern == 0 ? report.state + report.state_gradient : r->stream.bytes; /* layers alike */
    return r->meter.peak[MEMORY_STATE] == ring && r->meter.peak[MEMORY_INPUTS] == report.inputs;
}

/* Compares, on every stage, the gradients of its own parameters. All processes get the same verdict. */
static verdict judge(const stage_process *p, const reference *right, const cf_timeline *simulated) {
    const cf_steps *steps = p->runner.steps;
    const weights *gradient = p->runner.gradient;
    const model_config *config = p->runner.config;
    struct {
        double difference;
        int process;
    } own = {0, process}, worst;
    verdict v = {p->runner.loss, 0, -1, 0, 0, 0, 0};
    int64_t n_wanted = gradient->n_tensors + (reads_embedding_twice(config) && head_process(p->schedule) > 0);
    v.loss += balance_loss(&p->runner.routing, config);
    MPI_Allreduce(MPI_IN_PLACE, &v.loss, 1, MPI_DOUBLE, MPI_SUM, pipeline);
    MPI_Allreduce(MPI_IN_PLACE, &v.loss, 1, MPI_DOUBLE, MPI_SUM, replicas);
    own.difference = relative_difference_of_losses(v.loss, right->loss);
    for (int64_t i = 0; i < gradient->n_tensors; i++) {
        const tensor *t = &gradient->tensors[i];
        if (!stage_has_tensor(config, p->schedule, process, gradient, t)) continue;
        v.n_compared++;
        double d = relative_difference(gradient->flat + t->offset, right->gradient.flat + t->offset, t->count);
        if (d > own.difference) {
            own.difference = d;
            v.tensor = i;
        }
    }
    MPI_Allreduce(&own, &worst, 1, MPI_DOUBLE_INT, MPI_MAXLOC, pipeline);
    v.difference = worst.difference;
    MPI_Bcast(&v.tensor, 1, MPI_INT64_T, worst.process, pipeline);
    MPI_Allreduce(MPI_IN_PLACE, &v.n_compared, 1, MPI_INT64_T, MPI_SUM, pipeline);
    v.peaks_agree = p->runner.peak_outputs == p->runner.n_outputs && steps->n_slots == simulated->peak_live[process] &&
                    steps->peak_tokens == simulated->peak_tokens[process] &&
                    steps->peak_state_tokens == simulated->peak_state_tokens[process];
    MPI_Allreduce(MPI_IN_PLACE, &v.peaks_agree, 1, MPI_INT, MPI_LAND, pipeline);
    v.bytes_agree = streamed_bytes_agree(p);
    MPI_Allreduce(MPI_IN_PLACE, &v.bytes_agree, 1, MPI_INT, MPI_LAND, pipeline);
    v.ok = is_rounding(v.difference) && v.n_compared == n_wanted && v.peaks_agree && v.bytes_agree;
    MPI_Allreduce(MPI_IN_PLACE, &v.ok, 1, MPI_INT, MPI_LAND, replicas);
    return v;
}

/* ================================================================================================================
   >>report    what process 0 prints
   ================================================================================================================ */

static void print_plan(const settings *s, const cf_plan *plan, const batch *b) {
    cf_plan_stats stats;
    cf_plan_measure(plan, NULL, &stats);
    printf("pipeline " REAL_NAME ": %d processes, %lld layers, %s sends; %lld sequences, %lld tokens in %lld rows, "
           "%lld targets in %lld chunks of %lld, longest chain %lld, %lld hybrid\n",
           n_processes, (long long)s->model.layers, s->rendezvous ? "rendezvous" : "non-blocking", (long long)b->count,
           (long long)b->n_tokens, (long long)stats.rows, (long long)b->n_targets, (long long)plan->n_chunks,
           (long long)plan->chunk_size, (long long)stats.longest_chain, (long long)stats.n_hybrid);
    if (n_ranks > 1) {
        int64_t widest = 0;
        for (int64_t i = 0; i < plan->n_chunks; i++) widest = max_of(widest, plan->chunks[i].cp);
        printf("ranks %d, cp groups of up to %lld\n", n_ranks, (long long)widest);
    }
}

static void print_schedule(const cf_schedule *schedule, const cf_schedule *lowered) {
    int64_t n_sends = count_actions(lowered, CF_SEND_F) + count_actions(lowered, CF_SEND_R) +
                      count_actions(lowered, CF_SEND_B);
    printf("schedule %s, %s replay, K %lld, %lld virtual stages on each%s: %lld passes, %lld replays, %lld tensors "
           "sent\n",
           cf_schedule_kind_name(schedule->kind), cf_replay_name(schedule->shape.replay), (long long)schedule->shape.k,
           (long long)schedule->shape.n_virtual, schedule->shape.placement == CF_PLACEMENT_V ? " in a V" : "",
           (long long)schedule->n_actions, (long long)count_actions(schedule, CF_R), (long long)n_sends);
}

static void print_timeline(const char *name, const cf_timeline *t, const char *unit) {
    printf("  %-30s %12.6g %-8s %6.2f %%  %6.2f %%\n", name, t->makespan, unit, 100 * t->bubble_useful,
           100 * t->bubble_busy);
}

static void print_stages(const stage_process *p, const cf_timeline *simulated, const cf_timeline *measured) {
    double own[2] = {0, p->waited}, *all = TAKE(double, 2 * n_processes);
    int64_t sent = p->transport.n_sent, *all_sent = TAKE(int64_t, n_processes);
    for (int64_t i = 0; i < p->n_timed; i++) own[0] += p->end[i] - p->start[i];
    MPI_Gather(own, 2, MPI_DOUBLE, all, 2, MPI_DOUBLE, 0, pipeline);
    MPI_Gather(&sent, 1, MPI_INT64_T, all_sent, 1, MPI_INT64_T, 0, pipeline);
    if (process == 0) {
        printf("  stage  passes   sends  chunks kept (simulated)  state tokens (simulated)  busy, waiting (ms)\n");
        for (int64_t s = 0; s < n_processes; s++) {
            printf("  %5lld  %6lld  %6lld  %11lld %11lld  %12lld %11lld  %10.3f %8.3f\n", (long long)s,
                   (long long)n_actions_of(p->schedule, s), (long long)all_sent[s], (long long)measured->peak_live[s],
                   (long long)simulated->peak_live[s], (long long)measured->peak_state_tokens[s],
                   (long long)simulated->peak_state_tokens[s], 1e3 * all[2 * s], 1e3 * all[2 * s + 1]);
        }
    }
    free(all);
    free(all_sent);
}

static void print_streams(const stage_process *p) {
    const int64_t *peak = p->runner.meter.peak;
    int64_t own[3] = {peak[MEMORY_STATE], peak[MEMORY_INPUTS], peak[MEMORY_HOST]};
    int64_t *all = TAKE(int64_t, 3 * n_processes);
    MPI_Gather(own, 3, MPI_INT64_T, all, 3, MPI_INT64_T, 0, pipeline);
    for (int64_t s = 0; s < n_processes && process == 0 && p->runner.stream_bytes > 0; s++) {
        printf("  stage %lld streams: a ring of %lld bytes, kept inputs in %lld, %lld in host memory\n", (long long)s,
               (long long)all[3 * s], (long long)all[3 * s + 1], (long long)all[3 * s + 2]);
    }
    free(all);
}

static void print_verdict(const verdict *v, const reference *right) {
    printf("loss %.9f, unchunked %.9f\n", v->loss, right->loss);
    if (!v->bytes_agree) printf("NOT OK: a stage streams through other bytes than the memory model says\n");
    if (!v->peaks_agree) printf("NOT OK: a stage kept another number of chunks or tokens than was simulated\n");
    printf("largest relative difference %.2e (%s), limit %.0e: %s\n", v->difference,
           v->tensor < 0 ? "loss" : right->gradient.tensors[v->tensor].name, CHECK_LIMIT,
           v->ok ? "ok, it is rounding" : "NOT OK");
}

/* A schedule of a sweep. */
static void print_line(const stage_process *p, const verdict *v, const timelines *t) {
    const cf_schedule *schedule = p->schedule;
    printf("%-6s %-11s %-8s K %lld  virtual %lld %s  %3lld replays  difference %.1e  peaks %s  "
           "bubble: unit costs %5.1f %%, costs as measured %5.1f %%, measured %5.1f %% (%.3f ms)\n",
           v->ok ? "ok" : "NOT OK", cf_schedule_kind_name(schedule->kind), cf_replay_name(schedule->shape.replay),
           (long long)schedule->shape.k, (long long)schedule->shape.n_virtual, cf_placement_name(schedule->shape.placement),
           (long long)count_actions(schedule, CF_R), v->difference, v->peaks_agree ? "agree" : "DIFFER",
           100 * t->unit->bubble_useful, 100 * t->fitted->bubble_useful, 100 * t->measured->bubble_useful,
           1e3 * t->measured->makespan);
    fflush(stdout);
}

/* ================================================================================================================
   >>program
   ================================================================================================================ */

/* The data shared by all schedules. */
typedef struct task {
    const settings *settings;
    documents documents;
    batch batch;
    weights weights, gradient;
    reference reference;
    cf_plan *plan;
    uint64_t seed;
    double clock_offset;
} task;

static void task_begin(task *t, const settings *s) {
    cf_error error;
    memset(t, 0, sizeof *t);
    memset(&error, 0, sizeof error);
    t->settings = s;
    t->batch = batch_new(s->lengths.count);
    for (int64_t i = 0; i < s->lengths.count; i++) {
        add_synthetic(&t->documents, s->lengths.lengths[i], mix64_pair((uint64_t)s->seed, 1));
        if (s->with.count > 0) make_alike(&t->documents, i, s->with.lengths[i], s->shared.lengths[i]);
    }
    for (int64_t i = 0; i < s->lengths.count; i++) batch_put(&t->batch, i, &t->documents, i, s->prompt, 0);
    if (t->batch.n_targets == 0) fail(EXIT_BAD_INPUT, "the batch has no target tokens, so there is nothing to check");
    t->batch.shared_mean = s->shared_mean;
    if (pack_batch(&s->packing, s->share, &t->batch, &t->plan, &error) != CF_OK) {
        fail(EXIT_BAD_INPUT, "%s", error.text);
    }
    t->weights = weights_new(&s->model);
    t->gradient = weights_new(&s->model);
    if (t->weights.count > INT_MAX) fail(EXIT_BAD_INPUT, "the model is too large for this example");
    weights_init(&t->weights, &s->model, mix64_pair((uint64_t)s->seed, 2), 0.1);
    t->seed = mix64_pair((uint64_t)s->seed, 3);
    t->reference = reference_new(s, &t->weights, &t->batch, t->seed);
    t->clock_offset = agreed_clock_offset();
}

static void task_end(task *t) {
    cf_plan_free(t->plan);
    weights_free(&t->reference.gradient);
    weights_free(&t->weights);
    weights_free(&t->gradient);
    batch_free(&t->batch);
    documents_free(&t->documents);
}

static void stage_process_begin(stage_process *p, task *t, const cf_schedule *schedule, const cf_schedule *lowered,
                                const cf_steps *steps) {
    const settings *s = t->settings;
    cf_error error;
    memset(p, 0, sizeof *p);
    memset(&error, 0, sizeof error);
    if (stage_runner_begin(&p->runner, &s->model, t->plan, lowered, steps, &t->batch, s->stream, s->outputs, &error) !=
        CF_OK) {
        fail(EXIT_BAD_INPUT, "%s", error.text);
    }
    p->runner.weights = &t->weights;
    p->runner.gradient = &t->gradient;
    p->runner.seed = t->seed;
    p->runner.group.add_up = add_up;
    p->fault = find_fault(s->fault, lowered);
    p->schedule = schedule;
    p->start = TAKE(double, n_actions_of(schedule, process));
    p->end = TAKE(double, n_actions_of(schedule, process));
    p->live = TAKE(int, n_actions_of(schedule, process));
    p->clock_offset = t->clock_offset;
    transport_begin(&p->transport, lowered, p->runner.boundary_count, s->rendezvous);
}

static void stage_process_end(stage_process *p) {
    transport_end(&p->transport);
    stage_runner_end(&p->runner);
    free(p->start);
    free(p->end);
    free(p->live);
}

/* Reports on one schedule; every process must call it. Returns whether process 0's files were written. */
static int report(const task *t, const stage_process *p, const timelines *lines, const verdict *v) {
    const settings *s = t->settings;
    if (process == 0) {
        print_plan(s, t->plan, &t->batch);
        print_schedule(p->schedule, p->runner.schedule);
    }
    print_stages(p, lines->unit, lines->measured);
    print_streams(p);
    if (process > 0) return 1;
    printf("  %-30s %12s %-8s %s\n", "", "makespan", "", "bubble with R as waste, as work");
    print_timeline("simulated, unit costs", lines->unit, "units");
    print_timeline("simulated, costs as measured", lines->fitted, "s");
    print_timeline("measured", lines->measured, "s");
    print_verdict(v, &t->reference);
    return write_json(s->plan, t->plan, NULL, NULL) & write_json(s->timeline, NULL, p->schedule, lines->measured) &
           write_json(s->simulated, NULL, p->schedule, lines->fitted);
}

/* Runs one schedule and reports. Returns whether everything succeeded. */
static int run_schedule(task *t, const cf_schedule *schedule, const cf_schedule *lowered, const cf_steps *steps) {
    const settings *s = t->settings;
    stage_process p;
    timelines lines;
    stage_process_begin(&p, t, schedule, lowered, steps);
    for (int64_t i = 0; i < s->repeat; i++) {
        weights_clear(&t->gradient);
        run_stage(&p);
    }
    MPI_Allreduce(MPI_IN_PLACE, t->gradient.flat, (int)t->gradient.count, MPI_REAL_NUMBER, MPI_SUM, replicas);
    sum_tied_embedding(&s->model, p.schedule, &t->gradient);
    lines.unit = simulate(t->plan, schedule, NULL);
    lines.fitted = simulate_as_measured(&p);
    lines.measured = measured_timeline(&p);
    verdict v = judge(&p, &t->reference, lines.unit);
    if (!s->sweep) v.ok &= report(t, &p, &lines, &v);
    else if (process == 0) print_line(&p, &v, &lines);
    cf_timeline_free(lines.unit);
    cf_timeline_free(lines.fitted);
    cf_timeline_free(lines.measured);
    stage_process_end(&p);
    return v.ok;
}

/* Makes a schedule and the same one lowered: with several ranks this rank's, of a list that all run in lockstep. */
static cf_result make_lists(const cf_plan *plan, const cf_schedule_desc *desc, cf_schedule **schedule,
                              cf_schedule **lowered, cf_error *error) {
    cf_plan *columns = NULL;
    cf_schedule *list = NULL, *list_lowered = NULL;
    cf_result result = CF_OK;
    if (n_ranks == 1) {
        result = cf_schedule_make(plan, desc, schedule, error);
        return result == CF_OK ? cf_schedule_lower(plan, *schedule, NULL, lowered, error) : result;
    }
    result = cf_lockstep_plan(plan, NULL, NULL, &columns, error);
    if (result == CF_OK) result = cf_schedule_make(columns, desc, &list, error);
    if (result == CF_OK) result = cf_schedule_lower(columns, list, NULL, &list_lowered, error);
    if (result == CF_OK) result = cf_lockstep_schedule(plan, list, rank, NULL, schedule, error);
    if (result == CF_OK) result = cf_lockstep_schedule(plan, list_lowered, rank, NULL, lowered, error);
    cf_schedule_free(list_lowered);
    cf_schedule_free(list);
    cf_plan_free(columns);
    return result;
}

/* Makes one schedule, adds its transfers, checks it and runs it. CF_OK: it ran, and *ok has the verdict. */
static cf_result try_schedule(task *t, const cf_schedule_desc *order, int *ok, cf_error *error) {
    cf_schedule *schedule = NULL, *lowered = NULL;
    cf_steps *steps = NULL;
    cf_schedule_desc desc = *order;
    desc.shape.n_stages = n_processes;
    cf_result result = make_lists(t->plan, &desc, &schedule, &lowered, error);
    if (result == CF_OK) result = cf_schedule_validate(t->plan, lowered, NULL, NULL, error);
    if (result == CF_OK) result = cf_steps_make(t->plan, lowered, process, t->seed, NULL, &steps, error);
    if (result == CF_OK) *ok = run_schedule(t, schedule, lowered, steps);
    cf_steps_free(steps);
    cf_schedule_free(lowered);
    cf_schedule_free(schedule);
    return result;
}

/* Runs one schedule of a sweep. One that the library refuses, for example because of a limit, is skipped with its
   reason. */
static int run_sweep_item(task *t, const cf_schedule_desc *order) {
    cf_error error;
    int ok = 1;
    memset(&error, 0, sizeof error);
    cf_result result = try_schedule(t, order, &ok, &error);
    if (result == CF_ERROR_MEMORY) fail(EXIT_CHECK_FAILED, "%s", error.text);
    if (result != CF_OK && process == 0) {
        printf("skipped %s %s K %lld: %s\n", cf_schedule_kind_name(order->kind), cf_replay_name(order->shape.replay),
               (long long)order->shape.k, error.text);
    }
    return ok;
}

/* Runs one kind of schedule with the replays that it supports, and K from 1 to the option's. */
static int run_sweep_of(task *t, cf_schedule_kind kind, int64_t n_virtual, cf_placement placement) {
    const settings *s = t->settings;
    cf_schedule_desc order = s->order;
    int ok = 1;
    order.kind = kind;
    order.split_backward = s->order.split_backward && kind >= CF_SCHEDULE_ZERO_BUBBLE;
    order.shape.n_virtual = n_virtual;
    order.shape.placement = placement;
    if (n_virtual > 1 && (n_processes == 1 || n_virtual > s->model.layers / n_processes)) {
        if (process == 0) printf("skipped %s: too few processes or layers\n", cf_schedule_kind_name(kind));
        return 1;
    }
    const int both = kind == CF_SCHEDULE_PAPER && !s->outputs; /* outputs need local replay */
    for (int replay = both ? CF_REPLAY_PIPELINE : CF_REPLAY_LOCAL; replay < CF_REPLAY_COUNT; replay++) {
        order.shape.replay = (cf_replay)replay;
        for (order.shape.k = 1; order.shape.k <= s->order.shape.k; order.shape.k++) ok = run_sweep_item(t, &order) && ok;
    }
    return ok;
}

/* Runs every kind of schedule; those that can also run on two virtual stages in a V. */
static int run_sweep(task *t) {
    int ok = 1;
    for (int i = CF_SCHEDULE_PAPER; i < CF_SCHEDULE_COUNT; i++) {
        cf_schedule_kind kind = (cf_schedule_kind)i;
        int64_t n_virtual = kind == CF_SCHEDULE_INTERLEAVED ? virtual_stages(t->settings, kind) : 1;
        ok = run_sweep_of(t, kind, n_virtual, CF_PLACEMENT_LOOP) && ok;
        if (kind > CF_SCHEDULE_INTERLEAVED) ok = run_sweep_of(t, kind, 2, CF_PLACEMENT_V) && ok;
    }
    return ok;
}

static int run(const settings *s) {
    task t;
    int ok = 0;
    task_begin(&t, s);
    if (s->sweep) {
        if (process == 0) print_plan(s, t.plan, &t.batch);
        ok = run_sweep(&t);
    } else {
        cf_error error;
        memset(&error, 0, sizeof error);
        cf_result result = try_schedule(&t, &s->order, &ok, &error);
        if (result != CF_OK) {
            fail(result == CF_ERROR_MEMORY ? EXIT_CHECK_FAILED : EXIT_BAD_INPUT, "%s", error.text);
        }
    }
    task_end(&t);
    return ok ? 0 : EXIT_CHECK_FAILED;
}

/* MPI installs handlers that print a trace of a crash, which allocates memory. A process that crashed inside malloc
   would then wait forever, and all other processes with it. This restores the default, so that it dies. */
static void crash_at_once(void) {
    static const int signals[] = {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    for (size_t i = 0; i < sizeof signals / sizeof signals[0]; i++) signal(signals[i], SIG_DFL);
}

int main(int argc, char **argv) {
    int code = 0;
    MPI_Init(&argc, &argv);
    crash_at_once();
    pipeline = MPI_COMM_WORLD;
    MPI_Comm_rank(pipeline, &process);
    MPI_Comm_size(pipeline, &n_processes);
    settings s = parse_settings(argc, argv);
    if (!s.help) code = run(&s);
    else if (process == 0) print_help(&s);
    free(s.lengths.lengths);
    free(s.with.lengths);
    free(s.shared.lengths);
    if (fflush(stdout) != 0 || ferror(stdout)) { /* a normal end, for the reason at write_json */
        fprintf(stderr, "pipeline_mpi: standard output cannot be written\n");
        code = EXIT_CHECK_FAILED;
    }
    MPI_Finalize();
    return code;
}
