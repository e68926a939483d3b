/* svg.c - pictures of a plan and of a schedule. */

#include "svg.h"
#include "chart.h"
#include "packing.h"
#include "text_out.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Lengths in units that a browser shows as pixels and paper as three quarters of a point, for type of size TYPE.
   Everything except the width grows with the type. */
enum { LEFT = 56, RIGHT = 12, WIDTH = 720, TOP = 8, LANE = 20, AXIS = 40, PLOT = 170, TYPE = 10 };

static const char *const fills[CF_COMPUTE_PASS_COUNT] = {"#2b66d9", "#9cc3ff", "#e8891c", "#3fc3ca", "#b9e3cd"};
static const char *const inks[CF_COMPUTE_PASS_COUNT] = {"#fff", "#10244a", "#1f1200", "#06282a", "#0d2c1c"};
static const char *const meanings[CF_COMPUTE_PASS_COUNT] = {"forward", "replay", "backward", "input gradient",
                                                            "weight gradient"};
/* Colours that differ for the colour-blind as well (Okabe and Ito), for chains and for stages. */
static const char *const hues[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                   "#8b6f00", "#56b4e9", "#7b5bd6", "#a23b3b"};
enum { N_HUES = sizeof hues / sizeof hues[0] };

typedef struct picture {
    text_out to;
    const cf_plan *plan;
    const cf_schedule *schedule;
    const cf_timeline *timeline;
    const char *unit;
    int type, width, height;            /* as drawn, in units */
    int left, right, top, axis, lane, box, plot;
} picture;

/* Scales a length from the usual size of type to this picture's. */
static int grown(const picture *p, int units) { return (units * p->type + TYPE / 2) / TYPE; }

/* Returns the baseline of type in the middle of a lane. */
static int baseline(const picture *p) { return p->box - (p->box - p->type) / 2 - p->type / 5; }

/* Lays out a picture. rows: lanes, or 0 for a plot. A requested height goes to these. */
static void lay_out(picture *p, const svg_style *style, int rows) {
    p->type = style->type > 0 ? (int)style->type : TYPE;
    p->width = style->width > 0 ? (int)style->width : WIDTH;
    p->left = grown(p, LEFT);
    p->right = grown(p, RIGHT);
    p->top = grown(p, TOP);
    p->axis = grown(p, AXIS);
    p->lane = grown(p, LANE);
    p->plot = grown(p, PLOT);
    if (rows > 0) p->axis += grown(p, 620) / (p->width - p->left) * grown(p, 13); /* more lines of a legend */
    if (style->height > 0) {
        int room = (int)style->height - p->top - p->axis;
        p->plot = room > p->type ? room : p->type;
        p->lane = rows > 0 && room / rows > p->type / 2 ? room / rows : p->type / 2;
    }
    p->box = p->lane - (p->lane > 6 ? 3 : 1);
    p->height = p->top + (rows > 0 ? rows * p->lane : p->plot) + p->axis;
}

static double place(const picture *p, double time) {
    double makespan = p->timeline->makespan;
    return p->left + (makespan > 0 ? time / makespan : 0) * (p->width - p->left - p->right);
}

/* Returns where the names of lanes end, left of the drawing and away from the picture's edge. */
static int names_end(const picture *p) { return p->left - grown(p, 5); }

static int is_pass(const picture *p, int64_t id) { return p->schedule->actions[id].pass < CF_COMPUTE_PASS_COUNT; }

static int64_t count_passes(const picture *p) {
    int64_t i, n = 0;
    for (i = 0; i < p->schedule->n_actions; i++) n += is_pass(p, i);
    return n;
}

/* Begins a picture of n boxes, or corners of lines, called `what` in errors. */
static cf_result begin(picture *p, const char *title, const char *what, int64_t n, cf_write_fn write, void *user,
                       cf_error *error) {
    cf_result result = text_out_begin(&p->to, write, user, error);

    if (result == CF_OK && n > SVG_MOST_PASSES)
        result = cf_fail(error, CF_ERROR_LIMIT, what, -1, SVG_MOST_PASSES, n, "is too large for a picture");
    if (result != CF_OK) return result;
    text_out_put(&p->to, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\"\n",
                 p->width, p->height, p->width, p->height);
    text_out_put(&p->to, "     font-family=\"Helvetica, Arial, 'Liberation Sans', sans-serif\" font-size=\"%d\">\n"
                         "<title>%s</title>\n<rect width=\"%d\" height=\"%d\" fill=\"#fff\"/>\n", p->type, title,
                 p->width, p->height);
    return CF_OK;
}

