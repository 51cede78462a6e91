"""The process that measures. It owns the device and ends with its parent.

Whatever a case does to it (out of memory, a crash in a kernel, a hang), the runner loses only
this process: it records what happened and starts another.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NoReturn

import msgspec

from stepscope.errors import UsageError, one_line, tells_of_memory
from stepscope.runner import protocol
from stepscope.runner.descendants import WORKER, end_tagged
from stepscope.runner.protocol import (
    CheckModel,
    DismissFollowers,
    Failed,
    MeasureCase,
    Progress,
    Reply,
    Request,
)
from stepscope.studies.base import CaseSkipped, Measurement
from stepscope.studies.registry import find_measurable
from stepscope.training.ranks.cases import crew

_PROGRESS_EVERY_S = 0.25


class Worker:
    """A `Bench` for studies: the device, and a channel to the parent."""

    def __init__(self, channel: BinaryIO, device_choice: str) -> None:
        from stepscope.measure.device import pick_device
        from stepscope.measure.environment import describe, lacks

        self._channel = channel
        self._progress_said = 0.0
        self.device = pick_device(device_choice)
        self.environment = describe(self.device)
        self.say(protocol.Ready(self.environment, lacks(self.device)))

    def say(self, reply: Reply) -> None:
        send(self._channel, reply)

    def progress(self, done: int, total: int, what: str) -> None:
        # Drawing progress takes the parent time on a core that the next sample may need.
        now = time.monotonic()
        if done == total or now - self._progress_said >= _PROGRESS_EVERY_S:
            self._progress_said = now
            self.say(Progress(done, total, what))

    def answer(self, request: Request) -> Reply:
        try:
            if isinstance(request, MeasureCase):
                return protocol.Measured(self._measure(request))
            if isinstance(request, DismissFollowers):
                crew().announce(None)
                return protocol.Dismissed()
            if isinstance(request, CheckModel):
                return _check_model(request.model)
            from stepscope.measure.ceilings import ceilings

            measured = ceilings(self.device, self.environment, self.progress, again=request.again)
            return protocol.Ceilings(measured)
        except CaseSkipped as skipped:
            return Failed("skipped", str(skipped))
        except Exception as error:
            traceback.print_exc()
            failed = failure(error)
            if failed.status == "oom" and isinstance(request, MeasureCase):
                return self._with_post_mortem(failed, request, str(error))
            return failed

    def _with_post_mortem(self, failed: Failed, request: MeasureCase, message: str) -> Failed:
        try:
            study = find_measurable(request.study)
            attachments = study.post_mortem(study.decode(request.config), self, message)
        except Exception:
            # The failure itself is worth more than its explanation.
            traceback.print_exc()
            return failed
        return msgspec.structs.replace(failed, attachments=attachments)

    def _measure(self, request: MeasureCase) -> Measurement:
        self.device.release()
        _forget_compiled()
        study = find_measurable(request.study)
        return study.measure(study.decode(request.config), self)


def _check_model(name: str) -> Reply:
    from stepscope.training.building import build

    try:
        build(name)
    except UsageError as error:
        return Failed("error", str(error), usage=True)
    except Exception as error:
        failed = failure(error)
        # The step may fit where a second model does not: the case will show it.
        if failed.status == "oom":
            return protocol.Checked()
        return Failed("error", f"{name} failed: {failed.reason}", usage=True)
    return protocol.Checked()


def _forget_compiled() -> None:
    """Reset torch.compile, which gives up on code that it has compiled several times: with the
    count of one case the next one would silently run eagerly."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


def failure(error: Exception) -> Failed:
    """The failure that an exception means for the record."""
    import torch

    reason = one_line(error)
    out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and tells_of_memory(reason)
    )
    if out_of_memory:
        return Failed("oom", reason)
    return Failed("error", str(error) if isinstance(error, UsageError) else reason)


def send(channel: BinaryIO, reply: Reply) -> None:
    channel.write(protocol.encode(reply) + b"\n")
    channel.flush()


def _requests() -> queue.Queue[bytes]:
    """Lines from the parent. The process ends when the parent is gone."""
    lines: queue.Queue[bytes] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin.buffer:
            lines.put(line)
        _end_with_parent()

    threading.Thread(target=listen, daemon=True).start()
    return lines


def _end_with_parent() -> NoReturn:
    """End this process and the processes that it started, also those in other sessions."""
    with suppress(Exception):
        end_tagged(os.environ[WORKER], spare={os.getpid()})
    os._exit(1)


def _prefer_as_oom_victim() -> None:
    """Make the kernel's OOM killer end this process and not the runner."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        return


def main(device_choice: str) -> None:
    # Replies use the original standard output; output of libraries is redirected.
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = _requests()
    _prefer_as_oom_victim()
    warnings.simplefilter("ignore")
    try:
        worker = Worker(channel, device_choice)
    except UsageError as error:
        send(channel, Failed("error", str(error), usage=True))
        return
    while True:
        reply = worker.answer(protocol.decode_request(requests.get()))
        try:
            worker.say(reply)
        except BrokenPipeError:
            # The parent is gone, and the listening thread may not have noticed yet.
            _end_with_parent()


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except BaseException:
        traceback.print_exc()
    # The listening thread holds standard input: a normal exit would wait for its lock and abort.
    sys.stderr.flush()
    os._exit(1)
