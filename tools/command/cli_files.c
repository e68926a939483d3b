/* cli_files.c - files and length lists in, files out. */

#define _XOPEN_SOURCE 700 /* realpath, sigaction */
#define _DEFAULT_SOURCE   /* flock, on Linux */
#define _DARWIN_C_SOURCE  /* and elsewhere */
#include "cli.h"
#include "progress.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

void *cli_grow(void *array, size_t *capacity, size_t size) {
    size_t more = *capacity > 0 ? *capacity * 2 : 64;
    void *grown = more <= SIZE_MAX / 2 / size ? realloc(array, more * size) : NULL;

    if (grown) *capacity = more;
    else (void)cli_failed("out of memory");
    return grown;
}

/* ----------------------------------------------------------------------------------------------------------------
   Input
   ---------------------------------------------------------------------------------------------------------------- */

/* Prints the error in errno. Running out of memory is not the input's fault. */
static int cannot(const char *what, const char *name) {
    int (*complain)(const char *, ...) = errno == ENOMEM ? cli_failed : cli_wrong;
    return complain("cannot %s %s: %s", what, name, strerror(errno));
}

int cli_cannot_read(const char *path) { return cannot("read", cli_input_name(path)); }

int cli_input_open(const char *path, FILE **stream) {
    errno = 0;
    *stream = strcmp(path, "-") == 0 ? stdin : fopen(path, "rb");
    return *stream ? CLI_OK : cannot("open", path);
}

int cli_input_close(FILE *stream, const char *path, int code) {
    if (code == CLI_OK && ferror(stream)) code = cli_cannot_read(path);
    if (stream != stdin) fclose(stream);
    return code;
}

/* ----------------------------------------------------------------------------------------------------------------
   Length lists
   ---------------------------------------------------------------------------------------------------------------- */

#define MAX_LINE ((size_t)1 << 20) /* bytes of a line without its comment: a tree of 100,000 answers and more */

typedef struct reader {
    FILE *stream;
    const char *path;
    int64_t max_sequences, most_counted; /* limit of all sequences; limit of those from counts and trees */
    int64_t line;
    int64_t bytes; /* read so far; limit + 1: there were more */
    char *text; /* [MAX_LINE] */
    size_t length;
} reader;

/* Returns the next byte; EOF at the limit as well, so that an endless input, such as a device, is refused
   eventually. */
static int next_byte(reader *in) {
    int c = getc_unlocked(in->stream);
    return c != EOF && ++in->bytes > CLI_MAX_LIST_BYTES ? EOF : c;
}

/* Returns the start of a line in printable form: at most 40 bytes, with bytes that are not printable ASCII as \xNN. */
static const char *quote(const char *text, size_t n) {
    static char out[40 * 4 + 4];
    char *at = out;
    size_t i;

    for (i = 0; i < n && i < 40; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c >= 32 && c < 127) *at++ = (char)c;
        else at += sprintf(at, "\\x%02x", c);
    }
    strcpy(at, n > 40 ? "..." : "");
    return out;
}

static int bad_line(const reader *in, const char *got, size_t n) {
    if (n > 0 && (*got == '[' || *got == '{'))
        return cli_at_line(in->path, in->line,
                           "got '%s', which looks like JSON; wanted a length in tokens on each line, without brackets "
                           "and commas", quote(got, n));
    return cli_at_line(in->path, in->line,
                       "got '%s', wanted a length in tokens (0 .. %lld), or a length and a count, or a tree such as "
                       "32K + 2K 16%s",
                       quote(got, n), (long long)CF_MAX_LENGTH, cli_suffix_hint(quote(got, n)));
}

static int too_many(const reader *in, const char *got, size_t n, int64_t most) {
    return cli_at_line(in->path, in->line, "got '%s', which makes more than %lld sequences%s", quote(got, n),
                       (long long)most,
                       most < in->max_sequences ? "; --max-sequences N allows more" : ", the most in a list");
}

/* Reads one line without its comment and its line end. Returns 1; 0 at the end of the file; -1 if it is too long. A
   comment may have any length: it is skipped while reading. */
static int read_line(reader *in) {
    int c = next_byte(in);
    int comment = 0, too_long = 0;

    if (c == EOF) return 0;
    in->line++;
    in->length = 0;
    for (; c != EOF && c != '\n'; c = next_byte(in)) {
        if (c == '#') comment = 1;
        if (comment) continue;
        if (in->length < MAX_LINE) in->text[in->length++] = (char)c;
        else too_long = 1;
        if (too_long) return -1;
    }
    if (in->length > 0 && in->text[in->length - 1] == '\r') in->length--;
    return 1;
}

static size_t skip_blanks(const char *text, size_t at, size_t n) {
    while (at < n && (text[at] == ' ' || text[at] == '\t')) at++;
    return at;
}

static size_t skip_word(const char *text, size_t at, size_t n) {
    while (at < n && text[at] != ' ' && text[at] != '\t') at++;
    return at;
}

