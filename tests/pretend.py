"""A pretend accelerator: tensors that say they live on `cuda:0`, `cuda:1` or `mps:0`, and compute on the CPU.

Within `PretendDevice()` such devices exist. Tensors of two devices that meet in one operation raise an error, as the
real devices do. Every wait of the host for the device and every operation that would launch a kernel is counted, with
the line of the package that caused it.

A tensor of the device is a wrapper around one of the CPU. To torch's C++ parts its device is `meta:i`, which every
build of torch has, so that autograd, copies, indices and factories all pass through here.
"""

import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _correct_storage_aliasing, get_alias_info
from torch.utils._pytree import tree_flatten, tree_map_only

aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
SHAPED_BY_VALUES = {  # the host waits for them, because it must know the shape of the result
    aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_dim.default,
    aten.unique_consecutive.default, aten.bincount.default, aten.repeat_interleave.Tensor, aten.equal.default,
}  # fmt: skip
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
WITHOUT_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"}
WITH_HOST_SCALARS = {  # operations that take a tensor of the host with a single value beside tensors of the device
    "add", "sub", "rsub", "mul", "div", "floor_divide", "remainder", "fmod", "pow", "eq", "ne", "lt", "le", "gt", "ge",
    "maximum", "minimum", "bitwise_and", "bitwise_or", "where", "masked_fill", "fill", "lerp", "logical_and",
    "logical_or", "index_put",
}  # fmt: skip
AUTOCAST = {torch.nn.functional.conv2d, torch.nn.functional.conv_transpose2d, torch.nn.functional.linear, torch.matmul}
NOT_DETERMINISTIC = {  # what torch refuses on CUDA where deterministic algorithms are asked for
    "_adaptive_avg_pool2d_backward": "adaptive_avg_pool2d_backward_cuda",
    "reflection_pad2d_backward": "reflection_pad2d_backward_cuda", "cumsum": "cumsum_cuda_kernel",
}  # fmt: skip
FROM_DATA = {torch.tensor, torch.as_tensor, torch.Tensor.new_tensor}


class PretendTensor(torch.Tensor):
    """A tensor of the pretend device around one of the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held, index):
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            layout=held.layout, device=torch.device("meta", index), requires_grad=False,
        )  # fmt: skip
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return PretendDevice.current.run(func, args, kwargs or {})

    @property
    def device(self):
        return torch.device(PretendDevice.current.kind, torch.Tensor.device.__get__(self).index)

    is_cuda = property(lambda self: self.device.type == "cuda")
    is_mps = property(lambda self: self.device.type == "mps")
    is_meta = property(lambda self: False)

    def numpy(self, **_):
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")

    def __array__(self, *_, **__):
        return self.numpy()

    def tolist(self):
        return self.cpu().tolist()

    def __repr__(self, **_):
        return f"pretend({self.held!r}, device={self.device})"

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, value):
        torch.Tensor.data.__set__(self, value)
        self.held = value.held


def _pinned(values):
    """A copy of a tensor of the host in memory from which a device copies by itself; a pinned one itself."""
    if not getattr(values, "pinned", False):
        values = values.clone()
        values.pinned = True
    return values


def _caller(package="/segprox/"):
    """The innermost line of the package, as file:line."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if package in name and "/tests/" not in name:
            return f"{name.rsplit(package, 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


