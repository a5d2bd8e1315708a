"""What one worker costs: step times, memory, start-up, links and price."""
