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
    else snprintf(text, size, "%s kept tokens on the fullest stage", pipeline_share(most, s->schedule->shape.n_virtual));
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

/* What may be done about idle time: by whom the setting was chosen, and where the tuner has chosen it, by whoever asks
   it. IDLE_ORDER depends on more, and `also` says what not every set-up has. */
static const struct {
    const char *plain, *tuned;
} remedies[IDLE_CAUSE_COUNT] = {
    {"the pipeline fills: more chunks (a smaller --chunk-size, a larger batch) or fewer stages make it matter less",
     "the pipeline fills: a larger --batch or fewer stages (--pp) make it matter less"},
    {"the pipeline empties: more chunks (a smaller --chunk-size, a larger batch) or fewer stages make it matter less",
     "the pipeline empties: a larger --batch or fewer stages (--pp) make it matter less"},
    {"passes that could run have not begun: launches and the host; fewer, larger chunks or CUDA graphs",
     "passes that could run have not begun: launches and the host; CUDA graphs"},
    {"", ""},
    {"there is no room for another chunk: a larger --limit or --k, a smaller --chunk-size, or more --recompute to pay "
     "for them",
     "there is no room for another chunk within the GPU's memory: more --recompute, or more tensor parallelism (--tp), "
     "may pay"},
    {"results are on their way: a faster link, larger chunks, or fewer stages",
     "results are on their way: a faster link, or fewer stages (--pp)"},
    {"chunks of one long sequence wait for each other: more other sequences beside it, or a larger --chunk-size so "
     "that "
     "it has fewer chunks",
     "chunks of one long sequence wait for each other: more other sequences beside it (--batch)"},
    {"some passes are longer than others of their kind: even out the chunks (--split cost)",
     "some passes are longer than others of their kind"},
    {"backwards wait for their gradient from the stage behind: more chunks under way (a larger --limit) would fill "
     "that",
     "backwards wait for their gradient from the stage behind: more chunks under way would fill that, which takes "
     "memory "
     "(more --recompute, --tp)"},
    {"forwards wait for the stage before: it is slower or busy with backwards",
     "forwards wait for the stage before: it is slower or busy with backwards"}};

/* How much shorter than a schedule any other of these passes might be. */
static double slack_of(const report_schedule *s) {
    double makespan = s->timeline->makespan;
    return makespan > 0 && s->timeline->bound < makespan ? 1 - s->timeline->bound / makespan : 0;
}

/* "Order" is a reproach to a fixed order; the search that chose this one may have had its reasons. */
static void say_order(const report_schedule *s, char *text, size_t size) {
    double slack = 100 * slack_of(s);

    if (slack < 1)
        snprintf(text, size, "a pass that could run stands behind one that waits, but that costs little: no order of "
                             "these "
                 "passes is shorter by more than %.1f %%", slack);
    else if (s->schedule->kind == CF_SCHEDULE_BEST)
        snprintf(text, size, "best has left a pass that could run behind one that waits; a larger --budget looks at "
                             "more "
                 "orders, and no order is shorter by more than %.1f %%", slack);
    else
        snprintf(text, size, "%s has a fixed order, in which a pass that could run stands behind one that waits; "
                             "best has "
                 "found nothing shorter, which a larger --budget may: no order is shorter by more than %.1f %%",
                 cf_schedule_kind_name(s->schedule->kind), slack);
}

