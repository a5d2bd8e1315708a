"""The parts of a model's weights as workers exchange them."""
