/* manual.c - see manual.h. */

#include "manual.h"

#include <ctype.h>
#include <string.h>

/* ----------------------------------------------------------------------------------------------------------------
   The manual page
   ---------------------------------------------------------------------------------------------------------------- */

/* Prints text[0 .. n) so that roff reads it as text, without requests or escapes. */
static void put_roff(const char *text, size_t n, FILE *to) {
    size_t i;

    if (n > 0 && (text[0] == '.' || text[0] == '\'')) fputs("\\&", to);
    for (i = 0; i < n; i++) {
        if (text[i] == '\\') fputs("\\e", to);
        else if (text[i] == '-') fputs("\\-", to);
        else fputc(text[i], to);
    }
}

static void put_bold(const char *text, FILE *to) {
    fputs("\\fB", to);
    put_roff(text, strlen(text), to);
    fputs("\\fR", to);
}

static void put_italic(const char *text, FILE *to) {
    fputs("\\fI", to);
    put_roff(text, strlen(text), to);
    fputs("\\fR", to);
}

/* Prints paragraphs, which the reader's terminal wraps. Indented lines stay unchanged, and so does the line above them,
   a heading. */
static void put_paragraphs(const char *text, FILE *to) {
    int as_is = 0;

    while (*text) {
        size_t n = strcspn(text, "\n");
        const char *next = text + n + (text[n] == '\n');
        int wanted = n > 0 && (*text == ' ' || *next == ' ');

        if (wanted != as_is) fputs(wanted ? ".PP\n.nf\n" : ".fi\n", to);
        as_is = wanted;
        if (n == 0) fputs(".PP", to);
        put_roff(text, n, to);
        fputc('\n', to);
        text = next;
    }
    if (as_is) fputs(".fi\n", to);
}

static void put_option(const cli_option *option, FILE *to) {
    const char *line = option->help;

    fputs(".TP\n", to);
    put_bold(option->name, to);
    if (option->alias) {
        fputs(", ", to);
        put_bold(option->alias, to);
    }
    if (option->value) {
        fputc(' ', to);
        put_italic(option->value, to);
    }
    fputc('\n', to);
    while (*line) {
        size_t n = strcspn(line, "\n");
        put_roff(line, n, to);
        fputc('\n', to);
        line += n + (line[n] == '\n');
    }
}

static void put_command(const cli_command *command, FILE *to) {
    const cli_option *option;
    const char *at;

    fputs(".SH \"CHUNKFLOW ", to);
    for (at = command->name; *at; at++) fputc(toupper((unsigned char)*at), to);
    fputs("\"\n.B chunkflow ", to);
    put_roff(command->name, strlen(command->name), to);
    fputs("\n", to);
    for (option = command->options; option->name; option++) {
        if (!option->required) continue;
        put_bold(option->name, to);
        fputc(' ', to);
        put_italic(option->value, to);
        fputc('\n', to);
    }
    fputs("[\\fIoptions\\fR]\n", to);
    if (*command->operands) {
        put_italic(command->operands, to);
        fputc('\n', to);
    }
    fprintf(to, ".PP\n%c", toupper((unsigned char)command->summary[0]));
    put_roff(command->summary + 1, strlen(command->summary + 1), to);
    fputs(".\n", to);
    for (option = command->options; option->name; option++) put_option(option, to);
    if (command->details) {
        fputs(".PP\n", to);
        put_paragraphs(command->details, to);
    }
}

static void put_synopsis(const char *arguments, FILE *to) {
    fprintf(to, ".B chunkflow\n%s\n.br\n", arguments);
}

void manual_write_page(const cli_command *const *commands, FILE *to) {
    const cli_command *const *command;
    int i;

    fputs(".TH CHUNKFLOW 1 \"\" \"chunkflow " CHUNKFLOW_VERSION "\" \"User Commands\"\n.SH NAME\nchunkflow \\- ", to);
    put_roff(CLI_SUMMARY, strlen(CLI_SUMMARY), to);
    fputs("\n.SH SYNOPSIS\n", to);
    put_synopsis("\\fICOMMAND\\fR [\\fIoptions\\fR] [\\fIoperands\\fR]", to);
    put_synopsis("\\fICOMMAND\\fR \\-\\-help", to);
    put_synopsis("\\-\\-help | \\-\\-version", to);
    fputs(".SH COMMANDS\n", to);
    for (command = commands; *command; command++) {
        fputs(".TP\n", to);
        put_bold((*command)->name, to);
        fputc('\n', to);
        put_roff((*command)->summary, strlen((*command)->summary), to);
        fputc('\n', to);
    }
    for (command = commands; *command; command++) put_command(*command, to);
    fputs(".SH \"EXIT STATUS\"\n", to);
    for (i = 0; cli_exit_codes[i].meaning; i++) {
        fprintf(to, ".TP\n%d\n", cli_exit_codes[i].code);
        put_roff(cli_exit_codes[i].meaning, strlen(cli_exit_codes[i].meaning), to);
        fputc('\n', to);
    }
}

/* ----------------------------------------------------------------------------------------------------------------
   Completion

   Each shell asks in its own way for the command, its options, and the words of a choice or of the operands; anything
   else is the name of a file.
   ----------------------------------------------------------------------------------------------------------------
   */

