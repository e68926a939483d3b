/* pipeline.c - from a plan to a simulated schedule. */

#include "pipeline.h"
#include "json_read.h"
#include "progress.h"

#include <stdlib.h>
#include <string.h>

/* ----------------------------------------------------------------------------------------------------------------
   Options
   ---------------------------------------------------------------------------------------------------------------- */

static int is_zero(const cli_reals *cost) {
    return cost->value[0] == 0 && cost->value[1] == 0 && cost->value[2] == 0;
}

static int take_cost(const char *command, const char *option, const cli_reals *given, cf_pass_cost *out) {
    if (given->n == 0) return CLI_OK;
    /* a zero cost would tell the library to derive it */
    if (is_zero(given)) return cli_usage(command, "%s: got 0,0,0, wanted a cost above 0", option);
    out->constant = given->value[0];
    out->per_token = given->value[1];
    out->per_pair = given->value[2];
    return CLI_OK;
}

static int take_timing(const char *command, const pipeline_options *asked, pipeline *p) {
    const struct {
        const char *option;
        const cli_reals *given;
        cf_pass_cost *out;
    } costs[] = {{"--cost", &asked->forward, &p->timing.all.forward},
                 {"--replay-cost", &asked->replay, &p->timing.all.replay},
                 {"--backward-cost", &asked->backward, &p->timing.all.backward},
                 {"--input-cost", &asked->input, &p->timing.all.input},
                 {"--weight-cost", &asked->weight, &p->timing.all.weight}};
    size_t i;
    int code = CLI_OK;

    for (i = 0; i < sizeof costs / sizeof costs[0] && code == CLI_OK; i++) {
        if (costs[i].given->n > 0 && asked->forward.n == 0)
            return cli_usage(command, "%s needs --cost", costs[i].option);
        if (costs[i].given->n > 0 && asked->unit_cost)
            return cli_usage(command, "%s and --unit-cost exclude each other", costs[i].option);
        code = take_cost(command, costs[i].option, costs[i].given, costs[i].out);
    }
    p->unit_cost = asked->forward.n == 0 && !asked->gpu.name && !asked->costs;
    p->timing.latency = asked->latency.value[0];
    p->timing.seconds_per_token = asked->seconds_per_token.value[0];
    return code;
}

static int names_model(const modelling_options *model) {
    return model->model || model->config || model->layers > 0 || model->hidden > 0 || model->heads > 0;
}

static int take_token_bytes(const char *command, const pipeline_options *asked, pipeline *p) {
    int64_t *numbers, n;
    int code;

    if (!asked->token_bytes)
        return asked->limit_bytes > 0 && !names_model(&asked->model)
               ? cli_usage(command, "--limit-bytes needs --model or --token-bytes") : CLI_OK;
    code = cli_take_numbers(command, "--token-bytes", asked->token_bytes, 0, INT64_MAX, &numbers, &n);
    if (code != CLI_OK) return code;
    if (n == 4) {
        p->bytes.activations = numbers[0];
        p->bytes.state = numbers[1];
        p->bytes.state_gradient = numbers[2];
        p->bytes.boundary = numbers[3];
        p->counts_bytes = 1;
    } else {
        code = cli_usage(command, "--token-bytes: got %lld numbers, wanted 4", (long long)n);
    }
    free(numbers);
    return code;
}

static int take_limit(const char *command, const char *option, const char *text, int64_t most, int64_t *out) {
    int64_t limit;

    if (!text) return CLI_OK;
    *out = CF_NO_LIMIT;
    if (strcmp(text, "none") == 0) return CLI_OK;
    if (!cli_parse_number(text, strlen(text), &limit) || limit < 1 || limit > most)
        return cli_usage(command, "%s: got '%s', wanted a whole number 1 .. %lld, or none%s", option, text,
                         (long long)most, strcmp(option, "--limit") == 0 ? "; for bytes there is --limit-bytes" : "");
    *out = limit;
    return CLI_OK;
}

static int take_limits(const char *command, const pipeline_options *asked, pipeline *p) {
    int64_t n;
    int code = take_limit(command, "--limit", asked->limit, INT32_MAX, &p->limit);

    if (code == CLI_OK) code = take_limit(command, "--limit-state", asked->limit_state, CF_MAX_LENGTH, &p->limit_state);
    if (asked->token_bytes) p->limit_bytes = asked->limit_bytes;
    if (!asked->limits || code != CLI_OK) return code;
    if (asked->limit) return cli_usage(command, "--limit and --limits exclude each other");
    code = cli_take_numbers(command, "--limits", asked->limits, 1, INT32_MAX, &p->limits, &n);
    if (code == CLI_OK && n != asked->stages)
        code = cli_usage(command, "--limits: got %lld numbers, wanted one for each of %lld stages", (long long)n,
                         (long long)asked->stages);
    return code;
}

/* ---- costs from a file ---- */

/* Members that `time --json` writes: for a pass, for a stage, and for the whole. */
static const json_field cost_fields[] = {
    {.name = "constant", .type = JSON_REAL, .offset = offsetof(cf_pass_cost, constant)},
    {.name = "per_token", .type = JSON_REAL, .offset = offsetof(cf_pass_cost, per_token)},
    {.name = "per_pair", .type = JSON_REAL, .offset = offsetof(cf_pass_cost, per_pair)},
    {.name = NULL}};

typedef struct file_stage {
    uint32_t passes[CF_COMPUTE_PASS_COUNT];
} file_stage;

