/* chart.c - schedules on a terminal. */

#include "chart.h"
#include "held.h"
#include "progress.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEFAULT_WIDTH 100

static int64_t choose_width(const chart_options *options) {
    int64_t columns = progress_columns(1);

    if (options->width > 0) return options->width;
    return columns >= CHART_MIN_WIDTH ? columns : DEFAULT_WIDTH;
}

static int choose_colour(const chart_options *options) {
    const char *forbidden = getenv("NO_COLOR");

    if (options->colour == CHART_ALWAYS) return 1;
    if (options->colour == CHART_NEVER || (forbidden && *forbidden)) return 0;
    return progress_is_terminal(STDOUT_FILENO);
}

/* Returns whether the terminal has block elements. The command stays in the C locale, so it reads the environment. */
static int has_blocks(void) {
    static const char *const variables[] = {"LC_ALL", "LC_CTYPE", "LANG"};
    const char *locale = NULL;
    int i;

    for (i = 0; i < 3 && (!locale || !*locale); i++) locale = getenv(variables[i]);
    return locale && (strstr(locale, "UTF-8") || strstr(locale, "utf8") || strstr(locale, "UTF8") ||
                      strstr(locale, "utf-8"));
}

/* Returns the columns of "stage 12 " for the largest stage number. */
static int label_width(const cf_schedule *schedule) {
    return snprintf(NULL, 0, "stage %lld ", (long long)(schedule->shape.n_stages - 1));
}

static void print_label(const cf_schedule *schedule, int64_t stage) {
    printf("stage %-*lld", label_width(schedule) - 6, (long long)stage);
}

/* ----------------------------------------------------------------------------------------------------------------
   The list
   ---------------------------------------------------------------------------------------------------------------- */

static int name_action(const cf_schedule *schedule, const cf_action *a, char *text, size_t size) {
    const char *dropped = a->pass <= CF_R && !a->keep ? "-" : "";
    const char *pass = cf_pass_name((cf_pass)a->pass);

    if (schedule->shape.n_virtual > 1)
        return snprintf(text, size, "%d%s%d%s", (int)a->stage, pass, (int)a->chunk, dropped);
    return snprintf(text, size, "%s%d%s", pass, (int)a->chunk, dropped);
}

void chart_list(const cf_schedule *schedule, const chart_options *options) {
    int64_t width = choose_width(options), stage, i;
    int indent = label_width(schedule);

    for (stage = 0; stage < schedule->shape.n_stages && !cli_stdout_failed(); stage++) {
        int64_t at = indent;
        print_label(schedule, stage);
        for (i = schedule->first[stage]; i < schedule->first[stage + 1]; i++) {
            char name[64];
            int n = name_action(schedule, &schedule->actions[i], name, sizeof name);
            if (at + n + 1 > width && at > indent) {
                printf("\n%*s", indent, "");
                at = indent;
            }
            printf("%s%s", at > indent ? " " : "", name);
            at += n + (at > indent);
        }
        putchar('\n');
    }
}

/* ----------------------------------------------------------------------------------------------------------------
   The chart
   ---------------------------------------------------------------------------------------------------------------- */

/* One column of one stage's line. */
typedef struct column {
    int64_t action; /* the action with most time in the column; -1: none */
    double most;    /* its time, in columns */
    double busy;    /* time of all actions, in columns */
} column;

typedef struct canvas {
    const cf_schedule *schedule;
    const cf_timeline *timeline;
    const int64_t *held; /* (n_actions) bytes; NULL: chunks are counted */
    int64_t copies;      /* copies that make a whole stage's: the number of virtual stages, if each has its own */
    int64_t limit;       /* limit in bytes of a whole stage; 0: none. Limits of chunks are in the schedule */
    column *columns;
    int64_t width;
    int colour;
    int at;    /* words below the chart: column after the last word */
    int blank; /* 1: a blank comes before the next word */
} canvas;

