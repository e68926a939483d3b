#!/bin/sh
# compile.sh - compiles chunkflow.h and tools/chunkflow_tune.h in every way that their users do, and looks at what comes
# out.
#
#     tests/meta/compile.sh [FILTER]
#
# C99, C11 and C++11 with gcc and clang, with all warnings as errors, with and without NDEBUG; several files in one
# program, C and C++ mixed; static mode; linkage by the program; exported symbols and writable data; the program in the
# header's own comment, the loop in the README and the first command of the examples; Windows' compiler; the same bits
# from every compiler, plain or optimised; what comments promise of unvalidated objects. Builds under
# ${BUILD:-build}/compile. Prints "ok NAME", "FAIL NAME: why" or "skip NAME: why" for each test, then the counts; with
# FILTER only the tests whose name contains it.
#
# FULL=1: all of that. Otherwise each compiler compiles and runs C99, checks the syntax of C11 and C++11, and is
# compared bit for bit plain and optimised for this machine, which is also where its optimiser may warn; and gcc alone is
# asked in how many ways the headers can be linked.
#
# Flags are split into words on purpose.
# shellcheck disable=SC2046,SC2086
set -u
. "$(dirname "$0")/../helpers.sh"

HERE=$(cd "$(dirname "$0")" && pwd) || exit 1
TOP=$(dirname "$(dirname "$HERE")")
SOURCES=$HERE/compile
OUT=${BUILD:-build}/compile
FILTER=${1:-}
WARN="-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wsign-conversion -Werror"
mkdir -p "$OUT" || exit 1

# build NAME PROGRAM-OR-OBJECT COMMAND...: runs a compiler; any output counts as failure, warnings being errors anyway.
build() {
    name=$1
    shift
    "$@" >"$OUT/$name.log" 2>&1 && [ ! -s "$OUT/$name.log" ] && return 0
    fail "$name" "does not compile cleanly: $*" "$OUT/$name.log"
    return 1
}

# object NAME COMPILER FLAG... FILE: compiles a file, and leaves where in $object. What is the same text once it is
# preprocessed (with NDEBUG and without, say) is compiled once by a compiler with the same flags. Text that is C99 and
# C11 is translated once as well; what a compiler says about it is asked under each of the two.
object() {
    name=$1
    shift
    build "$name" "$@" -E -P -o "$OUT/text" || return 1
    flags=
    for word in "$@"; do
        case $word in
            -D* | -I* | *.c | *.cc) ;;
            -std=c11) flags="$flags -std=c99" ;;
            *) flags="$flags $word" ;;
        esac
    done
    object=$OUT/object-$({ echo "$flags"; cat "$OUT/text"; } | cksum | tr ' ' -).o
    if [ ! -f "$object" ]; then build "$name" "$@" -c -o "$object"
    else case " $* " in *" -std=c11 "*) build "$name" "$@" -fsyntax-only ;; esac; fi
}

# run NAME PROGRAM EXPECTED-OUTPUT
run() {
    "$2" >"$OUT/$1.out" 2>&1
    status=$?
    if [ $status -ne 0 ]; then
        fail "$1" "ended with status $status" "$OUT/$1.out"
    elif [ "$(cat "$OUT/$1.out")" != "$3" ]; then
        fail "$1" "printed something else than \"$3\"" "$OUT/$1.out"
    else
        ok "$1"
    fi
}

# language_flags STANDARD: how to compile a .c file as that language
language_flags() {
    case $1 in
        c++*) printf '%s' "-std=$1 -x c++" ;;
        *) printf '%s' "-std=$1 -Wstrict-prototypes -Wmissing-prototypes -x c" ;;
    esac
}

# Without position-independent code, so that constant tables of addresses count as what they are when symbols are looked
# at: read-only. Nearly everything is compiled so, since the same few objects are looked at, linked and compared.
PLAIN="-O0 -fno-pic -fno-pie"
# -O3 compiles half as long again as -O2, which makes vector code as well.
HIGHEST="-O2 -march=native -ffp-contract=fast"
if full; then HIGHEST="-O3 -march=native -ffp-contract=fast"; fi

