"""The model repository: which models may be served, how large they are, and what is on record.

sizes        parameters and KV, layer by layer, from a `config.json`
headers      safetensors by their headers: what is missing, cut short, or not a number
inspection   one checkpoint folder looked at without loading it
records      the plain values
files        YAML, folders and the bundled family: reading and writing
"""
