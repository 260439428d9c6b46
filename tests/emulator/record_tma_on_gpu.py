"""Records what a GPU's driver and TMA unit do with many tensor copies, for test_tma.py to compare the emulator with.

Run on a machine with an sm_90 GPU and its driver (nothing else is needed but NumPy):

    python tests/emulator/record_tma_on_gpu.py tests/emulator/data/tma_h200.json

Each case encodes a tensor map with the driver, runs one copy by one thread, and stores the case, the map and a digest
of the memory that the copy wrote to. A copy that faults destroys the CUDA context, so every fault costs a new process.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

#: Names of the driver's data types in the order of CUtensorMapDataType, and their sizes.
TYPES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32_ftz", "tf32", "tf32_ftz")
SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
SWIZZLES = ("none", "32B", "64B", "128B")
GLOBAL_BYTES, SHARED_BYTES, SHARED_FILL = 1 << 16, 1 << 14, 0xCD
_FAULT = 3  # exit code of a worker whose copy faulted


def element_bytes(dtype: str) -> int:
    return SIZES[dtype.removesuffix("_ftz").lstrip("usbft")]


def noise(seed: int, nbytes: int) -> np.ndarray:
    """Bytes that any machine and library version reproduces."""
    return np.frombuffer(hashlib.shake_256(str(seed).encode()).digest(nbytes), np.uint8).copy()


def special_floats() -> np.ndarray:
    """FP32 patterns where rounding to TF32, flushing and NaN handling show, repeated over the global memory."""
    bits = [0, 1, 0x7FFFFF, 0x800000, 0x7F800000, 0x7F800001, 0x7FC00000, 0xFFC12345, 0x3F800FFF, 0x3F801000]
    bits += [0x3F801001, 0x3F803000, 0x7F7FFFFF, 0x7F7FF000, 0x3F802FFF]
    both_signs = np.array(bits + [b ^ 0x80000000 for b in bits] + [0x12345678, 0x9ABCDEF0], np.uint32)
    return np.resize(both_signs, GLOBAL_BYTES // 4).view(np.uint8).copy()


def copies() -> Iterator[dict]:
    """All cases: a tensor map, and unless ``kind`` is "encode" a copy with it."""

    def case(kind: str, **changes) -> dict:
        base = {
            "kind": kind, "dtype": "u8", "extents": [200, 50], "strides": [256], "box": [32, 8], "swizzle": "none",
            "element_strides": None, "nan_fill": False, "l2_promotion": 0, "coords": [16, 3], "offset": 0,
            "data": "noise",
        }  # fmt: skip
        base.update(changes)
        base["element_strides"] = base["element_strides"] or [1] * len(base["box"])
        return base

    for kind in ("load", "store"):
        for swizzle in SWIZZLES:
            for inner in (16, 32, 48, 64, 96, 128):
                for offset in (0, 128, 384, 512, 1152):
                    yield case(kind, swizzle=swizzle, box=[inner, 12], offset=offset)
        yield case(kind, extents=[300, 50], strides=[512], box=[256, 5], coords=[48, 2])
        for coords in ([-16, -3], [176, 45], [-304, 0], [192, -2], [0, 60], [3, 0], [8, 1], [192, 49]):
            yield case(kind, extents=[197, 50], strides=[208], swizzle="32B", coords=coords)
        for coords in ([-8, 2, -1], [32, 15, 4], [0, 0, 0], [0, 20, 0]):
            yield case(
                kind, dtype="bf16", extents=[37, 17, 5], strides=[80, 1392], box=[32, 8, 3], swizzle="64B", offset=256,
                coords=coords,
            )  # fmt: skip
        for coords in ([-4, 2, -1, 1], [0, 0, 0, 0], [12, 3, 2, 2]):
            yield case(
                kind, dtype="f32", extents=[19, 7, 5, 3], strides=[96, 768, 4800], box=[16, 3, 2, 2], swizzle="64B",
                coords=coords,
            )  # fmt: skip
        for coords in ([-8, 2, -1, 1, 0], [0, 0, 0, 0, 0], [8, 3, 2, 2, 1]):
            yield case(
                kind, dtype="u16", extents=[19, 7, 5, 3, 2], strides=[48, 384, 2400, 9600], box=[16, 3, 2, 2, 2],
                swizzle="32B", coords=coords,
            )  # fmt: skip
        for coords in ([-4], [0], [92]):
            yield case(kind, dtype="u32", extents=[100], strides=[], box=[32], coords=coords)
        for dtype in TYPES:
            n = 16 // element_bytes(dtype)
            yield case(kind, dtype=dtype, extents=[64, 20], strides=[1024], box=[n, 4], coords=[n, 1])
        for steps in ([1, 2], [1, 3], [2, 1], [2, 2], [1, 8]):
            for box in ([16, 8], [16, 7], [32, 9]):
                for coords in ([0, 0], [-16, -3], [176, 15]):
                    yield case(kind, extents=[200, 20], box=box, element_strides=steps, coords=coords)
        for dtype in ("f32", "f32_ftz", "tf32", "tf32_ftz"):
            first = -4 if kind == "load" else 4
            yield case(kind, dtype=dtype, extents=[64, 20], box=[32, 4], coords=[first, 1], data="floats")
        for dtype in TYPES[6:]:
            n = 16 // element_bytes(dtype)
            yield case(
                kind, dtype=dtype, extents=[64, 20], strides=[1024], box=[4 * n, 4], nan_fill=True, coords=[-n, 18]
            )

    yield from (case("encode", l2_promotion=code) for code in range(4))
    yield from (case("encode", box=[inner, 16]) for inner in (8, 15, 16, 17, 256, 257))
    yield from (case("encode", box=[16, rows]) for rows in (0, 1, 256, 257))
    yield from (case("encode", strides=[stride]) for stride in (496, 511, 528, (1 << 40) - 16, 1 << 40))
    yield from (case("encode", element_strides=[1, step]) for step in (1, 7, 8, 9))
    yield from (case("encode", extents=[extent, 5]) for extent in (1, 1 << 32))
    yield from (case("encode", dtype=dtype, nan_fill=True, strides=[4096]) for dtype in TYPES)
    draw = random.Random(1)
    for _ in range(150):
        rank, dtype = draw.randint(1, 5), draw.choice(TYPES)
        size = element_bytes(dtype)
        extents = [draw.randint(1, 2 ** draw.randint(1, 31)) for _ in range(rank)]
        strides = [16 * draw.randint(1, 2 ** draw.randint(4, 35)) for _ in range(rank - 1)]
        box = [draw.choice([16, 32, 64, 128]) // size] + [draw.randint(1, 256) for _ in range(rank - 1)]
        steps = [1] + [draw.choice([1, 1, 1, 2, 4, 8]) for _ in range(rank - 1)]
        yield case(
            "encode", dtype=dtype, extents=extents, strides=strides, box=box, element_strides=steps,
            swizzle=draw.choice(SWIZZLES), l2_promotion=draw.randint(0, 3),
        )  # fmt: skip


def ptx() -> str:
    """One load and one store kernel per rank; one thread does everything."""
    text = [".version 8.0\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 shared[];\n"]
    for rank in range(1, 6):
        coords = ", ".join(f"%c{i}" for i in range(rank))
        fetch = "\n".join(f"ld.global.s32 %c{i}, [%coords+{4 * i}];" for i in range(rank))
        head = f"""(.param .align 64 .b8 map[128], .param .u64 p_coords, .param .u32 p_offset, .param .u32 p_bytes,
 .param .u64 p_image, .param .u64 p_flag)
{{
.reg .pred %p; .reg .b32 %c<5>; .reg .b32 %place, %bytes, %base, %i, %v, %k;
.reg .b64 %coords, %image, %flag, %map, %x;
ld.param.u64 %coords, [p_coords]; ld.param.u32 %place, [p_offset]; ld.param.u32 %bytes, [p_bytes];
ld.param.u64 %image, [p_image]; ld.param.u64 %flag, [p_flag];
mov.u32 %base, shared; mov.b64 %map, map; cvta.param.u64 %map, %map;
add.u32 %place, %place, %base; add.u32 %place, %place, 1024;
{fetch}
mov.u32 %i, 0;
"""
        copy_in = f"""FILL: cvt.u64.u32 %x, %i; add.u64 %x, %x, %image; ld.global.b32 %v, [%x];
add.u32 %k, %base, %i; st.shared.b32 [%k+1024], %v;
add.u32 %i, %i, 4; setp.lt.u32 %p, %i, {SHARED_BYTES}; @%p bra FILL;
"""
        text.append(f""".visible .entry load{rank}{head}{copy_in}
mbarrier.init.shared.b64 [%base], 1;
fence.proxy.async;
mbarrier.arrive.expect_tx.shared.b64 %x, [%base], %bytes;
cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
 [%place], [%map, {{{coords}}}], [%base];
mov.u32 %i, 0;
WAIT: mbarrier.try_wait.parity.shared.b64 %p, [%base], 0; @%p bra DONE;
add.u32 %i, %i, 1; setp.lt.u32 %p, %i, 20; @%p bra WAIT;
st.global.b32 [%flag], 1;
DONE: mov.u32 %i, 0;
COPY: add.u32 %k, %base, %i; ld.shared.b32 %v, [%k+1024];
cvt.u64.u32 %x, %i; add.u64 %x, %x, %image; st.global.b32 [%x], %v;
add.u32 %i, %i, 4; setp.lt.u32 %p, %i, {SHARED_BYTES}; @%p bra COPY;
ret;
}}
.visible .entry store{rank}{head}{copy_in}
fence.proxy.async;
cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group [%map, {{{coords}}}], [%place];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
ret;
}}
""")
    return "".join(text)


class Gpu:
    """The few driver calls that the cases need."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        context, device, self.module = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuModuleLoadData", ctypes.byref(self.module), ptx().encode())
        self.tensor, self.image, self.small = (self.allocate(n) for n in (GLOBAL_BYTES, SHARED_BYTES, 256))

    def call(self, name: str, *arguments) -> None:
        code = getattr(self.driver, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} returned {code}")

    def allocate(self, nbytes: int) -> int:
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        return pointer.value

    def put(self, address: int, data: np.ndarray) -> None:
        host = ctypes.c_void_p(data.ctypes.data)
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), host, ctypes.c_size_t(data.nbytes))

    def get(self, address: int, nbytes: int) -> np.ndarray:
        data = np.empty(nbytes, np.uint8)
        host = ctypes.c_void_p(data.ctypes.data)
        self.call("cuMemcpyDtoH_v2", host, ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
        return data

    def encode(self, case: dict, address: int) -> bytes | None:
        """The driver's tensor map, or None if it rejects the parameters."""
        buffer = (ctypes.c_uint8 * 192)()
        place = (ctypes.addressof(buffer) + 63) // 64 * 64
        rank = len(case["extents"])
        code = self.driver.cuTensorMapEncodeTiled(
            ctypes.c_void_p(place),
            TYPES.index(case["dtype"]),
            rank,
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*case["extents"]),
            (ctypes.c_uint64 * max(rank - 1, 1))(*case["strides"]),
            (ctypes.c_uint32 * rank)(*case["box"]),
            (ctypes.c_uint32 * rank)(*case["element_strides"]),
            0,
            SWIZZLES.index(case["swizzle"]),
            case["l2_promotion"],
            int(case["nan_fill"]),
        )
        return None if code else ctypes.string_at(place, 128)

    def run(self, case: dict, number: int) -> dict:
        """What the copy of a case does; raises RuntimeError on a fault."""
        tensor_map = (ctypes.c_uint8 * 128).from_buffer_copy(self.encode(case, self.tensor))
        steps = [1, *case["element_strides"][1:]]
        nbytes = math.prod(-(-b // s) for b, s in zip(case["box"], steps)) * element_bytes(case["dtype"])
        tensor = special_floats() if case["data"] == "floats" else noise(0, GLOBAL_BYTES)
        load = case["kind"] == "load"
        image = np.full(SHARED_BYTES, SHARED_FILL, np.uint8) if load else noise(number, SHARED_BYTES)
        self.put(self.tensor, tensor)
        self.put(self.image, image)
        self.put(self.small, np.array([*case["coords"], *[0] * (32 - len(case["coords"]))], np.int32))
        arguments = [tensor_map, ctypes.c_uint64(self.small), ctypes.c_uint32(case["offset"]), ctypes.c_uint32(nbytes)]
        arguments += [ctypes.c_uint64(self.image), ctypes.c_uint64(self.small + 64)]
        function = ctypes.c_void_p()
        name = f"{case['kind']}{len(case['extents'])}".encode()
        self.call("cuModuleGetFunction", ctypes.byref(function), self.module, name)
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self.call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, SHARED_BYTES + 1024, None, pointers, None)
        self.call("cuCtxSynchronize")
        after = self.get(self.image, SHARED_BYTES) if load else self.get(self.tensor, GLOBAL_BYTES)
        completed = not self.get(self.small + 64, 4).any()
        return {"completed": completed, "digest": hashlib.sha256(after.tobytes()).hexdigest()[:16]}


def work(output: Path) -> None:
    """Appends results to ``output`` (one JSON line per case) from the first case that is missing until a fault."""
    done = len(output.read_text().splitlines()) if output.exists() else 0
    gpu = Gpu()
    with output.open("a") as file:
        for number, case in enumerate(copies()):
            if number < done:
                continue
            shown = gpu.encode(case, 0x7F0012345670)
            case["map"] = shown and shown[:64].hex()
            try:
                if shown is not None and case["kind"] != "encode":
                    case.update(gpu.run(case, number))
            except RuntimeError as error:
                case["fault"] = str(error)
            file.write(json.dumps(case) + "\n")
            file.flush()
            if "fault" in case:
                sys.exit(_FAULT)


def main() -> None:
    target = Path(sys.argv[1])
    lines = target.with_suffix(".jsonl")
    if sys.argv[2:] == ["--work"]:
        work(lines)
        return
    lines.unlink(missing_ok=True)
    while code := subprocess.run([sys.executable, __file__, str(target), "--work"]).returncode:
        if code != _FAULT:
            sys.exit("the worker failed")
    cases = [json.loads(line) for line in lines.read_text().splitlines()]
    lines.unlink()
    target.write_text("[\n" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases) + "\n]\n")
    print(f"{len(cases)} cases, {sum('fault' in case for case in cases)} faults")


if __name__ == "__main__":
    main()
