#!/bin/sh
# train_check.sh - what the CPU trainer promises, tried on its programs - MIT or public domain
#
#     tests/trainer/train_check.sh [BUILD]      BUILD/train_cpu and BUILD/train_cpu_f64 are tested; default: build
#
# Run it in the top directory. Prints "ok NAME" or "FAIL NAME: why" for each case and "N passed, N failed" at the end.

. "$(dirname "$0")/../helpers.sh"

build=${1:-build}

# Threads that spin while they wait are slow on a busy machine; results are the same.
OMP_WAIT_POLICY=passive
export OMP_WAIT_POLICY

# run PROGRAM OPTIONS...: as capture
run() {
    program=$1
    shift
    capture "$build/$program" "$@"
}

# same_text NAME WANTED GOT
same_text() {
    if [ "$2" = "$3" ]; then ok "$1"
    else fail "$1" "got '$3', wanted '$2'"; fi
}

for program in train_cpu train_cpu_f64; do
    if [ ! -x "$build/$program" ]; then
        fail "$build/$program" "there is no such program"
        finish
    fi
done
workplace "$build/train_check.tmp"

tiny="--layers 2 --hidden 16 --heads 4 --kv-heads 2 --ffn 24"
small="$tiny --batch 3 --max-length 100 --chunk-size 40 --k 2 --warmup 2 --lr 0.01"
texts="examples/hello.c examples/base.h"

# ---- gradients: the check compares chunks with whole sequences; test_trainer_whole.c has an independent one ----

run train_cpu_f64 --check $tiny --synthetic 9,1,0,4 --prompt 9
expect "gradients: a batch without targets is no check" 2 'nothing to check'
run train_cpu_f64 --check $small $texts
expect "gradients: real text" 0 'limit 1e-10: ok'
run train_cpu --check $small $texts
expect "gradients: float32" 0 'limit 1e-04: ok'

# ---- kinds of layers, documents that begin alike, states in host memory: refusals, and float32 ----

ring=16384 # two blocks of 32 rows in float64
run train_cpu_f64 --check $tiny --kinds experts --balance 1 --balance-over batch
expect "kinds: a balance loss over a batch" 2 'balance-over batch: the loss multiplies counts'
run train_cpu_f64 --check $tiny --kinds experts --capacity 1.25
expect "kinds: a capacity" 2 'capacity: which tokens an expert drops'
run train_cpu $small --steps 6 --kinds delta,window+experts --window 30 --balance 0.01 --mtp 0.3 $texts
expect "kinds: they train" 0 'weights after step 6'


tree="--synthetic 64,58,70,57,61,80,7,45,12,20,14 --with 0,0,0,0,0,2,0,0,0,0,8 --shared 0,50,50,50,50,65,0,37,0,20,6"
run train_cpu_f64 --check $tiny $tree --chunk-size 20 --share 1 --k 2
expect "shared: rows are computed once" 0 '488 tokens in 160 rows'
run train_cpu_f64 --check $tiny $tree --chunk-size 20
expect "shared: not unless asked" 0 '488 tokens in 488 rows'
run train_cpu $small --steps 3 --share 1 $texts
expect "shared: real text trains" 0 'weights after step 3'
run train_cpu_f64 --check $tiny $tree --share 1 --dropout 0.1
expect "shared: not with dropout" 2 'share: dropout is drawn anew for each sequence'
run train_cpu_f64 --check $tiny $tree --share 1 --method next
expect "shared: only best fit" 2 'method'
run train_cpu_f64 --check $tiny --synthetic 5,5 --with 0,0 --shared 0,6
expect "shared: no more than there is" 2 'document 1 has no 6 tokens in common'
run train_cpu_f64 --check $tiny --synthetic 5,5 --with 0,1 --shared 0,3
expect "shared: with an earlier one" 2 'document 1 has no 3 tokens in common'

run train_cpu_f64 --check $tiny --stream $((ring - 1))
expect "stream: two blocks at least" 2 "stream must be 0 or at least $ring: two blocks of 32 rows of one layer"
if [ -s "$work/out" ]; then fail "stream: two blocks at least" "it printed: $(head -n 1 "$work/out")"; fi

# ---- attention's outputs of dropped chunks: replays do not attend ----

run train_cpu_f64 --check $tiny --kinds full,latent --chunk-size 20 --k 1 --outputs --synthetic 150,41,9 --dropout 0.1
expect "outputs: gradients" 0 'limit 1e-10: ok'
run train_cpu $tiny --memory-table --outputs
expect "outputs: not in the memory table" 2 'kept outputs grow with the document'

