"""Models of Transformers, chunk by chunk: K and V are carried from chunk to chunk, and nothing of the model changes.

    model = transformers.AutoModelForCausalLM.from_pretrained(...)
    step = chunkflow.torch.Step(model, chunkflow.huggingface.Causal(model), chunk_size=4096, k=1)

Causal runs models that take their attention from ALL_ATTENTION_FUNCTIONS and keep K and V in a DynamicCache, sliding
windows, soft caps and sinks included: some thirty kinds, of which tests/torch has the list. A model may be wrapped in
peft's PeftModel, in DistributedDataParallel, or sharded by fully_shard. What it cannot carry is refused with
Unsupported, whose text names the model's type and the reason: recurrent layers, an attention that is the model's own,
frequencies that depend on the longest position of a call (see pin_rope), losses over a whole batch, checkpointing.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor, nn

from . import torch as chunks
from .torch import FSDPModule, Inputs

__all__ = ["Causal", "Unsupported", "attend", "pin_rope"]


class Unsupported(NotImplementedError):
    """A model that cannot be trained chunk by chunk, or not as it is set up: why, and its type where that is known."""

    def __init__(self, why: str, kind: str = ""):
        super().__init__(why)
        self.why, self.kind = why, kind

    def __str__(self) -> str:
        return f"{self.kind or 'this model'} cannot be trained chunk by chunk: {self.why}"


class _Pass:
    """What attention is told of the pass that runs: not every model hands its arguments on."""

    def __init__(self, inputs: Inputs):
        self.rows = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.max_seqlen_q, inputs.max_seqlen_k)
        self.tree = {} if inputs.key_ends is None else {"key_ends": inputs.key_ends, "positions": inputs.positions}
        self.calls = self.windows = 0


_running: list[_Pass] = []


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
           scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
           softcap: float | None = None, s_aux: Tensor | None = None, cu_seq_lens_q: Tensor | None = None,
           cu_seq_lens_k: Tensor | None = None, max_length_q: int | None = None, max_length_k: int | None = None,
           is_causal: bool | None = None, position_bias: Tensor | None = None, **others: Any) -> tuple[Tensor, None]:
    """What a model calls for attention; registered as "chunkflow"."""
    about = _running[-1] if _running else None
    if about is None and cu_seq_lens_q is None:
        raise Unsupported("attention by chunkflow outside a pass of chunkflow, and without cu_seq_lens")
    if dropout:
        raise Unsupported("dropout in attention: a replay could not repeat it in other chunks; set it to 0")
    if attention_mask is not None or position_bias is not None:
        raise Unsupported("a layer that gives attention a mask or bias of its own")
    if is_causal is False or (is_causal is None and not getattr(module, "is_causal", True)):
        raise Unsupported("attention that sees later tokens")
    rows, tree = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k), {}
    if about is not None:
        rows, tree = about.rows, about.tree
        about.calls += 1
        about.windows += sliding_window is not None
    return chunks.attention(query, key, value, *rows, scale=scaling, window=sliding_window, softcap=softcap,
                            sinks=s_aux, **tree).transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register("chunkflow", attend)

_ROPES_OF_THE_CALL = ("dynamic", "longrope")


def _ropes(model: nn.Module) -> Iterator[tuple[nn.Module, str | None, str]]:
    """The modules of rotary embedding whose frequencies depend on the call, layer type by layer type."""
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        for layer, kind in (types.items() if isinstance(types, dict) else [(None, types)]):
            if kind in _ROPES_OF_THE_CALL:
                yield module, layer, kind


def pin_rope(model: nn.Module, length: int) -> None:
    """Fixes what dynamic and longrope frequencies depend on, the longest position of a call, at that of a sequence of
    `length` tokens: from now on the model is another one than it was for shorter or longer sequences, whole or not."""
    for module, layer, _ in list(_ropes(model)):
        x = torch.zeros(1, 1, 1, device=next(model.parameters()).device)
        more = {} if layer is None else {"layer_type": layer}
        module(x, torch.tensor([[length - 1]], device=x.device), **more)
        if layer is None:
            module.rope_type = "pinned"
        else:
            module.rope_type[layer] = "pinned"


class Causal:
    """One pass of a causal language model, for chunkflow.torch."""

    def __init__(self, model: nn.Module, check: bool = True):
        """check: compares two small chunks with the model as it is, which finds what the other checks do not. Under
        FSDP2 every rank makes one of these at the same time."""
        if type(model).__name__ in ("FullyShardedDataParallel", "DeepSpeedEngine", "DataParallel"):
            raise Unsupported("weights are gathered or copied for each forward, and ranks run forwards in other "
                              "numbers: use DistributedDataParallel or fully_shard", type(model).__name__)
        self.outer = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self.model = self.outer.get_base_model() if hasattr(self.outer, "get_base_model") else self.outer
        self.config = self.model.config.get_text_config()
        self.kind = self.config.model_type
        self.sharded = any(isinstance(m, FSDPModule) for m in self.model.modules())
        self.takes = inspect.signature(self.model.forward).parameters
        found = [m.config for m in self.model.modules() if isinstance(m, transformers.PreTrainedModel)]
        self.configs = list({id(c): c for c in [*found, self.config]}.values())
        self.layers: list[int] = []  # those that the cache has rows of
        self._check_set_up()
        if check:
            self._check_probe()

    def refuse(self, why: str) -> NoReturn:
        raise Unsupported(why, self.kind)

    def _check_set_up(self) -> None:
        """What is known before a pass."""
        kinds = set(getattr(self.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if kinds:
            self.refuse(f"it has layers of kind {', '.join(sorted(map(str, kinds)))}, whose state is not carried")
        for name in ("attention_chunk_size", "index_topk"):
            if getattr(self.config, name, None):
                self.refuse(f"{name} hides tokens that attention is not told of")
        for _, _, kind in _ropes(self.model):
            self.refuse(f"frequencies of rope_type {kind} depend on the longest position of a call; "
                        "chunkflow.huggingface.pin_rope(model, length) fixes them")
        if getattr(getattr(self.outer, "active_peft_config", None), "is_prompt_learning", False):
            self.refuse("peft puts virtual tokens before every call")

    def _check_now(self) -> None:
        """What a user may have switched on since."""
        if getattr(self.config, "output_router_logits", False):
            self.refuse("output_router_logits adds a balance loss over a whole batch, which chunks cannot sum; set it "
                        "to False to train without that loss")
        if any(getattr(m, "gradient_checkpointing", False) for m in self.model.modules()):
            self.refuse("gradient checkpointing drops the cache; replays take its place: K (k=1 keeps one chunk's "
                        "activations) and chunk_size bound memory, so call gradient_checkpointing_disable()")

    @contextlib.contextmanager
    def _attending(self, inputs: Inputs) -> Iterator[_Pass]:
        """The model attends by chunkflow inside, and as before outside: evaluation and generation see no difference."""
        before = [c._attn_implementation for c in self.configs]
        about = _Pass(inputs)
        _running.append(about)
        try:
            for c in self.configs:
                c._attn_implementation = "chunkflow"
            yield about
        finally:
            _running.pop()
            for c, implementation in zip(self.configs, before):
                c._attn_implementation = implementation

    def __call__(self, inputs: Inputs) -> tuple[Tensor | None, list[Tensor]]:
        self._check_now()
        cache, n_prefix = transformers.DynamicCache(), 0
        for i, layer in enumerate(self.layers if inputs.prefix else []):
            cache.update(inputs.prefix[2 * i], inputs.prefix[2 * i + 1], layer)
            n_prefix = inputs.prefix[0].shape[-2]
        call, more = self.outer if self.sharded else self.model, {}
        if not inputs.keep and not self.sharded:
            call = self.model.base_model  # no logits; but sharded weights are gathered by the root alone
        elif not inputs.keep and "logits_to_keep" in self.takes:
            more = {"logits_to_keep": 1}
        with self._attending(inputs) as about:
            output = call(input_ids=inputs.tokens[None], position_ids=inputs.positions[None], past_key_values=cache,
                          use_cache=True, **more)
        self._check_pass(about, cache, n_prefix + len(inputs.tokens))
        rows = [layer for layer in cache.layers if layer.is_initialized]
        own = [x[:, :, n_prefix:] for layer in rows for x in (layer.keys, layer.values)]
        return (output.logits[0] if inputs.keep else None), own

    def _check_pass(self, about: _Pass, cache: Any, n_rows: int) -> None:
        """Attention that is the model's own, and state that is not K and V, show in every pass."""
        wanted = self.config.num_hidden_layers
        if about.calls < wanted:
            self.refuse(f"{about.calls} of its {wanted} layers take their attention from ALL_ATTENTION_FUNCTIONS")
        windows = [kind == "sliding_attention" for kind in getattr(self.config, "layer_types", None) or ()]
        if about.windows < sum(windows) or (not windows and getattr(self.config, "sliding_window", None)
                                            and not about.windows):
            self.refuse("it has sliding windows that attention is not told of")
        self.layers = [i for i, layer in enumerate(cache.layers) if layer.is_initialized]
        if not self.layers or any(getattr(cache.layers[i], "keys", None) is None
                                  or cache.layers[i].keys.shape[-2] != n_rows for i in self.layers):
            self.refuse("its cache does not hold K and V of every row")

    def _check_probe(self) -> None:
        """The logits of a sequence in two chunks, the second of which has another sequence behind it, beside those of
        the model on each alone. This sees positions that are ignored, biases, shifts and convolutions over rows."""
        training = [m for m in self.model.modules() if m.training]
        tokens = torch.arange(3, 17, device=next(self.model.parameters()).device) * 7 % min(self.config.vocab_size, 100)
        self.model.eval()
        try:
            with torch.no_grad():
                run = self.outer if self.sharded else self.model
                alone = (run(input_ids=t[None], use_cache=False).logits[0] for t in (tokens[:11], tokens[11:]))
                wanted = torch.cat(list(alone))
                got = self._probe(tokens)
        finally:
            for m in training:
                m.training = True
        off = float((got - wanted).double().norm() / wanted.double().norm().clamp(min=1e-30))
        if not off <= (0.1 if wanted.dtype in (torch.float16, torch.bfloat16) else 1e-3):
            self.refuse(f"two chunks differ from the whole by {off:.1e} of its logits; its positions or a state of its "
                        "own do not follow the rows")

    def _probe(self, tokens: Tensor) -> Tensor:
        got, prefix = [], []
        for begin, end, cu_q, cu_k in ((0, 7, [0, 7], [0, 7]), (7, 14, [0, 4, 7], [0, 11, 14])):
            cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=tokens.device) for cu in (cu_q, cu_k))
            at = torch.arange(begin, end, device=tokens.device)
            none = torch.zeros(end - begin, device=tokens.device)
            inputs = Inputs(0, True, tokens[begin:end], at % 11, none, none, cu_q, cu_k, 7, 11, prefix)
            try:
                logits, prefix = self(inputs)
            except Unsupported as refused:
                self.refuse(refused.why)
            except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError,
                    ValueError) as error:
                self.refuse(f"a first pass of it ends in {type(error).__name__}: {error}")
            got.append(logits)
        return torch.cat(got)
