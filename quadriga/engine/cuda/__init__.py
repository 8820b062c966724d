"""The native engine on a GPU: KV in pages, attention over page tables, decode passes as graphs.

Everything but the kernels and the graphs themselves runs on CPUs too, and is tested there.
"""
