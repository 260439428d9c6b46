"""Arrival counts that the graph derives, against counts taken from the protocol by hand."""

from __future__ import annotations

import dataclasses

import pytest

from cute_kernels.config import (
    GemmProblem,
    PatchEmbedProblem,
    Sm90GemmConfig,
    Sm90PatchEmbedConfig,
    Sm100PatchEmbedConfig,
)
from cute_kernels.kernels.graph import Graph, Signal, graph_of, sm90_gemm_graph, sm90_graph, sm100_graph
from cute_kernels.plan import make_plan

HEADLINE = PatchEmbedProblem(m=928_256, n=768, k=768, table_rows=196)


@pytest.mark.parametrize("warps", [4, 5])
def test_arrivals_of_the_gemm(warps: int) -> None:
    graph = sm100_graph(make_plan(HEADLINE, Sm100PatchEmbedConfig(epilogue_warps=warps)))
    counts = {b.name: (b.stages, b.arrivals) for b in graph.barriers()}
    assert counts == {
        "operands_full": (4, 1),
        "operands_empty": (4, 1),
        "accumulator_full": (2, 1),
        "accumulator_empty": (2, 2 * warps),
    }
    assert graph.slots == 12


def test_barrier_slots_do_not_overlap_and_fit_their_region() -> None:
    for stages in (2, 3, 4, 5):
        plan = make_plan(HEADLINE, Sm100PatchEmbedConfig(stages=stages))
        graph = sm100_graph(plan)
        slots = [slot for b in graph.barriers() for slot in range(b.slot, b.slot + b.stages)]
        assert slots == list(range(graph.slots))
        # Eight bytes each, and four for the tensor-memory address behind them.
        assert 8 * graph.slots + 4 <= plan.smem[0].nbytes


def test_warps_of_the_roles_are_the_warps_of_the_cta() -> None:
    plan = make_plan(HEADLINE, Sm100PatchEmbedConfig())
    graph = sm100_graph(plan)
    by_warp = {w: role.name for role in graph.roles for w in range(role.first_warp, role.first_warp + role.warps)}
    assert tuple(by_warp[w] for w in range(plan.warps)) == plan.roles


def test_byte_count_and_signal_must_agree() -> None:
    graph = sm100_graph(make_plan(HEADLINE, Sm100PatchEmbedConfig()))
    operands = dataclasses.replace(graph.edges[0], tx_bytes=0)
    with pytest.raises(ValueError, match="operands.*tx_bytes = 0.*TMA_BYTES"):
        Graph(graph.roles, (operands,), graph.ctas).barriers()
    accumulator = dataclasses.replace(graph.edges[1], tx_bytes=16)
    with pytest.raises(ValueError, match="accumulator.*tx_bytes = 16.*TCGEN05_COMMIT"):
        Graph(graph.roles, (accumulator,), graph.ctas).barriers()


def test_description_names_both_ends_and_the_signal() -> None:
    lines = sm100_graph(make_plan(HEADLINE, Sm100PatchEmbedConfig())).describe()
    assert lines[0] == "load --[operands x4: TMA_BYTES 65536 B / TCGEN05_COMMIT]--> mma"
    assert lines[1] == "mma --[accumulator x2: TCGEN05_COMMIT / WARP_ARRIVE]--> epilogue"
    assert Signal.WARP_ARRIVE.name in lines[1]


def test_barrier_names_follow_the_slots() -> None:
    plan = make_plan(HEADLINE, Sm100PatchEmbedConfig())
    names = graph_of(plan).barrier_names()
    assert names == [f"operands_{kind}[{i}]" for kind in ("full", "empty") for i in range(4)] + [
        f"accumulator_{kind}[{i}]" for kind in ("full", "empty") for i in range(2)
    ]
    assert graph_of(plan) == sm100_graph(plan)
    sm90 = make_plan(HEADLINE, Sm90PatchEmbedConfig())
    assert graph_of(sm90) == sm90_graph(sm90)
    dense = make_plan(GemmProblem(256, 256, 256), Sm90GemmConfig())
    assert graph_of(dense) == sm90_gemm_graph(dense)
    assert len(graph_of(sm90).barrier_names()) == sm90_graph(sm90).slots
