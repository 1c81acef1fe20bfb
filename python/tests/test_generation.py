"""A text is what `kvtune serve` writes through the same cache, far beyond its slots, and each token is as likely."""

import json
import socket
import subprocess
import time
import urllib.request
from contextlib import contextmanager

import pytest
import torch
from conftest import ids, model_dir, write
from test_conformance import FAMILIES, POLICIES, cache_of
from transformers import AutoModelForCausalLM

import kvtune
from kvtune import KvPolicyCache, binary
from kvtune.cache import ARGUMENT
from kvtune.policy_file import PolicyFile

NEW = 40


@contextmanager
def served(run):
    """Asks `kvtune serve`: a function from a prompt to an answer with its likelihoods."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [binary.path(), "serve", run, "--port", str(port), "--threads", "1"]
    server = subprocess.Popen(command, env=binary.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(prompt, **further):
        fields = {"prompt": prompt, "max_tokens": NEW, "echo": True, "logprobs": 1, "temperature": 0, "ignore_eos": True, **further}
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
    logits = [model(tokens[:, :prompt], **{ARGUMENT: cache}).logits]
    logits += [model(tokens[:, at : at + 1], **{ARGUMENT: cache}).logits for at in range(prompt, tokens.shape[1] - 1)]
    return torch.cat(logits, 1).log_softmax(-1)[0].gather(1, tokens[0, 1:, None])[:, 0]


def compare(model, run, prompt, ask, **rules):
    """Holds a text of the cache to that of the server; the largest difference of a likelihood's logarithm."""
    expected = ask(prompt, **rules)
    inputs = torch.tensor([prompt])
    made = write(model, inputs, KvPolicyCache.from_run(run), NEW, **rules)
    assert made[0, len(prompt) :].tolist() == expected["token_ids"]
    found = likelihoods(model, KvPolicyCache.from_run(run), made[0].tolist(), len(prompt))
    return (found - torch.tensor(expected["logprobs"]["token_logprobs"][1:])).abs().max().item()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "adakv across" and not policy.startswith("qh2o")])
def test_texts_and_likelihoods_are_kvtunes(make_run, load, policy, family):
    run = make_run(family, cache_of(policy))
    # Keys and values of the same token have the same norm in the lowest layer but for rounding, a channel of them no range, and a gate says the
    # same of them: where one comes again, their order is an accident.
    rules = {"no_repeat_ngram_size": 1} if any(name in policy for name in ("knorm", "lagkv", "deep", "defensivekv")) else {}
    model = load(run)
    with served(run) as ask:
        worst = max(compare(model, run, ids(length, 7), ask, **rules) for length in (133, 30, 2))
    print(f"{policy}, {family}: {worst:.1e}")
    assert worst < 1e-4


CASES = {
    "blocks": ("model-qwen2", "policy = \"h2o\"\ncache_length = 48\nchunk_size = 12\ndecode_block = 5"),
    "blocks of snapkv": ("model-gemma3", "policy = \"snapkv\"\ncache_length = 48\nchunk_size = 12\ndecode_block = 4"),
    "blocks with shares": ("model-qwen2", "policy.adakv = { floor = 0.5, policy = \"keydiff\" }\ncache_length = 48\nchunk_size = 12\ndecode_block = 6"),
    "lengths by layer": ("model-qwen2", "policy = \"tova\"\ncache_length = [60, 31, 45]\nchunk_size = 12"),
    "bent chunks": ("model-qwen2", "policy = \"h2o\"\ncache_length = [60, 31, 45]\nchunk_size = 10\nchunking = \"reference\""),
    "soft caps": ("model-gemma2", "policy = \"h2o-vlen\"\ncache_length = 48\nchunk_size = 12"),
    "windows alone": ("model-mistral", "policy = \"h2o\"\ncache_length = 48\nchunk_size = 12"),
    "windows above": ("model-qwen2-swa", "policy = \"expected-attention\"\ncache_length = 40\nchunk_size = 12"),
    "attention sinks": ("model-gpt-oss", "policy = \"h2o\"\ncache_length = 48\nchunk_size = 12"),
    "experts": ("model-qwen3-moe", "policy = \"keydiff\"\ncache_length = 48\nchunk_size = 12"),
}


@pytest.mark.parametrize("case", CASES)
def test_further_models_and_chunks(make_run, load, case):
    run = make_run(*CASES[case])
    model = load(run, attention="kvtune")
    assert kvtune.conformance(model, run) == []
    with served(run) as ask:
        worst = max(compare(model, run, ids(length, 8), ask) for length in (110, 47, 9))
    print(f"{case}: {worst:.1e}")
    assert worst < 1e-4


class Rotation(torch.nn.Module):
    def forward(self, x, position_ids):
        inverse = 1e6 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
        angle = (position_ids[..., None] * inverse).repeat(1, 1, 2)
        return angle.cos(), angle.sin()


class Norm(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.norm.variance_epsilon)


@pytest.mark.parametrize("buffer", ["int8", "int4"])
@pytest.mark.parametrize("policy", ["qh2o", "qh2o-vlen", "h2o normalised", "snapkv", "keydiff"])
def test_buffers_in_few_bits(make_run, load, policy, buffer):
    """In f64, so that no level hangs on a last digit: Transformers computes norms and rotations in f32 even then, which are replaced."""
    cache = f'policy.{policy.split()[0]} = {{ {POLICIES[policy]} }}\nbuffer = "{buffer}"\ncache_length = 48\nchunk_size = 12'
    run = make_run("model-qwen2", cache + "\ndecode_block = 3" * (policy == "snapkv"), "f64")
    model = load(run, "f64")
    model.model.rotary_emb = Rotation()
    for layer in [model.model, *model.model.layers]:
        for name in ("norm", "input_layernorm", "post_attention_layernorm"):
            if hasattr(layer, name):
                setattr(layer, name, Norm(getattr(layer, name)))
    with served(run) as ask:
        worst = max(compare(model, run, ids(length, 7), ask) for length in (133, 30, 2))
    print(f"{policy}, {buffer}: {worst:.1e}")
    assert worst < 1e-5  # The server tells likelihoods in f32.


