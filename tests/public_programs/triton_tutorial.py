"""One of Triton's tutorials, checked against torch, on small problems: for ``cute-kernels emulate``.

    cute-kernels emulate --arch sm_90a tests/public_programs/triton_tutorial.py CLONE/python/tutorials/01-vector-add.py

The tutorial runs as it is, but for its benchmarks, for sizes that it has in its text (`SIZES`), and for what it does
only as a main program, of which the functions are called here. A second argument says what of a tutorial is checked.
Operands are small integers where sums are to be equal.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton_launches
from comparison import Comparison

Tutorial = dict[str, Any]


def integers(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randint(-2, 3, shape).to(torch.float16).to("cuda").to(dtype)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.cpu().double() @ b.cpu().double()


def vector_add(to: Comparison, tutorial: Tutorial, _: str) -> None:
    to.equal("sums", tutorial["output_triton"], tutorial["x"].cpu() + tutorial["y"].cpu())


def fused_softmax(to: Comparison, tutorial: Tutorial, _: str) -> None:
    to.check("softmax", tutorial["y_triton"], tutorial["x"].cpu().softmax(1))


def matrix_multiplication(to: Comparison, tutorial: Tutorial, _: str) -> None:
    a, b = integers(192, 320), integers(320, 160)
    to.equal("product", tutorial["matmul"](a, b), product(a, b))
    activated = torch.nn.functional.leaky_relu(product(a, b).float(), 0.01)
    to.check("with leaky_relu", tutorial["matmul"](a, b, activation="leaky_relu"), activated)


def dropout(to: Comparison, tutorial: Tutorial, _: str) -> None:
    x, keep = torch.randn(3000, device="cuda"), torch.randint(0, 2, (3000,), device="cuda", dtype=torch.int32)
    to.equal("dropout", tutorial["dropout"](x, keep, 0.5), x.cpu() * keep.cpu() * 2)
    kept = [tutorial["seeded_dropout"](x, p=0.5, seed=seed).cpu() for seed in (123, 123, 512)]
    to.equal("seeded, what is kept", kept[0], torch.where(kept[0] != 0, x.cpu() * 2, 0.0))
    to.equal("seeded, again", kept[0], kept[1])
    shares = torch.tensor([(kept[0] != 0).float().mean(), ((kept[0] != 0) == (kept[2] != 0)).float().mean()])
    to.equal("seeded, half of them", (shares - 0.5).abs() < 0.05, torch.ones(2))


def layer_norm(to: Comparison, tutorial: Tutorial, _: str) -> None:
    tutorial["test_layer_norm"](40, 500, torch.float16)
    x, weight, bias = (torch.randn(*shape, device="cuda") for shape in ((8, 500), (500,), (500,)))
    expected = torch.nn.functional.layer_norm(x.cpu(), (500,), weight.cpu(), bias.cpu(), 1e-5)
    to.check("layer norm", tutorial["layer_norm"](x, (500,), weight, bias, 1e-5), expected)


def attention(to: Comparison, tutorial: Tutorial, what: str) -> None:
    """By the tutorial's own test, forward and backward (fp8: forward)."""
    fp8 = what == "fp8"
    for causal in (False, True):
        tutorial["test_op"](
            1, 2, 128, 64, causal, what == "warp-specialized", "fwd" if fp8 else "bwd", f"triton-fp{8 if fp8 else 16}"
        )


def extern_functions(to: Comparison, tutorial: Tutorial, _: str) -> None:
    to.check("asin", tutorial["output_triton"], tutorial["x"].cpu().asin(), 1e-6)


def grouped_gemm(to: Comparison, tutorial: Tutorial, _: str) -> None:
    a, b = [integers(128, 128), integers(256, 256)], [integers(128, 256), integers(256, 128)]
    results = {"pointers": tutorial["group_gemm_fn"](a, b)}
    if tutorial["supports_tma"]():
        results["tensor descriptors"] = tutorial["group_gemm_tma_fn"](a, [each.T.contiguous() for each in b])
    for name, products in results.items():
        for number, each in enumerate(products):
            to.equal(f"{name}, product {number}", each, product(a[number], b[number]))


