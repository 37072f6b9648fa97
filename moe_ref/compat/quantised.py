"""Two quantised forms in which checkpoints are published, turned into plain numbers.

* 4-bit floats in blocks of 32 with a power of two each (OCP MXFP4; gpt-oss): `NAME_blocks` uint8 [..., B, 16] holds two
  values a byte, low half first, `NAME_scales` uint8 [..., B] the exponent plus 127.
* 8-bit floats with one fp32 factor per square block (DeepSeek-V3): `NAME` float8 [O, I] and `NAME_scale_inv`.

Nothing is computed in these forms here: weights are put back to numbers once, on loading.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_ref.errors import UsageError

BLOCKS, SCALES, SCALE_INV = "_blocks", "_scales", "_scale_inv"

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of a 4-bit float (2 bits of exponent, 1 of mantissa); the fourth bit is the sign."""

FP8_BLOCK = 128
"""Rows and columns that share a factor."""


def dequantised(tensors: Mapping[str, Tensor], name: str) -> Tensor | None:
    """The tensor called `name` if it is stored in a quantised form, in bf16; None if it is not.

    Raises:
        UsageError: its factors are missing, or don't fit.
    """
    if f"{name}{BLOCKS}" in tensors:
        if f"{name}{SCALES}" not in tensors:
            raise UsageError(f"the checkpoint has {name}{BLOCKS} without {name}{SCALES}; it is incomplete")
        return from_mxfp4(tensors[f"{name}{BLOCKS}"], tensors[f"{name}{SCALES}"])
    if name in tensors and f"{name}{SCALE_INV}" in tensors:
        return from_fp8(tensors[name], tensors[f"{name}{SCALE_INV}"])
    return None


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """uint8 [..., B, 16] and uint8 [..., B] -> bf16 [..., 32 B]; exact, as bf16 has more range and bits."""
    if blocks.shape[:-1] != scales.shape or blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise UsageError(
            f"4-bit blocks {list(blocks.shape)} ({blocks.dtype}) and scales {list(scales.shape)} ({scales.dtype}) "
            "don't fit; expected uint8 [..., B, 16] and uint8 [..., B]"
        )
    table = torch.tensor([*FP4, *(-value for value in FP4)], dtype=torch.float32)
    pairs = torch.stack([blocks & 0x0F, blocks >> 4], dim=-1).flatten(-2)
    values = torch.ldexp(table[pairs.long()], scales.int().unsqueeze(-1) - 127)
    return values.flatten(-2).to(torch.bfloat16)


def from_fp8(value: Tensor, scale: Tensor) -> Tensor:
    """float8 [O, I] and fp32 [ceil(O / 128), ceil(I / 128)] -> bf16 [O, I]."""
    if value.dim() != 2 or scale.dim() != 2:
        raise UsageError(
            f"8-bit weights {list(value.shape)} have factors {list(scale.shape)}, expected two dimensions each"
        )
    rows, columns = value.shape
    full = scale.float().repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    if full.shape != value.shape:
        raise UsageError(
            f"8-bit weights {list(value.shape)} have factors {list(scale.shape)}, expected one per block of "
            f"{FP8_BLOCK} x {FP8_BLOCK}"
        )
    return (value.float() * full).to(torch.bfloat16)
