"""A faster Triton interpreter: the same results without repeated work.

Every call of a device function patches `triton.language` again, although the launch of the kernel
has done so; this takes a third of the time of a kernel with small blocks. The table of NumPy dtypes
is rebuilt at every operation. Every result has a type with a shape and every tensor has a shape of
its own, checked and wrapped again, although a kernel has only a few shapes: another third.

Of what remains, half the time goes into deriving, for every operation, the common type of its two
operands, and into copies of the smaller one to the size of the larger, which NumPy does not need.
Checks for integer overflow are computed but, without debug mode, never read. A cast compares the
names of both dtypes with up to 40 others before it calls NumPy.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy

_SEMANTIC = (
    "binary_op_type_checking_impl", "binary_op_sanitize_overflow_impl", "broadcast_impl_value",
    "cast", "to_tensor", "scalar_constant", "add", "sub", "mul",
)  # fmt: skip


def install() -> None:
    """Patch the interpreter of this process; no effect if it lacks these functions."""
    try:
        from triton.language import core
        from triton.runtime import interpreter
    except ImportError:
        return
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _once(interpreter, core)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _cached_dtypes(interpreter._get_np_dtype, core)
    if all(hasattr(core, name) for name in ("block_type", "tensor", "tuple", "constexpr")):
        _share_shapes(core)
    if hasattr(getattr(interpreter, "TensorHandle", None), "__post_init__"):
        interpreter.TensorHandle.__init__ = _checked_once(interpreter, core)
    semantic = getattr(interpreter, "interpreter_semantic", None)
    if all(hasattr(semantic, name) for name in _SEMANTIC) and all(
        hasattr(module, name)
        for module, name in ((core, "_unwrap_if_constexpr"), (interpreter, "_patch_builtin"))
    ):
        core._unwrap_if_constexpr = _unwrapped_by_type(core)
        semantic.broadcast_impl_value = _unless_equal(semantic)
        semantic.cast = _direct_casts(semantic, interpreter, core)
        semantic.to_tensor = _constants_once(semantic, core)
        semantic.binary_op_sanitize_overflow_impl = _only_in_debug_mode(semantic)
        operands = _Operands(semantic, core)
        semantic.binary_op_type_checking_impl = operands.tensors
        operators = _direct_operators(operands, semantic, core)
        _keep_patches(interpreter, core, semantic, operators)


def _once(interpreter: ModuleType, core: ModuleType) -> Callable[[Any], Any]:
    """Return a `_patch_lang` that does nothing if the modules a function uses are patched."""
    patch = interpreter._patch_lang
    languages = (interpreter.tl, core)

    @functools.cache
    def seen_by(fn: Any) -> tuple[ModuleType, ...]:
        values = fn.__globals__.values()
        return tuple(one for one in languages if any(value is one for value in values))

    def replaced(language: Any) -> bool:
        return not (core.is_builtin(language.load) or core.is_builtin(language.tensor.__add__))

    def patch_once(fn: Any) -> Any:
        seen = seen_by(fn)
        if seen and all(map(replaced, seen)):
            return interpreter._LangPatchScope()
        return patch(fn)

    return patch_once


def _cached_dtypes(find: Callable[[Any], Any], core: ModuleType) -> Callable[[Any], Any]:
    """Return a `_get_np_dtype` with a cache by element type: block types are not hashable."""
    cached = functools.cache(find)

    def np_dtype(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
        return find(element) if isinstance(element, core.pointer_type) else cached(element)

    return np_dtype


class _Shape(NamedTuple):
    """What the constructors of types and tensors derive from the sizes of a block."""

    of_type: Any
    numel: int
    text: str
    of_tensor: Any
    constexpr_numel: Any
    types: dict[str, Any]
    """Types of these sizes, by the name of their dtype."""


def _checked_once(interpreter: ModuleType, core: ModuleType) -> Callable[..., None]:
    """Return a constructor of `TensorHandle` that checks the size of a dtype without calls."""
    check, pointer = interpreter.TensorHandle.__post_init__, core.pointer_type

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if type(dtype) is not pointer and data.itemsize * 8 > dtype.primitive_bitwidth:
            check(self)

    return init


def _share_shapes(core: ModuleType) -> None:
    """Give all types and tensors of the same sizes the same shape, which nothing modifies."""
    block_type, tensor, constexpr = core.block_type, core.tensor, core.constexpr
    new_type, new_tensor, equal = block_type.__init__, tensor.__init__, core.tuple.__eq__

    @functools.cache
    def shape_of(sizes: tuple[int, ...]) -> _Shape:
        example = block_type.__new__(block_type)
        new_type(example, core.float32, list(sizes))
        value = tensor.__new__(tensor)
        new_tensor(value, None, example)
        return _Shape(
            example.shape, example.numel, str(example.shape), value.shape, value.numel, {}
        )

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(one.value if type(one) is constexpr else one for one in shape)
        if not all(type(one) is int for one in sizes):
            return new_type(self, element_ty, shape)
        known = shape_of(sizes)
        self.element_ty, self.shape, self.numel = element_ty, known.of_type, known.numel
        self.name = f"<{known.text}, {element_ty}>"
        self.known_shape = known
        return None

    new_with_element, plain = block_type.with_element_ty, core.dtype

    def with_element(self: Any, element_ty: Any) -> Any:
        known = self.__dict__.get("known_shape")
        if known is None or type(element_ty) is not plain:
            return new_with_element(self, element_ty)
        name = element_ty.name
        if name not in known.types:
            known.types[name] = new_with_element(self, element_ty)
        return known.types[name]

    scalar = tensor.__new__(tensor)
    new_tensor(scalar, None, core.float32)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        known = type.__dict__.get("known_shape")
        if known is not None:
            self.handle, self.type, self.dtype = handle, type, type.element_ty
            self.shape, self.numel = known.of_tensor, known.constexpr_numel
        elif type.is_block():
            new_tensor(self, handle, type)
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = scalar.shape, scalar.numel

    def equal_shapes(self: Any, other: Any) -> Any:
        return constexpr(True) if other is self else equal(self, other)

    equal_dtypes = core.dtype.__eq__

    def equal_or_same(self: Any, other: Any) -> bool:
        return self is other or equal_dtypes(self, other)

    core.dtype.__eq__ = equal_or_same
    block_type.__init__, tensor.__init__ = init_type, init_tensor
    block_type.with_element_ty = with_element
    core.tuple.__eq__ = equal_shapes


class _Match(NamedTuple):
    """What becomes of an operand: its type, and the data of a number."""

    type: Any
    same_type: bool
    same_element: bool
    number: Any


class _Operands:
    """Derives the types of two operands once.

    The operands get the type of the broadcast result, but their data is not broadcast: NumPy does
    so in the operation that follows.
    """

    MAX_KNOWN = 50_000

    def __init__(self, semantic: Any, core: ModuleType) -> None:
        self._semantic = semantic
        self._match = semantic.binary_op_type_checking_impl
        self._tensor = core.tensor
        self._handle = type(semantic.scalar_constant(1, core.int32).handle)
        self._known: dict[Any, tuple[_Match, _Match]] = {}

    def tensors(self, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> tuple[Any, Any]:
        """Replace `binary_op_type_checking_impl`."""
        found = None if named else self._find(lhs, rhs, flags)
        if found is None:
            left, right = self._match(lhs, rhs, *flags, **named)
            return left, right
        return self._as_tensor(lhs, found[0]), self._as_tensor(rhs, found[1])

    def data(self, lhs: Any, rhs: Any) -> tuple[Any, Any, Any] | None:
        """The data of both operands and their common type; None for operands of other classes."""
        found = self._find(lhs, rhs, ())
        if found is None:
            return None
        return self._as_data(lhs, found[0]), self._as_data(rhs, found[1]), found[0].type

    def _find(self, lhs: Any, rhs: Any, flags: tuple[bool, ...]) -> tuple[_Match, _Match] | None:
        left, right = self._key(lhs), self._key(rhs)
        if left is None or right is None:
            return None
        found = self._known.get((left, right, flags))
        if found is None:
            results = self._match(lhs, rhs, *flags)
            if len(self._known) >= self.MAX_KNOWN:
                self._known.clear()
            found = self._learn(lhs, results[0]), self._learn(rhs, results[1])
            self._known[left, right, flags] = found
        return found

    def _key(self, operand: Any) -> Any:
        kind = type(operand)
        if kind is self._tensor:
            return operand.type.name
        return (kind, operand) if kind in _NUMBERS else None

    def _learn(self, before: Any, after: Any) -> _Match:
        if type(before) is self._tensor:
            same_element = before.type.scalar == after.type.scalar
            return _Match(after.type, before.type == after.type, same_element, None)
        number = self._semantic.scalar_constant(before, after.type.scalar).handle.data
        number.flags.writeable = False
        return _Match(after.type, False, False, number)

    def _as_tensor(self, operand: Any, found: _Match) -> Any:
        if found.same_type:
            return operand
        if found.number is not None:
            handle = self._handle(found.number, found.type.scalar)
        elif found.same_element:
            handle = operand.handle
        else:
            handle = self._semantic.cast(operand, found.type.scalar).handle
        return self._tensor(handle, found.type)

    def _as_data(self, operand: Any, found: _Match) -> Any:
        if found.number is not None:
            return found.number
        if found.same_element:
            return operand.handle.data
        return self._semantic.cast(operand, found.type.scalar).handle.data


_NUMBERS = frozenset((int, float, bool))
_ARITHMETIC = {"add": numpy.add, "sub": numpy.subtract, "mul": numpy.multiply}
_COMPARISONS = {
    "lt": numpy.less, "le": numpy.less_equal, "gt": numpy.greater, "ge": numpy.greater_equal,
    "eq": numpy.equal, "ne": numpy.not_equal,
}  # fmt: skip


def _direct_operators(
    operands: _Operands, semantic: Any, core: ModuleType
) -> dict[str, Callable[[Any, Any], Any]]:
    """Return operators of `tensor` that call NumPy at once for numbers: these functions of NumPy
    compute integers and floating-point numbers alike. Pointers have only sums."""
    tensor, pointer_type, handle_of = core.tensor, core.pointer_type, operands._handle

    def arithmetic(name: str, compute: Any, reflected: bool) -> Callable[[Any, Any], Any]:
        usual = getattr(semantic, name)

        def operator(self: Any, other: Any) -> Any:
            other = core._unwrap_if_constexpr(other)
            lhs, rhs = (other, self) if reflected else (self, other)
            if type(self.dtype) is pointer_type:
                return sum_of_pointer(self, other) if name == "add" else usual(lhs, rhs, True)
            if type(other) is tensor and type(other.dtype) is pointer_type:
                return usual(lhs, rhs, True)
            found = operands.data(lhs, rhs)
            if found is None:
                return usual(lhs, rhs, True)
            left, right, common = found
            return tensor(handle_of(compute(left, right), common.scalar), common)

        return operator

    add = semantic.add

    def sum_of_pointer(pointer: Any, offset: Any) -> Any:
        kind = type(offset)
        if kind is not int and not (kind is tensor and offset.dtype.is_int_signed()):
            return add(pointer, offset, True)
        found = operands._find(pointer, offset, (True, True))
        if found is None or not found[0].same_element:
            return add(pointer, offset, True)
        width = max(1, pointer.dtype.element_ty.primitive_bitwidth // 8)
        places = operands._as_data(offset, found[1]).astype(numpy.uint64)
        data = pointer.handle.data + width * places
        return tensor(handle_of(data, pointer.handle.dtype), found[0].type)

    def comparison(usual: Any, compute: Any) -> Callable[[Any, Any], Any]:
        def operator(self: Any, other: Any) -> Any:
            other = semantic.to_tensor(other)
            found = None
            if type(self.dtype) is not pointer_type and type(other.dtype) is not pointer_type:
                found = operands.data(self, other)
            if found is None:
                return usual(self, other, _semantic=semantic)
            left, right, common = found
            result = common.with_element_ty(core.int1)
            return tensor(handle_of(compute(left, right), common.scalar), result)

        return operator

    operators: dict[str, Callable[[Any, Any], Any]] = {}
    for name, compute in _ARITHMETIC.items():
        operators[f"__{name}__"] = arithmetic(name, compute, False)
        operators[f"__r{name}__"] = arithmetic(name, compute, True)
    for name, compute in _COMPARISONS.items():
        operators[f"__{name}__"] = comparison(getattr(tensor, f"__{name}__"), compute)
    return operators


def _constants_once(semantic: Any, core: ModuleType) -> Callable[..., Any]:
    """Return a `to_tensor` that converts a number once."""
    convert, tensor, constexpr = semantic.to_tensor, core.tensor, core.constexpr
    known: dict[Any, tuple[Any, Any, type]] = {}

    def to_tensor(value: Any, check_type: bool = True) -> Any:
        kind = type(value)
        if kind is tensor:
            return value
        if kind is constexpr:
            value = value.value
            kind = type(value)
        if kind not in _NUMBERS:
            return convert(value, check_type)
        found = known.get((kind, value))
        if found is None:
            made = convert(value, check_type)
            made.handle.data.flags.writeable = False
            if len(known) >= _Operands.MAX_KNOWN:
                known.clear()
            found = known[kind, value] = made.handle.data, made.dtype, type(made.handle)
        data, dtype, handle_of = found
        return tensor(handle_of(data, dtype), dtype)

    return to_tensor


_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_WIDE = ("int1", *_INTEGERS, "fp32", "fp64")


def _direct_casts(semantic: Any, interpreter: ModuleType, core: ModuleType) -> Callable[..., Any]:
    """Return a `cast` that calls NumPy at once for dtypes that NumPy has. Casts to int1 compare,
    those of float16 to other dtypes than float32 round twice."""
    cast, tensor, handle_of = semantic.cast, core.tensor, interpreter.TensorHandle
    targets = {name: getattr(core, name) for name in _INTEGERS} | {
        "fp16": core.float16, "fp32": core.float32, "fp64": core.float64
    }  # fmt: skip
    pairs = {(source, target) for source in _WIDE for target in targets} | {("fp16", "fp32")}
    data_types = {
        pair: interpreter._get_np_dtype(targets[pair[1]]) for pair in pairs if len({*pair}) == 2
    }

    def direct_cast(value: Any, dtype: Any, rounding: str | None = None) -> Any:
        before = value.dtype
        if before is dtype:
            return value
        found = data_types.get((before.name, dtype.name)) if rounding is None else None
        if found is None:
            return cast(value, dtype, rounding)
        kind = value.type.with_element_ty(dtype) if value.type.is_block() else dtype
        return tensor(handle_of(value.handle.data.astype(found), dtype), kind)

    return direct_cast


def _unless_equal(semantic: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return a `broadcast_impl_value` that returns tensors of equal sizes at once."""
    broadcast = semantic.broadcast_impl_value

    def broadcast_unless_equal(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        # Equal sizes have the same shape, and so do scalars: see `_share_shapes`.
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(lhs, rhs)

    return broadcast_unless_equal


def _unwrapped_by_type(core: ModuleType) -> Callable[[Any], Any]:
    """Return an `_unwrap_if_constexpr` that looks at a value once."""
    unwrap, constexpr = core._unwrap_if_constexpr, core.constexpr
    plain = {core.tensor, core.dtype, core.pointer_type, core.block_type, int, float, bool, str}

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is constexpr else unwrap(value)

    return unwrapped


def _only_in_debug_mode(semantic: Any) -> Callable[..., None]:
    """Return a `binary_op_sanitize_overflow_impl` that computes what is read only."""
    check = semantic.binary_op_sanitize_overflow_impl

    def check_if_read(*operands: Any) -> None:
        if semantic.builder.options.debug:
            check(*operands)

    return check_if_read


def _keep_patches(
    interpreter: ModuleType,
    core: ModuleType,
    semantic: Any,
    operators: dict[str, Callable[[Any, Any], Any]],
) -> None:
    """Find the functions of `triton.language` that a launch replaces, and wrap them, once."""

    @functools.cache
    def interpreted(member: Any) -> Callable[..., Any]:
        # Without the wrapper of a builtin, which checks for the argument that is passed here.
        function = getattr(member, "__wrapped__", member)

        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*arguments, **named)

        return call

    kept: dict[Any, tuple[tuple[str, Callable[..., Any]], ...]] = {}

    def patch(package: Any, builder: Any, scope: Any) -> None:  # noqa: ARG001
        if package not in kept:
            members = inspect.getmembers(package, core.is_builtin)
            if not members:
                # Replaced already.
                return
            direct = operators if package is core.tensor else {}
            kept[package] = tuple(
                (name, direct.get(name) or interpreted(member)) for name, member in members
            )
        for name, function in kept[package]:
            scope.set_attr(package, name, function)

    interpreter._patch_builtin = patch
