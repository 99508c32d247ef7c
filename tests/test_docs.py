"""The documents -> what they promise: commands, options, statuses, links and examples that hold."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from gloo import run_ranks
from golden_cases import ROOT as GOLDEN

from ckptool import __version__
from ckptool.cli.app import COMMANDS, cli
from ckptool.cli.options import EXIT_STATUSES

ROOT = Path(__file__).resolve().parents[1]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
DOCS += sorted((ROOT / "docs").glob("*.md"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
CLI = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
CHECKPOINT = str(GOLDEN / "torch-2.13.0" / "fsdp2-4" / "ckpt")


def blocks(text: str, *languages: str) -> list[str]:
    """The fenced blocks of these languages ("" is one without)."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [body for language, body in found if language in languages]


def command_lines(path: Path) -> list[str]:
    """What a reader may type: lines of sh blocks, and lines after ``$`` of console blocks."""
    text = path.read_text(encoding="utf-8")
    lines = [line for body in blocks(text, "sh", "") for line in body.splitlines()]
    for body in blocks(text, "console"):
        lines += [line[2:] for line in body.splitlines() if line.startswith("$ ")]
    return [line.strip() for line in lines]


def lines_of(*words: str) -> list[Any]:
    """The command lines of all documents that begin with these words, usage lines aside."""
    return [
        pytest.param(line, id=f"{path.name}: {line[:60]}")
        for path in DOCS
        for line in command_lines(path)
        if line.split()[: len(words)] == list(words) and not re.search(r"\[|\b[A-Z]+$", line)
    ]


def section(text: str, title: str) -> str:
    """The text below one heading of the second level."""
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert match is not None, f"no section {title!r}"
    return match[1]


def command_of(name: str) -> click.Command:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return command


@pytest.mark.parametrize("name", COMMANDS)
def test_command_is_documented_with_every_option(name: str) -> None:
    """Each option of a command stands in its section of docs/cli.md, or in the common one."""
    text = section(CLI, f"ckptool {name}") + section(CLI, "What all commands share")
    told = set(re.findall(r"--[a-z][a-z-]+", text))
    has = {o for p in command_of(name).params for o in p.opts if o.startswith("--")}
    assert has - told == set()
    assert re.search(rf"\bckptool {name}\b", README)


@pytest.mark.parametrize("text", [README, CLI], ids=["README", "cli"])
def test_every_exit_status_is_documented(text: str) -> None:
    """The table of statuses has those of the command line, all of them and no other."""
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", section(text, "Exit statuses"), re.MULTILINE)
    assert [int(code) for code, _ in rows] == sorted(EXIT_STATUSES)
    for code, meaning in rows:
        first = EXIT_STATUSES[int(code)].split(":")[0]
        assert meaning.startswith(first), code


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_exit_statuses_of_the_table(name: str) -> None:
    """A command's own help has no status that the documents do not know."""
    epilog = command_of(name).epilog or ""
    codes = {int(code) for code in re.findall(r"^  (\d+) ", epilog, re.MULTILINE)}
    assert codes
    assert codes <= set(EXIT_STATUSES)


def test_exit_statuses_of_the_trainer_are_documented() -> None:
    """Whoever reads a rank's status finds it in the README."""
    pytest.importorskip("torch")
    outcome = importlib.import_module("trainer.outcome")
    codes = (outcome.PREEMPTED, outcome.PREEMPTED_UNSAVED, outcome.NON_FINITE)
    assert all(f" {code} " in section(README, "Exit statuses").replace("\n", " ") for code in codes)


@pytest.mark.parametrize("line", lines_of("ckptool"))
def test_command_line_in_a_document_parses(line: str) -> None:
    """No document shows an option that is not there."""
    _, name, *arguments = shlex.split(line, comments=True)
    assert name in COMMANDS
    command_of(name).make_context(name, arguments)


def test_documents_show_every_command() -> None:
    """The check above has lines of every command to look at."""
    shown = {shlex.split(param.values[0])[1] for param in lines_of("ckptool")}
    assert shown == set(COMMANDS)


TRAINER_LINES = [*lines_of("torchrun"), *lines_of("python", "-m", "trainer")]


