/* bench_pack.c - how fast and how well cf_pack packs, beside rivals in the same run.

   The rivals are first-fit decreasing, written here from the textbook without code of chunkflow.h, and the best-fit
   core that TRL runs in Python (trl_bfd.py, if --python names an interpreter). bench_pack.sh builds and runs this, and
   keeps a record. Times are medians of processor time. Nothing here passes or fails by time; targets are printed beside
   the measured times. */

#define _POSIX_C_SOURCE 200809L
#define CHUNKFLOW_STATIC
#define CHUNKFLOW_IMPLEMENTATION
#include "../command/cli.h"
#include "../command/draw.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ----------------------------------------------------------------------------------------------------------------
   Small things
   ---------------------------------------------------------------------------------------------------------------- */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *need_memory(size_t count, size_t size) {
    void *memory = calloc(count ? count : 1, size);
    if (!memory) exit(cli_failed("out of memory"));
    return memory;
}

static void need_ok(const cf_error *error, cf_result result) {
    if (result != CF_OK) exit(cli_failed("%s", error->text));
}

#define MAX_REPEATS 101

typedef struct timings {
    double seconds[MAX_REPEATS];
    int n;
} timings;

static int compare_seconds(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(timings *t) {
    qsort(t->seconds, (size_t)t->n, sizeof t->seconds[0], compare_seconds);
    return t->seconds[t->n / 2];
}

static void add_time(timings *t, double seconds) {
    if (t->n < MAX_REPEATS) t->seconds[t->n++] = seconds;
}

static double excess_percent(int64_t chunks, int64_t bound) {
    return bound > 0 ? 100.0 * (double)(chunks - bound) / (double)bound : 0.0;
}

/* A list of lengths and what it is called. */
typedef struct sample {
    char name[120];
    int64_t *lengths;
    int64_t n;
} sample;

static sample draw_sample(int64_t n, uint64_t seed) {
    sample s;
    draw_source source;
    int64_t i;

    snprintf(s.name, sizeof s.name, "%s LMSys-like lengths, seed %llu", cli_commas(n), (unsigned long long)seed);
    s.lengths = (int64_t *)need_memory((size_t)n, sizeof *s.lengths);
    s.n = n;
    source.state = seed;
    for (i = 0; i < n; i++) s.lengths[i] = draw_lmsys(&source);
    return s;
}

/* ----------------------------------------------------------------------------------------------------------------
   The rival in C: first-fit decreasing with a segment tree
   ---------------------------------------------------------------------------------------------------------------- */

/* The pieces to pack, longest first, and the chunks that are open before: the last chunks of the chains. */
typedef struct pieces {
    int64_t *size;   /* (n) */
    int64_t n;
    int64_t *opened; /* (n_opened) room in each chunk that is open at the beginning */
    int64_t n_opened;
    int64_t n_full;  /* chunks that are full before */
} pieces;

/* Cuts sequences longer than chunk_size. The rest of each keeps its own chunk, which whole short sequences may then
   fill; this is the rule that chunkflow must obey. With free_rests, a rest is a piece like any other, which breaks that
   rule. */
static pieces cut(const int64_t *lengths, int64_t n, int64_t chunk_size, int free_rests) {
    pieces p = {NULL, 0, NULL, 0, 0};
    int64_t i;

    p.size = (int64_t *)need_memory((size_t)n, sizeof *p.size);
    p.opened = (int64_t *)need_memory((size_t)n, sizeof *p.opened);
    for (i = 0; i < n; i++) {
        int64_t rest = lengths[i] % chunk_size;
        p.n_full += lengths[i] / chunk_size;
        if (rest == 0) continue;
        if (lengths[i] < chunk_size || free_rests) p.size[p.n++] = rest;
        else p.opened[p.n_opened++] = chunk_size - rest;
    }
    return p;
}

static void free_pieces(pieces *p) {
    free(p->size);
    free(p->opened);
}

/* Sorts the indices of the pieces by counting: longest first, equal ones in input order. */
static void order_pieces(const pieces *p, int64_t chunk_size, int32_t *order) {
    int32_t *start = (int32_t *)need_memory((size_t)chunk_size + 2, sizeof *start);
    int64_t size, i;

    for (i = 0; i < p->n; i++) start[p->size[i]]++;
    for (size = chunk_size, i = 0; size >= 0; size--) {
        int32_t count = start[size];
        start[size] = (int32_t)i;
        i += count;
    }
    for (i = 0; i < p->n; i++) order[start[p->size[i]]++] = (int32_t)i;
    free(start);
}

/* Puts the index of a chunk into chunk_of[piece]. Returns the number of chunks, those opened before included. The
   leaves of the tree have the room of each chunk, and each inner node has the larger room of its children. Chunks that
   are not open yet have all their room, so the search for the leftmost leaf with enough room never fails. */
static int64_t first_fit_decreasing(const pieces *p, int64_t chunk_size, int32_t *chunk_of) {
    int64_t leaves = 1, used = p->n_opened, i, node;
    int32_t *order = (int32_t *)need_memory((size_t)p->n, sizeof *order);
    int32_t *room;

    while (leaves < p->n + p->n_opened) leaves *= 2;
    room = (int32_t *)need_memory((size_t)leaves * 2, sizeof *room);
    for (i = 0; i < leaves; i++) room[leaves + i] = (int32_t)(i < p->n_opened ? p->opened[i] : chunk_size);
    for (node = leaves - 1; node > 0; node--)
        room[node] = room[2 * node] >= room[2 * node + 1] ? room[2 * node] : room[2 * node + 1];

    order_pieces(p, chunk_size, order);
    for (i = 0; i < p->n; i++) {
        int32_t size = (int32_t)p->size[order[i]];
        for (node = 1; node < leaves;) node = room[2 * node] >= size ? 2 * node : 2 * node + 1;
        chunk_of[order[i]] = (int32_t)(node - leaves);
        if (node - leaves >= used) used = node - leaves + 1;
        room[node] -= size;
        for (node /= 2; node > 0; node /= 2)
            room[node] = room[2 * node] >= room[2 * node + 1] ? room[2 * node] : room[2 * node + 1];
    }
    free(room);
    free(order);
    return used;
}

/* Exits if a chunk of the rival is too full: a comparison with a wrong rival would prove nothing. */
static void check_rival(const pieces *p, int64_t chunk_size, const int32_t *chunk_of, int64_t n_chunks) {
    int64_t *tokens = (int64_t *)need_memory((size_t)n_chunks, sizeof *tokens);
    int64_t i;

    for (i = 0; i < p->n_opened; i++) tokens[i] = chunk_size - p->opened[i];
    for (i = 0; i < p->n; i++) {
        tokens[chunk_of[i]] += p->size[i];
        if (tokens[chunk_of[i]] > chunk_size) exit(cli_failed("the first-fit rival overfills chunk %d", chunk_of[i]));
    }
    free(tokens);
}

/* ----------------------------------------------------------------------------------------------------------------
   One sample, all packers
   ---------------------------------------------------------------------------------------------------------------- */

typedef struct bench_options {
    const char *python; /* interpreter for trl_bfd.py */
    const char *script; /* where that is */
    const char *work;   /* where to put the list for it */
    int64_t repeats;
    int64_t chunk_size;
    int quick;
} bench_options;

/* The numbers of the main sample that the summary at the end needs. */
typedef struct headline {
    double pack_seconds;
    double ffd_seconds;
    double python_seconds; /* 0: not run */
    int64_t chunks, ffd_chunks, lower_bound;
} headline;

static void print_row(const char *name, double seconds, int64_t n, int64_t chunks, int64_t bound, double base) {
    printf("  %-44s %10.3f ms %8.1f ns/seq %9.2f x", name, 1e3 * seconds, 1e9 * seconds / (double)(n ? n : 1),
           base > 0.0 ? seconds / base : 0.0);
    printf(" %12s chunks %+9.4f %%\n", cli_commas(chunks), excess_percent(chunks, bound));
}

/* Packs into reused memory, `repeats` times, and checks the last plan. Returns the median time. */
static double time_pack_into(const sample *s, const cf_pack_desc *desc, int repeats, cf_plan_stats *stats,
                             int64_t *bound, int64_t *slices) {
    timings t = {{0}, 0};
    cf_plan *plan = NULL;
    cf_error error;
    size_t bytes = 0;
    void *memory;
    int i;

    need_ok(&error, cf_pack_size(s->lengths, s->n, desc, &bytes, &error));
    memory = need_memory(bytes, 1);
    for (i = 0; i < repeats + 1; i++) {
        double start = now();
        need_ok(&error, cf_pack_into(s->lengths, s->n, desc, memory, bytes, &plan, &error));
        if (i > 0) add_time(&t, now() - start); /* the first one only touches the memory */
    }
    need_ok(&error, cf_plan_validate(plan, s->lengths, s->n, NULL, &error));
    cf_plan_measure(plan, NULL, stats);
    *bound = plan->lower_bound;
    *slices = plan->n_slices;
    free(memory);
    return median(&t);
}

/* The same with memory from malloc each time. */
static double time_pack(const sample *s, const cf_pack_desc *desc, int repeats) {
    timings t = {{0}, 0};
    cf_error error;
    int i;

    for (i = 0; i < repeats; i++) {
        cf_plan *plan = NULL;
        double start = now();
        need_ok(&error, cf_pack(s->lengths, s->n, desc, &plan, &error));
        add_time(&t, now() - start);
        cf_plan_free(plan);
    }
    return median(&t);
}

static double time_first_fit(const sample *s, int64_t chunk_size, int free_rests, int repeats, int64_t *chunks) {
    timings t = {{0}, 0};
    int i;

    for (i = 0; i < repeats; i++) {
        int32_t *chunk_of = (int32_t *)need_memory((size_t)s->n, sizeof *chunk_of);
        double start = now();
        pieces p = cut(s->lengths, s->n, chunk_size, free_rests);
        int64_t used = first_fit_decreasing(&p, chunk_size, chunk_of);
        add_time(&t, now() - start);
        check_rival(&p, chunk_size, chunk_of, used);
        *chunks = used + p.n_full;
        free(chunk_of);
        free_pieces(&p);
    }
    return median(&t);
}

/* Runs trl_bfd.py on the sample; returns 0 if that was not requested. *core: the time without its sort. */
static double time_python(const bench_options *asked, const sample *s, int64_t chunk_size, double *core,
                          int64_t *chunks) {
    char command[2048], answer[256];
    double seconds = 0.0;
    long long bins = 0;
    FILE *stream;
    int64_t i;

    if (!asked->python) return 0.0;
    stream = fopen(asked->work, "w");
    if (!stream) exit(cli_failed("cannot write %s", asked->work));
    for (i = 0; i < s->n; i++) fprintf(stream, "%lld\n", (long long)s->lengths[i]);
    if (fclose(stream) != 0) exit(cli_failed("cannot write %s", asked->work));

    snprintf(command, sizeof command, "'%s' '%s' --chunk-size %lld --repeat 3 '%s'", asked->python, asked->script,
             (long long)chunk_size, asked->work);
    stream = popen(command, "r");
    if (!stream || !fgets(answer, sizeof answer, stream) || pclose(stream) != 0 ||
        sscanf(answer, "%lf %lf %lld", &seconds, core, &bins) != 3)
        exit(cli_failed("%s failed", command));
    remove(asked->work);
    *chunks = bins;
    return seconds;
}

static headline compare_packers(const bench_options *asked, const sample *s, int64_t chunk_size) {
    static const struct {
        const char *name;
        cf_pack_method method;
        int no_tails;
    } methods[] = {{"cf_pack_into, best fit (default)", CF_PACK_BEST_FIT, 0},
                   {"cf_pack_into, next fit (keeps the order)", CF_PACK_NEXT_FIT, 0},
                   {"cf_pack_into, best fit, tails left alone", CF_PACK_BEST_FIT, 1}};
    headline head = {0.0, 0.0, 0.0, 0, 0, 0};
    double seconds, core = 0.0;
    int64_t chunks = 0, bound = 0, slices = 0;
    int repeats = (int)asked->repeats;
    cf_pack_desc desc;
    size_t i;

    memset(&desc, 0, sizeof desc);
    desc.chunk_size = chunk_size;
    printf("\n%s; ChunkSize %s\n", s->name, cli_commas(chunk_size));
    for (i = 0; i < sizeof methods / sizeof methods[0]; i++) {
        cf_plan_stats stats;
        desc.method = methods[i].method;
        desc.no_tails = methods[i].no_tails;
        seconds = time_pack_into(s, &desc, repeats, &stats, &bound, &slices);
        chunks = stats.n_standalone + stats.n_dependent + stats.n_hybrid;
        if (i == 0) {
            head.pack_seconds = seconds;
            head.chunks = chunks;
            head.lower_bound = bound;
            printf("  lower bound %s chunks, fill %.4f %%\n", cli_commas(bound), 100.0 * stats.fill);
            printf("  x: time against the first line; %%: chunks above the bound\n");
            printf("  cf_pack writes %s slices with their chunks and measures them; the rivals only choose chunks\n",
                   cli_commas(slices));
        }
        print_row(methods[i].name, seconds, s->n, chunks, bound, head.pack_seconds);
        if (i == 0) {
            seconds = time_pack(s, &desc, repeats);
            print_row("cf_pack, best fit, memory from malloc", seconds, s->n, chunks, bound, head.pack_seconds);
        }
    }
    head.ffd_seconds = time_first_fit(s, chunk_size, 0, repeats, &head.ffd_chunks);
    print_row("rival: first-fit decreasing in C", head.ffd_seconds, s->n, head.ffd_chunks, head.lower_bound,
              head.pack_seconds);
    seconds = time_first_fit(s, chunk_size, 1, 1, &chunks);
    print_row("  the same, rests of split ones mixed freely", seconds, s->n, chunks, head.lower_bound,
              head.pack_seconds);
    head.python_seconds = time_python(asked, s, chunk_size, &core, &chunks);
    if (head.python_seconds > 0.0) {
        print_row("rival: TRL's best-fit core in Python, mixed so", head.python_seconds, s->n, chunks,
                  head.lower_bound, head.pack_seconds);
        print_row("  the same without its sort", core, s->n, chunks, head.lower_bound, head.pack_seconds);
        head.python_seconds = core; /* the summary takes the number that is better for the rival */
    }
    return head;
}

/* ----------------------------------------------------------------------------------------------------------------
   A data loader's batches
   ---------------------------------------------------------------------------------------------------------------- */

/* Memory that is allocated once, for every batch. */
typedef struct loader {
    void *pack_memory, *schedule_memory, *metadata_memory;
    size_t pack_bytes, schedule_bytes, metadata_bytes;
} loader;

static void at_least(void **memory, size_t *have, size_t need) {
    if (need <= *have) return;
    free(*memory);
    *memory = need_memory(need, 1);
    *have = need;
}

/* Allocates memory for the largest of the batches. */
static loader make_loader(const sample *s, int64_t batch, const cf_pack_desc *desc, const cf_schedule_desc *order) {
    loader l = {NULL, NULL, NULL, 0, 0, 0};
    cf_error error;
    int64_t at;

    for (at = 0; at + batch <= s->n; at += batch) {
        cf_plan *plan = NULL;
        size_t bytes = 0;
        need_ok(&error, cf_pack_size(s->lengths + at, batch, desc, &bytes, &error));
        at_least(&l.pack_memory, &l.pack_bytes, bytes);
        need_ok(&error, cf_pack_into(s->lengths + at, batch, desc, l.pack_memory, l.pack_bytes, &plan, &error));
        need_ok(&error, cf_schedule_size(plan, order, &bytes, &error));
        at_least(&l.schedule_memory, &l.schedule_bytes, bytes);
        need_ok(&error, cf_metadata_size(plan, -1, NULL, &bytes, &error));
        at_least(&l.metadata_memory, &l.metadata_bytes, bytes);
    }
    return l;
}

static void free_loader(loader *l) {
    free(l->pack_memory);
    free(l->schedule_memory);
    free(l->metadata_memory);
}

typedef enum depth { PACK_ONLY, WITH_METADATA } depth;

/* Plans one batch. Returns a number that depends on the result, so that the compiler cannot leave work out. */
static int64_t plan_batch(loader *l, const int64_t *lengths, int64_t n, const cf_pack_desc *desc,
                          const cf_schedule_desc *order, depth how) {
    cf_plan *plan = NULL;
    cf_schedule *schedule = NULL;
    cf_metadata metadata;
    cf_error error;
    int64_t chunk, sum = 0;

    memset(&metadata, 0, sizeof metadata);
    need_ok(&error, cf_pack_into(lengths, n, desc, l->pack_memory, l->pack_bytes, &plan, &error));
    if (how == PACK_ONLY) return plan->n_chunks;
    need_ok(&error, cf_schedule_into(plan, order, l->schedule_memory, l->schedule_bytes, &schedule, &error));
    for (chunk = 0; chunk < plan->n_chunks; chunk++) {
        need_ok(&error, cf_metadata_fill(plan, chunk, NULL, l->metadata_memory, l->metadata_bytes, &metadata, &error));
        sum += metadata.max_seqlen_q;
    }
    return sum + schedule->n_actions;
}

static volatile int64_t sink; /* see plan_batch */

/* Returns the median, over `repeats` passes through the sample, of the mean time per batch. */
static double time_batches(loader *l, const sample *s, int64_t batch, const cf_pack_desc *desc,
                           const cf_schedule_desc *order, depth how, int repeats) {
    timings t = {{0}, 0};
    int i;

    for (i = 0; i < repeats + 1; i++) {
        int64_t at, n_batches = 0, sum = 0;
        double start = now();
        for (at = 0; at + batch <= s->n; at += batch, n_batches++)
            sum += plan_batch(l, s->lengths + at, batch, desc, order, how);
        if (i > 0) add_time(&t, (now() - start) / (double)n_batches);
        sink = sum;
    }
    return median(&t);
}

static double compare_batches(const sample *s, int64_t batch, int64_t chunk_size, int repeats) {
    cf_pack_desc desc;
    cf_schedule_desc order;
    double seconds[2];
    loader l;
    int how;

    memset(&desc, 0, sizeof desc);
    memset(&order, 0, sizeof order);
    desc.chunk_size = chunk_size;
    order.shape.k = 2;
    l = make_loader(s, batch, &desc, &order);
    for (how = PACK_ONLY; how <= WITH_METADATA; how++)
        seconds[how] = time_batches(&l, s, batch, &desc, &order, (depth)how, repeats);
    printf("  %12s %12s %14.2f us %14.2f us\n", cli_commas(batch), cli_commas(chunk_size), 1e6 * seconds[0],
           1e6 * seconds[1]);
    free_loader(&l);
    return seconds[WITH_METADATA];
}

static double bench_batches(const bench_options *asked) {
    static const int64_t sizes[] = {2048, 8192, 32768};
    sample s = draw_sample(asked->quick ? 64 * 256 : 2000 * 256, 1);
    double target = 0.0;
    size_t i;

    printf("\nA data loader: batches of LMSys-like lengths, all different, into reused memory, K = 2; time a batch\n");
    printf("  %12s %12s %17s %17s\n", "batch", "ChunkSize", "pack", "+ schedule,");
    printf("  %12s %12s %17s %17s\n", "", "", "", "metadata");
    for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        double seconds = compare_batches(&s, 256, sizes[i], (int)asked->repeats);
        if (sizes[i] == 8192) target = seconds;
    }
    compare_batches(&s, 1024, 8192, (int)asked->repeats);
    free(s.lengths);
    return target;
}

