"""A step of a training on a GPU, up to the launch: its plan is remembered, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from cute_kernels.emulator.programs import capture
from cute_kernels.operations import base
from cute_kernels.operations.derivatives import Fact, Facts
from cute_kernels.operations.patch_embed_images import PATCH_EMBED_IMAGES as OPERATION
from cute_kernels.operations.reference import patch_rows
from cute_kernels.operations.runtime import repeat
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.operations.runtime.repeat import KeptPlan
from cute_kernels.plan import make_plan


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What would be launched, and how often it was planned."""
    found, plan = SimpleNamespace(operands=[], plans=0), type(OPERATION).plan

    def counted(self, a):
        found.plans += 1
        return plan(self, a)

    monkeypatch.setattr(type(OPERATION), "plan", counted)
    monkeypatch.setattr(base, "choose_backend", lambda device, backend: "kernel")
    monkeypatch.setattr(base, "launch", lambda executor, plan, operands: found.operands.append(operands))
    monkeypatch.setattr(KeptPlan, "launch", lambda kept, operands: found.operands.append(operands))
    monkeypatch.setattr(base, "in_autograd_function", lambda: True)
    monkeypatch.setattr(OPERATION.repeated, "put", lambda *_: pytest.fail("a weight that trains was remembered"))
    OPERATION.repeated.clear()
    yield found
    OPERATION.repeated.clear()


