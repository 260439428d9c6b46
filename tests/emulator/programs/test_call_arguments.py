"""Calls of functions that were compiled for TVM-FFI: streams of the environment, nested numbers, wrong arguments."""

from __future__ import annotations

import sys
import types

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import pytest
import torch
from cutlass import Float4E2M1FN, Float32, Float64, Int32, Int64
from cutlass.base_dsl.typing import FloatMeta
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream
from cutlass.cutlass_dsl import T

from cute_kernels.emulator import UnsupportedPTX
from cute_kernels.emulator.programs import capture, compile_arguments
from tests.emulator import call_kernels as kernels
from tests.processes import run_python

COUNT = 20
TVM_FFI = "--enable-tvm-ffi"


@pytest.fixture(autouse=True)
def session():
    with capture("sm_90a") as session:
        yield session


def fakes(stream: bool = True) -> tuple:
    """Fake tensor, `Outer` of fakes, stream of the environment."""
    tensor = make_fake_compact_tensor(Float32, (cute.sym_int(),), assumed_align=16)
    outer = kernels.Outer(Int32(1), kernels.Inner(Float32(1), Int64(1), 3), tensor, None)
    return tensor, outer, make_fake_stream(use_tvm_ffi_env_stream=stream)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(32, device="cuda"), torch.arange(32, dtype=torch.float32, device="cuda") / 4


def given(x: torch.Tensor, power: int | None = None) -> kernels.Outer:
    return kernels.Outer(COUNT, kernels.Inner(1.5, 1 << 20, power), x, None)


def expected(x: torch.Tensor, last: int) -> list[float]:
    values = 1.5 * x.cpu() ** 3 + (1 << 20) + last
    return values[:COUNT].tolist() + [0.0] * (32 - COUNT)


def test_the_stream_of_the_environment_is_torchs_current_one(session) -> None:
    tensor, outer, stream = fakes()
    compiled = cute.compile(kernels.stream_last, tensor, outer, Int32(1), stream, options=TVM_FFI)
    current = torch.cuda.Stream()
    y, x = inputs()
    with torch.cuda.stream(current):
        compiled(y, given(x), 7)
    assert session.launches[-1].launch.stream == current.cuda_stream != 0


def test_the_stream_may_stand_anywhere() -> None:
    tensor, outer, stream = fakes()
    compiled = {
        "first": cute.compile(kernels.stream_first, stream, tensor, outer, Int32(1), options=TVM_FFI),
        "between": cute.compile(kernels.stream_between, tensor, stream, outer, Int32(1), options=TVM_FFI),
        "last": cute.compile(kernels.stream_last, tensor, outer, Int32(1), stream, options=TVM_FFI),
        "keyword": cute.compile(kernels.stream_by_keyword, tensor, outer, Int32(1), stream=stream, options=TVM_FFI),
        "indexed": cute.compile[cute.EnableTVMFFI](kernels.stream_last, tensor, outer, Int32(1), stream),
    }
    for name, function in compiled.items():
        y, x = inputs()
        function(y, given(x), 7)
        assert y.tolist() == expected(x, 7), name
        y, x = inputs()
        function(y, last=8, outer=given(x, 3))
        assert y.tolist() == expected(x, 8), name
    y, x = inputs()
    compiled["between"](y, given(x))
    assert y.tolist() == expected(x, 5), "a default"


def test_a_method_with_a_constant() -> None:
    tensor, outer, stream = fakes()
    compiled = cute.compile(kernels.Operator(), tensor, True, outer, stream, Int32(1), options=TVM_FFI)
    y, x = inputs()
    compiled(y, given(x), 7)
    assert y.tolist() == expected(x, 14)


def test_numbers_in_data_classes_and_tuples() -> None:
    tensor, _, stream = fakes()
    settings = kernels.Settings(Int32(0), Float32(0))
    for function, example, value in (
        (kernels.with_settings, settings, kernels.Settings(3, 0.5)),
        (kernels.with_tuple, (Int32(0), Float32(0)), (3, 0.5)),
        (kernels.with_tuple, (Int32(0), Float32(0)), (Int32(3), Float32(0.5))),
    ):
        y = torch.zeros(32, device="cuda")
        cute.compile(function, tensor, example, stream, options=TVM_FFI)(y, value)
        assert y.tolist() == [3.5] * 32


