"""Libraries that not everyone needs."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from types import ModuleType

from segprox.errors import SegproxError

WHEELS = "https://download.pytorch.org/whl"  # where torch publishes its builds


def require(module: str, extra: str) -> ModuleType:
    """Import an optional library, or say how to get it."""
    try:
        with torchvision_explained(module):
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


@contextmanager
def torchvision_explained(what: str) -> Iterator[None]:
    """If torchvision's compiled operations are why something cannot be imported, say which build of it to install.

    A torchvision that was built for CUDA does not load beside a CPU build of torch, nor one that was built for another
    version of torch. Libraries that import it fail in ways of their own, so all causes of an error are looked at.
    """
    try:
        yield
    except Exception as error:
        if not any("torchvision::" in str(cause) for cause in _causes(error)):
            raise
        import torch

        version, _, build = torch.__version__.partition("+")
        build = build or ("cpu" if torch.version.cuda is None else f"cu{torch.version.cuda.replace('.', '')}")
        raise SegproxError(
            f"{what} needs torchvision, and the installed torchvision {metadata.version('torchvision')} was not built "
            f"for torch {version} ({build}): its compiled operations do not load; install both from one index, as in: "
            f"pip install --force-reinstall torch=={version} torchvision --index-url {WHEELS}/{build}"
        ) from None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
