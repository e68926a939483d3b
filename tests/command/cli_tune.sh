#!/bin/sh
# cli_tune.sh - tests of `chunkflow tune`.
#
#     tests/command/cli_tune.sh [FILTER]
#
# CHUNKFLOW names the program (default build/chunkflow). Prints "ok NAME" or "FAIL NAME: why" for each test and at the
# end how many. What the command says is worked out again with awk, or in Python where there is one. CHUNKFLOW_PLAIN
# names one without sanitizers, for two long searches; CHUNKFLOW makes the same searches in fewer settings.
set -u
. "$(dirname "$0")/cli_harness.sh"

"$CHUNKFLOW" gen lmsys --n 3000 --seed 5 >lengths || exit 1
"$CHUNKFLOW" gen lmsys --n 300 --seed 6 --max 32K >short || exit 1
echo 262144 >>lengths
echo 270000 >>lengths
printf '1048576\n4000\n500\n' >long

seven="--model qwen2.5-7b --gpu h100-80g"
small="--chunk-sizes 4K,8K --ks 1,4 --batches 4 --batch 64"

# ----------------------------------------------------------------------------------------------------------------------
# what it finds
# ----------------------------------------------------------------------------------------------------------------------

# Word splitting is wanted in $seven and $small.
# shellcheck disable=SC2086
{
says tune_prints_splits "  4 x 4 x 1    " tune lengths $seven --gpus 16 --context 256K $small
plain says tune_prints_neighbours "one thing changed from the best" tune lengths $seven --tp 4 --pp 4 --context 256K --chunk-sizes 4K --ks 1,64
says tune_prints_what_does_not_fit "ChunkSize 131,072, K  1 and more: needs" \
    tune lengths $seven --tp 4 --pp 4 --context 256K --chunk-sizes 4K,128K --ks 1,4 --batches 4 --batch 64 --recompute none
says tune_streams "stream            3 blocks of 14,563 rows of one layer on each GPU" tune short $seven --tp 4 --pp 4 $small --stream 64M
says tune_streams_where_it_must ", state streamed" tune long $seven --tp 2 --pp 2 --batch 3 --batches 1 --chunk-sizes 8K --ks 1
says tune_streams_say_how "stream            3 blocks of 4,096 rows of one layer; passes wait for it " tune long $seven --tp 2 --pp 2 \
    --batch 3 --batches 1 --chunk-sizes 8K --ks 1
says tune_streams_where_it_may "  state      streams       it fits without" tune short $seven --tp 4 --pp 4 $small
says tune_of_one_batch "s an iteration, of one batch; " tune short $seven --tp 4 --pp 4 $small --batches 1
says tune_reads_standard_input "sequences" tune - $seven --tp 4 --pp 4 --context 256K $small <lengths
says tune_virtual_stages "interleaved" tune short $seven --tp 4 --pp 2 --virtual 2 $small --show 4
says tune_one_replay "pipeline replay" tune short $seven --tp 4 --pp 4 $small --replay pipeline --no-stream
says tune_schedules "zero-bubble" tune short $seven --tp 4 --pp 4 $small --schedules paper,zero-bubble --split-backward
}

# Sequences past the context are left out, and it says how many and how much that is.
name=tune_left_out
if wanted $name; then
    # shellcheck disable=SC2086
    if ! run tune lengths $seven --tp 4 --pp 4 --context 8K $small; then fail $name "$(cat err)"
    else
        wanted_text=$(awk '{ all += $1 } $1 > 8192 { n++; sum += $1 }
                           END { printf "left out: %d longer than 8,192, with %.2f %% of all tokens", n, 100 * sum / all }' lengths)
        if grep -qF "$wanted_text" out; then ok $name; else fail $name "'$wanted_text' is not in its output"; fi
    fi
fi

# The baseline is the tuner's own answer for chunks as long as the longest sequence, with as little recomputation as
# fits. Where chunks do not help it is faster, and it says why; where one sequence is too long it does not fit.
# shellcheck disable=SC2086
{
echo "4096 64" >alike
few="--batches 2 --batch 32 --tp 4 --pp 2"
name=tune_baseline
run tune alike $seven $few --chunk-sizes 4K --ks 1 --schedules 1f1b --replay pipeline --no-stream
alone=$(sed -n 's/^estimated time  *\([0-9.]*\) s.*/\1/p' out)
run tune alike $seven $few --chunk-sizes 1K --ks 1 --json base.json
same $name "$alone 1 1" "$(sed -n 's/^baseline .*: estimated \([0-9.]*\) s an iteration, [0-9.]* GiB; 0[0-9.]* x.*/\1/p' out) $(
    grep -c 'recompute none, tensor 4, pipeline 2, data 1' out) $(grep -c 'It is faster: ' out)"
same ${name}_row "base unsplit 1f1b stays" "$(awk '$1 == "base" { print $1, $2, $4, $6 }' out)"
same ${name}_json "1 1" "$(grep -c '"baseline": {' base.json) $(grep -c '"fits": true' base.json)"
run tune alike $seven $few --chunk-sizes 2K --ks 1 --schedules 1f1b --limit-bytes 22G # 22.83 GiB without recomputation
same ${name}_recompute 1 "$(grep -c ' a micro-batch for each sequence, recompute act, tensor 4,' out)"
echo 262144 | cat alike - >long
run tune long $seven $few --chunk-sizes 8K --ks 1 --replay local --no-cp
same ${name}_too_long 1 "$(grep -c '^baseline .* does not fit: it needs 1[0-9][0-9]\.[0-9]* GiB at least$' out)"
}

