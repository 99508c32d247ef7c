"""The command line, called in this process: exit statuses, texts and JSON documents."""

from __future__ import annotations

import json
import shutil

import pytest
from dcp_writer import flip_bit, payload_at, write_f4

from ckptool.cli.app import COMMANDS, run
from ckptool.cli.options import EXIT_STATUSES


@pytest.fixture
def f4(tmp_path):
    return write_f4(tmp_path / "run" / "step-00000012")


@pytest.fixture
def call(capsys):
    """Run one command line: (exit status, stdout, stderr)."""

    def call(*args):
        status = run([str(a) for a in args])
        out, err = capsys.readouterr()
        return status, out, err

    return call


ARGUMENTS = {
    "ls": [],
    "inspect": [],
    "validate": [],
    "reshard": ["DEST", "--to", "2"],
    "export": ["DEST"],
}


def arguments(command, source, tmp_path):
    rest = [str(tmp_path / "dest") if a == "DEST" else a for a in ARGUMENTS[command]]
    return [command, str(source), *rest]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_tells_the_exit_statuses(call, command):
    """Each command's help lists its exit statuses with their meaning."""
    status, out, _ = call(command, "--help")
    assert status == 0
    listed = out.split("Exit status:")[1]
    codes = {int(line.split()[0]) for line in listed.strip().splitlines()}
    assert codes <= EXIT_STATUSES.keys()
    assert {0, 1, 2, 3, 10, 12, 130} <= codes
    if command not in ("ls",):
        assert 11 in codes


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_the_common_options(call, command):
    """--json, -q, -v and --storage-option are everywhere; --help and -h too."""
    _, out, _ = call(command, "-h")
    for option in ("--json", "-q", "-v", "--storage-option", "--source-option"):
        assert option in out
    assert ("--dest-option" in out) == (command in ("reshard", "export"))
    assert ("--jobs" in out) == (command in ("validate", "reshard", "export"))


@pytest.mark.parametrize("command", ["reshard", "export"])
def test_nothing_to_resume_or_discard_is_said(call, f4, tmp_path, command):
    """Without a journal there is nothing to go on with; both flags at once are a usage error."""
    words = arguments(command, f4, tmp_path)
    for option in ("--resume", "--discard"):
        status, _, err = call(*words, option)
        assert status == 11
        assert "no interrupted run" in err
    assert call(*words, "--resume", "--discard")[0] == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_path(call, tmp_path, command):
    """Exit 10, one clear sentence, nothing created; in JSON too."""
    args = arguments(command, tmp_path / "nope", tmp_path)
    status, out, err = call(*args)
    assert (status, out) == (10, "")
    assert err.startswith("ckptool: nothing is there: ")
    assert "Traceback" not in err
    status, out, _ = call(*args, "--json")
    document = json.loads(out)
    assert status == document["error"]["exit_code"] == 10
    assert document["schema"] == f"ckptool.{command}/1"
    assert document["error"]["code"] == "no-checkpoint"
    assert {"message", "hint", "url"} <= document["error"].keys()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "ls"])
def test_an_unfinished_save(call, f4, tmp_path, command):
    """Without .metadata: exit 10 and the words for it."""
    (f4 / ".metadata").unlink()
    status, _, err = call(*arguments(command, f4, tmp_path))
    assert status == 10
    assert "was not completed" in err


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "ls"])
def test_a_cut_metadata_is_damage(call, f4, tmp_path, command):
    """A .metadata cut short: exit 3, the file named."""
    (f4 / ".metadata").write_bytes((f4 / ".metadata").read_bytes()[:1500])
    status, out, err = call(*arguments(command, f4, tmp_path), "--json")
    assert status == 3
    assert ".metadata" in err
    assert json.loads(out)["error"]["code"] == "damaged"


def test_ls_shows_states(call, f4):
    """Committed and uncommitted steps, on stdout; talk goes to stderr."""
    shutil.copytree(f4, f4.parent / "step-00000020")
    (f4.parent / "step-00000020" / ".metadata").unlink()
    status, out, err = call("ls", f4.parent)
    assert status == 0
    lines = [line.split()[:3] for line in out.splitlines()[1:]]
    assert lines == [["12", "step-00000012", "committed"], ["20", "step-00000020", "uncommitted"]]
    assert "did not finish" in err
    assert call("ls", f4.parent, "-q")[2] == ""
    document = json.loads(call("ls", f4.parent, "--json")[1])
    assert [s["committed"] for s in document["steps"]] == [True, False]
    assert document["steps"][0].keys() == {
        "name", "url", "step", "state", "committed", "num_bytes", "num_files", "modified",
    }  # fmt: skip
    assert document["steps"][0]["modified"].endswith("Z")


def test_ls_of_two_steps_with_one_number(call, f4):
    """Listed all the same, and exit 3."""
    shutil.copytree(f4, f4.parent / "again-12")
    status, out, err = call("ls", f4.parent)
    assert status == 3
    assert "again-12" in out
    assert "there 2 times" in err


def test_inspect_json_has_every_entry(call, f4):
    """All entries, with every key present, whether or not --tensors is given."""
    document = json.loads(call("inspect", f4, "--json")[1])
    assert document["schema"] == "ckptool.inspect/1"
    assert len(document["entries"]) == 19
    keys = {"key", "kind", "group", "dtype", "shape", "num_bytes", "num_chunks", "stored_bytes",
            "files", "transforms", "path"}  # fmt: skip
    assert all(entry.keys() == keys for entry in document["entries"])
    assert document.keys() == {
        "schema", "error", "url", "step", "form", "version", "world_size", "manifest",
        "num_tensors", "num_values", "num_chunks", "num_bytes", "stored_bytes", "entries",
        "files", "by_group", "by_dtype", "findings", "notes",
    }  # fmt: skip
    assert document["error"] is None
    assert document["step"] == 12


