#!/bin/sh
# report_check.sh - report, tune --html, reproduce --html: numbers, and pages in a browser - MIT or public domain
#
#     CHUNKFLOW=build/chunkflow tests/command/report_check.sh [FILTER]
#
# Most pages of real lists are written by the program without sanitizers, if CHUNKFLOW_PLAIN names one; FULL=1: with.
# The numbers need python3, the page headless Chromium as well (Debian: chromium; CHROMIUM names another one): where one
# is missing these tests are skipped. Prints "ok NAME" or "FAIL NAME: why" for each and the counts at the end.
# FULL=1 adds a page of more than 400,000 passes.

tests=$(cd "$(dirname "$0")" && pwd)
. "$tests/cli_harness.sh"

if [ -z "$PYTHON" ]; then skip_all report "there is no python3"; fi
CHROMIUM=${CHROMIUM:-$(command -v chromium || command -v chromium-browser || true)}

printf '1\n1\n2\n4\n' >example
model="--model qwen2.5-7b --tp 4 --gpu h100-80g"

# numbers NAME OPTIONS...: the report of a list has the numbers that plan prints for its schedules
numbers() {
    name=report/$1
    shift
    wanted "$name" || return 0
    cf report "$@" -o page.html --json data.json
    if [ "$code" != 0 ]; then fail "$name" "exit code $code: $(head -n 1 err)"; return 0; fi
    head -n 1 out >sentence
    pairs="best=best.json" # paper has no virtual stages
    cf plan "$@" --schedule paper --json paper.json --summary
    if [ "$code" = 0 ]; then pairs="$pairs paper=paper.json"; fi
    cf plan "$@" --json best.json --summary
    # shellcheck disable=SC2086
    if python "$tests/report_data.py" data.json page.html $pairs >why 2>&1; then ok "$name"
    else fail "$name" "$(head -n 3 why | tr '\n' ' ')"; fi
}

test_numbers() {
    numbers example --chunk-size 2 --k 1 --stages 4 example
    same report/example/sentence \
        "In chunks this batch takes 36 token times (zero-bubble, 6 kept tokens on the fullest stage), 1.56 x as fast\
 as 1F1B on unsplit sequences (56 token times, 8 kept tokens on the fullest stage)." "$(cat sentence 2>/dev/null)"
    "$CHUNKFLOW" gen lognormal --n 76 --median 5000 --seed 3 >lengths
    # shellcheck disable=SC2086
    {
        quick numbers model --chunk-size 8K --k 2 --stages 4 $model lengths
        quick numbers replay --chunk-size 8K --k 1 --stages 3 --cost 1e-3,1e-7,1e-12 --latency 1e-3 lengths
        quick numbers bytes --chunk-size 8K --k 2 --stages 3 --token-bytes 100,10,20,5 lengths
        quick numbers virtual --chunk-size 8K --k 2 --stages 2 --virtual 2 --placement v $model lengths
        quick numbers stream --chunk-size 8K --k 1 --stages 2 --recompute selective --stream 64M $model lengths
        same report/stream/waits yes "$(grep -q '"stream_waits": [1-9]' data.json 2>/dev/null && echo yes)"
        numbers ranks --chunk-size 8K --k 2 --stages 2 --ranks 3 --rank 1 --align 64 $model lengths
    }
    same report/ranks/three 3 "$(grep -c '"pairs": ' data.json 2>/dev/null)"
    printf '40\n40\n40\n900\n' >uneven # the rank with the long one needs more than its stages may hold
    cf report --chunk-size 1000 --stages 2 --ranks 2 --rank 1 --token-bytes 1,0,0,0 --limit-bytes 200 -o page.html \
        --json data.json uneven
    same report/ranks/one-cannot "0 2 1" "$code $(sed -n '/"ranks":/,$p' data.json |
        tee ranks | grep -c '"pairs": ') $(grep -c '"makespan": ' ranks)"
    numbers huge --chunk-size 2 --k 1 --stages 2 --cost 1e300,0,0 example
    numbers tiny --chunk-size 2 --k 1 --stages 2 --cost 1e-300,0,0 example
    printf '5\n' >one
    cf report --chunk-size 8 --k 1 -o page.html --json data.json one
    same report/one-stage 0 "$code"
    echo 0 >none
    cf report --chunk-size 8 --k 1 --stages 2 -o page.html --json data.json none
    same report/empty "0 This batch has no tokens." "$code $(cat out err | tr '\n' ' ' | sed 's/ $//')"
}

