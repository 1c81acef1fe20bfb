"""The cache of one layer: it takes tokens chunk by chunk, lets its policy choose what leaves before each, and attends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from . import attention, quantise
from .attention import Rule
from .errors import KvtuneError
from .policies import NOTHING, Attended, Held, Lastrec, Params, build

if TYPE_CHECKING:
    from .cache import KvPolicyCache

MAX = torch.iinfo(torch.int64).max
# Above every position.
LAST = 1 << 40
# A chunk of `chunking = "reference"` that would end so many tokens before a cache is full, or less, ends where it is full.
BENT_BY = 4


class PolicyLayer(CacheLayerMixin):
    """Entries lie in the order of their positions; under `adakv`, empty slots come first."""

    is_sliding = False

    def __init__(self, cache: KvPolicyCache, index: int) -> None:
        super().__init__()
        file = cache.file
        self.cache, self.index, self.heads = cache, index, file.heads[index]
        self.window, self.slots = file.windows[index], file.cache_lengths[index]
        self.policy = build(file.policy, self.slots) if self.window is None else Lastrec(Params("lastrec", {"init_grace_tokens": 0}, 0))
        for key in ("sinks", "grace"):
            own, written = getattr(self.policy, key), getattr(file, key)
            if written and written[index] != own:
                what = f"`{key}` in `{file.path}` is {written[index]} in layer {index}, expected {own}, as the policy has it"
                raise KvtuneError(what, "install the version of kvtune that wrote the file")
        self.bits = quantise.BITS[file.buffer]
        self.calibration: dict[str, Tensor] = {}
        """Gate and query statistics of this layer from `kv_gates.safetensors`, by name without prefix, where the policy goes by them."""
        self.reset()

    def reset(self) -> None:
        self.seen = self.missing = 0
        """Tokens so far, and those that are still to come of the chunk under way."""
        self.prefill = 0
        """Tokens of the prefill span; known when the prompt begins."""
        self.k: list[Tensor] = []
        """Planes of the stored keys `(B, G, S, ·)`."""
        self.v: list[Tensor] = []
        self.position = torch.empty(0, 0, 0, dtype=torch.int64)
        """`(B, G, S)`, −1 where a slot is empty."""
        self.observed: Tensor | None = None
        self.features = NOTHING
        self.shares: Tensor | None = None
        """Slots of each head `(B, G)`, where they differ."""
        self.left: Tensor | None = None
        """The first query that did not see each token `(B, G, T + 1)`, −1 where all did, for the conformance test; the last place takes what
        does not count."""
        self.chunk = 0
        """Tokens of the chunk under way; of it and of what it sees besides:"""
        self.q: list[Tensor] = []
        self.own: list[Tensor] = []
        self.past: list[Tensor] = []
        self.rotations: list[tuple[Tensor, ...]] = []
        """Cosines and sines of the positions of the tokens of a call `(1, n, F)` or `(1, n, 2F)`, where the policy needs query statistics."""
        self.gates: list[Tensor] = []
        """What the gate says of the tokens of a call `(B, G, n)`, where the policy asks."""

    # What Transformers asks a layer of a cache.

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # Its name in older Transformers.

    def _is_of_the_cache(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("`KvPolicyCache` does this for its layers")

    update = get_mask_sizes = lazy_initialization = _is_of_the_cache

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.missing:
            raise KvtuneError("beams change places within a block of decoding", "use a run with `kv_cache.decode_block = 1`, or no beams")
        for name in ("position", "observed", "features", "shares"):
            if self.prefill and (value := getattr(self, name)) is not None and value is not NOTHING:
                setattr(self, name, value.index_select(0, beam_idx))
        self.k, self.v = ([plane.index_select(0, beam_idx) for plane in planes] for planes in (self.k, self.v))

    def run(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        """Takes the tokens of a call chunk by chunk: `(B, H, N, D)` and `(B, G, N, D)` in; out as `q` is."""
        batch, groups, total, width = k.shape
        if groups != self.heads:
            what = f"layer {self.index} of the model has {groups} KV heads, expected {self.heads}, as `{self.cache.file.path}` says"
            raise KvtuneError(what, "give the policy file of this model")
        if not self.prefill:
            self.width, self.dtype = width, k.dtype
            self.position = torch.empty(batch, groups, 0, dtype=torch.int64, device=k.device)
            self.k, self.v = ([plane[:, :, :0] for plane in quantise.encode(x, self.bits)] for x in (k[:, :, :1], v[:, :, :1]))
            self.prefill = min(self.cache.smallest, max(total - 1, 1) if self.cache.prompt is None else self.cache.prompt)
        q, outs, done = q.reshape(batch, groups, -1, total, width), [], 0
        while done < total:
            if not self.missing:
                self._begin(self.next_chunk(total - done))
            part = slice(done, done + min(self.missing, total - done))
            outs.append(self._part(q[:, :, :, part], k[:, :, part], v[:, :, part], rule))
            done = part.stop
        return torch.cat(outs, 3).flatten(1, 2)

    def next_chunk(self, rest: int) -> int:
        """Tokens of the next chunk, where a call has so many left."""
        file, prefill = self.cache.file, self.prefill or self.cache.smallest
        # The last token of a prompt is the first of decoding.
        left = rest if self.cache.is_reading else rest - 1
        if left == 0:
            return min(self.cache.block, prefill - self.seen) if self.seen < prefill else self.cache.block
        if self.seen < prefill:
            return min(file.chunk_size, prefill - self.seen, left)
        end = self.seen + left
        straight = min(self.seen + file.chunk_size, end)
        if file.chunking == "reference":
            full = next((full for full in file.full_at() if self.seen < full <= end), None)
            straight = full if full is not None and straight + BENT_BY >= full else straight
        return straight - self.seen

    def _begin(self, n: int) -> None:
        """Lets leave what a chunk of `n` tokens has no room beside."""
        filled = self.position.shape[2]
        if self.is_budget_due(n):
            self.cache.share_out(self)
            filled = self.position.shape[2]
        slots = self.slots if self.shares is None else filled
        leaving = filled + n - (slots if self.window is None else self.window - 1 + n)
        if leaving > 0 and self.policy.evicts:
            key = self.order()
            if self.shares is not None:
                key = self._empty_first(key, self.shares, n)
            leaves = torch.zeros_like(key, dtype=torch.bool)
            self._drop(leaves.scatter_(2, key.topk(leaving, largest=False).indices, True), filled - leaving)
        self.past = [self._restored(planes) for planes in (self.k, self.v)]
        self.chunk = self.missing = n

    def _part(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        """Attends with the next tokens of the chunk under way."""
        n = k.shape[2]
        if n < self.chunk:  # A part that waits for the others must not keep the whole prompt.
            q, k, v = q.clone(), k.clone(), v.clone()
        self.own = [torch.cat([old, new], 2) for old, new in zip(self.own, (k, v))] or [k, v]
        k, v = (torch.cat([past, own], 2) for past, own in zip(self.past, self.own))
        self.q.append(q)
        self.seen, self.missing, mass = self.seen + n, self.missing - n, NOTHING
        mask = self._mask(n, k.shape[2])
        wanted = self.policy.queries(self.seen - self.chunk + self.missing < self.prefill)
        if n == self.chunk and wanted >= n:
            out, mass = attention.attend_and_sum(q, k, v, mask, rule)
        else:
            out = attention.attend(q, k, v, mask, rule)
        if not self.missing:
            if mass is NOTHING and wanted:
                last = torch.cat(self.q, 3)[:, :, :, max(self.chunk - wanted, 0) :]
                mass = attention.mass_of(last, k, self._mask(last.shape[3], k.shape[2]), rule)
            self._end(k, v, mass, rule)
        return out

    def _end(self, k: Tensor, v: Tensor, mass: Tensor, rule: Rule) -> None:
        """Stores the chunk, of which and of the past `k` and `v` are what it has seen, and lets the policy keep its statistics."""
        own_k, own_v = self.own
        if self.bits:
            stored = ((self.k, own_k), (self.v, own_v))
            self.k, self.v = ([torch.cat(pair, 2) for pair in zip(planes, quantise.encode(own, self.bits))] for planes, own in stored)
        else:
            self.k, self.v = [k], [v]
        batch, groups = k.shape[:2]
        first = self.seen - self.chunk
        new = torch.arange(first, self.seen, device=k.device).expand(batch, groups, -1)
        self.position = torch.cat([self.position, new], 2)
        features = self.policy.describe(own_k, own_v, self._as_stored)
        if self.policy.takes_gates:
            if not self.gates:
                what = f"the policy of `{self.cache.file.path}` has gates, and they do not see the model's layers"
                raise KvtuneError(what, "load the model with `kvtune.load`, or call `cache.read(model, input_ids)` before")
            gates = torch.cat(self.gates, 2)
            own, rest = gates[:, :, : self.chunk], gates[:, :, self.chunk :]
            features.append(own)
            self.gates = [rest] if rest.numel() else []
        if self.policy.needs_query_statistics:
            self.policy.query_statistics = self._query_statistics()
        if features:
            own = torch.stack(features, -1)
            self.features = own if self.features is NOTHING else torch.cat([self.features, own], 2)
        if self.observed is not None:
            self.observed = torch.nn.functional.pad(self.observed, (0, self.chunk))
        q = self.q[0] if len(self.q) == 1 else torch.cat(self.q, 3)

        def weights(last: int) -> Tensor:
            return attention.weights_of(part := q[:, :, :, -last:], k, self._mask(part.shape[3], k.shape[2]), rule)

        stats = self.position, self.observed, self.features
        seen = Attended(q, rule.scale, k, v, mass, *stats, first < self.prefill, self.seen, weights)
        observed = self.policy.observe(seen)
        self.observed = self.observed if observed is None else observed
        self.past, self.own, self.q = [], [], []

    def calibration_like(self, x: Tensor) -> dict[str, Tensor]:
        """The same in the dtype of `x`, and where that is."""
        self.calibration = {name: tensor.to(x) for name, tensor in self.calibration.items()}
        return self.calibration

    def _query_statistics(self) -> tuple[Tensor, Tensor]:
        if not self.rotations:
            what = f"the policy of `{self.cache.file.path}` goes by the positions of tokens, and does not see the model's layers"
            raise KvtuneError(what, "load the model with `kvtune.load`, or call `cache.read(model, input_ids)` before")
        parts = [torch.cat(parts, 1) for parts in zip(*self.rotations)]
        rest = tuple(part[:, self.chunk :] for part in parts)
        self.rotations = [rest] if rest[0].shape[1] else []
        calibration = self.calibration_like(quantise.wide(parts[0]))
        mean, excess = calibration["query_mean"], calibration["query_length_excess"]
        pairs = excess.shape[1]
        low, high, alone = mean.split([pairs, pairs, mean.shape[1] - 2 * pairs], -1)
        cos, sin = (quantise.wide(part[0, self.chunk - 1, :pairs]) for part in parts)
        # Cosines and sines contain the attention factor of YaRN or LongRoPE, one for all pairs.
        factor = cos.hypot(sin).mean() if pairs else 1
        return torch.cat([low * cos - high * sin, high * cos + low * sin, alone], -1), excess * factor

    def _restored(self, planes: list[Tensor]) -> Tensor:
        return quantise.decode(planes, self.bits, self.width, self.dtype)

    def _as_stored(self, x: Tensor) -> Tensor:
        return self._restored(quantise.encode(x, self.bits))

    def _mask(self, n: int, entries: int) -> Tensor | None:
        """What each of the last `n` queries sees of the entries, of which the last `n` are its own and those after it; `None` for all."""
        mask = None
        if n > 1 or (self.window is not None and entries > self.window):
            mask = torch.ones(n, entries, dtype=torch.bool, device=self.position.device).tril_(entries - n)
            if self.window is not None:
                # What a window holds is without gaps.
                mask.triu_(entries - n - self.window + 1)
        if self.shares is not None:
            held = torch.nn.functional.pad(self.position >= 0, (0, entries - self.position.shape[2]), value=True)[:, :, None]
            mask = held.expand(-1, -1, n, -1) if mask is None else held & mask
        return mask

    # What leaves.

    def order(self) -> Tensor:
        """The order of the entries before a chunk as integers `(B, G, S)`, lowest first; what may not leave has the largest."""
        policy, position = self.policy, self.position
        stays = position >= self.seen - policy.grace
        if policy.initial and self.cache.initial_part is not None:
            start, end = self.cache.initial_part
            stays = stays | ((position >= start) & (position < min(end, start + policy.initial)))
        candidates = (position >= policy.sinks) & ~stays

        def keys() -> Tensor:
            return self._restored(self.k)

        held = Held(position, self.observed, self.features, candidates, keys, self.seen, self.prefill)
        score = policy.score(held)
        if score is None:
            is_first = (position >= 0) & (position < max(policy.keep_first, policy.sinks))
            return torch.where(is_first, LAST - position, position).masked_fill(stays, MAX)
        # In the order of the scores; of equal ones the older leaves first. Adding zero makes -0.0 a zero like the other.
        bits = (score.float() + 0.0).nan_to_num(torch.inf, torch.inf, -torch.inf).contiguous().view(torch.int32).long()
        return ((bits ^ (bits >> 63 & 0x7FFFFFFF)) * (1 << 32) + position.clamp_min(0)).masked_fill(~candidates, MAX)

    def _drop(self, leaves: Tensor, left: int) -> None:
        """Removes entries, as many of each head, so that `left` stay."""
        if self.left is not None:
            at = self.position.masked_fill(~leaves | (self.position < 0), self.left.shape[2] - 1)
            self.left.scatter_(2, at, self.seen)
        self._take(torch.arange(leaves.shape[2], device=leaves.device).expand_as(leaves)[~leaves].view(*leaves.shape[:2], left))

    def _take(self, slots: Tensor) -> None:
        """Keeps the entries in some slots `(B, G, m)`."""
        batch, groups, entries = self.position.shape
        heads = torch.arange(batch * groups, device=slots.device).view(batch, groups, 1)
        flat = (slots + heads * entries).flatten()

        def take(x: Tensor) -> Tensor:
            return x.flatten(0, 2).index_select(0, flat).view(*slots.shape, *x.shape[3:])

        self.k, self.v = [take(plane) for plane in self.k], [take(plane) for plane in self.v]
        self.position = take(self.position)
        self.observed = None if self.observed is None else take(self.observed)
        self.features = NOTHING if self.features is NOTHING else take(self.features)

    # Shares of the heads (`adakv`).

    def is_budget_due(self, n: int) -> bool:
        return self.policy.floor is not None and self.shares is None and self.position.shape[2] + n > self.slots

    def apply_shares(self, shares: Tensor, key: Tensor) -> None:
        """Lets leave what exceeds a head's share `(B, G)`; all heads get as many slots as the largest share, the empty ones in front."""
        filled = self.position.shape[2]
        slots = max(int(shares.max()), filled)
        kept = shares.clamp_max(filled)[..., None]
        rank = key.argsort(dim=-1, stable=True).argsort(-1)
        leaves = rank < filled - kept
        if self.left is not None:
            self.left.scatter_(2, self.position.masked_fill(~leaves, self.left.shape[2] - 1), self.seen)
        # Those that stay go behind the empty slots, in their order.
        order = torch.arange(filled, device=key.device).masked_fill(leaves, -1).sort(-1).values
        order = torch.nn.functional.pad(order, (slots - filled, 0), value=-1)
        self.shares = shares
        self._take(order.clamp_min(0))
        self.position = self.position.masked_fill(order < 0, -1)

    def _empty_first(self, key: Tensor, shares: Tensor, n: int) -> Tensor:
        """Puts the empty slots that a chunk takes before everything else, and the others behind it."""
        is_empty = self.position < 0
        held = (~is_empty).sum(-1, keepdim=True)
        number = is_empty.cumsum(-1)
        taken = is_empty & (number <= (shares[..., None] - held).clamp_max(n))
        return torch.where(taken, number - MAX, key.masked_fill(is_empty, MAX))


def share_out(key: Tensor, slots: int, floor: float) -> Tensor:
    """The shares of the heads of a sequence `(G)`: `floor` of the slots for each, the rest by how many of the better half of all entries
    are its own. `key (G, S)` orders the entries of all heads."""
    groups, filled = key.shape
    # Of equals, every head gets its part.
    best = key.t().flatten().argsort(dim=0, descending=True, stable=True) % groups
    better = (groups * filled + 1) // 2
    counts = best[:better].bincount(minlength=groups).tolist()
    least = int(floor * slots)
    free = groups * (slots - least)
    shares = [least + count * free // better for count in counts]
    # What rounding down leaves goes to the heads that lost most by it.
    order = sorted(range(groups), key=lambda head: (-(counts[head] * free % better), head))
    for i in range(groups * slots - sum(shares)):
        shares[order[i % groups]] += 1
    return torch.tensor(shares, device=key.device)
