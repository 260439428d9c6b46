"""The kinds of faults: one sentence on each, and one on its usual cause and how it is mended.

Where a sentence is empty the emulator's message is one. Sentences have fields: ``later`` and ``earlier`` are the two
operations with their article, ``operation`` is the later one without, ``reads`` and ``read`` are their verbs ("reads"
or "writes", "read" or "wrote"), ``space`` is the memory, ``barrier`` the name of an mbarrier.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    name: str  # as reports, ``--suppress`` and the schema have it
    sentence: str = ""  # see the module
    help: str = ""  # usual cause and mend, one sentence; "" where nothing can be said
    detector: bool = False  # a detector reports it, and execution could go on


_RACES = (
    Kind("proxy-fence", "{later} {reads} {space} memory that was written through the generic proxy, with no "
         "fence.proxy.async in between",
         'each writing thread calls cute.arch.fence_proxy("async.shared", space="cta") between its last write and the '
         "barrier before the {operation}; for global memory the fence is fence.proxy.async.global", detector=True),
    Kind("proxy-reuse", "{later} {reads} {space} memory that was accessed through the generic proxy, with no "
         "fence.proxy.async in between",
         'each reading thread calls cute.arch.fence_proxy("async.shared", space="cta") between its last access and the '
         "arrival that releases the stage: an arrival does not wait for loads", detector=True),
    Kind("unfinished-copy", "{later} {reads} {space} memory that {earlier} may not have written yet",
         "wait for the mbarrier that the copy signals, with its parity (0 in the ring's first turn); mbarrier_wait "
         "repeats try_wait until the phase is complete; a single try_wait may time out", detector=True),
    Kind("stage-in-use", "{later} {reads} {space} memory that {earlier} may still be using",
         "before the producer refills a stage, it waits for the mbarrier on which every consumer (of each CTA that a "
         "multicast fills) arrives after its last access to the stage; in the ring's first turn the stage is empty, "
         "and the parity is 1", detector=True),
    Kind("copy-in-flight", "{later} {reads} {space} memory that {earlier} may still be writing",
         "the threads that copied call cp_async_wait_group(N), and then a barrier with all threads that read; N is at "
         "most the number of groups committed after the one that is read: with a larger N the copy may still be under "
         "way", detector=True),
    Kind("source-in-use", "{later} {reads} {space} memory that {earlier} may still be reading",
         "the issuing thread waits for the operation (cp_async_bulk_wait_group(0, read=True) after its commit, "
         "wgmma.wait_group, or the mbarrier of its tcgen05.commit); then a barrier tells the threads that write",
         detector=True),
    Kind("lanes-race", "{later} {reads} {space} memory that {earlier} by another lane of the same warp {read}, with no "
         "bar.warp.sync in between", "cute.arch.sync_warp() between the two: lanes of a warp do not run in lockstep",
         detector=True),
    Kind("weak-order", "{later} {reads} {space} memory that {earlier} {read}, and the synchronisation between them is "
         "relaxed, or of too narrow a scope",
         "arrive with .release and wait with .acquire, at scope .cluster between CTAs of a cluster and .gpu between "
         "clusters", detector=True),
    Kind("launch-overlap", "{later} {reads} global memory that the launch before {read}, which may still be running",
         "call cute.arch.griddepcontrol_wait() before the first access to what the launch before {read}, or launch "
         "without use_pdl", detector=True),
    Kind("shared-race", "{later} {reads} shared memory that {earlier} {read}, and nothing orders the two",
         "a barrier of both sides between the accesses: sync_threads, a named barrier that both take part in, or an "
         "mbarrier on which the first arrives and the second waits; or one of the two is meant for another stage",
         detector=True),
    Kind("global-race", "{later} {reads} global memory that {earlier} {read}, and nothing orders the two",
         "let only one side access the place, use atomics on both sides, or pass a flag: store or red with .release "
         "after the first access, load with .acquire before the second, at scope .gpu between clusters; before a "
         "tensor map is changed, wait for loads through it (their mbarriers) and stores (cp_async_bulk_wait_group)",
         detector=True),
    Kind("streams", "",
         "order the streams: stream.wait_stream(other), an event that one records and the other waits for, or "
         "synchronize(); a launch that names no stream is in the default stream, for which torch's other streams do "
         "not wait", detector=True),
    Kind("non-coherent-load", "a non-coherent load reads global memory that {earlier} of the same kernel {read}",
         "load by ld.global without .nc: in the source, drop the promise that nobody writes (const __restrict__, a "
         "read-only cache modifier)", detector=True),
    Kind("tensor-race", "{later} {reads} tensor memory that {earlier} {read}, and may not be complete",
         "after tcgen05.mma: tcgen05.commit and a wait for its mbarrier; after tcgen05.ld and .st: tcgen05.wait::ld, "
         "::st; then a barrier between the two sides, with tcgen05.fence on both if it is relaxed", detector=True),
    Kind("race", help="a barrier of both sides between the accesses", detector=True),
)  # fmt: skip

_BARRIERS = (
    Kind("extra-bytes", "more bytes arrive at {barrier} than expect_tx announced for its phase",
         "mbarrier_arrive_and_expect_tx takes the bytes of all copies of the phase: elements of the box times their "
         "size, for every operand and every CTA of a multicast; one arrival per phase announces them"),
    Kind("extra-arrivals", "more arrivals at {barrier} than its phase expects",
         "the count of mbarrier_init is the number of arrivals per phase: threads, if each arrives, or 1 per warp with "
         "elect_one; arrive_and_expect_tx is an arrival too"),
    Kind("phase-missed", "a wait for {barrier} has missed its phase: two phases have completed since it began",
         "the barrier completes too often: compare the count of its mbarrier_init with the number of threads that "
         "arrive in each phase"),
    Kind("phase-overrun", "{barrier} may complete another phase before a warp has seen the one that it waits for",
         "every second phase has the same parity: before a thread arrives for the next phase, it must know that the "
         "wait for this one is over, as a consumer's arrival at the empty barrier tells the producer", detector=True),
    Kind("phase-ambiguous", "a wait by parity for a phase of {barrier} may come before the phase before it is "
         "complete, and then passes at once",
         "a thread waits for the phases of a barrier one after the other, or another barrier tells it that the earlier "
         "one is over", detector=True),
    Kind("arrival-early", "an arrival at {barrier} may be counted in the phase before the one that it is meant for",
         "before a thread arrives, it must know that the phase before is complete: it waits for that phase, or for a "
         "barrier at which the threads of that phase arrive later; or arrivals alternate between two barriers",
         detector=True),
    Kind("bytes-early", "bytes at {barrier} may be counted in the phase before the one that they are meant for",
         "the thread that announces bytes, or issues the copy, first waits for the phase before, as a producer waits "
         "for the empty barrier of its stage", detector=True),
    Kind("announced-late", "bytes that {barrier} awaits are announced when its phase may be complete already",
         "mbarrier_arrive_and_expect_tx announces and arrives at once; a separate expect_tx comes before an arrival in "
         "the phase: of the same thread, or of one that a barrier orders after it", detector=True),
    Kind("lanes-overtaken", "{barrier} may complete another phase before some lanes of a warp have seen the one that "
         "they wait for, because another lane of the warp goes on without them",
         "all lanes meet after the wait, before one lane acts for all: cute.arch.sync_warp(), or elect_one after the "
         "wait; or only the elected lane waits", detector=True),
    Kind("inval-order", "{barrier} is invalidated, or initialised again, while another thread may still use it",
         "a barrier of all threads that use it (sync_threads) before mbarrier.inval, and another one before "
         "mbarrier_init by another thread", detector=True),
    Kind("allocation-order", "tensor memory may be used before it is allocated, or its allocations may come in another "
         "order", "a barrier between tcgen05.alloc and the threads that read the address that it stores, and between "
         "the allocations and deallocations of several warps", detector=True),
    Kind("phase-at-exit", "the kernel ends in the middle of a phase of {barrier}",
         "some arrivals or bytes of the last phase are missing, or one phase too many has begun: the producer's and "
         "the consumer's loop must make the same number of trips", detector=True),
    Kind("uninitialised-barrier", "{barrier} is used, and is not initialised",
         "one thread calls mbarrier_init before any other use, and a barrier follows; is it the right address?"),
    Kind("barrier-init-order", "a thread uses {barrier}, and nothing orders that after its initialisation",
         "after mbarrier_init: mbarrier_init_fence(), and then sync_threads, or in a cluster cluster_arrive_relaxed "
         "and cluster_wait", detector=True),
    Kind("barrier-initialised-twice", "mbarrier.init of {barrier}, which is live",
         "one thread of the CTA initialises each barrier, once; mbarrier.inval before another one in its memory"),
    Kind("barrier-init-lanes", "several lanes initialise {barrier}, which is valid after the first",
         "cute.arch.mbarrier_init is executed by every lane that reaches it: let one thread of the CTA do it",
         detector=True),
    Kind("barrier-count", "", "counts are 1 to 2^20 - 1: arrivals of a phase, and bytes of a phase"),
    Kind("barrier-threads", "",
         "all warps that take part in a named barrier give the same number of threads, a multiple of 32: arriving and "
         "waiting threads together"),
    Kind("cluster-barrier", "", "cluster_arrive and cluster_wait alternate in every thread of the cluster"),
    Kind("divergence", "",
         "all lanes that the mask names must execute the instruction together: move it out of the branch, or call "
         "cute.arch.sync_warp() before it"),
    Kind("barrier-misuse"),
)  # fmt: skip

_ACCESSES = (
    Kind("out-of-bounds", "",
         "compare the index with the shape of the tensor: tiles at the border need a predicate, and strides count "
         "elements, not bytes"),
    Kind("freed-memory", "",
         "keep a reference to the tensor until its last launch is over: a kernel's arguments and a CUDA graph hold "
         "addresses, and do not keep tensors alive; a tensor made inside a graph lives in the graph's pool until the "
         "graph or the tensor is gone"),
    Kind("host-memory", "", "give the kernel a 'cuda' tensor, e.g. tensor.cuda()"),
    Kind("offset-overflow", "",
         "a 32-bit offset overflowed: the address is wrong by a multiple of 2^32 bytes. Compute the offset in 64 bits: "
         "cutlass.Int64 coordinates (CuTe DSL multiplies an Int32 coordinate by a static stride in 32 bits)"),
    Kind("read-only", "", "the memory is a constant of the module, or was passed as read-only"),
    Kind("misaligned", "",
         "an access of n bytes needs an address that is a multiple of n: assumed_align of from_dlpack and the "
         "alignment of alloc_smem are promises, and vector copies need the whole width"),
    Kind("uninitialised-read", "",
         "nobody has written these bytes yet: a wait or a barrier is missing, or a copy has not been issued or has the "
         "wrong size or stage, or a border of the tile is never filled", detector=True),
    Kind("barrier-memory", "",
         "only mbarrier instructions may access an mbarrier: buffer and barrier overlap, or an index is beyond the "
         "buffer's end", detector=True),
    Kind("exit-in-use", "",
         "before a CTA exits it waits for everything that accesses its shared memory: the thread that stored calls "
         "cp_async_bulk_wait_group(0, read=True); a cluster needs a cluster barrier, or waits for what others signal",
         detector=True),
    Kind("cta-not-begun", "",
         "no CTA may access the shared memory of another before that CTA has begun: cluster_arrive_relaxed and "
         "cluster_wait at the start", detector=True),
    Kind("other-cta", "",
         "only .shared::cluster instructions may use an address from mapa: .shared and .shared::cta mean the CTA's own "
         "memory", detector=True),
    Kind("exited-cta", "",
         "no CTA may exit while another one accesses its shared memory: cluster_arrive and cluster_wait at the end"),
    Kind("tensor-memory-leak", "",
         "the warp that called tcgen05.alloc calls tcgen05.dealloc, after a barrier that follows the last access",
         detector=True),
    Kind("tensor-memory-place", "",
         "a warp may access 32 lanes, from 32 * (warp index % 4) on, of columns that are allocated"),
    Kind("register-in-flight", "",
         "wgmma.fence before the first wgmma, and wgmma.wait_group before a register of a wgmma is used; "
         "tcgen05.wait::ld before a register of a tcgen05.ld is used"),
    Kind("illegal-access"),
)  # fmt: skip

_OTHERS = (
    Kind("hang", "",
         "nobody completes a barrier: an arrival is missing, its count is too high, or a wait has the wrong "
         "parity (a consumer's first wait on a full barrier has parity 0, a producer's first wait on an empty ring "
         "parity 1)"),
    Kind("transaction-bytes", "",
         "expect_tx announces other bytes than the copies bring: tx_count, or the number given to "
         "mbarrier_arrive_and_expect_tx, is the bytes of all copies of a phase, elements of the box times their size; "
         "every copy names the barrier of its stage"),
    Kind("first-parity", "",
         "a producer's first wait on an empty ring has parity 1: the phase before the first one counts as complete"),
    Kind("registers", "",
         "all warps of a CTA together cannot have more registers than it begins with: setmaxnreg.inc waits until other "
         "warps have executed setmaxnreg.dec; a warp's count is of each of its 32 threads"),
    Kind("tensor-columns", "",
         "tcgen05.alloc waits until the columns are free: a multiprocessor has 512 for all its CTAs. The warps that "
         "hold them deallocate them later than the others need them, or never"),
    Kind("livelock", "", "a loop polls: what it waits for never happens, or is only read before the loop"),
    Kind("limit", "",
         "raise --max-warp-instructions or --max-idle-blocks if the kernel needs so long; else it waits for something "
         "that nobody does"),
    Kind("trap", "", "the kernel's own check failed: the source line has its condition"),
    Kind("unsupported", "",
         "python -m cute_kernels.emulator lists what is implemented, docs/emulator/contract.md what is refused"),
    Kind("different-result", "",
         "the result may depend on the order of atomic additions; if both results are right: --results-may-differ"),
    Kind("surviving-mutant", "",
         "the instruction is unnecessary, or the program's launches do not need it, or the emulator cannot see its "
         "absence (docs/emulator/contract.md)"),
    Kind("fault"),
)  # fmt: skip

KINDS = {kind.name: kind for kind in (*_RACES, *_BARRIERS, *_ACCESSES, *_OTHERS)}
"""All kinds, by name."""


def kind(name: str) -> Kind:
    """The kind of a name; one without a sentence for a name that is not in the table."""
    return KINDS.get(name) or Kind(name)
