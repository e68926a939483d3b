/* cmd_tune.c - chunkflow tune: finds the fastest ChunkSize, K and schedule that fit. */

#define _POSIX_C_SOURCE 200809L

#include "tune.h"
#include "../command/progress.h"
#include "../command/table.h"
#include "../command/workers.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const tune_options defaults = {.gpu = GPU_DEFAULTS, .batch = 256, .batches = 16, .seed = 1,
                                      .replay = CF_REPLAY_LOCAL, .terms = TERM_DEFAULTS, .reserve = CF_TUNE_RESERVE,
                                      .tolerance = 1000000, .show = 10};

static const cli_option options[] = {
    MODELLING_OPTIONS(tune_options, modelling),
    GPU_OPTIONS(tune_options, gpu, "required"),
    {.name = "--gpus", .value = "N", .kind = CLI_NUMBER, .offset = offsetof(tune_options, gpus), .min = 1,
     .max = CF_MAX_RANKS,
     .help = "how many: searches those of --tp, --pp and --dp that are not\n"
     "given, instead of their defaults; without it there is one split"},
    {.name = "--costs", .value = "FILE", .kind = CLI_TEXT, .offset = offsetof(tune_options, costs),
     .help = "what time --json wrote, estimated or fitted to your own\n"
     "measurements, in place of the GPU's numbers; for one split"},
    {.name = "--context", .value = "N", .kind = CLI_NUMBER, .offset = offsetof(tune_options, context), .min = 1,
     .max = CF_MAX_LENGTH, .help = "a promise: a sequence of so many tokens fits, though the list may\n"
     "have none so long. Longer ones are left out, and it says how many"},
    {.name = "--batch", .value = "N", .kind = CLI_NUMBER, .offset = offsetof(tune_options, batch), .min = 1,
     .max = CLI_MAX_SEQUENCES, .help = "sequences of a batch, over all ranks; default 256. Each\n"
     "answer to a shared prompt is one"},
    CLI_MAX_SEQUENCES_OPTION(tune_options, max_sequences),
    {.name = "--batches", .value = "N", .kind = CLI_NUMBER, .offset = offsetof(tune_options, batches), .min = 1,
     .max = CF_MAX_TUNE_BATCHES, .help = "batches to draw from the list; default 16"},
    {.name = "--seed", .value = "S", .kind = CLI_NUMBER, .offset = offsetof(tune_options, seed), .max = INT64_MAX,
     .help = "another seed, other batches; default 1"},
    {.name = "--chunk-size", .alias = "--chunk-sizes", .value = "N,N,...",
     .kind = CLI_TEXT, .offset = offsetof(tune_options, chunk_sizes),
     .help = "ChunkSizes to try, rising; default 1K,2K,...,128K, the longest\n"
     "sequence, which splits nothing, and sizes that deal batches out evenly"},
    {.name = "--k", .alias = "--ks", .value = "K,K,...", .kind = CLI_TEXT, .offset = offsetof(tune_options, ks),
     .help = "K to try, rising; default 1,2,4,8,16,32"},
    {.name = "--schedules", .value = "NAME,...", .kind = CLI_TEXT, .offset = offsetof(tune_options, schedules),
     .help = "of paper, gpipe, 1f1b, zero-bubble, best, and with --virtual\n"
     "interleaved, best; default paper,1f1b,best, and with --virtual\n"
     "interleaved,best"},
    {.name = "--replay", .value = "pipeline|local|both", .kind = CLI_CHOICE, .offset = offsetof(tune_options, replay),
     .help = "how dropped forwards come back; default local, and\nthrough the pipeline in paper alone"},
    {.name = "--no-stream", .kind = CLI_FLAG, .offset = offsetof(tune_options, no_stream),
     .help = "never stream state from host memory, not even where\nnothing else fits"},
    {.name = "--no-outputs", .kind = CLI_FLAG, .offset = offsetof(tune_options, no_outputs),
     .help = "no dropped chunk keeps attention's outputs; default: on the\n"
     "GPU where they fit, else in host memory, and with --outputs there"},
    {.name = "--split-backward", .kind = CLI_FLAG, .offset = offsetof(tune_options, split_backward),
     .help = "best may cut backwards into input and weight gradients"},
    {.name = "--max-tries", .value = "N", .kind = CLI_NUMBER, .offset = offsetof(tune_options, max_tries), .min = 1,
     .max = INT64_MAX, .help = "schedules that best tries for each batch; default 8 to 64"},
    {.name = "--limit-bytes", .value = "BYTES", .kind = CLI_NUMBER, .offset = offsetof(tune_options, limit), .min = 1,
     .max = INT64_MAX / 1000, .help = "memory of each GPU; default the GPU's less the reserve"},
    RESERVE_OPTION(tune_options, reserve),
    {.name = "--tolerance", .value = "PERCENT", .kind = CLI_MILLIONTHS, .offset = offsetof(tune_options, tolerance),
     .max = 100000000, .help = "how much slower than the fastest the best may be where it needs\n"
     "less memory or is simpler; default 1"},
    TERM_OPTIONS(tune_options, terms),
    STREAM_OPTION(tune_options, stream),
    {.name = "--no-tails", .kind = CLI_FLAG, .offset = offsetof(tune_options, no_tails),
     .help = "leave a chain's last chunk alone, as the paper does"},
    {.name = "--align", .value = "A", .kind = CLI_NUMBER, .offset = offsetof(tune_options, align), .min = 1,
     .max = CF_MAX_CHUNK_SIZE, .help = "start slices at multiples of A; divides every chunk size"},
    {.name = "--max-cp", .value = "G", .kind = CLI_NUMBER, .offset = offsetof(tune_options, max_cp), .min = 1,
     .max = CF_MAX_RANKS, .help = "also try to spread sequences over 2, 4, 8 ... G data-parallel\n"
     "ranks, for trainers that can; not with --virtual"},
    {.name = "--show", .value = "N", .kind = CLI_NUMBER, .offset = offsetof(tune_options, show), .min = 1,
     .max = CF_MAX_CANDIDATES, .help = "how many of the best to find and print; default 10"},
    {.name = "--no-cp", .kind = CLI_FLAG, .offset = offsetof(tune_options, no_cp),
     .help = "a baseline without context parallelism, for trainers without it"},
    {.name = "--jobs", .value = "N", .kind = CLI_NUMBER, .offset = offsetof(tune_options, jobs), .min = 1,
     .max = WORKERS_MOST, .help = "threads that search; default one a processor. The answer is the same"},
    TABLE_OPTION(tune_options, tsv, "the best of them, and the baseline"),
    {.name = "--batch-lengths", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(tune_options, batch_lengths),
     .help = "write the lengths of the batch that is nearest to the mean, for\nthe commands that are printed"},
    {.name = "--json", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(tune_options, json),
     .help = "write everything as JSON; with - nothing else is printed"},
    {.name = "--html", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(tune_options, html),
     .help = "write a page with a map of ChunkSize and K, and with a report of\nthe best; it loads nothing"},
    {.name = NULL}};

/* ----------------------------------------------------------------------------------------------------------------
   What to search
   ---------------------------------------------------------------------------------------------------------------- */

