"""Cases of sm90_cases.py for memory: atomics, asynchronous stores, bulk copies, tensor maps, local memory."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from tests.emulator.matrix_cases import noise
from tests.emulator.sm90_cases import Case, kernel

ELEMENTS = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64, "u32": np.uint32,
    "s32": np.int32, "b32": np.uint32, "u64": np.uint64, "s64": np.int64, "b64": np.uint64, "b16": np.uint16,
}  # fmt: skip
REGISTER = {2: "%h", 4: "%r", 8: "%x"}


def values(name: str, kind: str, count: int) -> np.ndarray:
    """Floats that are small multiples of 1/4, so that sums are exact in every type; any integers."""
    dtype = np.dtype(ELEMENTS[kind])
    raw = noise(name, 8 * count).view(np.int64)[:count]
    if kind in ("f16", "bf16", "f32", "f64"):
        return (raw % 33 / 4 - 4).astype(dtype)
    return raw.view(np.uint64).astype(f"u{dtype.itemsize}").view(dtype)


def update(name: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Element by element, in Python."""
    dtype = old.dtype
    wrap = 1 << 8 * dtype.itemsize
    floating = dtype.kind not in "ui"

    def one(a, b):
        a, b = (float(a), float(b)) if floating else (int(a), int(b))
        result = {
            "add": lambda: a + b, "min": lambda: min(a, b), "max": lambda: max(a, b), "and": lambda: a & b,
            "or": lambda: a | b, "xor": lambda: a ^ b, "exch": lambda: b, "inc": lambda: 0 if a >= b else a + 1,
            "dec": lambda: b if a == 0 or a > b else a - 1,
        }[name]()  # fmt: skip
        return result if floating else result % wrap

    out = [one(a, b) for a, b in zip(old.tolist(), new.tolist(), strict=True)]
    return np.array(out).astype(dtype) if floating else np.array(out, f"u{dtype.itemsize}").view(dtype)


# --- atomics: every thread its own element, so that the order does not matter -----------------------------------------

