"""Faults planted in three kernels, and what the first report of each has to name."""

from __future__ import annotations

import importlib.util
import linecache
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cute_kernels.diagnostics.diagnosis import diagnose
from cute_kernels.diagnostics.model import Diagnostic
from cute_kernels.emulator.errors import EmulatorError, error_behind
from cute_kernels.programs import capture

PROGRAMS = Path(__file__).parent / "programs"
ARCHITECTURES = {"gemm_sm90": "sm_90a", "gemm_sm100": "sm_100a", "pipeline": "sm_90a", "bias_add": "sm_90a"}


@dataclass(frozen=True)
class Fault:
    """A fault in a program."""

    program: str
    name: str
    old: str
    new: str
    kinds: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    count: int = 1


def _fault(program, name, old, new, *words, count=1):
    return Fault(program, name, old, new, (), words, count)


FAULTS = [
    _fault("pipeline", "consumer's wrong phase", "mbarrier_wait(full + stage, i // STAGES & 1)", "mbarrier_wait(full + stage, (i // STAGES & 1) ^ 1)"),
    _fault("pipeline", "producer's wrong phase", "(i // STAGES & 1) ^ 1)", "(i // STAGES & 1))"),
    _fault("pipeline", "no arrival", "            cute.arch.mbarrier_arrive(empty + stage)\n", ""),
    _fault("pipeline", "no wait for full", "cute.arch.mbarrier_wait(full + stage, i // STAGES & 1)", "pass"),
    _fault("pipeline", "no wait for empty", "cute.arch.mbarrier_wait(empty + stage, (i // STAGES & 1) ^ 1)", "pass"),
    _fault("pipeline", "wrong stage of barrier waited for", "mbarrier_wait(full + stage,", "mbarrier_wait(full + (stage ^ 1),"),
    _fault("pipeline", "wrong stage read", "sw[column, stage]", "sw[column, stage ^ 1]"),
    _fault("pipeline", "wrong stage read of cp.async", "sx[column, stage]", "sx[column, stage ^ 1]"),
    _fault("pipeline", "wrong stage written by the bulk copy", "sw[None, stage], mbar", "sw[None, stage ^ 1], mbar"),
    _fault("pipeline", "wrong stage written by cp.async", "sx[None, stage], (4,)", "sx[None, stage ^ 1], (4,)"),
    _fault("pipeline", "copy signals another stage", "mbar_ptr=full + stage", "mbar_ptr=full + (stage ^ 1)"),
    _fault("pipeline", "more bytes announced", "full + stage, BULK_BYTES", "full + stage, BULK_BYTES * 2"),
    _fault("pipeline", "half the bytes announced", "full + stage, BULK_BYTES", "full + stage, BULK_BYTES // 2"),
    _fault("pipeline", "count too high", "empty + stage, THREADS - LOADERS", "empty + stage, THREADS"),
    _fault("pipeline", "count too low", "empty + stage, THREADS - LOADERS", "empty + stage, (THREADS - LOADERS) // 2"),
    _fault("pipeline", "full count too high", "mbarrier_init(full + stage, 1)", "mbarrier_init(full + stage, 2)"),
    _fault("pipeline", "early release", """            for k in cutlass.range_constexpr(4):
                column = k * 32 + reader
                sums[column] = sx[column, stage] + sw[column, stage]
            cute.arch.mbarrier_arrive(empty + stage)
""", """            cute.arch.mbarrier_arrive(empty + stage)
            for k in cutlass.range_constexpr(4):
                column = k * 32 + reader
                sums[column] = sx[column, stage] + sw[column, stage]
"""),
    _fault("pipeline", "no wait_group", "cute.arch.cp_async_wait_group(0)", "pass"),
    _fault("pipeline", "wait_group of one more", "cp_async_wait_group(0)", "cp_async_wait_group(1)"),
    _fault("pipeline", "no commit_group", "            cute.arch.cp_async_commit_group()\n", ""),
    _fault("pipeline", "no sync_warp between lanes", """            cute.arch.mbarrier_arrive(empty + stage)
            cute.arch.sync_warp()""", "            cute.arch.mbarrier_arrive(empty + stage)"),
    _fault("pipeline", "no barrier after init", "    cute.arch.sync_threads()\n", ""),
    _fault("pipeline", "copy not issued", "                cute.copy(bulk, w[None, i], sw[None, stage], mbar_ptr=full + stage)\n", ""),
    _fault("pipeline", "no expect_tx but an arrival", "mbarrier_arrive_and_expect_tx(full + stage, BULK_BYTES)", "mbarrier_arrive(full + stage)"),
    _fault("bias_add", "no proxy fence", 'cute.arch.fence_proxy("async.shared", space="cta")', "pass"),
    _fault("bias_add", "store not waited for", "cute.arch.cp_async_bulk_wait_group(0, read=True)", "pass"),
    _fault("bias_add", "store not committed", "                cute.arch.cp_async_bulk_commit_group()\n", ""),
    _fault("bias_add", "no barrier before the store", """space="cta")  # the store reads through the asynchronous proxy
            cute.arch.barrier(barrier_id=1, number_of_threads=ADDERS)""", 'space="cta")'),
    _fault("bias_add", "fence behind the barrier", """            cute.arch.fence_proxy("async.shared", space="cta")  # the store reads through the asynchronous proxy
            cute.arch.barrier(barrier_id=1, number_of_threads=ADDERS)""", """            cute.arch.barrier(barrier_id=1, number_of_threads=ADDERS)
            cute.arch.fence_proxy("async.shared", space="cta")"""),
    _fault("gemm_sm90", "consumer's wrong phase", "mbarrier_wait(full + stage, i // STAGES & 1)", "mbarrier_wait(full + stage, (i // STAGES & 1) ^ 1)"),
    _fault("gemm_sm90", "producer's wrong phase", "(i // STAGES & 1) ^ 1)", "(i // STAGES & 1))"),
    _fault("gemm_sm90", "no release", "cute.arch.mbarrier_arrive(empty + stage, lane)", "pass"),
    _fault("gemm_sm90", "release of own CTA alone", "cute.arch.mbarrier_arrive(empty + stage, lane)", "cute.arch.mbarrier_arrive(empty + stage, rank)"),
    _fault("gemm_sm90", "release of own CTA alone, count of one CTA", "", ""),
    _fault("gemm_sm90", "no wait for full", "cute.arch.mbarrier_wait(full + stage, i // STAGES & 1)", "pass"),
    _fault("gemm_sm90", "no wait for empty", "cute.arch.mbarrier_wait(empty + stage, (i // STAGES & 1) ^ 1)", "pass"),
    _fault("gemm_sm90", "wrong stage waited for", "mbarrier_wait(full + stage,", "mbarrier_wait(full + (stage ^ 1),"),
    _fault("gemm_sm90", "wgmma reads another stage of a", "fa[None, None, step, stage]", "fa[None, None, step, stage ^ 1]"),
    _fault("gemm_sm90", "wgmma reads another stage of b", "fb[None, None, step, stage]", "fb[None, None, step, stage ^ 1]"),
    _fault("gemm_sm90", "load fills another stage", "sa_load[None, stage], tma", "sa_load[None, stage ^ 1], tma"),
    _fault("gemm_sm90", "load signals another stage", "sa_load[None, stage], tma_bar_ptr=full + stage", "sa_load[None, stage], tma_bar_ptr=full + (stage ^ 1)"),
    _fault("gemm_sm90", "half the bytes announced", "full + stage, STAGE_BYTES", "full + stage, STAGE_BYTES // 2"),
    _fault("gemm_sm90", "bytes of a alone announced", "full + stage, STAGE_BYTES", "full + stage, ROWS * K * 2"),
    _fault("gemm_sm90", "too many bytes announced", "full + stage, STAGE_BYTES", "full + stage, STAGE_BYTES + 1024"),
    _fault("gemm_sm90", "mask of own CTA", "mcast_mask=Int16(0b11)", "mcast_mask=Int16(0b01)"),
    _fault("gemm_sm90", "mask of the own rank", "mcast_mask=Int16(0b11)", "mcast_mask=Int16(1 << rank)"),
    _fault("gemm_sm90", "count of one CTA", "CONSUMER_WARPS * CTAS)", "CONSUMER_WARPS)"),
    _fault("gemm_sm90", "count too high", "CONSUMER_WARPS * CTAS)", "CONSUMER_WARPS * CTAS + 1)"),
    _fault("gemm_sm90", "early release", "                warpgroup.wait_group(0)\n", ""),
    _fault("gemm_sm90", "no wgmma fence", "                warpgroup.fence()\n", ""),
    _fault("gemm_sm90", "no wgmma commit", "                warpgroup.commit_group()\n", ""),
    _fault("gemm_sm90", "wait_group of one more", "warpgroup.wait_group(0)", "warpgroup.wait_group(1)"),
    _fault("gemm_sm90", "no proxy fence before the store", '            cute.arch.fence_proxy("async.shared", space="cta")\n', ""),
    _fault("gemm_sm90", "no barrier before the store", """            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=1, number_of_threads=128)
""", """            cute.arch.fence_proxy("async.shared", space="cta")
"""),
    _fault("gemm_sm90", "store not waited for", """            if thread < 32:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier""", "            cute.arch.barrier"),
    _fault("gemm_sm90", "store not waited for at the end", """        if thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.cl""", "    cute.arch.cl"),
    _fault("gemm_sm90", "no cluster barrier at the end", """            cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
""", "            cute.arch.cp_async_bulk_wait_group(0, read=True)\n"),
    _fault("gemm_sm90", "no cluster barrier at the start", """        cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
""", "        cute.arch.mbarrier_init_fence()\n    cute.arch.sync_threads()\n"),
    _fault("gemm_sm90", "no init fence", "        cute.arch.mbarrier_init_fence()\n", ""),
    _fault("gemm_sm90", "wrong swizzle of a", "a_layout = cute.slice_(operand_layout(ROWS, 1), (None, None, 0))", "a_layout = cute.make_composed_layout(cute.make_swizzle(2, 4, 3), 0, cute.make_layout((ROWS, K), stride=(K, 1)))"),
    _fault("gemm_sm90", "b not loaded", """            cute.copy(load_b, gb_load[None, n_tile, k_block], sb_load[None, stage], tma_bar_ptr=full + stage,
                      mcast_mask=Int16(0b11))
""", ""),
    _fault("gemm_sm100", "consumer's wrong phase", "mbarrier_wait(full + stage, i // STAGES & 1)", "mbarrier_wait(full + stage, (i // STAGES & 1) ^ 1)"),
    _fault("gemm_sm100", "producer's wrong phase", "(i // STAGES & 1) ^ 1)", "(i // STAGES & 1))"),
    _fault("gemm_sm100", "epilogue's wrong phase", "sums_full, n_tile & 1)", "sums_full, (n_tile & 1) ^ 1)"),
    _fault("gemm_sm100", "accumulator's wrong phase", "sums_empty, (n_tile & 1) ^ 1)", "sums_empty, (n_tile & 1))"),
    _fault("gemm_sm100", "no commit of stages", """                    with cute.arch.elect_one():
                        tcgen05.commit(empty + stage, 0b11, tcgen05.CtaGroup.TWO)
""", ""),
    _fault("gemm_sm100", "no commit of sums", """                with cute.arch.elect_one():
                    tcgen05.commit(sums_full, 0b11, tcgen05.CtaGroup.TWO)
""", ""),
    _fault("gemm_sm100", "commit of stages not multicast", "tcgen05.commit(empty + stage, 0b11, tcgen05.CtaGroup.TWO)", "tcgen05.commit(empty + stage, None, tcgen05.CtaGroup.TWO)"),
    _fault("gemm_sm100", "commit of sums not multicast", "tcgen05.commit(sums_full, 0b11, tcgen05.CtaGroup.TWO)", "tcgen05.commit(sums_full, None, tcgen05.CtaGroup.TWO)"),
    _fault("gemm_sm100", "commit to the peer alone", "tcgen05.commit(empty + stage, 0b11,", "tcgen05.commit(empty + stage, 0b10,"),
    _fault("gemm_sm100", "commit to the wrong barrier", "tcgen05.commit(sums_full, 0b11", "tcgen05.commit(sums_empty, 0b11"),
    _fault("gemm_sm100", "commit to the wrong stage", "tcgen05.commit(empty + stage, 0b11", "tcgen05.commit(empty + (stage ^ 1), 0b11"),
    _fault("gemm_sm100", "half of the pair's bytes announced", "full + stage, PAIR_BYTES", "full + stage, PAIR_BYTES // 2"),
    _fault("gemm_sm100", "twice the pair's bytes announced", "full + stage, PAIR_BYTES", "full + stage, PAIR_BYTES * 2"),
    _fault("gemm_sm100", "both CTAs announce", "            if rank == 0:\n                with", "            if rank < 2:\n                with"),
    _fault("gemm_sm100", "no wait for full", "cute.arch.mbarrier_wait(full + stage, i // STAGES & 1)", "pass"),
    _fault("gemm_sm100", "no wait for empty", "cute.arch.mbarrier_wait(empty + stage, (i // STAGES & 1) ^ 1)", "pass"),
    _fault("gemm_sm100", "no wait for sums", "cute.arch.mbarrier_wait(sums_full, n_tile & 1)", "pass"),
    _fault("gemm_sm100", "no wait for drained sums", "cute.arch.mbarrier_wait(sums_empty, (n_tile & 1) ^ 1)", "pass"),
    _fault("gemm_sm100", "wrong stage of a", "fa[None, None, None, stage]", "fa[None, None, None, stage ^ 1]"),
    _fault("gemm_sm100", "wrong stage waited for", "mbarrier_wait(full + stage,", "mbarrier_wait(full + (stage ^ 1),"),
    _fault("gemm_sm100", "load fills another stage", "sb_load[None, stage], tma", "sb_load[None, stage ^ 1], tma"),
    _fault("gemm_sm100", "load signals another stage", "sb_load[None, stage], tma_bar_ptr=full + stage", "sb_load[None, stage], tma_bar_ptr=full + (stage ^ 1)"),
    _fault("gemm_sm100", "no wait::ld", "            cute.arch.fence_view_async_tmem_load()\n", ""),
    _fault("gemm_sm100", "release before the loads", """            cute.copy(read, source, fragment)
            cute.arch.fence_view_async_tmem_load()
            tcgen05_fence_before()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(sums_empty, 0)
""", """            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(sums_empty, 0)
            cute.copy(read, source, fragment)
            cute.arch.fence_view_async_tmem_load()
"""),
    _fault("gemm_sm100", "no release of sums", """            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(sums_empty, 0)
""", ""),
    _fault("gemm_sm100", "release at own CTA", "cute.arch.mbarrier_arrive(sums_empty, 0)", "cute.arch.mbarrier_arrive(sums_empty)"),
    _fault("gemm_sm100", "count of one CTA's warps", "sums_empty, EPILOGUE_WARPS * CTAS)", "sums_empty, EPILOGUE_WARPS)"),
    _fault("gemm_sm100", "count of sums_full too high", "mbarrier_init(sums_full, 1)", "mbarrier_init(sums_full, 2)"),
    _fault("gemm_sm100", "dealloc early", """    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    if warp == MMA_WARP:
        cute.arch.dealloc""", """    if warp == MMA_WARP:
        cute.arch.dealloc"""),
    _fault("gemm_sm100", "no dealloc", """    if warp == MMA_WARP:
        cute.arch.dealloc_tmem(sums.iterator, COLUMNS, is_two_cta=True)
""", ""),
    _fault("gemm_sm100", "no barrier after alloc", """        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
""", """        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
"""),
    _fault("gemm_sm100", "sums on a wrong column", "sums = cute.make_tensor(cute.arch.retrieve_tmem_ptr(Float32, 16, holder), sums_layout)", "sums = cute.make_tensor(cute.arch.retrieve_tmem_ptr(Float32, 16, holder) + 32, sums_layout)"),
    _fault("gemm_sm100", "one CTA does not load", "    if warp == LOAD_WARP:\n", "    if warp == LOAD_WARP and rank == 0:\n"),
    _fault("gemm_sm100", "sums released by one warp", "cute.arch.mbarrier_arrive(sums_empty, 0)", "if warp == 0: cute.arch.mbarrier_arrive(sums_empty, 0)"),
]
FAULTS = [fault for fault in FAULTS if fault.old]


