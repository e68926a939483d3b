/* cmd_lengths.c - chunkflow lengths: turns the sizes of documents into a list of lengths. */

#define _POSIX_C_SOURCE 200809L
#include "table.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef enum unit { BYTES = 1, WORDS, TOKENS } unit;

typedef struct lengths_options {
    int64_t unit;
    int lines;
    int all;
    int names;
    int tsv;
} lengths_options;

static const lengths_options defaults = {.unit = BYTES};

static const cli_option options[] = {
    {.name = "--unit", .value = "bytes|words|tokens", .kind = CLI_CHOICE, .offset = offsetof(lengths_options, unit),
     .help = "what to count; words are runs without blanks; tokens are told by\n"
     "files that are lists already, such as Megatron's .idx; default\n"
     "bytes"},
    {.name = "--lines", .kind = CLI_FLAG, .offset = offsetof(lengths_options, lines),
     .help = "each line is a document (as in JSON Lines), not each file;\n"
     "its line end does not count"},
    {.name = "--all", .kind = CLI_FLAG, .offset = offsetof(lengths_options, all),
     .help = "inside directories, also names that start with a dot"},
    {.name = "--names", .kind = CLI_FLAG, .offset = offsetof(lengths_options, names),
     .help = "add the file's name as a comment"},
    TABLE_OPTION(lengths_options, tsv, "lengths and names"),
    {.name = NULL}};

/* ----------------------------------------------------------------------------------------------------------------
   The documents found so far. They are printed only when all could be read.
   ---------------------------------------------------------------------------------------------------------------- */

typedef struct document {
    int64_t length;
    size_t file; /* index into names */
} document;

typedef struct walk {
    const lengths_options *asked;
    document *documents;
    size_t n_documents, capacity;
    char **names;
    size_t n_names, names_capacity;
} walk;

static int add_document(walk *w, int64_t length) {
    if (w->n_documents == w->capacity) {
        document *documents = (document *)cli_grow(w->documents, &w->capacity, sizeof *documents);
        if (!documents) return CLI_FAILED;
        w->documents = documents;
    }
    w->documents[w->n_documents].length = length;
    w->documents[w->n_documents].file = w->n_names - 1;
    w->n_documents++;
    return CLI_OK;
}

/* Appends a name to an array, which takes ownership of `name`, even on failure. */
static int add_name(char ***names, size_t *n, size_t *capacity, char *name) {
    if (!name) return cli_failed("out of memory");
    if (*n == *capacity) {
        char **grown = (char **)cli_grow(*names, capacity, sizeof *grown);
        if (!grown) {
            free(name);
            return CLI_FAILED;
        }
        *names = grown;
    }
    (*names)[(*n)++] = name;
    return CLI_OK;
}

static void free_names(char **names, size_t n) {
    while (n > 0) free(names[--n]);
    free(names);
}

/* ----------------------------------------------------------------------------------------------------------------
   Counting
   ---------------------------------------------------------------------------------------------------------------- */

static int is_blank(int c) {
    return c == ' ' || (c >= '\t' && c <= '\r');
}

/* Counts a stream's units. Adds a document at its end or, with --lines, at the end of each line. */
static int count_stream(walk *w, FILE *stream) {
    int words = w->asked->unit == WORDS, lines = w->asked->lines;
    int64_t length = 0;
    int c, before = ' ', open_line = 0, code = CLI_OK;

    while (code == CLI_OK && (c = getc_unlocked(stream)) != EOF) {
        open_line = !(lines && c == '\n');
        if (open_line) {
            length += words ? !is_blank(c) && is_blank(before) : 1;
        } else {
            code = add_document(w, length);
            length = 0;
        }
        before = c;
    }
    if (code == CLI_OK && (open_line || !lines)) code = add_document(w, length);
    return code;
}

/* With --unit tokens: adds a list of lengths unchanged. */
static int count_list(walk *w, const char *path) {
    cli_list list;
    int64_t i;
    size_t entry;
    int code = cli_list_read(path, CLI_MAX_SEQUENCES, &list);

    if (code != CLI_OK) return code;
    for (entry = 0; entry < list.n_entries; entry++)
        for (i = 0; i < list.entries[entry].count && code == CLI_OK; i++)
            code = add_document(w, list.entries[entry].length);
    cli_list_free(&list);
    return code;
}

static int count_file(walk *w, const char *path, const struct stat *status) {
    FILE *stream;
    int code;

    if (w->asked->unit == TOKENS) return count_list(w, path);

    /* The size of a regular file needs no reading. */
    if (status && S_ISREG(status->st_mode) && w->asked->unit == BYTES && !w->asked->lines)
        return add_document(w, (int64_t)status->st_size);
    code = cli_input_open(path, &stream);
    return code == CLI_OK ? cli_input_close(stream, path, count_stream(w, stream)) : code;
}

