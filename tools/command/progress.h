/* progress.h - a line on standard error that shows a command's progress. It appears only if standard error is a
   terminal and the work takes longer than a second, and it is erased before anything else is printed. */

#ifndef CHUNKFLOW_PROGRESS_H
#define CHUNKFLOW_PROGRESS_H

#include <stdint.h>

/* Returns whether a file descriptor is a terminal that can move its cursor. */
int progress_is_terminal(int fd);

/* Returns the columns of a line there, from COLUMNS or the terminal; 0: not known. At most 10,000. */
int64_t progress_columns(int fd);

/* Starts a timer that writes the line, so that it also moves during one long call of the library. what: such as
   "packing". If other work has begun and not ended, only that is shown. Call progress_end afterwards. */
void progress_begin(const char *what);

/* Sets the progress: a bar, if total is above 0, followed by a few words. */
void progress_set(int64_t done, int64_t total, const char *words);

/* Erase the line: the first for good, the second for now because something else is printed. Signal handlers may call
   the second. */
void progress_end(void);
void progress_clear(void);

#endif /* CHUNKFLOW_PROGRESS_H */
