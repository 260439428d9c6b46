"""Comparing configurations of kernels: tables, notebooks, figures, profiles, machine code, tuning on a GPU.

This is the room that knows both halves: it plans and runs kernels, and has the emulator count what they do.
"""
