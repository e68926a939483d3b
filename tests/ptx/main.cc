/* main.cc - the tests of the interpreter itself, and the suite primitives, which needs nothing else of the CUDA file */

#define HARNESS_IMPLEMENTATION
#include "../harness.h"

extern const harness_suite suite_ptx, suite_primitives;

int main(int argc, char **argv) {
    static const harness_suite *const suites[] = {&suite_ptx, &suite_primitives};
    return harness_main(argc, argv, suites, sizeof suites / sizeof suites[0]);
}