# With context parallelism four GPUs share one sequence: what a pass over a quarter of it takes, and three kernels more for
# each of three steps of the ring in each layer, whose transfers attention hides. Where that is not faster it is not taken.
name=tune_baseline_context
if wanted $name; then
    echo 131072 >one
    # shellcheck disable=SC2086
    if [ -z "$PYTHON" ]; then skip $name "no python3"
    elif ! run tune one $seven --gpus 4 --tp 1 --batch 1 --batches 1 --chunk-sizes 8K --ks 1 --limit-bytes 400G --json base.json ||
        ! run time $seven --dp 4 --chunk-size 16M --json time.json ||
        ! run tune alike $seven --gpus 8 --batches 2 --batch 64 --chunk-sizes 4K --ks 1 --json alike.json; then
        fail $name "$(cat err)"
    elif python - >why 2>&1 <<'PYTHON'
import json
base, time = json.load(open("base.json"))["baseline"], json.load(open("time.json"))
assert (base["context_parallel"], base["exchange"], base["data_parallel"]) == (4, "ring", 1), base
rows, seconds = 131072, time["step_seconds"]
pairs = rows * (rows + 1) // 2
def cost(p): return p["constant"] + (p["per_token"] * rows + p["per_pair"] * pairs) / 4
f, b = (cost(time["stages"][0][p]) for p in "FB")
steps = 2 * 3 * 3 * 28 * 5e-6
assert abs(base["seconds"] / (f + b + steps + seconds) - 1) < 0.01, (base, f, b, steps, seconds)
alike = json.load(open("alike.json"))["baseline"]
assert alike["context_parallel"] == 1, alike
PYTHON
    then ok $name
    else fail $name "$(tail -n 1 why)"; fi
fi

# Twelve layers of gpt-oss and sixteen of Qwen3.5 need all rows; the others send the rows before two pieces, or in two rounds a
# state and what it decays by, and both wait for the first byte. Each GPU has blocks of 128 of its quarter of the rows, a head each,
# and half a wave of its 132 processors more.
name=tune_baseline_context_of_kinds
if wanted $name; then
    echo 8192 >one
    for model in gpt-oss-20b qwen3.5-27b; do
        experts=1
        [ $model = qwen3.5-27b ] || experts=4
        run tune one --model $model --gpu h100-80g --gpus 4 --tp 1 --batch 1 --batches 1 --chunk-sizes 8K --ks 1 --limit-bytes 900G \
            --json base.$model && run time --model $model --gpu h100-80g --dp 4 --ep $experts --chunk-size 16M --json time.$model || cat err
    done
    if [ -z "$PYTHON" ]; then skip $name "no python3"
    elif python - >why 2>&1 <<'PYTHON'