# The baseline is the one of compare: the shorter of its two rows.
test_baseline() {
    wanted report/baseline || return 0
    # shellcheck disable=SC2086
    for options in "--stages 4" "--stages 4 $model" "--stages 2 $model --loss fused"; do
        cf compare --chunk-size 8K --k 2 $options --json compared.json lengths
        cf report --chunk-size 8K --k 2 $options -o page.html --json data.json lengths
        same "report/baseline/$options" ok "$(python - <<'END'
import json
rows = [r for r in json.load(open("compared.json"))["rows"] if r["unsplit"] and r.get("fits", True)]
d = json.load(open("data.json"))
got = d["schedules"][d["baseline"]]["makespan"] if d["baseline"] >= 0 else None
wanted = min((r["makespan"] for r in rows), default=None)
print("ok" if got == wanted else (got, wanted))
END
)"
    done
}

# --virtual and --placement mean the same in report as in compare.
test_virtual() {
    wanted report/virtual || return 0
    for options in "--virtual 2" "--placement v" "--virtual 3 --placement v"; do
        # shellcheck disable=SC2086
        cf compare --chunk-size 8K --k 2 --stages 3 $options --json compared.json lengths
        # shellcheck disable=SC2086
        cf report --chunk-size 8K --k 2 --stages 3 $options -o page.html --json data.json lengths
        same "report/virtual/$options" ok "$(python - <<'END'
import json
rows = {(r["schedule"], r["split_backward"]): r for r in json.load(open("compared.json"))["rows"]
        if not r["unsplit"] and not r["at_paper_peaks"]}
got = {s["name"]: s for s in json.load(open("data.json"))["schedules"]}
same = {"paper": ("paper", False), "zero-bubble": ("zero-bubble", False), "best": ("best", False),
        "best, I + W": ("best", True)}
wrong = [(n, got[n]["makespan"], rows[k]["makespan"]) for n, k in same.items()
         if any(got[n][m] != rows[k][m] for m in ("makespan", "virtual_stages", "placement"))]
print("ok" if not wrong and rows[same["zero-bubble"]]["virtual_stages"] > 1 else wrong)
END
)"
    done
}

# A measured schedule: here one whose passes take twice the predicted time.
test_measured() {
    costs="--cost 1e-3,1e-7,0"
    # shellcheck disable=SC2086
    {
        cf plan --chunk-size 8K --k 2 --stages 3 $costs --json s.json --summary lengths
        cf plan --chunk-size 8K --k 2 --stages 3 --cost 2e-3,2e-7,0 --json twice.json --summary --schedule 1f1b lengths
        cf report --chunk-size 8K --k 2 --stages 3 $costs --measured twice.json -o page.html --json data.json lengths
        same report/measured "0 " "$code $(head -n 1 err)"
        same report/measured/off "0.5 0.5 0.5" "$(python -c '
import json
d = json.load(open("data.json"))
print(*[round(e["off"], 9) for e in d["errors"]])')"
        same report/measured/numbers "" "$(python "$tests/report_data.py" data.json page.html)"
        mv data.json measured.json
        mv page.html measured.html
        refuses report/measured/unit 2 'needs costs in seconds' report --chunk-size 8K --k 2 --stages 3 \
            --measured s.json -o no.html lengths
        refuses report/measured/stages 2 's.json: is for 3 stages and rank 0, wanted 2 and 0' report --chunk-size 8K \
            --k 2 --stages 2 $costs --measured s.json -o no.html lengths
        refuses report/measured/chunks 2 's.json: no schedule of these chunks: n_chunks' report --chunk-size 4K --k 2 \
            --stages 3 $costs --measured s.json -o no.html lengths
        cf plan --chunk-size 8K --k 2 --stages 3 $costs --latency 0.1 --lower --json lowered.json --plan-json p.json \
            --summary lengths
        cf report --chunk-size 8K --k 2 --stages 3 $costs --latency 0.1 --measured lowered.json -o page.html \
            --json data.json lengths
        same report/measured/lowered "0 " "$code $(python "$tests/report_data.py" data.json page.html)"
        refuses report/measured/plan 2 'is a plan' report --chunk-size 8K --stages 3 $costs --measured p.json \
            -o no.html lengths
        grep -Ev '"(makespan|bounds|peak_[a-z_]*)": ' s.json | sed 's/, "start": .*}/}/' >untimed.json
        refuses report/measured/untimed 2 'has no times' report --chunk-size 8K --k 2 --stages 3 $costs \
            --measured untimed.json -o no.html lengths
    }
}

