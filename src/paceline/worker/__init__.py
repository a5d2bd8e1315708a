"""A worker process: its server, its engine or upstream server, and the hand-off of prompts."""