static const json_field stage_fields[] = {
    {.name = "F", .type = JSON_OBJECT_OF, .offset = offsetof(file_stage, passes[CF_F])},
    {.name = "R", .type = JSON_OBJECT_OF, .offset = offsetof(file_stage, passes[CF_R]), .optional = 1},
    {.name = "B", .type = JSON_OBJECT_OF, .offset = offsetof(file_stage, passes[CF_B]), .optional = 1},
    {.name = "I", .type = JSON_OBJECT_OF, .offset = offsetof(file_stage, passes[CF_I]), .optional = 1},
    {.name = "W", .type = JSON_OBJECT_OF, .offset = offsetof(file_stage, passes[CF_W]), .optional = 1},
    {.name = NULL}};

typedef struct file_costs {
    uint32_t format, stages, recompute;
    int64_t tensor_parallel; /* 0: it does not say */
    int64_t outputs;         /* 1: R takes attention's outputs */
    double latency, seconds_per_token, step_seconds;
} file_costs;

static const json_field file_fields[] = {
    {.name = "format", .type = JSON_TEXT_OF, .offset = offsetof(file_costs, format)},
    {.name = "stages", .type = JSON_ARRAY_OF, .offset = offsetof(file_costs, stages), .optional = 1},
    {.name = "recompute", .type = JSON_TEXT_OF, .offset = offsetof(file_costs, recompute), .optional = 1},
    {.name = "tensor_parallel", .type = JSON_COUNT, .offset = offsetof(file_costs, tensor_parallel), .optional = 1},
    {.name = "outputs", .type = JSON_COUNT, .offset = offsetof(file_costs, outputs), .optional = 1},
    {.name = "latency", .type = JSON_REAL, .offset = offsetof(file_costs, latency), .optional = 1},
    {.name = "seconds_per_token", .type = JSON_REAL, .offset = offsetof(file_costs, seconds_per_token), .optional = 1},
    {.name = "step_seconds", .type = JSON_REAL, .offset = offsetof(file_costs, step_seconds), .optional = 1},
    {.name = NULL}};

static int read_stage(const json_document *document, uint32_t node, cf_stage_cost *out) {
    cf_pass_cost *const passes[CF_COMPUTE_PASS_COUNT] = {&out->forward, &out->replay, &out->backward, &out->input,
                                                         &out->weight};
    file_stage stage;
    uint64_t seen;
    int pass, code = json_read_object(document, node, stage_fields, &stage, &seen);

    for (pass = 0; pass < CF_COMPUTE_PASS_COUNT && code == CLI_OK; pass++) {
        if (!(seen >> pass & 1)) continue;
        code = json_read_object(document, stage.passes[pass], cost_fields, passes[pass], NULL);
        if (code == CLI_OK &&
            !(passes[pass]->constant >= 0 && passes[pass]->per_token >= 0 && passes[pass]->per_pair >= 0))
            code = json_wrong(document, stage.passes[pass], "%s: a cost is negative", cf_pass_name((cf_pass)pass));
    }
    return code;
}

/* Reads the costs of stages: one entry for all of them (a fit), or one for each. */
static int read_stages(const json_document *document, const file_costs *file, pipeline *p) {
    char format[32];
    uint32_t node;
    int64_t n, s;
    int code = CLI_OK;

    json_copy_text(document, file->format, format, sizeof format);
    if (strcmp(format, "chunkflow-fit") == 0) return read_stage(document, 0, &p->timing.all);
    if (strcmp(format, "chunkflow-time") != 0 || file->stages == 0)
        return json_wrong(document, file->format, "format: wanted chunkflow-time or chunkflow-fit");
    n = json_count(document, file->stages);
    if (n != p->n_stages)
        return json_wrong(document, file->stages, "stages: got %lld, wanted %lld, as --stages says", (long long)n,
                          (long long)p->n_stages);
    p->stages = (cf_stage_cost *)calloc((size_t)n, sizeof *p->stages);
    if (!p->stages) return cli_failed("out of memory");
    p->timing.stages = p->stages;
    for (s = 0, node = file->stages + 1; s < n && code == CLI_OK; s++, node = document->nodes[node].next)
        code = read_stage(document, node, &p->stages[s]);
    return code;
}

/* Refuses costs of another split or another recomputation, which would be mistaken for this one's. */
static int check_costs(const json_document *document, const file_costs *file, const modelling_options *model) {
    int64_t tp = model->tp > 0 ? model->tp : 1;
    const char *recompute = cf_recompute_name(model->recompute > 0 ? (cf_recompute)model->recompute
                                                                   : CF_RECOMPUTE_NONE);
    char text[32] = "";

    if (!names_model(model)) return CLI_OK;
    if (file->tensor_parallel > 0 && file->tensor_parallel != tp)
        return json_wrong(document, 0, "tensor_parallel: these costs are of %lld, and --tp is %lld",
                          (long long)file->tensor_parallel, (long long)tp);
    if (file->recompute > 0) json_copy_text(document, file->recompute, text, sizeof text);
    if (file->recompute > 0 && strcmp(text, recompute) != 0)
        return json_wrong(document, file->recompute, "recompute: these costs are of %s, and --recompute is %s", text,
                          recompute);
    return CLI_OK;
}

