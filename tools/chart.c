/* chart.c - schedules on a terminal. */

#define _DEFAULT_SOURCE /* ioctl, isatty */
#include "chart.h"
#include "pipeline.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define DEFAULT_WIDTH 100

static int64_t choose_width(const chart_options *options) {
    struct winsize size;

    if (options->width > 0) return options->width;
    if (isatty(STDOUT_FILENO) && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col >= CHART_MIN_WIDTH)
        return size.ws_col < CHART_MAX_WIDTH ? size.ws_col : CHART_MAX_WIDTH;
    return DEFAULT_WIDTH;
}

static int choose_colour(const chart_options *options) {
    const char *forbidden = getenv("NO_COLOR");

    if (options->colour == CHART_ALWAYS) return 1;
    if (options->colour == CHART_NEVER || (forbidden && *forbidden)) return 0;
    return isatty(STDOUT_FILENO);
}

/* Columns of "stage 12 " for the largest stage number. */
static int label_width(const cf_schedule *schedule) {
    return snprintf(NULL, 0, "stage %lld ", (long long)(schedule->n_stages - 1));
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

    if (schedule->n_virtual > 1) return snprintf(text, size, "%d%s%d%s", (int)a->stage, pass, (int)a->chunk, dropped);
    return snprintf(text, size, "%s%d%s", pass, (int)a->chunk, dropped);
}

void chart_list(const cf_schedule *schedule, const chart_options *options) {
    int64_t width = choose_width(options), stage, i;
    int indent = label_width(schedule);

    for (stage = 0; stage < schedule->n_stages && !cli_stdout_failed(); stage++) {
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
    int64_t action; /* the one with the most time in it; -1: none */
    double most;    /* its time, in columns */
    double busy;    /* time of all, in columns */
} column;

typedef struct canvas {
    const cf_schedule *schedule;
    const cf_timeline *timeline;
    column *columns;
    int64_t width;
    int colour;
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

/* The colours of a pass, for terminals with 256 of them. */
static const char *colour_of(int pass) {
    switch (pass) {
    case CF_F: return "\033[38;5;231;48;5;27m";
    case CF_R: return "\033[38;5;16;48;5;117m";
    case CF_B: return "\033[38;5;16;48;5;208m";
    case CF_I: return "\033[38;5;16;48;5;80m";
    default: return "\033[38;5;16;48;5;194m";
    }
}

/* n columns of one pass: its letter, the chunk if there is room for all of it, and a filling that ends where the next
   pass begins. */
static void draw_pass(const canvas *c, const cf_action *a, int64_t n) {
    char text[32];
    int later = a->stage >= c->schedule->n_stages;
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

/* The time below the chart, a mark at least every dozen columns. */
static void draw_axis(const canvas *c) {
    double makespan = c->timeline->makespan, step = chart_step(makespan * 12 / (double)c->width);
    int64_t at = 0, mark;

    if (!(makespan > 0)) return;
    printf("%*s", label_width(c->schedule) + 1, "");
    for (mark = 0; (double)mark * step <= makespan; mark++) {
        int64_t place = (int64_t)((double)mark * step / makespan * (double)c->width + 0.5);
        if (place >= c->width) break;
        printf("%*s", (int)(place - at), "");
        at = place + printf("%s", pipeline_time((double)mark * step));
    }
    putchar('\n');
}

/* What the letters mean, of those that are there. */
static void draw_legend(const canvas *c) {
    static const char *const meanings[CF_COMPUTE_PASS_COUNT] = {"forward", "replay", "backward", "input gradient",
                                                                "weight gradient"};
    int seen[CF_COMPUTE_PASS_COUNT] = {0}, pass;
    int64_t i;

    for (i = 0; i < c->schedule->n_actions; i++)
        if (c->schedule->actions[i].pass < CF_COMPUTE_PASS_COUNT) seen[c->schedule->actions[i].pass] = 1;
    printf("%*s", label_width(c->schedule) + 1, "");
    for (pass = 0; pass < CF_COMPUTE_PASS_COUNT; pass++) {
        const char *before = c->colour ? colour_of(pass) : "", *after = c->colour ? "\033[0m" : "";
        if (seen[pass]) printf("%s%s%s %s, ", before, cf_pass_name((cf_pass)pass), after, meanings[pass]);
    }
    printf("%s idle%s\n", c->colour ? "blank" : ".",
           c->schedule->n_virtual > 1 ? "; lower case: the stage's later virtual stages" : "");
}

int chart_draw(const cf_schedule *schedule, const cf_timeline *timeline, const chart_options *options) {
    canvas c;
    int64_t stage;

    c.schedule = schedule;
    c.timeline = timeline;
    c.colour = choose_colour(options);
    c.width = choose_width(options) - label_width(schedule) - 2; /* two bars */
    if (c.width < 1) c.width = 1;
    c.columns = (column *)malloc((size_t)c.width * sizeof *c.columns);
    if (!c.columns) return cli_failed("out of memory");
    for (stage = 0; stage < schedule->n_stages && !cli_stdout_failed(); stage++) {
        fill_columns(&c, stage);
        draw_stage(&c, stage);
    }
    draw_axis(&c);
    draw_legend(&c);
    free(c.columns);
    return CLI_OK;
}