# Optimised code, with the warnings that only gcc's optimiser gives (clang gives all of its own before), once for each
# library: C99, C11 and C++ are the same to it. Elsewhere NDEBUG is compiled without; same_bits runs what clang
# optimises.
mode_flags() { # mode, compiler and standard, or "plain"
    case $1-$2 in
        debug-*) printf '%s' "$PLAIN" ;;
        ndebug-gcc-c99) if full; then printf '%s' "-O2 -fno-pie -DNDEBUG"; else printf '%s' "$PLAIN -DNDEBUG"; fi ;;
        ndebug-*) printf '%s' "$PLAIN -DNDEBUG" ;;
    esac
}

# The C or the C++ driver of a compiler, by the language that is compiled.
driver() { # compiler, standard
    case $1-$2 in
        gcc-c++*) printf 'g++' ;;
        clang-c++*) printf 'clang++' ;;
        *) printf '%s' "$1" ;;
    esac
}

# Where the tuner is: beside its own header, and with chunkflow.h on the path.
TUNE="-I$TOP -I$TOP/tools"

# Both libraries as a compiler reads them in another language.
syntax() { # compiler, standard
    name=syntax-$1-$2
    wanted "$name" || return 0
    build "$name" $(driver "$1" "$2") $(language_flags "$2") $WARN $TUNE -fsyntax-only "$SOURCES/one_file.c" \
        "$SOURCES/tune_one_file.c" "$SOURCES/taken_words.c" && ok "$name"
}

one_file() { # compiler, standard, mode
    name=one-file-$1-$2-$3
    wanted "$name" || return 0
    object "$name" $(driver "$1" "$2") $(language_flags "$2") $(mode_flags "$3" "$1-$2") $WARN -I"$TOP" \
        "$SOURCES/one_file.c" &&
        build "$name" $(driver "$1" "$2") -no-pie "$object" -o "$OUT/$name" && run "$name" "$OUT/$name" "passes 13"
}

# A file that has an implementation in its text, linked with the one of the other tests: with this, the header and the
# tuner's give it their declarations only, so that a program from a comment need not compile them once more. one_file
# and tune_one_file show that it could.
LINKED="-DCHUNKFLOW_IMPLEMENTED -DCHUNKFLOW_API=extern -DCHUNKFLOW_TUNE_IMPLEMENTED -DCHUNKFLOW_TUNE_API=extern"

# library NAME COMPILER LEVEL: that implementation as an object, in $library
library() {
    object "$1" "$2" $(language_flags c99) $3 $WARN -I"$TOP" "$SOURCES/implementation.c" || return 1
    library=$object
}

# What it shows is that the two files fit together, optimised or not.
two_files() { # compiler, mode
    name=two-files-$1-$2
    wanted "$name" || return 0
    object "$name" "$1" $(language_flags c99) $(mode_flags "$2" plain) $WARN -I"$TOP" "$SOURCES/implementation.c" &&
        build "$name" "$1" $(language_flags c99) $(mode_flags "$2" plain) $WARN -I"$TOP" "$SOURCES/user.c" \
            -no-pie -x none "$object" -o "$OUT/$name" && run "$name" "$OUT/$name" "chunks 2"
}

# A C++ program on top of the library compiled as C, and as C++.
cplusplus_user() { # compiler, standard of the implementation
    name=c++-user-$1-$2
    wanted "$name" || return 0
    object "$name" $(driver "$1" "$2") $(language_flags "$2") $PLAIN $WARN -I"$TOP" "$SOURCES/implementation.c" || return 0
    build "$name" $(driver "$1" c++11) -std=c++11 $PLAIN -no-pie $WARN -I"$TOP" "$SOURCES/user.cc" "$object" \
        -o "$OUT/$name" && run "$name" "$OUT/$name" "chunks 2"
}

static_mode() { # compiler, standard, mode
    name=static-$1-$2-$3
    wanted "$name" || return 0
    object "$name" $(driver "$1" "$2") $(language_flags "$2") $(mode_flags "$3" plain) $WARN -I"$TOP" \
        "$SOURCES/static_one.c" || return 0
    static_one=$object
    object "$name" $(driver "$1" "$2") $(language_flags "$2") $(mode_flags "$3" plain) $WARN -I"$TOP" \
        "$SOURCES/static_two.c" || return 0
    build "$name" $(driver "$1" "$2") -no-pie "$static_one" "$object" -o "$OUT/$name" || return 0
    if nm -g --defined-only "$OUT/$name" | grep -q ' cf_'; then
        fail "$name" "a function of the library is visible outside its file"
        return 0
    fi
    run "$name" "$OUT/$name" "pairs 12 10"
}

