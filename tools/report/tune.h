/* tune.h - shared by the files of `chunkflow tune`: the options, the search, and the writers of its outcome. */

#ifndef CHUNKFLOW_TUNE_COMMAND_H
#define CHUNKFLOW_TUNE_COMMAND_H

#include "../command/baseline.h"

#include <signal.h>
#include <time.h>

typedef struct tune_options {
    modelling_options modelling;
    gpu_options gpu;
    int64_t gpus;
    int64_t context, batch, batches, seed, max_sequences;
    const char *chunk_sizes, *ks, *schedules;
    int64_t replay; /* of the choice pipeline|local|both */
    int no_stream, no_outputs, split_backward;
    int64_t stream;
    int64_t max_tries;
    int64_t limit, reserve;
    int64_t tolerance; /* millionths of a percent */
    term_options terms;
    int no_tails;
    int64_t align, max_cp;
    int64_t show, jobs;
    int tsv, no_cp;
    const char *json, *html, *batch_lengths, *costs;
} tune_options;

/* A search, and everything that its description points to. */
typedef struct tune_job {
    const tune_options *asked;
    modelling model;
    cf_gpu gpu;
    cf_tune_desc desc;
    pipeline_costs costs;      /* of --costs */
    int64_t *chunk_sizes, *ks; /* of the options, or NULL */
    cf_schedule_kind kinds[CF_SCHEDULE_COUNT];
    cf_replay replays[2];
    cli_list list;
    int64_t *lengths;
    cf_shared_prefix *shares;       /* NULL: there are no trees */
    int64_t n;                      /* number of lengths within the context */
    int64_t left_out, left_out_tokens, tokens;
    time_t begun, next_line;        /* begin of the search, and time of its next line of progress */
    int64_t done;                   /* work done so far, as cf_tune_progress counts it */
    int64_t baseline_work;          /* expected work of the baselines, which follow */
} tune_job;

/* Tokens of the longest sequence within the context. */
int64_t tune_longest(const tune_job *job);

enum { TUNE_MOST_CELLS = 4096 }; /* cells that a page draws */

/* One ChunkSize with one K: the best of its candidates. */
typedef struct tune_cell {
    int64_t chunk_size, k;
    int64_t candidate; /* the fastest that fits. If none fits: the one with the lowest estimated time, or else the one
                          that needs least */
    int64_t numbers;   /* the candidate whose schedules it uses, usually itself; it may have another K */
    int64_t nearest;   /* if nothing fits: the nearest cell that is known to fit; -1: none */
} tune_cell;

/* All cells, by ChunkSize, then by K. */
typedef struct tune_map {
    int64_t *chunk_sizes, *ks; /* tried values, including the longest sequence */
    int64_t n_chunk_sizes, n_ks;
    tune_cell *cells;
} tune_map;

/* Makes the map. Returns an exit code; call tune_map_free in any case. */
int tune_map_make(const cf_tuning *tuning, tune_map *out);
void tune_map_free(tune_map *map);

enum { TUNE_MOST_FILLS = 12 };

/* The outcome of a search. */
typedef struct tune_outcome {
    const tune_job *job;
    const cf_tuning *tuning;
    baseline_tuned base, recipe; /* recipe: baseline_tune_recipe's; all zero if it was not timed */
    /* the baseline with more in host memory, if it does not fit otherwise; all zero if not tried */
    baseline_tuned away;
    int64_t offload;             /* the value of --offload for it: 1 optimizer, 2 parameters */
    cf_tuning *fills[TUNE_MOST_FILLS]; /* searches under lower limits, for gaps in time against memory */
    int n_fills;
    tune_map map;
} tune_outcome;

/* A candidate of the search or of a fill. */
typedef struct tune_trade {
    const cf_tuning *tuning; /* NULL: none */
    const cf_tune_candidate *c;
    double seconds;
    int64_t bytes;
    int about; /* 1: timed, and its memory found, on some of the batches only */
} tune_trade;

/* Returns the fastest candidate that needs less than `bytes`; of equally fast ones, the one that needs less. */
tune_trade tune_fastest_below(const tune_outcome *o, int64_t bytes);

/* Searches in the gaps of time against memory, until *stop is not 0. */
cf_result tune_fill_gaps(const tune_job *job, tune_outcome *o, const volatile sig_atomic_t *stop, cf_error *error);

/* Returns the split of a candidate, including its recomputation. */
cf_parallel tune_split(const cf_tuning *tuning, const cf_tune_candidate *c);

/* Returns the time of a candidate that was given up, as known at that time: approximate or, if its bound is above the
   fastest, at least that. 0: it is only known that a similar candidate is much slower. The second returns words for
   this. */
double tune_slower_seconds(const cf_tuning *tuning, const cf_tune_candidate *c);
const char *tune_slower_words(const cf_tuning *tuning, const cf_tune_candidate *c);

/* The mean tokens and pairs of a batch, or the computed ones if sequences share rows. */
typedef struct tune_work {
    double tokens, pairs;
} tune_work;

tune_work tune_work_of(const cf_tuning *tuning, int shared);

/* Returns the share of the GPUs' FLOP/s that forward and backward of the batches' tokens need in `seconds`. */
double tune_utilisation(const tune_job *job, const cf_tuning *tuning, double seconds, double gpus);

/* Returns the best known candidate of a split, in this order: the fastest that fits; the one with the lowest estimate;
   the one with the lowest bound above the fastest of all; one given up without either; the one that needs the least
   memory. -1: none. */
int64_t tune_best_of_split(const cf_tuning *tuning, int64_t split);

/* Returns the batch whose time is nearest to the winner's mean, or the first one without a winner. */
int64_t tune_usual_batch(const cf_tuning *tuning);
void tune_write_batch(const cf_tuning *tuning, cli_output *to);

/* Prints the winner as commands that make its plan and schedules from a list, as a C initialiser and as Python
   arguments. options: the command's own; those that `plan` also has are repeated if they differ from the defaults. */
void tune_print_commands(const tune_job *job, const cf_tuning *tuning, const cli_option *options, const void *defaults);

/* Returns the time of whole sequences as a multiple of the winner's, and half of its 95 % confidence interval, from the
   times of each batch. 0: there is no baseline; no interval: fewer than three batches. */
double tune_ratio(const tune_outcome *o, double *confidence);

/* Says in one sentence whether chunks pay here. */
void tune_say_verdict(const tune_outcome *o, char *text, size_t size);

/* Says how many batches have a sequence over half the longest, because the verdict depends on it; "" if all have. */
void tune_say_share(const tune_outcome *o, char *text, size_t size);

/* Writes why the winner is not the fastest: its place by time, the faster candidates, and its advantage; "" if it is
   the fastest. line: put before each of the two parts. */
void tune_say_reason(const cf_tuning *tuning, const char *line, char *text, size_t size);

/* Returns the word for the place of attention's outputs: "gpu", "host" or "-". */
const char *tune_outputs_word(const cf_tune_candidate *c);

/* Returns the word for the place of state: "stays" or "streams". */
const char *tune_state_word(const cf_tune_candidate *c);

void tune_write_json(const tune_outcome *o, cli_output *to);

/* Writes the map, with a report of the winner below it. Returns an exit code. */
int tune_write_page(const tune_outcome *o, cli_output *to);

#endif /* CHUNKFLOW_TUNE_COMMAND_H */
