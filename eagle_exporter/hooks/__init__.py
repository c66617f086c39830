"""All knowledge of SGLang: where to attach, what a cycle's result means, which rank this is.

Runs inside SGLang's processes, with the standard library and the torch and sglang that are loaded there.
"""