ATOMICS = [
    *((op, t) for op in ("add", "min", "max") for t in ("u32", "s32", "u64", "s64") if (op, t) != ("add", "s64")),
    *((op, t) for op in ("and", "or", "xor", "exch") for t in ("b32", "b64")),
    *((op, "u32") for op in ("inc", "dec")),
    *(("add", t) for t in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")),
]


def atomic_cases() -> Iterator[Case]:
    for op, kind in ATOMICS:
        element = kind.removesuffix("x2")
        count = 64 if kind.endswith("x2") else 32
        old, new = values(f"old{op}{kind}", element, count), values(f"new{op}{kind}", element, count)
        after = update(op, old, new)
        nbytes = old.nbytes // 32
        register = REGISTER[nbytes]
        flags = ".noftz" if element in ("f16", "bf16") else ""
        load = f"ld.global.b{8 * nbytes} {register}9, [%x1];"
        place = f"mul.wide.u32 %x0, %t, {nbytes};\nadd.s64 %x1, %in1, %x0;\nadd.s64 %x2, %out, %x0;\n{load}"
        atom = f"atom.global.{op}{flags}.{kind} {register}10, [%x3], {register}9;"
        body = f"{place}\nadd.s64 %x3, %in0, %x0;\n{atom}\nst.global.b{8 * nbytes} [%x2], {register}10;"
        body += f"\nld.global.b{8 * nbytes} {register}11, [%x3];"
        body += f"\nst.global.b{8 * nbytes} [%x2+{old.nbytes}], {register}11;"
        yield Case(f"atom.global.{op}.{kind}", kernel(body, 2), (old, new), np.concatenate([old, after]))
        if op == "exch":
            continue
        shared = f"""{place}
            mov.u32 %r1, dynamic;
            mad.lo.u32 %r1, %t, {nbytes}, %r1;
            add.s64 %x3, %in0, %x0;
            ld.global.b{8 * nbytes} {register}12, [%x3];
            st.shared.b{8 * nbytes} [%r1], {register}12;
            red.shared.{op}{flags}.{kind} [%r1], {register}9;
            ld.shared.b{8 * nbytes} {register}11, [%r1];
            st.global.b{8 * nbytes} [%x2], {register}11;"""
        yield Case(f"red.shared.{op}.{kind}", kernel(shared, 2), (old, new), after)
    for kind in ("b16", "b32", "b64"):
        old, new = values(f"old cas{kind}", kind, 32), values(f"new cas{kind}", kind, 32)
        guess = np.where(np.arange(32) % 3, old, new)
        nbytes = old.itemsize
        r = REGISTER[nbytes]
        body = f"""mul.wide.u32 %x0, %t, {nbytes};
            add.s64 %x1, %in1, %x0;
            ld.global.b{8 * nbytes} {r}9, [%x1];
            add.s64 %x1, %in2, %x0;
            ld.global.b{8 * nbytes} {r}10, [%x1];
            add.s64 %x1, %in0, %x0;
            add.s64 %x2, %out, %x0;
            atom.global.cas.{kind} {r}11, [%x1], {r}9, {r}10;
            st.global.b{8 * nbytes} [%x2], {r}11;
            ld.global.b{8 * nbytes} {r}11, [%x1];
            st.global.b{8 * nbytes} [%x2+{old.nbytes}], {r}11;"""
        after = np.where(old == guess, new, old)
        yield Case(f"atom.global.cas.{kind}", kernel(body, 3), (old, guess, new), np.concatenate([old, after]))
    for vector, kind in (("v2", "f32"), ("v4", "f32"), ("v4", "f16"), ("v8", "bf16"), ("v4", "f16x2")):
        element = kind.removesuffix("x2")
        count = 32 * int(vector[1]) * (2 if kind.endswith("x2") else 1)
        old, new = values(f"old{vector}{kind}", element, count), values(f"new{vector}{kind}", element, count)
        nbytes, each = old.nbytes // 32, old.nbytes // 32 // int(vector[1])
        names = [f"{REGISTER[each]}{9 + i}" for i in range(int(vector[1]))]
        loads = "\n".join(f"ld.global.b{8 * each} {name}, [%x1+{each * i}];" for i, name in enumerate(names))
        flags = "" if element == "f32" else ".noftz"
        body = f"""mul.wide.u32 %x0, %t, {nbytes};
            add.s64 %x1, %in0, %x0;
            add.s64 %x2, %out, %x0;
            {loads}
            {"".join(f"st.global.b{8 * each} [%x2+{each * i}], {name};" for i, name in enumerate(names))}
            add.s64 %x1, %in1, %x0;
            {loads}
            red.global.{vector}.{kind}.add{flags} [%x2], {{{", ".join(names)}}};"""
        body = body.replace(f"{vector}.{kind}.add{flags}", f"add{flags}.{vector}.{kind}")
        yield Case(f"red.global.add.{vector}.{kind}", kernel(body, 2), (old, new), update("add", old, new))
    tiny = np.array([1e-40, -1e-40, 1.5e-38, -1.2e-38, 0.0, -0.0, 1.0, 2e-38], np.float32)
    old, new = np.repeat(tiny, 4), np.tile(tiny[[0, 3, 5, 7]], 8)

    def flushed(x: np.ndarray) -> np.ndarray:
        return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)

    body = "add.s64 %x1, %in0, %word;\nsub.s64 %x1, %x1, %out;\nld.global.b32 %r1, [%x1];\nst.global.b32 [%word], %r1;"
    body += "\nadd.s64 %x1, %in1, %word;\nsub.s64 %x1, %x1, %out;\nld.global.b32 %r1, [%x1];"
    yield Case(
        "red.global.add.f32 flushes",
        kernel(f"{body}\nred.global.add.f32 [%word], %r1;", 2),
        (old, new),
        flushed(flushed(old) + flushed(new)),
    )
    shared = "mov.u32 %r3, dynamic;\nmad.lo.u32 %r3, %t, 4, %r3;\nld.global.b32 %r2, [%word];\n"
    shared += "st.shared.b32 [%r3], %r2;"
    shared += "\nred.shared.add.f32 [%r3], %r1;\nld.shared.b32 %r2, [%r3];\nst.global.b32 [%word], %r2;"
    yield Case("red.shared.add.f32 keeps subnormals", kernel(f"{body}\n{shared}", 2), (old, new), old + new)


