"""Ahead-of-time compilers for absent hardware.

They are libtpu for TPUs; the CUDA plugin, ptxas and libdevice for NVIDIA GPUs.
They describe devices to JAX that can be compiled for but not run on. Compiling takes place in a
separate process (`api/proofs.py`), because a compiler for absent hardware may terminate the process
that calls it.
"""

import ctypes.util
import importlib.util
import mmap
import os
import re
from pathlib import Path
from typing import Any

from meshwright.errors import CompilerError, ConfigError, by_class, reason_of
from meshwright.hardware.chips import CHIPS
from meshwright.hardware.targets import Target, format_size, refuse_announced, usable_chips

# JAX opens no TPU, several processes may compile at once, and libtpu does not query the cloud
# metadata server.
_TPU_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}

# Version 0.12 of the plugin terminates the process when it makes a Triton kernel of a scalar
# all-reduce. For a sort of 16,384 elements or more it asks CUB for the scratch space, which asks a
# device: cudaErrorInvalidDevice.
_GPU_FLAGS = (
    "--xla_gpu_unsupported_use_all_reduce_one_shot_kernel=false "
    "--xla_gpu_enable_cub_radix_sort=false"
)


def require_compiler(target: Target) -> None:
    """Raises CompilerError with the install command where the target's compiler is missing.

    Raises ConfigError for a chip that no compiler here knows.
    """
    refuse_announced(target, f"compiling for {target}")
    if target.name not in CHIPS:
        truth = "no installed compiler knows this chip; it can only be planned for"
        raise ConfigError(
            f"compiling for {target}",
            truth,
            f"use meshwright plan, or one of {', '.join(usable_chips())}",
        )
    if target.chip.on_torus:
        if importlib.util.find_spec("libtpu") is None:
            truth = "its compiler, the package libtpu, is not installed"
            raise CompilerError(
                "compiling for a TPU", truth, "pip install 'meshwright[tpu]' (no TPU is needed)"
            )
        return
    # Without ptxas or libdevice the compiler dies with signal 11 instead of raising an error.
    required = (("the CUDA plugin", _plugin()), *_cuda_tools().items(), ("cuDNN", _cudnn()))
    missing = [name for name, file in required if file is None]
    if missing:
        raise CompilerError(
            "compiling for an NVIDIA GPU",
            f"{' and '.join(missing)} cannot be found here",
            "pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm "
            "nvidia-cudnn-cu13 "
            "(no GPU is needed)",
        )


def compiler_environment(target: Target) -> dict[str, str]:
    """Returns the environment variables that the compiling process needs before it imports JAX."""
    if target.chip.on_torus:
        return _TPU_ENVIRONMENT
    ptxas = _cuda_tools()["ptxas"]
    assert ptxas is not None  # checked by require_compiler
    home = ptxas.parent.parent
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_cuda_data_dir={home} {_GPU_FLAGS}".strip()
    path = f"{ptxas.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "PATH": path,
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    }


def topology_devices(target: Target) -> list[Any]:
    """Returns the abstract devices of a target, which can be compiled for but not run on.

    Needs the variables of `compiler_environment` to be set before JAX is imported. Raises
    ConfigError for a topology that the compiler does not know.
    """
    from jax.experimental import topologies  # loads the compilers

    size = format_size(target.topology)
    try:
        if target.chip.on_torus:
            options: dict[str, Any] = {"topology_name": f"{target.chip.compiler}:{size}"}
            options |= {"num_slices": target.slices} if target.slices > 1 else {}
        else:  # one partition of hosts x GPUs
            options = {"target_config": gpu_target_config(target.name), "topology": f"1x{size}"}
        return list(topologies.get_topology_desc(platform=target.chip.platform, **options).devices)
    except Exception as error:
        raise by_class(
            error,
            ConfigError(
                f"target {target}",
                f"the compiler does not know this topology: {reason_of(error)}",
                f"use another size, such as {target.name}:"
                + "x".join(["4"] * len(target.topology)),
            ),
        ) from error


def _package(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations))) if locations else None


def _plugin() -> Path | None:
    folders = map(_package, ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"))
    files = (folder / "xla_cuda_plugin.so" for folder in folders if folder is not None)
    return next((file for file in files if file.is_file()), None)


def _cudnn() -> str | None:
    nvidia = _package("nvidia")
    libraries = sorted(nvidia.glob("cudnn/lib/libcudnn.so.9")) if nvidia else []
    return str(libraries[0]) if libraries else ctypes.util.find_library("cudnn")


def _cuda_tools() -> dict[str, Path | None]:
    """Finds ptxas and libdevice in NVIDIA's wheels, both in the same wheel where one has both."""
    tools: dict[str, Path | None] = {"ptxas": None, "libdevice": None}
    nvidia = _package("nvidia")
    for home in sorted(nvidia.iterdir(), reverse=True) if nvidia else ():
        ptxas, libdevice = home / "bin" / "ptxas", home / "nvvm" / "libdevice" / "libdevice.10.bc"
        if ptxas.is_file() and libdevice.is_file():
            return {"ptxas": ptxas, "libdevice": libdevice}
        tools["ptxas"] = tools["ptxas"] or (ptxas if ptxas.is_file() else None)
    return tools


def gpu_target_config(name: str) -> str:
    """Returns the GpuTargetConfigProto of a GPU as text, from the binary of the CUDA plugin.

    Raises CompilerError where the plugin has none.
    """
    file = _plugin()
    assert file is not None  # checked by require_compiler
    description = f'device_description_str: "{CHIPS[name].compiler}"'.encode()
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        end = content.find(description)
        if end < 0:
            truth = f"the CUDA plugin has no description of {CHIPS[name].compiler}"
            raise CompilerError(f"compiling for {name}", truth, "install a newer plugin")
        start = content.rfind(b"gpu_device_info {", 0, end)
        text = re.compile(rb"[\n\t\x20-\x7e]+").match(content, start)
        assert text is not None
        return text[0].decode()
