/* trace.c - a simulated or measured schedule as a Chrome trace. The format is "Trace Event Format": JSON objects, times
   in microseconds. */

#include "trace.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

typedef struct trace {
    const cf_plan *plan;
    const cf_schedule *schedule;
    const cf_timeline *timeline;
    const int64_t *held;
    held_unit what;
    double nanoseconds; /* of a unit of time */
    FILE *to;
} trace;

/* Rounds a time, always in the same way, so that a pass never overlaps the next one. */
static int64_t to_nanoseconds(const trace *t, double time) {
    return (int64_t)(time * t->nanoseconds + 0.5);
}

static void print_microseconds(const trace *t, const char *name, int64_t nanoseconds) {
    fprintf(t->to, "\"%s\": %lld.%03d", name, (long long)(nanoseconds / 1000), (int)(nanoseconds % 1000));
}

/* Threads are streams: actions of one stream run one after the other. */
static const char *const streams[] = {"compute", "to the next stage", "from the previous stage",
                                      "to the previous stage", "from the next stage"};
#define N_STREAMS 5

/* Returns the index into streams[] of an action. On the way back of a V, activations go to the previous stage. */
static int stream_of(const trace *t, const cf_action *a) {
    int turned = t->schedule->shape.placement == CF_PLACEMENT_V && a->stage / t->schedule->shape.n_stages % 2 == 1;
    int back = turned ? 2 : 0;

    switch (a->pass) {
    case CF_SEND_F: case CF_SEND_R: return 1 + back;
    case CF_RECV_F: case CF_RECV_R: return 2 + back;
    case CF_SEND_B: return 3 - back;
    case CF_RECV_B: return 4 - back;
    default: return 0;
    }
}

/* Prints the names of streams on which the stage has actions. */
static void print_stream_names(const trace *t, int64_t stage) {
    int seen[N_STREAMS] = {0}, stream;
    int64_t i;

    for (i = t->schedule->first[stage]; i < t->schedule->first[stage + 1]; i++)
        seen[stream_of(t, &t->schedule->actions[i])] = 1;
    for (stream = 0; stream < N_STREAMS; stream++)
        if (seen[stream])
            fprintf(t->to,
                    ",\n  {\"name\": \"thread_name\", \"ph\": \"M\", \"pid\": %lld, \"tid\": %d, "
                    "\"args\": {\"name\": \"%s\"}}",
                    (long long)stage + 1, stream + 1, streams[stream]);
}

/* Prints the names of a stage. Perfetto treats process 0 as the idle task, so numbers start at 1. */
static void print_names(const trace *t, int64_t stage) {
    fprintf(t->to,
            "%s\n  {\"name\": \"process_name\", \"ph\": \"M\", \"pid\": %lld, \"args\": {\"name\": \"stage %lld\"}},\n",
            stage > 0 ? "," : "", (long long)stage + 1, (long long)stage);
    fprintf(t->to,
            "  {\"name\": \"process_sort_index\", \"ph\": \"M\", \"pid\": %lld, \"args\": {\"sort_index\": %lld}}",
            (long long)stage + 1, (long long)stage);
    print_stream_names(t, stage);
}

static void print_pass(const trace *t, int64_t stage, int64_t id) {
    const cf_action *a = &t->schedule->actions[id];
    const cf_chunk *chunk = &t->plan->chunks[a->chunk];
    const char *pass = cf_pass_name((cf_pass)a->pass);
    int64_t start = to_nanoseconds(t, t->timeline->start[id]), end = to_nanoseconds(t, t->timeline->end[id]);

    fprintf(t->to, ",\n  {\"name\": \"%s c%d\", \"cat\": \"%s\", \"ph\": \"X\", \"pid\": %lld, \"tid\": %d, ", pass,
            (int)a->chunk, pass, (long long)stage + 1, stream_of(t, a) + 1);
    print_microseconds(t, "ts", start);
    fputs(", ", t->to);
    print_microseconds(t, "dur", end - start);
    fprintf(t->to, ", \"args\": {\"virtual stage\": %d, \"chunk\": %d, \"chain\": %lld, \"index\": %lld, "
                   "\"tokens\": %lld, \"prefix\": %lld",
            (int)a->stage, (int)a->chunk, (long long)chunk->chain, (long long)chunk->index, (long long)chunk->tokens,
            (long long)chunk->prefix);
    if (a->pass <= CF_R) fprintf(t->to, ", \"keep\": %s", a->keep ? "true" : "false");
    fputs("}}", t->to);
}

static void print_counter(const trace *t, const char *name, const char *unit, int64_t stage, double time,
                          int64_t value) {
    fprintf(t->to, ",\n  {\"name\": \"%s\", \"ph\": \"C\", \"pid\": %lld, ", name, (long long)stage + 1);
    print_microseconds(t, "ts", to_nanoseconds(t, time));
    fprintf(t->to, ", \"args\": {\"%s\": %lld}}", unit, (long long)value);
}

static void print_kept(const trace *t, int64_t stage, double time, int64_t chunks) {
    print_counter(t, "kept chunks", "chunks", stage, time, chunks);
}

static void print_held(const trace *t, int64_t stage, double time, int64_t held) {
    int tokens = t->what == HELD_TOKENS;
    print_counter(t, tokens ? "kept tokens" : "memory", tokens ? "tokens" : "bytes", stage, time, held);
}

