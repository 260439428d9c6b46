"""`patch_embed` on the reference backend: results, shapes, what torch sees of it, and dispatch."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_kernels import Sm90PatchEmbedConfig, Sm100PatchEmbedConfig, patch_embed
from cute_kernels.operations import scales
from cute_kernels.operations.arguments import choose_backend
from tests.operations.reference import exact

FP8 = torch.float8_e4m3fn


def nested(*shape: int) -> torch.Tensor:
    """A nested tensor of one tensor of this shape."""
    return torch.nested.as_nested_tensor([torch.ones(shape)], layout=torch.jagged)


def make_call(seed=0, images=2, positions=3, n=8, k=40):
    """Random x [images, positions, k], weight [n, k], bias [n], pos_embed [positions, n]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(images, positions, k, generator=generator).to(FP8)
    weight = torch.randn(n, k, generator=generator).to(FP8)
    return x, weight, torch.randn(n, generator=generator), torch.randn(positions, n, generator=generator)


def assert_contract(out, x, weight, bias, pos, scale, epilogue="f32"):
    """Compare with exact arithmetic; x and out flattened to rows."""
    expected = exact.patch_embed(x.reshape(-1, x.shape[-1]), weight, bias, pos, scale, epilogue)
    assert exact.fractions(out.reshape(-1, out.shape[-1])) == expected


@given(
    seed=st.integers(0, 2**32),
    images=st.integers(1, 3),
    positions=st.integers(1, 4),
    k=st.sampled_from([1, 16, 31, 70]),
    flat=st.booleans(),
    with_bias=st.booleans(),
    with_pos=st.booleans(),
    config=st.sampled_from([None, Sm100PatchEmbedConfig(), Sm100PatchEmbedConfig(epilogue="bf16x2", stages=3)]),
    backend=st.sampled_from(["auto", "reference"]),
)
def test_result_and_shape(seed, images, positions, k, flat, with_bias, with_pos, config, backend):
    x, weight, bias, pos = make_call(seed, images, positions, 8, k)
    bias, pos = bias if with_bias else None, pos if with_pos else None
    given_x = x.view(-1, k) if flat else x
    out = patch_embed(given_x, weight, bias, pos, scale_a=0.5, scale_b=0.25, config=config, backend=backend)
    assert out.shape == ((images * positions, 8) if flat and not with_pos else (images, positions, 8))
    assert out.dtype == torch.bfloat16
    assert_contract(out, x, weight, bias, pos, 0.125, config.epilogue if config else "f32")


SCALES = [None, 3, 0.1, np.float32(0.1), np.float16(0.1), np.int8(3), torch.tensor(0.1), torch.tensor([[0.1]])]


@pytest.mark.parametrize("scale_a", SCALES)
@pytest.mark.parametrize("scale_b", [None, 0.7, torch.tensor([0.7])])
def test_scales_multiply_in_fp32(scale_a, scale_b):
    x, weight, bias, pos = make_call()
    a, b = (torch.tensor(1.0 if s is None else float(s), dtype=torch.float32) for s in (scale_a, scale_b))
    product = exact.fp32(exact.fractions(a) * exact.fractions(b))
    out = patch_embed(x, weight, bias, pos, scale_a=scale_a, scale_b=scale_b)
    assert_contract(out, x, weight, bias, pos, float(product))


def row_scales(seed=3, rows=6, n=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, 1, generator=generator) + 0.5, torch.rand(1, n, generator=generator) + 0.5


