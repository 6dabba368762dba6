"""Weights from files, without executing anything that is in them."""

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from segprox.errors import SegproxError, told
from segprox.text import is_file

# Where training frameworks put the weights in what they save.
WEIGHTS_UNDER = ("state_dict", "model_state_dict", "model_state", "model")
# What data-parallel training puts before every key.
PREFIXES = ("module.",)
# numpy's scalars and arrays, which training frameworks save beside weights. Unpickling them runs nothing else.
_NUMPY_MAKERS: list[Any] = [np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]]
NUMPY_METADATA: list[Any] = [
    np.ndarray, np.dtype,
    *(type(np.dtype(kind)) for kind in ("f2", "f4", "f8", "i4", "i8", "u1", "bool")),
    *_NUMPY_MAKERS,
    *((make, f"numpy.core.multiarray.{make.__name__}") for make in _NUMPY_MAKERS),  # as numpy 1 called their module
]  # fmt: skip


class _Inert:
    """Stands in for what a framework saves beside weights and nobody here needs: it takes anything and does nothing."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


# The logs that mmengine's runner saves hold bound methods, which a pickle makes by getattr: a dangerous function.
# Neither it nor their class is ever looked up; both names mean the stand-in.
STAND_INS = ("mmengine.logging.history_buffer.HistoryBuffer", "builtins.getattr")


class Checkpoint(NamedTuple):
    """What a file of weights holds."""

    weights: dict[str, Tensor]
    meta: Mapping[str, Any]  # what its framework wrote about it; empty for most


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a safetensors file, or what `torch.save` wrote as far as that is plain data.

    A pickle that names anything else than torch's own classes, `NUMPY_METADATA` and `STAND_INS` is refused.
    """
    if not is_file(path):
        raise SegproxError(f"there is no checkpoint {path}")
    try:
        if path.suffix == ".safetensors":
            return Checkpoint(load_file(path), {})
        with torch.serialization.safe_globals([*NUMPY_METADATA, *((_Inert, name) for name in STAND_INS)]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "GLOBAL" in str(error):
            raise SegproxError(
                f"{path} holds more than weights ({_named_in(error)}) and loading it could run code; if you trust it, "
                "load it with torch.load(..., weights_only=False) and save its state_dict with safetensors"
            ) from None
        raise SegproxError(f"{path} is neither a safetensors file nor what torch.save writes") from None
    except Exception as error:  # what torch's reader raises depends on the bytes it meets
        raise SegproxError(f"{path} is not a checkpoint that can be read: {told(error)}") from None
    return _unwrap(content, path)


def load_weights(network: nn.Module, checkpoint: Checkpoint, path: Path, *, optional: Iterable[str] = ()) -> None:
    """Put weights from a path into a network; every one must find its place.

    Keys with an `optional` prefix may be missing on either side, such as those of heads used in training only.
    """
    passed = tuple(optional)
    own = network.state_dict()
    given = {key: value for key, value in checkpoint.weights.items() if key in own or not key.startswith(passed)}
    missing = [k for k in own if k not in given and not k.startswith(passed) and not k.endswith("num_batches_tracked")]
    unknown = [key for key in given if key not in own]
    differing = [key for key in given if key in own and given[key].shape != own[key].shape]
    if missing or unknown or differing:
        kinds = (("are missing", missing), ("are unknown to it", unknown))
        parts = [f"{len(keys)} weights {what} (such as {keys[0]})" for what, keys in kinds if keys]
        for key in differing[:1]:
            shapes = f"{list(given[key].shape)} in the file, {list(own[key].shape)} in the model"
            parts.append(f"{len(differing)} have another shape (such as {key}: {shapes})")
        raise SegproxError(f"{path} does not fit the model: {'; '.join(parts)}")
    network.load_state_dict(given, strict=False)


def _unwrap(content: Any, path: Path) -> Checkpoint:
    meta = content.get("meta", {}) if isinstance(content, Mapping) else {}
    for key in WEIGHTS_UNDER:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise SegproxError(
            f"{path} holds no weights: a state_dict is expected, by itself or under {', '.join(WEIGHTS_UNDER)}"
        )
    weights = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
    for key, value in weights.items():
        if value.layout != torch.strided or value.is_meta or value.is_quantized or value.is_complex():
            kind = "without values" if value.is_meta else f"{value.dtype} with layout {value.layout}"
            raise SegproxError(f"{path}: the weight {key} must be a plain tensor of real numbers but is {kind}")
    for prefix in PREFIXES:
        if all(key.startswith(prefix) for key in weights):
            weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    return Checkpoint(weights, meta if isinstance(meta, Mapping) else {})


def _named_in(error: Exception) -> str:
    """The class that torch refused to unpickle."""
    words = str(error).split("GLOBAL ")[-1].split() if "GLOBAL " in str(error) else []
    return words[0] if words else "an unknown class"
