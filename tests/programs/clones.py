"""Programs of public repositories that no package on PyPI has: they run from a folder that somebody cloned.

Nothing of those repositories is here but the names of their programs and the arguments that make them small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.programs.cases import HERE, Case


class Example(Case):
    """A program of a clone: ``program`` is its path in the folder of examples, ``argument`` what it is called with."""

    @property
    def name(self) -> str:
        return f"{self.arch} {self.program} {self.argument}".strip()


@dataclass(frozen=True)
class Clone:
    """Which programs of a repository are run.

    Attributes:
        option: of the command, which takes the folder.
        origin: the repository, and the version that the outcomes are recorded of.
        below: the folder of the examples, in the clone.
        programs: file of this folder with a line for each run: architecture, program, arguments.
        driver: file of this folder that the emulator runs in place of the program, which it gets as its first
            argument; empty: the program itself runs.
        passed: how the output of a program says that its own check has passed.
    """

    option: str
    origin: str
    below: str
    programs: str
    driver: str
    passed: tuple[str, ...]

    def cases(self) -> Iterator[Example]:
        """All, in the order of the file."""
        for line in (HERE / self.programs).read_text().splitlines():
            if line.strip() and not line.startswith("#"):
                arch, program, *argument = line.split()
                yield Example(self.origin, program, " ".join(argument), arch)

    def folder(self, clone: Path) -> Path:
        """That of the examples.

        Raises:
            ValueError: if ``clone`` is no clone of this repository.
        """
        folder = clone / self.below
        if not folder.is_dir():
            raise ValueError(f"--{self.option} {clone}: a clone of {self.origin}, which has {self.below}, is needed")
        return folder

    def command(self, case: Case, folder: Path) -> list[str]:
        """What ``cute-kernels emulate`` runs, and its arguments."""
        program = str(folder / case.program)
        return [*([str(HERE / self.driver)] if self.driver else []), program, *case.argument.split()]


NVIDIA_EXAMPLES = Clone(
    option="nvidia-examples",
    origin="NVIDIA/cutlass, commit 7107b0553 (2026-08-20)",
    below="examples/python/CuTeDSL",
    programs="nvidia_examples.txt",
    driver="",
    passed=("PASS", "passed", "success", "correct"),
)
TRITON_TUTORIALS = Clone(
    option="triton-tutorials",
    origin="triton-lang/triton, commit 63068fcc2 (2026-08-20)",
    below="python/tutorials",
    programs="triton_tutorials.txt",
    driver="triton_tutorial.py",
    passed=("PASS on",),
)
CLONES = (NVIDIA_EXAMPLES, TRITON_TUTORIALS)