def source_of(program: str) -> str:
    folder = Path(__file__).parents[2] / "docs" / "examples" if program == "bias_add" else PROGRAMS
    return (folder / f"{program}.py").read_text()


def planted(fault: Fault) -> str:
    source = source_of(fault.program)
    assert source.count(fault.old) == fault.count, (fault.name, source.count(fault.old))
    return source.replace(fault.old, fault.new)


def run(source: str, program: str, folder: Path) -> Diagnostic | str:
    """The first report of a program; text of another exception."""
    path = folder / f"{program}.py"
    path.write_text(source)
    linecache.checkcache()
    name = f"planted_{abs(hash(source))}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with capture(ARCHITECTURES[program]):
            spec.loader.exec_module(module)
            if program == "bias_add":
                import torch
                module.bias_add(torch.randn(112, 32, device="cuda"), torch.randn(32, device="cuda"))
            else:
                module.main()
    except Exception as error:  # noqa: BLE001
        found = error_behind(error)
        if found is None:
            return f"{type(error).__name__}: {error}"[:600]
        return diagnose(found)
    return "nothing"


def main() -> None:
    from cute_kernels.diagnostics.text import render
    wanted = sys.argv[1:]
    for fault in FAULTS:
        if wanted and not any(each in f"{fault.program}: {fault.name}" for each in wanted):
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = run(planted(fault), fault.program, Path(folder))
            print(f"### {fault.program}: {fault.name}", flush=True)
            if isinstance(found, str):
                print(found)
            else:
                print(render(found).replace(folder + "/", ""))
            print(flush=True)


if __name__ == "__main__":
    main()