static_unused() { # compiler
    name=static-unused-$1
    wanted "$name" || return 0
    build "$name" "$1" $(language_flags c99) -O2 $WARN -I"$TOP" -c "$SOURCES/static_unused.c" -o "$OUT/$name.o" &&
        ok "$name"
}

# What a user of the declarations alone is told: nothing, whatever is switched on.
declarations() { # compiler
    name=declarations-$1
    wanted "$name" || return 0
    case " $standards " in *" c++11 "*) ;; *) return 0 ;; esac # that it is skipped has been said
    every="-Wall -Wextra -Wpedantic -Wold-style-cast -Wuseless-cast"
    case $1 in clang) every=-Weverything ;; esac
    printf '%s\n' '#include "chunkflow.h"' '#include "tools/chunkflow_tune.h"' '#define CHUNKFLOW_CUDA_HEADER_ONLY' \
        '#include "chunkflow_cuda.cu"' 'int main() { return cf_result_name(CF_OK) == nullptr; }' >"$OUT/$name.cc"
    build "$name" $(driver "$1" c++11) -std=c++11 $every -Wno-c++98-compat -Werror -I"$TOP" -fsyntax-only \
        "$OUT/$name.cc" && ok "$name"
}

# Other arithmetic than IEEE 754's: options that let a NaN pass for a cost or another order of passes come out are
# refused by name, of both libraries. Those that change nothing are not.
refused_maths() { # compiler
    name=maths-$1
    wanted "$name" || return 0
    options="-Ofast -ffast-math"
    case $1 in gcc) options="$options -funsafe-math-optimizations -fno-signed-zeros -freciprocal-math -mfpmath=387
        -ffast-math,-fno-finite-math-only -fassociative-math,-fno-signed-zeros,-fno-trapping-math
        -fsingle-precision-constant" ;; esac
    for option in $options; do
        for source in implementation tune_implementation; do
            flags=$(echo "$option" | tr , ' ')
            if "$1" -std=c99 -O2 $flags $TUNE -fsyntax-only "$SOURCES/$source.c" >"$OUT/$name.log" 2>&1; then
                case $option in
                    -mfpmath*) echo 'int main(void) { return __FLT_EVAL_METHOD__; }' >"$OUT/$name.c"
                        "$1" $flags -E "$OUT/$name.c" 2>&1 | grep -q 'return 2' || continue ;; # not x86
                esac
                fail "$name" "$flags is accepted: $source.c"
                return 0
            elif ! grep -q 'error.*\(IEEE 754\|computed as doubles\|constants_are_doubles\)' "$OUT/$name.log"; then
                fail "$name" "$flags is refused with other words: $source.c" "$OUT/$name.log"
                return 0
            fi
        done
    done
    ok "$name"
}

# The same of CUDA's companion, in a program that has no CUDA: declarations and no more, as C and as C++.
cuda_declarations() { # compiler, standard
    name=cuda-declarations-$1-$2
    wanted "$name" || return 0
    build "$name" $(driver "$1" "$2") $(language_flags "$2") -O0 $WARN -I"$TOP" -c "$SOURCES/cuda_user.c" \
        -o "$OUT/$name.o" || return 0
    nm --defined-only "$OUT/$name.o" | awk '$3 != "attend" && $2 !~ /[rR]/' >"$OUT/$name.defined"
    if [ -s "$OUT/$name.defined" ]; then fail "$name" "it defines more than its own function:" "$OUT/$name.defined"
    else ok "$name"; fi
}

# Names of the functions that a header declares.
declared() { # prefix of its macros, file
    sed -n "/^#endif \/\* $1_H \*\//q; s/^$1_API .*[ *]\(cf_[a-z0-9_]*\)(.*/\1/p" "$TOP/$2" | sort -u
}

