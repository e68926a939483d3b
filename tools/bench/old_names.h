/* old_names.h - names of a header from before 0.1.0, so that it can be measured as well. */

#ifdef CF_SHARE_LEAST
#define cf_lockstep_plan cf_columns_make
#define chunks_per_rank n_steps
#define chain group
#define chains groups
#define cp gang
#define max_cp gang
#define cp_row_seconds gang_seconds
#define max_tries budget
#define rows padded
#endif