/* Parses "LENGTH" or "LENGTH COUNT". Returns 1, or 0 for anything else. */
static int parse_line(const char *text, size_t n, cli_entry *entry) {
    size_t first = skip_blanks(text, 0, n);
    size_t first_end = skip_word(text, first, n);
    size_t second = skip_blanks(text, first_end, n);
    size_t second_end = skip_word(text, second, n);

    entry->count = 1;
    if (!cli_parse_number(text + first, first_end - first, &entry->length)) return 0;
    if (entry->length > CF_MAX_LENGTH) return 0;
    if (second < n && !cli_parse_number(text + second, second_end - second, &entry->count)) return 0;
    return skip_blanks(text, second_end, n) == n;
}

static int append_entry(cli_list *list, size_t *capacity, const cli_entry *entry) {
    if (list->n_entries == *capacity) {
        cli_entry *entries = (cli_entry *)cli_grow(list->entries, capacity, sizeof *entries);
        if (!entries) return CLI_FAILED;
        list->entries = entries;
    }
    list->entries[list->n_entries++] = *entry;
    list->n_sequences += entry->count;
    return CLI_OK;
}

/* ---- trees ----

       line    = tree | "(" tree ")" [count]
       tree    = length "+" branch { "+" branch }
       branch  = length [count] | "(" tree ")" [count]

   A tree with a count is read that many times, so reading takes as long as the list that results. */

enum { MAX_DEPTH = 64 }; /* of parentheses */

typedef struct tree_reader {
    const char *text;
    size_t at, n;
    int64_t line, max_sequences;
    cli_list *list;
    size_t *capacity;
    int depth;
} tree_reader;

/* A place in a tree from which the next sequences continue. */
typedef struct tree_place {
    int64_t tokens; /* tokens from the root */
    int64_t leader; /* the first sequence through this place; -1: not read yet */
    int is_mute;    /* 1: its sequences are only checked, not added */
} tree_place;

enum { TREE_FINE = 1, TREE_BAD = 0, TREE_MANY = -1, TREE_NO_MEMORY = -2, TREE_DEEP = -3 };

static int tree_next(tree_reader *r) {
    r->at = skip_blanks(r->text, r->at, r->n);
    return r->at < r->n ? r->text[r->at] : 0;
}

static int tree_number(tree_reader *r, int64_t *out) {
    size_t first;

    (void)tree_next(r);
    first = r->at;
    while (r->at < r->n && strchr(" \t+()", r->text[r->at]) == NULL) r->at++;
    return cli_parse_number(r->text + first, r->at - first, out);
}

/* Reads the count after a branch; 1 if there is none. */
static int tree_count(tree_reader *r, int64_t *count) {
    int c = tree_next(r);

    *count = 1;
    return c == 0 || c == '+' || c == ')' || tree_number(r, count);
}

/* Adds `count` sequences that continue from a place. */
static int tree_add(tree_reader *r, tree_place *on, int64_t tokens, int64_t count) {
    cli_entry entry = {on->tokens + tokens, count, r->line, on->tokens, {0, 0}};

    if (entry.length > CF_MAX_LENGTH) return TREE_BAD;
    if (on->is_mute || count == 0) return TREE_FINE;
    if (count > r->max_sequences - r->list->n_sequences) return TREE_MANY;
    if (on->leader < 0) {
        on->leader = r->list->n_sequences;
    } else {
        entry.share.with = on->leader;
        entry.share.tokens = on->tokens;
    }
    return append_entry(r->list, r->capacity, &entry) == CLI_OK ? TREE_FINE : TREE_NO_MEMORY;
}

static int tree_branches(tree_reader *r, tree_place *on);

/* Reads a tree in parentheses, and repeats it by the count after it. */
static int tree_group(tree_reader *r, tree_place *on) {
    size_t first = r->at + 1, end;
    tree_place inner = *on;
    int64_t count = 1, i;
    int got;

    if (++r->depth > MAX_DEPTH) return TREE_DEEP;
    inner.is_mute = 1; /* to find the count */
    r->at = first;
    got = tree_branches(r, &inner);
    if (got != TREE_FINE) return got;
    if (tree_next(r) != ')') return TREE_BAD;
    r->at++;
    if (!tree_count(r, &count)) return TREE_BAD;
    for (end = r->at, i = 0; i < count && got == TREE_FINE && !on->is_mute; i++) {
        int64_t n = r->list->n_sequences;
        r->at = first;
        got = tree_branches(r, on);
        if (r->list->n_sequences == n) break; /* later turns would add none either */
    }
    r->at = end;
    r->depth--;
    return got;
}

/* Reads a length, and everything that continues it. Its first sequence shares with earlier ones the tokens up to
   `on`. */
