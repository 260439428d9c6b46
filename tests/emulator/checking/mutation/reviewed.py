"""What has been said about mutants that survive: each a pattern, whether the mutant is equivalent, and why.

A mutant is equivalent if the PTX ISA allows no execution of it that the original does not have. Everything else that
survives is a gap of the emulator, and says which detector would have to see it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from cute_kernels.emulator.checking.mutation.judge import Verdict


@dataclass(frozen=True)
class Review:
    """A judgement on all mutants that match; shell patterns, ``*`` for any.

    Attributes:
        mutation, opcode: as in `Mutant`.
        place: as in `Verdict`; line numbers move, so patterns name functions.
        equivalent: no execution differs; otherwise a known gap.
        reason: why, or what is missing.
        target: name of the target.
        following: opcodes of the next two instructions that synchronise, where the place alone does not tell.
        but_not: patterns of "target: following" that are excluded.
    """

    mutation: str
    opcode: str
    place: str
    equivalent: bool
    reason: str
    target: str = "*"
    following: str = "*"
    but_not: tuple[str, ...] = ()

    def matches(self, verdict: Verdict) -> bool:
        pairs = (
            (self.mutation, verdict.mutation),
            (self.opcode, verdict.opcode),
            (self.place, verdict.place),
            (self.target, verdict.target),
            (self.following, verdict.following),
        )
        excluded = any(fnmatchcase(f"{verdict.target}: {verdict.following}", pattern) for pattern in self.but_not)
        return not excluded and all(fnmatchcase(value, pattern) for pattern, value in pairs)


_RELEASES_ANYWAY = (
    "the barrier behind it orders mbarrier.init too: barrier.cluster.arrive without .relaxed is itself a release at "
    "cluster scope, and bar.sync orders memory in a CTA without a cluster"
)
_NOTHING_BEFORE = (
    "the fence orders asynchronous tcgen05 operations of its thread that precede it (PTX ISA, tcgen05.fence), and here "
    "are none: tcgen05.alloc and .relinquish_alloc_permit are synchronous (PTX ISA, tcgen05 asynchronous operations)"
)
_LATER_FENCE = (
    "the fence orders asynchronous tcgen05 operations of its thread that follow it, and each of those here follows a "
    "later mbarrier wait with a fence of its own: for an empty accumulator in the MMA warp, for a full one elsewhere"
)
_FENCED_BEFORE = (
    "the fence orders asynchronous tcgen05 operations of its thread that precede it: an epilogue warp's loads precede "
    "the fence of release_accumulator, the MMAs precede a commit, which implies the fence (PTX ISA, canonical patterns)"
)
_ONLY_SYNCHRONOUS = (
    "the fence orders asynchronous tcgen05 operations that follow it, and only tcgen05.dealloc does, a synchronous one"
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
_ACCUMULATOR = (
    "an epilogue's wait for an accumulator, which lies in tensor memory, and the tcgen05.fence after the wait orders "
    "the loads of it that follow; nothing else is shared"
)
_COLLECTIVE = (
    "the lanes only read tensor memory before, by tcgen05.ld and tcgen05.wait::ld, which a warp executes as one: when "
    "the elected lane has passed the wait, the load of all lanes is complete, and its own tcgen05.fence orders it"
)
_ALONE = "a CTA that is launched without a cluster is the whole of its own: both scopes have the same threads"

REVIEWS: tuple[Review, ...] = (
    Review("drop", "fence.mbarrier_init.*", "*", True, _RELEASES_ANYWAY, but_not=("gemm-sm90-*",)),
    Review(
        "drop",
        "tcgen05.relinquish_alloc_permit*",
        "*",
        True,
        "only tells the multiprocessor that this CTA allocates no more; it holds all columns, or runs alone",
    ),
    Review(
        "drop",
        "griddepcontrol.launch_dependents",
        "*",
        True,
        "lets dependents start earlier, which the PTX ISA does not promise; the end of the kernel lets them start too",
    ),
    Review("drop", "tcgen05.fence::before_thread_sync", "sm100/cta_pair.py* (begin)*", True, _NOTHING_BEFORE),
    Review("drop", "tcgen05.fence::after_thread_sync", "sm100/cta_pair.py* (begin)*", True, _LATER_FENCE),
    Review("drop", "tcgen05.fence::before_thread_sync", "sm100/cta_pair.py* (end)*", True, _FENCED_BEFORE),
    Review("drop", "tcgen05.fence::after_thread_sync", "sm100/cta_pair.py* (end)*", True, _ONLY_SYNCHRONOUS),
    *(
        Review("drop", "tcgen05.wait::ld*", "sm100/*", True, _LATER_WAIT, following=following)
        for following in ("tcgen05.wait::ld*", "fence.proxy.async*", "cp.async.bulk.wait_group*")
    ),
    *(
        Review(
            "relaxed", "mbarrier.try_wait*", "*", True, _ACCUMULATOR,
            following=f"tcgen05.fence::after_thread_sync {then}",
        )
        for then in ("tcgen05.wait::ld*", "cp.async.bulk.wait_group.read")
    ),
    Review(
        "drop", "tcgen05.fence::before_thread_sync", "", True,
        "the fence orders asynchronous tcgen05 operations of its thread, and the only one before it is a load, which "
        "tcgen05.wait::ld has completed; tcgen05.dealloc behind it is synchronous",
        target="block-scaled",
    ),
    # Not what an election follows, nor a wait for an empty accumulator: those are the first waits of the MMA warp, to
    # which a compiler gives the place of the drain.
    Review(
        "relaxed", "mbarrier.try_wait*", "pipes.py* (_wait) in * ([GLRS]*oad.run)", True, _NOTHING_FOLLOWS,
        following="[!e]*", but_not=("sm100-on-chip-one-cta: mbarrier.try_wait.parity.relaxed*",),
    ),
    # The drain of two stages, unrolled, of which the compiler gives the second another place.
    Review(
        "relaxed", "mbarrier.try_wait*", "pipes.py* (allocate) in strips.py* (StripLoad.run)", True, _NOTHING_FOLLOWS,
        target="images-sm90-split", following="[!e]*",
    ),
    *(
        Review(
            "drop",
            "mbarrier.try_wait*",
            "pipes.py* (_wait) in * ([GLRS]*oad.*)",
            True,
            "the drain of a CTA without a cluster: only its own warps arrive, and shared memory outlives them",
            following=following,
            target=target,
        )
        for target, following in (("sm90-one-cta", "*"),)
    ),
    Review(
        "drop",
        "mbarrier.try_wait*",
        "pipes.py* (_wait) in * ([GLRS]*oad.*)",
        True,
        "no other CTA shares this one's operands: only its own warps arrive, and shared memory outlives them",
        target="gemm-sm90-split",
    ),
    Review(
        "cluster->cta",
        "mbarrier.try_wait.parity.acquire*",
        "*",
        False,
        "st.async of another CTA releases its bytes at cluster scope; of what scope the acquire is, is not asked for, "
        "as with TMA, which kernels in the field acquire at CTA scope whichever CTA issued it",
        target="gemm-sm90-split",
    ),
    Review("cluster->cta", "mbarrier.try_wait*", "sm90/gemm_mma.py* (*drain)*", True, _NOTHING_FOLLOWS),
    *(
        Review("cluster->cta", opcode, "*", True, _ALONE, target=target)
        for opcode in ("mbarrier.try_wait*", "mbarrier.arrive*")
        for target in ("images-sm100-one-cta", "sm100-on-chip-one-cta", "sm100-one-cta")
    ),
    Review(
        "drop",
        "bar.warp.sync",
        "sm90/gemm_mma.py* (*release)*",
        True,
        "the store of the tile's last buffer, after the last sums were read, has synchronised the warp already",
    ),
    Review(
        "relaxed",
        "mbarrier.arrive.expect_tx*",
        "*",
        True,
        "the arriving thread has written nothing that others read; the bytes are released by TMA's complete_tx",
    ),
    Review(
        "relaxed",
        "barrier.cluster.arrive*",
        "pipes.py* (begin)*",
        True,
        "fence.mbarrier_init in front of it is the release; mbarriers are all that the CTAs hand each other here",
    ),
    Review(
        "drop",
        "bar.sync",
        "sm90/transposed.py* (*_await_order)",
        True,
        "turns spread the load on the tensor cores over time; stages and accumulators are guarded by other barriers",
    ),
    Review("drop", "wgmma.fence*", "*sm90/* (*run)", True, _WGMMA_FENCE),
    Review("drop", "wgmma.fence*", "*sm90/* (*_stage)", True, _WGMMA_FENCE),
    Review("drop", "wgmma.fence*", "*sm90/* (*_pass_turn)", True, _WGMMA_FENCE),
    Review("drop", "wgmma.fence*", "*sm90/* (*_hand_over)", True, _WGMMA_FENCE),
    Review("drop", "wgmma.fence*", "*sm90/* (*fetch)", True, _WGMMA_FENCE),
    Review("drop", "wgmma.fence*", "*sm90/* (*_number)", True, _WGMMA_FENCE),
    Review(
        "drop",
        "cp.async.bulk.commit_group",
        "tma.py* (WarpStaging.commit)*",
        True,
        "the next commit of the tile takes the store into its own group, and before buffers of a residual are filled "
        "again all groups are waited for",
        target="gemm-sm90-int8",
        following="mbarrier.try_wait.parity.shared.b64 fence.proxy.async.shared::cta",
    ),
    Review("drop", "bar.warp.sync", "sm100/cta_pair.py* (*release_accumulator)*", True, _COLLECTIVE),
    Review(
        "drop",
        "bar.warp.sync",
        "sm100/transposed.py* (fill_tensor_memory)*",
        True,
        "the lanes only write tensor memory before, by tcgen05.st and tcgen05.wait::st, which a warp executes as one: "
        "when the elected lane has passed the wait, the stores of all lanes are complete, and its own tcgen05.fence "
        "orders them",
    ),
    Review(
        "drop",
        "bar.warp.sync",
        "sm100/transposed.py* (*acquire)*",
        True,
        "the warp writes to the buffer after release_accumulator, whose bar.warp.sync lies in between too: one load of "
        "tensor memory fills the buffer, and it is the last of its accumulator",
        following="tcgen05.wait::ld* tcgen05.fence::before_thread_sync",
    ),
)


def review_of(verdict: Verdict, reviews: Iterable[Review] = REVIEWS) -> Review | None:
    return next((review for review in reviews if review.matches(verdict)), None)