static int take_costs(const char *command, const pipeline_options *asked, pipeline *p) {
    json_document document;
    file_costs file;
    int code;

    if (!asked->costs) return CLI_OK;
    if (asked->forward.n > 0 || asked->unit_cost)
        return cli_usage(command, "--costs and %s exclude each other", asked->unit_cost ? "--unit-cost" : "--cost");
    memset(&file, 0, sizeof file);
    code = json_file_read(asked->costs, JSON_MAX_BYTES, &document);
    if (code != CLI_OK) return code;
    code = json_read_object(&document, 0, file_fields, &file, NULL);
    if (code == CLI_OK) code = read_stages(&document, &file, p);
    if (code == CLI_OK) code = check_costs(&document, &file, &asked->model);
    json_free(&document);
    if (code == CLI_OK && (file.latency < 0 || file.seconds_per_token < 0 || file.step_seconds < 0))
        return cli_wrong("%s: a cost is negative", cli_input_name(asked->costs));
    if (code == CLI_OK && file.outputs > 1)
        return cli_wrong("%s: outputs: got %lld, wanted 0 or 1", cli_input_name(asked->costs), (long long)file.outputs);
    if (asked->latency.n == 0) p->timing.latency = file.latency;
    if (asked->seconds_per_token.n == 0) p->timing.seconds_per_token = file.seconds_per_token;
    if (p->memory.outputs == 0) p->memory.outputs = (int)file.outputs;
    p->step_seconds = file.step_seconds;
    return code;
}

/* ---- costs from a model and a GPU ---- */

static int take_model(const char *command, const pipeline_options *asked, int64_t n_ranks, pipeline *p) {
    modelling_options model = asked->model;
    int outputs = p->memory.outputs; /* requested, or those of costs in a file */
    int code;

    if (asked->gpu.name && (asked->forward.n > 0 || asked->costs || asked->unit_cost))
        return cli_usage(command, "--gpu and %s exclude each other",
                         asked->costs ? "--costs" : asked->unit_cost ? "--unit-cost" : "--cost");
    if (!names_model(&asked->model)) return CLI_OK;
    model.pp = asked->stages;
    model.dp = n_ranks;
    if ((code = modelling_make(command, &model, &p->model)) != CLI_OK) return code;
    p->has_model = 1;
    p->memory.model = &p->model.model;
    modelling_take_terms(&asked->terms, &p->memory);
    p->memory.parallel = p->model.parallel;
    p->memory.outputs = outputs;
    if (p->memory.outputs && p->memory.parallel.recompute == CF_RECOMPUTE_FULL)
        return cli_usage(command, "--outputs: are dropped again with --recompute full");
    if (p->memory.offload & CF_OFFLOAD_CHECKPOINTS && p->memory.parallel.recompute != CF_RECOMPUTE_FULL)
        return cli_usage(command, "--offload-checkpoints needs --recompute full");
    if (!asked->token_bytes) p->gpu_bytes = asked->limit_bytes;
    if ((code = modelling_take_stream(command, asked->stream, &p->memory)) != CLI_OK) return code;
    if (!asked->gpu.name) return CLI_OK;
    p->estimates = 1;
    code = modelling_take_gpu(command, &asked->gpu, &p->gpu);
    if (code == CLI_OK && p->gpu_bytes == 0) p->gpu_bytes = p->gpu.memory - p->gpu.memory / 100 * asked->reserve;
    return code;
}

int pipeline_open(const char *command, const pipeline_options *asked, int64_t n_ranks, pipeline *out) {
    int code;

    memset(out, 0, sizeof *out);
    out->n_stages = asked->stages;
    out->rank = asked->rank > 0 ? asked->rank : 0;
    out->max_tries = asked->max_tries;
    out->asked = asked;
    out->memory.outputs = (int)asked->terms.outputs;
    if (n_ranks == 0) n_ranks = 1;
    if (asked->rank >= n_ranks)
        return cli_usage(command, "--rank: got %lld, wanted 0 .. %lld, below --ranks", (long long)asked->rank,
                         (long long)(n_ranks - 1));
    code = take_timing(command, asked, out);
    if (code == CLI_OK) code = take_costs(command, asked, out);
    if (code == CLI_OK) code = take_token_bytes(command, asked, out);
    if (code == CLI_OK) code = take_limits(command, asked, out);
    if (code == CLI_OK) code = take_model(command, asked, n_ranks, out);
    if (code != CLI_OK) pipeline_close(out);
    return code;
}

void pipeline_close(pipeline *p) {
    free(p->limits);
    free(p->stages);
    modelling_free(&p->model);
    memset(p, 0, sizeof *p);
}

/* ----------------------------------------------------------------------------------------------------------------
   Virtual stages: the library counts each by itself, the options speak of whole stages
   ---------------------------------------------------------------------------------------------------------------- */

static void divide_cost(cf_pass_cost *cost, int64_t n) {
    cost->constant /= (double)n;
    cost->per_token /= (double)n;
    cost->per_pair /= (double)n;
}

static void divide_stage(cf_stage_cost *stage, int64_t n) {
    divide_cost(&stage->forward, n);
    divide_cost(&stage->replay, n);
    divide_cost(&stage->backward, n);
    divide_cost(&stage->input, n);
    divide_cost(&stage->weight, n);
}

static cf_result no_memory(cf_error *error) {
    return cf_refuse(error, CF_ERROR_MEMORY, "memory", -1, "out of memory");
}

static cf_parallel parallel_of(const pipeline *p, int64_t n_virtual, cf_recompute recompute) {
    cf_parallel parallel = p->model.parallel;

    if (n_virtual != parallel.n_virtual) parallel.layers = NULL; /* they were given for another number of stages */
    parallel.n_virtual = n_virtual;
    if (n_virtual == 1) parallel.placement = CF_PLACEMENT_DEFAULT;
    if (recompute != CF_RECOMPUTE_DEFAULT) parallel.recompute = recompute;
    return parallel;
}

/* Sets costs from --cost, --costs or the default, with equal shares for the virtual stages of a stage. */
static void share_costs(const pipeline *p, int64_t n_virtual, pipeline_costs *out) {
    int64_t v;

    out->timing = p->timing;
    if (p->unit_cost && n_virtual > 1) {
        out->timing.all.forward.per_token = 1;
        out->timing.all.backward.per_token = 2;
    }
    divide_stage(&out->timing.all, n_virtual);
    for (v = 0; p->stages && v < p->n_stages * n_virtual; v++) {
        out->stages[v] = p->stages[v % p->n_stages];
        divide_stage(&out->stages[v], n_virtual);
    }
}

