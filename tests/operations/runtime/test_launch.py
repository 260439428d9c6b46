"""The bound launch passes a host function the same arguments as CuTe DSL's own call; warm calls need a CUDA device."""

from __future__ import annotations

import threading

import pytest

from cute_kernels.config import PatchEmbedProblem, Sm90PatchEmbedConfig, Sm100PatchEmbedConfig
from cute_kernels.emulator.programs import host
from cute_kernels.operations.compile import compile_plan, dsl_arguments, dsl_function
from cute_kernels.operations.runtime.gpu import BoundLaunch
from cute_kernels.plan import make_plan
from tests.nightly import crossed, nightly

WRITTEN = {4: 4, 8: 8, 16: 8, 24: 8, 128: 64}
"""Bytes of a parameter, and how many of them the host code writes: the address of a table or an index, half of a tensor
map. Behind them are padding and whatever was on its stack."""


def meaningful(launch: host.CapturedLaunch) -> list[bytes]:
    """What host code has written of parameters."""
    return [p[: WRITTEN[len(p)]] for p in launch.params if len(p) in WRITTEN]


SMALL = Sm100PatchEmbedConfig(tile_n=128, epilogue_warps=4)
CONFIGS = (SMALL, Sm90PatchEmbedConfig(tile_rows=32, stages=2))
CALLS = (
    (14, "pointer", True, ""), (14, "value", False, "row feature"), (0, "pointer", False, ""), (14, "value", True, ""),
)  # fmt: skip
"""Rows of a table, where the factor is, whether rows name their position, which factors are along what."""
CALLS_BY_NIGHT = (
    (14, "value", False, ""), (14, "pointer", False, "row"), (14, "pointer", False, ""), (0, "value", False, ""),
    (0, "value", False, "feature"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("call", "config"),
    [
        *crossed(CALLS, CONFIGS),
        *(pytest.param(call, config, marks=nightly) for call in CALLS_BY_NIGHT for config in CONFIGS),
    ],
)
def test_bound_launch_equals_the_call_of_the_dsl(call, config):
    rows, source, indexed, along = call
    factors = {f"{name}_scale": name in along for name in ("row", "feature")}
    plan = make_plan(
        PatchEmbedProblem(14 * 37, 264, 144, rows, scale_source=source, table_index=indexed, **factors), config
    )
    bound = BoundLaunch(plan, compile_plan(plan, emulated=True))
    with host.recording_runtime():
        function = dsl_function(plan)
    for step in (1, 2):  # the second call writes over the first one's arguments
        addresses = {
            "x": 0x10000 * step,
            "weight": 0x200000 * step,
            "table": 0x3000000 * step if rows else None,
            "index": 0x500000000 * step if indexed else None,
            "out": 0x40000000 * step,
            "scale": 0.375 / step if source == "value" else 0x7770 * step,
            **{name: 0x60000000000 * step if there else None for name, there in factors.items()},
        }
        if not plan.problem.call_scale:
            addresses["scale"] = None
        expected = host.record(function, *dsl_arguments(plan, **addresses, stream=0))
        constants = {"weight": addresses["weight"], "table": addresses["table"], "stream": 0}
        constants |= {name: addresses[name] for name in factors}
        repeated = bound.with_constants(("x", "out", "scale", "index"), **constants)
        with host.capture() as launches:
            bound(**addresses, stream=0)
            repeated((0x990, 0x880, 1.0 if source == "value" else 0x660, 0x440 if indexed else None))
            repeated([addresses[name] for name in ("x", "out", "scale", "index")])
        own, _, again = launches
        assert meaningful(again) == meaningful(own) and again.grid == own.grid
        assert (own.grid, own.block, own.cluster) == (expected.grid, expected.block, expected.cluster)
        assert own.dynamic_smem == expected.dynamic_smem
        assert meaningful(own) == meaningful(expected)
        # A weight that stays in registers has no tensor map.
        bases = [int.from_bytes(p[:8], "little") for p in own.params if len(p) == 128]
        mapped = ("x", "weight", "out") if len(bases) == 3 else ("x", "out")
        assert bases == [addresses[name] for name in mapped]


def test_each_thread_has_arguments_of_its_own():
    """Two threads interleave their calls; every recorded launch carries the addresses of its own thread."""
    plan = make_plan(PatchEmbedProblem(14 * 37, 264, 144, 0), SMALL)
    bound = BoundLaunch(plan, compile_plan(plan, emulated=True))
    wrong: list[str] = []

    def work(index: int) -> None:
        for step in range(50):
            out = (index + 1) << 32 | step << 8
            with host.capture() as launches:
                bound(x=out + 16, weight=out + 32, table=None, out=out, scale=0.5, stream=0)
            bases = {int.from_bytes(p[:8], "little") for p in launches[0].params if len(p) == 128}
            if bases != {out, out + 16, out + 32}:
                wrong.append(f"{index}: {bases}")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