static int tree_branches(tree_reader *r, tree_place *on) {
    tree_place inner = *on;
    int64_t tokens, count, n = r->list->n_sequences;
    size_t entry = r->list->n_entries;
    int got = TREE_FINE;

    if (!tree_number(r, &tokens) || tokens > CF_MAX_LENGTH - on->tokens || tree_next(r) != '+') return TREE_BAD;
    inner.tokens += tokens;
    inner.leader = -1;
    while (tree_next(r) == '+' && got == TREE_FINE) {
        r->at++;
        if (tree_next(r) == '(') got = tree_group(r, &inner);
        else if (!tree_number(r, &tokens) || tokens > CF_MAX_LENGTH || !tree_count(r, &count)) got = TREE_BAD;
        else got = tree_add(r, &inner, tokens, count);
    }
    if (r->list->n_sequences == n) return got;
    if (on->leader >= 0) {
        r->list->entries[entry].share.with = on->leader;
        r->list->entries[entry].share.tokens = on->tokens;
    } else {
        on->leader = inner.leader;
    }
    return got;
}

/* A line with a tree. */
static int read_tree(reader *in, const char *text, size_t n, cli_list *list, size_t *capacity) {
    tree_reader r = {text, 0, n, in->line, in->most_counted, list, capacity, 0};
    tree_place root = {0, -1, 0};
    int got;

    /* because their sequences are made one by one */
    if (r.max_sequences > CLI_MAX_SEQUENCES) r.max_sequences = CLI_MAX_SEQUENCES;
    got = tree_next(&r) == '(' ? tree_group(&r, &root) : tree_branches(&r, &root);
    if (got == TREE_NO_MEMORY) return CLI_FAILED;
    if (got == TREE_FINE && tree_next(&r) != 0) got = TREE_BAD;
    if (got == TREE_BAD) return bad_line(in, text, n);
    if (got == TREE_MANY) return too_many(in, text, n, r.max_sequences);
    if (got == TREE_DEEP)
        return cli_at_line(in->path, in->line, "got '%s', whose parentheses lie more than %d deep", quote(text, n),
                           MAX_DEPTH);
    list->has_trees = 1;
    return CLI_OK;
}

static int read_entries(reader *in, cli_list *list) {
    size_t capacity = 0;
    int code = CLI_OK, got;

    while (code == CLI_OK && (got = read_line(in)) != 0) {
        cli_entry entry = {0};
        int64_t most;
        const char *text = in->text;
        size_t n = in->length;
        if (in->line == 1 && n >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) { /* a byte order mark */
            text += 3;
            n -= 3;
        }
        if (got > 0 && skip_blanks(text, 0, n) == n) continue;
        if (got > 0 && memchr(text, '+', n) != NULL) {
            code = read_tree(in, text, n, list, &capacity);
            continue;
        }
        if (got < 0 || !parse_line(text, n, &entry)) return bad_line(in, text, n);
        most = entry.count > 1 ? in->most_counted : in->max_sequences;
        if (entry.count > most - list->n_sequences) return too_many(in, text, n, most);
        entry.line = in->line;
        code = append_entry(list, &capacity, &entry);
    }
    if (code == CLI_OK && in->bytes > CLI_MAX_LIST_BYTES)
        code = cli_wrong("%s has more than %s bytes", cli_input_name(in->path), cli_commas(CLI_MAX_LIST_BYTES));
    return code;
}

/* ---- Megatron's index files ----

   Megatron-LM writes an index (.idx) next to the tokens of a data set (.bin). All of its numbers are little-endian:

       9 bytes    INDEX_MAGIC
       8          the version, 1
       1          a code for the type of a token
       8, 8       S, the number of sequences, and D, the numbers in the table of documents
       S x 4      the tokens of each sequence, signed
       S x 8      the start of each sequence in the .bin
       D x 8      the first sequence of each document, and at the end S
       S          with several modalities: the modality of each sequence; else nothing

   A document is trained as one piece; it almost always has one sequence. A document without sequences has the same
   start as the next document. */

#define INDEX_MAGIC "MMIDIDX\0" /* and the zero byte after it */

static int bad_index(const reader *in, const char *what, int64_t at, int64_t got, const char *wanted) {
    const char *place = at < 0 ? "" : cli_commas(at);

    return cli_wrong("%s, an index of Megatron's: %s%s is %s, wanted %s", cli_input_name(in->path), what, place,
                     cli_commas(got), wanted);
}

static const char *at_most(int64_t most) {
    char *text = cli_scratch();

    snprintf(text, CLI_SCRATCH_BYTES, "at most %s", cli_commas(most));
    return text;
}

static int short_index(const reader *in) {
    if (in->bytes > CLI_MAX_LIST_BYTES)
        return cli_wrong("%s has more than %s bytes", cli_input_name(in->path), cli_commas(CLI_MAX_LIST_BYTES));
    return cli_wrong("%s, an index of Megatron's, ends too early: after %s bytes", cli_input_name(in->path),
                     cli_commas(in->bytes));
}

/* Reads a number of n_bytes. Returns 1, or 0 if the file ends before it. */
static int take_number(reader *in, int n_bytes, uint64_t *out) {
    int i, c = 0;

    *out = 0;
    for (i = 0; i < n_bytes && (c = next_byte(in)) != EOF; i++) *out |= (uint64_t)c << 8 * i;
    return i == n_bytes;
}

