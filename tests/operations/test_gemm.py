"""`gemm`: its reference against exact arithmetic, the emulated kernels behind it, and what torch sees of it."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_kernels
from cute_kernels import Sm90GemmConfig, Sm100GemmConfig, gemm
from cute_kernels.config import GemmProblem
from cute_kernels.emulator.programs import host
from cute_kernels.operations import reference
from cute_kernels.operations.compile import compile_plan, dsl_arguments, dsl_function
from cute_kernels.operations.gemm import GEMM
from cute_kernels.operations.runtime.gpu import BoundLaunch
from cute_kernels.plan import PLANNERS, make_plan
from tests.nightly import NIGHTLY, crossed, nightly
from tests.operations.reference.exact import fp32, fractions, nearest

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
PRECISION = {BF16: (8, -133), FP16: (11, -24), FP32: (24, -149)}
SMALL_SM90 = Sm90GemmConfig(128, 64, stages=2, cluster_m=1, store_stages=1)
SMALL_SM100 = Sm100GemmConfig(tile_n=64, stages=3, store_stages=1)


def make_call(seed=0, shape=(5,), n=7, k=40, dtype=BF16, spread=0):
    """Random a [*shape, k], b [n, k], bias [n]; elements are scaled by up to 2 ** spread either way."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*extents):
        scale = torch.randint(-spread, spread + 1, extents, generator=generator)
        return torch.ldexp(torch.randn(extents, generator=generator), scale).to(dtype)

    return draw(*shape, k), draw(n, k), torch.randn(n, generator=generator)


