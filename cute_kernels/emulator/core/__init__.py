"""What the emulator does in C: sources and headers, their compilation, the loaded library.

``state.h`` declares every structure that C shares with Python and with the code that LLVM makes of a kernel, ``core.h``
every function that is called from outside; `layout` reads both, so that nothing of them stands a second time. `build`
compiles the sources, `library` loads the result.
"""
