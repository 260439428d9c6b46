"""What `make docs` adds to the pages in docs/: the README as the first one, the notebook, commands' help.

MkDocs calls these functions (https://www.mkdocs.org/user-guide/plugins/#events).
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from cute_kernels.commands import cli
from cute_kernels.commands.kernel_options import OPERATIONS

ROOT = Path(__file__).parents[1]


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    # Links of the README are relative to the repository's root, those of a page to docs/; sources are not on the site.
    readme = (ROOT / "README.md").read_text().replace("](docs/", "](")
    readme = re.sub(r"\[(`[^`]+`)\]\(cute_kernels/[^)]+\)", r"\1", readme)
    index = f"---\nhide: [navigation]\n---\n\n{readme}"
    generated = {
        "index.md": index,
        "explore_cells.md": notebook(),
        "commands.md": commands(),
    }
    for path, content in generated.items():
        files.append(File.generated(config, path, content=content))
    return files


def notebook() -> str:
    """docs/explore.py: its Markdown cells as text, the others as code."""
    cells = re.split(r"^# %%", (ROOT / "docs" / "explore.py").read_text(), flags=re.MULTILINE)[1:]
    parts = []
    for cell in cells:
        kind, _, body = cell.partition("\n")
        if "[markdown]" in kind:
            parts.append("\n".join(line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines()))
        else:
            parts.append(f"```python\n{body.strip()}\n```")
    return "\n\n".join(parts) + "\n"


def commands() -> str:
    """Every command's --help."""
    os.environ["COLUMNS"] = "100"
    parser = cli._parser(tuple(OPERATIONS))
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    parts = ["# Command line\n\nWhat `cute-kernels COMMAND --help` prints."]
    parts += [f"## {name}\n\n```text\n{command.format_help()}```" for name, command in subparsers.choices.items()]
    return "\n\n".join(parts) + "\n"
