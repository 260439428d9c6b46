"""Calls of functions that were compiled for TVM-FFI: streams of the environment, nested numbers, wrong arguments."""

from __future__ import annotations

import sys
import types

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import pytest
import torch
from cutlass import Boolean, Float4E2M1FN, Float32, Float64, Int32, Int64, Numeric, Uint32
from cutlass.base_dsl.typing import FloatMeta
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream, make_fake_tensor
from cutlass.cutlass_dsl import T

from cute_kernels.emulator import UnsupportedPTX
from cute_kernels.emulator.programs import capture, compile_arguments
from cute_kernels.emulator.programs.tensor_arguments import TensorArgument
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


def test_parameters_that_were_moved_and_saved_tensors_are_on_the_device() -> None:
    tensor, outer, stream = fakes()
    compiled = cute.compile(kernels.stream_between, tensor, stream, outer, Int32(1), options=TVM_FFI)
    y, x = inputs()
    module = torch.nn.Module()
    module.x = torch.nn.Parameter(x.cpu())
    compiled(y, given(module.cuda().x), 7)
    assert y.tolist() == expected(x, 7)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(context, value: torch.Tensor) -> torch.Tensor:
            out = value * 2
            context.save_for_backward(out)
            return out

        @staticmethod
        def backward(context, gradient: torch.Tensor) -> torch.Tensor:
            compiled(y.zero_(), given(*context.saved_tensors), 7)
            return gradient

    Doubled.apply(x.clone().requires_grad_()).sum().backward()
    assert y.tolist() == expected(x * 2, 7)


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
        ((y, good._replace(count=1.5), 7), TypeError, "argument outer.count: compiled with type Int32; 1.5 is given"),
        ((y, given(x, 4), 7), ValueError, "argument outer.inner.power: compiled as the constant 3; 4 is given"),
        ((y, good._replace(extra=x), 7), ValueError, "argument outer.extra: compiled as the constant None"),
        ((y, good._replace(x=x[:31]), 7), ValueError, r"^Mismatched outer.x.shape\[0\] = 31: must be 32 as y"),
        ((y, good._replace(x=x.half()), 7), ValueError, "^Mismatched Tensor outer.x: has elements of torch.float16"),
        ((y.view(4, 8), good, 7), ValueError, "^Mismatched Tensor y: has 2 dimensions"),
        ((y.cpu(), good, 7), ValueError, "^Mismatched Tensor y: .*expected device_type=cuda"),
        ((torch.zeros(33, device="cuda")[1:], good, 7), ValueError, "^Misaligned Tensor data y = .* multiple of 16"),
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
    with pytest.raises(ValueError, match=r"^Invalid y.shape\[0\] = 36: must be a multiple of 8"):
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
    with pytest.raises(ValueError, match=r"^Invalid packed.shape\[1\] = 30: must be a multiple of 4"):
        compiled(y, octets[:90].view(6, 15).view(torch.float4_e2m1fn_x2))
    with pytest.raises(ValueError, match="has elements of torch.uint8: must be"):
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


