/* report_words.c - a report in words: the gain, and the obstacles to more. */

#include "report.h"

#include <float.h>
#include <string.h>

/* ----------------------------------------------------------------------------------------------------------------
   What was gained
   ---------------------------------------------------------------------------------------------------------------- */

/* Writes "0.72 s", and "15.95 GiB on the fullest GPU" or "8 kept tokens on the fullest stage". */
static void say_time(const report *r, const report_schedule *s, char *text, size_t size) {
    snprintf(text, size, "%s %s", pipeline_duration(report_seconds(r, s), r->pipe->unit_cost),
             pipeline_unit(r->pipe->unit_cost));
}

/* Returns "an estimated " for seconds. Token times are exact; measured seconds have another sentence. */
static const char *estimated(const report *r) { return r->pipe->unit_cost ? "" : "an estimated "; }

const char *report_rank_words(const report *r) {
    char *text = cli_scratch();

    text[0] = '\0';
    if (r->packed->plan->n_ranks > 1)
        snprintf(text, CLI_SCRATCH_BYTES, ", rank %lld of %lld%s", (long long)r->pipe->rank,
                 (long long)r->packed->plan->n_ranks, r->slowest ? ", the slowest" : " alone");
    return text;
}

static void say_held(const report_schedule *s, char *text, size_t size) {
    int64_t stage, most = 0;

    for (stage = 0; s->timeline->peak_tokens && stage < s->timeline->n_stages; stage++)
        if (s->timeline->peak_tokens[stage] > most) most = s->timeline->peak_tokens[stage];
    if (s->memory) snprintf(text, size, "%.2f GiB on the fullest GPU", modelling_gib(s->memory[s->fullest].total));
    else snprintf(text, size, "%s kept tokens on the fullest stage",
                  pipeline_share(most, s->schedule->shape.n_virtual));
}

static void say_alone(const report *r, const report_schedule *ours, char *text, size_t size) {
    char time[64], held[64];

    say_time(r, ours, time, sizeof time);
    say_held(ours, held, sizeof held);
    snprintf(text, size, "In chunks this batch takes %s%s (%s) with %s; without them it cannot be run: %s.",
             estimated(r), time, ours->name, held, r->no_baseline);
}

/* Writes the baseline's name, time and memory: "1F1B on unsplit sequences (12.6 s, 53.60 GiB on the fullest GPU)".
   Returns its makespan. */
static double say_base(const report *r, char *text, size_t size) {
    const report_schedule *base = r->baseline >= 0 ? &r->schedules[r->baseline] : NULL;
    const cf_tune_candidate *shared = &r->context.best;
    char words[384], time[64], held[64], recompute[80] = "";

    if (shared->status == CF_TUNE_OK) {
        baseline_context_words(&r->context, words, sizeof words);
        snprintf(text, size, "%s (%s s, %.2f GiB on the fullest GPU)", words, pipeline_estimate(shared->seconds),
                 modelling_gib(shared->bytes));
        return shared->seconds;
    }
    say_time(r, base, time, sizeof time);
    say_held(base, held, sizeof held);
    if (base->memory && base->recompute > CF_RECOMPUTE_NONE)
        snprintf(recompute, sizeof recompute, ", %s recomputation%s", cf_recompute_name(base->recompute),
                 modelling_offload_words(base->offload));
    snprintf(text, size, "%s (%s%s, %s)", base->name, time, recompute, held);
    return base->timeline->makespan;
}

/* Returns all tried changes that pay off, each added to the ones before; NULL: none does. */
static const report_try *what_pays(const report *r) {
    const report_try *best = NULL;
    int i;

    for (i = 0; i < r->n_tries; i++)
        if (r->tries[i].pays) best = &r->tries[i];
    return best;
}

/* Returns the time of whole sequences; DBL_MAX: they do not fit. */
static double whole_seconds(const report *r) {
    if (r->context.best.status == CF_TUNE_OK) return r->context.best.seconds;
    return r->baseline >= 0 ? r->schedules[r->baseline].timeline->makespan : DBL_MAX;
}

