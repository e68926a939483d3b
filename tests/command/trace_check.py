"""trace_check.py - checks a trace of plan --trace against the plan and the schedule of the same run.

    trace_check.py PLAN.json SCHEDULE.json TRACE.json MICROSECONDS [STAGES.tsv]

MICROSECONDS: how long a unit of the schedule's time is. Prints "ok", or the first thing that is wrong, and then exits
with 1. Times are compared in whole nanoseconds, as the trace has them, with exact fractions, so this program rounds
nothing. With the table of plan --summary --tsv, the counters of memory must agree with what it says that each stage
holds.
"""

import json
import sys
from decimal import Decimal
from fractions import Fraction


def check(holds, *why):
    if not holds:
        print(*why)
        sys.exit(1)


def nanoseconds(microseconds):
    value = Decimal(microseconds) * 1000
    check(value == int(value) and value >= 0, "no whole nanosecond:", microseconds)
    return int(value)


def near(got, time, unit):
    """Tolerance: half a nanosecond, and the rounding error of a product of two doubles."""
    exact = Fraction(time) * Fraction(unit) * 1000
    return abs(got - exact) <= Fraction(1, 2) + exact / 2**51


plan, schedule = (json.load(open(name)) for name in sys.argv[1:3])
trace = json.load(open(sys.argv[3]), parse_float=Decimal)
unit = float(sys.argv[4])
stages, v, chunks = schedule["stages"], schedule["virtual_stages"], plan["chunks"]
events = trace["traceEvents"]
check(set(trace) == {"displayTimeUnit", "traceEvents"}, "members of the file")
check(all(e["ph"] in "MXCstf" and 1 <= e["pid"] <= stages for e in events), "events")
check(len([e for e in events if e["ph"] == "M" and e["name"] == "process_name"]) == stages, "names")

# ---- slices ---- Each action is one slice, at the time of the schedule, to the nanosecond. Slices on one thread run
# one after the other, so none contains another. A run of passes without a gap is as long as its slices together, so
# roundings do not add up.

PLACE = {"SEND_F": 0, "SEND_R": 0, "RECV_F": 1, "RECV_R": 1, "SEND_B": 2, "RECV_B": 3}
slices = {s: [] for s in range(stages)}
for e in events:
    if e["ph"] == "X":
        slices[e["pid"] - 1].append(e)
for s, row in enumerate(schedule["actions"]):
    check(len(slices[s]) == len(row), "slices of stage", s)
    threads, run_from, run_sum, last = {}, None, 0, None
    for e, a in zip(slices[s], row):
        start, length = nanoseconds(e["ts"]), nanoseconds(e["dur"])
        check(e["name"] == "%s c%d" % (a["pass"], a["chunk"]) and e["cat"] == a["pass"], "name of", a)
        check(e["args"]["virtual stage"] == a["stage"] and e["args"]["chunk"] == a["chunk"], "arguments of", a)
        check(e["args"]["tokens"] == chunks[a["chunk"]]["tokens"], "tokens of", a)
        check(near(start, a["start"], unit), a, "starts at", start)
        check(near(start + length, a["end"], unit), a, "ends at", start + length)
        threads.setdefault(e["tid"], []).append((start, start + length))
        if a["pass"] not in "FRBIW":
            check(e["tid"] > 1 and a["pass"] in PLACE, "thread of", a)
            continue
        check(e["tid"] == 1, "thread of", a)
        if last is None or a["start"] != last["end"]:
            run_from, run_sum = a["start"], 0
        run_sum += length
        exact = (Fraction(a["end"]) - Fraction(run_from)) * Fraction(unit) * 1000
        check(abs(run_sum - exact) <= 1 + exact / 2**50, "drift of", float(run_sum - exact), "ns at", a)
        last = a
    for tid, spans in threads.items():
        spans.sort()
        check(all(b >= a for a, b in spans), "a slice ends before it starts")
        check(all(x[1] <= y[0] for x, y in zip(spans, spans[1:])), "slices overlap on thread", tid, "of stage", s)
        names = [e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name" and
                 e["pid"] == s + 1 and e["tid"] == tid] if len(spans) < 5000 else ["compute"]
        check(len(names) == 1, "name of thread", tid)

# ---- counters ---- Chunks must be the schedule's, tokens are added up here, and bytes must be the table's.


def series(name, unit_name):
    found = {s: [] for s in range(stages)}
    for e in events:
        if e["ph"] == "C" and e["name"] == name:
            found[e["pid"] - 1].append((nanoseconds(e["ts"]), e["args"][unit_name]))
    return found


