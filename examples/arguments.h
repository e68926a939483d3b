/* arguments.h - options of a command line, described by a list - MIT or public domain */

#ifndef TRAIN_ARGUMENTS_H
#define TRAIN_ARGUMENTS_H

#include "base.h"

typedef struct length_list {
    int64_t *lengths; /* (count) */
    int64_t count;
} length_list;

typedef enum option_kind { INTEGER, NUMBER, FLAG, TEXT, CHOICE, LENGTHS, WORDS } option_kind;

typedef struct option {
    const char *name;
    option_kind kind;
    void *target;
    double least, most;  /* INTEGER and NUMBER */
    const char *choices; /* CHOICE: words separated by blanks; the first is 1, 0 means default */
    const char *help;
} option;

#define MAX_OPTIONS 64
#define MANY 1e12 /* a bound for numbers without a natural one */

static inline void print_default(const option *one) {
    if (one->kind == INTEGER) printf(" [%lld]", (long long)*(const int64_t *)one->target);
    if (one->kind == NUMBER) printf(" [%g]", *(const double *)one->target);
    if (one->kind == CHOICE) printf(": %s", one->choices);
}

/* One line for each option. */
static inline void print_options(const option *list, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        static const char *const values[] = {" N", " X", "", " FILE", " WORD", " LIST", " LIST"};
        char name[40];
        snprintf(name, sizeof name, "--%s%s", list[i].name, values[list[i].kind]);
        printf("  %-22s %s", name, list[i].help);
        print_default(&list[i]);
        printf("\n");
    }
}

static inline double parse_number(const char *name, const char *text, double least, double most, int whole) {
    char *end = NULL;
    double value = strtod(text, &end);
    if (end == text || *end || !(value >= least && value <= most) || (whole && floor(value) != value)) {
        fail(EXIT_BAD_INPUT, "--%s: wanted %s from %g to %g, got \"%s\"", name, whole ? "a whole number" : "a number",
             least, most, text);
    }
    return value;
}

static inline void parse_choice(const option *one, const char *text) {
    const char *word = one->choices;
    for (int number = 1; *word; number++) {
        size_t length = strcspn(word, " ");
        if (strlen(text) == length && strncmp(word, text, length) == 0) {
            *(unsigned *)one->target = (unsigned)number;
            return;
        }
        word += length + (word[length] == ' ');
    }
    fail(EXIT_BAD_INPUT, "--%s: wanted one of \"%s\", got \"%s\"", one->name, one->choices, text);
}

/* "1,20,3" */
static inline void parse_lengths(const char *name, length_list *list, const char *text) {
    int64_t n = 1;
    for (const char *c = text; *c; c++) n += *c == ',';
    free(list->lengths);
    list->lengths = TAKE(int64_t, n);
    list->count = n;
    for (int64_t i = 0; i < n; i++) {
        char number[32];
        size_t length = strcspn(text, ",");
        if (length >= sizeof number) {
            fail(EXIT_BAD_INPUT, "--%s: wanted numbers of at most 31 characters, got \"%.40s\"", name, text);
        }
        snprintf(number, sizeof number, "%.*s", (int)length, text);
        list->lengths[i] = (int64_t)parse_number(name, number, 0, 1e9, 1);
        text += length + (text[length] == ',');
    }
}

static inline void parse_value(const option *one, const char *text) {
    if (one->kind == INTEGER) {
        *(int64_t *)one->target = (int64_t)parse_number(one->name, text, one->least, one->most, 1);
    } else if (one->kind == NUMBER) {
        *(double *)one->target = parse_number(one->name, text, one->least, one->most, 0);
    } else if (one->kind == TEXT || one->kind == WORDS) {
        *(const char **)one->target = text;
    } else if (one->kind == CHOICE) {
        parse_choice(one, text);
    } else {
        parse_lengths(one->name, (length_list *)one->target, text);
    }
}

/* Reads the command line into the targets of the list. Arguments that are not options go to paths[] (argc long), and
   their number is returned; with paths NULL there may be none. Ends the program with a message if something is
   wrong. */
static inline int64_t parse_arguments(int argc, char **argv, const option *list, int64_t n, const char **paths) {
    int64_t n_paths = 0;
    for (int i = 1; i < argc; i++) {
        if (paths && strncmp(argv[i], "--", 2) != 0) {
            paths[n_paths++] = argv[i];
            continue;
        }
        int64_t which = 0;
        while (which < n && (strncmp(argv[i], "--", 2) != 0 || strcmp(list[which].name, argv[i] + 2) != 0)) which++;
        if (which == n) fail(EXIT_BAD_INPUT, "unknown option %s; --help lists all", argv[i]);
        if (list[which].kind == FLAG) {
            *(int *)list[which].target = 1;
        } else if (++i < argc) {
            parse_value(&list[which], argv[i]);
        } else {
            fail(EXIT_BAD_INPUT, "--%s wants a value", list[which].name);
        }
    }
    return n_paths;
}

#define OUTPUTS_HELP "dropped chunks keep attention's outputs, and their replays do not attend"

/* Synthetic documents may begin alike, as answers to one prompt do. */
#define WITH_HELP "I,I,...: with which earlier one (0, 1, ...) each of them shares its first"
#define SHARED_HELP "N,N,...: so many tokens"
#define SHARE_HELP "compute once what sequences have in common, from so many first tokens on, 0: no"
#define ONCE_HELP "a token that sequences share counts once, and not once for each"

static inline void check_shared_mean(int shared_mean, int64_t share, int64_t align) {
    if (!shared_mean || (share == 1 && align <= 1)) return;
    fail(EXIT_BAD_INPUT,
         "--shared-mean wants --share 1 and no --align: what is not computed once counts for each sequence");
}

static inline void check_alike(const length_list *lengths, const length_list *with, const length_list *shared) {
    if (with->count != shared->count || (with->count > 0 && with->count != lengths->count)) {
        fail(EXIT_BAD_INPUT, "--with and --shared want a number for each --synthetic document");
    }
    for (int64_t i = 0; i < with->count; i++) {
        const int64_t other = with->lengths[i], tokens = shared->lengths[i];
        if (tokens > 0 && (other >= i || tokens > min_of(lengths->lengths[i], lengths->lengths[other]))) {
            fail(EXIT_BAD_INPUT, "--shared: document %lld has no %lld tokens in common with an earlier one",
                 (long long)i, (long long)tokens);
        }
    }
}

#endif /* TRAIN_ARGUMENTS_H */
