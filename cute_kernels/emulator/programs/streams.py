"""Streams and events of a program: what of its launches is ordered, and launches that race.

Launches run one after the other as they are made. On a GPU those of two streams may run at the same time unless an
event, a wait of one stream for another or of the host, or the rules of the default stream order them. Each stream has a
vector clock of the launches that are over when its next one begins; those that the host has waited for are forgotten.
Streams that are captured into a CUDA graph run nothing, and have clocks of their own (`cuda_graphs`).
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

from cute_kernels.common import forks
from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.errors import GlobalMemoryRace
from cute_kernels.emulator.programs.cuda_graphs import DEFAULT, Capture, Captured, Captures, Clock, joined
from cute_kernels.emulator.races.launch_accesses import WRITES, Meeting, Span, racing
from cute_kernels.emulator.reports.sources import short_name

_LEGACY = 1  # cudaStreamLegacy: another name of it
_FIRST_HANDLE, _FIRST_EVENT = 0x5EED_0000, 0x5EED_8000_0000
_KEPT = 64  # launches of a stream whose accesses are kept

Point = Clock | Captured
"""The work that an event waits for."""


@dataclass(frozen=True)
class Done:
    """A launch that is over here, and may not be on a GPU."""

    launch: CapturedLaunch  # what the program made
    number: int  # which of its launches
    stream: int  # its handle
    tick: int  # which of the stream's launches it is, from 1 on
    spans: Sequence[Span]  # what it accessed
    alive: Callable[[int], bool]  # whether the memory of a region, by its first address, has not been freed since

    def accesses(self) -> list[Span]:
        """Spans of memory that has not been freed since."""
        return [span for span in self.spans if self.alive(span.region[0])]

    def race(self, sentence: str, place: str) -> GlobalMemoryRace:
        """A report that carries the launch."""
        error = GlobalMemoryRace(f"{sentence}: {place}").know("streams", sentence=sentence)
        error.attach(self.launch.ptx, self.launch, self.number)
        return error

    def __str__(self) -> str:
        return f"launch {self.number} ({short_name(self.launch.ptx, self.launch.kernel_name)}) in {_name(self.stream)}"


class Streams:
    """The streams of a program. Threads have a current stream each. ``call``: calls an operator of the device, which
    knows the current one of each thread; ``captures``: of streams into CUDA graphs."""

    call: Callable[..., int]

    def __init__(self) -> None:
        self._handles = itertools.count(_FIRST_HANDLE, 0x100)
        self._lock = forks.lock()
        self._alone: set[int] = set()  # not ordered with the default stream
        self._ticks: Clock = {}
        self._clocks: dict[int, Clock] = {}
        self._launches: dict[int, deque[Done]] = {}
        # of torch, by number: when they were recorded, and what waits for them is behind; None: all launches
        self._events: dict[int, tuple[int, Point | None]] = {}
        self.captures = Captures()

    def create(self, alone: bool) -> int:
        """The handle of a new stream; ``alone``: cudaStreamNonBlocking, as torch's are."""
        with self._lock:
            handle = next(self._handles)
            if alone:
                self._alone.add(handle)
            return handle

    @property
    def current(self) -> int:
        """The current stream of this thread, as torch has it."""
        return self.call("stream")

    # --- order --------------------------------------------------------------------------------------------------------

    def capture_of(self, stream: int) -> Capture | None:
        """The capture to which a stream belongs."""
        return self.captures.of(_same(stream)) if self.captures else None

    def reached(self, stream: int) -> Point:
        """The work that an event waits for which is recorded now in the stream."""
        capture = self.capture_of(stream)
        if capture is not None:
            return capture.reached(stream)
        with self._lock:
            stream = _same(stream)
            return {**self._known(stream), stream: self._ticks.get(stream, 0)}

    def wait(self, stream: int, point: Point | None) -> None:
        """Puts what the stream does next behind what an event waits for; None: of an event that a launch records.
        Raises RuntimeError: captures do not permit it, see `Captures.wait`."""
        stream = _same(stream)
        if (self.captures or isinstance(point, Captured)) and self.captures.wait(stream, point or {}):
            return
        with self._lock:
            self._clocks[stream] = joined(self._clocks.get(stream, {}), self._ticks if point is None else point)

    def host_waits(self, name: str, point: Point | None = None, stream: int | None = None) -> None:
        """Whatever is launched from now on is behind what an event waits for; None: behind a stream, or everything.
        Raises RuntimeError: captures do not permit what has this ``name``."""
        self.captures.check_event(point)
        if self.captures:
            self.captures.check_wait(name, () if point is not None else None if stream is None else (_same(stream),))
        if stream is not None:
            point = self.reached(stream)
        with self._lock:
            over = self._ticks if point is None else point
            for each, launches in self._launches.items():
                while launches and launches[0].tick <= over.get(each, 0):
                    launches.popleft()

    def order(self, what: str, stream: int, event: int) -> int:
        """Does what torch's C++ asks of streams, by handles, and events, by numbers; the answer, or 0."""
        if what == "create":
            return self.create(alone=True)
        if what == "record":
            self._events[event] = time.perf_counter_ns(), self.reached(stream)
            return 0
        at, point = self._events.get(event, (0, {}))  # of another program: behind nothing of this one
        if what == "elapsed":  # since another event
            return at - self._events[stream][0]
        if what == "is capturing":
            return int(self.capture_of(stream) is not None)
        if what == "block":
            self.wait(stream, point)
        elif what == "synchronize":
            self.host_waits("synchronize", point, None if event else stream)
        else:
            self.host_waits("synchronize")
        return 0

    def recorded_by_launch(self, event: int) -> None:
        """A launch has the handle of a recorded event, and may record it: what waits for it is behind all launches."""
        self._events[event] = self._events[event][0], None

    def _known(self, stream: int) -> Clock:
        """Launches that are over when the next one of a stream begins."""
        known = dict(self._clocks.get(stream, {}))
        if stream in self._alone:
            return known
        # A blocking stream that has launched nothing may wait for an event.
        blocking = {*self._ticks, *self._clocks} - self._alone
        others = (DEFAULT,) if stream != DEFAULT else blocking
        return joined(known, *(joined(self._clocks.get(o, {}), {o: self._ticks.get(o, 0)}) for o in others))

    # --- launches -----------------------------------------------------------------------------------------------------

    def launched(
        self, launch: CapturedLaunch, number: int, spans: Sequence[Span], alive: Callable[[int], bool]
    ) -> GlobalMemoryRace | None:
        """A launch has run; the race with one of another stream, if there is one. Arguments: see `Done`."""
        with self._lock:
            stream = _same(launch.stream)
            known = self._clocks[stream] = self._known(stream)
            self._ticks[stream] = tick = self._ticks.get(stream, 0) + 1
            known[stream] = tick
            done = Done(launch, number, stream, tick, spans, alive)
            before = self._not_before(known)
            self._launches.setdefault(stream, deque(maxlen=_KEPT)).append(done)
        for other in before:
            meets = racing(other.accesses(), spans)
            if meets is not None:
                return _race(other, done, meets)
        return None

    def read(self, what: str, tensors: Sequence[tuple[int, int]]) -> GlobalMemoryRace | None:
        """The host reads tensors, (address, bytes), in the current stream; the race with a launch that wrote one."""
        with self._lock:
            known = self.reached(self.current)
            before = [] if isinstance(known, Captured) else self._not_before(known)
        for other in before:
            for span in other.accesses():
                if any(span.overwrites(address, nbytes) for address, nbytes in tensors):
                    sentence = f"{what} in {_name(self.current)} reads what {other} writes, and nothing orders the two"
                    return other.race(sentence, f"a tensor on the device of {span.region[1]} bytes")
        return None

    def _not_before(self, known: Clock) -> list[Done]:
        """Launches that may not be over."""
        return [done for launches in self._launches.values() for done in launches
                if done.tick > known.get(done.stream, 0)]  # fmt: skip


