"""`patch_embed_images` on a GPU: integer sums are exact, so every bit is that of the reference."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import frozen_constants, patch_embed_images, prepare_patch_weight
from cute_kernels.config import ImagesConfig
from cute_kernels.operations import reference
from cute_kernels.operations.patch_embed_images import PATCH_EMBED_IMAGES
from cute_kernels.operations.patch_weight import PatchWeight, Precision
from cute_kernels.operations.runtime import gpu
from tests.gpu import architecture, harness
from tests.gpu.harness import POISON
from tests.gpu.images_configs import SELECTIONS
from tests.gpu.test_images_gather import Call as GatherCall
from tests.gpu.test_images_gather import check_exact

GUARD_IMAGES = 8

SIDES = [(48, 272), (16, 16)] if harness.DRY_RUN else [224, 256, 384, (48, 272), (16, 16)]
BATCHES = [1, 3] if harness.DRY_RUN else [1, 3, 8, 64, 252, 256]
WIDE = (16, 224) if harness.DRY_RUN else 224
"""Grid rows of 14 patches: one, where the emulator executes them."""


class Call:
    """Random images, weight, bias and positions on the GPU, and what the reference makes of them."""

    def __init__(
        self, batch: int, side: int | tuple[int, int] = WIDE, n: int = 768, channels: int = 3, *,
        table: str = "bias+pos", precision: Precision = "int8", seed: int = 0,
    ) -> None:  # fmt: skip
        generator = torch.Generator(device="cuda").manual_seed(seed)
        height, width = (side, side) if isinstance(side, int) else side
        shape = (batch, channels, height, width)
        positions = height // 16 * (width // 16)
        self.images = torch.randint(0, 256, shape, generator=generator, device="cuda", dtype=torch.uint8)
        kernel = torch.randn(n, channels, 16, 16, generator=generator, device="cuda") * 0.05
        self.weight: PatchWeight = prepare_patch_weight(kernel, precision=precision, channels=channels)
        self.bias = torch.randn(n, generator=generator, device="cuda") if "bias" in table else None
        self.pos = torch.randn(positions, n, generator=generator, device="cuda") if "pos" in table else None

    def expected(self) -> torch.Tensor:
        w = self.weight
        shift = w.offset if self.bias is None else self.bias + w.offset
        return reference.patch_embed_images(self.images, w.raw, w.scale, shift, self.pos, w.patch)

    def __call__(self, **options) -> torch.Tensor:
        return patch_embed_images(self.images, self.weight, self.bias, self.pos, **options)

    def guarded(self, config: ImagesConfig | None = None) -> torch.Tensor:
        """One launch into poison, which fails if it writes outside of the output or leaves poison."""
        w = self.weight
        prepared = PATCH_EMBED_IMAGES.prepared(
            images=self.images, weight=w.raw, weight_scale=w.scale, weight_offset=w.offset,
            bias=self.bias, pos_embed=self.pos, patch=w.patch, out_dtype=torch.bfloat16, config=config,
        )  # fmt: skip
        batch, positions, n = prepared.output_shape
        memory = torch.full((batch + 2 * GUARD_IMAGES, positions, n), POISON, dtype=torch.int16, device="cuda")
        out = memory[GUARD_IMAGES : GUARD_IMAGES + batch]
        gpu.launch(prepared.plan, prepared.operands.replace(out=out.view(torch.bfloat16)))
        torch.cuda.synchronize()
        for name, guard in (("before", memory[:GUARD_IMAGES]), ("after", memory[-GUARD_IMAGES:])):
            assert bool((guard == POISON).all()), f"wrote {name} the output"
        assert not bool((out == POISON).any()), "elements not written"
        return out.view(torch.bfloat16)


def differing(out: torch.Tensor, expected: torch.Tensor) -> int:
    assert out.shape == expected.shape and out.dtype == expected.dtype
    return int((out.view(torch.int16) != expected.view(torch.int16)).sum())


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("batch", BATCHES)
def test_every_bit(batch: int, side: int | tuple[int, int]) -> None:
    call = Call(batch, side, seed=batch)
    assert differing(call.guarded(), call.expected()) == 0


@pytest.mark.parametrize(("n", "channels", "table"), [
    (384, 3, "bias+pos"), (1152, 3, "pos"), (1024, 1, "bias"), (40, 4, ""), (8, 2, "bias+pos"), (768, 6, "pos"),
])  # fmt: skip
def test_widths_channels_and_tables(n: int, channels: int, table: str) -> None:
    call = Call(9 if harness.DRY_RUN else 37, WIDE, n, channels, table=table)
    assert differing(call.guarded(), call.expected()) == 0


@pytest.mark.parametrize(("config", "channels"), SELECTIONS.get(architecture.at_hand(), ()), ids=str)
@pytest.mark.parametrize("batch", [5] if harness.DRY_RUN else [5, 131])
def test_configurations(config: ImagesConfig, channels: int, batch: int) -> None:
    call = Call(batch, channels=channels)
    assert differing(call.guarded(config), call.expected()) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_images(dtype: torch.dtype) -> None:
    check_exact(GatherCall(BATCHES[-1], WIDE, dtype=dtype, out_dtype=dtype, exact=True))


def check_sums_that_fp32_rounds(call: Call) -> None:
    call.images |= 0xF8
    w = call.weight
    w.raw.copy_(torch.where(w.raw < 0, w.raw.clamp(max=-126), w.raw.clamp(min=125)))
    w.raw[::2] = w.raw[::2].abs().clamp(max=127)
    sums = reference.images.integer_sums(reference.images.patch_rows(call.images[:2], 16), w.raw)
    assert sums.abs().max() > 2**24
    assert differing(call.guarded(), call.expected()) == 0


def check_many_launches(call: Call) -> None:
    expected = call.expected()
    for _ in range(50):
        assert differing(call(), expected) == 0


def test_sums_that_fp32_rounds() -> None:
    check_sums_that_fp32_rounds(Call(2 if harness.DRY_RUN else 64))


@pytest.mark.gpu_only("what it looks for is not deterministic")
def test_many_launches_give_the_same_bits() -> None:
    check_many_launches(Call(300))


def test_other_layouts_are_copied() -> None:
    call = Call(9)
    expected, images = call.expected(), call.images
    call.images = images.to(memory_format=torch.channels_last)
    assert differing(call(), expected) == 0
    call.images = torch.nn.functional.pad(images, (1, 2))[..., 1:-2]
    assert differing(call(), expected) == 0
    call.images = torch.cat([images.new_zeros(1), images.flatten()])[1:].view(images.shape)
    assert differing(call(), expected) == 0


def test_no_images() -> None:
    call = Call(1, 224)
    call.images = call.images[:0]
    assert call().shape == (0, 196, 768) and call().is_cuda


def test_a_repeated_call_is_remembered_and_sees_what_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = 9
    call, made = Call(batch), harness.long_ways(monkeypatch, PATCH_EMBED_IMAGES)
    for seed in range(3):
        call.images = Call(batch, seed=seed).images
        assert differing(call(), call.expected()) == 0
    assert len(made) == 1
    for name in ("bias", "pos"):
        getattr(call, name).add_(1)
        assert differing(call(), call.expected()) == 0
    call.weight.scale.mul_(2)
    assert differing(call(), call.expected()) == 0


@pytest.mark.gpu_only("CUDA graphs")
def test_cuda_graph() -> None:
    call = Call(8)
    call()
    graph = torch.cuda.CUDAGraph()
    with frozen_constants(), torch.cuda.graph(graph):
        out = call()
    for seed in (1, 2):
        call.images.copy_(Call(8, seed=seed).images)
        graph.replay()
        assert differing(out, call.expected()) == 0


@pytest.mark.gpu_only("torch.compile")
def test_under_torch_compile() -> None:
    call = Call(8)
    compiled = torch.compile(patch_embed_images, fullgraph=True)
    assert differing(compiled(call.images, call.weight, call.bias, call.pos), call.expected()) == 0
    torch.compiler.reset()
