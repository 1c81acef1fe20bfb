#!/usr/bin/env python3
"""Times `generate` through a cache of few slots beside Transformers' own, on a small random model: one line for each policy.

    python python/bench.py --tokens 4096 --slots 512 --chunk 128 --new 64
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvtune import KvPolicyCache
from kvtune.policy_file import PolicyFile

POLICIES = {
    "lastrec": "lastrec",
    "h2o, the default": {"h2o": {"normalize_scores": True, "grace_period": 0.375}},
    "h2o, from the first token": {"h2o": {"score_prefill": True}},
    "keydiff": "keydiff",
    "knorm": "knorm",
    "tova": "tova",
    "snapkv": "snapkv",
    "expected-attention": "expected-attention",
    "adakv": {"adakv": {"floor": 0.5}},
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--config", default=str(Path(__file__).parents[1] / "recipes/bench/config.json"))
    for name, default in (("tokens", 4096), ("slots", 512), ("chunk", 128), ("new", 64), ("threads", 1), ("repeats", 3)):
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--buffer", default="plain")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(given.config)
    model = AutoModelForCausalLM.from_config(config).eval()
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    inputs = torch.randint(3, config.vocab_size, (1, given.tokens))

    def file(policy):
        return PolicyFile(
            Path("bench"), policy, (heads,) * layers, (given.slots,) * layers, (None,) * layers, (), (), given.chunk, 1, "plain", given.buffer, {}
        )

    def once(make, new):
        started = time.perf_counter()
        options = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}
        model.generate(inputs, attention_mask=torch.ones_like(inputs), past_key_values=make(), **options)
        return time.perf_counter() - started

    def seconds(make):
        """Of the prompt and of the whole, the fastest of some."""
        return [min(once(make, new) for _ in range(given.repeats)) for new in (1, given.new)]

    prompt, plain = seconds(lambda: None)
    print(f"Transformers' own: {prompt:.2f} s for the prompt, {plain:.2f} s with {given.new} new tokens")
    for name, policy in POLICIES.items():
        read, all_ = seconds(lambda: KvPolicyCache(file(policy)))
        print(f"{name}: {read:.2f} s, {all_:.2f} s, {all_ / plain:.2f} times Transformers' own", flush=True)


if __name__ == "__main__":
    main()
