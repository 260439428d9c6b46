"""Vision models with the kernels of this package in place of their own layers.

`transformers`, `timm`, `open_clip` and `vllm` replace layers in models of these libraries; each module imports
its library when it is used. `nn/` has the layers.
"""
