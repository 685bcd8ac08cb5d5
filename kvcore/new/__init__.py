"""``kvcore new``: a plugin project to start from, made from the example ``kvcore-shm``."""