own_linkage() { # compiler
    name=own-linkage-$1
    wanted "$name" || return 0
    build "$name" "$1" $(language_flags c99) -O0 -fPIC -shared -fvisibility=hidden $WARN -I"$TOP" \
        "$SOURCES/own_linkage.c" -o "$OUT/$name.so" || return 0
    nm -D --defined-only "$OUT/$name.so" | awk '$2 == "T" { print $3 }' | grep -v -e '^_init$' -e '^_fini$' | sort \
        >"$OUT/$name.exported"
    declared CHUNKFLOW chunkflow.h >"$OUT/$name.declared"
    if [ ! -s "$OUT/$name.declared" ]; then
        fail "$name" "found no declarations in the header"
    elif ! diff "$OUT/$name.declared" "$OUT/$name.exported" >"$OUT/$name.diff"; then
        fail "$name" "declared and exported functions differ" "$OUT/$name.diff"
    else
        ok "$name"
    fi
}

# The comment at the top names every public function once, and so says of each how stable it is.
mapped() {
    name=map
    wanted "$name" || return 0
    sed -n '/The functions by task/,/Attention, carried state/p' "$TOP/chunkflow.h" | grep -o '\bcf_[a-z0-9_]*' |
        grep -v -e '^cf_error$' -e '^cf_allocator$' | sort >"$OUT/$name.said"
    declared CHUNKFLOW chunkflow.h >"$OUT/$name.declared"
    if diff "$OUT/$name.declared" "$OUT/$name.said" >"$OUT/$name.diff"; then ok "$name"
    else fail "$name" "the map at the top and the declarations differ" "$OUT/$name.diff"; fi
}

