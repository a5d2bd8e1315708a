"""Loading of weights from other workers, and serving of weights to them."""
