"""Which streams belong to the capture of a CUDA graph, and what a capture does not permit: as the CUDA runtime has it.

Reference: CUDA Programming Guide, "Creating a Graph Using Stream Capture"; errors of cudaStreamCaptureMode.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

from cute_kernels.emulator.programs import capture
from cute_kernels.emulator.programs.capturing import Session
from tests.emulator.programs.test_streams import copy


@pytest.fixture
def session() -> Iterator[Session]:
    with capture("sm_90a") as session:
        yield session


def zeros() -> torch.Tensor:
    return torch.zeros(64, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("launches", [False, True], ids=["operators", "launches"])
def test_what_is_not_forked_runs_at_once_and_once(session: Session, launches: bool) -> None:
    """It finds memory as it is when the capture has run nothing."""
    x, y, z, graph, other = zeros(), zeros(), zeros(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        x.add_(1)
        with torch.cuda.stream(other):
            if launches:
                copy(x, y)
            else:
                y.copy_(x)
            y.add_(5)
            x.add_(10)
        z.copy_(x)
    torch.cuda.synchronize()
    assert (x[0].item(), y[0].item(), z[0].item()) == (10, 5, 0)
    for expected in (11, 12):
        graph.replay()
        assert (x[0].item(), y[0].item(), z[0].item()) == (expected, 5, expected)


def test_a_launch_in_the_default_stream_is_not_captured(session: Session) -> None:
    """It is what forgets to name the current stream: a GPU runs it once, too, and never again."""
    x, y, graph = zeros().add_(3), zeros(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy(x, y, stream=0)
    assert len(session.launches) == 1 and y[0].item() == 3
    graph.replay()
    assert len(session.launches) == 1


def fork(x: torch.Tensor, other: torch.cuda.Stream) -> torch.Tensor:
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        return x * 2


@pytest.mark.parametrize("event", [torch.Event, None], ids=["torch.Event", "torch.cuda.Event"])
def test_forks_are_captured(session: Session, event: type | None) -> None:
    x, graph, other = zeros(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        x.add_(1)
        y = fork(x, other)
        if event is None:
            torch.cuda.current_stream().wait_stream(other)
        else:
            done = event("cuda")
            done.record(other)
            done.wait(torch.cuda.current_stream())
        x.add_(y)
    assert x[0].item() == 0
    graph.replay()
    assert (x[0].item(), y[0].item()) == (3, 2)
    y = fork(x, other)  # as any stream again
    torch.cuda.current_stream().wait_stream(other)
    assert y[0].item() == 6


def test_backward_in_a_forked_stream_is_joined_by_autograd(session: Session) -> None:
    layer, other, graph = torch.nn.Linear(4, 4, device="cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    x = torch.ones(2, 4, device="cuda")
    with torch.cuda.graph(graph):
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            y = layer(x)
        torch.cuda.current_stream().wait_stream(other)
        y.sum().backward()
    graph.replay()
    assert layer.bias.grad.tolist() == [2.0] * 4


def never_joined(x: torch.Tensor, other: torch.cuda.Stream) -> None:
    fork(x, other)


def work_after_the_join(x: torch.Tensor, other: torch.cuda.Stream) -> None:
    fork(x, other)
    torch.cuda.current_stream().wait_stream(other)
    with torch.cuda.stream(other):
        copy(x, x)


def depends_on_other_work(x: torch.Tensor, other: torch.cuda.Stream) -> None:
    torch.cuda.current_stream().wait_stream(other)


def default_stream_waits(x: torch.Tensor, other: torch.cuda.Stream) -> None:
    torch.cuda.default_stream().wait_stream(torch.cuda.current_stream())


def error_is_dropped(x: torch.Tensor, other: torch.cuda.Stream) -> None:
    try:
        x.sum().item()
    except RuntimeError:
        x.add_(1)


def event_of_the_capture(x: torch.Tensor, other: torch.cuda.Stream) -> None:
    torch.cuda.current_stream().record_event().synchronize()


FAULTS: dict[str, tuple[Callable[[torch.Tensor, torch.cuda.Stream], object], str]] = {
    "never joined": (never_joined, "capturing stream has unjoined work"),
    "work after the join": (work_after_the_join, "capturing stream has unjoined work"),
    "a dependency on work before": (depends_on_other_work, "dependency created on uncaptured work in another stream"),
    "the default stream": (default_stream_waits, "operation would make the legacy stream depend on a capturing"),
    "after an error": (error_is_dropped, "operation failed due to a previous error during capture"),
    "an event": (event_of_the_capture, "operation not permitted on an event last recorded in a capturing stream"),
    "a query": (lambda x, other: other.query(), "operation not permitted when stream is capturing"),
    "another stream": (lambda x, other: other.synchronize(), "operation not permitted when stream is capturing"),
    "the device": (lambda x, other: torch.cuda.synchronize(), "operation not permitted when stream is capturing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_captures_that_a_gpu_refuses(session: Session, fault: str) -> None:
    function, said = FAULTS[fault]
    x, graph, other = zeros(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with pytest.raises(RuntimeError, match=said), torch.cuda.graph(graph):
        x.add_(1)
        function(x, other)
    assert not torch.cuda.is_current_stream_capturing() and x[0].item() == 0
    with pytest.raises(RuntimeError, match="has not been captured"):
        graph.replay()


def test_captures_that_would_merge(session: Session) -> None:
    streams, graphs = [torch.cuda.Stream() for _ in range(2)], [torch.cuda.CUDAGraph() for _ in range(2)]
    for stream, graph in zip(streams, graphs):
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="relaxed")
    with pytest.raises(RuntimeError, match="merge of separate capture sequences"):
        streams[0].wait_stream(streams[1])
    for stream, graph in zip(streams[1:], graphs[1:]):
        with torch.cuda.stream(stream):
            graph.capture_end()


@pytest.mark.parametrize("mode, is_refused", [("global", True), ("thread_local", True), ("relaxed", False)])
def test_modes_say_what_may_wait_beside_a_capture(session: Session, mode: str, is_refused: bool) -> None:
    x, graph, beside = zeros(), torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def captured() -> None:
        with torch.cuda.graph(graph, capture_error_mode=mode):
            x.add_(1)
            with torch.cuda.stream(beside):
                assert x[0].item() == 0
            x.add_(1)

    if is_refused:
        with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
            captured()
        return
    captured()
    graph.replay()
    assert x[0].item() == 2


def test_the_default_stream_is_not_captured(session: Session) -> None:
    with pytest.raises(RuntimeError, match="must be captured on a non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()


def test_pinned_memory_is_written_by_replays_alone(session: Session) -> None:
    x, host, graph = torch.ones(4, device="cuda"), torch.zeros(4).pin_memory(), torch.cuda.CUDAGraph()
    lists = [torch.zeros(4).pin_memory()]
    with torch.cuda.graph(graph):
        host.copy_(x * 3, non_blocking=True)
        made = x.to("cpu", non_blocking=True)
        torch._foreach_copy_(lists, [x], non_blocking=True)
        back = host.to("cuda", non_blocking=True)
    assert host.tolist() == lists[0].tolist() == [0.0] * 4
    x.fill_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert host.tolist() == back.tolist() == [6.0] * 4 and made.tolist() == lists[0].tolist() == [2.0] * 4


def test_an_optimiser_learns_that_it_is_captured(session: Session) -> None:
    layer = torch.nn.Linear(2, 2, device="cuda")
    layer(torch.ones(1, 2, device="cuda")).sum().backward()
    optimiser = torch.optim.Adam(layer.parameters())
    with pytest.raises(RuntimeError, match="capturable is False"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimiser.step()


def test_generators_of_a_graph_are_registered(session: Session) -> None:
    generator, graph = torch.Generator("cuda").manual_seed(4), torch.cuda.CUDAGraph()
    expected = [torch.rand(3, device="cuda", generator=torch.Generator("cuda").manual_seed(4)).tolist()]
    with pytest.raises(RuntimeError, match="generator not in capture mode"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.rand(3, device="cuda", generator=generator)
    torch.cuda.set_stream(torch.cuda.default_stream())  # an error in a capture leaves its stream the current one
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        x = torch.rand(3, device="cuda", generator=generator)
    found = []
    for _ in range(2):
        graph.replay()
        found.append(x.tolist())
    assert found[:1] == expected != found[1:]


def test_a_loss_in_a_graph_does_not_warn(session: Session, capfd: pytest.CaptureFixture[str]) -> None:
    x, graph = torch.ones(8, 2, device="cuda"), torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.nn.functional.mse_loss(x, 2 * x).item() == 1
        with torch.cuda.graph(graph):
            loss = torch.nn.functional.mse_loss(x, 3 * x)
        for _ in range(2):
            graph.replay()
    assert loss.item() == 4 and "resized" not in capfd.readouterr().err


def test_a_capture_ends_with_its_program() -> None:
    """Handles of streams are those of the program before."""
    with capture("sm_90a"), torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.CUDAGraph().capture_begin()
    with capture("sm_90a"), torch.cuda.stream(torch.cuda.Stream()):
        assert not torch.cuda.is_current_stream_capturing()
        assert torch.ones(2, device="cuda").tolist() == [1.0, 1.0]
