"""What was observed about the lines of the user's code in one step: plain data of a record."""

from __future__ import annotations

import msgspec

ATTACHMENT = "lines"
"""Name of the attachment of a record."""


class Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parts."""


class Place(Data, frozen=True):
    """A line of the user's code, within a function."""

    file: str
    """Relative to the folder of the script, where possible."""
    line: int
    function: str
    code: str
    """The text of the line."""

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


class Loop(Data, frozen=True):
    """A Python loop that ran operators."""

    place: int
    """Index of its header."""
    entries: int
    """How often the loop began."""
    iterations: int
    """Iterations of all entries."""
    operators: int
    """Operators of the forward pass in it that compute something."""
    carried: int
    """Those that depend on an earlier iteration."""
    matmuls: int = 0
    """Matmuls and convolutions among them."""
    softmaxes: int = 0
    parameters: int = 0
    """Parameters that it reads."""
    parameter_reads: int = 0
    """Iterations that read a parameter, summed over the parameters."""
    updated: int = 0
    """Parameters or gradients that its iterations write."""
    gradients: int = 0
    """Gradients that it reads or writes."""
    trains: bool = False
    """It contains a backward pass: a loop of the training itself."""


class Site(Data, frozen=True):
    """What one line launched, along one stack of calls; all numbers are per step."""

    stack: tuple[int, ...]
    """Indices of the places of the calls, outermost first; the last one is the line."""
    loops: tuple[int, ...] = ()
    """Indices of the loops around it, in all functions of the stack, outermost first."""
    own: bool = True
    """False if a library that the line calls launched the operators."""
    call: str = ""
    """The function, method or syntax that was executed."""
    runs: int = 0
    """Executions of the call."""
    operators: int = 0
    """Operators that it launched, without those of the backward pass."""
    backward: int = 0
    """Operators of the backward pass that belong to it."""
    waits: int = 0
    """Operators that wait for the GPU because their result is read by the CPU."""
    reads: int = 0
    """Operators that would wait on a GPU: their result has values that the CPU needs."""
    uploads: int = 0
    """Copies from the CPU to the device."""
    casts: int = 0
    """Copies to another dtype."""
    layouts: int = 0
    """Copies that make a tensor contiguous."""
    copied_bytes: int = 0
    allocated_bytes: int = 0
    same: int = 0
    """Operators whose result is a constant: it depends on no parameter and no input, and its
    values were the same in two steps."""
    same_bytes: int = 0
    computed: int = 0
    """Elements of the results of its matmuls."""
    unused: int = 0
    """Those in rows that nothing in the forward pass reads."""
    host_ms: float = 0.0
    """CPU time of its operators, with the Python code before them; scaled to the timed step."""
    device_ms: float = 0.0
    """Kernels that it launched; zero on a CPU."""
    wait_ms: float = 0.0
    """The part of `host_ms` in which the CPU waited for the device."""
    cost_ms: float = 0.0
    """Its share of the step: every moment belongs to one line, so that all of them together take at
    most a step."""
    same_ms: float = 0.0
    """The part of `cost_ms` of operators with the same result in every step."""
    copy_ms: float = 0.0
    """The part of `cost_ms` of copies."""


class Labels(Data, frozen=True):
    """Labels of a loss, of which some are ignored."""

    site: int
    """Where the loss is computed."""
    head: int = -1
    """Where the logits are computed; -1 if unknown."""
    labels: int = 0
    ignored: int = 0


class Padding(Data, frozen=True):
    """Tokens of the batches, of which some are padding."""

    site: int
    """Where the tokens are embedded."""
    tokens: int = 0
    padding: int = 0


class Loading(Data, frozen=True):
    """Samples of the Python code of a DataLoader's dataset."""

    place: int
    samples: int
    total: int
    """All samples."""
    in_worker: bool = False


class Lines(Data, frozen=True):
    """The lines of one step."""

    on_device: bool
    step_ms: float = 0.0
    places: tuple[Place, ...] = ()
    loops: tuple[Loop, ...] = ()
    sites: tuple[Site, ...] = ()
    labels: tuple[Labels, ...] = ()
    padding: tuple[Padding, ...] = ()
    loading: tuple[Loading, ...] = ()
    loading_ms: float = 0.0
    """Time per step that the program waits for its DataLoader."""

    def place(self, site: Site) -> Place | None:
        """The line of the site; None if no code of the user is on its stack."""
        return self.places[site.stack[-1]] if site.stack else None