# --schedule shows one schedule, the same as plan, and tries nothing else.
test_one() {
    wanted report/one || return 0
    # shellcheck disable=SC2086
    for options in "--schedule best --split-backward --virtual 2" "--schedule gpipe $model"; do
        cf report --chunk-size 8K --stages 2 $options --json data.json lengths
        cf plan --chunk-size 8K --stages 2 $options --json s.json --summary lengths
        same "report/one/$options" "2 True 0" "$(python -c '
import json
d, s = json.load(open("data.json")), json.load(open("s.json"))
print(len(d["schedules"]), d["schedules"][1]["makespan"] == s["makespan"], len(d["tried"]))')"
    done
    refuses report/one/virtual 2 'only interleaved, zero-bubble and best have virtual stages' \
        report --chunk-size 2 --schedule paper --virtual 2 --json - example
}

test_usage() {
    refuses report/usage/output 2 '-o or --json is required' report --chunk-size 2 example
    refuses report/usage/both 2 '-o and --json both name x' report --chunk-size 2 -o x --json x example
    refuses report/usage/directory 1 'nosuch' report --chunk-size 2 -o nosuch/x.html example
    refuses report/usage/input 2 "nosuch" report --chunk-size 2 -o no.html nosuch
    same report/usage/nothing-written no "$([ -e no.html ] && echo yes || echo no)"
    refuses report/usage/reproduce-both 2 '--tsv and --html - exclude each other' reproduce example --tsv --html -
    refuses report/usage/tune-both 2 '--tsv and --html - exclude each other' tune example --gpu h100-80g \
        --model qwen2.5-7b --tsv --html -
    cf report --chunk-size 2 --stages 2 -o - example
    same report/stdout "<!DOCTYPE html>" "$(head -n 1 out)"
}

# Advice names only options that were tried, fit and pay. If there are none, it says so.
advised() { # NAME OPTIONS...
    name=report/advice/$1
    shift
    cf report "$@" -o page.html --json data.json
    same "$name" "0 ok" "$code $(python -c '
import json, re
d = json.load(open("data.json"))
pays = [t for t in d["tried"] if t["pays"]]
named = set(re.findall(r"--[a-z][a-z-]*", " ".join(d["advice"])))
tried = set(re.findall(r"--[a-z][a-z-]*", pays[-1]["options"] if pays else ""))
limit = d.get("limit_bytes", 0)
wrong = [named - tried, [t for t in d["tried"] if t["pays"] and not (t["fits"] and t["memory"] <= limit)]]
said = d.get("do", "")
right = said.startswith("Do this: " + pays[-1]["options"] if pays else ("Keep these options", "No change of the options")) if d["tried"] else not said
print("ok" if wrong == [set(), []] and right else (wrong, said))')"
}

