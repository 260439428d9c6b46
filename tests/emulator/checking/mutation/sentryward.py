"""``python -m tests.emulator.checking.mutation.sentryward``: a static verifier's opinion of our SM100 kernels.

sentryward (PyPI, Apache-2.0) proves for one launch, from the PTX alone, that barriers behave the same under every
schedule, that conflicting accesses to shared, tensor and global memory are ordered, and that tensor memory and barriers
are used while they live. It models neither fences nor the memory model's scopes. The kernels must pass, and mutants
that take an order away must not. Where the two tools differ: it proves termination, which the emulator shows for the
schedules that it ran; and to it the registers of a ``tcgen05.st`` may be read until ``tcgen05.wait::st``, while in
the emulator a store has read them when it is issued. The PTX ISA does not say; the text that is verified waits for
each store.

    pip install sentryward==0.1.1
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_kernels.config import Sm100ImagesConfig, Sm100PatchEmbedConfig, Sm100ResidentConfig
from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.checking.mutation.mutants import mutants
from cute_kernels.emulator.isa.ptx.decode import parse
from cute_kernels.emulator.machine.units.copies import tensor_map
from cute_kernels.emulator.programs import host
from cute_kernels.operations.compile import host_arguments
from tests.emulator.checking.mutation.targets import TARGETS, ImagesTarget, KernelTarget


@dataclass(frozen=True)
class Subject:
    """A kernel, and keys of mutants that take an order away which sentryward models."""

    target: KernelTarget
    must_fail: tuple[str, ...] = ()


#: Tiles that use stages, accumulators and staging again. Not staggered: sentryward does not follow a loop over a clock.
#: Pairs allocate all 512 columns of tensor memory: of less, it does not know that both CTAs get the same ones.
SUBJECTS = {
    "streamed": Subject(
        KernelTarget(Sm100PatchEmbedConfig(stages=2, stagger_clocks=0), batch=6, positions=128, n=256, k=384),
        (
            "drop mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 #0",
            "drop cp.async.bulk.wait_group.read #0",
            "bytes+16 mbarrier.arrive.expect_tx.shared.b64 #0",
        ),
    ),
    "position order": Subject(
        KernelTarget(
            Sm100PatchEmbedConfig(
                tile_n=128, stages=2, epilogue_warps=4, cta_group=1, order="position", tile_positions=1,
                stagger_clocks=0,
            ),
            batch=128, positions=3, n=128, k=384,
        )
    ),
    "weight in shared memory": Subject(
        TARGETS["sm100-on-chip-one-cta"],
        ("bytes+16 mbarrier.arrive.expect_tx.shared.b64 #0", "drop cp.async.bulk.wait_group.read #0"),
    ),
    "weight in tensor memory": Subject(
        KernelTarget(
            Sm100ResidentConfig(
                weight="tmem", order="position", tile_rows=64, tile_positions=1, cta_group=1, accumulators=1,
                mma_columns=32, stages=3,
            ),
            batch=80, positions=2, n=128, k=320,
        ),
        ("drop mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 #2",),
    ),
    "weight in tensor memory, pair": Subject(
        KernelTarget(
            Sm100ResidentConfig(
                weight="tmem", order="position", tile_rows=128, tile_positions=1, cta_group=2, accumulators=2, stages=2
            ),
            batch=192, positions=2, n=256, k=384,
        )
    ),
    "images, weight in shared memory": Subject(
        TARGETS["images-sm100-one-cta"], ("bytes+16 mbarrier.arrive.expect_tx.shared.b64 #0",)
    ),
    "images, weight in tensor memory": Subject(
        ImagesTarget(
            Sm100ImagesConfig(
                tile_patches=4, tile_images=16, cta_group=1, weight="tmem", accumulators=1, mma_columns=32, stages=3,
                stage_blocks=1,
            ),
            batch=40, positions=8, n=128, k=256,
        )
    ),
}  # fmt: skip

_SWIZZLES = {"none": "none", "32B": "32B", "64B": "64B", "128B": "128B"}
_LOAD = re.compile(r"ld\.param\.(?:v([248])\.)?([busf])(8|16|32|64)\s+[^\[;]*\[(\w+)(?:\+(\d+))?\]")


def kernel_input(target: KernelTarget) -> dict[str, Any]:
    """The launch as sentryward reads it: shapes, tensor maps, and the value of every parameter that the PTX loads."""
    case = target.case()
    launch = host.record(target.artifact.function, *host_arguments(case.plan, **case.tensors.addresses(), stream=0))
    tensors = case.tensors.tensors()
    spans = {name: (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for name, t in tensors.items()}
    return input_of_launch(target.ptx, launch, spans)


def input_of_launch(ptx: str, launch: CapturedLaunch, spans: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """The same of any launch, with the first and last address of each array."""
    kernel = parse(ptx).kernels[launch.kernel_name]
    data = dict(zip((p.name for p in kernel.parameters), launch.params, strict=True))

    def object_at(address: int) -> str | None:
        return next((name for name, (start, end) in spans.items() if start <= address < end), None)

    declared = {name: kind for kind, name in re.findall(r"\.param\s+\.([busf]\d+)\s+(\w+)\s*[,)\n]", ptx)}
    arguments, pointers = {}, {}
    for count, kind, bits, name, offset in _LOAD.findall(ptx):
        kind = declared.get(name, kind)[0]  # scalars are declared with their types, and loaded as bits
        size = int(bits) // 8
        for i in range(int(count or 1)):
            place = int(offset or 0) + i * size
            raw = data[name][place : place + size]
            value: float = int.from_bytes(raw, "little")
            key = {"parameter": name, "offset": place}
            if size == 8 and object_at(value):
                pointers[name, place] = {**key, "type": "pointer", "space": "global", "object": object_at(value)}
                continue
            if kind == "f":
                value = struct.unpack("<f" if size == 4 else "<d", raw)[0]
            arguments[name, place] = {**key, "type": f"{'f' if kind == 'f' else 'u'}{bits}", "value": value}
    return {
        "schema": "spverify.kernel-input/v1",
        "launch": {
            "grid_dim": list(launch.grid),
            "block_dim": list(launch.block),
            "cluster_dim": list(launch.cluster),
            "dynamic_shared_bytes": launch.dynamic_smem,
        },
        "arguments": list(arguments.values()),
        "declarations": list(pointers.values()),
        "tma_descriptors": [
            {"parameter": p.name, **_descriptor(tensor_map.decode(data[p.name]), object_at)}
            for p in kernel.parameters
            if p.nbytes == 128 and p.align >= 64
        ],
    }


def _descriptor(decoded: tensor_map.TensorMap, object_at: Any) -> dict[str, Any]:
    return {
        "element_type": decoded.dtype,
        "rank": decoded.rank,
        "global_shape": list(decoded.extents),
        "global_strides_bytes": list(decoded.strides),
        "box_shape": list(decoded.box),
        "element_strides": list(decoded.element_strides),
        "swizzle": _SWIZZLES[decoded.swizzle],
        "interleave": "none",
        "oob_fill": "nan" if decoded.nan_fill else "zero",
        "object": object_at(decoded.address),
    }


_COLLECTOR = re.compile(r"\.collector::\w+::\w+")
_ABSOLUTE = re.compile(r"\babs\.s32\s+(%\w+), (%\w+);")
_TENSOR_STORE = re.compile(r"\btcgen05\.st\.[^;]*;")


def readable(ptx: str) -> str:
    """The same kernel as far as sentryward's questions go, in instructions that it knows.

    * It refuses collector hints of ``tcgen05.mma``, which say only how operands are buffered: they are taken out.
    * It does not know ``abs.s32``, with which a loop over tiles may get its step: the larger of a number and its
      negative.
    * It takes the source registers of ``tcgen05.st`` as being read until ``tcgen05.wait::st``, and the next pass of a
      loop that brings a weight for overwriting them: each store is waited for. The kernel waits once, after the last
      one and before anybody is told, so that this takes no order away from other threads and adds none.
    """
    ptx = _COLLECTOR.sub("", ptx)
    ptx = _ABSOLUTE.sub(r"{ .reg .b32 %negative; neg.s32 %negative, \2; max.s32 \1, \2, %negative; }", ptx)
    return _TENSOR_STORE.sub(r"\g<0> tcgen05.wait::st.sync.aligned;", ptx)


def verify(inputs: dict[str, Any], ptx: str, seconds: float) -> dict[str, Any]:
    """sentryward's report on the `readable` text of a launch, which ``inputs`` describe."""
    import sentryward

    with tempfile.TemporaryDirectory() as folder:
        text, config = Path(folder) / "kernel.ptx", Path(folder) / "input.json"
        text.write_text(readable(ptx))
        config.write_text(json.dumps(inputs))
        return sentryward.verify(str(text), input=str(config), timeout_seconds=seconds)


