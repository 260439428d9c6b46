"""`make hub`: the layout of Hugging Face's hub of kernels, by its rules; another test_hub.py has its own loader."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import re
import sys
from pathlib import Path

import pytest

from tests.package.test_release import of_ci
from tests.processes import run_python

ALLOWED = {"torch", "cutlass", "cuda"} | sys.stdlib_module_names
"""What a kernel may import; cuda-bindings are part of what nvidia-cutlass-dsl, an allowed dependency, needs."""

# Loads a variant as its loader does, where nothing of this repository can be imported.
PROGRAM = """
import importlib.util, json, sys
from pathlib import Path
import torch
variant = Path(sys.argv[1])
name = json.loads((variant / "metadata.json").read_text())["id"]
sys.path[:] = [each for each in sys.path if not Path(each or ".", "cute_kernels").is_dir()]
for known in [known for known in sys.modules if known.partition(".")[0] == "cute_kernels"]:
    del sys.modules[known]
spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
kernel = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
assert all(getattr(kernel, each) is not None for each in kernel.__all__)

a, b = (torch.randint(-2, 3, (rows, 64)) for rows in (32, 48))
assert torch.equal(kernel.gemm(a.bfloat16(), b.bfloat16()).long(), a @ b.T)
assert hasattr(getattr(torch.ops, name), "gemm") and not hasattr(torch.ops.cute_kernels, "gemm")

plain = torch.nn.Conv2d(3, 64, 16, stride=16).bfloat16().eval()
images = torch.randn(2, 3, 48, 32).bfloat16()
layer, kind = torch.nn.Conv2d(3, 64, 16, stride=16).bfloat16().eval(), kernel.layers.PatchConv2d
layer.load_state_dict(plain.state_dict())
layer.forward = kind.forward.__get__(layer)
calls = []
engine = type(kernel.layers._ENGINE)
images_of, engine._images = engine._images, lambda *given: calls.append(1) or images_of(*given)
with torch.no_grad():
    torch.testing.assert_close(layer(images), plain(images), rtol=2e-2, atol=2e-2)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), plain(images), rtol=2e-2, atol=2e-2)
assert len(calls) == 2  # by the operator
layer(images).float().square().sum().backward()  # plain torch
plain(images).float().square().sum().backward()
assert torch.equal(layer.weight.grad, plain.weight.grad) and len(calls) == 2
try:
    layer(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
except TypeError as error:
    assert "normalised pixels were promised" in str(error)
assert "cute_kernels" not in sys.modules

from importlib import import_module
plans, compiling = import_module(f"{name}.plan"), import_module(f"{name}.operations.compile")
ptx = compiling.compile_plan(plans.make_plan(kernel.GemmProblem(64, 64, 64), arch="sm_90a")).ptx
assert ".target sm_90a" in ptx
print("loaded", name)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("hub") / "hub"
    of_ci("hub").make(output)
    return output


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_a_variant_is_loaded_and_runs(made: Path, backend: str) -> None:
    run = run_python("-c", PROGRAM, str(made / "build" / f"torch-{backend}"), cwd=made)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.fullmatch(rf"loaded _cute_kernels_{backend}_[0-9a-f]{{12}}\n", run.stdout)


@pytest.mark.parametrize("folder", ["build/torch-cpu", "build/torch-cuda", "torch-ext/cute_kernels"])
def test_imports_are_relative_or_allowed(made: Path, folder: str) -> None:
    for path in (made / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            assert {name.partition(".")[0] for name in names} <= ALLOWED, (path, names)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_metadata(made: Path, backend: str) -> None:
    variant = made / "build" / f"torch-{backend}"
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["python-depends"] == (["nvidia-cutlass-dsl"] if backend == "cuda" else [])
    assert metadata["backend"]["type"] == backend and metadata["name"] == "cute-kernels"
    paths = [path for path in variant.rglob("*") if path.is_file() and path.suffix != ".pyc"]  # of the runs before
    files = {path.relative_to(variant).as_posix(): path for path in paths}
    del files["metadata.json"]
    digests = {
        name: base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode() for name, path in files.items()
    }
    assert metadata["digest"] == {"algorithm": "sha256", "files": digests}
    assert metadata["id"] != json.loads((made / "build/torch-cpu/metadata.json").read_text())["id"] or backend == "cpu"


def test_older_loaders_find_the_same_names(made: Path) -> None:
    program = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("kernel", sys.argv[1])
kernel = sys.modules["kernel"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
assert {"gemm", "layers", "patch_embed"} <= set(kernel.__all__) and callable(kernel.gemm)
"""
    run = run_python("-c", program, str(made / "build/torch-cpu/cute_kernels/__init__.py"), cwd=made)
    assert run.returncode == 0, run.stdout + run.stderr


def test_layers_are_pure(made: Path) -> None:
    """A forward, and no state: neither a constructor nor variables but the two that the rules know."""
    tree = ast.parse((made / "torch-ext/cute_kernels/layers.py").read_text())
    kinds = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert kinds
    for kind in kinds:
        assert [node.name for node in kind.body if isinstance(node, ast.FunctionDef)] == ["forward"]
        given = {node.target.id for node in kind.body if isinstance(node, ast.AnnAssign) and node.value is not None}
        assert given <= {"has_backward", "can_torch_compile"}
        assert not any(isinstance(node, ast.Assign) for node in kind.body)


def test_a_folder_of_something_else_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(SystemExit, match="holds something else"):
        of_ci("hub").make(tmp_path)
    assert (tmp_path / "thesis.tex").exists()
