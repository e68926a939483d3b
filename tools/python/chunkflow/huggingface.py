"""Runs models of Transformers chunk by chunk: K and V are carried from chunk to chunk, and the model is not changed.

    model = transformers.AutoModelForCausalLM.from_pretrained(...)
    step = chunkflow.torch.Step(model, chunkflow.huggingface.Causal(model), chunk_size=4096, k=1)

Causal runs models that call attention through ALL_ATTENTION_FUNCTIONS and keep what later tokens need in a
DynamicCache. That is K and V or latents, with windows, blocks, soft caps and sinks. It also runs recurrent layers
(delta rule, Mamba, convolutions) that continue from the states of a cache. tests/torch has the list of models. A model
may be wrapped in peft's PeftModel or in DistributedDataParallel, or sharded by fully_shard. Other models are refused
with Unsupported, whose text names the model's type and the reason. Reasons are attention or state of the model's own,
frequencies that depend on the longest position of a call (see pin_rope), losses and capacities over a whole call, and
checkpointing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor, nn

import chunkflow

from . import torch as chunks
from .torch import Border, CPGroup, FSDPModule, Inputs

__all__ = ["Causal", "Unsupported", "attend", "pin_rope"]


class Unsupported(NotImplementedError):
    """A model that cannot be trained chunk by chunk, or not as it is set up. Has the reason, and the model's type if it
    is known."""

    def __init__(self, why: str, kind: str = ""):
        super().__init__(why)
        self.why, self.kind = why, kind

    def __str__(self) -> str:
        return f"{self.kind or 'this model'} cannot be trained chunk by chunk: {self.why}"


_Place = tuple[str, int]  # the place of a state in a recurrent layer: its kind, and its number


class _Pass:
    """The pass that runs, for the model's layers: not every model hands its arguments on to them."""

    def __init__(self, inputs: Inputs, before: Iterable[Tensor], tempered: list[nn.Module]):
        self.inputs = inputs
        self.rows = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.max_seqlen_q, inputs.max_seqlen_k)
        self.tree = {} if inputs.key_ends is None else {"key_ends": inputs.key_ends, "positions": inputs.positions}
        self.cp_group = inputs.cp_group
        self.positions, self.tempered, self.before = inputs.positions, tempered, iter(before)
        self.calls = self.windows = self.blocks = self.recurrent = 0
        # the type in which attention computes; under autocast it is not that of the logits
        self.dtype: torch.dtype | None = None
        self.keep: dict[int, int] = {}  # number of rows that a layer with a window sees before its own
        self.after: list[Tensor] = []  # states to hand on, in the same order as the states before the chunk in `before`
        self.states: _States | None = None  # of the recurrent layer's piece that runs

    @functools.cached_property
    def forks(self) -> list[int]:
        """Returns the numbers of rows after which states are handed on. In a chain, that is the end of the first
        sequence."""
        return [int(self.rows[0][1])] if self.inputs.forks is None else self.inputs.forks

    @functools.cached_property
    def pieces(self) -> list[tuple[int, int, int]]:
        """Cuts the rows into pieces (begin, end, source). A piece continues from the state after `source` rows of the
        chunk or, if negative, of the prefix; at 0 it begins its sequence. A piece ends where sequences diverge."""
        starts, positions = {0, *self.rows[0].tolist()}, self.positions.tolist()
        ends = [0] * len(positions) if self.inputs.key_ends is None \
            else self.inputs.key_ends[-len(positions):].tolist()  # rows below a row end there
        sources, at = {}, {}
        for row, position in enumerate(positions):
            above = at.get(position - 1, -1)  # later rows of this position continue other rows
            if row in starts:
                sources[row] = above + 1 if above >= 0 and ends[above] > row else -position
            at[position] = row
        cuts = sorted({*sources, *(n for n in (*sources.values(), *self.forks) if n > 0), len(positions)})
        return [(begin, end, sources.get(begin, begin)) for begin, end in zip(cuts, cuts[1:])]

    def states_before(self, places: list[_Place]) -> dict[int, dict[_Place, Tensor]]:
        """Takes a layer's states before the chunk, by the number of rows after which they are, negated."""
        own = list(itertools.islice(self.before, len(places)))
        if self.inputs.joins is None:
            return {self.pieces[0][2]: dict(zip(places, own))}
        return {-n: {place: x[i] for place, x in zip(places, own)} for i, n in enumerate(self.inputs.joins)}

    def hand_on(self, states: dict[int, dict[_Place, Tensor]], places: list[_Place]) -> None:
        """Hands on a layer's borders, from its states after these numbers of rows of the chunk."""
        for place in places if self.forks else ():
            found = [states[n][place] for n in self.forks]
            self.after.append(found[0] if self.inputs.forks is None else torch.stack(found))


