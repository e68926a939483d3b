/* schedule_csv.h - schedules as CSV in the form that PyTorch's pipelining reads and writes: a row per stage and no
   header. A cell is <virtual stage><pass><microbatch>, such as "2B0" or "3SEND_F1"; an empty cell is a time step
   without work. Like the library's functions, these print nothing: errors are a result code and a record.

   PyTorch's runtime looks up the loss of microbatch m at index m of the losses, which are in the order in which the
   last stage computed them. So a file numbers its microbatches in the order of the last virtual stage's forwards, which
   may differ from the order of the chunks. schedule_csv_microbatches gives the chunk of each microbatch. */

#ifndef CHUNKFLOW_SCHEDULE_CSV_H
#define CHUNKFLOW_SCHEDULE_CSV_H

#include "../../chunkflow.h"

typedef enum schedule_csv_format {
    SCHEDULE_CSV_DEFAULT = 0,   /* writing: COMPUTE_ONLY. Reading: the format of the text */
    SCHEDULE_CSV_COMPUTE_ONLY,  /* no transfers; any version of PyTorch adds them */
    SCHEDULE_CSV_COMPUTE_COMMS, /* passes and transfers; no empty cells */
    SCHEDULE_CSV_FORMAT_COUNT
} schedule_csv_format;

/* The PyTorch version for a file with transfers, which runs only the actions in the file. */
typedef enum schedule_csv_torch {
    SCHEDULE_CSV_TORCH_2_9 = 0, /* 2.9 and older: transfers only */
    SCHEDULE_CSV_TORCH_2_14,    /* 2.10 to 2.14: REDUCE_GRAD after a stage's last backward, without which gradients are
                                   neither scaled nor exchanged */
    SCHEDULE_CSV_TORCH_2_15,    /* 2.15: also a wait for each send and each REDUCE_GRAD, which 2.14 would read as W */
    SCHEDULE_CSV_TORCH_COUNT
} schedule_csv_torch;

/* Passes of PyTorch's files that a cf_schedule does not have. They include transfers only if `buffered` is set. */
#define SCHEDULE_CSV_EXTRAS(X)                           \
    X(SCHEDULE_CSV_EMPTY, "")                            \
    X(SCHEDULE_CSV_UNSHARD, "UNSHARD")                   \
    X(SCHEDULE_CSV_RESHARD, "RESHARD")                   \
    X(SCHEDULE_CSV_REDUCE_GRAD, "REDUCE_GRAD")           \
    X(SCHEDULE_CSV_WAIT_REDUCE_GRAD, "WAIT_REDUCE_GRAD") \
    X(SCHEDULE_CSV_WAIT_SEND_F, "WAIT_SEND_F")           \
    X(SCHEDULE_CSV_WAIT_SEND_B, "WAIT_SEND_B")           \
    X(SCHEDULE_CSV_SEND_F, "SEND_F")                     \
    X(SCHEDULE_CSV_RECV_F, "RECV_F")                     \
    X(SCHEDULE_CSV_SEND_B, "SEND_B")                     \
    X(SCHEDULE_CSV_RECV_B, "RECV_B")

#define SCHEDULE_CSV_VALUE(value, name) value,
typedef enum schedule_csv_extra_kind {
    SCHEDULE_CSV_EXTRAS(SCHEDULE_CSV_VALUE) SCHEDULE_CSV_EXTRA_COUNT
} schedule_csv_extra_kind;
#undef SCHEDULE_CSV_VALUE

typedef struct schedule_csv_extra {
    int64_t before; /* its place: just before schedule->actions[before], or after the row's last action */
    int32_t row;    /* stage of the schedule */
    int32_t stage;  /* virtual stage; 0 for EMPTY */
    int32_t chunk;  /* for the last six kinds: index into plan->chunks; 0 for the others */
    int32_t kind;   /* a schedule_csv_extra_kind */
} schedule_csv_extra;

/* The extras of a file, in its order. */
typedef struct schedule_csv_extras {
    int64_t n;
    schedule_csv_extra *items; /* (n) */
    cf_block block;            /* its memory */
} schedule_csv_extras;