def test_a_number_of_a_type_that_the_program_registered_with_tvm_ffi(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is passed as it lies in memory: the type is neither asked to convert it again nor how wide it is."""

    class Packed(Float32, metaclass=FloatMeta, width=64, mlir_type=T.f64):
        """A number of 64 bits; of a Python number it holds the negative."""

        def __init__(self, x: object, **_: object) -> None:
            Numeric.__init__(self, -float(x) if isinstance(x, (int, float)) else getattr(x, "value", x))

    names = types.SimpleNamespace(NumericToTVMFFIDtype={Float32: "float32", Float64: "float64", Packed: "float64"})
    monkeypatch.setitem(sys.modules, "cutlass.cute._tvm_ffi_args_spec_converter", names)
    fake = make_fake_compact_tensor(Packed, (1,), stride_order=(0,))
    compiled = cute.compile(kernels.with_number, fake, Packed(0), fakes()[2], options=TVM_FFI)
    y = torch.zeros(1, dtype=torch.float64, device="cuda")
    for value, expected in ((Packed(1 / 3), -1 / 3), (1e-300, 1e-300)):
        compiled(y, value)
        assert y.item() == expected


def test_integers_of_either_sign_are_one_type() -> None:
    """As the parameter of a compiled function, which has a width alone."""
    fake = make_fake_compact_tensor(Int32, (1,), stride_order=(0,))
    compiled = cute.compile(kernels.with_number, fake, Int32(0), fakes()[2], options=TVM_FFI)
    y = torch.zeros(1, dtype=torch.uint32, device="cuda")
    compiled(y, -2)
    assert y.view(torch.int32).item() == -2
    for other in (torch.float32, torch.int64):
        with pytest.raises(ValueError, match=f"^Mismatched Tensor y: has elements of {other}"):
            compiled(torch.zeros(1, dtype=other, device="cuda"), 1)


def test_strides_keep_what_was_promised() -> None:
    stride = cute.sym_int64(divisibility=4)
    y_fake = make_fake_compact_tensor(Float32, (1,), stride_order=(0,))
    rows = make_fake_tensor(Float32, (cute.sym_int(), cute.sym_int()), stride=(stride, 1), assumed_align=4)
    compiled = cute.compile(kernels.with_matrix, y_fake, rows, fakes()[2], options=TVM_FFI)
    y, x = torch.zeros(1, device="cuda"), torch.arange(60, dtype=torch.float32, device="cuda")
    compiled(y, x.view(5, 12)[:, :3])
    assert y.item() == 12
    with pytest.raises(ValueError, match=r"^Invalid x.strides\[0\] = 10: must be a multiple of 4"):
        compiled(y, x.view(6, 10))
    with pytest.raises(ValueError, match=r"^Mismatched x.strides\[1\] = 2: must be 1"):
        compiled(y, x.view(5, 12)[:, ::2])
    compiled(y, x.as_strided((2, 1), (4, 7)))
    assert y.item() == 4, "the stride of an extent of 1 says nothing"
    compiled(y, x.as_strided((1, 3), (7, 1)))
    more, symbols = make_fake_tensor(Float32, (cute.sym_int(), 3), stride=(stride, 1), assumed_align=4), {}
    TensorArgument(x.as_strided((1, 3), (8, 1)), rows, "x", symbols)  # but of another tensor's, as for TVM-FFI
    with pytest.raises(ValueError, match=r"^Mismatched z.strides\[0\] = 12: must be 8 as x.strides\[0\]"):
        TensorArgument(x.view(5, 12)[:, :3], more, "z", symbols)


def test_integers_that_do_not_fit() -> None:
    """Neither as a number nor as an extent: CuTe DSL and ctypes would drop their high bits."""
    fake = make_fake_tensor(Uint32, (cute.sym_int(),), stride=(cute.sym_int64(),))
    compiled = cute.compile(kernels.with_number, fake, Uint32(0), fakes()[2], options=TVM_FFI)
    y = torch.zeros(1, dtype=torch.int32, device="cuda")
    compiled(y, (1 << 32) - 1)
    assert y.item() == -1
    for number in (1 << 32, -1):
        with pytest.raises(ValueError, match=f"^argument number: compiled with type Uint32, of 0 to .*; {number} is"):
            compiled(y, number)
    with pytest.raises(ValueError, match="^Out of bound y = 2147483648 in its shape"):
        compiled(y.expand(1 << 31), 1)


def test_truth_values() -> None:
    """A Boolean has the range of a signed bit in CuTe DSL, and True is none of its integers."""
    fake = make_fake_tensor(Boolean, (cute.sym_int(),), stride=(cute.sym_int64(),))
    compiled = cute.compile(kernels.with_number, fake, Boolean(False), fakes()[2], options=TVM_FFI)
    for given_number in (True, False, 1, 2, 0, Boolean(True)):
        y = torch.full((1,), not given_number, device="cuda")
        compiled(y, given_number)
        assert y.tolist() == [bool(given_number)]
    with pytest.raises(TypeError, match=r"^argument number: compiled with type Boolean; 0.5 is given"):
        compiled(y, 0.5)