/* Returns a number capped at INT64_MAX; larger ones are invalid in any case. */
static int64_t capped(uint64_t number) { return number > INT64_MAX ? INT64_MAX : (int64_t)number; }

static int read_index_head(reader *in, uint64_t *n_sequences, uint64_t *n_entries) {
    uint64_t version, type;
    size_t i;
    int c;

    for (i = 0; i < sizeof INDEX_MAGIC && (c = next_byte(in)) != EOF && c != '\n'; i++) in->text[i] = (char)c;
    if (i < sizeof INDEX_MAGIC || memcmp(in->text, INDEX_MAGIC, i) != 0) {
        in->line = 1;
        return bad_line(in, in->text, i);
    }
    if (!take_number(in, 8, &version) || !take_number(in, 1, &type) || !take_number(in, 8, n_sequences) ||
        !take_number(in, 8, n_entries))
        return short_index(in);
    if (version != 1) return bad_index(in, "the version", -1, capped(version), "1");
    if (type < 1 || type > 8) return bad_index(in, "the code of a token's type", -1, (int64_t)type, "1 .. 8");
    if (*n_sequences > (uint64_t)in->max_sequences)
        return bad_index(in, "the number of sequences", -1, capped(*n_sequences),
                         at_most(in->max_sequences));
    if (*n_entries < 1 || *n_entries - 1 > (uint64_t)in->max_sequences)
        return bad_index(in, "the length of its table of documents", -1, capped(*n_entries),
                         *n_entries < 1 ? "where each document begins, and where the last one ends" :
                         at_most(in->max_sequences + 1));
    return CLI_OK;
}

/* Reads one entry per sequence, whose line is its number from 1. Memory grows with the entries read, not with the count
   that the file claims. */
static int read_index_sequences(reader *in, uint64_t n, cli_list *list) {
    cli_entry entry = {0, 1, 0, 0, {0, 0}};
    size_t capacity = 0;
    uint64_t number, i;
    int code = CLI_OK;

    for (i = 0; i < n && code == CLI_OK; i++) {
        if (!take_number(in, 4, &number)) return short_index(in);
        entry.length = (int64_t)number;
        entry.line = (int64_t)i + 1;
        if (number > INT32_MAX)
            return bad_index(in, "the length of sequence ", (int64_t)i, (int64_t)number - ((int64_t)1 << 32),
                             "0 .. 2,147,483,647");
        code = append_entry(list, &capacity, &entry);
    }
    for (i = 0; i < n && code == CLI_OK; i++) {
        if (!take_number(in, 8, &number)) return short_index(in);
        if (number > INT64_MAX)
            return bad_index(in, "the place in the .bin of sequence ", (int64_t)i, -capped(~number) - 1, "at least 0");
    }
    return code;
}

/* Adds up the sequences of each document; one without sequences has no tokens. */
static int read_index_documents(reader *in, uint64_t n_entries, const cli_list *sequences, cli_list *list) {
    const uint64_t n = (uint64_t)sequences->n_sequences;
    uint64_t at = 0, next, i;
    size_t capacity = 0;
    int code = CLI_OK;

    for (i = 0; i < n_entries && code == CLI_OK; i++) {
        cli_entry document = {0, 1, (int64_t)i, 0, {0, 0}};
        if (!take_number(in, 8, &next)) return short_index(in);
        if (next < at || next > n || (i == 0 && next != 0))
            return bad_index(in, "the first sequence of document ", (int64_t)i, capped(next), i == 0 ? "0" :
                             "one of the sequences, in ascending order");
        for (; at < next; at++) document.length += sequences->entries[at].length;
        if (document.length > CF_MAX_LENGTH)
            return bad_index(in, "the length of document ", (int64_t)i - 1, document.length,
                             at_most(CF_MAX_LENGTH));
        if (i > 0) code = append_entry(list, &capacity, &document);
    }
    if (code == CLI_OK && at != n)
        return bad_index(in, "the end of the last document", -1, capped(at), cli_commas((int64_t)n));
    return code;
}

static int read_index(reader *in, cli_list *list) {
    cli_list sequences = {0};
    uint64_t n_sequences = 0, n_entries = 0, modes = 0;
    int code = read_index_head(in, &n_sequences, &n_entries);

    if (code == CLI_OK) code = read_index_sequences(in, n_sequences, &sequences);
    if (code == CLI_OK) code = read_index_documents(in, n_entries, &sequences, list);
    free(sequences.entries);
    if (code != CLI_OK) return code;
    while (modes <= n_sequences && next_byte(in) != EOF) modes++;
    if (modes != 0 && modes != n_sequences)
        return bad_index(in, "the number of bytes behind its documents", -1, (int64_t)modes,
                         "0, or 1 for each sequence");
    return CLI_OK;
}

