/* svg.h - pictures of a schedule for a paper or a page: its passes over time, and its memory. */

#ifndef CHUNKFLOW_SVG_H
#define CHUNKFLOW_SVG_H

#include "held.h"

#define SVG_MOST_PASSES 20000 /* in one picture: more than there are places for on any page */

/* The style of a picture, in units that a browser shows as pixels. Zero is the default in every member. */
typedef struct svg_style {
    int64_t width, height; /* of all; 720, and what lanes of one line of type, or a plot, take */
    int64_t type;          /* its size; 10. All but the width grow with it */
} svg_style;

/* A line per stage, time from left to right, a box for every pass. Every box has a title: "F3: 12 to 14". unit: of the
   times, "s". Errors: CF_ERROR_LIMIT with the number of passes, CF_ERROR_WRITE. */
cf_result svg_chart_write(const cf_plan *plan, const cf_schedule *schedule, const cf_timeline *timeline,
                          const char *unit, const svg_style *style, cf_write_fn write, void *user, cf_error *error);

/* A line per stage for what it holds while its passes run: held, as held_make gives it. limit: a line across, with
   that name; 0: none. Errors: as above. */
cf_result svg_memory_write(const cf_schedule *schedule, const cf_timeline *timeline, const int64_t *held,
                           held_unit what, int64_t limit, const char *unit, const svg_style *style,
                           cf_write_fn write, void *user, cf_error *error);

#endif /* CHUNKFLOW_SVG_H */
