/* cli.h - shared by the subcommands of the chunkflow command: options, numbers, messages, length lists, output files.

   A subcommand is a file cmd_NAME.c that defines one `const cli_command cmd_NAME`: its help, a table of options, a
   struct with their defaults, and a function. To add one, write that file, declare the command at the end of this
   header and list it in chunkflow.c. */

#ifndef CHUNKFLOW_CLI_H
#define CHUNKFLOW_CLI_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "../../chunkflow.h"

/* Exit codes of the command. */
enum {
    CLI_OK = 0,
    CLI_FAILED = 1,       /* the work failed: no memory, a file cannot be written; `check`: the file breaks a rule */
    CLI_WRONG = 2,        /* the command line or the input is wrong; nothing was written */
    CLI_INTERRUPTED = 130 /* Ctrl-C, with the code that shells use */
};

/* Meanings of the exit codes, for the help and the manual. The last entry has none. */
typedef struct cli_exit_code {
    int code;
    const char *meaning;
} cli_exit_code;

extern const cli_exit_code cli_exit_codes[];

/* The purpose of the command: one sentence without its full stop. */
#define CLI_SUMMARY "packs batches of long-tailed sequences into chunks of one size and orders their passes"

/* Maximum sequences in one list: 800 MB of lengths. The library allows more, but a count such as `5 99999999999` is far
   more likely a slip than a batch. */
#define CLI_MAX_SEQUENCES 100000000
#define CLI_COUNTED_SEQUENCES 10000000 /* maximum that counts may make of a short list, unless --max-sequences is
                                          given */
#ifndef CLI_MAX_LIST_BYTES /* bytes of a list of lengths; tests use fewer */
#define CLI_MAX_LIST_BYTES ((int64_t)1 << 30)
#endif

/* ----------------------------------------------------------------------------------------------------------------
   Messages
   ---------------------------------------------------------------------------------------------------------------- */

#if defined(__GNUC__) || defined(__clang__)
#define CLI_FORMAT(text, first) __attribute__((format(printf, text, first)))
#else
#define CLI_FORMAT(text, first)
#endif

/* Print one line to standard error and return the matching exit code.
   cli_failed: "chunkflow: TEXT", for work that failed.
   cli_wrong: "chunkflow: TEXT", for wrong input.
   cli_usage: "chunkflow COMMAND: TEXT (see chunkflow COMMAND --help)"; command may be NULL.
   cli_at_line: "PATH:LINE: TEXT", for input that is wrong at one place. */
int cli_failed(const char *format, ...) CLI_FORMAT(1, 2);
int cli_wrong(const char *format, ...) CLI_FORMAT(1, 2);
int cli_usage(const char *command, const char *format, ...) CLI_FORMAT(2, 3);
int cli_at_line(const char *path, int64_t line, const char *format, ...) CLI_FORMAT(3, 4);

/* Prints a text from an unknown source, such as a file's name, on one line: control characters become '?'. The
   functions above also do so. */
void cli_put(const char *text, FILE *to);

/* Returns a file's name for people: "-" becomes "standard input". */
const char *cli_input_name(const char *path);

/* Returns a file's name without its folders, for output that others may see. */
const char *cli_base_name(const char *path);

/* Returns one of 32 buffers in turn: its text is valid until 32 more have been requested. */
enum { CLI_SCRATCH_BYTES = 64 };
char *cli_scratch(void);

/* 1234567 -> "1,234,567", in a cli_scratch. */
const char *cli_commas(int64_t value);

/* Adds commas to a printed number, with or without decimals, of at most 40 bytes. */
const char *cli_grouped(const char *number);

/* Returns a hint to follow an error in a number: how thousands are written, if the text tried to write them (8KB,
   8.5K), else "". */
const char *cli_suffix_hint(const char *text);

/* "1 chunk", "2,000 chunks". */
const char *cli_counted(int64_t n, const char *what);

/* ----------------------------------------------------------------------------------------------------------------
   Numbers
   ---------------------------------------------------------------------------------------------------------------- */

