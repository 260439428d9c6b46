"""docs/examples/photographs.py, the demo: from files to a picture, with an exit status that bits decide."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import photographs
import pytest
import torch
from PIL import Image


def written(folder: Path, count: int) -> list[str]:
    """Smooth random colour fields of different sizes."""
    paths = [folder / f"photo {index}.png" for index in range(count)]
    for index, path in enumerate(paths):
        small = np.random.default_rng(index).integers(0, 256, (5, 5, 3), dtype=np.uint8)
        Image.fromarray(small).resize((60 + 10 * index, 80), Image.Resampling.BICUBIC).save(path)
    return list(map(str, paths))


def test_from_files_to_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every precision has the bits of its reference, and the distance to FP32 that its roundings make."""
    output = tmp_path / "out.png"
    assert photographs.main(["--images", *written(tmp_path, 2), "--image-size", "48", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    found = re.findall(r"(\w+): 0 of 13,824 numbers differ from the reference; ([\d.]+)% off FP32", printed)
    off = {precision: float(error) for precision, error in found}  # of 2 images x 9 positions x 768 features
    assert 0.1 < off["bf16"] < off["int8"] < 2 and off["int8"] < off["fp8"] < 6
    with Image.open(output) as picture:
        assert picture.format == "PNG" and min(picture.size) > 300


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_one_wrong_bit_fails(
    precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    embed = photographs.EMBEDDINGS[precision]

    def wrong(images: torch.Tensor, layer: photographs.Layer, backend: str) -> torch.Tensor:
        out = embed(images, layer, backend).clone()
        out.view(torch.int16)[0, 4, 100] ^= backend == "emulator"
        return out

    monkeypatch.setitem(photographs.EMBEDDINGS, precision, wrong)
    words = ["--precision", precision, "--images", *written(tmp_path, 1), "--image-size", "48"]
    assert photographs.main([*words, "--output", str(tmp_path / "out.png")]) == 1
    assert f"{precision}: 1 of 6,912 numbers differ" in capsys.readouterr().out


def test_sides_that_are_no_whole_patches_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for side in ("8", "50"):
        with pytest.raises(SystemExit):
            photographs.main(["--image-size", side])
        assert f"--image-size {side}: must be a multiple of 16" in capsys.readouterr().err


def test_photographs_are_in_the_wheel() -> None:
    names, photos = photographs.photographs([])
    assert len(names) == len(photos) >= 8
    for photo in photos:
        assert photo.mode == "RGB" and photo.width == photo.height >= 300 and np.asarray(photo).std() > 10


def test_colours_span_the_largest_variance() -> None:
    random = torch.Generator().manual_seed(0)
    points = torch.randn(40, 100, 5, generator=random) * torch.tensor([9.0, 1.0, 5.0, 0.1, 3.0]) + 7
    colours = photographs.colours_of(points)(points).reshape(-1, 3)
    for column, axis in zip(colours.T, (0, 2, 4)):
        assert abs(np.corrcoef(column, points[..., axis].flatten())[0, 1]) > 0.95
    # 98 of 100 points lie strictly between the percentiles that become 0 and 1.
    np.testing.assert_allclose(((colours > 0) & (colours < 1)).mean(0), 0.98, atol=0.002)
