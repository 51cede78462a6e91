"""A rank above 0 under torchrun: it takes part in every case that rank 0 announces.

It sends its results to rank 0 and stores nothing.
"""

from __future__ import annotations

import sys
import traceback
import warnings

from stepscope.errors import StepscopeError
from stepscope.studies.registry import find_measurable
from stepscope.training.ranks.cases import crew


class Seat:
    """A `Bench` that reports no progress."""

    def __init__(self, device: str) -> None:
        from stepscope.measure.device import pick_device

        self.device = pick_device(device)

    def progress(self, done: int, total: int, what: str) -> None:
        """Do nothing: rank 0 shows the progress."""


def main() -> None:
    warnings.simplefilter("ignore")
    while (task := crew().next_task()) is not None:
        seat = Seat(task["device"])
        seat.device.release()
        try:
            study = find_measurable(task["study"])
            study.measure(study.decode(task["config"]), seat)
        except StepscopeError:
            # The case's record on rank 0 has the same error.
            continue
        except Exception:
            traceback.print_exc()


if __name__ == "__main__":
    try:
        main()
    except StepscopeError as error:
        sys.exit(f"stepscope: {error}")
