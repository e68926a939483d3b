#!/usr/bin/env python3
"""Plants faults in chunkflow.h, tools or examples, and asks whether the tests see each; `make mutants N=200` runs it.

    python3 tests/meta/mutants.py BUILD [--of tools] [--n N] [--seed SEED] [--sections pack,check] [--slow SECONDS]
                                  [--about WORDS] [--only PART] [--seen FILE] [--list]

BUILD is a folder with a build without sanitizers, made with `make`. A mutant is one small change in the
implementation, of one of these kinds:

    token     a relational operator, + or -, && or ||, a constant
    term      one side of a sum, a product, && or || alone: what a limit forgets, an overflow check without a part
    guard     the condition before a return, break or continue never holds: a check that is not made
    choice    one argument of a minimum or maximum, one side of ? and :
    by-one    a count handed to what lays out memory, copies, or checks a range, one more or one less
    member    another member of the same record: rows for tokens, stages for virtual stages, end for start
    exchange  two arguments exchanged
    left-out  a statement left out

Of each kind as many are drawn, those with the lowest hash of the seed and their key, so that edits elsewhere change
few. One compilation does for all: each stands in the code behind a number that the environment gives. A first round
runs every test by itself and notes which mutants it comes by; then each mutant meets those tests alone, the quickest
and those that have seen most in its section first, until one fails, crashes, or takes far longer than it should.
--slow: tests that take more seconds of processor time are left out. --about: of functions that these words, a regular
expression, are found in; for trees 'tree|order|cf__share|cf__pipe_(below|relative|has_parent|ended)'.

--seen: what an earlier run has printed. Each mutant meets the test that saw it then before all others, and one that was
killed by a test that still sees it costs one run: so a change of the tests is compared with what was there before.

A mutant's key is "function: before => after". Those that survive and are in tests/meta/mutants_explained.txt, with a
reason why no test can tell them apart, count as explained; "function: *" is for all of a function that does nothing but
what the reason is about. A line of that file holds after edits that leave the expression what it is: names of locals,
casts, the way to a member, blanks and the function's own name may change. Every run names the lines that no mutant
answers to any more; `--stale` does only that, and ends with 1 if there are any.
The last line is "N passed, N failed": killed or explained, and others.
"""

import argparse
import concurrent.futures
import glob
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile

EXPLAINED = "tests/meta/mutants_explained.txt"
TOKEN = re.compile(
    r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|^[ \t]*#(?:\\\n|/\*.*?\*/|[^\n])*|[A-Za-z_]\w*|'
    r'0[xX][0-9a-fA-F]+\w*|\d+\.?\d*(?:[eE][-+]?\d+)?\w*|<<=|>>=|\.\.\.|->|\+\+|--|&&|\|\||<<|>>|'
    r'[-+*/%&|^<>=!]=|\S|\s+',
    re.S | re.M)
SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&", "+": "-", "-": "+"}
OPEN, CLOSE = {"(": ")", "[": "]", "{": "}"}, set(")]}")
ASSIGN = {"=", "+=", "-=", "*=", "/=", "|=", "&=", "^=", "<<=", ">>=", "%="}
COMMUTE = {"cf__add", "cf__mul", "cf__add_product", "cf__min", "cf__max", "cf__most", "cf__product", "cf__take",
           "cf__pipe_hops"}
LEVELS = [["||"], ["&&"], ["|"], ["^"], ["&"], ["==", "!="], ["<", "<=", ">", ">="], ["<<", ">>"], ["+", "-"],
          ["*", "/", "%"]]
LEVEL = {operator: level for level, operators in enumerate(LEVELS) for operator in operators}
COUNTED = re.compile(r"cf__(take|bits_layout|range|\w*within|check_\w*|div_up|round_up|carve\w*)|mem(cpy|set|move)")
COUNT = re.compile(r"\b(n|n_\w+|\w*(size|bytes|tokens|chunks|limit|most|rows|stages|ranks|MAX\w*))\b")
SIBLINGS = [("forward", "input", "weight", "replay"), ("per_token", "per_pair", "constant"), ("n_stages", "n_virtual"),
            ("per_token_activations", "per_token_state", "per_token_state_gradient", "per_token_boundary"),
            ("tokens", "rows"), ("index", "prefix"), ("first_chunk", "n_chunks"), ("start", "end"), ("head", "tail"),
            ("begin", "length", "offset"), ("latency", "seconds_per_token"), ("limit", "limit_bytes"), ("chunks", "bytes"),
            ("limits", "limits_bytes"), ("chunks_per_rank", "n_chunks"), ("rank", "chain"), ("n_slices", "n_chains"),
            ("n_sequences", "n_slices"), ("first", "last"), ("activations", "state"), ("in", "out")]
