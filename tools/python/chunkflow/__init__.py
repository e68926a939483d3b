"""chunkflow from Python: pack a batch, order its passes, time them, feed an attention kernel.

`pip install ./tools/python` builds the library and installs it inside this package. In a clone, `make shared` makes
build/libchunkflow.so and build/libchunkflow.h, and this package finds them: it looks in the folder that CHUNKFLOW_BUILD
names, beside itself, and in the clone's build/. This module needs cffi and NumPy, and nothing else.

chunkflow.torch trains a PyTorch module chunk by chunk, chunkflow.huggingface a model of Transformers, and
chunkflow.trainer is Transformers' Trainer with chunks.

    import chunkflow

    plan = chunkflow.pack([900, 14000, 350, 2600], chunk_size=4096)
    schedule = plan.schedule(k=2)                         # one stage; n_stages=4 for a pipeline
    for step in schedule.steps(0).steps:                  # with step["slot"], step["state"], step["seed"], ...
        chunk = int(step["action"]["chunk"])
        name = chunkflow.PASSES[step["action"]["pass"]]   # "F", "R", "B", ...
        metadata = plan.metadata(chunk)                   # metadata.cu_seqlens_q, metadata.cu_seqlens_k, ...
        labels = metadata.target_positions                # a row's label is that token of its sequence
    print(schedule.simulate().makespan)

The comments in chunkflow.h say what a member or an option means, at the struct that a class here is named after. Every
member is an attribute of the same name; options are keywords, named after the members of the description. Enumerations
are words ("best-fit", "paper"), and records are dictionaries. Arrays of the library are NumPy arrays on its own memory:
nothing is copied, and they cannot be written to. Each array keeps the plan, schedule or timeline alive that it belongs
to. Members, types and lengths of arrays come from the declarations, so this file cannot differ from them. `lib` and
`ffi` have everything else in the library, as cffi gives it.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

try:
    import cffi
    import numpy as np
except ImportError as missing:
    raise ImportError(f"chunkflow needs cffi and NumPy, and {missing.name} is not installed: "
                      "pip install cffi numpy") from None

if TYPE_CHECKING:
    from typing_extensions import Unpack

_Function = TypeVar("_Function", bound=Callable[..., Any])

__all__ = ["Error", "Metadata", "PASSES", "Plan", "Schedule", "Steps", "Timeline", "ffi", "lib", "loss_weights",
           "pack", "shared_prefixes_of_tokens"]


def _find() -> Path:
    here = Path(__file__).resolve().parent
    asked = os.environ.get("CHUNKFLOW_BUILD")
    folders = [Path(asked)] if asked else [here, here.parents[2] / "build"]
    for folder in folders:
        if (folder / "libchunkflow.so").exists() and (folder / "libchunkflow.h").exists():
            return folder
    raise ImportError(f"libchunkflow.so and libchunkflow.h are not in {' or '.join(map(str, folders))}: `make shared` "
                      "makes them in build/, and CHUNKFLOW_BUILD may name another folder")


def _array_lengths(declarations: str) -> dict[tuple[str, str], str]:
    """The lengths of the arrays that members point to. The comment behind such a member begins with the length:
    `(n_slices + 1)`."""
    lengths = {}
    for body, struct in re.findall(r"typedef struct \w+ \{(.*?)\n\} (\w+);", declarations, re.DOTALL):
        for names, length in re.findall(r"^ +[^*;(]*\*([\w, *]+); */\* \(([a-z_0-9 +]+)\)", body, re.MULTILINE):
            lengths.update({(struct, re.findall(r"\w+", name)[-1]): length for name in names.split(",")})
    return lengths


_folder = _find()
_declarations = (_folder / "libchunkflow.h").read_text(encoding="utf-8")
_LENGTHS = _array_lengths(_declarations)
ffi = cffi.FFI()
ffi.cdef(_declarations)
lib = ffi.dlopen(str(_folder / "libchunkflow.so"))


def _text(c: Any) -> str:
    return ffi.string(c).decode() if c else ""


PASSES: tuple[str, ...] = tuple(_text(lib.cf_pass_name(i)) for i in range(lib.CF_PASS_COUNT))
"""What the number in an action's "pass" stands for."""


class Error(Exception):
    """A call failed. The members are those of cf_error: `code` by name ("CF_ERROR_ARGUMENT"), `field` the argument or
    member at fault, `item` the index of the sequence, chunk or action (-1: none), `wanted`, `got`, `text`."""

    def __init__(self, text: str, code: str, field: str, item: int, wanted: int, got: int):
        super().__init__(text, code, field, item, wanted, got)
        self.text, self.code, self.field, self.item, self.wanted, self.got = text, code, field, item, wanted, got

    def __str__(self) -> str:
        return self.text


# ----------------------------------------------------------------------------------------------------------------------
# Calling the library
# ----------------------------------------------------------------------------------------------------------------------


_Given = list[Any]  # the objects that a description points to, which must live as long as the call


def _error(record: Any) -> Error:
    return Error(_text(record.text), _text(lib.cf_result_name(record.code)), _text(record.field), record.item,
                 record.wanted, record.got)


def _call(function: Any, *arguments: Any) -> None:
    record = ffi.new("cf_error *")
    if function(*arguments, record) != lib.CF_OK:
        raise _error(record)