static int refuse_schedule(const char *text, size_t n) {
    const char *names[CF_SCHEDULE_COUNT] = {NULL};
    char word[64];
    int kind;

    for (kind = 1; kind < CF_SCHEDULE_COUNT; kind++) names[kind - 1] = cf_schedule_kind_name((cf_schedule_kind)kind);
    snprintf(word, sizeof word, "%.*s", (int)(n < sizeof word ? n : sizeof word), text);
    return cli_refuse_name("tune", "--schedules", word, word, names, NULL);
}

static int parse_schedules(const char *text, cf_schedule_kind *kinds, int64_t *count) {
    *count = 0;
    for (;;) {
        size_t n = strcspn(text, ",");
        int kind = 1;
        while (kind < CF_SCHEDULE_COUNT && (strlen(cf_schedule_kind_name((cf_schedule_kind)kind)) != n ||
                                            strncmp(cf_schedule_kind_name((cf_schedule_kind)kind), text, n) != 0))
            kind++;
        if (kind == CF_SCHEDULE_COUNT) return refuse_schedule(text, n);
        if (*count == CF_SCHEDULE_COUNT - 1) return cli_usage("tune", "--schedules: a name is given twice");
        kinds[(*count)++] = (cf_schedule_kind)kind;
        if (text[n] == '\0') return CLI_OK;
        text += n + 1;
    }
}

static int fill_lists(tune_job *job) {
    const tune_options *asked = job->asked;
    cf_tune_desc *desc = &job->desc;
    int code = CLI_OK;

    if (asked->chunk_sizes) {
        code = cli_take_numbers("tune", "--chunk-size", asked->chunk_sizes, 0, INT64_MAX, &job->chunk_sizes,
                                &desc->n_chunk_sizes);
        desc->chunk_sizes = job->chunk_sizes;
    }
    if (code == CLI_OK && asked->ks) {
        code = cli_take_numbers("tune", "--k", asked->ks, 0, INT64_MAX, &job->ks, &desc->n_ks);
        desc->ks = job->ks;
    }
    if (code == CLI_OK && asked->schedules) {
        code = parse_schedules(asked->schedules, job->kinds, &desc->n_kinds);
        desc->kinds = job->kinds;
    }
    job->replays[0] = asked->replay == CF_REPLAY_LOCAL ? CF_REPLAY_LOCAL : CF_REPLAY_PIPELINE;
    job->replays[1] = CF_REPLAY_LOCAL;
    desc->replays = job->replays;
    desc->n_replays = asked->replay > CF_REPLAY_LOCAL ? 2 : 1;
    return code;
}

/* Reads measured costs, which hold for one split and its recomputation. */
static int take_costs(tune_job *job) {
    const tune_options *asked = job->asked;
    const cf_parallel *split = &job->model.parallel;
    int code, outputs = 0;

    if (!asked->costs) return CLI_OK;
    if (asked->gpus > 0) return cli_usage("tune", "--costs is for one split, --gpus searches them");
    if (strcmp(asked->costs, "-") == 0) return cli_usage("tune", "--costs must be a file: a page reads it again");
    code = pipeline_costs_read("tune", asked->costs, &asked->modelling, split->pp > 0 ? split->pp : 1,
                               split->n_virtual > 0 ? split->n_virtual : 1, &job->costs, &job->desc.step_seconds,
                               &outputs);
    job->desc.timing = &job->costs.timing;
    if (job->desc.memory.outputs == 0) job->desc.memory.outputs = outputs;
    return code;
}

static int fill_desc(tune_job *job) {
    const tune_options *asked = job->asked;
    cf_tune_desc *desc = &job->desc;
    cf_memory_desc memory;
    int code;

    desc->model = &job->model.model;
    desc->gpu = &job->gpu;
    desc->parallel = job->model.parallel;
    desc->n_gpus = asked->gpus;
    if (asked->modelling.recompute == 0) /* also searched for, if its cost is known */
        desc->parallel.recompute = asked->costs ? CF_RECOMPUTE_NONE : CF_RECOMPUTE_DEFAULT;
    job->model.parallel.recompute = desc->parallel.recompute;
    if (asked->gpus > 0) { /* anything not given is searched for */
        desc->parallel.tp = asked->modelling.tp;
        desc->parallel.pp = asked->modelling.pp;
        desc->parallel.dp = asked->modelling.dp;
        desc->parallel.ep = asked->modelling.ep;
    }
    desc->gpus_per_node = asked->gpu.per_node;
    desc->limit_bytes = asked->limit;
    desc->context = asked->context;
    desc->reserve = asked->reserve > 0 ? asked->reserve : -1;
    desc->tolerance = asked->tolerance > 0 ? (double)asked->tolerance / 1e8 : -1;
    modelling_take_terms(&asked->terms, &desc->memory);
    memory = desc->memory;
    memory.model = desc->model;
    memory.parallel = desc->parallel; /* the least of all split choices: the ring then has at most these bytes */
    if (asked->no_outputs && asked->terms.outputs > 0)
        return cli_usage("tune", "--outputs is for all, --no-outputs for none");
    if (asked->no_stream && asked->stream > 0) return cli_usage("tune", "--stream is for all, --no-stream for none");
    if ((code = modelling_take_stream("tune", asked->stream, &memory)) != CLI_OK) return code;
    desc->memory.state_window = memory.state_window;
    if (asked->gpus > 0) desc->parallel.zero = modelling_asked_zero(&asked->modelling);
    desc->pack.no_tails = asked->no_tails;
    desc->pack.align = asked->align;
    desc->pack.max_cp = asked->max_cp;
    desc->no_stream = asked->no_stream;
    desc->no_outputs = asked->no_outputs;
    desc->split_backward = asked->split_backward;
    desc->max_tries = asked->max_tries;
    desc->batch = asked->batch;
    desc->n_batches = asked->batches;
    desc->seed = (uint64_t)asked->seed;
    code = fill_lists(job);
    return code == CLI_OK ? take_costs(job) : code;
}

/* Reads the lengths, without those longer than the context. */
static int read_lengths(tune_job *job, const char *path) {
    int64_t i, context = job->asked->context, shortest = INT64_MAX;
    int code = cli_list_read_counted(path, job->asked->max_sequences, &job->list);

    if (code == CLI_OK) code = cli_list_expand(&job->list, &job->lengths, &job->shares);
    if (code != CLI_OK) return code;
    job->desc.pack.shared_prefixes = job->shares;
    for (i = 0; i < job->list.n_sequences; i++) {
        int64_t length = job->lengths[i];
        if (length < shortest) shortest = length;
        if (length > CF_MAX_LENGTH && context == 0)
            return cli_at_line(job->list.path, cli_list_line(&job->list, i), "longer than %lld tokens",
                               (long long)CF_MAX_LENGTH);
        if (context > 0 && length > context && job->shares)
            return cli_at_line(job->list.path, cli_list_line(&job->list, i),
                               "longer than --context, and of trees nothing is left out");
        if (context > 0 && length > context) {
            job->left_out++;
            if (length < INT64_MAX - job->left_out_tokens) job->left_out_tokens += length;
            continue;
        }
        job->lengths[job->n++] = length;
        if (length < INT64_MAX - job->tokens) job->tokens += length;
    }
    if (job->n > 0) return CLI_OK;
    if (job->left_out == 0) return cli_wrong("%s: there is no sequence", cli_input_name(path));
    return cli_wrong("%s: all sequences are longer than --context: got %lld at least, wanted at most %lld",
                     cli_input_name(path), (long long)shortest, (long long)context);
}

