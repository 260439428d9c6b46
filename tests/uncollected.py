"""Imported first by the server of `tests.processes`: it collects no garbage while it imports what stays."""

import gc

gc.disable()