import json
rows, rate = 8192, 450e9 * 0.75
for model, heads, full, messages, sent in (("gpt-oss-20b", 64, 12, 12, 12 * 2 * 127 * 2 * 2 * 8 * 64),
                                           ("qwen3.5-27b", 24, 16, 2 * 48, 48 * 2 * 2 * 4 * 48 * 128 * 128)):
    base, time = json.load(open("base." + model))["baseline"], json.load(open("time." + model))
    assert (base["context_parallel"], base["exchange"], base["recompute"]) == (4, "ring", "none"), base
    def cost(p, waves=1): return p["constant"] + (p["per_token"] * rows + p["per_pair"] * waves * (rows * (rows + 1) // 2)) / 4
    passes = cost(time["stages"][0]["F"], 1 + 132 / (heads * rows / 4 / 128) / 2) + cost(time["stages"][0]["B"])
    kernels, waits = 2 * 3 * 3 * full * 5e-6, 2 * messages * 15e-6
    wanted = passes + kernels + waits + 3 * sent / rate + time["step_seconds"]
    assert abs(base["seconds"] / wanted - 1) < 2e-6, (model, base, wanted) # a chunk of 16M is nearly any
PYTHON
    then ok $name
    else fail $name "$(tail -n 1 why)"; fi
fi

# compare and report have the same one for their list, less the step, which they leave out of all rows.
name=tune_baseline_context_of_compare
if wanted $name; then
    echo 131072 >one
    at="$seven --tp 1 --limit-bytes 400G"
    few="--stages 4 --chunk-size 8K --k 1"
    # shellcheck disable=SC2086
    if [ -z "$PYTHON" ]; then skip $name "no python3"
    elif ! run tune one $at --pp 4 --batch 1 --batches 1 --chunk-sizes 8K --ks 1 --json base.json ||
        ! run time $seven --pp 4 --chunk-size 8K --json time.json || ! run compare $at $few --json compared.json one ||
        ! grep -q "^baseline .* with context parallelism of 4 (ring), tensor 1, pipeline 1, data 1" out ||
        ! run report $at $few --budget 1 -o page.html --json report.json one ||
        ! run compare $at $few --no-cp --json alone.json one ||
        ! run compare $at --stages 2 --ranks 2 --chunk-size 8K --k 1 one ||
        ! grep -q "^baseline .* with context parallelism of 4 (ring).*; on the GPUs of all 2 ranks:" out ||
        ! grep -q "^chunks .*; rank 0 alone; " out; then
        fail $name "$(cat err out)"
    elif python - >why 2>&1 <<'PYTHON'
import json
base, step = json.load(open("base.json"))["baseline"], json.load(open("time.json"))["step_seconds"]
compared, report = json.load(open("compared.json")), json.load(open("report.json"))
alone = [r["makespan"] for r in compared["rows"] if r["unsplit"]]
assert base["context_parallel"] == 4 and step > 0, (base, step)
for got in (compared["context_baseline"], report["context_baseline"]):
    assert abs(got["seconds"] + step - base["seconds"]) < 1e-9, (got, base, step)
    assert (got["bytes"], got["recompute"], got["exchange"]) == (base["bytes"], base["recompute"], "ring"), got
    assert got["seconds"] < min(alone), alone
best = report["schedules"][report["best"]]["makespan"]
assert " %.3g times as fast" % (compared["context_baseline"]["seconds"] / best) in report["sentence"], report["sentence"]
assert report["context_words"] in report["sentence"], report
assert "context_baseline" not in json.load(open("alone.json"))
PYTHON
    then ok $name
    else fail $name "$(tail -n 1 why)"; fi
fi

# Costs from a file in place of the GPU's numbers: the same answer where they are the same, and its command has them, too.
name=tune_costs
if wanted $name; then
    at="--model qwen2.5-7b --gpu h100-80g --tp 4 --pp 4 --chunk-sizes 8K"
    rest="--ks 1,4 --batches 2 --batch 32 --recompute none --no-stream --no-cp"
    # shellcheck disable=SC2086
    if [ -z "$PYTHON" ]; then skip $name "no python3"
    elif ! run time $seven --tp 4 --pp 4 --chunk-size 8K --json measured.json || ! run tune short $at $rest --json plain.json ||
        ! run tune short $at $rest --costs measured.json --json costs.json --html page.html --batch-lengths drawn; then
        fail $name "$(cat err)"
    elif ! grep -q "^costs  *of measured.json" out || ! run plan $(sed -n 's/^  chunkflow plan //p' out); then
        fail $name "$(cat err out)"
    elif python - page.html schedules.json >why 2>&1 <<'PYTHON'
import json, re, sys
with_gpu, with_costs = json.load(open("plain.json")), json.load(open("costs.json"))
assert with_gpu["winner"] == with_costs["winner"]
for a, b in zip(with_gpu["candidates"], with_costs["candidates"], strict=True):
    assert a["status"] == b["status"] and abs(a.get("seconds", 0) - b.get("seconds", 0)) < 1e-9, (a, b)
assert with_costs["baseline"]["fits"] and with_costs["baseline"]["recompute"] == "none"
page = json.loads(re.search(r'id="data">(.*?)</script>', open(sys.argv[1]).read(), re.S).group(1))
made = json.load(open(sys.argv[2]))["schedules"][0]["makespan"]
assert abs(page["schedules"][page["best"]]["makespan"] - made) < 1e-9, made
PYTHON
    then ok $name
    else fail $name "$(tail -n 1 why)"; fi
fi

# A list that is one batch has the same baseline everywhere, in memory to the byte: `compare` takes the list as it
# stands, `tune` a shuffle of it. Its times have the optimizer's step on top.
name=tune_baseline_of_compare
if wanted $name; then
    "$CHUNKFLOW" gen lognormal --n 64 --median 5000 --seed 3 >batch
    if [ -z "$PYTHON" ]; then skip $name "no python3"
    # shellcheck disable=SC2086
    elif ! run compare --chunk-size 8K --k 1 --stages 4 $seven --tp 4 --json compared.json batch ||
        ! run tune batch $seven --tp 4 --pp 4 --batches 1 --batch 64 --chunk-sizes 8K --ks 1 --no-cp --json base.json; then
        fail $name "$(cat err)"
    elif python - >why 2>&1 <<'PYTHON'
import json
rows = [r for r in json.load(open("compared.json"))["rows"] if r["unsplit"] and r["fits"]]
wanted = min(rows, key=lambda r: r["makespan"])
got = json.load(open("base.json"))["baseline"]
assert (got["bytes"], got["stage"], got["packed"], got["recompute"]) == (
    wanted["memory"], wanted["memory_stage"], wanted["packed"], wanted["recompute"]), (got, wanted)
assert 0 <= got["seconds"] - wanted["makespan"] < 0.1, (got["seconds"], wanted["makespan"])
PYTHON
    then ok $name
    else fail $name "$(tail -n 1 why)"; fi
fi

# All defaults, and the file says the same as the library promises.
# shellcheck disable=SC2086
plain says tune_example "best              ChunkSize " tune lengths $seven --gpus 16 --context 256K --json tuning.json
name=tune_json
if wanted $name; then
    # shellcheck disable=SC2086
    if [ -z "$PYTHON" ]; then skip $name "no python3"
    elif ! [ -s tuning.json ] && ! run tune lengths $seven --gpus 16 --context 256K --json tuning.json; then
        fail $name "$(cat err)"
    elif python - tuning.json out >why 2>&1 <<'END'
import json, sys
t = json.load(open(sys.argv[1]))
c = t["candidates"]
assert t["format"] == "chunkflow-tuning" and t["left_out"] == 1 and t["left_out_tokens"] == 270000
assert all(x["id"] == i for i, x in enumerate(c))
exact = [x for x in c if x["status"] == "ok"]
assert min(exact, key=lambda x: (x["seconds"], x["id"]))["id"] == t["ranking"][0]
assert sorted(t["ranking"]) == [x["id"] for x in exact]
best, fastest = c[t["winner"]], c[t["ranking"][0]]
most = 0.01 * fastest["seconds"]
good = [x for x in exact if x["behind"] <= max(most, min(x["behind_confidence"], 5 * most))]
least = min(x["bytes"] for x in good)
recompute = ["none", "selective", "layernorm", "act", "mlp", "full"].index
simple = lambda x: (x["state_window"] > 0, recompute(x["recompute"]), x["replay"] != "local", x["schedule"] == "best", x["k"], x["seconds"])
assert best is min((x for x in good if x["bytes"] - least <= 0.05 * t["limit_bytes"]), key=simple)
assert t["limit_bytes"] <= 0.9101 * 81559 * 2 ** 20
for x in exact:
    n = len(x["batches"])
    assert n == len(t["batch_tokens"]) == 16
    assert abs(sum(x["batches"]) / n - x["seconds"]) < 1e-9 * x["seconds"]
    assert abs(x["seconds"] - fastest["seconds"] - x["behind"]) < 1e-9
    assert x["bound"] <= x["seconds"] * (1 + 1e-9)
    assert x["bytes"] <= t["limit_bytes"] and sum(x["memory"].values()) == x["bytes"]
for x in c:
    if x["status"] == "infeasible":
        assert x["bytes"] > t["limit_bytes"] and abs(sum(x["memory"].values()) - x["bytes"]) <= len(x["memory"])
        fixed = [x["memory"][term] for term in ("parameters", "gradients", "optimizer", "runtime")]
        assert x["memory"][x["breaks"]] >= max(fixed) or sum(fixed) <= t["limit_bytes"]
assert {x["status"] for x in c} == {"ok", "dominated", "infeasible"}
for x in c:
    if x["status"] == "dominated" and x["why"].endswith("time is above the best"): assert x["bound"] > fastest["seconds"]
assert all(s["tensor_parallel"] * s["pipeline_parallel"] * s["data_parallel"] == 16 for s in t["splits"])
text = open(sys.argv[2]).read()
assert "ChunkSize %s, K %d, schedule %s" % (format(best["chunk_size"], ","), best["k"], best["schedule"]) in text
assert "estimated time    %.3g s an iteration" % best["seconds"] in text
END
    then ok $name; else fail $name "$(cat why)"; fi
fi

# What the winner's command makes of the batch that was written is the schedule of the search, pass by pass and to the
# last bit of its time: the page shows that one, as cf_tune_schedule has made it. Held down to fit, too.
name=tune_prints_the_command
printf '(3K + 500 4 + (700 + 900 2 + 0)) 5\n20K + 2K 3 + 4K 20\n5K 40\n' >forest
for limit in 24G 200G 23G; do
    wanted $name || continue
    list=short
    [ "$limit" = 23G ] && list=forest # each of its batches begins or ends within a tree
    # shellcheck disable=SC2086
    if [ -z "$PYTHON" ]; then skip ${name}_$limit "no python3"
    elif ! run tune $list $seven --tp 2 --pp 4 --dp 2 $small --limit-bytes $limit --tolerance 0 --schedules best --ks 4 \
        --batch-lengths drawn --html page.html; then fail ${name}_$limit "$(cat err)"
    else
        command=$(sed -n 's/^  chunkflow plan //p' out)
        [ "$limit" = 200G ] || command="$command --no-list"
        # shellcheck disable=SC2086
        if ! run plan $command; then fail ${name}_$limit "$(cat err)"
        elif python - page.html schedules.json >why 2>&1 <<'END'
import json, re, sys
page = json.loads(re.search(r'id="data">(.*?)</script>', open(sys.argv[1]).read(), re.S).group(1))
made = json.load(open(sys.argv[2]))["schedules"][page["rank"]]
shown = [s for s in page["schedules"] if s["makespan"] == made["makespan"] and s["kind"] == made["kind"] == "best"]
assert shown, (made["makespan"], [s["makespan"] for s in page["schedules"]])
passes = ["".join(a["pass"] for a in stage) for stage in made["actions"]]
assert passes == [stage["pass"].upper() for stage in shown[0]["stages"]], passes # f: it keeps nothing
END
        then ok ${name}_$limit; else fail ${name}_$limit "$(tail -n 1 why)"; fi
    fi
done

# The same with gangs: the dearest of the ranks that the command makes takes what the search says, less the step, and has
# the memory; compare on that batch, too, and beside it what ranks without gangs take. Widths are chosen by what links take.
name=tune_prints_gangs
(echo 64K; echo 1K 9) >giant
if wanted $name; then
    # shellcheck disable=SC2086
    if [ -z "$PYTHON" ]; then skip $name "no python3"
    elif ! run tune giant $seven --tp 4 --pp 1 --dp 4 --gang 4 --batch 10 --batches 1 --chunk-sizes 4K,8K --ks 2,4 --zero 1 \
        --tolerance 0 --batch-lengths drawn --json tuned.json --html page.html --jobs 1; then fail $name "$(cat err)"
    elif cp out tuned; ! grep -q '^split  *tensor 4, pipeline 1, data 4, gangs of up to 4; ' tuned ||
        ! grep -q '^  4 x 1 x 4 /2 ' tuned; then fail $name "no gangs in the text"
    elif ! run plan $(sed -n 's/^  chunkflow plan //p' tuned); then fail $name "$(cat err)"
    elif ! run check --plan plan.json schedules.json; then fail $name "$(cat err)"
    elif ! run compare drawn $(sed -n 's/^  chunkflow plan \(.*\) --schedule paper \(.*\) --limit none.*/\1 \2/p' tuned) $seven \
        --json compared.json; then fail $name "$(cat err)"
    elif cp out compared; ! grep -q '^gangs  *of up to 4 ranks; the dearest of 4 takes ' compared; then fail $name "compare"
    elif ! run report drawn -o page.html --json report.json --chunk-size 8K --k 4 --ranks 4 --gang 4 $seven --tp 4; then
        fail $name "$(cat err)"
    elif python - >why 2>&1 <<'END'
import json
t, c, r = json.load(open("tuned.json")), json.load(open("compared.json")), json.load(open("report.json"))
best = next(x for x in t["candidates"] if x["id"] == t["winner"])
assert [s.get("gang") for s in t["splits"]] == [None, 2, 4] and best["split"] == 2, t["splits"]
made = [s["makespan"] for s in json.load(open("schedules.json"))["schedules"]]
assert c["gangs"]["makespan"] == max(made) and c["gangs"]["widest"] == 4, (c["gangs"], made)
assert 0 < best["seconds"] - max(made) < 0.3 * best["seconds"] and best["seconds"] < 0.6 * c["gangs"]["makespan_without"]
assert c["gangs"]["memory"] == best["bytes"] < c["gangs"]["memory_without"], (c["gangs"], best["bytes"])
assert {x["schedule"] for x in c["rows"] if not x["unsplit"]} == {"paper"}
assert len(r["ranks"]) == 4 and all(x["makespan"] > 0 for x in r["ranks"]), r["ranks"]
END
    then ok $name; else fail $name "$(tail -n 1 why)"; fi
fi

# A batch that is one tree is one line, however many answers it has.
name=tune_writes_large_trees
if wanted $name; then
    awk 'BEGIN { printf "1K"; for (i = 1; i <= 700; i++) printf " + %d", 10000 + i; print "" }' >answers
    # shellcheck disable=SC2086
    if ! run tune answers $seven --tp 4 --pp 2 --batch 700 --batches 1 --chunk-sizes 16K --ks 1 --schedules paper --no-cp \
        --batch-lengths drawn; then fail $name "$(cat err)"
    # shellcheck disable=SC2046
    elif ! run plan $(sed -n 's/^  chunkflow plan //p' out); then fail $name "$(cat err)"
    elif [ "$(wc -c <drawn)" -gt 4096 ]; then ok $name
    else fail $name "the line is shorter than one that was too long"; fi
fi

# Every option that plan has too, and that the search does not decide, is in the command; whatever options there will be.
name=tune_repeats_all_options
if wanted $name; then
    decided="--budget --chunk-size --ep --gang --help --json --k --limit --limit-bytes --ranks --recompute --recompute-layers --replay
        --reserve --stages --stream --tp --tsv --zero"
    shape="--layers 8 --hidden 1024 --heads 8 --kv-heads 4 --head-dim 64 --ffn 2048 --vocab 32000 --tied --qkv-bias --qk-norm
        --no-gate --mtp 1 --gpu h100-80g --gpus-per-node 4 --launch 0.00002 --virtual 2 --placement v --stage-layers 3,2,2,1
        --imbalance 10 --no-sp --loss eager --unfused --state-gradient bf16 --optimizer adam8 --lora 8 --lora-experts --runtime 3G
        --fragmentation 11 --no-tails --align 8 --split-backward"
    # shellcheck disable=SC2086
    if ! run tune short $shape --tp 2 --pp 2 --chunk-sizes 4K --ks 2 --batches 1 --batch 8; then fail $name "$(cat err)"
    else
        sed -n 's/^  chunkflow plan //p' out >command
        for option in $(for of in tune plan; do "$CHUNKFLOW" $of --help | sed -n 's/^  \(--[a-z-]*\).*/\1/p' | sort -u; done |
            sort | uniq -d); do
            case " $decided --model --config --costs " in *[[:space:]]"$option"[[:space:]]*) ;; *) echo "$option" ;; esac
        done >wanted
        tr ' ' '\n' <command | grep -xFf wanted | sort -u >repeated
        if ! diff wanted repeated >why; then fail $name "not repeated: $(sed -n 's/^< //p' why | tr '\n' ' ')"
        elif ! run plan $(sed 's/LENGTHS/short/' command); then fail $name "$(cat err)"
        else ok $name; fi
    fi
