/* schedule_new.c - a schedule in one block. */

#include "schedule_new.h"

#include <string.h>

/* The object first, then its arrays, those with the larger items before the others: so all of them are aligned. */
cf_result schedule_new(const cf_schedule *header, const cf_allocator *allocator, cf_schedule **out, cf_error *error) {
    const size_t most = SIZE_MAX / 8; /* bytes of an array */
    size_t bytes = sizeof(cf_schedule), n_first = (size_t)header->n_stages + 1, n_actions = (size_t)header->n_actions;
    size_t n_limits = header->limits ? (size_t)header->n_stages : 0;
    cf_allocator used;
    cf_schedule *schedule;
    void *memory;
    cf_result result = cf_allocator_resolve(allocator, &used, error);

    if (result != CF_OK) return result;
    if ((uint64_t)header->n_stages >= most / sizeof(int64_t) || (uint64_t)header->n_actions > most / sizeof(cf_action))
        return cf_refuse(error, CF_ERROR_OVERFLOW, "bytes", -1, "does not fit in memory");
    bytes += (n_first + n_limits) * sizeof(int64_t) + n_actions * sizeof(cf_action);
    result = cf_allocate(&used, bytes, &memory, error);
    if (result != CF_OK) return result;
    schedule = (cf_schedule *)memset(memory, 0, bytes);
    *schedule = *header;
    schedule->first = (int64_t *)(schedule + 1);
    if (n_limits > 0) {
        schedule->limits = schedule->first + n_first;
        memcpy(schedule->limits, header->limits, n_limits * sizeof(int64_t));
    }
    schedule->actions = (cf_action *)(schedule->first + n_first + n_limits);
    schedule->block.allocator = used;
    schedule->block.bytes = bytes;
    *out = schedule;
    return CF_OK;
}
