#!/bin/sh
# cli.sh - tests of the chunkflow command.
#
#     tests/command/cli.sh [FILTER]
#
# CHUNKFLOW names the program (default build/chunkflow). Prints "ok NAME" or "FAIL NAME: why" for each test and at the
# end how many; with FILTER only the tests whose name contains it. What the command says is compared with what awk, wc
# and the like find from the same input; where python3 is there, it reads the JSON and draws the same random numbers
# again.
set -u
. "$(dirname "$0")/cli_harness.sh"

# ----------------------------------------------------------------------------------------------------------------------
# The harness can fail
# ----------------------------------------------------------------------------------------------------------------------

test_harness() {
    wanted harness || return 0
    got=$(
        passed=0
        failed=0
        FILTER=
        same h1 1 2
        echo a >left
        echo b >right
        : >empty
        same_files h2 left right
        same_files h3 empty empty
        refuses h4 2 . --version
        refuses h5 0 . help nosuch
        refuses h6 2 'no such text' help nosuch
        succeeds h7 help nosuch
        echo "$passed $failed"
    )
    same harness "0 7" "$(echo "$got" | tail -n 1)"
}

# ----------------------------------------------------------------------------------------------------------------------
# Help, version, usage
# ----------------------------------------------------------------------------------------------------------------------

test_help() {
    succeeds version --version
    same version/header "$(sed -n 's/^#define CHUNKFLOW_VERSION "\(.*\)"/chunkflow \1/p' "$HEADER")" "$(cat out)"
    cf
    same help/none "2 0" "$code $(wc -c <out | tr -d ' ')"
    succeeds help/overview --help
    cp out overview
    succeeds help/overview/short -h
    same_files help/overview/short/text overview out
    succeeds help/overview/word help
    same_files help/overview/word/text overview out
    for command in lengths gen pack plan compare check; do
        same "help/listed/$command" 1 "$(grep -c "^  $command " overview)"
        succeeds "help/$command" "$command" --help
        same "help/$command/usage" 1 "$(grep -c "^usage: chunkflow $command " out)"
        cp out text
        succeeds "help/$command/word" help "$command"
        same_files "help/$command/word/text" text out
        succeeds "help/$command/late" "$command" -h --no-such-option
    done
    for option in --chunk-size --method --split --no-tails --align --max-slices --ranks --json; do
        for command in pack plan compare; do
            same "help/$command/$option" 1 "$("$CHUNKFLOW" $command --help | grep -Ec "^  $option([, ]|\$)")"
        done
    done
    for command in lengths pack plan compare memory time tune; do
        same "help/$command/--tsv" 1 "$("$CHUNKFLOW" $command --help | grep -Ec "^  --tsv( |\$)")"
    done
    same "help/pack/--metadata" 1 "$("$CHUNKFLOW" pack --help | grep -Ec "^  --metadata( |\$)")"
    refuses help/unknown 2 "unknown command 'nosuch'" help nosuch
    refuses unknown/command 2 "unknown command 'nosuch'" nosuch
    refuses unknown/option 2 "unknown option '--nosuch'" --nosuch
}

test_usage() {
    echo 5 >list
    refuses usage/unknown 2 'pack: unknown option --nosuch .*pack --help' pack --chunk-size 8 --nosuch list
    refuses usage/unknown/value 2 'unknown option --nosuch ' pack --chunk-size 8 --nosuch=7 list
    refuses usage/unknown/prefix 2 'unknown option --chunk; did you mean --chunks[?] ' pack --chunk 8 list
    refuses usage/unknown/near 2 'unknown option --stagse; did you mean --stages[?] ' plan --stagse 4 list
    refuses usage/unknown/far 2 'unknown option --ratio [(]see' plan --ratio 4 list
    refuses usage/unknown/command 2 "unknown command 'comprae'; did you mean compare[?] " comprae list
    refuses usage/limit/bytes 2 "--limit: got .80G.*; for bytes there is --limit-bytes" \
        plan --chunk-size 8 --limit 80G list
    printf '9\n5\n7\n30\n' >aliased
    cf plan --chunk-size 8 --k 2 --stages 2 --ranks 3 --json main.json --summary aliased
    cf plan --chunk-sizes 8 --ks 2 --pp 2 --dp 3 --json alias.json --summary aliased
    same_files usage/alias main.json alias.json
    refuses usage/unknown/single 2 'unknown option -c ' pack -c 8 list
    refuses usage/missing/chunk-size 2 -- '--chunk-size N is missing' pack list
    refuses usage/missing/file 2 'FILE.* is missing' pack --chunk-size 8
    refuses usage/missing/value 2 '--chunk-size needs a value' pack list --chunk-size
    refuses usage/missing/value/option 2 '--json needs a value' pack --chunk-size 8 list --json --no-tails
    refuses usage/missing/operands 2 'FILE.* is missing' lengths
    refuses usage/missing/distribution 2 'is missing' gen
    refuses usage/empty/name 2 '--json: got an empty name' pack --chunk-size 8 --json= list
    refuses usage/flag/value 2 "--no-tails takes no value, got 'yes'" pack --chunk-size 8 --no-tails=yes list
    refuses usage/extra 2 "'other' is one operand too many" pack --chunk-size 8 list other
    echo $((1 << 40)) >endless
    refuses usage/endless 2 'endless: 134217728 chunks of a rank are more than .* 67108864' pack --chunk-size 8K endless
    refuses usage/endless/ranks 2 '134217728 chunks of a rank' pack --chunk-size 8K --ranks 4 endless
    refuses usage/choice/method 2 "--method: got 'worst-fit', wanted best-fit\|next-fit" \
        pack --chunk-size 8 --method worst-fit list
    refuses usage/choice/gone 2 "--method: got 'first-fit', wanted best-fit\|next-fit" \
        pack --chunk-size 8 --method first-fit list
    refuses usage/choice/split 2 "--split: got 'ful'" pack --chunk-size 8 --split ful list
    refuses usage/choice/replay 2 "--replay: got 'pipeline|local'" \
        plan --k 1 --chunk-size 8 --replay 'pipeline|local' list
    refuses usage/choice/unit 2 "--unit: got ''" lengths --unit= list
    for value in 0 -1 8.0 1e3 8KB K 0x8 '' ' 8' 8_000 2147483648 2G 9223372036854775807 9223372036854775808 \
        99999999999999999999999 18446744073709551624 18014398509481992K 8589934592G ٣; do
        refuses "usage/number/$value" 2 "--chunk-size: got '$value', wanted a whole number 1 \.\. 2147483647" \
            pack --chunk-size "$value" list
    done
    refuses usage/number/sign 2 "--chunk-size: got '\+8', wanted" pack --chunk-size +8 list
    refuses usage/number/k 2 "--k: got '0', wanted" plan --chunk-size 8 --k 0 list
    refuses usage/number/align 2 "--align: got '0', wanted" pack --chunk-size 8 --align 0 list
    refuses usage/number/align/divides 2 '--align: got 3, wanted a divisor of --chunk-size 8' \
        pack --chunk-size 8 --align 3 list
    refuses usage/number/max-slices 2 "--max-slices: got '-2', wanted" pack --chunk-size 8 --max-slices -2 list
    refuses usage/number/ranks 2 "--ranks: got '65537', wanted" pack --chunk-size 8 --ranks 65537 list
    refuses usage/number/rank 2 '--rank: got 2' plan --chunk-size 8 --k 1 --ranks 2 --rank 2 list
    refuses usage/number/rank/none 2 '--rank: got 1' plan --chunk-size 8 --k 1 --rank 1 list
    refuses usage/metadata/pack 2 '--metadata wants --json' pack --chunk-size 8 --metadata list
    refuses usage/metadata/plan 2 '--metadata wants --plan-json' plan --chunk-size 8 --k 1 --metadata --json x list
    refuses usage/all-ranks 2 '--all-ranks wants --json' plan --chunk-size 8 --k 1 --ranks 2 --all-ranks list
    refuses usage/same-output 2 '--json and --plan-json both name x' \
        plan --chunk-size 8 --k 1 --json x --plan-json x list

    # Options before, behind and between; = and blank; suffixes; the last one counts.
    cf pack --chunk-size 4096 --align 2 --json - list
    cp out plain
    for arguments in 'list --chunk-size 4096 --align 2 --json -' '--json=- list --align=2 --chunk-size=4K' \
        '--chunk-size 4k --align 2 --json - -- list' '--chunk-size 7 --chunk-size 4K --align 2 list --json -'; do
        # shellcheck disable=SC2086
        cf pack $arguments
        same_files "usage/order/$arguments" plain out
    done
    echo 5 >--list
    cf pack --chunk-size 4096 --align 2 --json - -- --list
    same_files usage/order/dashes plain out
}

