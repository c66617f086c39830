"""From boundaries in a decode cycle to exclusive phases in the registry.

`clocks` reads time at a boundary, `cycle` turns boundaries into phases, `recorder` adds them to a rank's file, and
`budget` keeps the cost of all this where it was promised.
"""
