#!/bin/sh
# cli_pipeline.sh - tests of the chunkflow command on pipelines: plan, compare, check.
#
#     tests/command/cli_pipeline.sh [FILTER]
#
# As tests/command/cli.sh. The numbers of the paper's example are checked as published; other makespans, idle shares and
# peaks are worked out again by awk from the list of passes alone, and where python3 is there, from the files that were
# written. FULL=1: that also with sanitizers, where CHUNKFLOW_PLAIN names a program without, and for a longer trace.
set -u
. "$(dirname "$0")/cli_harness.sh"

# The paper's example: sequences of 1, 1, 2 and 4 units on 4 stages, F = tokens, B = 2 x tokens.
printf '1\n1\n2\n4\n' >example
"$CHUNKFLOW" gen lmsys --n 40 --seed 9 >drawn
printf '9000\n5000\n2048\n' >>drawn

# Percentages from the last summary: with replays as waste, and as work.
bubble() {
    sed -n 's/^bubble  *\([0-9.]*\) %.*, \([0-9.]*\) %.*/\1 \2/p' out
}

# ----------------------------------------------------------------------------------------------------------------------
# Help and usage
# ----------------------------------------------------------------------------------------------------------------------

test_help() {
    for command in plan compare check; do "$CHUNKFLOW" $command --help >help.$command; done
    for option in --stages --rank --limit --limits --token-bytes --limit-bytes --unit-cost --cost --replay-cost \
        --backward-cost --input-cost --weight-cost --latency --seconds-per-token --budget --costs --model \
        --config --gpu --tp --recompute --loss; do
        for command in plan compare; do
            same "pipeline/help/$command/$option" 1 "$(grep -Ec "^  $option([, ]|\$)" help.$command)"
        done
    done
    for option in --schedule --virtual --split-backward --forwards-first --forward-only --lower --width --color \
        --no-list --csv --csv-extensions --torch --microbatches --microbatch-order --dot --max-nodes --trace --metadata --all-ranks --lockstep --gang --tsv; do
        same "pipeline/help/plan/$option" 1 "$(grep -Ec "^  $option([, ]|\$)" help.plan)"
    done
    for option in --plan --lengths --limit --limits --k --rank --replay --legacy --forward-only --lockstep --microbatches --csv --buffered --chart --width --color \
        --trace \
        --unit-cost --time --cost --costs --model --gpu --tp; do
        same "pipeline/help/check/$option" 1 "$(grep -Ec "^  $option([, ]|\$)" help.check)"
    done
}

# Padding takes time. At multiples of 128 every sequence of this list fills 128 rows, so there are three chunks of 512
# rows, which take (3 + 3) x 3 x 512 token times on 4 stages. Without padding they take less.
test_padded_rows() {
    printf '100\n37\n61\n40 9\n' >short_ones
    cf plan --chunk-size 512 --align 128 --k 1 --stages 4 --schedule paper --summary short_ones
    same pipeline/padded-rows/makespan 9216 "$(summary makespan)"
    cf plan --chunk-size 512 --k 1 --stages 4 --schedule best --summary short_ones
    between pipeline/padded-rows/none "$(summary makespan)" 1 9215
}

# With more than 2^18 passes `best` has no time for a search. Under a limit below the stages it must not end with the
# fixed kinds all the same: they take twice as long as what was found for a few chunks less (321,288, 1.05 times the
# bound).
test_large_and_limited() {
    printf '8 10950\n' >equal_ones
    cf plan --chunk-size 8 --k 1 --stages 8 --limit 4 --summary equal_ones
    between pipeline/large-and-limited "$(summary makespan)" 304848 360000
}

test_usage() {
    set -- --chunk-size 2 --k 1 --stages 4
    refuses pipeline/usage/schedule 2 "--schedule: got '2f2b', wanted paper\|gpipe" plan "$@" --schedule 2f2b example
    refuses pipeline/usage/limit-state 2 "--limit-state: got '0', wanted a whole number 1 \.\. [0-9]*, or none" plan "$@" --limit-state 0 example
    refuses pipeline/usage/stages 2 "--stages: got '0', wanted a whole number 1 \.\. 65536" plan "$@" --stages 0 example
    refuses pipeline/usage/virtual 2 '--virtual: only interleaved, zero-bubble and best' plan "$@" --schedule paper --virtual 2 example
    refuses pipeline/usage/virtual/many 2 '--virtual: is too large' plan "$@" --virtual 65536 --schedule interleaved example
    refuses pipeline/usage/placement 2 'placement: only zero-bubble and best lay virtual stages in a V' \
        plan "$@" --virtual 2 --schedule interleaved --placement v example
    refuses pipeline/usage/placement/any 2 "--placement: got 'any', wanted loop\|v" \
        plan "$@" --virtual 2 --schedule best --placement any example
    refuses pipeline/usage/limits/count 2 '--limits: got 3 numbers, wanted one for each of 4 stages' \
        plan "$@" --limits 1,2,3 example
    refuses pipeline/usage/limits/both 2 '--limit and --limits exclude each other' \
        plan "$@" --limit 2 --limits 1,2,3,4 example
    for text in 1,2,x,4 1,,3,4 1,2,3, ,1,2,3 1,2,3,0 '1, 2,3,4' 1,2,3,-4 1,2,3,99999999999999999999; do
        refuses "pipeline/usage/limits/$text" 2 "--limits: got '$text', wanted whole numbers" \
            plan "$@" --limits "$text" example
    done
    refuses pipeline/usage/bytes 2 '--limit-bytes needs --model or --token-bytes' plan "$@" --limit-bytes 9 example
    refuses pipeline/usage/bytes/count 2 '--token-bytes: got 2 numbers, wanted 4' plan "$@" --token-bytes 1,2 example
    for text in 1,2 1,2,3,4 x,1,1 1,1e,1 1,1.,1 -1,1,1 nan,1,1 inf,1,1 1e999,1,1 0x1,1,1 ' 1,1,1' 1,1,1, ''; do
        refuses "pipeline/usage/cost/$text" 2 "--cost: got '$text', wanted CONST,PER_TOKEN,PER_PAIR: decimal numbers" \
            plan "$@" --cost="$text" example
    done
    refuses pipeline/usage/cost/zero 2 '--cost: got 0,0,0, wanted a cost above 0' plan "$@" --cost 0,0.0,0e5 example
    refuses pipeline/usage/cost/backward 2 '--backward-cost needs --cost' plan "$@" --backward-cost 1,1,1 example
    refuses pipeline/usage/cost/unit 2 '--cost and --unit-cost exclude' plan "$@" --unit-cost --cost 1,1,1 example
    refuses pipeline/usage/cost/huge 2 'timing: the passes take too many seconds' plan "$@" --cost 1e308,1e308,1e308 example
    refuses pipeline/usage/latency 2 "--latency: got '1,2', wanted S: a decimal number" plan "$@" --latency 1,2 example
    refuses pipeline/usage/forwards-first 2 '--forwards-first: is for gpipe alone' plan "$@" --forwards-first example
    refuses pipeline/usage/forward-only 2 '--forward-only: is for best alone' plan "$@" --schedule paper \
        --forward-only example
    refuses pipeline/usage/width 2 "--width: got '19'" plan "$@" --width 19 example
    refuses pipeline/usage/same-output 2 '--json and --trace both name x' plan "$@" --json x --trace x example
    refuses pipeline/usage/k 2 "--k: got '1,0', wanted whole numbers" compare --chunk-size 2 --k 1,0 example
    refuses pipeline/usage/rank 2 '--rank: got 2' compare --chunk-size 2 --ranks 2 --rank 2 example
}

# ----------------------------------------------------------------------------------------------------------------------
# The paper's numbers
# ----------------------------------------------------------------------------------------------------------------------

test_paper() {
    # Published: 57.14 % for 1F1B on the sequences as they are, 42.86 % if all were equal, 60 % for chunks of 4.
    cf plan --chunk-size 4 --max-slices 1 --k 1 --stages 4 --schedule 1f1b --unit-cost --summary example
    same paper/unsplit "56 57.14 57.14" "$(summary makespan) $(bubble)"
    printf '2 4\n' >equal
    cf plan --chunk-size 2 --k 1 --stages 4 --schedule 1f1b --unit-cost --summary equal
    same paper/equal "42.86 42.86" "$(bubble)"
    cf plan --chunk-size 4 --k 1 --stages 4 --schedule paper --unit-cost --summary example
    same paper/chunk-size-4 "60 60.00 60.00" "$(summary makespan) $(bubble)"

    # Published for chunks of 2: 54.1 % with K = 1 and 47.8 % with K = 2.
    cf plan --chunk-size 2 --k 1 --stages 4 --schedule paper --replay pipeline --unit-cost --summary example
    between paper/chunk-size-2/k-1 "$(bubble | cut -d ' ' -f 1)" 0 54.1
    cf plan --chunk-size 2 --k 2 --stages 4 --schedule paper --replay pipeline --unit-cost --summary example
    between paper/chunk-size-2/k-2 "$(bubble | cut -d ' ' -f 1)" 0 47.8

    # Ours. 42 and 50 are lower bounds, so they are reached and no less.
    cf plan --chunk-size 2 --k 2 --stages 4 --schedule best --replay pipeline --unit-cost --summary example
    same paper/best/k-2 "42 42.86 42.86" "$(summary makespan) $(bubble)"
    cf plan --chunk-size 2 --k 1 --stages 4 --schedule best --replay pipeline --unit-cost --summary example
    same paper/best/k-1 "50 52.00 48.00" "$(summary makespan) $(bubble)"
    cf plan --chunk-size 2 --k 1 --stages 4 --schedule best --replay local --unit-cost --summary example
    between paper/best/k-1/local "$(summary makespan)" 44 46
    cf plan --chunk-size 2 --k 1 --stages 4 --schedule best --replay local --summary example
    cp out default
    cf plan --chunk-size 2 --k 1 --stages 4 --summary --unit-cost example
    same_files paper/defaults default out
    same paper/defaults/limit "4, 3, 2, 1 chunks, which is the default; --limit none for the shortest schedule" \
        "$(sed -n 's/^limit  *//p' out)"
    same paper/defaults/state "14, 12, 10, 8 tokens, which is the default" "$(sed -n 's/^state limit  *//p' out)"
    cf plan --chunk-size 2 --k 1 --stages 4 --summary --limit-state 9 --json state.json example
    same paper/defaults/state/given "9 tokens" "$(sed -n 's/^state limit  *//p' out)"
    same paper/defaults/state/file '"state_limits": [9, 9, 9, 9]' "$(grep -o '"state_limits": .*]' state.json)"
    refuses paper/defaults/state/small 2 '--limit-state: stage 0 may hold 3, and needs 4 at least' \
        plan --chunk-size 2 --k 1 --stages 4 --limit-state 3 example
    cf plan --chunk-size 2 --k 1 --stages 4 --summary --limit none example
    same paper/defaults/limit/none 0 "$(grep -c -e '^limit ' -e ' memory ' out)"
}

# On every stage all F, which keep nothing, and then R and B of one chunk after the other.
test_forwards_first() {
    cf plan --chunk-size 2 --k 2 --stages 3 --schedule gpipe --forwards-first --tsv example
    for stage in 0 1 2; do
        same "forwards-first/order/$stage" "FFFFRBRBRBRB" "$(awk -F '\t' -v s=$stage '$1 == s { printf "%s", $4 }' out)"
    done
    same forwards-first/kept 0 "$(awk -F '\t' '$4 == "F" && $5 != 0' out | wc -l)"
}

# Forwards in plan order, which come back from JSON and from both kinds of CSV as what they are.
test_forward_only() {
    cf plan --chunk-size 2 --stages 3 --forward-only --tsv --plan-json alone_plan.json --json alone.json example
    for stage in 0 1 2; do
        same "forward-only/order/$stage" "F0F1F2F3" "$(awk -F '\t' -v s=$stage '$1 == s { printf "%s%s", $4, $9 }' out)"
    done
    cf plan --chunk-size 2 --stages 3 --forward-only --csv alone.csv --csv-extensions example
    cf plan --chunk-size 2 --stages 3 --forward-only --csv alone_comms.csv --csv-extensions --torch 2.14 example
    for file in alone.json "alone.csv --forward-only" "alone_comms.csv --forward-only"; do
        succeeds "forward-only/check/$file" check --plan alone_plan.json $file
        same "forward-only/said/$file" 1 "$(grep -c 'sound schedule: forwards alone' out)"
    done
    sed 's/,0F3//' alone.csv > short.csv
    refuses forward-only/short 1 'every chunk needs a pass' check --plan alone_plan.json short.csv --forward-only
    refuses forward-only/lost-backwards 1 'every chunk needs two passes' check --plan alone_plan.json alone.csv
    refuses forward-only/json 2 'only for schedules in CSV' check --plan alone_plan.json alone.json --forward-only
    sed 's/"forward_only": 1/"forward_only": 3/' alone.json > three.json
    refuses forward-only/three 1 'forward_only' check --plan alone_plan.json three.json
}

# ----------------------------------------------------------------------------------------------------------------------
# The list of passes, run again
# ----------------------------------------------------------------------------------------------------------------------

