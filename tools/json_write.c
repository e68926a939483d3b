/* json_write.c - JSON, member by member. */

#include "json_write.h"

#include <string.h>

static void put(json_writer *w, const char *text) { (void)cli_write(text, strlen(text), w->to); }

static void new_line(json_writer *w) {
    int i;
    put(w, "\n");
    for (i = 0; i < w->depth; i++) put(w, "  ");
}

/* The comma and the line end before a member, and its key. */
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
    json_integer_member(w, "version", 1);
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

void json_text_member(json_writer *w, const char *key, const char *value) {
    begin_member(w, key);
    put(w, "\"");
    for (; *value; value++) {
        char text[2] = {'?', 0};
        if (*value >= 32 && *value < 127) text[0] = *value;
        if (*value == '"' || *value == '\\') put(w, "\\");
        put(w, text);
    }
    put(w, "\"");
}
