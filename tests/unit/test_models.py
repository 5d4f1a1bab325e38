"""Command `roll models`: the default folder of a model, and missing packages."""

from pathlib import Path

import pytest

from flows.cli.models import default_folder, write_model
from roll_core.errors import UserError


def test_the_default_folder_of_a_model_has_its_name():
    assert default_folder("smollm2-135m") == Path("roll-data/models/smollm2-135m")
    assert default_folder("/downloads/Qwen3-0.6B.gguf") == Path("roll-data/models/Qwen3-0.6B")


@pytest.mark.parametrize("module", ["gguf", "accelerate"])
def test_a_missing_package_is_reported_in_one_sentence(tmp_path, monkeypatch, module):
    monkeypatch.setattr("roll_core.extras.find_spec", lambda name: None if name == module else object())
    message = rf"^roll models import: the package {module} is missing: pip install 'roll-rl\[models\]'$"
    with pytest.raises(UserError, match=message):
        write_model("smollm2-135m", tmp_path)
