/* pipeline.h - from a plan to a simulated schedule: shared by plan, compare and all commands that schedule. */

#ifndef CHUNKFLOW_PIPELINE_H
#define CHUNKFLOW_PIPELINE_H

#include "modelling.h"
#include "packing.h"

typedef struct pipeline_options {
    int64_t stages;
    int64_t rank;
    const char *limit;
    const char *limits;
    const char *limit_state;
    const char *token_bytes;
    int64_t limit_bytes;
    int unit_cost;
    cli_reals forward, replay, backward, input, weight;
    cli_reals latency;
    cli_reals seconds_per_token;
    int64_t max_tries;
    modelling_options model; /* its stages are the member above, its ranks those of the packing */
    gpu_options gpu;
    int64_t reserve;
    term_options terms;
    int64_t stream;
    const char *costs;
} pipeline_options;

#define PIPELINE_DEFAULTS                                                                                          \
    {.stages = 1, .rank = -1, .gpu = GPU_DEFAULTS, .reserve = CF_TUNE_RESERVE, .terms = TERM_DEFAULTS}

#define PIPELINE_K_DEFAULT "default: the largest of 1, 2 and 4\nthat memory allows, which is said"

#define PIPELINE_COST "CONST,PER_TOKEN,PER_PAIR"

/* Default limits in the help of commands that make schedules; other commands have their own. */
#define PIPELINE_LIMIT_DEFAULT "for best what paper keeps with that K, else none"
#define PIPELINE_STATE_DEFAULT "for best two of the longest chain and a chunk\nfor each virtual stage behind, else none"

/* The entries of an option table; `member` is the pipeline_options in the command's options struct `type`. */
#define PIPELINE_LIMIT_OPTIONS(type, member)                                                                       \
    {.name = "--limit", .value = "L|none", .kind = CLI_TEXT, .offset = offsetof(type, member.limit),               \
     .help = "most chunks whose activations a stage keeps at once;\n"                                              \
     "default " PIPELINE_LIMIT_DEFAULT},                                                                           \
    {.name = "--limits", .value = "L0,L1,...", .kind = CLI_TEXT, .offset = offsetof(type, member.limits),          \
     .help = "the same, stage by stage"},                                                                          \
    {.name = "--limit-state", .value = "N|none", .kind = CLI_TEXT, .offset = offsetof(type, member.limit_state),   \
     .help = "most tokens whose K and V each virtual stage holds at once;\n"                                       \
     "default " PIPELINE_STATE_DEFAULT},                                                                           \
    {.name = "--token-bytes", .value = "A,S,G,I", .kind = CLI_TEXT, .offset = offsetof(type, member.token_bytes),  \
     .help = "bytes that a stage holds for a token: activations, state,\n"                                         \
     "state gradient, saved input (local replay)"},                                                                \
    {.name = "--limit-bytes", .value = "N", .kind = CLI_NUMBER, .offset = offsetof(type, member.limit_bytes),      \
     .min = 1, .max = INT64_MAX / 1000,                                                                            \
     .help = "most of these bytes that a stage holds at once; with --model in\n"                                   \
     "their place, all that a GPU may hold: default the GPU's less the\n"                                          \
     "reserve"}

/* For commands that make schedules of several kinds; members n_virtual and placement. */
#define VIRTUAL_OPTIONS(type)                                                                                      \
    {.name = "--virtual", .value = "V", .kind = CLI_NUMBER, .offset = offsetof(type, n_virtual), .min = 1,         \
     .max = CF_MAX_STAGES,                                                                                         \
     .help = "virtual stages of each stage, for interleaved (default 2),\n"                                        \
     "zero-bubble and best (default 1, or with --placement 2)"},                                                    \
    {.name = "--placement", .value = "loop|v", .kind = CLI_CHOICE, .offset = offsetof(type, placement),        \
     .help = "where those of zero-bubble and best lie: in loops (the default)\n"                                    \
     "or in a V"}

#define PIPELINE_OPTIONS(type, member)                                                                             \
    {.name = "--stages", .alias = "--pp", .value = "P",                                                            \
     .kind = CLI_NUMBER, .offset = offsetof(type, member.stages), .min = 1,                                        \
     .max = CF_MAX_STAGES, .help = "pipeline stages; default 1"},                                                  \
    {.name = "--rank", .value = "R", .kind = CLI_NUMBER, .offset = offsetof(type, member.rank),                    \
     .max = CF_MAX_RANKS - 1,                                                                                      \
     .help = "whose passes, of the D ranks; default 0, and the slowest\n"                                          \
     "for compare and report"},                                  \
    PIPELINE_LIMIT_OPTIONS(type, member),                                                                          \
    PIPELINE_COST_OPTIONS(type, member),                                                                           \
    {.name = "--max-tries", .value = "N", .kind = CLI_NUMBER, .offset = offsetof(type, member.max_tries), .min = 1,\
     .max = INT64_MAX,                                                                                             \
     .help = "candidates that best may try; default: what takes about a\n"                                         \
     "tenth of a second"}

