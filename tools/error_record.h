/* error_record.h - errors in the library's form, for functions of the tools that report as the library's own do. */

#ifndef CHUNKFLOW_ERROR_RECORD_H
#define CHUNKFLOW_ERROR_RECORD_H

#include "../chunkflow.h"

/* All of these fill in the record (NULL: there is none) and return the code. format: the whole text. */
cf_result error_record(cf_error *error, cf_result code, const char *field, int64_t item, int64_t wanted, int64_t got,
                       const char *format, ...);

/* For two whole numbers that say what is wrong: the nearest acceptable value and the value found. */
cf_result error_numbers(cf_error *error, cf_result code, const char *field, int64_t wanted, int64_t got,
                        const char *why);

/* For an argument that is missing. */
cf_result error_null(cf_error *error, const char *field);

#endif /* CHUNKFLOW_ERROR_RECORD_H */
