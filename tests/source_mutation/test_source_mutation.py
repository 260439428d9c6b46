"""The parts that are mutated, and the tests that judge their mutants, are there; what our operators change."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_mutation.judge import copy_of
from tests.source_mutation.operators import OPERATORS, changes
from tests.source_mutation.parts import PARTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_files_of_a_part_exist(part) -> None:
    assert [name for name in (*part.sources, *part.tests) if not (ROOT / name).exists()] == []


def test_a_copy_has_compiled_libraries(tmp_path: Path) -> None:
    """Each copy would compile them again; what other commands have built stays behind."""
    for name in ("build/report.md", "core/build/core.so", "core/__pycache__/a.pyc"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("")
    with copy_of(tmp_path) as copy:
        assert [str(each.relative_to(copy)) for each in copy.rglob("*.*")] == ["core/build/core.so"]


def test_tests_of_unchanged_sources(tmp_path: Path) -> None:
    """Tests that fail are told from tests that take too long, and their names are kept."""
    copy = tmp_path / "repository"
    copy.mkdir()
    bodies = {"right": ("pass", 60), "slow": ("time.sleep(60)", 4), "wrong": ("assert 0", 60)}
    for name, (body, _) in bodies.items():
        (copy / f"test_{name}.py").write_text(f"import time\n\ndef test_one():\n    {body}\n")
    program = f"""
from pathlib import Path
from tests.source_mutation.judge import judge, output_of
from tests.source_mutation.parts import Part
for name, (_, seconds) in {bodies}.items():
    copy = Path({str(copy)!r})
    outcome = judge(copy, Part((), (f"test_{{name}}.py",)), None, seconds)
    print(outcome, "FAILED test_wrong.py::test_one" in output_of(copy).read_text())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.stdout.split() == ["survived", "False", "hangs", "False", "killed", "True"], done.stderr


@pytest.mark.parametrize(
    "operator, source, expected",
    [
        ("ours/Halve", "f(8, True, 0, 1)", ["f(4, True, 0, 1)", "f(8, True, 0, 0)"]),
        ("ours/SwapQuantifier", "any(a) + min(b)", ["all(a) + min(b)", "any(a) + max(b)"]),
        ("ours/DropOperand", "x = a or b\\\n or (c and d)", ["x = b or (c and d)", "x = a or (c and d)", "x = a or b",
                                                          "x = a or b\\\n or (d)", "x = a or b\\\n or (c)"]),
        ("ours/NeverBranch", "if a:\n    b = 'é' if c else d", ["if False:\n    b = 'é' if c else d",
                                                             "if a:\n    b = 'é' if False else d"]),
        ("ours/SubclassesToo", "if type(a) is b: pass", ["if isinstance(a, b): pass"]),
        ("ours/DropStatement", "def f(a):\n    a = 1\n    b = 2\n    g(b)\n    b += 1", [
            "def f(a):\n    pass\n    b = 2\n    g(b)\n    b += 1",
            "def f(a):\n    a = 1\n    b = 2\n    pass\n    b += 1",
            "def f(a):\n    a = 1\n    b = 2\n    g(b)\n    pass"]),
    ],
)  # fmt: skip
def test_changes_of_an_operator(operator: str, source: str, expected: list[str]) -> None:
    got = [each.applied(source) for each in changes(source, operator)]
    assert got == expected
    for each in got:
        compile(each, "changed", "exec")


@pytest.mark.parametrize(
    "path, before, after",
    [
        ("models/nn/engine.py", "tensors[1].shape[0] % 8", "tensors[1].shape[0] % 4"),
        ("models/nn/engine.py", 'is_meta or self.options.precision == "auto" else', "is_meta else"),
        ("models/transformers.py", " or why_own(self, self.library, kind)", ""),
        ("emulator/machine/launch/launch.py", "threads = -(-threads // 32) * 32", "pass"),
        ("emulator/reports/barrier_causes.py", "and any(first <= array.first", "and all(first <= array.first"),
        ("emulator/reports/sarif.py", "if os.path.isabs(path)", "if False"),
        ("emulator/reports/sarif.py", "max(source.line, 1)", "max(source.line, 0)"),
        ("emulator/programs/recorded.py", "in self.variables:\n            found.update(content)",
         "in self.variables:\n            pass"),
        ("plan/config_codec.py", "type(config) is kind", "isinstance(config, kind)"),
        ("plan/gemm_sm90.py", "least if 2 * least <= self.config.tile_m and self.config.cluster_m == 1 else",
         "least if False else"),
        ("operations/runtime/repeat.py", " or _is_capturing()", ""),
    ],
)  # fmt: skip
def test_faults_that_nobody_noticed_once_are_drawn(path: str, before: str, after: str) -> None:
    """Each is one change of a file of a part. (Tests notice them now.)"""
    file = ROOT / "cute_kernels" / path
    assert any((ROOT / source) in (file, *file.parents) for part in PARTS.values() for source in part.sources)
    text = file.read_text()
    assert text.count(before) == 1
    wanted = text.replace(before, after)
    assert any(each.applied(text) == wanted for name in OPERATORS for each in changes(text, name))


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_every_change_is_python(part) -> None:
    """Of one file of each part: a mutant that does not compile says nothing about the tests."""
    top = ROOT / part.sources[-1]
    file = max(top.rglob("*.py"), key=lambda path: path.stat().st_size) if top.is_dir() else top
    text = file.read_text()
    for name in OPERATORS:
        for change in changes(text, name):
            ast.parse(change.applied(text))
