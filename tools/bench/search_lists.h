/* search_lists.h - a slow search for short schedules by other means than `best`, to judge `best`. */

#ifndef CHUNKFLOW_SEARCH_LISTS_H
#define CHUNKFLOW_SEARCH_LISTS_H

#include "chunkflow.h"

/* Starts from a schedule with one virtual stage on each stage, whole backwards and local replay. Changes the stages'
   lists for a number of seconds of processor time: passes move within their list, chunks trade places, and forwards
   keep or drop. It shares no code and no rule of thumb with the search of chunkflow.h. That search decides in which
   order a simulated pipeline takes passes; here a list may be anything that is sound.

   desc: what the schedule was made from (n_stages, k, rank, timing, and limits on chunks). Returns the best schedule
   found, which the caller frees with search_lists_free; NULL: no memory. */
cf_schedule *search_lists(const cf_plan *plan, const cf_schedule *start, const cf_schedule_desc *desc, double seconds,
                          uint64_t seed);
void search_lists_free(cf_schedule *schedule);

#endif /* CHUNKFLOW_SEARCH_LISTS_H */
