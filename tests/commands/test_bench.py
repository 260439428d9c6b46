"""``cute-kernels bench``: a small checkpoint of transformers on a CPU; times and what follows from them as given."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image

from cute_kernels.commands import bench_model
from cute_kernels.commands.bench_model import Report, Row
from cute_kernels.commands.cli import main


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.CLIPVisionConfig(**small, image_size=64, patch_size=16)
    transformers.CLIPVisionModel(config).save_pretrained(folder)
    sizes = {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}}
    transformers.CLIPImageProcessorPil(**sizes).save_pretrained(folder)
    return folder


def test_a_checkpoint(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photo, picture = tmp_path / "photo.png", tmp_path / "bench.png"
    Image.effect_noise((90, 70), 60).convert("RGB").save(photo)
    assert main(["bench", str(checkpoint), "--batch", "2", "--images", str(photo), "--output", str(picture)]) == 0
    text = capsys.readouterr().out
    rows = dict(re.findall(r"^\| (\S[^|]*?) \| [\d.e-]+ \| ([\d.e-]+) \| [\d.]+ \|$", text, re.MULTILINE))
    assert list(rows) == ["library in bf16", "int8", "fp8", "bf16", "fp16"]
    errors = {name: float(value) for name, value in rows.items()}
    assert 1e-4 < errors["bf16"] < 1e-2 and errors["bf16"] < errors["int8"] < errors["fp8"] < 0.2
    assert "no GPU here" in text and "to choose: " in text and f"wrote {picture}" in text
    assert Image.open(picture).width > 100


@torch.no_grad()
def test_errors_are_against_the_library_in_fp32(checkpoint: Path) -> None:
    options = argparse.Namespace(model=str(checkpoint), batch=2, dtype="fp32", images=[], pretrained=False, rounds=1)
    model = bench_model.load(options)
    assert model.raw["pixel_values"].dtype == torch.uint8 and model.normalised["pixel_values"].dtype == torch.float32
    library, *others = bench_model.measured(model, options).rows
    assert library.layer == library.tower == 0 and library.cosine == pytest.approx(1)
    (fp16,) = (row for row in others if row.name == "fp16")
    assert fp16.tower < 4e-3  # the reference
    tower = model.convert(model.tower, "int8")
    expected = transformers.AutoModel.from_pretrained(checkpoint)(**model.normalised).last_hidden_state
    error = float((model.call(tower, model.raw) - expected).norm() / expected.norm())
    (int8,) = (row for row in others if row.name == "int8")
    assert int8.tower == pytest.approx(error, rel=1e-3)


def test_padding_is_not_compared() -> None:
    """Of patches of any number, where raw pixels and normalised ones differ in the padding, which the model hides."""
    torch.manual_seed(0)
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    tower = transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**small, num_patches=16)).eval()
    raw = torch.randint(0, 256, (2, 16, 768), dtype=torch.uint8)
    mask = torch.arange(16).expand(2, -1) < torch.tensor([[16], [6]])
    raw[~mask] = 0
    shapes = {"pixel_attention_mask": mask.int(), "spatial_shapes": torch.tensor([[4, 4], [2, 3]])}
    normalised = torch.where(mask[..., None], raw / 127.5 - 1, 0.0)
    model = bench_model.Model(
        tower,
        lambda tower, inputs: tower(**inputs).last_hidden_state,
        lambda tower, precision: bench_model.transformers.convert(tower, precision, mean=0.5, std=0.5),
        {"pixel_values": raw, **shapes},
        {"pixel_values": normalised, **shapes},
    )
    report = bench_model.measured(model, argparse.Namespace(dtype="fp32", rounds=1))
    (int8,) = (row for row in report.rows if row.name == "int8")
    assert int8.layer < 0.05 and int8.tower < 0.05 and int8.cosine > 0.99


def test_the_fastest_of_those_that_are_as_good_is_chosen() -> None:
    library = Row("library in bf16", 3e-3, 4e-3, 0.9999, 1.0, 5.0)
    int8, bf16, fp8 = (Row(name, error, error, 0.999, 0.1, ms) for name, error, ms in
                       (("int8", 5e-3, 4.2), ("bf16", 4e-3, 4.1), ("fp8", 4e-2, 3.0)))  # fmt: skip
    report = Report("a GPU", [library, int8, fp8, bf16])
    assert report.choice().startswith("to choose: bf16, 4.100 ms, not 5.000;")
    assert report.lines()[0].endswith("| first layer, ms | tower, ms |") and "No times" not in "".join(report.lines())
    bench_model.draw(report)
    assert Report("a GPU", [library, fp8]).choice().startswith("to choose: library in bf16; no precision")
    for row in report.rows:
        row.layer_ms = row.tower_ms = None
    assert report.choice().startswith("to choose: int8, which reads the fewest bytes;")
    refused = Row("fp16", note="not possible: N = 12")
    assert Report("CPU", [library, refused]).lines()[-3].startswith("| fp16 (not possible: N = 12) |")


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
    assert "cannot be called with what its processor makes (pixel_values)" in capsys.readouterr().err
