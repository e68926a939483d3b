/* progress.h - a line on standard error that says how far a command is. It is there only where standard error is a
   terminal and the work takes longer than a second, and it is gone before anything else is printed. */

#ifndef CHUNKFLOW_PROGRESS_H
#define CHUNKFLOW_PROGRESS_H

#include <stdint.h>

/* Returns whether a file descriptor is a terminal that can do more than print lines. */
int progress_is_terminal(int fd);

/* Returns how many columns a line has there: as COLUMNS says, or the terminal; 0: not known. At most 10,000. */
int64_t progress_columns(int fd);

/* From here on a timer writes the line, so that it moves inside one long call of the library, too. what: "packing".
   Where work is part of other work that has begun, only the latter is shown. progress_end is due. */
void progress_begin(const char *what);

/* Sets the progress: a bar, if total is above 0, and a few words behind it. */
void progress_set(int64_t done, int64_t total, const char *words);

/* Erases the line for good; for now, because something else is printed. The latter may be called by signal handlers. */
void progress_end(void);
void progress_clear(void);

#endif /* CHUNKFLOW_PROGRESS_H */
