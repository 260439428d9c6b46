"""`bench.swap`: whole towers on photographs, with every precision, stay within what the documentation says."""

from __future__ import annotations

import pytest
import torch

import cute_kernels
from bench import swap
from cute_kernels.operations import base, patch_embed_images

#: What runs the embedding -> most error of embeddings, least cosine of the tower's tokens, most error of the tower.
BOUNDS = {
    "library, whole model in bfloat16": (5e-3, 0.9998, 1e-1),
    "fp16, uint8 pixels": (4e-4, 0.99999, 4e-3),
    "fp16, normalised pixels": (5e-4, 0.99999, 4e-3),
    "bf16, uint8 pixels": (3e-3, 0.9999, 3e-2),
    "bf16, normalised pixels": (4e-3, 0.9999, 3e-2),
    "int8, uint8 pixels": (1.5e-2, 0.9995, 1e-1),
    "fp8, uint8 pixels": (6e-2, 0.994, 5e-1),
    "fp8, normalised pixels": (6e-2, 0.994, 5e-1),
}


@pytest.fixture(scope="module")
def agreements():
    plain = swap.tower(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=96)
    return swap.agreements(swap.photographs(96), plain)


@pytest.mark.parametrize("name", BOUNDS)
def test_a_tower_on_photographs(agreements, name):
    embedding, whole = agreements[name]
    error, cosine, largest = BOUNDS[name]
    assert 0 < embedding.error < error and embedding.cosine > cosine
    assert whole.cosine > cosine and whole.largest < largest


def test_nothing_else_is_compared(agreements):
    assert set(agreements) == set(BOUNDS)


def test_the_order_of_precisions(agreements):
    """More bits, less error; and uint8 is not worse than what was normalised and rounded before."""
    errors = {name: embedding.error for name, (embedding, _) in agreements.items()}
    by_bits = ("fp16", "bf16", "int8", "fp8")
    ordered = [errors[f"{precision}, uint8 pixels"] for precision in by_bits]
    assert ordered == sorted(ordered)
    assert errors["bf16, uint8 pixels"] < errors["bf16, normalised pixels"]


def test_kernels_are_known_without_a_launch(monkeypatch):
    """What would be compiled ahead of the timing is what calls hand to the GPU; nothing is compiled or remembered."""
    monkeypatch.setattr(base, "choose_backend", lambda *_: "kernel")
    weight = cute_kernels.prepare_patch_weight(torch.randn(16, 3, 14, 14))
    images = torch.zeros(2, 3, 28, 28, dtype=torch.uint8)
    found = swap.kernels_of([lambda _: cute_kernels.patch_embed_images(images, weight)] * 2)
    assert [plan.operation for plan in found] == ["patchify", "patch_embed"] * 2
    assert found[0].problem.batch == 2 and found[1].problem.k == 608
    assert not patch_embed_images.PATCH_EMBED_IMAGES.repeated.calls


def test_an_agreement_by_hand():
    got = swap.Agreement.of(torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([[3.0, 4.0], [2.0, 0.0]]))
    assert got.cosine == pytest.approx(0) and got.largest == 2
    assert got.error == pytest.approx((8 / 29) ** 0.5)
