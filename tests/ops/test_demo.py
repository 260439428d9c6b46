"""The demo on small images, its figure and its exit status, and the README's example."""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from cute_kernels.commands import demo, report
from cute_kernels.commands.cli import main


def write_photos(folder: Path, count: int) -> list[str]:
    """Smooth random colour fields of different sizes."""
    paths = []
    for index in range(count):
        small = np.random.default_rng(index).integers(0, 256, (5, 5, 3), dtype=np.uint8)
        path = folder / f"photo {index}.png"
        Image.fromarray(small).resize((60 + 10 * index, 80), Image.Resampling.BICUBIC).save(path)
        paths.append(str(path))
    return paths


def test_demo_from_files_to_picture(tmp_path, capsys):
    output = tmp_path / "out.png"
    paths = write_photos(tmp_path, 2)
    status = main(["demo", "--backend", "emulator", "--images", *paths, "--image-size", "48", "--output", str(output)])
    printed = capsys.readouterr().out
    assert status == 0
    assert "seeded random weights of SigLIP2 base-p16" in printed
    assert re.search(r"0\s+of\s+13,824", printed)  # 2 images x 9 positions x 768 features
    assert re.search(r"registers per thread\W+\d+ of 255", printed)
    assert "SMEM total" in printed
    assert "2 square crops" in printed
    assert "static SMEM (of the system)" in printed
    assert "TMEM total" in printed
    with Image.open(output) as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 300


def test_a_file_that_is_no_image_is_refused(tmp_path, capsys):
    text, cut = tmp_path / "text.png", tmp_path / "cut.png"
    text.write_text("not an image")
    (whole,) = write_photos(tmp_path, 1)
    cut.write_bytes(Path(whole).read_bytes()[:200])
    for path in (text, cut):
        assert main(["demo", "--images", whole, str(path), "--output", str(tmp_path / "out.png")]) == 2
        assert f"{path} cannot be read as an image" in capsys.readouterr().err