# Runs the passes that `plan` lists (file list) over the chunks that `pack` lists (file chunks): each as soon as its
# stage is free and what it waits for is there. F and R take a chunk's tokens / V, B twice that, I and W half of B.
# Prints makespan, both bubbles, and for each stage its idle share, chunks and tokens kept at most.
cat >again.awk <<'EOF'
FNR == NR { tokens[$1] = $7; padded[$1] = $8; next }
$1 == "stage" { s = $2; stages = s + 1; from = 3 }
$1 != "stage" { from = 1 }
{ for (i = from; i <= NF; i++) { n[s]++; list[s, n[s]] = $i } }
function take(text) { # "12F7-" or "F7-"
    match(text, /[FRBIW]/)
    v = RSTART > 1 ? substr(text, 1, RSTART - 1) + 0 : s
    pass = substr(text, RSTART, 1)
    chunk = substr(text, RSTART + 1)
    dropped = sub(/-$/, "", chunk)
}
function when(what, v, c) { return ((what, v, c) in done) ? done[what, v, c] : -1 }
function ready() { # when what this pass waits for is there; -1: not yet
    if (pass == "F") return v > 0 ? when("F", v - 1, chunk) : 0
    if (pass == "R") return v > 0 && !local ? when("R", v - 1, chunk) : 0
    if (pass == "W") return 0
    return v < stages * V - 1 ? when("B", v + 1, chunk) : 0
}
END {
    do {
        moved = 0
        for (s = 0; s < stages; s++)
            while (at[s] < n[s]) {
                take(list[s, at[s] + 1])
                r = ready()
                if (r < 0) break
                if (r < free[s]) r = free[s]
                time = tokens[chunk] / V * (pass == "B" ? 2 : 1)
                free[s] = r + time
                done[pass == "I" ? "B" : pass, v, chunk] = free[s]
                busy[s] += time
                if (pass == "R") replayed += time
                if (pass == "R" || (pass == "F" && !dropped)) {
                    kept[s]++; held[s] += padded[chunk]
                    if (kept[s] > peak[s]) peak[s] = kept[s]
                    if (held[s] > peak_tokens[s]) peak_tokens[s] = held[s]
                }
                if (pass == "B" || pass == "W") { kept[s]--; held[s] -= padded[chunk] }
                at[s]++
                moved = 1
            }
    } while (moved)
    for (s = 0; s < stages; s++) {
        if (at[s] < n[s] || kept[s] != 0) print "stuck at", list[s, at[s] + 1]
        if (free[s] > makespan) makespan = free[s]
        all += busy[s]
    }
    area = makespan * stages
    printf "%.9g %.2f %.2f\n", makespan, 100 * (1 - (all - replayed) / area), 100 * (1 - all / area)
    for (s = 0; s < stages; s++)
        printf "%d %.2f %.6g %.6g\n", s, 100 * (1 - busy[s] / makespan), peak[s] / V, peak_tokens[s] / V
}
EOF

test_again() {
    run=0
    while read -r lengths size k stages kind options; do
        run=$((run + 1))
        # shellcheck disable=SC2086
        cf plan --chunk-size "$size" --k "$k" --stages "$stages" --schedule "$kind" $options "$lengths"
        awk 'NF == 0 { exit } { print }' out >list
        local=1
        virtual=1
        case $options in *pipeline*) local=0 ;; esac
        case $kind in interleaved) virtual=2 ;; esac
        case $options in *--virtual*) virtual=${options##*--virtual } ;; esac
        {
            echo "$(summary makespan) $(bubble)"
            awk '$1 == "stage" && $2 == "idle" { on = 1; next } on && NF == 0 { exit }
                on { gsub(",", ""); print $1, $2, $4 == "" ? "?" : $3 + 0, $4 + 0 }' out
        } >got
        "$CHUNKFLOW" pack --chunk-size "$size" --chunks "$lengths" |
            awk '$1 == "chunk" && $2 == "rank" { on = 1; next } on && NF == 0 { exit } on' >chunks
        awk -v local=$local -v V=$virtual -f again.awk chunks list >want
        same_files "again/$lengths $size $k $stages $kind $options" want got
    done <<'EOF'
example 2 1 4 paper --replay pipeline
example 2 2 4 1f1b --replay pipeline
example 2 1 4 interleaved --replay pipeline
example 2 1 4 zero-bubble --replay pipeline
drawn 1024 1 4 paper --replay pipeline
drawn 1024 2 4 paper
drawn 1024 3 3 gpipe --replay pipeline
drawn 1024 2 5 gpipe --replay pipeline --limit 4
drawn 512 2 4 1f1b --replay pipeline
drawn 512 1 2 1f1b
drawn 1024 2 4 interleaved --replay pipeline
drawn 1024 1 2 interleaved --replay pipeline --virtual 4
drawn 1024 2 4 zero-bubble --replay pipeline
drawn 1024 1 3 zero-bubble --replay local
drawn 1024 2 4 best --budget 50 --replay pipeline
drawn 1024 2 4 best --budget 50
drawn 1024 2 4 best --budget 50 --limit none
drawn 1024 2 4 best --budget 50 --replay pipeline --split-backward
drawn 1024 1 4 best --budget 50 --replay pipeline --limits 3,3,2,1
drawn 1024 1 4 best --budget 50 --limit 2
drawn 8192 1 8 paper --replay pipeline
EOF
}

# ----------------------------------------------------------------------------------------------------------------------
# The chart
# ----------------------------------------------------------------------------------------------------------------------

chart() { # the stages' lines, without their labels
    sed -n 's/^stage [0-9]* *|\(.*\)|$/\1/p' out
}

test_chart() {
    # One column per unit of time: then every letter and every point is exact. 8 columns are "stage 0 ", 2 the bars.
    cf plan --chunk-size 2 --k 2 --stages 4 --schedule gpipe --width 52 example
    same chart/exact/makespan 42 "$(summary makespan)"
    cat >want <<'EOF'
F0F1F2F3..................B1--B0--B2--B3--
..F0F1F2F3............B1--B0--B2--B3--....
....F0F1F2F3......B1--B0--B2--B3--........
......F0F1F2F3B1--B0--B2--B3--............
EOF
    chart >got
    same_files chart/exact want got
    same chart/axis "0 20 40" "$(sed -n '/^ *0 .*[0-9]$/p' out | head -n 1 | xargs)"

    # As wide as asked, every stage there, and points as idle as the summary says, to a column per pass and side.
    for width in 80 100 133 200; do
        for kind in paper zero-bubble interleaved; do
            quick cf plan --chunk-size 2048 --k 1 --stages 4 --schedule $kind --width $width --no-list drawn
            same "chart/$width/$kind" "4 $width" "$(sed -n '/^stage [0-9]* *|/p' out |
                awk '{ n++; w = length; widths = widths (n == 1 || w != last ? " " w : ""); last = w }
                    END { print n widths }')"
        done
    done
    cf plan --chunk-size 1024 --k 1 --stages 3 --width 2000 --no-list drawn
    chart | awk '{ n = length; print NR - 1, 100 * gsub(/\./, "") / n }' >points
    awk '$1 == "stage" && $2 == "idle" { on = 1; next } on && NF == 0 { exit } on { print $1, $2 }' out >idle
    same chart/idle "3 0" "$(paste points idle | awk '
        { n++; d = $2 - $4; if (d < 0) d = -d; if (d > 1) bad++ } END { print n, bad + 0 }')"
    # The list keeps to the width as well.
    cf plan --chunk-size 256 --k 2 --stages 2 --width 60 drawn
    awk 'NF == 0 { exit } { if (length > most) most = length; n++ } END { print most, n }' out >widest
    between chart/list "$(cut -d ' ' -f 1 widest)" 50 60
    between chart/list/wrapped "$(cut -d ' ' -f 2 widest)" 3 1000

    # Below it what each stage keeps, one column per unit of time: the most of the passes that the column sees, in
    # eighths of the most of all stages, drawn again from the JSON.
    for kind in gpipe best; do
        cf plan --chunk-size 2 --k 2 --stages 4 --schedule $kind --width 52 --no-list --json s.json example
        same chart/memory/$kind/makespan 42 "$(summary makespan)"
        awk '/"pass"/ { gsub(/["{},:]/, " "); for (i = 1; i <= NF; i++) {
                if ($i == "stage") s = $(i + 1)
                if ($i == "start") start = $(i + 1)
                if ($i == "end") end = $(i + 1)
                if ($i == "live") live = $(i + 1) }
            n[s]++; from[s, n[s]] = start; until[s, n[s] - 1] = start; until[s, n[s]] = end; kept[s, n[s]] = live
            if (live > top) top = live
            if (live > peak[s]) peak[s] = live }
            END { for (s = 0; s < 4; s++) {
                    line = ""
                    for (t = 0; t < 42; t++) {
                        most = 0
                        for (i = 1; i <= n[s]; i++)
                            if (from[s, i] < t + 1 && until[s, i] > t && kept[s, i] > most) most = kept[s, i]
                        eighths = most * 8 / top
                        if (eighths > int(eighths)) eighths = int(eighths) + 1
                        line = line (eighths ? substr(".:-=+*#@", eighths, 1) : " ")
                    }
                    print s, peak[s], "|" line "|" } }' s.json >want
        sed -n 's,^\([0-9]\)  *\([0-9]*\)[/0-9]* |,\1 \2 |,p' out >got
        same_files chart/memory/$kind want got
    done
    same chart/memory/limit "4/5 4/4 3/3 2/2" "$(sed -n 's/^[0-3]  *\([0-9]*\/[0-9]*\) |.*/\1/p' out | xargs)"
    cf plan --chunk-size 2 --k 2 --stages 4 --width 52 --no-list --json s.json example
    cp out want
    LC_ALL=C.UTF-8 "$CHUNKFLOW" plan --chunk-size 2 --k 2 --stages 4 --width 52 --no-list --json s.json example >out
    for block in 1:201 2:202 3:203 4:204 5:205 6:206 7:207 8:210; do # U+2581 to U+2588
        mark=$(echo '.:-=+*#@' | cut -c "${block%:*}")
        sed "s/$(printf '%b' "\\0342\\0226\\0${block#*:}")/$mark/g" out >out2
        mv out2 out
    done
    same_files chart/memory/blocks want out
    # Bytes, and the limit of them: what is above it is marked.
    cf plan --chunk-size 1024 --k 4 --stages 2 --schedule gpipe --token-bytes 4,0,0,0 --no-list --width 60 drawn
    same chart/memory/bytes 1 "$(grep -c '^ *bytes that each stage holds' out)"
    peak=$(summary 'peak bytes')
    same chart/memory/bytes/peak 1 "$(sed -n 's/^0  *\([0-9.]*\)K |.*/\1/p' out |
        awk -v peak="$peak" '{ print ($1 > peak / 1024 * 0.995 && $1 < peak / 1024 * 1.005) }')"
    cf plan --chunk-size 2 --k 1 --stages 1 --model qwen2.5-72b --gpu a100-40g --no-list --width 60 example
    same chart/memory/above 1 "$(grep -c '^0  *[0-9.]*T |!*|$' out)"

    # Marks of the axis stand apart, whole, and within the chart, whatever the numbers are.
    for cost in 1,0,0 1e-9,0,0 1.2345678e-5,3.3e-7,0 1e300,0,0 123456.789,0,0 1e-300,0,0; do
        for width in 20 37 64 100 233; do
            quick cf plan --chunk-size 2 --k 2 --stages 4 --cost $cost --width $width --no-list example
            same "chart/axis/$cost/$width" "0 0 yes" "$code $(awk -v width=$width '
                /^stage/ { n = NR } NR == n + 1 && n { if (length > width) bad++
                    for (i = 1; i <= NF; i++) { if ($i !~ /^[0-9,]+(\.[0-9]+)?(e[-+][0-9]+)?$/) bad++
                        value = $i; gsub(",", "", value); if (i > 1 && value + 0 <= before + 0) bad++; before = value }
                    exit }
                END { print bad + 0 }' out) $(awk -v width=$width '/^stage/ && length != width { bad = 1 }
                    /^input/ { exit } !/^stage/ && length > width { bad = 1 } END { print bad ? "no" : "yes" }' out)"
        done
    done

    # Colour: only where asked or on a terminal.
    cf plan --chunk-size 2 --k 1 --stages 4 --no-list example
    cp out plain
    same chart/colour/auto 0 "$(grep -c "$(printf '\033')" out)"
    cf plan --chunk-size 2 --k 1 --stages 4 --no-list --color never example
    same_files chart/colour/never plain out
    cf plan --chunk-size 2 --k 1 --stages 4 --no-list --color=always example
    same chart/colour/always 5 "$(grep -c "$(printf '\033\\[38;5;[0-9]*;48;5;')" out)"
    sed "s/$(printf '\033')\\[[0-9;]*m//g; s/ *|\$/|/; s/--*/ /g; s/\\.\\.*/ /g; s/  */ /g" out >got
    sed "s/--*/ /g; s/\\.\\.*/ /g; s/ *|\$/|/; s/  */ /g" plain >want
    same chart/colour/letters "$(grep '^stage' want | tr -d ' ')" "$(grep '^stage' got | tr -d ' ')"
    if command -v script >/dev/null 2>&1 && script -qec true /dev/null >/dev/null 2>&1 </dev/null; then
        on_terminal="stty cols 90; '$CHUNKFLOW' plan --chunk-size 2 --k 1 --stages 4 --no-list '$work/example'"
        script -qec "$on_terminal" /dev/null </dev/null 2>/dev/null | tr -d '\r' >out
        same chart/terminal/colour yes "$(grep -q "$(printf '\033')" out && echo yes || echo no)"
        same chart/terminal/width 90 \
            "$(sed "s/$(printf '\033')\\[[0-9;]*m//g" out | sed -n '/^stage 0/p' | awk '{ print length }')"
        script -qec "export NO_COLOR=1; $on_terminal" /dev/null </dev/null 2>/dev/null >out
        same chart/terminal/no-color "4 0" "$(grep -c '^stage [0-3] |' out) $(grep -c "$(printf '\033')" out)"
        script -qec "export TERM=dumb; $on_terminal" /dev/null </dev/null 2>/dev/null >out
        same chart/terminal/dumb "4 0" "$(grep -c '^stage [0-3] |' out) $(grep -c "$(printf '\033')" out)"
    else
        skip chart/terminal "there is no script command"
    fi

    # Nothing to draw, and too much.
    : >empty
    succeeds chart/empty plan --chunk-size 2 --k 1 --stages 3 empty
    same chart/empty/makespan "0 0.00 0.00" "$(summary makespan) $(bubble)"
    printf '1 20000\n' >ones
    succeeds chart/dense plan --chunk-size 1 --k 1 --stages 2 --no-list ones
    same chart/dense/lines 2 "$(sed -n '/^stage [0-9]* *|/p' out | awk 'length == 100' | wc -l | tr -d ' ')"
}

# ----------------------------------------------------------------------------------------------------------------------
# Limits and costs
# ----------------------------------------------------------------------------------------------------------------------