static void free_job(tune_job *job) {
    pipeline_costs_free(&job->costs);
    free(job->chunk_sizes);
    free(job->ks);
    free(job->lengths);
    free(job->shares);
    cli_list_free(&job->list);
    modelling_free(&job->model);
}

/* ----------------------------------------------------------------------------------------------------------------
   Progress and Ctrl-C
   ---------------------------------------------------------------------------------------------------------------- */

static volatile sig_atomic_t interrupted, answered;

enum { GRACE = 5 }; /* seconds after Ctrl-C in which a first answer may still come */

/* Ends the program: nothing has been written, and there is nothing to print. */
static void give_up(int number) {
    static const char words[] = "chunkflow tune: ended by Ctrl-C before there was a first answer\n";
    ssize_t written;

    (void)number;
    progress_clear();
    written = write(STDERR_FILENO, words, sizeof words - 1);
    (void)written;
    _exit(CLI_INTERRUPTED);
}

/* Records Ctrl-C. The search checks it only once it has an answer, which takes minutes with batches of millions of
   chunks. */
static void note_interrupt(int number) {
    interrupted = 1;
    signal(number, SIG_DFL); /* a second Ctrl-C ends the program at once */
    if (answered) return;
    signal(SIGALRM, give_up);
    alarm(GRACE);
}

static void note_answer(void) {
    if (!answered && interrupted) alarm(0);
    answered = 1;
}

enum { FIRST_LINE = 5, NEXT_LINE = 10 }; /* seconds until a line of progress, without a terminal */
/* share of time for the baselines after a search, whose work is not counted beforehand */

/* Shows the state of the search: in a terminal next to the bar, in a job's log on a line of its own. */
static void say_progress(tune_job *job, const cf_tune_progress *progress, const char *words) {
    time_t now = time(NULL);
    int64_t all = job->done + progress->left + job->baseline_work;
    double part = all > 0 ? (double)job->done / (double)all : 0;
    double seconds = difftime(now, job->begun);
    char left[48] = "", line[224];

    if (part > 0.01 && seconds > 0) snprintf(left, sizeof left, "%.0f s to go; ", seconds * (1 - part) / part);
    snprintf(line, sizeof line, "%s%s", left, words);
    progress_set(job->done, all, line);
    if (progress_is_terminal(STDERR_FILENO) || now < job->next_line) return;
    job->next_line = now + NEXT_LINE;
    fprintf(stderr, "chunkflow tune: %.0f s, %.0f %%, %s%s\n", seconds, 100 * part, left,
            words[0] ? words : "nothing that fits so far");
}

/* Several threads call it. */
static int show_progress(void *user, const cf_tune_progress *progress) {
    tune_job *job = (tune_job *)user;
    char words[160] = "";

    workers_lock();
    note_answer();
    if (progress->best)
        snprintf(words, sizeof words, "best so far %.3g s: ChunkSize %s, K %s, %s, %.1f GiB", progress->best->seconds,
                 cli_commas(progress->best->chunk_size), cli_commas(progress->best->k),
                 cf_schedule_kind_name(progress->best->kind), modelling_gib(progress->best->bytes));
    job->done += progress->done;
    say_progress(job, progress, words);
    workers_unlock();
    return interrupted;
}

static int stop_if_interrupted(void *user, const cf_tune_progress *progress) {
    (void)user;
    (void)progress;
    return interrupted;
}

static void run_tasks(void *user, int64_t n, cf_tune_task task, void *context) {
    const tune_job *job = (const tune_job *)user;
    workers_run(job->asked->jobs > 0 ? job->asked->jobs : workers_available(), n, task, context);
}

/* ----------------------------------------------------------------------------------------------------------------
   Printing
   ---------------------------------------------------------------------------------------------------------------- */

/* Returns a split in words. cp: maximum ranks that share a sequence; 0: one. */
static const char *split_text(const cf_parallel *p, int64_t cp) {
    char *text = cli_scratch();
    snprintf(text, CLI_SCRATCH_BYTES, "%lld x %lld x %lld", (long long)p->tp, (long long)p->pp, (long long)p->dp);
    if (p->ep > 1) snprintf(text + strlen(text), CLI_SCRATCH_BYTES - strlen(text), " (%lld)", (long long)p->ep);
    if (p->zero > 1) snprintf(text + strlen(text), CLI_SCRATCH_BYTES - strlen(text), " Z%lld", (long long)p->zero);
    if (cp > 1) snprintf(text + strlen(text), CLI_SCRATCH_BYTES - strlen(text), " /%lld", (long long)cp);
    return text;
}

static void print_setting(const tune_job *job, const cf_tuning *tuning) {
    cf_tune_desc full = cf_tune_defaults(&job->desc);
    const cf_parallel *p = &job->desc.parallel;
    const char *experts = "";
    int64_t i, most = 0;

    if (job->desc.n_gpus == 0) modelling_print(&job->model);
    else {
        modelling_print_model(&job->model);
        for (i = 0; i < tuning->n_splits; i++) {
            if (tuning->splits[i].ep > 1) experts = " (experts)";
            if (tuning->splits[i].zero > most) most = tuning->splits[i].zero;
        }
        printf("split             %s GPUs, %s ways (tensor x pipeline x data%s, ZeRO %s%s)\n",
               cli_commas(job->desc.n_gpus), cli_commas(tuning->n_splits), experts,
               p->zero == 0 && most > 1 ? "1 to " : "", cli_commas(most));
        printf("recompute         %s\n", modelling_recompute_words(p->recompute, p->recompute_layers));
    }
    printf("GPU               %s, %.2f GiB for each; %.3g us lost around each kernel%s\n", job->gpu.name,
           modelling_gib(tuning->limit_bytes), 1e6 * job->gpu.launch, modelling_launch_hint(&job->asked->gpu));
    if (job->asked->costs) printf("costs             of %s\n", cli_base_name(job->asked->costs));
    modelling_print_stream(&job->desc.memory);
    printf("lengths           %s sequences", cli_commas(job->n));
    if (job->left_out > 0)
        printf("; left out: %s longer than %s, with %.2f %% of all tokens", cli_commas(job->left_out),
               cli_commas(job->asked->context),
               100 * (double)job->left_out_tokens / ((double)job->left_out_tokens + (double)job->tokens));
    if (tune_longest(job) < job->asked->context)
        printf("\n                  the longest has %s tokens; memory is that of one with the %s of --context",
               cli_commas(tune_longest(job)), cli_commas(job->asked->context));
    printf("\nbatches           %s of %s sequences, seed %s%s\n", cli_commas(full.n_batches), cli_commas(full.batch),
           cli_commas(job->asked->seed),
           full.batch > job->n ? "; longer than the list, which repeats: see --batch" : "");
    if (tuning->shared_prefixes) {
        tune_work shared = tune_work_of(tuning, 1), all = tune_work_of(tuning, 0);
        printf("shared            %.1f %% of their tokens are computed, and %.1f %% of the attention pairs\n",
               all.tokens > 0 ? 100 * shared.tokens / all.tokens : 100,
               all.pairs > 0 ? 100 * shared.pairs / all.pairs : 100);
    }
    printf("candidates        %s, %s schedules simulated%s\n\n", cli_commas(tuning->n_candidates),
           cli_commas(tuning->n_simulated), tuning->interrupted ? "; INTERRUPTED: this is what was known by then" : "");
}

