/* report_page.h - the page of a report, as the Makefile makes it of the files in tools/report/. */

#ifndef CHUNKFLOW_REPORT_PAGE_H
#define CHUNKFLOW_REPORT_PAGE_H

/* Its lines before and behind the data; NULL ends them. */
extern const char *const report_page_head[];
extern const char *const report_page_tail[];

#endif /* CHUNKFLOW_REPORT_PAGE_H */