@pytest.mark.parametrize("line", TRAINER_LINES)
def test_trainer_line_in_a_document_parses(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key that a document sets is one that the configuration has."""
    trainer = importlib.import_module("trainer.__main__")
    words = shlex.split(line, comments=True)
    options = trainer._parser().parse_args(words[words.index("trainer") + 1 :])
    monkeypatch.chdir(ROOT)
    trainer.load_config(options.config, overrides=options.set)


def test_configuration_keys_in_the_readme_exist() -> None:
    """The table of systems names keys of the configuration, with values that it takes."""
    trainer = importlib.import_module("trainer.__main__")
    table = section(README, "What is sharded how")
    pairs = re.findall(r"`([a-z]+\.[a-z0-9_]+) = ([^`]+)`", table)
    assert len(pairs) > 10
    for key, value in pairs:
        others = ["parallel.strategy=fsdp1"] if "fsdp1_" in key else []
        trainer.load_config(None, overrides=[*others, f"{key}={value}"])


JSON_OF = {
    "ls": [CHECKPOINT],
    "inspect": [CHECKPOINT],
    "validate": [CHECKPOINT, "--read-data"],
    "reshard": [CHECKPOINT, "dest", "--to", "3", "--dry-run", "--probe"],
    "export": [CHECKPOINT, "dest", "--dry-run", "--probe"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_keys_of_the_json_document_are_documented(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that reads --json finds every key in docs/cli.md."""
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "ckptool", name, *JSON_OF[name], "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    document = json.loads(done.stdout)
    told = set(re.findall(r"`(\w+)`", section(CLI, f"ckptool {name}")))
    assert set(_keys(document)) - told - {"schema", "error"} == set()


def _keys(value: Any, *, depth: int = 3) -> Iterator[str]:
    """Keys of a document, as deep as its fields go; maps of names to facts are not fields."""
    rows = value[:1] if isinstance(value, list) else [value]
    for row in rows:
        if isinstance(row, dict) and depth and all(key.isidentifier() for key in row):
            for key, below in row.items():
                yield key
                if key not in ("manifest", "box"):
                    yield from _keys(below, depth=depth - 1)


def test_every_finding_is_documented_with_its_severity() -> None:
    """The codes of findings are meant for programs, so all of them are told."""
    text = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "ckptool").rglob("*.py"))
    made = re.findall(r'"([a-z]+(?:-[a-z]+)*)",\s*(ERROR|WARNING|NOTE)\b', text)
    damage = re.search(r'code = "([a-z-]+)" if \w+ else "([a-z-]+)"', text)
    assert damage is not None
    codes = {code: severity.lower() for code, severity in made}
    codes |= dict.fromkeys(damage.groups(), "error")
    rows = re.findall(r"^\| `([a-z-]+)` \| (error|warning|note) \|", CLI, re.MULTILINE)
    assert dict(rows) == codes


def _anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_resolve(path: Path) -> None:
    """Each link leads to a file of the project, and to a heading that it has."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_scripts_and_modules_that_are_named_exist(path: Path) -> None:
    """A path in a document is a path of the project."""
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:scripts|tests|ckptool|trainer|docs)/[\w./-]+)`", text):
        if "VERB" not in name:
            assert (ROOT / name).exists(), name


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_nothing_is_left_open(path: Path) -> None:
    """A document says what is, and has no place kept for later."""
    assert re.search(r"\b(TBD|TODO|FIXME|XXX|coming soon)\b", path.read_text()) is None


def test_changelog_has_the_current_version() -> None:
    """Who installs a version finds what is new in it."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(__version__)}\b", changelog, re.MULTILINE)


def test_map_names_every_package() -> None:
    """The README's map of the code has a line for each package, and for nothing else."""
    packages = {
        ".".join(init.parent.relative_to(ROOT).parts)
        for top in ("ckptool", "trainer")
        for init in (ROOT / top).rglob("__init__.py")
    }
    rows = re.findall(r"^\| `([\w.]+)` \|", section(README, "Map of the code"), re.MULTILINE)
    assert set(rows) == packages | {"tests", "scripts", "docs"}
    assert len(rows) == len(set(rows))


def test_two_commands_stand_in_the_first_screen() -> None:
    """A newcomer sees them without scrolling."""
    first_screen = README.splitlines()[:30]
    assert any(line.startswith("scripts/demo") for line in first_screen)
    assert any(line.startswith("scripts/test") for line in first_screen)


def test_help_of_the_group_lists_the_commands() -> None:
    """``ckptool --help`` shows what the documents do."""
    shown = CliRunner().invoke(cli, ["--help"]).output
    assert all(re.search(rf"^  {name}\b", shown, re.MULTILINE) for name in COMMANDS)


