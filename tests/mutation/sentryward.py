"""``python -m tests.mutation.sentryward``: an independent static verifier's opinion of our SM100 kernel.

sentryward (PyPI, Apache-2.0) proves for one launch, from the PTX alone, that barriers behave the same under every
schedule, that conflicting accesses to shared, tensor and global memory are ordered, and that tensor memory and barriers
are used while they live. It models neither fences nor the memory model's scopes. The kernel must pass, and mutants that
take an order away must not; what the two tools see differently is in docs/mutation.md.

    pip install sentryward==0.1.1
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cute_kernels.compile import host_arguments
from cute_kernels.config import Sm100PatchEmbedConfig
from cute_kernels.emulator import host, tensor_map
from cute_kernels.emulator.decode import parse
from tests.mutation.mutants import mutants
from tests.mutation.targets import KernelTarget

#: Three tiles of three K blocks through two stages: accumulators, stages and staging are all used again.
#: All 512 columns of tensor memory are allocated: of less, sentryward does not know that both CTAs get the same ones.
TARGET = KernelTarget(Sm100PatchEmbedConfig(stages=2), batch=6, positions=128, n=256, k=384)

#: Mutants that take an order away which sentryward models, by key.
MUST_FAIL = (
    "drop mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 #0",
    "drop cp.async.bulk.wait_group.read #0",
    "bytes+16 mbarrier.arrive.expect_tx.shared.b64 #0",
)

_SWIZZLES = {"none": "none", "32B": "32B", "64B": "64B", "128B": "128B"}
_LOAD = re.compile(r"ld\.param\.(?:v([248])\.)?([busf])(8|16|32|64)\s+[^\[;]*\[(\w+)(?:\+(\d+))?\]")


def kernel_input(target: KernelTarget) -> dict[str, Any]:
    """The launch as sentryward reads it: shapes, tensor maps, and the value of every parameter that the PTX loads."""
    case = target.case()
    launch = host.record(target.artifact.function, *host_arguments(case.plan, **case.tensors.addresses(), stream=0))
    kernel = parse(target.ptx).kernels[launch.kernel_name]
    data = dict(zip((p.name for p in kernel.parameters), launch.params, strict=True))
    tensors = {**case.tensors.inputs(), "out": case.tensors.out}
    spans = {name: (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for name, t in tensors.items()}

    def object_at(address: int) -> str | None:
        return next((name for name, (start, end) in spans.items() if start <= address < end), None)

    declared = {name: kind for kind, name in re.findall(r"\.param\s+\.([busf]\d+)\s+(\w+)\s*[,)\n]", target.ptx)}
    arguments, pointers = {}, {}
    for count, kind, bits, name, offset in _LOAD.findall(target.ptx):
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


def verify(target: KernelTarget, ptx: str, seconds: float) -> dict[str, Any]:
    """sentryward's report. It refuses collector hints, which say only how operands are buffered: they are taken out."""
    import sentryward

    with tempfile.TemporaryDirectory() as folder:
        text, config = Path(folder) / "kernel.ptx", Path(folder) / "input.json"
        text.write_text(re.sub(r"\.collector::\w+::\w+", "", ptx))
        config.write_text(json.dumps(kernel_input(target)))
        return sentryward.verify(str(text), input=str(config), timeout_seconds=seconds)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation.sentryward", description=__doc__.split("\n\n")[0].split(": ", 1)[1]
    )
    parser.add_argument("--seconds", type=float, default=900, help="for each text (default: %(default)s)")
    parser.add_argument("--mutant", nargs="*", metavar="KEY", help="default: three that must fail")
    parser.add_argument("--k", type=int, default=TARGET.k)
    options = parser.parse_args()
    target = dataclasses.replace(TARGET, k=options.k)
    texts = {mutant.key: mutant.ptx for mutant in mutants(target.ptx)}
    keys = MUST_FAIL if options.mutant is None else options.mutant
    wrong = 0
    for key, ptx in (("the kernel", target.ptx), *((key, texts[key]) for key in keys)):
        start = time.perf_counter()
        report = verify(target, ptx, options.seconds)
        passed = report["result"] == "race_free"
        wrong += passed != (key == "the kernel")
        found = "; ".join(f"{d.get('code')}: {d.get('message', '')}"[:160] for d in report.get("diagnostics", [])[:2])
        print(f"{key}: {report['result']} in {time.perf_counter() - start:.0f} s. {found}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