static double mean_tokens(const cf_tuning *tuning) {
    double sum = 0;
    int64_t i;
    for (i = 0; i < tuning->n_batches; i++) sum += (double)tuning->batch_tokens[i] / (double)tuning->n_batches;
    return sum;
}

static void print_term(const char *text, int64_t bytes) {
    if (bytes > 0) printf("    %-24s %8.2f GiB\n", text, modelling_gib(bytes));
}

static void print_winner(const tune_job *job, const cf_tuning *tuning) {
    const cf_tune_candidate *c = &tuning->candidates[tuning->winner];
    const cf_parallel *p = &tuning->splits[c->split];
    double gpus = (double)(p->tp * p->pp * p->dp);
    char reason[256];

    printf("best              ChunkSize %s%s, K %s, schedule %s, %s replay%s%s\n", cli_commas(c->chunk_size),
           c->chunk_size >= tune_longest(job) ? " (splits nothing)" : "", cli_commas(c->k),
           cf_schedule_kind_name(c->kind), cf_replay_name(c->replay),
           c->outputs > 1 ? " with attention's outputs in host memory" : c->outputs ? " with attention's outputs" : "",
           c->state_window > 0 ? ", state streamed" : "");
    printf("split             tensor %s, pipeline %s, data %s%s%s%s%s%s; recompute %s%s\n",
           cli_commas(p->tp), cli_commas(p->pp), cli_commas(p->dp), modelling_zero_words(p),
           p->ep > 1 ? ", experts " : "",
           p->ep > 1 ? cli_commas(p->ep) : "",
           c->max_cp > 0 ? ", cp groups of up to " : c->in_step ? ", ranks in step" : "",
           c->max_cp > 0 ? cli_commas(c->max_cp) : "", modelling_recompute_words(c->recompute, c->recompute_layers),
           modelling_offload_words(c->offload));
    printf("estimated time    %s s an iteration", pipeline_estimate(c->seconds));
    if (tuning->n_batches > 1) printf(", +- %.2g (95 %%)", c->confidence);
    else fputs(", of one batch", stdout);
    if (c->bound > 0) printf("; with this ChunkSize and K none is faster than %s", pipeline_estimate(c->bound));
    tune_say_reason(tuning, "\n                  ", reason, sizeof reason);
    fputs(reason, stdout);
    printf("\nestimated speed   %s tokens/s, %s for each GPU, %.3g %% of its FLOP/s; bubbles and replays %.1f %%; "
           "%.1f chunks a rank\n", pipeline_estimate(mean_tokens(tuning) / c->seconds),
           pipeline_estimate(mean_tokens(tuning) / c->seconds / gpus),
           100 * tune_utilisation(job, tuning, c->seconds, gpus), 100 * c->bubble, c->chunks);
    printf("memory            %.2f GiB at most, on stage %lld, %s of chunk %lld of batch %lld%s, at %.1f ms%s\n",
           modelling_gib(c->bytes), (long long)c->stage, cf_pass_name((cf_pass)c->peak_action.pass),
           (long long)c->peak_action.chunk, (long long)(c->peak_batch < tuning->n_batches ? c->peak_batch : 0),
           c->peak_batch < tuning->n_batches ? "" : ", given the longest sequence", 1e3 * c->peak_seconds,
           c->limited ? "; schedules had to be held down to fit" : "");
#define PRINT_TERM(name, text) print_term(text, c->memory.name);
    CF_MEMORY_TERMS(PRINT_TERM)
#undef PRINT_TERM
    print_term("in host memory, each GPU", c->memory.host);
    if (c->state_window > 0)
        printf("stream            %d blocks of %s rows of one layer; passes wait for it %.2f %% of the time\n",
               CF_STATE_SLOTS, cli_commas(c->state_window / CF_STATE_SLOTS), 100 * c->waiting);
    if (c->state_window > 0 && c->max_cp > 0)
        puts(MODELLING_CP_STREAM "; see --no-stream");
}

/* Prints the baseline, compared with the winner if there is one. */
static void print_baseline(const tune_job *job, const cf_tuning *tuning, const baseline_tuned *base) {
    const cf_tune_candidate *c = tuning->winner >= 0 ? &tuning->candidates[tuning->winner] : NULL;
    int spreads; /* 1: --max-cp could be added to these options */

    printf("\nbaseline          1f1b that splits no sequence");
    if (base->best.status != CF_TUNE_OK) {
        if (base->least > 0) printf(" does not fit: it needs %.2f GiB at least\n", modelling_gib(base->least));
        else printf(" cannot be timed%s%s\n", base->why[0] ? ": " : "", base->why);
        return;
    }
    printf(": estimated %s s an iteration, %.2f GiB", pipeline_estimate(base->best.seconds),
           modelling_gib(base->best.bytes));
    printf("\n                  %s, recompute %s%s, tensor %s, pipeline %s, data %s",
           base->packed ? "micro-batches packed to the longest sequence" : "a micro-batch for each sequence",
           modelling_recompute_words(base->split.recompute, base->split.recompute_layers),
           modelling_offload_words(base->best.offload), cli_commas(base->split.tp),
           cli_commas(base->split.pp), cli_commas(base->split.dp));
    if (base->context > 0)
        printf(", context %s (%s)", cli_commas(base->context), base->ring ? "ring" : "all-gather");
    if (base->split.ep > 1) printf(", experts %s", cli_commas(base->split.ep));
    printf(", ZeRO %s%s\n", cli_commas(base->split.zero),
           base->context > 1 && base->split.zero > 0 ? " over data x context" : "");
    spreads = c && job->asked->max_cp < 2 && !job->shares && !job->asked->split_backward &&
              tuning->splits[c->split].n_virtual < 2;
    if (c && base->best.seconds < c->seconds && base->context > 0)
        printf("                  It is faster: GPUs that share each sequence leave no pipeline to fill. --no-cp is "
               "without%s.\n", spreads ? ",\n                  --max-cp has chunks that ranks share" : "");
    else if (c && base->best.seconds < c->seconds)
        printf("                  It is faster: %s.\n",
               packing_why_unsplit(tune_longest(job), c->chunk_size, c->chunks, tuning->splits[c->split].pp,
                                   tune_longest(job) > c->chunk_size * c->k));
}

static const table_column ranking_columns[] = {
    {.heading = "place", .name = "rank"},
    {.heading = "split", .left = 1},
    {.name = "tensor_parallel"},
    {.name = "pipeline_parallel"},
    {.name = "data_parallel"},
    {.name = "zero"},
    {.heading = "ChunkSize"},
    {.name = "micro_batches"},
    {.name = "chunk_size_tokens"},
    {.heading = "K", .name = "k"},
    {.heading = "schedule", .name = "schedule", .left = 1},
    {.heading = "replay", .name = "replay", .left = 1},
    {.heading = "outputs", .name = "outputs", .left = 1},
    {.heading = "recompute", .name = "recompute", .left = 1},
    {.name = "recompute_layers"},
    {.heading = "state", .name = "state", .left = 1},
    {.heading = "ms", .name = "mean_s", .decimals = 1, .scale = 1e3},
    {.heading = "+-", .name = "mean_confidence_s", .decimals = 1, .scale = 1e3},
    {.heading = "behind %", .name = "behind", .decimals = 2, .scale = 100},
    {.heading = "+-", .name = "behind_confidence", .decimals = 2, .scale = 100},
    {.heading = "waste %", .name = "bubble_useful", .decimals = 1, .scale = 100},
    {.heading = "GiB", .name = "memory_bytes", .decimals = 2, .scale = 1 / 1073741824.0},
    {.name = "memory_stage"},
    {.heading = "host GiB", .name = "host_bytes", .decimals = 2, .scale = 1 / 1073741824.0},
    {.heading = "waits %", .name = "stream_waiting", .decimals = 2, .scale = 100}};
