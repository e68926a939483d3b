/* options.h - the command line of train_cpu - MIT or public domain */

#ifndef TRAIN_OPTIONS_H
#define TRAIN_OPTIONS_H

#include "arguments.h"
#include "chunked.h"
#include "optimizer.h"

typedef struct options {
    model_config model;
    optimizer_config optimizer;
    cf_pack_desc packing;
    cf_schedule_desc order;
    int64_t batch, seed, threads;
    int64_t stream;          /* bytes of the ring for states in host memory; 0: they are on the device */
    int64_t longest;         /* longest document in tokens; 0: no limit */
    int64_t prompt;          /* first tokens of a document that are not targets */
    double prompt_fraction;  /* prompt as a fraction of a document */
    length_list synthetic;   /* synthetic documents instead of files */
    int64_t share;           /* see pack_batch */
    length_list with, shared; /* prefixes that they share: see make_alike */
    const char **paths;      /* (n_paths) files and directories */
    int64_t n_paths;
    const char *checkpoint, *kinds;
    int64_t checkpoint_every, stop_after, print_every;
    int outputs;             /* see chunk_runner.keep_outputs */
    int check, memory_table, demo, exact, help, shared_mean, advantages;
} options;

static inline int64_t list_options(options *o, option list[MAX_OPTIONS]) {
    const option all[] = {
        {"check", FLAG, &o->check, 0, 0, NULL, "run one batch chunked and unchunked, compare the gradients, and end"},
        {"memory-table", FLAG, &o->memory_table, 0, 0, NULL, "measure memory as the longest document grows, and end"},
        {"demo", FLAG, &o->demo, 0, 0, NULL, "a short training, a check and the memory table"},
        {"layers", INTEGER, &o->model.layers, 1, MANY, NULL, "layers"},
        {"hidden", INTEGER, &o->model.hidden, 1, MANY, NULL, "width of the residual stream"},
        {"heads", INTEGER, &o->model.heads, 1, MANY, NULL, "query heads"},
        {"kv-heads", INTEGER, &o->model.kv_heads, 1, MANY, NULL, "key and value heads"},
        {"ffn", INTEGER, &o->model.ffn, 1, MANY, NULL, "width of the feed-forward part"},
        {"untied", FLAG, &o->model.untied, 0, 0, NULL, "give the head a weight of its own"},
        {"dropout", NUMBER, &o->model.dropout, 0, 1, NULL, "rate of dropout, less than 1"},
        {"window", INTEGER, &o->model.window, 0, INT32_MAX, NULL, "keys that a query sees, its own included, 0: all"},
        {"kinds", WORDS, &o->kinds, 0, 0, NULL, KINDS_HELP},
        {"experts", INTEGER, &o->model.kinds.experts, 1, MAX_EXPERTS, NULL, "experts of a layer that has some"},
        {"active", INTEGER, &o->model.kinds.active, 1, MAX_ACTIVE, NULL, "of which a row chooses so many"},
        {"balance", NUMBER, &o->model.kinds.balance, 0, MANY, NULL, "weight of the experts' balance loss"},
        {"balance-over", CHOICE, &o->model.kinds.balance_over, 0, 0, "sequence batch call", "what it is taken over"},
        {"capacity", NUMBER, &o->model.kinds.capacity, 0, MANY, NULL, "tokens that an expert takes, 0: all that come"},
        {"mtp", NUMBER, &o->model.kinds.mtp, 0, MANY, NULL, "weight of a loss of the next token but one, 0: none"},
        {"chunk-size", INTEGER, &o->packing.chunk_size, 1, CF_MAX_CHUNK_SIZE, NULL, "most tokens of a chunk"},
        {"k", INTEGER, &o->order.shape.k, 1, MANY, NULL, "chunks of a chain that keep their activations at once"},
        {"stream", INTEGER, &o->stream, 0, MANY, NULL,
         "keep states in host memory and stream them through a ring of these bytes, 0: no"},
        {"outputs", FLAG, &o->outputs, 0, 0, NULL, OUTPUTS_HELP},
        {"method", CHOICE, &o->packing.method, 0, 0, "best next", "how to fit sequences into chunks"},
        {"split", CHOICE, &o->packing.split, 0, 0, "full even cost", "how to cut long sequences"},
        {"no-tails", FLAG, &o->packing.no_tails, 0, 0, NULL, "no hybrid chunks: a chain's last chunk stays alone"},
        {"align", INTEGER, &o->packing.align, 1, CF_MAX_CHUNK_SIZE, NULL, "slices start at multiples of this"},
        {"max-slices", INTEGER, &o->packing.max_slices, 0, MANY, NULL, "most slices of a chunk, 0: any"},
        {"share", INTEGER, &o->share, 0, MANY, NULL, SHARE_HELP},
        {"shared-mean", FLAG, &o->shared_mean, 0, 0, NULL, ONCE_HELP},
        {"ranks", INTEGER, &o->packing.n_ranks, 1, CF_MAX_RANKS, NULL, "data-parallel ranks, run one after the other"},
        {"batch", INTEGER, &o->batch, 1, 1e6, NULL, "documents of a training step"},
        {"steps", INTEGER, &o->optimizer.steps, 1, MANY, NULL, "training steps of the whole run"},
        {"lr", NUMBER, &o->optimizer.learning_rate, 0, MANY, NULL, "learning rate after the warm-up"},
        {"warmup", INTEGER, &o->optimizer.warmup, 0, MANY, NULL, "steps of the warm-up"},
        {"weight-decay", NUMBER, &o->optimizer.weight_decay, 0, MANY, NULL, "AdamW's weight decay"},
        {"clip", NUMBER, &o->optimizer.clip, 0, MANY, NULL, "longest gradient, 0: any"},
        {"seed", INTEGER, &o->seed, 0, MANY, NULL, "of weights, data order and dropout"},
        {"threads", INTEGER, &o->threads, 0, 4096, NULL, "threads, 0: as OpenMP sees fit; results do not depend on it"},
        {"max-length", INTEGER, &o->longest, 0, MANY, NULL, "cut longer files at blank lines, to at most this, 0: never"},
        {"prompt", INTEGER, &o->prompt, 0, MANY, NULL, "first tokens of each document that are no targets"},
        {"prompt-fraction", NUMBER, &o->prompt_fraction, 0, 1, NULL, "the same as a part of each document"},
        {"advantages", FLAG, &o->advantages, 0, 0, NULL, "weigh documents by numbers of both signs, drawn for each"},
        {"synthetic", LENGTHS, &o->synthetic, 0, 0, NULL, "LEN,LEN,...: one batch of made-up documents"},
        {"with", LENGTHS, &o->with, 0, 0, NULL, WITH_HELP},
        {"shared", LENGTHS, &o->shared, 0, 0, NULL, SHARED_HELP},
        {"checkpoint", TEXT, &o->checkpoint, 0, 0, NULL, "file to go on from, if it is there, and to write to"},
        {"checkpoint-every", INTEGER, &o->checkpoint_every, 1, MANY, NULL, "steps between two checkpoints"},
        {"stop-after", INTEGER, &o->stop_after, 0, MANY, NULL, "end after so many steps now, 0: when all are done"},
        {"print-every", INTEGER, &o->print_every, 1, MANY, NULL, "steps between two progress lines"},
        {"exact", FLAG, &o->exact, 0, 0, NULL, "print losses with all their bits"},
        {"help", FLAG, &o->help, 0, 0, NULL, "this"},
    };
    memcpy(list, all, sizeof all);
    return (int64_t)(sizeof all / sizeof all[0]);
}

