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

from cute_kernels.commands.cli import main
from cute_kernels.models.siglip import demo
from cute_kernels.models.siglip import demo_report as report
from tests.nightly import nightly


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
    status = main(["demo", "--images", *paths, "--image-size", "48", "--output", str(output)])
    printed = capsys.readouterr().out
    assert status == 0
    assert "seeded random weights of SigLIP2 base-p16" in printed
    assert len(re.findall(r"│ 0\s+of\s+13,824", printed)) >= 2  # 2 images x 9 positions x 768 features
    for precision, pixels in (("int8", "uint8 images"), ("fp8", "E4M3 rows")):
        assert f"{precision}, {pixels.split()[0]}" in printed
        assert f"{precision}: the emulator executed" in printed
    # What no kernel takes yet is computed all the same, and said so.
    without_kernel = r"no kernel of sm_100a .*plain torch instead"
    assert re.search(f"bf16: (the emulator executed|{without_kernel})", " ".join(printed.split()))
    (line,) = [line for line in printed.splitlines() if "relative error" in line]
    int8, fp8, bf16 = (float(number) for number in re.findall(r"([\d.]+)%", line))
    assert 0.1 < bf16 < int8 < 2 and int8 < fp8 < 6
    assert "2 square crops" in printed
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


@nightly
def test_demo_of_the_sm90_kernel(tmp_path, capsys):
    output = tmp_path / "out.png"
    settings = ["--precision", "fp8", "--set", "warpgroups=1", "--set", "tile_rows=16", "--set", "cluster=1"]
    arguments = ["demo", "--arch", "sm_90a", *settings, "--images", *write_photos(tmp_path, 1)]
    assert main([*arguments, "--image-size", "32", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"0\s+of\s+3,072", printed)  # 4 positions x 768 features
    assert "emulator, sm_90a PTX" in printed
    assert output.is_file()


def test_demo_of_the_sm90_kernel_of_images(tmp_path, capsys):
    """With a setting of that kernel, a timeline, and nothing of the other precisions."""
    output, trace = tmp_path / "out.png", tmp_path / "trace.json"
    arguments = ["demo", "--arch", "sm_90a", "--precision", "int8", "--set", "tile_images=16"]
    arguments += ["--images", *write_photos(tmp_path, 1), "--image-size", "32", "--trace", str(trace)]
    assert main([*arguments, "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"0\s+of\s+3,072", printed) and "emulator, sm_90a PTX" in printed
    assert "fp8" not in printed and "bf16" not in printed
    assert output.is_file() and trace.stat().st_size > 1000


@pytest.mark.parametrize("option", [["--set", "stages=4"], ["--trace", "trace.json"]])
def test_options_of_one_kernel(option, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--precision", "int8", "fp8", *option]) == 2
    assert f"{option[0]} is for one kernel: give one --precision, of int8, fp8" in capsys.readouterr().err


def test_uint8_pixels_are_the_processors(tmp_path):
    """Normalised, they are what the model's processor makes."""
    (path,) = write_photos(tmp_path, 1)
    _, photos = demo._load_photographs([path])
    prepare = demo.siglip.Preprocessing((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    raw = prepare.resized(photos, 32)
    assert raw.dtype == torch.uint8 and raw.shape == (1, 3, 32, 32)
    expected = np.asarray(photos[0].resize((32, 32), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    assert np.array_equal(raw[0].numpy(), expected)
    mean, std = (np.array(value)[:, None, None] for value in ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)))
    np.testing.assert_allclose(prepare.normalised(raw)[0].numpy(), (expected / 255 - mean) / std, atol=1e-6)


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


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_a_single_wrong_bit_fails_the_demo(precision, tmp_path, capsys, monkeypatch):
    emulate = demo.Candidate.emulate

    def off_by_one_bit(*arguments):
        out, done = emulate(*arguments)
        out.view(torch.int16)[0, 4, 100] ^= 1
        return out, done

    monkeypatch.setattr(demo.Candidate, "emulate", off_by_one_bit)
    arguments = ["demo", "--precision", precision, "--image-size", "48"]
    arguments += ["--images", *write_photos(tmp_path, 1)]
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
    assert accuracy.relative_error == pytest.approx(float((out - expected).norm() / fp32.norm()), rel=1e-3)
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


@pytest.mark.parametrize("maps", [
    ("FP8 kernel", "FP32 conv2d"),
    ("int8, uint8 images\n0.82% off FP32", "fp8, E4M3 rows\n3.66% off FP32", "bf16, uint8 images\n0.24% off", "FP32"),
])  # fmt: skip
@pytest.mark.parametrize("count", [1, pytest.param(3, marks=nightly), pytest.param(5, marks=nightly), 8])
def test_no_text_of_the_picture_is_clipped_or_covered(count, maps):
    """Measured by matplotlib's own renderer, with texts longer than the demo's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = report.draw_figure(
        [np.zeros((8, 8, 3))] * count,
        {name: torch.rand(count, 4, 4, 3) for name in maps},
        title="Patch embeddings: three principal components as red, green and blue, one basis for all",
        footnote="seeded random weights of SigLIP2 giant-opt-p16 (seed 123456). Kernel: emulator, sm_100a PTX; " * 2,
        names=["a photograph whose file has a very long name $x$"] * count,
    )
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    texts = [*figure.texts, *(text for axes in figure.axes for text in (axes.title, axes.yaxis.label))]
    boxes = [text.get_window_extent(renderer) for text in texts if text.get_text()]
    assert len(boxes) == 2 + (1 + len(maps)) * (2 if count > 3 and len(maps) == 2 else 1) + count
    for box in boxes:
        assert min(box.x0, box.y0, figure.bbox.x1 - box.x1, figure.bbox.y1 - box.y1) >= 8  # pixels, of 150 per inch
    boxes += [axes.get_window_extent(renderer) for axes in figure.axes]
    for index, box in enumerate(boxes):
        for other in boxes[:index]:
            assert not (box.x0 < other.x1 and other.x0 < box.x1 and box.y0 < other.y1 and other.y0 < box.y1)


def test_console_output_fits_80_columns(capsys):
    """Tables wrap instead of being cut."""
    rows = [
        report.Accuracy("int8, uint8 images", "emulator, sm_100a PTX", (8, 196, 768), 0, 0.01, 0.147, 0.999),
        report.Accuracy("fp8, E4M3 rows", "emulator, sm_100a PTX", (8, 196, 768), 0, 0.01, 0.147, 0.999),
        report.Accuracy("bf16, uint8 images", "torch, CPU", (8, 196, 768), None, 0.01, 0.147, 0.999),
    ]
    Console(width=80).print(report.accuracy_table(rows))
    printed = capsys.readouterr().out
    assert all(len(line) <= 80 for line in printed.splitlines())
    assert "…" not in printed
    # The reference is not compared with itself, which is not the same as no mismatch.
    (cells,) = [line.split("│") for line in printed.splitlines() if "bit mismatches" in line]
    assert cells[-2].strip() == "-"
