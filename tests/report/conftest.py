"""One page of one small real run, for all that looks at pages."""

import shutil

import pytest
from PIL import Image

from cldetr.cli import main


@pytest.fixture(scope="session")
def drawn_run(tiny_run, tmp_path_factory):
    """A finished run without its weights, with a picture and with its report."""
    folder = tmp_path_factory.mktemp("drawn") / "run"
    shutil.copytree(tiny_run, folder, ignore=shutil.ignore_patterns("*.pth", "tensorboard"))
    (folder / "pictures").mkdir()
    Image.new("RGB", (160, 90), "teal").save(folder / "pictures/teacher.png")
    assert main(["report", str(folder)]) == 0
    return folder