static inline options options_default(void) {
    options o;
    memset(&o, 0, sizeof o);
    o.model.vocabulary = VOCABULARY;
    o.model.layers = 2;
    o.model.hidden = 64;
    o.model.heads = 4;
    o.model.kv_heads = 2;
    o.model.ffn = 176;
    o.model.rope_theta = 1e6;
    o.model.norm_epsilon = 1e-6;
    o.model.kinds.experts = 4;
    o.model.kinds.active = 2;
    o.optimizer.learning_rate = 3e-3;
    o.optimizer.floor = 0.1;
    o.optimizer.warmup = 10;
    o.optimizer.steps = 100;
    o.optimizer.beta1 = 0.9;
    o.optimizer.beta2 = 0.95;
    o.optimizer.epsilon = 1e-8;
    o.optimizer.weight_decay = 0.1;
    o.optimizer.clip = 1;
    o.packing.chunk_size = 256;
    o.packing = cf_pack_defaults(&o.packing);
    o.order.shape.k = 1;
    o.batch = 8;
    o.seed = 1;
    o.longest = 4096;
    o.checkpoint_every = 50;
    o.print_every = 1;
    return o;
}

static inline void options_free(options *o) {
    free(o->synthetic.lengths);
    free(o->with.lengths);
    free(o->shared.lengths);
    free((void *)o->paths);
}

static inline void print_help(options *o) {
    option list[MAX_OPTIONS];
    int64_t n = list_options(o, list);
    printf("usage: train_cpu [options] [FILE|DIRECTORY ...]\n"
           "Trains a small byte-level decoder (" REAL_NAME ") on the files, each a document; default: this directory.\n"
           "Batches are cut and packed into chunks, so memory follows K x chunk-size, not the longest document.\n\n");
    print_options(list, n);
    printf("\nExit status: 0 done, 1 a check (or memory, or the disk) failed, 2 an option or file was not usable.\n");
}

/* Reads the command line over the defaults. Ends the program with a message if something is wrong. */
static inline options parse_options(int argc, char **argv) {
    options o = options_default();
    option list[MAX_OPTIONS];
    o.paths = TAKE(const char *, argc);
    o.n_paths = parse_arguments(argc, argv, list, list_options(&o, list), o.paths);
    const char *fault = o.kinds ? parse_pattern(&o.model.kinds, o.kinds) : NULL;
    if (!fault) fault = model_config_fault(&o.model);
    if (!fault && o.share > 0) fault = model_sharing_fault(&o.model);
    if (fault) fail(EXIT_BAD_INPUT, "%s", fault);
    check_stream_bytes(o.stream, &o.model);
    check_alike(&o.synthetic, &o.with, &o.shared);
    if (o.synthetic.count > 0 && o.n_paths > 0) fail(EXIT_BAD_INPUT, "give --synthetic or files, not both");
    check_shared_mean(o.shared_mean, o.share, o.packing.align);
    if (o.outputs && (o.memory_table || o.demo))
        fail(EXIT_BAD_INPUT, "--outputs: kept outputs grow with the document, unlike what the memory table is about");
    if (o.longest > 0 && o.longest < 3) fail(EXIT_BAD_INPUT, "--max-length must be 0 or at least 3");
    return o;
}

#endif /* TRAIN_OPTIONS_H */