# ----------------------------------------------------------------------------------------------------------------------
# lengths
# ----------------------------------------------------------------------------------------------------------------------

# What a message says of a name with an escape sequence, a line end and U+009B, which starts one too: '?' is there
# instead.
plain_message() { # NAME ARGUMENT...
    name=$1
    shift
    cf "$@"
    same "plain/$name" "1 1" "$(wc -l <err | tr -d ' ') $(grep -cF "$(printf 'a?[31m?b?\303\251')" err)"
}

messages_are_plain() {
    strange=$(printf 'a\033[31m\nb\302\233\303\251')
    printf '1\nx\n' >"$strange"
    plain_message line pack --chunk-size 4 "$strange"
    plain_message file pack --chunk-size 4 "no $strange"
    plain_message value pack --chunk-size "$strange" list
    plain_message option pack "--$strange"
    plain_message command "$strange"
    cf plan --chunk-size 4 --k 1 --no-list --plan-json "$strange" list
    cf check "$strange"
    same plain/sound "1 1" "$(wc -l <out | tr -d ' ') $(grep -cF "$(printf 'a?[31m?b?\303\251: sound plan')" out)"
    sed 's/"n_tokens": [0-9]*/"n_tokens": 9/' "$strange" >"$strange."
    plain_message rule check "$strange."
    rm "$strange" "$strange."
}

test_lengths() {
    mkdir -p tree/b/deep tree/.hidden
    printf 'one two\nthree' >tree/b/deep/x
    printf '' >tree/a
    printf 'a\n\nbc\n' >tree/b.txt
    printf '\000\377\n \n' >tree/B
    awk 'BEGIN { for (i = 0; i < 20000; i++) printf "word%d ", i }' >tree/z
    echo secret >tree/.hidden/s
    echo secret >tree/.s
    ln -s .. tree/b/loop
    ln -s ../a tree/b/link
    mkfifo tree/b/pipe

    # Order: names by their bytes, directory by directory.
    for file in B a b/deep/x b.txt z; do wc -c <"tree/$file" | tr -d ' '; done >want
    cf lengths tree
    same_files lengths/bytes want out
    cf lengths tree/
    same_files lengths/bytes/slash want out
    cf lengths --unit bytes tree/B tree/a tree/b tree/b.txt tree/z
    same_files lengths/files want out
    echo 1 >want # B: \000 and \377 are no blanks, so they make one word, though wc may not think so
    for file in a b/deep/x b.txt z; do wc -w <"tree/$file" | tr -d ' '; done >>want
    cf lengths --unit words tree
    same_files lengths/words want out
    cf lengths --all tree
    same lengths/all "7" "$(wc -l <out | tr -d ' ')"
    cf lengths --all tree/.hidden
    same lengths/all/named "7" "$(cat out)"
    printf '3\n0\n2\n' >want
    printf '3\n\n7' | sed 's/3/abc/; s/7/de/' >lines
    cf lengths --lines lines
    same_files lengths/lines want out
    printf '1\n0\n2\n' >want
    cf lengths --lines tree/b.txt
    same_files lengths/lines/ended want out
    printf '2\n1\n' >want
    cf lengths --lines --unit words tree/b/deep/x
    same_files lengths/lines/words want out
    cf lengths --lines tree/a
    same lengths/lines/empty "0 0" "$code $(wc -c <out | tr -d ' ')"
    same lengths/stdin 13 "$("$CHUNKFLOW" lengths - <tree/b/deep/x)"
    same lengths/stdin/words 3 "$("$CHUNKFLOW" lengths --unit words - <tree/b/deep/x)"
    cf lengths tree/b/link
    same lengths/link/named 0 "$(cat out)"

    mkdir odd
    printf 'abc' >"odd/new
line"
    cf lengths --names odd tree/a
    printf '3 # odd/new?line\n0 # tree/a\n' >want
    same_files lengths/names want out
    cp out list
    cf pack --chunk-size 8 list
    same lengths/names/readable "0 2" "$code $(summary input 2)"

    refuses lengths/missing 2 'cannot read nosuch: ' lengths tree nosuch
    messages_are_plain
    if [ "$(id -u)" != 0 ]; then
        mkdir closed
        chmod 0 closed
        refuses lengths/unreadable 2 'cannot open closed: ' lengths closed
        chmod 700 closed
    elif [ -e /proc/self/mem ]; then # root may open everything, but there is nothing to be read here
        refuses lengths/unreadable 2 'cannot read /proc/self/mem: ' lengths --lines tree/z /proc/self/mem
    else
        skip lengths/unreadable "no unreadable file is at hand"
    fi
    mkdir none
    cf lengths none
    same lengths/none "0 0" "$code $(wc -c <out | tr -d ' ')"
}

# ----------------------------------------------------------------------------------------------------------------------
# Megatron's index files
# ----------------------------------------------------------------------------------------------------------------------

# index FILE LENGTHS [FIRST [VERSION CODE SEQUENCES BYTES-BEHIND]]: an .idx as Megatron-LM writes it; FIRST: the first
# sequence of each document and their number, by default one sequence each.
index() {
    python - "$@" <<'EOF'
import struct, sys
path, lengths, *rest = sys.argv[1:]
lengths = [int(n) for n in lengths.split()]
first, version, code, n, behind = [*rest, "", "", "", "", ""][:5]
first = [int(n) for n in first.split()] if first else range(len(lengths) + 1)
head = struct.pack("<9sQBQQ", b"MMIDIDX", int(version or 1), int(code or 4), int(n or len(lengths)), len(first))
starts = [4 * sum(lengths[:i]) for i in range(len(lengths))]
body = struct.pack(f"<{len(lengths)}i{len(lengths)}q{len(first)}q", *lengths, *starts, *first)
open(path, "wb").write(head + body + bytes(int(behind or 0)))
EOF
}

test_index() {
    if [ -z "$PYTHON" ]; then
        skip index "there is no python3"
        return
    fi
    index a.idx "5 70000 9 2147483647"
    printf '5\n70000\n9\n2147483647\n' >want
    cf lengths --unit tokens a.idx
    same_files index/lengths want out
    index documents.idx "5 70000 9 11" "0 1 1 3 4" 1 8 4 4
    printf '5\n70009\n11\n' >want
    cf lengths --unit tokens --names documents.idx
    sed 's/$/ # documents.idx/' want >named
    same_files index/documents named out
    "$CHUNKFLOW" pack --chunk-size 8K --json - want >plan
    "$CHUNKFLOW" pack --chunk-size 8K --json - documents.idx >same
    same_files index/pack plan same
    "$CHUNKFLOW" pack --chunk-size 8K --json - - <documents.idx >same
    same_files index/pack/stdin plan same
    index none.idx ""
    cf lengths --unit tokens none.idx
    same index/none "0 0" "$code $(wc -c <out | tr -d ' ')"
    printf 'MB\n5\n' >text
    refuses index/text 2 "text:1: got 'MB', wanted a length" pack --chunk-size 8 text
    refuses index/lines 2 '--unit tokens takes lists' lengths --unit tokens --lines a.idx

    index bad "5 -7"
    refuses index/negative 2 'the length of sequence 1 is -7, wanted 0 \.\. ' pack --chunk-size 8 bad
    index bad 5 "" 2
    refuses index/version 2 'the version is 2, wanted 1' pack --chunk-size 8 bad
    index bad 5 "" 1 9
    refuses index/type 2 "type is 9, wanted 1 .. 8" pack --chunk-size 8 bad
    index bad 5 "" 1 4 18446744073709551615
    refuses index/huge 2 'number of sequences is 9,223,.*wanted at most 100,000,000' pack --chunk-size 8 bad
    index bad 5 "" 1 4 100000000
    refuses index/claim 2 'ends too early: after 62 bytes' pack --chunk-size 8 bad
    index bad "5 6 7" "0 2 1 3"
    refuses index/order 2 'the first sequence of document 2 is 1' pack --chunk-size 8 bad
    index bad "5 6" "1 2"
    refuses index/first 2 'the first sequence of document 0 is 1, wanted 0' pack --chunk-size 8 bad
    index bad "5 6" "0 1"
    refuses index/end 2 'the end of the last document is 1, wanted 2' pack --chunk-size 8 bad
    index bad "5 6" "0 1 2" 1 4 2 1
    refuses index/behind 2 'bytes behind its documents is 1, wanted 0' pack --chunk-size 8 bad
    whole=$(wc -c <documents.idx)
    for bytes in 9 17 20 33 34 37 60 90 "$((whole - 5))"; do # the last four bytes are those of the modes
        head -c "$bytes" documents.idx >bad
        refuses "index/cut/$bytes" 2 'ends too early: after '"$bytes bytes" pack --chunk-size 8 bad
    done
}

