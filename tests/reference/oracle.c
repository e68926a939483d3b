/* oracle.c - see oracle.h. Deliberately simple: every function follows a definition. */

#include "oracle.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ----------------------------------------------------------------------------------------------------------------
   batches
   ---------------------------------------------------------------------------------------------------------------- */

static int64_t draw_chunk_size(harness_rng *rng) {
    static const int64_t sizes[] = {1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 30, 64, 97, 100, 128, 256, 1000};
    return sizes[harness_between(rng, 0, (int64_t)(sizeof sizes / sizeof sizes[0]) - 1)];
}

static int64_t draw_divisor(harness_rng *rng, int64_t n) {
    int64_t divisor;
    do {
        divisor = harness_between(rng, 1, n);
    } while (n % divisor != 0);
    return divisor;
}

enum { SHAPE_SHORT, SHAPE_TAILED, SHAPE_LONG, SHAPE_EDGES, SHAPE_EQUAL, SHAPE_EMPTY, SHAPE_MIXED, SHAPE_COUNT };

static int64_t draw_edge(harness_rng *rng, int64_t c) {
    switch (harness_between(rng, 0, 6)) {
        case 0: return 0;
        case 1: return 1;
        case 2: return c;
        case 3: return c + 1;
        case 4: return c * harness_between(rng, 1, 6);
        case 5: return c * harness_between(rng, 1, 6) + 1;
        default: return c > 1 ? c - 1 : 1;
    }
}

static int64_t draw_length(harness_rng *rng, int64_t shape, int64_t c, int64_t equal) {
    switch (shape) {
        case SHAPE_SHORT: return harness_between(rng, 1, c);
        case SHAPE_LONG: return harness_between(rng, c + 1, 9 * c + 3);
        case SHAPE_EDGES: return draw_edge(rng, c);
        case SHAPE_EQUAL: return equal;
        case SHAPE_EMPTY: return 0;
        case SHAPE_TAILED: /* half as many of twice the length, and so on */
            return (int64_t)((double)c * 0.12 / (harness_unit(rng) + 0.01));
        default: return draw_length(rng, harness_between(rng, 0, SHAPE_EMPTY), c, equal);
    }
}

void oracle_draw(harness_rng *rng, oracle_batch *batch, int64_t most) {
    cf_pack_desc *desc = &batch->desc;
    int64_t shape = harness_between(rng, 0, SHAPE_COUNT - 1), c = draw_chunk_size(rng), i;
    int64_t equal = harness_between(rng, 1, 2 * c);
    memset(batch, 0, sizeof *batch);
    batch->n = harness_chance(rng, 0.02) ? 0 : harness_between(rng, 1, most);
    if (shape == SHAPE_EMPTY && !harness_chance(rng, 0.1)) shape = SHAPE_TAILED;
    for (i = 0; i < batch->n; i++) batch->lengths[i] = draw_length(rng, shape, c, equal);
    desc->chunk_size = c;
    desc->method = harness_between(rng, 0, 3) < 3 ? CF_PACK_DEFAULT : CF_PACK_NEXT_FIT;
    desc->split = (cf_split_method)harness_between(rng, 0, 3);
    desc->no_tails = harness_chance(rng, 0.3);
    desc->align = harness_chance(rng, 0.3) ? draw_divisor(rng, c) : 0;
    desc->max_slices = harness_chance(rng, 0.25) ? harness_between(rng, 1, 6) : 0;
    desc->n_ranks = harness_chance(rng, 0.3) ? harness_between(rng, 1, 6) : 0;
    if (harness_chance(rng, 0.3)) {
        desc->cost.constant = harness_unit(rng);
        desc->cost.per_token = harness_unit(rng);
        desc->cost.per_pair = harness_chance(rng, 0.8) ? harness_unit(rng) / (double)c : 0.0;
    }
}

