"""The table of chips: against the CUDA programming guide, and which PTX runs where against ptxas 13.0."""

from __future__ import annotations

import pytest

from cute_kernels.common.chips import CHIPS, CTA_SMEM_BYTES, chip_of, runs

#: "Technical Specifications per Compute Capability": KB of shared memory of a multiprocessor and of a CTA, threads and
#: CTAs of a multiprocessor.
GUIDE = {
    (8, 0): (164, 163, 2048, 32),
    (8, 6): (100, 99, 1536, 16),
    (8, 7): (164, 163, 1536, 16),
    (8, 9): (100, 99, 1536, 24),
    (9, 0): (228, 227, 2048, 32),
    (10, 0): (228, 227, 2048, 32),
    (10, 3): (228, 227, 2048, 32),
    (11, 0): (228, 227, 1536, 24),
    (12, 0): (100, 99, 1536, 24),
    (12, 1): (100, 99, 1536, 24),
}

#: Target -> what ptxas 13.0 assembles it for, of the chips in `DEVICES`.
DEVICES = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a")
ASSEMBLED = {
    "sm_80": DEVICES, "sm_86": DEVICES[1:], "sm_87": DEVICES[2:], "sm_89": DEVICES[3:],
    "sm_90": DEVICES[4:], "sm_90a": ("sm_90a",),
    "sm_100": DEVICES[5:], "sm_100a": ("sm_100a",), "sm_100f": ("sm_100a", "sm_103a"),
    "sm_103": DEVICES[6:], "sm_103a": ("sm_103a",), "sm_103f": ("sm_103a",),
    "sm_110": DEVICES[7:], "sm_110a": ("sm_110a",), "sm_110f": ("sm_110a",),
    "sm_120": DEVICES[8:], "sm_120a": ("sm_120a",), "sm_120f": ("sm_120a", "sm_121a"),
    "sm_121": DEVICES[9:], "sm_121a": ("sm_121a",), "sm_121f": ("sm_121a",),
}  # fmt: skip


def test_limits_are_those_of_the_guide() -> None:
    kib = 1024
    found = {
        chip.compute_capability: (chip.sm_smem_bytes // kib, chip.smem_bytes // kib, chip.threads, chip.ctas)
        for chip in CHIPS.values()
    }
    assert found == GUIDE and CTA_SMEM_BYTES == kib
    assert {chip.register_file for chip in CHIPS.values()} == {64 * kib}
    assert {chip.max_registers for chip in CHIPS.values()} == {255}


def test_names_say_which_compute_capability_a_chip_has() -> None:
    for name, chip in CHIPS.items():
        major, minor = chip.compute_capability
        assert name == chip.name and name.removeprefix("sm_").rstrip("af") == f"{major}{minor}"


def test_clusters_and_tensor_memory_are_where_the_isa_has_them() -> None:
    assert {chip.compute_capability for chip in CHIPS.values() if chip.cluster == 1} == set(list(GUIDE)[:4])
    assert {chip.compute_capability[0] for chip in CHIPS.values() if chip.tmem_columns} == {10, 11}


def test_ptx_runs_where_ptxas_assembles_it() -> None:
    assert set(ASSEMBLED) == set(CHIPS)
    assert {target: tuple(chip for chip in DEVICES if runs(target, chip)) for target in CHIPS} == ASSEMBLED


@pytest.mark.parametrize(
    ("target", "name"), [("sm_75", "sm_80"), ("sm_88", "sm_87"), ("sm_101a", "sm_100"), ("", "sm_80")]
)
def test_an_unknown_chip_counts_as_the_one_before_it(target: str, name: str) -> None:
    assert chip_of(target).compute_capability == CHIPS[name].compute_capability
