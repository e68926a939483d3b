/* text_out.c - collects text for a cf_write_fn. */

#include "text_out.h"

#include <stdarg.h>
#include <stdio.h>

enum { MOST_AT_ONCE = 256 }; /* with the 0 behind it */

cf_result text_out_begin(text_out *to, cf_write_fn write, void *user, cf_error *error) {
    to->write = write;
    to->user = user;
    to->code = 0;
    to->used = 0;
    return write ? CF_OK : cf_fail_null(error, "write");
}

static void flush(text_out *to) {
    if (to->code == 0 && to->used > 0) to->code = to->write(to->text, to->used, to->user);
    to->used = 0;
}

void text_out_put(text_out *to, const char *format, ...) {
    va_list arguments;
    int n;

    if (sizeof to->text - to->used < MOST_AT_ONCE) flush(to);
    va_start(arguments, format);
    n = vsnprintf(to->text + to->used, MOST_AT_ONCE, format, arguments);
    va_end(arguments);
    if (n > 0) to->used += n < MOST_AT_ONCE ? (size_t)n : MOST_AT_ONCE - 1;
}

cf_result text_out_end(text_out *to, cf_error *error) {
    flush(to);
    if (to->code == 0) return CF_OK;
    (void)cf_refuse(error, CF_ERROR_WRITE, "write", -1, "the callback reported an error");
    if (error) error->got = to->code;
    return CF_ERROR_WRITE;
}
