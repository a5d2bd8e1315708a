"""Traffic classes by short names."""

from paceline.core.traffic import TrafficClass


def traffic_class(name: str) -> TrafficClass:
    """The class of `method/category`. Without a slash, the category is empty."""
    method, _, category = name.partition("/")
    return TrafficClass(method, category)


CHAT, CODE, PROSE, POETRY = map(traffic_class, ("chat", "code", "prose", "poetry"))