@pytest.mark.parametrize("one", [None, 0.3, torch.tensor([0.3])], ids=["none", "number", "tensor"])
@pytest.mark.parametrize("which", ["a", "b", "a b"])
def test_scales_of_rows_and_features(which, one):
    """In any combination with a scale of the whole tensor."""
    x, weight, bias, pos = make_call()
    by_row, by_feature = row_scales()
    scale_a, scale_b = by_row if "a" in which else one, by_feature if "b" in which else one
    out = patch_embed(x, weight, bias, pos, scale_a=scale_a, scale_b=scale_b)
    number = 1.0 if one is None else float(torch.tensor(0.3))
    rows = by_row.view(-1).tolist() if "a" in which else [number] * 6
    features = by_feature.view(-1).tolist() if "b" in which else [number] * 8
    assert_contract(out, x, weight, bias, pos, (rows, features))


def test_shapes_and_strides_of_row_wise_scales():
    x, weight, bias, pos = make_call()
    by_row, by_feature = row_scales()
    expected = patch_embed(x, weight, bias, pos, scale_a=by_row, scale_b=by_feature)
    spread = torch.stack([by_row, by_row * 2], 1).view(6, 2)[:, :1]
    assert not spread.is_contiguous()
    for scale_a in (by_row.view(2, 3, 1), spread):
        for scale_b in (by_feature, by_feature.view(8, 1).t(), torch.cat([by_feature, by_feature], 1)[:, 8:]):
            for backend in ("reference", "emulator"):
                out = patch_embed(x, weight, bias, pos, scale_a=scale_a, scale_b=scale_b, backend=backend)
                assert torch.equal(out, expected)
    flat = patch_embed(x.view(6, -1), weight, bias, pos, scale_a=by_row, scale_b=by_feature)
    assert torch.equal(flat, expected)


def test_equal_row_wise_scales_give_the_bits_of_one_scale():
    x, weight, bias, pos = make_call()
    rows, features = torch.full((6, 1), 0.1), torch.full((1, 8), 0.7)
    one = patch_embed(x, weight, bias, pos, scale_a=0.1, scale_b=0.7)
    assert torch.equal(patch_embed(x, weight, bias, pos, scale_a=rows, scale_b=features), one)
    assert torch.equal(patch_embed(x, weight, bias, pos, scale_a=rows, scale_b=0.7), one)


@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_row_wise_scales_under_torch_compile(backend):
    """One graph, in which scales are inputs: others of the same shape give their own result, without a compilation."""
    x, weight, bias, pos = make_call()

    def embed(by_row, by_feature):
        return patch_embed(x, weight, bias, pos, scale_a=by_row, scale_b=by_feature, backend=backend) * 2

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(embed, fullgraph=True, backend=counter)
    for seed in (3, 4):
        scales = row_scales(seed)
        lists = tuple(scale.view(-1).tolist() for scale in scales)
        out = compiled(*scales)
        assert_contract(out / 2, x, weight, bias, pos, lists)  # a power of two, which BF16 takes exactly
    assert counter.frame_count == 1
    torch.compiler.reset()


def test_nan_in_a_row_wise_scale_reaches_its_row_and_no_other():
    x, weight, bias, pos = make_call()
    by_row, _ = row_scales()
    by_row[4] = float("nan")
    for backend in ("reference", "emulator"):
        out = patch_embed(x, weight, bias, pos, scale_a=by_row, backend=backend).view(6, 8)
        assert out.isnan().all(1).tolist() == [False] * 4 + [True, False] and not out[:4].isnan().any()


def test_a_lazily_negated_row_wise_scale_has_its_sign():
    x, weight, bias, pos = make_call()
    negated = torch.complex(torch.zeros(6, 1), torch.linspace(-1, -2, 6).view(6, 1)).conj().imag
    assert negated.is_neg()
    expected = patch_embed(x, weight, bias, pos, scale_a=negated.resolve_neg())
    assert torch.equal(patch_embed(x, weight, bias, pos, scale_a=negated, backend="emulator"), expected)