/* Parses strictly: decimal digits and at most one suffix K, M, G or T (times 1024 to 1024^4; lower case as well).
   Returns 1. Returns 0, with *out untouched, if text[0 .. n) is anything else or does not fit in 63 bits. */
int cli_parse_number(const char *text, size_t n, int64_t *out);

/* Parses decimal digits, optionally with a point and up to six more: "1.25" gives 1250000 (millionths). Independent of
   the locale. */
int cli_parse_millionths(const char *text, size_t n, int64_t *out);

/* Parses decimal digits with an optional point and exponent ("0.5", "3e-9"); finite and not negative. Assumes the C
   locale, which the command never leaves. */
int cli_parse_real(const char *text, size_t n, double *out);

/* ----------------------------------------------------------------------------------------------------------------
   Commands and options
   ---------------------------------------------------------------------------------------------------------------- */

typedef enum cli_kind {
    CLI_FLAG,       /* int, set to 1 */
    CLI_NUMBER,     /* int64_t, min .. max */
    CLI_MILLIONTHS, /* int64_t, min .. max in millionths */
    CLI_REALS,      /* cli_reals: min .. max numbers with commas between them */
    CLI_CHOICE,     /* int64_t: 1, 2, ... for the first, second, ... word of `value`, as chunkflow.h's enums count */
    CLI_TEXT        /* const char * into argv */
} cli_kind;

/* The value of a CLI_REALS option; n is 0 if it was not given. */
typedef struct cli_reals {
    double value[4];
    int64_t n;
} cli_reals;

enum { CLI_MAX_OPTIONS = 128 }; /* of one command */

typedef struct cli_option {
    const char *name;  /* with its dashes */
    const char *value; /* the value's name in the help: "N"; the words of a choice: "full|even|cost"; NULL for a flag */
    cli_kind kind;
    size_t offset;     /* of the member in the command's options struct, whose type follows from the kind */
    int64_t min, max;
    int required;
    const char *help;  /* a line end starts a new, indented line */
    const char *alias; /* an alternative name, common elsewhere; or NULL */
    /* names of options, separated by |, at least one of which must be given for this one to have an effect; or NULL */
    const char *needs;
} cli_option;

typedef struct cli_command {
    const char *name;
    const char *operands;      /* in the usage line: "FILE|-" */
    int min_operands;
    int max_operands;          /* -1: no limit */
    const char *summary;       /* one line, no full stop */
    const char *details;       /* paragraphs printed after the options, or NULL */
    const cli_option *options; /* ends with an entry without a name */
    const void *defaults;      /* initial values of the options struct */
    size_t options_size;
    int (*run)(const void *options, char **operands, int n_operands); /* returns an exit code */
} cli_command;

/* Parses the arguments after the command's name. Options and operands may be mixed; "--" ends the options;
   "--name=value" and "--name value" mean the same. If an option is given twice, the last one counts. Returns 1 to
   continue, with the operands moved to the front of argv and counted in *n_operands, or 0 to exit with *code. */
int cli_parse(const cli_command *command, int argc, char **argv, void *options, int *n_operands, int *code);

void cli_print_help(const cli_command *command, FILE *to);

/* Makes a text such as "; did you mean --stages?" to follow an unknown word, or "" if no valid word is similar. Start
   with {word}, offer it each valid word, and take the text, which is in a cli_scratch. */
typedef struct cli_guess {
    const char *word, *nearest;
    int distance; /* twice the number of different letters, plus 1 if the lengths differ */
} cli_guess;

void cli_guess_offer(cli_guess *guess, const char *name);
const char *cli_guess_text(const cli_guess *guess);

/* Makes that text for a word that is not among `names`, which end with NULL. */
const char *cli_guess_among(const char *word, const char *const *names);

/* Refuses a name given to an option, and lists the valid names. word: the part of it to compare; others: other valid
   values, or NULL. Returns an exit code. */
int cli_refuse_name(const char *command, const char *option, const char *given, const char *word,
                    const char *const *names, const char *others);

