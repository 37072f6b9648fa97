"""A small byte-level MoE language model: the source of hidden states that a gate was really trained on.

    x = embed(bytes)
    per block:  x = x + attention(norm(x));  x = x + ffn(norm(x))        ffn: MoE in the blocks named, dense elsewhere
    logits = head(norm(x))

The first blocks are dense, as in DeepSeek-V3: a gate needs something better than bare bytes to choose by. RMSNorm
without gain, rotary positions, no biases. Real models differ by width and depth, and keep a cache of keys and values to
generate with; this one only reads.

Letters: B sequences, L positions of a sequence, H hidden, D intermediate, E experts, S tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_ref.config import MoEConfig
from moe_ref.layer import MoELayer

VOCABULARY = 256
"""A token is a byte."""

HIDDEN_STATE_BATCH = 32
"""Sequences that `hidden_states` sends through the model at once; fixed, so that memory is bounded and the bits of a
hidden state don't depend on how much text follows."""


@dataclass(frozen=True)
class ByteMoEConfig:
    """Everything that fixes what the model computes.

    Attributes:
        moe: the MoE layers; moe.hidden is the width of the whole model.
        blocks: number of blocks.
        moe_blocks: which of them have the MoE instead of the dense FFN, ascending.
        heads: attention heads; each has moe.hidden / heads channels, an even number.
        dense_intermediate: width of the dense, gated FFN.
        context: L, longest sequence.

    Raises:
        ValueError: a value is out of range; the message names the field.
    """

    moe: MoEConfig
    blocks: int = 3
    moe_blocks: tuple[int, ...] = (2,)
    heads: int = 4
    dense_intermediate: int = 256
    context: int = 256

    def __post_init__(self) -> None:
        for name in ("blocks", "heads", "dense_intermediate", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}, expected an integer of at least 1")
        if list(self.moe_blocks) != sorted(set(self.moe_blocks) & set(range(self.blocks))) or not self.moe_blocks:
            raise ValueError(
                f"moe_blocks is {list(self.moe_blocks)}, expected ascending block numbers in [0, {self.blocks})"
            )
        if self.moe.hidden % (2 * self.heads):
            raise ValueError(f"heads is {self.heads}, expected a divisor of moe.hidden / 2 = {self.moe.hidden / 2:g}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, the inverse of `from_dict`."""
        return {**asdict(self), "moe": self.moe.to_dict(), "moe_blocks": list(self.moe_blocks)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ByteMoEConfig:
        """Config from plain values; raises ValueError for unknown or missing fields."""
        try:
            moe = MoEConfig.from_dict(values["moe"])
            return cls(**{**values, "moe": moe, "moe_blocks": tuple(values["moe_blocks"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the config of a byte-level MoE model: {error}") from error


def norm(x: Tensor) -> Tensor:
    """RMSNorm over the last dimension, without gain."""
    return F.rms_norm(x, (x.shape[-1],))


def rotate(x_BALC: Tensor) -> Tensor:
    """Rotary positions (RoFormer, section 3.4.2) on queries or keys [B, heads, L, channels], channels even."""
    length, half = x_BALC.shape[-2], x_BALC.shape[-1] // 2
    frequency_C = 10000.0 ** (-torch.arange(half, device=x_BALC.device, dtype=torch.float32) / half)
    angle_LC = torch.arange(length, device=x_BALC.device, dtype=torch.float32)[:, None] * frequency_C
    cos_LC, sin_LC = angle_LC.cos().to(x_BALC.dtype), angle_LC.sin().to(x_BALC.dtype)
    first, second = x_BALC.chunk(2, dim=-1)
    return torch.cat((first * cos_LC - second * sin_LC, first * sin_LC + second * cos_LC), dim=-1)


class Attention(nn.Module):
    """Causal self-attention; query_key_value [3H, H], out [H, H]."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x_BLH: Tensor) -> Tensor:
        batch, length, hidden = x_BLH.shape
        qkv = self.query_key_value(x_BLH).view(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))


class DenseFFN(nn.Module):
    """The gated FFN of one expert, as a plain module: gate_up [2D, H], down [H, D]."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x_BLH: Tensor) -> Tensor:
        gate, up = self.gate_up(x_BLH).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One block; `ffn` is an `MoELayer` or a `DenseFFN`."""

    def __init__(self, config: ByteMoEConfig, index: int) -> None:
        super().__init__()
        hidden = config.moe.hidden
        self.attention = Attention(hidden, config.heads)
        self.ffn = MoELayer(config.moe) if index in config.moe_blocks else DenseFFN(hidden, config.dense_intermediate)

    def ffn_input(self, x_BLH: Tensor) -> tuple[Tensor, Tensor]:
        """The stream after attention, and its norm, which the FFN takes."""
        x_BLH = x_BLH + self.attention(norm(x_BLH))
        return x_BLH, norm(x_BLH)

    def forward(self, x_BLH: Tensor) -> tuple[Tensor, Any]:
        """The stream after the block, and the load statistics of its MoE layer (None in a dense block)."""
        x_BLH, normed_BLH = self.ffn_input(x_BLH)
        if isinstance(self.ffn, DenseFFN):
            return x_BLH + self.ffn(normed_BLH), None
        # The stream keeps its dtype; the layer's own may be a narrower one.
        y_BLH, stats = self.ffn(normed_BLH.to(self.ffn.config.torch_dtype), return_stats=True)
        return x_BLH + y_BLH.to(x_BLH.dtype), stats


class ByteMoE(nn.Module):
    """The language model; parameters are drawn from the global generator of torch, fp32."""

    def __init__(self, config: ByteMoEConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(VOCABULARY, config.moe.hidden)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.blocks))
        self.head = nn.Linear(config.moe.hidden, VOCABULARY, bias=False)
        self._initialize()

    @torch.no_grad()
    def _initialize(self) -> None:
        """Normal weights of deviation fan_in^-1/2; products that end in the stream are smaller by (2 blocks)^-1/2."""
        for name, parameter in self.named_parameters():
            deviation = 1.0 if name == "embed.weight" else parameter.shape[-1] ** -0.5
            if name.endswith(("attention.out.weight", "ffn.down.weight", "ffn.down_proj")):
                deviation /= (2 * self.config.blocks) ** 0.5
            parameter.normal_(0.0, deviation)

    def forward(self, byte_BL: Tensor) -> tuple[Tensor, list[Any]]:
        """Read bytes.

        Args:
            byte_BL: int64 in [0, 256), L at most config.context.

        Returns:
            logits [B, L, 256] of the next byte, and the load statistics of each MoE block, in order.

        Raises:
            ValueError: sequences are longer than the context.
        """
        x_BLH = self._embedded(byte_BL)
        all_stats = []
        for block in self.blocks:
            x_BLH, stats = block(x_BLH)
            if stats is not None:
                all_stats.append(stats)
        return self.head(norm(x_BLH)), all_stats

    def moe_input(self, byte_BL: Tensor, block: int) -> Tensor:
        """What the MoE layer of block `block` is given for these bytes, [B, L, H]."""
        x_BLH = self._embedded(byte_BL)
        for earlier in list(self.blocks)[:block]:
            x_BLH, _ = earlier(x_BLH)
        target = self.blocks[block]
        assert isinstance(target, Block)
        return target.ffn_input(x_BLH)[1]

    def _embedded(self, byte_BL: Tensor) -> Tensor:
        if byte_BL.shape[1] > self.config.context:
            raise ValueError(
                f"sequences of {byte_BL.shape[1]} bytes, expected at most the context of {self.config.context}"
            )
        return self.embed(byte_BL)


def moe_layer(model: ByteMoE, moe_index: int = -1) -> tuple[int, MoELayer]:
    """Block number and layer of the `moe_index`-th MoE of the model (counted as a list is, default the last)."""
    count = len(model.config.moe_blocks)
    if not -count <= moe_index < count:
        raise ValueError(f"moe_index is {moe_index}, but the model has {count} MoE layers")
    block = model.config.moe_blocks[moe_index]
    layer = model.blocks[block].ffn
    assert isinstance(layer, MoELayer)
    return block, layer


@torch.no_grad()
def hidden_states(model: ByteMoE, data: bytes, tokens: int, moe_index: int = -1) -> Tensor:
    """Hidden states of the first `tokens` bytes: what one MoE layer of the model is given, after its norm.

    The text is read in sequences of the model's context, each on its own. Every sequence is computed at full length
    and every batch with the same number of sequences (zero bytes fill up what is missing; nothing causal sees them), so
    the bits of a hidden state depend on its own sequence only, not on how much text is asked for.

    Args:
        data: at least `tokens` bytes.
        tokens: S, 0 included.
        moe_index: which MoE layer, as in `moe_layer`.

    Returns:
        x_SH, fp32, on the model's device.

    Raises:
        ValueError: fewer bytes than tokens, or no such layer.
    """
    if len(data) < tokens or tokens < 0:
        raise ValueError(f"{tokens} tokens asked for, but the text has {len(data)} bytes; a byte is a token")
    block, _ = moe_layer(model, moe_index)
    context, device = model.config.context, model.embed.weight.device
    batch_bytes = HIDDEN_STATE_BATCH * context
    padded = data[:tokens] + bytes(-tokens % batch_bytes)
    byte_BL = torch.frombuffer(bytearray(padded), dtype=torch.uint8).view(-1, context) if padded else None
    if byte_BL is None:
        return torch.empty(0, model.config.moe.hidden, device=device)
    parts = [
        model.moe_input(chunk_BL.to(device, torch.int64), block).flatten(0, 1)
        for chunk_BL in byte_BL.split(HIDDEN_STATE_BATCH)
    ]
    return torch.cat(parts)[:tokens]
