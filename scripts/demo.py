"""The main job, whole, on real input through a real S3 server; run it with ``scripts/demo``.

Each act prints the command that it runs and what came of it, and stops the demo if that is not
what it should be.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from s3_server import S3Server

ROOT = Path(__file__).resolve().parents[1]
BUCKET = "demo"
RUN = f"s3://{BUCKET}/run"
NUM_STEPS, EVERY, KILLED_AT = 40, 10, 30


def main() -> int:
    started = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="ckptool-demo-"))
    try:
        act("an S3 server of our own, on 127.0.0.1")
        with S3Server(work / "s3") as server:
            server.create_bucket(BUCKET)
            tell(f"{server.endpoint_url}, bucket {BUCKET}")
            os.environ.update(server.env())
            os.environ.update(
                PYTHONPATH=str(ROOT),
                OMP_NUM_THREADS="1",
                HF_HUB_OFFLINE="1",
                TOKENIZERS_PARALLELISM="0",
            )
            Demo(work).run()
    finally:
        shutil.rmtree(work, ignore_errors=True)
    tell(f"\nall of it worked, in {time.monotonic() - started:.0f} s")
    return 0


class Demo:
    """The acts in their order; ``work`` is a scratch folder."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._loss = ""

    def run(self) -> None:
        self.train_and_lose_a_rank()
        self.resume_on_two_ranks()
        step = self.inspect_and_validate()
        self.damage_a_copy(step)
        self.reshard_and_compare(step)
        self.export_and_generate(step)

    def train_and_lose_a_rank(self) -> None:
        act(f"train on 4 ranks, save every {EVERY} steps, and kill -9 one rank during a save")
        # every part takes a second, as over a slow network, so that a save can be caught
        launch = torchrun(4, self._work, env={"CKPTOOL_FAULT": "in-part:slow"})
        for line in launch.lines():
            tell(f"  {line}")
            if f"step {KILLED_AT} " in line and "loss" in line:
                time.sleep(0.5)
                launch.kill_rank(2)
                tell("  -> kill -9 of rank 2, while it saves")
        check(launch.wait() != 0, "a job that lost a rank must not end as if nothing was")
        listed = json.loads(run(*CKPTOOL, "ls", RUN, "--json", show=False))
        run(*CKPTOOL, "ls", RUN)
        states = {step["step"]: step["state"] for step in listed["steps"]}
        check(
            all(state == "committed" for step, state in states.items() if step < KILLED_AT),
            f"the steps before {KILLED_AT} must be committed: {states}",
        )
        check(
            states.get(KILLED_AT) != "committed",
            f"step {KILLED_AT} was interrupted and must not be committed: {states}",
        )
        tell(f"step {KILLED_AT} is not committed; the newest good one is {KILLED_AT - EVERY}")

    def resume_on_two_ranks(self) -> None:
        act("resume on 2 ranks, from the newest committed step, and finish")
        launch = torchrun(2, self._work)
        seen = []
        for line in launch.lines():
            tell(f"  {line}")
            seen.append(line)
        check(launch.wait() == 0, "the resumed run must finish")
        losses = [line.split("loss")[1].split()[0] for line in seen if "loss" in line]
        self._loss = losses[-1] if losses else "none"
        wanted = f"resumed from step {KILLED_AT - EVERY}"
        check(any(wanted in line for line in seen), f"the run must say: {wanted}")

    def inspect_and_validate(self) -> str:
        act("look into the last checkpoint, and prove every byte of it")
        run(*CKPTOOL, "ls", RUN)
        step = f"{RUN}/step-{NUM_STEPS:08d}"
        run(*CKPTOOL, "inspect", step)
        run(*CKPTOOL, "validate", step, "--read-data")
        return step

    def damage_a_copy(self, step: str) -> None:
        act("flip one bit in a copy: validate names the tensor and exits with 3")
        copy = self._work / "damaged"
        python("copy", step, str(copy))
        where = json.loads(python("flip", str(copy)))
        tell(f"one bit of {where['entry']} flipped, at byte {where['byte']} of {where['file']}")
        printed = run(*CKPTOOL, "validate", str(copy), "--read-data", expect=3)
        check(where["entry"] in printed, f"validate must name {where['entry']}")

    def reshard_and_compare(self, step: str) -> None:
        act("lay it out for 16 ranks, and compare with what stock torch loads")
        there = f"s3://{BUCKET}/resharded-16"
        run(*CKPTOOL, "reshard", step, there, "--to", "16")
        run(*CKPTOOL, "validate", there, "--read-data")
        tell(python("compare", step, there))

    def export_and_generate(self, step: str) -> None:
        act("export the model as one bf16 file, load it in one process, and generate")
        out = self._work / "model.safetensors"
        run(*CKPTOOL, "export", step, str(out), "--dtype", "bf16")
        tell(f"the trainer's last loss: {self._loss} (fp32, before the step's update)")
        printed = python("generate", str(out), "scripts/demo.toml", str(NUM_STEPS))
        tell(printed)
        loss = float(printed.split(f"step {NUM_STEPS}: ")[1].split()[0])
        check(abs(loss - float(self._loss)) < 0.1, "the exported model must do as the trainer's")


