/* json_read.c - a strict reader of JSON. */

#include "json_read.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* ----------------------------------------------------------------------------------------------------------------
   Messages
   ---------------------------------------------------------------------------------------------------------------- */

static int64_t line_of(const char *text, size_t offset) {
    int64_t line = 1;
    size_t i;
    for (i = 0; i < offset; i++) line += text[i] == '\n';
    return line;
}

int json_wrong(const json_document *document, uint32_t node, const char *format, ...) {
    char message[400];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return cli_at_line(document->path, line_of(document->text, document->nodes[node].begin), "%s", message);
}

/* ----------------------------------------------------------------------------------------------------------------
   Text -> nodes
   ---------------------------------------------------------------------------------------------------------------- */

typedef struct parser {
    json_document *document;
    const char *text;
    uint32_t at, bytes;
    uint32_t capacity; /* of nodes */
    int depth;
} parser;

static int parse_wrong(const parser *p, const char *message) {
    return cli_at_line(p->document->path, line_of(p->text, p->at), "%s", message);
}

/* The byte at hand; a zero byte stands behind the text. */
static unsigned char look(const parser *p) {
    return p->at < p->bytes ? (unsigned char)p->text[p->at] : 0;
}

static void skip_blanks(parser *p) {
    while (p->at < p->bytes && strchr(" \t\r\n", p->text[p->at]) && p->text[p->at]) p->at++;
}

/* Adds a node that begins here; its number goes into *node. */
static int add_node(parser *p, json_kind kind, uint32_t *node) {
    json_document *d = p->document;
    json_node *at;

    if (d->n_nodes == p->capacity) {
        /* There are fewer nodes than bytes, so their number cannot overflow. */
        size_t more = p->capacity ? (size_t)p->capacity * 2 : 256;
        json_node *nodes = NULL;
        if (more <= SIZE_MAX / sizeof *nodes) nodes = (json_node *)realloc(d->nodes, more * sizeof *nodes);
        if (!nodes) return cli_failed("out of memory for %s", cli_input_name(d->path));
        d->nodes = nodes;
        p->capacity = (uint32_t)more;
    }
    at = &d->nodes[d->n_nodes];
    at->kind = (uint32_t)kind;
    at->begin = at->end = p->at;
    at->next = d->n_nodes + 1;
    *node = d->n_nodes++;
    return CLI_OK;
}

static int parse_word(parser *p, const char *word, json_kind kind) {
    uint32_t n = (uint32_t)strlen(word), node;
    int code;

    if (p->bytes - p->at < n || memcmp(p->text + p->at, word, n) != 0) return parse_wrong(p, "wanted a JSON value");
    code = add_node(p, kind, &node);
    p->at += n;
    if (code == CLI_OK) p->document->nodes[node].end = p->at;
    return code;
}

static int is_digit(unsigned char c) {
    return c >= '0' && c <= '9';
}

static int skip_digits(parser *p) {
    if (!is_digit(look(p))) return parse_wrong(p, "wanted a digit");
    while (is_digit(look(p))) p->at++;
    return CLI_OK;
}

static int parse_number(parser *p) {
    uint32_t node;
    int code = add_node(p, JSON_NUMBER, &node);

    if (look(p) == '-') p->at++;
    if (code == CLI_OK && look(p) == '0' && p->at + 1 < p->bytes && is_digit((unsigned char)p->text[p->at + 1]))
        return parse_wrong(p, "a number may not begin with a zero");
    if (code == CLI_OK) code = skip_digits(p);
    if (code == CLI_OK && look(p) == '.') {
        p->at++;
        code = skip_digits(p);
    }
    if (code == CLI_OK && (look(p) == 'e' || look(p) == 'E')) {
        p->at++;
        if (look(p) == '+' || look(p) == '-') p->at++;
        code = skip_digits(p);
    }
    if (code == CLI_OK) p->document->nodes[node].end = p->at;
    return code;
}

/* Bytes of the UTF-8 sequence at text[0 .. n), 0 if there is none: no overlong forms, no surrogates, none past
   U+10FFFF. */
static uint32_t utf8_length(const unsigned char *text, uint32_t n) {
    uint32_t length, i;

    if (text[0] < 0x80) return 1;
    if (text[0] < 0xc2 || text[0] > 0xf4) return 0;
    length = text[0] < 0xe0 ? 2 : text[0] < 0xf0 ? 3 : 4;
    if (length > n) return 0;
    for (i = 1; i < length; i++)
        if ((text[i] & 0xc0) != 0x80) return 0;
    if ((text[0] == 0xe0 && text[1] < 0xa0) || (text[0] == 0xed && text[1] > 0x9f)) return 0;
    if ((text[0] == 0xf0 && text[1] < 0x90) || (text[0] == 0xf4 && text[1] > 0x8f)) return 0;
    return length;
}

