#!/usr/bin/env python3
"""Says which branches of chunkflow.h the unit tests take, by section; `make coverage` runs it.

    python3 tests/meta/coverage.py OBJECT [--floor PERCENT] [--list]

OBJECT is tests/implementation.c compiled with gcc -O0 --coverage, after the programs linked with it have run. A branch
is one of the ways out of a condition as gcov counts them. --list prints the branches that were never taken. The last
line counts one test: whether the share of branches taken is at least the floor.
"""

import argparse
import json
import os
import re
import subprocess
import sys

HEADER = "chunkflow.h"
GCOV = os.environ.get("GCOV", "gcov")


def read_lines(header):
    """The lines of the header, and of each the section that it is in: the last banner above it."""
    with open(header, encoding="utf-8") as file:
        lines = file.read().split("\n")
    sections, section = [], "before"
    for i, line in enumerate(lines):
        tag = re.match(r" +>>([a-z]+)", line)
        if tag and re.match(r"/\* =+$", lines[i - 1]):
            section = tag.group(1)
        sections.append(section)
    return lines, sections


def measured(object_file):
    """What gcov says of the header: a list of (line number, executions, list of branch counts)."""
    command = [GCOV, "-b", "-c", "--json-format", "--stdout", object_file]
    out = subprocess.run(command, check=True, capture_output=True).stdout
    for document in out.decode().splitlines():
        for file in json.loads(document)["files"]:
            if os.path.basename(file["file"]) == HEADER:
                return [(x["line_number"], x["count"], [b["count"] for b in x["branches"]]) for x in file["lines"]]
    sys.exit(f"gcov found nothing of {HEADER} in {object_file}")


def share(part, whole):
    return 100.0 * part / whole if whole else 100.0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("object")
    parser.add_argument("--floor", type=float, default=0.0)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    lines, sections = read_lines(HEADER)
    table, missed = {}, []
    for number, count, branches in measured(options.object):
        row = table.setdefault(sections[number - 1], [0, 0, 0, 0])
        row[0] += count > 0
        row[1] += 1
        row[2] += sum(b > 0 for b in branches)
        row[3] += len(branches)
        if not all(branches):
            missed.append((number, count, branches))
    if options.list:
        for number, count, branches in missed:
            print(f"{HEADER}:{number}: [{sections[number - 1]}] {branches} {lines[number - 1].strip()}")
    table["all"] = [sum(column) for column in zip(*table.values())]
    print(f"{'section':<12}{'lines':>14}{'':>8}{'branches':>14}{'':>8}")
    for section, (run, of, taken, ways) in table.items():
        print(f"{section:<12}{run:>7}/{of:<6}{share(run, of):>7.2f}%{taken:>7}/{ways:<6}{share(taken, ways):>7.2f}%")
    taken = share(*table["all"][2:])
    if taken < options.floor:
        print(f"FAIL: {taken:.2f} % of the branches of {HEADER} are taken; the floor is {options.floor} %")
    print("1 passed, 0 failed" if taken >= options.floor else "0 passed, 1 failed")
    sys.exit(taken < options.floor)


if __name__ == "__main__":
    main()
