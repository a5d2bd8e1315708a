"""The loop: schedule, propose, verify, commit."""
