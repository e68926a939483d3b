# assemble.awk - one page of several files: a line "@PATH@" of the template stands for that file.
#
#     awk -v program=command.b64 -f assemble.awk playground.html.in >playground.html
#
# "@program@" is the compiled command. A script that could end the element that it stands in would be no script.

/^@[a-z_.\/]+@$/ {
    path = substr($0, 2, length($0) - 2)
    if (path == "program") path = program
    while ((getline line < path) > 0) print line
    close(path)
    next
}

{ print }
