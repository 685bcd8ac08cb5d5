"""``kvcore doctor``: what is installed, and whether it works here.

``examination.py`` drives one backend's check, ``patient.py`` is what its two processes do, ``command.py`` is the command line. A backend
is imported in those processes only, so one that hangs or crashes takes nothing with it.
"""