test_limits() {
    for kind in paper gpipe 1f1b zero-bubble interleaved best; do
        cf plan --chunk-size 1024 --k 4 --stages 4 --schedule $kind --limit 2 --budget 20 --summary drawn
        between "limits/$kind" "$(summary 'peak activations')" 1 2
    done
    cf plan --chunk-size 1024 --k 4 --stages 4 --schedule best --limits 3,3,2,1 --budget 20 --summary drawn
    same limits/stages 0 "$(awk '$1 == "stage" { on = 1; next } on && NF == 0 { exit }
        on && $3 > (substr("3321", $1 + 1, 1) + 0) { bad++ } END { print bad + 0 }' out)"
    same limits/bound 1 "$(grep -c '^lower bounds .*memory [0-9]' out)"
    refuses limits/bytes/infeasible 2 '^chunkflow: --limit-bytes: stage 0 may keep 10, and needs [0-9,]+ at least$' \
        plan --chunk-size 1024 --k 1 --stages 2 --token-bytes 4,2,4,1 --limit-bytes 10 drawn
    # What is said to be enough is enough, and one less is not.
    least=$(sed -n 's/.*needs \([0-9,]*\) at least/\1/p' err | tr -d ,)
    cf plan --chunk-size 1024 --k 1 --stages 2 --token-bytes 4,2,4,1 --limit-bytes "$least" --summary drawn
    same limits/bytes/least "0 $least" "$code $(summary 'peak bytes')"
    refuses limits/bytes/less 2 'at least$' \
        plan --chunk-size 1024 --k 1 --stages 2 --token-bytes 4,2,4,1 --limit-bytes $((least - 1)) drawn
}

# best is held to what a GPU has, or may hold, whatever limit of chunks and K it was given; so are others where that was
# given. What cannot be held to it says so.
test_memory_limit() {
    wanted limits/memory || return 0
    at="--chunk-size 8K --stages 4 --model qwen2.5-7b --tp 1 --gpu h100-80g --recompute selective"
    "$CHUNKFLOW" gen lognormal --n 120 --median 5000 --max 64K --seed 3 >long
    gib() { sed -n 's/^peak memory  *\([0-9.]*\) GiB.*/\1/p' out; }
    for options in "--k 4 --limit none" "--k 8 --limit 60" "--k 32 --limit none --split-backward" \
        "--k 4 --limit none --limit-bytes 70G" "--k 4 --limit none --limit-bytes 75G --schedule gpipe"; do
        # shellcheck disable=SC2086
        quick cf plan $at $options --plan-json held_plan.json --json held.json --summary long
        most=$(sed -n 's/^memory limit  *the \([0-9.]*\) GiB of the .*/\1/p' out)
        same "limits/memory/$options" "0 yes 1" "$code $(gib | awk -v most="$most" '{ print $1 <= most ? "yes" : $1 }'
            ) $(grep -c '^peak memory .*; the schedule is held down to fit$' out)"
        cf check --plan held_plan.json held.json
        same "limits/memory/valid/$options" 0 "$code"
    done
    # shellcheck disable=SC2086
    cf plan $at --k 4 --limit none --schedule gpipe --summary long
    same limits/memory/others "0 1" "$code $(grep -c \
        "^peak memory .*, MORE THAN the 72.48 GiB of the GPU less the reserve of 9 %$" out)"
    # shellcheck disable=SC2086
    cf plan $at --k 4 --limit none --schedule gpipe --reserve 0 --summary long
    same limits/memory/others/all "0 1" "$code $(grep -c "^peak memory .*, MORE THAN the 79.65 GiB of the GPU$" out)"
    # shellcheck disable=SC2086
    cf plan $at --k 4 --limit none --limit-bytes 30G --summary long
    same limits/memory/too-little "0 1" "$code $(grep -c "^peak memory .*, MORE THAN the 30.00 GiB of the limit$" out)"
    # What tune's best may hold is what plan, compare and report hold theirs to; a written limit has no reserve.
    # shellcheck disable=SC2086
    printf '%s\n' 20K 3K 5K >few
    for options in "" "--reserve 20" "--limit-bytes 70G"; do
        cf plan $at --k 1 $options --summary long
        sed -n 's/^memory limit  *the \([0-9.]*\) GiB.*/\1/p' out >limit
        quick cf compare $at --k 1 --budget 1 $options few
        sed -n 's/^memory limit  *the \([0-9.]*\) GiB.*/\1/p' out >>limit
        quick cf report $at --k 1 --budget 1 $options few -o held.html --json -
        sed -n 's/^ *"limit_bytes": \([0-9]*\),*$/\1/p' out | awk '{ printf "%.2f\n", $1 / 2 ^ 30 }' >>limit
        quick cf tune ${at#* * } --pp 4 --chunk-sizes 8K --ks 1 --budget 1 --schedules paper --batches 1 $options few
        sed -n 's/^GPU .*, \([0-9.]*\) GiB for each; .*/\1/p' out >>limit
        same "limits/memory/one rule $options" "4 1" "$(wc -l <limit | tr -d ' ') $(sort -u limit | wc -l | tr -d ' ')"
    done
    # shellcheck disable=SC2086
    quick cf compare $at --k 4 --limit none --tsv long
    same limits/memory/compare "best" "$(column out held_down >held; column out schedule | paste held - | awk '
        $1 == 1 { print $2 }' | sort -u)"
    same limits/memory/compare/fits 0 "$(column out fits | paste held - | awk '$1 == 1 && $2 != 1 { n++ } END {
        print n + 0 }')"
}

# Where no K is given: the largest of 1, 2 and 4 with which paper fits as it is, for plan, compare and report alike.
test_default_k() {
    wanted limits/k || return 0
    echo 200000 | cat drawn - >long_one
    at="--chunk-size 8K --stages 4 --model qwen2.5-7b --tp 4 --gpu h100-80g"
    for bytes in 14G 20G 25G 60G; do
        # shellcheck disable=SC2086
        cf compare $at --k 1,2,4 --limit-bytes $bytes --budget 1 --tsv long_one
        k=$(awk -F '\t' -v k=1 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
            $at["schedule"] == "paper" && $at["fits"] && !$at["held_down"] && $at["k"] > k { k = $at["k"] }
            END { print k }' out)
        # shellcheck disable=SC2086
        cf plan $at --limit-bytes $bytes --budget 1 --summary long_one
        said="$(sed -n 's/^schedule  *best, K = \([0-9]*\),.*/\1/p' out) $(grep -c \
            '^  *K is the largest of 1, 2 and 4 that memory allows; --k for another$' out)"
        # shellcheck disable=SC2086
        cf compare $at --limit-bytes $bytes --budget 1 long_one
        said="$said $(sed -n 's/^K  *\([0-9]*\), the largest of 1, 2 and 4 that memory allows; .*/\1/p' out)"
        # shellcheck disable=SC2086
        cf report $at --limit-bytes $bytes --budget 1 -o /dev/null --json default_k.json long_one
        same "limits/k/$bytes" "$k 1 $k $k" "$said $(sed -n 's/^ *"k": \([0-9]*\),$/\1/p' default_k.json | head -n 1)"
        printf '%s ' "$k" >>default_ks
    done
    same limits/k/all "1 1 2 4 " "$(cat default_ks)"
    cf plan --chunk-size 1024 --stages 2 --summary drawn
    same limits/k/unknown 1 \
        "$(grep -c '^  *K is the default where nothing says what memory allows; --k for another$' out)"
}

# Tokens a second and the part of the GPUs' FLOPs, worked out again from the plan: 7B has 28 layers, 3584 wide, 28 query and
# 4 key heads of 128, an MLP of 18944, 152064 words; the GPU does 989.4 TFLOP/s.
test_speed() {
    wanted speed || return 0
    at="--chunk-size 8K --k 2 --stages 4 --ranks 2 --rank 1 --model qwen2.5-7b --tp 4 --gpu h100-80g"
    # shellcheck disable=SC2086
    cf plan $at --plan-json p.json --json s.json --summary drawn
    wanted=$(awk '
        function number(key) { return substr($0, index($0, "\"" key "\": ") + length(key) + 4) + 0 }
        /"makespan"/ { seconds = number("makespan") }
        /"pairs".*"rank": 1,/ { tokens += number("tokens"); pairs += number("pairs") }
        END {
            layer = 3584 * 128 * (2 * 28 + 2 * 4) + 128 * (28 + 2 * 4) + 3 * 3584 * 18944
            flops = 6 * (28 * layer + 3584 * 152064) * tokens + 12 * pairs * 28 * 28 * 128
            printf "%.3g %.1f", tokens / seconds / 16, 100 * flops / seconds / 16 / 989.4e12 }' s.json p.json)
    same speed/plan "$wanted" "$(sed -n 's/^speed  *\([0-9,]*\) tokens.*utilisation \([0-9.]*\) %, estimated.*/\1 \2/p' out |
        tr -d , | awk '{ printf "%.3g %s", $1, $2 }')"
    # shellcheck disable=SC2086
    cf compare $at --tsv drawn
    same speed/compare "$wanted" "$(for name in schedule split_backward at_paper_peaks tokens_per_s_a_gpu \
        model_flops_utilisation; do column out $name >"$name.column"; done
        paste schedule.column split_backward.column at_paper_peaks.column tokens_per_s_a_gpu.column \
            model_flops_utilisation.column | awk '$1 == "best" && !$2 && !$3 { printf "%.3g %.1f", $4, 100 * $5 }')"
    same speed/estimated 1 "$(column out estimated | sort -u)"
}

test_costs() {
    # Constant costs on two chunks and two stages, by hand: F F on stage 0; with a latency of 0.5 the last B ends at
    # F 1, 0.5, F 1, B 3, (second F is there) F 1, B 3, 0.5, B 3 or in 1f1b's order alike.
    printf '8 2\n' >two
    cf plan --chunk-size 8 --k 1 --stages 2 --schedule 1f1b --cost 1,0,0 --backward-cost 3,0,0 --latency 0.5 \
        --summary two
    same costs/latency "13 s" "$(summary makespan) $(summary makespan 2)"
    cf plan --chunk-size 8 --k 1 --stages 2 --schedule 1f1b --cost 1,0,0 --backward-cost 3,0,0 --summary two
    same costs/free 12 "$(summary makespan)"
    cf plan --chunk-size 8 --k 1 --stages 2 --schedule 1f1b --cost 1,0,0 --backward-cost 3,0,0 --seconds-per-token \
        0.0625 --summary two
    same costs/bandwidth 13 "$(summary makespan)" # 8 tokens: 0.5, as above
    cf plan --chunk-size 8 --k 1 --stages 1 --cost 0,0.5,0.25 --summary two
    same costs/formula 78 "$(summary makespan)" # (8 x 0.5 + 36 x 0.25) x 3 x 2
    cf plan --chunk-size 8 --k 1 --stages 1 --schedule zero-bubble --cost 1,0,0 --input-cost 2,0,0 --weight-cost \
        5,0,0 --summary two
    same costs/halves 16 "$(summary makespan)"
    printf '16\n' >long
    cf plan --chunk-size 8 --k 1 --stages 1 --cost 1,0,0 --replay-cost 7,0,0 --backward-cost 2,0,0 --summary long
    same costs/replay 13 "$(summary makespan)"
    # Virtual stages cost a share of their stage: the work stays the same.
    cf plan --chunk-size 2 --k 1 --stages 1 --schedule interleaved --virtual 2 --summary example
    split=$(summary makespan)
    cf plan --chunk-size 2 --k 1 --stages 1 --schedule 1f1b --summary example
    same costs/virtual "$(summary makespan)" "$split"
}

# Costs of each stage and its memory: from a model and a GPU, from a file of them, or from a fit.
test_models() {
    echo 60000 | cat drawn - >longer
    set -- --model qwen2.5-7b --gpu h100-80g --tp 4 --recompute selective
    shape="--chunk-size 4K --stages 4"
    "$CHUNKFLOW" time "$@" --pp 4 --chunk-size 4K --json costs.json >/dev/null
    # shellcheck disable=SC2086
    cf plan $shape --k 2 --schedule zero-bubble --replay local "$@" --json m.json --summary longer
    seconds=$(summary makespan)
    same models/unit s "$(summary makespan 2)"
    same models/stages 4 "$(grep -Ec '^ +[0-3] .* [0-9]+\.[0-9][0-9]$' out)"
    most=$(grep -E '^ +[0-3] ' out | awk '$6 > most { most = $6; stage = $1 } END { print most " GiB on stage " stage }')
    same models/peak "$most" "$(sed -n 's/^peak memory  *\(.*\), of the.*/\1/p' out)"
    # the head: a forward of the same chunk takes longer on the last stage than on the third, and as long there as on
    # the second
    same models/head "1 1" "$(awk -F '[:,}]' '/"pass": "F", "chunk": 0,/ { gsub(/ /, "")
            for (i = 1; i < NF; i++) { if ($i == "\"start\"") a = $(i + 1); if ($i == "\"end\"") b = $(i + 1)
                if ($i == "\"stage\"") s = $(i + 1) }
            t[s] = b - a }
        END { print (t[3] > 1.1 * t[2]), (t[2] > 0.99 * t[1] && t[2] < 1.01 * t[1]) }' m.json)"
    # shellcheck disable=SC2086
    cf plan $shape --k 2 --schedule zero-bubble --replay local --costs costs.json --summary longer
    same models/costs "$seconds s" "$(summary makespan) $(summary makespan 2)"
    # the model alone: memory, and token times
    # shellcheck disable=SC2086
    cf plan $shape --k 2 --schedule zero-bubble --replay local --model qwen2.5-7b --tp 4 --recompute selective \
        --summary longer
    same models/alone "token ${most% on *}" "$(summary makespan 2) $(sed -n 's/^peak memory  *\([0-9.]* GiB\).*/\1/p' out)"
    # a fit: all stages alike
    awk 'BEGIN { for (t = 1; t < 9; t++) for (p = 0; p < 3; p++)
        { pairs = 7 * p * t + t * (t + 1) / 2; print "F", t, pairs, 2 * t + pairs / 4 } }' >samples
    "$CHUNKFLOW" time --fit samples --json fit.json >/dev/null
    cf plan --chunk-size 2 --k 2 --stages 4 --schedule paper --costs fit.json --summary example
    fitted=$(summary makespan)
    cf plan --chunk-size 2 --k 2 --stages 4 --schedule paper --cost 0,2,0.25 --summary example
    between models/fit "$fitted" "$(summary makespan | awk '{ print $1 * (1 - 1e-6) }')" \
        "$(summary makespan | awk '{ print $1 * (1 + 1e-6) }')"

    refuses models/gpu 2 '--gpu needs --model' plan --chunk-size 8 --k 1 --gpu h200 example
    refuses models/gpu/cost 2 '--gpu and --cost exclude each other' plan --chunk-size 8 --k 1 "$@" --cost 1,1,1 example
    refuses models/costs/cost 2 '--costs and --cost exclude' plan --chunk-size 8 --k 1 --costs fit.json --cost 1,1,1 \
        example
    refuses models/costs/stages 2 '^costs.json:[0-9]+: stages: got 4, wanted 3' \
        compare --chunk-size 8 --stages 3 --costs costs.json example
    sed 's/chunkflow-fit/chunkflow-fat/' fit.json >other.json
    refuses models/costs/format 2 'other.json:[0-9]+: format: wanted chunkflow-time' \
        plan --chunk-size 8 --k 1 --costs other.json example
    sed 's/"per_pair": /"per_pair": -/' fit.json >negative.json
    refuses models/costs/negative 2 'F: a cost is negative' plan --chunk-size 8 --k 1 --costs negative.json example
}

