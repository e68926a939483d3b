/* baseline.h - what one has today, which chunks are held against: the one definition of it that all commands share.

   The baseline is 1F1B that splits no sequence. Every micro-batch is a sequence, or (packed) as many as fit into one as
   long as the longest, longest first; no limit of chunks holds, and no state is moved away. With a model and a GPU it
   recomputes no more than it must to fit. Of these forms the fastest that fits is the baseline; where none fits, the
   one that needs the least memory says how far away that is.

   Memory is counted on the very batches that are timed: `compare` and `report` have one, which is their list, and
   `tune` the ones that it draws and the one with the longest sequence of all, because a run that is tuned for will meet
   that. The order within a batch makes no difference: longest first is what the list and a shuffle of it both come to.
   So a list that is a single batch of `tune` has the same baseline, in memory to the byte, as in `compare`. Where there
   are many batches, micro-batches are packed to the longest sequence of all, and recomputation is what the worst batch
   needs, because a trainer has one setting for all of them; so it is too where one of these batches is shown by
   itself. */

#ifndef CHUNKFLOW_BASELINE_H
#define CHUNKFLOW_BASELINE_H

#include "json_write.h"
#include "pipeline.h"

/* A form of it for one batch, made and simulated. */
typedef struct baseline {
    int packed;
    cf_plan *plan;
    pipeline_case what; /* its recomputation too */
    pipeline_run run;
} baseline;

/* Demands on the setting beside this batch: it must do for others as well. Zero, or NULL for a rule: none. */
typedef struct baseline_rule {
    int64_t longest;        /* the longest sequence of all batches */
    cf_recompute recompute; /* what the worst of them needs */
} baseline_rule;

/* One form, with as little recomputation as fits, or all there is. On success baseline_free is due; on failure *out is
   untouched. */
cf_result baseline_make(const pipeline *p, const packing *list, const packing_options *asked, int packed,
                        const baseline_rule *rule, baseline *out, cf_error *error);

/* The better of the two forms; it fails where neither can be made, or memory runs out. */
cf_result baseline_find(const pipeline *p, const packing *list, const packing_options *asked,
                        const baseline_rule *rule, baseline *out, cf_error *error);
void baseline_free(baseline *b);

/* "1F1B on unsplit sequences" or the like. */
const char *baseline_name(int packed);

/* The same for the batches of a search. */
typedef struct baseline_tuned {
    cf_tune_candidate best; /* best.status is CF_TUNE_OK if some form fits */
    cf_parallel split;
    int packed;
    int64_t ranks;          /* where one batch is dealt to more than one rank: all of them, for it runs on their GPUs
                               together; else 0 */
    int64_t context;        /* GPUs that share each sequence; 0: context parallelism is not faster, or does not fit */
    int ring;               /* 1: K and V go round them beside attention; 0: they are gathered before it */
    int64_t least;          /* where none fits: bytes that the thriftiest needs; 0: it cannot be made */
    char why[256];          /* where it cannot be made */
} baseline_tuned;

/* desc: of the search; its `progress` may stop this one, too. It fails only where memory runs out. */
cf_result baseline_tune(const int64_t *lengths, int64_t n, const cf_tune_desc *desc, baseline_tuned *out,
                        cf_error *error);

/* With context parallelism, over as many GPUs; *out changes where that is faster than what baseline_tune found. */
cf_result baseline_tune_context(const int64_t *lengths, int64_t n, const cf_tune_desc *desc, baseline_tuned *out,
                                cf_error *error);

/* The same for one batch, which is the list of `compare` and `report`, over the GPUs of all its ranks. best.seconds is
   beside their makespans, which leave out the step of the split asked for. Where there is no GPU, or the split asked
   for is as fast (`than`; 0: it does not fit), best.status stays CF_TUNE_UNTRIED. It fails only where memory runs
   out. */
cf_result baseline_find_context(const pipeline *p, const packing *list, const packing_options *asked, double than,
                                baseline_tuned *out, cf_error *error);

/* For compare_options or the like with a member no_cp. */
#define NO_CP_OPTION(type)                                                                                         \
    {.name = "--no-cp", .kind = CLI_FLAG, .offset = offsetof(type, no_cp),                                         \
     .help = "a baseline without context parallelism, for trainers without it"}

/* The least ChunkSize that splits nothing of a search; and what a search for one form of the baseline leaves of others.
   chunk_size lives as long as desc. */
int64_t baseline_chunk_size(const int64_t *lengths, int64_t n, const cf_tune_desc *desc);
void baseline_take_form(cf_tune_desc *desc, int packed, const int64_t *chunk_size);

/* "1F1B on unsplit sequences, packed, with context parallelism of 4 (ring)" or the like. The second adds its split. */
void baseline_words(const baseline_tuned *base, char *text, size_t size);
void baseline_context_words(const baseline_tuned *base, char *text, size_t size);

/* As a member of an object. */
void baseline_write(json_writer *w, const char *key, const baseline_tuned *base);

#endif /* CHUNKFLOW_BASELINE_H */
