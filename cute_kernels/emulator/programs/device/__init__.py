"""The device "cuda" of emulated programs: a kind of device of torch whose memory is memory of the host.

* ``device.cpp`` and its headers: memory, device guard and hooks, operators, graphs; compiled for the torch at hand.
* `building`: compiles it, once for each version of torch.
* `operators`: operators that torch has for CUDA only, in Python.
* `answers`: facts of the chip, for cuda-python's driver and runtime and for CuTe DSL.
* `torch_names`: what ``torch.cuda`` asks of torch's own C++.
* `memory_statistics`: what torch's allocator says of the device's memory.
* `cuda_device`: the device of one program.
"""
