/* The file that holds the library in a program of several files. */

#define CHUNKFLOW_IMPLEMENTATION
#include "chunkflow.h"
