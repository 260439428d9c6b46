"""Launches of two streams race unless something orders them: each way of ordering, and what looks like one."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import cuda.bindings.driver as driver
import cuda.bindings.runtime as runtime
import cutlass
import pytest
import torch
from cutlass.cute.runtime import from_dlpack

from cute_kernels.emulator import EmulatorError, Options
from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.errors import GlobalMemoryRace
from cute_kernels.emulator.programs import capture, host
from cute_kernels.emulator.programs.capturing import Session
from cute_kernels.emulator.reports.diagnosis import diagnose
from cute_kernels.testing.ptx import module
from tests.emulator import scale_program

COUNT = 64
COPY = module(
    """
    ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1];
    mov.u32 %r1, %tid.x; mul.wide.u32 %d3, %r1, 4;
    add.s64 %d1, %d1, %d3; add.s64 %d2, %d2, %d3;
    ld.global.u32 %r2, [%d1]; st.global.u32 [%d2], %r2; ret;
    """,
    parameters=2,
    target="sm_90a",
)
BULK_COPY = module(
    """
    ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1];
    mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 ret;
    mov.u32 %r2, dynamic; mov.u32 %r3, 0;
    mbarrier.init.shared.b64 [%r2], 1; fence.proxy.async;
    mbarrier.arrive.expect_tx.shared.b64 %d3, [%r2], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2 + 128], [%d1], 256, [%r2];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; @!%p2 bra WAIT;
    cp.async.bulk.global.shared::cta.bulk_group [%d2], [%r2 + 128], 256;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; ret;
    """,
    parameters=2,
    target="sm_90a",
)
WIDE_COPY = module(
    """
    ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1];
    mov.u32 %r1, %tid.x; setp.ge.u32 %p1, %r1, 32; @%p1 ret;
    mul.wide.u32 %d3, %r1, 16; add.s64 %d1, %d1, %d3; add.s64 %d2, %d2, %d3;
    ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%d1]; st.global.v4.u32 [%d2], {%r2, %r3, %r4, %r5}; ret;
    """,
    parameters=2,
    target="sm_90a",
)
COUNT_UP = module(
    "ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; atom.global.add.u32 %r1, [%d2], 1; ret;",
    parameters=2,
    target="sm_90a",
)


def copy(x: torch.Tensor, y: torch.Tensor, stream: object = None, ptx: str = COPY) -> None:
    """y = x by a kernel in a stream, torch's current one without any."""
    name = ptx.partition(".entry ")[2].partition("(")[0].strip()
    handle = int(getattr(stream, "cuda_stream", torch.cuda.current_stream().cuda_stream if stream is None else stream))
    params = tuple(t.data_ptr().to_bytes(8, "little") for t in (x, y))
    host.submit(CapturedLaunch(name, (1, 1, 1), (COUNT, 1, 1), (1, 1, 1), 1024, params, ptx, stream=handle))


@pytest.fixture
def session() -> Iterator[Session]:
    with capture("sm_90a") as session:
        yield session


def tensors(count: int = 3) -> list[torch.Tensor]:
    return [torch.full((COUNT,), n, dtype=torch.int32, device="cuda") for n in range(count)]


