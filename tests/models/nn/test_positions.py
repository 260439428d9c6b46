"""The cache of interpolated positions."""

from __future__ import annotations

import torch

from cute_kernels.models.nn.positions import PositionCache


def positions() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(9, 8, generator=torch.Generator().manual_seed(0)))


def test_once_per_grid_until_the_parameter_changes():
    cache, pos = PositionCache(), positions()
    with torch.no_grad():
        first = cache.table(pos, (3, 3), (4, 5))
        assert cache.table(pos, (3, 3), (4, 5)) is first and cache.misses == 1
        pos.mul_(2)
        second = cache.table(pos, (3, 3), (4, 5))
        assert cache.misses == 2 and torch.allclose(second, 2 * first)
        assert len(cache) == 1  # the old one is forgotten
        pos.data = torch.zeros(9, 8)  # no version counter sees this, the address does
        assert not cache.table(pos, (3, 3), (4, 5)).any()


def test_the_native_grid_is_the_parameter_itself():
    cache, pos = PositionCache(), positions()
    assert cache.table(pos, (3, 3), (3, 3)) is pos and cache.misses == 0


def test_it_is_bounded_and_the_longest_unused_goes_first():
    cache, pos = PositionCache(capacity=2), positions()
    with torch.no_grad():
        kept = cache.table(pos, (3, 3), (1, 1))
        cache.table(pos, (3, 3), (1, 2))
        cache.table(pos, (3, 3), (1, 1))
        cache.table(pos, (3, 3), (1, 3))
        assert len(cache) == 2
        assert cache.table(pos, (3, 3), (1, 1)) is kept and cache.misses == 3
        cache.table(pos, (3, 3), (1, 2))
        assert cache.misses == 4


def test_nothing_of_a_graph_is_kept():
    cache, pos = PositionCache(), positions()
    for _ in range(2):
        cache.table(pos, (3, 3), (4, 5)).sum().backward()
        table, index = cache.packed(pos, (3, 3), ((2, 5),), 12)
        table[index.long()].sum().backward()
    assert len(cache) == 0 and pos.grad.abs().sum() > 0
    with torch.no_grad():
        assert not cache.table(pos, (3, 3), (4, 5)).requires_grad


def test_another_parameter_at_the_same_place_is_another():
    cache, pos = PositionCache(), positions()
    with torch.no_grad():
        cache.table(pos, (3, 3), (4, 5))
        alias = torch.nn.Parameter(pos.data)
        cache.table(alias, (3, 3), (4, 5))
    assert cache.misses == 2


def test_positions_of_a_batch_of_grids():
    cache, pos = PositionCache("bilinear", antialias=True), positions()
    with torch.no_grad():
        table, index = cache.packed(pos, (3, 3), ((2, 4), (3, 3), (2, 4)), 10)
        assert table.shape == (17, 8) and index.tolist()[0] == [*range(8), 0, 0]
        assert index.tolist()[1] == [*range(8, 17), 8] and index[2].equal(index[0])
        assert torch.equal(table[8:], pos)
        image = pos.view(1, 3, 3, 8).permute(0, 3, 1, 2)
        resized = torch.nn.functional.interpolate(image, size=(2, 4), mode="bilinear", antialias=True)
        assert torch.allclose(table[:8], resized[0].flatten(1).t(), atol=1e-6)