# ---- memory ----

run train_cpu --memory-table $tiny --chunk-size 32 --k 1
expect "memory: K 1" 0 'chunked activations stay at K x chunk size'
run train_cpu --memory-table $tiny --chunk-size 32 --k 3
expect "memory: K 3" 0 'chunked activations stay at K x chunk size'
run train_cpu --memory-table $tiny --layers 6 --chunk-size 32 --k 2 --stream 30000
expect "memory: with a stream only host memory grows" 0 'with a stream those lie in host memory'
held=
for length in 300 1200; do
    run train_cpu $tiny --layers 6 --chunk-size 32 --k 1 --steps 1 --stream 10000 --synthetic $length
    held="$held $(sed -n 's/^most held: \([0-9]*\) bytes on the device, \([0-9]*\) in host memory$/\1 \2/p' "$work/out")"
done
# 4 x 8 numbers a token in each of 6 layers
if echo "$held" | awk '{ exit !($1 > 0 && $1 == $3 && $2 == 300 * 768 && $4 == 1200 * 768) }'; then
    ok "memory: four times as long, not a byte more on the device"
else fail "memory: four times as long, not a byte more on the device" "$held"; fi

# 4K and 64K tokens. A window, of which each chunk keeps 63 rows, and two layers make it take only seconds.
held=
for length in 4096 65536; do
    run train_cpu $tiny --layers 2 --chunk-size 512 --k 1 --steps 1 --window 64 --stream 16384 --synthetic $length
    held="$held $(sed -n 's/^most held: \([0-9]*\) bytes on the device, \([0-9]*\) in host memory$/\1 \2/p' "$work/out")"
done
if echo "$held" | awk '{ exit !($1 > 0 && $1 == $3 && $2 == 8 * 63 * 256 && $4 == 128 * 63 * 256) }'; then
    ok "memory: 64K tokens with a window, not a byte more on the device than 4K"
else fail "memory: 64K tokens with a window, not a byte more on the device than 4K" "$held"; fi

# ---- training: the same losses and weights, bit by bit ----

# losses FILE: step and loss of each progress line, and the weights' hash
losses() {
    sed -n -e 's/^step *\([0-9]*\).*loss \([^ ]*\) .*/\1 \2/p' -e 's/^weights/weights/p' "$1"
}

# same NAME FILE FILE
same() {
    if [ ! -s "$2" ] || ! grep -q weights "$2"; then
        fail "$1" "there was no run to compare with"
    elif cmp -s "$2" "$3"; then
        ok "$1"
    else
        fail "$1" "$(diff "$2" "$3" | head -n 2 | tail -n 1)"
    fi
}

for program in train_cpu train_cpu_f64; do
    run $program $small --steps 6 --dropout 0.1 --exact --threads 1 $texts
    losses "$work/out" >"$work/one"
    for threads in 2 3 7; do
        run $program $small --steps 6 --dropout 0.1 --exact --threads $threads $texts
        losses "$work/out" >"$work/many"
        same "threads: $program, $threads give what 1 gives" "$work/one" "$work/many"
    done
    for k in 1 5; do
        run $program $small --k $k --steps 6 --dropout 0.1 --exact $texts
        losses "$work/out" >"$work/many"
        same "K: $program, K $k gives what K 2 gives" "$work/one" "$work/many"
    done

    run $program $small --stream 20000 --steps 6 --dropout 0.1 --exact $texts
    losses "$work/out" >"$work/many"
    same "stream: $program, a stream gives what the state on the device gives" "$work/one" "$work/many"

    run $program $small --outputs --steps 6 --dropout 0.1 --exact $texts
    losses "$work/out" >"$work/many"
    same "outputs: $program, replays that take outputs give what replays that attend give" "$work/one" "$work/many"

    run $program $small --steps 9 --dropout 0.1 --exact $texts
    losses "$work/out" >"$work/whole"
    point=$work/point.$program
    : >"$work/parts"
    for part in 1 2 3; do
        run $program $small --steps 9 --dropout 0.1 --exact --checkpoint "$point" --stop-after 3 $texts
        losses "$work/out" | grep -v weights >>"$work/parts"
    done
    losses "$work/out" | grep weights >>"$work/parts"
    same "resume: $program, three parts give what one run gives" "$work/whole" "$work/parts"
done
if [ "$(wc -l <"$work/whole")" -eq 10 ]; then ok "resume: nine losses and the weights were compared"
else fail "resume: nine losses and the weights were compared" "$(wc -l <"$work/whole") lines"; fi