@pytest.mark.parametrize("stream", [0, cuda.CUstream(0), "torch"])
def test_a_stream_that_is_passed(stream: object) -> None:
    tensor, outer, fake = fakes(stream=False)
    compiled = cute.compile(kernels.stream_last, tensor, outer, Int32(1), fake, options=TVM_FFI)
    y, x = inputs()
    compiled(y, given(x), 7, torch.cuda.current_stream() if stream == "torch" else stream)
    assert y.tolist() == expected(x, 7)


def test_arguments_that_do_not_fit_are_named() -> None:
    tensor, outer, stream = fakes()
    compiled = cute.compile(kernels.stream_between, tensor, stream, outer, Int32(1), options=TVM_FFI)
    y, x = inputs()
    good = given(x)
    wrong = [
        ((y,), TypeError, r"takes 3 arguments \(y, outer, last; stream comes from the environment\): missing.*'outer'"),
        ((y, good, 7, cuda.CUstream(0)), TypeError, r"takes 3 arguments .*too many positional arguments"),
        ((y, good[:3], 7), TypeError, "argument outer: compiled with 4 values"),
        ((y, 4, 7), TypeError, "argument outer: compiled with 4 values; 4 is given"),
        ((y, good._replace(count=None), 7), TypeError, "argument outer.count: None is given"),
        ((y, good._replace(count=1.5), 7), TypeError, "argument outer.count: compiled with an Int32; 1.5 is given"),
        ((y, given(x, 4), 7), ValueError, "argument outer.inner.power: compiled as the constant 3; 4 is given"),
        ((y, good._replace(extra=x), 7), ValueError, "argument outer.extra: compiled as the constant None"),
        ((y, good._replace(x=x[:31]), 7), ValueError, r"extent 0 of outer.x is 31, but extent 0 of y, the same in"),
        ((y, good._replace(x=x.half()), 7), TypeError, "argument outer.x: a tensor of torch.float16"),
        ((y.view(4, 8), good, 7), ValueError, r"argument y: a tensor of shape \(4, 8\)"),
        ((torch.zeros(33, device="cuda")[1:], good, 7), ValueError, "aligned to 16 bytes"),
    ]
    for arguments, kind, message in wrong:
        with pytest.raises(kind, match=message):
            compiled(*arguments)
    compiled(y, good, 7)
    assert y.tolist() == expected(x, 7)


def test_promised_multiples() -> None:
    tensor = make_fake_compact_tensor(Float32, (cute.sym_int(divisibility=8),), assumed_align=16)
    compiled = cute.compile(kernels.with_tuple, tensor, (Int32(0), Float32(0)), fakes()[2], options=TVM_FFI)
    y = torch.zeros(40, device="cuda")
    compiled(y, (1, 2.0))
    assert y.tolist() == [3.0] * 32 + [0.0] * 8
    with pytest.raises(ValueError, match="extent 0 of y is compiled for multiples of 8"):
        compiled(y[:36], (1, 2.0))


PLAIN_CALL = """
y, x, stream = torch.zeros(32, device="cuda"), torch.ones(32, device="cuda"), cuda.CUstream(0)
outer = kernels.Outer(Int32(1), kernels.Inner(Float32(1), Int64(1), 3), from_dlpack(x), None)
compiled = cute.compile(kernels.stream_last, from_dlpack(y), outer, Int32(1), stream)
"""
"""A call without TVM-FFI."""


def test_a_call_without_tvm_ffi_that_passes_another_number_of_values_is_an_error() -> None:
    """Tuples of this kind pass over Python numbers; machine code would be called with too few addresses."""
    names: dict = {}
    exec(PLAIN_CALL, globals(), names)
    y, outer, stream, compiled = (names[name] for name in ("y", "outer", "stream", "compiled"))
    for wrong, count in ((outer._replace(count=20), 6), (outer._replace(extra=outer.x), 8)):
        with pytest.raises(TypeError, match=f"passes {count} values to host code compiled for 7"):
            compiled(from_dlpack(y), wrong, Int32(1), stream)
    compiled(from_dlpack(y), outer, Int32(4), stream)
    assert y.tolist() == [6.0] + [0.0] * 31


