"""A copy by CuTe DSL's Task Scheduling, with one fault: ``python task_scheduling_program.py FAULT [--unchecked]``.

One warp loads rows by TMA into a ring of two stages in shared memory, four warps store them. ``--unchecked`` leaves out
what Task Scheduling checks of its schedules, so that the faulty kernel is compiled.
"""

import sys
from dataclasses import dataclass, field
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as cuda
import cutlass.pipeline as pipeline
import torch
from cutlass.cute.runtime import from_dlpack
from cutlass.experimental import primitives as prims
from cutlass.experimental.task_scheduling.memory import SmemAllocation, SmemAllocator
from cutlass.experimental.task_scheduling.resources import (
    MemoryResource,
    PipelineConfig,
    StageInfo,
    TaskLocalVariable,
    WorkAttr,
    consumer_work,
    producer_work,
)
from cutlass.experimental.task_scheduling.schedule_builder import domain_loop, schedule
from cutlass.experimental.task_scheduling.task import Task
from cutlass.experimental.task_scheduling.task_manager import TaskManager

FAULTS = (
    "none", "no acquire", "no commit", "no wait", "no release", "release before the read", "half of the bytes",
    "too many consumers", "no barrier after the initialisation", "store out of bounds",
)  # fmt: skip
FAULT = next((word for word in sys.argv[1:] if not word.startswith("-")), "none")
CHECKED = "--unchecked" not in sys.argv
STAGES, COLUMNS, ROWS, STORING = 2, 128, 8, 4


@dataclass
class Rows(MemoryResource):
    """Which columns of the input this CTA copies."""

    column: cutlass.Constexpr[TaskLocalVariable] = TaskLocalVariable.uninitialized()

    def __post_init__(self) -> None:
        self.column = TaskLocalVariable(dtype=cutlass.Int32, default=cutlass.Int32(0), docs="first column")

    @consumer_work(returns=column)
    @cute.jit
    def first_column(self, stage_info: StageInfo) -> cutlass.Int32:
        return cute.arch.block_idx()[0] * COLUMNS


@dataclass
class Ring(MemoryResource):
    """Rows in shared memory."""

    source: Any = field(init=False, default=None)
    cells: Any = field(init=False, default=None)
    cell: cutlass.Constexpr[TaskLocalVariable] = TaskLocalVariable.uninitialized()
    place: cutlass.Constexpr = field(init=False, default=None)

    def __init__(self, source: cutlass.Pointer, **keywords: object) -> None:
        super().__init__(**keywords)
        self.source = source
        self.cell = TaskLocalVariable(dtype=cutlass.Float16, default=cutlass.Float16(0), docs="one number of a row")
        self.place = SmemAllocation("ring", dtype=cutlass.Float16, count=STAGES * COLUMNS, alignment=128)
        nowhere = cutlass.inttoptr(0, mem_space=3, dtype=cutlass.Float16)
        self.cells = cutlass.Array(nowhere, dtype=cutlass.Float16, shape=(STAGES * COLUMNS,), addrspace=3)

    def get_smem_requirements(self) -> list[SmemAllocation]:
        return [self.place]

    @cute.jit
    def _find(self, stage_info: StageInfo) -> None:
        begin = stage_info.context.smem_base.data_ptr() + self.place.offset
        self.cells = cutlass.Array(begin, dtype=cutlass.Float16, shape=(STAGES * COLUMNS,), addrspace=3)

    @producer_work(work_attrs=WorkAttr.AUXILIARY)
    @cute.jit
    def find_to_load(self, stage_info: StageInfo) -> None:
        self._find(stage_info)

    @consumer_work(work_attrs=WorkAttr.AUXILIARY)
    @cute.jit
    def find_to_read(self, stage_info: StageInfo) -> None:
        self._find(stage_info)

    @producer_work
    @cute.jit
    def load(self, stage_info: StageInfo, *, column: cutlass.Int32) -> None:
        if prims.elect_sync():
            row = self.cells.subview(stage_info.stage_idx * COLUMNS)
            place = (column, stage_info.loop_offset)
            prims.cp_async_bulk_tensor_shared_cta_global(row, self.source, place, stage_info.barrier)

    @consumer_work(returns=cell)
    @cute.jit
    def read(self, stage_info: StageInfo) -> cutlass.Float16:
        return self.cells[stage_info.stage_idx * COLUMNS + cute.arch.thread_idx()[0]]


