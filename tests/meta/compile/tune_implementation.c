/* The file that holds the tuner in a program of several files. The library itself is in another one. */

#define CHUNKFLOW_TUNE_IMPLEMENTATION
#include "../../../tools/chunkflow_tune.h"
