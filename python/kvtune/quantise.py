"""How a buffer keeps keys and values: as they are, or in few bits with a minimum and a scale for each vector, by the rule of METHOD.md."""

from __future__ import annotations

import torch
from torch import Tensor

BITS = {"plain": 0, "int8": 8, "int4": 4}
# Beyond these numbers f16 overflows, and bf16 takes its place.
F16_LIMIT = 60_000.0
# The dtype of minimum and scale, and what rounding to it can cost: relative and near zero, with a hundredth more to be safe.
F16 = (torch.float16, 1.01 / 2048, 1.01 / (1 << 25))
BF16 = (torch.bfloat16, 1.01 / 256, 1.01e-37)


def wide(x: Tensor) -> Tensor:
    """`x` in the dtype in which sums and scores are computed."""
    return x if x.dtype == torch.float64 else x.float()


def encode(x: Tensor, bits: int) -> list[Tensor]:
    """Planes `(…, ·)` that hold the vectors `x (…, D)`."""
    if not bits:
        return [x]
    x, steps = wide(x), 2**bits - 1
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    is_large = (low.abs() > F16_LIMIT) | (high - low > F16_LIMIT * steps)
    narrow, large = (_cover(low, high, steps, *form) for form in (F16, BF16))
    # The sign of a scale says that both numbers are bf16.
    large[1] = (large[1].int() - (1 << 15)).to(torch.int16)
    range_ = torch.cat([torch.where(is_large, b, a) for a, b in zip(narrow, large)], -1)
    low, scale = _read(range_, x.dtype)
    level = ((x - low) / scale).round_().clamp_(0, steps).to(torch.uint8)
    if bits == 4:  # The first half of a vector lies in the upper bits.
        half = (level.shape[-1] + 1) // 2
        level = torch.nn.functional.pad(level, (0, 2 * half - level.shape[-1]))
        level = level[..., :half] * 16 + level[..., half:]
    return [level, range_]


def decode(planes: list[Tensor], bits: int, width: int, dtype: torch.dtype) -> Tensor:
    """The vectors `(…, width)` that planes stand for."""
    if not bits:
        return planes[0]
    level, range_ = planes
    if bits == 4:
        level = torch.cat([level >> 4, level & 15], -1)[..., :width]
    low, scale = _read(range_, torch.float64 if dtype == torch.float64 else torch.float32)
    return (level.to(low.dtype) * scale + low).to(dtype)


def _cover(low: Tensor, high: Tensor, steps: int, dtype: torch.dtype, relative: float, absolute: float) -> list[Tensor]:
    """The bits of a minimum that is not above `low`, and of a scale with which `steps` reach `high`."""
    minimum = (low - low.abs() * relative - absolute).to(dtype)
    scale = (high - minimum.to(low.dtype)) / steps
    return [minimum.view(torch.int16), (scale * (1 + relative) + absolute).to(dtype).view(torch.int16)]


def _read(range_: Tensor, dtype: torch.dtype) -> list[Tensor]:
    is_large, bits = range_[..., 1:] < 0, range_.clone()
    bits[..., 1] &= 0x7FFF
    both = torch.where(is_large, bits.view(torch.bfloat16).to(dtype), bits.view(torch.float16).to(dtype))
    return [both[..., :1], both[..., 1:]]
