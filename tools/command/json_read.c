/* json_read.c - a strict reader of JSON. */

#include "json_read.h"

#include <float.h>
#include <math.h>
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
    char message[400], *at;
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    for (at = message; *at; at++) /* a name from the file could contain control characters for the terminal */
        if (*at < 32 || *at > 126) *at = '?';
    return cli_at_line(document->path, line_of(document->text, document->nodes[node].begin), "%s", message);
}

/* ----------------------------------------------------------------------------------------------------------------
   Text -> nodes
   ---------------------------------------------------------------------------------------------------------------- */

typedef struct parser {
    json_document *document;
    const char *text;
    uint32_t at, bytes;
    size_t capacity; /* of nodes */
    int depth;
} parser;

static int parse_wrong(const parser *p, const char *message) {
    return cli_at_line(p->document->path, line_of(p->text, p->at), "%s", message);
}

/* Returns the current byte; the text ends with a zero byte. */
static unsigned char look(const parser *p) {
    return p->at < p->bytes ? (unsigned char)p->text[p->at] : 0;
}

static void skip_blanks(parser *p) {
    while (p->at < p->bytes && strchr(" \t\r\n", p->text[p->at]) && p->text[p->at]) p->at++;
}

/* Adds a node that begins here. *node: its number. */
static int add_node(parser *p, json_kind kind, uint32_t *node) {
    json_document *d = p->document;
    json_node *at;

    if (d->n_nodes == p->capacity) { /* nodes are fewer than bytes, so their number has 32 bits as well */
        json_node *nodes = (json_node *)cli_grow(d->nodes, &p->capacity, sizeof *nodes);
        if (!nodes) return CLI_FAILED;
        d->nodes = nodes;
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

uint32_t json_utf8_length(const unsigned char *text, uint32_t n) {
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

/* Returns the four hexadecimal digits of an escape; -1: invalid. */
static int32_t hexadecimal(const char *text) {
    static const char digits[] = "0123456789abcdef0123456789ABCDEF";
    int32_t code = 0;
    int i;

    for (i = 0; i < 4; i++) {
        const char *digit = text[i] ? strchr(digits, text[i]) : NULL;
        if (!digit) return -1;
        code = code * 16 + (int32_t)((digit - digits) % 16);
    }
    return code;
}

static int is_high_surrogate(int32_t code) { return code >= 0xd800 && code <= 0xdbff; }
static int is_low_surrogate(int32_t code) { return code >= 0xdc00 && code <= 0xdfff; }

/* Skips \uXXXX, or two of them for characters above U+FFFF. The text's last byte is zero, so no digits are read after
   it. */
static int skip_code(parser *p) {
    const char *at = p->text + p->at; /* at the u */
    int32_t code = hexadecimal(at + 1);

    if (code < 0) return parse_wrong(p, "wanted four hexadecimal digits behind \\u");
    if (code == 0) return parse_wrong(p, "a string has a zero character");
    p->at += 5;
    if (is_high_surrogate(code)) {
        if (at[5] != '\\' || at[6] != 'u' || !is_low_surrogate(hexadecimal(at + 7)))
            return parse_wrong(p, "a string has half a character");
        p->at += 6;
    }
    return is_low_surrogate(code) ? parse_wrong(p, "a string has half a character") : CLI_OK;
}

static int skip_escape(parser *p) {
    p->at++;
    if (look(p) == 'u') return skip_code(p);
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
        n = json_utf8_length((const unsigned char *)p->text + p->at, p->bytes - p->at);
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

/* Parses an array or an object. */
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

int json_file_read(const char *path, size_t max_bytes, json_document *out) {
    char *text;
    size_t bytes;
    int code = cli_file_read(path, max_bytes, &text, &bytes);

    if (code != CLI_OK) return code;
    code = json_parse(path, text, bytes, out);
    if (code == CLI_OK) out->own = text;
    else free(text);
    return code;
}

void json_free(json_document *document) {
    free(document->nodes);
    free(document->own);
    document->own = NULL;
    document->nodes = NULL;
    document->n_nodes = 0;
}

/* ----------------------------------------------------------------------------------------------------------------
   Strings without their escapes
   ---------------------------------------------------------------------------------------------------------------- */

static size_t put_utf8(uint32_t code, char *out) {
    size_t n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4, i;
    static const unsigned first[] = {0, 0, 0xc0, 0xe0, 0xf0};

    for (i = n - 1; i > 0; i--, code >>= 6) out[i] = (char)(0x80 | (code & 0x3f));
    out[0] = (char)(first[n] | code);
    return n;
}

/* Decodes the byte or escape at *at into one to four bytes, and moves *at past it. Returns the number of bytes. */
static size_t decode(const char **at, char *out) {
    static const char pairs[] = "\"\"\\\\//b\bf\fn\nr\rt\t"; /* pairs: the letter after a backslash, and its meaning */
    const char *text = *at;
    int32_t code, low;
    int i;

    *at += 1;
    out[0] = *text;
    if (*text != '\\') return 1;
    if (text[1] != 'u') {
        *at += 1;
        for (i = 0; pairs[i] != text[1]; i += 2) continue;
        out[0] = pairs[i + 1];
        return 1;
    }
    code = hexadecimal(text + 2);
    *at += 5;
    if (!is_high_surrogate(code)) return put_utf8((uint32_t)code, out);
    low = hexadecimal(text + 8);
    *at += 6;
    return put_utf8(0x10000 + ((uint32_t)(code - 0xd800) << 10) + (uint32_t)(low - 0xdc00), out);
}

static int text_is(const json_document *document, const json_node *node, const char *word) {
    const char *at = document->text + node->begin, *end = document->text + node->end;
    char bytes[4];

    while (at < end) {
        size_t n = decode(&at, bytes);
        if (strncmp(word, bytes, n) != 0) return 0;
        word += n;
    }
    return *word == '\0';
}

void json_copy_text(const json_document *document, uint32_t node, char *out, size_t size) {
    const char *at = document->text + document->nodes[node].begin, *end = document->text + document->nodes[node].end;
    char bytes[4];
    size_t n;

    while (at < end && (n = decode(&at, bytes)) < size) {
        memcpy(out, bytes, n);
        out += n;
        size -= n;
    }
    *out = '\0';
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

static int read_count(const json_document *document, uint32_t node, const char *name, int64_t *out) {
    int code = json_read_int(document, node, name, out);

    if (code != CLI_OK || *out > 0) return code;
    return json_wrong(document, node, "%s: wanted a whole number above 0", name);
}

static int read_each(const json_document *document, uint32_t node, const char *name, int64_t *out) {
    const json_node *list = &document->nodes[node];
    int64_t value = 0, before = 0;
    uint32_t i;
    int code;

    if (list->kind != JSON_ARRAY) return read_count(document, node, name, out);
    for (i = node + 1; i < list->next; i = document->nodes[i].next, before = value) {
        code = read_count(document, i, name, &value);
        if (code != CLI_OK) return code;
        if (before > 0 && value != before)
            return json_wrong(document, i, "%s: wanted the same number in all layers", name);
    }
    if (value == 0) return json_wrong(document, node, "%s: wanted a whole number above 0", name);
    *out = value;
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

/* Reads a number with strtod, which accepts everything that the parser accepts and ends at the same byte. */
static int read_real(const json_document *document, uint32_t node, const char *name, double *out) {
    const json_node *value = &document->nodes[node];
    double real = value->kind == JSON_NUMBER ? strtod(document->text + value->begin, NULL) : HUGE_VAL;

    if (!(real >= -DBL_MAX && real <= DBL_MAX)) return json_wrong(document, node, "%s: wanted a finite number", name);
    *out = real;
    return CLI_OK;
}

static int read_word(const json_document *document, uint32_t node, const json_field *field, int64_t *out) {
    const json_node *value = &document->nodes[node];
    int64_t i;

    for (i = 0; i == 0 || strcmp(field->word(i), "?") != 0; i++)
        if (value->kind == JSON_STRING && text_is(document, value, field->word(i))) {
            *out = i;
            return CLI_OK;
        }
    return json_wrong(document, node, "%s: unknown", field->name);
}

static int take_node(const json_document *document, uint32_t node, json_kind kind, const char *name, const char *wanted,
                     uint32_t *out) {
    if (document->nodes[node].kind != (uint32_t)kind) return json_wrong(document, node, "%s: wanted %s", name, wanted);
    *out = node;
    return CLI_OK;
}

static int read_field(const json_document *document, uint32_t node, const json_field *field, void *out) {
    const json_node *value = &document->nodes[node];
    void *member = (char *)out + field->offset;

    switch (field->type) {
    case JSON_INT: return json_read_int(document, node, field->name, (int64_t *)member);
    case JSON_COUNT: return read_count(document, node, field->name, (int64_t *)member);
    case JSON_EACH: return read_each(document, node, field->name, (int64_t *)member);
    case JSON_INT32: return read_int32(document, node, field->name, (int32_t *)member);
    case JSON_REAL: return read_real(document, node, field->name, (double *)member);
    case JSON_WORD: return read_word(document, node, field, (int64_t *)member);
    case JSON_BOOL:
        if (value->kind != JSON_TRUE && value->kind != JSON_FALSE)
            return json_wrong(document, node, "%s: wanted true or false", field->name);
        *(int *)member = value->kind == JSON_TRUE;
        return CLI_OK;
    case JSON_TEXT_OF: return take_node(document, node, JSON_STRING, field->name, "a string", (uint32_t *)member);
    case JSON_OBJECT_OF: return take_node(document, node, JSON_OBJECT, field->name, "an object", (uint32_t *)member);
    case JSON_NODE_OF: *(uint32_t *)member = node; return CLI_OK;
    case JSON_ARRAY_OF:
    default: return take_node(document, node, JSON_ARRAY, field->name, "an array", (uint32_t *)member);
    }
}

/* Returns the index of the entry with that name; -1: none. */
static int find_field(const json_document *document, uint32_t name, const json_field *fields) {
    int i;
    for (i = 0; fields[i].name; i++)
        if (text_is(document, &document->nodes[name], fields[i].name)) return i;
    return -1;
}

int json_read_object(const json_document *document, uint32_t node, const json_field *fields, void *out,
                     uint64_t *seen) {
    uint64_t found = 0, missing = 0; /* missing: found as null */
    uint32_t name, value;
    int code = CLI_OK, i;

    if (document->nodes[node].kind != JSON_OBJECT) return json_wrong(document, node, "wanted an object");
    for (name = node + 1; name < document->nodes[node].next && code == CLI_OK; name = document->nodes[value].next) {
        value = name + 1;
        i = find_field(document, name, fields);
        if (i < 0) continue;
        if (found >> i & 1) return json_wrong(document, name, "%s: given twice", fields[i].name);
        found |= (uint64_t)1 << i;
        if (fields[i].nullable && document->nodes[value].kind == JSON_NULL) {
            missing |= (uint64_t)1 << i;
            continue;
        }
        code = read_field(document, value, &fields[i], out);
    }
    found &= ~missing;
    for (i = 0; code == CLI_OK && fields[i].name; i++)
        if (!fields[i].optional && !(found >> i & 1))
            code = json_wrong(document, node, "%s is missing", fields[i].name);
    if (seen) *seen = found;
    return code;
}

int json_refuse_others(const json_document *document, uint32_t node, const json_field *fields) {
    char text[CLI_SCRATCH_BYTES];
    uint32_t name;

    for (name = node + 1; name < document->nodes[node].next; name = document->nodes[name + 1].next) {
        if (find_field(document, name, fields) >= 0) continue;
        json_copy_text(document, name, text, sizeof text);
        return json_wrong(document, name, "%s: there is no such member", text);
    }
    return CLI_OK;
}

/* ----------------------------------------------------------------------------------------------------------------
   All members, also those that nobody reads
   ---------------------------------------------------------------------------------------------------------------- */

/* A member's name, with the object to which it belongs. */
typedef struct member_name {
    const char *text;
    uint32_t object, node;
} member_name;

static int compare_names(const void *a, const void *b) {
    const member_name *x = (const member_name *)a, *y = (const member_name *)b;
    int order = x->object < y->object ? -1 : x->object > y->object;

    if (order == 0) order = strcmp(x->text, y->text);
    return order != 0 ? order : x->node < y->node ? -1 : x->node > y->node;
}

static int check_number(const json_document *document, uint32_t node, const char *name) {
    const json_node *value = &document->nodes[node];
    const char *text = document->text + value->begin;
    size_t n = value->end - value->begin;
    int64_t whole;
    double real;

    if (value->kind != JSON_NUMBER) return CLI_OK;
    if (!memchr(text, '.', n) && !memchr(text, 'e', n) && !memchr(text, 'E', n))
        return json_read_int(document, node, name, &whole);
    return read_real(document, node, name, &real);
}

/* Lists the names of an object's members, copied to *text one after another, and checks their numbers. */
static int check_object(const json_document *document, uint32_t object, member_name *names, size_t *n, char **text) {
    const json_node *nodes = document->nodes;
    uint32_t node;
    int code = CLI_OK;

    for (node = object + 1; node < nodes[object].next && code == CLI_OK; node = nodes[node + 1].next) {
        size_t room = (size_t)(nodes[node].end - nodes[node].begin) + 1; /* no escape is shorter than its meaning */
        member_name *name = &names[(*n)++];
        json_copy_text(document, node, *text, room);
        name->text = *text;
        name->object = object;
        name->node = node;
        *text += room;
        code = check_number(document, node + 1, name->text);
    }
    return code;
}

static int check_array(const json_document *document, uint32_t array) {
    uint32_t node;
    int code = CLI_OK;

    for (node = array + 1; node < document->nodes[array].next && code == CLI_OK; node = document->nodes[node].next)
        code = check_number(document, node, "an element");
    return code;
}

static int check_members(const json_document *document, member_name *names, char *text) {
    size_t n = 0, i;
    uint32_t node;
    int code = CLI_OK;

    for (node = 0; node < document->n_nodes && code == CLI_OK; node++) {
        if (document->nodes[node].kind == JSON_OBJECT) code = check_object(document, node, names, &n, &text);
        if (document->nodes[node].kind == JSON_ARRAY) code = check_array(document, node);
    }
    if (code != CLI_OK) return code;
    qsort(names, n, sizeof *names, compare_names);
    for (i = 1; i < n; i++)
        if (names[i].object == names[i - 1].object && strcmp(names[i].text, names[i - 1].text) == 0)
            return json_wrong(document, names[i].node, "%s: given twice", names[i].text);
    return CLI_OK;
}

int json_check(const json_document *document) {
    member_name *names = (member_name *)calloc(document->n_nodes, sizeof *names);
    char *text = (char *)malloc((size_t)document->nodes[0].end + 1); /* a name also has two quotes */
    int code = names && text ? check_members(document, names, text) : cli_failed("out of memory");

    free(names);
    free(text);
    return code;
}
