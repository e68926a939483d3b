"""svg_check.py - checks the pictures of plan and pack --svg and of plan --memory-svg against what --json wrote.

    svg_check.py SCHEDULE.json CHART.svg [MEMORY.svg REPORT.json KIND]
    svg_check.py PLAN.json CHUNKS.svg

Prints what is wrong and exits with 1, or prints nothing. A picture must be well-formed, its boxes must be where the
timeline says, and its labels must fit. With a report of the same schedule, the lines of memory must have its numbers.
"""

import json
import re
import sys
import xml.etree.ElementTree as ElementTree

LEFT, RIGHT, WIDTH, TOP, PLOT, TYPE = 56, 12, 720, 8, 170, 10
SVG = "{http://www.w3.org/2000/svg}"
WRONG = []


def check(holds, *why):
    if not holds:
        WRONG.append(" ".join(str(w) for w in why))


def take_style(root):
    """Sets the sizes for another picture: all except the width grow with the type, and the plot gets the height that is
    left."""
    global LEFT, RIGHT, WIDTH, TOP, PLOT, TYPE
    TYPE, WIDTH, height = (int(root.get(name)) for name in ("font-size", "width", "height"))
    LEFT, RIGHT, TOP, axis = ((units * TYPE + 5) // 10 for units in (56, 12, 8, 40))
    PLOT = height - TOP - axis
    check(root.get("viewBox") == "0 0 %d %d" % (WIDTH, height), "view box", root.get("viewBox"))
    for text in root.iter(SVG + "text"):
        wide = 0.53 * TYPE * len(text.text) * {"end": 1, "middle": 0.5}.get(text.get("text-anchor"), 0)
        check(0 <= float(text.get("y")) <= height and float(text.get("x")) <= WIDTH, "out of the picture:", text.text)
        check(float(text.get("x")) - wide > 0, "at the edge:", text.text)


def place(schedule, time):
    return LEFT + time / schedule["makespan"] * (WIDTH - LEFT - RIGHT)


def check_chart(schedule, path):
    root = ElementTree.parse(path).getroot()
    take_style(root)
    keys = next(g for g in root.iter(SVG + "g") if g.get("class") == "legend")
    check(len(keys.findall(SVG + "text")) <= len(keys.findall(SVG + "path")), "words of the legend without a swatch")
    lanes = [g for g in root.iter(SVG + "g") if g.get("class") == "stage"]
    check(root.tag == SVG + "svg" and len(lanes) == len(schedule["actions"]), "lanes", len(lanes))
    for lane, actions in zip(lanes, schedule["actions"]):
        passes = [a for a in actions if a["pass"] in "FRBIW"]
        boxes = lane.findall(SVG + "rect")
        check(len(boxes) == len(passes), "boxes", len(boxes), "passes", len(passes))
        for box, a in zip(boxes, passes):
            x, width = float(box.get("x")), float(box.get("width"))
            check(abs(x - place(schedule, a["start"])) <= 0.001, a, "lies at", x)
            check(abs(x + width - place(schedule, a["end"])) <= 0.002, a, "ends at", x + width)
            check(box.get("class") == a["pass"] + (" dropped" if a.get("keep") is False else ""), a, box.get("class"))
            title = re.fullmatch(r"(\w)(\d+): (\S+) to (\S+)", box.find(SVG + "title").text)
            check(
                title
                and title[1] == a["pass"]
                and int(title[2]) == a["chunk"]
                and abs(float(title[3]) - a["start"]) <= 1e-8 * schedule["makespan"],
                a,
                "is called",
                title,
            )
        check_labels(lane, boxes)
    ends = [
        float(t.get("x")) + 0.55 * TYPE * len(t.text)
        for g in root.iter(SVG + "g")
        if g.get("class") == "axis"
        for t in g.findall(SVG + "text")
    ]
    starts = [
        float(t.get("x")) for g in root.iter(SVG + "g") if g.get("class") == "axis" for t in g.findall(SVG + "text")
    ]
    check(all(e <= s for e, s in zip(ends, starts[1:])) and max(ends, default=0) <= WIDTH, "labels of the axis collide")


def check_labels(lane, boxes):
    """Every label lies in its box."""
    spans = [(float(b.get("x")), float(b.get("x")) + float(b.get("width"))) for b in boxes]
    for text in lane.findall(SVG + "text")[1:]:
        x = float(text.get("x"))
        check(any(a <= x and x + 0.56 * TYPE * len(text.text) <= b + 1 for a, b in spans), "label", text.text, "leaves its box")


def steps_of(d):
    """Returns the corners of a line: where each of its heights begins."""
    first = re.match(r"M([\d.]+) ([\d.]+)", d)
    return [(float(first[1]), float(first[2]))] + [
        (float(x), float(y)) for x, y in re.findall(r"H([\d.]+)V([\d.]+)", d)
    ]


def check_memory(schedule, path, report, kind):
    root = ElementTree.parse(path).getroot()
    take_style(root)
    lines = [p for p in root.iter(SVG + "path") if p.get("class") == "stage"]
    s = next(s for s in report["schedules"] if s["name"] == kind)
    check(len(lines) == len(s["stages"]), "lines", len(lines))
    names = [t for t in root.iter(SVG + "text") if t.text.startswith("stage ")]
    check([t.text for t in names] == ["stage %d" % i for i in range(len(lines))], "names of lines", len(names))
    if len(lines) <= 8: # they stand above their lines, which have no others for a legend
        check(all(g.get("class") != "legend" for g in root.iter(SVG + "g")), "a legend beside names")
        for name, line in zip(names, lines):
            own = steps_of(line.get("d"))
            y = [b for a, b in own if a <= float(name.get("x"))][-1]
            check(0 <= y - float(name.get("y")) <= TYPE, name.text, "stands away from its line")
    # The upper edge is the highest peak plus a twentieth, or a limit above this that is near.
    peaks = [m["total"] for m in s["memory"]] if "memory" in s else s["peak_tokens"]
    top = max(peaks)
    limit = report.get("limit_bytes", 0)
    if top < limit <= 3 * top:
        top = limit
    for stage, line in enumerate(lines):
        held, amount, wanted = [], 0, []
        for i, change in enumerate(s["stages"][stage]["held"]):
            amount += change
            if not held or held[-1] != amount:
                wanted.append((schedule["actions"][stage][i]["start"], amount * s["held_unit"]))
            held.append(amount)
        got = steps_of(line.get("d"))
        lowest = min(y for _, y in got)
        peak_y = TOP + PLOT - peaks[stage] / (1.05 * top) * PLOT
        check(abs(lowest - peak_y) <= 0.01, "peak of stage", stage, "is drawn at", lowest, "not", peak_y)
        for time, amount in wanted:
            x = place(schedule, time)
            y = [b for a, b in got if a <= x + 0.002][-1]
            shown = (TOP + PLOT - y) / PLOT * 1.05 * top
            check(
                abs(shown - amount) <= s["held_unit"] + 1e-4 * top,
                "stage",
                stage,
                "at",
                time,
                "holds",
                shown,
                "not",
                amount,
            )


def check_plan(plan, path):
    """Frames are in a grid of ranks and steps. Every slice is where its offset and length say, and split ones have a
    colour."""
    root = ElementTree.parse(path).getroot()
    take_style(root)
    frames = [p for p in root.iter(SVG + "path") if p.get("class") == "chunk"]
    boxes = [r for r in root.iter(SVG + "rect") if r.get("class") == "slice"]
    slices = [(chunk, s) for chunk in plan["chunks"] for s in chunk["slices"]]
    check(len(frames) == len(plan["chunks"]), "frames", len(frames))
    check(len(boxes) == len(slices), "boxes", len(boxes), "slices", len(slices))
    corners, hues = {}, {}
    for chunk, frame in zip(plan["chunks"], frames):
        corners[chunk["id"]] = tuple(float(n) for n in re.match(r"M([\d.]+) (\d+)h([\d.]+)", frame.get("d")).groups())
    column = [corners[c["id"]][0] for c in plan["chunks"]]
    check(all(a < b for c, a, b in zip(plan["chunks"], column, column[plan["chunks_per_rank"]:])), "ranks beside ranks")
    for (chunk, s), box in zip(slices, boxes):
        x, y, wide = corners[chunk["id"]]
        token = wide / plan["chunk_size"]
        check(abs(float(box.get("x")) - x - s["offset"] * token) <= 0.02, "slice of chunk", chunk["id"], "begins elsewhere")
        check(abs(float(box.get("width")) - s["length"] * token) <= 0.02, "slice of chunk", chunk["id"], "is as wide elsewhere")
        check(float(box.get("y")) == y, "slice of chunk", chunk["id"], "lies in another line")
        check(box.find(SVG + "title").text.endswith(", %d tokens" % s["length"]), box.find(SVG + "title").text)
        whole = not plan.get("order") and s["length"] == sum(t["length"] for _, t in slices if t["sequence"] == s["sequence"])
        check(plan.get("order") or whole == (box.get("fill") in ("#d5dbe6", "#e6eaf1")), "colour of", s)
        if not whole and not plan.get("order"):
            check(hues.setdefault(s["sequence"], box.get("fill")) == box.get("fill"), "two colours of", s["sequence"])
    groups = [g for g in root.iter(SVG + "g") if g.get("class") == "chunks"]
    spans = [(float(b.get("x")), float(b.get("x")) + float(b.get("width")), float(b.get("y"))) for b in boxes]
    for text in groups[0].findall(SVG + "text"):
        x, y = float(text.get("x")), float(text.get("y"))
        check(any(a <= x and x + 0.5 * TYPE * len(text.text) <= b + 1 and top < y < top + 3 * TYPE for a, b, top in spans),
              "label", text.text, "leaves its box")


def main(arguments):
    with open(arguments[0], encoding="utf-8") as file:
        made = json.load(file)
    if made["format"] == "chunkflow-plan":
        check_plan(made, arguments[1])
    else:
        check_chart(made, arguments[1])
    if len(arguments) > 2:
        with open(arguments[3], encoding="utf-8") as file:
            check_memory(made, arguments[2], json.load(file), arguments[4])
    for why in WRONG[:8]:
        print(why)
    sys.exit(1 if WRONG else 0)


main(sys.argv[1:])
