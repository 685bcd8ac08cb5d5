"""Code that fits kvcore to other libraries. Each module needs the extra of its own name, e.g. ``kvcore[transformers]``."""
