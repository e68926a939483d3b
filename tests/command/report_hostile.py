"""report_hostile.py - pages of tune and reproduce with texts and numbers that no command writes.

    report_hostile.py TUNED PAPER    makes TUNED_numbers.html and .json of TUNED.html and .json, and so for PAPER

Names become markup, quotes and control characters; times become 1e300 and 1e-300. The browser's tests check that the
page shows exactly these texts and numbers.
"""

import json
import re
import sys

TEXT = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x01\u2028<b>"


def in_page(page, part, change):
    """Returns the page with another object as its data, escaped as the command escapes it."""
    pattern = r'(<script type="application/json" id="%s">)(.*?)(</script>)' % part

    def replaced(match):
        data = json.loads(match.group(2))
        change(data)
        return match.group(1) + json.dumps(data).replace("<", "\\u003c") + match.group(3)

    return re.sub(pattern, replaced, page, flags=re.S)


def worse_tuning(data):
    data["source"] = data["model"] = data["gpu"] = data["sentence"] = TEXT
    data["terms"] = {key: TEXT + key for key in data["terms"]}
    for c in data["candidates"]:
        c["schedule"] = TEXT
        if "why" in c:
            c["why"] = TEXT + c["why"] + " not timed to the end"
        for key, factor in (("seconds", 1e299), ("behind", 1e299), ("bound", 1e-300), ("confidence", 1e-300)):
            if key in c:
                c[key] *= factor


def worse_paper(data):
    for sheet in data["sheets"]:
        sheet["title"] = sheet["assumptions"] = TEXT + sheet["name"]
        for column in sheet["columns"]:
            column["title"] = TEXT
        for row in sheet["rows"]:
            for cell in row.values():
                cell["text"] = TEXT
                if "value" in cell:
                    cell["value"] = 1e300
        for series in sheet["series"]:
            series["name"] = TEXT
            series["y"] = [y * 1e290 for y in series["y"]]


def rewrite(name, part, change):
    with open(name + ".html", encoding="utf-8") as file:
        page = in_page(file.read(), part, change)
    with open(name + ".json", encoding="utf-8") as file:
        data = json.load(file)
    change(data)
    with open(name + "_numbers.html", "w", encoding="utf-8") as file:
        file.write(page)
    with open(name + "_numbers.json", "w", encoding="utf-8") as file:
        json.dump(data, file)


rewrite(sys.argv[1], "tuning", worse_tuning)
rewrite(sys.argv[2], "reproduction", worse_paper)
