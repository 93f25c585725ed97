"""Print versions, and build the kernels where they are not built.

    python benchmarks/gpu/build.py [--dry] [--for 9.0]

``--for`` builds for a compute capability that is not here, with this machine's nvcc and a torch for CUDA, into
``TORCH_EXTENSIONS_DIR``. The folder serves machines with the same torch and such GPUs, and spares them the minutes.
"""

import argparse
import sys
import time
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from quant.kernels import build_kernels as kernels
from quant.kernels import operators  # noqa: F401  (which the library implements)


def main() -> None:
    """Build; exit code 1 where that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="for the CPU alone")
    parser.add_argument("--for", dest="capability", help="a compute capability, like 9.0")
    options = parser.parse_args()
    names = ("torch", "transformers", "deepspeed")
    print(", ".join(f"{name} {version(name)}" for name in names), f"CPU {torch.backends.cpu.get_cpu_capability()}")
    if options.capability:
        pretend(options.capability)
    elif not options.dry:
        found = torch.cuda.get_device_properties(0)
        print(f"GPU {found.name}, {found.total_memory / 2**30:.0f} GiB, {found.multi_processor_count} multiprocessors")
        print(f"compute capability {found.major}.{found.minor}, CUDA {torch.version.cuda}")
    began = time.perf_counter()
    built = kernels.Build(kernels._compiled(cuda=True), True, "") if options.capability else kernels.build()
    print(f"built {built.library} in {time.perf_counter() - began:.0f} s, for CUDA: {built.cuda}. {built.why[-2500:]}")
    sys.exit(built.library is None or not (built.cuda or options.dry))


def pretend(capability: str) -> None:
    """Make torch say that one GPU of this compute capability is here; for a process that computes nothing."""
    major, minor = map(int, capability.split("."))
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_capability = lambda device=None: (major, minor)


if __name__ == "__main__":
    main()