/* Returns the parts in host memory under a recomputation; only full recomputation has checkpoints. */
static int offload_of(const pipeline *p, cf_recompute recompute) {
    return recompute == CF_RECOMPUTE_FULL ? p->memory.offload : p->memory.offload & ~CF_OFFLOAD_CHECKPOINTS;
}

static cf_result estimate_costs(const pipeline *p, int64_t n_virtual, int64_t chunk_size, cf_recompute recompute,
                                pipeline_costs *out, cf_error *error) {
    const pipeline_options *asked = p->asked;
    cf_cost_desc desc = modelling_costs(&p->model, &p->gpu, &asked->gpu, chunk_size);
    cf_result result;

    desc.parallel = parallel_of(p, n_virtual, recompute);
    desc.stream = p->memory.state_window > 0;
    desc.max_cp = p->max_cp;
    desc.unfused = p->memory.unfused;
    desc.outputs = desc.parallel.recompute != CF_RECOMPUTE_FULL ? p->memory.outputs : 0;
    desc.offload = offload_of(p, desc.parallel.recompute);
    result = cf_cost_estimate(&desc, out->stages, p->n_stages * n_virtual, &out->timing, NULL, error);
    if (asked->latency.n > 0) out->timing.latency = p->timing.latency;
    if (asked->seconds_per_token.n > 0) out->timing.seconds_per_token = p->timing.seconds_per_token;
    return result;
}

cf_result pipeline_costs_make(const pipeline *p, int64_t n_virtual, int64_t chunk_size, cf_recompute recompute,
                              pipeline_costs *out, cf_error *error) {
    pipeline_costs fresh;
    cf_result result = CF_OK;

    memset(&fresh, 0, sizeof fresh);
    if (p->estimates || p->stages) {
        fresh.stages = (cf_stage_cost *)calloc((size_t)(p->n_stages * n_virtual), sizeof *fresh.stages);
        if (!fresh.stages) return no_memory(error);
    }
    if (p->estimates) result = estimate_costs(p, n_virtual, chunk_size, recompute, &fresh, error);
    else share_costs(p, n_virtual, &fresh);
    fresh.timing.stages = fresh.stages;
    if (result == CF_OK) *out = fresh;
    else pipeline_costs_free(&fresh);
    return result;
}

int pipeline_price_cp(pipeline *p, packing_options *how) {
    cf_pack_desc desc;
    pipeline_costs costs;
    cf_error error;

    p->lockstep = how->lockstep || how->max_cp > 1;
    if (how->max_cp < 2) return CLI_OK;
    p->max_cp = how->max_cp;
    if (pipeline_costs_make(p, 1, how->chunk_size, CF_RECOMPUTE_DEFAULT, &costs, &error) != CF_OK)
        return cli_error(&error, NULL);
    cf_cp_costs(&costs.timing, &desc);
    how->cost = desc.cost;
    how->cp_row_seconds = desc.cp_row_seconds;
    how->cp_chunk_seconds = desc.cp_chunk_seconds;
    pipeline_costs_free(&costs);
    return CLI_OK;
}

int pipeline_takes_paper(const pipeline *p) { return p->max_cp > 1 && p->n_stages == 1; }
int pipeline_splits_backwards(const pipeline *p) { return p->max_cp < 2 && p->n_stages > 1; }

void pipeline_take_cp(pipeline *p, const cf_plan *plan) { (void)packing_cp_groups(plan, &p->memory.gathered); }

int pipeline_pack(pipeline *p, packing_options *how, const char *path, packing *out) {
    const cf_parallel *split = &p->model.parallel;
    int code = pipeline_price_cp(p, how);

    if (code == CLI_OK) code = packing_make(how, path, out);
    if (code != CLI_OK) return code;
    pipeline_take_cp(p, out->plan);
    if (!out->shares || !p->has_model || split->dp < 2 || (split->zero < 3 && split->ep < 2)) return CLI_OK;
    packing_free(out);
    return cli_wrong("%s: needs ranks in step, which shared prompts cannot have", split->zero > 2 ? "--zero" : "--ep");
}

void pipeline_costs_free(pipeline_costs *costs) {
    free(costs->stages);
    costs->stages = NULL;
}

int pipeline_costs_read(const char *command, const char *path, const modelling_options *model, int64_t n_stages,
                        int64_t n_virtual, pipeline_costs *out, double *step_seconds, int *outputs) {
    pipeline_options asked;
    pipeline p;
    cf_error error;
    int code;

    memset(&asked, 0, sizeof asked);
    memset(&p, 0, sizeof p);
    asked.costs = path;
    asked.model = *model;
    p.n_stages = n_stages;
    code = take_costs(command, &asked, &p);
    if (code == CLI_OK && pipeline_costs_make(&p, n_virtual, 1, CF_RECOMPUTE_DEFAULT, out, &error) != CF_OK)
        code = cli_error(&error, NULL);
    *step_seconds = p.step_seconds;
    *outputs = p.memory.outputs;
    free(p.stages);
    return code;
}

int64_t pipeline_scaled(int64_t limit, int64_t n_virtual) {
    if (limit == CF_NO_LIMIT) return limit;
    return limit > INT64_MAX / n_virtual ? INT64_MAX : limit * n_virtual;
}

