/* svg.h - pictures for a paper or a page: chunks with their sequences, passes over time, memory over time. */

#ifndef CHUNKFLOW_SVG_H
#define CHUNKFLOW_SVG_H

#include "held.h"

#define SVG_MOST_PASSES 20000 /* largest number of passes or slices in one picture; a page has no room for more */

/* The style of a picture, in units that a browser shows as pixels. Zero means default in every member. */
typedef struct svg_style {
    /* of the picture; default 720, and the height of lanes with one line of type, or of a plot */
    int64_t width, height;
    int64_t type;          /* size of type; default 10. Everything except the width grows with it */
} svg_style;

/* Options for a struct with a member of this type. */
#define SVG_STYLE_OPTIONS(record, member)                                                                             \
    {.name = "--svg-width", .needs = "--svg|--memory-svg",                                                         \
     .value = "N", .kind = CLI_NUMBER, .offset = offsetof(record, member.width), .min = 160,                       \
     .max = 20000, .help = "width of pictures, in pixels; default 720"},                                           \
    {.name = "--svg-height", .needs = "--svg|--memory-svg",                                                        \
     .value = "N", .kind = CLI_NUMBER, .offset = offsetof(record, member.height), .min = 60,                       \
     .max = 20000, .help = "height of each; default what its lines of type need"},                                 \
    {.name = "--svg-type", .needs = "--svg|--memory-svg",                                                          \
     .value = "N", .kind = CLI_NUMBER, .offset = offsetof(record, member.type), .min = 4,                          \
     .max = 100, .help = "size of their type; default 10. A picture that is printed 240\n"                         \
     "points wide has type of N points with --svg-width 240"}

/* Draws a line per stage, time from left to right, with a box for every pass. Every box has a title: "F3: 12 to 14".
   unit: of the times, "s". Errors: CF_ERROR_LIMIT with the number of passes, CF_ERROR_WRITE. */
cf_result svg_chart_write(const cf_plan *plan, const cf_schedule *schedule, const cf_timeline *timeline,
                          const char *unit, const svg_style *style, cf_write_fn write, void *user, cf_error *error);

/* Draws a line per stage for the amount that it holds while its passes run. held: from held_make. limit: a horizontal
   line with that name; 0: none. Errors: as above. */
cf_result svg_memory_write(const cf_schedule *schedule, const cf_timeline *timeline, const int64_t *held,
                           held_unit what, int64_t limit, const char *unit, const svg_style *style,
                           cf_write_fn write, void *user, cf_error *error);

/* Draws a line per chunk, one below another, and a column per rank. Slices are drawn at their places in the chunk,
   coloured if their sequence or tree is split. Every slice has a title: "0: 8K to 16K, 8192 tokens". Errors: as above;
   CF_ERROR_LIMIT counts chunks and slices. */
cf_result svg_plan_write(const cf_plan *plan, const svg_style *style, cf_write_fn write, void *user, cf_error *error);

#endif /* CHUNKFLOW_SVG_H */
