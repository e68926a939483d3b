# fastest.sh - sourced by bench_outputs.sh and bench_reach.sh, which set CHUNKFLOW - MIT or public domain

# fastest OPTIONS...: prints seconds, bytes, split (tensor, pipeline, data), ChunkSize, K, recomputation and place of
# outputs of the fastest setting; then the seconds of the fastest whole sequences. "-" if nothing fits.
fastest() {
    "$CHUNKFLOW" tune "$@" --batches 1 --tolerance 0 --tsv 2>/dev/null |
        awk -F '\t' 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
            NR == 2 && $1 != "base" {
                best = $at["mean_s"] " " $at["memory_bytes"] " " $at["tensor_parallel"] "," \
                       $at["pipeline_parallel"] "," $at["data_parallel"] " " $at["chunk_size_tokens"] " " \
                       $at["k"] " " $at["recompute"] ($at["state"] == "streams" ? ",S" : "") " " $at["outputs"] }
            $1 == "base" { whole = $at["mean_s"] }
            END { print best == "" ? "- - - - - - -" : best, whole == "" ? "-" : whole }'
}