def event_of(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


ORDERED: dict[str, Callable] = {
    "wait_stream": lambda a, b: b.wait_stream(a),
    "wait_event": lambda a, b: b.wait_event(event_of(a)),
    "event.wait": lambda a, b: event_of(a).wait(b),
    "record_event": lambda a, b: b.wait_event(a.record_event()),
    "event.synchronize": lambda a, b: event_of(a).synchronize(),
    "event.query": lambda a, b: event_of(a).query(),
    "an event that a launch may record": lambda a, b: (event := torch.cuda.Event()).cuda_event and event.wait(b),
    "stream.synchronize": lambda a, b: a.synchronize(),
    "stream.query": lambda a, b: a.query(),
    "device": lambda a, b: torch.cuda.synchronize(),
    "cuStreamSynchronize": lambda a, b: driver.cuStreamSynchronize(driver.CUstream(a.cuda_stream)),
    "cuCtxSynchronize": lambda a, b: driver.cuCtxSynchronize(),
    "cudaDeviceSynchronize": lambda a, b: runtime.cudaDeviceSynchronize(),
}
NOT_ORDERED: dict[str, Callable] = {
    "nothing": lambda a, b: None,
    "the other way round": lambda a, b: a.wait_stream(b),
    "an event of the other stream": lambda a, b: b.wait_event(event_of(b)),
    "an event never recorded": lambda a, b: b.wait_event(torch.cuda.Event()),
    "the host waits for the other stream": lambda a, b: b.synchronize(),
    "a read of another tensor": lambda a, b: torch.ones(4, device="cuda").sum().item(),
}


READS: dict[str, Callable] = {
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu"),
    "copy_": lambda t: torch.empty(t.shape, dtype=t.dtype).copy_(t),
    "tolist": lambda t: t.tolist(),
    "nonzero": lambda t: t.nonzero(),
    "equal": lambda t: torch.equal(t, t),
    "repr": repr,
}


@pytest.mark.parametrize("order", ORDERED)
def test_what_orders_two_streams(session: Session, order: str) -> None:
    x, y, z = tensors()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    copy(x, y, first)
    ORDERED[order](first, second)
    copy(y, z, second)
    torch.cuda.synchronize()
    assert torch.equal(z, x) and len(session.launches) == 2


def test_destroyed_events_leave_their_numbers(session: Session) -> None:
    stream = torch.cuda.Stream()
    numbers = {event_of(stream).event_id for _ in range(100)}
    assert len(numbers) < 5 and 0 not in numbers


def test_an_event_of_a_program_before_orders_nothing() -> None:
    with capture("sm_90a"):
        event = event_of(torch.cuda.Stream())
    with capture("sm_90a"):
        x, y, z = tensors()
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        copy(x, y, first)
        second.wait_event(event)
        with pytest.raises(GlobalMemoryRace):
            copy(y, z, second)


def test_a_handle_of_a_recorded_event_leaves_its_time(session: Session) -> None:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    last.record()
    between = first.elapsed_time(last)
    assert first.cuda_event and first.elapsed_time(last) == between


@pytest.mark.parametrize("order", NOT_ORDERED)
def test_what_does_not(session: Session, order: str) -> None:
    x, y, z = tensors()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    copy(x, y, first)
    NOT_ORDERED[order](first, second)
    with pytest.raises(GlobalMemoryRace, match=r"launch 2 .* in stream 0x\w+ reads .* launch 1 .* writes, and nothing"):
        copy(y, z, second)
    (error,) = session.failures
    assert diagnose(error).kind == "streams" and error.launch_number == 2 and error.ptx == COPY


def test_streams_name_kernels_as_their_program_does(session: Session) -> None:
    x, y, z = tensors()
    mangled = COPY.replace(".entry k(", ".entry kernel_cutlass_copy_tensorptrf32gmemo641_0(")
    copy(x, y, torch.cuda.Stream(), mangled)
    with pytest.raises(GlobalMemoryRace, match=r"launch 2 \(copy\) in stream .* launch 1 \(copy\) in stream"):
        copy(y, z, torch.cuda.Stream(), mangled)


@pytest.mark.parametrize(
    ("first", "second", "races"),
    [
        ((0, 1), (1, 2), True), ((1, 0), (2, 1), True), ((0, 1), (2, 1), True),  # read after write, and so on
        ((0, 1), (0, 2), False), ((0, 1), (3, 2), False),
    ],
)  # fmt: skip
def test_one_of_two_writes(session: Session, first: tuple, second: tuple, races: bool) -> None:
    given = tensors(4)
    copy(given[first[0]], given[first[1]], torch.cuda.Stream())
    run = lambda: copy(given[second[0]], given[second[1]], torch.cuda.Stream())  # noqa: E731
    if races:
        with pytest.raises(GlobalMemoryRace):
            run()
    else:
        run()


def test_parts_of_a_tensor_are_apart(session: Session) -> None:
    x, y, _ = tensors()
    z = torch.zeros(2 * COUNT + 1, dtype=torch.int32, device="cuda")
    copy(x, z[:COUNT], torch.cuda.Stream())
    copy(y, z[COUNT : 2 * COUNT], torch.cuda.Stream())
    with pytest.raises(GlobalMemoryRace, match="byte 4 of a tensor on the device"):
        copy(y, z[1 : COUNT + 1], torch.cuda.Stream())


def test_atomics_on_both_sides(session: Session) -> None:
    x, y, _ = tensors()
    copy(x, y, torch.cuda.Stream(), COUNT_UP)
    copy(x, y, torch.cuda.Stream(), COUNT_UP)
    with pytest.raises(GlobalMemoryRace):
        copy(y, x, torch.cuda.Stream())


def test_order_goes_on_from_stream_to_stream(session: Session) -> None:
    x, y, z = tensors()
    a, b, c = (torch.cuda.Stream() for _ in range(3))
    copy(x, y, a)
    b.wait_stream(a)
    copy(x, z, b)
    c.wait_stream(b)
    copy(y, x, c)
    event = event_of(a)
    copy(z, y, c)  # of a stream that has waited
    copy(tensors(1)[0], tensors(1)[0], a)
    b.wait_event(event)  # recorded before the launch of c
    with pytest.raises(GlobalMemoryRace):
        copy(y, z, b)


def test_the_default_stream_and_the_others(session: Session) -> None:
    """It waits for streams that are not made with cudaStreamNonBlocking, and they for it; torch's are made so."""
    _, plain = driver.cuStreamCreate(0)
    _, alone = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    _, of_runtime = runtime.cudaStreamCreate()
    _, other = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)
    handles = [int(each) for each in (plain, alone, of_runtime, other)]
    assert 0 not in handles and len(set(handles)) == 4
    for stream, ordered in zip((*handles, torch.cuda.Stream()), (True, False, True, False, False)):
        for streams in ((stream, 0), (0, stream)):
            x, y, z = tensors()
            copy(x, y, streams[0])
            if ordered:
                copy(y, z, streams[1])
            else:
                with pytest.raises(GlobalMemoryRace, match="the default stream"):
                    copy(y, z, streams[1])
    x, y, z = tensors()
    copy(x, y, plain)
    with pytest.raises(GlobalMemoryRace):
        copy(y, z, of_runtime)


