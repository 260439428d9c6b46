"""`patch_embed_images` of BF16 and FP16 images on a real H100 or H200: bit for bit where sums are exact, else FP64."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import Sm90GatherConfig, frozen_constants, patch_embed_images, prepare_patch_weight
from cute_kernels.operations.patch_embed_images import PATCH_EMBED_IMAGES
from cute_kernels.operations.reference.images import patch_rows
from cute_kernels.operations.runtime import gpu
from tests.gpu import harness

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PRECISIONS = {BF16: "bf16", FP16: "fp16"}

GUARD_IMAGES = 4
ACCUMULATION_ERROR = 2.0**-16
"""Bound of the accumulation error relative to ``sum_k |pixel| |w|``, as for the dense GEMM."""

HALF_ULP = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24}

SIDES = [(32, 96)] if harness.DRY_RUN else [224, 256, 384, (48, 272), (16, 16)]
BATCHES = [3] if harness.DRY_RUN else [1, 3, 8, 64, 259]
WIDE = (16, 224) if harness.DRY_RUN else 224
FEW = 5 if harness.DRY_RUN else 131


class Call:
    """Random images, weight, bias and positions on the GPU."""

    def __init__(
        self, batch: int, side: int | tuple[int, int] = WIDE, n: int = 768, channels: int = 3, *, patch: int = 16,
        dtype: torch.dtype = BF16, out_dtype: torch.dtype = BF16, table: str = "bias+pos", exact: bool = False,
        seed: int = 0,
    ) -> None:  # fmt: skip
        """``exact``: integers, of which every partial sum is below 2^24 and exact in any order."""
        generator = torch.Generator(device="cuda").manual_seed(seed)
        height, width = (side, side) if isinstance(side, int) else side
        positions = height // patch * (width // patch)

        def draw(*shape: int) -> torch.Tensor:
            if exact:
                return torch.randint(-8, 9, shape, generator=generator, device="cuda").float()
            return torch.randn(shape, generator=generator, device="cuda")

        self.images = draw(batch, channels, height, width).to(dtype)
        self.weight = prepare_patch_weight(
            draw(n, channels, patch, patch), precision=PRECISIONS[dtype], channels=channels, std=1 / 255
        )
        self.bias = draw(n) if "bias" in table else None
        self.pos = draw(positions, n) if "pos" in table else None
        self.out_dtype = out_dtype

    def __call__(self, **options) -> torch.Tensor:
        return patch_embed_images(self.images, self.weight, self.bias, self.pos, out_dtype=self.out_dtype, **options)

    def fp64(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``[B, S, N]`` of the call, and of the magnitudes of its products."""
        weight = self.weight
        rows = patch_rows(self.images, weight.patch).double()
        values = weight.normalised.double().T
        shape = (self.images.shape[0], -1, values.shape[1])
        product, magnitude = ((x @ w).view(shape) for x, w in ((rows, values), (rows.abs(), values.abs())))
        for addend in (self.bias, self.pos):
            product = product if addend is None else product + addend.double()
        return product, magnitude

    def guarded(self, config: Sm90GatherConfig | None = None) -> torch.Tensor:
        """One launch into poison, which fails if it writes outside of the output or leaves poison."""
        w = self.weight
        prepared = PATCH_EMBED_IMAGES.prepared(
            images=self.images, weight=w.normalised, bias=self.bias, pos_embed=self.pos, patch=w.patch,
            out_dtype=self.out_dtype, config=config,
        )  # fmt: skip
        batch, positions, n = prepared.output_shape
        memory = torch.full((batch + 2 * GUARD_IMAGES, positions, n), torch.nan, dtype=self.out_dtype, device="cuda")
        out = memory[GUARD_IMAGES : GUARD_IMAGES + batch]
        gpu.launch(prepared.plan, prepared.operands.replace(out=out))
        torch.cuda.synchronize()
        for name, guard in (("before", memory[:GUARD_IMAGES]), ("after", memory[-GUARD_IMAGES:])):
            assert bool(guard.isnan().all()), f"wrote {name} the output"
        assert not bool(out.isnan().any()), "elements not written"
        return out


def check_exact(call: Call, config: Sm90GatherConfig | None = None) -> None:
    out, expected = call.guarded(config), call.fp64()[0].to(FP32).to(call.out_dtype)
    assert torch.equal(out, expected), f"{int((out != expected).sum())} of {out.numel()} elements differ"


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("batch", BATCHES)
def test_exact_sums_give_every_bit(batch: int, side: int | tuple[int, int]) -> None:
    check_exact(Call(batch, side, exact=True, seed=batch))