/* Returns whether a file is an index; no line of a list starts like one. */
static int is_index(FILE *stream) {
    int c = getc_unlocked(stream);
    return c != EOF && ungetc(c, stream) == INDEX_MAGIC[0];
}

static int read_list(const char *path, int64_t max_sequences, int64_t most_counted, cli_list *list) {
    cli_list fresh = {0};
    reader in = {0};
    int code = cli_input_open(path, &in.stream);

    if (code != CLI_OK) return code;
    in.path = fresh.path = path;
    in.max_sequences = max_sequences;
    in.most_counted = most_counted;
    in.text = (char *)malloc(MAX_LINE);
    if (!in.text) code = cli_failed("out of memory");
    else code = is_index(in.stream) ? read_index(&in, &fresh) : read_entries(&in, &fresh);
    code = cli_input_close(in.stream, path, code);
    free(in.text);
    if (code == CLI_OK) *list = fresh;
    else free(fresh.entries);
    return code;
}

int cli_list_read(const char *path, int64_t max_sequences, cli_list *list) {
    return read_list(path, max_sequences, max_sequences, list);
}

int cli_list_read_counted(const char *path, int64_t asked, cli_list *list) {
    return read_list(path, CLI_MAX_SEQUENCES, asked > 0 ? asked : CLI_COUNTED_SEQUENCES, list);
}

void cli_list_free(cli_list *list) {
    free(list->entries);
    list->entries = NULL;
}

int64_t *cli_list_lengths(const cli_list *list) {
    int64_t *lengths, *at;
    size_t i;

    if ((uint64_t)list->n_sequences >= SIZE_MAX / sizeof *lengths) return NULL;
    lengths = at = (int64_t *)malloc(((size_t)list->n_sequences + 1) * sizeof *lengths);
    if (!lengths) return NULL;
    for (i = 0; i < list->n_entries; i++) {
        int64_t left = list->entries[i].count;
        while (left-- > 0) *at++ = list->entries[i].length;
    }
    return lengths;
}

static cf_shared_prefix *list_shares(const cli_list *list) {
    cf_shared_prefix *shares, *at;
    size_t i;

    if ((uint64_t)list->n_sequences >= SIZE_MAX / sizeof *shares) return NULL;
    shares = at = (cf_shared_prefix *)malloc(((size_t)list->n_sequences + 1) * sizeof *shares);
    if (!shares) return NULL;
    for (i = 0; i < list->n_entries; i++) {
        const cli_entry *entry = &list->entries[i];
        cf_shared_prefix like_first = {at - shares, entry->common};
        int64_t left = entry->count;
        if (left-- > 0) *at++ = entry->share;
        while (left-- > 0) *at++ = like_first;
    }
    return shares;
}

int cli_list_expand(const cli_list *list, int64_t **lengths, cf_shared_prefix **shares) {
    *lengths = cli_list_lengths(list);
    *shares = list->has_trees ? list_shares(list) : NULL;
    if (*lengths && (*shares || !list->has_trees)) return CLI_OK;
    return cli_failed("out of memory for %s sequences", cli_commas(list->n_sequences));
}

int cli_list_refuse_trees(const cli_list *list, const char *command) {
    if (!list->has_trees) return CLI_OK;
    return cli_wrong("%s: %s knows no trees, such as 32K + 2K 16", cli_input_name(list->path), command);
}

int64_t cli_list_line(const cli_list *list, int64_t sequence) {
    size_t i;

    if (sequence < 0) return 0;
    for (i = 0; i < list->n_entries; i++) {
        if (sequence < list->entries[i].count) return list->entries[i].line;
        sequence -= list->entries[i].count;
    }
    return 0;
}

/* Members of structs with the options that set them. value: 0 if the option is a flag or a word, for which the user
   wrote no number. */
static const struct {
    const char *member, *option;
    int value;
} known_options[] = {
    {"parallel.tp", "--tp", 1}, {"parallel.pp", "--stages", 1}, {"parallel.dp", "--ranks", 1},
    {"parallel.zero", "--zero", 1}, {"parallel.n_virtual", "--virtual", 1}, {"parallel.ep", "--ep", 1},
    {"parallel.layers", "--stage-layers", 1}, {"parallel.placement", "--placement", 0},
    {"parallel.recompute_layers", "--recompute-layers", 1}, {"lora_experts", "--lora-experts", 0},
    {"split_backward", "--split-backward", 0}, {"method", "--method", 0}, {"max_cp", "--max-cp", 1},
    {"pack.max_cp", "--max-cp", 1}, {"lockstep", "--lockstep", 0}, {"forwards_first", "--forwards-first", 0},
    {"shape.forward_only", "--forward-only", 0}, {"shape.n_virtual", "--virtual", 1},
    {"shape.placement", "--placement", 0}, {"shape.replay", "--replay", 0}, {"shape.outputs", "--outputs", 0},
    {"outputs", "--outputs", 0}};

