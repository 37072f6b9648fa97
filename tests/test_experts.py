"""The expert FFN on row tiles: bits that depend on nothing but the row, padding that never shows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moe_ref import MoEConfig, MoELayer, Routing
from moe_ref.experts import elementwise
from moe_ref.pipeline import expert_tiles

FUNCTIONS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu, "sigmoid": torch.sigmoid}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 40, 48, 64, 192])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_elementwise_gives_a_row_the_same_bits_alone(name: str, width: int, dtype: torch.dtype, one_thread) -> None:
    """Whether the values are a tensor of their own, one half of a product, or every second column of it."""
    both = torch.randn(50, 2 * width, dtype=dtype, generator=torch.Generator().manual_seed(width)) * 3
    for rows_NI in (both[:, :width].contiguous(), both[:, :width], both[:, 0::2]):
        whole = elementwise(FUNCTIONS[name], rows_NI)
        torch.testing.assert_close(whole, FUNCTIONS[name](rows_NI.contiguous()), rtol=1e-6, atol=1e-6)
        for rows in (1, 2, 15, 16, 32, 49):
            assert torch.equal(elementwise(FUNCTIONS[name], rows_NI[:rows]), whole[:rows])


def test_tiles_are_filled_up_with_zeros_in_the_heap() -> None:
    """Rows stay where they are, the last tile of a segment gets zeros, rows that are nobody's keep their NaN."""
    heap = torch.full((16, 2), float("nan"))
    heap[8:11], heap[0:4] = 1.0, 2.0
    first, second = expert_tiles(heap, [(0, 8, 3), (1, 0, 4)], 4)
    assert first.tolist() == [[1.0, 1.0]] * 3 + [[0.0, 0.0]]
    assert second.tolist() == [[2.0, 2.0]] * 4
    assert (first.data_ptr(), second.data_ptr()) == (heap[8:].data_ptr(), heap.data_ptr())
    assert heap[4:8].isnan().all()
    assert heap[12:].isnan().all()


@pytest.mark.parametrize("layout", ["compact", "fixed"])
def test_a_bias_in_the_padding_never_shows(layout: str) -> None:
    """Biases alone would overflow the activation of a padding row in fp16; 0 x infinity is no zero gradient."""
    config = MoEConfig(4, 4, 1, 1, dtype="float16", expert_bias=True, layout=layout)
    layer = MoELayer(config)
    with torch.no_grad():
        layer.up_parameter.fill_(-1.0)
        layer.up_bias_parameter.fill_(400.0)
    x = torch.full((3, 4), 99.0, dtype=torch.float16, requires_grad=True)
    layer(x, routing=Routing(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))).sum().backward()
    for value in (x, layer.up_parameter, layer.up_bias_parameter, layer.down_proj, layer.down_proj_bias):
        assert value.grad.isfinite().all()
