/* chunkflow.h with its implementation, and a switch for each policy and move of dispatch and search, by name. The
   header has no switches: here a macro with the name of a function puts something else in place of its calls. It tells
   them from the definition by the first argument, which begins with a type there: MARK_ before that type is a macro for
   a comma, which moves what is third. A macro is not replaced within its own text, so that calls the function. */

#if !defined(ABLATE_H)
#define ABLATE_H

#include <stdint.h>
#include <string.h>

/* What dispatch does; what only rhythms and turns do; how the walk begins; the fixed schedules; the walk; and which
   core searches are made. The last three only save time. */
#define SWITCHES(X)                                                                                                   \
    X(eviction) X(early_replays) X(backs_first) X(returns) X(longest_way) X(hurries) X(lead) X(evicting_third)        \
    X(two_ahead) X(patience) X(weight_first)                                                                          \
    X(rhythm) X(later_rhythms) X(steep) X(turn) X(whole_rhythms) X(under_way) X(later_rows) X(ahead) X(plan)          \
    X(put_off) X(makes_room)                                                                                          \
    X(without_lead) X(dearest_first) X(cheap_ends)                                                                    \
    X(paper) X(runs_ahead) X(one_f_one_b) X(gpipe) X(zero_bubble) X(interleaved) X(as_if_unlimited)                   \
    X(walk) X(shifts) X(changes)                                                                                      \
    X(smaller_k) X(tighter_limits) X(whole_backwards) X(left_out) X(memory_bound) X(gives_up)

#define AS_ITEM(name) OFF_##name,
#define AS_NAME(name) #name,
enum { SWITCHES(AS_ITEM) N_SWITCHES };
static const char *const switch_names[] = {SWITCHES(AS_NAME)};
static int switched_off[N_SWITCHES], was_asked[N_SWITCHES];

static int is_off(int which) {
    was_asked[which] = 1;
    return switched_off[which];
}

#define OFF(name) is_off(OFF_##name)

#define MARK_const ,
#define MARK_cf__dispatch ,
#define MARK_cf__search ,
#define MARK_cf__schedule_maker ,
#define THIRD(a, b, third, ...) third
#define AS_THIRD(...) THIRD(__VA_ARGS__)
#define AT(first, function, instead) AS_THIRD(MARK_##first, function, instead, ~)

/* ---- dispatch ---- */

struct cf__dispatch;
struct cf__dispatch_policy;
struct cf__pipe_room;
struct cf__pipe_unit;
struct cf__schedule_maker;
struct cf__search;

static int32_t ablated_best(struct cf__dispatch *d, int64_t stage);
static int ablated_feeds(struct cf__dispatch *d, int64_t stage, int32_t back, int32_t forward);
static int ablated_may_start(struct cf__dispatch *d, int64_t stage, const struct cf__pipe_unit *unit, int64_t v);
static int always_returns(const struct cf__dispatch *d);
static struct cf__pipe_room no_room(void);

#define cf__dispatch_best(d, stage) AT(d, cf__dispatch_best(d, stage), ablated_best(d, stage))
#define cf__dispatch_feeds(d, ...) AT(d, cf__dispatch_feeds(d, __VA_ARGS__), ablated_feeds(d, __VA_ARGS__))
#define cf__dispatch_may_start(d, ...) AT(d, cf__dispatch_may_start(d, __VA_ARGS__), ablated_may_start(d, __VA_ARGS__))
#define cf__dispatch_goes_first(d, ...)                                                                               \
    AT(d, cf__dispatch_goes_first(d, __VA_ARGS__), (always_returns(d) || cf__dispatch_goes_first(d, __VA_ARGS__)))
#define cf__dispatch_leaves(d, ...)                                                                                   \
    AT(d, cf__dispatch_leaves(d, __VA_ARGS__), (OFF(later_rows) ? no_room() : cf__dispatch_leaves(d, __VA_ARGS__)))
#define cf__dispatch_makes_room(d, ...)                                                                               \
    AT(d, cf__dispatch_makes_room(d, __VA_ARGS__), (!OFF(makes_room) && cf__dispatch_makes_room(d, __VA_ARGS__)))
#define cf__dispatch_replays_early(d, stage)                                                                          \
    AT(d, cf__dispatch_replays_early(d, stage), (!OFF(early_replays) && cf__dispatch_replays_early(d, stage)))
#define cf__dispatch_waits(d, ...)                                                                                    \
    AT(d, cf__dispatch_waits(d, __VA_ARGS__), (!(OFF(put_off) && (d)->follows) && cf__dispatch_waits(d, __VA_ARGS__)))

/* ---- search ---- */

static int ablated_try(struct cf__search *search, double most);
static int64_t ablated_below(struct cf__search *search, int64_t n, const char *text);
static void ablated_change(struct cf__search *search);
static void ablated_order(struct cf__schedule_maker *m, int cheap_ends);
static int skips_policy(const struct cf__search *search, const struct cf__dispatch_policy *policy);
static int skips_fixed(int kind, int runs_ahead);
static int skips_core(const struct cf__search *search);

