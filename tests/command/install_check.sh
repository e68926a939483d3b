#!/bin/sh
# install_check.sh - what `make install` puts where, and that it serves there - MIT or public domain
#
#     tests/command/install_check.sh [BUILD]     installs what is in BUILD (default: build) below a directory of its own
#
# Run it in the top directory. CC and CXX are the compilers.
set -u
. "$(dirname "$0")/../helpers.sh"

build=${1:-build}
top=$PWD
case $build in
    /*) ;;
    *) build=$top/$build ;;
esac
workplace "$build/install_check.tmp"
image=$work/image # what a package would be made of
place=$image/usr/flow
files='bin/chunkflow include/chunkflow.h include/chunkflow_cuda.cu include/chunkflow_tune.h
share/bash-completion/completions/chunkflow share/fish/vendor_completions.d/chunkflow.fish share/man/man1/chunkflow.1
share/pkgconfig/chunkflow.pc share/chunkflow/chunkflow.schema.json'
for file in __init__.py torch.py huggingface.py trainer.py megatron.py lengths.py py.typed libchunkflow.so libchunkflow.h; do
    files="$files share/chunkflow/python/chunkflow/$file"
done

installed() { (cd "$place" && find . -type f | sed 's,^\./,,' | LC_ALL=C sort); }

# This make must not share jobs with another make that started the script.
unset MAKEFLAGS MFLAGS MAKELEVEL
# Building with sanitizers would take twice as long, and nothing here needs them.
SANITIZE=
export SANITIZE

make -s install BUILD="$build" DESTDIR="$image" PREFIX=/usr/flow >"$work/log" 2>&1
if [ $? -eq 0 ] && [ "$(installed)" = "$(printf '%s\n' $files | LC_ALL=C sort)" ]; then
    ok installs_these_files
else
    fail installs_these_files "$(installed | tr '\n' ' ')" "$work/log"
fi

# ---- folders with blanks and quotes, a strict umask, a TMPDIR that does not exist ----

mkdir -p "$work/in" && : >"$work/in/bystander"
odd="$work/in st's \"x"
(umask 077 && make -s install BUILD="$build" DESTDIR="$odd" PREFIX="/usr/my flow") >"$work/log" 2>&1
if [ $? -eq 0 ] && [ "$(cd "$odd/usr/my flow" && find . -type f | sed 's,^\./,,' | LC_ALL=C sort)" = "$(installed)" ]; then
    ok installs_into_odd_places
else
    fail installs_into_odd_places "files are missing" "$work/log"
fi
closed=$(find "$odd/usr" ! -perm -444 2>&1; find "$odd/usr" -type d ! -perm -111; find "$odd/usr/my flow/bin" -type f ! -perm -111)
if [ -z "$closed" ]; then ok installs_for_everybody; else fail installs_for_everybody "$closed"; fi
if command -v pkg-config >/dev/null; then
    got=$(PKG_CONFIG_PATH="$odd/usr/my flow/share/pkgconfig" pkg-config --cflags chunkflow)
    if [ "${got% }" = '-I/usr/my\ flow/include' ]; then ok pkg_config_blanks; else fail pkg_config_blanks "$got"; fi
fi
make -s uninstall BUILD="$build" DESTDIR="$odd" PREFIX="/usr/my flow" >"$work/log" 2>&1
if [ $? -eq 0 ] && [ -z "$(find "$odd" -type f)" ] && [ -f "$work/in/bystander" ]; then ok uninstalls_from_odd_places
else fail uninstalls_from_odd_places "$(find "$odd" "$work/in" -type f)" "$work/log"; fi

TMPDIR=$work/none make -n clean >"$work/log" 2>&1
if [ $? -ne 0 ] && grep -q "TMPDIR ($work/none)" "$work/log"; then ok make_needs_a_tmpdir
else fail make_needs_a_tmpdir "make went on without asking the compiler" "$work/log"; fi

commands=$("$place/bin/chunkflow" --help | sed -n '/^commands/,/^$/s/^  \([a-z]*\) .*/\1/p' | grep -v '^help$')
options() { "$place/bin/chunkflow" help "$1" | sed -n '/^options/,/^$/s/^  \(--[a-z0-9-]*\).*/\1/p' | grep -v '^--help$'; }

# ---- the headers ----

cat >"$work/user.c" <<'C'
#define CHUNKFLOW_IMPLEMENTATION
#include <chunkflow.h>
#define CHUNKFLOW_TUNE_IMPLEMENTATION
#include <chunkflow_tune.h>
#define CHUNKFLOW_CUDA_HEADER_ONLY
#include <chunkflow_cuda.cu>
int main(void) { return cf_model_find("qwen2.5-7b") && cf_gpu_find("h200") && sizeof(cf_executor_desc) > 0 ? 0 : 1; }
C

if ! command -v pkg-config >/dev/null; then
    skip pkg_config "there is no pkg-config"
else
    PKG_CONFIG_PATH=$place/share/pkgconfig
    PKG_CONFIG_SYSROOT_DIR=$image
    export PKG_CONFIG_PATH PKG_CONFIG_SYSROOT_DIR
    version=$(pkg-config --modversion chunkflow 2>&1)
    if [ "chunkflow $version" = "$("$place/bin/chunkflow" --version)" ]; then ok pkg_config_version
    else fail pkg_config_version "$version"; fi
    if (cd "$work" && ${CC:-cc} $(pkg-config --cflags chunkflow) user.c -o user $(pkg-config --libs chunkflow)) \
           >"$work/log" 2>&1 && "$work/user" >>"$work/log"; then
        ok pkg_config_compiles
    else
        fail pkg_config_compiles "the installed headers do not compile or do not work" "$work/log"
    fi
    source=$(pkg-config --variable=cuda_source chunkflow)
    if cmp -s "$image${source#"$image"}" chunkflow_cuda.cu; then ok pkg_config_cuda_source
    else fail pkg_config_cuda_source "$source"; fi