class _Running(threading.local):
    """The passes that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.passes: list[_Pass] = []


_running = _Running()


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
           scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
           softcap: float | None = None, s_aux: Tensor | None = None, cu_seq_lens_q: Tensor | None = None,
           cu_seq_lens_k: Tensor | None = None, max_length_q: int | None = None, max_length_k: int | None = None,
           is_causal: bool | None = None, position_bias: Tensor | None = None, **others: Any) -> tuple[Tensor, None]:
    """What a model calls for attention; registered as "chunkflow"."""
    about = _running.passes[-1] if _running.passes else None
    if about is None and cu_seq_lens_q is None:
        raise Unsupported("attention by chunkflow outside a pass of chunkflow, and without cu_seq_lens")
    if dropout:
        raise Unsupported("dropout in attention, which chunkflow's has not; set it to 0 in the model's config "
                          "(attention_dropout, attn_pdrop ...)")
    if attention_mask is not None or position_bias is not None:
        raise Unsupported("a layer that gives attention a mask or bias of its own")
    if is_causal is False or (is_causal is None and not getattr(module, "is_causal", True)):
        raise Unsupported("attention that sees later tokens")
    rows, tree, block = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k), {}, _block_of(module)
    if about is not None:
        rows, tree = about.rows, about.tree
        about.calls += 1
        if about.cp_group is not None:
            key, value = about.cp_group.rows(key, value)
        if sliding_window is not None:
            about.windows += 1
            about.keep[getattr(module, "layer_idx", -1)] = sliding_window - 1
            rows = rows if tree else _rows_behind(rows, key.shape[2] - query.shape[2])
        about.blocks += block is not None
        if module in about.tempered:
            query = _tempered(module, query, about.positions)
    out = chunks.attention(query, key, value, *rows, scale=scaling, window=sliding_window, softcap=softcap,
                           sinks=s_aux, block=block, **tree)
    if about is not None:
        about.dtype = out.dtype
    return out.transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register("chunkflow", attend)


def _rows_behind(rows: tuple[Tensor, Tensor, int, int], n: int) -> tuple[Tensor, Tensor, int, int]:
    """Where the first sequence has n keys before the chunk's own, and not its whole prefix."""
    q, k, max_q, max_k = rows
    return q, torch.cat([k[:1], k[1:] - (k[1] - q[1]) + n]), max_q, max_k


def _block_of(module: nn.Module) -> int | None:
    """Returns the block of chunked attention, whose rows see only the rows of their own block. A layer learns of it
    only by a mask."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None) or ()
    return config.attention_chunk_size if layer is not None and kinds[layer:][:1] == ["chunked_attention"] else None


def _tempered(module: nn.Module, query: Tensor, positions: Tensor) -> Tensor:
    """Returns a scale that grows with the position. The layer itself would count positions from the length of its
    cache."""
    steps = torch.floor((positions.to(torch.float32) + 1.0) / module.floor_scale)
    return (query * (torch.log1p(steps) * module.attn_scale + 1.0)[:, None]).to(query.dtype)


class _States:
    """The cache of a recurrent layer. Convolution and kernel continue from the states here, and put their new states
    here. The layer itself sees no states; otherwise it would decode a single row, without gradients."""

    def __init__(self, before: dict[_Place, Tensor], cp_group: CPGroup | None = None):
        """cp_group: the ranks that each have a part of the piece's sequence. The states are those before all parts."""
        self.now = {place: x.clone() for place, x in before.items()}  # a clone, for some layers write into it
        self.cp_group, self.scanned = cp_group, False

    def is_recording_past(self, layer_idx: int) -> bool:
        return True

    def has_previous_state(self, *where: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    get_recurrent_state = get_conv_state

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *,
                          conv_kernel_size: int) -> Tensor:
        tail = self.now.get(("conv", state_idx))
        if tail is None:
            tail = conv_states.new_zeros(*conv_states.shape[:-1], conv_kernel_size - 1)
        if self.cp_group is None:
            rows = torch.cat([tail, conv_states], -1)
            self.now["conv", state_idx] = rows[..., rows.shape[-1] - conv_kernel_size + 1:]
            return rows
        tail, self.now["conv", state_idx] = self.cp_group.tails(tail, conv_states)
        return torch.cat([tail, conv_states], -1)

    def scan(self, kernel: _Kernel, *rows: Tensor, **options: Any) -> Any:
        """Runs a kernel from the state that is here."""
        self.scanned = True
        before = self.now.get(("recurrent", 0))
        if self.cp_group is None:
            return kernel.run(rows, options, **{kernel.begins: before})
        effect, state, apply = kernel.effect_of(rows, options)
        before, after = self.cp_group.scan(torch.zeros_like(state) if before is None else before, effect, state, apply)
        out, _ = kernel.run(rows, options, **{kernel.begins: before})
        return out, after

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        if not self.scanned:
            raise Unsupported("its recurrent layers do not go on from the state that they are given")
        self.now["recurrent", state_idx] = recurrent_states
        return recurrent_states


