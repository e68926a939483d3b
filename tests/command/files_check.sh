#!/bin/sh
# files_check.sh - how programs write their files, and that reading ends - MIT or public domain
#
#     tests/command/files_check.sh [BUILD]      BUILD/chunkflow and BUILD/train_cpu are tested; default: build
#
# Run it in the top directory. tests/meta/preload/files.c is preloaded into them: it sees in which order a file is
# forced to the disk and gets its name, and ends a program, or lets it fail, just between the two.
# tests/meta/preload/memory.c lets them run out of memory.

. "$(dirname "$0")/../helpers.sh"

build=${1:-build}
workplace "$build/files_check.tmp"
log=$work/log
echo 5000 >"$work/list"
cp "$work/list" "$work/text"

# shimmed SETTING... COMMAND...: as capture
shimmed() {
    : >"$log"
    capture env SHIM_LOG="$log" LD_PRELOAD="$PWD/$work/shim.so" "$@"
}

pack() { # SETTING...: writes $work/kept, which held "precious"
    rm -f "$work"/kept*
    echo precious >"$work/kept"
    shimmed "$@" "$build/chunkflow" pack --chunk-size 1024 --json "$work/kept" "$work/list"
}

train() { # STEPS SETTING...: saves $work/point after each step, and at the end
    steps=$1
    shift
    shimmed "$@" "$build/train_cpu" --steps $steps --checkpoint-every 1 --checkpoint "$work/point" "$work/text"
}

# Checks that each saved file was forced to the disk before it got its name, and its directory after that.
same_saved() { # NAME
    same "$1" "file synced,renamed synced point,directory synced, point" \
        "$(paste -d , - - - <"$log" | uniq), $(cd "$work" && echo point*)"
}

same() { # NAME WANTED GOT
    if [ "$2" = "$3" ]; then ok "$1"
    else fail "$1" "got '$3', wanted '$2'"; fi
}

kept() { echo "$(head -n 1 "$work/kept") $(cd "$work" && echo kept*)"; }

# ---- reading ends ----

yes '' | head -n 1000001 >"$work/blank"
capture "$build/chunkflow" time --fit "$work/blank"
complained endless/time 2 'blank:1000001: there are more than 1,000,000 lines$'
capture "$build/chunkflow" memory --model qwen2.5-7b --chunk-size 8K --fit "$work/blank"
complained endless/memory 2 'blank:1000001: there are more than 1,000,000 lines$'
sed 1d "$work/blank" >"$work/fewer"
capture "$build/chunkflow" time --fit "$work/fewer"
complained endless/time/as_many 2 'too few samples'
capture "$build/chunkflow" pack --chunk-size 1024 /dev/zero
complained endless/line 2 "^/dev/zero:1: got '"
capture "$build/chunkflow" time --gpu h100-80g --chunk-size 1K --config /dev/zero
complained endless/config 2 '^chunkflow: /dev/zero has more than [0-9,]* bytes$'
if full; then
    capture "$build/chunkflow" check /dev/zero
    complained endless/json 2 '^chunkflow: /dev/zero has more than 2,147,483,648 bytes$'
    yes '# and so on' | capture "$build/chunkflow" pack --chunk-size 1024 -
    complained endless/list 2 '^chunkflow: standard input has more than 1,073,741,824 bytes$'
fi
left_out "gigabytes of JSON and of a list"

# ---- the order of writing ----

cat >"$work/careless.c" <<'C'
#include <stdio.h>
int main(int n, char **names) {
    FILE *file = n == 3 ? fopen(names[1], "w") : NULL;
    return !file || fputs("text", file) < 0 || fclose(file) != 0 || rename(names[1], names[2]) != 0;
}
C
if ! ${CC:-cc} -shared -fPIC tests/meta/preload/files.c -o "$work/shim.so" -ldl -pthread >"$work/out" 2>&1 ||
   ! ${CC:-cc} "$work/careless.c" -o "$work/careless" >"$work/out" 2>&1; then
    skip_all order "the shim does not compile here: $(head -n 1 "$work/out")"
