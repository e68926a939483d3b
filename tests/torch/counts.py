"""Compares the command's parameter counts with Transformers' own: python tests/torch/counts.py COMMAND [KIND...]

Covers every family that the command reads, as Transformers saves it by default, and 250 tiny models with drawn flags
and lists of layers. Every second file then lacks members for which Transformers has defaults. A count is that of the
language model with its head, which Transformers makes on the meta device, without parameters that have no gradient (the
bias of ERNIE's router). The command must refuse what it cannot describe, by the name of a member.
"""

import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import warnings

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from judge import check, finish, run

READER = pathlib.Path(__file__).resolve().parents[2] / "tools" / "command" / "config_json.c"
DRAWN, SEED = 250, 1

SIZES = {name: values for names, values in (
    ("vocab_size", (96, 131)), ("hidden_size", (32, 48)), ("intermediate_size intermediate_size_mlp", (40, 56)),
    ("num_hidden_layers", (2, 3, 5)), ("num_attention_heads linear_num_value_heads mamba_num_heads", (4,)),
    ("num_key_value_heads", (1, 2, 4)), ("head_dim v_head_dim", (8, 12)), ("kv_lora_rank", (16,)),
    ("moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size", (16, 24)),
    ("num_experts num_local_experts n_routed_experts moe_num_experts", (4, 8)),
    ("num_experts_per_tok n_shared_experts moe_k moe_topk", (1, 2)), ("moe_num_shared_experts", (0, 1, 2)),
    ("first_k_dense_replace moe_layer_start_index", (0, 1, 9)), ("moe_layer_end_index", (-1, 1)), ("q_lora_rank", (None, 16)), ("qk_rope_head_dim", (4,)),
    ("qk_nope_head_dim linear_key_head_dim linear_value_head_dim ssm_state_size mamba_head_dim linear_head_dim", (8,)),
    ("decoder_sparse_step interleave_moe_layer_step moe_layer_interval", (1, 2)),
    ("linear_num_key_heads n_groups", (1, 2)),
    ("linear_num_heads full_attention_interval linear_conv_kernel_dim conv_kernel", (2, 4)),
    ("moe_latent_size", (None, None, None, 16)), ("n_group topk_group", (1,)), ("pad_token_id", (0,)),
    ("attention_chunk_size sliding_window", (9,)),
) for name in names.split()}

# Lists with a word for each layer, or with numbers of layers.
LISTS = {"mlp_layer_types": ("dense", "sparse"), "moe_layers": None, "mlp_only_layers": None,
         "layers_block_type": ("linear_attention", "full_attention", "moe", "mlp")}
# Sizes of a published model, if the defaults make no valid model: Hunyuan-A13B.
PUBLISHED = {"hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": [8] * 32, "intermediate_size": 3072,
                                "moe_intermediate_size": [3072] * 32, "num_key_value_heads": 8, "vocab_size": 128167,
                                "tie_word_embeddings": True}}
# Members that a family's defaults lack, though published models have them.
LACKING = {"deepseek_v2": "num_experts_per_tok", "glm4_moe": "head_dim"}
NO_FLAGS = {"return_dict", "output_hidden_states", "is_encoder_decoder"}


def class_of(config):
    """Returns Transformers' class for a configuration, or None. Prefers the class with images."""
    makers = transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM
    return next((auto for auto in makers if type(config) in auto._model_mapping), None)


def kinds_read():
    """Returns the families of the command's table that Transformers has, and their language models."""
    names = re.findall(r'\{\.name = "(\w+)", \.', READER.read_text())
    return [kind for name in names for kind in (name, name + "_text")
            if kind in transformers.CONFIG_MAPPING and class_of(transformers.CONFIG_MAPPING[kind]())]


def counted(command, path):
    """Returns the command's count for a file, or the sentence of its refusal."""
    ran = subprocess.run([command, "memory", "--chunk-size", "1K", "--json", "-", "--config", path],
                         capture_output=True, text=True)
    return json.loads(ran.stdout)["parameters"] if ran.returncode == 0 else ran.stderr.strip()


def built(folder):
    """Counts the parameters of the language model and head that Transformers makes from a file."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = class_of(config).from_config(config)
    model.tie_weights()
    return sum(p.numel() for name, p in model.named_parameters()
               if p.requires_grad and not re.search("vis|multi_modal", name))


def members_of(make, rng):
    """Draws sizes of SIZES, and some of the class's flags and lists."""
    members = {}
    for name, field in make.__dataclass_fields__.items():
        if name in SIZES:
            members[name] = rng.choice(SIZES[name])
        elif field.type in (bool, bool | None) and name not in NO_FLAGS and rng.random() < 0.4:
            members[name] = rng.random() < 0.5
    layers = members.get("num_hidden_layers", 4)
    for name in LISTS.keys() & make.__dataclass_fields__.keys():
        if rng.random() < 0.3:
            members[name] = ([rng.choice(LISTS[name]) for _ in range(layers)] if LISTS[name] else
                             [layer for layer in range(layers) if rng.random() < 0.5])
    return members


def draw(kind, rng, folder):
    """Saves a tiny configuration of a family. Returns its path."""
    make = transformers.CONFIG_MAPPING[kind]
    text = make.sub_configs.get("text_config")
    outer = {"tie_word_embeddings": rng.random() < 0.5} if rng.random() < 0.5 else {}
    config = make(text_config=members_of(text, rng), **outer) if text else make(**members_of(make, rng))
    config.save_pretrained(folder)
    path = pathlib.Path(folder) / "config.json"
    if rng.random() < 0.5:
        whole = json.loads(path.read_text())
        part = whole.get("text_config", whole)
        for name in [name for name in part if name not in ("model_type", "q_lora_rank") and rng.random() < 0.1]:
            del part[name]
        path.write_text(json.dumps(whole))
    return path


def test_all(command, *kinds):
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    kinds, rng, found = kinds or kinds_read(), random.Random(SEED), []
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            transformers.CONFIG_MAPPING[kind](**PUBLISHED.get(kind, {})).save_pretrained(folder)
            got, wanted = counted(command, f"{folder}/config.json"), built(folder)
            check(kind, got == wanted or LACKING.get(kind, "?") in str(got), f"{got}, {wanted} in Transformers")
        while len(found) < DRAWN:
            kind = kinds[len(found) % len(kinds)]
            path = draw(kind, rng, folder)
            try:
                wanted = built(folder)
            # impossible combinations of sizes
            except (AssertionError, StrictDataclassError, TypeError, ZeroDivisionError):
                continue
            found.append(counted(command, path))
            holds = found[-1] == wanted or isinstance(found[-1], str) and re.search(r"json:1: .*_", found[-1])
            check(f"{kind}, drawn", holds, f"{found[-1]}, {wanted} in Transformers" + (not holds) * path.read_text())
    read = sum(isinstance(x, int) for x in found)
    check("most are read", read >= 0.6 * DRAWN, f"{read} of {DRAWN}")


def main(command, *kinds):
    run(test_all, command, *kinds)
    return finish()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
