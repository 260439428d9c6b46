"""Names of warp roles: what opcodes say, what users write."""

from __future__ import annotations

import pytest

from cute_kernels.commands import cli
from cute_kernels.emulator.observe import roles

LOAD = "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"


@pytest.mark.parametrize(
    ("opcodes", "expected"),
    [
        ([LOAD, "mbarrier.arrive.expect_tx.shared.b64"], "TMA load"),
        (["cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"], "TMA load"),
        (["cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"], ""),
        ([STORE, "st.shared.b32", "cp.async.bulk.commit_group"], "TMA store"),
        (["cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"], "TMA store"),
        (["cp.async.bulk.prefetch.tensor.2d.L2.global", "cp.async.bulk.wait_group.read"], ""),
        (["cp.async.cg.shared.global", "cp.async.wait_all", "mma.sync.aligned.m16n8k16"], "cp.async, MMA"),
        (["tcgen05.mma.cta_group::1.kind::f16", "tcgen05.commit.cta_group::1"], "MMA"),
        (["wgmma.mma_async.sync.aligned", "st.global.v4.b32"], "MMA"),
        (["tcgen05.ld.sync.aligned.32x32b.x32.b32", STORE], "epilogue, TMA store"),
        (["ld.shared.b32", "st.global.b32"], "global store"),
        (["ld.shared::cta.b32", "st.shared.b32"], "compute"),
        (["mov.u32", "ld.param.b64", "ld.global.b32", "ret"], ""),
    ],
)
def test_what_a_warp_does(opcodes: list[str], expected: str) -> None:
    assert roles.activity(opcodes) == expected


def test_what_users_write() -> None:
    assert roles.parse("load=4,add=0-2") == ("", ("add", "add", "add", "", "load"))
    assert roles.parse("gemm:mma=1") == ("gemm", ("", "mma"))
    given = {"": ("all",), "gemm": ("short",), "gemm_fp8": ("long",)}
    assert [roles.of_kernel(name, given) for name in ("add", "a_gemm_1", "gemm_fp8_2")] == [
        ("all",), ("short",), ("long",),
    ]  # fmt: skip
    assert roles.of_kernel("add", {"gemm": ("mma",)}) == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("load", "'load' is not ROLE=WARP"),
        ("=4", "'=4' is not ROLE=WARP"),
        ("load=x", "'load=x' is not"),
        ("load=1-", "'load=1-' is not"),
        ("load=3-1", "warps 3-1; a CTA has warps 0 to 31"),
        ("load=32", "warps 32; a CTA has warps 0 to 31"),
        ("load=1,add=0-3", "warp 1 has two roles, load and add"),
        (":load=1", "the kernel before ':' is empty"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["emulate", "--roles", text, "program.py"])
    assert end.value.code == 2 and why in capsys.readouterr().err


def test_warps_that_do_the_same_are_one_row() -> None:
    activities = {"load": "TMA load", "warp 0": "MMA", "warp 1": "", "warp 2": "MMA", "warp 3": "MMA", "warp 10": "MMA"}
    assert roles.grouped(activities) == {
        "load": ["load"],
        "warps 0, 2-3, 10 (MMA)": ["warp 0", "warp 2", "warp 3", "warp 10"],
        "warp 1": ["warp 1"],
    }