static cf_result end(picture *p, cf_error *error) {
    text_out_put(&p->to, "</svg>\n");
    return text_out_end(&p->to, error);
}

/* Estimates the width of a label of digits and capitals. */
static double label_width(const picture *p, const char *label) {
    return (5.8 * (double)strlen(label) + 3) * (double)p->type / TYPE;
}

/* Draws the time axis below the drawing: whole steps, the first one with the unit. */
static void put_axis(picture *p, int y) {
    double makespan = p->timeline->makespan, most = (double)(p->width - p->left - p->right) / grown(p, 80);
    double step = chart_step(makespan / (most > 1 ? most : 1));
    int64_t mark;

    text_out_put(&p->to, "<g class=\"axis\" fill=\"#555\">\n");
    for (mark = 0; makespan > 0 && (double)mark * step <= makespan; mark++) {
        double x = place(p, (double)mark * step);
        char label[96];

        snprintf(label, sizeof label, "%s%s%s", pipeline_time((double)mark * step), mark == 0 ? " " : "",
                 mark == 0 ? p->unit : "");
        text_out_put(&p->to, "<path d=\"M%.2f %dv4\" stroke=\"#555\"/>", x, y);
        if (x + label_width(p, label) <= p->width || mark == 0)
            text_out_put(&p->to, "<text x=\"%.2f\" y=\"%d\">%s</text>", x, y + grown(p, 14), label);
        text_out_put(&p->to, "\n");
    }
    text_out_put(&p->to, "</g>\n");
}

/* ----------------------------------------------------------------------------------------------------------------
   Passes
   ---------------------------------------------------------------------------------------------------------------- */

static void put_box(picture *p, int64_t id, int y) {
    const cf_action *a = &p->schedule->actions[id];
    const cf_chunk *chunk = &p->plan->chunks[a->chunk];
    double x = place(p, p->timeline->start[id]), width = place(p, p->timeline->end[id]) - x;
    int dropped = a->pass <= CF_R && !a->keep;
    char label[32];

    (void)snprintf(label, sizeof label, "%s%d", cf_pass_name((cf_pass)a->pass), (int)a->chunk);
    text_out_put(&p->to, "<rect class=\"%s%s\" x=\"%.3f\" y=\"%d\" width=\"%.3f\" height=\"%d\" fill=\"%s\" "
                         "stroke=\"#fff\">",
                 cf_pass_name((cf_pass)a->pass), dropped ? " dropped" : "", x, y, width, p->box, fills[a->pass]);
    text_out_put(&p->to, "<title>%s: %.9g to %.9g</title></rect>", label, p->timeline->start[id], p->timeline->end[id]);
    if (chunk->chain >= 0 && width > 2)
        text_out_put(&p->to, "<path d=\"M%.2f %dh%.2f\" stroke=\"%s\" stroke-width=\"2\"/>", x, y + 1, width,
                     hues[packing_tree(p->plan, chunk) % N_HUES]);
    if (dropped) text_out_put(&p->to, "<path d=\"M%.2f %dh%.2f\" stroke=\"#fff\"/>", x, y + p->box - 2, width);
    if (width > label_width(p, label) && p->box >= p->type)
        text_out_put(&p->to, "<text x=\"%.2f\" y=\"%d\" fill=\"%s\">%s</text>", x + 2.5, y + baseline(p),
                     inks[a->pass], label);
    text_out_put(&p->to, "\n");
}