# ----------------------------------------------------------------------------------------------------------------------
# gen
# ----------------------------------------------------------------------------------------------------------------------

# The same numbers on every machine: checksums (POSIX cksum) of what stands for each distribution.
gen_checksum() { # NAME CHECKSUM ARGUMENTS...
    wanted "$1" || return 0
    name=$1 sum=$2
    shift 2
    cf gen "$@"
    same "$name" "$sum" "$(cksum <out)"
}

share_below() { # LIMIT
    awk -v limit="$1" '$1 < limit { n++ } END { print n / NR }' out
}

test_gen() {
    printf '# weights\n10 1\n20 0\n30 6\n1000 3\n' >histogram

    gen_checksum gen/lmsys/checksum "1151779798 74019" lmsys --n 20000
    gen_checksum gen/lmsys/checksum/seed "1878835183 3700" lmsys --n 1000 --seed 9223372036854775807
    gen_checksum gen/lognormal/checksum "1281011746 86749" lognormal --n 20000 --median 700 --sigma 1.25
    gen_checksum gen/uniform/checksum "1935703142 3876" uniform --n 1000 --max 1000
    gen_checksum gen/histogram/checksum "3711844050 3558" histogram histogram --n 1000

    cf gen lmsys
    same gen/defaults 256 "$(wc -l <out | tr -d ' ')"
    cp out first
    cf gen lmsys --n 1000 --seed 1
    head -n 256 out >beginning
    same_files gen/defaults/seed first beginning
    cf gen lmsys --seed 2
    same gen/seed 1 "$(cmp -s first out; echo $?)"
    cf gen lmsys --n 0
    same gen/zero "0 0" "$code $(wc -c <out | tr -d ' ')"

    # Shares of the paper, give or take four standard deviations of 20,000 draws; test_gen_python has each draw.
    cf gen lmsys --n 20000 --seed 7
    between gen/lmsys/1K "$(share_below 1024)" 0.89670 0.91328
    between gen/lmsys/4K "$(share_below 4096)" 0.99347 0.99731
    between gen/lmsys/8K "$(share_below 8192)" 0.99822 0.99994
    cf gen lognormal --n 100 --sigma 0 --median 77
    same gen/lognormal/sigma/0 "77" "$(sort -u out | tr '\n' ' ' | sed 's/ $//')"
    cf gen lognormal --n 2000 --median 4 --sigma 10 --min 2 --max 1M
    between gen/clamped "$(awk '$1 < 2 || $1 > 1048576 { n++ } END { print n + 0 }' out)" 0 0
    between gen/clamped/ends "$(awk '$1 == 2 || $1 == 1048576 { n++ } END { print n / NR }' out)" 0.5 0.95
    cf gen lognormal --n 2000 --median 256G --sigma 10
    between gen/lognormal/hostile "$(awk '$1 < 1 || $1 > 281474976710656 { n++ } END { print n + 0 }' out)" 0 0

    cf gen uniform --n 20000 --min 3 --max 12
    same gen/uniform/values "3 4 5 6 7 8 9 10 11 12" "$(sort -nu out | tr '\n' ' ' | sed 's/ $//')"
    cf gen uniform --n 5 --min 9 --max 9
    same gen/constant "9 9 9 9 9" "$(tr '\n' ' ' <out | sed 's/ $//')"

    cf gen histogram histogram --n 20000
    same gen/histogram/values "10 30 1000" "$(sort -nu out | tr '\n' ' ' | sed 's/ $//')"
    same gen/histogram/stdin "$(cksum <out)" "$("$CHUNKFLOW" gen histogram - --n 20000 <histogram | cksum)"
    printf '5 4611686018427387904\n6 4611686018427387903\n' >heavy
    cf gen histogram heavy --n 1000
    between gen/histogram/heavy "$(share_below 6)" 0.43 0.57

    refuses gen/name 2 "got 'normal', wanted lmsys, lognormal, uniform or histogram" gen normal
    refuses gen/n 2 "--n: got '100000001', wanted" gen lmsys --n 100000001
    refuses gen/sigma 2 "--sigma: got '1.2345678', wanted" gen lognormal --sigma 1.2345678
    refuses gen/sigma/high 2 "--sigma: got '10.1', wanted" gen lognormal --sigma 10.1
    refuses gen/sigma/text 2 "--sigma: got '1e1', wanted" gen lognormal --sigma 1e1
    refuses gen/sigma/point 2 "--sigma: got '1.', wanted" gen lognormal --sigma 1.
    refuses gen/sigma/other 2 '--sigma is only for lognormal' gen lmsys --sigma 1
    refuses gen/median/other 2 '--median is only for lognormal' gen uniform --max 5 --median 1
    refuses gen/uniform/max 2 'uniform needs --max' gen uniform
    refuses gen/range 2 '--min is above --max' gen uniform --min 9 --max 8
    refuses gen/histogram/missing 2 'histogram needs FILE' gen histogram
    refuses gen/file 2 'only histogram reads a file' gen lmsys histogram
    refuses gen/histogram/nosuch 2 'cannot open nosuch' gen histogram nosuch
    printf '10 1\n20 x\n' >bad
    refuses gen/histogram/bad 2 "^bad:2: got '20 x', wanted a length" gen histogram bad
    printf '10 9223372036854775807\n20 1\n' >bad
    refuses gen/histogram/overflow 2 '^bad:2: ' gen histogram bad
    printf '10 0\n' >bad
    refuses gen/histogram/empty 2 'bad: there is nothing to draw from' gen histogram bad
}

# The generator once more, in whole numbers of any size and floating point.
test_gen_python() {
    wanted gen/python || return 0
    if [ -z "$PYTHON" ]; then
        skip gen/python "there is no python3"
        return 0
    fi
    cat >again.py <<'EOF'
import math, sys

MASK = (1 << 64) - 1


class Source:
    def __init__(self, seed):
        self.state = seed

    def bits(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def below(self, n):
        while True:
            bits = self.bits()
            if bits < MASK - MASK % n:
                return bits % n


def lmsys(source):
    share, low = source.below(100000), 16
    for below, high in ((90499, 1), (99539, 4), (99908, 8), (99987, 32), (99996, 128), (100000, 303)):
        if share < below:
            return int(low * (high * 1024 / low) ** ((source.bits() >> 32) / 2**32))
        low = high * 1024


def lognormal(source, median, sigma):
    while True:
        bits = source.bits()
        u, v = (bits >> 32) / 2**31 - 1, (bits & 0xFFFFFFFF) / 2**31 - 1
        if 0 < u * u + v * v < 1:
            break
    s = u * u + v * v
    return max(1, int(median * math.exp(sigma * u * math.sqrt(-2 * math.log(s) / s)) + 0.5))


def histogram(source):
    ticket = source.below(10)
    return 10 if ticket < 1 else 30 if ticket < 7 else 1000


source = Source(5)
draw = {
    "lmsys": lmsys,
    "lognormal": lambda s: lognormal(s, 700, 1.25),
    "uniform": lambda s: 3 + s.below(998),
    "histogram": histogram,
}[sys.argv[1]]
got = [int(line) for line in sys.stdin]
off = [abs(g - w) for g, w in zip(got, (draw(source) for _ in got))]
# Rounding may move a draw that is next to a whole number by one, and by no more.
print(len(got), "ok" if max(off) <= 1 and sum(off) <= len(got) // 1000 else "off by %d, %d" % (max(off), sum(off)))
EOF
    for name in lmsys lognormal uniform histogram; do
        case $name in
            lognormal) options='--median 700 --sigma 1.25' ;;
            uniform) options='--min 3 --max 1000' ;;
            histogram) options=histogram ;;
            *) options= ;;
        esac
        # shellcheck disable=SC2086
        cf gen $name --n 20000 --seed 5 $options
        same "gen/python/$name" "20000 ok" "$(python again.py $name <out)"
    done
}

# ----------------------------------------------------------------------------------------------------------------------
# Lists: what is read, what is refused
# ----------------------------------------------------------------------------------------------------------------------