WORDS = {"if", "while", "for", "switch", "return", "sizeof", "do", "else", "case", "goto", "default", "break",
         "continue"}
HEADS = WORDS - {"sizeof"}  # what an expression does not reach beyond
TYPES = {"const", "static", "struct", "enum", "union", "typedef", "int", "double", "char", "void", "unsigned",
         "va_list", "uint8_t", "uint16_t", "uint32_t", "uint64_t", "int32_t", "int64_t", "size_t", "uintptr_t"}


# Of what every default test build watches, what the library itself does: a write past an array is a fault that is seen.
WATCHED = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DCHUNKFLOW_TESTED"]
SCRIPT_LIMIT = 10  # seconds of processor time of a process that a script starts
WORKPLACE = "{}"   # in a command: a directory of its own, in which these are
LINKS = []


class Mutant:
    """What stands between the tokens begin and end, and what stands there instead; None: nothing, it is a statement."""

    def __init__(self, kind, function, section, begin, end, before, after):
        self.kind, self.path = kind, ""
        self.function, self.section, self.begin, self.end = function, section, begin, end
        self.before, self.after = before, after
        self.number = 0
        self.key = f"{function}: {before} => {after if after is not None else '(left out)'}"

    def widen(self, context):
        """A lone constant is known by what stands before it."""
        self.key = self.key.replace(": ", f": {context} ", 1)


CAST = re.compile(r"\(\s*(?:const )?(?:u?int\d*(?:_t)?|size_t|double|char|void|unsigned|cf_\w+)[ *]*\)(?=\s*[\w(&])")
WAY = re.compile(r"(?:[A-Za-z_]\w*(?:\[[^\[\]]*\])*)?(?:->|\.)\s*(?=[A-Za-z_])")


def essence(text):
    """What is left of an expression when blanks, casts, the way to a member and the names of locals do not count:
    'length <= p->desc.chunk_size' and 'n<=desc->chunk_size' are both '_<=.chunk_size'."""
    text = re.sub(r"\.(?:\.)+", ".", WAY.sub(".", CAST.sub("", text)))
    out = []
    tokens = [t for t in TOKEN.findall(text) if not t.isspace()]
    for i, token in enumerate(tokens):
        local = re.fullmatch(r"[a-z_]\w*", token) and token not in WORDS and tokens[i + 1:i + 2] != ["("] and \
            tokens[i - 1:i] != ["."]
        out.append("_" if local else token)
    return "".join(out)


def squeeze(text):
    return re.sub(r"\s+", " ", re.sub(r"/\*.*?\*/", " ", text, flags=re.S)).strip()


class Source:
    """The tokens of the header, what section and function each is in, and where brackets close."""

    def __init__(self, path):
        self.path = path
        with open(path, encoding="utf-8") as file:
            text = file.read()
        self.tokens = TOKEN.findall(text)
        assert "".join(self.tokens) == text
        self.solid = [not (t.isspace() or t.startswith(("/*", "//"))) for t in self.tokens]
        self.match, self.opened, self.inside, stack = {}, {}, [], []  # inside: the innermost bracket around each token
        for i, token in enumerate(self.tokens):
            if token in CLOSE:
                self.opened[i] = stack.pop()
                self.match[self.opened[i]] = i
            self.inside.append(stack[-1] if stack else None)
            if token in OPEN:
                stack.append(i)
        self.functions = self.find_functions()

    def find_functions(self):
        """(name, section, first token of the body, last one) of each function of the implementation."""
        found, section, i = [], os.path.splitext(os.path.basename(self.path))[0], 0
        here = self.path != "chunkflow.h"
        while i < len(self.tokens):
            token = self.tokens[i]
            here = here or (token.lstrip().startswith("#") and "define CHUNKFLOW_IMPLEMENTED" in token)
            tag = re.match(r"/\* =+\s+>>([a-z]+)", token)
            if tag and self.path == "chunkflow.h":
                section = tag.group(1)
            if token in OPEN:
                before = self.back(i)
                if here and token == "{" and self.tokens[before] == ")":
                    found.append((self.tokens[self.back(self.opened[before])], section, i, self.match[i]))
                if not (token == "{" and self.tokens[before] in ('"C"',)):
                    i = self.match[i]
            i += 1
        return found

    def back(self, i):
        i -= 1
        while i > 0 and not self.solid[i]:
            i -= 1
        return i

    def ahead(self, i):
        i += 1
        while i < len(self.tokens) and not self.solid[i]:
            i += 1
        return i

    def text(self, begin, end):
        return squeeze("".join(self.tokens[begin:end]))

    def never_holds(self, i, begin, end):
        """Whether a token, or what stands around it, is a condition that no test can bring about."""
        at = self.inside[i]
        while at is not None and self.tokens[self.back(at)] != "CF__NEVER":
            at = self.inside[at]
        return at is not None or "CF__NEVER" in self.tokens[begin:end]

    def region(self, at):
        """The smallest whole expression around a token: what brackets, commas, semicolons and assignments cut off."""
        begin, end = at, at
        while True:
            i = self.back(begin)
            token = self.tokens[i]
            if token in CLOSE and token != "}":
                begin = self.opened[i]
                continue
            if token in OPEN or token in ASSIGN or token in (",", ";", "}", "return", "else", "do", "case", "?", ":"):
                break
            begin = i
        while True:
            i = self.ahead(end)
            token = self.tokens[i]
            if token in OPEN and token != "{":
                end = self.match[i]
                continue
            if token in CLOSE or token in ASSIGN or token in (",", ";", "{", "?", ":"):
                break
            end = i
        return begin, end + 1


