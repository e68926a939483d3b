/* report.h - one HTML file that shows a batch, its chunks and its schedules: what `chunkflow report` has found, and the
   writers of it. The page itself is tools/report/; its numbers are a JSON object inside it, and nothing else is. */

#ifndef CHUNKFLOW_REPORT_H
#define CHUNKFLOW_REPORT_H

#include "held.h"
#include "idle.h"
#include "json_write.h"

enum {
    REPORT_MOST_SCHEDULES = 8,
    REPORT_MOST_RANKS = 64,         /* that are simulated; of more only their work is told */
    REPORT_MOST_PASSES = 300000,    /* that are drawn, of one schedule */
    REPORT_MOST_SLICES = 300000     /* that are shown, of one plan */
};

/* A plan that some of the schedules are for. */
typedef struct report_plan {
    const char *name;
    const cf_plan *plan;
} report_plan;

typedef struct report_schedule {
    char name[48];
    int plan;                 /* index of its plan */
    int unsplit;              /* 1: the baseline */
    int measured;             /* 1: its times were measured */
    int fits;                 /* 0: more memory than the GPU has */
    cf_recompute recompute;   /* with a model */
    const cf_schedule *schedule;
    const cf_timeline *timeline;
    const cf_memory_report *memory; /* (n_stages) at the peak of each stage; NULL without a model */
    int64_t fullest;          /* the stage whose memory is the most */
    cf_timing timing;         /* its transfers; `stages` is not to be used */
    idle_report idle;
    int64_t *held;            /* (n_actions) as held_make gives it */
} report_schedule;

typedef struct report_rank {
    int64_t tokens, pairs, n_chunks;   /* idle chunks are not counted */
    double makespan, bubble_useful;    /* of its schedule; -1: not simulated */
    int64_t memory;                    /* bytes of its fullest GPU; 0: not known */
} report_rank;

/* How far a prediction was off, for one kind of pass. */
typedef struct report_error {
    int64_t n;
    double predicted, measured; /* seconds of all of them */
    double off;                 /* mean of |predicted - measured| / measured, of those that took any time */
} report_error;

typedef struct report {
    const packing *packed;
    const pipeline *pipe;
    report_plan plans[2];
    int n_plans;
    report_schedule schedules[REPORT_MOST_SCHEDULES];
    int n_schedules;
    int baseline, best;       /* the shortest that fit, unsplit and of chunks; -1: none */
    char no_baseline[256];    /* why there is none */
    int64_t k;
    report_rank *ranks;       /* (n_ranks) or NULL */
    int64_t n_ranks;
    int predicted, measured;  /* the two of --measured; -1 without */
    report_error errors[CF_COMPUTE_PASS_COUNT];
} report;

/* In words: what was gained against the baseline, and at what memory; and what stands in the way of more. Each line of
   advice is written to `text`; returns 0 where there is no line number i. */
void report_sentence(const report *r, char *text, size_t size);
int report_advice(const report *r, int i, char *text, size_t size);

/* The data alone, and the page with it. */
void report_write_json(const report *r, cli_output *to);
void report_write_page(const report *r, cli_output *to);

#endif /* CHUNKFLOW_REPORT_H */