class _Kernel:
    """Replaces a function that a recurrent layer calls with an initial state. While passes run, it takes that state
    from the piece that runs in this thread. Otherwise it calls the function unchanged."""

    known: dict[tuple[str, str], _Kernel] = {}
    lock = threading.Lock()

    def __init__(self, names: dict[str, Any], name: str, begins: str):
        self.names, self.name, self.begins, self.function = names, name, begins, names[name]
        self.takes, self.n_passes = tuple(inspect.signature(self.function).parameters), 0

    def __call__(self, *rows: Tensor, **options: Any) -> Any:
        states = _running.passes[-1].states if _running.passes else None
        return self.function(*rows, **options) if states is None else states.scan(self, *rows, **options)

    @classmethod
    def all_of(cls, code: Any, names: dict[str, Any]) -> list[_Kernel]:
        """Returns those of the names in its file that a layer's forward calls."""
        found = []
        with cls.lock:
            for name in code.co_names:
                at = (names["__name__"], name)
                takes = set(inspect.signature(names[name]).parameters) if inspect.isfunction(names.get(name)) else set()
                for begins in takes & {"initial_state", "initial_states"}:
                    cls.known.setdefault(at, cls(names, name, begins))
                found += [cls.known[at]] if at in cls.known else []
        return found

    def run(self, rows: Iterable[Tensor], options: dict[str, Any], **changed: Any) -> Any:
        """Runs the function with other values for some arguments. Arguments without names stay so, because kernels that
        are installed beside PyTorch have other names for them."""
        rows = [changed.pop(name, x) for name, x in zip(self.takes, rows)]
        return self.function(*rows, **{**options, **changed})

    def effect_of(self, rows: tuple[Tensor, ...], options: dict[str, Any]
                  ) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]:
        """Returns the effect of a part's rows on any state before them, the state that they make from zeros, and how to
        apply the effect. One run finds both: values get more columns, which are 0 and whose initial states are the
        identity. A delta rule mixes the rows of every column alike. Mamba-2 decays all columns alike, so one column is
        enough."""
        given = {**dict(zip(self.takes, rows)), **options}
        values, key = given.get("value", given.get("hidden_states")), given.get("key", given.get("B"))
        if values is None or key is None:
            raise Unsupported(f"recurrent layers by {self.name} where ranks share a sequence: it is not known what "
                              "their rows do to a state")
        dtype, width = torch.promote_types(values.dtype, torch.float32), key.shape[-1]
        is_delta, n = "value" in given, values.shape[-1]
        unit = torch.eye(width, dtype=dtype, device=values.device) if is_delta else \
            torch.ones(width, 1, dtype=dtype, device=values.device)
        more = values.new_zeros(*values.shape[:-1], unit.shape[1])
        begin = torch.cat([unit.new_zeros(width, n), unit], 1).expand(len(values), values.shape[2], -1, -1)
        _, found = self.run(rows, options, **{"value" if is_delta else "hidden_states": torch.cat([values, more], -1),
                                              self.begins: begin if is_delta else begin.mT})
        state, effect = found.split([n, unit.shape[1]], -1 if is_delta else -2)
        return effect, state, torch.matmul if is_delta else torch.mul

    def change(self, n_passes: int) -> None:
        """Replaces the function before the first pass, and restores it after the last."""
        with self.lock:
            self.n_passes += n_passes
            self.names[self.name] = self if self.n_passes else self.function


