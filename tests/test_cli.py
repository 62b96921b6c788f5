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


def test_what_the_user_can_fix_is_one_message_with_status_2(tmp_path):
    command = [sys.executable, "-m", "cldetr.cli", "shapes", "--out", str(tmp_path), "--size", "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "size is 3: choose 48 to 1024" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_module_of_the_users_is_imported_before_the_command(tmp_path, monkeypatch, capsys):
    from cldetr.data.exemplars import STRATEGIES

    code = "from cldetr.data.exemplars import STRATEGIES\nSTRATEGIES['mine'] = STRATEGIES['random']"
    (tmp_path / "my_imported.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    words = [
        "exemplars",
        "--annotations",
        "none.json",
        "--strategy",
        "mine",
        "--out",
        "memory.json",
    ]
    try:
        assert main(words) == 2
        assert "'mine' is unknown" in capsys.readouterr().err
        assert main(["--import", "my_imported", *words]) == 2
        assert "mine" in STRATEGIES
        assert "none.json" in capsys.readouterr().err  # the strategy is known: the file is missing
        assert main(["--import", "my_missing", *words]) == 2
        assert "cannot import my_missing" in capsys.readouterr().err
    finally:
        STRATEGIES.pop("mine", None)