test_lists() {
    printf '5\n5\n5\n700\n0\n1024\n' >plain
    cf pack --chunk-size 64 --json - plain
    cp out plan
    same lists/plain 0 "$code"

    printf '5\r\n5\r\n5\r\n700\r\n0\r\n1024\r\n' >crlf
    printf '\357\273\2775\n5\n5\n700\n0\n1024\n' >mark
    printf '# head\n\n5 3\n  \t\n\t700 \t 1 # why\n0 1\n7 0\n1024' >counts
    printf '5\n5\n5\n700\n0\n1K\n' >suffix
    awk 'BEGIN {
        printf "5 3 #"
        for (i = 0; i < 5000; i++) printf "long comment "
        printf "\n700\n0\n1024\n"
    }' >comment
    for list in crlf mark counts suffix comment; do
        cf pack --chunk-size 64 --json - "$list"
        same_files "lists/$list" plan out
    done
    same lists/stdin "$(cksum <plan)" "$("$CHUNKFLOW" pack --chunk-size 64 --json - - <counts | cksum)"

    : >empty
    printf '# nothing\n\n5 0\n' >nothing
    for list in empty nothing; do
        succeeds "lists/$list/pack" pack --chunk-size 64 "$list"
        same "lists/$list/sequences" "0 0" "$(summary input 2) $(summary chunks)"
        succeeds "lists/$list/plan" plan --chunk-size 64 --k 1 "$list"
        same "lists/$list/actions" 0 "$(summary actions | tr -d :)"
        succeeds "lists/$list/json" plan --chunk-size 64 --k 1 --json - "$list"
    done
    printf '0 5\n' >zeros
    succeeds lists/zeros pack --chunk-size 64 --ranks 3 zeros
    same lists/zeros/empty "5 5" "$(summary input 2) $(summary input 4)"

    n=0
    for line in 12x x -5 +5 5.0 1e3 '5,' '5;3' '5 x' '5 -1' '5 3 2' '5 3x' 281474976710657 99999999999999999999 \
        '5 99999999999' '5 9223372036854775808' 257T 0x10 '5\0005' '\0335' '--' '"5"' 'ten' '5 \302\2403'; do
        n=$((n + 1))
        printf '5\n\n# fine\n%b\n7\n' "$line" >bad
        refuses "lists/bad/$n" 2 "^bad:4: got '" pack --chunk-size 64 bad
    done
    refuses lists/bad/plan 2 "^bad:4: got '" plan --chunk-size 64 --k 1 --json made bad
    same lists/bad/plan/nothing no "$([ -e made ] && echo yes || echo no)"
    printf '5\n12x\n' >bad
    refuses lists/bad/text 2 \
        "^bad:2: got '12x', wanted a length in tokens \(0 .. 281474976710656\), or a length and a count, or a tree such as 32K \+ 2K 16$" \
        pack --chunk-size 64 bad
    printf '5\r\n12x\r\n' >bad
    refuses lists/bad/crlf 2 "^bad:2: got '12x', wanted" pack --chunk-size 64 bad
    printf '5\n\033[31m\n' >bad
    refuses lists/bad/control 2 'got .\\x1b\[31m.' pack --chunk-size 64 bad
    awk 'BEGIN { for (i = 0; i < 100000; i++) printf "9" }' >bad
    refuses lists/bad/endless 2 "^bad:1: got '9{40}\.\.\.'" pack --chunk-size 64 bad
    if wanted lists/bad/stdin; then
        code=0
        printf '5\nx\n' | "$CHUNKFLOW" pack --chunk-size 64 - >out 2>err || code=$?
        same lists/bad/stdin "2 0 1" "$code $(wc -c <out | tr -d ' ') $(grep -c "^standard input:2: got 'x'" err)"
    fi
    refuses lists/missing 2 'cannot open nosuch: No such file' pack --chunk-size 64 nosuch
    refuses lists/directory 2 'cannot read \.: Is a directory' pack --chunk-size 64 .

    # Limits: refused by name, at once, and without the memory that they ask for.
    printf '3\n5 99999999999\n' >many
    refuses lists/limit/count 2 '^many:2: .*more than 100000000 sequences' pack --chunk-size 64 many
    printf '5 100000000\n5\n' >many
    refuses lists/limit/sum 2 '^many:2: .*more than 100000000 sequences' pack --chunk-size 64 many
    printf '281474976710656\n' >long
    refuses lists/limit/chunks 2 . pack --chunk-size 1 long
    printf '7\n281474976710656 40000\n' >long
    refuses lists/limit/tokens 2 . pack --chunk-size 2147483647 long
    printf '7\n8\n281474976710656\n' >long
    refuses lists/limit/line 2 '^long:3: ' pack --chunk-size 2147483647 long
    printf '1024G\n' >long
    succeeds lists/long pack --chunk-size 4M long
    same lists/long/chunks "262144 262144" "$(summary chunks) $(summary groups 5)"
}

# ----------------------------------------------------------------------------------------------------------------------
# Trees: sequences that share what they begin with
# ----------------------------------------------------------------------------------------------------------------------

# What a list makes: sequences, tokens, rows, chunks and, with one stage and K = 1, replays.
tree_counts() { # LIST CHUNK-SIZE
    cf plan --chunk-size "$2" --k 1 --summary "$1"
    awk '/^input/ { gsub(",", ""); for (i = 2; i < NF; i++) if ($(i + 1) ~ /^sequences/) n = $i
                    for (i = 2; i < NF; i++) if ($(i + 1) == "tokens") tokens = $i }
         /^shared/ { gsub(",", ""); rows = $2 }
         /^plan/ { gsub(",", ""); chunks = $2 }
         /^actions/ { for (i = 2; i < NF; i++) if ($(i + 1) ~ /^R/) replays = $i }
         END { print n, tokens, rows + 0, chunks, replays + 0 }' out
}

test_trees() {
    echo '32K + 2K 16' >prompt
    echo '34K 16' >unshared
    same trees/prompt '16 557056 65536 8 4' "$(tree_counts prompt 8K)"
    same trees/unshared '16 557056 0 80' "$(tree_counts unshared 8K | sed 's/ [0-9]*$//')"
    echo '4K + (8K + 4K 6) 4' >agent
    same trees/agent '24 393216 135168 17 5' "$(tree_counts agent 8K)"
    echo '(5000 + 100 16) 30' >many
    same trees/many '480 2448000 198000 30 0' "$(tree_counts many 8K)"

    # The same said in other ways, and what says nothing.
    cf pack --chunk-size 8K --json - agent
    cp out plan
    n=0
    for line in '4K+(8K+4K 6)4' ' 4K + (8K + 4K 6) 2 + ( 8192 + 4K 2 + 4K 4 ) 2 # why' '(4K + (8K + 4K 6) 4)' \
        '4K + (8K + 4K + 4K 5 + 9K 0) 4 + (1 + 2) 0' '4K + (0 + (8K + 4K 6) 4)'; do
        n=$((n + 1))
        printf '%s\r\n' "$line" >again
        cf pack --chunk-size 8K --json - again
        same_files "trees/same/$n" plan out
    done
    printf '0 + 700 + (0 + 5)\n' >apart
    printf '700\n5\n' >plain
    cf pack --chunk-size 64 --json - plain
    cp out plan
    cf pack --chunk-size 64 --json - apart
    same_files trees/apart plan out
    printf '(1 + (1 + 1 0)) 100000000\n' >nothing
    succeeds trees/nothing pack --chunk-size 64 nothing

    n=0
    for line in '5 +' '+ 5' '5 + 3)' '(5 + 3' '5 + (3)' '((5 + 3))' '5 + (3 + 1) x' '(5 + 3) 2 3' '5 3 + 1' '5 + x' \
        '5 + 281474976710652' '5 + 1K 3 4' '5 + 3 -1' '()' '5 + ()'; do
        n=$((n + 1))
        printf '7\n%s\n' "$line" >bad
        refuses "trees/bad/$n" 2 "^bad:2: got '" pack --chunk-size 64 bad
    done
    awk 'BEGIN { for (i = 0; i < 100; i++) printf "1 + ("; printf "1 + 1"; for (i = 0; i < 100; i++) printf ")" }' >bad
    refuses trees/deep 2 '^bad:1: got ' pack --chunk-size 64 bad
    echo '(1 + 1 100000) 100000' >bad
    refuses trees/sequences 2 '^bad:1: .*more than 100000000 sequences' pack --chunk-size 64 bad
    refuses trees/tune 2 'agent:1: longer than --context, and of trees nothing' tune --model qwen2.5-7b --gpu h100-80g \
        --gpus 8 --context 4K agent
    refuses trees/gen 2 'agent: gen knows no trees' gen histogram agent
    refuses trees/method 2 '--method: trees are packed by best fit' pack --chunk-size 8K --method next-fit agent

    # All that is written of them is read again; what they share is part of it.
    printf '4K + (8K + 4K 6) 4\n2K 3\n9K\n(700 + 50 2 + 60) 5\n' >mixed
    succeeds trees/files plan --chunk-size 8K --k 1 --stages 3 --ranks 2 --plan-json plan --metadata --json schedule \
        --csv passes.csv --csv-extensions --microbatches order --dot graph --trace trace --svg picture --summary mixed
    succeeds trees/check check --lengths mixed plan
    succeeds trees/check/schedule check --plan plan schedule
    same trees/version 1 "$(grep -c '"version": 2' plan)"
    sed 's/"order": \[0, /"order": [1, /' plan >bad
    refuses trees/check/order 1 '^bad: breaks a rule: order.1.: ' check bad
    sed 's/"common": \[.*$/"common": [],/' plan >bad
    refuses trees/check/common 1 '^bad:.*n_sequences: says 43, there are 0' check bad
    sed '/"common": /d' plan >bad
    refuses trees/check/missing 2 '^bad:.*common is missing' check bad
    sed 's/"parent": 0, "below": 1/"parent": 7, "below": 1/' plan >bad
    refuses trees/check/parent 2 '^bad:.*parent: got 7' check bad
    cf compare --chunk-size 8K --stages 2 mixed
    same trees/compare 0 "$code"
    succeeds trees/report report --chunk-size 8K --stages 2 -o page mixed
    same trees/page 1 "$(grep -c '"unshared_pairs"' page)"

    # Drawn ones are lists, too; without branches they are what they were.
    cf gen lognormal --n 20 --branches 3
    cp out drawn
    same trees/drawn '20 60' "$(wc -l <drawn | tr -d ' ') $(tree_counts drawn 4K | cut -d ' ' -f 1)"
    cf gen lognormal --n 80
    cp out lengths
    tr -d ' ' <drawn | tr '+' '\n' >flat
    same_files trees/drawn/lengths lengths flat
}