def is_type_or_label(source, begin, end):
    words = [t for t, s in zip(source.tokens[begin:end], source.solid[begin:end]) if s]
    if not words or words[0] in TYPES or any(w in ("case", "default") or w.lstrip().startswith("#") for w in words):
        return True
    return words[0].startswith("cf_") and len(words) > 1 and words[1] not in "(->[.,"


def token_mutants(source, i):
    """What may stand instead of a token."""
    token = source.tokens[i]
    if token in SWAPS:
        before = source.tokens[source.back(i)]
        binary = before in ")]" or re.match(r"\w", before) and before not in WORDS
        if token in "+-":
            follows = source.tokens[source.ahead(i)]
            return [SWAPS[token]] if binary and follows else []
        wider = {"<": ["<=", ">="], ">": [">=", "<="]}
        return wider.get(token, [SWAPS[token]])
    if re.fullmatch(r"\d+", token):
        return [str(int(token) + 1)] + ([str(int(token) - 1)] if int(token) > 0 else [])
    return []


def operands(source, i):
    """(begin, end) of what stands on both sides of a binary operator, as far as it holds them together."""
    level, begin, end = LEVEL[source.tokens[i]], i, i
    while True:
        at = source.back(begin)
        token = source.tokens[at]
        if token in CLOSE and token != "}":
            begin = source.opened[at]
        elif token in OPEN or token in ASSIGN or token in (",", ";", "}", "?", ":") or token in HEADS or \
                LEVEL.get(token, 99) < level and is_binary(source, at):
            break
        else:
            begin = at
    while True:
        at = source.ahead(end)
        token = source.tokens[at]
        if token in OPEN and token != "{":
            end = source.match[at]
        elif token in CLOSE or token in ASSIGN or token in (",", ";", "{", "?", ":") or \
                at != source.ahead(i) and LEVEL.get(token, 99) <= level and is_binary(source, at):
            break
        else:
            end = at
    return begin, end + 1


def is_binary(source, i):
    before = source.tokens[source.back(i)]
    return before in ")]" or bool(re.match(r"\w", before)) and before not in WORDS


def arguments(source, at):
    """(begin, end) of each argument of the call whose bracket opens at a token."""
    cuts, i = [at], at + 1
    while i < source.match[at]:
        if source.tokens[i] in OPEN:
            i = source.match[i]
        elif source.tokens[i] == ",":
            cuts.append(i)
        i += 1
    cuts.append(source.match[at])
    return [(a + 1, b) for a, b in zip(cuts, cuts[1:])]


def trimmed(source, begin, end):
    while begin < end and not source.solid[begin]:
        begin += 1
    while begin < end and not source.solid[end - 1]:
        end -= 1
    return begin, end


def semantic_mutants(source, i):
    """(kind, begin, end, what stands there instead) of what one would do wrong by thinking wrongly."""
    token, found = source.tokens[i], []
    behind, before = source.ahead(i), source.tokens[source.back(i)]
    if token in ("+", "*", "&&", "||") and is_binary(source, i):
        begin, end = operands(source, i)
        if not re.fullmatch(r"sizeof.*", source.text(behind, end)):
            found += [("term", begin, end, "".join(source.tokens[begin:i])),
                      ("term", begin, end, "".join(source.tokens[behind:end]))]
    if token == "(" and before == "if" and \
            source.tokens[source.ahead(source.match[i])] in ("return", "break", "continue"):
        begin, end = trimmed(source, i + 1, source.match[i])
        found.append(("guard", begin, end, "0"))
    if token == "(" and before in ("cf__min", "cf__max", "cf__most"):
        for begin, end in arguments(source, i):
            found.append(("choice", source.back(i), source.match[i] + 1, "".join(source.tokens[begin:end])))
    if token == "?":
        last = source.back(i)
        begin, end = source.region(source.opened.get(last, last))[0], source.region(last)[1]
        found += [("choice", begin, end, "1"), ("choice", begin, end, "0")]
    if token == "(" and COUNTED.fullmatch(before):
        for begin, end in (trimmed(source, *a) for a in arguments(source, i)):
            text = source.text(begin, end)
            if COUNT.search(text) and not re.search(r'^&|"|sizeof', text):
                found.append(("by-one", begin, end, f"({text}) - 1"))
                if before != "cf__take":  # more memory than is needed harms nobody
                    found.append(("by-one", begin, end, f"({text}) + 1"))
    if before in ("->", ".") and token not in ("", None):
        for family in SIBLINGS:
            for other in family if token in family else ():
                if other != token:
                    begin, end = source.region(i)
                    found.append(("member", begin, end, "".join(source.tokens[begin:i]) + other +
                                  "".join(source.tokens[i + 1:end])))
    return found


