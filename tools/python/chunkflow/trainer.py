"""Trains in chunks with Transformers' Trainer, and with trainers derived from it, such as TRL's SFTTrainer.

    trainer = chunkflow.trainer.Trainer(model=model, args=args, train_dataset=data, chunk_size=4096)

    class SFTTrainer(chunkflow.trainer.Chunked, trl.SFTTrainer):
        pass

All micro-batches of a step (gradient accumulation) and of all ranks are planned as one batch. Padding (on the right) is
removed, and tokens whose label is -100 are no targets. The loss is divided by what the plain trainer divides it by.
That is the step's targets, all of its labels if Transformers counts those (GPT-2), or first the targets of each
micro-batch (accepts_loss_kwargs=False). The loss of an evaluation also comes from chunks, with forwards alone, so a
sequence that can be trained can be evaluated. The plan packs sequences, so packing and padding_free of the collator
must be off. A model whose own loss is not the cross entropy, and a compute_loss of your own, are refused by name.

Three defaults of TRL are for whole sequences. Gradient checkpointing is switched off, because K bounds activations. The
routers' balance loss of mixtures, which is over a whole batch, is switched off; if router_aux_loss_coef asks for it, it
is refused. max_length truncates at 1024 tokens; a warning counts the sequences. TRL's entropy and token accuracy need
all logits and are not logged.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
import transformers

from .huggingface import Causal, Unsupported
from .torch import Step, unpad

__all__ = ["Chunked", "Trainer", "UnsupportedData", "UnsupportedOption"]


class Chunked:
    """A mixin to put before a trainer's class. Its own keywords are chunk_size, k, outputs (see chunkflow.torch.Batch)
    and chunk_options, which has the other keywords of chunkflow.torch.Step and chunkflow.pack."""

    def __init__(self, *arguments: Any, chunk_size: int, k: int = 1, outputs: bool | None = None,
                 chunk_options: dict[str, Any] | None = None, **options: Any):
        if not isinstance(chunk_options, (dict, type(None))):
            raise TypeError(f"chunk_options: wanted options of chunkflow.pack by name, got {chunk_options!r:.99}")
        for name in {"chunk_size", "k", "outputs", "seed"} & set(chunk_options or {}):
            raise TypeError(f"chunk_options: {name} has a place of its own: chunk_size, k and outputs are the "
                            "trainer's keywords, seed one of its arguments")
        self._chunks = {"chunk_size": chunk_size, "k": k, "outputs": outputs, **(chunk_options or {})}
        self._step: Step | None = None
        self._held: list[tuple[dict[str, Any], float]] = []  # micro-batches, each with the weight of its targets
        model = options.get("model", arguments[0] if arguments else None)
        asked = _balances(model)  # which TRL overwrites
        super().__init__(*arguments, **options)
        self._refuse(asked)
        self._switch_off()
        # a model that is still to be sharded may have no weights yet
        whole = not any(p.is_meta for p in self.model.parameters())
        self._made_of(self.model, check=whole).forward._check_now()
        self._warn_of_truncation()

    def _refuse(self, asked: bool) -> None:
        """Refuses options that chunks cannot support. asked: the model's config requests the routers' balance loss."""
        if self.label_smoother is not None or self.compute_loss_func is not None:
            raise UnsupportedOption("label smoothing and compute_loss_func: the loss is the weighted cross entropy")
        self._refuse_loss()
        if getattr(self.args, "loss_type", None) not in (None, "nll", "chunked_nll"):
            raise UnsupportedOption(f"loss_type {self.args.loss_type}: the loss is the weighted cross entropy")
        if getattr(self, "aux_loss_enabled", False) and (asked or self.args.router_aux_loss_coef is not None):
            raise UnsupportedOption("a balance loss of routers, which is one over a whole batch: train with "
                                    "router_aux_loss_coef=0.0, and output_router_logits=False in the model's config")
        if getattr(self.args, "packing", False) or getattr(self.args, "padding_free", False):
            raise UnsupportedOption("packing and padding_free: chunks pack sequences themselves")
        if self.args.fp16:
            raise UnsupportedOption("fp16, whose losses are scaled: use bf16")
        if getattr(self.args, "neftune_noise_alpha", None) is not None:
            raise UnsupportedOption("neftune_noise_alpha, whose noise depends on how long the rows of a call are")

    def _refuse_loss(self) -> None:
        """Refuses a compute_loss of a derived class, because it would never be called."""
        owner = next(c for c in type(self).__mro__ if "compute_loss" in vars(c))
        known = f"{owner.__module__.partition('.')[0]}.{owner.__name__}" in ("transformers.Trainer", "trl.SFTTrainer")
        if not known or "compute_loss" in vars(self):
            owned = owner.__name__ if not known else "this trainer"
            raise UnsupportedOption(f"compute_loss of {owned}, which chunks never call: the loss is the weighted cross "
                                    "entropy. Other losses, as of DPO and GRPO, take chunkflow.torch.Step in a loop of "
                                    "your own, with weights or loss")

    def _switch_off(self) -> None:
        """Switches off options that trainers switch on by themselves."""
        if self.args.gradient_checkpointing:
            warnings.warn("gradient checkpointing is off: chunk_size and k bound activations in its place",
                          stacklevel=3)
            self.args.gradient_checkpointing = self.args.activation_checkpointing = False  # two names of one
            for name in ("activation_checkpointing_disable", "gradient_checkpointing_disable"):
                if hasattr(self.model, name):
                    getattr(self.model, name)()
                    break
        if getattr(self, "aux_loss_enabled", False):
            warnings.warn("the routers' balance loss is off, for it is one over a whole batch; "
                          "router_aux_loss_coef=0.0 says that you want none", stacklevel=3)
            self.aux_loss_enabled = self.model.config.get_text_config().output_router_logits = False

    def _warn_of_truncation(self) -> None:
        """Counts the sequences that TRL truncated to max_length, or that have exactly this length."""
        most, data = getattr(self.args, "max_length", None), self.train_dataset
        if most is None or not hasattr(data, "with_format") or "input_ids" not in (data.column_names or ()):
            return
        rows = (row for batch in data.with_format("numpy").iter(1000) for row in batch["input_ids"])
        cut = sum(len(row) >= most for row in rows) if hasattr(data, "__len__") else 0
        if cut > 0:
            warnings.warn(f"{cut} of {len(data)} sequences have max_length={most} tokens, which is where TRL "
                          "truncates; chunks carry sequences of any length: SFTConfig(max_length=None)", stacklevel=3)

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
                      ) -> torch.Tensor:
        """Returns the loss of the whole step, with all of its gradients, at its last micro-batch; 0 before."""
        self._refuse_loss()
        model.train()
        steps = getattr(self, "current_gradient_accumulation_steps", self.args.gradient_accumulation_steps)
        self._held.append((inputs, self._divisor(inputs, num_items_in_batch, steps)))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batch = [(*row, 1 / divisor if divisor > 0 else 0.0) for held, divisor in self._held for row in _rows(held)]
        self._held.clear()
        tokens, ignored, weights = self._of_all_ranks(batch)
        with self.accelerator.autocast():
            loss = self._step_of(model)(tokens, ignored, weights)
        return torch.tensor(loss, dtype=torch.float64, device=self.args.device)

    def prediction_step(self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool,
                        ignore_keys: list[str] | None = None) -> tuple[Any, Any, Any]:
        """Returns the loss of all ranks' micro-batches by chunks, without TRL's entropy and token accuracy. If logits
        are needed (compute_metrics), the unchanged model runs whole sequences. Without labels there is no loss, as in
        the plain trainer."""
        if not prediction_loss_only or inputs.get("labels") is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        divisor = self._divisor(inputs, self._get_num_items_in_batch([inputs], self.args.device), 1)
        tokens, ignored, weights = self._of_all_ranks([(*row, 1 / divisor if divisor > 0 else float("nan"))
                                                       for row in _rows(inputs)])
        with torch.no_grad(), self.accelerator.autocast():
            found = self._step_of(model).log_probs(tokens)
        losses = [x[~i[1:].to(x.device)].sum() * -w for x, i, w in zip(found, ignored, weights)]
        return torch.stack(losses).sum(), None, None

    def _divisor(self, inputs: dict[str, Any], num_items_in_batch: Any, steps: int) -> float:
        """Returns the number by which the plain trainer divides the sum of a micro-batch's losses, in a step with this
        many items. It is the items, if the trainer counts them, or the micro-batch's targets. The plain trainer takes
        the mean over ranks unless the items are those of all ranks."""
        world = self.args.world_size
        if num_items_in_batch is not None and self.model_accepts_loss_kwargs:
            return float(num_items_in_batch) * (1 if self.args.average_tokens_across_devices else world)
        labels = inputs.get("labels")
        targets = 0 if labels is None else int((labels[..., 1:] != -100).sum())
        return float(targets * steps * world)

    def _step_of(self, model: torch.nn.Module) -> Step:
        if self._step is None or self._step.module is not model:  # which model_init makes anew
            self._step = self._made_of(model)
        return self._step

    def _made_of(self, model: torch.nn.Module, check: bool = True) -> Step:
        return Step(model, Causal(model, check), seed=self.args.seed, **self._chunks)

    def _of_all_ranks(self, batch: list[tuple[Any, Any, float]]) -> tuple[list[Any], list[Any], list[float]]:
        """Returns the sequences of these rows of all ranks, which of their tokens are no targets, and their weights."""
        if self.args.world_size > 1:
            everyone: list[Any] = [None] * self.args.world_size
            dist.all_gather_object(everyone, batch)
            batch = [row for of_rank in everyone for row in of_rank]
        return [x[0] for x in batch], [x[1] for x in batch], [x[2] for x in batch]


class UnsupportedOption(Unsupported, ValueError):
    """An option of the trainer that chunks cannot support."""

    def __init__(self, why: str):
        super().__init__(why, "with this option of the trainer a model")


class UnsupportedData(Unsupported, ValueError):
    """A micro-batch that chunks cannot be made of."""

    def __init__(self, why: str):
        super().__init__(why, "this data")


def _balances(model: Any) -> bool:
    """Returns True if a model's config requests its routers' balance loss."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(text, "output_router_logits", False) and getattr(text, "router_aux_loss_coef", 0.0))