# A schedule from elsewhere is timed by check: by token times, or by any costs.
test_times() {
    printf '8 2\n' >two
    cf plan --chunk-size 8 --k 1 --stages 2 --schedule 1f1b --plan-json two.json --csv two.csv two
    cf check --plan two.json two.csv --time
    same times/said "72 token" "$(summary makespan) $(summary makespan 2)" # (2 + 1) x 8 x 3
    # The other order, by hand: both forwards first on each stage. Stage 0 ends with F F, a wait of two backwards of the
    # last stage that begin after three forwards, and its own B: 1 + 1 + 1 + 3 + 3 + 3.
    printf '0F0,0F1,,,0B0,0B1\n,1F0,1F1,1B0,1B1\n' >edited.csv
    cf check --plan two.json edited.csv --time --cost 1,0,0 --backward-cost 3,0,0
    same times/edited "12 s" "$(summary makespan) $(summary makespan 2)"
    cf plan --chunk-size 8 --k 1 --stages 2 --schedule gpipe --cost 1,0,0 --backward-cost 3,0,0 --summary two
    same times/as-planned "12 s" "$(summary makespan) $(summary makespan 2)"
    cf check --plan two.json edited.csv --time --cost 1,0,0 --backward-cost 3,0,0 --chart --width 40
    same times/chart 2 "$(grep -c '^stage [01] |.*F0' out)"
    printf '0F0,0F1\n,1F0,1F1,1B0,1B1\n' >short.csv
    cf check --plan two.json two.csv --time --model qwen2.5-0.5b --gpu h200
    same times/model "s 1" "$(summary makespan 2) $(grep -c '^peak memory  *[0-9.]* GiB on stage [01], of' out)"
    refuses times/costs 2 'costs, models and GPUs need --time' check --plan two.json two.csv --cost 1,0,0
    refuses times/unsound 1 'breaks a rule' check --plan two.json --time short.csv
    refuses times/plan 2 'two.json is none' check --time two.json
}

# ----------------------------------------------------------------------------------------------------------------------
# Files
# ----------------------------------------------------------------------------------------------------------------------

test_files() {
    set -- --chunk-size 1024 --k 1 --stages 3 --schedule paper --replay pipeline
    cf plan "$@" --json s.json --plan-json p.json --csv s.csv --csv-extensions --microbatches m.csv --dot g.dot \
        --max-nodes 5000 --trace t.json drawn
    actions=$(summary actions | tr -d :)
    same files/code 0 "$code"
    awk 'NF == 0 { exit } { sub(/^stage [0-9]* */, "&\001"); print }' out | tr '\n' ' ' | tr '\001' '\n' |
        sed '1d; s/stage [0-9]* *$//; s/-//g; s/  */ /g; s/^ //; s/ *$//' >list
    echo >>list
    tr -d '\r' <s.csv | sed 's/^[0-9]*//; s/,[0-9]*/ /g' | awk -F '[ ,\r]' '
        FILENAME == "m.csv" { chunk[$1] = $2; next }
        { for (i = 1; i <= NF; i++) {
            microbatch = $i
            sub(/^[A-Z_]*/, "", microbatch)
            sub(/[0-9]*$/, "", $i)
            $i = $i chunk[microbatch] } print }' m.csv - >cells
    same_files files/csv/list list cells
    same files/csv/stages "0 1 2" "$(tr -d '\r' <s.csv | sed 's/^\([0-9]*\).*/\1/' | xargs)"
    same files/dot/nodes "$actions" "$(grep -c '^ *n[0-9]* \[label' g.dot)"
    cf plan --chunk-size 1024 --k 2 --stages 3 --limit 1 --budget 20 --json b.json --dot b.dot --max-nodes 5000 drawn
    same files/dot/dropped "$(grep -o '"R"' b.json | wc -l)" "$(grep -c 'label="R ' b.dot)" # whatever best drops
    same files/trace/passes "$actions" "$(grep -c '"ph": "X"' t.json)"
    for output in json plan-json csv microbatches dot trace; do
        more=
        [ $output = csv ] && more='--microbatches again.csv'
        cf plan "$@" --csv-extensions --max-nodes 5000 --$output - $more drawn
        case $output in
            json) same_files files/stdout/json s.json out ;;
            plan-json) same_files files/stdout/plan-json p.json out ;;
            csv) same_files files/stdout/csv s.csv out ;;
            microbatches) same_files files/stdout/microbatches m.csv out ;;
            dot) same_files files/stdout/dot g.dot out ;;
            *) same_files files/stdout/trace t.json out ;;
        esac
    done
    cf plan "$@" --ranks 3 --all-ranks --json all.json drawn
    for rank in 0 1 2; do
        if [ $rank -gt 0 ]; then echo ,; fi
        "$CHUNKFLOW" plan "$@" --ranks 3 --rank $rank --json - drawn
    done >each
    sed '1,3d; s/^\]}$//' all.json | sed '$d' >between
    same_files files/all-ranks each between
    cf plan --chunk-size 1024 --k 2 --stages 3 --cost 1,0,0 --budget 20 --dot seconds.dot --max-nodes 5000 --summary drawn
    same files/dot/units "0 3 1 s" "$(grep -c 'tooltip="[0-9.]* s"' b.dot) $(grep -c 'F 0".*tooltip="[0-9]* token times"' b.dot) \
$(sed -n 's/.*"F 0.*tooltip="\([^"]*\)".*/\1/p' seconds.dot | sort -u)"
    refuses files/dot/many 2 '^chunkflow: --dot: got [0-9]+ passes, wanted at most 10: raise --max-nodes' \
        plan "$@" --dot made --max-nodes 10 drawn
    refuses files/csv/split 2 'PyTorch cannot run this schedule: .* part of a split sequence' \
        plan "$@" --csv made --json made2 --microbatches made3 drawn
    same files/csv/nothing "no no" "$([ -e made ] && echo yes || echo no) $([ -e made2 ] && echo yes || echo no)"
    refuses files/csv/reorder 2 'is a dependent chunk' plan "$@" --microbatch-order drawn
    refuses files/csv/reorder/ranks 2 'numbers the chunks of one rank' plan "$@" --microbatch-order --all-ranks --json x drawn
    refuses files/csv/torch 2 'needs --csv' plan "$@" --torch 2.15 drawn
    for torch in 2 2. .14 2.x 2.14rc v2.14 2.14-1; do
        refuses "files/csv/torch/$torch" 2 "got '$torch', wanted a version" plan "$@" --csv made --torch "$torch" drawn
    done

    # Whole sequences only: what PyTorch runs, with a mapping, and with the plan numbered so.
    awk '$1 <= 1024' drawn >short
    for kind in paper gpipe 1f1b interleaved zero-bubble best; do
        set -- --chunk-size 1024 --k 1 --stages 3 --schedule $kind --limit none --budget 50 --summary
        cf plan "$@" --csv made --microbatches map --plan-json sp.json short
        same files/csv/$kind 0 "$code"
        same files/csv/$kind/runnable 0 "$(grep -c '[RV]' made)"
        cf plan "$@" short
        planned=$(summary makespan)
        cf check --plan sp.json --microbatches map made --time
        same files/csv/$kind/times "0 $planned" "$code $(summary makespan)"
        cf plan "$@" --csv made2 --microbatch-order --plan-json sp2.json short
        same files/csv/$kind/numbered 0 "$code"
        same_files files/csv/$kind/same made made2
        succeeds files/csv/$kind/plan check sp2.json --lengths short
        for torch in 2.9 2.14 2.15; do
            quick cf plan "$@" --csv made --torch $torch --microbatch-order short
            same files/csv/$kind/$torch 0 "$code"
            quick succeeds files/csv/$kind/$torch/read check --plan sp2.json --time made
        done
        same files/csv/$kind/waits "$(tr ',\r' '\n\n' <made | grep -c '^[0-9]*SEND')" "$(tr , '\n' <made | grep -c WAIT_SEND)"
    done
    for torch in '1.13 2.9' '2.0.1 2.9' '2.10 2.14' '2.12.0+cu126 2.14' '2.14.1 2.14' '2.16 2.15' '3.0 2.15'; do
        cf plan "$@" --csv made --torch "${torch#* }" --microbatch-order short
        cf plan "$@" --csv made2 --torch "${torch% *}" --microbatch-order short
        same_files "files/csv/torch/${torch% *}" made made2
        case $torch in
            '1.13 '*|'2.0.1 '*|'2.16 '*|'3.0 '*) said="chunkflow plan: PyTorch ${torch% *} has not been seen; the file is as ${torch#* } takes it" ;;
            *) said= ;;
        esac
        same "files/csv/torch/${torch% *}/said" "$said" "$(cat err)"
    done
    refuses files/csv/order 2 'in another order: --microbatches' plan "$@" --csv made short
    # Where PyTorch puts receives off, its sends do not wait for them.
    echo 8 4 >eights
    cf plan --chunk-size 8 --k 1 --plan-json eights.json --json eights.schedule --summary eights
    deferred=$(dirname "$HEADER")/tests/torch/2.15/interleaved-1f1b_p2_n4_deferred-recv.csv
    refuses files/csv/deferred 1 'lists deadlock; with --buffered, where sends do not wait, it is sound$' \
        check --plan eights.json "$deferred"
    succeeds files/csv/buffered check --plan eights.json --buffered "$deferred" --csv back.csv
    same_files files/csv/back "$deferred" back.csv
    for name in gpipe_p2_n4_order zbv_p2_n4_order zbv_p2_n4_comms looped-bfs_p2_n4_comms; do
        dump=$(dirname "$deferred")/$name.csv
        cf check --plan eights.json "$dump" --csv -
        same_files "files/csv/back/$name" "$dump" out
    done
    refuses files/csv/back/json 2 'only for schedules in CSV' check --plan eights.json eights.schedule --csv back.csv
    set -- --chunk-size 1024 --k 1 --stages 3
    refuses files/csv/replay 2 'PyTorch cannot run this schedule: .* is a replay' plan "$@" --limit 1 --csv made \
        --microbatches map short
    printf 'microbatch,chunk\n0,0\n' >map
    refuses files/csv/map 2 '^map:2: csv line 2, column 3: a line is' check --plan sp.json --microbatches map made
    set -- --chunk-size 1024 --k 1 --stages 3 --schedule paper --replay pipeline

    # Lowered: each send has its receive.
    cf plan "$@" --lower --csv l.csv --csv-extensions --torch 2.9 --microbatches lm.csv --json l.json drawn
    for what in F R B; do
        same "files/lowered/$what" "$(summary actions | tr -d :) yes" "$(awk -v what=$what '
            $1 == "actions" { gsub(",", ""); gsub(":", "", $2)
                for (i = 4; i <= NF; i += 2) n[$i] = $(i - 1)
                print $2, (n["SEND_" what] > 0 && n["SEND_" what] == n["RECV_" what]) ? "yes" : "no" }' out)"
    done
    same files/lowered/comms yes "$(grep -q SEND_F0 l.csv && echo yes)"
    cf check --plan p.json --replay pipeline --microbatches lm.csv l.csv
    same files/lowered/check 0 "$code"
    succeeds files/lowered/check/json check --plan p.json l.json
    same files/lowered/check/times 1 "$(grep -c ' its times hold$' out)"

    # Transfers change no time, and a trace has them on threads of their own.
    cf plan "$@" --latency 7 --summary drawn
    cp out table
    cf plan "$@" --latency 7 --lower --trace l.trace --json l.json --summary drawn
    same files/lowered/times "$(grep -v '^actions' table)" "$(grep -v '^actions' out)"
    same files/lowered/threads "8 3" \
        "$(grep -c '"name": "[a-z]* the [a-z]* stage"' l.trace) $(grep -c '"name": "compute"' l.trace)"
    same files/lowered/sends "$(grep -c '"pass": "SEND_F"' l.json)" "$(grep -c '"cat": "SEND_F"' l.trace)"
    succeeds files/lowered/check/latency check --plan p.json l.json
}

