#!/bin/sh
# environment.sh - prints the Python of tests/torch, and makes its environment first where these versions have none yet.
#
#     tests/torch/environment.sh PYTHON "PACKAGE..." "PACKAGE-WITHOUT-ITS-OWN..."
#
# It lies in the user's cache and not in the build folder, for it takes about 6 GB and some minutes. Its name is made of
# PYTHON's version and the packages, so another version gets another one; older ones may be deleted at any time.
set -eu
key=$({ "$1" --version; echo "$2 and $3"; } | cksum | tr -s ' ' -)
home=${XDG_CACHE_HOME:-$HOME/.cache}/chunkflow/torch-$key
mkdir -p "$home"
exec 9>"$home.lock"
flock 9 # two builds may come here at once
if [ ! -e "$home/installed" ]; then
    echo "making $home; this takes about 6 GB" >&2
    "$1" -m venv --clear "$home" >&2
    # shellcheck disable=SC2086 # lists of words
    {
        "$home/bin/python" -m pip install $2
        "$home/bin/python" -m pip install --no-deps $3
    } >"$home/pip.log" 2>&1 || {
        tail -n 5 "$home/pip.log" >&2
        exit 1
    }
    touch "$home/installed"
fi
echo "$home/bin/python"