#define cf__search_below(s, n) AT(s, cf__search_below(s, n), ablated_below(s, n, #n))
#define cf__search_change_policy(s) AT(s, cf__search_change_policy(s), ablated_change(s))
#define cf__search_core(s, split) AT(s, cf__search_core(s, split), (!skips_core(s) && cf__search_core(s, split)))
#define cf__search_each_limit(s, split)                                                                               \
    AT(s, cf__search_each_limit(s, split),                                                                            \
       (OFF(whole_backwards) && !(split) && (s)->maker.desc.split_backward ? (void)0 : cf__search_each_limit(s, split)))
#define cf__search_find_bound(s, split, enough)                                                                       \
    AT(s, cf__search_find_bound(s, split, enough),                                                                    \
       (OFF(left_out) && (enough) < DBL_MAX ? 0 : cf__search_find_bound(s, split, enough)))
#define cf__search_plan(s) AT(s, cf__search_plan(s), (OFF(plan) || cf__search_plan(s)))
#define cf__search_set_order(m, cheap_ends) AT(m, cf__search_set_order(m, cheap_ends), ablated_order(m, cheap_ends))
#define cf__search_tighten(m) AT(m, cf__search_tighten(m), (!OFF(tighter_limits) && cf__search_tighten(m)))
#define cf__search_try_dispatch(s, most) AT(s, cf__search_try_dispatch(s, most), ablated_try(s, most))
#define cf__search_try_fixed(s, kind, ahead)                                                                          \
    AT(s, cf__search_try_fixed(s, kind, ahead),                                                                       \
       (skips_fixed(kind, ahead) ? (void)0 : cf__search_try_fixed(s, kind, ahead)))
#define cf__search_try_policy(s, policy)                                                                              \
    AT(s, cf__search_try_policy(s, policy), (skips_policy(s, &(policy)) ? (void)0 : cf__search_try_policy(s, policy)))
#define cf__search_walk(s) AT(s, cf__search_walk(s), (OFF(walk) ? (void)0 : cf__search_walk(s)))
#define cf__search_write_fixed(s, ...)                                                                                \
    AT(s, cf__search_write_fixed(s, __VA_ARGS__),                                                                     \
       (!(OFF(as_if_unlimited) && (s)->maker.is_lifted) && cf__search_write_fixed(s, __VA_ARGS__)))

#define MARK_cf__bounds_jobs ,
#define cf__bounds_find_memory(jobs, ...)                                                                             \
    AT(jobs, cf__bounds_find_memory(jobs, __VA_ARGS__),                                                               \
       (OFF(memory_bound) ? 0 : cf__bounds_find_memory(jobs, __VA_ARGS__)))

#define CHUNKFLOW_IMPLEMENTATION
#include "chunkflow.h"

#undef cf__dispatch_best
#undef cf__dispatch_feeds
#undef cf__dispatch_may_start
#undef cf__search_below
#undef cf__search_change_policy
#undef cf__search_set_order
#undef cf__search_try_dispatch

/* What a stage likes best without what lies in one of its queues. */
static int32_t best_without(struct cf__dispatch *d, int64_t stage, int queue) {
    int64_t *n = &d->workers[stage].queues[queue].n, was = *n;
    int32_t best;
    *n = 0;
    best = cf__dispatch_best(d, stage);
    *n = was;
    return best;
}

/* weight_first: a W does not go before a forward that could run. backs_first: where chunks are evicted, the more urgent
   of a replay and a backward goes first. */
static int32_t ablated_best(struct cf__dispatch *d, int64_t stage) {
    const cf__dispatch_worker *worker = &d->workers[stage];
    int32_t best = cf__dispatch_best(d, stage), other;
    int32_t replay = cf__dispatch_top(worker, CF__DISPATCH_REPLAYS);
    if (OFF(weight_first) && best >= 0 && cf__dispatch_place(best) == CF__PIPE_W) {
        other = best_without(d, stage, CF__DISPATCH_WEIGHTS);
        if (other >= 0 && cf__dispatch_place(other) == CF_F) return other;
    }
    if (OFF(backs_first) && d->policy.evicts && replay >= 0 && best >= 0 &&
        best == cf__dispatch_top(worker, CF__DISPATCH_RETURNING) && d->urgency[replay] < d->urgency[best] &&
        cf__dispatch_allows(d, stage, replay))
        return best_without(d, stage, CF__DISPATCH_RETURNING);
    return best;
}

/* two_ahead: a stage may get any number of forwards ahead of the next one. evicting_third: forwards that evict a chunk
   have the whole lead. */
