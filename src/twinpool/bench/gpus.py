"""The GPUs of this machine, through NVML, where there are any."""

import contextlib

import pynvml


class Gpus:
    """Those that were found. `open_gpus` makes one."""

    def __init__(self, handles: list[object]) -> None:
        self._handles = handles

    def __len__(self) -> int:
        return len(self._handles)

    def busy_ratios(self) -> list[float]:
        """The share of the last moments in which each computed; without those that cannot tell."""
        found = []
        for handle in self._handles:
            with contextlib.suppress(pynvml.NVMLError):
                found.append(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        return found


def open_gpus() -> Gpus | None:
    """None without a driver or a GPU."""
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return None
    return Gpus(handles) if handles else None
