/* report_words.c - a report in words: what was gained, and what stands in the way of more. */

#include "report.h"

#include <string.h>

/* ----------------------------------------------------------------------------------------------------------------
   What was gained
   ---------------------------------------------------------------------------------------------------------------- */

/* "0.72 s", and "15.95 GiB on the fullest GPU" or "8 kept tokens on the fullest stage". */
static void say_time(const report *r, const report_schedule *s, char *text, size_t size) {
    snprintf(text, size, "%s %s", pipeline_time(s->timeline->makespan), pipeline_unit(r->pipe->unit_cost));
}

static void say_held(const report_schedule *s, char *text, size_t size) {
    int64_t stage, most = 0;

    for (stage = 0; s->timeline->peak_tokens && stage < s->timeline->n_stages; stage++)
        if (s->timeline->peak_tokens[stage] > most) most = s->timeline->peak_tokens[stage];
    if (s->memory) snprintf(text, size, "%.2f GiB on the fullest GPU", modelling_gib(s->memory[s->fullest].total));
    else snprintf(text, size, "%s kept tokens on the fullest stage", pipeline_share(most, s->schedule->n_virtual));
}

static void say_alone(const report *r, const report_schedule *ours, char *text, size_t size) {
    char time[64], held[64];

    say_time(r, ours, time, sizeof time);
    say_held(ours, held, sizeof held);
    snprintf(text, size, "In chunks this batch takes %s (%s) with %s; without them it cannot be run: %s.", time,
             ours->name, held, r->no_baseline);
}

static void say_both(const report *r, const report_schedule *ours, const report_schedule *base, char *text,
                     size_t size) {
    double ratio = ours->timeline->makespan > 0 ? base->timeline->makespan / ours->timeline->makespan : 1;
    char time[64], held[64], time_base[64], held_base[64], recompute[48] = "";

    say_time(r, ours, time, sizeof time);
    say_held(ours, held, sizeof held);
    say_time(r, base, time_base, sizeof time_base);
    say_held(base, held_base, sizeof held_base);
    if (base->memory && base->recompute > CF_RECOMPUTE_NONE)
        snprintf(recompute, sizeof recompute, ", %s recomputation", cf_recompute_name(base->recompute));
    snprintf(text, size, "%s %.2f times as fast (%s, %s, %s) as %s (%s%s, %s).",
             ratio >= 1 ? "In chunks this batch runs" : "Chunks do not pay for this batch, which runs only", ratio,
             time, ours->name, held, base->name, time_base, recompute, held_base);
}

void report_sentence(const report *r, char *text, size_t size) {
    const report_schedule *ours = r->best >= 0 ? &r->schedules[r->best] : NULL;

    if (r->packed->plan->n_tokens == 0) snprintf(text, size, "This batch has no tokens.");
    else if (!ours) snprintf(text, size, "No schedule of these chunks fits on the GPU.");
    else if (r->baseline < 0) say_alone(r, ours, text, size);
    else say_both(r, ours, &r->schedules[r->baseline], text, size);
}

/* ----------------------------------------------------------------------------------------------------------------
   What stands in the way of more
   ---------------------------------------------------------------------------------------------------------------- */

static const char *const remedies[IDLE_CAUSE_COUNT] = {
    "the pipeline fills: more chunks (a smaller --chunk-size, a larger batch), fewer stages, or virtual stages "
    "(--virtual 2) make it matter less",
    "the pipeline empties: more chunks (a smaller --chunk-size, a larger batch), fewer stages, or virtual stages "
    "(--virtual 2) make it matter less",
    "passes that could run have not begun: launches and the host; fewer, larger chunks or CUDA graphs",
    "the schedule puts a pass that could run behind one that waits: let best choose the order, with a larger --budget",
    "there is no room for another chunk: a larger --limit or --k, a smaller --chunk-size, or more --recompute to pay "
    "for them",
    "results are on their way: a faster link, larger chunks, or fewer stages",
    "chunks of one long sequence wait for each other: more other sequences beside it, or a larger --chunk-size so that "
    "it has fewer chunks",
    "some passes are longer than others of their kind: even out the stages (--stage-layers) or the chunks "
    "(--split cost)",
    "backwards wait for their gradient from the stage behind: more chunks under way (a larger --limit), or weight "
    "gradients cut off and used to fill the gaps (best, I + W)",
    "forwards wait for the stage before: it is slower or busy with backwards; even out the stages (--stage-layers)"};

static void add_causes(const report_schedule *s, double sum[IDLE_CAUSE_COUNT]) {
    int64_t stage;
    int cause;

    for (stage = 0; stage < s->schedule->n_stages; stage++)
        for (cause = 0; cause < IDLE_CAUSE_COUNT; cause++) sum[cause] += s->idle.stages[stage].seconds[cause];
}