CKPTOOL = (sys.executable, "-m", "ckptool")


def act(title: str) -> None:
    tell(f"\n=== {title}")


def tell(text: str) -> None:
    print(text, flush=True)


def check(ok: bool, message: str) -> None:
    if not ok:
        raise SystemExit(f"demo: {message}")


def run(*command: str, expect: int = 0, show: bool = True) -> str:
    """Run a command and return its stdout; ends the demo when its exit code is another."""
    if show:
        shown = ["ckptool" if c == CKPTOOL[0] else c for c in command if c not in CKPTOOL[1:]]
        tell(f"$ {' '.join(shown)}")
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if show:
        tell(done.stdout.rstrip())
        if done.stderr.strip():
            tell(done.stderr.rstrip())
    if show and expect:
        tell(f"exit code {done.returncode}")
    check(
        done.returncode == expect,
        f"{' '.join(command)} ended with {done.returncode}, not {expect}: {done.stderr}",
    )
    return done.stdout


def python(*arguments: str) -> str:
    """One of the helpers in demo_parts.py, in a process of its own."""
    script = str(ROOT / "scripts" / "demo_parts.py")
    return run(sys.executable, script, *arguments, show=False).rstrip()


class torchrun:
    """A running torchrun of the trainer; its output is read line by line."""

    def __init__(self, num_ranks: int, work: Path, *, env: dict[str, str] | None = None) -> None:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(num_ranks), "-m", "trainer"),
            *("--config", "scripts/demo.toml", "--set", f"run.root={RUN}"),
            *("--set", f"run.steps={NUM_STEPS}", "--set", f"checkpoint.every={EVERY}"),
            *("--set", f"metrics.dir={work / 'metrics'}"),
        ]
        tell(f"$ torchrun {' '.join(command[4:])}")
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
        )
        # a job that hangs must not hang the demo
        self._timer = threading.Timer(300, self._process.kill)
        self._timer.start()

    def lines(self):
        """The trainer's own lines; what torchrun says about a killed rank is long."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.rstrip()
            if _is_news(text):
                yield text

    def wait(self) -> int:
        self._timer.cancel()
        return self._process.wait()

    def kill_rank(self, rank: int) -> None:
        os.kill(_pid_of_rank(self._process.pid, rank), signal.SIGKILL)


def _is_news(text: str) -> bool:
    words = ("step", "resumed", "error:", "Signal", "rank ")
    return any(word in text for word in words) and "torch/" not in text


def _pid_of_rank(parent: int, rank: int) -> int:
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            ppid = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            environ = (folder / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        if ppid == parent and f"RANK={rank}".encode() in environ:
            return int(folder.name)
    raise SystemExit(f"demo: rank {rank} is not running")


if __name__ == "__main__":
    sys.exit(main())
