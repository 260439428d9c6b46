"""Every limit of the plans at the limit and one unit beyond, and proof that no check of the plans is left out."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cute_kernels.plan
from cute_kernels.config import PatchEmbedImagesProblem, PatchEmbedProblem
from cute_kernels.plan import ARCHS, PLANNERS, arch_of, make_plan, sm90_transposed
from cute_kernels.plan.base import Kernel
from tests.plan import (
    embed_limits_sm100,
    gather_limits,
    image_limits,
    image_limits_sm100,
    limits,
    limits_sm80,
    resident_limits_sm100,
)
from tests.plan.limits import E90, E100, G90, G100, Limit, MakePlan, embed, gemm, patchify, smem

LIMITS = [
    limit
    for module in (
        limits, embed_limits_sm100, resident_limits_sm100, image_limits, gather_limits, image_limits_sm100,
        limits_sm80,
    )
    for limit in module.limits()
]  # fmt: skip
PLANS = Path(cute_kernels.plan.__file__).parent


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.what)
def test_the_limit_is_reached_and_not_passed(limit: Limit) -> None:
    limit.at()
    with pytest.raises(ValueError, match=limit.message):
        limit.beyond()


def test_hardware() -> None:
    """CUDA C++ programming guide, technical specifications per compute capability; PTX ISA for tensor memory.

    Multiprocessors: B200 148, H200 132, A100 108, RTX 3090 82, L40S 142, RTX 5090 170.
    """
    facts = {
        name: (a.compute_capability, a.sm_count, a.smem_bytes, a.sm_smem_bytes, a.tmem_columns)
        for name, a in ARCHS.items()
    }
    assert facts == {
        "sm_100a": ((10, 0), 148, 227 * 1024, 228 * 1024, 512),
        "sm_90a": ((9, 0), 132, 227 * 1024, 228 * 1024, 0),
        "sm_80": ((8, 0), 108, 163 * 1024, 164 * 1024, 0),
        "sm_86": ((8, 6), 82, 99 * 1024, 100 * 1024, 0),
        "sm_89": ((8, 9), 142, 99 * 1024, 100 * 1024, 0),
        "sm_90": ((9, 0), 132, 227 * 1024, 228 * 1024, 0),
        "sm_120": ((12, 0), 170, 99 * 1024, 100 * 1024, 0),
    }
    assert {(a.max_registers, a.register_file) for a in ARCHS.values()} == {(255, 65_536)}


def test_devices_get_the_kernels_of_their_architecture_or_of_an_earlier_one_of_their_generation() -> None:
    """Binaries of sm_86 run on 8.7, those of sm_120 on 12.1; those of sm_90a and sm_100a on 9.0 and 10.0 alone."""
    expected = {
        (7, 5): None, (8, 0): "sm_80", (8, 6): "sm_86", (8, 7): "sm_86", (8, 9): "sm_89", (9, 0): "sm_90a",
        (10, 0): "sm_100a", (10, 3): None, (12, 0): "sm_120", (12, 1): "sm_120",
    }  # fmt: skip
    assert {capability: arch_of(capability) for capability in expected} == expected


@pytest.mark.parametrize("warpgroups", [1, 2, 3])
def test_registers_that_setmaxnreg_hands_out(warpgroups: int) -> None:
    """Multiples of 8 from 24 to 256, at most 255 of them for one thread, all of them within the 65,536 of the device.

    The next multiple of 8 for the consumers would not fit, or belong to the producers, which need 24 and more.
    """
    plan = embed("sm_90a", replace(limits.STREAMED90, warpgroups=warpgroups))()
    consumers, producers = {1: (240, 40), 2: (232, 40), 3: (160, 32)}[warpgroups]
    assert (plan.consumer_registers, plan.producer_registers) == (consumers, producers)
    assert 128 * (warpgroups * consumers + producers) <= 65_536 and consumers <= 255
    assert consumers % 8 == producers % 8 == 0 and producers >= 24


def test_registers_of_the_dense_gemm() -> None:
    """Of two consumer warpgroups, and of one, of which two CTAs fit."""
    for config, consumers, groups, resident in ((G90(), 240, 2, 1), (G90(64, 64, store_stages=1), 128, 1, 2)):
        plan = gemm("sm_90a", config)()
        assert (plan.consumer_registers, plan.producer_registers) == (consumers, 24)
        assert (plan.warpgroups, plan.resident_ctas) == (groups, resident)
        assert resident * 128 * (groups * consumers + 24) <= 65_536


def test_barriers_of_a_stage() -> None:
    """Two mbarriers of 8 bytes (PTX ISA, mbarrier objects) for each of 64 stages are the 1,024 bytes of the region."""
    assert sm90_transposed.STAGE_BARRIER_BYTES == 2 * 8
    assert limits.embed("sm_90a", replace(limits.SMALL90, stages=64))().smem[1].offset == 64 * 2 * 8


# --- fields with a few legal values ----------------------------------------------------------------------------------

PROBED = (*range(-2, 275), 320, 384, 512, 1024)

ROWS_128 = replace(limits.STREAMED90, tile_rows=128, order="position")
IN_TURN = G90(64, 64, 2, pingpong=True, store_stages=1)

FIELDS: dict[str, tuple[Callable[[Any, str, Any], MakePlan], str, Any, str, Iterable[Any]]] = {
    # N of a UMMA or WGMMA: PTX ISA, "Data-path layout" and "Shape" of tcgen05.mma and wgmma.mma_async.
    "embed sm_100a tile_n": (embed, "sm_100a", E100(stages=2), "tile_n", {128, 256}),
    "embed sm_100a epilogue_warps": (embed, "sm_100a", E100(), "epilogue_warps", {4, 5}),
    "embed sm_100a tmem_load_width": (embed, "sm_100a", E100(), "tmem_load_width", {16, 32, 64}),
    "embed sm_100a stages": (embed, "sm_100a", E100(), "stages", range(2, 6)),
    "embed sm_100a cta_group": (embed, "sm_100a", E100(stages=3), "cta_group", {1, 2}),
    "embed sm_100a tile_positions": (embed, "sm_100a", E100(), "tile_positions", {1, 2, 4, 8}),
    "embed sm_100a store_buffers": (embed, "sm_100a", E100(), "store_buffers", {1, 2, 4}),
    "embed sm_90a tile_rows": (embed, "sm_90a", limits.STREAMED90, "tile_rows", range(16, 257, 16)),
    "embed sm_90a warpgroups": (embed, "sm_90a", limits.STREAMED90, "warpgroups", {1, 2, 3}),
    "embed sm_90a stage_blocks": (embed, "sm_90a", limits.STREAMED90, "stage_blocks", {1, 2, 3, 4}),
    "embed sm_90a cluster": (embed, "sm_90a", limits.STREAMED90, "cluster", {1, 2}),
    "embed sm_90a tile_positions": (embed, "sm_90a", ROWS_128, "tile_positions", {1, 2, 4, 8, 16}),
    "embed sm_90a stages": (embed, "sm_90a", limits.SMALL90, "stages", range(2, 65)),
    "gemm sm_100a block_m": (gemm, "sm_100a", G100(stages=2), "block_m", {128, 256}),
    "gemm sm_100a tile_n": (gemm, "sm_100a", G100(stages=2, store_stages=1), "tile_n", {64, 128, 256}),
    "gemm sm_100a cluster_m": (gemm, "sm_100a", G100(), "cluster_m", {2, 4}),
    "gemm sm_100a cluster_n": (gemm, "sm_100a", G100(), "cluster_n", {1, 2}),
    "gemm sm_100a accumulators": (gemm, "sm_100a", G100(), "accumulators", {1, 2}),
    "gemm sm_100a stages": (gemm, "sm_100a", G100(), "stages", range(2, 9)),
    "gemm sm_100a store_stages": (gemm, "sm_100a", G100(tile_n=256, stages=2), "store_stages", {1, 2, 4}),
    "gemm sm_90a tile_m": (gemm, "sm_90a", G90(128, 128, 2), "tile_m", {64, 128, 256}),
    "gemm sm_90a tile_m in turn": (gemm, "sm_90a", IN_TURN, "tile_m", {64, 128, 192}),
    "gemm sm_90a tile_n": (gemm, "sm_90a", G90(128, 64, 2, store_stages=1), "tile_n", set(range(16, 257, 16))),
    "gemm sm_90a cluster_m": (gemm, "sm_90a", G90(cluster_m=1), "cluster_m", {1, 2, 4}),
    "gemm sm_90a cluster_n": (gemm, "sm_90a", G90(cluster_m=1), "cluster_n", {1, 2, 4}),
    "gemm sm_90a split_k": (gemm, "sm_90a", G90(128, 64, 4, 1, store_stages=1), "split_k", {1, 2, 4, 8}),
    "gemm sm_90a stages": (gemm, "sm_90a", G90(), "stages", range(2, 5)),
    "gemm sm_90a store_stages": (gemm, "sm_90a", G90(256, 192, 2, 1), "store_stages", {1, 2, 3, 6}),
}  # fmt: skip


def refused(make: Callable[..., MakePlan], arch: str, base: Any, field: str, value: Any) -> bool:
    """Whether the plan refuses this value of this field, by name; other errors are passed on."""
    try:
        make(arch, replace(base, **{field: value}))()
    except ValueError as error:
        if not str(error).startswith(f"{field} = {value!r}: must be "):
            raise
        return True
    return False


@pytest.mark.parametrize("case", FIELDS.values(), ids=FIELDS.keys())
def test_legal_values_of_a_field(case) -> None:
    make, arch, base, field, legal = case
    assert {value for value in PROBED if not refused(make, arch, base, field, value)} == set(legal)


@pytest.mark.parametrize(
    ("arch", "base", "field", "least", "most"),
    [
        ("sm_100a", G100(), "group_m", 1, 1024),
        ("sm_90a", G90(), "group_m", 1, 1024),
        ("sm_100a", E100(), "stagger_clocks", 0, 65_535),
    ],
)
def test_ranges(arch: str, base: Any, field: str, least: int, most: int) -> None:
    make = embed if isinstance(base, E100) else gemm
    for value, legal in ((least - 1, False), (least, True), (most, True), (most + 1, False)):
        assert refused(make, arch, base, field, value) is not legal


NAMES: list[tuple[MakePlan, str]] = [
    *((embed(arch, in_dtype="float8_e5m2"), "in_dtype") for arch in ARCHS),
    *((embed(arch, out_dtype="float16"), "out_dtype") for arch in ARCHS),
    *((embed(arch, scale_source="row"), "scale_source") for arch in ARCHS),
    (embed("sm_100a", E100(epilogue="f16")), "epilogue"),
    (embed("sm_100a", E100(order="snake")), "order"),
    (embed("sm_100a", E100(table="paired")), "table"),
    (embed("sm_100a", E100(stagger_clocks=-1)), "stagger_clocks"),
    (embed("sm_90a", E90(epilogue="f16")), "epilogue"),
    (embed("sm_90a", E90(weight="tmem")), "weight"),
    (embed("sm_90a", E90(order="snake")), "order"),
    *((gemm(arch, in_dtype="float64"), "in_dtype") for arch in ARCHS),
    *((gemm(arch, out_dtype="float64"), "out_dtype") for arch in ARCHS),
    *((gemm(arch, activation="tanh"), "activation") for arch in ARCHS),
    *((gemm(arch, residual="int8"), "residual") for arch in ARCHS),
    *((gemm(arch, bias_dtype="int8"), "bias_dtype") for arch in ARCHS),
    *((gemm(arch, in_dtype="int8", scale_source="row"), "scale_source") for arch in ARCHS),
    *((gemm(arch, out_scale_source="row"), "out_scale_source") for arch in ARCHS),
    (patchify(in_dtype="int8"), "in_dtype"),
    (patchify(in_dtype="bfloat16", out_dtype="uint8"), "out_dtype"),
    (patchify(order="whc"), "order"),
    (patchify(order="hwc"), "order"),
]


@pytest.mark.parametrize(("make", "field"), NAMES)
def test_names_that_are_no_names(make: MakePlan, field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} = "):
        make()


def test_architectures() -> None:
    with pytest.raises(ValueError, match=r"^arch = 'sm_70':? .*sm_100a, sm_90a, sm_80"):
        make_plan(limits.GemmProblem(8, 8, 8), arch="sm_70")


# --- tables of fields ------------------------------------------------------------------------------------------------

IMAGES = PatchEmbedImagesProblem(8, 3, 224, 224, 16, 768)
TAKEN = {
    "patch_embed": (PatchEmbedProblem(256, 256, 256),),
    "patch_embed_images": (IMAGES, replace(IMAGES, in_dtype="bfloat16", precision="bf16")),
    "gemm": (limits.GemmProblem(256, 256, 256),),
}
TABLES = [
    pytest.param(kernel, arch, planner.operation, name, id=f"{planner.operation}-{kernel.config.__name__}-{name}")
    for planner in PLANNERS.values()
    for arch, kernels in planner.kernels.items()
    for kernel in kernels
    for name in kernel.fields
]


@pytest.mark.parametrize(("kernel", "arch", "operation", "name"), TABLES)
def test_a_table_of_fields_is_what_the_plan_refuses(kernel: Kernel, arch: str, operation: str, name: str) -> None:
    """A value that is not in the table is refused by its name, whichever of the operation's problems it is."""
    field = kernel.fields[name]
    kind = next(part for part in dataclasses.fields(kernel.config) if part.name == name)
    if isinstance(next(iter(field.legal), 0), str):
        illegal = ["none of them"]
    else:
        illegal = [v for v in (*range(-2, 300), 65_536) if not (v in field.legal or field.least <= v <= field.most)]
        illegal = illegal if not field.legal else [v for v in range(-2, 300) if v not in field.legal]
    refusals = 0
    for problem, value in itertools.product(TAKEN[operation], illegal):
        with pytest.raises(ValueError) as caught:
            make_plan(problem, kernel.config(**{name: value}), arch)
        refusals += str(caught.value).startswith(f"{name} = {value!r}: must be ")
    assert refusals >= len(illegal) > 0
    assert (kind.default is None) == kernel.config.types[name][1]