def persistent_matmul(to: Comparison, tutorial: Tutorial, what: str) -> None:
    dtype = torch.float8_e4m3fn if what == "fp8" else torch.float16
    specialized = what == "warp-specialized"
    # FP8 results are rounded, and small products of few terms are not.
    a, b = integers(256, 128, dtype=dtype), integers(256, 128, dtype=dtype)
    if dtype != torch.float16:
        a[:, 4:] = 0
    expected = product(a.float(), b.float().T)
    functions = {}
    if not specialized:
        functions |= {name: lambda a, b, name=name: tutorial[name](a, b.T) for name in ("matmul", "matmul_persistent")}
    hopper = tutorial["is_hopper"]()
    for name, there in (
        ("matmul_tma", "HAS_HOST_TENSOR_DESC"),
        ("matmul_tma_clc", "HAS_TMA_CLC"),
        ("matmul_tma_persistent", "HAS_HOST_TENSOR_DESC"),
        ("matmul_descriptor_persistent", "HAS_TENSOR_DESC"),
    ):
        if tutorial[there] and not (hopper and specialized and name != "matmul_descriptor_persistent"):
            functions[name] = lambda a, b, name=name: tutorial[name](a, b, specialized)
    for name, function in functions.items():
        to.equal(name, function(a, b).float(), expected)


def block_scaled_matmul(to: Comparison, tutorial: Tutorial, what: str) -> None:
    """By the tutorial's own test."""
    scheduled = what == "cluster-launch-control"
    tutorial["validate_block_scaled"](256, 256, 512, block_scale_type="nvfp4" if scheduled else what, clc=scheduled)


def dependent_launch(to: Comparison, tutorial: Tutorial, _: str) -> None:
    x, y = torch.rand(3000, device="cuda"), torch.rand(3000, device="cuda")
    for programmatic in (True, False):
        to.equal(f"sums, launch_pdl={programmatic}", tutorial["add"](x, y, programmatic), x.cpu() + y.cpu())


#: Texts of tutorials, and what stands in their place: their sizes are for a GPU.
SIZES = {
    "02": {"torch.randn(1823, 781,": "torch.randn(61, 781,"},
    "05": {"test_layer_norm(1151, 8192,": "test_layer_norm(61, 1000,"},
    "08": {f"group_{name} = [1024, 512, 256, 128]": f"group_{name} = [256, 128]" for name in "mnk"},
}

CHECKS: dict[str, Callable[[Comparison, Tutorial, str], None]] = {
    "01": vector_add,
    "02": fused_softmax,
    "03": matrix_multiplication,
    "04": dropout,
    "05": layer_norm,
    "06": attention,
    "07": extern_functions,
    "08": grouped_gemm,
    "09": persistent_matmul,
    "10": block_scaled_matmul,
    "11": dependent_launch,
}


def _with_small_sizes(script: Path, folder: Path) -> str:
    """The tutorial, or a copy of it in the folder."""
    text, sizes = script.read_text(), SIZES.get(script.name[:2])
    if sizes is None:
        return str(script)
    for large, small in sizes.items():
        if large not in text:
            raise SystemExit(f"{script}: no text {large!r}, as the version has for which this program is")
        text = text.replace(large, small)
    copy = folder / script.name
    copy.write_text(text)
    return str(copy)


def main(script: str, what: str = "") -> None:
    """Runs the tutorial and its checks; fails if a result is wrong."""
    check = CHECKS[Path(script).name[:2]]
    os.environ["PYTEST_VERSION"] = "0"  # by which tutorials that have tests of their own leave one configuration
    triton_launches.install()
    torch.manual_seed(0)
    comparison = Comparison()
    with tempfile.TemporaryDirectory() as folder:
        check(comparison, runpy.run_path(_with_small_sizes(Path(script), Path(folder)), run_name="tutorial"), what)
    if comparison.wrong:
        raise SystemExit(f"wrong: {', '.join(comparison.wrong)}")
    print(f"PASS on {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
