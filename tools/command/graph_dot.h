/* graph_dot.h - graphs for Graphviz (dot). The function is like the library's own: it prints nothing, and what is wrong
   is a result code and a record. */

#ifndef CHUNKFLOW_GRAPH_DOT_H
#define CHUNKFLOW_GRAPH_DOT_H

#include "../../chunkflow.h"

/* Writes a graph that cf_graph_make has made: a cluster per stage; activations and gradients solid, state and its
   gradient dashed, slots dotted; times as tooltips, in `unit` ("s"). A drawing of many nodes helps nobody: more than
   max_nodes (0: 500) is CF_ERROR_LIMIT on "n_nodes". Other errors are CF_ERROR_ARGUMENT (graph, max_nodes, write) and
   CF_ERROR_WRITE, with the callback's number; with any but that one, nothing was written. */
cf_result graph_dot_write(const cf_graph *graph, const char *unit, int64_t max_nodes, cf_write_fn write, void *user,
                          cf_error *error);

#endif /* CHUNKFLOW_GRAPH_DOT_H */
