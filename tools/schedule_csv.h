/* schedule_csv.h - schedules as CSV in the form that PyTorch's pipelining reads and writes: a row per stage and no
   header; a cell is <virtual stage><pass><chunk of the rank, from 0>, as in "2B0" or "3SEND_F1"; an empty cell is a
   time step without work. Both functions are like the library's own: they print nothing, and what is wrong is a result
   code and a record. */

#ifndef CHUNKFLOW_SCHEDULE_CSV_H
#define CHUNKFLOW_SCHEDULE_CSV_H

#include "../chunkflow.h"

typedef enum schedule_csv_format {
    SCHEDULE_CSV_AUTO = 0,      /* writing: COMMS if the schedule is lowered. Reading: if a transfer is in the text */
    SCHEDULE_CSV_COMPUTE_ONLY,  /* passes and empty cells */
    SCHEDULE_CSV_COMPUTE_COMMS, /* passes and transfers; no empty cells */
    SCHEDULE_CSV_FORMAT_COUNT
} schedule_csv_format;

/* Zero means default in every member. */
typedef struct schedule_csv_desc {
    int extensions;             /* writing: 1: passes that PyTorch does not know may be written: R, SEND_R, RECV_R,
                                   OFFLOAD, PREFETCH. Reading takes them always */
    schedule_csv_format format; /* 0: auto */
    int legacy;                 /* reading: 1: B is the gradient of the inputs only (now I), BW the whole backward (now
                                   B) */
    cf_schedule_kind kind;      /* reading: the label that the schedule gets; 0 says that it is nobody's */
    cf_replay replay;           /* reading: how an R comes back. 0: pipeline */
    int64_t k;                  /* reading: the schedule's K. 0: the least that allows what is in the text */
    int64_t rank;               /* reading: which rank of the plan this is */
    const cf_allocator *allocator;
} schedule_csv_desc;

/* Writes a schedule that cf_schedule_validate accepts, with CRLF line ends and without empty cells. COMPUTE_ONLY
   leaves the transfers of a lowered schedule out; COMPUTE_COMMS of one that is not lowered is CF_ERROR_ARGUMENT. A pass
   that needs `extensions` is CF_ERROR_ARGUMENT without them, with its index in error->item: PyTorch runs no forward
   twice, so such a file is only for this library and for people. Other errors are those of cf_schedule_validate and
   CF_ERROR_WRITE, with the callback's number; with any but that one, nothing was written. desc: NULL for all zero. */
cf_result schedule_csv_write(const cf_plan *plan, const cf_schedule *schedule, const schedule_csv_desc *desc,
                             cf_write_fn write, void *user, cf_error *error);

/* Reads a schedule of the plan's chunks: `bytes` bytes of text, lines ended by LF or CRLF. Every cell must be one
   action from its first character to its last, spaces and tabs around it apart. The number of rows is the number of
   stages. The virtual stages lie on them in loops (v on row v mod rows) or in a V (0, 1, .. and back again), which the
   rows show. An F keeps its activations unless R of that chunk is in the row.

   *out: a new schedule that cf_schedule_validate accepts, to be given to cf_schedule_free; untouched on failure.
   Errors: CF_ERROR_TEXT with the line (from 1) in error->item and the column (in bytes, from 1) in error->got, those of
   cf_schedule_validate, CF_ERROR_ARGUMENT, CF_ERROR_LIMIT, CF_ERROR_MEMORY. */
cf_result schedule_csv_read(const char *text, size_t bytes, const cf_plan *plan, const schedule_csv_desc *desc,
                            cf_schedule **out, cf_error *error);

#endif /* CHUNKFLOW_SCHEDULE_CSV_H */