static int ablated_feeds(struct cf__dispatch *d, int64_t stage, int32_t back, int32_t forward) {
    cf__dispatch_worker *next = &d->workers[stage + 1];
    int64_t taken = next->n_forwards, chunk, v = cf__dispatch_stage(d, forward, &chunk);
    const cf__pipe_unit unit = cf__dispatch_unit(d, chunk, v);
    double lead = d->policy.lead;
    int feeds;
    if (OFF(two_ahead)) next->n_forwards = d->workers[stage].n_forwards;
    if (OFF(evicting_third) && d->workers[stage].room.chunks < 1 && cf__pipe_keeps(&unit, CF_F, chunk))
        d->policy.lead *= 3;
    feeds = cf__dispatch_feeds(d, stage, back, forward);
    next->n_forwards = taken;
    d->policy.lead = lead;
    return feeds;
}

/* under_way: in a rhythm of whole backwards a virtual stage may have any number of chunks under way. */
static int ablated_may_start(struct cf__dispatch *d, int64_t stage, const struct cf__pipe_unit *unit, int64_t v) {
    int32_t n_open = d->rows[v].n_open;
    int may_start;
    if (OFF(under_way)) d->rows[v].n_open = 0;
    may_start = cf__dispatch_may_start(d, stage, unit, v);
    d->rows[v].n_open = n_open;
    return may_start;
}

/* longest_way: backwards go first under every policy. */
static int always_returns(const struct cf__dispatch *d) {
    return OFF(longest_way) && !d->follows && !(d->policy.rhythm > 0) && !cf__dispatch_turns(d);
}

static struct cf__pipe_room no_room(void) {
    cf__pipe_room none = {0, 0, 0};
    return none;
}

/* Returns whether that has changed the policy. */
static int mask_policy(cf__dispatch_policy *policy) {
    cf__dispatch_policy was = *policy;
    if (OFF(eviction)) policy->evicts = 0;
    if (OFF(returns)) policy->returns = 0;
    if (OFF(hurries)) policy->hurries = 0;
    if (OFF(lead)) policy->lead = 0;
    if (OFF(patience)) policy->patience = 0;
    return was.evicts != policy->evicts || was.returns != policy->returns || was.hurries != policy->hurries ||
           was.lead > policy->lead || was.patience > policy->patience;
}

/* gives_up: a candidate is dispatched to its end, and compared then. */
static int ablated_try(struct cf__search *search, double most) {
    mask_policy(&search->dispatch.policy);
    if (!OFF(gives_up)) return cf__search_try_dispatch(search, most);
    return cf__search_try_dispatch(search, DBL_MAX) && search->dispatch.makespan <= most;
}

/* A walk draws one of 16 to choose between the two kinds of moves: changes are from 12 on. */
static int64_t ablated_below(struct cf__search *search, int64_t n, const char *text) {
    int64_t drawn = cf__search_below(search, n);
    if (strcmp(text, "16") != 0) return drawn;
    return OFF(shifts) ? 15 : OFF(changes) ? 0 : drawn;
}

/* Draws again if it would only change what is switched off. */
static void ablated_change(struct cf__search *search) {
    cf__dispatch_policy was = search->dispatch.policy;
    int tries = 0;
    do {
        search->dispatch.policy = was;
        cf__search_change_policy(search);
    } while (mask_policy(&search->dispatch.policy) && ++tries < 16);
}

static void ablated_order(struct cf__schedule_maker *m, int cheap_ends) {
    if (OFF(dearest_first)) cf__schedule_collect_units(m);
    else cf__search_set_order(m, cheap_ends && !OFF(cheap_ends));
}

static int skips_policy(const struct cf__search *search, const struct cf__dispatch_policy *policy) {
    int64_t n_virtual = search->maker.desc.shape.n_virtual;
    int later = policy->rhythm * (double)(3 * n_virtual) > 1 + 1e-9 && !(policy->steep > 0);
    return (OFF(rhythm) && policy->rhythm > 0) || (OFF(later_rhythms) && later) || (OFF(steep) && policy->steep > 0) ||
           (OFF(turn) && policy->turn > 0) || (OFF(whole_rhythms) && policy->rhythm > 0 && !policy->split) ||
           (OFF(patience) && policy->patience > 0) || (OFF(hurries) && policy->hurries) ||
           (OFF(ahead) && policy->ahead > 0 && !(policy->rhythm > 0)) ||
           (OFF(without_lead) && n_virtual == 1 && policy->evicts && policy->returns && !(policy->lead > 0));
}

static int skips_fixed(int kind, int runs_ahead) {
    return kind == CF_SCHEDULE_PAPER ? (runs_ahead ? OFF(runs_ahead) : OFF(paper))
           : kind == CF_SCHEDULE_1F1B ? OFF(one_f_one_b)
           : kind == CF_SCHEDULE_GPIPE ? OFF(gpipe)
           : kind == CF_SCHEDULE_ZERO_BUBBLE ? OFF(zero_bubble) : OFF(interleaved);
}

static int skips_core(const struct cf__search *search) {
    return OFF(smaller_k) && search->maker.desc.shape.k < search->maker.most_kept;
}

#endif
