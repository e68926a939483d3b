# embed.awk - report.html.in with its style and its scripts, as C: arrays of lines between which the data stand.
#
#     awk -v at=tools/report -f embed.awk tools/report/report.html.in >report_page.c
#
# A line of the page "@NAME@" stands for the file NAME, and "@data@" for a place where two arrays part.

# Letter by letter: what gsub makes of backslashes is not the same in every awk. A '?' could begin a trigraph.
function put(line,    i, letter, text) {
    text = ""
    for (i = 1; i <= length(line); i++) {
        letter = substr(line, i, 1)
        text = text (index("\"\\?", letter) > 0 ? "\\" : "") letter
    }
    print "    \"" text "\\n\","
}

function put_file(name,    line) {
    while ((getline line < name) > 0) put(line)
    close(name)
}

function begin_piece() { print "static const char *const piece" pieces++ "[] = {" }

BEGIN {
    print "/* Made by tools/report/embed.awk. */"
    print "#include \"tools/report/report_page.h\"\n"
    begin_piece()
}

/^@data@$/ {
    print "    0};\n"
    begin_piece()
    next
}

/^@[a-z_.]+@$/ {
    put_file(at "/" substr($0, 2, length($0) - 2))
    next
}

{ put($0) }

END {
    print "    0};\n"
    print "const char *const *const report_page_pieces[] = {"
    for (i = 0; i < pieces; i++) print "    piece" i ","
    print "    0};"
}
