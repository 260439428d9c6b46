"""tests/gpu on machines without a GPU: every architecture has its cases, and those of SM100 run in the emulator."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cute_kernels.config import (
    Config,
    GemmProblem,
    PatchEmbedImagesProblem,
    PatchEmbedProblem,
    Sm100GemmConfig,
    Sm100ImagesConfig,
)
from cute_kernels.plan import ARCHS, PLANNERS, make_plan
from tests.gpu import architecture, gemm_configs, images_configs, patch_embed_configs
from tests.processes import run_python

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "tests" / "gpu"

SAMPLE = (
    "test_emulator_agreement.py::test_equal_bits_where_sums_are_exact[shape0-weight in shared memory]",
    "test_gemm.py::test_default_configuration[shape0]",
    "test_images.py::test_every_bit[1-side1]",
    "test_torch.py::test_negated_views",
    "test_warm.py::test_clear_cache_forgets_warm_calls",
)
"""Executed with every change, by file and name; the others with ``pytest tests/gpu --dry-run-arch sm_100a``."""

# Lists what is collected and what is left out, and executes the sample.
PROGRAM = """
import json, sys, pytest

class Sample:
    def __init__(self, names):
        self.names, self.left_out = names, []

    def pytest_deselected(self, items):
        self.left_out += [item.nodeid for item in items]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        found = {"collected": [item.nodeid for item in items], "left out": self.left_out}
        open(sys.argv[2], "w").write(json.dumps(found))
        items[:] = [item for item in items if item.nodeid.rpartition("tests/gpu/")[2] in self.names]

names = json.loads(sys.argv[3])
options = ["-p", "no:cacheprovider", "-p", "no:randomly", "--dry-run-arch", sys.argv[1], "tests/gpu"]
sys.exit(pytest.main(options, plugins=[Sample(names)]))
"""


def test_the_architectures_have_selections() -> None:
    selections = (patch_embed_configs, gemm_configs, images_configs)
    assert all(set(module.SELECTIONS) == set(architecture.WITH_SELECTIONS) <= set(ARCHS) for module in selections)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(patch_embed_configs.Selection)])
def test_no_architecture_has_fewer_cases(field: str) -> None:
    sm90, sm100 = (getattr(patch_embed_configs.SELECTIONS[arch], field) for arch in ("sm_90a", "sm_100a"))
    if isinstance(sm90, (tuple, dict)):
        assert len(sm100) >= len(sm90) > 0
    assert len(gemm_configs.SM100) >= len(gemm_configs.SM90) > 0
    assert len(images_configs.SM100) >= len(images_configs.SM90) > 0


def configs_of(selection: patch_embed_configs.Selection) -> Iterator[Config]:
    for value in (getattr(selection, field.name) for field in dataclasses.fields(selection)):
        for entry in value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,):
            yield from (case.config for case in entry) if isinstance(entry, tuple) else (entry,)


@pytest.mark.parametrize("arch", architecture.WITH_SELECTIONS)
def test_selections_are_legal_and_distinct(arch: str) -> None:
    selection = patch_embed_configs.SELECTIONS[arch]
    for config in configs_of(selection):
        assert make_plan(PatchEmbedProblem(64 * 32, 384, 256, 32), config, arch).arch.name == arch
    groups = (selection.tile_edges, selection.positions, selection.rings, selection.stage_shapes)
    for case in (case for cases in groups for group in cases.values() for case in group):
        images, positions, n, k = case.shape
        make_plan(PatchEmbedProblem(images * positions, n, k, positions), case.config, arch)
    assert set(Counter(selection.variants).values()) == {1}
    types = (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32"))
    for config, (in_dtype, out_dtype) in itertools.product(gemm_configs.SELECTIONS[arch], types):
        problem = GemmProblem(515, 393, 200, 1, in_dtype, out_dtype, True)
        make_plan(problem, gemm_configs.with_stages_that_fit(problem, config, arch), arch)
    for config in gemm_configs.TRANSPOSED:
        make_plan(GemmProblem(515, 393, 200, 1, bias=True), config, "sm_90a")
    for config, channels in images_configs.SELECTIONS[arch]:
        make_plan(PatchEmbedImagesProblem(5, channels, 224, 224, 16, 768, table_rows=196), config, arch)


def functions(path: Path) -> set[str]:
    """Names of the tests of a file."""
    body = ast.parse(path.read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_a_device_of_capability_10_0(tmp_path: Path) -> None:
    """Every test is collected, none for want of a configuration, and a sample passes in the emulator."""
    report = tmp_path / "collected.json"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run = run_python(str(program), "sm_100a", str(report), json.dumps(SAMPLE), cwd=REPOSITORY)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    found = json.loads(report.read_text())
    names = {where: [name.rpartition("tests/gpu/")[2] for name in found[where]] for where in found}
    assert set(SAMPLE) <= set(names["collected"]) and f"{len(SAMPLE)} passed" in run.stdout
    assert not any("NOTSET" in name for name in names["collected"])
    known = {name.partition("[")[0] for name in (*names["collected"], *names["left out"])}
    files = [path for path in FOLDER.glob("test_*.py") if path.name not in architecture.NEEDS_SM90]
    assert known == {f"{path.name}::{test}" for path in files for test in functions(path)}


def test_what_is_not_for_sm100_has_no_kernel_there() -> None:
    assert architecture.NEEDS_SM90 == ("test_gemm_split.py", "test_images_gather.py")
    assert not any(field.name == "split_k" for field in dataclasses.fields(Sm100GemmConfig))
    assert all("sm_100a" in planner.kernels for planner in PLANNERS.values())
    wide = PatchEmbedImagesProblem(4, 3, 224, 224, 32, 768, "bfloat16", precision="bf16")
    make_plan(wide, None, "sm_90a")
    with pytest.raises(ValueError, match="patch = 32: must be"):
        make_plan(wide, Sm100ImagesConfig())
