/* tune_map.c - the result of a search, by ChunkSize and K. */

#include "tune.h"

#include <stdlib.h>
#include <string.h>

/* Inserts a value into a rising list, unless it is there. */
static void insert(int64_t *values, int64_t *n, int64_t value) {
    int64_t i = *n;

    while (i > 0 && values[i - 1] > value) i--;
    if (i > 0 && values[i - 1] == value) return;
    memmove(&values[i + 1], &values[i], (size_t)(*n - i) * sizeof *values);
    values[i] = value;
    (*n)++;
}

/* Lists the tried values. Candidates are listed by split, ChunkSize, K and the rest, so those of the first split have
   all ChunkSizes and Ks, except the even sizes, which come last. */
static void list_values(const cf_tuning *tuning, tune_map *map) {
    int64_t i, sorted = tuning->n_candidates - tuning->n_even;

    for (i = 0; i < tuning->n_candidates; i++) {
        const cf_tune_candidate *c = &tuning->candidates[i];
        if (i < sorted && c->split > 0) continue;
        insert(map->chunk_sizes, &map->n_chunk_sizes, c->chunk_size);
        insert(map->ks, &map->n_ks, c->k);
    }
}

static int64_t place_of(const int64_t *values, int64_t value) {
    int64_t i = 0;

    while (values[i] != value) i++;
    return i;
}

static int64_t origin_of(const cf_tuning *tuning, int64_t id) {
    int64_t origin = tuning->candidates[id].same_as;
    return origin >= 0 ? origin : id;
}

/* Ranks the knowledge about a candidate's schedules: 0 is best. */
static int rank_of(const cf_tuning *tuning, int64_t id) {
    static const int ranks[CF_TUNE_STATUS_COUNT] = {2, 0, 1, 3}; /* untried, ok, dominated, infeasible */
    return ranks[tuning->candidates[origin_of(tuning, id)].status];
}

/* Returns whether a candidate describes its cell better than the present one. */
static int is_better(const cf_tuning *tuning, int64_t id, int64_t than) {
    const cf_tune_candidate *a, *b;
    int rank = rank_of(tuning, id), other;
    double seconds, others;

    if (than < 0 || id == tuning->winner) return 1;
    if (than == tuning->winner) return 0;
    if (rank != (other = rank_of(tuning, than))) return rank < other;
    a = &tuning->candidates[origin_of(tuning, id)];
    b = &tuning->candidates[origin_of(tuning, than)];
    if (a->status == CF_TUNE_OK) return a->seconds < b->seconds;
    if (a->status == CF_TUNE_INFEASIBLE) return a->bytes < b->bytes;
    seconds = tune_slower_seconds(tuning, a);
    others = tune_slower_seconds(tuning, b);
    return seconds > 0 && (!(others > 0) || seconds < others);
}

static void fill_cells(const cf_tuning *tuning, tune_map *map) {
    int64_t i, n = map->n_chunk_sizes * map->n_ks;

    for (i = 0; i < n; i++) {
        tune_cell *cell = &map->cells[i];
        cell->chunk_size = map->chunk_sizes[i / map->n_ks];
        cell->k = map->ks[i % map->n_ks];
        cell->candidate = cell->numbers = cell->nearest = -1;
    }
    for (i = 0; i < tuning->n_candidates; i++) {
        const cf_tune_candidate *c = &tuning->candidates[i];
        tune_cell *cell = &map->cells[place_of(map->chunk_sizes, c->chunk_size) * map->n_ks + place_of(map->ks, c->k)];
        if (!is_better(tuning, i, cell->candidate)) continue;
        cell->candidate = i;
        cell->numbers = origin_of(tuning, i);
    }
}

static int64_t distance(const tune_map *map, int64_t a, int64_t b) {
    return llabs(a / map->n_ks - b / map->n_ks) + llabs(a % map->n_ks - b % map->n_ks);
}

/* Returns the cell that fits and is the fewest steps away; of cells at the same distance the fastest. */
static int64_t nearest_that_fits(const cf_tuning *tuning, const tune_map *map, int64_t from) {
    int64_t i, found = -1, n = map->n_chunk_sizes * map->n_ks;

    for (i = 0; i < n; i++) {
        const cf_tune_candidate *c = &tuning->candidates[map->cells[i].numbers];
        int64_t far = distance(map, i, from), nearest = found < 0 ? INT64_MAX : distance(map, found, from);
        if (c->status != CF_TUNE_OK || far > nearest) continue;
        if (far < nearest || c->seconds < tuning->candidates[map->cells[found].numbers].seconds) found = i;
    }
    return found;
}

int tune_map_make(const cf_tuning *tuning, tune_map *out) {
    int64_t i, n;

    memset(out, 0, sizeof *out);
    out->chunk_sizes = (int64_t *)malloc((size_t)tuning->n_candidates * sizeof(int64_t));
    out->ks = (int64_t *)malloc((size_t)tuning->n_candidates * sizeof(int64_t));
    out->cells = (tune_cell *)malloc((size_t)tuning->n_candidates * sizeof(tune_cell));
    if (!out->chunk_sizes || !out->ks || !out->cells) return cli_failed("out of memory");
    list_values(tuning, out);
    fill_cells(tuning, out);
    n = out->n_chunk_sizes * out->n_ks;
    for (i = 0; i < n && n <= TUNE_MOST_CELLS; i++)
        if (tuning->candidates[out->cells[i].numbers].status == CF_TUNE_INFEASIBLE)
            out->cells[i].nearest = nearest_that_fits(tuning, out, i);
    return CLI_OK;
}

void tune_map_free(tune_map *map) {
    free(map->chunk_sizes);
    free(map->ks);
    free(map->cells);
    memset(map, 0, sizeof *map);
}
