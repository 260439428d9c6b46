"""`bench.layer_norm` with small sizes on a CPU: what is compared, what is launched; no time is taken."""

from __future__ import annotations

import pytest
import torch

from bench import layer_norm as program


def test_without_a_gpu() -> None:
    assert torch.cuda.is_available() or program.main() == 2


def test_the_library_is_given_what_a_processor_gives() -> None:
    given = [torch.randn(*shape) for shape in ((8, 48), (8,), (48,), (48,))]
    rows = torch.randint(0, 256, (5, 48), dtype=torch.uint8)
    wide = [each.double() for each in given]
    expected = torch.nn.functional.layer_norm(rows.double() / 255, (48,), *wide[2:]) @ wide[0].T + wide[1]
    torch.testing.assert_close(program.library_raw(rows, *given).double(), expected, rtol=1e-4, atol=1e-4)


def test_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "N", 8), monkeypatch.setattr(program, "K", 48)
    assert [tuple(each.shape) for each in program.parameters()] == [(8, 48), (8,), (48,), (48,)]