enum {
    COLUMN_SPLIT = 1,
    COLUMN_REPLAY = 11, /* outputs and recompute follow */
    COLUMN_STATE = 15,
    RANKING_COLUMNS = sizeof ranking_columns / sizeof ranking_columns[0],
    COLUMN_HOST = RANKING_COLUMNS - 2,
    COLUMN_WAITS
};

/* Adds a setting. base: the baseline, which has neither ChunkSize nor K; NULL for chunks. */
static void add_setting(table *t, const char *rank, const cf_parallel *split, const cf_tune_candidate *c,
                        const baseline_tuned *base) {
    const char *whole = !base ? NULL : base->packed ? "packed" : "unsplit";
    cf_parallel ranks = *split;
    int64_t cp = base && base->context > 1 ? base->context : c->max_cp;

    if (base && base->context > 1) ranks.dp *= base->context;
    table_text(t, rank);
    table_text(t, split_text(&ranks, cp));
    table_integer(t, split->tp);
    table_integer(t, split->pp);
    table_integer(t, split->dp);
    table_integer(t, split->zero);
    table_text(t, whole ? whole : cli_commas(c->chunk_size));
    table_text(t, whole ? whole : "chunks");
    if (whole) table_none(t);
    else table_integer(t, c->chunk_size);
    if (whole) table_none(t);
    else table_integer(t, c->k);
    table_text(t, cf_schedule_kind_name(c->kind));
    if (whole) table_none(t);
    else table_text(t, cf_replay_name(c->replay));
    table_text(t, tune_outputs_word(c));
    table_text(t, cf_recompute_name(c->recompute));
    table_integer(t, c->recompute_layers);
    table_text(t, tune_state_word(c));
}

/* winner: its seconds. base: as in add_setting. */
static void add_times(table *t, const cf_tune_candidate *c, double winner, const baseline_tuned *base) {
    table_real(t, c->seconds);
    table_real(t, c->confidence);
    table_real(t, base ? c->seconds / winner - 1 : c->behind / winner);
    if (base) table_none(t);
    else table_real(t, c->behind_confidence / winner);
    table_real(t, c->bubble);
    table_integer(t, c->bytes);
    table_integer(t, c->stage);
    table_integer(t, c->memory.host);
    table_real(t, c->waiting);
}

/* Returns whether a candidate takes the same time as an earlier one with the same ChunkSize and split; it then gets no
   line. */
static int repeats_earlier(const cf_tuning *tuning, int64_t rank) {
    const cf_tune_candidate *c = &tuning->candidates[tuning->ranking[rank]];
    int64_t i;
    for (i = 0; i < rank; i++) {
        const cf_tune_candidate *e = &tuning->candidates[tuning->ranking[i]];
        if (e->split == c->split && e->chunk_size == c->chunk_size && !(c->seconds > e->seconds * (1 + 1e-9))) return 1;
    }
    return 0;
}

/* Returns the settings in which a candidate differs from the plain case: replay 1, outputs 2, recompute 4, state 8. */
static unsigned unusual_settings(const cf_tuning *tuning, const cf_tune_candidate *c) {
    return (c->replay != CF_REPLAY_LOCAL) | (unsigned)(c->outputs > 0) << 1 |
           (unsigned)(c->recompute != tuning->candidates[0].recompute) << 2 | (unsigned)(c->state_window > 0) << 3;
}

/* Returns the columns that would have no information in this table. */
static unsigned idle_columns(const cf_tuning *tuning) {
    unsigned streams = 1u << COLUMN_HOST | 1u << COLUMN_WAITS | 1u << COLUMN_STATE, unusual = 0;
    int64_t i;

    for (i = 0; i < tuning->n_ranked; i++)
        unusual |= unusual_settings(tuning, &tuning->candidates[tuning->ranking[i]]);
    return (unusual & 8 ? 0 : streams) | (7 & ~unusual) << COLUMN_REPLAY;
}

/* Prints the candidates: a few for people, all for scripts. *same: number of those without a line because they repeat
   another. */
static int print_rows(const tune_job *job, const cf_tuning *tuning, const baseline_tuned *base, int64_t *same) {
    double winner = tuning->winner >= 0 ? tuning->candidates[tuning->winner].seconds : base->best.seconds;
    int64_t i, shown = 0, most = job->asked->tsv ? tuning->n_ranked : job->asked->show;
    table t;

    table_begin(&t, ranking_columns, RANKING_COLUMNS, job->asked->tsv, 0);
    t.hidden = (tuning->n_splits > 1 ? 0 : 1u << COLUMN_SPLIT) | idle_columns(tuning);
    for (i = 0; i < tuning->n_ranked; i++) {
        const cf_tune_candidate *c = &tuning->candidates[tuning->ranking[i]];
        if (tuning->ranking[i] != tuning->winner && shown >= most) continue;
        if (!job->asked->tsv && tuning->ranking[i] != tuning->winner && repeats_earlier(tuning, i)) {
            (*same)++;
            continue;
        }
        shown++;
        add_setting(&t, cli_commas(i + 1), &tuning->splits[c->split], c, NULL);
        add_times(&t, c, winner, NULL);
    }
    if (base->best.status == CF_TUNE_OK) {
        add_setting(&t, "base", &base->split, &base->best, base);
        add_times(&t, &base->best, winner, base);
    }
    return table_end(&t);
}

static int print_ranking(const tune_job *job, const cf_tuning *tuning, const baseline_tuned *base) {
    int64_t same = 0;
    int code;

    puts("\nthe best of them (means over the batches; behind the best batch by batch; +- 95 %; waste: bubbles, "
         "replays)");
    code = print_rows(job, tuning, base, &same);
    if (same > 0) printf("\nplaces left out take as long as one above with the same ChunkSize: %s\n", cli_commas(same));
    return code;
}

/* Returns whether another candidate of c's split, given up before it was timed in full, may be faster than c. None is
   faster than the fastest of all. */
static int is_beatable(const cf_tuning *tuning, const cf_tune_candidate *c) {
    int64_t i;

    if (c == &tuning->candidates[tuning->ranking[0]]) return 0;
    for (i = 0; i < tuning->n_candidates; i++) {
        const cf_tune_candidate *other = &tuning->candidates[i];
        if (other->split == c->split && other->status == CF_TUNE_DOMINATED && other->same_as < 0 &&
            (other->estimate > 0 ? other->estimate : other->bound) < c->seconds)
            return 1;
    }
    return 0;
}