# What every function that takes a plan, schedule or graph says of it in the comment before it: "FUNCTION must" or
# "FUNCTION may". Functions one after the other share a comment; those that free want what was made.
promises() {
    for file in chunkflow.h chunkflow_cuda.cu; do sed '/^#endif .* CHUNKFLOW\(_CUDA\)\{0,1\}_H /q' "$TOP/$file"; done | awk '
        / \{$/ || /^\/\*/ { comment = "" }
        /^\/\*/, /\*\/$/ { comment = comment " " $0; next }
        /^CHUNKFLOW(_CUDA)?_API / { declaration = "" }
        { declaration = declaration " " $0 }
        declaration ~ /_API .*\(.*const cf_(plan|schedule|graph) \*.*;$/ {
            sub(/\(.*/, "", declaration)
            sub(/.*[ *]/, "", declaration)
            gsub(/ +/, " ", comment)
            print declaration, (comment ~ /must be sound/ ? "must" : ""), (comment ~ /may be unvalidated/ ? "may" : "")
        }
        /;$/ { declaration = "" } # or a member of a struct behind the function would count as an argument'
}

# Each says so, and what may be unvalidated is damaged by the fuzzer, which `make test` replays.
promised() {
    name=promises
    wanted "$name" || return 0
    promises >"$OUT/$name.found"
    awk 'NF < 2 { print $1 ": does not say whether its object must be sound or may be unvalidated" }' \
        "$OUT/$name.found" >"$OUT/$name.wrong"
    for function in $(sed -n 's/ .*may$//p' "$OUT/$name.found"); do
        grep -q "[^a-z_]$function(" "$TOP/tests/fuzz/fuzz_hostile.c" || echo "$function: not in fuzz_hostile.c"
    done >>"$OUT/$name.wrong"
    if [ "$(wc -l <"$OUT/$name.found")" -lt 20 ]; then
        fail "$name" "found hardly any functions" "$OUT/$name.found"
    elif [ -s "$OUT/$name.wrong" ]; then
        fail "$name" "a promise is missing, or not tested:" "$OUT/$name.wrong"
    else
        ok "$name"
    fi
}

symbols() { # compiler, name, source, prefix of the header's macros, header
    name=$2-$1
    wanted "$name" || return 0
    object "$name" "$1" $(language_flags c99) $PLAIN $WARN $TUNE "$SOURCES/$3" || return 0
    nm "$object" >"$OUT/$name.nm"
    nm -g --defined-only "$object" | awk '{ print $3 }' | sort >"$OUT/$name.exported"
    declared "$4" "$5" >"$OUT/$name.declared"
    grep -v '^cf_' "$OUT/$name.exported" >"$OUT/$name.foreign"
    grep -E ' [BbCDdGgSs] ' "$OUT/$name.nm" >"$OUT/$name.writable"
    if [ ! -s "$OUT/$name.exported" ]; then
        fail "$name" "nm shows no symbols"
    elif [ -s "$OUT/$name.foreign" ] || grep -q ' U cf__' "$OUT/$name.nm"; then
        fail "$name" "exported without the prefix cf_, or private names of another header:" "$OUT/$name.foreign"
    elif [ -s "$OUT/$name.writable" ]; then
        fail "$name" "writable globals:" "$OUT/$name.writable"
    elif ! diff "$OUT/$name.declared" "$OUT/$name.exported" >"$OUT/$name.diff"; then
        fail "$name" "declared and exported functions differ" "$OUT/$name.diff"
    else
        ok "$name"
    fi
}

# The program in the header's comment, as a reader would copy it.
header_example() { # compiler
    name=header-example-$1
    wanted "$name" || return 0
    awk '/A complete program/ { on = 1; next } on && /^   [^ ]/ { exit } on { print }' "$TOP/chunkflow.h" \
        >"$OUT/$name.c"
    if ! grep -q 'int main' "$OUT/$name.c"; then
        fail "$name" "no program found in the header's comment"
        return 0
    fi
    library "$name" "$1" "$PLAIN" && build "$name" "$1" -std=c99 $PLAIN -no-pie $WARN $LINKED -I"$TOP" "$OUT/$name.c" "$library" \
        -o "$OUT/$name" || return 0
    "$OUT/$name" >"$OUT/$name.out" 2>&1
    status=$?
    if [ $status -ne 0 ]; then
        fail "$name" "ended with status $status" "$OUT/$name.out"
    elif [ "$(grep -c ' chunk [0-9]*$' "$OUT/$name.out")" -ne 13 ] || [ "$(wc -l <"$OUT/$name.out")" -ne 13 ]; then
        fail "$name" "did not print its 13 passes" "$OUT/$name.out"
    else
        ok "$name"
    fi
}

# The loop in the README, as a reader would copy it: batches that go well, then one that does not, after which nothing
# may run any more.
readme_loop() { # compiler
    name=readme-loop-$1
    wanted "$name" || return 0
    cat >"$OUT/$name.c" <<'END'
#define CHUNKFLOW_IMPLEMENTATION
#include "chunkflow.h"
#include <stdio.h>
typedef struct trainer {
    int64_t lengths[4], wrong_batch;
    int passes, updates;
    cf_capacity need;
} trainer;
static cf_result grow_buffers(trainer *t, cf_error *error) {
    return t->need.rows < 1 ? cf_refuse(error, CF_ERROR_CALLBACK, "rows", -1, "there are none") : CF_OK;
}
static cf_result run_pass(trainer *t, const cf_plan *plan, const cf_step *step, cf_error *error) {
    if (plan->chunks[step->action.chunk].tokens < 1) return cf_refuse(error, CF_ERROR_CALLBACK, "chunk", 0, "is empty");
    return ++t->passes, CF_OK;
}
static int64_t load_batch(trainer *t, int64_t batch) {
    t->lengths[0] = 900, t->lengths[1] = 14000, t->lengths[2] = 350, t->lengths[3] = 2600 + batch;
    if (batch == t->wrong_batch) t->lengths[1] = -1;
    return 4;
}
static void update_weights(trainer *t) { t->updates++; }
int train(trainer *t, int64_t n_batches);
END
    sed -n '/^```c$/,/^```$/{/^```/!p;}' "$TOP/README.md" >>"$OUT/$name.c"
    cat >>"$OUT/$name.c" <<'END'
int main(void) {
    trainer good = {.wrong_batch = -1}, bad = {.wrong_batch = 1};
    int results[2];
    results[0] = train(&good, 3);
    results[1] = train(&bad, 3);
    printf("%d: %d updates, %d passes\n", results[0], good.updates, good.passes);
    printf("%d: %d updates, %d passes\n", results[1], bad.updates, bad.passes);
    return 0;
}
END
    library "$name" "$1" "$PLAIN" && build "$name" "$1" -std=c99 $PLAIN -no-pie $WARN $LINKED -I"$TOP" "$OUT/$name.c" "$library" \
        -o "$OUT/$name" || return 0
    "$OUT/$name" >"$OUT/$name.out" 2>"$OUT/$name.err"
    if [ "$(cat "$OUT/$name.out")" != "0: 3 updates, 18 passes
1: 1 updates, 6 passes" ]; then
        fail "$name" "other passes or updates ran" "$OUT/$name.out"
    elif ! grep -q '^batch 1: lengths' "$OUT/$name.err" || [ "$(wc -l <"$OUT/$name.err")" -ne 1 ]; then
        fail "$name" "it did not say what was wrong with batch 1" "$OUT/$name.err"
    else
        ok "$name"
    fi
}

# The tuner in a file of its own, which sees no more of chunkflow.h than its declarations; both implementations in one
# file; private to the file; and the program in its comment.
tune_files() { # compiler, standard, mode
    name=tune-$1-$2-$3
    wanted "$name" || return 0
    object "$name" $(driver "$1" "$2") $(language_flags "$2") $(mode_flags "$3" "$1-$2") $WARN $TUNE \
        "$SOURCES/tune_implementation.c" || return 0
    tuner=$object
    object "$name" $(driver "$1" "$2") $(language_flags "$2") $(mode_flags "$3" plain) $WARN -I"$TOP" \
        "$SOURCES/implementation.c" &&
        build "$name" $(driver "$1" "$2") $(language_flags "$2") $(mode_flags "$3" plain) $WARN $TUNE \
            "$SOURCES/tune_user.c" -no-pie -x none "$tuner" "$object" -o "$OUT/$name" &&
        run "$name" "$OUT/$name" "max_tries 64, h200"
}

tune_one_file() { # compiler, standard, mode
    name=tune-one-file-$1-$2-$3
    wanted "$name" || return 0
    object "$name" $(driver "$1" "$2") $(language_flags "$2") $(mode_flags "$3" plain) $WARN $TUNE \
        "$SOURCES/tune_one_file.c" &&
        build "$name" $(driver "$1" "$2") -no-pie "$object" -o "$OUT/$name" || return 0
    if nm -g --defined-only "$OUT/$name" | grep -q ' cf_'; then
        fail "$name" "a function of a library is visible outside its file"
        return 0
    fi
    run "$name" "$OUT/$name" "max_tries 64, h200"
}

# With the library optimised, because it searches through many schedules.
tune_example() { # compiler
    name=tune-example-$1
    wanted "$name" || return 0
    awk '/A complete program/ { on = 1; next } on && /^   [^ ]/ { exit } on { print }' "$TOP/tools/chunkflow_tune.h" \
        >"$OUT/$name.c"
    library "$name" "$1" "$HIGHEST" && object "$name" "$1" $(language_flags c99) $PLAIN $WARN $TUNE \
        "$SOURCES/tune_implementation.c" && build "$name" "$1" -std=c99 $PLAIN -no-pie $WARN $LINKED $TUNE "$OUT/$name.c" \
        "$library" "$object" -o "$OUT/$name" || return 0
    if "$OUT/$name" >"$OUT/$name.out" 2>&1 && grep -q '^ChunkSize [0-9]*, K [0-9]*, [a-z0-9]*: ' "$OUT/$name.out"; then
        ok "$name"
    else
        fail "$name" "found no setting" "$OUT/$name.out"
    fi
}

# Prints the options of an optimised library. clang's include options that change floating-point arithmetic. In the short
# run clang compiles with -O1, which takes half as long.
highest() { # compiler
    if [ "$1" = clang ] && ! full; then printf '%s' "-O1 -march=native -ffp-contract=fast -funsafe-math-optimizations"
    else printf '%s' "$HIGHEST"; fi
}

# The order of evaluation, fused multiply-adds and vector code must not change a bit: one number over the plans,
# schedules and timelines of many batches, the same from every build of every compiler. The first build says which.
same_bits() { # compiler
    name=same-bits-$1
    wanted "$name" || return 0
    n_cases=200
    if ! full; then n_cases=50; fi
    # clang defines no macro for the last two, and the library undoes them.
    for level in "$PLAIN" "-O1" "-O2" "-O3" "$HIGHEST" "-O2 -funsafe-math-optimizations" \
        "-O2 -ffast-math -fno-finite-math-only"; do
        case $level-$1 in
            *math*-gcc) continue ;;
            -O2\ -f* | -O[123]-*) full || continue ;;
            "$HIGHEST-"*) level=$(highest "$1") ;;
        esac
        library "$name" "$1" "$level" && build "$name" "$1" -std=c99 $level -no-pie $WARN $LINKED -I"$TOP" \
            "$HERE/record.c" "$library" -o "$OUT/$name" || return 0
        if ! "$OUT/$name" --hash $n_cases >"$OUT/$name.out"; then
            fail "$name" "with $level: ended with an error"
            return 0
        elif ! grep -q "^$n_cases cases [0-9a-f]\{16\}\$" "$OUT/$name.out"; then
            fail "$name" "with $level: printed something else than a hash" "$OUT/$name.out"
            return 0
        fi
        [ -f "$OUT/same-bits.reference" ] || cp "$OUT/$name.out" "$OUT/same-bits.reference"
        if ! cmp -s "$OUT/same-bits.reference" "$OUT/$name.out"; then
            fail "$name" "with $level: decides otherwise than the first build"
            return 0
        fi
    done
    ok "$name"
}

# The same of the tuner: what it finds for a few models, to the last bit.
same_tuning() { # compiler
    name=same-tuning-$1
    wanted "$name" || return 0
    for level in "$PLAIN" "$(highest "$1")"; do
        library "$name" "$1" "$(highest "$1")" && object "$name" "$1" $(language_flags c99) $level $WARN $TUNE \
            "$SOURCES/tune_implementation.c" && build "$name" "$1" -std=c99 $PLAIN -no-pie $WARN $LINKED $TUNE \
            "$SOURCES/tune_bits.c" "$library" "$object" -o "$OUT/$name" || return 0
        if ! "$OUT/$name" >"$OUT/$name.out" 2>&1; then
            fail "$name" "with $level: ended with an error" "$OUT/$name.out"
            return 0
        fi
        [ -f "$OUT/same-tuning.reference" ] || cp "$OUT/$name.out" "$OUT/same-tuning.reference"
        if ! diff "$OUT/same-tuning.reference" "$OUT/$name.out" >"$OUT/$name.diff"; then
            fail "$name" "with $level: finds other numbers than the first build" "$OUT/$name.diff"
            return 0
        fi
    done
    ok "$name"
}

# The first things that a reader copies are also C++: the README's loop, written by readme_loop, and the smallest examples.
copied_as_cplusplus() { # compiler
    name=c++20-$1
    wanted "$name" || return 0
    [ -f "$OUT/readme-loop-$1.c" ] || readme_loop "$1"
    for file in "$OUT/readme-loop-$1.c" "$TOP/examples/hello.c" "$TOP/examples/hello_tree.c"; do
        build "$name" $(driver "$1" c++20) -std=c++20 $WARN -Wno-missing-field-initializers $LINKED -I"$TOP" -x c++ \
            -fsyntax-only "$file" || return 0
    done
    ok "$name"
}

# The command at the top of an example, where there is nothing but what a fresh clone has.
first_commands() {
    wanted first-commands || return 0
    clone=$OUT/clone
    rm -rf "$clone"
    mkdir -p "$clone" && cp -R "$TOP/chunkflow.h" "$TOP/examples" "$clone" || return 0
    for example in hello hello_tree train_tiny; do
        command=$(sed -n '2s/^ *\(cc .*[^ ]\)\( \*\/\)$/\1/p; 2s/^ *\(cc .*[^*][^/]\)$/\1/p' "$TOP/examples/$example.c")
        if [ -z "$command" ]; then
            fail first-commands "$example.c does not begin with the command that builds it"
            return 0
        fi
        if ! full; then command=$(echo "$command" | sed 's/-O2/-O0/'); fi # half of all that it takes
        (cd "$clone" && sh -c "$command") >"$OUT/first-commands.log" 2>&1 ||
            { fail first-commands "fails in a fresh clone: $command" "$OUT/first-commands.log"; return 0; }
    done
    command=$(sed -n 's/^    \(mkdir -p build && cc .*\)$/\1/p' "$TOP/tools/guide/train-in-c.md")
    if [ -z "$command" ] || ! (cd "$clone" && sh -c "$command") >"$OUT/first-commands.log" 2>&1; then
        fail first-commands "train-in-c.md begins with a command that fails in a fresh clone: $command" "$OUT/first-commands.log"
        return 0
    fi
    ok first-commands
}

# Windows' compiler takes both libraries, also behind <windows.h>, and links a program. It is not run. In the short run C
# makes the program, and C++ reads what stands behind <windows.h>.
windows() {
    wanted windows || return 0
    if ! command -v x86_64-w64-mingw32-gcc >/dev/null 2>&1 || ! command -v x86_64-w64-mingw32-g++ >/dev/null 2>&1; then
        skip windows "there is no mingw-w64 here"
        return 0
    fi
    for compile in gcc g++; do
        case $compile in gcc) language="-std=c99 -x c" ;; *) language="-std=c++11 -x c++" ;; esac
        mingw="x86_64-w64-mingw32-$compile $language $WARN $TUNE"
        for file in implementation tune_implementation; do
            if [ $compile = g++ ] || full; then
                build windows $mingw -include windows.h -fsyntax-only "$SOURCES/$file.c" || return 0
            fi
            if [ $compile = g++ ] && ! full; then continue; fi
            build windows $mingw -c "$SOURCES/$file.c" -o "$OUT/windows-$file.o" || return 0
        done
        if [ $compile = g++ ] && ! full; then continue; fi
        build windows x86_64-w64-mingw32-$compile "$OUT/windows-implementation.o" "$OUT/windows-tune_implementation.o" \
            -x c -std=c99 $WARN $LINKED $TUNE "$SOURCES/tune_bits.c" -o "$OUT/windows.exe" || return 0
    done
    ok windows
}

