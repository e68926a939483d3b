/* table.c - tables for people or for scripts. */

#include "table.h"
#include "pipeline.h"
#include "progress.h"

#include <stdlib.h>
#include <string.h>

/* Rows that are measured before the first of them is printed, so that a table of any length takes little memory. If
   later rows need wider columns, the headings are printed again. */
#define PAGE_ROWS 1000

enum {
    MOST_WIDTH = 80,
    GAP = 2,          /* blanks between two columns */
    LEAST_OPEN = 20,  /* minimum columns of a text that continues on the next line, unless it is shorter */
    NOTE_AT = 10,     /* first column of a text that has its own line */
    ROWS_OF_A_PART = 40 /* rows printed together in each part, if a table has several parts */
};

typedef enum cell_kind { CELL_NONE, CELL_TEXT, CELL_INTEGER, CELL_REAL, CELL_SHARE, CELL_SKIPPED, CELL_NOTE } cell_kind;

struct table_cell {
    cell_kind kind;
    char mark;        /* 0: none */
    int64_t value;    /* of whole numbers and shares */
    int64_t of;       /* shares: of so many */
    double real;
    size_t at;        /* texts: in table.text */
};

int table_check(const char *command, int tsv, const char *option, const char *path) {
    if (tsv && path && strcmp(path, "-") == 0)
        return cli_usage(command, "--tsv and %s - exclude each other", option);
    return CLI_OK;
}

void table_begin(table *t, const table_column *columns, int n_columns, int tsv, int unit_cost) {
    memset(t, 0, sizeof *t);
    t->columns = columns;
    t->n_columns = n_columns;
    t->tsv = tsv;
    t->unit = unit_cost ? "token_times" : "s";
    t->unit_cost = unit_cost;
    t->limit = (int)progress_columns(1);
    if (t->limit <= 0 || t->limit > MOST_WIDTH) t->limit = MOST_WIDTH;
}

/* ----------------------------------------------------------------------------------------------------------------
   Cells as text
   ---------------------------------------------------------------------------------------------------------------- */

enum { CELL_BYTES = 96 };

/* Formats a number with a fixed number of decimals, or with an exponent if that would be too long to read. */
static void format_fixed(const table_column *c, double value, char *out) {
    const char *plus = c->sign ? "+" : "";
    char format[16];

    snprintf(format, sizeof format, value > -1e15 && value < 1e15 ? "%%%s.*f" : "%%%s.6g", plus);
    if (value > -1e15 && value < 1e15) snprintf(out, CELL_BYTES, format, c->decimals, value);
    else snprintf(out, CELL_BYTES, format, value);
    if (out[strspn(out, "-0.")] == '\0' && out[0] == '-') memmove(out, out + 1, strlen(out)); /* no -0.00 */
}

static double value_of(const table_column *c, const table_cell *cell) {
    double value = cell->kind == CELL_REAL ? cell->real : (double)cell->value;

    if (cell->kind == CELL_SHARE) value /= (double)cell->of;
    return c->scale != 0 ? value * c->scale : value;
}

/* A number as people read it. */
static void format_number(const table_column *c, const table_cell *cell, int unit_cost, char *out) {
    char mark[2] = {cell->mark, 0};
    size_t n;

    if (c->estimate && !unit_cost) snprintf(out, CELL_BYTES, "%s", pipeline_estimate(value_of(c, cell)));
    else if (c->decimals > 0) format_fixed(c, value_of(c, cell), out);
    else if (cell->kind == CELL_SHARE) snprintf(out, CELL_BYTES, "%s", pipeline_share(cell->value, cell->of));
    else if (cell->kind == CELL_REAL) snprintf(out, CELL_BYTES, "%s", pipeline_time(value_of(c, cell)));
    else if (c->decimals == TABLE_PLAIN) snprintf(out, CELL_BYTES, "%lld", (long long)cell->value);
    else snprintf(out, CELL_BYTES, "%s", cli_commas(cell->value));
    n = strlen(out);
    snprintf(out + n, CELL_BYTES - n, "%s%s", c->suffix ? c->suffix : "", mark);
}

