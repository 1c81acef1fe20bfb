"""The policies: which entries of a cache leave first. docs/reference/policies.md describes them; src/cache/policies has the originals.

Tensors are named by their dimensions: B sequences, G KV heads, R query heads of each, n tokens of a chunk, S entries, D channels.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, pad

from .errors import KvtuneError
from .quantise import wide

ALL = sys.maxsize
NOTHING = torch.empty(0)
"""What stands where a policy does not ask."""
TINY = torch.finfo(torch.float32).tiny


@dataclass
class Held:
    """What a cache holds before a chunk comes."""

    position: Tensor
    """`(B, G, S)`, −1 where a slot is empty."""
    observed: Tensor | None
    """What the policy made of the attention so far `(B, G, S)`."""
    features: Tensor
    """What it said of each entry when that came `(B, G, S, F)`."""
    candidates: Tensor
    """Which entries may leave `(B, G, S)`."""
    keys: Callable[[], Tensor]
    next_position: int
    prefill: int


@dataclass
class Attended:
    """What a chunk has seen; entries as the chunk saw them."""

    q: Tensor
    """`(B, G, R, n, D)`."""
    scale: float
    k: Tensor
    v: Tensor
    mass: Tensor
    """Attention that each entry got from the queries that the policy asks for, the mean over the heads of a group `(B, G, S)`."""
    position: Tensor
    previous: Tensor | None
    features: Tensor
    is_prefill: bool
    next_position: int
    weights: Callable[[int], Tensor]
    """The attention weights of so many last queries `(B, G, R, w, S)`."""


class Policy:
    sinks = 0
    grace = 0
    """First and last tokens that never leave."""
    initial = 0
    """How many tokens of the initial part of a prompt never leave."""
    keep_first = 0
    """First tokens that leave last while there are no scores."""
    evicts = True
    floor: float | None = None
    """The part of the slots that every head keeps, where heads have shares of their own."""
    across_layers = False
    takes_gates = False
    """Whether the last of the numbers of an entry is what the gate of the layer says."""
    needs_query_statistics = False
    query_statistics: tuple[Tensor, Tensor]
    """The mean query, averaged over distances and turned to the chunk's last position `(H, D)`, and the length excess of its pairs of channels
    times RoPE's attention factor `(H, F)`, where the policy needs them."""
    takes_output = False
    output: Callable[[], Tensor]
    """The weight of the output projection `(E, H · D)`, where the policy takes it."""

    def queries(self, is_prefill: bool) -> int:
        """Of how many last queries of a chunk the attention counts."""
        return 0

    def describe(self, k: Tensor, v: Tensor, stored: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Numbers `(B, G, n)` that stay with new entries."""
        return []

    def observe(self, seen: Attended) -> Tensor | None:
        """What is remembered of each entry after a chunk; `None` leaves what was."""
        return None

    def score(self, held: Held) -> Tensor | None:
        """The lowest leave first; `None` goes by position."""
        return held.observed


class Params:
    """The parameters of a policy, each of which must be known."""

    def __init__(self, name: str, given: dict[str, Any], slots: int) -> None:
        self.name, self.given, self.slots = name, dict(given), slots

    def take(self, key: str, default: Any = None) -> Any:
        return self.given.pop(key, default)

    def sinks(self, default: int) -> int:
        return self.take("init_grace_tokens", self.take("sink_tokens", default))

    def grace(self) -> int:
        grace = self.take("grace_period", 0)
        return int(grace * self.slots) if isinstance(grace, float) else grace

    def done(self) -> None:
        if self.given:
            what = f"the policy `{self.name}` in `kv_policy.json` has an unknown parameter `{next(iter(self.given))}`"
            raise KvtuneError(what, "install the version of kvtune that wrote the file")


class Dense(Policy):
    evicts = False

    def __init__(self, params: Params) -> None:
        pass


class Lastrec(Policy):
    def __init__(self, params: Params) -> None:
        default = 4 if params.name == "streaming-llm" else min(max(params.slots // 8, 1), 16)
        self.sinks = self.keep_first = params.sinks(default)


class SmartLastrec(Policy):
    def __init__(self, params: Params) -> None:
        self.initial = max(int(params.slots * params.take("max_initial_fraction", 0.1)), 1)
        # Where the initial part ends is found in the prompt, before the cache sees it.
        for key in ("end_initial_regex", "include_end_string", "pad_id", "range_is_prefix"):
            params.take(key)


class HeavyHitters(Policy):
    """Attention mass, plain or weighted with the norms of values, and the error of quantisation if that counts."""

    def __init__(self, params: Params) -> None:
        self.by_value = params.name.endswith("-vlen")
        self.beside_error = params.take("combination_constant", 0.5) if params.name.startswith("qh2o") else None
        self.grace = params.grace()
        self.keep_first = int(params.take("keep_initial_fraction", 0.05) * params.slots)
        self.normalise = params.take("normalize_scores", False)
        self.reference_counts = params.take("reference_counts", False)
        self.score_prefill = params.take("score_prefill", False)

    def queries(self, is_prefill: bool) -> int:
        return ALL if self.score_prefill or not is_prefill else 0

    def describe(self, k: Tensor, v: Tensor, stored: Callable[[Tensor], Tensor]) -> list[Tensor]:
        features = [norm(v)] if self.by_value else []
        if self.beside_error is not None:
            features.append(norm(stored(k) - k) + norm(stored(v) - v))
        return features

    def observe(self, seen: Attended) -> Tensor | None:
        if not self.queries(seen.is_prefill):
            return None
        given = seen.mass
        if self.by_value:
            # A chunk of n queries gives n to all entries together.
            weighted = given * seen.features[..., 0]
            given = weighted * seen.q.shape[3] / weighted.sum(-1, keepdim=True).clamp_min(TINY)
        return given if seen.previous is None else seen.previous + given

    def score(self, held: Held) -> Tensor | None:
        score = held.observed
        if score is not None and self.normalise:
            first = 0 if self.score_prefill else held.prefill - self.reference_counts
            score = score / (held.next_position - held.position.clamp_min(first)).float()
        if score is None or self.beside_error is None:
            return score
        a, others = self.beside_error, ~held.candidates

        def unit(x: Tensor) -> Tensor:
            low = x.masked_fill(others, torch.inf).amin((1, 2), keepdim=True)
            high = x.masked_fill(others, -torch.inf).amax((1, 2), keepdim=True)
            return (x - low) / (high - low).clamp_min(TINY)

        return unit(score) * a + unit(held.features[..., -1]) * ((a - 1) / 2) + (1 - a)


class Keydiff(Policy):
    def __init__(self, params: Params) -> None:
        self.grace = params.grace()

    def score(self, held: Held) -> Tensor:
        """Minus the cosine with the mean of all directions."""
        keys, is_empty = wide(held.keys()), (held.position < 0)[..., None]
        length = keys.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        mean = length.reciprocal().masked_fill(is_empty, 0).mT @ keys.masked_fill(is_empty, 0)
        mean = mean / mean.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        return -(keys @ mean.mT / length).squeeze(-1).float()


class Knorm(Policy):
    def __init__(self, params: Params) -> None:
        self.grace = params.grace()

    def describe(self, k: Tensor, v: Tensor, stored: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return [norm(k)]

    def score(self, held: Held) -> Tensor:
        return -held.features[..., 0]


class Tova(Policy):
    def __init__(self, params: Params) -> None:
        self.grace = params.grace()

    def queries(self, is_prefill: bool) -> int:
        return 1

    def observe(self, seen: Attended) -> Tensor:
        return seen.mass.mean(1, keepdim=True).expand_as(seen.mass)


class Snapkv(Policy):
    """What scores by the last few queries of a chunk, and by neighbours."""

    kernel, pooling = 5, "max"

    def __init__(self, params: Params) -> None:
        self.grace = self.window = params.take("window_size", min(max(params.slots // 8, 1), 32))
        self.kernel = params.take("kernel_size", self.kernel)
        self.pooling = params.take("pooling", self.pooling) if params.name == "snapkv" else self.pooling

    def queries(self, is_prefill: bool) -> int:
        return self.window

    def observe(self, seen: Attended) -> Tensor:
        return self.pooled(seen.mass, seen.position)

    def pooled(self, score: Tensor, position: Tensor) -> Tensor:
        """The largest of each entry and its neighbours, or the mean; entries lie in the order of their positions."""
        half = self.kernel // 2
        if self.pooling == "max":
            return max_pool1d(score, self.kernel, 1, half)
        held = (position >= 0).float()
        near = [pad(x, (half, half)).unfold(-1, self.kernel, 1).sum(-1) for x in (score * held, held)]
        return near[0] / near[1].clamp_min(1)


class Dropkv(Snapkv):
    kernel, pooling = 7, "mean"

    def queries(self, is_prefill: bool) -> int:
        return 0

    def observe(self, seen: Attended) -> Tensor:
        """`Σ_w (p / (1 − p))² · ‖v − o‖²`; a query that sees one entry alone does not count for it."""
        weight, v = seen.weights(self.window).double(), seen.v.double()
        per_group, total = weight.shape[2], weight.sum(-1, keepdim=True).clamp_min(1)
        rest = total - weight
        factor = torch.where(rest > 1e-12, weight / rest.clamp_min(1e-6), 0).square().flatten(2, 3)
        far = torch.cdist((weight / total).flatten(2, 3) @ v, v, compute_mode="donot_use_mm_for_euclid_dist")
        return self.pooled((factor * far.square()).sum(2).float() / per_group, seen.position)


class Defensivekv(Snapkv):
    pooling, takes_output = "mean", True

    def queries(self, is_prefill: bool) -> int:
        return 0

    def describe(self, k: Tensor, v: Tensor, stored: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """`‖v W_O‖₁`, the mean over the heads of a group."""
        weight = self.output().unflatten(1, (v.shape[1], -1, v.shape[3])).permute(1, 2, 3, 0)
        return [wide((v[:, :, None] @ weight).abs()).sum(-1).mean(2).float()]

    def observe(self, seen: Attended) -> Tensor:
        """The worst that any query would miss; entries that with the window get 0.9 of the attention lie above all others."""
        rows = seen.weights(self.window).double().flatten(2, 3)
        old = (seen.position >= 0) & (seen.position < seen.next_position - self.window)
        given = rows.masked_fill(~old[:, :, None], 0)
        near = self.pooled(given.float(), seen.position.masked_fill(~old, -1)[:, :, None]).double().masked_fill(~old[:, :, None], 0)
        near = near / near.sum(-1, keepdim=True).clamp_min(TINY) * given.sum(-1, keepdim=True)
        worst = near.amax(2)
        worst = worst.maximum(worst.sum(-1, keepdim=True) / old.sum(-1, keepdim=True).clamp_min(1))
        norm = seen.features[..., 0].double().masked_fill(~old, 0)
        risk = (worst * norm / norm.sum(-1, keepdim=True).clamp_min(TINY)).masked_fill(~old, 0)
        share = given.sum(2) / rows.sum((2, 3))[..., None].clamp_min(TINY)
        share_sorted, order = share.sort(-1, descending=True)
        first = share_sorted.cumsum(-1) - share.sum(-1, keepdim=True) < 0.9 - 1
        first = torch.zeros_like(old).scatter(-1, order, first) & old
        return (risk + first).float()


class Rkv(Snapkv):
    kernel = 7

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.attention, self.threshold = params.take("attention_weight", 0.1), params.take("similarity_threshold", 0.5)

    def describe(self, k: Tensor, v: Tensor, stored: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """The mean cosine with the others of the chunk, but for those whose last neighbour it is."""
        token = torch.arange(k.shape[2], device=k.device)
        k = wide(k) / norm(k).clamp_min(TINY)[..., None]
        cosine = (k @ k.mT).masked_fill(token == token[:, None], 0)
        last = ((cosine > self.threshold) * token).amax(-1, keepdim=True)
        return [cosine.masked_fill(token == last, 0).mean(-2).float()]

    def observe(self, seen: Attended) -> Tensor:
        return self.pooled(seen.mass / min(self.window, seen.q.shape[3]), seen.position)

    def score(self, held: Held) -> Tensor | None:
        if held.observed is None:
            return None
        alike = held.features[..., 0].masked_fill(held.position < 0, torch.finfo(torch.float32).min)
        return held.observed * self.attention - alike.softmax(-1) * (1 - self.attention)


class Lagkv(Policy):
    def __init__(self, params: Params) -> None:
        self.lag, self.sinks = params.take("lag_size", min(max(params.slots // 8, 1), 128)), params.sinks(4)
        self.grace = 2 * self.lag

    def observe(self, seen: Attended) -> Tensor:
        """Ranks the partitions whose next one has become complete: by how much channels differ, scaled by their range in that one."""
        rank = torch.zeros_like(seen.position, dtype=torch.float32) if seen.previous is None else seen.previous.clone()
        before, now = ((end - self.sinks) // self.lag - 1 for end in (seen.next_position - seen.q.shape[3], seen.next_position))
        for first in range(self.sinks + max(before, 0) * self.lag, self.sinks + now * self.lag, self.lag):
            # Each head holds both partitions, whole.
            own, following = ((seen.position >= start) & (seen.position < start + self.lag) for start in (first, first + self.lag))
            spread = []
            for x in (seen.k, seen.v):
                x, other = (wide(x[part]).view(*x.shape[:2], self.lag, -1) for part in (own, following))
                low, high = other.aminmax(dim=2, keepdim=True)
                span = torch.where(high > low, high - low, 1)
                spread.append(((x - low) / span).std(-1).softmax(-1, dtype=torch.float64))
            score = spread[0] + spread[1]
            # Of equals the older ranks lower.
            rank[own] = (score.argsort(dim=-1, stable=True).argsort(-1) + 1).float().flatten() / self.lag
        return rank


class ExpectedAttention(Policy):
    def __init__(self, params: Params) -> None:
        self.grace, self.sinks = params.grace(), params.sinks(4)

    def observe(self, seen: Attended) -> Tensor:
        """`softmax(μ·k·s + ½ s² kᵀΣk)` of queries distributed as the chunk's, times the norm of the value."""
        q, k = seen.q.float() * seen.scale, seen.k.float()[:, :, None]
        n, width = q.shape[3:]
        mean = q.mean(3, keepdim=True)
        centred = q - mean
        # Of fewer queries than channels the covariance is larger than the queries.
        squares = (k @ centred.mT).square() if n < width else (k @ (centred.mT @ centred)) * k
        logit = (k @ mean.mT).squeeze(-1) + squares.sum(-1) / (2 * n)
        logit = logit.masked_fill((seen.position < 0)[:, :, None], torch.finfo(torch.float32).min)
        return logit.softmax(-1).mean(2) * norm(seen.v)


class Triattention(Policy):
    needs_query_statistics = True

    def __init__(self, params: Params) -> None:
        self.grace, self.sinks = params.grace(), params.sinks(4)

    def score(self, held: Held) -> Tensor:
        """The mean query's scores, and the length excess times the lengths of keys, normalised; the largest of a group's heads."""
        mean, excess = self.query_statistics
        k, pairs = held.keys().to(mean.dtype), excess.shape[1]
        groups, length = k.shape[1], k[..., :pairs].hypot(k[..., pairs : 2 * pairs])
        score = mean.unflatten(0, (groups, -1)) @ k.mT + excess.unflatten(0, (groups, -1)) @ length.mT
        is_held = (held.position >= 0)[:, :, None].to(score.dtype)
        average = lambda x: (x * is_held).sum(-1, keepdim=True) / is_held.sum(-1, keepdim=True).clamp_min(1)
        around = score - average(score)
        return (around / average(around.square()).sqrt().clamp_min(1e-6)).amax(2).float()


class Learned(Policy):
    takes_gates = True

    def __init__(self, params: Params) -> None:
        self.grace, self.sinks, self.gate_alone = params.grace(), params.sinks(4), params.take("gate_alone")

    def queries(self, is_prefill: bool) -> int:
        return 0 if self.gate_alone else ALL

    def observe(self, seen: Attended) -> Tensor | None:
        return None if self.gate_alone else seen.mass if seen.previous is None else seen.previous + seen.mass

    def score(self, held: Held) -> Tensor:
        gate = held.features[..., -1]
        if held.observed is None:
            return gate
        queries = (held.next_position - held.position).float()
        return gate + (held.observed.clamp_min(torch.finfo(torch.float32).tiny) / queries.square()).log()


CLASSES: dict[str, type[Policy]] = {
    "dense": Dense,
    "lastrec": Lastrec,
    "streaming-llm": Lastrec,
    "smart-lastrec": SmartLastrec,
    # Each sequence is run as if it were alone, so that there is no batch to sum over.
    "h2o-orig": HeavyHitters,
    **{name: HeavyHitters for name in ("h2o", "h2o-vlen", "qh2o", "qh2o-vlen")},
    "keydiff": Keydiff,
    "knorm": Knorm,
    "tova": Tova,
    "snapkv": Snapkv,
    "defensivekv": Defensivekv,
    "dropkv": Dropkv,
    "rkv": Rkv,
    "lagkv": Lagkv,
    "expected-attention": ExpectedAttention,
    "learned": Learned,
    "triattention": Triattention,
}


def build(policy: str | dict[str, Any], slots: int) -> Policy:
    """The policy of a layer with so many slots; `policy` is its name, or a table of parameters under its name."""
    ((name, given),) = (policy if isinstance(policy, dict) else {policy: {}}).items()
    params = Params(name, given, slots)
    if name == "adakv":
        built = build(params.take("policy", "snapkv"), slots)
        protected = built.sinks + built.grace + built.initial
        default = 0.2 if int(0.2 * slots) > protected else min((protected + 1.5) / slots, 1.0)
        built.floor = params.take("floor", default)
        built.across_layers = params.take("across_layers", False)
    elif name in CLASSES:
        built = CLASSES[name](params)  # type: ignore[call-arg]
    else:
        raise KvtuneError(f"the policy `{name}` is not known here", "install the version of kvtune that wrote `kv_policy.json`")
    params.done()
    return built


def norm(x: Tensor) -> Tensor:
    """The length of each vector `(…, D)`, f32."""
    return wide(x).norm(dim=-1).float()