/* Returns the limits scaled to virtual stages; NULL if memory runs out. */
static int64_t *scale_limits(const pipeline *p, int64_t n_virtual) {
    int64_t *scaled = (int64_t *)malloc((size_t)p->n_stages * sizeof *scaled);
    int64_t s;

    for (s = 0; scaled && s < p->n_stages; s++) scaled[s] = pipeline_scaled(p->limits[s], n_virtual);
    return scaled;
}

int pipeline_limits(const pipeline *p, int64_t n_virtual, cf_validate_desc *out, int64_t **limits) {
    *limits = NULL;
    memset(out, 0, sizeof *out);
    if (p->limits && !(*limits = scale_limits(p, n_virtual))) return cli_failed("out of memory");
    out->limits.chunks = pipeline_scaled(p->limit, n_virtual);
    out->limits.chunks_by_stage = *limits;
    out->limits.state = p->limit_state;
    out->limits.per_token = p->bytes;
    out->limits.bytes = pipeline_scaled(p->limit_bytes, n_virtual);
    return CLI_OK;
}

/* ----------------------------------------------------------------------------------------------------------------
   Schedule and timeline
   ---------------------------------------------------------------------------------------------------------------- */

void pipeline_place(pipeline_case *what, int64_t n_virtual, cf_placement placement) {
    if (what->kind < CF_SCHEDULE_INTERLEAVED) return;
    what->n_virtual = n_virtual;
    if (what->kind == CF_SCHEDULE_INTERLEAVED || placement == CF_PLACEMENT_DEFAULT) return;
    if (n_virtual == 0) what->n_virtual = 2;
    what->placement = placement;
}

/* Replaces a schedule by the same schedule with its transfers. */
static cf_result lower(const cf_plan *plan, const cf_timing *timing, cf_schedule **schedule, cf_error *error) {
    cf_lower_desc desc;
    cf_schedule *lowered = NULL;
    cf_result result;

    memset(&desc, 0, sizeof desc);
    desc.timing = timing;
    result = cf_schedule_lower(plan, *schedule, &desc, &lowered, error);
    if (result != CF_OK) return result;
    cf_schedule_free(*schedule);
    *schedule = lowered;
    return CF_OK;
}

static cf_result simulate(const pipeline *p, const cf_plan *plan, const cf_schedule *schedule,
                          const cf_schedule_desc *desc, pipeline_run *run, cf_error *error) {
    cf_simulate_desc simulation;

    memset(&simulation, 0, sizeof simulation);
    simulation.timing = desc->timing;
    simulation.limits.per_token = p->bytes;
    simulation.limits.chunks = desc->limits.chunks;
    simulation.limits.chunks_by_stage = desc->limits.chunks_by_stage;
    return cf_simulate(plan, schedule, &simulation, &run->timeline, error);
}

static cf_memory_desc memory_of(const pipeline *p, int64_t n_virtual, cf_placement placement, cf_recompute recompute) {
    cf_memory_desc desc = p->memory;

    desc.model = &p->model.model;
    desc.parallel = parallel_of(p, n_virtual, recompute);
    desc.parallel.placement = placement;
    if (desc.parallel.recompute == CF_RECOMPUTE_FULL) desc.outputs = 0; /* of a baseline, which drops no chunk */
    desc.offload = offload_of(p, desc.parallel.recompute);
    return desc;
}

cf_memory_desc pipeline_memory_of(const pipeline *p, const cf_schedule *schedule, cf_recompute recompute) {
    return memory_of(p, schedule->shape.n_virtual, schedule->shape.placement, recompute);
}

static cf_result weigh(const pipeline *p, const cf_plan *plan, const cf_schedule *schedule, cf_recompute recompute,
                       pipeline_run *run, cf_error *error) {
    cf_memory_desc desc;
    cf_result result;
    int64_t s;

    if (!p->has_model) return CF_OK;
    desc = pipeline_memory_of(p, schedule, recompute);
    run->memory = (cf_memory_report *)calloc((size_t)p->n_stages, sizeof *run->memory);
    if (!run->memory) return no_memory(error);
    result = cf_schedule_memory(&desc, plan, schedule, run->memory, p->n_stages, NULL, error);
    for (s = 1; s < p->n_stages; s++)
        if (run->memory[s].total > run->memory[run->fullest].total) run->fullest = s;
    return result;
}

static cf_result make(const pipeline *p, const cf_plan *plan, const pipeline_case *what, const cf_schedule_desc *desc,
                      pipeline_run *run, cf_error *error) {
    cf_result result = cf_schedule_make(plan, desc, &run->schedule, error);

    if (result == CF_OK && what->lower) result = lower(plan, desc->timing, &run->schedule, error);
    if (result == CF_OK) result = simulate(p, plan, run->schedule, desc, run, error);
    if (result == CF_OK) result = weigh(p, plan, run->schedule, what->recompute, run, error);
    return result;
}

cf_result pipeline_run_of(const pipeline *p, const cf_plan *plan, const cf_schedule *schedule, pipeline_run *out,
                          cf_error *error) {
    pipeline_costs costs;
    pipeline_run fresh;
    cf_schedule_desc desc;
    cf_result result;

    memset(&fresh, 0, sizeof fresh);
    memset(&desc, 0, sizeof desc);
    result = pipeline_costs_make(p, schedule->shape.n_virtual, plan->chunk_size, CF_RECOMPUTE_DEFAULT, &costs, error);
    if (result != CF_OK) return result;
    desc.timing = &costs.timing;
    result = simulate(p, plan, schedule, &desc, &fresh, error);
    if (result == CF_OK) result = weigh(p, plan, schedule, CF_RECOMPUTE_DEFAULT, &fresh, error);
    pipeline_costs_free(&costs);
    if (result == CF_OK) *out = fresh;
    else pipeline_run_free(&fresh);
    return result;
}