def context_of(source, begin, first):
    """What stands before it in its statement, up to 8 tokens."""
    start = begin
    for _ in range(8):
        before = source.back(start)
        if before <= first or source.tokens[before] in (";", "{", "}"):
            break
        start = before
    return source.text(start, begin)


def mutants_of_function(source, name, section, first, last):
    """All mutants in a function's body."""
    found = []
    for i in range(first + 1, last):
        if not source.solid[i]:
            continue
        token = source.tokens[i]
        for other in token_mutants(source, i):
            begin, end = source.region(i)
            if is_type_or_label(source, begin, end) or source.never_holds(i, begin, end):
                continue
            after = squeeze("".join(source.tokens[begin:i]) + " " + other + " " + "".join(source.tokens[i + 1:end]))
            found.append(Mutant("token", name, section, begin, end, source.text(begin, end), after))
            if end - begin <= 2:
                found[-1].widen(context_of(source, begin, first))
        for kind, begin, end, after in semantic_mutants(source, i):
            if not is_type_or_label(source, begin, end) and not source.never_holds(i, begin, end):
                found.append(Mutant(kind, name, section, begin, end, source.text(begin, end), squeeze(after)))
                if end - begin <= 2:
                    found[-1].widen(context_of(source, begin, first))
        if token == "(" and re.match(r"cf_|mem(cpy|move)", source.tokens[source.back(i)]):
            found += swapped_arguments(source, name, section, i)
        if token in ";{})" or token == "else":
            found += left_out(source, name, section, i, last)
    return found


def swapped_arguments(source, name, section, at):
    """Two neighbouring arguments of a call exchanged."""
    end, cuts, i = source.match[at], [at], at + 1
    while i < end:
        if source.tokens[i] in OPEN:
            i = source.match[i]
        elif source.tokens[i] == ",":
            cuts.append(i)
        i += 1
    cuts.append(end)
    callee = source.back(at)
    if source.tokens[callee] in COMMUTE:
        return []
    parts = [source.text(a + 1, b) for a, b in zip(cuts, cuts[1:])]
    found = []
    for j in range(len(parts) - 1):
        if parts[j] == parts[j + 1] or not re.match(r"[-&*\w(]", parts[j]) or '"' in parts[j] + parts[j + 1]:
            continue
        other = parts[:j] + [parts[j + 1], parts[j]] + parts[j + 2:]
        found.append(Mutant("exchange", name, section, callee, end + 1, source.text(callee, end + 1),
                            source.tokens[callee] + "(" + ", ".join(other) + ")"))
    return found


def left_out(source, name, section, i, last):
    """The statement after token i left out: an assignment, a call, a refusal."""
    begin = source.ahead(i)
    if begin >= last or source.tokens[source.inside[begin]] != "{" or \
            not re.match(r"[A-Za-z_*(]|\+\+|--", source.tokens[begin]):
        return []
    if source.tokens[i] == ")":  # behind the head of an if or a loop
        head = source.back(source.opened[i])
        if source.tokens[head] not in ("if", "while", "for"):
            return []
    end = begin
    while source.tokens[end] != ";":
        if source.tokens[end] in CLOSE or source.tokens[end] == "{":
            return []
        end = source.match[end] + 1 if source.tokens[end] in OPEN else end + 1
    text = source.text(begin, end + 1)
    word = source.tokens[begin]
    refusal = word == "return" and source.tokens[i] == ")" and \
        re.match(r"return cf__?\w*(fail|refuse|bad|large|too)", text)
    if not refusal and (word in WORDS or word in TYPES or is_type_or_label(source, begin, end)):
        return []
    return [Mutant("left-out", name, section, begin, end + 1, text, None)]


def all_mutants(source, sections, about):
    """Those of these sections of the header; none named: all that it has."""
    found = {}
    for name, section, first, last in source.functions:
        if re.search(about, name + source.text(first, last)) is None:
            continue
        if not sections or section in sections or source.path != "chunkflow.h":
            for mutant in mutants_of_function(source, name, section, first, last):
                mutant.path = source.path
                found.setdefault(mutant.key, mutant)
    return list(found.values())


