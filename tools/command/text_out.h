/* text_out.h - text on its way to a cf_write_fn, collected into pieces. */

#ifndef CHUNKFLOW_TEXT_OUT_H
#define CHUNKFLOW_TEXT_OUT_H

#include "../../chunkflow.h"

/* After a refused piece the rest is swallowed. */
typedef struct text_out {
    cf_write_fn write;
    void *user;
    int code; /* the first answer of the callback that was not 0 */
    size_t used;
    char text[4096];
} text_out;

/* Errors: CF_ERROR_ARGUMENT where `write` is NULL. */
cf_result text_out_begin(text_out *to, cf_write_fn write, void *user, cf_error *error);

/* Like printf, for at most 255 characters. */
void text_out_put(text_out *to, const char *format, ...);

/* Hands out what is left. Errors: CF_ERROR_WRITE with the callback's number. */
cf_result text_out_end(text_out *to, cf_error *error);

#endif /* CHUNKFLOW_TEXT_OUT_H */