@dataclass
class Output(MemoryResource):
    """The copy."""

    target: Any = field(init=False, default=None)

    def __init__(self, target: cute.Tensor, **keywords: object) -> None:
        super().__init__(**keywords)
        self.target = target

    @producer_work
    @cute.jit
    def store(self, stage_info: StageInfo, *, cell: cutlass.Float16) -> None:
        beyond = 1 << 20 if FAULT == "store out of bounds" else 0
        column = cute.arch.thread_idx()[0] + cute.arch.block_idx()[0] * COLUMNS
        self.target[stage_info.loop_offset + beyond, column] = cell


@cute.kernel
def copy_rows(source: cutlass.GridConstant[cuda.TensorMap], target: cute.Tensor):
    row_bytes = COLUMNS * 2
    config = PipelineConfig.create_tma_async_pipeline_cfg(
        num_stages=STAGES,
        num_bytes=row_bytes // 2 if FAULT == "half of the bytes" else row_bytes,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(
            pipeline.Agent.Thread, STORING * 32 + 32 * (FAULT == "too many consumers")
        ),
    )
    rows = Rows(name="rows")
    ring = Ring(name="ring", source=source.get_ptr(), pipeline_config=config)
    output = Output(name="output", target=target)
    allocator = SmemAllocator()
    allocator.add_resource(ring)
    allocator.compute_layout()

    @schedule
    def loading(rows: MemoryResource, ring: MemoryResource) -> None:
        ring.find_to_load()
        with domain_loop(0, ROWS, 1):
            column = rows.first_column()
            if cutlass.const_expr(FAULT != "no acquire"):
                ring.try_acquire()
                ring.acquire()
            ring.load(column=column)
            if cutlass.const_expr(FAULT != "no commit"):
                ring.commit()

    @schedule
    def storing(ring: MemoryResource, output: MemoryResource) -> None:
        ring.find_to_read()
        with domain_loop(0, ROWS, 1):
            if cutlass.const_expr(FAULT != "no wait"):
                ring.try_wait()
                ring.wait()
            if cutlass.const_expr(FAULT == "release before the read"):
                ring.release()
            cell = ring.read()
            if cutlass.const_expr(FAULT not in ("no release", "release before the read")):
                ring.release()
            output.store(cell=cell)

    @schedule
    def idling() -> None:
        with domain_loop(0, ROWS, 1):
            pass

    tasks = [
        Task(name="loading", src_resources=[rows], dst_resources=[ring], warp_idx=STORING, num_warps=1,
             schedule=loading(rows, ring), num_registers=40),
        Task(name="storing", src_resources=[ring], dst_resources=[output], warp_idx=0, num_warps=STORING,
             schedule=storing(ring, output), num_registers=160),
        Task(name="idling", src_resources=[], dst_resources=[], warp_idx=STORING + 1, num_warps=3, schedule=idling(),
             num_registers=40),
    ]  # fmt: skip
    manager = TaskManager(
        tasks=tasks,
        resource_dependency_graph={ring: [rows], output: [ring]},
        smem_allocator=allocator,
        exhaustive_deadlock_race_check=CHECKED,
        skip_validation=not CHECKED,
    )
    manager.setup_resources_and_tasks()
    if cutlass.const_expr(FAULT != "no barrier after the initialisation"):
        prims.fence_mbarrier_init()
        prims.barrier_cta_sync(0)
    manager.run()


@cute.jit
def launch(source: cute.Tensor, target: cute.Tensor):
    tensor_map = cuda.create_tensor_map_tiled_from_view(
        source, box_dims=(1, COLUMNS), swizzle=cuda.TensorMapSwizzle.none
    )
    copy_rows(tensor_map, target).launch(grid=(cute.ceil_div(source.shape[1], COLUMNS), 1, 1), block=(256, 1, 1))


if __name__ == "__main__":
    if FAULT not in FAULTS:
        sys.exit(f"fault {FAULT!r}, must be {', '.join(FAULTS)}")
    source = torch.randn(ROWS, 2 * COLUMNS, generator=torch.Generator().manual_seed(0)).to(torch.float16).cuda()
    target = torch.zeros_like(source)
    launch(from_dlpack(source), from_dlpack(target))
    assert torch.equal(source, target)
    print("the result is right")