def draw(mutants, n, seed):
    """The n first in an order that takes one of each kind in turn."""
    turn, order = {}, []
    for mutant in sorted(mutants, key=lambda m: hashlib.sha256(f"{seed} {m.key}".encode()).hexdigest()):
        turn[mutant.kind] = turn.get(mutant.kind, 0) + 1
        order.append((turn[mutant.kind], mutant.kind, mutant))
    return [m for *_, m in sorted(order, key=lambda o: o[:2])][:n]


def render(source, mutants):
    """The header with all of them in it; lines stay where they are."""
    regions = {}
    for mutant in mutants:
        regions.setdefault((mutant.begin, mutant.end), []).append(mutant)
    order = sorted(regions, key=lambda r: (r[0], -r[1]))

    def put(begin, end, inside):
        out, i = [], begin
        for at, region in enumerate(inside):
            if region[0] < i:
                continue
            out.append("".join(source.tokens[i:region[0]]))
            nested = [r for r in inside[at + 1:] if r[0] >= region[0] and r[1] <= region[1]]
            body = put(region[0], region[1], nested)
            for mutant in regions[region]:
                if mutant.after is None:
                    body = f"{{ if (!CF_MUTANT({mutant.number})) {body} }}"
                else:
                    body = f"(CF_MUTANT({mutant.number}) ? ({mutant.after}) : ({body}))"
            out.append(body)
            i = region[1]
        out.append("".join(source.tokens[i:end]))
        return "".join(out)

    return put(0, len(source.tokens), order)


PRELUDE = """#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
enum { CF_MUTANTS = %d };
static int cf_mutant = -1;
static unsigned char cf_mutants_met[CF_MUTANTS + 1];
#define CF_MUTANT(n) (cf_mutants_met[n] = 1, cf_mutant == (n))
static void cf_mutants_end(void) {
    signal(SIGXFSZ, SIG_IGN); /* tests set limits to the size of a file */
    FILE *file = fopen(getenv("CHUNKFLOW_MET"), "ab");
    if (file == NULL) return;
    fwrite(cf_mutants_met, 1, sizeof cf_mutants_met, file);
    fclose(file);
}
static void __attribute__((constructor)) cf_mutants_start(void) {
    if (getenv("CHUNKFLOW_MUTANT")) cf_mutant = atoi(getenv("CHUNKFLOW_MUTANT"));
    if (getenv("CHUNKFLOW_MET")) atexit(cf_mutants_end);
}
"""
KIN = ["graph_dot", "idle", "schedule_csv", "schedule_new", "text_out"]  # tools that are tested as the library is
KIN_SUITES = ("csv.", "dot.", "idle.")
READERS = ["json_read", "cli", "cli_files", "progress"]  # what tests of safetensors are linked with
FUZZED = ["config_json", "json_read", "progress", "saved"]  # and those of the corpus
TRAINER = "tests/trainer/test_trainer.c"
KINDS = "tests/trainer/test_trainer_kinds.c"
TENSORS = "tests/trainer/test_trainer_tensors.c"
WHOLE = "tests/trainer/test_trainer_whole.c"  # calls train_cpu_f64

# What faults are planted in, and what is compiled then: source, object, and options of its own.
PARTS = {
    "header": (["chunkflow.h"], [("library.c", "library", WATCHED), ("library.c", "plain", ["-O2"])]),
    "examples": ([f"examples/{f}.h" for f in ("arguments", "attention", "base", "check", "checkpoint", "chunked",
                                             "feed_forward", "kernels", "model", "optimizer", "options", "parts",
                                             "recurrent", "safetensors", "state_stream", "text", "tokens", "unchunked")],
                 [(TRAINER, "trainer", ["-DTRAIN_FLOAT64", *WATCHED]), (KINDS, "kinds", ["-DTRAIN_FLOAT64", *WATCHED]),
                  (TENSORS, "tensors", WATCHED),
                  ("examples/train_cpu.c", "train_cpu", ["-O2"]),
                  ("examples/train_cpu.c", "train_cpu_f64", ["-O2", "-DTRAIN_FLOAT64"])]),
    "tools": ([f"tools/command/{f}.c" for f in KIN], [(f"tools/command/{f}.c", f, WATCHED) for f in KIN]),
}
# The library is compiled once, for all.
LINKED = ["-DCHUNKFLOW_IMPLEMENTED", "-DCHUNKFLOW_API=extern", "-DCHUNKFLOW_TUNE_IMPLEMENTED", "-DCHUNKFLOW_TUNE_API=extern"]


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def compiler():
    return os.environ.get("CC", "cc").split()


def flags_of(folder):
    return ["-std=gnu99", "-D_XOPEN_SOURCE=700", f"-I{folder}", "-I.", "-include", f"{folder}/mutants.h", "-w", "-O1",
            "-Werror=vla", "-Werror=int-conversion", "-Werror=incompatible-pointer-types", "-fmax-errors=0"]


