/* json_write.h - JSON, member by member: the reports of the commands. */

#ifndef CHUNKFLOW_JSON_WRITE_H
#define CHUNKFLOW_JSON_WRITE_H

#include "cli.h"

/* Commas are its own matter. What goes wrong is reported by cli_outputs_finish. */
typedef struct json_writer {
    cli_output *to;
    int inside; /* whether the object or array at hand has a member already */
    int depth;  /* how many are open */
} json_writer;

/* Opens the object that is the whole file, with its "format" and "version". */
void json_write_begin(json_writer *w, cli_output *to, const char *format);
void json_write_end(json_writer *w);

void json_open(json_writer *w, const char *key, char bracket); /* key NULL here and below: none */
void json_close(json_writer *w, char bracket);
void json_integer_member(json_writer *w, const char *key, int64_t value);
void json_number_member(json_writer *w, const char *key, double value);
void json_bool_member(json_writer *w, const char *key, int value);
/* Control characters are escaped, and so is '<', which could end a script that the text lies in; what is not UTF-8
   becomes ? */
void json_text_member(json_writer *w, const char *key, const char *value);

/* A string that is put together from letters and digits. */
void json_string_open(json_writer *w, const char *key);
void json_string_put(json_writer *w, char letter);
void json_string_close(json_writer *w);

/* An array of numbers on one line. */
void json_list_open(json_writer *w, const char *key);
void json_list_integer(json_writer *w, int64_t value);
void json_list_number(json_writer *w, double value);
void json_list_close(json_writer *w);
void json_integers_member(json_writer *w, const char *key, const int64_t *values, int64_t n);

#endif /* CHUNKFLOW_JSON_WRITE_H */
