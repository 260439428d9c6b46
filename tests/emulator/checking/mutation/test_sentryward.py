"""What the static verifier is given, without the verifier: the launch as it was made, and a text that does the same."""

from __future__ import annotations

import math

import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.checking.mutation.mutants import mutants
from tests.emulator.checking.mutation.sentryward import SUBJECTS, kernel_input, readable
from tests.nightly import by_day

DAILY = ("weight in tensor memory", "images, weight in shared memory")


@pytest.mark.parametrize("name", by_day(SUBJECTS, DAILY))
def test_what_the_verifier_reads_is_the_kernel(name: str) -> None:
    """The rewritten text gives every bit of the result without a report, and the mutants that must fail exist."""
    subject = SUBJECTS[name]
    target = subject.target
    text = readable(target.ptx)
    assert "abs.s32" not in text and ".collector" not in text
    stores = target.ptx.count("tcgen05.st.")
    assert (stores > 0) == (getattr(target.config, "weight", "") == "tmem")
    assert text.count("tcgen05.wait::st") == target.ptx.count("tcgen05.wait::st") + stores
    outcome = target.run(text, Options(strict=True, completion="lazy"))
    assert not outcome.difference and outcome.warp_instructions > 0
    assert set(subject.must_fail) <= {mutant.key for mutant in mutants(target.ptx)}


@pytest.mark.parametrize("name", by_day(SUBJECTS, DAILY))
def test_the_launch_is_described_as_it_is_made(name: str) -> None:
    target = SUBJECTS[name].target
    case, described = target.case(), kernel_input(target)
    plan, launch = case.plan, described["launch"]
    assert launch["grid_dim"] == list(plan.grid) and launch["block_dim"] == [plan.threads, 1, 1]
    assert launch["dynamic_shared_bytes"] == plan.smem_bytes
    tensors = case.tensors.tensors()
    maps = {one["object"]: one for one in described["tma_descriptors"]}
    assert maps.keys() <= tensors.keys() and "out" in maps
    for operand, one in maps.items():
        assert math.prod(one["global_shape"]) == tensors[operand].numel() and len(one["box_shape"]) == one["rank"]
    # Whatever the kernel reads without a tensor map is a pointer.
    assert maps.keys() | {one["object"] for one in described["declarations"]} == tensors.keys()