def _refuse(field: str, wanted: int, got: int, why: str) -> None:
    """Raises the error that the library would report for a bad argument, if the library cannot see the fault."""
    name = ffi.new("char[]", field.encode())
    record = ffi.new("cf_error *")
    lib.cf_fail(record, lib.CF_ERROR_ARGUMENT, name, -1, wanted, got, why.encode())
    raise _error(record)


def _make(kind: str, function: Any, *arguments: Any) -> Any:
    """Returns a new object of the library, which is freed with the last reference to it."""
    out = ffi.new(f"cf_{kind} **")
    _call(function, *arguments, out)
    return ffi.gc(out[0], getattr(lib, f"cf_{kind}_free"))


def _whole(value: Any, what: str, least: int = -2**63, most: int = 2**63 - 1) -> int:
    """Returns a whole number; raises an error with the argument's name if it is none, or too large for the library."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what}: wanted a whole number, got {value!r:.99}") from None
    if not least <= number <= most:
        kind = ValueError if -2**63 <= number < 2**64 else OverflowError
        raise kind(f"{what}: got {number}, wanted {least} .. {most}")
    return number


def _flag(value: Any, what: str) -> int:
    """Returns 0 or 1 for a bool or one of these numbers; refuses anything else."""
    if not isinstance(value, (bool, np.bool_, int, np.integer)) or value not in (0, 1):
        raise TypeError(f"{what}: wanted True or False, got {value!r:.99}")
    return int(value)


def _callable(value: Any, what: str) -> Any:
    if not callable(value):
        raise TypeError(f"{what}: wanted a function, got {value!r:.99}")
    return value


def _at(value: Any, n: int, what: str) -> int:
    """Returns a whole number from 0 to n - 1; refuses any other."""
    if not 0 <= _whole(value, what) < n:
        raise IndexError(f"{what}: got {value}, wanted 0 .. {n - 1}")
    return _whole(value, what)


def _each(values: Any, what: str, wanted: str) -> list[Any]:
    """Returns the items of a sequence. wanted: says in an error what the items should be."""
    try:
        if isinstance(values, (str, bytes, Mapping)):
            raise TypeError
        return list(values)
    except TypeError:
        raise TypeError(f"{what}: wanted {wanted}, got {values!r:.99}") from None


def _numbers(values: Any, what: str) -> np.ndarray:
    """Returns values as an array of any shape."""
    try:
        return np.asarray(values)
    except (TypeError, ValueError):
        raise TypeError(f"{what}: wanted numbers, got {values!r:.99}") from None


def _reals(values: Any, what: str) -> list[float]:
    """One row of numbers."""
    array = _numbers(values, what)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise TypeError(f"{what}: wanted one row of numbers, got shape {array.shape} of {array.dtype}")
    return [float(x) for x in array]


def _integers(values: Any, what: str) -> np.ndarray:
    """Returns one row of whole numbers, as the library reads them."""
    array = _numbers(values, what)
    if array.size == 0 and array.ndim == 1:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"{what}: wanted one row of whole numbers, got shape {array.shape} of {array.dtype}")
    if array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise OverflowError(f"{what}: {int(array.max())} does not fit in 64 bits with a sign")
    return np.ascontiguousarray(array, dtype=np.int64)


# ----------------------------------------------------------------------------------------------------------------------
# Options: keywords and dictionaries into the members of a description
# ----------------------------------------------------------------------------------------------------------------------


# Members, arguments and methods that had another name before 0.1.0.
_RENAMED = {"gang": "max_cp", "gang_seconds": "cp_row_seconds", "gangs": "cp_groups", "budget": "max_tries",
            "share": "min_shared_prefix", "share_least": "min_shared_prefix", "shares": "shared_prefixes",
            "once": "shared_mean", "n_steps": "chunks_per_rank", "groups": "chains", "n_groups": "n_chains",
            "columns": "lockstep_plan", "schedule_of": "lockstep_schedule", "validate_ranks": "lockstep_validate",
            "pieces_of": "kv_sources_of", "of_columns": "lockstep", "levels": "calls", "n_more": "n_extra",
            "more_rows": "extra_rows", "more_sequences": "extra_sequences", "more_targets": "extra_targets",
            "more_weights": "extra_weights", "shares_of_tokens": "shared_prefixes_of_tokens"}


def _now(name: str) -> str:
    return f": it is {_RENAMED[name]} now" if name in _RENAMED else ""


def _renamed(function: _Function) -> _Function:
    """Makes a function refuse arguments by their old names; the error has the new ones."""
    @functools.wraps(function)
    def checked(*given: Any, **named: Any) -> Any:
        for name in named:
            if name in _RENAMED:
                raise TypeError(f"{function.__qualname__}: there is no argument '{name}'{_now(name)}")
        return function(*given, **named)
    return checked  # type: ignore[return-value]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"chunkflow has no '{name}'{_now(name)}")


@functools.lru_cache(maxsize=None)
def _fields(struct: str) -> dict[str, Any]:
    return {name: field.type for name, field in ffi.typeof(struct).fields}


@functools.lru_cache(maxsize=None)
def _members(struct: str) -> dict[str, Any]:
    """Returns the fields of a struct, and those of the cf_shape that it contains, if any."""
    fields = _fields(struct)
    return {**(_fields("cf_shape") if "shape" in fields else {}), **fields}


@functools.lru_cache(maxsize=None)
def _words(enum: str) -> tuple[str, ...]:
    """Returns the words of an enumeration, by number; its default has no word. If the library has no function for them,
    words come from its constants: CF_MEAN_TOKENS is "tokens"."""
    numbers, name_of = ffi.typeof(enum).elements, getattr(lib, f"{enum}_name", None)
    if name_of is not None:
        return tuple(_text(name_of(number)) for number in range(len(numbers) - 1))
    return ("?", *(numbers[i].removeprefix(f"{enum}_".upper()).lower().replace("_", "-")
                   for i in range(1, len(numbers) - 1)))


def _number_of(enum: str, word: str, member: str) -> int:
    words = _words(enum)
    if not isinstance(word, str) or word not in words or word == "?":
        raise ValueError(f"{member}: got '{word}', wanted one of {', '.join(words[1:])}")
    return words.index(word)


def _count(length: str, number: Callable[[str], int]) -> int:
    """Returns the value of "n_slices + 1" or "n_stages x n_virtual"; `number` gives the value of a name. -1: a factor
    is negative, which the library refuses, by name, before it reads the array."""
    def term(text: str) -> int:
        return int(text) if text.isdigit() else number(text)
    factors = [sum(term(part) for part in factor.split(" + ")) for factor in length.split(" x ")]
    return math.prod(factors) if min(factors) >= 0 else -1


def _member(c: Any, name: str) -> Any:
    """Returns a member of a record, or of the shape in it."""
    return getattr(c if hasattr(c, name) else c.shape, name)


def _mask(values: Any, sequence: int) -> np.ndarray:
    """Returns which tokens of a sequence are no targets, as a mask. Refuses numbers, because labels and masks of
    targets have the opposite meaning."""
    mask = _numbers(values, "ignored")
    if mask.dtype.kind == "O" and {*map(type, mask.flat)} <= {bool, np.bool_}:
        mask = mask.astype(np.bool_)
    if mask.dtype.kind != "b" and mask.size > 0:
        raise TypeError(f"ignored: wanted True or False for each token of sequence {sequence}, True where it is no "
                        f"target, got {values!r:.99}; of labels take labels == -100, of a mask of targets mask == 0")
    return np.ascontiguousarray(mask, dtype=np.bool_)


def _masks(ignored: Sequence[Any] | None, lengths: np.ndarray, given: _Given) -> Any:
    """Returns, for each sequence, a byte for each of its tokens: 1 if it is no target. None for a sequence: all its
    tokens are targets."""
    if ignored is None:
        return ffi.NULL
    ignored = _each(ignored, "ignored", f"None or a mask for each of {len(lengths)} sequences")
    if len(ignored) != len(lengths):
        _refuse("ignored", len(lengths), len(ignored), "has not one mask for each sequence")
    masks = ffi.new("unsigned char *[]", len(lengths))
    for sequence, values in enumerate(ignored):
        if values is None:
            continue
        mask = _mask(values, sequence).view(np.uint8)
        if mask.shape != (lengths[sequence],):
            _refuse("ignored", int(lengths[sequence]), mask.size,
                    f"has not an entry for each token of sequence {sequence}")
        masks[sequence] = ffi.from_buffer("unsigned char[]", mask)
        given.append(mask)
    given.append(masks)
    return masks


def _pointed(struct: str, member: str, value: Any, given: _Given, number: Callable[[str], int], what: str) -> Any:
    """Returns the array to which a member of a description that is a pointer must point."""
    ctype = _fields(struct)[member]
    length = _LENGTHS.get((struct, member))
    if ctype.kind == "function" or member in ("allocator", "report") or (
            ctype.item.kind != "struct" and length is None):
        raise TypeError(f"{struct}.{member} cannot be given from Python")
    elif length is None:
        made = ffi.new(ctype)
        _fill(made, value, given, number, what)
    else:
        if ctype.item.cname == "double":
            value = _reals(value, what)
        elif ctype.item.kind != "struct":
            value = _integers(value, what)
        else:
            value = _each(value, what, f"a list of {ctype.item.cname.replace('const ', '')}")
        wanted = _count(length, number)
        if wanted >= 0 and len(value) != wanted:
            _refuse(what, wanted, len(value), f"has not ({length}) items")
        made = ffi.new(f"{ctype.item.cname.replace('const ', '')}[]", len(value))
        for i, item in enumerate(value):
            if isinstance(item, Mapping):
                _fill(made + i, item, given, number, f"{what}[{i}]")
            else:
                _set(made, i, item, what)
    given.append(made)
    return made


_POINTERS = ("pointer", "function")


def _fill(c: Any, options: Mapping[str, Any], given: _Given, number: Callable[[str], int], what: str) -> None:
    """Sets the members of a record, and of the shape in it. what: the name of the record in errors."""
    struct = ffi.typeof(c).item.cname
    fields = _fields(struct)
    if not isinstance(options, Mapping):
        raise TypeError(f"{what}: wanted a dictionary of members of {struct}, got {options!r:.99}")
    for name in options:
        if name not in _members(struct):
            raise TypeError(f"{what}: {struct} has no member '{name}'{_now(name)}; "
                            f"it has {', '.join(_members(struct))}")
    rest = {name: value for name, value in options.items() if name in fields}
    if len(rest) < len(options):
        of_shape = {name: value for name, value in options.items() if name not in rest}
        _fill(ffi.addressof(c[0], "shape"), of_shape, given, number, what)
    # Numbers first: they say how long arrays are.
    for name, value in sorted(rest.items(), key=lambda item: fields[item[0]].kind in ("struct", *_POINTERS)):
        ctype, at = fields[name], name if what == "options" else f"{what}.{name}"
        if value is None:
            continue
        if ctype.kind in _POINTERS:
            setattr(c, name, _pointed(struct, name, value, given, number, at))
        elif ctype.kind == "struct" and isinstance(value, Mapping):
            _fill(ffi.addressof(c[0], name), value, given, number, at)
        else:
            named = ctype.kind == "enum" and isinstance(value, str)
            _set(c, name, _number_of(ctype.cname, value, at) if named else value, at)


def _range(c: Any, at: str | int) -> str:
    """Returns the range of whole numbers that a member of a record, or an item of an array, can have; empty for other
    types."""
    ctype = _fields(ffi.typeof(c).item.cname)[at] if isinstance(at, str) else ffi.typeof(c).item
    if ctype.kind == "enum":
        return f"wanted 0 .. {max(n for n, word in ctype.elements.items() if not word.endswith('_COUNT'))}"
    if ctype.kind != "primitive" or ctype.cname in ("double", "float"):
        return ""
    bits, signed = 8 * ffi.sizeof(ctype), not ctype.cname.startswith("u")
    return f"wanted {-2**(bits - 1) if signed else 0} .. {2**(bits - signed) - 1}"


def _set(c: Any, at: str | int, value: Any, name: str) -> None:
    """Sets a member of a record, or an item of an array. The members of a record may also be given in order."""
    try:
        if isinstance(at, str):
            setattr(c, at, value)
        else:
            c[at] = value
    except OverflowError as why:
        raise OverflowError(f"{name}: {_range(c, at) or why}, got {value!r:.99}") from None
    except (IndexError, KeyError, TypeError) as why:
        raise TypeError(f"{name}: {why}, got {value!r}") from None


def _describe(struct: str, options: Mapping[str, Any], number: Callable[[str], int] | None = None,
              what: str = "options") -> tuple[Any, _Given]:
    """Returns a description with these options, and the objects that must live as long as it. `number` gives the sizes
    that the description itself does not have. what: the name of the argument that has the options."""
    c, given = ffi.new(f"{struct} *"), _Given()
    if number is None:
        defaults = getattr(lib, struct.replace("_desc", "_defaults"))
        _fill(c, options, given, lambda name: int(_member(defaults(c), name)), what)
    else:
        _fill(c, options, given, number, what)
    return c, given


# ----------------------------------------------------------------------------------------------------------------------
# Results: members as attributes
# ----------------------------------------------------------------------------------------------------------------------


class _Memory:
    """A piece of the library's memory, for NumPy, and the object that owns it and must live as long."""

    def __init__(self, address: int, n_bytes: int, writable: bool, keep: Any):
        self.keep = keep
        self.__array_interface__ = {"data": (address, not writable), "shape": (n_bytes,), "typestr": "|u1",
                                    "version": 3}