def test_demo_of_the_sm90_kernel(tmp_path, capsys):
    output = tmp_path / "out.png"
    settings = ["--set", "warpgroups=1", "--set", "tile_rows=16", "--set", "cluster=1"]
    arguments = ["demo", "--backend", "emulator", "--arch", "sm_90a", *settings, "--images", *write_photos(tmp_path, 1)]
    assert main([*arguments, "--image-size", "32", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"0\s+of\s+3,072", printed)  # 4 positions x 768 features
    assert "Kernel for sm_90a" in printed
    assert "16 rows x 64 features" in printed
    assert output.is_file()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_turned_as_the_camera_was_held(orientation, tmp_path):
    """The stored picture of each EXIF orientation, by the standard's table of which side row 0 and column 0 are."""
    upright = np.random.default_rng(0).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.swapaxes(0, 1),
        6: np.rot90(upright),  # the camera was turned clockwise; the viewer turns it back by 90 degrees
        7: upright[::-1, ::-1].swapaxes(0, 1),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(np.ascontiguousarray(stored)).save(tmp_path / "photo.png", exif=exif)
    _, (photo,) = demo._load_photographs([tmp_path / "photo.png"])
    assert np.array_equal(np.asarray(photo), upright)


def test_a_sixteen_bit_photograph_is_not_white(tmp_path):
    values = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    Image.fromarray(values).save(tmp_path / "scan.png")
    _, (photo,) = demo._load_photographs([tmp_path / "scan.png"])
    assert np.array_equal(np.asarray(photo)[..., 1], values // 256)


@pytest.mark.parametrize("error", [struct.error("short"), zlib.error("bad"), IndexError("out"), EOFError()])
def test_any_error_of_a_decoder_names_the_file(error, tmp_path, monkeypatch, capsys):
    (path,) = write_photos(tmp_path, 1)

    def fail(*_):
        raise error

    monkeypatch.setattr(Image, "open", fail)
    assert main(["demo", "--images", path, "--output", str(tmp_path / "out.png")]) == 2
    assert f"{path} cannot be read as an image" in capsys.readouterr().err


def test_demo_with_a_checkpoint(tmp_path, capsys):
    import transformers

    config = transformers.SiglipVisionConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, patch_size=14, image_size=60
    )
    model = tmp_path / "checkpoint"
    transformers.SiglipVisionModel(config).save_pretrained(model)
    output = tmp_path / "out.png"
    arguments = ["demo", "--backend", "emulator", "--images", *write_photos(tmp_path, 1), "--model", str(model)]
    assert main([*arguments, "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "1 square crop, bilinear" in printed
    assert "does not see the last 4 rows and columns" in printed  # 60 = 4 x 14 + 4
    assert "weights: SiglipVisionModel checkpoint checkpoint" in printed
    assert re.search(r"0\s+of\s+384", printed)  # 16 positions x 24 features
    assert output.is_file()


def test_a_single_wrong_bit_fails_the_demo(tmp_path, capsys, monkeypatch):
    emulated = demo._run_kernel

    def off_by_one_bit(*arguments):
        result = emulated(*arguments)
        result.out.view(torch.int16)[0, 4, 100] ^= 1
        return result

    monkeypatch.setattr(demo, "_run_kernel", off_by_one_bit)
    arguments = ["demo", "--backend", "emulator", "--images", *write_photos(tmp_path, 1), "--image-size", "48"]
    assert main([*arguments, "--output", str(tmp_path / "out.png")]) == 1
    assert "FAILED: 1 elements differ" in capsys.readouterr().out


def test_photographs_are_in_the_wheel():
    names, photos = demo._load_photographs([])
    assert len(names) == len(photos) >= 8
    for photo in photos:
        assert photo.mode == "RGB"
        assert photo.width == photo.height >= 300
        assert np.asarray(photo).std() > 10


def test_accuracy_counts_and_measures():
    expected = torch.randn(2, 3, 8).to(torch.bfloat16)
    out = expected.clone()
    out[1, 2, 3], out[0, 0, 0] = 5.0, -expected[0, 0, 0]
    fp32 = expected.float()
    accuracy = report.compare("kernel", "here", out, expected, fp32)
    assert accuracy.mismatches == 2
    assert accuracy.max_abs_error == (out.double() - fp32.double()).abs().max().item()
    a, b = out.double().flatten().numpy(), fp32.double().flatten().numpy()
    assert accuracy.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), abs=1e-12)


def test_rgb_basis_spans_the_largest_variance():
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([9.0, 1.0, 5.0, 0.1, 3.0])
    points = torch.randn(4000, 5, generator=generator) * scales + 7
    basis = report.fit_rgb(points.view(40, 100, 5))
    assert basis.components.abs().argmax(0).tolist() == [0, 2, 4]
    colours = basis(points)
    assert colours.shape == (4000, 3)
    assert 0 <= colours.min() < colours.max() <= 1
    # 98 of 100 points lie strictly between the percentiles that become 0 and 1.
    inside = ((colours > 0) & (colours < 1)).double().mean(0)
    torch.testing.assert_close(inside, torch.full((3,), 0.98, dtype=torch.float64), atol=0.002, rtol=0)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_no_text_of_the_picture_is_clipped_or_covered(count):
    """Measured by matplotlib's own renderer, with texts longer than the demo's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = report.draw_figure(
        [np.zeros((8, 8, 3))] * count,
        {name: torch.rand(count, 4, 4, 3) for name in ("FP8 kernel", "FP32 conv2d")},
        title="Patch embeddings: three principal components as red, green and blue, one basis for all",
        footnote="seeded random weights of SigLIP2 giant-opt-p16 (seed 123456). Kernel: emulator, sm_100a PTX; " * 2,
        names=["a photograph whose file has a very long name $x$"] * count,
    )
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    texts = [*figure.texts, *(text for axes in figure.axes for text in (axes.title, axes.yaxis.label))]
    boxes = [text.get_window_extent(renderer) for text in texts if text.get_text()]
    assert len(boxes) == 2 + 3 * (2 if count > 3 else 1) + count
    for box in boxes:
        assert min(box.x0, box.y0, figure.bbox.x1 - box.x1, figure.bbox.y1 - box.y1) >= 8  # pixels, of 150 per inch
    boxes += [axes.get_window_extent(renderer) for axes in figure.axes]
    for index, box in enumerate(boxes):
        for other in boxes[:index]:
            assert not (box.x0 < other.x1 and other.x0 < box.x1 and box.y0 < other.y1 and other.y0 < box.y1)


def test_console_output_fits_80_columns(capsys):
    """Tables wrap instead of being cut."""
    rows = [
        report.Accuracy("kernel", "emulator, sm_100a PTX", (8, 196, 768), 0, 0.147, 0.999),
        report.Accuracy("torch reference", "torch, CPU", (8, 196, 768), None, 0.147, 0.999),
    ]
    Console(width=80).print(report.accuracy_table(rows))
    printed = capsys.readouterr().out
    assert all(len(line) <= 80 for line in printed.splitlines())
    assert "…" not in printed
    # The reference is not compared with itself, which is not the same as no mismatch.
    (cells,) = [line.split("│") for line in printed.splitlines() if "bit mismatches" in line]
    assert cells[-2].strip() == "-"
