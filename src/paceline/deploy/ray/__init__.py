"""Workers as Ray actors: named and detached, and the actor that starts and drains them."""