static void cover(canvas *c, int64_t action) {
    double makespan = c->timeline->makespan, width = (double)c->width;
    double start = c->timeline->start[action] / makespan * width, end = c->timeline->end[action] / makespan * width;
    int64_t i;

    for (i = (int64_t)start; i < c->width && (double)i < end; i++) {
        double from = start > (double)i ? start : (double)i;
        double to = end < (double)(i + 1) ? end : (double)(i + 1);
        column *at = &c->columns[i];
        at->busy += to - from;
        if (to - from > at->most) {
            at->most = to - from;
            at->action = action;
        }
    }
}

static void fill_columns(canvas *c, int64_t stage) {
    int64_t i;

    for (i = 0; i < c->width; i++) {
        c->columns[i].action = -1;
        c->columns[i].most = c->columns[i].busy = 0;
    }
    if (c->timeline->makespan > 0)
        for (i = c->schedule->first[stage]; i < c->schedule->first[stage + 1]; i++)
            if (c->schedule->actions[i].pass < CF_COMPUTE_PASS_COUNT) cover(c, i);
    for (i = 0; i < c->width; i++)
        if (c->columns[i].busy < 0.5) c->columns[i].action = -1;
}

/* Returns the colours of a pass, for terminals with 256 of them. */
static const char *colour_of(int pass) {
    switch (pass) {
    case CF_F: return "\033[38;5;231;48;5;27m";
    case CF_R: return "\033[38;5;16;48;5;117m";
    case CF_B: return "\033[38;5;16;48;5;208m";
    case CF_I: return "\033[38;5;16;48;5;80m";
    default: return "\033[38;5;16;48;5;194m";
    }
}

/* Draws n columns of one pass: its letter, its chunk if there is room for the whole number, and a filling up to the
   next pass. */
static void draw_pass(const canvas *c, const cf_action *a, int64_t n) {
    char text[32];
    int later = a->stage >= c->schedule->shape.n_stages;
    char letter = *cf_pass_name((cf_pass)a->pass);
    int used = snprintf(text, sizeof text, "%c%d", later ? tolower((unsigned char)letter) : letter, (int)a->chunk);

    if (used > n) used = 1;
    if (c->colour) fputs(colour_of(a->pass), stdout);
    printf("%.*s", used, text);
    for (; used < n; used++) putchar(c->colour ? ' ' : '-');
    if (c->colour) fputs("\033[0m", stdout);
}

static void draw_stage(const canvas *c, int64_t stage) {
    int64_t i, n;

    print_label(c->schedule, stage);
    putchar('|');
    for (i = 0; i < c->width; i += n) {
        int64_t action = c->columns[i].action;
        for (n = 1; i + n < c->width && c->columns[i + n].action == action; n++) {}
        if (action >= 0) {
            draw_pass(c, &c->schedule->actions[action], n);
        } else {
            int64_t dots;
            for (dots = 0; dots < n; dots++) putchar(c->colour ? ' ' : '.');
        }
    }
    fputs("|\n", stdout);
}

double chart_step(double x) {
    static const double steps[] = {1, 2, 5};
    double power = 1;
    int i = 0;

    if (!(x > 1e-300)) return 1e-300;
    if (x > 1e300) return x;
    while (power > x) power /= 10;
    while (power * 10 <= x) power *= 10;
    while (i < 3 && power * steps[i] < x) i++;
    return i < 3 ? power * steps[i] : power * 10;
}

/* Draws the time axis below the chart, with a mark about every dozen columns. It leaves out numbers that would touch
   the previous one or leave the chart. */
static void draw_axis(const canvas *c) {
    double makespan = c->timeline->makespan, step = chart_step(makespan * 12 / (double)c->width);
    int64_t at = -1, mark;

    if (!(makespan > 0)) return;
    printf("%*s", label_width(c->schedule) + 1, "");
    for (mark = 0; (double)mark * step <= makespan; mark++) {
        int64_t place = (int64_t)((double)mark * step / makespan * (double)c->width + 0.5);
        const char *text = pipeline_time((double)mark * step);
        int64_t n = (int64_t)strlen(text);
        if (place + n > c->width + 1) break;
        if (place <= at) continue;
        printf("%*s%s", (int)(place - (at < 0 ? 0 : at)), "", text);
        at = place + n;
    }
    putchar('\n');
}

