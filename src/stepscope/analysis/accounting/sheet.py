"""A calculation as data: given values, questions, and their answers line by line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from stepscope.analysis.accounting.formula import Formula, Number, quantity
from stepscope.analysis.accounting.inputs import SYMBOLS, Inputs


class Given(msgspec.Struct, frozen=True):
    """An input by its symbol."""

    symbol: str
    value: float
    unit: str
    meaning: str

    @property
    def shown(self) -> str:
        return quantity(self.value, self.unit)


class Line(msgspec.Struct, frozen=True):
    """One line of a derivation: `left` = or ≤ `forms`, with numbers, and the result."""

    left: str
    """Symbol that the line defines; empty for a comparison."""
    forms: tuple[str, ...]
    """The formula, and the same one in the given symbols if that is another."""
    numbers: str
    """The last form with numbers in place of the symbols."""
    value: float | bool | str
    """The result; text for an equation between arrays, which has no value."""
    unit: str
    why: str

    @property
    def shown(self) -> str:
        """The result with its unit."""
        if isinstance(self.value, str):
            return self.value
        if isinstance(self.value, bool):
            return "true" if self.value else "false"
        return quantity(self.value, self.unit)


class Answer(msgspec.Struct, frozen=True):
    """The answer to one question: a code, its values and a sentence, and how it is derived."""

    part: str
    """The letter of the question in the course, or a word for a further one."""
    code: str
    question: str
    lines: tuple[Line, ...]
    values: dict[str, float | bool]
    text: str


class Worked(msgspec.Struct, frozen=True):
    """A calculation with numbers."""

    name: str
    title: str
    edition: str
    """Year of the course whose problem has this name; empty for a calculation of our own."""
    givens: tuple[Given, ...]
    answers: tuple[Answer, ...]


class Sheet:
    """Collects the givens, lines and answers of a calculation. Formulas are as in `Formula`."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.givens: list[Given] = []
        self.answers: list[Answer] = []
        self._names: dict[str, Number] = {}
        self._sources: dict[str, str] = {}
        self._shown: dict[str, _Shown] = {}
        self._lines: list[Line] = []
        self._values: dict[str, float | bool] = {}
        self._part = self._question = ""

    def given(self, *symbols: str) -> None:
        """Take inputs by their symbols; `X=N_FSDP` takes one by another symbol."""
        for entry in symbols:
            name, _, source = entry.partition("=")
            symbol = SYMBOLS[source or name]
            value = symbol.value(self.inputs)
            self._define(name, value, symbol.unit, name)
            self.givens.append(Given(name, plain(value), symbol.unit, symbol.meaning))

    def part(self, part: str, question: str) -> None:
        """Begin a question: the letter that it has in the course, or a word."""
        self._part, self._question = part, question
        self._lines, self._values = [], {}

    def let(self, name: str, source: str, unit: str, why: str = "", *, closed: str = "") -> Number:
        """Define a symbol. `closed` is the same formula in the given symbols."""
        forms = tuple(Formula(text) for text in (source, closed) if text)
        value: Number = forms[0].value(self._names)
        shown = tuple(form.text() for form in forms)
        numbers = forms[-1].text(self._names)
        self._lines.append(Line(name, shown, numbers, plain(value), unit, why))
        self._define(name, value, unit, shown[-1])
        self._sources[name] = closed or source
        self._values[name] = plain(value)
        return value

    def check(self, source: str, why: str = "") -> bool:
        """Add a comparison and return whether it is true."""
        form = Formula(source)
        holds: bool = form.value(self._names)
        self._lines.append(Line("", (form.text(),), form.text(self._names), holds, "", why))
        return holds

    def equation(self, text: str, why: str = "") -> None:
        """Add an equation between arrays, which has no value."""
        left, _, right = text.partition(" = ")
        self._lines.append(Line(left, (right,), "", "", "", why))

    def source(self, name: str) -> str:
        """The formula of a symbol in the given symbols, to build another one."""
        return self._sources[name]

    def value(self, name: str) -> Number:
        return self._names[name]

    @property
    def names(self) -> tuple[str, ...]:
        """Symbols that are defined so far."""
        return tuple(self._names)

    def answer(self, code: str, text: str, **values: bool) -> None:
        """End the question. In the text, {x} is a value with its unit and {x:f} its formula."""
        self._values |= values
        self.answers.append(
            Answer(
                part=self._part,
                code=code,
                question=self._question,
                lines=tuple(self._lines),
                values=dict(self._values),
                text=text.format_map(self._shown),
            )
        )

    def _define(self, name: str, value: Number, unit: str, form: str) -> None:
        self._names[name] = value
        self._shown[name] = _Shown(quantity(value, unit), form)


class _Shown:
    """A symbol within the text of an answer."""

    def __init__(self, value: str, form: str) -> None:
        self._value, self._form = value, form

    def __format__(self, spec: str) -> str:
        return self._form if spec == "f" else self._value


def plain(value: Number) -> float:
    """An int or a float, for JSON."""
    return int(value) if value == int(value) and abs(float(value)) < 2**63 else float(value)


class Calculation(msgspec.Struct, frozen=True):
    """A named calculation: the inputs that it takes with their defaults, and how it is worked."""

    name: str
    title: str
    edition: str
    defaults: Mapping[str, float]
    work: Callable[[Sheet], None]

    def worked(self, **given: Any) -> Worked:
        """Work it out with these inputs, and with the defaults of the others."""
        sheet = Sheet(Inputs.of(self.name, self.defaults, given))
        self.work(sheet)
        return Worked(
            self.name, self.title, self.edition, tuple(sheet.givens), tuple(sheet.answers)
        )
