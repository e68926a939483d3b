/* steps.h - judges the steps of all stages of a schedule: every slot has exactly the tensor that is read from it. */

#ifndef STEPS_H
#define STEPS_H

#include "chunkflow.h"

/* Walks the steps of each stage with tagged slots: activations by chunk, states by path, boundaries by the virtual
   stage that fills them. Then all stages run together, and each tensor must be the right one when it is read. Members
   are compared with the list and with naive_loads. The schedule must be sound, and the seed must be the steps'. steps:
   (n_stages). Returns NULL, or the broken rule. */
const char *steps_fault(const cf_plan *plan, const cf_schedule *schedule, cf_steps *const *steps, uint64_t seed);

/* Checks only the slots of one stage, of a schedule that may be damaged: no slot is taken twice, out of turn, or
   released by another owner. */
const char *steps_slots_fault(const cf_schedule *schedule, const cf_steps *steps);

#endif /* STEPS_H */
