/* cli.c - messages, numbers, options and help of the chunkflow command. */

#include "cli.h"
#include "progress.h"

#include <assert.h>
#include <ctype.h>
#include <float.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

const cli_exit_code cli_exit_codes[] = {
    {CLI_OK, "done"},
    {CLI_FAILED, "could not be done: no memory, a file cannot be written; check: the file breaks a rule"},
    {CLI_WRONG, "the command line or the input is wrong; nothing was written"},
    {CLI_INTERRUPTED, "tune was ended by Ctrl-C, and has printed what it had found by then"},
    {0, NULL},
};

/* ----------------------------------------------------------------------------------------------------------------
   Messages
   ---------------------------------------------------------------------------------------------------------------- */

void cli_put(const char *text, FILE *to) {
    for (; *text; text++) {
        unsigned char c = (unsigned char)text[0], next = (unsigned char)text[1];
        int second = c == 0xc2 && next >= 0x80 && next < 0xa0; /* control characters above ASCII, in UTF-8 */
        fputc(c < 32 || c == 127 || second ? '?' : c, to);
        text += second;
    }
}

/* Prints a message, which may contain names of files and arguments. It is cut at about 4,096 bytes, the longest
   path. */
static void put_message(const char *format, va_list arguments) {
    char text[8192];
    vsnprintf(text, sizeof text, format, arguments);
    cli_put(text, stderr);
}

static void say(const char *format, va_list arguments) {
    progress_clear();
    fputs("chunkflow: ", stderr);
    put_message(format, arguments);
    fputc('\n', stderr);
}

int cli_failed(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say(format, arguments);
    va_end(arguments);
    return CLI_FAILED;
}

int cli_wrong(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say(format, arguments);
    va_end(arguments);
    return CLI_WRONG;
}

int cli_usage(const char *command, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    progress_clear();
    fprintf(stderr, "chunkflow%s%s: ", command ? " " : "", command ? command : "");
    put_message(format, arguments);
    fprintf(stderr, " (see chunkflow %s%s--help)\n", command ? command : "", command ? " " : "");
    va_end(arguments);
    return CLI_WRONG;
}

int cli_at_line(const char *path, int64_t line, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    progress_clear();
    cli_put(cli_input_name(path), stderr);
    fprintf(stderr, ":%lld: ", (long long)line);
    put_message(format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    return CLI_WRONG;
}

const char *cli_input_name(const char *path) {
    return strcmp(path, "-") == 0 ? "standard input" : path;
}

const char *cli_base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return cli_input_name(slash && slash[1] ? slash + 1 : path);
}

char *cli_scratch(void) {
    static char buffers[32][CLI_SCRATCH_BYTES];
    static int turn = 0;

    turn = (turn + 1) % 32;
    return buffers[turn];
}

const char *cli_grouped(const char *number) {
    char *out = cli_scratch(), *at = out;
    size_t n = strspn(number, "-0123456789"), i;

    for (i = 0; number[i]; i++) {
        *at++ = number[i];
        if (number[i] != '-' && i + 1 < n && (n - 1 - i) % 3 == 0) *at++ = ',';
    }
    *at = '\0';
    return out;
}

const char *cli_commas(int64_t value) {
    char digits[24];

    snprintf(digits, sizeof digits, "%lld", (long long)value);
    return cli_grouped(digits);
}

const char *cli_counted(int64_t n, const char *what) {
    char *out = cli_scratch();

    snprintf(out, CLI_SCRATCH_BYTES, "%s %s%s", cli_commas(n), what, n == 1 ? "" : "s");
    return out;
}

/* ----------------------------------------------------------------------------------------------------------------
   Numbers
   ---------------------------------------------------------------------------------------------------------------- */

/* Reads the digits of text[0 .. n) into *value and returns how many there are; -1 on overflow. */
static int parse_digits(const char *text, size_t n, int64_t *value) {
    int64_t sum = 0;
    size_t i;

    for (i = 0; i < n && text[i] >= '0' && text[i] <= '9'; i++) {
        int64_t digit = text[i] - '0';
        if (sum > (INT64_MAX - digit) / 10) return -1;
        sum = sum * 10 + digit;
    }
    *value = sum;
    return (int)i;
}

static int suffix_shift(char suffix) {
    switch (suffix) {
    case 'K': case 'k': return 10;
    case 'M': case 'm': return 20;
    case 'G': case 'g': return 30;
    case 'T': case 't': return 40;
    default: return 0;
    }
}

