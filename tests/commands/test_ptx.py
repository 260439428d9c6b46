"""`cute-kernels ptx`: the text, and the facts that a launch of it needs."""

from __future__ import annotations

import dataclasses
import json
import struct

import pytest

from cute_kernels.commands.cli import main
from cute_kernels.config import (
    GemmProblem,
    PatchEmbedImagesProblem,
    PatchEmbedProblem,
    Sm90GatherConfig,
    Sm90ImagesConfig,
    Sm90PatchEmbedConfig,
    Sm100PatchEmbedConfig,
)
from cute_kernels.emulator.programs import host
from cute_kernels.operations.compile import compile_plan, host_arguments
from cute_kernels.plan import make_plan


def test_ptx_and_facts(tmp_path, capsys):
    path = tmp_path / "k.ptx"
    arguments = "ptx patch-embed --batch 3 --positions 100 --features 1152 --in-features 588".split()
    assert main([*arguments, "--set", "tile_n=128", "--set=stages=5", "--set=epilogue-warps=4", "-o", str(path)]) == 0
    facts = json.loads((tmp_path / "k.ptx.json").read_text())
    plan = make_plan(
        PatchEmbedProblem(300, 1152, 592, table_rows=100), Sm100PatchEmbedConfig(tile_n=128, stages=5, epilogue_warps=4)
    )
    assert path.read_text() == compile_plan(plan).ptx
    assert f".entry {facts['kernel']}(" in path.read_text()
    assert ".target sm_100a" in path.read_text()
    assert facts["problem"]["k"] == 592
    assert facts["config"] == dataclasses.asdict(plan.config) and facts["config"]["tile_n"] == 128
    assert facts["grid"] == [2 * 2 * 9, 1, 1]  # a pair of CTAs for each of 2 x 9 tiles of 256 x 128
    assert (facts["cluster"], facts["block"]) == ([2, 1, 1], [6 * 32, 1, 1])
    assert facts["dynamic_smem_bytes"] == plan.smem_bytes
    assert 0 < facts["resources"]["registers"] <= 255
    assert capsys.readouterr().out.split() == [str(path), str(path) + ".json"]


@pytest.mark.parametrize(
    ("table", "scale", "rows"), [("positions", "value", 196), ("bias", "pointer", 1), ("none", "value", 0)]
)
def test_ptx_variants(tmp_path, table, scale, rows):
    path = tmp_path / "k.ptx"
    arguments = ["ptx", "patch-embed", "--set", "tile_n=128", "--table", table, "--scale", scale]
    assert main([*arguments, "-o", str(path)]) == 0
    problem = json.loads((tmp_path / "k.ptx.json").read_text())["problem"]
    assert (problem["table_rows"], problem["scale_source"], problem["m"]) == (rows, scale, 196)


def test_ptx_with_scales_of_rows_and_features(tmp_path):
    path = tmp_path / "k.ptx"
    arguments = ["ptx", "patch-embed", "--set", "tile_n=128", "--row-scale", "--feature-scale"]
    assert main([*arguments, "-o", str(path)]) == 0
    facts = json.loads((tmp_path / "k.ptx.json").read_text())
    located = [name for parameter in facts["parameters"] for name in parameter.get("offsets", ())]
    assert sorted(located) == ["feature_scale", "row_scale", "table"]
    assert facts["problem"]["row_scale"] and facts["problem"]["feature_scale"]


