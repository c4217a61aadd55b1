"""What is installed, and which devices there are: `python -m terrazzo.deepspeed.env_report`, as `ds_report` prints."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

import terrazzo
from terrazzo.deepspeed.git_version_info import version as api_version


def report() -> str:
    """The report, one line for each fact."""
    device = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    backends = [name for name in ("gloo", "nccl", "xccl", "mpi") if dist.is_backend_available(name)]
    facts = {
        "terrazzo": f"{terrazzo.__version__}, with the API of DeepSpeed {api_version}",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "python": f"{platform.python_version()} on {platform.platform()}",
        "devices": f"{count} of {device.type}" if device is not None and count else "no accelerator",
        "backends": ", ".join(backends),
        "offload": "optimizer state to the CPU or NVMe, by threads, without libaio and GDS; parameters to the CPU",
        **{name: _version(name) for name in ("deepspeed", "transformers", "accelerate", "peft", "pydantic", "hjson")},
    }
    return "\n".join(f"{name:<14}{fact}" for name, fact in facts.items())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def main() -> None:
    """Print the report."""
    print(report())


cli_main = main

if __name__ == "__main__":
    main()