test_advice() {
    wanted report/advice || return 0
    "$CHUNKFLOW" gen lognormal --n 76 --median 5000 --seed 3 >lengths
    # shellcheck disable=SC2086
    cf time $model --pp 4 --chunk-size 8K --json costs.json
    advised virtual --chunk-size 8K --stages 4 --virtual 2 --costs costs.json lengths
    same report/advice/uneven 1 "$(grep -c 'mean stage.s work' out)"
    printf '1\n' >one
    advised one-chunk --chunk-size 2 --stages 4 one
    "$CHUNKFLOW" gen lognormal --n 76 --median 5000 --seed 4 >layered
    # shellcheck disable=SC2086
    advised layers --chunk-size 8K --k 4 --stages 8 $model layered
    same report/advice/layers/pays 1 "$(grep -c 'Do this: .*--stage-layers' out)"
    "$CHUNKFLOW" gen lognormal --n 6 --median 5000 --seed 5 >fewer
    # shellcheck disable=SC2086
    advised no-layers --chunk-size 8K --k 13 --stages 4 $model fewer
    { echo 256K; "$CHUNKFLOW" gen lognormal --n 120 --median 9000 --max 128K --seed 3; } >full
    large="--chunk-size 8K --tp 8 --zero 1 --model qwen2.5-72b --gpu h200 --recompute selective --k 4 --stages 4 --ranks 2"
    # shellcheck disable=SC2086
    advised full $large full
    same report/advice/full/ranks 1 "$(grep -c '^Ranks are uneven: .*steps, but the chunks of a sequence of 262,144 tok' out)"
    advised=$(sed -n 's/^Do this: \(.*\) takes an estimated \([0-9.]*\) s.* in \([0-9.]*\) of 127.77 GiB.*/\1/p' out)
    said=$(sed -n 's/^Do this: .* takes an estimated \([0-9.]*\) s.* in \([0-9.]*\) of 127.77 GiB.*/\1 \2/p' out)
    # shellcheck disable=SC2086
    cf plan $large $advised --summary full
    same report/advice/full/run "$said of the 127.77 GiB of the GPU" "$(sed -n 's/^makespan  *\([0-9.]*\) s.*/\1/p' out) $(
        sed -n "s/^peak memory  *\([0-9.]*\) GiB on stage [0-9].*, \(of the .* GiB of the GPU\).*/\1 \2/p" out)"
}

