/* chunkflow.c - the chunkflow command: plans and schedules of chunked training on the command line. Each subcommand is
   a file cmd_*.c; cli.h says what they share and how to add one. */

#define CHUNKFLOW_IMPLEMENTATION
#include "manual.h"

#define CHUNKFLOW_TUNE_IMPLEMENTATION
#include "../chunkflow_tune.h"

#include <ctype.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

static const cli_command *const commands[] = {
    &cmd_lengths, &cmd_gen, &cmd_pack, &cmd_plan, &cmd_compare, &cmd_report, &cmd_check, &cmd_memory,
    &cmd_time, &cmd_tune, &cmd_reproduce, NULL,
};

static const cli_command *find_command(const char *name) {
    const cli_command *const *command;
    for (command = commands; *command; command++)
        if (strcmp((*command)->name, name) == 0) return *command;
    return NULL;
}

static int refuse_command(const char *name) {
    cli_guess guess = {NULL, NULL, 0};
    const cli_command *const *command;

    guess.word = name;
    for (command = commands; *command; command++) cli_guess_offer(&guess, (*command)->name);
    return cli_usage(NULL, "unknown %s '%s'%s", name[0] == '-' ? "option" : "command", name, cli_guess_text(&guess));
}

static void print_overview(FILE *to) {
    const cli_command *const *command;
    int i;

    fprintf(to, "usage: chunkflow COMMAND [options] [operands]\n"
                "       chunkflow COMMAND --help | --help | --version\n"
                "       chunkflow help [COMMAND | man | bash | fish]\n\n"
                "%c%s.\n\ncommands\n", toupper((unsigned char)CLI_SUMMARY[0]), &CLI_SUMMARY[1]);
    for (command = commands; *command; command++) fprintf(to, "  %-10s%s\n", (*command)->name, (*command)->summary);
    fputs("  help      this text, a command's, the manual page (man), or a shell's completion (bash, fish)\n"
          "\nexit code\n", to);
    for (i = 0; cli_exit_codes[i].meaning; i++)
        fprintf(to, "  %-10d%s\n", cli_exit_codes[i].code, cli_exit_codes[i].meaning);
}

/* Opens closed standard streams, in the wrong direction. Otherwise the next opened file would get the stream's number,
   and the report would end up in that file. Using such a stream then fails, and is reported like any file error. */
static int take_standard_streams(void) {
    int fd;
    for (fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY) != fd) return 0;
    return 1;
}

static int run_command(const cli_command *command, int argc, char **argv) {
    void *options = malloc(command->options_size);
    int n_operands = 0, code = CLI_FAILED;

    if (!options) return cli_failed("out of memory");
    memcpy(options, command->defaults, command->options_size);
    if (cli_parse(command, argc, argv, options, &n_operands, &code)) code = command->run(options, argv, n_operands);
    free(options);
    return code;
}

/* Runs chunkflow help [COMMAND | man | bash | fish]. */
static int run_help(int argc, char **argv) {
    const char *topic = argc > 0 && strcmp(argv[0], "--help") != 0 ? argv[0] : "";
    const cli_command *command = find_command(topic);

    if (command) cli_print_help(command, stdout);
    else if (strcmp(topic, "man") == 0) manual_write_page(commands, stdout);
    else if (strcmp(topic, "bash") == 0) manual_write_completion(commands, MANUAL_BASH, stdout);
    else if (strcmp(topic, "fish") == 0) manual_write_completion(commands, MANUAL_FISH, stdout);
    else if (*topic) return refuse_command(topic);
    else print_overview(stdout);
    (void)cli_stdout_failed(); /* if a write has failed, errno still says why */
    return CLI_OK;
}

static int dispatch(int argc, char **argv) {
    const char *name = argv[1];
    const cli_command *command;

    if (strcmp(name, "help") == 0) return run_help(argc - 2, argv + 2);
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) return run_help(0, NULL);
    if (strcmp(name, "--version") == 0) {
        puts("chunkflow " CHUNKFLOW_VERSION);
        return CLI_OK;
    }
    command = find_command(name);
    if (!command) return refuse_command(name);
    return run_command(command, argc - 2, argv + 2);
}

int main(int argc, char **argv) {
    if (!take_standard_streams()) return CLI_FAILED;
    cli_signals_catch();
    if (argc < 2) {
        print_overview(stderr);
        return CLI_WRONG;
    }
    return cli_outputs_finish(NULL, 0, dispatch(argc, argv));
}