@pytest.mark.parametrize(("n", "channels", "table", "dtype", "out_dtype"), [
    (384, 3, "bias+pos", BF16, BF16), (1152, 3, "pos", FP16, BF16), (1024, 1, "bias", BF16, FP16),
    (40, 4, "", FP16, FP32), (8, 2, "bias+pos", BF16, FP32),
])  # fmt: skip
def test_widths_types_and_tables(n, channels, table, dtype, out_dtype, record_property) -> None:
    call = Call(9 if harness.DRY_RUN else 37, WIDE, n, channels, table=table, dtype=dtype, out_dtype=out_dtype)
    expected, magnitude = call.fp64()
    error = (call.guarded().double() - expected).abs() - HALF_ULP[out_dtype] * expected.abs()
    error = float((error / magnitude).max())
    record_property("accumulation error / sum |pixel| |w|", error)
    assert error <= ACCUMULATION_ERROR


@pytest.mark.parametrize("config", [
    Sm90GatherConfig(2, 1, 128, 2, 192, 2),
    Sm90GatherConfig(2, 1, 128, 2, 192, 2, order="row"),
    Sm90GatherConfig(2, 1, 128, 1, 192, 4, stages=2),
    Sm90GatherConfig(16, 1, 8, 2, 256, 1, store_stages=4),
    Sm90GatherConfig(2, 1, 64, 2, 192, 2, pingpong=True),
    Sm90GatherConfig(16, 4, 1, 1, 64, 4, pingpong=True),
    Sm90GatherConfig(1, 2, 128, 1, 128, 2),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("batch", [5] if harness.DRY_RUN else [5, 131])
def test_configurations(config: Sm90GatherConfig, batch: int) -> None:
    check_exact(Call(batch, channels=1 if harness.DRY_RUN else 3, exact=True), config)


@pytest.mark.parametrize(("patch", "config"), [
    (32, None), (32, Sm90GatherConfig(2, 1, 64, 1, 192, 2)), (32, Sm90GatherConfig(2, 2, 64, 2, 128, 2)),
    (64, None), (64, Sm90GatherConfig(2, 1, 64, 1, 64, 2)),
], ids=str)  # fmt: skip
def test_larger_patches(patch: int, config: Sm90GatherConfig | None) -> None:
    side = (patch, 4 * patch) if harness.DRY_RUN else 4 * patch
    check_exact(Call(FEW, side, 192, 1 if harness.DRY_RUN else 3, patch=patch, exact=True), config)


def test_results_do_not_depend_on_tiles_or_schedule() -> None:
    call = Call(FEW, channels=1 if harness.DRY_RUN else 3, out_dtype=FP32)
    first = call.guarded()
    for config in (Sm90GatherConfig(2, 1, 128, 2, 192, 2), Sm90GatherConfig(16, 4, 1, 1, 64, 1, pingpong=True)):
        assert torch.equal(call.guarded(config), first)


@pytest.mark.gpu_only("what it looks for is not deterministic")
def test_many_launches_give_the_same_bits() -> None:
    call = Call(300)
    expected = call()
    for _ in range(50):
        assert torch.equal(call(), expected)


def test_pixels_of_other_types_and_layouts_are_converted() -> None:
    call = Call(5, channels=1, exact=True)
    expected, images = call(), call.images
    for other in (images.float(), images.half(), images.to(memory_format=torch.channels_last)):
        call.images = other
        assert torch.equal(call(), expected)
    # Raw pixels are eight more, which the offset takes away; the normalisation in their weight is a factor of 1.
    call.images = (images + 8).to(torch.uint8)
    kernel = call.weight.normalised.view(768, 1, 16, 16)
    call.weight = prepare_patch_weight(kernel, precision="bf16", channels=1, mean=8 / 255, std=1 / 255)
    assert torch.equal(call(), expected)


def test_a_repeated_call_is_remembered_and_sees_what_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    call, made = Call(9, exact=True), harness.long_ways(monkeypatch, PATCH_EMBED_IMAGES)
    for seed in range(3):
        call.images = Call(9, exact=True, seed=seed).images
        assert torch.equal(call(), call.fp64()[0].to(BF16))
    assert len(made) == 1
    for name in ("bias", "pos"):
        getattr(call, name).add_(1)
        assert torch.equal(call(), call.fp64()[0].to(BF16))


@pytest.mark.gpu_only("CUDA graphs")
def test_cuda_graph() -> None:
    call = Call(8, exact=True)
    call()
    graph = torch.cuda.CUDAGraph()
    with frozen_constants(), torch.cuda.graph(graph):
        out = call()
    for seed in (1, 2):
        call.images.copy_(Call(8, exact=True, seed=seed).images)
        graph.replay()
        assert torch.equal(out, call.fp64()[0].to(BF16))