static void put_lane(picture *p, int64_t stage) {
    int y = p->top + (int)stage * p->lane;
    int64_t i;

    text_out_put(&p->to, "<g class=\"stage\" stroke-width=\".7\">\n"
                         "<text x=\"%d\" y=\"%d\" fill=\"#333\" text-anchor=\"end\">stage %lld</text>"
                         "<path d=\"M%d %dH%d\" stroke=\"#ddd\"/>\n",
                 names_end(p), y + baseline(p), (long long)stage, p->left, y + p->box, p->width - p->right);
    for (i = p->schedule->first[stage]; i < p->schedule->first[stage + 1]; i++)
        if (is_pass(p, i)) put_box(p, i, y);
    text_out_put(&p->to, "</g>\n");
}

/* Draws one word of the legend after a box that looks like the thing it names, on the next line if it would leave the
   picture. line: the colour of a line that crosses the box at the height `across`; NULL: none. */
static void put_key(picture *p, int *x, int *y, const char *fill, const char *line, double across, const char *name,
                    const char *meaning) {
    int size = grown(p, 9), width = grown(p, 25) + (int)label_width(p, name) + (int)label_width(p, meaning);

    if (*x > p->left && *x + width > p->width) {
        *x = p->left;
        *y += grown(p, 13);
    }
    text_out_put(&p->to, "<path d=\"M%d %dh%dv%dh-%dz\" fill=\"%s\"/>", *x, *y - size + 1, size, size, size, fill);
    if (line)
        text_out_put(&p->to, "<path d=\"M%d %.2fh%d\" stroke=\"%s\" stroke-width=\"2\"/>", *x,
                     *y - size + 1 + across * size, size, line);
    text_out_put(&p->to, "<text x=\"%d\" y=\"%d\">%s%s%s</text>\n", *x + grown(p, 13), *y, name, *name ? " " : "",
                 meaning);
    *x += width;
}

static void put_legend(picture *p, int y) {
    int64_t i, seen[CF_COMPUTE_PASS_COUNT] = {0};
    int pass, dropped = 0, chains = p->plan->n_chains > 0, x = p->left;

    for (i = 0; i < p->schedule->n_actions; i++) {
        if (!is_pass(p, i)) continue;
        seen[p->schedule->actions[i].pass]++;
        dropped |= p->schedule->actions[i].pass == CF_F && !p->schedule->actions[i].keep;
    }
    text_out_put(&p->to, "<g class=\"legend\" fill=\"#333\">\n");
    for (pass = 0; pass < CF_COMPUTE_PASS_COUNT; pass++)
        if (seen[pass]) put_key(p, &x, &y, fills[pass], NULL, 0, cf_pass_name((cf_pass)pass), meanings[pass]);
    if (chains) put_key(p, &x, &y, fills[CF_B], hues[0], 0.1, "",
                        p->plan->order ? "part of a tree" : "part of a long sequence");
    if (dropped) put_key(p, &x, &y, fills[CF_F], "#fff", 0.75, "", "activations dropped");
    text_out_put(&p->to, "</g>\n");
}

cf_result svg_chart_write(const cf_plan *plan, const cf_schedule *schedule, const cf_timeline *timeline,
                          const char *unit, const svg_style *style, cf_write_fn write, void *user, cf_error *error) {
    picture p;
    int64_t stage;
    cf_result result;

    p.plan = plan;
    p.schedule = schedule;
    p.timeline = timeline;
    p.unit = unit;
    lay_out(&p, style, (int)schedule->shape.n_stages);
    result = begin(&p, "Passes of every stage over time", "n_passes", count_passes(&p), write, user, error);
    if (result != CF_OK) return result;
    for (stage = 0; stage < schedule->shape.n_stages; stage++) put_lane(&p, stage);
    put_axis(&p, p.height - p.axis);
    put_legend(&p, p.height - p.axis + grown(&p, 32));
    return end(&p, error);
}

/* ----------------------------------------------------------------------------------------------------------------
   Memory
   ---------------------------------------------------------------------------------------------------------------- */

typedef struct scale {
    double top, unit; /* value at the upper edge; value of one unit */
    const char *name;
} scale;

