/* text_out.h - collects text into pieces for a cf_write_fn. */

#ifndef CHUNKFLOW_TEXT_OUT_H
#define CHUNKFLOW_TEXT_OUT_H

#include "../../chunkflow.h"

/* Text being written; after a refused piece the rest is dropped. */
typedef struct text_out {
    cf_write_fn write;
    void *user;
    int code; /* the first result of the callback other than 0 */
    size_t used;
    char text[4096];
} text_out;

/* Begins a text. Errors: CF_ERROR_ARGUMENT if `write` is NULL. */
cf_result text_out_begin(text_out *to, cf_write_fn write, void *user, cf_error *error);

/* Adds text like printf, at most 255 characters. */
void text_out_put(text_out *to, const char *format, ...);

/* Writes the remaining text. Errors: CF_ERROR_WRITE with the callback's number. */
cf_result text_out_end(text_out *to, cf_error *error);

#endif /* CHUNKFLOW_TEXT_OUT_H */