def call(images: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    values = images, weight, None, None, bias, None, 16, torch.bfloat16, "auto", None
    return OPERATION._run(*OPERATION.table.encode(values))


def test_steps_share_a_plan_and_read_their_own_numbers(launched: SimpleNamespace) -> None:
    images, weight, bias = torch.ones(2, 3, 32, 32), torch.ones(24, 768), torch.zeros(24)
    images, weight = images.bfloat16(), weight.bfloat16()
    for step in range(3):
        call(images, weight.mul_(2), bias.fill_(step))
        table = launched.operands[-1].table
        assert float(table.max()) == step and float(launched.operands[-1].weight.max()) == 2.0 ** (step + 1)
    assert launched.plans == 1
    call(images[:1], weight, bias)
    call(images.to(memory_format=torch.channels_last), weight, bias)
    assert launched.plans == 3
    with pytest.raises(ValueError, match="weight"):
        call(images, weight[:, :-1], bias)
    OPERATION.repeated.clear()
    call(images, weight, bias)
    assert launched.plans == 4


def test_positions_that_a_kernel_reads_as_they_are(launched: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OPERATION, "plan", lambda a: make_plan(OPERATION.problem(a), a.config, "sm_90a"))
    images, weight = torch.ones(2, 3, 32, 32, dtype=torch.bfloat16), torch.ones(768, 768, dtype=torch.bfloat16)
    table = torch.rand(4 * 768 + 1)
    as_is = table[:-1].view(4, 768)
    for positions in (as_is, table[1:].view(4, 768), as_is.view(768, 4).T, as_is.half()):
        values = images, weight, None, None, None, positions, 16, torch.bfloat16, "auto", None
        OPERATION._run(*OPERATION.table.encode(values))
        got = launched.operands[-1].table
        assert (got is positions) == (positions is as_is)
        assert torch.equal(got, positions.float()) and got.is_contiguous() and got.data_ptr() % 16 == 0


def test_a_kept_plan_launches_on_the_stream_and_device_of_its_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what its kernel takes of them, by their names."""
    launched, entered = [], []

    class Recorder:
        def __init__(self, plan: str) -> None:
            self.plan = plan

        def with_constants(self, parameters: tuple[str, ...]) -> Callable[[tuple], None]:
            return lambda values: launched.append((self.plan, dict(zip(parameters, values, strict=True))))

    monkeypatch.setattr(repeat.gpu, "bound_launch", Recorder)
    monkeypatch.setattr(repeat, "_current_stream", lambda device: 40 + device)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or contextlib.nullcontext())
    kept = KeptPlan(SimpleNamespace(launches=("pass", "product")), ("images", "scale", "table"))
    for current in (-1, 0):
        monkeypatch.setattr(repeat, "_current_device", lambda current=current: current)
        images = torch.ones(3)
        kept.launch(Operands(images=images, scale=2.0, table=None))
        given = {"images": images.data_ptr(), "scale": 2.0, "table": None, "stream": 39}
        assert launched[-2:] == [("pass", given), ("product", given)]
    assert entered == [-1]


def test_an_operator_of_a_device_is_not_dispatched_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """But with a view whose sign is not in its memory; graphs of `torch.compile` call it in every step."""
    operator = torch.ops.cute_kernels.patch_embed_images.default
    dispatched, redispatch = [], type(operator).redispatch
    monkeypatch.setattr(
        type(operator), "redispatch", lambda self, *given: dispatched.append(self) or redispatch(self, *given)
    )
    images, weight, bias, _ = images_and_the_rest(32, 16)
    with capture("sm_90a"):
        given = arguments(images.cuda(), weight.cuda(), bias.cuda())
        first = operator(*OPERATION.table.encode(given)).cpu()
        assert operator not in dispatched
        second = operator(*OPERATION.table.encode((torch._neg_view(-given[0]), *given[1:]))).cpu()
        assert operator in dispatched
    assert torch.equal(first, second)


def images_and_the_rest(size: int, patch: int) -> tuple[torch.Tensor, ...]:
    """Small integers, of which all sums are exact: images, weight, bias, and the gradient of the result."""
    generator, positions = torch.Generator().manual_seed(0), (size // patch) ** 2
    shapes = (2, 3, size, size), (64, 3, patch, patch), (64,), (2, positions, 64)
    return tuple(torch.randint(-2, 3, shape, generator=generator).bfloat16() for shape in shapes)


def arguments(images: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple:
    out_dtype = torch.float32 if weight.shape[-1] == 16 else torch.bfloat16
    return images, weight.flatten(1), None, None, bias, None, weight.shape[-1], out_dtype, "auto", None


@pytest.mark.parametrize("negative", [False, True])
def test_a_step_on_a_device_leaves_out_the_dispatcher(negative: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """But of a view whose sign is not in its memory, which the dispatcher makes what it stands for."""
    asked, below = [], OPERATION._below_autograd
    monkeypatch.setattr(OPERATION, "_below_autograd", lambda *given: asked.append(given[0]) or below(*given))
    images, weight, bias, direction = images_and_the_rest(32, 16)
    with capture("sm_90a"):
        given = [torch.nn.Parameter(each.cuda()) for each in (weight, bias)]
        out = OPERATION.call(arguments(torch._neg_view(-images.cuda()) if negative else images.cuda(), *given))
        out += 1  # as into a result of torch's operators
        out.backward(direction.float().cuda())
        found = [out.detach().cpu(), *(each.grad.cpu() for each in given)]
    rows, columns = patch_rows(images, 16).double(), direction.flatten(0, 1).double()
    sums = rows @ weight.flatten(1).double().T + bias.double() + 1
    expected = sums.view(2, 4, 64), (columns.T @ rows).view(weight.shape), columns.sum(0)
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got.double(), wanted.to(got.dtype).double())
    assert len(asked) == 1 and (asked[0] is None) != negative


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("patch", [14, 16])
def test_rows_for_the_gradient_of_the_weight_are_laid_out_by_the_pass(patch: int, dtype: torch.dtype) -> None:
    """Unless they are differentiated in turn; rows of 14 x 14 x 3 pixels are padded."""
    images, weight, bias, direction = images_and_the_rest(2 * patch, patch)
    rows, columns = patch_rows(images, patch).double(), direction.flatten(0, 1).double()
    for create_graph in (False, True):
        with capture("sm_90a") as session:
            parameter, pixels = torch.nn.Parameter(weight.cuda()), images.cuda().to(dtype)
            out = OPERATION.call(arguments(pixels, parameter, bias.cuda()))
            before = len(session.launches)
            grad = direction.to(out.dtype).cuda()
            (got,) = torch.autograd.grad(out, parameter, grad, create_graph=create_graph)
            got, launched = got.detach().cpu(), session.launches[before:]
        assert torch.equal(got.double(), (columns.T @ rows).view(weight.shape).bfloat16().double())
        assert [each.launch.kernel_name.startswith("patchify") for each in launched] == [True] * (not create_graph)


def test_a_graph_of_the_gradients_lays_out_patches_by_torch() -> None:
    """Its tensors have no memory, and say that they are a GPU's."""
    images, _, _, direction = images_and_the_rest(32, 16)
    facts = Facts({"weight": Fact(torch.Size((64, 768)), torch.bfloat16)}, frozenset({"weight"}))

    def gradient(images: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return OPERATION.gradients(OPERATION.given(images=images, patch=16), grad, facts)["weight"]

    with FakeTensorMode(), FunctionalTensorMode():
        given = [torch.empty(each.shape, dtype=each.dtype, device="cuda") for each in (images, direction)]
        assert given[0].is_cuda and type(given[0]) is FunctionalTensor and gradient(*given).shape == (64, 768)
    rows, columns = patch_rows(images, 16).double(), direction.flatten(0, 1).double()
    found = make_fx(gradient, tracing_mode="fake")(images, direction)(images, direction)
    assert torch.equal(found.double(), (columns.T @ rows).bfloat16().double())
