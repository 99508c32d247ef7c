"""What a worker reads of a part that the server copied without telling its checksum."""

from __future__ import annotations

import os
from pathlib import Path

from recording_store import RecordingStore

from ckptool.engine.normal import Normaliser
from ckptool.engine.tasks import CopyTask, Target
from ckptool.engine.worker import PROVE_BYTES, Worker
from ckptool.formats.crc import crc32
from ckptool.model import Extent
from ckptool.planning.parts import Step
from ckptool.planning.plan import Copy
from ckptool.storage import open_store
from ckptool.storage.base import PartReceipt

START, END = 1261, 1261 + 2 * PROVE_BYTES + 77


class Copying:
    """Copies, and keeps no checksums."""

    def write_part(self, target: Target, step: Step, data: memoryview, crc32: int) -> PartReceipt:
        raise AssertionError("nothing is to be uploaded")

    def copy_part(self, target: Target, step: Step, source_url: str) -> PartReceipt:
        return PartReceipt(step.number, step.num_bytes, token="t")


def test_a_copied_part_is_proved_a_few_mib_at_a_time(tmp_path: Path) -> None:
    """Many copies are in flight at once, so what each holds to prove it is small."""
    data = os.urandom(END + 100)
    source = RecordingStore(open_store(str(tmp_path)))
    source.put("__0_0.distcp", data)
    copy = Copy(Extent("__0_0.distcp", START, END), ((START, END, 7),))
    step = Step(0, "out", 3, 0, END - START, (copy,), (None,))
    worker = Worker(source, Normaliser(source, max_memory_bytes=1 << 20), Copying())
    result = worker.do(CopyTask(step, Target(0, "out", "t", END - START), trust_server=False))
    assert result.proofs == [(7, START, END, crc32(data[START:END]))]
    assert result.num_bytes_read == END - START
    reads = [(start, end) for verb, _, start, end in source.calls if verb == "read"]
    assert reads[0][0] == START and reads[-1][1] == END
    assert all(end - start <= PROVE_BYTES for start, end in reads)