def test_a_stream_that_waits_and_launches_nothing_holds_the_default_stream_back(session: Session) -> None:
    x, y, z = tensors()
    first, plain, later = torch.cuda.Stream(), driver.cuStreamCreateWithPriority(0, 0)[1], torch.cuda.Stream()
    copy(x, y, first)
    _, event = driver.cuEventCreate(0)
    driver.cuEventRecord(event, driver.CUstream(first.cuda_stream))
    driver.cuStreamWaitEvent(plain, event, 0)
    copy(y, z)
    with pytest.raises(GlobalMemoryRace):
        copy(x, z, later)


@pytest.mark.parametrize("module_", [driver, runtime])
def test_a_query_tells_the_program_that_work_is_complete(session: Session, module_: object) -> None:
    prefix = "cu" if module_ is driver else "cuda"
    _, stream = getattr(module_, prefix + "StreamCreateWithPriority")(1, 0)
    _, event = driver.cuEventCreate(0) if module_ is driver else runtime.cudaEventCreate()
    for query in ("StreamQuery", "EventQuery"):
        x, y, z = tensors()
        copy(x, y, int(stream))
        getattr(module_, prefix + "EventRecordWithFlags")(event, stream, 0)
        status, *_ = getattr(module_, prefix + query)(stream if query == "StreamQuery" else event)
        assert int(status) == 0
        copy(y, z, torch.cuda.Stream())


def test_a_capture_is_of_its_thread(session: Session) -> None:
    """What another thread launches meanwhile is executed."""
    x, y, z = tensors()
    graph, seen = torch.cuda.CUDAGraph(), []

    def elsewhere() -> None:
        seen.append(torch.cuda.is_current_stream_capturing())
        copy(x, z)

    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
        assert torch.cuda.is_current_stream_capturing()
        copy(x, y)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert seen == [False] and not torch.cuda.is_current_stream_capturing() and graph.pool() == (0, 0)
    assert y[0].item() == 1 and z[0].item() == 0
    graph.replay()
    assert y[0].item() == 0


def test_events_of_cuda_python(session: Session) -> None:
    streams = [driver.cuStreamCreate(1)[1] for _ in range(2)]
    x, y, z = tensors()
    _, event = driver.cuEventCreate(0)
    copy(x, y, streams[0])
    assert driver.cuEventRecord(event, streams[0]) == (driver.CUresult.CUDA_SUCCESS,)
    driver.cuStreamWaitEvent(streams[1], event, 0)
    copy(y, z, streams[1])
    _, other = runtime.cudaEventCreate()
    runtime.cudaEventRecord(other, streams[1])
    runtime.cudaEventSynchronize(other)
    copy(z, x, torch.cuda.Stream())


def test_copies_to_the_host_wait_for_the_current_stream_alone(session: Session) -> None:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for read in READS.values():
        x, y, z = tensors()
        with torch.cuda.stream(first):
            copy(x, y)
            read(y)
        copy(y, z, second)
        x, y, z = tensors()
        copy(x, y, first)
        read(x), read(z)  # in the default stream, for which alone the host waits
        with pytest.raises(GlobalMemoryRace):
            copy(y, z, second)
        torch.cuda.synchronize()
    x, y, z = tensors()
    with torch.cuda.stream(first):
        copy(x, y)
        y.to("cpu", non_blocking=True)
    with pytest.raises(GlobalMemoryRace):
        copy(y, z, second)


@pytest.mark.parametrize("read", READS)
def test_what_the_host_reads_was_written_before(session: Session, read: str) -> None:
    """By the rules of torch: it waits for the current stream alone."""
    x, y, _ = tensors()
    stream = torch.cuda.Stream()
    copy(x, y, stream)
    with pytest.raises(GlobalMemoryRace, match=r"in the default stream reads what launch 1 \(k\) in") as caught:
        READS[read](y)
    assert diagnose(caught.value).kind == "streams" and caught.value.launch_number == 1
    READS[read](x)
    READS[read](y[:0])
    torch.cuda.current_stream().wait_stream(stream)
    READS[read](y)


