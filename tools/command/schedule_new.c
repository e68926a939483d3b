/* schedule_new.c - a schedule in one block. */

#include "schedule_new.h"

#include <string.h>

/* Copies an array of limits to `to`; returns the place for the next one. */
static int64_t *copy_limits(const int64_t **limits, int64_t *to, size_t n) {
    if (!*limits) return to;
    memcpy(to, *limits, n * sizeof *to);
    *limits = to;
    return to + n;
}

/* The object comes first, then its arrays, in falling order of item size, so that all of them are aligned. */
cf_result schedule_new(const cf_schedule *header, const cf_allocator *allocator, cf_schedule **out, cf_error *error) {
    const size_t most = SIZE_MAX / 16; /* bytes of an array */
    size_t bytes = sizeof(cf_schedule), n_first = (size_t)header->shape.n_stages + 1;
    size_t n_actions = (size_t)header->n_actions;
    const cf_limits *limits = &header->limits;
    int n_arrays = !!limits->chunks_by_stage + !!limits->state_by_stage + !!limits->bytes_by_stage;
    cf_allocator used;
    cf_schedule *schedule;
    int64_t *next;
    void *memory;
    cf_result result = cf_allocator_resolve(allocator, &used, error);

    if (result != CF_OK) return result;
    if ((uint64_t)header->shape.n_stages >= most / sizeof(int64_t) ||
        (uint64_t)header->n_actions > most / sizeof(cf_action))
        return cf_refuse(error, CF_ERROR_OVERFLOW, "bytes", -1, "does not fit in memory");
    bytes += (n_first + (size_t)n_arrays * (n_first - 1)) * sizeof(int64_t) + n_actions * sizeof(cf_action);
    result = cf_allocate(&used, bytes, &memory, error);
    if (result != CF_OK) return result;
    schedule = (cf_schedule *)memset(memory, 0, bytes);
    *schedule = *header;
    schedule->first = (int64_t *)(schedule + 1);
    next = copy_limits(&schedule->limits.chunks_by_stage, schedule->first + n_first, n_first - 1);
    next = copy_limits(&schedule->limits.state_by_stage, next, n_first - 1);
    next = copy_limits(&schedule->limits.bytes_by_stage, next, n_first - 1);
    schedule->actions = (cf_action *)next;
    schedule->block.allocator = used;
    schedule->block.bytes = bytes;
    *out = schedule;
    return CF_OK;
}