const char *cli_suffix_hint(const char *text) {
    int tried = text[0] >= '0' && text[0] <= '9' && strpbrk(text, "kKmMgGtTbB") != NULL;
    return tried ? ", perhaps with K, M, G or T for 1,024 and its powers" : "";
}

int cli_parse_number(const char *text, size_t n, int64_t *out) {
    int64_t value;
    int digits, shift = 0;

    if (n == 0 || n > 64) return 0;
    digits = parse_digits(text, n, &value);
    if (digits <= 0) return 0;
    if ((size_t)digits + 1 == n) shift = suffix_shift(text[digits]);
    if ((size_t)digits + (shift > 0) != n) return 0;
    if (value > (INT64_MAX >> shift)) return 0;
    *out = value << shift;
    return 1;
}

int cli_parse_millionths(const char *text, size_t n, int64_t *out) {
    int64_t whole, fraction = 0;
    int digits, places = 0;

    if (n == 0 || n > 64) return 0;
    digits = parse_digits(text, n, &whole);
    if (digits <= 0 || whole > INT64_MAX / 1000000 - 1) return 0;
    if ((size_t)digits < n) {
        if (text[digits] != '.') return 0;
        places = parse_digits(text + digits + 1, n - (size_t)digits - 1, &fraction);
        if (places < 1 || places > 6 || (size_t)digits + 1 + (size_t)places != n) return 0;
    }
    while (places++ < 6) fraction *= 10;
    *out = whole * 1000000 + fraction;
    return 1;
}

static size_t count_digits(const char *text, size_t at, size_t n) {
    size_t i = at;
    while (i < n && text[i] >= '0' && text[i] <= '9') i++;
    return i - at;
}

/* Checks the form first, because strtod also accepts blanks, signs, hexadecimal and "inf". */
int cli_parse_real(const char *text, size_t n, double *out) {
    char copy[64];
    size_t digits = count_digits(text, 0, n), at = digits;
    double value;

    if (digits == 0 || n >= sizeof copy) return 0;
    if (at < n && text[at] == '.') {
        digits = count_digits(text, at + 1, n);
        if (digits == 0) return 0;
        at += 1 + digits;
    }
    if (at < n && (text[at] == 'e' || text[at] == 'E')) {
        at++;
        if (at < n && (text[at] == '+' || text[at] == '-')) at++;
        digits = count_digits(text, at, n);
        if (digits == 0) return 0;
        at += digits;
    }
    if (at != n) return 0;
    memcpy(copy, text, n);
    copy[n] = '\0';
    value = strtod(copy, NULL);
    if (value > DBL_MAX) return 0;
    *out = value;
    return 1;
}

/* ----------------------------------------------------------------------------------------------------------------
   Options
   ---------------------------------------------------------------------------------------------------------------- */

static int is_name(const char *name, const char *text, size_t n) {
    return name && strlen(name) == n && memcmp(name, text, n) == 0;
}

/* Returns the index of the option named text[0 .. n), or -1. */
static int find_option(const cli_command *command, const char *text, size_t n) {
    int i;
    for (i = 0; command->options[i].name; i++)
        if (is_name(command->options[i].name, text, n) || is_name(command->options[i].alias, text, n)) return i;
    return -1;
}

enum {
    GUESS_BYTES = 40,   /* longer words are no misspelling */
    LEAST_BEGINNING = 4 /* from this many letters on, a name that begins with the word is preferred to any other */
};

static int least_of(int a, int b, int c) {
    int least = a < b ? a : b;
    return least < c ? least : c;
}

static int same_letter(char a, char b) { return tolower((unsigned char)a) == tolower((unsigned char)b); }

/* Returns the number of letters to insert, delete, replace or swap, ignoring case, to make one word of the other
   (Damerau's distance). */
static int distance_between(const char *a, const char *b) {
    int d[GUESS_BYTES + 1][GUESS_BYTES + 1], m = (int)strlen(a), n = (int)strlen(b), i, j;

    for (i = 0; i <= m; i++) d[i][0] = i;
    for (j = 0; j <= n; j++) d[0][j] = j;
    for (i = 1; i <= m; i++)
        for (j = 1; j <= n; j++) {
            int same = same_letter(a[i - 1], b[j - 1]);
            d[i][j] = least_of(d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + !same);
            if (i > 1 && j > 1 && same_letter(a[i - 1], b[j - 2]) && same_letter(a[i - 2], b[j - 1]))
                d[i][j] = least_of(d[i][j], d[i - 2][j - 2] + 1, d[i][j]);
        }
    return d[m][n];
}

