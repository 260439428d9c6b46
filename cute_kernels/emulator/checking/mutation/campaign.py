"""The mutants of the kernels that a program launched."""

import bisect
import dataclasses
import hashlib
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_kernels.common.executors import Workers
from cute_kernels.emulator.checking.mutation import judge
from cute_kernels.emulator.checking.mutation.judge import Verdict
from cute_kernels.emulator.checking.mutation.mutants import Mutant, mutants_of_kernel
from cute_kernels.emulator.checking.mutation.target import SCHEDULES, RecordedTarget
from cute_kernels.emulator.programs.recorded import RecordedLaunch
from cute_kernels.emulator.races.launch_accesses import MAP_BYTES


@dataclass(frozen=True)
class Kernel:
    """A kernel of a program: its different ``launches``, and its mutants."""

    name: str
    launches: tuple[RecordedLaunch, ...]
    mutants: tuple[Mutant, ...]

    @property
    def ptx(self) -> str:
        """The unchanged text."""
        return self.launches[0].launch.ptx


def kernels(launches: Sequence[RecordedLaunch], most_launches: int | None = None) -> list[Kernel]:
    """The kernels of a program's launches, in the order of the first one of each. ``launches``: as `Recorder` has them.
    ``most_launches``: of each kernel, the first of those that can behave differently; None: all of them. These differ
    in grid, block, cluster, shared memory or parameters, in how many instructions they executed, or in integers that
    parameters point to. What they compute with, such as other numbers of a floating-point type, makes no such
    difference."""
    by_kernel: dict[tuple[str, str], dict[tuple, RecordedLaunch]] = {}
    for each in launches:
        launch = each.launch
        shape = (launch.grid, launch.block, launch.cluster, launch.dynamic_smem)
        behaviour = (*shape, each.warp_instructions, parameters_of(each))
        different = by_kernel.setdefault(each.kernel, {})
        # One that may overlap the launch before it shows more than an equal one that may not.
        if behaviour not in different or (different[behaviour].previous is None and each.previous is not None):
            different[behaviour] = each
    return [
        Kernel(name, tuple(different.values())[:most_launches], tuple(mutants_of_kernel(ptx, name)))
        for (ptx, name), different in by_kernel.items()
    ]


_MAP_WORDS = 64  # bytes of a tensor map that `cute_kernels.emulator.machine.units.copies.tensor_map` reads


_LARGEST_INTEGER = 1 << 25  # the bits of a float32 that is not 0 or smaller than 1e-37 are a larger one


def parameters_of(launch: RecordedLaunch) -> tuple:
    """The parameters, with size of the memory, place in it and integers there for an address: equal for equal work."""
    images = sorted(launch.memory, key=lambda image: image.address)
    starts = [image.address for image in images]

    def without_address(word: int) -> int | tuple[int, int, bytes]:
        at = bisect.bisect_right(starts, word) - 1
        if at < 0 or word >= images[at].span[1]:
            return word
        return images[at].content.nbytes, word - starts[at], _integers(images[at].content)

    parameters = []
    for parameter in launch.launch.params:
        if len(parameter) == MAP_BYTES:  # of a tensor map: what lies behind its words is whatever the host's stack held
            parameter = parameter[:_MAP_WORDS]
        whole = len(parameter) & ~7
        words = [without_address(word) for (word,) in struct.iter_unpack("<Q", parameter[:whole])]
        parameters.append((*words, parameter[whole:]))
    return tuple(parameters)


def _integers(content: np.ndarray) -> bytes:
    """Memory that holds sizes, offsets, indices or flags: a kernel may do other things where these are others."""
    words = np.pad(content, (0, -len(content) % 4)).view(np.int32)
    if not words.any() or words.min() <= -_LARGEST_INTEGER or words.max() >= _LARGEST_INTEGER:
        return b""
    return hashlib.blake2b(content, digest_size=16).digest()


class _Campaign:
    """State of one process for a kernel: target, schedules and limits."""

    def __init__(self, kernel: Kernel, options: dict[str, Any]) -> None:
        self.kernel, self.target = kernel, RecordedTarget(kernel.launches)
        self.schedules = {name: dataclasses.replace(each, **options) for name, each in SCHEDULES.items()}
        self.limits = judge.instruction_limits(self.target, self.schedules)

    def judge(self, number: int) -> Verdict:
        """Verdict on the mutant of this number."""
        mutant = self.kernel.mutants[number]
        return judge.judge(self.kernel.name, self.target, mutant, self.schedules, self.limits)


def judge_mutants(
    kernel: Kernel,
    numbers: Sequence[int],
    options: dict[str, Any],
    jobs: int = 1,
    done: Callable[[Verdict], None] = lambda verdict: None,
    executor: Executor | Callable[[], Executor] | None = None,
) -> list[Verdict]:
    """Verdicts on mutants of a kernel by their numbers. ``kernel``, ``numbers``: what is judged. ``options``: fields of
    `Options` for every run. ``jobs``: processes. ``done``: called with each verdict, in order. ``executor``: where
    mutants are judged instead, as for `Workers`; the verdicts are the same. Raises EmulatorError: the unchanged kernel
    is at fault under one of the schedules, or refused."""
    if not numbers:
        return []
    verdicts = []
    with Workers(_Campaign, (kernel, options), executor, min(jobs, len(numbers))) as workers:
        for verdict in workers.each(_Campaign.judge, [(number,) for number in numbers]):
            verdicts.append(verdict)
            done(verdict)
    return verdicts


def score(verdicts: Sequence[Verdict]) -> float:
    """Share of those killed among killed and survivors; 1 where there is none."""
    killed, survived = (sum(getattr(v, name) for v in verdicts) for name in ("killed", "survived"))
    return killed / (killed + survived) if killed + survived else 1.0