static void say_both(const report *r, const report_schedule *ours, char *text, size_t size) {
    char time[64], held[64], base[512];
    double makespan = say_base(r, base, sizeof base);
    double seconds = report_seconds(r, ours);
    const report_try *pays = what_pays(r);
    int advised = pays && pays->makespan < makespan;

    say_time(r, ours, time, sizeof time);
    say_held(ours, held, sizeof held);
    if (r->part[0])
        snprintf(text, size, "This batch takes %s%s in chunks (%s, %s%s). The comparison above is of all batches.",
                 estimated(r), time, ours->name, held, report_rank_words(r));
    else if (makespan < seconds)
        snprintf(text, size, "Chunks do not pay for this batch%s. They take %s%s (%s, %s%s), %s %s.",
                 advised ? " with these options, but they do with those below" : "", estimated(r), time, ours->name,
                 held, report_rank_words(r), pipeline_pace(seconds, makespan), base);
    else
        snprintf(text, size, "In chunks this batch takes %s%s (%s, %s%s), %s %s.", estimated(r), time, ours->name, held,
                 report_rank_words(r), pipeline_pace(seconds, makespan), base);
}

/* Writes the measured numbers before the predicted ones. */
static void say_measured(const report *r, char *text, size_t size) {
    double measured = r->schedules[r->measured].timeline->makespan;
    double predicted = r->schedules[r->predicted].timeline->makespan;

    snprintf(text, size,
             "Measured: %s s, %s times the %s s estimated for the same passes. Estimated, not measured: ",
             pipeline_estimate(measured), pipeline_estimate(predicted > 0 ? measured / predicted : 1),
             pipeline_estimate(predicted));
}

void report_sentence(const report *r, char *text, size_t size) {
    const report_schedule *ours = r->best >= 0 ? &r->schedules[r->best] : NULL;

    text[0] = '\0';
    if (r->measured >= 0) {
        say_measured(r, text, size);
        size -= strlen(text);
        text += strlen(text);
    }
    if (r->packed->plan->n_tokens == 0) snprintf(text, size, "This batch has no tokens.");
    else if (!ours) snprintf(text, size, "No schedule of these chunks fits on the GPU.");
    else if (r->baseline < 0 && r->context.best.status != CF_TUNE_OK) say_alone(r, ours, text, size);
    else say_both(r, ours, text, size);
}

/* ----------------------------------------------------------------------------------------------------------------
   What stands in the way of more
   ---------------------------------------------------------------------------------------------------------------- */

/* The meaning of each idle cause for the batch, and its remedy. No option is named here: only options that were tried
   are recommended (report_tried.c). IDLE_ORDER depends on the schedule. */
static const char *const meanings[IDLE_CAUSE_COUNT] = {
    "the pipeline fills, which matters less with more chunks in a batch, or fewer stages",
    "the pipeline empties, which matters less with more chunks in a batch, or fewer stages",
    "passes that could run have not begun: launches and the host; fewer, larger chunks or CUDA graphs help",
    "",
    "there is no room for another chunk within what a stage may keep",
    "results are on their way; a faster link, larger chunks or fewer stages help",
    "chunks of one long sequence wait for each other; more other sequences beside it help",
    "some passes are longer than others of their kind, so that stages wait for them",
    "backwards wait for their gradient from the stage behind",
    "forwards wait for the stage before, which is slower or busy with backwards"};

/* Returns by how much any other order of a schedule's passes might be shorter. */
static double slack_of(const report_schedule *s) {
    double makespan = s->timeline->makespan;
    return makespan > 0 && s->timeline->bound < makespan ? 1 - s->timeline->bound / makespan : 0;
}

/* Writes the meaning of "order": for a fixed schedule it blames the order, but a search may have had reasons for this
   order. */
static void say_order(const report_schedule *s, char *text, size_t size) {
    double slack = 100 * slack_of(s);

    if (slack < 0.05)
        snprintf(text, size, "a pass that could run stands behind one that waits, but no order of these passes is "
                             "shorter");
    else if (slack < 1)
        snprintf(text, size, "a pass that could run stands behind one that waits, but that costs little: no order of "
                             "these passes is shorter by more than %.1f %%", slack);
    else if (s->schedule->kind == CF_SCHEDULE_BEST)
        snprintf(text, size, "best has left a pass that could run behind one that waits; a longer search looks at "
                             "more orders, and no order is shorter by more than %.1f %%", slack);
    else
        snprintf(text, size, "%s has a fixed order, in which a pass that could run stands behind one that waits; "
                             "best has found nothing shorter, which a longer search may: no order is shorter by more "
                             "than %.1f %%",
                 cf_schedule_kind_name(s->schedule->kind), slack);
}

