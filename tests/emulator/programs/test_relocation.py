"""Addresses in words of memory, moved and moved back."""

from __future__ import annotations

import numpy as np

from cute_kernels.emulator.programs.recorded import Relocation


def test_relocation_leaves_other_words_alone() -> None:
    relocation = Relocation(((0x7000, 0x90000, 16), (0x7FF0, 0x50, 8)))
    words = np.array([0x6FFF, 0x7000, 0x7010, 0x7011, 0x7FF4, 0x90000], np.uint64)
    moved = np.frombuffer(relocation.words(words.tobytes() + b"abc")[:-3], np.uint64)
    assert moved.tolist() == [0x6FFF, 0x90000, 0x90010, 0x7011, 0x54, 0x90000]
    back = np.frombuffer(relocation.words(moved.tobytes(), back=True), np.uint64)
    assert back.tolist() == [0x6FFF, 0x7000, 0x7010, 0x7011, 0x7FF4, 0x7000]