/* ----------------------------------------------------------------------------------------------------------------
   Growth
   ---------------------------------------------------------------------------------------------------------------- */

/* Measures the time per sequence for batches of n, for each n. Returns the ratio of the slowest to the fastest. */
static double bench_growth(const bench_options *asked) {
    sample s = draw_sample(asked->quick ? 100000 : 10000000, 1);
    double cheapest = 0.0, dearest = 0.0;
    cf_schedule_desc order;
    cf_pack_desc desc;
    int64_t n;

    memset(&desc, 0, sizeof desc);
    memset(&order, 0, sizeof order);
    desc.chunk_size = 8192;
    printf("\nGrowth: batches of n LMSys-like lengths at ChunkSize 8,192, packed into reused memory\n");
    for (n = 1000; n <= s.n; n *= 10) {
        sample part = s;
        double seconds;
        loader l;
        part.n = s.n < 1000000 ? s.n : n < 1000000 ? 1000000 : n;
        l = make_loader(&part, n, &desc, &order);
        seconds = time_batches(&l, &part, n, &desc, &order, PACK_ONLY, n < 10000000 ? (int)asked->repeats : 3);
        printf("  n = %12s %12.3f ms %8.2f ns/seq\n", cli_commas(n), 1e3 * seconds, 1e9 * seconds / (double)n);
        seconds /= (double)n;
        if (dearest < seconds) dearest = seconds;
        if (cheapest > seconds || n == 1000) cheapest = seconds;
        free_loader(&l);
    }
    free(s.lengths);
    return dearest / cheapest;
}

