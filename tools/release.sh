#!/bin/sh
# release.sh - the archive that people vendor, with its checksums: the same bytes whenever and wherever it is made.
#
#     tools/release.sh BUILD VERSION        BUILD/chunkflow-VERSION.tar.gz and .tar.gz.sha256; CC and CXX compile
#
# Files lie as in the repository, so that the names in their comments are right. Each header is compiled from the archive
# alone, in C and in C++, and the .cu with its declarations only, which needs no nvcc.
set -eu
name=chunkflow-$2
at=$1/$name
rm -rf "$at"
mkdir -p "$at"
cp --parents chunkflow.h chunkflow_cuda.cu LICENSE CHANGELOG.md tools/chunkflow_tune.h tools/chunkflow.schema.json \
    tools/guide/train-in-c.md examples/hello.c examples/train_tiny.c "$at"
{ cat tools/archive.md; sed -n '/^## In your trainer/,/^## When/{/^## When/!p;}' README.md; } >"$at/README.md"

# Replaces a link to a file outside the archive by its text; removes it if it is alone in parentheses.
for page in README.md tools/guide/train-in-c.md; do
    folder=$(dirname "$at/$page")
    grep -o ']([^)]*)' "$at/$page" | sort -u | while read -r link; do
        target=$(echo "$link" | sed 's/^](//; s/[#)].*//')
        link="\\[\\([^]]*\\)$(echo "$link" | sed 's/[].]/\\&/g')"
        [ -e "$folder/$target" ] || sed -i "s| *($link)||g; s|$link|\\1|g" "$at/$page"
    done
done

cd "$at"
find . -type d -exec chmod 755 {} +
find . -type f -exec chmod 644 {} +
for of in "$CC -std=c99 -x c" "$CXX -std=c++11 -x c++"; do
    printf '%s\n' '#define CHUNKFLOW_IMPLEMENTATION' '#include "chunkflow.h"' \
        '#define CHUNKFLOW_TUNE_IMPLEMENTATION' '#include "chunkflow_tune.h"' \
        '#define CHUNKFLOW_CUDA_HEADER_ONLY' '#include "chunkflow_cuda.cu"' |
        $of -Wall -Wextra -Wpedantic -Werror -I. -Itools -c - -o ../release.o
done
rm ../release.o
find . -type f | sed 's|^./||' | LC_ALL=C sort | xargs sha256sum >../SHA256SUMS
mv ../SHA256SUMS .
cd ..
tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -c "$name" | gzip -9n >"$name.tar.gz"
sha256sum "$name.tar.gz" | tee "$name.tar.gz.sha256"