/* Begins words below the chart; those without room on a line begin the next one. */
static void begin_words(canvas *c) {
    c->at = label_width(c->schedule) + 1;
    c->blank = 0;
    printf("%*s", c->at, "");
}

static void make_room(canvas *c, int n) {
    if (c->blank && c->at + 1 + n > label_width(c->schedule) + 2 + c->width) {
        putchar('\n');
        begin_words(c);
    }
    if (c->blank) putchar(' ');
    c->at += c->blank + n;
    c->blank = 0;
}

static void put_words(canvas *c, const char *text) {
    while (*text) {
        int n = (int)strcspn(text, " ");
        if (n > 0) make_room(c, n);
        printf("%.*s", n, text);
        text += n;
        c->blank |= *text == ' ';
        text += *text == ' ';
    }
}

/* Explains the letters that occur. */
static void draw_legend(canvas *c) {
    static const char *const meanings[CF_COMPUTE_PASS_COUNT] = {" forward, ", " replay, ", " backward, ",
                                                                " input gradient, ", " weight gradient, "};
    int seen[CF_COMPUTE_PASS_COUNT] = {0}, pass;
    int64_t i;

    for (i = 0; i < c->schedule->n_actions; i++)
        if (c->schedule->actions[i].pass < CF_COMPUTE_PASS_COUNT) seen[c->schedule->actions[i].pass] = 1;
    begin_words(c);
    for (pass = 0; pass < CF_COMPUTE_PASS_COUNT; pass++) {
        if (!seen[pass]) continue;
        make_room(c, 1);
        printf("%s%s%s", c->colour ? colour_of(pass) : "", cf_pass_name((cf_pass)pass), c->colour ? "\033[0m" : "");
        put_words(c, meanings[pass]);
    }
    put_words(c, c->colour ? "blank idle" : ". idle");
    if (c->schedule->shape.n_virtual > 1) put_words(c, "; lower case: the stage's later virtual stages");
    putchar('\n');
}

/* ----------------------------------------------------------------------------------------------------------------
   Memory below the chart
   ---------------------------------------------------------------------------------------------------------------- */

/* Returns the amount that a stage holds while an action runs. */
static double held_by(const canvas *c, int64_t action) {
    return (double)(c->held ? c->held[action] : c->timeline->live[action]) / (double)c->copies;
}

/* 0: none. */
static double limit_of(const canvas *c, int64_t stage) {
    if (c->held) return (double)c->limit;
    if (!c->schedule->limits.chunks_by_stage || c->schedule->limits.chunks_by_stage[stage] <= 0) return 0;
    return (double)c->schedule->limits.chunks_by_stage[stage] / (double)c->copies;
}

static double peak_of(const canvas *c, int64_t stage) {
    double peak = 0;
    int64_t i;

    for (i = c->schedule->first[stage]; i < c->schedule->first[stage + 1]; i++)
        if (held_by(c, i) > peak) peak = held_by(c, i);
    return peak;
}

/* Returns a number in at most five characters: 3, 3.5, 24.6K, 79.6G. */
static const char *compact(double value) {
    static const char units[] = " KMGTPEZY";
    char *text = cli_scratch();
    int i = 0;

    while (value >= 999.5 && units[i + 1]) {
        value /= 1024;
        i++;
    }
    snprintf(text, CLI_SCRATCH_BYTES, value < 1 && i > 0 ? "%.2f" : "%.3g", value);
    if (i > 0) {
        size_t n = strlen(text);
        text[n] = units[i];
        text[n + 1] = '\0';
    }
    return text;
}

