"""Settings of the whole suite: reproducible hypothesis runs, and one torch thread per worker process."""

from __future__ import annotations

import os

import hypothesis
import torch

# Tests that emulate a kernel take seconds, so the time of an example says nothing. HYPOTHESIS_PROFILE=thorough draws
# fresh and more examples.
hypothesis.settings.register_profile("default", deadline=None, max_examples=25, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=400, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Tests compile what they test, and leave the user's cache alone.
os.environ["CUTE_KERNELS_CACHE_DIR"] = "off"

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
