"""fp16 on a CPU whose oneDNN has none: torch computes it all the same, but DeepSpeed's CPU accelerator refuses."""

from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator


class HalfCPU(CPU_Accelerator):
    """The CPU, which says that it has fp16."""

    def is_fp16_supported(self) -> bool:
        """It is slow, and right."""
        return True


def allow_fp16_on_cpu() -> None:
    """Before the first engine of a process; nothing where there is a GPU."""
    if get_accelerator().device_name() == "cpu":
        set_accelerator(HalfCPU())
