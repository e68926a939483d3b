#!/usr/bin/env python3
"""Compares packing by TRL and axolotl, if they are installed, with chunkflow's: bins, tokens lost, CPU time.

    make shared
    bench_pack_peers.py [--chunk-size N] [--repeat N] FILE

FILE has one length a line. TRL's pack_dataset packs columns and not lengths, so it gets a dataset with a column of
one-byte tokens. It packs each batch of `map` by itself, 1,000 examples by default. axolotl's sampler takes lengths in
the order of the list; its default drops sequences longer than a bin before that. CPU time is that of the process with
its threads: the median of the repeats, without the first, in which numba compiles.
"""

import argparse
import importlib.metadata
import importlib.util
import pathlib
import statistics
import sys
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))
import chunkflow


def row(name, lengths, chunk_size, repeat, pack):
    """Times pack(lengths, chunk_size), which returns the number of bins and the tokens in them."""
    seconds = []
    for _ in range(repeat + 1):
        start = time.process_time()
        n_bins, kept = pack(lengths, chunk_size)
        seconds.append(time.process_time() - start)
    lost, fill = int(lengths.sum()) - kept, kept / (n_bins * chunk_size)
    print(f"  {name:<44} {n_bins:>7,} bins {fill:>9.4%} full {lost:>10,} tokens lost ({lost / lengths.sum():>6.2%}) "
          f"{1e3 * statistics.median(seconds[1:]):>9.2f} ms", flush=True)


def of_chunkflow(**options):
    def pack(lengths, chunk_size):
        plan = chunkflow.pack(lengths, chunk_size, **options)
        return plan.n_chunks, int(plan.slices["length"].sum())
    return pack


def trl_rows(lengths, chunk_size, repeat):
    import datasets
    import pyarrow
    from trl.data_utils import pack_dataset

    datasets.disable_progress_bars()
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = pyarrow.LargeListArray.from_arrays(offsets, np.zeros(offsets[-1], np.int8))
    dataset = datasets.Dataset(pyarrow.table({"input_ids": tokens}))
    for strategy in ("bfd", "bfd_split"):
        for batch, said in ((1000, "batches of 1,000"), (len(lengths), "all at once")):
            def pack(lengths, chunk_size):
                packed = pack_dataset(dataset, chunk_size, strategy, {"batch_size": batch})
                return len(packed), sum(len(column.values) for column in packed.data.column("input_ids").chunks)
            row(f"TRL, {strategy}, {said}", lengths, chunk_size, repeat, pack)


def axolotl_rows(lengths, chunk_size, repeat):
    from axolotl.utils.samplers.multipack import MultipackBatchSampler

    def pack(lengths, chunk_size):
        fits = lengths[lengths <= chunk_size]
        sampler = MultipackBatchSampler(range(len(fits)), batch_size=1, batch_max_len=chunk_size, lengths=fits,
                                        bin_size=200, drop_last=False, num_processes=1)
        bins = [indices for batch in sampler.generate_batches() for indices in batch]
        return len(bins), int(sum(fits[i] for indices in bins for i in indices))
    row("axolotl, multipack, at most 200 in a bin", lengths, chunk_size, repeat, pack)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk-size", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("file", type=pathlib.Path)
    options = parser.parse_args()
    lengths = np.loadtxt(options.file, np.int64, ndmin=1)
    wanted = ("numpy", "pyarrow", "datasets", "trl", "numba", "axolotl")
    installed = [name for name in wanted if importlib.util.find_spec(name)]
    print(f"python {sys.version.split()[0]}, {', '.join(f'{n} {importlib.metadata.version(n)}' for n in installed)}")
    print(f"{len(lengths):,} lengths, {int(lengths.sum()):,} tokens, ChunkSize {options.chunk_size:,}; lower bound "
          f"{chunkflow.pack(lengths, options.chunk_size).lower_bound:,} bins for all tokens")
    common = lengths, options.chunk_size, options.repeat
    row("chunkflow, best fit, from Python", *common, of_chunkflow())
    row("chunkflow, best fit, at most 200 in a chunk", *common, of_chunkflow(max_slices=200))
    for name, rows in (("trl", trl_rows), ("axolotl", axolotl_rows)):
        if name in installed:
            rows(*common)
        else:
            print(f"  {name} is not installed")


if __name__ == "__main__":
    main()
