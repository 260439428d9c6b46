"""Which launches share the memory of partial sums: those of one stream, outside of CUDA graphs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cute_kernels.operations import gemm as module

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU's stream and whether it is captured, as the test sets them; the memory is the host's."""
    state = SimpleNamespace(stream=1, capturing=False)
    stand_in = SimpleNamespace(
        current_stream=lambda device: SimpleNamespace(cuda_stream=state.stream),
        is_current_stream_capturing=lambda: state.capturing,
    )
    monkeypatch.setattr(torch, "cuda", stand_in)
    for name in ("zeros", "empty"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda count, dtype, device, make=make: make(count, dtype=dtype))
    monkeypatch.setattr(module, "_COUNTERS", {})
    monkeypatch.setattr(module, "_SUMS", {})
    return state


def addresses(counters: int = 4, sums: int = 16, dtype: torch.dtype = torch.float32) -> tuple[int, int]:
    count, partial = module.workspace(DEVICE, counters, sums, dtype)
    assert count.tolist() == [0] * counters and count.dtype is torch.int32
    assert partial.shape == (sums,) and partial.dtype is dtype
    return count.data_ptr(), partial.data_ptr()


def test_launches_of_a_stream_share_it(cuda: SimpleNamespace) -> None:
    first = addresses()
    assert addresses() == addresses(2, 8) == addresses(dtype=torch.int32) == first
    larger = addresses(8, 32)
    assert larger[0] != first[0] and larger[1] != first[1] and addresses() == larger


def test_streams_do_not_share_it(cuda: SimpleNamespace) -> None:
    first = addresses()
    cuda.stream = 2
    assert not set(first) & set(addresses())
    cuda.stream = 1
    assert addresses() == first


def test_what_is_captured_has_its_own(cuda: SimpleNamespace) -> None:
    first = addresses()
    cuda.capturing = True
    kept = [module.workspace(DEVICE, 4, 16, torch.float32) for _ in range(2)]
    assert len({*first, *(each.data_ptr() for pair in kept for each in pair)}) == 6
    cuda.capturing = False
    assert addresses() == first
