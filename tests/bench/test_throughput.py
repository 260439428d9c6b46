"""Every loop of bench.throughput runs, without a report of a detector."""

from __future__ import annotations

import pytest

from bench import throughput

KINDS = [kind for make in (throughput.arithmetic, throughput.copies, throughput.warp_mmas, throughput.wgmmas,
                           throughput.tensor_mmas) for kind in make()]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.group}-{kind.name}")
def test_a_loop_of_each_kind(kind: throughput.Kind) -> None:
    assert kind.seconds(0) > 0
    assert kind.seconds(2) > 0
