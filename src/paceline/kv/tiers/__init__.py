"""Where cached blocks go when the device has no room for them, and how they come back."""
