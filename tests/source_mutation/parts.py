"""What is mutated, and which tests have to notice: those that run in seconds, the nearest first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A part of the package.

    Attributes:
        sources: folders and files to mutate.
        tests: files that judge a mutant, in this order; the first failure ends it.
    """

    sources: tuple[str, ...]
    tests: tuple[str, ...]


PARTS = {
    "plan": Part(
        ("cute_kernels/plan",),
        (
            "tests/plan/test_limits.py", "tests/plan/test_patch_embed_sm100.py", "tests/plan/test_gemm.py",
            "tests/plan/test_patch_embed_sm90.py", "tests/plan/test_images_sm90.py", "tests/plan/test_patchify.py",
            "tests/plan/test_images_gather.py", "tests/plan/test_images_sm100.py", "tests/kernels/test_graph.py",
            "tests/bench/test_tune.py", "tests/bench/test_tune_gemm.py",
            "tests/plan/test_gemm_choice.py",
        ),
    ),
    "operations": Part(
        ("cute_kernels/operations",),
        (
            "tests/operations/test_table.py", "tests/operations/test_patch_weight.py",
            "tests/operations/test_patch_embed.py", "tests/operations/test_patch_embed_arguments.py",
            "tests/operations/test_gemm.py", "tests/explore/tuning/test_functions.py",
            "tests/operations/runtime/test_repeat.py",
            "tests/operations/test_patch_embed_images.py", "tests/operations/test_emulator_backend.py",
        ),
    ),
    "runtime": Part(
        ("cute_kernels/operations/runtime", "cute_kernels/dsl/kernel_cache.py"),
        (
            "tests/operations/runtime/test_constants.py", "tests/operations/runtime/test_tuned.py",
            "tests/explore/tuning/test_functions.py", "tests/operations/runtime/test_repeat.py",
            "tests/operations/runtime/test_launch.py", "tests/dsl/test_kernel_cache.py",
            "tests/operations/test_patch_embed.py",
            "tests/operations/test_patch_embed_arguments.py",
            "tests/operations/test_gemm.py",
        ),
    ),
    "models": Part(
        ("cute_kernels/models/nn", "cute_kernels/models/transformers.py"),
        (
            "tests/models/nn/test_layers.py", "tests/models/nn/test_loading.py", "tests/models/nn/test_module.py",
            "tests/models/nn/test_changed_layers.py", "tests/models/nn/test_positions.py",
            "tests/models/nn/test_odd_inputs.py", "tests/models/test_stand_ins.py", "tests/models/test_families.py",
        ),
    ),
    "reports": Part(
        ("cute_kernels/emulator/reports",),
        ("tests/emulator/reports", "tests/emulator/checking/test_debugger.py", "tests/commands/test_check.py"),
    ),
    "launch": Part(
        ("cute_kernels/emulator/machine/launch",),
        ("tests/emulator/machine/launch", "tests/commands/test_check.py"),
    ),
    "recorded": Part(
        ("cute_kernels/emulator/programs/recorded.py",),
        ("tests/emulator/programs/test_recorded.py",),
    ),
}  # fmt: skip
