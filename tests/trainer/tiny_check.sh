#!/bin/sh
# tiny_check.sh - what the small examples promise - MIT or public domain
#
#     tests/trainer/tiny_check.sh [BUILD]     tests BUILD/hello, BUILD/hello_tree, BUILD/train_tiny and BUILD/test/train_tiny (with sanitizers);
#                                 default: build
#
# Run it in the top directory. Prints "ok NAME" or "FAIL NAME: why" for each case and "N passed, N failed" at the end.

build=${1:-build}
work=$build/tiny_check.tmp
passed=0
failed=0
LC_ALL=C
export LC_ALL
mkdir -p "$work" || exit 1

# holds NAME AWK-CONDITION: the condition is true at the end of the output
holds() {
    if awk "$(cat "$work/read.awk") END { exit !($2) }" "$work/out"; then
        echo "ok $1"
        passed=$((passed + 1))
    else
        echo "FAIL $1: $(tail -n 1 "$work/err" "$work/out" | tr '\n' ' ')"
        failed=$((failed + 1))
    fi
}

# The numbers in the output. The program's own limits are ignored: a test must state what it expects.
cat >"$work/read.awk" <<'AWK'
/ hybrid, and / { chunks = $4; hybrid = $6; replays = $(NF - 1) }
/^longest sequence / { longest = $3; peak = $(NF - 3) }
/^step / { steps++; rises += steps > 1 && !($4 < loss); loss = $4 }
/^loss, chunked / { loss_off = $5 + 0; seen++ }
/^gradient, chunked / { chunked_off = $5 + 0; seen++ }
/^gradient, unchunked / { slope_off = $6 + 0; seen++ }
AWK

# lost PROGRAM: its output cannot be written, and its status says so
lost() {
    [ -c /dev/full ] || return 0
    status=0
    "$build/$1" >/dev/full 2>"$work/err" || status=$?
    if [ $status -eq 1 ]; then
        echo "ok $1: ends with 1 where its output is lost"
        passed=$((passed + 1))
    else
        echo "FAIL $1: ends with $status where its output is lost"
        failed=$((failed + 1))
    fi
}

for program in train_tiny test/train_tiny; do
    "$build/$program" >"$work/out" 2>"$work/err"
    status=$?
    holds "$program: ends well and without complaint" "$status == 0 && $(wc -c <"$work/err") == 0"
    holds "$program: there are replays, hybrid chunks and a sequence of many chunks" \
          'replays >= 2 && hybrid >= 1 && chunks > hybrid && peak > 0 && longest > 3 * peak'
    holds "$program: ten steps, each with a smaller loss" 'steps == 10 && rises == 0 && loss > 0'
    holds "$program: chunked gradients are unchunked ones" 'seen == 3 && loss_off < 1e-12 && chunked_off < 1e-12'
    holds "$program: unchunked gradients are slopes of the loss" 'seen == 3 && slope_off > 0 && slope_off < 1e-7'
    lost $program
done
lost hello

# Six answers of 1,000 tokens to a prompt of 9,000, in chunks of 4,096. The prompt's three chunks are replayed once, and
# its last row has a target for each answer. Before that, forwards alone.
"$build/hello_tree" >"$work/out" 2>"$work/err"
status=$?
cat >"$work/read.awk" <<'AWK'
/^the old policy/ { old = 1 }
/^training/ { old = 0 }
/^F/ { if (old) scored++; else forwards++ }
/^R/ { replays++ }
/^B/ { backwards++; more += $NF; cleared += /cleared/ }
/ rows were computed for / { rows = $1; tokens = $6 }
AWK
holds "hello_tree: the prompt is computed once" \
      "$status == 0 && forwards == 4 && replays == 3 && backwards == 4 && rows == 15000 && tokens == 60000"
holds "hello_tree: each answer has its target, and a gradient is cleared once" 'more == 5 && cleared == 1'
holds "hello_tree: old log-probabilities are forwards alone, over the same chunks" 'scored == 4'
lost hello_tree

rm -rf "$work"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
