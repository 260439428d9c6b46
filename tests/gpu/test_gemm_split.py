"""The SM90 GEMM with K split among the CTAs of a cluster, on a GPU; elsewhere there is nothing to collect."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cute_kernels.config import Sm90GemmConfig
from tests.gpu.gemm_configs import SPLIT, name
from tests.gpu.harness import sized_gemm
from tests.gpu.test_gemm import BF16, FP16, FP32, check, draw, run_guarded


@pytest.mark.parametrize("config", SPLIT, ids=name)
def test_split_along_k(config, record_property):
    """One tile and many per cluster, slices of unequal length, partial tiles, batches, every output type."""
    for seed, (shape, batches) in enumerate(
        (((130, 97, 1032), 0), ((1000, 776, 520), 0), ((200, 300, 2056), 3), ((1, 1, 512), 0), ((196, 768, 3072), 0))
    ):
        dtype = (BF16, FP16, FP32)[seed % 3]
        check(shape, config, record_property, batches=batches, seed=seed, out_dtype=dtype, bias=bool(seed % 2))
        check(shape, config, record_property, batches=batches, seed=seed, sm_count=8)


def test_a_split_gives_the_same_bits_every_time():
    """The order of the additions is that of the contract, whichever CTA comes first, in any tile."""
    a, b, bias = draw(*sized_gemm(700, 600, 4104), seed=3)
    for split_k in (2, 4):
        first = run_guarded(a, b, bias, FP32, Sm90GemmConfig(128, 64, 4, 1, 1, store_stages=1, split_k=split_k))
        for config in (Sm90GemmConfig(128, 64, 4, 2, 1, store_stages=1), Sm90GemmConfig(128, 128, 3, 1, 2)):
            config = dataclasses.replace(config, split_k=split_k)
            for _ in range(3):
                assert torch.equal(run_guarded(a, b, bias, FP32, config), first), name(config)
