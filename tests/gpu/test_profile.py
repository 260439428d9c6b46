"""Clock stamps of a launch: the same result, and stamps that fit each other, the launch and the device."""

from __future__ import annotations

import json

import pytest
import torch

from cute_kernels.commands.cli import main
from cute_kernels.explore.profiling import phase_statistics, record, role_balance
from cute_kernels.explore.profiling.record import Profile
from cute_kernels.operations.patch_embed import PATCH_EMBED
from cute_kernels.operations.runtime import gpu
from cute_kernels.plan.base import Phase
from tests.gpu import harness

STAMPS = 4096


def profiled(images: int, positions: int) -> tuple[Profile, torch.Tensor, torch.Tensor]:
    """Stamps of the default configuration, and the results of the launches without and with stamps."""
    call = harness.random_call(*harness.sized(images, positions, 768, 768))
    prepared = PATCH_EMBED.prepared(
        x=call.x, weight=call.weight, bias=call.bias, pos_embed=call.pos_embed, scale_a=call.scale
    )
    gpu.launch(prepared.plan, prepared.operands)
    plain = prepared.operands.out.clone()
    prepared.operands.out.fill_(torch.nan)
    profile = record(prepared.plan, prepared.operands, stamps=STAMPS)
    return profile, plain, prepared.operands.out


def test_stamps_fit_the_launch():
    profile, plain, stamped = profiled(64, 196)
    assert torch.equal(plain.view(torch.int16), stamped.view(torch.int16))
    assert profile.lost == 0 and len(profile.warps) == profile.plan.grid[0] * len(profile.plan.roles)
    loaded = 0
    for warp in profile.warps:
        clocks = [warp.begin[0], *warp.clocks.tolist(), warp.finish[0]]
        assert all(first < second for first, second in zip(clocks, clocks[1:]))
        assert int(warp.phases[-1]) == Phase.END
        loaded += int((warp.phases == Phase.TILE).sum()) if warp.role == "load" else 0
    plan = profile.plan
    # Where the weight stays on chip, every group of clusters takes all tiles, for features of its own.
    assert loaded == plan.tiles * getattr(plan, "feature_groups", 1) * (plan.grid[0] // plan.clusters)


@pytest.mark.gpu_only("times")
def test_clocks_fit_the_device(record_property):
    """Each CTA has a multiprocessor of its own; clocks and the device's time advance together."""
    profile, _, _ = profiled(512, 196)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    multiprocessors = {warp.sm for warp in profile.warps}
    assert len(multiprocessors) == profile.plan.grid[0] <= properties.multi_processor_count
    for cta in range(profile.plan.grid[0]):
        assert len({warp.sm for warp in profile.warps if warp.cta == cta}) == 1
    assert 0.2 < profile.clocks_per_nanosecond < 4
    record_property("clocks per nanosecond", profile.clocks_per_nanosecond)
    # All warps of a tile's way take as long in equilibrium, whatever they wait for.
    totals = [role.total for role in role_balance(profile)]
    assert max(totals) / min(totals) < 1.2
    for found in phase_statistics(profile):
        assert 0 <= found.mean <= found.most and 0 <= found.p95 <= found.most


@pytest.mark.gpu_only("times")
@pytest.mark.parametrize("arguments", [("patch-embed", "--batch", "256"), ("patch-embed-images", "--batch", "256")])
def test_command(arguments, tmp_path, capsys):
    """Both launches are timed, and stamps do not change what a launch is: it is slower, and not by much."""
    facts, trace = tmp_path / "facts.json", tmp_path / "trace.json"
    assert main(["profile", *arguments, "--json", str(facts), "--trace", str(trace)]) == 0
    text = capsys.readouterr().out
    assert "waits least: the others wait for it" in text and "GHz" in text and "lost" not in text
    found = json.loads(facts.read_text())
    assert found["device"] == "gpu" and found["lost_stamps"] == 0 and found["equilibrium"]
    times = found["launch_microseconds"]
    assert 0.8 < times["stamped"] / times["plain"] < 3
    # A launch's clocks are those of its tiles, and of what comes before the first one and after the last.
    warps = [warp for warp in found["warps"] if warp["phase"] == "all" and warp["role"] == "load"]
    tiles = max(warp["tiles"] for warp in warps) / found["grid"][0] + 2
    modelled = tiles * warps[0]["mean"] / found["clocks_per_nanosecond"] / 1e3
    assert 0.5 < modelled / times["stamped"] < 1.2
    assert json.loads(trace.read_text())["traceEvents"]