def exact_gemm(a, b, bias, out_dtype, split_k=1):
    """[rows][N] fractions by the contract, element by element."""
    rows, columns = fractions(a.reshape(-1, a.shape[-1])), fractions(b)
    addends = [Fraction(0)] * len(columns) if bias is None else fractions(bias.float())
    out = []
    for row in rows:
        line = []
        for column, addend in zip(columns, addends, strict=True):
            blocks, sums = -(-len(row) // 64), []
            for i in range(split_k):
                acc = Fraction(0)
                for k in range(64 * (i * blocks // split_k), min(64 * ((i + 1) * blocks // split_k), len(row)), 16):
                    acc = fp32(acc + sum(x * y for x, y in zip(row[k : k + 16], column[k : k + 16], strict=True)))
                sums.append(acc)
            while len(sums) > 1:
                sums = [fp32(left + right) for left, right in zip(sums[::2], sums[1::2], strict=True)]
            (acc,) = sums
            line.append(nearest(fp32(acc + addend), *PRECISION[out_dtype]))
        out.append(line)
    return out


@given(
    seed=st.integers(0, 2**32),
    batched=st.booleans(),
    k=st.sampled_from([8, 16, 24, 56]),
    dtype=st.sampled_from([BF16, FP16]),
    out_dtype=st.sampled_from([BF16, FP16, FP32]),
    spread=st.sampled_from([0, 4]),
    with_bias=st.booleans(),
)
def test_reference_is_the_contract(seed, batched, k, dtype, out_dtype, spread, with_bias):
    a, b, bias = make_call(seed, (2, 3) if batched else (4,), 5, k, dtype, spread)
    bias = bias if with_bias else None
    out = gemm(a, b, bias=bias, out_dtype=out_dtype)
    assert out.shape == (*a.shape[:-1], 5) and out.dtype == out_dtype and out.is_contiguous()
    assert fractions(out.reshape(-1, 5)) == exact_gemm(a, b, bias, out_dtype)


@pytest.mark.parametrize(("split_k", "k"), [(2, 72), (2, 200), (4, 392), (8, 520)])
def test_reference_adds_slices_of_k_as_a_tree(split_k, k):
    """Slices of unequal numbers of blocks, a last block that is not whole; by the config as well."""
    a, b, bias = make_call(k, (3,), 4, k, spread=2)
    out = reference.gemm(a, b, bias, FP32, split_k)
    assert fractions(out) == exact_gemm(a, b, bias, FP32, split_k)
    config = Sm90GemmConfig(128, 64, 2, 1, store_stages=1, split_k=split_k)
    assert torch.equal(gemm(a, b, bias=bias, out_dtype=FP32, config=config, backend="reference"), out)


def test_reference_refuses_a_split_that_leaves_a_slice_empty():
    for split_k, k in ((3, 512), (0, 64), (2, 64)):
        a, b, _ = make_call(k=k)
        with pytest.raises(ValueError, match=f"split_k = {split_k}: must be .*, at most the {k // 64} blocks"):
            reference.gemm(a, b, split_k=split_k)


def test_reference_rounds_sums_once_that_float64_would_round():
    """1 + 2^-24 is half way between two FP32 numbers; 2^-80 decides, and float64 cannot hold it beside 1."""
    a = torch.zeros(1, 16, dtype=BF16)
    b = torch.zeros(1, 16, dtype=BF16)
    a[0, :3] = torch.tensor([1.0, 2.0**-12, 2.0**-40])
    b[0, :3] = torch.tensor([1.0, 2.0**-12, 2.0**-40])
    assert gemm(a, b, out_dtype=FP32).item() == 1 + 2.0**-23
    a[0, 2] = -a[0, 2]
    assert gemm(a, b, out_dtype=FP32).item() == 1.0
    a[0, 2] = 0.0
    assert gemm(a, b, out_dtype=FP32).item() == 1.0  # the tie itself goes to even


def test_reference_keeps_infinities_and_nans_in_their_row():
    a, b, bias = make_call()
    a[1, 3], a[2, 3] = float("nan"), float("inf")
    out = gemm(a, b, bias=bias)
    assert out.isnan().all(-1).tolist() == [False, True, False, False, False]
    assert torch.equal(out[2], torch.where(b[:, 3] > 0, torch.inf, -torch.inf).to(BF16))


def test_a_batch_shares_b_or_has_its_own():
    a, b, bias = make_call(shape=(3, 4))
    own = torch.stack([b, b.flip(0), -b])
    shared = gemm(a, b, bias=bias)
    assert torch.equal(shared, torch.stack([gemm(part, b, bias=bias) for part in a]))
    assert torch.equal(gemm(a, own, bias=bias), torch.stack([gemm(x, w, bias=bias) for x, w in zip(a, own)]))


@pytest.mark.parametrize("config", [None, SMALL_SM90], ids=["sm100", "sm90"])
@pytest.mark.parametrize("out_dtype", [pytest.param(BF16, marks=nightly), FP32])
def test_emulated_kernels_equal_the_reference(config, out_dtype):
    """Odd N, whose rows the kernel pads; a slice off 16 bytes; a batch; a strided bias in another type."""
    a, b, bias = make_call(shape=(2, 70), n=37, k=72)
    off = torch.empty(a.numel() + 1, dtype=BF16)[1:].view(a.shape).copy_(a)
    assert off.data_ptr() % 16
    own = torch.stack([b, b.flip(0)])
    strided = torch.stack([bias, bias], 1).to(FP16)[:, 0]
    out = gemm(off, own, bias=strided, out_dtype=out_dtype, config=config, backend="emulator")
    assert torch.equal(out, reference.gemm(a, own, strided, out_dtype)) and out.is_contiguous()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_a_bias_is_read_where_it_is(dtype):
    """One that a kernel cannot read is copied, a lazy negation among them."""
    a, b, bias = make_call(n=16)
    bias = bias.to(dtype)
    assert GEMM.prepared(a=a, b=b, bias=bias).operands.bias.data_ptr() == bias.data_ptr()
    off = torch.empty(17, dtype=dtype)[1:].copy_(bias)
    for copied in (off, torch.stack([bias, bias], 1)[:, 0], torch._neg_view(-bias)):
        operand = GEMM.prepared(a=a, b=b, bias=copied).operands.bias
        assert operand.data_ptr() % 16 == 0 and operand.is_contiguous() and torch.equal(operand, bias)
        assert operand.dtype is dtype and not operand.is_neg() and operand.data_ptr() != copied.data_ptr()


# --- what torch sees -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (2, 3)])
def test_opcheck(shape):
    a, b, bias = make_call(shape=shape, n=8)
    names = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    no = (None,) * 7  # tensors and numbers of the scales, residual
    torch.library.opcheck(torch.ops.cute_kernels.gemm, (a, b, bias, *no, FP32, "auto"), test_utils=names)
    config = ("Sm90GemmConfig:tile_m=128,pingpong=false",)
    torch.library.opcheck(torch.ops.cute_kernels.gemm, (a, b, None, *no, None, "reference", *config), test_utils=names)


def test_compiled_function_has_one_node_and_the_same_result():
    a, b, bias = make_call(n=8)
    seen = []

    def backend(module, _):
        seen.extend(node.target for node in module.graph.nodes if node.op == "call_function")
        return module

    function = torch.compile(lambda *t: gemm(*t, bias=bias, config=Sm100GemmConfig(stages=4)), backend=backend)
    assert torch.equal(function(a, b), gemm(a, b, bias=bias))
    assert [str(target) for target in seen if "gemm" in str(target)] == ["cute_kernels.gemm"]


def test_fake_tensors_need_no_kernel():
    with FakeTensorMode():
        a, b = torch.empty(3, 100, 64, dtype=FP16), torch.empty(50, 64, dtype=FP16)
        out = gemm(a, b, out_dtype=FP32)
        assert out.shape == (3, 100, 50) and out.dtype == FP32
        with pytest.raises(ValueError, match="K = 64 and b has K = 8"):
            gemm(a, torch.empty(50, 8, dtype=FP16))


@pytest.mark.parametrize(
    "config", [Sm100GemmConfig(256, 128, 4), Sm90GemmConfig(pingpong=True), Sm90GemmConfig(split_k=2)]
)
def test_configs_survive_the_operator(config):
    codec = PLANNERS["gemm"].codec
    decoded = codec.decode(codec.encode(config))
    assert decoded == config and [type(v) for v in vars(decoded).values()] == [type(v) for v in vars(config).values()]


@pytest.mark.parametrize(("bias", "config"), crossed([True, False], [SMALL_SM100, SMALL_SM90]))
def test_bound_launch_equals_the_call_of_the_dsl(bias, config):
    plan = make_plan(GemmProblem(70, 264, 144, 3, bias=bias), config)
    bound = BoundLaunch(plan, compile_plan(plan, emulated=True))
    with host.recording_runtime():
        function = dsl_function(plan)
    for step in (1, 2):  # the second call writes over the first one's arguments
        addresses = {"a": 0x10000 * step, "b": 0x200000 * step, "bias": 0x3000000 * step, "out": 0x40000000 * step}
        expected = host.record(function, *dsl_arguments(plan, **addresses, stream=0))
        with host.capture() as launches:
            bound(**addresses, stream=0)
        (own,) = launches
        assert (own.grid, own.block, own.cluster) == (expected.grid, expected.block, expected.cluster)
        bases = [int.from_bytes(p[:8], "little") for p in own.params if len(p) == 128]
        assert bases == [addresses[name] for name in ("a", "b", "out")]
        # The generated host code writes half of a 128-byte tensor map; the rest is whatever was on its stack.
        kept = [[p[:64] if len(p) == 128 else p for p in x.params if len(p) in (4, 8, 128)] for x in (own, expected)]
        assert kept[0] == kept[1]


# --- refusals --------------------------------------------------------------------------------------------------------

A, B = torch.zeros(4, 16, dtype=BF16), torch.zeros(6, 16, dtype=BF16)
NARROW = {"a": A.to(FP8), "b": B.to(FP8)}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"a": None}, TypeError, "a is NoneType"),
        ({"bias": 3}, TypeError, "bias is int"),
        ({"a": A.float()}, TypeError, "a has dtype torch.float32"),
        ({"a": A.half()}, TypeError, "b has dtype torch.bfloat16 with a of torch.float16: must be torch.float16"),
        ({"out_dtype": torch.int8}, ValueError, "out_dtype = torch.int8"),
        ({"out_dtype": "bfloat16"}, TypeError, "out_dtype is str"),
        ({"a": A[0]}, ValueError, r"a has shape \[16\]"),
        ({"b": B[None]}, ValueError, r"b has shape \[1, 6, 16\]"),
        ({"a": torch.zeros(2, 4, 16, dtype=BF16), "b": B.expand(3, 6, 16).contiguous()}, ValueError, "B = 2:? .*B = 3"),
        ({"a": A[:, :0], "b": B[:, :0]}, ValueError, "a has shape .*: the last extent must be at least 1"),
        ({"b": B[:0]}, ValueError, "b has shape .*: every extent must be at least 1"),
        ({"a": A.T.contiguous().T}, ValueError, "must be contiguous"),
        ({"b": B[:, :8].contiguous()}, ValueError, "a has K = 16 and b has K = 8"),
        ({"a": A[:, :12].contiguous(), "b": B[:, :12].contiguous()}, ValueError, "K = 12.*16 bytes; nearest 8 or 16"),
        ({"bias": torch.zeros(5)}, ValueError, r"bias has shape \[5\]: must be \[N\] = \[6\]"),
        ({"bias": torch.zeros(6, dtype=torch.int32)}, TypeError, "bias has dtype torch.int32"),
        ({"bias": torch.zeros(6, device="meta")}, ValueError, "bias is on meta and a is on cpu"),
        ({"backend": "gpu"}, ValueError, "backend = 'gpu'"),
        ({"activation": "tanh"}, ValueError, "activation = 'tanh': must be one of 'none', 'silu', .*'relu_squared'"),
        ({"activation": None}, TypeError, "activation is NoneType: must be str"),
        (
            {"config": cute_kernels.Sm100PatchEmbedConfig()},
            TypeError,
            "config is Sm100PatchEmbedConfig: must be cute_kernels.Sm100Gemm",
        ),
        ({"config": Sm100GemmConfig(tile_n=96), "backend": "emulator"}, ValueError, "tile_n = 96"),
        ({"config": Sm100GemmConfig(tile_n=96), "backend": "reference"}, ValueError, "tile_n = 96"),
        ({"b": B.to_sparse()}, TypeError, "b has layout torch.sparse_coo"),
        ({"bias": torch.ones(6).to_sparse()}, TypeError, "bias has layout torch.sparse_coo"),
        ({"a": A[:, :4].contiguous(), "b": B[:, :4].contiguous()}, ValueError, "K = 4.*nearest 8$"),
        (
            {"a": A.to(FP8), "b": B.to(torch.int8)}, TypeError,
            "b has dtype torch.int8 with a of torch.float8_e4m3fn: must be torch.float8_e4m3fn",
        ),
        ({"a": A.to(torch.uint8), "b": B.to(torch.uint8)}, TypeError, "b has dtype torch.uint8"),
        ({"a": A.to(FP8)[:, :8].contiguous(), "b": B.to(FP8)[:, :8].contiguous()}, ValueError, "K = 8.*nearest 16$"),
        (
            {"a": torch.zeros(2, 131_072, dtype=torch.int8), "b": torch.zeros(2, 131_072, dtype=torch.int8)},
            ValueError, "a has K = 131072: must be at most 131056 of torch.int8",
        ),
        ({"scale_a": -0.5}, ValueError, "scale_a = -0.5: must be finite and greater than 0"),
        ({"scale_b": torch.ones(6)}, ValueError, r"scale_b has shape \[6\]: must be .* or \[1, N\]"),
        ({"scale_b": torch.ones(1, device="meta")}, ValueError, "scale_b is on meta and a is on cpu"),
        (NARROW | {"scale_a": 0.0}, ValueError, "scale_a = 0.0: must be finite and greater than 0"),
        (NARROW | {"scale_a": "1"}, TypeError, "scale_a is str: must be a number"),
        (NARROW | {"scale_a": torch.ones(1, 4)}, ValueError, r"scale_a has shape .*or \[M, 1\] = \[4, 1\]"),
        (NARROW | {"scale_b": torch.ones(6, 1)}, ValueError, r"scale_b has shape .*or \[1, N\] = \[1, 6\]"),
        (NARROW | {"scale_b": torch.ones(1, 6).double()}, TypeError, "scale_b has dtype torch.float64"),
        (NARROW | {"scale_a": 1e-30, "scale_b": 1e-30}, ValueError, r"scale_a \* scale_b = .*: must be finite"),
        ({"residual": torch.zeros(4, 5)}, ValueError, r"residual has shape \[4, 5\]: must be the result's \[4, 6\]"),
        ({"residual": torch.zeros(6, 4).T}, ValueError, "residual has strides .*must be contiguous"),
        ({"residual": torch.zeros(4, 6, dtype=torch.int8)}, TypeError, "residual has dtype torch.int8"),
        ({"out_scale": 0.5}, ValueError, "out_scale = 0.5 is given: must be with out_dtype torch.float8_e4m3fn"),
        ({"out_dtype": FP8, "out_scale": -1.0}, ValueError, "out_scale = -1.0: must be finite and greater than 0"),
        ({"out_dtype": FP8, "out_scale": "1"}, TypeError, "out_scale is str: must be a number, an FP32 tensor"),
        ({"out_dtype": FP8, "out_scale": torch.ones(2)}, ValueError, r"out_scale has shape \[2\]: .* one element$"),
        ({"out_dtype": FP8, "out_scale": torch.ones(1).half()}, TypeError, "out_scale has dtype torch.float16"),
        ({"out_dtype": FP8, "out_scale": torch.ones(1, device="meta")}, ValueError, "out_scale is on meta and a is on"),
        ({"out_scale": torch.ones(1)}, ValueError, "out_scale = a tensor is given: must be with out_dtype torch"),
        ({"out_dtype": FP8, "out_scale": 1e-42}, ValueError, "out_scale = 1e-42: must be 1 / out_scale is finite"),
    ],
)
def test_refusals_name_argument_given_and_allowed(arguments, error, message):
    arguments = {"a": A, "b": B} | arguments
    with pytest.raises(error, match=message):
        gemm(arguments.pop("a"), arguments.pop("b"), **arguments)