/* "a|b|c" as "a b c". */
static void put_words(const char *choices, FILE *to) {
    for (; *choices; choices++) fputc(*choices == '|' ? ' ' : *choices, to);
}

/* Prints the operands that are literal words: "lmsys | uniform | histogram FILE|-" as "lmsys uniform histogram".
   Returns their number; `to` may be NULL. */
static int put_operand_words(const char *operands, FILE *to) {
    int n = 0;

    while (*operands) {
        size_t length = strspn(operands, "abcdefghijklmnopqrstuvwxyz-");
        if (length > 1 && to) fprintf(to, "%s%.*s", n > 0 ? " " : "", (int)length, operands);
        n += length > 1;
        operands += length > 0 ? length : 1;
    }
    return n;
}

/* Prints in single quotes, with fish's two escapes; a line end becomes a blank. */
static void put_quoted(const char *text, FILE *to) {
    fputc('\'', to);
    for (; *text; text++) {
        if (*text == '\'' || *text == '\\') fputc('\\', to);
        fputc(*text == '\n' ? ' ' : *text, to);
    }
    fputc('\'', to);
}

static void put_bash_case(const cli_command *command, FILE *to) {
    const cli_option *option;

    fprintf(to, "    %s)\n        case $3 in\n", command->name);
    for (option = command->options; option->name; option++) {
        if (option->kind != CLI_CHOICE) continue;
        fprintf(to, "        %s) words='", option->name);
        put_words(option->value, to);
        fputs("' ;;\n", to);
    }
    fputs("        *) [[ $2 == -* ]] && words='--help", to);
    for (option = command->options; option->name; option++) fprintf(to, " %s", option->name);
    fputs("'", to);
    if (put_operand_words(command->operands, NULL) > 0) {
        fputs("\n           [[ $2 != -* && $3 != -* ]] && words='", to);
        put_operand_words(command->operands, to);
        fputs("'", to);
    }
    fputs(" ;;\n        esac ;;\n", to);
}

static void put_bash(const cli_command *const *commands, FILE *to) {
    const cli_command *const *command;

    fputs("# bash completion for chunkflow; zsh also takes it, after bashcompinit\n"
          "_chunkflow() { # COMMAND WORD THE-WORD-BEFORE-IT\n"
          "    local words= commands='", to);
    for (command = commands; *command; command++) fprintf(to, "%s ", (*command)->name);
    fputs("'\n"
          "    COMPREPLY=()\n"
          "    if [ \"$COMP_CWORD\" -eq 1 ]; then words=\"$commands help --help --version\"\n"
          "    else case ${COMP_WORDS[1]} in\n"
          "    help) words=\"$commands man bash fish\" ;;\n", to);
    for (command = commands; *command; command++) put_bash_case(*command, to);
    fputs("    esac; fi\n"
          "    [ -z \"$words\" ] || COMPREPLY=($(compgen -W \"$words\" -- \"$2\"))\n"
          "}\n"
          "complete -o default -F _chunkflow chunkflow\n", to);
}

static void put_fish_option(const cli_command *command, const cli_option *option, FILE *to) {
    const char *name = option->name + strspn(option->name, "-");
    const char *kind = name[1] ? "-l " : option->name[1] == '-' ? "-o -" : "-s "; /* `-l k` would be -k, not --k */

    fprintf(to, "complete -c chunkflow -n '__fish_seen_subcommand_from %s' %s%s", command->name, kind, name);
    if (option->kind == CLI_CHOICE) {
        fputs(" -x -a '", to);
        put_words(option->value, to);
        fputc('\'', to);
    } else if (option->kind != CLI_FLAG) {
        fputs(" -r", to);
    }
    fputs(" -d ", to);
    put_quoted(option->help, to);
    fputc('\n', to);
}

static void put_fish(const cli_command *const *commands, FILE *to) {
    const cli_command *const *command;
    const cli_option *option;

    fputs("# fish completion for chunkflow\n"
          "complete -c chunkflow -n __fish_use_subcommand -x -a help -d 'help on a command'\n"
          "complete -c chunkflow -n '__fish_seen_subcommand_from help' -x -a 'man bash fish'\n"
          "complete -c chunkflow -n __fish_use_subcommand -l version -d 'print the version'\n"
          "complete -c chunkflow -l help -d 'print help'\n", to);
    for (command = commands; *command; command++) {
        fprintf(to,
                "complete -c chunkflow -n '__fish_use_subcommand; or __fish_seen_subcommand_from help' -x -a %s -d ",
                (*command)->name);
        put_quoted((*command)->summary, to);
        fputc('\n', to);
        for (option = (*command)->options; option->name; option++) put_fish_option(*command, option, to);
        if (put_operand_words((*command)->operands, NULL) == 0) continue;
        fprintf(to, "complete -c chunkflow -n '__fish_seen_subcommand_from %s' -a '", (*command)->name);
        put_operand_words((*command)->operands, to);
        fputs("'\n", to);
    }
}

void manual_write_completion(const cli_command *const *commands, manual_shell shell, FILE *to) {
    if (shell == MANUAL_BASH) put_bash(commands, to);
    else put_fish(commands, to);
}