# State streamed by layer: less on the GPU, more in host memory, and passes that wait say so. The makespan is that of
# the plain costs plus what lies on the critical path, so at one stage all of the wait.
test_stream() {
    set -- --chunk-size 8K --k 1 --schedule paper --model qwen2.5-7b --tp 4 --gpu h100-80g --recompute selective
    printf '131072\n4000\n500\n' >long
    cf plan "$@" --summary --json plain.json long
    plain=$(sed -n 's/^peak memory  *\([0-9.]*\) GiB.*/\1/p' out)
    cf plan "$@" --stream 64M --summary --plan-json streamp.json --json stream.json long
    same stream/rows "stream            3 blocks of 14,563 rows of one layer on each GPU" "$(grep ^stream out)"
    same stream/memory yes "$(sed -n 's/^peak memory  *\([0-9.]*\) GiB.*, \([0-9.]*\) GiB in host memory$/\1 \2/p' out |
        awk -v plain="$plain" '{ print ($1 > 0 && $2 > 1 && $1 + 1.1 * $2 > plain && $1 < plain) ? "yes" : $0 " " plain }')"
    same stream/waits yes "$(grep -Eq '^waits for state   [0-9]+ passes are longer for their stream, by ' out && echo yes)"
    same stream/time yes "$(awk -F '[:,]' '
        { for (i = 1; i < NF; i++) if ($i ~ /"(makespan|stream_seconds)"/) n[FILENAME $i] = $(i + 1) }
        END { for (k in n) { sub(/ *$/, "", k); if (k ~ /plain.*makespan/) a = n[k]
                             if (k ~ /stream.json.*makespan/) b = n[k]
                             if (k ~ /stream_seconds/) w = n[k] }
              d = b - a - w; print (w > 0 && d < 1e-6 && d > -1e-6) ? "yes" : a " " b " " w }' plain.json stream.json)"
    say() { sed -n 's/^waits for state  *\(.*\) by \([0-9.]*\) s of \([0-9.]*\) in all$/\1 \2 \3/p' out | awk '{
        printf "%s %s %.3g %.3g", $1, $2, $(NF - 1), $NF }'; } # plan has three digits of an estimate
    said=$(say)
    succeeds stream/check check --plan streamp.json stream.json
    cf check --chart --plan streamp.json stream.json
    same stream/check/chart "$said" "$(say)"
    cf compare --chunk-size 8K --k 1 --stages 4 --model qwen2.5-7b --tp 4 --gpu h100-80g --stream 64M long
    same stream/compare "0 1" "$code $(grep -c ' waits % ' out)"
    cf compare --chunk-size 8K --k 1 --stages 4 --model qwen2.5-7b --tp 4 --gpu h100-80g --stream 64M --json rows.json long
    cf plan "$@" --stages 4 --recompute none --stream 64M --summary --json stream.json long
    same stream/compare/waits "$(sed -n 's/.*"stream_waits": \([0-9]*\), "stream_seconds": \([^,}]*\).*/\1 \2/p' stream.json)" \
        "$(awk -F '[:,]' '/"schedule"/ { paper = $2 ~ /"paper"/ } /"stream_waits"/ && paper { n = $2 }
                          /"stream_seconds"/ && paper { print n + 0, $2 + 0; exit }' OFMT=%.17g rows.json)"
    refuses stream/model 2 '--stream needs --model NAME' plan --chunk-size 8K --k 1 --stream 64M long
    refuses stream/row 2 '--stream: 3 rows of one layer.* have 4,608 bytes' plan "$@" --stream 1K long
}

trace_holds() { # NAME MICROSECONDS [TABLE]: t.json, of p.json and s.json
    same "$1" ok "$(python "$(dirname "$HEADER")/tests/command/trace_check.py" p.json s.json t.json "$2" ${3:+"$3"} 2>&1 | tail -n 1)"
}

test_python() {
    wanted python || return 0
    if [ -z "$PYTHON" ]; then
        skip python "there is no python3"
        return 0
    fi
    cat >times.py <<'EOF'
import json, sys

plan, schedule = (json.load(open(name)) for name in sys.argv[1:3])
constant, per_token, per_pair, latency = map(float, sys.argv[3:7])


def check(holds, what):
    if not holds:
        print(what)
        sys.exit()


def near(a, b):
    return abs(a - b) <= 1e-9 * max(1, abs(a), abs(b))


stages, v = schedule["stages"], schedule["virtual_stages"]
chunks = plan["chunks"]
factor = {"F": 1, "R": 1, "B": 2, "I": 1, "W": 1}
ended = {}
for row in schedule["actions"]:
    for a in row:
        ended["B" if a["pass"] == "I" else a["pass"], a["stage"], a["chunk"]] = a["end"]
busy = replayed = makespan = 0
for s, row in enumerate(schedule["actions"]):
    free, kept, peak, held, most = 0, set(), 0, 0, 0
    for a in row:
        kind, stage, chunk = a["pass"], a["stage"], chunks[a["chunk"]]
        check(stage % stages == s, "stage of an action")
        wait = 0
        if kind in "FR" and stage > 0 and not (kind == "R" and schedule["replay"] == "local"):
            wait = ended[kind, stage - 1, a["chunk"]]
            hop = stages > 1
        elif kind in "BI" and stage < stages * v - 1:
            wait = ended["B", stage + 1, a["chunk"]]
            hop = stages > 1
        else:
            hop = False
        check(near(a["start"], max(free, wait + (latency if hop else 0))), "start of %s" % a)
        cost = (constant + per_token * chunk["tokens"] + per_pair * chunk["pairs"]) / v * factor[kind]
        check(near(a["end"] - a["start"], cost), "time of %s" % a)
        if kind == "R" or (kind == "F" and a["keep"]):
            kept.add((stage, a["chunk"]))
            held += chunk["padded"]
        check(a["live"] == len(kept), "live of %s" % a)
        peak, most = max(peak, len(kept)), max(most, held)
        if kind in "BW":
            kept.remove((stage, a["chunk"]))
            held -= chunk["padded"]
        free = a["end"]
        busy += cost
        replayed += cost if kind == "R" else 0
    makespan = max(makespan, free)
    check(not kept and schedule["peak_live"][s] == peak and schedule["peak_tokens"][s] == most, "peaks")
check(near(schedule["makespan"], makespan) and near(schedule["busy"], busy), "makespan and busy")
check(near(schedule["replayed"], replayed), "replayed")
check(near(schedule["bubble_busy"], 1 - busy / stages / makespan), "bubble_busy")
check(near(schedule["bubble_useful"], 1 - (busy - replayed) / stages / makespan), "bubble_useful")
check(all(b <= makespan * (1 + 1e-9) for b in schedule["bounds"].values()) and schedule["bounds"], "bounds")

print("ok")
EOF
    while read -r kind costs options; do
        case $costs in
            unit) numbers="0 1 0 0" unit=1 arguments= ;;
            *) numbers="0.001 0.0000305 2e-8 0.0007" unit=1e6 arguments="--cost 1e-3,3.05e-5,2e-8 --latency 0.0007" ;;
        esac
        # shellcheck disable=SC2086
        cf plan --chunk-size 1024 --k 2 --stages 3 --schedule $kind $arguments $options --plan-json p.json \
            --json s.json --trace t.json --summary drawn
        # shellcheck disable=SC2086
        same "python/$kind $costs $options" ok "$(python times.py p.json s.json $numbers 2>&1 | tail -n 1)"
        trace_holds "python/trace/$kind $costs $options" $unit
    done <<'EOF'
paper unit
paper real
gpipe real --limit 4
1f1b real --replay local
interleaved unit --virtual 3
zero-bubble real
best real --budget 40
best real --budget 40 --split-backward --replay local
EOF
    # Counters of bytes, and transfers and copies beside the passes.
    while read -r unit options; do
        # shellcheck disable=SC2086
        cf plan --chunk-size 1024 --k 2 --stages 3 $options --plan-json p.json --json s.json --trace t.json --summary \
            --tsv drawn
        trace_holds "python/trace/$options" "$unit" out
    done <<'EOF'
1 --schedule 1f1b --token-bytes 7,5,3,1
1 --schedule interleaved --virtual 2 --token-bytes 7,5,3,1 --lower
1e6 --schedule zero-bubble --model qwen2.5-0.5b --gpu h100-80g
1e6 --schedule interleaved --virtual 2 --model qwen2.5-0.5b --gpu h100-80g --lower
1e6 --schedule paper --replay pipeline --cost 1e-3,3e-7,0 --latency 1e-5 --lower
1e6 --schedule paper --cost 1e-9,0,0
EOF
    # What is rounded to nanoseconds does not add up, over many passes that are no whole number of them: 100,000 in
    # full.
    sequences=2500
    if full; then sequences=12500; fi
    echo 700 $sequences >many
    cf plan --chunk-size 700 --k 1 --stages 4 --schedule 1f1b --cost 1.2345678901e-5,3.3333333333e-9,0 --plan-json p.json \
        --json s.json --trace t.json --summary many
    same python/trace/drift/passes $((8 * sequences)) "$(grep -c '"ph": "X"' t.json)"
    trace_holds python/trace/drift 1e6
    # The checker sees a slice that is a nanosecond too long, and a counter that is one off.
    awk '/"ph": "X"/ && ++n == 777 { match($0, /"dur": [0-9]*\.[0-9]*/); dur = substr($0, RSTART + 7, RLENGTH - 7)
            $0 = substr($0, 1, RSTART + 6) sprintf("%.3f", dur + 0.001) substr($0, RSTART + RLENGTH) } { print }' t.json >d.json
    same python/trace/damaged/slice 1 "$(cmp -s t.json d.json || python "$(dirname "$HEADER")/tests/command/trace_check.py" \
        p.json s.json d.json 1e6 2>&1 | grep -c -e ends -e drift -e overlap)"
    sed 's/"args": {"chunks": 3}/"args": {"chunks": 2}/' t.json >d.json
    same python/trace/damaged/counter 1 "$(cmp -s t.json d.json || python "$(dirname "$HEADER")/tests/command/trace_check.py" \
        p.json s.json d.json 1e6 2>&1 | grep -c 'kept chunks of stage')"
}

# ----------------------------------------------------------------------------------------------------------------------
# compare
# ----------------------------------------------------------------------------------------------------------------------

compare_row() { # NAME K REPLAY -> makespan, ratio, waste, busy, kept
    awk -v name="$1" -v k="$2" -v replay="$3" '
        index($0, name " ") == 1 { line = substr($0, 18); n = split(line, w, " ")
            if (w[1] == k && w[2] == replay) { print w[3], w[4], w[5], w[6], w[7]; exit } }' out
}

compare_rows() { # the lines of the table
    awk '$1 == "schedule" { on = 1; next } on && !NF { exit } on' out
}

test_compare() {
    quick cf compare --chunk-size 2 --k 1,2 --replay both --stages 4 --unit-cost example
    same compare/code 0 "$code"
    same compare/unsplit "56 57.14 57.14 4" "$(compare_row '1f1b, unsplit' - - | cut -d ' ' -f 1,3-)"
    same compare/best/1 "50 52.00 48.00" "$(compare_row best 1 pipeline | cut -d ' ' -f 1,3,4)"
    same compare/best/2 "42 42.86 42.86" "$(compare_row best 2 pipeline | cut -d ' ' -f 1,3,4)"
    same compare/packed "60 60.00 60.00 2" "$(compare_row '1f1b, packed' - - | cut -d ' ' -f 1,3-)"
    same compare/rows 34 "$(compare_rows | wc -l | tr -d ' ')" # 2 + 2 x 2 x 8
    same compare/ratio "1.0000" "$(compare_rows | cut -c 46- |
        awk '{ if (least == "" || $1 < least) least = $1 } END { printf "%.4f\n", least }')"
    cp out table

    # Each row is what plan says.
    for kind in paper gpipe 1f1b interleaved zero-bubble best; do
        cp table out
        row=$(compare_row $kind 1 local | cut -d ' ' -f 1,3-)
        cf plan --chunk-size 2 --k 1 --replay local --stages 4 --schedule $kind --summary example
        same "compare/plan/$kind" "$(summary makespan) $(bubble) $(summary 'peak activations')" "$row"
    done
    # Best at paper's peaks is what plan makes under these limits.
    printf '700\n50\n9\n1300 2\n64\n256 9\n' >several
    quick cf compare --chunk-size 256 --k 1,2 --stages 3 --limit none several
    cp out several.table
    for k in 1 2; do
        cf plan --chunk-size 256 --k $k --stages 3 --schedule paper --json s.json --summary several
        peaks=$(sed -n 's/.*"peak_live": \[\([^]]*\)\].*/\1/p' s.json | tr -d ' ')
        quick cf plan --chunk-size 256 --k $k --stages 3 --limits "$peaks" --summary several
        wanted_row="$(summary makespan) $(bubble) $(summary 'peak activations')"
        cp several.table out
        same "compare/as-paper/$k" "$wanted_row" "$(compare_row 'best as paper' $k local | cut -d ' ' -f 1,3- | tr -d ,)"
    done
    same compare/as-paper/held 0 "$(compare_rows | awk '/^paper/ { most = $8; n++ } /^best as paper/ && $10 > most { bad++ }
        END { print n == 2 ? bad + 0 : "no rows" }')"
    cp table out
    row=$(compare_row 'best, I + W' 2 pipeline | cut -d ' ' -f 1,3-)
    quick cf plan --chunk-size 2 --k 2 --stages 4 --schedule best --split-backward --summary example
    same compare/plan/split "$(summary makespan) $(bubble) $(summary 'peak activations')" "$row"

    # With sanitizers; of this batch, few tries find what many do.
    cf compare --chunk-size 2 --k 1,2 --replay both --stages 4 --budget 20 --json c.json example
    same_files compare/json/text table out
    cf compare --chunk-size 2 --k 1,2 --replay both --stages 4 --budget 20 --json - example
    same_files compare/json/stdout c.json out
    if [ -n "$PYTHON" ]; then
        cp table out
        compare_rows | cut -c 33- | awk '{ print $1, $3, $4 }' >want
        python -c 'import json
