/* Compares the schedules of two headers, made by the estimates and timed by other clocks, side by side in one run.

       make bench-clocks OTHER=/path/to/another/chunkflow.h [ARGS='option...']

   Each header makes every schedule from the same estimates, those of a 14B model. The clocks of clocks_side.h then time
   its fixed order. A table has a row for each set of cases and limit:

       v1   one virtual stage on 4, 8 and 16 stages          none, default, as many chunks as stages, half of that
       v2   two virtual stages in loops on 4 and 8 stages    none, default, twice as many chunks as stages
       s1   one, backwards cut                               none, default, as many as stages
       sv   two in a V, backwards cut                        none, default, twice as many
       eq   equal chunks, under the limits of published schedules of cut backwards; eqT: a transfer takes 0.2 of a pass

   Columns: this header's makespan over its bound; the loss against the other header in per cent, by the estimates and
   as the mean of ten clocks (PERT); the processor time of the search over the other's; and the cases with a nominal
   makespan above 1.03 of the other's, with the worst ratio. Last come medians of 15 calls with default options, of the
   headers in turns.

   Options: set=NAME (one of the above, or times), batches=N, seed=N, ks=14 (the K to try, as digits), stages=N (at
   most), lengths=FILE (every third batch takes its next 64 lengths, one a line), cases (a line for each case). */

#include "clocks_side.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_LENGTHS = 4096, MOST_ROWS = 64, N_COSTS = 3, N_CALLS = 15 };

static struct {
    const char *set, *lengths, *ks;
    int64_t batches, seed, stages;
    int cases;
} options = {NULL, NULL, "14", 6, 1, 16, 0};

/* ---- batches ---- */

static uint64_t draws;

static double draw(void) { /* in [0, 1) */
    draws = draws * 6364136223846793005u + 1442695040888963407u;
    return (double)(draws >> 11) * (1.0 / 9007199254740992.0);
}

/* Log-uniform within the buckets of LMSys-Chat-1M's published length table. */
static int64_t draw_chat(void) {
    static const double share[] = {.90499, .0904, .00369, .00079, .00009, .00004};
    static const double ends[] = {16, 1024, 4096, 8192, 32768, 131072, 303000};
    double u = draw();
    int i = 0;
    while (i < 5 && u >= share[i]) u -= share[i++];
    return (int64_t)(ends[i] * pow(ends[i + 1] / ends[i], draw()));
}

/* Log-normal with median 4096, by the sum of uniform numbers. */
static int64_t draw_normal(void) {
    double sum = 0;
    int i;
    for (i = 0; i < 12; i++) sum += draw();
    return 1 + (int64_t)(4096 * exp(1.3 * (sum - 6)));
}

static int64_t read_lengths(int64_t skip, int64_t n, int64_t *lengths) {
    char line[256];
    int64_t m = 0;
    FILE *file = fopen(options.lengths, "r");
    if (file == NULL) {
        fprintf(stderr, "bench_clocks: cannot read %s\n", options.lengths);
        exit(2);
    }
    while (m < n && fgets(line, sizeof line, file) != NULL)
        if (line[0] >= '0' && line[0] <= '9' && skip-- <= 0) lengths[m++] = strtoll(line, NULL, 10);
    fclose(file);
    if (m == n) return m;
    fprintf(stderr, "bench_clocks: %s has too few lengths\n", options.lengths);
    exit(2);
}

/* Draws by turns 96 log-normal lengths, 256 of chat, and the latter with the first one 256K long. With a file, every
   third batch has the file's lengths instead. */
static int64_t draw_batch(int64_t batch, int64_t *lengths) {
    int kind = (int)(batch % 3);
    int64_t n = kind == 0 ? 96 : 256, i;
    draws = (uint64_t)(options.seed * 1000 + batch);
    for (i = 0; i < 8; i++) (void)draw(); /* neighbouring seeds begin alike */
    if (kind == 2 && options.lengths != NULL) return read_lengths((options.seed * 8 + batch / 3) * 64, 64, lengths);
    for (i = 0; i < n; i++) lengths[i] = kind == 0 ? draw_normal() : draw_chat();
    if (kind == 2) lengths[0] = 262144;
    return n;
}