/* ----------------------------------------------------------------------------------------------------------------
   Walking
   ---------------------------------------------------------------------------------------------------------------- */

static int visit(walk *w, const char *path, int inside);

static int compare_names(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static char *join(const char *directory, const char *name) {
    size_t n = strlen(directory);
    size_t bytes = n + strlen(name) + 2;
    char *path = (char *)malloc(bytes);

    if (path) snprintf(path, bytes, "%s%s%s", directory, n > 0 && directory[n - 1] == '/' ? "" : "/", name);
    return path;
}

/* Lists the paths of a directory's entries, sorted by their bytes, because a directory's own order differs between
   machines. */
static int list_directory(const walk *w, const char *path, char ***entries, size_t *n) {
    size_t capacity = 0;
    int code = CLI_OK;
    struct dirent *entry;
    DIR *directory = opendir(path);

    if (!directory) return cli_cannot_read(path);
    while (code == CLI_OK && (errno = 0, entry = readdir(directory)) != NULL) {
        const char *name = entry->d_name;
        if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0 || (name[0] == '.' && !w->asked->all)) continue;
        code = add_name(entries, n, &capacity, join(path, name));
    }
    if (code == CLI_OK && errno != 0) code = cli_cannot_read(path);
    closedir(directory);
    if (*n > 1) qsort(*entries, *n, sizeof **entries, compare_names);
    return code;
}

static int visit_directory(walk *w, const char *path) {
    char **entries = NULL;
    size_t n = 0, i;
    int code = list_directory(w, path, &entries, &n);

    for (i = 0; i < n && code == CLI_OK; i++) code = visit(w, entries[i], 1);
    free_names(entries, n);
    return code;
}

/* Visits a path. inside: 1 if it was found in a directory. Then only files and directories count, because symbolic
   links could form a cycle, and a pipe could block. */
static int visit(walk *w, const char *path, int inside) {
    struct stat status;
    int standard_input = !inside && strcmp(path, "-") == 0;
    int code;

    if (!standard_input) {
        if ((inside ? lstat(path, &status) : stat(path, &status)) != 0) return cli_cannot_read(path);
        if (S_ISDIR(status.st_mode)) return visit_directory(w, path);
        if (inside && !S_ISREG(status.st_mode)) return CLI_OK;
    }
    code = add_name(&w->names, &w->n_names, &w->names_capacity, strdup(path));
    return code == CLI_OK ? count_file(w, path, standard_input ? NULL : &status) : code;
}

/* A name as a comment. */
static void print_name(const char *name) {
    fputs(" # ", stdout);
    cli_put(name, stdout);
}

/* With --tsv. */
static int print_table(const walk *w) {
    static const char *const lengths[] = {[BYTES] = "length_bytes", [WORDS] = "length_words",
                                          [TOKENS] = "length_tokens"};
    const table_column columns[] = {{.name = lengths[w->asked->unit]}, {.name = "name"}};
    table t;
    size_t i;

    table_begin(&t, columns, 2, 1, 0);
    for (i = 0; i < w->n_documents && !cli_stdout_failed(); i++) {
        table_integer(&t, w->documents[i].length);
        table_text(&t, w->names[w->documents[i].file]);
    }
    return table_end(&t);
}

static int print_documents(const walk *w) {
    size_t i;

    if (w->asked->tsv) return print_table(w);
    for (i = 0; i < w->n_documents; i++) {
        printf("%lld", (long long)w->documents[i].length);
        if (w->asked->names) print_name(w->names[w->documents[i].file]);
        putchar('\n');
    }
    return CLI_OK;
}

static int run(const void *given, char **operands, int n_operands) {
    walk w = {0};
    int i, code = CLI_OK;

    w.asked = (const lengths_options *)given;
    if (w.asked->unit == TOKENS && w.asked->lines)
        return cli_usage("lengths", "--unit tokens takes lists of lengths, which --lines would count");
    for (i = 0; i < n_operands && code == CLI_OK; i++) code = visit(&w, operands[i], 0);
    if (code == CLI_OK) code = print_documents(&w);
    free(w.documents);
    free_names(w.names, w.n_names);
    return code;
}

const cli_command cmd_lengths = {
    .name = "lengths", .operands = "FILE|DIRECTORY|- ...", .min_operands = 1, .max_operands = -1,
    .summary = "list the lengths of documents, one a line",
    .details =
    "Directories are searched to the bottom, in the order of the names' bytes, so that the same tree always gives the\n"
    "same list. Symbolic links inside them are not followed. The list is what the other commands read; tokens are for\n"
    "your tokenizer to count (python3 -m chunkflow.lengths does that for JSON Lines and Parquet), but bytes and words\n"
    "have a tail of the same shape.\n",
    .options = options, .defaults = &defaults, .options_size = sizeof defaults, .run = run};
