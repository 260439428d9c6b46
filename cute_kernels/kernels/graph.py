"""The producer -> consumer graph of a warp-specialised kernel, as data.

Roles and edges are declared once; the arrival count of every mbarrier follows from who signals it, so that no call site
ever states a count. `cute_kernels.kernels.pipes` turns a graph into barriers on the device, and `Graph.describe` prints
the picture that explains a hang.
"""

import pkgutil
from dataclasses import dataclass, replace
from enum import Enum

from cute_kernels.plan import Plan
from cute_kernels.plan.gemm_sm90 import Sm90GemmPlan
from cute_kernels.plan.gemm_sm100 import Sm100GemmPlan
from cute_kernels.plan.patch_embed_sm100 import Sm100PatchEmbedPlan
from cute_kernels.plan.shared_operands import WgmmaPair
from cute_kernels.plan.sm90_transposed import TransposedPlan
from cute_kernels.plan.sm100_transposed import Sm100TransposedPlan

Sm100Plan = Sm100PatchEmbedPlan | Sm100GemmPlan | Sm100TransposedPlan


class Signal(Enum):
    """Who arrives on a barrier, and hence how many arrivals complete its phase."""

    TMA_BYTES = "one elected thread announces the bytes of a stage; TMA delivers them"
    TCGEN05_COMMIT = "one tcgen05.commit, multicast to every CTA of the pair"
    SHARED_COMMIT = "one tcgen05.commit of every pair that reads what a CTA loads, multicast to all that load for it"
    WARP_ARRIVE = "one elected lane of every warp of the role, in every CTA of the pair, at the leader CTA"
    OWNER_ARRIVE = "one thread of the warpgroup whose tile it is, in every CTA of the cluster, at every CTA"
    WARP_WRITES = "one lane of every warp of the role, in its own CTA, behind its writes and their proxy fence"
    WARP_READS = "one lane of every warp of the role, in every CTA of the cluster, at every CTA"
    WARPGROUP_ARRIVE = "one thread of every warpgroup of the role, in every CTA of the cluster, at every CTA"
    REMOTE_STORES = "one lane of the receiving warp announces the bytes of its buffer; st.async of other CTAs delivers"
    READER_ARRIVE = "one lane of the warp that has read a buffer, at the CTA that filled it"


ANNOUNCED = (Signal.TMA_BYTES, Signal.REMOTE_STORES)
"""Signals that deliver a number of bytes."""


@dataclass(frozen=True)
class Role:
    """Consecutive warps of a CTA that run one program."""

    name: str
    first_warp: int
    warps: int


@dataclass(frozen=True)
class Edge:
    """A circular buffer between two roles, guarded by ``<name>_full`` and ``<name>_empty`` barriers per stage.

    Attributes:
        name: what is handed over.
        producer, consumer: role names.
        stages: buffers in the ring.
        full, empty: how the producer and the consumer signal; ``empty`` is None where the stages are filled once and
            never taken back, or by their consumer.
        tx_bytes: bytes delivered per stage to one full barrier (0 unless ``full`` is one of `ANNOUNCED`).
        parts: pieces of a stage that are handed over one by one, each with its own two barriers.
        ctas: CTAs that signal each other about its stages; 0: those of the graph.
    """

    name: str
    producer: str
    consumer: str
    stages: int
    full: Signal
    empty: Signal | None
    tx_bytes: int = 0
    parts: int = 1
    ctas: int = 0


@dataclass(frozen=True)
class Barrier:
    """One mbarrier array of a CTA: name, first 8-byte slot, stages, arrivals that complete a phase."""

    name: str
    slot: int
    stages: int
    arrivals: int


@dataclass(frozen=True)
class NamedBarrier:
    """A hardware barrier of a CTA (``bar``): identifier and the threads that take part."""

    name: str
    identifier: int
    threads: int