@pytest.mark.parametrize("backend", ["auto", "emulator", "reference"])
@pytest.mark.parametrize("scales", [{}, {"scale_a": torch.ones(0, 1), "scale_b": torch.ones(1, 8)}], ids=["", "rows"])
def test_no_rows(nothing_compiles, backend, scales):
    """Data loaders have last batches, and of few images some shards none. What is wrong with a call stays wrong."""
    x, weight, bias, pos = make_call()
    no_images = x[:0]
    assert patch_embed(no_images, weight, bias, pos, backend=backend, **scales).shape == (0, 3, 8)
    assert patch_embed(no_images.view(0, 40), weight, bias, pos, backend=backend, **scales).shape == (0, 3, 8)
    out = patch_embed(no_images.view(0, 40), weight, bias, backend=backend, **scales)
    assert (out.shape, out.dtype) == ((0, 8), torch.bfloat16)
    index = torch.zeros(0, dtype=torch.int64)
    assert patch_embed(no_images.view(0, 40), weight, None, pos, pos_index=index, backend=backend).shape == (0, 8)
    compiled = torch.compile(patch_embed, fullgraph=True, backend="eager")
    assert compiled(no_images, weight, bias, pos).shape == (0, 3, 8)
    with pytest.raises(ValueError, match="they must be equal"):
        patch_embed(no_images[..., :16].contiguous(), weight, backend=backend)
    with pytest.raises(ValueError, match=r"scale_a has shape \[3, 1\]"):
        patch_embed(no_images, weight, scale_a=torch.ones(3, 1), backend=backend)
    with pytest.raises(ValueError, match="stages = 1: must be"):
        patch_embed(no_images, weight, config=Sm90PatchEmbedConfig(stages=1), backend=backend)


ROWS_AND_STEPS = [(torch.uint8, 1 << 20), (torch.int8, 1 << 20), (torch.bfloat16, 16), (torch.float16, 16)]
"""Types of rows, and after how many elements of K the accumulator is rounded: of integers once."""


@pytest.mark.parametrize(("dtype", "step"), ROWS_AND_STEPS)
@pytest.mark.parametrize("backend", ["auto", "emulator"])
def test_rows_of_other_types(dtype, step, backend):
    """K of 42 elements is no multiple of 16 bytes in any of them."""
    generator = torch.Generator().manual_seed(2)
    _, _, bias, pos = make_call()
    by_row, by_feature = row_scales()
    if dtype.is_floating_point:
        x, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((2, 3, 42), (8, 42)))
    else:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max + 1
        x = torch.randint(low, high, (2, 3, 42), generator=generator).to(dtype)
        weight = torch.randint(-128, 128, (8, 42), generator=generator).to(torch.int8)
    out = patch_embed(x, weight, bias, pos, scale_a=by_row, scale_b=by_feature, backend=backend)
    scale = (by_row.view(-1).tolist(), by_feature.view(-1).tolist())
    expected = exact.patch_embed(x.view(6, 42), weight, bias, pos, scale, "f32", step)
    assert exact.fractions(out.view(6, 8)) == expected


@pytest.mark.parametrize(
    ("x", "weight", "allowed"),
    [
        (torch.uint8, torch.uint8, "weight has dtype torch.uint8: must be one of torch.float8_e4m3fn, torch.int8"),
        (torch.uint8, FP8, "weight has dtype torch.float8_e4m3fn with x of torch.uint8: must be torch.int8"),
        (torch.int8, torch.bfloat16, "weight has dtype torch.bfloat16 with x of torch.int8: must be torch.int8"),
        (FP8, torch.int8, "weight has dtype torch.int8 with x of torch.float8_e4m3fn: must be torch.float8_e4m3fn"),
        (torch.bfloat16, torch.float16, "weight has dtype torch.float16 with x of torch.bfloat16: must be .*bfloat16"),
        (torch.int16, torch.int8, "x has dtype torch.int16: must be one of torch.float8_e4m3fn, torch.uint8, "),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "emulator"])
def test_types_that_do_not_go_together(x, weight, allowed, backend):
    with pytest.raises(TypeError, match=allowed):
        patch_embed(torch.ones(4, 16).to(x), torch.ones(8, 16).to(weight), backend=backend)


