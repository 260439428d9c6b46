"""What the programs of this folder share: results against references, and the choice of what is run."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch


class Comparison:
    """Collects results that differ by more than they may."""

    def __init__(self) -> None:
        self.wrong: list[str] = []

    def check(self, name: str, result: torch.Tensor, expected: torch.Tensor, part: float = 1e-5) -> None:
        """``expected`` is in float32; ``part`` of its largest magnitude is allowed besides the element's rounding."""
        result, dtype, expected = result.detach().float().cpu(), result.dtype, expected.detach().float().cpu()
        allowed = torch.finfo(dtype).eps * expected.abs() + part * expected.abs().max()
        share = ((result - expected).abs() / allowed).max().item()
        print(f"{name:28} {tuple(result.shape)!s:14} {share:.2f} of what is allowed", flush=True)
        if not share <= 1:
            self.wrong.append(name)

    def equal(self, name: str, result: torch.Tensor, expected: torch.Tensor) -> None:
        """For integers, and for results that no order of additions changes."""
        result, expected = result.cpu(), expected.cpu().to(result.dtype)
        same = torch.equal(result, expected)
        print(f"{name:28} {tuple(result.shape)!s:14} {'equal' if same else 'not equal'}", flush=True)
        if not same:
            self.wrong.append(name)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Standard normal numbers on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def main(description: str | None, operators: dict[str, Callable[[Comparison], None]]) -> None:
    """Runs the operators that the command line names, by default all; fails if a result is wrong."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help=f"of {', '.join(operators)}; default: all")
    names = parser.parse_args().operators or list(operators)
    unknown = [name for name in names if name not in operators]
    if unknown:
        parser.error(f"no operator {', '.join(unknown)}; there are {', '.join(operators)}")
    torch.manual_seed(0)
    comparison = Comparison()
    for name in names:
        operators[name](comparison)
    if comparison.wrong:
        raise SystemExit(f"wrong: {', '.join(comparison.wrong)}")
    print(f"PASS on {torch.cuda.get_device_name()}")
