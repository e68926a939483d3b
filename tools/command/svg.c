/* svg.c - pictures of a schedule. */

#include "svg.h"
#include "chart.h"
#include "text_out.h"

#include <string.h>

/* In units that a browser shows as pixels and a paper as three quarters of a point. */
enum { LEFT = 56, RIGHT = 12, WIDTH = 720, TOP = 8, LANE = 20, BOX = 17, AXIS = 40, PLOT = 170 };

static const char *const fills[CF_COMPUTE_PASS_COUNT] = {"#397af2", "#9cc3ff", "#e8891c", "#3fc3ca", "#b9e3cd"};
static const char *const inks[CF_COMPUTE_PASS_COUNT] = {"#fff", "#10244a", "#1f1200", "#06282a", "#0d2c1c"};
static const char *const meanings[CF_COMPUTE_PASS_COUNT] = {"forward", "replay", "backward", "input gradient",
                                                            "weight gradient"};
/* Colours that differ for the colour-blind as well (Okabe and Ito), for groups and for stages. */
static const char *const hues[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                   "#8b6f00", "#56b4e9", "#7b5bd6", "#a23b3b"};
enum { N_HUES = sizeof hues / sizeof hues[0] };

typedef struct picture {
    text_out to;
    const cf_plan *plan;
    const cf_schedule *schedule;
    const cf_timeline *timeline;
    const char *unit;
} picture;

static double place(const picture *p, double time) {
    double makespan = p->timeline->makespan;
    return LEFT + (makespan > 0 ? time / makespan : 0) * (WIDTH - LEFT - RIGHT);
}

static int is_pass(const picture *p, int64_t id) { return p->schedule->actions[id].pass < CF_COMPUTE_PASS_COUNT; }

static cf_result begin(picture *p, int height, const char *title, cf_write_fn write, void *user, cf_error *error) {
    int64_t i, n = 0;
    cf_result result = text_out_begin(&p->to, write, user, error);

    for (i = 0; i < p->schedule->n_actions; i++) n += is_pass(p, i);
    if (result == CF_OK && n > SVG_MOST_PASSES)
        result = cf_fail(error, CF_ERROR_LIMIT, "n_passes", -1, SVG_MOST_PASSES, n, "is too large for a picture");
    if (result != CF_OK) return result;
    text_out_put(&p->to, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\"\n",
                 WIDTH, height, WIDTH, height);
    text_out_put(&p->to, "     font-family=\"Helvetica, Arial, 'Liberation Sans', sans-serif\" font-size=\"10\">\n"
                         "<title>%s</title>\n<rect width=\"%d\" height=\"%d\" fill=\"#fff\"/>\n", title, WIDTH, height);
    return CF_OK;
}

static cf_result end(picture *p, cf_error *error) {
    text_out_put(&p->to, "</svg>\n");
    return text_out_end(&p->to, error);
}

/* Whole steps of time below the drawing, the first one with the unit. */
static void put_axis(picture *p, int y) {
    double makespan = p->timeline->makespan, step = chart_step(makespan / 8);
    int64_t mark;

    text_out_put(&p->to, "<g class=\"axis\" fill=\"#555\">\n");
    for (mark = 0; makespan > 0 && (double)mark * step <= makespan; mark++) {
        double x = place(p, (double)mark * step);
        text_out_put(&p->to, "<path d=\"M%.2f %dv4\" stroke=\"#555\"/>", x, y);
        if (x < WIDTH - 60 || mark == 0)
            text_out_put(&p->to, "<text x=\"%.2f\" y=\"%d\">%s%s%s</text>", x, y + 14,
                         pipeline_time((double)mark * step), mark == 0 ? " " : "", mark == 0 ? p->unit : "");
        text_out_put(&p->to, "\n");
    }
    text_out_put(&p->to, "</g>\n");
}

/* ----------------------------------------------------------------------------------------------------------------
   Passes
   ---------------------------------------------------------------------------------------------------------------- */

/* About as wide as it will be: digits and capitals of this size. */
static double label_width(const char *label) { return 5.8 * (double)strlen(label) + 3; }

