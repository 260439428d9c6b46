"""The part of the emulator that is in C: sources and headers, their compilation, the loaded library.

``state.h`` and what it includes declare every structure that C shares with Python, ``core.h`` every function that is
called from outside; `layout` reads them, so that nothing of them stands a second time. `build` compiles the sources,
and `library` loads the result.
"""