/* Reads "N,N,..." from an option of the kind CLI_TEXT: each min .. max, in cli_parse_number's form. Free *out; it is
   untouched on failure, which the message explains. Returns an exit code. */
int cli_take_numbers(const char *command, const char *option, const char *text, int64_t min, int64_t max, int64_t **out,
                     int64_t *n);

/* ----------------------------------------------------------------------------------------------------------------
   Memory
   ---------------------------------------------------------------------------------------------------------------- */

/* Grows an array from malloc (NULL is allowed) to twice as many elements, at least 64. Returns the new block and its
   *capacity in elements. On failure prints a message and returns NULL; `array` and *capacity are untouched. */
void *cli_grow(void *array, size_t *capacity, size_t size);

/* ----------------------------------------------------------------------------------------------------------------
   Input files
   ---------------------------------------------------------------------------------------------------------------- */

/* Opens a file for reading, "-" as standard input. Returns an exit code, after a message unless it is CLI_OK. */
int cli_input_open(const char *path, FILE **stream);

/* Prints the reason why reading failed, from errno. Returns CLI_FAILED if memory ran out, else CLI_WRONG. */
int cli_cannot_read(const char *path);

/* Closes an input, unless it is standard input. If code is CLI_OK but reading has failed, prints the error. Returns an
   exit code. */
int cli_input_close(FILE *stream, const char *path, int code);

/* Reads a whole file, or standard input for "-". Free *text, which ends with a zero byte. A file of more than max_bytes
   is refused. Returns an exit code. */
int cli_file_read(const char *path, size_t max_bytes, char **text, size_t *bytes);

/* Calls `take` with each line of a file, without its end and comment, and with its number from 1, as long as `take`
   returns CLI_OK. Refuses lines of 256 bytes and more, and more than a million lines, which an endless device would
   give. Returns an exit code. */
typedef int (*cli_take_line)(void *user, const char *path, int64_t number, const char *line);
int cli_lines_read(const char *path, cli_take_line take, void *user);

/* ----------------------------------------------------------------------------------------------------------------
   Length lists
   ---------------------------------------------------------------------------------------------------------------- */

#define CLI_LIST_HELP                                                                                      \
    "A list is text with one sequence a line: its length in tokens, or a length and a count (so many sequences of\n" \
    "that length). Suffixes K, M, G, T mean 1024, 1024^2 and so on. '#' starts a comment; blank lines are skipped.\n" \
    "32K + 2K 16 is a prompt of 32K tokens that 16 sequences begin with, each with 2K of its own. Each further +\n"  \
    "is another branch: in 1K + 512 + 2K 3 four sequences share 1K, one has 512 more and three have 2K more. A\n"    \
    "branch may be such a tree in parentheses, also with a count: 4K + (8K + 4K 6) 4. What is shared is computed\n"  \
    "once.\n"                                                                                                        \
    "Or it is the .idx of a data set that Megatron-LM reads: one sequence a document. FILE may be - for standard\n"  \
    "input.\n"

/* One line of a list, or some of the sequences of a tree. */
typedef struct cli_entry {
    int64_t length;
    int64_t count;
    int64_t line;   /* from 1 */
    int64_t common; /* tokens that all of the sequences share at their beginning; 0: none */
    cf_shared_prefix share; /* of the first of these sequences */
} cli_entry;

typedef struct cli_list {
    const char *path; /* as the user wrote it */
    cli_entry *entries;
    size_t n_entries;
    int64_t n_sequences; /* sum of counts */
    int has_trees;       /* 1: some sequences begin alike */
} cli_list;

/* Reads a list, or an index of Megatron's, whose documents are its lines. max_sequences: limit of the sum of its
   counts. Returns an exit code; on failure *list is untouched and the message names the file and the place. */
int cli_list_read(const char *path, int64_t max_sequences, cli_list *list);

/* Reads a list for a command whose memory grows with each sequence, including those of counts. asked: --max-sequences,
   for counts and trees; 0: the default. */
