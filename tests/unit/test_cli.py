"""Command line: every command is a module, explains itself, and refuses mistakes with one sentence and exit code 2."""

import contextlib
import errno
import io
import json
import os
import pkgutil
import subprocess
import sys
import tomllib

import httpx
import pytest

from flows import cli, prefect_server
from flows.cli.options import DEFAULT_STORE, create_folder, parse_run_and_iteration, store_option
from flows.cli.progress_view import LastingConsole, live_view
from flows.prefect_server import prefect_api
from roll_core.config.load import absolute_uri
from roll_core.errors import PrefectUnavailable, UserError
from roll_core.host import free_port
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.runs import open_run
from roll_core.types.refs import RunRef
from tasks.progress import announce_run
from tests.support import ROOT, tiny_config

SHARED = {"__main__", "follow", "options", "progress_view"}
"""Modules of `flows.cli` that are not commands."""
NAMES = [module.__name__.rpartition(".")[2] for module in cli.COMMANDS]


def subcommands() -> dict[str, object]:
    (action,) = (action for action in cli.build_parser()._actions if action.choices)
    return dict(action.choices)


def test_every_module_is_a_command_named_like_its_file():
    files = {module.name for module in pkgutil.iter_modules(cli.__path__)}
    assert files - SHARED == set(NAMES)
    assert list(subcommands()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_help_of_a_command_begins_with_what_it_does(capsys, name):
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    (module,) = (module for module in cli.COMMANDS if module.__name__ == f"flows.cli.{name}")
    assert shown.startswith(f"usage: roll {name} ")
    assert " ".join(module.__doc__.split()) in shown


def test_the_help_lists_every_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"\n    {name} " in shown for name in NAMES)


