# gpu_record_lib.sh - the machinery of gpu_record.sh: options, a record with a line for each result as it comes,
# programs that start here, and steps with a limit each, of which none stops the next one. Not a program: gpu_record.sh reads it
# with `.`, sets the defaults of its options (out, resume, programs, minutes of this call, limit in seconds of a step),
# calls read_options, open_record and describe_device in this order, and has take_line LINE, which calls emit or
# take_test for a line that is a result.

# ---- options ----

usage() {
    printf 'gpu_record: %s; the options are in the first lines of tools/device/gpu_record.sh\n' "$1" >&2
    exit 2
}

# --small, and of each NAME an option --NAME VALUE, which sets the variable.
read_options() { # NAMES ARGUMENT...
    names=$1
    shift
    while [ $# -gt 0 ]; do
        if [ "$1" = --small ]; then
            small=yes
            shift
            continue
        fi
        option=${1#--}
        case $1 in --*[!a-z]* | --) usage "unknown option $1" ;; esac
        case " $names " in *" $option "*) ;; *) usage "unknown option $1" ;; esac
        [ "$1" = "--$option" ] || usage "unknown option $1"
        [ $# -ge 2 ] || usage "$1 wants a value"
        eval "$option=\$2"
        shift 2
    done
}

need_numbers() { # VALUE...
    for number in "$@"; do
        printf '%s\n' "$number" | grep -qE '^[0-9]+(\.[0-9]+)?$' || usage "$number is no number"
    done
}

need_files() { # FILE...: those that are named can be read
    for file in "$@"; do [ -z "$file" ] || [ -r "$file" ] || usage "cannot read $file"; done
}

# ---- the record ----

at_exit() { :; } # who reads this may have another

# Goes on from the record of an earlier call, if one is named, and begins the time of this one.
open_record() {
    mkdir -p "$out" || exit 2
    # In memory, where that can be: the disk may be full.
    work=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d) || exit 2
    sampler=
    running=
    trap '[ -z "$sampler" ] || kill "$sampler" 2>/dev/null; at_exit; cut_files; rm -rf "$work"' EXIT
    trap 'stop 129' HUP
    trap 'stop 130' INT
    trap 'stop 143' TERM
    record=$out/record.jsonl
    log=$out/log.txt
    : >"$work/record"
    : >"$work/log"
    # A device that went away may have left half a line at the end.
    [ -z "$resume" ] || grep '}$' "$resume" >"$work/record"
    [ ! -r "${resume%record.jsonl}log.txt" ] || [ -z "$resume" ] || cp "${resume%record.jsonl}log.txt" "$work/log"
    cp "$work/record" "$work/record.all"
    cp "$work/record" "$record"
    cp "$work/log" "$log"
    begin=$(now)
    end=$(awk -v begin="$begin" -v minutes="$minutes" 'BEGIN { printf "%d", begin + 60 * minutes }')
    failures=0
    left_over=
}

now() { date +%s; }

# On a signal: the running step ends, with all that it started (timeout, whose process group they are, hands the signal
# on; who stays is killed), and is left for the next call.
stop() { # STATUS
    trap '' HUP INT TERM
    if [ -n "$running" ]; then
        kill "$running" 2>/dev/null
        wait "$running" 2>/dev/null
        kill -s KILL -- "-$running" 2>/dev/null
        emit "\"done\": false, \"seconds\": $(($(now) - started))" "ended by a signal"
        printf 'gpu_record: ended by a signal in step %s; go on with --resume %s\n' "$step" "$record" | tee -a "$log"
    fi
    exit "$1"
}

# ---- lines of the record ----

# A text as JSON wants it between quotes.
quoted() {
    printf '%s' "$1" | tr '\000-\037' ' ' | cut -c 1-400 | sed 's/[\\"]/\\&/g'
}