/* Fills in the maximum held in each column; between two passes it is that of the earlier one. */
static void fill_heights(canvas *c, int64_t stage) {
    double makespan = c->timeline->makespan, width = (double)c->width;
    int64_t i, next, last = c->schedule->first[stage + 1];

    for (i = 0; i < c->width; i++) c->columns[i].most = 0;
    for (i = c->schedule->first[stage]; i < last; i = next) {
        double value = held_by(c, i), end;
        int64_t at;
        for (next = i + 1; next < last && c->schedule->actions[next].pass >= CF_COMPUTE_PASS_COUNT; next++) {}
        if (c->schedule->actions[i].pass >= CF_COMPUTE_PASS_COUNT) continue; /* runs beside the passes */
        end = (next < last ? c->timeline->start[next] : c->timeline->end[i]) / makespan * width;
        for (at = (int64_t)(c->timeline->start[i] / makespan * width); at < c->width && (double)at < end; at++)
            if (value > c->columns[at].most) c->columns[at].most = value;
    }
}

/* height: 0 nothing, 8 a full column. */
static void put_height(const canvas *c, int height, int above, int blocks) {
    if (above && c->colour) fputs("\033[38;5;196m", stdout);
    if (above && !c->colour) putchar('!');
    else if (height == 0) putchar(' ');
    else if (blocks) printf("\342\226%c", 0x80 + height);
    else putchar(".:-=+*#@"[height - 1]);
    if (above && c->colour) fputs("\033[0m", stdout);
}

static void draw_memory_of(canvas *c, int64_t stage, double top) {
    double limit = limit_of(c, stage);
    char text[32];
    int64_t i;

    snprintf(text, sizeof text, "%s/%s", compact(peak_of(c, stage)), compact(limit));
    if (c->held || limit == 0 || strlen(text) > 5)
        snprintf(text, sizeof text, "%s", compact(peak_of(c, stage)));
    printf("%*lld %5s |", label_width(c->schedule) - 7, (long long)stage, text);
    fill_heights(c, stage);
    for (i = 0; i < c->width; i++) {
        double value = c->columns[i].most;
        int height = (int)(value / top * 8 + 0.999999);
        put_height(c, height < 8 ? height : 8, limit > 0 && value > limit, has_blocks());
    }
    fputs("|\n", stdout);
}

static void draw_memory(canvas *c) {
    const char *unit = c->held ? "bytes" : "chunks";
    double top = 0;
    char text[160];
    int64_t stage;

    for (stage = 0; stage < c->schedule->shape.n_stages; stage++)
        if (peak_of(c, stage) > top) top = peak_of(c, stage);
    if (!(top > 0) || !(c->timeline->makespan > 0)) return;
    begin_words(c);
    snprintf(text, sizeof text, "%s that each stage holds: the most%s, and over time; a full column is %s%s%s", unit,
             c->held || !c->schedule->limits.chunks_by_stage ? "" : "/limit", compact(top),
             c->held && c->limit > 0 ? ", the limit " : "",
             c->held && c->limit > 0 ? compact((double)c->limit) : "");
    put_words(c, text);
    putchar('\n');
    for (stage = 0; stage < c->schedule->shape.n_stages && !cli_stdout_failed(); stage++) draw_memory_of(c, stage, top);
}

int chart_draw(const pipeline *pipe, const cf_schedule *schedule, const cf_timeline *timeline, const int64_t *held,
               const chart_options *options) {
    held_unit unit = held_unit_of(pipe);
    canvas c;
    int64_t stage;

    memset(&c, 0, sizeof c);
    c.schedule = schedule;
    c.timeline = timeline;
    c.held = unit == HELD_TOKENS ? NULL : held;
    c.copies = unit == HELD_GPU_BYTES ? 1 : schedule->shape.n_virtual;
    c.limit = pipe->gpu_bytes > 0 ? pipe->gpu_bytes : pipe->limit_bytes;
    c.colour = choose_colour(options);
    c.width = choose_width(options) - label_width(schedule) - 2; /* two bars */
    if (c.width < 1) c.width = 1;
    c.columns = (column *)malloc((size_t)c.width * sizeof *c.columns);
    if (!c.columns) return cli_failed("out of memory");
    for (stage = 0; stage < schedule->shape.n_stages && !cli_stdout_failed(); stage++) {
        fill_columns(&c, stage);
        draw_stage(&c, stage);
    }
    draw_axis(&c);
    draw_legend(&c);
    draw_memory(&c);
    free(c.columns);
    return CLI_OK;
}
