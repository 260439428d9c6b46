"""Small PTX kernels around wgmma, ldmatrix and stmatrix, with their inputs: one list for the emulator and for a GPU.

Operands are small integers, so that every sum is exact in any accumulation order and width. NumPy alone is needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

THREADS = 128
ROWS = 64
SPANS = {"none": 16, "32B": 32, "64B": 64, "128B": 128}
MODES = {"none": 0, "128B": 1, "64B": 2, "32B": 3}
NBYTES = {"e4m3": 1, "e5m2": 1, "f16": 2, "bf16": 2, "tf32": 4}
INTEGERS = {"s8": np.int8, "u8": np.uint8}
_SMALL = np.arange(-8, 9)


def noise(name: str, count: int) -> np.ndarray:
    """Bytes that any machine and library version reproduces."""
    return np.frombuffer(hashlib.shake_256(name.encode()).digest(count), np.uint8).copy()


def small_integers(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return _SMALL[noise(name, int(np.prod(shape))) % len(_SMALL)].reshape(shape)


def encode(values: np.ndarray, name: str) -> np.ndarray:
    """Bit patterns of small integers. TF32 gets noise in the 13 bits that its operands do not have."""
    if name in INTEGERS:
        return values.astype(INTEGERS[name]).view(np.uint8)
    if name == "f16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.astype(np.float32).view(np.uint32)
    if name == "bf16":
        return (bits >> 16).astype(np.uint16)
    if name == "tf32":
        return bits | np.resize(noise("tf32", 999).astype(np.uint32) * 31 & 0x1FFF, bits.shape)
    exponent_bits = {"e4m3": 4, "e5m2": 5}[name]
    mantissa_bits = 7 - exponent_bits
    exponent = (bits >> 23 & 0xFF).astype(np.int64) - 127 + (1 << exponent_bits - 1) - 1
    magnitude = exponent << mantissa_bits | bits >> (23 - mantissa_bits) & ((1 << mantissa_bits) - 1)
    return (np.where(values == 0, 0, magnitude) | (values < 0) << 7).astype(np.uint8)


@dataclass(frozen=True)
class Layout:
    """A canonical shared-memory layout: byte offsets of the elements, and the offsets that the descriptor needs."""

    swizzle: str
    mn_major: bool
    nbytes: int
    leading: int
    stride: int

    def offsets(self, rows: int, columns: int) -> np.ndarray:
        """Byte offset of each element [rows, columns of K]."""
        row, k = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
        span = SPANS[self.swizzle]
        fast, slow = (row, k) if self.mn_major else (k, row)
        byte = fast * self.nbytes
        if self.swizzle == "none":
            by_chunk, by_line = (self.stride, self.leading) if self.mn_major else (self.leading, self.stride)
            return byte // 16 * by_chunk + byte % 16 + slow // 8 * by_line + slow % 8 * 16
        if not self.mn_major and int(byte.max()) >= span:
            raise ValueError("K-major rows longer than the swizzle span")
        # Lines of the pattern, counted in units of 128 bytes, are XORed into the number of the 16-byte chunk.
        line = slow % 8
        chunk = byte % span // 16 ^ line * span // 128
        return byte // span * self.leading + slow // 8 * self.stride + line * span + chunk * 16 + byte % 16


@dataclass(frozen=True)
class Wgmma:
    """One chain of wgmmas by one warpgroup.

    Attributes:
        a_type, b_type: element types.
        n: columns of D.
        a_in_registers: A from registers.
        a_swizzle, b_swizzle: layouts of the operands in shared memory.
        a_mn_major, b_mn_major: MN-major operands.
        steps: wgmmas, each for the next 32 bytes of K.
        accumulate: scale-d of the first one.
        scale_a, scale_b: 1 or -1.
        gap: bytes added to the distance between swizzle atoms, so that no two offsets are equal by accident.
        first_row: row of the swizzle pattern in which the (K-major) operands start.
    """

    a_type: str = "e4m3"
    b_type: str = "e4m3"
    n: int = 32
    a_in_registers: bool = False
    a_swizzle: str = "128B"
    b_swizzle: str = "128B"
    a_mn_major: bool = False
    b_mn_major: bool = False
    steps: int = 1
    accumulate: bool = True
    scale_a: int = 1
    scale_b: int = 1
    gap: int = 0
    first_row: int = 0

    @property
    def k(self) -> int:
        """K of one wgmma."""
        return 32 // _nbytes(self.a_type)

    @property
    def opcode(self) -> str:
        """Shape and types."""
        return f"m64n{self.n}k{self.k}.f32.{self.a_type}.{self.b_type}"

    def immediates(self) -> list[int]:
        """The operands behind scale-d."""
        flags = [self.scale_a, self.scale_b]
        if _nbytes(self.a_type) == 2:
            flags += ([] if self.a_in_registers else [int(self.a_mn_major)]) + [int(self.b_mn_major)]
        return flags

    def accumulators(self, d: np.ndarray) -> np.ndarray:
        """Numbers [64, n] in the accumulator's type."""
        return d.astype(np.float32)

    def layout(self, which: str) -> Layout:
        swizzle, mn_major, name = (
            (self.a_swizzle, self.a_mn_major, self.a_type)
            if which == "a"
            else (self.b_swizzle, self.b_mn_major, self.b_type)
        )
        span, nbytes = SPANS[swizzle], _nbytes(name)
        groups = self.k * self.steps // 8  # groups of 8 K elements of an MN-major operand
        atom = 8 * span + self.gap
        if mn_major and swizzle == "none":
            return Layout(swizzle, True, nbytes, leading=atom, stride=atom * groups)
        if mn_major:
            return Layout(swizzle, True, nbytes, leading=atom * groups, stride=atom)
        if swizzle == "none":
            chunks = 2 * self.steps
            return Layout(swizzle, False, nbytes, leading=atom, stride=atom * chunks)
        return Layout(swizzle, False, nbytes, leading=16, stride=atom)

    def values(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A [64, K], B [n, K] and the old D [64, n], small integers."""
        key = repr(replace(self, a_in_registers=False))
        k = self.k * self.steps
        return (
            small_integers("A" + key, (ROWS, k)),
            small_integers("B" + key, (self.n, k)),
            small_integers("D" + key, (ROWS, self.n)),
        )

    def expected(self) -> np.ndarray:
        """[64, n] in the accumulator's type."""
        a, b, d = self.values()
        return self.accumulators(self.scale_a * self.scale_b * (a @ b.T) + (d if self.accumulate else 0))

    def image(self) -> tuple[np.ndarray, dict[str, list[int]]]:
        """Bytes of shared memory, and per operand the start offset of each step."""
        a, b, _ = self.values()
        image = noise("image", 160 * 1024)
        starts: dict[str, list[int]] = {}
        end = 0
        for which, values, name in (("a", a, self.a_type), ("b", b, self.b_type)):
            if which == "a" and self.a_in_registers:
                continue
            base = -(-end // 1024) * 1024
            rows, columns = values.shape
            layout = self.layout(which)
            offsets = base + layout.offsets(rows + self.first_row, columns)[self.first_row :]
            raw = np.ascontiguousarray(encode(values, name)).view(np.uint8).reshape(*values.shape, -1)
            for byte in range(_nbytes(name)):
                image[offsets + byte] = raw[..., byte]
            # Descriptors hold addresses before the XOR of the pattern, which leaves the first row of a pattern alone.
            start = base + self.first_row * SPANS[layout.swizzle]
            starts[which] = [start + int(layout.offsets(1, columns)[0, step * self.k]) for step in range(self.steps)]
            end = int(offsets.max()) + _nbytes(name)
        return image[: -(-end // 2048) * 2048].copy(), starts

    def registers(self) -> np.ndarray:
        """uint32 [4 * steps + n / 2, 128]: A fragments (zero if A is in shared memory), then accumulators."""
        a, _, d = self.values()
        result = np.zeros((4 * self.steps + self.n // 2, THREADS), np.uint32)
        per_word = 4 // _nbytes(self.a_type)
        codes = encode(a, self.a_type)
        for thread in range(THREADS):
            row = thread // 32 * 16 + thread % 32 // 4
            for j in range(4 * self.steps if self.a_in_registers else 0):
                k = j // 4 * self.k + (thread % 4 + 4 * (j % 4 // 2)) * per_word
                word = np.ascontiguousarray(codes[row + 8 * (j % 2), k : k + per_word])
                result[j, thread] = word.view(np.uint32)[0]
        for j in range(self.n // 2):
            result[4 * self.steps + j] = self.accumulators(d).view(np.uint32)[accumulator_index(j)]
        return result

    def fragments(self, d: np.ndarray) -> np.ndarray:
        """uint32 [n / 2, 128] of 32-bit [64, n]."""
        return np.stack([d.view(np.uint32)[accumulator_index(j)] for j in range(self.n // 2)])

    def ptx(self) -> str:
        """Parameters: image, registers, result."""
        image, starts = self.image()
        count = self.n // 2
        body = [_copy_in(len(image))]
        for j in range((4 * self.steps if self.a_in_registers else 0), 4 * self.steps):
            body.append(f"mov.b32 %a{j}, 0;")
        for j in range(4 * self.steps if self.a_in_registers else 0):
            body.append(f"ld.global.b32 %a{j}, [%in+{4 * THREADS * j}];")
        for j in range(count):
            body.append(f"ld.global.b32 %d{j}, [%in+{4 * THREADS * (4 * self.steps + j)}];")
        body.append("fence.proxy.async;\nbar.sync 0;\nwgmma.fence.sync.aligned;")
        d = ", ".join(f"%d{j}" for j in range(count))
        for step in range(self.steps):
            body.append(f"setp.ne.b32 %p, {int(self.accumulate or step > 0)}, 0;")
            operands = []
            for which in "ab":
                if which == "a" and self.a_in_registers:
                    operands.append("{" + ", ".join(f"%a{4 * step + j}" for j in range(4)) + "}")
                    continue
                layout = self.layout(which)
                constant = starts[which][step] >> 4 | layout.leading >> 4 << 16 | layout.stride >> 4 << 32
                constant |= MODES[layout.swizzle] << 62
                body.append(f"add.u64 %{which}desc, %base, {constant:#x};")
                operands.append(f"%{which}desc")
            operands = [f"{{{d}}}", *operands, "%p", *map(str, self.immediates())]
            body.append(f"wgmma.mma_async.sync.aligned.{self.opcode} {', '.join(operands)};")
        body.append("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;")
        body += [f"st.global.b32 [%out+{4 * THREADS * j}], %d{j};" for j in range(count)]
        return _kernel("\n".join(body), f".reg .b32 %a<{4 * self.steps}>, %d<{count}>; .reg .b64 %adesc, %bdesc;")


@dataclass(frozen=True)
class IntegerWgmma(Wgmma):
    """A chain of integer wgmmas over all values of their types, with accumulators near both ends of int32.

    Attributes:
        saturate: ``.satfinite``.
    """

    a_type: str = "s8"
    b_type: str = "u8"
    saturate: bool = False

    @property
    def opcode(self) -> str:
        saturate = ".satfinite" if self.saturate else ""
        return f"m64n{self.n}k{self.k}{saturate}.s32.{self.a_type}.{self.b_type}"

    def immediates(self) -> list[int]:
        return []

    def accumulators(self, d: np.ndarray) -> np.ndarray:
        return d.astype(np.int32)

    def values(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A [64, K], B [n, K] and the old D [64, n], int64. Every third of D overflows with small sums, if it may."""
        key = repr(replace(self, a_in_registers=False, saturate=False))
        k = self.k * self.steps
        operands = []
        for which, name, rows in (("A", self.a_type, ROWS), ("B", self.b_type, self.n)):
            values = noise(which + key, rows * k).view(INTEGERS[name]).reshape(rows, k).astype(np.int64)
            values[0], values[-1] = np.iinfo(INTEGERS[name]).min, np.iinfo(INTEGERS[name]).max
            operands.append(values)
        d = noise("D" + key, 4 * ROWS * self.n).view(np.int32).reshape(ROWS, self.n).astype(np.int64)
        d[0::3] = 2**31 - 1 - np.abs(d[0::3]) % 2**17
        d[1::3] = -(2**31) + np.abs(d[1::3]) % 2**17
        return (*operands, d)

    def expected(self) -> np.ndarray:
        """int32 [64, n]: one instruction after the other, as each of them wraps or saturates."""
        a, b, d = self.values()
        total = d if self.accumulate else np.zeros_like(d)
        for step in range(self.steps):
            part = slice(step * self.k, (step + 1) * self.k)
            total = total + a[:, part] @ b[:, part].T
            total = total.clip(-(2**31), 2**31 - 1) if self.saturate else (total + 2**31) % 2**32 - 2**31
        return self.accumulators(total)


def _nbytes(name: str) -> int:
    return 1 if name in INTEGERS else NBYTES[name]


def accumulator_index(j: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) in D of register j of each of the 128 threads, thread by thread."""
    rows, columns = [], []
    for thread in range(THREADS):
        warp, lane = divmod(thread, 32)
        rows.append(16 * warp + lane // 4 + (8 if j % 4 >= 2 else 0))
        columns.append(8 * (j // 4) + 2 * (lane % 4) + j % 2)
    return np.array(rows), np.array(columns)


def wgmma_cases() -> Iterator[Wgmma]:
    for name in NBYTES:
        for swizzle in SPANS:
            span_steps = max(SPANS[swizzle] // 32, 1)
            base = Wgmma(name, name, a_swizzle=swizzle, b_swizzle=swizzle, steps=span_steps)
            yield base
            yield replace(base, gap=1024, n=40, accumulate=False)
            yield replace(base, a_in_registers=True, n=24)
    for swizzle in SPANS:
        base = Wgmma("f16", "f16", steps=2, n=144)
        yield replace(base, a_swizzle=swizzle, a_mn_major=True)
        yield replace(base, b_swizzle=swizzle, b_mn_major=True, gap=1024)
        yield replace(base, b_swizzle=swizzle, b_mn_major=True, a_in_registers=True, n=8)
        both = replace(base, a_swizzle=swizzle, b_swizzle=swizzle, a_mn_major=True, b_mn_major=True)
        yield replace(both, a_type="bf16", b_type="bf16", n=64)
    for n in range(8, 257, 8):
        yield Wgmma(n=n, a_in_registers=n % 16 == 0)
    for a_type, b_type in (("e4m3", "e5m2"), ("e5m2", "e4m3")):
        yield Wgmma(a_type, b_type)
        yield Wgmma(a_type, b_type, a_in_registers=True, steps=4)
    for name in NBYTES:
        yield Wgmma(name, name, scale_a=-1)
        yield Wgmma(name, name, scale_b=-1, a_in_registers=True)
        yield Wgmma(name, name, scale_a=-1, scale_b=-1, accumulate=False)
    for swizzle in ("32B", "64B", "128B"):
        for first_row in (1, 3, 6):
            steps = SPANS[swizzle] // 32
            yield Wgmma(a_swizzle=swizzle, b_swizzle=swizzle, first_row=first_row, steps=steps, n=48)
    yield Wgmma("bf16", "bf16", a_swizzle="64B", b_swizzle="32B")
    yield Wgmma("f16", "f16", a_swizzle="none", b_swizzle="128B", b_mn_major=True, n=128)


def integer_wgmma_cases() -> Iterator[IntegerWgmma]:
    """Not among those that were recorded on a GPU: against integer arithmetic."""
    for a_type in INTEGERS:
        for b_type in INTEGERS:
            for saturate in (False, True):
                for swizzle in SPANS:
                    steps = max(SPANS[swizzle] // 32, 1)
                    base = IntegerWgmma(
                        a_type, b_type, a_swizzle=swizzle, b_swizzle=swizzle, saturate=saturate, steps=steps
                    )
                    yield base
                    yield replace(base, gap=1024, n=48, accumulate=False)
                    yield replace(base, a_in_registers=True, n=24)
    for n in (8, 16, *range(64, 257, 16)):
        yield IntegerWgmma(n=n, a_in_registers=n % 32 == 0, b_swizzle="none", saturate=n % 64 == 0)


@dataclass(frozen=True)
class MatrixMove:
    """One ldmatrix or stmatrix by each of four warps."""

    store: bool
    count: int
    transposed: bool

    @property
    def key(self) -> str:
        return repr(self)

    def rows(self) -> np.ndarray:
        """Which of the 16-byte rows of the image each thread names, no row twice: [128] of 256."""
        return np.argsort(noise("rows" + self.key, 512).view(np.uint16), kind="stable")[:THREADS]

    def image(self) -> np.ndarray:
        return noise("image" + self.key, 4096)

    def registers(self) -> np.ndarray:
        """uint32 [1 + count, 128]: offset of the row that each thread names, then the data of a store."""
        data = noise("registers" + self.key, 4 * THREADS * self.count).view(np.uint32).reshape(-1, THREADS)
        return np.concatenate([(self.rows() * 16).astype(np.uint32)[None], data])

    def expected(self) -> np.ndarray:
        """The image after a store; of a load the registers [count, 128]. Element by element."""
        image = self.image().view(np.uint16).copy()
        registers = self.registers()[1:].copy()
        rows = self.rows()
        halves = registers.view(np.uint16).reshape(self.count, THREADS, 2)
        for thread in range(THREADS):
            warp, lane = divmod(thread, 32)
            for matrix in range(self.count):
                for half in range(2):
                    row, column = lane // 4, 2 * (lane % 4) + half
                    if self.transposed:
                        row, column = column, row
                    place = rows[32 * warp + 8 * matrix + row] * 8 + column
                    if self.store:
                        image[place] = halves[matrix, thread, half]
                    else:
                        halves[matrix, thread, half] = image[place]
        return image.view(np.uint8) if self.store else registers

    def ptx(self) -> str:
        """Parameters: image, registers, result."""
        regs = ", ".join(f"%d{j}" for j in range(self.count))
        form = f"sync.aligned.m8n8.x{self.count}{'.trans' if self.transposed else ''}.shared.b16"
        body = [_copy_in(4096), "bar.sync 0;", "ld.global.b32 %i, [%in];\nadd.u32 %i, %i, %shared;"]
        if self.store:
            body += [f"ld.global.b32 %d{j}, [%in+{4 * THREADS * (j + 1)}];" for j in range(self.count)]
            body.append(f"stmatrix.{form} [%i], {{{regs}}};\nbar.sync 0;")
            for j in range(8):
                body.append(f"ld.shared.b32 %v0, [%mine+{512 * j}];\nst.global.b32 [%out+{512 * j}], %v0;")
        else:
            body.append(f"ldmatrix.{form} {{{regs}}}, [%i];")
            body += [f"st.global.b32 [%out+{4 * THREADS * j}], %d{j};" for j in range(self.count)]
        return _kernel("\n".join(body), f".reg .b32 %d<{self.count}>;")


def matrix_cases() -> Iterator[MatrixMove]:
    for store in (False, True):
        for count in (1, 2, 4):
            for transposed in (False, True):
                yield MatrixMove(store, count, transposed)


def _copy_in(nbytes: int) -> str:
    """Copies the image to shared memory, 16 bytes per thread and turn."""
    text = []
    for start in range(0, nbytes, 16 * THREADS):
        text.append(f"ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%image+{start}];")
        text.append(f"st.shared.v4.b32 [%wide+{start}], {{%v0, %v1, %v2, %v3}};")
    return "\n".join(text)


def _kernel(body: str, registers: str) -> str:
    return f""".version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry k(.param .u64 p_image, .param .u64 p_in, .param .u64 p_out)
{{
.reg .pred %p; .reg .b32 %thread, %shared, %wide, %mine, %i, %v<4>; .reg .b64 %image, %in, %out, %x, %base;
{registers}
mov.u32 %thread, %tid.x;
ld.param.u64 %image, [p_image]; ld.param.u64 %in, [p_in]; ld.param.u64 %out, [p_out];
mul.wide.u32 %x, %thread, 16; add.u64 %image, %image, %x;
mul.wide.u32 %x, %thread, 4; add.u64 %in, %in, %x; add.u64 %out, %out, %x;
mov.u32 %shared, dynamic;
shl.b32 %wide, %thread, 4; add.u32 %wide, %wide, %shared;
shl.b32 %mine, %thread, 2; add.u32 %mine, %mine, %shared;
shr.u32 %i, %shared, 4; and.b32 %i, %i, 0x3FFF; cvt.u64.u32 %base, %i;
{body}
ret;
}}
"""
