"""What `cute-kernels sweep --measure` times of images: the launches, executed in the emulator in place of a GPU."""

from __future__ import annotations

import dataclasses
import gc
import types
import weakref

import pytest
import torch

from cute_kernels.config import (
    PatchEmbedImagesProblem,
    Sm90GatherConfig,
    Sm90ImagesConfig,
    Sm90PatchEmbedConfig,
)
from cute_kernels.emulator import Options
from cute_kernels.explore.sweep_table import sweep
from cute_kernels.explore.tuning import search
from cute_kernels.operations.patch_embed_images import PATCH_EMBED_IMAGES
from cute_kernels.operations.runtime import emulated
from cute_kernels.plan import make_plan

INT8 = PatchEmbedImagesProblem(2, 3, 32, 48, 16, 64, table_rows=6)
BF16 = PatchEmbedImagesProblem(2, 3, 32, 32, 16, 64, "bfloat16", precision="bf16", table_rows=1)
CHAIN = PatchEmbedImagesProblem(17, 3, 32, 32, 16, 64)
LAST = PatchEmbedImagesProblem(2, 3, 32, 32, 16, 64, channels_last=True)
ROWS = Sm90PatchEmbedConfig(tile_rows=32, stages=2)
STRIPS = Sm90ImagesConfig(tile_patches=4, tile_images=4, stages=3, stage_blocks=1)
CASES = [
    (INT8, [STRIPS, ROWS]),
    (BF16, [Sm90GatherConfig()]),
    (CHAIN, [ROWS]),
    (LAST, [STRIPS]),
]


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches go to the emulator."""

    def calls_of(plan, operands):
        def call(values: tuple[int]) -> None:
            assert values == (0,)  # the stream alone, as a launch with constants takes it
            emulated.launch(plan, operands, Options(detectors=False))

        return [call]

    monkeypatch.setattr(search, "calls_of", calls_of)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))


@pytest.mark.parametrize(("problem", "configs"), CASES)
def test_launches_compute_the_problem_on_each_set_of_inputs(
    problem: PatchEmbedImagesProblem, configs: list, without_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every timer's launches leave what the reference gives for these images, in an output of their own."""
    given = PATCH_EMBED_IMAGES.example(problem)
    assert PATCH_EMBED_IMAGES.problem(given) == problem
    out_bytes = 2 * problem.batch * problem.positions * problem.n
    nbytes = sum(tensor.nbytes for _, _, tensor in PATCH_EMBED_IMAGES.table.tensors_of(given)) + out_bytes
    monkeypatch.setattr(search, "ROTATED_BYTES", 2 * nbytes)
    launches = []
    monkeypatch.setattr(search, "graph_timer", lambda launch: launches.append(launch) or (lambda: 1.0))
    plans = [make_plan(problem, config, "sm_90a", sm_count=2) for config in configs]
    inputs = search.input_sets(PATCH_EMBED_IMAGES, problem, "cpu")
    assert list(search.timers_of(PATCH_EMBED_IMAGES, plans, inputs)) == plans
    for launch in launches:
        _, slots = launch.__defaults__
        assert len(slots) == 2 and not torch.equal(slots[0].images, slots[1].images)
        for i in (1, 2, 3):
            slot = slots[i % 2]
            slot.out.fill_(torch.nan)
            launch(i, 0)
            expected = PATCH_EMBED_IMAGES.reference(dataclasses.replace(inputs[0], images=slot.images)).float()
            torch.testing.assert_close(slot.out.view(expected.shape).float(), expected, rtol=0.01, atol=0.01)


def test_a_plan_that_computes_something_else_is_refused(without_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "ROTATED_BYTES", 1)
    monkeypatch.setattr(search, "graph_timer", lambda launch: lambda: 1.0)
    configs = CASES[0][1]
    right, plans = search.calls_of, [make_plan(INT8, config, "sm_90a", sm_count=2) for config in configs]

    def wrong(plan, operands):
        calls = right(plan, operands)
        return [*calls, lambda values: operands.out.mul_(1.1)] if plan is plans[1] else calls

    monkeypatch.setattr(search, "calls_of", wrong)
    with pytest.raises(RuntimeError, match=r"Sm90PatchEmbedConfig\(.* differs from Sm90ImagesConfig\(.* of the norm"):
        search.timers_of(PATCH_EMBED_IMAGES, plans, search.input_sets(PATCH_EMBED_IMAGES, INT8, "cpu"))
    assert search.timers_of(PATCH_EMBED_IMAGES, [], []) == {}


def test_a_timer_keeps_its_tensors_alive(without_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph has their addresses only, and so has a bound launch."""
    monkeypatch.setattr(search, "ROTATED_BYTES", 1)
    monkeypatch.setattr(search, "_captured", lambda launch, count: object())
    monkeypatch.setattr(search, "_replay", lambda graph, count, owner: 1.0)
    held = []

    def calls_of(plan, operands):
        held.extend(weakref.ref(tensor) for tensor in operands.tensors().values())
        out = weakref.ref(operands.out)
        return [lambda values: out().fill_(1)]

    monkeypatch.setattr(search, "calls_of", calls_of)
    plans = [make_plan(INT8, Sm90ImagesConfig(), "sm_90a", sm_count=2)]
    timers = search.timers_of(PATCH_EMBED_IMAGES, plans, search.input_sets(PATCH_EMBED_IMAGES, INT8, "cpu"))
    gc.collect()
    assert len(held) >= 5 and all(ref() is not None for ref in held)
    assert [timer() for timer in timers.values()] == [1.0]


def test_a_sweep_has_the_times_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the other operations: of the configurations for the device at hand."""
    device = types.SimpleNamespace(arch="sm_90a", sm_count=132)
    monkeypatch.setattr(search, "device_at_hand", lambda name: device)
    monkeypatch.setattr(
        search, "timers_of",
        lambda operation, plans, inputs: {plan: lambda plan=plan: plan.config.stages / 8 for plan in plans},
    )  # fmt: skip
    monkeypatch.setattr(search, "input_sets", lambda operation, problem: [])
    rows = sweep(INT8, Sm90ImagesConfig(), [{"stages": 2}, {"stages": 3}], compiled=False, measured=True)
    assert [row.measured for row in rows] == [250.0, 375.0]


def test_bound_launches_get_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU gets: a pass over the images and the product of their rows."""
    bound = []

    def bound_launch(plan):
        def with_constants(parameters, **constants):
            bound.append((parameters, constants))
            return lambda values: None

        return types.SimpleNamespace(with_constants=with_constants)

    monkeypatch.setattr(search, "bound_launch", bound_launch)
    plan = make_plan(CHAIN, Sm90PatchEmbedConfig(), "sm_90a", sm_count=2)
    operands = PATCH_EMBED_IMAGES.prepare(PATCH_EMBED_IMAGES.example(CHAIN), plan).operands
    assert len(search.calls_of(plan, operands)) == len(bound) == 2
    assert all(parameters == ("stream",) for parameters, _ in bound)
    (_, first), (_, product) = bound
    assert first["images"] == operands.images.data_ptr() and product["out"] == operands.out.data_ptr()
    assert {each["x"] for _, each in bound} == {operands.x.data_ptr()}
