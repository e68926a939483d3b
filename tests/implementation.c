/* The one translation unit that holds the library; all test files link with it. */

#define CHUNKFLOW_IMPLEMENTATION
#include "chunkflow.h"
