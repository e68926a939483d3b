/* The unit tests of chunkflow.h, one suite per section. Run with --list to see the names, with parts of names to
   choose. SUITES can be other ones: the search without sanitizers is a program of its own. */

#define HARNESS_IMPLEMENTATION
#include "../harness.h"

#ifndef SUITES
#define SUITES(X) \
    X(harness) X(base) X(cost) X(models) X(pack) X(tree) X(forest) X(validate) X(metadata) X(memory) X(graph) \
    X(schedule) X(schedule_pipeline) X(lockstep) X(cp_groups) X(simulate) X(loads) X(simulate_lowered) \
    X(best) X(bounds) X(check) X(lower) X(tune) X(steps) X(steps_lowered) X(forward) X(write) X(csv) X(dot) \
    X(idle) X(refusals) X(needs) X(limits) X(boundaries) X(problem) X(promises)
#endif

#define DECLARE(name) extern const harness_suite suite_##name;
SUITES(DECLARE)

#define ADDRESS(name) &suite_##name,

int main(int argc, char **argv) {
    static const harness_suite *const suites[] = {SUITES(ADDRESS)};
    return harness_main(argc, argv, suites, sizeof suites / sizeof suites[0]);
}