def test_a_wrong_count_ends_a_program_with_a_word(tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import cuda.bindings.driver as cuda\n"
        "import cutlass.cute as cute, torch\n"
        "from cutlass import Float32, Int32, Int64\n"
        "from cutlass.cute.runtime import from_dlpack\n"
        "from tests.emulator import call_kernels as kernels\n"
        + PLAIN_CALL
        + "compiled(from_dlpack(y), outer._replace(count=20), Int32(1), stream)\n"
    )
    done = run_python("-m", "cute_kernels", "emulate", "--quiet", str(program))
    assert done.returncode == 1 and "TypeError: the call passes 6 values to host code compiled for 7" in done.stderr


def test_object_files_are_neither_written_nor_called(tmp_path) -> None:
    tensor, outer, stream = fakes()
    compiled = cute.compile(kernels.stream_last, tensor, outer, Int32(1), stream, options=TVM_FFI)
    with pytest.raises(UnsupportedPTX, match="cannot be written to object files"):
        compiled.export_to_c(object_file_path=str(tmp_path / "x.o"), function_name="func")
    loaded = cute.runtime.load_module(str(tmp_path / "x.o"), enable_tvm_ffi=True)
    for function in (loaded["func"], loaded.func):
        with pytest.raises(UnsupportedPTX, match="x.o, which holds no PTX"):
            function(1)


def test_elements_of_four_bits() -> None:
    """torch's FP4 tensors count pairs; what is compiled counts elements."""
    packed = make_fake_compact_tensor(
        Float4E2M1FN, (cute.sym_int(), cute.sym_int(divisibility=4)), stride_order=(1, 0), assumed_align=16
    )
    numbers = make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4)
    compiled = cute.compile(kernels.with_fp4, numbers, packed, fakes()[2], options=TVM_FFI)
    y, octets = torch.zeros(6, dtype=torch.int32, device="cuda"), torch.arange(96, dtype=torch.uint8, device="cuda") + 5
    compiled(y, octets.view(6, 16).view(torch.float4_e2m1fn_x2))
    assert y.tolist() == [6, 32, 32, 1, 5, 6]
    with pytest.raises(ValueError, match="extent 1 of packed is compiled for multiples of 4"):
        compiled(y, octets[:90].view(6, 15).view(torch.float4_e2m1fn_x2))
    with pytest.raises(TypeError, match="a tensor of torch.uint8: must be"):
        compiled(y, octets.view(6, 16))


def test_python_numbers_in_a_plain_tuple() -> None:
    """They are arguments, as those of CuTe DSL's types are: other values need no other function."""
    tensor = make_fake_compact_tensor(Float32, (cute.sym_int(),), assumed_align=16)
    compiled = cute.compile(kernels.with_tuple, tensor, (1, 0.5), fakes()[2], options=TVM_FFI)
    y = torch.zeros(32, device="cuda")
    compiled(y, (3, 4))
    assert y.tolist() == [7.0] * 32
    with pytest.raises(TypeError, match=r"argument numbers\[0\]: compiled with the int 1; 2.5 is given"):
        compiled(y, (2.5, 4))


def test_an_element_type_that_the_program_registered_with_tvm_ffi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the name of the type whose memory it has, where torch has another type of its own name."""

    class Complex64(Float64, metaclass=FloatMeta, width=64, mlir_type=T.f64):
        pass

    registered = types.SimpleNamespace(NumericToTVMFFIDtype={Complex64: "float64"})
    monkeypatch.setitem(sys.modules, "cutlass.cute._tvm_ffi_args_spec_converter", registered)
    fake = make_fake_compact_tensor(Complex64, (4,), stride_order=(0,))
    assert compile_arguments.torch_dtype(fake) is torch.float64
    registered.NumericToTVMFFIDtype.clear()
    assert compile_arguments.torch_dtype(fake) is torch.complex64
