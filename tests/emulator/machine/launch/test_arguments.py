"""run(args=...): Python values as kernel parameters."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from cute_kernels.emulator import IllegalAccess, Options, TensorMap, UnsupportedPTX, run
from cute_kernels.emulator.machine.units.copies.tensor_map import encode
from cute_kernels.testing.ptx import launch as ptx_launch
from cute_kernels.testing.ptx import module

PTX = """
.version 8.6
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out, .param .s32 a, .param .f32 b, .param .u8 c, .param .f64 d,
                  .param .align 64 .b8 map[128], .param .u64 in) {
    .reg .b64 %d<9>; .reg .b32 %r<9>; .reg .b16 %h<3>;
    ld.param.u64 %d0, [out];
    ld.param.s32 %r0, [a];
    st.global.b32 [%d0], %r0;
    ld.param.f32 %r1, [b];
    st.global.b32 [%d0+4], %r1;
    ld.param.u8 %h0, [c];
    st.global.u8 [%d0+8], %h0;
    ld.param.f64 %d1, [d];
    st.global.b64 [%d0+16], %d1;
    ld.param.v2.b64 {%d2, %d3}, [map];
    st.global.v2.b64 [%d0+32], {%d2, %d3};
    ld.param.u64 %d4, [in];
    ld.global.b32 %r2, [%d4+4];
    st.global.b32 [%d0+48], %r2;
    ret;
}
"""
MAP = TensorMap(0x7F0000001000, "f16", (64, 8), (128,), (64, 8), (1, 1), "128B")
SHAPE = {"grid": (1, 1, 1), "block": (1, 1, 1)}


def out() -> torch.Tensor:
    return torch.zeros(64, dtype=torch.uint8)


@pytest.mark.parametrize("tensor_map", [MAP, encode(MAP)])
def test_values_arrive_as_declared(tensor_map) -> None:
    result = out()
    array = np.array([7, 8, 9], np.int32)
    array.flags.writeable = False
    run(PTX, "k", args=[result, -5, 2.5, True, 1e300, tensor_map, array], **SHAPE)
    raw = result.numpy()
    assert raw[:4].view(np.int32) == -5 and raw[4:8].view(np.float32) == 2.5 and raw[8] == 1
    assert raw[16:24].view(np.float64) == 1e300 and raw[48:52].view(np.int32) == 8
    assert raw[32:48].tobytes() == encode(MAP)[:16]


def test_numpy_scalars_and_bytes_are_taken_as_they_are() -> None:
    result, array = out(), np.zeros(2, np.int32)
    run(PTX, args=[result, np.uint32(1 << 31), np.float32(0.1), b"\xff", np.float64(3), bytes(128), array], **SHAPE)
    raw = result.numpy()
    assert raw[:4].view(np.uint32) == 1 << 31 and raw[4:8].view(np.float32) == np.float32(0.1) and raw[8] == 255


@pytest.mark.parametrize("number", [2, True, -3, (1 << 24) + 1, 1 << 31, 1 << 200])
def test_ints_for_parameters_of_a_float_type_keep_their_value(number: int) -> None:
    result = out()
    double = min(number, 1 << 100)
    run(PTX, args=[result, 0, number, 0, double, MAP, np.zeros(2, np.int32)], **SHAPE)
    raw = result.numpy()
    with np.errstate(over="ignore"):
        assert raw[4:8].view(np.float32) == np.float32(float(number))
    assert raw[16:24].view(np.float64) == double


@pytest.mark.parametrize(
    "index, value, error, message",
    [
        (1, 1 << 32, ValueError, "argument a = 4294967296: must be .* fit into 4 bytes"),
        (1, -(1 << 31) - 1, ValueError, "must be .* fit into 4 bytes"),
        (1, 1.5, TypeError, r"argument a is the float 1.5: must be an int, the kernel declares .s32"),
        (3, 1.0, TypeError, "argument c is the float 1.0: must be an int, the kernel declares .u8"),
        (4, 1 << 2000, ValueError, "argument d: an int of 2001 bits is too large for a float"),
        (5, 1.0, ValueError, "argument map is a float of 128 bytes: must be of 2, 4 or 8"),
        (2, np.float64(1), ValueError, "argument b has 8 bytes, the kernel declares 4"),
        (5, bytes(64), ValueError, "argument map has 64 bytes, the kernel declares 128"),
        (6, "text", TypeError, "argument in is a str: must be an int"),
    ],
)
def test_what_does_not_fit_is_named(index: int, value: object, error: type, message: str) -> None:
    args = [out(), 1, 1.0, 1, 1.0, MAP, np.zeros(2, np.int32)]
    args[index] = value
    with pytest.raises(error, match=message):
        run(PTX, args=args, **SHAPE)


class _Runs(Exception):
    """A launch got as far as its first cluster."""


#: KB of shared memory that a CTA may have (CUDA programming guide, "Technical Specifications per Compute Capability").
SHARED = {
    "sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90": 227, "sm_90a": 227, "sm_100a": 227, "sm_100f": 227,
    "sm_103a": 227, "sm_110a": 227, "sm_120": 99, "sm_120a": 99, "sm_121a": 99,
}  # fmt: skip


@pytest.mark.parametrize("target", SHARED)
def test_a_cta_has_the_shared_memory_of_its_chip(target: str) -> None:
    """The last word that the chip has is written and read; a byte more is refused, also where statics take a part."""
    most = SHARED[target] << 10
    body = "mov.u32 %r1, dynamic; st.shared.u32 [%r1+{}], 7; ld.shared.u32 %r2, [%r1+{}]; "
    body += "ld.param.u64 %d0, [p0]; st.global.u32 [%d0], %r2; ret;"
    for head, static in (("", 0), (".shared .align 1024 .b8 s[4096];", 4096)):
        used = "mov.u32 %r1, s; " if static else ""
        last, found = most - static - 4, np.zeros(1, np.uint32)
        text = module(used + body.format(last, last), parameters=1, head=head, target=target)
        ptx_launch(text, found, block=1, dynamic_smem=most - static)
        assert found[0] == 7
        message = f"dynamic_smem = {most - static + 1}: must be 0 to {most - static} bytes, since a CTA on {target} has"
        with pytest.raises(ValueError, match=message):
            ptx_launch(text, found, block=1, dynamic_smem=most - static + 1)


@pytest.mark.parametrize(
    ("target", "most"),
    [
        *((target, 0xC000) for target in ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100f", "sm_120")),
        *((target, 0x38C00) for target in ("sm_90a", "sm_100a", "sm_103a", "sm_110a")),
        *((target, 0x18C00) for target in ("sm_120a", "sm_121a")),
    ],
)
def test_static_shared_memory_is_limited(target: str, most: int) -> None:
    """As ptxas 13.0 says: "uses too much shared data (0xc004 bytes, 0xc000 max)"."""
    for nbytes in (most, most + 4):
        text = module("mov.u32 %r1, s; ret;", parameters=1, head=f".shared .b8 s[{nbytes}];", target=target)
        words = f"{nbytes} bytes of static shared memory: must be at most {most} on|is larger than 232448 bytes"
        refused = pytest.raises((ValueError, UnsupportedPTX), match=words)
        with contextlib.nullcontext() if nbytes == most else refused:
            ptx_launch(text, 0, dynamic_smem=0)


_GOOD = {"ptx": PTX, "kernel": "k", "grid": 1, "block": 1, "params": bytes(256)}


@pytest.mark.parametrize(
    "name, value, error, message",
    [
        ("ptx", None, TypeError, "ptx is a NoneType: must be PTX text, a str"),
        ("ptx", PTX.encode(), TypeError, "ptx is a bytes: must be PTX text, a str"),
        ("kernel", 3, TypeError, "kernel is a int: must be the name of an entry, a str, or None"),
        ("kernel", "other", ValueError, "kernel = 'other': must be in the module; it has k"),
        *(
            (name, value, TypeError, f"{name} .*: must be a positive integer or one to three of them .x, y, z.")
            for name in ("grid", "block", "cluster")
            for value in (None, "1", 1.5, (1, 2.5), True, {1: 2}, {1}, (True,))
        ),
        *(
            (name, value, ValueError, f"{name} .*: must be a positive integer or one to three of them .x, y, z.")
            for name in ("grid", "block", "cluster")
            for value in (0, -1, (), (1, 0), (1, 1, 1, 1))
        ),
        *(("dynamic_smem", value, TypeError, "dynamic_smem .*: must be an int, ") for value in (None, 1.5, "1")),
        ("dynamic_smem", -1, ValueError, "dynamic_smem = -1: must be 0 to 232448 bytes"),
        ("dynamic_smem", 232_449, ValueError, "dynamic_smem = 232449: must be 0 to 232448 bytes"),
        *(
            ("params", value, TypeError, "params .*: must be the parameter block as bytes, or bytes for each parameter")
            for value in (None, 5, "ab", [None], [1])
        ),
        *(
            ("args", value, TypeError, "args is a .*: must be a list or tuple with a value for each parameter")
            for value in (5, "ab", {}, np.zeros(7))
        ),
        ("memory", 5, TypeError, "memory is a int: must be a GlobalMemory or None"),
        ("options", {}, TypeError, "options is a dict: must be an Options or None"),
        ("programmatic", 1, TypeError, "programmatic is a int: must be a bool"),
        ("programmatic", np.True_, TypeError, "programmatic is a numpy.bool_?: must be a bool"),
    ],
)
def test_arguments_of_another_type_are_named(name: str, value: object, error: type, message: str) -> None:
    """Each is refused before anything runs, with what is given and what is needed."""

    def started(done: int, of: int) -> None:
        raise _Runs

    with pytest.raises(_Runs):
        run(**_GOOD, options=Options(progress=started))
    given = {**_GOOD, "options": Options(progress=started), name: value}
    if name == "args":
        del given["params"]
    with pytest.raises(error, match=message):
        run(**given)


@pytest.mark.parametrize(
    "given", [{"roles": "abc"}, {"roles": (1,)}, {"clusters": 5}, {"clusters": ("a",)}, {"trace": 5}, {"progress": 5}]
)
def test_options_of_another_type_are_named(given: dict) -> None:
    (name,) = given
    with pytest.raises(TypeError, match=f"^{name} .*must be "):
        Options(**given)


def test_a_kernel_has_to_be_named_among_several() -> None:
    two = PTX + PTX[PTX.index(".visible") :].replace("entry k", "entry l")
    with pytest.raises(ValueError, match="kernel = None: must be a name .* several kernels; it has k, l"):
        run(two, params=bytes(256), **SHAPE)


def test_number_of_arguments_and_both_kinds() -> None:
    with pytest.raises(ValueError, match="2 arguments for the 7 parameters of k: out, a, b, c, d, map, in"):
        run(PTX, args=[out(), 1], **SHAPE)
    with pytest.raises(ValueError, match="params and args are both given"):
        run(PTX, args=[out()], params=b"1", **SHAPE)


def test_only_arguments_are_accessible() -> None:
    inside = np.zeros(4, np.int32)[:1]
    with pytest.raises(IllegalAccess, match="argument in"):
        run(PTX, args=[out(), 1, 1.0, 1, 1.0, MAP, inside], **SHAPE)
    fixed = np.zeros(64, np.uint8)
    fixed.flags.writeable = False
    with pytest.raises(IllegalAccess, match="read-only region argument out"):
        run(PTX, args=[fixed, 1, 1.0, 1, 1.0, MAP, np.zeros(2, np.int32)], **SHAPE)


def test_arrays_of_objects_and_sparse_tensors_are_refused() -> None:
    """A store would overwrite the references of the one; the other has no address."""
    text = module("ld.param.u64 %d1, [p0]; st.global.u32 [%d1], 7; ret;", parameters=1)
    for argument, words in (
        (np.array([object()], object), "array of object"),
        (torch.eye(4).to_sparse(), "layout torch.sparse_coo"),
    ):
        with pytest.raises(TypeError, match=words):
            run(text, grid=1, block=1, args=[argument])
