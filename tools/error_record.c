/* error_record.c - errors in the library's form. */

#include "error_record.h"

#include <stdarg.h>
#include <stdio.h>

cf_result error_record(cf_error *error, cf_result code, const char *field, int64_t item, int64_t wanted, int64_t got,
                       const char *format, ...) {
    va_list arguments;

    if (!error) return code;
    error->code = code;
    error->field = field;
    error->item = item;
    error->wanted = wanted;
    error->got = got;
    va_start(arguments, format);
    (void)vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    return code;
}

cf_result error_numbers(cf_error *error, cf_result code, const char *field, int64_t wanted, int64_t got,
                        const char *why) {
    return error_record(error, code, field, -1, wanted, got, "%s: %s (wanted %lld, got %lld)", field, why,
                        (long long)wanted, (long long)got);
}

cf_result error_null(cf_error *error, const char *field) {
    return error_record(error, CF_ERROR_ARGUMENT, field, -1, 0, 0, "%s: must not be NULL", field);
}
