/* >>pack: seconds of a pass, attention pairs of a slice. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/oracle.h"

#include <math.h>
#include <string.h>

TEST(pairs_are_those_of_the_mask) {
    int64_t prefix, length;
    for (prefix = 0; prefix <= 40; prefix++)
        for (length = 0; length <= 40; length++)
            CHECK_INT(cf_slice_pairs(prefix, length), oracle_pairs(prefix, length));
    CHECK_INT(cf_slice_pairs(8192, 8192), oracle_pairs(8192, 8192));
    CHECK_INT(cf_slice_pairs(1000003, 99991), oracle_pairs(1000003, 99991));
}

/* Two neighbouring slices have as many pairs as one slice of both. */
TEST(pairs_add_up_over_slices) {
    harness_rng rng = {11};
    int i;
    for (i = 0; i < 10000; i++) {
        int64_t prefix = harness_between(&rng, 0, 1 << 20), a = harness_between(&rng, 0, 1 << 20);
        int64_t b = harness_between(&rng, 0, 1 << 20);
        CHECK_INT(cf_slice_pairs(prefix, a) + cf_slice_pairs(prefix + a, b), cf_slice_pairs(prefix, a + b));
    }
}

TEST(pairs_at_the_edge_of_64_bits) {
    const int64_t two32 = (int64_t)1 << 32;
    CHECK_INT(cf_slice_pairs(0, 0), 0);
    CHECK_INT(cf_slice_pairs(INT64_MAX, 0), 0);
    CHECK_INT(cf_slice_pairs(INT64_MAX - 1, 1), INT64_MAX);
    CHECK_INT(cf_slice_pairs(INT64_MAX, 1), -1);
    CHECK_INT(cf_slice_pairs((INT64_MAX - 3) / 2, 2), INT64_MAX - (INT64_MAX - 3) % 2);
    CHECK_INT(cf_slice_pairs((INT64_MAX - 3) / 2 + 1, 2), -1);
    /* odd and even lengths, because the even factor is halved */
    CHECK_INT(cf_slice_pairs(0, two32 - 1), (two32 - 1) * (two32 / 2));
    CHECK_INT(cf_slice_pairs(0, two32), -1);
    CHECK_INT(cf_slice_pairs(0, two32 - 2), (two32 - 1) * (two32 / 2 - 1));
    CHECK_INT(cf_slice_pairs(0, INT64_MAX), -1);
    CHECK_INT(cf_slice_pairs(INT64_MAX, INT64_MAX), -1);
    CHECK_INT(cf_slice_pairs(CF_MAX_LENGTH, CF_MAX_CHUNK_SIZE), -1);
    CHECK_INT(cf_slice_pairs(CF_MAX_LENGTH, 32767), CF_MAX_LENGTH * 32767 + 32767 * 16384);
    CHECK_INT(cf_slice_pairs(-1, 5), -1);
    CHECK_INT(cf_slice_pairs(5, -1), -1);
    CHECK_INT(cf_slice_pairs(INT64_MIN, INT64_MIN), -1);
}

#if defined(__SIZEOF_INT128__)
__extension__ typedef __int128 wide;

TEST(pairs_against_128_bit_sums) {
    harness_rng rng = {12};
    int i;
    for (i = 0; i < 100000; i++) {
        /* drawn exponents, so that results lie on both sides of the limit */
        int64_t prefix = (int64_t)(harness_random(&rng) >> harness_between(&rng, 1, 63));
        int64_t length = (int64_t)(harness_random(&rng) >> harness_between(&rng, 1, 63));
        wide exact = (wide)prefix * length + (wide)length * ((wide)length + 1) / 2;
        CHECK_INT(cf_slice_pairs(prefix, length), exact > INT64_MAX ? -1 : (int64_t)exact);
    }
}
#else
TEST(pairs_against_128_bit_sums) {
    SKIP("no 128-bit integers here");
}
#endif

static int same_bits(double a, double b) {
    return memcmp(&a, &b, sizeof a) == 0;
}

/* Forces the value through memory, which rounds it: the products and sums are made one by one. */
static double rounded(volatile double x) {
    return x;
}

TEST(seconds_are_rounded_step_by_step) {
    harness_rng rng = {13};
    int i;
    for (i = 0; i < 20000; i++) {
        cf_pass_cost cost;
        int64_t tokens = harness_between(&rng, 0, 1 << 20), pairs = harness_between(&rng, 0, (int64_t)1 << 50);
        double by_token, by_pair;
        cost.constant = harness_unit(&rng);
        cost.per_token = harness_unit(&rng) * 1e-6;
        cost.per_pair = harness_unit(&rng) * 1e-11;
        by_token = rounded(cost.per_token * (double)tokens);
        by_pair = rounded(cost.per_pair * (double)pairs);
        REQUIRE(same_bits(cf_cost_seconds(&cost, tokens, pairs), rounded(rounded(cost.constant + by_token) + by_pair)));
    }
}

TEST(seconds_of_simple_costs) {
    cf_pass_cost cost = {0.5, 2.0, 0.25};
    cf_pass_cost zero = {0, 0, 0};
    CHECK(same_bits(cf_cost_seconds(&cost, 0, 0), 0.5));
    CHECK(same_bits(cf_cost_seconds(&cost, 10, 8), 22.5));
    CHECK(same_bits(cf_cost_seconds(&zero, 10, 8), 0.0));
    CHECK(same_bits(cf_cost_seconds(&zero, INT64_MAX, INT64_MAX), 0.0));
}

SUITE(cost, CASE(pairs_are_those_of_the_mask), CASE(pairs_add_up_over_slices), CASE(pairs_at_the_edge_of_64_bits),
      CASE(pairs_against_128_bit_sums), CASE(seconds_are_rounded_step_by_step), CASE(seconds_of_simple_costs));
