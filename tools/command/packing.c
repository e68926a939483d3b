/* packing.c - from a list of lengths to a plan. */

#include "packing.h"
#include "progress.h"

#include <stdlib.h>
#include <string.h>

/* Announces the memory that packing may take, if it is a GiB or more: a count makes a short list long, and nobody
   checks a long list. */
static void announce_memory(const packing *p, const cf_pack_desc *desc) {
    double gib = 1024.0 * 1024 * 1024, bytes = (p->shares ? 24.0 : 8.0) * (double)p->list.n_sequences;
    size_t working = 0;
    cf_error error;

    if (cf_pack_size(p->lengths, p->list.n_sequences, desc, &working, &error) != CF_OK) return; /* cf_pack will say */
    bytes += (double)working;
    if (bytes < gib) return;
    progress_clear();
    fprintf(stderr, "chunkflow: packing %s sequences takes up to %.1f GiB of memory\n",
            cli_commas(p->list.n_sequences), bytes / gib);
}

/* Refuses plans that no schedule can hold: a schedule has at least a forward and a backward of each chunk of a rank. */
static int check_chunks(const packing *p, const cf_pack_desc *desc) {
    double chunks = 0, longest = 0, ranks = desc->n_ranks > 1 ? (double)desc->n_ranks : 1;
    int64_t i;

    for (i = 0; i < p->list.n_sequences && !p->shares; i++) { /* with shared prefixes the sum would count rows twice */
        double own = (double)p->lengths[i] / (double)desc->chunk_size;
        if (own > longest && desc->max_cp < 2) longest = own;
        chunks += own / ranks;
    }
    if (chunks < longest) chunks = longest;
    if (chunks <= (double)CF_MAX_ACTIONS / 2) return CLI_OK;
    return cli_wrong("%s: %.0f chunks of a rank are more than a schedule can have, %lld", cli_input_name(p->list.path),
                     chunks, (long long)CF_MAX_ACTIONS / 2);
}

/* Packs the lengths of `out`, whose list says where they come from. */
static int pack_lengths(const packing_options *asked, packing *out) {
    cf_pack_desc desc;
    cf_error error;
    int code;

    memset(&desc, 0, sizeof desc);
    desc.chunk_size = asked->chunk_size;
    desc.method = (cf_pack_method)asked->method;
    desc.split = (cf_split_method)asked->split;
    desc.no_tails = asked->no_tails;
    desc.align = asked->align;
    desc.max_slices = asked->max_slices;
    desc.n_ranks = asked->ranks;
    desc.lockstep = asked->lockstep;
    desc.max_cp = asked->max_cp;
    desc.cost = asked->cost;
    desc.cp_row_seconds = asked->cp_row_seconds;
    desc.cp_chunk_seconds = asked->cp_chunk_seconds;
    desc.shared_prefixes = out->shares;
    code = check_chunks(out, &desc);
    if (code != CLI_OK) return code;
    announce_memory(out, &desc);
    if (cf_pack(out->lengths, out->list.n_sequences, &desc, &out->plan, &error) == CF_OK) return CLI_OK;
    return cli_error(&error, &out->list);
}

