/* cmd_pack.c - chunkflow pack: packs a list of lengths into chunks and shows how well they fit. */

#include "pipeline.h"
#include "svg.h"
#include "table.h"

#include <stdlib.h>
#include <string.h>

typedef struct pack_options {
    packing_options packing;
    pipeline_options pipeline;
    int chunks;
    int tsv;
    const char *json, *drawn;
    int metadata;
    svg_style svg;
} pack_options;

static const pack_options defaults = {.pipeline = PIPELINE_DEFAULTS};

static const cli_option options[] = {
    PACKING_OPTIONS(pack_options, packing),
    PACKING_LOCKSTEP_OPTION(pack_options, packing),
    PACKING_GANG_OPTION(pack_options, packing),
    MODELLING_MODEL_OPTIONS(pack_options, pipeline.model),
    MODELLING_SPLIT_OPTIONS(pack_options, pipeline.model),
    GPU_OPTIONS(pack_options, pipeline.gpu, "with --max-cp, for the widths"),
    {.name = "--chunks", .kind = CLI_FLAG, .offset = offsetof(pack_options, chunks),
     .help = "also print a line for each chunk"},
    TABLE_OPTION(pack_options, tsv, "the lengths or, with --chunks, the chunks"),
    {.name = "--json", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(pack_options, json),
     .help = "write the plan as JSON; with - nothing else is printed"},
    {.name = "--metadata", .kind = CLI_FLAG, .offset = offsetof(pack_options, metadata),
     .help = "with cu_seqlens, positions and targets of every chunk"},
    {.name = "--svg", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(pack_options, drawn),
     .help = "draw the chunks and the sequences in them"},
    SVG_STYLE_OPTIONS(pack_options, svg),
    {.name = NULL}};

/* ----------------------------------------------------------------------------------------------------------------
   What came in
   ---------------------------------------------------------------------------------------------------------------- */

/* Returns a bar for a share of all. */
static const char *bar(double share) {
    static const char marks[] = "####################";
    int n = (int)(share * 20 + 0.5);
    return marks + sizeof marks - 1 - (n < 20 ? n : 20);
}

static const table_column length_columns[] = {
    {.heading = "length"},
    {.name = "shortest_tokens"},
    {.name = "longest_tokens"},
    {.heading = "sequences", .name = "sequences"},
    {.heading = "", .name = "share_of_sequences", .decimals = 2, .scale = 100, .suffix = " %"},
    {.heading = "tokens", .name = "tokens"},
    {.heading = "", .name = "share_of_tokens", .decimals = 2, .scale = 100, .suffix = " %"},
    {.heading = "", .left = 1}};

static double share_of(int64_t part, int64_t whole) { return whole > 0 ? (double)part / (double)whole : 0; }

/* Adds the row of a bucket, with its shares of all sequences and tokens. */
static void add_bucket(table *t, int i, int64_t sequences, int64_t tokens, int64_t n_sequences, int64_t n_tokens) {
    int64_t low = i > 0 ? (int64_t)1 << (i - 1) : 0, high = i > 0 ? low * 2 - 1 : 0;
    double share = share_of(sequences, n_sequences);
    char range[40];

    snprintf(range, sizeof range, "%s .. %s", cli_commas(low), cli_commas(high));
    table_text(t, i > 1 ? range : cli_commas(low));
    table_integer(t, low);
    table_integer(t, high);
    table_integer(t, sequences);
    table_real(t, share);
    table_integer(t, tokens);
    table_real(t, share_of(tokens, n_tokens));
    table_text(t, t->tsv ? "" : bar(share));
}

static int print_histogram(const packing *packed, int tsv) {
    int64_t sequences[PACKING_BUCKETS], tokens[PACKING_BUCKETS];
    int first = 0, last = PACKING_BUCKETS - 1, i;
    table t;

    packing_count_lengths(packed, sequences, tokens);
    while (first < PACKING_BUCKETS && sequences[first] == 0) first++;
    while (last >= 0 && sequences[last] == 0) last--;
    table_begin(&t, length_columns, (int)(sizeof length_columns / sizeof length_columns[0]), tsv, 0);
    for (i = first; i <= last; i++)
        add_bucket(&t, i, sequences[i], tokens[i], packed->list.n_sequences, packed->plan->n_tokens);
    return table_end(&t);
}