int cli_list_read_counted(const char *path, int64_t asked, cli_list *list);

#define CLI_MAX_SEQUENCES_OPTION(type, member)                                                                     \
    {.name = "--max-sequences", .value = "N", .kind = CLI_NUMBER, .offset = offsetof(type, member), .min = 1,      \
     .max = CLI_MAX_SEQUENCES, .help = "most sequences that counts in a list may make; default 10,000,000"}
void cli_list_free(cli_list *list);

/* Returns one length per sequence, in order, or NULL if there is no memory; free it. A list without sequences gives an
   array of one unused number. */
int64_t *cli_list_lengths(const cli_list *list);

/* Expands a list to one length per sequence, and the prefix that each shares (NULL if none shares). Free both in any
   case. Returns an exit code. */
int cli_list_expand(const cli_list *list, int64_t **lengths, cf_shared_prefix **shares);

/* Refuses a list with trees, for a command that does not support them. Returns an exit code. */
int cli_list_refuse_trees(const cli_list *list, const char *command);

/* Returns the line that a sequence came from; 0 if there is no such sequence. */
int64_t cli_list_line(const cli_list *list, int64_t sequence);

/* Reports an error of the library and returns the exit code for it. If cf_pack finds fault with a sequence of `list`
   (NULL for errors of other functions), the message names its line. */
int cli_error(const cf_error *error, const cli_list *list);

/* ----------------------------------------------------------------------------------------------------------------
   Output files
   ---------------------------------------------------------------------------------------------------------------- */

/* A file that appears whole or not at all: it is written under a temporary name in the same folder, synced to disk and
   renamed at the end. If INT, TERM, HUP or QUIT ends the program, the temporary file is removed; the next run takes
   over one left by a kill. Pipes and devices are written directly. Initialise with all zero. */
typedef struct cli_output {
    FILE *stream;     /* the open stream; NULL: this output was not requested */
    const char *path; /* as the user wrote it; "-" is standard output */
    char *target;     /* the final name, with symbolic links resolved; NULL: written directly */
    char *temporary;  /* its name until then */
    int lock;         /* a descriptor that tells other runs that the temporary file is in use */
    int error;        /* the first errno that cli_write met */
} cli_output;

/* Open an output; path NULL opens nothing. Return an exit code. cli_output_try only checks, before long work, that the
   file can be opened, and changes nothing. */
int cli_output_try(const char *path);
int cli_output_open(cli_output *output, const char *path);

/* Ends standard output and n outputs together. With code CLI_OK it flushes and closes all of them, and renames the
   files into place only if that succeeded. Otherwise it removes the temporary files. Returns code, or CLI_FAILED after
   a message. */
int cli_outputs_finish(cli_output *outputs, int n, int code);

/* A cf_write_fn; user is the cli_output. cli_outputs_finish reports its errors. */
int cli_write(const char *text, size_t bytes, void *user);

/* Returns the exit code for the result of a library function that wrote to an output, after a message. */
int cli_written(cf_result result, const cf_error *error);

/* Returns whether writing to standard output has failed, so that long loops can stop. cli_outputs_finish reports the
   reason. */
int cli_stdout_failed(void);

/* Makes INT, TERM, HUP and QUIT remove temporary files before they end the program; main calls it first. A signal that
   was ignored when the program started stays ignored. cli_signals_restore restores this for INT after a command's own
   handler. */
void cli_signals_catch(void);
void cli_signals_restore(void);

/* ----------------------------------------------------------------------------------------------------------------
   The subcommands
   ---------------------------------------------------------------------------------------------------------------- */

extern const cli_command cmd_lengths;
extern const cli_command cmd_gen;
extern const cli_command cmd_pack;
extern const cli_command cmd_plan;
extern const cli_command cmd_compare;
extern const cli_command cmd_check;
extern const cli_command cmd_report;
extern const cli_command cmd_memory;
extern const cli_command cmd_time;
extern const cli_command cmd_tune;
extern const cli_command cmd_reproduce;

#endif /* CHUNKFLOW_CLI_H */
