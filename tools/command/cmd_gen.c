/* cmd_gen.c - chunkflow gen: draw a list of lengths. */

#include "cli.h"
#include "draw.h"

#include <stdlib.h>
#include <string.h>

typedef struct gen_options {
    int64_t n;
    int64_t seed;
    int64_t min; /* -1 in these four members: not given */
    int64_t max;
    int64_t median;
    int64_t sigma;
    int64_t branches;
} gen_options;

static const gen_options defaults = {.n = 256, .seed = 1, .min = -1, .max = -1, .median = -1, .sigma = -1};

static const cli_option options[] = {
    {.name = "--n", .value = "N", .kind = CLI_NUMBER, .offset = offsetof(gen_options, n), .max = CLI_MAX_SEQUENCES,
     .help = "how many lengths; default 256"},
    {.name = "--seed", .value = "S", .kind = CLI_NUMBER, .offset = offsetof(gen_options, seed), .max = INT64_MAX,
     .help = "another seed, other numbers; default 1"},
    {.name = "--min", .value = "N", .kind = CLI_NUMBER, .offset = offsetof(gen_options, min), .max = CF_MAX_LENGTH,
     .help = "uniform: the shortest length, default 1;\n"
     "otherwise: shorter draws are raised to this"},
    {.name = "--max", .value = "N", .kind = CLI_NUMBER, .offset = offsetof(gen_options, max), .max = CF_MAX_LENGTH,
     .help = "uniform: the longest length, must be given;\n"
     "otherwise: longer draws are cut to this"},
    {.name = "--median", .value = "N", .kind = CLI_NUMBER, .offset = offsetof(gen_options, median), .min = 1,
     .max = CF_MAX_LENGTH, .help = "lognormal: half of the draws are longer; default 512"},
    {.name = "--sigma", .value = "X", .kind = CLI_MILLIONTHS, .offset = offsetof(gen_options, sigma), .max = 10000000,
     .help = "lognormal: deviation of the natural logarithm; default 1"},
    {.name = "--branches", .value = "N", .kind = CLI_NUMBER, .offset = offsetof(gen_options, branches), .min = 1,
     .max = 200, .help = "draw trees: to each length, as a prompt, so many more as what\n"
     "follows it, as in 1K + 512 + 2K"},
    {.name = NULL}};

/* ----------------------------------------------------------------------------------------------------------------
   Drawing from a histogram
   ---------------------------------------------------------------------------------------------------------------- */

/* Replaces each count by the sum of the counts up to it, so that a draw is a binary search. */
static void accumulate_counts(cli_list *histogram) {
    int64_t sum = 0;
    size_t i;

    for (i = 0; i < histogram->n_entries; i++) {
        sum += histogram->entries[i].count;
        histogram->entries[i].count = sum;
    }
}

/* Draws a number below the sum of counts. Returns the length of the first entry whose accumulated count exceeds it. */
static int64_t draw_from_histogram(draw_source *source, const cli_list *histogram) {
    int64_t ticket = (int64_t)draw_below(source, (uint64_t)histogram->n_sequences);
    size_t low = 0, high = histogram->n_entries - 1;

    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (histogram->entries[middle].count > ticket) high = middle;
        else low = middle + 1;
    }
    return histogram->entries[low].length;
}

/* ----------------------------------------------------------------------------------------------------------------
   The distributions
   ---------------------------------------------------------------------------------------------------------------- */

typedef enum distribution { LMSYS, LOGNORMAL, UNIFORM, HISTOGRAM, N_DISTRIBUTIONS } distribution;

static const char *const distribution_names[] = {"lmsys", "lognormal", "uniform", "histogram", NULL};

static distribution find_distribution(const char *name) {
    int i = 0;
    while (i < N_DISTRIBUTIONS && strcmp(distribution_names[i], name) != 0) i++;
    return (distribution)i;
}