static void add_causes(const report_schedule *s, double sum[IDLE_CAUSE_COUNT]) {
    int64_t stage;
    int cause;

    for (stage = 0; stage < s->schedule->shape.n_stages; stage++)
        for (cause = 0; cause < IDLE_CAUSE_COUNT; cause++) sum[cause] += s->idle.stages[stage].seconds[cause];
}

/* Returns the cause that exactly `rank` others exceed; -1: it has no idle time. */
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

static void say_meaning(const report_schedule *s, int cause, char *text, size_t size) {
    if (cause == IDLE_ORDER) say_order(s, text, size);
    else snprintf(text, size, "%s", meanings[cause]);
}

static int say_cause(const report_schedule *s, int rank, char *text, size_t size) {
    double sum[IDLE_CAUSE_COUNT] = {0}, whole = (double)s->schedule->shape.n_stages * s->timeline->makespan;
    char meaning[512];
    int cause;

    add_causes(s, sum);
    cause = cause_ranked(sum, rank);
    if (cause < 0 || !(sum[cause] >= 0.001 * whole)) return 0;
    say_meaning(s, cause, meaning, sizeof meaning);
    snprintf(text, size, "%.1f %% of all stage time is idle, cause %s: %s.", 100 * sum[cause] / whole,
             idle_cause_name((idle_cause)cause), meaning);
    return 1;
}

/* Writes how all of the time is spent, and the most that another order of the passes could gain. */
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
                 pipeline_duration(s->timeline->bound, r->pipe->unit_cost), pipeline_unit(r->pipe->unit_cost),
                 100 * slack_of(s));
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

/* Writes the largest term of memory. */
static int say_memory(const report *r, const report_schedule *s, char *text, size_t size) {
    const cf_memory_report *m;
    char all[96] = " GiB";
    int64_t most;
    const char *name;

    if (!s->memory) return 0;
    m = &s->memory[s->fullest];
    name = largest_term(m, &most);
    if (r->pipe->gpu_bytes > 0)
        snprintf(all, sizeof all, " of %.2f GiB (%s)", modelling_gib(r->pipe->gpu_bytes),
                 pipeline_room_words(r->pipe) + strlen("of "));
    snprintf(text, size, "Memory: stage %lld holds the most, %.2f%s. Its largest term is %s, %.2f GiB.%s",
             (long long)s->fullest, modelling_gib(m->total), all, name, modelling_gib(most),
             s->held_down ? " The schedule is held down to fit." : "");
    return 1;
}

static int say_replays(const report_schedule *s, char *text, size_t size) {
    double share = s->timeline->busy > 0 ? s->timeline->replayed / s->timeline->busy : 0;

    if (!(share >= 0.001)) return 0;
    snprintf(text, size, "%.1f %% of the work is replays of dropped chunks, whose activations would take more memory.",
             100 * share);
    return 1;
}

static double stage_work(const report_schedule *s, int64_t stage) {
    double work = s->timeline->makespan;
    int cause;

    for (cause = 0; cause < IDLE_CAUSE_COUNT; cause++) work -= s->idle.stages[stage].seconds[cause];
    return work;
}

/* Writes which stage has more work than the others. In any order of the passes, all wait for it. */
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
             "wait for it.", (long long)busiest, most / mean, pipeline_duration(most, r->pipe->unit_cost),
             pipeline_unit(r->pipe->unit_cost));
    return 1;
}

/* Writes why unsplit sequences are faster, if they are. Writes nothing for a batch of a search (`part`): its baseline
   uses the chunks' split over GPUs, which may not be the best one without chunks. */
static int say_unsplit(const report *r, const report_schedule *s, char *text, size_t size) {
    const report_schedule *base = r->baseline >= 0 ? &r->schedules[r->baseline] : NULL;
    const cf_plan *plan = r->packed->plan;
    cf_plan_stats stats;
    char *at;

    if (!base || r->part[0] || !(base->timeline->makespan < report_seconds(r, s))) return 0;
    cf_plan_measure(plan, NULL, &stats);
    snprintf(text, size, "Unsplit is faster here: %s.",
             packing_why_unsplit(stats.longest_sequence, plan->chunk_size, (double)plan->chunks_per_rank,
                                 r->pipe->n_stages,
                                 s->timeline->replayed > 0));
    while ((at = strstr(text, "\n                  ")) != NULL) { /* that text is indented for a summary */
        *at = ' ';
        memmove(at + 1, at + 19, strlen(at + 19) + 1);
    }
    return 1;
}