/* Returns the text of a cell for people, in `buffer` or in the table's texts. */
static const char *seen(const table *t, int column, const table_cell *cell, char buffer[CELL_BYTES]) {
    if (cell->kind == CELL_TEXT || cell->kind == CELL_NOTE) return t->text + cell->at;
    if (cell->kind == CELL_NONE) return "-";
    format_number(&t->columns[column], cell, t->unit_cost, buffer);
    return buffer;
}

/* Prints the fewest digits that are read back as the same number. */
static void print_exactly(double value) {
    char text[40];
    int digits = 15;

    do snprintf(text, sizeof text, "%.*g", digits, value);
    while (++digits <= 17 && strtod(text, NULL) != value);
    fputs(text, stdout);
}

/* Prints a field with tabs and line ends removed, which would split it. */
static void print_field(const char *text) {
    for (; *text; text++) putchar((unsigned char)*text < 32 || *text == 127 ? '?' : *text);
}

/* ----------------------------------------------------------------------------------------------------------------
   For scripts
   ---------------------------------------------------------------------------------------------------------------- */

static void print_names(const table *t) {
    int i, n = 0;

    for (i = 0; i < t->n_columns; i++) {
        const char *name = t->columns[i].name;
        if (!name) continue;
        printf("%s%s%s", n++ > 0 ? "\t" : "", name, name[strlen(name) - 1] == '_' ? t->unit : "");
    }
    putchar('\n');
}

static void print_record(const table *t, const table_cell *cells) {
    int i, n = 0;

    for (i = 0; i < t->n_columns; i++) {
        if (!t->columns[i].name) continue;
        if (n++ > 0) putchar('\t');
        switch (cells[i].kind) {
        case CELL_TEXT: case CELL_NOTE: print_field(t->text + cells[i].at); break;
        case CELL_INTEGER: case CELL_SHARE: printf("%lld", (long long)cells[i].value); break;
        case CELL_REAL: print_exactly(cells[i].real); break;
        default: break;
        }
    }
    putchar('\n');
}

/* ----------------------------------------------------------------------------------------------------------------
   For people
   ---------------------------------------------------------------------------------------------------------------- */

static int is_seen(const table *t, int column) { return t->columns[column].heading && !(t->hidden >> column & 1); }

/* Returns how much of a text precedes the decimal point, or the place where one would be. */
static int before_point(const table_cell *cell, const char *text) {
    return cell->kind == CELL_TEXT || cell->kind == CELL_NONE ? (int)strlen(text) : (int)strcspn(text, ".e");
}

static void widen(table *t, int column, const table_cell *cell) {
    char buffer[CELL_BYTES];
    const char *text;
    int before;

    if (cell->kind == CELL_SKIPPED || cell->kind == CELL_NOTE) return;
    text = seen(t, column, cell, buffer);
    before = before_point(cell, text);
    if (before > t->before[column]) t->before[column] = before;
    if ((int)strlen(text) - before > t->after[column]) t->after[column] = (int)strlen(text) - before;
}

static void widen_heading(table *t, int column) {
    int heading = (int)strlen(t->columns[column].heading);

    if (t->before[column] + t->after[column] < heading) t->before[column] = heading - t->after[column];
}

/* Widens the columns for the current rows. Returns whether that changed any. */
static int widen_all(table *t) {
    int before[TABLE_MOST_COLUMNS], after[TABLE_MOST_COLUMNS], column;
    size_t i;

    memcpy(before, t->before, sizeof before);
    memcpy(after, t->after, sizeof after);
    for (i = 0; i < t->n_cells; i++) {
        column = (int)(i % (size_t)t->n_columns);
        if (is_seen(t, column)) widen(t, column, &t->cells[i]);
    }
    for (column = 0; column < t->n_columns; column++)
        if (is_seen(t, column)) widen_heading(t, column);
    return memcmp(before, t->before, sizeof before) != 0 || memcmp(after, t->after, sizeof after) != 0;
}

static int width_of(const table *t, int column) { return t->before[column] + t->after[column]; }

static int last_seen(const table *t) {
    int i = t->n_columns - 1;
    while (i > 0 && !is_seen(t, i)) i--;
    return i;
}

/* Returns whether a column's texts continue on further lines: only the last column's do, if it has text. */
static int is_open(const table *t, int column) { return t->columns[column].left && column == last_seen(t); }

static int is_key(const table *t, int column) {
    int first = 0;
    while (first < column && !is_seen(t, first)) first++;
    return is_seen(t, column) && (column == first || t->columns[column].key);
}

