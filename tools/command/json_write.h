/* json_write.h - JSON, member by member: the reports of the commands. */

#ifndef CHUNKFLOW_JSON_WRITE_H
#define CHUNKFLOW_JSON_WRITE_H

#include "cli.h"

/* A writer, which places the commas itself. cli_outputs_finish reports its errors. */
typedef struct json_writer {
    cli_output *to;
    int inside; /* 1: the current object or array already has a member */
    int depth;  /* number of open objects and arrays */
} json_writer;

/* Opens the object that is the whole file, with its "format" and "version". */
void json_write_begin(json_writer *w, cli_output *to, const char *format);
void json_write_end(json_writer *w);

void json_open(json_writer *w, const char *key, char bracket); /* here and below, key NULL: no key */
void json_close(json_writer *w, char bracket);
void json_integer_member(json_writer *w, const char *key, int64_t value);
void json_number_member(json_writer *w, const char *key, double value);
void json_bool_member(json_writer *w, const char *key, int value);
/* Writes a text. Control characters are escaped, and so is '<', which could end a script that contains the text; bytes
   that are not UTF-8 become ? */
void json_text_member(json_writer *w, const char *key, const char *value);

/* Write a string one letter or digit at a time. */
void json_string_open(json_writer *w, const char *key);
void json_string_put(json_writer *w, char letter);
void json_string_close(json_writer *w);

/* Write an array of numbers on one line. */
void json_list_open(json_writer *w, const char *key);
void json_list_integer(json_writer *w, int64_t value);
void json_list_number(json_writer *w, double value);
void json_list_close(json_writer *w);
void json_integers_member(json_writer *w, const char *key, const int64_t *values, int64_t n);

#endif /* CHUNKFLOW_JSON_WRITE_H */
