"""Optional dependencies: what belongs to which extra of the package, and what is said where it is missing.

Launches on a GPU and the reference on a CPU need none of them. Nothing else of the package is imported here.
"""

import importlib.util
from collections.abc import Iterable

_EMULATOR = {"numpy": "numpy", "ml_dtypes": "ml-dtypes"}
_IMAGES = {"numpy": "numpy", "PIL": "pillow"}
_DEMO = {**_EMULATOR, **_IMAGES, "matplotlib": "matplotlib", "skimage": "scikit-image"}

EXTRAS = {
    "emulator": _EMULATOR,
    "demo": _DEMO,
    "explore": {**_EMULATOR, "jupyterlab": "jupyterlab"},
    "hf": {**_IMAGES, "transformers": "transformers"},
    "dask": {"distributed": "distributed"},
    "ray": {"ray": "ray", "grpc": "grpcio"},
    "testing": {**_EMULATOR, "pytest": "pytest", "hypothesis": "hypothesis"},
}
"""Extra -> module -> the distribution that has it. ``emulator`` also brings the programs cuobjdump and nvdisasm."""


class MissingExtra(ModuleNotFoundError):
    """An optional dependency is not installed."""


def missing(extra: str, modules: Iterable[str] | None = None) -> list[str]:
    """Distributions of an extra that are not installed. ``extra``: a key of `EXTRAS`; ``modules``: those to look for;
    all of the extra when None."""
    return [EXTRAS[extra][module] for module in modules or EXTRAS[extra] if not _is_there(module)]


def require(extra: str, user: str, modules: Iterable[str] | None = None) -> None:
    """Checks that an extra, a key of `EXTRAS`, is installed, without importing it; ``user`` is what needs it, the
    subject of the message. Raises MissingExtra: naming what is missing and what to install."""
    names = missing(extra, modules)
    if names:
        raise MissingExtra(f"{user} needs {', '.join(names)}: {how_to_install(extra)}")


def how_to_install(extra: str) -> str:
    return f"pip install 'cute-kernels[{extra}]'"


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