/* The costs of passes and transfers: unit costs, numbers, a file of them, or a model on a GPU, which also gives
   memory. */
#define PIPELINE_COST_OPTIONS(type, member)                                                                        \
    {.name = "--unit-cost", .kind = CLI_FLAG, .offset = offsetof(type, member.unit_cost),                          \
     .help = "F and R take a unit of time per row (a token, or padding), B\n"                                      \
     "two, I and W one, transfers nothing, as in the paper's figures;\n"                                           \
     "the default"},                                                 \
    {.name = "--cost", .value = PIPELINE_COST, .kind = CLI_REALS, .offset = offsetof(type, member.forward),        \
     .min = 3, .max = 3,                                                                                           \
     .help = "seconds of a forward on one stage: constant, and more per row\n"                                     \
     "and per attention pair"},                                                                              \
    {.name = "--replay-cost", .value = PIPELINE_COST, .kind = CLI_REALS, .offset = offsetof(type, member.replay),  \
     .min = 3, .max = 3, .help = "of a replay; default: --cost"},                                                  \
    {.name = "--backward-cost", .value = PIPELINE_COST, .kind = CLI_REALS,                                         \
     .offset = offsetof(type, member.backward), .min = 3, .max = 3,                                                \
     .help = "of a backward; default: twice --cost"},                                                              \
    {.name = "--input-cost", .value = PIPELINE_COST, .kind = CLI_REALS, .offset = offsetof(type, member.input),    \
     .min = 3, .max = 3, .help = "of the input gradient alone; default: half a backward"},                         \
    {.name = "--weight-cost", .value = PIPELINE_COST, .kind = CLI_REALS, .offset = offsetof(type, member.weight),  \
     .min = 3, .max = 3, .help = "of the weight gradient alone; default: half a backward"},                        \
    {.name = "--latency", .value = "S", .kind = CLI_REALS, .offset = offsetof(type, member.latency), .min = 1,     \
     .max = 1, .help = "seconds that any transfer between stages takes"},                                          \
    {.name = "--seconds-per-token", .value = "S", .kind = CLI_REALS,                                               \
     .offset = offsetof(type, member.seconds_per_token), .min = 1, .max = 1,                                       \
     .help = "and more per row of the chunk"},                                                                   \
    {.name = "--costs", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(type, member.costs),               \
     .help = "in place of --cost and the like, what time --json wrote: costs\n"                                    \
     "of each stage, or fitted ones of all"},                                                                      \
    MODELLING_MODEL_OPTIONS(type, member.model),                                                                   \
    MODELLING_SPLIT_OPTIONS(type, member.model),                                                                   \
    GPU_OPTIONS(type, member.gpu, "costs are estimated for it and the\nmodel, stage by stage"),                    \
    RESERVE_OPTION(type, member.reserve),                                                                          \
    TERM_OPTIONS(type, member.terms),                                                                              \
    STREAM_OPTION(type, member.stream)

#define PIPELINE_HELP                                                                                               \
    "--limit, --cost and --token-bytes speak of a whole stage: each of V virtual stages costs a V-th of it in time\n" \
    "and memory. --costs, or --gpu with --model, give every stage its own cost: the last one has the output head.\n" \
    "--model also counts the GiB of each GPU.\n\n" MODELLING_NAMES MODELLING_GPUS "\n"

/* The options, checked and read. Times are in seconds or, with unit costs, in token times: how long a forward takes
   over one row. */
typedef struct pipeline {
    int64_t n_stages;
    int64_t rank;
    int every_rank;  /* 1: runs are those of the slowest rank, with the memory of the fullest; `rank` is not used */
    int64_t limit;   /* as in cf_schedule_desc: 0 if none was given, CF_NO_LIMIT for `none` */
    int64_t *limits; /* (n_stages), or NULL */
    int64_t limit_state; /* as limit */
    int64_t limit_bytes; /* limit of `bytes`; 0: not given */
    int64_t gpu_bytes;   /* with a model: limit of a GPU, by default its memory less the reserve; 0: not known */
    cf_held_bytes bytes;
    int counts_bytes;
    int unit_cost;
    cf_timing timing;         /* for whole stages; not used with estimates, whose costs depend on the case */
    cf_stage_cost *stages;    /* from --costs, which then also sets timing.stages; or NULL */
    double step_seconds;      /* from --costs: extra seconds of an iteration */
    int has_model, estimates; /* estimates: 1 if costs come from a model and a GPU */
    modelling model;
    cf_memory_desc memory;
    cf_gpu gpu;
    const pipeline_options *asked;
    int64_t max_tries;
    int64_t max_cp; /* maximum ranks that share a sequence */
    int lockstep; /* 1: all ranks have one list of passes, as cp groups do */
} pipeline;

