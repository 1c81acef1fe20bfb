"""Makes adapter-qwen2-norms, -biasall, -loralmhead, -doralmhead and their dense-*.safetensors in tests/fixtures/families with PEFT 0.21.2.

    tests/golden/copies_of_peft.py   with torch, transformers and peft; first checks its loss by a fixture that was made before
"""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

FIXTURES = Path(__file__).parent.parent / "fixtures"
FAMILIES = FIXTURES / "families"
INPUTS = ("input_ids", "targets", "rope.attention_factor", "rope.inv_freq")


def base():
    return AutoModelForCausalLM.from_pretrained(FIXTURES / "model-qwen2", dtype=torch.float32, attn_implementation="eager")


def run(model, golden):
    logits = model(golden["input_ids"]).logits
    return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), golden["targets"].flatten())


golden = load_file(FAMILIES / "dense-qwen2-lmhead.safetensors")
_, loss = run(PeftModel.from_pretrained(base(), FAMILIES / "adapter-qwen2-lmhead").eval(), golden)
assert torch.allclose(loss, golden["loss"], atol=1e-6), (loss, golden["loss"])

KINDS = {"norms": {"modules_to_save": ["norm"]}, "biasall": {"bias": "all"}}
TARGETS = ["q_proj", "lm_head"]
KINDS |= {"loralmhead": {"target_modules": TARGETS, "rank_pattern": {"lm_head": 3}, "alpha_pattern": {"lm_head": 5}}}
KINDS |= {"doralmhead": {"target_modules": TARGETS, "use_dora": True, "use_rslora": True}}
for kind, settings in KINDS.items():
    torch.manual_seed(7)
    lora = LoraConfig(r=2, lora_alpha=4, **{"target_modules": ["q_proj"]} | settings, task_type="CAUSAL_LM")
    model = get_peft_model(base(), lora).eval()
    trained = {name: leaf for name, leaf in model.named_parameters() if leaf.requires_grad}
    with torch.no_grad():
        for leaf in trained.values():
            leaf.add_(0.1 * torch.randn_like(leaf))
    model.base_model.model.config.name_or_path = model.peft_config["default"].base_model_name_or_path = "model-qwen2"
    model.save_pretrained(FAMILIES / f"adapter-qwen2-{kind}", save_embedding_layers="auto" if kind == "loralmhead" else False)
    (FAMILIES / f"adapter-qwen2-{kind}" / "README.md").unlink()

    logits, loss = run(model, golden)
    loss.backward()
    short = {".default": "", ".modules_to_save": "", "magnitude_vector.weight": "magnitude_vector"}
    for old, new in short.items():
        trained = {name.replace(old, new): leaf for name, leaf in trained.items()}
    saved = {f"grad.{name}": leaf.grad for name, leaf in trained.items()}
    saved |= {name: golden[name] for name in INPUTS}
    step = golden["input_ids"].shape[1] // golden["logits_lora"].shape[1]
    saved |= {"logits_lora": logits[:1, step - 1 :: step].detach().contiguous(), "loss": loss.detach().reshape(1)}
    save_file(saved, FAMILIES / f"dense-qwen2-{kind}.safetensors")