class _Names(TorchFunctionMode):
    """Translates names of devices on their way into torch, and lowers precision where autocast would."""

    def __init__(self, owner):
        super().__init__()
        self.owner = owner

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in FROM_DATA:
            return self._from_data(func, args, kwargs)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and isinstance(args[0], PretendTensor):
            return func(args[0], self._indices(args[1], args[0].device), *args[2:], **kwargs)
        args, kwargs = tree_map_only(torch.device, self.owner.inside, (args, kwargs))
        if isinstance(kwargs.get("device"), str):
            kwargs["device"] = self.owner.inside(kwargs["device"])
        if func is torch.Tensor.cuda:
            func, args = torch.Tensor.to, (args[0], self.owner.inside(self.owner.kind))
        elif func is torch.Tensor.to:
            args = tuple(self.owner.inside(value) if isinstance(value, str) else value for value in args)
        if func in AUTOCAST and self._lowered(args):
            lower = torch.get_autocast_dtype(self.owner.kind)
            args, kwargs = tree_map_only(
                torch.Tensor, lambda t: t.to(lower) if t.dtype == torch.float32 else t, (args, kwargs)
            )
        return func(*args, **kwargs)

    def _lowered(self, args):
        return torch.is_autocast_enabled(self.owner.kind) and any(isinstance(value, PretendTensor) for value in args)

    def _from_data(self, func, args, kwargs):
        """Make the tensor on the host and copy it: on the meta device its values would be lost."""
        target, wants_grad = kwargs.pop("device", None), kwargs.pop("requires_grad", False)
        if func is torch.as_tensor and isinstance(args[0], PretendTensor):
            return args[0].to(device=target or args[0].device, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is torch.Tensor.new_tensor:
            target = args[0].device if target is None else target
            kwargs.setdefault("dtype", args[0].dtype)
            func, args = torch.tensor, args[1:]
        made = func(*args, **kwargs)
        made = made if target is None else made.to(self.owner.inside(target))
        return made.requires_grad_(wants_grad)

    def _indices(self, index, device):
        """Lists among indices become tensors of the device, as the real ones make them."""
        if isinstance(index, list):
            return torch.tensor(index, dtype=None if index else torch.long).to(self.owner.inside(device))
        return tuple(self._indices(part, device) for part in index) if isinstance(index, tuple) else index


class PretendDevice(TorchDispatchMode):
    """The accelerator: within it, devices of its kind exist.

    Args:
        kind: `cuda`, or `mps`, which has one device and no float64.
        count: how many devices there are.

    Attributes:
        waits: how often the host waited, by (why, operation, file:line).
        launches: operations that would launch a kernel, by (scope, operation, file:line).
        seeds: what the generator of each device was seeded with. Its numbers are drawn by that of the CPU.
    """

    current = None

    def __init__(self, kind="cuda", count=2):
        super().__init__()
        self.kind, self.count, self.doubles = kind, count if kind == "cuda" else 1, kind == "cuda"
        self.waits, self.launches, self.scope = Counter(), Counter(), "attack"
        self.seeds, self.chosen = [0] * self.count, 0

    def __enter__(self):
        self._stack = ExitStack()
        if self.kind == "cuda":
            for name, value in {**self._cuda(), **self._generators()}.items():
                self._stack.enter_context(mock.patch.object(torch.cuda, name, value))
            self._stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", _pinned))
        else:
            self._stack.enter_context(mock.patch.object(torch.backends.mps, "is_available", return_value=True))
            for name, value in (("recommended_max_memory", 1 << 34), ("driver_allocated_memory", 0)):
                self._stack.enter_context(mock.patch.object(torch.mps, name, return_value=value))
            self._stack.enter_context(mock.patch.object(torch.mps, "synchronize", self._synchronize))
            for name, value in self._generators().items():
                self._stack.enter_context(mock.patch.object(torch.mps, name, value))
        self._stack.enter_context(mock.patch("segprox.fusion.compiled", self._fused))
        future = torch.__future__  # a module's parameters are replaced when it moves: wrappers have no data to swap
        before = future.get_overwrite_module_params_on_conversion()
        self._stack.callback(future.set_overwrite_module_params_on_conversion, before)
        future.set_overwrite_module_params_on_conversion(True)
        self._stack.enter_context(mock.patch.object(PretendDevice, "current", self))
        self._stack.enter_context(_Names(self))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._stack.close()

    def _cuda(self):
        return {
            "is_available": lambda: True, "device_count": lambda: self.count, "current_device": lambda: self.chosen,
            "get_device_name": lambda i=None: f"Pretend {i}", "synchronize": self._synchronize,
            "is_bf16_supported": lambda *_, **__: True, "_lazy_init": lambda: None, "empty_cache": lambda: None,
            "mem_get_info": lambda *_: (1 << 34, 1 << 34), "memory_reserved": lambda *_: 0,
            "memory_allocated": lambda *_: 0, "device": self._choose,
        }  # fmt: skip

    def _generators(self):
        """Of the chosen device, as the modules of both kinds have them."""
        return {
            "get_rng_state": lambda: torch.tensor(self.seeds[self.chosen]),
            "set_rng_state": lambda state: self.seeds.__setitem__(self.chosen, state.item()),
            "manual_seed": lambda seed: self.seeds.__setitem__(self.chosen, seed),
        }

    def _choose(self, device):
        return mock.patch.object(self, "chosen", torch.device(device).index or 0)

    def _fused(self, piece):
        """A stand-in for a compiled piece: it counts as one launch, what it is made of as `fused`."""

        def run(*args, **kwargs):
            self.launches[self.scope, "fused", piece.__qualname__] += 1
            with self.within("fused"):
                return piece(*args, **kwargs)

        return run

    def clear(self):
        """Begin to count again."""
        self.waits.clear()
        self.launches.clear()

    @contextmanager
    def within(self, scope):
        """Count launches under this name."""
        with mock.patch.object(self, "scope", scope):
            yield

    def launched(self, scope="attack"):
        """How many operations were launched within a scope."""
        return sum(count for (where, *_), count in self.launches.items() if where == scope)

    def inside(self, device):
        """A device as torch's C++ parts know it."""
        device = torch.device(device)
        if device.type != self.kind:
            return device
        if (device.index or 0) >= self.count:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return torch.device("meta", device.index or 0)

    def _synchronize(self, device=None):
        self.waits["synchronize", "synchronize", _caller()] += 1

    def _wait(self, why, func):
        self.waits[why, func.overloadpacket.__name__, _caller()] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def run(self, func, args, kwargs):
        """Do on the CPU what `func` does, and say it was done on the device."""
        flat, _ = tree_flatten((args, kwargs))
        tensors = [value for value in flat if isinstance(value, torch.Tensor)]
        mine = [value for value in tensors if isinstance(value, PretendTensor)]
        asked = None if kwargs.get("device") is None else self.inside(kwargs["device"])
        if func is aten._pin_memory.default:
            return args[0].clone()  # there is no accelerator to pin it for
        if not mine and (asked is None or asked.type != "meta" or asked.index is None):
            return func(*args, **kwargs)
        if func in COPIES:
            return self._copy(func, args, kwargs, asked)
        if func is aten._local_scalar_dense.default:
            self._wait("read", func)
            return func(args[0].held)
        index = mine[0].device.index if asked is None else asked.index
        self._check(func, args, kwargs, tensors, index)
        self._count(func)
        options = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        bare_args, bare_options = tree_map_only(PretendTensor, lambda tensor: tensor.held, (args, options))
        if asked is not None:
            bare_options["device"] = torch.device("cpu")
        made = func(*bare_args, **bare_options)
        known = {id(tensor.held): tensor for tensor in mine}  # what was changed in place is returned itself
        made = tree_map_only(torch.Tensor, lambda t: known[id(t)] if id(t) in known else self._wrapped(t, index), made)
        aliases = get_alias_info(func)
        if aliases.read_only_alias_match_indexes and isinstance(args[0], PretendTensor):
            _correct_storage_aliasing(func, aliases, args, made if isinstance(made, tuple) else (made,))
        return made

    def _wrapped(self, held, index):
        if held.dtype == torch.float64 and not self.doubles:
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
            )
        return PretendTensor(held, index)

    def _check(self, func, args, kwargs, tensors, index):
        """Refuse what a real device refuses, and note what makes the host wait."""
        if kwargs.get("generator") is not None:
            raise RuntimeError(f"Expected a '{self.kind}' device type for generator but found 'cpu'")
        indices = [value for value in args[1] if value is not None] if func in INDEXING else []
        if any(value.device.type == "cpu" for value in indices):
            self._wait("to device", func)
        if any(value.dtype in (torch.bool, torch.uint8) for value in indices) and (
            func is aten.index.Tensor or args[2].dim()  # a single value is filled in by a mask
        ):
            self._wait("shape", func)
        if func in SHAPED_BY_VALUES:
            self._wait("shape", func)
        device, name = torch.device(self.kind, index), func.overloadpacket.__name__.rstrip("_")
        for value in tensors:
            of_host = value.device.type == "cpu"
            if value.device == device or (of_host and any(value is one for one in indices)):
                continue
            if not (of_host and value.dim() == 0 and name in WITH_HOST_SCALARS):
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"{device} and {value.device}! (in {func})"
                )

    def _count(self, func):
        name = func.overloadpacket.__name__
        if name in NOT_DETERMINISTIC and torch.are_deterministic_algorithms_enabled() and self.kind == "cuda":
            raise RuntimeError(
                f"{NOT_DETERMINISTIC[name]} does not have a deterministic implementation, but you set "
                "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation."
            )
        if name not in WITHOUT_KERNEL and not func.is_view:
            self.launches[self.scope, name, _caller()] += 1

    def _copy(self, func, args, kwargs, asked):
        source, changed = (args[1], args[0]) if func is aten.copy_.default else (args[0], None)
        here = source.device
        if changed is not None:
            there = changed.device
        else:
            there = here if asked is None else torch.device(self.kind, asked.index) if asked.type == "meta" else asked
        if here == there:
            self._count(func)
        else:
            later = kwargs.get("non_blocking") or (changed is not None and True in args[2:])
            if later and getattr(source, "pinned", False):
                self._count(func)
            else:  # from memory that is not pinned torch waits whatever it is asked
                self._wait(f"to {'host' if there.type == 'cpu' else 'device'}", func)
        held = source.held if isinstance(source, PretendTensor) else source
        if changed is not None:
            (changed.held if isinstance(changed, PretendTensor) else changed).copy_(held)
            return changed
        made = func(held, **{name: kwargs[name] for name in ("dtype", "layout", "memory_format") if name in kwargs})
        return made if there.type == "cpu" else self._wrapped(made, there.index)
