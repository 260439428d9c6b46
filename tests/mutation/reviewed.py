"""What has been said about mutants that survive: each a pattern, whether the mutant is equivalent, and why.

A mutant is equivalent if the PTX ISA allows no execution of it that the original does not have. Everything else that
survives is a gap of the emulator, and says which detector would have to see it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.mutation.judge import Verdict


@dataclass(frozen=True)
class Review:
    """A judgement on all mutants that match; shell patterns, ``*`` for any.

    Attributes:
        mutation, opcode: as in `Mutant`.
        place: as in `Verdict`; line numbers move, so patterns name functions.
        equivalent: no execution differs; otherwise a known gap.
        reason: why, or what is missing.
        target: name of the target.
    """

    mutation: str
    opcode: str
    place: str
    equivalent: bool
    reason: str
    target: str = "*"

    def matches(self, verdict: Verdict) -> bool:
        pairs = (
            (self.mutation, verdict.mutation),
            (self.opcode, verdict.opcode),
            (self.place, verdict.place),
            (self.target, verdict.target),
        )
        return all(fnmatchcase(value, pattern) for pattern, value in pairs)


_RELEASES_ANYWAY = (
    "barrier.cluster.arrive without .relaxed is itself a release at cluster scope, which orders mbarrier.init"
)
_ONE_LAUNCH = (
    "the emulator runs one launch at a time, so that nothing of the kernel before can come too late; would need two "
    "launches that overlap"
)
_TENSOR_ORDER = (
    "the PTX ISA's pattern has a tcgen05.fence on both sides of a synchronisation between threads; the emulator "
    "accepts release and acquire without, because NVIDIA's own kernels omit it there"
)
_ONLY_ASYNCHRONOUS = (
    "the waiting thread touches no memory itself but issues asynchronous work, and the phase that it waits for is over "
    "when the wait answers: the emulator takes that as order; the memory model gives none without an acquire"
)
_DRAIN = (
    "waits of the drain whose signals come from the threads of a later signal that the CTA does wait for (the drain's "
    "last; on SM100 the commit of the last accumulator): the emulator takes the later one as proof of those before, "
    "the PTX ISA promises no such order of commits, nor of arrivals at .cta scope from another CTA"
)
_NOTHING_FOLLOWS = (
    "waits of the drain: the thread has seen the arrivals at this mbarrier with either semantics, and neither accesses "
    "memory nor issues anything before it exits or meets the barrier at the end, whose other threads acquire themselves"
)
_LATER_WAIT = (
    "not the last of its accumulator: what uses the loaded registers is ordered after the load by that dependency, and "
    "the tcgen05.wait::ld of the last columns, which precedes the arrival on accumulator_empty, covers all loads before"
)
_WGMMA_FENCE = (
    "not the first of its tile: no register of a wgmma is accessed by other instructions since the one before, and "
    "accumulators of equal shape need no fence between wgmmas"
)
_COLLECTIVE = (
    "the warp-wide instruction that follows ({}) makes the lanes wait for each other as well, and what is ordered is a "
    "read before a write, which needs time order and no visibility"
)

REVIEWS: tuple[Review, ...] = (
    Review("drop", "fence.mbarrier_init.*", "*", True, _RELEASES_ANYWAY),
    Review(
        "drop",
        "tcgen05.relinquish_alloc_permit*",
        "*",
        True,
        "only tells the multiprocessor that this CTA allocates no more; it holds all columns, or runs alone",
    ),
    Review("drop", "griddepcontrol.wait", "*", False, _ONE_LAUNCH),
    Review(
        "drop",
        "griddepcontrol.launch_dependents",
        "*",
        True,
        "the end of the kernel implies it: without it dependents start later",
    ),
    Review("drop", "tcgen05.fence::*", "*", False, _TENSOR_ORDER),
    Review("drop", "tcgen05.wait::ld*", "sm100/epilogue.py* (_drain)*", True, _LATER_WAIT),
    Review("drop", "tcgen05.wait::ld*", "sm100/dense_epilogue.py* (run)*", True, _LATER_WAIT),
    Review(
        "relaxed",
        "mbarrier.try_wait*",
        "pipes.py* in sm100/*epilogue.py*",
        True,
        "the accumulator lies in tensor memory, which the tcgen05.fence after the wait orders; nothing else is shared",
    ),
    Review("relaxed", "mbarrier.try_wait*", "pipes.py* (_wait) in *load.py* (run)", True, _NOTHING_FOLLOWS),
    Review("relaxed", "mbarrier.try_wait*", "pipes.py* (_wait) in *", False, _ONLY_ASYNCHRONOUS),
    Review(
        "drop",
        "mbarrier.try_wait*",
        "pipes.py* (_wait) in *load.py*",
        True,
        "the drain of a CTA without a cluster: only its own warps arrive, and shared memory outlives them",
        target="sm90-one-cta",
    ),
    Review(
        "relaxed",
        "mbarrier.arrive.expect_tx*",
        "*",
        True,
        "the arriving thread has written nothing that others read; the bytes are released by TMA's complete_tx",
    ),
    Review("drop", "mbarrier.try_wait*", "pipes.py* (_wait) in *load.py*", False, _DRAIN),
    Review(
        "relaxed",
        "mbarrier.arrive.shared*",
        "sm90/pipes.py* (arrive_empty)*",
        False,
        "only wgmma's reads of a stage are handed on, and TMA's writes follow: the emulator takes any arrival as order "
        "between asynchronous operations. Between CTAs the original arrives at .cta scope, as CUTLASS does",
    ),
    Review(
        "cluster->cta",
        "mbarrier.*",
        "*",
        False,
        "relaxed synchronisation passes time order on, whatever its scope; with a scope that leaves the other CTA out "
        "the barrier itself is raced for, which should be reported",
    ),
    Review(
        "relaxed",
        "barrier.cluster.arrive*",
        "sm90/frame.py* (begin)*",
        True,
        "fence.mbarrier_init in front of it is the release; mbarriers are all that the CTAs hand each other here",
    ),
    Review(
        "drop",
        "bar.sync",
        "sm90/mma.py* (_await_turn)",
        True,
        "turns spread the load on the tensor cores over time; stages and accumulators are guarded by other barriers",
    ),
    Review("drop", "wgmma.fence*", "*sm90/*mma.py* (run)", True, _WGMMA_FENCE),
    Review("drop", "wgmma.fence*", "*sm90/*mma.py* (_stage)", True, _WGMMA_FENCE),
    Review("drop", "wgmma.fence*", "*sm90/*mma.py* (_pass_turn)", True, _WGMMA_FENCE),
    Review(
        "drop",
        "bar.warp.sync",
        "staging.py* (acquire)*",
        True,
        _COLLECTIVE.format("tcgen05.ld.sync, stmatrix.sync where elements have 16 bits"),
    ),
    Review(
        "drop",
        "bar.warp.sync",
        "staging.py* (store)*",
        False,
        "elect.sync, which follows, makes the lanes wait for each other, but the PTX ISA does not say that it orders "
        "memory as bar.warp.sync does; the emulator takes any warp-wide wait as order",
    ),
    Review("drop", "bar.warp.sync", "sm100/pipes.py* (release_accumulator)*", True, _COLLECTIVE.format("elect.sync")),
    Review(
        "relaxed",
        "barrier.cluster.arrive*",
        "sm100/frame.py* (end)*",
        True,
        "only tensor memory is given up, which the tcgen05.fence before it orders",
    ),
)


def review_of(verdict: Verdict, reviews: Iterable[Review] = REVIEWS) -> Review | None:
    return next((review for review in reviews if review.matches(verdict)), None)
