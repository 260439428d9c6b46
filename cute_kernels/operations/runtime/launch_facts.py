"""Facts that a launch of a kernel needs, for whoever launches the PTX without this package."""

import dataclasses
import itertools
import json
import struct
from pathlib import Path
from typing import Any

from cute_kernels.common import files
from cute_kernels.emulator.machine.units.copies import tensor_map
from cute_kernels.emulator.programs import host
from cute_kernels.operations.compile import Artifact, compile_plan, host_arguments
from cute_kernels.plan import Plan


def launch_facts(plan: Plan, artifact: Artifact) -> dict[str, Any]:
    """Entry, shapes, memory and parameters of a launch, in types that JSON has."""
    return {
        "kernel": artifact.kernel_name,
        "arch": plan.arch.name,
        "problem": dataclasses.asdict(plan.problem),
        "config": None if plan.config is None else dataclasses.asdict(plan.config),
        "grid": plan.grid,
        "cluster": plan.cluster,
        "block": (plan.threads, 1, 1),
        "dynamic_smem_bytes": plan.smem_bytes,
        **launch_parameters(plan),
        "tmem_columns": getattr(plan, "tmem_columns", 0),
        "warp_roles": plan.roles,
        "resources": dataclasses.asdict(artifact.resources),
        **plan.launch_facts,
    }


def write(plan: Plan, output: Path) -> list[Path]:
    """Writes a plan's PTX to a file and its facts beside it, ``FILE.json``; of a chain ``FILE-1``, ``FILE-2``, ..
    Raises OSError: a file that cannot be written, before anything is compiled."""
    outputs = [output]
    if len(plan.launches) > 1:
        outputs = [output.with_stem(f"{output.stem}-{number + 1}") for number in range(len(plan.launches))]
    paths = [(path, path.with_name(path.name + ".json")) for path in outputs]
    for path in itertools.chain(*paths):
        files.check_output(path)
    for part, (ptx_path, facts_path) in zip(plan.launches, paths, strict=True):
        artifact = compile_plan(part)
        files.write_text(ptx_path, artifact.ptx)
        files.write_text(facts_path, json.dumps(launch_facts(part, artifact), indent=2) + "\n")
    return list(itertools.chain(*paths))


def launch_parameters(plan: Plan) -> dict[str, Any]:
    """Parameters that generated host code passes to the kernel, read from a launch that is recorded, not executed.

    Every tensor gets an address, and a scale by value a number, that occurs nowhere else, so that each is recognised in
    the parameters by its bytes.
    """
    given = [operand for operand in plan.operands if operand.given]
    addresses, numbers = {}, {}
    for index, operand in enumerate(given):
        if operand.kind == "value":
            numbers[operand.name] = struct.unpack("<f", struct.pack("<I", 0x3F1B_7935 + 0x1357 * index))[0]
        else:
            addresses[operand.name] = 0x5EED_0000_0000 + (index + 1) * 0x1357_9000
    patterns = {name: struct.pack("<Q", address) for name, address in addresses.items()}
    patterns |= {name: struct.pack("<f", number) for name, number in numbers.items()}
    artifact = compile_plan(plan, emulated=True)
    launch = host.record(artifact.function, *host_arguments(plan, **addresses, **numbers, stream=0))
    values = "the 8-byte addresses" + "".join(f" or the FP32 {name}" for name in numbers)
    types = "; u8 stands for float8_e4m3fn" if any(operand.dtype == "float8_e4m3fn" for operand in given) else ""

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
        f"{types}). In 'hex', replace what 'offsets' names, {values}; they hold "
        "placeholders. What the other bytes mean is not decoded here, and padding among them may hold anything.",
        "placeholders": {name: pattern.hex() for name, pattern in patterns.items()},
    }
