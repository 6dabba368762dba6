"""Random numbers of a model that draws them: from a seed, and without a trace in the process's own."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Random numbers from a seed within the block, and afterwards the process's own as if nothing had been drawn.

    Those of torch, on the CPU and on `device`, of NumPy and of Python: defences draw sizes from any of them.
    """
    python, numpy = random.getstate(), np.random.get_state()  # the global one is what a model may use
    accelerator = device.type != "cpu"
    try:
        with torch.random.fork_rng([device] if accelerator else [], device_type=device.type if accelerator else "cuda"):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed all devices
            if accelerator:
                module = torch.get_device_module(device)
                with module.device(device) if hasattr(module, "device") else nullcontext():
                    module.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
