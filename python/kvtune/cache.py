"""The cache of a trained model for Transformers, and the test that it is the same one."""

from __future__ import annotations

import math
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import gelu, linear, rms_norm

from .versions import require_transformers

require_transformers()  # Other versions lack names that are imported next.

from transformers import Cache, GenerationMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention import Rule
from .errors import KvtuneError
from .layer import PolicyLayer, share_out
from .policy_file import GATES, PolicyFile
from .quantise import wide

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "kvtune"
"""The name of the attention function that serves a `KvPolicyCache`; `sdpa`, the default of most models, does so too."""

ARGUMENT = "cache" if "cache" in signature(GenerationMixin.prepare_inputs_for_generation).parameters else "past_key_values"
"""What models call the argument that takes a cache: the first in newer Transformers, the second in older ones."""

# The attribute of new keys that says to which layer of a cache they go.
MARK = "kvtune_layer"


class KvPolicyCache(Cache):
    """Keeps what `kv_policy.json` says, for one prompt and its answer::

        model.generate(**inputs, past_key_values=KvPolicyCache.from_run("runs/my"))

    Each sequence of a batch is run as if it were alone; all must be of the same length, without padding.
    """

    layers: list[PolicyLayer]  # type: ignore[assignment]
    prompt: int | None
    """Tokens of the prompt that come in chunks, where `read` has been told."""

    def __init__(self, file: PolicyFile, initial_part: tuple[int, int] | None = None) -> None:
        self.file, self.initial_part = file, initial_part
        super().__init__(layers=[PolicyLayer(self, index) for index in range(len(file.heads))])
        self.smallest = min(file.full_at(), default=1 << 40)
        evicts = all(layer.policy.evicts for layer in self.layers)
        self.block = file.decode_block if evicts else 1
        if initial_part is None and any(layer.policy.initial for layer in self.layers):
            what = f"the policy of `{file.path}` keeps the initial part of each prompt"
            raise KvtuneError(what, "say where it is: `from_run(run, initial_part=kvtune.initial_part(run, tokenizer, input_ids))`")
        self.needs_hooks = any(layer.policy.takes_gates or layer.policy.needs_query_statistics for layer in self.layers)
        if self.needs_hooks:
            if not (gates := file.path.parent / GATES).exists():
                raise KvtuneError(f"`{gates}` does not exist", "give a run, a checkpoint or an export of kvtune, which has it")
            tensors = load_file(gates)
            for layer in self.layers:
                prefix = f"module_list.{layer.index}."
                layer.calibration = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        self.reset()

    @classmethod
    def from_run(cls, run: str | Path, *, initial_part: tuple[int, int] | None = None) -> KvPolicyCache:
        """The empty cache of a run, a checkpoint or an export. `initial_part` is for the policy `smart-lastrec`: the positions of the
        prompt's first token that stays, and of the one behind the last."""
        return cls(PolicyFile.read(run), initial_part)

    @torch.no_grad()
    def read(self, model: PreTrainedModel, input_ids: Tensor) -> None:
        """Reads a prompt but for its last token, chunk by chunk, so that memory does not grow with it; `generate` goes on from there."""
        self._read(model, input_ids, input_ids.shape[1] - 1)

    def _read(self, model: PreTrainedModel, input_ids: Tensor, end: int) -> None:
        if self.needs_hooks:
            show_gates(model)
        if self.prompt is None:
            self.prompt = max(end, 1)
        self.is_reading = True
        try:
            while (start := self.get_seq_length()) < end:
                layer = self.layers[0]
                stop = start + min(layer.missing or layer.next_chunk(end - start), end - start)
                model(input_ids=input_ids[:, start:stop], use_cache=True, logits_to_keep=1, **{ARGUMENT: self})
                if self.get_seq_length() == start:
                    what = f"the model has read tokens, and its layers have not used the cache that `{ARGUMENT}` gives"
                    raise KvtuneError(what, "load a model of Transformers' own classes, without `trust_remote_code`")
        finally:
            self.is_reading = False
        self._had_prompt = False

    # What Transformers asks a cache.

    def reset(self) -> None:
        self.prompt = None
        self.is_reading = self._had_prompt = False
        self._waiting: PolicyLayer | None = None
        super().reset()

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Hands the new entries on to the attention function, which writes them chunk by chunk, with a mark where they belong."""
        if self._waiting is not None:
            what = "the model's attention does not reach the cache"
            raise KvtuneError(what, 'call `model.set_attn_implementation("kvtune")` before')
        if layer_idx >= len(self.layers):
            what = f"the model has more layers than `{self.file.path}`, which has {len(self.layers)}"
            raise KvtuneError(what, "give the policy file of this model")
        self._waiting = self.layers[layer_idx]
        setattr(key_states, MARK, self._waiting)
        return key_states, value_states

    def _check_call(self, tokens: int, position_ids: Tensor | None) -> None:
        seen = self.get_seq_length()
        if position_ids is not None and (wrong := [at for at in position_ids[..., 0].flatten().tolist() if at != seen]):
            raise KvtuneError(f"tokens from position {wrong[0]} on have come, expected {seen}", "begin with a new cache")
        if tokens > 1 and self._had_prompt:
            what = "a prompt comes in pieces, as with `prefill_chunk_size`, whose end the cache cannot see"
            raise KvtuneError(what, "call `cache.read(model, input_ids)` before `generate`, without `prefill_chunk_size`")
        self._had_prompt = tokens > 1 and not self.is_reading

    def _check_sequences(self, sequences: int) -> None:
        have = self.layers[0].position.shape[0] if self.get_seq_length() else sequences
        if sequences != have:
            what = f"{sequences} sequences go on, and the cache has read {have}"
            raise KvtuneError(what, "call `cache.batch_repeat_interleave(N)` after `read` for N beams or answers of each prompt")

    def get_mask_sizes(self, queries: int | Tensor, layer_idx: int) -> tuple[int, int]:
        """Takes the number of queries, or their positions, as from older Transformers."""
        return _Unmasked(queries if isinstance(queries, int) else queries.shape[0]), 0

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise KvtuneError("a cache that evicts does not go back to fewer tokens", "generate without an assistant model or prompt look-up")

    # Newer Transformers call this before tokens that they may take back.
    activate_past_recording = crop

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.layers[0].position.shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        for layer in self.layers:
            layer.reorder_cache(indices.to(layer.position.device))

    # What layers ask.

    def share_out(self, layer: PolicyLayer) -> None:
        """Gives the heads their shares before the first chunk that evicts: those of a layer, or where the policy says so of all layers."""
        layers, floor = [layer], layer.policy.floor or 0.0
        if layer.policy.across_layers:
            layers = [other for other in self.layers if other.policy.floor is not None]
            if any(other.seen != layer.seen for other in layers):
                what = f"`across_layers` of `{self.file.path}` compares all layers after the same chunk, and the prompt came at once"
                raise KvtuneError(what, "call `cache.read(model, input_ids)` before `generate`: it goes chunk by chunk")
        keys = [other.order() for other in layers]
        together = torch.cat([key.to(keys[0].device) for key in keys], 1)
        shares = torch.stack([share_out(key, layer.slots, floor) for key in together])
        for other, key, own in zip(layers, keys, shares.split([other.heads for other in layers], 1)):
            other.apply_shares(own.to(key.device), key)


def show_gates(model: torch.nn.Module) -> None:
    """Registers hooks on the attention modules that hand gates the hidden states, and `triattention` the cosines and sines of positions."""
    for name, module in model.named_modules():
        if name.endswith("self_attn") and _score not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_score, with_kwargs=True)


def _score(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    # Models differ in the name of the argument.
    cache = next((value for value in kwargs.values() if isinstance(value, KvPolicyCache)), None)
    # `update` tells of a model with more layers.
    if cache is None or module.layer_idx >= len(cache.layers):
        return
    layer = cache.layers[module.layer_idx]
    if layer.policy.needs_query_statistics:
        # All sequences stand at the same positions.
        layer.rotations.append(tuple(part[:1] for part in kwargs["position_embeddings"]))
    if not layer.policy.takes_gates:
        return
    x: Tensor = wide(kwargs["hidden_states"])
    gate = layer.calibration_like(x)
    if "k_base" in gate:
        x = _self_attention(x, gate)
    else:
        # A linear layer, or one hidden layer with a GELU between two.
        for part in ("", "0.", "2."):
            if part + "weight" in gate:
                x = linear(gelu(x) if part == "2." else x, gate[part + "weight"], gate[part + "bias"])
    layer.gates.append(x.mT.float())


def _self_attention(x: Tensor, gate: dict[str, Tensor]) -> Tensor:
    """What a gate of Fast KVzip says of tokens, as a logarithm: the attention of a query to its own key beside learned ones."""
    groups, _, _, d = gate["k_base"].shape
    heads = lambda of, bias: linear(x, gate[f"{of}_proj.weight"], bias).unflatten(-1, (groups, -1, d))
    q = rms_norm(heads("q", gate["q_proj.bias"]), (d,), gate["q_norm.weight"], 1e-6)
    k = rms_norm(heads("k", None), (d,), gate["k_norm.weight"], 1e-6)
    own = (q * k).sum(-1, keepdim=True) / d**0.5 + gate["b"].mT
    others = torch.einsum("bngrd,gsd->bngrs", q, gate["k_base"].squeeze(1)) / d**0.5
    attention = own - torch.cat([own, others], -1).logsumexp(-1, keepdim=True)
    return attention.logsumexp((-2, -1)) - math.log(own.shape[-2])


class _Unmasked(int):
    """The mark of a mask that a `KvPolicyCache` makes by itself."""


def attention_forward(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Any:
    layer: PolicyLayer | None = getattr(key, MARK, None)
    if layer is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    layer.cache._waiting = None
    if attention_mask is not None:
        raise KvtuneError("the model was given an attention mask of its own", "give a mask of ones `(batch, tokens)`, or none")
    if kwargs.get("dropout"):
        raise KvtuneError("attention has dropout, which a cache that evicts has not", "call `model.eval()`")
    if query.requires_grad and torch.is_grad_enabled():
        raise KvtuneError("a cache that evicts is not trained here", "call the model within `torch.no_grad()`, and train with `kvtune.run`")
    window = kwargs.get("sliding_window")
    if window != layer.window:
        what = f"layer {layer.index} of the model has the sliding window {window}, expected {layer.window}, as `{layer.cache.file.path}` says"
        raise KvtuneError(what, "give the policy file of this model")
    if layer.index == 0:
        layer.cache._check_call(query.shape[2], kwargs.get("position_ids"))
        layer.cache._check_sequences(query.shape[0])
    if layer.policy.takes_output:
        layer.policy.output = lambda: _merged_weight(module.o_proj)
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    out = layer.run(query, key, value, Rule(scale, kwargs.get("softcap"), kwargs.get("s_aux")))
    return out.transpose(1, 2).contiguous(), None


def _merged_weight(projection: Any) -> Tensor:
    """The weight of an output projection, with the adapters that PEFT has beside it."""
    base: Tensor = projection.weight
    if not base.is_floating_point() or base.dim() != 2:
        raise KvtuneError("the policy needs the output projection, which is packed", "load the model without quantisation")
    if getattr(projection, "merged", True) or projection.disable_adapters:
        return base
    if not hasattr(projection, "lora_A"):
        raise KvtuneError("the output projection has an adapter that is not LoRA", "merge it into the model")
    weight = wide(base)
    for name in projection.active_adapters:
        if name in projection.lora_A:
            adapted = wide(base) + projection.get_delta_weight(name)
            if name in projection.lora_magnitude_vector:
                adapted = adapted * (projection.lora_magnitude_vector[name].weight / adapted.norm(dim=1))[:, None]
            weight = weight + (adapted - wide(base))
    return weight.to(base.dtype).detach()


def attention_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    if not isinstance(kwargs.get("kv_length"), _Unmasked):
        return sdpa_mask(*args, **kwargs)
    padding = kwargs.get("attention_mask")
    if padding is not None and not padding.all():
        what = "the batch is padded, and the positions of its tokens would be others than in training"
        raise KvtuneError(what, "give prompts of one length, or one by one; where a prompt holds the pad token, `attention_mask=torch.ones_like(ids)`")
    return None


for _name in (ATTENTION, "sdpa"):
    ALL_ATTENTION_FUNCTIONS.register(_name, attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_name, attention_mask)


@torch.no_grad()
def conformance(model: PreTrainedModel, run: str | Path, *, most: int = 10) -> list[str]:
    """Runs the prompt that `kv_policy.json` has recorded with the trained model. Returns how the cache departs from the file, the first
    differences first; an empty list says that it evicts what kvtune has evicted."""
    file = PolicyFile.read(run)
    recorded = file.conformance
    prompt = torch.tensor([recorded["prompt"]], device=model.device)
    cache, tokens = KvPolicyCache(file.trial(), tuple(recorded["initial_part"])), prompt.shape[1]
    for layer in cache.layers:
        layer.left = torch.full((1, layer.heads, tokens + 1), -1, device=model.device)
    cache._read(model, prompt, tokens)
    found = [layer.left[0, :, :-1].tolist() if layer.window is None and layer.left is not None else [] for layer in cache.layers]

    def differences() -> Any:
        for layer, (heads, expected_heads) in enumerate(zip(found, recorded["left"])):
            for head, (left, expected) in enumerate(zip(heads, expected_heads)):
                for token, (query, other) in enumerate(zip(left, expected)):
                    if query != (-1 if other is None else other):
                        ends = [when for when in (query, other) if when not in (-1, None)]
                        told = [f"leaves before query {when}" if when not in (-1, None) else "stays" for when in (query, other)]
                        yield min(ends), f"layer {layer}, KV head {head}, token {token} {told[0]}, recorded: {told[1]}"

    return [text for _, text in islice(sorted(differences()), most)]
