/* steps.h - the steps of all stages of a schedule, judged: every slot has what is read from it, and nothing else. */

#ifndef STEPS_H
#define STEPS_H

#include "chunkflow.h"

/* The steps of each stage are walked with tagged slots: activations by chunk, states by path, boundaries by the virtual
   stage that fills them. Then all stages are played together, and each tensor must be the right one when it is read.
   Members are compared with the list and with naive_loads. The schedule must be sound, and the seed that of the steps.
   steps: (n_stages). NULL, or the rule that is broken. */
const char *steps_fault(const cf_plan *plan, const cf_schedule *schedule, cf_steps *const *steps, uint64_t seed);

/* The first part of it alone, for one stage of a schedule that may be damaged: no slot is taken twice, out of turn,
   or given back by another one than has it. */
const char *steps_slots_fault(const cf_schedule *schedule, const cf_steps *steps);

#endif /* STEPS_H */
