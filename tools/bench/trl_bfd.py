#!/usr/bin/env python3
"""The core of best-fit decreasing packing as TRL does it in Python, newly written from its description, to time
chunkflow against.

    trl_bfd.py [--chunk-size N] [--repeat N] FILE

FILE has one length a line. Sequences longer than the chunk size are cut into full pieces and a rest, which is packed
like any other piece ("bfd_split"). Prints one line: seconds for all (median), seconds without the sort, bins, pieces.

The description: pieces are taken longest first. A segment tree over the capacities 1 .. N has a capacity in the leaf of
each that some open bin has, and the larger child in each inner node. A walk down from the root goes left whenever
something large enough is there. It finds the smallest capacity with enough room in O(log N). A dictionary gives for
each capacity a queue of the bins that have it. The rest of TRL's work (sorting and gathering columns in pyarrow) is
left out.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict, deque


class CapacityTree:
    """The capacities 1 .. limit that occur; finds the smallest one that is large enough."""

    def __init__(self, limit):
        self.leaves = 1 << (limit - 1).bit_length()
        self.largest = [0] * (2 * self.leaves)

    def _set(self, capacity, value):
        node = self.leaves + capacity - 1
        self.largest[node] = value
        while node > 1:
            node >>= 1
            left = self.largest[2 * node]
            right = self.largest[2 * node + 1]
            self.largest[node] = left if left >= right else right

    def add(self, capacity):
        self._set(capacity, capacity)

    def remove(self, capacity):
        self._set(capacity, 0)

    def smallest_from(self, size):
        node = 1
        while node < self.leaves:
            node *= 2
            if self.largest[node] < size:
                node += 1
        return self.largest[node]


def cut(lengths, chunk_size):
    """Cuts sequences into pieces of at most chunk_size tokens; empty sequences give none."""
    pieces = []
    for length in lengths:
        while length > chunk_size:
            pieces.append(chunk_size)
            length -= chunk_size
        if length > 0:
            pieces.append(length)
    return pieces


def pack(pieces, order, chunk_size):
    """Packs the pieces by best fit, in the given order. Returns the bins."""
    bins = []
    bins_by_space = defaultdict(deque)
    tree = CapacityTree(chunk_size)
    tree.add(chunk_size)  # a new bin is always at hand
    for piece in order:
        size = pieces[piece]
        space = tree.smallest_from(size)
        if space < chunk_size:
            bin_ = bins_by_space[space].popleft()
            if not bins_by_space[space]:
                tree.remove(space)
        else:
            bin_ = {"ids": [], "length": 0}
            bins.append(bin_)
        bin_["ids"].append(piece)
        bin_["length"] += size
        space -= size
        if space > 0:
            bins_by_space[space].append(bin_)
            tree.add(space)
    return bins


def check(bins, pieces, chunk_size):
    """Checks that every piece is in one bin, and no bin is too full."""
    seen = sorted(piece for bin_ in bins for piece in bin_["ids"])
    full = max((sum(pieces[piece] for piece in bin_["ids"]) for bin_ in bins), default=0)
    if seen != list(range(len(pieces))) or full > chunk_size:
        sys.exit("trl_bfd.py: the packing is wrong")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunk-size", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("file")
    arguments = parser.parse_args()
    with open(arguments.file, encoding="ascii") as lines:
        pieces = cut([int(line) for line in lines], arguments.chunk_size)

    whole, core, bins = [], [], []
    for _ in range(arguments.repeat):
        start = time.perf_counter()
        order = sorted(range(len(pieces)), key=pieces.__getitem__, reverse=True)
        sorted_at = time.perf_counter()
        bins = pack(pieces, order, arguments.chunk_size)
        end = time.perf_counter()
        whole.append(end - start)
        core.append(end - sorted_at)
    check(bins, pieces, arguments.chunk_size)
    print(f"{statistics.median(whole):.6f} {statistics.median(core):.6f} {len(bins)} {len(pieces)}")


if __name__ == "__main__":
    main()