/* A part of a table: its key columns, and the columns from..to - 1. */
typedef struct part {
    int from, to;
} part;

static int is_in(const table *t, part p, int column) {
    return is_seen(t, column) && column < p.to && (column >= p.from || is_key(t, column));
}

/* Returns the part from a column on that fits a line, with at least one column besides the keys. */
static part part_from(const table *t, int from) {
    part p = {from, from};
    int width = 0, n = 0, i;

    for (i = 0; i < from; i++)
        if (is_key(t, i)) width += width_of(t, i) + GAP;
    for (; p.to < t->n_columns; p.to++) {
        int wanted = width_of(t, p.to);
        if (!is_seen(t, p.to)) continue;
        if (is_open(t, p.to) && wanted > LEAST_OPEN) wanted = LEAST_OPEN;
        if (n > 0 && width + wanted > t->limit) break;
        width += wanted + GAP;
        n += !is_key(t, p.to);
    }
    return p;
}

/* Prints words from column `at` on, and continues on new lines below the first word. */
static void put_words(const table *t, const char *text, int at) {
    int room = t->limit - at, begin = at, used = 0, n;

    for (; *text; text += n + (text[n] == ' ')) {
        n = (int)strcspn(text, " ");
        if (used > 0 && used + 1 + n > room) {
            printf("\n%*s", begin, "");
            used = 0;
        }
        used += printf("%s%.*s", used > 0 ? " " : "", n, text);
    }
}

/* A line that is being printed: its columns, and the blanks due before more text. */
typedef struct line {
    int used, blanks;
} line;

static void put_text(const table *t, line *l, int column, const char *text, int before) {
    int n = (int)strlen(text), width = width_of(t, column);
    int gap = t->columns[column].left ? 0 : t->before[column] - before;

    if (gap < 0) gap = 0;
    if (n == 0) {
        l->blanks += width;
        return;
    }
    l->used += printf("%*s", l->blanks + gap, "");
    if (is_open(t, column)) put_words(t, text, l->used);
    else fputs(text, stdout);
    l->used += n;
    l->blanks = width - gap - n > 0 ? width - gap - n : 0;
}

static void print_headings(const table *t, part p) {
    line l = {0, 0};
    int i, n = 0;

    for (i = 0; i < p.to; i++) {
        const char *heading = t->columns[i].heading;
        if (!is_in(t, p, i)) continue;
        l.blanks += n++ > 0 ? GAP : 0;
        put_text(t, &l, i, heading, (int)strlen(heading) - t->after[i]);
    }
    putchar('\n');
}

/* Prints a note in place of the cells that it replaces, or below the earlier cells if too little room is left. */
static void put_note(const table *t, const line *l, const char *text) {
    int at = l->used + l->blanks + GAP;

    if (at + LEAST_OPEN > t->limit && at + (int)strlen(text) > t->limit) {
        putchar('\n');
        at = NOTE_AT;
        printf("%*s", at, "");
    } else {
        printf("%*s", l->blanks + GAP, "");
    }
    put_words(t, text, at);
}

static void print_row(const table *t, part p, const table_cell *cells) {
    char buffer[CELL_BYTES];
    line l = {0, 0};
    int i, n = 0;

    for (i = 0; i < p.to && cells[i].kind < CELL_SKIPPED; i++) {
        const char *text;
        if (!is_in(t, p, i)) continue;
        text = seen(t, i, &cells[i], buffer);
        l.blanks += n++ > 0 ? GAP : 0;
        put_text(t, &l, i, text, before_point(&cells[i], text));
    }
    if (i < p.to && i >= p.from) put_note(t, &l, t->text + cells[t->n_columns - 1].at);
    putchar('\n');
}

/* Returns whether a part shows more of a row than its keys; the row's note may be in an earlier part. */
static int says_more(const table *t, part p, const table_cell *cells) {
    int i;
    for (i = 0; i < p.from; i++)
        if (cells[i].kind == CELL_SKIPPED) return 0;
    return p.from < t->n_columns;
}

