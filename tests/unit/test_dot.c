/* Tests tools/command/graph_dot.h: the contents of a drawing, and inputs that are refused before anything is
   written. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/naive.h"
#include "tools/command/graph_dot.h"

#include <stdlib.h>
#include <string.h>

static int64_t count(const char *in, const char *word) {
    int64_t n = 0;
    for (; (in = strstr(in, word)) != NULL; in++) n++;
    return n;
}

/* Makes the graph of zero-bubble on three stages. */
static cf_graph *graph_of(const int64_t *lengths, int64_t n, int64_t n_virtual) {
    cf_schedule_desc desc = {0};
    cf_plan *plan = naive_pack(lengths, n, 3);
    cf_schedule *schedule = NULL;
    cf_graph *graph = NULL;
    desc.kind = CF_SCHEDULE_ZERO_BUBBLE;
    desc.shape.n_stages = 3;
    desc.shape.n_virtual = n_virtual;
    CHECK_INT(cf_schedule_make(plan, &desc, &schedule, NULL), CF_OK);
    CHECK_INT(cf_graph_make(plan, schedule, NULL, NULL, &graph, NULL), CF_OK);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
    return graph;
}

/* Makes a graph of a long sequence and three short ones, with all kinds of passes except B, and all kinds of edges. */
static cf_graph *example(int64_t n_virtual) {
    static const int64_t lengths[] = {9, 2, 5, 1};
    return graph_of(lengths, 4, n_virtual);
}

TEST(a_drawing_has_every_node_and_edge) {
    cf_graph *g = example(1);
    harness_text t = {NULL, 0, 0, 0, 0, 0};
    cf_error error;
    REQUIRE(g != NULL);
    harness_poison(&error, sizeof error);
    CHECK_INT(graph_dot_write(g, "s", 0, harness_collect, &t, &error), CF_OK);
    CHECK_POISON(&error, sizeof error);
    REQUIRE(t.at != NULL);
    CHECK_INT(count(t.at, "subgraph cluster_s"), 3);
    CHECK_INT(count(t.at, " [label="), g->n_nodes);
    CHECK_INT(count(t.at, " -> "), g->n_edges);
    CHECK(strstr(t.at, "digraph chunkflow {\n  rankdir=LR;\n") != NULL);
    CHECK(strstr(t.at, "    n0 [label=\"F 0\", tooltip=\"3 s\", fillcolor=\"#2b66d9\", fontcolor=white];\n") != NULL);
    CHECK_INT(count(t.at, "style=dotted"), count(t.at, "tooltip=\"slot\""));
    CHECK_INT(count(t.at, "style=dashed"),
              count(t.at, "tooltip=\"state\"") + count(t.at, "tooltip=\"state gradient\""));
    CHECK_INT(count(t.at, "{"), count(t.at, "}"));
    CHECK_STR(t.at + t.n - 2, "}\n");
    free(t.at);
    cf_graph_free(g);
}

TEST(virtual_stages_are_named_and_share_a_cluster) {
    cf_graph *g = example(2);
    char name[24];
    int stage, row;
    harness_text t = {NULL, 0, 0, 0, 0, 0};
    REQUIRE(g != NULL);
    CHECK_INT(graph_dot_write(g, "s", 0, harness_collect, &t, NULL), CF_OK);
    REQUIRE(t.at != NULL);
    CHECK_INT(count(t.at, "subgraph cluster_s"), 3);
    CHECK_INT(count(t.at, " @ "), g->n_nodes);
    for (stage = 0; stage < 3; stage++) { /* each cluster has its own two of the six virtual stages, and nothing else */
        char own[2][16], *begin, *end = NULL;
        for (row = 0; row < 2; row++) snprintf(own[row], sizeof own[row], " @ %d\"", stage + 3 * row);
        snprintf(name, sizeof name, "label=\"stage %d\"", stage);
        REQUIRE((begin = strstr(t.at, name)) != NULL && (end = strstr(begin, "  }\n")) != NULL);
        *end = 0;
        CHECK_INT(count(begin, " @ "), g->n_nodes / 3);
        CHECK_INT(count(begin, own[0]), g->n_nodes / 6);
        CHECK_INT(count(begin, own[1]), g->n_nodes / 6);
        *end = ' ';
    }
    free(t.at);
    cf_graph_free(g);
}

