"""The trainer, except that rank 1 of the first start is killed once a step is committed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from trainer.__main__ import main


def die_after(metadata: Path) -> None:
    while not metadata.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        metadata = Path(os.environ["DIE_AFTER"])
        threading.Thread(target=die_after, args=(metadata,), daemon=True).start()
    sys.exit(main())
