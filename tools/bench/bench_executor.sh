#!/bin/sh
# bench_executor.sh - does the simulator say what the executor will do? Runs batches through the CUDA example, fits the
# costs of passes to the first one's measured timeline, and simulates the schedules of all with these costs.
#
#     sh tools/bench/bench_executor.sh PROGRAMS DIR BATCH[:BATCH ...] OPTIONS...
#
# PROGRAMS has executor_cuda and chunkflow; plan.json, measured.json (the last batch's) and costs.json go to DIR, and
# nothing else does. A batch is a list of lengths: 60000,300,4096. OPTIONS are executor_cuda's. Prints the fitted terms
# of each pass, and for each batch "executor N measured X ms simulated Y ms ratio Y/X". On one device several stages
# share it, which the simulator does not know.

set -u
programs=$1
out=$2
batches=$3
shift 3

# Prints PASS ROWS PAIRS SECONDS of what was measured, as chunkflow time --fit reads them. If all replays are of full
# chunks, their constant and their time per row cannot be told apart. They are then left out, and count as forwards.
samples() {
    awk '
        function value(name,  text) {
            if (!match($0, "\"" name "\": *[^,}]*")) return ""
            text = substr($0, RSTART, RLENGTH)
            sub(/^[^:]*: */, "", text)
            gsub(/"/, "", text)
            return text
        }
        FNR == 1 { file++ }
        file == 1 && /"rows": / { rows[value("id")] = value("rows"); pairs[value("id")] = value("pairs") }
        file == 2 && /"pass": "[FRBIW]"/ {
            seconds = value("end") - value("start")
            line = sprintf("%s %s %s %.9g", value("pass"), rows[value("chunk")], pairs[value("chunk")], seconds)
            if (seconds > 0 && value("pass") != "R") print line
            if (seconds > 0 && value("pass") == "R") {
                replay[++n] = line
                if (!seen[rows[value("chunk")]]++) sizes++
            }
        }
        END { for (i = 1; i <= n && sizes > 2; i++) print replay[i] }' "$out/plan.json" "$out/measured.json"
}

makespan() { # OPTIONS OF check...
    "$programs/chunkflow" check --plan "$out/plan.json" "$out/measured.json" --chart "$@" >"$work/said" || {
        tail -n 1 "$work/said" >&2
        exit 1
    }
    awk '$1 == "makespan" { print 1e3 * $2 }' "$work/said"
}

mkdir -p "$out" || exit 1
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 143' TERM # without it dash would leave $work behind
n=0
for batch in $(printf '%s' "$batches" | tr : ' '); do
    n=$((n + 1))
    # Uses the last of three steps, when everything that is loaded or made on first use is there.
    "$programs/executor_cuda" "$@" --synthetic "$batch" --steps 3 --timeline "$out/measured.json" \
        --plan "$out/plan.json" || exit 1
    measured=$(makespan) || exit 1
    if [ "$n" -eq 1 ]; then
        samples >"$work/samples"
        "$programs/chunkflow" time --fit "$work/samples" || exit 1
        "$programs/chunkflow" time --fit "$work/samples" --json "$out/costs.json" >/dev/null || exit 1
    fi
    simulated=$(makespan --time --costs "$out/costs.json") || exit 1
    awk -v n="$n" -v measured="$measured" -v simulated="$simulated" 'BEGIN {
        if (!(measured > 0 && simulated > 0)) exit 1
        ratio = simulated / measured
        printf "executor %d measured %.4f ms simulated %.4f ms ratio %.3f\n", n, measured, simulated, ratio
    }' || exit 1
done
