"""The demo: a tiny EAGLE-3 model pair with known answers, served by the real SGLang on the CPU.

Importing this package, or any module in it, needs neither torch nor sglang.
"""