fi

# One thread or three: the same answer, but for nothing.
name=tune_any_number_of_jobs
if wanted $name; then
    # shellcheck disable=SC2086
    run tune short $seven --gpus 8 $small --jobs 1 && cp out one && run tune short $seven --gpus 8 $small --jobs 3
    if cmp -s one out; then ok $name; else fail $name "$(diff one out | head -n 3) $(cat err)"; fi
fi

# shellcheck disable=SC2086
{
says tune_context_is_a_promise "memory is that of one with the 262,144 of --context" tune short $seven --tp 4 --pp 4 $small --context 256K
says tune_frontier "time against memory" tune short $seven --tp 4 --pp 4 $small
says tune_initialiser "cf_pack_desc pack = {.chunk_size = " tune short $seven --tp 4 --pp 4 $small
says tune_python "plan = chunkflow.pack(lengths, chunk_size=" tune short $seven --tp 4 --pp 4 $small
}

name=tune_json_to_standard_output
if wanted $name; then
    # shellcheck disable=SC2086
    run tune short $seven --tp 4 --pp 4 $small --json -
    if [ -z "$PYTHON" ]; then skip $name "no python3"
    elif python -c 'import json, sys; json.load(sys.stdin)' <out 2>why; then ok $name
    else fail $name "$(cat why)"; fi
