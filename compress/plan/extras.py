"""Which packages are here, which are broken, and what each is needed for.

A package counts as working only when a fresh Python imports it: an installed package whose binary parts do not
fit this machine is common, and must cost only its own feature.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib import metadata

IMPORT_TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class Package:
    """A package `compress` uses.

    Attributes:
        name: as pip names it.
        module: as Python imports it.
        purpose: what does not work without it.
        install: the command that brings it.
        base: whether an ordinary installation of compress brings it.
    """

    name: str
    module: str
    purpose: str
    install: str
    base: bool = False


@dataclass(frozen=True)
class PackageState:
    """`version` is None when not installed; `broken` is the last line of the failed import."""

    package: Package
    version: str | None
    broken: str | None = None

    @property
    def works(self) -> bool:
        return self.version is not None and self.broken is None


PACKAGES: tuple[Package, ...] = (
    Package("torch", "torch", "everything that touches a weight", "pip install torch", base=True),
    Package("transformers", "transformers", "loading models", "pip install transformers", base=True),
    Package("safetensors", "safetensors", "weight files", "pip install safetensors", base=True),
    Package(
        "compressed-tensors",
        "compressed_tensors",
        "the compressed-tensors format",
        "pip install compressed-tensors",
        base=True,
    ),
    Package("datasets", "datasets", "data sets of the hub", "pip install datasets", base=True),
    Package("accelerate", "accelerate", "loading large models", "pip install accelerate", base=True),
    Package("scipy", "scipy", "confidence intervals", "pip install scipy", base=True),
    Package("bitsandbytes", "bitsandbytes", "bitsandbytes checkpoints", "pip install bitsandbytes", base=True),
    Package("lm-eval", "lm_eval", "published tasks", 'pip install "lm-eval[hf]"', base=True),
    Package("gptqmodel", "gptqmodel", "gptq checkpoints in transformers", "pip install gptqmodel"),
    Package("optimum", "optimum", "gptq checkpoints in transformers", "pip install optimum"),
    Package("vllm", "vllm", "serving with packed kernels", "pip install vllm"),
    Package("gguf", "gguf", "writing and reading GGUF files", "pip install gguf"),
    Package("xllamacpp", "xllamacpp", "running GGUF files in llama.cpp, also to prove them", "pip install xllamacpp"),
    Package(
        "sentence-transformers",
        "sentence_transformers",
        "encoders as sentence-transformers",
        "pip install sentence-transformers",
    ),
)

FORMAT_LOADERS: dict[str, dict[str, tuple[str, ...]]] = {
    "safetensors": {"transformers": ("torch", "transformers"), "vLLM": ("vllm",)},
    "compressed-tensors": {
        "transformers": ("torch", "transformers", "compressed-tensors"),
        "vLLM": ("vllm",),
    },
    "gptq": {"transformers": ("torch", "transformers", "gptqmodel", "optimum"), "vLLM": ("vllm",)},
    "gptq_v2": {"transformers": ("torch", "transformers", "gptqmodel", "optimum"), "vLLM": ("vllm",)},
    "gguf": {"llama.cpp": ("xllamacpp",)},
    "bitsandbytes": {
        "transformers": ("torch", "transformers", "accelerate", "bitsandbytes"),
        "vLLM": ("vllm", "bitsandbytes"),
    },
}
"""For each checkpoint format, who loads it and which packages that takes."""


def version_of(name: str) -> str | None:
    """The installed version of a package, without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_package(package: Package) -> PackageState:
    """Imports `package` in a fresh Python, so that a crash there is a finding and not our end."""
    version = version_of(package.name)
    if version is None:
        return PackageState(package, None)
    command = [sys.executable, "-c", f"import {package.module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return PackageState(package, version, f"import took longer than {IMPORT_TIMEOUT_SECONDS} s")
    if done.returncode == 0:
        return PackageState(package, version)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return PackageState(package, version, lines[-1] if lines else f"import ended with code {done.returncode}")


def check_packages(
    packages: tuple[Package, ...] = PACKAGES, *, advance: Callable[[float], None] = lambda _: None
) -> tuple[PackageState, ...]:
    """Checks all packages, a few at a time, in the order given; `advance(1)` after each."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        futures = [pool.submit(check_package, package) for package in packages]
        for _ in as_completed(futures):
            advance(1)
    return tuple(future.result() for future in futures)