@functools.lru_cache(maxsize=None)
def _dtype(ctype: Any) -> np.dtype:
    if ctype.kind == "struct":
        fields = ctype.fields
        return np.dtype({"names": [name for name, _ in fields], "formats": [_dtype(field.type) for _, field in fields],
                         "offsets": [field.offset for _, field in fields], "itemsize": ffi.sizeof(ctype)})
    letter = "f" if ctype.cname in ("double", "float") else "u" if ctype.cname.startswith("u") else "i"
    return np.dtype(f"{letter}{ffi.sizeof(ctype)}")


class _Object:
    """A struct of the library. `c` is the pointer to it, for calls through `lib`; `keep` keeps alive what the struct
    points into."""

    _struct: str
    _writable = False

    def __init__(self, c: Any, keep: Any = None):
        self.c = c
        self._keep = keep

    def __getattr__(self, name: str) -> Any:
        fields = _fields(self._struct)
        if name not in fields and name in _members(self._struct):
            return getattr(self.shape, name)
        if name not in fields:
            raise AttributeError(f"{self._struct} has no member '{name}'{_now(name)}")
        value, ctype = getattr(self.c, name), fields[name]
        if ctype.kind == "primitive":
            return value
        if ctype.cname in ("cf_shape", "cf_limits", "cf_held_bytes"):
            return _Record(ctype.cname, ffi.addressof(self.c[0], name), self)
        if ctype.kind == "enum":
            return _words(ctype.cname)[int(ffi.cast("int", value))]
        if ctype.kind != "pointer" or (self._struct, name) not in _LENGTHS:
            raise AttributeError(f"{self._struct}.{name} has no form in Python: see .c.{name}")
        self.__dict__[name] = array = self._array(name, value, ctype.item)
        return array

    def _array(self, name: str, pointer: Any, item: Any) -> np.ndarray | None:
        if not pointer:
            return None
        n_bytes = _count(_LENGTHS[self._struct, name], self._size) * ffi.sizeof(item)
        memory = _Memory(int(ffi.cast("uintptr_t", pointer)), n_bytes, self._writable, (self.c, self._keep))
        return np.asarray(memory).view(_dtype(item))

    def _size(self, name: str) -> int:
        """Returns a member that is the length of an array, by its name."""
        return int(_member(self.c, name))

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_members(self._struct)]

    def __repr__(self) -> str:
        numbers = (name for name, ctype in _members(self._struct).items() if ctype.kind in ("primitive", "enum"))
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in numbers)})"


