/* chart.h - schedules on a terminal: the list of passes and the chart over time (a Gantt chart). */

#ifndef CHUNKFLOW_CHART_H
#define CHUNKFLOW_CHART_H

#include "pipeline.h"

#define CHART_MIN_WIDTH 20
#define CHART_MAX_WIDTH 10000

typedef enum chart_colour { CHART_AUTO = 1, CHART_ALWAYS, CHART_NEVER } chart_colour;

typedef struct chart_options {
    int64_t width;  /* 0: as wide as the terminal, or 100 columns */
    int64_t colour; /* a chart_colour; 0: CHART_AUTO */
} chart_options;

/* Entries of an option table, like PACKING_OPTIONS. */
#define CHART_OPTIONS(type, member)                                                                                \
    {.name = "--width", .value = "COLUMNS", .kind = CLI_NUMBER, .offset = offsetof(type, member.width),            \
     .min = CHART_MIN_WIDTH, .max = CHART_MAX_WIDTH,                                                               \
     .help = "of the chart and the list; default: the terminal's, or 100"},                                        \
    {.name = "--color", .value = "auto|always|never", .kind = CLI_CHOICE,                                          \
     .offset = offsetof(type, member.colour),                                                                      \
     .help = "colour the chart; auto, the default: on a terminal that has\n"                                       \
     "colours, unless NO_COLOR is set"}

/* Prints each stage's passes in order: F forward, R replay, B backward, I input gradient, W weight gradient, each
   followed by its chunk; "-" after F: nothing is kept. With virtual stages, their number comes first. */
void chart_list(const cf_schedule *schedule, const chart_options *options);

/* Draws a line per stage, time from left to right. A column shows the pass that fills most of it; '.' is idle. A pass
   begins with its letter, which also has its colour; its chunk's number follows if there is room for all of it. Lower
   case: a virtual stage other than the stage's first. Transfers and copies, which run beside the passes, are left out.

   Below, on the same axis, it draws how much each stage holds, converted to whole stages: the maximum within a column,
   after the stage's peak (and its limit, if it has one). Bars are block elements in a UTF-8 locale, '.' to '@'
   elsewhere. Parts above the limit are red, or '!'. Bytes are counted if `pipe` has any, else chunks; then `held`, from
   held_make, may be NULL. Returns an exit code. */
int chart_draw(const pipeline *pipe, const cf_schedule *schedule, const cf_timeline *timeline, const int64_t *held,
               const chart_options *options);

/* Returns the step of an axis: the first of 1, 2, 5, 10, 20, 50, ... times a power of ten that is not below x. */
double chart_step(double x);

#endif /* CHUNKFLOW_CHART_H */