void oracle_note(uint64_t seed, const oracle_batch *batch) {
    const cf_pack_desc *desc = &batch->desc;
    char lengths[200] = "";
    size_t at = 0;
    int64_t i;
    for (i = 0; i < batch->n && at + 30 < sizeof lengths; i++)
        at += (size_t)snprintf(lengths + at, sizeof lengths - at, "%s%lld", i ? "," : "", (long long)batch->lengths[i]);
    harness_note("seed %llu: C=%lld method=%d split=%d no_tails=%d align=%lld max_slices=%lld ranks=%lld "
                 "cost=%g,%g,%g n=%lld: %s%s", (unsigned long long)seed, (long long)desc->chunk_size,
                 (int)desc->method, (int)desc->split, desc->no_tails, (long long)desc->align,
                 (long long)desc->max_slices, (long long)desc->n_ranks, desc->cost.constant, desc->cost.per_token,
                 desc->cost.per_pair, (long long)batch->n, lengths, i < batch->n ? ",..." : "");
}

int64_t oracle_divide_up(int64_t n, int64_t divisor) {
    return n / divisor + (n % divisor != 0);
}

int64_t oracle_round_up(int64_t n, int64_t multiple) {
    return oracle_divide_up(n, multiple) * multiple;
}

int64_t oracle_pairs(int64_t prefix, int64_t length) {
    int64_t pairs = 0, query;
    for (query = 0; query < length; query++) pairs += prefix + query + 1; /* all keys up to and including itself */
    return pairs;
}

/* ----------------------------------------------------------------------------------------------------------------
   judging a plan
   ---------------------------------------------------------------------------------------------------------------- */

#define RULE(condition)                   \
    do {                                  \
        if (!(condition)) return #condition; \
    } while (0)

static const char *counts_fault(const cf_plan *p, const int64_t *lengths, int64_t n) {
    int64_t total = 0, empty = 0, i;
    for (i = 0; i < n; i++) {
        total += lengths[i];
        empty += lengths[i] == 0;
    }
    RULE(p->chunk_size >= 1 && p->chunk_size <= CF_MAX_CHUNK_SIZE);
    RULE(p->align >= 1 && p->chunk_size % p->align == 0);
    RULE(p->max_slices >= 0);
    RULE(p->method == CF_PACK_BEST_FIT || p->method == CF_PACK_NEXT_FIT);
    RULE(p->split == CF_SPLIT_FULL || p->split == CF_SPLIT_EVEN || p->split == CF_SPLIT_COST);
    RULE(p->n_sequences == n);
    RULE(p->n_empty == empty);
    RULE(p->n_tokens == total);
    RULE(p->n_ranks >= 1 && p->n_ranks <= CF_MAX_RANKS);
    RULE(p->chunks_per_rank >= 0 && p->chunks_per_rank <= CF_MAX_CHUNKS);
    RULE(p->n_chunks == p->n_ranks * p->chunks_per_rank);
    RULE(p->n_slices >= 0 && p->n_chains >= 0 && p->n_idle >= 0);
    return NULL;
}

/* Returns the chunk of a list whose rows come directly before those of chunk c: in a cp group on the previous rank, or
   the last of the previous column. -1: none. */
static int64_t before_of(const cf_plan *p, int64_t c) {
    const cf_chunk *chunk = &p->chunks[c];
    int64_t cp = p->chains[chunk->chain].cp, before = chunk->index > 0 ? c - 1 : -1;
    if (cp < 2 || cp > p->n_ranks) return before;
    if (chunk->rank % cp > 0) return c - p->chunks_per_rank;
    before += before >= 0 ? (cp - 1) * p->chunks_per_rank : 0;
    return before < p->n_chunks ? before : -1;
}

