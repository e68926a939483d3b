"""Tests chunkflow.lengths with a tokenizer, against words counted by hand: python tests/torch/lengths.py

The tokenizer is made here: each word is a token, and a text gets one more at its start. This Python has Transformers,
jinja2 and pyarrow.
"""

import gzip
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile

import pyarrow
import pyarrow.parquet
import tokenizers
import transformers

import judge

PACKAGE = str(pathlib.Path(__file__).resolve().parents[2] / "tools" / "python")
sys.path.insert(0, PACKAGE)
from chunkflow.lengths import Refused, lengths_of

TEMPLATE = ("{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
            "<turn> {{ m.role }} {{ m.content }} {% endfor %}{% if tools %}tools {% endif %}")


def check(name, got, wanted):
    judge.check(name, got == wanted, "" if got == wanted else f"wanted {str(wanted)[:300]}, got {str(got)[:300]}")


def make_tokenizer(folder, template):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "<?>": 1}, unk_token="<?>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<?>", model_max_length=8)
    made.chat_template = template
    made.save_pretrained(folder)
    return str(folder)


def draw(rng):
    """Yields documents with their numbers of tokens, counted without a tokenizer."""
    def words():
        return ["w"] * int(rng.lognormvariate(3, 1.5))

    def turns():
        said = [words() for _ in range(rng.randint(1, 5))]
        return [{"role": "user", "content": " ".join(w)} for w in said], sum(2 + len(w) for w in said)

    kind = rng.randrange(6)
    if kind == 0:
        ids = [7] * rng.randrange(500)
        return {"input_ids": ids, "text": "not counted"}, len(ids)
    if kind == 1:
        text = words()
        return {"text": " ".join(text), "messages": None}, 1 + len(text)
    if kind == 2:
        first, second = words(), words()
        return {"prompt": " ".join(first) + " ", "completion": " ".join(second)}, 1 + len(first) + len(second)
    if kind == 3:
        (first, n), (second, m) = turns(), turns()
        return {"prompt": first, "completion": second}, n + m
    said, n = turns()
    tools = [{"type": "function", "function": {"name": "f"}}] if kind == 5 else None
    return {"messages": said, "tools": tools}, n + (tools is not None)


def refused(*arguments):
    try:
        return f"took {list(lengths_of(*arguments))}"
    except Refused as error:
        return str(error)


def test_files(folder, tokenizer):
    """A fault of a file, or of a tokenizer's files, is reported in a sentence that begins with its name."""
    path = folder / "half.jsonl"
    for text, tools in (("t1 \\ud800 t2", ""), ("\\udc00", ""), ("", ', "tools": null')):
        said = f'"text": "{text}"' if text else '"messages": [{"role": "a\\ud800", "content": ""}]'
        path.write_text('{"text": "whole"}\n{%s%s}\n' % (said, tools))
        check(f"half a character, {said}", refused([str(path)], tokenizer).split(":")[1:2], ["2"])
    whole = gzip.compress(b'{"input_ids": [1]}\n' * 4000)
    for at in (2, 12, 20, len(whole) - 6):
        (folder / "bad.jsonl.gz").write_bytes(whole[:at] + bytes(4) + whole[at + 4:])
        said = refused([str(folder / "bad.jsonl.gz")])
        check(f"a corrupt .gz, byte {at}", ("bad.jsonl.gz" in said, "took" in said), (True, False))
    check("standard input twice", "read once" in refused(["-", "-"]), True)
    words = pyarrow.StringArray.from_buffers(2, pyarrow.array([0, 2, 4], pyarrow.int32()).buffers()[1],
                                             pyarrow.py_buffer(b"w \xff\xfe"))
    days = pyarrow.array([2 ** 62, 0], pyarrow.timestamp("us"))
    for unused in (False, True):
        table = {"text": ["w", "w w"], "other": words} if unused else {"text": words}
        pyarrow.parquet.write_table(pyarrow.table({**table, "day": days}), folder / "bad.parquet")
        got = refused([str(folder / "bad.parquet")], tokenizer)
        wanted = "took [(2, " if unused else f"{folder}/bad.parquet:2: a value that cannot be read"
        check(f"bad UTF-8 {'in a column that is not used' if unused else 'in Parquet'}", got[:len(wanted)], wanted)
    pyarrow.parquet.write_table(pyarrow.table({"text": days}), folder / "bad.parquet")
    check("a date out of range", "bad.parquet:1: a value" in refused([str(folder / "bad.parquet")], tokenizer), True)
    for name, files in (("class", {}), ("t5", {}), ("null", {"tokenizer_config.json": "null"}),
                        ("list", {"tokenizer_config.json": "[]"}), ("number", {"tokenizer.json": "3"}),
                        ("nulls", {"tokenizer.json": "null"})):
        (folder / name).mkdir()
        kind = "T5Tokenizer" if name == "t5" else "LlamaTokenizer"
        for file, text in {"tokenizer_config.json": json.dumps({"tokenizer_class": kind}), **files}.items():
            (folder / name / file).write_text(text)
        path.write_text('{"text": "hello world"}\n')
        said = refused([str(path)], str(folder / name))
        check(f"a tokenizer's files, {name}", (said[:12], "vocabulary" in said or "can read" in said),
              ("--tokenizer ", True))
    path = folder / "\u00e9.jsonl"
    path.write_text('{"input_ids": [1, 2]}\n')
    ended = subprocess.run([sys.executable, "-B", "-m", "chunkflow.lengths", path], capture_output=True, text=True,
                           env={**os.environ, "PYTHONPATH": PACKAGE, "PYTHONIOENCODING": "ascii"})
    check("a name that the output's encoding has not", (ended.stderr, ended.stdout), ("", f"2 # {folder}/?.jsonl:1\n"))


