/* trace.c - a simulated or measured schedule as a Chrome trace. The format: "Trace Event Format", JSON objects, times
   in microseconds. */

#include "trace.h"

#include <errno.h>

typedef struct trace {
    const cf_plan *plan;
    const cf_schedule *schedule;
    const cf_timeline *timeline;
    double nanoseconds; /* of a unit of time */
    FILE *to;
} trace;

/* Rounded the same way wherever it is used, so that a pass never overlaps the next one. */
static int64_t to_nanoseconds(const trace *t, double time) {
    return (int64_t)(time * t->nanoseconds + 0.5);
}

static void print_microseconds(const trace *t, const char *name, int64_t nanoseconds) {
    fprintf(t->to, "\"%s\": %lld.%03d", name, (long long)(nanoseconds / 1000), (int)(nanoseconds % 1000));
}

/* The threads behind those of the virtual stages. What is on one of them runs one after the other. */
static const char *const ways[] = {"to the next stage", "from the previous stage", "to the previous stage",
                                   "from the next stage", "host memory"};
#define N_WAYS 5

/* The place in ways[] of a transfer or copy. Where a V leads back, activations go to the previous stage. */
static int64_t way_of(const trace *t, const cf_action *a) {
    int back = t->schedule->placement == CF_PLACEMENT_V && a->stage / t->schedule->n_stages % 2 == 1 ? 2 : 0;

    switch (a->pass) {
    case CF_SEND_F: case CF_SEND_R: return back;
    case CF_RECV_F: case CF_RECV_R: return 1 + back;
    case CF_SEND_B: return 2 - back;
    case CF_RECV_B: return 3 - back;
    default: return 4;
    }
}

static int64_t thread_of(const trace *t, const cf_action *a) {
    if (a->pass < CF_COMPUTE_PASS_COUNT) return a->stage / t->schedule->n_stages + 1;
    return t->schedule->n_virtual + way_of(t, a) + 1;
}

static void print_thread_name(const trace *t, int64_t stage, int64_t thread, const char *name) {
    fprintf(t->to,
            ",\n  {\"name\": \"thread_name\", \"ph\": \"M\", \"pid\": %lld, \"tid\": %lld, "
            "\"args\": {\"name\": \"%s\"}}",
            (long long)stage + 1, (long long)thread, name);
}

/* Those that the stage has actions on. */
static void print_way_names(const trace *t, int64_t stage) {
    int seen[N_WAYS] = {0}, way;
    int64_t i;

    for (i = t->schedule->first[stage]; i < t->schedule->first[stage + 1]; i++)
        if (t->schedule->actions[i].pass >= CF_COMPUTE_PASS_COUNT) seen[way_of(t, &t->schedule->actions[i])] = 1;
    for (way = 0; way < N_WAYS; way++)
        if (seen[way]) print_thread_name(t, stage, t->schedule->n_virtual + way + 1, ways[way]);
}

/* Perfetto takes process 0 for the idle task, so numbers start at 1. */
static void print_names(const trace *t, int64_t stage) {
    char name[48];
    int64_t v;

    fprintf(t->to,
            "%s\n  {\"name\": \"process_name\", \"ph\": \"M\", \"pid\": %lld, \"args\": {\"name\": \"stage %lld\"}},\n",
            stage > 0 ? "," : "", (long long)stage + 1, (long long)stage);
    fprintf(t->to,
            "  {\"name\": \"process_sort_index\", \"ph\": \"M\", \"pid\": %lld, \"args\": {\"sort_index\": %lld}}",
            (long long)stage + 1, (long long)stage);
    for (v = 0; v < t->schedule->n_virtual; v++) {
        snprintf(name, sizeof name, "virtual stage %lld",
                 (long long)cf_placement_at(t->schedule->placement, t->schedule->n_stages, v, stage));
        print_thread_name(t, stage, v + 1, name);
    }
    print_way_names(t, stage);
}

static void print_pass(const trace *t, int64_t stage, int64_t id) {
    const cf_action *a = &t->schedule->actions[id];
    const cf_chunk *chunk = &t->plan->chunks[a->chunk];
    const char *pass = cf_pass_name((cf_pass)a->pass);
    int64_t start = to_nanoseconds(t, t->timeline->start[id]), end = to_nanoseconds(t, t->timeline->end[id]);

    fprintf(t->to, ",\n  {\"name\": \"%s c%d\", \"cat\": \"%s\", \"ph\": \"X\", \"pid\": %lld, \"tid\": %lld, ", pass,
            (int)a->chunk, pass, (long long)stage + 1, (long long)thread_of(t, a));
    print_microseconds(t, "ts", start);
    fputs(", ", t->to);
    print_microseconds(t, "dur", end - start);
    fprintf(t->to, ", \"args\": {\"chunk\": %d, \"group\": %lld, \"index\": %lld, \"tokens\": %lld, \"prefix\": %lld",
            (int)a->chunk,
            (long long)chunk->group, (long long)chunk->index, (long long)chunk->tokens, (long long)chunk->prefix);
    if (a->pass <= CF_R) fprintf(t->to, ", \"keep\": %s", a->keep ? "true" : "false");
    fputs("}}", t->to);
}

static void print_counter(const trace *t, int64_t stage, int64_t nanoseconds, int64_t kept) {
    fprintf(t->to, ",\n  {\"name\": \"kept chunks\", \"ph\": \"C\", \"pid\": %lld, ", (long long)stage + 1);
    print_microseconds(t, "ts", nanoseconds);
    fprintf(t->to, ", \"args\": {\"chunks\": %lld}}", (long long)kept);
}

/* The counter is written where it changes, and at the end, where nothing is kept. */
static void print_stage(const trace *t, int64_t stage) {
    int64_t first = t->schedule->first[stage], end = t->schedule->first[stage + 1], i, kept = -1;

    print_names(t, stage);
    for (i = first; i < end && !ferror(t->to); i++) {
        print_pass(t, stage, i);
        if (t->timeline->live[i] != kept)
            print_counter(t, stage, to_nanoseconds(t, t->timeline->start[i]), t->timeline->live[i]);
        kept = t->timeline->live[i];
    }
    if (end > first) print_counter(t, stage, to_nanoseconds(t, t->timeline->end[end - 1]), 0);
}

int trace_write(const cf_plan *plan, const cf_schedule *schedule, const cf_timeline *timeline, double microseconds,
                cli_output *to) {
    trace t;
    int64_t stage;

    t.plan = plan;
    t.schedule = schedule;
    t.timeline = timeline;
    t.nanoseconds = microseconds * 1000;
    t.to = to->stream;
    if (!(timeline->makespan * t.nanoseconds < 9e18))
        return cli_wrong("--trace: the run would last longer than 9e18 nanoseconds");
    errno = 0;
    fputs("{\"displayTimeUnit\": \"ms\", \"traceEvents\": [", t.to);
    for (stage = 0; stage < schedule->n_stages && !ferror(t.to); stage++) print_stage(&t, stage);
    fputs("\n]}\n", t.to);
    if (ferror(t.to) && to->error == 0) to->error = errno;
    return CLI_OK;
}
