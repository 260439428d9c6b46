"""Modules, transforms and files of torch with "cuda" tensors in the emulator."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import create_block_mask

from cute_kernels.emulator.programs import capture


def test_torch_func_on_the_device() -> None:
    """Inside torch.vmap and torch.func.grad a tensor is a wrapper without memory of its own."""
    with capture("sm_90a") as session:
        x, documents = torch.arange(4.0, device="cuda"), torch.tensor([0, 0, 1, 1], device="cuda")
        inside: list[torch.device] = []

        def products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            inside.extend((a.device, (a * b).device))
            return a * b + torch.ones_like(a)

        table = torch.vmap(torch.vmap(products, in_dims=(None, 0)), in_dims=(0, None))(x, x)
        same = torch.vmap(lambda i: documents[i] == documents[0])(torch.arange(4, device="cuda"))
        gradient = torch.func.grad(lambda v: (v * v * v.sin()).sum())(x)
        assert inside == [torch.device("cuda", 0)] * 2
        regions = dict(session.device.regions())
        for result in (table, same, gradient):
            assert result.is_cuda and result.device.type == "cuda"
            assert regions[result.untyped_storage().data_ptr()] == result.untyped_storage().nbytes()
        numbers = [0.0, 1.0, 2.0, 3.0]
        assert table.tolist() == [[a * b + 1 for b in numbers] for a in numbers]
        assert same.tolist() == [True, True, False, False]
        host = x.cpu()
        assert torch.allclose(gradient.cpu(), 2 * host * host.sin() + host**2 * host.cos())
        assert not torch.vmap(lambda v: v + 1)(host).is_cuda
        assert torch.vmap(lambda v: v.cpu() + 1)(x).tolist() == torch.vmap(lambda v: v.to("cpu") + 1)(x).tolist()
        assert torch.vmap(lambda v: v.cpu() + 1)(x).tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_block_mask_on_the_device() -> None:
    with capture("sm_100a"):
        mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 384, 384, device="cuda", BLOCK_SIZE=(128, 128))
        assert mask.kv_num_blocks.is_cuda and mask.kv_indices.is_cuda and mask.full_kv_num_blocks.is_cuda
        assert mask.kv_num_blocks.tolist() == [[[1, 1, 1]]] and mask.full_kv_num_blocks.tolist() == [[[0, 1, 2]]]


def test_what_is_saved_of_the_device_is_loaded_by_any_program(tmp_path) -> None:
    with capture("sm_100a"):
        module = torch.nn.Linear(2, 2).cuda()
        torch.save({"model": module.state_dict(), "x": torch.ones(3, device="cuda")[1:]}, tmp_path / "state.pt")
        again = torch.load(tmp_path / "state.pt")
        other = torch.nn.Linear(2, 2).cuda()
        other.load_state_dict(again["model"])
        assert other.weight.is_cuda and torch.equal(other.weight, module.weight)
    loaded = torch.load(tmp_path / "state.pt", map_location="cpu")
    assert type(loaded["x"]) is torch.Tensor and loaded["x"].tolist() == [1.0, 1.0]


def test_a_subclass_of_parameter_that_is_moved() -> None:
    with capture("sm_100a"):
        module = torch.nn.Linear(2, 2)
        module.weight = type("Weight", (torch.nn.Parameter,), {})(torch.ones(2, 2))
        module.cuda()
        assert module.weight.is_cuda and module(torch.ones(1, 2, device="cuda")).is_cuda


def test_a_module_that_is_moved_says_where_it_is() -> None:
    with capture("sm_100a"):
        assert torch.device(device="cuda") == torch.device("cuda")
        module = torch.nn.Linear(2, 2)
        weight = module.weight
        host = torch.ones(2)
        expected = torch.autograd.grad(module(host).sum(), weight)[0]
        module.cuda()
        assert module.weight is weight and weight.is_cuda and weight.device == torch.device("cuda", 0)
        module(host.cuda()).sum().backward()
        assert weight.grad.is_cuda and weight.grad.tolist() == expected.tolist()
        before = weight.tolist()
        torch.optim.SGD(module.parameters(), lr=1.0).step()
        assert torch.allclose(weight.cpu(), torch.tensor(before) - expected) and weight.is_cuda
        module.cpu()
        assert not module.weight.is_cuda and module(host).shape == (2,)