# ----------------------------------------------------------------------------------------------------------------------
# pack
# ----------------------------------------------------------------------------------------------------------------------

# What awk makes of a list: sequences, tokens, ceil(tokens / chunk size), and how many chunks first-fit decreasing takes
# (those of long sequences included; their last chunks stand open for short ones unless tails = 0).
first_fit() { # LIST CHUNK-SIZE TAILS
    sort -nr "$1" | awk -v size="$2" -v tails="$3" '
        { n++; tokens += $1 }
        $1 > size {
            full += int($1 / size)
            rest = $1 % size
            if (rest) { if (tails) room[bins++] = size - rest; else full++ }
            next
        }
        $1 > 0 {
            for (i = 0; i < bins && room[i] < $1; i++);
            if (i == bins) room[bins++] = size
            room[i] -= $1
        }
        END { printf "%d %.0f %d %d\n", n, tokens, int((tokens + size - 1) / size), full + bins }'
}

# Columns of the chunk table.
chunk_rows() {
    awk '$1 == "chunk" && $2 == "rank" { on = 1; next } on && NF == 0 { exit } on' out
}

test_pack() {
    # The paper's worked example: 16 sequences, one of four chunks, the others fill three.
    printf '4\n3\n1\n2\n1\n32\n1\n1\n2\n1\n1\n2\n1\n2\n1\n1\n' >paper
    same pack/paper/input "16 56" "$(awk '{ n++; s += $1 } END { print n, s }' paper)"
    succeeds pack/paper pack --chunk-size 8 --chunks paper
    same pack/paper/chunks "7 3 4" "$(summary chunks) $(summary chunks 3) $(summary chunks 6)"
    same pack/paper/bound "7 0" "$(summary 'lower bound') $(summary 'lower bound' 4)"
    same pack/paper/fill 100.0000 "$(summary fill)"

    "$CHUNKFLOW" gen lmsys --n 300 --seed 11 >drawn
    printf '8192\n16384\n1\n0\n20000\n8193\n' >>drawn
    for size in 1000 2048 8192; do
        for tails in 1 0; do
            option=
            if [ $tails = 0 ]; then option=--no-tails; fi
            # shellcheck disable=SC2046
            set -- $(first_fit drawn $size $tails)
            cf pack --chunk-size $size --chunks $option drawn
            chunk_rows >rows
            same "pack/$size/$tails/input" "$1 $2" \
                "$(summary input 2) $(sed -n 's/^input.*, \([0-9,]*\) tokens$/\1/p' out | tr -d ,)"
            same "pack/$size/$tails/table" "$(summary chunks) $2 0" \
                "$(awk -v size=$size '
                    { tokens += $7; if ($7 > size || $8 > size) bad++ }
                    END { print NR, tokens, bad + 0 }' rows)"
            between "pack/$size/$tails/bound" "$(summary 'lower bound')" "$3" "$(summary chunks)"
            between "pack/$size/$tails/first-fit" "$(summary chunks)" "$3" "$4"
            if [ $tails = 0 ]; then same "pack/$size/no-tails" 0 "$(summary chunks 9)"; fi
            same "pack/$size/$tails/name" best-fit "$(summary 'packed by' | tr -d ,)"
            cf pack --chunk-size $size $option --method next-fit drawn
            same "pack/$size/$tails/next-fit/name" next-fit "$(summary 'packed by' | tr -d ,)"
        done
    done

    # Next fit keeps the order: the sequences in the table never go back.
    "$CHUNKFLOW" gen uniform --min 1 --max 64 --n 200 >short
    cf pack --chunk-size 64 --method next-fit --chunks short
    chunk_rows | awk '{ for (i = 11; i <= NF; i++) print $i }' >order
    awk 'BEGIN { for (i = 0; i < 200; i++) print i }' >want
    same_files pack/next-fit/order want order

    # Slices of one sequence: equal in tokens, or the dearest as cheap as can be.
    echo 1000 >one
    cf pack --chunk-size 300 --chunks one
    same pack/split/full "300 300 300 100" "$(chunk_rows | awk '{ printf "%s%s", sep, $7; sep = " " }')"
    same pack/split/table "0[0..300) 0[300..600) 0[600..900) 0[900..1000)" \
        "$(chunk_rows | awk '{ printf "%s%s", sep, $11; sep = " " }')"
    same pack/split/pairs "500500" "$(chunk_rows | awk '{ pairs += $9 } END { print pairs }')"
    cf pack --chunk-size 300 --chunks --split even one
    same pack/split/even "4 250 250" "$(chunk_rows | awk '
        NR == 1 || $7 < low { low = $7 }
        $7 > high { high = $7 }
        END { print NR, low, high }')"
    cf pack --chunk-size 300 --chunks --split cost one
    same pack/split/cost "1000 falling" "$(chunk_rows | awk '
        { tokens += $7; if (NR > 1 && $7 > before) bad = 1; before = $7 }
        END { print tokens, bad ? "rising" : "falling" }')"

    # Alignment: each slice takes a multiple; padded stays within the chunk.
    # A giant on one of four ranks: 40 of 50 tokens. What that costs and what would help is said in words.
    printf '40\n1 10\n' >giant
    cf pack --chunk-size 10 --ranks 4 giant
    same pack/ranks/giant "3.2000 11 of 16" "$(sed -n 's/^ranks .* tokens at most \([0-9.]*\) x.*/\1/p' out) $(
        sed -n 's/^dearest rank .*; \([0-9]* of [0-9]*\) steps idle/\1/p' out)"
    spread=$(sed -n 's/^dearest rank  *\([0-9.]*\) x the mean cost .*/\1/p' out)
    between pack/ranks/spread "$spread" 3.2 4 # by pairs it is dearer than by tokens
    same pack/ranks/cost "$(awk -v s="$spread" 'BEGIN { printf "%.1f %%", 100 * (1 - 1 / s) }')" \
        "$(sed -n 's/^ .*All ranks wait for it: \([0-9.]* %\) of.*/\1/p' out)"
    same pack/ranks/why "1 1" "$(grep -c 'Sequence 0 with its 40 tokens alone costs' out) $(
        grep -c 'What would help: at most 1 rank, with' out)"
    printf '8\n8\n8\n' >three
    cf pack --chunk-size 8 --ranks 2 three
    same pack/ranks/coarse "1 1" "$(grep -c '^dearest rank  *1.3333 x' out) $(grep -c 'too few or too large to be' out)"
    # The dear chunks of the long one do not share their rank with as many others as ranks without it have.
    { echo 131072; seq 1000 50 12000; seq 1000 50 12000; } >uneven
    cf pack --chunk-size 4K --ranks 4 uneven
    between pack/ranks/dear "$(sed -n 's/^dearest rank  *\([0-9.]*\) x the mean cost .*/\1/p' out)" 1 1.11
    cf pack --chunk-size 8 --ranks 3 three
    same pack/ranks/even "1 0" "$(grep -c '^dearest rank  *1.0000 x' out) $(grep -c 'What would help' out)"
    cf pack --chunk-size 8 --ranks 2 --lockstep three # two columns for a mean of one and a half
    same pack/ranks/lockstep "2 1.3333" "$(sed -n 's/^in step  *\([0-9]*\) columns, together \([0-9.]*\) x .*/\1 \2/p' out)"
    printf '3000\n20\n30\n500\n' >giant
    cf pack --chunk-size 256 --ranks 4 --gang 4 giant # without a gang the dearest rank has all that counts
    same pack/ranks/gang "2 4" "$(sed -n 's/^gangs  *\([0-9]*\) of .* over \([0-9]*\) ranks at most$/\1 \2/p' out)"
    between pack/ranks/gang/even "$(sed -n 's/^dearest rank  *\([0-9.]*\) x the mean cost .*/\1/p' out)" 1 1.05
    refuses pack/ranks/gang/more 2 'gang' pack --chunk-size 256 --ranks 4 --gang 5 giant
    cf pack --chunk-size 1K --ranks 4 --gang 4 --model qwen2.5-7b --gpu h100-80g --launch 0.001 giant # a pass is dear
    same pack/ranks/gang/priced 1 "$(sed -n 's/^gangs  *\([0-9]*\) of .*/\1/p' out)"
    cf pack --chunk-size 8 three
    same pack/ranks/one 0 "$(grep -c '^dearest rank' out)"
    cf pack --chunk-size 64 --align 8 --chunks short
    same pack/align 0 "$(chunk_rows | awk '$8 > 64 || $8 < $7 { bad++ } END { print bad + 0 }')"
    same pack/align/said 1 "$(grep -c 'slices start at multiples of 8' out)"
    cf pack --chunk-size 64 --max-slices 2 --chunks short
    same pack/max-slices "0 2" "$(chunk_rows | awk '
        $10 > 2 { bad++ }
        $10 > most { most = $10 }
        END { print bad + 0, most }')"

    # Ranks: as many chunks for each, all tokens there, groups not torn.
    cf pack --chunk-size 1000 --ranks 4 --chunks drawn
    chunk_rows >rows
    same pack/ranks/steps "4 even" "$(awk '
        { n[$2]++ }
        END { for (r in n) { ranks++; if (n[r] != NR / 4) bad = 1 }; print ranks, bad ? "uneven" : "even" }' rows)"
    same pack/ranks/groups "0" "$(awk '
        $4 != "-" { if ($4 in at && at[$4] != $2) bad++; at[$4] = $2 }
        END { print bad + 0 }' rows)"
    same pack/ranks/tokens "$(awk '{ s += $1 } END { print s }' drawn)" "$(awk '{ s += $7 } END { print s }' rows)"
    same pack/ranks/steps/said "4 $(($(wc -l <rows) / 4))" "$(summary ranks) $(summary ranks 3)"

    # The histogram of the input, against one made here.
    cf pack --chunk-size 1000 drawn
    awk '{ b = 0; x = $1; while (x > 0) { b++; x = int(x / 2) } n[b]++; t[b] += $1 }
        END { for (b = 0; b < 50; b++) if (n[b]) print n[b], t[b] }' drawn >want
    awk '$1 == "length" && $2 == "sequences" { on = 1; next } on && NF == 0 { exit }
        on { gsub(",", ""); i = $2 == ".." ? 4 : 2; if ($i > 0) print $i, $(i + 3) }' out >got
    same_files pack/histogram want got
    sort -n drawn >sorted
    n=$(wc -l <sorted)
    middle=$(sed -n "$(((n * 500 + 999) / 1000))p" sorted)
    late=$(sed -n "$(((n * 990 + 999) / 1000))p" sorted)
    same pack/quantiles "$middle $late $(tail -n 1 sorted)" \
        "$(sed -n 's/^lengths.*median \([0-9,]*\), 90 .*, 99 % \([0-9,]*\), longest \([0-9,]*\)$/\1 \2 \3/p' out | tr -d ,)"
}

