/* table.h - tables on standard output, for people or for scripts, from one set of rows.

   For people: columns aligned at the decimal point, and rounded numbers. If the terminal is too narrow, further columns
   follow below, after the first column again; no table is wider than 80 columns. For scripts (TSV): a line of names,
   then a line for each row, tabs between the fields, nothing rounded or left out. */

#ifndef CHUNKFLOW_TABLE_H
#define CHUNKFLOW_TABLE_H

#include "cli.h"

enum { TABLE_MOST_COLUMNS = 32, TABLE_PLAIN = -1 /* for decimals: whole numbers without commas */ };

/* Zero means default in every member. */
typedef struct table_column {
    const char *heading; /* for people; NULL: the column is for scripts only */
    const char *name;    /* for scripts, with its unit (a trailing _ is followed by the unit of time). NULL: for people
                            only */
    int left;            /* for people: left-aligned */
    int key;             /* 1: identifies the row, so it is repeated before each part of a table, like the first
                            column */
    int decimals;        /* for people: number of decimals; 0: as many as the number needs, with commas; or
                            TABLE_PLAIN */
    double scale;        /* for people: factor of the number, 100 for per cent; only with decimals */
    int sign;            /* 1: positive numbers have a plus */
    const char *suffix;  /* after the number */
    int estimate;        /* 1: an estimate (time, rate, gain); people see three significant digits of it if the
                            table's times are seconds */
} table_column;

typedef struct table_cell table_cell;

typedef struct table {
    const table_column *columns;
    int n_columns;
    int tsv;
    const char *unit;   /* of time, in names */
    int unit_cost;
    unsigned hidden;    /* a bit for each column that is hidden from people in this table */
    int at;             /* the column of the next cell */
    int started, failed;
    table_cell *cells;  /* of rows not yet printed */
    size_t n_cells, cells_room;
    char *text;         /* memory of their texts */
    size_t n_text, text_room;
    int before[TABLE_MOST_COLUMNS], after[TABLE_MOST_COLUMNS]; /* positions of a column's decimal point and its end */
    int limit;          /* of a line */
} table;

/* The entry of an option table. */
#define TABLE_OPTION(type, member, what)                                                      \
    {.name = "--tsv", .kind = CLI_FLAG, .offset = offsetof(type, member),                     \
     .help = "for scripts: print only " what ",\ntab separated, with a line of names, in full precision"}

/* Refuses --tsv together with an option that writes to standard output, such as "--json" with "-". Returns an exit
   code. */
int table_check(const char *command, int tsv, const char *option, const char *path);

/* Begins a table. unit_cost: 0 if times are seconds, 1 if token times. Call table_end afterwards. */
void table_begin(table *t, const table_column *columns, int n_columns, int tsv, int unit_cost);

/* Add the next cell of a row. The cell of the last column ends the row. */
void table_text(table *t, const char *text);
void table_integer(table *t, int64_t value);
void table_real(table *t, double value);

/* Adds an amount (chunks, tokens, bytes) that is summed over the n_virtual virtual stages of a stage. People see
   amount / n_virtual, and scripts the amount itself. */
void table_share(table *t, int64_t copies, int64_t n_virtual);

/* Adds a cell that is "-" for people and empty for scripts. */
void table_none(table *t);

/* Append to the previous cell: the first a text, the second a mark after its number, which only people see. */
void table_more(table *t, const char *text);
void table_mark(table *t, char mark);

/* Adds a text instead of all remaining cells of the row. For scripts it goes into the last column. */
void table_note(table *t, const char *text);

/* Prints the remaining rows, or at least the names. Returns an exit code. */
int table_end(table *t);

#endif /* CHUNKFLOW_TABLE_H */
