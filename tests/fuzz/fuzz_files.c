/* The command's own reading of files and its messages, with memory in their place: cli.c and cli_files.c as they are,
   but for what they open and where they print. */

#define _XOPEN_SOURCE 700
#define _DEFAULT_SOURCE
#define _DARWIN_C_SOURCE
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>

static const void *file_data;
static size_t file_size;

static FILE *messages;
static char message[8192];

/* Whatever is asked for, it has the bytes of the input. */
static FILE *open_input(const char *path, const char *mode) {
    (void)path;
    if (file_size == 0) return fopen("/dev/null", mode);
    return fmemopen((void *)(uintptr_t)file_data, file_size, "r");
}

void fuzz_file(const void *data, size_t size) {
    file_data = data;
    file_size = size;
    if (messages == NULL) messages = fmemopen(message, sizeof message, "w");
    if (messages == NULL) abort();
    rewind(messages);
    memset(message, 0, strlen(message)); /* a short message ends where the one before it went on */
}

int fuzz_exit(int code) {
    size_t n, i;
    fflush(messages);
    n = strlen(message);
    if (code == 0) {
        FUZZ_CHECK(n == 0, "all is well, and it said: %s", message);
        return 1;
    }
    FUZZ_CHECK(code == 1 || code == 2, "exit code %d", code);
    FUZZ_CHECK(n > 1 && strchr(message, '\n') == message + n - 1, "not one line: '%s'", message);
    for (i = 0; i + 1 < n; i++)
        FUZZ_CHECK(message[i] >= 32 && message[i] < 127, "not fit to be printed: '%s'", message);
    return 0;
}

#undef stderr
#define stderr messages
#define fopen(path, mode) open_input(path, mode)
#undef _DEFAULT_SOURCE /* the headers have given it a value, and the file defines it without one */
#include "../../tools/command/cli.c"
#include "../../tools/command/cli_files.c"
