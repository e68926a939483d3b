# gpu_record.awk - the summary of gpu_record.sh's record.jsonl: verdicts by rule, then tables
#
#     awk -v line=N -v shapes=... -v repeats=... -f tools/device/gpu_record.awk RECORD
#
# AUTO's rule: wgmma is right (its check, and each of `repeats`) and not slower than mma in any pass of `shapes`. Steps
# named "order point" are no part of it: half of them run a program that nobody ships. `line` is the line of
# chunkflow_cuda.cu that makes the choice. A number that is missing is "not measured", never "met".

function value(name,  text) {
    if (!match($0, "\"" name "\": (\"([^\"\\\\]|\\\\.)*\"|[^,}]*)")) return ""
    text = substr($0, RSTART + length(name) + 4, RLENGTH - length(name) - 4)
    gsub(/^"|"$/, "", text)
    gsub(/\\/, "", text)
    return text
}

function is_number(text) { return text ~ /^-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?$/ }

function first_of(kind, name) {
    if ((kind, name) in seen) return
    seen[kind, name] = 1
    names[kind, ++n[kind]] = name
}

function verdict(what, is_met, said) {
    printf "%-58s %-12s %s\n", what, (is_met == "" ? "not measured" : is_met ? "met" : "not met"), said
}

function judge(what, number, low, high, form) {
    if (number == "") verdict(what, "", "")
    else verdict(what, is_number(number) && number >= low && number <= high, sprintf(form, number))
}

function ratio(a, b) { return is_number(a) && is_number(b) && b > 0 ? a / b : a == "" || b == "" ? "" : "nan" }

function auto_rule(  test, list, i, count, pass, row, wrong, missing, said) {
    split(repeats, test, " ")
    if (!("check wgmma" in status)) missing = 1
    else if (status["check wgmma"] != 0) wrong = " check"
    for (i = 1; i in test; i++) {
        if (!((test[i] " wgmma") in status)) missing = 1
        else if (status[test[i] " wgmma"] != 0) wrong = wrong " " test[i]
    }
    count = split(shapes, list, " ")
    for (i = 1; i <= count; i++)
        for (pass = 1; pass <= 2; pass++) {
            row = list[i] " " (pass == 1 ? "forward" : "backward")
            if (!is_number(speed[row, "wgmma"]) || !is_number(speed[row, "mma"])) missing = 1
            else if (speed[row, "wgmma"] < speed[row, "mma"]) wrong = wrong " " row
        }
    said = "chunkflow_cuda.cu, line " line
    if (wrong != "") verdict("AUTO may take wgmma", 0, "wrong or slower:" wrong "; change " said)
    else verdict("AUTO may take wgmma", missing ? "" : 1, said (missing ? "" : " stays"))
}

function judge_losses(  i, a, b, off, worst) {
    worst = losses["losses chunked"] > 0 && losses["losses chunked"] == losses["losses whole"] ? 0 : ""
    for (i = 1; worst != "" && worst != "nan" && i <= losses["losses chunked"]; i++) {
        a = loss["losses chunked", i]
        b = loss["losses whole", i]
        off = is_number(a) && is_number(b) && b > 0 ? 100 * (a > b ? a - b : b - a) / b : "nan"
        if (off == "nan" || off > worst) worst = off
    }
    judge("losses, chunked and whole: most that a step is off in %", worst, 0, 1, "%.4f")
}

function judge_memory(  i, name, smallest) {
    smallest = measured[names["memory", 1]]
    for (i = 1; i <= n["memory"]; i++) {
        name = names["memory", i]
        judge(name ": measured over predicted", ratio(measured[name], laid_out[name]), 0.95, 1.05, "%.4f")
        if (i > 1) judge(name ": over that of the shortest", ratio(measured[name], smallest), 0, 1.01, "%.4f")
    }
}

function print_attention(  i, j) {
    printf "\nattention, TFLOP/s of visible pairs\n"
    for (i = 1; i <= n["row"]; i++) {
        printf "    %-36s", names["row", i]
        for (j = 1; j <= n["variant"]; j++)
            if ((names["row", i], names["variant", j]) in speed)
                printf "  %s %s", names["variant", j], speed[names["row", i], names["variant", j]]
        printf "\n"
    }
}

