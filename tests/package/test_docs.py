"""Documentation names files that exist, and every file of the emulator has its place on the map.

Links, anchors and API references are the site's business: ``make docs`` fails where one leads nowhere.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("cute_kernels", "tests", "bench", "docs", ".ci")
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FILES = {
    "/" + str(path.relative_to(ROOT))
    for path in [*ROOT.iterdir(), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
}

WRITTEN = {
    "demo.png", "trace.png", "trace.json", "photo.png", "patch_embed.ptx.json", "build/mutation.json", "state.json",
    "r.json",
}  # fmt: skip
"""Files that commands write where they are called."""

NOT_OURS = re.compile(r"^(cute|cute_ext|examples/python)/|\b[A-Z_]+\.")
"""Programs of other projects, by their paths there; names in capitals, which stand for any."""


def named_files(text: str) -> set[str]:
    """Whatever reads like a path."""
    return {name for name in re.findall(r"[\w./-]+\.(?:py|json|md|png|txt)\b", text) if not NOT_OURS.search(name)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_exist(page: Path) -> None:
    """As the end of a path in the repository, or relative to the page."""
    missing = []
    for name in named_files(page.read_text()):
        tail = "/" + name.removeprefix("./").lstrip("/")
        known = any(file.endswith(tail) for file in FILES) or (page.parent / name).exists() or name in WRITTEN
        if not known:
            missing.append(name)
    assert not missing


def test_the_map_has_every_file_of_the_emulator() -> None:
    """Each in the table of its folder; those of `core/` are in docs/emulator/core.md."""
    text = (ROOT / "docs" / "architecture.md").read_text().partition("\n## The emulator\n")[2]
    _, *parts = re.split(r"^### `([\w/]*)/`", text, flags=re.MULTILINE)
    tables = dict(zip(parts[::2], parts[1::2]))
    files = {path.relative_to(ROOT / "cute_kernels") for path in (ROOT / "cute_kernels" / "emulator").rglob("*.py")}
    files = {path for path in files if not path.name.startswith("__") and "core" not in path.parts}
    assert len(files) > 100
    for path in sorted(files):
        folder = str(path.parent)
        named = f"`{path.name}`" in tables[folder] or (folder == "emulator/instructions" and "`*.py`" in tables[folder])
        assert named, f"{path} is not in the table of {folder}"


def test_docstrings_name_the_thing_first() -> None:
    """A docstring that begins with "Of ..", "As ..", "Likewise" says nothing to whoever reads it alone."""
    sources = sorted((ROOT / "cute_kernels").rglob("*.py"))
    starts = re.compile(r'^\s*"""(?:Of|As|Likewise|The same)\b.*', re.MULTILINE)
    assert [(str(path), start) for path in sources for start in starts.findall(path.read_text())] == []
    assert len(sources) > 300