/* Prints the best known candidate of each split. */
static int print_splits(const cf_tuning *tuning) {
    static const table_column columns[] = {
        {.heading = "split", .left = 1}, {.heading = "s", .estimate = 1}, {.heading = "ChunkSize"}, {.heading = "K"},
        {.heading = "GiB", .decimals = 2}};
    char text[80];
    int64_t i;
    int code, marked = 0;
    table t;

    puts("\nsplits (tensor x pipeline x data; Z: ZeRO above 1; /: ranks that share a sequence)");
    table_begin(&t, columns, sizeof columns / sizeof columns[0], 0, 0);
    for (i = 0; i < tuning->n_splits; i++) {
        int64_t id = tune_best_of_split(tuning, i);
        const cf_tune_candidate *c = id >= 0 ? &tuning->candidates[id] : NULL;
        if (!c) continue;
        table_text(&t, split_text(&tuning->splits[c->split], c->max_cp));
        if (c->status == CF_TUNE_OK) {
            int mark = is_beatable(tuning, c);
            table_real(&t, c->seconds);
            table_mark(&t, mark ? '<' : ' ');
            table_integer(&t, c->chunk_size);
            table_integer(&t, c->k);
            table_real(&t, modelling_gib(c->bytes));
            marked |= mark;
        } else {
            snprintf(text, sizeof text, "does not fit: needs %.2f GiB on stage %lld", modelling_gib(c->bytes),
                     (long long)c->stage);
            table_note(&t, c->status == CF_TUNE_DOMINATED ? tune_slower_words(tuning, c) : text);
        }
    }
    code = table_end(&t);
    if (marked) puts("\n<: at most; other settings of the split were dropped as soon as they could no longer win");
    return code;
}

/* Ways in which a candidate may differ from the winner. */
enum {
    OTHER_CHUNK_SIZE,
    OTHER_K,
    OTHER_SCHEDULE,
    OTHER_REPLAY,
    OTHER_RECOMPUTE,
    OTHER_STATE,
    DIFFERENCES
};

static int is_far(int64_t a, int64_t b) { return a / 4 > b || b / 4 > a; }

/* Returns the one way in which two candidates differ, if there is only one, and ChunkSize and K differ at most
   fourfold; else DIFFERENCES. */
static int difference_of(const cf_tune_candidate *winner, const cf_tune_candidate *c) {
    const int differs[DIFFERENCES] = {
        c->chunk_size != winner->chunk_size, c->k != winner->k, c->kind != winner->kind, c->replay != winner->replay,
        c->recompute != winner->recompute || c->recompute_layers != winner->recompute_layers,
        c->state_window != winner->state_window};
    int i, count = 0, found = DIFFERENCES;

    for (i = 0; i < DIFFERENCES; i++) {
        count += differs[i];
        if (differs[i]) found = i;
    }
    if (c->split != winner->split || is_far(c->chunk_size, winner->chunk_size) || is_far(c->k, winner->k))
        return DIFFERENCES;
    return count == 1 ? found : DIFFERENCES;
}

static const char *difference_word(int difference) {
    static const char *const words[DIFFERENCES] = {"ChunkSize", "K",         "schedule", "replay",
                                                     "recompute", "state"};
    return words[difference];
}

static const char *recompute_value(const cf_tune_candidate *c) {
    if (c->offload & CF_OFFLOAD_CHECKPOINTS) return "full, host";
    return c->recompute_layers > 0 ? "some mlp" : cf_recompute_name(c->recompute);
}

static const char *difference_value(const cf_tune_candidate *c, int difference) {
    switch (difference) {
    case OTHER_CHUNK_SIZE: return cli_commas(c->chunk_size);
    case OTHER_K: return cli_commas(c->k);
    case OTHER_SCHEDULE: return cf_schedule_kind_name(c->kind);
    case OTHER_REPLAY: return cf_replay_name(c->replay);
    case OTHER_STATE: return tune_state_word(c);
    default: return recompute_value(c);
    }
}

static void add_neighbour(table *t, const cf_tuning *tuning, const cf_tune_candidate *c, int difference) {
    double winner = tuning->candidates[tuning->winner].seconds;
    char text[160];

    table_text(t, difference_word(difference));
    table_text(t, difference_value(c, difference));
    if (c->same_as >= 0 && c->state_window == tuning->candidates[c->same_as].state_window &&
        c->recompute == tuning->candidates[c->same_as].recompute)
        c = &tuning->candidates[c->same_as];
    switch (c->status) {
    case CF_TUNE_OK:
        table_real(t, 100 * c->behind / winner);
        table_real(t, 100 * c->behind_confidence / winner);
        table_real(t, modelling_gib(c->bytes));
        break;
    case CF_TUNE_INFEASIBLE:
        snprintf(text, sizeof text, "does not fit: needs %.2f GiB on stage %lld", modelling_gib(c->bytes),
                 (long long)c->stage);
        table_note(t, text);
        break;
    case CF_TUNE_UNTRIED: table_note(t, "not reached"); break;
    default:
        if (c->estimate > 0) table_real(t, 100 * (c->estimate / winner - 1));
        if (c->estimate > 0) snprintf(text, sizeof text, "about: %s", c->why);
        else snprintf(text, sizeof text, "%s", c->why);
        table_note(t, text);
        break;
    }
}

static void add_trade(table *t, const tune_trade *of) {
    const cf_tune_candidate *c = of->c;

    table_text(t, split_text(&of->tuning->splits[c->split], c->max_cp));
    table_real(t, of->seconds);
    table_mark(t, of->about ? '~' : ' ');
    table_real(t, modelling_gib(c->bytes));
    table_integer(t, c->chunk_size);
    table_integer(t, c->k);
    table_text(t, cf_schedule_kind_name(c->kind));
    table_text(t, cf_replay_name(c->replay));
    table_text(t, tune_outputs_word(c));
    table_text(t, recompute_value(c));
    table_text(t, tune_state_word(c));
}

/* Prints the candidates that none beats in both time and memory, the fastest first. */
static int print_frontier(const tune_outcome *o) {
    static const table_column columns[] = {
        {.heading = "split", .left = 1}, {.heading = "s", .estimate = 1}, {.heading = "GiB", .decimals = 2},
        {.heading = "ChunkSize"}, {.heading = "K"}, {.heading = "schedule", .left = 1},
        {.heading = "replay", .left = 1}, {.heading = "outputs", .left = 1}, {.heading = "recompute", .left = 1},
        {.heading = "state", .left = 1}};
    tune_trade next = {NULL, NULL, 0, INT64_MAX, 0};
    unsigned unusual = 0;
    int code, about = 0;
    table t;

    puts("\ntime against memory: each is the fastest tried of those that need no more");
    table_begin(&t, columns, sizeof columns / sizeof columns[0], 0, 0);
    while ((next = tune_fastest_below(o, next.bytes)).tuning) {
        about |= next.about;
        unusual |= unusual_settings(next.tuning, next.c);
        add_trade(&t, &next);
    }
    t.hidden = (o->tuning->n_splits == 1) | (15 & ~unusual) << 6; /* from the column of replay on */
    code = table_end(&t);
    puts("\nto get a row: --limit-bytes with its GiB, rounded up, and its split, --chunk-sizes and --ks");
    if (about) puts("~: about; timed, and its memory found, on some of the batches only");
    return code;
}

/* Returns whether a candidate repeats an earlier one. Cp groups on one stage have one kind of schedule, so all given
   kinds except the first repeat it. */
static int repeats_another(const cf_tuning *tuning, int64_t id) {
    const cf_tune_candidate *c = &tuning->candidates[id], *e = c;

    while (e > tuning->candidates) {
        e--;
        if (e->split != c->split || e->chunk_size != c->chunk_size || e->k != c->k) return 0;
        if (e->kind == c->kind && e->replay == c->replay &&
            e->recompute == c->recompute && e->recompute_layers == c->recompute_layers &&
            e->state_window == c->state_window)
            return 1;
    }
    return 0;
}