/* The cause of which `rank` others have more; -1: it has no idle time. */
static int cause_ranked(const double sum[IDLE_CAUSE_COUNT], int rank) {
    int cause, other;

    for (cause = 0; cause < IDLE_CAUSE_COUNT; cause++) {
        int before = 0;
        for (other = 0; other < IDLE_CAUSE_COUNT; other++)
            before += sum[other] > sum[cause] || (sum[other] >= sum[cause] && other < cause);
        if (before == rank) return sum[cause] > 0 ? cause : -1;
    }
    return -1;
}

static int say_cause(const report_schedule *s, int rank, char *text, size_t size) {
    double sum[IDLE_CAUSE_COUNT] = {0}, whole = (double)s->schedule->n_stages * s->timeline->makespan;
    int cause;

    add_causes(s, sum);
    cause = cause_ranked(sum, rank);
    if (cause < 0 || !(sum[cause] >= 0.001 * whole)) return 0;
    snprintf(text, size, "%.1f %% of all stage time is idle, cause %s: %s.", 100 * sum[cause] / whole,
             idle_cause_name((idle_cause)cause), remedies[cause]);
    return 1;
}

static int say_memory(const report *r, const report_schedule *s, char *text, size_t size) {
    const char *name = "";
    int64_t most = -1;
    const cf_memory_report *m;

    if (!s->memory) return 0;
    m = &s->memory[s->fullest];
#define LARGEST_TERM(member, words) \
    if (m->member > most) {         \
        most = m->member;           \
        name = words;               \
    }
    CF_MEMORY_TERMS(LARGEST_TERM)
#undef LARGEST_TERM
    if (r->pipe->estimates)
        snprintf(text, size,
                 "Memory: stage %lld holds the most, %.2f of the GPU's %.2f GiB; its largest term is %s, %.2f GiB.%s",
                 (long long)s->fullest, modelling_gib(m->total), modelling_gib(r->pipe->gpu.memory), name,
                 modelling_gib(most),
                 m->total < r->pipe->gpu.memory / 4 * 3 ? " There is room for a larger --k or --limit." : "");
    else
        snprintf(text, size, "Memory: stage %lld holds the most, %.2f GiB; its largest term is %s, %.2f GiB.",
                 (long long)s->fullest, modelling_gib(m->total), name, modelling_gib(most));
    return 1;
}

static int say_replays(const report_schedule *s, char *text, size_t size) {
    double share = s->timeline->busy > 0 ? s->timeline->replayed / s->timeline->busy : 0;

    if (!(share >= 0.001)) return 0;
    snprintf(text, size, "%.1f %% of the work is replays of dropped chunks: a larger --k or --limit drops fewer, and "
             "holds more.", 100 * share);
    return 1;
}

/* Where a stage has more work than others: however the passes are ordered, all wait for it. */
static int say_uneven(const report *r, const report_schedule *s, char *text, size_t size) {
    double most = 0, mean = s->timeline->busy / (double)s->schedule->n_stages;
    int64_t stage, busiest = 0;
    int cause;

    for (stage = 0; stage < s->schedule->n_stages; stage++) {
        double busy = s->timeline->makespan;
        for (cause = 0; cause < IDLE_CAUSE_COUNT; cause++) busy -= s->idle.stages[stage].seconds[cause];
        if (busy <= most) continue;
        most = busy;
        busiest = stage;
    }
    if (!(most > 1.05 * mean)) return 0;
    snprintf(text, size,
             "Stage %lld has %.2f times the mean stage's work, %s %s, and no order of the passes is shorter: even out "
             "the stages (--stage-layers).",
             (long long)busiest, most / mean, pipeline_time(most), pipeline_unit(r->pipe->unit_cost));
    return 1;
}

/* Where unsplit sequences are faster, why. */
static int say_unsplit(const report *r, const report_schedule *s, char *text, size_t size) {
    const report_schedule *base = r->baseline >= 0 ? &r->schedules[r->baseline] : NULL;
    const cf_plan *plan = r->packed->plan;
    cf_plan_stats stats;
    char *at;

    if (!base || !(base->timeline->makespan < s->timeline->makespan)) return 0;
    cf_plan_measure(plan, NULL, &stats);
    snprintf(text, size, "Unsplit is faster here: %s.",
             packing_why_unsplit(stats.longest_sequence, plan->chunk_size, (double)plan->n_steps, r->pipe->n_stages,
                                 s->timeline->replayed > 0));
    while ((at = strstr(text, "\n                  ")) != NULL) { /* that text is indented for a summary */
        *at = ' ';
        memmove(at + 1, at + 19, strlen(at + 19) + 1);
    }
    return 1;
}

int report_advice(const report *r, int i, char *text, size_t size) {
    const report_schedule *s = r->best >= 0 ? &r->schedules[r->best] : NULL;
    int rank;

    if (!s) return 0;
    if (say_unsplit(r, s, text, size) && i-- == 0) return 1;
    for (rank = 0; rank < 3; rank++)
        if (say_cause(s, rank, text, size) && i-- == 0) return 1;
    if (say_uneven(r, s, text, size) && i-- == 0) return 1;
    if (say_replays(s, text, size) && i-- == 0) return 1;
    return say_memory(r, s, text, size) && i == 0;
}