static int begins_with(const char *name, const char *word) {
    while (*word && tolower((unsigned char)*name) == tolower((unsigned char)*word)) name++, word++;
    return *word == '\0';
}

void cli_guess_offer(cli_guess *guess, const char *name) {
    int distance, length = (int)strlen(guess->word);

    if (!name || strlen(name) > GUESS_BYTES || length > GUESS_BYTES) return;
    distance = 2 * distance_between(guess->word, name) + (length != (int)strlen(name));
    if (length >= LEAST_BEGINNING && begins_with(name, guess->word)) distance -= 2 * GUESS_BYTES;
    if (guess->nearest && distance >= guess->distance) return;
    guess->nearest = name;
    guess->distance = distance;
}

const char *cli_guess_text(const cli_guess *guess) {
    char *out = cli_scratch();

    out[0] = '\0';
    if (guess->nearest && 3 * (guess->distance / 2) <= (int)strlen(guess->word))
        snprintf(out, CLI_SCRATCH_BYTES, "; did you mean %s?", guess->nearest);
    return out;
}

const char *cli_guess_among(const char *word, const char *const *names) {
    cli_guess guess = {NULL, NULL, 0};

    for (guess.word = word; *names; names++) cli_guess_offer(&guess, *names);
    return cli_guess_text(&guess);
}

int cli_refuse_name(const char *command, const char *option, const char *given, const char *word,
                    const char *const *names, const char *others) {
    const char *guessed = cli_guess_among(word, names);
    char list[1024] = "";
    int i;

    for (i = 0; names[i]; i++)
        snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", i > 0 ? ", " : "", names[i]);
    return cli_usage(command, "%s: there is no '%s'%s There are: %s%s%s", option, given, *guessed ? guessed : ".", list,
                     others ? ". Any other: " : "", others ? others : "");
}

/* Old names of options, from before version 0.1.0. */
static const char *const renamed_options[][2] = {{"--gang", "--max-cp"}, {"--budget", "--max-tries"}};

static int refuse_option(const cli_command *command, const char *text, size_t n) {
    char word[GUESS_BYTES + 2];
    cli_guess guess = {NULL, NULL, 0};
    int i;

    for (i = 0; i < (int)(sizeof renamed_options / sizeof renamed_options[0]); i++) {
        const char *old = renamed_options[i][0], *now = renamed_options[i][1];
        if (is_name(old, text, n) && find_option(command, now, strlen(now)) >= 0)
            return cli_usage(command->name, "unknown option %s: it is %s now", old, now);
    }
    if (is_name("--max-cp", text, n) && find_option(command, "--ranks", 7) >= 0)
        return cli_usage(command->name, "unknown option --max-cp: compare, report and tune have it, with memory");
    snprintf(word, sizeof word, "%.*s", (int)(n < 100 ? n : 100), text);
    guess.word = word;
    for (i = 0; command->options[i].name; i++) {
        cli_guess_offer(&guess, command->options[i].name);
        cli_guess_offer(&guess, command->options[i].alias);
    }
    return cli_usage(command->name, "unknown option %.*s%s", (int)(n < 100 ? n : 100), text, cli_guess_text(&guess));
}

/* Returns the index of `word` in "one|two|three", from 1; 0 if it is not there. */
static int64_t find_choice(const char *choices, const char *word) {
    size_t n = strlen(word);
    int64_t place = 1;

    while (choices) {
        size_t length = strcspn(choices, "|");
        if (n == length && memcmp(choices, word, n) == 0) return place;
        choices = choices[length] ? choices + length + 1 : NULL;
        place++;
    }
    return 0;
}

static int set_number(const cli_command *command, const cli_option *option, const char *text, int64_t *out) {
    int64_t value;

    if (!cli_parse_number(text, strlen(text), &value) || value < option->min || value > option->max)
        return cli_usage(command->name, "%s: got '%s', wanted a whole number %lld .. %lld%s", option->name, text,
                         (long long)option->min, (long long)option->max, cli_suffix_hint(text));
    *out = value;
    return CLI_OK;
}

static int set_millionths(const cli_command *command, const cli_option *option, const char *text, int64_t *out) {
    int64_t value;

    if (!cli_parse_millionths(text, strlen(text), &value) || value < option->min || value > option->max)
        return cli_usage(command->name, "%s: got '%s', wanted a number %g .. %g with at most six decimals",
                         option->name, text, (double)option->min / 1e6, (double)option->max / 1e6);
    *out = value;
    return CLI_OK;
}

