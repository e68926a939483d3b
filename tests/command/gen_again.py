"""gen_again.py DISTRIBUTION: reads the list that `chunkflow gen` drew with seed 5. Draws it again, with whole numbers
of any size and floating point. Prints the number of lengths, and "ok" or how far they are off."""

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
# Rounding may change a draw next to a whole number by one, and by no more.
print(len(got), "ok" if max(off) <= 1 and sum(off) <= len(got) // 1000 else "off by %d, %d" % (max(off), sum(off)))
