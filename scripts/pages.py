"""Pages of the site that are made, not written: from the program itself, and from notebooks that are executed.

MkDocs calls `on_files` (see `hooks` in mkdocs.yml). `GENERATED` says which pages there are and who makes them; links to
them are written as if they were files in docs/. `EXECUTE=false make docs` leaves notebooks as they are, for drafts.
"""

import ast
import inspect
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import segprox

DOCS = Path(__file__).parents[1] / "docs"
Row = Iterable[object]


def table(titles: Row, rows: Iterable[Row]) -> str:
    """A table of Markdown; bars within cells are escaped."""
    lines = [titles, ["---"] * len(list(titles)), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(value: object) -> str:
    """As code, or nothing where there is nothing."""
    return f"`{value}`" if str(value) else ""


def command_line() -> str:
    """Every command with its options, from the program."""
    import typer
    from typer.cli import get_docs_for_click

    from segprox.cli import app

    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="segprox")
    text = text.replace("# `segprox`\n", "# Command line\n", 1).replace("```console\n$ ", "```console\n")
    exits = table(
        ("exit code", "means"),
        [
            (0, "all went well; `require`: every requirement is met"),
            (1, "an image could not be attacked; `check`: something is red; `verify`: a record does not agree"),
            (2, "the command was wrong: one sentence says what, and nothing was written"),
            (3, "`require`: a requirement is not met"),
            (4, "`require`: there are too few images to tell"),
        ],
    )
    return f"{text}\n## Exit codes\n\n{exits}\n"


def attack_tables() -> dict[str, str]:
    """A table of attacks for each family, from the registry."""
    from segprox.attacks import ATTACKS, make_attack, norms

    found: dict[str, list[Row]] = {}
    for name, entry in ATTACKS.everything().items():
        attack = make_attack(name)
        cost = attack.cost()
        link = f"[`{name}`](fields.md#{anchor(name)})"
        row = (link, norms(attack), cost.forwards, cost.backwards, entry.about, entry.short_citation)
        found.setdefault(attack.family, []).append(row)
    titles = ("attack", "norms", "forwards", "backwards", "what it does", "from")
    return {family: table(titles, rows) for family, rows in found.items()}


def anchor(name: str) -> str:
    """Where an attack's fields are in their page."""
    return "attack-" + name.replace(".", "-").replace(":", "-")


def attack_fields() -> str:
    """Every attack with its fields, from the registry."""
    from segprox.attacks import ATTACKS, describe, make_attack

    parts = [
        "# Fields of attacks\n",
        "Every attack with its hyper-parameters, as `segprox attacks show NAME` prints them. Set a field with",
        "`--set FIELD=VALUE` on the command line, or as a keyword: `segprox.attack(..., FIELD=VALUE)`.\n",
    ]
    for name, entry in ATTACKS.everything().items():
        attack = make_attack(name)
        cost = attack.cost()
        parts += [
            f"## `{name}` {{ #{anchor(name)} }}\n",
            f"{entry.about[0].upper()}{entry.about[1:]}. {entry.citation}.\n",
            f"A {attack.family} attack; at most {cost.forwards} forwards and {cost.backwards} backwards per image.\n",
            table(
                ("field", "default", "meaning"), [(code(f.name), code(f.default), f.meaning) for f in describe(attack)]
            ),
            "",
        ]
    return "\n".join(parts)


def names() -> str:
    """Sources of models and datasets with their options, from the registries."""
    from segprox.data import DATASETS
    from segprox.data import describe as describe_options
    from segprox.models import MODELS, PAPER_MODELS, SOURCES, ModelOptions
    from segprox.naming import describe_fields

    models = [(code(name), "embedded", "") for name in sorted(MODELS.everything())]
    models += [(code(s.example), s.about, code(f"segprox[{s.extra}]") if s.extra else "") for s in SOURCES.values()]
    options = [(code(f.name), code(f.default), f.meaning) for f in describe_fields(ModelOptions())]
    datasets = []
    for name, source in sorted(DATASETS.everything().items()):
        choices = [f"`{option}={default}`".replace("=`", "`") for option, default in describe_options(source).items()]
        datasets.append((code(name), source.layout, ", ".join(choices)))
    paper = ", ".join(map(code, PAPER_MODELS))
    return "\n".join(
        [
            "# Models, datasets and their options\n",
            "A name is `source:identifier?option=value&option=value`. `segprox list models` and `segprox list",
            "datasets` print the same. [Load your model](../how-to/your-model.md) and",
            "[Load your data](../how-to/your-data.md) have examples.\n",
            "## Models\n",
            table(("model", "what it is", "install"), models),
            f"\nThe paper's models: {paper}.\n",
            "## Options of models\n",
            table(("option", "default", "meaning"), options),
            "\n## Datasets\n",
            table(("dataset", "what is read", "options and defaults"), datasets),
            "",
        ]
    )


