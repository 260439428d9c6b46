"""The machine that executes PTX.

`launch/` checks a launch and schedules its warps, `bytecode/` translates a kernel once (from the value graphs of
`graph/`), `units/` are the hardware units, `state/` their memories, registers and barriers. Hot paths are in
`cute_kernels.emulator.core`, in C.
"""
