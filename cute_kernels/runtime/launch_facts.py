"""What a launch of a kernel needs, for whoever launches the PTX without this package."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

from cute_kernels.compile import Artifact, compile_plan, host_arguments
from cute_kernels.emulator import host, tensor_map
from cute_kernels.plan import GemmPlan, Plan

_VALUES = {"patch-embed": "the 8-byte addresses or the FP32 scale", "gemm": "the 8-byte addresses"}
_TYPES = {"patch-embed": "; u8 stands for float8_e4m3fn", "gemm": ""}


def launch_facts(plan: Plan, artifact: Artifact) -> dict[str, Any]:
    """Entry, shapes, memory and parameters of a launch, in types that JSON has."""
    facts = {
        "kernel": artifact.kernel_name,
        "arch": plan.arch.name,
        "problem": dataclasses.asdict(plan.problem),
        "config": dataclasses.asdict(plan.config),
        "grid": plan.grid,
        "cluster": plan.cluster,
        "block": (plan.threads, 1, 1),
        "dynamic_smem_bytes": plan.smem_bytes,
        **launch_parameters(plan),
        "tmem_columns": getattr(plan, "tmem_columns", 0),
        "warp_roles": plan.roles,
        "resources": dataclasses.asdict(artifact.resources),
    }
    if isinstance(plan, GemmPlan):
        return facts | {"out_pitch": plan.out_pitch, "bias_elements": plan.padded_n if plan.problem.bias else 0}
    return facts | {"table_shape": plan.table_shape}


def launch_parameters(plan: Plan) -> dict[str, Any]:
    """What the generated host code passes to the kernel, read from a launch that is recorded instead of executed.

    Every tensor gets an address, and a scale by value a number, that occurs nowhere else, so that each is recognised in
    the parameters by its bytes.
    """
    kernel = "gemm" if isinstance(plan, GemmPlan) else "patch-embed"
    names, by_value = _arguments(plan)
    addresses = {name: 0x5EED_0000_0000 + (index + 1) * 0x1357_9000 for index, name in enumerate(names)}
    scale = struct.unpack("<f", b"\x35\x79\x1b\x3f")[0]
    patterns = {name: struct.pack("<Q", address) for name, address in addresses.items()}
    patterns |= {"scale": struct.pack("<f", scale)} if by_value else {}
    absent: dict[str, Any] = {"bias": None} if kernel == "gemm" else {"table": None, "index": None, "scale": scale}
    artifact = compile_plan(plan, emulated=True)
    launch = host.record(artifact.function, *host_arguments(plan, **(absent | addresses), stream=0))

    parameters = []
    for index, data in enumerate(launch.params):
        parameter: dict[str, Any] = {"index": index, "bytes": len(data)}
        if len(data) == 128:
            facts = dataclasses.asdict(tensor_map.decode(data))
            address = facts.pop("address")
            (tensor,) = (name for name, value in addresses.items() if value == address)
            parameter |= {"holds": "tensor map", "tensor": tensor, **facts}
        else:
            found = {name: data.find(pattern) for name, pattern in patterns.items()}
            contents = {name: offset for name, offset in found.items() if offset >= 0}
            parameter |= {"holds": "bytes", "offsets": contents, "hex": data.hex()}
        parameters.append(parameter)
    return {
        "parameters": parameters,
        "parameters_note": "Recorded from the generated host code for this problem; other problems have other values. "
        "Encode each tensor map with your tensor's address (dimension 0 is innermost, strides in bytes"
        f"{_TYPES[kernel]}). In 'hex', replace what 'offsets' names, {_VALUES[kernel]}; they hold "
        "placeholders. What the other bytes mean is not decoded here, and padding among them may hold anything.",
        "placeholders": {name: pattern.hex() for name, pattern in patterns.items()},
    }


def _arguments(plan: Plan) -> tuple[list[str], bool]:
    """Names of the tensors, and whether there is a scale by value."""
    problem = plan.problem
    if isinstance(plan, GemmPlan):
        return ["a", "b", "out"] + ["bias"] * problem.bias, False
    by_value = problem.scale_source == "value"
    return ["x", "weight", "out"] + ["table"] * (problem.table_rows > 0) + ["scale"] * (not by_value), by_value
