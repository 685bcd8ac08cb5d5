"""``kvcore demo``: a real model's prefill and decode in two processes, its KV pages moved by kvcore, its tokens checked.

Written to be read by whoever fits kvcore into an engine. ``prefill.py`` and ``decode.py`` are the two sides, with all uses of
kvcore; ``driver.py`` starts them and judges what they report; ``messages.py`` is what they tell each other over the pipes of
``kvcore.sides``, as a router would; ``models.py`` and ``prompts.py`` make the models and the prompts; ``command.py`` is the command line.
"""
