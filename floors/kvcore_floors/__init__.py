"""Engines used directly, with nothing of kvcore between: the floors of ``kvcore bench``. No manager imports this."""