# A number as JSON has it: 1,234 and +5 become 1234 and 5; what is none (nan, inf) becomes null.
number() {
    plain=$(printf '%s' "$1" | tr -d ,)
    plain=${plain#+}
    if printf '%s\n' "$plain" | grep -qE '^-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?$'; then printf '%s' "$plain"
    else printf null; fi
}

ask_device() { # FIELD: of nvidia-smi, of the first device
    nvidia-smi --query-gpu="$1" --format=csv,noheader,nounits -i 0 2>/dev/null | head -n 1
}

# Clocks, power and temperature as they were a moment ago: a process of its own asks all the time.
clocks() {
    tail -n 1 "$work/clocks" 2>/dev/null | awk -F ', *' '
        function number(text) { return text ~ /^[0-9]+(\.[0-9]+)?$/ ? text : "null" }
        { line = $0 }
        END {
            split(line, field, /, */)
            printf "\"clock_mhz\": %s, \"memory_mhz\": %s, \"watts\": %s, \"celsius\": %s", number(field[1]),
                number(field[2]), number(field[3]), number(field[4])
        }'
}

# The current step's: a line with these members (JSON without braces) and an error, which may be empty. Where the record
# cannot be written, standard output gets the line. What this call asks of the record it asks of the copy, record.all.
part=0
step=
command=
emit() { # MEMBERS ERROR
    line_of_it=$(printf '{"part": %s, "step": "%s", %s, "error": "%s", %s, %s, "command": "%s"}' "$part" \
        "$(quoted "$step")" "$1" "$(quoted "$2")" "$(clocks)" "$machine" "$(quoted "$command")")
    printf '%s\n' "$line_of_it" >>"$work/record.all"
    { printf '%s\n' "$line_of_it" >>"$record"; } 2>/dev/null || printf '%s\n' "$line_of_it"
}

take_test() { # NAME true|false WHY
    emit "\"test\": \"$(quoted "$1")\", \"ok\": $2" "$3"
}

# A step that cannot run here: the record says so, and why.
skip_step() { # PART NAME WHY
    part=$1
    step=$2
    command=
    ! has_ended "$step" || return 0
    printf '\n==== part %s, %s: left out: %s\n' "$part" "$step" "$3" | tee -a "$log"
    emit "\"skipped\": \"$(quoted "$3")\"" ""
    emit "\"done\": true, \"seconds\": 0, \"status\": 0" ""
}

# A record is carried away as files of 16 MiB at most: what is longer loses its last lines, and the log says so.
most_bytes=16777216
cut_files() {
    for file in "$out"/*; do
        bytes=$(wc -c <"$file" 2>/dev/null || echo 0)
        [ "$bytes" -gt $most_bytes ] || continue
        head -c $((most_bytes - 4096)) "$file" | sed '$d' >"$work/cut" && cat "$work/cut" >"$file"
        printf 'gpu_record: %s had %s bytes; its end is cut off\n' "${file##*/}" "$bytes" | tee -a "$log"
    done
}

# ---- steps ----

# The last line that says how a step ended.
end_of() { grep -F "\"step\": \"$(quoted "$1")\", \"done\": true" "$work/record.all" | tail -n 1; }

# A later call runs again what did not end well.
has_ended() { end_of "$1" | grep -qF '"status": 0'; }

# A step that did not end in this call or an earlier one has not failed.
failed() { end_of "$1" | grep -qvF '"status": 0'; }

# Reads what a process prints while it runs, and goes on when it ends, whoever else still has the file open. It is ended
# if no line comes for `silent` seconds; `stuck` is what it had then begun.
silent=
follow() { # PROCESS FILE
    exec 3<"$2"
    begun=
    stuck=
    lines=0
    heard=$(now)
    while :; do
        alive=yes
        kill -0 "$1" 2>/dev/null || alive=
        while IFS= read -r line <&3; do
            line=$begun$line
            begun=
            heard=$(now)
            lines=$((lines + 1))
            [ "$lines" -gt 3000 ] || printf '%s\n' "$line" >>"$log"
            [ "$lines" -gt 3000 ] || take_line "$line"
        done
        begun=$begun$line
        [ -n "$alive" ] || break
        if [ -n "$silent" ] && [ -z "$stuck" ] && [ $(($(now) - heard)) -ge "$silent" ]; then
            stuck=${begun:-nothing}
            kill "$1" 2>/dev/null
        fi
        sleep 0.05 2>/dev/null || sleep 1
    done
    exec 3<&-
}