# Pictures: plan --svg and --memory-svg, pack --svg, and those of the pages, whose commands make them again.
test_pictures() {
    root=$(dirname "$(dirname "$tests")")
    # shellcheck disable=SC2086
    for options in "--chunk-size 2 --k 1 --stages 4 example" "--chunk-size 8K --k 2 --stages 4 $model lengths" \
        "--chunk-size 8K --k 2 --stages 2 --virtual 2 --placement v $model lengths"; do
        cf plan $options --json s.json --svg chart.svg --memory-svg memory.svg --summary
        cf report $options -o page.html --json data.json
        same "report/svg/$options" "0 " \
            "$code $(python "$tests/svg_check.py" s.json chart.svg memory.svg data.json best 2>&1 | head -n 3)"
    done
    for style in "--svg-width 240 --svg-type 8" "--svg-width 1000 --svg-height 400 --svg-type 14"; do
        # shellcheck disable=SC2086
        cf plan --chunk-size 8K --k 2 --stages 4 $model lengths $style --json s.json --svg chart.svg --memory-svg memory.svg \
            --summary
        # shellcheck disable=SC2086
        cf report --chunk-size 8K --k 2 --stages 4 $model lengths -o page.html --json data.json
        same "report/svg/$style" "0 " \
            "$code $(python "$tests/svg_check.py" s.json chart.svg memory.svg data.json best 2>&1 | head -n 3)"
        same "report/svg/size/$style" "$(echo "$style " | sed 's/--svg-\(width\|height\) \([0-9]*\)/\2/g; s/--svg-type .*//')" \
            "$(sed -n '1s/.* width="\([0-9]*\)" height="\([0-9]*\)"/\1 \2/p' memory.svg | awk -v s="$style" '{
                print $1, (s ~ /height/ ? $2 " " : "") }')"
    done
    refuses report/svg/many 2 'n_passes: is too large for a picture [(]wanted 20000' \
        plan --chunk-size 64 --k 1 --stages 8 --svg no.svg lengths
    for options in "--chunk-size 8K lengths" "--chunk-size 8K --ranks 3 lengths" "--chunk-size 512 --align 64 example" \
        "--chunk-size 8K --ranks 4 --max-cp 4 long" "--chunk-size 8K tree" "--chunk-size 8K --svg-type 14 --svg-width 900 long"; do
        printf '70K\n4K 9\n700 20\n' >long
        echo '20K + (3K + 2K 3) 2' >tree
        # shellcheck disable=SC2086
        cf pack $options --json plan.json --svg chunks.svg
        same "report/svg/pack/$options" "0 " "$code $(python "$tests/svg_check.py" plan.json chunks.svg 2>&1 | head -n 3)"
    done
    sed 's/class="slice" x="78.000"/class="slice" x="79.000"/' chunks.svg >moved.svg
    same report/svg/pack/moved 1 "$(python "$tests/svg_check.py" plan.json moved.svg >out 2>&1; echo $?)"
    refuses report/svg/pack/many 2 'n_slices: is too large for a picture [(]wanted 20000' \
        pack --chunk-size 1 --svg no.svg long
    same report/svg/pack/none no "$(if [ -e no.svg ]; then echo yes; else echo no; fi)"
    # The pictures of README and of the pages must be what the command draws now.
    sh "$root/tools/guide/pictures.sh" "$CHUNKFLOW" pictures >out 2>err
    same report/svg/pictures "0 " "$? $(head -n 1 err)"
    for picture in "$root"/tools/guide/*.svg; do
        same_files "report/svg/pictures/$(basename "$picture")" "$picture" "pictures/$(basename "$picture")"
    done
}

# tried LIST OPTION: for each option tried on this list, OPTION among them, the time is the one that plan gives with the
# same options
tried() {
    # shellcheck disable=SC2086
    cf report --chunk-size 8K --k 1 --stages 4 $model -o page.html --json data.json "$1"
    python -c '
import json
for t in json.load(open("data.json"))["tried"]: print(t["makespan"], t["memory"], t["options"])' >tried
    same "report/tried/$1" yes "$([ "$(wc -l <tried)" -ge 2 ] && grep -q -e "$2" tried && echo yes || cat tried)"
    while read -r seconds bytes options; do
        # shellcheck disable=SC2086
        cf plan --chunk-size 8K --k 1 --stages 4 --split-backward $model $options --json s.json --summary "$1"
        same "report/tried/$1/$options" "$seconds $(awk -v b="$bytes" 'BEGIN { printf "%.2f", b / 2 ^ 30 }')" \
            "$(python -c '
import json; print(json.load(open("s.json"))["makespan"])') $(sed -n 's/^peak memory  *\([0-9.]*\) GiB.*/\1/p' out)"
    done <tried
}

test_tried() {
    wanted report/tried || return 0
    "$CHUNKFLOW" gen lmsys --n 256 --seed 3 >chat
    tried lengths "--k"
    tried chat "--stage-layers"
}

