"""Drops or weakens synchronisation of a kernel's PTX, one instruction at a time, and sees whether that is noticed."""