/* Returns the option for a name of `n` characters in a reason: a member's name, with or without its record, that is not
   an English word. NULL: none. */
static const char *option_of(const char *name, size_t n) {
    size_t i;

    for (i = 0; memchr(name, '_', n) && i < sizeof known_options / sizeof known_options[0]; i++) {
        const char *member = known_options[i].member, *dot = strchr(member, '.');
        if (dot) member = dot + 1;
        if (strlen(member) == n && strncmp(name, member, n) == 0) return known_options[i].option;
    }
    return NULL;
}

/* Returns the library's sentence in terms of the command line: options instead of members, and without "(wanted ...)"
   where the user wrote no number: for a flag, or an option whose value is a word. */
static const char *say_option(const cf_error *error) {
    static char text[sizeof error->text + 64];
    size_t i, at, n = strlen(error->field), end = strlen(error->text);
    const char *from = error->text + n;

    for (i = 0; i < sizeof known_options / sizeof known_options[0]; i++)
        if (strcmp(error->field, known_options[i].member) == 0) break;
    if (i == sizeof known_options / sizeof known_options[0] || strncmp(error->text, error->field, n) != 0)
        return error->text;
    if (!known_options[i].value && strstr(from, " (wanted ")) end = (size_t)(strstr(from, " (wanted ") - error->text);
    at = (size_t)snprintf(text, sizeof text, "%s", known_options[i].option);
    while (n < end && at + 1 < sizeof text) {
        size_t word = strspn(error->text + n, "abcdefghijklmnopqrstuvwxyz_");
        const char *option = word > 0 ? option_of(error->text + n, word) : NULL;
        int kept = (int)(word > 0 ? word : 1);
        at += (size_t)snprintf(text + at, sizeof text - at, "%.*s", option ? (int)strlen(option) : kept,
                               option ? option : error->text + n);
        n += (size_t)kept;
    }
    return text;
}

int cli_error(const cf_error *error, const cli_list *list) {
    int about_sequence = strcmp(error->field, "lengths") == 0 || strcmp(error->field, "pairs") == 0;
    int64_t line = list && about_sequence ? cli_list_line(list, error->item) : 0;

    if (line > 0) return cli_at_line(list->path, line, "%s", error->text);
    switch (error->code) {
    case CF_ERROR_ARGUMENT: case CF_ERROR_LIMIT: case CF_ERROR_OVERFLOW: case CF_ERROR_INFEASIBLE:
        return cli_wrong("%s", say_option(error));
    default: return cli_failed("%s", error->text);
    }
}

/* ----------------------------------------------------------------------------------------------------------------
   Whole files
   ---------------------------------------------------------------------------------------------------------------- */

/* Makes room for the text so far, the next piece and one more byte. */
static int grow_text(char **text, size_t *capacity, size_t max_bytes) {
    size_t more = *capacity ? *capacity * 2 : 65536;
    char *grown;

    if (more > max_bytes + 2) more = max_bytes + 2;
    grown = (char *)realloc(*text, more);
    if (!grown) return cli_failed("out of memory");
    *text = grown;
    *capacity = more;
    return CLI_OK;
}

static int read_text(FILE *stream, const char *path, size_t max_bytes, char **text, size_t *bytes) {
    size_t capacity = 0, got = 1;
    int code = CLI_OK;

    while (got > 0 && code == CLI_OK && *bytes <= max_bytes) {
        if (*bytes + 1 >= capacity) code = grow_text(text, &capacity, max_bytes);
        if (code != CLI_OK) return code;
        got = fread(*text + *bytes, 1, capacity - 1 - *bytes, stream);
        *bytes += got;
    }
    if (*bytes > max_bytes)
        return cli_wrong("%s has more than %s bytes", cli_input_name(path), cli_commas((int64_t)max_bytes));
    (*text)[*bytes] = '\0';
    return CLI_OK;
}

int cli_file_read(const char *path, size_t max_bytes, char **text, size_t *bytes) {
    char *fresh = NULL;
    size_t n = 0;
    FILE *stream;
    int code = cli_input_open(path, &stream);

    if (code != CLI_OK) return code;
    code = cli_input_close(stream, path, read_text(stream, path, max_bytes, &fresh, &n));
    if (code != CLI_OK) {
        free(fresh);
        return code;
    }
    *text = fresh;
    *bytes = n;
    return CLI_OK;
}

int cli_lines_read(const char *path, cli_take_line take, void *user) {
    enum { MOST_LINES = 1000000, LINE_BYTES = 256 };
    FILE *stream;
    char line[LINE_BYTES];
    int64_t number = 0;
    int code = cli_input_open(path, &stream);

    if (code != CLI_OK) return code;
    while (code == CLI_OK && fgets(line, sizeof line, stream)) {
        size_t n = strlen(line);
        if (++number > MOST_LINES)
            code = cli_at_line(path, number, "there are more than %s lines", cli_commas(MOST_LINES));
        else if (n == LINE_BYTES - 1 && line[n - 1] != '\n') code = cli_at_line(path, number, "the line is too long");
        if (code != CLI_OK) break;
        line[strcspn(line, "#\r\n")] = '\0';
        code = take(user, path, number, line);
    }
    return cli_input_close(stream, path, code);
}

