"""The GPUs that this process would see, found in a child process: no CUDA state is left here.

A process that initialised CUDA cannot fork workers that use it, which is how engines start theirs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from kvtide.device.base import DeviceInfo
from kvtide.errors import DeviceError
from kvtide.units import MIB

__all__ = ["describe", "describe_visible", "uuid_of"]


def uuid_of(driver: Any, device: Any, name: str) -> str:
    """The UUID of a GPU or of a MIG slice, as `nvidia-smi -L` writes it."""
    import uuid as uuids

    # The first version gives the whole GPU's UUID for a slice; later bindings dropped it and
    # call the second one by its name.
    api = driver.api
    newest = "cuDeviceGetUuid_v2" if "cuDeviceGetUuid_v2" in dir(api) else "cuDeviceGetUuid"
    raw = driver.call(vars(api)[newest], device).bytes
    # A slice's UUID looks like any other; its name is "NVIDIA A100-SXM4-40GB MIG 1g.5gb".
    kind = "MIG" if " MIG " in name else "GPU"
    return f"{kind}-{uuids.UUID(bytes=bytes(raw))}"


def describe(driver: Any, device: Any) -> DeviceInfo:
    """What a device is, by an initialised driver, without a context."""
    api = driver.api
    name = driver.call(api.cuDeviceGetName, 256, device).split(b"\0")[0].decode()
    return DeviceInfo(
        uuid=uuid_of(driver, device, name),
        backend="cuda",
        name=name,
        total_bytes=int(driver.call(api.cuDeviceTotalMem, device)),
        granularity_bytes=2 * MIB,
    )


def describe_visible() -> list[DeviceInfo]:
    """All GPUs that a process started from this one would see, in its order.

    Raises
    ------
    DeviceError
        The driver or its bindings are missing, or it sees no GPU.
    """
    child = subprocess.run(
        [sys.executable, "-m", "kvtide.device.visible"], capture_output=True, text=True, check=False
    )
    if child.returncode:
        last = (child.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise DeviceError(f"no GPU can be used from here: {last}")
    return [DeviceInfo(**one) for one in json.loads(child.stdout)]


def _main() -> int:
    from dataclasses import asdict

    from kvtide.device.driver import Driver

    try:
        driver = Driver()
        devices = [
            driver.call(driver.api.cuDeviceGet, ordinal)
            for ordinal in range(driver.call(driver.api.cuDeviceGetCount))
        ]
        if not devices:
            raise DeviceError("the driver sees no GPU (is CUDA_VISIBLE_DEVICES empty?)")
        print(json.dumps([asdict(describe(driver, device)) for device in devices]))
    except DeviceError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
