"""Attention of a chunk over the entries of a cache, and the attention mass that each entry gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .quantise import wide

# Scores that exist at a time, at most: longer chunks are taken in parts.
SCORES = 1 << 24


@dataclass(frozen=True)
class Rule:
    """How a layer scores keys."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    """A learned score of each query head without a value `(H,)`."""


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: Rule) -> Tensor:
    """The output `(B, G, R, n, D)` of queries of that shape over entries `(B, G, S, D)`; `mask (…, n, S)` says what each query sees."""
    if rule.softcap is not None or rule.sinks is not None:
        return attend_and_sum(q, k, v, mask, rule)[0]
    if mask is not None:
        mask = mask.repeat(*[1] * (mask.dim() - 2), q.shape[2], 1)
    # The heads of a group stand side by side, so that no key is copied.
    return scaled_dot_product_attention(q.flatten(2, 3), k, v, attn_mask=mask, scale=rule.scale).view(q.shape)


def attend_and_sum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    """The same, and the attention mass `(B, G, S)`."""
    k, v, outs = wide(k), wide(v), []
    mass = k.new_zeros(k.shape[:3], dtype=torch.float32)
    for part, weight in _weights(q, k, mask, rule):
        outs.append((weight.flatten(2, 3) @ v).view(part.shape))
        mass += _sum(weight)
    return torch.cat(outs, 3).to(q.dtype), mass


def mass_of(q: Tensor, k: Tensor, mask: Tensor | None, rule: Rule) -> Tensor:
    """The attention mass `(B, G, S)` that queries give."""
    return torch.stack([_sum(weight) for _, weight in _weights(q, wide(k), mask, rule)]).sum(0)


def weights_of(q: Tensor, k: Tensor, mask: Tensor | None, rule: Rule) -> Tensor:
    """The softmax weights `(B, G, R, n, S)` of few queries."""
    return torch.cat([weight for _, weight in _weights(q, wide(k), mask, rule)], 3)


def _sum(weight: Tensor) -> Tensor:
    return weight.sum((2, 3)).float() / weight.shape[2]


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, rule: Rule) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields queries with their softmax weights `(B, G, R, n, S)`, a part at a time."""
    batch, groups, per_group, n, _ = q.shape
    rows = max(SCORES // (batch * groups * per_group * k.shape[2]), 1)
    for start in range(0, n, rows):
        part = q[:, :, :, start : start + rows]
        score = (wide(part).flatten(2, 3) * rule.scale @ k.mT).view(*part.shape[:4], k.shape[2])
        if rule.softcap is not None:
            score = torch.tanh(score / rule.softcap) * rule.softcap
        if mask is not None:
            seen = mask[..., start : start + rows, :]
            score.masked_fill_(~(seen if seen.dim() == 2 else seen[:, :, None]), -torch.inf)
        if rule.sinks is None:
            yield part, score.softmax(-1)
        else:
            sink = rule.sinks.to(score.dtype).view(1, groups, per_group, 1, 1).expand(*score.shape[:4], 1)
            yield part, torch.cat([score, sink], -1).softmax(-1)[..., :-1]