# For scripts: awk on the list, on the table for people, and python on the JSON find the same numbers.
test_tsv() {
    "$CHUNKFLOW" gen lmsys --n 300 --seed 11 >drawn
    printf '8192\n0\n1\n20000\n' >>drawn
    cf pack --chunk-size 1000 --tsv drawn
    same tsv/pack/names "shortest_tokens longest_tokens sequences share_of_sequences tokens share_of_tokens" \
        "$(head -n 1 out | tr '\t' ' ')"
    awk '{ b = 0; x = $1; while (x > 0) { b++; x = int(x / 2) } n[b]++; t[b] += $1; all++; sum += $1
            if (NR == 1 || b < least) least = b; if (b > most) most = b }
        END { for (b = least; b <= most; b++) printf "%d %d %d %.12g %d %.12g\n", b ? 2 ^ (b - 1) : 0,
            b ? 2 ^ b - 1 : 0, n[b], n[b] / all, t[b], t[b] / sum }' drawn >want
    awk -F '\t' 'NR > 1 { printf "%d %d %d %.12g %d %.12g\n", $1, $2, $3, $4, $5, $6 }' out >got
    same_files tsv/pack want got
    # More rows than a table looks at before it prints the first.
    cf pack --chunk-size 100 --chunks --tsv drawn
    between tsv/pack/chunks/rows "$(wc -l <out | tr -d ' ')" 1200 100000
    same tsv/pack/chunks/fields "11 11" "$(awk -F '\t' 'NR == 1 || NF < least { least = NF } NF > most { most = NF }
        END { print least, most }' out)"
    awk -F '\t' 'NR > 1 { for (i = 1; i <= NF; i++) printf "%s%s", $i == "" ? "-" : $i, i < NF ? " " : "\n" }' out >got
    cf pack --chunk-size 100 --chunks drawn
    chunk_rows | awk '{ $1 = $1; print }' >want
    same_files tsv/pack/chunks want got
    refuses tsv/pack/stdout 2 '--tsv and --json - exclude each other' pack --chunk-size 8 --tsv --json - drawn
    : >empty
    cf pack --chunk-size 8 --chunks --tsv empty
    same tsv/pack/empty "0 1" "$code $(wc -l <out | tr -d ' ')"

    mkdir -p names
    printf 'one two' >"names/a	b
c"
    printf 'x' >names/plain
    cf lengths --unit words --tsv names
    printf 'length_words\tname\n2\tnames/a?b?c\n1\tnames/plain\n' >want
    same_files tsv/lengths want out
    if [ -c /dev/full ]; then
        code=0
        "$CHUNKFLOW" pack --chunk-size 64 --chunks --tsv drawn >/dev/full 2>err || code=$?
        same tsv/full "1 1" "$code $(grep -c 'cannot write.*: No space left on device$' err)"
    fi
}

# ----------------------------------------------------------------------------------------------------------------------
# plan
# ----------------------------------------------------------------------------------------------------------------------

# Algorithm 2 for one group of N chunks and K: pass and chunk, + where activations are kept.
algorithm_2() { # N K
    awk -v n="$1" -v k="$2" 'BEGIN {
        for (i = 0; i < n; i++) print (i >= n - k ? "F+" : "F-"), i
        for (i = n - 1; i >= 0 && i >= n - k; i--) print "B", i
        for (; i >= 0; i--) { print "R+", i; print "B", i }
    }'
}

action_rows() {
    awk '$1 == "position" { on = 1; next } on && NF == 0 { exit } on' out
}