static int make(const packing_options *asked, const char *path, packing *out) {
    packing fresh = {{0}, NULL, NULL, NULL};
    int code;

    if (asked->align > 0 && asked->chunk_size % asked->align != 0)
        return cli_wrong("--align: got %lld, wanted a divisor of --chunk-size %lld", (long long)asked->align,
                         (long long)asked->chunk_size);
    code = cli_list_read_counted(path, asked->max_sequences, &fresh.list);
    if (code != CLI_OK) return code;
    if (fresh.list.n_sequences == 0) code = cli_wrong("%s: there is no sequence", cli_input_name(path));
    if (code == CLI_OK) code = cli_list_expand(&fresh.list, &fresh.lengths, &fresh.shares);
    if (code == CLI_OK) code = pack_lengths(asked, &fresh);
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

int packing_of_lengths(const packing_options *asked, const char *path, const int64_t *lengths,
                       const cf_shared_prefix *shares,
                       int64_t n, packing *out) {
    packing fresh = {{0}, NULL, NULL, NULL};
    int code;

    fresh.list.path = path;
    fresh.list.n_sequences = n;
    fresh.lengths = (int64_t *)malloc((size_t)n * sizeof *fresh.lengths + 1);
    if (shares) fresh.shares = (cf_shared_prefix *)malloc((size_t)n * sizeof *shares + 1);
    if (!fresh.lengths || (shares && !fresh.shares)) {
        code = cli_failed("out of memory for %s sequences", cli_commas(n));
    } else {
        memcpy(fresh.lengths, lengths, (size_t)n * sizeof *fresh.lengths);
        if (shares) memcpy(fresh.shares, shares, (size_t)n * sizeof *shares);
        code = pack_lengths(asked, &fresh);
    }
    if (code == CLI_OK) *out = fresh;
    else packing_free(&fresh);
    return code;
}

void packing_free(packing *p) {
    cf_plan_free(p->plan);
    free(p->lengths);
    free(p->shares);
    cli_list_free(&p->list);
    memset(p, 0, sizeof *p);
}

void packing_print_input(const packing *p) {
    cf_plan_stats stats;

    printf("input             %s: %s, ", cli_input_name(p->list.path), cli_counted(p->plan->n_sequences, "sequence"));
    if (p->plan->n_empty > 0) printf("%s of them empty, ", cli_commas(p->plan->n_empty));
    puts(cli_counted(p->plan->n_tokens, "token"));
    if (!p->shares) return;
    cf_plan_measure(p->plan, NULL, &stats);
    printf("shared            %s rows are computed, %.1f %% of the tokens, and %.1f %% of the attention pairs\n",
           cli_commas(stats.rows), 100 * (double)stats.rows / (double)(p->plan->n_tokens > 0 ? p->plan->n_tokens : 1),
           stats.unshared_pairs > 0 ? 100 * stats.pairs / stats.unshared_pairs : 100);
}

void packing_count_lengths(const packing *p, int64_t sequences[PACKING_BUCKETS], int64_t tokens[PACKING_BUCKETS]) {
    int64_t i, left;

    memset(sequences, 0, PACKING_BUCKETS * sizeof *sequences);
    memset(tokens, 0, PACKING_BUCKETS * sizeof *tokens);
    for (i = 0; i < p->list.n_sequences; i++) {
        int bits = 0;
        for (left = p->lengths[i]; left > 0; left >>= 1) bits++;
        sequences[bits]++;
        tokens[bits] += p->lengths[i];
    }
}

int64_t packing_cp_groups(const cf_plan *plan, int64_t *rows) {
    int64_t i, widest = 0;

    for (i = *rows = 0; i < plan->n_chains; i++) {
        const cf_chain *chain = &plan->chains[i];
        const cf_slice *last = &plan->slices[plan->chunks[chain->first_chunk + chain->n_chunks - 1].first_slice];
        if (chain->cp > widest) widest = chain->cp;
        if (chain->cp > 0 && last->begin + last->length > *rows) *rows = last->begin + last->length;
    }
    return widest;
}

const char *packing_chunk_kind(const cf_plan *plan, const cf_chunk *chunk) {
    int64_t i = chunk->first_slice + chunk->n_slices - 1;

    if (chunk->n_slices == 0) return "idle";
    if (chunk->chain < 0) return "standalone";
    if (!plan->order) return chunk->n_slices > 1 ? "hybrid" : "dependent";
    while (plan->slices[i].up >= chunk->first_slice) i = plan->slices[i].up;
    if (i > chunk->first_slice && plan->slices[i].begin == 0) return "hybrid"; /* its own chain's slice comes first */
    return chunk->state > 0 ? "dependent" : "leaf";
}

int64_t packing_tree(const cf_plan *plan, const cf_chunk *chunk) {
    while (chunk->up >= 0) chunk = &plan->chunks[chunk->up];
    return chunk->chain;
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
        return "dropped chunks run forward twice, and every chunk adds what it costs at any size: a larger K drops\n"
               "                  fewer, a larger ChunkSize has fewer, and both keep more";
    return "every chunk costs a constant, and those of a long sequence wait for each other; a larger ChunkSize\n"
           "                  has fewer of them";
}
