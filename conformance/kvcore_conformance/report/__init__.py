"""The report of a run: one model, and the forms in which it is written."""
