/* packing.h - from a list of lengths to a plan: what pack, plan and all commands that begin with a plan share. */

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
    int64_t ranks;
} packing_options;

#define PACKING_DEFAULTS {0, 0, 0, 0, 0, 0, 0}

/* The entries of an option table; `member` is the packing_options in the command's options struct `type`. */
#define PACKING_OPTIONS(type, member)                                                                              \
    {"--chunk-size", "N", CLI_NUMBER, offsetof(type, member.chunk_size), 1, CF_MAX_CHUNK_SIZE, 1,                  \
     "most tokens in a chunk; required"},                                                                          \
    {"--method", "best-fit|first-fit|next-fit", CLI_CHOICE, offsetof(type, member.method), 0, 0, 0,                \
     "how short sequences share chunks: longest first into the\nfullest chunk with room (the default), longest first " \
     "into\nthe earliest one with room, or in input order"},                                                       \
    {"--split", "full|even|cost", CLI_CHOICE, offsetof(type, member.split), 0, 0, 0,                               \
     "how long sequences are cut: into full chunks and a rest\n(the default), equal in tokens, or equal in cost"},  \
    {"--no-tails", NULL, CLI_FLAG, offsetof(type, member.no_tails), 0, 0, 0,                                       \
     "leave a group's last chunk alone, as the paper does, and\ndo not fill it with short sequences"},             \
    {"--align", "A", CLI_NUMBER, offsetof(type, member.align), 1, CF_MAX_CHUNK_SIZE, 0,                            \
     "start slices at multiples of A; divides the chunk size"},                                                    \
    {"--max-slices", "M", CLI_NUMBER, offsetof(type, member.max_slices), 1, INT64_MAX, 0,                          \
     "most slices in a chunk; no limit by default"},                                                               \
    {"--ranks", "D", CLI_NUMBER, offsetof(type, member.ranks), 1, CF_MAX_RANKS, 0,                                 \
     "spread the chunks over D data-parallel ranks; default 1"}

/* A packed list. */
typedef struct packing {
    cli_list list;
    int64_t *lengths;
    cf_plan *plan;
} packing;

/* Reads the list at `path` and packs it. Returns an exit code; after CLI_OK packing_free is due. */
int packing_make(const packing_options *asked, const char *path, packing *out);
void packing_free(packing *p);

/* Reports an error of the library and returns the exit code for it. Where cf_pack finds fault with a sequence of `list`
   (NULL for errors of other functions), the message names its line. */
int packing_error(const cf_error *error, const cli_list *list);

/* "standalone", "dependent", "hybrid" or "idle". */
const char *packing_chunk_kind(const cf_chunk *chunk);

#endif /* CHUNKFLOW_PACKING_H */
