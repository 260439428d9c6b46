"""MMAs that the core repeats: which are known, and in a kernel."""

from __future__ import annotations

import ctypes
import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.config import Sm100PatchEmbedConfig
from cute_kernels.emulator import Options
from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.native_units import Units, function, slot
from cute_kernels.emulator.sm import Cluster
from cute_kernels.emulator.tensor_core import TensorCore
from tests.emulator.exact_sums import emulate
from tests.emulator.kernel_inputs import make_case
from tests.emulator.python_units import units
from tests.emulator.test_native_units import NativeMachine

MMAS = CONSTANTS["MMAS"]
_Mma = STRUCTURES["Mma"]
WORD = st.one_of(st.integers(0, 3), st.integers(0, (1 << 64) - 1))
KEYS = st.lists(st.tuples(*[WORD] * 7), min_size=1, max_size=40, unique=True)


@given(KEYS, st.integers(0, 7))
def test_mmas_are_found_by_all_of_their_key(keys: list[tuple[int, ...]], changed: int):
    """Of MMAs that share an entry the last one is known; with one word changed, none is."""
    machine = NativeMachine(np.zeros(16, np.uint8))
    executed: list[int] = []
    execute = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(lambda job: executed.append(job) or len(keys) % 2)
    jobs = {key: 64 * number for number, key in enumerate(keys, 1)}
    for key, job in jobs.items():
        machine.units.learn_mma(key, job)
    machine.tables.header.execute = ctypes.cast(execute, ctypes.c_void_p).value
    last = {slot([*key, 0], MMAS): key for key in keys}
    for key, job in jobs.items():
        words = np.array([*key, 0], np.uint64)
        executed.clear()
        done = function("tensor_mma")(machine.tables.address, words.ctypes.data, 0)
        known = last[slot([*key, 0], MMAS)] == key
        assert executed == ([job] if known else [])
        assert done == (known and len(keys) % 2)
        words[changed] ^= np.uint64(1)
        if tuple(words[:7].tolist()) not in jobs or words[7]:
            executed.clear()
            assert not function("tensor_mma")(machine.tables.address, words.ctypes.data, 0)
            assert not executed


def test_mmas_for_python_are_not_known():
    machine = NativeMachine(np.zeros(16, np.uint8), options=Options(detectors=False, completion="lazy"))
    machine.units.learn_mma((1, 0, 0, 0, 0, 0, 0), None)
    words = np.array([1, *[0] * 7], np.int64)
    assert not function("tensor_mma")(machine.tables.address, words.ctypes.data, 0)
    machine.units.learn_mma((1, 0, 0, 0, 0, 0, 0), 64)
    assert not function("tensor_mma")(machine.tables.address, words.ctypes.data, 0), "not where completion is lazy"


def test_what_a_job_has_addresses_of_lives_as_long_as_it(monkeypatch: pytest.MonkeyPatch):
    """Whoever else keeps the places of operands may drop them: caches of a few thousand MMAs."""
    learnt: list[tuple[int, weakref.ref]] = []
    learn = Units.learn_mma

    def recorded(units: Units, key: object, job: int | None, watch: int, owner: object) -> None:
        learn(units, key, job, watch, owner)
        if job is not None:
            part = _Mma.from_address(job).parts[0]
            assert (part.a.places, part.b.places) == (owner.a_places.address, owner.b_places.address)
            learnt.append((id(owner), weakref.ref(owner)))

    alive: list[bool] = []
    finish = Cluster.finish

    def finished(cluster: Cluster) -> None:
        cluster.tensor_core._known.clear()
        gc.collect()
        kept = {id(owner) for owner in cluster.units._kept.values()}
        alive.extend(owner() is not None for number, owner in learnt if number in kept)
        finish(cluster)

    monkeypatch.setattr(Units, "learn_mma", recorded)
    monkeypatch.setattr(Cluster, "finish", finished)
    case = make_case(batch=1, positions=256, n=256, k=256, sm_count=2, config=Sm100PatchEmbedConfig())
    emulate(case.plan, case.tensors, Options(detectors=False))
    assert alive and all(alive)


@pytest.mark.parametrize("fault", ["", "nan", "large"])
@pytest.mark.parametrize("completion", ["eager", "random"])
@pytest.mark.parametrize("detectors", [False, True])
def test_kernel_of_mmas(fault: str, completion: str, detectors: bool, monkeypatch: pytest.MonkeyPatch):
    """Python executes each MMA once, whatever its operands hold; all of them where their completion is random."""
    case = make_case(batch=4, positions=256, n=256, k=512, sm_count=2, seed=4, config=Sm100PatchEmbedConfig())
    if fault:
        case.tensors.x[600, 40] = float("nan") if fault == "nan" else 448.0
    with units(False):
        emulate(case.plan, case.tensors, Options(detectors=detectors))
    expected = case.tensors.out.clone()
    calls = itertools.count()
    mma = TensorCore.mma
    monkeypatch.setattr(TensorCore, "mma", lambda *args, **keywords: (next(calls), mma(*args, **keywords))[1])
    options = Options(detectors=detectors, completion=completion, seed=3)
    report = emulate(case.plan, case.tensors, options)
    python = next(calls)
    assert report.mma_instructions == 4 * 16
    assert python == (report.mma_instructions if completion == "random" else 2 * 16)  # with two accumulators
    assert torch.equal(case.tensors.out.view(torch.int16), expected.view(torch.int16))
    if fault == "nan":
        assert expected[600].isnan().all()
    elif not fault:
        assert not case.mismatches().any()