fi
shimmed "$work/careless" "$work/a" "$work/b"
if [ ! -s "$log" ]; then skip_all order "nothing can be preloaded here"; fi
same order/careless 'renamed unsynced b' "$(cat "$log")"

pack
same order/pack "file synced,renamed synced kept," "$(tr '\n' , <"$log")"
train 1
expect order/checkpoint 0 '^step'
same_saved order/checkpoint/synced

pack SHIM_FAIL=1
expect fails/pack 1 "^chunkflow: cannot write $work/kept: Input/output error$"
same fails/pack/kept "precious kept" "$(kept)"

# ---- no memory for opening a file ----

for command in 'pack --chunk-size 1024' 'lengths --lines' 'time --fit' check; do
    shimmed SHIM_NO_MEMORY=1 "$build/chunkflow" $command "$work/list"
    expect "memory/${command%% *}" 1 "^chunkflow: cannot open $work/list: Cannot allocate memory$"
done
shimmed SHIM_NO_MEMORY=1 "$build/train_cpu" "$work/text"
expect memory/train_cpu 1 "^train_cpu: $work/text: Cannot allocate memory$"

# ---- one allocation fails, or all from one on ----

# watched NAME COMMAND ARGUMENT...: the command writes into $work/w. With sanitizers, it must print and write the same.
watched() {
    name=$1
    shift
    for of in "$build" "$build/test"; do
        rm -rf "$work/w"
        mkdir "$work/w"
        capture "$of/chunkflow" "$@"
        if [ "$status" != 0 ]; then fail "$name" "exit code $status, $(last_line)"; return 0; fi
        mv "$work/out" "$work/w/out"
        rm -rf "$work/plain"
        mv "$work/watched" "$work/plain" 2>/dev/null
        mv "$work/w" "$work/watched"
    done
    if diff -r "$work/plain" "$work/watched" >"$work/differ"; then ok "$name"
    else fail "$name" "with sanitizers it says something else" "$work/differ"; fi
}

# starved NAME COMMAND...: the command may write into $work/w. Whichever of its allocations fails, the program must
# report that and leave no file, or work as usual.
starved() {
    name=$1
    shift
    rm -rf "$work/w" "$work/sound" "$work/why"
    mkdir "$work/w"
    capture env SHIM_COUNT="$work/count" LD_PRELOAD="$PWD/$work/memory.so" "$@"
    if [ "$status" != 0 ]; then fail "$name" "exit code $status, $(last_line)"; return 0; fi
    mv "$work/w" "$work/sound"
    cp "$work/out" "$work/said"
    last=$(cat "$work/count")
    at=1
    while [ "$at" -le "$last" ] && [ ! -s "$work/why" ]; do
        for to in $at 1000000; do
            mkdir "$work/w"
            capture env SHIM_FROM=$at SHIM_TO=$to LD_PRELOAD="$PWD/$work/memory.so" "$@"
            case $status in
                0) if ! cmp -s "$work/out" "$work/said" || ! diff -r "$work/w" "$work/sound" >"$work/differ"; then
                       echo "says something else" >"$work/why"
                   fi ;;
                1) if ! grep -qE 'out of memory|gave no memory|Cannot allocate memory' "$work/err" || [ -n "$(ls -A "$work/w")" ]; then
                       echo "does not say so, or leaves files" >"$work/why"
                   fi ;;
                *) echo "exit code $status" >"$work/why" ;;
            esac
            rm -rf "$work/w"
            if [ -s "$work/why" ]; then echo "allocations $at to $to of $last: $(cat "$work/why")" >"$work/why"; break; fi
        done
        at=$((at + step))
    done
    if [ -s "$work/why" ]; then fail "$name" "$(cat "$work/why")" "$work/err"
    else ok "$name"; fi
}

