"""Random numbers of a model that draws them: from a seed, and without a trace in the process's own."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np
import torch


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Random numbers from a seed within the block, and afterwards the process's own as if nothing had been drawn.

    Those of torch, on the CPU and on `device`, of NumPy and of Python: defences draw sizes from any of them.
    """
    python, numpy = random.getstate(), np.random.get_state()  # the global one is what a model may use
    host = torch.default_generator.get_state()
    try:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed all devices
        np.random.seed(seed % 2**32)
        random.seed(seed)
        with nullcontext() if device.type == "cpu" else _seeded_accelerator(device, seed):
            yield
    finally:
        torch.default_generator.set_state(host)
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def _seeded_accelerator(device: torch.device, seed: int) -> Iterator[None]:
    """The same for the device's own generator, also on MPS, whose one device has no number in older torch."""
    module = torch.get_device_module(device)
    chosen = partial(module.device, device) if hasattr(module, "device") else nullcontext
    with chosen():
        state = module.get_rng_state()
        module.manual_seed(seed)
    try:
        yield
    finally:
        with chosen():
            module.set_rng_state(state)