def _pointer(given: Any, cls: type[_Object], what: str) -> Any:
    """Returns the pointer to the library's object inside an object of this module."""
    if not isinstance(given, cls):
        raise TypeError(f"{what}: wanted a {cls.__name__}, got {type(given).__name__}")
    return given.c


class _Record(_Object):
    """A record inside an object, which says how long the record's arrays are."""

    def __init__(self, struct: str, c: Any, owner: _Object):
        super().__init__(c, owner)
        self._struct = struct

    def _size(self, name: str) -> int:
        return self._keep._size(name)


def _json(function: Any, *arguments: Any) -> str:
    pieces: list[bytes] = []

    def write(text: Any, n_bytes: int, user: Any) -> int:
        pieces.append(ffi.buffer(text, n_bytes)[:])
        return 0
    _call(function, *arguments, ffi.callback("cf_write_fn", write, error=1), ffi.NULL)
    return b"".join(pieces).decode()


class Metadata(_Object):
    """cf_metadata of one chunk, in its own memory. The arrays may be written to, and torch.from_numpy takes them as
    they are."""

    _struct = "cf_metadata"
    _writable = True
    chunk: int
    tokens: int
    rows: int
    prefix: int
    pairs: int
    n_seqs: int
    max_seqlen_q: int
    max_seqlen_k: int
    cu_seqlens_q: np.ndarray
    cu_seqlens_k: np.ndarray
    sequence_ids: np.ndarray
    position_ids: np.ndarray
    target_positions: np.ndarray
    loss_weights: np.ndarray | None
    n_extra: int
    extra_rows: np.ndarray | None
    extra_sequences: np.ndarray | None
    extra_targets: np.ndarray | None
    extra_weights: np.ndarray | None
    loss_rows: np.ndarray | None
    key_ends: np.ndarray | None


    @property
    def calls(self) -> list[AttentionCall]:
        """Returns the further calls of attention if sequences share rows (cf_attention_call). Without any, cu_seqlens
        is all that attention needs."""
        return [AttentionCall(ffi.addressof(self.c.calls, i), self) for i in range(self.c.n_calls)]