static void add_causes(const report_schedule *s, double sum[IDLE_CAUSE_COUNT]) {
    int64_t stage;
    int cause;

    for (stage = 0; stage < s->schedule->shape.n_stages; stage++)
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

static int has_cut_backwards(const cf_schedule *schedule) {
    int64_t i;

    for (i = 0; i < schedule->n_actions; i++)
        if (schedule->actions[i].pass == CF_W) return 1;
    return 0;
}

/* Whether a stage keeps all chunks at once, so that no limit holds any back. */
static int keeps_all(const report *r, const report_schedule *s) {
    int64_t stage, most = 0;

    for (stage = 0; stage < s->timeline->n_stages; stage++)
        if (s->timeline->peak_live[stage] > most) most = s->timeline->peak_live[stage];
    return most >= r->packed->plan->n_steps * s->schedule->shape.n_virtual;
}

/* Whether evener stages may pay: layers to move want a model, and where this was tried it is known. */
static int may_move_layers(const report *r) {
    int i, pays = r->n_tries == 0;

    for (i = 0; i < r->n_tries; i++) pays |= r->tries[i].pays && strstr(r->tries[i].options, "--stage-layers");
    return r->pipe->has_model && pays;
}

/* What may be done besides, where it can be. */
static const char *also(const report *r, const report_schedule *s, int cause) {
    if ((cause == IDLE_WARM_UP || cause == IDLE_DRAIN) && s->schedule->shape.n_virtual == 1)
        return ", and so do virtual stages (--virtual 2)";
    if ((cause == IDLE_IMBALANCE || cause == IDLE_ACTIVATION) && may_move_layers(r))
        return "; even out the stages (--stage-layers)";
    if (cause == IDLE_GRADIENT && !has_cut_backwards(s->schedule))
        return r->tuned ? ", and so would weight gradients that are cut off (--split-backward)"
                        : ", and so would weight gradients that are cut off (best, I + W)";
    return "";
}

static void say_remedy(const report *r, const report_schedule *s, int cause, char *text, size_t size) {
    const char *remedy = r->tuned ? remedies[cause].tuned : remedies[cause].plain;

    if (cause == IDLE_ORDER) {
        say_order(s, text, size);
        return;
    }
    if (cause == IDLE_GRADIENT && keeps_all(r, s))
        remedy = r->tuned ? "backwards wait for their gradient from the stage behind: more chunks (a larger --batch) "
                            "would fill that"
                          : "backwards wait for their gradient from the stage behind: more chunks (a smaller "
                            "--chunk-size, a larger batch) would fill that";
    snprintf(text, size, "%s%s", remedy, also(r, s, cause));
}

static int say_cause(const report *r, const report_schedule *s, int rank, char *text, size_t size) {
    double sum[IDLE_CAUSE_COUNT] = {0}, whole = (double)s->schedule->shape.n_stages * s->timeline->makespan;
    char remedy[512];
    int cause;

    add_causes(s, sum);
    cause = cause_ranked(sum, rank);
    if (cause < 0 || !(sum[cause] >= 0.001 * whole)) return 0;
    say_remedy(r, s, cause, remedy, sizeof remedy);
    snprintf(text, size, "%.1f %% of all stage time is idle, cause %s: %s.", 100 * sum[cause] / whole,
             idle_cause_name((idle_cause)cause), remedy);
    return 1;
}

/* Where all of the time goes, and how much of it an order of the passes could win back at all. */
static int say_whole(const report *r, const report_schedule *s, char *text, size_t size) {
    double whole = (double)s->schedule->shape.n_stages * s->timeline->makespan, replays, idle;
    char bound[128] = "";

    if (!(whole > 0)) return 0;
    replays = s->timeline->replayed / whole;
    idle = 1 - s->timeline->busy / whole;
    if (s->timeline->bound > 0 && slack_of(s) < 0.0005)
        snprintf(bound, sizeof bound, "; no order of these passes takes less time");
    else if (s->timeline->bound > 0)
        snprintf(bound, sizeof bound, "; no order of these passes takes less than %s %s, %.1f %% less",
                 pipeline_time(s->timeline->bound), pipeline_unit(r->pipe->unit_cost), 100 * slack_of(s));
    snprintf(text, size, "Of all stage time in %s, %.1f %% is useful work, %.1f %% replays and %.1f %% "
                         "idle%s.", s->name,
             100 * (1 - replays - idle), 100 * replays, 100 * (idle > 0 ? idle : 0), bound);
    return 1;
}

static const char *largest_term(const cf_memory_report *m, int64_t *bytes) {
    const char *name = "";

    *bytes = -1;
#define LARGER_TERM(member, words) \
    if (m->member > *bytes) {      \
        *bytes = m->member;        \
        name = words;              \
    }
    CF_MEMORY_TERMS(LARGER_TERM)
#undef LARGER_TERM
    return name;
}

/* What limits memory, and what is left of it. What the tuner has filled needs no advice. */
static int say_memory(const report *r, const report_schedule *s, char *text, size_t size) {
    const cf_memory_report *m;
    int64_t most, room, live;
    const char *name;
    char rest[256] = "";

    if (!s->memory) return 0;
    m = &s->memory[s->fullest];
    name = largest_term(m, &most);
    if (!r->pipe->estimates) {
        snprintf(text, size, "Memory: stage %lld holds the most, %.2f GiB; its largest term is %s, %.2f GiB.",
                 (long long)s->fullest, modelling_gib(m->total), name, modelling_gib(most));
        return 1;
    }
    room = report_room(r, s->schedule, s->timeline, m, s->fullest, &live);
    if (!r->tuned && room > 0 && !keeps_all(r, s))
        snprintf(rest, sizeof rest, " It keeps %lld chunks at once and has room for %s more: the limit of chunks, "
                                    "not the "
                 "GPU, is what holds it down (--limit %lld, or a larger --k).",
                 (long long)live, cli_commas(room), (long long)(live + room));
    snprintf(text, size, "Memory: stage %lld holds the most, %.2f of the GPU's %.2f GiB; its largest term is %s, "
                         "%.2f GiB.%s",
             (long long)s->fullest, modelling_gib(m->total), modelling_gib(r->pipe->gpu.memory), name,
             modelling_gib(most), rest);
    return 1;
}

static int say_replays(const report *r, const report_schedule *s, char *text, size_t size) {
    double share = s->timeline->busy > 0 ? s->timeline->replayed / s->timeline->busy : 0;
    cf_plan_stats stats;

    if (!(share >= 0.001)) return 0;
    cf_plan_measure(r->packed->plan, NULL, &stats);
    if (r->tuned)
        snprintf(text, size, "%.1f %% of the work is replays of dropped chunks, which the search found cheaper than "
                             "what "
                 "else fits: only memory changes that (more --recompute, --tp).", 100 * share);
    else
        snprintf(text, size, "%.1f %% of the work is replays of dropped chunks: a larger --k (here up to %lld, the "
                             "chunks "
                 "of the longest sequence) or --limit drops fewer, and holds more.", 100 * share,
                 (long long)stats.largest_group);
    return 1;
}

static double stage_work(const report_schedule *s, int64_t stage) {
    double work = s->timeline->makespan;
    int cause;

    for (cause = 0; cause < IDLE_CAUSE_COUNT; cause++) work -= s->idle.stages[stage].seconds[cause];
    return work;
}

/* Where a stage has more work than others: however the passes are ordered, all wait for it. */
static int say_uneven(const report *r, const report_schedule *s, char *text, size_t size) {
    double most = 0, mean = s->timeline->busy / (double)s->schedule->shape.n_stages;
    int64_t stage, busiest = 0;

    for (stage = 0; stage < s->schedule->shape.n_stages; stage++) {
        double work = stage_work(s, stage);
        if (work <= most) continue;
        most = work;
        busiest = stage;
    }
    if (!(most > 1.05 * mean)) return 0;
    snprintf(text, size,
             "Stage %lld has %.2f times the mean stage's work, %s %s; whatever the order of the passes, the others "
             "wait for it%s.", (long long)busiest, most / mean, pipeline_time(most), pipeline_unit(r->pipe->unit_cost),
             may_move_layers(r) ? ": even out the stages (--stage-layers)" : "");
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

/* What of the options that were tried pays, all together. */
static int say_tried(const report *r, const report_schedule *s, char *text, size_t size) {
    const report_try *best = NULL;
    int i;

    for (i = 0; i < r->n_tries; i++)
        if (r->tries[i].pays) best = &r->tries[i];
    if (r->n_tries == 0) return 0;
    if (best)
        snprintf(text, size, "What pays, of what was tried: %s takes %s %s, %.1f %% less, in %.2f GiB.", best->options,
                 pipeline_time(best->makespan), pipeline_unit(r->pipe->unit_cost),
                 100 * (1 - best->makespan / s->timeline->makespan), modelling_gib(best->memory));
    else snprintf(text, size, "Nothing that was tried pays: neither a larger --k or --limit nor other --stage-layers.");
    return 1;
}

/* In the order of what matters: all of it, what pays, what no order can mend, the causes, what memory costs. */
int report_advice(const report *r, int i, char *text, size_t size) {
    const report_schedule *s = r->best >= 0 ? &r->schedules[r->best] : NULL;
    int rank;

    if (!s) return 0;
    if (say_unsplit(r, s, text, size) && i-- == 0) return 1;
    if (say_whole(r, s, text, size) && i-- == 0) return 1;
    if (say_tried(r, s, text, size) && i-- == 0) return 1;
    if (say_uneven(r, s, text, size) && i-- == 0) return 1;
    for (rank = 0; rank < 3; rank++)
        if (say_cause(r, s, rank, text, size) && i-- == 0) return 1;
    if (say_replays(r, s, text, size) && i-- == 0) return 1;
    return say_memory(r, s, text, size) && i == 0;
}
