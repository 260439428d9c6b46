"""Faults planted in the kernels of `programs` and of docs/examples, and what reports name of each.

``python -m tests.emulator.reports.planted_causes [WORDS]`` prints reports, of faults whose names have the words.
"""

from __future__ import annotations

import importlib.util
import linecache
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.programs import capture
from cute_kernels.emulator.reports.diagnosis import diagnose
from cute_kernels.emulator.reports.model import Diagnostic
from cute_kernels.emulator.reports.text import render

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
DOCS = HERE.parents[2] / "docs" / "examples"
ARCHITECTURES = {
    "gemm_sm90": "sm_90a", "gemm_sm100": "sm_100a", "pipeline": "sm_90a", "bias_add": "sm_90a",
    "pipelines_sm90": "sm_90a", "one_array_sm100": "sm_100a", "named_barriers": "sm_90a",
    "linear_sm90": "sm_90a", "gemm_sm80": "sm_80", "multicast_sm100": "sm_100a",
    "attention_sm90": "sm_90a", "chain_sm100": "sm_100a", "cluster_sums": "sm_90a", "double_sm80": "sm_80",
    "tickets_sm90": "sm_90a", "turns_sm90": "sm_90a", "relay_sm90": "sm_90a", "halves_sm90": "sm_90a",
    "spread_sm90": "sm_90a", "relu_gemm": "sm_90a", "pingpong_sm90": "sm_90a",
    "twoacc_sm100": "sm_100a", "softmax_sm80": "sm_80",
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A fault in a program; fields as planted_causes.toml says."""

    program: str
    name: str
    old: str
    new: str
    kind: str
    words: list[str]

    @property
    def source(self) -> str:
        """The faulty program."""
        source = source_of(self.program)
        assert source.count(self.old) == 1, self.old
        return source.replace(self.old, self.new)

    def expected(self) -> list[str]:
        """The words, with the lines that they name."""
        lines = self.source.splitlines()

        def place(found: re.Match[str]) -> str:
            (number,) = [number for number, line in enumerate(lines, 1) if found[1] in line]
            return f"{self.program}.py:{number}"

        return [re.sub(r"@([^@]+)@", place, words) for words in self.words]


def source_of(program: str) -> str:
    """A program without a fault."""
    return ((DOCS if program in ("bias_add", "relu_gemm") else HERE / "programs") / f"{program}.py").read_text()


FAULTS = {
    f"{program}: {fault['name']}": Fault(program, **fault)
    for program, faults in tomllib.loads((HERE / "planted_causes.toml").read_text()).items()
    for fault in faults
}


def report(source: str, program: str, folder: Path, *, strict: bool = False) -> Diagnostic | None:
    """The first report on a program, None if there is none; ``strict`` as of `Options`."""
    path = folder / f"{program}.py"
    path.write_text(source)
    linecache.checkcache()
    specification = importlib.util.spec_from_file_location(f"planted_{folder.name.replace('-', '_')}", path)
    module = importlib.util.module_from_spec(specification)
    try:
        with capture(ARCHITECTURES[program], Options(strict=strict)):
            sys.modules[module.__name__] = module
            specification.loader.exec_module(module)
            if program == "bias_add":
                module.bias_add(torch.randn(112, 32, device="cuda"), torch.randn(32, device="cuda"))
            elif program == "relu_gemm":
                module.relu_product(*(torch.randn(128, 96, device="cuda").bfloat16() for _ in range(2)))
            else:
                module.main()
    except EmulatorError as error:
        return diagnose(error)
    finally:
        sys.modules.pop(module.__name__, None)
    return None


def main(words: list[str]) -> None:
    """Prints reports, and the words that they lack."""
    for name, fault in FAULTS.items():
        if words and not any(each in name for each in words):
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = report(fault.source, fault.program, Path(folder))
        print(f"### {name}")
        print(render(found).replace(f"{folder}/", "") if found is not None else "nothing")
        help_ = found.help.replace(f"{folder}/", "") if found is not None else ""
        lacking = [each for each in fault.expected() if each not in help_]
        if lacking or found is None or found.kind != fault.kind:
            print(f"!!! expected {fault.kind}, and {lacking}")
        print(flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