def test_a_stage_that_does_not_fit_twice_is_refused_by_name() -> None:
    """Also where a configuration has no K blocks of a stage: 2 x 32,768 B of operands, 65,536 of staging, 1,024."""
    need = 1_024 + 2 * 32_768 + 65_536
    config = E100(stages=2)
    embed("sm_100a", config, hardware=smem(need))()
    with pytest.raises(ValueError, match=r"^tile_n = 256: .*two stages have to fit; nearest legal value: 128$"):
        embed("sm_100a", config, hardware=smem(need - 1))()


# --- the inventory ---------------------------------------------------------------------------------------------------


def checks() -> dict[str, range]:
    """Of every refusal in the sources of the plans, ``"file:line"`` and the lines of the statement."""
    found = {}
    for path in sorted(PLANS.rglob("*.py")):
        tree = ast.parse(path.read_text())
        inside = {
            id(call)
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef) and function.name in ("require", "reject")
            for call in ast.walk(function)
        }
        for call in ast.walk(tree):
            name = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
            if name in ("require", "reject") and id(call) not in inside:
                name = f"{path.relative_to(PLANS)}:{call.lineno}"
                found[name] = range(call.lineno, call.end_lineno + 1)
    return found


def refusing_line(make: Callable[[], Any]) -> tuple[str, int]:
    """File and line of the check that refused a plan."""
    with pytest.raises(ValueError) as caught:
        make()
    frames = [f for f in traceback.extract_tb(caught.value.__traceback__) if Path(f.filename).is_relative_to(PLANS)]
    frame = [f for f in frames if f.name not in ("require", "reject")][-1]
    return str(Path(frame.filename).relative_to(PLANS)), frame.lineno


def test_no_check_of_the_plans_is_left_out() -> None:
    """Every call of `reject` and `require` in the sources is what refuses one of the plans of this file."""
    refusals = [limit.beyond for limit in LIMITS] + [make for make, _ in NAMES]
    refusals.append(lambda: make_plan(limits.GemmProblem(8, 8, 8), arch="sm_70"))
    for make, arch, base, field, legal in FIELDS.values():
        refusals += [make(arch, replace(base, **{field: value})) for value in {-1, 1, 3, 65, 384} - set(legal)]
    for base, field, value in ((G90(), "group_m", 0), (G90(), "tile_m", 192)):
        refusals.append(gemm("sm_100a" if isinstance(base, G100) else "sm_90a", replace(base, **{field: value})))
    hit = {refusing_line(make) for make in refusals}
    missing = [
        name
        for name, lines in checks().items()
        if not any(file == re.sub(r":\d+$", "", name) and line in lines for file, line in hit)
    ]
    assert len(checks()) > 40 and not missing