def steps(values):
    """(time, value) where the value changes."""
    return [x for i, x in enumerate(values) if i == 0 or x[1] != values[i - 1][1]]


known = {e["name"] for e in events if e["ph"] == "C"}
check(known <= {"kept chunks", "kept tokens", "memory"}, "counters", known)
kept, tokens, memory = series("kept chunks", "chunks"), series("kept tokens", "tokens"), series("memory", "bytes")
table = {}
if len(sys.argv) > 5:
    lines = [line.rstrip("\n").split("\t") for line in open(sys.argv[5])]
    table = {int(x[0]): dict(zip(lines[0], x)) for x in lines[1:]}
for s, row in enumerate(schedule["actions"]):
    held, chunks_seen, tokens_seen = set(), [], []
    for a, e in zip(row, slices[s]):
        key = a["stage"], a["chunk"]
        if a["pass"] == "R" or (a["pass"] == "F" and a["keep"]):
            held.add(key)
        chunks_seen.append((nanoseconds(e["ts"]), len(held)))
        tokens_seen.append((nanoseconds(e["ts"]), sum(chunks[c]["rows"] for _, c in held)))
        if a["pass"] in "BW":
            held.discard(key)
    if not row:
        continue
    end = max(nanoseconds(e["ts"]) + nanoseconds(e["dur"]) for e in slices[s])
    check(kept[s] == steps(chunks_seen) + [(end, 0)], "kept chunks of stage", s)
    check(max(n for _, n in kept[s]) == schedule["peak_live"][s], "peak of chunks of stage", s)
    if tokens[s]:
        check(tokens[s] == steps(tokens_seen) + [(end, 0)], "kept tokens of stage", s)
        check(max(n for _, n in tokens[s]) == schedule["peak_tokens"][s], "peak of tokens of stage", s)
    check(bool(tokens[s]) != bool(memory[s]), "both or neither: tokens and bytes of stage", s)
    if table and memory[s]:
        wanted = table[s]["memory_bytes"] or table[s]["peak_byte_copies"]
        check(max(n for _, n in memory[s]) == int(wanted), "memory of stage", s, "wanted", wanted)
        if not table[s]["memory_bytes"]:
            check(max(n for _, n in memory[s]) == schedule["peak_bytes"][s] and memory[s][-1] == (end, 0), "bytes")

# ---- flows ---- Every step of a flow is on a pass, in the order of time. The pairs of steps are the pairs of passes of
# which one waits for the other.

at, place = {}, {}
for s, row in slices.items():
    for e in row:
        if e["tid"] == 1:
            kind = "B" if e["cat"] == "I" else e["cat"]
            at.setdefault((s + 1, e["ts"]), set()).add((kind, e["args"]["chunk"], e["args"]["virtual stage"]))
            place[kind, e["args"]["chunk"], e["args"]["virtual stage"]] = e["ts"]
found, flows = set(), {}
for e in events:
    if e.get("cat") == "flow":
        flows.setdefault(e["id"], []).append(e)
for way in flows.values():
    check("".join(e["ph"] for e in way) == "s" + "t" * (len(way) - 2) + "f", "phases of a flow")
    check(all(e["tid"] == 1 and e["bp"] == "e" and e["name"] == way[0]["name"] for e in way), "one flow")
    check(all(a["ts"] <= b["ts"] for a, b in zip(way, way[1:])), "time of a flow")
    path = [at.get((e["pid"], e["ts"])) for e in way]
    check(all(path), "a flow's step without a pass")
    found |= {(a, b) for x, y in zip(path, path[1:]) for a in x for b in y}
last = stages * v - 1
waits = {(("F", c, last), ("B", c, last)) for kind, c, r in place if r == last and kind == "B"}
for kind, c, r in place:
    chain = chunks[c]["chain"]
    state = chain >= 0 and chunks[c]["index"] + 1 < plan["chains"][chain]["n_chunks"]
    if kind == "F":
        waits |= {(("F", c, r), ("F", c, r + 1))} if r < last else set()
        waits |= {(("F", c, r), ("F", c + 1, r))} if state else set()
        waits |= {(("F", c, r), ("B", c, r))} if chain >= 0 and not state else set()
    elif kind == "B":
        waits |= {(("B", c, r), ("B", c, r - 1))} if r > 0 else set()
        waits |= {(("B", c + 1, r), ("B", c, r))} if state else set()
    elif kind == "R":
        waits.add((("R", c, r), ("B", c, r)))
check(waits == found, "flows")
print("ok")
