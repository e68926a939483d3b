/* sheet.c - a table that compares the paper's numbers with ours. */

#include "sheet.h"
#include "table.h"

#include <math.h>
#include <string.h>

sheet_cell sheet_text(const char *text) {
    sheet_cell cell;

    memset(&cell, 0, sizeof cell);
    snprintf(cell.text, sizeof cell.text, "%s", text);
    return cell;
}

sheet_cell sheet_number(double value) {
    sheet_cell cell;

    memset(&cell, 0, sizeof cell);
    cell.is_number = 1;
    cell.value = value;
    return cell;
}

sheet_cell sheet_count(int64_t value) {
    sheet_cell cell = sheet_text(cli_commas(value));

    cell.is_number = 1;
    cell.value = (double)value;
    return cell;
}

sheet_cell sheet_marked(double value, int digits, char mark) {
    sheet_cell cell = sheet_number(value);

    snprintf(cell.text, sizeof cell.text, "%.*f%c", digits, value, mark);
    return cell;
}

/* ----------------------------------------------------------------------------------------------------------------
   Printing
   ---------------------------------------------------------------------------------------------------------------- */

/* Returns the text of a cell, even of a number. */
static const char *shown(const sheet_column *column, const sheet_cell *cell) {
    char *text;

    if (!cell->is_number || cell->text[0]) return cell->text;
    text = cli_scratch();
    snprintf(text, CLI_SCRATCH_BYTES, column->sign ? "%+.*f%s" : "%.*f%s", column->digits, cell->value,
             column->suffix ? column->suffix : "");
    return text;
}

/* Prints the rows, with numbers in their JSON form. */
static int print_rows(const sheet *s) {
    table_column columns[SHEET_COLUMNS];
    table t;
    int i, j;

    memset(columns, 0, sizeof columns);
    for (j = 0; j < s->n_columns; j++) {
        columns[j].heading = s->columns[j].heading ? s->columns[j].heading : s->columns[j].title;
        columns[j].left = s->columns[j].left;
        columns[j].key = s->columns[j].key_of_rows;
    }
    table_begin(&t, columns, s->n_columns, 0, 0);
    for (i = 0; i < s->n_rows; i++)
        for (j = 0; j < s->n_columns; j++) table_text(&t, shown(&s->columns[j], &s->rows[i][j]));
    return table_end(&t);
}

static void print_notes(const sheet *s) {
    int i;

    if (s->n_notes > 0) putchar('\n');
    for (i = 0; i < s->n_notes; i++) {
        const sheet_cell *note = s->notes[i];
        if (note[1].is_number) printf("%-18s%s in the paper, %s here\n", note[0].text, note[1].text, note[2].text);
        else printf("%-18s%s\n", note[0].text, note[2].text);
    }
}

void sheet_begin(sheet *s, const char *title, const sheet_column *columns, int n_columns) {
    s->title = title;
    s->columns = columns;
    s->n_columns = n_columns;
}

void sheet_row(sheet *s, const sheet_cell *cells) {
    if (s->n_rows < SHEET_ROWS) memcpy(s->rows[s->n_rows++], cells, (size_t)s->n_columns * sizeof *cells);
}

void sheet_note(sheet *s, const char *text, sheet_cell paper, sheet_cell ours) {
    if (s->n_notes == SHEET_ROWS) return;
    s->notes[s->n_notes][0] = sheet_text(text);
    s->notes[s->n_notes][1] = paper;
    s->notes[s->n_notes++][2] = ours;
}

int sheet_end(sheet *s, const char *assumptions) {
    int code;

    snprintf(s->assumptions, sizeof s->assumptions, "%s", assumptions);
    if (!s->prints) return CLI_OK;
    printf("%s\n\n", s->title);
    code = print_rows(s);
    print_notes(s);
    printf("\n%s\n", assumptions);
    return code;
}

/* ----------------------------------------------------------------------------------------------------------------
   Charts
   ---------------------------------------------------------------------------------------------------------------- */

void sheet_axes(sheet *s, const char *x_title, const char *y_title) {
    s->x_title = x_title;
    s->y_title = y_title;
}

void sheet_add_series(sheet *s, const char *chart, const char *role, const char *name, int n, const double *x,
                      const double *y) {
    sheet_series *series = &s->series[s->n_series];

    if (s->n_series == SHEET_SERIES || n > SHEET_POINTS) return;
    s->n_series++;
    series->role = role;
    snprintf(series->chart, sizeof series->chart, "%s", chart);
    snprintf(series->name, sizeof series->name, "%s", name);
    series->n = n;
    memcpy(series->x, x, (size_t)n * sizeof *x);
    memcpy(series->y, y, (size_t)n * sizeof *y);
}