/* ----------------------------------------------------------------------------------------------------------------
   Output files
   ---------------------------------------------------------------------------------------------------------------- */

static int cannot_write(const char *path, int error) {
    return cli_failed("cannot write %s: %s", strcmp(path, "-") == 0 ? "standard output" : path,
                      error ? strerror(error) : "the stream reports an error");
}

/* Temporary files that a signal removes. The list is only changed while the signals are blocked. */
enum { MAX_TEMPORARIES = 16 };
static const char *temporaries[MAX_TEMPORARIES];

static const int ending_signals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGXCPU, SIGPIPE};
#define N_ENDING (sizeof ending_signals / sizeof ending_signals[0])

static void remove_temporaries(int number) {
    int i;
    progress_clear();
    for (i = 0; i < MAX_TEMPORARIES; i++)
        if (temporaries[i]) unlink(temporaries[i]);
    raise(number); /* SA_RESETHAND has restored the default: the program ends as without a handler */
}

static void catch_signal(int number) {
    struct sigaction handler, before;

    memset(&handler, 0, sizeof handler);
    handler.sa_handler = remove_temporaries;
    handler.sa_flags = (int)SA_RESETHAND;
    sigaddset(&handler.sa_mask, SIGALRM); /* otherwise progress would be printed after the line was erased */
    if (sigaction(number, NULL, &before) == 0 && before.sa_handler != SIG_IGN) sigaction(number, &handler, NULL);
}

void cli_signals_catch(void) {
    size_t i;
    for (i = 0; i < N_ENDING; i++) catch_signal(ending_signals[i]);
    signal(SIGXFSZ, SIG_IGN); /* a write beyond the file size limit then fails and is reported, and the file is
                                 removed */
}

void cli_signals_restore(void) {
    signal(SIGINT, SIG_DFL);
    catch_signal(SIGINT);
}

static void block_signals(sigset_t *before) {
    sigset_t ending;
    size_t i;

    sigemptyset(&ending);
    for (i = 0; i < N_ENDING; i++) sigaddset(&ending, ending_signals[i]);
    sigprocmask(SIG_BLOCK, &ending, before);
}

/* Exchanges an entry of the list. */
static void note_temporary(const char *from, const char *to) {
    int i;
    for (i = 0; i < MAX_TEMPORARIES; i++) {
        if (temporaries[i] != from) continue;
        temporaries[i] = to;
        return;
    }
}

/* Opens a temporary file that no run is writing to: a new one, or one that a killed run has left behind.

   A run holds the lock until the file has its final name, so a locked file is in use. After taking the lock, the name
   must still refer to the file; otherwise another run has renamed the file meanwhile. A file with a second link or
   another owner belongs to no run and stays unchanged. Returns -1 with errno; EEXIST if the name cannot be used. */
static int open_temporary(const char *name) {
    struct stat named, opened;
    int file = open(name, O_WRONLY | O_CREAT | O_EXCL, 0666), fresh = file >= 0;

    if (file < 0 && errno != EEXIST) return -1;
    if (!fresh) file = open(name, O_WRONLY | O_NOFOLLOW | O_NONBLOCK);
    /* Without locks in the file system, only a new name is certainly free. */
    if (file >= 0 && (flock(file, LOCK_EX | LOCK_NB) == 0 || (fresh && errno != EWOULDBLOCK)) &&
        lstat(name, &named) == 0 && fstat(file, &opened) == 0 && named.st_ino == opened.st_ino &&
        named.st_dev == opened.st_dev && S_ISREG(opened.st_mode) &&
        (fresh || (opened.st_nlink == 1 && opened.st_uid == geteuid())) && ftruncate(file, 0) == 0)
        return file;
    if (file >= 0) close(file);
    errno = EEXIST;
    return -1;
}

static mode_t new_file_mode(void) {
    mode_t mask = umask(0);
    umask(mask);
    return 0666 & ~mask;
}

/* Opens target.chunkflow-tmp0, a name that users are unlikely to use, or the first free name after it. It gets the
   permissions of the file that it will replace. */
static int create_temporary(cli_output *output, const struct stat *existing) {
    mode_t mode = existing ? existing->st_mode & 0777 : new_file_mode();
    size_t bytes = strlen(output->target) + sizeof ".chunkflow-tmp99";
    int attempt, file = -1, code;

    output->temporary = (char *)malloc(bytes);
    if (!output->temporary) return cli_failed("out of memory");
    for (attempt = 0; attempt < 100 && file < 0; attempt++) {
        snprintf(output->temporary, bytes, "%s.chunkflow-tmp%d", output->target, attempt);
        file = open_temporary(output->temporary);
        if (file < 0 && errno != EEXIST) break;
    }
    if (file >= 0 && fchmod(file, mode) == 0 && (output->lock = dup(file)) >= 0) {
        output->stream = fdopen(file, "wb");
        if (output->stream) {
            note_temporary(NULL, output->temporary);
            return CLI_OK;
        }
        close(output->lock);
    }
    code = cannot_write(output->path, errno);
    if (file >= 0) {
        unlink(output->temporary);
        close(file);
    }
    free(output->temporary);
    output->temporary = NULL;
    return code;
}

