"""A prompt at which one launch of a program is executed step by step: the commands of ``cute-kernels debug``."""

import cmd
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import numpy as np

from cute_kernels.emulator.checking.debugger import NONE_RUNS, Debugger, Stop, name_of
from cute_kernels.emulator.checking.inspection import active_lanes, standing
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.machine.launch.schedule import Schedule
from cute_kernels.emulator.machine.launch.scheduler import is_over
from cute_kernels.emulator.programs import program_run
from cute_kernels.emulator.programs.capturing import capture
from cute_kernels.emulator.programs.recorded import RecordedLaunch, Recorder
from cute_kernels.emulator.reports import sources
from cute_kernels.emulator.reports.diagnosis import diagnose
from cute_kernels.emulator.reports.text import render

_TYPES = {"bf16": "<u2", "f16": "<f2", "f32": "<f4", "f64": "<f8", "s32": "<i4", "u8": "u1", "u16": "<u2", "u32": "<u4",
          "u64": "<u8"}  # fmt: skip
_MOST_BYTES = 256  # that are shown unless more are asked for
_AROUND = 5  # lines of `list` before and behind


def recorded(
    script: str,
    arguments: Sequence[str],
    arch: str,
    chosen: Schedule,
    how: Mapping[str, Any],
    *,
    roles: Mapping[str, Any],
    number: int | None,
    traceback: bool,
) -> RecordedLaunch:
    """Runs a program, and gives one of its launches. ``script``, ``arguments``, ``traceback``: as of
    `program_run.run_program`. ``arch``, ``roles``: as of `capture`. ``chosen``, ``how``: under which its launches run:
    a schedule, and fields of `Options`. ``number``: of the launch; None: the first that failed, otherwise the first.
    Raises ValueError: the program launches nothing, or no such launch that differs from those before."""
    recorder = Recorder()
    failed: list[EmulatorError] = []
    with capture(arch, chosen.options(**how), overlap=chosen.overlap, recorder=recorder, roles=roles) as session:
        try:
            note = lambda error, *_: failed.append(error)  # noqa: E731
            status = program_run.run_program(script, arguments, session, note, traceback)
        except SystemExit as end:
            status = end.code
    if not recorder.launches:
        raise ValueError(f"{script} launched no kernel" + (f"; its status was {status}" if status else ""))
    wanted = number or next((error.launch_number for error in failed), None) or recorder.launches[0].number
    for each in recorder.launches:
        if each.number == wanted:
            return each
    numbers = ", ".join(str(each.number) for each in recorder.launches)
    raise ValueError(f"--launch {wanted}: the launches that differ are {numbers}")


def session(
    launch: RecordedLaunch,
    chosen: Schedule,
    how: Mapping[str, Any],
    commands: Sequence[str],
    others: Callable[[str], RecordedLaunch],
) -> None:
    """Does the commands, or asks for them where there are none; ``others`` as of `Shell`. Raises ValueError: one of the
    commands cannot be done."""
    with Debugger(launch, chosen, **how) as debugger:
        shell = Shell(debugger, others=others)
        for each in commands:
            shell.stdout.write(f"{shell.prompt}{each}\n")
            shell.strict = True
            if shell.onecmd(each):
                break
        if not commands:
            shell.cmdloop()