static int skip_escape(parser *p) {
    int i;

    p->at++;
    if (look(p) == 'u') {
        p->at++;
        for (i = 0; i < 4; i++, p->at++)
            if (look(p) == 0 || !strchr("0123456789abcdefABCDEF", look(p)))
                return parse_wrong(p, "wanted four hexadecimal digits behind \\u");
        return CLI_OK;
    }
    if (look(p) == 0 || !strchr("\"\\/bfnrt", look(p))) return parse_wrong(p, "a string has an escape that is none");
    p->at++;
    return CLI_OK;
}

static int parse_string(parser *p) {
    uint32_t node;
    int code;

    p->at++;
    code = add_node(p, JSON_STRING, &node);
    while (code == CLI_OK && look(p) != '"') {
        uint32_t n;
        if (p->at >= p->bytes) return parse_wrong(p, "a string does not end");
        if (look(p) < 32) return parse_wrong(p, "a string has a control character");
        if (look(p) == '\\') {
            code = skip_escape(p);
            continue;
        }
        n = utf8_length((const unsigned char *)p->text + p->at, p->bytes - p->at);
        if (n == 0) return parse_wrong(p, "a string is not UTF-8");
        p->at += n;
    }
    if (code == CLI_OK) p->document->nodes[node].end = p->at++;
    return code;
}

static int parse_value(parser *p);

static int parse_member_name(parser *p) {
    int code;

    if (look(p) != '"') return parse_wrong(p, "wanted the name of a member, in quotes");
    code = parse_string(p);
    if (code != CLI_OK) return code;
    skip_blanks(p);
    if (look(p) != ':') return parse_wrong(p, "wanted ':' behind the name of a member");
    p->at++;
    skip_blanks(p);
    return CLI_OK;
}

/* An array or an object. */
static int parse_list(parser *p, json_kind kind, char close) {
    uint32_t node;
    int code, more;

    if (p->depth == JSON_MAX_DEPTH) return parse_wrong(p, "the values are nested too deeply");
    p->depth++;
    code = add_node(p, kind, &node);
    p->at++;
    skip_blanks(p);
    more = look(p) != close;
    while (code == CLI_OK && more) {
        if (kind == JSON_OBJECT) code = parse_member_name(p);
        if (code == CLI_OK) code = parse_value(p);
        if (code != CLI_OK) return code;
        skip_blanks(p);
        more = look(p) == ',';
        if (!more && look(p) != close)
            return parse_wrong(p, close == '}' ? "wanted ',' or '}' behind a member"
                                               : "wanted ',' or ']' behind a value");
        if (more) p->at++;
        skip_blanks(p);
    }
    if (code != CLI_OK) return code;
    p->at++;
    p->depth--;
    p->document->nodes[node].end = p->at;
    p->document->nodes[node].next = p->document->n_nodes;
    return CLI_OK;
}

static int parse_value(parser *p) {
    switch (look(p)) {
    case '{': return parse_list(p, JSON_OBJECT, '}');
    case '[': return parse_list(p, JSON_ARRAY, ']');
    case '"': return parse_string(p);
    case 't': return parse_word(p, "true", JSON_TRUE);
    case 'f': return parse_word(p, "false", JSON_FALSE);
    case 'n': return parse_word(p, "null", JSON_NULL);
    default:
        if (look(p) == '-' || is_digit(look(p))) return parse_number(p);
        return parse_wrong(p, "wanted a JSON value");
    }
}

int json_parse(const char *path, const char *text, size_t bytes, json_document *out) {
    json_document fresh;
    parser p;
    int code;

    memset(&fresh, 0, sizeof fresh);
    memset(&p, 0, sizeof p);
    fresh.path = path;
    fresh.text = text;
    p.document = &fresh;
    p.text = text;
    if (bytes > JSON_MAX_BYTES) return cli_at_line(path, 1, "the file is too large");
    p.bytes = (uint32_t)bytes;
    skip_blanks(&p);
    code = parse_value(&p);
    skip_blanks(&p);
    if (code == CLI_OK && p.at < p.bytes) code = parse_wrong(&p, "there is more behind the JSON value");
    if (code == CLI_OK) *out = fresh;
    else json_free(&fresh);
    return code;
}

void json_free(json_document *document) {
    free(document->nodes);
    document->nodes = NULL;
    document->n_nodes = 0;
}

/* ----------------------------------------------------------------------------------------------------------------
   Nodes -> structs
   ---------------------------------------------------------------------------------------------------------------- */

int64_t json_count(const json_document *document, uint32_t node) {
    const json_node *list = &document->nodes[node];
    int64_t n = 0;
    uint32_t i;

    if (list->kind < JSON_ARRAY) return 0;
    for (i = node + 1; i < list->next; i = document->nodes[i].next) n++;
    return list->kind == JSON_OBJECT ? n / 2 : n;
}