static int64_t draw_length(draw_source *source, distribution from, const gen_options *asked,
                           const cli_list *histogram) {
    switch (from) {
    case LMSYS: return draw_lmsys(source);
    case LOGNORMAL: return draw_lognormal(source, asked->median, asked->sigma);
    case UNIFORM: return asked->min + (int64_t)draw_below(source, (uint64_t)(asked->max - asked->min) + 1);
    case HISTOGRAM: return draw_from_histogram(source, histogram);
    case N_DISTRIBUTIONS: default: return 0;
    }
}

static void write_lengths(distribution from, const gen_options *asked, const cli_list *histogram) {
    draw_source source;
    int64_t i, j;

    source.state = (uint64_t)asked->seed;
    for (i = 0; i < asked->n && !cli_stdout_failed(); i++) {
        for (j = 0; j <= asked->branches; j++) {
            int64_t length = draw_length(&source, from, asked, histogram);
            if (length < asked->min) length = asked->min;
            if (length > asked->max) length = asked->max;
            printf("%s%lld", j > 0 ? " + " : "", (long long)length);
        }
        putchar('\n');
    }
}

/* Refuses options that the distribution does not use, and fills in the defaults of those that it does. */
static int resolve(distribution from, int n_operands, gen_options *asked) {
    if (from != LOGNORMAL && (asked->median >= 0 || asked->sigma >= 0))
        return cli_usage("gen", "%s is only for lognormal", asked->median >= 0 ? "--median" : "--sigma");
    if (from == UNIFORM && asked->max < 0) return cli_usage("gen", "uniform needs --max N");
    if (from == HISTOGRAM && n_operands < 2) return cli_usage("gen", "histogram needs FILE|-");
    if (from != HISTOGRAM && n_operands > 1) return cli_usage("gen", "only histogram reads a file");
    if (asked->min < 0) asked->min = from == HISTOGRAM ? 0 : 1;
    if (asked->max < 0) asked->max = CF_MAX_LENGTH;
    if (asked->median < 0) asked->median = 512;
    if (asked->sigma < 0) asked->sigma = 1000000;
    if (asked->min > asked->max) return cli_usage("gen", "--min is above --max");
    return CLI_OK;
}

static int run(const void *given, char **operands, int n_operands) {
    gen_options asked = *(const gen_options *)given;
    distribution from = find_distribution(operands[0]);
    cli_list histogram = {0};
    int code;

    if (from == N_DISTRIBUTIONS)
        return cli_usage("gen", "got '%s', wanted lmsys, lognormal, uniform or histogram%s", operands[0],
                         cli_guess_among(operands[0], distribution_names));
    code = resolve(from, n_operands, &asked);
    if (code == CLI_OK && from == HISTOGRAM) {
        /* Counts are weights here and cost no memory, so only their sum is bounded. */
        code = cli_list_read(operands[1], INT64_MAX, &histogram);
        if (code == CLI_OK) code = cli_list_refuse_trees(&histogram, "gen");
        if (code == CLI_OK && histogram.n_sequences == 0 && asked.n > 0)
            code = cli_wrong("%s: there is nothing to draw from", cli_input_name(operands[1]));
        accumulate_counts(&histogram);
    }
    if (code == CLI_OK) write_lengths(from, &asked, &histogram);
    cli_list_free(&histogram);
    return code;
}

const cli_command cmd_gen = {
    .name = "gen", .operands = "lmsys | lognormal | uniform | histogram FILE|-", .min_operands = 1, .max_operands = 2,
    .summary = "draw random lengths, one a line, the same on every machine",
    .details =
    "distributions\n"
    "  lmsys                   chat conversations: buckets with the shares that the ChunkFlow paper gives for\n"
    "                          LMSys-Chat-1M (90.5 % below 1K, the longest 303K), log-uniform within a bucket\n"
    "  lognormal               --median and --sigma\n"
    "  uniform                 whole numbers --min .. --max; the same number twice gives a constant\n"
    "  histogram FILE          drawn in proportion to the counts of a list of `length count` lines\n"
    "\n" CLI_LIST_HELP,
    .options = options, .defaults = &defaults, .options_size = sizeof defaults, .run = run};
