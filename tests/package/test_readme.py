"""The README's examples are executed, and print what it says they print."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cute_kernels.commands import cli
from cute_kernels.operations.reference import patch_embed_conv2d

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def test_the_python_example(capsys: pytest.CaptureFixture[str]) -> None:
    (from_images,) = blocks("python")
    scope: dict = {}
    exec(compile(from_images, "README.md", "exec"), scope)
    assert capsys.readouterr().out == "torch.Size([2, 196, 768]) torch.bfloat16\n"
    expected = patch_embed_conv2d(scope["images"] / 127.5 - 1, scope["conv"].weight, scope["conv"].bias, None)
    assert (scope["out"].float() - expected).norm() / expected.norm() < 0.02


def words(text: str) -> str:
    """Without what belongs to the version of CuTe DSL: PTX lines, registers, offsets."""
    return " ".join(re.sub(r"PTX line \d+|%rd?\d+|offset \d+", "N", text).split())


def test_commands_print_what_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (shown,) = blocks("console")
    monkeypatch.chdir(ROOT)
    ran = []
    for command, _, output in (each.partition("\n") for each in re.split(r"^\$ ", shown, flags=re.MULTILINE)[1:]):
        arguments = command.removeprefix(".venv/bin/cute-kernels ").split()
        ran.append((arguments[0], cli.main(arguments)))
        captured = capsys.readouterr()
        assert words(output) in words(captured.out + captured.err), command
    assert ran == [("emulate", 3), ("check", 0), ("mutate", 0)]


def test_the_picture_is_what_is_printed(tmp_path: Path) -> None:
    """Its lines are those of the report; the file itself is as the script draws it, but for fonts and PTX lines."""
    spec = importlib.util.spec_from_file_location("report_picture", ROOT / "docs" / "report_picture.py")
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    assert "docs/report.png" in README
    text = picture.printed()
    plain = re.sub(r"\033\[[\d;]*m", "", text)
    assert plain.startswith("error[shared-race]: ") and text != plain
    assert words(" ".join(line.plain for _, line in picture.rows(text))) == words(plain)
    picture.draw(tmp_path / "report.png", text)
    drawn, kept = (Image.open(path) for path in (tmp_path / "report.png", ROOT / "docs" / "report.png"))
    assert words(drawn.text["Description"]) == words(kept.text["Description"]), "python docs/report_picture.py draws it"
    assert drawn.size == kept.size and abs(np.asarray(drawn, int) - np.asarray(kept, int)).mean() < 5


def test_the_program_is_in_order_with_its_barrier(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = (ROOT / "docs" / "examples" / "reverse.py").read_text()
    repaired = re.sub(r"# Missing: (cute\.arch\.sync_threads\(\)).*", r"\1", source)
    assert repaired != source
    (tmp_path / "reverse.py").write_text(repaired)
    assert cli.main(["emulate", "--arch", "sm_90a", str(tmp_path / "reverse.py")]) == 0
    assert capsys.readouterr().out.splitlines()[-2:-1] == ["the result is right"]
