"""Counts what is computed of sequences that begin alike, by chunkflow and by other methods.

    make shared && PYTHONPATH=tools/python python3 tools/bench/bench_trees.py

Nothing is timed. Counted are the rows and attention pairs of all forwards (a backward of each row is the same for all),
the calls of the model that make a graph, and the rows of the largest call, with which activations grow:

    no sharing   every sequence by itself, packed into calls of at most the budget where it fits
    trees        those that must fit a budget, filled in input order; what overflows begins anew, prefix included (as
                 AReaL's tree attention packs; there a sequence beyond the budget is an error)
    depth first  a call for each leaf, from a stack of K and V; inner nodes run forward once without a graph, whole, and
                 once more with one, in blocks of at most the budget (as AReaL-DTA runs)
    chunkflow    chunks of the budget, K = 1
"""

import chunkflow
import numpy as np


def pairs(begin, n):
    return n * begin + n * (n + 1) // 2


class Node:
    def __init__(self, tokens, *children):
        self.tokens, self.children = tokens, children

    def walk(self, begin=0, path=()):
        """Yields (begin, tokens, whether it is a leaf, path) for all nodes, depth first."""
        yield begin, self.tokens, not self.children, path
        for child in self.children:
            yield from child.walk(begin + self.tokens, (*path, (begin, self.tokens, id(self))))


def leaves(trees):
    """Returns, for each sequence, the nodes on its path: (begin, tokens, name)."""
    for tree in trees:
        for i, (begin, tokens, is_leaf, path) in enumerate(tree.walk()):
            if is_leaf:
                yield [*path, (begin, tokens, (id(tree), i))]


def no_sharing(trees, budget):
    lengths = [sum(node[1] for node in way) for way in leaves(trees)]
    largest = max(budget, *lengths)
    room, calls = 0, 0
    for n in sorted(lengths, reverse=True):
        if n > room:
            room, calls = largest, calls + 1
        room -= n
    return sum(lengths), sum(pairs(0, n) for n in lengths), calls, largest


def fitted_trees(trees, budget):
    rows = count = calls = used = 0
    there = set()
    for way in leaves(trees):
        if sum(node[1] for node in way) > budget:
            return None
        new = [node for node in way if node[2] not in there]
        if calls == 0 or used + sum(node[1] for node in new) > budget:
            there, used, calls, new = set(), 0, calls + 1, way
        there |= {node[2] for node in new}
        used += sum(node[1] for node in new)
        rows += sum(node[1] for node in new)
        count += sum(pairs(node[0], node[1]) for node in new)
    return rows, count, calls, budget


def depth_first(trees, budget):
    nodes = [node for tree in trees for node in tree.walk()]
    inner = [node for node in nodes if not node[2]]
    rows = sum(node[1] for node in nodes) + sum(node[1] for node in inner)
    count = sum(pairs(*node[:2]) for node in nodes) + sum(pairs(*node[:2]) for node in inner)
    calls = sum(-(-node[1] // budget) for node in nodes)
    return rows, count, calls, max(node[1] for node in nodes)


def chunked(trees, budget):
    ways, names, shares = list(leaves(trees)), {}, []
    for i, way in enumerate(ways):
        shared = [node for node in way if node[2] in names]
        shares.append((names[shared[-1][2]], shared[-1][0] + shared[-1][1]) if shared else (0, 0))
        for node in way:
            names.setdefault(node[2], i)
    plan = chunkflow.pack([sum(node[1] for node in way) for way in ways], budget, shared_prefixes=shares)
    chunks = plan.schedule(k=1).actions
    replays = chunks["chunk"][chunks["pass"] == chunkflow.PASSES.index("R")]
    forwards = np.concatenate([np.arange(plan.n_chunks), replays])
    of = plan.chunks
    return int(of["tokens"][forwards].sum()), int(of["pairs"][forwards].sum()), plan.n_chunks, int(of["tokens"].max())


K = 1024
BATCHES = {
    "16 answers of 2K to 32K": [Node(32 * K, *[Node(2 * K)] * 16)],
    "64 answers of 4K to 16K": [Node(16 * K, *[Node(4 * K)] * 64)],
    "an agent: 4K, 4 x 8K, each 6 x 4K": [Node(4 * K, *[Node(8 * K, *[Node(4 * K)] * 6) for _ in range(4)])],
    "30 prompts of 5,000, 16 x 100": [Node(5000, *[Node(100)] * 16) for _ in range(30)],
    "32 pairs: 6K, 2 x 1K": [Node(6 * K, Node(K), Node(K)) for _ in range(32)]}


def main():
    budget = 8 * K
    print(f"{'batch':<35}{'':<28}{'rows':>11}{'x':>7}{'pairs':>11}{'x':>7}{'calls':>7}{'largest':>9}")
    for name, trees in BATCHES.items():
        longest = max(sum(node[1] for node in way) for way in leaves(trees))
        wide = -(-longest // budget) * budget
        ours = chunked(trees, budget)
        rows = [("no sharing", no_sharing(trees, budget)),
                (f"trees, budget {budget // K}K", fitted_trees(trees, budget)),
                (f"trees, budget {wide // K}K", fitted_trees(trees, wide) if wide > budget else None),
                ("depth first", depth_first(trees, budget)), (f"chunkflow, {budget // K}K", ours)]
        for who, made in rows:
            if made is None and wide == budget:
                continue
            print(f"{name:<35}{who:<28}", end="")
            name = ""
            if made is None:
                print("cannot: a sequence is longer")
            else:
                print(f"{made[0]:>11,}{made[0] / ours[0]:>7.2f}{made[1]:>11.3g}{made[1] / ours[1]:>7.2f}{made[2]:>7,}"
                      f"{made[3]:>9,}")


if __name__ == "__main__":
    main()