class AttentionCall(_Object):
    """cf_attention_call: a call of attention without a mask, with keys in one place."""

    _struct = "cf_attention_call"
    _writable = True
    chain: int
    first: int
    n_seqs: int
    max_seqlen_q: int
    max_seqlen_k: int
    cu_seqlens_q: np.ndarray
    cu_seqlens_k: np.ndarray


class Timeline(_Object):
    """cf_timeline: when each action of a schedule runs, and what each stage holds meanwhile."""

    _struct = "cf_timeline"
    n_actions: int
    n_stages: int
    makespan: float
    busy: float
    replayed: float
    bubble_useful: float
    bubble_busy: float
    stream_waits: int
    stream_seconds: float
    bound: float
    start: np.ndarray
    end: np.ndarray
    live: np.ndarray
    peak_live: np.ndarray
    peak_tokens: np.ndarray
    peak_state_tokens: np.ndarray
    peak_bytes: np.ndarray

    @property
    def bounds(self) -> dict[str, float]:
        """The lower bounds by name."""
        return {_text(self.c.bounds[i].name): self.c.bounds[i].value for i in range(self.c.n_bounds)}


class Steps(_Object):
    """cf_steps: what one stage does, step by step. `steps` and `paths` are arrays of records."""

    _struct = "cf_steps"
    stage: int
    transfers: int
    n: int
    n_paths: int
    n_slots: int
    n_states: int
    n_boundaries: int
    n_outputs: int
    peak_dropped_tokens: int
    peak_tokens: int
    peak_state_tokens: int
    steps: np.ndarray
    paths: np.ndarray


class Schedule(_Object):
    """cf_schedule: the order in which each stage runs its passes. `plan` is the plan from which it was made.
    `schedule.k` and the other members of its cf_shape can be read directly; `limits` is a cf_limits."""

    _struct = "cf_schedule"
    kind: str
    n_stages: int
    n_virtual: int
    placement: str
    replay: str
    k: int
    rank: int
    n_chunks: int
    n_actions: int
    lowered: int
    lockstep: int
    first: np.ndarray
    actions: np.ndarray

    def __init__(self, c: Any, plan: Plan, report: dict[str, Any] | None = None):
        super().__init__(c)
        self.plan = plan
        self.report = report
        """What the search tried, and the makespan (cf_search_report); None if `schedule` did not make this object."""

    def stage(self, stage: int) -> np.ndarray:
        """The actions of one stage, in order: records with "pass" (see PASSES), "chunk", "stage" and "keep"."""
        stage = _at(stage, self.n_stages, "stage")
        return self.actions[self.first[stage]:self.first[stage + 1]]

    def simulate(self, **options: Unpack[SimulateOptions]) -> Timeline:
        """cf_simulate; the options are the members of cf_simulate_desc."""
        desc, _given = _describe("cf_simulate_desc", options, self._size)
        return Timeline(_make("timeline", lib.cf_simulate, self.plan.c, self.c, desc))

    def lower(self, **options: Unpack[LowerOptions]) -> Schedule:
        """cf_schedule_lower: the same schedule with its transfers. The options are the members of cf_lower_desc."""
        desc, _given = _describe("cf_lower_desc", options, self._size)
        return Schedule(_make("schedule", lib.cf_schedule_lower, self.plan.c, self.c, desc), self.plan,
                        self.report)

    def steps(self, stage: int = 0, seed: int = 0) -> Steps:
        """cf_steps_make: the steps of a trainer on a stage, with slots, states, seeds and flags."""
        return Steps(_make("steps", lib.cf_steps_make, self.plan.c, self.c, _whole(stage, "stage"),
                           _whole(seed, "seed", 0, 2**64 - 1), ffi.NULL))

    def capacity(self, stage: int = 0, so_far: Mapping[str, int] | None = None) -> dict[str, int]:
        """cf_steps_capacity: how large a trainer's buffers must be, for this batch and those before (`so_far`)."""
        return _capacity(self.plan.c, self.steps(stage).c, so_far)

    def validate(self, **options: Unpack[ValidateOptions]) -> None:
        """cf_schedule_validate: raises Error unless the schedule is sound. The options are the members of
        cf_validate_desc."""
        desc, _given = _describe("cf_validate_desc", options, self._size)
        _call(lib.cf_schedule_validate, self.plan.c, self.c, desc, ffi.NULL)

    def json(self, timeline: Timeline | None = None) -> str:
        """cf_write_schedule_json, with the times of a timeline if one is given."""
        return _json(lib.cf_write_schedule_json, self.c,
                     ffi.NULL if timeline is None else _pointer(timeline, Timeline, "timeline"))


