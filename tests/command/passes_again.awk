# passes_again.awk CHUNKS LIST: runs the passes that `plan` lists (LIST) over the chunks that `pack` lists (CHUNKS), each
# as soon as its stage is free and what it waits for is there. F and R take a chunk's tokens / V, B twice that, I and W half
# of B. local: 1 for local replay; V: virtual stages. Prints makespan, both bubbles, and for each stage its idle share,
# chunks and tokens kept at most.
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