# --- bulk copies ------------------------------------------------------------------------------------------------------

INIT = """
    mov.u32 %r1, dynamic;
    setp.eq.u32 %p0, %t, 0;
    @%p0 mbarrier.init.shared.b64 [%r1], 1;
    @%p0 fence.mbarrier_init.release.cluster;
    fence.proxy.async;
    bar.sync 0;
"""
WAIT = "WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;\n@!%p1 bra WAIT;\n"
SHARED_TO_OUT = "mad.lo.u32 %r2, %t, 4, %r1;\nld.shared.b32 %r3, [%r2+128];\nst.global.b32 [%word], %r3;\n"


def bulk_cases() -> Iterator[Case]:
    data = noise("bulk", 128)
    expect = "@%p0 mbarrier.arrive.expect_tx.shared.b64 %x9, [%r1], 128;\n"
    load = "@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%in0], 128, [%r1];\n"
    start = f"{INIT}add.u32 %r4, %r1, 128;\n{expect}"
    yield Case("cp.async.bulk load", kernel(start + load + WAIT + SHARED_TO_OUT, 1), (data,), data)
    fill = "mad.lo.u32 %r2, %t, 4, %r1;\nadd.s64 %x1, %in0, %word;\nsub.s64 %x1, %x1, %out;\n"
    fill += "ld.global.b32 %r3, [%x1];\nst.shared.b32 [%r2+128], %r3;\nfence.proxy.async;\nbar.sync 0;\n"
    done = "@%p0 cp.async.bulk.commit_group;\n@%p0 cp.async.bulk.wait_group 0;\n"
    store = "@%p0 cp.async.bulk.global.shared::cta.bulk_group [%out], [%r4], 128;\n"
    yield Case("cp.async.bulk store", kernel(f"{INIT}add.u32 %r4, %r1, 128;\n{fill}{store}{done}", 1), (data,), data)
    for op, kind in (
        *(("add", t) for t in ("f16", "bf16", "u32", "s32", "u64", "f32", "f64")),
        *((op, t) for op in ("min", "max") for t in ("f16", "bf16", "u32", "s32", "u64", "s64")),
        *((op, "b32") for op in ("and", "or", "xor")),
    ):
        count = 128 // np.dtype(ELEMENTS[kind]).itemsize
        old, new = values(f"bulk old{op}{kind}", kind, count), values(f"bulk new{op}{kind}", kind, count)
        flags = ".noftz" if op == "add" and kind in ("f16", "bf16") else ""
        reduce = f"@%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}{flags}.{kind} [%in1], [%r4], 128;\n"
        back = "bar.sync 0;\nadd.s64 %x1, %in1, %word;\nsub.s64 %x1, %x1, %out;\nld.global.b32 %r3, [%x1];\n"
        body = f"{INIT}add.u32 %r4, %r1, 128;\n{fill}{reduce}{done}{back}st.global.b32 [%word], %r3;"
        yield Case(f"cp.reduce.async.bulk.{op}.{kind}", kernel(body, 2), (new, old), update(op, old, new))
    yield from cluster_cases()