test_plan() {
    for n in 1 2 3 5 20; do
        echo $((n * 100)) >one
        for k in 1 2 3 4 21; do
            live=$k
            if [ $n -lt $k ]; then live=$n; fi
            algorithm_2 $n $k >want
            cf plan --chunk-size 100 --k $k one
            action_rows | awk '{ print $2, $3 }' >got
            same_files "plan/$n/$k" want got
            state="1 $((n * 100))"
            if [ $n = 1 ]; then state="0 0"; fi
            same "plan/$n/$k/peaks" "$live $((live * 100)) $state" \
                "$(for what in 'peak activations' 'peak state'; do summary "$what"; summary "$what" 3; done | xargs)"
            # Live slots and state, by the columns of the table.
            same "plan/$n/$k/live" "$live $((n > 1 ? n * 100 : 0)) 0 0" "$(action_rows | awk '
                { live = $(NF - 1); state = $NF; if (live > a) a = live; if (state > b) b = state }
                END { print a, b + 0, live, state }')"
        done
    done

    "$CHUNKFLOW" gen lmsys --n 200 --seed 3 >drawn
    printf '50000\n9000\n' >>drawn
    cf pack --chunk-size 2048 --ranks 2 drawn
    chunks=$(summary chunks)
    total=0
    for rank in 0 1; do
        cf plan --chunk-size 2048 --k 2 --ranks 2 --rank $rank drawn
        same "plan/rank/$rank" "$rank" "$(sed -n 's/.*, rank \([0-9]*\), .*/\1/p' out)"
        action_rows | awk '$2 == "B" { print $3 }' >>backwards
        forwards=$(action_rows | awk '$2 ~ /^F/' | wc -l)
        total=$((total + forwards))
    done
    same plan/rank/all "$chunks" "$total" # idle chunks keep their rank in step and run too
    same plan/rank/once "$chunks" "$(sort -n backwards | uniq | wc -l | tr -d ' ')"

    cf plan --chunk-size 2048 --k 1 drawn
    sed -n '/^input/,$p' out >want
    cf plan --chunk-size 2048 --k 1 --summary drawn
    same_files plan/summary want out
    cf plan --chunk-size 2048 --k 1 --replay local drawn
    same plan/replay/local 1 "$(grep -c '^schedule .*local replay' out)"
    sed -n '/^input/,$p' out >got
    same_files plan/replay/default want got
    cf plan --chunk-size 2048 --k 1 --replay pipeline drawn
    same plan/replay/pipeline 1 "$(grep -c '^schedule .*pipeline replay' out)"
}

# ----------------------------------------------------------------------------------------------------------------------
# Files out
# ----------------------------------------------------------------------------------------------------------------------

number_of() { # SIGNAL
    case $1 in HUP) echo 1 ;; INT) echo 2 ;; KILL) echo 9 ;; TERM) echo 15 ;; esac
}

test_outputs() {
    "$CHUNKFLOW" gen lmsys --n 100 >drawn
    cf pack --chunk-size 1024 --json - drawn
    cp out on-stdout
    same outputs/stdout/only '{' "$(head -c 1 out)"
    cf pack --chunk-size 1024 drawn
    cp out text
    cf pack --chunk-size 1024 --json file drawn
    same_files outputs/file on-stdout file
    same_files outputs/file/text text out
    cf plan --chunk-size 1024 --k 1 --plan-json file2 --json schedule drawn
    same_files outputs/plan-json on-stdout file2
    cf plan --chunk-size 1024 --k 1 --json - drawn
    same_files outputs/plan/stdout schedule out
    cf plan --chunk-size 1024 --k 1 --plan-json - drawn
    same_files outputs/plan-json/stdout on-stdout out
    cf plan --chunk-size 1024 --k 1 --json - --plan-json file3 drawn
    same_files outputs/both on-stdout file3
    same_files outputs/both/stdout schedule out

    # Replaced whole, or left alone.
    echo precious >kept
    chmod 640 kept
    ln -s kept link
    cf pack --chunk-size 1024 --json link drawn
    same_files outputs/link on-stdout kept
    same outputs/link/stays yes "$([ -h link ] && echo yes || echo no)"
    ln -s nowhere lost
    refuses outputs/link/nowhere 1 '^chunkflow: cannot write lost: ' pack --chunk-size 1024 --json lost drawn
    same outputs/link/nowhere/stays "yes no" \
        "$([ -h lost ] && echo yes || echo no) $([ -e nowhere ] && echo yes || echo no)"
    same outputs/mode -rw-r----- "$(ls -l kept | cut -c 1-10)"
    echo precious >kept
    echo x >bad
    refuses outputs/bad 2 '^bad:1: ' pack --chunk-size 1024 --json kept bad
    refuses outputs/usage 2 'unknown option' pack --chunk-size 1024 --json kept drawn --nosuch
    same outputs/untouched precious "$(cat kept)"
    cf pack --chunk-size 1024 --json drawn drawn
    same_files outputs/onto-input on-stdout drawn
    "$CHUNKFLOW" gen lmsys --n 100 >drawn

    refuses outputs/nosuch 1 'cannot write nosuch/file: No such file' pack --chunk-size 1024 --json nosuch/file drawn
    refuses outputs/directory 1 'cannot write \.: ' pack --chunk-size 1024 --json . drawn
    cf plan --chunk-size 1024 --k 1 --json fresh --plan-json nosuch/file drawn
    same outputs/neither "1 no" "$code $([ -e fresh ] && echo yes || echo no)"

    # A closed standard output must not lend its number to the file: no mixed-up JSON, and no success.
    code=0
    "$CHUNKFLOW" pack --chunk-size 1024 --json closed drawn 2>err >&- || code=$?
    same outputs/closed "1 no 1" \
        "$code $([ -e closed ] && echo yes || echo no) $(grep -c 'cannot write standard output' err)"

    if [ -c /dev/full ]; then
        for command in 'gen lmsys' 'lengths drawn' 'pack --chunk-size 1024 drawn' 'plan --chunk-size 64 --k 1 drawn' \
            'pack --chunk-size 1024 --json - drawn' 'plan --chunk-size 64 --k 1 --json - drawn' \
            --help --version 'help pack'; do
            code=0
            # shellcheck disable=SC2086
            "$CHUNKFLOW" $command >/dev/full 2>err || code=$?
            same "outputs/full/$command" "1 1 1" \
                "$code $(wc -l <err | tr -d ' ') $(grep -c 'cannot write.*: No space left on device$' err)"
        done
        cf pack --chunk-size 1024 --json /dev/full drawn
        same outputs/full/json "1 chunkflow: cannot write /dev/full: No space left on device" "$code $(cat err)"
        # A file is not put in its place when the text beside it could not be written.
        code=0
        "$CHUNKFLOW" pack --chunk-size 1024 --json kept drawn >/dev/full 2>err || code=$?
        same outputs/full/kept "1 precious" "$code $(cat kept)"
    else
        skip outputs/full "there is no /dev/full"
    fi
    # A run that is ended while it writes leaves nothing; one that is killed leaves a name that the next run takes over.
    # It stands still in the middle because nobody reads its standard output.
    if mkfifo pipe 2>/dev/null; then
        "$CHUNKFLOW" gen uniform --n 3000 --min 1 --max 1000 >many
        # Nor does one whose reader goes.
        "$CHUNKFLOW" plan --chunk-size 1024 --k 1 --plan-json ended --json - many 2>err | head -n 1 >/dev/null
        same outputs/signal/PIPE/left "" "$(find . -name 'ended*')"
        # A shell lets what runs in the background ignore INT, and nohup lets all ignore HUP; env undoes both where it
        # can.
        undo='env --default-signal=INT,HUP'
        signals='INT TERM HUP KILL'
        if ! $undo true 2>/dev/null; then
            undo= signals='TERM HUP KILL'
            skip outputs/signal/INT "env has no --default-signal here"
        fi
        for signal in $signals; do
            sleep 60 <pipe &
            reader=$!
            $undo "$CHUNKFLOW" plan --chunk-size 1024 --k 1 --schedule paper --plan-json ended --json - many >pipe 2>err &
            writer=$!
            tries=0
            while ! [ -e ended.chunkflow-tmp0 ] && [ $tries -lt 100 ]; do sleep 0.1; tries=$((tries + 1)); done
            there=$([ -e ended.chunkflow-tmp0 ] && echo yes || echo no)
            if [ $signal = KILL ]; then
                # Another run while this one writes takes another name, and leaves this one's alone.
                cf pack --chunk-size 1024 --json ended drawn
                same outputs/signal/beside "0 yes" "$code $([ -e ended.chunkflow-tmp0 ] && echo yes || echo no)"
                rm -f ended
            fi
            kill -$signal $writer
            code=0
            wait $writer 2>/dev/null || code=$?
            kill $reader
            wait $reader 2>/dev/null
            same "outputs/signal/$signal" "yes $((128 + $(number_of $signal))) no" \
                "$there $code $([ -e ended ] && echo yes || echo no)"
            same "outputs/signal/$signal/left" "$([ $signal = KILL ] && echo ended.chunkflow-tmp0)" "$(find . -name 'ended*' | sed 's,^./,,')"
        done
        cf pack --chunk-size 1024 --json ended drawn
        same outputs/signal/taken-over "0 ./ended" "$code $(find . -name 'ended*')"
    else
        skip outputs/signal "there are no named pipes here"
    fi
    # What a short list can ask for is said before it is taken.
    echo 1 30000000 >count
    "$CHUNKFLOW" pack --chunk-size 1024 count >/dev/null 2>said &
    writer=$!
    tries=0
    while ! [ -s said ] && [ $tries -lt 100 ]; do sleep 0.1; tries=$((tries + 1)); done
    kill $writer
    wait $writer 2>/dev/null
    same outputs/memory 'chunkflow: packing 30,000,000 sequences takes up to 1.7 GiB of memory' "$(cat said)"
    cf pack --chunk-size 1024 drawn
    same outputs/memory/little "0 " "$code $(cat err)"

    # A symbolic link at the temporary name is not followed.
    echo precious >aside
    ln -s aside trap.chunkflow-tmp0
    cf pack --chunk-size 1024 --json trap drawn
    same outputs/trap "0 precious" "$code $(cat aside)"
    same_files outputs/trap/text on-stdout trap
    rm trap.chunkflow-tmp0
    # Nor is a file that has another name as well, and what is called .tmp0 is somebody's own.
    ln aside trap.chunkflow-tmp0
    cp aside trap.tmp0
    cf pack --chunk-size 1024 --json trap drawn
    same outputs/hard-link "0 precious precious precious" "$code $(cat aside trap.chunkflow-tmp0 trap.tmp0 | xargs)"
    same_files outputs/hard-link/text on-stdout trap
    rm trap.chunkflow-tmp0 trap.tmp0

    # A file that may not grow as far is an error as any other, and leaves nothing behind.
    said=$(ulimit -f 1 && "$CHUNKFLOW" pack --chunk-size 64 --json grown drawn 2>&1 >/dev/null; echo $?)
    same outputs/limit 'chunkflow: cannot write grown: File too large 1' "$(echo $said)"
    same outputs/limit/left "" "$(find . -name 'grown*')"

    cf pack --chunk-size 1024 --json /dev/null drawn
    same outputs/device "0 yes" "$code $([ -c /dev/null ] && echo yes || echo no)"
    same outputs/leftovers 0 "$(find . -name '*tmp[0-9]*' | wc -l | tr -d ' ')"
}