@pytest.mark.parametrize("backend", ["auto", "reference", "emulator"])
@pytest.mark.parametrize(("dtype", "most"), [(torch.uint8, 65_792), (torch.int8, 131_056)])
def test_integers_whose_sums_leave_32_bits_are_refused(dtype, most, backend):
    x, weight = torch.ones(1, most + 1, dtype=dtype), torch.ones(8, most + 1, dtype=torch.int8)
    with pytest.raises(ValueError, match=f"x has K = {most + 1}: must be at most {most} of {dtype}, .*32 bits"):
        patch_embed(x, weight, backend=backend)
    if backend != "emulator":
        longest = patch_embed(x[:, :most].contiguous(), weight[:, :most].contiguous(), backend=backend)
        assert torch.equal(longest, torch.full((1, 8), float(most)).bfloat16())


@pytest.mark.parametrize("backend", ["auto", "emulator"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(7,), (2, 5)])
def test_rows_name_their_positions(shape, dtype, backend):
    generator = torch.Generator().manual_seed(5)
    rows = torch.Size(shape).numel()
    x = torch.randn(*shape, 40, generator=generator).to(FP8)
    _, weight, bias, pos = make_call(positions=4)
    index = torch.randint(0, 4, shape, generator=generator, dtype=dtype)
    out = patch_embed(x, weight, bias, pos, pos_index=index, backend=backend)
    assert out.shape == (*shape, 8)
    assert_contract(out, x.view(rows, 1, 40), weight, bias, pos[index.view(-1).long()], 1.0)


@pytest.mark.parametrize(
    ("index", "error", "text"),
    [
        (torch.tensor([0, 3, 0, 0, 0, 0]), ValueError, "pos_index has numbers from 0 to 3: must be 0 to 2"),
        (torch.tensor([0, -1, 0, 0, 0, 0]), ValueError, "from -1 to 0"),
        (torch.zeros(5, dtype=torch.int32), ValueError, r"pos_index has shape \[5\]: must be that of x's rows \[6\]"),
        (torch.zeros(6), TypeError, "pos_index has dtype torch.float32: must be one of torch.int32, torch.int64"),
        (torch.zeros(12, dtype=torch.int32)[::2], ValueError, "pos_index has strides"),
        ([0] * 6, TypeError, "pos_index is list"),
    ],
)
def test_a_wrong_index_is_refused(index, error, text):
    x, weight, bias, pos = make_call()
    with pytest.raises(error, match=text):
        patch_embed(x.view(6, 40), weight, bias, pos, pos_index=index)
    with pytest.raises(ValueError, match="pos_embed is not"):
        patch_embed(x.view(6, 40), weight, bias, None, pos_index=torch.zeros(6, dtype=torch.int32))


def test_largest_and_smallest_scales():
    """The bounds of what rounds to a finite FP32 number greater than 0, by NumPy's own rounding."""
    for below, above in ((2.0**-150, 2.0**-149), ((2 - 2**-23) * 2.0**127, (2 - 2**-24) * 2.0**127)):
        legal, illegal = (above, below) if above < 1 else (below, above)
        with np.errstate(over="ignore", under="ignore"):
            assert 0 < np.float32(legal) < np.inf
            assert np.float32(illegal) in (0, np.inf)
            # The neighbours in FP64 round to the other side.
            inside = np.nextafter(illegal, 1.0)
            assert 0 < np.float32(inside) < np.inf
        for scale in (legal, float(inside)):
            assert scales.split_scale("scale_a", scale) == (scale, None)
        with pytest.raises(ValueError, match="in FP32"):
            scales.split_scale("scale_a", illegal)