static int set_reals(const cli_command *command, const cli_option *option, const char *text, cli_reals *out) {
    cli_reals fresh = {{0}, 0};
    const char *at = text;
    int more = 1;

    while (more) {
        size_t n = strcspn(at, ",");
        if (fresh.n == option->max || !cli_parse_real(at, n, &fresh.value[fresh.n])) break;
        fresh.n++;
        more = at[n] == ',';
        at += n + 1;
    }
    if (more || fresh.n < option->min)
        return cli_usage(command->name, "%s: got '%s', wanted %s: %s not below 0", option->name, text, option->value,
                         option->max > 1 ? "decimal numbers" : "a decimal number");
    *out = fresh;
    return CLI_OK;
}

int cli_take_numbers(const char *command, const char *option, const char *text, int64_t min, int64_t max, int64_t **out,
                     int64_t *n) {
    const char *at = text;
    size_t most = 1, count = 0;
    int64_t *numbers;

    for (; *at; at++) most += *at == ',';
    numbers = (int64_t *)malloc(most * sizeof *numbers); /* at most 8 times the bytes of the command line */
    if (!numbers) return cli_failed("out of memory");
    for (at = text; count < most; count++) {
        size_t length = strcspn(at, ",");
        int64_t *number = &numbers[count];
        if (!cli_parse_number(at, length, number) || *number < min || *number > max) break;
        at += length + 1;
    }
    if (count < most) {
        free(numbers);
        return cli_usage(command, "%s: got '%s', wanted whole numbers %lld .. %lld with commas between them%s", option,
                         text, (long long)min, (long long)max, cli_suffix_hint(text));
    }
    *out = numbers;
    *n = (int64_t)count;
    return CLI_OK;
}

static int set_choice(const cli_command *command, const cli_option *option, const char *text, int64_t *out) {
    int64_t place = find_choice(option->value, text);
    char copy[256];
    const char *names[16] = {NULL};
    int n = 0;

    *out = place;
    if (place > 0) return CLI_OK;
    snprintf(copy, sizeof copy, "%s", option->value);
    for (names[0] = strtok(copy, "|"); names[n] && n < 15; n++) names[n + 1] = strtok(NULL, "|");
    return cli_usage(command->name, "%s: got '%s', wanted %s%s", option->name, text, option->value,
                     cli_guess_among(text, names));
}

static int set_option(const cli_command *command, const cli_option *option, const char *text, void *options) {
    void *member = (char *)options + option->offset;

    switch (option->kind) {
    case CLI_NUMBER: return set_number(command, option, text, (int64_t *)member);
    case CLI_MILLIONTHS: return set_millionths(command, option, text, (int64_t *)member);
    case CLI_REALS: return set_reals(command, option, text, (cli_reals *)member);
    case CLI_CHOICE: return set_choice(command, option, text, (int64_t *)member);
    case CLI_TEXT:
        if (*text == '\0') return cli_usage(command->name, "%s: got an empty name", option->name);
        *(const char **)member = text;
        return CLI_OK;
    case CLI_FLAG:
    default: *(int *)member = 1; return CLI_OK;
    }
}

/* Takes the option at argv[at] and its value. Returns the number of arguments used, or 0 with *code. */
static int take_option(const cli_command *command, int argc, char **argv, int at, void *options, char *given,
                       int *code) {
    const char *text = argv[at];
    const char *equals = strchr(text, '=');
    size_t n = equals ? (size_t)(equals - text) : strlen(text);
    int index = find_option(command, text, n);
    const cli_option *option = index >= 0 ? &command->options[index] : NULL;
    const char *value = NULL;
    int used = 1;

    *code = CLI_WRONG;
    if (!option) {
        (void)refuse_option(command, text, n);
        return 0;
    }
    if (option->kind == CLI_FLAG) {
        if (equals) {
            cli_usage(command->name, "%s takes no value, got '%s'", option->name, equals + 1);
            return 0;
        }
    } else if (equals) {
        value = equals + 1;
    } else if (at + 1 < argc && strncmp(argv[at + 1], "--", 2) != 0) {
        value = argv[at + 1];
        used = 2;
    } else {
        cli_usage(command->name, "%s needs a value: %s", option->name, option->value);
        return 0;
    }
    *code = set_option(command, option, value, options);
    assert(index < CLI_MAX_OPTIONS);
    given[index] = 1;
    return *code == CLI_OK ? used : 0;
}

static int check_required(const cli_command *command, const char *given) {
    int i;
    for (i = 0; command->options[i].name; i++)
        if (command->options[i].required && !given[i])
            return cli_usage(command->name, "%s %s is missing", command->options[i].name, command->options[i].value);
    return CLI_OK;
}