@pytest.mark.parametrize(("activation", "torch_function"), [
    ("silu", torch.nn.functional.silu),
    ("gelu", torch.nn.functional.gelu),
    ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ("quick_gelu", lambda x: x * torch.sigmoid(1.702 * x)),
    ("relu", torch.relu),
    ("relu_squared", lambda x: torch.relu(x).square()),
])  # fmt: skip
def test_an_activation_follows_the_bias(activation, torch_function):
    generator = torch.Generator().manual_seed(8)
    a, b = (torch.randn(rows, 32, generator=generator).bfloat16() for rows in (20, 24))
    bias = torch.randn(24, generator=generator)
    out = gemm(a, b, bias=bias, out_dtype=torch.float32, activation=activation)
    torch.testing.assert_close(out, torch_function(a.float() @ b.float().T + bias), rtol=1e-5, atol=1e-5)
    small = {"tile_n": 64, "stages": 2, "store_stages": 1}
    configs = Sm90GemmConfig(tile_m=64, pingpong=True, **small), Sm100GemmConfig(**small)
    for config in configs if NIGHTLY else configs[activation == "silu" :][:1]:
        emulated = gemm(
            a, b, bias=bias, out_dtype=torch.float32, activation=activation, config=config, backend="emulator"
        )
        assert torch.equal(emulated, out)
    compiled = torch.compile(lambda x: gemm(x, b, bias=bias, activation=activation), backend="eager", fullgraph=True)
    assert torch.equal(compiled(a), gemm(a, b, bias=bias, activation=activation))