/* Rewrites an error in whole stages; the library counts virtual stages one by one. */
static void explain_limit(cf_error *error, int64_t n_virtual) {
    int about_bytes = strcmp(error->field, "limits.bytes") == 0;

    if (strcmp(error->field, "limits.state") == 0) {
        snprintf(error->text, sizeof error->text, "--limit-state: stage %lld may hold %s, and needs %s at least",
                 (long long)error->item, cli_commas(error->got), cli_commas(error->wanted));
        return;
    }
    snprintf(error->text, sizeof error->text, "%s: stage %lld may keep %s, and needs %s at least",
             about_bytes ? "--limit-bytes" : "--limit", (long long)error->item, pipeline_share(error->got, n_virtual),
             cli_commas((error->wanted + n_virtual - 1) / n_virtual));
}

/* ---- within the memory of a GPU ---- */

/* Makes the schedule again under limits, as cf_tune does. If that fits, it replaces *run. */
static cf_result hold_down(const pipeline *p, const cf_plan *plan, const pipeline_case *what, cf_schedule_desc desc,
                           pipeline_run *run, cf_error *error) {
    cf_placement placement = desc.shape.placement == CF_PLACEMENT_V ? CF_PLACEMENT_V : CF_PLACEMENT_LOOP;
    cf_memory_desc memory = memory_of(p, desc.shape.n_virtual, placement, what->recompute);
    int64_t *by_stage = (int64_t *)malloc((size_t)p->n_stages * sizeof *by_stage);
    pipeline_run fresh;
    cf_result result;

    if (!by_stage) return no_memory(error);
    memset(&fresh, 0, sizeof fresh);
    desc.report = &fresh.report;
    result = cf_memory_limits(&memory, plan, &desc.shape, p->gpu_bytes, by_stage, &desc.limits, NULL, error);
    if (result == CF_OK) result = make(p, plan, what, &desc, &fresh, error);
    free(by_stage);
    if (result == CF_OK && pipeline_fits(p, &fresh)) {
        pipeline_run_free(run);
        *run = fresh;
        run->held_down = 1;
    } else {
        pipeline_run_free(&fresh);
    }
    return result == CF_ERROR_INFEASIBLE ? CF_OK : result;
}

/* Returns whether a run does not fit and may be made again under limits. */
static int is_too_large(const pipeline *p, const pipeline_case *what, const pipeline_run *run) {
    int holds = run->schedule->kind == CF_SCHEDULE_BEST || p->asked->limit_bytes > 0;
    return holds && !what->unlimited && p->limit_bytes == 0 && !pipeline_fits(p, run);
}

static cf_schedule_desc describe(const pipeline *p, const pipeline_case *what) {
    cf_schedule_desc desc;

    memset(&desc, 0, sizeof desc);
    desc.kind = what->kind;
    desc.shape.replay = what->replay;
    desc.shape.n_stages = p->n_stages;
    desc.shape.n_virtual = what->n_virtual;
    desc.shape.placement = what->placement;
    desc.shape.k = what->k;
    desc.shape.rank = p->rank;
    desc = cf_schedule_defaults(&desc);
    desc.limits.chunks = what->unlimited ? 0 : pipeline_scaled(p->limit, desc.shape.n_virtual);
    desc.limits.state = p->limit_state;
    desc.limits.per_token = p->bytes;
    desc.limits.bytes = pipeline_scaled(p->limit_bytes, desc.shape.n_virtual);
    desc.split_backward = what->split_backward;
    desc.forwards_first = what->forwards_first;
    desc.shape.forward_only = what->forward_only;
    desc.shape.outputs = p->memory.outputs > 0;
    desc.max_tries = p->max_tries;
    return desc;
}

cf_result pipeline_columns(const pipeline *p, const cf_plan *plan, cf_plan **columns, cf_error *error) {
    cf_pass_cost cost = {0, 1, 0};
    pipeline_costs costs;
    cf_result result = pipeline_costs_make(p, 1, plan->chunk_size, CF_RECOMPUTE_DEFAULT, &costs, error);

    if (result != CF_OK) return result;
    if (!p->unit_cost) cost = cf_column_cost(&costs.timing, p->max_cp, p->n_stages);
    pipeline_costs_free(&costs);
    return cf_lockstep_plan(plan, &cost, NULL, columns, error);
}

static cf_result make_in_step(const pipeline *p, const cf_plan *plan, const pipeline_case *what, pipeline_run *out,
                              cf_error *error) {
    pipeline all = *p;
    pipeline_run whole, own;
    cf_plan *columns = NULL;
    cf_schedule *schedule = NULL;
    cf_result result = pipeline_columns(p, plan, &columns, error);

    all.rank = all.lockstep = 0;
    if (result == CF_OK) result = pipeline_run_make(&all, columns, what, &whole, error);
    cf_plan_free(columns);
    if (result != CF_OK) return result;
    result = cf_lockstep_schedule(plan, whole.schedule, p->rank, NULL, &schedule, error);
    if (result == CF_OK) result = pipeline_run_of(p, plan, schedule, &own, error);
    if (result == CF_OK) {
        *out = own;
        out->schedule = schedule;
        out->report = whole.report;
        out->in_step = whole.timeline->makespan;
    } else {
        cf_schedule_free(schedule);
    }
    pipeline_run_free(&whole);
    return result;
}

/* Keeps the slower of two runs, with the memory of the one that needs more, and frees the other. */
static void keep_slower(pipeline_run *kept, pipeline_run *next) {
    pipeline_run other = *kept;

    if (!kept->timeline || next->timeline->makespan > kept->timeline->makespan) {
        *kept = *next;
        *next = other;
    }
    kept->held_down |= next->held_down;
    if (next->memory && next->memory[next->fullest].total > kept->memory[kept->fullest].total) {
        cf_memory_report *less = kept->memory;
        kept->memory = next->memory;
        kept->fullest = next->fullest;
        next->memory = less;
    }
    pipeline_run_free(next);
}