# The pages of tune and reproduce contain what the commands write as JSON, and fetch nothing.
test_pages() {
    # shellcheck disable=SC2086
    cf tune lengths --model qwen2.5-7b --gpu h100-80g --gpus 8 --batch 24 --batches 3 --chunk-sizes 2K,8K,64K,512K \
        --ks 1,4 --json tuned.json --html tuned.html
    same tune/page 0 "$code"
    python -c '
import re
print(re.search("id=\"data\">(.*?)</script>", open("tuned.html").read(), re.S).group(1))' >tuned_report.json
    same tune/page/report "" "$(python "$tests/report_data.py" tuned_report.json tuned.html 2>&1 | head -n 3)"
    same tune/page/ranks "2 2" "$(python -c '
import json
t, r = json.load(open("tuned.json")), json.load(open("tuned_report.json"))
dp = t["splits"][t["candidates"][t["winner"]]["split"]]["data_parallel"]
print(min(dp, 2), min(len(r.get("ranks", [0])), 2))' | sed 's/^1 1$/2 2/')"
    cf tune lengths --model qwen2.5-7b --gpu h100-80g --tp 4 --batch 24 --batches 2 --chunk-sizes 256K --ks 1 --limit-bytes 40G \
        --json none.json --html none.html
    same tune/page/nothing-fits "1 null" "$code $(sed -n '/id="data"/{n;p;}' none.html)"
    cf tune lengths --model qwen2.5-7b --gpu h100-80g --tp 4 --batch 24 --batches 1 --html - --chunk-sizes 8K --ks 1
    same tune/page/stdout "0 <!DOCTYPE html>" "$code $(head -n 1 out)"
    refuses tune/page/both 2 '--json and --html both name x' tune lengths --model qwen2.5-7b --gpu h100-80g --json x --html x
    cf reproduce --batches 1 --json paper.json --html paper.html
    same reproduce/page 0 "$code"
    same reproduce/page/topics "example peaks trade-off lengths speedup" "$(python -c '
import json; print(*[s["name"] for s in json.load(open("paper.json"))["sheets"]])')"
    same reproduce/page/printed "" "$(python - out <<'PYTHON'
import json, sys
lines = [line.split() for line in open(sys.argv[1])]

def printed(cells):
    """The words of a row: where its table stands in parts, two columns say which row it is."""
    keys = " ".join(cells[:2]).split()
    parts = [line for line in lines if line[:len(keys)] == keys]
    return keys + [word for part in parts for word in part[len(keys):]]

for sheet in json.load(open("paper.json"))["sheets"]:
    for row in sheet["rows"]:
        cells = [cell["text"] for cell in row.values()]
        words = " ".join(cells).split()
        if words != printed(cells):
            print("not printed:", words)
        for key, cell in row.items():
            shown = cell["text"].rstrip("*%").replace(",", "")
            if "value" in cell and abs(float(shown) - cell["value"]) > 0.5001 * 10 ** -len(shown.partition(".")[2]):
                print("shown otherwise:", key, cell)
PYTHON
)"
}

test_reproduction() {
    refuses reproduce/page/both 2 '--json and --html both name x' reproduce --json x --html x
    cf reproduce lengths --json - --html topic.html
    same reproduce/json "0 {" "$code $(head -n 1 out)"
}

# Many candidates, and a long list, must not make the page long.
test_large_tuning() {
    wanted tune/page/large || return 0
    "$CHUNKFLOW" gen lmsys --n 200000 --seed 2 --max 32K >many
    # shellcheck disable=SC2046
    cf tune many --model qwen2.5-7b --gpu h100-80g --gpus 64 --batch 64 --batches 1 --json large.json --html large_tuned.html \
        --chunk-sizes "$(seq -s , 4096 1024 16384)" --ks 1,2 --schedules paper --replay local
    same tune/page/large "0 yes" "$code $(python -c '
import os; print("yes" if os.path.getsize("large_tuned.html") < 1e6 else os.path.getsize("large_tuned.html"))')"
}

# Makes pages from a list and a model whose names contain harmful text. The browser's tests say what became of the
# names.
make_hostile() {
    mkdir -p '<'
    hostile='</script><script>alert(1)<img src=x onerror=alert(2)>"&'"$(printf '\001\033\t')"' \u003c é'
    printf '1\n1\n2\n4\n' >"$hostile"
}