def cluster_cases() -> Iterator[Case]:
    """Two CTAs; each writes to the other's shared memory and stores what it received."""
    words = noise("cluster", 256).view(np.uint32)
    start = f"""{INIT}
        @%p0 mbarrier.arrive.expect_tx.shared.b64 %x9, [%r1], 128;
        mov.u32 %r20, %cluster_ctarank;
        xor.b32 %r21, %r20, 1;
        mapa.shared::cluster.u32 %r22, %r1, %r21;
        mad.lo.u32 %r23, %r20, 32, %t;
        mul.wide.u32 %x1, %r23, 4;
        add.s64 %x2, %out, %x1;
        add.s64 %x1, %in0, %x1;
        ld.global.b32 %r3, [%x1];
        mad.lo.u32 %r2, %t, 4, %r1;
        mad.lo.u32 %r24, %t, 4, %r22;
        mov.b32 %r5, 1000;
        st.shared.b32 [%r2+128], %r5;
        fence.proxy.async;
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
    """
    end = f"""{WAIT}
        ld.shared.b32 %r3, [%r2+128];
        st.global.b32 [%x2], %r3;
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
    """
    swapped = words.reshape(2, 32)[::-1].reshape(-1).copy()
    st = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r24+128], %r3, [%r22];"
    red = "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{}.u32 [%r24+128], %r3, [%r22];"
    copy = """
        st.shared.b32 [%r2+256], %r3;
        fence.proxy.async;
        bar.sync 0;
        add.u32 %r6, %r1, 256;
        add.u32 %r7, %r22, 128;
        @%p0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r7], [%r6], 128, [%r22];
    """
    multicast = """
        mov.b16 %h1, 3;
        setp.eq.u32 %p2, %r20, 0;
        and.pred %p2, %p2, %p0;
        add.u32 %r7, %r1, 128;
        @%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
            [%r7], [%in0], 128, [%r1], %h1;
    """
    for name, text, expected in (
        ("st.async", st, swapped),
        ("red.async.add", red.format("add"), swapped + np.uint32(1000)),
        ("red.async.min", red.format("min"), np.minimum(swapped, 1000).astype(np.uint32)),
        ("cp.async.bulk to another CTA", copy, swapped),
        ("cp.async.bulk multicast", multicast, np.tile(words[:32], 2)),
    ):
        yield Case(name, kernel(start + text + end, 1), (words,), expected, grid=2, cluster=2)


# --- tensor maps that the kernel makes --------------------------------------------------------------------------------


