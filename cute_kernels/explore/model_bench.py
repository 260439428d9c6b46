"""Models of transformers and timm, measured as their libraries have them and with this package's patch embedding."""

import copy
import importlib
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.modules.module import register_module_forward_pre_hook

from cute_kernels.explore.tuning import search
from cute_kernels.models import timm, transformers
from cute_kernels.models.nn.layers import EngineMixin

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_PRECISIONS = ("int8", "fp8", "bf16", "fp16")
"""Precisions, those that read the fewest bytes first: the order of choice where nothing was timed."""

_AS_GOOD = 1.5
"""Error in the tower over that of the library in the model's type, up to which a precision is as good as that."""

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Model:
    """A vision tower in FP32.

    ``tower``: of its library. ``call``: runs a tower; gives tokens, whose last dimension is a vector each. ``convert``:
    gives a tower this package's embedding, of a precision. ``raw``, ``normalised``: inputs of the tower, with uint8
    pixels and with those of its processor."""

    tower: torch.nn.Module
    call: Callable[[torch.nn.Module, Inputs], torch.Tensor]
    convert: Callable[[torch.nn.Module, str], torch.nn.Module]
    raw: Inputs
    normalised: Inputs


@dataclass
class Row:
    """Measurements of one embedding.

    ``name``: precision, or the library with its type. ``layer``, ``tower``: relative error of the first layer's result,
    and of the tower's. ``cosine``: least of the tower's tokens. ``layer_ms``, ``tower_ms``: times on a GPU. ``note``:
    why there is nothing to show, or what ran instead of a kernel."""

    name: str
    layer: float | None = None
    tower: float | None = None
    cosine: float | None = None
    layer_ms: float | None = None
    tower_ms: float | None = None
    note: str = ""


@dataclass
class Report:
    """Rows, the library first, and the device."""

    device: str
    rows: list[Row] = field(default_factory=list)

    @property
    def timed(self) -> bool:
        return self.rows[0].tower_ms is not None

    def choice(self) -> str:
        """The fastest precision whose error in the tower is like that of the library in the model's type."""
        library = self.rows[0]
        good = [row for row in self.rows[1:] if not row.note and row.tower <= _AS_GOOD * library.tower]
        if not good:
            return f"to choose: {library.name}; no precision has an error like its {library.tower:.1e} in the tower"
        best = min(good, key=lambda row: row.tower_ms) if self.timed else good[0]
        why = f"{best.tower_ms:.3f} ms, not {library.tower_ms:.3f}" if self.timed else "which reads the fewest bytes"
        return f"to choose: {best.name}, {why}; error in the tower {best.tower:.1e}, {library.name} {library.tower:.1e}"

    def lines(self) -> list[str]:
        """The table, in Markdown, and what to choose."""
        times = " first layer, ms | tower, ms |" if self.timed else ""
        lines = [
            f"| embedding, {self.device} | error of the layer | of the tower | tower's least cosine |{times}",
            "|---|---|---|---|" + "---|" * times.count(","),
        ]
        for row in self.rows:
            numbers = [(row.layer, ".1e"), (row.tower, ".1e"), (row.cosine, ".6f")]
            if self.timed:
                numbers += [(row.layer_ms, ".3f"), (row.tower_ms, ".3f")]
            cells = [f"{row.name} ({row.note})" if row.note else row.name]
            cells += ["" if value is None else format(value, form) for value, form in numbers]
            lines.append(f"| {' | '.join(cells)} |")
        if not self.timed:
            lines.append("No times: there is no GPU here, and those of a CPU say nothing of one.")
        return [*lines, self.choice()]


def load(name: str, files: Sequence[Path], batch: int, *, pretrained: bool = False) -> Model:
    """A model on the CPU, with photographs.

    ``name``: a directory of transformers with its processor, or a name of timm. ``files``: photographs, each as often
    as the batch takes; scikit-image's where there are none. ``batch``: images. ``pretrained``: a timm name's weights.
    Raises ModuleNotFoundError: no library for it; ValueError: a directory without a processor."""
    images = _photographs(files, batch)
    return _of_transformers(name, images) if Path(name).is_dir() else _of_timm(name, images, pretrained)


def _photographs(files: Sequence[Path], batch: int) -> list[Image.Image]:
    """Images for a batch, each as often as it takes."""
    if files:
        found = [Image.open(file).convert("RGB") for file in files]
    else:
        data = importlib.import_module("skimage.data")
        found = [Image.fromarray(getattr(data, name)()) for name in ("astronaut", "chelsea", "coffee", "rocket")]
    return list(itertools.islice(itertools.cycle(found), batch))