/* Prints rows in as many parts as needed. headings: 1 also prints headings if a table has only one part. */
static void print_parts(const table *t, size_t first, size_t n, int headings) {
    part p = {0, 0};
    size_t i;

    for (; p.to < t->n_columns && !cli_stdout_failed();) {
        if (p.to > 0) putchar('\n');
        p = part_from(t, p.to);
        if (headings || p.from > 0 || p.to < t->n_columns) print_headings(t, p);
        for (i = first; i < first + n && !cli_stdout_failed(); i++) {
            const table_cell *cells = &t->cells[i * (size_t)t->n_columns];
            if (says_more(t, p, cells)) print_row(t, p, cells);
        }
    }
}

static void print_rows(table *t) {
    size_t n = t->n_cells / (size_t)t->n_columns, i, some;
    int headings = widen_all(t) || !t->started, folds = part_from(t, 0).to < t->n_columns;

    for (i = 0; i < n || (i == 0 && headings); i += some) {
        some = folds && n - i > ROWS_OF_A_PART ? ROWS_OF_A_PART : n - i;
        if (folds && (t->started || i > 0)) putchar('\n');
        print_parts(t, i, some, headings);
        if (n == 0) return;
    }
}

/* ----------------------------------------------------------------------------------------------------------------
   Rows
   ---------------------------------------------------------------------------------------------------------------- */

static void flush(table *t) {
    size_t i;

    if (!t->tsv) {
        print_rows(t);
    } else {
        if (!t->started) print_names(t);
        for (i = 0; i + (size_t)t->n_columns <= t->n_cells && !cli_stdout_failed(); i += (size_t)t->n_columns)
            print_record(t, &t->cells[i]);
    }
    t->started = 1;
    t->n_cells = t->n_text = 0;
}

/* Returns the next cell, or NULL if memory ran out. A row is printed when the next row begins, because its last cell
   may grow until then. */
static table_cell *add(table *t, cell_kind kind) {
    table_cell *cell;

    if (t->failed) return NULL;
    if (t->at == 0 && t->n_cells >= (t->tsv ? 1 : PAGE_ROWS) * (size_t)t->n_columns) flush(t);
    if (t->n_cells == t->cells_room) {
        cell = (table_cell *)cli_grow(t->cells, &t->cells_room, sizeof *cell);
        t->failed = !cell;
        if (!cell) return NULL;
        t->cells = cell;
    }
    t->at = (t->at + 1) % t->n_columns;
    cell = &t->cells[t->n_cells++];
    memset(cell, 0, sizeof *cell);
    cell->kind = kind;
    return cell;
}

void table_integer(table *t, int64_t value) {
    table_cell *cell = add(t, CELL_INTEGER);
    if (cell) cell->value = value;
}

void table_real(table *t, double value) {
    table_cell *cell = add(t, CELL_REAL);
    if (cell) cell->real = value;
}

void table_share(table *t, int64_t copies, int64_t n_virtual) {
    table_cell *cell = add(t, CELL_SHARE);
    if (!cell) return;
    cell->value = copies;
    cell->of = n_virtual;
}

void table_none(table *t) { (void)add(t, CELL_NONE); }

static void append(table *t, const char *text) {
    size_t n = strlen(text) + 1;

    while (!t->failed && t->text_room - t->n_text < n) {
        char *grown = (char *)cli_grow(t->text, &t->text_room, 1);
        t->failed = !grown;
        if (grown) t->text = grown;
    }
    if (t->failed) return;
    memcpy(t->text + t->n_text, text, n);
    t->n_text += n;
}

void table_text(table *t, const char *text) {
    table_cell *cell = add(t, CELL_TEXT);

    if (!cell) return;
    cell->at = t->n_text;
    append(t, text);
}

void table_more(table *t, const char *text) {
    if (t->failed) return;
    t->n_text--; /* overwrites the zero byte of the present text */
    append(t, text);
}

void table_mark(table *t, char mark) {
    if (!t->failed) t->cells[t->n_cells - 1].mark = mark;
}

void table_note(table *t, const char *text) {
    table_cell *cell;

    while (!t->failed && t->at < t->n_columns - 1) (void)add(t, CELL_SKIPPED);
    cell = add(t, CELL_NOTE);
    if (!cell) return;
    cell->at = t->n_text;
    append(t, text);
}

int table_end(table *t) {
    if (!t->failed) flush(t);
    free(t->cells);
    free(t->text);
    return t->failed ? CLI_FAILED : CLI_OK; /* cli_grow has printed the reason */
}