static void set_costs(clocks_case *it) {
    double stages = (double)it->n_stages;
    int i;
    it->forward[0] = 1e-3;
    it->forward[1] = 2.24e-4 / stages;
    it->forward[2] = 7.8e-9 / stages;
    for (i = 0; i < 3; i++) it->input[i] = it->weight[i] = it->forward[i];
    it->latency = 2e-5;
    it->per_row = 2e-7;
}

/* ---- rows of the table ---- */

typedef struct table_row {
    char name[32];
    double gap, nominal, pert;     /* sums of logarithms */
    double seconds, other_seconds, worst;
    int64_t n, n_above;
} table_row;

static table_row rows[MOST_ROWS];
static int n_rows;

static table_row *row_of(const char *name) {
    int i;
    for (i = 0; i < n_rows; i++)
        if (strcmp(rows[i].name, name) == 0) return &rows[i];
    if (n_rows == MOST_ROWS) exit(2);
    strncpy(rows[n_rows].name, name, sizeof rows[n_rows].name - 1);
    return &rows[n_rows++];
}

static void compare(const char *name, const clocks_case *it) {
    table_row *row = row_of(name);
    clocks_result ours, other;
    double ratio, pert = 0;
    int clock;
    clocks_this(it, &ours);
    clocks_other(it, &other);
    ratio = ours.makespan[CLOCK_NOMINAL] / other.makespan[CLOCK_NOMINAL];
    for (clock = 1; clock < N_CLOCKS; clock++)
        pert += log(ours.makespan[clock] / other.makespan[clock]) / (N_CLOCKS - 1);
    row->n++;
    row->gap += log(ours.makespan[CLOCK_NOMINAL] / ours.bound);
    row->nominal += log(ratio);
    row->pert += pert;
    row->seconds += ours.seconds;
    row->other_seconds += other.seconds;
    row->n_above += ratio > 1.03;
    if (ratio > row->worst) row->worst = ratio;
    if (options.cases)
        printf("%s stages %d K %d lengths %d: %.4f of the bound, loss %.2f %.2f, %.1f ms, %.1f ms\n", name,
               (int)it->n_stages, (int)it->k, (int)it->n_lengths, ours.makespan[CLOCK_NOMINAL] / ours.bound,
               1e2 * log(ratio), 1e2 * pert, 1e3 * ours.seconds, 1e3 * other.seconds);
}

static void print_row(const table_row *row) {
    double n = (double)row->n;
    printf("%-14s %5d %9.4f %9.2f %9.2f %8.2f %7d %8.4f\n", row->name, (int)row->n, exp(row->gap / n),
           1e2 * row->nominal / n, 1e2 * row->pert / n, row->seconds / row->other_seconds, (int)row->n_above,
           row->worst);
}

static int is_wanted(const char *set) { return options.set == NULL || strcmp(options.set, set) == 0; }

/* ---- unequal chunks ---- */

typedef struct clocks_set {
    const char *name;
    int n_virtual, in_v, split;
    int64_t most_stages, most_k;
    int n_limits;
    struct {
        const char *name;
        int64_t chunks, times, over; /* chunks, or times x stages / over */
    } limits[4];
} clocks_set;

static const clocks_set sets[] = {
    {"v1", 1, 0, 0, 16, 4, 4, {{"none", -1, 0, 1}, {"default", 0, 0, 1}, {"P", 0, 1, 1}, {"P/2", 0, 1, 2}}},
    {"v2", 2, 0, 0, 8, 4, 3, {{"none", -1, 0, 1}, {"default", 0, 0, 1}, {"2P", 0, 2, 1}, {"", 0, 0, 1}}},
    {"s1", 1, 0, 1, 8, 4, 3, {{"none", -1, 0, 1}, {"default", 0, 0, 1}, {"P", 0, 1, 1}, {"", 0, 0, 1}}},
    {"sv", 2, 1, 1, 8, 1, 3, {{"none", -1, 0, 1}, {"default", 0, 0, 1}, {"2P", 0, 2, 1}, {"", 0, 0, 1}}}};