def test_loops_of_the_readme_run(tmp_path: Path) -> None:
    """The plain, the torchtitan-like and the Lightning-like loop save, and then resume; the one
    that exports does."""
    pytest.importorskip("torch")
    ends = run_ranks(__file__, "run_loops", num_ranks=2, folder=str(tmp_path))
    for end in ends:
        exported = end.result.pop("live")
        assert end.result == {"plain": [100, 200], "titan": [100, 200], "lightning": [100, 200]}
        assert exported == [100]


def run_loops(rank: int, num_ranks: int, *, folder: str) -> dict[str, list[int]]:
    """What each rank does: every loop to step 100, then in a new start to step 200."""
    *loops, live = blocks(README, "python")
    runs = {"plain": _run_plain, "titan": _run_titan, "lightning": _run_lightning}
    assert len(loops) == len(runs)
    steps = {}
    for (name, run), code in zip(runs.items(), loops, strict=True):
        url = f"{folder}/{name}"
        for num_steps in (100, 200):
            run(code.replace('"s3://bucket/run"', repr(url)), url, num_steps)
        steps[name] = sorted(int(p.parent.name[5:]) for p in Path(url).glob("step-*/.metadata"))
    _run_plain(live.replace("s3://bucket/llama8b", f"{folder}/live"), "", 100)
    steps["live"] = [int(p.parent.name) for p in Path(folder, "live").glob("*/model.safetensors")]
    return dict(steps)


def _run_plain(code: str, url: str, num_steps: int) -> None:
    model, optimizer = _sharded_model()
    names: dict[str, Any] = {"model": model, "optimizer": optimizer, "num_steps": num_steps}
    taken: list[int] = []
    names["train_step"] = lambda model, optimizer: (_step(model, optimizer), taken.append(1))
    exec(code, names)
    assert len(taken) == 100, "the second start goes on where the first one stopped"


def _run_titan(code: str, url: str, num_steps: int) -> None:
    import torch

    model, optimizer = _sharded_model()
    names = {
        "model_parts": _Stateful("model", model, optimizer),
        "optimizers": _Stateful("optim", model, optimizer),
        "schedulers": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        "train_state": _Counter(),
        "dataloader": _Loader(torch.distributed.get_rank()),
        "num_steps": num_steps,
        "train_step": lambda parts, optimizers: _step(model, optimizer),
    }
    exec(code, names)
    assert names["train_state"].step == num_steps
    assert names["dataloader"].num_loads == (1 if num_steps > 100 else 0)


def _run_lightning(code: str, url: str, num_steps: int) -> None:
    model, optimizer = _sharded_model()
    names: dict[str, Any] = {}
    with _stub_of_lightning():
        exec(code, names)
    callback = names["ShardedSaves"](url, 100)
    trainer = types.SimpleNamespace(global_step=0, optimizers=[optimizer])
    callback.on_train_start(trainer, model)
    assert callback.first == num_steps - 100
    for _ in range(100):
        _step(model, optimizer)
        trainer.global_step += 1
        callback.on_train_batch_end(trainer, model, None, None, 0)
    callback.on_train_end(trainer, model)


def _sharded_model() -> tuple[Any, Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters())


def _step(model: Any, optimizer: Any) -> None:
    import torch

    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class _Stateful:
    """A part as torchtitan has them: its state by clean names."""

    def __init__(self, kind: str, model: Any, optimizer: Any) -> None:
        self.kind, self.model, self.optimizer = kind, model, optimizer

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint import state_dict as api

        if self.kind == "model":
            return dict(api.get_model_state_dict(self.model))
        return dict(api.get_optimizer_state_dict(self.model, self.optimizer))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint import state_dict as api

        if self.kind == "model":
            api.set_model_state_dict(self.model, state)
        else:
            api.set_optimizer_state_dict(self.model, self.optimizer, state)


class _Counter:
    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class _Loader:
    """Where one rank stands in its data; the rank is in the key."""

    def __init__(self, rank: int) -> None:
        self.key = f"dp_rank_{rank}"
        self.num_loads = 0

    def state_dict(self) -> dict[str, bytes]:
        return {self.key: self.key.encode()}

    def load_state_dict(self, state: dict[str, bytes]) -> None:
        self.num_loads += state == {self.key: self.key.encode()}


@contextlib.contextmanager
def _stub_of_lightning() -> Iterator[None]:
    """Just enough of lightning.pytorch for a callback's class to be made."""
    package = types.ModuleType("lightning")
    module = types.ModuleType("lightning.pytorch")
    module.Callback = object  # type: ignore[attr-defined]
    sys.modules.update({"lightning": package, "lightning.pytorch": module})
    try:
        yield
    finally:
        del sys.modules["lightning"], sys.modules["lightning.pytorch"]