def copy_neighbours(folder):
    """What the texts with mutants include by their own place."""
    for pattern in ("chunkflow.h", "tests/harness.h", "tests/trainer/*.[ch]", "examples/*.h", "examples/train_cpu.c",
                    "tools/command/*.h", "tools/*.h"):
        for path in glob.glob(pattern):
            os.makedirs(os.path.dirname(f"{folder}/{path}") or ".", exist_ok=True)
            shutil.copy(path, f"{folder}/{path}")
    shutil.copy("tests/implementation.c", f"{folder}/library.c")


def compile_mutants(part, sources, mutants, folder):
    """Writes and compiles them, leaving out those that are no C. Returns those that are left, and how many numbers there
    are."""
    units = PARTS[part][1]
    linked = LINKED if part == "examples" else []
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    copy_neighbours(folder)
    while True:
        for i, mutant in enumerate(mutants):
            mutant.number = i + 1
        texts = {path: render(source, [m for m in mutants if m.path == path]) for path, source in sources.items()}
        for path, text in texts.items():
            write(f"{folder}/{path}", text)
        write(f"{folder}/mutants.h", PRELUDE % len(mutants))
        errors = "".join(subprocess.run([*compiler(), *flags_of(folder), *linked, *options, "-fsyntax-only",
                                         f"{folder}/{unit}"], check=False, capture_output=True, text=True).stderr
                         for unit, _, options in units)
        bad = set()
        for path, line in set(re.findall(r"^(\S+?):(\d+):\d+: error", errors, re.M)):
            path = os.path.relpath(os.path.normpath(path), folder)
            if path not in texts:
                continue
            lines = texts[path].split("\n")
            here = re.findall(r"CF_MUTANT\((\d+)\)", lines[int(line) - 1])
            bad.update(here or re.findall(r"CF_MUTANT\((\d+)\)", "\n".join(lines[:int(line)]))[-1:])
        if not errors or (": error" not in errors):
            break
        if not bad:
            sys.exit(errors)
        mutants = [m for m in mutants if str(m.number) not in bad]
    texts = "".join(subprocess.run([*compiler(), *flags_of(folder), *linked, *options, "-E", f"{folder}/{unit}"], check=True,
                                   capture_output=True, text=True).stdout for unit, _, options in units)
    there, count = set(re.findall(r"cf_mutants_met\[(\d+)\]", texts)), len(mutants)
    mutants = [m for m in mutants if str(m.number) in there]  # not what other compilers see
    for unit, name, options in units:
        subprocess.run([*compiler(), *flags_of(folder), *linked, *options, "-c", f"{folder}/{unit}", "-o",
                        f"{folder}/{name}.o"], check=True)
    return mutants, count


def link(build, folder, part):
    """The tests, with the mutants in the place of what they are of: (name, command) of each."""
    mutants = [f"{folder}/{name}.o" for _, name, _ in PARTS[part][1]]
    plain, watched = f"{folder}/implementation.o", f"{folder}/watched.o"

    def make(program, *parts, watch=True):
        subprocess.run([*compiler(), *(WATCHED if watch else []), *parts, "-lm", "-o", f"{folder}/{program}"], check=True)
        return f"{folder}/{program}"

    def library(to, *options, source="tests/implementation.c"):
        subprocess.run([*compiler(), *options, "-std=c99", "-I.", "-O1", "-c", source, "-o", to], check=True)
        return to

    def cases(program):
        names = subprocess.run([program, "--list"], check=True, capture_output=True, text=True).stdout.split()
        return [(name, [program, name]) for name in names if not name.startswith("harness.")]

    if part == "examples":
        trainer, kinds, tensors, single, double = mutants
        readers = [f"tools/command/{f}.c" for f in READERS]
        library(watched, *WATCHED)
        library(plain)
        LINKS.extend(os.path.abspath(f) for f in (make("train_cpu", single, plain, watch=False),
                                                  make("train_cpu_f64", double, plain, watch=False), plain))
        os.environ["TRAIN_CPU_F64"] = LINKS[1]
        whole = make("whole", "-std=c99", "-I.", "-O2", *LINKED, WHOLE, plain, watch=False)
        return [*cases(make("trainer", trainer, watched)), *cases(make("kinds", kinds, watched)),
                *cases(whole),
                ("trainer_tensors", [make("tensors", *LINKED, "-I.", tensors, *readers, watched), WORKPLACE]),
                ("train_check.sh", ["sh", "tests/trainer/train_check.sh", WORKPLACE])]
    objects = [f for f in sorted(glob.glob(f"{build}/test/*.o")) if not f.endswith("/implementation.o")]
    if part == "tools":  # no other suite comes by them
        return [c for c in cases(make("unit", *objects, *mutants, library(watched, *WATCHED)))
                if c[0].startswith(KIN_SUITES)]
    kin = [f"{build}/test/command/{f}.o" for f in KIN]
    fuzz = make("fuzz", "-std=c99", "-I.", "-O1", *LINKED, *sorted(glob.glob("tests/fuzz/*.c")), mutants[0], *kin,
                *(f"tools/command/{f}.c" for f in FUZZED),
                *(f"{build}/test/{f}.o" for f in ("exact", "naive", "oracle", "pipeline", "steps")))
    trainer = make("trainer", library(f"{folder}/train.o", "-D_XOPEN_SOURCE=700", "-DTRAIN_FLOAT64", *LINKED,
                                      source=TRAINER), mutants[0])
    others = [f"{build}/test/{f}.o" for f in ("test_best", "test_bounds", "test_known", "exact", "forest", "naive",
                                              "oracle", "pipeline", "problem", "random_schedule", "steps", "suite")]
    return [*((f"fuzz.{name}", [fuzz, name]) for name in sorted(os.listdir("tests/fuzz/corpus"))), *cases(trainer),
            *cases(make("unit", *objects, *kin, mutants[0])),  # what searches longest is not watched, as in make test
            *cases(make("search", "-std=c99", "-I.", "-O1", "-DSUITES(X)=X(search) X(many_bounds) X(known)",
                        "tests/unit/main.c", *others, mutants[1], watch=False))]


