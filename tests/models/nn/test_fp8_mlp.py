"""`Fp8Mlp` and `convert_mlps`: errors beside the plain MLP, calibration, and what is no such MLP."""

from __future__ import annotations

import copy

import pytest
import torch

from cute_kernels.models.nn import Fp8Mlp, convert_mlps


class Mlp(torch.nn.Module):
    """As transformers has it."""

    def __init__(self, activation: torch.nn.Module | None = None, hidden: int = 128) -> None:
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(64, hidden), torch.nn.Linear(128, 64)
        self.activation_fn = activation or torch.nn.GELU(approximate="tanh")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.activation_fn(self.fc1(x)))


class Gated(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.9 * super().forward(x)


class Tower(torch.nn.Module):
    def __init__(self, *mlps: torch.nn.Module) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(mlps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def rows(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(seed))


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("activation", "name"),
    [(torch.nn.GELU(), "gelu"), (torch.nn.GELU("tanh"), "gelu_tanh"), (torch.nn.SiLU(), "silu")],
    ids=lambda value: value if isinstance(value, str) else "",
)
@torch.no_grad()
def test_a_converted_tower(activation: torch.nn.Module, name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = Tower(Mlp(activation), Mlp(activation)).to(dtype).eval()
    ours = convert_mlps(copy.deepcopy(plain), [rows(seed).to(dtype) for seed in range(4)])
    assert [block.activation for block in ours.blocks] == [name] * 2
    x = rows(9).to(dtype)
    got, mlp, twin = ours(x), ours.blocks[0], plain.blocks[0]
    assert got.dtype is dtype and error(mlp(x), twin(x)) < 6e-2 and error(got, plain(x)) < 3e-2
    assert torch.equal(mlp.to(torch.float16)(x), mlp(x)) and mlp.fc1_scale.dtype is torch.float32
    restored = Fp8Mlp(twin.fc1, twin.fc2, (1.0, 1.0), name)
    restored.load_state_dict(mlp.state_dict())
    assert torch.equal(restored(x), mlp(x))


@torch.no_grad()
def test_a_feature_does_not_depend_on_the_others_and_inputs_saturate() -> None:
    torch.manual_seed(0)
    mlp, x = Mlp(), rows()
    bounds = float(x.abs().max()), 3.0
    before = Fp8Mlp(mlp.fc1, mlp.fc2, bounds)(x)
    mlp.fc2.weight[5] *= 1e5
    after = Fp8Mlp(mlp.fc1, mlp.fc2, bounds)(x)
    others = [feature for feature in range(64) if feature != 5]
    assert torch.equal(after[..., others], before[..., others])
    assert torch.isfinite(Fp8Mlp(mlp.fc1, mlp.fc2, (0.1, 0.1))(100 * x)).all()


@pytest.mark.parametrize(
    ("model", "batches", "message"),
    [
        (Tower(Mlp(), Gated()), 1, "blocks.1 is Gated: must compute fc2"),
        (Tower(Mlp(torch.nn.Tanh())), 1, r"blocks.0 has an activation Tanh\(\): must be one of gelu"),
        (Tower(Mlp()), 0, "blocks.0 was not called"),
        (Tower(torch.nn.Linear(64, 64)), 1, "model has no MLP"),
    ],
    ids=["gated", "activation", "no batches", "no MLP"],
)
def test_what_is_refused_leaves_the_model_alone(model: torch.nn.Module, batches: int, message: str) -> None:
    before = list(model.modules())
    with pytest.raises(ValueError, match=message):
        convert_mlps(model.eval(), [rows()] * batches)
    assert list(model.modules()) == before and not any(module._forward_hooks for module in model.modules())


def test_training_is_refused() -> None:
    with pytest.raises(TypeError, match="must be in eval mode"):
        convert_mlps(Tower(Mlp()).train(), [rows()])
    mlp = Mlp()
    with pytest.raises(NotImplementedError, match="under torch.no_grad"):
        Fp8Mlp(mlp.fc1, mlp.fc2, (4.0, 4.0))(rows().requires_grad_())
    with pytest.raises(ValueError, match="fc1 has K = 64 and N = 120: must be multiples of 16"):
        Fp8Mlp(Mlp(hidden=120).fc1, mlp.fc2, (4.0, 4.0))
