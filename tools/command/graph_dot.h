/* graph_dot.h - graphs for Graphviz (dot). Like the library's functions, this one prints nothing: errors are a result
   code and a record. */

#ifndef CHUNKFLOW_GRAPH_DOT_H
#define CHUNKFLOW_GRAPH_DOT_H

#include "../../chunkflow.h"

/* Writes a graph from cf_graph_make: a cluster per stage; activations and gradients solid, state and its gradient
   dashed, slots dotted; times as tooltips, in `unit` ("s"). Drawings of many nodes are useless, so more than max_nodes
   (0: 500) is CF_ERROR_LIMIT on "n_nodes". Other errors: CF_ERROR_ARGUMENT (graph, max_nodes, write), and
   CF_ERROR_WRITE with the callback's number. Nothing is written except with CF_ERROR_WRITE. */
cf_result graph_dot_write(const cf_graph *graph, const char *unit, int64_t max_nodes, cf_write_fn write, void *user,
                          cf_error *error);

#endif /* CHUNKFLOW_GRAPH_DOT_H */
