"""The command line: arguments, help, and what `plan` prints."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json

import pytest

from cute_kernels import __version__
from cute_kernels.commands.cli import main
from cute_kernels.commands.kernel_options import OPERATIONS, add_problem, problem_of
from cute_kernels.config import (
    GemmProblem,
    PatchEmbedImagesProblem,
    PatchEmbedProblem,
    Problem,
    Sm90GatherConfig,
    Sm90GemmConfig,
    Sm90ImagesConfig,
    Sm90PatchEmbedConfig,
    Sm100GemmConfig,
    Sm100ImagesConfig,
    Sm100PatchEmbedConfig,
    Sm100ResidentConfig,
)
from cute_kernels.plan import PLANNERS, make_plan
from cute_kernels.plan.config_codec import spell
from cute_kernels.plan.options import Option


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "patch-embed", "--set", "stages=9", "--set=tile_n=256"], "nearest legal value: 5"),
        (["plan", "patch-embed", "--set", "epilogue=fp64"], "nearest legal value: 'f32'"),
        (["plan", "gemm", "--set", "stage=3"], "did you mean stages"),
        (["plan", "gemm", "--set", "tile_rows=64"], "fields for sm_100a, Sm100GemmConfig: block_m, tile_n, stages"),
        (["plan", "gemm", "--arch", "sm_90a", "--set", "tile_m=100"], "nearest legal value: 128"),
        (["plan", "gemm", "--k", "12"], "nearest legal value: 16"),
        (["plan", "gemm", "--positions", "256"], "--positions is no option of gemm"),
        (["plan", "gemm", "--table", "none"], "--table is no option of gemm"),
        (["plan", "patch-embed", "--bias"], "--bias is no option of patch-embed"),
        (["plan", "--in-dtype", "float16"], "--in-dtype is no option of patch-embed"),
        (["plan", "gemm", "--in-dtype=float8_e4m3fn", "--arch=sm_90"], "nearest legal value: 'bfloat16'"),
        (["plan", "gemm", "--batch", "2"], "--batch is no option of gemm"),
        (["plan", "patch-embed-images", "--positions", "49"], "--positions is no option of patch-embed-images"),
        (["plan", "patch-embed-images", "--m", "49"], "--m is no option of patch-embed-images"),
        (["plan", "patch-embed", "--channels-last"], "--channels-last is no option of patch-embed"),
        (["plan", "patch-embed-images", "--arch=sm_90a", "--height", "230"], "nearest legal value: 224"),
        (["plan", "patch-embed-images", "--arch=sm_90a", "--set", "warpgroups=4"], "nearest legal value: 3"),
        (
            ["plan", "patch-embed-images", "--arch=sm_90a", "--batch=64", "--set=tile_m=64"],
            "fields for sm_90a, Sm90ImagesConfig: source",
        ),
        (["plan", "patch-embed-images", "--arch=sm_90a", "--patch", "7", "--width", "225"], "nearest legal value: 224"),
        (
            ["plan", "patch-embed-images", "--arch=sm_90a", "--precision=fp16", "--set=warpgroup=1"],
            "fields for sm_90a, Sm90GatherConfig: tile_patches, tile_rows",
        ),
        (
            ["plan", "patch-embed-images", "--arch=sm_90a", "--patch=28", "--set=row_patch=1"],
            "fields for sm_90a, Sm90PatchEmbedConfig: tile_rows, warpgroups",
        ),
        (
            ["plan", "patch-embed-images", "--arch=sm_90a", "--precision=bf16", "--in-dtype=uint8"],
            "nearest legal value: 'bfloat16'",
        ),
        (["plan", "--set", "warpgroups=3"], "fields for sm_100a, Sm100ResidentConfig: weight, order, tile_rows"),
        (
            ["plan", "--arch", "sm_90a", "--set", "tile_n=128"],
            "fields for sm_90a, Sm90PatchEmbedConfig: tile_rows, warpgroups, stages",
        ),
        (["plan", "--set", "stages"], "setting stages: must be FIELD=VALUE"),
        (["plan", "--set", "stages="], "setting stages=: must be an integer or auto"),
        (["plan", "--set", "stages=4.0"], "setting stages=4.0: must be an integer"),
        (["plan", "--set", "stages=4", "--set", "stages=5"], "stages is set twice"),
        (["plan", "--arch", "sm_90a", "--set", "pingpong=maybe"], "setting pingpong=maybe: must be true or false"),
        (["plan", "--arch", "sm_90a", "--set", "warpgroups=4"], "nearest legal value: 3"),
        (["plan", "--features", "12"], "nearest legal value: 16"),
        (["plan", "--batch", "99999999"], "nearest legal value: 2147483392"),
        (["plan", "--set", "cta_group=2", "--sm-count", "1"], "nearest legal value: 2"),
        (["plan", "--json", "absent/k.json"], "no folder absent to write absent/k.json into"),
        (["plan", "--json", "."], ". is a folder"),
    ],
)
def test_unusable_arguments(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def problem(kernel: str, *words: str) -> Problem:
    parser = argparse.ArgumentParser()
    parser.add_argument("kernel")
    add_problem(parser)
    return problem_of(parser.parse_args([kernel, *words]))


@pytest.mark.parametrize(("kernel", "option"), [
    pytest.param(kernel, option, id=f"{kernel} {option.flag}")
    for kernel, planner in OPERATIONS.items() for option in planner.options.options
])  # fmt: skip
def test_every_option_changes_the_problem_unless_it_is_the_default(kernel: str, option: Option) -> None:
    usual, default = problem(kernel), option.default
    values = option.choices or (() if default is False else (str(default), str(16 * default)))
    spellings = [(option.flag, value) for value in values] or [(option.flag,)]
    changed = [words for words in spellings if problem(kernel, *words) != usual]
    assert len(spellings) - len(changed) == (default is not False)
    for name, other in OPERATIONS.items():
        namesakes = [each for each in other.options.options if each.name == option.name]
        assert all(type(each.default) is type(default) or each.choices for each in namesakes)
        if not namesakes:
            with pytest.raises(ValueError, match=f"{option.flag} is no option of {name}"):
                problem(name, *spellings[0])


@pytest.mark.parametrize("option", ["--batch", "--positions", "--features", "--in-features"])
@pytest.mark.parametrize("value", ["0", "-3", "1.5", "many"])
def test_counts_are_positive(option, value, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["plan", "patch-embed", f"{option}={value}"])
    assert exit.value.code == 2
    assert f"argument {option}: '{value}': must be a positive integer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "runs"),
    [
        (["patch-embed-images"], "strips: one kernel reads the images"),
        (["patch-embed-images", "--precision", "bf16"], "gather: one kernel reads the images"),
        (["patch-embed-images", "--precision", "fp16", "--arch", "sm_90a"], "gather: one kernel reads the images"),
        (["patch-embed-images", "--channels-last"], "patchify, then patch_embed: channels are last, and strips are"),
        (["patch-embed-images", "--patch", "14"], "patchify, then patch_embed: a row of 14 pixels of a patch is not"),
        (["patch-embed-images", "--arch", "sm_90a"], "strips: one kernel reads the images, with the weight beside"),
        (["patch-embed-images", "--arch", "sm_90a", "--patch", "32"], "gather: one kernel reads the images"),
        (
            ["patch-embed"],
            "patch_embed: weight in shared memory",
        ),
        (
            ["patch-embed", "--batch=4736"],
            "patch_embed: weight in tensor memory",
        ),
        (["patch-embed", "--in-features=4096"], "patch_embed: weight streamed"),
        (["gemm"], "gemm"),
    ],
)
def test_a_plan_begins_with_what_runs_and_why(arguments, runs, capsys):
    assert main(["plan", *arguments]) == 0
    what, value = capsys.readouterr().out.splitlines()[0].split(maxsplit=1)
    assert what == "runs" and (value.startswith(runs) if ":" in runs else value == runs)


def test_a_kernel_that_an_architecture_lacks(monkeypatch, capsys):
    planner = OPERATIONS["patch-embed-images"]
    only = dataclasses.replace(planner, kernels={"sm_90a": planner.kernels["sm_90a"]})
    monkeypatch.setitem(OPERATIONS, "patch-embed-images", only)
    assert main(["plan", "patch-embed-images", "--arch", "sm_100a"]) == 2
    assert "--arch sm_100a: must be one of sm_90a" in capsys.readouterr().err
    assert main(["plan", "patch-embed-images"]) == 0  # without --arch, the first that there is
    assert "sm_90a" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["plan"], ["plan", "gemm"], ["plan", "patch-embed-images"]])
def test_help_shows_tunables_and_choices(command, capsys):
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name in command[1:] or OPERATIONS:
        for kernel in itertools.chain(*OPERATIONS[name].kernels.values()):
            defaults = kernel.config()
            for part in dataclasses.fields(kernel.config):
                assert f"{part.name}={spell(getattr(defaults, part.name))}" in shown
                values = kernel.fields[part.name].legal if part.name in kernel.fields else ()
                assert not values or f" of {{{', '.join(map(str, values))}}}" in shown
    if command[1:]:
        return
    assert "auto: chosen for the problem." in shown and "tile_images=auto, warpgroups=auto of {1, 2, 3}" in shown
    assert "stages=auto (two tiles' worth, or what fits), stage_blocks=2 of {1, 2, 3, 4}" in shown
    assert "stage_blocks=auto of {1, 2, 3}" in shown
    assert "patch-embed-images, sm_90a (Sm90GatherConfig): tile_patches=auto, tile_rows=auto, " in shown
    assert "(Sm90PatchEmbedConfig): see patch-embed" in shown
    assert "pingpong=true of {true, false}" in shown
    assert "epilogue=f32 of {f32, bf16x2}" in shown


def test_choices_are_what_the_plan_allows():
    """Each value for itself: with pingpong or without, and with the other fields at their least."""
    images = PatchEmbedImagesProblem(1, 3, 32, 64, 16, 192, table_rows=1)
    cases = {
        Sm100PatchEmbedConfig: (PatchEmbedProblem(196, 768, 256, table_rows=196), [{}]),
        Sm100ResidentConfig: (PatchEmbedProblem(196, 768, 256), [{"tile_rows": 128}]),
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
        known = itertools.chain(*(kernels for planner in PLANNERS.values() for kernels in planner.kernels.values()))
        fields = next(kernel.fields for kernel in known if kernel.config is kind)
        for name, values in ((name, field.legal) for name, field in fields.items()):
            if not values or isinstance(values[0], str):
                continue
            legal = set()
            for settings, value in itertools.product(others, range(513)):
                config = dataclasses.replace(kind(), stages=2, **(settings | {name: value}))
                with contextlib.suppress(ValueError):
                    make_plan(problem, config)
                    legal.add(value)
            elsewhere = {"stage_blocks": {3}} if kind is Sm90ImagesConfig else {}
            assert legal | elsewhere.get(name, set()) == set(values), (kind, name)


@pytest.mark.parametrize(
    ("arguments", "problem", "config", "arch"),
    [
        ([], PatchEmbedProblem(196, 768, 768, 196), None, "sm_100a"),
        (["--arch", "sm_90a", "--batch", "8"], PatchEmbedProblem(1568, 768, 768, 196), None, "sm_90a"),
        (["--set", "stages=3"], PatchEmbedProblem(196, 768, 768, 196), Sm100ResidentConfig(stages=3), "sm_100a"),
        (["--set=tile_n=128"], PatchEmbedProblem(196, 768, 768, 196), Sm100PatchEmbedConfig(tile_n=128), "sm_100a"),
        (
            ["--set=tile_rows=64", "--set=stages=3", "--set=weight=smem"],
            PatchEmbedProblem(196, 768, 768, 196),
            Sm100ResidentConfig(tile_rows=64, stages=3, weight="smem"),
            "sm_100a",
        ),
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


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"cute-kernels {__version__}\n"


def test_an_architecture_without_its_letter_is_pointed_at(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--arch", "sm_100"])
    assert "sm_100: its kernels need instructions that only sm_100a has: --arch sm_100a" in capsys.readouterr().err
    assert main(["plan", "--arch", "sm_90"]) == 2  # has kernels of its own, without wgmma
    assert "--arch sm_90a has other kernels" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "sweep", "explore", "compare"])
def test_the_help_of_one_kernel_has_its_options_alone(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {}
    for kernel in ("gemm", ""):
        with pytest.raises(SystemExit) as ended:
            main([command, *filter(None, [kernel]), "--help"])
        assert ended.value.code == 0
        texts[kernel] = capsys.readouterr().out
    assert "Sm100GemmConfig" in texts["gemm"] and "Sm100PatchEmbedConfig" not in texts["gemm"]
    assert "--m " in texts["gemm"] and "--batch " not in texts["gemm"] and "--batch " in texts[""]


def test_records_of_a_plan_are_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json", "-"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert main(["plan"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join((each["name"], each["value"])).split() for each in records] == [line.split() for line in lines]
    assert any("(modelled, " in line for line in lines)
