"""Tools that are not part of serving. No serving package imports them."""