def test_the_version_is_that_of_the_project():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    done = subprocess.run([sys.executable, "-m", "flows.cli", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == (f"roll {version}\n", 0)


def test_a_run_and_an_iteration_are_parsed_from_one_argument():
    assert parse_run_and_iteration("quickstart-1@12") == ("quickstart-1", 12)
    for text in ("quickstart-1", "@3", "quickstart-1@", "quickstart-1@last"):
        with pytest.raises(UserError, match=f"^RUN@ITERATION: '{text}' is not one; write it like quickstart-1@12$"):
            parse_run_and_iteration(text)


def test_suggested_commands_name_the_store_unless_it_is_the_default():
    assert store_option(absolute_uri(DEFAULT_STORE)) == ""
    assert store_option("s3://lab/runs") == " --store s3://lab/runs"


def test_a_folder_appears_complete_or_not_at_all(tmp_path):
    with contextlib.suppress(UserError), create_folder(tmp_path / "model") as folder:
        (folder / "config.json").write_text("{}")
        raise UserError("the download failed")
    assert list(tmp_path.iterdir()) == []
    with create_folder(tmp_path / "model") as folder:
        (folder / "config.json").write_text("{}")
    assert [file.name for file in (tmp_path / "model").iterdir()] == ["config.json"]
    with pytest.raises(UserError, match="is there already: name a new one, or empty it$"), create_folder(tmp_path / "model"):
        pass


def test_config_describes_a_section_and_a_key(capsys):
    for key in ("rollout", "rollout.group_size"):
        assert cli.main(["config", key]) == 0
        assert "rollout.group_size" in capsys.readouterr().out


def test_config_without_a_key_lists_the_sections(capsys):
    assert cli.main(["config"]) == 0
    shown = capsys.readouterr().out
    assert all(section in shown for section in ("rollout", "training", "store", "legs"))


def test_a_mistyped_key_is_refused_with_the_right_one(capsys):
    assert cli.main(["config", "rollout.group_sise"]) == 2
    refusal = capsys.readouterr().err
    assert refusal.startswith("roll: ")
    assert "rollout.group_size" in refusal


def test_the_json_schema_has_the_sections_of_a_run_file(capsys):
    assert cli.main(["config", "--json-schema"]) == 0
    assert {"name", "iterations", "rollout", "extends"} <= json.loads(capsys.readouterr().out)["properties"].keys()


def test_config_takes_a_key_or_json_schema():
    with pytest.raises(SystemExit, match="2"):
        cli.main(["config", "rollout", "--json-schema"])


@pytest.mark.parametrize("arguments", [["plan", "configs/runs/quickstart.yaml"], ["config", "training"]])
def test_output_that_is_closed_early_ends_a_command_silently(arguments):
    """`roll plan CONFIG | head -1`"""
    command = [sys.executable, "-u", "-m", "flows.cli", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == cli.OUTPUT_CLOSED


@pytest.mark.parametrize(
    "arguments",
    [["show", "a\0b"], ["show", "r" * 300], ["export", "x-1@1", "f" * 300], ["plan", "c" * 5000], ["runs", "--store", "\0"]],
)
def test_an_argument_that_no_file_can_be_named_is_refused(capsys, arguments):
    assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert len(line) < 400


def test_an_iteration_must_be_ascii_digits():
    with pytest.raises(UserError, match="^RUN@ITERATION: "):
        parse_run_and_iteration("quickstart-1@\u00b2")


def test_a_full_disk_is_not_said_to_be_read_only(tmp_path):
    with (
        pytest.raises(UserError, match="No space left on device.*: make room there or name another"),
        create_folder(tmp_path / "x"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(UserError, match="make it writable or name another"), create_folder(tmp_path / "x"):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}/api", "nowhere", "http://[", "http://127.0.0.1:{port}x/api"])
def test_a_prefect_server_that_does_not_respond_is_named_before_anything_starts(tmp_path, monkeypatch, url):
    url = url.format(port=free_port())
    monkeypatch.setenv("PREFECT_API_URL", url)
    with pytest.raises(UserError, match="^PREFECT_API_URL: no Prefect server responds at "), prefect_api(tmp_path):
        pytest.fail("the block must not run")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_cannot_be_read_is_shown_as_its_error_alone(tmp_path, capsys):
    store = ObjectStore(f"file://{tmp_path}")
    run = open_run(store, tiny_config(tmp_path))
    (tmp_path / "runs" / run.run_id / "config.json").write_bytes(b"damaged")
    assert cli.main(["show", run.run_id, "--store", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1


def test_the_name_of_a_run_is_printed_as_soon_as_it_is_known(tmp_path):
    written = io.StringIO()
    with live_view(tiny_config(tmp_path), LastingConsole(file=written)):
        announce_run(RunRef(run_id="tiny-1", store_uri=f"file://{tmp_path}", config_digest="0" * 64))
        assert "run      tiny-1\n" in written.getvalue()


def test_a_reader_that_goes_away_does_not_end_what_is_followed(tmp_path):
    """`roll run CONFIG | head`: the console falls silent."""
    script = (
        "import sys\n"
        "from flows.cli.progress_view import LastingConsole\n"
        "console = LastingConsole()\n"
        "for _ in range(100):\n"
        "    console.print('a row')\n"
        "print('went on', file=sys.stderr)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b"went on\n"
    assert process.wait() == 0


def fail_without_a_server(is_wrapped: bool) -> None:
    """Raise what Prefect's client raises without a server."""
    refused = httpx.ConnectError("refused")
    if is_wrapped:
        raise RuntimeError("Failed to reach API at http://127.0.0.1:1/api/") from refused
    raise refused


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_what_prefects_client_says_about_its_server_becomes_one_sentence(tmp_path, monkeypatch, is_wrapped):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.setattr(prefect_server, "_check_responds", lambda url: None)
    sentence = "the Prefect server does not answer as it should .ConnectError: refused"
    with pytest.raises(PrefectUnavailable, match=sentence), prefect_api(tmp_path):
        fail_without_a_server(is_wrapped)


def test_other_errors_pass_through_the_block_that_provides_prefect(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.setattr(prefect_server, "_check_responds", lambda url: None)
    with pytest.raises(RuntimeError, match="^another$"), prefect_api(tmp_path):
        raise RuntimeError("another")
