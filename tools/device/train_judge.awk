# train_judge.awk - whether a training record shows what was promised: one line of CSV for each judgement
#
#     awk -f tools/device/train_judge.awk PREDICTIONS RECORD
#
# PREDICTIONS is train_predictions.sh's, written before; RECORD is gpu_record_train.sh's record.jsonl. Each line:
# judgement,measured,wanted,verdict. The verdict is "met", "not met" (also where a number is none, such as a loss that
# is no longer finite) or "not measured" (its step is not in the record, or ended without a result). Without any
# prediction there is nothing to judge, and the exit status is 1.

function value(name,  text) {
    if (!match($0, "\"" name "\": (\"([^\"\\\\]|\\\\.)*\"|[^,}]*)")) return ""
    text = substr($0, RSTART + length(name) + 4, RLENGTH - length(name) - 4)
    gsub(/^"|"$/, "", text)
    return text
}

function is_number(text) { return text ~ /^-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?$/ }

# The median over the steps behind the first one, which warms up; "nan" where one of them is none, "" without any.
function median(step, what,  n, i, j, kept, own) {
    for (i = 2; i <= count[step]; i++) {
        if (!is_number(results[step, what, i])) return "nan"
        own[++n] = results[step, what, i] + 0
    }
    for (i = 2; i <= n; i++)
        for (j = i; j > 1 && own[j] < own[j - 1]; j--) { kept = own[j]; own[j] = own[j - 1]; own[j - 1] = kept }
    return n == 0 ? "" : n % 2 ? own[(n + 1) / 2] : (own[n / 2] + own[n / 2 + 1]) / 2
}

function ratio(a, b) {
    if (a == "" || b == "") return ""
    return a == "nan" || b == "nan" || b + 0 <= 0 ? "nan" : a / b
}

# low, high: what the number must lie in, each "" where there is no such bound.
function judge(name, number, low, high, form,  wanted, verdict) {
    wanted = low == "" ? sprintf("at most " form, high) : high == "" ? sprintf("at least " form, low) : \
        sprintf(form " to " form, low, high)
    if (number == "") verdict = "not measured"
    else if (number == "nan" || (low != "" && number < low) || (high != "" && number > high)) verdict = "not met"
    else verdict = "met"
    printf "%s,%s,%s,%s\n", name, number == "" ? "-" : number == "nan" ? "nan" : sprintf(form, number), wanted, verdict
}

# At least one test of a step, and all of them are ok.
function judge_tests(step) {
    if (tests[step] == 0) print step ",-,all ok,not measured"
    else print step "," tests[step] - wrong[step] " of " tests[step] ",all ok," (wrong[step] ? "not met" : "met")
}

function judge_speeds(  i, word, shape, other, r) {
    for (i = 1; i <= n_predicted; i++)
        judge(order[i] ": tokens/s", median(order[i], "tokens_per_s"), 0.85 * speed[order[i]],
            1.15 * speed[order[i]], "%.0f")
    for (i = 1; i <= n_predicted; i++) {
        split(order[i], word, " ")
        shape = "speed " word[2] " " word[3] " "
        if (word[4] != "chunkflow") continue
        other = shape "packed " word[5]
        judge(shape "packed over chunkflow " word[5], ratio(median(other, "tokens_per_s"),
            median(order[i], "tokens_per_s")), "", 1.03, "%.3f")
        if (word[5] != "none") continue
        other = shape "one full"
        r = ratio(speed[order[i]], speed[other])
        if (is_number(r)) judge(shape "chunkflow over one with recomputation", ratio(median(order[i], "tokens_per_s"),
            median(other, "tokens_per_s")), 0.85 * r, 1.15 * r, "%.2f")
        r = roofline[word[2] " " word[3]]
        if (r) judge(shape "the same by rooflines", ratio(median(order[i], "tokens_per_s"),
            median(other, "tokens_per_s")), 0.85 * r, 1.15 * r, "%.2f")
        judge(shape "chunkflow over the rival", ratio(median(order[i], "tokens_per_s"), best_rival(shape)), 1.5, "",
            "%.2f")
    }
    r = median("speed qwen2.5-1.5b chat chunkflow none", "utilisation")
    judge("utilisation of 1.5B in %: needed", r, 45, "", "%.1f")
    judge("utilisation of 1.5B in %: wanted", r, 50, "", "%.1f")
}