/* Judges a chunk by itself, including its slices. *next: the slice that must come next in the plan. */
static const char *chunk_fault(const cf_plan *p, int64_t c, const int64_t *lengths, int64_t *next) {
    const cf_chunk *chunk = &p->chunks[c];
    int64_t tokens = 0, padded = 0, pairs = 0, before, i;
    RULE(chunk->n_slices >= 0 && chunk->n_slices <= p->n_slices - *next);
    RULE(chunk->first_slice == *next);
    RULE(p->max_slices == 0 || chunk->n_slices <= p->max_slices);
    RULE(chunk->rank == c / p->chunks_per_rank);
    RULE(chunk->chain >= -1 && chunk->chain < p->n_chains);
    RULE(chunk->up == (chunk->chain >= 0 && chunk->index > 0 ? c - 1 : -1));
    for (i = 0; i < chunk->n_slices; i++) {
        const cf_slice *slice = &p->slices[*next + i];
        int in_chain = chunk->chain >= 0 && i == 0;
        RULE(slice->sequence >= 0 && slice->sequence < p->n_sequences);
        RULE(slice->length >= 1 && slice->length <= p->chunk_size);
        RULE(slice->begin >= 0 && slice->begin <= lengths[slice->sequence] - slice->length);
        RULE(slice->offset == padded);
        RULE(slice->first == slice->sequence && slice->n == 1);
        before = in_chain ? before_of(p, c) : -1;
        RULE(slice->up == (before >= 0 ? p->chunks[before].first_slice : -1));
        if (!in_chain) {
            RULE(slice->begin == 0 && slice->length == lengths[slice->sequence]); /* short sequences stay whole */
        } else {
            RULE(slice->sequence == p->chains[chunk->chain].sequence);
            RULE(p->chains[chunk->chain].cp > 0 || slice->begin == chunk->prefix);
        }
        tokens += slice->length;
        padded += oracle_round_up(slice->length, p->align);
        RULE(padded <= p->chunk_size);
        pairs += oracle_pairs(in_chain ? slice->begin : 0, slice->length);
    }
    RULE(chunk->tokens == tokens);
    RULE(chunk->rows == padded);
    RULE(chunk->pairs == pairs);
    if (chunk->chain < 0) {
        RULE(chunk->chain == -1 && chunk->index == 0 && chunk->prefix == 0);
        RULE(chunk->down == -1 && chunk->below == 0 && chunk->state == 0 && chunk->cp == 0);
    } else {
        RULE(chunk->n_slices >= 1);
    }
    *next += chunk->n_slices;
    return NULL;
}

static const char *chain_fault(const cf_plan *p, int64_t g, const int64_t *lengths) {
    const cf_chain *chain = &p->chains[g];
    int64_t prefix = 0, i;
    RULE(chain->sequence >= 0 && chain->sequence < p->n_sequences);
    RULE(chain->cp > 0 || chain->tokens == lengths[chain->sequence]);
    RULE(chain->n_chunks >= 1 && chain->n_chunks <= p->n_chunks);
    RULE(chain->first_chunk >= 0 && chain->first_chunk <= p->n_chunks - chain->n_chunks);
    for (i = 0; i < chain->n_chunks; i++) {
        const cf_chunk *chunk = &p->chunks[chain->first_chunk + i];
        RULE(chunk->chain == g && chunk->index == i && chunk->prefix == prefix);
        RULE(chunk->below == chain->n_chunks - 1 - i && chunk->cp == chain->cp);
        RULE(chunk->down == (chunk->below > 0 ? chain->first_chunk + i + 1 : -1));
        RULE(chunk->state == p->slices[chunk->first_slice].length);
        RULE(chunk->rank == p->chunks[chain->first_chunk].rank);
        RULE(i == chain->n_chunks - 1 || chunk->n_slices == 1); /* only the last one may be hybrid */
        RULE(chunk->n_slices >= 1);
        /* Attention that is divided over several devices needs cuts at alignment units. */
        RULE((i == chain->n_chunks - 1 && chain->cp == 0) || p->slices[chunk->first_slice].length % p->align == 0 ||
             p->slices[chunk->first_slice].begin + p->slices[chunk->first_slice].length == lengths[chain->sequence]);
        prefix += p->slices[chunk->first_slice].length;
    }
    RULE(prefix == chain->tokens);
    return NULL;
}

/* Chain g is a share of a cp group. Checks that all ranks of its block have one, beginning in the same column, and that
   their slices, by column and then by rank, have the whole sequence. */
static const char *cp_fault(const cf_plan *p, int64_t g, const int64_t *lengths) {
    const cf_chain *share = &p->chains[g];
    int64_t step, first_rank, covered = 0, round, rank;
    RULE(share->cp >= 2 && share->cp <= p->n_ranks && p->n_ranks % share->cp == 0);
    step = share->first_chunk % p->chunks_per_rank;
    first_rank = share->first_chunk / p->chunks_per_rank / share->cp * share->cp;
    for (round = 0; round < share->n_chunks; round++)
        for (rank = first_rank; rank < first_rank + share->cp; rank++) {
            const cf_chunk *c = &p->chunks[rank * p->chunks_per_rank + step + round];
            const cf_slice *s = &p->slices[c->first_slice];
            RULE(c->chain >= 0 && c->index == round);
            RULE(p->chains[c->chain].cp == share->cp && p->chains[c->chain].n_chunks == share->n_chunks);
            RULE(s->sequence == share->sequence && s->begin == covered);
            covered += s->length;
        }
    RULE(covered == lengths[share->sequence]);
    return NULL;
}