def test_not_finite_scale_tensors_reach_the_output():
    x, weight, bias, pos = make_call()
    assert patch_embed(x, weight, bias, pos, scale_a=torch.tensor(torch.nan)).isnan().all()
    out = patch_embed(x, weight, scale_b=torch.tensor(torch.inf))
    product = x.double() @ weight.double().T
    assert torch.equal(out.double(), product * torch.inf)


def test_sliced_input_with_storage_offset():
    x, weight, bias, pos = make_call(images=4)
    out = patch_embed(x[1:3], weight, bias, pos)
    assert x[1:3].storage_offset() > 0
    assert_contract(out, x[1:3], weight, bias, pos, 1.0)


def test_strided_bias_and_pos_embed():
    x, weight, _, _ = make_call()
    bias, pos = torch.randn(16)[::2], torch.randn(8, 3).T
    assert_contract(patch_embed(x, weight, bias, pos), x, weight, bias, pos, 1.0)


def test_nan_reaches_its_row_only():
    x, weight, bias, pos = make_call()
    x[1, 2, 7] = float("nan")
    out = patch_embed(x, weight, bias, pos)
    assert out.isnan().all(-1).tolist() == [[False] * 3, [False, False, True]]
    assert not out[0].isnan().any()


# --- what torch sees -------------------------------------------------------------------------------------------------


def operator_arguments(scale=None, backend="reference"):
    x, weight, bias, pos = make_call()
    return x, weight, bias, pos, None, scale, None, 1.0, 0.5, backend


# opcheck's fourth test, test_schema, compares the inputs with torch.allclose, which torch lacks for FP8: see below.
OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("scale", [None, torch.tensor([0.5])])
def test_opcheck(scale):
    operator = torch.ops.cute_kernels.patch_embed.default
    torch.library.opcheck(operator, operator_arguments(scale=scale), test_utils=OPCHECKS)


def test_inputs_are_neither_written_nor_aliased():
    arguments = operator_arguments(scale=torch.tensor([0.5]))
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    before = [t.detach().clone() for t in tensors]
    out = torch.ops.cute_kernels.patch_embed(*arguments)
    assert all(torch.equal(t.view(torch.uint8), b.view(torch.uint8)) for t, b in zip(tensors, before, strict=True))
    assert all(out.untyped_storage().data_ptr() != t.untyped_storage().data_ptr() for t in tensors)


def test_compilers_keep_the_strides_of_the_program():
    """Inductor may give an operator other strides than the program did, unless its tag says not to."""
    assert torch.Tag.needs_fixed_stride_order in torch.ops.cute_kernels.patch_embed.default.tags


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("config", [None, Sm100PatchEmbedConfig(epilogue="bf16x2")])
def test_compile_sees_one_node(dynamic, config):
    graphs = []

    def backend(module, _):
        graphs.append(module)
        return module

    def embed(x, weight, bias, pos, scale):
        return patch_embed(x, weight, bias, pos, scale_a=scale, scale_b=0.5, config=config)

    compiled = torch.compile(embed, backend=backend, fullgraph=True, dynamic=dynamic)
    call = make_call()
    assert torch.equal(compiled(*call, torch.tensor(0.25)), embed(*call, torch.tensor(0.25)))
    calls = [n.target for n in graphs[0].graph.nodes if n.op.startswith("call")]
    assert calls == [torch.ops.cute_kernels.patch_embed]
    torch.compiler.reset()


def test_configs_and_scales_inside_of_a_compiled_function():
    def embed(x, weight, scale):
        return patch_embed(x, weight, scale_a=scale, config=Sm100PatchEmbedConfig(epilogue="bf16x2"))

    x, weight, *_ = make_call()
    compiled = torch.compile(embed, backend="eager", fullgraph=True, dynamic=True)
    for scale in (0.5, 0.25):
        assert torch.equal(compiled(x, weight, scale), embed(x, weight, scale))
    torch.compiler.reset()


