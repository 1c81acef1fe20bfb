"""What the package says of itself: how fast it is there, how commands run, what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ids, write
from test_conformance import cache_of

import kvtune
from kvtune import KvPolicyCache, KvtuneError
from kvtune.cache import ARGUMENT
from kvtune.runs import _toml
from kvtune.versions import require_transformers

PACKAGE = Path(kvtune.__file__).parent.parent


def test_an_import_is_fast_and_loads_no_torch():
    code = "import sys, time; t = time.perf_counter(); import kvtune; print(time.perf_counter() - t)"
    code += "; print('torch' in sys.modules, 'transformers' in sys.modules)"
    told = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE).stdout.splitlines() for _ in range(3)]
    print(f"import: {1000 * min(float(lines[0]) for lines in told):.1f} ms")
    assert all(lines[1] == "False False" for lines in told) and min(float(lines[0]) for lines in told) < 0.05


def test_a_training_tells_its_steps_as_they_come(make_run, tmp_path):
    recipe = make_run("model-qwen2", cache_of("h2o")).parent / "recipe.toml"
    run = kvtune.run("train", recipe, out=tmp_path / "run", set={"train.max_steps": 3, "kv_cache.policy": {"snapkv": {"window_size": 4}}})
    *steps, end = run
    assert [line["step"] for line in steps if "loss" in line] == [1, 2, 3] and end["state"] == "finished"
    written = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert steps == written
    model, tokenizer = kvtune.load(tmp_path / "run")
    assert type(model).__name__ == "PeftModelForCausalLM" and tokenizer.vocab_size > 0
    inputs = torch.tensor([ids(90)])
    assert write(model, inputs, KvPolicyCache.from_run(tmp_path / "run"), 5).shape == (1, 95)
    merged = kvtune.run("export", tmp_path / "run", "--for", "merged", out=tmp_path / "merged").wait()
    assert merged
    assert type(kvtune.load(tmp_path / "merged")[0]).__name__ == "Qwen2ForCausalLM"
    assert kvtune.conformance(kvtune.load(tmp_path / "merged")[0], tmp_path / "merged") == []


def test_a_command_that_fails_says_why(tmp_path):
    with pytest.raises(KvtuneError, match=r"(?s)`kvtune train .*nothing.toml --out .*` ended with exit code 2:\nerror: .*hint: "):
        kvtune.run("train", tmp_path / "nothing.toml", out=tmp_path / "run").wait()


def test_values_are_written_as_toml():
    assert _toml({"a": [1, 0.5, True], "b": "x\"y"}) == '{ "a" = [1, 0.5, true], "b" = "x\\"y" }'
    with pytest.raises(KvtuneError, match="the value None"):
        _toml(None)


def changed(run: Path, to: Path, **keys) -> Path:
    """A copy of a run's policy file with other values."""
    content = json.loads((run / "final/kv_policy.json").read_text())
    to.mkdir()
    (to / "kv_policy.json").write_text(json.dumps({**content, **keys}))
    return to


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"version": 2}, "`version` in .* is 2, expected 1\nhint: install the version"),
        ({"policy": "new"}, "the policy `new` is not known"),
        ({"policy": {"h2o": {"weight": 1}}}, "`h2o` in `kv_policy.json` has an unknown parameter `weight`"),
        ({"grace": [1, 0, 0]}, "`grace` in .* is 1 in layer 0, expected 0"),
        ({"rope_scaling": {"kind": "yarn"}}, "has a `rope_scaling` that the base model does not have\nhint: .* --for merged"),
        ({"rope": [{"theta": 1e4, "scaling": {"kind": "dynamic"}}] * 3}, "the scaling `dynamic`, which depends on the length"),
        ({"policy": {"smart-lastrec": {"end_initial_regex": "x"}}}, "keeps the initial part of each prompt"),
    ],
)
def test_files_that_cannot_be_run_are_refused(make_run, tmp_path, keys, words):
    with pytest.raises(KvtuneError, match=words):
        KvPolicyCache.from_run(changed(make_run("model-qwen2", cache_of("h2o")), tmp_path / "changed", **keys))


