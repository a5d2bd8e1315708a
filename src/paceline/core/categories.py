"""A bounded set of traffic categories: callers choose the names, so there may be any number of them."""

MAX_CATEGORIES = 32
OTHER = "other"


class Categories:
    """The first `limit` names stand for themselves, every later one for `other`."""

    def __init__(self, limit: int = MAX_CATEGORIES) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def fold(self, name: str) -> str:
        if name in self._known:
            return name
        if len(self._known) >= self._limit:
            return OTHER
        self._known.add(name)
        return name