/* Opens a pipeline from options. `command` is for messages. Returns an exit code; after CLI_OK call pipeline_close. */
int pipeline_open(const char *command, const pipeline_options *asked, int64_t n_ranks, pipeline *out);
void pipeline_close(pipeline *p);

/* The first reads from *how, the packing options, whether ranks run in lockstep; with --max-cp it sets the costs that
   cf_pack needs to choose widths. The second reads from a plan the rows to gather. Returns an exit code. */
int pipeline_price_cp(pipeline *p, packing_options *how);

/* Returns whether, with cp groups on one stage, only schedules of `paper` are made, as in cf_tune. On several stages
   backwards stay whole. */
int pipeline_takes_paper(const pipeline *p);
int pipeline_splits_backwards(const pipeline *p);
void pipeline_take_cp(pipeline *p, const cf_plan *plan);

/* Packs a file; call it between these two. Refuses trees on ranks that must run in lockstep. Returns an exit code;
   after CLI_OK call packing_free. */
int pipeline_pack(pipeline *p, packing_options *how, const char *path, packing *out);

/* The costs of the passes of a case. */
typedef struct pipeline_costs {
    cf_timing timing;
    cf_stage_cost *stages; /* timing.stages, or NULL */
} pipeline_costs;

/* Makes the costs of n_virtual virtual stages per stage, for chunks of chunk_size. recompute: 0 for the options' own.
   Free them with pipeline_costs_free; on failure *out is untouched. */
cf_result pipeline_costs_make(const pipeline *p, int64_t n_virtual, int64_t chunk_size, cf_recompute recompute,
                              pipeline_costs *out, cf_error *error);
void pipeline_costs_free(pipeline_costs *costs);

/* Reads the costs in a file that time --json wrote, for n_stages whole stages of a model whose split and recomputation
   are those of the options. Returns an exit code; after CLI_OK call pipeline_costs_free. */
int pipeline_costs_read(const char *command, const char *path, const modelling_options *model, int64_t n_stages,
                        int64_t n_virtual, pipeline_costs *out, double *step_seconds, int *outputs);

/* A choice of schedule. Zero means default in every member. */
typedef struct pipeline_case {
    cf_schedule_kind kind;
    cf_replay replay;
    int64_t n_virtual;
    cf_placement placement;
    int64_t k;
    int split_backward; /* best may split a backward into I and W */
    int forwards_first; /* gpipe runs every first forward before any backward */
    int forward_only;   /* no backwards at all */
    int lower;          /* add the transfers between stages */
    int unlimited;      /* no limits of chunks; bytes are still limited */
    cf_recompute recompute; /* replaces the options' recomputation */
} pipeline_case;

/* Sets the virtual stages from --virtual and --placement, if the kind can have several. */
void pipeline_place(pipeline_case *what, int64_t n_virtual, cf_placement placement);

/* A schedule, made and simulated. */
typedef struct pipeline_run {
    cf_schedule *schedule;
    cf_timeline *timeline;
    cf_search_report report; /* of best */
    cf_memory_report *memory; /* (n_stages) with a model; or NULL */
    int64_t fullest;          /* the stage with the largest total */
    int held_down;            /* 1: it fits only because bytes were limited */
    /* if all ranks have one list: their common time, including what cp groups gather and scan */
    double in_step;
} pipeline_run;

/* Returns the time of a run; if all ranks have one list, their common time. */
double pipeline_makespan(const pipeline_run *run);

/* Makes the columns of a list of all ranks; a chunk costs as much as cf_column_cost says. Free them with
   cf_plan_free. */
cf_result pipeline_columns(const pipeline *p, const cf_plan *plan, cf_plan **columns, cf_error *error);

