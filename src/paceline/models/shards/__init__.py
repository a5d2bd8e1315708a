"""The shapes of a model's weights, and their split over ranks."""
