"""Recorded launches: run again elsewhere, with addresses moved; which may overlap."""

from __future__ import annotations

import mmap
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.errors import IllegalAccess, Race
from cute_kernels.emulator.programs.recorded import Recorder, Replay, StreamOrder, differences, guarded
from cute_kernels.testing.ptx import aligned, module

# p0 is a table of pointers in device memory: the number that the first one leads to goes, plus 1, to the second.
INDIRECT = """ld.param.u64 %d1, [p0]; ld.global.b64 %d2, [%d1]; ld.global.b64 %d3, [%d1+8];
ld.global.b32 %r1, [%d2]; add.u32 %r1, %r1, 1; st.global.b32 [%d3], %r1; ret;"""


def captured(ptx: str, *arrays: np.ndarray, programmatic: bool = False) -> CapturedLaunch:
    parameters = tuple(array.ctypes.data.to_bytes(8, "little") for array in arrays)
    return CapturedLaunch("k", (1, 1, 1), (1, 1, 1), (1, 1, 1), 0, parameters, ptx, programmatic)


def regions(*arrays: np.ndarray) -> list[tuple[int, int]]:
    return [(array.ctypes.data, array.nbytes) for array in arrays]


def text(body: str, parameters: int = 1) -> str:
    return module(body, parameters=parameters)


def mapped(*values: int, dtype: type) -> np.ndarray:
    """Values in pages of their own, above 2^32 as device memory is: the heap may lie below, where a word of data is not
    taken for an address."""
    array = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype)[: len(values)]
    array[:] = values
    assert array.ctypes.data >= 1 << 32
    return array


def test_a_launch_runs_again_where_its_memory_lies_elsewhere() -> None:
    source, target = mapped(41, dtype=np.uint32), mapped(0, dtype=np.uint32)
    table = mapped(source.ctypes.data, target.ctypes.data, dtype=np.uint64)
    recorder, ptx = Recorder(), text(INDIRECT)
    recorder.take(captured(ptx, table), regions(source, target, table), overlaps=False)
    (recorded,) = pickle.loads(pickle.dumps(recorder.launches))
    source[:], table[:] = 0, 0  # what the program does later does not matter
    replay = Replay(recorded)
    for _ in range(2):
        outcome = replay.run(Options())
        images = {image.address: memory for image, memory in zip(recorded.memory, outcome.memory)}
        assert images[target.ctypes.data].view(np.uint32)[0] == 42
    assert target[0] == 0
    other = replay.run(Options(), ptx=ptx.replace("%r1, 1;", "%r1, 0x301;"))
    assert differences(outcome, outcome) == ""
    assert differences(other, outcome).startswith("1 bytes of device memory differ; the first is byte 1 of the 4 bytes")
    with pytest.raises(IllegalAccess) as raised:
        replay.run(Options(), ptx=ptx.replace("[%d1+8]", "[%d1+16]"))
    assert raised.value.launch_number == 1 and raised.value.launch == recorded.launch


def test_a_launch_behind_another_one_is_another_launch_where_the_two_may_overlap() -> None:
    """What the one before it does decides whether they race; without overlap it decides nothing."""
    x = aligned(np.zeros(64, np.uint32))
    sound, racing, second = text("ret;"), text("mov.b32 %r1, 0; ret;"), text("bar.warp.sync -1; ret;")
    for overlaps, found in ((True, [1, 2, 3, 4]), (False, [1, 2, 3])):
        recorder = Recorder()
        for first in (sound, racing, sound):
            recorder.take(captured(first, x), regions(x), overlaps=False)
            recorder.take(captured(second, x, programmatic=True), regions(x), overlaps=overlaps)
        assert [each.number for each in recorder.launches] == found


def test_equal_launches_are_recorded_once_and_memory_that_stays_is_shared() -> None:
    x, y = aligned(np.zeros(64, np.uint32)), aligned(np.zeros(64, np.uint32))
    recorder, ptx = Recorder(), text("ret;")
    for _ in range(3):
        recorder.take(captured(ptx, x), regions(x, y), overlaps=False)
    x[0] = 1
    recorder.take(captured(ptx, x), regions(x, y), overlaps=False)
    assert [each.number for each in recorder.launches] == [1, 4] and recorder.total == 4
    contents = [{image.address: image.content for image in each.memory} for each in recorder.launches]
    assert contents[0][y.ctypes.data] is contents[1][y.ctypes.data]
    assert contents[0][x.ctypes.data] is not contents[1][x.ctypes.data]


def test_each_launch_keeps_what_it_has_executed() -> None:
    x, recorder = mapped(0, dtype=np.uint32), Recorder()
    for executed, body in ((5, "ret;"), (7, "bar.sync 0; ret;")):
        recorder.take(captured(text(body), x), regions(x), overlaps=False)
        recorder.ended(SimpleNamespace(warp_instructions=executed, certificate=None))
    assert [each.warp_instructions for each in recorder.launches] == [5, 7]


@pytest.mark.parametrize("alignment", [256, 4096, 1 << 16])
def test_memory_that_stands_for_that_of_the_device_is_aligned(alignment: int) -> None:
    memory = guarded(100, alignment)
    assert memory.ctypes.data % alignment == 0 and not memory.any()


def test_a_launch_without_one_before_it_overlaps_itself() -> None:
    x, recorder = mapped(1, dtype=np.uint32), Recorder()
    body = "ld.param.u64 %d1, [p0]; ld.global.b32 %r1, [%d1]; add.u32 %r1, %r1, 1; st.global.b32 [%d1], %r1; ret;"
    ptx = text(f"griddepcontrol.launch_dependents; {body}")
    recorder.take(captured(ptx, x, programmatic=True), regions(x), overlaps=False)
    replay = Replay(recorder.launches[0])
    assert replay.run(Options()).memory[0].view(np.uint32)[0] == 2
    with pytest.raises(Race) as raised:
        replay.run(Options(), overlap=True)
    assert raised.value.kind == "launch-overlap"


def test_what_lies_in_between_ends_an_overlap() -> None:
    x = aligned(np.zeros(64, np.uint32))
    order = StreamOrder()
    assert not order.directly_follows(regions(x))  # nothing to follow
    order.launched(regions(x))
    assert order.directly_follows(regions(x))
    order.made("empty")
    assert order.directly_follows(regions(x, aligned(x)))
    x[3] = 1  # by a kernel of torch's
    assert not order.directly_follows(regions(x))
    order.launched(regions(x))
    order.made("zeros")
    assert not order.directly_follows(regions(x))
    order.launched(regions(x), stream=7)
    assert order.directly_follows(regions(x), stream=7) and not order.directly_follows(regions(x))


def test_new_memory_is_zero_whatever_the_host_held_there() -> None:
    large = [guarded(3_000_000, 64) for _ in range(8)]
    del large
    for size in range(100_000, 100_030):
        memory = guarded(size, 64)
        assert not memory.any()
        memory[:] = 255
        del memory


def test_launches_that_find_other_values_in_the_modules_variables_are_others() -> None:
    x, recorder, ptx = aligned(np.zeros(4, np.uint32)), Recorder(), text("ret;")
    for value in (1, 1, 2, 1):
        variables = {"count": np.array([value], np.uint32).view(np.uint8)}
        recorder.take(captured(ptx, x), regions(x), overlaps=False, variables=variables)
    assert [each.number for each in recorder.launches] == [1, 3] and recorder.total == 4
