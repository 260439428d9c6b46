"""Integrations whose library is not installed say which one; `revert` and modules of this package do without."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from cute_kernels.models.nn import PatchOptions, convert_layer


@pytest.mark.parametrize(
    ("library", "package"), [("timm", "pip install timm"), ("open_clip", "pip install open_clip_torch")]
)
def test_the_library_is_named(library: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    integration = importlib.import_module(f"cute_kernels.models.{library}")
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    with pytest.raises(ModuleNotFoundError, match=f"this needs {library}: {package}$"):
        integration.convert(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 16, 16)))
    with pytest.raises(TypeError, match="model is str"):
        integration.convert("a name")
    model = torch.nn.Sequential(convert_layer(torch.nn.Conv2d(3, 8, 16, 16), PatchOptions()))
    assert type(integration.revert(model)[0]) is torch.nn.Conv2d