test_hostile() {
    make_hostile
    cf report --chunk-size 2 --k 1 --stages 2 --cost 1e300,0,0 -o hostile.html --json hostile.json "$hostile"
    same report/hostile 0 "$code"
    source='import json, sys; print(json.load(open(sys.argv[1]))["source"])'
    same report/hostile/text "${hostile##*/}" "$(python -c "$source" hostile.json)"
    same report/hostile/scripts "8 0" "$(grep -o '</*script' hostile.html | wc -l) $(grep -c '<img' hostile.html)"
    printf '1\n' >"$(printf 'bad\377name')"
    cf report --chunk-size 2 -o bytes.html --json bytes.json "$(printf 'bad\377name')"
    same report/hostile/bytes 'bad?name' "$(python -c "$source" bytes.json)"
    cf tune "$hostile" --model qwen2.5-7b --gpu h100-80g --tp 4 --batch 4 --batches 1 --chunk-sizes 16,4K --ks 1 \
        --json hostile_tuned.json --html hostile_tuned.html
    same tune/page/hostile "0 ${hostile##*/}" "$code $(python -c "$source" hostile_tuned.json)"
    same tune/page/hostile/scripts "8 0" \
        "$(grep -o '</*script' hostile_tuned.html | wc -l) $(grep -c '<img' hostile_tuned.html)"
    python "$tests/report_hostile.py" hostile_tuned paper
}

take_log() { # NAME STATUS: counts what a test of a browser has printed
    cat log
    passed=$((passed + $(grep -c '^ok ' log)))
    failed=$((failed + $(grep -c '^FAIL ' log)))
    if [ "$2" -eq 0 ] || grep -q '^FAIL ' log; then return 0; fi
    fail "$1" "status $2: $(tail -n 1 log)"
}

# in_browser NAME...: runs the tests of report_browser.py on NAME.html and NAME.json, all in one browser.
in_browser() {
    pages=
    for name in "$@"; do
        if wanted "report/browser/$name"; then pages="$pages $name"; fi
    done
    if [ -z "$pages" ]; then return 0; fi
    # shellcheck disable=SC2086
    timeout -k 5 600 "$PYTHON" -S "$tests/report_browser.py" check "$CHROMIUM" $pages >log 2>&1
    take_log report/browser "$?"
}

test_browser() {
    if [ -z "$CHROMIUM" ]; then skip report/browser "there is no chromium"; return 0; fi
    cf report --chunk-size 2 --k 2 --stages 2 -o small.html --json small.json example
    # shellcheck disable=SC2086
    quick cf report --chunk-size 8K --k 2 --stages 4 $model --ranks 2 -o medium.html --json medium.json lengths
    in_browser small medium measured hostile tuned none paper hostile_tuned hostile_tuned_numbers paper_numbers
    if ! full; then return 0; fi
    "$CHUNKFLOW" gen lognormal --n 5600 --median 5000 --max 120K --seed 3 >large
    # shellcheck disable=SC2086
    cf report --chunk-size 8K --k 2 --stages 8 $model -o large.html --json large.json large
    same report/browser/large/passes "5 yes" "$(python -c '
import json
n = [s["n_passes"] for s in json.load(open("large.json"))["schedules"] if "stages" in s]
print(len(n), "yes" if max(n) >= 100000 and sum(n) >= 400000 else n)')"
    in_browser large
}

# The playground, if it was built: `make test FULL=1` builds it if the compilers for it are installed.
test_playground() {
    wanted report/playground || return 0
    root=$(cd "$tests/../.." && pwd)
    page=$(cd "$root" && cd "${BUILD:-build}" && pwd)/playground.html
    if [ -z "$CHROMIUM" ] || [ ! -f "$page" ]; then skip report/playground "there is no chromium or no page"; return 0; fi
    PYTHONPATH="$root/tools/python" CHUNKFLOW_BUILD=$(dirname "$page") timeout -k 5 600 "$PYTHON" -B \
        "$tests/playground_browser.py" "$CHROMIUM" "$page" "${CHUNKFLOW_PLAIN:-$CHUNKFLOW}" "$root" >log 2>&1
    take_log report/playground "$?"
}

test_numbers
quick test_baseline
quick test_virtual
test_measured
test_one
test_usage
quick test_advice
quick test_tried
quick test_pages
test_reproduction
quick test_large_tuning
quick test_pictures
test_hostile
test_browser
in_full test_playground
left_out "the playground, the page of five schedules with 100,000 passes and more, and sanitizers for most lists of sequences"
finish