# A step is not run if the record has its end. One that the call's own end cut short is left for the next call.
run_step() { # PART NAME SECONDS COMMAND...
    part=$1
    step=$2
    seconds=$3
    shift 3
    # Programs that a call builds are only on that call's machine.
    stuck=
    if [ "$part" != 0 ] && has_ended "$step"; then return 0; fi
    left=$((end - $(now)))
    if [ "$left" -lt 3 ]; then
        left_over="$left_over $step"
        return 0
    fi
    seconds=$(awk -v a="$seconds" -v b="$limit" 'BEGIN { printf "%d", a < b ? a : b < 1 ? 1 : b }')
    cut=
    if [ "$left" -lt "$seconds" ]; then seconds=$left cut=yes; fi
    command=$*
    printf '\n==== part %s, %s (at most %s s): %s\n' "$part" "$step" "$seconds" "$command" | tee -a "$log"
    : >"$work/output"
    started=$(now)
    timeout -k 5 "$seconds" "$@" >"$work/output" 2>&1 </dev/null 3>&- &
    running=$!
    follow "$running" "$work/output"
    status=0
    wait "$running" || status=$?
    running=
    end_step
}

end_step() {
    took=$(($(now) - started))
    why=
    if [ "$status" -ne 0 ]; then
        why="status $status: $(tail -n 1 "$work/output")"
        case $status in 124 | 137) why="stopped after $took s: $(tail -n 1 "$work/output")" ;; esac
        if [ -n "$cut" ] && [ "$took" -ge "$seconds" ]; then
            left_over="$left_over $step"
            emit "\"done\": false, \"seconds\": $took" "cut short by the end of this call"
            return 0
        fi
        failures=$((failures + 1))
        printf '%s: %s\n' "$step" "$why" | tee -a "$log"
    fi
    emit "\"done\": true, \"seconds\": $took, \"status\": $status" "$why"
}

# The tests of a suite in one process. One that ends it, or says nothing for its own limit, fails, and another process
# goes on behind it.
run_tests() { # PART NAME SECONDS-OF-A-TEST SECONDS SUITE VARIABLE=VALUE
    of=$1 name=$2 each=$3 all=$4 variable=$6
    ! has_ended "$name" || return 0
    "$tests" --list 2>/dev/null | grep "^$5" >"$work/tests"
    again=
    while [ -s "$work/tests" ]; do
        silent=$(awk -v a="$each" -v b="$limit" 'BEGIN { print a < b ? a : b }')
        begun=
        # shellcheck disable=SC2046
        run_step "$of" "$name$again" "$all" env "$variable" "$tests" $(cat "$work/tests")
        silent=
        stuck=${begun%% ...*}
        [ $((end - $(now))) -ge 3 ] && grep -qxF -e "$stuck" "$work/tests" || break
        take_test "$stuck" false "it hung or died: $why"
        sed "1,/^$stuck\$/d" "$work/tests" >"$work/rest" && mv "$work/rest" "$work/tests"
        again=", after $stuck"
    done
}

has() { command -v "$1" >/dev/null 2>&1; }