fi

# For scripts: all that was ranked, best first, and the baseline, with the numbers of the JSON.
name=tune_tsv
if wanted $name; then
    # shellcheck disable=SC2086
    if [ -z "$PYTHON" ]; then skip $name "no python3"
    elif ! run tune short $seven --gpus 8 $small --json tuning2.json --tsv; then fail $name "$(cat err)"
    elif python - tuning2.json out >why 2>&1 <<'END'
import csv, json, sys
t = json.load(open(sys.argv[1]))
rows = list(csv.DictReader(open(sys.argv[2]), delimiter="\t", strict=True))
assert [r["rank"] for r in rows] == [str(i + 1) for i in range(len(t["ranking"]))] + ["base"], len(rows)
best = t["candidates"][t["ranking"][0]]["seconds"]
def split(r): return [int(r[k]) for k in ("tensor_parallel", "pipeline_parallel", "data_parallel")]
def wants(s): return [s[k] for k in ("tensor_parallel", "pipeline_parallel", "data_parallel")]
for r, i in zip(rows, t["ranking"]):
    c = t["candidates"][i]
    assert (int(r["chunk_size_tokens"]), int(r["k"])) == (c["chunk_size"], c["k"]), r
    assert (r["schedule"], r["replay"]) == (c["schedule"], c["replay"]), r
    assert r["state"] == ("streams" if c["state_window"] else "stays"), r
    assert (int(r["host_bytes"]), float(r["stream_waiting"])) == (c["host_bytes"], c["stream_waiting"]), r
    assert (float(r["mean_s"]), float(r["mean_confidence_s"])) == (c["seconds"], c["confidence"]), r
    assert abs(float(r["behind"]) - c["behind"] / best) < 1e-12 and float(r["bubble_useful"]) == c["bubble_useful"], r
    assert int(r["memory_bytes"]) == c["bytes"] and split(r) == wants(t["splits"][c["split"]]), r