def test_all(folder):
    tokenizer = make_tokenizer(folder / "tokenizer", TEMPLATE)
    rng = random.Random(5)
    drawn = [draw(rng) for _ in range(700)]
    wanted = [n for _, n in drawn]
    lines = [json.dumps(document) + "\n" for document, _ in drawn]
    path = folder / "a.jsonl"
    path.write_text("".join(lines))
    found = list(lengths_of([str(path)], tokenizer))
    check("JSON Lines", [n for n, _ in found], wanted)
    check("lines", [place for _, place in found], [f"{path}:{i + 1}" for i in range(700)])
    (folder / "a.jsonl.gz").write_bytes(gzip.compress("".join(lines[:300]).encode()))
    check("gz", [n for n, _ in lengths_of([str(folder / "a.jsonl.gz")], tokenizer)], wanted[:300])

    texts = [(d["text"], n) for d, n in drawn if "text" in d and "input_ids" not in d]
    talks = [(d["messages"], n) for d, n in drawn if d.get("messages") and not d["tools"]]
    for name, kind in (("text", texts), ("messages", talks)):
        table = folder / f"{name}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({name: [value for value, _ in kind]}), table, row_group_size=50)
        check(f"Parquet, {name}", list(lengths_of([str(table)], tokenizer)),
              [(n, f"{table}:{i + 1}") for i, (_, n) in enumerate(kind)])
    check("fields", [n for n, _ in lengths_of([str(folder / "text.parquet")], tokenizer, ("text", "text"))],
          [1 + len((value + value).split()) for value, _ in texts])

    (folder / "ids.jsonl").write_text('{"input_ids": [1, 2]}\n' * 9)
    whole = subprocess.run([sys.executable, "-B", "-m", "chunkflow.lengths", "--tokenizer", tokenizer, path],
                           capture_output=True, text=True, env={**os.environ, "PYTHONPATH": PACKAGE})
    check("printed", (whole.stderr, whole.stdout), ("", "".join(f"{n} # {place}\n" for n, place in found)))

    for where, said in (("/dev/full", "chunkflow.lengths: cannot write standard output: No space left on device\n"),
                        ("pipe", "")):
        at, to = (None, os.open(where, os.O_WRONLY)) if where != "pipe" else os.pipe()
        if at is not None:
            os.close(at)
        ended = subprocess.run([sys.executable, "-B", "-m", "chunkflow.lengths", folder / "ids.jsonl"], stdout=to,
                               stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": PACKAGE})
        os.close(to)
        check(f"printed to {where}", (ended.returncode, ended.stderr), (1, said))

    test_files(folder, tokenizer)
    plain = make_tokenizer(folder / "plain", None)
    bad = folder / "bad.jsonl"
    bad.write_text('{"messages": [{"role": "bad", "content": "x"}]}\n')
    check("a template refuses", refused([str(bad)], tokenizer),
          f"{bad}:1: the chat template does not take it: no such role")
    check("no template", refused([str(bad)], plain), f"{bad}:1: has messages, but the tokenizer has no chat template")
    check("no Parquet", ": no Parquet: " in refused([str(bad.rename(folder / "x.parquet"))]), True)
    check("no tokenizer", refused([str(path)], str(folder / "nosuch")),
          f"--tokenizer {folder}/nosuch: no folder, and no model that was downloaded")


with tempfile.TemporaryDirectory() as made:
    judge.run(test_all, pathlib.Path(made))
sys.exit(judge.finish())