def _capacity(plan: Any, steps: Any, so_far: Mapping[str, int] | None) -> dict[str, int]:
    capacity, _given = _describe("cf_capacity", {} if so_far is None else so_far, int, "so_far")
    _call(lib.cf_steps_capacity, plan, steps, capacity)
    return {name: getattr(capacity, name) for name in _fields("cf_capacity")}


class Plan(_Object):
    """cf_plan: a packed batch. `chunks`, `slices` and `chains` are arrays of records: plan.chunks["tokens"]. If
    sequences share rows there are also `order`, `common` and `lengths`; otherwise they are None."""

    _struct = "cf_plan"
    chunk_size: int
    align: int
    max_slices: int
    method: str
    split: str
    n_sequences: int
    n_empty: int
    n_tokens: int
    n_ranks: int
    chunks_per_rank: int
    n_chunks: int
    n_idle: int
    n_chains: int
    n_slices: int
    lower_bound: int
    chunks: np.ndarray
    slices: np.ndarray
    chains: np.ndarray
    order: np.ndarray | None
    common: np.ndarray | None
    lengths: np.ndarray | None
    _packed = None

    def __reduce__(self) -> Any:
        """Pickles the arguments of pack: on any machine, the same arguments make the same plan."""
        if self._packed is None:
            raise TypeError("only a plan that pack made can be pickled")
        return _pack_again, self._packed

    def sequences_of(self, slice: int) -> np.ndarray:
        """Returns the sequences that run through a slice. A loss of the slice's rows belongs to these sequences."""
        slice = _at(slice, self.n_slices, "slice")
        if self.order is None:
            return self.slices["sequence"][slice:slice + 1]
        first = self.slices["first"][slice]
        return self.order[first:first + self.slices["n"][slice]]

    def chain_above(self, chain: int) -> int:
        """Returns the chain of a tree that this chain continues; -1: none."""
        up = int(self.chunks["up"][self.chains["first_chunk"][_at(chain, self.n_chains, "chain")]])
        return int(self.chunks["chain"][up]) if up >= 0 else -1

    def row_of(self, sequence: int, position: int) -> tuple[int, int]:
        """Returns the chunk that has a token of a sequence, and the row in it."""
        sequence, position = _at(sequence, self.n_sequences, "sequence"), _whole(position, "position")
        slices = self.slices
        has = (slices["begin"] <= position) & (position < slices["begin"] + slices["length"])
        if self.order is None:
            has &= slices["sequence"] == sequence
        else:
            place = int(np.flatnonzero(self.order == sequence)[0])
            has &= (slices["first"] <= place) & (place < slices["first"] + slices["n"])
        found = np.flatnonzero(has)
        if not found.size:
            raise IndexError(f"position: there is no token {position} of sequence {sequence}")
        chunk = int(np.searchsorted(self.chunks["first_slice"], found[0], side="right")) - 1
        while self.chunks["n_slices"][chunk] == 0:
            chunk -= 1
        return chunk, int(slices["offset"][found[0]]) + position - int(slices["begin"][found[0]])

    def kv_sources_of(self, chunk: int) -> np.ndarray:
        """cf_kv_sources: where the rows before this chunk of a cp group are. Empty for a chunk outside cp groups."""
        chunk = _at(chunk, self.n_chunks, "chunk")
        pieces = ffi.new("cf_kv_source[]", lib.cf_kv_sources(self.c, chunk, ffi.NULL))
        lib.cf_kv_sources(self.c, chunk, pieces)
        return np.frombuffer(ffi.buffer(pieces), _dtype(ffi.typeof("cf_kv_source")))

    def slices_of(self, chunk: int) -> np.ndarray:
        """The slices of one chunk."""
        chunk = _at(chunk, self.n_chunks, "chunk")
        first = self.chunks["first_slice"][chunk]
        return self.slices[first:first + self.chunks["n_slices"][chunk]]

    @_renamed
    def metadata(self, chunk: int, capacity: Mapping[str, int] | None = None, ignored: Sequence[Any] | None = None,
                 weights: Any = None, shifted: bool = False, shared_mean: bool = False, wants_loss_rows: bool = False,
                 wants_key_ends: bool = False) -> Metadata:
        """cf_metadata_fill: what a chunk's kernels and its loss need. The options are the members of cf_metadata_desc;
        `ignored` has a mask for each sequence (or None in its place)."""
        flags = {"shifted": shifted, "shared_mean": shared_mean, "wants_loss_rows": wants_loss_rows,
                 "wants_key_ends": wants_key_ends}
        chunk = _whole(chunk, "chunk")
        desc, given = _describe("cf_metadata_desc", {"capacity": capacity, "weights": weights,
                                                     **{name: _flag(value, name) for name, value in flags.items()}},
                                lambda name: int(getattr(self.c, name)))
        if ignored is not None and self.lengths is not None:
            desc.ignored = _masks(ignored, self.lengths, given)
        elif ignored is not None:
            lengths = np.zeros(self.n_sequences, np.int64)
            np.maximum.at(lengths, self.slices["sequence"], self.slices["begin"] + self.slices["length"])
            desc.ignored = _masks(ignored, lengths, given)
        n_bytes = ffi.new("size_t *")
        _call(lib.cf_metadata_size, self.c, chunk, desc, n_bytes)
        memory, out = np.zeros(n_bytes[0], np.uint8), ffi.new("cf_metadata *")
        _call(lib.cf_metadata_fill, self.c, chunk, desc, ffi.from_buffer(memory), memory.nbytes, out)
        return Metadata(out, memory)

    def capacity(self, so_far: Mapping[str, int] | None = None) -> dict[str, int]:
        """cf_steps_capacity without steps: the rows, prefix and n_seqs that metadata of every chunk fits into."""
        return _capacity(self.c, ffi.NULL, so_far)

    def stats(self) -> dict[str, float]:
        """cf_plan_measure, with the default weights."""
        stats = ffi.new("cf_plan_stats *")
        lib.cf_plan_measure(self.c, ffi.NULL, stats)
        return {name: getattr(stats, name) for name in _fields("cf_plan_stats")}

    def schedule(self, **options: Unpack[ScheduleOptions]) -> Schedule:
        """cf_schedule_make; the options are the members of cf_schedule_desc, and those of its shape."""
        desc, _given = _describe("cf_schedule_desc", options)
        report = Report(ffi.new("cf_search_report *"))
        desc.report = report.c
        made = _make("schedule", lib.cf_schedule_make, self.c, desc)
        return Schedule(made, self, {name: getattr(report, name) for name in _fields(report._struct)})

    def lockstep_plan(self, cost: PassCost | None = None) -> Plan:
        """cf_lockstep_plan: a plan of one rank, whose schedule all ranks run in step (see lockstep_schedule)."""
        given, _given = _describe("cf_pass_cost", {} if cost is None else cost, int, "cost")
        return Plan(_make("plan", lib.cf_lockstep_plan, self.c, given, ffi.NULL))

    def lockstep_schedule(self, columns: Schedule, rank: int) -> Schedule:
        """cf_lockstep_schedule: a rank's schedule, made from a schedule of this plan's columns. That one must already
        be lowered."""
        return Schedule(_make("schedule", lib.cf_lockstep_schedule, self.c,
                              _pointer(columns, Schedule, "columns"), _whole(rank, "rank"), ffi.NULL), self)

    def lockstep_validate(self, schedules: Sequence[Schedule]) -> None:
        """cf_lockstep_validate: raises Error unless these schedules, one for each rank, are sound and in step."""
        schedules = _each(schedules, "schedules", f"a schedule for each of {self.n_ranks} ranks")
        if len(schedules) != self.n_ranks:
            _refuse("schedules", self.n_ranks, len(schedules), "has not one for each rank")
        pointers = ffi.new("cf_schedule *[]", [_pointer(x, Schedule, "schedules") for x in schedules])
        _call(lib.cf_lockstep_validate, self.c, ffi.cast("const cf_schedule *const *", pointers), ffi.NULL, ffi.NULL)

    def validate(self, lengths: Any) -> None:
        """cf_plan_validate: raises Error unless this is a sound plan of these lengths."""
        numbers = _integers(lengths, "lengths")
        _call(lib.cf_plan_validate, self.c, ffi.from_buffer("int64_t[]", numbers), numbers.size, ffi.NULL)

    def json(self, metadata: bool = False) -> str:
        """cf_write_plan_json, with metadata: also cu_seqlens, positions and targets of every chunk."""
        desc = ffi.new("cf_write_desc *", {"metadata": _flag(metadata, "metadata")})
        return _json(lib.cf_write_plan_json, self.c, desc)