/* ----------------------------------------------------------------------------------------------------------------
   Trees
   ---------------------------------------------------------------------------------------------------------------- */

/* A tree: a prompt, branches below it, and leaves below each branch with at most a number of own tokens. */
typedef struct shape {
    const char *name;
    int64_t prompt, branches, branch, leaves, own;
} shape;

static void bench_trees(const bench_options *asked) {
    static const shape shapes[] = {{"one prompt of 32K, answers of at most 2K", 32768, 1, 0, 100000, 2048},
                                   {"prompts of 4K with 16 answers of at most 2K", 4096, 1, 0, 16, 2048},
                                   {"4K, 4 x 8K, each with 6 of at most 8K", 4096, 4, 8192, 6, 8192}};
    sample s = draw_sample(100000, 1);
    cf_shared_prefix *shares = (cf_shared_prefix *)need_memory((size_t)s.n, sizeof *shares);
    size_t k;

    printf("\nTrees of 100,000 leaves at ChunkSize 8,192\n");
    for (k = 0; k < sizeof shapes / sizeof shapes[0]; k++) {
        const shape *a = &shapes[k];
        draw_source source = {1};
        cf_pack_desc desc;
        cf_plan_stats stats;
        int64_t i, bound, slices;
        double into;
        memset(&desc, 0, sizeof desc);
        desc.chunk_size = 8192;
        desc.shared_prefixes = shares;
        for (i = 0; i < s.n; i++) {
            int64_t root = i - i % (a->branches * a->leaves), first = i - i % a->leaves;
            shares[i].with = i == first ? root : first;
            shares[i].tokens = i == root ? 0 : i == first ? a->prompt : a->prompt + a->branch;
            s.lengths[i] = a->prompt + a->branch + 1 + (int64_t)draw_below(&source, (uint64_t)a->own);
        }
        into = time_pack_into(&s, &desc, (int)asked->repeats, &stats, &bound, &slices);
        printf("  %-44s %10.3f ms, memory from malloc %8.3f ms %12s slices\n", a->name, 1e3 * into,
               1e3 * time_pack(&s, &desc, (int)asked->repeats), cli_commas(slices));
    }
    free(shares);
    free(s.lengths);
}

