"""`cute-kernels doctor`: this environment, and made-up ones with one thing wrong in each."""

from __future__ import annotations

import dataclasses
import os

import pytest

from cute_kernels.commands.cli import main
from cute_kernels.operations.runtime import environment as doctor

H200 = doctor.Gpu("NVIDIA H200", (9, 0), 132, 150_754_820_096)
HEALTHY = doctor.Environment(
    distributions={
        "torch": "2.11.0",
        "nvidia-cutlass-dsl": "4.8.1",
        "nvidia-cutlass-dsl-libs-base": "4.8.1",
        "nvidia-cutlass-dsl-libs-cu13": "4.8.1",
        "cuda-bindings": "13.3.1",
        "cuda-python": "13.3.1",
    },
    duplicates=(),
    driver="580.159.04",
    torch_cuda="13.0",
    gpus=(H200,),
    torch_error="",
    dsl_error=None,
    compiler="/usr/bin/cc",
    cache_directory=None,
)


def wrong(environment: doctor.Environment) -> list[tuple[str, str, str]]:
    return [(f.subject, f.text, f.remedy) for f in doctor.diagnose(environment) if f.status == "wrong"]


def changed(distributions: dict[str, str | None] | None = None, **facts) -> doctor.Environment:
    installed = HEALTHY.distributions | (distributions or {})
    kept = {name: version for name, version in installed.items() if version is not None}
    return dataclasses.replace(HEALTHY, distributions=kept, **facts)


def test_a_healthy_machine_has_nothing_wrong_and_is_described():
    assert wrong(HEALTHY) == []
    text = "\n".join(finding.text for finding in doctor.diagnose(HEALTHY))
    for fact in ("NVIDIA H200", "9.0", "132 multiprocessors", "140 GiB", "580.159.04", "2.11.0", "CUDA 13.0", "4.8.1"):
        assert fact in text


