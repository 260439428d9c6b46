"""Why survivors survive: file, line before, line after -> why nobody can tell the difference."""

from __future__ import annotations

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "cute_kernels/plan/images.py",
        'integers = p.precision == "int8"',
        'integers = p.precision >= "int8"',
    ): "no other name of a precision sorts behind int8",
    (
        "cute_kernels/plan/shared_operands.py",
        "fit = (plan.consumer_registers - ADDRESSING_REGISTERS) * 128 // plan.warpgroup_rows // 64 * 64",
        "fit = (plan.consumer_registers - ADDRESSING_REGISTERS) * 127 // plan.warpgroup_rows // 64 * 64",
    ): "200 registers at 64, 128, 192 or 256 rows are the same multiple of 64 columns",
    (
        "cute_kernels/plan/shared_operands.py",
        "fit = (plan.consumer_registers - ADDRESSING_REGISTERS) * 128 // plan.warpgroup_rows // 64 * 64",
        "fit = (plan.consumer_registers ^ ADDRESSING_REGISTERS) * 128 // plan.warpgroup_rows // 64 * 64",
    ): "240 ^ 40 is 216, and at 64, 128, 192 or 256 rows 216 registers are the same multiple of 64 columns as 200",
    (
        "cute_kernels/emulator/programs/recorded.py",
        'found.update(image.address.to_bytes(8, "little"))',
        'found.update(image.address.to_bytes( 9, "little"))',
    ): "addresses differ in nine bytes where they differ in eight",
    (
        "cute_kernels/emulator/programs/recorded.py",
        "several = math.prod(launch.grid) > math.prod(launch.cluster)",
        "several = math.prod(launch.grid) != math.prod(launch.cluster)",
    ): "a grid has whole clusters",
    (
        "cute_kernels/emulator/programs/recorded.py",
        "@dataclass(frozen=True)",
        "@dataclass(frozen=False)",
    ): "nobody assigns to a field",
}
