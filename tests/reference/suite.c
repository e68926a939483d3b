#include "suite.h"

#include <string.h>

typedef struct suite_random {
    uint64_t state;
} suite_random;

static uint64_t next_random(suite_random *random) { /* splitmix64 */
    uint64_t x = random->state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static int64_t between(suite_random *random, int64_t low, int64_t high) {
    return low + (int64_t)(next_random(random) % (uint64_t)(high - low + 1));
}

/* 2^(x / 65536), linear between powers of two: close to exponential, and equal on every machine. */
static int64_t power_of_two(int64_t x) {
    int64_t whole = x >> 16, rest = x & 65535;
    return (((int64_t)1 << whole) * (65536 + rest)) >> 16;
}

/* Draws nearly log-uniformly from [2^low, 2^high). */
static int64_t log_uniform(suite_random *random, int64_t low, int64_t high) {
    return power_of_two(between(random, low << 16, (high << 16) - 1));
}

/* Draws by the bucket shares of Table 1 of the ChunkFlow paper, per 100,000. */
static int64_t draw_lmsys(suite_random *random) {
    int64_t x = between(random, 0, 99999);
    if (x < 90499) return log_uniform(random, 4, 10);
    if (x < 99539) return log_uniform(random, 10, 12);
    if (x < 99908) return log_uniform(random, 12, 13);
    if (x < 99987) return log_uniform(random, 13, 15);
    if (x < 99996) return log_uniform(random, 15, 17);
    return between(random, 131072, 303000);
}

/* Median 2^10.5 = 1448, with a factor of about 3 for each standard deviation; the sum of twelve uniforms is nearly
   normal. */
static int64_t draw_log_normal(suite_random *random) {
    int64_t sum = 0, i;
    for (i = 0; i < 12; i++) sum += between(random, 0, 65535);
    return power_of_two((21 << 15) + (sum - 6 * 65536) * 8 / 5);
}

const char *suite_class_name(int class_id) {
    static const char *const names[SUITE_CLASSES] = {"lmsys", "lognormal", "all-long", "no-long", "one-giant"};
    return class_id >= 0 && class_id < SUITE_CLASSES ? names[class_id] : "?";
}

static void draw_lengths(suite_batch *batch, suite_random *random) {
    int64_t size = batch->pack.chunk_size, at, i;
    switch (batch->class_id) {
        case 0:
            batch->n = SUITE_MOST_SEQUENCES;
            for (i = 0; i < batch->n; i++) batch->lengths[i] = draw_lmsys(random);
            break;
        case 1:
            batch->n = between(random, 48, 192);
            for (i = 0; i < batch->n; i++) batch->lengths[i] = draw_log_normal(random);
            break;
        case 2:
            batch->n = between(random, 3, 12);
            for (i = 0; i < batch->n; i++) batch->lengths[i] = between(random, size + 1, 10 * size);
            break;
        case 3:
            batch->n = between(random, 32, SUITE_MOST_SEQUENCES);
            for (i = 0; i < batch->n; i++) batch->lengths[i] = log_uniform(random, 6, 11) % size + 1;
            break;
        default:
            batch->n = between(random, 32, 128);
            for (i = 0; i < batch->n; i++) batch->lengths[i] = draw_lmsys(random) % size + 1;
            /* a separate statement: compilers differ in which argument they draw first */
            at = between(random, 0, batch->n - 1);
            batch->lengths[at] = between(random, 8 * size, 32 * size);
            break;
    }
}

/* Every second batch has attention costs: a full chunk's pairs weigh a tenth of its tokens, so the last chunk of a
   chain of 20 costs three times the first. Every third has transfers of a twentieth of a full chunk's forward. */
static void draw_costs(suite_batch *batch, int index) {
    double size = (double)batch->pack.chunk_size;
    memset(&batch->timing, 0, sizeof batch->timing);
    batch->timing.all.forward.per_token = 1;
    if (index % 2 == 1) batch->timing.all.forward.per_pair = 0.2 / size;
    if (index % 3 == 2) {
        batch->timing.latency = size / 100;
        batch->timing.seconds_per_token = 0.04;
    }
}

void suite_draw(int index, suite_batch *batch) {
    static const int64_t stages[] = {2, 3, 4, 5, 6, 8, 12, 16}, ks[] = {1, 2, 3, 4, 6, 8, 16};
    static const int64_t sizes[] = {2048, 4096, 1024};
    suite_random random;
    memset(batch, 0, sizeof *batch);
    random.state = (uint64_t)index + 1;
    batch->class_id = index / SUITE_PER_CLASS;
    batch->pack.chunk_size = sizes[between(&random, 0, 2)];
    batch->schedule.shape.n_stages = stages[between(&random, 0, 7)];
    batch->schedule.shape.k = ks[between(&random, 0, 6)];
    (void)between(&random, 0, 1);
    draw_lengths(batch, &random);
    draw_costs(batch, index);
}