/* ----------------------------------------------------------------------------------------------------------------
   The program
   ---------------------------------------------------------------------------------------------------------------- */

static void print_summary(const headline *head, double batch_seconds, double growth) {
    printf("\nTargets beside what was measured (the main sample is the first one above)\n");
    printf("  %-64s %12s %12s\n", "", "target", "measured");
    printf("  %-64s %12s %9.2f ms\n", "pack the main sample, one thread", "<= 40 ms", 1e3 * head->pack_seconds);
    if (head->python_seconds > 0.0)
        printf("  %-64s %12s %10.1f x\n", "faster than TRL's core in Python without its sort", ">= 80 x",
               head->python_seconds / head->pack_seconds);
    else
        printf("  %-64s %12s %12s\n", "faster than TRL's core in Python", ">= 80 x", "not run");
    printf("  %-64s %12s %10.2f x\n", "faster than first-fit decreasing in C", "-",
           head->ffd_seconds / head->pack_seconds);
    printf("  %-64s %12s %12s\n", "chunks more than first-fit decreasing", "<= 0",
           cli_commas(head->chunks - head->ffd_chunks));
    printf("  %-64s %12s %10.4f %%\n", "chunks above the lower bound", "<= 0.02 %",
           excess_percent(head->chunks, head->lower_bound));
    printf("  %-64s %12s %9.2f us\n", "pack, schedule and describe a batch of 256 at ChunkSize 8,192", "<= 50 us",
           1e6 * batch_seconds);
    printf("  %-64s %12s %10.2f x\n", "time per sequence from n = 1,000 on, dearest over cheapest", "flat", growth);
}

