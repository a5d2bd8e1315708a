"""Makes Triton's interpreter faster by caching what it repeats at each operation. The numpy calls stay the same.

For small blocks, most of the time is spent on types: the interpreter builds the type of every shape, rebuilds its table of
numpy types at every lookup, and broadcasts blocks to the shape they already have.
"""

from typing import Any

from triton import language as tl
from triton.runtime import interpreter


def speed_up() -> None:
    """Patch the interpreter. Call it before the interpreter replaces the functions of the language."""
    interpreter._patch_attr = _replace
    interpreter._get_np_dtype = _cache_types(interpreter._get_np_dtype)
    _compute_tuple_types_lazily(tl.core.tuple)
    _share_shapes(tl.core.block_type, tl.core.tensor)
    _skip_needless_broadcasts(type(interpreter.interpreter_semantic))
    _compare_identity_first(tl.core.dtype)


def _replace(holder: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Replace a function of the language. Its wrapper only checks for the argument that is passed here."""
    is_checked = getattr(member, "__code__", None) is tl.core.add.__code__
    compute = member.__wrapped__ if is_checked else member

    def computed(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return compute(*args, _semantic=interpreter.interpreter_semantic, **kwargs)

    scope.set_attr(holder, name, computed)


def _cache_types(look_up: Any) -> Any:
    known: dict[str, Any] = {}

    def numpy_type(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = look_up(kind)
        return known[name]

    return numpy_type


def _compute_tuple_types_lazily(kind: Any) -> None:
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
    """Share one shape object among all blocks of that shape, checked at first use."""
    check = block.__init__
    seen: dict[tuple[int, ...], tuple[Any, ...]] = {}
    """(shape and size of the type, shape and size of the tensor); a type has integers, a tensor has constants."""

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


def _skip_needless_broadcasts(semantic: Any) -> None:
    broadcast = semantic.broadcast_impl_value

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        same = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_impl_value


def _compare_identity_first(dtype: Any) -> None:
    compare = dtype.__eq__
    dtype.__eq__ = lambda self, other: self is other or compare(self, other)
