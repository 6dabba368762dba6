"""Libraries that not everyone needs."""

from importlib import import_module
from types import ModuleType

from segprox.errors import SegproxError


def require(module: str, extra: str) -> ModuleType:
    """Import an optional library, or say how to get it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise SegproxError(f"{module} cannot be imported: it needs {error.name}, which is not installed") from None
        raise SegproxError(f"this needs {module}, which is not installed: pip install 'segprox[{extra}]'") from None
    except (ImportError, RuntimeError, OSError) as error:
        raise SegproxError(
            f"{module} is installed but cannot be imported ({str(error).splitlines()[0]}); "
            "a version that does not match torch is the usual reason"
        ) from None