static void put_box(picture *p, int64_t id, int y) {
    const cf_action *a = &p->schedule->actions[id];
    const cf_chunk *chunk = &p->plan->chunks[a->chunk];
    double x = place(p, p->timeline->start[id]), width = place(p, p->timeline->end[id]) - x;
    int dropped = a->pass <= CF_R && !a->keep;
    char label[32];

    (void)snprintf(label, sizeof label, "%s%d", cf_pass_name((cf_pass)a->pass), (int)a->chunk);
    text_out_put(&p->to, "<rect class=\"%s%s\" x=\"%.3f\" y=\"%d\" width=\"%.3f\" height=\"%d\" fill=\"%s\" "
                         "stroke=\"#fff\">",
                 cf_pass_name((cf_pass)a->pass), dropped ? " dropped" : "", x, y, width, BOX, fills[a->pass]);
    text_out_put(&p->to, "<title>%s: %.9g to %.9g</title></rect>", label, p->timeline->start[id], p->timeline->end[id]);
    if (chunk->group >= 0 && width > 2)
        text_out_put(&p->to, "<path d=\"M%.2f %dh%.2f\" stroke=\"%s\" stroke-width=\"2\"/>", x, y + 1, width,
                     hues[chunk->group % N_HUES]);
    if (dropped) text_out_put(&p->to, "<path d=\"M%.2f %dh%.2f\" stroke=\"#fff\"/>", x, y + BOX - 2, width);
    if (width > label_width(label))
        text_out_put(&p->to, "<text x=\"%.2f\" y=\"%d\" fill=\"%s\">%s</text>", x + 2.5, y + 12, inks[a->pass], label);
    text_out_put(&p->to, "\n");
}

static void put_lane(picture *p, int64_t stage) {
    int y = TOP + (int)stage * LANE;
    int64_t i;

    text_out_put(&p->to, "<g class=\"stage\" stroke-width=\".7\">\n"
                         "<text x=\"0\" y=\"%d\" fill=\"#333\">stage %lld</text>"
                         "<path d=\"M%d %dH%d\" stroke=\"#ddd\"/>\n",
                 y + 12, (long long)stage, LEFT, y + BOX, WIDTH - RIGHT);
    for (i = p->schedule->first[stage]; i < p->schedule->first[stage + 1]; i++)
        if (is_pass(p, i)) put_box(p, i, y);
    text_out_put(&p->to, "</g>\n");
}

static void put_legend(picture *p, int y) {
    int64_t i, seen[CF_COMPUTE_PASS_COUNT] = {0};
    int pass, dropped = 0, x = LEFT;

    for (i = 0; i < p->schedule->n_actions; i++) {
        if (!is_pass(p, i)) continue;
        seen[p->schedule->actions[i].pass]++;
        dropped |= p->schedule->actions[i].pass == CF_F && !p->schedule->actions[i].keep;
    }
    text_out_put(&p->to, "<g class=\"legend\" fill=\"#333\">\n");
    for (pass = 0; pass < CF_COMPUTE_PASS_COUNT; pass++) {
        if (!seen[pass]) continue;
        text_out_put(&p->to, "<path d=\"M%d %dh9v9h-9z\" fill=\"%s\"/><text x=\"%d\" y=\"%d\">%s %s</text>\n", x, y - 8,
                     fills[pass], x + 13, y, cf_pass_name((cf_pass)pass), meanings[pass]);
        x += 40 + (int)label_width(meanings[pass]);
    }
    if (dropped)
        text_out_put(&p->to, "<text x=\"%d\" y=\"%d\">line above: part of a group; below: activations dropped</text>\n",
                     x, y);
    text_out_put(&p->to, "</g>\n");
}

cf_result svg_chart_write(const cf_plan *plan, const cf_schedule *schedule, const cf_timeline *timeline,
                          const char *unit, cf_write_fn write, void *user, cf_error *error) {
    picture p;
    int64_t stage, most = (INT32_MAX - TOP - AXIS) / LANE;
    int bottom;
    cf_result result;

    p.plan = plan;
    p.schedule = schedule;
    p.timeline = timeline;
    p.unit = unit;
    bottom = TOP + (int)(schedule->shape.n_stages < most ? schedule->shape.n_stages : most) * LANE;
    result = begin(&p, bottom + AXIS, "Passes of every stage over time", write, user, error);
    if (result != CF_OK) return result;
    for (stage = 0; stage < schedule->shape.n_stages; stage++) put_lane(&p, stage);
    put_axis(&p, bottom);
    put_legend(&p, bottom + 32);
    return end(&p, error);
}

/* ----------------------------------------------------------------------------------------------------------------
   Memory
   ---------------------------------------------------------------------------------------------------------------- */

typedef struct scale {
    double top, unit; /* what the upper edge stands for; what is called one */
    const char *name;
} scale;

static double height_of(const scale *s, double value) { return TOP + PLOT - (s->top > 0 ? value / s->top : 0) * PLOT; }

