/* The one translation unit that holds both libraries; all test files link with it. */

#define CHUNKFLOW_IMPLEMENTATION
#include "chunkflow.h"

#define CHUNKFLOW_TUNE_IMPLEMENTATION
#include "tools/chunkflow_tune.h"
