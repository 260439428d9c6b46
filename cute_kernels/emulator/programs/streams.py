"""Streams and events of a program: what of its launches is ordered, and launches that race.

Launches run one after the other as they are made. On a GPU those of two streams may run at the same time unless an
event, a wait of one stream for another or of the host, or the rules of the default stream order them. Each stream has a
vector clock of the launches that are over when its next one begins; those that the host has waited for are forgotten.
Streams that are captured into a CUDA graph run nothing, and have clocks of their own (`cuda_graphs`).
"""

from __future__ import annotations

import itertools
import threading
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
_CUDA = 1  # c10::DeviceType
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
        self._local = threading.local()  # entered: handles of the streams before
        self._alone: set[int] = set()  # not ordered with the default stream
        self._ticks: Clock = {}
        self._clocks: dict[int, Clock] = {}
        self._launches: dict[int, deque[Done]] = {}
        self._events: list[tuple[int, Point]] = []  # of torch's C++, by number from 1 on; when they were recorded
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

    def enter(self, handle: int) -> None:
        """A stream is the thread's until `leave`."""
        if not hasattr(self._local, "entered"):
            self._local.entered = []
        self._local.entered.append(self.call("exchange_stream", handle))

    def leave(self) -> None:
        """The stream before is."""
        self.call("exchange_stream", self._local.entered.pop())

    def classes(self, base: type) -> tuple[type[Stream], type[Event]]:
        """Stream and Event of the program; ``base``: torch.Stream."""
        return type("Stream", (Stream, base), {"streams": self}), type("Event", (Event,), {"streams": self})

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
            self._events.append((time.perf_counter_ns(), self.reached(stream)))
            return len(self._events)
        at, point = self._events[event - 1] if event else (0, None)
        if what == "elapsed":  # since another event
            return at - self._events[stream - 1][0]
        if what == "is capturing":
            return int(self.capture_of(stream) is not None)
        if what == "block":
            self.wait(stream, point)
        elif what == "synchronize":
            self.host_waits("synchronize", point, None if event else stream)
        else:
            self.host_waits("synchronize")
        return 0

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


# --- what programs see ------------------------------------------------------------------------------------------------


class Stream:
    """Stands for torch.cuda.Stream; a program has a class of its own, with its ``streams``, derived of torch.Stream."""

    streams: Streams

    def __new__(cls, device: object = None, priority: int = 0, *, stream_id: int | None = None, **_: object) -> Stream:
        handle = cls.streams.create(alone=True) if stream_id is None else stream_id
        made = super().__new__(cls, stream_id=handle, device_index=0, device_type=_CUDA)
        made.priority = priority
        return made

    def __init__(self, *_: object, **__: object) -> None: ...

    @property
    def cuda_stream(self) -> int:
        """The handle."""
        return self.stream_id

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority."""
        return 0, -5

    def synchronize(self) -> None:
        """The host waits for what was launched in it."""
        self.streams.host_waits("Stream.synchronize", stream=self.cuda_stream)

    def query(self) -> bool:
        """Whether all work is complete: it is, and the program knows then."""
        self.synchronize()
        return True

    def wait_stream(self, stream: Stream) -> None:
        """Puts what follows in it behind what was launched in another one."""
        self.streams.wait(self.cuda_stream, self.streams.reached(stream.cuda_stream))

    def wait_event(self, event: Event) -> None:
        """Puts what follows in it behind an event."""
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        """Records an event, a new one without any."""
        import torch

        event = event if event is not None else torch.cuda.Event()
        event.record(self)
        return event

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.cuda_stream == other.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)

    def __enter__(self) -> Stream:
        self.streams.enter(self.cuda_stream)
        return self

    def __exit__(self, *_: object) -> None:
        self.streams.leave()

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream


class Event:
    """Stands for torch.cuda.Event; the time between two is that of the emulation, which says nothing about a GPU."""

    streams: Streams

    def __init__(self, enable_timing: bool = False, *_: object, **__: object) -> None:
        self._takes_time, self.seconds = enable_timing, 0.0
        self._clock: Point | None = None
        self._by_launch = False  # a launch has its handle, and may record it

    def _stream(self, stream: object) -> int:
        return self.streams.current if stream is None else stream.cuda_stream

    def record(self, stream: object = None) -> None:
        """Takes the time, and what the stream has been given so far."""
        self.seconds, self._clock = time.perf_counter(), self.streams.reached(self._stream(stream))

    def wait(self, stream: object = None) -> None:
        """Puts what follows in the stream behind it; nothing, if it was never recorded."""
        if self._clock is not None or self._by_launch:
            self.streams.wait(self._stream(stream), self._clock)

    def synchronize(self) -> None:
        """The host waits for it."""
        if self._clock is not None or self._by_launch:
            self.streams.host_waits("Event.synchronize", self._clock)

    def query(self) -> bool:
        """Whether all work before it is complete: it is, and the program knows then."""
        self.synchronize()
        return True

    @property
    def cuda_event(self) -> int:
        """A handle, which launches may carry as an attribute: what waits for it is then behind all launches."""
        self._by_launch, self._clock = True, None
        return id(self)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds of the host's clock between the two, which say nothing of a GPU. Raises ValueError: of events
        that were made without a time, or were not recorded."""
        if not (self._takes_time and end._takes_time):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.seconds and end.seconds):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return 1000 * (end.seconds - self.seconds)


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
