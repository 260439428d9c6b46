"""The command line: PTX export, argument errors. The demo has a file of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import struct
import subprocess
import sys

import pytest

from cute_kernels import __version__, compile
from cute_kernels.commands import demo, doctor
from cute_kernels.commands.cli import main
from cute_kernels.commands.kernel_options import CHOICES, KINDS, MEANINGS
from cute_kernels.compile import compile_plan, host_arguments
from cute_kernels.config import (
    GemmProblem,
    PatchEmbedImagesProblem,
    PatchEmbedProblem,
    Sm90GatherConfig,
    Sm90GemmConfig,
    Sm90ImagesConfig,
    Sm90PatchEmbedConfig,
    Sm100GemmConfig,
    Sm100ImagesConfig,
    Sm100PatchEmbedConfig,
)
from cute_kernels.emulator import host
from cute_kernels.emulator.errors import Hang
from cute_kernels.plan import PLANNERS, make_plan
from cute_kernels.runtime import emulated


def test_ptx_and_facts(tmp_path, capsys):
    path = tmp_path / "k.ptx"
    arguments = [
        "ptx",
        "patch-embed",
        "--batch",
        "3",
        "--positions",
        "100",
        "--features",
        "1152",
        "--in-features",
        "588",
    ]
    assert main([*arguments, "--set", "tile_n=128", "--set=stages=5", "--set=epilogue-warps=4", "-o", str(path)]) == 0
    facts = json.loads((tmp_path / "k.ptx.json").read_text())
    plan = make_plan(
        PatchEmbedProblem(300, 1152, 592, table_rows=100), Sm100PatchEmbedConfig(tile_n=128, stages=5, epilogue_warps=4)
    )
    assert path.read_text() == compile_plan(plan).ptx
    assert f".entry {facts['kernel']}(" in path.read_text()
    assert ".target sm_100a" in path.read_text()
    assert facts["problem"]["k"] == 592
    assert facts["config"] == {
        "tile_n": 128, "stages": 5, "epilogue_warps": 4, "tmem_load_width": 32, "epilogue": "f32",
    }  # fmt: skip
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
    assert main(["ptx", "patch-embed", "--table", table, "--scale", scale, "-o", str(path)]) == 0
    problem = json.loads((tmp_path / "k.ptx.json").read_text())["problem"]
    assert (problem["table_rows"], problem["scale_source"], problem["m"]) == (rows, scale, 196)


def test_ptx_with_scales_of_rows_and_features(tmp_path):
    path = tmp_path / "k.ptx"
    assert main(["ptx", "patch-embed", "--row-scale", "--feature-scale", "-o", str(path)]) == 0
    facts = json.loads((tmp_path / "k.ptx.json").read_text())
    located = [name for parameter in facts["parameters"] for name in parameter.get("offsets", ())]
    assert sorted(located) == ["feature_scale", "row_scale", "table"]
    assert facts["problem"]["row_scale"] and facts["problem"]["feature_scale"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ptx", "patch-embed", "-o", "x", "--set", "stages=9"], "nearest legal value: 5"),
        (["ptx", "patch-embed", "-o", "x", "--set", "epilogue=fp64"], "nearest legal value: 'f32'"),
        (["plan", "gemm", "--set", "tile_rows=64"], "fields for sm_100a: block_m, tile_n, stages"),
        (["plan", "gemm", "--arch", "sm_90a", "--set", "tile_m=100"], "nearest legal value: 128"),
        (["plan", "gemm", "--k", "12"], "nearest legal value: 16"),
        (["plan", "gemm", "--positions", "256"], "--positions is no option of gemm"),
        (["ptx", "gemm", "--table", "none"], "--table is no option of gemm"),
        (["plan", "patch-embed", "--bias"], "--bias is no option of patch-embed"),
        (["plan", "--in-dtype", "float16"], "--in-dtype is no option of patch-embed"),
        (["plan", "gemm", "--in-dtype", "uint8"], "nearest legal value: 'bfloat16'"),
        (["plan", "gemm", "--batch", "2"], "--batch is no option of gemm"),
        (["plan", "patch-embed-images", "--positions", "49"], "--positions is no option of patch-embed-images"),
        (["plan", "patch-embed-images", "--m", "49"], "--m is no option of patch-embed-images"),
        (["plan", "patch-embed", "--channels-last"], "--channels-last is no option of patch-embed"),
        (["plan", "patch-embed-images", "--arch=sm_90a", "--height", "230"], "nearest legal value: 224"),
        (["plan", "patch-embed-images", "--arch=sm_90a", "--set", "warpgroups=4"], "nearest legal value: 3"),
        (["plan", "patch-embed-images", "--arch=sm_90a", "--batch=64", "--set=tile_n=64"], "fields for sm_90a: source"),
        (["plan", "patch-embed-images", "--arch=sm_90a", "--patch", "7", "--width", "225"], "nearest legal value: 224"),
        (
            ["plan", "patch-embed-images", "--arch=sm_90a", "--precision=fp16", "--set=warpgroups=1"],
            "fields for sm_90a, bf16 and fp16: tile_patches, tile_rows",
        ),
        (
            ["plan", "patch-embed-images", "--arch=sm_90a", "--patch=14", "--set=row_patches=1"],
            "fields for sm_90a, rows of patches: tile_rows, warpgroups",
        ),
        (
            ["plan", "patch-embed-images", "--arch=sm_90a", "--precision=bf16", "--in-dtype=uint8"],
            "nearest legal value: 'bfloat16'",
        ),
        (["plan", "patch-embed-images", "--arch=sm_100a", "--precision=int16"], "multiplies weights of one term"),
        (["plan", "--set", "warpgroups=3"], "fields for sm_100a: tile_n, stages, epilogue_warps"),
        (["plan", "--arch", "sm_90a", "--set", "tile_n=128"], "fields for sm_90a: tile_rows, warpgroups, stages"),
        (["plan", "--set", "stages"], "--set stages: expected FIELD=VALUE"),
        (["plan", "--set", "stages="], "--set stages=: expected an integer"),
        (["plan", "--set", "stages=4.0"], "--set stages=4.0: expected an integer"),
        (["plan", "--set", "stages=4", "--set", "stages=5"], "stages is set twice"),
        (["plan", "--arch", "sm_90a", "--set", "pingpong=maybe"], "--set pingpong=maybe: expected true or false"),
        (["plan", "--arch", "sm_90a", "--set", "warpgroups=4"], "nearest legal value: 3"),
        (["plan", "--features", "12"], "nearest legal value: 16"),
        (["plan", "--batch", "99999999"], "nearest legal value: 2147483392"),
        (["plan", "--sm-count", "1"], "nearest legal value: 2"),
        (["demo", "--images", "absent.png"], "no image file absent.png"),
        (["demo", "--output", "absent/demo.png"], "no folder absent to write absent/demo.png into"),
        (["demo", "--output", "."], ". is a folder"),
        (["ptx", "patch-embed", "-o", "absent/k.ptx"], "no folder absent to write absent/k.ptx into"),
        (["ptx", "patch-embed", "-o", "."], ". is a folder"),
        (["demo", "--precision=fp8", "--set=stages=9", "--images", "absent.png", "--model", "absent"], "value: 5"),
        (["demo", "--precision=int8", "--arch=sm_90a", "--set=cluster=3", "--images", "absent.png"], "value: 2"),
        (["demo", "--model", "absent"], "absent holds no config.json"),
        (["demo", "--precision=bf16", "--arch=sm_90a", "--set=tile_n=65"], "tile_n = 65 is not possible"),
        (["demo", "--model", "x", "--image-size", "64"], "--model brings its own"),
        (["demo", "--image-size", "8"], "image_size = 8 is smaller than a patch"),
        (["demo", "--image-size", "50"], "image_size = 50 is not a whole number of patches of 16"),
    ],
)
def test_unusable_arguments(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "option"),
    [("ptx patch-embed", f"--{name}") for name in ("batch", "positions", "features", "in-features")]
    + [("demo", "--image-size")],
)
@pytest.mark.parametrize("value", ["0", "-3", "1.5", "many"])
def test_counts_are_positive(command, option, value, capsys):
    with pytest.raises(SystemExit) as exit:
        main([*command.split(), f"{option}={value}"])
    assert exit.value.code == 2
    assert f"argument {option}: '{value}' is not a positive integer" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("arguments", "runs"),
    [
        (["patch-embed-images"], "strips: one kernel reads the images"),
        (["patch-embed-images", "--precision", "bf16"], "gather: one kernel reads the images"),
        (["patch-embed-images", "--precision", "fp16", "--arch", "sm_90a"], "gather: one kernel reads the images"),
        (["patch-embed-images", "--channels-last"], "patchify, then patch_embed: channels are last, and strips are"),
        (["patch-embed-images", "--patch", "14"], "patchify, then patch_embed: a row of 14 pixels of a patch is not"),
        (["patch-embed-images", "--arch", "sm_90a"], "patchify, then patch_embed: 196 patches are too few for strips"),
        (["patch-embed"], "patch_embed"),
        (["gemm"], "gemm"),
    ],
)
def test_a_plan_begins_with_what_runs_and_why(arguments, runs, capsys):
    assert main(["plan", *arguments]) == 0
    what, value = capsys.readouterr().out.splitlines()[0].split(maxsplit=1)
    assert what == "runs" and (value.startswith(runs) if ":" in runs else value == runs)


def test_a_kernel_that_an_architecture_lacks(monkeypatch, capsys):
    monkeypatch.setitem(KINDS, "patch-embed-images", {"sm_90a": Sm90ImagesConfig})
    assert main(["plan", "patch-embed-images", "--arch", "sm_100a"]) == 2
    assert "--arch sm_100a: allowed for patch-embed-images: sm_90a" in capsys.readouterr().err
    assert main(["plan", "patch-embed-images"]) == 0  # without --arch, the first that there is
    assert "sm_90a" in capsys.readouterr().out


def test_seeds_are_not_negative(capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--seed=-1"])
    assert "argument --seed: '-1' is not" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["demo"], ["plan"], ["plan", "gemm"], ["ptx", "patch-embed-images"]])
def test_help_shows_tunables_and_choices(command, capsys):
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for kernel in ("patch-embed", "patch-embed-images") if command == ["demo"] else KINDS:
        targets = PLANNERS[kernel.replace("-", "_")].targets.values()
        for kind in (entry.config for target in targets for entry in (target, *target.others)):
            defaults = kind()
            for name, values in CHOICES[kind].items():
                default = f"{name}={getattr(defaults, name)}"
                meaning = MEANINGS.get(kind, {}).get(name, "")
                default += f" ({meaning})" if meaning else ""
                assert f"{default} of {{{', '.join(map(str, values))}}}" in shown
    assert "tile_images=0 (chosen for the problem), warpgroups=0 (chosen for the problem) of {0, 1, 2, 3}" in shown
    assert "stages=0 (two tiles' worth, or what fits), stage_blocks=2" in shown
    assert "sm_90a, bf16 and fp16 (Sm90GatherConfig): tile_patches=0 (chosen for" in shown
    assert "pingpong=true of {true, false}" in shown
    assert "epilogue=f32 of {f32, bf16x2}" in shown


def test_choices_are_what_the_plan_allows():
    """Each value for itself: with pingpong or without, and with the other fields at their least."""
    images = PatchEmbedImagesProblem(1, 3, 32, 64, 16, 192, table_rows=1)
    cases = {
        Sm100PatchEmbedConfig: (PatchEmbedProblem(196, 768, 256), [{}]),
        Sm90PatchEmbedConfig: (PatchEmbedProblem(196, 768, 256), [{}]),
        Sm90ImagesConfig: (images, [{}]),
        Sm90GatherConfig: (dataclasses.replace(images, in_dtype="bfloat16", precision="bf16"), [{}]),
        Sm100GemmConfig: (GemmProblem(512, 512, 512), [{"tile_n": 64, "store_stages": 1}]),
        Sm90GemmConfig: (
            GemmProblem(512, 512, 512),
            [
                {"tile_n": 64, "store_stages": 1, "cluster_m": 1, "tile_m": 64 if turns else 128, "pingpong": turns}
                for turns in (False, True)
            ],
        ),
    }
    for kind, (problem, others) in cases.items():
        for name, values in CHOICES[kind].items():
            legal = set()
            for settings, value in itertools.product(others, range(513)):
                config = dataclasses.replace(kind(), stages=2, **(settings | {name: value}))
                with contextlib.suppress(ValueError):
                    make_plan(problem, config)
                    legal.add(value)
            assert tuple(sorted(legal)) == values, (kind, name)


@pytest.mark.parametrize(
    ("arguments", "problem", "config", "arch"),
    [
        ([], PatchEmbedProblem(196, 768, 768, 196), None, "sm_100a"),
        (["--arch", "sm_90a", "--batch", "8"], PatchEmbedProblem(1568, 768, 768, 196), None, "sm_90a"),
        (["--set", "stages=3"], PatchEmbedProblem(196, 768, 768, 196), Sm100PatchEmbedConfig(stages=3), "sm_100a"),
        (
            ["--arch=sm_90a", "--set=warpgroups=3", "--set=tile_rows=64", "--set=pingpong=false", "--set=order=flat"],
            PatchEmbedProblem(196, 768, 768, 196),
            Sm90PatchEmbedConfig(warpgroups=3, tile_rows=64, pingpong=False, order="flat"),
            "sm_90a",
        ),
        (
            ["patch-embed-images", "--arch=sm_90a", "--batch=5"],
            PatchEmbedImagesProblem(5, 3, 224, 224, 16, 768, table_rows=196),
            None,
            "sm_90a",
        ),
        (
            ["patch-embed-images", "--arch=sm_90a", "--height=32", "--width=480", "--channels=1", "--features=264",
             "--table=bias", "--set=order=image", "--set=tile-patches=15", "--set=pingpong=false"],
            PatchEmbedImagesProblem(1, 1, 32, 480, 16, 264, table_rows=1),
            Sm90ImagesConfig(order="image", tile_patches=15, pingpong=False),
            "sm_90a",
        ),
        (
            ["patch-embed-images", "--arch=sm_100a", "--set=cta-group=1", "--set=weight=smem"],
            PatchEmbedImagesProblem(1, 3, 224, 224, 16, 768, table_rows=196),
            Sm100ImagesConfig(cta_group=1, weight="smem"),
            "sm_100a",
        ),
        (
            ["patch-embed-images", "--arch=sm_90a", "--precision=bf16", "--patch=32", "--out-dtype=float32",
             "--set=tile-n=64", "--set=row_patches=1", "--set=pingpong=true", "--set=order=row"],
            PatchEmbedImagesProblem(
                1, 3, 224, 224, 32, 768, "bfloat16", precision="bf16", table_rows=49, out_dtype="float32"
            ),
            Sm90GatherConfig(tile_n=64, row_patches=1, pingpong=True, order="row"),
            "sm_90a",
        ),
        (
            ["patch-embed-images", "--arch=sm_90a", "--patch=14", "--set=tile-rows=64", "--set=warpgroups=1"],
            PatchEmbedImagesProblem(1, 3, 224, 224, 14, 768, table_rows=256),
            Sm90PatchEmbedConfig(tile_rows=64, warpgroups=1),
            "sm_90a",
        ),
        (["gemm"], GemmProblem(4096, 4096, 4096), None, "sm_100a"),
        (
            ["gemm", "--arch=sm_90a", "--m=196", "--n=768", "--k=3072", "--batches=2", "--bias", "--out-dtype=float32"],
            GemmProblem(196, 768, 3072, 2, out_dtype="float32", bias=True),
            None,
            "sm_90a",
        ),
        (
            ["gemm", "--arch=sm_90a", "--in-dtype=float16", "--set=pingpong=true", "--set=tile_n=128"],
            GemmProblem(4096, 4096, 4096, in_dtype="float16"),
            Sm90GemmConfig(pingpong=True, tile_n=128),
            "sm_90a",
        ),
        (
            ["gemm", "--in-dtype=float32", "--out-dtype=float32", "--set=stages=4", "--set=cluster_m=4"],
            GemmProblem(4096, 4096, 4096, in_dtype="float32", out_dtype="float32"),
            Sm100GemmConfig(stages=4, cluster_m=4),
            "sm_100a",
        ),
    ],
)
def test_plan_is_printed(arguments, problem, config, arch, capsys):
    assert main(["plan", *arguments]) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    plan = make_plan(problem, config, arch)
    for name, value in plan.describe():
        assert rows[name].strip() == value
    for part in plan.launches:
        name = "grid, cluster" if part is plan else f"{part.operation}: grid, cluster"
        assert rows[name].strip() == f"{part.grid}, {part.cluster}"
    shown = dict(pair.split("=") for pair in rows["config"].strip().split(", "))
    assert shown == {name: str(v).lower() if v in (True, False) and isinstance(v, bool) else str(v)
                     for name, v in dataclasses.asdict(plan.config).items()}  # fmt: skip


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
    assert main(["ptx", "patch-embed-images", "--arch", "sm_90a", *sizes, "--set", "source=strips"]) == 0
    facts = json.loads((tmp_path / "patch_embed_images.ptx.json").read_text())
    plan = make_plan(PatchEmbedImagesProblem(3, 3, 32, 64, 16, 72, table_rows=8), Sm90ImagesConfig(source="strips"))
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
    assert (facts["out_pitch"], facts["bias_elements"]) == (100, plan.padded_n)
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


# --- what goes wrong outside of the program --------------------------------------------------------------------------


def test_a_full_device_is_named(tmp_path, capsys):
    path = tmp_path / "k.ptx"
    path.symlink_to("/dev/full")
    assert main(["ptx", "patch-embed", "-o", str(path)]) == 2
    assert capsys.readouterr().err == f"cute-kernels: error: {path} cannot be written: No space left on device\n"
    assert [p.name for p in tmp_path.iterdir()] == ["k.ptx"]


def test_standard_output_on_a_full_device():
    command = [sys.executable, "-m", "cute_kernels", "plan"]
    with open("/dev/full", "w") as full:
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert run.stderr == "cute-kernels: error: [Errno 28] No space left on device\n"
    assert run.returncode == 2


def test_standard_output_into_a_closed_pipe():
    process = subprocess.Popen(
        [sys.executable, "-m", "cute_kernels", "plan"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1


@pytest.mark.parametrize(("error", "status", "text"), [
    (KeyboardInterrupt(), 130, "cute-kernels: interrupted\n"),
    (OSError(5, "Input/output error", "disk"), 2, "cute-kernels: error: [Errno 5] Input/output error: 'disk'\n"),
    (ValueError("two\nlines"), 2, "cute-kernels: error: two lines\n"),
])  # fmt: skip
def test_one_line_and_a_status_for_what_stops_a_command(error, status, text, monkeypatch, capsys):
    def stop():
        raise error

    monkeypatch.setattr(doctor, "inspect_environment", stop)
    assert main(["doctor"]) == status
    assert capsys.readouterr().err == text


@pytest.mark.parametrize("command", [["demo", "--output"], ["ptx", "patch-embed", "-o"]])
@pytest.mark.parametrize("name", ["new", "old"])
def test_what_cannot_be_written_is_refused_before_any_work(command, name, tmp_path, monkeypatch, capsys):
    (tmp_path / "old").touch()
    (tmp_path / "old").chmod(0o400)
    tmp_path.chmod(0o500)
    if os.geteuid() == 0:  # to whom permissions do not apply
        monkeypatch.setattr(os, "access", lambda path, mode: os.stat(path).st_mode >> 6 & mode == mode)
    monkeypatch.setattr(demo.siglip, "seeded_patch_embedding", unreachable)
    monkeypatch.setattr(compile, "compile_plan", unreachable)
    path = tmp_path / name
    assert main([*command, str(path)]) == 2
    assert capsys.readouterr().err == f"cute-kernels: error: {path} cannot be written: permission denied\n"


def test_the_file_of_facts_is_checked_too(tmp_path, monkeypatch, capsys):
    (tmp_path / "k.ptx.json").mkdir()
    monkeypatch.setattr(compile, "compile_plan", unreachable)
    assert main(["ptx", "patch-embed", "-o", str(tmp_path / "k.ptx")]) == 2
    assert "k.ptx.json is a folder" in capsys.readouterr().err


def unreachable(*_, **__):
    raise AssertionError("work was done for a file that cannot be written")


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"cute-kernels {__version__}\n"


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
    assert {name: (p["dtype"], p["extents"], p["strides"], p["swizzle"]) for name, p in maps.items()} == {
        "x": ("u8", [592, 392], [592], "128B"),
        "weight": ("u8", [592, 1152], [592], "128B"),
        "out": ("bf16", [1152, 392], [2304], "128B"),
    }
    # A CTA of a pair loads 128 rows of x and half of the 128 weight rows; a warp stores 32 rows of 128 bytes.
    assert {name: p["box"] for name, p in maps.items()} == {"x": [128, 128], "weight": [128, 64], "out": [64, 32]}
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


@pytest.mark.parametrize(
    ("arguments", "shown"), [(["--help"], "usage: python -m cute_kernels.emulator"), ([], "| PTX")]
)
def test_emulator_module(arguments, shown):
    command = [sys.executable, "-m", "cute_kernels.emulator", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.startswith(shown)


def test_emulator_module_into_a_closed_pipe():
    process = subprocess.Popen(
        [sys.executable, "-m", "cute_kernels.emulator"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1


def test_module_and_script_are_one_command():
    run = subprocess.run([sys.executable, "-m", "cute_kernels", "--help"], capture_output=True, text=True, check=True)
    assert "usage: cute-kernels" in run.stdout
    assert "demo" in run.stdout
    assert "ptx" in run.stdout


def test_fault_that_the_emulator_reports(capsys, monkeypatch):
    """In words, not as a traceback; other errors of ours keep theirs."""
    def hang(*arguments, **more):
        raise Hang("cluster 0 hangs:\n  warp 1 waits")

    monkeypatch.setattr(emulated, "launch", hang)
    assert main(["demo"]) == 3
    assert capsys.readouterr().err.endswith("cute-kernels: Hang: cluster 0 hangs:\n  warp 1 waits\n")
    monkeypatch.setattr(emulated, "launch", lambda *arguments, **more: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["demo"])
