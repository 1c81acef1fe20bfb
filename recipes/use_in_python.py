#!/usr/bin/env python3
"""Runs an adapter with Transformers and PEFT, its cache compressed by the press of kvpress that is nearest to its policy.

docs/guides/use-in-python.md says what differs from kvtune's own cache. `--prompt FILE` continues a text; `--tokens FILE` compares losses,
and with `--dump DIR` choices with those of `kvtune verify --dump DIR` on the same file.
"""

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path

import kvpress
import torch
from peft import PeftModel
from safetensors import safe_open
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging

# Their scores are right for part of a prompt too: they need its keys and its last queries.
BY_CHUNKS = ("lastrec", "streaming-llm", "keydiff", "knorm", "tova", "snapkv")


class AttentionMass(kvpress.ObservedAttentionPress):
    """Attention that a token has received, as a sum: kvpress divides by the number of queries, which favours the last tokens."""

    def score(self, module, hidden_states, keys, *rest):
        return super().score(module, hidden_states, keys, *rest) * torch.arange(keys.shape[2], 0, -1, device=keys.device)


def press_of(file):
    """The policy's name in `kv_policy.json`, and the press nearest to it."""
    if file["version"] != 1 or any(window is not None for window in file["windows"]) or file["rope_scaling"] is not None:
        raise SystemExit("kv_policy.json: only version 1, without sliding windows and with the base's own positions, is understood here")
    ((name, given),) = (file["policy"] if isinstance(file["policy"], dict) else {file["policy"]: {}}).items()
    if file["buffer"] != "plain" or (max(file["grace"]) and name != "snapkv"):
        print("note: kvpress knows neither the quantised buffer nor the grace period of kv_policy.json", file=sys.stderr)
    sinks = max(file["sinks"])
    if name in ("lastrec", "streaming-llm"):
        return name, kvpress.StreamingLLMPress(n_sink=sinks)
    if name in ("h2o", "h2o-orig"):
        return name, kvpress.ObservedAttentionPress() if given.get("normalize_scores") else AttentionMass()
    if name == "snapkv":
        return name, kvpress.SnapKVPress(window_size=max(file["grace"]), kernel_size=given.get("kernel_size", 5))
    if name == "expected-attention":
        return name, kvpress.ExpectedAttentionPress(n_sink=sinks)
    if name in (plain := {"keydiff": kvpress.KeyDiffPress, "knorm": kvpress.KnormPress, "tova": kvpress.TOVAPress}):
        return name, plain[name]()
    raise SystemExit(f"kv_policy.json: kvpress has nothing like the policy `{name}`")


def set_length(press, slots, tokens):
    """Lets `press` keep `slots` of `tokens`. The half absorbs what kvpress rounds down."""
    press.compression_ratio = max(0.0, 1.0 - (slots + 0.5) / tokens)


@torch.no_grad()
def prefill(model, ids_1t, press):
    """Runs a prompt densely, then compresses. Returns the cache, and the last token's logits `(1, 1, V)`."""
    cache = DynamicCache()
    with press(model) if press else nullcontext():
        return cache, model(ids_1t, past_key_values=cache, logits_to_keep=1).logits


@torch.no_grad()
def extend(model, ids_1n, cache, start):
    """Runs tokens behind a compressed cache, at their places in the whole sequence. Returns logits `(1, n, V)`."""
    positions = torch.arange(start, start + ids_1n.shape[1], device=ids_1n.device)[None]
    return model(ids_1n, past_key_values=cache, position_ids=positions).logits


def at_once(model, ids_1t, prompt, press):
    """Logits `(1, n, V)` of the tokens from the prompt's last on, and each layer's and head's keys behind the prompt."""
    cache, last = prefill(model, ids_1t[:, :prompt], press)
    keys = [head for layer in cache.layers for head in layer.keys[0].float().cpu()]
    return torch.cat([last, extend(model, ids_1t[:, prompt:], cache, prompt)], 1), keys


def places(few_nd, all_td):
    """The places of some keys among all of them."""
    place = {key.tobytes(): t for t, key in enumerate(all_td.numpy())}
    return {place[key.tobytes()] for key in few_nd.numpy()}


def in_chunks(model, ids_1t, prompt, press, slots, chunk):
    """As kvtune runs it: before a chunk that does not fit, the press chooses what leaves. Logits, and the places held behind the prompt."""
    cache, seen, held, logits, start, chosen = DynamicCache(), {}, {}, [], 0, []

    def remember(module, _, given, output):
        seen[module.layer_idx] = (module, given["hidden_states"], output[1], given)

    hooks = [layer.self_attn.register_forward_hook(remember, with_kwargs=True) for layer in model.model.layers]
    while start < ids_1t.shape[1]:
        n = min(chunk, ids_1t.shape[1] - start, slots - start if start < slots else chunk)
        for index, layer in enumerate(cache.layers):
            filled = layer.keys.shape[2]
            if filled + n > slots:
                set_length(press, slots - n, filled)
                module, hidden, *rest = seen[index]
                scores_1gs = press.score(module, hidden, layer.keys, layer.values, *rest)
                kept = scores_1gs.topk(slots - n).indices.sort().values  # In the order of their places.
                held[index] = held[index].gather(1, kept[0])
                kept = kept[..., None].expand(-1, -1, -1, layer.keys.shape[3])
                layer.keys, layer.values = layer.keys.gather(2, kept), layer.values.gather(2, kept)
        logits.append(extend(model, ids_1t[:, start : start + n], cache, start))
        for index, layer in enumerate(cache.layers):
            new = torch.arange(start, start + n, device=ids_1t.device).expand(layer.keys.shape[1], -1)
            held[index] = torch.cat([held[index], new], 1) if start else new
        start += n
        if start == prompt:
            chosen = [set(head) for index in range(len(held)) for head in held[index].tolist()]
    for hook in hooks:
        hook.remove()
    return torch.cat(logits, 1)[:, prompt - 1 :], chosen