def fields_of(cls: type[Any]) -> list[Row]:
    """Name, type, default and meaning of a dataclass's fields: descriptions, or the comments in its source."""
    source = inspect.getsource(cls)
    lines = source.splitlines()
    (tree,) = ast.parse(source).body
    rows: list[Row] = []
    assert isinstance(tree, ast.ClassDef)
    for node in tree.body:
        if not isinstance(node, ast.AnnAssign):
            continue
        kind, meaning = node.annotation, lines[node.lineno - 1].partition("  # ")[2]
        if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Annotated":
            described = [k.value for call in ast.walk(kind) if isinstance(call, ast.Call) for k in call.keywords]
            texts = [n.value for n in described if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            meaning = texts[-1] if texts else meaning
            assert isinstance(kind.slice, ast.Tuple)
            kind = kind.slice.elts[0]
        default = "" if node.value is None else ast.unparse(node.value)
        default = "" if "default_factory" in default else default
        rows.append((code(ast.unparse(node.target)), code(ast.unparse(kind)), code(default), meaning))
    return rows


def records() -> str:
    """What is in the files of a run and in a spec, from the dataclasses that read and write them."""
    from segprox.run import execution, plan, record

    shown: dict[str, tuple[str, list[type[Any]]]] = {
        "Records": (
            "`records.jsonl` in the folder of a run has a line of JSON for each image: a `Record`, or an `ImageError` "
            "where `status` is `error`.",
            [record.Record, record.Score, record.Saved, record.ClassCounts, record.ImageError],
        ),
        "Specs": (
            "`segprox run` reads a YAML file with a `Spec`. `segprox spec example` prints one to start from.",
            [plan.Spec, plan.Grid, plan.AttackEntry, plan.Settings, plan.Run],
        ),
        "Execution": (
            "How runs are done is said by options of the command, never by a spec: it changes no result.",
            [execution.Execution],
        ),
    }
    parts = ["# Records and specs\n"]
    for title, (sentence, classes) in shown.items():
        parts += [f"## {title}\n", sentence + "\n"]
        for cls in classes:
            rows = fields_of(cls)
            about = arguments(cls)
            rows = [(*row[:3], about.get(str(row[0]).strip("`"), row[3])) for row in map(tuple, rows)]
            first = (inspect.getdoc(cls) or "").partition("\n")[0]
            parts += [f"### {cls.__name__}\n", first + "\n", table(("field", "type", "default", "meaning"), rows), ""]
    return "\n".join(parts)


def arguments(cls: type[Any]) -> dict[str, str]:
    """What the `Args:` of a docstring say of each."""
    _, _, text = (inspect.getdoc(cls) or "").partition("Args:\n")
    pairs = (line.strip().partition(": ") for line in text.splitlines() if ": " in line)
    return {name: meaning for name, _, meaning in pairs}


def python_api() -> str:
    """The public names, which mkdocstrings fills in."""
    groups = {
        "Attack and evaluate": ["attack", "evaluate", "audit", "transfer", "load_results"],
        "Models and data": ["load_model", "load_dataset", "Segmenter", "Dataset", "Sample", "Bands"],
        "What comes back": ["AttackResult", "Results", "Audit"],
        "Attacks": ["make_attack", "Palma", "AlmaProx", "Anneal"],
        "Add your own": [
            "register_attack", "register_objective", "register_dataset", "register_model", "register_model_source",
            "Attack", "MinimalAttack", "FixedEpsilonAttack", "Tracker", "Problem", "Loss", "Progress",
            "ProgressReporter", "prox_linf_box",
        ],
        "Lists and errors": ["list_attacks", "list_models", "list_datasets", "SegproxError"],
    }  # fmt: skip
    placed = [name for some in groups.values() for name in some]
    groups["More"] = [name for name in segprox.__all__ if name not in placed]  # what is new has a place at once
    parts = ["# Python\n", "What `import segprox` gives: every public name, from its docstring.\n"]
    for title, some in groups.items():
        parts += [f"## {title}\n"] if some else []
        parts += [f"::: {getattr(segprox, name).__module__}.{name}\n" for name in some]
    return "\n".join(parts)


def notebook(path: Path) -> str:
    """A notebook as a page, executed; pictures are within it."""
    import nbformat
    from nbclient import NotebookClient
    from nbconvert import MarkdownExporter

    content = nbformat.read(path, as_version=4)
    if os.environ.get("EXECUTE", "true") == "true":
        with tempfile.TemporaryDirectory() as folder:
            resources = {"metadata": {"path": folder}}
            quiet = ["--log-level=ERROR"]
            options = {"timeout": 600, "kernel_name": "python3", "extra_arguments": quiet, "resources": resources}
            NotebookClient(content, **options).execute()
    for cell in content.cells:
        if cell.cell_type == "code":
            cell.source = cell.source.replace("%matplotlib inline\n", "")
    text, extra = MarkdownExporter().from_notebook_node(content)
    for name, data in extra["outputs"].items():
        text = text.replace(f"({name})", f"(data:image/png;base64,{encoded(data)})")
    title, _, rest = text.partition("\n")
    return f"{title}\n\n[The notebook itself]({path.name}), to run and change.\n{rest}"


def encoded(data: bytes) -> str:
    """For an address that holds the data itself."""
    import base64

    return base64.b64encode(data).decode()


GENERATED: dict[str, Callable[[], str]] = {
    "reference/command-line.md": command_line,
    "reference/python.md": python_api,
    "reference/fields.md": attack_fields,
    "reference/names.md": names,
    "reference/records.md": records,
}


def notebook_pages() -> dict[str, Path]:
    """The pages that notebooks become."""
    return {path.relative_to(DOCS).with_suffix(".md").as_posix(): path for path in sorted(DOCS.rglob("*.ipynb"))}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made; MkDocs calls this."""
    from mkdocs.structure.files import File

    for page, make in GENERATED.items():
        files.append(File.generated(config, page, content=make()))
    for page, path in notebook_pages().items():
        files.append(File.generated(config, page, content=notebook(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put tables of attacks where a page has `{{ attacks: FAMILY }}`; MkDocs calls this."""
    if "{{ attacks:" in markdown:
        for family, rows in attack_tables().items():
            markdown = markdown.replace(f"{{{{ attacks: {family} }}}}", rows)
    return markdown