def run(command, variables, limit):
    """Whether the test passes, within `limit` seconds of processor time of each process, and how many it took. A script
    is ended at the first thing that it finds."""
    is_script = command[0] == "sh"
    variables = {**os.environ, "ASAN_OPTIONS": "hard_rss_limit_mb=4096", **variables}
    with tempfile.TemporaryDirectory() as place:
        for path in LINKS if WORKPLACE in command else ():
            os.symlink(path, f"{place}/{os.path.basename(path)}")
        command = [place if word == WORKPLACE else word for word in command]
        process = subprocess.Popen(["prlimit", f"--cpu={int(limit) + 1}", "--core=0", *command], env=variables, text=True,
                                   stdout=subprocess.PIPE if is_script else subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, start_new_session=is_script)
        for line in process.stdout if is_script else ():
            if line.startswith("FAIL "):
                os.killpg(process.pid, signal.SIGTERM)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = status
        return status == 0, used.ru_utime + used.ru_stime


def meet(tests, folder, slow, count):
    """Runs each test once. Returns (seconds, name, command, mutants that it comes by), the quickest first."""
    met, failing = [], 0
    for name, command in tests:
        if os.path.exists(f"{folder}/met"):
            os.remove(f"{folder}/met")
        limit = SCRIPT_LIMIT if command[0] == "sh" else slow
        passed, seconds = run(command, {"CHUNKFLOW_MET": f"{folder}/met"}, limit)
        if not passed:  # on a busy machine a test that takes time may fail once
            passed, seconds = run(command, {"CHUNKFLOW_MET": f"{folder}/met"}, limit)
        if command[0] != "sh" and seconds > slow:
            print(f"left out: {name}, which takes more than {slow} s")
            continue
        if not passed:  # a test that compares times may, for the question at each mutant takes time
            print(f"left out: {name}, which fails although no fault is planted")
            failing += 1
            if failing > 2:
                sys.exit("too many tests fail although no fault is planted")
            continue
        with open(f"{folder}/met", "rb") as file:
            seen = file.read()
        here = {i % (count + 1) for i in range(len(seen)) if seen[i]}  # there is a record of each file
        met.append((seconds, name, command, here))
    return sorted(met, key=lambda m: m[:2])


def read_explained():
    """Key -> reason."""
    explained = {}
    if os.path.exists(EXPLAINED):
        with open(EXPLAINED, encoding="utf-8") as file:
            for line in file:
                if line.strip() and not line.startswith("#"):
                    key, _, reason = line.rstrip("\n").partition(" ## ")
                    explained[key] = reason
    return explained


def find_explained(mutants, explained):
    """Returns mutant's key -> reason, and the lines of the file that no mutant answers to. A line is of the mutant with
    its very text; else of the only one in its function with its essence; else, if there is no such function any more,
    of the only one anywhere with its essence."""
    exact = {m.key for m in mutants}
    functions = {m.function for m in mutants}
    near, anywhere = {}, {}
    for m in mutants:
        text = essence(m.key.partition(": ")[2])
        near.setdefault((m.function, text), []).append(m.key)
        anywhere.setdefault(text, []).append(m.key)
    reasons, stale = {}, []
    for line, reason in explained.items():
        function, _, text = line.partition(": ")
        if text == "*":
            found = [m.key for m in mutants if m.function == function]
        elif line in exact:
            found = [line]
        else:
            text = essence(text)
            found = near.get((function, text), []) if function in functions else anywhere.get(text, [])
            found = found if len(found) == 1 else []
        reasons.update((key, reason) for key in found)
        if not found:
            stale.append(line)
    return reasons, stale