static int in_cp_group(const cf_plan *p, int64_t sequence) {
    int64_t i;
    for (i = 0; i < p->n_chains; i++)
        if (p->chains[i].sequence == sequence) return p->chains[i].cp > 0;
    return 0;
}

/* Checks that every token of every sequence is in exactly one slice, and that slices of a sequence are in order, except
   in cp groups. `covered`: n zeros. */
static const char *cover_fault(const cf_plan *p, const int64_t *lengths, int64_t n, int64_t *covered) {
    int64_t i;
    for (i = 0; i < p->n_slices; i++) {
        const cf_slice *slice = &p->slices[i];
        RULE(slice->begin == covered[slice->sequence] || in_cp_group(p, slice->sequence));
        covered[slice->sequence] += slice->length;
    }
    for (i = 0; i < n; i++) RULE(covered[i] == lengths[i]);
    return NULL;
}

const char *oracle_plan_fault(const cf_plan *p, const int64_t *lengths, int64_t n) {
    const char *fault = counts_fault(p, lengths, n);
    int64_t next = 0, idle = 0, in_chains = 0, dependent = 0, *covered, i;
    for (i = 0; i < p->n_chunks && !fault; i++) {
        fault = chunk_fault(p, i, lengths, &next);
        idle += p->chunks[i].n_slices == 0;
        dependent += p->chunks[i].chain >= 0;
    }
    if (fault) return fault;
    RULE(next == p->n_slices);
    RULE(idle == p->n_idle);
    for (i = 0; i < p->n_chains && !fault; i++) {
        fault = chain_fault(p, i, lengths);
        if (!fault && p->chains[i].cp != 0) fault = cp_fault(p, i, lengths);
        if (!fault) in_chains += p->chains[i].n_chunks;
    }
    if (fault) return fault;
    RULE(in_chains == dependent);
    RULE(p->lower_bound >= 0 && p->lower_bound <= p->n_chunks - p->n_idle);
    covered = (int64_t *)calloc((size_t)n + 1, sizeof *covered);
    if (!covered) return "out of memory";
    fault = cover_fault(p, lengths, n, covered);
    free(covered);
    return fault;
}

/* ---- options ---- */

static const char *kinds_fault(const cf_plan *p, const cf_pack_desc *desc) {
    int64_t i;
    for (i = 0; i < p->n_chunks; i++) {
        if (desc->no_tails && p->chunks[i].chain >= 0) RULE(p->chunks[i].n_slices == 1);
    }
    if (desc->method == CF_PACK_NEXT_FIT) RULE(p->method == CF_PACK_NEXT_FIT);
    if (desc->method == CF_PACK_BEST_FIT || desc->method == CF_PACK_DEFAULT) RULE(p->method == CF_PACK_BEST_FIT);
    return NULL;
}

/* Checks each rank's order: chains, then standalone chunks, then idle ones. Next fit keeps the order of the input. */
static const char *order_fault(const cf_plan *p) {
    int64_t i, last_sequence = -1, last_kind = 0, last_chain_sequence = -1;
    for (i = 0; i < p->n_chunks; i++) {
        const cf_chunk *chunk = &p->chunks[i];
        int64_t kind = chunk->n_slices == 0 ? 2 : chunk->chain >= 0 ? 0 : 1, j;
        if (i % p->chunks_per_rank == 0) last_sequence = last_chain_sequence = -1, last_kind = 0;
        if (p->method == CF_PACK_NEXT_FIT) {
            for (j = 0; j < chunk->n_slices; j++) {
                int64_t sequence = p->slices[chunk->first_slice + j].sequence;
                RULE(sequence >= last_sequence); /* equal inside a chain */
                last_sequence = sequence;
            }
            RULE((kind == 2) >= (last_kind == 2));
        } else {
            RULE(kind >= last_kind);
        }
        if (kind == 0) {
            RULE(p->chains[chunk->chain].sequence >= last_chain_sequence);
            last_chain_sequence = p->chains[chunk->chain].sequence;
        }
        last_kind = kind;
    }
    return NULL;
}