static double height_of(const picture *p, const scale *s, double value) {
    return p->top + p->plot - (s->top > 0 ? value / s->top : 0) * p->plot;
}

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
        double y = height_of(p, s, (double)mark * step);
        text_out_put(&p->to, "<path d=\"M%d %.2fH%d\" stroke=\"#ddd\"/>", p->left, y, p->width - p->right);
        text_out_put(&p->to, "<text x=\"%d\" y=\"%.2f\" text-anchor=\"end\">%s%s%s</text>\n", names_end(p), y + 3,
                     pipeline_time((double)mark * step / s->unit), mark == 0 ? " " : "", mark == 0 ? s->name : "");
    }
    text_out_put(&p->to, "</g>\n");
}

/* Draws steps: horizontal while an amount is held, then up or down. */
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
                     height_of(p, s, (double)held[i]));
        last = i;
    }
    if (at >= 0) text_out_put(&p->to, "H%.3f", place(p, p->timeline->end[at]));
    text_out_put(&p->to, "\"><title>stage %lld</title></path>\n", (long long)stage);
}

/* largest number of lines with names next to them; places for a name along a line */
enum { MOST_NAMED = 8, PLACES = 40 };

static double time_at(const picture *p, int at) { return p->timeline->makespan * (at + 0.5) / PLACES; }

/* Fills y with the heights of a stage's line at all places; 0 outside the line. */
static void sample_line(const picture *p, const int64_t *held, const scale *s, int64_t stage, double y[PLACES]) {
    int64_t i = p->schedule->first[stage], end = p->schedule->first[stage + 1], last = -1;
    int at;

    for (at = 0; at < PLACES; at++) {
        for (; i < end && (!is_pass(p, i) || p->timeline->start[i] <= time_at(p, at)); i++)
            if (is_pass(p, i)) last = i;
        y[at] = 0;
        if (last >= 0 && (i < end || p->timeline->end[last] > time_at(p, at)))
            y[at] = height_of(p, s, (double)held[last]);
    }
}

/* Returns the space around a name above a line at one place: to other lines, to the line's own steps nearby, and to
   other names, whose heights are `taken`. */
static double room_at(const picture *p, double y[MOST_NAMED][PLACES], const double taken[PLACES], int stage, int at) {
    double height = y[stage][at] - 0.6 * p->type, room = 4 * p->type;
    int64_t other;
    int beside;

    for (beside = at - 1; beside <= at + 1; beside++)
        for (other = 0; other < p->schedule->shape.n_stages; other++) {
            double away = fabs(y[other][beside] - height);
            int level = other == stage && fabs(y[stage][beside] - y[stage][at]) < 1;
            if (y[other][beside] > 0 && !level && away < room) room = away;
        }
    for (beside = at > 3 ? at - 3 : 0; beside <= at + 3 && beside < PLACES; beside++)
        if (taken[beside] > 0 && fabs(taken[beside] - height) < room) room = fabs(taken[beside] - height);
    return room;
}

/* Names each line at the place farthest from other lines and names. */
static void name_lines(picture *p, const int64_t *held, const scale *s) {
    double y[MOST_NAMED][PLACES], taken[PLACES] = {0};
    int stage, at, n = (int)p->schedule->shape.n_stages;

    for (stage = 0; stage < n; stage++) sample_line(p, held, s, stage, y[stage]);
    for (stage = 0; stage < n; stage++) {
        int best = -1;
        for (at = 2; at < PLACES - 2; at++)
            if (y[stage][at] > 0 && (best < 0 || room_at(p, y, taken, stage, at) > room_at(p, y, taken, stage, best)))
                best = at;
        if (best < 0) continue;
        taken[best] = y[stage][best] - 0.6 * p->type;
        text_out_put(&p->to, "<text x=\"%.2f\" y=\"%.2f\" text-anchor=\"middle\" fill=\"%s\" stroke=\"#fff\" "
                             "stroke-width=\"3\" paint-order=\"stroke\">stage %d</text>\n",
                     place(p, time_at(p, best)), y[stage][best] - 0.3 * p->type, hues[stage % N_HUES], stage);
    }
}

