"""Transformers' Trainer, and trainers made of it such as TRL's SFTTrainer, with chunks.

    trainer = chunkflow.trainer.Trainer(model=model, args=args, train_dataset=data, chunk_size=4096)

    class SFTTrainer(chunkflow.trainer.Chunked, trl.SFTTrainer):
        pass

All micro-batches of a step (gradient accumulation) and of all ranks are planned as one batch. Padding (on the right) is
taken off again, and tokens whose label is -100 are no targets; the loss is the mean over all targets, as the plain
trainer's (which for GPT-2, CTRL and BERT also counts first tokens, which nothing predicts). Evaluation's loss comes from
chunks as well, forwards alone, so that a sequence which could be trained can be evaluated. Sequences are packed by the
plan: packing and padding_free of the collator stay off.

Three defaults of TRL's are for whole sequences. Gradient checkpointing is switched off, since K bounds activations. The
routers' balance loss of mixtures, which is one over a whole batch, is switched off unless router_aux_loss_coef asks for
it, which is refused. max_length truncates at 1024 tokens; a warning says where. TRL's entropy and token accuracy, which
need all logits, are not logged.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers

from .huggingface import Causal, Unsupported
from .torch import Step

__all__ = ["Chunked", "Trainer"]


class Chunked:
    """A mixin that stands before a trainer's class. Its own keywords are chunk_size, k, outputs (see
    chunkflow.torch.Batch) and, in chunk_options, those of chunkflow.pack."""

    def __init__(self, *arguments: Any, chunk_size: int, k: int = 1, outputs: bool | None = None,
                 chunk_options: dict[str, Any] | None = None, **options: Any):
        if not isinstance(chunk_options, (dict, type(None))):
            raise TypeError(f"chunk_options: wanted options of chunkflow.pack by name, got {chunk_options!r:.99}")
        self._chunks = {"chunk_size": chunk_size, "k": k, "outputs": outputs, **(chunk_options or {})}
        self._step: Step | None = None
        self._held: list[dict[str, Any]] = []
        super().__init__(*arguments, **options)
        self._refuse()
        self._switch_off()
        whole = not any(p.is_meta for p in self.model.parameters())  # what is to be sharded may have nothing yet
        self._made_of(self.model, check=whole).forward._check_now()
        self._warn_of_truncation()

    def _refuse(self) -> None:
        """Refuses options that chunks cannot give."""
        if self.label_smoother is not None or self.compute_loss_func is not None:
            raise Unsupported("label smoothing and compute_loss_func: the loss is the weighted cross entropy")
        if getattr(self.args, "loss_type", None) not in (None, "nll", "chunked_nll"):
            raise Unsupported(f"loss_type {self.args.loss_type}: the loss is the weighted cross entropy")
        if getattr(self, "aux_loss_enabled", False) and self.args.router_aux_loss_coef is not None:
            raise Unsupported("a balance loss of routers, which is one over a whole batch: train with "
                              "router_aux_loss_coef=0.0")
        if getattr(self.args, "packing", False) or getattr(self.args, "padding_free", False):
            raise Unsupported("packing and padding_free: chunks pack sequences themselves")
        if self.args.fp16:
            raise Unsupported("fp16, whose losses are scaled: use bf16")
        if getattr(self.args, "neftune_noise_alpha", None) is not None:
            raise Unsupported("neftune_noise_alpha, whose noise depends on how long the rows of a call are")

    def _switch_off(self) -> None:
        """Takes back options that trainers switch on by themselves."""
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
        """Counts the sequences that TRL has cut to max_length, or that are exactly as long."""
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
        """The loss of the whole step at its last micro-batch, with all of its gradients; 0 before."""
        model.train()
        self._held.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batch = [row for held in self._held for row in _rows(held)]
        self._held.clear()
        tokens, ignored = self._of_all_ranks(batch)
        with self.accelerator.autocast():
            loss = self._step_of(model)(tokens, ignored)
        return torch.tensor(loss, dtype=torch.float64, device=self.args.device)

    def prediction_step(self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool,
                        ignore_keys: list[str] | None = None) -> tuple[Any, Any, Any]:
        """The loss of all ranks' micro-batches by chunks, without TRL's entropy and token accuracy. Where logits are
        wanted (compute_metrics), they come from the model as it is, which runs whole sequences."""
        if not prediction_loss_only or "labels" not in inputs:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        tokens, ignored = self._of_all_ranks(_rows(inputs))
        with torch.no_grad(), self.accelerator.autocast():
            found = torch.cat(self._step_of(model).log_probs(tokens))
        targets = torch.from_numpy(~np.concatenate([x[1:] for x in ignored])).to(found.device)
        return -found[targets].sum() / targets.sum().clamp(min=1), None, None

    def _step_of(self, model: torch.nn.Module) -> Step:
        if self._step is None or self._step.module is not model:  # which model_init makes anew
            self._step = self._made_of(model)
        return self._step

    def _made_of(self, model: torch.nn.Module, check: bool = True) -> Step:
        return Step(model, Causal(model, check), seed=self.args.seed, **self._chunks)

    def _of_all_ranks(self, batch: list[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
        """The sequences of these rows of all ranks, and which of their tokens are no targets."""
        if self.args.world_size > 1:
            everyone: list[Any] = [None] * self.args.world_size
            dist.all_gather_object(everyone, batch)
            batch = [row for of_rank in everyone for row in of_rank]
        return [tokens for tokens, _ in batch], [ignored for _, ignored in batch]


def _rows(inputs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """The sequences of a collated micro-batch, and which of their tokens are no targets."""
    others = set(inputs) - {"input_ids", "labels", "attention_mask"}
    if others:
        raise Unsupported(f"micro-batches with {', '.join(sorted(others))}: chunks are made of tokens and labels "
                          "alone, so the collator must leave that out")
    if "labels" not in inputs:
        raise Unsupported("micro-batches without labels: the collator must make them (-100: no target)")
    made = []
    for i, tokens in enumerate(inputs["input_ids"].cpu()):
        labels = inputs["labels"][i].cpu()
        mask = torch.ones_like(tokens) if "attention_mask" not in inputs else inputs["attention_mask"][i].cpu()
        if mask.shape != tokens.shape or not torch.equal(mask != 0, torch.arange(len(tokens)) < (mask != 0).sum()):
            raise Unsupported("an attention_mask that is not ones and then zeros: pad on the right (the tokenizer's "
                              "padding_side), for behind padding on the left plain training has targets and positions "
                              "of its own")
        if (labels[mask == 0] != -100).any():
            raise Unsupported("labels of padding that are not -100")
        tokens, labels = tokens[mask != 0], labels[mask != 0]
        ignored = labels == -100
        if not torch.equal(tokens[~ignored], labels[~ignored]):
            raise Unsupported("labels that are not the tokens themselves or -100")
        made.append((tokens.numpy(), ignored.numpy()))
    return made


class Trainer(Chunked, transformers.Trainer):
    """transformers.Trainer, chunk by chunk."""