static int print_neighbours(const cf_tuning *tuning) {
    static const table_column columns[] = {
        {.heading = "changed", .left = 1}, {.heading = "to", .key = 1},
        {.heading = "behind %", .decimals = 2, .sign = 1}, {.heading = "+-", .decimals = 2},
        {.heading = "GiB", .decimals = 2}};
    const cf_tune_candidate *winner = &tuning->candidates[tuning->winner];
    int64_t i;
    int difference;
    table t;

    puts("\none thing changed from the best");
    table_begin(&t, columns, sizeof columns / sizeof columns[0], 0, 0);
    for (difference = 0; difference < DIFFERENCES; difference++)
        for (i = 0; i < tuning->n_candidates; i++)
            if (difference_of(winner, &tuning->candidates[i]) == difference && !repeats_another(tuning, i))
                add_neighbour(&t, tuning, &tuning->candidates[i], difference);
    return table_end(&t);
}

#define MOST_LINES 24

/* Returns whether two candidates differ only in streaming and recomputation; such candidates are neighbours in the
   list. */
static int only_relief_differs(const cf_tune_candidate *a, const cf_tune_candidate *b) {
    return a->split == b->split && a->chunk_size == b->chunk_size && a->k == b->k && a->kind == b->kind &&
           a->replay == b->replay;
}

/* Returns whether candidate `i` does not fit with any streaming and recomputation. Only the last of such neighbours
   returns 1. */
static int fits_in_no_way(const cf_tuning *tuning, int64_t i) {
    const cf_tune_candidate *all = tuning->candidates;
    int64_t j;

    if (i + 1 < tuning->n_candidates && only_relief_differs(&all[i], &all[i + 1])) return 0;
    for (j = i; j >= 0 && only_relief_differs(&all[i], &all[j]); j--)
        if (all[j].status != CF_TUNE_INFEASIBLE) return 0;
    return 1;
}

static void add_infeasible(table *t, const cf_tuning *tuning, const cf_tune_candidate *c) {
    table_text(t, split_text(&tuning->splits[c->split], c->max_cp));
    table_integer(t, c->chunk_size);
    table_integer(t, c->k);
    table_real(t, modelling_gib(c->bytes));
    table_integer(t, c->stage);
    table_real(t, modelling_gib(c->bytes - tuning->limit_bytes));
    table_text(t, c->why);
}

/* Prints the smallest K that does not fit for each ChunkSize, for the winner's split or, without a winner, for all. */
static int print_infeasible(const cf_tuning *tuning) {
    static const table_column columns[] = {
        {.heading = "split", .left = 1}, {.heading = "ChunkSize", .key = 1}, {.heading = "from K", .key = 1},
        {.heading = "GiB", .decimals = 2}, {.heading = "on stage"}, {.heading = "too much", .decimals = 2},
        {.heading = "why", .left = 1}};
    int64_t i, lines = 0, all = 0, left = 0;
    const cf_tune_candidate *last = NULL;
    int code;
    table t;

    for (i = 0; i < tuning->n_candidates; i++) all += tuning->candidates[i].status == CF_TUNE_INFEASIBLE;
    if (all == 0) return CLI_OK;
    table_begin(&t, columns, sizeof columns / sizeof columns[0], 0, 0);
    t.hidden = tuning->n_splits > 1 ? 0 : 1;
    for (i = 0; i < tuning->n_candidates; i++) {
        const cf_tune_candidate *c = &tuning->candidates[i];
        if (!fits_in_no_way(tuning, i)) continue;
        if (tuning->winner >= 0 && c->split != tuning->candidates[tuning->winner].split) continue;
        if (last && last->split == c->split && last->chunk_size == c->chunk_size) continue;
        last = c;
        if (lines == 0) puts("\nwhat does not fit");
        if (lines++ < MOST_LINES) add_infeasible(&t, tuning, c);
        else left++;
    }
    code = lines > 0 ? table_end(&t) : CLI_OK;
    if (left > 0) printf("\nand %s more ChunkSizes; --json has them all\n", cli_commas(left));
    printf("\n%s of %s candidates do not fit\n", cli_commas(all), cli_commas(tuning->n_candidates));
    return code;
}

static int print_tuning(const tune_outcome *o) {
    const tune_job *job = o->job;
    const cf_tuning *tuning = o->tuning;
    const baseline_tuned *base = &o->base, *recipe = &o->recipe;
    int64_t same = 0;
    int code = CLI_OK;
    char verdict[256], share[128];

    if (job->asked->tsv) return print_rows(job, tuning, base, &same);
    print_setting(job, tuning);
    if (tuning->winner >= 0) {
        tune_say_verdict(o, verdict, sizeof verdict);
        printf("verdict           %s\n", verdict);
        tune_say_share(o, share, sizeof share);
        if (share[0]) printf("                  %s\n", share);
        print_winner(job, tuning);
        print_baseline(job, tuning, base);
        baseline_print_recipe(recipe, tuning->candidates[tuning->winner].seconds);
        code = print_ranking(job, tuning, base);
        if (code == CLI_OK) code = print_frontier(o);
        if (code == CLI_OK) code = print_neighbours(tuning);
        if (code == CLI_OK && tuning->n_splits > 1) code = print_splits(tuning);
        tune_print_commands(job, tuning, options, &defaults);
    } else if (tuning->interrupted) {
        puts("best              nothing was known yet");
    } else {
        printf(
            "best              nothing fits into %.2f GiB; the least that any of these needs is %.2f GiB (%s bytes)\n",
            modelling_gib(tuning->limit_bytes), modelling_gib(tuning->smallest_limit),
            cli_commas(tuning->smallest_limit));
        print_baseline(job, tuning, base);
        baseline_print_recipe(recipe, 0);
    }
    if (code == CLI_OK) code = print_infeasible(tuning);
    printf("\nTimes are estimates from %s, simulated; the runtime and the gaps in memory are assumptions:\n"
           "measure one configuration, then trust the differences. See chunkflow time and chunkflow memory.\n",
           job->asked->costs ? "the costs of that file" : "the GPU's numbers");
    return code;
}

/* ----------------------------------------------------------------------------------------------------------------
   The command
   ---------------------------------------------------------------------------------------------------------------- */

/* Discards a baseline whose search was interrupted: it may not be the best one, so nothing is compared with it. */
static void forget_baseline(baseline_tuned *base) {
    memset(base, 0, sizeof *base);
    base->best.status = CF_TUNE_UNTRIED;
    snprintf(base->why, sizeof base->why, "the search was interrupted before the baseline's was done");
}

/* Tries whole sequences with optimizer states in host memory, then with parameters as well, if none fit otherwise and
   the user has not chosen where these are. */
static cf_result try_away(tune_job *job, const cf_tune_desc *whole, tune_outcome *o, cf_error *error) {
    cf_tune_desc desc = *whole;
    cf_result result = CF_OK;

    if (desc.memory.offload & (CF_OFFLOAD_OPTIMIZER | CF_OFFLOAD_PARAMETERS)) return CF_OK;
    while (result == CF_OK && !interrupted && o->base.best.status != CF_TUNE_OK &&
           o->base.least > 0 && o->away.best.status != CF_TUNE_OK && o->offload < 2) {
        desc.memory.offload |= modelling_offload(++o->offload, 0);
        result = baseline_tune(job->lengths, job->n, &desc, &o->away, error);
        if (result == CF_OK && !job->asked->no_cp)
            result = baseline_tune_context(job->lengths, job->n, &desc, &o->away, error);
    }
    return result;
}

