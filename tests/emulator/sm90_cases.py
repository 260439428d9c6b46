"""Small kernels around instructions that sm_90 has, with inputs and expected results: for the emulator and for a GPU.

Expected results come from NumPy and Python alone. Matrix operands are small integers, so that every sum is exact in any
order and width of accumulation. `record_cases_on_gpu.py` records what an H200 makes of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tests.emulator.matrix_cases import encode, noise

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 dynamic[];\n"


@dataclass(frozen=True, eq=False)
class Case:
    """One launch.

    Attributes:
        name: unique.
        text: module with one entry ``k`` that takes the address of each array, inputs first, then ``out``.
        inputs: may be written by the kernel.
        expected: what the kernel leaves in ``out``, which it finds filled with 0xAB.
        block, grid, cluster, shared: of the launch; bytes of dynamic shared memory.
    """

    name: str
    text: str
    inputs: tuple[np.ndarray, ...]
    expected: np.ndarray
    block: int = 32
    grid: int = 1
    cluster: int = 1
    shared: int = 4096

    def __repr__(self) -> str:
        return self.name


def kernel(body: str, inputs: int, registers: str = "") -> str:
    """A module; ``%in0``, ... and ``%out`` are the addresses, ``%t`` is %tid.x, ``%word`` its word in ``out``."""
    names = [f"in{i}" for i in range(inputs)] + ["out"]
    parameters = ", ".join(f".param .u64 p_{name}" for name in names)
    loads = "\n".join(f"ld.param.u64 %{name}, [p_{name}];" for name in names)
    declared = ", ".join(f"%{name}" for name in names)
    return (
        f"{HEAD}.visible .entry k({parameters}) {{\n"
        f".reg .b64 {declared}, %word, %x<40>; .reg .b32 %t, %r<60>; .reg .b16 %h<20>; .reg .pred %p<9>;\n{registers}\n"
        f"{loads}\nmov.u32 %t, %tid.x;\nmul.wide.u32 %word, %t, 4;\nadd.s64 %word, %out, %word;\n{body}\nret;\n}}\n"
    )


def digest(result: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(result).tobytes()).hexdigest()[:16]


# --- mma.sync ---------------------------------------------------------------------------------------------------------

MMA_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
MMA_FORMS = [
    *((16, 8, k, "f32", t, t) for k in (8, 16) for t in ("f16", "bf16")),
    *((16, 8, k, "f16", "f16", "f16") for k in (8, 16)),
    *((16, 8, k, "f32", "tf32", "tf32") for k in (4, 8)),
    *((16, 8, 32, d, a, b) for d in ("f32", "f16") for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
    *((m, 8, k, "s32", a, b) for m, k in ((8, 16), (16, 16), (16, 32)) for a in ("s8", "u8") for b in ("s8", "u8")),
]


@dataclass(frozen=True)
class MmaOperands:
    """Operands of one mma.sync and the fragments that hold them.

    Attributes:
        a, b, c: [m, k], [n, k] and [m, n], small integers.
    """

    m: int
    n: int
    k: int
    d_type: str
    a_type: str
    b_type: str
    a: np.ndarray = field(repr=False)
    b: np.ndarray = field(repr=False)
    c: np.ndarray = field(repr=False)

    def opcode(self, suffix: str = "") -> str:
        shape = f"m{self.m}n{self.n}k{self.k}"
        return f"mma.sync.aligned.{shape}.row.col{suffix}.{self.d_type}.{self.a_type}.{self.b_type}.{self.d_type}"

    def fragment(self, values: np.ndarray, name: str) -> np.ndarray:
        """uint32 [registers, 32]: PTX ISA, one element at a time."""
        codes = values.astype(np.uint8) if name in ("s8", "u8") else encode(values, name)
        return self.pack(codes, MMA_BYTES[name])

    def pack(self, codes: np.ndarray, nbytes: int) -> np.ndarray:
        """The same for bit patterns [rows, k]."""
        rows = len(codes)
        per = 4 // nbytes
        out = np.zeros((rows * self.k * nbytes // 128, 32), np.uint32)
        for j in range(len(out)):
            for lane in range(32):
                row = lane // 4 + 8 * (j % (rows // 8))
                for i in range(per):
                    column = (j // (rows // 8) * 4 + lane % 4) * per + i
                    out[j, lane] |= int(codes[row, column]) << 8 * nbytes * i
        return out

    def accumulators(self, values: np.ndarray) -> np.ndarray:
        """uint32 [registers, 32] of [m, n]."""
        kind = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[self.d_type]
        items = np.zeros((self.m // 8 * 2, 32), kind)
        for i in range(len(items)):
            for lane in range(32):
                items[i, lane] = values[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2]
        if self.d_type == "f16":
            pairs = items.view(np.uint16).astype(np.uint32)
            return pairs[::2] | pairs[1::2] << np.uint32(16)
        return items.view(np.uint32)

    def registers(self) -> np.ndarray:
        parts = self.fragment(self.a, self.a_type), self.fragment(self.b, self.b_type), self.accumulators(self.c)
        return np.concatenate(parts)

    def text(self, suffix: str = "") -> str:
        """Registers from in0, D to out."""
        counts = [len(self.fragment(self.a, self.a_type)), len(self.fragment(self.b, self.b_type))]
        counts.append(len(self.accumulators(self.c)))
        total = sum(counts)
        body = ["mul.wide.u32 %x0, %t, 4;", "add.s64 %x0, %in0, %x0;"]
        body += [f"ld.global.b32 %r{j}, [%x0+{128 * j}];" for j in range(total)]
        names = [f"%r{j}" for j in range(total)]
        groups = [names[: counts[0]], names[counts[0] : counts[0] + counts[1]], names[-counts[2] :]]
        a, b, c = (f"{{{', '.join(group)}}}" for group in groups)
        body.append(f"{self.opcode(suffix)} {c}, {a}, {b}, {c};")
        body += [f"st.global.b32 [%word+{128 * j}], {name};" for j, name in enumerate(groups[2])]
        return kernel("\n".join(body), 1)


def mma_operands(form: tuple, key: str = "") -> MmaOperands:
    m, n, k, d, a, b = form

    def integers(name: str, shape: tuple[int, int], kind: str) -> np.ndarray:
        raw = noise(f"{name}{form}{key}", shape[0] * shape[1]).reshape(shape)
        return raw.astype(np.int64) % 17 - (0 if kind == "u8" else 8)

    return MmaOperands(*form, integers("A", (m, k), a), integers("B", (n, k), b), integers("C", (m, n), d))


def mma_cases() -> Iterator[Case]:
    for form in MMA_FORMS:
        x = mma_operands(form)
        yield Case(f"mma {x.opcode()}", x.text(), (x.registers(),), x.accumulators(x.a @ x.b.T + x.c))
    form = (16, 8, 32, "s32", "s8", "u8")
    x = mma_operands(form)
    c = np.where(x.a @ x.b.T > 0, (1 << 31) - 3, -(1 << 31) + 3)
    x = MmaOperands(*form, x.a, x.b, c)
    exact = x.a @ x.b.T + c
    wrapped = ((exact + (1 << 31)) % (1 << 32) - (1 << 31)).astype(np.int64)
    yield Case("mma wraps", x.text(), (x.registers(),), x.accumulators(wrapped))
    saturated = np.clip(exact, -(1 << 31), (1 << 31) - 1)
    yield Case("mma saturates", x.text(".satfinite"), (x.registers(),), x.accumulators(saturated))


# --- cp.async ---------------------------------------------------------------------------------------------------------


def cp_async_cases() -> Iterator[Case]:
    source = noise("cp.async", 32 * 32)
    for cache, nbytes in (("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)):
        words = nbytes // 4
        base = [f"mul.lo.u32 %r0, %t, {nbytes};", "mov.u32 %r1, dynamic;", "add.u32 %r1, %r1, %r0;"]
        base += ["cvt.u64.u32 %x0, %r0;", "add.s64 %x1, %out, %x0;", "add.s64 %x0, %in0, %x0;"]
        after = [f"ld.shared.b32 %r9, [%r1+{4 * j}];\nst.global.b32 [%x1+{4 * j}], %r9;" for j in range(words)]
        plain = source[: 32 * nbytes].reshape(32, nbytes)
        copy = f"cp.async.{cache}.shared.global [%r1], [%x0], {nbytes}"
        forms = {
            "whole, wait_all": (f"{copy};\ncp.async.wait_all;", plain),
            "whole, groups": (f"{copy};\ncp.async.commit_group;\ncp.async.wait_group 0;", plain),
        }
        part = plain.copy()
        part[:, nbytes - 3 :] = 0
        forms["part"] = (f"{copy}, {nbytes - 3};\ncp.async.wait_all;", part)
        counts = np.arange(32) % (nbytes + 1)
        ragged = np.where(np.arange(nbytes) < counts[:, None], plain, 0).astype(np.uint8)
        forms["ragged"] = (f"rem.u32 %r2, %t, {nbytes + 1};\n{copy}, %r2;\ncp.async.wait_all;", ragged)
        ignored = np.where(np.arange(32)[:, None] < 5, 0, plain).astype(np.uint8)
        forms["ignore"] = (f"setp.lt.u32 %p0, %t, 5;\n{copy}, %p0;\ncp.async.wait_all;", ignored)
        for name, (text, expected) in forms.items():
            body = "\n".join([*base, text, *after])
            yield Case(f"cp.async.{cache} {nbytes} {name}", kernel(body, 1), (source,), expected.reshape(-1))
    for noinc in (True, False):
        count = 32 if noinc else 1  # without .noinc the arrivals add to the count of the phase, so one more is needed
        arrive = "cp.async.mbarrier.arrive.noinc.shared.b64" if noinc else "cp.async.mbarrier.arrive.shared.b64"
        body = f"""
            mov.u32 %r1, dynamic;
            setp.eq.u32 %p0, %t, 0;
            @%p0 mbarrier.init.shared.b64 [%r1], {count};
            bar.sync 0;
            mad.lo.u32 %r2, %t, 4, %r1;
            mul.wide.u32 %x0, %t, 4;
            add.s64 %x0, %in0, %x0;
            cp.async.ca.shared.global [%r2+128], [%x0], 4;
            {arrive} [%r1];
            {"" if noinc else "bar.sync 0; @%p0 mbarrier.arrive.shared.b64 %x9, [%r1];"}
            WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
            @!%p1 bra WAIT;
            xor.b32 %r3, %t, 1;
            mad.lo.u32 %r2, %r3, 4, %r1;
            ld.shared.b32 %r4, [%r2+128];
            st.global.b32 [%word], %r4;
        """
        expected = source[:128].view(np.uint32)[np.arange(32) ^ 1]
        yield Case(f"cp.async.mbarrier.arrive noinc={noinc}", kernel(body, 1), (source,), expected)
