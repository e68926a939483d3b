"""report_data.py - checks the numbers of a report against what other commands of the same program wrote.

    report_data.py REPORT.json PAGE.html [KIND=SCHEDULE.json ...]

Prints what is wrong and exits with 1, or prints nothing. A SCHEDULE is what `plan --json` wrote for that kind with the
same options; its times and peaks must be those of the report.
"""

import json
import math
import re
import sys

WRONG = []


def check(holds, *why):
    if not holds:
        WRONG.append(" ".join(str(w) for w in why))


def unpack(schedule, stage):
    """Returns (pass, kept, chunk, start, end) for each pass of a stage, in seconds, and its idle time by cause."""
    now, chunk, piece, held = 0, 0, 0, 0
    passes, idle, most = [], {}, 0
    for i, letter in enumerate(stage["pass"] + "."):
        for _ in range(int(stage["gaps"][i])):
            cause, ticks = stage["idle"][piece : piece + 2]
            check(ticks >= 0, "a piece of idle time is negative")
            idle[cause] = idle.get(cause, 0) + ticks * schedule["tick"]
            now += ticks
            piece += 2
        if letter == ".":
            break
        chunk += stage["chunk"][i]
        held += stage["held"][i]
        most = max(most, held)
        start, now = now, now + stage["ticks"][i]
        passes.append((letter.upper(), letter.isupper(), chunk, start * schedule["tick"], now * schedule["tick"]))
    check(piece == len(stage["idle"]) and len(stage["gaps"]) == len(stage["pass"]) + 1, "pieces are left over")
    return passes, idle, most * schedule["held_unit"], now * schedule["tick"]


def check_stage(report, s, index):
    passes, idle, held, end = unpack(s, s["stages"][index])
    slack = 3 * s["tick"] * max(10, len(passes))
    busy = sum(p[4] - p[3] for p in passes)
    sums = s["idle"][index]
    check(abs(end - s["makespan"]) <= 2 * s["tick"], s["name"], "stage", index, "ends at", end)
    check(abs(busy + sum(sums) - s["makespan"]) <= slack, s["name"], "stage", index, "busy", busy, "idle", sum(sums))
    for cause, seconds in enumerate(sums):
        check(seconds >= 0, s["name"], "stage", index, "cause", cause, "is negative")
        check(
            abs(seconds - idle.get(cause, 0)) <= slack,
            s["name"],
            "stage",
            index,
            report["causes"][cause],
            seconds,
            idle,
        )
    if "memory" in s:
        total = s["memory"][index]["total"]
        check(
            total - s["held_unit"] <= held <= total, s["name"], "stage", index, "holds", held, "at its peak, not", total
        )
        check(total == sum(s["memory"][index][term] for term in report["terms"]), s["name"], "terms of stage", index)
    elif report["held"] == "tokens":
        check(
            s["peak_tokens"][index] - s["held_unit"] < held <= s["peak_tokens"][index],
            s["name"],
            "keeps",
            held,
            "tokens",
        )
    return passes


def check_schedule(report, s):
    stages = [check_stage(report, s, i) for i in range(len(s["stages"]))]
    whole = s["makespan"] * len(stages)
    idle = sum(sum(stage) for stage in s["idle"])
    check(abs(idle - (whole - s["busy"])) <= 1e-9 * whole, s["name"], "idle time", idle, "is not", whole - s["busy"])
    check(sum(len(p) for p in stages) == s["n_passes"], s["name"], "passes")
    path = list(zip(s["path"][::2], s["path"][1::2]))
    times = [stages[stage][i][3:5] for stage, i in path]
    check(times[0][0] == 0 and abs(times[-1][1] - s["makespan"]) <= 2 * s["tick"], s["name"], "critical path")
    check(all(b[0] >= a[1] - 2 * s["tick"] for a, b in zip(times, times[1:])), s["name"], "critical path goes back")
    return stages


def compare(report, kind, path):
    """With a schedule that plan wrote."""
    with open(path, encoding="utf-8") as file:
        planned = json.load(file)
    s = next(s for s in report["schedules"] if s["name"] == kind)
    check(s["makespan"] == planned["makespan"], kind, "takes", planned["makespan"], "for plan")
    check(s["bubble_useful"] == planned["bubble_useful"] and s["peak_live"] == planned["peak_live"], kind, "numbers")
    waits = [planned.get(name, 0) for name in ("stream_waits", "stream_seconds")]
    check([s["stream_waits"], s["stream_seconds"]] == waits, kind, "waits for its stream", waits, "in plan")
    for index, actions in enumerate(planned["actions"]):
        got = unpack(s, s["stages"][index])[0]
        wanted = [(a["pass"], a.get("keep", True) is True, a["chunk"], a["start"], a["end"]) for a in actions]
        check([g[:3] for g in got] == [w[:3] for w in wanted], kind, "stage", index, "has other passes")
        check(all(abs(g[i] - w[i]) <= s["tick"] for g, w in zip(got, wanted) for i in (3, 4)), kind, "has other times")


def check_batch(report):
    n, tokens = report["lengths"]["sequences"], report["lengths"]["tokens"]
    check(sum(n) == report["n_sequences"] and sum(tokens) == report["n_tokens"], "lengths do not add up")
    check(
        all(t == 0 or 2 ** (i - 1) * m <= t < 2**i * m for i, (m, t) in enumerate(zip(n, tokens)) if i > 0), "buckets"
    )
    for plan in report["plans"]:
        of, at = plan["chunks"], 0
        for i, many in enumerate(of["n_slices"]):
            slices = [of["slices"][3 * j : 3 * j + 3] for j in range(at, at + many)]
            check(
                sum(s[2] for s in slices) == of["tokens"][i],
                plan["name"],
                "chunk",
                i,
                "has other tokens than its slices",
            )
            check(of["chain"][i] < 0 or slices[0][1] == of["prefix"][i], plan["name"], "prefix of chunk", i)
            at += many
        if report["n_ranks"] == 1:
            check(sum(of["tokens"]) == report["n_tokens"], plan["name"], "has other tokens than the batch")


def check_page(report, path):
    """The page must have one block of data, which is the report, and fetch nothing."""
    with open(path, encoding="utf-8") as file:
        page = file.read()
    blocks = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    check(len(blocks) == 1 and json.loads(blocks[0]) == report, "the page has other data")
    rest = page.replace(blocks[0], "")
    check(
        not re.search(r"(src|href)\s*=|@import|url\(|https?:(?!//www\.w3\.org/2000/svg)", rest),
        "the page asks for something",
    )


def main(arguments):
    with open(arguments[0], encoding="utf-8") as file:
        report = json.load(file)
    check_batch(report)
    for s in report["schedules"]:
        check(math.isfinite(s["makespan"]), s["name"])
        if "stages" in s:
            check_schedule(report, s)
    best = [
        s
        for s in report["schedules"]
        if s["fits"] and not s["unsplit"] and not s["measured"] and s["name"] != "predicted"
    ]
    check(
        report["best"] < 0 or report["schedules"][report["best"]]["makespan"] == min(s["makespan"] for s in best),
        "best",
    )
    check_page(report, arguments[1])
    for pair in arguments[2:]:
        compare(report, *pair.split("=", 1))
    for why in WRONG[:8]:
        print(why)
    sys.exit(1 if WRONG else 0)


main(sys.argv[1:])