# ----------------------------------------------------------------------------------------------------------------------
# JSON
# ----------------------------------------------------------------------------------------------------------------------

test_json() {
    wanted json || return 0
    if [ -z "$PYTHON" ]; then
        skip json "there is no python3"
        return 0
    fi
    cat >read.py <<'EOF'
import json, sys

lengths = [int(line) for line in open(sys.argv[1])]
plan = json.load(open(sys.argv[2]))
schedules = [json.load(open(name)) for name in sys.argv[3:]]


def check(holds, what):
    if not holds:
        print(what)
        sys.exit()


size, chunks = plan["chunk_size"], plan["chunks"]
check(plan["format"] == "chunkflow-plan" and plan["version"] == 1, "format")
check(plan["n_sequences"] == len(lengths) and plan["n_tokens"] == sum(lengths), "totals")
check(plan["n_empty"] == lengths.count(0), "n_empty")
check(len(chunks) == plan["n_chunks"] == plan["n_ranks"] * plan["n_steps"], "n_chunks")
check(-(-sum(lengths) // size) <= plan["lower_bound"] <= len(chunks) - plan["n_idle"], "lower_bound")

seen = [0] * len(lengths)
group_of = {}
for place, chunk in enumerate(chunks):
    check(chunk["id"] == place and chunk["rank"] == place // plan["n_steps"], "id and rank")
    at = pairs = 0
    for order, s in enumerate(chunk["slices"]):
        check(s["offset"] % plan["align"] == 0 and s["offset"] >= at, "offset")
        at = s["offset"] + s["length"]
        check(s["length"] > 0 and s["begin"] == seen[s["sequence"]], "slices in order")
        seen[s["sequence"]] += s["length"]
        pairs += s["length"] * s["begin"] + s["length"] * (s["length"] + 1) // 2
        whole = s["length"] == lengths[s["sequence"]]
        check(whole != (chunk["group"] >= 0 and order == 0), "only the first slice of a dependent chunk is a part")
    check(at <= chunk["padded"] <= size and chunk["pairs"] == pairs, "padded and pairs of chunk %d" % place)
    check(chunk["tokens"] == sum(s["length"] for s in chunk["slices"]), "tokens")
    if chunk["group"] >= 0:
        members = group_of.setdefault(chunk["group"], [])
        check(chunk["index"] == len(members) and chunk["prefix"] == chunk["slices"][0]["begin"], "index and prefix")
        members.append(place)
check(seen == lengths, "every token once")
check(len(group_of) == plan["n_groups"] == len(plan["groups"]), "n_groups")
for number, group in enumerate(plan["groups"]):
    check(group["id"] == number and group_of[number] == list(range(group["first_chunk"], group["first_chunk"] +
          group["n_chunks"])) and group["tokens"] == lengths[group["sequence"]] > size, "groups")

for rank, schedule in enumerate(schedules):
    check(schedule["format"] == "chunkflow-schedule" and schedule["version"] == 2, "schedule format")
    check(schedule["kind"] == "paper" and schedule["stages"] == 1 and schedule["rank"] == rank, "schedule head")
    actions = schedule["actions"][0]
    check(len(schedule["actions"]) == 1 and len(actions) == schedule["n_actions"], "n_actions")
    live, forwarded, done, kept = {}, {}, set(), set()
    for a in actions:
        chunk = chunks[a["chunk"]]
        group, index = chunk["group"], chunk["index"]
        check(chunk["rank"] == rank, "whose chunk")
        if a["pass"] in "FR":
            check(("keep" in a) and (a["chunk"] not in kept), "keep")
            if a["pass"] == "F" and group >= 0:
                check(forwarded.get(group, 0) == index, "forwards ascend")
                forwarded[group] = index + 1
            if a["keep"]:
                kept.add(a["chunk"])
                live[group] = live.get(group, 0) + 1
                check(live[group] <= (schedule["k"] if group >= 0 else 1), "at most K live")
        else:
            check(a["pass"] == "B" and "keep" not in a and a["chunk"] in kept, "backward of a kept chunk")
            later = group_of[group][index + 1:] if group >= 0 else []
            check(all(c in done for c in later) and a["chunk"] not in done, "backwards descend")
            kept.remove(a["chunk"])
            live[group] -= 1
            done.add(a["chunk"])
    check(done == {i for i, c in enumerate(chunks) if c["rank"] == rank}, "all chunks done")
    check(not kept, "nothing left")
print("ok")
EOF
    "$CHUNKFLOW" gen lmsys --n 300 --seed 2 >drawn
    printf '0\n8192\n16384\n1\n40000\n0\n' >>drawn
    run=0
    while read -r ranks k options; do
        run=$((run + 1))
        names=
        rank=0
        while [ $rank -lt "$ranks" ]; do
            # shellcheck disable=SC2086
            "$CHUNKFLOW" plan --ranks "$ranks" --rank $rank --k "$k" $options --schedule paper \
                --plan-json plan.json --json "s$rank.json" drawn >/dev/null || echo "exit code $?"
            names="$names s$rank.json"
            rank=$((rank + 1))
        done
        # shellcheck disable=SC2086
        same "json/$ranks $k $options" ok "$(python read.py drawn plan.json $names 2>&1 | tail -n 1)"
    done <<'EOF'
1 1 --chunk-size 8192
1 2 --chunk-size 2048 --no-tails
1 4 --chunk-size 1000 --split even
1 2 --chunk-size 1024 --split cost
1 3 --chunk-size 1024 --align 16
1 2 --chunk-size 2048 --max-slices 3
1 1 --chunk-size 2048 --method next-fit
3 2 --chunk-size 1024
2 1 --chunk-size 4096 --align 128 --max-slices 9 --split even
EOF
}

# ----------------------------------------------------------------------------------------------------------------------

test_harness
quick test_help
test_usage
test_lengths
test_index
quick test_gen
quick test_gen_python
test_lists
test_trees
quick test_pack
quick test_tsv
quick test_plan
test_outputs
quick test_json

left_out "sanitizers for what is given sound input"
finish