def tensor_map_cases() -> Iterator[Case]:
    """A 2-D map of int32 [8 of 12 rows, 16 of 20 columns], made of zeros field by field; loads and reductions."""
    tensor = noise("tensor", 12 * 20 * 4).view(np.int32).copy()
    fields = [
        ("global_address", "", "%in0", "b64"), ("rank", "", "1", "b32"), ("box_dim", "0, ", "8", "b32"),
        ("box_dim", "1, ", "4", "b32"), ("global_dim", "0, ", "16", "b32"), ("global_dim", "1, ", "8", "b32"),
        ("global_stride", "0, ", "80", "b64"), ("element_stride", "0, ", "1", "b32"),
        ("element_stride", "1, ", "1", "b32"), ("elemtype", "", "3", "b32"),
        ("interleave_layout", "", "0", "b32"), ("swizzle_mode", "", "0", "b32"),
        ("fill_mode", "", "0", "b32"),
    ]  # fmt: skip
    for space in ("shared::cta", "global"):
        where = "[%r5]" if space == "shared::cta" else "[%in1]"
        replace = "\n".join(
            f"@%p0 tensormap.replace.tile.{name}.{space}.b1024.{kind} {where}, {ordinal}{value};"
            for name, ordinal, value, kind in fields
        )
        if space == "shared::cta":
            copy = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
            publish = f"{copy} [%in1], [%r5], 128;"
        else:
            publish = "@%p0 fence.proxy.tensormap::generic.release.gpu;"
        start = f"""{INIT}
            mov.u32 %r6, 0;
            mad.lo.u32 %r2, %t, 4, %r1;
            add.u32 %r5, %r1, 256;
            st.shared.b32 [%r2+256], %r6;
            bar.sync 0;
            {replace}
            bar.warp.sync 0xffffffff;
            {publish}
            fence.proxy.tensormap::generic.acquire.gpu [%in1], 128;
            add.u32 %r4, %r1, 128;
        """
        load = f"""
            @%p0 mbarrier.arrive.expect_tx.shared.b64 %x9, [%r1], 128;
            @%p0 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
                [%r4], [%in1, {{12, 6}}], [%r1];
            {WAIT}{SHARED_TO_OUT}
        """
        expected = np.zeros((4, 8), np.int32)
        expected[:2, :4] = tensor.reshape(12, 20)[6:8, 12:16]
        zeros = np.zeros(128, np.uint8)
        yield Case(f"tensormap.replace {space}", kernel(start + load, 2), (tensor, zeros), expected.reshape(-1))
    for op in ("add", "min", "max", "and", "or", "xor"):
        new = noise(f"reduce {op}", 128).view(np.int32)
        reduce = f"""
            add.s64 %x1, %in2, %word;
            sub.s64 %x1, %x1, %out;
            ld.global.b32 %r3, [%x1];
            st.shared.b32 [%r2+128], %r3;
            fence.proxy.async;
            bar.sync 0;
            @%p0 cp.reduce.async.bulk.tensor.2d.global.shared::cta.{op}.tile.bulk_group [%in1, {{12, 6}}], [%r4];
            @%p0 cp.async.bulk.commit_group;
            @%p0 cp.async.bulk.wait_group 0;
            bar.sync 0;
            mov.u32 %r7, %t;
            COPY:
            mul.wide.u32 %x1, %r7, 4;
            add.s64 %x2, %in0, %x1;
            ld.global.b32 %r3, [%x2];
            add.s64 %x2, %out, %x1;
            st.global.b32 [%x2], %r3;
            add.u32 %r7, %r7, 32;
            setp.lt.u32 %p3, %r7, 240;
            @%p3 bra COPY;
        """
        after = tensor.reshape(12, 20).copy()
        part = after[6:8, 12:16]
        part[...] = update(op, part.reshape(-1), new.reshape(4, 8)[:2, :4].reshape(-1)).reshape(2, 4)
        text = kernel(start + reduce, 3)
        yield Case(f"cp.reduce.async.bulk.tensor {op}", text, (tensor, np.zeros(128, np.uint8), new), after.reshape(-1))


# --- local memory -----------------------------------------------------------------------------------------------------


def local_cases() -> Iterator[Case]:
    """Each thread writes squares to its own array, and reads them in another order through both kinds of address."""
    for generic in (False, True):
        body = f"""
            mov.b64 %x1, depot;
            {"cvta.local.u64 %x1, %x1;" if generic else ""}
            mov.u32 %r1, 0;
            FILL:
            add.u32 %r2, %r1, %t;
            mul.lo.u32 %r2, %r2, %r2;
            mul.wide.u32 %x2, %r1, 4;
            add.s64 %x3, %x1, %x2;
            st{"" if generic else ".local"}.b32 [%x3], %r2;
            add.u32 %r1, %r1, 1;
            setp.lt.u32 %p0, %r1, 8;
            @%p0 bra FILL;
            and.b32 %r1, %t, 7;
            mul.wide.u32 %x2, %r1, 4;
            add.s64 %x3, %x1, %x2;
            ld{"" if generic else ".local"}.b32 %r2, [%x3];
            ld{"" if generic else ".local"}.v2.b32 {{%r3, %r4}}, [%x1+24];
            xor.b32 %r2, %r2, %r4;
            st.global.b32 [%word], %r2;
        """
        t = np.arange(32, dtype=np.uint32)
        expected = (t + t % 8) ** 2 ^ (t + 7) ** 2
        yield Case(f"local memory generic={generic}", kernel(body, 0, ".local .align 8 .b8 depot[32];"), (), expected)


def memory_cases() -> Iterator[Case]:
    """All of them."""
    yield from atomic_cases()
    yield from bulk_cases()
    yield from tensor_map_cases()
    yield from local_cases()
