/* table.h - tables on standard output, for people or for scripts, from one set of rows.

   For people: columns that line up, also at the decimal point, and numbers rounded to what one reads. What the terminal
   is too narrow for stands below, with the first column again; no table is wider than 80 columns. For scripts (TSV): a
   line of names, then a line for each row, tabs between the fields, nothing rounded, nothing left out. */

#ifndef CHUNKFLOW_TABLE_H
#define CHUNKFLOW_TABLE_H

#include "cli.h"

enum { TABLE_MOST_COLUMNS = 32, TABLE_PLAIN = -1 /* for decimals: whole numbers without commas */ };

/* Zero is the default in every member. */
typedef struct table_column {
    const char *heading; /* for people; NULL: the column is for scripts only */
    const char *name;    /* for scripts, with its unit; that of time comes behind a _ at its end. NULL: for people */
    int left;            /* for people: justified to the left */
    int key;             /* says which row it is, so that it stands before each part of a table, as the first column */
    int decimals;        /* for people: always so many; 0: as many as the number needs, with commas; or TABLE_PLAIN */
    double scale;        /* people see so many times the number: 100 for per cent; with decimals only */
    int sign;            /* a plus where it is one */
    const char *suffix;  /* behind the number */
    int estimate;        /* where times are seconds, people see three digits of it: a time, a gain */
} table_column;

typedef struct table_cell table_cell;

typedef struct table {
    const table_column *columns;
    int n_columns;
    int tsv;
    const char *unit;   /* of time, in names */
    int unit_cost;
    unsigned hidden;    /* a bit for each column that people do not see this time */
    int at;             /* the column of the next cell */
    int started, failed;
    table_cell *cells;  /* of the rows that were not printed yet */
    size_t n_cells, cells_room;
    char *text;         /* what their texts are made of */
    size_t n_text, text_room;
    int before[TABLE_MOST_COLUMNS], after[TABLE_MOST_COLUMNS]; /* the decimal point of a column, and its end */
    int limit;          /* of a line */
} table;

/* The entry of an option table. */
#define TABLE_OPTION(type, member, what)                                                      \
    {.name = "--tsv", .kind = CLI_FLAG, .offset = offsetof(type, member),                     \
     .help = "for scripts: print only " what ",\ntab separated, with a line of names, in full precision"}

/* Refuses --tsv beside an option that writes to standard output, such as "--json" with "-". Returns an exit code. */
int table_check(const char *command, int tsv, const char *option, const char *path);

/* unit: of the times in it, 0 for seconds, 1 for token times. table_end is due. */
void table_begin(table *t, const table_column *columns, int n_columns, int tsv, int unit_cost);

/* The next cell of a row. The one of the last column ends the row. */
void table_text(table *t, const char *text);
void table_integer(table *t, int64_t value);
void table_real(table *t, double value);

/* Copies on the virtual stages of a stage: people see whole stages' worth, scripts the number of copies. */
void table_share(table *t, int64_t copies, int64_t n_virtual);

/* "-" for people, nothing for scripts. */
void table_none(table *t);

/* Appends to the text of the cell before; a mark behind its number, which only people see. */
void table_more(table *t, const char *text);
void table_mark(table *t, char mark);

/* In place of all cells that are left. For scripts it is what the last column has. */
void table_note(table *t, const char *text);

/* Prints what is left, the names at least. Returns an exit code. */
int table_end(table *t);

#endif /* CHUNKFLOW_TABLE_H */