@dataclass(frozen=True)
class Graph:
    """Roles and edges of one kernel; ``ctas``: CTAs whose threads signal each other's barriers; ``named_barriers``:
    hardware barriers of a CTA; ``sharing_pairs``: pairs of CTAs that read what one CTA loads."""

    roles: tuple[Role, ...]
    edges: tuple[Edge, ...]
    ctas: int
    named_barriers: tuple[NamedBarrier, ...] = ()
    sharing_pairs: int = 1

    def role(self, name: str) -> Role:
        return next(role for role in self.roles if role.name == name)

    def named_barrier(self, name: str) -> int:
        """Identifier of a hardware barrier."""
        return next(barrier.identifier for barrier in self.named_barriers if barrier.name == name)

    def arrivals(self, edge: Edge, signal: Signal, by: str) -> int:
        """Arrivals that complete a phase when role ``by`` signals with ``signal``."""
        if (signal in ANNOUNCED) != (edge.tx_bytes > 0) and signal is edge.full:
            raise ValueError(f"edge {edge.name!r}: tx_bytes = {edge.tx_bytes} does not fit {signal.name}")
        warps, ctas = self.role(by).warps, edge.ctas or self.ctas
        counts = {
            Signal.WARP_ARRIVE: warps * ctas,
            Signal.WARP_WRITES: warps,
            Signal.WARP_READS: warps * ctas,
            Signal.WARPGROUP_ARRIVE: warps // 4 * ctas,
            Signal.OWNER_ARRIVE: ctas,
            Signal.SHARED_COMMIT: self.sharing_pairs,
        }
        return counts.get(signal, 1)

    def barriers(self) -> tuple[Barrier, ...]:
        """Every mbarrier array of a CTA, in slot order. All CTAs of a cluster have the same layout."""
        barriers, slot = [], 0
        for edge in self.edges:
            for kind, signal, by in (("full", edge.full, edge.producer), ("empty", edge.empty, edge.consumer)):
                if signal is None:
                    continue
                count = self.arrivals(edge, signal, by)
                barriers.append(Barrier(f"{edge.name}_{kind}", slot, edge.stages * edge.parts, count))
                slot += edge.stages * edge.parts
        return tuple(barriers)

    def barrier_names(self) -> list[str]:
        """Names of every mbarrier of a CTA by slot, e.g. ``"operands_full[2]"``."""
        return [f"{barrier.name}[{stage}]" for barrier in self.barriers() for stage in range(barrier.stages)]

    @property
    def slots(self) -> int:
        return sum(barrier.stages for barrier in self.barriers())

    def describe(self) -> list[str]:
        """One line per edge, e.g. ``load --[operands x4: TMA_BYTES 65536 B / TCGEN05_COMMIT]--> mma``."""
        lines = []
        for e in self.edges:
            full = f"{e.full.name} {e.tx_bytes} B" if e.tx_bytes else e.full.name
            empty = "once" if e.empty is None else e.empty.name
            count = f"x{e.stages}" + (f" x{e.parts} parts" if e.parts > 1 else "")
            lines.append(f"{e.producer} --[{e.name} {count}: {full} / {empty}]--> {e.consumer}")
        return lines


def _tcgen05_graph(plan: Sm100Plan, empty: Signal, accumulators: int, mma_tiles: int) -> Graph:
    """load -> mma -> epilogue, with so many accumulators, each of which is handed over MMA tile by MMA tile."""
    operands = Edge(
        "operands", "load", "mma", plan.config.stages, full=Signal.TMA_BYTES, empty=empty, tx_bytes=plan.stage_tx_bytes
    )
    commit, release = Signal.TCGEN05_COMMIT, Signal.WARP_ARRIVE
    accumulator = Edge("accumulator", "mma", "epilogue", accumulators, full=commit, empty=release, parts=mma_tiles)
    roles = (
        Role("load", plan.load_warp, 1),
        Role("mma", plan.mma_warp, 1),
        Role("epilogue", plan.first_epilogue_warp, plan.epilogue_warps),
    )
    return Graph(roles, (operands, accumulator), ctas=plan.cta_group, sharing_pairs=plan.sharing_pairs)


def sm100_graph(plan: Sm100PatchEmbedPlan | Sm100GemmPlan) -> Graph:
    """load -> mma -> epilogue: the graph of every tcgen05 GEMM of this package.

    An accumulator is handed over MMA tile by MMA tile. Pairs of a cluster share nothing but operand stages.
    """
    empty = Signal.SHARED_COMMIT if plan.sharing_pairs > 1 else Signal.TCGEN05_COMMIT
    return _tcgen05_graph(plan, empty, plan.accumulators, plan.mma_tiles)


def sm100_transposed_graph(plan: Sm100TransposedPlan) -> Graph:
    """load -> mma -> epilogue, beside the weight that the MMAs of all tiles read.

    An accumulator is handed over MMA tile by MMA tile. Into tensor memory the epilogue warps write the weight, each
    its quarter of the lanes of its CTA; into shared memory TMA does.
    """
    graph = _tcgen05_graph(plan, Signal.TCGEN05_COMMIT, plan.config.accumulators, len(plan.mma_spans))
    if plan.config.weight == "tmem":
        weight = Edge("weight", "epilogue", "mma", 1, full=Signal.WARP_ARRIVE, empty=None)
    else:
        nbytes = plan.weight_bytes * plan.cta_group
        weight = Edge("weight", "load", "mma", 1, full=Signal.TMA_BYTES, empty=None, tx_bytes=nbytes)
    return replace(graph, edges=(*graph.edges, weight))