/* Checks how one chain was split. */
static const char *split_fault(const cf_plan *p, const cf_chain *chain) {
    int64_t fewest = oracle_divide_up(chain->tokens, p->chunk_size), least = INT64_MAX, most = 0, i;
    for (i = 0; i < chain->n_chunks; i++) {
        int64_t length = p->slices[p->chunks[chain->first_chunk + i].first_slice].length;
        if (length < least) least = length;
        if (length > most) most = length;
        if (p->split == CF_SPLIT_FULL && i < chain->n_chunks - 1) RULE(length == p->chunk_size);
    }
    RULE(chain->tokens > p->chunk_size); /* nothing else is split */
    RULE(chain->n_chunks >= 2);
    if (p->split != CF_SPLIT_COST) RULE(chain->n_chunks == fewest);
    if (p->split == CF_SPLIT_EVEN) RULE(most - least <= p->align);
    RULE(chain->n_chunks >= fewest);
    return NULL;
}

const char *oracle_option_fault(const cf_plan *p, const int64_t *lengths, const cf_pack_desc *desc) {
    const char *fault;
    int64_t i, n_long = 0;
    RULE(p->chunk_size == desc->chunk_size);
    RULE(p->align == (desc->align ? desc->align : 1));
    RULE(p->max_slices == desc->max_slices);
    RULE(p->n_ranks == (desc->n_ranks ? desc->n_ranks : 1));
    RULE(p->split == (desc->split ? desc->split : CF_SPLIT_FULL));
    for (i = 0; i < p->n_sequences; i++) n_long += lengths[i] > desc->chunk_size;
    RULE(p->n_chains == n_long);
    fault = kinds_fault(p, desc);
    if (!fault) fault = order_fault(p);
    for (i = 0; i < p->n_chains && !fault; i++) fault = split_fault(p, &p->chains[i]);
    return fault;
}

/* ----------------------------------------------------------------------------------------------------------------
   records of failures
   ---------------------------------------------------------------------------------------------------------------- */

static int begins_with(const char *text, const char *begin) { return strncmp(text, begin, strlen(begin)) == 0; }

/* Returns whether the field is a count, a shape or an option, which has no items. */
static int has_no_items(const cf_error *e) {
    static const char *const alone[] = {
        "n_", "model.", "gpu.", "capacity.", "allocator.", "limits.per_token.", "memory", "bytes", "align", "rank",
        "method", "split", "kind", "replay", "lowered", "max_tries", "candidate", "chunk_size", "chunk", "stage", "k",
        "timeline", "count", "format", "torch", "activation_bytes", "parallel.pp", "parallel.tp", "parallel.dp",
        "parallel.zero", "parallel.n_virtual", "timing.latency"};
    size_t i, n;
    for (i = 0; i < sizeof alone / sizeof alone[0]; i++) {
        n = strlen(alone[i]);
        if (strchr("_.", alone[i][n - 1]) ? begins_with(e->field, alone[i]) : strcmp(e->field, alone[i]) == 0) return 1;
    }
    return begins_with(e->field, "shape.") && strstr(e->text, " of chunk ") == NULL;
}

/* Returns 1 if the found number must be more than the wanted one, -1: less, 2: different, 0: unknown. */
static int way_of(const cf_error *e) {
    static const struct {
        const char *words;
        int way;
    } ways[] = {{"is too small", -1}, {"is negative", -1}, {"must not be negative", -1}, {"needs two passes", -1},
                {"every chunk needs", -1}, {"no schedule can keep", -1}, {"too few", -1}, {"too little", -1},
                {"some chunks never end", -1}, {"was not run to its end", -1}, {"leaves out tokens", -1},
                {"has no items left", -1}, {"is too large", 1}, {"is too long", 1}, {"too many", 1}, {"more slices", 1},
                {"is more than", 1}, {"must not be more", 1}, {"more chunks than", 1}, {"more than K", 1},
                {"more bytes than", 1}, {"more tokens of state", 1}, {"still in use", 1}, {"is lowered already", 1},
                {"pass 32 bits", 1}, {"wrong keep flag", 1}, {"reserved byte", 1}, {"no such pass in such", 1},
                {"only interleaved", 1}, {"must divide", 1}, {"", 2}};
    size_t i = 0;
    while (strstr(e->text, ways[i].words) == NULL) i++;
    return ways[i].way;
}

