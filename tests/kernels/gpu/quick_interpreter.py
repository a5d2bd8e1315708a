"""What Triton's interpreter repeats at each operation of a kernel, done once: the same numpy calls with the same arguments.

An operation on a block of a few numbers is hardly more than its types. The interpreter spells out the type of every shape,
builds its table of numpy's types again whenever it looks into it, and broadcasts blocks to the shape that they have.
"""

from typing import Any

from triton import language as tl
from triton.runtime import interpreter


def hasten() -> None:
    """Before the functions of the language are replaced: it changes how."""
    interpreter._patch_attr = _replace
    interpreter._get_np_dtype = _remember_types(interpreter._get_np_dtype)
    _name_types_when_asked(tl.core.tuple)
    _share_shapes(tl.core.block_type, tl.core.tensor)
    _leave_shapes_that_fit(type(interpreter.interpreter_semantic))
    _know_oneself(tl.core.dtype)


def _replace(holder: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """A function of the language by one that computes. Its wrapper only checks for the argument that is given here."""
    is_checked = getattr(member, "__code__", None) is tl.core.add.__code__
    compute = member.__wrapped__ if is_checked else member

    def computed(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return compute(*args, _semantic=interpreter.interpreter_semantic, **kwargs)

    scope.set_attr(holder, name, computed)


def _remember_types(look_up: Any) -> Any:
    known: dict[str, Any] = {}

    def numpy_type(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = look_up(kind)
        return known[name]

    return numpy_type


def _name_types_when_asked(kind: Any) -> None:
    def construct(self: Any, args: Any, type: Any = None) -> None:
        self.values = list(args)
        self._type = tl.core.tuple_type(type) if type is not None and not isinstance(type, tl.core.tuple_type) else type

    def type_of(self: Any) -> Any:
        if self._type is None:
            self._type = tl.core._type_for_tuple_values(self.values)
        return self._type

    kind.__init__ = construct
    kind.type = property(type_of, lambda self, type: setattr(self, "_type", type))


def _share_shapes(block: Any, tensor: Any) -> None:
    """Blocks of one shape have it as one object, checked when it is first seen."""
    check = block.__init__
    seen: dict[tuple[int, ...], tuple[Any, ...]] = {}
    """(shape and size of the type, shape and size of a tensor): a type has integers, a tensor constants."""

    def facts(sizes: tuple[int, ...], shape: Any, size: int) -> tuple[Any, ...]:
        return shape, size, tl.core.tuple([tl.core.constexpr(one) for one in sizes]), tl.core.constexpr(size)

    def construct_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(shape, "values", shape))
        if sizes not in seen:
            check(self, element_ty, shape)
            sizes = tuple(self.shape.values)
            seen.setdefault(sizes, facts(sizes, self.shape, self.numel))
        self.element_ty, self.facts = element_ty, seen[sizes]
        self.shape, self.numel = self.facts[:2]

    scalar = facts((), None, 1)

    def construct_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = (type.facts if type.is_block() else scalar)[2:]

    block.__init__, tensor.__init__ = construct_block, construct_tensor
    block.name = property(lambda self: f"<{self.shape}, {self.element_ty}>", lambda self, name: None)


def _leave_shapes_that_fit(semantic: Any) -> None:
    broadcast = semantic.broadcast_impl_value

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        same = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_impl_value


def _know_oneself(dtype: Any) -> None:
    compare = dtype.__eq__
    dtype.__eq__ = lambda self, other: self is other or compare(self, other)
