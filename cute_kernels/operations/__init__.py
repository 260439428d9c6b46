"""Operators that users call on tensors, one module for each: arguments, their checks, operands, sharding.

`base` has what all operators share. `compile` turns a plan into machine code, `runtime/` launches it on a GPU or in the
emulator and keeps what a repeated call needs, `reference/` computes the right result in plain torch.
"""