def print_stale(explained):
    """Prints the lines of the file that no mutant of any part answers to, and returns how many there are."""
    mutants = [m for paths, _ in PARTS.values() for path in paths for m in all_mutants(Source(path), [], "")]
    stale = find_explained(mutants, explained)[1]
    for line in stale:
        print(f"stale: {line}")
    return len(stale)


def read_seen(path):
    """Key -> the test that killed it, from what a run has printed."""
    if not path:
        return {}
    with open(path, encoding="utf-8") as file:
        return dict(re.findall(r"^killed: \[\w+\] [\w-]+: (.*)  by (\S+)$", file.read(), re.M))


def judge(mutant, tests, kills, seen):
    """The test that kills it, or None. kills: how many each test has killed of each section, which says where to begin;
    seen: the one that has killed it before."""
    def price(test):
        return 0 if test[1] == seen.get(mutant.key) else test[0] / (1 + 4 * kills.get((mutant.section, test[1]), 0))

    for seconds, name, command, _ in sorted((t for t in tests if mutant.number in t[3]), key=price):
        limit = SCRIPT_LIMIT if command[0] == "sh" else 2 + 4 * seconds
        if not run(command, {"CHUNKFLOW_MUTANT": str(mutant.number)}, limit)[0]:
            kills[mutant.section, name] = kills.get((mutant.section, name), 0) + 1
            return name
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("build")
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--of", choices=sorted(PARTS), default="header", help="what faults are planted in")
    parser.add_argument("--sections", default="", help="of the header; default: all that it has")
    parser.add_argument("--slow", type=float, default=0.4)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--about", default="", help="only functions that this expression is found in")
    parser.add_argument("--only", default="", help="only drawn mutants with this in their key")
    parser.add_argument("--seen", default="", help="what an earlier run has printed: which test saw which mutant")
    parser.add_argument("--list", action="store_true", help="print what would be drawn")
    parser.add_argument("--stale", action="store_true", help="print explained mutants that are no more")
    options = parser.parse_args()
    folder, explained = f"{options.build}/mutants", read_explained()
    stale = 0 if options.list else print_stale(explained)
    if options.stale:
        print(f"{len(explained) - stale} passed, {stale} failed")
        sys.exit(stale > 0)
    sources = {path: Source(path) for path in PARTS[options.of][0]}
    sections = [s for s in options.sections.split(",") if s]
    every = [m for source in sources.values() for m in all_mutants(source, [], "")]
    explained = find_explained(every, explained)[0]
    mutants = [m for source in sources.values() for m in all_mutants(source, sections, options.about)]
    print(f"{len(mutants)} possible mutants in {options.sections or options.of}; seed {options.seed}")
    mutants = [m for m in draw(mutants, 2 * options.n, options.seed) if options.only in m.key]  # some are no C
    if options.list:
        for mutant in mutants:
            print(f"[{mutant.section}] {mutant.kind}: {mutant.key}")
        return
    compiled, count = compile_mutants(options.of, sources, mutants, folder)
    tests = meet(link(options.build, folder, options.of), folder, options.slow, count)
    mutants = compiled[:options.n]
    print(f"{len(mutants)} mutants, {len(tests)} tests of {sum(t[0] for t in tests):.0f} s", flush=True)
    seen = read_seen(options.seen)
    counts, table, kills = {"killed": 0, "explained": 0, "survived": 0}, {}, {}
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        killers = pool.map(lambda m: judge(m, tests, kills, seen), mutants)
        for mutant, killer in zip(mutants, killers):
            reason = explained.get(mutant.key)
            verdict = "killed" if killer else "explained" if reason else "survived"
            counts[verdict] += 1
            for row in (mutant.section, mutant.kind):
                table.setdefault(row, {"killed": 0, "explained": 0, "survived": 0})[verdict] += 1
            reached = any(mutant.number in seen for *_, seen in tests)
            verdict += "" if reached or killer else " (never reached)"
            print(f"{verdict}: [{mutant.section}] {mutant.kind}: {mutant.key}" + (f"  by {killer}" if killer else ""), flush=True)
    for section, row in sorted(table.items()):
        print(f"{section:<10} {row['killed']:>4} killed {row['explained']:>4} explained {row['survived']:>4} survived")
    print(f"{100.0 * counts['survived'] / max(1, len(mutants)):.1f} % survive without a reason")
    print(f"{counts['killed'] + counts['explained']} passed, {counts['survived']} failed")
    sys.exit(counts["survived"] > 0)


if __name__ == "__main__":
    main()