@pytest.mark.parametrize(
    ("environment", "subject", "text", "remedy"),
    [
        (
            changed({"nvidia-cutlass-dsl-libs-cu12": "4.8.1"}), "DSL runtime",
            "mixed: nvidia-cutlass-dsl-libs-cu12 4.8.1, nvidia-cutlass-dsl-libs-cu13 4.8.1",
            "'nvidia-cutlass-dsl[cu13]==4.8.1'",
        ),
        (
            changed({"nvidia-cutlass-dsl-libs-cu12": "4.8.1"}, torch_cuda="12.8"), "DSL runtime", "mixed",
            "--force-reinstall 'nvidia-cutlass-dsl==4.8.1'",
        ),
        (changed({"nvidia-cutlass-dsl-libs-cu13": None}), "DSL runtime", "none of", "pip install"),
        (changed({"nvidia-cutlass-dsl-libs-base": "4.7.0"}), "CuTe DSL", "libs-base is 4.7.0 beside", "pip install"),
        (changed({"nvidia-cutlass-dsl": None}), "CuTe DSL", "not installed", "4.8.1"),
        (changed(duplicates=("nvidia-cutlass-dsl-libs-cu13",)), "CuTe DSL", "more than once", "pip uninstall"),
        (changed(dsl_error="ImportError: no _cutlass_ir"), "CuTe DSL", "no _cutlass_ir", "--force-reinstall"),
        (changed({"cuda-python": "12.9.0"}), "cuda-bindings", "13.3.1 beside cuda-python 12.9.0", "--force-reinstall"),
        (
            changed({"cuda-bindings": "12.9.0", "cuda-python": "12.9.0"}), "cuda-bindings",
            "older than torch's CUDA 13.0", "'cuda-bindings>=13'",
        ),
        (changed({"cuda-bindings": None}), "cuda-bindings", "not installed", "pip install cuda-bindings"),
        (changed(driver="550.54.15"), "driver", "too old for CUDA 13", "580.65 or later"),
        (changed(gpus=(), torch_error="no device is visible"), "GPU", "no device is visible", "CUDA_VISIBLE_DEVICES"),
        (changed(gpus=(), torch_cuda=None), "GPU", "built without CUDA", "torch built for CUDA"),
        (
            changed({"torch": None}, gpus=(), torch_cuda=None, driver=None), "torch", "not installed",
            "pip install torch",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)  # fmt: skip
def test_one_fault_is_named_with_its_remedy(environment, subject, text, remedy):
    (finding,) = [f for f in wrong(environment) if f[0] == subject and text in f[1]]
    assert remedy in finding[2]
    assert len(wrong(environment)) == 1


def test_a_new_dsl_is_wrong_once_per_part():
    parts = {name: "4.9.0" for name in HEALTHY.distributions if name.startswith("nvidia-cutlass-dsl")}
    ((subject, text, remedy),) = wrong(changed(parts))
    assert subject == "CuTe DSL"
    assert "tested with 4.8.0, 4.8.1" in text
    assert "4.8.1" in remedy


def test_missing_extras_are_noted_with_what_they_are_for():
    found = {f.subject: f for f in doctor.diagnose(HEALTHY) if f.subject.startswith("extra")}
    assert {f.status for f in found.values()} == {"note"} and len(found) == 3
    assert "numpy, ml-dtypes, nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm" in found["extra emulator"].text
    assert found["extra hf"].remedy == "pip install 'cute-kernels[hf]'"

    complete = ("numpy", "ml-dtypes", "nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm", "pillow")
    found = {f.subject: f for f in doctor.diagnose(changed(dict.fromkeys(complete, "1.0")))}
    assert found["extra emulator"].status == "ok"
    assert found["extra hf"].text == "not installed: transformers; Hugging Face checkpoints need it"


@pytest.mark.parametrize(
    "environment",
    [
        changed(driver=None, gpus=(), torch_cuda=None),
        changed(gpus=(doctor.Gpu("NVIDIA A100", (8, 0), 108, 2**36),)),
        changed(compiler=None),
        changed({"nvidia-cutlass-dsl-libs-cu12": "4.8.1", "nvidia-cutlass-dsl-libs-cu13": None}, driver="525.60.13"),
    ],
    ids=["no GPU", "unsupported GPU", "no compiler", "oldest driver of CUDA 12"],
)
def test_what_only_limits_is_not_wrong(environment):
    assert wrong(environment) == []


def test_cache_that_others_may_write_is_wrong(tmp_path):
    environment = changed(cache_directory=tmp_path)
    tmp_path.chmod(0o700)
    assert wrong(environment) == []
    tmp_path.chmod(0o777)
    ((subject, text, remedy),) = wrong(environment)
    assert subject == "cache"
    assert "others may write it" in text
    assert f"chmod go-w {tmp_path}" in remedy


def test_the_command_agrees_with_this_environment(capsys, monkeypatch, tmp_path):
    """The suite runs, so CuTe DSL imports; a mixed installation or an old driver would be reported here too."""
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "kernels"))
    status = main(["doctor"])
    out = capsys.readouterr().out
    assert status == (1 if "\nwrong" in "\n" + out else 0)
    assert f"{tmp_path / 'kernels'}, not made yet" in out
    assert ("no NVIDIA driver" in out) == (not os.path.exists("/proc/driver/nvidia/version"))
    lines = {line.split()[1]: line for line in out.splitlines() if line[:5].strip()}
    assert {"Python", "driver", "torch", "CuTe", "DSL", "cuda-bindings", "cache"} <= set(lines)


def test_duplicate_distributions_are_seen(tmp_path, monkeypatch):
    for folder, version in (("a", "4.8.1"), ("b", "4.7.0")):
        info = tmp_path / folder / f"twice_installed-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: Twice.Installed\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path / folder)
    versions, duplicates = doctor._distributions()
    assert "twice-installed" in duplicates
    assert versions["twice-installed"] == "4.7.0", "the first on the path is the one that is imported"