def test_streams_are_entered_by_each_thread(session: Session) -> None:
    default, stream, found = torch.cuda.current_stream(), torch.cuda.Stream(), []
    assert default.cuda_stream == 0 and default == torch.cuda.default_stream() != stream
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        with torch.cuda.stream(None), torch.cuda.stream(default):
            assert torch.cuda.current_stream() == default
        thread = threading.Thread(target=lambda: found.append(torch.cuda.current_stream()))
        thread.start()
        thread.join()
        assert torch.cuda.current_stream() == stream and found == [default]
    assert torch.cuda.current_stream() == default
    torch.cuda.set_stream(stream)
    assert torch.cuda.current_stream() == stream
    assert isinstance(stream, torch.cuda.Stream) and torch.cuda.ExternalStream(stream.cuda_stream) == stream


def test_memory_that_was_freed_is_no_more_raced_for(session: Session) -> None:
    """The allocator may place another tensor there."""
    x, y = tensors(2)
    copy(x, y, torch.cuda.Stream())
    lifetimes = session.device.lifetimes()
    address = y.data_ptr()
    assert lifetimes(address) and not lifetimes(address + 4)
    (done,) = next(iter(session.streams._launches.values()))
    assert {span.region[0] for span in done.accesses()} == {x.data_ptr(), address}
    del y
    gc.collect()
    assert not lifetimes(address) and {span.region[0] for span in done.accesses()} == {x.data_ptr()}


def test_the_stream_of_host_code_counts(session: Session) -> None:
    """CuTe DSL's own, with the handle that the program passes."""
    x, y = (torch.ones(64, device="cuda") for _ in range(2))
    given = [from_dlpack(t).mark_layout_dynamic() for t in (x, y)]

    def launch(a: object, b: object, stream: torch.cuda.Stream) -> None:
        handle = driver.CUstream(stream.cuda_stream)
        scale_program.host(a, b, cutlass.Float32(2), cutlass.Int32(64), handle)

    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    launch(*given, first)
    launch(*given, first)
    assert session.launches[0].launch.stream == first.cuda_stream
    with pytest.raises(GlobalMemoryRace):
        launch(*given, second)


@pytest.mark.parametrize("ptx", [BULK_COPY, WIDE_COPY], ids=["bulk copies", "16 bytes a lane"])
def test_copies_race_however_they_are_made(session: Session, ptx: str) -> None:
    """What one stream's copy writes another one's reads; a copy of the same into other bytes is another matter."""
    x, y, z = (torch.full((128,), n, dtype=torch.int32, device="cuda") for n in range(3))
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    copy(x, y, first, ptx)
    copy(x, z, second, ptx)
    with pytest.raises(GlobalMemoryRace):
        copy(y, z, second, ptx)


@pytest.mark.parametrize("synchronises", [True, False])
def test_a_capture_by_torch_is_behind_what_warmed_up_in_another_stream(session: Session, synchronises: bool) -> None:
    """torch.cuda.graph waits for the device before it captures; capture_begin alone does not."""
    x, y, _ = tensors()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        copy(x, y)
    if synchronises:
        with torch.cuda.graph(graph):
            copy(x, y)
        graph.replay()
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        copy(x, y)
        graph.capture_end()
    with pytest.raises(GlobalMemoryRace):
        graph.replay()


def test_a_graph_runs_in_the_stream_in_which_it_is_replayed(session: Session) -> None:
    x, y, z = tensors()
    graph, first, second = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        for stream in (first, second):
            stream.wait_stream(torch.cuda.current_stream())
        copy(x, y, first)
        copy(y, z, second)
        for stream in (first, second):
            torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.stream(first):
        graph.replay()
        graph.replay()
    with torch.cuda.stream(second), pytest.raises(GlobalMemoryRace):
        graph.replay()


@pytest.mark.parametrize("options", [{"detectors": False}, {"without": ("races",)}])
def test_without_race_detection_it_is_not_looked_for(options: dict) -> None:
    with capture("sm_90a", Options(**options)) as session:
        x, y, z = tensors()
        copy(x, y, torch.cuda.Stream())
        copy(y, z, torch.cuda.Stream())
    assert len(session.launches) == 2


def test_a_program_may_go_on() -> None:
    found: list[EmulatorError] = []
    with capture("sm_90a", Options(going_on=lambda error: not found.append(error))) as session:
        x, y, z = tensors()
        copy(x, y, torch.cuda.Stream())
        copy(y, z, torch.cuda.Stream())
        assert torch.equal(z, x)  # of another stream than this one
    assert len(session.launches) == 2 and [error.launch_number for error in found] == [2, 2]