/* Searches. Free the outcome with cf_tuning_free. */
static int search(tune_job *job, cf_tuning **out, tune_outcome *o) {
    baseline_tuned *base = &o->base, *recipe = &o->recipe;
    cf_tune_desc whole;
    cf_error error;
    cf_result result;

    job->desc.progress = show_progress;
    job->desc.run_tasks = run_tasks;
    job->desc.user = job;
    job->begun = time(NULL);
    job->next_line = job->begun + FIRST_LINE;
    whole = job->desc;
    whole.parallel.zero = modelling_asked_zero(&job->asked->modelling);
    whole.parallel.ep = job->asked->modelling.ep;
    if (!job->asked->costs && !job->asked->no_cp)
        job->baseline_work = (int64_t)baseline_work(job->lengths, job->n, &whole);
    signal(SIGINT, note_interrupt);
    progress_begin("tuning");
    result = cf_tune(job->lengths, job->n, &job->desc, out, &error);
    note_answer();
    o->tuning = *out;
    job->desc.progress = stop_if_interrupted;
    progress_set(0, 0, "gaps of time against memory");
    if (result == CF_OK && !job->asked->tsv) result = tune_fill_gaps(job, o, &interrupted, &error);
    progress_set(0, 0, "the baseline");
    if (result == CF_OK) result = baseline_tune(job->lengths, job->n, &job->desc, base, &error);
    whole.progress = job->desc.progress;
    if (result == CF_OK && !job->asked->no_cp && !job->asked->costs && !interrupted)
        result = baseline_tune_context(job->lengths, job->n, &whole, base, &error);
    if (result == CF_OK && !job->asked->no_cp && !job->asked->costs && !interrupted)
        result = baseline_tune_recipe(job->lengths, job->n, &whole, recipe, &error);
    if (recipe->best.status == CF_TUNE_OK && base->best.status != CF_TUNE_OK)
        *base = *recipe; /* nothing fits without chunks in the requested splits, but this does */
    if (result == CF_OK && !job->asked->costs) result = try_away(job, &whole, o, &error);
    progress_end();
    cli_signals_restore();
    if (interrupted) {
        if (*out) (*out)->interrupted = 1;
        forget_baseline(base);
        memset(recipe, 0, sizeof *recipe);
    }
    return result == CF_OK ? CLI_OK : cli_error(&error, NULL);
}

static int write_files(const tune_outcome *o) {
    const tune_options *asked = o->job->asked;
    cli_output outputs[3] = {{0}, {0}, {0}};
    cli_output *json = &outputs[0], *html = &outputs[1], *batch = &outputs[2];
    int code = cli_output_open(json, asked->json);

    if (code == CLI_OK) code = cli_output_open(html, asked->html);
    if (code == CLI_OK) code = cli_output_open(batch, asked->batch_lengths);
    if (code == CLI_OK && batch->stream) tune_write_batch(o->tuning, batch);
    if (code == CLI_OK && json->stream) tune_write_json(o, json);
    if (code == CLI_OK && html->stream) code = tune_write_page(o, html);
    if (code == CLI_OK && json->stream != stdout && html->stream != stdout && batch->stream != stdout)
        code = print_tuning(o);
    code = cli_outputs_finish(outputs, 3, code);
    if (code != CLI_OK) return code;
    if (o->tuning->interrupted) return CLI_INTERRUPTED;
    return o->tuning->winner >= 0 ? CLI_OK : CLI_FAILED;
}

static int tune(tune_job *job, const char *path) {
    tune_outcome outcome;
    cf_tuning *tuning = NULL;
    int code = fill_desc(job);

    memset(&outcome, 0, sizeof outcome);
    outcome.job = job;
    if (code == CLI_OK) code = read_lengths(job, path);
    if (code == CLI_OK) code = search(job, &tuning, &outcome);
    outcome.tuning = tuning;
    if (code == CLI_OK) code = tune_map_make(tuning, &outcome.map);
    if (code == CLI_OK) code = write_files(&outcome);
    tune_map_free(&outcome.map);
    while (outcome.n_fills > 0) cf_tuning_free(outcome.fills[--outcome.n_fills]);
    cf_tuning_free(tuning);
    return code;
}

static int run(const void *given, char **operands, int n_operands) {
    const tune_options *asked = (const tune_options *)given;
    tune_job job;
    modelling_options whole;
    int code;

    (void)n_operands;
    if (!asked->gpu.name) return cli_usage("tune", "--gpu NAME is missing");
    code = table_check("tune", asked->tsv, "--json", asked->json);
    if (code == CLI_OK) code = table_check("tune", asked->tsv, "--html", asked->html);
    if (code != CLI_OK) return code;
    if (asked->json && asked->html && strcmp(asked->json, asked->html) == 0)
        return cli_usage("tune", "--json and --html both name %s", asked->json);
    if (asked->batch_lengths && ((asked->json && strcmp(asked->json, asked->batch_lengths) == 0) ||
                                 (asked->html && strcmp(asked->html, asked->batch_lengths) == 0)))
        return cli_usage("tune", "--batch-lengths also names the file of another option: %s", asked->batch_lengths);
    code = cli_output_try(asked->json);
    if (code == CLI_OK) code = cli_output_try(asked->html);
    if (code == CLI_OK) code = cli_output_try(asked->batch_lengths);
    if (code != CLI_OK) return code;
    memset(&job, 0, sizeof job);
    job.asked = asked;
    code = modelling_take_gpu("tune", &asked->gpu, &job.gpu);
    whole = asked->modelling;
    if (asked->gpus > 0) whole.ep = 0; /* the split decides which ranks share experts */
    if (code == CLI_OK) code = modelling_make("tune", &whole, &job.model);
    if (code != CLI_OK) return code;
    code = tune(&job, operands[0]);
    free_job(&job);
    return code;
}

const cli_command cmd_tune = {
    .name = "tune", .operands = "FILE|-", .min_operands = 1, .max_operands = 1,
    .summary = "find the ChunkSize, K and schedule that are fastest within the GPUs' memory",
    .details =
    "Draws batches from the list, packs, schedules and simulates each of them for every candidate that a lower bound\n"
    "does not rule out, and keeps to the memory at every moment of every stage. The same seed gives the same answer.\n"
    "Ctrl-C ends the search and prints what it has found so far (exit code 130), where there is something within 5 s;\n"
    "a second one ends the program. Exit code 1 where nothing fits, 2 where the options are wrong. Beside the\n"
    "candidates stands the baseline: 1f1b that splits no sequence, in the best of these splits, with as little\n"
    "recomputation as it needs to fit, or with context parallelism, where that is faster: GPUs share each sequence,\n"
    "as even as zigzag makes it, and gather K and V or pass them round in a ring. With --costs neither other splits\n"
    "nor context parallelism, streams or other recomputation can be timed, so none is tried.\n\n"
    "The page of --html shows every ChunkSize with every K, says of what does not fit which term of its memory breaks\n"
    "the limit, and shows the best as `chunkflow report` does, in the batch whose time is nearest to the mean.\n"
    "\n" CLI_LIST_HELP "\n" MODELLING_NAMES MODELLING_GPUS,
    .options = options, .defaults = &defaults, .options_size = sizeof defaults, .run = run};
