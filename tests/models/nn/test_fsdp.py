"""`torch.distributed.fsdp.fully_shard`: the parameter that a forward gathers is the same object with other numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from cute_kernels.models.nn import PatchOptions, convert_layer
from tests.models.nn.test_module import ERRORS, convolution, error, uint8_images


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def step(model: torch.nn.Module) -> None:
    """Every parameter changes its sign."""
    for parameter in model.parameters():
        parameter.grad = 2 * parameter.detach()
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def load(model: torch.nn.Module) -> None:
    model.load_state_dict({name: -tensor.detach() for name, tensor in model.state_dict().items()})


@pytest.mark.parametrize("change", [step, load])
def test_what_a_sharded_model_has(mesh: DeviceMesh, change) -> None:
    """In every round; where the memory comes back at its address, nothing else tells that it was written to."""
    images = uint8_images()
    model = torch.nn.Sequential(convert_layer(convolution(), PatchOptions(precision="fp16")))
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    for _ in range(12):
        with torch.no_grad():
            got = model(images)
        weight, bias = (parameter.full_tensor().detach() for parameter in model.parameters())
        expected = torch.nn.functional.conv2d(images / 127.5 - 1, weight, bias, stride=16)
        assert 1e-6 < error(got, expected) < ERRORS["fp16"]
        change(model)