const char *oracle_error_fault(const cf_error *e) {
    const char *numbers = strstr(e->text, " (wanted ");
    const int way = way_of(e);
    char head[160], end[80];
    if (e->field == NULL || e->field[0] == '\0') return "names no field";
    snprintf(head, sizeof head, e->item >= 0 ? "%s[%lld]: " : "%s: ", e->field, (long long)e->item);
    if (!begins_with(e->text, head)) return "the text does not begin with field and item";
    if (e->item < -1) return "an item below -1";
    if (e->item >= 0 && has_no_items(e)) return "an item of what has none";
    if (e->code == CF_ERROR_MEMORY || strlen(e->text) + 1 == sizeof e->text) return NULL;
    if (numbers == NULL) {
        if (e->code == CF_ERROR_CALLBACK || e->code == CF_ERROR_CANCELLED) return NULL;
        return e->wanted == 0 && e->got == 0 ? NULL : "numbers that the text does not have";
    }
    snprintf(end, sizeof end, " (wanted %lld, got %lld)", (long long)e->wanted, (long long)e->got);
    if (strcmp(numbers, end) != 0 && strstr(e->text, "bytes)") == NULL) return "the text has other numbers";
    if (way == 1 && !(e->got > e->wanted)) return "what was found is not more";
    if (way == -1 && !(e->got < e->wanted)) return "what was found is not less";
    return NULL;
}

const char *oracle_change_fault(const cf_error *error, const char *field, int64_t item, int64_t was, int64_t now) {
    if (strcmp(error->field, field) != 0 || error->item != item) return NULL;
    if (error->got != now) return "it has not found what is there";
    if (now > was ? error->wanted < was || error->wanted >= now : error->wanted > was || error->wanted <= now)
        return "what it wanted is no nearer to what was there";
    return NULL;
}

/* ----------------------------------------------------------------------------------------------------------------
   numbers to be damaged
   ---------------------------------------------------------------------------------------------------------------- */

oracle_number oracle_slice_number(cf_slice *slice, int64_t which) {
    oracle_number numbers[ORACLE_SLICE_NUMBERS] = {
        {&slice->begin, sizeof slice->begin},   {&slice->sequence, sizeof slice->sequence},
        {&slice->length, sizeof slice->length}, {&slice->offset, sizeof slice->offset},
        {&slice->up, sizeof slice->up},         {&slice->first, sizeof slice->first},
        {&slice->n, sizeof slice->n}};
    return numbers[which];
}

int64_t oracle_read(oracle_number number) {
    return number.bytes == sizeof(int32_t) ? *(int32_t *)number.at : *(int64_t *)number.at;
}

void oracle_write(oracle_number number, int64_t value) {
    if (number.bytes == sizeof(int32_t)) *(int32_t *)number.at = (int32_t)(uint32_t)(uint64_t)value;
    else *(int64_t *)number.at = value;
}

/* ----------------------------------------------------------------------------------------------------------------
   packing
   ---------------------------------------------------------------------------------------------------------------- */

void oracle_packing_of(const cf_plan *plan, const int64_t *lengths, const cf_pack_desc *desc, oracle_packing *packing) {
    int64_t i;
    memset(packing, 0, sizeof *packing);
    packing->capacity = plan->chunk_size;
    packing->max_slices = desc->max_slices;
    for (i = 0; i < plan->n_chains && !desc->no_tails; i++) {
        const cf_chain *chain = &plan->chains[i];
        const cf_chunk *last = &plan->chunks[chain->first_chunk + chain->n_chunks - 1];
        packing->tails[packing->n_tails++] = oracle_round_up(plan->slices[last->first_slice].length, plan->align);
    }
    for (i = 0; i < plan->n_sequences; i++)
        if (lengths[i] > 0 && lengths[i] <= plan->chunk_size)
            packing->items[packing->n_items++] = oracle_round_up(lengths[i], plan->align);
}

static void start_bins(oracle_packing *packing) {
    int64_t i;
    packing->n_bins = packing->n_tails;
    for (i = 0; i < packing->n_tails; i++) {
        packing->used[i] = packing->tails[i];
        packing->count[i] = 1;
    }
}

