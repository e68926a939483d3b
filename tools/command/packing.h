/* packing.h - from a list of lengths to a plan: shared by pack, plan and all commands that begin with a plan. */

#ifndef CHUNKFLOW_PACKING_H
#define CHUNKFLOW_PACKING_H

#include "cli.h"

typedef struct packing_options {
    int64_t chunk_size;
    int64_t method;
    int64_t split;
    int no_tails;
    int64_t align;
    int64_t max_slices;
    int64_t max_sequences;
    int64_t ranks;
    int lockstep;
    int64_t max_cp;
    cf_pass_cost cost;   /* with cp groups: from pipeline_price_cp; zero: not known */
    double cp_row_seconds, cp_chunk_seconds;
} packing_options;

/* The entries of an option table; `member` is the packing_options in the command's options struct `type`. */
#define PACKING_OPTIONS(type, member)                                                                              \
    {.name = "--chunk-size", .alias = "--chunk-sizes", .value = "N",                                               \
     .kind = CLI_NUMBER, .offset = offsetof(type, member.chunk_size),                                              \
     .min = 1, .max = CF_MAX_CHUNK_SIZE, .required = 1, .help = "most tokens in a chunk; required"},               \
    {.name = "--method", .value = "best-fit|next-fit", .kind = CLI_CHOICE,                               \
     .offset = offsetof(type, member.method),                                                                      \
     .help = "how short sequences share chunks: longest first into the\n"                                          \
     "fullest chunk with room (the default), or in the order given"},                                              \
    {.name = "--split", .value = "full|even|cost", .kind = CLI_CHOICE, .offset = offsetof(type, member.split),     \
     .help = "how long sequences are cut: into full chunks and a rest\n"                                           \
     "(the default), equal in tokens, or equal in cost"},                                                          \
    {.name = "--no-tails", .kind = CLI_FLAG, .offset = offsetof(type, member.no_tails),                            \
     .help = "leave a chain's last chunk alone, as the paper does, and\n"                                          \
     "do not fill it with short sequences"},                                                                       \
    {.name = "--align", .value = "A", .kind = CLI_NUMBER, .offset = offsetof(type, member.align), .min = 1,        \
     .max = CF_MAX_CHUNK_SIZE, .help = "start slices at multiples of A; divides the chunk size"},                  \
    {.name = "--max-slices", .value = "M", .kind = CLI_NUMBER, .offset = offsetof(type, member.max_slices),        \
     .min = 1, .max = INT64_MAX, .help = "most slices in a chunk; no limit by default"},                           \
    {.name = "--ranks", .alias = "--dp", .value = "D",                                                             \
     .kind = CLI_NUMBER, .offset = offsetof(type, member.ranks), .min = 1,                                         \
     .max = CF_MAX_RANKS, .help = "spread the chunks over D data-parallel ranks; default 1"},                       \
    CLI_MAX_SEQUENCES_OPTION(type, member.max_sequences)

/* Only for commands that also make schedules in lockstep, or that make none. */
#define PACKING_LOCKSTEP_OPTION(type, member)                                                                      \
    {.name = "--lockstep", .kind = CLI_FLAG, .offset = offsetof(type, member.lockstep),                            \
     .help = "ranks run the same kinds of passes in the same order, as FSDP\n"                                     \
     "needs it: the i-th chunks of all ranks cost about the same"}

#define PACKING_GANG_OPTION(type, member)                                                                          \
    {.name = "--max-cp", .value = "G", .kind = CLI_NUMBER, .offset = offsetof(type, member.max_cp), .min = 1,      \
     .max = CF_MAX_RANKS, .help = "spread an expensive sequence over up to G of the ranks, which\n"               \
     "run it together, each a part, by what the GPU's links take;\n"                                               \
     "--ranks G or more; all ranks run in step, as with --lockstep"}

/* A packed list. */
typedef struct packing {
    cli_list list;
    int64_t *lengths;
    cf_shared_prefix *shares; /* NULL: there are no trees */
    cf_plan *plan;
} packing;

/* Returns why unsplit sequences may be faster than chunks of this size on a pipeline of n_stages stages. chunks: number
   of a rank's chunks. */
const char *packing_why_unsplit(int64_t longest, int64_t chunk_size, double chunks, int64_t n_stages, int replays);

/* Reads the list at `path` and packs it. Returns an exit code; after CLI_OK call packing_free. */
int packing_make(const packing_options *asked, const char *path, packing *out);

/* Packs n lengths that were drawn from the list at `path`. shares: of all of them, or NULL. */
int packing_of_lengths(const packing_options *asked, const char *path, const int64_t *lengths,
                       const cf_shared_prefix *shares,
                       int64_t n, packing *out);
void packing_free(packing *p);

/* Prints the first line of a summary. */
void packing_print_input(const packing *p);

/* Counts sequences and tokens by bucket of length: 0, 1, 2 .. 3, 4 .. 7 and so on up to CF_MAX_LENGTH, one bucket for
   each bit of a length. */
enum { PACKING_BUCKETS = 50 };
void packing_count_lengths(const packing *p, int64_t sequences[PACKING_BUCKETS], int64_t tokens[PACKING_BUCKETS]);

/* Returns the ranks of the widest cp group, or 0 if there is none. *rows: those of the longest sequence that a group
   shares. */
int64_t packing_cp_groups(const cf_plan *plan, int64_t *rows);

/* Returns "standalone", "dependent", "hybrid" or "idle"; "leaf" for rows of sequences beyond those that they share. */
const char *packing_chunk_kind(const cf_plan *plan, const cf_chunk *chunk);

/* Returns the chain that gives a chunk its colour: its own or, in a tree, the root's; -1: none. */
int64_t packing_tree(const cf_plan *plan, const cf_chunk *chunk);

#endif /* CHUNKFLOW_PACKING_H */
