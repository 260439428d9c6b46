"""bench/image_variants.py without a GPU: its command line, comparison and table, with kernels in the emulator."""

from __future__ import annotations

import pytest
import torch

from bench import image_variants
from bench.image_cases import ImagesCase, ImagesData
from bench.image_variants import Variant, Variants
from bench.peers import Candidate, image_peers
from bench.timing import Run
from cute_kernels import Sm90ImagesConfig, Sm90PatchEmbedConfig
from tests.gpu import emulated

pytestmark = pytest.mark.usefixtures("few_input_sets")
CASE = ImagesCase("tiny", 2, 112, 16, 2, patch=14)


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--case base-p14 64 default raw_stages=3,order=image rows --case vit-b32:last 8 cluster=2 --launches 3"
    arguments = image_variants.parse_arguments(words.split())
    first, second = arguments.cases
    assert first.configs == {
        "default": None, "raw_stages=3,order=image": Sm90ImagesConfig(raw_stages=3, order="image"),
        "rows": Sm90PatchEmbedConfig(),
    }  # fmt: skip
    assert (first.case.patch, first.case.images, first.case.channels_last) == (14, 64, False)
    assert second.case.channels_last and second.configs == {"cluster=2": Sm90ImagesConfig(cluster=2)}
    assert arguments.launches == 3 and arguments.protocol.rounds == 3
    refused = "", "base-p14 64", "base-p14 x rows", "base-p14:first 64 rows", "no 64 rows", "base-p14 64 stages"
    for wrong in (*(f"--case {words}" for words in refused), "--case base-p14 64 rows --launches 0"):
        with pytest.raises(SystemExit) as stopped:
            image_variants.parse_arguments(wrong.split())
        assert stopped.value.code == 2
    assert "allowed: at least 1" in capsys.readouterr().err


def test_variants_compute_the_same_bits() -> None:
    one, wide = Sm90ImagesConfig(), Sm90ImagesConfig(tile_patches=7)
    configs = {"one kernel": one, "rows": Sm90PatchEmbedConfig(), "wide": wide}
    with emulated.device("sm_90a"):
        data = ImagesData(CASE, torch.device("cuda"))
        one, rows, wide = image_variants.prepare(Variants(CASE, configs), data, 2)
    assert one.differing == rows.differing == [0, 0]
    assert "source repack" in one.detail and "patchify in front" in rows.detail
    assert wide.launch is None and wide.differing == [] and "tile_patches = 7" in wide.detail


def test_launches_that_differ_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other launch has two other elements, one of them NaN."""
    count = iter(range(100))

    def build(data: ImagesData, config: object) -> Candidate:
        def launch(slot: int) -> torch.Tensor:
            out = torch.zeros(data.case.images, 4, 16, dtype=torch.bfloat16)
            if next(count) % 2:
                out[0, 0, 0], out[1, 3, 5] = 1.0, float("nan")
            return out

        return Candidate(launch)

    monkeypatch.setattr(image_peers, "build_ours", build)
    monkeypatch.setattr(image_variants, "_COMPARED", 1)
    data = ImagesData(CASE, torch.device("cpu"))
    (found,) = image_variants.prepare(Variants(CASE, {"default": None}), data, 4)
    assert found.differing == [0, 2, 0, 2]


def test_the_table_has_ratios_to_the_first_of_the_case_and_of_all() -> None:
    other = ImagesCase("other", 2, 32, 16, 2)

    def variant(case: ImagesCase, text: str, ms: float, differing: list[int]) -> Variant:
        runs = [Run("sustained", 0, 9, 2 * ms), Run("sustained", 1, 9, 2 * ms), Run("burst", 0, 5, ms)]
        return Variant(case, text, None, "", differing, runs)

    refused = Variant(CASE, "bad", None, "bad = 1 is not possible", [])
    rows = [variant(other, "a", 1.0, [0]), variant(CASE, "b", 2.0, [0]), variant(CASE, "c", 3.0, [0, 4, 5]), refused]
    lines = image_variants.table(rows)
    assert lines[3].split() == [
        *f"{CASE.name} | c".split(), "6.0000", "(3.0000)", "1.500", "(1.500)", "3.000", "(3.000)", "2", "of", "3,", "9",
    ]  # fmt: skip
    assert lines[4].endswith("bad = 1 is not possible") and lines[1].endswith("0 of 1, 0")
