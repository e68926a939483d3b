#!/bin/sh
# run.sh FOLDER MINUTES: FOLDER/fuzz searches with each target for its share of so many minutes in all. The inputs that
# reach something new are kept in FOLDER/corpus, findings are FOLDER/finding-*. Ends with status 1 if there is one.
folder=$1
minutes=$2
set -- lengths config json saved csv checkpoint safetensors pipeline trees hostile tune
seconds=$((minutes * 60 / $#))
[ "$seconds" -gt 0 ] || seconds=1
status=0
printf '%-11s %12s %8s %8s  %s\n' target executions exec/s edges findings
for target in "$@"; do
    case $target in
    config | json | safetensors | saved) options="-max_len=1500 -dict=tests/fuzz/json.dict" ;;
    csv) options="-max_len=500 -dict=tests/fuzz/csv.dict" ;;
    *) options="-max_len=400" ;;
    esac
    mkdir -p "$folder/corpus/$target"
    "$folder/fuzz" "$target" -max_total_time="$seconds" -entropic=0 -timeout=20 -rss_limit_mb=1500 \
        -malloc_limit_mb=300 -print_final_stats=1 -artifact_prefix="$folder/finding-$target-" $options \
        "$folder/corpus/$target" "tests/fuzz/corpus/$target" >"$folder/$target.log" 2>&1 || status=1
    awk -v target="$target" '
        /cov: [0-9]/ { for (i = 1; i < NF; i++) if ($i == "cov:") edges = $(i + 1) }
        /number_of_executed_units/ { n = $2 }
        /average_exec_per_sec/ { rate = $2 }
        /^SUMMARY/ { finding = $0 }
        END { printf "%-11s %12s %8s %8s  %s\n", target, n, rate, edges, finding == "" ? "none" : finding }' \
        "$folder/$target.log"
done
exit "$status"
