"""A model's embedding before and after: errors of a small checkpoint, and what follows from times as given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from cute_kernels.explore import model_bench
from cute_kernels.explore.model_bench import Report, Row
from tests.commands.test_bench import saved_clip


@torch.no_grad()
def test_errors_are_against_the_library_in_fp32(tmp_path: Path) -> None:
    checkpoint = saved_clip(tmp_path)
    model = model_bench.load(str(checkpoint), [], 2)
    assert model.raw["pixel_values"].dtype == torch.uint8 and model.normalised["pixel_values"].dtype == torch.float32
    library, *others = model_bench.measured(model, "fp32", 1).rows
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
    model = model_bench.Model(
        tower,
        lambda tower, inputs: tower(**inputs).last_hidden_state,
        lambda tower, precision: model_bench.transformers.convert(tower, precision, mean=0.5, std=0.5),
        {"pixel_values": raw, **shapes},
        {"pixel_values": normalised, **shapes},
    )
    report = model_bench.measured(model, "fp32", 1)
    (int8,) = (row for row in report.rows if row.name == "int8")
    assert int8.layer < 0.05 and int8.tower < 0.05 and int8.cosine > 0.99


def test_the_fastest_of_those_that_are_as_good_is_chosen() -> None:
    library = Row("library in bf16", 3e-3, 4e-3, 0.9999, 1.0, 5.0)
    int8, bf16, fp8 = (Row(name, error, error, 0.999, 0.1, ms) for name, error, ms in
                       (("int8", 5e-3, 4.2), ("bf16", 4e-3, 4.1), ("fp8", 4e-2, 3.0)))  # fmt: skip
    report = Report("a GPU", [library, int8, fp8, bf16])
    assert report.choice().startswith("to choose: bf16, 4.100 ms, not 5.000;")
    assert report.lines()[0].endswith("| first layer, ms | tower, ms |") and "No times" not in "".join(report.lines())
    assert Report("a GPU", [library, fp8]).choice().startswith("to choose: library in bf16; no precision")
    for row in report.rows:
        row.layer_ms = row.tower_ms = None
    assert report.choice().startswith("to choose: int8, which reads the fewest bytes;")
    refused = Row("fp16", note="not possible: N = 12")
    assert Report("CPU", [library, refused]).lines()[-3].startswith("| fp16 (not possible: N = 12) |")