/* Byte by byte: a name that is spelt with escapes is an unknown one. */
static int text_is(const json_document *document, const json_node *node, const char *word) {
    size_t n = strlen(word);
    return node->end - node->begin == n && memcmp(document->text + node->begin, word, n) == 0;
}

static int read_whole(const json_document *d, const json_node *node, int64_t *out) {
    const char *at = d->text + node->begin, *end = d->text + node->end;
    int negative = *at == '-';
    int64_t sum = 0;

    for (at += negative; at < end; at++) {
        int digit;
        if (!is_digit((unsigned char)*at)) return 0; /* a point or an exponent */
        digit = negative ? '0' - *at : *at - '0';
        if (negative ? sum < (INT64_MIN - digit) / 10 : sum > (INT64_MAX - digit) / 10) return 0;
        sum = sum * 10 + digit;
    }
    *out = sum;
    return 1;
}

int json_read_int(const json_document *document, uint32_t node, const char *name, int64_t *out) {
    const json_node *value = &document->nodes[node];

    if (value->kind != JSON_NUMBER || !read_whole(document, value, out))
        return json_wrong(document, node, "%s: wanted a whole number of at most 63 bits", name);
    return CLI_OK;
}

static int read_int32(const json_document *document, uint32_t node, const char *name, int32_t *out) {
    int64_t whole;
    int code = json_read_int(document, node, name, &whole);

    if (code != CLI_OK) return code;
    if (whole < INT32_MIN || whole > INT32_MAX)
        return json_wrong(document, node, "%s: wanted a whole number of 32 bits", name);
    *out = (int32_t)whole;
    return CLI_OK;
}

static int read_real(const json_document *document, uint32_t node, const char *name, double *out) {
    const json_node *value = &document->nodes[node];
    const char *text = document->text + value->begin;
    size_t n = value->end - value->begin;
    int negative = *text == '-';

    if (value->kind != JSON_NUMBER || !cli_parse_real(text + negative, n - (size_t)negative, out))
        return json_wrong(document, node, "%s: wanted a finite number", name);
    if (negative) *out = -*out;
    return CLI_OK;
}

static int read_word(const json_document *document, uint32_t node, const json_field *field, int64_t *out) {
    const json_node *value = &document->nodes[node];
    int64_t i;

    for (i = 0; field->words[i]; i++)
        if (value->kind == JSON_STRING && text_is(document, value, field->words[i])) break;
    if (!field->words[i]) return json_wrong(document, node, "%s: unknown", field->name);
    *out = i;
    return CLI_OK;
}

static int read_field(const json_document *document, uint32_t node, const json_field *field, void *out) {
    const json_node *value = &document->nodes[node];
    void *member = (char *)out + field->offset;

    switch (field->type) {
    case JSON_INT: return json_read_int(document, node, field->name, (int64_t *)member);
    case JSON_INT32: return read_int32(document, node, field->name, (int32_t *)member);
    case JSON_REAL: return read_real(document, node, field->name, (double *)member);
    case JSON_WORD: return read_word(document, node, field, (int64_t *)member);
    case JSON_BOOL:
        if (value->kind != JSON_TRUE && value->kind != JSON_FALSE)
            return json_wrong(document, node, "%s: wanted true or false", field->name);
        *(int *)member = value->kind == JSON_TRUE;
        return CLI_OK;
    case JSON_OBJECT_OF:
        if (value->kind != JSON_OBJECT) return json_wrong(document, node, "%s: wanted an object", field->name);
        *(uint32_t *)member = node;
        return CLI_OK;
    case JSON_ARRAY_OF:
    default:
        if (value->kind != JSON_ARRAY) return json_wrong(document, node, "%s: wanted an array", field->name);
        *(uint32_t *)member = node;
        return CLI_OK;
    }
}

/* The entry with that name; -1: none. */
static int find_field(const json_document *document, uint32_t name, const json_field *fields) {
    int i;
    for (i = 0; fields[i].name; i++)
        if (text_is(document, &document->nodes[name], fields[i].name)) return i;
    return -1;
}

int json_read_object(const json_document *document, uint32_t node, const json_field *fields, void *out,
                     uint64_t *seen) {
    uint64_t found = 0;
    uint32_t name, value;
    int code = CLI_OK, i;

    if (document->nodes[node].kind != JSON_OBJECT) return json_wrong(document, node, "wanted an object");
    for (name = node + 1; name < document->nodes[node].next && code == CLI_OK; name = document->nodes[value].next) {
        value = name + 1;
        i = find_field(document, name, fields);
        if (i < 0) continue;
        if (found >> i & 1) return json_wrong(document, name, "%s: given twice", fields[i].name);
        found |= (uint64_t)1 << i;
        code = read_field(document, value, &fields[i], out);
    }
    for (i = 0; code == CLI_OK && fields[i].name; i++)
        if (!fields[i].optional && !(found >> i & 1))
            code = json_wrong(document, node, "%s is missing", fields[i].name);
    if (seen) *seen = found;
    return code;
}