/* Names the lines below the picture, if they are too many for names next to them. */
static void put_line_keys(picture *p) {
    int64_t stage;

    for (stage = 0; stage < p->schedule->shape.n_stages && stage < (p->width - p->left) / grown(p, 60); stage++)
        text_out_put(&p->to, "<path d=\"M%d %dh10\" stroke=\"%s\" stroke-width=\"2\"%s/>"
                             "<text x=\"%d\" y=\"%d\">stage %lld</text>\n",
                     p->left + (int)stage * grown(p, 60), p->top + p->plot + grown(p, 28), hues[stage % N_HUES],
                     stage >= N_HUES ? " stroke-dasharray=\"5 2\"" : "", p->left + (int)stage * grown(p, 60) + 13,
                     p->top + p->plot + grown(p, 32), (long long)stage);
}

static void put_limit(picture *p, const scale *s, int64_t limit) {
    double y = height_of(p, s, (double)limit);

    if (limit <= 0 || (double)limit > s->top) return;
    text_out_put(&p->to, "<path class=\"limit\" d=\"M%d %.3fH%d\" stroke=\"#b3261e\" stroke-dasharray=\"6 4\"/>",
                 p->left, y, p->width - p->right);
    text_out_put(&p->to, "<text x=\"%d\" y=\"%.2f\" fill=\"#b3261e\" text-anchor=\"end\">limit</text>\n",
                 p->width - p->right,
                 y - 3);
}

cf_result svg_memory_write(const cf_schedule *schedule, const cf_timeline *timeline, const int64_t *held,
                           held_unit what, int64_t limit, const char *unit, const svg_style *style,
                           cf_write_fn write, void *user, cf_error *error) {
    picture p;
    scale s;
    int64_t stage;
    cf_result result;

    p.plan = NULL;
    p.schedule = schedule;
    p.timeline = timeline;
    p.unit = unit;
    lay_out(&p, style, 0);
    result = begin(&p, "What every stage holds over time", "n_passes", count_passes(&p), write, user, error);
    if (result != CF_OK) return result;
    s = scale_of(&p, held, what, limit);
    put_heights(&p, &s);
    for (stage = 0; stage < schedule->shape.n_stages; stage++) put_line(&p, held, &s, stage);
    put_limit(&p, &s, limit);
    put_axis(&p, p.top + p.plot);
    text_out_put(&p.to, "<g class=\"%s\" fill=\"#333\">\n",
                 schedule->shape.n_stages <= MOST_NAMED ? "names" : "legend");
    if (schedule->shape.n_stages <= MOST_NAMED) name_lines(&p, held, &s);
    else put_line_keys(&p);
    text_out_put(&p.to, "</g>\n");
    return end(&p, error);
}

/* ----------------------------------------------------------------------------------------------------------------
   Chunks
   ---------------------------------------------------------------------------------------------------------------- */

static const char *const pales[] = {"#d5dbe6", "#e6eaf1"}; /* whole sequences, in turns */

/* Returns a number of tokens in its shortest exact form: "8K". */
static const char *tokens_text(int64_t tokens, char text[24]) {
    int in_thousands = tokens > 0 && tokens % 1024 == 0;
    snprintf(text, 24, "%lld%s", (long long)(in_thousands ? tokens / 1024 : tokens), in_thousands ? "K" : "");
    return text;
}

/* Names a slice's sequences and its rows: "3", "0: 8K to 16K", "16 sequences". */
static void name_slice(const cf_plan *plan, const cf_chunk *chunk, const cf_slice *slice, char *label, size_t size) {
    char from[24], to[24], who[32];

    if (slice->n > 1) snprintf(who, sizeof who, "%lld sequences", (long long)slice->n);
    else snprintf(who, sizeof who, "%lld", (long long)slice->sequence);
    if (chunk->chain < 0 || (slice->begin == 0 && slice != &plan->slices[chunk->first_slice]))
        snprintf(label, size, "%s", who);
    else
        snprintf(label, size, "%s: %s to %s", who, tokens_text(slice->begin, from),
                 tokens_text(slice->begin + slice->length, to));
}

/* Returns a colour for each tree, and for each sequence that is spread over ranks, whose shares are separate chains. */
static const char *hue_of(const cf_plan *plan, const cf_chunk *chunk) {
    return hues[(chunk->cp > 0 ? plan->chains[chunk->chain].sequence : packing_tree(plan, chunk)) % N_HUES];
}

