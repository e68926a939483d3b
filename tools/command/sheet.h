/* sheet.h - a table that compares the paper's numbers with ours: printed once it is full, and written as JSON. */

#ifndef CHUNKFLOW_SHEET_H
#define CHUNKFLOW_SHEET_H

#include "json_write.h"

enum { SHEET_COLUMNS = 12, SHEET_ROWS = 16, SHEET_SERIES = 32, SHEET_POINTS = 12, SHEET_TEXT = 64 };

/* Format of a column. */
typedef struct sheet_column {
    const char *key;    /* its name in JSON */
    const char *group;  /* a heading over this and the following columns, or NULL */
    const char *title;
    const char *heading; /* replaces group and title in text for people, or NULL */
    int left;           /* left-aligned */
    int key_of_rows;    /* 1: repeated before each part of a table that is printed in several parts */
    int digits;         /* decimals */
    int sign;           /* 1: with its sign */
    const char *suffix; /* after the number, or NULL */
} sheet_column;

/* A text, a number, or a number that is printed as a text. */
typedef struct sheet_cell {
    int is_number;
    double value;
    char text[SHEET_TEXT]; /* the text to print; empty: the number, in its column's format */
} sheet_cell;

sheet_cell sheet_text(const char *text);
sheet_cell sheet_number(double value);
sheet_cell sheet_count(int64_t value);                    /* with commas */
sheet_cell sheet_marked(double value, int digits, char mark); /* with a blank in place of a mark */

/* A line of a chart: a y for each x. Charts are identified by their title; a role is "paper", "ours" or "best". */
typedef struct sheet_series {
    const char *role;
    char chart[SHEET_TEXT], name[SHEET_TEXT];
    int n;
    double x[SHEET_POINTS], y[SHEET_POINTS];
} sheet_series;

typedef struct sheet {
    int prints;               /* 0: nothing goes to standard output */
    const char *name, *title;
    char assumptions[2048];
    const sheet_column *columns;
    int n_columns;
    sheet_cell rows[SHEET_ROWS][SHEET_COLUMNS];
    int n_rows;
    sheet_cell notes[SHEET_ROWS][3]; /* below the rows: a text, the paper's number if there is one, ours */
    int n_notes;
    const char *x_title, *y_title;   /* of the charts */
    sheet_series series[SHEET_SERIES];
    int n_series;
} sheet;

/* Add rows, notes and, at the end, the assumptions as lines, the first of which is a heading. Then the whole sheet is
   printed. sheet_end returns an exit code. */
void sheet_begin(sheet *s, const char *title, const sheet_column *columns, int n_columns);
void sheet_row(sheet *s, const sheet_cell *cells);
void sheet_note(sheet *s, const char *text, sheet_cell paper, sheet_cell ours);
int sheet_end(sheet *s, const char *assumptions);

/* Set the axis titles of all charts of a sheet, and add a line to a chart. Text that does not fit is left out. */
void sheet_axes(sheet *s, const char *x_title, const char *y_title);
void sheet_add_series(sheet *s, const char *chart, const char *role, const char *name, int n, const double *x,
                      const double *y);

void sheet_write(json_writer *w, const sheet *s);

/* Prints the rows for scripts: numbers, or the texts of cells without one. Returns an exit code. */
int sheet_print_table(const sheet *s);

#endif /* CHUNKFLOW_SHEET_H */