static cf_result make_slowest(const pipeline *p, const cf_plan *plan, const pipeline_case *what, pipeline_run *out,
                              cf_error *error) {
    pipeline one = *p;
    pipeline_run slowest, run;
    cf_result result = CF_OK;

    memset(&slowest, 0, sizeof slowest);
    one.every_rank = 0;
    for (one.rank = 0; one.rank < plan->n_ranks && result == CF_OK; one.rank++)
        if ((result = pipeline_run_make(&one, plan, what, &run, error)) == CF_OK) keep_slower(&slowest, &run);
    if (result == CF_OK) *out = slowest;
    else pipeline_run_free(&slowest);
    return result;
}

cf_result pipeline_run_make(const pipeline *p, const cf_plan *plan, const pipeline_case *what, pipeline_run *out,
                            cf_error *error) {
    cf_schedule_desc desc = describe(p, what);
    pipeline_run fresh;
    pipeline_costs costs;
    int64_t *limits = NULL, n_virtual = desc.shape.n_virtual;
    cf_result result;

    if (p->every_rank) return make_slowest(p, plan, what, out, error);
    if (p->lockstep) return make_in_step(p, plan, what, out, error);
    memset(&fresh, 0, sizeof fresh);
    result = pipeline_costs_make(p, n_virtual, plan->chunk_size, what->recompute, &costs, error);
    if (result != CF_OK) return result;
    if (p->limits && !what->unlimited && !(limits = scale_limits(p, n_virtual))) {
        pipeline_costs_free(&costs);
        return no_memory(error);
    }
    desc.timing = &costs.timing;
    desc.limits.chunks_by_stage = limits;
    desc.report = &fresh.report;
    progress_begin("scheduling");
    result = make(p, plan, what, &desc, &fresh, error);
    if (result == CF_OK && is_too_large(p, what, &fresh)) result = hold_down(p, plan, what, desc, &fresh, error);
    progress_end();
    free(limits);
    pipeline_costs_free(&costs);
    if (result == CF_ERROR_INFEASIBLE && error) explain_limit(error, n_virtual);
    if (result == CF_OK) *out = fresh;
    else pipeline_run_free(&fresh);
    return result;
}

static int knows_memory(const pipeline *p) {
    return p->gpu_bytes > 0 || p->limit_bytes > 0 || p->limit > 0 || p->limits;
}

int64_t pipeline_default_k(const pipeline *p, const cf_plan *plan, cf_replay replay) {
    pipeline_case what;
    int64_t k;

    memset(&what, 0, sizeof what);
    what.kind = CF_SCHEDULE_PAPER;
    what.replay = replay;
    for (k = 4; k > 1 && knows_memory(p); k /= 2) {
        pipeline_run run;
        cf_error error;
        int fits;

        what.k = k;
        if (pipeline_run_make(p, plan, &what, &run, &error) != CF_OK) continue;
        fits = pipeline_fits(p, &run) && !run.held_down;
        pipeline_run_free(&run);
        if (fits) break;
    }
    return k;
}

const char *pipeline_default_k_words(const pipeline *p) {
    return knows_memory(p) ? "the largest of 1, 2 and 4 that memory allows"
                           : "the default where nothing says what memory allows";
}

double pipeline_makespan(const pipeline_run *run) {
    return run->in_step > run->timeline->makespan ? run->in_step : run->timeline->makespan;
}

int pipeline_fits(const pipeline *p, const pipeline_run *run) {
    return p->gpu_bytes == 0 || !run->memory || run->memory[run->fullest].total <= p->gpu_bytes;
}

void pipeline_run_free(pipeline_run *run) {
    cf_timeline_free(run->timeline);
    cf_schedule_free(run->schedule);
    free(run->memory);
    memset(run, 0, sizeof *run);
}

/* ----------------------------------------------------------------------------------------------------------------
   Words
   ---------------------------------------------------------------------------------------------------------------- */

const char *pipeline_time(double time) {
    char text[40];

    if (time >= 0 && time < 9e15 && time == (double)(int64_t)time) return cli_commas((int64_t)time);
    snprintf(text, sizeof text, time >= 1e5 && time < 1e15 ? "%.1f" : "%.6g", time);
    return cli_grouped(text);
}

const char *pipeline_estimate(double seconds) {
    char *out;

    if (seconds >= 0 && seconds < 1000 && seconds == (double)(int)seconds) return cli_commas((int)seconds);
    if (seconds >= 999.5 && seconds < 1e15) {
        int64_t unit = 1, whole = (int64_t)(seconds + 0.5);
        while (whole / unit >= 1000) unit *= 10;
        return cli_commas((whole + unit / 2) / unit * unit);
    }
    out = cli_scratch();
    snprintf(out, CLI_SCRATCH_BYTES, seconds >= 1e15 || seconds < 0.9995 ? "%.3g" : seconds < 9.995 ? "%.2f"
                                     : seconds < 99.95 ? "%.1f" : "%.0f", seconds);
    return out;
}

const char *pipeline_pace(double seconds, double other) {
    char *text = cli_scratch();
    double gap = other > 0 ? seconds / other - 1 : 0;

    if (gap > 0 && gap < 9) snprintf(text, CLI_SCRATCH_BYTES, "%.*f %% slower than", gap < 0.01, 100 * gap);
    else if (gap > 0) snprintf(text, CLI_SCRATCH_BYTES, "%s x as slow as", pipeline_estimate(1 + gap));
    else snprintf(text, CLI_SCRATCH_BYTES, "%s x as fast as", pipeline_estimate(seconds > 0 ? other / seconds : 1));
    return text;
}