static void bench_files(const bench_options *asked, char **paths, int n) {
    static const int64_t sizes[] = {2048, 8192, 32768, 131072};
    int i;
    size_t j;

    for (i = 0; i < n; i++) {
        const char *slash = strrchr(paths[i], '/');
        cli_list list;
        sample s;
        if (cli_list_read(paths[i], CLI_MAX_SEQUENCES, &list) != CLI_OK) exit(CLI_WRONG);
        snprintf(s.name, sizeof s.name, "%.80s (%s lengths)", slash ? slash + 1 : paths[i],
                 cli_commas(list.n_sequences));
        s.lengths = cli_list_lengths(&list);
        s.n = list.n_sequences;
        if (!s.lengths) exit(cli_failed("out of memory"));
        for (j = 0; j < sizeof sizes / sizeof sizes[0]; j++) compare_packers(asked, &s, sizes[j]);
        free(s.lengths);
        cli_list_free(&list);
    }
}

static const bench_options defaults = {NULL, "tools/bench/trl_bfd.py", "build/bench_pack.lengths", 9, 8192, 0};

static const cli_option options[] = {
    {"--python", "PROGRAM", CLI_TEXT, offsetof(bench_options, python), 0, 0, 0,
     "Python 3, for the rival in it; without this it is left out"},
    {"--script", "FILE", CLI_TEXT, offsetof(bench_options, script), 0, 0, 0,
     "that rival; default tools/bench/trl_bfd.py"},
    {"--work", "FILE", CLI_TEXT, offsetof(bench_options, work), 0, 0, 0,
     "a file that may be overwritten; default build/bench_pack.lengths"},
    {"--repeats", "N", CLI_NUMBER, offsetof(bench_options, repeats), 1, MAX_REPEATS - 1, 0,
     "how many times the median is over; default 9"},
    {"--chunk-size", "N", CLI_NUMBER, offsetof(bench_options, chunk_size), 1, 1 << 24, 0,
     "for the main sample; default 8192"},
    {"--quick", NULL, CLI_FLAG, offsetof(bench_options, quick), 0, 0, 0, "small samples, to see that it all works"},
    {NULL, NULL, CLI_FLAG, 0, 0, 0, 0, NULL}};