/* A batch without tokens: no stage has a node. */
TEST(an_empty_graph_has_no_clusters) {
    static const int64_t lengths[] = {0};
    cf_graph *g = graph_of(lengths, 1, 1);
    harness_text t = {NULL, 0, 0, 0, 0, 0};
    CHECK_INT(graph_dot_write(g, "s", 0, harness_collect, &t, NULL), CF_OK);
    CHECK(g->n_nodes == 0 && count(t.at, "subgraph") == 0 && count(t.at, "digraph chunkflow {") == 1);
    free(t.at);
    cf_graph_free(g);
}

TEST(a_drawing_is_bounded) {
    cf_graph *g = example(1);
    harness_text t = {NULL, 0, 0, 0, 0, 0};
    cf_error error;
    REQUIRE(g != NULL);
    CHECK_INT(graph_dot_write(g, "s", g->n_nodes - 1, harness_collect, &t, &error), CF_ERROR_LIMIT);
    CHECK_STR(error.field, "n_nodes");
    CHECK_INT(error.wanted, g->n_nodes - 1);
    CHECK_INT(error.got, g->n_nodes);
    CHECK_INT(graph_dot_write(g, "s", -1, harness_collect, &t, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "max_nodes");
    CHECK(error.item == -1 && error.wanted == 0 && error.got == -1);
    CHECK_INT(t.calls, 0);
    CHECK_INT(graph_dot_write(g, "s", g->n_nodes, harness_collect, &t, &error), CF_OK);
    free(t.at);
    cf_graph_free(g);
}

TEST(dot_arguments_are_checked) {
    cf_graph *g = example(1);
    harness_text t = {NULL, 0, 0, 0, 0, 0};
    cf_error error;
    REQUIRE(g != NULL);
    CHECK_INT(graph_dot_write(NULL, "s", 0, harness_collect, &t, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "graph");
    CHECK_INT(graph_dot_write(NULL, "s", 0, harness_collect, &t, NULL), CF_ERROR_ARGUMENT);
    CHECK_INT(graph_dot_write(g, "s", 0, NULL, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "write");
    CHECK_INT(t.calls, 0);
    cf_graph_free(g);
}

TEST(a_failing_callback_ends_a_drawing) {
    cf_graph *g = example(1);
    int64_t n, at;
    harness_text t = {NULL, 0, 0, 0, 0, 0};
    REQUIRE(g != NULL);
    CHECK_INT(graph_dot_write(g, "s", 0, harness_collect, &t, NULL), CF_OK);
    n = t.calls;
    CHECK(n >= 2); /* with one piece this test would show nothing */
    for (at = 1; at <= n; at++) {
        cf_error error;
        t.calls = 0;
        t.fail_at = at;
        harness_poison(&error, sizeof error);
        CHECK_INT(graph_dot_write(g, "s", 0, harness_collect, &t, &error), CF_ERROR_WRITE);
        CHECK_STR(error.field, "write");
        CHECK_INT(error.got, HARNESS_REFUSAL);
        CHECK_INT(t.calls, at);
    }
    free(t.at);
    cf_graph_free(g);
}

SUITE(dot, CASE(a_drawing_has_every_node_and_edge), CASE(virtual_stages_are_named_and_share_a_cluster),
      CASE(an_empty_graph_has_no_clusters), CASE(a_drawing_is_bounded), CASE(dot_arguments_are_checked),
      CASE(a_failing_callback_ends_a_drawing));
