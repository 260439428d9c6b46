"""Documentation names files that exist, its generated tables are those of the code, and pages keep their sizes.

Links, anchors and API references are the site's business: ``make docs`` fails where one leads nowhere.
"""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

import cute_kernels
from bench import archive
from cute_kernels.commands import cli, kernel_options
from cute_kernels.config import GemmProblem, PatchEmbedImagesProblem
from cute_kernels.plan import make_plan

ROOT = Path(__file__).parents[2]
FOLDERS = ("cute_kernels", "tests", "bench", "docs", ".ci")
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FILES = {
    "/" + str(path.relative_to(ROOT))
    for path in [*ROOT.iterdir(), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
} | {
    f"/bench/results/{path.name}/{name}" for path in archive.RESULTS.glob("*.tar.xz") for name in archive.contents(path)
}
"""With those in the archives of recorded results."""

WRITTEN = {
    "demo.png", "trace.json", "photo.png", "build/mutation.json", "state.json",
    "r.json", "transpose.py", "broken.py",
}  # fmt: skip
"""Files that commands write, or readers, where they are called."""

NOT_OURS = re.compile(r"^(cute|cute_ext|examples/python)/|\b[A-Z_]+\.")
"""Programs of other projects, by their paths there; names in capitals, which stand for any."""


SIZES = {
    "README.md": 8_250,
    # For everybody.
    "docs/install.md": 3_000, "docs/tutorial.md": 6_500, "docs/glossary.md": 2_150, "docs/demo.md": 1_500,
    # Kernel developers.
    "docs/agents.md": 4_600, "docs/trust.md": 1_900, "docs/own_kernel.md": 5_250,
    "docs/emulator/guide.md": 8_250, "docs/emulator/your_kernel.md": 6_400, "docs/emulator/contract.md": 14_750,
    "docs/emulator/finding_out.md": 6_400,
    "docs/emulator/arithmetic.md": 5_000, "docs/emulator/core.md": 6_500, "docs/emulator/counters.md": 4_250,
    "docs/emulator/programs.md": 8_250, "docs/emulator/evidence.md": 9_200,
    # Model engineers.
    "docs/use_in_your_model.md": 10_750, "docs/operations.md": 8_150,
    "docs/fp8_mlp.md": 3_600,
    "docs/which_kernel.md": 5_750, "docs/caching.md": 3_250, "docs/performance.md": 12_900,
    # Explorers.
    "docs/explore.md": 4_650, "docs/model.md": 5_950,
    "docs/experiments.md": 6_750,
    # Contributors.
    "docs/architecture.md": 9_700, "docs/api/names.md": 2_000, "docs/dataflow.md": 7_350,
    "docs/contributing.md": 7_800, "docs/mutation.md": 4_250,
}  # fmt: skip
"""Bytes that a page may have. Pages of docs/api are a few lines that mkdocstrings expands, 1,000 at most each."""


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_keep_their_sizes(page: Path) -> None:
    """A page that grows beyond its limit has to lose something, or to become two; a new page needs a limit."""
    name = str(page.relative_to(ROOT))
    limit = SIZES.get(name, 1_000) if name.startswith("docs/api/") else SIZES[name]
    assert page.stat().st_size <= limit, f"{name} has {page.stat().st_size:,} bytes, at most {limit:,} are allowed"


def test_sizes_are_of_pages() -> None:
    """Of pages that exist, and not of some that were larger once: nearly all of a limit is used."""
    for name, limit in SIZES.items():
        assert limit - max(1_500, limit // 8) < (ROOT / name).stat().st_size, name


def tables() -> ModuleType:
    """The script that writes the generated tables."""
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_tables_are_those_of_the_code() -> None:
    """``python docs/tables.py`` would change no page, and no page but these has a generated table."""
    script = tables()
    written = {page.name for page in PAGES if "<!-- end -->" in page.read_text()}
    assert set(script.PAGES) <= written
    for name in script.PAGES:
        page = (ROOT / "docs" / name).read_text()
        assert script.filled(page) == page, f"docs/{name}: run python docs/tables.py"


def test_a_table_of_kernels_names_what_a_plan_runs() -> None:
    """Cells of the page against kernels that are looked up here, one for each of its columns."""
    page = (ROOT / "docs" / "which_kernel.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    (images,) = (row for row in rows if row[0] == "`int8`" and row[1] == "16")
    assert images[2:] == [f"`{kernel}/patch_embed_images`" for kernel in ("sm90", "sm100", "sm80")]
    problem = PatchEmbedImagesProblem(1, 3, 224, 224, 16, 768, table_rows=196)
    for arch, cell in zip(("sm_90a", "sm_100a", "sm_86", "sm_120"), (*images[2:], images[-1])):
        module = make_plan(problem, arch=arch).kernel.partition(":")[0]
        assert module == "cute_kernels.kernels." + cell.strip("`").replace("/", ".")
    (narrow,) = (row for row in rows if row[:2] == ["`gemm`", "float8_e4m3fn"])
    assert narrow[-1] == "sm_80, sm_86, sm_90: -; sm_89, sm_120: `sm80/gemm`"
    for arch in ("sm_80", "sm_86", "sm_90"):
        with pytest.raises(ValueError, match="E4M3"):
            make_plan(GemmProblem(64, 64, 64, in_dtype="float8_e4m3fn"), arch=arch)


def test_every_page_is_in_the_site() -> None:
    listed = re.findall(r": ([\w/]+\.md)$", (ROOT / ".ci" / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages - set(listed) == set() and len(listed) == len(set(listed))


def test_public_names_are_on_the_pages_of_the_api() -> None:
    pages = "\n".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    assert [name for name in cute_kernels.__all__ if not re.search(rf"^::: cute_kernels\.{name}\b", pages, re.M)] == []


def test_the_table_of_public_names_is_right() -> None:
    """Each name can be imported from where the table says, and no name that `cute_kernels` has is missing."""
    page = (ROOT / "docs" / "api" / "names.md").read_text()
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*) \|$", page, re.MULTILINE))
    for module, cell in rows.items():
        for name in re.findall(r"`(\w+)`", cell):
            assert pkgutil.resolve_name(f"{module}.{name}") is not None
    named = set(re.findall(r"`(\w+)`", rows["cute_kernels"]))
    left = {name for name in cute_kernels.__all__ if name not in named and not name.endswith(("Problem", "Config"))}
    assert len(rows) == 10 and left == {"models"}


def test_every_module_says_what_it_is() -> None:
    found = sorted((ROOT / "cute_kernels").rglob("*.py"))
    assert len(found) > 200
    assert [str(path) for path in found if not ast.get_docstring(ast.parse(path.read_text()))] == []


def commands(text: str) -> list[str]:
    """Lines of blocks of code that call ``cute-kernels``, without a prompt, a path and what is said behind ``#``."""
    lines = "\n".join(re.findall(r"^```.*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)).splitlines()
    found = (re.match(r"(?:\$ )?(?:\S*/)?cute-kernels (.*)", line) for line in lines)
    return [match[1] for match in found if match and not match[1].startswith(": ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_understood(page: Path) -> None:
    """Each command of a page has the options that it is shown with."""
    for command in commands(page.read_text()):
        words = shlex.split(command, comments=True)
        cli._parser(kernel_options.named(words)).parse_args(words)


def test_pictures_are_made_by_the_command_that_stands_under_them() -> None:
    page = (ROOT / "docs" / "explore.md").read_text()
    (command,) = re.findall(r"^\*`cute-kernels (explore .*?)`", page, re.MULTILINE)
    recipe = (ROOT / "Makefile").read_text().partition("\npictures:")[2].partition("\n\n")[0]
    assert f"cute-kernels {command}\n" in recipe and f" {command.split()[-1]}\n" in recipe + "\n"
    made = re.findall(r"docs/(\w+)\.png", recipe) + ["report"]
    assert {path.stem for path in (ROOT / "docs").glob("*.png")} == set(made) and "docs/report_picture.py" in recipe


def test_commands_are_found() -> None:
    assert sum(len(commands(page.read_text())) for page in PAGES) > 20


def test_docstrings_name_the_thing_first() -> None:
    """A docstring that begins with "What ..", "Those ..", "Its .." says nothing to a reader who sees it alone."""
    sources = sorted((ROOT / "cute_kernels").rglob("*.py"))
    pronouns = r"What|Of|As|Likewise|The same|Those|That of|One of them|All of|Its|Their|Whose|It|They"
    starts = re.compile(rf'^\s*"""(?:{pronouns})\b.*', re.MULTILINE)
    assert [(str(path), start) for path in sources for start in starts.findall(path.read_text())] == []
    assert len(sources) > 300
