"""Parts that listen to the steps of an engine."""
