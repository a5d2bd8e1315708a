"""The description of a model, and how it is read for each family. One module describes one family, or a few that are alike."""