/* Returns a sentence that compares the time of whole sequences with a makespan that is advised. "" if whole sequences
   are slower than the report's best schedule. */
static const char *beside_whole(const report *r, double makespan) {
    double whole = whole_seconds(r), now = report_seconds(r, &r->schedules[r->best]);
    char *text = cli_scratch();

    if (whole >= now) return "";
    snprintf(text, CLI_SCRATCH_BYTES, whole < makespan ? " Whole sequences still take less: %s s."
                                      : " Then chunks pay: whole sequences take %s s.", pipeline_estimate(whole));
    return text;
}

int report_do(const report *r, char *text, size_t size) {
    const report_try *best = what_pays(r);
    double makespan;

    if (r->n_tries == 0) return 0;
    makespan = report_seconds(r, &r->schedules[r->best]);
    if (best)
        snprintf(text, size,
                 "Do this: %s takes an estimated %s s, %.1f %% less, in %.2f of %.2f GiB (tried, and it fits).%s",
                 best->options, pipeline_estimate(best->makespan), 100 * (1 - best->makespan / makespan),
                 modelling_gib(best->memory), modelling_gib(r->pipe->gpu_bytes), beside_whole(r, best->makespan));
    else
        snprintf(text, size, "%s that was tried and fits is shorter by 1 %% or more.%s",
                 whole_seconds(r) < makespan ? "No change of the options" : "Keep these options: nothing",
                 beside_whole(r, makespan));
    return 1;
}

/* Writes the cost of uneven ranks and its cause: they have equally many steps, of different cost. */
static int say_ranks(const report *r, char *text, size_t size) {
    double slowest = 0, sum = 0, n = 0;
    int64_t i, rank = 0, longest = -1;
    const cf_plan *plan = r->packed->plan;

    for (i = 0; i < r->n_ranks; i++) {
        if (!(r->ranks[i].makespan >= 0)) continue;
        sum += r->ranks[i].makespan;
        n += 1;
        if (r->ranks[i].makespan <= slowest) continue;
        slowest = r->ranks[i].makespan;
        rank = i;
    }
    if (n < 2 || !(slowest * n > 1.02 * sum)) return 0;
    for (i = 0; i < plan->n_chains; i++)
        if (longest < 0 || plan->chains[i].tokens > plan->chains[longest].tokens) longest = i;
    snprintf(text, size,
             "Ranks are uneven: all wait for rank %lld, %s %s, %s times the mean, so %.1f %% of all GPU time is "
             "lost. Each has %s steps, ", (long long)rank, pipeline_duration(slowest, r->pipe->unit_cost),
             pipeline_unit(r->pipe->unit_cost), pipeline_estimate(slowest * n / sum), 100 * (1 - sum / (slowest * n)),
             cli_commas(plan->chunks_per_rank));
    size -= strlen(text);
    text += strlen(text);
    if (longest >= 0 && plan->chunks[plan->chains[longest].first_chunk].rank == rank)
        snprintf(text, size, "but the chunks of a sequence of %s tokens, which stay on that rank, attend to all of it "
                             "before them and cost more than others; more other sequences, or several as long, would "
                             "even that out.", cli_commas(plan->chains[longest].tokens));
    else snprintf(text, size, "but not of equal cost.");
    return 1;
}

/* Writes line i of advice, most important first: the whole, changes that pay off, losses that no order can avoid, the
   causes, the cost of memory. */
int report_advice(const report *r, int i, char *text, size_t size) {
    const report_schedule *s = r->best >= 0 ? &r->schedules[r->best] : NULL;
    int rank;

    if (!s) return 0;
    if (say_unsplit(r, s, text, size) && i-- == 0) return 1;
    if (say_whole(r, s, text, size) && i-- == 0) return 1;
    if (report_do(r, text, size) && i-- == 0) return 1;
    if (say_ranks(r, text, size) && i-- == 0) return 1;
    if (say_uneven(r, s, text, size) && i-- == 0) return 1;
    for (rank = 0; rank < 3; rank++)
        if (say_cause(s, rank, text, size) && i-- == 0) return 1;
    if (say_replays(s, text, size) && i-- == 0) return 1;
    return say_memory(r, s, text, size) && i == 0;
}
