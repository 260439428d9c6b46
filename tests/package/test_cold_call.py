"""How many files a reader of a call has to open: those of the package whose functions it calls.

A cold call checks, plans, compiles, links and launches. What modules do while they are imported is not counted. Each
call is of a kernel of its own, so that one process has them all.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import cute_kernels
from tests.processes import run_python

PACKAGE = Path(cute_kernels.__file__).parent

CALL = """
import inspect, json, sys
import torch
import cute_kernels

package, entered, importing = sys.argv[1] + "/", set(), 0

def calls(frame, event, argument):
    global importing
    code = frame.f_code
    if code.co_filename.startswith(package) and code.co_name == "<module>":
        importing += 1
        return returns
    if not importing and code.co_filename.startswith(package) and code.co_flags & inspect.CO_OPTIMIZED:
        entered.add(code.co_filename.removeprefix(package))

def returns(frame, event, argument):
    global importing
    importing -= event == "return"
    return returns

def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))

fp8 = draw(64, 64).to(torch.float8_e4m3fn)
images = torch.zeros(1, 3, 32, 32, dtype=torch.uint8), cute_kernels.prepare_patch_weight(draw(64, 3, 16, 16))
calls_by_name = {
    "gemm": (draw(64, 64).bfloat16(), draw(64, 64).bfloat16()),
    "patch_embed": (fp8, fp8, draw(64), draw(32, 64)),
    "patch_embed_images": (*images, draw(64), draw(4, 64)),
}
found = {}
for name, arguments in calls_by_name.items():
    entered.clear()
    sys.settrace(calls)
    getattr(cute_kernels, name)(*arguments, backend="emulator")
    sys.settrace(None)
    found[name] = sorted(entered)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def entered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Files by the operation that is called."""
    environment = os.environ | {"CUTE_KERNELS_CACHE_DIR": str(tmp_path_factory.mktemp("kernels"))}
    run = run_python("-c", CALL, str(PACKAGE), env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["gemm", "patch_embed", "patch_embed_images"])
def test_a_cold_call_enters_few_files(entered: dict[str, list[str]], name: str) -> None:
    operations = {f"operations/{file}.py" for file in (name, "base", "compile")}
    own = operations | {"plan/registry.py", "kernels/graph.py"}
    assert own <= set(entered[name])
    emulator = {file for file in entered[name] if file.startswith("emulator/")}
    left = sorted(set(entered[name]) - emulator)
    most = 43 if name == "patch_embed_images" else 37  # its kernels and the one behind a pass are compared by time
    assert len(left) <= most, f"{len(left)} files beside the emulator's: {', '.join(left)}"
    assert 0 < len(emulator) <= 96, f"{len(emulator)} files of the emulator: {', '.join(sorted(emulator))}"