def test_inspect_for_people(call, f4):
    """Totals by default; entries and files on request."""
    status, out, err = call("inspect", f4.parent)
    assert (status, err) == (0, "")
    assert "15 tensors" in out
    assert "model.w" not in out
    assert "newest" in out
    assert "model.w" in call("inspect", f4, "--tensors")[1]
    assert "__3_0.distcp" in call("inspect", f4, "--files")[1]
    only = call("inspect", f4, "--match", "model.[uw]")[1]
    assert "model.w" in only
    assert "model.buf" not in only


def test_validate_without_errors(call, f4):
    """Exit 0; what was and was not checked is said."""
    status, out, _ = call("validate", f4)
    assert status == 0
    assert "--read-data" in out
    status, out, _ = call("validate", f4, "--read-data", "--max-memory", "8MiB", "--jobs", "2")
    assert status == 0
    assert "40 items ok, 0 damaged" in out


def test_validate_of_a_damaged_checkpoint(call, f4):
    """Exit 3; the finding is on stdout with tensor, box, file and byte, and the next step last."""
    path, at = payload_at(f4, "model.w", (3, 0))
    flip_bit(path, at + 5)
    status, out, err = call("validate", f4, "--read-data")
    assert (status, err) == (3, "")
    assert "error: chunk [3:6, 0:6] of 'model.w'" in out
    assert path.name in out
    assert out.splitlines()[-1].startswith("next: ")
    status, out, _ = call("validate", f4, "--read-data", "--json")
    document = json.loads(out)
    assert (status, document["ok"], document["error"]) == (3, False, None)
    (finding,) = document["findings"]
    assert finding == {
        "code": "damaged-payload",
        "severity": "error",
        "message": finding["message"],
        "entry": "model.w",
        "box": {"offsets": [3, 0], "sizes": [3, 6]},
        "file": path.name,
        "offset": at,
        "entries": [],
    }
    assert document["data"]["num_damaged"] == 1
    assert document.keys() == {
        "schema", "error", "url", "step", "form", "ok", "num_entries", "num_items", "num_errors",
        "num_warnings", "findings", "data", "remedy", "notes",
    }  # fmt: skip


def test_validate_a_share(call, f4):
    """--read-data-subset takes a percentage, with or without the sign."""
    assert call("validate", f4, "--read-data-subset", "30%")[0] == 0
    assert call("validate", f4, "--read-data-subset", "30")[0] == 0
    for wrong in ("0%", "101%", "x"):
        assert call("validate", f4, "--read-data-subset", wrong)[0] == 2
    assert call("validate", f4, "--read-data", "--read-data-subset", "5%")[0] == 2


def test_reshard_and_export_end_to_end(call, f4, tmp_path):
    """A dry run writes nothing; the real one writes what validates; again it is refused."""
    dest = tmp_path / "new"
    status, out, _ = call("reshard", f4, dest, "--to", "3", "--dry-run")
    assert (status, dest.exists()) == (0, False)
    assert "nothing was written" in out
    assert call("reshard", f4, dest, "--to", "3")[0] == 0
    assert call("validate", dest, "--read-data")[0] == 0
    status, out, _ = call("reshard", f4, dest, "--to", "3", "--json")
    assert (status, json.loads(out)["error"]["code"]) == (11, "not-empty")
    assert call("export", f4, tmp_path / "hf")[0] == 0
    assert (tmp_path / "hf" / "model.safetensors").exists()


def test_usage_errors(call, f4, tmp_path):
    """Exit 2 with the command to ask; in JSON too."""
    status, out, err = call("reshard", f4, tmp_path / "d")
    assert (status, out) == (2, "")
    assert "--to" in err
    assert "ckptool reshard --help" in err
    status, out, _ = call("inspect", "--json")
    assert (status, json.loads(out)["error"]["code"]) == (2, "usage")
    assert call("reshard", f4, tmp_path / "d", "--to", "2", "--probe")[0] == 2
    assert call("nonsense")[0] == 2
    assert call()[0] == 2
    assert call("inspect", f4, "--storage-option", "novalue")[0] == 2
    assert not (tmp_path / "d").exists()


def test_an_unexpected_failure_is_one_line(call, f4, monkeypatch):
    """No wall of traceback, unless -v asks for it."""
    from ckptool.cli import inspect as module

    def fail(*args, **kwargs):
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr(module, "inspect", fail)
    status, out, err = call("inspect", f4)
    assert (status, out) == (1, "")
    assert err.splitlines() == [
        "ckptool: unexpected ZeroDivisionError: by zero",
        "  this is a fault in ckptool; run again with -v to see where",
    ]
    assert "Traceback" in call("inspect", f4, "-v")[2]


def test_ctrl_c_is_130(call, f4, monkeypatch):
    """An interrupt ends with 130 and one word."""
    from ckptool.cli import inspect as module

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "inspect", interrupt)
    status, _, err = call("inspect", f4)
    assert (status, err.strip()) == (130, "ckptool: interrupted")
    status, out, _ = call("inspect", f4, "--json")
    assert json.loads(out)["error"]["code"] == "interrupted"


def test_names_cannot_steer_the_terminal(call, tmp_path):
    """Escape sequences in a hostile name are shown, not obeyed."""
    (tmp_path / "\x1b[2J-7").mkdir()
    (tmp_path / "\x1b[2J-7" / ".metadata").write_bytes(b"x")
    _, out, _ = call("ls", tmp_path)
    assert "\x1b" not in out
    assert "\\x1b[2J-7" in out


def test_version(call):
    """--version names the tool and its version."""
    status, out, _ = call("--version")
    assert (status, out.split()[0]) == (0, "ckptool")
