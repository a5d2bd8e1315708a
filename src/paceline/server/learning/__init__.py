"""Samples of finished streams for `paceline learn`, and the learner process of a server."""
