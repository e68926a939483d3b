"""Counts the tokens of a data set: python3 -m chunkflow.lengths --tokenizer FOLDER FILE... >lengths.txt

Files are JSON Lines (.jsonl, also .gz, or - for standard input) or Parquet. The output is the list that the command
`chunkflow` reads. Each line has the tokens of a document and, as a comment, its file and line (in Parquet its row, from
1).

A document is counted by the first of these that it has, or by the fields that --fields names, joined:

    input_ids               token ids, as many as there are
    messages                a conversation, as the tokenizer's chat template writes it; with the document's tools
    prompt, completion      texts or messages, one after the other
    text                    a text, with the special tokens that the tokenizer adds

The type of a field's value says what it is: numbers, messages (objects) or text. The tokenizer is a folder of
Transformers', such as a model's; token ids need none. A bad document is refused, with its line, and nothing is printed
then.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import zlib
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import islice
from typing import Any

FIELDS = (("input_ids",), ("messages",), ("prompt", "completion"), ("text",))
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json")
BATCH = 256  # documents that are tokenized at once


class Refused(Exception):
    """An error in a file or a document; its text begins with the place."""


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


def parquet_rows(path: str, used: set[str]) -> Iterator[tuple[str, Any]]:
    """Reads only the columns that are used."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise Refused(f"{path}: Parquet needs pyarrow (pip install pyarrow)") from None
    try:
        number, file = 0, pyarrow.parquet.ParquetFile(path)
        for batch in file.iter_batches(BATCH, columns=[x for x in file.schema_arrow.names if x in used]):
            for row in range(batch.num_rows):
                number += 1
                try:
                    yield f"{path}:{number}", batch.slice(row, 1).to_pylist()[0]
                except (ValueError, OverflowError) as error:  # texts that are no UTF-8 among them
                    raise Refused(f"{path}:{number}: a value that cannot be read: {error}") from None
    except pyarrow.lib.ArrowException as error:
        raise Refused(f"{path}: no Parquet: {error}") from None


def documents(paths: list[str], fields: tuple[str, ...] | None) -> Iterator[tuple[str, Any]]:
    """Each document with its place."""
    if paths.count("-") > 1:
        raise Refused("-: standard input can be read once")
    used = {"tools", *(fields or (name for names in FIELDS for name in names))}
    for path in paths:
        try:
            yield from parquet_rows(path, used) if path.endswith(".parquet") else json_lines(path)
        except (OSError, EOFError, zlib.error) as error:
            raise Refused(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def value_of(place: str, document: Any, fields: tuple[str, ...] | None) -> str | list[Any]:
    """Returns what is counted of a document: its text, its messages or its token ids."""
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
        # transformers would warn of every document longer than the model's context
        transformers.logging.set_verbosity_error()
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # its files may hold anything
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            if not isinstance(error, (OSError, ValueError)):
                why = f"its files are none that Transformers can read ({why})"
            why = why if os.path.isdir(folder) else "no folder, and no model that was downloaded"
            raise Refused(f"--tokenizer {folder}: {why}") from None
        if not self._has_vocabulary(folder):
            raise Refused(f"--tokenizer {folder}: there is no vocabulary in it, such as tokenizer.json")

    def _has_vocabulary(self, folder: str) -> bool:
        """Without its files, Transformers would make a tokenizer that knows almost no text."""
        names = self.tokenizer.vocab_files_names.values()
        if os.path.isdir(folder) and names and not any(
                name in names or fnmatch(name, "*.model") or fnmatch(name, "*.tiktoken") or name in VOCABULARIES
                for name in os.listdir(folder)):
            return False
        return bool(set(self.tokenizer.get_vocab()) - set(self.tokenizer.get_added_vocab()))

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
            text = value if plain else self.conversation(place, value, document.get("tools"))
            try:
                text.encode()
            except UnicodeEncodeError as error:
                half = f"\\u{ord(text[error.start]):x}"
                raise Refused(f"{place}: half a character ({half}) without its other half") from None
            texts[plain][0].append(i)
            texts[plain][1].append(text)
        for special, (places, values) in texts.items():
            for i, length in zip(places, self.tokens(values, special)):
                lengths[i] = length
        return lengths


def lengths_of(paths: list[str], tokenizer: str | None = None,
               fields: tuple[str, ...] | None = None) -> Iterator[tuple[int, str]]:
    """Yields the number of tokens of each document in these files, and its place."""
    for name, given, kind, wanted in (("paths", paths, (list, tuple), "a list of names of files"),
                                      ("tokenizer", tokenizer, (str, os.PathLike, type(None)), "a folder"),
                                      ("fields", fields, (list, tuple, type(None)), "names of fields")):
        if not isinstance(given, kind):
            raise TypeError(f"{name}: wanted {wanted}, got {given!r:.99}")
    for name, items in (("paths", paths), ("fields", fields or ())):
        if not all(isinstance(item, (str, os.PathLike)) for item in items):
            raise TypeError(f"{name}: wanted names, got {items!r:.99}")
    counter, found = Counter(tokenizer), documents(paths, fields)
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
        # writes characters of file names that the output's encoding lacks as "?"
        sys.stdout.reconfigure(errors="replace")
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
