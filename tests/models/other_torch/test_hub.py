"""`make hub`, loaded by Hugging Face's `kernels` itself: its layout, its digests, and a model that it changes."""

from __future__ import annotations

from pathlib import Path

import kernels
import pytest
import torch
from kernels import _rust

from tests.package.test_release import of_ci


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("hub") / "hub"
    of_ci("hub").make(output)
    return output


class Tower(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Conv2d(3, 32, 16, stride=16)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.proj(images)


def test_the_layout_is_valid(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert {str(backend) for backend in _rust.Build.open(made).general.backends} == {"cpu", "cuda"}
    assert "legacy" not in capfd.readouterr().err
    for variant in (made / "build").iterdir():
        metadata = _rust.Metadata.read_from_file(variant / "metadata.json")
        metadata.digest.validate(_rust.Digest.hash_variant(_rust.DigestAlgorithm.SHA256, variant))


@torch.no_grad()
def test_a_kernel_and_a_layer(made: Path) -> None:
    kernel = kernels.get_local_kernel(made, backend="cpu")
    a, b = (torch.randint(-2, 3, (rows, 64)) for rows in (32, 48))
    assert torch.equal(kernel.gemm(a.bfloat16(), b.bfloat16()).long(), a @ b.T)
    tower, images = Tower().bfloat16().eval(), torch.randn(2, 3, 32, 48).bfloat16()
    expected = tower(images)
    kernels.replace_kernel_forward_from_hub(torch.nn.Conv2d, "PatchConv2d")
    repository = kernels.LocalLayerRepository(made, layer_name="PatchConv2d")
    with kernels.use_kernel_mapping({"PatchConv2d": {"cpu": repository}}):
        tower = kernels.kernelize(tower, mode=kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE, device="cpu")
    assert tower.proj.forward.__func__ is kernel.layers.PatchConv2d.forward
    torch.testing.assert_close(tower(images), expected, rtol=2e-2, atol=2e-2)
