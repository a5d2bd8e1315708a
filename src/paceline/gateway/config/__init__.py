"""Configuration of the server: file, environment, command line and run-time flags."""
