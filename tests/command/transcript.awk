# transcript.awk - reads transcripts for transcript.sh, which says what is in them.
#
# task=write:   the shell script that runs the commands of FILE and writes a log
# task=compare: LOG FILE; what is in both, and the counts. update: where FILE with what came out goes, or empty
#
# In the log the output of a command is followed by an empty line, by the lines of its standard error, each with a \002
# before it, and by \001 with the command's line and its exit code.

function in_filter(name) { return filter == "" || index(name, filter) > 0 }

# ---- writing the script ----

function quoted(text) { gsub(/'/, "'\\''", text); return "'" text "'" }

function end_command() {
    if (command_at && wanted) printf "} >>\"$LOG\" 2>\"$ERR\" </dev/null\nended %d $?\n", command_at
    command_at = 0
}

function end_section() {
    end_command()
    if (guarded) print "else printf '\\001skip %s\\n' " quoted(name) " >>\"$LOG\"\nfi"
    guarded = 0
}

function write_line(    at, condition) {
    if ($0 ~ /^== /) {
        end_section()
        name = substr($0, 4)
        at = index(name, ", where ")
        condition = at ? substr(name, at + 8) : ""
        if (at) name = substr(name, 1, at - 1)
        wanted = in_filter(name)
        if (wanted) print "section " quoted(name)
        if (wanted && condition != "") {
            print "if " condition " >/dev/null 2>&1; then"
            guarded = 1
        }
    } else if ($0 ~ /^  \$ /) {
        end_command()
        command_at = FNR
        if (wanted) print "{\n" substr($0, 5)
    } else if ($0 ~ /^  >( |$)/ && command_at) {
        if (wanted) print substr($0, 5)
    } else if ($0 !~ /^  / && NF > 0) end_command()
}

# ---- comparing ----

function read_log_line(    n, parts) {
    if ($0 ~ /^\001skip /) skipped[substr($0, 7)] = 1
    else if ($0 ~ /^\001/) {
        n = split(substr($0, 2), parts, " ")
        finish_log(parts[1], parts[2])
        n_held = n_errors = 0
    } else if ($0 ~ /^\002/) errors[++n_errors] = substr($0, 2)
    else held[++n_held] = $0
}

# What came of a command, as a transcript has it: got[LINE, 1 .. n_got[LINE]].
function finish_log(line, code,    i, n, text, told, last) {
    if (held[n_held] == "") n_held--
    else held[n_held] = held[n_held] " (without an end of line)"
    while (n_held > 0 && held[n_held] == "") n_held--
    for (i = 1; i <= n_held; i++) got[line, ++n] = held[i]
    last = n
    for (i = 1; i <= n_errors; i++) {
        if (errors[i] ~ /^\[[0-9]+\]$/) {
            text = substr(errors[i], 2, length(errors[i]) - 2)
            told = 1
            if (n > last && got[line, n] ~ /^! /) got[line, n] = text got[line, n]
            else got[line, ++n] = text "!"
        } else got[line, ++n] = "! " errors[i]
    }
    if (code != 0 && !told) {
        if (n > last) got[line, n] = code got[line, n]
        else got[line, ++n] = code "!"
    }
    n_got[line] = n + 0
    ran[line] = 1
}

# Whether a text is what a pattern with "..." and {LOW..HIGH} stands for.
function fits(pattern, text,    any, range, bounds, value, rest, i) {
    if (pattern == text) return 1
    any = index(pattern, "...")
    range = match(pattern, /\{-?[0-9.e+-]+\.\.-?[0-9.e+-]+\}/) ? RSTART : 0
    if (!any && !range) return 0
    i = RLENGTH
    if (any && (!range || any < range)) {
        if (substr(pattern, 1, any - 1) != substr(text, 1, any - 1)) return 0
        rest = substr(pattern, any + 3)
        if (rest == "") return 1
        for (i = any; i <= length(text) + 1; i++) if (fits(rest, substr(text, i))) return 1
        return 0
    }
    rest = substr(pattern, range + i)
    split(substr(pattern, range + 1, i - 2), bounds, /\.\./)
    if (substr(pattern, 1, range - 1) != substr(text, 1, range - 1)) return 0
    text = substr(text, range)
    if (!match(text, /^-?[0-9][0-9,]*(\.[0-9]+)?(e[-+]?[0-9]+)?/)) return 0
    value = substr(text, 1, RLENGTH)
    text = substr(text, RLENGTH + 1)
    gsub(",", "", value)
    return value + 0 >= bounds[1] + 0 && value + 0 <= bounds[2] + 0 && fits(rest, text)
}

# The same of lines: those that are expected from i on, and those that came of the command from j on.
function lines_fit(line, i, j) {
    for (; i <= n_expected; i++) {
        if (expected[i] == "...") {
            for (; j <= n_got[line] + 1; j++) if (lines_fit(line, i + 1, j)) return 1
            return 0
        }
        if (j > n_got[line] || !fits(expected[i], got[line, j++])) return 0
    }
    return j > n_got[line]
}

# A line as UPDATE=1 writes it: what does not go into 120 columns is left out.
function shortened(text) {
    sub(/ \(see chunkflow [a-z ]*--help\)$/, "...", text)
    if (length(text) <= 118) return text
    text = substr(text, 1, 115)
    sub(/[., ]+$/, "", text)
    return text "..."
}

function keep(text) { if (update != "") print text >update }

function judge(    i) {
    if (!command_at) return
    for (blanks = 0; n_expected > 0 && expected[n_expected] == ""; n_expected--) blanks++
    if (!wanted || name in skipped) {
        for (i = 1; i <= n_expected; i++) keep(expected[i] == "" ? "" : "  " expected[i])
    } else if (lines_fit(command_at, 1, 1) && ran[command_at]) {
        passed++
        for (i = 1; i <= n_expected; i++) keep(expected[i] == "" ? "" : "  " expected[i])
    } else {
        failed++
        worst++
        print "FAIL " name ", line " command_at ": " command
        if (!ran[command_at]) print "    it did not run to its end"
        for (i = 1; i <= n_expected; i++) print "    - " expected[i]
        for (i = 1; i <= n_got[command_at]; i++) if (i <= 40) print "    + " got[command_at, i]
        for (i = 1; i <= n_got[command_at]; i++)
            keep(got[command_at, i] == "" ? "" : "  " shortened(got[command_at, i]))
    }
    while (blanks-- > 0) keep("")
    command_at = n_expected = 0
}

function judge_section() {
    judge()
    if (!wanted || name == "") return
    if (name in skipped) {
        print "skip " name ": it needs what is not here"
        n_skipped++
    } else if (!worst) print "ok " name
    worst = 0
}

function compare_line() {
    if ($0 ~ /^== /) {
        judge_section()
        name = substr($0, 4)
        sub(/, where .*/, "", name)
        wanted = in_filter(name)
        keep($0)
    } else if ($0 ~ /^  \$ /) {
        judge()
        command_at = FNR
        command = substr($0, 5)
        keep($0)
    } else if ($0 ~ /^  >( |$)/ && command_at && n_expected == 0) keep($0)
    else if (command_at && ($0 ~ /^  / || NF == 0)) expected[++n_expected] = substr($0, 3)
    else {
        judge()
        keep($0)
    }
}

BEGIN {
    wanted = 1
    passed = failed = n_skipped = 0
}
task == "write" { write_line(); next }
FILENAME == ARGV[1] && ARGC > 2 { read_log_line(); next }
{ compare_line() }
END {
    if (task == "write") {
        end_section()
        exit
    }
    judge_section()
    if (passed + failed + n_skipped == 0) {
        print "FAIL no section is named like '" filter "'"
        failed = 1
    }
    printf "%d passed, %d failed%s\n", passed, failed, n_skipped ? ", " n_skipped " skipped" : ""
    exit failed > 0
}
