#!/usr/bin/env python3
"""Gates for the policy `learned`: in each layer a linear map from attention's input to the logarithm of the mean attention that an entry gets
from queries at least `--near` tokens behind it, fitted by least squares to what the model does with a full cache on plain texts.

    python3 -m pip install torch transformers gguf
    python3 recipes/real/gates.py data/real/SmolLM2-135M-Instruct.Q4_1.gguf data/real/prose-train.jsonl data/real/gates
    kvtune evaluate … --set kv_cache.gates=data/real/gates --set 'kv_cache.policy="learned"'

The directory is in KVzap's layout. Models of Llama's build; whole attention matrices are made, one head at a time.
"""

import argparse
import json
import math
import pathlib

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

arguments = argparse.ArgumentParser()
arguments.add_argument("model", type=pathlib.Path, help="a model directory, or a GGUF file")
arguments.add_argument("texts", type=pathlib.Path, help="JSON lines with a field `text`")
arguments.add_argument("out", type=pathlib.Path)
arguments.add_argument("--rows", type=int, default=10)
arguments.add_argument("--tokens", type=int, default=2048, help="of each text")
arguments.add_argument("--near", type=int, default=192, help="queries nearer than this do not count")
arguments = arguments.parse_args()

torch.set_grad_enabled(False)
if arguments.model.suffix == ".gguf":
    source = (arguments.model.parent, {"gguf_file": arguments.model.name})
else:
    source = (arguments.model, {})
tokenizer = AutoTokenizer.from_pretrained(source[0], **source[1])
model = AutoModelForCausalLM.from_pretrained(source[0], dtype=torch.float32, **source[1])
config = model.config
heads, groups, layers = config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers
inputs, labels = [[] for _ in range(layers)], [[] for _ in range(layers)]


def mean_attention(module, x, rotations):
    """What each entry gets from a query that is far behind it: (tokens, KV heads)."""
    tokens = x.shape[1]
    apart = lambda linear, count: linear(x).view(1, tokens, count, module.head_dim).transpose(1, 2)
    q, k = apply_rotary_pos_emb(apart(module.q_proj, heads), apart(module.k_proj, groups), *rotations)
    distance = torch.arange(tokens).unsqueeze(1) - torch.arange(tokens)
    mean = torch.zeros(groups, tokens)
    for head in range(heads):
        group = head // (heads // groups)
        scores = (q[0, head] @ k[0, group].T) * module.scaling
        weights = scores.masked_fill(distance < 0, -math.inf).softmax(-1).masked_fill(distance < arguments.near, 0)
        mean[group] += weights.sum(0) / (distance >= arguments.near).sum(0).clamp_min(1) / (heads // groups)
    return mean.T


def note(module, _, kwargs, __):
    x = kwargs["hidden_states"]
    # The first tokens never leave, and of the last ones few queries tell.
    kept = slice(4, x.shape[1] - arguments.near - 256)
    inputs[module.layer_idx].append(x[0, kept].half())
    labels[module.layer_idx].append(mean_attention(module, x, kwargs["position_embeddings"])[kept])


for layer in model.model.layers:
    layer.self_attn.register_forward_hook(note, with_kwargs=True)
texts = [json.loads(line)["text"] for line in arguments.texts.open()][: arguments.rows]
for text in texts:
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : arguments.tokens]
    if ids.shape[1] > arguments.near + 512:
        model.model(ids)

gates, errors = {}, []
for layer in range(layers):
    x, y = torch.cat(inputs[layer]).float(), (torch.cat(labels[layer]) + 1e-6).log()
    judged = len(x) * 17 // 20
    centre, mean = x[:judged].mean(0), y[:judged].mean(0)
    around = x[:judged] - centre
    ridge = 0.0002 * judged * around.square().mean() * torch.eye(x.shape[1])
    weight = torch.linalg.solve(around.T @ around + ridge, around.T @ (y[:judged] - mean)).T
    bias = mean - weight @ centre
    gates[f"layers.{layer}.weight"], gates[f"layers.{layer}.bias"] = weight.contiguous(), bias
    errors.append((x[judged:] @ weight.T + bias - y[judged:]).square().mean() / y[judged:].var(0).mean())
arguments.out.mkdir(parents=True, exist_ok=True)
save_file(gates, arguments.out / "model.safetensors")
shape = {"input_dim": config.hidden_size, "output_dim": groups, "hidden_dim": None, "n_modules": layers}
(arguments.out / "config.json").write_text(json.dumps({"model_type": "kvzap", **shape}))
print(f"{1 - sum(errors) / layers:.2f} of the variance explained on texts that were not fitted, in the mean over layers")
