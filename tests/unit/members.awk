# From the declarations of build/libchunkflow.h: MEMBER(struct, member, type) for every member that is a number, a
# record, or a pointer to one of these, and ARGUMENT(function, argument) for every argument that is a number. What
# tests/unit/test_boundaries.c compares its tables with.

# The last word of a declaration, and what stands before it.
function last_word(text) {
    match(text, /[A-Za-z_0-9]+ *$/)
    text = substr(text, RSTART, RLENGTH)
    gsub(/ /, "", text)
    return text
}

function type_of(text) {
    match(text, /[A-Za-z_0-9]+ *$/)
    text = substr(text, 1, RSTART - 1)
    gsub(/^ +| +$/, "", text)
    return text
}

# One declaration of a struct, which may declare several members.
function member(text,    names, n, i, type, star) {
    if (text ~ /\(|\[/) return                       # a callback, an array
    n = split(text, names, ",")
    type = type_of(names[1])
    for (i = 1; i <= n; i++) {
        star = (type ~ /\*$/ || (i > 1 && names[i] ~ /\*/))
        if (type ~ /char|void|\* *\*/) continue
        sub(/ *\*$/, "", type)
        print "MEMBER(" name ", " last_word(names[i]) ", \"" type (star ? " *" : "") "\")"
    }
}

function arguments(text,    list, n, i, function_name) {
    match(text, /[a-z_0-9]+\(/)
    function_name = substr(text, RSTART, RLENGTH - 1)
    text = substr(text, RSTART + RLENGTH)
    sub(/\);.*/, "", text)
    n = split(text, list, ",")
    for (i = 1; i <= n; i++)
        if (list[i] !~ /[*[]|void|cf_write_fn/)
            print "ARGUMENT(" function_name ", " last_word(list[i]) ")"
}

{ gsub(/\/\*[^*]*(\*+[^*\/][^*]*)*\*+\//, "") }      # comments that end on their line ...
in_comment { if (!sub(/^.*\*\//, "")) next; in_comment = 0 }
/\/\*/ { sub(/\/\*.*/, ""); in_comment = 1 }         # ... and those that do not
/^typedef struct [a-z_0-9]+ \{/ { name = $3; body = ""; sub(/^[^{]*\{/, ""); in_struct = 1 }
in_struct {
    body = body " " $0
    if ($0 !~ /^\}/) next
    sub(/\}.*/, "", body)
    n_members = split(body, list_of, ";")
    for (m = 1; m < n_members; m++) member(list_of[m])
    in_struct = 0
    next
}
/^extern [^;]*\(/ || in_function {
    declaration = declaration " " $0
    in_function = !/;/
    if (in_function) next
    arguments(declaration)
    declaration = ""
}