def _same(stream: int) -> int:
    return DEFAULT if stream == _LEGACY else stream


def _race(first: Done, second: Done, meets: Meeting) -> GlobalMemoryRace:
    did = ["writes" if code & WRITES else "reads" for code in meets.codes]
    sentence = f"{second} {did[1]} global memory that {first} {did[0]}, and nothing orders the two"
    return second.race(sentence, f"byte {meets.byte} of a tensor on the device ({meets.region[1]} bytes)")


def _name(stream: int) -> str:
    return "the default stream" if stream == DEFAULT else f"stream {stream:#x}"


def answers(streams: Streams, driver: ModuleType, runtime: ModuleType) -> Iterator[tuple[object, str, object]]:
    """Entry points of cuda-python for streams and events: module, name and what stands for it."""
    events: dict[int, Point] = {}
    handles = itertools.count(_FIRST_EVENT, 0x100)

    def new_stream(flags: object = 0) -> int:
        return streams.create(alone=bool(int(flags) & 1))  # CU_STREAM_NON_BLOCKING

    def new_event() -> int:
        handle = next(handles)
        events[handle] = {}
        return handle

    def record(event: object, stream: object = DEFAULT) -> None:
        events[int(event)] = streams.reached(int(stream))

    common: dict[str, Callable[..., object]] = {
        "StreamSynchronize": lambda stream: streams.host_waits("StreamSynchronize", stream=int(stream)),
        "StreamQuery": lambda stream: streams.host_waits("StreamQuery", stream=int(stream)),  # all work is complete
        "StreamDestroy": lambda stream: None,
        "StreamWaitEvent": lambda stream, event, flags=0: streams.wait(int(stream), events.get(int(event))),
        "EventRecord": record,
        "EventSynchronize": lambda event: streams.host_waits("EventSynchronize", events.get(int(event))),
        "EventQuery": lambda event: streams.host_waits("EventQuery", events.get(int(event))),
        "EventRecordWithFlags": lambda event, stream, flags: record(event, stream),
        "EventDestroy": lambda event: None,
    }
    made = {
        (driver, "cuStreamCreate"): lambda flags: driver.CUstream(new_stream(flags)),
        (driver, "cuStreamCreateWithPriority"): lambda flags, priority: driver.CUstream(new_stream(flags)),
        (driver, "cuEventCreate"): lambda flags: driver.CUevent(new_event()),
        (driver, "cuCtxSynchronize"): lambda: streams.host_waits("cuCtxSynchronize"),
        (runtime, "cudaStreamCreate"): lambda: runtime.cudaStream_t(new_stream()),
        (runtime, "cudaStreamCreateWithFlags"): lambda flags: runtime.cudaStream_t(new_stream(flags)),
        (runtime, "cudaStreamCreateWithPriority"): lambda flags, priority: runtime.cudaStream_t(new_stream(flags)),
        (runtime, "cudaEventCreate"): lambda: runtime.cudaEvent_t(new_event()),
        (runtime, "cudaEventCreateWithFlags"): lambda flags: runtime.cudaEvent_t(new_event()),
        (runtime, "cudaDeviceSynchronize"): lambda: streams.host_waits("cudaDeviceSynchronize"),
    }
    for module, prefix in ((driver, "cu"), (runtime, "cuda")):
        made |= {(module, prefix + name): function for name, function in common.items()}
    for (module, name), function in made.items():
        success = driver.CUresult.CUDA_SUCCESS if module is driver else runtime.cudaError_t.cudaSuccess
        yield module, name, _answering(function, success)


def _answering(function: Callable[..., object], success: object) -> Callable[..., tuple]:
    """Answer in the form of cuda-python: a status, and what there is of a result."""

    def answer(*arguments: object) -> tuple:
        result = function(*arguments)
        return (success,) if result is None else (success, result)

    return answer
