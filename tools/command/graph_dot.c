/* graph_dot.c - graphs for Graphviz. */

#include "graph_dot.h"
#include "text_out.h"

#include <stdio.h>
#include <string.h>

#define TRY(call)                         \
    do {                                  \
        cf_result tried = (call);         \
        if (tried != CF_OK) return tried; \
    } while (0)

/* Writes a time in any locale, whose decimal point may have several bytes. */
static void write_real(text_out *to, double value) {
    char text[40], *c, *end = text;

    (void)snprintf(text, sizeof text, "%.17g", value);
    for (c = text; *c; c++)
        if (strchr("0123456789+-e", *c)) *end++ = *c;
        else if (end == text || end[-1] != '.') *end++ = '.';
    *end = '\0';
    text_out_put(to, "%s", text);
}

static void write_node(text_out *to, const cf_graph *graph, int64_t id, const char *unit) {
    static const char *const looks[CF_COMPUTE_PASS_COUNT] = {
        "fillcolor=\"#2b66d9\", fontcolor=white", "fillcolor=\"#a9c6fb\"", "fillcolor=\"#f2a154\"",
        "fillcolor=\"#44d3da\"", "fillcolor=\"#e0f0e7\""};
    const cf_action *node = &graph->nodes[id].action;

    text_out_put(to, "    n%lld [label=\"%s %d", (long long)id, cf_pass_name((cf_pass)node->pass), (int)node->chunk);
    if (graph->shape.n_virtual > 1) text_out_put(to, " @ %d", (int)node->stage);
    text_out_put(to, "\", tooltip=\"");
    write_real(to, graph->nodes[id].seconds);
    text_out_put(to, " %s\", %s];\n", unit, looks[node->pass]);
}

static void write_edge(text_out *to, const cf_edge *edge) {
    static const char *const looks[CF_EDGE_COUNT] = {"style=solid",
                                                     "style=solid, color=\"#b05a00\"",
                                                     "style=dashed, constraint=false",
                                                     "style=dashed, constraint=false, color=\"#b05a00\"",
                                                     "style=solid, color=\"#5b8def\"",
                                                     "style=solid, color=gray",
                                                     "style=dotted, constraint=false, color=gray",
                                                     "style=dashed, color=gray"};

    text_out_put(to, "  n%d -> n%d [%s, tooltip=\"%s\"];\n", (int)edge->from, (int)edge->to, looks[edge->why],
                 cf_edge_name((cf_edge_why)edge->why));
}

static void write_stage(text_out *to, const cf_graph *graph, int64_t stage, const char *unit) {
    int64_t i;

    text_out_put(to, "  subgraph cluster_s%lld {\n    label=\"stage %lld\";\n", (long long)stage, (long long)stage);
    for (i = 0; i < graph->n_nodes; i++)
        if (cf_placement_stage(graph->shape.placement, graph->shape.n_stages, graph->nodes[i].action.stage) == stage)
            write_node(to, graph, i, unit);
    text_out_put(to, "  }\n");
}

cf_result graph_dot_write(const cf_graph *graph, const char *unit, int64_t max_nodes, cf_write_fn write, void *user,
                          cf_error *error) {
    int64_t most = max_nodes == 0 ? 500 : max_nodes, i;
    text_out to;

    if (!graph) return cf_fail_null(error, "graph");
    TRY(text_out_begin(&to, write, user, error));
    if (max_nodes < 0) return cf_fail(error, CF_ERROR_ARGUMENT, "max_nodes", -1, 0, max_nodes, "is negative");
    if (graph->n_nodes > most)
        return cf_fail(error, CF_ERROR_LIMIT, "n_nodes", -1, most, graph->n_nodes,
                       "is too many to draw; raise max_nodes, or draw fewer chunks");
    text_out_put(&to, "// solid: activation, gradient, replay, own; "
                      "dashed: state, state gradient, order; dotted: slot\n");
    text_out_put(&to, "digraph chunkflow {\n  rankdir=LR;\n  node [shape=box, style=filled];\n");
    for (i = 0; i < graph->shape.n_stages && graph->n_nodes > 0; i++) write_stage(&to, graph, i, unit);
    for (i = 0; i < graph->n_edges; i++) write_edge(&to, &graph->edges[i]);
    text_out_put(&to, "}\n");
    return text_out_end(&to, error);
}
