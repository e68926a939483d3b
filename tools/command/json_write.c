/* json_write.c - JSON, member by member. */

#include "json_write.h"
#include "json_read.h"

#include <string.h>

static void put(json_writer *w, const char *text) { (void)cli_write(text, strlen(text), w->to); }

static void new_line(json_writer *w) {
    int i;
    put(w, "\n");
    for (i = 0; i < w->depth; i++) put(w, "  ");
}

/* Writes the comma and line end before a member, and its key. */
static void begin_member(json_writer *w, const char *key) {
    if (w->inside) put(w, ",");
    new_line(w);
    w->inside = 1;
    if (!key) return;
    put(w, "\"");
    put(w, key);
    put(w, "\": ");
}

void json_write_begin(json_writer *w, cli_output *to, const char *format) {
    w->to = to;
    w->inside = w->depth = 0;
    json_open(w, NULL, '{');
    json_text_member(w, "format", format);
    json_integer_member(w, "version", CF_JSON_VERSION);
}

void json_write_end(json_writer *w) {
    json_close(w, '}');
    put(w, "\n");
}

void json_open(json_writer *w, const char *key, char bracket) {
    char text[2] = {0, 0};
    if (w->depth > 0) begin_member(w, key);
    text[0] = bracket;
    put(w, text);
    w->inside = 0;
    w->depth++;
}

void json_close(json_writer *w, char bracket) {
    char text[2] = {0, 0};
    w->depth--;
    new_line(w);
    text[0] = bracket;
    put(w, text);
    w->inside = 1;
}

void json_integer_member(json_writer *w, const char *key, int64_t value) {
    char text[32];
    begin_member(w, key);
    snprintf(text, sizeof text, "%lld", (long long)value);
    put(w, text);
}

void json_number_member(json_writer *w, const char *key, double value) {
    char text[40];
    begin_member(w, key);
    snprintf(text, sizeof text, "%.17g", value);
    put(w, text);
}

void json_bool_member(json_writer *w, const char *key, int value) {
    begin_member(w, key);
    put(w, value ? "true" : "false");
}

/* Returns the number of bytes up to the end of a text, at most n. */
static uint32_t length_to(const char *text, uint32_t n) {
    uint32_t i = 0;
    while (i < n && text[i]) i++;
    return i;
}

/* Writes one character of a string, which may have several bytes; returns the number of bytes. */
static uint32_t put_character(json_writer *w, const char *at) {
    unsigned char first = (unsigned char)*at;
    uint32_t n = json_utf8_length((const unsigned char *)at, length_to(at, 4));
    char text[8];

    if (first < 32 || first == 127 || first == '<') snprintf(text, sizeof text, "\\u%04x", (unsigned)first);
    else if (first == '"' || first == '\\') snprintf(text, sizeof text, "\\%c", first);
    else if (n == 0) snprintf(text, sizeof text, "?");
    else snprintf(text, sizeof text, "%.*s", (int)n, at);
    put(w, text);
    return n > 0 ? n : 1;
}

void json_text_member(json_writer *w, const char *key, const char *value) {
    begin_member(w, key);
    put(w, "\"");
    while (*value) value += put_character(w, value);
    put(w, "\"");
}

void json_string_open(json_writer *w, const char *key) {
    begin_member(w, key);
    put(w, "\"");
}

void json_string_put(json_writer *w, char letter) { (void)cli_write(&letter, 1, w->to); }
void json_string_close(json_writer *w) { put(w, "\""); }

void json_list_open(json_writer *w, const char *key) {
    begin_member(w, key);
    put(w, "[");
    w->inside = 0;
}

static void begin_item(json_writer *w) {
    if (w->inside) put(w, ",");
    w->inside = 1;
}

void json_list_integer(json_writer *w, int64_t value) {
    char text[32];
    begin_item(w);
    snprintf(text, sizeof text, "%lld", (long long)value);
    put(w, text);
}

void json_list_number(json_writer *w, double value) {
    char text[40];
    begin_item(w);
    snprintf(text, sizeof text, "%.17g", value);
    put(w, text);
}

void json_list_close(json_writer *w) {
    put(w, "]");
    w->inside = 1;
}

void json_integers_member(json_writer *w, const char *key, const int64_t *values, int64_t n) {
    int64_t i;

    json_list_open(w, key);
    for (i = 0; i < n; i++) json_list_integer(w, values[i]);
    json_list_close(w);
}
