"""A kernel to one native function that runs a warp.

The function walks the basic blocks of the flow graph like the Python back end's generator (`translate`), with the same
values (`block`), the same lane masks and the same counts, so that both do the same bit for bit; `Options.native`
chooses. Between calls a warp is a block of bytes: header, executions per block, registers, constants of the warp.
Whatever native code does not know (barriers, TMA, tensor cores, rare operations, every error) is a call of the Python
function that the other back end would have called, in the same order; native code only ever skips the way there.

Inside a call of the native function a warp executes until it has to wait, has used up its budget of blocks, or exits.
"""

from __future__ import annotations

import ctypes
import functools
import re
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_kernels.emulator.decode import Instruction, Kernel
from cute_kernels.emulator.flow import Block, Flow
from cute_kernels.emulator.native import Library
from cute_kernels.emulator.native_block import AGAIN, ERROR, GO, WAIT, BlockEmitter, NotNative, Program, Site
from cute_kernels.emulator.native_inline import TIMED_OUT
from cute_kernels.emulator.native_log import WarpLog
from cute_kernels.emulator.native_memory import (
    CALL,
    CALLBACK,
    EVENTS,
    LOG,
    ROW,
    STATES,
    MemoryTables,
    exchange_area,
)
from cute_kernels.emulator.native_units import Units
from cute_kernels.emulator.register_hazards import touched_in_flight
from cute_kernels.emulator.translate import RUNTIME_NAMES, Lowering, PythonWarp, lower
from cute_kernels.emulator.values import FULL
from cute_kernels.emulator.warp import Frame
from cute_kernels.emulator.wgmma import RegisterFile

if TYPE_CHECKING:
    from cute_kernels.emulator.sm import Cluster
    from cute_kernels.emulator.warp import Warp

# The header of a warp's state, in 32-bit words. Where no path has diverged, the meeting block is all ones. _OPEN is 1
# while the only branch that lanes have diverged at is known to machine code alone: the lanes _ARRIVED are at its
# meeting block already, the others run. `Warp.stack` is empty then. The word behind these is `native_inline.TIMED_OUT`.
_PC, _MASK, _MEET, _OPEN, _ARRIVED, _BUDGET, _ENTERED = range(7)
_HEADER = 64
_ARRIVE, _DIVERGE = 0, 1  # sites of control flow; _DIVERGE finds target, following, meet in exchange rows
_EXIT = 4  # what the native function returns when the warp has finished, beside WAIT and ERROR


@dataclass(frozen=True)
class NativeTranslation:
    """A kernel in machine code; see `translate.Translation`.

    Attributes:
        library: keeps the machine code.
        sites: places that call Python; ``code`` defines their functions and ``names`` is what it refers to.
        state_bytes: size of a warp's state; ``registers`` is the part with the registers.
        variables: of each register by its name in Python: offset, bits, whether it is uniform.
        constants: (compiled Python expression, offset, bits, uniform) of what never changes for a warp.
        rows: of the exchange area.
    """

    kernel: Kernel
    flow: Flow
    static_shared: int
    library: Library
    sites: tuple[Site, ...]
    code: CodeType
    names: dict[str, Any]
    state_bytes: int
    registers: slice
    variables: dict[str, tuple[int, int, bool]]
    constants: tuple[tuple[CodeType, int, int, bool], ...]
    rows: int


@functools.lru_cache(maxsize=64)
def translate_native(
    ptx: str, kernel: str | None, block_shape: tuple[int, int, int], check: bool = True
) -> NativeTranslation:
    """As `translate.translate`, to machine code.

    Raises:
        NotNative: the kernel is one for the Python back end.
    """
    lowering = lower(ptx, kernel, block_shape, check)
    if lowering.context.local_bytes:
        raise NotNative("local memory")
    touched = touched_in_flight(lowering.flow)
    if touched is not None:
        raise NotNative(f"a register of a wgmma in flight is touched (PTX line {touched.line})")
    return _Translator(lowering, check).run()


