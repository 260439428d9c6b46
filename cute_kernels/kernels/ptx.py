"""Instructions that CuTe DSL has no public wrapper for, each function named after the instruction it emits."""

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, Uint32

from cute_kernels.dsl import dsl_user_op, nvvm


def _emitted(instruction: str, kind: type, operands: tuple, loc: Any) -> Any:
    names = ", ".join(f"{{$r{i}}}" for i in range(len(operands)))
    return cute.arch.inline_ptx(
        f"{instruction} {{$w0}}, {names};", write_only_types=[kind], read_only_args=list(operands), loc=loc
    )


def _instruction(name: str, kind: type) -> Callable[..., Any]:
    """The function of an instruction with one result of this type, which takes its operands in their order."""

    @dsl_user_op
    def emit(*operands: Any, loc=None) -> Any:
        return _emitted(name, kind, operands, loc)

    return emit


# --- arithmetic: ``.rn`` is never contracted with what stands before or behind it, as the compiler does with operators


add_rn_f32 = _instruction("add.rn.f32", Float32)
mul_rn_f32 = _instruction("mul.rn.f32", Float32)
fma_rn_f32 = _instruction("fma.rn.f32", Float32)
"""Fused multiply-add, rounded once to nearest even."""
div_rn_f32 = _instruction("div.rn.f32", Float32)
rcp_rn_f32 = _instruction("rcp.rn.f32", Float32)
sqrt_rn_f32 = _instruction("sqrt.rn.f32", Float32)
max_nan_f32 = _instruction("max.NaN.f32", Float32)
"""The greater; NaN if either is one."""

mul_rn_sat_f32 = _instruction("mul.rn.sat.f32", Float32)
fma_rn_sat_f32 = _instruction("fma.rn.sat.f32", Float32)
"""``.sat``: rounded once to nearest even, then into [0, 1]; of NaN 0."""

mul_rn_f16x2 = _instruction("mul.rn.f16x2", Int32)
fma_rn_f16x2 = _instruction("fma.rn.f16x2", Int32)
mul_rn_sat_f16x2 = _instruction("mul.rn.sat.f16x2", Int32)
fma_rn_sat_f16x2 = _instruction("fma.rn.sat.f16x2", Int32)
"""Operands are registers of two FP16 numbers each."""

dp4a_u32 = _instruction("dp4a.u32.u32", Uint32)
"""Products of the four unsigned bytes of the first with those of the second, added to the third."""
shf_r_wrap_b32 = _instruction("shf.r.wrap.b32", Uint32)
"""The lower word of ``second : first`` shifted right by ``third % 32`` bits."""

cvt_rn_satfinite_e4m3x2_f32 = _instruction("cvt.rn.satfinite.e4m3x2.f32", Int16)
"""Two FP32 numbers rounded to E4M3, to nearest even, the second one in the lower byte; beyond 448 they become 448."""
cvt_rn_satfinite_e4m3x2_f16x2 = _instruction("cvt.rn.satfinite.e4m3x2.f16x2", Int16)
"""Both FP16 numbers of a register rounded to E4M3, in their order; beyond 448 they become 448."""
cvt_rn_f16x2_f32 = _instruction("cvt.rn.f16x2.f32", Int32)
"""Two FP32 numbers rounded to FP16, the second one in the lower half of the register."""
cvt_rn_satfinite_f16x2_f32 = _instruction("cvt.rn.satfinite.f16x2.f32", Int32)
"""Two FP32 numbers rounded to FP16, likewise; what is beyond 65504 becomes that."""


@dsl_user_op
def cvt_f32_f16x2(halves: Int32, *, loc=None) -> tuple[Float32, Float32]:
    """Both FP16 numbers of a register in FP32, the lower one first."""
    return cute.arch.inline_ptx(
        "{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, {$r0};\n\t"
        "cvt.f32.f16 {$w0}, low;\n\tcvt.f32.f16 {$w1}, high;\n\t}",
        write_only_types=[Float32, Float32],
        read_only_args=[halves],
        loc=loc,
    )