def test_compile_through_aot_autograd():
    def embed(x, weight, bias, pos):
        return torch.nn.functional.gelu(patch_embed(x, weight, bias, pos).float())

    call = make_call()
    compiled = torch.compile(embed, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*call), embed(*call), rtol=0, atol=0)
    torch.compiler.reset()


def test_a_bias_beside_fp8_rows_has_a_gradient():
    x, weight, bias, pos = make_call()
    out = patch_embed(x, weight, bias.requires_grad_(), pos)
    out.sum().backward()
    assert torch.equal(bias.grad, torch.full_like(bias, out.numel() / bias.numel()))
    with torch.no_grad():
        assert not patch_embed(x, weight, bias, pos).requires_grad


def test_export_keeps_the_operator():
    class Embed(torch.nn.Module):
        def forward(self, x, weight, bias, pos):
            return patch_embed(x, weight, bias, pos, scale_a=0.5)

    call = make_call()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(Embed(), call, dynamic_shapes=({0: batch}, None, None, None))
    more = make_call(seed=1, images=5)
    assert torch.equal(program.module()(*more), Embed()(*more))


# --- dispatch --------------------------------------------------------------------------------------------------------


def test_fake_cuda_tensors_need_no_gpu():
    """Tracing for a GPU happens on machines without one: no capability is asked for and nothing is compiled."""
    with FakeTensorMode():
        x = torch.empty(4, 196, 768, dtype=FP8, device="cuda")
        weight = torch.empty(1152, 768, dtype=FP8, device="cuda")
        ones = functools.partial(torch.ones, device="cuda")
        for scale_a, scale_b in ((ones(1), None), (ones(4, 196, 1), ones(1, 1152)), (ones(784, 1), 0.5)):
            out = patch_embed(x, weight, scale_a=scale_a, scale_b=scale_b)
            assert (out.shape, out.dtype, out.device) == ((4, 196, 1152), torch.bfloat16, torch.device("cuda", 0))


def test_more_than_2_31_output_elements_have_a_shape():
    with FakeTensorMode():
        x = torch.empty(14_268, 196, 768, dtype=FP8, device="cuda")
        out = patch_embed(x, torch.empty(768, 768, dtype=FP8, device="cuda"))
    assert out.numel() > 2**31


def test_cpu_tensors():
    cpu = torch.device("cpu")
    assert choose_backend(cpu, "auto") == "reference"
    assert choose_backend(cpu, "reference") == "reference"
    assert choose_backend(cpu, "emulator") == "emulator"


def test_cuda_tensors(monkeypatch):
    asked = []
    capability = {0: (7, 5), 1: (10, 0), 2: (10, 3), 3: (11, 0), 4: (9, 0), 5: (8, 9), 6: (12, 1)}

    def get_device_capability(device):
        asked.append(device)
        return capability[device.index]

    monkeypatch.setattr(torch.cuda, "get_device_capability", get_device_capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    device = torch.device("cuda", 1)
    assert choose_backend(device, "auto") == "kernel"
    assert asked == [device]  # that tensor's device, not the current one
    for index in (4, 5, 6):
        assert choose_backend(torch.device("cuda", index), "auto") == "kernel"
    for index in (0, 2, 3):
        major, minor = capability[index]
        message = rf'GPU {index} \(compute capability {major}\.{minor}\); supported: .*10\.0.*backend="reference"'
        with pytest.raises(NotImplementedError, match=message):
            choose_backend(torch.device("cuda", index), "auto")
    assert choose_backend(torch.device("cuda", 0), "reference") == "reference"
    with pytest.raises(ValueError, match="the emulator reads CPU tensors"):
        choose_backend(device, "emulator")


def test_rocm_is_not_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(NotImplementedError, match="no kernel for device cuda:0"):
        choose_backend(torch.device("cuda", 0), "auto")


def test_other_devices_are_refused():
    with pytest.raises(NotImplementedError, match="no kernel for device xpu"):
        choose_backend(torch.device("xpu"), "auto")