# Returns whether a trainer has done so many steps.
steps() { [ "$(grep -c '^step' "$2")" -ge "$1" ]; } # N OUTPUT

# Interrupted and killed runs continue as if nothing had happened.
long="$small --steps 100 --exact --checkpoint-every 1"
run train_cpu $long $texts
losses "$work/out" | tail -n 1 >"$work/whole"
for signal in INT TERM KILL KILL; do
    : >"$work/out.$signal"
    "$build/train_cpu" $long --checkpoint "$work/cut" $texts >"$work/out.$signal" 2>"$work/err" &
    pid=$!
    await $pid steps 5 "$work/out.$signal"
    kill -$signal $pid 2>"$work/kill"
    wait $pid 2>"$work/kill"
done
for signal in INT TERM; do
    if grep -q 'stopped after step' "$work/out.$signal"; then ok "resume: $signal ends a run in order"
    else fail "resume: $signal ends a run in order" "$(tail -n 1 "$work/out.$signal")"; fi
done
run train_cpu $long --checkpoint "$work/cut" $texts
expect "resume: after INT, TERM and KILL" 0 'going on from .*step [0-9]'
losses "$work/out" | tail -n 1 >"$work/parts"
same "resume: after INT, TERM and KILL the weights are the same" "$work/whole" "$work/parts"
run train_cpu $long --checkpoint "$work/cut" --chunk-size 50 $texts
expect "resume: with other chunks it says so" 0 'note: the chunks are others than before'

# ---- where a checkpoint lies ----

# A link stays a link, and the file keeps its permissions.
run train_cpu $small --steps 6 --stop-after 2 --checkpoint "$work/private" $texts
chmod 600 "$work/private"
ln -s private "$work/link"
run train_cpu $small --steps 6 --stop-after 2 --checkpoint "$work/link" $texts
expect "checkpoint: through a link" 0 'going on from .*step 2'
if [ -h "$work/link" ] && ! [ -h "$work/private" ]; then ok "checkpoint: a link stays a link"
else fail "checkpoint: a link stays a link" "$(ls -l "$work/link" "$work/private" | tr '\n' ' ')"; fi
case $(ls -l "$work/private") in
    -rw-------*) ok "checkpoint: a file keeps its permissions" ;;
    *) fail "checkpoint: a file keeps its permissions" "$(ls -l "$work/private")" ;;
esac
run train_cpu $small --steps 6 --checkpoint "$work/private" $texts
expect "checkpoint: what went through the link is there" 0 'going on from .*step 4'

# One trainer at a time: the second ends at its start, whatever name it uses for the file, and continues after the first
# has ended.
own="$small --steps 1000 --checkpoint-every 1000"
run train_cpu $own --stop-after 1 --checkpoint "$work/owned" $texts
ln -s owned "$work/other-name"
"$build/train_cpu" $own --checkpoint "$work/owned" $texts >"$work/first" 2>&1 &
pid=$!
await $pid steps 1 "$work/first"
cp "$work/owned" "$work/owned-before"
capture timeout 600 "$build/train_cpu" $own --checkpoint "$work/other-name" $texts
complained "checkpoint: a second trainer" 2 'other-name: another trainer is running with this checkpoint$'
same_text "checkpoint: a second trainer changes nothing" "0 1" \
    "$(cmp "$work/owned" "$work/owned-before"; echo $?) $(find "$work" -name 'owned.chunkflow*' | wc -l)"
kill -KILL $pid
wait $pid 2>"$work/kill"
same_text "checkpoint: a killed trainer leaves an empty file" owned.chunkflow-lock \
    "$(cd "$work" && find . -name 'owned.chunkflow*' -size 0 | sed 's,^./,,')"
run train_cpu $own --stop-after 1 --checkpoint "$work/owned" $texts
expect "checkpoint: a killed trainer locks nothing" 0 'going on from .*owned, step 1'
same_text "checkpoint: the lock goes in the end" "owned owned-before" "$(cd "$work" && echo owned*)"

# The trainer writes to nothing that already exists under the new file's name: a link to another file, or a pipe without
# a reader.
brief="timeout -k 1 600 $build/train_cpu $small --steps 2"
# A file with a second link, or one named .tmp, may belong to a user. A file that a killed trainer left is reused.
for kind in link pipe hard old; do
    rm -f "$work"/fresh*
    echo precious >"$work/other"
    first=fresh.chunkflow-tmp0
    left=$first
    case $kind in
        link) ln -s other "$work/$first" ;;
        pipe) mkfifo "$work/$first" ;;
        hard) ln "$work/other" "$work/$first" ;;
        old) cp "$work/other" "$work/$first"; left= ;;
    esac
    cp "$work/other" "$work/fresh.tmp"
    capture $brief --checkpoint "$work/fresh" $texts
    expect "checkpoint: a $kind of the temporary name" 0 '^weights after step 2'
    same_text "checkpoint: a $kind of the temporary name stays, or is taken over" \
        "$(echo precious precious fresh $left fresh.tmp file)" \
        "$(echo $(cat "$work/other" "$work/fresh.tmp") $(cd "$work" && echo fresh*) $(
            [ -f "$work/fresh" ] && ! [ -h "$work/fresh" ] && echo file))"
