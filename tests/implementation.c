/* The one translation unit that holds both libraries; all test files link with it. */

/* 0: the validator lets siblings of a tree come in any order, which is all that tests/unit/test_tree.c knows of them. */
extern int tests_sibling_order;
int tests_sibling_order = 1;
#define CF__CHECK_SIBLINGS tests_sibling_order

#define CHUNKFLOW_IMPLEMENTATION
#include "chunkflow.h"

#define CHUNKFLOW_TUNE_IMPLEMENTATION
#include "tools/chunkflow_tune.h"
