/* search_lists.h - a slow search for short schedules by other means than `best`, to judge `best` by. */

#ifndef CHUNKFLOW_SEARCH_LISTS_H
#define CHUNKFLOW_SEARCH_LISTS_H

#include "chunkflow.h"

/* Starts from a schedule of one virtual stage a stage, with whole backwards and local replay, and changes the stages'
   lists for so many seconds of processor time: passes move within their list, chunks trade places, and forwards keep or
   drop. It shares no code and no rule of thumb with the search of chunkflow.h, which decides in which order a simulated
   pipeline takes passes; a list can be anything that is sound.

   desc: what the schedule was made from (n_stages, k, rank, timing, and limits on chunks). Returns
   the best schedule found, in memory of its own to be given to search_lists_free, or NULL where the memory ends. */
cf_schedule *search_lists(const cf_plan *plan, const cf_schedule *start, const cf_schedule_desc *desc, double seconds,
                          uint64_t seed);
void search_lists_free(cf_schedule *schedule);

#endif /* CHUNKFLOW_SEARCH_LISTS_H */