base = t["baseline"]
assert float(rows[-1]["mean_s"]) == base["seconds"] and split(rows[-1]) == wants(base), rows[-1]
assert rows[-1]["chunk_size_tokens"] == "" and rows[-1]["micro_batches"] == ("packed" if base["packed"] else "unsplit")
END
    then ok $name; else fail $name "$(cat why)"; fi
fi

# The same seed gives the same bytes, another one others; nothing is said on a standard error that is no terminal.
name=tune_same_seed
if wanted $name; then
    # shellcheck disable=SC2086
    "$CHUNKFLOW" tune lengths $seven --tp 4 --pp 4 --context 256K $small --seed 7 >first 2>err
    # shellcheck disable=SC2086
    "$CHUNKFLOW" tune lengths $seven --tp 4 --pp 4 --context 256K $small --seed 7 >second 2>>err
    # shellcheck disable=SC2086
    "$CHUNKFLOW" tune lengths $seven --tp 4 --pp 4 --context 256K $small --seed 8 >third 2>>err
    if ! [ -s first ] || ! cmp -s first second; then fail $name "two runs differ"
    elif cmp -s first third; then fail $name "another seed changes nothing"
    elif grep -qv '^chunkflow tune: [0-9]* s, ' err; then fail $name "it wrote to standard error" # but progress
    else ok $name; fi