# A third compiler takes both libraries and the command.
tcc_reads_them() {
    wanted tcc || return 0
    if ! command -v tcc >/dev/null 2>&1; then
        skip tcc "there is no tcc here"
        return 0
    fi
    for file in "$SOURCES/implementation.c" "$SOURCES/tune_implementation.c"; do
        build tcc tcc -std=c99 $TUNE -c "$file" -o "$OUT/tcc.o" || return 0
    done
    for file in "$TOP"/tools/command/*.c "$TOP"/tools/report/*.c; do
        build tcc tcc -std=c99 $LINKED $TUNE -c "$file" -o "$OUT/tcc.o" || return 0
    done
    ok tcc
}

mapped
promised
tcc_reads_them
first_commands
windows
rm -f "$OUT"/same-*.reference "$OUT"/object-*.o
# by_gcc COMMAND...: for each compiler with FULL=1, else for gcc
by_gcc() { if [ $compiler = gcc ] || full; then "$@"; fi; }

for compiler in gcc clang; do
    if ! command -v $compiler >/dev/null 2>&1; then
        wanted $compiler && skip "all-of-$compiler" "there is no $compiler here"
        continue
    fi
    standards="c99 c11"
    if command -v "$(driver $compiler c++11)" >/dev/null 2>&1; then standards="$standards c++11"
    else skip "c++11-of-$compiler" "there is no $(driver $compiler c++11) here"; fi
    for standard in $standards; do
        cuda_declarations $compiler $standard
        if [ $standard != c99 ] && ! full; then
            syntax $compiler $standard
            continue
        fi
        for mode in debug ndebug; do
            one_file $compiler $standard $mode
            by_gcc static_mode $compiler $standard $mode
            tune_files $compiler $standard $mode
            by_gcc tune_one_file $compiler $standard $mode
        done
        case $standards in *c++11*) cplusplus_user $compiler $standard ;; esac
    done
    by_gcc two_files $compiler debug
    by_gcc two_files $compiler ndebug
    static_unused $compiler
    by_gcc own_linkage $compiler
    symbols $compiler symbols implementation.c CHUNKFLOW chunkflow.h
    symbols $compiler tune-symbols tune_implementation.c CHUNKFLOW_TUNE tools/chunkflow_tune.h
    header_example $compiler
    declarations $compiler
    refused_maths $compiler
    by_gcc tune_example $compiler
    readme_loop $compiler
    case $standards in *c++11*) copied_as_cplusplus $compiler ;; esac
    same_bits $compiler
    same_tuning $compiler
done

left_out "C11 and C++11 compiled and run, gcc's -O2 with NDEBUG, clang's linking and tuner, three levels, \
-O3 with vector code and 150 cases of same bits"
finish
