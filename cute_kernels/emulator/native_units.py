"""Barriers and tensor copies in machine code: what a warp's machine code calls instead of Python.

Only without counters and timeline, which have to hear of every operation. Each function performs the frequent case
whole or does nothing: whatever is illegal, rare or has to wait is left to the Python function of the instruction, which
decides again and words the error. Both work on the same state: rows of `mbarrier.MBarriers`, shared memory, and the
counts that `publish` hands to the units. With detectors, copies, bulk groups and MMAs are told to the race detector by
its own functions (`native_copies_code`); barriers are Python's.

Tensor copies are for where they take effect when they are issued (``completion="eager"``). Python decodes a tensor map
when it executes the first copy through it (`Units.learn`); later copies compare the 64 bytes that count with those that
were decoded, so that a map that changes is decoded again.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cute_kernels.emulator.instructions_move import PARAM_WINDOW, SHARED_WINDOW
from cute_kernels.emulator.native import Library
from cute_kernels.emulator.native_matrix import e4m3_unit
from cute_kernels.emulator.native_memory import (
    CTA_ENTRY,
    CTA_SHADOW,
    CTA_SLOTS,
    CTA_TABLE,
    FUNCTIONS,
    PARAMS,
    UNIT_BARRIERS,
    UNIT_COMMITS,
    UNIT_COMPLETIONS,
    UNIT_EXECUTE,
    UNIT_FLAGS,
    UNIT_JOBS,
    UNIT_LOADED,
    UNIT_MMAS,
    UNIT_PLANS,
    UNIT_STORED,
    UNIT_TEXTS,
    WATCHES,
    MemoryTables,
)
from cute_kernels.emulator.native_tensor_copies import copies
from cute_kernels.emulator.native_units_code import (
    COMMIT_ENTRY,
    COMMIT_KEY,
    COMMITS,
    EAGER,
    JOB_ENTRY,
    JOBS,
    KEY_WORDS,
    NO_MAP,
    PLAN_BASE,
    PLAN_BOX_BYTES,
    PLAN_CONTENT,
    PLAN_CONTENT_WORDS,
    PLAN_ELEMENT,
    PLAN_EXTENTS,
    PLAN_HOST,
    PLAN_KEY,
    PLAN_LOADS,
    PLAN_MASK,
    PLAN_PITCH,
    PLAN_RANK,
    PLAN_ROW_BYTES,
    PLAN_ROWS,
    PLAN_SHIFT,
    PLAN_STORES,
    PLAN_STRIDES,
    PLAN_TILE,
    PLAN_WORDS,
    PLANS,
    RANKS,
    TEXT_ENTRY,
    TEXT_KEY,
    TEXTS,
    WAITS,
    barriers,
    commits,
    job_slot,
    mmas,
)
from cute_kernels.emulator.packed_elements import PACKED
from cute_kernels.emulator.tensor_map import NBYTES, SWIZZLES, TensorMap, decode

if TYPE_CHECKING:
    from cute_kernels.emulator.native_shadow import ShadowUnit
    from cute_kernels.emulator.sm import Cluster

_OF_DETECTORS = ("bulk_commit", "bulk_wait")  # functions that the race detector has
_WATCHED = ("mbarrier_passed", "mbarrier_arrive", "tensor_load", "tensor_store")  # others with detectors


class Units:
    """What machine code knows of the units of one cluster.

    Args:
        cluster: whose barriers and copies they are.
        tables: where its machine code finds it.
    """

    def __init__(self, cluster: Cluster, tables: MemoryTables) -> None:
        self._cluster, self._words = cluster, tables.words
        self._plans = np.zeros((PLANS, PLAN_WORDS), np.int64)
        self._plans[:, PLAN_KEY] = NO_MAP
        self._next = 0
        self._seen: dict[int, bytes] = {}  # tensor maps that need not be looked at again
        self._jobs = np.zeros((JOBS, JOB_ENTRY), np.int64)
        self._kept: dict[int, tuple[np.ndarray, object]] = {}
        options = cluster.options
        flags = 0 if options.spurious_try_wait_failures else WAITS
        flags |= EAGER if options.completion == "eager" else 0
        words = self._words
        words[UNIT_FLAGS // 8] = flags
        words[UNIT_BARRIERS // 8] = cluster.barriers.rows.ctypes.data
        words[UNIT_PLANS // 8], words[UNIT_JOBS // 8] = self._plans.ctypes.data, self._jobs.ctypes.data
        for rank, slots in enumerate(cluster.barriers.slots):
            words[(CTA_TABLE + CTA_ENTRY * rank + CTA_SLOTS) // 8] = slots.ctypes.data
        self._watched = cluster.options.detectors
        self._texts = np.zeros((TEXTS if self._watched else 0, TEXT_ENTRY), np.int64)
        self._numbers: dict[str, int] = {}
        self._commits = np.zeros((COMMITS, COMMIT_ENTRY), np.int64)
        self._labels: dict[str, int] = {}
        words[UNIT_TEXTS // 8], words[UNIT_COMMITS // 8] = self._texts.ctypes.data, self._commits.ctypes.data
        functions = _functions()
        for name, offset in FUNCTIONS.items():
            words[offset // 8] = functions.get(name, 0)
            if self._watched:
                words[offset // 8] = functions["refuse_arrive"] if name == "mbarrier_arrive" else functions["refuse"]

    def bind(self, unit: ShadowUnit) -> None:
        """Without detectors all is known from the start; with them, when the race detector has machine code."""
        words, functions = self._words, _functions()
        for name in _WATCHED:
            words[FUNCTIONS[name] // 8] = functions[f"watched_{name}"]
        for name in ("tensor_mma", "tensor_commit"):
            words[FUNCTIONS[name] // 8] = functions[name]
        for name in _OF_DETECTORS:
            words[FUNCTIONS[name] // 8] = unit.addresses[name]
        for name, offset in WATCHES.items():
            words[offset // 8] = unit.addresses[name]
        for rank, shadow in enumerate(self._cluster.tracker.shared):
            words[(CTA_TABLE + CTA_ENTRY * rank + CTA_SHADOW) // 8] = shadow.address

    def learn_text(self, descriptor: bytes, shared: int, signal: int, warp: int, text: str) -> None:
        """With detectors: what copies are called in reports.

        Args:
            descriptor: of the tensor map.
            shared: address in shared memory.
            signal: address of the mbarrier of a load; -1: a store.
            warp: number of the issuing warp.
            text: for reports.
        """
        if not self._watched:
            return
        if text not in self._numbers:
            self._numbers[text] = self._cluster.tracker.epochs.text(text)
        key = decode(descriptor).box_bytes, shared, signal, warp
        entry = self._texts[job_slot(key, TEXTS)]
        entry[:TEXT_KEY], entry[TEXT_KEY] = key, self._numbers[text]

    def learn_mma(
        self, key: Sequence[int], job: np.ndarray | None, watch: int = 0, owner: object = None
    ) -> None:
        """Machine code executes this MMA from now on.

        Args:
            key: .cta_group, who issues (CTA rank, lane and warp), accumulator, descriptors of A and B, instruction
                descriptor, whether it accumulates.
            job: what `native_mma.make_job` made of it, or None: it is one for Python.
            watch: with detectors, address of `tensor_races.WATCHED_WORDS`.
            owner: keeps alive what the job has addresses of.
        """
        if job is None or (self._watched and not watch):
            return
        words = [*key, *[0] * (KEY_WORDS - len(key))]
        entry = self._jobs[job_slot(words)]
        entry[:KEY_WORDS] = np.array(words, np.uint64).view(np.int64)
        entry[KEY_WORDS : KEY_WORDS + 2] = job.ctypes.data, watch
        self._kept[job_slot(words)] = job, owner
        if not self._words[UNIT_EXECUTE // 8]:
            self._words[UNIT_EXECUTE // 8] = e4m3_unit().execute_address

    def learn_commit(self, key: tuple[int, int, int], label: str, stream: int) -> None:
        """Machine code executes this tcgen05.commit from now on.

        Args:
            key: who issues (CTA rank, lane and warp), address of the mbarrier, multicast mask or -1.
            label: who arrives, for reports.
            stream: with detectors, address of `tensor_races.STREAM_WORDS`.
        """
        if self._watched and not stream:
            return
        if label not in self._labels:
            labels = self._cluster.barriers.labels
            labels.append(label)
            self._labels[label] = len(labels)
        entry = self._commits[job_slot(key, COMMITS)]
        entry[:COMMIT_KEY], entry[COMMIT_KEY:] = key, (self._labels[label], stream)

    def publish(self) -> None:
        """Hands what machine code counted to the units of the cluster."""
        words, cluster = self._words, self._cluster
        cluster.barriers.completions += words[UNIT_COMPLETIONS // 8]
        cluster.tma.bytes_loaded += words[UNIT_LOADED // 8]
        cluster.tma.bytes_stored += words[UNIT_STORED // 8]
        cluster.tensor_core.instructions += words[UNIT_MMAS // 8]
        for offset in (UNIT_COMPLETIONS, UNIT_LOADED, UNIT_STORED, UNIT_MMAS):
            words[offset // 8] = 0

    def learn(self, address: int, descriptor: bytes) -> None:
        """Machine code executes copies through a tensor map from now on, if it is one of the frequent kind.

        That is: tiled, elements side by side, rows that fill their span of the swizzle, all of the tensor in one
        registered region.

        Args:
            address: generic address of the tensor map, in parameters or in global memory.
            descriptor: its 128 bytes, of which `decode` makes a tensor map.
        """
        if self._seen.get(address) == descriptor:
            return
        self._seen[address] = descriptor
        tensor_map = decode(descriptor)
        host = self._host_address(address)
        if (
            host is None
            or not isinstance(tensor_map, TensorMap)
            or any(step != 1 for step in tensor_map.element_strides)
            or tensor_map.shared_pitch != tensor_map.row_bytes
            or tensor_map.dtype in PACKED
        ):
            return
        gmem, start = self._cluster.gmem, tensor_map.address
        nbytes = tensor_map.bytes_of(tensor_map.extents[0])
        nbytes += sum((extent - 1) * step for extent, step in zip(tensor_map.extents[1:], tensor_map.strides))
        inside = [region for region in gmem.regions() if region.start <= start and start + nbytes <= region.end]
        if not inside:
            return
        known = np.flatnonzero(self._plans[:, PLAN_KEY] == address)
        number = int(known[0]) if len(known) else self._next
        self._next = self._next if len(known) else (self._next + 1) % PLANS
        plan, missing = self._plans[number], RANKS - tensor_map.rank
        if plan[PLAN_KEY] != address:
            self._seen.pop(int(plan[PLAN_KEY]), None)
        swizzle = SWIZZLES[tensor_map.swizzle]
        plan[PLAN_KEY], plan[PLAN_HOST] = address, host
        plan[PLAN_CONTENT : PLAN_CONTENT + PLAN_CONTENT_WORDS] = np.frombuffer(descriptor[: NBYTES // 2], np.int64)
        plan[PLAN_RANK], plan[PLAN_ELEMENT], plan[PLAN_BASE] = tensor_map.rank, tensor_map.element_bits // 8, start
        plan[PLAN_ROW_BYTES], plan[PLAN_BOX_BYTES] = tensor_map.row_bytes, tensor_map.box_bytes
        plan[PLAN_SHIFT], plan[PLAN_MASK] = swizzle.shift, swizzle.mask
        plan[PLAN_LOADS] = not tensor_map.dtype.startswith("tf32")  # those are rounded on the way
        plan[PLAN_STORES] = any(region.writable for region in inside)
        plan[PLAN_STRIDES : PLAN_STRIDES + RANKS] = (0, *tensor_map.strides, *[0] * missing)
        plan[PLAN_TILE : PLAN_TILE + RANKS] = (*tensor_map.tile, *[1] * missing)
        plan[PLAN_EXTENTS : PLAN_EXTENTS + RANKS] = (*tensor_map.extents, *[1] * missing)
        outer = [(n, step) for n, step in zip(tensor_map.tile[1:], tensor_map.strides) if n > 1] or [(1, 0)]
        plan[PLAN_ROWS], plan[PLAN_PITCH] = outer[0] if len(outer) == 1 else (0, 0)

    def _host_address(self, address: int) -> int | None:
        """Where the bytes of a tensor map are; None in shared memory."""
        if address >= PARAM_WINDOW:
            return self._words[PARAMS // 8] + address - PARAM_WINDOW
        return address if address < SHARED_WINDOW else None


@functools.cache
def _functions() -> dict[str, int]:
    """Addresses of the compiled functions, which stay for the life of the process."""
    library = _library()
    own = [name for name in FUNCTIONS if name not in _OF_DETECTORS]
    others = (*(f"watched_{name}" for name in _WATCHED), "refuse", "refuse_arrive")
    return {name: library.address(name) for name in (*own, *others)}


@functools.cache
def _library() -> Library:
    # What stands for functions that are not there yet: they leave everything to Python.
    refuse = "define i32 @refuse() {\n  ret i32 0\n}\ndefine i64 @refuse_arrive() {\n  ret i64 -1\n}\n"
    return Library(refuse + barriers() + copies() + mmas() + commits(), level=2, optimise=True)


def function(name: str) -> ctypes._CFuncPtr:
    """One of the compiled functions, for Python."""
    pointer, word, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    types = {
        "mbarrier_passed": (small, pointer, word, small, word),
        "mbarrier_arrive": (word, pointer, word, word, word, word, small, word),
        "tensor_commit": (small, pointer, word, word, word),
        "tensor_load": (small, pointer, pointer, small, small),
        "tensor_store": (small, pointer, pointer, small),
        "tensor_mma": (small, pointer, pointer, small),
    }
    return ctypes.CFUNCTYPE(*types[name])(_functions()[name])
