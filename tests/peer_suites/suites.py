"""The test suites of other projects, and which of their tests are run: names and addresses alone are here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

HERE = Path(__file__).parent
SAMPLE = HERE / "sample.txt"


@dataclass(frozen=True)
class Suite:
    """A test suite, as it stands in a checkout.

    Attributes:
        name: in the sample, and of the folder that has the checkout.
        origin: the repository; ``commit``: of which the outcomes are recorded.
        root: folder of the checkout from which pytest runs, and which the paths of tests begin in.
        packages: import path -> folder of the checkout that it is; an empty path puts the folder itself on Python's
            path.
        environment: variables that the tests need.
        options: of ``cute-kernels emulate``.
    """

    name: str
    origin: str
    commit: str
    root: str
    packages: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()


#: Kernels read shared memory that nobody has written, behind the last row or key, and drop the results.
NO_READS_BEHIND_THE_LAST_ROW = ("--without", "uninitialised")

SUITES = (
    # Compiled kernels that quack would take from its cache hold no PTX; FlashAttention-4 is compiled by it too.
    Suite(
        "quack", "Dao-AILab/quack", "c8ec3170", ".", {"": "."},
        {"QUACK_CACHE_ENABLED": "0"}, NO_READS_BEHIND_THE_LAST_ROW,
    ),
    # flash_attn itself is the package of FlashAttention-2, which imports a library compiled for GPUs.
    Suite(
        "flash-attention", "Dao-AILab/flash-attention", "0251105a", "tests", {"flash_attn/cute": "flash_attn/cute"},
        {"QUACK_CACHE_ENABLED": "0"}, NO_READS_BEHIND_THE_LAST_ROW,
    ),
    Suite(
        "flashinfer", "flashinfer-ai/flashinfer", "fb28d724", ".", {"": "."}, options=NO_READS_BEHIND_THE_LAST_ROW,
    ),
    # Its Python package has a compiled module: the tests use the wheel of the same version, .ci/peers.txt.
    Suite("cudnn-frontend", "NVIDIA/cudnn-frontend", "3929da2e", "test/python"),
)  # fmt: skip


@dataclass(frozen=True)
class Sampled:
    """A test of the sample.

    Attributes:
        suite: name of its suite.
        arch: as for ``cute-kernels emulate``.
        test: its node id, from the suite's root.
        quick: one of the few that --quick runs.
    """

    suite: str
    arch: str
    test: str
    quick: bool = False

    @property
    def name(self) -> str:
        """Of the record."""
        return f"{self.suite} {self.arch} {self.test}"

    @property
    def session(self) -> tuple[str, str, str]:
        """Tests with the same suite, architecture and file run in one process."""
        return self.suite, self.arch, self.test.partition("::")[0]


def sample(path: Path | None = None) -> list[Sampled]:
    """The tests of a file, by default `SAMPLE`: on each line suite, architecture and node id; a star for --quick.

    Raises:
        ValueError: a line has something else, or a test occurs twice.
    """
    path = path or SAMPLE
    found: dict[str, Sampled] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        words = line.removeprefix("*").split(maxsplit=2)
        if len(words) != 3:
            raise ValueError(f"{path.name}:{number} = {line!r}: must be SUITE ARCHITECTURE TEST")
        each = Sampled(*words, quick=line.startswith("*"))
        if each.name in found:
            raise ValueError(f"{path.name}:{number} = {line!r}: must be there once")
        found[each.name] = each
    return list(found.values())


def sessions(tests: Iterable[Sampled]) -> Iterator[list[Sampled]]:
    """Tests in groups, each for a process."""
    for _, group in groupby(sorted(tests, key=lambda each: each.session), key=lambda each: each.session):
        yield list(group)
