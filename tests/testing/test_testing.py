"""`cute_kernels.testing`, on the kernel and the tests of docs/emulator/your_kernel.md."""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from pathlib import Path

import cutlass.cute as cute
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.emulator.machine.launch.schedule import Schedule
from cute_kernels.emulator.races.certificate import Certificate, Place
from cute_kernels.testing import (
    POISON,
    assert_certified,
    assert_matches,
    emulation,
    exact,
    poisoned,
    schedules_for,
    strategies,
    varied,
)
from tests.emulator.checking.planted import EXAMPLE, planted
from tests.processes import run_python
from tests.test_pytest_plugin import ROOT, run_tests

PAGE = (ROOT / "docs" / "emulator" / "your_kernel.md").read_text()
TESTS = EXAMPLE.with_name("test_bias_add.py")


# --- what the page shows ----------------------------------------------------------------------------------------------


def test_the_page_shows_the_tests_as_they_are() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert blocks[:1] == [TESTS.read_text()]


def test_the_command_of_the_page_finds_the_tests() -> None:
    (folder,) = re.findall(r", run by `pytest (\S+)`:$", PAGE, flags=re.MULTILINE)
    run = run_python("-m", "pytest", "--collect-only", "-p", "no:xdist", folder, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    assert {"test_one_matrix", "test_one_launch_behind_another"} <= set(re.findall(r"::(\w+)", run.stdout)), run.stdout


def test_a_reader_s_copy_passes_and_a_fault_is_found_by_its_tests(tmp_path: Path) -> None:
    (tmp_path / "bias_add.py").write_text(EXAMPLE.read_text())
    (tmp_path / "test_bias_add.py").write_text(TESTS.read_text())
    run = run_tests(tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    passed = re.findall(r"^test_bias_add\.py::(\S+?)(?:\[(.*)\])? PASSED", run.stdout, re.MULTILINE)
    names = [schedule for test, schedule in passed if test == "test_one_matrix"]
    # The default, two, ten that starve five warps, one, two random: each in the name of its test.
    assert len(names) == 16 and names[:2] == ["the default schedule", "--completion lazy"]
    assert ("test_one_launch_behind_another", "") in passed

    (tmp_path / "bias_add.py").write_text(planted("no wait for the launch before", tmp_path).read_text())
    (tmp_path / "conftest.py").write_text(  # hypothesis need not explain what it has found
        "from hypothesis import Phase, settings\n"
        "settings.register_profile('short', phases=[Phase.generate, Phase.shrink], derandomize=True)\n"
        "settings.load_profile('short')\n"
    )
    run = run_tests(tmp_path, "-k", "behind_another")
    assert run.returncode == 1 and "1 failed" in run.stdout and "GlobalMemoryRace" in run.stdout, run.stdout
    # hypothesis reduces the schedule to the one departure that shows it.
    reduced = "completion='eager', interleave='round_robin', spurious_timeouts=False, overlap=True"
    assert reduced in " ".join(run.stdout.replace("\nE", " ").split()), run.stdout


def test_a_compiled_function_is_reused_between_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("copied_bias_add", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "copied_bias_add", module)
    spec.loader.exec_module(module)
    compiled, compile_ = [], cute.compile
    monkeypatch.setattr(cute, "compile", lambda *arguments: compiled.append(arguments) or compile_(*arguments))
    rows = set()

    @settings(max_examples=40, deadline=None, database=None)
    @given(schedule=strategies.schedules(), shape=strategies.shapes(160, 32, multiples=(16, 32)))
    def example(schedule: Schedule, shape: tuple[int, int]) -> None:
        with emulation("sm_90a", schedule) as session:
            x, bias = varied(shape, torch.float32), varied((32,), torch.float32, seed=1)
            assert_matches(module.bias_add(x, bias), x + bias)
            assert len(session.launches) == 1
        rows.add(shape[0])

    example()
    assert len(compiled) == 1 and len(rows) > 3


# --- schedules, shapes, layouts ---------------------------------------------------------------------------------------


def test_schedules_of_the_marker() -> None:
    mine = Schedule(7, "random")
    found = schedules_for(mine, warps=2, random=3)
    assert found[:2] == [Schedule(), mine] and len(found) == len(set(found)) == 2 + 7 + 3
    assert not any(each.overlap for each in found)
    assert any(each.overlap for each in schedules_for(warps=1, overlap=True))


def test_launches_without_a_certificate_are_named() -> None:
    def session(*certificates: Certificate | None) -> types.SimpleNamespace:
        named, kernel = types.SimpleNamespace, types.SimpleNamespace(kernel_name="k")
        reports = [named(certificate=each) for each in certificates]
        return named(launches=[named(number=n, launch=kernel, report=each) for n, each in enumerate(reports, 1)])

    draw = Certificate((Place("draw", "a ticket", "atom.add.u32 ..", 7),))
    assert_certified(session(Certificate(), Certificate()))
    for other, words in (
        (draw, r"^launch 2 k: certificate for these draws; 1 place stands .* it\n  1 a ticket \[draw\]: PTX line 7"),
        (None, "^launch 2 k: it ran without detectors$"),
    ):
        with pytest.raises(AssertionError, match=words):
            assert_certified(session(Certificate(), other))
    with pytest.raises(AssertionError, match="nothing was launched"):
        assert_certified(session())


@given(data=st.data())
def test_shapes_and_layouts_keep_their_promises(data: st.DataObject) -> None:
    shape = data.draw(strategies.shapes(40, 33, 16, multiples=(8, 1, 4), least=(9, 1, 0)))
    assert 16 <= shape[0] <= 40 and shape[0] % 8 == 0 and 1 <= shape[1] <= 33 and shape[2] in (0, 4, 8, 12, 16)
    shape = tuple(max(extent, 1) for extent in shape)
    stride = data.draw(strategies.layouts(shape, alignment=4, most_padding=5))
    assert min(stride) == 1 and all(step % 4 == 0 for step in sorted(stride)[1:])
    tensor = torch.empty_strided(shape, stride, dtype=torch.int32)
    indices = torch.cartesian_prod(*map(torch.arange, shape)).tolist()
    assert len({sum(i * s for i, s in zip(index, stride)) for index in indices}) == tensor.numel()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"multiples": (8,)}, r"multiples = \(8,\): must be one for each of the 2 dimensions"),
        ({"multiples": (8, 64)}, "dimension 1: no multiple of 64 lies between 64 and 33"),
        ({"least": (41, 1)}, "dimension 0: no multiple of 1 lies between 41 and 40"),
    ],
)
def test_shapes_that_cannot_be(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        strategies.shapes(40, 33, **arguments)


@given(data=st.data())
def test_drawn_tensors_have_what_was_asked_for(data: st.DataObject) -> None:
    """Values are those of the seed, whatever the layout is."""
    types = (torch.bfloat16, torch.float8_e4m3fn)
    tensor = data.draw(strategies.tensors((6, 16), *types, terms=64, alignment=16, most_padding=40, device="cpu"))
    assert tensor.shape == (6, 16) and tensor.dtype in types
    assert sorted(tensor.stride())[0] == 1 and sorted(tensor.stride())[1] % 16 == 0
    values = tensor.float()
    assert (values == values.round()).all() and 64 * values.abs().max() ** 2 <= 1 << 24
    compact = data.draw(strategies.tensors((6, 16), torch.float32, device="cpu"))
    assert compact.is_contiguous() and (compact != compact.round()).any()
    with pytest.raises(ValueError, match="dtypes is empty"):
        data.draw(strategies.tensors((6, 16)))


# --- data and comparison ----------------------------------------------------------------------------------------------


@given(
    terms=st.integers(1, 5000), seed=st.integers(0, 2**20),
    dtype=st.sampled_from([torch.bfloat16, torch.float8_e4m3fn]),
)  # fmt: skip
def test_sums_of_exact_data_are_the_same_in_any_order(terms: int, seed: int, dtype: torch.dtype) -> None:
    a, b = (exact((terms,), dtype, terms=terms, seed=seed + n, device="cpu").float() for n in (0, 1))
    products = a * b
    order = torch.randperm(terms, generator=torch.Generator().manual_seed(seed))
    total = torch.zeros((), dtype=torch.float32)
    for chunk in products[order].split(97):
        total = total + chunk.cumsum(0)[-1]
    assert int(total) == sum(int(x) * int(y) for x, y in zip(a.tolist(), b.tolist()))
    assert products.abs().sum() <= 2**24


def test_varied_data_is_of_many_magnitudes_and_the_same_again() -> None:
    x = varied((64, 64), torch.float32, stride=(1, 80), device="cpu")
    exponents = x[x != 0].abs().log2().floor()
    assert x.stride() == (1, 80) and exponents.max() - exponents.min() > 10 and (x == 0).any() and (x < 0).any()
    assert torch.equal(x, varied((64, 64), torch.float32, device="cpu"))
    assert not torch.equal(x, varied((64, 64), torch.float32, seed=1, device="cpu"))


@pytest.mark.parametrize("dtype", POISON)
def test_poison_is_everywhere_and_told(dtype: torch.dtype) -> None:
    out = poisoned((4, 3), dtype, stride=(8, 1), device="cpu")
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[out.element_size()]
    whole = torch.as_strided(out, (27,), (1,)).view(bits)
    assert len(set(whole.tolist())) == 1
    expected = torch.ones(4, 3).to(dtype)
    out[1:] = expected[1:]
    with pytest.raises(AssertionError, match=r"3 of 12 elements of y \(25\.0%\) differ from the reference") as raised:
        assert_matches(out, expected, name="y")
    told = "3 elements were never written" in str(raised.value)
    assert told == (dtype not in (torch.float8_e4m3fn, torch.float8_e5m2))


def test_where_and_by_how_much() -> None:
    expected = torch.tensor([[1.0, 2.0, 4.0], [float("nan"), 0.0, float("inf")]], dtype=torch.bfloat16)
    actual = expected.clone()
    actual[1, 1] = -0.0
    assert_matches(actual, expected)
    actual[0, 1], actual[0, 2] = 2.015625, 4.0625  # one value up, two values up
    with pytest.raises(AssertionError) as raised:
        assert_matches(actual, expected)
    assert str(raised.value).splitlines() == [
        "2 of 6 elements of the result (33.3%) differ from the reference; the first:",
        "  [0, 1]: 2.015625, expected 2.0, off by 0.015625 (1 ulps)",
        "  [0, 2]: 4.0625, expected 4.0, off by 0.0625 (2 ulps)",
    ]
    with pytest.raises(AssertionError, match=r"1 of 6 .* differ by more than 1 ulps; the first:\n  \[0, 2\]"):
        assert_matches(actual, expected, ulps=1)
    assert_matches(actual, expected, ulps=2)
    assert_matches(actual, expected, relative=0.016)
    with pytest.raises(AssertionError, match=r"differ by more than 0\.02 \+ 0 \* \|expected\|; the first:\n  \[0, 2\]"):
        assert_matches(actual, expected, absolute=0.02)
    for wrong in (float("nan"), float("-inf"), 1e30):
        actual = expected.clone()
        actual[1, 2] = wrong
        with pytest.raises(AssertionError, match=r"\[1, 2\]"):
            assert_matches(actual, expected, ulps=10, absolute=1.0, relative=1.0)


def test_ulps_count_across_zero() -> None:
    small = torch.tensor([2.0**-133], dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match=r"\(2 ulps\)"):
        assert_matches(small, -small, ulps=1)
    assert_matches(small, -small, ulps=2)


@pytest.mark.parametrize(
    ("dtype", "low", "high", "off"),
    [
        (torch.int64, 1 << 62, (1 << 62) + 100, 100), (torch.int64, -(1 << 63), (1 << 63) - 1, (1 << 64) - 1),
        (torch.uint64, (1 << 64) - 3, (1 << 64) - 1, 2), (torch.uint64, 1, 1 << 63, (1 << 63) - 1),
        (torch.uint32, 1, (1 << 32) - 1, (1 << 32) - 2), (torch.int8, -128, 127, 255), (torch.bool, False, True, 1),
        (torch.complex64, 1 + 2j, 1 + 5j, 3), (torch.complex128, 2 + 0j, -2 + 0j, 4),
    ],
)  # fmt: skip
def test_tolerances_of_integers_and_complex_numbers(dtype: torch.dtype, low: complex, high: complex, off: int) -> None:
    one, other = torch.tensor([low, low], dtype=dtype), torch.tensor([low, high], dtype=dtype)
    for pair, signed in (((one, other), low - high), ((other, one), high - low)):
        with pytest.raises(AssertionError, match=rf"\[1\]: .* off by {re.escape(str(signed))}$"):
            assert_matches(*pair)
        with pytest.raises(AssertionError, match="1 of 2 elements"):
            assert_matches(*pair, absolute=off * 0.99)
        assert_matches(*pair, absolute=off)


def test_complex_numbers_that_are_not_finite() -> None:
    strange = torch.tensor([complex("nan"), complex("inf"), complex("1+nanj")])
    assert_matches(strange, strange.clone())
    for place in range(3):
        other = strange.clone()
        other[place] = 1.0
        with pytest.raises(AssertionError, match=rf"1 of 3 .*\n  \[{place}\]"):
            assert_matches(other, strange, absolute=1e9)


def test_lazy_signs() -> None:
    """Views that negate or conjugate when they are read."""
    values = torch.tensor([1.0, -2.0, 0.0])
    assert_matches(torch._neg_view(values), torch.tensor([-1.0, 2.0, 0.0]), ulps=1)
    with pytest.raises(AssertionError, match="2 of 3 elements"):
        assert_matches(torch._neg_view(values), values)
    assert_matches(torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: assert_matches(x, x[0]), AssertionError, r"has shape \(2, 2\), expected \(2,\)"),
        (lambda x: assert_matches(x, x.double()), AssertionError, "has dtype torch.float32, expected torch.float64"),
        (lambda x: assert_matches(x, x, ulps=-1), ValueError, "ulps = -1: must be 0 or more"),
        (lambda x: assert_matches(x, x, ulps="1"), TypeError, "ulps = '1': must be a number"),
        (lambda x: assert_matches(x.tolist(), x), TypeError, "actual is a list: must be a torch.Tensor"),
        (lambda x: assert_matches(x, x.numpy()), TypeError, "expected is a ndarray: must be a torch.Tensor"),
        (lambda x: assert_matches(x, x.to("meta")), TypeError, "expected is on the meta device: must be a strided"),
        (lambda x: assert_matches(x.to_sparse(), x), TypeError, "actual is torch.sparse_coo: must be a strided tensor"),
        (lambda x: assert_matches(x, x, relative=float("nan")), ValueError, "relative = nan: must be 0 or more"),
        (lambda x: assert_matches(x.int(), x.int(), ulps=1), ValueError, "torch.int32 has none; use absolute"),
        (lambda x: Schedule("7"), TypeError, "seed = '7': must be an int"),
        (lambda x: Schedule(completion="late"), ValueError, "completion = 'late': must be one of 'eager'"),
        (lambda x: Schedule(overlap=1), TypeError, "overlap = 1: must be a bool"),
        (lambda x: Schedule(spurious_timeouts="no"), TypeError, "spurious_timeouts = 'no': must be a bool"),
        (lambda x: emulation("sm_90a", "lazy").__enter__(), TypeError, "schedule 'lazy' is a str: must be Schedule"),
        (lambda x: poisoned((2,), torch.complex64), TypeError, "dtype = torch.complex64: must be one of bfloat16"),
        (lambda x: exact((2,), torch.float32, terms=0), ValueError, "terms = 0: must be 1 to 16777216"),
        (lambda x: varied((2,), torch.int8), TypeError, "must be a floating-point type"),
        (lambda x: varied((2,), "float32"), TypeError, "dtype = float32: must be a floating-point type"),
        (lambda x: varied((2,), torch.float32, seed=1.5), TypeError, "seed = 1.5: must be an int"),
        (lambda x: exact((2,), torch.float32, terms=3, seed=1 << 70), ValueError, "seed = .*: must have 64 bits"),
        (lambda x: exact((2,), torch.float32, terms="3"), TypeError, "terms = '3': must be an int"),
        (lambda x: exact(3, torch.float32, terms=3), TypeError, "shape = 3: must be a sequence of ints"),
        (lambda x: poisoned((2.0, 3), torch.float32), TypeError, r"shape = \(2.0, 3\): must be a sequence of ints"),
        (lambda x: poisoned((-1, 3), torch.float32), ValueError, r"shape = \(-1, 3\): must be 0 or more"),
        (lambda x: varied((2, 3), torch.float32, stride=(-3, 1)), ValueError, r"stride = \(-3, 1\): must be 0 or more"),
        (lambda x: poisoned((2, 3), torch.float32, stride=(1,)), ValueError, "one for each of the 2 dimensions"),
        (lambda x: varied((2, 3), torch.float32, stride=(0, 1)), ValueError, r"of shape \(2, 3\) would lie at one"),
    ],
)
def test_misuse_is_named(call: types.FunctionType, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(torch.zeros(2, 2))
