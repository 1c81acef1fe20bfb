"""A text is what `kvtune serve` writes through the same cache, far beyond its slots, and each token is as likely."""

import json
import socket
import subprocess
import time
import urllib.request
from contextlib import contextmanager

import pytest
import torch
from conftest import ids
from test_conformance import FAMILIES, POLICIES, cache_of

import kvtune
from kvtune import KvPolicyCache, binary

NEW = 40


@contextmanager
def served(run):
    """Asks `kvtune serve`: a function from a prompt to an answer with its likelihoods."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [binary.path(), "serve", run, "--port", str(port), "--threads", "1"]
    server = subprocess.Popen(command, env=binary.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(prompt, new=NEW):
        fields = {"prompt": prompt, "max_tokens": new, "echo": True, "logprobs": 1, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(fields).encode(), {"content-type": "application/json"})
        for attempt in range(100):
            try:
                return json.load(urllib.request.urlopen(request))["choices"][0]
            except urllib.error.HTTPError as error:
                raise AssertionError(error.read()) from None
            except OSError:
                time.sleep(0.1)
        raise AssertionError("the server does not answer")

    try:
        yield ask
    finally:
        server.terminate()
        server.wait()


@torch.no_grad()
def likelihoods(model, cache, tokens, prompt):
    """The logarithm of the likelihood of each token but the first, where those behind the prompt come one by one."""
    tokens = torch.tensor([tokens])
    logits = [model(tokens[:, :prompt], past_key_values=cache).logits]
    logits += [model(tokens[:, at : at + 1], past_key_values=cache).logits for at in range(prompt, tokens.shape[1] - 1)]
    return torch.cat(logits, 1).log_softmax(-1)[0].gather(1, tokens[0, 1:, None])[:, 0]


def compare(model, run, prompt, ask):
    """Holds a text of the cache to that of the server; the largest difference of a likelihood's logarithm."""
    expected = ask(prompt)
    inputs = torch.tensor([prompt])
    made = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), past_key_values=KvPolicyCache.from_run(run), do_sample=False, max_new_tokens=NEW, eos_token_id=-1, pad_token_id=0
    )
    assert made[0, len(prompt) :].tolist() == expected["token_ids"]
    found = likelihoods(model, KvPolicyCache.from_run(run), made[0].tolist(), len(prompt))
    return (found - torch.tensor(expected["logprobs"]["token_logprobs"][1:])).abs().max().item()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy not in ("adakv across",)])
def test_texts_and_likelihoods_are_kvtunes(make_run, load, policy, family):
    run = make_run(family, cache_of(policy))
    with served(run) as ask:
        worst = max(compare(load(run), run, ids(length, 7), ask) for length in (133, 30, 2))
    print(f"{policy}, {family}: {worst:.1e}")
    assert worst < 1e-4
