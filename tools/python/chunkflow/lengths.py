"""What a data set is in tokens: python3 -m chunkflow.lengths --tokenizer FOLDER FILE... >lengths.txt

Files are JSON Lines (.jsonl, also .gz, or - for standard input) or Parquet. The output is the list that the command
`chunkflow` reads: a line for each document, its tokens and, as a comment, its file and line (of Parquet: row, from 1).

What is counted is the first of these that a document has, or the fields that --fields names, joined:

    input_ids               token ids, as many as there are
    messages                a conversation, as the tokenizer's chat template writes it; with the document's tools
    prompt, completion      texts or messages, one after the other
    text                    a text, with the special tokens that the tokenizer adds

So the fields' values say what they are: numbers, messages (objects) or text. The tokenizer is a folder of
Transformers', such as a model's; token ids need none. A bad document is refused by its line, and nothing is
printed then.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

FIELDS = (("input_ids",), ("messages",), ("prompt", "completion"), ("text",))
BATCH = 256  # documents that are tokenized at once


class Refused(Exception):
    """What is wrong with a file or a document; its text begins with the place."""


def json_lines(path: str) -> Iterator[tuple[str, Any]]:
    opened = sys.stdin.buffer if path == "-" else gzip.open(path) if path.endswith(".gz") else open(path, "rb")
    name = "standard input" if path == "-" else path
    with opened as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                yield f"{name}:{number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                raise Refused(f"{name}:{number}: no JSON of one document: {error}") from None


def parquet_rows(path: str) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise Refused(f"{path}: Parquet needs pyarrow (pip install pyarrow)") from None
    try:
        number = 0
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(BATCH):
            for document in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", document
    except pyarrow.lib.ArrowException as error:
        raise Refused(f"{path}: no Parquet: {error}") from None


def documents(paths: list[str]) -> Iterator[tuple[str, Any]]:
    """Each document with its place."""
    for path in paths:
        try:
            yield from parquet_rows(path) if path.endswith(".parquet") else json_lines(path)
        except (OSError, EOFError) as error:
            raise Refused(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def value_of(place: str, document: Any, fields: tuple[str, ...] | None) -> str | list[Any]:
    """What of a document is counted: its text, its messages or its token ids."""
    if not isinstance(document, dict):
        raise Refused(f"{place}: wanted an object with fields, got {type(document).__name__}")
    found = fields or next((f for f in FIELDS if all(document.get(name) is not None for name in f)), None)
    if found is None:
        usual = ", ".join(" + ".join(names) for names in FIELDS)
        raise Refused(f"{place}: has none of {usual}; --fields names others")
    values = [document.get(name) for name in found]
    kinds = {type(value) for value in values}
    if kinds != {str} and kinds != {list}:
        got = ", ".join(f"{name} is {type(value).__name__}" for name, value in zip(found, values))
        raise Refused(f"{place}: wanted text, messages or token ids, but {got}")
    value = "".join(values) if kinds == {str} else sum(values, [])
    if isinstance(value, list) and {type(item) for item in value} not in (set(), {int}, {dict}):
        raise Refused(f"{place}: wanted messages or token ids in {' + '.join(found)}")
    return value


class Counter:
    """Tokens of values, counted by a tokenizer of Transformers'."""

    def __init__(self, folder: str | None) -> None:
        self.tokenizer: Any = None
        if folder is None:
            return
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # such as that there is no PyTorch
        try:
            import transformers
        except ImportError:
            raise Refused("--tokenizer needs Transformers (pip install transformers jinja2)") from None
        transformers.logging.set_verbosity_error()  # that a document is longer than the model's context is no news here
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            why = str(error).splitlines()[0] if os.path.isdir(folder) else "no folder, and no model that was downloaded"
            raise Refused(f"--tokenizer {folder}: {why}") from None

    def conversation(self, place: str, messages: list[Any], tools: Any) -> str:
        if not self.tokenizer.chat_template:
            raise Refused(f"{place}: has messages, but the tokenizer has no chat template")
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        except Exception as error:  # a template may raise anything
            raise Refused(f"{place}: the chat template does not take it: {error}") from None

    def tokens(self, texts: list[str], special: bool) -> list[int]:
        return [len(ids) for ids in self.tokenizer(texts, add_special_tokens=special).input_ids] if texts else []

    def count(self, batch: list[tuple[str, Any]], fields: tuple[str, ...] | None) -> list[int]:
        lengths, texts = [0] * len(batch), {True: ([], []), False: ([], [])}
        for i, (place, document) in enumerate(batch):
            value = value_of(place, document, fields)
            if isinstance(value, list) and (not value or isinstance(value[0], int)):
                lengths[i] = len(value)
                continue
            if self.tokenizer is None:
                raise Refused(f"{place}: text is counted by a tokenizer: --tokenizer FOLDER")
            plain = isinstance(value, str)
            texts[plain][0].append(i)
            texts[plain][1].append(value if plain else self.conversation(place, value, document.get("tools")))
        for special, (places, values) in texts.items():
            for i, length in zip(places, self.tokens(values, special)):
                lengths[i] = length
        return lengths


def lengths_of(paths: list[str], tokenizer: str | None = None,
               fields: tuple[str, ...] | None = None) -> Iterator[tuple[int, str]]:
    """The tokens of each document of these files, and where it stands."""
    counter, found = Counter(tokenizer), documents(paths)
    while batch := list(islice(found, BATCH)):
        yield from zip(counter.count(batch, fields), (place for place, _ in batch))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python3 -m chunkflow.lengths", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", metavar="FOLDER", help="a tokenizer of Transformers'")
    parser.add_argument("--fields", metavar="NAME,...", help="what of a document is counted")
    parser.add_argument("files", metavar="FILE|-", nargs="+")
    asked = parser.parse_args(arguments)
    try:
        lines = [f"{length} # {place}" for length, place in
                 lengths_of(asked.files, asked.tokenizer, tuple(asked.fields.split(",")) if asked.fields else None)]
    except Refused as error:
        print(f"chunkflow.lengths: {error}", file=sys.stderr)
        return 2
    try:
        for line in lines:
            print("".join(c if c.isprintable() else "?" for c in line))
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes there when Python ends
        if not isinstance(error, BrokenPipeError):
            print(f"chunkflow.lengths: cannot write standard output: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
