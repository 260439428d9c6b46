"""`patch_embed_images` with weights of two terms on a GPU: sums are exact, so every bit is that of the reference."""

from __future__ import annotations

import pytest

from cute_kernels.config import ImagesConfig
from tests.gpu import architecture, harness
from tests.gpu.images_configs import TWO_TERMS
from tests.gpu.test_images import (
    BATCHES,
    SIDES,
    WIDE,
    Call,
    check_many_launches,
    check_sums_that_fp32_rounds,
    differing,
)


def two_terms(batch: int, side: int | tuple[int, int] = WIDE, n: int = 768, **options) -> Call:
    return Call(batch, side, 160 if harness.DRY_RUN else n, precision="int16", **options)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("batch", BATCHES)
def test_every_bit(batch: int, side: int | tuple[int, int]) -> None:
    call = two_terms(batch, side, seed=batch)
    assert differing(call.guarded(), call.expected()) == 0


@pytest.mark.parametrize(("config", "channels"), TWO_TERMS.get(architecture.at_hand(), ()), ids=str)
@pytest.mark.parametrize("batch", [5] if harness.DRY_RUN else [5, 131])
def test_configurations(config: ImagesConfig | None, channels: int, batch: int) -> None:
    call = two_terms(batch, channels=channels)
    assert differing(call.guarded(config), call.expected()) == 0


@pytest.mark.parametrize(("n", "table"), [(384, "bias+pos"), (1152, "pos"), (1024, "bias"), (8, "")])
def test_widths_and_tables(n: int, table: str) -> None:
    """The prepared weight's offset is in the table even without bias and positions."""
    call = two_terms(9 if harness.DRY_RUN else 37, n=n, table=table)
    assert differing(call.guarded(), call.expected()) == 0


def test_sums_that_fp32_rounds() -> None:
    check_sums_that_fp32_rounds(two_terms(2 if harness.DRY_RUN else 64))


@pytest.mark.gpu_only("what it looks for is not deterministic")
def test_many_launches_give_the_same_bits() -> None:
    check_many_launches(two_terms(300))