# starved_in_children NAME COMMAND...: the same, in child processes of one process. It is for programs that write no
# files and take too long to start anew for each of thousands of allocations.
starved_in_children() {
    name=$1
    shift
    rm -rf "$work/each"
    mkdir "$work/each"
    capture "$@"
    cp "$work/out" "$work/said"
    judge="[ \"\$SHIM_STATUS\" = 0 ] && cat $work/out $work/each/said | cmp -s - $work/said"
    capture env SHIM_EACH="$work/each" SHIM_STEP=$step SHIM_JUDGE="$judge" LD_PRELOAD="$PWD/$work/memory.so" "$@"
    if [ "$status" != 0 ]; then fail "$name" "exit code $status, $(last_line)"
    elif [ -e "$work/each/why" ]; then fail "$name" "$(cat "$work/each/why")" "$work/each/err"
    elif ! cmp -s "$work/out" "$work/said"; then fail "$name" "says something else"
    else ok "$name"; fi
}

step=17
if full; then step=1; fi
left_out "all allocations that can fail, not every seventeenth"
if ! ${CC:-cc} -shared -fPIC tests/meta/preload/memory.c -o "$work/memory.so" -ldl >"$work/out" 2>&1; then
    skip_all starved "the shim does not compile here: $(head -n 1 "$work/out")"
fi
printf '3000\n12000\n700 3\n' >"$work/few"
cost='--model qwen2.5-0.5b --gpu h100-80g'
w=$work/w
"$build/chunkflow" plan --chunk-size 4K --k 2 --stages 2 --ranks 2 --plan-json "$work/plan" --json "$work/schedule" \
    "$work/few" >"$work/out"
chunkflow() {
    command=$1
    shift
    [ ! -x "$build/test/chunkflow" ] || watched "watched/$command" "$command" "$@"
    starved "starved/$command" "$build/chunkflow" "$command" "$@"
}
chunkflow pack --chunk-size 4K --align 2 --ranks 2 --metadata --json "$w/json" --svg "$w/svg" "$work/few"
chunkflow plan --chunk-size 4K --k 2 --stages 2 --lower --plan-json "$w/plan" --json "$w/json" --svg "$w/svg" \
    --memory-svg "$w/memory" --trace "$w/trace" --dot "$w/dot" $cost "$work/few"
chunkflow compare --chunk-size 4K --k 1,2 --stages 2 --json "$w/json" $cost "$work/few"
chunkflow report --chunk-size 4K --k 1 --stages 2 --ranks 2 -o "$w/page" --json "$w/json" $cost "$work/few"
chunkflow check --plan "$work/plan" "$work/schedule"
chunkflow tune --chunk-sizes 4K,8K --ks 1 --schedules 1f1b,paper --pp 2 --batch 3 --batches 1 --json "$w/json" \
    --html "$w/html" $cost "$work/few"
chunkflow memory --chunk-size 8K --json "$w/json" $cost
chunkflow time --chunk-size 8K --pp 2 --json "$w/json" $cost
chunkflow gen lognormal --n 100
chunkflow reproduce --json "$w/json" --html "$w/page" example
for table in peaks trade-off lengths speedup; do
    starved_in_children "starved/reproduce/$table" "$build/chunkflow" reproduce --batches 1 $table
done
chunkflow lengths --names tests/meta/preload

# ---- signals between the two ----

for signal in 1 2 3 15; do # HUP INT QUIT TERM
    pack SHIM_SIGNAL=$signal
    same "signal/$signal/pack" "$((128 + signal)) precious kept" "$status $(kept)"
    for thread in same other; do # the one that saves, which may have blocked it, or one that has not
        rm -f "$work"/point*
        if [ $thread = same ]; then train 2 SHIM_SIGNAL=$signal
        else train 2 SHIM_SIGNAL=$signal SHIM_THREAD=1; fi
        name=signal/$signal/checkpoint/$thread
        # The signal comes while the first checkpoint is written, before any step. The checkpoint is finished; then the
        # program ends, by the signal or because it was asked to.
        case $signal in
            1 | 3) left="$((128 + signal)) 0 point point.chunkflow-lock" ;;
            *) left="0 1 point" ;;
        esac
        same "$name" "$left" \
            "$status $(grep -c 'stopped after step 0' "$work/out") $(cd "$work" && echo point*)"
        same "$name/saved" "file synced renamed synced point directory synced" "$(xargs <"$log")"
        same "$name/steps" 0 "$(grep -c '^step' "$work/out")"
    done