class _Recurrent:
    """The forward of a recurrent layer, piece by piece. Each piece continues from the state after the rows before
    it."""

    def __init__(self, module: nn.Module):
        self.module, self.places = module, []
        takes = inspect.signature(module.forward).parameters
        self.cache = "cache_params" if "cache_params" in takes else "past_key_values"
        inner = inspect.unwrap(type(module).forward)
        self.kernels = _Kernel.all_of(inner.__code__, inner.__globals__)

    @staticmethod
    def is_one(module: nn.Module) -> bool:
        """Whether its forward hands states to a cache."""
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        return code is not None and bool({"update_conv_state", "update_recurrent_state"} & set(code.co_names))

    def __call__(self, hidden_states: Tensor, **named: Any) -> Tensor:
        about, found = _running.passes[-1], []
        states = about.states_before(self.places)
        for begin, end, source in about.pieces:
            about.states = _States(states.get(source, {}), about.cp_group if begin == 0 else None)
            rows = {name: x[:, begin:end] if isinstance(x, Tensor) else x
                    for name, x in {**named, "hidden_states": hidden_states}.items()}
            found.append(self.forward(**{**rows, self.cache: about.states}))
            states[end], about.states = about.states.now, None
        self.places = list(states[about.pieces[0][1]])
        about.hand_on(states, self.places)
        about.recurrent += 1
        return torch.cat(found, 1)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Is the module's forward inside."""
        own, self.forward = self.module.__dict__.get("forward"), self.module.forward
        self.module.forward = self
        for kernel in self.kernels:
            kernel.change(1)
        try:
            yield
        finally:
            del self.module.forward
            if own is not None:
                self.module.forward = own
            for kernel in self.kernels:
                kernel.change(-1)


_ROWS = ("full_attention", "sliding_attention", "chunked_attention")  # kinds of layers
_RECURRENT = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
_FIRST, _MOST = 11, 1 << 20  # tokens of the probe's first sequence; maximum weights whose gradients are compared
_ROPES_OF_THE_CALL = ("dynamic", "longrope")


def _ropes(model: nn.Module) -> Iterator[tuple[nn.Module, str | None, str]]:
    """Returns the modules of rotary embedding whose frequencies depend on the call, with their layer types."""
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        for layer, kind in (types.items() if isinstance(types, dict) else [(None, types)]):
            if kind in _ROPES_OF_THE_CALL:
                yield module, layer, kind


def pin_rope(model: nn.Module, length: int) -> None:
    """Fixes the frequencies of dynamic and longrope, which depend on the longest position of a call, at those for a
    sequence of `length` tokens. This changes the model for shorter or longer sequences, whole or in chunks."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: wanted a torch.nn.Module, got {model!r:.99}")
    length = chunkflow._whole(length, "length", 1)
    for module, layer, _ in list(_ropes(model)):
        x = torch.zeros(1, 1, 1, device=next(model.parameters()).device)
        more = {} if layer is None else {"layer_type": layer}
        module(x, torch.tensor([[length - 1]], device=x.device), **more)
        if layer is None:
            module.rope_type = "pinned"
        else:
            module.rope_type[layer] = "pinned"


def _takes(model: nn.Module) -> set[str]:
    """Returns the names of the arguments of forward. If it hands on **others, includes those of the class below it."""
    names: set[str] = set()
    for forward in (model.forward, *(c.forward for c in type(model).__mro__ if "forward" in vars(c))):
        parameters = inspect.signature(forward).parameters
        names.update(parameters)
        if all(p.kind != p.VAR_KEYWORD for p in parameters.values()):
            break
    return names


@contextlib.contextmanager
def _embedding(model: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, collects the results of the input embeddings in the list that it yields; their gradients end there."""
    found: list[Tensor] = []
    if not torch.is_grad_enabled():
        yield found
        return

    def begin(module: nn.Module, given: Any, made: Tensor) -> Tensor:
        found.append(made.detach().requires_grad_())
        return found[-1].clone()  # for models that scale it in place
    handle = model.get_input_embeddings().register_forward_hook(begin)
    try:
        yield found
    finally:
        handle.remove()


