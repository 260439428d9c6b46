"""Pages whose code is executed: tutorial, kernel of your own, debugger, operations, a swapped model, FP8 in an MLP."""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch

from cute_kernels import patch_embed
from cute_kernels.commands import cli
from cute_kernels.emulator.machine.launch.schedule import Schedule
from cute_kernels.models.nn import Fp8Mlp
from cute_kernels.operations.reference import patch_embed_conv2d
from cute_kernels.testing import emulation

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE)


def words(line: str) -> str:
    """A line without what depends on CuTe DSL's version or on the machine: registers, instructions, times, paths."""
    line = re.sub(r"PTX lines? \d+(, (\d+|\.\.))*|stores %r\d+|[\d,]+ warp instructions|[\d.]+ s$", "N", line)
    line = re.sub(r"/\S+/", "", line)
    line = re.sub(r"^( +)\d+( +\d+ +[\d,]+ +- +- +-)$", r"N\2", line)  # a row of a sweep: registers, stack, shared
    line = re.sub(r"^> +[\d.]+ +\d+ ", "N", line)  # a line of a profile: share and number of instructions
    return " ".join(line.split())


def test_the_tutorial_prints_what_it_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every line that is shown is among those that its command prints, and in their order."""
    (program,) = blocks("tutorial.md", "python")
    monkeypatch.chdir(tmp_path)
    Path("transpose.py").write_text(program)
    statuses = []
    for block in blocks("tutorial.md", "console"):
        for command, _, output in (each.partition("\n") for each in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]):
            if not command.startswith("cute-kernels "):
                subprocess.run(command, shell=True, check=True)
                continue
            statuses.append(cli.main(command.split()[1:]))
            captured = capsys.readouterr()
            printed = iter([words(line) for line in (captured.err + captured.out).splitlines()])
            for line in output.splitlines():
                assert words(line) in printed, (command, line)
    assert statuses == [0, 3, 0, 0, 0, 0, 0]


def test_the_debugger_prints_what_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/emulator/finding_out.md: the session at a prompt, and the same in a notebook, where bias_add.py runs."""
    monkeypatch.chdir(ROOT)
    shown, _ = blocks("emulator/finding_out.md", "console")
    command, intro, *lines = shown.removeprefix("$ ").splitlines()
    asked = [line.removeprefix("(debug) ") for line in lines if line.startswith("(debug) ")]
    assert cli.main([*command.split()[1:-1], *(f"--command={each}" for each in asked), command.split()[-1]]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [words(line) for line in printed[printed.index(lines[0]) :]] == [words(line) for line in lines]
    (block,) = blocks("emulator/finding_out.md", "python")
    example = str(DOCS / "examples" / "bias_add.py")
    scope = {"launch_my_kernel": lambda: runpy.run_path(example, run_name="__main__")}
    exec(compile(block, "finding_out.md", "exec"), scope)
    assert scope["stop"].warp == "0.0.2" and intro.startswith("launch 1, kernel add_bias: ")


def test_the_wrong_swizzle_is_found_as_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """docs/emulator/finding_out.md: every line of the session, in docs/examples/relu_gemm.py with the fault planted."""
    _, shown = blocks("emulator/finding_out.md", "console")
    program = (DOCS / "examples" / "relu_gemm.py").read_text()
    monkeypatch.chdir(tmp_path)
    old, new = "load_tma(b, stages_layout(COLUMNS)", "load_tma(b, cute.make_layout((COLUMNS, K), stride=(K, 1))"
    assert program.count(old) == 1
    Path("gemm.py").write_text(program.replace(old, new))
    command, asked, *lines = shown.removeprefix("$ ").splitlines()
    options = [f"--command={asked.removeprefix('(debug) ')}"]
    assert cli.main([*command.split()[1:-1], *options, command.split()[-1]]) == 0
    printed = iter([words(line) for line in capsys.readouterr().out.splitlines()])
    assert len(lines) == 4 and all(words(line) in printed for line in lines)


def test_the_operations_print_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """And agree with torch: each with its reference, bit for bit, or with FP64."""
    scopes = []
    for block in blocks("operations.md", "python"):
        scopes.append({})
        exec(compile(block, "operations.md", "exec"), scopes[-1])
        assert capsys.readouterr().out.strip() == block.rpartition("    # ")[2].strip()
    images, rows, product = scopes
    conv = images["conv"]
    expected = patch_embed_conv2d(images["images"] / 127.5 - 1, conv.weight, conv.bias, None)
    assert (images["out"].float() - expected).norm() / expected.norm() < 0.02
    x, added = rows["x"].view(2, 196, 768), (rows["conv"].bias.detach(), rows["pos_embed"])
    scales = {"scale_a": 1 / 448, "scale_b": rows["scale_b"]}
    assert torch.equal(rows["out"], patch_embed(x, rows["weight"], *added, **scales))
    exact = product["a"].double() @ product["b"].double().T
    assert torch.allclose(product["out"].double(), exact, rtol=1e-5, atol=1e-4)


def test_the_swap_of_a_model_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/use_in_your_model.md: the block that needs nothing but transformers."""
    pytest.importorskip("transformers")
    (block,) = (block for block in blocks("use_in_your_model.md", "python") if 'backend="emulator"' in block)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(compile(block, "use_in_your_model.md", "exec"), {})
    assert float(re.fullmatch(r"tensor\((.*)\)\n", capsys.readouterr().out)[1]) > 0.999


def test_the_mlp_in_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/fp8_mlp.md: a converted tower; its MLP by the reference, by the SM90 kernel and out of a checkpoint."""
    pytest.importorskip("transformers")
    scope: dict = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for block in blocks("fp8_mlp.md", "python"):
            exec(compile(block, "fp8_mlp.md", "exec"), scope)
        images = scope["images"][0]
    assert float(re.fullmatch(r"tensor\((.*)\)\n", capsys.readouterr().out)[1]) > 0.99
    model, given = scope["model"], []
    mlp = next(module for module in model.modules() if isinstance(module, Fp8Mlp))
    mlp.register_forward_hook(lambda _, inputs, out: given.append((inputs[0], out)))
    with torch.no_grad():
        model(images)
    ((x, out),) = given
    mlp.backend = "emulator"
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), out, rtol=0.02, atol=0.02)
    scales = {name for name in model.state_dict() if name.endswith("_input_scale")}
    assert len(scales) == 6 and all(model.state_dict()[name].dtype is torch.float32 for name in scales)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """docs/examples/relu_gemm.py."""
    spec = importlib.util.spec_from_file_location("relu_gemm", DOCS / "examples" / "relu_gemm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_kernel_and_its_graph(example: ModuleType) -> None:
    """Blocks of code are parts of the file; what the graph prints is what is shown."""
    source = (DOCS / "examples" / "relu_gemm.py").read_text()
    shown = blocks("own_kernel.md", "python")
    assert len(shown) >= 4
    for block in shown:
        assert block in source
    (printed,) = blocks("own_kernel.md", "text")
    assert printed.splitlines() == [*example.GRAPH.describe(), *(repr(barrier) for barrier in example.GRAPH.barriers())]


@pytest.mark.parametrize("m, n, k", [(64, 64, 64), (200, 136, 160), (8, 8, 8)])
def test_the_kernel_of_the_page(example: ModuleType, m: int, n: int, k: int) -> None:
    """Against torch in FP64, under two schedules; sums of small integers are exact in any order."""
    generator = torch.Generator().manual_seed(m)
    a, b = (torch.randint(-4, 5, (rows, k), generator=generator).bfloat16() for rows in (m, n))
    expected = (a.double() @ b.double().T).clamp(min=0).bfloat16()
    assert (expected > 0).any() and (expected == 0).any()
    for schedule in (Schedule(), Schedule(seed=3, completion="random", interleave="random")):
        with emulation("sm_90a", schedule):
            assert torch.equal(example.relu_product(a.cuda(), b.cuda()).cpu(), expected)


WAIT, RELEASE = "warpgroup.wait_group(0)", "self.operands.arrive_empty(state, thread, 1)"


@pytest.mark.parametrize(
    "before, after, report",
    [
        (RELEASE, "pass", "error[hang]: the kernel hangs"),
        (f"{WAIT}\n                {RELEASE}", f"{RELEASE}\n                {WAIT}", "error[stage-in-use]: "),
    ],
)
def test_the_kernel_broken_as_the_page_says(
    before: str, after: str, report: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (DOCS / "examples" / "relu_gemm.py").read_text()
    assert source.count(before) == 1
    program = tmp_path / "relu_gemm.py"
    program.write_text(source.replace(before, after))
    assert cli.main(["emulate", "--arch", "sm_90a", str(program)]) == 3
    assert report in capsys.readouterr().err
