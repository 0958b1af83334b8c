"""Triton's interpreter, several times as fast, to the same bits."""

from __future__ import annotations

from typing import Any

from triton import language
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

NUMBERS = (int, float, bool)


def patch_language_once() -> None:
    """Each call of a device function patches `triton.language` anew, which is already patched: half
    of the interpreter's time. A third of the rest makes the same types again and again.
    """
    patched: set[int] = set()
    patch = interpreter._patch_lang
    changes: dict[tuple[int, ...], list[tuple[Any, str, Any]]] = {}

    def patch_again(fn: Any) -> Any:
        key = tuple(id(x) for x in fn.__globals__.values() if x is core or x is language)
        if key not in changes:
            scope = patch(fn)
            changes[key] = [(obj, name, vars(obj)[name]) for obj, name, _ in scope._changes]
            return scope
        scope = interpreter._LangPatchScope()
        for change in changes[key]:
            scope.set_attr(*change)
        return scope

    def call(self: Any, *args: Any, **options: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in patched:
            patched.add(module)
            patch(self.fn)
        return self.rewrite()(*args, **options)

    interpreter.InterpretedFunction.__call__ = call
    interpreter._patch_lang = patch_again
    _remember_types()
    _pass_over_what_changes_nothing()
    _make_operands_without_copies()
    _call_builtins_at_once()


def _call_builtins_at_once() -> None:
    """A built-in is called through a lambda, a copy of its options and a check that the interpreter
    was handed on, which it is: here with what it wraps.
    """

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inside, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def called(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return inside(*args, **options)

        scope.set_attr(obj, name, called)

    interpreter._patch_attr = patch_attr


def _make_operands_without_copies() -> None:
    """In a profile of two tests of the joint backward, two fifths of the rest found the common type
    and shape of two operands, and filled arrays with copies of scalars, rows and columns. The type
    depends on the names of both types alone, and NumPy broadcasts arrays by itself: a tensor here
    has the type of the whole, and one scalar's or row's data, until the operation that both are
    for. What fails is left to Triton to say.
    """
    check = TritonSemantic.binary_op_type_checking_impl
    results: dict[tuple[Any, ...], Any] = {}
    constants: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    wholes: dict[tuple[Any, ...], list[int]] = {}
    make, tensor = TensorHandle.__post_init__, core.tensor
    fitting: set[tuple[int, str]] = set()

    def handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        key = data.itemsize, dtype.name
        if key not in fitting:
            make(self)
            fitting.add(key)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        output, kind = op(lhs.data, rhs.data), lhs.dtype.scalar
        if (output.itemsize, kind.name) not in fitting and not interpreter._validate_np_data_size(
            output, kind
        ):
            output = output.astype(interpreter._get_np_dtype(kind))
        return TensorHandle(output, kind)

    def with_type_of(other: Any, x: Any) -> Any:
        """x of other's type but for the element's, with its own data."""
        kind = other.type if x.dtype is other.dtype else core.block_type(x.dtype, other.type.shape)
        return tensor(TensorHandle(x.handle.data, x.handle.dtype), kind)

    def of_shape(x: Any, shape: list[int]) -> Any:
        if x.type.shape.values == shape:
            return x
        kind = core.block_type(x.dtype, shape)
        return tensor(TensorHandle(x.handle.data, x.handle.dtype), kind)

    def with_number(
        self: Any, number: Any, x: Any, first: bool, pointers: tuple[bool, bool], div_or_mod: bool
    ) -> tuple[Any, Any]:
        key = type(number), number if number else str(number), x.dtype.name, first, div_or_mod
        if (known := constants.get(key)) is None:
            both = (number, x) if first else (x, number)
            made = check(self, *both, *pointers, True, div_or_mod)[0 if first else 1].handle
            known = constants[key] = made.data.reshape(-1)[:1].copy(), made.dtype
            known[0].flags.writeable = False
        data, kind = known
        if x.dtype.name != kind.name:
            x = self.cast(x, kind)
        made = tensor(TensorHandle(data, kind), x.type)
        return (made, x) if first else (x, made)

    def result_of(self: Any, a: Any, b: Any, div_or_mod: bool) -> Any:
        key = a.name, b.name, div_or_mod
        if key not in results:
            results[key] = self.computation_type_impl(a, False, b, False, div_or_mod)
        return results[key]

    def quick_check(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        pointers = allow_lhs_ptr, allow_rhs_ptr
        if type(lhs) is not tensor or type(rhs) is not tensor:
            first = type(lhs) in NUMBERS
            number, x = (lhs, rhs) if first else (rhs, lhs)
            if (
                arithmetic_check
                and type(number) in NUMBERS
                and type(x) is tensor
                and not x.dtype.is_ptr()
            ):
                return with_number(self, number, x, first, pointers, div_or_mod)
            return check(self, lhs, rhs, *pointers, arithmetic_check, div_or_mod)
        a, b = lhs.dtype, rhs.dtype
        if a.is_ptr() or b.is_ptr():
            self.check_ptr_type_impl(a, b, allow_lhs_ptr)
            self.check_ptr_type_impl(b, a, allow_rhs_ptr)
        elif arithmetic_check:
            wanted = result_of(self, a, b, div_or_mod)
            if a.name != wanted.name:
                lhs = self.cast(lhs, wanted)
            if b.name != wanted.name:
                rhs = self.cast(rhs, wanted)
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if not rhs.type.is_block():
            return lhs, with_type_of(lhs, rhs)
        if not lhs.type.is_block():
            return with_type_of(rhs, lhs), rhs
        key = *lhs.type.shape.values, None, *rhs.type.shape.values
        if (shape := wholes.get(key)) is None:
            shape = wholes[key] = self.broadcast_impl_value(lhs, rhs)[0].type.shape.values
        return of_shape(lhs, shape), of_shape(rhs, shape)

    TensorHandle.__init__ = handle  # type: ignore[method-assign]
    interpreter.InterpreterBuilder.binary_op = binary_op
    TritonSemantic.binary_op_type_checking_impl = quick_check  # type: ignore[method-assign]


def _pass_over_what_changes_nothing() -> None:
    """A fifth of the rest compares each sum and product of integers with the limits of its type,
    and without `debug` drops the answer; a tenth finds that equal shapes need no broadcast.
    """
    sanitize = TritonSemantic.binary_op_sanitize_overflow_impl
    broadcast = TritonSemantic.broadcast_impl_value

    def quick_sanitize(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            sanitize(self, lhs, rhs, binary_op)

    def quick_broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a.is_block():
            if b.is_block() and a.shape.values == b.shape.values:
                return lhs, rhs
        elif not b.is_block():
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.binary_op_sanitize_overflow_impl = quick_sanitize  # type: ignore[method-assign]
    TritonSemantic.broadcast_impl_value = quick_broadcast  # type: ignore[method-assign]


def _remember_types() -> None:
    """What depends on a type alone is worked out once a type."""
    made: dict[tuple[Any, ...], Any] = {}
    make, to_numpy = core.block_type.__init__, interpreter._get_np_dtype
    in_numpy: dict[str, Any] = {}
    shapes: dict[tuple[int, ...], Any] = {}
    make_tensor = core.tensor.__init__
    unwrap, plain = core._unwrap_if_constexpr, (int, core.tensor, core.dtype, type(None))

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (str(element_ty), *map(quick_unwrap, shape))
        if (known := made.get(key)) is None:
            make(self, element_ty, shape)
            made[key] = self
            return
        self.element_ty, self.shape = element_ty, known.shape
        self.numel, self.name = known.numel, known.name
        if (shape_of_tensor := shapes.get(key[1:])) is not None:
            self.of_tensor = (element_ty, *shape_of_tensor)

    def np_dtype(tt_dtype: Any) -> Any:
        name = str(getattr(tt_dtype, "element_ty", tt_dtype) if tt_dtype.is_block() else tt_dtype)
        if name not in in_numpy:
            in_numpy[name] = to_numpy(tt_dtype)
        return in_numpy[name]

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type = handle, kind
        known = getattr(kind, "of_tensor", None)
        if known is None:
            make_tensor(self, handle, kind)
            key = tuple(kind.shape) if kind.is_block() else ()
            known = kind.scalar, *shapes.setdefault(key, (self.shape, self.numel))
            kind.of_tensor = known
        self.dtype, self.shape, self.numel = known

    def quick_unwrap(o: Any) -> Any:
        kind = type(o)
        if kind is core.constexpr:
            return o.value
        return o if kind in plain else unwrap(o)

    core.tensor.__init__ = tensor  # type: ignore[method-assign]
    core.block_type.__init__ = block_type  # type: ignore[method-assign]
    interpreter._get_np_dtype = np_dtype
    core._unwrap_if_constexpr = quick_unwrap
