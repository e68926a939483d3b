/* report_page.h - the page of a report, which the Makefile builds from the files in tools/report/. */

#ifndef CHUNKFLOW_REPORT_PAGE_H
#define CHUNKFLOW_REPORT_PAGE_H

/* The page's lines before, between and after the objects of data. NULL ends each piece, and the list. */
extern const char *const *const report_page_pieces[];

#endif /* CHUNKFLOW_REPORT_PAGE_H */
