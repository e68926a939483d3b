"""times_check.py PLAN SCHEDULE CONSTANT PER-TOKEN PER-PAIR LATENCY: checks the times, peaks and sums of a schedule in
JSON. They must follow from its passes, each of which runs as early as it can. Prints "ok", or what is wrong."""

import json, sys

plan, schedule = (json.load(open(name)) for name in sys.argv[1:3])
constant, per_token, per_pair, latency = map(float, sys.argv[3:7])


def check(holds, what):
    if not holds:
        print(what)
        sys.exit()


def near(a, b):
    return abs(a - b) <= 1e-9 * max(1, abs(a), abs(b))


stages, v = schedule["stages"], schedule["virtual_stages"]
chunks = plan["chunks"]
factor = {"F": 1, "R": 1, "B": 2, "I": 1, "W": 1}
ended = {}
for row in schedule["actions"]:
    for a in row:
        ended["B" if a["pass"] == "I" else a["pass"], a["stage"], a["chunk"]] = a["end"]
busy = replayed = makespan = 0
for s, row in enumerate(schedule["actions"]):
    free, kept, peak, held, most = 0, set(), 0, 0, 0
    for a in row:
        kind, stage, chunk = a["pass"], a["stage"], chunks[a["chunk"]]
        check(stage % stages == s, "stage of an action")
        wait = 0
        if kind in "FR" and stage > 0 and not (kind == "R" and schedule["replay"] == "local"):
            wait = ended[kind, stage - 1, a["chunk"]]
            hop = stages > 1
        elif kind in "BI" and stage < stages * v - 1:
            wait = ended["B", stage + 1, a["chunk"]]
            hop = stages > 1
        else:
            hop = False
        check(near(a["start"], max(free, wait + (latency if hop else 0))), "start of %s" % a)
        cost = (constant + per_token * chunk["tokens"] + per_pair * chunk["pairs"]) / v * factor[kind]
        check(near(a["end"] - a["start"], cost), "time of %s" % a)
        if kind == "R" or (kind == "F" and a["keep"]):
            kept.add((stage, a["chunk"]))
            held += chunk["rows"]
        check(a["live"] == len(kept), "live of %s" % a)
        peak, most = max(peak, len(kept)), max(most, held)
        if kind in "BW":
            kept.remove((stage, a["chunk"]))
            held -= chunk["rows"]
        free = a["end"]
        busy += cost
        replayed += cost if kind == "R" else 0
    makespan = max(makespan, free)
    check(not kept and schedule["peak_live"][s] == peak and schedule["peak_tokens"][s] == most, "peaks")
check(near(schedule["makespan"], makespan) and near(schedule["busy"], busy), "makespan and busy")
check(near(schedule["replayed"], replayed), "replayed")
check(near(schedule["bubble_busy"], 1 - busy / stages / makespan), "bubble_busy")
check(near(schedule["bubble_useful"], 1 - (busy - replayed) / stages / makespan), "bubble_useful")
check(all(b <= makespan * (1 + 1e-9) for b in schedule["bounds"].values()) and schedule["bounds"], "bounds")

print("ok")