# The fastest of the rival's ways; "nan" where those that ran have none.
function best_rival(shape,  way, r, best, i) {
    split("rival rival-compile rival-liger", way, " ")
    for (i = 1; i in way; i++) {
        r = median(shape way[i] " none", "tokens_per_s")
        if (r != "" && (best == "" || best == "nan" || (r != "nan" && r > best))) best = r
    }
    return best
}

function judge_memory(  i, step, n, sizes) {
    n = split(grows, sizes, " ")
    for (i = 2; i <= n; i++)
        judge("memory of " sizes[i] " tokens over that of " sizes[1], ratio(measured["memory " sizes[i]],
            measured["memory " sizes[1]]), "", 1.01, "%.4f")
    for (i = 1; i <= n; i++) {
        step = "memory " sizes[i]
        judge(step ": measured over laid out", ratio(measured[step], laid_out[step]), 0.95, 1.05, "%.4f")
    }
}

# Every step's loss, and the mean of the last 20.
function judge_losses(  i, n, other, a, b, worst, sums, off, late) {
    n = count["losses chunkflow"] + 0
    other = count["losses one"] + 0
    if (n == 0 || n != other) worst = late = ""
    else {
        worst = 0
        for (i = 1; i <= n && worst != "nan"; i++) {
            a = results["losses chunkflow", "loss", i]
            b = results["losses one", "loss", i]
            if (!is_number(a) || !is_number(b) || b + 0 <= 0) worst = "nan"
            else {
                a += 0
                b += 0
                off = 100 * (a > b ? a - b : b - a) / b
                if (off > worst) worst = off
                if (i > n - 20) { sums[1] += a; sums[2] += b }
            }
        }
        late = worst == "nan" ? "nan" : 100 * (sums[1] > sums[2] ? sums[1] - sums[2] : sums[2] - sums[1]) / sums[2]
    }
    judge("steps of both loss curves", n == 0 || other == 0 ? "" : n < other ? n : other, curve_steps, curve_steps,
          "%d")
    judge("losses: most that a step is off in %", worst, "", 1, "%.4f")
    judge("losses: what the last 20 are off in %", late, "", 0.2, "%.4f")
}

BEGIN {
    if (grows == "") grows = "32768 262144 524288"
    if (curve_steps == "") curve_steps = 200
    roofline["qwen2.5-0.5b chat"] = 2.9
    roofline["qwen2.5-1.5b chat"] = 1.6
    roofline["qwen2.5-3b chat"] = 1.55
    roofline["qwen2.5-7b:7 chat"] = 1.5
    print "judgement,measured,wanted,verdict"
}
FILENAME == ARGV[1] {
    if (FNR == 1) next
    split($0, field, ",")
    order[++n_predicted] = field[1]
    speed[field[1]] = field[2]
    next
}
{ step = value("step") }
value("ok") != "" {
    tests[step]++
    if (value("ok") != "true") wrong[step]++
}
value("tokens_per_s") != "" {
    n = ++count[step]
    results[step, "tokens_per_s", n] = value("tokens_per_s")
    results[step, "utilisation", n] = value("utilisation")
    results[step, "loss", n] = value("loss")
}
value("batch_mib") != "" {
    laid_out[step] = is_number(value("batch_mib")) ? value("batch_mib") + 0 : "nan"
    measured[step] = is_number(value("measured_mib")) ? value("measured_mib") + 0 : "nan"
}
END {
    if (n_predicted == 0) {
        print "train_judge.awk: " ARGV[1] ": no predictions" >"/dev/stderr"
        exit 1
    }
    judge_tests("gradients fp32")
    judge_tests("gradients bf16")
    judge_speeds()
    judge_memory()
    judge_losses()
}
