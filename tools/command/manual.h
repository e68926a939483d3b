/* manual.h - the command's manual page and shell completions, from the option tables that the parser and the help
   use. */

#ifndef CHUNKFLOW_MANUAL_H
#define CHUNKFLOW_MANUAL_H

#include "cli.h"

/* zsh can load bash's file once `bashcompinit` has run. */
typedef enum manual_shell { MANUAL_BASH, MANUAL_FISH } manual_shell;

/* Writes the page for `man`, section 1. `commands` ends with NULL. */
void manual_write_page(const cli_command *const *commands, FILE *to);

/* Writes the file that a shell loads to complete commands, options, the words of a choice and names of files. */
void manual_write_completion(const cli_command *const *commands, manual_shell shell, FILE *to);

#endif /* CHUNKFLOW_MANUAL_H */
