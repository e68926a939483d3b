/* Checkpoints of the trainer. The first byte says whether the checksum is put right, so that what lies behind that
   check is also reached. */

#define _XOPEN_SOURCE 700
#include "fuzz.h"

#include "examples/checkpoint.h"

enum { N_PARAMETERS = 3, N_PROGRESS = 2 };

static void run_checkpoint(const uint8_t *data, size_t size) {
    const checkpoint_setting settings[] = {setting_int("layers", 2), setting_double("rate", 0.5)};
    int64_t progress[N_PROGRESS] = {-1, -1}, bytes = size > 0 ? (int64_t)size - 1 : 0;
    real arrays[CHECKPOINT_ARRAYS][N_PARAMETERS] = {{7, 7, 7}, {7, 7, 7}, {7, 7, 7}};
    checkpoint c = {settings, 2, progress, N_PROGRESS, {arrays[0], arrays[1], arrays[2]}, N_PARAMETERS,
                    NULL, NULL, NULL};
    char why[CHECKPOINT_WHY] = "";
    unsigned char *image = TAKE(unsigned char, bytes);
    int taken;
    memcpy(image, data + (size > 0), (size_t)bytes);
    if (size > 0 && data[0] != 0 && bytes >= 8) {
        uint64_t checksum = hash_bytes(0, image, (size_t)bytes - 8);
        memcpy(image + bytes - 8, &checksum, 8);
    }
    taken = checkpoint_take(image, bytes, &c, why);
    FUZZ_CHECK(taken == (why[0] == '\0'), "taken: %d, why: %s", taken, why);
    FUZZ_CHECK(memchr(why, '\0', sizeof why) != NULL, "a reason without an end");
    if (!taken)
        FUZZ_CHECK(progress[0] == -1 && arrays[0][0] == 7 && arrays[2][N_PARAMETERS - 1] == 7,
                   "it was refused, and something was taken over: %s", why);
    free(image);
}

const fuzz_target fuzz_checkpoint = {"checkpoint", run_checkpoint, 0};