@pytest.mark.parametrize("policy", ["h2o", "adakv across", "snapkv", "triattention"])
def test_a_prompt_is_read_chunk_by_chunk(make_run, load, policy):
    run, prompt = make_run("model-qwen2", cache_of(policy)), ids(133, 7)
    model, inputs = load(run), torch.tensor([prompt])
    cache = KvPolicyCache.from_run(run)
    cache.read(model, inputs)
    assert cache.get_seq_length() == 132
    made = write(model, inputs, cache, NEW)
    with served(run) as ask:
        assert made[0, 133:].tolist() == ask(prompt)["token_ids"]


@pytest.mark.parametrize("policy", ["defensivekv", "learned", "triattention"])
def test_an_adapter_may_lie_beside_a_model_in_16_bits(make_run, load, policy):
    """PEFT keeps its matrices in f32, and cosines and sines come in the dtype of the model."""
    run = make_run("model-qwen2", cache_of(policy))
    model = load(run, is_merged=False).to(torch.bfloat16)
    for matrix in (matrix for name, matrix in model.named_parameters() if "lora" in name):
        matrix.data = matrix.data.float()
    cache, prompt = KvPolicyCache.from_run(run), torch.tensor([ids(90, 7), ids(90, 8)])
    cache.read(model, prompt)
    assert write(model, prompt, cache, 20).shape == (2, 110)


def test_a_conversation_goes_on(make_run, load):
    """Tokens that follow a text come in chunks behind it; the same whether they come by `read` or by `generate`."""
    run = make_run("model-qwen2", CASES["blocks"][1])
    model, texts = load(run), []
    for reads in (False, True):
        cache, tokens = KvPolicyCache.from_run(run), torch.tensor([ids(60, 7)])
        for turn in range(3):
            if reads:
                cache.read(model, tokens)
            tokens = write(model, tokens, cache, 7)
            tokens = torch.cat([tokens, torch.tensor([ids(33, turn)])], 1)
        texts.append(tokens.tolist())
    assert texts[0] == texts[1]


def test_sequences_of_a_batch_are_as_alone(make_run, load):
    for policy in ("h2o", "adakv", "tova", "triattention"):
        run = make_run("model-qwen2", cache_of(policy))
        model, inputs = load(run), torch.tensor([ids(100, 1), ids(100, 2)])

        def texts(rows, **options):
            return write(model, rows, KvPolicyCache.from_run(run), 20, **options).tolist()

        assert texts(inputs) == [texts(row[None])[0] for row in inputs]
        beams = texts(inputs[:1], num_beams=3)
        assert len(beams[0]) == 120
        cache = KvPolicyCache.from_run(run)
        cache.read(model, inputs[:1])
        cache.batch_repeat_interleave(3)
        assert write(model, inputs[:1], cache, 20, num_beams=3).tolist() == beams
        cache = KvPolicyCache.from_run(run)
        cache.read(model, inputs)
        with pytest.raises(kvtune.KvtuneError, match="3 sequences go on"):
            write(model, torch.cat([inputs, inputs[:1]]), cache, 3)


def test_gates_see_a_model_that_was_loaded_for_them(make_run):
    run, inputs = make_run("model-qwen2", cache_of("learned deep")), torch.tensor([ids(90), ids(90, 3)])
    model, _ = kvtune.load(run)
    both = write(model, inputs, KvPolicyCache.from_run(run), 20, num_beams=2)
    for row, expected in zip(inputs, both):
        assert torch.equal(write(model, row[None], KvPolicyCache.from_run(run), 20, num_beams=2)[0], expected)
    bare = AutoModelForCausalLM.from_pretrained(model_dir("model-qwen2"))
    with pytest.raises(kvtune.KvtuneError, match="gates"):
        write(bare.eval(), inputs, KvPolicyCache.from_run(run), 3)


def test_the_initial_part_of_a_prompt_stays(make_run, load):
    cache = 'policy.smart-lastrec = { end_initial_regex = "o", max_initial_fraction = 0.4 }\ncache_length = 48\nchunk_size = 12'
    run, prompt = make_run("model-qwen2", cache), ids(110, 9)
    model, (_, tokenizer) = load(run), kvtune.load(run)
    assert kvtune.conformance(model, run) == []
    with served(run) as ask:
        part = kvtune.initial_part(run, tokenizer, prompt)
        assert 0 < part[1] < 110
        for other in ("[[:digit:]]", "[a-z&&[^b]]", r"\p{Lu}"):
            file = PolicyFile.read(run).path
            written = file.read_text()
            file.write_text(written.replace('"end_initial_regex": "o"', '"end_initial_regex": ' + json.dumps(other)))
            with pytest.raises(kvtune.KvtuneError, match="as the program does"):
                kvtune.initial_part(run, tokenizer, prompt)
            file.write_text(written)
        found = write(model, torch.tensor([prompt]), KvPolicyCache.from_run(run, initial_part=part), NEW)
        assert found[0, 110:].tolist() == ask(prompt)["token_ids"]
