"""Executes the clusters of a launch in this process (`residents`), or some of them at the same time in others.

Clusters are independent when none reads or writes what another one has written. That is not known before: processes
that are forked for the launch execute the clusters that are dealt to them on memory of their own. When all have ended
without a report, and the race detector's records show that no process accessed what another one wrote, what they wrote
is put into the memory of this process. Otherwise nothing has happened yet, and the clusters are executed one after the
other: what they do to each other, and what is reported of them, is then what one process does and reports. Each
cluster draws its schedule from the seed and its own number in either case, and counts are added up in the order of the
clusters.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.machine.launch.forked import AVAILABLE, Ended, Forked
from cute_kernels.emulator.machine.launch.launch import Launch
from cute_kernels.emulator.machine.launch.residents import ClusterWork, Residents
from cute_kernels.emulator.machine.state.gmem import GlobalMemory
from cute_kernels.emulator.observe.trace import Timeline
from cute_kernels.emulator.races.launch_accesses import MAP_BYTES, Span, meeting

Progress = Callable[[int, int], None]
_MAPS = Path("/proc/self/maps")


class Dependent(Exception):
    """Clusters are to be executed one after the other; the message says why."""


def in_turn(launch: Launch, timeline: Timeline | None) -> Iterator[ClusterWork]:
    """Executes the clusters that have not started, in this process. Raises EmulatorError: what a cluster or a detector
    reports."""
    return Residents(launch, timeline).run()


def known_dependence(launch: Launch) -> str:
    """Why clusters cannot be executed at the same time, as far as that is known before; "": nothing is in the way."""
    options = launch.options
    if not AVAILABLE:
        return "the system does not fork processes"
    if len(launch.waiting) < 2:
        return "it has one cluster"
    if options.steps or options.stepped is not None or options.debugger is not None:
        return "its schedule is given or noted step by step, or a debugger stops it"
    if launch.races is None:
        return "the race detector is off, which tells whether clusters are independent"
    if options.trace is not None:
        return "a timeline is written"
    return launch.execution.kernel.dependence or _shared_memory(launch.memory)


def _shared_memory(memory: GlobalMemory) -> str:
    """Memory that may be written and is not one process's own, or is registered under two names; "": none."""
    regions = sorted(memory.regions(), key=lambda region: region.start)
    end, widest = 0, None
    for region in regions:
        if widest is not None and region.start < end and (region.writable or widest.writable):
            same = (region.start, region.end, region.writable) == (widest.start, widest.end, widest.writable)
            if not same:
                return f"{widest.name or 'an array'} and {region.name or 'an array'} share memory"
        if region.end > end:
            end, widest = region.end, region
    mappings = _shared_mappings()
    if mappings is None:
        return "the system does not tell which memory processes share"
    for region in regions:
        if region.writable and any(start < region.end and region.start < end for start, end in mappings):
            return f"{region.name or 'an array'} is in memory that processes share"
    return ""


def _shared_mappings() -> Sequence[tuple[int, int]] | None:
    """Address ranges of this process that a forked one would share; None where the system does not tell."""
    try:
        lines = _MAPS.read_text(errors="replace").splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        span, flags = line.split()[:2]
        if flags.endswith("s"):
            first, _, end = span.partition("-")
            found.append((int(first, 16), int(end, 16)))
    return found


def at_once(launch: Launch, progress: Progress) -> list[ClusterWork]:
    """Executes the clusters of a launch that have not started in ``Options.processes`` processes, if no
    `known_dependence` is known; what they did, in their order. ``progress`` gets (clusters done, clusters to run).

    Raises Dependent: they are to be executed one after the other, and the launch's memory and what its race detector
    knows are unchanged; RuntimeError: a process was ended by someone else while its results were copied, in part."""
    library()  # not compiled by each process
    clusters = len(launch.waiting)
    count = min(launch.options.processes, clusters)
    works: dict[int, ClusterWork] = {}
    done = 0
    accesses: list[list[Span]] = [[] for _ in range(count)]
    maps: list[frozenset[int]] = [frozenset()] * count
    try:
        with Forked([functools.partial(_deal, launch, number, count) for number in range(count)]) as processes:
            for number, message in processes.messages():
                if isinstance(message, str):
                    raise Dependent(message)
                if isinstance(message, list):
                    accesses[number] = message
                    continue
                if isinstance(message, frozenset):
                    maps[number] = message
                    continue
                position, works[position] = message
                for _ in range(works[position].clusters):
                    done += 1
                    progress(done, clusters)
            _check_apart(launch, accesses)
            _check_maps(accesses, maps)
            _copy_results(processes, accesses)
    except Ended as ended:
        raise Dependent(str(ended)) from None
    launch.waiting = ()
    launch.races.elsewhere += [span for spans in accesses for span in spans]
    return [works[position] for position in sorted(works)]


def _deal(launch: Launch, number: int, count: int, connection: Connection) -> None:
    """In a forked process: executes every ``count``-th cluster from ``number`` on, and says what they did."""
    launch.options = dataclasses.replace(launch.options, going_on=None)  # which is asked in the order of clusters
    try:
        launch.waiting = launch.waiting[number::count]
        position = number
        for work in in_turn(launch, None):
            connection.send((position, work))
            position += count * work.clusters
    except EmulatorError:
        connection.send("something is reported of a cluster")
        return
    accesses = launch.races.accesses()
    connection.send(accesses)
    connection.send(frozenset(launch.races.maps))
    connection.send(None)
    if connection.recv_bytes():
        for span in accesses:
            connection.send_bytes(span.written())


def _check_apart(launch: Launch, accesses: Sequence[Sequence[Span]]) -> None:
    found = meeting(accesses)
    if found is not None:
        (origin, _), byte = found
        region = next(r for r in launch.memory.regions() if r.start <= origin + byte < r.end)
        where = f"byte {origin + byte - region.start} of {region.name or 'a global array'}"
        raise Dependent(f"one cluster writes {where}, and another one reads or writes it")


def _check_maps(accesses: Sequence[Sequence[Span]], maps: Sequence[frozenset[int]]) -> None:
    for reader, addresses in enumerate(maps):
        others = [span for writer, spans in enumerate(accesses) if writer != reader for span in spans]
        if any(span.overwrites(address, MAP_BYTES) for address in addresses for span in others):
            raise Dependent("one cluster writes a tensor map that another one uses")


def _copy_results(processes: Forked, accesses: Sequence[Sequence[Span]]) -> None:
    for connection, spans in zip(processes.connections, accesses, strict=True):
        try:
            connection.send_bytes(b"copy")
            for span in spans:
                span.write(connection.recv_bytes())
        except (EOFError, OSError):
            raise RuntimeError("a process that executed clusters ended while its results were copied") from None