static void put_slice(picture *p, const cf_chunk *chunk, int64_t i, double x, double width, int y) {
    const cf_slice *slice = &p->plan->slices[i];
    int split = chunk->chain >= 0 && (i == chunk->first_slice || slice->begin > 0);
    int leaf = split && p->plan->order && slice->n == 1; /* rows that no other sequence shares */
    const char *fill = split ? hue_of(p->plan, chunk) : pales[i % 2];
    char label[96];

    name_slice(p->plan, chunk, slice, label, sizeof label);
    text_out_put(&p->to, "<rect class=\"slice\" x=\"%.3f\" y=\"%d\" width=\"%.3f\" height=\"%d\" fill=\"%s\"%s "
                         "stroke=\"#fff\">", x, y, width, p->box, fill, leaf ? " fill-opacity=\".25\"" : "");
    text_out_put(&p->to, "<title>%s, %lld tokens</title></rect>", label, (long long)slice->length);
    if (width <= label_width(p, label) && slice->n == 1)
        snprintf(label, sizeof label, "%lld", (long long)slice->sequence);
    if (width > label_width(p, label) && p->box >= p->type)
        text_out_put(&p->to, "<text x=\"%.2f\" y=\"%d\" fill=\"%s\">%s</text>", x + 3, y + baseline(p),
                     split && !leaf ? "#fff" : "#333", label);
    text_out_put(&p->to, "\n");
}

/* Draws a chunk as a frame of ChunkSize tokens, with its slices at their places. */
static void put_chunk(picture *p, int64_t id, double column) {
    const cf_chunk *chunk = &p->plan->chunks[id];
    double x = p->left + (double)chunk->rank * column, wide = column - grown(p, 8);
    int y = p->top + (int)(id % p->plan->chunks_per_rank + (p->plan->n_ranks > 1)) * p->lane;
    int64_t i;

    text_out_put(&p->to, "<path class=\"chunk\" d=\"M%.2f %dh%.2fv%dh-%.2fz\" fill=\"none\" stroke=\"#bbb\"/>\n", x, y,
                 wide, p->box, wide);
    for (i = chunk->first_slice; i < chunk->first_slice + chunk->n_slices; i++) {
        double wide_token = wide / (double)p->plan->chunk_size;
        put_slice(p, chunk, i, x + (double)p->plan->slices[i].offset * wide_token,
                  (double)p->plan->slices[i].length * wide_token, y);
    }
}

cf_result svg_plan_write(const cf_plan *plan, const svg_style *style, cf_write_fn write, void *user, cf_error *error) {
    picture p;
    double column;
    int64_t i, boxes = plan->n_chunks + plan->n_slices, named = plan->n_ranks > 1; /* a lane for the names of ranks */
    cf_result result;

    p.plan = plan;
    lay_out(&p, style, boxes > SVG_MOST_PASSES ? 1 : (int)(plan->chunks_per_rank + named));
    p.height -= p.axis - p.top; /* there is no axis below */
    result = begin(&p, "Chunks, and the sequences in them", "n_slices", boxes, write, user, error);
    if (result != CF_OK) return result;
    column = (double)(p.width - p.left) / (double)plan->n_ranks;
    text_out_put(&p.to, "<g class=\"names\" fill=\"#333\">\n");
    for (i = 0; named && i < plan->n_ranks; i++)
        text_out_put(&p.to, "<text x=\"%.2f\" y=\"%d\">rank %lld</text>\n", p.left + (double)i * column,
                     p.top + baseline(&p), (long long)i);
    for (i = 0; i < plan->chunks_per_rank; i++)
        text_out_put(&p.to, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">%s %lld</text>\n", names_end(&p),
                     p.top + (int)(i + named) * p.lane + baseline(&p), named ? "step" : "chunk", (long long)i);
    text_out_put(&p.to, "</g>\n<g class=\"chunks\" stroke-width=\".7\">\n");
    for (i = 0; i < plan->n_chunks; i++) put_chunk(&p, i, column);
    text_out_put(&p.to, "</g>\n");
    return end(&p, error);
}