def test_ptx_of_chained_kernels(tmp_path):
    """Files of their own: what the first writes, the second reads."""
    sizes = ["patch-embed-images", "--arch", "sm_90a", "--patch", "14", "--height=28", "--width=28", "--features=64"]
    plan = make_plan(PatchEmbedImagesProblem(1, 3, 28, 28, 14, 64, table_rows=4), arch="sm_90a")
    assert main(["ptx", *sizes, "-o", str(tmp_path / "k.ptx")]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["k-1.ptx", "k-1.ptx.json", "k-2.ptx", "k-2.ptx.json"]
    for number, part in enumerate(plan.launches, 1):
        facts = json.loads((tmp_path / f"k-{number}.ptx.json").read_text())
        assert (tmp_path / f"k-{number}.ptx").read_text() == compile_plan(part).ptx
        assert f".entry {facts['kernel']}(" in compile_plan(part).ptx and facts["grid"] == list(part.grid)


def test_ptx_of_the_sm90_kernel(tmp_path):
    """144 bytes of K are two blocks; the weight stays in registers and has no tensor map."""
    path = tmp_path / "k.ptx"
    sizes = ["--batch", "37", "--positions", "14", "--features", "264", "--in-features", "144"]
    settings = ["--set", "tile_rows=32", "--set", "stages=2"]
    assert main(["ptx", "patch-embed", "--arch", "sm_90a", *sizes, *settings, "-o", str(path)]) == 0
    facts = json.loads((tmp_path / "k.ptx.json").read_text())
    plan = make_plan(PatchEmbedProblem(14 * 37, 264, 144, 14), Sm90PatchEmbedConfig(tile_rows=32, stages=2))
    assert path.read_text() == compile_plan(plan).ptx
    assert ".target sm_90a" in path.read_text()
    assert facts["config"] == dataclasses.asdict(plan.config)
    assert (facts["arch"], facts["tmem_columns"]) == ("sm_90a", 0)
    assert facts["dynamic_smem_bytes"] == plan.smem_bytes
    maps = {p["tensor"]: p for p in facts["parameters"] if p["holds"] == "tensor map"}
    assert sorted(maps) == ["out", "x"]
    located = [name for p in facts["parameters"] if p["holds"] == "bytes" for name in p["offsets"]]
    assert sorted(located) == ["scale", "table", "weight"]


def test_ptx_of_the_images_kernel(tmp_path, monkeypatch):
    """Boxes of a strip in the images' map, and the other tensors where the parameters say."""
    monkeypatch.chdir(tmp_path)
    sizes = ["--batch", "3", "--height", "32", "--width", "64", "--features", "72"]
    fields = ["--set", "source=strips", "--set", "weight=registers"]
    assert main(["ptx", "patch-embed-images", "--arch", "sm_90a", *sizes, *fields]) == 0
    facts = json.loads((tmp_path / "patch_embed_images.ptx.json").read_text())
    problem = PatchEmbedImagesProblem(3, 3, 32, 64, 16, 72, table_rows=8)
    plan = make_plan(problem, Sm90ImagesConfig(source="strips", weight="registers"))
    assert (tmp_path / "patch_embed_images.ptx").read_text() == compile_plan(plan).ptx
    assert facts["config"] == dataclasses.asdict(plan.config) and facts["problem"] == dataclasses.asdict(plan.problem)
    assert (facts["arch"], facts["table_shape"], facts["grid"]) == ("sm_90a", list(plan.table_shape), list(plan.grid))
    maps = {p["tensor"]: p for p in facts["parameters"] if p["holds"] == "tensor map"}
    assert sorted(maps) == ["images", "out"]
    assert (maps["images"]["dtype"], maps["images"]["extents"][0], maps["out"]["dtype"]) == ("u8", 64, "bf16")
    assert "stands for" not in facts["parameters_note"]
    located = [name for p in facts["parameters"] if p["holds"] == "bytes" for name in p["offsets"]]
    assert sorted(located) == ["scale", "table", "weight"]


def test_ptx_of_the_kernel_over_16_bit_images(tmp_path, monkeypatch):
    """Three maps: of the images as rows of pixels, of the weight, and of the output as pieces of patches."""
    monkeypatch.chdir(tmp_path)
    sizes = ["--batch", "3", "--height", "32", "--width", "64", "--features", "72", "--precision", "fp16"]
    settings = {"tile_n": 64, "cluster": 1, "row_patches": 2, "pingpong": True}
    chosen = [f"--set={name}={str(value).lower()}" for name, value in settings.items()]
    assert main(["ptx", "patch-embed-images", "--arch", "sm_90a", *sizes, *chosen]) == 0
    facts = json.loads((tmp_path / "patch_embed_images.ptx.json").read_text())
    problem = PatchEmbedImagesProblem(3, 3, 32, 64, 16, 72, "float16", precision="fp16", table_rows=8)
    plan = make_plan(problem, Sm90GatherConfig(**settings))
    assert (tmp_path / "patch_embed_images.ptx").read_text() == compile_plan(plan).ptx
    assert facts["config"] == dataclasses.asdict(plan.config) and facts["problem"] == dataclasses.asdict(problem)
    maps = {p["tensor"]: (p["dtype"], sorted(p["box"])) for p in facts["parameters"] if p["holds"] == "tensor map"}
    assert maps == {
        "images": ("f16", sorted(plan.box)), "weight": ("f16", [64, 64]), "out": ("bf16", sorted(plan.store_box)),
    }  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_ptx_of_the_dense_gemm(arch, tmp_path, monkeypatch):
    """The recorded launch, with its placeholders exchanged for other addresses, is the launch of those tensors."""
    monkeypatch.chdir(tmp_path)
    sizes = ["--m", "300", "--n", "100", "--k", "200", "--batches", "2"]
    assert main(["ptx", "gemm", "--arch", arch, *sizes, "--bias", "--out-dtype", "float32"]) == 0
    facts = json.loads((tmp_path / "gemm.ptx.json").read_text())
    plan = make_plan(GemmProblem(300, 100, 200, 2, out_dtype="float32", bias=True), arch=arch)
    assert (tmp_path / "gemm.ptx").read_text() == compile_plan(plan).ptx
    assert f".target {arch}" in compile_plan(plan).ptx
    assert facts["config"] == dataclasses.asdict(plan.config) and facts["grid"] == list(plan.grid)
    assert facts["out_pitch"] == 100
    assert facts["tmem_columns"] == (plan.tmem_columns if arch == "sm_100a" else 0)
    maps = {p["tensor"]: p for p in facts["parameters"] if p["holds"] == "tensor map"}
    assert {name: (p["dtype"], p["extents"]) for name, p in maps.items()} == {
        "a": ("bf16", [200, 300, 2]), "b": ("bf16", [200, 100, 2]), "out": ("f32", [100, 300, 2])
    }  # fmt: skip
    located = [name for p in facts["parameters"] if p["holds"] == "bytes" for name in p["offsets"]]
    assert located == ["bias"]

    addresses = {"a": 0x11110000, "b": 0x22220000, "bias": 0x33330000, "out": 0x44440000}
    launch = host.record(compile_plan(plan, emulated=True).function, *host_arguments(plan, **addresses, stream=0))
    own = [bytes.fromhex(p["hex"]) for p in facts["parameters"] if p["holds"] == "bytes"]
    placeholder = bytes.fromhex(facts["placeholders"]["bias"])
    own = [data.replace(placeholder, struct.pack("<Q", addresses["bias"])) for data in own]
    # Of 16 bytes of a pointer and an extent, the padding may hold anything.
    assert [data[:8] for data in own] == [data[:8] for data in launch.params if len(data) != 128]


@pytest.mark.parametrize(
    ("table", "scale"), [("positions", "value"), ("bias", "pointer"), ("none", "value"), ("none", "pointer")]
)
def test_parameters_of_the_launch(tmp_path, monkeypatch, table, scale):
    """2 images of 196 rows, 592 bytes each after padding, 1152 features; written to the current folder."""
    monkeypatch.chdir(tmp_path)
    arguments = ["ptx", "patch-embed", "--batch", "2", "--features", "1152", "--in-features", "588"]
    assert main([*arguments, "--set", "tile_n=128", "--table", table, "--scale", scale]) == 0
    facts = json.loads((tmp_path / "patch_embed.ptx.json").read_text())
    ptx, parameters = (tmp_path / "patch_embed.ptx").read_text(), facts["parameters"]
    declared = ptx[ptx.index(".entry") : ptx.index(".reqntid")].count(".param ")
    assert [p["index"] for p in parameters] == list(range(declared))
    maps = {p["tensor"]: p for p in parameters if p["holds"] == "tensor map"}
    # One bias for all rows: tiles of positions, of which there is one, the third extent of their maps.
    by_position = table == "bias"
    assert {name: (p["dtype"], p["extents"], p["strides"], p["swizzle"]) for name, p in maps.items()} == {
        "x": ("u8", [592, 392] + [1] * by_position, [592] + [592] * by_position, "128B"),
        "weight": ("u8", [592, 1152], [592], "128B"),
        "out": ("bf16", [1152, 392] + [1] * by_position, [2304] + [2304] * by_position, "128B"),
    }
    # A CTA of a pair loads 128 rows of x and half of the 128 weight rows; a warp stores 32 rows of 128 bytes.
    assert {name: p["box"] for name, p in maps.items()} == {
        "x": [128, 128] + [1] * by_position, "weight": [128, 64], "out": [64, 32] + [1] * by_position,
    }  # fmt: skip
    others = [p for p in parameters if p["holds"] == "bytes"]
    assert all(len(bytes.fromhex(p["hex"])) == p["bytes"] for p in others)
    # Each placeholder outside of tensor maps is named once, where it lies.
    located = {name: (p, offset) for p in others for name, offset in p["offsets"].items()}
    assert sorted(located) == sorted({"scale"} | ({"table"} if table != "none" else set()))
    assert sum(len(p["offsets"]) for p in others) == len(located)
    for name, (parameter, offset) in located.items():
        pattern = bytes.fromhex(facts["placeholders"][name])
        assert bytes.fromhex(parameter["hex"])[offset:].startswith(pattern)
        assert len(pattern) == (4 if name == "scale" and scale == "value" else 8)
    # The last three are the tiles along M, N and K that the kernel walks over.
    tiles = [struct.unpack("<I", bytes.fromhex(p["hex"]))[0] for p in parameters[-3:]]
    assert tiles == [2, 9, 5]
