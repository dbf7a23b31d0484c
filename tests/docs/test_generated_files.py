"""What is made from the code is up to date, and the check notices when it is not."""

from collections.abc import Callable
from pathlib import Path

import pytest

from contracts import make_docs, make_schemas
from contracts.lifecycle import Status, Trigger

Main = Callable[..., int]


@pytest.mark.parametrize("module", [make_docs, make_schemas], ids=lambda module: module.__name__)
def test_the_generated_files_are_up_to_date(module: object, capsys: pytest.CaptureFixture[str]) -> None:
    status = module.main(["--check"])  # type: ignore[attr-defined]

    assert status == 0, capsys.readouterr().err


def test_no_schema_is_left_over() -> None:
    assert {path.stem for path in make_schemas.FOLDER.glob("*.json")} == set(make_schemas.schemas())


@pytest.mark.parametrize(("main", "name"), [(make_docs.main, "page.md"), (make_schemas.main, "schemas")])
def test_a_file_that_drifted_is_named_and_written_anew(
    main: Main, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / name
    assert main(["--check"], target) == 1
    assert main([], target) == 0
    assert main(["--check"], target) == 0

    drifted = target if target.is_file() else target / "notice.json"
    drifted.write_text(drifted.read_text(encoding="utf-8") + " ", encoding="utf-8")
    capsys.readouterr()

    assert main(["--check"], target) == 1
    assert f"{drifted} is out of date: run python -m contracts.make_" in capsys.readouterr().err


@pytest.mark.parametrize("main", [make_docs.main, make_schemas.main])
def test_an_unknown_argument_is_a_usage_error(main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--force"]) == 2
    assert "usage" in capsys.readouterr().err


def test_the_page_of_states_tells_every_state_and_trigger() -> None:
    page = make_docs.PAGE.read_text(encoding="utf-8")

    assert all(f"`{word}`" in page for word in (*Status, *Trigger))