static int run(const void *given, char **operands, int n_operands) {
    const bench_options *asked = (const bench_options *)given;
    sample s = draw_sample(asked->quick ? 20000 : 1000000, 1);
    headline head = compare_packers(asked, &s, asked->chunk_size);
    double batch_seconds, growth;

    if (!asked->quick) {
        compare_packers(asked, &s, 2048);
        compare_packers(asked, &s, 32768);
    }
    free(s.lengths);
    bench_files(asked, operands, n_operands);
    batch_seconds = bench_batches(asked);
    growth = bench_growth(asked);
    bench_trees(asked);
    if (!asked->quick) print_summary(&head, batch_seconds, growth);
    return CLI_OK;
}

static const cli_command bench = {"bench_pack", "[FILE ...]", 0, -1, "Time cf_pack beside its rivals",
                                  "FILE is a list of lengths, as the chunkflow command reads it, to pack as well.\n",
                                  options, &defaults, sizeof defaults, run};

int main(int argc, char **argv) {
    bench_options asked = defaults;
    int n_operands = 0, code = CLI_OK;

    setvbuf(stdout, NULL, _IOLBF, BUFSIZ); /* a run takes a minute: show what there is */
    if (cli_parse(&bench, argc - 1, argv + 1, &asked, &n_operands, &code)) code = run(&asked, argv + 1, n_operands);
    return cli_outputs_finish(NULL, 0, code);
}