static scale scale_of(const picture *p, const int64_t *held, held_unit what, int64_t limit) {
    scale s = {0, 1, "tokens"};
    int64_t i;

    for (i = 0; i < p->schedule->n_actions; i++)
        if ((double)held[i] > s.top) s.top = (double)held[i];
    if ((double)limit > s.top && (double)limit <= 3 * s.top) s.top = (double)limit;
    s.top *= 1.05;
    if (what != HELD_TOKENS) s.name = "bytes";
    if (what != HELD_TOKENS && s.top >= 2147483648.0) {
        s.name = "GiB";
        s.unit = 1073741824.0;
    }
    return s;
}

static void put_heights(picture *p, const scale *s) {
    double step = chart_step(s->top / s->unit / 5) * s->unit;
    int64_t mark;

    text_out_put(&p->to, "<g class=\"heights\" fill=\"#555\">\n");
    for (mark = 0; s->top > 0 && (double)mark * step <= s->top; mark++) {
        double y = height_of(s, (double)mark * step);
        text_out_put(&p->to, "<path d=\"M%d %.2fH%d\" stroke=\"#ddd\"/>", LEFT, y, WIDTH - RIGHT);
        text_out_put(&p->to, "<text x=\"0\" y=\"%.2f\">%s%s%s</text>\n", y + 3,
                     pipeline_time((double)mark * step / s->unit), mark == 0 ? " " : "", mark == 0 ? s->name : "");
    }
    text_out_put(&p->to, "</g>\n");
}

/* Steps: across for as long as an amount is held, then up or down. */
static void put_line(picture *p, const int64_t *held, const scale *s, int64_t stage) {
    const char *hue = hues[stage % N_HUES];
    int64_t i, last = -1, at = -1;

    text_out_put(&p->to, "<path class=\"stage\" fill=\"none\" stroke=\"%s\" stroke-width=\"1.4\"%s d=\"", hue,
                 stage >= N_HUES ? " stroke-dasharray=\"5 2\"" : "");
    for (i = p->schedule->first[stage]; i < p->schedule->first[stage + 1]; i++) {
        if (!is_pass(p, i)) continue;
        at = i;
        if (last >= 0 && held[last] == held[i]) continue;
        text_out_put(&p->to, last < 0 ? "M%.3f %.3f" : "H%.3fV%.3f", place(p, p->timeline->start[i]),
                     height_of(s, (double)held[i]));
        last = i;
    }
    if (at >= 0) text_out_put(&p->to, "H%.3f", place(p, p->timeline->end[at]));
    text_out_put(&p->to, "\"><title>stage %lld</title></path>\n", (long long)stage);
}

static void put_limit(picture *p, const scale *s, int64_t limit) {
    double y = height_of(s, (double)limit);

    if (limit <= 0 || (double)limit > s->top) return;
    text_out_put(&p->to, "<path class=\"limit\" d=\"M%d %.3fH%d\" stroke=\"#b3261e\" stroke-dasharray=\"6 4\"/>",
                 LEFT, y, WIDTH - RIGHT);
    text_out_put(&p->to, "<text x=\"%d\" y=\"%.2f\" fill=\"#b3261e\" text-anchor=\"end\">limit</text>\n", WIDTH - RIGHT,
                 y - 3);
}

cf_result svg_memory_write(const cf_schedule *schedule, const cf_timeline *timeline, const int64_t *held,
                           held_unit what, int64_t limit, const char *unit, cf_write_fn write, void *user,
                           cf_error *error) {
    picture p;
    scale s;
    int64_t stage;
    cf_result result;

    p.plan = NULL;
    p.schedule = schedule;
    p.timeline = timeline;
    p.unit = unit;
    result = begin(&p, TOP + PLOT + AXIS, "What every stage holds over time", write, user, error);
    if (result != CF_OK) return result;
    s = scale_of(&p, held, what, limit);
    put_heights(&p, &s);
    for (stage = 0; stage < schedule->shape.n_stages; stage++) put_line(&p, held, &s, stage);
    put_limit(&p, &s, limit);
    put_axis(&p, TOP + PLOT);
    text_out_put(&p.to, "<g class=\"legend\" fill=\"#333\">\n");
    for (stage = 0; stage < schedule->shape.n_stages && stage < 11; stage++)
        text_out_put(&p.to, "<path d=\"M%d %dh10\" stroke=\"%s\" stroke-width=\"2\"%s/>"
                            "<text x=\"%d\" y=\"%d\">stage %lld</text>\n",
                     LEFT + (int)stage * 60, TOP + PLOT + 28, hues[stage % N_HUES],
                     stage >= N_HUES ? " stroke-dasharray=\"5 2\"" : "", LEFT + (int)stage * 60 + 13, TOP + PLOT + 32,
                     (long long)stage);
    text_out_put(&p.to, "</g>\n");
    return end(&p, error);
}