/* Renames the file into place, or removes it; the temporary name is then free. */
static int settle_temporary(cli_output *output, int code) {
    sigset_t before;

    block_signals(&before);
    if (code == CLI_OK && rename(output->temporary, output->target) != 0) code = cannot_write(output->path, errno);
    if (code != CLI_OK) unlink(output->temporary);
    note_temporary(output->temporary, NULL);
    close(output->lock);
    sigprocmask(SIG_SETMASK, &before, NULL);
    return code;
}

static void forget_output(cli_output *output) {
    free(output->temporary);
    free(output->target);
    memset(output, 0, sizeof *output);
}

int cli_output_open(cli_output *output, const char *path) {
    struct stat existing;
    sigset_t before;
    int found, code;

    if (!path) return CLI_OK;
    output->path = path;
    if (strcmp(path, "-") == 0) {
        output->stream = stdout;
        return CLI_OK;
    }
    found = stat(path, &existing) == 0;
    if (found && !S_ISREG(existing.st_mode)) { /* a device or a pipe: renaming over it would destroy it */
        output->stream = fopen(path, "wb");
        return output->stream ? CLI_OK : cannot_write(path, errno);
    }
    if (!found && lstat(path, &existing) == 0) return cannot_write(path, ENOENT); /* a link that leads nowhere */
    output->target = found ? realpath(path, NULL) : strdup(path);
    if (!output->target) return cannot_write(path, errno);
    block_signals(&before);
    code = create_temporary(output, found ? &existing : NULL);
    sigprocmask(SIG_SETMASK, &before, NULL);
    if (code != CLI_OK) forget_output(output);
    return code;
}

static int stdout_error; /* first errno of cli_stdout_failed */

int cli_stdout_failed(void) {
    if (!ferror(stdout)) return 0;
    if (stdout_error == 0) stdout_error = errno;
    return 1;
}

int cli_write(const char *text, size_t bytes, void *user) {
    cli_output *output = (cli_output *)user;

    errno = 0;
    if (fwrite(text, 1, bytes, output->stream) == bytes) return 0;
    if (output->error == 0) output->error = errno;
    return -1;
}

/* Reports errors of the library; a write error is reported when the file is closed. */
int cli_written(cf_result result, const cf_error *error) {
    return result == CF_OK || result == CF_ERROR_WRITE ? CLI_OK : cli_error(error, NULL);
}

/* Flushes a stream and closes it, except standard output. to_disk: 1 for a file that must survive a crash of the
   machine. error: an earlier errno, or 0. */
static int end_stream(FILE *stream, const char *path, int to_disk, int error) {
    int bad;

    errno = 0;
    bad = fflush(stream) != 0 || (to_disk && fsync(fileno(stream)) != 0);
    if (error == 0) error = errno;
    if (ferror(stream)) bad = 1;
    if (stream != stdout && fclose(stream) != 0) {
        bad = 1;
        if (error == 0) error = errno;
    }
    return bad ? cannot_write(path, error) : CLI_OK;
}

/* Flushes standard output. An error is reported once. */
static int end_stdout(const cli_output *outputs, int n) {
    int i, ended;

    for (i = 0; i < n; i++)
        if (outputs[i].stream == stdout && stdout_error == 0) stdout_error = outputs[i].error;
    ended = end_stream(stdout, "-", 0, stdout_error);
    clearerr(stdout);
    stdout_error = 0;
    return ended;
}

int cli_output_try(const char *path) {
    struct stat existing;
    cli_output output = {0};
    int code;

    /* opening a pipe or a device has effects */
    if (path && stat(path, &existing) == 0 && !S_ISREG(existing.st_mode)) return CLI_OK;
    code = cli_output_open(&output, path);
    if (code == CLI_OK && output.temporary) (void)cli_outputs_finish(&output, 1, CLI_FAILED);
    return code;
}

int cli_outputs_finish(cli_output *outputs, int n, int code) {
    int i, ended = end_stdout(outputs, n);

    if (code == CLI_OK) code = ended;
    for (i = 0; i < n; i++) {
        if (!outputs[i].stream || outputs[i].stream == stdout) continue;
        ended = end_stream(outputs[i].stream, outputs[i].path, outputs[i].temporary != NULL && code == CLI_OK,
                           outputs[i].error);
        if (code == CLI_OK) code = ended;
    }
    for (i = 0; i < n; i++) {
        if (outputs[i].temporary) code = settle_temporary(&outputs[i], code);
        forget_output(&outputs[i]);
    }
    return code;
}