class _Translator:
    def __init__(self, lowering: Lowering, detectors: bool) -> None:
        self.lowering = lowering
        self.flow: Flow = lowering.flow
        header = _HEADER + 8 * (len(self.flow.blocks) + 1)
        self.start = -(-header // 64) * 64
        self.program = Program(lowering.space, set(lowering.variables.values()), self.start, detectors)
        self.program.site(None, [])
        self.program.site(None, [])
        self.code = self.program.code

    def run(self) -> NativeTranslation:
        flow, program = self.flow, self.program
        for block in flow.blocks:  # registers first, so that they lie together
            for name in sorted(block.live_in | block.live_out):
                bits = self.lowering.bits(name)
                program.layout.slot(self.lowering.variables[name], bits, name not in flow.varying)
        registers = slice(self.start, program.layout.size)
        variables = {
            name: (program.layout.slots[name], self.lowering.bits(register), register not in flow.varying)
            for register, name in self.lowering.variables.items()
            if name in program.layout.slots
        }
        for block in flow.blocks:
            self._block(block)
        ir = self._module()
        source = self._sites()
        slots = program.layout.slots
        constants = tuple(
            (compile(text, "<constant of a warp>", "eval"), slots[text], bits, uniform)
            for text, bits, uniform in program.layout.expressions
        )
        return NativeTranslation(
            kernel=self.lowering.kernel,
            flow=flow,
            static_shared=self.lowering.context.static_shared,
            library=Library(ir),
            sites=tuple(program.sites),
            code=compile(source, "<sites of PTX>", "exec"),
            names={**RUNTIME_NAMES, **program.space.values},
            state_bytes=-(-program.layout.size // 64) * 64,
            registers=registers,
            variables=variables,
            constants=constants,
            rows=program.rows,
        )

    # --- blocks -----------------------------------------------------------------------------------------------------

    def _block(self, block: Block) -> None:
        builder, condition, last = self.lowering.block(block)
        k, put = block.index, self.code.put
        put(f"b{k}:")
        count = self.code.fresh("n")
        put(f"{count}.p = getelementptr i8, ptr %s, i64 {_HEADER + 8 * k}")
        put(f"{count} = load i64, ptr {count}.p")
        put(f"{count}.next = add i64 {count}, 1")
        put(f"store i64 {count}.next, ptr {count}.p")
        budget = self.code.let("load i32, ptr %budget.p")
        less = self.code.let(f"sub i32 {budget}, 1")
        put(f"store i32 {less}, ptr %budget.p")
        spent = self.code.let(f"icmp sle i32 {less}, 0")
        put(f"br i1 {spent}, label %y{k}, label %e{k}")
        put(f"y{k}:")
        put(f"store i32 {k}, ptr %pc.p")
        put("br label %spent")
        put(f"e{k}:")
        start = len(self.code.lines)
        emitter = BlockEmitter(self.program, builder, k)
        emitter.emit(block.live_out, condition)
        self._branch(emitter, block, condition, last)
        head = ["%M = load i32, ptr %mask.p", "%Mv = bitcast i32 %M to <32 x i1>", *emitter.head]
        self.code.lines[start:start] = head
        # Every block has its own %M: the names of a function are unique.
        self.code.lines[start:] = [_own(line, k) for line in self.code.lines[start:]]

    def _branch(self, emitter: BlockEmitter, block: Block, condition: Any, last: Instruction | None) -> None:
        put, let = self.code.put, self.code.let
        if condition is None:
            self._go(block, block.successors[0])
            return
        taken, following = block.successors
        if condition.uniform:
            yes, no = self.code.fresh("t")[1:], self.code.fresh("t")[1:]
            put(f"br i1 {emitter.operand(condition, False)}, label %{yes}, label %{no}")
            put(f"{yes}:")
            self._go(block, taken)
            put(f"{no}:")
            self._go(block, following)
            return
        lanes = let(f"and i32 {emitter.mask(condition)}, %M")
        all_, some, none, split = (self.code.fresh("t")[1:] for _ in range(4))
        put(f"br i1 {let(f'icmp eq i32 {lanes}, %M')}, label %{all_}, label %{some}")
        put(f"{some}:")
        put(f"br i1 {let(f'icmp eq i32 {lanes}, 0')}, label %{none}, label %{split}")
        put(f"{split}:")
        meet = self.flow.reconvergence[block.index]
        if meet in (taken, following) and taken != following and meet != self.flow.exit:
            self._open(block, lanes, taken, following)
        for row, value in enumerate((taken, following, meet)):
            put(f"store i64 {value}, ptr {emitter.row(row)}")
        status = let(f"call i32 %cb(i32 {_DIVERGE}, i32 {lanes})")
        put(f"br i1 {let(f'icmp eq i32 {status}, 0')}, label %meet, label %failed")
        put(f"{all_}:")
        self._go(block, taken)
        put(f"{none}:")
        self._go(block, following)

    def _open(self, block: Block, lanes: str, taken: int, following: int) -> None:
        """The first branch at which lanes diverge, if some of them are where they all meet: no call of Python."""
        put, let = self.code.put, self.code.let
        others = let(f"xor i32 {lanes}, %M")
        meet = self.flow.reconvergence[block.index]
        running, arrived, start = (others, lanes, following) if taken == meet else (lanes, others, taken)
        outermost = let(f"icmp eq i32 {let('load i32, ptr %meet.p')}, -1")
        first, nested = self.code.fresh("t")[1:], self.code.fresh("t")[1:]
        put(f"br i1 {outermost}, label %{first}, label %{nested}")
        put(f"{first}:")
        for name, value in (("mask", running), ("arrived", arrived), ("meet", meet), ("open", 1)):
            put(f"store i32 {value}, ptr %{name}.p")
        put(f"br label %b{start}")
        put(f"{nested}:")

    def _go(self, block: Block, target: int) -> None:
        put, let = self.code.put, self.code.let
        label = "done" if target == self.flow.exit else f"b{target}"
        if not block.divergent:
            put(f"br label %{label}")
            return
        meet = let("load i32, ptr %meet.p")
        test = let(f"icmp eq i32 {meet}, {target}")
        arrive = self.code.fresh("a")[1:]
        put(f"br i1 {test}, label %{arrive}, label %{label}")
        put(f"{arrive}:")
        put("br label %arrive")

    # --- module -----------------------------------------------------------------------------------------------------

    def _module(self) -> str:
        blocks = range(len(self.flow.blocks))
        cases = " ".join(f"i32 {k}, label %b{k}" for k in blocks)
        bodies = " ".join(f"i32 {k}, label %e{k}" for k in blocks)
        declarations = {"declare i32 @llvm.cttz.i32(i32, i1)", *self.program.code.declarations}
        body = "\n".join(self.program.code.lines)
        return f"""
{chr(10).join(sorted(declarations))}
define i32 @run(ptr %s, ptr %x, ptr %t, ptr %cb) {{
entry:
  %pc.p = getelementptr i32, ptr %s, i32 {_PC}
  %mask.p = getelementptr i32, ptr %s, i32 {_MASK}
  %meet.p = getelementptr i32, ptr %s, i32 {_MEET}
  %open.p = getelementptr i32, ptr %s, i32 {_OPEN}
  %arrived.p = getelementptr i32, ptr %s, i32 {_ARRIVED}
  %budget.p = getelementptr i32, ptr %s, i32 {_BUDGET}
  %entered.p = getelementptr i32, ptr %s, i32 {_ENTERED}
  %entered = load i32, ptr %entered.p
  %resume = icmp ne i32 %entered, 0
  br i1 %resume, label %resumed, label %dispatch
resumed:
  store i32 0, ptr %entered.p
  %pc.r = load i32, ptr %pc.p
  switch i32 %pc.r, label %done [ {bodies} ]
dispatch:
  %pc = load i32, ptr %pc.p
  switch i32 %pc, label %done [ {cases} ]
meet:
  %pc.m = load i32, ptr %pc.p
  %meet.m = load i32, ptr %meet.p
  %met = icmp eq i32 %pc.m, %meet.m
  br i1 %met, label %arrive, label %dispatch
arrive:
  %open = load i32, ptr %open.p
  %closes = icmp ne i32 %open, 0
  br i1 %closes, label %close, label %pop
close:
  %mask.c = load i32, ptr %mask.p
  %arrived.c = load i32, ptr %arrived.p
  %together = or i32 %mask.c, %arrived.c
  %meet.c = load i32, ptr %meet.p
  store i32 %together, ptr %mask.p
  store i32 %meet.c, ptr %pc.p
  store i32 -1, ptr %meet.p
  store i32 0, ptr %open.p
  br label %dispatch
pop:
  %arrived = call i32 %cb(i32 {_ARRIVE}, i32 0)
  %fine = icmp eq i32 %arrived, 0
  br i1 %fine, label %dispatch, label %failed
spent:
  store i32 1, ptr %entered.p
  ret i32 {WAIT}
failed:
  ret i32 {ERROR}
done:
  ret i32 {_EXIT}
{body}
}}
"""

    def _sites(self) -> str:
        """Python source of ``sites(Q, X8, X16, X32, X64)``, which returns the functions of all sites."""
        lines = ["def sites(Q, X8, X16, X32, X64):"]
        for number, site in enumerate(self.program.sites):
            lines.append(f"    def site{number}(W, mask):")
            lines += [f"        {line}" for line in (*site.source, f"return {GO}")]
        lines.append(f"    return [{', '.join(f'site{n}' for n in range(len(self.program.sites)))}]")
        return "\n".join(lines)


_MASK_NAME = re.compile(r"%M(v?)\b")


def _own(line: str, block: int) -> str:
    return _MASK_NAME.sub(rf"%M\1.{block}", line) if "%M" in line else line


# --- running --------------------------------------------------------------------------------------------------------


class NativeLaunch:
    """What the warps of one launch share: the exchange area and the sites that work on it."""

    def __init__(self, translation: NativeTranslation) -> None:
        self.translation = translation
        self.area, self.exchange = exchange_area(translation.rows)
        words = memoryview(self.area).cast("B").cast("Q")
        lanes = [self.area.view(f"u{size}").reshape(-1, ROW // size)[:, :32] for size in (1, 2, 4, 8)]
        self.names = dict(translation.names)
        exec(translation.code, self.names)  # noqa: S102 - our own generated source
        self.sites = self.names["sites"](words, *lanes)
        self.sites[_ARRIVE], self.sites[_DIVERGE] = self._arrive, self._diverge
        self.words = words
        self.current: NativeWarp | None = None
        self.tables: dict[Cluster, MemoryTables] = {}
        # The callback refers to this object: a cycle, but collected like any other.
        self.callback = CALLBACK(self._call)
        function = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 4)
        self.run = function(translation.library.address("run"))
        self.callback_address = ctypes.cast(self.callback, ctypes.c_void_p).value

    def start(self, warp: Warp) -> NativeWarp:
        """The execution of one warp, before its first instruction."""
        cluster = warp.cluster
        if cluster not in self.tables:
            tables = MemoryTables(cluster, _flags(cluster))
            self.tables = {cluster: tables}  # one cluster runs at a time
            cluster.units = Units(cluster, tables)
        return NativeWarp(self, warp, self.tables[cluster])

    def _call(self, site: int, mask: int) -> int:
        """What native code calls."""
        current = self.current
        try:
            current.publish()
            current.site = site
            result = self.sites[site](current.warp, mask)
            return current.block() if result == WAIT else result
        except BaseException as error:  # noqa: BLE001 - must not unwind through native code; `NativeWarp.send` raises it
            current.error = error
            return ERROR

    def _arrive(self, warp: Warp, mask: int) -> int:
        header = self.current.header
        header[_PC], header[_MASK], meet = warp.arrive(header[_MASK])
        header[_MEET] = meet & FULL
        return GO

    def _diverge(self, warp: Warp, mask: int) -> int:
        header = self.current.header
        if header[_OPEN]:
            header[_OPEN] = 0
            warp.stack.append(Frame(header[_MEET], header[_ARRIVED], []))
        taken, following, meet = (self.words[row * ROW // 8] for row in range(3))
        header[_PC], header[_MASK], meet = warp.diverge(mask, header[_MASK], taken, following, meet)
        header[_MEET] = meet & FULL
        return GO


def _flags(cluster: Cluster) -> int:
    flags = STATES if cluster.options.detectors else 0
    if cluster.meter is not None:
        flags |= CALL
    if cluster.tracker is not None:
        flags |= sum(LOG.values()) | EVENTS
    return flags


class NativeWarp:
    """The execution of one warp by native code; what a scheduler needs of it (compare `translate.PythonWarp`)."""

    def __init__(self, launch: NativeLaunch, warp: Warp, tables: MemoryTables) -> None:
        translation = launch.translation
        self.launch, self.warp, self.tables = launch, warp, tables
        self.log = WarpLog(warp, tables)
        self.state, self.address = exchange_area(translation.state_bytes // ROW + 1)
        self.header = memoryview(self.state[:_HEADER]).cast("B").cast("I")
        blocks = len(translation.flow.blocks) + 1
        self.counts = self.state[_HEADER : _HEADER + 8 * blocks].view(np.int64)
        warp.counts = self.counts
        self.header[_MASK], self.header[_MEET] = warp.live, FULL
        self.error: BaseException | None = None
        self.site = 0
        self._files: dict[int, RegisterFile] = {}
        launch.names["W"] = warp
        for expression, offset, bits, uniform in translation.constants:
            self._set(offset, bits, uniform, eval(expression, launch.names))  # noqa: S307 - our own text

    @classmethod
    def adopt(cls, launch: NativeLaunch, warp: Warp, code: PythonWarp) -> NativeWarp:
        """Takes a warp over that Python has run so far, between two calls of its ``send``."""
        counts, values = warp.counts, code.snapshot()
        result = launch.start(warp)
        result.counts[:] = counts
        header = result.header
        header[_PC], header[_MASK], header[_MEET] = values["pc"], values["M"], values["rpc"] & FULL
        # A warp that used up its budget has been counted for the block that it stands before, one that waits has not.
        header[_ENTERED] = code.started and warp.wait is None
        for name, (offset, bits, uniform) in launch.translation.variables.items():
            if name in values:
                result._set(offset, bits, uniform, values[name])
        return result

    def _set(self, offset: int, bits: int, uniform: bool, value: Any) -> None:
        if uniform or bits == 1:
            self.state[offset : offset + 8] = np.frombuffer(int(value).to_bytes(8, "little"), np.uint8)
        else:
            lanes = self.state[offset : offset + 4 * bits].view(f"u{bits // 8}")
            lanes[:] = np.asarray(value).view(lanes.dtype)

    def registers(self, places: np.ndarray) -> RegisterFile:
        """Registers by the indices of their 32-bit words in the state, an array of the translation."""
        found = self._files.get(id(places))
        if found is None:
            found = self._files[id(places)] = RegisterFile(self.state.view(np.uint32), places)
        return found

    def send(self, budget: int) -> None:
        """Runs until the warp waits or has executed ``budget`` blocks.

        Raises:
            StopIteration: it has exited.
        """
        launch = self.launch
        launch.current = self
        self.log.enter()
        self.header[_BUDGET] = budget
        self.header[TIMED_OUT] = self.warp.timed_out
        status = launch.run(self.address, launch.exchange, self.tables.address, launch.callback_address)
        if status == ERROR:
            error, self.error = self.error, None
            raise error
        self.publish()
        if status == _EXIT:
            raise StopIteration

    def publish(self) -> None:
        """Tells the units what native code did since: effects, and accesses that somebody observes."""
        header, cluster = self.tables.header, self.warp.cluster
        if header.progress:
            cluster.progress += header.progress
            header.progress = 0
            if cluster.units is not None:
                cluster.units.publish()
        self.log.report()

    def block(self) -> int:
        """The instruction of the current site has to wait: the warp leaves native code or runs another path of it."""
        translation, header, warp = self.launch.translation, self.header, self.warp
        number = translation.sites[self.site].block
        self.counts[number] -= 1
        if not translation.flow.blocks[number].divergent:
            return WAIT
        meet = -1 if header[_MEET] == FULL else header[_MEET]
        header[_PC], header[_MASK], meet, leaves = warp.park(number, header[_MASK], meet)
        header[_MEET] = meet & FULL
        return WAIT if leaves else AGAIN

    def failed_at(self, error: BaseException) -> Instruction | None:
        """The instruction that raised."""
        if self.log.instruction >= 0:
            return self.launch.translation.kernel.instructions[self.log.instruction]
        return self.launch.translation.sites[self.site].instruction

    @property
    def executing(self) -> int:
        """Index of the instruction that has called Python last, or whose entry in the log is looked at; -1: none."""
        if self.log.instruction >= 0:
            return self.log.instruction
        instruction = self.launch.translation.sites[self.site].instruction
        return -1 if instruction is None else instruction.index

    @property
    def standing(self) -> int:
        """The basic block that the warp is in."""
        return self.header[_PC]

    def snapshot(self) -> tuple[bytes, ...]:
        """Everything that decides what the warp does next."""
        return self.state[: 4 * _BUDGET].tobytes(), self.state[self.launch.translation.registers].tobytes()

    @staticmethod
    def same(a: tuple[bytes, ...], b: tuple[bytes, ...]) -> bool:
        """Whether two snapshots are equal."""
        return a == b
