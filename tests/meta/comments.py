#!/usr/bin/env python3
"""Draws comments and sentences to be read by somebody who has not written them, and counts what breaks a rule.

    tests/meta/comments.py [--seed SEED]      60 comments, each with its place and the code beside it, and 40 sentences
                                              of the pages
    tests/meta/comments.py --rules            for each kind of file, how many comments break which rule, and where; it
                                              fails if code breaks a rule that none breaks today

One reads each comment once, top to bottom, and notes: plain, to be read twice, or wrong English. Of each kind those
with the lowest hash of seed and text are drawn, so that an edit elsewhere changes nothing of a draw. Left out are
comments of fewer than six words, and the headings of sections.
"""

import argparse
import glob
import hashlib
import re
import sys

COMMENT = re.compile(r'/\*.*?\*/|(?://[^\n]*(?:\n[ \t]*(?=//))?)+|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)
KINDS = {"public": 15, "private": 20, ".cu": 9, "tune": 7, "command": 9, "pages": 40, "others": 0}  # so many are drawn
PAGES = ["README.md", "tools/README.md", "tools/python/README.md", "tests/README.md", *glob.glob("tools/guide/*.md")]
RULES = {
    "begins with What, Whether, Who, Which, Where, How or Of":
        re.compile(r"(What|Whether|Who|Whose|Which|Where|How|Of)\b"),
    'says "dear"': re.compile(r".*\bdear(er|est)?\b", re.S),
    'has a "too" behind its verb': re.compile(r".*, too\b(?! (much|many|large|small|long|few|expensive))", re.S),
    "has a sentence of more than 30 words": None,
}
UNBROKEN = list(RULES)[:3]  # in code


class Comment:
    """text: without stars, in one line. code: what stands before it in its line, or else behind it."""

    def __init__(self, path, whole, match):
        self.path, self.line = path, whole.count("\n", 0, match.start()) + 1
        text = re.sub(r"^/\*+|\*+/$|^[ \t]*//+", " ", match.group(), flags=re.M)
        self.text = " ".join(text.split())
        before = whole[whole.rfind("\n", 0, match.start()) + 1:match.start()].strip()
        self.code = before or next((line.strip() for line in whole[match.end():].split("\n") if line.strip()), "")

    def breaks(self, rule):
        if RULES[rule]:
            return bool(RULES[rule].match(self.text))
        return any(len(s.split()) > 30 for s in re.split(r"(?<=[.:;?!]) |(?<=\))  ", self.text))


def comments_of(path):
    with open(path, encoding="utf-8") as file:
        whole = file.read()
    found = []
    for match in COMMENT.finditer(whole):
        if match.group()[0] == "/":
            comment = Comment(path, whole, match)
            if len(re.findall(r"[A-Za-z]{2,}", comment.text)) >= 6 and not re.match(r"[-=]{3}", comment.text):
                found.append(comment)
    return found


class Sentence:
    """A sentence of a page, in one line, and how its paragraph begins."""

    def __init__(self, path, line, text, paragraph):
        self.path, self.line, self.text, self.code = path, line, text, paragraph[:120]

    breaks = Comment.breaks


def sentences_of(path):
    """Sentences of six words and more; code, headings and tables aside."""
    with open(path, encoding="utf-8") as file:
        whole = re.sub(r"^```[\s\S]*?^```$|^(?:    .*\n)+|^[|#].*$", lambda m: "\n" * m.group().count("\n"), file.read(),
                       flags=re.M)
    found, line = [], 1
    for paragraph in re.split(r"(\n(?:\n|(?=- |\d\. )))", whole):
        text = re.sub(r"\]\([^)]*\)|[\[*]|^(?:- |\d\. )", "", " ".join(paragraph.split()))
        found += [Sentence(path, line, s, text) for s in re.split(r"(?<=[.?!]) (?=[A-Z`])", text)
                  if len(re.findall(r"[A-Za-z]{2,}", s)) >= 6]
        line += paragraph.count("\n")
    return found


def all_comments():
    header = comments_of("chunkflow.h")
    with open("chunkflow.h", encoding="utf-8") as file:
        behind = file.read().split("define CHUNKFLOW_IMPLEMENTED", maxsplit=1)[0].count("\n")
    tools = sorted(glob.glob("tools/command/*.[ch]") + glob.glob("tools/report/*.[ch]"))
    return {"public": [c for c in header if c.line <= behind], "private": [c for c in header if c.line > behind],
            ".cu": comments_of("chunkflow_cuda.cu"), "tune": comments_of("tools/chunkflow_tune.h"),
            "command": [c for path in tools for c in comments_of(path)],
            "others": [c for path in sorted(glob.glob("tests/**/*.[ch]", recursive=True) + glob.glob("tests/**/*.cc", recursive=True)
                                            + glob.glob("examples/*.*")) for c in comments_of(path)],
            "pages": [s for path in sorted(PAGES) for s in sentences_of(path)]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seed", default="11")
    parser.add_argument("--rules", action="store_true")
    options = parser.parse_args()
    failed = passed = 0
    for kind, comments in all_comments().items():
        if options.rules:
            for rule in RULES:
                broken = [f"{c.path}:{c.line}" for c in comments if c.breaks(rule)]
                if rule in UNBROKEN and kind != "pages":
                    passed, failed = passed + (not broken), failed + bool(broken)
                print(f"{kind:<8} {len(comments):>5} comments: {len(broken):>3} {rule}: {' '.join(broken)}")
            continue
        order = sorted(comments, key=lambda c: hashlib.sha256(f"{options.seed} {c.text}".encode()).hexdigest())
        for number, c in enumerate(order[:KINDS[kind]], start=1):
            print(f"[{kind} {number}] {c.path}:{c.line}\n    {c.text}\n    > {c.code}\n")
    if options.rules:
        print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