/* Takes the next of several names separated by |. Returns the index of that option, or -1 if the command has none. */
static int next_option(const cli_command *command, const char **names) {
    size_t n = strcspn(*names, "|");
    int index = find_option(command, *names, n);

    *names += n + ((*names)[n] == '|');
    return index;
}

/* Refuses an option that needs another; the message names the first two that are enough. */
static int check_need(const cli_command *command, const cli_option *option, const char *given) {
    const cli_option *wanted[2] = {NULL, NULL};
    const char *names = option->needs;
    int n = 0;

    while (*names) {
        int index = next_option(command, &names);
        if (index >= 0 && given[index]) return CLI_OK;
        if (index >= 0 && n < 2) wanted[n++] = &command->options[index];
    }
    if (n == 0) return CLI_OK;
    if (n == 1) return cli_usage(command->name, "%s needs %s %s", option->name, wanted[0]->name, wanted[0]->value);
    return cli_usage(command->name, "%s needs %s %s or %s %s", option->name, wanted[0]->name, wanted[0]->value,
                     wanted[1]->name, wanted[1]->value);
}

/* Refuses the first given option that would have no effect. */
static int check_needs(const cli_command *command, const char *given) {
    int i, code = CLI_OK;

    for (i = 0; command->options[i].name && code == CLI_OK; i++)
        if (given[i] && command->options[i].needs) code = check_need(command, &command->options[i], given);
    return code;
}

static int check_operands(const cli_command *command, char **operands, int n) {
    if (n < command->min_operands) return cli_usage(command->name, "%s is missing", command->operands);
    if (command->max_operands >= 0 && n > command->max_operands)
        return cli_usage(command->name, "'%s' is one operand too many, wanted %s", operands[command->max_operands],
                         command->max_operands == 0 ? "none" : command->operands);
    return CLI_OK;
}

static int is_help(const char *argument) {
    return strcmp(argument, "--help") == 0 || strcmp(argument, "-h") == 0;
}

int cli_parse(const cli_command *command, int argc, char **argv, void *options, int *n_operands, int *code) {
    char given[CLI_MAX_OPTIONS] = {0};
    int at = 0, n = 0, ended = 0;

    while (at < argc) {
        char *argument = argv[at];
        if (ended || argument[0] != '-' || argument[1] == '\0') {
            argv[n++] = argument;
            at++;
        } else if (strcmp(argument, "--") == 0) {
            ended = 1;
            at++;
        } else if (is_help(argument)) {
            cli_print_help(command, stdout);
            *code = CLI_OK;
            return 0;
        } else {
            int used = take_option(command, argc, argv, at, options, given, code);
            if (used == 0) return 0;
            at += used;
        }
    }
    *n_operands = n;
    *code = check_required(command, given);
    if (*code == CLI_OK) *code = check_needs(command, given);
    if (*code == CLI_OK) *code = check_operands(command, argv, n);
    return *code == CLI_OK;
}

/* ----------------------------------------------------------------------------------------------------------------
   Help
   ---------------------------------------------------------------------------------------------------------------- */

#define HELP_COLUMN 26

/* Prints one option: its name and value, and its help from HELP_COLUMN on, or on the next line if the name is too
   long. */
static void print_option(const char *name, const char *alias, const char *value, const char *help, FILE *to) {
    int used = fprintf(to, "  %s%s%s%s%s", name, alias ? ", " : "", alias ? alias : "", value ? " " : "",
                       value ? value : "");

    if (used >= HELP_COLUMN) {
        fputc('\n', to);
        used = 0;
    }
    fprintf(to, "%*s", HELP_COLUMN - used, "");
    for (; *help; help++) {
        fputc(*help, to);
        if (*help == '\n') fprintf(to, "%*s", HELP_COLUMN, "");
    }
    fputc('\n', to);
}

void cli_print_help(const cli_command *command, FILE *to) {
    const cli_option *option;

    fprintf(to, "usage: chunkflow %s", command->name);
    for (option = command->options; option->name; option++)
        if (option->required) fprintf(to, " %s %s", option->name, option->value);
    fprintf(to, " [options]%s%s\n\n%c%s.\n\noptions\n", *command->operands ? " " : "", command->operands,
            toupper((unsigned char)command->summary[0]), command->summary + 1);
    for (option = command->options; option->name; option++)
        print_option(option->name, option->alias, option->value, option->help, to);
    print_option("--help", NULL, NULL, "this text", to);
    if (command->details) fprintf(to, "\n%s", command->details);
}
