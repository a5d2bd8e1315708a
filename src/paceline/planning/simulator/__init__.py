"""A discrete-event simulation of target workers behind the production router."""
