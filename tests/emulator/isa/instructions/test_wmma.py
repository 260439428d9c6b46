"""wmma.load, wmma.mma and wmma.store: products of matrices in memory, in every shape, type and layout."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import BarrierMisuse, GlobalMemoryRace, UnsupportedPTX
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.aligned_sums import Rules, dot
from tests.emulator.matrix_cases import encode
from tests.emulator.mma_launch import BITS
from tests.emulator.ptx_launch import launch
from tests.emulator.sum_inputs import numbers

WIDE = ("m16n16k16", "m32n8k16", "m8n32k16")
#: Type of A and B, shapes, types of C and D.
FORMS = [
    *(("f16", shape, c, d) for shape in WIDE for c in ("f32", "f16") for d in ("f32", "f16")),
    *(("bf16", shape, "f32", "f32") for shape in WIDE),
    *((t, shape, "s32", "s32") for t in ("s8", "u8") for shape in WIDE),
    ("tf32", "m16n16k8", "f32", "f32"), ("f64", "m8n8k4", "f64", "f64"),
    *((t, "m8n8k32", "s32", "s32") for t in ("s4", "u4")), ("b1", "m8n8k128", "s32", "s32"),
]  # fmt: skip
NUMPY = {"f16": np.float16, "f32": np.float32, "s32": np.int32, "f64": np.float64}
LOWEST = {"s8": (-128, 128), "u8": (0, 256), "s4": (-8, 8), "u4": (0, 16), "b1": (0, 2)}


def sides(shape: str) -> tuple[int, int, int]:
    m, n, k = shape[1:].replace("n", " ").replace("k", " ").split()
    return int(m), int(n), int(k)


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Lines of elements as bytes; those of less than a byte lie from the lowest bits on."""
    if bits >= 8:
        return np.ascontiguousarray(codes).view(np.uint8)
    lines = codes.reshape(len(codes), -1, 8 // bits).astype(np.uint8)
    return np.bitwise_or.reduce(lines << (np.arange(8 // bits, dtype=np.uint8) * bits), axis=-1)


def image(matrix: np.ndarray, bits: int, layout: str, padding: int) -> tuple[np.ndarray, int]:
    """(bytes in memory with ``padding`` behind each line, stride in elements)."""
    lines = packed(matrix if layout == "row" else matrix.T, bits)
    return np.pad(lines, ((0, 0), (0, padding)), constant_values=0xA5), (lines.shape[1] + padding) * 8 // bits


def names(first: int, count: int, kind: str) -> str:
    return f"{{{', '.join(f'%{kind}{first + i}' for i in range(count))}}}"


def fragment(type_: str, shape: str, side: str) -> int:
    """Registers by the PTX ISA's table."""
    m, n, k = sides(shape)
    if side in "cd":
        return m * n // 32 // (2 if type_ == "f16" else 1)
    return 8 if type_ == "f16" else max((m if side == "a" else n) * k * BITS[type_] // (32 * max(BITS[type_], 32)), 1)


class Product:
    """A kernel of one product.

    Args:
        type_, shape, c_type, d_type: of the operands.
        layouts: of A, B, C and D in memory.
        extra: qualifier of wmma.mma: satfinite, a rounding, or an operation of bits.
        shared: operands and result are copied through shared memory.
        padding: bytes behind each line; 0: strides are left out.
        more: an instruction between wmma.mma and wmma.store.
    """

    def __init__(
        self, type_: str, shape: str, c_type: str, d_type: str, layouts: str = "row col row row", *, extra: str = "",
        shared: bool = False, padding: int = 0, more: str = "",
    ) -> None:  # fmt: skip
        self.type_, self.shape, self.c_type, self.d_type = type_, shape, c_type, d_type
        self.layouts, self.extra, self.shared, self.padding, self.more = layouts.split(), extra, shared, padding, more

    def text(self, sizes: list[int], strides: list[int]) -> str:
        kind = "d" if self.type_ == "f64" else "r"
        types = (self.type_, self.type_, self.c_type, self.d_type)
        lists = [names(50 + 10 * i, fragment(t, self.shape, s), kind) for i, (s, t) in enumerate(zip("abcd", types))]
        space = "shared" if self.shared else "global"
        body = [f"ld.param.u64 %d{i}, [p{i}];" for i in range(4)]
        where, starts = [f"[%d{i}]" for i in range(4)], np.cumsum([0, *sizes]).tolist()
        if self.shared:
            body.append("mov.u32 %r0, dynamic; mov.u32 %r1, %laneid; mul.lo.u32 %r1, %r1, 4; cvt.u64.u32 %d9, %r1;")
            where = [f"[%r0+{start}]" for start in starts[:4]]
            body.append("add.u32 %r2, %r0, %r1;")
        for i in range(4 if self.shared else 0):
            body.append(f"add.u64 %d10, %d{i}, %d9;")
            for at in range(0, sizes[i], 128):
                body.append(f"ld.global.b32 %r3, [%d10+{at}]; st.shared.b32 [%r2+{starts[i] + at}], %r3;")
        body.append("bar.warp.sync -1;")
        head = [f"sync.aligned.{layout}.{self.shape}.{space}.{t}" for layout, t in zip(self.layouts, types)]
        ends = [f", {stride}" if self.padding else "" for stride in strides]
        ends[1] = ", %r4" if self.padding else ""
        body.append(f"mov.u32 %r4, {strides[1]};")
        body += [f"wmma.load.{n}.{head[i]} {lists[i]}, {where[i]}{ends[i]};" for i, n in enumerate("abc")]
        of_bits = f".{self.extra}.popc" if self.extra in ("xor", "and") else ""
        rounding = f".{self.extra}" if self.extra.startswith("r") else ""
        saturate = ".satfinite" if self.extra == "satfinite" else ""
        given = (self.d_type, self.c_type) if self.type_ == "f16" else (self.d_type, *types[:2], self.c_type)
        layouts = ".".join(self.layouts[:2])
        opcode = f"wmma.mma{of_bits}.sync.aligned.{layouts}.{self.shape}{rounding}.{'.'.join(given)}{saturate}"
        body += [f"{opcode} {lists[3]}, {', '.join(lists[:3])};", self.more]
        body.append(f"wmma.store.d.{head[3]} {where[3]}, {lists[3]}{ends[3]};")
        if self.shared:
            body.append("bar.warp.sync -1; add.u64 %d10, %d3, %d9;")
            for at in range(0, sizes[3], 128):
                body.append(f"ld.shared.b32 %r3, [%r2+{starts[3] + at}]; st.global.b32 [%d10+{at}], %r3;")
        return module("\n".join([*body, "ret;"]), parameters=4, target="sm_90a")

    def run(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        """D [m, n] of the bit patterns of A [m, k] and B [k, n], and of C [m, n]."""
        m, n, _ = sides(self.shape)
        bits = (BITS[self.type_],) * 2 + (8 * c.itemsize, 8 * np.dtype(NUMPY[self.d_type]).itemsize)
        d = np.zeros((m, n), NUMPY[self.d_type])
        made = [image(x, w, layout, self.padding) for x, w, layout in zip((a, b, c, d), bits, self.layouts)]
        arrays = [aligned(x) for x, _ in made]
        text = self.text([x.size for x in arrays], [stride for _, stride in made])
        options = Options(arithmetic="silicon")
        launch(text, *arrays, dynamic_smem=sum(x.size for x in arrays), options=options)
        lines, size = arrays[3], bits[3] // 8
        kept = lines[:, : lines.shape[1] - self.padding]
        assert (lines[:, kept.shape[1] :] == 0xA5).all()
        got = np.ascontiguousarray(kept).view(f"u{size}").view(d.dtype)
        return got if self.layouts[3] == "row" else got.T


def small(type_: str, shape: tuple[int, int], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(integers, their bit patterns)."""
    values = rng.integers(*LOWEST.get(type_, (-8, 9)), shape)
    if type_ == "f64":
        return values, values.astype(np.float64).view(np.uint64)
    return values, values & (1 << BITS[type_]) - 1 if type_ in LOWEST and BITS[type_] < 8 else encode(values, type_)


def expected(type_: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, d_type: str, extra: str = "") -> np.ndarray:
    total = c.astype(np.float64 if type_ in ("f16", "bf16", "tf32", "f64") else np.int64)
    if type_ == "b1":
        pairs = a[:, :, None], b[None]
        total = total + (pairs[0] ^ pairs[1] if extra == "xor" else pairs[0] & pairs[1]).sum(1)
    else:
        total = total + a @ b
    if extra == "satfinite":
        total = np.clip(total, -(2**31), 2**31 - 1)
    return total.astype(NUMPY[d_type])


def extras(type_: str) -> tuple[str, ...]:
    return {"f64": ("", "rz"), "b1": ("xor", "and")}.get(type_, ("", "satfinite") if type_ in LOWEST else ("",))


@pytest.mark.parametrize(("type_", "shape", "c_type", "d_type"), FORMS)
def test_small_integers(type_: str, shape: str, c_type: str, d_type: str) -> None:
    """Every layout in global and in shared memory, with padding between lines and without."""
    m, n, k = sides(shape)
    rng = np.random.default_rng(m + k)
    layouts = [(a, b, c, d) for a, b in ((0, 1), (0, 0), (1, 0), (1, 1)) for c, d in ((0, 1), (1, 0))]
    if BITS[type_] < 8:
        layouts = layouts[:2]
    for i, (order, extra) in enumerate(itertools.product(layouts, extras(type_))):
        (a, a_codes), (b, b_codes) = small(type_, (m, k), rng), small(type_, (k, n), rng)
        c = rng.integers(-99, 99, (m, n)).astype(NUMPY[c_type])
        if c_type == "s32":
            c[0], c[1] = 2**31 - 1, -(2**31)
        words = " ".join(("row", "col")[x] for x in order)
        product = Product(
            type_, shape, c_type, d_type, words, extra=extra, shared=i % 3 == 0, padding=(0, 32)[i % 2]
        )
        got = product.run(a_codes, b_codes, c)
        assert np.array_equal(got, expected(type_, a, b, c, d_type, extra)), (words, extra)


@pytest.mark.parametrize(("type_", "shape", "c_type"), [
    *(("f16", shape, c) for shape in WIDE for c in ("f32", "f16")), ("bf16", "m32n8k16", "f32"),
    ("bf16", "m8n32k16", "f32"), ("tf32", "m16n16k8", "f32"),
])  # fmt: skip
def test_sums_are_those_of_mma_sync_on_the_chip(type_: str, shape: str, c_type: str) -> None:
    """What ptxas makes of the instruction; an H100 leaves the same bits."""
    m, n, k = sides(shape)
    rng = np.random.default_rng(n)
    a, b = numbers(rng, type_, (m, k), "near"), numbers(rng, type_, (k, n), "near")
    c = numbers(rng, c_type, (m, n), "near").astype(np.uint16 if c_type == "f16" else np.uint32)
    unit = np.uint32 if type_ == "tf32" else np.uint16
    got = Product(type_, shape, c_type, c_type).run(a.astype(unit), b.astype(unit), c.view(NUMPY[c_type]))
    step = 16 if type_ == "tf32" else 32  # bytes of K: two products of mma.sync, one after the other
    rules = Rules(25, 0, step, (4 if c_type == "f16" else -108) - 25)
    for i, j in np.ndindex(m, n):
        wanted = dot(a[i].tolist(), b[:, j].tolist(), int(c[i, j]), (type_, type_), c_type, rules)
        assert int(got.view(c.dtype)[i, j]) == wanted, (i, j)


def test_a_fragment_of_c_is_one_of_d() -> None:
    """Programs scale accumulators element by element, and add to what they have."""
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-4, 5, (16, 16)) for _ in "ab")
    c = rng.integers(-99, 99, (16, 16)).astype(np.float32)
    scaled = "\n".join(f"mul.f32 %r{80 + i}, %r{80 + i}, 0f40000000; add.f32 %r{80 + i}, %r{80 + i}, %r{70 + i};"
                       for i in range(8))  # fmt: skip
    got = Product("f16", "m16n16k16", "f32", "f32", more=scaled).run(encode(a, "f16"), encode(b, "f16"), c)
    assert np.array_equal(got, 2 * (a @ b + c) + c)


LOAD = "wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {%r10, %r11, %r12, %r13, %r14, %r15, %r16, %r17}, [%d0]"
STORE = "wmma.store.d.sync.aligned.row.m16n16k16.global.f16 [%d0], {%r10, %r11, %r12, %r13}"


@pytest.mark.parametrize("instruction", [f"@%p1 {LOAD};", f"@%p1 {STORE};"])
def test_all_lanes_take_part(instruction: str) -> None:
    head = "ld.param.u64 %d0, [p0]; mov.u32 %r1, %laneid; setp.lt.u32 %p1, %r1, 16;"
    with pytest.raises(BarrierMisuse, match="executed by lanes"):
        launch(module(f"{head}\n{instruction}\nret;", parameters=1), aligned(np.zeros((16, 16), np.float16)))


def test_matrices_that_two_warps_access_are_races() -> None:
    body = f"ld.param.u64 %d0, [p0];\n{STORE};\nret;"
    with pytest.raises(GlobalMemoryRace, match=r"wmma\.store"):
        launch(module(body, parameters=1), aligned(np.zeros((16, 16), np.float16)), block=(64, 1, 1))


def mma(rest: str) -> str:
    return f"wmma.mma.{rest} {{%r1}}, {{%r2}}, {{%r3}}, {{%r4}}"


@pytest.mark.parametrize(("instruction", "message"), [
    ("wmma.load.a.sync.aligned.row.m16n16k8.f16 {%r1}, [%d0]", "m16n16k8 does not exist here"),
    ("wmma.load.a.sync.aligned.row.m16n16k16.local.f16 {%r1}, [%d0]", "does not exist"),
    ("wmma.load.b.sync.aligned.row.m8n8k32.s4 {%r1}, [%d0]", "qualifier .row does not exist here; it takes .col"),
    ("wmma.load.c.sync.aligned.row.m16n16k16.f16 {%r1}, [%d0]", "operand c of .*: must be a list of 4 reg"),
    (mma("sync.aligned.row.col.m16n16k16.s32.s8.u8.s32"), "qualifier .* it takes"),
    (mma("sync.aligned.row.row.m8n8k32.s32.s4.s4.s32"), "qualifier .row does not go with"),
    (mma("sync.aligned.row.col.m8n8k128.s32.b1.b1.s32"), "qualifier .* it takes"),
    (mma("sync.aligned.row.col.m16n16k16.f32.f32.satfinite"), "qualifier .satfinite does not"),
    (mma("sync.aligned.row.col.m16n16k16.f32.f32"), "operand d of .*: must be a list of 8 registers"),
])  # fmt: skip
def test_other_forms_are_refused(instruction: str, message: str) -> None:
    with pytest.raises(UnsupportedPTX, match=message):
        launch(module(f"{instruction};\nret;", parameters=0))