@dsl_user_op
def add_rn_bf16x2_by_fma(a: Int32, b: Int32, *, loc=None) -> Int32:
    """Two sums of BF16, each rounded once to nearest even, where ``add.bf16x2`` (sm_90 and later) is missing."""
    text = "{\n\t.reg .b32 ones;\n\tmov.b32 ones, 0x3F803F80;\n\tfma.rn.bf16x2 {$w0}, {$r0}, ones, {$r1};\n\t}"
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[a, b], loc=loc)


Pair = tuple[Float32, Float32]


@dsl_user_op
def fma_rn_f32x2(a: Pair, b: Pair, c: Pair, *, loc=None) -> Pair:
    """Two fused multiply-adds in one issue slot (sm_100 and later), each rounded once to nearest even."""
    return cute.arch.fma_packed_f32x2(a, b, c, rnd="rn", loc=loc)


@dsl_user_op
def mul_rn_f32x2(a: Pair, b: Pair, *, loc=None) -> Pair:
    """Two FP32 products in one issue slot (sm_100 and later)."""
    return cute.arch.mul_packed_f32x2(a, b, rnd="rn", loc=loc)


@dsl_user_op
def mov_b32(bits: int, *, loc=None) -> Int32:
    """Constant bits in a register: pairs of FP16 have no immediate operands."""
    return cute.arch.inline_ptx(f"mov.b32 {{$w0}}, {bits:#x};", write_only_types=[Int32], read_only_args=[], loc=loc)


@dsl_user_op
def redux_sync_add_u32(value: Uint32, *, loc=None) -> Uint32:
    """Sum over a warp, of which all lanes take part."""
    return _emitted("redux.sync.add.u32", Uint32, (value, Int32(-1)), loc)


# --- memory and synchronisation --------------------------------------------------------------------------------------

@dsl_user_op
def tcgen05_fence_before_thread_sync(*, loc=None) -> None:
    """Orders this thread's completed tcgen05 operations before the synchronisation that follows."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC, loc=loc)


@dsl_user_op
def tcgen05_fence_after_thread_sync(*, loc=None) -> None:
    """Orders the synchronisation just observed before this thread's next tcgen05 operations."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC, loc=loc)


@dsl_user_op
def mbarrier_try_wait_relaxed_cluster(barrier: cute.Pointer, parity: Int32, *, loc=None) -> None:
    """Waits for the phase of ``parity`` on a barrier on which other CTAs arrive, without acquiring ordinary memory.

    Enough where the handed-over data is tensor memory and ``tcgen05.fence`` orders it. An acquire at cluster scope
    compiles to CCTL.IVALL: it would throw away the L1 that holds the bias + position table, once per tile.
    """
    _mbarrier_try_wait("relaxed.cluster", barrier, parity, loc)


@dsl_user_op
def mbarrier_try_wait_acquire_cluster(barrier: cute.Pointer, parity: Int32, *, loc=None) -> None:
    """Waits for the phase of ``parity``, and acquires what threads of other CTAs of the cluster wrote before it."""
    _mbarrier_try_wait("acquire.cluster", barrier, parity, loc)


def _mbarrier_try_wait(order: str, barrier: cute.Pointer, parity: Int32, loc: Any) -> None:
    cute.arch.inline_ptx(
        "{\n\t.reg .pred complete;\n\tWAIT:\n\t"
        f"mbarrier.try_wait.parity.{order}.shared::cta.b64 complete, [{{$r0}}], {{$r1}};\n\t"
        "@!complete bra WAIT;\n\t}",
        read_only_args=[barrier.toint(loc=loc), Int32(parity)],
        loc=loc,
    )


def griddepcontrol() -> None:
    """Programmatic dependent launch: what came before overlaps the end of the kernel before this one.

    Global memory is read and written only after this. The kernel after this one may begin likewise as soon as
    multiprocessors become free.
    """
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()


@dsl_user_op
def prefetch_global_l2(source: cute.Pointer, *, loc=None) -> None:
    """Asks for the cache line of an address."""
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[source.toint(loc=loc)], loc=loc)
