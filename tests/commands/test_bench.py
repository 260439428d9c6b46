"""``cute-kernels bench``: a small checkpoint of transformers on a CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image

from cute_kernels.commands.cli import main


def saved_clip(folder: Path) -> Path:
    """The folder, with a small CLIP of random weights and its processor."""
    torch.manual_seed(0)
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.CLIPVisionConfig(**small, image_size=64, patch_size=16)
    transformers.CLIPVisionModel(config).save_pretrained(folder)
    sizes = {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}}
    transformers.CLIPImageProcessorPil(**sizes).save_pretrained(folder)
    return folder


def test_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = saved_clip(tmp_path / "clip")
    photo = tmp_path / "photo.png"
    Image.effect_noise((90, 70), 60).convert("RGB").save(photo)
    assert main(["bench", str(checkpoint), "--batch", "2", "--images", str(photo)]) == 0
    text = capsys.readouterr().out
    rows = dict(re.findall(r"^\| (\S[^|]*?) \| [\d.e-]+ \| ([\d.e-]+) \| [\d.]+ \|$", text, re.MULTILINE))
    assert list(rows) == ["library in bf16", "int8", "fp8", "bf16", "fp16"]
    errors = {name: float(value) for name, value in rows.items()}
    assert 1e-4 < errors["bf16"] < 1e-2 and errors["bf16"] < errors["int8"] < errors["fp8"] < 0.2
    assert "no GPU here" in text and "to choose: " in text


def test_what_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "vit_of_timm"]) == 2
    assert "needs timm" in capsys.readouterr().err
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**small, image_size=64)).save_pretrained(tmp_path)
    assert main(["bench", str(tmp_path)]) == 2
    assert "has no image processor beside it" in capsys.readouterr().err
    heads = {"num_key_value_heads": 2, "head_dim": 32, "patch_size": 4, "position_embedding_size": 8}
    transformers.Gemma4VisionModel(transformers.Gemma4VisionConfig(**small, **heads)).save_pretrained(tmp_path)
    sizes = {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}}
    transformers.CLIPImageProcessorPil(**sizes).save_pretrained(tmp_path)
    assert main(["bench", str(tmp_path)]) == 2
    assert "its processor must only divide by 255" in capsys.readouterr().err