static int compare_lengths(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Returns the smallest length that at least `per_mille` / 1000 of the sorted lengths do not exceed. */
static int64_t quantile(const int64_t *sorted, int64_t n, int64_t per_mille) {
    int64_t rank = (n * per_mille + 999) / 1000;
    return sorted[rank > 0 ? rank - 1 : 0];
}

static const char *mean_text(int64_t sum, int64_t n) {
    char text[40];

    snprintf(text, sizeof text, "%.1f", (double)sum / (double)n);
    return cli_grouped(text);
}

/* Prints the input. It sorts packed->lengths, so call it after everything else that uses them. */
static int print_input(packing *packed, int tsv) {
    int64_t *lengths = packed->lengths;
    int64_t n = packed->list.n_sequences;

    if (!tsv) packing_print_input(packed);
    if (n > 0 && !tsv) {
        qsort(lengths, (size_t)n, sizeof *lengths, compare_lengths);
        printf("lengths           mean %s, median %s, 90 %% %s, 99 %% %s, longest %s\n\n",
               mean_text(packed->plan->n_tokens, n), cli_commas(quantile(lengths, n, 500)),
               cli_commas(quantile(lengths, n, 900)), cli_commas(quantile(lengths, n, 990)),
               cli_commas(lengths[n - 1]));
    }
    return n > 0 || tsv ? print_histogram(packed, tsv) : CLI_OK;
}

/* ----------------------------------------------------------------------------------------------------------------
   What came out
   ---------------------------------------------------------------------------------------------------------------- */

/* Prints a sequence that is too long for one rank. alone: its cost relative to the mean of the ranks. The other
   sequences cost ranks - alone; for even ranks they would have to cost `alone` on each of the other ranks. */
static void print_long_sequence(const cf_chain *chain, double ranks, double alone) {
    int64_t enough = ranks / alone >= 1 ? (int64_t)(ranks / alone) : 1;
    double others = ranks - alone;

    printf("                  Sequence %s with its %s tokens alone costs %.2f x a rank's mean, and its chunks\n"
           "                  stay on one rank. What would help: at most %s rank%s, with pipeline stages or tensor\n"
           "                  parallelism in place of the others; ",
           cli_commas(chain->sequence), cli_commas(chain->tokens), alone, cli_commas(enough), enough == 1 ? "" : "s");
    if (others > ranks * 1e-3) printf("%.1f x as many other sequences;\n", (ranks - 1) * alone / others);
    else puts("more sequences beside it;");
    puts("                  or such sequences together in one batch.");
}

/* Prints the imbalance of the ranks, with its cost, cause and remedy. */
static void print_ranks(const cf_plan *plan, const cf_plan_stats *stats) {
    double spread = stats->rank_imbalance, alone = stats->unit_imbalance, ranks = (double)plan->n_ranks;
    const cf_chain *longest = NULL;
    int64_t i;

    printf("ranks             %s with %s each; tokens at most %.4f x the mean, attention pairs %.4f x\n",
           cli_commas(plan->n_ranks), cli_counted(plan->chunks_per_rank, "step"), stats->rank_token_imbalance,
           stats->rank_pair_imbalance);
    if (plan->n_ranks == 1 || !(spread > 0)) return;
    printf("rank imbalance      %.4f x the mean cost (all rows weigh as much as all pairs); %s of %s steps idle\n",
           spread, cli_commas(plan->n_idle), cli_commas(plan->n_chunks));
    if (spread < 1.05) return;
    printf("                  All ranks wait for it: %.1f %% of their time is lost, and an iteration takes\n"
           "                  %.2f x as long as with even ranks.\n", 100 * (1 - 1 / spread), spread);
    for (i = 0; i < plan->n_chains; i++)
        if (!longest || plan->chains[i].tokens > longest->tokens) longest = &plan->chains[i];
    if (longest && alone > 0.9 * spread)
        print_long_sequence(longest, ranks, alone);
    else
        puts("                  The chunks are too few or too large to be dealt out evenly. What would help:\n"
             "                  a smaller ChunkSize, more sequences in a batch, or fewer ranks.");
}

/* Prints the cost of the columns; each takes as long as its most expensive chunk. */
static int print_columns(const cf_plan *plan) {
    const cf_pass_cost none = {0, 0, 0};
    cf_pass_cost cost = none;
    cf_plan *columns;
    double rows = 0, pairs = 0, sum = 0;
    cf_error error;
    int64_t i;

    for (i = 0; i < plan->n_chunks; i++) {
        rows += (double)plan->chunks[i].rows;
        pairs += (double)plan->chunks[i].pairs;
    }
    if (!(rows > 0)) return CLI_OK;
    cost.per_token = 1 / rows;
    cost.per_pair = 1 / pairs;
    if (cf_lockstep_plan(plan, &cost, NULL, &columns, &error) != CF_OK) return cli_error(&error, NULL);
    for (i = 0; i < columns->n_chunks; i++)
        sum += cf_cost_seconds(&cost, columns->chunks[i].rows, columns->chunks[i].pairs);
    printf("in step           %s, together %.4f x the mean cost of a rank; long sequences replay beside that\n",
           cli_counted(columns->n_chunks, "column"), sum / 2 * (double)plan->n_ranks);
    cf_plan_free(columns);
    return CLI_OK;
}

/* Prints the number of sequences spread over ranks; it counts the first share of each. */
static void print_cp_groups(const cf_plan *plan) {
    int64_t i, n = 0, rows, widest = packing_cp_groups(plan, &rows);

    for (i = 0; i < plan->n_chains; i++) {
        const cf_chain *chain = &plan->chains[i];
        n += chain->cp > 0 && chain->first_chunk / plan->chunks_per_rank % chain->cp == 0;
    }
    if (n == 0) return;
    printf("cp groups         %s of the %s are spread over %s ranks at most\n", cli_commas(n),
           "sequences", cli_commas(widest));
}

static int print_plan(const cf_plan *plan, int lockstep) {
    cf_plan_stats stats;

    cf_plan_measure(plan, NULL, &stats);
    printf("\nchunk size        %s", cli_counted(plan->chunk_size, "token"));
    if (plan->align > 1) printf(", slices start at multiples of %s", cli_commas(plan->align));
    if (plan->max_slices > 0) printf(", at most %s", cli_counted(plan->max_slices, "slice"));
    printf("\npacked by         %s, split %s\n", cf_pack_method_name(plan->method), cf_split_method_name(plan->split));
    printf("chunks            %s = %s standalone + %s dependent + %s hybrid + %s idle\n", cli_commas(plan->n_chunks),
           cli_commas(stats.n_standalone), cli_commas(stats.n_dependent), cli_commas(stats.n_hybrid),
           cli_commas(stats.n_idle));
    printf("lower bound       %s, excess %s (%.4f %%)\n", cli_counted(plan->lower_bound, "chunk"),
           cli_commas(stats.excess), 100 * share_of(stats.excess, plan->lower_bound));
    printf("fill              %.4f %%\n", 100.0 * stats.fill);
    printf("chains            %s, the largest of %s\n", cli_commas(plan->n_chains),
           cli_counted(stats.longest_chain, "chunk"));
    print_cp_groups(plan);
    printf("slices            %s, at most %s in a chunk\n", cli_commas(plan->n_slices), cli_commas(stats.most_slices));
    printf("attention pairs   %.6g\n", stats.pairs);
    printf("cost of a chunk   at most %.4f x the mean\n", stats.chunk_imbalance);
    if (lockstep) return print_columns(plan);
    print_ranks(plan, &stats);
    return CLI_OK;
}

static const table_column chunk_columns[] = {
    {.heading = "chunk", .name = "chunk", .decimals = TABLE_PLAIN},
    {.heading = "rank", .name = "rank", .decimals = TABLE_PLAIN},
    {.heading = "kind", .name = "kind", .left = 1},
    {.heading = "chain", .name = "chain", .decimals = TABLE_PLAIN},
    {.heading = "index", .name = "index_in_chain", .decimals = TABLE_PLAIN},
    {.heading = "prefix", .name = "prefix_tokens", .decimals = TABLE_PLAIN},
    {.heading = "tokens", .name = "tokens", .decimals = TABLE_PLAIN},
    {.heading = "rows", .name = "rows", .decimals = TABLE_PLAIN},
    {.heading = "pairs", .name = "attention_pairs", .decimals = TABLE_PLAIN},
    {.heading = "slices", .name = "n_slices", .decimals = TABLE_PLAIN},
    {.heading = "slices", .name = "slices", .left = 1}};

/* Adds a slice as SEQUENCE[BEGIN..END), END excluded, or a whole sequence as its number alone. */
static void add_slice(table *t, const cf_slice *slice, int64_t sequence_tokens) {
    char text[80];
    int n = snprintf(text, sizeof text, "%lld", (long long)slice->sequence);

    if (slice->begin > 0 || slice->length < sequence_tokens)
        snprintf(text + n, sizeof text - (size_t)n, "[%lld..%lld)", (long long)slice->begin,
                 (long long)(slice->begin + slice->length));
    table_more(t, text);
}

static void add_chunk(table *t, const cf_plan *plan, int64_t id, const int64_t *lengths) {
    const cf_chunk *chunk = &plan->chunks[id];
    int64_t j;

    table_integer(t, id);
    table_integer(t, chunk->rank);
    table_text(t, packing_chunk_kind(plan, chunk));
    if (chunk->chain >= 0) table_integer(t, chunk->chain);
    else table_none(t);
    table_integer(t, chunk->index);
    table_integer(t, chunk->prefix);
    table_integer(t, chunk->tokens);
    table_integer(t, chunk->rows);
    table_integer(t, chunk->pairs);
    table_integer(t, chunk->n_slices);
    table_text(t, "");
    for (j = 0; j < chunk->n_slices; j++) {
        const cf_slice *slice = &plan->slices[chunk->first_slice + j];
        if (j > 0) table_more(t, " ");
        add_slice(t, slice, lengths[slice->sequence]);
    }
}

static int print_chunks(const cf_plan *plan, const int64_t *lengths, int tsv) {
    table t;
    int64_t i;

    table_begin(&t, chunk_columns, (int)(sizeof chunk_columns / sizeof chunk_columns[0]), tsv, 0);
    for (i = 0; i < plan->n_chunks && !cli_stdout_failed(); i++) add_chunk(&t, plan, i, lengths);
    return table_end(&t);
}

static int print_all(const pack_options *asked, packing *packed) {
    int code = asked->chunks ? print_chunks(packed->plan, packed->lengths, asked->tsv) : CLI_OK;

    if (asked->tsv && asked->chunks) return code;
    if (asked->chunks) putchar('\n');
    if (code == CLI_OK) code = print_input(packed, asked->tsv);
    if (code == CLI_OK && !asked->tsv) code = print_plan(packed->plan, asked->packing.lockstep);
    return code;
}

/* Writes the requested files, then the tables, unless one of the files goes to standard output. */
static int write_all(const pack_options *asked, packing *packed) {
    cli_output outputs[2] = {{0}, {0}}; /* JSON, picture */
    cf_write_desc desc = {0};
    cf_error error;
    int code = cli_output_open(&outputs[0], asked->json);

    desc.metadata = asked->metadata;
    if (code == CLI_OK) code = cli_output_open(&outputs[1], asked->drawn);
    if (code == CLI_OK && outputs[0].stream)
        code = cli_written(cf_write_plan_json(packed->plan, &desc, cli_write, &outputs[0], &error), &error);
    if (code == CLI_OK && outputs[1].stream)
        code = cli_written(svg_plan_write(packed->plan, &asked->svg, cli_write, &outputs[1], &error), &error);
    if (code == CLI_OK && outputs[0].stream != stdout && outputs[1].stream != stdout) code = print_all(asked, packed);
    return cli_outputs_finish(outputs, 2, code);
}

static int run(const void *given, char **operands, int n_operands) {
    const pack_options *asked = (const pack_options *)given;
    packing_options priced = asked->packing;
    pipeline pipe;
    packing packed;
    int code;

    (void)n_operands;
    if (asked->metadata && !asked->json) return cli_usage("pack", "--metadata wants --json");
    code = table_check("pack", asked->tsv, "--json", asked->json);
    if (code == CLI_OK) code = table_check("pack", asked->tsv, "--svg", asked->drawn);
    if (code == CLI_OK) code = pipeline_open("pack", &asked->pipeline, priced.ranks, &pipe);
    if (code != CLI_OK) return code;
    code = pipeline_price_cp(&pipe, &priced);
    pipeline_close(&pipe);
    if (code == CLI_OK) code = packing_make(&priced, operands[0], &packed);
    if (code != CLI_OK) return code;
    code = write_all(asked, &packed);
    packing_free(&packed);
    return code;
}

const cli_command cmd_pack = {
    .name = "pack", .operands = "FILE|-", .min_operands = 1, .max_operands = 1,
    .summary = "pack a list of lengths into chunks, and say how well that went",
    .details = CLI_LIST_HELP,
    .options = options, .defaults = &defaults, .options_size = sizeof defaults, .run = run};
