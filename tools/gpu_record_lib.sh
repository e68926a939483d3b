# gpu_record_lib.sh - what gpu_record.sh and gpu_record_train.sh share: a record with a line for each result as it comes, and
# steps with a limit each, of which none stops the next one. Not a program: these two read it with `.`.
#
# Who reads it sets out, resume, programs, minutes (of this call) and most (seconds of a step), calls open_record and
# describe_device, and has a function take_line LINE, which calls emit or take_test for a line that is a result.

# Goes on from the record of an earlier call, if one is named, and begins the time of this one.
open_record() {
    mkdir -p "$out" || exit 2
    work=$(mktemp -d) || exit 2
    sampler=
    trap '[ -z "$sampler" ] || kill "$sampler" 2>/dev/null; rm -rf "$work"' EXIT
    trap 'exit 1' HUP INT TERM
    record=$out/record.jsonl
    log=$out/log.txt
    # A device that went away may have left half a line at the end.
    if [ -n "$resume" ]; then grep '}$' "$resume" >"$work/record"; else : >"$work/record"; fi
    cp "$work/record" "$record" || exit 2
    [ -n "$resume" ] || : >"$log" || exit 2
    begin=$(now)
    end=$(awk -v begin="$begin" -v minutes="$minutes" 'BEGIN { printf "%d", begin + 60 * minutes }')
    failures=0
    left_over=
}

now() { date +%s; }

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

# The current step's: a line with these members (JSON without braces) and an error, which may be empty.
part=0
step=
command=
emit() { # MEMBERS ERROR
    printf '{"part": %s, "step": "%s", %s, "error": "%s", %s, %s, "command": "%s"}\n' "$part" "$(quoted "$step")" "$1" \
        "$(quoted "$2")" "$(clocks)" "$machine" "$(quoted "$command")" >>"$record"
}

take_test() { # NAME true|false WHY
    emit "\"test\": \"$(quoted "$1")\", \"ok\": $2" "$3"
}

# ---- steps ----

has_ended() { grep -qF "\"step\": \"$(quoted "$1")\", \"done\": true" "$record"; }

# Reads what a process prints while it runs, and goes on when it ends, whoever else still has the file open.
follow() { # PROCESS FILE
    exec 3<"$2"
    begun=
    lines=0
    while :; do
        alive=yes
        kill -0 "$1" 2>/dev/null || alive=
        while IFS= read -r line <&3; do
            line=$begun$line
            begun=
            lines=$((lines + 1))
            [ "$lines" -gt 3000 ] || printf '%s\n' "$line" >>"$log"
            [ "$lines" -gt 3000 ] || take_line "$line"
        done
        begun=$begun$line
        [ -n "$alive" ] || break
        sleep 0.2 2>/dev/null || sleep 1
    done
    exec 3<&-
}

# A step is not run if the record has its end. One that the call's own end cut short is left for the next call.
run_step() { # PART NAME SECONDS COMMAND...
    part=$1
    step=$2
    seconds=$3
    shift 3
    # What was built lies on the machine of that call alone.
    if [ "$part" != 0 ] && has_ended "$step"; then return 0; fi
    left=$((end - $(now)))
    if [ "$left" -lt 3 ]; then
        left_over="$left_over $step"
        return 0
    fi
    seconds=$(awk -v a="$seconds" -v b="$most" 'BEGIN { printf "%d", a < b ? a : b < 1 ? 1 : b }')
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

has() { command -v "$1" >/dev/null 2>&1; }

# Whose results these are. A process of its own asks for clocks, power and temperature until the call ends.
describe_device() {
    known=$(ask_device name,driver_version,compute_cap)
    capability=$(printf '%s' "${known##*, }" | tr -d .)
    commit=$(cat "$programs/commit" 2>/dev/null || git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)
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
