"""How runs are executed: devices, workers, memory formats. None of it changes what a run is, nor its records' keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from segprox.errors import SegproxError
from segprox.models import ModelOptions, model_options
from segprox.naming import Name

EngineName = Literal["local", "ray"]
HOW = ("name", "device", "compile", "channels_last", "lean")  # options of a model that change no result


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How an evaluation is done.

    Args:
        engine: this machine, or a Ray cluster.
        workers: processes on this machine, or Ray actors.
        address: of the Ray cluster; what RAY_ADDRESS says if left out, else a new one on this machine.
        devices: where models go, workers taking turns; as the model's name says if left out.
        threads: of each worker.
        batch: images of one size that are attacked together.
        lean: hold only what the image's gradient needs; as the model's name says if left out, else where it pays.
        compile: torch.compile the model and small pieces of attacks.
        channels_last: the memory format of weights and images.
        look_every: how often, in queries, attacks that leave out images wait for the device to know which are done.
    """

    engine: EngineName = "local"
    workers: int = 1
    address: str | None = None
    devices: Sequence[str] = ()
    threads: int = 1
    batch: int = 1
    lean: bool | None = None
    compile: bool = False
    channels_last: bool = False
    look_every: int = 1

    def __post_init__(self) -> None:
        if self.engine == "local" and self.address is not None:
            raise SegproxError(f"the address {self.address} is one of a Ray cluster, which only the engine ray uses")
        if self.engine == "ray" and len(self.devices) > 1:
            raise SegproxError(f"Ray gives every worker a device of its own, but {len(self.devices)} devices are named")
        if self.engine == "local" and len(self.devices) > self.workers:
            raise SegproxError(
                f"{len(self.devices)} devices are named ({', '.join(self.devices)}), but only {self.workers} of them "
                "would be used: have as many workers"
            )

    def model_options(self, name: str, given: dict[str, Any], device: str | None = None) -> ModelOptions:
        """Options of a model: those of its name, of a run's settings (`given`), and of this execution, which win.

        An evaluation holds only what gradients need where that is much less, unless it is told otherwise.
        """
        own: dict[str, Any] = {} if self.lean is None else {"lean": self.lean}
        own |= {option: True for option in ("compile", "channels_last") if getattr(self, option)}
        device = device or next(iter(self.devices), None)
        own |= {} if device is None else {"device": device}
        return model_options(name, **({"lean": "auto"} | Name.parse(name).options | given | own))


HERE = Execution()  # this process, one thread, one image at a time
