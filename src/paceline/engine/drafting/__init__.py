"""Parts of the speculator: the next depths, the traffic class of a sequence, the cost of drafting, and a step's observation."""
