"""LayerNorm of uint8 rows and the layer behind it: the CPU's bits, weights included, and replayed from a graph."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import layer_norm_linear, prepare_layer_norm_weight
from tests.gpu import harness


def call(m: int, n: int, k: int) -> tuple[torch.Tensor, list, list]:
    """Rows, and the prepared weight on the device and on the CPU; of low contrast every third row, equal the last."""
    generator = torch.Generator().manual_seed(m)
    rows = torch.randint(0, 256, (m, k), generator=generator, dtype=torch.uint8)
    rows[::3] = rows[::3] // 64 + 190
    rows[-1] = 9
    given = [torch.randn(*shape, generator=generator).bfloat16() for shape in ((n, k), (n,), (k,), (k,))]
    weights = [
        prepare_layer_norm_weight(*(each.to(device) for each in given))
        for device in ("cuda", "cpu")
    ]
    return rows, *weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(280, 768, 6912), (1, 64, 16), (77, 200, 4800)])
def test_the_bits_of_the_cpu(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    if harness.DRY_RUN:
        shape = tuple(map(min, shape, (20, 72, 528)))
    rows, weight, host = call(*shape)
    assert torch.equal(weight.values.cpu(), host.values) and torch.equal(weight.scale.cpu(), host.scale)
    out = layer_norm_linear(rows.cuda(), weight, out_dtype=dtype)
    assert torch.equal(out.cpu(), layer_norm_linear(rows, host, out_dtype=dtype))


def test_in_a_graph() -> None:
    rows, weight, _ = call(280, 768, 6912)
    rows = rows.cuda()
    layer_norm_linear(rows, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer_norm_linear(rows, weight)
    for _ in range(5):
        rows.copy_(rows.roll(1, 0))
        graph.replay()
        assert torch.equal(out, layer_norm_linear(rows, weight))