static int has_room(const oracle_packing *packing, int64_t bin, int64_t item) {
    if (packing->max_slices && packing->count[bin] >= packing->max_slices) return 0;
    return packing->used[bin] + item <= packing->capacity;
}

static void put(oracle_packing *packing, int64_t item, int64_t bin) {
    if (bin == packing->n_bins) {
        packing->used[bin] = packing->count[bin] = 0;
        packing->n_bins++;
    }
    packing->used[bin] += packing->items[item];
    packing->count[bin]++;
    packing->bin_of[item] = bin;
}

/* Returns the longest item that has not been placed; of equal ones the first. */
static int64_t longest_left(const oracle_packing *packing, const char *placed) {
    int64_t longest = -1, i;
    for (i = 0; i < packing->n_items; i++)
        if (!placed[i] && (longest < 0 || packing->items[i] > packing->items[longest])) longest = i;
    return longest;
}

static void fit_decreasing(oracle_packing *packing, int fullest) {
    char placed[ORACLE_MOST_SEQUENCES] = {0};
    int64_t round, bin;
    start_bins(packing);
    for (round = 0; round < packing->n_items; round++) {
        int64_t item = longest_left(packing, placed), chosen = packing->n_bins;
        for (bin = 0; bin < packing->n_bins; bin++) {
            if (!has_room(packing, bin, packing->items[item])) continue;
            if (chosen == packing->n_bins || (fullest && packing->used[bin] > packing->used[chosen])) chosen = bin;
        }
        put(packing, item, chosen);
        placed[item] = 1;
    }
}

void oracle_first_fit(oracle_packing *packing) {
    fit_decreasing(packing, 0);
}

void oracle_best_fit(oracle_packing *packing) {
    fit_decreasing(packing, 1);
}

static void try_everything(oracle_packing *packing, int64_t item, int64_t *best) {
    int64_t bin, bins = packing->n_bins;
    if (bins >= *best) return;
    if (item == packing->n_items) {
        *best = bins;
        return;
    }
    for (bin = 0; bin <= bins; bin++) {
        if (bin < bins && !has_room(packing, bin, packing->items[item])) continue;
        put(packing, item, bin);
        try_everything(packing, item + 1, best);
        packing->used[bin] -= packing->items[item];
        packing->count[bin]--;
        packing->n_bins = bins;
    }
}

int64_t oracle_optimum(const oracle_packing *packing) {
    static oracle_packing work;
    int64_t best = INT64_MAX;
    work = *packing;
    start_bins(&work);
    try_everything(&work, 0, &best);
    return best;
}

/* Martello and Toth's bound L(alpha). Items above capacity - alpha are alone in their bins, and those above half the
   capacity need a bin each. Items down to alpha that do not fit into the free space of the latter need further bins. */
static int64_t bound_at(const int64_t *weights, int64_t n, int64_t capacity, int64_t alpha) {
    int64_t alone = 0, large = 0, free_space = 0, small = 0, i;
    for (i = 0; i < n; i++) {
        if (weights[i] > capacity - alpha) {
            alone++;
        } else if (2 * weights[i] > capacity) {
            large++;
            free_space += capacity - weights[i];
        } else if (weights[i] >= alpha) {
            small += weights[i];
        }
    }
    return alone + large + (small > free_space ? oracle_divide_up(small - free_space, capacity) : 0);
}

int64_t oracle_bound(const oracle_packing *packing) {
    int64_t weights[2 * ORACLE_MOST_SEQUENCES], n = 0, best = packing->n_tails, i;
    for (i = 0; i < packing->n_tails; i++) weights[n++] = packing->tails[i];
    for (i = 0; i < packing->n_items; i++) weights[n++] = packing->items[i];
    if (packing->max_slices && oracle_divide_up(n, packing->max_slices) > best)
        best = oracle_divide_up(n, packing->max_slices);
    for (i = 0; i < n; i++) {
        if (2 * weights[i] > packing->capacity) continue;
        if (bound_at(weights, n, packing->capacity, weights[i]) > best)
            best = bound_at(weights, n, packing->capacity, weights[i]);
    }
    if (bound_at(weights, n, packing->capacity, 0) > best) best = bound_at(weights, n, packing->capacity, 0);
    return best;
}

