/* packing.c - from a list of lengths to a plan. */

#include "packing.h"
#include "progress.h"

#include <stdlib.h>
#include <string.h>

/* A count in a list is quickly written, and a long list is not looked at: says what packing it may take, before it is
   taken, where that is a GiB or more. */
static void announce_memory(const packing *p, const cf_pack_desc *desc) {
    double gib = 1024.0 * 1024 * 1024, bytes = 8.0 * (double)p->list.n_sequences;
    size_t working = 0;
    cf_error error;

    if (cf_pack_size(p->lengths, p->list.n_sequences, desc, &working, &error) != CF_OK) return; /* cf_pack will say */
    bytes += (double)working;
    if (bytes < gib) return;
    progress_clear();
    fprintf(stderr, "chunkflow: packing %s sequences takes up to %.1f GiB of memory\n",
            cli_commas(p->list.n_sequences), bytes / gib);
}

static int make(const packing_options *asked, const char *path, packing *out) {
    packing fresh = {{0}, NULL, NULL};
    cf_pack_desc desc;
    cf_error error;
    int code;

    if (asked->align > 0 && asked->chunk_size % asked->align != 0)
        return cli_wrong("--align: got %lld, wanted a divisor of --chunk-size %lld", (long long)asked->align,
                         (long long)asked->chunk_size);
    code = cli_list_read(path, CLI_MAX_SEQUENCES, &fresh.list);
    if (code != CLI_OK) return code;
    memset(&desc, 0, sizeof desc);
    desc.chunk_size = asked->chunk_size;
    desc.method = (cf_pack_method)asked->method;
    desc.split = (cf_split_method)asked->split;
    desc.no_tails = asked->no_tails;
    desc.align = asked->align;
    desc.max_slices = asked->max_slices;
    desc.n_ranks = asked->ranks;

    fresh.lengths = cli_list_lengths(&fresh.list);
    if (fresh.lengths) announce_memory(&fresh, &desc);
    if (!fresh.lengths) code = cli_failed("out of memory for %s sequences", cli_commas(fresh.list.n_sequences));
    else if (cf_pack(fresh.lengths, fresh.list.n_sequences, &desc, &fresh.plan, &error) != CF_OK)
        code = cli_error(&error, &fresh.list);
    if (code == CLI_OK) *out = fresh;
    else packing_free(&fresh);
    return code;
}

int packing_make(const packing_options *asked, const char *path, packing *out) {
    int code;

    progress_begin("packing");
    code = make(asked, path, out);
    progress_end();
    return code;
}

void packing_free(packing *p) {
    cf_plan_free(p->plan);
    free(p->lengths);
    cli_list_free(&p->list);
    memset(p, 0, sizeof *p);
}

void packing_print_input(const packing *p) {
    printf("input             %s: %s sequences, ", cli_input_name(p->list.path), cli_commas(p->plan->n_sequences));
    if (p->plan->n_empty > 0) printf("%s of them empty, ", cli_commas(p->plan->n_empty));
    printf("%s tokens\n", cli_commas(p->plan->n_tokens));
}

const char *packing_chunk_kind(const cf_chunk *chunk) {
    if (chunk->n_slices == 0) return "idle";
    if (chunk->group < 0) return "standalone";
    return chunk->n_slices > 1 ? "hybrid" : "dependent";
}

cf_result packing_unsplit(const packing *p, const packing_options *asked, int packed, cf_plan **plan, cf_error *error) {
    cf_pack_desc desc;
    int64_t i, n = p->list.n_sequences, align = asked->align > 0 ? asked->align : 1;

    memset(&desc, 0, sizeof desc);
    desc.chunk_size = 1;
    desc.align = align;
    desc.max_slices = packed ? asked->max_slices : 1;
    desc.n_ranks = asked->ranks;
    for (i = 0; i < n; i++)
        if (p->lengths[i] > desc.chunk_size) desc.chunk_size = p->lengths[i];
    if (desc.chunk_size % align != 0 && desc.chunk_size < INT64_MAX - align)
        desc.chunk_size += align - desc.chunk_size % align;
    return cf_pack(p->lengths, n, &desc, plan, error);
}

const char *packing_why_unsplit(int64_t longest, int64_t chunk_size, double chunks, int64_t n_stages, int replays) {
    int few = n_stages > 1 && chunks < 2 * (double)n_stages;

    if (longest <= chunk_size && few)
        return "no sequence is longer than a chunk, so nothing is split, and the chunks are too few to fill the\n"
               "                  stages: try a smaller ChunkSize";
    if (longest <= chunk_size)
        return "no sequence is longer than a chunk, so nothing is split: chunks only change how sequences share\n"
               "                  a pass";
    if (few)
        return "ChunkSize is too large for the batch: so few chunks leave stages idle while the pipeline fills\n"
               "                  and drains; try a smaller one";
    if (replays)
        return "dropped chunks run forward twice; a larger K or ChunkSize drops fewer and keeps more";
    return "every chunk costs a constant, and those of a long sequence wait for each other; a larger ChunkSize\n"
           "                  has fewer of them";
}