for r in json.load(open("c.json"))["rows"]:
    print("%g %.2f %.2f" % (r["makespan"], 100 * r["bubble_useful"], 100 * r["bubble_busy"]))' >got
        same_files compare/json/rows want got
    else
        skip compare/json/rows "there is no python3"
    fi

    # The baseline in words: where it is slower, where it is faster and why, and where it has no room.
    cf compare --chunk-size 2 --k 2 --stages 4 --budget 20 example
    same compare/verdict "1f1b, unsplit: 56 token times, at most 8 tokens kept" "$(sed -n 's/^baseline  *//p' out)"
    same compare/verdict/ratio 1 "$(sed -n 's/^chunks .*kept; \(.*\) x the baseline.s time$/\1/p' out |
        awk '$1 > 0.5 && $1 < 1' | wc -l | tr -d ' ')"
    same compare/verdict/slower 0 "$(grep -c 'The baseline is faster' out)"
    printf '6\n6\n6\n6\n6\n6\n6\n6\n' >alike
    cf compare --chunk-size 48 --stages 4 alike
    same compare/verdict/faster "1 1" \
        "$(grep -c 'The baseline is faster:' out) $(grep -c 'no sequence is longer than a chunk, so nothing is' out)"
    printf '9\n' >few
    cf compare --chunk-size 8 --k 1 --stages 4 --cost 1,0,0 few
    same compare/verdict/few 1 "$(grep -c 'ChunkSize is too large for the batch' out)"
    printf '9 9\n' >many
    cf compare --chunk-size 8 --k 1 --stages 4 --cost 1,0,0 many
    same compare/verdict/replays 1 "$(grep -c 'dropped chunks run forward twice' out)"
    echo 200000 | cat drawn - >long_one
    quick cf compare --chunk-size 8K --k 2 --replay local --stages 4 --model qwen2.5-7b --gpu h100-80g --tp 4 --recompute \
        selective --no-cp long_one
    same compare/memory "2 1" "$(grep -c '^1f1b, .* full .*!' out) $(
        grep -c '^baseline  *does not fit: needs [0-9.]* GiB on stage [0-3] with full recomputation$' out)"
    quick cf compare --chunk-size 8K --k 2 --replay local --stages 4 --model qwen2.5-7b --gpu h100-80g --tp 4 long_one
    same compare/memory/context 1 "$(grep -c '^baseline .* with context parallelism of 4 (' out)"
    cf compare --chunk-size 8K --k 2 --replay local --stages 4 --model qwen2.5-7b --gpu h100-80g --tp 4 --recompute \
        selective --budget 20 drawn
    same compare/memory/fits "1 0" "$(grep -c '^1f1b, unsplit .* none  *[0-9.]*  ' out) $(grep -c '[0-9]!' out)"

    # What cannot be made says why; the others are there.
    cf compare --chunk-size 1024 --k 1 --stages 2 --token-bytes 4,0,0,0 --limit-bytes 100 drawn
    same compare/infeasible "0 10" \
        "$code $(grep -c -e ' -  --limit-bytes: stage 0 may keep 100, and needs [0-9,]* at least' out)"
    printf '4294967296\n' >giant
    cf compare --chunk-size 512M --k 1 --stages 2 giant
    same compare/giant "0 2 8" "$code $(grep -Ec '^1f1b, (unsplit|packed) .*too large' out) $(
        grep -c ' local  *[0-9]' out)"
    : >empty
    succeeds compare/empty compare --chunk-size 2 --stages 3 empty
}

# ----------------------------------------------------------------------------------------------------------------------
# Tables for scripts
# ----------------------------------------------------------------------------------------------------------------------

column() { # FILE NAME -> its fields, a line each, "-" for an empty one
    awk -F '\t' -v name="$2" 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == name) at = i; next }
        { print at ? ($at == "" ? "-" : $at) : "no such column" }' "$1"
}

numbers() { # the same digits for the same numbers
    awk '{ for (i = 1; i <= NF; i++) if ($i + 0 == $i) $i = sprintf("%.17g", $i); print }'
}

same_width() { # NAME FILE: every line has as many fields as the first, whose names are all there and all different
    same "$1" "0 0" "$(awk -F '\t' 'NR == 1 { n = NF; for (i = 1; i <= NF; i++) if ($i == "" || seen[$i]++) bad++ }
        NF != n { wrong++ } END { print wrong + 0, bad + 0 }' "$2")"
}

# What plan and compare print for scripts is what is in their JSON, which awk reads line by line.
test_tsv() {
    while read -r unit options; do
        # shellcheck disable=SC2086
        cf plan --chunk-size 1024 --k 2 --stages 3 $options --json s.json --tsv drawn
        same "tsv/plan/code/$options" 0 "$code"
        same_width "tsv/plan/width/$options" out
        for name in stage pass chunk virtual_stage "start_$unit" "end_$unit"; do column out $name >"c.$name"; done
        paste -d ' ' c.stage c.pass c.chunk c.virtual_stage "c.start_$unit" "c.end_$unit" | numbers >got
        awk '/"pass"/ { gsub(/["{},:]/, " "); for (i = 1; i <= NF; i++) {
                    if ($i == "pass") pass = $(i + 1)
                    if ($i == "chunk") chunk = $(i + 1)
                    if ($i == "stage") at = $(i + 1)
                    if ($i == "start") start = $(i + 1)
                    if ($i == "end") end = $(i + 1) }
                row = int(at / 3)
                print turns && row % 2 ? 2 - at % 3 : at % 3, pass, chunk, at, start, end }' turns="$(grep -c '"placement": "v"' s.json)" s.json | numbers >want
        same_files "tsv/plan/passes/$options" want got
        # shellcheck disable=SC2086
        cf plan --chunk-size 1024 --k 2 --stages 3 $options --json s.json --summary --tsv drawn
        same_width "tsv/plan/stages/width/$options" out
        v=$(sed -n 's/.*"virtual_stages": \([0-9]*\).*/\1/p' s.json)
        for name in peak_live:peak_chunk_copies peak_tokens:peak_token_copies \
            peak_state_tokens:peak_state_token_copies peak_bytes:peak_byte_copies; do
            list=$(sed -n "s/.*\"${name%:*}\": \[\([^]]*\)\].*/\1/p" s.json | tr -d ,)
            [ "${name%:*}" = peak_bytes ] && case $options in *token-bytes*) ;; *) list='- - -' ;; esac
            same "tsv/plan/$name/$options" "$list" "$(column out "${name#*:}" | xargs)"
        done
        cp out table
        # shellcheck disable=SC2086
        cf plan --chunk-size 1024 --k 2 --stages 3 $options --summary drawn
        # One definition: files count every virtual stage's copy; text shows whole stages, a V-th for each copy.
        awk '$1 == "stage" && $2 == "idle" { on = 1; next } on && !NF { exit } on { gsub(",", ""); print $3, $4, $5 }' out |
            numbers >got
        for name in peak_chunk_copies peak_token_copies peak_state_token_copies; do column table $name >"c.$name"; done
        paste -d ' ' c.peak_chunk_copies c.peak_token_copies c.peak_state_token_copies |
            awk -v v="$v" '{ printf "%.6g %.6g %.6g\n", $1 / v, $2 / v, $3 / v }' | numbers >want
        same_files "tsv/plan/whole-stages/$options" want got
        awk '$1 == "stage" && $2 == "idle" { on = 1; next } on && !NF { exit } on { print $2 }' out >got
        column table idle | awk '{ printf "%.2f\n", 100 * $1 }' >want
        same_files "tsv/plan/idle/$options" want got
    done <<'EOF'
token_times --schedule 1f1b
token_times --schedule interleaved --virtual 2 --token-bytes 7,5,3,1
s --schedule zero-bubble --virtual 3 --placement v --cost 1e-3,3e-7,0
s --schedule best --virtual 2 --placement v --budget 20 --cost 1e-3,3e-7,1e-11 --latency 1e-4
EOF
    # The longest sequence's state is on all virtual stages at once, and the limit on each of them allows no more.
    cf plan --chunk-size 1024 --k 2 --stages 3 --virtual 2 --limit-state 9000 --summary --tsv drawn
    for name in peak limit; do same "tsv/plan/state/$name" 18000 "$(column out ${name}_state_token_copies | sort -u)"; done
    # T is 1,024^4.
    printf '2\n2\n' >two
    cf plan --chunk-size 2 --k 1 --token-bytes 1t,0,0,0 --limit-bytes 2T --summary two
    same plan/tebibytes 2199023255552 "$(summary 'peak bytes')"
    cf compare --chunk-size 1024 --k 1,2 --stages 3 --placement v --token-bytes 7,5,3,1 --limit-bytes 60000 --budget 20 \
        --cost 1e-3,3e-7,0 --json c.json --tsv drawn
    same tsv/compare/code 0 "$code"
    same_width tsv/compare/width out
    for name in schedule k virtual_stages makespan_s ratio bubble_useful peak_chunk_copies peak_token_copies \
        peak_byte_copies bound_s bound_name why; do
        column out $name >got
        key=$(echo $name | sed 's/_s$//; s/chunk_copies/live/; s/_copies/s/')
        if [ -n "$PYTHON" ]; then
            python -c 'import json, sys
for r in json.load(open("c.json"))["rows"]: print(r.get(sys.argv[1], "-"))' $key >want
            numbers <want >want2
            numbers <got >got2
            same_files tsv/compare/$name want2 got2
        else
            skip tsv/compare/$name "there is no python3"
        fi
    done
    same tsv/compare/failed yes "$(column out why | grep -q -e '--limit-bytes: stage' && echo yes)"
    refuses tsv/stdout 2 '--tsv and --json - exclude each other' plan --chunk-size 8 --k 1 --json - --tsv drawn
    refuses tsv/compare/stdout 2 '--tsv and --json - exclude' compare --chunk-size 8 --json - --tsv drawn
}

# Columns line up at the decimal point, whatever the numbers are; `cut` of one place finds all points.
test_columns() {
    for cost in 1e-3,1e-5,0 1e-9,0,0 1e300,0,0 0.7,1e-12,0; do
        cf compare --chunk-size 2 --k 1,2 --stages 4 --placement v --budget 20 --cost $cost example
        same "columns/$cost" "$code 18 1 1" "0 $(compare_rows | wc -l | tr -d ' ') $(compare_rows |
            sed 's/^.\{31\}//; s/^ *//; s/ .*//' | awk 'NF { n++ } END { print (n == 18) }') $(
            awk '$1 == "schedule" { on = 1; next } on && !NF { exit }
                on { line = substr($0, 31); match(line, /[0-9][0-9,]*/); places[RSTART + RLENGTH]++ }
                END { for (p in places) n++; print n }' out)"
    done
}

# ----------------------------------------------------------------------------------------------------------------------
# Progress
# ----------------------------------------------------------------------------------------------------------------------

# Work of over a second says how far it is, on a terminal and there only, and takes it back; Ctrl-C leaves nothing.
test_progress() {
    wanted progress || return 0
    if [ -z "$PYTHON" ] || ! python -c 'import pty' 2>/dev/null; then
        skip progress "there is no python3 with pty"
        return 0
    fi
    cat >terminal.py <<'EOF'
"""terminal.py WHEN COMMAND...: runs it with a terminal as standard error, interrupts it after WHEN, which is a number of
seconds (0: not), or once this pattern was seen in two lines, and prints the exit code, how often a line was written, and
whether the last thing was that it was erased."""
import os, pty, re, select, signal, subprocess, sys, threading

master, slave = pty.openpty()
run = subprocess.Popen(sys.argv[2:], stdout=open("said", "w"), stderr=slave, # where SIGINT is ignored, as in the background
                       preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
when = sys.argv[1]
seconds = float(when) if when.isdigit() else 60
timer = threading.Timer(seconds, run.send_signal, [signal.SIGINT])
if seconds > 0:
    timer.start()
seen = b""
while True: # the slave stays open here: once all are closed, what has not been read yet may be lost
    ended = run.poll() is not None
    if not select.select([master], [], [], 0 if ended else 0.05)[0]:
        if ended:
            break
        continue
    seen += os.read(master, 4096)
    if not when.isdigit() and len(re.findall(when.encode(), seen)) >= 2:
        run.send_signal(signal.SIGINT)
timer.cancel()
open("seen", "wb").write(seen)
lines = [line for line in seen.split(b"\r") if b" s" in line]
print(run.wait(), "lines" if len(lines) > 1 else len(lines), "erased" if seen.endswith(b"\r\x1b[K") else "left")
EOF
    "$CHUNKFLOW" gen lmsys --n 500 --seed 4 >long_list
    scheduling='scheduling, [1-9][0-9]* s'
    comparing='comparing, [1-9][0-9]* s  \[[#.]*\]  *[0-9]* %  '
    set -- --chunk-size 1024 --stages 4 --budget 1000000
    same progress/plan "-2 lines erased" "$(python terminal.py "$scheduling" "$CHUNKFLOW" plan "$@" --k 2 \
        --json unfinished long_list)"
    same progress/plan/says yes "$(grep -q "$scheduling" seen && echo yes)"
    same progress/plan/left no "$(find . -name 'unfinished*' | grep -q . && echo yes || echo no)"
    same progress/compare "-2 lines erased" "$(python terminal.py "$comparing" "$CHUNKFLOW" compare "$@" --k 2 long_list)"
    same progress/compare/says yes "$(grep -q "$comparing" seen && echo yes)"
    same progress/dumb "-2 0 left" "$(TERM=dumb "$PYTHON" -S terminal.py 2 "$CHUNKFLOW" plan "$@" --k 2 long_list)"
    # What is printed comes behind it, and work that is done at once says nothing. How much work takes more than a
    # second is the machine's matter.
    for budget in 3000 12000 48000 192000; do
        ended=$(python terminal.py 0 "$CHUNKFLOW" plan --chunk-size 1024 --stages 4 --k 2 --budget $budget long_list)
        case $ended in '0 lines '*) break ;; esac
    done
    same progress/done "0 lines erased" "$ended"
    same progress/done/summary 1 "$(grep -c '^makespan ' said)"
    cp said wanted
    same progress/quick "0 0 left" "$(python terminal.py 0 "$CHUNKFLOW" plan --chunk-size 2 --k 1 example)"
    quick cf plan --chunk-size 1024 --stages 4 --k 2 --budget $budget long_list
    same progress/piped "0 0" "$code $(wc -c <err | tr -d ' ')"
    same_files progress/same wanted out
}

# ----------------------------------------------------------------------------------------------------------------------
# What the README shows
# ----------------------------------------------------------------------------------------------------------------------

test_readme() {
    readme=$(dirname "$HEADER")/README.md
    # its commands, and below each of them the chart that it draws
    sed -n 's/^    \$ build\/chunkflow //p' "$readme" >commands
    same readme/charts 1 "$(wc -l <commands | tr -d ' ')"
    n=0
    while read -r arguments; do
        n=$((n + 1))
        # shellcheck disable=SC2086
        cf $arguments
        grep '^stage [0-9] |' out >want
        grep -F -A 4 "    \$ build/chunkflow $arguments" "$readme" | sed -n 's/^    \(stage\)/\1/p' >got
        same_files "readme/chart/$n" want got
    done <commands
    # what the stages of a pipeline keep
    cp drawn long
    echo 20000 >>long
    for stages in 1 2 4; do
        for k in 1 2 5 100; do
            for replay in pipeline local; do
                longest=$((k < 20 ? k : 20)) # of 20 chunks
                for schedule in best paper; do # best at most so many, paper as many
                    cf plan --chunk-size 1024 --k $k --stages $stages --replay $replay --schedule $schedule --json made.json \
                        --no-list long
                    sed -n 's/.*"peak_live": \[\(.*\)\].*/\1/p' made.json | tr -d , |
                        awk -v k=$longest -v exactly=$schedule '{
                            for (s = 0; s < NF; s++) {
                                wrong += $(s + 1) > k + NF - 1 - s
                                if (exactly == "paper") wrong += $(s + 1) < k + NF - 1 - s
                            }
                            print NF, wrong + 0
                        }' >got
                    same "readme/kept/$stages/$k/$replay/$schedule" "$stages 0" "$(cat got)"
                done
            done
        done
    done
}

