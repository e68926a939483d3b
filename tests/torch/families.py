"""Tests every family of Transformers' causal language models, tiny and with random weights: it trains correctly, or is
refused by name.

    python tests/torch/families.py [KIND...]

Gradients of chunks are compared with those of the plain model, which sees each sequence alone, in float64. Casts to
float32 in a model (norms, rotary embedding, routers, softmax) stay in float64 under Float64 below.
"""

import pathlib
import sys
import time
import warnings
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch.overrides import TorchFunctionMode

from judge import check, finish, run

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tools" / "python"))
import chunkflow.huggingface
import chunkflow.torch
from chunkflow.huggingface import Causal, Unsupported, pin_rope

TOLERANCE = 1e-10
LENGTHS = (40, 7, 13, 1, 29, 0, 5)
CHUNK = 16
SECONDS = 2.0  # of a processor, for a family

# Members that make any model small, if its configuration has them.
TINY = {name: value for names, value in (
    ("vocab_size", 97), ("hidden_size n_embd d_model dim word_embed_proj_dim embedding_size", 32),
    ("intermediate_size n_inner ffn_dim decoder_ffn_dim ffn_hidden_size ffn_size hidden_dim", 48),
    ("num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers", 2),
    ("num_attention_heads n_head n_heads decoder_attention_heads num_experts num_local_experts n_routed_experts", 4),
    ("num_key_value_heads num_experts_per_tok moe_topk moe_num_experts_per_tok", 2), ("moe_num_experts", 4),
    ("moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size q_lora_rank kv_lora_rank", 16),
    ("head_dim kv_channels qk_nope_head_dim v_head_dim global_head_dim hidden_size_per_layer_input", 8),
    ("max_position_embeddings n_positions", 512), ("qk_rope_head_dim rotary_dim", 4), ("qk_head_dim", 12),
    ("n_group topk_group first_k_dense_replace num_shared_experts n_shared_experts zero_expert_num", 1),
    ("attention_dropout attn_pdrop attention_probs_dropout_prob hidden_dropout hidden_dropout_prob resid_pdrop", 0.0),
    ("embd_pdrop dropout residual_dropout activation_dropout embed_dropout layerdrop", 0.0),
    ("router_jitter_noise input_jitter_noise", 0.0), ("sliding_window", 9), ("vocab_size_per_layer_input", 97),
    ("linear_num_value_heads linear_num_heads mamba_num_heads", 4), ("linear_num_key_heads mamba_n_groups n_groups", 2),
    ("linear_key_head_dim linear_value_head_dim linear_head_dim ssm_state_size mamba_d_state mamba_head_dim", 8),
    ("mamba_n_heads", 4), ("mamba_d_head mamba_chunk_size chunk_size attention_chunk_size", 16), ("floor_scale", 3),
    ("mamba_d_ssm", 64), ("moe_shared_expert_intermediate_size", 16),
    ("pad_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2), ("is_decoder use_cache", True),
) for name in names.split()}

LLAMA_LIKE = "arcee cohere ernie4_5 exaone4 gemma glm glm4 granite helium hyperclovax internlm3 iquestcoder jais2 " \
             "llama ministral3 nanochat nemotron olmo olmo2 phi phi3 persimmon qwen2 qwen3 seed_oss smollm3 stablelm " \
             "starcoder2"
OWN_WAYS = "apertus bert bert-generation biogpt bitnet ctrl diffllama electra ernie flint gpt2 gpt_bigcode gpt_neox " \
           "hrm_text kolibri1 laguna modernbert-decoder opt vaultgemma"
WINDOWED = "beam cohere2 cwm gemma2 gemma3_text gemma3n_text gemma4_text gpt_oss granite_swa granitemoe_swa " \
           "mimo_v2_flash mistral olmo3"
MIXTURES = "aria_text cohere2_moe ernie4_5_moe exaone_moe flex_olmo glm4_moe granitemoe granitemoeshared hy_v3 " \
           "mellum minimax_m2 mixtral olmoe qwen2_moe qwen3_moe solar_open"
LATENT = "axk1 deepseek_v2 deepseek_v3 glm4_moe_lite longcat_flash minicpm3 youtu"
BLOCKS = "llama4_text"
RECURRENT = "bailing_hybrid bamba falcon_h1 granitemoehybrid kimi_linear lfm2 lfm2_moe lfm3 mamba2 nemotron_h " \
            "olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next zamba2"
RIGHT = f"{LLAMA_LIKE} {OWN_WAYS} {WINDOWED} {MIXTURES} {LATENT} {BLOCKS} {RECURRENT}".split()

REFUSED = {kind: words for kinds, words in (
    ("bloom codegen gpt_neo gpt_neox_japanese gptj megatron-bert openai-gpt mvp rembert roformer rwkv xlm big_bird",
     "layers take their attention from ALL_ATTENTION_FUNCTIONS"),
    ("falcon mpt", "a first pass of it ends in "),
    ("mamba falcon_mamba jamba", "do not go on from the state that they are given"),
    ("minimax recurrent_gemma", "whose state is not carried"),
    ("deepseek_v32 deepseek_v4 hy_v4", "whose state is not carried"),
    ("bart blenderbot marian mbart pegasus roberta camembert xlm-roberta data2vec-text", "its positions or a state"),
    ("doge", "a mask or bias of its own"),
    ("moshi", "sliding windows that attention is not told of"),
) for kind in kinds.split()}

# Further members, where the common ones are not enough.
MORE = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8},
    "nemotron": {"num_key_value_heads": 2},
}

