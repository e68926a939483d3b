/* schedule_new.c - a schedule in one block. */

#include "schedule_new.h"
#include "error_record.h"

#include <stdlib.h>
#include <string.h>

static void *standard_alloc(size_t bytes, void *user) {
    (void)user;
    return malloc(bytes);
}

static void standard_release(void *memory, void *user) {
    (void)user;
    free(memory);
}

static cf_result choose_allocator(const cf_allocator *given, cf_allocator *out, cf_error *error) {
    const cf_allocator standard = {standard_alloc, standard_release, NULL};

    *out = given && (given->alloc || given->release) ? *given : standard;
    if (out->alloc && out->release) return CF_OK;
    return error_record(error, CF_ERROR_ARGUMENT, out->alloc ? "allocator.release" : "allocator.alloc", -1, 0, 0,
                        "%s: must not be NULL", out->alloc ? "allocator.release" : "allocator.alloc");
}

/* Zeroed memory, or NULL and the error; never no bytes at all, for which NULL would be no failure. */
static void *allocate(const cf_allocator *allocator, size_t bytes, cf_error *error) {
    void *memory = allocator->alloc(bytes > 0 ? bytes : 1, allocator->user);

    if (memory) return memset(memory, 0, bytes);
    error_record(error, CF_ERROR_MEMORY, "allocator", -1, (int64_t)bytes, 0,
                 "allocator: gave no memory (wanted %llu bytes)", (unsigned long long)bytes);
    return NULL;
}

/* The object first, then its arrays, those with the larger items before the others: so all of them are aligned. */
cf_result schedule_new(const cf_schedule *header, const cf_allocator *allocator, cf_schedule **out, cf_error *error) {
    const size_t most = SIZE_MAX / 8; /* bytes of an array */
    size_t bytes = sizeof(cf_schedule), n_first = (size_t)header->n_stages + 1, n_actions = (size_t)header->n_actions;
    size_t n_limits = header->limits ? (size_t)header->n_stages : 0;
    cf_allocator used;
    cf_schedule *schedule;
    cf_result result = choose_allocator(allocator, &used, error);

    if (result != CF_OK) return result;
    if ((uint64_t)header->n_stages >= most / sizeof(int64_t) || (uint64_t)header->n_actions > most / sizeof(cf_action))
        return error_record(error, CF_ERROR_OVERFLOW, "bytes", -1, 0, 0, "bytes: does not fit in memory");
    bytes += (n_first + n_limits) * sizeof(int64_t) + n_actions * sizeof(cf_action);
    schedule = (cf_schedule *)allocate(&used, bytes, error);
    if (!schedule) return CF_ERROR_MEMORY;
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

void *schedule_scratch(const cf_schedule *schedule, int64_t n, size_t size, cf_error *error) {
    return allocate(&schedule->block.allocator, (size_t)n * size, error);
}

void schedule_release(const cf_schedule *schedule, void *scratch) {
    schedule->block.allocator.release(scratch, schedule->block.allocator.user);
}