# Records the device whose results these are. Another process asks for clocks, power and temperature until the call ends.
describe_device() {
    known=$(ask_device name,driver_version,compute_cap)
    capability=$(printf '%s' "${known##*, }" | tr -d .)
    commit=$(cat "$programs/commit" 2>/dev/null || git describe --always --dirty --abbrev=12 2>/dev/null ||
        echo unknown)
    driver=${known#*, }
    machine="\"commit\": \"$(quoted "$commit")\", \"device\": \"$(quoted "${known%%, *}")\""
    machine="$machine, \"driver\": \"$(quoted "${driver%%, *}")\""
    if has nvidia-smi; then
        nvidia-smi --query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu --format=csv,noheader,nounits -i 0 \
            -lms 500 >"$work/clocks" 2>/dev/null &
        sampler=$!
    else
        : >"$work/clocks"
    fi
    printf '%s; commit %s\n' "${known:-no device that nvidia-smi knows}" "$commit" | tee -a "$log"
}

# ---- programs ----

# Programs, each with an argument with which it ends at once. The command runs anywhere: it alone is of no use.
needed='cuda_tests --list
bench_attention --list
executor_cuda --help
train_cuda --help'

# A program for a newer driver than the one that is here starts, and sees no device.
sees_none() { timeout 20 "$programs/cuda_tests" --list 2>/dev/null | grep '^cuda: no device'; }

starts() { # all | one: of them start
    : >"$work/starts"
    printf '%s\n' "$needed" >"$work/needed"
    while read -r program argument; do
        if timeout 20 "$programs/$program" "$argument" >>"$work/starts" 2>&1 </dev/null; then
            [ "$1" = all ] || return 0
        else
            printf '%s: status %s\n' "$program" $? >>"$work/starts"
            [ "$1" = one ] || return 1
        fi
    done <"$work/needed"
    [ "$1" = all ]
}

all_start() { starts all && { [ -z "$known" ] || ! sees_none >>"$work/starts"; }; }

# Programs that were built elsewhere may have to be shown this machine's cuBLAS ...
find_cublas() {
    read -r program _ <"$work/needed"
    wanted=$(ldd "$programs/$program" 2>/dev/null | awk '/libcublas\.so.*not found/ { print $1 }')
    [ -n "$wanted" ] || return 0
    toolkit=$(command -v "${NVCC:-nvcc}" 2>/dev/null)
    for place in "${CUDA_HOME:-/usr/local/cuda}/lib64" "${toolkit%/bin/*}/lib64" /usr/local/cuda*/lib64; do
        [ -e "$place/$wanted" ] && found=$place && break
    done
    if [ -z "${found:-}" ]; then
        found=$(find /usr /opt "${HOME:-/root}" -name "$wanted" 2>/dev/null | head -n 1)
        found=${found%/*}
    fi
    [ -z "$found" ] || LD_LIBRARY_PATH=$found${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export LD_LIBRARY_PATH
}

# ... or be built here after all, for this device alone, by `make gpu-programs`. Where some do not start, the others run;
# where none does, there is nothing to be recorded.
prepare_programs() {
    all_start && return 0
    find_cublas
    all_start && return 0
    printf 'the programs in %s do not start here: %s\n' "$programs" "$(tail -n 1 "$work/starts")" | tee -a "$log"
    case $capability in
        90) code='-gencode arch=compute_90a,code=sm_90a' ;;
        '') code='-arch=native' ;;
        *) code="-gencode arch=compute_$capability,code=sm_$capability" ;;
    esac
    carried=$programs
    programs=$BUILD/gpu
    # shellcheck disable=SC2086
    run_step 0 "build" 300 make -B -j "$(nproc 2>/dev/null || echo 2)" gpu-programs "BUILD=$BUILD" ${NVCC:+"NVCC=$NVCC"} \
        "GPU_ARCH=$code"
    all_start && return 0
    printf 'they still do not: %s\n' "$(tail -n 1 "$work/starts")" | tee -a "$log"
    starts one && return 0
    programs=$carried
    starts one && return 0
    cp "$work/record" "$record"
    printf 'gpu_record: no program starts here, carried (%s) or built (%s); nothing was recorded, and %s says why\n' \
        "$carried" "$BUILD/gpu" "$log" | tee -a "$log" >&2
    exit 1
}
