/* fuzz.h - fuzz targets: what each of them runs on the bytes that it is given, and how bytes become a problem.

   One program holds all targets. With libFuzzer (clang) it searches for bytes that break one; without, it replays the
   corpus, as `make test` does. A target that finds a fault says so and aborts, which libFuzzer takes for a finding. */

#ifndef FUZZ_H
#define FUZZ_H

#define CLI_MAX_LIST_BYTES 330 /* for cli.h: some inputs are longer */

#include "chunkflow.h"

#include <stdio.h>

typedef struct fuzz_target {
    const char *name;
    void (*run)(const uint8_t *data, size_t size);
    int n_drawn; /* inputs that are drawn when the corpus is replayed */
} fuzz_target;

#define FUZZ_TARGETS(X) \
    X(lengths) X(config) X(json) X(saved) X(csv) X(checkpoint) X(safetensors) X(pipeline) X(trees) X(hostile) X(tune)

#define FUZZ_DECLARE(name) extern const fuzz_target fuzz_##name;
FUZZ_TARGETS(FUZZ_DECLARE)
#undef FUZZ_DECLARE

/* ---- judging ---- */

/* Ends the program where `holds` is 0, with the text, which must say what was found. */
#define FUZZ_CHECK(holds, ...)                                                  \
    do {                                                                        \
        if (!(holds)) fuzz_fail(__FILE__, __LINE__, #holds, __VA_ARGS__);       \
    } while (0)

#if defined(__GNUC__) || defined(__clang__)
__attribute__((noreturn, format(printf, 4, 5)))
#endif
void fuzz_fail(const char *file, int line, const char *condition, const char *format, ...);

/* A record that nothing has written yet, for fuzz_result. */
cf_error fuzz_error(void);

/* That a call left its record alone if it went well, and filled in all of it if not. Returns whether it went well. */
int fuzz_result(cf_result result, const cf_error *error);

/* ---- bytes into numbers ----

   Bytes are taken from the front. Once there are none left, every draw gives its first value, so a short input is also
   a whole problem. */

typedef struct fuzz_input {
    const uint8_t *at, *end;
} fuzz_input;

fuzz_input fuzz_input_of(const uint8_t *data, size_t size);
int64_t fuzz_between(fuzz_input *in, int64_t low, int64_t high); /* both ends possible; low <= high */
int fuzz_chance(fuzz_input *in, int one_in);                     /* 1 for one byte in so many; 0 at the end */

/* Any number, and most of the time one at which something may go wrong: 0, -1, powers of two and their neighbours, the
   limits of the types. */
int64_t fuzz_number(fuzz_input *in);

/* Any double, NaN, infinities and denormals included, most of the time a simple one. */
double fuzz_real(fuzz_input *in);

/* Puts `number` into one in `one_in` members that are drawn: a description that is mostly sound reaches further. */
int64_t fuzz_mostly(fuzz_input *in, int64_t low, int64_t high, int one_in);

/* ---- objects ---- */

/* A batch of at most `most` sequences and how to pack it: small enough that all that follows takes microseconds. wild:
   one member in so many may hold any number. */
typedef struct fuzz_batch {
    int64_t n, lengths[32];
    cf_pack_desc pack;
} fuzz_batch;

void fuzz_draw_batch(fuzz_input *in, fuzz_batch *batch, int64_t most, int wild);

/* Costs, into timing and, for some, stages[0 .. n_stages). Returns what a description's `timing` is to be. */
const cf_timing *fuzz_draw_timing(fuzz_input *in, cf_timing *timing, cf_stage_cost *stages, int64_t n_stages, int wild);

/* A stream of state in timing, for some. To be drawn last, so that inputs from before there were any stay what they
   are. */
void fuzz_draw_stream(fuzz_input *in, cf_timing *timing, int wild);

/* cf_schedule_make, and where it says that a limit is too low and what would be enough, again with that. */
cf_result fuzz_make_schedule(const cf_plan *plan, cf_schedule_desc *desc, cf_schedule **schedule, cf_error *error);

/* A text that is written, kept in memory for comparing and reading again. */
typedef struct fuzz_text {
    char *text; /* a zero byte ends it; NULL: nothing was written */
    size_t bytes, room;
} fuzz_text;

int fuzz_write(const char *text, size_t bytes, void *to); /* a cf_write_fn; to: a fuzz_text */
void fuzz_text_free(fuzz_text *text);

/* ---- the command's readers ----

   They open files and print messages. Here, whatever they open holds the bytes given to fuzz_file, and messages go into
   memory. */

void fuzz_file(const void *data, size_t size);

/* That a reader which returned this exit code has said so in one line, or nothing if all is well. Returns whether all
   is well. */
int fuzz_exit(int code);

#endif /* FUZZ_H */