int64_t oracle_next_fit(const int64_t *lengths, int64_t n, const cf_pack_desc *desc) {
    int64_t align = desc->align ? desc->align : 1, used = -1, count = 0, chunks = 0, i; /* used -1: no open chunk */
    for (i = 0; i < n; i++) {
        int64_t weight = oracle_round_up(lengths[i], align);
        if (lengths[i] == 0) continue;
        if (lengths[i] > desc->chunk_size) {
            int64_t slices = oracle_divide_up(lengths[i], desc->chunk_size);
            chunks += slices;
            used = desc->no_tails ? -1
                                  : oracle_round_up(lengths[i] - (slices - 1) * desc->chunk_size, align);
            count = 1;
        } else if (used >= 0 && used + weight <= desc->chunk_size && (!desc->max_slices || count < desc->max_slices)) {
            used += weight;
            count++;
        } else {
            chunks++;
            used = weight;
            count = 1;
        }
    }
    return chunks;
}

/* ----------------------------------------------------------------------------------------------------------------
   splitting
   ---------------------------------------------------------------------------------------------------------------- */

#define SPLIT_CELLS 2000

double oracle_best_split(int64_t length, int64_t parts, int64_t most, int64_t unit, oracle_cost cost, void *user) {
    /* best[cell]: cost of the most expensive slice if the first `part` slices end at token min(cell x unit, length) */
    static double best[SPLIT_CELLS + 1], next[SPLIT_CELLS + 1];
    int64_t cells = oracle_divide_up(length, unit), part, from, to;
    if (cells > SPLIT_CELLS) return (double)NAN;
    for (to = 0; to <= cells; to++) best[to] = to == 0 ? 0.0 : (double)INFINITY;
    for (part = 0; part < parts; part++) {
        for (to = 0; to <= cells; to++) next[to] = (double)INFINITY;
        for (from = 0; from < cells; from++) {
            if (best[from] == (double)INFINITY) continue;
            for (to = from + 1; to <= cells; to++) {
                int64_t begin = from * unit, end = to * unit < length ? to * unit : length;
                double dearest;
                if (end - begin > most) break;
                dearest = cost(begin, end - begin, user);
                if (best[from] > dearest) dearest = best[from];
                if (dearest < next[to]) next[to] = dearest;
            }
        }
        memcpy(best, next, sizeof best);
    }
    return best[cells];
}

/* ----------------------------------------------------------------------------------------------------------------
   ranks
   ---------------------------------------------------------------------------------------------------------------- */

#define MOST_RANKS 8

typedef struct rank_search {
    const int64_t *chunks;
    const double *cost;
    int64_t n_units, n_ranks, steps;
    int64_t load[MOST_RANKS];
    double sum[MOST_RANKS];
    double *best;
} rank_search;

static void try_all_ranks(rank_search *s, int64_t unit) {
    int64_t rank, most = 0;
    double dearest = 0.0;
    if (unit == s->n_units) {
        for (rank = 0; rank < s->n_ranks; rank++) {
            if (s->load[rank] > most) most = s->load[rank];
            if (s->sum[rank] > dearest) dearest = s->sum[rank];
        }
        if ((double)most < s->best[0]) s->best[0] = (double)most;
        if (most <= s->steps && dearest < s->best[1]) s->best[1] = dearest;
        return;
    }
    for (rank = 0; rank < s->n_ranks; rank++) {
        int untouched = s->load[rank] == 0;
        double before = s->sum[rank];
        s->load[rank] += s->chunks[unit];
        s->sum[rank] += s->cost[unit];
        try_all_ranks(s, unit + 1);
        s->load[rank] -= s->chunks[unit];
        s->sum[rank] = before;
        if (untouched) break; /* the other empty ranks are equivalent */
    }
}

void oracle_best_ranks(const int64_t *chunks, const double *cost, int64_t n_units, int64_t n_ranks, int64_t steps,
                       double best[2]) {
    rank_search search = {0};
    search.chunks = chunks;
    search.cost = cost;
    search.n_units = n_units;
    search.n_ranks = n_ranks;
    search.steps = steps;
    search.best = best;
    best[0] = best[1] = (double)INFINITY;
    try_all_ranks(&search, 0);
}