# ----------------------------------------------------------------------------------------------------------------------
# check
# ----------------------------------------------------------------------------------------------------------------------

test_check() {
    # Once PATTERN in FILE becomes TEXT, where it comes first.
    once() { # PATTERN TEXT FILE
        awk -v pattern="$1" -v text="$2" '!done && sub(pattern, text) { done = 1 } { print }' "$3"
    }
    printf '700\n50\n9\n1300 2\n64\n0\n256 2\n' >lengths
    set -- --chunk-size 256 --k 2 --stages 3
    cf plan "$@" --schedule 1f1b --plan-json p.json --json s.json --csv s.csv --csv-extensions --microbatches m.csv lengths
    succeeds check/plan check p.json
    same check/plan/said 1 "$(grep -c '^p.json: sound plan: 9 sequences, 3,935 tokens' out)"
    succeeds check/plan/lengths check p.json --lengths lengths
    succeeds check/schedule check --plan p.json s.json
    same check/schedule/said 1 "$(grep -c '^s.json: sound schedule: 1f1b, K = 2, local .* its times hold$' out)"
    succeeds check/csv check --plan p.json --microbatches m.csv s.csv
    succeeds check/csv/k check --plan p.json --k 2 --microbatches m.csv s.csv
    same check/stdin 0 "$("$CHUNKFLOW" check --plan p.json - <s.json >/dev/null; echo $?)"
    for kind in paper gpipe interleaved zero-bubble best; do
        for replay in pipeline local; do
            cf plan "$@" --schedule $kind --replay $replay --budget 20 --json k.json --latency 3 --summary lengths
            succeeds "check/$kind/$replay" check --plan p.json --lengths lengths k.json
        done
    done
    # Placements: version 2 carries them and the limits; what version 1 holds is loops.
    for placement in loop v; do
        for kind in zero-bubble best; do
            cf plan "$@" --schedule $kind --virtual 2 --placement $placement --replay local --budget 20 --limit 3 \
                --json k.json --csv k.csv --csv-extensions --microbatches km.csv --trace k.trace --lower lengths
            succeeds "check/$placement/$kind" check --plan p.json --lengths lengths --chart k.json
            succeeds "check/$placement/$kind/csv" check --plan p.json --replay local --microbatches km.csv k.csv
        done
    done
    cf plan "$@" --schedule zero-bubble --virtual 2 --placement v --replay local --json v.json --csv v.csv \
        --csv-extensions --microbatches vm.csv --dot v.dot --trace v.trace --max-nodes 5000 lengths
    cf check --plan p.json v.json
    same check/v/said 1 "$(grep -c '3 stages of 2 virtual stages in a V' out)"
    cf check --plan p.json --replay local --microbatches vm.csv v.csv
    same check/v/csv/said 1 "$(grep -c '3 stages of 2 virtual stages in a V' out)"
    same check/v/rows '0 5 1 4 2 3' "$(for row in 1 2 3; do
        sed -n ${row}p v.csv | tr ',' '\n' | sed -n 's/^\([0-9]\)F.*/\1/p' | sort -u
    done | xargs)"
    same check/v/trace '0 5' "$(sed -n 's/.*"ph": "X", "pid": 1,.*"virtual stage": \([0-9]*\).*/\1/p' v.trace |
        sort -u | xargs)"
    same check/v/dot '5' "$(sed -n '/cluster_s0/,/}/s/.* @ \([1-9]\)".*/\1/p' v.dot | sort -u)"
    sed 's/"version": 2/"version": 1/' v.json >v1.json
    refuses check/v/version/1 1 'this virtual stage lies on another stage' check --plan p.json v1.json
    sed 's/, "placement": "v"//' v.json >v2.json
    refuses check/v/missing 2 'placement is missing' check --plan p.json v2.json
    sed 's/"placement": "v"/"placement": "any"/' v.json >v3.json
    refuses check/v/any 2 'placement: unknown' check --plan p.json v3.json
    cf plan "$@" --schedule 1f1b --limit 3 --json o.json lengths
    same check/limits/saved '"limits": [3, 3, 3],' "$(sed -n 's/ *\("limits".*\],\).*/\1/p' o.json)"
    sed 's/"version": 2/"version": 1/; s/, "placement": "loop"//; /"limits"/s/.*/  /' o.json >o1.json
    succeeds check/version/1 check --plan p.json o1.json
    sed 's/"limits": \[3, 3, 3\]/"limits": [3, 3]/' o.json >o2.json
    refuses check/limits/few 1 'stages: says 3, there are 2' check --plan p.json o2.json
    cf plan "$@" --ranks 2 --plan-json p2.json --metadata --all-ranks --json all.json lengths
    succeeds check/all-ranks check --plan p2.json all.json
    same check/all-ranks/said 2 "$(grep -c 'all.json: sound schedule' out)"
    refuses check/lockstep/plain 1 'rank [01], stage [0-9]: .* where rank 0 has ' check --plan p2.json --lockstep all.json
    refuses check/lockstep/one 2 '--lockstep wants the schedules of all ranks' check p2.json --lockstep
    printf '32K\n8K 4\n' >five
    cf plan --chunk-size 8K --k 1 --stages 2 --ranks 2 --lockstep --plan-json pl.json --all-ranks --json ml.json --summary five
    same plan/lockstep/time "147,456 4" "$(sed -n 's/^in step *all ranks take \([0-9,]*\);.*/\1/p' out) $(
        sed -n 's/^plan .* 2 ranks with \([0-9]*\) steps.*/\1/p' out)"
    succeeds check/lockstep check --plan pl.json --lockstep ml.json
    same check/lockstep/said 1 "$(grep -c 'ml.json: 2 ranks in step' out)"
    same plan/lockstep/of-columns 2 "$(grep -c '"of_columns": 1' ml.json)"
    sed 's/"of_columns": 1/"of_columns": 2/' ml.json >ml2.json
    refuses check/lockstep/of-columns 2 'of_columns: got 2, wanted 1' check --plan pl.json --lockstep ml2.json
    for rank in 0 1; do # transfers of all ranks alike, though what they move has other names
        cf plan --chunk-size 8K --k 1 --stages 2 --ranks 2 --lockstep --schedule 1f1b --rank $rank --csv l$rank.csv \
            --csv-extensions --torch 2.14 --microbatches m$rank.csv --summary five
        same plan/lockstep/torch/$rank 0 "$code"
    done
    same plan/lockstep/torch "$(tr -d '0-9' <l0.csv)" "$(tr -d '0-9' <l1.csv)"
    cf plan --chunk-size 8K --k 1 --stages 2 --ranks 2 --gang 2 --plan-json pg.json --all-ranks --json mg.json --summary five
    same plan/gang/shares 2 "$(grep -c '"gang": 2}' pg.json)"
    succeeds check/gang check --plan pg.json mg.json
    same check/gang/said 1 "$(grep -c 'mg.json: 2 ranks in step' out)"
    succeeds check/gang/lockstep check --plan pg.json --lockstep mg.json
    echo '64K + 8K 16' >trunk
    refuses plan/gang/tree 2 '--gang: trees are not spread over several ranks' plan --chunk-size 8K --k 1 --ranks 8 --gang 8 trunk
    cf plan --chunk-size 8K --k 1 --stages 2 --ranks 2 --lockstep --gang 2 --plan-json pg.json --all-ranks --json mg.json \
        --summary five
    same plan/lockstep/gang "2 5" "$(grep -c '"gang": 2}' pg.json) $(
        sed -n 's/^plan .* 2 ranks with \([0-9]*\) steps.*/\1/p' out)"
    succeeds check/lockstep/gang check --plan pg.json --lockstep mg.json
    sed 's/"gang": 2}/"gang": 3}/' pg.json >pg3.json
    cf plan --chunk-size 8K --k 1 --ranks 2 --gang 2 --cost 0.7,0.11,0.003 --plan-json pf.json --all-ranks --json mf.json \
        --summary five
    same plan/gang/alone "best 1" "$(sed -n 's/^schedule *\([a-z]*\),.*/\1/p' out) $(grep -c '^in step' out)"
    same plan/gap/rounded 0.00 "$(sed -n 's/^gap *\([-0-9.]*\) .*/\1/p' out)"
    succeeds check/gang/alone check --plan pf.json mf.json
    cf plan --chunk-size 8K --k 1 --stages 2 --ranks 2 --gang 2 --schedule paper --plan-json pg.json --all-ranks --json mg.json \
        --summary five
    together=$(sed -n 's/^in step *all ranks take \([0-9,]*\), beside.*/\1/p' out | tr -d ,)
    cf compare --chunk-size 8K --k 1 --ranks 2 --gang 2 --stages 2 five
    same compare/gang/stages "$together" "$(sed -n 's/^gangs .* 2 takes \([0-9,]*\) token.*/\1/p' out | tr -d ,)"
    refuses check/gang/broken 1 'gang' check pg3.json
    refuses check/all-ranks/other-plan 1 'n_chunks: is too large' check --plan p.json all.json
    refuses check/all-ranks/chart 2 'want the schedule of one rank' check --plan p2.json all.json --chart
    sed 's/"n_ranks": 2,/"n_ranks": 3,/' all.json >more.json
    refuses check/all-ranks/count 1 'more.json:.* n_ranks: says 3, there are 2' check --plan p2.json more.json
    sed 's/"format": "chunkflow-schedule",/"format": "chunkflow-plan",/' all.json >mixed.json
    refuses check/all-ranks/mixed 2 'wanted (version|schedules)|got 2, wanted 1' check --plan p2.json mixed.json
    cf plan "$@" --ranks 2 --rank 1 --plan-json p2.json --json s2.json --csv s2.csv --csv-extensions \
        --microbatches m2.csv lengths
    succeeds check/rank check --plan p2.json s2.json
    succeeds check/rank/csv check --plan p2.json --rank 1 --microbatches m2.csv s2.csv

    # Limits, on both sides of the peak.
    cf plan "$@" --schedule 1f1b --summary lengths
    peak=$(summary 'peak activations')
    succeeds check/limit check --plan p.json --limit "$peak" s.json
    refuses check/limit/less 1 '^s.json: breaks a rule: limit.*keeps more chunks' check --plan p.json --limit \
        $((peak - 1)) s.json
    refuses check/limits 1 '^s.json: breaks a rule: limits.*stage 2' check --plan p.json --limits 9,9,1 s.json
    refuses check/limits/count 2 'wanted one for each of 3 stages' check --plan p.json --limits 9,9 s.json

    # Damage to a plan.
    damage() { # NAME PATTERN SED-SCRIPT FILE ARGUMENTS...
        name=$1 want=$2 script=$3 file=$4
        shift 4
        wanted "$name" || return 0
        sed "$script" "$file" >damaged
        if cmp -s "$file" damaged; then
            fail "$name" "the damage did nothing"
        else
            refuses "$name" 1 "$want" check "$@" damaged
        fi
    }
    damage check/plan/tokens 'damaged: breaks a rule: chunks.tokens\[3\]' \
        '/"id": 3, "group": 1/s/"tokens": [0-9]*/"tokens": 255/' p.json
    damage check/plan/prefix 'breaks a rule: chunks.prefix' '/"id": 1, "group": 0/s/"prefix": 256/"prefix": 255/' p.json
    damage check/plan/total 'breaks a rule: n_tokens' 's/"n_tokens": 3935/"n_tokens": 3936/' p.json
    damage check/plan/count '^damaged:[0-9]*: n_chunks: says 99, there are 17' \
        's/"n_chunks": 17, "n_idle"/"n_chunks": 99, "n_idle"/' p.json
    damage check/plan/id '^damaged:[0-9]*: id of a chunk: says 9, there are 1' \
        's/{"id": 1, "group": 0/{"id": 9, "group": 0/' p.json
    printf '700\n50\n9\n1300\n1301\n64\n0\n' >others
    refuses check/plan/others 1 '^p.json: breaks a rule: ' check p.json --lengths others

    # Damage to a schedule: order, repetition, absence, keeping, time.
    damage check/pass/twice 'breaks a rule: .*stage 0: F of chunk 16 .* comes twice' \
        '/"pass": "F", "chunk": 15, "stage": 0/s/"chunk": 15/"chunk": 16/' s.json --plan p.json
    damage check/pass/order 'breaks a rule: .*stage 1: F of chunk 2 .* comes before F of the chunk before it' \
        '/"pass": "F", "chunk": 1, "stage": 1/s/"chunk": 1/"chunk": 2/' s.json --plan p.json
    damage check/pass/keep 'breaks a rule: .*no activations' 's/"keep": true/"keep": false/' s.json --plan p.json
    damage check/k 'breaks a rule: ' 's/"k": 2/"k": 1/' s.json --plan p.json
    damage check/count 'n_actions: says' 's/"n_actions": [0-9]*/"n_actions": 5/' s.json --plan p.json
    damage check/stages 'stages: says 4, there are 3' 's/"stages": 3/"stages": 4/' s.json --plan p.json
    damage check/makespan 'breaks a rule: makespan: got 1, the actions give' 's/"makespan": [0-9]*/"makespan": 1/' \
        s.json --plan p.json
    damage check/bubble 'breaks a rule: bubble_useful' 's/"bubble_useful": 0\.[0-9]*/"bubble_useful": 0.99/' s.json \
        --plan p.json
    damage check/live 'breaks a rule: stage 0, position 0: live: got -1, the list gives' \
        '/"start": 0, /s/"live": [0-9]*/"live": -1/' s.json --plan p.json
    damage check/peak 'breaks a rule: peak_live' 's/"peak_live": \[[0-9]*/"peak_live": [99/' s.json --plan p.json
    damage check/start 'stage 1, position 0: starts before what it waits for ends: 0, wanted 256 or later' \
        '/"stage": 1, .*"start": 256,/s/"start": 256,/"start": 0,/' s.json --plan p.json
    damage check/start/overlap 'stage 0, position 1: starts before the pass ahead of it ends: 255, wanted 256' \
        '/"stage": 0, .*"start": 256,/s/"start": 256,/"start": 255,/' s.json --plan p.json
    damage check/end 'breaks a rule: stage 0, position 0: ends before it starts: -1' \
        '/"stage": 0, .*"end": 256,/s/"end": 256,/"end": -1,/' s.json --plan p.json
    same check/other-plan 1 "$("$CHUNKFLOW" check --plan p2.json s.json >/dev/null 2>&1; echo $?)"

    # Damage to bounds and peaks.
    cf plan "$@" --schedule 1f1b --limit 9 --token-bytes 7,5,3,1 --json b.json --summary lengths
    succeeds check/bytes check --plan p.json --token-bytes 7,5,3,1 b.json
    succeeds check/bytes/unknown check --plan p.json b.json
    refuses check/bytes/less 1 '^b.json: breaks a rule: peak_bytes: got [0-9]* on stage 0, the list gives' check \
        --plan p.json --token-bytes 6,5,3,1 b.json
    for bound in critical-path stage-load memory; do
        damage "check/bound/$bound" "breaks a rule: bounds: no schedule is shorter than 9000000, says $bound" \
            "s/\"$bound\": [0-9]*/\"$bound\": 9e6/" b.json --plan p.json
    done
    damage check/peak/tokens 'breaks a rule: peak_tokens: got 77 on stage 0, the list gives' \
        's/"peak_tokens": \[[0-9]*/"peak_tokens": [77/' b.json --plan p.json
    damage check/peak/state 'breaks a rule: peak_state_tokens: got 77 on stage 2, the list gives' \
        's/"peak_state_tokens": \[\([0-9]*, [0-9]*\), [0-9]*/"peak_state_tokens": [\1, 77/' b.json --plan p.json
    damage check/peak/count 'stages: says 3, there are 4' 's/"peak_bytes": \[/"peak_bytes": [1, /' b.json --plan p.json

    # Damage to the times of transfers.
    cf plan "$@" --schedule 1f1b --lower --latency 3 --json l.json --summary lengths
    succeeds check/lowered check --plan p.json l.json
    damage check/lowered/early 'stage 0, position 1: starts before what it sends is made: 255, wanted 256' \
        '/"SEND_F", .*"stage": 0, "start": 256,/s/"start": 256,/"start": 255,/' l.json --plan p.json
    damage check/lowered/receive 'stage 1, position 0: ends before what it receives is made: 2, wanted 256' \
        '/"RECV_F", .*"stage": 1, "start": 256,/s/"start": 256, "end": 259/"start": 1, "end": 2/' l.json --plan p.json
    # Clocks that differ are forgiven as much as is said, and the time of one stage not at all.
    sed '/"SEND_F", .*"stage": 0, "start": 256,/s/"start": 256,/"start": 255,/' l.json >early.json
    succeeds check/lowered/skew check --plan p.json --clock-skew 1 early.json
    refuses check/lowered/skew/less 1 'starts before what it sends is made: 255, wanted 256' check --plan p.json \
        --clock-skew 0.5 early.json
    refuses check/lowered/skew/negative 2 'clock-skew' check --plan p.json --clock-skew -1 early.json
    damage check/lowered/end 'stage 0, position 1: ends before it starts: 255' \
        '/"SEND_F", .*"stage": 0, "start": 256,/s/"end": 259/"end": 255/' l.json --plan p.json
    damage check/lowered/busy 'breaks a rule: busy' 's/"busy": [0-9]*/"busy": 77/' l.json --plan p.json
    sed 's/0B0/0B1/' s.csv >damaged
    refuses check/csv/twice 1 '^damaged: breaks a rule: ' check --plan p.json --microbatches m.csv damaged
    damage check/csv/missing 'breaks a rule: ' 's/,0B0//' s.csv --plan p.json --microbatches m.csv

    # A saved schedule is drawn, and traced, as plan draws and traces it.
    for drawn in "--schedule 1f1b" "--schedule interleaved --replay local" \
        "--schedule zero-bubble --lower --latency 3" "--cost 0.1,1e-3,0 --latency 1e-3 --lower"; do
        name=check/draw/${drawn#--schedule }
        # shellcheck disable=SC2086
        cf plan "$@" $drawn --no-list --width 77 --color always --json d.json --trace wanted.json lengths
        sed '/^input /,$d' out >wanted
        exact=$(sed -n 's/.*"makespan": \([^,]*\),.*/\1/p' d.json | awk '{ printf "%.6g", $1 }')
        grep -E '^(makespan|bubble) ' out | sed "s/^\(makespan  *\).* s, estimated$/\1$exact s/" >>wanted
        # whether its times are seconds or token times is seen from them
        cf check --plan p.json d.json --chart --width 77 --color always --trace got.json
        same "$name/said" "0 1" "$code $(head -n 1 out | grep -c '^d.json: sound schedule: .* its times hold$')"
        sed 1,2d out >got
        same_files "$name/chart" wanted got
        same_files "$name/trace" wanted.json got.json
        cf check --plan p.json d.json --chart --trace -
        same_files "$name/trace/stdout" wanted.json out
    done
    rm -f got.json
    refuses check/draw/csv 2 'want a schedule with times in JSON, and s.csv is none' check --plan p.json --chart s.csv
    refuses check/draw/plan 2 'want a schedule with times in JSON, and p.json is none' check --trace got.json p.json
    grep -Ev '"(makespan|bounds|peak_[a-z_]*)": ' s.json | sed 's/, "start": .*}/}/' >untimed
    succeeds check/untimed check --plan p.json untimed
    refuses check/draw/untimed 2 'want a schedule with times in JSON, and untimed is none' check --plan p.json --trace \
        got.json untimed
    refuses check/draw/unsound 1 '^early.json: breaks a rule' check --plan p.json --chart --trace got.json early.json
    same check/draw/nothing no "$([ -e got.json ] && echo yes || echo no)"
    refuses check/draw/width 2 '--width and --color need --chart' check --plan p.json --width 80 s.json
    refuses check/draw/unit 2 '--unit-cost needs --chart or --trace' check --plan p.json --unit-cost s.json
    refuses check/draw/nosuch 1 'nosuch' check --plan p.json --trace nosuch/t.json s.json
    printf '1\n' >one
    cf plan --chunk-size 1 --k 1 --json one.json --plan-json onep.json one
    for power in e-322 e307; do # 3 times that: almost nothing, and almost too much
        sed "/bounds/d; s/\"makespan\": 3, \"busy\": 3/\"makespan\": 3$power, \"busy\": 3$power/
             s/\"start\": 1, \"end\": 3/\"start\": 1$power, \"end\": 3$power/; s/\"end\": 1,/\"end\": 1$power,/" \
            one.json >far.json
        succeeds "check/draw/$power" check --plan onep.json --chart --width 40 far.json
        same "check/draw/$power/chart" '|F0--------B0------------------|' "$(sed -n 's/^stage 0 //p' out)"
    done
    refuses check/draw/long 2 '--trace: the run would last longer' check --plan onep.json --chart --trace got.json \
        far.json

    # What cannot be read: 2, and the line.
    refuses check/usage/plan 2 's.json is a schedule and needs --plan' check s.json
    refuses check/usage/csv 2 's.csv is a schedule and needs --plan' check s.csv
    refuses check/usage/plan/plan 2 'p.json is a plan and takes no --plan' check --plan p.json p.json
    refuses check/usage/wrong 2 '--plan: s.json is a schedule' check --plan s.json s.json
    refuses check/usage/k 2 'only for schedules in CSV' check --plan p.json --k 1 s.json
    refuses check/usage/stdin 2 'only one file can be standard input' check --plan - -
    refuses check/nosuch 2 'cannot open nosuch' check nosuch
    refuses check/directory 2 'cannot read \.' check .
    bad() { # NAME PATTERN TEXT
        printf '%b' "$3" >unreadable
        refuses "check/json/$1" 2 "^unreadable:$2" check unreadable
    }
    bad empty-object '1: format is missing' '{}'
    bad format '2: format: unknown' '{\n"format": "other", "version": 1}'
    bad version '1: version: got 3, wanted 1 or 2' '{"format": "chunkflow-plan", "version": 3}'
    bad version/ranks '1: version: got 2, wanted 1$' '{"format": "chunkflow-schedules", "version": 2}'
    bad version/point '1: version: wanted a whole number' '{"format": "chunkflow-plan", "version": 1.0}'
    bad twice '3: format: given twice' '{"format": "chunkflow-plan",\n"version": 1,\n"format": "chunkflow-plan"}'
    bad end '2: wanted the name of a member' '{"format": "chunkflow-plan",\n}'
    bad comma "1: wanted ',' or '}'" '{"format": "chunkflow-plan" "version": 1}'
    bad more '2: there is more behind' '{"format": "chunkflow-plan", "version": 1}\n{}'
    bad word '1: wanted a JSON value' '{"format": nul}'
    bad zero '1: a number may not begin with a zero' '{"version": 01}'
    bad plus '1: wanted a JSON value' '{"version": +1}'
    bad digit '1: wanted a digit' '{"version": 1.}'
    bad minus '1: wanted a digit' '{"version": -}'
    bad quote '1: a string does not end' '{"version'
    bad control '1: a string has a control character' '{"ver\tsion": 1}'
    bad escape '1: a string has an escape that is none' '{"\\x": 1}'
    bad unicode '1: wanted four hexadecimal digits' '{"\\u12g4": 1}'
    bad utf-8 '1: a string is not UTF-8' '{"\0300\0200": 1}'
    bad surrogate '1: a string is not UTF-8' '{"\0355\0240\0200": 1}'
    bad nul '1: ' '{\0000}'
    bad depth '1: the values are nested too deeply' '{"a": [[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]}'
    awk 'BEGIN { printf "{\"a\": "; for (i = 0; i < 200000; i++) printf "["; }' >unreadable
    refuses check/json/depth/more 2 '^unreadable:1: the values are nested too deeply' check unreadable
    sed 's/"n_sequences": 9/"n_sequences": 9223372036854775807/' p.json >unreadable
    refuses check/json/hostile 2 '^unreadable:1: n_sequences: got 9223372036854775807, wanted 0 \.\. 100000000' \
        check unreadable
    sed 's/"n_sequences": 9/"n_sequences": 66666663/' p.json >unreadable
    refuses check/json/claims 2 '^unreadable:1: n_sequences: got 66666663, n_empty: 1, but all others have a slice' \
        check unreadable
    sed 's/"n_sequences": 9/"n_sequences": 9223372036854775808/' p.json >unreadable
    refuses check/json/overflow 2 '^unreadable:[0-9]*: n_sequences: wanted a whole number of at most 63 bits' check \
        unreadable
    sed 's/"pass": "F"/"pass": "f"/' s.json >unreadable
    refuses check/json/pass 2 '^unreadable:[0-9]*: pass: unknown' check --plan p.json unreadable
    once ', "keep": true' '' s.json >unreadable
    refuses check/json/keep 2 '^unreadable:[0-9]*: keep is missing' check --plan p.json unreadable
    sed 's/"end": [0-9]*, //' s.json >unreadable
    refuses check/json/end 2 '^unreadable:[0-9]*: start, end or live is missing' check --plan p.json unreadable
    sed 's/"makespan": [0-9]*, //' s.json >unreadable
    refuses check/json/some 2 'some are missing' check --plan p.json unreadable
    sed '2s/1F1/1F1x/' s.csv >unreadable
    refuses check/csv/text 2 '^unreadable:2: .*column' check --plan p.json unreadable
    : >unreadable
    refuses check/empty 2 '^unreadable' check --plan p.json unreadable
}