static void compare_set(const clocks_set *set, clocks_case *it) {
    char name[32];
    int l;
    for (it->n_stages = 4; it->n_stages <= set->most_stages && it->n_stages <= options.stages; it->n_stages *= 2)
        for (it->k = 1; it->k <= set->most_k; it->k++)
            for (l = 0; l < set->n_limits && strchr(options.ks, (int)('0' + it->k)) != NULL; l++) {
                set_costs(it);
                it->n_virtual = set->n_virtual;
                it->in_v = set->in_v;
                it->split = set->split;
                it->limit = set->limits[l].chunks + set->limits[l].times * it->n_stages / set->limits[l].over;
                snprintf(name, sizeof name, "%s %s", set->name, set->limits[l].name);
                compare(name, it);
            }
}

static void compare_batches(void) {
    static int64_t lengths[MOST_LENGTHS];
    clocks_case it;
    int64_t batch;
    size_t i;
    memset(&it, 0, sizeof it);
    it.lengths = lengths;
    it.chunk_size = 8192;
    for (i = 0; i < sizeof sets / sizeof sets[0]; i++)
        for (batch = 0; is_wanted(sets[i].name) && batch < options.batches; batch++) {
            it.n_lengths = draw_batch(batch, lengths);
            compare_set(&sets[i], &it);
        }
}

/* ---- equal chunks ---- */

/* The limits of published schedules, in chunks, for numbers of stages. */
static const struct {
    const char *name;
    int n_virtual, in_v, split;
    int64_t times, over, more; /* limit: times x stages / over + more; 0: the default one */
} published[] = {{"ZB-H1", 1, 0, 1, 1, 1, 0}, {"ZB-H2", 1, 0, 1, 2, 1, 0},  {"ZB-V", 2, 1, 1, 2, 1, 0},
                 {"V-Half", 2, 1, 1, 1, 1, 2}, {"V-Min", 2, 1, 1, 2, 3, 3}, {"1F1B", 1, 0, 0, 0, 1, 0},
                 {"loops", 2, 0, 0, 0, 1, 0},  {"loops, cut", 2, 0, 1, 0, 1, 0}};

/* Seconds of F, I and W, and of a transfer: equal ones, and two sets that papers give. */
static const double equal_costs[N_COSTS][4] = {{1, 1, 1, 0}, {1, 1.2, 0.8, 0.024}, {1, 1.21, 0.645, 0.024}};

static void compare_equal(const char *set, double transfer) {
    static int64_t lengths[MOST_LENGTHS];
    clocks_case it;
    char name[32];
    int64_t times;
    size_t i, cost;
    for (i = 0; i < MOST_LENGTHS; i++) lengths[i] = 1000;
    memset(&it, 0, sizeof it);
    it.lengths = lengths;
    it.chunk_size = 1000;
    it.k = 1;
    for (i = 0; i < sizeof published / sizeof published[0] && is_wanted(set); i++)
        for (it.n_stages = 4; it.n_stages <= options.stages; it.n_stages *= 2)
            for (times = 1; times <= 4; times *= 2)
                for (cost = 0; cost < N_COSTS; cost++) {
                    it.n_lengths = times * it.n_stages;
                    it.n_virtual = published[i].n_virtual;
                    it.in_v = published[i].in_v;
                    it.split = published[i].split;
                    it.limit = published[i].times * it.n_stages / published[i].over + published[i].more;
                    it.forward[0] = equal_costs[cost][0];
                    it.input[0] = equal_costs[cost][1];
                    it.weight[0] = equal_costs[cost][2];
                    it.latency = transfer > 0 ? transfer : equal_costs[cost][3];
                    snprintf(name, sizeof name, "%s %s", set, published[i].name);
                    compare(name, &it);
                }
}