def kvtunes_choices(dump, number, prompt):
    """By layer and KV head: the places that kvtune's caches held behind the first `prompt` tokens of a dump's sequence `number`."""
    with safe_open(dump / "replay_log.safetensors", "pt") as log:
        event = [event for event, start, columns in log.get_tensor("spans").tolist() if start + columns == prompt]
    if not event:
        raise SystemExit(f"{dump}: no chunk ends where the prompt does, behind {prompt} tokens")
    with safe_open(dump / "evictions.safetensors", "pt") as held:
        layers = sum(name.endswith(".chunk.0") for name in held.keys())
        of_layer = [held.get_tensor(f"layer.{layer}.chunk.{event[0]}")[number] for layer in range(layers)]
    return [set(head) - {-1} for layer in of_layer for head in layer.tolist()]


def compare(model, press, slots, chunk, path, dump):
    """Prints the mean loss of the completions in a file behind each cache, and how many of its choices are as in a dump."""
    losses, shares, targets = {}, {}, 0
    for number, line in enumerate(path.read_text().splitlines()):
        sample = json.loads(line)
        prompt = next((t for t, label in enumerate(sample["labels"]) if label != -100), 0)
        if prompt <= slots:
            raise SystemExit(f"{path}:{number + 1}: a cache of {slots} slots holds the whole prompt of {prompt} tokens")
        ids_1t, labels = (torch.tensor(numbers, device=model.device) for numbers in ([sample["input_ids"][:-1]], sample["labels"][prompt:]))
        targets += (labels != -100).sum().item()
        set_length(press, slots, prompt)
        (full_1nv, everything), (logits_1nv, kept) = (at_once(model, ids_1t, prompt, used) for used in (None, press))
        ways = {"full cache": (full_1nv, []), "kvpress": (logits_1nv, [places(*pair) for pair in zip(kept, everything)])}
        if chunk:
            ways["kvpress, in chunks"] = in_chunks(model, ids_1t, prompt, press, slots, chunk)
        theirs = kvtunes_choices(dump, number, prompt) if dump else []
        for name, (logits_1nv, ours) in ways.items():
            losses[name] = losses.get(name, 0.0) + cross_entropy(logits_1nv[0].float(), labels, reduction="sum").item()
            shares[name] = shares.get(name, []) + [len(a & b) / len(b) for a, b in zip(ours, theirs)]
    for name, loss in losses.items():
        found = shares[name] and [sum(shares[name]) / len(shares[name]), min(shares[name]), max(shares[name])]
        share = ", choices in common {:.1%} (by head and sample {:.1%} to {:.1%})".format(*found) if found else ""
        print(f"{name}: loss {loss / targets:.4f}{share}")
    if dump:
        print(f"kvtune: loss {json.loads((dump / 'loss.json').read_text())['loss']:.4f}")


def answer(model, press, slots, path, count):
    """Prints how the text in a file goes on: `count` tokens at most, always the likeliest."""
    tokenizer, written = AutoTokenizer.from_pretrained(model.name_or_path), []
    ids_1t = tokenizer(path.read_text(), return_tensors="pt").input_ids.to(model.device)
    set_length(press, slots, prompt := ids_1t.shape[1])
    cache, logits_11v = prefill(model, ids_1t, press)
    while len(written) < count:
        written.append(logits_11v.argmax(-1))
        if written[-1].item() == tokenizer.eos_token_id:
            break
        logits_11v = extend(model, written[-1], cache, prompt + len(written) - 1)
    print(tokenizer.decode(torch.cat(written, 1)[0], skip_special_tokens=True))


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("adapter", type=Path, help="a checkpoint, or an export for peft, with its kv_policy.json")
    options.add_argument("--base", help="the base model, if not where the adapter says")
    options.add_argument("--cache-length", type=int, help="slots of a KV head, if not as in training")
    one_of = options.add_mutually_exclusive_group(required=True)
    one_of.add_argument("--prompt", type=Path, help="continue this text")
    one_of.add_argument("--tokens", type=Path, help="compare losses: JSONL of input_ids and labels, -100 over the prompt")
    options.add_argument("--max-new-tokens", type=int, default=64)
    options.add_argument("--dump", type=Path, help="with --tokens: what `kvtune verify --dump` wrote of the same file")
    given = options.parse_args()
    file = json.loads((given.adapter / "kv_policy.json").read_text())
    lengths = {given.cache_length} if given.cache_length else {length for layer in file["cache_lengths"] for length in layer}
    if len(lengths) > 1:
        raise SystemExit("kv_policy.json: a press has one length for all layers: give --cache-length")
    slots, (name, press) = lengths.pop(), press_of(file)
    base = given.base or json.loads((given.adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    logging.disable_progress_bar()
    attention = "eager" if isinstance(press, kvpress.ObservedAttentionPress) else "sdpa"  # The press reads the matrix.
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", attn_implementation=attention)
    model = PeftModel.from_pretrained(model, str(given.adapter)).merge_and_unload().eval()
    if given.tokens:
        compare(model, press, slots, file["chunk_size"] if name in BY_CHUNKS else None, given.tokens, given.dump)
    else:
        answer(model, press, slots, given.prompt, given.max_new_tokens)


if __name__ == "__main__":
    main()
