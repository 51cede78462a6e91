"""Run one first step in a fresh process, with the cache folder named by the environment.

echo '{"kind": …}' | python -m stepscope.studies.compile.recompilation cuda
"""

from __future__ import annotations

import json
import sys

import msgspec


def main() -> None:
    from stepscope.measure.device import pick_device
    from stepscope.studies.compile.cases import AttentionCase, ModelCase
    from stepscope.studies.compile.measure import (
        compiled_variant,
        eager_variant,
        first_run_s,
        load_compiler,
    )

    case = msgspec.json.decode(sys.stdin.buffer.read(), type=ModelCase | AttentionCase)
    device = pick_device(sys.argv[1])
    eager = eager_variant(case, device)
    eager.step.run()
    load_compiler()
    first_s = first_run_s(compiled_variant(case, device, eager).step, device)
    # On a new line, because a library may have left the current line unfinished.
    sys.stdout.write("\n" + json.dumps({"first_s": first_s}) + "\n")


if __name__ == "__main__":
    main()
