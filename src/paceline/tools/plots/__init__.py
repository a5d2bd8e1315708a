"""Plots of reports, simulations and plans."""
