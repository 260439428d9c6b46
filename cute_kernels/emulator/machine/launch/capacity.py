"""How many clusters of a launch a chip holds at once."""

from cute_kernels.common.chips import chip_of


def ctas_of_multiprocessor(target: str, threads: int, shared_bytes: int, registers: int | None) -> int:
    """How many CTAs of a launch a multiprocessor holds at once; arguments as of `capacity`."""
    chip = chip_of(target)
    threads = -(-threads // 32) * 32
    fit = [chip.ctas, chip.threads // threads, chip.sm_smem_bytes // shared_bytes]
    if registers is not None:
        fit.append(chip.register_file // (registers * threads))
    return min(fit)


def capacity(target: str, ctas: int, threads: int, shared_bytes: int, registers: int | None) -> int:
    """How many clusters the chip of a target holds at once, 1 at least. ``target``: of the PTX, e.g. ``"sm_90a"``.
    ``ctas``: of a cluster. ``threads``, ``shared_bytes``: of a CTA, with the system's shared memory. ``registers``: of
    a thread, None where the PTX does not say so and they count for nothing."""
    held = ctas_of_multiprocessor(target, threads, shared_bytes, registers)
    return max(sum(count * held // ctas for count in chip_of(target).gpcs if ctas <= count), 1)