fi

# ----------------------------------------------------------------------------------------------------------------------
# Ctrl-C and the bar
# ----------------------------------------------------------------------------------------------------------------------

# However early Ctrl-C comes, what it prints fits: after 0.05, 0.5 and 1.5 s of CPU, of a search that takes several.
for ticks in 5 50 150; do
    name=tune_interrupted_$ticks
    wanted $name || continue
    if ! [ -r /proc/self/stat ]; then skip $name "no /proc"; continue; fi
    # shellcheck disable=SC2086
    "$CHUNKFLOW_PLAIN" tune lengths $seven --gpus 64 --batches 50 --show 5000 --context 256K --json some.json >out 2>err &
    child=$!
    while used=$(awk '{ print $14 + $15 }' /proc/$child/stat 2>/dev/null) && [ "$used" -lt $ticks ]; do sleep 0.05; done
    kill -INT $child 2>/dev/null
    wait $child
    status=$?
    if [ $status -ne 130 ]; then fail $name "exit code $status, wanted 130"
    elif ! grep -q INTERRUPTED out; then fail $name "it does not say so"
    elif ! grep -q '^best  *ChunkSize' out; then fail $name "it does not print what it has"
    elif grep -q 'none is faster than 0$' out; then fail $name "it takes a bound that is not known for one"
    elif [ -z "$PYTHON" ]; then skip $name "no python3"
    elif python - >why 2>&1 <<'END'
import json
t = json.load(open("some.json"))
best = t["candidates"][t["winner"]]
assert t["interrupted"] and best["status"] == "ok" and 0 < best["bytes"] <= t["limit_bytes"], best
assert len(best["batches"]) == 50 and min(best["batches"]) > 0, best
END
    then ok $name; else fail $name "$(tail -n 1 why)"; fi
done

# Batches of 195,000 chunks keep it from a first answer for ten seconds of CPU, of which it is let have little: stopped,
# it finds on waking up that the time in which an answer might have come is over.
name=tune_interrupted_before_an_answer
if wanted $name && ! [ -r /proc/self/stat ]; then skip $name "no /proc"
elif wanted $name; then
    echo "100000000 16" >endless
    # shellcheck disable=SC2086
    "$CHUNKFLOW_PLAIN" tune endless $seven --tp 4 --pp 4 --batch 16 >out 2>err &
    child=$!
    while used=$(awk '{ print $14 + $15 }' /proc/$child/stat 2>/dev/null) && [ "$used" -lt 30 ]; do sleep 0.05; done
    kill -INT $child
    sleep 0.2
    kill -STOP $child
    sleep 5
    kill -CONT $child
    wait $child
    same $name "130 chunkflow tune: ended by Ctrl-C before there was a first answer" "$? $(cat out err)"
fi

name=tune_bar_on_a_terminal
if wanted $name; then
    # shellcheck disable=SC2086
    if [ -z "$PYTHON" ] || ! python -c 'import pty' 2>/dev/null; then skip $name "no python3 with pty"
    elif python - "$CHUNKFLOW" tune lengths $seven --tp 4 --pp 4 --context 256K --batches 5 >why 2>&1 <<'END'
import os, pty, subprocess, sys
master, slave = pty.openpty()
run = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=slave)
os.close(slave)
seen = b""
while True:
    try: piece = os.read(master, 4096)
    except OSError: break
    if not piece: break
    seen += piece
assert run.wait() == 0
assert b"[" in seen and b"%" in seen and b"#" in seen, seen[:200]
assert seen.endswith(b"\r\x1b[K"), seen[-40:]
END
    then ok $name; else fail $name "$(cat why)"; fi
fi