# Complete members, where the common ones are wrong.
BASE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2}
GEMMA = {**BASE, "sliding_window": 9, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97,
         "layer_types": ["sliding_attention", "full_attention"]}
WHOLE = {
    "deepseek_v2": {**BASE, "num_key_value_heads": 4, "head_dim": 4, "num_experts_per_tok": 2, "n_routed_experts": 4,
                    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4,
                    "qk_nope_head_dim": 8, "v_head_dim": 8, "moe_intermediate_size": 16,
                    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "gemma3n_text": {**GEMMA, "num_hidden_layers": 4, "layer_types": 2 * GEMMA["layer_types"], "laurel_rank": 4,
                     "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4, "altup_num_inputs": 2},
    "gemma4_text": {**GEMMA, "global_head_dim": 8, "num_kv_shared_layers": 0},
    "gpt_neo": {"vocab_size": 97, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 9,
                "attention_types": [[["global", "local"], 1]]},
    "recurrent_gemma": {**BASE, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 9},
    "zamba2": {**BASE, "num_key_value_heads": 4, "layer_types": ["linear_attention", "hybrid", "hybrid"],
               "hybrid_layer_ids": [1, 2], "num_hidden_layers": 3, "n_mamba_heads": 4, "mamba_headdim": 16,
               "mamba_d_state": 8, "chunk_size": 16, "num_mem_blocks": 1},
}


class Float64(TorchFunctionMode):
    """Turns casts to float32 into casts to float64."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        def real(x):
            return torch.float64 if x is torch.float32 else x
        if function is torch.Tensor.float:
            function, arguments = torch.Tensor.to, (arguments[0], torch.float64)
        return function(*map(real, arguments), **{name: real(x) for name, x in (options or {}).items()})


def tiny(kind, **more):
    """Makes a model of this family. It has each kind of layer that the family mixes once, or its only kind twice."""
    make = transformers.CONFIG_MAPPING[kind]
    members = WHOLE.get(kind) or common_members(make)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(make(**{**members, **MORE.get(kind, {}), **more}),
                                                          experts_implementation="eager").double()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.double() if buffer.dtype == torch.float32 else buffer)
    return model.train()


def common_members(make):
    """Returns the members of TINY that a configuration has."""
    whole = make()

    def has(name):
        return (getattr(whole, name, None) is not None
                and not isinstance(getattr(make, make.attribute_map.get(name, name), None), property))

    members = {name: value for name, value in TINY.items() if has(name)}
    members["vocab_size"] = TINY["vocab_size"]
    if getattr(whole, "kv_lora_rank", None):
        members.update(num_key_value_heads=4, head_dim=4)
    for name in ("layer_types", "mlp_layer_types"):
        if has(name) and getattr(whole, name):
            kinds = list(dict.fromkeys(getattr(whole, name)))
            members[name] = (kinds * 2)[:max(2, len(kinds))]
            members["num_hidden_layers"] = len(members[name])
    return members


def sequences_of(model, lengths=LENGTHS):
    words = model.config.get_text_config().vocab_size
    return [np.random.default_rng(i).integers(3, words, n) for i, n in enumerate(lengths)]


def plain_step(model, sequences, ignored=None):
    """Computes the reference: each sequence alone, with the mean over all targets."""
    wanted = [np.ones(len(s) - 1, bool) if ignored is None or ignored[i] is None else ~np.asarray(ignored[i], bool)[1:]
              for i, s in enumerate(sequences) if len(s) > 1]
    n_targets, total = sum(int(w.sum()) for w in wanted), 0.0
    for s, w in zip((s for s in sequences if len(s) > 1), wanted):
        tokens = torch.as_tensor(np.asarray(s))[None]
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
        losses = F.cross_entropy(logits, tokens[0, 1:], reduction="none")
        loss = losses[torch.from_numpy(w)].sum() / n_targets
        loss.backward()
        total += loss.item()
    return total


def gradients(model):
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def differ(got, wanted):
    """Returns the largest relative difference of a tensor; a tensor of almost zeros is compared relative to the largest
    of all."""
    most = max(float(g.norm()) for g in wanted.values())
    zero = torch.zeros(())
    return float(np.max([float((got.get(name, zero) - wanted.get(name, zero)).norm())
                         / max(float(wanted.get(name, zero).norm()), 1e-6 * most) for name in {*got, *wanted}]))


def chunked_against_plain(model, sequences=None, k=1, **options):
    """Returns the differences of loss and gradients."""
    sequences = sequences_of(model) if sequences is None else sequences
    loss = chunkflow.torch.Step(model, Causal(model), chunk_size=CHUNK, k=k, **options)(sequences)
    got = gradients(model)
    wanted_loss = plain_step(model, sequences)
    return max(abs(loss / wanted_loss - 1), differ(got, gradients(model)))


def refused(call):
    try:
        call()
    except Unsupported as why:
        return str(why)
    return "it was taken"


class Watch:
    """Counts replays, all attention calls, those of replays, and those that take kept outputs. Inside it, short windows
    also keep their outputs."""

    def __init__(self):
        self.replays = self.calls = self.attends = self.taken = 0
        self.running = False

    def __enter__(self):
        run, attend = chunkflow.torch.Batch.run_forward, chunkflow.torch._attend

        def passes(batch, chunk, keep):
            ran = batch.__dict__.setdefault("ran", set())
            self.running = keep and chunk in ran
            self.replays += self.running
            ran.add(chunk)
            run(batch, chunk, keep)
            self.running = False

        def attends(*given):
            self.calls += 1
            self.attends += self.running
            return attend(*given)
        take = chunkflow.torch._Outputs.take

        def takes(outputs, query):
            found = take(outputs, query)
            self.taken += found is not None
            return found
        self.patches = [mock.patch.object(chunkflow.torch.Batch, "run_forward", passes),
                        mock.patch.object(chunkflow.torch, "_attend", attends),
                        mock.patch.object(chunkflow.torch._Outputs, "take", takes),
                        mock.patch.object(chunkflow.torch, "_LEAST", 1)]
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self.patches:
            patch.stop()


def check_kind(kind):
    began = time.process_time()
    try:
        with Float64():
            if kind in RIGHT:
                model = tiny(kind)
                with Watch() as seen:
                    error = max(chunked_against_plain(model, k=k) for k in (1, 2))
                holds = error <= TOLERANCE and seen.attends == 0 and seen.replays == 4
                holds &= seen.taken > 0 or seen.calls == 0  # some have no attention
                what = f"gradients and loss differ by {error:.1e}, {seen.taken} outputs of {seen.replays} replays"
            else:
                what = refused(lambda: Causal(tiny(kind)))
                holds = REFUSED[kind] in what and what.startswith(kind)
    except Exception as error:  # Transformers raises any type: the other families still run
        holds, what = False, f"{type(error).__name__}: {error}"
    seconds = time.process_time() - began
    check(kind, holds and seconds <= SECONDS, f"{what[:140]} ({seconds:.2f} s)")


# One family for each kind of layer, and what makes its state longer or shorter than a chunk.
KINDS = (("gemma3_text", "windows", {}), ("gpt_oss", "sinks", {}), ("deepseek_v3", "latents", {}),
         ("qwen3_moe", "experts", {}), ("llama4_text", "blocks", {"attention_chunk_size": 9}),
         ("qwen3_next", "gated delta", {}),
         ("kimi_linear", "delta by channel, latents", {}), ("mamba2", "Mamba", {}), ("lfm2", "convolutions", {}))


def check_kinds():
    """Tests each kind of layer with replays and without, with some chunks that have only a sequence's last token."""
    for kind, what, more in KINDS:
        with Float64():
            model, worst = tiny(kind, **more), 0.0
            for k, lengths in ((2, LENGTHS), (99, LENGTHS), (1, (33, 2, 17, 3, 50))):
                worst = max(worst, chunked_against_plain(model, sequences_of(model, lengths), k))
        check(f"{what} ({kind}), K and borders", worst <= TOLERANCE, f"{worst:.1e}")
    # windows of a chunk and slightly less, which end in several even chunks; and no window, which keeps nothing
    with Float64():
        model, worst = tiny("gemma3_text"), 0.0
        for window in (1, 2, 15, 16, 17, 30):
            for layer in model.modules():
                if getattr(layer, "sliding_window", None):
                    layer.sliding_window = window
            model.config.sliding_window = window
            worst = max(worst, *(chunked_against_plain(model, split=split) for split in ("full", "even")))
        check("windows of other lengths", worst <= TOLERANCE, f"{worst:.1e}")
        check("rows that windows keep", *rows_kept())
        model = tiny("qwen3_next")
        step, sequences = chunkflow.torch.Step(model, Causal(model), chunk_size=CHUNK), sequences_of(model)
        found, worst = step.log_probs(sequences), 0.0
        for s, f in zip(sequences, found):
            if len(s) > 1:
                tokens = torch.from_numpy(s)
                wanted = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].log_softmax(1)
                worst = max(worst, float((f - wanted.gather(1, tokens[1:, None])[:, 0]).abs().max()))
        check("log-probabilities through recurrent layers", worst <= TOLERANCE, f"{worst:.1e}")


def rows_kept():
    """Five chunks of gpt-oss, in which every second layer has a window of nine: all rows, or eight at a border."""
    model, most = tiny("gpt_oss"), {}
    run_forward = chunkflow.torch.Batch.run_forward

    def watched(self, chunk, keep):
        run_forward(self, chunk, keep)
        for rows in self.rows.values():
            for x in rows:
                kind = "border" if isinstance(x, dict) else "rows"
                size = max(y.shape[2] for y in x.values()) if isinstance(x, dict) else x.shape[2]
                most[kind] = max(most.get(kind, 0), size)
    with mock.patch.object(chunkflow.torch.Batch, "run_forward", watched):
        chunkflow.torch.Step(model, Causal(model), chunk_size=CHUNK)(sequences_of(model, (80,)))
    return most == {"rows": 80, "border": 8}, str(most)


def an_older_border(self, chunk, grad):
    """Replaces Batch._prefix: a chunk's prefix is the one that the chunk before it had."""
    found, path = right_prefix(self, chunk, grad), self.path(chunk)
    for i, state in enumerate(self.rows[path[-1][0]] if path else ()):
        if isinstance(state, dict):
            found[i] = state[min(state)].detach().requires_grad_(grad)
        else:
            found[i] = found[i].detach().roll(1, -2).requires_grad_(grad)  # a prefix shifted by one row
    return found


class NeighbourStates(chunkflow.huggingface._States):
    """A slice that begins its sequence gets the states of the previous slice in the chunk."""

    last = None

    def __init__(self, *given):
        super().__init__(*given)
        last, NeighbourStates.last = NeighbourStates.last, self
        same = last is not None and not self.now and NeighbourStates.slices > 0
        NeighbourStates.slices += 1
        if same:
            self.now = dict(last.now)


def starting_anew(self, *arguments, **named):
    NeighbourStates.slices = 0
    return right_call(self, *arguments, **named)


right_prefix = chunkflow.torch.Batch._prefix
right_call = chunkflow.huggingface._Recurrent.__call__


def check_faults():
    """Deliberate mistakes that tests must detect: lost gradients of the prefix, a state of another border, a
    neighbour's state."""
    batch, hugging = chunkflow.torch.Batch, chunkflow.huggingface
    faults = (("no carry backwards", [mock.patch.object(batch, "_hand_back", lambda *a: None)]),
              ("the state of another border", [mock.patch.object(batch, "_prefix", an_older_border)]),
              ("the state of the packed neighbour", [mock.patch.object(hugging, "_States", NeighbourStates),
                                                     mock.patch.object(hugging._Recurrent, "__call__", starting_anew)]))
    for kind, what, more in KINDS:
        for fault, patches in faults:
            with Float64():
                model = tiny(kind, **more)
                forward = Causal(model, check=False)
                if not forward.recurrent and "neighbour" in fault:
                    continue
                sequences = sequences_of(model)
                plain_step(model, sequences)
                wanted = gradients(model)
                for patch in patches:
                    patch.start()
                chunkflow.torch.Step(model, forward, chunk_size=CHUNK)(sequences)
                for patch in patches:
                    patch.stop()
                error = differ(gradients(model), wanted)
            check(f"{what} ({kind}), {fault}", error > 1e-6, f"seen, {error:.1e}")


def check_ropes():
    """Frequencies that depend on the call are refused; with fixed ones results are right."""
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    long = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 16}
    for kind, rope, more in (("llama", dynamic, {"max_position_embeddings": 16}), ("phi3", long, {})):
        with Float64():
            model = tiny(kind, rope_parameters=rope, **more)
            check(f"{kind}, {rope['rope_type']}", "pin_rope" in refused(lambda: Causal(model)), "refused")
            pin_rope(model, 40)
            error = chunked_against_plain(model)
        check(f"{kind}, {rope['rope_type']} pinned", error <= TOLERANCE, f"{error:.1e}")


