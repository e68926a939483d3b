"""plan_read.py LENGTHS PLAN SCHEDULE...: checks that a plan, and the schedules of its ranks on one stage, have in JSON
what the header says of them. Prints "ok", or what is wrong."""

import json, sys

lengths = [int(line) for line in open(sys.argv[1])]
plan = json.load(open(sys.argv[2]))
schedules = [json.load(open(name)) for name in sys.argv[3:]]


def check(holds, what):
    if not holds:
        print(what)
        sys.exit()


size, chunks = plan["chunk_size"], plan["chunks"]
check(plan["format"] == "chunkflow-plan" and plan["version"] == 3, "format")
check(plan["n_sequences"] == len(lengths) and plan["n_tokens"] == sum(lengths), "totals")
check(plan["n_empty"] == lengths.count(0), "n_empty")
check(len(chunks) == plan["n_chunks"] == plan["n_ranks"] * plan["chunks_per_rank"], "n_chunks")
check(-(-sum(lengths) // size) <= plan["lower_bound"] <= len(chunks) - plan["n_idle"], "lower_bound")

seen = [0] * len(lengths)
chain_of, last_slice, n_slices = {}, {}, 0
for place, chunk in enumerate(chunks):
    check(chunk["id"] == place and chunk["rank"] == place // plan["chunks_per_rank"], "id and rank")
    at = pairs = 0
    for order, s in enumerate(chunk["slices"]):
        check(s["offset"] % plan["align"] == 0 and s["offset"] >= at, "offset")
        at = s["offset"] + s["length"]
        check(s["length"] > 0 and s["begin"] == seen[s["sequence"]], "slices in order")
        seen[s["sequence"]] += s["length"]
        check(s["up"] == (last_slice.get(s["sequence"], -1)), "up of a slice")
        last_slice[s["sequence"]] = n_slices
        n_slices += 1
        pairs += s["length"] * s["begin"] + s["length"] * (s["length"] + 1) // 2
        whole = s["length"] == lengths[s["sequence"]]
        check(whole != (chunk["chain"] >= 0 and order == 0), "only the first slice of a dependent chunk is a part")
    check(at <= chunk["rows"] <= size and chunk["pairs"] == pairs, "padded and pairs of chunk %d" % place)
    check(chunk["tokens"] == sum(s["length"] for s in chunk["slices"]), "tokens")
    if chunk["chain"] >= 0:
        members = chain_of.setdefault(chunk["chain"], [])
        check(chunk["index"] == len(members) and chunk["prefix"] == chunk["slices"][0]["begin"], "index and prefix")
        check(chunk["up"] == (members[-1] if members else -1), "up")
        members.append(place)
    else:
        check(chunk["up"] == chunk["down"] == -1 and chunk["below"] == chunk["state"] == 0, "a chunk alone")
check(seen == lengths, "every token once")
check(len(chain_of) == plan["n_chains"] == len(plan["chains"]), "n_chains")
for number, chain in enumerate(plan["chains"]):
    check(chain["id"] == number and chain_of[number] == list(range(chain["first_chunk"], chain["first_chunk"] +
          chain["n_chunks"])) and chain["tokens"] == lengths[chain["sequence"]] > size, "chains")
    own = [chunks[i] for i in chain_of[number]]
    check([c["down"] for c in own] == chain_of[number][1:] + [-1], "down")
    check([c["below"] for c in own] == list(range(len(own)))[::-1], "below")
    check(all(c["state"] == c["slices"][0]["length"] and c["cp"] == chain["cp"] == 0 for c in own), "state")

for rank, schedule in enumerate(schedules):
    check(schedule["format"] == "chunkflow-schedule" and schedule["version"] == 3, "schedule format")
    check(schedule["kind"] == "paper" and schedule["stages"] == 1 and schedule["rank"] == rank, "schedule head")
    actions = schedule["actions"][0]
    check(len(schedule["actions"]) == 1 and len(actions) == schedule["n_actions"], "n_actions")
    live, forwarded, done, kept = {}, {}, set(), set()
    for a in actions:
        chunk = chunks[a["chunk"]]
        chain, index = chunk["chain"], chunk["index"]
        check(chunk["rank"] == rank, "whose chunk")
        if a["pass"] in "FR":
            check(("keep" in a) and (a["chunk"] not in kept), "keep")
            if a["pass"] == "F" and chain >= 0:
                check(forwarded.get(chain, 0) == index, "forwards ascend")
                forwarded[chain] = index + 1
            if a["keep"]:
                kept.add(a["chunk"])
                live[chain] = live.get(chain, 0) + 1
                check(live[chain] <= (schedule["k"] if chain >= 0 else 1), "at most K live")
        else:
            check(a["pass"] == "B" and "keep" not in a and a["chunk"] in kept, "backward of a kept chunk")
            later = chain_of[chain][index + 1:] if chain >= 0 else []
            check(all(c in done for c in later) and a["chunk"] not in done, "backwards descend")
            kept.remove(a["chunk"])
            live[chain] -= 1
            done.add(a["chunk"])
    check(done == {i for i, c in enumerate(chunks) if c["rank"] == rank}, "all chunks done")
    check(not kept, "nothing left")
print("ok")
