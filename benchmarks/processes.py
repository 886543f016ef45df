# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Programs that wait for a line of JSON, do as it says, and answer with another.

For contenders that can't be in one process: two versions of the package, or another program's
library with threads of its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any


class Worker:
    """Such a program, running. Ends this one where it ends before it was told to."""

    def __init__(self, command: Sequence[object], environment: Mapping[str, str] | None = None):
        """environment: what it has beside this program's."""
        self.process = subprocess.Popen(
            list(map(str, command)),
            env=os.environ | dict(environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """What it answers to {"do": do, **arguments}."""
        assert self.process.stdin is not None
        print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)
        return self.answer(do)

    def answer(self, do: str) -> dict[str, Any]:
        """The next line. do: what was asked, for the error."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{' '.join(map(str, self.process.args))} ended when asked to {do}")
        return json.loads(line)

    def close(self) -> None:
        self.process.communicate(timeout=60)
