import subprocess
import sys

import pytest

from cldetr import __version__
from cldetr.cli import COMMANDS, main


def test_help_lists_every_command_without_importing_torch():
    code = (
        "import sys\n"
        "from cldetr.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as stop: print(stop.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *help_lines, last = done.stdout.splitlines()
    assert last == "0 False"
    for name in COMMANDS:
        assert any(line.split()[:1] == [name] for line in help_lines), name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: cldetr {name}")


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"cldetr {__version__}\n"


def test_unknown_command_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["spilt"])
    assert stop.value.code == 2
    assert "split" in capsys.readouterr().err


def test_what_the_user_can_mend_is_one_message_with_status_2(tmp_path):
    command = [sys.executable, "-m", "cldetr.cli", "shapes", "--out", str(tmp_path), "--size", "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "size is 3: choose 48 to 1024 px" in done.stderr
    assert "Traceback" not in done.stderr
