/* report.h - one HTML file that shows a batch, its chunks and its schedules: what `chunkflow report` has found, and the
   writers of it; `chunkflow tune` and `chunkflow reproduce` write pages of their own with the same frame. A page is
   tools/report/; its numbers are JSON objects inside it, and nothing else is. */

#ifndef CHUNKFLOW_REPORT_H
#define CHUNKFLOW_REPORT_H

#include "../command/baseline.h"
#include "../command/held.h"
#include "../command/idle.h"
#include "../command/json_write.h"

enum {
    REPORT_MOST_SCHEDULES = 8,
    REPORT_MOST_TRIES = 16,
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
    int fits, held_down;      /* whether it does on the GPU, and whether it had to be made again for that */
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

/* The error of a prediction, for one kind of pass. */
typedef struct report_error {
    int64_t n;
    double predicted, measured; /* seconds of all of them */
    double off;                 /* mean of |predicted - measured| / measured, of those that took any time */
} report_error;

/* Other options, and what came of them. */
typedef struct report_try {
    char options[192];
    double makespan;
    int64_t memory; /* bytes of the fullest GPU */
    int fits, pays; /* pays: it fits, and is shorter by so much that what is tried next builds on it */
} report_try;

typedef struct report {
    const packing *packed;
    const pipeline *pipe;
    char part[64];            /* which part of the list this batch is; "" for all of it */
    report_plan plans[2];
    int n_plans;
    report_schedule schedules[REPORT_MOST_SCHEDULES];
    pipeline_run runs[REPORT_MOST_SCHEDULES]; /* what they point to, parallel to them */
    int n_schedules;
    baseline unsplit;         /* its plan; the run is among those above */
    baseline_tuned context;   /* where context parallelism is the faster baseline; else its best is untried */
    int baseline, best;       /* unsplit, and the one of chunks that the page is about; -1: none fits */
    char no_baseline[256];    /* why there is none */
    int64_t k;
    const char *k_words;      /* why that K, where nobody gave it; or NULL */
    report_try tries[REPORT_MOST_TRIES];
    int n_tries;
    report_rank *ranks;       /* (n_ranks) or NULL */
    int64_t n_ranks;
    const char *rank_schedule; /* the name of their schedule */
    int predicted, measured;  /* the two of --measured; -1 without */
    report_error errors[CF_COMPUTE_PASS_COUNT];
} report;

/* ---- putting one together ---- */

/* report_free is due, whatever comes after. */
void report_start(report *r, const packing *packed, const pipeline *pipe, int64_t k);
void report_free(report *r);

/* These return exit codes. The first makes the baseline, or says why there is none; the second makes a schedule of the
   chunks and takes the shortest that fits for the best. */
int report_add_baseline(report *r, const packing_options *asked, const baseline_rule *rule);
int report_add_case(report *r, const char *name, const pipeline_case *what);

/* Looks whether the baseline is faster with context parallelism, or fits only so. Returns an exit code. */
int report_add_context(report *r, const packing_options *asked);

/* Takes a run over as the next schedule, with its idle time and its memory over time. recompute: 0 for what the options
   say. measured: its times, or NULL for simulated ones. */
int report_add_run(report *r, const char *name, const cf_plan *plan, const cf_schedule *schedule, pipeline_run *run,
                   cf_recompute recompute, const cf_timeline *measured);

/* Ranks side by side, where there are several: `simulate` makes the run of one; if it cannot, the rank has no time,
   but want of memory ends it all. name: of the schedule that it makes. Returns an exit code. */
typedef cf_result (*report_rank_fn)(void *user, const pipeline *rank, pipeline_run *out);
int report_add_ranks(report *r, const char *name, report_rank_fn simulate, void *user);

/* Tries other options on the best schedule, where there are a model and a GPU: other ChunkSizes (of one rank), no
   recomputation, more chunks kept of a chain (--k) and in all (--limit), virtual and evener stages, one after the
   other. All are held to the GPU's bytes, as every `best` is. what: the case to try them with; asked: how the list was
   packed. Returns an exit code: a change that cannot be made is left out, unless it is for want of memory. */
int report_try_changes(report *r, const pipeline_case *what, const packing_options *asked);

/* ---- words ---- */

/* Write the gain over the baseline with its memory, and the obstacles to more of it. Each line of advice is written to
   `text`; returns 0 if there is no line number i. */
void report_sentence(const report *r, char *text, size_t size);
int report_advice(const report *r, int i, char *text, size_t size);

/* The first thing to do, which is one of those lines: options that were tried, and fit. Returns 0 where none were. */
int report_do(const report *r, char *text, size_t size);

/* ---- writing ---- */

void report_write_json(const report *r, cli_output *to);

/* The member "terms": what the terms of a memory report are called. */
void report_write_term_names(json_writer *w);

/* An object of data in a page: what writes it, and of what. */
typedef struct report_data {
    void (*write)(const void *of, cli_output *to);
    const void *of;
} report_data;

/* The parts of a page, from top to bottom. A part without a writer is left out. */
enum { REPORT_PAGE_TUNING, REPORT_PAGE_REPRODUCTION, REPORT_PAGE_REPORT, REPORT_PAGE_PARTS };

void report_write_page(const report_data parts[REPORT_PAGE_PARTS], cli_output *to);

/* The same for a report alone. */
void report_write_report(const report *r, cli_output *to);

#endif /* CHUNKFLOW_REPORT_H */
