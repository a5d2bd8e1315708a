"""Live pools on Ray: workers as named, detached actors, and the actor that starts and drains them"""