fi

# ---- the manual page ----

page=$place/share/man/man1/chunkflow.1
if ! command -v groff >/dev/null; then
    skip manual "there is no groff"
else
    groff -man -Tascii -P-cbou -ww -rLL=200n "$page" >"$work/page" 2>"$work/log"
    if [ $? -eq 0 ] && ! [ -s "$work/log" ]; then ok manual_has_no_warnings
    else fail manual_has_no_warnings "groff complains" "$work/log"; fi
    missing=
    n=0
    for command in $commands; do
        sed -n "/^CHUNKFLOW $(echo "$command" | tr a-z A-Z)\$/,\$p" "$work/page" |
            awk 'NR > 1 && /^[A-Z]/ { exit } { print }' >"$work/section"
        for option in $(options "$command"); do
            n=$((n + 1))
            grep -qE -e "^ +$option(,| |\$)" "$work/section" || missing="$missing $command:$option"
        done
    done
    if [ "$n" -gt 100 ] && [ -z "$missing" ]; then ok manual_has_every_option
    else fail manual_has_every_option "of $n are missing:$missing"; fi
fi

# ---- completion ----

# Prints what bash would offer for the last word of a line.
offers() {
    bash -c '. "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
             _chunkflow chunkflow "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
             printf "%s\n" "${COMPREPLY[@]}"' bash "$place/share/bash-completion/completions/chunkflow" "$@" |
        LC_ALL=C sort | tr '\n' ' '
}

expect() { # NAME WANTED WORDS...
    name=$1 want=$2
    shift 2
    got=$(offers "$@")
    if [ "$got" = "$want" ]; then ok "$name"; else fail "$name" "wanted '$want', got '$got'"; fi
}

sorted() { printf '%s\n' "$@" | LC_ALL=C sort | tr '\n' ' '; }

if ! command -v bash >/dev/null; then
    skip bash_completion "there is no bash"
else
    expect bash_completes_commands "$(sorted $commands help --help --version)" chunkflow ''
    expect bash_completes_a_command "pack " chunkflow pa
    for command in $commands; do
        expect "bash_completes_$command" "$(sorted $(options "$command") --help)" chunkflow "$command" --
    done
    expect bash_completes_choices "cost even full " chunkflow pack --split ''
    expect bash_completes_operands "example lengths peaks speedup trade-off " chunkflow reproduce ''
    expect bash_leaves_files_alone " " chunkflow pack leng
    expect bash_leaves_values_alone " " chunkflow reproduce --json ''
    expect bash_completes_help "$(sorted $commands bash fish man)" chunkflow help ''
fi

if ! command -v zsh >/dev/null; then
    skip zsh_completion "there is no zsh"
elif zsh -fc 'autoload -U compinit bashcompinit && compinit -u -d "$2" && bashcompinit && . "$1" && whence _chunkflow' zsh \
         "$place/share/bash-completion/completions/chunkflow" "$work/zcompdump" >"$work/log" 2>&1; then
    ok zsh_takes_it
else
    fail zsh_takes_it "zsh complains" "$work/log"
fi

if ! command -v fish >/dev/null; then
    skip fish_completion "there is no fish"
else
    HOME=$work XDG_DATA_HOME=$work XDG_CONFIG_HOME=$work fish --no-config -c "
        source $place/share/fish/vendor_completions.d/chunkflow.fish
        complete -C 'chunkflow pack --split '; complete -C 'chunkflow pack --m'
        complete -C 'chunkflow report -' | string match -r '^--?\w\b'; complete -C 'chunkflow gen log'" >"$work/fish" 2>"$work/log"
    got=$(cut -f 1 "$work/fish" | LC_ALL=C sort | tr '\n' ' ')
    want=$(sorted $(options pack | grep '^--m') cost even full --k -o lognormal)
    if [ "$got" = "$want" ] && ! [ -s "$work/log" ]; then ok fish_completes
    else fail fish_completes "got '$got'" "$work/log"; fi
fi

# ---- what people vendor ----

if ! command -v "${CXX:-c++}" >/dev/null 2>&1; then
    skip release "there is no C++ compiler, which reads what is in it"
elif make -s release BUILD="$work/release" CC="${CC:-cc}" CXX="${CXX:-c++}" >"$work/log" 2>&1 &&
    (cd "$work/release" && sha256sum -c --quiet chunkflow-*.sha256 && cd "$work" && tar xzf release/chunkflow-*.tar.gz &&
        cd chunkflow-* && sha256sum -c --quiet SHA256SUMS && ls LICENSE tools/chunkflow.schema.json &&
        (cd tools/guide && grep -o ']([^)]*)' train-in-c.md | sed 's|](||; s|[)#].*||' | xargs ls -d) &&
        "${CC:-cc}" examples/hello.c -o hello && ./hello && "${CC:-cc}" examples/train_tiny.c -o tiny -lm &&
        sed -i 's/VERSION_PATCH 0/VERSION_PATCH 1/' chunkflow.h &&
        ! "${CC:-cc}" -I. -x c -fsyntax-only tools/chunkflow_tune.h 2>other && grep 'error.*of its own version' other) \
        >>"$work/log" 2>&1
then ok release; else fail release "see the log" "$work/log"; fi

# ---- and away again ----

make -s uninstall BUILD="$build" DESTDIR="$image" PREFIX=/usr/flow >"$work/log" 2>&1
if [ $? -eq 0 ] && [ -z "$(installed)" ]; then ok uninstalls; else fail uninstalls "left: $(installed)" "$work/log"; fi
finish
