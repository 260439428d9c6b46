"""The bench of towers on a CPU: the same weights everywhere, and errors in the order that docs/fp8_mlp.md states."""

from __future__ import annotations

import pytest
import torch

from bench import tower

SIZE = tower.Size(images=2, positions=16, width=64, hidden=128, heads=2, layers=2)


@torch.no_grad()
def test_errors_of_narrow_towers() -> None:
    """INT8 by rows is nearer to FP32 than E4M3, but for outliers, by which it loses more than that."""
    generator = torch.Generator().manual_seed(0)
    exactly = torch.randn(SIZE.images, SIZE.positions, SIZE.width, generator=generator)
    with torch.random.fork_rng():
        even, uneven = (
            {name: error for name, (_, error) in tower.errors_of(tower.tower(SIZE, "cpu", outliers), exactly).items()}
            for outliers in (False, True)
        )
    for found in (even, uneven):
        assert all(found[name] < 0.01 for name in ("BF16", "BF16, GELU by cuBLASLt", "BF16 by gemm"))
        assert all(0.01 < found[name] < 0.02 for name in found if name.startswith("FP8"))
    assert even["INT8 by gemm"] < 0.5 * even["FP8 by gemm"] < 0.5 * uneven["INT8 by gemm"]


@torch.no_grad()
def test_hugging_faces_encoder_has_the_same_weights() -> None:
    pytest.importorskip("transformers")
    with torch.random.fork_rng():
        model = tower.tower(SIZE, "cpu")
        x = torch.randn(SIZE.images, SIZE.positions, SIZE.width)
    theirs = tower.hugging_face(model, SIZE)(x, attention_mask=None)[0]
    torch.testing.assert_close(theirs, model(x), rtol=1e-4, atol=1e-4)