def judge(name: str, key: str | None, seconds: float) -> bool:
    """Whether sentryward says of a kernel, or of the mutant ``key`` of it, what it should; prints what it says."""
    target = SUBJECTS[name].target
    ptx = target.ptx if key is None else next(mutant.ptx for mutant in mutants(target.ptx) if mutant.key == key)
    start = time.perf_counter()
    report = verify(kernel_input(target), ptx, seconds)
    found = "; ".join(f"{d.get('code')}: {d.get('message', '')}"[:160] for d in report.get("diagnostics", [])[:2])
    seconds = time.perf_counter() - start
    print(f"{name}, {key or 'the kernel'}: {report['result']} in {seconds:.0f} s. {found}", flush=True)
    return (report["result"] == "race_free") == (key is None)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.emulator.checking.mutation.sentryward",
        description=__doc__.split("\n\n")[0].split(": ", 1)[1],
    )
    parser.add_argument("--seconds", type=float, default=1200, help="for each text (default: %(default)s)")
    parser.add_argument("--kernel", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), help="default: all")
    parser.add_argument("--mutant", nargs="*", metavar="KEY", help="default: those that must fail, of each kernel")
    options = parser.parse_args()
    wrong = 0
    for name in options.kernel:
        keys = SUBJECTS[name].must_fail if options.mutant is None else options.mutant
        wrong += sum(not judge(name, key, options.seconds) for key in (None, *keys))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