def check_set_up():
    """Requests for features that chunks cannot support."""
    with Float64():
        mixture, llama = tiny("mixtral", output_router_logits=True), tiny("llama")
        check("balance losses", "load_balancing_loss_func" in refused(lambda: Causal(mixture)), "refused")
        full = tiny("qwen3_moe", capacity_factor=1.25)
        check("experts that drop tokens", "capacity_factor drops" in refused(lambda: Causal(full)), "refused")
        step = chunkflow.torch.Step(llama, Causal(llama), chunk_size=CHUNK)
        llama.gradient_checkpointing_enable()
        check("gradient checkpointing", "replays" in refused(lambda: step(sequences_of(llama))), "refused")
        llama.gradient_checkpointing_disable()
        drops = tiny("llama", attention_dropout=0.1)
        drops = chunkflow.torch.Step(drops, Causal(drops), chunk_size=CHUNK)
        check("dropout in attention", "dropout" in refused(lambda: drops(sequences_of(llama))), "refused")
        before = llama(input_ids=torch.arange(3, 9)[None]).logits
        step(sequences_of(llama))
        after = llama(input_ids=torch.arange(3, 9)[None]).logits
        check("the model is as it was outside a step", torch.equal(before, after), "the same bits")


def main(*kinds):
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}; float64, tolerance {TOLERANCE}")
    for kind in kinds or (*RIGHT, *REFUSED):
        run(check_kind, kind)
    if not kinds:
        for test in (check_kinds, check_faults, check_ropes, check_set_up):
            run(test)
        print(f"{len(RIGHT)} families right, {len(REFUSED)} refused by name")
    return finish()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