# ----------------------------------------------------------------------------------------------------------------------
# what it refuses
# ----------------------------------------------------------------------------------------------------------------------

echo "# nothing" >empty
# shellcheck disable=SC2086
{
refused tune_costs_of_one_split 2 "--costs is for one split" tune short $seven --gpus 8 --costs measured.json
"$CHUNKFLOW" time $seven --tp 4 --pp 4 --recompute full --chunk-size 8K --json full.json >/dev/null
refused tune_costs_of_another_tp 2 "tensor_parallel: these costs are of 4, and --tp is 2" tune short $seven --tp 2 --pp 4 --costs full.json
refused tune_costs_of_another_recompute 2 "recompute: these costs are of full, and --recompute is none" tune short $seven --tp 4 \
    --pp 4 --costs full.json
refused tune_costs_from_input 2 "--costs must be a file" tune short $seven --tp 4 --pp 4 --costs -
refused tune_no_file 2 "FILE|- is missing" tune $seven
refused tune_no_gpu 2 "--gpu NAME is missing" tune short --model qwen2.5-7b
refused tune_wrong_gpu 2 "there is no 'b900'" tune short --model qwen2.5-7b --gpu b900
refused tune_no_model 2 "wanted --model NAME" tune short --gpu h100-80g
refused tune_missing_list 2 "nowhere" tune nowhere $seven --tp 4 --pp 4
refused tune_empty_list 2 "there is no sequence" tune empty $seven --tp 4 --pp 4
refused tune_all_left_out 2 "there is no sequence within --context" tune lengths $seven --tp 4 --pp 4 --context 1
refused tune_tp 2 "--tp: must divide heads" tune short $seven --tp 3 --pp 4
refused tune_gpus 2 "n_gpus: there is no way to split the model over so many (wanted 8, got 7)" \
    tune short $seven --gpus 7 --tp 2
refused tune_gpus_past_all 2 "n_gpus: is more than heads, layers and sequences" tune short $seven --gpus 65536 --batch 8
refused tune_falling_ks 2 "ks[1]: must be more than the one before (wanted 5, got 2)" tune short $seven --tp 4 --pp 4 --ks 4,2
refused tune_zero_chunk_size 2 "chunk_sizes[0]: is too small (wanted 1, got 0)" tune short $seven --tp 4 --pp 4 --chunk-sizes 0
refused tune_no_number 2 "--chunk-size: got '4K,8Q', wanted whole numbers" \
    tune short $seven --tp 4 --pp 4 --chunk-sizes 4K,8Q
refused tune_wrong_schedule 2 "--schedules: there is no 'fast'" tune short $seven --tp 4 --pp 4 --schedules best,fast
refused tune_schedule_twice 2 "kinds[1]: is in the list already" tune short $seven --tp 4 --pp 4 --schedules best,best
refused tune_schedule_without_virtual_stages 2 "kinds[0]: cannot use virtual stages" \
    tune short $seven --tp 4 --pp 2 --virtual 2 --schedules paper
refused tune_align 2 "align" tune short $seven --tp 4 --pp 4 --align 48
refused tune_stream_or_not 2 "--stream is for all, --no-stream for none" tune short $seven --stream 64M --no-stream
refused tune_negative 2 "--batch" tune short $seven --tp 4 --pp 4 --batch -5
refused tune_zero_batches 2 "--batches" tune short $seven --tp 4 --pp 4 --batches 0
refused tune_limit_in_bytes 2 "--limit is --limit-bytes here" tune short $seven --tp 4 --pp 4 --limit 60G
}

# A limit below the parameters is one where nothing fits, like others; nothing does below what it names, either.
name=tune_limit_below_the_parameters
if wanted $name; then
    # shellcheck disable=SC2086
    run tune short $seven --tp 4 --pp 4 --limit-bytes 1G $small
    first=$?
    least=$(sed -n 's/.*nothing fits into 1.00 GiB; .* GiB (\([0-9,]*\) bytes)$/\1/p' out | tr -d ,)
    # shellcheck disable=SC2086
    [ -z "$least" ] || run tune short $seven --tp 4 --pp 4 --limit-bytes $((least - 1)) $small
    if [ "$first $?" != "1 1" ] || [ -z "$least" ]; then fail $name "$first: $(cat out err)"
    elif grep -q "nothing fits" out; then ok $name
    else fail $name "$(cat out)"; fi
fi

# Where nothing fits, it says what would and ends with 1.
name=tune_nothing_fits
if wanted $name; then
    # shellcheck disable=SC2086
    run tune lengths $seven --tp 4 --pp 4 --context 256K --chunk-sizes 128K --ks 1,2 --batches 2 --recompute none
    status=$?
    if [ $status -ne 1 ]; then fail $name "exit code $status, wanted 1"
    elif ! grep -q "nothing fits into 72.48 GiB; the least that any of these needs is 10[0-9]\." out; then fail $name "$(cat out)"
    else ok $name; fi
fi

finish
