"""Have vLLM make its configuration under kvtide, once for each case, each in a fork of its own.

Cases come as JSON on standard input; what became of them goes as JSON to standard output.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

import vllm.v1.worker.cpu_worker  # noqa: F401  # must come first of all of vLLM
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

import kvtide.engines.vllm.eras
import kvtide.engines.vllm.plugin

ACCEPTED = 77


def main() -> None:
    """Run all cases."""
    outcomes = {}
    for name, case in json.load(sys.stdin).items():
        with tempfile.TemporaryFile() as output:
            pid = os.fork()
            if pid == 0:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                _configure(case)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            output.seek(0)
            outcomes[name] = {"status": status, "output": output.read().decode()}
    print(json.dumps(outcomes))


def _configure(case: dict[str, Any]) -> None:
    os.environ.update(case["environ"])
    for broken in case["broken"]:
        _break(broken)
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    EngineArgs.from_cli_args(parser.parse_args(case["arguments"])).create_engine_config()
    print("accepted", flush=True)
    os._exit(ACCEPTED)


def _break(what: str) -> None:
    if what == "memfd":

        def refuse(name: str, flags: int = 0) -> int:
            raise OSError(38, "Function not implemented")

        os.memfd_create = refuse
    elif what == "user":
        user = os.geteuid()
        os.geteuid = lambda: user + 1
    elif what == "platform":
        # Sleep mode is refused by vLLM itself where the platform has none.
        type(current_platform).is_sleep_mode_available = lambda self: True
    else:
        assert what == "vllm"
        kvtide.engines.vllm.eras._FIELDS = {"size", "pages"}


if __name__ == "__main__":
    main()
