"""Messages between a runner and its worker: one JSON object per line."""

from __future__ import annotations

from typing import Any

import msgspec

from stepscope.records.decoding import from_json
from stepscope.records.schema import Ceiling, Environment, Status
from stepscope.studies.base import Measurement


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages; the class name is the tag."""


class MeasureCeilings(Message, frozen=True):
    again: bool
    """Ignore the cache."""


class MeasureCase(Message, frozen=True):
    study: str
    config: dict[str, Any]


class CheckModel(Message, frozen=True):
    """Build the model of this name, to check that it can be built."""

    model: str


class DismissFollowers(Message, frozen=True):
    """Under torchrun: no further case follows."""


Request = MeasureCeilings | MeasureCase | CheckModel | DismissFollowers


class Ready(Message, frozen=True):
    """Sent once, when the worker has opened its device."""

    environment: Environment
    lacks: dict[str, str]


class Progress(Message, frozen=True):
    done: int
    total: int
    what: str


class Ceilings(Message, frozen=True):
    ceilings: tuple[Ceiling, ...]


class Measured(Message, frozen=True):
    measurement: Measurement


class Failed(Message, frozen=True):
    """The work failed; `usage` marks an error of the user's input, with its own exit code."""

    status: Status
    reason: str
    usage: bool = False
    noise: bool = False
    """The line received is not a message."""
    attachments: dict[str, Any] = {}


class Dismissed(Message, frozen=True):
    """The other ranks have received the request to end."""


class Checked(Message, frozen=True):
    """The model can be built."""


Reply = Ready | Progress | Ceilings | Measured | Checked | Dismissed | Failed


def encode(message: Message) -> bytes:
    return msgspec.json.encode(message)


def decode_request(line: bytes) -> Request:
    request: Request = from_json(line, Request)  # type: ignore[call-overload]
    return request


def decode_reply(line: bytes) -> Reply:
    reply: Reply = from_json(line, Reply)  # type: ignore[call-overload]
    return reply
