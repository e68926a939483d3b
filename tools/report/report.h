/* report.h - one HTML file that shows a batch, its chunks and its schedules: the data of `chunkflow report`, and their
   writers. `chunkflow tune` and `chunkflow reproduce` write their own pages with the same frame. A page consists of the
   files in tools/report/; only its numbers differ, which are JSON objects inside it. */

#ifndef CHUNKFLOW_REPORT_H
#define CHUNKFLOW_REPORT_H

#include "../command/baseline.h"
#include "../command/held.h"
#include "../command/idle.h"
#include "../command/json_write.h"

enum {
    REPORT_MOST_SCHEDULES = 8,
    REPORT_MOST_TRIES = 16,
    REPORT_MOST_RANKS = 64,         /* largest number of ranks to simulate; for further ranks the page has only their
                                       work */
    REPORT_MOST_PASSES = 300000,    /* largest number of passes to draw, of one schedule */
    REPORT_MOST_SLICES = 300000     /* largest number of slices to show, of one plan */
};

/* A plan of one or more schedules. */
typedef struct report_plan {
    const char *name;
    const cf_plan *plan;
} report_plan;

typedef struct report_schedule {
    char name[48];
    int plan;                 /* index of its plan */
    int unsplit;              /* 1: the baseline */
    int measured;             /* 1: its times were measured */
    int fits, held_down;      /* 1: it fits on the GPU; held_down 1: only because it was made again under a limit */
    cf_recompute recompute;   /* with a model */
    int offload;              /* parts in host memory (cf_memory_desc.offload) */
    const cf_schedule *schedule;
    const cf_timeline *timeline;
    const cf_memory_report *memory; /* (n_stages) at the peak of each stage; NULL without a model */
    int64_t fullest;          /* the stage with most memory */
    cf_timing timing;         /* of its transfers; do not use `stages` */
    idle_report idle;
    int64_t *held;            /* (n_actions) from held_make */
} report_schedule;

typedef struct report_rank {
    int64_t tokens, pairs, n_chunks;   /* idle chunks are not counted */
    double makespan, bubble_useful;    /* of its schedule; -1: not simulated */
    int64_t memory;                    /* bytes of its fullest GPU; 0: not known */
} report_rank;

/* The error of a prediction, for one kind of pass. */
typedef struct report_error {
    int64_t n;
    double predicted, measured; /* seconds of all passes */
    double off;                 /* mean of |predicted - measured| / measured, over passes that took any time */
} report_error;

/* Other options, and their result. */
typedef struct report_try {
    char options[192];
    double makespan;
    int64_t memory; /* bytes of the fullest GPU */
    int fits, pays; /* pays: it fits, and is so much shorter that the next try builds on it */
} report_try;

typedef struct report {
    const packing *packed;
    const pipeline *pipe;
    char part[64];            /* part of the list that is this batch; "" for the whole list */
    report_plan plans[2];
    int n_plans;
    report_schedule schedules[REPORT_MOST_SCHEDULES];
    pipeline_run runs[REPORT_MOST_SCHEDULES]; /* the schedules' runs, parallel to them */
    int n_schedules;
    baseline unsplit;         /* its plan; its run is in `runs` */
    baseline_tuned context;   /* if context parallelism is the faster baseline; otherwise its `best` is untried */
    int baseline, best;       /* indices of the unsplit schedule and of the chunked one that the page is about; -1: none
                                 fits */
    char no_baseline[256];    /* why there is no baseline */
    int64_t k;
    const char *k_words;      /* why this K, if it is a default; or NULL */
    report_try tries[REPORT_MOST_TRIES];
    int n_tries;
    report_rank *ranks;       /* (n_ranks) or NULL */
    int64_t n_ranks;
    int slowest;              /* 1: pipe->rank is the slowest of them; 0: it was requested */
    const char *rank_schedule; /* name of the ranks' schedule */
    int predicted, measured;  /* the two schedules of --measured; -1 without */
    report_error errors[CF_COMPUTE_PASS_COUNT];
} report;

/* ---- putting one together ---- */

/* Start and free a report; always free it. */
void report_start(report *r, const packing *packed, const pipeline *pipe, int64_t k);
void report_free(report *r);

/* The first makes the baseline, or records why there is none. The second makes a schedule of the chunks; the shortest
   one that fits becomes the best. Both return exit codes. */
int report_add_baseline(report *r, const packing_options *asked, const baseline_rule *rule);
int report_add_case(report *r, const char *name, const pipeline_case *what);

/* Returns the time of a schedule; if all ranks run in lockstep, their common time. */
double report_seconds(const report *r, const report_schedule *s);

/* Tests whether the baseline is faster, or only fits, with context parallelism. Returns an exit code. */
int report_add_context(report *r, const packing_options *asked);

/* Takes over a run as the next schedule, with its idle time and its memory over time. recompute: 0 for the options'
   own. measured: measured times, or NULL for simulated ones. */
int report_add_run(report *r, const char *name, const cf_plan *plan, const cf_schedule *schedule, pipeline_run *run,
                   cf_recompute recompute, const cf_timeline *measured);

/* Adds all ranks, if there are several. `simulate` makes the run of one rank. If it cannot, the rank has no time;
   running out of memory ends everything. name: of that schedule. pipe: the report's; if it is for every rank, its rank
   becomes the slowest, and the following schedules are that rank's. Returns an exit code. */
typedef cf_result (*report_rank_fn)(void *user, const pipeline *rank, pipeline_run *out);
int report_add_ranks(report *r, pipeline *pipe, const char *name, report_rank_fn simulate, void *user);

/* Tries other options on the best schedule, one after another, if there are a model and a GPU: other ChunkSizes (for
   one rank), no recomputation, more chunks kept of a chain (--k) and in all (--limit), virtual stages, and more even
   stages. All tries keep to the GPU's bytes, as every `best` does. what: the case to change; asked: how the list was
   packed. Returns an exit code. An impossible change is left out; only running out of memory fails. */
int report_try_changes(report *r, const pipeline_case *what, const packing_options *asked);

/* ---- words ---- */

/* Write the gain over the baseline with its memory, and the obstacles to more gain. report_advice writes one line of
   advice to `text`; it returns 0 if there is no line i. */
void report_sentence(const report *r, char *text, size_t size);
int report_advice(const report *r, int i, char *text, size_t size);

/* Returns "", or for one of several ranks ", rank 3 of 8, the slowest" or ", rank 3 of 8 alone". In a cli_scratch. */
const char *report_rank_words(const report *r);

/* Writes the first thing to do, one of those lines: options that were tried, and fit. Returns 0 if there are none. */
int report_do(const report *r, char *text, size_t size);

/* ---- writing ---- */

void report_write_json(const report *r, cli_output *to);

/* Writes the member "terms": the names of the terms of a memory report. */
void report_write_term_names(json_writer *w);

/* An object of data in a page: its writer, and its source. */
typedef struct report_data {
    void (*write)(const void *of, cli_output *to);
    const void *of;
} report_data;

/* The parts of a page, from top to bottom. A part without a writer is left out. */
enum { REPORT_PAGE_TUNING, REPORT_PAGE_REPRODUCTION, REPORT_PAGE_REPORT, REPORT_PAGE_PARTS };

void report_write_page(const report_data parts[REPORT_PAGE_PARTS], cli_output *to);

/* Writes the page with only a report. */
void report_write_report(const report *r, cli_output *to);

#endif /* CHUNKFLOW_REPORT_H */