/* Prints a stage. A counter is written when it changes, and at the end, when nothing is kept. */
static void print_stage(const trace *t, int64_t stage) {
    int64_t first = t->schedule->first[stage], end = t->schedule->first[stage + 1], i, kept = -1, held = -1;
    double last = 0;

    print_names(t, stage);
    for (i = first; i < end && !ferror(t->to); i++) {
        print_pass(t, stage, i);
        if (t->timeline->live[i] != kept) print_kept(t, stage, t->timeline->start[i], t->timeline->live[i]);
        if (t->held[i] != held) print_held(t, stage, t->timeline->start[i], t->held[i]);
        kept = t->timeline->live[i];
        held = t->held[i];
        if (t->timeline->end[i] > last) last = t->timeline->end[i];
    }
    if (end == first) return;
    print_kept(t, stage, last, 0);
    if (t->what != HELD_GPU_BYTES) print_held(t, stage, last, 0);
}

/* ----------------------------------------------------------------------------------------------------------------
   Flows: arrows from pass to pass
   ---------------------------------------------------------------------------------------------------------------- */

/* Positions of the passes, and the current arrow. */
typedef struct flows {
    const trace *t;
    cf_schedule_index *index;
    int64_t n_rows; /* virtual stages of the whole pipeline */
    int64_t id;     /* number of this arrow; they count up */
    int64_t last;   /* the last action on the arrow; -1 before the first */
    int n_steps;
    const char *name;
} flows;

/* Prints one step at the time when its pass starts: an arrow binds to the event that encloses it. */
static void print_flow_step(const flows *f, char phase, int64_t action) {
    const cf_schedule *schedule = f->t->schedule;
    int64_t stage = cf_placement_stage(schedule->shape.placement, schedule->shape.n_stages,
                                       schedule->actions[action].stage);

    fprintf(f->t->to,
            ",\n  {\"name\": \"%s\", \"cat\": \"flow\", \"ph\": \"%c\", \"bp\": \"e\", \"id\": %lld, \"pid\": %lld, "
            "\"tid\": 1, ",
            f->name, phase, (long long)f->id, (long long)stage + 1);
    print_microseconds(f->t, "ts", to_nanoseconds(f->t, f->t->timeline->start[action]));
    fputs("}", f->t->to);
}

static void begin_flow(flows *f, const char *name) {
    f->name = name;
    f->last = -1;
    f->n_steps = 0;
}

/* Adds a step, which is printed once the next one is known, because a single step makes no arrow. */
static void add_flow_step(flows *f, int64_t chunk, int64_t row, cf_pass pass) {
    int64_t action = cf_schedule_find(f->index, pass, chunk, row);

    if (action < 0) return;
    if (f->last >= 0) print_flow_step(f, f->n_steps++ == 0 ? 's' : 't', f->last);
    f->last = action;
}

static void end_flow(flows *f) {
    if (f->n_steps > 0) print_flow_step(f, 'f', f->last);
    f->id += f->n_steps > 0;
}

/* Draws a chunk's path down the pipeline and back, and from each replay to its backward. */
static void print_chunk_flows(flows *f, int64_t chunk) {
    int64_t row;

    begin_flow(f, "activations and gradients");
    for (row = 0; row < f->n_rows; row++) add_flow_step(f, chunk, row, CF_F);
    for (row = f->n_rows - 1; row >= 0; row--) add_flow_step(f, chunk, row, CF_B);
    end_flow(f);
    for (row = 0; row < f->n_rows; row++) {
        if (cf_schedule_find(f->index, CF_R, chunk, row) < 0) continue;
        begin_flow(f, "replay");
        add_flow_step(f, chunk, row, CF_R);
        add_flow_step(f, chunk, row, CF_B);
        end_flow(f);
    }
}

/* Draws the path of K and V from chunk to chunk on each virtual stage, and of their gradients back. */
static void print_state_flow(flows *f, const cf_chain *chain, int64_t row) {
    int64_t i;

    begin_flow(f, "state and its gradient");
    for (i = 0; i < chain->n_chunks; i++) add_flow_step(f, chain->first_chunk + i, row, CF_F);
    for (i = chain->n_chunks - 1; i >= 0; i--) add_flow_step(f, chain->first_chunk + i, row, CF_B);
    end_flow(f);
}

static int print_flows(const trace *t) {
    cf_error error;
    flows f;
    int64_t i, row;

    memset(&f, 0, sizeof f);
    f.t = t;
    f.n_rows = t->schedule->shape.n_stages * t->schedule->shape.n_virtual;
    if (cf_schedule_index_make(t->plan, t->schedule, NULL, &f.index, &error) != CF_OK)
        return cli_failed("--trace: %s", error.text);
    for (i = 0; i < t->plan->n_chunks && !ferror(t->to); i++) print_chunk_flows(&f, i);
    for (i = 0; i < t->plan->n_chains && !ferror(t->to); i++)
        for (row = 0; row < f.n_rows; row++) print_state_flow(&f, &t->plan->chains[i], row);
    cf_schedule_index_free(f.index);
    return CLI_OK;
}

int trace_write(const cf_plan *plan, const cf_schedule *schedule, const cf_timeline *timeline, const int64_t *held,
                held_unit what, double microseconds, cli_output *to) {
    trace t;
    int64_t stage;
    int code;

    t.plan = plan;
    t.schedule = schedule;
    t.timeline = timeline;
    t.held = held;
    t.what = what;
    t.nanoseconds = microseconds * 1000;
    t.to = to->stream;
    if (!(timeline->makespan * t.nanoseconds < 9e18))
        return cli_wrong("--trace: the run would last longer than 9e18 nanoseconds");
    errno = 0;
    fputs("{\"displayTimeUnit\": \"ms\", \"traceEvents\": [", t.to);
    for (stage = 0; stage < schedule->shape.n_stages && !ferror(t.to); stage++) print_stage(&t, stage);
    code = print_flows(&t);
    fputs("\n]}\n", t.to);
    if (ferror(t.to) && to->error == 0) to->error = errno;
    return code;
}
