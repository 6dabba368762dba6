"""Options that several commands take, declared once: `@takes` puts them into a command's signature."""

import inspect
from collections.abc import Callable
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from segprox.cli.base import assignments
from segprox.errors import SegproxError

if TYPE_CHECKING:
    from segprox.run.execution import Execution
    from segprox.run.plan import Settings


class EngineName(StrEnum):
    """Who does the work."""

    LOCAL = "local"
    RAY = "ray"


class Log(StrEnum):
    """How progress is told."""

    BAR = "bar"
    QUIET = "quiet"
    JSON = "json"


def takes(**makers: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace parameters of a command by options from which the makers make them.

    Args:
        makers: for each such parameter a function whose own parameters are the options.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options = {name: inspect.signature(maker).parameters for name, maker in makers.items()}
        own = [p for p in inspect.signature(command).parameters.values() if p.name not in makers]
        added = [option for some in options.values() for option in some.values()]

        @wraps(command)
        def parsed(**given: Any) -> None:
            made = {
                name: maker(**{option: given.pop(option) for option in options[name]}) for name, maker in makers.items()
            }
            command(**given, **made)

        everything = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *added)]
        parsed.__signature__ = inspect.Signature(everything)  # type: ignore[attr-defined]  # what typer reads
        parsed.__annotations__ = {p.name: p.annotation for p in everything}
        return parsed

    return decorate


def execution_options(
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, mps; with --workers a list such as cuda:0,cuda:1.")
    ] = None,
    lean: Annotated[
        bool | None,
        typer.Option(
            "--lean/--no-lean",
            show_default="where it pays",
            help="Hold only what the gradient of the image needs (see: segprox memory).",
        ),
    ] = None,
    compile_: Annotated[
        bool, typer.Option("--compile", help="torch.compile the model and small pieces of attacks.")
    ] = False,
    channels_last: Annotated[bool, typer.Option("--channels-last", help="Memory format, faster on many GPUs.")] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Deterministic algorithms on GPUs; refused where torch has none.")
    ] = False,
    engine: Annotated[EngineName, typer.Option(help="This machine, or a Ray cluster.")] = EngineName.LOCAL,
    workers: Annotated[int, typer.Option(min=1, max=1024, help="Processes on this machine, or Ray actors.")] = 1,
    address: Annotated[
        str | None,
        typer.Option(help="Address of the Ray cluster, such as auto; RAY_ADDRESS, or else a new one, if left out."),
    ] = None,
    threads: Annotated[
        int, typer.Option(min=1, max=1024, help="Threads of each worker. More change the last digits of results.")
    ] = 1,
    batch: Annotated[
        int,
        typer.Option(min=1, help="Images of one size attacked together, for GPUs, where 1 is the reproducible choice."),
    ] = 1,
    look_every: Annotated[
        int,
        typer.Option(
            "--look-every",
            min=1,
            help="Look at every so many-th query which images of a batch are done, for attacks that leave them out.",
        ),
    ] = 1,
) -> "Execution":
    """How an evaluation is executed: on CPUs none of it changes what comes out, elsewhere rounding may."""
    import torch

    from segprox.devices import use_deterministic
    from segprox.run.execution import Execution

    torch.set_num_threads(threads)
    use_deterministic(deterministic)
    devices = () if device is None else tuple(device.split(","))
    return Execution(
        engine=engine.value, workers=workers, address=address, devices=devices, threads=threads,
        batch=batch, lean=lean, compile=compile_, channels_last=channels_last, look_every=look_every,
    )  # fmt: skip


LimitOption = Annotated[int | None, typer.Option(min=1, help="How many images; all if left out.")]
UntilOption = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE",
        help="Images in random order until the 95 % interval of the median is within this share of it, such as 5%.",
    ),
]
SaveOption = Annotated[
    list[str] | None,
    typer.Option(
        "--save",
        help="Keep float (safetensors, lossless), png (8-bit; of other bands an .npy, as files hold them), or previews "
        "only (preview, the default); repeat.",
    ),
]
MaxQueriesOption = Annotated[
    int | None, typer.Option("--max-queries", min=1, help="Most forwards plus backwards per image, for any attack.")
]


def settings_options(
    limit: LimitOption = None,
    until: UntilOption = None,
    threshold: Annotated[float, typer.Option(help="The share of pixels that makes a success.")] = 0.99,
    seed: Annotated[int, typer.Option(help="Seed of random starts.")] = 0,
    max_queries: MaxQueriesOption = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="For models that answer at random: draws of every query, which are averaged."),
    ] = None,
    score_draws: Annotated[
        int | None, typer.Option(min=1, show_default="20", help="With --samples: draws by which an image is judged.")
    ] = None,
    score_share: Annotated[
        float | None, typer.Option(show_default="0.5", help="With --samples: the share of those that must be broken.")
    ] = None,
    save: SaveOption = None,
    precision: Annotated[
        str | None, typer.Option(help="bfloat16 or float16 for gradients; successes are verified in float32.")
    ] = None,
) -> "Settings":
    """What all runs of an evaluation share."""
    from segprox.naming import checked
    from segprox.run.plan import Settings

    return checked(
        Settings, "an evaluation", limit=limit, until=until, threshold=threshold, seed=seed, max_queries=max_queries,
        samples=samples, score_draws=score_draws, score_share=score_share,
        save=tuple(save or ["preview"]), model_options={"precision": precision} if precision else {},
    )  # fmt: skip


def field_options(
    steps: Annotated[int | None, typer.Option(help="Iterations of every attack; its own default if left out.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Any other field of the attacks; may be repeated."),
    ] = None,
) -> dict[str, Any]:
    """Fields of attacks that are to be other than their defaults."""
    fields = assignments(set_ or [])
    if steps is not None and "steps" in fields:
        raise SegproxError(f"--steps {steps} and --set steps={fields['steps']} say it twice; leave one out")
    return fields | ({} if steps is None else {"steps": steps})


ModelOption = Annotated[str, typer.Option(help="See: segprox list models.")]
DatasetOption = Annotated[str, typer.Option(help="See: segprox list datasets.")]
OutOption = Annotated[Path, typer.Option("--out", help="Folder for the results; the same one again resumes.")]
RetryOption = Annotated[bool, typer.Option("--retry-errors", help="Try images again that could not be attacked.")]
DryOption = Annotated[bool, typer.Option("--dry-run", help="Say what would run and how long it may take, and stop.")]
LogOption = Annotated[
    Log, typer.Option("--log", help="A bar; nothing but errors, and the table of an audit; or a JSON object per line.")
]
