"""Programs of public repositories that no package on PyPI has: they run from a folder that somebody cloned.

Nothing of those repositories is here but the names of their programs and the arguments that make them small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.public_programs.cases import HERE, Case


@dataclass(frozen=True)
class Example(Case):
    """A program of a clone.

    Attributes:
        program: its path in the folder of examples.
        argument: what it is called with.
        driver: file of this folder that the emulator runs in place of the program, which it gets as its first
            argument; empty: the program itself runs.
    """

    driver: str = ""

    @property
    def name(self) -> str:
        """Of the record."""
        return f"{self.arch} {self.program} {self.argument}".strip()

    @property
    def row(self) -> tuple[str, str]:
        """The first cells of the table: the program, without its suffix, and its arguments."""
        return f"`{self.program.removesuffix('.py')}`", f"`{self.argument}`" if self.argument else ""

    def command(self, folder: Path) -> list[str]:
        """What runs, and its arguments."""
        return [*([str(HERE / self.driver)] if self.driver else []), *super().command(folder)]


@dataclass(frozen=True)
class Clone:
    """Which programs of a repository are run.

    Attributes:
        option: of the command, which takes the folder.
        origin: the repository, and the version that the outcomes are recorded of.
        below: the folder of the examples, in the clone.
        programs: file of this folder with a line for each run: architecture, program, arguments.
        driver: of each `Example`.
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
                yield Example(self.origin, program, " ".join(argument), arch, self.driver)

    def folder(self, clone: Path) -> Path:
        """That of the examples.

        Raises:
            ValueError: if ``clone`` is no clone of this repository.
        """
        folder = clone.resolve() / self.below
        if not folder.is_dir():
            needed = f"no folder {self.below} there: must be a clone of {self.origin}"
            raise ValueError(f"--{self.option} {clone}: {needed}")
        return folder


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
