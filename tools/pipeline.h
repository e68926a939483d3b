/* pipeline.h - from a plan to a simulated schedule: what plan, compare and all commands that schedule share. */

#ifndef CHUNKFLOW_PIPELINE_H
#define CHUNKFLOW_PIPELINE_H

#include "packing.h"

typedef struct pipeline_options {
    int64_t stages;
    int64_t rank;
    int64_t limit;
    const char *limits;
    const char *token_bytes;
    int64_t limit_bytes;
    int unit_cost;
    cli_reals forward, replay, backward, input, weight;
    cli_reals latency;
    cli_reals seconds_per_token;
    cli_reals offload_seconds_per_token;
    int no_overlap;
    int64_t budget;
} pipeline_options;

#define PIPELINE_NO_REALS {{0}, 0}
#define PIPELINE_DEFAULTS                                                                                        \
    {1, 0, 0, NULL, NULL, 0, 0, PIPELINE_NO_REALS, PIPELINE_NO_REALS, PIPELINE_NO_REALS, PIPELINE_NO_REALS,      \
     PIPELINE_NO_REALS, PIPELINE_NO_REALS, PIPELINE_NO_REALS, PIPELINE_NO_REALS, 0, 0}

#define PIPELINE_COST "CONST,PER_TOKEN,PER_PAIR"

/* The entries of an option table; `member` is the pipeline_options in the command's options struct `type`. */
#define PIPELINE_OPTIONS(type, member)                                                                             \
    {"--stages", "P", CLI_NUMBER, offsetof(type, member.stages), 1, CF_MAX_STAGES, 0,                              \
     "pipeline stages; default 1"},                                                                                \
    {"--rank", "R", CLI_NUMBER, offsetof(type, member.rank), 0, CF_MAX_RANKS - 1, 0,                               \
     "whose passes, of the D ranks; default 0"},                                                                   \
    {"--limit", "L", CLI_NUMBER, offsetof(type, member.limit), 1, INT32_MAX, 0,                                    \
     "most chunks whose activations a stage keeps at once"},                                                       \
    {"--limits", "L0,L1,...", CLI_TEXT, offsetof(type, member.limits), 0, 0, 0, "the same, stage by stage"},       \
    {"--token-bytes", "A,S,G,I", CLI_TEXT, offsetof(type, member.token_bytes), 0, 0, 0,                            \
     "bytes that a stage holds for a token: activations, state,\nstate gradient, saved input (local replay)"},     \
    {"--limit-bytes", "N", CLI_NUMBER, offsetof(type, member.limit_bytes), 1, INT64_MAX, 0,                        \
     "most of these bytes that a stage holds at once"},                                                            \
    {"--unit-cost", NULL, CLI_FLAG, offsetof(type, member.unit_cost), 0, 0, 0,                                     \
     "F and R take a unit of time per token, B two, I and W one,\ntransfers nothing, as in the paper's figures; the " \
     "default"},                                                                                                   \
    {"--cost", PIPELINE_COST, CLI_REALS, offsetof(type, member.forward), 3, 3, 0,                                  \
     "seconds of a forward on one stage: constant, and more per\ntoken and per attention pair"},                   \
    {"--replay-cost", PIPELINE_COST, CLI_REALS, offsetof(type, member.replay), 3, 3, 0,                            \
     "of a replay; default: --cost"},                                                                              \
    {"--backward-cost", PIPELINE_COST, CLI_REALS, offsetof(type, member.backward), 3, 3, 0,                        \
     "of a backward; default: twice --cost"},                                                                      \
    {"--input-cost", PIPELINE_COST, CLI_REALS, offsetof(type, member.input), 3, 3, 0,                              \
     "of the input gradient alone; default: half a backward"},                                                     \
    {"--weight-cost", PIPELINE_COST, CLI_REALS, offsetof(type, member.weight), 3, 3, 0,                            \
     "of the weight gradient alone; default: half a backward"},                                                    \
    {"--latency", "S", CLI_REALS, offsetof(type, member.latency), 1, 1, 0,                                         \
     "seconds that any transfer between stages takes"},                                                            \
    {"--seconds-per-token", "S", CLI_REALS, offsetof(type, member.seconds_per_token), 1, 1, 0,                     \
     "and more per token of the chunk"},                                                                           \
    {"--no-overlap", NULL, CLI_FLAG, offsetof(type, member.no_overlap), 0, 0, 0,                                   \
     "a transfer keeps both stages busy; by default it runs\nbeside their passes"},                                \
    {"--budget", "N", CLI_NUMBER, offsetof(type, member.budget), 1, INT64_MAX, 0,                                  \
     "candidates that best may try; default: what takes about a\ntenth of a second"}

#define PIPELINE_HELP                                                                                               \
    "--limit, --cost and --token-bytes speak of a whole stage: each of V virtual stages costs a V-th of it in time\n" \
    "and memory.\n\n"

/* The options, checked and read. Times are in seconds, or in token times with unit costs. */
typedef struct pipeline {
    int64_t n_stages;
    int64_t rank;
    int64_t limit;
    int64_t *limits; /* (n_stages), or NULL */
    int64_t limit_bytes;
    cf_bytes bytes;
    int counts_bytes;
    int unit_cost;
    cf_timing timing;
    int64_t budget;
} pipeline;

/* `command` is for messages. Returns an exit code; after CLI_OK pipeline_close is due. */
int pipeline_open(const char *command, const pipeline_options *asked, int64_t n_ranks, pipeline *out);
void pipeline_close(pipeline *p);

/* One of the schedules that a pipeline can have. Zero means default in every member. */
typedef struct pipeline_case {
    cf_schedule_kind kind;
    cf_replay replay;
    int64_t n_virtual;
    int64_t k;
    int split_backward; /* best may cut backwards into I and W */
    int lower;          /* add the transfers between stages */
    int offload;        /* and the copies of state to host memory and back */
} pipeline_case;

/* A schedule, made and simulated. */
typedef struct pipeline_run {
    cf_schedule *schedule;
    cf_timeline *timeline;
    cf_search_report report; /* of best */
} pipeline_run;

/* On success pipeline_run_free is due; on failure *out is untouched. Where a limit is to blame, error->text speaks of
   whole stages, as the options do. */
cf_result pipeline_run_make(const pipeline *p, const cf_plan *plan, const pipeline_case *what, pipeline_run *out,
                            cf_error *error);
void pipeline_run_free(pipeline_run *run);

/* The same costs, for another call of the library: those of each of n_virtual virtual stages of a stage. */
cf_timing pipeline_timing(const pipeline *p, int64_t n_virtual);

/* The limits for cf_schedule_validate on a schedule with n_virtual virtual stages a stage. *limits is to be freed,
   also where it is NULL. Returns an exit code. */
int pipeline_limits(const pipeline *p, int64_t n_virtual, cf_validate_desc *out, int64_t **limits);

/* A time for people: whole numbers with commas, others with six digits or more. The text lives as long as that of
   cli_commas. */
const char *pipeline_time(double time);

/* Prints makespan and bubbles, the first lines of a summary. */
void pipeline_print_times(const cf_timeline *timeline, int unit_cost);

/* Copies of chunks or bytes on the virtual stages of a stage, in whole stages' worth: 7 of 2 virtual stages are
   "3.5". */
const char *pipeline_share(int64_t count, int64_t n_virtual);

#endif /* CHUNKFLOW_PIPELINE_H */
