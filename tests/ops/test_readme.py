"""The README's examples are executed, and print what it says they print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from cute_kernels import patch_embed
from cute_kernels.commands import cli
from cute_kernels.reference import patch_embed_conv2d

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def test_python_examples(capsys: pytest.CaptureFixture[str]) -> None:
    from_images, embedding, product = blocks("python")
    scope: dict = {}
    exec(compile(from_images, "README.md", "exec"), scope)
    assert capsys.readouterr().out == "torch.Size([2, 196, 768]) torch.bfloat16\n"
    expected = patch_embed_conv2d(scope["images"] / 127.5 - 1, scope["conv"].weight, scope["conv"].bias, None)
    assert (scope["out"].float() - expected).norm() / expected.norm() < 0.02
    scope = {}
    exec(compile(embedding, "README.md", "exec"), scope)
    exec(compile(product, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1] == "torch.Size([2, 100, 50])"
    out, reference = scope["out"], patch_embed(
        scope["x"].values, scope["weight"].values, scope["model"].bias, scope["model"].pos_embed,
        scale_a=scope["x"].scale, scale_b=scope["weight"].scale,
    )  # fmt: skip
    assert out.shape == (2, 196, 768)
    assert torch.equal(out, reference)


def test_the_emulated_program_is_reported_as_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same words and source lines; PTX lines, registers and offsets belong to the version of CuTe DSL."""
    (shown,) = blocks("console")
    command, _, report = shown.partition("\n")
    arguments = command.removeprefix("$ .venv/bin/cute-kernels ").split()
    assert arguments[0] == "emulate"
    monkeypatch.chdir(ROOT)

    def words(text: str) -> str:
        return " ".join(re.sub(r"PTX line \d+|%r\d+|offset \d+", "N", text).split())

    assert cli.main(arguments) != 0
    assert words(report) in words(capsys.readouterr().err)

    source = (ROOT / arguments[-1]).read_text()
    repaired = re.sub(r"# Missing: (cute\.arch\.sync_threads\(\)).*", r"\1", source)
    assert repaired != source
    (tmp_path / "reverse.py").write_text(repaired)
    assert cli.main([*arguments[:-1], str(tmp_path / "reverse.py")]) == 0
    assert capsys.readouterr().out.splitlines()[-2:-1] == ["the result is right"]
