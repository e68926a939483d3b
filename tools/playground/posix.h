/* posix.h - what the command uses of POSIX and WASI lacks. It is included before every file that is compiled for a
   browser: there no signal comes, no other program runs, and there is one thread. */

#ifndef CHUNKFLOW_PLAYGROUND_POSIX_H
#define CHUNKFLOW_PLAYGROUND_POSIX_H

#define _GNU_SOURCE
#define _WASI_EMULATED_SIGNAL
#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/time.h>

/* ---- signals ---- */

typedef struct posix_signals {
    int none;
} posix_signals;

struct sigaction {
    void (*sa_handler)(int);
    posix_signals sa_mask;
    int sa_flags;
};

#define sigset_t posix_signals
enum { SA_RESETHAND = 1, SA_RESTART = 2, SIG_BLOCK = 1, SIG_SETMASK = 2 };

#define sigaction(number, action, before) ((void)(number), (void)(action), (void)(before), 0)
#define sigprocmask(how, set, before) ((void)(how), (void)(set), (void)(before), 0)
#define pthread_sigmask sigprocmask
#define sigemptyset(set) ((void)(set))
#define sigfillset(set) ((void)(set))
#define sigaddset(set, number) ((void)(set), (void)(number))
#define alarm(seconds) ((void)(seconds))

struct itimerval {
    struct timeval it_interval, it_value;
};
enum { ITIMER_REAL };
#define setitimer(which, timer, before) ((void)(timer), 0)

/* ---- files, users and terminals ---- */

enum { TIOCGWINSZ = 1 };

struct winsize {
    int ws_col;
};

#define flock(file, how) ((void)(file), 0)
#define dup(file) (file)
#define umask(mask) (mode_t)0
#define fchmod(file, mode) ((void)(file), (void)(mode), 0)
#define geteuid() ((uid_t)0)
#define ioctl(file, what, size) ((void)(size), -1)
#define realpath(path, resolved) strdup(path)

#endif /* CHUNKFLOW_PLAYGROUND_POSIX_H */
