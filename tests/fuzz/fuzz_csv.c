/* Schedules as CSV. The first byte chooses the plan, the second what is asked of the reader. */

#include "fuzz.h"

#include "tools/command/schedule_csv.h"

#include <stdlib.h>
#include <string.h>

/* Only standalone chunks, as PyTorch has; chains; and two ranks. */
static const cf_plan *plan_of(int which) {
    static const int64_t lengths[] = {4, 4, 4, 11, 3, 6, 2};
    static const struct {
        int64_t n, n_ranks;
    } batches[] = {{3, 1}, {5, 1}, {7, 2}};
    static cf_plan *plans[3];
    cf_pack_desc pack = {0};
    pack.chunk_size = 4;
    pack.n_ranks = batches[which].n_ranks;
    if (plans[which] == NULL && cf_pack(lengths, batches[which].n, &pack, &plans[which], NULL) != CF_OK) abort();
    return plans[which];
}

static schedule_csv_desc desc_of(int bits, const cf_plan *plan) {
    schedule_csv_desc desc = {0};
    desc.extensions = 1;
    desc.legacy = bits & 1;
    desc.buffered = bits >> 1 & 1;
    desc.format = (schedule_csv_format)((bits >> 2 & 3) % SCHEDULE_CSV_FORMAT_COUNT);
    if (bits >> 4 & 1) desc.replay = CF_REPLAY_LOCAL;
    if (bits >> 5 & 1) desc.k = 2;
    desc.rank = (bits >> 6 & 1) % plan->n_ranks;
    return desc;
}

/* Checks that a schedule that was read is sound, and that its text reads as the same schedule and is written the
   same. */
static void check_schedule(const cf_plan *plan, cf_schedule *schedule, const schedule_csv_extras *extras,
                           const schedule_csv_desc *given) {
    schedule_csv_desc desc = *given;
    schedule_csv_extras *more = NULL;
    cf_schedule *again = NULL;
    fuzz_text text = {NULL, 0, 0}, second = {NULL, 0, 0};
    int32_t chunks[32]; /* which microbatch of the text is which chunk */
    cf_error error = fuzz_error();
    cf_result result = cf_schedule_validate(plan, schedule, NULL, NULL, &error);
    FUZZ_CHECK(fuzz_result(result, &error), "the reader made what is not sound: %s", error.text);
    desc.legacy = 0;
    desc.extras = extras;
    desc.format = schedule->lowered ? SCHEDULE_CSV_COMPUTE_COMMS : SCHEDULE_CSV_COMPUTE_ONLY;
    result = schedule_csv_write(plan, schedule, &desc, fuzz_write, &text, &error);
    FUZZ_CHECK(fuzz_result(result, &error), "it cannot be written: %s", error.text);
    FUZZ_CHECK(schedule_csv_microbatches(plan, schedule, chunks, NULL) == CF_OK, "no microbatches");
    desc.format = given->format;
    desc.chunks = chunks;
    desc.extras = NULL;
    result = schedule_csv_read(text.text ? text.text : "", text.bytes, plan, &desc, &again, &more, &error);
    FUZZ_CHECK(fuzz_result(result, &error), "what was written cannot be read: %s\n%s", error.text, text.text);
    FUZZ_CHECK(again->n_actions == schedule->n_actions && again->lowered == schedule->lowered &&
                   memcmp(again->actions, schedule->actions,
                          (size_t)schedule->n_actions * sizeof *schedule->actions) == 0,
               "it is read as another schedule:\n%s", text.text);
    desc.format = schedule->lowered ? SCHEDULE_CSV_COMPUTE_COMMS : SCHEDULE_CSV_COMPUTE_ONLY;
    desc.extras = more;
    FUZZ_CHECK(schedule_csv_write(plan, again, &desc, fuzz_write, &second, NULL) == CF_OK, "cannot be written again");
    FUZZ_CHECK(second.bytes == text.bytes && (text.bytes == 0 || memcmp(second.text, text.text, text.bytes) == 0),
               "written as another text:\n%s\n%s", text.text, second.text);
    schedule_csv_extras_free(more);
    cf_schedule_free(again);
    fuzz_text_free(&text);
    fuzz_text_free(&second);
}

static void check_microbatches(const char *text, size_t bytes, const cf_plan *plan, int64_t rank) {
    int32_t chunks[32], untouched[32];
    cf_error error = fuzz_error();
    int64_t i, k;
    memset(chunks, 0xff, sizeof chunks);
    memcpy(untouched, chunks, sizeof chunks);
    if (!fuzz_result(schedule_csv_read_microbatches(text, bytes, plan, rank, chunks, &error), &error)) {
        FUZZ_CHECK(memcmp(chunks, untouched, sizeof chunks) == 0, "it failed, and wrote");
        return;
    }
    for (i = 0; i < plan->chunks_per_rank; i++) {
        FUZZ_CHECK(chunks[i] >= rank * plan->chunks_per_rank && chunks[i] < (rank + 1) * plan->chunks_per_rank,
                   "chunk %d", chunks[i]);
        for (k = 0; k < i; k++) FUZZ_CHECK(chunks[i] != chunks[k], "chunk %d twice", chunks[i]);
    }
}

static void run_csv(const uint8_t *data, size_t size) {
    const cf_plan *plan = plan_of(size > 0 ? data[0] % 3 : 0);
    schedule_csv_desc desc = desc_of(size > 1 ? data[1] : 0, plan);
    size_t bytes = size > 2 ? size - 2 : 0;
    char *text = (char *)malloc(bytes > 0 ? bytes : 1); /* of just its size: there is no zero byte to rely on */
    schedule_csv_extras *extras = NULL;
    cf_schedule *schedule = NULL;
    cf_error error = fuzz_error();
    if (text == NULL) abort();
    if (bytes > 0) memcpy(text, data + 2, bytes);
    if (bytes > 0 && text[0] == 'm') {
        check_microbatches(text, bytes, plan, desc.rank);
    } else if (fuzz_result(schedule_csv_read(text, bytes, plan, &desc, &schedule, &extras, &error), &error)) {
        check_schedule(plan, schedule, extras, &desc);
        cf_schedule_free(schedule);
        schedule_csv_extras_free(extras);
    } else {
        FUZZ_CHECK(schedule == NULL && extras == NULL, "it failed, and wrote");
    }
    free(text);
}

const fuzz_target fuzz_csv = {"csv", run_csv, 0};