def test_uses_that_would_be_wrong_are_refused(make_run, load, tmp_path):
    run = make_run("model-qwen2", cache_of("h2o"))
    model, inputs = load(run), torch.tensor([ids(90), ids(90, 1)])
    with pytest.raises(KvtuneError, match="`.*nowhere/kv_policy.json` does not exist"):
        KvPolicyCache.from_run(tmp_path / "nowhere")
    padded = torch.ones_like(inputs)
    padded[0, :4] = 0
    with pytest.raises(KvtuneError, match="the batch is padded"):
        model.generate(inputs, attention_mask=padded, past_key_values=KvPolicyCache.from_run(run), pad_token_id=0)
    with pytest.raises(KvtuneError, match="a prompt comes in pieces"):
        write(model, inputs, KvPolicyCache.from_run(run), 3, prefill_chunk_size=20)
    with pytest.raises(KvtuneError, match="call `cache.read"):
        write(model, inputs, KvPolicyCache.from_run(make_run("model-qwen2", cache_of("adakv across"))), 3)
    with pytest.raises(KvtuneError, match='hint: call `model.set_attn_implementation\\("kvtune"\\)`'):
        write(load(run, attention="eager"), inputs, KvPolicyCache.from_run(run), 3)
    with pytest.raises(KvtuneError, match="the model has more layers than .*, which has 2"):
        write(model, inputs, KvPolicyCache.from_run(make_run("model-llama31", cache_of("h2o"))), 3)
    with pytest.raises(KvtuneError, match="layer 0 of the model has the sliding window 24, expected None"):
        write(load(make_run("model-gemma3", cache_of("h2o"))), inputs, KvPolicyCache.from_run(run), 3)
    with pytest.raises(KvtuneError, match="does not go back to fewer tokens"):
        write(model, inputs[:1], KvPolicyCache.from_run(run), 8, prompt_lookup_num_tokens=2)
    with pytest.raises(KvtuneError, match="tokens from position 5 on have come, expected 0"), torch.no_grad():
        model(inputs, position_ids=torch.arange(5, 95)[None], **{ARGUMENT: KvPolicyCache.from_run(run)})
    with pytest.raises(KvtuneError, match="its layers have not used the cache"):
        KvPolicyCache.from_run(run).read(lambda **given: None, inputs)
    other = changed(run, tmp_path / "heads", cache_lengths=[[48] * 4] * 3)
    with pytest.raises(KvtuneError, match="has 2 KV heads, expected 4"):
        write(model, inputs, KvPolicyCache.from_run(other), 3)


def test_plain_attention_is_as_before(make_run, load):
    run, inputs = make_run("model-gemma3", cache_of("h2o")), torch.tensor([ids(60)])
    with torch.no_grad():
        found, expected = (load(run, attention=attention)(inputs).logits for attention in ("sdpa", "eager"))
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("found", ["4.57.6", "5.2.0", "6.0.0rc1", None])
def test_other_versions_of_transformers_are_refused(monkeypatch, tmp_path, found):
    if found is None:
        monkeypatch.setattr(kvtune.versions, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr("transformers.__version__", found)
    words = f'Transformers is {found or "not installed"}, expected 5.3 or newer, but not 6\nhint: run `pip install "transformers>=5.3,<6"`'
    with pytest.raises(KvtuneError) as error:
        kvtune.load(tmp_path)
    assert str(error.value) == words


@pytest.mark.parametrize("found", ["5.3.0", "5.24.0", "5.99.0.dev0"])
def test_later_ones_are_tried(monkeypatch, found):
    monkeypatch.setattr("transformers.__version__", found)
    require_transformers()


def test_without_a_program_it_is_said(monkeypatch):
    monkeypatch.delenv("KVTUNE", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(kvtune.binary, "HERE", Path("/nowhere"))
    with pytest.raises(KvtuneError, match="the program `kvtune` is not there"):
        kvtune.binary.path()
