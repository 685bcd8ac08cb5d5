"""The backends that come with kvcore; importing this package imports none of them (B1)."""
