"""Settings of the server: file, environment, command line, run-time flags."""
