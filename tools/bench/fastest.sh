# fastest.sh - read by bench_outputs.sh and bench_reach.sh; CHUNKFLOW is theirs - MIT or public domain

# fastest OPTIONS...: of the fastest setting seconds, bytes, split (tensor, pipeline, data), ChunkSize, K, recomputation and
# place of outputs; then the seconds of the fastest whole sequences. "-" where nothing fits.
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