const char *pipeline_duration(double time, int unit_cost) {
    return unit_cost ? pipeline_time(time) : pipeline_estimate(time);
}

pipeline_speed pipeline_speed_of(const pipeline *p, const cf_plan *plan, double seconds) {
    modelling_flops flops = modelling_flops_of(&p->model.model);
    int64_t ranks = p->every_rank ? plan->n_ranks : 1, first = p->every_rank ? 0 : p->rank, i;
    double gpus = (double)(p->model.parallel.tp * p->n_stages * ranks), rows = 0, pairs = 0, all = 0;
    pipeline_speed speed = {0, -1};

    for (i = 0; i < plan->n_chunks; i++) {
        const cf_chunk *c = &plan->chunks[i];
        all += (double)c->tokens;
        if (c->rank < first || c->rank >= first + ranks) continue;
        rows += (double)c->tokens;
        pairs += (double)c->pairs;
    }
    if (!(seconds > 0) || !(flops.per_token > 0) || !(all > 0)) return speed;
    speed.tokens_per_second = (double)plan->n_tokens * (rows / all) / (seconds * gpus);
    if (p->estimates)
        speed.utilisation = (flops.per_token * rows + flops.per_pair * pairs) / (seconds * gpus * p->gpu.flops);
    return speed;
}

void pipeline_write_speed(json_writer *w, const pipeline_speed *speed) {
    json_number_member(w, "tokens_per_second_a_gpu", speed->tokens_per_second);
    if (speed->utilisation >= 0) json_number_member(w, "model_flops_utilisation", speed->utilisation);
}

const char *pipeline_strongest(const cf_timeline *timeline) {
    const char *name = "none";
    int64_t i;

    for (i = 0; i < timeline->n_bounds; i++)
        if (timeline->bounds[i].value == timeline->bound) name = timeline->bounds[i].name;
    return name;
}

const char *pipeline_unit(int unit_cost) { return unit_cost ? "token times" : "s"; }

void pipeline_print_setting(const pipeline *p) {
    if (p->has_model) modelling_print(&p->model);
    if (p->estimates)
        printf("GPU               %s, %.2f GiB; %.3g us lost around each kernel%s\n", p->gpu.name,
               modelling_gib(p->gpu.memory), 1e6 * p->gpu.launch, modelling_launch_hint(&p->asked->gpu));
    modelling_print_stream(&p->memory);
    if (p->memory.state_window > 0 && p->max_cp > 1) puts(MODELLING_CP_STREAM);
}

const char *pipeline_room_words(const pipeline *p) {
    char *text = cli_scratch();
    int reserved = p->asked->limit_bytes == 0 && p->asked->reserve > 0;

    if (!reserved) return p->asked->limit_bytes > 0 ? "of the limit" : "of the GPU";
    snprintf(text, CLI_SCRATCH_BYTES, "of the GPU less the reserve of %lld %%", (long long)p->asked->reserve);
    return text;
}

static int64_t most_in_host(const pipeline_run *run, int64_t n_stages) {
    int64_t s, most = 0;

    for (s = 0; s < n_stages; s++)
        if (run->memory[s].host > most) most = run->memory[s].host;
    return most;
}

void pipeline_print_memory(const pipeline *p, const pipeline_run *run) {
    if (!run->memory) return;
    printf("peak memory       %.2f GiB on stage %lld", modelling_gib(run->memory[run->fullest].total),
           (long long)run->fullest);
    if (p->model.parallel.dp > 1) printf(" of rank %lld", (long long)p->rank);
    if (p->gpu_bytes > 0)
        printf(", %s the %.2f GiB %s", pipeline_fits(p, run) ? "of" : "MORE THAN", modelling_gib(p->gpu_bytes),
               pipeline_room_words(p));
    if (run->held_down) printf("; the schedule is held down to fit");
    if (most_in_host(run, p->n_stages) > 0)
        printf(", %.2f GiB in host memory for each GPU", modelling_gib(most_in_host(run, p->n_stages)));
    putchar('\n');
}

void pipeline_print_times(const cf_timeline *timeline, int unit_cost, int estimated) {
    const char *(*say)(double) = estimated && !unit_cost ? pipeline_estimate : pipeline_time;

    printf("makespan          %s %s%s\n", say(timeline->makespan), pipeline_unit(unit_cost),
           estimated && !unit_cost ? ", estimated" : "");
    printf("bubble            %.2f %% where replays are waste, %.2f %% where they are work\n",
           100 * timeline->bubble_useful, 100 * timeline->bubble_busy);
    if (timeline->stream_waits > 0)
        printf("waits for state   %s passes wait for their state, %s %s of %s in all\n",
               cli_commas(timeline->stream_waits), say(timeline->stream_seconds), pipeline_unit(unit_cost),
               say(timeline->busy));
}

void pipeline_print_speed(const pipeline *p, const cf_plan *plan, double seconds) {
    pipeline_speed speed;

    if (!p->has_model || p->unit_cost) return;
    speed = pipeline_speed_of(p, plan, seconds);
    printf("speed             %s tokens/s a GPU", pipeline_estimate(speed.tokens_per_second));
    if (speed.utilisation >= 0) printf(", model FLOPs utilisation %.1f %%", 100 * speed.utilisation);
    puts(", estimated; without the optimizer's step");
}

const char *pipeline_share(int64_t count, int64_t n_virtual) {
    if (count % n_virtual == 0) return cli_commas(count / n_virtual);
    return pipeline_time((double)count / (double)n_virtual);
}