def _of_transformers(name: str, images: list[Image.Image]) -> Model:
    library = importlib.import_module("transformers")
    model = library.AutoModel.from_pretrained(name, dtype=torch.float32).eval()
    tower = getattr(model, "vision_model", model)
    try:
        processor = library.AutoImageProcessor.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"model {name!r} has no image processor beside it: {error}") from error

    def processed(**keywords: bool) -> Inputs:
        return dict(processor(images=images, return_tensors="pt", **keywords))

    def call(tower: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
        try:
            return tower(**inputs).last_hidden_state
        except TypeError as error:
            given = f"with what its processor makes ({', '.join(inputs)}): {error}"
            message = f"model {name!r}: {type(tower).__name__} cannot be called {given}"
            raise ValueError(message) from error

    return Model(
        tower,
        call,
        lambda tower, precision: transformers.convert(tower, precision, processor=processor),
        processed(do_rescale=False, do_normalize=False),
        processed(),
    )


def _of_timm(name: str, images: list[Image.Image], pretrained: bool) -> Model:
    try:
        library = importlib.import_module("timm")
    except ModuleNotFoundError as error:
        message = f"model {name!r} is no directory, and as a name it needs timm: pip install timm"
        raise ModuleNotFoundError(message) from error
    try:
        tower = library.create_model(name, pretrained=pretrained, num_classes=0).eval()
    except RuntimeError as error:  # a name that timm does not know
        raise ValueError(f"model {name!r}: {error}") from error
    config = library.data.resolve_model_data_config(tower)
    height, width = config["input_size"][1:]
    arrays = [np.asarray(image.resize((width, height), Image.Resampling.BICUBIC)) for image in images]
    raw = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous()
    mean, std = (torch.tensor(config[name])[:, None, None] for name in ("mean", "std"))
    return Model(
        tower,
        lambda tower, inputs: tower.forward_features(inputs["x"]),
        lambda tower, precision: timm.convert(tower, precision, mean=config["mean"], std=config["std"]),
        {"x": raw},
        {"x": (raw / 255 - mean) / std},
    )


@torch.no_grad()
def measured(model: Model, dtype_name: str, rounds: int) -> Report:
    """Errors of all precisions against the library in a type, ``"bf16"`` say, and on a GPU times of so many rounds.
    Raises ValueError: a model without a patch embedding that this package replaces."""
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", _DTYPES[dtype_name]
    report = Report(torch.cuda.get_device_name() if device == "cuda" else "CPU")
    path = _first_converted(model.convert(copy.deepcopy(model.tower), "bf16"))
    exact = _Run(model, copy.deepcopy(model.tower).to(device), path, model.normalised, torch.float32)
    expected = exact.layer_result, exact.result
    del exact
    for name in (f"library in {dtype_name}", *_PRECISIONS):
        row = Row(name)
        report.rows.append(row)
        tower = copy.deepcopy(model.tower).to(device, dtype)
        pixels = model.raw if name.startswith("int") else model.normalised
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                tower = tower if row is report.rows[0] else model.convert(tower, name)
                run = _Run(model, tower, path, pixels, dtype)
        except (ValueError, NotImplementedError) as error:
            row.note = f"not possible: {error}"
            continue
        row.note = "plain torch ran" if any("plain torch module runs" in str(each.message) for each in caught) else ""
        row.layer, _ = _agreement(run.layer_result, expected[0])
        row.tower, row.cosine = _agreement(run.result, expected[1])
        if device == "cuda":
            timers = {"layer": search.call_timer(run.layer), "tower": search.call_timer(run.tower)}
            times = search.interleaved(timers, rounds)
            row.layer_ms, row.tower_ms = times["layer"], times["tower"]
    return report


def _first_converted(tower: torch.nn.Module) -> str:
    """Where the module is that runs the kernels."""
    return next(path for path, module in tower.named_modules() if isinstance(module, EngineMixin))


class _Run:
    """A tower with its inputs on a device, and its first layer with what the tower gives it."""

    def __init__(self, model: Model, tower: torch.nn.Module, path: str, inputs: Inputs, dtype: torch.dtype) -> None:
        device = next(tower.parameters()).device
        inputs = {name: value.to(device) for name, value in inputs.items()}
        inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
        module, seen = tower.get_submodule(path), []
        # A hook of the layer's own would be an adapter, in front of which raw pixels are normalised.
        hook = register_module_forward_pre_hook(lambda each, given: seen.append(given) if each is module else None)
        self.tower = lambda: model.call(tower, inputs)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # plain torch runs under a hook
                self.tower()
        finally:
            hook.remove()
        self.result = _without_padding(self.tower(), inputs)
        self.layer: Callable[[], Any] = lambda: module(*seen[0])
        self.layer_result = _without_padding(self.layer(), inputs)


def _without_padding(result: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """The tokens that a model does not hide: raw pixels of padding are black, and normalised ones grey."""
    mask = inputs.get("pixel_attention_mask")
    return result if mask is None or mask.shape != result.shape[:2] else result[mask.bool()]


def _agreement(got: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Norm of the difference over the norm, and the least cosine of vectors along the last dimension."""
    got, expected = got.double().cpu(), expected.double().cpu()
    cosine = torch.nn.functional.cosine_similarity(got, expected, dim=-1).min()
    return float((got - expected).norm() / expected.norm()), float(cosine)
