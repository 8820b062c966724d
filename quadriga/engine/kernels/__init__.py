"""CPU kernels of the engine: C++ sources, their build cache, and their ctypes interface."""
