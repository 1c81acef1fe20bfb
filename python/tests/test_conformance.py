"""The choices that kvtune has recorded are made again: every policy, buffer and chunking, on models of several families."""

import pytest

from kvtune import conformance

FAMILIES = ["model-qwen2", "model-llama31", "model-gemma3"]
POLICIES = {
    "dense": "",
    "lastrec": "",
    "streaming-llm": "",
    "h2o": "",
    "h2o normalised": "normalize_scores = true, grace_period = 0.375",
    "h2o prefill": "score_prefill = true",
    "h2o reference": "normalize_scores = true, reference_counts = true",
    "h2o-vlen": "",
    "h2o-orig": "",
    "qh2o": "",
    "qh2o-vlen": "combination_constant = 0.3",
    "keydiff": "grace_period = 3",
    "knorm": "",
    "tova": "",
    "snapkv": "",
    "snapkv mean": 'window_size = 3, kernel_size = 3, pooling = "mean"',
    "defensivekv": "",
    "defensivekv small": "window_size = 3, kernel_size = 3",
    "dropkv": "",
    "dropkv alone": "window_size = 1, kernel_size = 1",
    "rkv": "",
    "rkv attention": "window_size = 3, kernel_size = 3, attention_weight = 0.9, similarity_threshold = 0.2",
    "lagkv": "",
    "lagkv small": "lag_size = 5, init_grace_tokens = 2",
    "expected-attention": "",
    "learned": "",
    "learned deep": "gate_alone = true, grace_period = 4",
    "learned attention": "grace_period = 4",
    "triattention": "",
    "triattention grace": "init_grace_tokens = 2, grace_period = 4",
    "adakv": "floor = 0.5, policy.snapkv = { window_size = 2 }",
    "adakv knorm": 'floor = 0.4, policy = "knorm"',
    "adakv across": 'floor = 0.4, across_layers = true, policy = "keydiff"',
    "adakv defensivekv": 'floor = 0.5, policy.defensivekv = { window_size = 2 }',
    "adakv dropkv": 'floor = 0.5, policy.dropkv = { window_size = 2 }',
    "adakv rkv": 'floor = 0.5, policy.rkv = { window_size = 2 }',
    "adakv learned": 'floor = 0.5, policy.learned = { grace_period = 2 }',
    "adakv triattention": 'floor = 0.5, policy.triattention = { grace_period = 2 }',
    "adakv h2o": "floor = 0.4, policy.h2o = { score_prefill = true }",
}


def cache_of(policy: str, further: str = "") -> str:
    buffer = 'buffer = "int4"\n' if policy.startswith("qh2o") else ""
    # The fixture writes gates there, of the kind that the name says.
    kind = next((f"-{kind}" for kind in ("deep", "attention") if kind in policy), "")
    buffer += f'gates = "gates{kind}"\n' if "learned" in policy or "triattention" in policy else ""
    further = further or f"cache_length = {200 if policy == 'dense' else 48}\nchunk_size = 12"
    return f"policy.{policy.split()[0]} = {{ {POLICIES[policy]} }}\n{buffer}{further}"


# A buffer in few bits takes another level, or another minimum, where the last digit of a number differs, and choices follow: those of kvtune
# itself in f32 and in f64 are not always the same. In f64 this is rare; but Transformers computes norms and rotations of Gemma in f32 even then.
def exact(policy: str, family: str) -> str:
    return "f64" if policy.startswith("qh2o") and family != "model-gemma3" else "f32"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_makes_the_recorded_choices(make_run, load, policy, family):
    run = make_run(family, cache_of(policy), dtype := exact(policy, family))
    # An adapter may be merged or lie beside the model.
    assert conformance(load(run, dtype, is_merged="small" not in policy), run) == []