class Shell(cmd.Cmd):
    """The prompt. ``debugger``: what it commands; its own user closes it. ``stdin``, ``stdout``: as for `cmd.Cmd`.
    ``others``: the launch of another program, of its path. ``strict``: what cannot be done raises ValueError instead of
    being said."""

    prompt = "(debug) "

    def __init__(
        self,
        debugger: Debugger,
        stdin: IO[str] | None = None,
        stdout: IO[str] | None = None,
        *,
        others: Callable[[str], RecordedLaunch] | None = None,
    ) -> None:
        super().__init__(stdin=stdin, stdout=stdout)
        self.use_rawinput = stdin is None
        self.debugger, self.strict, self._warp, self._others = debugger, False, "", others
        launch = debugger.recorded.launch
        self._kernel = sources.short_name(launch.ptx, launch.kernel_name)
        self.intro = (
            f"launch {debugger.recorded.number}, kernel {self._kernel}: grid {launch.grid}, block {launch.block}, "
            f"cluster {launch.cluster}. Nothing has run yet; `help` lists the commands."
        )

    def onecmd(self, line: str) -> bool:
        """Does one command; what cannot be done is said, or raised if ``strict``."""
        try:
            return bool(super().onecmd(line))
        except ValueError as error:
            if self.strict:
                raise
            self._say(f"error: {error}")
            return False

    def emptyline(self) -> bool:
        """An empty line does nothing."""
        return False

    def default(self, line: str) -> bool:
        """A command that is none, or the short name of one."""
        if line == "EOF":
            return True
        name, _, rest = line.strip().removeprefix("print tile").partition(" ")
        if line.strip().startswith("print tile"):
            return self.onecmd(f"tile {rest}")
        if name in _SHORT:
            return self.onecmd(f"{_SHORT[name]} {rest}")
        raise ValueError(f"command {name!r}: `help` lists what there is")

    def _say(self, text: str) -> None:
        self.stdout.write(f"{text}\n")

    # --- going on -------------------------------------------------------------------------------------------------

    def do_break(self, text: str) -> None:
        """break PLACE [WARP] [if REGISTER == NUMBER]: stop at FILE:LINE, or LINE of the PTX; without PLACE, list."""
        if text.split():
            place, _, condition = text.partition(" if ")
            made = self.debugger.break_at(*_words(place, 1, 2), condition=condition)
            self._say(f"breakpoint {made.number} at {self._lines(made.instructions)}")
        for each in () if text.split() else self.debugger.breakpoints.values():
            self._say(f"{each.number}: {each.place} {each.warp}".rstrip())

    def _lines(self, instructions: tuple[int, ...]) -> str:
        lines = [self.debugger.kernel.instructions[index].line for index in instructions]
        return f"PTX line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))}"

    def do_watch(self, text: str) -> None:
        """watch register NAME, tile NAME[..], shared NAME [COUNT], memory ADDRESS COUNT, barrier NAME: watch it."""
        made = self.debugger.watch(text, self._warp)
        self._say(f"watchpoint {made.number}: {text}")

    def do_delete(self, text: str) -> None:
        """delete NUMBER: remove a breakpoint."""
        self.debugger.delete(_number(*_words(text, 1, 1)))

    def do_continue(self, text: str) -> None:
        """continue: go on to the next breakpoint, a fault or the end; Ctrl-C stops it."""
        _words(text, 0, 0)
        self._show(self.debugger.go())

    def do_step(self, text: str) -> None:
        """step [COUNT]: go on until the chosen warp has executed COUNT instructions, 1 if that is left out."""
        count = _number(*(_words(text, 0, 1) or ["1"]))
        self._show(self.debugger.step(self._warp, count), keep=True)

    def do_back(self, text: str) -> None:
        """back [COUNT]: go to before the last COUNT instructions of the chosen warp, by running the launch again."""
        self._show(self.debugger.back(self._warp, _number(*(_words(text, 0, 1) or ["1"]))), keep=True)

    def do_restart(self, text: str) -> None:
        """restart: go back to before the first instruction; breakpoints stay."""
        _words(text, 0, 0)
        self.debugger.restart()

    def do_quit(self, text: str) -> bool:
        """quit: end the session."""
        return True

    def _show(self, stop: Stop, keep: bool = False) -> None:
        self._warp = stop.warp or (self._warp if keep else "")
        if stop.error is not None:
            self._say(render(diagnose(stop.error)))
        elif stop.reason == "end":
            self._say(f"the launch has ended after {self.debugger.outcome.report.warp_instructions} warp instructions")
        else:
            self._say(str(stop))

    # --- looking --------------------------------------------------------------------------------------------------

    def do_warp(self, text: str) -> None:
        """warp [NAME]: choose the warp of the other commands, or list all; NAME: [[CLUSTER.]CTA.]WARP."""
        words = _words(text, 0, 1)
        if words:
            self._warp = name_of(self.debugger.warp(words[0]))
        chosen = [self.debugger.warp(words[0])] if words else self.debugger.warps()
        if not chosen:
            self._say(NONE_RUNS)
        for each in chosen:
            instruction = standing(each)
            state = "" if each.wait is None or is_over(each.wait) else f", {each.wait.describe()}"
            self._say(f"{name_of(each)} at PTX line {instruction.line} `{instruction.text}`{state}")

    def do_registers(self, text: str) -> None:
        """registers [NAME ...]: values in the chosen warp; without NAME, of all registers that are read later."""
        lanes = active_lanes(self.debugger.warp(self._warp))
        for name, value in self.debugger.registers(self._warp, *text.split()).items():
            self._say(f"{name} = {_of_register(value, self.debugger.kernel.registers.get(name, 'b32'), lanes)}")

    def do_shared(self, text: str) -> None:
        """shared [NAME or OFFSET [COUNT [TYPE]]]: shared memory; TYPE: bf16, f16, f32, f64, s32, u8, u16, u32, u64."""
        first, count, kind = (*_words(text, 0, 3), *("0", "", "u32")[len(text.split()) :])
        nbytes = _number(count) * np.dtype(_type(kind)).itemsize if count else None
        found = self.debugger.shared(_offset(first), nbytes, self._warp)
        self._dump(found if count else found[:_MOST_BYTES], kind, "" if count else len(found))

    def do_tile(self, text: str) -> None:
        """tile NAME[@PART][[INDEX, ..]]: a tensor in shared or tensor memory, as a[0:8, :, 1] or a[stage 1]."""
        found = np.atleast_1d(self.debugger.tile(text, warp=self._warp))
        shown = found[tuple(slice(0, most) for most in (8, 8, 1, 1, 1)[: found.ndim])] if found.size > 64 else found
        for index in np.ndindex(shown.shape[:-1]):
            row = f"[{', '.join(map(str, index))}]: " if index else ""
            self._say(row + " ".join(f"{float(value):.6g}" for value in shown[index]))
        if shown.size < found.size:
            self._say(f"and more: {' x '.join(map(str, found.shape))} in all")

    def do_memory(self, text: str) -> None:
        """memory ADDRESS COUNT [TYPE]: global memory."""
        address, count, kind = (*_words(text, 2, 3), *["u32"][len(text.split()) - 2 :])
        nbytes = _number(count) * np.dtype(_type(kind)).itemsize
        self._dump(self.debugger.memory(_number(address), nbytes), kind)

    def do_tensor(self, text: str) -> None:
        """tensor COLUMN [LANE [COUNT]]: COUNT lanes, 32 if left out, of a column of tensor memory, as f32 and bits."""
        column, lane, count = (_number(each) for each in (*_words(text, 1, 3), *("0", "32")[len(text.split()) - 1 :]))
        cells = self.debugger.tensor(column, 1, self._warp)
        if not cells.size:
            raise ValueError(f"column {column}: tensor memory has 512")
        self._dump(cells[0, lane : lane + count].view(np.uint8), "f32")
        self._dump(cells[0, lane : lane + count].view(np.uint8), "u32")

    def _dump(self, found: np.ndarray, kind: str, whole: int | str = "") -> None:
        items = found[: len(found) // np.dtype(_type(kind)).itemsize * np.dtype(_type(kind)).itemsize].view(_type(kind))
        if kind == "bf16":
            items = (items.astype(np.uint32) << 16).view(np.float32)
        for start in range(0, len(items), 8):
            self._say(f"{start:>5}: " + " ".join(map(_item, items[start : start + 8])))
        if whole and whole > len(found):
            self._say(f"and more: {whole} bytes in all")

    def do_origin(self, text: str) -> None:
        """origin ARRAY BYTE, ARRAY expected FILE.npy, ARRAY like SCRIPT: what made a byte, or the first wrong one."""
        array, byte, *path = _words(text, 2, 3)
        if (byte in ("expected", "like")) != bool(path) or byte == "like" and self._others is None:
            raise ValueError(f"origin {text}: must be ARRAY BYTE, ARRAY expected FILE.npy or ARRAY like SCRIPT")
        try:
            if byte == "like":
                wanted = self._others(path[0])
            else:
                wanted = np.load(path[0], allow_pickle=False) if path else _number(byte)
        except OSError as error:
            raise ValueError(f"origin {text}: {error.strerror or error}") from None
        for line in self.debugger.origin(array, wanted):
            self._say(line)

    def do_barriers(self, text: str) -> None:
        """barriers: phases, arrivals and bytes of all mbarriers."""
        for each in self.debugger.barriers() or ["no mbarrier is initialised"]:
            self._say(each)

    def do_waiting(self, text: str) -> None:
        """waiting: for each warp of the cluster, where it is, what it waits for, and for whom."""
        self._say(render(dataclasses.replace(self.debugger.waiting(), kernel=self._kernel)))

    def do_backtrace(self, text: str) -> None:
        """backtrace: the source line of the next instruction, and the calls that it is inlined in."""
        for number, place in enumerate(self.debugger.backtrace(self._warp)):
            source = place.source
            where = f"{source.path}:{source.line}  {source.text}" if source is not None else "no source line"
            function = f" in {source.function}" if source is not None and source.function else ""
            line = f", PTX line {place.ptx_line} `{place.instruction}`" if place.ptx_line is not None else ""
            self._say(f"{number}: {where}{function}{line}")

    def do_list(self, text: str) -> None:
        """list: PTX around the next instruction."""
        instruction = standing(self.debugger.warp(self._warp))
        lines = self.debugger.recorded.launch.ptx.splitlines()
        first = max(instruction.line - 1 - _AROUND, 0)
        for number, line in enumerate(lines[first : instruction.line + _AROUND], start=first + 1):
            self._say(f"{'->' if number == instruction.line else '  '} {number:>5} {line}")


_SHORT = {
    "b": "break", "d": "delete", "c": "continue", "s": "step", "w": "warp", "p": "registers", "print": "registers",
    "r": "registers", "bt": "backtrace", "l": "list", "q": "quit",
}  # fmt: skip


def _words(text: str, least: int, most: int) -> list[str]:
    words = text.split()
    if not least <= len(words) <= most:
        raise ValueError(f"{len(words)} words {words}: must be `help COMMAND` says which")
    return words


def _number(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        raise ValueError(f"{text!r}: must be a number") from None


def _offset(text: str) -> int | str:
    return int(text, 0) if text[:1].isdecimal() else text


def _type(name: str) -> str:
    if name not in _TYPES:
        raise ValueError(f"type = {name!r}: must be one of {', '.join(_TYPES)}")
    return _TYPES[name]


def _item(value: np.generic) -> str:
    return f"{value:.6g}" if np.issubdtype(value.dtype, np.floating) else f"{int(value):#x}"


def _of_register(value: int | np.ndarray, kind: str, lanes: int) -> str:
    """A value as its type has it; of lanes those that execute, once where all have the same."""
    if isinstance(value, int):
        return _scalar(value, kind)
    shown = [(lane, _scalar(int(value[lane]), kind)) for lane in range(32) if lanes >> lane & 1]
    if len({text for _, text in shown}) == 1:
        return f"{shown[0][1]} in lanes {shown[0][0]} to {shown[-1][0]}"
    each = np.diff(value.astype(np.int64))
    if lanes == 0xFFFFFFFF and kind not in ("f32", "f64") and (each == each[0]).all():
        return f"{shown[0][1]} + {each[0]} * lane"
    return " ".join(f"{lane}:{text}" for lane, text in shown)


def _scalar(value: int, kind: str) -> str:
    if kind == "f32":
        return f"{np.uint32(value & 0xFFFFFFFF).view(np.float32):.6g}"
    if kind == "f64":
        return f"{np.uint64(value).view(np.float64):.6g}"
    return str(value) if value < 10 else f"{value:#x}"
