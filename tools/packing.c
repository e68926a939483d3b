/* packing.c - from a list of lengths to a plan. */

#include "packing.h"

#include <stdlib.h>
#include <string.h>

int packing_make(const packing_options *asked, const char *path, packing *out) {
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
    if (!fresh.lengths) code = cli_failed("out of memory for %s sequences", cli_commas(fresh.list.n_sequences));
    else if (cf_pack(fresh.lengths, fresh.list.n_sequences, &desc, &fresh.plan, &error) != CF_OK)
        code = cli_error(&error, &fresh.list);
    if (code == CLI_OK) *out = fresh;
    else packing_free(&fresh);
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