@pytest.mark.parametrize("backend", ["auto", "emulator", "reference"])
def test_no_rows(backend):
    b, bias = torch.randn(16, 64).bfloat16(), torch.randn(16)
    for shape in ((0, 64), (3, 0, 64), (0, 5, 64)):
        a = torch.empty(shape, dtype=torch.bfloat16)
        out = gemm(a, b, bias=bias, out_dtype=torch.float32, backend=backend)
        assert (out.shape, out.dtype) == ((*shape[:-1], 16), torch.float32)
    out = gemm(torch.empty(2, 0, 64, dtype=torch.bfloat16), b.expand(2, 16, 64).contiguous(), backend=backend)
    assert out.shape == (2, 0, 16)
    with pytest.raises(ValueError, match="bias has shape"):
        gemm(torch.empty(0, 64, dtype=torch.bfloat16), b, bias=bias[:8], backend=backend)
    with pytest.raises(ValueError, match="stages = 1: must be"):
        gemm(torch.empty(0, 64, dtype=torch.bfloat16), b, config=Sm90GemmConfig(stages=1), backend=backend)


def test_all_that_is_wrong_is_said_at_once():
    a, b = torch.zeros(4, 30).double(), torch.zeros(16, 42).bfloat16()[:, ::3]
    with pytest.raises(TypeError) as error:
        gemm(a, b, bias=torch.zeros(3, dtype=torch.int32), out_dtype=torch.int8, activation="tanh")
    for part in (
        "a has dtype torch.float64: must be one of torch", "bias has dtype torch.int32", r"b has strides [42, 3]",
        "out_dtype = torch.int8", "activation = 'tanh'", "a has K = 30 and b has K = 14",
        "bias has shape [3]: must be [N] = [16]",
    ):  # fmt: skip
        assert part in str(error.value)
    with pytest.raises(ValueError) as error:
        gemm(torch.zeros(4, 30).bfloat16(), torch.zeros(16, 21).bfloat16(), bias=torch.zeros(2, device="meta"))
    for part in ("a has K = 30: must be multiples of 8", "b has K = 21: must be multiples of 8", "bias is on meta"):
        assert part in str(error.value)
    with pytest.raises(ValueError) as error:  # where extents mean nothing, the rest is said all the same
        gemm(torch.zeros(30).bfloat16(), torch.zeros(16, 30).bfloat16().T)
    assert "a has shape [30]" in str(error.value) and "b has strides [1, 30]" in str(error.value)
