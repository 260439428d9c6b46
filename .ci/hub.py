"""``make hub``: this package as a kernel of Hugging Face's hub, in dist/hub: ``kernels.get_kernel`` loads it.

What https://huggingface.co/docs/kernels/kernel-requirements asks for is made from the sources: imports become relative,
operators get a namespace of their own (so that two versions load beside each other), and what needs more than torch
and CuTe DSL stays out: emulator, commands, models of other libraries. ``torch-ext`` and ``build.toml`` are for
kernel-builder; ``build/torch-cuda`` and ``build/torch-cpu`` (plain torch) are what it would make of them.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cute_kernels"
NAME, PYTHON_NAME, VERSION = "cute-kernels", "cute_kernels", 0
LEFT_OUT = re.compile(
    r"__main__|commands/|common/executors|dsl/layouts|emulator/|explore/([a-z]\w+\.py|notebooks/|tuning/(own|strategies))|"
    r"models/[a-z]\w+\.py|pytest_plugin|testing/"
)
"""Beginnings of paths in the package."""
DEPENDS = {"cpu": [], "cuda": ["nvidia-cutlass-dsl"]}
ARCHS = ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]

_TEXTS = re.compile(rf"""(?<=torch\.ops\.){PYTHON_NAME}\b|(?<=["']){PYTHON_NAME}(?=["']|::|\.kernels\.)""")
"""The namespace of operators, and paths of kernels in plans."""


def sources() -> dict[str, str]:
    """Path in the package -> text, of what the hub gets, with imports that are relative."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE)
        if not LEFT_OUT.match(name.as_posix()):
            found[name.as_posix()] = relative(path.read_text(), len(name.parts))
    found["layers.py"] = (ROOT / ".ci" / "hub_layers.py").read_text()
    found["__init__.py"] += '\nfrom . import layers  # noqa: E402\n\n__all__.append("layers")\n'
    return found


def relative(text: str, depth: int) -> str:
    """Source whose imports of this package are relative.

    Args:
        text: of a module.
        depth: parts of its path in the package.
    """
    lines, dots = text.splitlines(keepends=True), "." * depth
    for node in ast.walk(ast.parse(text)):
        line = node.lineno - 1 if isinstance(node, (ast.Import, ast.ImportFrom)) else None
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PYTHON_NAME:
            inner = node.module.partition(".")[2]
            lines[line] = lines[line].replace(f"from {node.module} ", f"from {dots}{inner} ", 1)
        elif isinstance(node, ast.Import) and node.names[0].name.startswith(f"{PYTHON_NAME}."):
            ((name, as_name),) = ((alias.name, alias.asname) for alias in node.names)
            parent, _, last = name.partition(".")[2].rpartition(".")
            old = f"import {name} as {as_name}"
            lines[line] = lines[line].replace(old, f"from {dots}{parent} import {last} as {as_name}", 1)
    return "".join(lines)


def make(output: Path) -> str:
    """Writes the repository; returns the identifier of its code.

    Raises:
        SystemExit: an import would need what the hub does not allow; a folder that holds something else.
    """
    if output.exists() and any(output.iterdir()) and not (output / "build.toml").is_file():
        sys.exit(f"{output} holds something else than a kernel of the hub, and would be deleted")
    files = sources()
    digest = hashlib.sha256("".join(f"{name}\0{text}\0" for name, text in files.items()).encode()).hexdigest()[:12]
    shutil.rmtree(output, ignore_errors=True)
    license_text = (ROOT / "LICENSE").read_text()
    _write(output, "build.toml", _build_toml())
    _write(output, "LICENSE", license_text)
    for name, text in files.items():
        _write(output / "torch-ext" / PYTHON_NAME, name, text)
    for backend, depends in DEPENDS.items():
        identifier = f"_{PYTHON_NAME}_{backend}_{digest}"
        variant = output / "build" / f"torch-{backend}"
        made = {name: _TEXTS.sub(identifier, text) for name, text in files.items()}
        # Where older versions of `kernels` look for the package.
        made[f"{PYTHON_NAME}/__init__.py"] = _TO_PARENT
        for name, text in made.items():
            _write(variant, name, text)
        about = {"type": backend} | ({"archs": ARCHS} if backend == "cuda" else {})
        metadata = {
            "name": NAME,
            "id": identifier,
            "version": VERSION,
            "license": "Apache-2.0",
            "python-depends": depends,
            "backend": about,
            "digest": {"algorithm": "sha256", "files": {name: _digest(text) for name, text in sorted(made.items())}},
        }
        _write(variant, "metadata.json", json.dumps(metadata, indent=2) + "\n")
    return digest


_TO_PARENT = """import importlib.util
import sys
from pathlib import Path

_path = Path(__file__).parents[1] / "__init__.py"
_name = f"{__name__}_parent"
_spec = importlib.util.spec_from_file_location(_name, _path)
_module = sys.modules[_name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
globals().update({name: getattr(_module, name) for name in _module.__all__})
__all__ = list(_module.__all__)
"""


def _build_toml() -> str:
    backends = ", ".join(json.dumps(backend) for backend in DEPENDS)
    return f"""[general]
edition = 5
name = "{NAME}"
license = "apache-2.0"
backends = [{backends}]
version = {VERSION}

[general.cuda]
python-depends = {json.dumps(DEPENDS["cuda"])}

[torch-noarch]
"""


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def main() -> None:
    """Writes it, and says where."""
    parser = argparse.ArgumentParser(prog="make hub", description=__doc__.partition("\n")[0])
    default = ROOT / "dist" / "hub"
    parser.add_argument("--output", type=Path, default=default, metavar="DIR", help="default: %(default)s")
    options = parser.parse_args()
    print(f"wrote {options.output}, {make(options.output)}")


if __name__ == "__main__":
    main()