def _apart(got: list[Tensor | None], wanted: list[Tensor | None]) -> float:
    """Returns the relative distance of two lists of gradients, in which None means zero."""
    off = total = 0.0
    for a, b in zip(got, wanted):
        a, b = (None if x is None else x.detach().double() for x in (a, b))
        between = b if a is None else a if b is None else a - b
        off += 0.0 if between is None else float(between.square().sum())
        total += 0.0 if b is None else float(b.square().sum())
    return (off / max(total, 1e-60)) ** 0.5


def _entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """Returns the mean over the targets of the probe's two sequences."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
    return (losses.sum() - losses[_FIRST - 1]) / (len(tokens) - 2)


class Causal:
    """One pass of a causal language model, for chunkflow.torch."""

    def __init__(self, model: nn.Module, check: bool = True, own_loss: bool = True):
        """check: compares two small chunks with the unchanged model: logits, the loss and its gradients. This finds
        what the other checks miss. own_loss: the loss is the model's own (model(labels=...).loss), and must be the
        cross entropy; False is for a Step with a loss of yours. Under FSDP2, every rank makes one of these objects at
        the same time."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: wanted a model of Transformers, got {model!r:.99}")
        if type(model).__name__ in ("FullyShardedDataParallel", "DeepSpeedEngine", "DataParallel"):
            raise Unsupported("weights are gathered or copied for each forward, and ranks run forwards in other "
                              "numbers: use DistributedDataParallel or fully_shard", type(model).__name__)
        self.outer = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self.model = self.outer.get_base_model() if hasattr(self.outer, "get_base_model") else self.outer
        if not hasattr(getattr(self.model, "config", None), "get_text_config"):
            raise TypeError(f"model: wanted a model of Transformers, got a {type(self.model).__name__}; a module of "
                            "your own needs a forward of your own (see chunkflow.torch)")
        self.config = self.model.config.get_text_config()
        self.kind = self.config.model_type
        self.sharded = any(isinstance(m, FSDPModule) for m in self.model.modules())
        self.takes = _takes(getattr(self.model, "_orig_mod", self.model))  # of what torch.compile has wrapped
        found = [m.config for m in self.model.modules() if isinstance(m, transformers.PreTrainedModel)]
        self.configs = list({id(c): c for c in [*found, self.config]}.values())
        self.layers: list[int] = []  # layers whose rows the cache keeps, those with short windows last
        self.recurrent = [_Recurrent(m) for m in self.model.modules() if _Recurrent.is_one(m)]
        self.tempered = [m for m in self.model.modules()
                         if getattr(m, "attn_temperature_tuning", None) and not getattr(m, "use_rope", True)]
        self._check_set_up()
        self.own_loss = bool(chunkflow._flag(own_loss, "own_loss")) and "labels" in self.takes
        if chunkflow._flag(check, "check"):
            self._check_probe()

    @property
    def n_words(self) -> int | None:
        """The number of tokens that have an embedding."""
        return getattr(self.model.get_input_embeddings(), "num_embeddings", None)

    def refuse(self, why: str) -> NoReturn:
        raise Unsupported(why, self.kind)

    def _kinds(self) -> list[str]:
        """Returns the types of the layers that have attention or a state."""
        return [x for x in getattr(self.config, "layer_types", None) or () if x not in ("mlp", "moe")]

    def _check_set_up(self) -> None:
        """What is known before a pass."""
        if getattr(self.config, "is_encoder_decoder", False):
            self.refuse("it has an encoder and a decoder, and chunks carry decoders alone")
        others = [x for x in self._kinds() if x not in _ROWS]
        kinds = {x for x in others if x not in _RECURRENT or len(self.recurrent) < len(others)}
        if kinds:
            self.refuse(f"it has layers of kind {', '.join(sorted(map(str, kinds)))}, whose state is not carried")
        for name in ("attention_chunk_size", "index_topk"):
            if getattr(self.config, name, None) and "chunked_attention" not in self._kinds():
                self.refuse(f"{name} hides tokens that attention is not told of")
        for name in ("expert_capacity", "capacity_factor", "moe_capacity_factor", "moe_drop_tokens"):
            if getattr(self.config, name, None):
                self.refuse(f"{name} drops tokens where experts are full, which depends on the others of a call")
        for _, _, kind in _ropes(self.model):
            self.refuse(f"frequencies of rope_type {kind} depend on the longest position of a call; "
                        "chunkflow.huggingface.pin_rope(model, length) fixes them")
        peft = getattr(self.outer, "active_peft_config", None)
        if getattr(peft, "is_prompt_learning", False):
            self.refuse(f"peft's {getattr(peft.peft_type, 'value', peft.peft_type)} puts virtual tokens before every "
                        "call; LoRA, which changes layers alone, can be")
        if getattr(peft, "alora_invocation_tokens", None):
            self.refuse("peft's alora_invocation_tokens switch the adapter on behind tokens that PeftModel looks for "
                        "in whole sequences; LoRA without them can be")

    def _check_now(self) -> None:
        """What a user may have switched on since."""
        if getattr(self.config, "output_router_logits", False):
            self.refuse("output_router_logits adds load_balancing_loss_func, a product of two means over a whole call, "
                        "which is not the sum of those of its chunks; set it to False to train without that loss")
        if any(getattr(m, "gradient_checkpointing", False) for m in self.model.modules()):
            self.refuse("gradient checkpointing drops the cache; replays take its place: K (k=1 keeps one chunk's "
                        "activations) and chunk_size bound memory, so call gradient_checkpointing_disable(), or "
                        "train with gradient_checkpointing=False")

    @contextlib.contextmanager
    def _attending(self, inputs: Inputs) -> Iterator[_Pass]:
        """Inside, the model computes attention with chunkflow; outside as before, so evaluation and generation do not
        change."""
        before = [c._attn_implementation for c in self.configs]
        about = _Pass(inputs, inputs.prefix[2 * len(self.layers):], self.tempered)
        _running.passes.append(about)
        with contextlib.ExitStack() as stack:
            stack.callback(_running.passes.pop)
            for c, implementation in zip(self.configs, before):
                stack.callback(setattr, c, "_attn_implementation", implementation)
                c._attn_implementation = "chunkflow"
            for layer in self.tempered:
                stack.callback(setattr, layer, "attn_temperature_tuning", layer.attn_temperature_tuning)
                layer.attn_temperature_tuning = False
            for layer in self.recurrent:
                stack.enter_context(layer.running())
            yield about

    def __call__(self, inputs: Inputs) -> tuple[Tensor | None, list[Tensor | Border]]:
        self._check_now()
        cache, before = transformers.DynamicCache(), {}
        for i, layer in enumerate(self.layers if inputs.prefix else []):
            cache.update(inputs.prefix[2 * i], inputs.prefix[2 * i + 1], layer)
            before[layer] = inputs.prefix[2 * i].shape[-2]
        call, more = self.outer if self.sharded else self.model, {}
        if not inputs.keep and "logits_to_keep" in self.takes:  # the model's own forward all the same
            more = {"logits_to_keep": 1}
        more["past_key_values" if "past_key_values" in self.takes else "cache_params"] = cache
        try:
            with self._attending(inputs) as about:
                output = call(input_ids=inputs.tokens[None], position_ids=inputs.positions[None], use_cache=True,
                              **more)
        except Unsupported as refused:  # raised by attention, which does not know the model
            self.refuse(refused.why)
        self.attends_in = about.dtype
        self._check_pass(about, cache, before, len(inputs.tokens))
        own = self._handed_on(about, cache, before, inputs)
        return (output.logits[0] if inputs.keep else None), own + [Border(x) for x in about.after]

    def _handed_on(self, about: _Pass, cache: Any, before: dict[int, int], inputs: Inputs) -> list[Tensor | Border]:
        """Returns this chunk's rows, layer by layer. If a window is shorter than a chunk, keeps only the rows of the
        first sequence that later chunks see. In trees and cp groups keeps all rows: in trees sequences diverge at any
        row, and the ranks of a cp group take turns."""
        filled = [i for i, layer in enumerate(cache.layers) if layer.is_initialized]
        short = [i for i in filled if not (about.tree or about.cp_group)
                 and about.keep.get(i, inputs.chunk_size) < inputs.chunk_size]
        whole = [i for i in filled if i not in short]
        self.layers, first = whole + short, int(inputs.cu_seqlens_q[1])
        own = [x[:, :, before.get(i, 0):] for i in whole for x in (cache.layers[i].keys, cache.layers[i].values)]
        for i in short:
            end = before.get(i, 0) + first
            own += [Border(x[:, :, max(0, end - about.keep[i]):end])
                    for x in (cache.layers[i].keys, cache.layers[i].values)]
        return own

    def _check_pass(self, about: _Pass, cache: Any, before: dict[int, int], n_rows: int) -> None:
        """Refuses attention of the model's own, and state other than K and V; both show in every pass."""
        kinds = self._kinds()
        wanted = len(kinds) or self.config.num_hidden_layers
        if about.calls + about.recurrent < wanted:
            self.refuse(f"{about.calls} of its {wanted} layers take their attention from ALL_ATTENTION_FUNCTIONS")
        if about.blocks < kinds.count("chunked_attention"):
            self.refuse("it has chunked attention that does not say of which layer it is")
        windows = ["sliding" in kind for kind in kinds]
        if about.windows < sum(windows) or (not windows and getattr(self.config, "sliding_window", None)
                                            and not about.windows):
            self.refuse("it has sliding windows that attention is not told of")
        filled = [i for i, layer in enumerate(cache.layers) if layer.is_initialized]
        if not filled and not about.recurrent or any(getattr(cache.layers[i], "keys", None) is None
                                  or cache.layers[i].keys.shape[-2] != before.get(i, 0) + n_rows for i in filled):
            self.refuse("its cache does not hold K and V of every row; a forward of your own must hand "
                        "past_key_values, position_ids and use_cache on")

    def _check_probe(self) -> None:
        """Compares chunks with the model on whole sequences. One sequence is in two chunks, the second of which also
        has another sequence. Logits, loss, and its gradients at the input embeddings and the smallest weights must
        agree. This finds positions that are ignored, biases, shifts and convolutions over rows, and losses of the
        model's own. Random numbers and gradients of the parameters stay as they are."""
        modes = [m for m in self.outer.modules() if m.training]
        device = next(self.model.parameters()).device
        tokens = torch.arange(3, 17, device=device) * 7 % min(self.config.vocab_size, 100)
        self.outer.eval()
        try:
            with chunks._seeded(device, 0), torch.set_grad_enabled(not self.sharded):
                self._check_head(tokens[:_FIRST])
                with _embedding(self.model) as rows:
                    wanted, own, known = self._whole(tokens, rows)
                with _embedding(self.model) as rows:
                    got, loss, found = self._chunks(tokens, rows)
        finally:
            for m in modes:
                m.training = True
        self._judge((got, loss, found), (wanted, own, known), tokens)

    def _judge(self, got: tuple[Tensor, Tensor, list[Any]], wanted: tuple[Tensor, Tensor, list[Any]],
               tokens: Tensor) -> None:
        """Refuses a model whose chunks differ from whole sequences in logits, in the loss, or in gradients."""
        half = {wanted[0].dtype, self.attends_in} & {torch.float16, torch.bfloat16}
        off = float((got[0] - wanted[0]).double().norm() / wanted[0].double().norm().clamp(min=1e-30))
        if not off <= (0.1 if half else 1e-3):
            self.refuse(f"two chunks differ from the whole by {off:.1e} of its logits; its positions or a state of its "
                        "own do not follow the rows")
        entropy, own = float(_entropy(wanted[0], tokens)), float(wanted[1])
        theirs = "a loss_function, a hook, a part that forward or peft adds"
        cure = f"chunks take the cross entropy alone; without {theirs} it can be, and Causal(model, own_loss=False) " \
               "is for a Step with a loss of yours"
        if not abs(own - entropy) <= (0.02 if half else 1e-4) * max(1.0, abs(entropy)):
            self.refuse(f"its own loss of {len(tokens)} tokens is {own:.6g}, and the cross entropy {entropy:.6g}: "
                        f"{cure}")
        for what, a, b in zip(("input embeddings", "smallest weights"), got[2], wanted[2]):
            off = _apart(a, b)
            if not off <= (0.5 if half else 0.01):
                self.refuse(f"two chunks differ from the whole by {off:.1e} of the gradients of its {what}: {cure}")

    def _whole(self, tokens: Tensor, rows: list[Tensor]) -> tuple[Tensor, Tensor, list[Any]]:
        """Runs the model on each of the probe's sequences: logits, its own loss, and gradients."""
        logits, losses = [], []
        for part in (tokens[:_FIRST], tokens[_FIRST:]):
            more = {"labels": part[None]} if self.own_loss else {}
            with self._naming("a first call of it with labels" if more else "a first call of it"):
                output = self.outer(input_ids=part[None], use_cache=False, **more)
            logits.append(output.logits[0])
            losses.append(None if getattr(output, "loss", None) is None else output.loss * (len(part) - 1))
        made = torch.cat(logits)
        loss = _entropy(made, tokens) if None in losses else sum(losses) / (len(tokens) - 2)
        return made.detach(), loss.detach(), self._gradients(loss, rows)

    def _check_head(self, tokens: Tensor) -> None:
        """Refuses a model whose logits do not predict the next token."""
        with torch.no_grad(), self._naming("a first call of it with input_ids alone"):
            made = getattr(self.outer(input_ids=tokens[None], use_cache=False), "logits", None)
        if made is None or made.shape[:2] != tokens[None].shape or made.shape[-1] <= int(tokens.max()):
            shape = "none" if made is None else f"of shape {tuple(made.shape)}"
            self.refuse(f"{type(self.model).__name__} has no language model's head: for {len(tokens)} tokens its "
                        f"logits are {shape}, and the wanted (1, {len(tokens)}, {self.config.vocab_size}); "
                        "AutoModelForCausalLM makes one that has")

    def _gradients(self, loss: Tensor, rows: list[Tensor]) -> list[Any]:
        """Returns gradients of the input embeddings, rows joined, and of the smallest trained weights."""
        if not torch.is_grad_enabled() or not loss.requires_grad:
            return []
        small, n = [], 0
        for p in sorted((p for p in self.outer.parameters() if p.requires_grad), key=Tensor.numel):
            n += p.numel()
            small += [p] if n <= _MOST else []
        found = torch.autograd.grad(loss, [*rows, *small], allow_unused=True)
        of_rows = [x for x in found[:len(rows)] if x is not None]
        return [[torch.cat(of_rows, 1)] if of_rows else [None], list(found[len(rows):])]

    @contextlib.contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Refuses a model that raises an error inside. what: the name of what runs, for the message."""
        try:
            yield
        except Unsupported:
            raise
        except (AssertionError, AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError,
                ValueError) as error:
            self.refuse(f"{what} ends in {type(error).__name__}: {error}")

    def _chunks(self, tokens: Tensor, rows: list[Tensor]) -> tuple[Tensor, Tensor, list[Any]]:
        """Runs the same sequences in two chunks. A state that is ignored shows in gradients, even if its share in the
        logits is small."""
        got, prefix = [], []
        for begin, end, cu_q, cu_k in ((0, 7, [0, 7], [0, 7]), (7, 14, [0, 4, 7], [0, 11, 14])):
            cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=tokens.device) for cu in (cu_q, cu_k))
            at = torch.arange(begin, end, device=tokens.device)
            none = torch.zeros(end - begin, device=tokens.device)
            inputs = Inputs(0, True, tokens[begin:end], at % _FIRST, none, none, cu_q, cu_k, 7, 11, prefix)
            borders = [] if self.sharded else [x.requires_grad_() for x in prefix[2 * len(self.layers):]]
            with self._naming("a first pass of it"):
                logits, own = self(inputs)
                seen = torch.autograd.grad(logits.square().sum(), borders, allow_unused=True, retain_graph=True) \
                    if borders else ()
            if any(x is None or not x.any() for x in seen):
                self.refuse("its recurrent layers do not go on from the state that they are given")
            got.append(logits)
            prefix = [x.state if isinstance(x, Border) else x for x in own]
        made = torch.cat(got)
        loss = _entropy(made, tokens)
        return made.detach(), loss.detach(), self._gradients(loss, rows)