function median(row, program,  i, j, sorted, held) {
    for (i = 1; i <= n_ordered[row, program]; i++) {
        held = ordered[row, program, i]
        for (j = i; j > 1 && sorted[j - 1] > held; j--) sorted[j] = sorted[j - 1]
        sorted[j] = held
    }
    return i == 1 ? "-" : (sorted[int(i / 2)] + sorted[int((i + 1) / 2)]) / 2
}

function print_order_point(  i, row) {
    for (i = 1; i <= n["ordered"]; i++) {
        row = names["ordered", i]
        printf "    %-36s  medians: with the order point %s, without it %s\n", row, median(row, "bench_attention"),
            median(row, "bench_free")
    }
}

function print_training(  i, name) {
    printf "\n%-40s %12s %12s %8s %12s %10s\n", "training, last step", "tokens/s", "predicted", "ratio", "utilisation",
        "MiB"
    for (i = 1; i <= n["train"]; i++) {
        name = names["train", i]
        printf "%-40s %12s %12s %8s %12s %10s\n", name, tokens[name], (predicted[name] ? predicted[name] : "-"),
            (predicted[name] > 0 ? sprintf("%.2f", tokens[name] / predicted[name]) : "-"), used[name], mib[name]
    }
}

{ step = value("step") }
NR == 1 { printf "%s, driver %s, commit %s\n", value("device"), value("driver"), value("commit") }
value("ok") == "true" { result[value("test")] = 1 }
value("ok") == "false" {
    result[value("test")] = 0
    why[value("test")] = value("error")
    first_of("wrong", value("test"))
}
value("tflops") != "" && step ~ /^order point: / {
    split(step, word, " ")
    row = value("shape") " " value("pass")
    first_of("ordered", row)
    ordered[row, word[3], ++n_ordered[row, word[3]]] = value("tflops") + 0
}
value("tflops") != "" && step !~ /^order point: / {
    row = value("shape") " " value("pass")
    first_of("row", row)
    first_of("variant", value("variant"))
    if (value("tflops") + 0 >= speed[row, value("variant")] + 0) speed[row, value("variant")] = value("tflops")
}
value("tokens_per_s") != "" {
    loss[step, ++losses[step]] = value("loss")
    tokens[step] = value("tokens_per_s")
    used[step] = value("utilisation")
    mib[step] = value("memory_mib")
    if (step !~ /^losses|^memory|^times|^replay/) first_of("train", step)
}
value("predicted_tokens_per_s") > 0 { predicted[step] = value("predicted_tokens_per_s") }
value("batch_mib") != "" {
    first_of("memory", step)
    laid_out[step] = value("batch_mib")
    measured[step] = value("measured_mib")
}
value("replay_of_forward") != "" { first_of("replay", step); replay[step] = value("replay_of_forward") }
value("measured_ms") != "" {
    name = step ", batch " value("batch")
    first_of("executor", name)
    simulated[name] = ratio(value("simulated_ms"), value("measured_ms"))
}
value("skipped") != "" { first_of("skipped", step ": " value("skipped")) }
value("done") == "true" {
    status[step] = value("status")
    reason[step] = value("error")
    seconds += value("seconds")
    first_of("step", step)
}
END {
    for (t in result) result[t] ? right++ : 0
    for (i = 1; i <= n["wrong"]; i++) bad += !result[names["wrong", i]]
    printf "%d steps in %d s, %d tests passed, %d failed\n", n["step"], seconds, right, bad
    for (i = 1; i <= n["wrong"]; i++)
        if (!result[names["wrong", i]]) printf "    test %s: %s\n", names["wrong", i], why[names["wrong", i]]
    for (i = 1; i <= n["step"]; i++)
        if (status[names["step", i]] != 0) printf "    step %s: %s\n", names["step", i], reason[names["step", i]]
    for (i = 1; i <= n["skipped"]; i++) print "    left out: " names["skipped", i]
    printf "\n"
    auto_rule()
    judge_losses()
    judge_memory()
    for (i = 1; i <= n["executor"]; i++)
        judge(names["executor", i] ": simulated over measured", simulated[names["executor", i]], 0.9, 1.1, "%.3f")
    for (i = 1; i <= n["replay"]; i++) printf "%-58s %s of a forward\n", names["replay", i], replay[names["replay", i]]
    print_attention()
    print_order_point()
    print_training()
}