done
# A file with the lock's name is not removed either, unless it is an empty file with one link, as a lock is.
for kind in pipe full hard link; do
    rm -f "$work"/held* "$work/empty"
    : >"$work/empty"
    case $kind in
        pipe) mkfifo "$work/held.chunkflow-lock" ;;
        full) echo precious >"$work/held.chunkflow-lock" ;;
        hard) ln "$work/empty" "$work/held.chunkflow-lock" ;;
        link) ln -s empty "$work/held.chunkflow-lock" ;;
    esac
    capture $brief --checkpoint "$work/held" $texts
    complained "checkpoint: a $kind of the lock's name" 1 'cannot be written: .*held.chunkflow-lock: '
    same_text "checkpoint: a $kind of the lock's name stays" held.chunkflow-lock "$(cd "$work" && echo held*)"
done
ln -s nowhere "$work/dangling"
capture $brief --checkpoint "$work/dangling" $texts
expect "checkpoint: a link to nowhere" 1 'cannot be written'
if [ -h "$work/dangling" ]; then ok "checkpoint: a link to nowhere stays"
else fail "checkpoint: a link to nowhere stays" "it is no link any more"; fi
mkfifo "$work/pipe"
capture $brief --checkpoint "$work/pipe" $texts
expect "checkpoint: a pipe" 2 'not a regular file'
capture sh -c "ulimit -f 8; exec $brief --checkpoint '$work/large' $texts"
expect "checkpoint: larger than a file may be" 1 'cannot be written: File too large'
same_text "checkpoint: larger than a file may be leaves nothing" "large*" "$(cd "$work" && echo large*)"

# shellcheck disable=SC2086
full_output "output: train_cpu" $brief $texts

# ---- checkpoints that do not match; test_trainer_whole.c has one for every number in them ----

cp "$work/point.train_cpu_f64" "$work/bad"
run train_cpu $small --steps 9 --dropout 0.1 --checkpoint "$work/bad" $texts
expect "checkpoint: float64" 2 'refused, and left as it is: .*its numbers have 8 bytes'
same_text "checkpoint: float64 is left as it is" "0 bad" \
    "$(cmp "$work/point.train_cpu_f64" "$work/bad"; echo $? $(cd "$work" && echo bad*))"
run train_cpu $small --checkpoint "$work" $texts
expect "checkpoint: a directory" 2 'not a regular file'
run train_cpu $small --checkpoint "$work/none/point" $texts
expect "checkpoint: in no directory" 1 'cannot be written'

# ---- bad input: a message, status 2, nothing done ----

refuse() {
    name="refused: $*"
    run train_cpu --steps 1 --max-length 64 --chunk-size 64 "$@"
    if [ -s "$work/out" ]; then fail "$name" "it printed: $(head -n 1 "$work/out")"
    else expect "$name" 2 'train_cpu: '; fi
}
refuse --nonsense
refuse --steps
refuse --steps 0
refuse --steps x
refuse --steps 1.5
refuse --steps nan
refuse --lr -1
refuse --lr nan
refuse --heads 3
refuse --kv-heads 3
refuse --hidden 6 --heads 6
refuse --dropout 1
refuse --chunk-size 0
refuse --chunk-size 9999999999
refuse --method worst
refuse --method best-
refuse --synthetic 1,,2
refuse --synthetic 1,-2
refuse --synthetic 5 examples
refuse --max-length 2
refuse --prompt-fraction 1.5
refuse "$work/nothing"
run train_cpu --steps 1 --chunk-size 30 --align 7 --synthetic 9,8
expect "refused: an alignment that does not divide the chunk" 2 'align'

# A loss that is NaN or infinite ends the run, and the last good checkpoint stays.
run train_cpu $small --steps 40 --lr 1e12 --clip 0 --checkpoint "$work/nan" --checkpoint-every 1 $texts
expect "a loss that is not a number ends the run" 1 'not a finite number'

run train_cpu --help
expect "help" 0 'chunk-size N'

finish