/* Zero means default in every member. */
typedef struct schedule_csv_desc {
    /* writing: 1: may write schedules that PyTorch cannot run. Reading always accepts them */
    int extensions;
    schedule_csv_format format; /* 0: the default */
    schedule_csv_torch torch;   /* writing COMPUTE_COMMS. 0: 2.9 and older */
    int legacy;                 /* reading: 1: B is the gradient of the inputs only (now I), BW the whole backward (now
                                   B) */
    int buffered;               /* reading: 1: sends do not wait for their receivers, as in PyTorch. The schedule then
                                   has only the passes, and transfers are extras. 0: the schedule has the transfers, and
                                   lists that deadlock without buffers are refused */
    int forward_only;           /* reading: 1: there are no backwards. 0: a text without backwards is an error */
    cf_schedule_kind kind;      /* reading: the schedule's label; 0: unknown origin */
    cf_replay replay;           /* reading: kind of replay. 0: pipeline */
    int64_t k;                  /* reading: the schedule's K. 0: the smallest that the text allows */
    int64_t rank;               /* reading: the rank of the plan */
    const int32_t *chunks;      /* reading: (chunks_per_rank) the chunk of each microbatch, from
                                   schedule_csv_microbatches. NULL: microbatches are numbered like the chunks */
    const schedule_csv_extras *extras; /* writing: extras that were read with the schedule, written at their places;
                                          nothing is then added for `torch`. NULL: none */
    const cf_allocator *allocator;
} schedule_csv_desc;

/* Writes a schedule that cf_schedule_validate accepts, with CRLF line ends. COMPUTE_ONLY leaves out the transfers of a
   lowered schedule and the waits for them. COMPUTE_COMMS of a schedule that is not lowered is CF_ERROR_ARGUMENT.

   Without `extensions`, anything that PyTorch cannot run is CF_ERROR_ARGUMENT, with the reason in error->text. This
   applies to a dependent chunk ("chunks" and its index), because PyTorch's files do not pass on its keys, values and
   their gradients. It also applies to R, SEND_R and RECV_R ("actions.pass" and the index), which have no name there.
   With `extensions` the file is for this library, for people, and for stages that keep the state themselves.

   Other errors are those of cf_schedule_validate, CF_ERROR_MEMORY, and CF_ERROR_WRITE with the callback's number.
   Nothing is written except with CF_ERROR_WRITE. desc: NULL for all zero. */
cf_result schedule_csv_write(const cf_plan *plan, const cf_schedule *schedule, const schedule_csv_desc *desc,
                             cf_write_fn write, void *user, cf_error *error);

/* Reads a schedule of the plan's chunks: `bytes` bytes of text, with lines ended by LF or CRLF. Every cell must be
   exactly one action, except for spaces and tabs around it. The number of rows is the number of stages. The rows show
   whether virtual stages are placed in loops (v on row v mod rows) or in a V (0, 1, .. and back again). An F keeps its
   activations unless the row has an R of its chunk. Everything that PyTorch writes is accepted except OVERLAP_F_B, two
   passes that run as one.

   *out: a new schedule that cf_schedule_validate accepts; free it with cf_schedule_free. *extras: the cells between its
   actions; free it with schedule_csv_extras_free (extras may be NULL). From both, schedule_csv_write writes each cell
   as it was read. They are untouched on failure. Errors: CF_ERROR_TEXT with the line (from 1) in error->item and the
   column (in bytes, from 1) in error->got, those of cf_schedule_validate, CF_ERROR_ARGUMENT, CF_ERROR_LIMIT,
   CF_ERROR_MEMORY. */
cf_result schedule_csv_read(const char *text, size_t bytes, const cf_plan *plan, const schedule_csv_desc *desc,
                            cf_schedule **out, schedule_csv_extras **extras, cf_error *error);

/* Frees extras; NULL does nothing. */
void schedule_csv_extras_free(schedule_csv_extras *extras);

/* Finds the chunks (indices into plan->chunks) in the order of the last virtual stage's forwards: chunks[m] is
   microbatch m. chunks: (plan->chunks_per_rank), untouched on failure. Errors: those of cf_schedule_validate. */
cf_result schedule_csv_microbatches(const cf_plan *plan, const cf_schedule *schedule, int32_t *chunks,
                                    cf_error *error);

/* Write and read that order as text: the line "microbatch,chunk", then a line of these two numbers for each microbatch,
   from 0 up. Errors: as above. */
cf_result schedule_csv_write_microbatches(const cf_plan *plan, const cf_schedule *schedule, cf_write_fn write,
                                          void *user, cf_error *error);
cf_result schedule_csv_read_microbatches(const char *text, size_t bytes, const cf_plan *plan, int64_t rank,
                                         int32_t *chunks, cf_error *error);

/* Renumbers the chunks of the schedule's rank in that order, in the plan and in the schedule, so that microbatch m is
   the rank's chunk m. The slices move with their chunks. Errors: CF_ERROR_ARGUMENT ("chunks" and the index) if the rank
   has a dependent chunk, whose chain must stay together; those of cf_schedule_validate; CF_ERROR_MEMORY. Plan and
   schedule are untouched on failure. allocator: for working space; NULL: malloc. */
cf_result schedule_csv_renumber(cf_plan *plan, cf_schedule *schedule, const cf_allocator *allocator, cf_error *error);

#endif /* CHUNKFLOW_SCHEDULE_CSV_H */