/* ----------------------------------------------------------------------------------------------------------------
   JSON
   ---------------------------------------------------------------------------------------------------------------- */

/* Writes a cell: its text as printed, and its number unless that is not finite, which JSON cannot represent. */
static void write_cell(json_writer *w, const char *key, const sheet_column *column, const sheet_cell *cell) {
    const char *text = column ? shown(column, cell) : cell->text;
    char trimmed[SHEET_TEXT];
    size_t n;

    snprintf(trimmed, sizeof trimmed, "%s", text);
    for (n = strlen(trimmed); n > 0 && trimmed[n - 1] == ' ';) trimmed[--n] = '\0';
    json_open(w, key, '{');
    if (cell->is_number && isfinite(cell->value)) json_number_member(w, "value", cell->value);
    json_text_member(w, "text", trimmed);
    json_close(w, '}');
}

static void write_columns(json_writer *w, const sheet *s) {
    const char *group = NULL;
    int i;

    json_open(w, "columns", '[');
    for (i = 0; i < s->n_columns; i++) {
        const sheet_column *column = &s->columns[i];
        if (column->group) group = column->group;
        json_open(w, NULL, '{');
        json_text_member(w, "key", column->key);
        json_text_member(w, "title", column->title);
        if (group) json_text_member(w, "group", group);
        json_close(w, '}');
    }
    json_close(w, ']');
}

static void write_rows(json_writer *w, const sheet *s) {
    int i, j;

    json_open(w, "rows", '[');
    for (i = 0; i < s->n_rows; i++) {
        json_open(w, NULL, '{');
        for (j = 0; j < s->n_columns; j++) write_cell(w, s->columns[j].key, &s->columns[j], &s->rows[i][j]);
        json_close(w, '}');
    }
    json_close(w, ']');
    json_open(w, "notes", '[');
    for (i = 0; i < s->n_notes; i++) {
        json_open(w, NULL, '{');
        json_text_member(w, "name", s->notes[i][0].text);
        if (s->notes[i][1].is_number) write_cell(w, "paper", NULL, &s->notes[i][1]);
        write_cell(w, "ours", NULL, &s->notes[i][2]);
        json_close(w, '}');
    }
    json_close(w, ']');
}

static void write_numbers(json_writer *w, const char *key, const double *values, int n) {
    int i;

    json_list_open(w, key);
    for (i = 0; i < n; i++) json_list_number(w, values[i]);
    json_list_close(w);
}

static void write_series(json_writer *w, const sheet *s) {
    int i;

    if (s->x_title) json_text_member(w, "x_title", s->x_title);
    if (s->y_title) json_text_member(w, "y_title", s->y_title);
    json_open(w, "series", '[');
    for (i = 0; i < s->n_series; i++) {
        const sheet_series *series = &s->series[i];
        json_open(w, NULL, '{');
        json_text_member(w, "chart", series->chart);
        json_text_member(w, "role", series->role);
        json_text_member(w, "name", series->name);
        write_numbers(w, "x", series->x, series->n);
        write_numbers(w, "y", series->y, series->n);
        json_close(w, '}');
    }
    json_close(w, ']');
}

/* Writes the assumptions. Printed lines become one paragraph in JSON; only the heading is a line of its own. */
static void write_assumptions(json_writer *w, const sheet *s) {
    char text[sizeof s->assumptions];
    const char *from = strchr(s->assumptions, '\n');
    size_t n = 0;

    for (from = from ? from : ""; *from; from++) {
        if (*from != '\n' && *from != ' ') text[n++] = *from;
        else if (n > 0 && text[n - 1] != ' ') text[n++] = ' ';
    }
    text[n] = '\0';
    json_text_member(w, "assumptions", text);
}

void sheet_write(json_writer *w, const sheet *s) {
    json_open(w, NULL, '{');
    json_text_member(w, "name", s->name);
    json_text_member(w, "title", s->title);
    write_columns(w, s);
    write_rows(w, s);
    write_series(w, s);
    write_assumptions(w, s);
    json_close(w, '}');
}

int sheet_print_table(const sheet *s) {
    table_column columns[SHEET_COLUMNS];
    table t;
    int i, j;

    memset(columns, 0, sizeof columns);
    for (j = 0; j < s->n_columns; j++) columns[j].name = s->columns[j].key;
    table_begin(&t, columns, s->n_columns, 1, 0);
    for (i = 0; i < s->n_rows; i++)
        for (j = 0; j < s->n_columns; j++) {
            const sheet_cell *cell = &s->rows[i][j];
            if (cell->is_number && isfinite(cell->value)) table_real(&t, cell->value);
            else if (cell->is_number) table_none(&t);
            else table_text(&t, cell->text);
        }
    return table_end(&t);
}