class Report(_Object):
    """cf_search_report."""

    _struct = "cf_search_report"


def _pairs(shared_prefixes: Any, n: int) -> np.ndarray:
    wanted = f"for each of {n} sequences a pair of whole numbers: another one, and how many tokens both begin with"
    try:
        pairs = np.asarray(shared_prefixes)
    except (TypeError, ValueError):
        raise TypeError(f"shared_prefixes: wanted {wanted}, got {shared_prefixes!r:.99}") from None
    if pairs.dtype.kind not in "iu" or pairs.shape != (n, 2):
        raise TypeError(f"shared_prefixes: wanted {wanted}, got shape {pairs.shape} of {pairs.dtype}")
    return np.ascontiguousarray(pairs, dtype=np.int64)


def shared_prefixes_of_tokens(sequences: Sequence[Any]) -> np.ndarray:
    """cf_shared_prefixes_find: for each of these arrays of token ids, finds another array that begins alike, and the
    number of equal tokens. The result is pack's `shared_prefixes`. Equal tokens with different images are not the same:
    give them different ids."""
    arrays = [_integers(tokens, f"sequences[{i}]")
              for i, tokens in enumerate(_each(sequences, "sequences", "the token ids of each sequence"))]
    lengths = np.array([array.size for array in arrays], np.int64)
    tokens = ffi.new("void *[]", [ffi.cast("void *", array.ctypes.data) for array in arrays])
    pairs = np.zeros((len(arrays), 2), np.int64)
    _call(lib.cf_shared_prefixes_find, tokens, 8, ffi.from_buffer("int64_t[]", lengths), len(arrays),
          ffi.from_buffer("cf_shared_prefix[]", pairs), ffi.NULL)
    return pairs


