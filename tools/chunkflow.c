/* chunkflow.c - the chunkflow command: plans and schedules of chunked training, on the command line.

   Each subcommand is a file cmd_*.c; cli.h says what they share and how to add one. */

#define CHUNKFLOW_IMPLEMENTATION
#include "cli.h"

#define CHUNKFLOW_TUNE_IMPLEMENTATION
#include "chunkflow_tune.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

static const cli_command *const commands[] = {
    &cmd_lengths, &cmd_gen, &cmd_pack, &cmd_plan, &cmd_compare, &cmd_report, &cmd_check, &cmd_memory,
    &cmd_time, &cmd_tune,
};

#define N_COMMANDS (sizeof commands / sizeof commands[0])

static const cli_command *find_command(const char *name) {
    size_t i;
    for (i = 0; i < N_COMMANDS; i++)
        if (strcmp(commands[i]->name, name) == 0) return commands[i];
    return NULL;
}

static void print_overview(FILE *to) {
    size_t i;

    fputs("usage: chunkflow COMMAND [options] [operands]\n"
          "       chunkflow COMMAND --help | --help | --version\n\n"
          "Packs batches of long-tailed sequences into chunks of one size and orders their passes.\n\ncommands\n", to);
    for (i = 0; i < N_COMMANDS; i++) fprintf(to, "  %-10s%s\n", commands[i]->name, commands[i]->summary);
    fputs("\nexit code\n"
          "  0         done\n"
          "  1         could not be done: no memory, a file cannot be written; check: the file breaks a rule\n"
          "  2         the command line or the input is wrong; nothing was written\n", to);
}

/* A closed standard stream would lend its number to the next file that is opened, and the report would end up in that
   file. So the number is taken, the wrong way round: using it fails, and that is reported as for any file. */
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

/* chunkflow help [COMMAND] */
static int run_help(int argc, char **argv) {
    const cli_command *command = argc > 0 ? find_command(argv[0]) : NULL;

    if (argc > 0 && strcmp(argv[0], "--help") != 0 && !command) return cli_usage(NULL, "unknown command '%s'", argv[0]);
    if (command) cli_print_help(command, stdout);
    else print_overview(stdout);
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
    if (!command) return cli_usage(NULL, "unknown %s '%s'", name[0] == '-' ? "option" : "command", name);
    return run_command(command, argc - 2, argv + 2);
}

int main(int argc, char **argv) {
    if (!take_standard_streams()) return CLI_FAILED;
    if (argc < 2) {
        print_overview(stderr);
        return CLI_WRONG;
    }
    return cli_outputs_finish(NULL, 0, dispatch(argc, argv));
}
