"""Secrets: configs refuse them, and what travels to a leg holds none."""

import stat

import cloudpickle
import pytest
from prefect.context import serialize_context
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_KEY,
    PREFECT_SERVER_DATABASE_CONNECTION_URL,
    temporary_settings,
)

from flows.rlvr import context_for_leg
from roll_core.errors import UserError
from roll_core.host import make_files_private, make_private_folder
from tests.support import tiny_config

PASSWORD = "hunter2-planted"


@pytest.mark.parametrize(
    ("section", "uri", "alternative"),
    [
        ("tracking", f"http://me:{PASSWORD}@mlflow:5000", "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        ("tracking", f"postgresql://me:{PASSWORD}@db/mlflow", "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        ("store", f"s3://key:{PASSWORD}@bucket/runs", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    ],
)
def test_a_password_in_an_address_is_refused_and_not_repeated(tmp_path, section, uri, alternative):
    with pytest.raises(UserError, match=f"{section}.*must not contain a password.*{alternative}") as raised:
        tiny_config(tmp_path, **{section: {"uri": uri}})
    assert PASSWORD not in str(raised.value)


def test_an_address_without_a_password_is_accepted(tmp_path):
    config = tiny_config(tmp_path, tracking={"uri": "https://mlflow.example.org:443"}, store={"uri": "s3://bucket/runs"})
    assert config.tracking.uri == "https://mlflow.example.org:443"


def test_the_prefect_context_of_a_leg_holds_no_key_no_password_and_no_database(tmp_path):
    secrets = {
        PREFECT_API_KEY: f"{PASSWORD}-key",
        PREFECT_API_AUTH_STRING: f"me:{PASSWORD}",
        PREFECT_SERVER_DATABASE_CONNECTION_URL: f"postgresql+asyncpg://me:{PASSWORD}@db/prefect",
    }
    with temporary_settings(secrets):
        assert PASSWORD.encode() in cloudpickle.dumps(serialize_context()), "Prefect's own context holds them"
        assert PASSWORD.encode() not in cloudpickle.dumps(context_for_leg(tiny_config(tmp_path)))


def test_a_private_folder_and_its_files_are_for_their_owner_alone(tmp_path):
    folder = make_private_folder(tmp_path / "work" / "run-1")
    (folder / "leg.pkl").touch(mode=0o644)
    make_files_private(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "leg.pkl").stat().st_mode) == 0o600