def sm90_graph(plan: TransposedPlan) -> Graph:
    """load -> mma, where a consumer warpgroup drains its own registers: the graph of kernels that compute ``out^T``.

    Warps that repack stand between
    load and mma: they read raw strips, which the CTAs of a cluster load for each other, and fill operands of their own.

    Named barriers: ``staged`` of a warpgroup separates its writes to staging from the TMA store that reads them;
    ``order barrier`` of a warpgroup (CUTLASS: ordered sequence barrier) is where the one before it hands over the
    tensor cores.
    """
    groups = plan.config.warpgroups
    stages, released, nbytes = plan.config.stages, Signal.WARPGROUP_ARRIVE, plan.stage_bytes
    operands = Edge("operands", "load", "mma", stages, full=Signal.TMA_BYTES, empty=released, tx_bytes=nbytes)
    staged = tuple(NamedBarrier(f"staged {i}", 1 + i, 128) for i in range(groups))
    order = tuple(NamedBarrier(f"order barrier {i}", 1 + groups + i, 256) for i in range(groups))
    roles = (Role("mma", 0, 4 * groups), Role("load", plan.load_warp, 1))
    edges = (operands,)
    repack = plan.roles.count("repack")
    if repack:
        roles += (Role("repack", plan.load_warp + 1, repack),)
        stages, released, nbytes = plan.load_stages, Signal.WARP_READS, plan.load_bytes
        raw = Edge("raw", "load", "repack", stages, full=Signal.TMA_BYTES, empty=released, tx_bytes=nbytes)
        edges = (replace(operands, producer="repack", full=Signal.WARP_WRITES, tx_bytes=0, ctas=1), raw)
    return Graph(roles, edges, ctas=plan.config.cluster, named_barriers=staged + order)


def sm90_gemm_graph(plan: Sm90GemmPlan) -> Graph:
    """Graph like `sm90_gather_graph`; with a split of K, an edge from the consumers of each CTA to those of the others.

    It has one buffer per warp. The warp that stores from a buffer asks for the residual in it: it knows itself when a
    buffer is free. ``staged`` of warps that fill a buffer together separates their writes from the store.
    """
    graph = sm90_gather_graph(plan)
    groups = plan.storing_warps // plan.store_warps
    if plan.kept:
        first, threads = 1 + len(graph.named_barriers), 128 * plan.warpgroups // plan.keeping_groups
        kept = tuple(NamedBarrier(f"kept {i}", first + i, threads) for i in range(plan.keeping_groups))
        graph = replace(graph, named_barriers=graph.named_barriers + kept)
    if plan.store_warps > 1:
        threads, first = 32 * plan.store_warps, 1 + len(graph.named_barriers)
        staged = tuple(NamedBarrier(f"staged {i}", first + i, threads) for i in range(groups))
        graph = replace(graph, named_barriers=graph.named_barriers + staged)
    if plan.tma_residual:
        buffers, nbytes = groups * plan.config.store_stages, plan.store_buffer_bytes
        residual = Edge("residual", "mma", "mma", buffers, full=Signal.TMA_BYTES, empty=None, tx_bytes=nbytes)
        graph = replace(graph, edges=(*graph.edges, residual))
    if plan.config.split_k == 1:
        return graph
    sent, released, nbytes = Signal.REMOTE_STORES, Signal.READER_ARRIVE, plan.received_bytes
    partials = Edge("partials", "mma", "mma", plan.storing_warps, full=sent, empty=released, tx_bytes=nbytes)
    return replace(graph, edges=(*graph.edges, partials), ctas=plan.ctas)


def sm90_gather_graph(plan: WgmmaPair) -> Graph:
    """load -> mma, both operands in a stage. With pingpong a stage belongs to the one warpgroup that computes its tile.

    Named barriers: ``order barrier`` of a warpgroup is where the other one hands over the tensor cores.
    """
    empty = Signal.OWNER_ARRIVE if plan.config.pingpong else Signal.WARPGROUP_ARRIVE
    stages, ctas, nbytes = plan.config.stages, plan.sharing_ctas, plan.loaded_bytes
    operands = Edge("operands", "load", "mma", stages, full=Signal.TMA_BYTES, empty=empty, tx_bytes=nbytes, ctas=ctas)
    return Graph(
        roles=(Role("mma", 0, 4 * plan.warpgroups), Role("load", plan.load_warp, 1)),
        edges=(operands,),
        ctas=ctas,
        named_barriers=tuple(NamedBarrier(f"order barrier {i}", 1 + i, 256) for i in range(plan.warpgroups)),
    )


def no_graph(plan: Plan) -> Graph:
    """Graph of a kernel whose warps all do the same."""
    return Graph(roles=(), edges=(), ctas=1)


def graph_of(plan: Plan) -> Graph:
    return pkgutil.resolve_name(plan.graph)(plan)
