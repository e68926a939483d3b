#!/bin/sh
# deep_check.sh BUILD [PART ...] - what takes too long for every `make test`; `make check-deep` runs all parts:
#
#   clang      clang's static analyser, over both headers (without the option it looks at no function of a header); with
#              a fifth of the usual nodes for a function it ends within a minute of processor time, else in half an hour
#   tools      the same over the command's files
#   gcc        gcc -fanalyzer, by summaries of what a call does: without them it never came to its end. They forget what
#              is written through pointers, so what it says about uninitialised values is left to clang and valgrind
#   valgrind   the quick suites of BUILD/test/unit, which is built without sanitizers, and no leak
#   threads    tests/meta/threads.c under ThreadSanitizer: four threads share a plan
#   trainer    examples/train_cpu.c under it, with OpenMP: Archer tells it what OpenMP orders
#   checkpoint ROUNDS (100) times two and then three trainers at once with one checkpoint, killed at any moment: it is
#              always there, whole
#   foreign    suites of BUILD/test/unit compiled for arm64, s390x and 32-bit x86, in an emulator: other byte order, other
#              alignment, other compilers' habits
#
# A part whose tool is missing is skipped. What is known and no fault is in the function `known`, with the reason.
build=$1
shift
[ $# -gt 0 ] || set -- clang tools threads trainer checkpoint foreign gcc valgrind
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
passed=0
failed=0
skipped=0
flags="-std=c99 -D_XOPEN_SOURCE=700 -I. -g"
seconds=${DEEP_SECONDS:-3600} # for each part

# Warnings that were looked at and are no faults, as fixed strings that a warning with its line of source has in it,
# each under its reason. A line that changes is looked at again.
known() {
    sed '/^#/d' <<'KNOWN'
# A sequence that is split has cuts, and the search is asked for a number below one that a unit keeps.
(4 * CF__PACK_MAX_COST_SLICES) / n));
return (int64_t)(cf__draw(&search->random) % (uint64_t)n);
# The line of a list belongs to its reader, whose owner frees it at the end.
code = read_tree(in, text, n, list, &capacity);
# Lengths belong to the packing, whose owner frees them where packing fails.
return cli_error(&error, &out->list);
# The chunk of a share has its slice, in arrays that are there, for both have been checked before.
CF__TRY(cf__plan_is(check, "chains.cp", c->chain, on != NULL ? on->begin + on->length : 0, s->begin,
# Batches are drawn from a list that is not empty.
int64_t other = next + (int64_t)(cft__draw(&state) % (uint64_t)(n - next));
# Working space that starts as zeros is never empty, which the recipe's comment promises.
if (recipe->zeroed) memset(memory, 0, bytes);
# `n` totals are cleared where they are allocated; neither analyser sees through the allocator.
totals[set] += cf__metadata_count_targets(lengths[i], d->ignored != NULL ? d->ignored[i] : NULL,
memset(totals, 0, (size_t)n * sizeof *totals);
for (i = 0; i < n; i++) n_sets += totals[i] > 0;
# A virtual stage that there is has a shard, as the first one had; and there is at least one stage.
if (shard.layers == 0) continue;
most_layers = cft__max(most_layers, shard.layers);
return tokens * t->split.n_virtual * (w->of[CFT__STATE] + w->of[CFT__GRADIENT] + (local ? w->of[CFT__INPUT] : 0));
cft__add_product(&least, t->split.n_virtual * plan->chunk_size, tightest->of[CFT__ACTIVATIONS]);
# A call that went well has made its object, or read its number; those that say what is wrong never return 0.
peak->fixed = (double)fullest->total - 1;
if (!p->unit_cost) cost = costs.stages ? costs.stages[0].forward : costs.timing.all.forward;
result = cf_lockstep_schedule(plan, whole.schedule, p->rank, NULL, &schedule, error);
if (code == CLI_OK) schedules[n_read] = saved[n_read].schedule, n_read++;
for (s = 0; s < n; s++) loads[s] = guess_load(&of, &path, n - s);
for (s = 0; s < n; s++) loads[s] = guess_load(asked, &path, n - s);
if (whole < INT32_MIN || whole > INT32_MAX)
if (format != SAVED_SCHEDULE) return json_wrong(document, node, "schedules: wanted schedules");
if (microbatch != m) return bad_cell(r, &r->cell, "microbatches are counted up from 0");
if (chunk < first || chunk >= first + r->plan->chunks_per_rank)
free(costs->stages);
fits = pipeline_fits(p, &run) && !run.held_down;
out[s].fixed = fixed[s].total;
return p->gpu_bytes == 0 || !run->memory || run->memory[run->fullest].total <= p->gpu_bytes;
out->best =
# A word was taken before; a command that is run has options, and a piece that is added to is one of those there are.
if (!known)
for (i = 0; command->options[i].name; i++) {
last->start = start;
# A list that a sample was found in has lines; all columns are cleared before any is added to.
table_integer(t, list->lines[fit->worst_sample]);
list->lines[error->item], "%s", error->text);
at->busy += to - from;
# Arrays are filled over the same counts over which they are read; a tuning that is drawn has candidates.
double bound = timed && bounds[replay] > load ? bounds[replay] : load;
cell->chunk_size = map->chunk_sizes[i / map->n_ks];
cell->k = map->ks[i % map->n_ks];
if (!is_better(tuning, i, cell->candidate)) continue;
if (far < nearest || c->seconds < tuning->candidates[map->cells[found].numbers].seconds) found = i;
# The winner's batch has been packed.
for (pipe.rank = 0; pipe.rank < w->packed.plan->n_ranks && result == CF_OK; pipe.rank++) {
# Every layer's kind has been chosen where that went well.
if (seen[k].mixer == choices[i].mixer && seen[k].experts == choices[i].experts) break;
if (n == 1 && choices[0].mixer == CF_MIXER_FULL && !choices[0].experts) return CLI_OK; /* dense, and nothing more */
# Without a model there are the caller's bytes.
w->of[CFT__ACTIVATIONS] = own->held.activations * 100;
# What is before the end of a chain is in one.
c->index = chain->n_chunks++;
KNOWN
}

has() { command -v "$1" >/dev/null 2>&1; }

count() { # NAME STATUS: prints what a failed part has written
    if [ "$2" -eq 0 ]; then
        passed=$((passed + 1))
    else
        printf 'FAIL %s\n' "$1"
        tail -n 60 "$work/$1"
        failed=$((failed + 1))
    fi
}

# Without a warning but those that are known; and the analyser came to its end.
analysed() { # NAME STATUS
    known >"$work/known"
    ! awk '/^[^ ]+:[0-9]+:[0-9]+: warning: / { where = $0; getline; print where " " $0 }' "$work/$1" |
        grep -vFf "$work/known" && [ "$2" -eq 0 ]
}

part_clang() {
    timeout "$seconds" clang $flags --analyze -Xclang -analyzer-opt-analyze-headers -Xclang -analyzer-config \
        -Xclang max-nodes=50000 --analyzer-output text tests/implementation.c >"$work/clang" 2>&1
    analysed clang $?
}

part_tools() {
    status=0
    for file in tools/command/*.c tools/report/*.c; do
        timeout "$seconds" clang $flags -DCHUNKFLOW_IMPLEMENTED -DCHUNKFLOW_API=extern -DCHUNKFLOW_TUNE_IMPLEMENTED \
            -DCHUNKFLOW_TUNE_API=extern --analyze --analyzer-output text "$file" >>"$work/tools" 2>&1 || status=1
    done
    analysed tools "$status"
}

# It says that it bailed out where it has not looked at everything.
part_gcc() {
    timeout "$seconds" gcc $flags -O0 -fanalyzer -fanalyzer-call-summaries -Wanalyzer-too-complex \
        -Wno-analyzer-use-of-uninitialized-value --param analyzer-min-snodes-for-call-summary=2 \
        --param analyzer-max-enodes-per-program-point=2 --param analyzer-bb-explosion-factor=10 \
        -c tests/implementation.c -o "$work/object" >"$work/gcc.all" 2>&1
    status=$?
    grep -q 'bailed out' "$work/gcc.all" && status=1
    grep -v 'Wanalyzer-too-complex' "$work/gcc.all" >"$work/gcc"
    analysed gcc "$status"
}

quick="base. cost. models. memory. validate. refusals. schedule. loads. lower. write. csv. dot. graph. metadata."
part_valgrind() {
    timeout "$seconds" valgrind -q --leak-check=full --error-exitcode=9 "$build/test/unit" $quick >"$work/valgrind" 2>&1
}

part_threads() {
    clang $flags -O1 -fsanitize=thread tests/meta/threads.c -o "$work/program" -lpthread -lm >"$work/threads" 2>&1 &&
        timeout "$seconds" "$work/program" >>"$work/threads" 2>&1
}

# Where Archer is not loaded, what OpenMP orders would be reported as races; that it is, is asked of OpenMP itself.
part_trainer() {
    clang $flags -O1 -fsanitize=thread -fopenmp=libomp examples/train_cpu.c -o "$work/program" -lm \
        >"$work/trainer" 2>&1 &&
        env OMP_TOOL_VERBOSE_INIT=stdout OMP_NUM_THREADS=4 OMP_WAIT_POLICY=passive \
            TSAN_OPTIONS=ignore_noninstrumented_modules=1 \
            timeout "$seconds" "$work/program" --check --layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 \
            --chunk-size 24 --k 2 --synthetic 100,24,48,7,3,0,1,31,12 >>"$work/trainer" 2>&1 &&
        grep -q 'ompt_start_tool in libarcher.so... Success' "$work/trainer"
}

# Two start together; one of them is killed, and a third one starts, all after times that are drawn from ROUNDS.
part_checkpoint() {
    mkdir "$work/point" && cp examples/hello.c "$work/text" &&
        cc $flags -O2 examples/train_cpu.c -o "$work/trainer" -lm >"$work/checkpoint" 2>&1 || return 1
    few="--layers 2 --hidden 128 --ffn 384 --batch 1 --chunk-size 16 --max-length 16 --steps 100000 --checkpoint-every 1"
    few="$few --checkpoint $work/point/p $work/text"
    "$work/trainer" --stop-after 1 $few >>"$work/checkpoint" 2>&1 || return 1
    rounds=${ROUNDS:-100}
    awk -v n="$rounds" 'BEGIN { srand(n); for (; n > 0; n--) print 0.1 + rand() / 4, 0.1 + rand() / 4 }' >"$work/times"
    done=0
    while read -r before after; do
        "$work/trainer" $few >"$work/a" 2>&1 & one=$!
        "$work/trainer" $few >"$work/b" 2>&1 & two=$!
        sleep "$before"
        kill -KILL $one 2>/dev/null
        "$work/trainer" $few >"$work/c" 2>&1 & three=$!
        sleep "$after"
        kill -KILL $two $three 2>/dev/null
        wait $one $two $three 2>/dev/null
        if ! "$work/trainer" --stop-after 1 $few >"$work/d" 2>&1 || ! grep -q '^going on from' "$work/d"; then
            echo "round $done lost the checkpoint" >>"$work/checkpoint"
            cat "$work/d" >>"$work/checkpoint"
            return 1
        fi
        done=$((done + 1))
    done <"$work/times"
    ls "$work/point" >>"$work/checkpoint"
    [ $done -eq "$rounds" ] && [ "$(ls "$work/point" | wc -l)" -le 2 ] # with what the last one killed has left
}

# foreign COMPILER EMULATOR OPTION...: statically, so that nothing of that machine need be installed but its C library.
foreign() {
    compiler=$1 emulator=$2
    shift 2
    names= files=
    for suite in pack metadata schedule check steps $([ "$emulator" = qemu-i386 ] && echo boundaries); do
        names="$names X($suite)"
        files="$files tests/unit/test_$suite.c"
    done
    files="$files $(printf '%s ' tests/reference/*.c)" # all of them, as the Makefile takes them
    if ! has "$compiler" || ! has "$emulator"; then
        echo "there is no $compiler or no $emulator here"
        return 1
    fi
    "$compiler" -std=c99 -I. -I"$build/test" -O1 -static "$@" "-DSUITES(X)=$names" tests/unit/main.c $files \
        tests/implementation.c -o "$work/program" -lm || return 1
    if "$work/program" --list >"$work/said" 2>&1; then emulator=env; fi # an x86-64 may run 32-bit programs itself
    env FULL= timeout "$seconds" "$emulator" "$work/program" >"$work/said" || {
        grep -v ' ok' "$work/said"
        return 1
    }
}

part_foreign() {
    {
        foreign aarch64-linux-gnu-gcc qemu-aarch64 && foreign s390x-linux-gnu-gcc qemu-s390x &&
            foreign i686-linux-gnu-gcc qemu-i386 -msse2 -mfpmath=sse
    } >"$work/foreign" 2>&1
}

tool_of() {
    case $1 in foreign) echo qemu-s390x ;; checkpoint) echo cc ;; clang | tools | threads | trainer) echo clang ;; *) echo "$1" ;; esac
}

for part in "$@"; do
    if ! has "$(tool_of "$part")"; then
        echo "skipped: $part, for want of $(tool_of "$part")"
        skipped=$((skipped + 1))
        continue
    fi
    "part_$part"
    count "$part" $?
done
if [ "$skipped" -gt 0 ]; then
    printf '%s passed, %s failed, %s skipped\n' "$passed" "$failed" "$skipped"
else
    printf '%s passed, %s failed\n' "$passed" "$failed"
fi
[ "$failed" -eq 0 ]
