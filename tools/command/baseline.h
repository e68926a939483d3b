/* baseline.h - training without chunks, with which chunks are compared: the one definition that all commands share.

   The baseline is 1F1B that splits no sequence. Every micro-batch is one sequence or, packed, as many as fit into the
   length of the longest, longest first. There is no limit on chunks, and no state is moved to the host. With a model
   and a GPU it recomputes only as much as it must to fit. If full recomputation does not fit, its checkpoints go to
   host memory. The baseline is the fastest of these forms that fits. If none fits, it is the one that needs the least
   memory, to show by how much it fails.

   Memory is counted on the same batches that are timed. `compare` and `report` have one batch, their list. `tune` has
   the batches that it draws and the one with the longest sequence of all, because a tuned run will meet that sequence.
   The order within a batch makes no difference, because sequences are sorted longest first. So a list that is a single
   batch of `tune` has the same baseline as in `compare`, with equal memory to the byte. With many batches,
   micro-batches are packed to the longest sequence of all, and recomputation is set for the worst batch, because a
   trainer has one setting for all. The same holds if one of these batches is shown by itself. */

#ifndef CHUNKFLOW_BASELINE_H
#define CHUNKFLOW_BASELINE_H

#include "json_write.h"
#include "pipeline.h"

/* A form of the baseline for one batch, made and simulated. */
typedef struct baseline {
    int packed;
    cf_plan *plan;
    pipeline_case what; /* includes its recomputation */
    int offload;        /* parts in host memory (cf_memory_desc.offload) */
    pipeline_run run;
} baseline;

/* Demands of other batches on the setting. Zero members, or NULL for a rule: none. */
typedef struct baseline_rule {
    int64_t longest;        /* the longest sequence of all batches */
    cf_recompute recompute; /* the recomputation of the worst batch */
} baseline_rule;

/* Makes one form with as little recomputation as fits, or full recomputation if nothing fits. Free it with
   baseline_free; on failure *out is untouched. */
cf_result baseline_make(const pipeline *p, const packing *list, const packing_options *asked, int packed,
                        const baseline_rule *rule, baseline *out, cf_error *error);

/* Makes the better of the two forms. Fails if neither can be made, or memory runs out. */
cf_result baseline_find(const pipeline *p, const packing *list, const packing_options *asked,
                        const baseline_rule *rule, baseline *out, cf_error *error);
void baseline_free(baseline *b);

/* Returns a name such as "1F1B on unsplit sequences". */
const char *baseline_name(int packed);

/* The baseline of the batches of a search. */
typedef struct baseline_tuned {
    cf_tune_candidate best; /* best.status is CF_TUNE_OK if some form fits */
    double seconds[CF_MAX_TUNE_BATCHES]; /* of each batch, if it fits */
    cf_parallel split;
    int packed;
    int64_t ranks;          /* if one batch is split among several ranks: their number, because it runs on all their
                               GPUs together; else 0 */
    int64_t context;        /* GPUs that share each sequence; 0: each has one GPU */
    int ring;               /* 1: K and V circulate among these GPUs during attention; 0: they are gathered before it */
    int64_t least;          /* if no form fits: bytes of the one that needs least; 0: none can be made */
    char why[256];          /* why no baseline can be made */
} baseline_tuned;

/* Finds the recipe that most trainers use instead of a tuned split: tensor and pipeline 1, ZeRO 3, full recomputation
   with checkpoints in host memory, and the smallest context-parallel size that fits. Needs estimated costs. Fails only
   if memory runs out. */
cf_result baseline_tune_recipe(const int64_t *lengths, int64_t n, const cf_tune_desc *desc, baseline_tuned *out,
                               cf_error *error);

/* Finds the baseline of a search. desc: the search's description, whose `progress` may stop this; *out then has the
   best so far. Returns CF_OK or CF_ERROR_MEMORY; any other reason is in out->why. */
cf_result baseline_tune(const int64_t *lengths, int64_t n, const cf_tune_desc *desc, baseline_tuned *out,
                        cf_error *error);

/* Tries context parallelism over the same number of GPUs. *out changes if that is faster than baseline_tune's result.
   desc->parallel.zero comes from modelling_asked_zero, and ep is 0 unless requested, with or without n_gpus. */
cf_result baseline_tune_context(const int64_t *lengths, int64_t n, const cf_tune_desc *desc, baseline_tuned *out,
                                cf_error *error);

/* Returns the work that baseline_tune and baseline_tune_context will take, roughly, as cf_tune_progress counts it. */
double baseline_work(const int64_t *lengths, int64_t n, const cf_tune_desc *desc);

/* Tries context parallelism for one batch, the list of `compare` and `report`, over the GPUs of all its ranks.
   best.seconds is comparable with their makespans, which leave out the optimizer step of the requested split.
   best.status stays CF_TUNE_UNTRIED without a GPU, or if the requested split is as fast (than: its time; 0: it does not
   fit). *recipe is the FSDP recipe for this batch; *out is a copy of it if nothing else fits. Fails only if memory runs
   out. */
cf_result baseline_find_context(const pipeline *p, const packing *list, const packing_options *asked, double than,
                                baseline_tuned *out, baseline_tuned *recipe, cf_error *error);

/* An option for a struct with a member no_cp. */
#define NO_CP_OPTION(type)                                                                                         \
    {.name = "--no-cp", .kind = CLI_FLAG, .offset = offsetof(type, no_cp),                                         \
     .help = "a baseline without context parallelism, for trainers without it"}

/* Return the least ChunkSize that splits nothing in a search, and change a search's desc into that of one form of the
   baseline. chunk_size must live as long as desc. */
int64_t baseline_chunk_size(const int64_t *lengths, int64_t n, const cf_tune_desc *desc);
void baseline_take_form(cf_tune_desc *desc, int packed, const int64_t *chunk_size);

/* Takes best and seconds of the winner of a search. */
void baseline_take_times(baseline_tuned *base, const cf_tuning *tuning);

/* Write a description such as "1F1B on unsplit sequences, packed, with context parallelism of 4 (ring)". The second
   adds the split. */
void baseline_words(const baseline_tuned *base, char *text, size_t size);
void baseline_context_words(const baseline_tuned *base, char *text, size_t size);

/* Prints the FSDP recipe, compared with the seconds of the best chunks (0: none fits). */
void baseline_print_recipe(const baseline_tuned *recipe, double best);

/* Writes the baseline as a member of an object. */
void baseline_write(json_writer *w, const char *key, const baseline_tuned *base);

#endif /* CHUNKFLOW_BASELINE_H */
