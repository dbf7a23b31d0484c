"""The rules of the house that a linter does not know."""

import ast
import importlib
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml

from support.tree import PACKAGES, REPOSITORY, files, name_of, pyproject, sources

# Put together from pieces, so that this file does not hold what it looks for.
FOREIGN = tuple(
    "".join(pieces)
    for pieces in (
        ("/wo", "rk/"),
        ("/fa", "rm/"),
        ("/.lib", "rary"),
        ("py", "pi.org"),
        ("python", "hosted"),
        ("registry.", "npmjs"),
        ("deb.", "debian"),
        ("download.", "pytorch"),
        ("sub", "agent"),
        ("behaviours", ".md"),
        ("failure_", "classes"),
        ("house_", "style"),
        ("design", ".md"),
    )
)

PUBLISHED_SEAM = {
    "ARDiffusionCrossAttentionKVSpec",
    "ARDiffusionKVBranchSpec",
    "ARDiffusionKVCacheSpec",
    "ARDiffusionKVState",
    "SupportsARDiffusionPipeline",
}


# --- files
def test_no_folder_of_the_tests_is_a_package_and_every_folder_of_ours_is() -> None:
    assert [name_of(path) for path in sources(".py", "tests") if path.name == "__init__.py"] == []

    folders = {path.parent for path in sources(".py")}
    assert [name_of(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_project_speaks_of_itself_alone() -> None:
    hits = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in files()
        for number, line in enumerate(_text(path).splitlines(), start=1)
        if any(word in line for word in FOREIGN)
    ]

    assert hits == []


def test_a_key_is_spelled_only_where_keys_are_defined() -> None:
    hits = [
        f"{name_of(path)}:{number}: {text}"
        for path in [*sources(".py"), *sources(".lua")]
        if path != REPOSITORY / "contracts" / "keys.py"
        for number, text in (_python_strings(path) if path.suffix == ".py" else _lua_code(path))
        if re.search(r"\bwl:", text)
    ]

    assert hits == []


# --- Lua
@pytest.mark.parametrize("path", sources(".lua"), ids=name_of)
def test_a_lua_file_says_what_it_is_for_and_a_command_what_it_takes_and_returns(path: Path) -> None:
    header = _lua_header(path)

    assert len(header.splitlines()[0]) > 15, "the first line says what the file is for"
    for part in ("KEYS", "ARGV", "returns") if path.parent.name != "include" else ():
        assert re.search(rf"\b{part}\b", header, re.IGNORECASE), f"the header does not say {part}"


@pytest.mark.parametrize("path", sources(".lua"), ids=name_of)
def test_stream_ids_are_left_to_the_broker(path: Path) -> None:
    code = "\n".join(text for _, text in _lua_code(path))

    additions = re.split(r"""["']XADD["']""", code, flags=re.IGNORECASE)[1:]
    explicit = [text[:80] for text in additions if not re.match(r"""[^)\n]*?["']\*["']""", text)]

    assert explicit == []


# --- who imports what
@pytest.mark.parametrize(
    ("modules", "never"),
    [
        pytest.param("every module of contracts", ("torch", "rq", "actors", "gpu_worker"), id="contracts"),
        pytest.param("every module of actors", ("torch", "gpu_worker"), id="actors"),
        pytest.param("actors.cli.commands", ("torch", "gpu_worker"), id="cli"),
        pytest.param("gpu_worker.models.reference.spec", ("torch", "redis", "rq", "actors"), id="kv-spec"),
        pytest.param("gpu_worker.engine", ("redis", "rq", "actors"), id="engine"),
        pytest.param("gpu_worker.runner", ("redis", "rq", "actors"), id="runner"),
        pytest.param("every module of gpu_worker", ("rq", "actors"), id="gpu_worker"),
    ],
)
def test_importing_never_brings_in(modules: str, never: tuple[str, ...]) -> None:
    package = modules.removeprefix("every module of ")
    names = _modules_of(package) if package != modules else [modules]
    program = (
        f"import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print([name for name in {never!r} if name in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, cwd="/"
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


# --- public surface
@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_exports_exists_and_is_sorted(package: str) -> None:
    module = importlib.import_module(package)
    names = list(getattr(module, "__all__", []))

    assert [name for name in names if not hasattr(module, name)] == []
    assert names == sorted(set(names), key=_constants_classes_functions)


def test_the_kv_seam_keeps_its_published_names() -> None:
    import gpu_worker

    assert set(gpu_worker.__all__) >= PUBLISHED_SEAM


# --- commands, images
@pytest.mark.parametrize("group", sorted(pyproject()["project"]["entry-points"]))
def test_every_entry_point_is_installed_and_loads(group: str) -> None:
    declared = pyproject()["project"]["entry-points"][group]
    installed = {point.name: point for point in entry_points(group=group)}

    for name, target in declared.items():
        assert installed[name].value == target, "the installed metadata is old: make setup"
        assert callable(installed[name].load())


def test_every_command_loads() -> None:
    installed = {point.name: point for point in entry_points(group="console_scripts")}

    for name, target in pyproject()["project"]["scripts"].items():
        assert installed[name].value == target, "the installed metadata is old: make setup"
        assert callable(installed[name].load())


@pytest.mark.parametrize("name", ["host", "worker"])
def test_a_service_of_the_compose_file_runs_a_command_that_exists(name: str) -> None:
    command = _services()[name]["command"]

    assert command[0] in pyproject()["project"]["scripts"]
    program = Path(sys.executable).parent / command[0]
    done = subprocess.run([program, *command[1:], "--help"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert f"CMD {str(command).replace(chr(39), chr(34))}" in (REPOSITORY / "Dockerfile").read_text()


def test_every_service_of_ours_outlives_a_tick_restarts_and_waits_for_the_broker() -> None:
    from contracts.config import SharedSettings

    limit_s = SharedSettings.model_fields["execution_limit_ms"].default / 1000
    services = _services()
    ours = {name: service for name, service in services.items() if "build" in service}

    assert set(ours) == {"host", "janitor", "worker"}
    for service in ours.values():
        assert float(service["stop_grace_period"].removesuffix("s")) > limit_s
        assert service["depends_on"]["redis"]["condition"] == "service_healthy"
    assert {service["restart"] for service in services.values()} == {"unless-stopped"}


def test_the_compose_file_sets_only_settings_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    from contracts.config import SharedSettings, load_settings

    for service in _services().values():
        for variable, value in service.get("environment", {}).items():
            monkeypatch.setenv(variable, str(value))

    assert load_settings(SharedSettings).url.startswith("redis://redis:")


def test_the_broker_of_the_compose_file_keeps_what_it_accepted() -> None:
    command = " ".join(_services()["redis"]["command"])

    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command


# --- helpers
def _text(path: Path) -> str:
    data = path.read_bytes()
    return "" if b"\0" in data[:8_000] else data.decode("utf-8", errors="replace")


def _python_strings(path: Path) -> list[tuple[int, str]]:
    """String literals, f-string pieces included, without docstrings and other texts that stand alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone
    ]


def _lua_header(path: Path) -> str:
    """The comment lines that a file begins with."""
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next((number for number, line in enumerate(lines) if not line.startswith("--")), len(lines))
    return "\n".join(lines[:end]) or "\n"


def _lua_code(path: Path) -> list[tuple[int, str]]:
    """Numbered lines without comments."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [(number, line.split("--", 1)[0]) for number, line in enumerate(lines, start=1)]


def _modules_of(package: str) -> list[str]:
    """Every module of a package except `__main__`, which would run."""
    paths = [path.relative_to(REPOSITORY).with_suffix("") for path in sources(".py", package)]
    return [".".join(path.parts).removesuffix(".__init__") for path in paths if path.name != "__main__"]


def _constants_classes_functions(name: str) -> tuple[int, str]:
    """The order in which ruff sorts `__all__`."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def _services() -> dict[str, dict]:
    return yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