/* ---- what a call takes ---- */

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void compare_times(const char *name, const clocks_case *it) {
    double seconds[2][N_CALLS];
    clocks_result result;
    int64_t n_actions = 0;
    int i;
    for (i = 0; i < N_CALLS; i++) {
        clocks_this(it, &result);
        seconds[0][i] = result.seconds;
        n_actions = result.n_actions;
        clocks_other(it, &result);
        seconds[1][i] = result.seconds;
    }
    for (i = 0; i < 2; i++) qsort(seconds[i], N_CALLS, sizeof seconds[i][0], by_size);
    printf("%-40s %8d %9.1f %9.1f %8.2f\n", name, (int)n_actions, 1e3 * seconds[0][N_CALLS / 2],
           1e3 * seconds[1][N_CALLS / 2], seconds[0][N_CALLS / 2] / seconds[1][N_CALLS / 2]);
}

static void compare_all_times(void) {
    static int64_t lengths[MOST_LENGTHS];
    clocks_case it;
    int64_t i;
    memset(&it, 0, sizeof it);
    it.lengths = lengths;
    it.chunk_size = 8192;
    it.n_virtual = 1;
    it.k = 1;
    printf("%-40s %8s %9s %9s %8s\n", "a call by default", "actions", "ms", "other ms", "ratio");
    for (it.n_stages = 4; it.n_stages <= 8; it.n_stages *= 2) {
        set_costs(&it);
        draws = (uint64_t)options.seed;
        for (i = 0; i < 256; i++) lengths[i] = draw_chat();
        it.n_lengths = 256;
        compare_times(it.n_stages == 4 ? "256 of chat, 4 stages" : "256 of chat, 8 stages", &it);
        lengths[0] = 262144;
        compare_times(it.n_stages == 4 ? "one of 256K among them" : "one of 256K among them, 8 stages", &it);
    }
    it.n_stages = 8;
    it.k = 4;
    set_costs(&it);
    for (i = 0; i < 420; i++) lengths[i] = (draw() < 1.0 / 16 ? 8192 * (1 + (int64_t)(draw() * 8)) : 0) + 4096 +
                                           (int64_t)(draw() * 4096);
    it.n_lengths = 420;
    compare_times("420 of uneven length, some long, K = 4", &it);
}

/* ---- options ---- */

static int take_option(const char *text) {
    static const struct {
        const char *name;
        const char **text;
        int64_t *number;
    } known[] = {{"set=", &options.set, NULL},         {"lengths=", &options.lengths, NULL},
                 {"ks=", &options.ks, NULL},           {"batches=", NULL, &options.batches},
                 {"seed=", NULL, &options.seed},       {"stages=", NULL, &options.stages}};
    size_t i;
    if (strcmp(text, "cases") == 0) return options.cases = 1;
    for (i = 0; i < sizeof known / sizeof known[0]; i++) {
        size_t n = strlen(known[i].name);
        if (strncmp(text, known[i].name, n) != 0) continue;
        if (known[i].text != NULL) *known[i].text = text + n;
        else *known[i].number = strtoll(text + n, NULL, 10);
        return 1;
    }
    return 0;
}

int main(int argc, char **argv) {
    table_row all = {"all", 0, 0, 0, 0, 0, 0, 0, 0};
    int i;
    for (i = 1; i < argc; i++) {
        if (take_option(argv[i])) continue;
        fprintf(stderr, "bench_clocks: '%s' is no option\n", argv[i]);
        return 2;
    }
    compare_batches();
    compare_equal("eq", 0);
    compare_equal("eqT", 0.2);
    if (n_rows > 0)
        printf("%-14s %5s %9s %9s %9s %8s %7s %8s\n", "set, limit", "cases", "gap", "nominal %", "PERT %", "time",
               "> 1.03", "worst");
    for (i = 0; i < n_rows; i++) {
        print_row(&rows[i]);
        all.n += rows[i].n;
        all.gap += rows[i].gap;
        all.nominal += rows[i].nominal;
        all.pert += rows[i].pert;
        all.seconds += rows[i].seconds;
        all.other_seconds += rows[i].other_seconds;
        all.n_above += rows[i].n_above;
        if (rows[i].worst > all.worst) all.worst = rows[i].worst;
    }
    if (n_rows > 0) print_row(&all);
    if (is_wanted("times")) compare_all_times();
    return 0;
}