/* Makes and simulates a schedule. `best` keeps to the limit of a GPU if that is known; other kinds only if it was given
   as an option. A schedule that does not fit is made again under the limits of cf_memory_limits; if that does not fit
   either, the first one is kept. In lockstep it is p->rank's part of the list of all ranks.

   With p->every_rank, the schedules of all ranks are made and the slowest is kept; its memory is that of the fullest
   rank. Free it with pipeline_run_free; on failure *out is untouched. If a limit is to blame, error->text counts whole
   stages, as the options do. */
cf_result pipeline_run_make(const pipeline *p, const cf_plan *plan, const pipeline_case *what, pipeline_run *out,
                            cf_error *error);
void pipeline_run_free(pipeline_run *run);

/* Returns the default K: the largest of 4, 2 and 1 with which `paper`, which keeps exactly K chunks, fits or keeps to
   its limits; 1 if none does; 4 if memory is not known. */
int64_t pipeline_default_k(const pipeline *p, const cf_plan *plan, cf_replay replay);

/* Returns words to follow a default K, such as "the largest of 1, 2 and 4 that memory allows". */
const char *pipeline_default_k_words(const pipeline *p);

/* Returns the description for counting a schedule's memory, if there is a model. recompute: 0 for the options' own. */
cf_memory_desc pipeline_memory_of(const pipeline *p, const cf_schedule *schedule, cf_recompute recompute);

/* Returns whether a run fits into p->gpu_bytes; 1 if these are not known. */
int pipeline_fits(const pipeline *p, const pipeline_run *run);

/* Times a schedule that was made elsewhere, and counts its memory. Free the run with pipeline_run_free; out->schedule
   is NULL. */
cf_result pipeline_run_of(const pipeline *p, const cf_plan *plan, const cf_schedule *schedule, pipeline_run *out,
                          cf_error *error);

/* Sets the limits for cf_schedule_validate on a schedule with n_virtual virtual stages per stage. Free *limits, even if
   NULL. Returns an exit code. */
int pipeline_limits(const pipeline *p, int64_t n_virtual, cf_validate_desc *out, int64_t **limits);

/* Returns the origin of p->gpu_bytes in words, such as "of the GPU less the reserve of 9 %". In a cli_scratch. */
const char *pipeline_room_words(const pipeline *p);

/* Returns a time for people: whole numbers with commas, others with at least six digits. The text is in a
   cli_scratch. */
const char *pipeline_time(double time);

/* Returns estimated seconds for people, in three digits, because an estimate is no more precise. In a cli_scratch. */
const char *pipeline_estimate(double seconds);

/* Returns a time beside another in words: "1.25 x as fast as", "16 % slower than" or "12 x as slow as". In a
   cli_scratch. */
const char *pipeline_pace(double seconds, double other);

/* Returns a makespan in words: exact in token times, else an estimate in seconds. */
const char *pipeline_duration(double time, int unit_cost);

/* The speed of a rank, or of all. Tokens are those of the list's sequences, per second and GPU. Shared tokens count for
   each sequence, whether computed once or not, so that runs with and without chunks can be compared. A rank has its
   share of the computed rows.

   The utilisation is the share of the GPUs' FLOPs spent on the model's arithmetic for this plan's rows, without replay
   and recomputation. It is -1 if no GPU is known. Only with a model. */
typedef struct pipeline_speed {
    double tokens_per_second, utilisation;
} pipeline_speed;

pipeline_speed pipeline_speed_of(const pipeline *p, const cf_plan *plan, double seconds);
void pipeline_write_speed(json_writer *w, const pipeline_speed *speed);

/* Returns the name of the lower bound that equals the timeline's `bound`. */
const char *pipeline_strongest(const cf_timeline *timeline);

/* Returns "token times" or "s". */
const char *pipeline_unit(int unit_cost);

/* Prints the lines of a summary about the origin of costs. */
void pipeline_print_setting(const pipeline *p);

/* Print parts of a summary: makespan and bubbles, its first lines; the speed, with a model; the memory of the fullest
   stage, if known. estimated: 0 for measured times. */
void pipeline_print_times(const cf_timeline *timeline, int unit_cost, int estimated);
void pipeline_print_speed(const pipeline *p, const cf_plan *plan, double seconds);
void pipeline_print_memory(const pipeline *p, const pipeline_run *run);

/* Returns copies of chunks or bytes on a stage's virtual stages, converted to whole stages: 7 on 2 virtual stages are
   "3.5". */
const char *pipeline_share(int64_t count, int64_t n_virtual);

/* Converts a limit for whole stages, or for each virtual stage, to copies. CF_NO_LIMIT stays. */
int64_t pipeline_scaled(int64_t limit, int64_t n_virtual);

#endif /* CHUNKFLOW_PIPELINE_H */
