"""How a launch is executed: schedule, detectors, limits."""

import contextlib
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.steps import Step

Choice = Literal["silicon", "exact"]
"""How tensor cores add."""
CHOICES: tuple[Choice, ...] = get_args(Choice)
Completion = Literal["eager", "lazy", "random"]
"""When asynchronous work takes effect."""
COMPLETIONS: tuple[Completion, ...] = get_args(Completion)
Interleave = Literal["round_robin", "random", "starve"]
"""Which warp runs next."""
INTERLEAVES: tuple[Interleave, ...] = get_args(Interleave)
ClusterOrder = Literal["in_turn", "random", "starve"]
"""Which cluster runs next."""
CLUSTERS: tuple[ClusterOrder, ...] = get_args(ClusterOrder)
Detector = Literal["races", "uninitialised", "registers", "exits", "tensor_lanes"]
DETECTORS: tuple[Detector, ...] = get_args(Detector)


class Debugger(Protocol):
    """Hears where warps are, in the thread that executes the launch."""

    def begins(self, scheduler: Any) -> None:
        """A cluster has been made, which a `launch.scheduler.Scheduler` is about to run."""

    def stops(self, warp: Any) -> None:
        """A `state.warp.Warp` is in front of a block that `Bytecode.stop_at` names."""


@dataclass(frozen=True)
class Options:
    """How to run.

    Attributes:
        seed: of everything that is drawn; the same seed gives the same schedule.
        completion: when asynchronous work takes effect: at once, as late as possible, or at random.
        interleave: which warp runs next: in turn until it waits, a random one for a random while, or ``"starve"``: at
            random, but one role (of all CTAs or of one) or one warp, drawn from the seed, runs only when nothing else
            can and no asynchronous work is pending. That shows signals that come in time by luck alone.
        spurious_try_wait_failures: try_wait sometimes reports a timeout although it could succeed, and
            clusterlaunchcontrol.try_cancel that no cluster is left although some wait, as on a B200 under load; the
            GPU launches those as usual.
        detectors: report faults whether or not results are wrong: all that `without` can leave out.
        without: detectors to leave out, of `DETECTORS`: ``"races"`` (races in all memories, missing fences and waits,
            phases of mbarriers that waits may miss, CTAs that exit while their memory is in use), ``"uninitialised"``
            (reads of shared and tensor memory that nobody has written), ``"registers"`` (of a wgmma in flight),
            ``"exits"`` (what is left over when a CTA exits: allocated tensor memory, copies that nobody waited for,
            mbarriers in the middle of a phase), ``"tensor_lanes"`` (tcgen05.ld and st that name lanes outside the
            quarter that their warp may access; left out, they access the lanes of their quarter with the same number
            modulo 32).
        strict: accept only patterns of synchronisation that the PTX ISA shows, where NVIDIA's kernels rely on more:
            tcgen05.fence is required next to release and acquire too; tcgen05.wait::ld before columns are written again
            whose values have been used; fence.proxy.async between generic accesses and a copy that overwrites them;
            bar.warp.sync between loads of several lanes and the arrival of one that hands the memory over. Before a CTA
            exits, it must have waited for each signal to one of its mbarriers, or for something ordered after it, and
            every phase that has begun must be complete.
        arithmetic: how tensor cores add products of floats: ``"silicon"`` as those of the architecture that the PTX is
            for (`cute_kernels.emulator.machine.units.matrix.arithmetic` says who measured it), ``"exact"`` with exact
            sums that are rounded once per instruction, to nearest even, as `cute_kernels.operations.reference` computes
            them.
        clusters: linear indices of the clusters to run; None for all.
        roles: name per warp index, for reports.
        barriers: (offset in shared memory, name) of mbarriers, for reports.
        max_warp_instructions: per cluster; a kernel that executes more is reported as a hang. None for no limit. The
            928,256 x 768 x 768 problem takes 79 million in all its clusters together.
        max_idle_blocks: basic blocks that each running warp of a cluster may execute without any effect (a store, a
            barrier, asynchronous work) before a hang is reported: such loops count while they wait in vain. (Loops
            that return to the same registers are recognised sooner.) A strong load (volatile, relaxed or acquire), or
            an atomic that changes nothing, counts as 250 blocks. None for no limit.
        interleave_clusters: which cluster runs next: in turn until it waits for another one, several at random, or
            ``"starve"``: one of the first, drawn from the seed, only when no other one can run.
        resident: clusters that run at the same time at most; None: as many as the chip holds (`launch.residents`).
        counters: count the work of every unit (`Report.units`), which takes longer.
        trace: file to write a timeline of the launch to (`cute_kernels.emulator.observe.trace`), also when it fails.
        processes: forked processes that execute the clusters of a launch at the same time, if the clusters turn out to
            be independent (`cute_kernels.emulator.machine.launch.clusters`). Results and reports are the same as with
            one process; `Report.one_process` says why a launch ran in one nevertheless.
        going_on: called with each report of a detector. If it returns True, execution goes on as if nothing were wrong;
            if False, the report is raised. None: all reports are raised. A race or an uninitialised read that the same
            instructions show again is not reported again.
        steps: turns of warps, and asynchronous work that takes effect, before the rest of the schedule. A step that is
            not possible when its turn comes is left out. Nothing else may be drawn at random then. Some hold warps.
        progress: called with (clusters done, clusters to run), first with 0; with several processes again with 0 where
            clusters that have been executed turn out to depend on each other.
        debugger: stops warps; kernels are then executed instruction by instruction, in the same order.
        stepped: called with every step that is taken, under any schedule, and its result in words.
    """

    seed: int = 0
    completion: Completion = "eager"
    interleave: Interleave = "round_robin"
    spurious_try_wait_failures: bool = False
    detectors: bool = True
    without: tuple[Detector, ...] = ()
    strict: bool = False
    arithmetic: Choice = "silicon"
    clusters: tuple[int, ...] | None = None
    roles: tuple[str, ...] = ()
    barriers: tuple[tuple[int, str], ...] = ()
    max_warp_instructions: int | None = 1_000_000_000
    max_idle_blocks: int | None = 5_000_000
    interleave_clusters: ClusterOrder = "in_turn"
    resident: int | None = None
    counters: bool = False
    trace: str | Path | None = None
    processes: int = 1
    going_on: Callable[[EmulatorError], bool] | None = None
    steps: tuple[Step, ...] = ()
    stepped: Callable[[Step, str], None] | None = None
    progress: Callable[[int, int], None] | None = None
    debugger: Debugger | None = None

    def __post_init__(self) -> None:
        for name, legal in (
            ("completion", COMPLETIONS), ("interleave", INTERLEAVES), ("interleave_clusters", CLUSTERS),
            ("arithmetic", CHOICES),
        ):  # fmt: skip
            if getattr(self, name) not in legal:
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be one of {', '.join(map(repr, legal))}")
        for name in ("spurious_try_wait_failures", "detectors", "strict", "counters"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} = {getattr(self, name)!r}: must be a bool")
        if not isinstance(self.without, (list, tuple)):
            raise TypeError(f"without = {self.without!r}: must be a tuple of names of detectors")
        for name in self.without:
            if name not in DETECTORS:
                raise ValueError(f"without = {name!r}: must be one of {', '.join(map(repr, DETECTORS))}")
        for name, least, or_none in (
            ("max_warp_instructions", 1, " or None"), ("max_idle_blocks", 1, " or None"), ("resident", 1, " or None"),
            ("processes", 1, ""), ("seed", 0, ""),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is None and or_none:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} = {value!r}: must be an int{or_none}")
            if value < least:
                raise ValueError(f"{name} = {value}: must be at least {least}")
        for name, kind, allowed in (("clusters", int, "None or a tuple of ints"), ("roles", str, "a tuple of str")):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (list, tuple)) and all(isinstance(n, kind) for n in value)):
                raise TypeError(f"{name} = {value!r}: must be {allowed}")
        named = isinstance(self.barriers, (list, tuple)) and all(
            isinstance(pair, (list, tuple)) and [type(item) for item in pair] == [int, str] for pair in self.barriers
        )
        if not named:
            raise TypeError(f"barriers = {self.barriers!r}: must be a tuple of pairs of an int and a str")
        if self.trace is not None and not isinstance(self.trace, (str, os.PathLike)):
            raise TypeError(f"trace = {self.trace!r}: must be the path of a file or None")
        for name, arguments in (("going_on", "an error"), ("progress", "two ints")):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise TypeError(f"{name} = {getattr(self, name)!r}: must be a function of {arguments} or None")
        if not isinstance(self.steps, tuple) or not all(isinstance(each, Step) for each in self.steps):
            raise TypeError(f"steps = {self.steps!r}: must be a tuple of Step")
        drawn = (self.completion, self.interleave, self.interleave_clusters, self.spurious_try_wait_failures)
        if self.steps and (drawn[0] == "random" or drawn[1:] != ("round_robin", "in_turn", False)):
            raise ValueError("steps are the whole schedule: only completion 'eager' or 'lazy' can be given besides")
        if self.clusters is not None and len(set(self.clusters)) != len(self.clusters):
            raise ValueError(f"clusters {self.clusters!r}: each may run once")

    def looks_for(self, detector: Detector) -> bool:
        """Whether a detector is on."""
        return self.detectors and detector not in self.without


_CURRENT: ContextVar[Options | None] = ContextVar("options of emulated operations", default=None)


@contextlib.contextmanager
def default_options(options: Options) -> Iterator[None]:
    """Within it, operations of this package with ``backend="emulator"`` run with these options.

    For example, ``with default_options(Options(arithmetic="exact")):`` gives them the bits of ``backend="reference"``.

    Raises:
        TypeError: no `Options`.
    """
    if not isinstance(options, Options):
        raise TypeError(f"options is a {type(options).__name__}: must be cute_kernels.emulator.Options")
    token = _CURRENT.set(options)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_options() -> Options:
    """The options of the innermost `default_options`, or the defaults."""
    return _CURRENT.get() or Options()
