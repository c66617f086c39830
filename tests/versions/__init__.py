"""Every SGLang from 0.5.6 to 0.5.23: its wheel, as it was released, read as text and held to the hook points.

Nothing of SGLang is imported or installed. What a version does when it runs is in tests/sglang.
"""