done

# ---- two trainers ----
#
# The first trainer stops after it has written its checkpoint, before it names it. A second trainer is refused
# meanwhile. If somebody has removed the lock, the second one runs, and both write files of their own.

options="--steps 3 --checkpoint-every 1 --checkpoint $work/point"
rm -f "$work"/point* "$log"
env SHIM_LOG="$log" SHIM_STOP=1 LD_PRELOAD="$PWD/$work/shim.so" "$build/train_cpu" $options --stop-after 2 "$work/text" \
    >"$work/first" 2>&1 &
first=$!
await $first grep -q stopped "$log" 2>/dev/null
capture "$build/train_cpu" $options "$work/text"
complained two/refused 2 "point: another trainer is running with this checkpoint$"
same two/refused/kept "point.chunkflow-lock point.chunkflow-tmp0" "$(cd "$work" && echo point*)"
rm -f "$work/point.chunkflow-lock"
capture "$build/train_cpu" $options --stop-after 1 "$work/text"
expect two/unlocked 0 '^weights after step 1'
capture "$build/train_cpu" $options --stop-after 1 "$work/text"
expect two/unlocked/whole 0 'going on from .*step 1'
kill -CONT $first
code=0
wait $first || code=$?
same two/continued "0 1 point" "$code $(grep -c '^weights after step 2' "$work/first") $(cd "$work" && echo point*)"
capture "$build/train_cpu" $options "$work/text"
expect two/continued/whole 0 'going on from .*step 2'

rm -f "$work/point"
train 2 SHIM_SIGNAL=15 # which ends it before any step
cp "$work/point" "$work/before"
train 2 SHIM_FAIL=1
expect fails/checkpoint 1 'the checkpoint cannot be written: Input/output error'
same fails/checkpoint/kept "0 point" "$(cmp "$work/point" "$work/before"; echo $?) $(cd "$work" && echo point*)"

# ---- decimal points ----
#
# A program that calls the library may have set a locale whose decimal point is a comma, or U+066B.

written() { # FOLDER LOCALE: plan, schedule and graph, with fractions in each
    mkdir "$work/$1"
    shimmed SHIM_LOCALE=1 "LOCPATH=$PWD/$work" "LC_ALL=$2" "$build/chunkflow" plan --chunk-size 3000 --k 1 --stages 2 \
        --model qwen2.5-0.5b --gpu h100-80g --plan-json "$work/$1/plan" --json "$work/$1/schedule" --dot "$work/$1/graph" \
        "$work/list"
    mv "$work/out" "$work/said.$1"
}

written C C
for language in de_DE ps_AF; do
    if [ $language = de_DE ] && ! full; then continue; fi # making one takes a second
    if ! localedef -i $language -f UTF-8 "$work/$language.UTF-8" >"$work/out" 2>&1; then
        skip "locale/$language" "localedef cannot make it here"
        continue
    fi
    written $language $language.UTF-8
    if cmp -s "$work/said.C" "$work/said.$language"; then fail "locale/$language" "the program does not take the locale"; fi
    same "locale/$language" "0 3 3" "$(diff -r "$work/C" "$work/$language" >"$work/differ"; echo $?) $(
        ls "$work/$language" | wc -l | tr -d ' ') $(grep -l '[0-9]\.[0-9]' "$work"/C/* | wc -l | tr -d ' ')"
done

finish
