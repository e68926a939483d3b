/* progress.c - shows a command's progress. */

#define _XOPEN_SOURCE 700 /* sigaction, setitimer, clock_gettime */
#define _DEFAULT_SOURCE   /* TIOCGWINSZ, on Linux */
#define _DARWIN_C_SOURCE  /* and elsewhere */
#include "progress.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { BAR_WIDTH = 30, LINE_BYTES = 200 };

/* The handler's state. progress_set writes the text that is not current, and then makes it the current one. */
static const char *what;
static char texts[2][LINE_BYTES];
static volatile sig_atomic_t current, shown;
static int depth;
static size_t width; /* width of the terminal: a longer line could not be erased */
static time_t begun;
static struct sigaction before;

int progress_is_terminal(int fd) {
    const char *kind = getenv("TERM");
    return isatty(fd) && !(kind && strcmp(kind, "dumb") == 0);
}

int64_t progress_columns(int fd) {
    const char *said = getenv("COLUMNS");
    long columns = said ? strtol(said, NULL, 10) : 0;
    struct winsize size;

    if (columns <= 0) columns = isatty(fd) && ioctl(fd, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
    return columns < 10000 ? columns : 10000;
}

/* Writes a text whose loss does not matter, with calls that a signal handler may make. */
static void put(const char *text, size_t n) {
    ssize_t written = write(STDERR_FILENO, text, n);
    (void)written; /* a lost terminal is no reason to stop */
}

static size_t append(char *line, size_t at, const char *text) {
    while (*text && at < width) line[at++] = *text++;
    return at;
}

/* "packing, 12 s  [####......] 40 %  words" */
static void show(int number) {
    char line[LINE_BYTES + 64], digits[24];
    struct timespec now;
    size_t at = 0, n = sizeof digits;
    long long seconds;
    int kept = errno;

    (void)number;
    clock_gettime(CLOCK_MONOTONIC, &now);
    seconds = (long long)(now.tv_sec - begun);
    digits[--n] = '\0';
    do digits[--n] = (char)('0' + seconds % 10);
    while ((seconds /= 10) > 0);
    at = append(line, at, "\r");
    at = append(line, at, what);
    at = append(line, at, ", ");
    at = append(line, at, digits + n);
    at = append(line, at, " s");
    at = append(line, at, texts[current]);
    memcpy(line + at, "\033[K", 3);
    shown = 1;
    put(line, at + 3);
    errno = kept;
}

static void find_width(void) {
    struct winsize size;

    width = 80;
    if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1) width = size.ws_col;
    if (width > LINE_BYTES) width = LINE_BYTES;
}

static void set_timer(long first, long every) {
    struct itimerval timer;

    memset(&timer, 0, sizeof timer);
    timer.it_value.tv_sec = first;
    timer.it_interval.tv_usec = every;
    setitimer(ITIMER_REAL, &timer, NULL);
}

void progress_begin(const char *name) {
    struct sigaction handler;
    struct timespec now;

    if (depth++ > 0 || !progress_is_terminal(STDERR_FILENO)) return;
    clock_gettime(CLOCK_MONOTONIC, &now);
    begun = now.tv_sec;
    what = name;
    texts[current][0] = '\0';
    find_width();
    memset(&handler, 0, sizeof handler);
    handler.sa_handler = show;
    handler.sa_flags = SA_RESTART;
    sigaction(SIGALRM, &handler, &before);
    set_timer(1, 200000);
}

void progress_set(int64_t done, int64_t total, const char *words) {
    char *text = texts[1 - current], bar[BAR_WIDTH + 1];
    int full = total > 0 ? (int)((double)done / (double)total * BAR_WIDTH) : 0;

    if (depth != 1 || !what) return;
    if (full > BAR_WIDTH) full = BAR_WIDTH;
    memset(bar, '.', BAR_WIDTH);
    memset(bar, '#', (size_t)full);
    bar[BAR_WIDTH] = '\0';
    if (total > 0)
        snprintf(text, LINE_BYTES, "  [%s] %3d %%  %s", bar, (int)(100 * (double)done / (double)total), words);
    else snprintf(text, LINE_BYTES, "  %s", words);
    current = 1 - current;
}

void progress_end(void) {
    if (--depth > 0 || !what) return;
    set_timer(0, 0);
    sigaction(SIGALRM, &before, NULL);
    what = NULL;
    progress_clear();
}

void progress_clear(void) {
    if (shown) put("\r\033[K", 4);
    shown = 0;
}