def _rows(inputs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Returns the sequences of a collated micro-batch, and which of their tokens are no targets."""
    others = set(inputs) - {"input_ids", "labels", "attention_mask"}
    if others:
        raise UnsupportedData(f"micro-batches with {', '.join(sorted(others))}: chunks are made of tokens and labels "
                              "alone, so the collator must leave that out")
    if inputs.get("labels") is None:
        raise UnsupportedData("micro-batches without labels: the collator must make them (-100: no target)")
    tokens, labels = inputs["input_ids"].cpu(), inputs["labels"].cpu()
    mask = inputs["attention_mask"].cpu() != 0 if "attention_mask" in inputs else torch.ones_like(tokens) != 0
    if mask.shape != tokens.shape or not torch.equal(mask, torch.arange(tokens.shape[1]) < mask.sum(1, keepdim=True)):
        raise UnsupportedData("an attention_mask that is not ones and then zeros: pad on the right (the tokenizer's "
                              "padding_side), for behind padding on the left plain training has targets and positions "
                              "of its own")
    if (labels[~mask] != -100).any():
        raise UnsupportedData("labels of padding that are not -100")
    try:
        return list(zip(*unpad(tokens, mask, labels)))
    except ValueError as why:
        raise UnsupportedData(str(why)) from None


class Trainer(Chunked, transformers.Trainer):
    """transformers.Trainer, chunk by chunk."""