@_renamed
def pack(lengths: Sequence[int] | np.ndarray, chunk_size: int, shared_prefixes: Any = None,
         **options: Unpack[PackOptions]) -> Plan:
    """cf_pack: packs sequences with these lengths, in tokens, into chunks of at most chunk_size tokens. The other
    options are the members of cf_pack_desc. shared_prefixes has for each sequence the number of another one, and how
    many first tokens both share; shared tokens are computed once."""
    numbers = _integers(lengths, "lengths")
    desc, given = _describe("cf_pack_desc", {"chunk_size": chunk_size, **options})
    if shared_prefixes is not None:
        pairs = _pairs(shared_prefixes, numbers.size)
        given.append(pairs)
        desc.shared_prefixes = ffi.from_buffer("cf_shared_prefix[]", pairs)
    plan = Plan(_make("plan", lib.cf_pack, ffi.from_buffer("int64_t[]", numbers), numbers.size, desc))
    plan._packed = numbers, chunk_size, shared_prefixes, options
    return plan


def _pack_again(lengths: Any, chunk_size: int, shared_prefixes: Any, options: Any) -> Plan:
    return pack(lengths, chunk_size, shared_prefixes, **options)


def loss_weights(lengths: Sequence[int] | np.ndarray, mean: str = "tokens", ignored: Sequence[Any] | None = None,
                 prompts: Sequence[int] | np.ndarray | None = None, shifted: bool = False) -> np.ndarray:
    """cf_loss_weights: the weight of the targets of each sequence, for Plan.metadata. Give the lengths of all ranks."""
    numbers = _integers(lengths, "lengths")
    given, desc = _Given(), ffi.new("cf_loss_weights_desc *")
    desc.mean, desc.shifted = _number_of("cf_mean", mean, "mean"), _flag(shifted, "shifted")
    desc.ignored = _masks(ignored, numbers, given)
    if prompts is not None:
        of = _integers(prompts, "prompts")
        if of.size != numbers.size:
            _refuse("prompts", numbers.size, of.size, "has not one number for each sequence")
        desc.prompts = ffi.from_buffer("int64_t[]", of)
    weights = np.zeros(numbers.size, np.float64)
    _call(lib.cf_loss_weights, ffi.from_buffer("int64_t[]", numbers), numbers.size, desc,
          ffi.from_buffer("double[]", weights))
    return weights


# ----------------------------------------------------------------------------------------------------------------------
# The options by name, for editors and type checkers; tests compare them with the declarations
# ----------------------------------------------------------------------------------------------------------------------


class PassCost(TypedDict, total=False):
    """cf_pass_cost"""
    constant: float
    per_token: float
    per_pair: float


class StageCost(TypedDict, total=False):
    """cf_stage_cost"""
    forward: PassCost
    replay: PassCost
    backward: PassCost
    input: PassCost
    weight: PassCost


class Timing(TypedDict, total=False):
    """cf_timing"""
    all: StageCost
    stages: Sequence[StageCost]
    latency: float
    seconds_per_token: float
    stream_forward: float
    stream_backward: float
    stream_exposed: float
    gather_forward: float
    gather_backward: float
    scan_forward: float
    scan_backward: float


class HeldBytes(TypedDict, total=False):
    """cf_held_bytes"""
    activations: int
    state: int
    state_gradient: int
    boundary: int


class Limits(TypedDict, total=False):
    """cf_limits"""
    chunks: int
    state: int
    bytes: int
    chunks_by_stage: Sequence[int]
    state_by_stage: Sequence[int]
    bytes_by_stage: Sequence[int]
    per_token: HeldBytes


class PackOptions(TypedDict, total=False):
    """cf_pack_desc, less chunk_size"""
    method: str
    split: str
    no_tails: int
    align: int
    max_slices: int
    n_ranks: int
    lockstep: int
    max_cp: int
    cp_row_seconds: float
    cp_chunk_seconds: float
    cost: PassCost
    min_shared_prefix: int
    no_copies: int


class ScheduleOptions(TypedDict, total=False):
    """cf_schedule_desc, with the members of its shape"""
    n_stages: int
    n_virtual: int
    placement: str
    replay: str
    k: int
    rank: int
    outputs: int
    kind: str
    timing: Timing
    limits: Limits
    split_backward: int
    forwards_first: int
    max_tries: int


class SimulateOptions(TypedDict, total=False):
    """cf_simulate_desc"""
    timing: Timing
    limits: Limits
    no_bounds: int
    start: Sequence[float]
    end: Sequence[float]


class ValidateOptions(TypedDict, total=False):
    """cf_validate_desc, without what only cf_lockstep_validate reads"""
    limits: Limits


class LowerOptions(TypedDict, total=False):
    """cf_lower_desc"""
    timing: Timing