# Damaged files of all three kinds: 0, 1 or 2, one line where it is not 0, and never a crash.
test_damaged() {
    wanted check/damaged || return 0
    printf '700\n50\n9\n1300\n64\n0\n' >lengths
    cf plan --chunk-size 256 --k 1 --stages 2 --plan-json p.json --json s.json --csv s.csv --csv-extensions \
        --microbatches m.csv lengths
    bad=0
    tried=0
    try_damaged() { # ARGUMENTS
        code=0
        "$CHUNKFLOW" check "$@" >out 2>err </dev/null || code=$?
        tried=$((tried + 1))
        lines=$(cat out err | wc -l)
        if [ $code -gt 2 ] || [ "$lines" -ne 1 ]; then
            bad=$((bad + 1))
            head -n 5 err
        fi
    }
    step=0
    for file in p.json s.json s.csv; do
        bytes=$(wc -c <$file)
        part=0
        while [ $part -lt 25 ]; do
            part=$((part + 1))
            at=$((bytes * part / 26))
            {
                head -c $at $file
                case $((part % 5)) in
                    0) ;;
                    1) printf '\377' && tail -c +$((at + 2)) $file ;;
                    2) printf '9' && tail -c +$((at + 1)) $file ;;
                    3) tail -c +$((at + 1)) $file | sed '1s/[0-9][0-9]*/-1/' ;;
                    4) tail -c +$((at + 60)) $file ;;
                esac
            } >damaged
            case $file in
                p.json) try_damaged damaged && try_damaged --plan damaged s.json ;;
                *) try_damaged --plan p.json damaged ;;
            esac
        done
        step=$((step + 1))
    done
    same check/damaged "100 0" "$tried $bad"
}

# ----------------------------------------------------------------------------------------------------------------------

test_help
test_padded_rows
test_large_and_limited
test_usage
test_paper
test_forwards_first
test_forward_only
quick test_again
test_chart
test_limits
test_memory_limit
quick test_default_k
quick test_speed
test_costs
test_models
test_times
test_files
test_stream
test_python
test_compare
test_tsv
test_columns
test_progress
quick test_readme
test_check
test_damaged
left_out "sanitizers for the searches whose passes are run again and for charts and files of many settings, \
and a trace of 100,000 passes"
finish
